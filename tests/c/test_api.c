/* test_api.c: the public interface on a small artifact, and the port under it. Run it under
 * sanitizers, ThreadSanitizer too. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gr_hooks.h"
#include "gr_text.h"
#include "image.h"

static gemrun_context_t *open_image(const image *m, uint32_t threads)
{
    gemrun_context_t *ctx = NULL;
    gemrun_config c = gemrun_config_default();
    c.threads = threads;
    c.ignore_memory = 1;
    gemrun_status st = gemrun_open_mem(&ctx, m->bytes, m->size, NULL, 0, &c);
    if (st != GEMRUN_OK) {
        fprintf(stderr, "open: %s\n", gemrun_last_error());
        exit(1);
    }
    return ctx;
}

static gemrun_stats stats_of(gemrun_context_t *ctx)
{
    gemrun_stats s = {.size = sizeof s};
    CHECK(gemrun_get_stats(ctx, &s) == GEMRUN_OK);
    return s;
}

static bool said(const char *part)
{
    return strstr(gemrun_last_error(), part) != NULL;
}

/* ---- texts ---- */

static void test_texts(void)
{
    static const int codes[] = {-1,  -2,  -3,  -4,  -5,  -6,  -7,  -8,  -9,  -10, -11, -12,
                                -20, -21, -22, -23, -24, -25, -26, -27, -28, -29, -30, -31,
                                -32, -33, -34, -35, -36, -37, -38, -39, -40, -41, -42, -43,
                                -44, -45, -46, -47, -48, -49, -70, -71, -72, -80, -90};
    char out[400], little[8];
    for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++) {
        const char *text = gemrun_status_text((gemrun_status)codes[i]);
        CHECK(strchr(text, ';') != NULL && strstr(text, "unknown status") == NULL);
        gr_error e;
        gr_fail(&e, (gemrun_status)codes[i], GB_SEC_TENS, 1, 2);
        gr_explain(&e, "x", out, sizeof out);
        CHECK(strncmp(out, "x: ", 3) == 0 && strchr(out, ';') != NULL);
        gr_explain(&e, "a long name", little, sizeof little);
        CHECK(strlen(little) == sizeof little - 1);
    }
    CHECK(strstr(gemrun_status_text((gemrun_status)-1000), "unknown status"));
    gr_error e;
    gr_fail(&e, GEMRUN_E_MEMORY, 0, 18446744073709551615u, 0);
    gr_explain(&e, "m", out, sizeof out);
    CHECK(strstr(out, "(wanted 18446744073709551615 bytes, found 0 bytes); "));
    for (uint64_t i = 0; i < 6; i++) {
        e.plan[i] = i + 1;
    }
    e.threads = 2;
    gr_explain(&e, "m", out, sizeof out);
    CHECK(strstr(out, " found 0 bytes: weights 1, tables 2, arena 3, KV 4, engine 5, stacks 6, "
                      "total 21 with 2 threads); free some"));
    gr_fail(&e, GEMRUN_E_KERNEL, 0, 0, 0);
    gr_explain(&e, "m", out, sizeof out);
    CHECK(strstr(out, "(available: scalar"));
}

static const char *field_text(gemrun_status code, uint32_t field, uint64_t wanted, uint64_t found)
{
    static char out[200];
    gr_error e;
    gr_fail(&e, code, field, wanted, found);
    gr_explain(&e, "x", out, sizeof out);
    return out;
}

/* Every argument has a name and a range, and values of every kind are shown. */
static void test_field_texts(void)
{
    const float reals[] = {-1.0f, 0.125f, 1e30f, -1e30f, 1.05f, 200.0f, 1e-30f, 0};
    const char *const shown[] = {"-1", "0.125", "a huge number", "a huge negative number", "1.05",
                                 "200", "a tiny number", "0"};
    for (uint32_t i = GR_F_NONE + 1; i < GR_F_COUNT; i++) {
        const char *text = field_text(GEMRUN_E_ARGUMENT, i, 7, 9);
        CHECK(strncmp(text, "x: ", 3) == 0 && strstr(text, "; use ") && !strchr(text, '#'));
        CHECK(strstr(text, "null") == NULL && strchr(text, '(') == NULL);
    }
    for (uint32_t i = 0; i < sizeof reals / sizeof reals[0]; i++) {
        char wanted[80];
        uint32_t bits;
        memcpy(&bits, reals + i, sizeof bits);
        snprintf(wanted, sizeof wanted, "x: top_p: %s is out of range; use more than 0, up to 1",
                 shown[i]);
        CHECK(!strcmp(field_text(GEMRUN_E_SAMPLING, GR_F_TOP_P, 0, bits), wanted));
    }
    CHECK(strstr(field_text(GEMRUN_E_SAMPLING, GR_F_MIN_P, 0, 0x7fc00000u), "not a number"));
    CHECK(strstr(field_text(GEMRUN_E_TOKEN, GR_F_TOKEN, 99, (uint64_t)-5),
                 "token id: -5 is out of range; use 0 to 99"));
    CHECK(strstr(field_text(GEMRUN_E_THREADS, GR_F_AFFINITY, 3, 16), "0x10 is out of range; use "
                 "bits of 0x3"));
    CHECK(strstr(field_text(GEMRUN_E_ARGUMENT, GR_F_NONE, 0, 0), "an argument is null"));
}

/* ---- arguments ---- */

