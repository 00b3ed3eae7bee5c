/* Masks of many sizes, each in memory of its own, so that a sanitizer sees a byte too many; the oracle is a loop.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "mask.h"

static uint32_t state = 1;

static uint32_t drawn(void) {
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

/* Rows 0 and 2 are masked already, so that it makes no difference whether their masks are read. */
static int favoured_wrongly(const float* logits, int64_t vocabulary, int64_t* places, int32_t* masks, int64_t words) {
    float best[3];
    int64_t first[3];
    int wrong = 0;
    for (int64_t masked = 0; masked <= 2; masked += 2) {
        wrong |= favour(best, first, logits, vocabulary, 3, places, masks, masked, words, vocabulary);
        for (int64_t row = 0; row < 3; row++) {
            float want = -INFINITY;
            int64_t at = 0;
            for (int64_t t = 0; t < vocabulary; t++)
                if (logits[row * vocabulary + t] > want) want = logits[row * vocabulary + (at = t)];
            wrong |= best[row] != want || first[row] != at;
        }
    }
    return wrong;
}

static int one_size(int64_t vocabulary) {
    int64_t words = (vocabulary + WORD - 1) / WORD, places[2] = {0, 2};
    float* logits = malloc((size_t)(3 * vocabulary) * sizeof *logits);
    int32_t* masks = malloc((size_t)(2 * words) * sizeof *masks);
    int wrong = !logits || !masks;
    if (!wrong) {
        for (int64_t i = 0; i < 3 * vocabulary; i++) logits[i] = (float)i;
        for (int64_t i = 0; i < 2 * words; i++)
            masks[i] = (int32_t)(drawn() % 3 == 0 ? 0u : drawn() % 2 ? UINT32_MAX : drawn() << 16 ^ drawn());
        wrong = forbid(logits, vocabulary, 3, places, masks, 2, words, vocabulary);
        for (int64_t row = 0; row < 3; row++)
            for (int64_t t = 0; t < vocabulary; t++) {
                int allowed = row == 1 || ((uint32_t)masks[row / 2 * words + t / WORD] >> t % WORD & 1);
                float want = allowed ? (float)(row * vocabulary + t) : -INFINITY;
                wrong |= logits[row * vocabulary + t] != want;
            }
        wrong |= favoured_wrongly(logits, vocabulary, places, masks, words);
        places[1] = 3;
        wrong |= forbid(logits, vocabulary, 3, places, masks, 2, words, vocabulary) != -1;
    }
    free(logits);
    free(masks);
    return wrong;
}

int main(void) {
    for (int64_t vocabulary = 1; vocabulary <= 200; vocabulary++)
        if (one_size(vocabulary)) {
            printf("%lld tokens are masked otherwise\n", (long long)vocabulary);
            return 1;
        }
    printf("masks of 200 sizes\n");
    return 0;
}
