/* gr_generate.c: requests. Text becomes tokens, tokens become text, a run ends for a stated reason.
 *
 * A failed run leaves an empty cache. Nothing is cut silently: a prompt that does not fit is an
 * error, a full context ends the run. Not part of a GR_MINIMAL build. */
#include <string.h>

#include "gr_check.h"
#include "gr_ctx.h"
#include "gr_model.h"

enum { PIECE = 256, TEXT = GR_MAX_STOP + 3 * PIECE + 16 }; /* held text, one token's on top */

typedef struct generation { /* one generation, on the caller's stack */
    gr_run run;
    gemrun_context_t *ctx;
    const gemrun_request *q;
    int32_t *tokens; /* may be NULL */
    uint32_t count;
    uint32_t sampled; /* count, and the closing stop id */
    uint64_t first, last; /* times of its first and its latest token */
    gr_draft draft;
    gr_utf8_stream utf8;
    uint32_t held; /* bytes of text that could begin a stop string */
    char text[TEXT];
} generation;

static const char MARK[] = "[TRUNCATED]"; /* of a text that ends with the context */

static uint32_t *prompt_of(const gr_engine *e)
{
    return (uint32_t *)(void *)e->buf[GB_BUF_PROMPT];
}

uint32_t gr_interrupted(gemrun_context_t *ctx, const gr_run *r)
{
    if (r->finish != GEMRUN_FINISH_NONE)
        return r->finish;
    if (r->on_step && r->on_step(r->user, &ctx->e.allowed) != 0)
        return GEMRUN_FINISH_CALLBACK;
    if (atomic_load_explicit(&ctx->cancel, memory_order_relaxed))
        return GEMRUN_FINISH_CANCELLED;
    bool late = r->deadline_ns && gr_port_now() - r->start >= r->deadline_ns;
    return late ? GEMRUN_FINISH_DEADLINE : GEMRUN_FINISH_NONE;
}

/* ---- text of a run ---- */

/* Where the earliest stop string begins, or the end of the held text. */
static uint32_t find_stop(const generation *r)
{
    for (uint32_t at = 0; at < r->held; at++) {
        for (uint32_t i = 0; i < r->q->stop_string_count; i++) {
            size_t n = strlen(r->q->stop_strings[i]);
            if (n <= r->held - at && memcmp(r->text + at, r->q->stop_strings[i], n) == 0)
                return at;
        }
    }
    return r->held;
}

/* Where the longest end begins that a stop string could go on from. */
static uint32_t find_hold(const generation *r)
{
    uint32_t at = r->held > GR_MAX_STOP ? r->held - GR_MAX_STOP : 0;
    for (; at < r->held; at++) {
        for (uint32_t i = 0; i < r->q->stop_string_count; i++) {
            size_t n = strlen(r->q->stop_strings[i]);
            uint32_t rest = r->held - at;
            if (rest < n && memcmp(r->q->stop_strings[i], r->text + at, rest) == 0)
                return at;
        }
    }
    return r->held;
}

/* Hand out the first `size` bytes of the held text. */
static void hand_out(generation *r, int32_t token, uint32_t size)
{
    char next = r->text[size];
    r->text[size] = 0;
    if (r->q->on_text && r->q->on_text(r->q->user, token, r->text, size) != 0 &&
        r->run.finish == GEMRUN_FINISH_NONE)
        r->run.finish = GEMRUN_FINISH_CALLBACK;
    r->text[size] = next;
    r->held -= size;
    memmove(r->text, r->text + size, r->held);
}

static void take_token(generation *r, uint32_t id)
{
    uint8_t piece[PIECE];
    size_t n = gr_tok_piece(&r->ctx->e.v.tok, id, piece);
    n = gr_utf8_push(&r->utf8, piece, n, (uint8_t *)r->text + r->held);
    r->held += (uint32_t)n;
    uint32_t stop = find_stop(r);
    if (stop < r->held) {
        r->run.finish = GEMRUN_FINISH_STOP_STRING;
        r->held = stop; /* the rest is dropped */
    }
    hand_out(r, (int32_t)id, r->run.finish == GEMRUN_FINISH_NONE ? find_hold(r) : stop);
}

