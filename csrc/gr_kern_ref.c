/* gr_kern_ref.c: the reference kernels, the definition of every number (NUMERICS.md) in plain C.
 *
 * Compiled once for every instruction set with its own GR_KERN_SUFFIX; the compiler vectorises. A
 * lane is always a row, a position or an output, so no width shows in a result. Integer sums may
 * be made in any order; a float sum has exactly the order that NUMERICS.md gives.
 *
 * GR_PRODUCTS_ELSEWHERE: another object of this instruction set has the quantised products; they
 * are left out. */
#include "gr_kern.h"

#define GR_GLUE2(a, b) a##b
#define GR_GLUE(a, b) GR_GLUE2(a, b)
#define GR_TABLE GR_GLUE(gr_kernels_, GR_KERN_SUFFIX)
#define GR_INLINE static inline __attribute__((always_inline))
#if defined(__arm__) && defined(__ARM_NEON)
#error "NEON flushes subnormal numbers: compile with -mfpu=vfpv3-d16 or -mfpu=vfpv4, without NEON"
#endif
#if defined(__arm__) && defined(__ARM_FEATURE_FMA)
#define GR_NAME "neon" /* its float part, by VFPv4 */
enum { VB = 16 }; /* bytes of a vector */
#elif defined(__riscv_v)
#define GR_NAME "rvv"
enum { VB = 16 };
#else
#define GR_NAME "scalar"
enum { VB = 16 };
#endif
enum { PANEL = GB_PANEL, GROUP = GB_GROUP, LANES = 16 };

typedef float vf __attribute__((vector_size(VB)));
typedef int32_t vi __attribute__((vector_size(VB)));
typedef uint16_t vh __attribute__((vector_size(VB)));
typedef int16_t vs __attribute__((vector_size(VB)));

#define LOAD(type, p) __extension__({ type v_; memcpy(&v_, (p), sizeof v_); v_; })

#ifdef GR_HAS_FMA
GR_INLINE vf fma_lanes(vf x, float y, vf z)
{
    for (uint32_t i = 0; i < VB / 4; i++)
        z[i] = gr_fmaf(x[i], y, z[i]); /* becomes one instruction */
    return z;
}
#else
static vf fma_lanes(vf x, float y, vf z)
{
    float a[VB / 4], b[VB / 4];
    memcpy(a, &x, VB), memcpy(b, &z, VB);
    for (uint32_t i = 0; i < VB / 4; i++)
        b[i] = gr_fmaf_exact(a[i], y, b[i]);
    return LOAD(vf, b);
}
#endif

#ifndef GR_PRODUCTS_ELSEWHERE
/* ---- integer dots of a group: 256 bytes of codes with 16 rows ---- */

/* Inputs 0, 2 and 1, 3 of every quad as two 16-bit numbers in one, ready to be broadcast. */
typedef struct gr_pairs {
    int32_t even[GROUP / 4], odd[GROUP / 4];
} gr_pairs;

GR_INLINE void pairs_of(const int8_t *codes, gr_pairs *out)
{
    for (uint32_t i = 0; i < GROUP; i += VB) {
        vs x = LOAD(vs, codes + i), even = (vs)((vh)x << 8) >> 8, odd = x >> 8;
        memcpy((uint8_t *)out->even + i, &even, VB);
        memcpy((uint8_t *)out->odd + i, &odd, VB);
    }
}

GR_INLINE vh splat(int32_t pair)
{
    return (vh)((vi){0} + pair);
}

GR_INLINE void put_rows(vh sum, int32_t *d) /* two 16-bit partial sums a row -> one number */
{
    vi s = (vi)sum, r = (s << 16 >> 16) + (s >> 16);
    memcpy(d, &r, sizeof r);
}

/* A line holds 16 rows x 4 inputs: seen as 16-bit lanes, every nibble of a lane is one input, two
 * lanes a row. A lane sums 16 products of at most 15 * 127: 30480, so 16 bits are enough. */
