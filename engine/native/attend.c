#include "attend.h"

#include <math.h>
#include <stdlib.h>

#define HEADS 8 /* most query rows that share one pass over the keys */
#define GROUP 2 /* keys of one pass: 8 x 2 accumulators, 2 keys and a query stay in registers */

INLINE const float *key(const keys *k, int64_t row, int64_t i, int64_t width) {
    int32_t at = k->index[row * k->stride + i];
    return at >= 0 ? k->pool + (int64_t)at * width : k->fresh + (int64_t)~at * width;
}

/* The sum over the lanes of each of 16 vectors, as one vector. */
INLINE vf sums(const vf v[LANES]) {
    float turned[LANES][LANES];
    vf total = {0};
    for (int i = 0; i < LANES; i++) store(turned[i], v[i]);
    float out[LANES];
    for (int i = 0; i < LANES; i++) {
        float a = (turned[i][0] + turned[i][8]) + (turned[i][4] + turned[i][12]);
        float b = (turned[i][1] + turned[i][9]) + (turned[i][5] + turned[i][13]);
        float c = (turned[i][2] + turned[i][10]) + (turned[i][6] + turned[i][14]);
        float d = (turned[i][3] + turned[i][11]) + (turned[i][7] + turned[i][15]);
        out[i] = (a + c) + (b + d);
    }
    total = load(out);
    return total;
}

INLINE void dots(float *scores, int64_t stride, const float *const q[], const float *const k[], int64_t width,
                 const int heads, const int group) {
    vf acc[LANES];
    UNROLL for (int i = 0; i < LANES; i++) acc[i] = (vf){0};
    for (int64_t i = 0; i < width; i += LANES) {
        vf kv[GROUP];
        UNROLL for (int g = 0; g < group; g++) kv[g] = load(k[g] + i);
        UNROLL for (int h = 0; h < heads; h++) {
            vf a = load(q[h] + i);
            UNROLL for (int g = 0; g < group; g++) acc[h * GROUP + g] += a * kv[g];
        }
    }
    float out[LANES];
    store(out, sums(acc));
    for (int h = 0; h < heads; h++)
        for (int g = 0; g < group; g++) scores[h * stride + g] = out[h * GROUP + g];
}

INLINE void dots_by(float *scores, int64_t stride, const float *const q[], const float *const k[], int64_t width,
                    int heads, const int group) {
    if (heads == HEADS)
        dots(scores, stride, q, k, width, HEADS, group);
    else if (heads == 4)
        dots(scores, stride, q, k, width, 4, group);
    else
        for (int h = 0; h < heads; h++) dots(scores + h * stride, stride, q + h, k, width, 1, group);
}

INLINE void score(float *scores, int64_t stride, const float *const q[], const float *const *k, int64_t n,
                  int64_t width, int heads) {
    int64_t i = 0;
    for (; i + GROUP <= n; i += GROUP) dots_by(scores + i, stride, q, k + i, width, heads, GROUP);
    for (; i < n; i++) dots_by(scores + i, stride, q, k + i, width, heads, 1);
}

/* out[h] += sum_i p[h, i] * k[i], a strip of two vectors at a time; a head's chain runs over ascending i. */
INLINE void mix(float *const out[], const float *p, int64_t stride, const float *const *k, int64_t n, int64_t width,
                const int heads) {
    for (int64_t c = 0; c < width; c += 2 * LANES) {
        vf lo[HEADS], hi[HEADS];
        UNROLL for (int h = 0; h < heads; h++) {
            lo[h] = load(out[h] + c);
            hi[h] = load(out[h] + c + LANES);
        }
        for (int64_t i = 0; i < n; i++) {
            vf a = load(k[i] + c), b = load(k[i] + c + LANES);
            UNROLL for (int h = 0; h < heads; h++) {
                vf w = splat(p[h * stride + i]);
                lo[h] += w * a;
                hi[h] += w * b;
            }
        }
        UNROLL for (int h = 0; h < heads; h++) {
            store(out[h] + c, lo[h]);
            store(out[h] + c + LANES, hi[h]);
        }
    }
}

INLINE void mix_by(float *const out[], const float *p, int64_t stride, const float *const *k, int64_t n,
                   int64_t width, int heads) {
    if (heads == HEADS)
        mix(out, p, stride, k, n, width, HEADS);
    else if (heads == 4)
        mix(out, p, stride, k, n, width, 4);
    else
        for (int h = 0; h < heads; h++) mix(out + h, p + h * stride, stride, k, n, width, 1);
}

/* In place: p = exp(scale * s - m) / (sum + exp(sink - m)) over the n scores of one head, m their maximum with the
 * sink; all 0 where there is no key. */
INLINE void softmax(float *s, int64_t n, float scale, float sink) {
    float top = sink;
    for (int64_t i = 0; i < n; i++) top = fmaxf(top, s[i] *= scale);
    vf total = {0};
    float tail[LANES];
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf e = exp_vf(load(s + i) - splat(top));
        store(s + i, e);
        total += e;
    }
    if (i < n) {
        for (int l = 0; l < LANES; l++) tail[l] = i + l < n ? s[i + l] - top : -100.0f;
        vf e = exp_vf(load(tail));
        store(tail, e);
        for (int l = 0; l < LANES && i + l < n; l++) s[i + l] = tail[l];
        for (int l = 0; l < LANES; l++)
            if (i + l >= n) tail[l] = 0.0f;
        total += load(tail);
    }
    float inverse = 1.0f / (sum(total) + exp_f(sink - top));
    for (int64_t j = 0; j < n; j++) s[j] *= inverse;
}

