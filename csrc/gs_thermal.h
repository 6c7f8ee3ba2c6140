/* gs_thermal.h: the ladder of an artifact, and going up and down on it. Time comes from outside. */
#ifndef GS_THERMAL_H
#define GS_THERMAL_H

#include <stdbool.h>

#include "gr_ctx.h"

typedef struct gs_climb { /* zeroed: nothing was told */
    bool told;        /* a temperature came, good or not */
    bool known;       /* celsius is one */
    bool fault;       /* it is not believed now */
    bool moved;       /* changed counts */
    bool doubted;     /* faulted counts */
    uint32_t good;    /* temperatures in order since the last one that was not */
    uint32_t level;   /* by the temperature; a fault may hold a higher one */
    float celsius;    /* the last plausible one */
    uint64_t read, changed, faulted, asked; /* when: nanoseconds */
} gs_climb;

/* The ladder that the artifact carries, or the usual one above its threshold. False: it breaks a
 * rule of FORMAT.md, 2.9. */
bool gs_ladder_of(const gr_view *v, gb_ladder *out);
/* A temperature came. */
void gs_climb_tell(gs_climb *c, float celsius, uint64_t now);
/* The rung in force now, going up or down if it is time. Its number is in *level. */
gb_rung gs_climb_rung(gs_climb *c, const gb_ladder *l, uint64_t now, uint32_t *level);
/* A share of a number that is at least 1; the result is, too. */
uint32_t gs_share_of(uint32_t whole, uint32_t thousandths);

#endif
