#include "gemm.h"

#define AHEAD 48 /* rows of weights asked for before they are needed: a decode step reads every weight once */

void pack(void* to, const float* from, int64_t n, int64_t k, int bf16) {
    for (int64_t first = 0; first < n; first += PANEL)
        for (int64_t i = 0; i < k; i++)
            for (int64_t j = 0; j < PANEL; j++) {
                float value = first + j < n ? from[(first + j) * k + i] : 0.0f;
                int64_t row = first * k + i * PANEL;
                if (bf16) {
                    uint32_t bits;
                    memcpy(&bits, &value, sizeof bits);
                    ((uint16_t*)to)[row + (j < LANES ? 2 * j : 2 * (j - LANES) + 1)] = (uint16_t)(bits >> 16);
                } else {
                    ((float*)to)[row + j] = value;
                }
            }
}

#define TILE                                                                                            \
    12 /* rows of a register tile: 24 accumulators, two weight vectors and a broadcast fit 32 registers \
        */

INLINE void open_row(const void* panel, int bf16, int64_t k, vf* lo, vf* hi) {
    if (bf16) {
        vi both = *(const viu*)((const uint16_t*)panel + k * PANEL);
        *lo = as_float(both << 16);
        *hi = as_float(both & (int32_t)0xFFFF0000);
    } else {
        *lo = load((const float*)panel + k * PANEL);
        *hi = load((const float*)panel + k * PANEL + LANES);
    }
}

INLINE void put(float* y, int64_t left, vf lo, vf hi) {
    if (left >= PANEL) {
        store(y, lo);
        store(y + LANES, hi);
        return;
    }
    float both[PANEL];
    store(both, lo);
    store(both + LANES, hi);
    memcpy(y, both, (size_t)left * sizeof(float));
}

INLINE void tile(float* y, int64_t y_stride, const float* x, int64_t x_stride, const void* panel, int64_t left,
                 int64_t k, int bf16, const int rows) {
    vf lo[TILE], hi[TILE];
    UNROLL for (int r = 0; r < rows; r++) lo[r] = hi[r] = (vf){0};
    for (int64_t i = 0; i < k; i++) {
        vf w0, w1;
        __builtin_prefetch((const char*)panel + (i + AHEAD) * PANEL * (bf16 ? 2 : 4));
        open_row(panel, bf16, i, &w0, &w1);
        UNROLL for (int r = 0; r < rows; r++) {
            vf a = splat(x[r * x_stride + i]);
            lo[r] += a * w0;
            hi[r] += a * w1;
        }
    }
    UNROLL for (int r = 0; r < rows; r++) put(y + r * y_stride, left, lo[r], hi[r]);
}

/* One row leaves the multiply-adds waiting for each other; four panels at once keep eight chains going. */
INLINE void single_row(float* y, const float* x, const char* panels, int64_t bytes, int64_t left, int64_t k,
                       int bf16, const int wide) {
    vf lo[4], hi[4];
    UNROLL for (int p = 0; p < wide; p++) lo[p] = hi[p] = (vf){0};
    for (int64_t i = 0; i < k; i++) {
        vf a = splat(x[i]);
        UNROLL for (int p = 0; p < wide; p++) {
            vf w0, w1;
            __builtin_prefetch(panels + p * bytes + (i + AHEAD) * PANEL * (bf16 ? 2 : 4));
            open_row(panels + p * bytes, bf16, i, &w0, &w1);
            lo[p] += a * w0;
            hi[p] += a * w1;
        }
    }
    UNROLL for (int p = 0; p < wide; p++) put(y + p * PANEL, left - p * PANEL, lo[p], hi[p]);
}

#define REST(n)                                                                                    \
    case n:                                                                                        \
        tile(out + r * y_stride, y_stride, x + r * x_stride, x_stride, panel, left, w.k, bf16, n); \
        break;

INLINE void columns(float* y, int64_t y_stride, const float* x, int64_t x_stride, packed w, int64_t rows,
                    const int bf16) {
    int64_t bytes = w.k * PANEL * (bf16 ? 2 : 4), panels = (w.n + PANEL - 1) / PANEL, p = 0;
    if (rows == 1) {
        for (; p + 4 <= panels; p += 4)
            single_row(y + p * PANEL, x, (const char*)w.panels + p * bytes, bytes, w.n - p * PANEL, w.k, bf16, 4);
        for (; p < panels; p++)
            single_row(y + p * PANEL, x, (const char*)w.panels + p * bytes, bytes, w.n - p * PANEL, w.k, bf16, 1);
        return;
    }
    for (; p < panels; p++) {
        const void* panel = (const char*)w.panels + p * bytes;
        float* out = y + p * PANEL;
        int64_t left = w.n - p * PANEL, r = 0;
        for (; r + TILE <= rows; r += TILE)
            tile(out + r * y_stride, y_stride, x + r * x_stride, x_stride, panel, left, w.k, bf16, TILE);
        for (; r + 8 <= rows; r += 8)
            tile(out + r * y_stride, y_stride, x + r * x_stride, x_stride, panel, left, w.k, bf16, 8);
        /* A draft or its verification has few rows: one pass over the weights serves all of them. */
        switch (rows - r) {
            REST(7)
            REST(6)
            REST(5)
            REST(4)
            REST(3)
            REST(2)
            REST(1)
        }
    }
}

void gemm(float* y, int64_t y_stride, const float* x, int64_t x_stride, packed w, int64_t rows) {
    if (w.bf16)
        columns(y, y_stride, x, x_stride, w, rows, 1);
    else
        columns(y, y_stride, x, x_stride, w, rows, 0);
}
