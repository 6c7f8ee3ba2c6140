/* gr_kern_neon_vec.c: float products, activations, norms and attention with the instructions that
 * every Armv8-A processor has. The second table of the name "neon": gr_kern_neon.c has the
 * products with quantised weights. What is in neither, a compiler makes as well of gr_kern_ref.c.
 *
 * The 16 partial sums of a reduction are four registers, lane i % 16 in register i % 16 / 4. */
#include <arm_neon.h>

#include "gr_kern_neon.h"

enum { LANES = 16 };

/* ---- products with float weights: 16 rows an input ---- */

GR_INLINE float32x4_t four_halves(const uint16_t *p)
{
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}

/* n (1 or 4) tokens, `a->cols` floats apart. */
GR_INLINE void float_panel(bool half, const uint8_t *w, const gr_act *a, size_t token, uint32_t n,
                           float acc[][PANEL])
{
    const float *x = a->x + token * a->cols;
    float32x4_t sum[4][4];
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t j = 0; j < 4; j++)
            sum[t][j] = vdupq_n_f32(0.0f);
    for (size_t k = 0; k < a->cols; k++, w += PANEL * (half ? 2 : 4)) {
        for (uint32_t j = 0; j < 4; j++) {
            float32x4_t row = half ? four_halves((const uint16_t *)(const void *)w + 4 * j)
                                   : vld1q_f32((const float *)(const void *)w + 4 * j);
            for (uint32_t t = 0; t < n; t++)
                sum[t][j] = vfmaq_n_f32(sum[t][j], row, x[t * a->cols + k]);
        }
    }
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t j = 0; j < 4; j++)
            vst1q_f32(acc[t] + 4 * j, sum[t][j]);
}

static void float_tile(const gr_mat *m, const gr_act *a, uint32_t panel, size_t token, uint32_t n,
                       float acc[][PANEL])
{
    const uint8_t *w = m->data + m->panel * panel;
    bool half = m->seg->format == GB_FMT_F16;
    if (half && n == 1)
        float_panel(true, w, a, token, 1, acc);
    else if (half)
        float_panel(true, w, a, token, 4, acc);
    else if (n == 1)
        float_panel(false, w, a, token, 1, acc);
    else
        float_panel(false, w, a, token, 4, acc);
}

static void k_gemm_float(const gr_mat *m, const gr_act *a, uint32_t first, uint32_t token,
                         uint32_t tokens, uint32_t width, float *y, size_t ldy)
{
    for (uint32_t col = 0; col < width; col += PANEL, first++) {
        size_t bytes = sizeof(float) * (width - col < PANEL ? width - col : PANEL);
        for (uint32_t t = 0, n; t < tokens; t += n) {
            float acc[4][PANEL];
            n = tokens - t < 4 ? 1 : 4;
            float_tile(m, a, first, (size_t)token + t, n, acc);
            for (uint32_t i = 0; i < n; i++)
                memcpy(y + (t + i) * ldy + col, acc[i], bytes);
        }
    }
}

/* ---- activations ---- */

/* The largest encoding without the sign. */
GR_INLINE uint32_t largest(const float *x, uint32_t n)
{
    uint32x4_t top = vdupq_n_u32(0);
    uint32_t i = 0;
    for (; i + 4 <= n; i += 4)
        top = vmaxq_u32(top, vreinterpretq_u32_f32(vabsq_f32(vld1q_f32(x + i))));
    uint32_t most = vmaxvq_u32(top);
    for (; i < n; i++) {
        uint32_t u = gr_bits(x[i]) & 0x7FFFFFFFu;
        most = u > most ? u : most;
    }
    return most;
}

/* Rounded to nearest even, as adding 1.5 * 2^23 does. */
GR_INLINE int16x8_t codes_of(const float *x, uint32x4_t usable, float inverse)
{
    uint32x4_t x1 = vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x)), usable);
    uint32x4_t x2 = vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x + 4)), usable);
    int32x4_t a = vcvtnq_s32_f32(vmulq_n_f32(vreinterpretq_f32_u32(x1), inverse));
    int32x4_t b = vcvtnq_s32_f32(vmulq_n_f32(vreinterpretq_f32_u32(x2), inverse));
    return vmovn_high_s32(vmovn_s32(a), b);
}

/* 16 codes; their sums in pairs. */
GR_INLINE int16x8_t encode(const float *x, uint32_t usable, float inverse, int8_t *codes)
{
    uint32x4_t mask = vdupq_n_u32(usable);
    int16x8_t a = codes_of(x, mask, inverse), b = codes_of(x + 8, mask, inverse);
    vst1q_s8(codes, vmovn_high_s16(vmovn_s16(a), b));
    return vaddq_s16(a, b);
}

static bool act_group(const float *x, gr_act *a, size_t at) /* 32 values */
{
    uint32_t amax = largest(x, GROUP), usable = gr_usable(amax);
    int8_t *codes = a->codes + at * GROUP;
    float top = gr_float(amax & usable), inverse = gr_and(127.0f / top, usable);
    a->sa[at] = top / 127.0f;
    a->asum[at] = vaddlvq_s16(vaddq_s16(encode(x, usable, inverse, codes),
                                        encode(x + 16, usable, inverse, codes + 16)));
    return amax < GR_EXPONENT;
}

