/* gemrun_session.h: several contexts over one mapped model, and what is in a context on disk. For
 * programs that ask for it: link gemrun_control.
 *
 *     gemrun_context_t *model, *other;
 *     if (gemrun_open(&model, "model.gembin", NULL) != GEMRUN_OK) ..
 *     gemrun_session_open(&other, model, NULL);        (weights once, everything else twice)
 *     gemrun_prefill(model, preamble, count);
 *     gemrun_session_fork(other, model);               (other goes on from there, too)
 *     gemrun_session_save(other, "talk.session");
 *     n = gemrun_session_restore(other, "talk.session");   (in another process, as well)
 *     n = gemrun_session_generate(other, " and then", &request, ids);   (behind what is there)
 *     gemrun_destroy(other);
 *     gemrun_destroy(model);                           (last)
 *
 * A session is a context like any other: all calls of gemrun.h are for it, it is closed by
 * gemrun_destroy, it has one call at a time, and several sessions may run at the same time on
 * different threads. What a session has is what decides every later answer: the tokens of the
 * cache, their keys and values, the random state, and the final norm output of the last token where
 * logits are valid. After a restore or a fork every call gives, bit for bit, what it would have
 * given where the state comes from, whatever threads, kernels, chunks and head either has. Figures
 * of the last run stay the context's own.
 *
 * Errors: as in gemrun.h; gemrun_last_error() has the sentence. GEMRUN_E_BUSY for a context that
 * another call is inside. None of these calls takes memory but open; save and restore use files, so
 * that none is for a signal handler. The file format is SESSION.md. */
#ifndef GEMRUN_SESSION_H
#define GEMRUN_SESSION_H
#include "gemrun.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Another context over the weights of `model`, which was opened by a path, by gemrun_open_mem or by
 * this call, and may be running. It has its own arena, KV, engine block and threads, of which there
 * are as many as in `model` where `config` gives neither threads nor an affinity; NULL: defaults.
 * GEMRUN_E_MEMORY: less is available than these take; the weights are not counted again. What maps
 * the weights (`model`, or what that is a session of) must be destroyed last. */
GEMRUN_API gemrun_status gemrun_session_open(gemrun_context_t **out, gemrun_context_t *model,
                                             const gemrun_config *config);
/* Bytes that a session of `model` takes with 1 to 8 threads (0: as many as `model` has): the sum of
 * its gemrun_regions. In its gemrun_stats they are arena, kv, engine and stacks; weights and
 * tables there are the model's, counted once however many sessions there are. */
GEMRUN_API int64_t gemrun_session_memory(const gemrun_context_t *model, uint32_t threads);

/* Write what is in the context to `path`: under another name in the same folder first, then to the
 * disk, then renamed: a failure leaves what was there before, but where only the new name could not
 * be put on the disk, which the sentence says. The file is for its owner only
 * (mode 0600): it tells what was said. A link at `path` is replaced, not followed; anything else
 * but a regular file is refused. GEMRUN_E_OPEN: the system refused; the sentence has its reason. */
GEMRUN_API gemrun_status gemrun_session_save(gemrun_context_t *ctx, const char *path);
/* Put what was saved in place of what is in the context. Returns the tokens in the cache, or
 *     GEMRUN_E_OPEN         it cannot be opened or read
 *     GEMRUN_E_MAGIC        no session, BYTE_ORDER not of a machine like this, VERSION a newer one
 *     GEMRUN_E_SIZE         cut short, or longer than it says
 *     GEMRUN_E_HEADER_CRC   its header is damaged, SECTION_CRC what follows it
 *     GEMRUN_E_HEADER       an impossible value, with right checksums
 *     GEMRUN_E_ROOT         saved from another model, or from another build of this one
 *     GEMRUN_E_CONTEXT      saved from a cache of another layout or type
 *     GEMRUN_E_FULL         more tokens than this context's kv_cache_size
 * The whole file is checked before anything is changed: a refused one leaves the context as it was.
 * Only where the file changes, or cannot be read, between check and use is the cache empty after
 * it; the sentence says so. */
GEMRUN_API int32_t gemrun_session_restore(gemrun_context_t *ctx, const char *path);
/* Put what is in `from` in place of what is in `to`, another context of the same artifact. Takes
 * time as the tokens do. GEMRUN_E_ROOT: not of one artifact; GEMRUN_E_FULL: as above. A failure
 * changes nothing; `from` never changes. */
GEMRUN_API gemrun_status gemrun_session_fork(gemrun_context_t *to, gemrun_context_t *from);

/* A place in the cache to come back to, in memory of the caller's. Windows and sparse caches forget
 * what goes out of their rings, so that `reuse` of a prompt's beginning reaches back by 32 tokens
 * there; from a snapshot of them it reaches any place: compute a preamble, take one, and go back to
 * it before every request that begins with the preamble, with `reuse`. Only rings and ids are
 * copied; other heads have their keys still. As long as the cache, in its first tokens, is that of
 * the snapshot, no matter what was behind them, every answer is the one from an empty cache. */
GEMRUN_API int64_t gemrun_snapshot_size(const gemrun_context_t *ctx); /* bytes */
/* GEMRUN_E_ARGUMENT: `size` is less than that. */
GEMRUN_API gemrun_status gemrun_snapshot_take(gemrun_context_t *ctx, void *memory, size_t size);
/* Returns the tokens in the cache: those of then, without logits. GEMRUN_E_STATE: the cache was
 * emptied, or begins with other tokens; GEMRUN_E_ROOT, _SIZE: not of a context like this. Then
 * nothing has changed. The memory is the caller's own and not checked further: no file's. */
GEMRUN_API int32_t gemrun_snapshot_back(gemrun_context_t *ctx, const void *memory, size_t size);

/* Run a prompt behind what is in the context, as gemrun_generate does from an empty cache (and with
 * the same ids as that would make of all the tokens; `reuse` counts for nothing). What is there is
 * not computed again, a beginning-of-text token is added to an empty context only, and an empty
 * prompt goes on from the last token. Afterwards the context has the prompt and every token of the
 * answer but the closing stop id, and where it is full the last one. A run that ended before its
 * first token leaves the context as it was, or empty, where a window or a sparse cache has gone on
 * over it: gemrun_stats.kv_used tells. GEMRUN_E_PROMPT, with nothing changed: no room for it. */
GEMRUN_API int32_t gemrun_session_generate(gemrun_context_t *ctx, const char *prompt,
                                           const gemrun_request *request, int32_t *tokens);
/* The same with a user's turn, by the chat template. `system` (or NULL) is for an empty context; in
 * any other there has to be a conversation, which goes on by its ids: earlier answers stay as they
 * were sampled, thinking included. GEMRUN_E_STATE: there is none; GEMRUN_E_NO_CHAT: no template, or
 * one that has no control token between an answer and the next turn. */
GEMRUN_API int32_t gemrun_session_turn(gemrun_context_t *ctx, const char *system, const char *user,
                                       const gemrun_request *request, int32_t *tokens);

#ifdef __cplusplus
}
#endif
#endif
