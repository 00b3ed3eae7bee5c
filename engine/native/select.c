#include <math.h>

#include "attend.h"
#include "lines.h"

#define KEYS 32 /* keys of a panel: two vectors */

/* Rows of a 16 x 16 block become its columns. */
INLINE void turn(vf r[LANES]) {
    vf t[LANES];
#define TURN(to, from, step, lo, hi)                                         \
    UNROLL for (int i = 0; i < LANES; i++) if (!(i & step)) {                \
        to[i] = __builtin_shufflevector(from[i], from[i + step], lo);        \
        to[i + step] = __builtin_shufflevector(from[i], from[i + step], hi); \
    }
    TURN(t, r, 8, LO8, HI8)
#define LOW4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define HIGH4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
    TURN(r, t, 4, LOW4, HIGH4)
#define LOW2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
    TURN(t, r, 2, LOW2, HIGH2)
#define LOW1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define HIGH1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
    TURN(r, t, 1, LOW1, HIGH1)
}

/* panel [width, 32]: 32 keys of a block as columns; past the last key stand copies of it. */
static void fill_panel(float* panel, const keys* k, const int64_t* rows, int64_t first, int64_t width) {
    for (int half = 0; half < 2; half++)
        for (int64_t c = 0; c < width; c += LANES) {
            vf block[LANES];
            for (int i = 0; i < LANES; i++) {
                int64_t at = first + half * LANES + i;
                block[i] = load(k->pool + rows[at < k->count ? at : k->count - 1] * width + c);
            }
            turn(block);
            for (int i = 0; i < LANES; i++) store(panel + (c + i) * KEYS + half * LANES, block[i]);
        }
}

INLINE vf positive(vf x) { return select_vf(x > 0.0f, x, (vf){0}); }

/* Adds weight[h] * relu(q[h] . key) of `heads` heads for the panel's keys. */
INLINE void add_heads(vf* lo, vf* hi, const float* q, const float* weight, const float* panel, int64_t width,
                      const int heads) {
    vf a[LINES], b[LINES];
    UNROLL for (int h = 0; h < heads; h++) a[h] = b[h] = (vf){0};
    for (int64_t c = 0; c < width; c++) {
        vf near = load(panel + c * KEYS), far = load(panel + c * KEYS + LANES);
        UNROLL for (int h = 0; h < heads; h++) {
            vf x = splat(q[h * width + c]);
            a[h] += x * near;
            b[h] += x * far;
        }
    }
    UNROLL for (int h = 0; h < heads; h++) {
        *lo += splat(weight[h]) * positive(a[h]);
        *hi += splat(weight[h]) * positive(b[h]);
    }
}

static int any_seen(const float* bias, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (bias[i] > UNSEEN) return 1;
    return 0;
}

int index_scores(float* scores, const float* q, const float* weight, keys k, int64_t blocks, int64_t queries,
                 int64_t heads, int64_t width) {
    float panel[KEYS * WIDEST_INDEX], out[KEYS];
    if (width > WIDEST_INDEX) return -1;
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t first = 0; first < k.count; first += KEYS) {
            int64_t count = k.count - first < KEYS ? k.count - first : KEYS;
            fill_panel(panel, &k, k.rows + b * k.count, first, width);
            for (int64_t row = b * queries; row < (b + 1) * queries; row++) {
                const float *bias = k.bias + row * k.count + first, *own = q + row * heads * width;
                vf lo = {0}, hi = {0};
                int64_t h = 0;
                if (any_seen(bias, count)) {
                    for (; h + LINES <= heads; h += LINES)
                        add_heads(&lo, &hi, own + h * width, weight + row * heads + h, panel, width, LINES);
                    for (; h < heads; h++)
                        add_heads(&lo, &hi, own + h * width, weight + row * heads + h, panel, width, 1);
                }
                store(out, lo);
                store(out + LANES, hi);
                for (int64_t i = 0; i < count; i++) scores[row * k.count + first + i] = out[i] + bias[i];
            }
        }
    return 0;
}
