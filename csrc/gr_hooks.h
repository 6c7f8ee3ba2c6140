/* gr_hooks.h: what the compiler asks of the engine beyond gemrun.h. Not public: no promises, and
 * exported by the Python module only, which links the engine's objects. */
#ifndef GR_HOOKS_H
#define GR_HOOKS_H

#include "gr_internal.h"

/* Make a test vector: `step_count` greedy ids from an empty cache into out_steps, and the digest
 * of the logits on the way (FORMAT.md, 2.10). Resets the cache. 0 or a status. */
int32_t gemrun_internal_digest(gemrun_context_t *ctx, const uint32_t *prompt,
                               uint32_t prompt_count, uint32_t *out_steps, uint32_t step_count,
                               uint64_t *out_digest);
/* Run the layers over hidden states x [count][hidden], in place: no embedding, no final norm, no
 * head. They are appended to the cache (gemrun_reset_kv_cache starts a new sequence). `capture`
 * sees the float inputs of every product whose weights are float. Returns the tokens in the cache,
 * or a status. */
int32_t gemrun_internal_hidden(gemrun_context_t *ctx, float *x, uint32_t count, gr_capture capture,
                               void *user);
/* Let the KV heads of an artifact without KVMK see as little as `units` say, in rings that keep
 * everything: `blocks` is the layer's kv_blocks, `first` the head's index times that. `units`, one
 * a KV head of all layers, stay the caller's until the next call; count 0: everything again.
 * Empties the cache; a pinned prompt is used no more. 0 or a status. */
int32_t gemrun_internal_units(gemrun_context_t *ctx, const gb_kv_unit *units, uint32_t count);
/* Show the attention of every head to `watch`; NULL: to nobody. No call may be inside. */
void gemrun_internal_watch(gemrun_context_t *ctx, gr_watch watch, void *user);
/* Names of the kernels that this processor runs, ascending; NULL behind the last. */
const char *gr_kernels_at(uint32_t i);

#endif
