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

int32_t gemrun_internal_units(gemrun_context_t *ctx, const gb_kv_unit *units, uint32_t count)
{
    gemrun_status st = gr_enter(ctx);
    if (st != GEMRUN_OK)
        return st;
    gr_view *v = &ctx->e.v;
    size_t at = (size_t)((const uint8_t *)v->layers - ctx->engine.address);
    gb_layer *layers = (gb_layer *)(void *)(ctx->engine.address + at); /* the engine's own copy */
    uint32_t all = 0;
    for (uint32_t i = 0; i < v->layer_count; i++) {
        layers[i].unit_first = count ? all : 0;
        all += layers[i].kv_heads;
    }
    if (count != 0 && count != all)
        return gr_leave(ctx, gr_fail(&ctx->e.err, GEMRUN_E_ARGUMENT, GR_F_NONE, all, count));
    v->units = count ? units : NULL;
    v->pin_tokens = 0; /* its keys and values are those of heads that see everything */
    gr_reset(ctx);
    return gr_leave(ctx, st);
}

void gemrun_internal_watch(gemrun_context_t *ctx, gr_watch watch, void *user)
{
    ctx->e.watch = watch;
    ctx->e.watch_user = user;
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
