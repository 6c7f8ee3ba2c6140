/* gr_kern_neon.c: products and scores with the instructions that every Armv8-A processor has
 * (Cortex-A53, A72).
 *
 * Products of bytes are 16 bits wide: of codes 0..15 a lane can sum eight, two lanes sixteen
 * (30480); of codes of 8 bits two (32512). Only then they are widened. */
#include <arm_neon.h>

#include "gr_kern_neon.h"

/* ---- one token: limited by memory ---- */

/* 4 inputs for all four rows of a register. */
GR_INLINE int8x16_t quad_of(const int8_t *codes)
{
    return vreinterpretq_s8_s32(vld1q_dup_s32((const int32_t *)(const void *)codes));
}

typedef struct gr_wide { /* 4 rows x 4 inputs, 16 bits each */
    int16x8_t a, b;
} gr_wide;

GR_INLINE gr_wide multiply(int8x16_t rows, int8x16_t quad)
{
    return (gr_wide){vmull_s8(vget_low_s8(rows), vget_low_s8(quad)), vmull_high_s8(rows, quad)};
}

GR_INLINE gr_wide multiply_add(gr_wide sum, int8x16_t rows, int8x16_t quad)
{
    return (gr_wide){vmlal_s8(sum.a, vget_low_s8(rows), vget_low_s8(quad)),
                     vmlal_high_s8(sum.b, rows, quad)};
}

/* 16 * sums of codes 0..15. */
GR_INLINE int32x4_t sixteen_times(gr_wide sum)
{
    return vshlq_n_s32(vpaddlq_s16(vpaddq_s16(sum.a, sum.b)), 4);
}

/* Sums of two products of bytes onto d: two numbers a row. */
GR_INLINE void widen(gr_wide sum, int32x4_t d[2])
{
    d[0] = vpadalq_s16(d[0], sum.a);
    d[1] = vpadalq_s16(d[1], sum.b);
}

/* Codes 0..15 of a group times its 32 activations, times 16. */
GR_INLINE void dots_of_nibbles(const uint8_t *c, const int8_t *codes, int32x4_t d[4])
{
    gr_wide sum[4];
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; i++) {
        int8x16_t x = quad_of(codes + 4 * i), z = quad_of(codes + 16 + 4 * i);
        for (uint32_t j = 0; j < 4; j++) {
            uint8x16_t w = vld1q_u8(c + GB_LINE * i + 16 * j);
            int8x16_t first = vreinterpretq_s8_u8(vandq_u8(w, vdupq_n_u8(15)));
            sum[j] = i == 0 ? multiply(first, x) : multiply_add(sum[j], first, x);
            sum[j] = multiply_add(sum[j], vreinterpretq_s8_u8(vshrq_n_u8(w, 4)), z);
        }
    }
    for (uint32_t j = 0; j < 4; j++)
        d[j] = sixteen_times(sum[j]);
}

/* Codes of two planes, less 128, times the activations. */
GR_INLINE void dots_of_bytes(const uint8_t *high, const uint8_t *low, const int8_t *codes,
                             int32x4_t d[4])
{
    int32x4_t two[4][2];
    for (uint32_t j = 0; j < 4; j++)
        two[j][0] = two[j][1] = vdupq_n_s32(0);
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; i++) {
        int8x16_t x = quad_of(codes + 4 * i), z = quad_of(codes + 16 + 4 * i);
        for (uint32_t j = 0; j < 4; j++) {
            int8x16_t first, second;
            uint32_t at = GB_LINE * i + 16 * j;
            join_planes(vld1q_u8(high + at), vld1q_u8(low + at), &first, &second);
            widen(multiply_add(multiply(first, x), second, z), two[j]);
        }
    }
    for (uint32_t j = 0; j < 4; j++)
        d[j] = vpaddq_s32(two[j][0], two[j][1]);
}

