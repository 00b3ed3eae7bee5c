/* Row-wise pieces: RMS normalisation, rotary embedding, and the four-stream mixing of hyper-connections. */
#ifndef ENGINE_NORM_H
#define ENGINE_NORM_H

#include "vec.h"

#define STREAMS 4

/* out = weight * x * rsqrt(mean(x^2) + eps); weight may be NULL. n is a multiple of 16. */
void rms_norm(float *out, const float *x, const float *weight, int64_t rows, int64_t n, float eps);

/* In place: RMS over the n channels of each row (weight may be NULL), then the last `rope` channels are rotated as
 * interleaved pairs. Row r uses line r / heads of cos and sin, [rows / heads, rope / 2] each. With norm 0 only the
 * rotation happens; sign -1 rotates back. */
void norm_rope(float *x, const float *weight, const float *cos, const float *sin, int64_t rows, int64_t heads,
               int64_t n, int64_t rope, float eps, int norm, float sign);

/* mixed [tokens, 24] holds flatten(x) times fn^T; writes post [tokens, 4], comb [tokens, 16] and the normalised
 * weighted sum of the streams, out [tokens, width]. */
void mhc_pre(float *out, float *post, float *comb, const float *x, const float *mixed, const float *scale,
             const float *base, const float *weight, int64_t tokens, int64_t width, int64_t iterations, float eps,
             float norm_eps);

/* out[t, k] = post[t, k] * y[t] + sum_j comb[t, j, k] * x[t, j]; out may be x. */
void mhc_post(float *out, const float *y, const float *x, const float *post, const float *comb, int64_t tokens,
              int64_t width);

#endif
