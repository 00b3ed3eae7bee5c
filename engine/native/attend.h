/* Shared-latent attention: every head of a row reads the same keys, and a key is its own value. */
#ifndef ENGINE_ATTEND_H
#define ENGINE_ATTEND_H

#include "vec.h"

/* Rows of one kind of key. Entry (t, i) of `index` is the i-th key of row t: at or above 0 a row of `pool`, below 0
 * the row ~entry of `fresh` (rows that this step made and hasn't committed). */
typedef struct {
    const float *pool, *fresh;
    const int32_t *index; /* [rows, stride] */
    const int32_t *count; /* [rows] */
    int64_t stride;
} keys;

/* out[t, h] = sum_j p_j key_j over window and compressed keys with one softmax and a sink logit for each head.
 * q and out are [rows, heads, width]; width is a multiple of 32, at most 1024.
 * Returns 0, or -1 where no memory is left. */
int attend(float *out, const float *q, keys window, keys compressed, const float *sink, float scale, int64_t rows,
           int64_t heads, int64_t width);

/* scores[t, i] = sum_h weight[t, h] * relu(q[t, h] . key_i) for the keys of row t. */
void index_scores(float *scores, const float *q, const float *weight, keys entries, int64_t rows, int64_t heads,
                  int64_t width);

/* The `most` entries of each row with the best scores, in ascending order of place; of equal scores the earlier
 * wins. Writes index [rows, most] and count [rows]. Returns 0, or -1 where no memory is left. */
int select_best(int32_t *index, int32_t *count, const float *scores, keys entries, int64_t rows, int64_t most);

#endif
