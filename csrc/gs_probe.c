/* gs_probe.c: what KV heads would lose if they kept less (gs_probe.h). */
#include "gs_probe.h"

#include <stdlib.h>

#include "gr_ctx.h"
#include "gr_model.h"

enum { BUDGETS = 8 };

struct gs_probe {
    gemrun_context_t *ctx;
    gb_kv_unit units[BUDGETS];
    uint32_t budgets, layers, heads, dim, every, samples;
    const float *gram;
    float *figures;
};

float gs_square(const float *gram, uint32_t ld, const float *x, uint32_t dim)
{
    float sum = 0.0f;
    for (uint32_t i = 0; i < dim; i++) {
        const float *row = gram + (size_t)i * ld;
        float lanes[16] = {0}, dot = 0.0f;
        uint32_t k = 0;
        for (; k + 16 <= dim; k += 16)
            for (uint32_t j = 0; j < 16; j++)
                lanes[j] += row[k + j] * x[k + j];
        for (; k < dim; k++)
            dot += row[k] * x[k];
        for (uint32_t j = 0; j < 16; j++)
            dot += lanes[j];
        sum += dot * x[i];
    }
    return sum;
}

static float sum_of(const float *x, uint32_t count)
{
    float sum = 0.0f;
    for (uint32_t i = 0; i < count; i++)
        sum += x[i];
    return sum;
}

static void look(void *user, const gr_watched *w)
{
    gs_probe *p = user;
    if ((w->position + 1) % p->every != 0 || w->layer >= p->layers || w->head >= p->heads ||
        p->ctx->e.v.layers[w->layer].window != 0)
        return;
    uint32_t sample = w->position / p->every, width = 1 + 2 * p->budgets, dim = p->dim;
    size_t at = ((size_t)sample * p->layers + w->layer) * p->heads + w->head;
    float *out = p->figures + at * width, kept[GB_MAX_HEAD_DIM];
    const float *gram = p->gram + ((size_t)w->layer * p->heads + w->head) * dim * dim;
    float total = sum_of(w->weights, w->position + 1);
    out[0] = gs_square(gram, dim, w->out, dim);
    for (uint32_t b = 0; b < p->budgets; b++) { /* before the weights are gone */
        gr_seen seen = gr_kv_unit_seen(&p->units[b], 0, w->position);
        float hidden = sum_of(w->weights + seen.sink, seen.from - seen.sink);
        out[1 + p->budgets + b] = seen.sink ? hidden / total : 0.0f;
    }
    for (uint32_t b = 0; b < p->budgets; b++) {
        out[1 + b] = 0.0f;
        if (gr_kv_unit_seen(&p->units[b], 0, w->position).sink == 0)
            continue; /* sees everything */
        gr_attend_as(w, &p->units[b], kept);
        for (uint32_t i = 0; i < dim; i++)
            kept[i] -= w->out[i];
        out[1 + b] = gs_square(gram, dim, kept, dim);
    }
}

gs_probe *gs_probe_new(gemrun_context_t *ctx, const gb_kv_unit *units, uint32_t budgets,
                       const float *gram, uint32_t layers, uint32_t heads, uint32_t dim,
                       uint32_t every)
{
    if (budgets < 1 || budgets > BUDGETS || every < 1 || dim > GB_MAX_HEAD_DIM)
        return NULL;
    gs_probe *p = calloc(1, sizeof *p);
    uint32_t samples = ctx->e.v.conf.context / every + 1;
    size_t count = (size_t)samples * layers * heads * (1 + 2 * budgets);
    float *figures = p ? calloc(count, sizeof *figures) : NULL;
    if (!figures) {
        free(p);
        return NULL;
    }
    *p = (gs_probe){.ctx = ctx, .budgets = budgets, .layers = layers, .heads = heads, .dim = dim,
                    .every = every, .samples = samples, .gram = gram, .figures = figures};
    for (uint32_t b = 0; b < budgets; b++)
        p->units[b] = units[b];
    gemrun_internal_watch(ctx, look, p);
    return p;
}

const float *gs_probe_figures(const gs_probe *p, uint32_t *out_samples)
{
    *out_samples = p->samples;
    return p->figures;
}

void gs_probe_free(gs_probe *p)
{
    if (p) {
        gemrun_internal_watch(p->ctx, NULL, NULL);
        free(p->figures);
        free(p);
    }
}
