/* test_kern.c: every kernel table gives the bits that NUMERICS.md defines.
 *
 * Products are compared with the formulas written out, code by code; everything else with the base
 * table, on odd sizes too. Weights are random bytes: no value of a format is left out. */
#include <stdio.h>
#include <stdlib.h>

#include "gr_internal.h"
#include "gr_kern.h"

enum { COLS = 360, GROUPS = 12, TOKENS = 41, PANELS = 3, ROWS = 16 * PANELS, MOST = 1 << 17 };

static int failures;
static bool quick; /* fewer sizes: under emulation */
static uint32_t seed = 7;

static uint32_t next(uint32_t size)
{
    return size + 1 + (quick ? size / 2 : 0);
}

static uint32_t draw(void)
{
    seed = seed * 1664525u + 1013904223u;
    return seed >> 8;
}

static float draw_float(float most) /* both signs, now and then 0 */
{
    return draw() % 50 == 0 ? 0.0f : ((float)(draw() % 20001u) * 1e-4f - 1.0f) * most;
}

static void expect_same(const void *a, const void *b, size_t n, const char *name, const char *what)
{
    if (memcmp(a, b, n) != 0) {
        fprintf(stderr, "test_kern: %s: %s differs\n", name, what);
        failures++;
    }
}

/* ---- products ---- */

typedef struct product {
    _Alignas(64) uint8_t data[MOST], low[MOST];
    int8_t codes[TOKENS * GROUPS * 32];
    float sa[TOKENS * GROUPS], x[TOKENS * COLS];
    int32_t asum[TOKENS * GROUPS];
    gb_segment seg[3];
    gr_mat m;
    gr_act a;
} product;

static size_t part(uint32_t format, uint32_t n) /* bytes of a superblock */
{
    size_t group = format == GB_FMT_Q8 ? 528 : format == GB_FMT_Q8_ROWS ? 256 : 288;
    return (group * n + 63) / 64 * 64;
}

/* Formats of up to three segments of the columns; the last takes what is left. */
static void make(product *p, const uint32_t *format, const uint32_t *groups, uint32_t count)
{
    memset(p, 0, sizeof *p);
    p->m = (gr_mat){.data = p->data, .seg = p->seg, .panel = 64, .seg_count = count,
                    .cols = COLS, .groups = GROUPS};
    for (uint32_t i = 0, g = 0; i < count; g += p->seg[i].group_count, i++) {
        p->seg[i] = (gb_segment){format[i], g, i + 1 < count ? groups[i] : GROUPS - g, 0};
        for (uint32_t left = p->seg[i].group_count, n; left; left -= n) {
            n = left < 8 ? left : 8;
            p->m.panel += part(format[i], n);
        }
    }
    bool floats = format[0] == GB_FMT_F32 || format[0] == GB_FMT_F16;
    if (floats)
        p->m.panel = (COLS * (format[0] == GB_FMT_F32 ? 64u : 32u) + 63) / 64 * 64;
    if (format[0] == GB_FMT_Q8_ROWS)
        p->m.low = p->low;
    for (size_t i = 0; i < MOST; i++)
        p->data[i] = (uint8_t)draw(), p->low[i] = (uint8_t)draw();
    for (size_t i = 0; i < MOST / 4 && format[0] == GB_FMT_F32; i++) {
        float w = draw_float(1.0f);
        memcpy(p->data + 4 * i, &w, 4);
    }
    for (uint32_t f = 0; f < count; f++)
        for (size_t i = 1; i < MOST && (format[f] == GB_FMT_F16 || format[f] == GB_FMT_Q4RAW_F16 ||
                                        format[f] == GB_FMT_Q4RAW_BF16); i += 2)
            p->data[i] &= 0xBF; /* exponents of halves below infinity */
    for (uint32_t r = 0; r < ROWS && !floats; r++) {
        float super = draw_float(1e-3f);
        memcpy(p->data + p->m.panel * (r / 16) + 4 * (r % 16), &super, 4);
    }
    p->a = (gr_act){p->codes, p->sa, p->asum, p->x, COLS, GROUPS};
    for (uint32_t t = 0; t < TOKENS; t++) {
        float x[COLS];
        for (uint32_t i = 0; i < COLS; i++)
            x[i] = draw_float(i / 32 == 3 ? 1e-20f : 4.0f); /* one group is too small to count */
        (void)gr_kernels_base.act(x, &p->a, t, 0, COLS);
    }
}

