#include "mask.h"

#include <math.h>

static const vi BITS = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* The lanes from `first` on of one word's tokens. */
INLINE void forbid_lanes(float* logits, uint32_t word, int first) {
    vi allowed = ((vi){0} + (int32_t)(word >> first)) >> BITS & 1;
    store(logits + first, select_vf(allowed != 0, load(logits + first), splat(-INFINITY)));
}

static void forbid_row(float* logits, const int32_t* mask, int64_t vocabulary) {
    int64_t whole = vocabulary / WORD;
    for (int64_t w = 0; w < whole; w++, logits += WORD) {
        /* Grammars allow few tokens or nearly all: most words are of one kind. */
        uint32_t word = (uint32_t)mask[w];
        if (word == UINT32_MAX) continue;
        for (int first = 0; first < WORD; first += LANES) forbid_lanes(logits, word, first);
    }
    for (int64_t bit = 0; bit < vocabulary % WORD; bit++)
        if (!((uint32_t)mask[whole] >> bit & 1)) logits[bit] = -INFINITY;
}

int forbid(float* logits, int64_t stride, int64_t rows, const int64_t* places, const int32_t* masks, int64_t count,
           int64_t words, int64_t vocabulary) {
    for (int64_t i = 0; i < count; i++)
        if (places[i] < 0 || places[i] >= rows) return -1;
    for (int64_t i = 0; i < count; i++) forbid_row(logits + places[i] * stride, masks + i * words, vocabulary);
    return 0;
}
