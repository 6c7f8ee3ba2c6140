/* test_snapshot.c: going back to a place in the cache, on the golden artifacts: rings that have gone
 * on hold again what they held. Run it from the project's folder. */
#include "gemrun_session.h"
#include "gr_ctx.h"
#include "image.h"

static const char *const models[] = {"f16", "q4raw", "int4", "kvmask", "pinned", "value4", "key4"};

static gemrun_context_t *open_model(const char *name)
{
    char path[96];
    gemrun_context_t *ctx = NULL;
    gemrun_config c = gemrun_config_default();
    c.threads = 2, c.ignore_memory = 1;
    snprintf(path, sizeof path, "tests/golden/v1.0/tiny-%s.gembin", name);
    if (gemrun_open(&ctx, path, &c) != GEMRUN_OK) {
        fprintf(stderr, "open: %s\n", gemrun_last_error());
        exit(1);
    }
    return ctx;
}

static void append(gemrun_context_t *ctx, uint32_t from, uint32_t count, uint32_t kind)
{
    int32_t ids[IMAGE_MAX / 4096];
    for (uint32_t i = 0; i < count; i++)
        ids[i] = (int32_t)(((from + i) * 7 + kind * 13 + 5) % 90);
    int32_t found = gemrun_prefill(ctx, ids, count);
    if (found != (int32_t)(from + count)) {
        fprintf(stderr, "%u + %u: %d %s\n", from, count, found, gemrun_last_error());
        exit(1);
    }
}

static void same(gemrun_context_t *a, gemrun_context_t *b)
{
    uint32_t n = 0, m = 0;
    const float *x = gemrun_logits(a, &n), *y = gemrun_logits(b, &m);
    CHECK(x && y && n == m && memcmp(x, y, n * sizeof *x) == 0);
}

static void test_places(const char *name)
{
    gemrun_context_t *ctx = open_model(name), *fresh = open_model(name);
    uint32_t context = ctx->e.context;
    size_t size = (size_t)gemrun_snapshot_size(ctx);
    void *memory = malloc(size);
    CHECK(memory && context <= 256);
    for (uint32_t at = 1; at + 1 < context; at += 1 + at / 4) {
        gemrun_reset_kv_cache(ctx);
        append(ctx, 0, at, 0);
        CHECK(gemrun_snapshot_take(ctx, memory, size) == GEMRUN_OK);
        for (uint32_t kind = 1; kind < 4; kind++) {
            append(ctx, at, (context - at) / kind, kind);
            CHECK(gemrun_snapshot_back(ctx, memory, size) == (int32_t)at);
            CHECK(!ctx->e.logits_valid);
            gemrun_reset_kv_cache(fresh);
            append(fresh, 0, at, 0);
            append(ctx, at, 1, kind);
            append(fresh, at, 1, kind);
            same(ctx, fresh);
            append(ctx, at + 1, context - at - 1, kind);
            append(fresh, at + 1, context - at - 1, kind);
            same(ctx, fresh);
            CHECK(gemrun_snapshot_back(ctx, memory, size) == (int32_t)at);
        }
    }
    free(memory);
    gemrun_destroy(ctx);
    gemrun_destroy(fresh);
}

static void test_refused(void)
{
    gemrun_context_t *ctx = open_model("kvmask"), *other = open_model("value4");
    size_t size = (size_t)gemrun_snapshot_size(ctx), most = size + (1 << 20);
    uint8_t *memory = malloc(most);
    CHECK(memory && gemrun_snapshot_size(NULL) == GEMRUN_E_ARGUMENT);
    memset(memory, 0, most);
    append(ctx, 0, 50, 0);
    CHECK(gemrun_snapshot_take(ctx, memory, size - 1) == GEMRUN_E_ARGUMENT && memory[0] == 0);
    CHECK(gemrun_snapshot_take(ctx, NULL, size) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_snapshot_back(ctx, memory, size) == GEMRUN_E_ROOT && ctx->e.pos == 50);
    CHECK(gemrun_snapshot_take(ctx, memory, size) == GEMRUN_OK);
    CHECK(gemrun_snapshot_back(ctx, memory, size - 1) == GEMRUN_E_SIZE);
    CHECK(gemrun_snapshot_back(ctx, NULL, size) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_snapshot_back(other, memory, most) == GEMRUN_E_ROOT);
    gemrun_reset_kv_cache(ctx);
    CHECK(gemrun_snapshot_back(ctx, memory, size) == GEMRUN_E_STATE && ctx->e.pos == 0);
    CHECK(strstr(gemrun_last_error(), "take another one"));
    append(ctx, 0, 60, 1); /* other tokens */
    CHECK(gemrun_snapshot_back(ctx, memory, size) == GEMRUN_E_STATE && ctx->e.pos == 60);
    gemrun_reset_kv_cache(ctx);
    append(ctx, 0, 50, 0); /* the same again */
    append(ctx, 50, 100, 2);
    CHECK(gemrun_snapshot_back(ctx, memory, size) == 50);
    free(memory);
    gemrun_destroy(ctx);
    gemrun_destroy(other);
}

int main(void)
{
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++)
        test_places(models[i]);
    test_refused();
    printf("test_snapshot: ok\n");
    return 0;
}
