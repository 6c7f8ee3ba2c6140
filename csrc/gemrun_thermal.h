/* gemrun_thermal.h: a model that is told the temperature keeps itself cool, without a daemon.
 * Off unless a program uses it: link gemrun_control.
 *
 *     gemrun_set_temperature(ctx, celsius);                    (any thread, as often as it is read)
 *     gemrun_pacer pacer;
 *     gemrun_request q = gemrun_paced(ctx, &pacer, NULL);      (for every run)
 *     n = gemrun_generate(ctx, prompt, &q, tokens);
 *
 * The artifact says what to do (gemmake --temperature-threshold, --throttle-mode): a ladder of
 * rungs, each with a share of the time that steps may take, of the threads and of the chunk. It is
 * gone up while the temperature is at the threshold, and down after it has cooled by the
 * hysteresis. A temperature that is too old, jumps, or that no board has brings the conservative
 * rung. No answer depends on any of it, only the time that one takes. Without a temperature nothing
 * is paced. Between two steps nothing is read and no system is called, but to sleep. */
#ifndef GEMRUN_THERMAL_H
#define GEMRUN_THERMAL_H
#include "gemrun_control.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Where temperature, time and sleep come from. Start from zeros: every NULL is the default. */
typedef struct gemrun_thermal_config {
    uint32_t size;                   /* sizeof(gemrun_thermal_config) */
    uint32_t off;                    /* 1: nothing is paced, whatever is told */
    float (*temperature)(void *user);/* asked before every step, must not wait; not a number: none
                                      * is new. NULL: gemrun_set_temperature tells it */
    uint64_t (*now)(void *user);     /* nanoseconds of a clock that never jumps; any thread asks */
    void (*sleep)(void *user, uint64_t nanoseconds); /* may return early */
    void *user;
} gemrun_thermal_config;

typedef struct gemrun_thermal_state {
    uint32_t size;                   /* sizeof(gemrun_thermal_state), set by the caller */
    uint32_t told;                   /* 1: a temperature is known, the ladder is at work */
    uint32_t mode;                   /* 0 balanced, 1 performance, 2 aggressive, 3 conservative, 4
                                      * silent: as compiled */
    uint32_t level, levels;          /* rung in force, from 0, and how many there are */
    uint32_t duty;                   /* of the time that steps may take, thousandths */
    uint32_t threads, chunk;         /* at most */
    uint32_t fault;                  /* 1: the sensor is not believed */
    float celsius;                   /* last one that was believed; 0: none */
    float engage_c, release_c;       /* 0: the artifact knows no limit */
} gemrun_thermal_state;

typedef struct gemrun_pacer { /* of one run; yours to keep until it has ended. Nothing to set */
    gemrun_context_t *ctx;
    gemrun_text_fn on_text;
    gemrun_step_fn on_step;
    void *user;
    uint64_t deadline, reserved[2];
    uint32_t threads, begun, decoding, zero;
} gemrun_pacer;

/* Tell the temperature of the chip, as often as the sensor is read: twice a second, say. Any
 * thread, also during a run, which heeds it before its next step, and a signal handler. */
GEMRUN_API gemrun_status gemrun_set_temperature(gemrun_context_t *ctx, float celsius);
/* No run may be inside. GEMRUN_E_THRM: the artifact's ladder breaks a rule. */
GEMRUN_API gemrun_status gemrun_thermal_configure(gemrun_context_t *ctx,
                                                  const gemrun_thermal_config *config);
/* `request` (NULL: the defaults) for one run that keeps to the ladder; its own callbacks still run.
 * Also for gemrun_session_turn and the like, and without effect where gemrun_handle_* is used. */
GEMRUN_API gemrun_request gemrun_paced(gemrun_context_t *ctx, gemrun_pacer *pacer,
                                       const gemrun_request *request);
/* What is in force. No run may be inside; a callback of the run may ask. */
GEMRUN_API gemrun_status gemrun_get_thermal(const gemrun_context_t *ctx,
                                            gemrun_thermal_state *out);

/* The same for a handle, whose requests need no pacer. While the handle is attached, the daemon's
 * pace takes the place of the ladder's: nothing is slowed down twice. */
GEMRUN_API gemrun_status gemrun_handle_set_temperature(gemrun_handle_t *h, float celsius);
GEMRUN_API gemrun_status gemrun_handle_get_thermal(gemrun_handle_t *h, gemrun_thermal_state *out);

#ifdef __cplusplus
}
#endif
#endif
