/* gr_kern_rvv.c: RISC-V with vectors 1.0 of 128 bits and more: products, and attention over int8.
 *
 * A lane is a row, four bytes of a line, or an output; vl is set to what is wanted, so the length
 * of the registers shows in no result. Float lanes keep subnormal numbers and fuse as scalars do.
 *
 * A line of codes is 16 rows x 4 inputs. For one token it is multiplied as it lies, by four
 * activations repeated for every row, and the four sums of a row are added by narrowing shifts:
 * segment loads, which would part the inputs, need three times the instructions, and some cores
 * take a cycle for each of their elements. For many tokens a superblock is unpacked once, by
 * segment loads, and then multiplied input by input. */
#include <riscv_vector.h>

#include "gr_blocks.h"

#ifndef __riscv_v_intrinsic
#error "vector intrinsics are needed: gcc 14 or clang 17, or later"
#endif

#define GR_INLINE static inline __attribute__((always_inline))
enum { PANEL = GB_PANEL, GROUP = GB_GROUP, TILE = 4, BATCH = 64 };

/* ---- the product chain: vl rows of a group, from row r ---- */

/* D. Dots come modulo 2^16; less 8 * asum they are sums of 32 products of at most 8 * 127, so they
 * fit into 16 bits and what was lost above them is no loss: D = 16 * dot' + (128 - zero) * asum,
 * and of two planes D = 16 * high' + low' + 8 * asum. */
GR_INLINE vint32m2_t whole(uint32_t format, bool planes, const gr_block *b, uint32_t k, size_t r,
                           vint16m1_t high, vint16m1_t low, int32_t asum, size_t vl)
{
    int16_t sum = (int16_t)asum, eight = (int16_t)(8 * asum);
    vint32m2_t d = __riscv_vwmul_vx_i32m2(__riscv_vsub_vx_i16m1(high, eight, vl), 16, vl);
    if (planes) {
        d = __riscv_vwadd_wv_i32m2(d, __riscv_vsub_vx_i16m1(low, eight, vl), vl);
        return __riscv_vadd_vx_i32m2(d, eight, vl);
    }
    if (format == GB_FMT_Q4H) {
        vuint8mf2_t bytes = __riscv_vle8_v_u8mf2(b->meta + PANEL * (b->count + k) + r, vl);
        vuint16m1_t zero = __riscv_vrsub_vx_u16m1(__riscv_vzext_vf2_u16m1(bytes, vl), 128, vl);
        d = __riscv_vwmacc_vx_i32m2(d, sum, __riscv_vreinterpret_v_u16m1_i16m1(zero), vl);
    }
    return d;
}

GR_INLINE vfloat32m2_t halves(const uint8_t *p, size_t vl) /* gr_half, lane by lane */
{
    vuint16m1_t h = __riscv_vle16_v_u16m1((const uint16_t *)(const void *)p, vl);
    vuint32m2_t wide = __riscv_vzext_vf2_u32m2(h, vl);
    vuint32m2_t u = __riscv_vsll_vx_u32m2(__riscv_vand_vx_u32m2(wide, 0x7FFF, vl), 13, vl);
    vuint32m2_t exponent = __riscv_vand_vx_u32m2(u, 0x0F800000u, vl);
    vuint32m2_t sign = __riscv_vand_vx_u32m2(__riscv_vsll_vx_u32m2(wide, 16, vl), 1u << 31, vl);
    vbool16_t last = __riscv_vmseq_vx_u32m2_b16(exponent, 0x0F800000u, vl);
    vbool16_t first = __riscv_vmseq_vx_u32m2_b16(exponent, 0, vl);
    u = __riscv_vadd_vx_u32m2(u, 112u << 23, vl);
    vfloat32m2_t small = __riscv_vreinterpret_v_u32m2_f32m2(__riscv_vadd_vx_u32m2(u, 1u << 23, vl));
    small = __riscv_vfsub_vf_f32m2(small, gr_float(113u << 23), vl);
    u = __riscv_vadd_vx_u32m2_mu(last, u, u, 112u << 23, vl);
    u = __riscv_vmerge_vvm_u32m2(u, __riscv_vreinterpret_v_f32m2_u32m2(small), first, vl);
    return __riscv_vreinterpret_v_u32m2_f32m2(__riscv_vor_vv_u32m2(u, sign, vl));
}

