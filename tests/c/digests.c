/* digests.c: the logits of an artifact by every kernel, thread count and chunk of this processor.
 *
 *     digests ARTIFACT TOKENS          all kernels that run here, 1, 2, 3 and 8 threads, chunks of
 *                                      1, 7, 32 and 512 tokens: one digest, or a failure
 *     digests ARTIFACT TOKENS KERNEL   one kernel, 2 threads, the compiled chunk; "": the best
 *
 * Prints the digest and the kernels, for comparing with other processors. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gemrun.h"
#include "gr_internal.h"

enum { MOST = 600 };

static int add(void *user, uint32_t position, const float *logits, uint32_t count)
{
    uint64_t *digest = user;
    (void)position;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t u;
        memcpy(&u, &logits[i], sizeof u);
        for (int k = 0; k < 4; k++, u >>= 8)
            *digest = (*digest ^ (u & 0xFFu)) * 1099511628211u;
    }
    return 0;
}

/* The logits after each of `count` tokens, and of three more, one by one. 0: it failed. */
static uint64_t digest(const char *path, const char *kernel, uint32_t threads, uint32_t chunk,
                       uint32_t count)
{
    uint64_t sum = 14695981039346656037u;
    gemrun_context_t *ctx = NULL;
    gemrun_config config = gemrun_config_default();
    int32_t ids[MOST];
    for (uint32_t i = 0; i < count; i++)
        ids[i] = (int32_t)(i * 7 % 61);
    config.threads = threads;
    config.prefill_batch_size = chunk;
    config.ignore_memory = 1;
    config.kernel = kernel;
    gemrun_status st = gemrun_open(&ctx, path, &config);
    if (st == GEMRUN_E_ARGUMENT && chunk > 0) { /* longer than the artifact's */
        config.prefill_batch_size = 0;
        st = gemrun_open(&ctx, path, &config);
    }
    if (st != GEMRUN_OK)
        return 0;
    bool ok = gemrun_eval(ctx, ids, count, add, &sum) >= 0;
    for (int32_t id = 3; ok && id < 6; id++) {
        uint32_t rows = 0;
        ok = gemrun_decode(ctx, id) >= 0;
        const float *logits = gemrun_logits(ctx, &rows);
        ok = ok && logits && add(&sum, 0, logits, rows) == 0;
    }
    gemrun_destroy(ctx);
    return ok ? sum : 0;
}

static bool all_equal(const char *path, const char *kernel, uint32_t count, uint64_t want)
{
    static const uint32_t threads[] = {1, 2, 3, 8}, chunks[] = {1, 7, 32, 512};
    bool equal = true;
    for (uint32_t t = 0; t < 4; t++) {
        for (uint32_t c = 0; c < 4; c++) {
            uint64_t got = digest(path, kernel, threads[t], chunks[c], count);
            if (got != want)
                fprintf(stderr, "digests: %s, %u threads, chunk %u: %016" PRIx64 " (%s)\n", kernel,
                        threads[t], chunks[c], got, got ? "another result" : gemrun_last_error());
            equal &= got == want;
        }
    }
    return equal;
}

int main(int argc, char **argv)
{
    uint32_t count = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 0;
    if (argc < 3 || argc > 4 || count == 0 || count > MOST) {
        fprintf(stderr, "usage: digests ARTIFACT TOKENS [KERNEL], up to %d tokens\n", MOST);
        return 2;
    }
    uint64_t want = digest(argv[1], argc > 3 && *argv[3] ? argv[3] : NULL, 2, 0, count);
    if (want == 0) {
        fprintf(stderr, "digests: %s\n", gemrun_last_error());
        return 1;
    }
    bool equal = true;
    printf("%016" PRIx64, want);
    for (uint32_t i = 0; argc == 3 && gr_kernels_at(i); i++) {
        equal &= all_equal(argv[1], gr_kernels_at(i), count, want);
        printf(" %s", gr_kernels_at(i));
    }
    printf("\n");
    return equal ? 0 : 1;
}
