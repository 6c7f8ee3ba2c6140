/* gr_kern_lanes.c: everything but quantised products, 16 numbers at a time, as NUMERICS.md has 16
 * partial sums. Written in the operations of gr_lanes_*.h, compiled once for each of them. */
#ifdef __AVX512F__
#include "gr_lanes_avx512.h"
#else
#include "gr_lanes_avx2.h"
#endif

#define GR_GLUE2(a, b) a##b
#define GR_GLUE(a, b) GR_GLUE2(a, b)

enum { LANES = 16, GROUP = GB_GROUP };

/* Before every kernel returns: with the upper halves of registers in use, the next code without AVX
 * may cost hundreds of cycles. A compiler that builds for size does not see to it. */
#define clean_up() _mm256_zeroupper()

GR_INLINE uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

GR_INLINE lanes nothing(void)
{
    return all(0.0f);
}

GR_INLINE ilanes magnitude(lanes x) /* its encoding without the sign */
{
    return bits_and(bits_of(x), all_bits(0x7FFFFFFFu));
}

/* ---- functions of NUMERICS.md, section 2; the same as gr_kern.h has for one number ---- */

GR_INLINE lanes exp_of(lanes x)
{
    lanes c = where_less(all(88.0f), x, all(88.0f), x);
    lanes t = plus(times(c, all(0x1.715476p+0f)), all(GR_ROUND)), n = minus(t, all(GR_ROUND));
    lanes r = fused(n, all(-0x1.62e400p-1f), c);
    r = fused(n, all(-0x1.7f7d1cp-20f), r);
    lanes p = all(0x1.6a4748p-10f);
    p = fused(p, r, all(0x1.1239a2p-7f));
    p = fused(p, r, all(0x1.5558b6p-5f));
    p = fused(p, r, all(0x1.555492p-3f));
    p = fused(p, r, all(0x1.fffffcp-2f));
    p = fused(p, r, all(1.0f));
    p = fused(p, r, all(1.0f));
    ilanes up = bits_up23(bits_minus(bits_of(t), all_bits(GR_ROUND_BITS)));
    return where_less(x, all(-87.0f), nothing(), of_bits(bits_plus(bits_of(p), up)));
}

static lanes tanh_of(lanes x)
{
    lanes a = of_bits(magnitude(x)), z = times(x, x), one = all(1.0f);
    lanes p = all(-0x1.750ce2p-8f);
    p = fused(p, z, all(0x1.51f8cep-6f));
    p = fused(p, z, all(-0x1.b835a4p-5f));
    p = fused(p, z, all(0x1.1106f6p-3f));
    p = fused(p, z, all(-0x1.555532p-2f));
    lanes small = fused(times(x, z), p, x), t = exp_of(times(all(-2.0f), a));
    ilanes sign = bits_and(bits_of(x), all_bits(0x80000000u));
    lanes large = of_bits(bits_or(bits_of(over(minus(one, t), plus(one, t))), sign));
    return where_less(a, all(0.625f), small, large);
}

GR_INLINE lanes silu_of(lanes x)
{
    lanes e = exp_of(of_bits(bits_or(bits_of(x), all_bits(0x80000000u)))), one = all(1.0f);
    return times(x, over(where_less(x, nothing(), e, one), plus(one, e)));
}

GR_INLINE lanes gelu_of(lanes x)
{
    lanes c = times(times(x, x), x);
    lanes u = times(all(0x1.988454p-1f), plus(x, times(all(0x1.6e4e26p-5f), c)));
    return times(times(all(0.5f), x), plus(all(1.0f), tanh_of(u)));
}

static void k_glu(uint32_t kind, const float *g, const float *u, float *h)
{
    lanes x = load(g);
    store(h, times(kind == GB_ACT_SILU ? silu_of(x) : gelu_of(x), load(u)));
    clean_up();
}

GR_INLINE lanes cap_of(lanes z, lanes cap)
{
    return times(cap, tanh_of(over(z, cap)));
}