/* D * scale: with integer scales the product has 28 bits, and rounds the same from an integer. */
GR_INLINE vfloat32m2_t scaled(uint32_t format, const gr_block *b, uint32_t k, size_t r,
                              vint32m2_t d, size_t vl)
{
    const uint8_t *raw = b->meta + 2 * (PANEL * k + r);
    if (format == GB_FMT_Q4H || format == GB_FMT_Q8) {
        vuint8mf2_t bytes = __riscv_vle8_v_u8mf2(b->meta + PANEL * k + r, vl);
        vuint32m2_t scale = __riscv_vzext_vf4_u32m2(bytes, vl);
        d = __riscv_vmul_vv_i32m2(d, __riscv_vreinterpret_v_u32m2_i32m2(scale), vl);
    }
    vfloat32m2_t p = __riscv_vfcvt_f_x_v_f32m2(d, vl);
    if (format == GB_FMT_Q4RAW_F16)
        return __riscv_vfmul_vv_f32m2(p, halves(raw, vl), vl);
    if (format == GB_FMT_Q4RAW_BF16) {
        vuint16m1_t h = __riscv_vle16_v_u16m1((const uint16_t *)(const void *)raw, vl);
        vuint32m2_t u = __riscv_vsll_vx_u32m2(__riscv_vzext_vf2_u32m2(h, vl), 16, vl);
        return __riscv_vfmul_vv_f32m2(p, __riscv_vreinterpret_v_u32m2_f32m2(u), vl);
    }
    return p;
}

GR_INLINE vfloat32m2_t chain(uint32_t format, bool planes, const gr_block *b, uint32_t k,
                             size_t r, vint16m1_t high, vint16m1_t low, int32_t asum,
                             float sa, vfloat32m2_t acc, size_t vl)
{
    vint32m2_t d = whole(format, planes, b, k, r, high, low, asum, vl);
    return __riscv_vfmacc_vf_f32m2(acc, sa, scaled(format, b, k, r, d, vl), vl);
}

/* ---- one token ---- */

GR_INLINE vint8m2_t repeated(const int8_t *x, size_t vl) /* four activations, for vl rows */
{
    int32_t quad;
    memcpy(&quad, __builtin_assume_aligned(x, sizeof quad), sizeof quad);
    return __riscv_vreinterpret_v_i32m2_i8m2(__riscv_vmv_v_x_i32m2(quad, vl));
}

/* Dots of vl rows, modulo 2^16. */
GR_INLINE vint16m1_t dots1(const uint8_t *c, const int8_t *x, size_t vl)
{
    size_t bytes = 4 * vl;
    vint16m4_t s;
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; i++) {
        vuint8m2_t w = __riscv_vle8_v_u8m2(c + 64 * i, bytes);
        vuint8m2_t low = __riscv_vand_vx_u8m2(w, 15, bytes);
        vuint8m2_t high = __riscv_vsrl_vx_u8m2(w, 4, bytes);
        vint8m2_t a = repeated(x + 4 * i, vl), b = repeated(x + 4 * i + 16, vl);
        vint8m2_t l = __riscv_vreinterpret_v_u8m2_i8m2(low);
        s = i ? __riscv_vwmacc_vv_i16m4(s, l, a, bytes) : __riscv_vwmul_vv_i16m4(l, a, bytes);
        s = __riscv_vwmacc_vv_i16m4(s, __riscv_vreinterpret_v_u8m2_i8m2(high), b, bytes);
    }
    vuint16m4_t u = __riscv_vreinterpret_v_i16m4_u16m4(s);
    vuint32m4_t four = __riscv_vreinterpret_v_u16m4_u32m4(u);
    vuint16m2_t sums = __riscv_vadd_vv_u16m2(__riscv_vnsrl_wx_u16m2(four, 0, 2 * vl),
                                             __riscv_vnsrl_wx_u16m2(four, 16, 2 * vl), 2 * vl);
    vuint32m2_t two = __riscv_vreinterpret_v_u16m2_u32m2(sums);
    vuint16m1_t one = __riscv_vadd_vv_u16m1(__riscv_vnsrl_wx_u16m1(two, 0, vl),
                                            __riscv_vnsrl_wx_u16m1(two, 16, vl), vl);
    return __riscv_vreinterpret_v_u16m1_i16m1(one);
}