static void test_arguments(const image *m)
{
    gemrun_context_t *ctx = NULL;
    gemrun_config c = gemrun_config_default();
    CHECK(gemrun_init(NULL) == NULL && gemrun_init("/nowhere/x.gembin") == NULL);
    CHECK(said("/nowhere/x.gembin: cannot be opened (No such file or directory); check"));
    CHECK(gemrun_open(&ctx, "/", NULL) == GEMRUN_E_OPEN && !ctx);
    CHECK(gemrun_open(&ctx, "/dev/null", NULL) == GEMRUN_E_OPEN && !ctx);
    CHECK(gemrun_open_mem(NULL, m->bytes, m->size, NULL, 0, NULL) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_open_mem(&ctx, m->bytes + 64, m->size - 64, NULL, 0, NULL) ==
          GEMRUN_E_ARGUMENT);
    c.size--;
    CHECK(gemrun_open_mem(&ctx, m->bytes, m->size, NULL, 0, &c) == GEMRUN_E_ARGUMENT);
    c = gemrun_config_default();
    c.reserved[3] = 1;
    CHECK(gemrun_open_mem(&ctx, m->bytes, m->size, NULL, 0, &c) == GEMRUN_E_ARGUMENT);
    c = gemrun_config_default();
    c.threads = 9;
    CHECK(gemrun_open_mem(&ctx, m->bytes, m->size, NULL, 0, &c) == GEMRUN_E_THREADS);
    c = gemrun_config_default();
    c.kv_cache_size = CONTEXT + 1;
    CHECK(gemrun_open_mem(&ctx, m->bytes, m->size, NULL, 0, &c) == GEMRUN_E_CONTEXT);
    CHECK(said("kv_cache_size is above the compiled context (65 tokens, room for 64)"));
    c = gemrun_config_default();
    c.prefill_batch_size = 500;
    CHECK(gemrun_open_mem(&ctx, m->bytes, m->size, NULL, 0, &c) == GEMRUN_E_ARGUMENT);
    CHECK(said("image: prefill_batch_size: 500 is out of range; use 1 to "));
    c.prefill_batch_size = CHUNK + 1;
    CHECK(gemrun_open_mem(&ctx, m->bytes, m->size, NULL, 0, &c) == GEMRUN_E_ARGUMENT);
    c = gemrun_config_default();
    c.lock_memory = 2;
    CHECK(gemrun_open_mem(&ctx, m->bytes, m->size, NULL, 0, &c) == GEMRUN_E_ARGUMENT);
    CHECK(said("lock_memory: 2 is out of range; use 0 or 1"));
    c = gemrun_config_default();
    c.kernel = "abacus";
    CHECK(gemrun_open_mem(&ctx, m->bytes, m->size, NULL, 0, &c) == GEMRUN_E_KERNEL);
    c = gemrun_config_default();
    c.threads = 2;
    c.thread_affinity = 1;
    CHECK(gemrun_open_mem(&ctx, m->bytes, m->size, NULL, 0, &c) == GEMRUN_E_THREADS);
    CHECK(!ctx && gemrun_prefill(NULL, NULL, 0) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_logits(NULL, NULL) == NULL && gemrun_regions(NULL, NULL, 0) == 0);
    gemrun_cancel(NULL);
    gemrun_destroy(NULL);
    gemrun_reset_kv_cache(NULL);
}

/* Structs of older and newer headers; what lies behind the stated size is never read. */
static void test_struct_sizes(const image *m, gemrun_context_t *running)
{
    struct {
        gemrun_config c;
        uint64_t tail[2];
    } longer = {.c = gemrun_config_default()};
    gemrun_context_t *ctx = NULL;
    uint32_t *cut = malloc(8); /* 8 bytes: a sanitizer sees a read behind them */
    CHECK(cut != NULL);
    cut[0] = 0;
    cut[1] = CONTEXT + 1;
    const gemrun_config *little = (const gemrun_config *)(const void *)cut;
    CHECK(gemrun_open_mem(&ctx, m->bytes, m->size, NULL, 0, little) == GEMRUN_E_ARGUMENT);
    CHECK(said("size: 0 is out of range"));
    cut[0] = 8; /* short, but what it holds counts */
    CHECK(gemrun_open_mem(&ctx, m->bytes, m->size, NULL, 0, little) == GEMRUN_E_CONTEXT);
    CHECK(gemrun_open(&ctx, "/nowhere", little) == GEMRUN_E_OPEN);
    gemrun_request none = {.size = 0};
    int32_t out[4];
    cut[1] = 0;
    const gemrun_request *brief = (const gemrun_request *)(const void *)cut;
    CHECK(gemrun_generate(running, "x", brief, out) == GEMRUN_E_ARGUMENT && said("max_tokens: 0"));
    CHECK(gemrun_generate(running, "x", &none, out) == GEMRUN_E_ARGUMENT && said("size: 0"));
    free(cut);
    longer.c.size = sizeof longer;
    longer.c.threads = 1;
    longer.c.ignore_memory = 1;
    CHECK(gemrun_open_mem(&ctx, m->bytes, m->size, NULL, 0, &longer.c) == GEMRUN_OK);
    gemrun_destroy(ctx);
    longer.tail[1] = 1;
    CHECK(gemrun_open_mem(&ctx, m->bytes, m->size, NULL, 0, &longer.c) == GEMRUN_E_ARGUMENT);
    longer.c.size = 1u << 30; /* no struct is that large: not looked at */
    CHECK(gemrun_open_mem(&ctx, m->bytes, m->size, NULL, 0, &longer.c) == GEMRUN_E_ARGUMENT);
    gemrun_request q = gemrun_request_default(running);
    q.reserved[2] = 1;
    CHECK(gemrun_generate(running, "x", &q, out) == GEMRUN_E_ARGUMENT && said("reserved: 1"));
}

