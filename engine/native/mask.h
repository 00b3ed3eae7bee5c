/* Which tokens a row may choose, as bits. */
#ifndef ENGINE_MASK_H
#define ENGINE_MASK_H

#include "vec.h"

#define WORD 32 /* tokens of a mask's word */

/* In place: tokens whose bit is 0 become minus infinity, in row places[i] of
 * logits by line i of masks [count, words]; bit t % 32 of word t / 32 is token
 * t. Rows are `stride` floats apart and have `vocabulary` tokens, at most 32 *
 * words. Returns -1, with nothing done, where a place is none of the `rows`
 * rows. */
int forbid(float* logits, int64_t stride, int64_t rows, const int64_t* places, const int32_t* masks, int64_t count,
           int64_t words, int64_t vocabulary);

/* Of each row its largest logit and the first token that has it; no number is larger than any. Row places[i] has
 * the tokens of line i of masks alone, as above; minus infinity and token 0 where all of them are forbidden.
 * Returns -1, with nothing done, where places don't ascend or name none of the `rows` rows. */
int favour(float* best, int64_t* first, const float* logits, int64_t stride, int64_t rows, const int64_t* places,
           const int32_t* masks, int64_t count, int64_t words, int64_t vocabulary);

#endif