static int nibble(const uint8_t *group, uint32_t row, uint32_t k)
{
    uint32_t quad = k / 4;
    uint8_t byte = group[64 * (quad % 4) + 4 * row + k % 4];
    return quad < 4 ? byte & 15 : byte >> 4;
}

static float step_scale(uint32_t format, const uint8_t *meta, uint32_t g, uint32_t row)
{
    uint16_t h;
    memcpy(&h, meta + 2 * (16 * g + row), 2);
    return format == GB_FMT_Q8_ROWS     ? 1.0f
           : format == GB_FMT_Q4RAW_F16 ? gr_half(h)
           : format == GB_FMT_Q4RAW_BF16 ? gr_bf16(h)
                                         : (float)meta[16 * g + row];
}

static float by_the_book(const product *p, uint32_t panel, uint32_t row, uint32_t t)
{
    const uint8_t *start = p->data + p->m.panel * panel, *b = start + 64;
    float acc = 0.0f, super;
    if (p->seg[0].format == GB_FMT_F32 || p->seg[0].format == GB_FMT_F16) {
        for (uint32_t k = 0; k < COLS; k++) {
            size_t at = 16 * k + row;
            float w = p->seg[0].format == GB_FMT_F32
                          ? ((const float *)(const void *)start)[at]
                          : gr_half(((const uint16_t *)(const void *)start)[at]);
            acc = gr_fmaf_soft(w, p->x[t * COLS + k], acc);
        }
        return acc;
    }
    memcpy(&super, start + 4 * row, 4);
    for (uint32_t i = 0; i < p->m.seg_count; i++) {
        uint32_t f = p->seg[i].format, g = p->seg[i].first_group, end = g + p->seg[i].group_count;
        for (uint32_t n; g < end; b += part(f, n), g += n) {
            n = end - g < 8 ? end - g : 8;
            uint32_t size = f == GB_FMT_Q8 ? 512 : 256;
            const uint8_t *meta = b + size * n;
            for (uint32_t k = 0; k < n; k++) {
                const uint8_t *high = b + size * k, *second = f == GB_FMT_Q8 ? high + 256
                    : p->low + (size_t)256 * (GROUPS * panel + g + k);
                int32_t dot = 0, dot_low = 0, asum = p->asum[t * GROUPS + g + k];
                int32_t zero = f == GB_FMT_Q4H ? meta[16 * (n + k) + row] : 128;
                for (uint32_t j = 0; j < 32; j++) {
                    int32_t x = p->codes[(t * GROUPS + g + k) * 32 + j];
                    dot += nibble(high, row, j) * x;
                    if (f == GB_FMT_Q8 || (f == GB_FMT_Q8_ROWS && p->m.low))
                        dot_low += nibble(second, row, j) * x;
                }
                float d = (float)(16 * dot + dot_low - zero * asum);
                acc = gr_fmaf_soft(d * step_scale(f, meta, k, row), p->sa[t * GROUPS + g + k], acc);
            }
        }
    }
    return super * acc;
}

typedef struct results {
    float y[TOKENS][ROWS];
} results;

/* All tokens, at most `some` in a call, of `width` rows at most `step` in a call. */
static void multiply(gr_product f, const product *p, uint32_t some, uint32_t width, uint32_t step,
                     results *out)
{
    memset(out, 0, sizeof *out);
    for (uint32_t t = 0; t < TOKENS; t += some)
        for (uint32_t c = 0; c < width; c += step)
            f(&p->m, &p->a, c / 16, t, TOKENS - t < some ? TOKENS - t : some,
              width - c < step ? width - c : step, out->y[t] + c, ROWS);
}

static void expect_rows(const results *want, const results *got, uint32_t width, const char *name,
                        const char *what)
{
    static const float nothing[ROWS];
    for (uint32_t t = 0; t < TOKENS; t++) {
        expect_same(want->y[t], got->y[t], width * sizeof(float), name, what);
        expect_same(nothing, got->y[t] + width, (ROWS - width) * sizeof(float), name,
                    "what stands behind a product");
    }
}