static void dots(const uint8_t *c, const gr_pairs *x, int32_t *d)
{
    for (uint32_t row = 0; row < PANEL; row += VB / 4, c += VB) {
        vh sum = {0};
        for (uint32_t i = 0; i < 4; i++) {
            vh w = LOAD(vh, c + 64 * i);
            sum += (w & 15) * splat(x->even[i]) + (w >> 4 & 15) * splat(x->even[i + 4]);
            sum += (w >> 8 & 15) * splat(x->odd[i]) + (w >> 12) * splat(x->odd[i + 4]);
        }
        put_rows(sum, d + row);
    }
}

/* ---- products with quantised weights ---- */

enum { SUPER = PANEL * GB_SUPERBLOCK };

typedef struct gr_scales { /* of a superblock, [group][row] */
    int32_t zero[SUPER];   /* in sixteenths */
    float scale[SUPER];
} gr_scales;

/* meta: what follows the codes of a superblock of n groups. */
static void scales_of(uint32_t format, const uint8_t *meta, uint32_t n, gr_scales *out)
{
    n *= PANEL;
    for (uint32_t i = 0; i < n; i++)
        out->zero[i] = format == GB_FMT_Q4H ? meta[n + i] : 128;
    if (format == GB_FMT_Q4H || format == GB_FMT_Q8)
        for (uint32_t i = 0; i < n; i++)
            out->scale[i] = (float)(int32_t)meta[i];
    else if (format == GB_FMT_Q8_ROWS)
        for (uint32_t i = 0; i < n; i++)
            out->scale[i] = 1.0f; /* it has none */
    else
        for (uint32_t i = 0; i < n; i++) {
            uint16_t h;
            memcpy(&h, meta + 2 * (size_t)i, sizeof h);
            out->scale[i] = format == GB_FMT_Q4RAW_F16 ? gr_half(h) : gr_bf16(h);
        }
}

/* D = 16 * high (+ low) - zero * asum; acc = fmaf(D * scale, sa, acc). */
GR_INLINE void accumulate(const int32_t *zeros, const float *scales, const int32_t *high,
                          const int32_t *low, int32_t asum, float sa, float *acc)
{
    for (uint32_t r = 0; r < PANEL; r += VB / 4) {
        vi d = LOAD(vi, high + r) * 16 - LOAD(vi, zeros + r) * asum;
        if (low)
            d += LOAD(vi, low + r);
        vf p = __builtin_convertvector(d, vf) * LOAD(vf, scales + r);
        p = fma_lanes(p, sa, LOAD(vf, acc + r));
        memcpy(acc + r, &p, VB);
    }
}

/* Two superblocks ahead into the outer caches: one stream at the speed of memory. */
GR_INLINE void prefetch(const uint8_t *p)
{
    for (uint32_t i = 0; i < 320; i += 64)
        __builtin_prefetch(p + i, 0, 1);
}

/* One superblock of n groups, the first being group g0. Where two planes make a code, `low` is the
 * second one of group g0; both have `step` bytes a group. */
static void superblock(const gr_scales *s, const uint8_t *high, const uint8_t *low, uint32_t step,
                       uint32_t n, uint32_t g0, const gr_act *a, uint32_t token, float *acc)
{
    for (uint32_t g = 0; g < n; g++, high += step) {
        size_t at = (size_t)token * a->groups + g0 + g;
        gr_pairs x;
        int32_t d[PANEL], dl[PANEL];
        pairs_of(a->codes + at * GROUP, &x);
        prefetch(high + 4608);
        dots(high, &x, d);
        if (low) {
            prefetch(low + 4608);
            dots(low, &x, dl);
            low += step;
        }
        accumulate(s->zero + PANEL * g, s->scale + PANEL * g, d, low ? dl : NULL, a->asum[at],
                   a->sa[at], acc);
    }
}

static size_t superblock_size(uint32_t format, uint32_t n)
{
    size_t group = format == GB_FMT_Q8 ? 528 : format == GB_FMT_Q8_ROWS ? 256 : 288;
    return (group * n + GB_LINE - 1) / GB_LINE * GB_LINE;
}

