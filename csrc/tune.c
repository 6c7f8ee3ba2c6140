/* tune.c: see tune.h. The file is text, a key and a value a line, so that it can be read and
 * changed by hand: $GEMRUN_TUNE, else gemrun/tune below the user's folder for settings. */
#define _GNU_SOURCE
#include "tune.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli.h"
#include "gr_port.h"
#include "gs_section.h"

enum { EXIT_FILE = 6, EXIT_RUN = 8, PATH = 1024, ROUNDS = 5, STEPS = 24, WARM = 4 };

/* ---- the file ---- */

static bool file_path(char *out)
{
    const char *own = getenv("GEMRUN_TUNE"), *settings = getenv("XDG_CONFIG_HOME");
    const char *home = getenv("HOME");
    int n = own && *own             ? snprintf(out, PATH, "%s", own)
            : settings && *settings ? snprintf(out, PATH, "%s/gemrun/tune", settings)
            : home && *home         ? snprintf(out, PATH, "%s/.config/gemrun/tune", home)
                                    : -1;
    return n > 0 && n < PATH;
}

/* What the figures belong to: another processor or another number of cores has others. */
static void machine(char *out, size_t size)
{
    char features[160];
    gr_port_features(features, sizeof features);
    snprintf(out, size, "%s, %u cores", features, gr_port_cores(""));
}

tuning tune_read(void)
{
    char path[PATH], line[400], here[256], there[256] = "";
    tuning t = {0};
    FILE *f = file_path(path) ? gs_open_regular(path) : NULL;
    if (!f) {
        return t;
    }
    while (fgets(line, sizeof line, f)) {
        sscanf(line, "threads %u", &t.threads);
        sscanf(line, "decode_threads %u", &t.decode_threads);
        sscanf(line, "balance %u", &t.balance);
        sscanf(line, "machine %255[^\n]", there);
    }
    fclose(f);
    machine(here, sizeof here);
    bool good = strcmp(here, there) == 0 && t.threads > 1 && t.decode_threads >= 1 &&
                t.decode_threads <= t.threads && (t.balance == 1 || t.balance == 2);
    return good ? t : (tuning){0};
}

void tune_apply(const tuning *t, gemrun_config *c)
{
    bool same = t->threads > 0 && (c->threads == 0 || c->threads == t->threads);
    if (same && !c->thread_affinity) {
        c->decode_threads = c->decode_threads ? c->decode_threads : t->decode_threads;
        c->balance = c->balance ? c->balance : t->balance;
    }
}

static bool make_folders(char *path)
{
    for (char *p = strchr(path + 1, '/'); p; p = strchr(p + 1, '/')) {
        *p = 0;
        bool good = mkdir(path, 0700) == 0 || errno == EEXIST;
        *p = '/';
        if (!good) {
            return false;
        }
    }
    return true;
}

/* Whole or not at all: written beside, then renamed. */
static bool write_file(const char *path, const tuning *t)
{
    char beside[PATH + 16], here[256];
    snprintf(beside, sizeof beside, "%s.%ld", path, (long)getpid());
    machine(here, sizeof here);
    FILE *f = fopen(beside, "w");
    if (!f) {
        return false;
    }
    fprintf(f, "machine %s\nthreads %u\ndecode_threads %u\nbalance %u\n", here, t->threads,
            t->decode_threads, t->balance);
    bool good = fflush(f) == 0 && fsync(fileno(f)) == 0;
    good = fclose(f) == 0 && good;
    good = good && rename(beside, path) == 0;
    if (!good) {
        unlink(beside);
    }
    return good;
}

static int keep(const tuning *t)
{
    char path[PATH];
    if (!file_path(path)) {
        fputs("gemrun: --tune: no place for the result; set GEMRUN_TUNE to a file name\n", stderr);
        return EXIT_FILE;
    }
    if (!make_folders(path) || !write_file(path, t)) {
        cli_print(stderr, "gemrun: --tune: %s cannot be written (%s); set GEMRUN_TUNE to another "
                  "file\n", path, strerror(errno));
        return EXIT_FILE;
    }
    cli_print(stdout, "kept in %s: %u of %u threads decode, %s\n", path, t->decode_threads,
              t->threads, t->balance == 2 ? "work is taken in pieces" : "in even shares");
    return 0;
}

