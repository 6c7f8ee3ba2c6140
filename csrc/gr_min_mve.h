/* gr_min_mve.h: products of integers by Helium, the vectors of Cortex-M55 and later, in place of
 * what gr_min_kern.c and gr_min_model.c do in plain C: the same bits, for an eighth of the
 * instructions (benchmarks/firmware.md). Floats stay with the floating-point unit: vectors of them
 * flush what is near zero, and not every such core has them. */
#ifndef GR_MIN_MVE_H
#define GR_MIN_MVE_H

#include <arm_mve.h>

#include "gr_min.h"

/* Of a row its 4 bytes in each line are gathered: its 32 codes in order, low nibbles first. */
static inline void dots(const uint8_t *codes, const int8_t *x, int32_t d[GB_PANEL])
{
    const uint32x4_t lines = vmulq_n_u32(vidupq_n_u32(0, 1), GB_LINE);
    int8x16_t first = vldrbq_s8(x), second = vldrbq_s8(x + 16);
#pragma GCC unroll 4
    for (uint32_t r = 0; r < GB_PANEL; r++) {
        const uint32_t *row = (const uint32_t *)(const void *)(codes + 4 * r);
        uint8x16_t code = vreinterpretq_u8_u32(vldrwq_gather_offset_u32(row, lines));
        int8x16_t low = vreinterpretq_s8_u8(vandq_u8(code, vdupq_n_u8(15)));
        int8x16_t high = vreinterpretq_s8_u8(vshrq_n_u8(code, 4));
        d[r] = vmladavaq_s8(vmladavq_s8(low, first), high, second);
    }
}

static inline void whole(const uint8_t *zeros, const uint8_t *scales, int32_t asum,
                         const int32_t low[GB_PANEL], int32_t d[GB_PANEL])
{
    for (uint32_t r = 0; r < GB_PANEL; r += 4) {
        int32x4_t sum = vaddq_s32(vshlq_n_s32(vldrwq_s32(d + r), 4), vldrwq_s32(low + r));
        if (zeros)
            sum = vmlaq_n_s32(sum, vreinterpretq_s32_u32(vldrbq_u32(zeros + r)), -asum);
        else
            sum = vsubq_n_s32(sum, 128 * asum);
        if (scales)
            sum = vmulq_s32(sum, vreinterpretq_s32_u32(vldrbq_u32(scales + r)));
        vstrwq_s32(d + r, sum);
    }
}

static inline int32_t dot_of(const int8_t *a, const int8_t *b, uint32_t n)
{
    int32_t sum = 0;
    for (; n >= 16; n -= 16, a += 16, b += 16)
        sum = vmladavaq_s8(sum, vldrbq_s8(a), vldrbq_s8(b));
    mve_pred16_t rest = vctp8q(n);
    return vmladavaq_p_s8(sum, vldrbq_z_s8(a, rest), vldrbq_z_s8(b, rest), rest);
}

#endif
