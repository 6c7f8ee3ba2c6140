/* gs_pin.h: what a pinned prompt is made of (FORMAT.md, PINP), for the compiler. Not public.
 *
 * In gs_session.c, which walks the same blocks for a saved session. */
#ifndef GS_PIN_H
#define GS_PIN_H

#include <stdint.h>

#include "gr_hooks.h"

/* The ring blocks of the tokens in the cache, as PINP holds them: rows that no later token can read
 * are zero. Returns their bytes, or a status; they are written where `capacity` is not less. */
int64_t gs_session_blocks(gemrun_context_t *ctx, uint8_t *out, uint64_t capacity);

#endif
