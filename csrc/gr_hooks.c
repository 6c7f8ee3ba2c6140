/* gr_hooks.c: what the compiler asks of the engine (gr_hooks.h). Not part of a GR_MINIMAL build. */
#include "gr_hooks.h"

#include "gr_check.h"
#include "gr_ctx.h"

int32_t gemrun_internal_digest(gemrun_context_t *ctx, const uint32_t *prompt,
                               uint32_t prompt_count, uint32_t *out_steps, uint32_t step_count,
                               uint64_t *out_digest)
{
    gemrun_status st = gr_enter(ctx);
    if (st != GEMRUN_OK)
        return st;
    st = gr_replay(ctx, prompt, prompt_count, out_steps, step_count, out_digest, NULL);
    gr_reset(ctx);
    gr_unpin(ctx);
    return gr_leave(ctx, st);
}

int32_t gemrun_internal_hidden(gemrun_context_t *ctx, float *x, uint32_t count, gr_capture capture,
                               void *user)
{
    gemrun_status st = gr_enter(ctx);
    if (st != GEMRUN_OK)
        return st;
    gr_engine *e = &ctx->e;
    if (!x || count > e->context - e->pos) {
        gr_fail(&e->err, x ? GEMRUN_E_FULL : GEMRUN_E_ARGUMENT, 0, gr_add(e->pos, count),
                e->context);
        return gr_leave(ctx, e->err.code);
    }
    e->capture = capture;
    e->capture_user = user;
    for (uint32_t done = 0, n; st == GEMRUN_OK && done < count; done += n) {
        n = count - done < e->chunk ? count - done : e->chunk;
        st = gr_forward_hidden(e, x + (size_t)done * e->v.conf.hidden, n);
    }
    e->capture = NULL;
    if (st != GEMRUN_OK)
        gr_reset(ctx);
    return gr_leave(ctx, st != GEMRUN_OK ? (int32_t)st : (int32_t)e->pos);
}
