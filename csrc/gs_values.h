/* gs_values.h: what KV heads would lose if their keys or values had 4 bits, for the compiler.
 *
 * Not public. A probe watches an open artifact with an int8 cache in which all have 8 bits. Of
 * every token whose position plus one is a multiple of `every` it tells, for each head, what the
 * attention output would change by. Each figure is written by one thread, so that nothing depends
 * on how many there are. */
#ifndef GS_VALUES_H
#define GS_VALUES_H

#include <stdint.h>

#include "gr_hooks.h"

typedef struct gs_values gs_values;

/* `gram` as in gs_probe.h, `flags`: GB_UNITF_*, what is looked at. Figures per head: the square of
 * its own output, then of the difference that values of 4 bits make, and that keys make; 0 where
 * it is not looked at. NULL: no memory, out of range, or no int8 cache. */
gs_values *gs_values_new(gemrun_context_t *ctx, const float *gram, uint32_t layers, uint32_t heads,
                         uint32_t dim, uint32_t every, uint32_t flags);
/* Figures [samples][layers][heads][3] of the positions since the cache was empty; samples: how many
 * there can be in the context. */
const float *gs_values_figures(const gs_values *p, uint32_t *out_samples);
void gs_values_free(gs_values *p); /* the context is watched no longer */

#endif
