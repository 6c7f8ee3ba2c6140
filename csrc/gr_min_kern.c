/* gr_min_kern.c: the kernels of a GR_MINIMAL build: NUMERICS.md in plain C, quantised formats only.
 *
 * Nothing here is made fast by hand, and nothing needs to know the processor: the bits are those of
 * every other kernel. Only cores with Helium have products of their own, in gr_min_mve.h. */
#include "gr_min.h"
#ifdef GR_MIN_MVE
#include "gr_min_mve.h"
#endif

enum { PANEL = GB_PANEL, GROUP = GB_GROUP, LANES = 16 };

/* ---- products ---- */

#ifndef GR_MIN_MVE
/* A group's codes, 4 bits each, of 16 rows: a line has 4 inputs of every row in its low nibbles,
 * and those 16 inputs further in its high ones. */
static void dots(const uint8_t *codes, const int8_t *x, int32_t d[PANEL])
{
    memset(d, 0, PANEL * sizeof *d);
    for (uint32_t line = 0; line < 4; line++)
        for (uint32_t i = 0; i < GB_LINE; i++) {
            uint32_t code = codes[GB_LINE * line + i], k = 4 * line + i % 4;
            d[i / 4] += (int32_t)(code & 15) * x[k] + (int32_t)(code >> 4) * x[k + 16];
        }
}

/* D = (16 * high + low - zero * asum) * scale, in place of high. Zeros of none are 128, scales 1.
 * It is below 2^31, its first factor below 2^24: as a float it is the product of their floats. */
static void whole(const uint8_t *zeros, const uint8_t *scales, int32_t asum,
                  const int32_t low[PANEL], int32_t d[PANEL])
{
    for (uint32_t r = 0; r < PANEL; r++)
        d[r] = (16 * d[r] + low[r] - (zeros ? zeros[r] : 128) * asum) * (scales ? scales[r] : 1);
}
#endif

typedef struct block { /* of n groups, at most GB_SUPERBLOCK */
    uint32_t format, group, n; /* the first group */
    const uint8_t *codes, *low; /* low: the second plane, or NULL */
    uint32_t step;              /* bytes from group to group, in both planes */
    const uint8_t *meta;        /* scales, and zeros behind them */
} block;

/* acc = fmaf(D, sa, acc), where the scales are not integers fmaf(D * scale, sa, acc). */
static void add_rows(const block *b, uint32_t g, const int32_t d[PANEL], float sa, float acc[PANEL])
{
    const uint8_t *scales = b->meta + 2 * (size_t)PANEL * g;
    uint16_t h;
    if (b->format != GB_FMT_Q4RAW_F16 && b->format != GB_FMT_Q4RAW_BF16)
        for (uint32_t r = 0; r < PANEL; r++)
            acc[r] = gr_fmaf((float)d[r], sa, acc[r]);
    else
        for (uint32_t r = 0; r < PANEL; r++, scales += sizeof h) {
            memcpy(&h, scales, sizeof h);
            float scale = b->format == GB_FMT_Q4RAW_F16 ? gr_half(h) : gr_bf16(h);
            acc[r] = gr_fmaf((float)d[r] * scale, sa, acc[r]);
        }
}

static const int32_t no_low[PANEL];

/* Groups ascending. */
static void add_block(const block *b, const gr_act *a, uint32_t token, float acc[PANEL])
{
    bool zeros = b->format == GB_FMT_Q4H, scales = zeros || b->format == GB_FMT_Q8;
    for (uint32_t g = 0; g < b->n; g++) {
        size_t at = (size_t)token * a->groups + b->group + g;
        const uint8_t *meta = b->meta + (size_t)PANEL * g;
        int32_t d[PANEL], low[PANEL];
        dots(b->codes + (size_t)b->step * g, a->codes + at * GROUP, d);
        if (b->low)
            dots(b->low + (size_t)b->step * g, a->codes + at * GROUP, low);
        whole(zeros ? meta + (size_t)PANEL * b->n : NULL, scales ? meta : NULL, a->asum[at],
              b->low ? low : no_low, d);
        add_rows(b, g, d, a->sa[at], acc);
    }
}

static void panel_times(const gr_mat *m, uint32_t panel, const gr_act *a, uint32_t token,
                        float acc[PANEL])
{
    const uint8_t *start = m->data + m->panel * panel, *p = start + GB_LINE;
    const uint8_t *low = m->low ? m->low + (size_t)256 * m->groups * panel : NULL;
    memset(acc, 0, PANEL * sizeof *acc);
    for (uint32_t i = 0; i < m->seg_count; i++) {
        bool q8 = m->seg[i].format == GB_FMT_Q8, meta = m->seg[i].format != GB_FMT_Q8_ROWS;
        uint32_t end = m->seg[i].first_group + m->seg[i].group_count;
        block b = {m->seg[i].format, m->seg[i].first_group, 0, p, low, q8 ? 512 : 256, NULL};
        for (; b.group < end; b.group += b.n) {
            b.n = end - b.group < GB_SUPERBLOCK ? end - b.group : GB_SUPERBLOCK;
            b.codes = p;
            b.meta = p + (size_t)b.step * b.n;
            b.low = low ? low + (size_t)256 * b.group : q8 ? p + 256 : NULL;
            add_block(&b, a, token, acc);
            size_t size = (size_t)(b.step + (q8 ? 16 : meta ? 32 : 0)) * b.n;
            p += (size + GB_LINE - 1) / GB_LINE * GB_LINE;
        }
    }
    float super[PANEL];
    memcpy(super, start, sizeof super);
    for (uint32_t r = 0; r < PANEL; r++)
        acc[r] = super[r] * acc[r];
}

