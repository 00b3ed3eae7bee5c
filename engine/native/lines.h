/* Dot products of a few query lines with a few keys, the inner loop of attention and index scores. */
#ifndef ENGINE_LINES_H
#define ENGINE_LINES_H

#include "vec.h"

#define LINES 8       /* most query lines (row, head) that share one pass over the keys */
#define UNSEEN -1e30f /* below this a bias means that the key isn't seen */

/* The sum over the lanes of each of 16 vectors. */
INLINE vf sums(const vf v[LANES]) {
    float turned[LANES][LANES], out[LANES];
    for (int i = 0; i < LANES; i++) store(turned[i], v[i]);
    vf total = {0};
    for (int i = 0; i < LANES; i++) {
        float* a = turned[i];
        float even = ((a[0] + a[8]) + (a[4] + a[12])) + ((a[2] + a[10]) + (a[6] + a[14]));
        float odd = ((a[1] + a[9]) + (a[5] + a[13])) + ((a[3] + a[11]) + (a[7] + a[15]));
        out[i] = even + odd;
    }
    total = load(out);
    return total;
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
