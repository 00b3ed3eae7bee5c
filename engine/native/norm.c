#include "norm.h"

#include <math.h>

#define MIX 24 /* 4 pre, 4 post, 16 comb */

INLINE float inverse_rms(const float* x, int64_t n, float eps) {
    vf a = {0}, b = {0};
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        vf u = load(x + i), v = load(x + i + LANES);
        a += u * u;
        b += v * v;
    }
    for (; i < n; i += LANES) {
        vf u = load(x + i);
        a += u * u;
    }
    return 1.0f / sqrtf(sum(a + b) / (float)n + eps);
}

INLINE void scaled(float* out, const float* x, const float* weight, float factor, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        vf v = load(x + i) * splat(factor);
        store(out + i, weight ? v * load(weight + i) : v);
    }
}

void rms_norm(float* out, const float* x, int64_t x_stride, const float* weight, int64_t rows, int64_t n,
              float eps) {
    for (int64_t r = 0; r < rows; r++) {
        const float* row = x + r * x_stride;
        scaled(out + r * n, row, weight, inverse_rms(row, n, eps), n);
    }
}

void rotate(float* x, const float* turns, int64_t rows, int64_t heads, int64_t stride, int64_t n, int64_t pairs) {
    for (int64_t r = 0; r < rows; r++) {
        float* tail = x + r * stride + n - 2 * pairs;
        const float* t = turns + r / heads * 2 * pairs;
        for (int64_t i = 0; i < 2 * pairs; i += 2) {
            float a = tail[i], b = tail[i + 1];
            tail[i] = a * t[i] - b * t[i + 1];
            tail[i + 1] = a * t[i + 1] + b * t[i];
        }
    }
}

INLINE vf sigmoid_vf(vf x) { return 1.0f / (1.0f + exp_vf(-x)); }

INLINE vf greater(vf a, vf b) { return select_vf(a > b, a, b); }

/* Sixteen tokens at once, a lane each: c[4 j + k] is entry (j, k) of every token's matrix. */
INLINE void sinkhorn(vf c[16], int64_t iterations, float eps) {
    UNROLL for (int j = 0; j < 4; j++) {
        vf top = greater(greater(c[4 * j], c[4 * j + 1]), greater(c[4 * j + 2], c[4 * j + 3])), total = {0};
        UNROLL for (int k = 0; k < 4; k++) total += c[4 * j + k] = exp_vf(c[4 * j + k] - top);
        UNROLL for (int k = 0; k < 4; k++) c[4 * j + k] = c[4 * j + k] / total + eps;
    }
    for (int64_t i = 0; i < iterations; i++) {
        if (i > 0) UNROLL for (int j = 0; j < 4; j++) {
                vf inverse = 1.0f / (c[4 * j] + c[4 * j + 1] + c[4 * j + 2] + c[4 * j + 3] + eps);
                UNROLL for (int k = 0; k < 4; k++) c[4 * j + k] *= inverse;
            }
        UNROLL for (int k = 0; k < 4; k++) {
            vf inverse = 1.0f / (c[k] + c[4 + k] + c[8 + k] + c[12 + k] + eps);
            UNROLL for (int j = 0; j < 4; j++) c[4 * j + k] *= inverse;
        }
    }
}

INLINE void weighted_sum(float* out, const float* x, const float pre[STREAMS], int64_t width) {
    for (int64_t i = 0; i < width; i += LANES) {
        vf u = {0};
        UNROLL for (int j = 0; j < STREAMS; j++) u += splat(pre[j]) * load(x + j * width + i);
        store(out + i, u);
    }
}

void mhc_pre(float* out, float* post, float* comb, const float* x, const float* mixed, const float* scale,
             const float* base, const float* weight, int64_t tokens, int64_t width, int64_t iterations, float eps,
             float norm_eps) {
    for (int64_t first = 0; first < tokens; first += LANES) {
        int64_t lanes = tokens - first < LANES ? tokens - first : LANES;
        float turned[MIX][LANES] = {{0}};
        vf m[MIX];
        for (int64_t l = 0; l < lanes; l++) {
            float factor = inverse_rms(x + (first + l) * STREAMS * width, STREAMS * width, norm_eps);
            for (int i = 0; i < MIX; i++)
                turned[i][l] = mixed[(first + l) * MIX + i] * factor * scale[i] + base[i];
        }
        for (int i = 0; i < MIX; i++) m[i] = load(turned[i]);
        for (int i = 0; i < 4; i++) store(turned[i], sigmoid_vf(m[i]) + eps);
        for (int i = 4; i < 8; i++) store(turned[i], 2.0f * sigmoid_vf(m[i]));
        sinkhorn(m + 8, iterations, eps);
        for (int i = 8; i < MIX; i++) store(turned[i], m[i]);
        for (int64_t l = 0; l < lanes; l++) {
            int64_t t = first + l;
            float pre[STREAMS], *row = out + t * width;
            for (int i = 0; i < 4; i++) pre[i] = turned[i][l];
            for (int i = 0; i < 4; i++) post[t * 4 + i] = turned[4 + i][l];
            for (int i = 0; i < 16; i++) comb[t * 16 + i] = turned[8 + i][l];
            weighted_sum(row, x + t * STREAMS * width, pre, width);
            scaled(row, row, weight, inverse_rms(row, width, norm_eps), width);
        }
    }
}

void mhc_post(float* out, const float* y, const float* x, const float* post, const float* comb, int64_t tokens,
              int64_t width) {
    for (int64_t t = 0; t < tokens; t++) {
        const float *p = post + t * 4, *c = comb + t * 16, *rows = x + t * STREAMS * width;
        for (int64_t i = 0; i < width; i += LANES) {
            vf in[STREAMS], add = load(y + t * width + i);
            UNROLL for (int j = 0; j < STREAMS; j++) in[j] = load(rows + j * width + i);
            UNROLL for (int k = 0; k < STREAMS; k++) {
                vf v = splat(p[k]) * add;
                UNROLL for (int j = 0; j < STREAMS; j++) v += splat(c[4 * j + k]) * in[j];
                store(out + t * STREAMS * width + k * width + i, v);
            }
        }
    }
}
