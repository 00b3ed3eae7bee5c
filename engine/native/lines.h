/* Dot products of a few query lines with a few keys, the inner loop of attention and index scores. */
#ifndef ENGINE_LINES_H
#define ENGINE_LINES_H

#include "vec.h"

#define LINES 8       /* most query lines (row, head) that share one pass over the keys */
#define UNSEEN -1e30f /* below this a bias means that the key isn't seen */

/* Folds each group of `2 n` lanes of a and b into its n sums; a's groups come first. */
#define FOLD(a, b, lo, hi) (__builtin_shufflevector(a, b, lo) + __builtin_shufflevector(a, b, hi))
#define LO8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HI8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define LO4 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define HI4 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
#define LO2 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29
#define HI2 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31
#define LO1 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define HI1 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31

/* The sum over the lanes of each of 16 vectors. */
INLINE vf sums(const vf v[LANES]) {
    vf a[8], b[4];
    UNROLL for (int i = 0; i < 8; i++) a[i] = FOLD(v[2 * i], v[2 * i + 1], LO8, HI8);
    UNROLL for (int i = 0; i < 4; i++) b[i] = FOLD(a[2 * i], a[2 * i + 1], LO4, HI4);
    vf c = FOLD(b[0], b[1], LO2, HI2), d = FOLD(b[2], b[3], LO2, HI2);
    return FOLD(c, d, LO1, HI1);
}

/* scores[g, l] = q[l] . k[g] for 16 / lines keys. */
INLINE void dots(float* scores, const float* const q[], const float* const k[], int64_t width, const int lines) {
    const int group = LANES / lines;
    vf acc[LANES];
    UNROLL for (int i = 0; i < LANES; i++) acc[i] = (vf){0};
    for (int64_t i = 0; i < width; i += LANES) {
        vf a[LINES];
        UNROLL for (int l = 0; l < lines; l++) a[l] = load(q[l] + i);
        UNROLL for (int g = 0; g < group; g++) {
            vf b = load(k[g] + i);
            UNROLL for (int l = 0; l < lines; l++) acc[g * lines + l] += a[l] * b;
        }
    }
    store(scores, sums(acc));
}

#endif
