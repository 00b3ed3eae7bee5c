#include "compress.h"

INLINE vf larger(vf a, vf b) { return select_vf(a > b, a, b); }

void pool_windows(float* out, const float* latents, const float* scores, int64_t windows, int64_t items,
                  int64_t stride, int64_t width) {
    for (int64_t w = 0; w < windows; w++)
        for (int64_t c = 0; c < width; c += LANES) {
            const float *x = latents + w * items * stride + c, *s = scores + w * items * stride + c;
            vf top = load(s), total = {0}, value = {0};
            for (int64_t i = 1; i < items; i++) top = larger(top, load(s + i * stride));
            for (int64_t i = 0; i < items; i++) {
                vf e = exp_vf(load(s + i * stride) - top);
                total += e;
                value += e * load(x + i * stride);
            }
            store(out + w * width + c, value / total);
        }
}

void fold(float* state, const float* rows, const uint8_t* valid, int64_t windows, int64_t items, int64_t width) {
    for (int64_t w = 0; w < windows; w++)
        for (int64_t c = 0; c < width; c += LANES) {
            float* own = state + w * 3 * width + c;
            vf top = load(own), total = load(own + width), value = load(own + 2 * width);
            for (int64_t i = 0; i < items; i++) {
                const float* row = rows + (w * items + i) * 2 * width + c;
                if (!valid[w * items + i]) continue;
                vf score = load(row + width), next = larger(top, score);
                vf kept = exp_vf(top - next), e = exp_vf(score - next);
                total = total * kept + e;
                value = value * kept + e * load(row);
                top = next;
            }
            store(own, top);
            store(own + width, total);
            store(own + 2 * width, value);
        }
}
