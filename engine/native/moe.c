#include "moe.h"

#include <math.h>
#include <stdlib.h>

#define ROWS 96 /* tokens of one pass over an expert: their rows stay in the second-level cache */

INLINE vf between(vf x, float low, float high) {
    x = select_vf(x < low, splat(low), x);
    return select_vf(x > high, splat(high), x);
}

INLINE void gated(float* out, const float* in, int64_t inner, float limit, float weight) {
    for (int64_t i = 0; i < inner; i += LANES) {
        vf gate = load(in + i), up = between(load(in + inner + i), -limit, limit);
        gate = select_vf(gate > limit, splat(limit), gate);
        store(out + i, gate / (1.0f + exp_vf(-gate)) * up * splat(weight));
    }
}

void swiglu(float* out, const float* in, int64_t rows, int64_t inner, float limit) {
    for (int64_t r = 0; r < rows; r++) gated(out + r * inner, in + r * 2 * inner, inner, limit, 1.0f);
}

typedef struct {
    float *x, *g, *y; /* [ROWS, width], [ROWS, 2 inner], [tokens * choices, width] */
    int32_t* order;   /* pairs (token, choice) sorted by expert */
    int32_t* first;   /* [experts + 1] where each expert's pairs begin in `order` */
} scratch;

static void sort_pairs(scratch s, const int64_t* ids, int64_t pairs, int64_t count) {
    memset(s.first, 0, (size_t)(count + 2) * sizeof *s.first);
    for (int64_t p = 0; p < pairs; p++)
        if (ids[p] >= 0 && ids[p] < count) s.first[ids[p] + 2]++;
    for (int64_t e = 2; e < count + 2; e++) s.first[e] += s.first[e - 1];
    for (int64_t p = 0; p < pairs; p++)
        if (ids[p] >= 0 && ids[p] < count) s.order[s.first[ids[p] + 1]++] = (int32_t)p;
}

static void run_expert(scratch s, const float* x, const float* weights, int64_t choices, experts e,
                       int64_t expert) {
    int64_t element = e.bf16 ? 2 : 4, panels = (2 * e.inner + PANEL - 1) / PANEL;
    int64_t up_bytes = panels * PANEL * e.width * element;
    int64_t down_bytes = (e.width + PANEL - 1) / PANEL * PANEL * e.inner * element;
    packed up = {e.up + expert * up_bytes, 2 * e.inner, e.width, e.bf16};
    packed down = {e.down + expert * down_bytes, e.width, e.inner, e.bf16};
    for (int64_t from = s.first[expert]; from < s.first[expert + 1]; from += ROWS) {
        int64_t rows = s.first[expert + 1] - from < ROWS ? s.first[expert + 1] - from : ROWS;
        for (int64_t r = 0; r < rows; r++)
            memcpy(s.x + r * e.width, x + s.order[from + r] / choices * e.width, (size_t)e.width * sizeof(float));
        gemm(s.g, 2 * e.inner, s.x, e.width, up, rows);
        for (int64_t r = 0; r < rows; r++) {
            float* row = s.g + r * 2 * e.inner; /* a lane is read before it is written: in place */
            gated(row, row, e.inner, e.limit, weights[s.order[from + r]]);
        }
        gemm(s.x, e.width, s.g, 2 * e.inner, down, rows);
        for (int64_t r = 0; r < rows; r++)
            memcpy(s.y + (int64_t)s.order[from + r] * e.width, s.x + r * e.width, (size_t)e.width * sizeof(float));
    }
}

int moe(float* out, const float* x, const int64_t* ids, const float* weights, int64_t tokens, int64_t choices,
        experts e) {
    int64_t pairs = tokens * choices;
    scratch s = {malloc((size_t)(ROWS * e.width) * sizeof(float)),
                 malloc((size_t)(ROWS * 2 * e.inner) * sizeof(float)),
                 calloc((size_t)(pairs * e.width + 1), sizeof(float)),
                 malloc((size_t)(pairs + 1) * sizeof(int32_t)), malloc((size_t)(e.experts + 2) * sizeof(int32_t))};
    int failed = !s.x || !s.g || !s.y || !s.order || !s.first;
    if (!failed) {
        sort_pairs(s, ids, pairs, e.experts);
        for (int64_t i = 0; i < e.experts; i++) run_expert(s, x, weights, choices, e, i);
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t i = 0; i < e.width; i += LANES) {
                vf total = {0};
                for (int64_t j = 0; j < choices; j++) total += load(s.y + (t * choices + j) * e.width + i);
                store(out + t * e.width + i, total);
            }
    }
    free(s.x);
    free(s.g);
    free(s.y);
    free(s.order);
    free(s.first);
    return failed ? -1 : 0;
}

INLINE float router_score(float x) { return sqrtf(x > 20.0f ? x : log1pf(expf(x))); }

void route(int64_t* ids, float* weights, const float* logits, const float* bias, const int64_t* chosen,
           int64_t rows, int64_t count, int64_t choices, float scaling) {
    for (int64_t r = 0; r < rows; r++) {
        int64_t* own = ids + r * choices;
        float *w = weights + r * choices, total = 0.0f;
        for (int64_t c = 0; c < choices; c++) {
            float best = -INFINITY;
            own[c] = chosen ? chosen[r * choices + c] : -1;
            for (int64_t e = 0; e < count && !chosen; e++) {
                float value = router_score(logits[r * count + e]) + bias[e];
                int taken = 0;
                for (int64_t d = 0; d < c; d++) taken |= own[d] == e;
                if (taken || (own[c] >= 0 && !(value > best))) continue;
                best = value;
                own[c] = e;
            }
            total += w[c] = router_score(logits[r * count + own[c]]);
        }
        for (int64_t c = 0; c < choices; c++) w[c] *= scaling / total;
    }
}