static void test_product(const gr_kernels *kern, const product *p, const char *what)
{
    static results want, got;
    for (uint32_t t = 0; t < TOKENS; t++)
        for (uint32_t r = 0; r < ROWS; r++)
            want.y[t][r] = by_the_book(p, r / 16, r % 16, t);
    bool floats = p->seg[0].format == GB_FMT_F32 || p->seg[0].format == GB_FMT_F16;
    gr_product many = floats ? kern->gemm_float : kern->gemm;
    gr_product one = floats ? kern->gemm_float : kern->gemv;
    for (uint32_t some = 1; some <= TOKENS; some = next(some)) { /* every number of tokens */
        multiply(many, p, some, ROWS, ROWS, &got);
        expect_rows(&want, &got, ROWS, kern->name, what);
    }
    for (uint32_t width = 1; width <= ROWS; width = next(width)) { /* every last panel */
        multiply(many, p, 9, width, ROWS, &got);
        expect_rows(&want, &got, width, kern->name, what);
        multiply(one, p, 1, width, ROWS, &got);
        expect_rows(&want, &got, width, kern->name, what);
    }
    multiply(one, p, 1, ROWS, 16, &got); /* panels one by one */
    expect_rows(&want, &got, ROWS, kern->name, what);
}

static void test_products(const gr_kernels *kern)
{
    static const struct {
        const char *name;
        uint32_t format[3], groups[3], count;
    } cases[] = {
        {"q4h", {GB_FMT_Q4H}, {0}, 1},
        {"q4raw, halves", {GB_FMT_Q4RAW_F16}, {0}, 1},
        {"q4raw, bfloat16", {GB_FMT_Q4RAW_BF16}, {0}, 1},
        {"q8 body", {GB_FMT_Q8}, {0}, 1},
        {"q8 rows", {GB_FMT_Q8_ROWS}, {0}, 1},
        {"q8 rows, one plane", {GB_FMT_Q8_ROWS}, {0}, 1},
        {"f32", {GB_FMT_F32}, {0}, 1},
        {"f16", {GB_FMT_F16}, {0}, 1},
        {"q4h, q8, q4h", {GB_FMT_Q4H, GB_FMT_Q8, GB_FMT_Q4H}, {1, 9}, 3},
        {"q8, q4raw, q4h", {GB_FMT_Q8, GB_FMT_Q4RAW_F16, GB_FMT_Q4H}, {3, 2}, 3},
    };
    static product p;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        make(&p, cases[i].format, cases[i].groups, cases[i].count);
        if (strcmp(cases[i].name, "q8 rows, one plane") == 0)
            p.m.low = NULL;
        test_product(kern, &p, cases[i].name);
    }
}

/* Sums at their largest: all codes 15, all activations of one sign, zero points at both ends.
 * Then groups whose scale is 0, and groups whose activations are. */
static void test_extremes(const gr_kernels *kern)
{
    static product p;
    static const uint32_t formats[] = {GB_FMT_Q4H, GB_FMT_Q8, GB_FMT_Q8_ROWS};
    for (uint32_t i = 0; i < 4 * sizeof formats / sizeof *formats; i += quick ? 3 : 1) {
        uint32_t format = formats[i / 4];
        int8_t code = i % 2 ? -127 : 127;
        make(&p, &format, NULL, 1);
        memset(p.data, 0xFF, sizeof p.data), memset(p.low, 0xFF, sizeof p.low);
        for (uint32_t panel = 0; panel < PANELS; panel++) {
            uint8_t *start = p.data + p.m.panel * panel;
            for (uint32_t r = 0; r < 16; r++)
                memcpy(start + 4 * r, &(float){1e-3f}, 4);
            if (format == GB_FMT_Q4H && i % 4 >= 2) { /* zero points, and one group's scales */
                memset(start + 64 + 8 * 272, 0, 8 * 16);
                memset(start + 64 + 8 * 288 + 4 * 256, 0, 16);
            }
        }
        memset(p.codes, code, sizeof p.codes);
        for (uint32_t g = 0; g < TOKENS * GROUPS; g++)
            p.asum[g] = code * 32, p.sa[g] = 1.0f;
        memset(p.codes + 32 * GROUPS, 0, 32), p.asum[GROUPS] = 0, p.sa[GROUPS] = 0.0f;
        test_product(kern, &p, "largest sums");
    }
}