static void test_requests(gemrun_context_t *ctx)
{
    int32_t out[8];
    const uint32_t id = VOCAB;
    const float nan = 0.0f / (float)(VOCAB - 100), one = 1;
    const char *empty = "", *broken = "\xff", *fine = "x";
    gemrun_request good = gemrun_request_default(ctx), q = good;
#define REFUSED(field, value, code)                                       \
    q = good;                                                             \
    q.field = value;                                                      \
    CHECK(gemrun_generate(ctx, "hello", &q, out) == code)
    REFUSED(size, 4, GEMRUN_E_ARGUMENT);
    CHECK(said("size: 4 is out of range"));
    REFUSED(max_tokens, 0, GEMRUN_E_ARGUMENT);
    CHECK(said("max_tokens: 0 is out of range; use 1 to 2147483647"));
    REFUSED(temperature, -1, GEMRUN_E_SAMPLING);
    CHECK(said("temperature: -1 is out of range; use 0 to 100"));
    REFUSED(temperature, 101, GEMRUN_E_SAMPLING);
    REFUSED(temperature, nan, GEMRUN_E_SAMPLING);
    REFUSED(top_p, 0, GEMRUN_E_SAMPLING);
    REFUSED(top_p, nan, GEMRUN_E_SAMPLING);
    REFUSED(min_p, 1, GEMRUN_E_SAMPLING);
    REFUSED(repetition_penalty, 0, GEMRUN_E_SAMPLING);
    REFUSED(banned_count, 1, GEMRUN_E_ARGUMENT);
    REFUSED(banned = &id; q.banned_count, 1, GEMRUN_E_TOKEN);
    REFUSED(bias_ids = &id; q.bias_values = &one; q.bias_count, 1, GEMRUN_E_TOKEN);
    const uint32_t zero = 0;
    REFUSED(bias_ids = &zero; q.bias_values = &nan; q.bias_count, 1, GEMRUN_E_SAMPLING);
    REFUSED(stop_strings = &empty; q.stop_string_count, 1, GEMRUN_E_ARGUMENT);
    REFUSED(stop_strings = &broken; q.stop_string_count, 1, GEMRUN_E_ARGUMENT);
    REFUSED(stop_strings = &fine; q.stop_string_count, 9, GEMRUN_E_ARGUMENT);
#undef REFUSED
    CHECK(gemrun_generate(ctx, NULL, &good, out) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_generate(ctx, "", &good, out) == GEMRUN_E_PROMPT && said("prompt is empty; "));
    CHECK(!said("longer"));
    CHECK(gemrun_infer(ctx, "hello", NULL, 8) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_infer(ctx, "hello", out, -3) == GEMRUN_E_ARGUMENT && said("max_tokens: -3 is"));
    uint32_t all[VOCAB];
    for (uint32_t i = 0; i < VOCAB; i++) {
        all[i] = i;
    }
    good.banned = all;
    good.banned_count = VOCAB;
    CHECK(gemrun_generate(ctx, "hello", &good, out) == GEMRUN_E_SAMPLING && said("ban fewer"));
    CHECK(stats_of(ctx).kv_used == 0 && stats_of(ctx).finish == GEMRUN_FINISH_ERROR);
}

/* ---- running ---- */

typedef struct heard {
    gemrun_context_t *ctx;
    char text[512];
    size_t size;
    uint32_t calls, stop_at, cancel_at;
    int32_t nested;
} heard;

static int hear(void *user, int32_t token, const char *text, size_t size)
{
    heard *h = user;
    CHECK(text[size] == 0 && h->size + size < sizeof h->text && token >= -1);
    memcpy(h->text + h->size, text, size);
    h->size += size;
    h->text[h->size] = 0;
    h->calls++;
    if (h->calls == 1) {
        h->nested = gemrun_decode(h->ctx, 1);
    }
    if (h->calls == h->cancel_at) {
        gemrun_cancel(h->ctx);
    }
    return h->calls == h->stop_at;
}

static int32_t talk(gemrun_context_t *ctx, gemrun_request *q, heard *h, int32_t *out)
{
    memset(h, 0, offsetof(heard, stop_at));
    h->ctx = ctx;
    q->on_text = hear;
    q->user = h;
    return gemrun_generate(ctx, "hello", q, out);
}

static void test_generation(gemrun_context_t *ctx)
{
    int32_t first[CONTEXT], again[CONTEXT];
    heard h = {0};
    gemrun_request q = gemrun_request_default(ctx);
    q.temperature = 0;
    q.ignore_stop_ids = 1;
    q.max_tokens = 1000;
    int32_t n = talk(ctx, &q, &h, first);
    CHECK(n == CONTEXT - 5 + 1 && stats_of(ctx).finish == GEMRUN_FINISH_CONTEXT_FULL);
    CHECK(stats_of(ctx).kv_used == CONTEXT && h.nested == GEMRUN_E_BUSY);
    CHECK(h.calls >= (uint32_t)n && stats_of(ctx).ttft_ms > 0);
    q.max_tokens = 12;
    CHECK(talk(ctx, &q, &h, again) == 12 && memcmp(first, again, 12 * sizeof *again) == 0);
    CHECK(stats_of(ctx).finish == GEMRUN_FINISH_MAX_TOKENS);
    h.cancel_at = 3;
    CHECK(talk(ctx, &q, &h, again) == 3);
    CHECK(stats_of(ctx).finish == GEMRUN_FINISH_CANCELLED);
    h = (heard){.stop_at = 4};
    CHECK(talk(ctx, &q, &h, again) == 4);
    CHECK(stats_of(ctx).finish == GEMRUN_FINISH_CALLBACK);
    h = (heard){0};
    q.deadline_ns = 1;
    CHECK(talk(ctx, &q, &h, again) == 0);
    CHECK(stats_of(ctx).finish == GEMRUN_FINISH_DEADLINE && h.calls == 0);
    q.deadline_ns = 0;
    q.temperature = 5;
    q.seed_set = 1;
    q.seed = 7;
    CHECK(talk(ctx, &q, &h, first) == 12 && talk(ctx, &q, &h, again) == 12);
    CHECK(memcmp(first, again, 12 * sizeof *again) == 0);
    q.seed = 8;
    CHECK(talk(ctx, &q, &h, again) == 12 && memcmp(first, again, 12 * sizeof *again) != 0);
}

typedef struct steps { /* what the step callback is told, and what it does */
    uint32_t calls, stop_at, threads;
} steps;

static int on_step(void *user, uint32_t *threads)
{
    steps *s = user;
    *threads = s->threads;
    return ++s->calls == s->stop_at;
}