/* Two neighbouring rows of one request see the same window, moved by at most one key: row 1's list is row 0's from
 * `moved` on and one key more. Returns `moved`, or -1 where they aren't such a pair. */
static int64_t moved_by(const keys *w, int64_t row) {
    int64_t n0 = w->count[row], n1 = w->count[row + 1], moved = n0 + 1 - n1;
    const int32_t *a = w->index + row * w->stride, *b = a + w->stride;
    if (n1 < 1 || moved < 0 || moved > 1) return -1;
    return memcmp(a + moved, b, (size_t)(n1 - 1) * sizeof *a) == 0 ? moved : -1;
}

typedef struct {
    float *scores;
    const float **rows;
} scratch;

/* One row, any number of heads. */
static void attend_row(float *out, const float *q, const keys *w, const keys *c, const float *sink, float scale,
                       int64_t row, int64_t heads, int64_t width, scratch s) {
    int64_t nw = w->count[row], n = nw + c->count[row];
    for (int64_t i = 0; i < n; i++) s.rows[i] = i < nw ? key(w, row, i, width) : key(c, row, i - nw, width);
    for (int64_t first = 0; first < heads;) {
        int batch = heads - first >= HEADS ? HEADS : heads - first >= 4 ? 4 : 1;
        const float *qs[HEADS];
        float *outs[HEADS];
        for (int h = 0; h < batch; h++) {
            qs[h] = q + (row * heads + first + h) * width;
            outs[h] = out + (row * heads + first + h) * width;
            memset(outs[h], 0, (size_t)width * sizeof(float));
        }
        score(s.scores, n, qs, s.rows, n, width, batch);
        for (int h = 0; h < batch; h++) softmax(s.scores + h * n, n, scale, sink[first + h]);
        mix_by(outs, s.scores, n, s.rows, n, width, batch);
        first += batch;
    }
}

/* Two rows of four heads over one window, as one pass of eight; their compressed keys may differ and follow apart.
 * A window key that only one of the two rows sees gets probability 0 in the other. */
static void attend_pair(float *out, const float *q, const keys *w, const keys *c, const float *sink, float scale,
                        int64_t row, int64_t moved, int64_t width, scratch s) {
    int64_t nw = w->count[row] + 1, most = c->count[row] > c->count[row + 1] ? c->count[row] : c->count[row + 1];
    int64_t stride = nw + most;
    const float *qs[HEADS];
    float *outs[HEADS];
    for (int64_t i = 0; i < nw; i++)
        s.rows[i] = i + 1 < nw ? key(w, row, i, width) : key(w, row + 1, w->count[row + 1] - 1, width);
    for (int h = 0; h < HEADS; h++) {
        qs[h] = q + (row * 4 + h) * width;
        outs[h] = out + (row * 4 + h) * width;
        memset(outs[h], 0, (size_t)width * sizeof(float));
    }
    score(s.scores, stride, qs, s.rows, nw, width, HEADS);
    for (int r = 0; r < 2; r++) {
        int64_t nc = c->count[row + r], from = r ? moved : 0, to = r ? nw : nw - 1;
        const float **entries = s.rows + nw;
        float *own = s.scores + r * 4 * stride;
        for (int64_t i = 0; i < nc; i++) entries[i] = key(c, row + r, i, width);
        score(own + nw, stride, qs + r * 4, entries, nc, width, 4);
        for (int h = 0; h < 4; h++) {
            float *line = own + h * stride;
            /* The unseen key stands at an end of the window part: shift it out of the softmax, then put 0 there. */
            if (!r) memmove(line + to, line + nw, (size_t)nc * sizeof(float));
            softmax(line + from, to - from + nc, scale, sink[h]);
            if (!r) {
                memmove(line + nw, line + to, (size_t)nc * sizeof(float));
                line[nw - 1] = 0.0f;
            } else if (moved) {
                line[0] = 0.0f;
            }
        }
    }
    mix(outs, s.scores, stride, s.rows, nw, width, HEADS);
    for (int r = 0; r < 2; r++) {
        const float **entries = s.rows + nw;
        for (int64_t i = 0; i < c->count[row + r]; i++) entries[i] = key(c, row + r, i, width);
        mix(outs + r * 4, s.scores + r * 4 * stride + nw, stride, entries, c->count[row + r], width, 4);
    }
}

int attend(float *out, const float *q, keys window, keys compressed, const float *sink, float scale, int64_t rows,
           int64_t heads, int64_t width) {
    int64_t most = 0;
    for (int64_t r = 0; r < rows; r++) {
        int64_t n = (int64_t)window.count[r] + compressed.count[r];
        most = n > most ? n : most;
    }
    scratch s = {malloc((size_t)(most + 2) * HEADS * sizeof(float)), malloc((size_t)(most + 2) * sizeof(float *))};
    if (!s.scores || !s.rows) {
        free(s.scores);
        free(s.rows);
        return -1;
    }
    for (int64_t r = 0; r < rows;) {
        int64_t moved = heads == 4 && r + 1 < rows ? moved_by(&window, r) : -1;
        if (moved >= 0) {
            attend_pair(out, q, &window, &compressed, sink, scale, r, moved, width, s);
            r += 2;
        } else {
            attend_row(out, q, &window, &compressed, sink, scale, r, heads, width, s);
            r++;
        }
    }
    free(s.scores);
    free(s.rows);
    return 0;
}
