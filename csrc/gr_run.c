/* gr_run.c: steps on token ids: prefill, decode, sample, evaluate, replay of the test vectors.
 *
 * Between two tokens there is no allocation, no file, no system call but the team's futex and the
 * clock. Nothing is cut silently: what does not fit is an error. */
#include <string.h>

#include "gr_check.h"
#include "gr_ctx.h"
#include "gr_kern.h"

#define FNV_START 14695981039346656037u
#define FNV_PRIME 1099511628211u

void gr_reset(gemrun_context_t *ctx)
{
    gr_kv_reset(&ctx->e);
    ctx->rng_ready = false;
}

/* ---- requests ---- */

gemrun_request gemrun_request_default(const gemrun_context_t *ctx)
{
    gemrun_request q = {.size = sizeof q, .max_tokens = 256, .temperature = 0.3f, .top_k = 64,
                        .top_p = 0.85f, .repetition_penalty = 1.0f};
    if (ctx) {
        const gb_conf *c = &ctx->e.v.conf;
        q.temperature = c->temperature;
        q.top_k = c->top_k;
        q.top_p = c->top_p;
        q.min_p = c->min_p;
        q.repetition_penalty = c->repetition_penalty;
    }
    return q;
}

gemrun_status gr_check_request(gr_engine *e, const gemrun_request *from, gemrun_request *q)
{
    if (gr_take_struct(q, sizeof *q, GR_RESERVED(gemrun_request), from, &e->err) != GEMRUN_OK)
        return GEMRUN_E_ARGUMENT;
    if (q->speculate > GR_DRAFT)
        return gr_fail(&e->err, GEMRUN_E_ARGUMENT, GR_F_SPECULATE, GR_DRAFT, q->speculate);
    if (q->reuse > 1)
        return gr_fail(&e->err, GEMRUN_E_ARGUMENT, GR_F_REUSE, 1, q->reuse);
    if (q->on_full > GEMRUN_FULL_SLIDE)
        return gr_fail(&e->err, GEMRUN_E_ARGUMENT, GR_F_ON_FULL, GEMRUN_FULL_SLIDE, q->on_full);
    if (q->max_tokens < 1 || q->max_tokens > INT32_MAX)
        return gr_fail(&e->err, GEMRUN_E_ARGUMENT, GR_F_MAX_TOKENS, INT32_MAX, q->max_tokens);
    const float given[] = {q->temperature, q->top_p, q->min_p, q->repetition_penalty};
    const bool good[] = {given[0] >= 0 && given[0] <= 100, given[1] > 0 && given[1] <= 1,
                         given[2] >= 0 && given[2] < 1, given[3] > 0 && given[3] <= 100};
    for (uint32_t i = 0; i < sizeof good / sizeof good[0]; i++)
        if (!good[i])
            return gr_fail(&e->err, GEMRUN_E_SAMPLING, GR_F_TEMPERATURE + i, 0, gr_bits(given[i]));
    return gr_check_lists(e, q);
}

/* ---- forward steps ---- */

gemrun_status gr_no_room(gr_engine *e, gemrun_status code, uint64_t tokens)
{
    uint32_t compiled = e->v.conf.context;
    gr_fail(&e->err, code, 0, tokens, e->context);
    e->err.record = e->context < compiled && tokens <= compiled ? compiled : GR_NO_RECORD;
    return code;
}

static int take_logits(void *user, uint32_t position, const float *logits, uint32_t count)
{
    gr_run *r = user;
    if (r->on_logits(r->user, position, logits, count) != 0)
        r->finish = GEMRUN_FINISH_CALLBACK;
    return r->finish != GEMRUN_FINISH_NONE;
}

gemrun_status gr_append(gemrun_context_t *ctx, const uint32_t *ids, uint32_t count, gr_run *r)
{
    gr_engine *e = &ctx->e;
    bool all = r && r->on_logits;
    gr_bind(ctx);
    for (uint32_t done = 0, n; done < count; done += n) {
        if (r && (r->finish = gr_interrupted(ctx, r)) != GEMRUN_FINISH_NONE)
            return GEMRUN_OK;
        n = count - done < e->chunk ? count - done : e->chunk; /* on_step may have changed it */
        uint32_t last = done + n == count;
        gemrun_status st = gr_forward(e, ids + done, n, all ? 2 : last, take_logits, r);
        if (st != GEMRUN_OK) {
            ctx->last.nonfinite_errors += st == GEMRUN_E_NONFINITE;
            if (done > 0)
                gr_reset(ctx);
            return st;
        }
    }
    return GEMRUN_OK;
}

