/* gs_values.c: what KV heads would lose if their values had 4 bits (gs_values.h). */
#include "gs_values.h"

#include <stdlib.h>

#include "gr_ctx.h"
#include "gr_model.h"
#include "gs_probe.h"

struct gs_values {
    gemrun_context_t *ctx;
    uint32_t layers, heads, dim, every, samples;
    const float *gram;
    float *figures;
};

/* change += weight times what fewer bits change in one position's values (NUMERICS.md, 7). */
static void add_change(float *restrict change, const int8_t *restrict codes, uint32_t count,
                       float weight)
{
    for (uint32_t i = 0; i < count; i++) {
        int32_t code = codes[i], level = (code + 127) / 17;
        change[i] += weight * (float)(17 * level - 119 - code);
    }
}

/* Of the head's output [head_dim]. */
static void change_of(const gr_engine *e, const gr_watched *w, float *change)
{
    const gb_layer *l = &e->v.layers[w->layer];
    uint32_t head = w->head / (l->heads / l->kv_heads), dim = l->head_dim, group = l->kv_group;
    float total = 0.0f;
    memset(change, 0, dim * sizeof *change);
    gr_span s;
    for (uint32_t at = w->first; at <= w->position; at += s.count) {
        s = gr_kv_span(e, l, head, at, w->position + 1);
        for (uint32_t p = 0; p < s.count; p++) {
            float weight = w->weights[at - w->first + p]; /* 0 before the window */
            const int8_t *codes = (const int8_t *)s.v + p * s.stride;
            const uint16_t *scales = s.vs + p * s.scale_stride;
            total += weight;
            for (uint32_t d = 0; d < dim; d += group)
                add_change(change + d, codes + d, group, weight * gr_bf16(scales[d / group]));
        }
    }
    for (uint32_t d = 0; d < dim; d++)
        change[d] /= total;
}

static void look(void *user, const gr_watched *w)
{
    gs_values *p = user;
    if ((w->position + 1) % p->every != 0 || w->layer >= p->layers || w->head >= p->heads)
        return;
    const gr_engine *e = &p->ctx->e;
    uint32_t sample = w->position / p->every, dim = e->v.layers[w->layer].head_dim;
    size_t at = ((size_t)sample * p->layers + w->layer) * p->heads + w->head;
    const float *gram = p->gram + ((size_t)w->layer * p->heads + w->head) * p->dim * p->dim;
    float change[GB_MAX_HEAD_DIM];
    if (dim > p->dim)
        return;
    change_of(e, w, change);
    p->figures[2 * at] = gs_square(gram, p->dim, w->out, dim);
    p->figures[2 * at + 1] = gs_square(gram, p->dim, change, dim);
}

gs_values *gs_values_new(gemrun_context_t *ctx, const float *gram, uint32_t layers, uint32_t heads,
                         uint32_t dim, uint32_t every)
{
    const gr_view *v = &ctx->e.v;
    if (every < 1 || layers > v->layer_count || v->conf.kv_type != GB_KV_INT8 || v->units)
        return NULL;
    gs_values *p = calloc(1, sizeof *p);
    uint32_t samples = v->conf.context / every + 1;
    float *figures = p ? calloc((size_t)samples * layers * heads * 2, sizeof *figures) : NULL;
    if (!figures) {
        free(p);
        return NULL;
    }
    *p = (gs_values){.ctx = ctx, .layers = layers, .heads = heads, .dim = dim, .every = every,
                     .samples = samples, .gram = gram, .figures = figures};
    gemrun_internal_watch(ctx, look, p);
    return p;
}

const float *gs_values_figures(const gs_values *p, uint32_t *out_samples)
{
    *out_samples = p->samples;
    return p->figures;
}

void gs_values_free(gs_values *p)
{
    if (p) {
        gemrun_internal_watch(p->ctx, NULL, NULL);
        free(p->figures);
        free(p);
    }
}
