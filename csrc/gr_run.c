/* gr_run.c: requests. Text becomes tokens, tokens become text, a run ends for a stated reason.
 *
 * Between two tokens there is no allocation, no file, no system call but the team's futex and the
 * clock. A failed run leaves an empty cache. Nothing is cut silently: a prompt that does not fit
 * is an error, a full context ends the run. */
#include <string.h>

#include "gr_check.h"
#include "gr_ctx.h"
#include "gr_hooks.h"

enum {
    MAX_LIST = 4096, MAX_STOPS = 8, MAX_STOP = 128, /* limits of a request */
    PIECE = 256, TEXT = MAX_STOP + 3 * PIECE + 16   /* held text, and one token's on top */
};
#define FNV_START 14695981039346656037u
#define FNV_PRIME 1099511628211u

typedef struct generation { /* one generation, on the caller's stack */
    gemrun_context_t *ctx;
    const gemrun_request *q;
    int32_t *tokens; /* may be NULL */
    uint32_t count, finish;
    uint32_t sampled; /* count, and the closing stop id */
    gemrun_logits_fn on_logits; /* of gemrun_eval */
    void *user;
    uint64_t start, first, last; /* times of the call, its first and its latest token */
    gr_utf8_stream utf8;
    uint32_t held; /* bytes of text that could begin a stop string */
    char text[TEXT];
} generation;

static float *logits_of(const gr_engine *e)
{
    return (float *)(void *)e->buf[GB_BUF_LOGITS];
}

static uint32_t *prompt_of(const gr_engine *e)
{
    return (uint32_t *)(void *)e->buf[GB_BUF_PROMPT];
}

static void reset(gemrun_context_t *ctx)
{
    gr_kv_reset(&ctx->e);
    ctx->e.logits_valid = false;
    ctx->rng_ready = false;
}

/* ---- requests ---- */

gemrun_request gemrun_request_default(const gemrun_context_t *ctx)
{
    gemrun_request q = {.size = sizeof q, .max_tokens = 256, .temperature = 0.3f, .top_k = 64,
                        .top_p = 0.85f, .repetition_penalty = 1.0f};
    if (ctx) {
        const gb_conf *c = &ctx->e.v.conf;
        q.temperature = c->temperature;
        q.top_k = c->top_k;
        q.top_p = c->top_p;
        q.min_p = c->min_p;
        q.repetition_penalty = c->repetition_penalty;
    }
    return q;
}

static bool is_text(const char *s, size_t least, size_t most)
{
    size_t n = 0;
    while (n <= most && s[n] != 0)
        n++;
    for (size_t i = 0, used; i < n; i += used) {
        uint32_t cp;
        bool cut;
        used = gr_utf8_next((const uint8_t *)s + i, n - i, &cp, &cut);
        if (cp == 0xFFFD && (cut || used != 3 || (uint8_t)s[i] != 0xEF))
            return false;
    }
    return n >= least && n <= most;
}

