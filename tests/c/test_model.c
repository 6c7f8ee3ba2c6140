/* test_model.c: the forward pass around its arithmetic: barriers, chunks, threads, ring, failure.
 *
 * The model is made up in memory. What the logits should be is the business of the interpreter in
 * tests/reference; here equal things have to be equal. gr_model.c and gr_head.c are included, not
 * linked, so that their barriers can be counted. */
#include "gr_internal.h"

static uint32_t barriers;
static void counted(gr_team *team, void (*serial)(void *arg), void *arg);
#define gr_team_barrier counted
#include "../../csrc/gr_model.c"
#include "../../csrc/gr_head.c"
#undef gr_team_barrier

#include <stdio.h>
#include <stdlib.h>

#include "gr_port.h"

static void counted(gr_team *team, void (*serial)(void *arg), void *arg)
{
    __atomic_add_fetch(&barriers, 1, __ATOMIC_RELAXED);
    gr_team_barrier(team, serial, arg);
}

enum { HIDDEN = 64, HEADS = 4, KV_HEADS = 2, DIM = 32, FFN = 80, VOCAB = 48, LAYERS = 2,
       CONTEXT = 160, CHUNK = 96, WINDOW = 8, BAD_ID = VOCAB - 1, ROOM = 1 << 20 };

static int failures;
static uint32_t seed;

static void expect(bool good, const char *what)
{
    if (!good) {
        fprintf(stderr, "test_model: %s\n", what);
        failures++;
    }
}

static float draw(float most)
{
    seed = seed * 1664525u + 1013904223u;
    return ((float)(seed >> 8) * 0x1p-23f - 1.0f) * most;
}

/* ---- a model in memory ---- */

typedef struct model {
    gr_engine e;
    gr_kernels kern;
    gb_layer layers[LAYERS];
    gb_tensor tensors[32];
    gb_segment segments[32];
    gb_plan plans[16];
    gb_rope rope;
    uint32_t format; /* of the layers' matrices; the table is f32 */
    uint64_t used;
    _Alignas(64) uint8_t image[ROOM];
} model;

/* A matrix of 16-row panels, or a vector of ones and a bit where rows is 0. */
static uint32_t add(model *m, uint32_t role, int32_t layer, uint32_t rows, uint32_t cols,
                    uint32_t format)
{
    uint32_t at = m->e.v.tensor_count++;
    m->segments[at] = (gb_segment){rows ? format : GB_FMT_VECTOR, 0, (cols + 31) / 32, 0};
    gb_tensor *t = &m->tensors[at];
    *t = (gb_tensor){.role = role, .layer = layer, .seg_first = at, .seg_count = 1,
                     .rows = rows ? rows : 1, .cols = cols, .rows_padded = (rows + 15) / 16 * 16,
                     .cols_padded = (cols + 31) / 32 * 32, .offset = m->used,
                     .parts = role == GB_ROLE_GATE_UP ? 2 : 1};
    if (role == GB_ROLE_Q || role == GB_ROLE_K || role == GB_ROLE_V)
        t->slab_count = rows / DIM;
    t->size = gr_tensor_size(t, m->segments);
    float *f = (float *)(void *)(m->image + m->used);
    for (uint64_t i = 0; i < t->size / 4; i++)
        f[i] = rows ? draw(0.2f) : 1.0f + draw(0.1f);
    uint64_t panel = gr_panel_size(t, m->segments);
    for (uint64_t p = 0; rows && format == GB_FMT_Q4H && p < t->size; p += panel) {
        for (uint64_t i = 64; i < panel; i++)
            m->image[m->used + p + i] = (uint8_t)(128.0f + draw(127.0f));
        for (uint32_t r = 0; r < 16; r++)
            f[p / 4 + r] = 1e-5f;
    }
    m->used = gr_round_up(m->used + t->size, GB_ALIGN);
    return at;
}

