/* gs_turn.c: a run behind what is in the context (gemrun_session.h).
 *
 * Its prompt is the ids of the cache and, behind them, those of what is new, and it reuses the
 * cache: so it is the run of all of them from an empty one, and where guesses have pushed keys out
 * of a ring that it would go on from, they are computed again. */
#include "gemrun_session.h"

#include <stdio.h>
#include <string.h>

#include "gr_ctx.h"
#include "gr_model.h"
#include "gs_handle.h"

enum { SENTENCE = 256 };

typedef struct turn { /* what the callbacks of a run need */
    const gemrun_request *asked;
    uint32_t last; /* id of its latest token */
} turn;

static gemrun_status refuse(gemrun_status code, const gemrun_context_t *ctx, const char *what)
{
    return gs_refuse(code, ctx->name[0] ? ctx->name : "model", what);
}

static uint32_t *prompt_of(const gr_engine *e)
{
    return (uint32_t *)(void *)e->buf[GB_BUF_PROMPT];
}

/* ---- ids of a turn ---- */

/* The first control token of a slot of the template, or GB_TOK_NONE. */
static uint32_t control_of(const gr_chat *c, uint32_t slot)
{
    for (uint32_t i = c->h->slot[slot]; i < c->h->slot[slot + 1]; i++)
        if (c->items[i].token != GB_TOK_NONE)
            return c->items[i].token;
    return GB_TOK_NONE;
}

/* A turn can be put behind an answer by its ids where it begins with a control token: text on both
 * sides of one is encoded apart. */
static bool can_be_appended(const gr_chat *c)
{
    uint32_t first = c->h->slot[GB_SLOT_ASST_USER];
    return first < c->h->slot[GB_SLOT_ASST_USER + 1] && c->items[first].token != GB_TOK_NONE &&
           control_of(c, GB_SLOT_GENERATE) != GB_TOK_NONE;
}

/* Where an id stands, from `at` on; `count`: nowhere. */
static size_t find(const uint32_t *ids, size_t count, size_t at, uint32_t id)
{
    while (at < count && ids[at] != id)
        at++;
    return at;
}

/* Can this turn be put behind what is in the context? */
static gemrun_status check_turn(const gemrun_context_t *ctx, const char *system)
{
    const gr_engine *e = &ctx->e;
    const gr_chat *c = &e->v.chat;
    const uint32_t *ids = (const uint32_t *)(const void *)e->buf[GB_BUF_IDS];
    if (!e->v.has_chat || e->pos == 0)
        return GEMRUN_OK;
    if (system)
        return refuse(GEMRUN_E_NO_CHAT, ctx, "a system message belongs to the beginning of a "
                      "conversation; leave it out, or begin another session");
    if (!can_be_appended(c))
        return refuse(GEMRUN_E_NO_CHAT, ctx, "its chat template encodes an answer and the turn "
                      "behind it as one text; go on with raw text, or without a session");
    return find(ids, e->pos, 0, control_of(c, GB_SLOT_GENERATE)) < e->pos
               ? GEMRUN_OK
               : refuse(GEMRUN_E_STATE, ctx, "what is in the context is no conversation; go on "
                        "with raw text, or begin another session");
}

/* Where a turn begins in the ids of a conversation of two empty messages and it: behind the control
 * tokens of those, which no text makes. */
static size_t turn_in(const gr_chat *c, const uint32_t *ids, size_t count)
{
    static const uint32_t before[] = {GB_SLOT_FIRST, GB_SLOT_USER_ASST};
    size_t at = 0;
    for (uint32_t s = 0; s < sizeof before / sizeof before[0]; s++)
        for (uint32_t i = c->h->slot[before[s]]; i < c->h->slot[before[s] + 1]; i++)
            if (c->items[i].token != GB_TOK_NONE && at < count)
                at = find(ids, count, at, c->items[i].token) + 1;
    return at < count ? find(ids, count, at, control_of(c, GB_SLOT_ASST_USER)) : count;
}

/* ---- ids of a prompt ----
 *
 * Into GB_BUF_PROMPT, from `at` on. Returns how many there are, also where they have no room, or a
 * status of the engine. */

static int64_t encode_turn(gr_engine *e, uint32_t at, const char *text)
{
    const gemrun_message messages[] = {{GEMRUN_USER, ""}, {GEMRUN_ASSISTANT, ""},
                                       {GEMRUN_USER, text}};
    uint32_t *ids = prompt_of(e), room = e->v.conf.context + 1;
    int64_t made = gr_encode_chat(e, messages, sizeof messages / sizeof messages[0]);
    if (made < 0 || made > room)
        return made;
    size_t from = turn_in(&e->v.chat, ids, (size_t)made), count = (size_t)made - from;
    if (count == 0) /* the file was changed after it was opened */
        return gr_fail(&e->err, GEMRUN_E_TMPL, 0, 0, 0);
    if (count <= room - at)
        memmove(ids + at, ids + from, count * sizeof *ids);
    return (int64_t)count;
}

static int64_t encode_conversation(gr_engine *e, const char *system, const char *text)
{
    const gemrun_message messages[] = {{GEMRUN_SYSTEM, system}, {GEMRUN_USER, text}};
    size_t skip = system ? 0 : 1;
    return gr_encode_chat(e, messages + skip, 2 - skip);
}

