/* gm_kern_avx2.c: the same kernels for x86 with AVX2, eight rows side by side. FMA stays off: a
 * fused product would round differently from the other build. */
#if defined(__x86_64__) && defined(__GNUC__)
#define GM_V 8
#define GM_TARGET __attribute__((target("avx2,no-fma")))
#define GM_FN(name) gm8_##name
#define GM_KERNELS gm_kernels_avx2
#include "gm_kern.h"
#else
typedef int gm_kern_avx2_is_empty; /* ISO C wants a declaration in every unit */
#endif
