/* gr_facts.c: names and facts of an artifact and its engine. Not part of a GR_MINIMAL build. */
#include <string.h>

#include "gr_ctx.h"

void gr_copy_names(gemrun_context_t *ctx)
{
    const gr_view *v = &ctx->e.v; /* the block was zeroed: all of them end with a zero byte */
    memcpy(ctx->name, v->conf.name, sizeof v->conf.name);
    memcpy(ctx->family, v->conf.family, sizeof v->conf.family);
    memcpy(ctx->target, v->header.target, sizeof v->header.target);
}

gemrun_status gr_take_kernels(gemrun_context_t *ctx, const char *wanted)
{
    gr_kernels *k = &ctx->kern;
    if (!gr_kernels_pick(k, wanted ? wanted : gr_port_kernel()))
        return gr_fail(&ctx->e.err, GEMRUN_E_KERNEL, 0, 0, 0);
    size_t first = strlen(k->gemv_name), second = strlen(k->gemm_name); /* a name has at most 15 */
    memcpy(ctx->kernel, k->gemv_name, first);
    if (k->gemv_name != k->gemm_name) {
        ctx->kernel[first] = '/';
        memcpy(ctx->kernel + first + 1, k->gemm_name, second);
    }
    ctx->e.kern = k;
    return GEMRUN_OK;
}

gemrun_status gemrun_get_info(const gemrun_context_t *ctx, gemrun_info *out)
{
    if (!ctx || !out || out->size != sizeof *out)
        return gr_refuse(ctx && out ? GR_F_SIZE : GR_F_NONE, sizeof *out, out ? out->size : 0);
    const gr_view *v = &ctx->e.v; /* nothing here changes after open */
    const struct gb_tokn *t = v->tok.h;
    *out = (gemrun_info){
        .size = sizeof *out, .vocab_rows = v->conf.vocab_rows, .context = v->conf.context,
        .chunk = v->conf.chunk, .layers = v->layer_count, .hidden = v->conf.hidden,
        .threads_planned = v->conf.threads, .has_chat = v->has_chat, .stop_id_count = t->n_stop,
        .stop_ids = v->tok.stop, .bos_id = t->bos == GB_TOK_NONE ? -1 : (int32_t)t->bos,
        .kv_type = v->conf.kv_type, .pinned_prompt = v->pin_tokens, .name = ctx->name,
        .family = ctx->family, .target = ctx->target, .kernel = ctx->kernel};
    return GEMRUN_OK;
}

uint32_t gemrun_regions(const gemrun_context_t *ctx, gemrun_region *out, uint32_t capacity)
{
    if (!ctx || (!out && capacity > 0))
        return 0;
    const gr_map fixed[] = {ctx->image, ctx->arena, ctx->kv, ctx->engine};
    static const char *const names[] = {"weights+tables", "arena", "kv", "engine"};
    uint32_t count = 0;
    for (uint32_t i = 0; i < 4 + ctx->e.threads - 1; i++) {
        gr_map m = i < 4 ? fixed[i] : gr_team_stack(ctx->e.team, i - 3);
        if (m.address) {
            if (count < capacity)
                out[count] = (gemrun_region){i < 4 ? names[i] : "stacks", m.address,
                                             (size_t)m.bytes};
            count++;
        }
    }
    return count;
}

const char *gemrun_version(void)
{
    return GEMRUN_VERSION;
}