static void k_gemv(const gr_mat *m, const gr_act *a, uint32_t first, uint32_t token,
                   uint32_t tokens, uint32_t width, float *y, size_t ldy)
{
    const gr_dots k = {dots_of_nibbles, dots_of_bytes};
    gemv(&k, m, a, first, token, tokens, width, y, ldy);
}

/* ---- many tokens: limited by arithmetic ---- */

/* A group quad by quad, 16 rows x 4 inputs in 64 bytes: codes of 4 bits as they are, others less
 * 128. */
GR_INLINE void unpack(const uint8_t *high, const uint8_t *low, int8_t *out)
{
    for (uint32_t i = 0; i < PLANE; i += 16) {
        uint8x16_t w = vld1q_u8(high + i);
        int8x16_t first = vreinterpretq_s8_u8(vandq_u8(w, vdupq_n_u8(15)));
        int8x16_t second = vreinterpretq_s8_u8(vshrq_n_u8(w, 4));
        if (low)
            join_planes(w, vld1q_u8(low + i), &first, &second);
        vst1q_s8(out + i, first);
        vst1q_s8(out + PLANE + i, second);
    }
}

/* Rows 4j..4j+7 of an unpacked group of codes 0..15 times n (1 or 4) tokens, `ldx` apart. */
GR_INLINE void eight_rows(const int8_t *w, const int8_t *codes, size_t ldx, uint32_t n,
                          int32x4_t d[][4])
{
    gr_wide sum[4][2];
#pragma GCC unroll 8
    for (uint32_t q = 0; q < 8; q++, w += GB_LINE, codes += 4) {
        int8x16_t a = vld1q_s8(w), b = vld1q_s8(w + 16);
        for (uint32_t t = 0; t < n; t++) {
            int8x16_t x = quad_of(codes + ldx * t);
            sum[t][0] = q == 0 ? multiply(a, x) : multiply_add(sum[t][0], a, x);
            sum[t][1] = q == 0 ? multiply(b, x) : multiply_add(sum[t][1], b, x);
        }
    }
    for (uint32_t t = 0; t < n; t++) {
        d[t][0] = sixteen_times(sum[t][0]);
        d[t][1] = sixteen_times(sum[t][1]);
    }
}

/* The same of codes of 8 bits. */
GR_INLINE void eight_rows_of_bytes(const int8_t *w, const int8_t *codes, size_t ldx, uint32_t n,
                                   int32x4_t d[][4])
{
    int32x4_t two[4][4];
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t j = 0; j < 4; j++)
            two[t][j] = vdupq_n_s32(0);
#pragma GCC unroll 4
    for (uint32_t q = 0; q < 8; q += 2, w += 2 * GB_LINE, codes += 8) {
        int8x16_t a = vld1q_s8(w), b = vld1q_s8(w + 16);
        int8x16_t c = vld1q_s8(w + GB_LINE), e = vld1q_s8(w + GB_LINE + 16);
        for (uint32_t t = 0; t < n; t++) {
            int8x16_t x = quad_of(codes + ldx * t), z = quad_of(codes + ldx * t + 4);
            widen(multiply_add(multiply(a, x), c, z), two[t]);
            widen(multiply_add(multiply(b, x), e, z), two[t] + 2);
        }
    }
    for (uint32_t t = 0; t < n; t++) {
        d[t][0] = vpaddq_s32(two[t][0], two[t][1]);
        d[t][1] = vpaddq_s32(two[t][2], two[t][3]);
    }
}

