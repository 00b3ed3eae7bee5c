/* The pooling of compressors: a softmax over a window's tokens, for each channel apart. */
#ifndef ENGINE_COMPRESS_H
#define ENGINE_COMPRESS_H

#include "vec.h"

/* out [windows, width]: item i of window w stands (w * items + i) * stride floats into latents and scores.
 * width is a multiple of 16. */
void pool_windows(float* out, const float* latents, const float* scores, int64_t windows, int64_t items,
                  int64_t stride, int64_t width);

/* The online form, in place: state [windows, 3, width] is the running maximum, the sum of weights and the weighted
 * latent; rows [windows, items, 2 width] are latent and score; items whose valid [windows, items] is 0 are
 * skipped. */
void fold(float* state, const float* rows, const uint8_t* valid, int64_t windows, int64_t items, int64_t width);

#endif