gemrun_status gr_check_ids(gr_engine *e, const uint32_t *ids, size_t count)
{
    uint32_t rows = e->v.conf.vocab_rows;
    for (size_t i = 0; i < count; i++)
        if (ids[i] >= rows)
            return gr_fail(&e->err, GEMRUN_E_TOKEN, GR_F_TOKEN, rows - 1,
                           (uint64_t)(int64_t)(int32_t)ids[i]);
    return GEMRUN_OK;
}

static gemrun_status ids_fit(gr_engine *e, const int32_t *ids, size_t count)
{
    if (count > 0 && !ids)
        return gr_fail(&e->err, GEMRUN_E_ARGUMENT, GR_F_NONE, 0, 0);
    if (count > e->context - e->pos)
        return gr_no_room(e, GEMRUN_E_FULL, gr_add(e->pos, count));
    return gr_check_ids(e, (const uint32_t *)(const void *)ids, count);
}

gemrun_status gr_draw(gemrun_context_t *ctx, const gemrun_request *q, uint32_t *out_id)
{
    uint64_t seed = q->seed_set ? q->seed : 0;
    if (!ctx->rng_ready || ctx->rng_seed != seed) {
        gr_rng_seed(&ctx->rng, seed);
        ctx->rng_seed = seed;
        ctx->rng_ready = true;
    }
    gemrun_status st = gr_sample(&ctx->e, q, &ctx->rng, out_id);
    if (q->bias_count || q->banned_count || q->repetition_penalty != 1.0f || st != GEMRUN_OK)
        ctx->e.logits_valid = false; /* they are no longer the model's */
    ctx->last.nonfinite_errors += st == GEMRUN_E_NONFINITE;
    return st;
}

/* ---- calls ---- */

void gemrun_reset_kv_cache(gemrun_context_t *ctx)
{
    if (gr_enter(ctx) == GEMRUN_OK) {
        gr_reset(ctx);
        gr_unpin(ctx);
        gr_leave(ctx, 0);
    }
}

int32_t gemrun_prefill(gemrun_context_t *ctx, const int32_t *ids, size_t count)
{
    gemrun_status st = gr_enter(ctx);
    if (st != GEMRUN_OK)
        return st;
    st = ids_fit(&ctx->e, ids, count);
    if (st == GEMRUN_OK)
        st = gr_append(ctx, (const uint32_t *)(const void *)ids, (uint32_t)count, NULL);
    return gr_leave(ctx, st != GEMRUN_OK ? (int32_t)st : (int32_t)ctx->e.pos);
}

int32_t gemrun_decode(gemrun_context_t *ctx, int32_t id)
{
    return gemrun_prefill(ctx, &id, 1);
}

int32_t gemrun_sample(gemrun_context_t *ctx, const gemrun_request *request)
{
    gemrun_request q;
    gemrun_status st = gr_enter(ctx);
    if (st != GEMRUN_OK)
        return st;
    uint32_t id = 0;
    st = gr_check_request(&ctx->e, request, &q);
    if (st == GEMRUN_OK && !ctx->e.logits_valid)
        st = gr_fail(&ctx->e.err, GEMRUN_E_STATE, 0, 0, 0);
    if (st == GEMRUN_OK && !gr_head_all(&ctx->e))
        st = gr_fail(&ctx->e.err, GEMRUN_E_NONFINITE, 0, ctx->e.pos, 0);
    st = st == GEMRUN_OK ? gr_draw(ctx, &q, &id) : st;
    return gr_leave(ctx, st != GEMRUN_OK ? (int32_t)st : (int32_t)id);
}

int32_t gemrun_eval(gemrun_context_t *ctx, const int32_t *ids, size_t count, gemrun_logits_fn fn,
                    void *user)
{
    gemrun_status st = gr_enter(ctx);
    if (st != GEMRUN_OK)
        return st;
    gr_run r = {.on_logits = fn, .user = user};
    atomic_store(&ctx->cancel, 0);
    st = fn ? ids_fit(&ctx->e, ids, count)
            : gr_fail(&ctx->e.err, GEMRUN_E_ARGUMENT, GR_F_NONE, 0, 0);
    if (st == GEMRUN_OK)
        st = gr_append(ctx, (const uint32_t *)(const void *)ids, (uint32_t)count, &r);
    gr_unpin(ctx);
    return gr_leave(ctx, st != GEMRUN_OK ? (int32_t)st : (int32_t)ctx->e.pos);
}

static const float *idle_buffer(const gemrun_context_t *ctx, uint32_t kind)
{
    return ctx && ctx->e.logits_valid && !atomic_load(&ctx->busy)
               ? (const float *)(const void *)ctx->e.buf[kind]
               : NULL;
}

