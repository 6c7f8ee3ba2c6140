/* gr_kern_neon.h: what the AArch64 kernels share: codes and scales of a group, the step from
 * integer sums to floats, scores. To be included after <arm_neon.h>.
 *
 * 16 rows are four registers of four: index j below is rows 4j..4j+3. */
#ifndef GR_KERN_NEON_H
#define GR_KERN_NEON_H

#include "gr_blocks.h"

/* Small processors run instructions as they stand. The kernels are written in an order in which no
 * instruction waits for the one before it, and this compiler would not keep it. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-tree-ter", "no-schedule-insns", "no-schedule-insns2", \
                     "no-version-loops-for-strides")
#endif

#define GR_INLINE static inline __attribute__((always_inline))
#define OWN_CODE static __attribute__((noinline)) /* all registers are free for it */

enum {
    PANEL = GB_PANEL,
    GROUP = GB_GROUP,
    CODES = PANEL * GROUP, /* of a group in a panel */
    PLANE = CODES / 2,     /* bytes that hold a nibble of each */
    TILE = 16              /* tokens that share an unpacked group */
};

/* ---- codes ---- */

/* Both planes of n registers to signed codes of 8 bits: quads i and i + 4 of a group. The eor turns
 * both nibbles' top bits, which subtracts 128 from either code. */
GR_INLINE void join_planes(uint32_t n, const uint8x16_t *high, const uint8x16_t *low,
                           int8x16_t *first, int8x16_t *second)
{
    uint8x16_t h[4], l[4];
    for (uint32_t j = 0; j < n; j++)
        h[j] = veorq_u8(high[j], vdupq_n_u8(0x88));
    for (uint32_t j = 0; j < n; j++) {
        l[j] = low[j];
        __asm__ volatile("" : "+w"(l[j])); /* the copy that sli needs is not made just before it */
    }
    for (uint32_t j = 0; j < n; j++)
        first[j] = vreinterpretq_s8_u8(vsliq_n_u8(l[j], h[j], 4));
    for (uint32_t j = 0; j < n; j++)
        second[j] = vreinterpretq_s8_u8(vsriq_n_u8(h[j], low[j], 4));
}

/* A register of codes of 4 bits to 16 * (code - 8): what is left of the zero point is 128 - zp, and
 * sums need no shift. */
GR_INLINE void split_nibbles(uint8x16_t w, int8x16_t *first, int8x16_t *second)
{
    w = veorq_u8(w, vdupq_n_u8(0x88));
    *first = vreinterpretq_s8_u8(vshlq_n_u8(w, 4));
    *second = vreinterpretq_s8_u8(vandq_u8(w, vdupq_n_u8(0xF0)));
}

/* A load that stays where it is written, long before what needs it. */
GR_INLINE uint8x16_t load_here(const void *p)
{
    uint8x16_t x = vld1q_u8(p);
    __asm__ volatile("" : "+w"(x));
    return x;
}

/* A number in the first lane, of which its lower half is enough; compilers fill the others. */
GR_INLINE int16x4_t first_lane(const int32_t *p)
{
    int16x4_t x;
    __asm__ volatile("ldr %s0, %1" : "=w"(x) : "m"(*p));
    return x;
}

/* The line two superblocks ahead, past the first cache: one stream at the speed of memory. */
GR_INLINE void prefetch(const uint8_t *p)
{
    __builtin_prefetch(p + 2 * GB_SUPERBLOCK * (PLANE + 2 * PANEL), 0, 2);
}

/* ---- scales and zero points ---- */

GR_INLINE void floats_of_bytes(uint8x16_t x, float32x4_t out[4])
{
    uint16x8_t a = vmovl_u8(vget_low_u8(x)), b = vmovl_high_u8(x);
    uint32x4_t wide[4] = {vmovl_u16(vget_low_u16(a)), vmovl_high_u16(a),
                          vmovl_u16(vget_low_u16(b)), vmovl_high_u16(b)};
    for (uint32_t j = 0; j < 4; j++)
        out[j] = vcvtq_f32_u32(wide[j]);
}

/* What a group has beside its codes: bytes of scales and zero points, or 16-bit scales. */
typedef struct gr_steps {
    uint8x16_t a, b;
} gr_steps;

