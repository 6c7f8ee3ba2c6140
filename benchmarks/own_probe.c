/* own_probe.c: peer_probe.c for our engine: `own_probe MODEL THREADS CONTEXT STEPS ID..` prints one
 * JSON line: when the model was open, when the first token was there, peak memory of the process. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "gemrun.h"

enum { MAX_IDS = 8192 };

static double now(void) /* ms */
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

static int32_t good(int32_t result)
{
    if (result < 0) {
        fprintf(stderr, "own_probe: %s\n", gemrun_last_error());
        exit(1);
    }
    return result;
}

static long memory(const char *key) /* KiB */
{
    char line[256];
    long value = -1;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, key, strlen(key)) == 0)
            value = strtol(line + strlen(key), NULL, 10);
    if (f)
        fclose(f);
    return value;
}

int main(int argc, char **argv)
{
    static int32_t ids[MAX_IDS];
    double start = now();
    if (argc < 6 || argc - 5 > MAX_IDS)
        return fprintf(stderr, "usage: own_probe MODEL THREADS CONTEXT STEPS ID..\n"), 2;
    for (int i = 5; i < argc; i++)
        ids[i - 5] = atoi(argv[i]);
    gemrun_config config = gemrun_config_default();
    config.threads = (uint32_t)atoi(argv[2]);
    config.kv_cache_size = (uint32_t)atoi(argv[3]);
    config.ignore_memory = config.allow_foreign_board = 1;
    gemrun_context_t *ctx;
    good(gemrun_open(&ctx, argv[1], &config));
    double open = now();
    gemrun_request greedy = gemrun_request_default(ctx);
    greedy.temperature = 0;
    good(gemrun_prefill(ctx, ids, (size_t)(argc - 5)));
    int32_t next = good(gemrun_sample(ctx, &greedy));
    double first = now();
    for (int i = 0; i < atoi(argv[4]); i++) {
        good(gemrun_decode(ctx, next));
        next = good(gemrun_sample(ctx, &greedy));
    }
    printf("{\"open_ms\": %.3f, \"first_ms\": %.3f, \"steps_ms\": %.3f, \"peak_kib\": %ld}\n",
           open - start, first - start, now() - first, memory("VmHWM:"));
    gemrun_destroy(ctx);
    return 0;
}
