/* Row-wise pieces: RMS normalisation, rotary embedding, and the four-stream mixing of hyper-connections. */
#ifndef ENGINE_NORM_H
#define ENGINE_NORM_H

#include "vec.h"

#define STREAMS 4

/* out = weight * x * rsqrt(mean(x^2) + eps); weight may be NULL. n is a multiple of 16; x's rows are x_stride
 * apart. */
void rms_norm(float* out, const float* x, int64_t x_stride, const float* weight, int64_t rows, int64_t n,
              float eps);

/* In place: the last 2 * pairs channels of each row are turned as interleaved pairs by turns [rows / heads, pairs,
 * 2] (cosine, sine); row r uses line r / heads. Rows are `stride` floats apart. */
void rotate(float* x, const float* turns, int64_t rows, int64_t heads, int64_t stride, int64_t n, int64_t pairs);

/* mixed [tokens, 24] holds flatten(x) times fn^T; writes post [tokens, 4], comb [tokens, 16] and the normalised
 * weighted sum of the streams, out [tokens, width]. */
void mhc_pre(float* out, float* post, float* comb, const float* x, const float* mixed, const float* scale,
             const float* base, const float* weight, int64_t tokens, int64_t width, int64_t iterations, float eps,
             float norm_eps);

/* out[t, k] = post[t, k] * y[t] + sum_j comb[t, j, k] * x[t, j]; out may be x. */
void mhc_post(float* out, const float* y, const float* x, const float* post, const float* comb, int64_t tokens,
              int64_t width);

#endif
