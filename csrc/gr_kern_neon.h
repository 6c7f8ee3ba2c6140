/* gr_kern_neon.h: what the AArch64 kernels share: codes and scales of a group, the step from integer
 * sums to floats, scores. To be included after <arm_neon.h>.
 *
 * 16 rows are four registers of four: index j below is rows 4j..4j+3. */
#ifndef GR_KERN_NEON_H
#define GR_KERN_NEON_H

#include "gr_blocks.h"

#define GR_INLINE static inline __attribute__((always_inline))

enum {
    PANEL = GB_PANEL,
    GROUP = GB_GROUP,
    CODES = PANEL * GROUP, /* of a group in a panel */
    PLANE = CODES / 2,     /* bytes that hold a nibble of each */
    TILE = 8               /* tokens that share an unpacked group */
};

/* ---- codes ---- */

GR_INLINE bool is_bytes(uint32_t format) /* two planes make a code */
{
    return format == GB_FMT_Q8 || format == GB_FMT_Q8_ROWS;
}

/* Both planes of a register to signed codes of 8 bits: quads i and i + 4 of a group. The eor turns
 * both nibbles' top bits, which subtracts 128 from either code. */
GR_INLINE void join_planes(uint8x16_t high, uint8x16_t low, int8x16_t *first, int8x16_t *second)
{
    high = veorq_u8(high, vdupq_n_u8(0x88));
    *first = vreinterpretq_s8_u8(vsliq_n_u8(low, high, 4));
    *second = vreinterpretq_s8_u8(vsriq_n_u8(high, low, 4));
}

/* A register of codes of 4 bits to 16 * (code - 8): what is left of the zero point is 128 - zp, and
 * sums need no shift. */
GR_INLINE void split_nibbles(uint8x16_t w, int8x16_t *first, int8x16_t *second)
{
    w = veorq_u8(w, vdupq_n_u8(0x88));
    *first = vreinterpretq_s8_u8(vshlq_n_u8(w, 4));
    *second = vreinterpretq_s8_u8(vandq_u8(w, vdupq_n_u8(0xF0)));
}

/* Two superblocks ahead, past the first cache: one stream at the speed of memory. */
GR_INLINE void prefetch(const uint8_t *p, uint32_t bytes)
{
    for (uint32_t i = 0; i < bytes; i += GB_LINE)
        __builtin_prefetch(p + 2 * GB_SUPERBLOCK * (PLANE + 2 * PANEL) + i, 0, 2);
}

/* ---- scales and zero points ---- */

/* Bytes 4j..4j+3 as numbers of 32 bits; a place beyond the register reads as 0. */
GR_INLINE float32x4_t floats_of_bytes(uint8x16_t x, uint32_t j)
{
    static const uint8_t places[4][16] = {
        {0, 255, 255, 255, 1, 255, 255, 255, 2, 255, 255, 255, 3, 255, 255, 255},
        {4, 255, 255, 255, 5, 255, 255, 255, 6, 255, 255, 255, 7, 255, 255, 255},
        {8, 255, 255, 255, 9, 255, 255, 255, 10, 255, 255, 255, 11, 255, 255, 255},
        {12, 255, 255, 255, 13, 255, 255, 255, 14, 255, 255, 255, 15, 255, 255, 255}};
    return vcvtq_f32_u32(vreinterpretq_u32_u8(vqtbl1q_u8(x, vld1q_u8(places[j]))));
}

/* The scales of group g of a superblock, which has some: all but GB_FMT_Q8_ROWS. */
GR_INLINE void scales_of(uint32_t format, const uint8_t *meta, uint32_t g, float32x4_t scale[4])
{
    const uint8_t *h = meta + 2 * PANEL * g; /* of 16 bits */
    for (uint32_t j = 0; j < 4; j++) {
        if (format == GB_FMT_Q4H || format == GB_FMT_Q8) {
            scale[j] = floats_of_bytes(vld1q_u8(meta + PANEL * g), j);
        } else {
            uint16x4_t half = vreinterpret_u16_u8(vld1_u8(h + 8 * j));
            scale[j] = format == GB_FMT_Q4RAW_F16
                           ? vcvt_f32_f16(vreinterpret_f16_u16(half))
                           : vreinterpretq_f32_u32(vshll_n_u16(half, 16));
        }
    }
}

