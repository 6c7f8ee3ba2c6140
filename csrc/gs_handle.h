/* gs_handle.h: inside of a handle, shared by gs_handle.c, gs_channel.c. */
#ifndef GS_HANDLE_H
#define GS_HANDLE_H

#include <pthread.h>
#include <stdbool.h>

#include "gemrun_thermal.h"
#include "gs_thermal.h"

enum { GS_DIGEST = 65 }; /* bytes of a SHA-256 in hexadecimal digits, its end included */

typedef struct gs_facts { /* of a model, for the daemon; they outlive it */
    char name[65], family[17], target[17], kernel[40];
    char digest[GS_DIGEST]; /* as the daemon's store names its file; empty: the program's own */
    uint32_t context, kv_size, kv_type, has_chat, threads;
    uint32_t layout; /* of the KV cache: equal for equal context, type and shape */
    uint64_t ram_total, ram_kv;
    uint64_t locked, unlocked; /* bytes kept from being paged out, and those that are not */
    gemrun_request request; /* its defaults */
} gs_facts;

typedef struct gs_model { /* an open artifact; freed by whoever leaves it last */
    gemrun_context_t *ctx;
    bool cancelled;   /* the request on it is to end */
    gs_facts facts;
    gb_ladder ladder; /* what it does by itself when it is told a temperature */
    uint32_t chunk;   /* tokens of a prefill step, as opened */
} gs_model;

typedef struct gs_share { /* how much of the time, and of the threads, steps may take */
    uint32_t duty;     /* thousandths; 1000: all, 0: none */
    uint32_t threads;  /* 0: as opened */
} gs_share;

typedef struct gs_shares {
    gs_share decode, prefill;
} gs_shares;

typedef struct gs_pace {
    gs_shares own, daemon; /* the program's, the daemon's .. */
    gs_shares heat, now;   /* .. the ladder's while there is no daemon, and the lowest of all */
    uint64_t since;    /* begin of the step in flight, or of the time without a request */
    uint64_t used;     /* processor time of the caller's thread at the begin of the step */
    int64_t owed;      /* nanoseconds of sleep; below 0: slept ahead */
} gs_pace;

typedef struct gs_heat { /* what the ladder says, of the model in use or of the last one */
    gb_ladder ladder;
    gb_rung rung;
    uint32_t level, threads, chunk; /* the last two as opened */
} gs_heat;

typedef struct gs_waiter { /* a request that waits for its turn, on its caller's stack */
    struct gs_waiter *next;
} gs_waiter;

typedef struct gs_source { /* what a model is opened from */
    char *path;             /* NULL: nothing is here */
    int file;               /* descriptor that the path names, or -1 */
    char digest[GS_DIGEST]; /* as in gs_facts */
} gs_source;

struct gs_channel;

struct gemrun_handle {
    pthread_mutex_t lock;
    pthread_cond_t changed;  /* a turn ended, a pace is new, the handle closes, a caller left */
    gs_model *model;         /* of the next request; NULL: disabled */
    gs_model *riding;        /* of the request inside, replaced or not; NULL: none is inside */
    gs_waiter *queue;        /* requests that wait, first come first served */
    gs_pace pace;
    gs_climb climb;          /* by the temperature that the program tells */
    gs_heat heat;
    gemrun_config config;
    char *kernel;            /* the text that config points to */
    gs_source newest;        /* read under changing, changed under the lock too .. */
    gs_source before;        /* .. as this one: what a rollback opens */
    gs_facts facts;          /* its facts, kept while it is disabled */
    bool closing;
    bool asleep;             /* a step waits for its pace */
    uint32_t inside;         /* callers that still use the handle: close waits for them */
    uint64_t requests, failed, replaced, steps, tokens;
    uint64_t faults;         /* of the failed ones, those that are not the caller's mistake */
    gemrun_stats last;
    pthread_mutex_t changing;  /* one replace, disable or enable at a time */
    pthread_mutex_t attaching; /* one attach or detach at a time */
    struct gs_channel *channel;
};

uint64_t gs_now(void); /* nanoseconds of a clock that never jumps */
/* Set the calling thread's error text. Returns the code. */
gemrun_status gs_refuse(gemrun_status code, const char *object, const char *what);
/* Are both contexts of the same artifact, with the same layout of the cache? (gs_session.c) */
bool gs_one_artifact(const gemrun_context_t *one, const gemrun_context_t *other);
/* gemrun_replace by a file of the daemon's store, which may lie where our user may not look: by its
 * descriptor (-1: by its path), which is ours from now on, and open for as long as the handle may
 * open the model again. `digest` may be NULL. */
gemrun_status gs_replace_stored(gemrun_handle_t *h, const char *path, int file, const char *digest,
                                const gemrun_replacement *options, gemrun_replace_times *times);
/* The daemon's pace, beside the program's own; the values are in range. */
void gs_pace_by_daemon(gemrun_handle_t *h, gs_shares shares);
#define GS_UNPACED ((gs_shares){{1000, 0}, {1000, 0}})

/* Look at the temperature again, under the handle's lock: the pace is new with it. */
void gs_heed_heat(gemrun_handle_t *h);

bool gs_attached(const gemrun_handle_t *h); /* gs_channel.c; under the handle's lock */

#endif
