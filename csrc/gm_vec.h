/* Vectors of GM_V floats for the kernels of the compile-host helper.
 *
 * A kernel file is compiled once for every instruction set with its own GM_V. One lane holds one
 * matrix row (or one column), and no operation ever crosses lanes, so the width never shows in a
 * result. Only IEEE + - * / and comparisons are used; minima, maxima and choices are made with
 * masks because a compiler may turn `a < b ? a : b` into a jump and then vectorise nothing.
 */
#ifndef GM_V
#error "define GM_V, GM_TARGET and GM_FN before including gm_vec.h"
#endif

#define GM_INLINE static inline __attribute__((always_inline)) GM_TARGET

typedef float GM_FN(vec) __attribute__((vector_size(4 * GM_V)));
typedef int32_t GM_FN(ivec) __attribute__((vector_size(4 * GM_V)));
typedef double GM_FN(dvec) __attribute__((vector_size(4 * GM_V))); /* GM_V / 2 doubles */
#define vec GM_FN(vec)
#define ivec GM_FN(ivec)
#define dvec GM_FN(dvec)

#define GM_ROUND 12582912.0f /* 1.5 * 2^23: adding and subtracting it rounds to even */

GM_INLINE vec GM_FN(splat)(float x)
{
    return (vec){0.0f} + x;
}

GM_INLINE vec GM_FN(keep)(ivec mask, vec x) /* x where the mask is set, else +0 */
{
    return (vec)(mask & (ivec)x);
}

GM_INLINE vec GM_FN(pick)(ivec mask, vec x, vec y) /* mask ? x : y */
{
    return (vec)((mask & (ivec)x) | (~mask & (ivec)y));
}

GM_INLINE vec GM_FN(min)(vec x, vec y)
{
    return GM_FN(pick)(x < y, x, y);
}

GM_INLINE vec GM_FN(max)(vec x, vec y)
{
    return GM_FN(pick)(x > y, x, y);
}

/* round(clamp(t, 0, 15)) with two masks only: 15 - max(15 - t, 0), then max(.., 0). */
GM_INLINE vec GM_FN(code15)(vec t)
{
    vec u = 15.0f - t;
    u = 15.0f - GM_FN(keep)(u > 0.0f, u);
    u = GM_FN(keep)(u > 0.0f, u);
    return (u + GM_ROUND) - GM_ROUND;
}

/* round(clamp(t, -127, 127)) */
GM_INLINE vec GM_FN(code127)(vec t)
{
    vec u = GM_FN(max)(GM_FN(min)(t, GM_FN(splat)(127.0f)), GM_FN(splat)(-127.0f));
    return (u + GM_ROUND) - GM_ROUND;
}
