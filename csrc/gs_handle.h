/* gs_handle.h: inside of a handle, shared by gs_handle.c, gs_channel.c. */
#ifndef GS_HANDLE_H
#define GS_HANDLE_H

#include <pthread.h>
#include <stdbool.h>

#include "gemrun_control.h"

typedef struct gs_facts { /* of a model, for the daemon; they outlive it */
    char name[65], family[17], target[17], kernel[40];
    uint32_t context, kv_size, kv_type, has_chat, threads;
    uint64_t ram_total, ram_kv;
} gs_facts;

typedef struct gs_model { /* an open artifact; freed by whoever leaves it last */
    gemrun_context_t *ctx;
    bool taken;       /* a request runs */
    bool cancelled;   /* it is to end */
    bool retired;     /* no longer the handle's */
    gs_facts facts;
} gs_model;

typedef struct gs_share { /* how much of the time, and of the threads, steps may take */
    uint32_t duty;     /* thousandths; 1000: all, 0: none */
    uint32_t threads;  /* 0: as opened */
} gs_share;

typedef struct gs_pace {
    gs_share decode, prefill;
    uint64_t since;    /* begin of the step in flight, or of the time without a request */
    int64_t owed;      /* nanoseconds of sleep; below 0: slept ahead */
} gs_pace;

struct gs_channel;

struct gemrun_handle {
    pthread_mutex_t lock;
    pthread_cond_t changed;  /* a model is free, a pace is new, the handle closes */
    gs_model *model;         /* NULL: disabled */
    gs_pace pace;
    gemrun_config config;
    char *path;              /* of the newest model */
    gs_facts facts;          /* its facts, kept while it is disabled */
    bool closing;
    uint32_t running;        /* requests inside: one, and one more on a replaced model */
    bool asleep;             /* a step waits for its pace */
    uint64_t requests, failed, replaced, steps;
    gemrun_stats last;
    pthread_mutex_t changing; /* one replace, disable or enable at a time */
    struct gs_channel *channel;
};

uint64_t gs_now(void); /* nanoseconds of a clock that never jumps */
/* Set the calling thread's error text. Returns the code. */
gemrun_status gs_refuse(gemrun_status code, const char *object, const char *what);

bool gs_attached(const gemrun_handle_t *h); /* gs_channel.c; under the handle's lock */

#endif
