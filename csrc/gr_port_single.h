/* gr_port_single.h: what ports to machines with one thread have in common: the team is whoever
 * calls, and one core runs the plain kernels. Included once, by such a port. */
#ifndef GR_PORT_SINGLE_H
#define GR_PORT_SINGLE_H

#include "gr_port.h"

/* ---- machine ---- */

uint32_t gr_port_cores(const char *root)
{
    (void)root;
    return 1;
}

bool gr_port_uneven(const char *root)
{
    (void)root;
    return false;
}

uint32_t gr_port_fast_cores(const char *root)
{
    (void)root;
    return 1;
}

uint64_t gr_port_affinity(void)
{
    return 1;
}

bool gr_port_pin(uint64_t mask)
{
    return mask == 1;
}

void gr_port_unpin(void) {}

uint64_t gr_nth_bit(uint64_t mask, uint32_t n)
{
    for (; n > 0; n--) {
        mask &= mask - 1;
    }
    return mask & (0 - mask);
}

uint32_t gr_port_cpu(void)
{
    return 0; /* plain kernels */
}

void gr_port_features(char *out, size_t capacity)
{
    if (capacity > 0) {
        *out = 0;
    }
}

/* ---- the team: whoever calls ---- */

struct gr_team {
    uint32_t taken; /* units since the last barrier */
};

uint64_t gr_team_bytes(void)
{
    return GB_LINE;
}

void gr_team_barrier(gr_team *team, void (*serial)(void *arg), void *arg)
{
    if (serial) {
        serial(arg);
    }
    team->taken = 0;
}

uint32_t gr_team_take(gr_team *team, uint32_t units)
{
    uint32_t before = team->taken;
    team->taken += units;
    return before;
}

void gr_team_run(gr_team *team, uint32_t threads, gr_body body, void *arg)
{
    (void)threads;
    team->taken = 0;
    body(arg, 0, 1);
    gr_team_barrier(team, NULL, NULL);
}

gemrun_status gr_team_start(gr_team *team, uint32_t threads, uint64_t affinity, gr_error *e)
{
    (void)affinity;
    *team = (gr_team){0};
    return threads == 1 ? GEMRUN_OK : gr_fail(e, GEMRUN_E_THREADS, GR_F_THREADS, 1, threads);
}

void gr_team_stop(gr_team *team)
{
    (void)team;
}

uint32_t gr_team_pinned(const gr_team *team)
{
    (void)team;
    return 0;
}

gr_map gr_team_stack(const gr_team *team, uint32_t worker)
{
    (void)team, (void)worker;
    return (gr_map){0};
}

#endif
