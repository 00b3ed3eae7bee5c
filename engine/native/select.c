#include <math.h>

#include "attend.h"
#include "lines.h"

/* Heads run eight at a time against two keys; what a block's queries don't see is minus infinity. */
void index_scores(float* scores, const float* q, const float* weight, keys k, int64_t blocks, int64_t queries,
                  int64_t heads, int64_t width) {
    for (int64_t row = 0; row < blocks * queries; row++) {
        const float *bias = k.bias + row * k.count, *own = weight + row * heads;
        const int64_t* rows = k.rows + row / queries * k.count;
        float* out = scores + row * k.count;
        for (int64_t i = 0; i < k.count; i += 2) {
            int64_t other = i + 1 < k.count ? i + 1 : i;
            float total[2] = {0.0f, 0.0f}, dot[LANES];
            const float *lines[LINES], *pair[2] = {k.pool + rows[i] * width, k.pool + rows[other] * width};
            if (bias[i] < UNSEEN && bias[other] < UNSEEN) {
                out[i] = out[other] = -INFINITY;
                continue;
            }
            for (int64_t h = 0; h < heads; h += LINES) {
                for (int l = 0; l < LINES; l++) lines[l] = q + (row * heads + (h + l < heads ? h + l : h)) * width;
                dots(dot, lines, pair, width, LINES);
                for (int l = 0; l < LINES && h + l < heads; l++)
                    for (int g = 0; g < 2; g++) {
                        float d = dot[g * LINES + l];
                        total[g] += d > 0.0f ? d * own[h + l] : 0.0f;
                    }
            }
            out[i] = total[0] + bias[i];
            out[other] = total[other - i] + bias[other];
        }
    }
}