/* Nothing is flushed to zero: sums of subnormal numbers, which stay alone in the accumulators. */
static void test_tiny_scales(const gr_kernels *kern)
{
    static product p;
    make(&p, (uint32_t[]){GB_FMT_Q4RAW_BF16, GB_FMT_Q4H}, (uint32_t[]){3}, 2);
    for (size_t i = 0; i < MOST / 2; i++)
        p.data[2 * i + 1] &= 0x80; /* as bfloat16: below 2^-125 */
    for (uint32_t r = 0; r < ROWS; r++)
        memcpy(p.data + p.m.panel * (r / 16) + 4 * (r % 16), &(float){1.0f}, 4);
    for (uint32_t i = 0; i < TOKENS * GROUPS; i++)
        p.sa[i] = i % GROUPS < 3 ? 1e-6f : 0.0f;
    test_product(kern, &p, "tiny scales");
}

/* A row as long as the format allows in practice: the groups' order shows. */
static void test_long_row(const gr_kernels *kern)
{
    enum { MANY = 1025, SOME = 9 };
    static const gb_segment seg = {GB_FMT_Q4H, 0, MANY, 0};
    uint8_t *data = calloc(1, 64 + 288 * MANY + 64);
    int8_t *codes = malloc((size_t)SOME * MANY * 32);
    float *sa = malloc(SOME * MANY * sizeof *sa), want[SOME][16], got[SOME][16];
    int32_t *asum = calloc(SOME * MANY, sizeof *asum);
    gr_mat m = {.data = data, .seg = &seg, .panel = 64 + 288 * MANY + 32, .seg_count = 1,
                .cols = 32 * MANY, .groups = MANY};
    gr_act a = {codes, sa, asum, NULL, 32 * MANY, MANY};
    for (uint32_t i = 0; i < 64 + 288 * MANY; i++)
        data[i] = (uint8_t)draw();
    for (uint32_t r = 0; r < 16; r++)
        memcpy(data + 4 * r, &(float){1e-4f}, 4);
    for (uint32_t g = 0; g < SOME * MANY; g++) {
        sa[g] = draw_float(1.0f);
        for (uint32_t k = 32 * g; k < 32 * g + 32; k++)
            codes[k] = (int8_t)((int)(draw() % 255) - 127), asum[g] += codes[k];
    }
    gr_kernels_base.gemm(&m, &a, 0, 0, SOME, 16, want[0], 16);
    kern->gemm(&m, &a, 0, 0, SOME, 16, got[0], 16);
    expect_same(want, got, sizeof want, kern->name, "long rows");
    for (uint32_t t = 0; t < SOME; t++)
        kern->gemv(&m, &a, 0, t, 1, 16, got[t], 16);
    expect_same(want, got, sizeof want, kern->name, "long rows");
    free(data), free(codes), free(sa), free(asum);
}

/* ---- everything else: the base table is the reference ---- */

enum { N = 200 };

static void test_elementwise(const gr_kernels *kern)
{
    const gr_kernels *base = &gr_kernels_base;
    for (uint32_t n = 1; n <= N; n += 1 + n / 7) {
        float x[N], w[N], y[N], z[N];
        for (uint32_t i = 0; i < n; i++)
            x[i] = draw_float(n % 2 ? 30.0f : 1.0f), w[i] = draw_float(2.0f);
        bool a = base->norm(x, w, n, 1e-6f, y), b = kern->norm(x, w, n, 1e-6f, z);
        expect_same(y, z, n * sizeof *y, kern->name, a == b ? "norm" : "norm's verdict");
        memcpy(y, x, sizeof y), memcpy(z, x, sizeof z);
        base->softcap(y, n, 5.0f), kern->softcap(z, n, 5.0f);
        expect_same(y, z, n * sizeof *y, kern->name, "softcap");
        base->add(y, w, n), kern->add(z, w, n);
        expect_same(y, z, n * sizeof *y, kern->name, "add");
        base->divide(y, 3.7f, n), kern->divide(z, 3.7f, n);
        expect_same(y, z, n * sizeof *y, kern->name, "divide");
        base->rope(y, w, n / 2), kern->rope(z, w, n / 2);
        expect_same(y, z, n * sizeof *y, kern->name, "rope");
        for (uint32_t kind = GB_ACT_GELU_TANH; n >= 16 && kind <= GB_ACT_SILU; kind++) {
            base->glu(kind, x, w, y), kern->glu(kind, x, w, z);
            expect_same(y, z, 16 * sizeof *y, kern->name, "gate");
        }
        for (uint32_t skip = 0; skip < 16 && skip < n; skip++) {
            memcpy(y, x, sizeof y), memcpy(z, x, sizeof z);
            float cap = skip % 2 ? 7.0f : 0.0f;
            float s = base->softmax(y, skip, n, 0.3f, cap);
            float t = kern->softmax(z, skip, n, 0.3f, cap);
            expect_same(y, z, n * sizeof *y, kern->name, "softmax");
            expect_same(&s, &t, sizeof s, kern->name, "sum of softmax");
        }
    }
}