static void k_softcap(float *z, uint32_t n, float cap)
{
    for (uint32_t i = 0, m; i < n; i += m) {
        m = least(n - i, LANES);
        store_some(z + i, cap_of(load_some(z + i, m), all(cap)), m);
    }
    clean_up();
}

/* ---- element by element ---- */

static void k_add(float *x, const float *y, uint32_t n)
{
    for (uint32_t i = 0, m; i < n; i += m) {
        m = least(n - i, LANES);
        store_some(x + i, plus(load_some(x + i, m), load_some(y + i, m)), m);
    }
    clean_up();
}

static void k_divide(float *x, float by, uint32_t n)
{
    for (uint32_t i = 0, m; i < n; i += m) {
        m = least(n - i, LANES);
        store_some(x + i, over(load_some(x + i, m), all(by)), m);
    }
    clean_up();
}

static void k_rope(float *x, const float *table, uint32_t pairs)
{
    for (uint32_t i = 0, m; i < pairs; i += m) {
        m = least(pairs - i, LANES);
        lanes a = load_some(x + i, m), b = load_some(x + i + pairs, m);
        lanes c = load_some(table + i, m), s = load_some(table + i + pairs, m);
        store_some(x + i, minus(times(a, c), times(b, s)), m);
        store_some(x + i + pairs, plus(times(b, c), times(a, s)), m);
    }
    clean_up();
}

/* ---- activations ---- */

GR_INLINE uint32_t largest_magnitude(const float *x, uint32_t n)
{
    ilanes most = all_bits(0);
    for (uint32_t i = 0; i < n; i += LANES)
        most = bits_larger(most, magnitude(load_some(x + i, least(n - i, LANES))));
    return largest_bits(most);
}

static bool k_finite(const float *x, uint32_t n)
{
    bool result = largest_magnitude(x, n) < GR_EXPONENT;
    clean_up();
    return result;
}

GR_INLINE ilanes codes_of(lanes x, uint32_t usable, float inverse)
{
    x = times(of_bits(bits_and(bits_of(x), all_bits(usable))), all(gr_and(inverse, usable)));
    return bits_minus(bits_of(plus(x, all(GR_ROUND))), all_bits(GR_ROUND_BITS));
}

static bool k_quantise(const float *x, uint32_t n, uint32_t group, int8_t *codes, uint16_t *scale)
{
    bool ok = true;
    for (uint32_t i = 0; i < n; i += group, codes += group, scale++) {
        uint32_t amax = largest_magnitude(x + i, group), usable = gr_usable(amax);
        float step = gr_float(amax & usable) / 127.0f;
        *scale = (uint16_t)((gr_bits(step) + 0xFFFFu) >> 16); /* never below */
        float inverse = 1.0f / gr_bf16(*scale);
        for (uint32_t k = 0, m; k < group; k += m) {
            m = least(group - k, LANES);
            store_codes(codes + k, codes_of(load_some(x + i + k, m), usable, inverse), m);
        }
        ok &= amax < GR_EXPONENT;
    }
    clean_up();
    return ok;
}

/* Group g of token t: lanes x, then y. */
static bool put_group(lanes x, lanes y, gr_act *a, uint32_t t, uint32_t g)
{
    size_t at = (size_t)t * a->groups + g;
    uint32_t amax = largest_bits(bits_larger(magnitude(x), magnitude(y)));
    uint32_t usable = gr_usable(amax);
    float top = gr_float(amax & usable);
    ilanes first = codes_of(x, usable, 127.0f / top), second = codes_of(y, usable, 127.0f / top);
    store_codes(a->codes + at * GROUP, first, LANES);
    store_codes(a->codes + at * GROUP + LANES, second, LANES);
    a->sa[at] = top / 127.0f;
    a->asum[at] = sum_bits(bits_plus(first, second));
    return amax < GR_EXPONENT;
}

/* n <= 32 values of a group in all forms that the consumers want. */
GR_INLINE bool put_values(lanes x, lanes y, uint32_t n, gr_act *a, uint32_t t, uint32_t g)
{
    uint32_t first = least(n, LANES);
    if (a->x) {
        float *to = a->x + (size_t)t * a->cols + (size_t)g * GROUP;
        store_some(to, x, first);
        store_some(to + first, y, n - first);
    }
    return !a->codes || put_group(x, y, a, t, g);
}