/* Zero points of 16 rows, in sixteenths. */
GR_INLINE int16x8x2_t zeros_of(const gr_block *b, uint32_t g)
{
    if (b->format != GB_FMT_Q4H)
        return (int16x8x2_t){{vdupq_n_s16(128), vdupq_n_s16(128)}};
    uint8x16_t z = vld1q_u8(b->meta + PANEL * (b->count + g));
    return (int16x8x2_t){{vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(z))),
                          vreinterpretq_s16_u16(vmovl_high_u8(z))}};
}

/* d - zero * asum: both factors are below 2^15. */
GR_INLINE void subtract_zeros(int32x4_t d[4], int16x8x2_t zero, int32_t asum)
{
    int16_t s = (int16_t)asum;
    d[0] = vmlsl_n_s16(d[0], vget_low_s16(zero.val[0]), s);
    d[1] = vmlsl_high_n_s16(d[1], zero.val[0], s);
    d[2] = vmlsl_n_s16(d[2], vget_low_s16(zero.val[1]), s);
    d[3] = vmlsl_high_n_s16(d[3], zero.val[1], s);
}

/* acc = fmaf((float)d * scale, sa, acc); no scale: it is 1. */
GR_INLINE void add_group(float32x4_t acc[4], const int32x4_t d[4], const float32x4_t *scale,
                         float sa)
{
    for (uint32_t j = 0; j < 4; j++) {
        float32x4_t p = vcvtq_f32_s32(d[j]);
        acc[j] = vfmaq_n_f32(acc[j], scale ? vmulq_f32(p, scale[j]) : p, sa);
    }
}

/* super * acc to `count` floats. */
GR_INLINE void put_rows(const gr_mat *m, uint32_t panel, const float32x4_t acc[4], float *y,
                        uint32_t count)
{
    const float *super = (const float *)(const void *)(m->data + m->panel * panel);
    float out[PANEL];
    for (uint32_t j = 0; j < 4; j++)
        vst1q_f32(out + 4 * j, vmulq_f32(vld1q_f32(super + 4 * j), acc[j]));
    memcpy(y, out, count * sizeof *y);
}

/* ---- one token: limited by memory ---- */

/* What an instruction set does with a group; constants, so that everything is inlined. */
typedef struct gr_dots {
    /* d = 16 * codes of 4 bits times 32 activations */
    void (*nibbles)(const uint8_t *c, const int8_t *codes, int32x4_t d[4]);
    /* d = codes of two planes, less 128, times 32 activations */
    void (*bytes)(const uint8_t *high, const uint8_t *low, const int8_t *codes, int32x4_t d[4]);
} gr_dots;

/* `format` is b->format, as a constant: every format gets its own loop. */
GR_INLINE void one_block(const gr_dots *k, const gr_block *b, uint32_t format, const gr_act *a,
                         uint32_t token, float32x4_t acc[4])
{
    size_t at = (size_t)token * a->groups + b->group;
    const int8_t *codes = a->codes + GROUP * at;
    for (uint32_t g = 0; g < b->count; g++, codes += GROUP) {
        const uint8_t *high = b->high + (size_t)b->step * g;
        int32x4_t d[4];
        float32x4_t scale[4];
        if (is_bytes(format)) {
            const uint8_t *low = b->low + (size_t)b->step * g;
            prefetch(high, format == GB_FMT_Q8 ? 2 * PLANE + PANEL : PLANE);
            if (format == GB_FMT_Q8_ROWS)
                prefetch(low, PLANE);
            k->bytes(high, low, codes, d);
        } else {
            prefetch(high, PLANE + 2 * PANEL);
            k->nibbles(high, codes, d);
            subtract_zeros(d, zeros_of(b, g), a->asum[at + g]);
        }
        if (format != GB_FMT_Q8_ROWS)
            scales_of(format, b->meta, g, scale);
        add_group(acc, d, format == GB_FMT_Q8_ROWS ? NULL : scale, a->sa[at + g]);
    }
}

