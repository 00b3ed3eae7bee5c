/* Routed experts over packed weights: tokens are grouped by expert, so that each expert's weights are read once.
 */
#ifndef ENGINE_MOE_H
#define ENGINE_MOE_H

#include "gemm.h"

typedef struct {
    const char* up;   /* [experts] packed [2 inner, width]: gate rows, then up rows */
    const char* down; /* [experts] packed [width, inner] */
    int64_t experts, width, inner;
    int bf16;
    float limit; /* gate at most limit, up within +-limit, before silu */
} experts;

/* out[t] = sum_j weight[t, j] * expert_{id[t, j]}(x[t]), the j ascending; an id outside 0..experts - 1 adds
 * nothing. Returns 0, or -1 where no memory is left. */
int moe(float* out, const float* x, const int64_t* ids, const float* weights, int64_t tokens, int64_t choices,
        experts e);

/* out[r] = silu(min(gate, limit)) * clamp(up) of in[r] = (gate, up), rows of 2 inner; out rows of inner. */
void swiglu(float* out, const float* in, int64_t rows, int64_t inner, float limit);

/* Experts of each row: scores sqrt(softplus(logits)); without `chosen` the `choices` best of score + bias, equal
 * ones by lower number; with it (int64 [rows, choices]) those. Weights are the scores, scaled to sum to `scaling`.
 */
void route(int64_t* ids, float* weights, const float* logits, const float* bias, const int64_t* chosen,
           int64_t rows, int64_t count, int64_t choices, float scaling);

#endif