static void quantised(const gr_mat *m, const gr_act *a, uint32_t panel, uint32_t token,
                      float *acc)
{
    const uint8_t *start = m->data + m->panel * panel, *p = start + GB_LINE;
    const uint8_t *low = m->low ? m->low + (size_t)256 * m->groups * panel : NULL;
    gr_scales s;
    for (uint32_t i = 0; i < m->seg_count; i++) {
        uint32_t format = m->seg[i].format, g = m->seg[i].first_group;
        uint32_t end = g + m->seg[i].group_count, n;
        for (; g < end; g += n) {
            n = end - g < GB_SUPERBLOCK ? end - g : GB_SUPERBLOCK;
            uint32_t step = format == GB_FMT_Q8 ? 512 : 256;
            scales_of(format, p + step * n, n, &s);
            const uint8_t *second = low ? low + 256 * g : format == GB_FMT_Q8 ? p + 256 : NULL;
            superblock(&s, p, second, step, n, g, a, token, acc);
            p += superblock_size(format, n);
        }
    }
    for (uint32_t r = 0; r < PANEL; r++)
        acc[r] = ((const float *)(const void *)start)[r] * acc[r];
}
#endif

/* ---- products with float weights: w[inputs][16] ---- */

static void whole(const gr_mat *m, const gr_act *a, uint32_t panel, uint32_t token, float *acc)
{
    const float *w = (const float *)(const void *)(m->data + m->panel * panel);
    const float *x = a->x + (size_t)token * a->cols;
    for (uint32_t row = 0; row < PANEL; row += VB / 4) {
        vf sum = {0};
        for (size_t k = 0; k < m->cols; k++)
            sum = fma_lanes(LOAD(vf, w + PANEL * k + row), x[k], sum);
        memcpy(acc + row, &sum, VB);
    }
}

static void halves(const gr_mat *m, const gr_act *a, uint32_t panel, uint32_t token, float *acc)
{
    const uint16_t *w = (const uint16_t *)(const void *)(m->data + m->panel * panel);
    const float *x = a->x + (size_t)token * a->cols;
    for (size_t k = 0; k < m->cols; k++) {
        float wide[PANEL];
        for (uint32_t r = 0; r < PANEL; r++)
            wide[r] = gr_half(w[PANEL * k + r]);
        for (uint32_t row = 0; row < PANEL; row += VB / 4) {
            vf sum = fma_lanes(LOAD(vf, wide + row), x[k], LOAD(vf, acc + row));
            memcpy(acc + row, &sum, VB);
        }
    }
}

/* Panel by panel, token by token. */
typedef void (*gr_one)(const gr_mat *m, const gr_act *a, uint32_t panel, uint32_t token,
                       float *acc);

GR_INLINE void each(gr_one one, const gr_mat *m, const gr_act *a, uint32_t first, uint32_t token,
                    uint32_t tokens, uint32_t width, float *y, size_t ldy)
{
    for (uint32_t col = 0; col < width; col += PANEL, first++) {
        size_t bytes = sizeof(float) * (width - col < PANEL ? width - col : PANEL);
        for (uint32_t t = 0; t < tokens; t++) {
            float acc[PANEL] = {0.0f};
            one(m, a, first, token + t, acc);
            memcpy(y + t * ldy + col, acc, bytes);
        }
    }
}

#ifndef GR_PRODUCTS_ELSEWHERE
static void k_gemm(const gr_mat *m, const gr_act *a, uint32_t first, uint32_t token,
                   uint32_t tokens, uint32_t width, float *y, size_t ldy)
{
    each(quantised, m, a, first, token, tokens, width, y, ldy);
}
#endif

static void k_gemm_float(const gr_mat *m, const gr_act *a, uint32_t first, uint32_t token,
                         uint32_t tokens, uint32_t width, float *y, size_t ldy)
{
    each(m->seg->format == GB_FMT_F32 ? whole : halves, m, a, first, token, tokens, width, y, ldy);
}

/* ---- sums to one scalar: 16 lanes, one tree ---- */

GR_INLINE float tree(float lane[LANES])
{
    for (uint32_t half = LANES / 2; half; half /= 2)
        for (uint32_t i = 0; i < half; i++)
            lane[i] += lane[i + half];
    return lane[0];
}