/* Once a chunk and once a token that is fed back; a run may go on with fewer threads. */
static void test_steps(gemrun_context_t *ctx)
{
    int32_t first[CONTEXT], again[CONTEXT];
    steps s = {0};
    gemrun_info info = {.size = sizeof info};
    CHECK(gemrun_get_info(ctx, &info) == GEMRUN_OK);
    gemrun_request q = gemrun_request_default(ctx);
    q.ignore_stop_ids = 1;
    q.max_tokens = 12;
    CHECK(gemrun_generate(ctx, "hello", &q, first) == 12);
    uint32_t prompt = stats_of(ctx).prompt_tokens, chunks = (prompt - 1) / info.chunk + 1;
    q.on_step = on_step;
    q.user = &s;
    for (s.threads = 0; s.threads < 10; s.threads++) {
        s.calls = 0;
        CHECK(gemrun_generate(ctx, "hello", &q, again) == 12);
        CHECK(s.calls == chunks + 11 && memcmp(first, again, 12 * sizeof *again) == 0);
    }
    for (s.stop_at = 1; s.stop_at < 6; s.stop_at++) {
        s.calls = 0;
        int32_t made = s.stop_at <= chunks ? 0 : (int32_t)(s.stop_at - chunks);
        CHECK(gemrun_generate(ctx, "hello", &q, again) == made);
        CHECK(stats_of(ctx).finish == GEMRUN_FINISH_CALLBACK);
    }
}

/* Force "abcabcab" by a bias on one letter each step: a stop string over several tokens. */
static void test_stop_strings(gemrun_context_t *ctx)
{
    int32_t out[64];
    heard h = {0};
    const uint32_t letters[] = {'a' - 32};
    const float push[] = {1e6f};
    gemrun_request q = gemrun_request_default(ctx);
    q.bias_ids = letters;
    q.bias_values = push;
    q.bias_count = 1;
    q.max_tokens = 6;
    CHECK(talk(ctx, &q, &h, out) == 6 && strcmp(h.text, "aaaaaa") == 0);
    const char *stops[] = {"aaaaaaaaa", "aaaa"};
    q.stop_strings = stops;
    q.stop_string_count = 2;
    CHECK(talk(ctx, &q, &h, out) == 4 && h.size == 0); /* one is a beginning of the other */
    CHECK(stats_of(ctx).finish == GEMRUN_FINISH_STOP_STRING);
    stops[1] = "aab";
    CHECK(talk(ctx, &q, &h, out) == 6 && strcmp(h.text, "aaaaaa") == 0); /* held, then given */
    CHECK(stats_of(ctx).finish == GEMRUN_FINISH_MAX_TOKENS && h.calls == 7);
    stops[1] = "aaab"; /* "aaa" is held; who has enough does not get it at the end */
    h.stop_at = 1;
    CHECK(talk(ctx, &q, &h, out) == 1 && h.calls == 1 && h.size == 0);
    CHECK(stats_of(ctx).finish == GEMRUN_FINISH_CALLBACK);
    h.stop_at = 0;
    const uint32_t stop_id[] = {STOP_ID};
    q.bias_ids = stop_id;
    CHECK(talk(ctx, &q, &h, out) == 0 && stats_of(ctx).finish == GEMRUN_FINISH_STOP_ID);
    q.ignore_stop_ids = 1;
    CHECK(talk(ctx, &q, &h, out) == 6 && h.size == 0 && out[5] == STOP_ID);
    const uint32_t lead[] = {95}; /* the byte e2, which nothing completes */
    q.bias_ids = lead;
    q.stop_string_count = 0;
    CHECK(talk(ctx, &q, &h, out) == 6 && h.size == 18); /* six times U+FFFD, none lost */
}

static void test_tokens(gemrun_context_t *ctx)
{
    int32_t ids[CONTEXT + 1];
    char text[64], longer[3 * CONTEXT + 1];
    uint32_t count = 1;
    gemrun_reset_kv_cache(ctx);
    gemrun_request q = gemrun_request_default(ctx);
    CHECK(gemrun_logits(ctx, &count) == NULL && count == 0);
    CHECK(gemrun_sample(ctx, &q) == GEMRUN_E_STATE);
    CHECK(gemrun_tokenize(ctx, "hello", 5, 3, ids, CONTEXT) == 5 && ids[0] == 'h' - 32);
    CHECK(gemrun_tokenize(ctx, "hello", 5, 0, ids, 4) == GEMRUN_E_ARGUMENT);
    CHECK(said("capacity: 4 is out of range; use at least 5"));
    CHECK(gemrun_tokenize(ctx, "hello", 5, 4, ids, 5) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_detokenize(ctx, ids, 5, 0, text, sizeof text) == 5 && !strcmp(text, "hello"));
    CHECK(gemrun_detokenize(ctx, ids, 5, 0, text, 3) == 5 && !strcmp(text, "he"));
    CHECK(gemrun_detokenize(ctx, ids, 5, 0, NULL, 0) == 5);
    const int32_t check[] = {95, 96, 97, 97, 98};
    CHECK(gemrun_detokenize(ctx, check, 5, 0, text, sizeof text) == 9);
    CHECK(!strcmp(text, "\xe2\x9c\x85\xef\xbf\xbd\xef\xbf\xbd"));
    CHECK(gemrun_detokenize(ctx, check, 5, 1, text, sizeof text) == 5);
    CHECK(gemrun_prefill(ctx, ids, 5) == 5 && gemrun_logits(ctx, &count) && count == VOCAB);
    CHECK(gemrun_embedding(ctx, &count) && count == HIDDEN);
    const int32_t bad[] = {1, VOCAB}, negative[] = {-1};
    CHECK(gemrun_prefill(ctx, bad, 2) == GEMRUN_E_TOKEN && gemrun_decode(ctx, -1) ==
          GEMRUN_E_TOKEN && gemrun_prefill(ctx, negative, 1) == GEMRUN_E_TOKEN);
    CHECK(stats_of(ctx).kv_used == 5);
    for (int i = 0; i <= CONTEXT; i++) {
        ids[i] = i % 90;
    }
    CHECK(gemrun_prefill(ctx, ids, CONTEXT - 4) == GEMRUN_E_FULL && stats_of(ctx).kv_used == 5);
    CHECK(gemrun_prefill(ctx, ids, CONTEXT - 5) == CONTEXT);
    CHECK(gemrun_decode(ctx, 1) == GEMRUN_E_FULL);
    memset(longer, 'x', sizeof longer);
    longer[CONTEXT] = 0;
    CHECK(gemrun_infer(ctx, longer, ids, 4) == 1); /* exactly the context: one token fits */
    CHECK(stats_of(ctx).finish == GEMRUN_FINISH_CONTEXT_FULL);
    longer[CONTEXT] = 'x';
    longer[CONTEXT + 1] = 0;
    CHECK(gemrun_infer(ctx, longer, ids, 4) == GEMRUN_E_PROMPT && said("65 tokens, room for 64"));
    longer[CONTEXT + 1] = 'x';
    longer[3 * CONTEXT] = 0;
    CHECK(gemrun_infer(ctx, longer, ids, 4) == GEMRUN_E_PROMPT && said("192 tokens, room for 64"));
    char *huge = calloc(1, 16 * CONTEXT + 4098);
    memset(huge, 'x', 16 * CONTEXT + 4097);
    CHECK(gemrun_infer(ctx, huge, ids, 4) == GEMRUN_E_TEXT);
    CHECK(said("wanted 5120 bytes, found 5121"));
    free(huge);
}

