/* gr_kern_armv7.c: Armv7 with NEON and VFPv4 (Cortex-A7, A15): products, scores of the int8 cache.
 *
 * NEON here flushes subnormal numbers to zero, VFP does not. So NEON does integers, and of the
 * float work only the chain acc = fmaf(D * scale, sa, acc), where none can arise:
 *
 * - D is an integer and sa is 0 or at least 2^-50 / 127 (NUMERICS.md: smaller groups have scale 0),
 *   so sa is a multiple of 2^-80. With integer scales, and with half precision ones, which are
 *   multiples of 2^-24, every product and every sum is a multiple of 2^-104: it is 0 or normal.
 * - bfloat16 scales may be far smaller. From the first superblock on that has one below 2^-36
 *   (multiples of 2^-43: sums of 2^-123) the panel is done by VFP, to its end.
 * - The last product, with the row's own scale, is always done by VFP.
 *
 * Everything else comes from the reference kernels, compiled for VFPv4. */
#include <arm_neon.h>

#include "gr_blocks.h"

#define GR_INLINE static inline __attribute__((always_inline))
enum { PANEL = GB_PANEL, GROUP = GB_GROUP, TILE = 2, QUADS = GROUP / 4, VECTORS = PANEL / 4 };

/* ---- integer dots of a group: 256 bytes of codes with 16 rows ---- */

typedef struct gr_dots { /* modulo 2^16 */
    int16_t rows[PANEL];
} gr_dots;

typedef struct gr_quads { /* 4 consecutive inputs each, twice */
    int8x8_t x[QUADS];
} gr_quads;

GR_INLINE gr_quads quads_of(const int8_t *codes)
{
    const int32_t *quad = (const int32_t *)__builtin_assume_aligned(codes, GROUP);
    gr_quads q;
#pragma GCC unroll 8
    for (uint32_t i = 0; i < QUADS; i++)
        q.x[i] = vreinterpret_s8_s32(vld1_dup_s32(quad + i));
    return q;
}

/* Four rows x 4 inputs of a line: lane by lane, two rows a register. */
typedef struct gr_lanes {
    int16x8_t even, odd;
} gr_lanes;

GR_INLINE void multiply(gr_lanes *s, int8x16_t w, int8x8_t x)
{
    s->even = vmlal_s8(s->even, vget_low_s8(w), x);
    s->odd = vmlal_s8(s->odd, vget_high_s8(w), x);
}

/* No lane can overflow here: it sums 8 products of at most 15 * 127. */
GR_INLINE int16x4_t rows_of(gr_lanes s)
{
    return vpadd_s16(vpadd_s16(vget_low_s16(s.even), vget_high_s16(s.even)),
                     vpadd_s16(vget_low_s16(s.odd), vget_high_s16(s.odd)));
}

/* Four chains of sums at a time, eight rows or four rows of two tokens, hide the latency of the
 * multiplier. The loops over rows stay rolled: more at once needs more registers than there are. */
GR_INLINE void dots1(const uint8_t *c, const gr_quads *q, gr_dots *out)
{
    uint8x16_t low = vdupq_n_u8(15);
#pragma GCC unroll 1
    for (uint32_t v = 0; v < PANEL; v += 8, c += 32) {
        gr_lanes s = {vdupq_n_s16(0), vdupq_n_s16(0)}, t = s;
#pragma GCC unroll 4
        for (uint32_t i = 0; i < QUADS / 2; i++) {
            uint8x16_t w = vld1q_u8(c + 64 * i), z = vld1q_u8(c + 64 * i + 16);
            multiply(&s, vreinterpretq_s8_u8(vandq_u8(w, low)), q->x[i]);
            multiply(&t, vreinterpretq_s8_u8(vandq_u8(z, low)), q->x[i]);
            multiply(&s, vreinterpretq_s8_u8(vshrq_n_u8(w, 4)), q->x[i + QUADS / 2]);
            multiply(&t, vreinterpretq_s8_u8(vshrq_n_u8(z, 4)), q->x[i + QUADS / 2]);
        }
        vst1q_s16(out->rows + v, vcombine_s16(rows_of(s), rows_of(t)));
    }
}