static bool k_act(const float *x, gr_act *a, uint32_t t, uint32_t first_group, uint32_t n)
{
    size_t at = (size_t)t * a->groups + first_group;
    bool finite = true;
    if (a->x)
        memcpy(a->x + (size_t)t * a->cols + (size_t)first_group * GROUP, x, n * sizeof *x);
    if (!a->codes)
        return true;
    for (; n >= GROUP; n -= GROUP, x += GROUP, at++)
        finite &= act_group(x, a, at);
    if (n > 0) {
        float group[GROUP] = {0.0f};
        memcpy(group, x, n * sizeof *x);
        finite &= act_group(group, a, at);
    }
    return finite;
}

/* ---- sums to one scalar ---- */

GR_INLINE float tree(const float32x4_t lane[4])
{
    float32x4_t four = vaddq_f32(vaddq_f32(lane[0], lane[2]), vaddq_f32(lane[1], lane[3]));
    float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

/* What is left over 16: the other lanes keep their sums. */
static float tree_with_rest(const float32x4_t lane[4], const float *x, const float *y, uint32_t n)
{
    float sum[LANES];
    float32x4_t all[4];
    for (uint32_t j = 0; j < 4; j++)
        vst1q_f32(sum + 4 * j, lane[j]);
    for (uint32_t i = 0; i < n; i++)
        sum[i] = gr_fmaf(x[i], y[i], sum[i]);
    for (uint32_t j = 0; j < 4; j++)
        all[j] = vld1q_f32(sum + 4 * j);
    return tree(all);
}

static float dot_f32(const float *x, const float *y, uint32_t n)
{
    float32x4_t lane[4] = {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f),
                           vdupq_n_f32(0.0f)};
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (uint32_t j = 0; j < 4; j++)
            lane[j] = vfmaq_f32(lane[j], vld1q_f32(x + i + 4 * j), vld1q_f32(y + i + 4 * j));
    return i < n ? tree_with_rest(lane, x + i, y + i, n - i) : tree(lane);
}

static bool norm_factor(const float *x, uint32_t n, float eps, float *out_r)
{
    float ss = dot_f32(x, x, n);
    *out_r = 1.0f / gr_sqrtf(ss / (float)n + eps);
    return (gr_bits(ss) & GR_EXPONENT) != GR_EXPONENT;
}

GR_INLINE void scale_row(const float *x, const float *w, uint32_t n, float r, float *y)
{
    uint32_t i = 0;
    for (; i + 4 <= n; i += 4)
        vst1q_f32(y + i, vmulq_f32(vmulq_n_f32(vld1q_f32(x + i), r), vld1q_f32(w + i)));
    for (; i < n; i++)
        y[i] = (x[i] * r) * w[i];
}

static bool k_norm(const float *x, const float *w, uint32_t n, float eps, float *y)
{
    float r;
    bool finite = norm_factor(x, n, eps, &r);
    scale_row(x, w, n, r, y);
    return finite;
}

static bool k_norm_act(const float *x, const float *w, uint32_t n, float eps, gr_act *a, uint32_t t)
{
    float r, y[8 * GROUP];
    bool finite = norm_factor(x, n, eps, &r);
    for (uint32_t i = 0, m; i < n; i += m) {
        m = n - i < 8 * GROUP ? n - i : 8 * GROUP;
        scale_row(x + i, w + i, m, r, y);
        finite &= k_act(y, a, t, i / GROUP, m);
    }
    return finite;
}

/* ---- attention ---- */

static bool k_quantise(const float *x, uint32_t n, uint32_t group, int8_t *codes, uint16_t *scale)
{
    bool ok = true;
    for (uint32_t from = 0; from < n; from += group, codes += group, scale++) {
        const float *v = x + from;
        uint32_t amax = largest(v, group), usable = gr_usable(amax), i = 0;
        float step = gr_float(amax & usable) / 127.0f;
        *scale = (uint16_t)((gr_bits(step) + 0xFFFFu) >> 16); /* never below */
        float inverse = gr_and(1.0f / gr_bf16(*scale), usable);
        for (; i + 16 <= group; i += 16)
            (void)encode(v + i, usable, inverse, codes + i);
        for (; i < group; i++) {
            float x1 = gr_and(v[i], usable) * inverse;
            codes[i] = (int8_t)(int32_t)(gr_bits(x1 + GR_ROUND) - GR_ROUND_BITS);
        }
        ok &= amax < GR_EXPONENT;
    }
    return ok;
}

static void k_score_float(uint32_t kv_type, const float *q, const gr_span *s, uint32_t dim,
                          float *out)
{
    for (uint32_t p = 0; p < s->count; p++) {
        float wide[GB_MAX_HEAD_DIM];
        const uint16_t *half = (const uint16_t *)s->k + p * s->stride;
        const float *k = (const float *)s->k + p * s->stride;
        uint32_t i = 0;
        if (kv_type == GB_KV_F16) {
            for (; i + 4 <= dim; i += 4)
                vst1q_f32(wide + i, four_halves(half + i));
            for (; i < dim; i++)
                wide[i] = gr_half(half[i]);
            k = wide;
        }
        out[p] = dot_f32(q, k, dim);
    }
}