GR_INLINE gr_steps steps_of(uint32_t format, const gr_block *b, uint32_t g)
{
    uint32_t each = format == GB_FMT_Q4H || format == GB_FMT_Q8 ? PANEL : 2 * PANEL;
    const uint8_t *p = b->meta + (size_t)each * g;
    gr_steps s = {vdupq_n_u8(128), vdupq_n_u8(128)};
    if (format != GB_FMT_Q8_ROWS)
        s.a = load_here(p);
    if (format == GB_FMT_Q4H)
        s.b = load_here(p + PANEL * b->count);
    else if (format == GB_FMT_Q4RAW_F16 || format == GB_FMT_Q4RAW_BF16)
        s.b = load_here(p + PANEL);
    return s;
}

/* Not of GB_FMT_Q8_ROWS, which has none. */
GR_INLINE void scales_of(uint32_t format, gr_steps s, float32x4_t scale[4])
{
    if (format == GB_FMT_Q4H || format == GB_FMT_Q8) {
        floats_of_bytes(s.a, scale);
        return;
    }
    uint16x8_t a = vreinterpretq_u16_u8(s.a), b = vreinterpretq_u16_u8(s.b);
    uint16x4_t half[4] = {vget_low_u16(a), vget_high_u16(a), vget_low_u16(b), vget_high_u16(b)};
    for (uint32_t j = 0; j < 4; j++)
        scale[j] = format == GB_FMT_Q4RAW_F16 ? vcvt_f32_f16(vreinterpret_f16_u16(half[j]))
                                              : vreinterpretq_f32_u32(vshll_n_u16(half[j], 16));
}

/* Zero points in sixteenths. */
GR_INLINE int16x8x2_t zeros_of(uint32_t format, gr_steps s)
{
    if (format != GB_FMT_Q4H)
        return (int16x8x2_t){{vdupq_n_s16(128), vdupq_n_s16(128)}};
    return (int16x8x2_t){{vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(s.b))),
                          vreinterpretq_s16_u16(vmovl_high_u8(s.b))}};
}

/* d - zero * asum, its lane 0: both factors are below 2^15. */
GR_INLINE void subtract_zeros(int32x4_t d[4], int16x8x2_t zero, int16x4_t asum)
{
    d[0] = vmlsl_lane_s16(d[0], vget_low_s16(zero.val[0]), asum, 0);
    d[1] = vmlsl_high_lane_s16(d[1], zero.val[0], asum, 0);
    d[2] = vmlsl_lane_s16(d[2], vget_low_s16(zero.val[1]), asum, 0);
    d[3] = vmlsl_high_lane_s16(d[3], zero.val[1], asum, 0);
}