/* What was held back was no stop string. Who asked for no more text gets none. */
static void end_text(generation *r)
{
    if (r->run.finish == GEMRUN_FINISH_STOP_STRING || r->run.finish == GEMRUN_FINISH_CALLBACK)
        return;
    r->held += (uint32_t)gr_utf8_flush(&r->utf8, (uint8_t *)r->text + r->held);
    if (r->run.finish == GEMRUN_FINISH_CONTEXT_FULL && r->q->on_full == GEMRUN_FULL_MARK) {
        memcpy(r->text + r->held, MARK, sizeof MARK - 1);
        r->held += (uint32_t)sizeof MARK - 1;
    }
    if (r->held > 0)
        hand_out(r, -1, r->held);
}

/* ---- generation ---- */

/* Why a run ends behind the token that it just made. */
static uint32_t ended(const generation *r)
{
    const gr_engine *e = &r->ctx->e;
    if (r->count == r->q->max_tokens)
        return GEMRUN_FINISH_MAX_TOKENS;
    return e->pos == e->context ? GEMRUN_FINISH_CONTEXT_FULL : gr_interrupted(r->ctx, &r->run);
}

/* Go on in a context that is full, with its first block and its newest half: what was between is
 * forgotten, and what stays is computed anew in its new place. A context of two blocks is none. */
static gemrun_status slide(generation *r)
{
    gr_engine *e = &r->ctx->e;
    const uint32_t *ids = (const uint32_t *)(const void *)e->buf[GB_BUF_IDS];
    uint32_t *kept = prompt_of(e), last = e->context / 2;
    if (r->q->on_full != GEMRUN_FULL_SLIDE || last <= 2 * GB_KV_BLOCK)
        return GEMRUN_OK;
    memcpy(kept, ids, GB_KV_BLOCK * sizeof *ids);
    memcpy(kept + GB_KV_BLOCK, ids + (e->pos - last), last * sizeof *ids);
    r->run.finish = GEMRUN_FINISH_NONE;
    r->ctx->last.slides++;
    r->draft.count = r->draft.used = 0; /* rows of the old places */
    gr_kv_reset(e);
    return gr_append(r->ctx, kept, GB_KV_BLOCK + last, &r->run);
}

static gemrun_status decode_loop(generation *r)
{
    gemrun_context_t *ctx = r->ctx;
    gemrun_stats *s = &ctx->last;
    uint64_t before = r->run.start;
    while (r->run.finish == GEMRUN_FINISH_NONE) {
        uint32_t id;
        gemrun_status st = gr_draw(ctx, r->q, &id);
        if (st != GEMRUN_OK)
            return st;
        uint64_t now = gr_port_now();
        double step = (double)(now - before) * 1e-6;
        r->first = r->first ? r->first : now;
        r->last = now;
        r->sampled++;
        if (before != r->run.start && step > s->decode_max_ms)
            s->decode_max_ms = step;
        if (!r->q->ignore_stop_ids && gr_tok_is_stop(&ctx->e.v.tok, id)) {
            r->run.finish = GEMRUN_FINISH_STOP_ID;
            break;
        }
        if (r->tokens)
            r->tokens[r->count] = (int32_t)id;
        r->count++;
        take_token(r, id);
        if (r->run.finish == GEMRUN_FINISH_NONE)
            r->run.finish = ended(r);
        if (r->run.finish == GEMRUN_FINISH_CONTEXT_FULL)
            st = slide(r);
        if (st != GEMRUN_OK || r->run.finish != GEMRUN_FINISH_NONE)
            return st;
        before = gr_port_now();
        st = gr_step(&ctx->e, &r->draft, id);
        if (st != GEMRUN_OK) {
            s->nonfinite_errors += st == GEMRUN_E_NONFINITE;
            return st;
        }
    }
    return GEMRUN_OK;
}

static double per_second(uint32_t tokens, uint64_t ns)
{
    return tokens > 0 && ns > 0 ? (double)tokens * 1e9 / (double)ns : 0;
}