/* The default is the compiled context; a lower one is named where it is what is too small. */
static void test_lower_context(const image *m)
{
    gemrun_config c = gemrun_config_default();
    gemrun_context_t *ctx = open_image(m, 1);
    int32_t ids[CONTEXT] = {0};
    char text[2 * CONTEXT] = {0};
    CHECK(stats_of(ctx).kv_size == CONTEXT);
    gemrun_destroy(ctx);
    c.kv_cache_size = 8;
    c.threads = 1;
    c.ignore_memory = 1;
    CHECK(gemrun_open_mem(&ctx, m->bytes, m->size, NULL, 0, &c) == GEMRUN_OK);
    memset(text, 'x', 9);
    CHECK(gemrun_infer(ctx, text, ids, 4) == GEMRUN_E_PROMPT && said("9 tokens, room for 8"));
    CHECK(said("raise --kv-cache-size (kv_cache_size) from 8 to at most the compiled 64"));
    CHECK(gemrun_prefill(ctx, ids, 9) == GEMRUN_E_FULL && said(" from 8 to at most the compiled"));
    CHECK(gemrun_run_tests(ctx) == GEMRUN_E_FULL && said(" from 8 to at most the compiled"));
    CHECK(gemrun_prefill(ctx, ids, CONTEXT + 1) == GEMRUN_E_FULL && said("or compile with a"));
    memset(text, 'x', CONTEXT + 1);
    CHECK(gemrun_infer(ctx, text, ids, 4) == GEMRUN_E_PROMPT && said("or compile with a larger"));
    gemrun_destroy(ctx);
}

static void test_chat(gemrun_context_t *ctx)
{
    int32_t ids[8];
    gemrun_request q = gemrun_request_default(ctx);
    q.max_tokens = 2;
    gemrun_message m[] = {{GEMRUN_SYSTEM, "sys"}, {GEMRUN_USER, "hi"}, {GEMRUN_ASSISTANT, "yo"},
                          {GEMRUN_USER, "again"}};
    CHECK(gemrun_chat(ctx, m, 4, &q, ids) >= 0 && stats_of(ctx).prompt_tokens == 12 + 5);
    CHECK(gemrun_chat(ctx, m + 2, 2, &q, ids) == GEMRUN_E_NO_CHAT); /* begins with an answer */
    CHECK(gemrun_chat(ctx, m, 0, &q, ids) == GEMRUN_E_ARGUMENT);
    m[1].text = NULL;
    CHECK(gemrun_chat(ctx, m, 4, &q, ids) == GEMRUN_E_ARGUMENT);
    m[1].text = "0123456789012345678901234567890123456789012345678901234567890123456789";
    CHECK(gemrun_chat(ctx, m, 4, &q, ids) == GEMRUN_E_PROMPT && said("85 tokens, room for 64"));
}

/* Somebody changes the file under a running engine: a refusal, and nothing is read or written
 * beyond a table. */
static void test_changed_image(const image *m)
{
    gemrun_context_t *ctx = open_image(m, 1);
    int32_t ids[8];
    gemrun_request q = gemrun_request_default(ctx);
    q.max_tokens = 2;
    q.repetition_penalty = 1.1f;
    const gemrun_message user = {GEMRUN_USER, "hi"};
    struct gb_item *items = (struct gb_item *)(void *)((uint8_t *)image_data(m, GB_SEC_TMPL) +
                                                       sizeof(struct gb_tmpl));
    CHECK(gemrun_chat(ctx, &user, 1, &q, ids) >= 0);
    const uint32_t wrong[] = {VOCAB, 0x7fffffff, 0xfffffffe};
    uint32_t refused = 0;
    for (uint32_t i = 0; i < 6; i++) {
        uint32_t kept = items[i].token;
        for (uint32_t k = 0; k < 3; k++) {
            items[i].token = wrong[k];
            int32_t n = gemrun_chat(ctx, &user, 1, &q, ids);
            CHECK(n >= 0 || (n == GEMRUN_E_TOKEN && said("token id: ")));
            refused += n < 0;
        }
        items[i].token = kept;
    }
    CHECK(refused >= 3 && gemrun_chat(ctx, &user, 1, &q, ids) >= 0);
    gemrun_reset_kv_cache(ctx);
    const int32_t good[] = {1, 2, 3};
    CHECK(gemrun_prefill(ctx, good, 3) == 3);
    gr_engine *e = (gr_engine *)(void *)ctx;
    ((uint32_t *)(void *)e->buf[GB_BUF_IDS])[1] = 0x40000000; /* the sampler's own lock */
    CHECK(gemrun_sample(ctx, &q) >= 0);
    gemrun_destroy(ctx);
}

/* ---- answers do not depend on how ---- */

static int count_logits(void *user, uint32_t position, const float *logits, uint32_t count)
{
    uint64_t *hash = user;
    CHECK(count == VOCAB);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, logits + i, sizeof bits);
        *hash = (*hash ^ bits ^ position) * 1099511628211u;
    }
    return position == 40;
}