static float dot_f32(const float *x, const float *y, uint32_t n)
{
    float lane[LANES] = {0.0f};
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (uint32_t r = 0; r < LANES; r++)
            lane[r] = gr_fmaf(x[i + r], y[i + r], lane[r]);
    for (uint32_t r = 0; i + r < n; r++)
        lane[r] = gr_fmaf(x[i + r], y[i + r], lane[r]);
    return tree(lane);
}

/* ---- activations ---- */

GR_INLINE uint32_t largest(const float *x, uint32_t n) /* of the encodings without the sign */
{
    uint32_t amax = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t u = gr_bits(x[i]) & 0x7FFFFFFFu;
        amax = u > amax ? u : amax;
    }
    return amax;
}

GR_INLINE int32_t encode(const float *x, uint32_t n, uint32_t usable, float inverse, int8_t *codes)
{
    int32_t sum = 0;
    inverse = gr_and(inverse, usable);
    for (uint32_t i = 0; i < n; i++) {
        float value = gr_and(x[i], usable);
        int32_t c = (int32_t)(gr_bits(value * inverse + GR_ROUND) - GR_ROUND_BITS);
        codes[i] = (int8_t)c;
        sum += c;
    }
    return sum;
}

static bool act_group(const float *x, gr_act *a, uint32_t t, uint32_t g) /* 32 values */
{
    size_t at = (size_t)t * a->groups + g;
    uint32_t amax = largest(x, GROUP), usable = gr_usable(amax);
    float top = gr_float(amax & usable);
    a->sa[at] = top / 127.0f;
    a->asum[at] = encode(x, GROUP, usable, 127.0f / top, a->codes + at * GROUP);
    return amax < GR_EXPONENT;
}

static bool k_act(const float *x, gr_act *a, uint32_t t, uint32_t first_group, uint32_t n)
{
    bool finite = true;
    if (a->x)
        memcpy(a->x + (size_t)t * a->cols + (size_t)first_group * GROUP, x, n * sizeof *x);
    for (uint32_t i = 0; a->codes && i < n; i += GROUP) {
        float group[GROUP] = {0.0f};
        memcpy(group, x + i, (n - i < GROUP ? n - i : GROUP) * sizeof *x);
        finite &= act_group(group, a, t, first_group + i / GROUP);
    }
    return finite;
}

static bool norm_factor(const float *x, uint32_t n, float eps, float *out_r)
{
    float ss = dot_f32(x, x, n);
    *out_r = 1.0f / gr_sqrtf(ss / (float)n + eps);
    return (gr_bits(ss) & GR_EXPONENT) != GR_EXPONENT;
}

static bool k_norm(const float *x, const float *w, uint32_t n, float eps, float *y)
{
    float r;
    bool finite = norm_factor(x, n, eps, &r);
    for (uint32_t i = 0; i < n; i++)
        y[i] = (x[i] * r) * w[i];
    return finite;
}

static bool k_norm_act(const float *x, const float *w, uint32_t n, float eps, gr_act *a, uint32_t t)
{
    float r, y[GROUP];
    bool finite = norm_factor(x, n, eps, &r);
    for (uint32_t i = 0; i < n; i += GROUP) {
        uint32_t m = n - i < GROUP ? n - i : GROUP;
        for (uint32_t k = 0; k < m; k++)
            y[k] = (x[i + k] * r) * w[i + k];
        finite &= k_act(y, a, t, i / GROUP, m);
    }
    return finite;
}

static void k_glu(uint32_t kind, const float *g, const float *u, float *h)
{
    if (kind == GB_ACT_SILU)
        for (uint32_t i = 0; i < LANES; i++)
            h[i] = gr_silu(g[i]) * u[i];
    else
        for (uint32_t i = 0; i < LANES; i++)
            h[i] = gr_gelu(g[i]) * u[i];
}

static void k_rope(float *x, const float *table, uint32_t pairs)
{
    const float *c = table, *s = table + pairs;
    for (uint32_t i = 0; i < pairs; i++) {
        float a = x[i], b = x[i + pairs];
        x[i] = (a * c[i]) - (b * s[i]);
        x[i + pairs] = (b * c[i]) + (a * s[i]);
    }
}

static bool k_finite(const float *x, uint32_t n)
{
    return largest(x, n) < GR_EXPONENT;
}

static void k_add(float *x, const float *y, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        x[i] += y[i];
}