/* How much of the prompt the cache holds, from its start; the last id is computed in any case. A
 * ring that has gone on since then holds no earlier place any more. */
static uint32_t held(const gr_engine *e, uint32_t count)
{
    const uint32_t *had = (const uint32_t *)(const void *)e->buf[GB_BUF_IDS];
    const uint32_t *ids = (const uint32_t *)(const void *)e->buf[GB_BUF_PROMPT];
    uint32_t n = 0;
    while (n + 1 < count && n < e->pos && had[n] == ids[n])
        n++;
    return gr_kv_evicts(e, n, e->high - n) ? 0 : n;
}

int32_t gr_generate(gemrun_context_t *ctx, uint32_t count, const gemrun_request *q,
                    int32_t *tokens, uint64_t start)
{
    generation r = {.run = {.start = start, .deadline_ns = q->deadline_ns, .on_step = q->on_step,
                            .user = q->user}, .ctx = ctx, .q = q, .tokens = tokens};
    ctx->e.allowed = 0;
    gemrun_stats *s = &ctx->last;
    *s = (gemrun_stats){.prompt_tokens = count, .nonfinite_errors = s->nonfinite_errors};
    uint32_t reused = q->reuse ? held(&ctx->e, count) : 0, high = ctx->e.high;
    gr_reset(ctx);
    ctx->e.pos = reused;
    ctx->e.high = reused > 0 ? high : 0;
    s->reused = reused = gr_pin_take(&ctx->e, prompt_of(&ctx->e), count);
    gr_begin_drafts(&ctx->e, &r.draft, q->speculate);
    ctx->planes.request = q;
    ctx->planes.heads = ctx->planes.candidates = ctx->planes.most_candidates = 0;
    uint64_t encoded = gr_port_now();
    gemrun_status st = gr_append(ctx, prompt_of(&ctx->e) + reused, count - reused, &r.run);
    uint64_t prefilled = gr_port_now();
    if (st == GEMRUN_OK && r.run.finish == GEMRUN_FINISH_NONE) {
        s->prefill_tps = per_second(count - reused, prefilled - encoded);
        st = decode_loop(&r);
    }
    ctx->planes.request = NULL;
    ctx->e.allowed = 0;
    if (ctx->planes.heads > 0)
        s->head_candidates = (double)ctx->planes.candidates / (double)ctx->planes.heads;
    s->head_candidates_max = ctx->planes.most_candidates;
    end_text(&r);
    s->generated_tokens = r.count;
    s->drafted = r.draft.drafted;
    s->accepted = r.draft.right;
    s->finish = st == GEMRUN_OK ? r.run.finish : GEMRUN_FINISH_ERROR;
    s->ttft_ms = r.first ? (double)(r.first - start) * 1e-6 : 0;
    s->decode_tps = r.sampled > 1 ? per_second(r.sampled - 1, r.last - r.first) : 0;
    if (st != GEMRUN_OK)
        gr_reset(ctx);
    gr_unpin(ctx);
    return st == GEMRUN_OK ? (int32_t)r.count : (int32_t)st;
}

/* ---- prompts ---- */

/* A count of the tokenizer or its failure, as ours. `size` is the text's. */
static int64_t encoded(gr_engine *e, int64_t made, uint64_t size)
{
    switch (made) {
    case GR_TOK_E_SCRATCH:
        gr_fail(&e->err, GEMRUN_E_TEXT, 0, e->v.conf.text_limit, size);
        return GEMRUN_E_TEXT;
    case GR_TOK_E_ROLES:
    case GR_TOK_E_SYSTEM:
        gr_fail(&e->err, GEMRUN_E_NO_CHAT, 0, 0, (uint64_t)-made);
        return GEMRUN_E_NO_CHAT;
    default:
        return made;
    }
}

