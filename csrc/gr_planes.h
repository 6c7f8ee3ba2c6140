/* gr_planes.h: the head by its high plane first. Not part of a GR_MINIMAL build. */
#ifndef GR_PLANES_H
#define GR_PLANES_H

#include <stdatomic.h>

#include "gr_internal.h"

enum {
    GR_KEEP = 64,  /* best tokens that a request may ask for, at most */
    GR_POOL = 2 * GR_KEEP, /* rows whose exact logits set the bar */
    GR_STEPS = 12, /* groups whose low nibbles may come into the scores one by one */
};
#define GR_MARGIN 6.0f /* spreads of a score that no row exceeds: measured, see NUMERICS.md */

typedef struct gr_ranked {
    float z;
    uint32_t row;
} gr_ranked;

typedef struct gr_ranking { /* the best, best first; of equal ones the lower row */
    uint32_t count, most;
    gr_ranked at[GR_POOL];
} gr_ranking;

typedef struct gr_planes {
    const gemrun_request *request; /* what the next logits are for; NULL: for anything */
    uint32_t most;                 /* a request for more of the best tokens takes the full head */
    float margin;
    uint64_t heads, candidates;    /* screened in this run, and rows that reached the bar; .. */
    uint32_t most_candidates;      /* .. most of them in one */
    /* of one token, made by serial steps; NUMERICS.md, 6.1 */
    uint32_t keep, steps;
    float centre, bar, reach[GR_STEPS + 1];
    uint32_t group[GR_STEPS]; /* of inputs, those with most energy */
    gr_ranking best[GB_MAX_THREADS]; /* by score, of the rows that a thread has seen */
    _Atomic uint32_t found; /* candidates */
} gr_planes;

#endif