static gemrun_status check_lists(gr_engine *e, const gemrun_request *q)
{
    uint32_t rows = e->v.conf.vocab_rows;
    const uint32_t counts[] = {q->banned_count, q->bias_count, q->stop_string_count};
    const uint32_t most[] = {MAX_LIST, MAX_LIST, MAX_STOPS};
    for (uint32_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
        if (counts[i] > most[i])
            return gr_fail(&e->err, GEMRUN_E_ARGUMENT, GR_F_BANNED_COUNT + i, most[i], counts[i]);
    if ((q->banned_count && !q->banned) || (q->stop_string_count && !q->stop_strings) ||
        (q->bias_count && (!q->bias_ids || !q->bias_values)))
        return gr_fail(&e->err, GEMRUN_E_ARGUMENT, GR_F_NONE, 0, 0);
    for (uint32_t i = 0; i < q->banned_count; i++)
        if (q->banned[i] >= rows)
            return gr_fail(&e->err, GEMRUN_E_TOKEN, GR_F_BANNED, rows - 1, q->banned[i]);
    for (uint32_t i = 0; i < q->bias_count; i++) {
        if (q->bias_ids[i] >= rows)
            return gr_fail(&e->err, GEMRUN_E_TOKEN, GR_F_BIAS_ID, rows - 1, q->bias_ids[i]);
        if (!(q->bias_values[i] - q->bias_values[i] == 0.0f))
            return gr_fail(&e->err, GEMRUN_E_SAMPLING, GR_F_BIAS_VALUE, 0, i);
    }
    for (uint32_t i = 0; i < q->stop_string_count; i++)
        if (!q->stop_strings[i] || !is_text(q->stop_strings[i], 1, MAX_STOP))
            return gr_fail(&e->err, GEMRUN_E_ARGUMENT, GR_F_STOP, MAX_STOP, i);
    return GEMRUN_OK;
}

/* Takes the request as it is now into `q`, which lives as long as the call. */
static gemrun_status check_request(gr_engine *e, const gemrun_request *from, gemrun_request *q)
{
    if (gr_take_struct(q, sizeof *q, from, &e->err) != GEMRUN_OK)
        return GEMRUN_E_ARGUMENT;
    for (size_t i = 0; i < sizeof q->reserved / sizeof q->reserved[0]; i++)
        if (q->reserved[i] != 0)
            return gr_fail(&e->err, GEMRUN_E_ARGUMENT, GR_F_RESERVED, 0, q->reserved[i]);
    if (q->max_tokens < 1 || q->max_tokens > INT32_MAX)
        return gr_fail(&e->err, GEMRUN_E_ARGUMENT, GR_F_MAX_TOKENS, INT32_MAX, q->max_tokens);
    const float given[] = {q->temperature, q->top_p, q->min_p, q->repetition_penalty};
    const bool good[] = {given[0] >= 0 && given[0] <= 100, given[1] > 0 && given[1] <= 1,
                         given[2] >= 0 && given[2] < 1, given[3] > 0 && given[3] <= 100};
    for (uint32_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        if (!good[i]) {
            uint32_t bits;
            memcpy(&bits, given + i, sizeof bits);
            return gr_fail(&e->err, GEMRUN_E_SAMPLING, GR_F_TEMPERATURE + i, 0, bits);
        }
    }
    return check_lists(e, q);
}

/* ---- forward steps ---- */

/* Why a run must end before its next step. */
static uint32_t interrupted(const generation *r)
{
    if (r->finish != GEMRUN_FINISH_NONE)
        return r->finish;
    if (atomic_load_explicit(&r->ctx->cancel, memory_order_relaxed))
        return GEMRUN_FINISH_CANCELLED;
    bool late = r->q && r->q->deadline_ns && gr_port_now() - r->start >= r->q->deadline_ns;
    return late ? GEMRUN_FINISH_DEADLINE : GEMRUN_FINISH_NONE;
}

/* The prompt or the cache has no room for `tokens` tokens. */
static gemrun_status no_room(gr_engine *e, gemrun_status code, uint64_t tokens)
{
    uint32_t compiled = e->v.conf.context;
    gr_fail(&e->err, code, 0, tokens, e->context);
    e->err.record = e->context < compiled && tokens <= compiled ? compiled : GR_NO_RECORD;
    return code;
}

/* A whole run gives the thread its cores back; between steps it stays bound. */
static void unpin(const gemrun_context_t *ctx)
{
    if (ctx->pin)
        gr_port_unpin();
}

/* Append ids by chunks. `r` (NULL: nothing interrupts) learns why it stopped early. The caller
 * resets the cache after a failure behind the first chunk: what it overwrote is gone. */
static gemrun_status append(gemrun_context_t *ctx, const uint32_t *ids, uint32_t count,
                            uint32_t want, gemrun_logits_fn fn, void *user, generation *r)
{
    gr_engine *e = &ctx->e;
    if (ctx->pin)
        gr_port_pin(ctx->pin);
    for (uint32_t done = 0, n; done < count; done += n) {
        n = count - done < e->chunk ? count - done : e->chunk;
        if (r && (r->finish = interrupted(r)) != GEMRUN_FINISH_NONE)
            return GEMRUN_OK;
        uint32_t last = done + n == count;
        gemrun_status st = gr_forward(e, ids + done, n, want == 1 ? last : want, fn, user);
        if (st != GEMRUN_OK) {
            ctx->last.nonfinite_errors += st == GEMRUN_E_NONFINITE;
            if (done > 0)
                reset(ctx);
            return st;
        }
    }
    return GEMRUN_OK;
}

static bool is_row(gr_engine *e, int64_t id)
{
    uint32_t rows = e->v.conf.vocab_rows;
    bool good = id >= 0 && id < rows;
    if (!good)
        gr_fail(&e->err, GEMRUN_E_TOKEN, GR_F_TOKEN, rows - 1, (uint64_t)id);
    return good;
}

static gemrun_status ids_fit(gr_engine *e, const int32_t *ids, size_t count)
{
    if (count > 0 && !ids)
        return gr_fail(&e->err, GEMRUN_E_ARGUMENT, GR_F_NONE, 0, 0);
    if (count > e->context - e->pos)
        return no_room(e, GEMRUN_E_FULL, gr_add(e->pos, count));
    for (size_t i = 0; i < count; i++)
        if (!is_row(e, ids[i]))
            return GEMRUN_E_TOKEN;
    return GEMRUN_OK;
}

static gemrun_status sample(gemrun_context_t *ctx, const gemrun_request *q, uint32_t *out_id)
{
    uint64_t seed = q->seed_set ? q->seed : 0;
    if (!ctx->rng_ready || ctx->rng_seed != seed) {
        gr_rng_seed(&ctx->rng, seed);
        ctx->rng_seed = seed;
        ctx->rng_ready = true;
    }
    gemrun_status st = gr_sample(&ctx->e, q, &ctx->rng, out_id);
    if (q->bias_count || q->banned_count || q->repetition_penalty != 1.0f || st != GEMRUN_OK)
        ctx->e.logits_valid = false; /* they are no longer the model's */
    ctx->last.nonfinite_errors += st == GEMRUN_E_NONFINITE;
    return st;
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
    uint32_t at = r->held > MAX_STOP ? r->held - MAX_STOP : 0;
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
        r->finish == GEMRUN_FINISH_NONE)
        r->finish = GEMRUN_FINISH_CALLBACK;
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
        r->finish = GEMRUN_FINISH_STOP_STRING;
        r->held = stop; /* the rest is dropped */
    }
    hand_out(r, (int32_t)id, r->finish == GEMRUN_FINISH_NONE ? find_hold(r) : stop);
}