GR_INLINE void dots2(const uint8_t *c, const gr_quads *q, gr_dots *out)
{
    uint8x16_t mask = vdupq_n_u8(15);
#pragma GCC unroll 1
    for (uint32_t v = 0; v < PANEL; v += 4, c += 16) {
        gr_lanes s = {vdupq_n_s16(0), vdupq_n_s16(0)}, t = s;
#pragma GCC unroll 4
        for (uint32_t i = 0; i < QUADS / 2; i++) {
            uint8x16_t w = vld1q_u8(c + 64 * i);
            int8x16_t low = vreinterpretq_s8_u8(vandq_u8(w, mask));
            int8x16_t high = vreinterpretq_s8_u8(vshrq_n_u8(w, 4));
            multiply(&s, low, q[0].x[i]), multiply(&t, low, q[1].x[i]);
            multiply(&s, high, q[0].x[i + QUADS / 2]), multiply(&t, high, q[1].x[i + QUADS / 2]);
        }
        vst1_s16(out[0].rows + v, rows_of(s)), vst1_s16(out[1].rows + v, rows_of(t));
    }
}

/* ---- superblocks ---- */

/* D of four rows. The dots less 8 * asum are sums of 32 products of at most 8 * 127, so they fit
 * into 16 bits and what was lost above them is no loss: D = 16 * dot' + (128 - zero) * asum, and
 * of two planes D = 16 * high' + low' + 8 * asum. */
GR_INLINE int32x4_t whole(uint32_t format, bool planes, const uint8_t *zeros, int16x4_t high,
                          int16x4_t low, uint32_t v, int16_t asum)
{
    int16x4_t eight = vdup_n_s16((int16_t)(8 * asum));
    int32x4_t d = vshll_n_s16(vsub_s16(high, eight), 4);
    if (planes)
        return vaddw_s16(vaddw_s16(d, vsub_s16(low, eight)), eight);
    if (format == GB_FMT_Q4H) {
        uint8x8_t bytes = vld1_u8(zeros + 8 * (v / 2));
        int16x8_t zero = vreinterpretq_s16_u16(vsubl_u8(vdup_n_u8(128), bytes));
        d = vmlal_s16(d, v % 2 ? vget_high_s16(zero) : vget_low_s16(zero), vdup_n_s16(asum));
    }
    return d;
}

GR_INLINE float32x4_t halves(uint16x4_t h) /* exact; half precision is never flushed */
{
    float32x4_t x;
    __asm__("vcvt.f32.f16 %q0, %P1" : "=w"(x) : "w"(h));
    return x;
}

/* D * scale: with integer scales the product has 28 bits, and rounds the same from an integer. */
GR_INLINE float32x4_t scaled(uint32_t format, const uint8_t *scales, int32x4_t d, uint32_t v)
{
    if (format == GB_FMT_Q4H || format == GB_FMT_Q8) {
        uint16x8_t wide = vmovl_u8(vld1_u8(scales + 8 * (v / 2)));
        uint32x4_t scale = vmovl_u16(v % 2 ? vget_high_u16(wide) : vget_low_u16(wide));
        return vcvtq_f32_s32(vmulq_s32(d, vreinterpretq_s32_u32(scale)));
    }
    if (format == GB_FMT_Q8_ROWS)
        return vcvtq_f32_s32(d);
    uint16x4_t h;
    memcpy(&h, scales + 8 * v, sizeof h);
    float32x4_t scale = format == GB_FMT_Q4RAW_F16
                            ? halves(h)
                            : vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(h), 16));
    return vmulq_f32(vcvtq_f32_s32(d), scale);
}

/* The same by VFP, where a product or a sum may be subnormal. */
static void chain_plain(uint32_t format, const uint8_t *scales, const int32_t *d, float sa,
                        float *acc)
{
    for (uint32_t r = 0; r < PANEL; r++) {
        float scale = format == GB_FMT_Q8_ROWS ? 1.0f : (float)(int32_t)scales[r];
        if (format == GB_FMT_Q4RAW_F16 || format == GB_FMT_Q4RAW_BF16) {
            uint16_t h;
            memcpy(&h, scales + 2 * r, sizeof h);
            scale = format == GB_FMT_Q4RAW_F16 ? gr_half(h) : gr_bf16(h);
        }
        acc[r] = gr_fmaf((float)d[r] * scale, sa, acc[r]);
    }
}

typedef struct gr_step { /* one group for one token */
    const uint8_t *scales, *zeros;
    int32_t asum;
    float sa;
} gr_step;

