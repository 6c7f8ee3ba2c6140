/* test_planes.c: the head in two planes beside the full head, on heads that are made up: the best
 * tokens and their logits are the same, whatever the kernel, the threads and the request. */
#include <stdio.h>
#include <stdlib.h>

#include "gr_ctx.h"
#include "gr_model.h"

enum { HIDDEN = 224, GROUPS = HIDDEN / 32, ROWS = 1003, PADDED = 1008, PANELS = PADDED / 16,
       PANEL = 64 + 256 * GROUPS, CONTEXT = 64, ROOM = 1 << 16 };

static int failures;
static uint32_t seed;

static void expect(bool good, const char *what, const char *which)
{
    if (!good) {
        fprintf(stderr, "test_planes: %s: %s\n", which, what);
        failures++;
    }
}

static uint32_t draw(void)
{
    seed = seed * 1664525u + 1013904223u;
    return seed >> 8;
}

static float real(void)
{
    return (float)draw() * 0x1p-23f - 1.0f;
}

typedef struct fixture {
    gr_engine e;
    gr_planes planes;
    gr_kernels kern;
    gb_tensor tensor;
    gb_segment segment;
    struct gb_tokn tokens;
    uint8_t flags[ROWS];
    _Alignas(64) uint8_t image[PANELS * (PANEL + 256 * GROUPS)];
    _Alignas(64) uint8_t xn[ROOM], logits[PADDED * 4 + 64], hidden[HIDDEN * 4], ids[CONTEXT * 4];
} fixture;

static float *super(fixture *f, uint32_t row)
{
    return (float *)(void *)(f->image + (size_t)PANEL * (row / 16)) + row % 16;
}

static void make(fixture *f, const char *kernel, uint32_t threads)
{
    gr_error error;
    memset(f, 0, sizeof *f);
    seed = 7;
    gr_view *v = &f->e.v;
    f->segment = (gb_segment){GB_FMT_Q8_ROWS, 0, GROUPS, 0};
    f->tensor = (gb_tensor){.role = GB_ROLE_HEAD, .seg_count = 1, .rows = ROWS, .cols = HIDDEN,
                            .rows_padded = PADDED, .cols_padded = HIDDEN, .parts = 1,
                            .size = PANELS * PANEL, .second_offset = PANELS * PANEL};
    for (size_t i = 0; i < sizeof f->image; i++)
        f->image[i] = (uint8_t)draw();
    for (uint32_t row = 0; row < PADDED; row++)
        *super(f, row) = row < ROWS ? 0.001f * (1.5f + real()) : 0.0f;
    for (uint32_t i = 0; i < HIDDEN; i++) /* few inputs weigh much */
        ((float *)(void *)f->hidden)[i] = real() * (i % 50 == 3 ? 20.0f : 1.0f);
    f->tokens.vocab = ROWS;
    v->tok.h = &f->tokens, v->tok.flags = f->flags;
    v->conf = (gb_conf){.hidden = HIDDEN, .vocab_rows = ROWS, .context = CONTEXT, .chunk = 1};
    v->tensors = &f->tensor, v->segments = &f->segment, v->image = f->image;
    expect(gr_kernels_pick(&f->kern, kernel), "kernel", kernel);
    f->e.kern = &f->kern, f->e.planes = &f->planes;
    f->e.threads = f->e.decode_threads = threads;
    f->e.buf[GB_BUF_XN] = f->xn, f->e.buf[GB_BUF_LOGITS] = f->logits;
    f->e.buf[GB_BUF_HIDDEN] = f->hidden, f->e.buf[GB_BUF_IDS] = f->ids;
    f->planes.margin = GR_MARGIN, f->planes.most = GR_KEEP;
    f->e.team = aligned_alloc(64, gr_round_up(gr_team_bytes(), 64));
    expect(gr_team_start(f->e.team, threads, 0, &error) == GEMRUN_OK, "team", kernel);
}

static void drop(fixture *f)
{
    gr_team_stop(f->e.team);
    free(f->e.team);
}

/* Logits for a request; NULL: all. Returns the candidates. */
static uint64_t run(fixture *f, const gemrun_request *q, float *out)
{
    f->planes.request = q;
    f->planes.candidates = 0;
    f->e.screened = true;
    expect(gr_head_all(&f->e), "finite", "head");
    expect(f->e.screened == (q != NULL), "screened where that was asked for", "head");
    memcpy(out, f->logits, ROWS * sizeof *out);
    return f->planes.candidates;
}

static bool infinite(float z)
{
    return (gr_bits(z) & 0x7FFFFFFFu) == GR_EXPONENT;
}

static uint32_t better(const float *z, uint32_t row) /* rows that rank before it */
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < ROWS; i++)
        n += z[i] > z[row] || (z[i] == z[row] && i < row);
    return n;
}

/* The best `keep` rows are there, what is there is exact. */
static void agree(const float *full, const float *got, uint32_t keep, const char *which)
{
    for (uint32_t row = 0; row < ROWS; row++) {
        expect(infinite(got[row]) ? got[row] < 0 && better(full, row) >= keep
                                  : gr_bits(got[row]) == gr_bits(full[row]), "logit", which);
    }
}

static void compare(fixture *f, const char *which)
{
    static const uint32_t keeps[] = {1, 2, 40, GR_KEEP};
    float full[ROWS], got[ROWS];
    run(f, NULL, full);
    for (size_t i = 0; i < sizeof keeps / sizeof *keeps; i++) {
        gemrun_request q = {.temperature = keeps[i] > 1, .top_k = keeps[i],
                            .repetition_penalty = 1};
        run(f, &q, got);
        agree(full, got, keeps[i], which);
    }
}

