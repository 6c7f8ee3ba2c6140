/* test_batch.c: several sessions in one pass over the weights, on the golden artifacts: every kind
 * of cache, and rings that wrap. Beside every session runs a twin of its own, alone: both have the
 * same logits, bit for bit. Run it from the project's folder, under sanitizers, ThreadSanitizer too. */
#include <pthread.h>

#include "gemrun_batch.h"
#include "gemrun_session.h"
#include "gr_ctx.h"
#include "image.h"

enum { MOST = 6, STEPS = 60, LONG = 40, BAD_ID = 17 };

static const char *const models[] = {"f16", "q4raw", "int4", "kvmask", "value4", "key4"};

typedef struct pair { /* a session of the batch, and the one that runs alone */
    gemrun_context_t *shared, *alone;
} pair;

typedef struct dice {
    uint64_t state;
} dice;

static uint32_t throw_dice(dice *d, uint32_t below)
{
    d->state = d->state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(d->state >> 33) % below;
}

static gemrun_config config(uint32_t threads, uint32_t chunk)
{
    gemrun_config c = gemrun_config_default();
    c.threads = threads;
    c.prefill_batch_size = chunk;
    c.ignore_memory = 1;
    return c;
}

/* A copy of a golden artifact on a page; one row of the embedding is too large for a norm. */
static image read_image(const char *name)
{
    char path[96];
    image m = {.bytes = aligned_alloc(4096, IMAGE_MAX)};
    snprintf(path, sizeof path, "tests/golden/v1.0/tiny-%s.gembin", name);
    FILE *f = fopen(path, "rb");
    CHECK(f && m.bytes);
    m.size = fread(m.bytes, 1, IMAGE_MAX, f);
    fclose(f);
    return m;
}

static void spoil(image *m, gemrun_context_t *ctx)
{
    const gr_view *v = &ctx->e.v;
    const gb_tensor *t = &v->tensors[v->conf.tens_embed];
    uint64_t panel = gr_panel_size(t, v->segments) * (BAD_ID / GB_PANEL);
    float *super = (float *)(void *)(m->bytes + t->offset + panel);
    CHECK(v->segments[t->seg_first].format == GB_FMT_Q8_ROWS);
    super[BAD_ID % GB_PANEL] = 1e25f;
}

static gemrun_context_t *open_image(const image *m, uint32_t threads)
{
    gemrun_context_t *ctx = NULL;
    gemrun_config c = config(threads, 0);
    if (gemrun_open_mem(&ctx, m->bytes, (size_t)m->size, NULL, 0, &c) != GEMRUN_OK) {
        fprintf(stderr, "open: %s\n", gemrun_last_error());
        exit(1);
    }
    return ctx;
}

static gemrun_context_t *session_of(gemrun_context_t *model, uint32_t threads, uint32_t chunk)
{
    gemrun_context_t *ctx = NULL;
    gemrun_config c = config(threads, chunk);
    CHECK(gemrun_session_open(&ctx, model, &c) == GEMRUN_OK && ctx);
    return ctx;
}

static void open_pairs(pair *p, uint32_t count, gemrun_context_t *model, dice *d)
{
    for (uint32_t i = 0; i < count; i++) {
        p[i].shared = session_of(model, 1 + throw_dice(d, 3), 1 + throw_dice(d, CHUNK));
        p[i].alone = session_of(model, 1, 0);
    }
}

static void close_pairs(pair *p, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        gemrun_destroy(p[i].shared);
        gemrun_destroy(p[i].alone);
    }
}

static void same(const pair *p, bool logits)
{
    uint32_t n = 0, m = 0;
    CHECK(p->shared->e.pos == p->alone->e.pos);
    const float *a = gemrun_logits(p->shared, &n), *b = gemrun_logits(p->alone, &m);
    CHECK((a != NULL) == logits);
    if (logits) {
        CHECK(b && n == m && memcmp(a, b, n * sizeof *a) == 0);
        a = gemrun_embedding(p->shared, &n), b = gemrun_embedding(p->alone, &m);
        CHECK(a && b && n == m && memcmp(a, b, n * sizeof *a) == 0);
    }
}

/* ---- any of them, with any number of ids, in any order ---- */

typedef struct turn { /* of one session in a step */
    pair *of;
    int32_t ids[LONG];
    gemrun_batch_item item;
} turn;