static void test_digests(image *m)
{
    gb_test *t = image_data(m, GB_SEC_TEST);
    uint64_t wanted = 0, hash = 0, first = 0;
    uint32_t steps[4];
    for (uint32_t threads = 1; threads <= 8; threads++) {
        gemrun_context_t *ctx = open_image(m, threads);
        CHECK(gemrun_internal_digest(ctx, t->prompt, 20, steps, 4, &hash) == 0);
        wanted = threads == 1 ? hash : wanted;
        CHECK(hash == wanted);
        int32_t ids[CONTEXT];
        for (int i = 0; i < CONTEXT; i++) {
            ids[i] = i * 3 % VOCAB;
        }
        uint64_t all = 1;
        CHECK(gemrun_eval(ctx, ids, CONTEXT, count_logits, &all) == 48); /* ends with its chunk */
        first = threads == 1 ? all : first;
        CHECK(all == first);
        gemrun_destroy(ctx);
    }
    memcpy(t->steps, steps, sizeof steps);
    image_reseal(m);
    gemrun_context_t *ctx = open_image(m, 2);
    CHECK(gemrun_run_tests(ctx) == GEMRUN_E_TEST_FAILED); /* the digest there is still 0 */
    gemrun_destroy(ctx);
    t->digest = wanted;
    image_reseal(m);
    ctx = open_image(m, 2);
    CHECK(gemrun_run_tests(ctx) == 1 && stats_of(ctx).kv_used == 0);
    gemrun_destroy(ctx);
}

static void test_own_memory(const image *m)
{
    gemrun_config c = gemrun_config_default();
    gemrun_context_t *ctx = NULL;
    c.threads = 1;
    int64_t need = gemrun_memory_needed(m->bytes, m->size, &c);
    CHECK(need > 0 && need % 4096 == 0);
    uint8_t *memory = aligned_alloc(4096, (size_t)need);
    memset(memory, 0xa5, (size_t)need);
    CHECK(gemrun_open_mem(&ctx, m->bytes, m->size, memory, (size_t)need - 4096, &c) ==
          GEMRUN_E_ARGUMENT);
    CHECK(gemrun_open_mem(&ctx, m->bytes, m->size, memory, (size_t)need, &c) == GEMRUN_OK);
    CHECK(gemrun_run_tests(ctx) == 1);
    gemrun_region r[8];
    CHECK(gemrun_regions(ctx, r, 8) == 3); /* arena, kv, engine: all in the block */
    for (int i = 0; i < 3; i++) {
        CHECK((const uint8_t *)r[i].address >= memory &&
              (const uint8_t *)r[i].address + r[i].bytes <= memory + need);
    }
    gemrun_destroy(ctx);
    free(memory);
    CHECK(gemrun_memory_needed(m->bytes, 100, NULL) == GEMRUN_E_SIZE);
}

static void test_totals(const image *m)
{
    const gb_header *h = (const gb_header *)(const void *)m->bytes;
    gemrun_context_t *ctx = open_image(m, 2);
    gemrun_stats s = stats_of(ctx);
    gemrun_region r[8];
    uint64_t sum = 0;
    uint32_t n = gemrun_regions(ctx, r, 8);
    CHECK(n == 4 && gemrun_regions(ctx, NULL, 0) == 4);
    for (uint32_t i = 0; i < n; i++) {
        sum += r[i].bytes;
    }
    CHECK(s.ram_total == h->ram_total && s.declared_total == h->ram_total);
#if !defined(__SANITIZE_THREAD__) /* it needs larger stacks */
    CHECK(sum == h->ram_total - h->ram_weights - h->ram_tables); /* the image is the caller's */
#endif
    gemrun_info f = {.size = sizeof f};
    CHECK(gemrun_get_info(ctx, &f) == GEMRUN_OK && f.vocab_rows == VOCAB && f.has_chat == 1);
    CHECK(f.stop_id_count == 1 && f.stop_ids[0] == STOP_ID && f.bos_id == -1);
    CHECK(!strcmp(f.name, "tiny") && !strcmp(f.target, "generic-x86-64"));
    gemrun_destroy(ctx);
}

/* ---- what must not go on ---- */

static void test_nonfinite(const image *m)
{
    const gb_conf *c = image_data(m, GB_SEC_CONF);
    const gb_tensor *t = image_data(m, GB_SEC_TENS);
    gemrun_context_t *ctx = open_image(m, 2);
    int32_t out[8];
    float *norm = (float *)(void *)(m->bytes + t[c->tens_final_norm].offset);
    gemrun_request q = gemrun_request_default(ctx);
    q.max_tokens = 4;
    const uint32_t bits[] = {0x7fc00000u, 0x7f800000u, 0xff800000u};
    for (int i = 0; i < 3; i++) {
        float kept = norm[5];
        memcpy(norm + 5, bits + i, 4);
        CHECK(gemrun_generate(ctx, "hello", &q, out) == GEMRUN_E_NONFINITE);
        gemrun_stats s = stats_of(ctx);
        CHECK(s.finish == GEMRUN_FINISH_ERROR && s.kv_used == 0);
        CHECK(s.nonfinite_errors == (uint64_t)i + 1 && gemrun_logits(ctx, NULL) == NULL);
        norm[5] = kept;
        CHECK(gemrun_generate(ctx, "hello", &q, out) >= 0);
    }
    gemrun_destroy(ctx);
}

