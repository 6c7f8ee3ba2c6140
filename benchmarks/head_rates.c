/* head_rates.c: how often the head in two planes misses a token that the full head ranks among the
 * best, and how many candidates it has. `head_rates MODEL WINDOW MARGIN.. < ids`: 32-bit token ids,
 * WINDOW to a context; every position counts. head.py builds and calls it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gr_ctx.h"

enum { WANTED = 2, MARGINS = 8, MOST = 4096 };
static const uint32_t wanted[WANTED] = {1, 40};

typedef struct rate {
    uint64_t candidates, most;
    uint64_t missed; /* rows of the full head's best without a logit */
    uint64_t wrong;  /* logits that differ */
} rate;

typedef struct job {
    gemrun_context_t *ctx;
    float *full;
    float margins[MARGINS];
    uint32_t margin_count;
    uint64_t tokens;
    rate rates[MARGINS][WANTED];
} job;

/* The k-th largest; k is small. */
static float largest(const float *z, uint32_t rows, uint32_t k)
{
    float best[64];
    uint32_t n = 0;
    for (uint32_t i = 0; i < rows; i++) {
        if (n == k && !(z[i] > best[k - 1]))
            continue;
        uint32_t at = n < k ? n++ : k - 1;
        for (; at > 0 && z[i] > best[at - 1]; at--)
            best[at] = best[at - 1];
        best[at] = z[i];
    }
    return best[k - 1];
}

/* Compute the token's head once more, in two planes, and compare. */
static void compare(job *j, uint32_t rows, float margin, uint32_t k, rate *r)
{
    gr_engine *e = &j->ctx->e;
    gr_planes *p = e->planes;
    gemrun_request q = {.temperature = 1, .top_k = k, .repetition_penalty = 1};
    const float *z = (const float *)(const void *)e->buf[GB_BUF_LOGITS];
    float least = largest(j->full, rows, k);
    p->request = &q;
    p->margin = margin;
    p->most = GR_KEEP;
    p->candidates = 0;
    e->screened = true;
    if (!gr_head_all(e))
        exit(1);
    p->request = NULL;
    r->candidates += p->candidates;
    r->most = p->candidates > r->most ? p->candidates : r->most;
    for (uint32_t i = 0; i < rows; i++) {
        bool there = gr_finite(z[i]);
        r->missed += !there && j->full[i] >= least;
        r->wrong += there && memcmp(z + i, j->full + i, sizeof *z) != 0;
    }
}

static int see(void *user, uint32_t position, const float *logits, uint32_t rows)
{
    job *j = user;
    (void)position;
    memcpy(j->full, logits, rows * sizeof *logits);
    j->tokens++;
    for (uint32_t m = 0; m < j->margin_count; m++)
        for (uint32_t k = 0; k < WANTED; k++)
            compare(j, rows, j->margins[m], wanted[k], &j->rates[m][k]);
    return 0;
}

static void print(const job *j)
{
    for (uint32_t m = 0; m < j->margin_count; m++)
        for (uint32_t k = 0; k < WANTED; k++) {
            const rate *r = &j->rates[m][k];
            printf("%llu %g %u %.1f %llu %llu %llu\n", (unsigned long long)j->tokens,
                   (double)j->margins[m], wanted[k], (double)r->candidates / (double)j->tokens,
                   (unsigned long long)r->most, (unsigned long long)r->missed,
                   (unsigned long long)r->wrong);
        }
    fflush(stdout);
}

int main(int argc, char **argv)
{
    static int32_t ids[MOST];
    job j = {0};
    gemrun_config c = gemrun_config_default();
    c.threads = 1;
    c.head = GEMRUN_HEAD_TWO_PLANE;
    size_t window = argc > 3 ? strtoul(argv[2], NULL, 10) : 0;
    if (window < 1 || window > MOST || gemrun_open(&j.ctx, argv[1], &c) != GEMRUN_OK) {
        fprintf(stderr, "%s\n", gemrun_last_error());
        return 2;
    }
    for (int i = 3; i < argc && j.margin_count < MARGINS; i++)
        j.margins[j.margin_count++] = strtof(argv[i], NULL);
    j.full = malloc(j.ctx->e.v.conf.vocab_rows * sizeof *j.full);
    if (!j.full || !j.ctx->e.planes)
        return 2;
    for (uint32_t n = 1; fread(ids, sizeof *ids, window, stdin) == window; n++) {
        gemrun_reset_kv_cache(j.ctx);
        if (gemrun_eval(j.ctx, ids, window, see, &j) < 0) {
            fprintf(stderr, "%s\n", gemrun_last_error());
            return 1;
        }
        if (n % 20 == 0)
            print(&j); /* so that a run that is stopped has said something */
    }
    print(&j);
    gemrun_destroy(j.ctx);
    return 0;
}