static void test_activations(const gr_kernels *kern)
{
    enum { G = (N + 31) / 32 };
    for (uint32_t n = 1; n <= N; n += 9) {
        float x[N], w[N], sa[2][G], f[2][N];
        int8_t codes[2][32 * G];
        int32_t asum[2][G];
        memset(codes, 0, sizeof codes), memset(sa, 0, sizeof sa), memset(asum, 0, sizeof asum);
        for (uint32_t i = 0; i < n; i++)
            x[i] = draw_float(3.0f), w[i] = draw_float(1.0f);
        const gr_kernels *table[2] = {&gr_kernels_base, kern};
        for (int k = 0; k < 2; k++) {
            gr_act a = {codes[k], sa[k], asum[k], f[k], n, (n + 31) / 32};
            (void)table[k]->norm_act(x, w, n, 1e-5f, &a, 0);
        }
        expect_same(codes[0], codes[1], sizeof codes[0], kern->name, "codes");
        expect_same(sa[0], sa[1], sizeof sa[0], kern->name, "activation scales");
        expect_same(asum[0], asum[1], sizeof asum[0], kern->name, "activation sums");
        expect_same(f[0], f[1], n * sizeof(float), kern->name, "float activations");
        for (int k = 0; k < 2; k++) { /* the last value is not finite */
            gr_act a = {codes[k], sa[k], asum[k], NULL, n, (n + 31) / 32};
            x[n - 1] = gr_float(k ? GR_EXPONENT : 0x7FC00000u);
            if (table[k]->act(x, &a, 0, 0, n) || table[k]->finite(x, n) ||
                table[k]->norm(x, w, n, 1e-5f, f[0]))
                fprintf(stderr, "test_kern: %s: infinity passes\n", kern->name), failures++;
        }
    }
}