static void take_turn(turn *t, pair *p, dice *d)
{
    uint32_t left = p->alone->e.context - p->alone->e.pos;
    uint32_t rows = p->alone->e.v.conf.vocab_rows;
    if (left == 0) {
        gemrun_reset_kv_cache(p->shared);
        gemrun_reset_kv_cache(p->alone);
        left = p->alone->e.context;
    }
    uint32_t n = throw_dice(d, 3) ? 1 : 1 + throw_dice(d, LONG);
    n = n < left ? n : left;
    for (uint32_t i = 0; i < n; i++) {
        t->ids[i] = (int32_t)throw_dice(d, rows);
        t->ids[i] += t->ids[i] == BAD_ID;
    }
    t->of = p;
    t->item = (gemrun_batch_item){.session = p->shared, .ids = t->ids, .count = n,
                                  .more = throw_dice(d, 4) == 0};
}

static uint32_t some_turns(turn *turns, pair *pairs, uint32_t count, dice *d)
{
    uint32_t n = 0, first = throw_dice(d, count);
    for (uint32_t i = 0; i < count; i++)
        if (throw_dice(d, 3) > 0)
            take_turn(&turns[n++], &pairs[(first + i) % count], d);
    return n;
}

static void check_turn(turn *t, const gemrun_batch_item *item)
{
    CHECK(item->status == GEMRUN_OK && item->appended == item->count);
    CHECK(gemrun_prefill(t->of->alone, t->ids, t->item.count) == (int32_t)t->of->alone->e.pos);
    same(t->of, t->item.more == 0);
}

static void run_steps(pair *pairs, uint32_t count, uint32_t steps, dice *d)
{
    turn turns[MOST];
    gemrun_batch_item items[MOST];
    for (uint32_t step = 0; step < steps; step++) {
        uint32_t n = some_turns(turns, pairs, count, d);
        for (uint32_t i = 0; i < n; i++)
            items[i] = turns[i].item;
        CHECK(gemrun_batch_append(items, n) == (n ? (int32_t)n : GEMRUN_E_ARGUMENT));
        for (uint32_t i = 0; i < n; i++)
            check_turn(&turns[i], &items[i]);
    }
}

static void test_any_turns(const char *name)
{
    dice d = {strlen(name)};
    image m = read_image(name);
    gemrun_context_t *model = open_image(&m, 2);
    pair pairs[MOST];
    for (uint32_t count = 1; count <= MOST; count++) {
        open_pairs(pairs, count, model, &d);
        run_steps(pairs, count, STEPS, &d);
        close_pairs(pairs, count);
    }
    gemrun_destroy(model);
    free(m.bytes);
}

/* ---- what keeps one out, and what fails, beside the others ---- */

static void test_refused(void)
{
    dice d = {3};
    image m = read_image("int4"), other = read_image("q4raw");
    gemrun_context_t *model = open_image(&m, 2), *strange = open_image(&other, 1);
    pair p[3];
    open_pairs(p, 3, model, &d);
    const int32_t ids[] = {1, 2, 3}, wrong[] = {1, 1 << 20}, *none = NULL;
    int32_t many[IMAGE_MAX / 4096];
    for (size_t i = 0; i < sizeof many / sizeof many[0]; i++)
        many[i] = (int32_t)(i % 7);
    uint32_t all = p[1].shared->e.context;
    CHECK(all < sizeof many / sizeof many[0]);
    gemrun_batch_item items[] = {
        {.session = p[0].shared, .ids = ids, .count = 3},
        {.session = p[1].shared, .ids = wrong, .count = 2},
        {.session = p[2].shared, .ids = none, .count = 2},
        {.session = p[0].shared, .ids = ids, .count = 1},
        {.session = NULL, .ids = ids, .count = 1},
        {.session = strange, .ids = ids, .count = 1},
    };
    const gemrun_status want[] = {GEMRUN_OK, GEMRUN_E_TOKEN, GEMRUN_E_ARGUMENT, GEMRUN_E_BUSY,
                                  GEMRUN_E_ARGUMENT, GEMRUN_E_ROOT};
    CHECK(gemrun_batch_append(items, 6) == 1);
    for (uint32_t i = 0; i < 6; i++)
        CHECK(items[i].status == want[i] && items[i].appended == (i ? 0u : 3u));
    CHECK(gemrun_prefill(p[0].alone, ids, 3) == 3);
    same(&p[0], true);
    CHECK(p[1].shared->e.pos == 0 && p[2].shared->e.pos == 0 && strange->e.pos == 0);
    items[0] = (gemrun_batch_item){.session = p[1].shared, .ids = many, .count = all + 1};
    items[1] = (gemrun_batch_item){.session = p[2].shared, .ids = many, .count = all};
    items[2] = (gemrun_batch_item){.session = p[0].shared, .ids = ids, .count = 1, .more = 2};
    CHECK(gemrun_batch_append(items, 3) == 1 && items[0].status == GEMRUN_E_FULL);
    CHECK(items[1].status == GEMRUN_OK && items[2].status == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_prefill(p[2].alone, many, all) == (int32_t)all);
    same(&p[2], true);
    items[0] = (gemrun_batch_item){.session = strange, .ids = ids, .count = 1};
    CHECK(gemrun_batch_append(items, 1) == 1 && strange->e.pos == 1);
    CHECK(gemrun_batch_append(NULL, 1) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_batch_append(items, 0) == GEMRUN_E_ARGUMENT && gemrun_batch_room(NULL) == 0);
    close_pairs(p, 3);
    gemrun_destroy(strange);
    gemrun_destroy(model);
    free(m.bytes);
    free(other.bytes);
}