static void copy_row(fixture *f, uint32_t to, uint32_t from)
{
    *super(f, to) = *super(f, from);
    for (uint32_t plane = 0; plane < 2; plane++)
        for (uint32_t line = 0; line < 4 * GROUPS; line++) {
            uint8_t *p = f->image + (plane ? PANELS * PANEL : 64) + 64 * (size_t)line;
            size_t step = plane ? 256 * GROUPS : PANEL;
            memcpy(p + step * (to / 16) + 4 * (to % 16), p + step * (from / 16) + 4 * (from % 16),
                   4);
        }
}

static uint32_t best_of(const float *z)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < ROWS; i++)
        best = z[i] > z[best] ? i : best;
    return best;
}

static void test_heads(fixture *f, const char *kernel, uint32_t threads)
{
    float full[ROWS];
    make(f, kernel, threads);
    compare(f, "random");
    f->e.balance = true;
    compare(f, "in pieces");
    f->e.v.conf.flags = GB_CONFF_FINAL_SOFTCAP, f->e.v.conf.final_softcap = 2.0f;
    compare(f, "soft-cap");
    f->e.v.conf.flags = 0;
    run(f, NULL, full);
    for (uint32_t i = 0; i < 70; i++) /* more equal ones than are wanted */
        copy_row(f, i * 14 % ROWS, best_of(full));
    compare(f, "ties");
    for (uint32_t row = 0; row < ROWS; row++)
        *super(f, row) *= row % 3 ? 1e30f : -1e30f;
    compare(f, "huge");
    for (uint32_t row = 0; row < ROWS; row++)
        *super(f, row) = 0.0f;
    compare(f, "no scale");
    for (uint32_t row = 1; row < ROWS; row++)
        *super(f, 0) = 0.001f, copy_row(f, row, 0);
    compare(f, "all equal");
    memset(f->hidden, 0, sizeof f->hidden);
    compare(f, "no input");
    drop(f);
}

/* Few are wanted of many: most rows are out. Tokens without a piece set no bar. */
static void test_candidates(fixture *f)
{
    float full[ROWS], got[ROWS];
    gemrun_request q = {.top_k = 40, .repetition_penalty = 1};
    make(f, NULL, 1);
    run(f, NULL, full);
    uint64_t greedy = run(f, &q, got);
    q.temperature = 1;
    expect(greedy > 0 && greedy < run(f, &q, got), "a few rows reach the bar", "candidates");
    q.temperature = 0;
    f->flags[best_of(full)] = GB_TOKEN_UNUSED;
    run(f, &q, got);
    f->planes.most = 1;
    full[best_of(full)] = -1e30f;
    expect(gr_bits(got[best_of(full)]) == gr_bits(full[best_of(full)]), "second", "candidates");
    q.temperature = 1;
    f->planes.request = &q;
    f->e.screened = true;
    expect(gr_head_all(&f->e) && !f->e.screened, "full for more than is paid for", "candidates");
    drop(f);
}

/* Rows that the request changes have their logits, and the best of the others are there too. */
static void test_forced(fixture *f)
{
    float full[ROWS], got[ROWS], others[ROWS];
    uint32_t lists[3][1], order[8];
    make(f, NULL, 2);
    run(f, NULL, full);
    memcpy(others, full, sizeof full);
    for (uint32_t i = 0; i < 8; i++) {
        order[i] = best_of(others);
        others[order[i]] = -1e30f;
    }
    lists[0][0] = order[0], lists[1][0] = order[1], lists[2][0] = 999;
    float push = -3.0f;
    gemrun_request q = {.repetition_penalty = 1.5f, .banned = lists[0], .banned_count = 1,
                        .bias_ids = lists[1], .bias_values = &push, .bias_count = 1};
    memcpy(f->ids, &order[2], sizeof *order);
    memcpy(f->ids + 4, &lists[2][0], sizeof *order);
    f->e.pos = 2;
    run(f, &q, got);
    for (uint32_t i = 0; i < 4; i++)
        expect(gr_bits(got[order[i]]) == gr_bits(full[order[i]]), "best", "forced");
    expect(gr_bits(got[999]) == gr_bits(full[999]), "seen", "forced");
    drop(f);
}

/* No split and no kernel shows, in the candidates either. */
static void test_same(fixture *f)
{
    float want[ROWS], got[ROWS];
    gemrun_request q = {.temperature = 1, .top_k = 7, .repetition_penalty = 1};
    make(f, "scalar", 1);
    uint64_t candidates = run(f, &q, want);
    drop(f);
    for (uint32_t k = 0; gr_kernels_at(k); k++)
        for (uint32_t threads = 1; threads <= 3; threads++) {
            make(f, gr_kernels_at(k), threads);
            f->e.balance = threads == 3;
            expect(run(f, &q, got) == candidates, "candidates", gr_kernels_at(k));
            expect(memcmp(want, got, sizeof got) == 0, "logits", gr_kernels_at(k));
            drop(f);
        }
}

int main(void)
{
    fixture *f = aligned_alloc(64, gr_round_up(sizeof *f, 64));
    for (uint32_t k = 0; f && gr_kernels_at(k); k++)
        for (uint32_t threads = 1; threads <= 3; threads++)
            test_heads(f, gr_kernels_at(k), threads);
    if (f) {
        test_candidates(f);
        test_forced(f);
        test_same(f);
    }
    free(f);
    return failures || !f ? 1 : 0;
}
