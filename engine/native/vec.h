/* Sixteen-lane float vectors, written with the compiler's vector extension, so that one source serves AVX-512,
 * AVX2 and plain machines. The build compiles it once for each level; the level is chosen when the package loads.
 */
#ifndef ENGINE_VEC_H
#define ENGINE_VEC_H

#include <stdint.h>
#include <string.h>

#define LANES 16
#define PANEL 32 /* columns of one packed weight panel */

typedef float vf __attribute__((vector_size(64)));
typedef float vfu __attribute__((vector_size(64), aligned(4)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef int32_t viu __attribute__((vector_size(64), aligned(4)));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16") /* small loops over registers vanish, or their arrays live in memory */

INLINE vf load(const float* p) { return *(const vfu*)p; }
INLINE void store(float* p, vf v) { *(vfu*)p = v; }
INLINE vf splat(float x) { return (vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE vf as_float(vi v) { return (vf)v; }

INLINE float sum(vf v) {
    /* A fixed tree, so that equal inputs give equal bits. */
    float a[LANES];
    store(a, v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) a[i] += a[i + width];
    return a[0];
}

INLINE vf select_vf(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

/* e^x in float32, relative error below 2e-7 (range reduction by ln 2 in two parts, polynomial of degree 6). */
INLINE vf exp_vf(vf x) {
    x = select_vf(x < -87.0f, splat(-87.0f), x);
    x = select_vf(x > 88.0f, splat(88.0f), x);
    vf shifted = x * 1.44269504088896341f + 12582912.0f; /* rounds to the nearest integer in the low bits */
    vi n = (vi)shifted - 0x4B400000;
    vf k = shifted - 12582912.0f;
    vf r = x - k * 0.693359375f;
    r = r + k * 2.12194440e-4f;
    vf p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return (vf)((vi)p + (n << 23));
}

INLINE float exp_f(float x) {
    float a[LANES];
    store(a, exp_vf(splat(x)));
    return a[0];
}

#endif