int64_t gr_encode_text(gr_engine *e, const char *text, size_t size, uint32_t flags,
                       uint32_t *ids, size_t room)
{
    const gr_tok *t = &e->v.tok;
    if (size > e->v.conf.text_limit)
        return encoded(e, GR_TOK_E_SCRATCH, size);
    uint32_t one, *to = room > 0 ? ids : &one; /* to see whether bos is there */
    size_t cap = room > 0 ? room : 1;
    int64_t made = gr_tok_encode(t, (const uint8_t *)text, size, (flags & 2) != 0, to, cap,
                                 e->buf[GB_BUF_TOK], (size_t)gr_buffer_size(&e->v, GB_BUF_TOK));
    bool bos = (flags & 1) && (t->h->flags & GB_TOKF_ADD_BOS) && t->h->bos != GB_TOK_NONE;
    if (made < 0 || !bos || (made > 0 && to[0] == t->h->bos))
        return encoded(e, made, size);
    size_t kept = (size_t)made < cap ? (size_t)made : cap - 1;
    memmove(to + 1, to, kept * sizeof *to);
    to[0] = t->h->bos;
    return made + 1;
}

/* A prompt of `count` ids must fit; its length is the first number of the message. Its ids come
 * from tables that were checked at open, but of a file that somebody may have changed since. */
static gemrun_status check_prompt(gr_engine *e, int64_t count)
{
    if (count < 0)
        return (gemrun_status)count;
    if (count == 0 || count > e->context)
        return gr_no_room(e, GEMRUN_E_PROMPT, (uint64_t)count);
    return gr_check_ids(e, prompt_of(e), (size_t)count);
}

/* The messages are copied into the encoder's form behind its scratch. */
int64_t gr_encode_chat(gr_engine *e, const gemrun_message *messages, size_t count)
{
    uint8_t *scratch = e->buf[GB_BUF_TOK];
    uint64_t size = gr_buffer_size(&e->v, GB_BUF_TOK), text = 0;
    uint64_t table = gr_align(gr_mul(count, sizeof(gr_message)), 8);
    if (table > size / 2)
        return encoded(e, GR_TOK_E_SCRATCH, table);
    gr_message *m = (gr_message *)(void *)(scratch + size - table);
    for (size_t i = 0; i < count; i++) {
        if (!messages[i].text || (uint32_t)messages[i].role > GEMRUN_ASSISTANT)
            return gr_fail(&e->err, GEMRUN_E_ARGUMENT, GR_F_MESSAGES, GEMRUN_ASSISTANT, i);
        size_t n = strlen(messages[i].text);
        text = gr_add(text, n);
        m[i] = (gr_message){(int)messages[i].role, messages[i].text, n};
    }
    if (text > e->v.conf.text_limit)
        return encoded(e, GR_TOK_E_SCRATCH, text);
    int64_t made = gr_chat_encode(&e->v.chat, &e->v.tok, m, count, true, prompt_of(e),
                                  (size_t)e->v.conf.context + 1, scratch, (size_t)(size - table));
    return encoded(e, made, text);
}

/* A whole call, with a text or with messages. */
static int32_t answer(gemrun_context_t *ctx, const char *prompt, const gemrun_message *messages,
                      size_t count, const gemrun_request *request, int32_t *tokens)
{
    gemrun_request q;
    gemrun_status st = gr_enter(ctx);
    if (st != GEMRUN_OK)
        return st;
    gr_engine *e = &ctx->e;
    uint64_t start = gr_port_now();
    int64_t n = 0;
    atomic_store(&ctx->cancel, 0);
    st = prompt || (messages && count > 0) ? gr_check_request(e, request, &q)
                                           : gr_fail(&e->err, GEMRUN_E_ARGUMENT, GR_F_NONE, 0, 0);
    if (st == GEMRUN_OK && messages && !e->v.has_chat)
        st = gr_fail(&e->err, GEMRUN_E_NO_CHAT, 0, 1, 0);
    if (st == GEMRUN_OK) {
        n = messages ? gr_encode_chat(e, messages, count)
                     : gr_encode_text(e, prompt, strlen(prompt), 3, prompt_of(e),
                                      (size_t)e->v.conf.context + 1);
        st = check_prompt(e, n);
    }
    return gr_leave(ctx, st != GEMRUN_OK ? (int32_t)st
                                         : gr_generate(ctx, (uint32_t)n, &q, tokens, start));
}