/* acc = fmaf((float)d * scale, sa, acc); no scale: it is 1. */
GR_INLINE void add_group(float32x4_t acc[4], const int32x4_t d[4], const float32x4_t *scale,
                         float sa)
{
    float32x4_t p[4];
    for (uint32_t j = 0; j < 4; j++)
        p[j] = vcvtq_f32_s32(d[j]);
    for (uint32_t j = 0; scale && j < 4; j++)
        p[j] = vmulq_f32(p[j], scale[j]);
    for (uint32_t j = 0; j < 4; j++)
        acc[j] = vfmaq_n_f32(acc[j], p[j], sa);
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

/* `format` is b->format, `planes` whether there are two, as constants: each gets its own loop. */
GR_INLINE void one_block(const gr_dots *k, const gr_block *b, uint32_t format, bool planes,
                         const gr_act *a, uint32_t token, float32x4_t acc[4])
{
    size_t at = (size_t)token * a->groups + b->group;
    const int8_t *codes = a->codes + GROUP * at;
    const float *sa = a->sa + at;
    const int32_t *asum = a->asum + at;
    for (uint32_t g = 0; g < b->count; g++, codes += GROUP) {
        size_t from = (size_t)b->step * g;
        gr_steps steps = steps_of(format, b, g);
        int16x4_t sum = first_lane(asum + g);
        float scale = sa[g];
        __asm__ volatile("" : "+w"(scale)); /* loaded by now, too */
        int32x4_t d[4];
        float32x4_t row_scale[4];
        if (planes)
            k->bytes(b->high + from, b->low + from, codes, d);
        else
            k->nibbles(b->high + from, codes, d);
        prefetch(b->meta + 2 * PANEL * g);
        int16x8x2_t zero = zeros_of(format, steps);
        if (format != GB_FMT_Q8_ROWS)
            scales_of(format, steps, row_scale);
        if (!planes)
            subtract_zeros(d, zero, sum);
        add_group(acc, d, format == GB_FMT_Q8_ROWS ? NULL : row_scale, scale);
    }
}

GR_INLINE void one_panel(const gr_dots *k, const gr_mat *m, const gr_act *a, uint32_t panel,
                         uint32_t token, uint32_t count, float *y)
{
    float32x4_t acc[4] = {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f),
                          vdupq_n_f32(0.0f)};
    gr_walk w = gr_walk_panel(m, panel, 1);
    gr_block b;
    while (gr_walk_next(&w, &b)) {
        if (b.format == GB_FMT_Q4H)
            one_block(k, &b, GB_FMT_Q4H, false, a, token, acc);
        else if (b.format == GB_FMT_Q8)
            one_block(k, &b, GB_FMT_Q8, true, a, token, acc);
        else if (b.format == GB_FMT_Q8_ROWS && b.low)
            one_block(k, &b, GB_FMT_Q8_ROWS, true, a, token, acc);
        else if (b.format == GB_FMT_Q8_ROWS)
            one_block(k, &b, GB_FMT_Q8_ROWS, false, a, token, acc);
        else if (b.format == GB_FMT_Q4RAW_F16)
            one_block(k, &b, GB_FMT_Q4RAW_F16, false, a, token, acc);
        else
            one_block(k, &b, GB_FMT_Q4RAW_BF16, false, a, token, acc);
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
    int16_t zero[PANEL]; /* to be added, times asum; often 0, but a branch would cost more */
} gr_group;

/* Scales, and what is left of zero points: unpacking has lessened codes of 4 bits by `bias`, 0 or
 * 8, and those of 8 bits by 128. */
GR_INLINE void group_scales(const gr_block *b, uint32_t g, int16_t bias, gr_group *out)
{
    float32x4_t scale[4] = {vdupq_n_f32(1.0f), vdupq_n_f32(1.0f), vdupq_n_f32(1.0f),
                            vdupq_n_f32(1.0f)};
    gr_steps steps = steps_of(b->format, b, g);
    if (b->format != GB_FMT_Q8_ROWS)
        scales_of(b->format, steps, scale);
    for (uint32_t j = 0; j < 4; j++)
        vst1q_f32(out->scale + 4 * j, scale[j]);
    int16x8x2_t zero = zeros_of(b->format, steps);
    int16x8_t from = vdupq_n_s16(b->low ? 128 : (int16_t)(16 * bias));
    vst1q_s16(out->zero, vsubq_s16(from, zero.val[0]));
    vst1q_s16(out->zero + 8, vsubq_s16(from, zero.val[1]));
}

/* What the zero points add to the sums of a token: both factors are below 2^15. */
GR_INLINE void add_zeros(const gr_group *w, int32_t asum, int32x4_t d[4])
{
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
    float by[4]; /* loaded once: stores to acc could change them, for all a compiler knows */
    for (uint32_t t = 0; t < n; t++)
        by[t] = sa[ld * t];
    for (uint32_t j = 0; j < 4; j++) {
        float32x4_t scale = vld1q_f32(w->scale + 4 * j), p[4], sum[4];
        for (uint32_t t = 0; t < n; t++)
            p[t] = vcvtq_f32_s32(d[t][j]);
        for (uint32_t t = 0; t < n; t++)
            sum[t] = vld1q_f32(acc[t] + 4 * j);
        for (uint32_t t = 0; t < n; t++)
            p[t] = vmulq_f32(p[t], scale);
        for (uint32_t t = 0; t < n; t++)
            sum[t] = vfmaq_n_f32(sum[t], p[t], by[t]);
        for (uint32_t t = 0; t < n; t++)
            vst1q_f32(acc[t] + 4 * j, sum[t]);
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