/* Group g of n (1 or 4) tokens onto acc. */
GR_INLINE void tile(bool bytes, const gr_group *w, const gr_act *a, size_t token, uint32_t g,
                    uint32_t n, float acc[][PANEL])
{
    size_t at = token * a->groups + g, ld = a->groups;
    const int8_t *codes = a->codes + GROUP * at;
    int32x4_t d[4][4];
    for (uint32_t j = 0; j < 4; j += 2) {
        int32x4_t part[4][4];
        if (bytes)
            eight_rows_of_bytes(w->codes + 16 * j, codes, GROUP * ld, n, part);
        else
            eight_rows(w->codes + 16 * j, codes, GROUP * ld, n, part);
        for (uint32_t t = 0; t < n; t++)
            d[t][j] = part[t][0], d[t][j + 1] = part[t][1];
    }
    for (uint32_t t = 0; t < n; t++)
        add_zeros(w, a->asum[at + t * ld], d[t]);
    add_tile(w, a->sa + at, ld, n, d, acc);
}

static void nibbles1(const gr_group *w, const gr_act *a, size_t token, uint32_t g,
                     float acc[][PANEL])
{
    tile(false, w, a, token, g, 1, acc);
}

static void nibbles4(const gr_group *w, const gr_act *a, size_t token, uint32_t g,
                     float acc[][PANEL])
{
    tile(false, w, a, token, g, 4, acc);
}

static void bytes1(const gr_group *w, const gr_act *a, size_t token, uint32_t g,
                   float acc[][PANEL])
{
    tile(true, w, a, token, g, 1, acc);
}

static void bytes4(const gr_group *w, const gr_act *a, size_t token, uint32_t g,
                   float acc[][PANEL])
{
    tile(true, w, a, token, g, 4, acc);
}

/* n <= TILE tokens of a panel. */
static void some_tokens(const gr_mat *m, const gr_act *a, uint32_t panel, size_t token,
                        uint32_t n, float acc[][PANEL])
{
    gr_walk walk = gr_walk_panel(m, panel);
    gr_block b;
    gr_group w;
    while (gr_walk_next(&walk, &b)) {
        for (uint32_t i = 0, t; i < b.count; i++) {
            uint32_t g = b.group + i;
            size_t at = (size_t)b.step * i;
            unpack(b.high + at, b.low ? b.low + at : NULL, w.codes);
            group_scales(&b, i, 0, &w);
            for (t = 0; t + 4 <= n; t += 4)
                (b.low ? bytes4 : nibbles4)(&w, a, token + t, g, acc + t);
            for (; t < n; t++)
                (b.low ? bytes1 : nibbles1)(&w, a, token + t, g, acc + t);
        }
    }
}

static void k_gemm(const gr_mat *m, const gr_act *a, uint32_t first, uint32_t token,
                   uint32_t tokens, uint32_t width, float *y, size_t ldy)
{
    gemm(some_tokens, m, a, first, token, tokens, width, y, ldy);
}

/* ---- attention: four positions at a time ---- */

/* q[0..n) times the keys' values from `at`: pairs of products of 8-bit codes fit 16 bits. */
GR_INLINE int32x4_t dots_of_keys(const int8_t *q, const gr_keys *keys, uint32_t at, uint32_t n)
{
    int32x4_t d[4] = {vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)};
    uint32_t i = 0;
    for (; i + 16 <= n; i += 16) {
        int8x16_t x = vld1q_s8(q + i);
        for (uint32_t p = 0; p < 4; p++) {
            int8x16_t k = vld1q_s8(keys->k[p] + at + i);
            int16x8_t two = vmull_s8(vget_low_s8(x), vget_low_s8(k));
            d[p] = vpadalq_s16(d[p], vmlal_high_s8(two, x, k));
        }
    }
    int32x4_t sum = vpaddq_s32(vpaddq_s32(d[0], d[1]), vpaddq_s32(d[2], d[3]));
    return i < n ? vaddq_s32(sum, rest_of_keys(q, keys, at, i, n)) : sum;
}

static void k_score(const gr_queries *q, const gr_span *s, uint32_t dim, uint32_t group,
                    float *out, size_t ldo)
{
    score(dots_of_keys, q, s, dim, group, out, ldo);
}

const gr_kernels gr_kernels_neon = {
    .name = "neon", .gemv = k_gemv, .gemm = k_gemm, .score = k_score,
};
