/* gr_kern_neon.c: products and scores with the instructions that every Armv8-A processor has
 * (Cortex-A53, A72).
 *
 * Products of bytes are 16 bits wide: of codes 0..15 a lane can sum eight, two lanes sixteen
 * (30480); of codes of 8 bits two (32512). Only then they are widened. */
#include <arm_neon.h>

#include "gr_kern_neon.h"

/* ---- one token: limited by memory ---- */

/* 4 inputs for all four rows of a register; the lane is a literal. */
#define QUAD(X, I) vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_u8(X), I))

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
GR_INLINE void sixteen_times(uint32_t n, const gr_wide *sum, int32x4_t *d)
{
    int16x8_t two[4];
    for (uint32_t j = 0; j < n; j++)
        two[j] = vpaddq_s16(sum[j].a, sum[j].b);
    for (uint32_t j = 0; j < n; j++)
        d[j] = vpaddlq_s16(two[j]);
    for (uint32_t j = 0; j < n; j++)
        d[j] = vshlq_n_s32(d[j], 4);
}

/* Sums of two products of bytes onto d, or to it: two numbers a row. */
GR_INLINE void widen(bool begin, gr_wide sum, int32x4_t d[2])
{
    d[0] = begin ? vpaddlq_s16(sum.a) : vpadalq_s16(d[0], sum.a);
    d[1] = begin ? vpaddlq_s16(sum.b) : vpadalq_s16(d[1], sum.b);
}

/* 16 * codes 0..15 of a group times its 32 activations. The next line's codes are loaded between
 * the two halves of a line's products. */
GR_INLINE void dots_of_nibbles(const uint8_t *c, const int8_t *codes, int32x4_t d[4])
{
    const uint8x16_t x = load_here(codes), z = load_here(codes + 16);
    int8x16_t first[4], second[4], p, q;
    uint8x16_t w[4];
    gr_wide sum[4];
    for (uint32_t j = 0; j < 4; j++)
        w[j] = load_here(c + 16 * j);
#define LINE(I)                                                                               \
    prefetch(c + GB_LINE * (I));                                                              \
    p = QUAD(x, I), q = QUAD(z, I);                                                           \
    for (uint32_t j = 0; j < 4; j++)                                                          \
        first[j] = vreinterpretq_s8_u8(vandq_u8(w[j], vdupq_n_u8(15)));                       \
    for (uint32_t j = 0; j < 4; j++)                                                          \
        second[j] = vreinterpretq_s8_u8(vshrq_n_u8(w[j], 4));                                 \
    for (uint32_t j = 0; j < 4; j++)                                                          \
        sum[j] = (I) == 0 ? multiply(first[j], p) : multiply_add(sum[j], first[j], p);        \
    for (uint32_t j = 0; (I) < 3 && j < 4; j++)                                               \
        w[j] = load_here(c + GB_LINE * ((I) + 1) + 16 * j);                                   \
    for (uint32_t j = 0; j < 4; j++)                                                          \
        sum[j] = multiply_add(sum[j], second[j], q);
    LINE(0) LINE(1) LINE(2) LINE(3)
#undef LINE
    sixteen_times(4, sum, d);
}

/* Codes of two planes, less 128, times the activations. */
GR_INLINE void dots_of_bytes(const uint8_t *high, const uint8_t *low, const int8_t *codes,
                             int32x4_t d[4])
{
    const uint8x16_t x = load_here(codes), z = load_here(codes + 16);
    int32x4_t two[4][2];
    int8x16_t first[4], second[4], p, q;
    uint8x16_t w[4], v[4];
    gr_wide sum[4];
#define LINE(I)                                                                               \
    for (uint32_t j = 0; j < 4; j++) {                                                        \
        w[j] = load_here(high + GB_LINE * (I) + 16 * j);                                      \
        v[j] = load_here(low + GB_LINE * (I) + 16 * j);                                       \
    }                                                                                         \
    prefetch(high + GB_LINE * (I)), prefetch(low + GB_LINE * (I));                            \
    p = QUAD(x, I), q = QUAD(z, I);                                                           \
    join_planes(4, w, v, first, second);                                                      \
    for (uint32_t j = 0; j < 4; j++)                                                          \
        sum[j] = multiply(first[j], p);                                                       \
    for (uint32_t j = 0; j < 4; j++)                                                          \
        sum[j] = multiply_add(sum[j], second[j], q);                                          \
    for (uint32_t j = 0; j < 4; j++)                                                          \
        widen((I) == 0, sum[j], two[j]);
    LINE(0) LINE(1) LINE(2) LINE(3)
#undef LINE
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
        uint8x16_t v = low ? vld1q_u8(low + i) : w;
        if (low)
            join_planes(1, &w, &v, &first, &second);
        vst1q_s8(out + i, first);
        vst1q_s8(out + PLANE + i, second);
    }
}

/* d[t] = 16 * an unpacked group of codes 0..15 times n (1 or 2) tokens, `ldx` apart. Lane I of X is
 * quad Q; a quad's codes are loaded before the quad before is multiplied. */