/* What was held back was no stop string. Who asked for no more text gets none. */
static void end_text(generation *r)
{
    if (r->finish == GEMRUN_FINISH_STOP_STRING || r->finish == GEMRUN_FINISH_CALLBACK)
        return;
    r->held += (uint32_t)gr_utf8_flush(&r->utf8, (uint8_t *)r->text + r->held);
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
    return e->pos == e->context ? GEMRUN_FINISH_CONTEXT_FULL : interrupted(r);
}

static gemrun_status decode_loop(generation *r)
{
    gemrun_context_t *ctx = r->ctx;
    gemrun_stats *s = &ctx->last;
    uint64_t before = r->start;
    while (r->finish == GEMRUN_FINISH_NONE) {
        uint32_t id;
        gemrun_status st = sample(ctx, r->q, &id);
        if (st != GEMRUN_OK)
            return st;
        uint64_t now = gr_port_now();
        double step = (double)(now - before) * 1e-6;
        r->first = r->first ? r->first : now;
        r->last = now;
        r->sampled++;
        if (before != r->start && step > s->decode_max_ms)
            s->decode_max_ms = step;
        if (!r->q->ignore_stop_ids && gr_tok_is_stop(&ctx->e.v.tok, id)) {
            r->finish = GEMRUN_FINISH_STOP_ID;
            break;
        }
        if (r->tokens)
            r->tokens[r->count] = (int32_t)id;
        r->count++;
        take_token(r, id);
        if (r->finish != GEMRUN_FINISH_NONE || (r->finish = ended(r)) != GEMRUN_FINISH_NONE)
            break;
        before = gr_port_now();
        st = gr_forward(&ctx->e, &id, 1, 1, NULL, NULL);
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

/* Generate from the ids in GB_BUF_PROMPT. */
static int32_t generate(gemrun_context_t *ctx, uint32_t count, const gemrun_request *q,
                        int32_t *tokens, uint64_t start)
{
    generation r = {.ctx = ctx, .q = q, .tokens = tokens, .start = start};
    gemrun_stats *s = &ctx->last;
    *s = (gemrun_stats){.prompt_tokens = count, .nonfinite_errors = s->nonfinite_errors};
    reset(ctx);
    uint64_t encoded = gr_port_now();
    gemrun_status st = append(ctx, prompt_of(&ctx->e), count, 1, NULL, NULL, &r);
    uint64_t prefilled = gr_port_now();
    if (st == GEMRUN_OK && r.finish == GEMRUN_FINISH_NONE) {
        s->prefill_tps = per_second(count, prefilled - encoded);
        st = decode_loop(&r);
    }
    end_text(&r);
    s->generated_tokens = r.count;
    s->finish = st == GEMRUN_OK ? r.finish : GEMRUN_FINISH_ERROR;
    s->ttft_ms = r.first ? (double)(r.first - start) * 1e-6 : 0;
    s->decode_tps = r.sampled > 1 ? per_second(r.sampled - 1, r.last - r.first) : 0;
    if (st != GEMRUN_OK)
        reset(ctx);
    unpin(ctx);
    return st == GEMRUN_OK ? (int32_t)r.count : (int32_t)st;
}

/* ---- prompts ---- */

/* A count of the tokenizer or its failure, as ours. `tokens` and `size` are the text's. */
static int64_t encoded(gr_engine *e, int64_t made, uint64_t tokens, uint64_t size)
{
    switch (made) {
    case GR_TOK_E_CAP:
        return no_room(e, GEMRUN_E_PROMPT, tokens);
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

/* How many ids a text makes that found no room: they go behind the scratch. */
static uint64_t count_text(gr_engine *e, const char *text, size_t size, bool control, size_t room)
{
    uint8_t *scratch = e->buf[GB_BUF_TOK];
    uint64_t have = gr_buffer_size(&e->v, GB_BUF_TOK);
    uint64_t used = gr_align(gr_tok_scratch_size(size), 8);
    int64_t made = GR_TOK_E_CAP;
    if (used < have)
        made = gr_tok_encode(&e->v.tok, (const uint8_t *)text, size, control,
                             (uint32_t *)(void *)(scratch + used), (size_t)(have - used) / 4,
                             scratch, (size_t)used);
    return made < 0 ? gr_add(room, 1) : (uint64_t)made; /* or at least so many */
}

/* Ids of a text; bos first if asked and wanted by the model, and not there already. */
static int64_t encode_text(gr_engine *e, const char *text, size_t size, uint32_t flags,
                           uint32_t *ids, size_t room)
{
    const gr_tok *t = &e->v.tok;
    if (size > e->v.conf.text_limit)
        return encoded(e, GR_TOK_E_SCRATCH, room, size);
    void *scratch = e->buf[GB_BUF_TOK];
    size_t scratch_size = (size_t)gr_buffer_size(&e->v, GB_BUF_TOK);
    bool bos = (flags & 1) && (t->h->flags & GB_TOKF_ADD_BOS) && t->h->bos != GB_TOK_NONE;
    if (bos && room == 0)
        return encoded(e, GR_TOK_E_CAP, 1, size);
    int64_t made = gr_tok_encode(t, (const uint8_t *)text, size, (flags & 2) != 0, ids + bos,
                                 room - bos, scratch, scratch_size);
    if (made == GR_TOK_E_CAP)
        room = (size_t)count_text(e, text, size, (flags & 2) != 0, room - bos) + bos;
    if (made < 0)
        return encoded(e, made, room, size);
    if (bos && made > 0 && ids[1] == t->h->bos) {
        memmove(ids, ids + 1, (size_t)made * sizeof *ids);
        return made;
    }
    if (bos)
        ids[0] = t->h->bos;
    return made + bos;
}

/* A prompt of `count` ids must fit; its length is the first number of the message. Its ids come
 * from tables that were checked at open, but of a file that somebody may have changed since. */
static gemrun_status check_prompt(gr_engine *e, int64_t count)
{
    if (count < 0)
        return (gemrun_status)count;
    if (count == 0 || count > e->context)
        return no_room(e, GEMRUN_E_PROMPT, (uint64_t)count);
    for (int64_t i = 0; i < count; i++)
        if (!is_row(e, prompt_of(e)[i]))
            return GEMRUN_E_TOKEN;
    return GEMRUN_OK;
}

int32_t gemrun_generate(gemrun_context_t *ctx, const char *prompt, const gemrun_request *request,
                        int32_t *tokens)
{
    gr_call c;
    gemrun_request q;
    gemrun_status st = gr_enter(ctx, &c);
    if (st != GEMRUN_OK)
        return st;
    uint64_t start = gr_port_now();
    atomic_store(&ctx->cancel, 0);
    st = prompt ? check_request(&ctx->e, request, &q)
                : gr_fail(&ctx->e.err, GEMRUN_E_ARGUMENT, GR_F_NONE, 0, 0);
    int64_t n = 0;
    if (st == GEMRUN_OK) {
        n = encode_text(&ctx->e, prompt, strlen(prompt), 3, prompt_of(&ctx->e),
                        (size_t)ctx->e.v.conf.context + 1);
        st = check_prompt(&ctx->e, n);
    }
    return gr_leave(ctx, &c, st != GEMRUN_OK ? (int32_t)st
                                             : generate(ctx, (uint32_t)n, &q, tokens, start));
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

/* Ids of a conversation. The messages are copied into the encoder's form behind its scratch. */
static int64_t encode_chat(gr_engine *e, const gemrun_message *messages, size_t count)
{
    uint8_t *scratch = e->buf[GB_BUF_TOK];
    uint64_t size = gr_buffer_size(&e->v, GB_BUF_TOK), text = 0;
    uint64_t table = gr_align(gr_mul(count, sizeof(gr_message)), 8);
    if (table > size / 2)
        return encoded(e, GR_TOK_E_SCRATCH, 0, table);
    gr_message *m = (gr_message *)(void *)(scratch + size - table);
    for (size_t i = 0; i < count; i++) {
        if (!messages[i].text || (uint32_t)messages[i].role > GEMRUN_ASSISTANT)
            return gr_fail(&e->err, GEMRUN_E_ARGUMENT, GR_F_MESSAGES, GEMRUN_ASSISTANT, i);
        size_t n = strlen(messages[i].text);
        text = gr_add(text, n);
        m[i] = (gr_message){(int)messages[i].role, messages[i].text, n};
    }
    if (text > e->v.conf.text_limit)
        return encoded(e, GR_TOK_E_SCRATCH, 0, text);
    size_t room = (size_t)e->v.conf.context + 1;
    int64_t made = gr_chat_encode(&e->v.chat, &e->v.tok, m, count, true, prompt_of(e), room,
                                  scratch, (size_t)(size - table));
    uint64_t used = gr_align(gr_chat_scratch_size(&e->v.chat, count, (size_t)text), 8);
    if (made == GR_TOK_E_CAP && used < size - table) { /* learn how many there are */
        made = gr_chat_encode(&e->v.chat, &e->v.tok, m, count, true,
                              (uint32_t *)(void *)(scratch + used),
                              (size_t)(size - table - used) / 4, scratch, (size_t)used);
        room = made < 0 ? room : (size_t)made - 1;
        made = GR_TOK_E_CAP;
    }
    return made < 0 ? encoded(e, made, room + 1, text) : made;
}

int32_t gemrun_chat(gemrun_context_t *ctx, const gemrun_message *messages, size_t count,
                    const gemrun_request *request, int32_t *tokens)
{
    gr_call c;
    gemrun_request q;
    gemrun_status st = gr_enter(ctx, &c);
    if (st != GEMRUN_OK)
        return st;
    gr_engine *e = &ctx->e;
    uint64_t start = gr_port_now();
    atomic_store(&ctx->cancel, 0);
    st = messages && count > 0 ? check_request(e, request, &q)
                               : gr_fail(&e->err, GEMRUN_E_ARGUMENT, GR_F_NONE, 0, 0);
    if (st == GEMRUN_OK && !e->v.has_chat)
        st = gr_fail(&e->err, GEMRUN_E_NO_CHAT, 0, 1, 0);
    int64_t n = 0;
    if (st == GEMRUN_OK) {
        n = encode_chat(e, messages, count);
        st = check_prompt(e, n);
    }
    return gr_leave(ctx, &c, st != GEMRUN_OK ? (int32_t)st
                                             : generate(ctx, (uint32_t)n, &q, tokens, start));
}

void gemrun_cancel(gemrun_context_t *ctx)
{
    if (ctx)
        atomic_store(&ctx->cancel, 1);
}

/* ---- tokens ---- */

void gemrun_reset_kv_cache(gemrun_context_t *ctx)
{
    gr_call c;
    if (gr_enter(ctx, &c) == GEMRUN_OK) {
        reset(ctx);
        unpin(ctx);
        gr_leave(ctx, &c, 0);
    }
}

int32_t gemrun_tokenize(gemrun_context_t *ctx, const char *text, size_t size, uint32_t flags,
                        int32_t *ids, size_t capacity)
{
    gr_call c;
    gemrun_status st = gr_enter(ctx, &c);
    if (st != GEMRUN_OK)
        return st;
    int64_t n = GEMRUN_E_ARGUMENT;
    if ((!text && size > 0) || (!ids && capacity > 0) || flags > 3) {
        gr_fail(&ctx->e.err, GEMRUN_E_ARGUMENT, flags > 3 ? GR_F_FLAGS : GR_F_NONE, 3, flags);
    } else {
        capacity = capacity > INT32_MAX ? INT32_MAX : capacity;
        n = encode_text(&ctx->e, text ? text : "", size, flags, (uint32_t *)(void *)ids, capacity);
    }
    if (n == GEMRUN_E_PROMPT) /* here it is the caller's room that is short */
        n = gr_fail(&ctx->e.err, GEMRUN_E_ARGUMENT, GR_F_CAPACITY, ctx->e.err.wanted, capacity);
    return gr_leave(ctx, &c, (int32_t)n);
}

int64_t gemrun_detokenize(gemrun_context_t *ctx, const int32_t *ids, size_t count, uint32_t flags,
                          char *text, size_t capacity)
{
    gr_call c;
    gemrun_status st = gr_enter(ctx, &c);
    if (st != GEMRUN_OK)
        return st;
    if ((count > 0 && !ids) || (capacity > 0 && !text) || flags > 3) {
        gr_fail(&ctx->e.err, GEMRUN_E_ARGUMENT, flags > 3 ? GR_F_FLAGS : GR_F_NONE, 3, flags);
        return gr_leave(ctx, &c, GEMRUN_E_ARGUMENT);
    }
    const gr_tok *t = &ctx->e.v.tok;
    gr_utf8_stream utf8 = {0};
    uint8_t piece[PIECE], out[3 * PIECE + 8];
    uint64_t total = 0;
    for (size_t i = 0; i <= count; i++) {
        size_t n = 0;
        const uint8_t *from = piece;
        if (i < count && !is_row(&ctx->e, ids[i]))
            return gr_leave(ctx, &c, GEMRUN_E_TOKEN);
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
    gr_leave(ctx, &c, 0);
    return (int64_t)total;
}

int32_t gemrun_prefill(gemrun_context_t *ctx, const int32_t *ids, size_t count)
{
    gr_call c;
    gemrun_status st = gr_enter(ctx, &c);
    if (st != GEMRUN_OK)
        return st;
    st = ids_fit(&ctx->e, ids, count);
    if (st == GEMRUN_OK)
        st = append(ctx, (const uint32_t *)(const void *)ids, (uint32_t)count, 1, NULL, NULL, NULL);
    return gr_leave(ctx, &c, st != GEMRUN_OK ? (int32_t)st : (int32_t)ctx->e.pos);
}

int32_t gemrun_decode(gemrun_context_t *ctx, int32_t id)
{
    return gemrun_prefill(ctx, &id, 1);
}

int32_t gemrun_sample(gemrun_context_t *ctx, const gemrun_request *request)
{
    gr_call c;
    gemrun_request q;
    gemrun_status st = gr_enter(ctx, &c);
    if (st != GEMRUN_OK)
        return st;
    uint32_t id = 0;
    st = check_request(&ctx->e, request, &q);
    if (st == GEMRUN_OK && !ctx->e.logits_valid)
        st = gr_fail(&ctx->e.err, GEMRUN_E_STATE, 0, 0, 0);
    st = st == GEMRUN_OK ? sample(ctx, &q, &id) : st;
    return gr_leave(ctx, &c, st != GEMRUN_OK ? (int32_t)st : (int32_t)id);
}

static int take_logits(void *user, uint32_t position, const float *logits, uint32_t count)
{
    generation *r = user;
    if (r->on_logits(r->user, position, logits, count) != 0)
        r->finish = GEMRUN_FINISH_CALLBACK;
    return r->finish != GEMRUN_FINISH_NONE;
}

int32_t gemrun_eval(gemrun_context_t *ctx, const int32_t *ids, size_t count, gemrun_logits_fn fn,
                    void *user)
{
    gr_call c;
    gemrun_status st = gr_enter(ctx, &c);
    if (st != GEMRUN_OK)
        return st;
    generation r = {.ctx = ctx, .on_logits = fn, .user = user};
    atomic_store(&ctx->cancel, 0);
    st = fn ? ids_fit(&ctx->e, ids, count)
            : gr_fail(&ctx->e.err, GEMRUN_E_ARGUMENT, GR_F_NONE, 0, 0);
    if (st == GEMRUN_OK)
        st = append(ctx, (const uint32_t *)(const void *)ids, (uint32_t)count, 2, take_logits,
                    &r, &r);
    unpin(ctx);
    return gr_leave(ctx, &c, st != GEMRUN_OK ? (int32_t)st : (int32_t)ctx->e.pos);
}

static const float *idle_buffer(const gemrun_context_t *ctx, uint32_t kind)
{
    return ctx && ctx->e.logits_valid && !atomic_load(&ctx->busy)
               ? (const float *)(const void *)ctx->e.buf[kind]
               : NULL;
}

const float *gemrun_logits(const gemrun_context_t *ctx, uint32_t *out_count)
{
    const float *p = idle_buffer(ctx, GB_BUF_LOGITS);
    if (out_count)
        *out_count = p ? ctx->e.v.conf.vocab_rows : 0;
    return p;
}

const float *gemrun_embedding(const gemrun_context_t *ctx, uint32_t *out_count)
{
    const float *p = idle_buffer(ctx, GB_BUF_HIDDEN);
    if (out_count)
        *out_count = p ? ctx->e.v.conf.hidden : 0;
    return p;
}

/* ---- test vectors ---- */

static uint64_t digest(const gr_engine *e, uint64_t hash)
{
    const uint8_t *p = (const uint8_t *)logits_of(e); /* little-endian: the reader made sure */
    for (uint64_t i = 0; i < (uint64_t)e->v.conf.vocab_rows * sizeof(float); i++)
        hash = (hash ^ p[i]) * FNV_PRIME;
    return hash;
}

/* Greedy steps from an empty cache. `steps` is filled in. */
static gemrun_status replay(gemrun_context_t *ctx, const uint32_t *prompt, uint32_t prompt_count,
                            uint32_t *steps, uint32_t step_count, uint64_t *out_digest)
{
    gr_engine *e = &ctx->e;
    gemrun_request q = {.size = sizeof q, .max_tokens = 1, .top_p = 1, .repetition_penalty = 1};
    uint64_t needed = gr_add(prompt_count, step_count);
    reset(ctx);
    if (prompt_count < 1 || needed > e->context)
        return no_room(e, prompt_count < 1 ? GEMRUN_E_PROMPT : GEMRUN_E_FULL,
                       prompt_count < 1 ? 0 : needed);
    for (uint32_t i = 0; i < prompt_count; i++)
        if (!is_row(e, prompt[i]))
            return GEMRUN_E_TOKEN;
    gemrun_status st = append(ctx, prompt, prompt_count, 1, NULL, NULL, NULL);
    uint64_t hash = FNV_START;
    for (uint32_t i = 0; st == GEMRUN_OK && i <= step_count; i++) {
        hash = digest(e, hash);
        if (i < step_count) {
            st = sample(ctx, &q, steps + i);
            st = st == GEMRUN_OK ? append(ctx, steps + i, 1, 1, NULL, NULL, NULL) : st;
        }
    }
    *out_digest = hash;
    return st;
}

int32_t gemrun_run_tests(gemrun_context_t *ctx)
{
    gr_call c;
    gemrun_status st = gr_enter(ctx, &c);
    if (st != GEMRUN_OK)
        return st;
    const gr_view *v = &ctx->e.v;
    uint32_t passed = 0;
    for (uint32_t i = 0; st == GEMRUN_OK && i < v->test_count; i++) {
        gb_test t;
        uint32_t steps[GB_TEST_STEPS] = {0};
        uint64_t hash = 0;
        memcpy(&t, v->tests + (uint64_t)i * v->test_stride, sizeof t);
        if (t.prompt_count > GB_TEST_PROMPT || t.step_count > GB_TEST_STEPS) {
            st = gr_fail(&ctx->e.err, GEMRUN_E_TEST, 0, GB_TEST_STEPS, t.step_count);
            break; /* the file was changed after it was opened */
        }
        st = replay(ctx, t.prompt, t.prompt_count, steps, t.step_count, &hash);
        if (st == GEMRUN_OK) {
            bool same = hash == t.digest && memcmp(steps, t.steps, sizeof steps) == 0;
            st = same ? GEMRUN_OK : gr_fail(&ctx->e.err, GEMRUN_E_TEST_FAILED, 0, t.digest, hash);
            passed += same;
        }
    }
    reset(ctx);
    unpin(ctx);
    return gr_leave(ctx, &c, st != GEMRUN_OK ? (int32_t)st : (int32_t)passed);
}

/* ---- hooks of the compiler (gr_hooks.h) ---- */

int32_t gemrun_internal_digest(gemrun_context_t *ctx, const uint32_t *prompt,
                               uint32_t prompt_count, uint32_t *out_steps, uint32_t step_count,
                               uint64_t *out_digest)
{
    gr_call c;
    gemrun_status st = gr_enter(ctx, &c);
    if (st != GEMRUN_OK)
        return st;
    st = replay(ctx, prompt, prompt_count, out_steps, step_count, out_digest);
    reset(ctx);
    unpin(ctx);
    return gr_leave(ctx, &c, st);
}

int32_t gemrun_internal_hidden(gemrun_context_t *ctx, float *x, uint32_t count, gr_capture capture,
                               void *user)
{
    gr_call c;
    gemrun_status st = gr_enter(ctx, &c);
    if (st != GEMRUN_OK)
        return st;
    gr_engine *e = &ctx->e;
    if (!x || count > e->context - e->pos) {
        gr_fail(&e->err, x ? GEMRUN_E_FULL : GEMRUN_E_ARGUMENT, 0, gr_add(e->pos, count),
                e->context);
        return gr_leave(ctx, &c, e->err.code);
    }
    e->capture = capture;
    e->capture_user = user;
    for (uint32_t done = 0, n; st == GEMRUN_OK && done < count; done += n) {
        n = count - done < e->chunk ? count - done : e->chunk;
        st = gr_forward_hidden(e, x + (size_t)done * e->v.conf.hidden, n);
    }
    e->capture = NULL;
    if (st != GEMRUN_OK)
        reset(ctx);
    return gr_leave(ctx, &c, st != GEMRUN_OK ? (int32_t)st : (int32_t)e->pos);
}
