/* gs_values.c: what KV heads would lose if their keys or values had 4 bits (gs_values.h). */
#include "gs_values.h"

#include <stdlib.h>

#include "gr_ctx.h"
#include "gr_model.h"
#include "gs_probe.h"

enum { FIGURES = 3, LANES = 16 };

struct gs_values {
    gemrun_context_t *ctx;
    uint32_t layers, heads, dim, every, samples, flags;
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
static void change_by_values(const gr_engine *e, const gr_watched *w, float *change)
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

/* ---- keys ---- */

/* What fewer bits change in a key [dim] that is rotated already, in place. */
static void change_of_key(const gr_engine *e, float *restrict key, uint32_t dim, uint32_t group)
{
    int8_t codes[GB_MAX_HEAD_DIM];
    uint16_t scales[GB_MAX_HEAD_DIM];
    e->kern->quantise(key, dim, group, codes, scales);
    for (uint32_t d = 0; d < dim; d += group) {
        float scale = gr_bf16(scales[d / group]);
        for (uint32_t i = d; i < d + group; i++)
            key[i] = scale * (float)((codes[i] + 127) / 17 * 17 - 119) - key[i];
    }
}

static void as_floats(const int8_t *restrict codes, const uint16_t *scales, uint32_t dim,
                      uint32_t group, float *restrict x)
{
    for (uint32_t d = 0; d < dim; d += group) {
        float scale = gr_bf16(scales[d / group]);
        for (uint32_t i = d; i < d + group; i++)
            x[i] = scale * (float)codes[i];
    }
}

static float product(const float *restrict x, const float *restrict y, uint32_t dim)
{
    float lanes[LANES] = {0}, sum = 0.0f;
    for (uint32_t d = 0; d < dim; d += LANES)
        for (uint32_t i = 0; i < LANES; i++)
            lanes[i] += x[d + i] * y[d + i];
    for (uint32_t i = 0; i < LANES; i++)
        sum += lanes[i];
    return sum;
}

/* The query of a watched head, rotated. */
static void query_of(const gr_engine *e, const gr_watched *w, float *query)
{
    const gb_layer *l = &e->v.layers[w->layer];
    uint32_t dim = l->head_dim, group = l->kv_group;
    size_t row = (size_t)w->token * l->heads + w->head;
    size_t codes = gr_round_up((size_t)e->v.conf.chunk * l->heads * dim, GB_LINE);
    const uint16_t *scales = (const uint16_t *)(const void *)(e->buf[GB_BUF_Q] + codes);
    as_floats((const int8_t *)e->buf[GB_BUF_Q] + row * dim, scales + row * (dim / group), dim,
              group, query);
    gr_kv_rotate(query, dim, true);
}

/* Of the head's output [head_dim]: its scores move, and with them the shares of values. A soft-cap
 * would make that less. */
static void change_by_keys(const gr_engine *e, const gr_watched *w, float *change)
{
    enum { MOST = 30 }; /* that a score moves up: a sum of such weights is finite */
    const gb_layer *l = &e->v.layers[w->layer];
    uint32_t head = w->head / (l->heads / l->kv_heads), dim = l->head_dim, group = l->kv_group;
    float total = 0.0f, query[GB_MAX_HEAD_DIM], key[GB_MAX_HEAD_DIM], value[GB_MAX_HEAD_DIM];
    memset(change, 0, dim * sizeof *change);
    query_of(e, w, query);
    gr_span s;
    for (uint32_t at = w->first; at <= w->position; at += s.count) {
        s = gr_kv_span(e, l, head, at, w->position + 1);
        for (uint32_t p = 0; p < s.count; p++) {
            float weight = w->weights[at - w->first + p];
            if (weight == 0.0f)
                continue; /* before the window */
            size_t codes = p * s.stride, scales = p * s.scale_stride;
            as_floats((const int8_t *)s.k + codes, s.ks + scales, dim, group, key);
            gr_kv_rotate(key, dim, false);
            change_of_key(e, key, dim, group);
            float more = l->score_scale * product(query, key, dim);
            weight *= gr_expf(more < MOST ? more : MOST);
            total += weight;
            as_floats((const int8_t *)s.v + codes, s.vs + scales, dim, group, value);
            for (uint32_t d = 0; d < dim; d++)
                change[d] += weight * value[d];
        }
    }
    for (uint32_t d = 0; d < dim; d++)
        change[d] = change[d] / total - w->out[d];
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
    float *figures = p->figures + FIGURES * at;
    if (dim > p->dim || dim % LANES)
        return;
    figures[0] = gs_square(gram, p->dim, w->out, dim);
    if (p->flags & GB_UNITF_VALUE4) {
        change_by_values(e, w, change);
        figures[1] = gs_square(gram, p->dim, change, dim);
    }
    if (p->flags & GB_UNITF_KEY4) {
        change_by_keys(e, w, change);
        figures[2] = gs_square(gram, p->dim, change, dim);
    }
}

gs_values *gs_values_new(gemrun_context_t *ctx, const float *gram, uint32_t layers, uint32_t heads,
                         uint32_t dim, uint32_t every, uint32_t flags)
{
    const gr_view *v = &ctx->e.v;
    if (every < 1 || layers > v->layer_count || v->conf.kv_type != GB_KV_INT8 || v->units)
        return NULL;
    gs_values *p = calloc(1, sizeof *p);
    uint32_t samples = v->conf.context / every + 1;
    float *figures = p ? calloc((size_t)samples * layers * heads * FIGURES, sizeof *figures) : NULL;
    if (!figures) {
        free(p);
        return NULL;
    }
    *p = (gs_values){.ctx = ctx, .layers = layers, .heads = heads, .dim = dim, .every = every,
                     .samples = samples, .flags = flags, .gram = gram, .figures = figures};
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