/* A token that is not finite, at the end of a piece, behind rings that have gone round. */
static void test_not_finite(const char *name)
{
    dice d = {9};
    image m = read_image(name);
    gemrun_context_t *model = open_image(&m, 3);
    pair p[3];
    spoil(&m, model);
    open_pairs(p, 3, model, &d);
    for (uint32_t round = 0; round < 40; round++) {
        int32_t bad[] = {3, 5, BAD_ID}, one = (int32_t)(round % BAD_ID);
        run_steps(p, 3, 1, &d);
        uint32_t at = p[1].shared->e.pos, n = 1 + round % 3, before[3];
        if (at + n > p[1].shared->e.context)
            continue;
        for (uint32_t i = 0; i < 3; i++)
            before[i] = p[i].shared->e.pos;
        if (before[0] == p[0].shared->e.context || before[2] == p[2].shared->e.context)
            continue;
        gemrun_batch_item items[] = {
            {.session = p[0].shared, .ids = &one, .count = 1},
            {.session = p[1].shared, .ids = bad + 3 - n, .count = n},
            {.session = p[2].shared, .ids = &one, .count = 1},
        };
        CHECK(gemrun_batch_append(items, 3) == 2);
        CHECK(items[1].status == GEMRUN_E_NONFINITE && !p[1].shared->e.logits_valid);
        for (uint32_t i = 0; i < 3; i += 2) {
            CHECK(gemrun_prefill(p[i].alone, &one, 1) > 0);
            same(&p[i], true);
        }
        CHECK(p[1].shared->e.pos == (items[1].appended > 0 ? 0 : at));
        if (items[1].appended > 0) { /* what an earlier pass overwrote is gone */
            gemrun_reset_kv_cache(p[1].shared);
            gemrun_reset_kv_cache(p[1].alone);
        }
        CHECK(p[1].shared->e.pos == p[1].alone->e.pos);
    }
    close_pairs(p, 3);
    gemrun_destroy(model);
    free(m.bytes);
}

/* ---- two batches of one model at the same time ---- */

typedef struct batch {
    pair pairs[3];
    dice d;
} batch;

static void *run_batch(void *arg)
{
    batch *b = arg;
    run_steps(b->pairs, 3, STEPS, &b->d);
    return NULL;
}

static void test_two_batches(void)
{
    image m = read_image("kvmask");
    gemrun_context_t *model = open_image(&m, 1);
    batch batches[2] = {{.d = {21}}, {.d = {22}}};
    pthread_t threads[2];
    for (uint32_t i = 0; i < 2; i++) {
        open_pairs(batches[i].pairs, 3, model, &batches[i].d);
        CHECK(pthread_create(&threads[i], NULL, run_batch, &batches[i]) == 0);
    }
    for (uint32_t i = 0; i < 2; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
        close_pairs(batches[i].pairs, 3);
    }
    gemrun_destroy(model);
    free(m.bytes);
}

int main(void)
{
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++)
        test_any_turns(models[i]);
    test_refused();
    test_not_finite("int4");
    test_not_finite("kvmask");
    test_two_batches();
    printf("test_batch: ok\n");
    return 0;
}