int32_t gemrun_generate(gemrun_context_t *ctx, const char *prompt, const gemrun_request *request,
                        int32_t *tokens)
{
    return answer(ctx, prompt, NULL, 0, request, tokens);
}

int32_t gemrun_chat(gemrun_context_t *ctx, const gemrun_message *messages, size_t count,
                    const gemrun_request *request, int32_t *tokens)
{
    return answer(ctx, NULL, messages, count, request, tokens);
}

int32_t gemrun_infer(gemrun_context_t *ctx, const char *prompt, int32_t *tokens,
                     int32_t max_tokens)
{
    gemrun_request q = gemrun_request_default(ctx);
    if (!tokens)
        return gr_refuse(GR_F_NONE, 0, 0);
    if (max_tokens < 1)
        return gr_refuse(GR_F_MAX_TOKENS, INT32_MAX, (uint64_t)max_tokens);
    q.max_tokens = (uint32_t)max_tokens;
    return gemrun_generate(ctx, prompt, &q, tokens);
}

void gemrun_cancel(gemrun_context_t *ctx)
{
    if (ctx)
        atomic_store(&ctx->cancel, 1);
}

int32_t gemrun_tokenize(gemrun_context_t *ctx, const char *text, size_t size, uint32_t flags,
                        int32_t *ids, size_t capacity)
{
    gemrun_status st = gr_enter(ctx);
    if (st != GEMRUN_OK)
        return st;
    int64_t n = GEMRUN_E_ARGUMENT;
    if ((!text && size > 0) || (!ids && capacity > 0) || flags > 3) {
        gr_fail(&ctx->e.err, GEMRUN_E_ARGUMENT, flags > 3 ? GR_F_FLAGS : GR_F_NONE, 3, flags);
    } else {
        capacity = capacity > INT32_MAX ? INT32_MAX : capacity;
        n = gr_encode_text(&ctx->e, text ? text : "", size, flags, (uint32_t *)(void *)ids,
                           capacity);
    }
    if (n > (int64_t)capacity) /* then it is to learn how many there are */
        n = gr_fail(&ctx->e.err, GEMRUN_E_ARGUMENT, GR_F_CAPACITY, (uint64_t)n, capacity);
    return gr_leave(ctx, (int32_t)n);
}

int64_t gemrun_detokenize(gemrun_context_t *ctx, const int32_t *ids, size_t count, uint32_t flags,
                          char *text, size_t capacity)
{
    gemrun_status st = gr_enter(ctx);
    if (st != GEMRUN_OK)
        return st;
    if ((count > 0 && !ids) || (capacity > 0 && !text) || flags > 3)
        st = gr_fail(&ctx->e.err, GEMRUN_E_ARGUMENT, flags > 3 ? GR_F_FLAGS : GR_F_NONE, 3, flags);
    else
        st = gr_check_ids(&ctx->e, (const uint32_t *)(const void *)ids, count);
    if (st != GEMRUN_OK)
        return gr_leave(ctx, st);
    const gr_tok *t = &ctx->e.v.tok;
    gr_utf8_stream utf8 = {0};
    uint8_t piece[PIECE], out[3 * PIECE + 8];
    uint64_t total = 0;
    for (size_t i = 0; i <= count; i++) {
        size_t n = 0;
        const uint8_t *from = piece;
        if (i < count)
            n = flags & 2 ? gr_tok_piece_all(t, (uint32_t)ids[i], piece)
                          : gr_tok_piece(t, (uint32_t)ids[i], piece);
        if (!(flags & 1)) {
            n = i < count ? gr_utf8_push(&utf8, piece, n, out) : gr_utf8_flush(&utf8, out);
            from = out;
        }
        for (size_t k = 0; k < n; k++, total++)
            if (total + 1 < capacity)
                text[total] = (char)from[k];
    }
    if (capacity > 0)
        text[total < capacity ? total : capacity - 1] = 0;
    gr_leave(ctx, 0);
    return (int64_t)total;
}