/* ---- measuring ---- */

typedef struct way {
    uint32_t decode_threads, balance;
    double ms[ROUNDS]; /* a token */
} way;

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(const way *w)
{
    double sorted[ROUNDS];
    memcpy(sorted, w->ms, sizeof sorted);
    qsort(sorted, ROUNDS, sizeof *sorted, by_size);
    return sorted[ROUNDS / 2];
}

/* Milliseconds a token of a few steps from an empty cache, or below 0: it failed. */
static double time_steps(gemrun_context_t *ctx)
{
    uint64_t start = 0;
    gemrun_reset_kv_cache(ctx);
    for (int i = 0; i < WARM + STEPS; i++) {
        start = i == WARM ? gr_port_now() : start;
        if (gemrun_decode(ctx, 1) < 0) {
            return -1;
        }
    }
    return (double)(gr_port_now() - start) * 1e-6 / (double)STEPS;
}

/* Every way in turn, several times: what disturbs one round disturbs all of them. */
static bool measure(const char *path, const gemrun_config *given, way *ways, uint32_t count)
{
    for (uint32_t round = 0; round < ROUNDS; round++) {
        for (uint32_t i = 0; i < count; i++) {
            gemrun_config c = *given;
            gemrun_context_t *ctx = NULL;
            c.decode_threads = ways[i].decode_threads;
            c.balance = ways[i].balance;
            if (cli_open(&ctx, path, &c) != GEMRUN_OK) {
                return false;
            }
            ways[i].ms[round] = time_steps(ctx);
            gemrun_destroy(ctx);
            if (ways[i].ms[round] < 0) {
                return false;
            }
        }
    }
    return true;
}

static int failed(void)
{
    cli_print(stderr, "gemrun: --tune: %s\n", gemrun_last_error());
    return EXIT_RUN;
}

static uint32_t threads_of(const char *path, const gemrun_config *c)
{
    gemrun_context_t *ctx = NULL;
    gemrun_stats s = {.size = sizeof s};
    bool good = cli_open(&ctx, path, c) == GEMRUN_OK && gemrun_get_stats(ctx, &s) == GEMRUN_OK;
    gemrun_destroy(ctx);
    return good ? s.threads : 0;
}

int tune_run(const char *path, const gemrun_config *given)
{
    gemrun_config c = *given;
    way ways[8] = {{0}}, pieces = {0};
    uint32_t n = threads_of(path, &c), best = 0;
    if (n == 0 || n > 8) {
        return failed();
    }
    c.threads = n;
    for (uint32_t i = 0; i < n; i++) {
        ways[i] = (way){.decode_threads = i + 1, .balance = 1};
    }
    if (!measure(path, &c, ways, n)) {
        return failed();
    }
    for (uint32_t i = 1; i < n; i++) {
        best = median(ways + i) < median(ways + best) ? i : best;
    }
    uint32_t enough = 0; /* the fewest that come within 3 % of the best */
    while (median(ways + enough) > 1.03 * median(ways + best)) {
        enough++;
    }
    printf("threads  ms/token  tokens/s\n");
    for (uint32_t i = 0; i < n; i++) {
        double ms = median(ways + i);
        printf("%-7u  %8.3f  %8.1f%s\n", i + 1, ms, 1000 / ms, i == enough ? "  enough" : "");
    }
    if (n == 1) {
        printf("nothing is kept: with 1 thread there is nothing to choose; %s\n",
               given->threads == 1 ? "leave --threads out to find how many pay"
                                   : "compile with a larger --run-threads, or allow more cores");
        return 0;
    }
    tuning t = {.threads = n, .decode_threads = enough + 1, .balance = 1};
    if (enough > 0) { /* cores that differ: does it pay to take work in pieces? */
        way both[2] = {ways[enough], ways[enough]};
        both[1].balance = 2;
        if (!measure(path, &c, both, 2)) {
            return failed();
        }
        pieces = both[1];
        printf("%u in pieces %6.3f  %8.1f\n", enough + 1, median(&pieces), 1000 / median(&pieces));
        t.balance = median(&pieces) < 0.97 * median(both) ? 2 : 1;
    }
    return keep(&t);
}
