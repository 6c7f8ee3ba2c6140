/* test_gm.c: the compile-host helper under sanitizers: every function on exactly sized buffers,
 * equal results for all thread counts, kernels and floating-point environments, refusals. */
#include <fenv.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gm_helper.h"
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#define CHECK(x) \
    do { \
        if (!(x)) { \
            fprintf(stderr, "test_gm: %s:%d: %s does not hold\n", __FILE__, __LINE__, #x); \
            exit(1); \
        } \
    } while (0)

enum { ROWS = 37, TOKENS = 70 };

typedef struct stored { /* heap buffers of exactly the needed sizes */
    gm_rows rows;
    size_t codes, scales;
} stored;

static uint32_t padded(uint32_t cols)
{
    return (cols + 31u) / 32u * 32u;
}

static void *fresh(size_t size)
{
    void *p = malloc(size != 0u ? size : 1u);
    CHECK(p != NULL);
    memset(p, 0x5a, size);
    return p;
}

static float *noise(size_t count, uint32_t seed)
{
    float *w = fresh(count * sizeof *w);
    uint32_t state = seed * 2654435761u + 1u;
    for (size_t i = 0; i < count; i++) {
        float sum = 0.0f;
        for (int k = 0; k < 4; k++) {
            state = state * 1664525u + 1013904223u;
            sum += (float)(state >> 8) / 16777216.0f - 0.5f;
        }
        w[i] = sum;
    }
    return w;
}

static stored stored_new(uint32_t rows, uint32_t cols)
{
    stored s = {.rows = {.rows = rows, .cols = cols}};
    s.codes = (size_t)rows * padded(cols);
    s.scales = s.codes / 32u;
    s.rows.codes = fresh(s.codes);
    s.rows.scales = fresh(s.scales);
    s.rows.zps = fresh(s.scales);
    s.rows.supers = fresh(rows * sizeof(float));
    return s;
}

static void stored_free(stored *s)
{
    free(s->rows.codes);
    free(s->rows.scales);
    free(s->rows.zps);
    free(s->rows.supers);
}

static int stored_equal(const stored *a, const stored *b)
{
    return memcmp(a->rows.codes, b->rows.codes, a->codes) == 0 &&
           memcmp(a->rows.scales, b->rows.scales, a->scales) == 0 &&
           memcmp(a->rows.zps, b->rows.zps, a->scales) == 0 &&
           memcmp(a->rows.supers, b->rows.supers, a->rows.rows * sizeof(float)) == 0;
}

static uint8_t *formats_of(uint32_t cols, int mixed)
{
    uint32_t groups = padded(cols) / 32u;
    uint8_t *formats = fresh(groups);
    for (uint32_t g = 0; g < groups; g++) {
        formats[g] = mixed && g % 3u == 1u ? (uint8_t)GM_FMT_Q8 : (uint8_t)GM_FMT_Q4H;
    }
    return formats;
}

static void round_trip(const stored *s, const uint8_t *formats)
{
    uint32_t rows = s->rows.rows, cols = s->rows.cols;
    uint64_t panel = gm_panel_bytes(GM_FMT_Q4H, cols, formats);
    uint64_t size = (rows + 15u) / 16u * panel;
    uint8_t *data = fresh(size);
    stored back = stored_new(rows, cols);
    CHECK(panel != 0u);
    CHECK(gm_pack_rows(&s->rows, formats, data, panel, size) == GM_OK);
    CHECK(gm_pack_rows(&s->rows, formats, data, panel, size - 1u) == GM_ERR_SIZE);
    CHECK(gm_pack_rows(&s->rows, formats, data, panel - 64u, size) == GM_ERR_ARG);
    CHECK(gm_unpack_rows(data, panel, size, formats, &back.rows) == GM_OK);
    CHECK(stored_equal(s, &back));
    stored_free(&back);
    free(data);
}

static void test_rows(uint32_t cols, int mixed)
{
    float *w = noise((size_t)ROWS * cols, cols), *out = fresh((size_t)ROWS * cols * sizeof *out);
    float *importance = noise(cols, 9u);
    uint8_t *formats = formats_of(cols, mixed);
    stored first = stored_new(ROWS, cols);
    for (uint32_t c = 0; c < cols; c++) {
        importance[c] *= importance[c];
    }
    CHECK(gm_search_rows(w, importance, formats, &first.rows, 1, 0u) == GM_OK);
    for (int32_t threads = 1; threads <= 8; threads++) {
        stored other = stored_new(ROWS, cols);
        uint32_t flags = threads % 2 != 0 ? (uint32_t)GM_BASELINE : 0u;
        CHECK(gm_search_rows(w, importance, formats, &other.rows, threads, flags) == GM_OK);
        CHECK(stored_equal(&first, &other));
        stored_free(&other);
    }
    round_trip(&first, formats);
    double error[ROWS], power[ROWS], share = 0.0;
    CHECK(gm_dequant_rows(&first.rows, formats, out) == GM_OK);
    CHECK(gm_error_sums(w, out, NULL, ROWS, cols, error, power) == GM_OK);
    for (int r = 0; r < ROWS; r++) {
        share += error[r] / power[r] / ROWS;
    }
    CHECK(share < 0.02);
    w[cols / 2u] = NAN;
    CHECK(gm_search_rows(w, NULL, formats, &first.rows, 2, 0u) == GM_ERR_NONFINITE);
    stored_free(&first);
    free(formats);
    free(importance);
    free(out);
    free(w);
}

static void gptq_once(const float *w, const float *x, uint32_t cols, int32_t threads,
                      uint32_t flags, stored *out)
{
    double *h = fresh((size_t)cols * cols * sizeof *h);
    size_t floats = gm_feedback_floats(cols);
    gm_feedback feedback = {.cols = cols, .panels = fresh(floats * sizeof(float)),
                            .diag = fresh(cols * sizeof(float))};
    for (size_t i = 0; i < (size_t)cols * cols; i++) {
        h[i] = 0.0;
    }
    CHECK(gm_hessian_add(h, x, TOKENS, cols, threads, flags) == GM_OK);
    CHECK(gm_gptq_prepare(h, 0.01, &feedback, threads, flags) == GM_OK);
    CHECK(gm_gptq_rows(w, &feedback, NULL, &out->rows, threads, flags) == GM_OK);
    free(feedback.panels);
    free(feedback.diag);
    free(h);
}

static void test_gptq(uint32_t cols)
{
    float *w = noise((size_t)ROWS * cols, 3u), *x = noise((size_t)TOKENS * cols, 4u);
    stored first = stored_new(ROWS, cols);
    gptq_once(w, x, cols, 1, 0u, &first);
    for (int32_t threads = 2; threads <= 3; threads++) {
        stored other = stored_new(ROWS, cols);
        gptq_once(w, x, cols, threads, threads == 3 ? (uint32_t)GM_BASELINE : 0u, &other);
        CHECK(stored_equal(&first, &other));
        stored_free(&other);
    }
    round_trip(&first, NULL);
    stored_free(&first);
    free(x);
    free(w);
}

static void test_q8_rows(uint32_t cols)
{
    float *w = noise((size_t)ROWS * cols, 5u), *out = fresh((size_t)ROWS * cols * sizeof *out);
    size_t size = (size_t)ROWS * padded(cols);
    uint64_t panels = (ROWS + 15u) / 16u, plane = padded(cols) * 8u;
    uint64_t high_size = panels * (64u + plane), low_size = panels * plane;
    uint8_t *codes = fresh(size), *back = fresh(size), *high = fresh(high_size);
    uint8_t *low = fresh(low_size);
    float supers[ROWS], again[ROWS];
    CHECK(gm_search_q8_rows(w, NULL, ROWS, cols, codes, supers, 2, 0u) == GM_OK);
    CHECK(gm_search_q8_rows(w, NULL, ROWS, cols, back, again, 3, GM_BASELINE) == GM_OK);
    CHECK(memcmp(codes, back, size) == 0 && memcmp(supers, again, sizeof supers) == 0);
    CHECK(gm_pack_q8_rows(codes, supers, ROWS, cols, high, high_size, low, low_size) == GM_OK);
    CHECK(gm_pack_q8_rows(codes, supers, ROWS, cols, high, high_size, low, low_size + 1u) ==
          GM_ERR_SIZE);
    CHECK(gm_unpack_q8_rows(high, high_size, low, low_size, ROWS, cols, back, again) == GM_OK);
    CHECK(memcmp(codes, back, size) == 0 && memcmp(supers, again, sizeof supers) == 0);
    CHECK(gm_dequant_q8_rows(codes, supers, ROWS, cols, out) == GM_OK);
    for (size_t i = 0; i < (size_t)ROWS * cols; i++) {
        CHECK(fabsf(out[i] - w[i]) < 0.06f);
    }
    free(low);
    free(high);
    free(back);
    free(codes);
    free(out);
    free(w);
}

static void test_q4raw(uint32_t cols, uint32_t format)
{
    float *w = noise((size_t)ROWS * cols, 6u), *out = fresh((size_t)ROWS * cols * sizeof *out);
    size_t size = (size_t)ROWS * padded(cols), scales_size = size / 32u * sizeof(uint16_t);
    uint64_t panel = gm_panel_bytes(format, cols, NULL), bytes = (ROWS + 15u) / 16u * panel;
    uint8_t *codes = fresh(size), *back = fresh(size), *data = fresh(bytes);
    uint16_t *scales = fresh(scales_size), *again = fresh(scales_size);
    uint32_t exact[ROWS];
    CHECK(gm_search_q4raw(w, NULL, ROWS, cols, format, codes, scales, exact, 2) == GM_OK);
    CHECK(gm_dequant_q4raw(codes, scales, ROWS, cols, format, out) == GM_OK);
    /* What came out lies on the lattice: it must come back bit for bit. */
    CHECK(gm_search_q4raw(out, NULL, ROWS, cols, format, back, again, exact, 1) == GM_OK);
    for (int r = 0; r < ROWS; r++) {
        CHECK(exact[r] == padded(cols) / 32u);
    }
    CHECK(gm_pack_q4raw(codes, scales, ROWS, cols, data, panel, bytes) == GM_OK);
    CHECK(gm_unpack_q4raw(data, panel, bytes, ROWS, cols, back, again) == GM_OK);
    CHECK(memcmp(codes, back, size) == 0 && memcmp(scales, again, scales_size) == 0);
    free(again);
    free(scales);
    free(data);
    free(back);
    free(codes);
    free(out);
    free(w);
}

static void test_float(uint32_t cols)
{
    float *w = noise((size_t)ROWS * cols, 7u);
    for (uint32_t format = GM_FMT_F32; format <= (uint32_t)GM_FMT_F16; format++) {
        uint64_t panel = gm_panel_bytes(format, cols, NULL), bytes = (ROWS + 15u) / 16u * panel;
        uint8_t *data = fresh(bytes);
        CHECK(gm_pack_float(w, ROWS, cols, format, data, panel, bytes) == GM_OK);
        free(data);
    }
    w[0] = 1e6f;
    uint8_t one[GM_PANEL * 4];
    CHECK(gm_pack_float(w, 1u, 1u, GM_FMT_F16, one, 64u, 64u) == GM_ERR_RANGE);
    free(w);
}

typedef struct outcome { /* one of each result that arithmetic decides */
    stored searched, fed;
    float back[ROWS * 65];
    double freqs[16], error[ROWS], power[ROWS];
} outcome;

static void run_all(const float *w, const float *x, outcome *out)
{
    CHECK(gm_search_rows(w, x, NULL, &out->searched.rows, 2, 0u) == GM_ERR_NONFINITE); /* < 0 */
    CHECK(gm_search_rows(w, NULL, NULL, &out->searched.rows, 2, 0u) == GM_OK);
    gptq_once(w, x, 65u, 1, 0u, &out->fed);
    CHECK(gm_dequant_rows(&out->fed.rows, NULL, out->back) == GM_OK);
    CHECK(gm_error_sums(w, out->back, NULL, ROWS, 65u, out->error, out->power) == GM_OK);
    CHECK(gm_rope_freqs(5e5, 32u, GM_ROPE_LLAMA3, 8.0, 1.0, 4.0, 8192.0, out->freqs) == GM_OK);
}

static int outcome_equal(const outcome *a, const outcome *b)
{
    return stored_equal(&a->searched, &b->searched) && stored_equal(&a->fed, &b->fed) &&
           memcmp(a->back, b->back, sizeof a->back) == 0 &&
           memcmp(a->freqs, b->freqs, sizeof a->freqs) == 0 &&
           memcmp(a->error, b->error, sizeof a->error) == 0 &&
           memcmp(a->power, b->power, sizeof a->power) == 0;
}

/* FNV-1a over an outcome's results: equal for all compilers, flags and machines. */
static uint64_t digest_of(const outcome *o)
{
    const struct { const void *bytes; size_t size; } parts[] = {
        {o->searched.rows.codes, o->searched.codes}, {o->searched.rows.scales, o->searched.scales},
        {o->searched.rows.zps, o->searched.scales},  {o->fed.rows.codes, o->fed.codes},
        {o->fed.rows.scales, o->fed.scales},         {o->fed.rows.zps, o->fed.scales},
        {o->back, sizeof o->back},                   {o->freqs, sizeof o->freqs},
    };
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        for (size_t k = 0; k < parts[i].size; k++) {
            hash = (hash ^ ((const unsigned char *)parts[i].bytes)[k]) * 1099511628211u;
        }
    }
    return hash;
}

