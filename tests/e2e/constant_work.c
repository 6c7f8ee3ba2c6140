/* constant_work.c: decode some pseudo-random ids: constant_work MODEL KERNEL SEED STEPS
 *
 * The test counts the instructions of gr_forward in it, from token id to logits. */
#include <stdio.h>
#include <stdlib.h>

#include "gemrun.h"

int main(int argc, char **argv)
{
    gemrun_config q = gemrun_config_default();
    gemrun_context_t *ctx;
    gemrun_info info = {.size = sizeof info};
    if (argc != 5)
        return 2;
    q.threads = 1;
    q.kernel = argv[2];
    q.ignore_memory = 1;
    unsigned long seed = strtoul(argv[3], NULL, 10), steps = strtoul(argv[4], NULL, 10);
    if (gemrun_open(&ctx, argv[1], &q) != GEMRUN_OK ||
        gemrun_get_info(ctx, &info) != GEMRUN_OK) {
        puts(gemrun_last_error());
        return 1;
    }
    for (unsigned long i = 0; i < steps; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        if (gemrun_decode(ctx, (int32_t)((seed >> 33) % info.vocab_rows)) < 0) {
            puts(gemrun_last_error());
            return 1;
        }
    }
    gemrun_destroy(ctx);
    return 0;
}
