/* gr_ctx.h: the context, shared by gr_api.c (open, close), gr_facts.c, gr_run.c (token ids),
 * gr_generate.c (text) and gr_hooks.c. */
#ifndef GR_CTX_H
#define GR_CTX_H

#include <stdatomic.h>

#include "gr_kern.h"
#include "gr_port.h"
#ifndef GR_MINIMAL
#include "gr_planes.h"
#endif

static inline bool gr_finite(float x)
{
    return (gr_bits(x) & GR_EXPONENT) != GR_EXPONENT;
}

struct gemrun_context { /* at the start of the engine block */
    gr_engine e;
    gr_map image;                  /* mapped by us, else the address is NULL */
    gr_map engine, arena, kv;      /* ours if owns_memory, else parts of the caller's block */
    bool owns_memory;
    _Atomic uint32_t busy, cancel;
    uint64_t fp;                   /* what the call inside has changed on its thread */
    uint64_t pin;                  /* affinity of a thread that runs the model; 0: left alone */
    uint32_t pinned;
    uint64_t locked;               /* bytes */
    gr_rng rng;                    /* lives from a reset to the next */
    uint64_t rng_seed;
    bool rng_ready;
    gemrun_stats last;             /* of the last run */
    gr_kernels kern;               /* of this processor, or the forced one */
    char name[65], family[17], target[17], kernel[40];
#ifndef GR_MINIMAL
    gr_planes planes;              /* of a head in two planes */
    uint64_t control[64];          /* zeroed by open: gemrun_control's own (gs_thermal.c) */
#endif
};

/* Take the context for a call and set up the thread. Fails when it is in use. */
gemrun_status gr_enter(gemrun_context_t *ctx);
/* Give it back. A negative result leaves its sentence for gemrun_last_error. Returns result. */
int32_t gr_leave(gemrun_context_t *ctx, int32_t result);
/* Report a failure that belongs to no context. Returns the code. */
gemrun_status gr_report(const gr_error *e, const char *object);
/* The same for an argument; GR_F_NONE: a null pointer. */
gemrun_status gr_refuse(gr_field field, uint64_t wanted, uint64_t found);
/* Copy a caller's struct, which begins with its own size, into ours of `known` bytes: a shorter
 * one, of an older header, is filled up with zeros. What we do not know must be zero: bytes from
 * `used` to `end`, the reserved ones, and what a longer one has behind ours. Nothing is read beyond
 * the size it states; padding is not looked at. */
gemrun_status gr_take_struct(void *out, uint32_t known, size_t used, size_t end,
                             const void *given, gr_error *e);
#define GR_RESERVED(type) \
    offsetof(type, reserved), offsetof(type, reserved) + sizeof(((type *)0)->reserved)

/* ---- steps (gr_run.c) ---- */
enum { GR_MAX_LIST = 4096, GR_MAX_STOPS = 8, GR_MAX_STOP = 128 }; /* limits of a request */

typedef struct gr_run { /* what a run of steps is told, and why it ended */
    gemrun_logits_fn on_logits; /* sees the logits of every position; NULL: of none */
    gemrun_step_fn on_step;     /* before every step; or NULL */
    void *user;
    uint32_t finish;
    uint64_t start, deadline_ns; /* time of the call, and what it may take from there; 0: all */
} gr_run;

void gr_reset(gemrun_context_t *ctx);
/* Take the request as it is now into `q`, which lives as long as the call. */
gemrun_status gr_check_request(gr_engine *e, const gemrun_request *from, gemrun_request *q);
/* The prompt or the cache has no room for `tokens` tokens. Returns the code. */
gemrun_status gr_no_room(gr_engine *e, gemrun_status code, uint64_t tokens);
gemrun_status gr_check_ids(gr_engine *e, const uint32_t *ids, size_t count); /* E_TOKEN */
/* Append ids by chunks. `r` (NULL: nothing interrupts) learns why it stopped early. The caller
 * resets the cache after a failure behind the first chunk: what it overwrote is gone. */
gemrun_status gr_append(gemrun_context_t *ctx, const uint32_t *ids, uint32_t count, gr_run *r);
gemrun_status gr_draw(gemrun_context_t *ctx, const gemrun_request *q, uint32_t *out_id);
/* Greedy steps from an empty cache. `steps` is filled in. `r` as in gr_append. */
gemrun_status gr_replay(gemrun_context_t *ctx, const uint32_t *prompt, uint32_t prompt_count,
                        uint32_t *steps, uint32_t step_count, uint64_t *out_digest, gr_run *r);
/* gemrun_run_tests with a pace: `on_step` (or NULL) before every step. GEMRUN_E_STATE where it, or
 * a cancel, ended them. */