GR_INLINE void one_panel(const gr_dots *k, const gr_mat *m, const gr_act *a, uint32_t panel,
                         uint32_t token, uint32_t count, float *y)
{
    float32x4_t acc[4] = {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f),
                          vdupq_n_f32(0.0f)};
    gr_walk w = gr_walk_panel(m, panel);
    gr_block b;
    while (gr_walk_next(&w, &b)) {
        if (b.format == GB_FMT_Q4H)
            one_block(k, &b, GB_FMT_Q4H, a, token, acc);
        else if (b.format == GB_FMT_Q8)
            one_block(k, &b, GB_FMT_Q8, a, token, acc);
        else if (b.format == GB_FMT_Q8_ROWS)
            one_block(k, &b, GB_FMT_Q8_ROWS, a, token, acc);
        else if (b.format == GB_FMT_Q4RAW_F16)
            one_block(k, &b, GB_FMT_Q4RAW_F16, a, token, acc);
        else
            one_block(k, &b, GB_FMT_Q4RAW_BF16, a, token, acc);
    }
    put_rows(m, panel, acc, y, count);
}

GR_INLINE void gemv(const gr_dots *k, const gr_mat *m, const gr_act *a, uint32_t first,
                    uint32_t token, uint32_t tokens, uint32_t width, float *y, size_t ldy)
{
    for (uint32_t col = 0; col < width; col += PANEL, first++)
        for (uint32_t t = 0; t < tokens; t++)
            one_panel(k, m, a, first, token + t, width - col < PANEL ? width - col : PANEL,
                      y + t * ldy + col);
}

/* ---- groups that several tokens share ---- */

typedef struct gr_group {
    _Alignas(16) int8_t codes[CODES]; /* unpacked, in an order that a kernel chooses */
    float scale[PANEL];
    int16_t zero[PANEL]; /* to be added, times asum */
    bool has_zero;
} gr_group;

/* Scales, and 16 * bias - zp: unpacking has lessened codes of 4 bits by `bias`, 0 or 8. */
GR_INLINE void group_scales(const gr_block *b, uint32_t g, int16_t bias, gr_group *out)
{
    float32x4_t scale[4] = {vdupq_n_f32(1.0f), vdupq_n_f32(1.0f), vdupq_n_f32(1.0f),
                            vdupq_n_f32(1.0f)};
    if (b->format != GB_FMT_Q8_ROWS)
        scales_of(b->format, b->meta, g, scale);
    for (uint32_t j = 0; j < 4; j++)
        vst1q_f32(out->scale + 4 * j, scale[j]);
    out->has_zero = b->format == GB_FMT_Q4H || (bias == 0 && !is_bytes(b->format));
    if (out->has_zero) {
        int16x8x2_t zero = zeros_of(b, g);
        int16x8_t from = vdupq_n_s16((int16_t)(16 * bias));
        vst1q_s16(out->zero, vsubq_s16(from, zero.val[0]));
        vst1q_s16(out->zero + 8, vsubq_s16(from, zero.val[1]));
    }
}

/* What the zero points add to the sums of a token: both factors are below 2^15. */
GR_INLINE void add_zeros(const gr_group *w, int32_t asum, int32x4_t d[4])
{
    if (!w->has_zero)
        return;
    int16x8_t a = vld1q_s16(w->zero), b = vld1q_s16(w->zero + 8);
    int16_t s = (int16_t)asum;
    d[0] = vmlal_n_s16(d[0], vget_low_s16(a), s);
    d[1] = vmlal_high_n_s16(d[1], a, s);
    d[2] = vmlal_n_s16(d[2], vget_low_s16(b), s);
    d[3] = vmlal_high_n_s16(d[3], b, s);
}

/* Sums of n tokens onto acc; their scales lie `ld` apart. */
GR_INLINE void add_tile(const gr_group *w, const float *sa, size_t ld, uint32_t n,
                        int32x4_t d[][4], float acc[][PANEL])
{
    for (uint32_t j = 0; j < 4; j++) {
        float32x4_t scale = vld1q_f32(w->scale + 4 * j);
        for (uint32_t t = 0; t < n; t++) {
            float32x4_t p = vmulq_f32(vcvtq_f32_s32(d[t][j]), scale);
            vst1q_f32(acc[t] + 4 * j, vfmaq_n_f32(vld1q_f32(acc[t] + 4 * j), p, sa[ld * t]));
        }
    }
}