/* Logits that are not finite reach the sampler only by accident: it must notice by itself. */
static void test_sampler(const image *m)
{
    gemrun_context_t *ctx = open_image(m, 1);
    gr_engine *e = (gr_engine *)(void *)ctx; /* the first member */
    const int32_t ids[] = {1, 2, 3};
    const uint32_t bits[] = {0x7fc00000u, 0x7f800000u, 0xff800000u};
    gemrun_request q = gemrun_request_default(ctx);
    for (int i = 0; i < 3; i++) {
        for (uint32_t at = 0; at < VOCAB; at += VOCAB - 1) {
            gemrun_reset_kv_cache(ctx);
            CHECK(gemrun_prefill(ctx, ids, 3) == 3);
            memcpy(e->buf[GB_BUF_LOGITS] + 4 * (size_t)at, bits + i, 4);
            CHECK(gemrun_sample(ctx, &q) == GEMRUN_E_NONFINITE);
        }
    }
    /* sums and quotients that leave the range: the settings' fault, not the weights' */
    gemrun_reset_kv_cache(ctx);
    CHECK(gemrun_prefill(ctx, ids, 3) == 3);
    const uint32_t twice[] = {4, 4};
    const float huge[] = {3e38f, 3e38f};
    q.bias_ids = twice;
    q.bias_values = huge;
    q.bias_count = 2;
    CHECK(gemrun_sample(ctx, &q) == GEMRUN_E_SAMPLING && said("bias_values: number 0 is not"));
    q.bias_count = 0;
    gemrun_reset_kv_cache(ctx);
    CHECK(gemrun_prefill(ctx, ids, 3) == 3);
    ((float *)(void *)e->buf[GB_BUF_LOGITS])[2] = 9.0f;
    q.repetition_penalty = 2e-38f;
    CHECK(gemrun_sample(ctx, &q) == GEMRUN_E_SAMPLING);
    CHECK(said("repetition_penalty: a tiny number is out of range") && !said("weights"));
    CHECK(stats_of(ctx).nonfinite_errors == 6);
    q.repetition_penalty = 1;
    gemrun_reset_kv_cache(ctx);
    CHECK(gemrun_prefill(ctx, ids, 3) == 3);
    float *logits = (float *)(void *)e->buf[GB_BUF_LOGITS];
    for (int i = 0; i < VOCAB; i++) {
        logits[i] = i == 20 || i == 30 ? 2.0f : 1.0f;
    }
    q.temperature = 0;
    CHECK(gemrun_sample(ctx, &q) == 20); /* ties go to the lowest id */
    q.temperature = 1;
    q.top_k = 1;
    CHECK(gemrun_sample(ctx, &q) == 20);
    q.top_k = 0;
    q.top_p = 1;
    uint32_t seen[VOCAB] = {0};
    for (int i = 0; i < 4000; i++) {
        int32_t id = gemrun_sample(ctx, &q);
        CHECK(id >= 0 && id < VOCAB);
        seen[id]++;
    }
    CHECK(seen[20] > 70 && seen[30] > 70 && seen[20] < 150); /* 4000 e / (98 + 2 e): 105 */
    gemrun_destroy(ctx);
}

/* ---- the port ---- */

typedef struct tally {
    gr_team *team;
    uint32_t each[GB_MAX_THREADS];
    uint32_t serial, sum;
} tally;

static void add_up(void *arg)
{
    tally *t = arg;
    t->serial++;
    for (uint32_t i = 0; i < GB_MAX_THREADS; i++) {
        t->sum += t->each[i];
    }
}

static void count(void *arg, uint32_t thread, uint32_t threads)
{
    tally *t = arg;
    CHECK(thread < threads);
    for (int i = 0; i < 20; i++) {
        t->each[thread]++;
        gr_team_barrier(t->team, add_up, t);
    }
}

static void test_team(void)
{
    gr_error e;
    gr_team *team = aligned_alloc(64, gr_team_bytes());
    for (uint32_t threads = 1; threads <= GB_MAX_THREADS; threads++) {
        tally t = {.team = team};
        CHECK(gr_team_start(team, threads, 0, &e) == GEMRUN_OK);
        for (int i = 0; i < 20; i++) {
            gr_team_run(team, threads, count, &t);
        }
        uint32_t some = threads > 2 ? 2 : 1; /* a part of the team; the others sleep on */
        tally part = {.team = team};
        gr_team_run(team, some, count, &part);
        CHECK(part.serial == 20 && part.sum == some * 20 * 21 / 2);
        gr_team_stop(team);
        CHECK(t.serial == 400 && t.sum == threads * 400 * 401 / 2);
    }
    free(team);
}

static void *affinity_of_thread(void *out)
{
    *(uint64_t *)out = gr_port_affinity();
    return NULL;
}

/* A run gives the thread its cores back; steps leave it bound until a reset. */
static void test_pinning(const image *m)
{
    uint64_t mask = gr_port_affinity(), bit = gr_nth_bit(mask, 0), found = 0;
    gr_port_unpin();
    CHECK(bit != 0 && gr_port_affinity() == mask); /* nothing was bound */
    CHECK(gr_port_pin(bit) && gr_port_pin(bit) && gr_port_affinity() == bit);
    gr_port_unpin();
    CHECK(gr_port_affinity() == mask);
    gemrun_context_t *ctx = NULL;
    gemrun_config c = gemrun_config_default();
    c.threads = 1;
    c.thread_affinity = bit;
    c.ignore_memory = 1;
    CHECK(gemrun_open_mem(&ctx, m->bytes, m->size, NULL, 0, &c) == GEMRUN_OK);
    CHECK(gr_port_affinity() == mask && stats_of(ctx).pinned == 1);
    for (int i = 1; i < 4; i++) {
        CHECK(gemrun_decode(ctx, i) == i && gr_port_affinity() == bit);
    }
    stats_of(ctx);
    CHECK(gr_port_affinity() == bit);
    gemrun_reset_kv_cache(ctx);
    CHECK(gr_port_affinity() == mask);
    int32_t out[4];
    CHECK(gemrun_decode(ctx, 1) == 1 && gemrun_infer(ctx, "hello", out, 4) >= 0);
    CHECK(gr_port_affinity() == mask);
    CHECK(gemrun_decode(ctx, 1) > 0 && gr_port_affinity() == bit);
    gemrun_destroy(ctx);
    CHECK(gr_port_affinity() == mask);
    pthread_t other;
    CHECK(pthread_create(&other, NULL, affinity_of_thread, &found) == 0);
    CHECK(pthread_join(other, NULL) == 0 && found == mask);
}