static bool k_act(const float *x, gr_act *a, uint32_t t, uint32_t first_group, uint32_t n)
{
    bool finite = true;
    for (uint32_t i = 0; i < n; i += GROUP) {
        uint32_t m = least(n - i, GROUP), first = least(m, LANES);
        finite &= put_values(load_some(x + i, first), load_some(x + i + first, m - first), m, a, t,
                             first_group + i / GROUP);
    }
    clean_up();
    return finite;
}

static bool norm_factor(const float *x, uint32_t n, float eps, float *out_r)
{
    lanes acc = nothing();
    for (uint32_t i = 0; i < n; i += LANES) {
        lanes v = load_some(x + i, least(n - i, LANES));
        acc = fused(v, v, acc);
    }
    float ss = sum(acc);
    *out_r = 1.0f / root(ss / (float)n + eps);
    return (gr_bits(ss) & GR_EXPONENT) != GR_EXPONENT;
}

GR_INLINE lanes normed(const float *x, const float *w, lanes r, uint32_t n)
{
    return times(times(load_some(x, n), r), load_some(w, n));
}

static bool k_norm(const float *x, const float *w, uint32_t n, float eps, float *y)
{
    float r;
    bool finite = norm_factor(x, n, eps, &r);
    for (uint32_t i = 0, m; i < n; i += m) {
        m = least(n - i, LANES);
        store_some(y + i, normed(x + i, w + i, all(r), m), m);
    }
    clean_up();
    return finite;
}

static bool k_norm_act(const float *x, const float *w, uint32_t n, float eps, gr_act *a, uint32_t t)
{
    float r;
    bool finite = norm_factor(x, n, eps, &r);
    for (uint32_t i = 0; i < n; i += GROUP) {
        uint32_t m = least(n - i, GROUP), k = least(m, LANES);
        finite &= put_values(normed(x + i, w + i, all(r), k),
                             normed(x + i + k, w + i + k, all(r), m - k), m, a, t, i / GROUP);
    }
    clean_up();
    return finite;
}

/* ---- attention ---- */

static float k_softmax(float *s, uint32_t skip, uint32_t n, float scale, float cap)
{
    lanes lowest = all(gr_float(0xFF800000u)), top = lowest, acc = nothing();
    float factor = cap > 0.0f ? 1.0f : scale;
    for (uint32_t i = skip; i < n && cap > 0.0f; i++)
        s[i] *= scale;
    if (cap > 0.0f)
        k_softcap(s + skip, n - skip, cap);
    for (uint32_t i = 0; i < n; i += LANES) {
        uint32_t m = least(n - i, LANES), from = i ? 0 : skip;
        lanes x = times(load_some(s + i, m), all(factor));
        if (from > 0 || m < LANES) /* minus infinity: +0 after exp changes no partial sum */
            x = between(from, m, x, lowest);
        store_some(s + i, x, m);
        top = larger(x, top);
    }
    top = all(largest(top));
    for (uint32_t i = 0; i < n; i += LANES) {
        uint32_t m = least(n - i, LANES);
        lanes x = m < LANES ? between(0, m, load_some(s + i, m), lowest) : load(s + i);
        x = exp_of(minus(x, top));
        store_some(s + i, x, m);
        acc = plus(acc, x);
    }
    float result = sum(acc);
    clean_up();
    return result;
}

/* Scales of n <= 16 positions, `stride` apart; 0 behind them. */
GR_INLINE lanes scales_at(const uint16_t *p, size_t stride, uint32_t n)
{
    return stride == 1 ? load_brains(p, n) : load_brains_apart(p, stride, n);
}

/* Where the codes of n <= 16 positions from p on begin; behind the last one that one again. */
GR_INLINE void rows_from(const gr_span *s, uint32_t p, uint32_t n, const int8_t *row[LANES])
{
    const int8_t *k = (const int8_t *)s->k + p * s->stride;
    for (uint32_t i = 0; i < LANES; i++, k += i < n ? s->stride : 0)
        row[i] = k;
}

