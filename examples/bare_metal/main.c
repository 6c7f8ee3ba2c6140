/* main.c: a model in firmware. No system, no heap: the artifact is used where it lies in flash, the
 * engine works in one block of memory, and what it computes is what a server computes.
 *
 * Replays the artifact's test vectors, evaluates some tokens and prints a digest of all logits and
 * of eight greedy answers. The same program on a host prints the same digest (make BOARD=host). */
#include <gemrun.h>

#include <stdint.h>

#include "board.h"

#ifndef MEMORY
#define MEMORY (2u << 20)
#endif
enum { TOKENS = 24, ANSWERS = 8 };

extern const uint8_t model[], model_end[]; /* model.S */
static _Alignas(4096) uint8_t memory[MEMORY];

static int add(void *user, uint32_t position, const float *logits, uint32_t count)
{
    uint64_t *digest = user;
    const uint8_t *bytes = (const uint8_t *)logits;
    (void)position;
    for (uint32_t i = 0; i < count * sizeof *logits; i++)
        *digest = (*digest ^ bytes[i]) * 1099511628211u;
    return 0;
}

static void print_number(const char *before, uint64_t value, unsigned base, const char *after)
{
    char text[24], *at = text + sizeof text - 1;
    *at = 0;
    do {
        *--at = "0123456789abcdef"[value % base];
        value /= base;
    } while (value > 0);
    board_print(before);
    board_print(at);
    board_print(after);
}

static int failed(const char *what)
{
    board_print(what);
    board_print(": ");
    board_print(gemrun_last_error());
    board_print("\n");
    return 1;
}

static int run(gemrun_context_t *ctx)
{
    uint64_t digest = 14695981039346656037u;
    int32_t ids[TOKENS], passed = gemrun_run_tests(ctx);
    if (passed < 0)
        return failed("test vectors");
    print_number("test vectors passed: ", (uint64_t)passed, 10, "\n");
    gemrun_reset_kv_cache(ctx);
    for (int32_t i = 0; i < TOKENS; i++)
        ids[i] = i * 7 % 61;
    if (gemrun_eval(ctx, ids, TOKENS, add, &digest) < 0)
        return failed("eval");
    gemrun_request request = gemrun_request_default(ctx);
    request.temperature = 0.0f;
    for (int i = 0; i < ANSWERS; i++) {
        int32_t id = gemrun_sample(ctx, &request);
        if (id < 0 || gemrun_decode(ctx, id) < 0)
            return failed("decode");
        digest = (digest ^ (uint32_t)id) * 1099511628211u;
    }
    print_number("digest: ", digest, 16, "\n");
    return 0;
}

int main(void)
{
    gemrun_context_t *ctx = NULL;
    gemrun_config config = gemrun_config_default();
    size_t size = (size_t)(model_end - model);
    config.threads = 1;
    config.weights_check = GEMRUN_WEIGHTS_FULL;
    config.allow_foreign_board = 1;
    int64_t needed = gemrun_memory_needed(model, size, &config);
    if (needed < 0)
        return failed("artifact");
    print_number("artifact: ", size, 10, " bytes\n");
    print_number("memory: ", (uint64_t)needed, 10, " bytes\n");
    if (gemrun_open_mem(&ctx, model, size, memory, sizeof memory, &config) != GEMRUN_OK)
        return failed("open");
    int result = run(ctx);
    gemrun_destroy(ctx);
    return result;
}
