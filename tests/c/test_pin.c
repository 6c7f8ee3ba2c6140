/* test_pin.c: the pinned prompt of a golden artifact: every part of it against a prefill, which
 * computes what it is given; and the blocks that it is made of. Run it from the project's folder,
 * under sanitizers. */
#include "gr_ctx.h"
#include "gs_pin.h"
#include "image.h"

enum { TOKENS = 100, STEPS = 6, IDS_MAX = 200, COMPILED = 160 };

static const char text[] = "Conveyor seven halts as soon as a sensor on bay four reports a box; "
                           "call dock two, and go on soon. ";

static gemrun_context_t *opened(uint32_t context, uint32_t batch)
{
    gemrun_context_t *ctx;
    gemrun_config q = gemrun_config_default();
    q.ignore_memory = 1;
    q.threads = 1;
    q.kv_cache_size = context;
    q.prefill_batch_size = batch;
    CHECK(gemrun_open(&ctx, "tests/golden/v1.0/tiny-pinned.gembin", &q) == GEMRUN_OK);
    return ctx;
}

/* Ids and logits of a run, against steps on `plain`. Returns the tokens that were not computed. */
static uint64_t compare(gemrun_context_t *ctx, gemrun_context_t *plain, const char *prompt,
                        uint32_t reuse)
{
    gemrun_request q = gemrun_request_default(ctx);
    gemrun_stats s = {.size = sizeof s};
    int32_t made[STEPS], ids[IDS_MAX];
    uint32_t rows;
    q.temperature = 0;
    q.max_tokens = STEPS;
    q.ignore_stop_ids = 1;
    q.reuse = reuse;
    CHECK(gemrun_generate(ctx, prompt, &q, made) == STEPS);
    CHECK(gemrun_get_stats(ctx, &s) == GEMRUN_OK);
    int32_t count = gemrun_tokenize(plain, prompt, strlen(prompt), 3, ids, IDS_MAX);
    CHECK(count > 0 && s.prompt_tokens == (uint32_t)count);
    gemrun_reset_kv_cache(plain);
    CHECK(gemrun_prefill(plain, ids, (size_t)count) == count);
    for (uint32_t i = 0; i < STEPS; i++) {
        CHECK(gemrun_sample(plain, &q) == made[i]);
        if (i + 1 < STEPS) {
            CHECK(gemrun_decode(plain, made[i]) > 0);
        }
    }
    const float *one = gemrun_logits(ctx, &rows), *other = gemrun_logits(plain, NULL);
    CHECK(one && other && memcmp(one, other, rows * sizeof *one) == 0);
    CHECK(s.reused < s.prompt_tokens);
    return s.reused;
}

static void test_every_part(void)
{
    gemrun_context_t *ctx = opened(0, 7), *plain = opened(0, 0);
    char prompt[sizeof text + 8];
    uint64_t used = 0;
    for (size_t cut = 0; cut < sizeof text; cut++) {
        snprintf(prompt, sizeof prompt, "%.*szq", (int)cut, text);
        for (uint32_t reuse = 0; reuse < 2; reuse++) {
            uint64_t kept = compare(ctx, plain, prompt, reuse);
            used += kept;
            CHECK(cut + 1 < sizeof text || kept >= TOKENS);
        }
    }
    CHECK(used > 10 * TOKENS);
    CHECK(compare(ctx, plain, text, 0) == TOKENS - 1);
    CHECK(compare(ctx, plain, "another", 0) <= 1);
    gemrun_destroy(ctx);
    gemrun_destroy(plain);
}

static void test_a_smaller_context(void)
{
    gemrun_context_t *ctx = opened(90, 0), *plain = opened(90, 0);
    char prompt[sizeof text];
    snprintf(prompt, sizeof prompt, "%.80sq", text);
    CHECK(compare(ctx, plain, prompt, 0) == 81); /* bos and 80 letters, of more than fit */
    snprintf(prompt, sizeof prompt, "%.20sq", text);
    CHECK(compare(ctx, plain, prompt, 0) == 0); /* the window's ring has gone on over it */
    gemrun_destroy(ctx);
    gemrun_destroy(plain);
}

static void test_blocks(void)
{
    gemrun_context_t *ctx = opened(0, 0);
    const gr_view *v = &ctx->e.v;
    int64_t size = gs_session_blocks(ctx, NULL, 0);
    CHECK(size == 0 && v->pin_tokens == TOKENS);
    CHECK(gemrun_prefill(ctx, (const int32_t *)(const void *)v->pin_ids, TOKENS) == TOKENS);
    size = gs_session_blocks(ctx, NULL, 0);
    CHECK(size > 0 && (uint64_t)size == gr_pin_size(v, TOKENS) - sizeof(gb_pin) - 448);
    uint8_t *made = malloc((size_t)size);
    CHECK(made && gs_session_blocks(ctx, made, (uint64_t)size - 1) == size);
    CHECK(gs_session_blocks(ctx, made, (uint64_t)size) == size);
    CHECK(memcmp(made, (const uint8_t *)v->pin_ids + 448, (size_t)size) == 0);
    free(made);
    CHECK(gemrun_internal_units(ctx, NULL, 0) == GEMRUN_OK); /* heads may see less from here on */
    gemrun_context_t *plain = opened(0, 0);
    CHECK(compare(ctx, plain, text, 0) == 0);
    gemrun_destroy(ctx);
    gemrun_destroy(plain);
}

static void test_facts(void)
{
    gemrun_context_t *ctx = opened(0, 0);
    gemrun_info f = {.size = sizeof f};
    CHECK(gemrun_get_info(ctx, &f) == GEMRUN_OK && f.pinned_prompt == TOKENS);
    CHECK(f.context == COMPILED && gemrun_run_tests(ctx) == 2);
    gemrun_destroy(ctx);
}

int main(void)
{
    test_every_part();
    test_a_smaller_context();
    test_blocks();
    test_facts();
    puts("test_pin: ok");
    return 0;
}