static void add_layer(model *m, int32_t i, uint32_t kv_type)
{
    gb_layer *l = &m->layers[i];
    *l = (gb_layer){.heads = HEADS, .kv_heads = KV_HEADS, .head_dim = DIM, .ffn = FFN,
                    .window = i == 0 ? WINDOW : 0, .score_scale = 0.2f, .kv_group = DIM,
                    .act = i == 0 ? GB_ACT_SILU : GB_ACT_GELU_TANH,
                    .tens_first = m->e.v.tensor_count};
    add(m, GB_ROLE_ATTN_NORM, i, 0, HIDDEN, 0);
    add(m, GB_ROLE_Q, i, HEADS * DIM, HIDDEN, m->format);
    add(m, GB_ROLE_K, i, KV_HEADS * DIM, HIDDEN, m->format);
    add(m, GB_ROLE_V, i, KV_HEADS * DIM, HIDDEN, m->format);
    add(m, GB_ROLE_O, i, HIDDEN, HEADS * DIM, m->format);
    add(m, GB_ROLE_FFN_NORM, i, 0, HIDDEN, 0);
    add(m, GB_ROLE_GATE_UP, i, FFN, HIDDEN, m->format);
    add(m, GB_ROLE_DOWN, i, HIDDEN, FFN, m->format);
    l->tens_count = m->e.v.tensor_count - l->tens_first;
    l->kv_blocks = gr_kv_layer_blocks(CONTEXT, l->window);
    l->kv_offset = i ? m->layers[i - 1].kv_offset + m->layers[i - 1].kv_size : 0;
    m->e.v.conf.kv_type = kv_type;
    l->kv_size = gr_kv_layer_size(&m->e.v, l);
}

static void add_rope(model *m)
{
    m->rope = (gb_rope){DIM / 2, CONTEXT, m->used};
    float *f = (float *)(void *)(m->image + m->used);
    for (uint32_t i = 0; i < CONTEXT * DIM; i++)
        f[i] = draw(1.0f); /* not rotations: any numbers will do */
    m->e.v.ropes = &m->rope;
    m->e.v.rope_base = m->image;
}

static void plan(model *m) /* one buffer after the other */
{
    uint64_t at = 0;
    for (uint32_t kind = GB_BUF_X; kind <= GB_BUF_HIDDEN; kind++) {
        uint64_t size = gr_buffer_size(&m->e.v, kind);
        m->plans[kind - 1] = (gb_plan){.kind = kind, .offset = at, .size = size};
        at += gr_round_up(size, GB_LINE);
    }
    m->e.v.plans = m->plans;
    m->e.v.plan_count = GB_BUF_HIDDEN;
    m->e.arena = aligned_alloc(64, gr_round_up(at, 64));
    uint64_t kv = m->layers[LAYERS - 1].kv_offset + m->layers[LAYERS - 1].kv_size;
    m->e.kv = aligned_alloc(64, gr_round_up(kv, 64));
    memset(m->e.arena, 0xFF, at); /* nothing may be read before it is written */
    memset(m->e.kv, 0xFF, kv);
}

static model *make(uint32_t format, uint32_t kv_type, uint32_t threads, const char *kernel)
{
    model *m = calloc(1, sizeof *m);
    gr_error error;
    seed = 3;
    m->format = format;
    gr_view *v = &m->e.v;
    v->conf = (gb_conf){.layer_count = LAYERS, .hidden = HIDDEN, .vocab_rows = VOCAB,
                        .rope_count = 1, .context = CONTEXT, .chunk = CHUNK, .threads = threads,
                        .kv_type = kv_type, .norm_eps = 1e-6f, .embed_scale = 1.0f};
    v->layers = m->layers, v->tensors = m->tensors, v->segments = m->segments;
    v->image = m->image, v->layer_count = LAYERS;
    v->conf.tens_embed = v->conf.tens_head = add(m, GB_ROLE_EMBED, -1, VOCAB, HIDDEN, GB_FMT_F32);
    float *table = (float *)(void *)(m->image + m->tensors[0].offset);
    for (int32_t i = 0; i < LAYERS; i++)
        add_layer(m, i, kv_type);
    v->conf.tens_final_norm = add(m, GB_ROLE_FINAL_NORM, -1, 0, HIDDEN, 0);
    add_rope(m);
    plan(m);
    /* A token whose embedding overflows a square; its own logit stays finite elsewhere. */
    table[(BAD_ID / 16 * HIDDEN + 5) * 16 + BAD_ID % 16] = 1e25f;
    expect(gr_kernels_pick(&m->kern, kernel), "kernel");
    m->e.kern = &m->kern;
    m->e.threads = m->e.decode_threads = threads;
    m->e.context = CONTEXT, m->e.chunk = CHUNK;
    m->e.team = aligned_alloc(64, gr_round_up(gr_team_bytes(), 64));
    expect(gr_team_start(m->e.team, threads, 0, &error) == GEMRUN_OK, "team starts");
    for (uint32_t i = 0; i < v->plan_count; i++)
        m->e.buf[m->plans[i].kind] = m->e.arena + m->plans[i].offset;
    return m;
}