GR_INLINE void chain(uint32_t format, bool planes, bool plain, const gr_step *s,
                     const gr_dots *high, const gr_dots *low, float *acc)
{
    int32_t rows[PANEL];
    float32x4_t p[VECTORS]; /* stores come last: they would part what is loaded for two vectors */
#pragma GCC unroll 4
    for (uint32_t v = 0; v < VECTORS; v++) {
        int32x4_t d = whole(format, planes, s->zeros, vld1_s16(high->rows + 4 * v),
                            vld1_s16(low->rows + 4 * v), v, (int16_t)s->asum);
        if (plain)
            vst1q_s32(rows + 4 * v, d);
        else
            p[v] = scaled(format, s->scales, d, v);
    }
    if (plain) {
        chain_plain(format, s->scales, rows, s->sa, acc);
        return;
    }
#pragma GCC unroll 4
    for (uint32_t v = 0; v < VECTORS; v++) {
        float32x4_t sum = vld1q_f32(acc + 4 * v);
        vst1q_f32(acc + 4 * v, vfmaq_f32(sum, p[v], vdupq_n_f32(s->sa)));
    }
}

/* Two superblocks ahead, group k's share: one stream at the speed of memory. Sizes are constants: a
 * division would be a call here. */
GR_INLINE void prefetch(uint32_t format, const gr_block *b, uint32_t k)
{
    uint32_t bytes = format == GB_FMT_Q8 ? 528 : format == GB_FMT_Q8_ROWS ? 256 : 288;
#pragma GCC unroll 9
    for (uint32_t i = 0; i < bytes; i += GB_LINE)
        __builtin_prefetch(b->high + 4608 + bytes * k + i, 0, 1);
    for (uint32_t i = 0; format == GB_FMT_Q8_ROWS && b->low && i < bytes; i += GB_LINE)
        __builtin_prefetch(b->low + 4608 + bytes * k + i, 0, 1);
}

GR_INLINE void block(uint32_t format, bool planes, bool plain, const gr_block *b, const gr_act *a,
                     uint32_t token, uint32_t tokens, float acc[][PANEL])
{
    uint32_t wide = format == GB_FMT_Q4RAW_F16 || format == GB_FMT_Q4RAW_BF16 ? 2 : 1;
    const uint8_t *high = b->high, *low = b->low;
    for (uint32_t k = 0; k < b->count; k++, high += b->step, low = planes ? low + b->step : low) {
        gr_quads q[TILE];
        gr_dots dots[TILE], second[TILE];
#pragma GCC unroll 2
        for (uint32_t t = 0; t < tokens; t++)
            q[t] = quads_of(a->codes + ((size_t)(token + t) * a->groups + b->group + k) * GROUP);
        if (tokens == 1)
            prefetch(format, b, k), dots1(high, q, dots);
        else
            dots2(high, q, dots);
        if (planes && tokens == 1)
            dots1(low, q, second);
        else if (planes)
            dots2(low, q, second);
        for (uint32_t t = 0; t < tokens; t++) {
            size_t at = (size_t)(token + t) * a->groups + b->group + k;
            gr_step s = {b->meta + PANEL * wide * k, b->meta + PANEL * (b->count + k), a->asum[at],
                         a->sa[at]};
            chain(format, planes, plain, &s, dots + t, planes ? second + t : dots + t, acc[t]);
        }
    }
}

static bool has_tiny_scales(const gr_block *b) /* bfloat16 below 2^-36, but not 0 */
{
    bool tiny = false;
    for (uint32_t i = 0; i < PANEL * b->count; i++) {
        uint16_t h;
        memcpy(&h, b->meta + 2 * i, sizeof h);
        h &= 0x7FFF;
        tiny |= h != 0 && h < (127 - 36) << 7;
    }
    return tiny;
}

__attribute__((noinline))
static void block_plain(const gr_block *b, const gr_act *a, uint32_t token, uint32_t tokens,
                        float acc[][PANEL])
{
    for (uint32_t t = 0; t < tokens; t++) {
        if (b->low)
            block(b->format, true, true, b, a, token + t, 1, acc + t);
        else
            block(b->format, false, true, b, a, token + t, 1, acc + t);
    }
}

