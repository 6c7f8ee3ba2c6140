/* gr_cores.c: threads on the cores that the caller names. Not part of a GR_MINIMAL build. */
#include "gr_ctx.h"

static uint32_t bit_count(uint64_t mask)
{
    uint32_t n = 0;
    for (; mask != 0; mask &= mask - 1)
        n++;
    return n;
}

gemrun_status gr_take_cores(gemrun_context_t *ctx, const gemrun_config *q)
{
    gr_engine *e = &ctx->e;
    uint32_t bits = bit_count(q->thread_affinity);
    uint64_t allowed = gr_port_affinity();
    if (q->thread_affinity & ~allowed)
        return gr_fail(&e->err, GEMRUN_E_THREADS, GR_F_AFFINITY, allowed, q->thread_affinity);
    if (q->threads > bits)
        return gr_fail(&e->err, GEMRUN_E_THREADS, GR_F_THREADS_PINNED, bits, q->threads);
    e->threads = e->threads > bits ? bits : e->threads;
    ctx->pin = gr_nth_bit(q->thread_affinity, 0);
    return GEMRUN_OK;
}

uint32_t gr_bind(const gemrun_context_t *ctx)
{
    return ctx->pin && gr_port_pin(ctx->pin);
}

void gr_unpin(const gemrun_context_t *ctx)
{
    if (ctx->pin)
        gr_port_unpin();
}