GR_INLINE void block1(uint32_t format, bool planes, const gr_block *b, const gr_act *a,
                      uint32_t token, float *acc)
{
    for (size_t r = 0, vl; r < PANEL; r += vl) { /* twice with registers of 128 bits, else once */
        vl = __riscv_vsetvl_e32m2(PANEL - r);
        vfloat32m2_t sum = __riscv_vle32_v_f32m2(acc + r, vl);
        for (uint32_t k = 0; k < b->count; k++) {
            size_t at = (size_t)token * a->groups + b->group + k;
            size_t code = (size_t)b->step * k + 4 * r;
            vint16m1_t high = dots1(b->high + code, a->codes + at * GROUP, vl), low = high;
            if (planes)
                low = dots1(b->low + code, a->codes + at * GROUP, vl);
            sum = chain(format, planes, b, k, r, high, low, a->asum[at], a->sa[at], sum, vl);
        }
        __riscv_vse32_v_f32m2(acc + r, sum, vl);
    }
}

/* ---- many tokens ---- */

typedef struct gr_codes { /* of a superblock: nibbles by input, 16 rows each */
    uint8_t at[GB_SUPERBLOCK][GROUP][PANEL];
} gr_codes;

GR_INLINE void put_quad(uint8_t (*to)[PANEL], vuint8m1_t x, size_t vl)
{
    __riscv_vse8_v_u8m1(to[0], __riscv_vand_vx_u8m1(x, 15, vl), vl);
    __riscv_vse8_v_u8m1(to[GROUP / 2], __riscv_vsrl_vx_u8m1(x, 4, vl), vl);
}

static void unpack(const uint8_t *c, uint32_t step, uint32_t n, gr_codes *out)
{
    size_t vl = PANEL;
    for (uint32_t k = 0; k < n; k++, c += step)
        for (uint32_t i = 0; i < 4; i++) {
            uint8_t(*to)[PANEL] = out->at[k] + 4 * i;
            vuint8m1x4_t w = __riscv_vlseg4e8_v_u8m1x4(c + 64 * i, vl);
            put_quad(to, __riscv_vget_v_u8m1x4_u8m1(w, 0), vl);
            put_quad(to + 1, __riscv_vget_v_u8m1x4_u8m1(w, 1), vl);
            put_quad(to + 2, __riscv_vget_v_u8m1x4_u8m1(w, 2), vl);
            put_quad(to + 3, __riscv_vget_v_u8m1x4_u8m1(w, 3), vl);
        }
}

typedef struct gr_tile { /* four tokens at a group; the last may be one token more than once */
    const int8_t *x[TILE];
    int32_t asum[TILE];
    float sa[TILE];
} gr_tile;

GR_INLINE void dots4(const uint8_t (*c)[PANEL], size_t r, const gr_tile *t, vint16m1_t *s0,
                     vint16m1_t *s1, vint16m1_t *s2, vint16m1_t *s3, size_t vl)
{
    vint16m1_t a0 = __riscv_vmv_v_x_i16m1(0, vl), a1 = a0, a2 = a0, a3 = a0;
    const int8_t *x0 = t->x[0], *x1 = t->x[1], *x2 = t->x[2], *x3 = t->x[3];
#pragma GCC unroll 8
    for (uint32_t i = 0; i < GROUP; i++) {
        vuint8mf2_t bytes = __riscv_vle8_v_u8mf2(c[i] + r, vl);
        vint8mf2_t w = __riscv_vreinterpret_v_u8mf2_i8mf2(bytes);
        a0 = __riscv_vwmacc_vx_i16m1(a0, x0[i], w, vl);
        a1 = __riscv_vwmacc_vx_i16m1(a1, x1[i], w, vl);
        a2 = __riscv_vwmacc_vx_i16m1(a2, x2[i], w, vl);
        a3 = __riscv_vwmacc_vx_i16m1(a3, x3[i], w, vl);
    }
    *s0 = a0, *s1 = a1, *s2 = a2, *s3 = a3;
}