const float *gemrun_logits(const gemrun_context_t *ctx, uint32_t *out_count)
{
    gemrun_context_t *own = (gemrun_context_t *)(uintptr_t)ctx;
    const float *p = idle_buffer(ctx, GB_BUF_LOGITS);
    if (p && ctx->e.screened && gr_enter(own) == GEMRUN_OK) {
        p = gr_head_all(&own->e) ? p : NULL;
        gr_leave(own, 0);
    }
    if (out_count)
        *out_count = p ? ctx->e.v.conf.vocab_rows : 0;
    return p;
}

const float *gemrun_embedding(const gemrun_context_t *ctx, uint32_t *out_count)
{
    const float *p = idle_buffer(ctx, GB_BUF_HIDDEN);
    if (out_count)
        *out_count = p ? ctx->e.v.conf.hidden : 0;
    return p;
}

/* ---- test vectors ---- */

static uint64_t digest(const gr_engine *e, uint64_t hash)
{
    const uint8_t *p = e->buf[GB_BUF_LOGITS]; /* little-endian: the reader made sure */
    for (uint64_t i = 0; i < (uint64_t)e->v.conf.vocab_rows * sizeof(float); i++)
        hash = (hash ^ p[i]) * FNV_PRIME;
    return hash;
}

gemrun_status gr_replay(gemrun_context_t *ctx, const uint32_t *prompt, uint32_t prompt_count,
                        uint32_t *steps, uint32_t step_count, uint64_t *out_digest, gr_run *r)
{
    gr_engine *e = &ctx->e;
    gemrun_request q = {.size = sizeof q, .max_tokens = 1, .top_p = 1, .repetition_penalty = 1};
    uint64_t needed = gr_add(prompt_count, step_count);
    gr_reset(ctx);
    if (prompt_count < 1 || needed > e->context)
        return gr_no_room(e, prompt_count < 1 ? GEMRUN_E_PROMPT : GEMRUN_E_FULL,
                          prompt_count < 1 ? 0 : needed);
    gemrun_status st = gr_check_ids(e, prompt, prompt_count);
    st = st == GEMRUN_OK ? gr_append(ctx, prompt, prompt_count, r) : st;
    uint64_t hash = FNV_START;
    for (uint32_t i = 0; st == GEMRUN_OK && !(r && r->finish) && i <= step_count; i++) {
        hash = digest(e, hash);
        if (i < step_count) {
            st = gr_draw(ctx, &q, steps + i);
            st = st == GEMRUN_OK ? gr_append(ctx, steps + i, 1, r) : st;
        }
    }
    *out_digest = hash;
    return st;
}

int32_t gr_run_tests(gemrun_context_t *ctx, gemrun_step_fn on_step, void *user)
{
    gemrun_status st = gr_enter(ctx);
    if (st != GEMRUN_OK)
        return st;
    const gr_view *v = &ctx->e.v;
    gr_run r = {.on_step = on_step, .user = user};
    uint32_t passed = 0;
    atomic_store(&ctx->cancel, 0);
    ctx->e.allowed = 0;
    for (uint32_t i = 0; st == GEMRUN_OK && i < v->test_count; i++) {
        gb_test t;
        uint32_t steps[GB_TEST_STEPS] = {0};
        uint64_t hash = 0;
        memcpy(&t, v->tests + (uint64_t)i * v->test_stride, sizeof t);
        if (t.prompt_count > GB_TEST_PROMPT || t.step_count > GB_TEST_STEPS) {
            st = gr_fail(&ctx->e.err, GEMRUN_E_TEST, 0, GB_TEST_STEPS, t.step_count);
            break; /* the file was changed after it was opened */
        }
        st = gr_replay(ctx, t.prompt, t.prompt_count, steps, t.step_count, &hash, &r);
        if (st == GEMRUN_OK && r.finish) {
            st = gr_fail(&ctx->e.err, GEMRUN_E_STATE, 0, 0, 0);
        } else if (st == GEMRUN_OK) {
            bool same = hash == t.digest && memcmp(steps, t.steps, sizeof steps) == 0;
            st = same ? GEMRUN_OK : gr_fail(&ctx->e.err, GEMRUN_E_TEST_FAILED, 0, t.digest, hash);
            passed += same;
        }
    }
    if (st <= GEMRUN_E_TEST_FAILED && gr_check_weights(v, &ctx->e.err) != GEMRUN_OK)
        st = GEMRUN_E_WEIGHTS_CRC; /* the file is damaged, not the machine */
    ctx->e.allowed = 0;
    gr_reset(ctx);
    gr_unpin(ctx);
    return gr_leave(ctx, st != GEMRUN_OK ? (int32_t)st : (int32_t)passed);
}

int32_t gemrun_run_tests(gemrun_context_t *ctx)
{
    return gr_run_tests(ctx, NULL, NULL);
}