enum { POSITIONS = 32, QUERIES = 4 }; /* whose weights are made at a time */

/* Codes 4j..4j+3 as floats: as the upper byte of a number with 24 binary places. */
GR_INLINE float32x4_t floats_of_codes(uint8x16_t codes, uint32_t j)
{
    static const uint8_t places[4][16] = {
        {255, 255, 255, 0, 255, 255, 255, 1, 255, 255, 255, 2, 255, 255, 255, 3},
        {255, 255, 255, 4, 255, 255, 255, 5, 255, 255, 255, 6, 255, 255, 255, 7},
        {255, 255, 255, 8, 255, 255, 255, 9, 255, 255, 255, 10, 255, 255, 255, 11},
        {255, 255, 255, 12, 255, 255, 255, 13, 255, 255, 255, 14, 255, 255, 255, 15}};
    uint8x16_t wide = vqtbl1q_u8(codes, vld1q_u8(places[j]));
    return vcvtq_n_f32_s32(vreinterpretq_s32_u8(wide), 24);
}

/* out[t][0..16 * parts) += the weights of n queries times `count` rows of codes. */
GR_INLINE void add_values(const float (*w)[POSITIONS], uint32_t n, const int8_t *v, size_t stride,
                          uint32_t count, uint32_t parts, float *out, size_t ldo)
{
    float32x4_t acc[QUERIES][8];
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t j = 0; j < 4 * parts; j++)
            acc[t][j] = vld1q_f32(out + t * ldo + 4 * j);
    for (uint32_t p = 0; p < count; p++, v += stride) {
        for (uint32_t j = 0; j < 4 * parts; j++) {
            uint8x16_t codes = vreinterpretq_u8_s8(vld1q_s8(v + j / 4 * 16));
            float32x4_t x = floats_of_codes(codes, j % 4);
            for (uint32_t t = 0; t < n; t++)
                acc[t][j] = vfmaq_n_f32(acc[t][j], x, w[t][p]);
        }
    }
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t j = 0; j < 4 * parts; j++)
            vst1q_f32(out + t * ldo + 4 * j, acc[t][j]);
}

/* The outputs of one scale group. */
static void add_group_values(const float (*w)[POSITIONS], uint32_t n, const int8_t *v,
                             size_t stride, uint32_t count, uint32_t group, float *out, size_t ldo)
{
    uint32_t i = 0;
    for (; n == 1 && i + 32 <= group; i += 32)
        add_values(w, 1, v + i, stride, count, 2, out + i, ldo);
    for (; n == 2 && i + 32 <= group; i += 32)
        add_values(w, 2, v + i, stride, count, 2, out + i, ldo);
    for (; n == QUERIES && i + 16 <= group; i += 16)
        add_values(w, QUERIES, v + i, stride, count, 1, out + i, ldo);
    for (; i < group; i++) /* few: heads are multiples of 32 almost everywhere */
        for (uint32_t t = 0; t < n; t++)
            for (uint32_t p = 0; p < count; p++)
                out[t * ldo + i] = gr_fmaf(w[t][p], (float)v[p * stride + i], out[t * ldo + i]);
}

/* Positions p.. of a span, `count` of them, for n queries. */
static void add_positions(const float *e, size_t lde, uint32_t n, const gr_span *s, size_t p,
                          uint32_t count, uint32_t dim, uint32_t group, float *out, size_t ldo)
{
    for (uint32_t i = 0, g = 0; i < dim; i += group, g++) {
        float w[QUERIES][POSITIONS], scale[POSITIONS];
        for (uint32_t k = 0; k < count; k++)
            scale[k] = gr_bf16(s->vs[(p + k) * s->scale_stride + g]);
        for (uint32_t t = 0; t < n; t++)
            for (uint32_t k = 0; k < count; k++)
                w[t][k] = e[t * lde + p + k] * scale[k];
        add_group_values((const float (*)[POSITIONS])w, n,
                         (const int8_t *)s->v + p * s->stride + i, s->stride, count, group,
                         out + i, ldo);
    }
}

static void k_value(const float *e, size_t lde, uint32_t count, const gr_span *s, uint32_t dim,
                    uint32_t group, float *out, size_t ldo)
{
    for (uint32_t p = 0, some; p < s->count; p += some) {
        some = s->count - p < POSITIONS ? s->count - p : POSITIONS;
        for (uint32_t t = 0, n; t < count; t += n) {
            uint32_t left = count - t;
            n = left >= QUERIES ? QUERIES : left >= 2 ? 2 : 1;
            add_positions(e + t * lde, lde, n, s, p, some, dim, group, out + t * ldo, ldo);
        }
    }
}

const gr_kernels gr_kernels_neon_vec = {
    .name = "neon", .gemm_float = k_gemm_float, .act = k_act, .norm = k_norm,
    .norm_act = k_norm_act, .quantise = k_quantise, .score_float = k_score_float,
    .value = k_value,
};
