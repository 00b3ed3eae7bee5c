#include <stdlib.h>

#include "attend.h"

/* One key against every head of a row: relu of each dot product, weighted and summed. */
INLINE float index_score(const float *q, const float *weight, const float *k, int64_t heads, int64_t width) {
    float total = 0.0f;
    int64_t h = 0;
    for (; h + 4 <= heads; h += 4) {
        vf acc[4];
        UNROLL for (int j = 0; j < 4; j++) acc[j] = (vf){0};
        for (int64_t i = 0; i < width; i += LANES) {
            vf kv = load(k + i);
            UNROLL for (int j = 0; j < 4; j++) acc[j] += load(q + (h + j) * width + i) * kv;
        }
        for (int j = 0; j < 4; j++) {
            float dot = sum(acc[j]);
            total += dot > 0.0f ? dot * weight[h + j] : 0.0f;
        }
    }
    for (; h < heads; h++) {
        vf acc = {0};
        for (int64_t i = 0; i < width; i += LANES) acc += load(q + h * width + i) * load(k + i);
        float dot = sum(acc);
        total += dot > 0.0f ? dot * weight[h] : 0.0f;
    }
    return total;
}

void index_scores(float *scores, const float *q, const float *weight, keys entries, int64_t rows, int64_t heads,
                  int64_t width) {
    for (int64_t t = 0; t < rows; t++)
        for (int64_t i = 0; i < entries.count[t]; i++) {
            int32_t at = entries.index[t * entries.stride + i];
            const float *k = at >= 0 ? entries.pool + (int64_t)at * width : entries.fresh + (int64_t)~at * width;
            scores[t * entries.stride + i] =
                index_score(q + t * heads * width, weight + t * heads, k, heads, width);
        }
}

/* A score and its place as one integer that orders like (score, then earlier place). */
INLINE uint64_t rank_of(float score, uint32_t place) {
    uint32_t bits;
    memcpy(&bits, &score, sizeof bits);
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (uint32_t)~place;
}

/* The value that is `most`-th from the top; reorders `a`. */
static uint64_t nth_from_top(uint64_t *a, int64_t n, int64_t most) {
    int64_t lo = 0, hi = n - 1;
    while (lo < hi) {
        uint64_t pivot = a[lo + (hi - lo) / 2];
        int64_t i = lo, j = hi;
        while (i <= j) {
            while (a[i] > pivot) i++;
            while (a[j] < pivot) j--;
            if (i <= j) {
                uint64_t swap = a[i];
                a[i++] = a[j];
                a[j--] = swap;
            }
        }
        if (most - 1 <= j)
            hi = j;
        else if (most - 1 >= i)
            lo = i;
        else
            break;
    }
    return a[most - 1];
}

int select_best(int32_t *index, int32_t *count, const float *scores, keys entries, int64_t rows, int64_t most) {
    uint64_t *ranks = malloc((size_t)(entries.stride + 1) * sizeof *ranks);
    if (!ranks) return -1;
    for (int64_t t = 0; t < rows; t++) {
        const int32_t *from = entries.index + t * entries.stride;
        const float *s = scores + t * entries.stride;
        int64_t n = entries.count[t], kept = 0;
        int32_t *to = index + t * most;
        if (n <= most) {
            memcpy(to, from, (size_t)n * sizeof *to);
            count[t] = (int32_t)n;
            continue;
        }
        for (int64_t i = 0; i < n; i++) ranks[i] = rank_of(s[i], (uint32_t)i);
        uint64_t least = nth_from_top(ranks, n, most);
        for (int64_t i = 0; i < n; i++)
            if (rank_of(s[i], (uint32_t)i) >= least) to[kept++] = from[i];
        count[t] = (int32_t)kept;
    }
    free(ranks);
    return 0;
}
