/* gr_kern_mmla.c: products of many tokens with SMMLA, Armv8.6 or the i8mm extension.
 *
 * SMMLA multiplies 2 rows of 8 bytes by 2 rows of 8 bytes: here 2 tokens by 2 weight rows. One
 * token alone gains nothing from it, so there is no GEMV: SDOT's stays. */
#include <arm_neon.h>

#include "gr_kern_neon.h"

enum { OCTET = 2 * GB_LINE }; /* bytes of 16 rows x 8 inputs */

/* Rows 4j..4j+3 of two neighbouring quads to two registers of 2 rows x 8 inputs. */
GR_INLINE void put_octet(int8_t *out, uint32_t j, int8x16_t quad, int8x16_t next)
{
    int32x4_t a = vreinterpretq_s32_s8(quad), b = vreinterpretq_s32_s8(next);
    vst1q_s8(out + 32 * j, vreinterpretq_s8_s32(vzip1q_s32(a, b)));
    vst1q_s8(out + 32 * j + 16, vreinterpretq_s8_s32(vzip2q_s32(a, b)));
}

/* Registers of codes (4 rows x 4 inputs) to signed bytes of the quads i and i + 4. */
GR_INLINE void split(const uint8_t *high, const uint8_t *low, int8x16_t *first, int8x16_t *second)
{
    uint8x16_t w = vld1q_u8(high), v = low ? vld1q_u8(low) : w;
    if (low)
        join_planes(1, &w, &v, first, second);
    else
        split_nibbles(w, first, second);
}

/* A group as signed bytes, 8 inputs after another: 2 rows x 8 inputs a register. */
GR_INLINE void unpack(const uint8_t *high, const uint8_t *low, int8_t *out)
{
    for (uint32_t i = 0; i < 4; i += 2) { /* lines i and i + 1: quads i, i + 1, i + 4, i + 5 */
        for (uint32_t j = 0; j < 4; j++) {
            int8x16_t a, b, c, d;
            uint32_t at = GB_LINE * i + 16 * j, next = at + GB_LINE;
            split(high + at, low ? low + at : NULL, &a, &b);
            split(high + next, low ? low + next : NULL, &c, &d);
            put_octet(out + OCTET * (i / 2), j, a, c);
            put_octet(out + OCTET * (i / 2 + 2), j, b, d);
        }
    }
}

/* 16 inputs of two tokens: the first 8 of both, then the others. */
GR_INLINE void two_tokens(const int8_t *x, size_t ldx, int8x16_t out[2])
{
    int64x2_t a = vreinterpretq_s64_u8(load_here(x)), b = vreinterpretq_s64_u8(load_here(x + ldx));
    out[0] = vreinterpretq_s8_s64(vzip1q_s64(a, b));
    out[1] = vreinterpretq_s8_s64(vzip2q_s64(a, b));
}

/* Sums of 2 tokens x 2 rows to the four rows of either token. */
GR_INLINE void part_tokens(int32x4_t a, int32x4_t b, int32x4_t *first, int32x4_t *second)
{
    int64x2_t x = vreinterpretq_s64_s32(a), y = vreinterpretq_s64_s32(b);
    *first = vreinterpretq_s32_s64(vzip1q_s64(x, y));
    *second = vreinterpretq_s32_s64(vzip2q_s64(x, y));
}

/* d[t] = an unpacked group times the activations of 2 * pairs tokens, `ldx` apart. */
GR_INLINE void dots(const int8_t *w, const int8_t *codes, size_t ldx, uint32_t pairs,
                    int32x4_t d[][4])
{
    int32x4_t sum[2][8];
    for (uint32_t t = 0; t < pairs; t++)
        for (uint32_t r = 0; r < 8; r++)
            sum[t][r] = vdupq_n_s32(0);
    uint8x16_t next[4];
    int8x16_t now[4], x[2][2];
    for (uint32_t r = 0; r < 4; r++)
        next[r] = load_here(w + 16 * r);
#pragma GCC unroll 8
    for (uint32_t half = 0; half < 8; half++, w += OCTET / 2) { /* of an octet: 8 rows */
        for (uint32_t t = 0; half % 4 == 0 && t < pairs; t++)
            two_tokens(codes + 2 * t * ldx + 4 * half, ldx, x[t]);
        for (uint32_t r = 0; r < 4; r++) {
            now[r] = vreinterpretq_s8_u8(next[r]);
            if (half < 7)
                next[r] = load_here(w + OCTET / 2 + 16 * r);
        }
        for (uint32_t r = 0; r < 4; r++) {
            uint32_t row = half % 2 * 4 + r;
            for (uint32_t t = 0; t < pairs; t++)
                sum[t][row] = vmmlaq_s32(sum[t][row], x[t][half / 2 % 2], now[r]);
        }
    }
    for (uint32_t t = 0; t < pairs; t++)
        for (uint32_t j = 0; j < 4; j++)
            part_tokens(sum[t][2 * j], sum[t][2 * j + 1], &d[2 * t][j], &d[2 * t + 1][j]);
}

/* Group g of n (1, 2 or 4) tokens onto acc. A lone token is its own partner. */
GR_INLINE void tile(const gr_group *w, const gr_act *a, size_t token, uint32_t g, uint32_t n,
                    float acc[][PANEL])
{
    size_t at = token * a->groups + g, ld = n == 1 ? 0 : a->groups;
    int32x4_t d[4][4];
    dots(w->codes, a->codes + GROUP * at, GROUP * ld, n == 4 ? 2 : 1, d);
    for (uint32_t t = 0; t < n; t++)
        add_zeros(w, a->asum[at + t * ld], d[t]);
    add_tile(w, a->sa + at, ld, n, d, acc);
}

OWN_CODE void tile1(const gr_group *w, const gr_act *a, size_t token, uint32_t g,
                    float acc[][PANEL])
{
    tile(w, a, token, g, 1, acc);
}

OWN_CODE void tile2(const gr_group *w, const gr_act *a, size_t token, uint32_t g,
                    float acc[][PANEL])
{
    tile(w, a, token, g, 2, acc);
}

OWN_CODE void tile4(const gr_group *w, const gr_act *a, size_t token, uint32_t g,
                    float acc[][PANEL])
{
    tile(w, a, token, g, 4, acc);
}

/* n <= TILE tokens of a panel. */
static void some_tokens(const gr_mat *m, const gr_act *a, uint32_t panel, size_t token,
                        uint32_t n, float acc[][PANEL])
{
    gr_walk walk = gr_walk_panel(m, panel, 1);
    gr_block b;
    gr_group w;
    while (gr_walk_next(&walk, &b)) {
        for (uint32_t i = 0, t; i < b.count; i++) {
            uint32_t g = b.group + i;
            size_t at = (size_t)b.step * i;
            unpack(b.high + at, b.low ? b.low + at : NULL, w.codes);
            group_scales(&b, i, 8, &w);
            for (t = 0; t + 4 <= n; t += 4)
                tile4(&w, a, token + t, g, acc + t);
            for (; t + 2 <= n; t += 2)
                tile2(&w, a, token + t, g, acc + t);
            if (t < n)
                tile1(&w, a, token + t, g, acc + t);
        }
    }
}

static void k_gemm(const gr_mat *m, const gr_act *a, uint32_t first, uint32_t token,
                   uint32_t tokens, uint32_t width, float *y, size_t ldy)
{
    gemm(some_tokens, m, a, first, token, tokens, width, y, ldy);
}

const gr_kernels gr_kernels_i8mm = {.name = "i8mm", .gemm = k_gemm};
