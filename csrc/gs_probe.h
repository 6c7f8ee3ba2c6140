/* gs_probe.h: what KV heads would lose if they kept less, for the compiler's cache template.
 *
 * Not public. A probe watches an open artifact without KVMK. Of every token whose position plus one
 * is a multiple of `every`, for each head of a layer without a window and each budget, it tells
 * what the attention output would change by, and how much of the probabilities would be hidden.
 * Each figure is written by one thread, so that nothing depends on how many there are. */
#ifndef GS_PROBE_H
#define GS_PROBE_H

#include <stdint.h>

#include "gr_hooks.h"

typedef struct gs_probe gs_probe;

/* `units`: budgets, [budgets]. `gram` [layers][heads][dim][dim]: a head's part of the output matrix
 * times itself, so that d' gram d is the square of what d becomes; kept by the caller. Figures per
 * head: 1 + 2 * budgets floats: the square of its own output, then per budget the square of the
 * difference, then per budget the hidden share of the probabilities. NULL: no memory, or out of
 * range (budgets 1..8, every at least 1). */
gs_probe *gs_probe_new(gemrun_context_t *ctx, const gb_kv_unit *units, uint32_t budgets,
                       const float *gram, uint32_t layers, uint32_t heads, uint32_t dim,
                       uint32_t every);
/* Figures [samples][layers][heads][1 + 2 * budgets] of the positions since the cache was empty;
 * samples: how many there can be in the context. Layers with a window stay 0. */
const float *gs_probe_figures(const gs_probe *p, uint32_t *out_samples);
void gs_probe_free(gs_probe *p); /* the context is watched no longer */
/* x' gram x of a symmetric gram [dim][ld]. */
float gs_square(const float *gram, uint32_t ld, const float *x, uint32_t dim);

#endif