GR_INLINE void put_tile(const gr_mat *m, uint32_t panel, float acc[][PANEL], uint32_t n,
                        uint32_t count, float *y, size_t ldy)
{
    for (uint32_t t = 0; t < n; t++) {
        float32x4_t rows[4];
        for (uint32_t j = 0; j < 4; j++)
            rows[j] = vld1q_f32(acc[t] + 4 * j);
        put_rows(m, panel, rows, y + t * ldy, count);
    }
}

typedef void gr_some(const gr_mat *m, const gr_act *a, uint32_t panel, size_t token, uint32_t n,
                     float acc[][PANEL]);

/* A product by panels and up to TILE tokens, each of which is done by `some`. */
GR_INLINE void gemm(gr_some *some, const gr_mat *m, const gr_act *a, uint32_t first,
                    uint32_t token, uint32_t tokens, uint32_t width, float *y, size_t ldy)
{
    for (uint32_t col = 0; col < width; col += PANEL, first++) {
        for (uint32_t t = 0, n; t < tokens; t += n) {
            float acc[TILE][PANEL] = {{0.0f}};
            n = tokens - t < TILE ? tokens - t : TILE;
            some(m, a, first, (size_t)token + t, n, acc);
            put_tile(m, first, acc, n, width - col < PANEL ? width - col : PANEL,
                     y + t * ldy + col, ldy);
        }
    }
}

/* ---- scores of four positions ---- */

typedef struct gr_keys {
    const int8_t *k[4];
    const uint16_t *ks[4];
} gr_keys;

/* Positions p..p + 3 of a span; beyond its end the last one again. */
GR_INLINE gr_keys keys_at(const gr_span *s, uint32_t p)
{
    gr_keys keys;
    for (uint32_t i = 0; i < 4; i++) {
        size_t at = p + i < s->count ? p + i : s->count - 1;
        keys.k[i] = (const int8_t *)s->k + at * s->stride;
        keys.ks[i] = s->ks + at * s->scale_stride;
    }
    return keys;
}

/* What a head dimension leaves over 16, q[i..n). */
static inline int32x4_t rest_of_keys(const int8_t *q, const gr_keys *keys, uint32_t at,
                                     uint32_t i, uint32_t n)
{
    int32_t sum[4] = {0};
    for (; i < n; i++)
        for (uint32_t p = 0; p < 4; p++)
            sum[p] += q[i] * keys->k[p][at + i];
    return vld1q_s32(sum);
}

GR_INLINE float32x4_t add_scores(float32x4_t acc, int32x4_t dot, uint16_t qs,
                                 const gr_keys *keys, uint32_t g)
{
    uint16x4_t h = vdup_n_u16(keys->ks[0][g]);
    h = vld1_lane_u16(keys->ks[1] + g, h, 1);
    h = vld1_lane_u16(keys->ks[2] + g, h, 2);
    h = vld1_lane_u16(keys->ks[3] + g, h, 3);
    float32x4_t ks = vreinterpretq_f32_u32(vshll_n_u16(h, 16));
    return vfmaq_f32(acc, vcvtq_f32_s32(dot), vmulq_n_f32(ks, gr_bf16(qs)));
}

GR_INLINE void put_scores(float32x4_t acc, float *out, uint32_t left)
{
    float s[4];
    vst1q_f32(s, acc);
    memcpy(out, s, (left < 4 ? left : 4) * sizeof *s);
}

/* q[0..n) times the keys' values from `at`. */
typedef int32x4_t gr_key_dots(const int8_t *q, const gr_keys *keys, uint32_t at, uint32_t n);

GR_INLINE void score(gr_key_dots *dots_of_keys, const gr_queries *q, const gr_span *s,
                     uint32_t dim, uint32_t group, float *out, size_t ldo)
{
    for (uint32_t p = 0; p < s->count; p += 4) {
        gr_keys keys = keys_at(s, p); /* stay in the first cache for all queries */
        for (uint32_t t = 0; t < q->count; t++) {
            const int8_t *codes = q->codes + t * q->stride;
            const uint16_t *qs = q->scales + t * q->scale_stride;
            float32x4_t acc = vdupq_n_f32(0.0f);
            for (uint32_t i = 0, g = 0; i < dim; i += group, g++)
                acc = add_scores(acc, dots_of_keys(codes + i, &keys, i, group), qs[g], &keys, g);
            put_scores(acc, out + t * ldo + p, s->count - p);
        }
    }
}

#endif
