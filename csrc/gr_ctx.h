/* gr_ctx.h: the context, shared by gr_api.c (open, facts) and gr_run.c (tokens, text). */
#ifndef GR_CTX_H
#define GR_CTX_H

#include <stdatomic.h>

#include "gr_kern.h"
#include "gr_port.h"

struct gemrun_context { /* at the start of the engine block */
    gr_engine e;
    gr_map image;                  /* mapped by us, else the address is NULL */
    gr_map engine, arena, kv;      /* ours if owns_memory, else parts of the caller's block */
    bool owns_memory;
    _Atomic uint32_t busy, cancel;
    uint64_t pin;                  /* affinity of a thread that runs the model; 0: left alone */
    uint32_t pinned;
    uint64_t locked;               /* bytes */
    gr_rng rng;                    /* lives from a reset to the next */
    uint64_t rng_seed;
    bool rng_ready;
    gemrun_stats last;             /* of the last run */
    gr_kernels kern;               /* of this processor, or the forced one */
    char name[65], family[17], target[17], kernel[40];
};

typedef struct gr_call { /* what a call changes on its thread and puts back */
    uint64_t fp;
} gr_call;

/* Take the context for a call and set up the thread. Fails when it is in use. */
gemrun_status gr_enter(gemrun_context_t *ctx, gr_call *c);
/* Give it back. A negative result leaves its sentence for gemrun_last_error. Returns result. */
int32_t gr_leave(gemrun_context_t *ctx, gr_call *c, int32_t result);
/* Report a failure that belongs to no context. Returns the code. */
gemrun_status gr_report(const gr_error *e, const char *object);
/* The same for an argument; GR_F_NONE: a null pointer. */
gemrun_status gr_refuse(gr_field field, uint64_t wanted, uint64_t found);
/* Copy a caller's struct, which begins with its own size, into ours of `known` bytes: a shorter
 * one, of an older header, is filled up with zeros, a longer one must be zero behind ours. Nothing
 * is read beyond the size it states. */
gemrun_status gr_take_struct(void *out, uint32_t known, const void *given, gr_error *e);

#endif
