/* gr_math.c: float primitives as functions, for the engine's few scalar uses and for tests.
 *
 * Kernels use the inline forms of gr_kern.h; both give the same bits. No libm. */
#include "gr_internal.h"
#include "gr_kern.h"

float gr_fmaf_soft(float x, float y, float z)
{
    return gr_fmaf_exact(x, y, z);
}

float gr_expf(float x)
{
    return gr_exp(x);
}

float gr_tanhf(float x)
{
    return gr_tanh(x);
}

/* Digit by digit in integers: the same on every target, and it needs no compiler flag to keep the
 * C library out. One call per norm, so its 25 steps do not matter. */
float gr_sqrtf(float x)
{
    uint32_t u = gr_bits(x);
    if ((u & 0x7FFFFFFFu) == 0)
        return x; /* +0 and -0 */
    if (u >= GR_EXPONENT) /* negative, infinity, NaN */
        return u == GR_EXPONENT ? x : (x - x) / 0.0f;
    uint32_t m = u & 0x7FFFFFu;
    int32_t e = (int32_t)(u >> 23);
    if (e == 0)
        for (e = 1; !(m & 0x800000u); e--)
            m <<= 1;
    m |= 0x800000u;
    e -= 127;
    uint64_t rest = (uint64_t)m << (e & 1 ? 26 : 25), root = 0; /* value * 2^48, value in [1, 4) */
    for (uint64_t bit = 1u << 24; bit; bit >>= 1) {
        uint64_t trial = (root << 1 | bit) * bit; /* (root + bit)^2 - root^2 */
        uint64_t fits = 0u - (uint64_t)(rest >= trial); /* no branch (D5) */
        rest -= trial & fits;
        root |= bit & fits;
    }
    /* 25 bits, the last one being the half. A tie would be the square of an odd root: it is odd,
     * and `rest` started even. */
    uint32_t mantissa = (uint32_t)(root + (root & 1)) >> 1;
    int32_t half = (e - (e & 1)) / 2 + 127;
    return gr_float(((uint32_t)half << 23) + (mantissa - 0x800000u));
}