GR_INLINE lanes add_score(lanes dots, const gr_queries *q, uint32_t i, uint32_t g,
                          lanes key_scales, lanes acc)
{
    lanes scale = times(all(gr_bf16(q->scales[i * q->scale_stride + g])), key_scales);
    return fused(dots, scale, acc);
}

/* n <= 16 positions from p on; a lane is a position. */
static void score16(const gr_queries *q, const gr_span *s, uint32_t p, uint32_t n, uint32_t dim,
                    uint32_t group, float *out, size_t ldo)
{
    const int8_t *row[LANES];
    lanes acc[GR_QUERIES];
    gr_dots dots[GR_QUERIES];
    gr_keys keys;
    rows_from(s, p, n, row);
    for (uint32_t i = 0; i < q->count; i++)
        acc[i] = nothing();
    for (uint32_t at = 0, g = 0, m; at < dim; at += group, g++) {
        for (uint32_t i = 0; i < q->count; i++)
            clear_dots(&dots[i]);
        for (uint32_t k = 0; k < group; k += m) {
            m = least(group - k, DOT_STEP);
            load_keys(row, at + k, m, &keys);
            for (uint32_t i = 0; i < LANES; i++)
                __builtin_prefetch(row[i] + at + k + s->next);
            for (uint32_t i = 0; i < q->count; i++)
                dot_keys(&keys, q->codes + i * q->stride + at + k, m, &dots[i]);
        }
        lanes ks = scales_at(s->ks + p * s->scale_stride + g, s->scale_stride, n);
        for (uint32_t i = 0; i < q->count; i++)
            acc[i] = add_score(dots_of(&dots[i]), q, i, g, ks, acc[i]);
    }
    for (uint32_t i = 0; i < q->count; i++)
        store_some(out + i * ldo, acc[i], n);
}

/* The same where a step is one group, or two: keys and sums stay in registers. */
static void score16_steps(const gr_queries *q, const gr_span *s, uint32_t p, uint32_t n,
                          uint32_t steps, bool two, float *out, size_t ldo)
{
    const int8_t *row[LANES];
    lanes acc[GR_QUERIES], ks1 = nothing();
    gr_keys keys;
    rows_from(s, p, n, row);
    for (uint32_t step = 0; step < steps; step++) {
        uint32_t at = DOT_STEP * step, g = two ? 2 * step : step;
        const uint16_t *scales = s->ks + p * s->scale_stride + g;
        lanes ks = scales_at(scales, s->scale_stride, n);
        if (two)
            ks1 = scales_at(scales + 1, s->scale_stride, n);
        load_keys(row, at, DOT_STEP, &keys);
        for (uint32_t i = 0; i < LANES; i++)
            __builtin_prefetch(row[i] + at + s->next);
        for (uint32_t i = 0; i < q->count; i++) {
            gr_dots dots;
            clear_dots(&dots);
            dot_keys(&keys, q->codes + i * q->stride + at, DOT_STEP, &dots);
            lanes sum = step > 0 ? acc[i] : nothing();
            if (two) {
                sum = add_score(half_dots(&dots, false), q, i, g, ks, sum);
                acc[i] = add_score(half_dots(&dots, true), q, i, g + 1, ks1, sum);
            } else {
                acc[i] = add_score(dots_of(&dots), q, i, g, ks, sum);
            }
        }
    }
    for (uint32_t i = 0; i < q->count; i++)
        store_some(out + i * ldo, acc[i], n);
}

static void k_score(const gr_queries *q, const gr_span *s, uint32_t dim, uint32_t group,
                    float *out, size_t ldo)
{
    for (uint32_t p = 0, n; p < s->count; p += n) {
        n = least(s->count - p, LANES);
        if (dim % DOT_STEP == 0 && (group == DOT_STEP || (HALF_STEPS && 2 * group == DOT_STEP)))
            score16_steps(q, s, p, n, dim / DOT_STEP, HALF_STEPS && group < DOT_STEP, out + p, ldo);
        else
            score16(q, s, p, n, dim, group, out + p, ldo);
    }
    clean_up();
}