/* Several queries at a time give what each gives alone. */
static void test_attention(const gr_kernels *kern, uint32_t type, uint32_t dim, uint32_t group)
{
    enum { P = 37, DIM = 256, Q = GR_QUERIES, LD = 48 };
    static float q[Q][DIM], rows[P][DIM], out[2][Q][DIM], s[2][Q][LD], e[Q][LD];
    static int8_t codes[2][P][DIM], qc[Q][DIM];
    static uint16_t scales[2][P][DIM], qs[Q][DIM], halves[P][DIM];
    for (uint32_t i = 0; i < Q; i++) {
        for (uint32_t k = 0; k < dim; k++)
            q[i][k] = draw_float(2.0f);
        (void)gr_kernels_base.quantise(q[i], dim, group, qc[i], qs[i]);
    }
    for (uint32_t p = 0; p < P; p++) {
        for (uint32_t i = 0; i < Q; i++)
            e[i][p] = p % 5 == 4 ? 0.0f : gr_expf(draw_float(4.0f));
        for (uint32_t i = 0; i < dim; i++) {
            rows[p][i] = draw_float(p == 5 ? 1e-18f : 2.0f);
            halves[p][i] = gr_to_half(rows[p][i]);
        }
        (void)gr_kernels_base.quantise(rows[p], dim, group, codes[0][p], scales[0][p]);
        (void)kern->quantise(rows[p], dim, group, codes[1][p], scales[1][p]);
    }
    expect_same(codes[0], codes[1], sizeof codes[0], kern->name, "KV codes");
    expect_same(scales[0], scales[1], sizeof scales[0], kern->name, "KV scales");
    const void *stores[] = {rows, halves, codes}; /* by GB_KV_* */
    const void *k = stores[type];
    gr_span span = {.k = k, .v = k, .ks = scales[0][0], .vs = scales[0][0], .stride = DIM,
                    .scale_stride = DIM, .count = P};
    for (uint32_t count = 1; count <= (type == GB_KV_INT8 ? Q : 1); count++) {
        memset(s, 0, sizeof s), memset(out, 0, sizeof out);
        for (uint32_t i = 0; i < count; i++) {
            gr_queries one = {qc[i], qs[i], DIM, DIM, 1};
            if (type == GB_KV_INT8) {
                gr_kernels_base.score(&one, &span, dim, group, s[0][i], LD);
                gr_kernels_base.value(e[i], LD, 1, &span, dim, group, out[0][i], DIM);
            } else {
                gr_kernels_base.score_float(type, q[i], &span, dim, s[0][i]);
                gr_kernels_base.value_float(type, e[i], &span, dim, out[0][i]);
            }
        }
        gr_queries all = {qc[0], qs[0], DIM, DIM, count};
        if (type == GB_KV_INT8) {
            kern->score(&all, &span, dim, group, s[1][0], LD);
            kern->value(e[0], LD, count, &span, dim, group, out[1][0], DIM);
        } else {
            kern->score_float(type, q[0], &span, dim, s[1][0]);
            kern->value_float(type, e[0], &span, dim, out[1][0]);
        }
        expect_same(s[0], s[1], sizeof s[0], kern->name, "scores");
        expect_same(out[0], out[1], sizeof out[0], kern->name, "values");
    }
}

static void test_table(const gr_kernels *kern)
{
    test_products(kern);
    test_extremes(kern);
    test_tiny_scales(kern);
    test_long_row(kern);
    test_elementwise(kern);
    test_activations(kern);
    for (uint32_t type = GB_KV_F32; type <= GB_KV_INT8; type++) {
        static const uint32_t shapes[][2] = {{32, 32}, {64, 64}, {64, 32}, {128, 128}, {256, 64}, {256, 256}, {24, 24},
                                             {16, 16}, {96, 96}, {80, 80}, {20, 20}, {6, 6}};
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
            test_attention(kern, type, shapes[i][0], shapes[i][1]);
    }
}

static void test_choice(void)
{
    gr_kernels k;
    if (gr_kernels_pick(&k, "none") || gr_kernels_pick(&k, "") || gr_kernels_pick(&k, "scalar/") ||
        gr_kernels_pick(&k, "/scalar") || gr_kernels_pick(&k, "scalar/none"))
        fprintf(stderr, "test_kern: unknown kernels are taken\n"), failures++;
    if (!gr_kernels_pick(&k, "scalar") || k.gemv != gr_kernels_base.gemv ||
        k.softmax != gr_kernels_base.softmax)
        fprintf(stderr, "test_kern: scalar is not the plain table\n"), failures++;
    const char *best = gr_kernels_at(0);
    for (uint32_t i = 0; gr_kernels_at(i); i++)
        best = gr_kernels_at(i);
    char both[80];
    snprintf(both, sizeof both, "scalar/%s", best);
    if (!gr_kernels_pick(&k, both) || k.gemv != gr_kernels_base.gemv)
        fprintf(stderr, "test_kern: %s: not a GEMV and a GEMM\n", both), failures++;
}

/* test_kern [quick [KERNEL]]: all that this processor runs, or one. */
int main(int argc, char **argv)
{
    uint32_t tested = 0;
    quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    test_choice();
    for (uint32_t i = 0; gr_kernels_at(i); i++) {
        gr_kernels k;
        if (argc > 2 && strcmp(argv[2], gr_kernels_at(i)) != 0)
            continue;
        if (!gr_kernels_pick(&k, gr_kernels_at(i)))
            fprintf(stderr, "test_kern: %s: listed, but not taken\n", gr_kernels_at(i)), failures++;
        test_table(&k);
        tested++;
    }
    if (failures || tested == 0)
        fprintf(stderr, "test_kern: %d failures in %u kernels\n", failures, tested);
    return failures != 0 || tested == 0;
}