/* A caller with another rounding or with flush-to-zero gets the same bytes, and keeps its mode. */
static uint64_t test_environment(void)
{
    float *w = noise((size_t)ROWS * 65u, 8u), *x = noise((size_t)TOKENS * 65u, 9u);
    outcome *first = fresh(sizeof *first), *other = fresh(sizeof *other);
    first->searched = stored_new(ROWS, 65u);
    first->fed = stored_new(ROWS, 65u);
    other->searched = stored_new(ROWS, 65u);
    other->fed = stored_new(ROWS, 65u);
    run_all(w, x, first);
    CHECK(fesetround(FE_UPWARD) == 0);
    run_all(w, x, other);
    CHECK(fegetround() == FE_UPWARD);
    CHECK(fesetround(FE_TONEAREST) == 0);
    CHECK(outcome_equal(first, other));
#if defined(__SSE2__)
    unsigned saved = _mm_getcsr();
    _mm_setcsr(saved | 0x8040u);
    run_all(w, x, other);
    CHECK((_mm_getcsr() & 0x8040u) == 0x8040u);
    _mm_setcsr(saved);
    CHECK(outcome_equal(first, other));
#endif
    uint64_t digest = digest_of(first);
    stored_free(&first->searched);
    stored_free(&first->fed);
    stored_free(&other->searched);
    stored_free(&other->fed);
    free(other);
    free(first);
    free(x);
    free(w);
    return digest;
}

