#include "attend.h"

#include <stdlib.h>

#include "lines.h"

/* What one or two neighbouring queries see, and the room for their scores. */
typedef struct {
    const float** rows; /* [n] keys that at least one query sees, in order, then copies of the last */
    float* bias[2];     /* [n] for each query */
    float* scores;      /* [n, lines] */
    int64_t n;
} view;

/* In place: scores become probabilities; a line's total is one chain over ascending keys. */
INLINE void softmax(view* v, const float* sink, float scale, int64_t heads, const int lines) {
    float top[LINES], total[LINES], *s = v->scores;
    for (int l = 0; l < lines; l++) top[l] = sink[l % heads];
    for (int64_t i = 0; i < v->n; i++)
        for (int l = 0; l < lines; l++) {
            float x = s[i * lines + l] * scale + v->bias[l / heads][i];
            s[i * lines + l] = x;
            top[l] = x > top[l] ? x : top[l];
        }
    float tops[LANES];
    for (int i = 0; i < LANES; i++) tops[i] = top[i % lines];
    for (int l = 0; l < lines; l++) total[l] = 0.0f;
    for (int64_t i = 0; i < v->n; i += LANES / lines) {
        vf x = load(s + i * lines) - load(tops);
        store(s + i * lines, select_vf(x < UNSEEN, (vf){0}, exp_vf(x)));
    }
    for (int64_t i = 0; i < v->n; i++)
        for (int l = 0; l < lines; l++) total[l] += s[i * lines + l];
    for (int l = 0; l < lines; l++) total[l] = 1.0f / (total[l] + exp_f(sink[l % heads] - top[l]));
    for (int64_t i = 0; i < v->n; i++)
        for (int l = 0; l < lines; l++) s[i * lines + l] *= total[l];
}

/* out[l] = sum_i scores[i, l] * k[i], a strip of two vectors at a time. */
INLINE void mix(float* const out[], const view* v, int64_t width, const int lines) {
    for (int64_t c = 0; c < width; c += 2 * LANES) {
        vf lo[LINES], hi[LINES];
        UNROLL for (int l = 0; l < lines; l++) lo[l] = hi[l] = (vf){0};
        for (int64_t i = 0; i < v->n; i++) {
            vf a = load(v->rows[i] + c), b = load(v->rows[i] + c + LANES);
            UNROLL for (int l = 0; l < lines; l++) {
                vf p = splat(v->scores[i * lines + l]);
                lo[l] += p * a;
                hi[l] += p * b;
            }
        }
        UNROLL for (int l = 0; l < lines; l++) {
            store(out[l] + c, lo[l]);
            store(out[l] + c + LANES, hi[l]);
        }
    }
}

INLINE void lines_of(float* const out[], const float* const q[], view* v, const float* sink, float scale,
                     int64_t heads, int64_t width, const int lines) {
    for (int64_t i = 0; i < v->n; i += LANES / lines) dots(v->scores + i * lines, q, v->rows + i, width, lines);
    softmax(v, sink, scale, heads, lines);
    mix(out, v, width, lines);
}

/* `queries` (1 or 2) queries at rows[] of q and out, all heads. */
static void attend_view(float* out, const float* q, const int64_t rows[2], int queries, view* v, const float* sink,
                        float scale, int64_t heads, int64_t width) {
    float* outs[LINES];
    const float* qs[LINES];
    for (int64_t first = 0; first < heads;) {
        int batch = heads - first >= LINES ? LINES : heads - first >= 4 ? 4 : 1;
        for (int l = 0; l < batch * queries; l++) {
            int64_t at = (rows[l / batch] * heads + first + l % batch) * width;
            outs[l] = out + at;
            qs[l] = q + at;
        }
        if (batch * queries == LINES)
            lines_of(outs, qs, v, sink + first, scale, batch, width, LINES);
        else if (batch * queries == 4)
            lines_of(outs, qs, v, sink + first, scale, batch, width, 4);
        else
            lines_of(outs, qs, v, sink + first, scale, batch, width, 1);
        first += batch;
    }
}

/* Collects what queries `first` .. `first + queries - 1` of block b see. */
static void look(view* v, const keys* sources, int64_t count, int64_t b, int64_t of, int64_t first, int queries,
                 int64_t width) {
    v->n = 0;
    for (int64_t s = 0; s < count; s++) {
        const keys* k = sources + s;
        const float* bias = k->bias + (b * of + first) * k->count;
        const int64_t* rows = k->rows + b * k->count;
        for (int64_t i = 0; i < k->count; i++) {
            float mine = bias[i], other = queries == 2 ? bias[k->count + i] : mine;
            if (mine < UNSEEN && other < UNSEEN) continue;
            v->rows[v->n] = k->pool + rows[i] * width;
            v->bias[0][v->n] = mine;
            v->bias[1][v->n++] = other;
        }
    }
    for (int64_t i = v->n; v->n > 0 && i < v->n + LANES; i++) v->rows[i] = v->rows[v->n - 1];
}

int attend(float* out, const float* q, const int64_t* places, int64_t blocks, int64_t queries, const keys* sources,
           int64_t count, const float* sink, float scale, int64_t heads, int64_t width) {
    int64_t most = 2 * LANES;
    for (int64_t s = 0; s < count; s++) most += sources[s].count;
    size_t floats = (size_t)most * sizeof(float);
    view v = {malloc((size_t)most * sizeof(float*)), {malloc(floats), malloc(floats)}, malloc(floats * LINES), 0};
    int failed = !v.rows || !v.bias[0] || !v.bias[1] || !v.scores;
    for (int64_t b = 0; b < blocks && !failed; b++)
        for (int64_t w = 0; w < queries;) {
            int both = heads == 4 && w + 1 < queries ? 2 : 1;
            int64_t rows[2] = {b * queries + w, b * queries + w + 1};
            for (int i = 0; i < both && places; i++) rows[i] = places[rows[i]];
            look(&v, sources, count, b, queries, w, both, width);
            if (v.n > 0) attend_view(out, q, rows, both, &v, sink, scale, heads, width);
            w += both;
        }
    free(v.rows);
    free(v.bias[0]);
    free(v.bias[1]);
    free(v.scores);
    return failed ? -1 : 0;
}
