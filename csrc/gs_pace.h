/* gs_pace.h: what a duty asks for, the same for a handle's pace and for a run by the ladder. */
#ifndef GS_PACE_H
#define GS_PACE_H

#include <stdint.h>

enum { GS_WHOLE = 1000 }; /* a duty of all the time, in thousandths */

/* Sleep that a step of `busy` nanoseconds asks for; duty is above 0. */
static inline int64_t gs_sleep_of(uint32_t duty, uint64_t busy)
{
    return (int64_t)(busy * (GS_WHOLE - duty) / duty);
}

/* The same by what heats: of a step's `busy` nanoseconds those `used` on the processor are to be
 * the share `duty` of the time. What it waited for the processor, or for who reads its text, is
 * rest already; below 0: more of it than was owed. */
static inline int64_t gs_rest_of(uint32_t duty, uint64_t busy, uint64_t used)
{
    return duty < GS_WHOLE ? (int64_t)(used * GS_WHOLE / duty) - (int64_t)busy : 0;
}

/* What stays owed of some sleep: at most 10 s, and 0.2 s ahead, so that no burst follows a long
 * pause. Nanoseconds. */
static inline int64_t gs_owed(int64_t ns)
{
    const int64_t credit = 200 * 1000000, debt = 10000LL * 1000000;
    return ns < -credit ? -credit : ns > debt ? debt : ns;
}

#endif