enum { SOME = 2 * LANES }; /* positions whose weighted values are added at a time */

/* Weights of n positions: probabilities times a scale of the values, for all queries. */
typedef float gr_weights[GR_QUERIES][SOME];

/* Values v of n positions: outputs of `queries` rows of out, `vectors` of 16 or, where
 * there is one, `width` of them; the second half of the vectors with the weights w1. The last three
 * are constants after inlining. */
GR_INLINE void value_tile(const int8_t *v, const gr_span *s, uint32_t n, float (*w)[SOME],
                          float (*w1)[SOME], float *out, size_t ldo, uint32_t width,
                          uint32_t queries, uint32_t vectors)
{
    lanes acc[4][4];
#pragma GCC unroll 4
    for (uint32_t i = 0; i < queries; i++)
#pragma GCC unroll 4
        for (uint32_t k = 0; k < vectors; k++)
            acc[i][k] = load_some(out + i * ldo + LANES * k, width);
    for (uint32_t p = 0; p < n; p++, v += s->stride) {
        __builtin_prefetch(v + s->next);
#pragma GCC unroll 4
        for (uint32_t k = 0; k < vectors; k++) {
            lanes x = load_codes(v + LANES * k, width);
#pragma GCC unroll 4
            for (uint32_t i = 0; i < queries; i++)
                acc[i][k] = fused(all((2 * k < vectors ? w : w1)[i][p]), x, acc[i][k]);
        }
    }
#pragma GCC unroll 4
    for (uint32_t i = 0; i < queries; i++)
#pragma GCC unroll 4
        for (uint32_t k = 0; k < vectors; k++)
            store_some(out + i * ldo + LANES * k, acc[i][k], width);
}

/* `width` outputs of 1 to 4 queries, of one scale group with w or of two with w and w1. */
static void value_part(const int8_t *v, const gr_span *s, uint32_t n, float (*w)[SOME],
                       float (*w1)[SOME], uint32_t count, uint32_t width, float *out, size_t ldo)
{
    uint32_t step = LANES * (count == 1 ? VALUE_ONE : VALUE_MANY), k = 0;
    for (; k + step <= width; k += step) {
        float *to = out + k;
        if (count == 1)
            value_tile(v + k, s, n, w, w1, to, ldo, LANES, 1, VALUE_ONE);
        else if (count == 2)
            value_tile(v + k, s, n, w, w1, to, ldo, LANES, 2, VALUE_MANY);
        else if (count == 3)
            value_tile(v + k, s, n, w, w1, to, ldo, LANES, 3, VALUE_MANY);
        else
            value_tile(v + k, s, n, w, w1, to, ldo, LANES, 4, VALUE_MANY);
    }
    for (; k < width; k += LANES) /* rare */
        for (uint32_t i = 0; i < count; i++)
            value_tile(v + k, s, n, w + i, w1, out + i * ldo + k, ldo, least(width - k, LANES), 1,
                       1);
}

static void weigh(const float *e, size_t lde, uint32_t count, const uint16_t *vs, size_t stride,
                  uint32_t n, gr_weights w)
{
    for (uint32_t k = 0; k < n; k += LANES) {
        uint32_t m = least(n - k, LANES);
        lanes scale = scales_at(vs + k * stride, stride, m);
        for (uint32_t i = 0; i < count; i++)
            store(w[i] + k, times(load_some(e + i * lde + k, m), scale));
    }
}

static void k_value(const float *e, size_t lde, uint32_t count, const gr_span *s, uint32_t dim,
                    uint32_t group, float *out, size_t ldo)
{
    enum { WIDE = LANES * VALUE_MANY };
    gr_weights w, w1;
    for (uint32_t p = 0, n; p < s->count; p += n) {
        n = least(s->count - p, SOME);
        for (uint32_t at = 0, width; at < dim; at += width) {
            const uint16_t *vs = s->vs + p * s->scale_stride + at / group;
            bool two = 2 * group == WIDE && at + WIDE <= dim; /* groups at once */
            weigh(e + p, lde, count, vs, s->scale_stride, n, w);
            if (two)
                weigh(e + p, lde, count, vs + 1, s->scale_stride, n, w1);
            width = two ? WIDE : group;
            for (uint32_t i = 0; i < count; i += 4)
                value_part((const int8_t *)s->v + p * s->stride + at, s, n, w + i,
                           (two ? w1 : w) + i, least(count - i, 4), width, out + i * ldo + at,
                           ldo);
        }
    }
    clean_up();
}