static int64_t encode_raw(gr_engine *e, uint32_t at, const char *text)
{
    return gr_encode_text(e, text, strlen(text), at == 0 ? 3 : 2, prompt_of(e) + at,
                          (size_t)e->v.conf.context + 1 - at);
}

/* ---- runs ---- */

static int on_text(void *user, int32_t token, const char *text, size_t size)
{
    turn *t = user;
    t->last = token >= 0 ? (uint32_t)token : t->last;
    return t->asked->on_text ? t->asked->on_text(t->asked->user, token, text, size) : 0;
}

static int on_step(void *user, uint32_t *threads)
{
    turn *t = user;
    return t->asked->on_step(t->asked->user, threads);
}

/* A run ended before its first token: what is in the cache is what was, or nothing, where its rings
 * have gone on. */
static void take_back(gemrun_context_t *ctx, uint32_t before)
{
    gr_engine *e = &ctx->e;
    if (e->pos < before || gr_kv_evicts(e, before, e->high - before)) {
        gr_reset(ctx);
    } else {
        e->pos = before;
        e->logits_valid = false;
    }
}

/* Of its last token a run computes nothing: here it goes into the context, too. */
static int32_t run(gemrun_context_t *ctx, uint32_t count, const gemrun_request *asked,
                   int32_t *tokens, uint64_t start)
{
    gr_engine *e = &ctx->e;
    uint32_t before = e->pos;
    turn t = {.asked = asked};
    gemrun_request q = *asked;
    q.reuse = 1;
    q.user = &t;
    q.on_text = on_text;
    q.on_step = asked->on_step ? on_step : NULL;
    int32_t n = gr_generate(ctx, count, &q, tokens, start);
    if (n < 0 || ctx->last.finish == GEMRUN_FINISH_STOP_ID)
        return n;
    gemrun_status st = GEMRUN_OK;
    if (n == 0)
        take_back(ctx, before);
    else if (e->pos < e->context)
        st = gr_append(ctx, &t.last, 1, NULL);
    gr_unpin(ctx);
    if (st != GEMRUN_OK)
        gr_reset(ctx);
    return st == GEMRUN_OK ? n : (int32_t)st;
}

/* ---- calls ---- */

static gemrun_status check_room(gemrun_context_t *ctx, uint64_t more)
{
    gr_engine *e = &ctx->e;
    char what[SENTENCE];
    if (more <= e->context - e->pos)
        return GEMRUN_OK;
    snprintf(what, sizeof what, "the prompt's %llu tokens do not fit behind the %u in the context "
             "(room for %u); shorten it, or begin another session", (unsigned long long)more,
             e->pos, e->context);
    return refuse(GEMRUN_E_PROMPT, ctx, what);
}

/* The context is entered. `said`: the sentence of a failure is there already. */
static int32_t answer(gemrun_context_t *ctx, const char *system, const char *text, bool chat,
                      const gemrun_request *request, int32_t *tokens, bool *said)
{
    gr_engine *e = &ctx->e;
    gemrun_request q;
    uint64_t start = gr_port_now();
    uint32_t at = e->pos;
    atomic_store(&ctx->cancel, 0);
    if (gr_check_request(e, request, &q) != GEMRUN_OK)
        return e->err.code;
    if (chat && !e->v.has_chat)
        return gr_fail(&e->err, GEMRUN_E_NO_CHAT, 0, 1, 0);
    gemrun_status st = chat ? check_turn(ctx, system) : GEMRUN_OK;
    *said = st != GEMRUN_OK;
    if (*said)
        return st;
    int64_t more = !chat     ? encode_raw(e, at, text)
                   : at == 0 ? encode_conversation(e, system, text)
                             : encode_turn(e, at, text);
    if (more < 0)
        return (int32_t)more;
    if (at == 0 && (more == 0 || more > e->context))
        return gr_no_room(e, GEMRUN_E_PROMPT, (uint64_t)more);
    st = check_room(ctx, (uint64_t)more);
    *said = st != GEMRUN_OK;
    if (*said)
        return st;
    memcpy(prompt_of(e), e->buf[GB_BUF_IDS], at * sizeof(uint32_t));
    uint32_t count = at + (uint32_t)more;
    st = gr_check_ids(e, prompt_of(e), count); /* of tables that may have changed since open */
    return st == GEMRUN_OK ? run(ctx, count, &q, tokens, start) : (int32_t)st;
}

static int32_t call(gemrun_context_t *ctx, const char *system, const char *text, bool chat,
                    const gemrun_request *request, int32_t *tokens)
{
    if (!text)
        return gr_refuse(GR_F_NONE, 0, 0);
    gemrun_status st = gr_enter(ctx);
    if (st != GEMRUN_OK)
        return st;
    bool said = false;
    int32_t n = answer(ctx, system, text, chat, request, tokens, &said);
    gr_leave(ctx, said ? 0 : n);
    return n;
}

int32_t gemrun_session_generate(gemrun_context_t *ctx, const char *prompt,
                                const gemrun_request *request, int32_t *tokens)
{
    return call(ctx, NULL, prompt, false, request, tokens);
}

int32_t gemrun_session_turn(gemrun_context_t *ctx, const char *system, const char *user,
                            const gemrun_request *request, int32_t *tokens)
{
    return call(ctx, system, user, true, request, tokens);
}
