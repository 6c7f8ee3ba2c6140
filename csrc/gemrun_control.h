/* gemrun_control.h: a model behind a handle, that can be replaced while it is in use, and a channel
 * through which gemctld sees and steers it. Off unless a program uses it: link gemrun_control.
 *
 *     gemrun_handle_t *h;
 *     if (gemrun_handle_open(&h, "model.gembin", NULL) != GEMRUN_OK) ..
 *     gemrun_attach(h, "/run/gemctl/gemctl.sock", "agv-commands");    (optional)
 *     n = gemrun_handle_chat(h, messages, count, NULL, tokens);       (any thread; one at a time)
 *     gemrun_replace(h, "better.gembin", NULL, NULL);                 (any other thread)
 *     gemrun_handle_close(h);
 *
 * A request keeps the model that it began with. A replacement is opened, tested and warmed beside
 * the model in use; then the handle's pointer is exchanged, and the old model is closed after its
 * last request. If anything fails, the model in use stays. Threads: every call may come from any
 * thread, but for close, which comes last, and not from a callback of a request: only cancel,
 * pace and stats may. Errors: as in gemrun.h, gemrun_last_error() has the sentence. These calls
 * allocate, open files and take locks, none is for a signal handler; a step takes one lock. */
#ifndef GEMRUN_CONTROL_H
#define GEMRUN_CONTROL_H
#include "gemrun.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gemrun_handle gemrun_handle_t;

/* How to replace. Zeroed: the handle's configuration, both checks, no warm-up. */
typedef struct gemrun_replacement {
    uint32_t size;                 /* sizeof(gemrun_replacement) */
    uint32_t allow_layout_change;  /* 1: another context, KV type or shape is no reason to refuse */
    uint32_t skip_tests;           /* 1: do not replay the stored test vectors */
    uint32_t check_weights;        /* 1: check the weights' checksum too */
    const char *warmup_prompt;     /* one token is generated for it; NULL: none */
} gemrun_replacement;

typedef struct gemrun_replace_times { /* milliseconds */
    uint32_t size;                 /* sizeof(gemrun_replace_times), set by the caller */
    uint32_t tests;                /* test vectors that passed */
    double open_ms, test_ms, warmup_ms, flip_ms;
} gemrun_replace_times;

typedef struct gemrun_handle_stats {
    uint32_t size;                 /* sizeof(gemrun_handle_stats), set by the caller */
    uint32_t enabled, attached;
    uint32_t active, waiting;      /* requests: inside (0 or 1), and waiting for their turn */
    uint32_t duty;                 /* of the time that steps may take, 0..1000 thousandths */
    uint32_t threads;              /* at most this many; 0: as opened */
    uint64_t requests, failed, replaced, steps; /* since open */
    gemrun_stats last;             /* of the last request; size 0 before the first */
} gemrun_handle_stats;

/* Path and config are kept: a replacement and an enable open with them again. */
GEMRUN_API gemrun_status gemrun_handle_open(gemrun_handle_t **out, const char *path,
                                            const gemrun_config *config);
/* Ends the request inside at its next step, refuses those that wait, waits for all of them and for
 * a replacement, detaches. A call that begins later is the caller's mistake. NULL is fine. */
GEMRUN_API void gemrun_handle_close(gemrun_handle_t *h);

/* As gemrun_request_default, of the model in use, or of the newest one while disabled. */
GEMRUN_API gemrun_request gemrun_handle_request(gemrun_handle_t *h);
/* As gemrun_generate and gemrun_chat, on the model in use. Requests run one at a time, in the order
 * of their calls. Request NULL: the artifact's defaults. GEMRUN_E_STATE while disabled, also for
 * those that wait. A request's own on_step still runs, before the handle's pace; of its threads and
 * the handle's the lower number holds. */
GEMRUN_API int32_t gemrun_handle_generate(gemrun_handle_t *h, const char *prompt,
                                          const gemrun_request *request, int32_t *tokens);