static void test_refusals(void)
{
    float w[64] = {0}, out[64], huge[1] = {INFINITY};
    double h[4] = {0}, freqs[32], nan_h[1] = {NAN};
    uint8_t bytes[2048];
    uint16_t halves[64];
    stored s = stored_new(1u, 64u);
    gm_rows none = {1u, 64u, NULL, NULL, NULL, NULL}, wide = s.rows;
    gm_feedback feedback = {.cols = 1u, .panels = out, .diag = w};
    uint8_t formats[2] = {GM_FMT_Q4H, GM_FMT_F32};
    wide.cols = GM_MAX_COLS + 1;
    CHECK(gm_search_rows(NULL, NULL, NULL, &s.rows, 1, 0u) == GM_ERR_ARG);
    CHECK(gm_search_rows(w, NULL, NULL, NULL, 1, 0u) == GM_ERR_ARG);
    CHECK(gm_search_rows(w, NULL, NULL, &none, 1, 0u) == GM_ERR_ARG);
    CHECK(gm_search_rows(w, NULL, NULL, &wide, 1, 0u) == GM_ERR_LIMIT);
    CHECK(gm_search_rows(w, NULL, formats, &s.rows, 1, 0u) == GM_ERR_ARG);
    CHECK(gm_search_rows(w, NULL, NULL, &s.rows, 0, 0u) == GM_ERR_ARG);
    CHECK(gm_search_rows(w, NULL, NULL, &s.rows, 1, 2u) == GM_ERR_ARG);
    CHECK(gm_search_rows(w, NULL, NULL, &s.rows, 1, 0u) == GM_OK);
    CHECK(s.rows.supers[0] == 0.0f && s.rows.scales[1] == 0u);
    CHECK(gm_hessian_add(h, huge, 1u, 1u, 1, 0u) == GM_ERR_NONFINITE);
    CHECK(gm_hessian_add(h, w, 1u, GM_MAX_GPTQ_COLS + 1u, 1, 0u) == GM_ERR_LIMIT);
    CHECK(gm_feedback_floats(0u) == 0u && gm_feedback_floats(GM_MAX_GPTQ_COLS + 1u) == 0u);
    CHECK(gm_feedback_floats(33u) == 3u * 1024u);
    CHECK(gm_gptq_prepare(h, 0.0, &feedback, 1, 0u) == GM_ERR_ARG);
    CHECK(gm_gptq_prepare(nan_h, 0.01, &feedback, 1, 0u) == GM_ERR_NONFINITE);
    CHECK(gm_gptq_rows(w, &feedback, NULL, &s.rows, 1, 0u) == GM_ERR_SIZE);
    CHECK(gm_panel_bytes(99u, 64u, NULL) == 0u && gm_panel_bytes(GM_FMT_Q4H, 0u, NULL) == 0u);
    CHECK(gm_panel_bytes(GM_FMT_Q4H, 64u, formats) == 0u);
    CHECK(gm_search_q4raw(w, NULL, 1u, 64u, GM_FMT_Q8, bytes, halves, NULL, 1) == GM_ERR_ARG);
    CHECK(gm_to_f16(huge, 1u, halves) == GM_ERR_NONFINITE);
    out[0] = 3.4e38f;
    CHECK(gm_to_f16(out, 1u, halves) == GM_ERR_RANGE);
    CHECK(gm_to_bf16(out, 1u, halves) == GM_ERR_RANGE);
    CHECK(gm_rope_freqs(10000.0, 63u, 0, 1.0, 1.0, 4.0, 0.0, freqs) == GM_ERR_ARG);
    CHECK(gm_rope_freqs(10000.0, 64u, 0, 1.0, 1.0, 4.0, 0.0, freqs) == GM_OK);
    CHECK(gm_rope_table(freqs, 32u, 0u, out, 1) == GM_ERR_ARG);
    CHECK(gm_rope_table(freqs, 32u, 1u, out, 1) == GM_OK);
    CHECK(out[0] == 1.0f && out[63] == 0.0f);
    CHECK(gm_find_nonfinite(w, 64u) == -1 && gm_find_nonfinite(huge, 1u) == 0);
    stored_free(&s);
}

int main(void)
{
    static const uint32_t widths[] = {1u, 31u, 33u, 96u, 261u, 300u};
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) {
        test_rows(widths[i], 0);
        test_rows(widths[i], 1);
        test_gptq(widths[i]);
        test_q8_rows(widths[i]);
        test_q4raw(widths[i], GM_FMT_Q4RAW_F16);
        test_q4raw(widths[i], GM_FMT_Q4RAW_BF16);
        test_float(widths[i]);
    }
    test_refusals();
    printf("test_gm: ok, digest %016" PRIx64 "\n", test_environment());
    return 0;
}