static void k_divide(float *x, float by, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        x[i] = x[i] / by;
}

static void cap_lanes(float *z, float cap)
{
    for (uint32_t r = 0; r < LANES; r++)
        z[r] = gr_cap(z[r], cap);
}

static void k_softcap(float *z, uint32_t n, float cap)
{
    float rest[LANES] = {0.0f};
    for (; n >= LANES; n -= LANES, z += LANES)
        cap_lanes(z, cap);
    memcpy(rest, z, n * sizeof *z);
    cap_lanes(rest, cap);
    memcpy(z, rest, n * sizeof *z);
}

/* ---- attention ---- */

static bool k_quantise(const float *x, uint32_t n, uint32_t group, int8_t *codes, uint16_t *scale)
{
    bool ok = true;
    for (uint32_t i = 0; i < n; i += group, codes += group, scale++) {
        uint32_t amax = largest(x + i, group), usable = gr_usable(amax);
        float step = gr_float(amax & usable) / 127.0f;
        *scale = (uint16_t)((gr_bits(step) + 0xFFFFu) >> 16); /* never below */
        (void)encode(x + i, group, usable, 1.0f / gr_bf16(*scale), codes);
        ok &= amax < GR_EXPONENT;
    }
    return ok;
}

GR_INLINE int32_t dot_fixed(const int16_t *q, const int8_t *k, uint32_t n)
{
    int32_t sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        int16_t wide = k[i]; /* 16-bit operands: a compiler then has a multiply-add of pairs */
        sum += (int32_t)q[i] * (int32_t)wide;
    }
    return sum;
}

GR_INLINE int32_t dot_i8(const int16_t *q, const int8_t *k, uint32_t n)
{
    int32_t sum = 0;
    for (; n >= 64; n -= 64, q += 64, k += 64)
        sum += dot_fixed(q, k, 64);
    for (; n >= 16; n -= 16, q += 16, k += 16)
        sum += dot_fixed(q, k, 16);
    return sum + dot_fixed(q, k, n);
}

static void score_one(const int8_t *q, const uint16_t *qs, const gr_span *s, uint32_t dim,
                      uint32_t group, float *out)
{
    int16_t wide[GB_MAX_HEAD_DIM];
    for (uint32_t i = 0; i < dim; i++)
        wide[i] = q[i];
    for (uint32_t p = 0; p < s->count; p++) {
        const int8_t *k = (const int8_t *)s->k + p * s->stride;
        const uint16_t *ks = s->ks + p * s->scale_stride;
        float acc = 0.0f;
        for (uint32_t i = 0, g = 0; i < dim; i += group, g++) {
            int32_t dot = dot_i8(wide + i, k + i, group);
            acc = gr_fmaf((float)dot, gr_bf16(qs[g]) * gr_bf16(ks[g]), acc);
        }
        out[p] = acc;
    }
}

static void k_score(const gr_queries *q, const gr_span *s, uint32_t dim, uint32_t group,
                    float *out, size_t ldo)
{
    for (uint32_t i = 0; i < q->count; i++)
        score_one(q->codes + i * q->stride, q->scales + i * q->scale_stride, s, dim, group,
                  out + i * ldo);
}

static void k_score_float(uint32_t kv_type, const float *q, const gr_span *s, uint32_t dim,
                          float *out)
{
    for (uint32_t p = 0; p < s->count; p++) {
        float wide[GB_MAX_HEAD_DIM];
        const float *k = wide;
        if (kv_type == GB_KV_F32)
            k = (const float *)s->k + p * s->stride;
        else
            for (uint32_t i = 0; i < dim; i++)
                wide[i] = gr_half(((const uint16_t *)s->k + p * s->stride)[i]);
        out[p] = dot_f32(q, k, dim);
    }
}

/* Outputs first..first + n, inside one scale group. The type and n are constants after inlining,
 * so the sums stay in registers. */