void gr_min_product(const gr_mat *m, const gr_act *a, uint32_t first, uint32_t token,
                    uint32_t tokens, uint32_t width, float *y, size_t ldy)
{
    for (uint32_t col = 0; col < width; col += PANEL, first++)
        for (uint32_t t = 0; t < tokens; t++) {
            float acc[PANEL];
            uint32_t rows = width - col < PANEL ? width - col : PANEL;
            panel_times(m, first, a, token + t, acc);
            memcpy(y + t * ldy + col, acc, rows * sizeof *acc);
        }
}

/* ---- sums to one scalar: 16 lanes, one tree ---- */

static float tree(float lane[LANES])
{
    for (uint32_t half = LANES / 2; half; half /= 2)
        for (uint32_t i = 0; i < half; i++)
            lane[i] += lane[i + half];
    return lane[0];
}

bool gr_min_norm(const float *x, const float *w, uint32_t n, float eps, float *y)
{
    float lane[LANES] = {0.0f};
    for (uint32_t i = 0; i < n; i++)
        lane[i % LANES] = gr_fmaf(x[i], x[i], lane[i % LANES]);
    float ss = tree(lane), r = 1.0f / gr_sqrtf(ss / (float)n + eps);
    for (uint32_t i = 0; i < n; i++)
        y[i] = (x[i] * r) * w[i];
    return (gr_bits(ss) & GR_EXPONENT) != GR_EXPONENT;
}

float gr_min_softmax(float *s, uint32_t skip, uint32_t n, float scale, float cap)
{
    float lane[LANES] = {0.0f}, top = 0.0f;
    for (uint32_t i = skip; i < n; i++) {
        s[i] = cap > 0.0f ? gr_cap(s[i] * scale, cap) : s[i] * scale;
        top = i == skip || s[i] > top ? s[i] : top;
    }
    for (uint32_t i = skip; i < n; i++) {
        s[i] = gr_exp(s[i] - top);
        lane[i % LANES] += s[i];
    }
    return tree(lane);
}

/* ---- codes ---- */

static uint32_t largest(const float *x, uint32_t n) /* of the encodings without the sign */
{
    uint32_t amax = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t u = gr_bits(x[i]) & 0x7FFFFFFFu;
        amax = u > amax ? u : amax;
    }
    return amax;
}

static int32_t encode(const float *x, uint32_t n, float inverse, int8_t *codes)
{
    int32_t sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        int32_t c = (int32_t)(gr_bits(x[i] * inverse + GR_ROUND) - GR_ROUND_BITS);
        codes[i] = (int8_t)c;
        sum += c;
    }
    return sum;
}

bool gr_min_act(const float *x, gr_act *a, uint32_t t, uint32_t first_group, uint32_t n)
{
    bool finite = true;
    for (uint32_t i = 0; i < n; i += GROUP) {
        float group[GROUP] = {0.0f};
        memcpy(group, x + i, (n - i < GROUP ? n - i : GROUP) * sizeof *x);
        size_t at = (size_t)t * a->groups + first_group + i / GROUP;
        uint32_t amax = largest(group, GROUP);
        bool usable = amax >= GR_TINY_BITS && amax < GR_EXPONENT;
        float top = usable ? gr_float(amax) : 0.0f;
        if (!usable)
            memset(group, 0, sizeof group);
        a->sa[at] = top / 127.0f;
        a->asum[at] = encode(group, GROUP, usable ? 127.0f / top : 0.0f, a->codes + at * GROUP);
        finite &= amax < GR_EXPONENT;
    }
    return finite;
}

bool gr_min_quantise(const float *x, uint32_t n, uint32_t group, int8_t *codes, uint16_t *scale)
{
    bool finite = true;
    for (uint32_t i = 0; i < n; i += group, scale++) {
        uint32_t amax = largest(x + i, group);
        finite &= amax < GR_EXPONENT;
        *scale = 0;
        memset(codes + i, 0, group);
        if (amax < GR_TINY_BITS || amax >= GR_EXPONENT)
            continue;
        *scale = (uint16_t)((gr_bits(gr_float(amax) / 127.0f) + 0xFFFFu) >> 16); /* never below */
        (void)encode(x + i, group, 1.0f / gr_bf16(*scale), codes + i);
    }
    return finite;
}

/* ---- element by element ---- */

void gr_min_rope(float *x, const float *table, uint32_t pairs)
{
    const float *c = table, *s = table + pairs;
    for (uint32_t i = 0; i < pairs; i++) {
        float a = x[i], b = x[i + pairs];
        x[i] = (a * c[i]) - (b * s[i]);
        x[i + pairs] = (b * c[i]) + (a * s[i]);
    }
}

void gr_min_glu(uint32_t act, const float *g, const float *u, float *h)
{
    for (uint32_t i = 0; i < LANES; i++)
        h[i] = (act == GB_ACT_SILU ? gr_silu(g[i]) : gr_gelu(g[i])) * u[i];
}