/* ---- float keys, values and weights ---- */

GR_INLINE lanes load_float(bool half, const void *p, size_t at, uint32_t n)
{
    return half ? load_halves((const uint16_t *)p + at, n) : load_some((const float *)p + at, n);
}

static void k_score_float(uint32_t kv_type, const float *q, const gr_span *s, uint32_t dim,
                          float *out)
{
    for (uint32_t p = 0; p < s->count; p++) {
        lanes acc = nothing();
        for (uint32_t i = 0, n; i < dim; i += n) {
            n = least(dim - i, LANES);
            lanes k = load_float(kv_type == GB_KV_F16, s->k, p * s->stride + i, n);
            acc = fused(load_some(q + i, n), k, acc);
        }
        out[p] = sum(acc);
    }
    clean_up();
}

static void k_value_float(uint32_t kv_type, const float *e, const gr_span *s, uint32_t dim,
                          float *out)
{
    for (uint32_t i = 0, n; i < dim; i += n) {
        n = least(dim - i, LANES);
        lanes acc = load_some(out + i, n);
        for (uint32_t p = 0; p < s->count; p++) {
            lanes v = load_float(kv_type == GB_KV_F16, s->v, p * s->stride + i, n);
            acc = fused(all(e[p]), v, acc);
        }
        store_some(out + i, acc, n);
    }
    clean_up();
}

/* A panel times `tokens` tokens, a constant after inlining. */
GR_INLINE void float_tile(const gr_mat *m, const gr_act *a, uint32_t panel, uint32_t token,
                          uint32_t tokens, uint32_t width, float *y, size_t ldy)
{
    bool half = m->seg->format == GB_FMT_F16;
    lanes acc[FLOAT_TILE];
    const uint8_t *w = m->data + m->panel * panel;
    const float *x = a->x + (size_t)token * a->cols;
#pragma GCC unroll 8
    for (uint32_t t = 0; t < tokens; t++)
        acc[t] = nothing();
    for (size_t k = 0; k < m->cols; k++) {
        lanes row = load_float(half, w, LANES * k, LANES);
#pragma GCC unroll 8
        for (uint32_t t = 0; t < tokens; t++)
            acc[t] = fused(row, all(x[t * (size_t)a->cols + k]), acc[t]);
    }
#pragma GCC unroll 8
    for (uint32_t t = 0; t < tokens; t++)
        store_some(y + t * ldy, acc[t], least(width, LANES));
}

static void k_gemm_float(const gr_mat *m, const gr_act *a, uint32_t first, uint32_t token,
                         uint32_t tokens, uint32_t width, float *y, size_t ldy)
{
    for (uint32_t col = 0; col < width; col += LANES, first++)
        for (uint32_t t = 0, n; t < tokens; t += n) {
            float *to = y + t * ldy + col;
            n = tokens - t < FLOAT_TILE ? 1 : FLOAT_TILE;
            if (n == FLOAT_TILE)
                float_tile(m, a, first, token + t, FLOAT_TILE, width - col, to, ldy);
            else
                float_tile(m, a, first, token + t, 1, width - col, to, ldy);
        }
    clean_up();
}

const gr_kernels GR_GLUE(gr_kernels_, GR_KERN_SUFFIX) = {
    .name = GR_LANES_NAME, .gemm_float = k_gemm_float, .act = k_act, .norm = k_norm,
    .norm_act = k_norm_act, .glu = k_glu, .rope = k_rope, .quantise = k_quantise,
    .score = k_score, .score_float = k_score_float, .value = k_value,
    .value_float = k_value_float, .softmax = k_softmax, .finite = k_finite,
    .softcap = k_softcap, .add = k_add, .divide = k_divide,
};
