/* gr_kern_dot.c: products and scores with SDOT, Armv8.2 with dotprod (Cortex-A55, A76, A78).
 *
 * SDOT adds four products of bytes to each of four lanes, and a lane of its last operand can stand
 * for all four: a register of codes is 4 rows x 4 inputs, a lane of activations the same 4 inputs.
 * Lanes must be literals, so what repeats over them is a macro. */
#include <arm_neon.h>

#include "gr_kern_neon.h"

/* ---- one token: limited by memory ---- */

/* 16 * codes 0..15 of a group times its 32 activations. */
GR_INLINE void dots_of_nibbles(const uint8_t *c, const int8_t *codes, int32x4_t d[4])
{
    const int8x16_t x = vld1q_s8(codes), z = vld1q_s8(codes + 16);
    int8x16_t first[4], second[4];
    uint8x16_t w[4];
    for (uint32_t j = 0; j < 4; j++)
        w[j] = load_here(c + 16 * j), d[j] = vdupq_n_s32(0);
#define LINE(I)                                                                               \
    prefetch(c + 64 * (I));                                                                   \
    for (uint32_t j = 0; j < 4; j++)                                                          \
        first[j] = vreinterpretq_s8_u8(vandq_u8(w[j], vdupq_n_u8(15)));                       \
    for (uint32_t j = 0; j < 4; j++)                                                          \
        second[j] = vreinterpretq_s8_u8(vshrq_n_u8(w[j], 4));                                 \
    for (uint32_t j = 0; (I) < 3 && j < 4; j++)                                               \
        w[j] = load_here(c + 64 * ((I) + 1) + 16 * j);                                        \
    for (uint32_t j = 0; j < 4; j++)                                                          \
        d[j] = vdotq_laneq_s32(d[j], first[j], x, I);                                         \
    for (uint32_t j = 0; j < 4; j++)                                                          \
        d[j] = vdotq_laneq_s32(d[j], second[j], z, I);
    LINE(0) LINE(1) LINE(2) LINE(3)
#undef LINE
    for (uint32_t j = 0; j < 4; j++)
        d[j] = vshlq_n_s32(d[j], 4);
}

/* Codes of two planes, less 128, times the activations. */
GR_INLINE void dots_of_bytes(const uint8_t *high, const uint8_t *low, const int8_t *codes,
                             int32x4_t d[4])
{
    const int8x16_t x = vld1q_s8(codes), z = vld1q_s8(codes + 16);
    int8x16_t first[4], second[4];
    uint8x16_t w[4], v[4];
    for (uint32_t j = 0; j < 4; j++) {
        w[j] = load_here(high + 16 * j), v[j] = load_here(low + 16 * j);
        d[j] = vdupq_n_s32(0);
    }
#define LINE(I)                                                                               \
    prefetch(high + 64 * (I)), prefetch(low + 64 * (I));                                      \
    join_planes(4, w, v, first, second);                                                      \
    for (uint32_t j = 0; (I) < 3 && j < 4; j++) {                                             \
        w[j] = load_here(high + 64 * ((I) + 1) + 16 * j);                                     \
        v[j] = load_here(low + 64 * ((I) + 1) + 16 * j);                                      \
    }                                                                                         \
    for (uint32_t j = 0; j < 4; j++)                                                          \
        d[j] = vdotq_laneq_s32(d[j], first[j], x, I);                                         \
    for (uint32_t j = 0; j < 4; j++)                                                          \
        d[j] = vdotq_laneq_s32(d[j], second[j], z, I);
    LINE(0) LINE(1) LINE(2) LINE(3)
#undef LINE
}

static void k_gemv(const gr_mat *m, const gr_act *a, uint32_t first, uint32_t token,
                   uint32_t tokens, uint32_t width, float *y, size_t ldy)
{
    const gr_dots k = {dots_of_nibbles, dots_of_bytes};
    gemv(&k, m, a, first, token, tokens, width, y, ldy);
}

/* ---- many tokens: limited by arithmetic ---- */

/* A group as signed bytes, quad by quad: 16 rows x 4 inputs in 64 bytes. */
GR_INLINE void unpack(const uint8_t *high, const uint8_t *low, int8_t *out)
{
    for (uint32_t i = 0; i < PLANE; i += 16) {
        int8x16_t first, second;
        uint8x16_t w = vld1q_u8(high + i), v = low ? vld1q_u8(low + i) : w;
        if (low)
            join_planes(1, &w, &v, &first, &second);
        else
            split_nibbles(w, &first, &second);
        vst1q_s8(out + i, first);
        vst1q_s8(out + PLANE + i, second);
    }
}