GEMRUN_API int32_t gemrun_handle_chat(gemrun_handle_t *h, const gemrun_message *messages,
                                      size_t count, const gemrun_request *request,
                                      int32_t *tokens);
GEMRUN_API void gemrun_handle_cancel(gemrun_handle_t *h); /* the request inside, if there is one */

/* Any other work on the model in use: `run` has it to itself until it returns, and `paced` to hand
 * on as its request. Returns what it returns. */
typedef int32_t (*gemrun_run_fn)(gemrun_context_t *ctx, const gemrun_request *paced, void *arg);
GEMRUN_API int32_t gemrun_handle_run(gemrun_handle_t *h, const gemrun_request *request,
                                     gemrun_run_fn run, void *arg);

/* options and times may be NULL. GEMRUN_E_CONTEXT: the layout differs and may not. A disabled model
 * is enabled by it. */
GEMRUN_API gemrun_status gemrun_replace(gemrun_handle_t *h, const char *path,
                                        const gemrun_replacement *options,
                                        gemrun_replace_times *times);
/* Back to the model before the newest replacement, opened again from its file, and that one is
 * forgotten: there is one step back. Its tests are not replayed, its layout may differ.
 * GEMRUN_E_STATE: there is none. times may be NULL. */
GEMRUN_API gemrun_status gemrun_rollback(gemrun_handle_t *h, const char *warmup_prompt,
                                         gemrun_replace_times *times);
/* Free the model's memory after its last request; open it again, from the newest path. */
GEMRUN_API gemrun_status gemrun_handle_disable(gemrun_handle_t *h);
GEMRUN_API gemrun_status gemrun_handle_enable(gemrun_handle_t *h, const char *warmup_prompt);

/* Pace: steps take at most duty/1000 of the time on the processor, idle time between requests
 * counted up to a fifth of a second. duty 0: no step until it is raised. threads 0: as opened.
 * Prompts and tokens have a pace of their own. Takes effect at the next step, wakes a sleeping
 * one. The daemon's pace and this one both hold: the lower duty, the fewer threads. Tests and
 * warm-up of a replacement are not paced: it has to come to its end although a pace of 0 holds the
 * requests. */
GEMRUN_API gemrun_status gemrun_handle_pace(gemrun_handle_t *h, uint32_t duty, uint32_t threads,
                                            uint32_t prefill_duty, uint32_t prefill_threads);
GEMRUN_API gemrun_status gemrun_handle_get_stats(gemrun_handle_t *h, gemrun_handle_stats *out);

/* Let the daemon at `socket` see and steer this handle under `name` (1 to 64 of a-z, 0-9, '.', '_',
 * '-'). Two threads of its own keep the connection, make it again when the daemon restarts, and do
 * what it asks; inference never waits for them. The daemon's pace ends with a detach, or when the
 * daemon has been away for 10 seconds. Detach waits for a replacement on its way. A version of the
 * daemon's store comes as an open file, which stays open for a later enable or rollback; /proc is
 * needed. */
GEMRUN_API gemrun_status gemrun_attach(gemrun_handle_t *h, const char *socket, const char *name);
GEMRUN_API void gemrun_detach(gemrun_handle_t *h);

/* Right after gemrun_open: hold of weights that do not all stay in memory (gemmake --offload) as
 * much as the artifact declares: the rest is read ahead of the steps that use it and given back
 * behind them, by system calls within steps. Without it, or where the system does not take the
 * advice, answers are the same and the page cache keeps what it has room for. Nothing to do for
 * other artifacts. Handles and the gemrun command call it themselves, unless memory is ignored. */
GEMRUN_API gemrun_status gemrun_stream(gemrun_context_t *ctx);
/* Bytes that lock_memory is to keep: what gemrun_stats.locked_bytes comes to where all of it could
 * be locked. Weights that pass through are not among them. */
GEMRUN_API uint64_t gemrun_lockable(const gemrun_context_t *ctx);

#ifdef __cplusplus
}
#endif
#endif
