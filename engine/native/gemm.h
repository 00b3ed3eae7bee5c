/* y[m, n] = sum_k x[m, k] * w[k, n] over packed bf16 or float32 weights.
 *
 * Packed layout: panels of 32 columns; inside a panel, row k holds its 32 columns. A bf16 panel stores column j
 * and column 16 + j side by side, so that one 64-byte load opens into two vectors by a shift and a mask.
 * Each output element is one chain of fused multiply-adds over ascending k, whatever the number of rows: a row's
 * result doesn't depend on the other rows. */
#ifndef ENGINE_GEMM_H
#define ENGINE_GEMM_H

#include "vec.h"

typedef struct {
    const void* panels; /* ceil(n / 32) panels of k rows */
    int64_t n, k;
    int bf16;
} packed;

/* Fills the packed form of `from` [n, k]; bf16 truncates nothing: the caller has checked that values fit. */
void pack(void* to, const float* from, int64_t n, int64_t k, int bf16);

void gemm(float* y, int64_t y_stride, const float* x, int64_t x_stride, packed w, int64_t rows);

#endif
