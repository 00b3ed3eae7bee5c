#include "mask.h"

#include <math.h>
#include <stddef.h>

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

INLINE int any(vi v) {
    int32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= v[i];
    return found != 0;
}

/* One token more; returns whether it is no number, behind which nothing is larger. */
INLINE int compare(float x, int64_t token, float* best, int64_t* first) {
    if (x <= *best) return 0;
    *best = x;
    *first = token;
    return x != x;
}

static void favour_row(float* best, int64_t* first, const float* logits, const int32_t* mask, int64_t vocabulary) {
    int64_t whole = vocabulary / WORD;
    *best = -INFINITY;
    *first = 0;
    for (int64_t w = 0; w < whole; w++) {
        uint32_t word = mask ? (uint32_t)mask[w] : UINT32_MAX;
        if (!word) continue;
        const float* own = logits + w * WORD;
        vi over = ~(load(own) <= *best) | ~(load(own + LANES) <= *best);
        if (!any(over)) continue;
        for (int bit = 0; bit < WORD; bit++)
            if ((word >> bit & 1) && compare(own[bit], w * WORD + bit, best, first)) return;
    }
    for (int64_t bit = 0; bit < vocabulary % WORD; bit++)
        if (!mask || ((uint32_t)mask[whole] >> bit & 1))
            if (compare(logits[whole * WORD + bit], whole * WORD + bit, best, first)) return;
}

int favour(float* best, int64_t* first, const float* logits, int64_t stride, int64_t rows, const int64_t* places,
           const int32_t* masks, int64_t count, int64_t words, int64_t vocabulary) {
    for (int64_t i = 0; i < count; i++)
        if (places[i] < 0 || places[i] >= rows || (i && places[i] <= places[i - 1])) return -1;
    for (int64_t row = 0, next = 0; row < rows; row++) {
        int masked = next < count && places[next] == row;
        favour_row(best + row, first + row, logits + row * stride, masked ? masks + next * words : NULL,
                   vocabulary);
        next += masked;
    }
    return 0;
}

int forbid(float* logits, int64_t stride, int64_t rows, const int64_t* places, const int32_t* masks, int64_t count,
           int64_t words, int64_t vocabulary) {
    for (int64_t i = 0; i < count; i++)
        if (places[i] < 0 || places[i] >= rows) return -1;
    for (int64_t i = 0; i < count; i++) forbid_row(logits + places[i] * stride, masks + i * words, vocabulary);
    return 0;
}