GR_INLINE void dots_of_codes(const int8_t *w, const int8_t *codes, size_t ldx, uint32_t n,
                             int32x4_t d[][4])
{
    uint8x16_t x[2], z[2], next[4];
    int8x16_t now[4], quad[2];
    gr_wide sum[2][4];
    for (uint32_t t = 0; t < n; t++)
        x[t] = load_here(codes + ldx * t), z[t] = load_here(codes + ldx * t + 16);
    for (uint32_t j = 0; j < 4; j++)
        next[j] = load_here(w + 16 * j);
#define STEP(Q, X, I)                                                                         \
    for (uint32_t t = 0; t < n; t++)                                                          \
        quad[t] = QUAD(X[t], I);                                                              \
    for (uint32_t j = 0; j < 4; j++) {                                                        \
        now[j] = vreinterpretq_s8_u8(next[j]);                                                \
        if ((Q) < 7)                                                                          \
            next[j] = load_here(w + GB_LINE * ((Q) + 1) + 16 * j);                            \
    }                                                                                         \
    for (uint32_t j = 0; j < 4; j++)                                                          \
        for (uint32_t t = 0; t < n; t++)                                                      \
            sum[t][j] = (Q) == 0 ? multiply(now[j], quad[t])                                  \
                                 : multiply_add(sum[t][j], now[j], quad[t]);
    STEP(0, x, 0) STEP(1, x, 1) STEP(2, x, 2) STEP(3, x, 3)
    STEP(4, z, 0) STEP(5, z, 1) STEP(6, z, 2) STEP(7, z, 3)
#undef STEP
    for (uint32_t t = 0; t < n; t++)
        sixteen_times(4, sum[t], d[t]);
}

/* The same of codes of 8 bits: only quads i and i + 4 together fit 16 bits. */
GR_INLINE void dots_of_byte_codes(const int8_t *w, const int8_t *codes, size_t ldx, uint32_t n,
                                  int32x4_t d[][4])
{
    uint8x16_t x[2], z[2];
    int32x4_t two[2][4][2];
    gr_wide sum[4];
    for (uint32_t t = 0; t < n; t++)
        x[t] = load_here(codes + ldx * t), z[t] = load_here(codes + ldx * t + 16);
#define STEP(I)                                                                               \
    for (uint32_t t = 0; t < n; t++) {                                                        \
        int8x16_t p = QUAD(x[t], I), q = QUAD(z[t], I);                                       \
        for (uint32_t j = 0; j < 4; j++)                                                      \
            sum[j] = multiply(vld1q_s8(w + GB_LINE * (I) + 16 * j), p);                       \
        for (uint32_t j = 0; j < 4; j++)                                                      \
            sum[j] = multiply_add(sum[j], vld1q_s8(w + PLANE + GB_LINE * (I) + 16 * j), q);   \
        for (uint32_t j = 0; j < 4; j++)                                                      \
            widen((I) == 0, sum[j], two[t][j]);                                               \
    }
    STEP(0) STEP(1) STEP(2) STEP(3)
#undef STEP
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t j = 0; j < 4; j++)
            d[t][j] = vpaddq_s32(two[t][j][0], two[t][j][1]);
}

/* Group g of n (1 or 2) tokens onto acc. */
GR_INLINE void tile(bool bytes, const gr_group *w, const gr_act *a, size_t token, uint32_t g,
                    uint32_t n, float acc[][PANEL])
{
    size_t at = token * a->groups + g, ld = a->groups;
    int32x4_t d[4][4];
    if (bytes)
        dots_of_byte_codes(w->codes, a->codes + GROUP * at, GROUP * ld, n, d);
    else
        dots_of_codes(w->codes, a->codes + GROUP * at, GROUP * ld, n, d);
    for (uint32_t t = 0; t < n; t++)
        add_zeros(w, a->asum[at + t * ld], d[t]);
    add_tile(w, a->sa + at, ld, n, d, acc);
}

OWN_CODE void nibbles1(const gr_group *w, const gr_act *a, size_t token, uint32_t g,
                       float acc[][PANEL])
{
    tile(false, w, a, token, g, 1, acc);
}

OWN_CODE void nibbles2(const gr_group *w, const gr_act *a, size_t token, uint32_t g,
                       float acc[][PANEL])
{
    tile(false, w, a, token, g, 2, acc);
}

OWN_CODE void bytes1(const gr_group *w, const gr_act *a, size_t token, uint32_t g,
                     float acc[][PANEL])
{
    tile(true, w, a, token, g, 1, acc);
}

OWN_CODE void bytes2(const gr_group *w, const gr_act *a, size_t token, uint32_t g,
                     float acc[][PANEL])
{
    tile(true, w, a, token, g, 2, acc);
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
            group_scales(&b, i, 0, &w);
            for (t = 0; t + 2 <= n; t += 2)
                (b.low ? bytes2 : nibbles2)(&w, a, token + t, g, acc + t);
            if (t < n)
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