static void write_file(const char *root, const char *name, const char *text)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", root, name);
    for (char *p = strchr(path + 1, '/'); p; p = strchr(p + 1, '/')) {
        *p = 0;
        mkdir(path, 0700);
        *p = '/';
    }
    FILE *f = fopen(path, "w");
    CHECK(f && fputs(text, f) >= 0 && fclose(f) == 0);
}

/* A file of a cache of every processor of `mask`. */
static void write_cache(const char *root, uint64_t mask, const char *name, const char *text)
{
    for (unsigned i = 0; i < 64; i++) {
        char path[120];
        snprintf(path, sizeof path, "sys/devices/system/cpu/cpu%u/cache/%s", i, name);
        if (mask >> i & 1)
            write_file(root, path, text);
    }
}

static void test_caches(const char *root, uint64_t mask)
{
    uint32_t allowed = 0;
    for (uint64_t left = mask; left != 0; left &= left - 1)
        allowed++;
    CHECK(gr_port_near(root) == 128 << 10); /* not told */
    write_cache(root, mask, "index0/level", "1\n");
    write_cache(root, mask, "index0/size", "32K\n");
    CHECK(gr_port_near(root) == 128 << 10);
    write_cache(root, mask, "index2/level", "2\n");
    write_cache(root, mask, "index2/size", "16384K\n");
    CHECK(gr_port_near(root) == 8192 << 10);
    write_cache(root, mask, "index2/shared_cpu_map", "ffffffff,ffffffff\n");
    CHECK(gr_port_near(root) == (16384u << 10) / allowed / 2);
    write_cache(root, mask, "index2/size", "64K\n");
    CHECK(gr_port_near(root) == 64 << 10);
    write_cache(root, mask, "index2/size", "999999999K\n");
    CHECK(gr_port_near(root) == 32 << 20);
}

static void test_groups(void)
{
    char root[] = "/tmp/gemrun-groups-XXXXXX";
    char command[128];
    CHECK(mkdtemp(root));
    write_file(root, "proc/meminfo", "MemTotal: 9 kB\nMemAvailable:    8192 kB\n");
    CHECK(gr_port_memory(root) == 8192 * 1024);
    write_file(root, "proc/self/cgroup", "0::/a/b\n"); /* version 2, limits above the group */
    write_file(root, "sys/fs/cgroup/a/b/memory.max", "max\n");
    write_file(root, "sys/fs/cgroup/a/memory.max", "4194304\n");
    write_file(root, "sys/fs/cgroup/a/memory.current", "3145728\n");
    write_file(root, "sys/fs/cgroup/a/memory.stat", "anon 5\ninactive_file 1048576\n");
    CHECK(gr_port_memory(root) == 2097152);
    uint32_t cores = gr_port_cores("");
    write_file(root, "sys/fs/cgroup/a/b/cpu.max", "150000 100000\n");
    CHECK(gr_port_cores(root) == 1);
    write_file(root, "sys/fs/cgroup/a/b/cpu.max", "50000 100000\n"); /* half a core is one */
    CHECK(gr_port_cores(root) == 1);
    write_file(root, "sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
    CHECK(gr_port_cores(root) >= cores);
    write_file(root, "proc/self/cgroup", "5:cpuset:/z\n4:cpu,cpuacct:/c\n3:memory:/m/n\n");
    write_file(root, "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us", "-1\n");
    write_file(root, "sys/fs/cgroup/cpu/c/cpu.cfs_period_us", "100000\n");
    CHECK(gr_port_cores(root) >= cores && gr_port_memory(root) == 8192 * 1024);
    write_file(root, "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us", "100000\n");
    CHECK(gr_port_cores(root) == 1);
    write_file(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "65536\n");
    write_file(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", "70000\n");
    CHECK(gr_port_memory(root) == 0);
    uint64_t mask = gr_port_affinity();
    for (unsigned i = 0, found = 0; i < 64 && gr_nth_bit(mask, 1) != 0; i++) {
        if (mask >> i & 1) { /* the first core is a little one */
            char name[80];
            snprintf(name, sizeof name, "sys/devices/system/cpu/cpu%u/cpu_capacity", i);
            write_file(root, name, found++ ? "1024\n" : "420\n");
            snprintf(name, sizeof name, "sys/devices/system/cpu/cpu%u/cpufreq/cpuinfo_max_freq", i);
            write_file(root, name, found == 1 ? "3000000\n" : "3100000\n");
        }
    }
    CHECK(gr_port_uneven(root) == (gr_nth_bit(mask, 1) != 0));
    CHECK(gr_port_fast_cores(root) == 1); /* the quota above */
    write_file(root, "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us", "-1\n");
    uint32_t all = gr_port_cores(root);
    CHECK(all == 1 || gr_port_fast_cores(root) == all - 1);
    snprintf(command, sizeof command, "rm %s/sys/devices/system/cpu/cpu*/cpu_capacity", root);
    CHECK(gr_nth_bit(mask, 1) == 0 || system(command) == 0);
    CHECK(!gr_port_uneven(root)); /* clocks a thirtieth apart are equal */
    CHECK(gr_port_fast_cores(root) == all);
    test_caches(root, mask);
    snprintf(command, sizeof command, "rm -r %s", root);
    CHECK(system(command) == 0);
}

int main(void)
{
    image m = image_make();
    test_texts();
    test_field_texts();
    test_team();
    test_pinning(&m);
    test_groups();
    test_arguments(&m);
    gemrun_context_t *ctx = open_image(&m, 3);
    test_struct_sizes(&m, ctx);
    test_requests(ctx);
    test_generation(ctx);
    test_steps(ctx);
    test_stop_strings(ctx);
    test_tokens(ctx);
    test_chat(ctx);
    gemrun_destroy(ctx);
    test_lower_context(&m);
    test_digests(&m);
    test_own_memory(&m);
    test_totals(&m);
    test_changed_image(&m);
    test_nonfinite(&m);
    test_sampler(&m);
    free(m.bytes);
    puts("test_api: ok");
    return 0;
}