static void drop(model *m)
{
    gr_team_stop(m->e.team);
    free(m->e.team), free(m->e.arena), free(m->e.kv), free(m);
}

static void fill_ids(uint32_t *ids, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        ids[i] = (i * 7 + i / 5) % (VOCAB - 1);
}

/* ---- tests ---- */

enum { LENGTH = 150 };
typedef float rows[LENGTH][VOCAB];

typedef struct sink {
    rows *to;
    uint32_t calls, stop_after;
} sink;

static int keep(void *user, uint32_t position, const float *logits, uint32_t count)
{
    sink *s = user;
    memcpy((*s->to)[position], logits, count * sizeof *logits);
    return ++s->calls == s->stop_after;
}

static void forward_all(model *m, uint32_t chunk, rows *to)
{
    uint32_t ids[LENGTH];
    sink s = {.to = to};
    fill_ids(ids, LENGTH);
    gr_kv_reset(&m->e);
    for (uint32_t i = 0, n; i < LENGTH; i += n) {
        n = gr_least(chunk, LENGTH - i);
        expect(gr_forward(&m->e, ids + i, n, 2, keep, &s) == GEMRUN_OK, "forward");
    }
    expect(s.calls == LENGTH && m->e.pos == LENGTH && m->e.logits_valid, "every position once");
    expect(memcmp(m->e.buf[GB_BUF_IDS], ids, sizeof ids) == 0, "the ids are kept");
}

static void test_invariance(uint32_t format, uint32_t kv_type)
{
    static rows want, got;
    static const struct {
        uint32_t threads, chunk;
        const char *kernel;
        bool balance;
    } ways[] = {{1, 1, NULL, false}, {1, 50, NULL, true}, {1, CHUNK, "scalar", false},
                {2, 33, NULL, false}, {3, 96, NULL, true}, {8, 7, NULL, false}, {8, 1, NULL, true}};
    model *m = make(format, kv_type, 1, NULL);
    forward_all(m, CHUNK, &want);
    forward_all(m, CHUNK, &got); /* a used cache does not show */
    expect(memcmp(want, got, sizeof want) == 0, "reuse after reset");
    drop(m);
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        memset(got, 0, sizeof got);
        m = make(format, kv_type, ways[i].threads, ways[i].kernel);
        m->e.balance = ways[i].balance;
        m->e.decode_threads = ways[i].threads / 2 + 1;
        forward_all(m, ways[i].chunk, &got);
        expect(memcmp(want, got, sizeof want) == 0, "another way, the same logits");
        drop(m);
    }
}

static void test_barriers(void)
{
    uint32_t ids[CHUNK];
    fill_ids(ids, CHUNK);
    model *m = make(GB_FMT_Q4H, GB_KV_INT8, 1, NULL);
    barriers = 0;
    (void)gr_forward(&m->e, ids, CHUNK, 0, NULL, NULL);
    expect(barriers == 7 * LAYERS + 2, "many tokens: two barriers a layer and one more for norms");
    gr_kv_reset(&m->e);
    barriers = 0;
    (void)gr_forward(&m->e, ids, MANY - 1, 0, NULL, NULL);
    expect(barriers == 5 * LAYERS + 1, "five barriers a layer and one after the embedding");
    barriers = 0;
    (void)gr_forward(&m->e, ids, 1, 1, NULL, NULL);
    expect(barriers == 5 * LAYERS + 2, "and one before the head");
    drop(m);
}

static void test_wanted_logits(void)
{
    static rows want;
    uint32_t ids[LENGTH];
    fill_ids(ids, LENGTH);
    model *m = make(GB_FMT_Q4H, GB_KV_INT8, 2, NULL);
    forward_all(m, 64, &want);
    gr_kv_reset(&m->e);
    expect(gr_forward(&m->e, ids, 70, 0, NULL, NULL) == GEMRUN_OK, "none wanted");
    expect(!m->e.logits_valid, "none there");
    expect(gr_forward(&m->e, ids + 70, 30, 1, NULL, NULL) == GEMRUN_OK, "the last one wanted");
    expect(m->e.logits_valid, "and there");
    expect(memcmp(m->e.buf[GB_BUF_LOGITS], want[99], sizeof want[99]) == 0, "the last logits");
    sink s = {.to = &want, .stop_after = 2};
    expect(gr_forward(&m->e, ids + 100, 9, 2, keep, &s) == GEMRUN_OK && s.calls == 2, "stopped");
    expect(m->e.pos == 109, "a stopped callback leaves the tokens in the cache");
    expect(gr_forward(&m->e, ids, CHUNK, 0, NULL, NULL) == GEMRUN_E_ARGUMENT, "beyond the context");
    expect(gr_forward(&m->e, ids, 0, 0, NULL, NULL) == GEMRUN_E_ARGUMENT, "no tokens");
    drop(m);
}