GR_INLINE void chain_at(uint32_t format, bool planes, const gr_block *b, uint32_t k, size_t r,
                        vint16m1_t high, vint16m1_t low, const gr_tile *t, uint32_t i,
                        float (*acc)[PANEL], size_t vl)
{
    vfloat32m2_t sum = __riscv_vle32_v_f32m2(acc[i] + r, vl);
    sum = chain(format, planes, b, k, r, high, low, t->asum[i], t->sa[i], sum, vl);
    __riscv_vse32_v_f32m2(acc[i] + r, sum, vl);
}

GR_INLINE void group4(uint32_t format, bool planes, const gr_block *b, uint32_t k,
                      const gr_codes *high, const gr_codes *low, const gr_tile *t,
                      float (*acc)[PANEL])
{
    for (size_t r = 0, vl; r < PANEL; r += vl) {
        vl = __riscv_vsetvl_e32m2(PANEL - r);
        vint16m1_t h0, h1, h2, h3, l0, l1, l2, l3;
        dots4(high->at[k], r, t, &h0, &h1, &h2, &h3, vl);
        l0 = h0, l1 = h1, l2 = h2, l3 = h3;
        if (planes)
            dots4(low->at[k], r, t, &l0, &l1, &l2, &l3, vl);
        chain_at(format, planes, b, k, r, h0, l0, t, 0, acc, vl);
        chain_at(format, planes, b, k, r, h1, l1, t, 1, acc, vl);
        chain_at(format, planes, b, k, r, h2, l2, t, 2, acc, vl);
        chain_at(format, planes, b, k, r, h3, l3, t, 3, acc, vl);
    }
}

/* acc: room for `tokens` rounded up to whole tiles. */
GR_INLINE void block4(uint32_t format, bool planes, const gr_block *b, const gr_act *a,
                      uint32_t token, uint32_t tokens, const gr_codes *high,
                      const gr_codes *low, float (*acc)[PANEL])
{
    for (uint32_t first = 0; first < tokens; first += TILE)
        for (uint32_t k = 0; k < b->count; k++) {
            gr_tile t;
            for (uint32_t i = 0; i < TILE; i++) {
                uint32_t which = first + i < tokens ? first + i : tokens - 1;
                size_t at = (size_t)(token + which) * a->groups + b->group + k;
                t.x[i] = a->codes + at * GROUP, t.asum[i] = a->asum[at], t.sa[i] = a->sa[at];
            }
            group4(format, planes, b, k, high, low, &t, acc + first);
        }
}

static void blocks(const gr_block *b, const gr_act *a, uint32_t token, uint32_t tokens,
                   float (*acc)[PANEL])
{
    gr_codes h, l;
    unpack(b->high, b->step, b->count, &h);
    if (b->low)
        unpack(b->low, b->step, b->count, &l);
    if (b->format == GB_FMT_Q4H)
        block4(GB_FMT_Q4H, false, b, a, token, tokens, &h, NULL, acc);
    else if (b->format == GB_FMT_Q8)
        block4(GB_FMT_Q8, true, b, a, token, tokens, &h, &l, acc);
    else if (b->format == GB_FMT_Q8_ROWS && b->low)
        block4(GB_FMT_Q8_ROWS, true, b, a, token, tokens, &h, &l, acc);
    else if (b->format == GB_FMT_Q8_ROWS)
        block4(GB_FMT_Q8_ROWS, false, b, a, token, tokens, &h, NULL, acc);
    else if (b->format == GB_FMT_Q4RAW_F16)
        block4(GB_FMT_Q4RAW_F16, false, b, a, token, tokens, &h, NULL, acc);
    else
        block4(GB_FMT_Q4RAW_BF16, false, b, a, token, tokens, &h, NULL, acc);
}

static void blocks1(const gr_block *b, const gr_act *a, uint32_t token, float *acc)
{
    if (b->format == GB_FMT_Q4H)
        block1(GB_FMT_Q4H, false, b, a, token, acc);
    else if (b->format == GB_FMT_Q8)
        block1(GB_FMT_Q8, true, b, a, token, acc);
    else if (b->format == GB_FMT_Q8_ROWS && b->low)
        block1(GB_FMT_Q8_ROWS, true, b, a, token, acc);
    else if (b->format == GB_FMT_Q8_ROWS)
        block1(GB_FMT_Q8_ROWS, false, b, a, token, acc);
    else if (b->format == GB_FMT_Q4RAW_F16)
        block1(GB_FMT_Q4RAW_F16, false, b, a, token, acc);
    else
        block1(GB_FMT_Q4RAW_BF16, false, b, a, token, acc);
}