/* For each format its own code: all but the codes and the chain falls away. */
GR_INLINE void any_block(const gr_block *b, const gr_act *a, uint32_t token, uint32_t tokens,
                         float acc[][PANEL])
{
    if (b->format == GB_FMT_Q4H)
        block(GB_FMT_Q4H, false, false, b, a, token, tokens, acc);
    else if (b->format == GB_FMT_Q8)
        block(GB_FMT_Q8, true, false, b, a, token, tokens, acc);
    else if (b->format == GB_FMT_Q8_ROWS && b->low)
        block(GB_FMT_Q8_ROWS, true, false, b, a, token, tokens, acc);
    else if (b->format == GB_FMT_Q8_ROWS)
        block(GB_FMT_Q8_ROWS, false, false, b, a, token, tokens, acc);
    else if (b->format == GB_FMT_Q4RAW_F16)
        block(GB_FMT_Q4RAW_F16, false, false, b, a, token, tokens, acc);
    else
        block(GB_FMT_Q4RAW_BF16, false, false, b, a, token, tokens, acc);
}

GR_INLINE void tile(const gr_mat *m, const gr_act *a, uint32_t panel, uint32_t token,
                    uint32_t tokens, float acc[][PANEL])
{
    float super[PANEL];
    bool plain = false;
    gr_block b;
    for (gr_walk w = gr_walk_panel(m, panel, 1); gr_walk_next(&w, &b);) {
        plain |= b.format == GB_FMT_Q4RAW_BF16 && has_tiny_scales(&b);
        if (plain)
            block_plain(&b, a, token, tokens, acc);
        else
            any_block(&b, a, token, tokens, acc);
    }
    memcpy(super, m->data + m->panel * panel, sizeof super);
    for (uint32_t t = 0; t < tokens; t++)
        for (uint32_t r = 0; r < PANEL; r++)
            acc[t][r] = super[r] * acc[t][r];
}

static void k_gemv(const gr_mat *m, const gr_act *a, uint32_t first, uint32_t token,
                   uint32_t tokens, uint32_t width, float *y, size_t ldy)
{
    for (uint32_t col = 0; col < width; col += PANEL, first++)
        for (uint32_t t = 0; t < tokens; t++) {
            float acc[1][PANEL] = {{0.0f}};
            tile(m, a, first, token + t, 1, acc);
            memcpy(y + t * ldy + col, acc[0],
                   sizeof(float) * (width - col < PANEL ? width - col : PANEL));
        }
}

static void k_gemm(const gr_mat *m, const gr_act *a, uint32_t first, uint32_t token,
                   uint32_t tokens, uint32_t width, float *y, size_t ldy)
{
    uint32_t even = tokens - tokens % TILE;
    for (uint32_t col = 0; even && col < width; col += PANEL)
        for (uint32_t t = 0; t < even; t += TILE) {
            float acc[TILE][PANEL] = {{0.0f}};
            size_t bytes = sizeof(float) * (width - col < PANEL ? width - col : PANEL);
            tile(m, a, first + col / PANEL, token + t, TILE, acc);
            memcpy(y + t * ldy + col, acc[0], bytes);
            memcpy(y + (t + 1) * ldy + col, acc[1], bytes);
        }
    if (even < tokens)
        k_gemv(m, a, first, token + even, 1, width, y + even * ldy, ldy);
}

/* ---- attention ---- */

GR_INLINE int32_t dot_i8(const int8_t *q, const int8_t *k, uint32_t n)
{
    int32x4_t sum = vdupq_n_s32(0);
    int32_t rest = 0;
    for (; n >= 16; n -= 16, q += 16, k += 16) { /* two products of 127 * 127 fit into 16 bits */
        int8x16_t x = vld1q_s8(q), y = vld1q_s8(k);
        int16x8_t p = vmull_s8(vget_low_s8(x), vget_low_s8(y));
        sum = vpadalq_s16(sum, vmlal_s8(p, vget_high_s8(x), vget_high_s8(y)));
    }
    for (uint32_t i = 0; i < n; i++)
        rest += (int32_t)q[i] * (int32_t)k[i];
    int32x2_t half = vadd_s32(vget_low_s32(sum), vget_high_s32(sum));
    return vget_lane_s32(vpadd_s32(half, half), 0) + rest;
}

static void k_score(const gr_queries *q, const gr_span *s, uint32_t dim, uint32_t group,
                    float *out, size_t ldo)
{
    gr_score_by(dot_i8, q, s, dim, group, out, ldo); /* floats by VFP: scales may be small */
}

const gr_kernels gr_kernels_neon = {
    .name = "neon", .gemv = k_gemv, .gemm = k_gemm, .score = k_score,
};