/* What the zero points make of the sums of a token. */
GR_INLINE void start_sums(const gr_group *w, int32_t asum, int32x4_t d[4])
{
    int16x8_t a = vld1q_s16(w->zero), b = vld1q_s16(w->zero + 8);
    int16_t s = (int16_t)asum;
    d[0] = vmull_n_s16(vget_low_s16(a), s);
    d[1] = vmull_high_n_s16(a, s);
    d[2] = vmull_n_s16(vget_low_s16(b), s);
    d[3] = vmull_high_n_s16(b, s);
}

/* d[t] += an unpacked group times the activations of n (1 or 4) tokens, `ldx` apart. A quad's codes
 * are loaded while the quad before is multiplied. */
GR_INLINE void dots(const int8_t *w, const int8_t *codes, size_t ldx, uint32_t n,
                    int32x4_t d[][4])
{
    int8x16_t x[4];
    uint8x16_t now[4], next[4];
    for (uint32_t j = 0; j < 4; j++)
        next[j] = load_here(w + 16 * j);
#pragma GCC unroll 2
    for (uint32_t half = 0; half < 2; half++, w += PLANE, codes += 16) {
        for (uint32_t t = 0; t < n; t++)
            x[t] = vld1q_s8(codes + ldx * t);
#define QUAD(I)                                                                               \
    for (uint32_t j = 0; j < 4; j++) {                                                        \
        now[j] = next[j];                                                                     \
        if ((I) < 3 || half == 0)                                                             \
            next[j] = load_here(w + GB_LINE * ((I) + 1) + 16 * j);                            \
        for (uint32_t t = 0; t < n; t++)                                                      \
            d[t][j] = vdotq_laneq_s32(d[t][j], vreinterpretq_s8_u8(now[j]), x[t], I);         \
    }
        QUAD(0) QUAD(1) QUAD(2) QUAD(3)
#undef QUAD
    }
}

/* Group g of n (1 or 4) tokens onto acc. */
GR_INLINE void tile(const gr_group *w, const gr_act *a, size_t token, uint32_t g, uint32_t n,
                    float acc[][PANEL])
{
    size_t at = token * a->groups + g, ld = a->groups;
    int32x4_t d[4][4];
    for (uint32_t t = 0; t < n; t++)
        start_sums(w, a->asum[at + t * ld], d[t]);
    dots(w->codes, a->codes + GROUP * at, GROUP * ld, n, d);
    add_tile(w, a->sa + at, ld, n, d, acc);
}

OWN_CODE void tile1(const gr_group *w, const gr_act *a, size_t token, uint32_t g,
                    float acc[][PANEL])
{
    tile(w, a, token, g, 1, acc);
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
            for (; t < n; t++)
                tile1(&w, a, token + t, g, acc + t);
        }
    }
}

static void k_gemm(const gr_mat *m, const gr_act *a, uint32_t first, uint32_t token,
                   uint32_t tokens, uint32_t width, float *y, size_t ldy)
{
    gemm(some_tokens, m, a, first, token, tokens, width, y, ldy);
}

/* ---- attention: four positions at a time ---- */

/* q[0..n) times the keys' values from `at`, four positions. */
GR_INLINE int32x4_t dots_of_keys(const int8_t *q, const gr_keys *keys, uint32_t at, uint32_t n)
{
    int32x4_t d[4] = {vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)};
    uint32_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (uint32_t p = 0; p < 4; p++)
            d[p] = vdotq_s32(d[p], vld1q_s8(q + i), vld1q_s8(keys->k[p] + at + i));
    int32x4_t sum = vpaddq_s32(vpaddq_s32(d[0], d[1]), vpaddq_s32(d[2], d[3]));
    return i < n ? vaddq_s32(sum, rest_of_keys(q, keys, at, i, n)) : sum;
}

static void k_score(const gr_queries *q, const gr_span *s, uint32_t dim, uint32_t group,
                    float *out, size_t ldo)
{
    score(dots_of_keys, q, s, dim, group, out, ldo);
}

const gr_kernels gr_kernels_dotprod = {
    .name = "dotprod", .gemv = k_gemv, .gemm = k_gemm, .score = k_score,
};
