/* gemrun_batch.h: several sessions of one model, in one pass over its weights. For programs that
 * ask for it: link gemrun_control.
 *
 *     gemrun_batch_item items[2] = {{.session = a, .ids = prompt, .count = n},
 *                                   {.session = b, .ids = &newest, .count = 1}};
 *     gemrun_batch_append(items, 2);           (a's prompt, b's next token)
 *     id = gemrun_sample(a, &request); ..      (each has its own logits)
 *
 * Reading the weights is what a token costs; in a batch they are read once for all. Sessions are
 * those of gemrun_session.h, the model itself among them; they join and leave between two calls as
 * they like. A session's logits, keys and values are, bit for bit, those that it would have alone:
 * whatever runs beside it, in whatever order, whether a prompt came in one call or in pieces, and
 * also where one beside it fails. */
#ifndef GEMRUN_BATCH_H
#define GEMRUN_BATCH_H
#include "gemrun.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gemrun_batch_item {
    gemrun_context_t *session; /* none of them twice */
    const int32_t *ids;        /* its next tokens: a new one, or a prompt or a part of it */
    size_t count;              /* 1 or more */
    uint32_t more;             /* 1: a part of a prompt; no logits are made after it */
    gemrun_status status;      /* out: as of gemrun_prefill, or of what kept it out */
    uint32_t appended;         /* out: of the ids */
} gemrun_batch_item;

/* Append the ids of every item to its session; logits after the last of each, unless it has `more`.
 * Returns how many items did well; the others have their status, and gemrun_last_error() is of one
 * of them:
 *     GEMRUN_E_ARGUMENT, _TOKEN, _FULL   the item's ids
 *     GEMRUN_E_BUSY                      another call is inside its session, or it is there twice
 *     GEMRUN_E_ROOT                      not of one artifact with the first that is not refused
 *     GEMRUN_E_NONFINITE                 as by gemrun_prefill
 * A refused one is as it was; the rest are run. Below 0: GEMRUN_E_ARGUMENT, and none was run.
 *
 * The first session that is not refused lends its threads and buffers: nothing is allocated, and
 * memory is what gemrun_session_memory says of each. A pass has at most its prefill_batch_size
 * tokens: one of every session that has any left, then more of those with longer prompts. So a long
 * prompt takes many passes; who wants other sessions to go on beside it gives it in pieces of
 * gemrun_batch_room tokens. */
GEMRUN_API int32_t gemrun_batch_append(gemrun_batch_item *items, size_t count);
/* Tokens of a pass that `session` leads. */
GEMRUN_API uint32_t gemrun_batch_room(const gemrun_context_t *session);

#ifdef __cplusplus
}
#endif
#endif