/* The bad token comes last in a chunk that pushes others out of the sliding window's ring. */
static void test_nonfinite(uint32_t format, uint32_t threads)
{
    static rows want, got;
    uint32_t ids[LENGTH], bad[CHUNK];
    fill_ids(ids, LENGTH);
    fill_ids(bad, CHUNK);
    bad[CHUNK - 1] = BAD_ID;
    model *m = make(format, GB_KV_INT8, threads, NULL);
    forward_all(m, CHUNK, &want);
    for (uint32_t n = 1; n <= CHUNK; n += CHUNK - 1) { /* alone, and at the end of a long chunk */
        gr_kv_reset(&m->e);
        sink s = {.to = &got};
        expect(gr_forward(&m->e, ids, 40, 0, NULL, NULL) == GEMRUN_OK, "before");
        gemrun_status status = gr_forward(&m->e, bad + CHUNK - n, n, 1, NULL, NULL);
        expect(status == GEMRUN_E_NONFINITE, "the bad token is refused");
        expect(m->e.pos == 40 && !m->e.logits_valid, "nothing was added");
        expect(m->e.err.code == GEMRUN_E_NONFINITE && m->e.err.wanted == 40, "and where it was");
        expect(gr_forward(&m->e, ids + 40, 60, 2, keep, &s) == GEMRUN_OK, "after");
        expect(memcmp(want[40], got[40], 60 * sizeof want[0]) == 0, "the cache is as it was");
    }
    drop(m);
}

typedef struct stages {
    uint32_t seen[GB_OP_DOWN + 1], cols[GB_OP_DOWN + 1];
} stages;

static void capture(void *user, uint32_t layer, uint32_t stage, const float *x, uint32_t n,
                    uint32_t cols)
{
    stages *s = user;
    expect(layer < LAYERS && n == 20 && x[(size_t)n * cols - 1] == x[(size_t)n * cols - 1], "rows");
    s->seen[stage]++;
    s->cols[stage] = cols;
}

static int go_on(void *user, uint32_t position, const float *logits, uint32_t n)
{
    (void)user, (void)position, (void)logits, (void)n;
    return 0;
}

/* Hidden states in and out: the layers alone, the same as with ids. */
static void test_hidden(void)
{
    uint32_t ids[20];
    float x[20][HIDDEN];
    stages s = {{0}, {0}};
    fill_ids(ids, 20);
    model *m = make(GB_FMT_F32, GB_KV_F32, 2, NULL);
    for (uint32_t t = 0; t < 20; t++)
        embed_row(&m->e.v, &m->tensors[0], ids[t], x[t]);
    m->e.capture = capture, m->e.capture_user = &s;
    expect(gr_forward_hidden(&m->e, x[0], 20) == GEMRUN_OK && m->e.pos == 20, "hidden");
    gr_kv_reset(&m->e);
    expect(gr_forward(&m->e, ids, 20, 2, go_on, NULL) == GEMRUN_OK, "ids");
    expect(memcmp(m->e.buf[GB_BUF_X], x, sizeof x) == 0, "hidden states are those of the ids");
    static const uint32_t op[] = {GB_OP_QKV, GB_OP_O, GB_OP_GATE_UP, GB_OP_DOWN};
    static const uint32_t cols[] = {HIDDEN, HEADS * DIM, HIDDEN, FFN};
    for (int i = 0; i < 4; i++)
        expect(s.seen[op[i]] == 2 * LAYERS && s.cols[op[i]] == cols[i], "a stage was captured");
    drop(m);
}

int main(void)
{
    static const uint32_t formats[] = {GB_FMT_Q4H, GB_FMT_F32};
    for (int i = 0; i < 2; i++) {
        for (uint32_t type = GB_KV_F32; type <= GB_KV_INT8; type++)
            test_invariance(formats[i], type);
        test_nonfinite(formats[i], 1);
        test_nonfinite(formats[i], 3);
    }
    test_barriers();
    test_wanted_logits();
    test_hidden();
    if (failures)
        fprintf(stderr, "test_model: %d failures\n", failures);
    return failures != 0;
}
