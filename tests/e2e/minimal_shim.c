/* minimal_shim.c: the minimal engine for test_gemrun_minimal.py: each call opens, asks, closes. */
#include <string.h>

#include "gemrun.h"

static gemrun_config config_of(uint32_t threads)
{
    gemrun_config q = gemrun_config_default();
    q.threads = threads;
    q.weights_check = GEMRUN_WEIGHTS_FULL;
    q.allow_foreign_board = q.ignore_memory = 1;
    return q;
}

/* The status of opening an image on 4096 bytes. */
int32_t t_open(const void *image, size_t size)
{
    gemrun_config q = config_of(1);
    gemrun_context_t *ctx = NULL;
    gemrun_status st = gemrun_open_mem(&ctx, image, size, NULL, 0, &q);
    gemrun_destroy(ctx);
    return st;
}

/* Test vectors that passed, or a status. */
int32_t t_replay(const char *path, uint32_t threads)
{
    gemrun_config q = config_of(threads);
    gemrun_context_t *ctx = NULL;
    int32_t st = gemrun_open(&ctx, path, &q);
    st = st == GEMRUN_OK ? gemrun_run_tests(ctx) : st;
    gemrun_destroy(ctx);
    return st;
}

typedef struct log_sum {
    uint32_t positions;
    uint64_t digest; /* FNV-1a over the logits of every position */
} log_sum;

static int add_logits(void *user, uint32_t position, const float *logits, uint32_t count)
{
    log_sum *s = user;
    const unsigned char *p = (const unsigned char *)logits;
    s->positions += position == s->positions;
    for (size_t i = 0; i < count * sizeof *logits; i++)
        s->digest = (s->digest ^ p[i]) * 1099511628211u;
    return 0;
}

/* Evaluate the ids, then sample: steps of ids go to `made`, the digest of the logits to `digest`. */
int32_t t_run(const char *path, const int32_t *ids, size_t count, float temperature, uint32_t top_k,
              float top_p, int32_t *made, uint32_t steps, uint64_t *digest)
{
    gemrun_config q = config_of(2);
    gemrun_context_t *ctx = NULL;
    log_sum s = {0, 14695981039346656037u};
    int32_t st = gemrun_open(&ctx, path, &q);
    st = st == GEMRUN_OK ? gemrun_eval(ctx, ids, count, add_logits, &s) : st;
    gemrun_request r = gemrun_request_default(ctx);
    r.temperature = temperature, r.top_k = top_k, r.top_p = top_p;
    r.seed_set = 1, r.seed = 7;
    for (uint32_t i = 0; st >= 0 && i < steps; i++) {
        made[i] = st = gemrun_sample(ctx, &r);
        st = st >= 0 ? gemrun_decode(ctx, st) : st;
    }
    gemrun_destroy(ctx);
    *digest = s.digest;
    return st < 0 ? st : (int32_t)s.positions;
}

/* What settings of a larger engine come to: 0 kernel, 1 affinity, 2 ban, 3 bias, 4 penalty. */
int32_t t_refused(const char *path, int which)
{
    static const uint32_t id = 3;
    static const float one = 1.0f;
    gemrun_config q = config_of(1);
    gemrun_context_t *ctx = NULL;
    q.kernel = which == 0 ? "scalar" : NULL;
    q.thread_affinity = which == 1;
    int32_t st = gemrun_open(&ctx, path, &q);
    st = st == GEMRUN_OK ? gemrun_decode(ctx, 1) : st;
    gemrun_request r = gemrun_request_default(ctx);
    r.banned = r.bias_ids = &id, r.bias_values = &one;
    r.banned_count = which == 2, r.bias_count = which == 3;
    r.repetition_penalty = which == 4 ? 1.5f : 1.0f;
    st = st >= 0 ? gemrun_sample(ctx, &r) : st;
    gemrun_destroy(ctx);
    return st;
}

const char *t_error(void)
{
    return gemrun_last_error();
}
