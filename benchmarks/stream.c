/* stream.c: plain reading of memory, as fast as it goes: `stream BYTES THREADS PASSES`
 *
 * The buffer lies in huge pages where the system has them, as the engine's weights do.
 * Prints one JSON line: GB/s, the median of the passes, of a plain loop and of one that prefetches
 * as the engine's kernels do. Every thread reads its own part of the buffer, all of it every pass;
 * a pass takes as long as its slowest thread. PASSES 0: read until killed, a neighbour for others. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { MAX_THREADS = 64, MAX_PASSES = 1000, LINE = 64, AHEAD = 64 * LINE, HUGE = 2 << 20 };

typedef uint64_t line __attribute__((vector_size(LINE)));

typedef struct part {
    const uint8_t *from;
    size_t bytes; /* whole units of four lines */
    uint32_t passes, prefetch;
    pthread_barrier_t *meet;
    double *seconds; /* of each pass; only the first thread writes */
    line sum;        /* so that the loop is not left out */
} part;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static line read_plain(const uint8_t *at, size_t bytes)
{
    const line *p = (const line *)(const void *)at;
    line s[4] = {{0}};
    for (size_t i = 0; i < bytes / LINE; i += 4)
        s[0] += p[i], s[1] += p[i + 1], s[2] += p[i + 2], s[3] += p[i + 3];
    return s[0] + s[1] + s[2] + s[3];
}

static line read_ahead(const uint8_t *at, size_t bytes)
{
    const line *p = (const line *)(const void *)at;
    line s[4] = {{0}};
    for (size_t i = 0; i < bytes / LINE; i += 4) {
        for (uint32_t k = 0; k < 4; k++) { /* beyond the end it does nothing */
            __builtin_prefetch(at + i * LINE + AHEAD + k * LINE, 0, 2);
            s[k] += p[i + k];
        }
    }
    return s[0] + s[1] + s[2] + s[3];
}

static void *work(void *arg)
{
    part *w = arg;
    for (uint32_t i = 0; i < w->passes; i++) {
        pthread_barrier_wait(w->meet);
        double start = now();
        w->sum += w->prefetch ? read_ahead(w->from, w->bytes) : read_plain(w->from, w->bytes);
        pthread_barrier_wait(w->meet);
        if (w->seconds)
            w->seconds[i] = now() - start;
    }
    return NULL;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double rate(const uint8_t *data, size_t bytes, uint32_t threads, uint32_t passes,
                   uint32_t prefetch)
{
    static double seconds[MAX_PASSES];
    static part parts[MAX_THREADS];
    pthread_t id[MAX_THREADS];
    pthread_barrier_t meet;
    size_t each = bytes / threads / (4 * LINE) * (4 * LINE);
    pthread_barrier_init(&meet, NULL, threads);
    for (uint32_t i = 0; i < threads; i++)
        parts[i] = (part){data + i * each, each, passes, prefetch, &meet, i ? NULL : seconds, {0}};
    for (uint32_t i = 1; i < threads; i++)
        pthread_create(&id[i], NULL, work, &parts[i]);
    work(&parts[0]);
    for (uint32_t i = 1; i < threads; i++)
        pthread_join(id[i], NULL);
    pthread_barrier_destroy(&meet);
    qsort(seconds, passes, sizeof *seconds, by_value);
    return (double)each * threads / seconds[passes / 2] * 1e-9;
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return fprintf(stderr, "usage: stream BYTES THREADS PASSES\n"), 2;
    size_t bytes = strtoull(argv[1], NULL, 10) / 4096 * 4096;
    uint32_t threads = (uint32_t)atoi(argv[2]), passes = (uint32_t)atoi(argv[3]);
    if (bytes < 1 << 20 || threads < 1 || threads > MAX_THREADS || passes > MAX_PASSES)
        return fprintf(stderr, "stream: at least 1 MiB, 1 to 64 threads, up to 1000 passes\n"), 2;
    uint8_t *data = aligned_alloc(HUGE, (bytes + HUGE - 1) / HUGE * HUGE);
    if (!data)
        return fprintf(stderr, "stream: no memory for %zu bytes\n", bytes), 5;
    madvise(data, bytes, MADV_HUGEPAGE);
    for (size_t i = 0; i < bytes; i++) /* different pages, none the system's page of zeros */
        data[i] = (uint8_t)(i * 131 + (i >> 12));
    while (!passes)
        rate(data, bytes, threads, 100, 0);
    double plain = rate(data, bytes, threads, passes, 0);
    double ahead = rate(data, bytes, threads, passes, 1);
    printf("{\"bytes\": %zu, \"threads\": %u, \"plain\": %.3f, \"prefetch\": %.3f}\n", bytes,
           threads, plain, ahead);
    free(data);
    return 0;
}