GR_INLINE void value_block(uint32_t kv_type, const float *e, const gr_span *s, uint32_t first,
                           uint32_t group, uint32_t n, float *out)
{
    float acc[32];
    memcpy(acc, out + first, n * sizeof *acc);
    for (uint32_t p = 0; p < s->count; p++) {
        size_t at = p * s->stride + first;
        const int8_t *code = (const int8_t *)s->v + at;
        const uint16_t *half = (const uint16_t *)s->v + at;
        const float *full = (const float *)s->v + at;
        float w = e[p];
        if (kv_type == GB_KV_INT8)
            w *= gr_bf16(s->vs[p * s->scale_stride + first / group]);
        for (uint32_t i = 0; i < n; i++)
            acc[i] = gr_fmaf(w, kv_type == GB_KV_INT8  ? (float)code[i]
                                : kv_type == GB_KV_F16 ? gr_half(half[i])
                                                       : full[i], acc[i]);
    }
    memcpy(out + first, acc, n * sizeof *acc);
}

static void value_one(const float *e, const gr_span *s, uint32_t dim, uint32_t group, float *out)
{
    uint32_t n = group % 32 == 0 ? 32 : group % 8 == 0 ? 8 : 1;
    for (uint32_t i = 0; i < dim; i += n) {
        if (n == 32)
            value_block(GB_KV_INT8, e, s, i, group, 32, out);
        else if (n == 8)
            value_block(GB_KV_INT8, e, s, i, group, 8, out);
        else
            value_block(GB_KV_INT8, e, s, i, group, 1, out);
    }
}

static void k_value(const float *e, size_t lde, uint32_t count, const gr_span *s, uint32_t dim,
                    uint32_t group, float *out, size_t ldo)
{
    for (uint32_t i = 0; i < count; i++)
        value_one(e + i * lde, s, dim, group, out + i * ldo);
}

static void k_value_float(uint32_t kv_type, const float *e, const gr_span *s, uint32_t dim,
                          float *out)
{
    uint32_t n = dim % 32 == 0 ? 32 : 1;
    for (uint32_t i = 0; i < dim; i += n) {
        if (kv_type == GB_KV_F16 && n == 32)
            value_block(GB_KV_F16, e, s, i, 1, 32, out);
        else if (kv_type == GB_KV_F16)
            value_block(GB_KV_F16, e, s, i, 1, 1, out);
        else if (n == 32)
            value_block(GB_KV_F32, e, s, i, 1, 32, out);
        else
            value_block(GB_KV_F32, e, s, i, 1, 1, out);
    }
}

static void exp_lanes(float *s, float top, float *lane)
{
    for (uint32_t r = 0; r < LANES; r++) {
        s[r] = gr_exp(s[r] - top);
        lane[r] += s[r];
    }
}

static float k_softmax(float *s, uint32_t skip, uint32_t n, float scale, float cap)
{
    float lane[LANES] = {0.0f}, rest[LANES], top = s[skip] * scale;
    for (uint32_t i = skip; i < n; i++)
        s[i] *= scale;
    if (cap > 0.0f)
        k_softcap(s + skip, n - skip, cap), top = s[skip];
    for (uint32_t i = skip; i < n; i++)
        top = s[i] > top ? s[i] : top;
    for (uint32_t r = 0; r < skip; r++)
        s[r] = gr_float(0xFF800000u); /* minus infinity: +0 after exp changes no partial sum */
    uint32_t whole = n - n % LANES;
    for (uint32_t i = 0; i < whole; i += LANES)
        exp_lanes(s + i, top, lane);
    for (uint32_t r = 0; r < LANES; r++)
        rest[r] = whole + r < n ? s[whole + r] : gr_float(0xFF800000u);
    exp_lanes(rest, top, lane);
    memcpy(s + whole, rest, (n - whole) * sizeof *s);
    return tree(lane);
}

const gr_kernels GR_TABLE = {
    .name = GR_NAME,
#ifndef GR_PRODUCTS_ELSEWHERE
    .gemv = k_gemm, .gemm = k_gemm,
#endif
    .gemm_float = k_gemm_float, .act = k_act, .norm = k_norm, .norm_act = k_norm_act,
    .glu = k_glu, .rope = k_rope, .quantise = k_quantise, .score = k_score,
    .score_float = k_score_float, .value = k_value, .value_float = k_value_float,
    .softmax = k_softmax, .finite = k_finite, .softcap = k_softcap, .add = k_add,
    .divide = k_divide,
};
