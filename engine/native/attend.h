/* Shared-latent attention: every head of a row reads the same keys, and a key is its own value. */
#ifndef ENGINE_ATTEND_H
#define ENGINE_ATTEND_H

#include "vec.h"

/* Keys of query blocks. Block b may see rows[b, i] of `pool`, i < count; its w-th query sees those whose
 * bias[b, w, i] is 0, the others are minus infinity. */
typedef struct {
    const float* pool;
    const int64_t* rows;
    const float* bias;
    int64_t count;
} keys;

/* out[t, h] = sum_j p_j key_j over the keys of up to two sources, one softmax with a sink logit for each head.
 *
 * q and out are [., heads, width]; query w of block b is row places[b * queries + w] of both (places may be NULL:
 * in order). A query that sees no key is padding: nothing is written for it. width is a multiple of 32.
 * A query's chain of additions runs over its keys in order and skips what it doesn't see, so that its result
 * doesn't depend on the queries beside it. Returns 0, or -1 where no memory is left. */
int attend(float* out, const float* q, const int64_t* places, int64_t blocks, int64_t queries, const keys* sources,
           int64_t count, const float* sink, float scale, int64_t heads, int64_t width);

#define WIDEST_INDEX 256 /* channels of an index key, at most */

/* scores[row, i] = sum_h weight[row, h] * relu(q[row, h] . key_i) + bias[row, i]; rows are blocks * queries; width
 * is a multiple of 16. A block's keys are turned into panels once, for all of its queries; a score's chains run
 * over ascending channels, then heads. Returns 0, or -1 where the keys are too wide. */
int index_scores(float* scores, const float* q, const float* weight, keys k, int64_t blocks, int64_t queries,
                 int64_t heads, int64_t width);

#endif