int32_t gr_run_tests(gemrun_context_t *ctx, gemrun_step_fn on_step, void *user);

/* ---- speculation (gr_spec.c) ---- */
enum { GR_DRAFT = GB_HIDDEN_ROWS - 2 }; /* ids drafted in a step, at most */

typedef struct gr_draft { /* a run's drafts */
    uint32_t most;        /* ids in a draft; 0: every step is of one token */
    uint32_t limit;       /* of the next one: it grows while drafts are right */
    uint32_t ids[GR_DRAFT + 1]; /* of the step in flight: the newest token, then its draft */
    uint32_t count, used; /* tokens of it; and how many are in the cache */
    uint32_t rest;        /* tokens until drafts are tried again */
    int32_t credit;       /* what drafts have won, in half steps */
    uint64_t drafted, right; /* ids, in all */
} gr_draft;

/* Drafts of at most `most` ids; none where the artifact has no room for their rows. */
void gr_begin_drafts(const gr_engine *e, gr_draft *d, uint32_t most);
/* Logits of the token after `id`, as by gr_forward(e, &id, 1, 1, ..). The cache ends at `id`. */
gemrun_status gr_step(gr_engine *e, gr_draft *d, uint32_t id);

/* ---- what a minimal build has not; there a setting that needs it is refused ---- */
#ifndef GR_MINIMAL
/* gr_facts.c: names for people; the kernels of this processor, or those of a name. */
void gr_copy_names(gemrun_context_t *ctx);
gemrun_status gr_take_kernels(gemrun_context_t *ctx, const char *wanted);
/* gr_cores.c: the config's affinity is checked; bind the calling thread (1: it is), for as long as
 * steps follow each other; a whole run gives it its cores back. */
gemrun_status gr_take_cores(gemrun_context_t *ctx, const gemrun_config *q);
uint32_t gr_bind(const gemrun_context_t *ctx);
void gr_unpin(const gemrun_context_t *ctx);
/* gr_adjust.c: bans, biases and stop strings are checked; the logits are changed in place. */
gemrun_status gr_check_lists(gr_engine *e, const gemrun_request *q);
gemrun_status gr_adjust(gr_engine *e, const gemrun_request *q, float *logits, uint32_t rows);
/* gr_planes.c: by the config's head, from the high plane first or always in full. */
void gr_take_head(gemrun_context_t *ctx, const gemrun_config *q);
/* gr_head.c: all logits of the last token, where only the best were wanted. False: not finite. */
bool gr_head_all(gr_engine *e);
/* gr_generate.c: why a run must end before its next step. */
uint32_t gr_interrupted(gemrun_context_t *ctx, const gr_run *r);
/* Ids of a text; with flags bit 0 bos first if the model wants it and it is not there. Returns how
 * many there are, also where only `room` are written, or a status. */
int64_t gr_encode_text(gr_engine *e, const char *text, size_t size, uint32_t flags, uint32_t *ids,
                       size_t room);
/* The same of a conversation, into GB_BUF_PROMPT: up to one more than the compiled context. */
int64_t gr_encode_chat(gr_engine *e, const gemrun_message *messages, size_t count);
/* The run of a checked request from `count` ids in GB_BUF_PROMPT; its time is from `start`. Returns
 * the tokens made, or a status: then the cache is empty. */
int32_t gr_generate(gemrun_context_t *ctx, uint32_t count, const gemrun_request *q,
                    int32_t *tokens, uint64_t start);
#else
#define gr_copy_names(ctx) ((void)(ctx))
#define gr_unpin(ctx) ((void)(ctx))
#define gr_adjust(e, q, logits, rows) GEMRUN_OK
#define gr_interrupted(ctx, r) ((r)->finish)
#define gr_take_head(ctx, q) ((void)(ctx))
#define gr_head_all(e) true
static inline uint32_t gr_bind(const gemrun_context_t *ctx)
{
    return (void)ctx, 0;
}

static inline gemrun_status gr_take_kernels(gemrun_context_t *ctx, const char *wanted)
{
    return wanted ? gr_fail(&ctx->e.err, GEMRUN_E_KERNEL, 0, 0, 0) : GEMRUN_OK;
}

static inline gemrun_status gr_take_cores(gemrun_context_t *ctx, const gemrun_config *q)
{
    return gr_fail(&ctx->e.err, GEMRUN_E_THREADS, GR_F_AFFINITY, 0, q->thread_affinity);
}

static inline gemrun_status gr_check_lists(gr_engine *e, const gemrun_request *q)
{
    bool changes = q->banned_count || q->bias_count || q->repetition_penalty != 1.0f;
    return changes ? gr_fail(&e->err, GEMRUN_E_FEATURE, 0, 0, 0) : GEMRUN_OK;
}
#endif

#endif