/* ---- panels ---- */

/* The panel's rows for at most BATCH tokens into y, `rows` of them. */
static void panel_of(const gr_mat *m, const gr_act *a, uint32_t panel, uint32_t token,
                     uint32_t tokens, uint32_t rows, float *y, size_t ldy)
{
    float acc[BATCH][PANEL], super[PANEL];
    gr_block b;
    memset(acc, 0, sizeof *acc * ((tokens + TILE - 1) / TILE * TILE));
    for (gr_walk w = gr_walk_panel(m, panel, 1); gr_walk_next(&w, &b);) {
        for (uint32_t t = 0; tokens < TILE && t < tokens; t++) /* too few to pay for unpacking */
            blocks1(&b, a, token + t, acc[t]);
        if (tokens >= TILE)
            blocks(&b, a, token, tokens, acc);
    }
    memcpy(super, m->data + m->panel * panel, sizeof super);
    for (uint32_t t = 0; t < tokens; t++) {
        for (uint32_t r = 0; r < PANEL; r++)
            acc[t][r] = super[r] * acc[t][r];
        memcpy(y + t * ldy, acc[t], rows * sizeof *y);
    }
}

static void k_product(const gr_mat *m, const gr_act *a, uint32_t first, uint32_t token,
                      uint32_t tokens, uint32_t width, float *y, size_t ldy)
{
    for (uint32_t col = 0; col < width; col += PANEL)
        for (uint32_t t = 0, n; t < tokens; t += n) {
            n = tokens - t < BATCH ? tokens - t : BATCH;
            panel_of(m, a, first + col / PANEL, token + t, n,
                     width - col < PANEL ? width - col : PANEL, y + t * ldy + col, ldy);
        }
}

/* ---- attention ---- */

GR_INLINE int32_t dot_i8(const int8_t *q, const int8_t *k, uint32_t n)
{
    size_t left = n;
    vint32m1_t sum = __riscv_vmv_s_x_i32m1(0, 1);
    for (size_t vl; left; left -= vl, q += vl, k += vl) {
        vl = __riscv_vsetvl_e8m2(left);
        vint16m4_t p = __riscv_vwmul_vv_i16m4(__riscv_vle8_v_i8m2(q, vl),
                                              __riscv_vle8_v_i8m2(k, vl), vl);
        sum = __riscv_vwredsum_vs_i16m4_i32m1(p, sum, vl);
    }
    return __riscv_vmv_x_s_i32m1_i32(sum);
}

static void k_score(const gr_queries *q, const gr_span *s, uint32_t dim, uint32_t group,
                    float *out, size_t ldo)
{
    gr_score_by(dot_i8, q, s, dim, group, out, ldo);
}

/* vl outputs inside one scale group. */
GR_INLINE void value_lanes(const float *e, const gr_span *s, size_t first, uint32_t group,
                           float *out, size_t vl)
{
    const int8_t *v = (const int8_t *)s->v + first;
    const uint16_t *scale = s->vs + first / group;
    vfloat32m4_t acc = __riscv_vle32_v_f32m4(out + first, vl);
    for (uint32_t p = 0; p < s->count; p++, v += s->stride, scale += s->scale_stride) {
        vint16m2_t wide = __riscv_vsext_vf2_i16m2(__riscv_vle8_v_i8m1(v, vl), vl);
        vfloat32m4_t x = __riscv_vfwcvt_f_x_v_f32m4(wide, vl);
        acc = __riscv_vfmacc_vf_f32m4(acc, e[p] * gr_bf16(*scale), x, vl);
    }
    __riscv_vse32_v_f32m4(out + first, acc, vl);
}

static void k_value(const float *e, size_t lde, uint32_t count, const gr_span *s, uint32_t dim,
                    uint32_t group, float *out, size_t ldo)
{
    for (uint32_t i = 0; i < count; i++)
        for (size_t at = 0, vl; at < dim; at += vl) {
            vl = __riscv_vsetvl_e32m4(group - at % group);
            value_lanes(e + i * lde, s, at, group, out + i * ldo, vl);
        }
}

const gr_kernels gr_kernels_rvv = {
    .name = "rvv", .gemv = k_product, .gemm = k_product, .score = k_score, .value = k_value,
};
