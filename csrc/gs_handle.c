/* gs_handle.c: a model behind a handle: requests, pace, replacement (gemrun_control.h). */
#define _POSIX_C_SOURCE 200809L
#include "gs_handle.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "gemrun_board.h"
#include "gr_check.h"
#include "gr_port.h"
#include "gs_pace.h"

#define MS 1000000
enum { MOST_THREADS = 8, REPEAT_NS = 1000 * MS };

uint64_t gs_now(void)
{
    return gr_port_now();
}

gemrun_status gs_refuse(gemrun_status code, const char *object, const char *what)
{
    size_t capacity;
    char *text = gr_port_text(&capacity);
    snprintf(text, capacity, "%s: %s", object, what);
    return code;
}

static double ms_since(uint64_t start)
{
    return (double)(gs_now() - start) / MS;
}

/* ---- callers ---- */

static bool enter(gemrun_handle_t *h)
{
    pthread_mutex_lock(&h->lock);
    bool may = !h->closing;
    h->inside += may;
    pthread_mutex_unlock(&h->lock);
    return may;
}

static void leave(gemrun_handle_t *h)
{
    pthread_mutex_lock(&h->lock);
    h->inside--;
    pthread_cond_broadcast(&h->changed);
    pthread_mutex_unlock(&h->lock); /* the last touch: close may go on */
}

/* ---- pace: under the handle's lock ---- */

/* Processor time of this thread: of a team's threads all work as long as the caller's. */
static uint64_t used_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Time without a request counts as sleep. */
static void begin_request(gs_pace *p)
{
    uint64_t now = gs_now();
    p->owed = gs_owed(p->owed - (int64_t)(now - p->since));
    p->since = now;
    p->used = used_now();
}

static void end_request(gs_pace *p, const gs_share *s)
{
    uint64_t now = gs_now();
    if (s->duty > 0)
        p->owed = gs_owed(p->owed + gs_rest_of(s->duty, now - p->since, used_now() - p->used));
    p->since = now;
}

static void wait_until(gemrun_handle_t *h, uint64_t when)
{
    struct timespec t = {.tv_sec = (time_t)(when / 1000000000u),
                         .tv_nsec = (long)(when % 1000000000u)};
    pthread_cond_timedwait(&h->changed, &h->lock, &t);
}

/* Sleep for the step that just ended, of share `s`. A new duty counts from there; a cancel and the
 * request's deadline (`until`; 0: none) end the sleep, and a duty of 0 for what comes next (`to`)
 * makes one without end. Where only what ended may not go on, as after the last part of a prompt,
 * it pays by the share of what comes. */
static void keep_pace(gemrun_handle_t *h, const gs_model *m, uint64_t until, const gs_share *s,
                      const gs_share *to)
{
    gs_pace *p = &h->pace;
    uint64_t ended = gs_now(), busy = ended - p->since, used = used_now() - p->used;
    int64_t before = p->owed, slept = 0;
    for (;;) {
        bool may = to->duty > 0;
        uint32_t duty = s->duty > 0 ? s->duty : to->duty;
        int64_t owed = may ? before + gs_rest_of(duty, busy, used) : INT64_MAX;
        uint64_t now = gs_now();
        bool late = until > 0 && now >= until;
        slept = (int64_t)(now - ended);
        if (m->cancelled || h->closing || late || owed <= slept) {
            p->owed = gs_owed(may ? owed - slept : 0);
            break;
        }
        h->asleep = true;
        uint64_t wake = may ? ended + (uint64_t)owed : now + REPEAT_NS;
        wait_until(h, until > 0 && until < wake ? until : wake);
    }
    h->asleep = false;
    p->since = gs_now();
    p->used = used_now();
}

/* ---- requests ---- */

typedef struct ride { /* a request on its way, and the caller's own callbacks */
    gemrun_handle_t *h;
    gs_model *model;
    const gemrun_request *from;
    uint64_t until;      /* its deadline, by gs_now; 0: none */
    uint32_t threads;    /* by the caller's own on_step; 0: as opened */
    bool decoding;       /* the next step is a token's, not one of the prompt */
    const gs_share *now; /* of the step in flight */
} ride;

static uint32_t fewer(uint32_t a, uint32_t b) /* threads; 0: as opened */
{
    return a > 0 && (b == 0 || a < b) ? a : b;
}

static int on_text(void *user, int32_t token, const char *text, size_t size)
{
    ride *r = user;
    r->decoding = true;
    r->model->ctx->e.chunk = r->model->chunk; /* only a prompt comes in smaller pieces */
    bool heard = r->from && r->from->on_text;
    return heard ? r->from->on_text(r->from->user, token, text, size) : 0;
}

static int on_step(void *user, uint32_t *threads)
{
    ride *r = user;
    gemrun_handle_t *h = r->h;
    const gs_share *next = r->decoding ? &h->pace.now.decode : &h->pace.now.prefill;
    if (r->from && r->from->on_step && r->from->on_step(r->from->user, &r->threads) != 0)
        return 1;
    pthread_mutex_lock(&h->lock);
    h->steps++;
    gs_heed_heat(h);
    keep_pace(h, r->model, r->until, r->now, next);
    if (!r->decoding)
        r->model->ctx->e.chunk = gs_share_of(r->model->chunk, h->heat.rung.chunk);
    r->now = next;
    *threads = fewer(r->threads, next->threads); /* more than were opened: as opened */
    if (r->model->cancelled || h->closing)
        gemrun_cancel(r->model->ctx);
    pthread_mutex_unlock(&h->lock);
    return 0;
}

static void free_model(gs_model *m)
{
    if (m) {
        gemrun_destroy(m->ctx);
        free(m);
    }
}

/* Wait until it is our turn, or until there is nothing to wait for. */
static void wait_in_line(gemrun_handle_t *h)
{
    gs_waiter me = {NULL}, **at = &h->queue;
    while (*at)
        at = &(*at)->next;
    *at = &me;
    while (h->model && !h->closing && (h->riding || h->queue != &me))
        pthread_cond_wait(&h->changed, &h->lock);
    for (at = &h->queue; *at != &me;)
        at = &(*at)->next;
    *at = me.next;
    pthread_cond_broadcast(&h->changed); /* who is first now may have been told too early */
}

/* The model in use, for the caller alone; NULL: disabled, or the handle closes. Who waits for one
 * that is replaced meanwhile has not begun, and takes the new one; its turn comes when the last
 * request on the old one is over, so that two never share the processor and the pace. */
static gs_model *take(gemrun_handle_t *h)
{
    pthread_mutex_lock(&h->lock);
    wait_in_line(h);
    gs_model *m = h->closing ? NULL : h->model;
    if (m) {
        m->cancelled = false;
        h->riding = m;
        begin_request(&h->pace);
    }
    pthread_mutex_unlock(&h->lock);
    return m;
}

/* `n`: what the run returned. */
static void give_back(const ride *r, const gemrun_stats *s, int32_t n)
{
    gemrun_handle_t *h = r->h;
    gs_model *m = r->model;
    pthread_mutex_lock(&h->lock);
    end_request(&h->pace, r->now);
    m->ctx->e.chunk = m->chunk;
    h->riding = NULL;
    h->requests++;
    h->failed += n < 0;
    h->faults += n <= GEMRUN_E_OPEN || (s && s->nonfinite_errors > 0);
    h->tokens += s ? s->generated_tokens : 0;
    if (s)
        h->last = *s;
    bool retired = h->model != m;
    pthread_cond_broadcast(&h->changed);
    pthread_mutex_unlock(&h->lock);
    if (retired)
        free_model(m);
}

/* A whole turn: `r` has the handle and what the caller gave. */
static int32_t take_turn(ride *r, gemrun_run_fn run, void *arg)
{
    r->model = take(r->h);
    if (!r->model)
        return gs_refuse(GEMRUN_E_STATE, "handle", "the model is disabled, or the handle closes; "
                         "enable it, or open another");
    gemrun_request q = r->from ? *r->from : gemrun_request_default(r->model->ctx);
    gemrun_stats s = {.size = sizeof s};
    if (q.deadline_ns > 0)
        r->until = gr_add(gs_now(), q.deadline_ns);
    q.on_text = on_text;
    q.on_step = on_step;
    q.user = r;
    int32_t n = run(r->model->ctx, &q, arg);
    bool known = n >= 0 && gemrun_get_stats(r->model->ctx, &s) == GEMRUN_OK;
    give_back(r, known ? &s : NULL, n);
    return n;
}

static gemrun_status refuse_closing(void)
{
    return gs_refuse(GEMRUN_E_STATE, "handle", "it closes; open another");
}

int32_t gemrun_handle_run(gemrun_handle_t *h, const gemrun_request *request, gemrun_run_fn run,
                          void *arg)
{
    if (!h || !run)
        return gs_refuse(GEMRUN_E_ARGUMENT, "handle", "a null pointer; give an open handle");
    if (request && request->size != sizeof *request)
        return gs_refuse(GEMRUN_E_ARGUMENT, "request",
                         "its size is not gemrun_request's; start from gemrun_handle_request");
    ride r = {.h = h, .from = request, .now = &h->pace.now.prefill};
    if (!enter(h))
        return refuse_closing();
    int32_t n = take_turn(&r, run, arg);
    leave(h);
    return n;
}

gemrun_request gemrun_handle_request(gemrun_handle_t *h)
{
    if (!h)
        return gemrun_request_default(NULL);
    pthread_mutex_lock(&h->lock);
    gemrun_request q = h->facts.request;
    pthread_mutex_unlock(&h->lock);
    return q;
}

typedef struct call { /* arguments of a generate or a chat */
    const char *prompt;
    const gemrun_message *messages;
    size_t count;
    int32_t *tokens;
} call;

static int32_t run_call(gemrun_context_t *ctx, const gemrun_request *q, void *arg)
{
    const call *c = arg;
    return c->messages ? gemrun_chat(ctx, c->messages, c->count, q, c->tokens)
                       : gemrun_generate(ctx, c->prompt, q, c->tokens);
}

int32_t gemrun_handle_generate(gemrun_handle_t *h, const char *prompt,
                               const gemrun_request *request, int32_t *tokens)
{
    return gemrun_handle_run(h, request, run_call, &(call){.prompt = prompt, .tokens = tokens});
}

int32_t gemrun_handle_chat(gemrun_handle_t *h, const gemrun_message *messages, size_t count,
                           const gemrun_request *request, int32_t *tokens)
{
    if (!messages)
        return gs_refuse(GEMRUN_E_ARGUMENT, "messages", "a null pointer; give a conversation");
    return gemrun_handle_run(h, request, run_call,
                  &(call){.messages = messages, .count = count, .tokens = tokens});
}

void gemrun_handle_cancel(gemrun_handle_t *h)
{
    if (!h)
        return;
    pthread_mutex_lock(&h->lock);
    if (h->riding) {
        h->riding->cancelled = true;
        gemrun_cancel(h->riding->ctx);
    }
    pthread_cond_broadcast(&h->changed);
    pthread_mutex_unlock(&h->lock);
}

/* ---- open, replace, close ---- */

static gemrun_status take_facts(gs_model *m)
{
    gemrun_info i = {.size = sizeof i};
    gemrun_stats s = {.size = sizeof s};
    gemrun_status st = gemrun_get_info(m->ctx, &i);
    st = st == GEMRUN_OK ? gemrun_get_stats(m->ctx, &s) : st;
    if (st != GEMRUN_OK)
        return st;
    gs_facts *f = &m->facts;
    *f = (gs_facts){.context = i.context, .kv_size = s.kv_size, .kv_type = i.kv_type,
                    .has_chat = i.has_chat, .threads = s.threads, .ram_total = s.ram_total,
                    .ram_kv = s.ram_kv, .locked = s.locked_bytes,
                    .request = gemrun_request_default(m->ctx)};
    f->layout = m->ctx->e.v.header.kv_layout_id;
    f->unlocked = gemrun_lockable(m->ctx) - s.locked_bytes;
    snprintf(f->name, sizeof f->name, "%s", i.name);
    snprintf(f->family, sizeof f->family, "%s", i.family);
    snprintf(f->target, sizeof f->target, "%s", i.target);
    snprintf(f->kernel, sizeof f->kernel, "%s", i.kernel);
    m->chunk = m->ctx->e.chunk;
    return gs_ladder_of(&m->ctx->e.v, &m->ladder)
               ? GEMRUN_OK
               : gs_refuse(GEMRUN_E_THRM, i.name, "the ladder of its thermal policy breaks a rule; "
                           "compile it again");
}

static gs_model *open_model(gemrun_handle_t *h, const char *path, bool check_weights,
                            gemrun_status *st)
{
    gs_model *m = calloc(1, sizeof *m);
    gemrun_config c = h->config;
    c.weights_check = check_weights ? GEMRUN_WEIGHTS_FULL : c.weights_check;
    if (!m) {
        *st = gs_refuse(GEMRUN_E_MAP, path, "no memory left for it; free some");
        return NULL;
    }
    *st = gemrun_open(&m->ctx, path, &c);
    if (*st == GEMRUN_E_ARGUMENT && c.prefill_batch_size > 0) {
        c.prefill_batch_size = 0; /* this version is compiled for less than the handle's others */
        *st = gemrun_open(&m->ctx, path, &c);
    }
    *st = *st == GEMRUN_OK && !c.ignore_memory ? gemrun_stream(m->ctx) : *st;
    *st = *st == GEMRUN_OK ? take_facts(m) : *st;
    bool ask = *st == GEMRUN_OK && !c.allow_foreign_board;
    int32_t found = ask ? gemrun_check_board(m->ctx, path, NULL) : 0;
    *st = found < 0 ? (gemrun_status)found : *st;
    if (*st == GEMRUN_OK)
        return m;
    free_model(m);
    return NULL;
}

/* A token, so that every page and table was used once. */
static gemrun_status warm_up(gs_model *m, const char *prompt)
{
    gemrun_request q = gemrun_request_default(m->ctx);
    q.max_tokens = 1;
    int32_t n = gemrun_generate(m->ctx, prompt, &q, NULL);
    gemrun_reset_kv_cache(m->ctx);
    return n < 0 ? (gemrun_status)n : GEMRUN_OK;
}

/* Put `m` (NULL: none) in the place of the model in use, whose last request frees it. */
static void flip(gemrun_handle_t *h, gs_model *m, bool replaces)
{
    pthread_mutex_lock(&h->lock);
    gs_model *old = h->model;
    bool idle = old != h->riding;
    h->model = m;
    if (m)
        h->facts = m->facts;
    h->replaced += replaces;
    pthread_cond_broadcast(&h->changed);
    pthread_mutex_unlock(&h->lock);
    if (idle)
        free_model(old);
}

static bool same_layout(gemrun_handle_t *h, const gs_model *m)
{
    pthread_mutex_lock(&h->lock);
    bool same = h->facts.context == m->facts.context && h->facts.layout == m->facts.layout;
    pthread_mutex_unlock(&h->lock);
    return same;
}

static void forget(gs_source *s)
{
    if (s->file >= 0)
        close(s->file);
    free(s->path);
    *s = (gs_source){.file = -1};
}

static gemrun_status name_source(gs_source *s, const char *path, int file, const char *digest)
{
    *s = (gs_source){.path = strdup(path), .file = file};
    snprintf(s->digest, sizeof s->digest, "%s", digest ? digest : "");
    return s->path ? GEMRUN_OK
                   : gs_refuse(GEMRUN_E_MAP, path, "no memory left for its name; free some");
}

/* The model in use is from `from` from now on; `back`: that was the one before it, and what it
 * takes the place of is forgotten. */
static void settle(gemrun_handle_t *h, const gs_source *from, bool back)
{
    pthread_mutex_lock(&h->lock);
    gs_source left = back ? h->newest : h->before;
    h->before = back ? (gs_source){.file = -1} : h->newest;
    h->newest = *from;
    pthread_mutex_unlock(&h->lock);
    forget(&left);
}

/* Tests and warm-up of a candidate, timed. */
static gemrun_status prove(gs_model *m, const gemrun_replacement *o, gemrun_replace_times *t)
{
    uint64_t start = gs_now();
    int32_t n = o->skip_tests ? 0 : gemrun_run_tests(m->ctx);
    t->test_ms = ms_since(start);
    t->tests = n > 0 ? (uint32_t)n : 0;
    start = gs_now();
    gemrun_status st = n < 0             ? (gemrun_status)n
                       : o->warmup_prompt ? warm_up(m, o->warmup_prompt)
                                          : GEMRUN_OK;
    t->warmup_ms = ms_since(start);
    return st;
}

/* `from` is the handle's where this succeeds. */
static gemrun_status replace(gemrun_handle_t *h, const gs_source *from, bool back,
                             const gemrun_replacement *o, gemrun_replace_times *t)
{
    gemrun_status st;
    uint64_t start = gs_now();
    gs_model *m = open_model(h, from->path, o->check_weights, &st);
    t->open_ms = ms_since(start);
    if (!m)
        return st;
    if (!o->allow_layout_change && !same_layout(h, m))
        st = gs_refuse(GEMRUN_E_CONTEXT, from->path, "its context, KV type or shape differs from "
                       "the model in use; compile it alike, or allow the layout change");
    st = st == GEMRUN_OK ? prove(m, o, t) : st;
    if (st != GEMRUN_OK) {
        free_model(m);
        return st;
    }
    memcpy(m->facts.digest, from->digest, sizeof m->facts.digest);
    start = gs_now();
    settle(h, from, back);
    flip(h, m, true);
    t->flip_ms = ms_since(start);
    return GEMRUN_OK;
}

/* A replacement by what is named; `file` is the caller's again where this fails. */
static gemrun_status replace_by(gemrun_handle_t *h, const char *path, int file, const char *digest,
                                const gemrun_replacement *o, gemrun_replace_times *t)
{
    gs_source from;
    if (!enter(h))
        return refuse_closing();
    pthread_mutex_lock(&h->changing);
    gemrun_status st = name_source(&from, path, file, digest);
    st = st == GEMRUN_OK ? replace(h, &from, false, o, t) : st;
    pthread_mutex_unlock(&h->changing);
    leave(h);
    if (st != GEMRUN_OK)
        free(from.path);
    return st;
}

gemrun_status gemrun_replace(gemrun_handle_t *h, const char *path,
                             const gemrun_replacement *options, gemrun_replace_times *times)
{
    gemrun_replacement o = {.size = sizeof o};
    gemrun_replace_times t = {.size = sizeof t};
    bool sized = (!options || options->size == sizeof o) && (!times || times->size == sizeof t);
    if (!h || !path || !sized)
        return gs_refuse(GEMRUN_E_ARGUMENT, "gemrun_replace",
                         "a null pointer or a wrong size; set size, give a handle and a path");
    if (options)
        o = *options;
    gemrun_status st = replace_by(h, path, -1, NULL, &o, &t);
    if (times)
        *times = t;
    return st;
}

gemrun_status gs_replace_stored(gemrun_handle_t *h, const char *path, int file, const char *digest,
                                const gemrun_replacement *options, gemrun_replace_times *times)
{
    char open_file[32];
    gemrun_status st = GEMRUN_E_OPEN;
    if (file >= 0) {
        snprintf(open_file, sizeof open_file, "/proc/self/fd/%d", file);
        st = replace_by(h, open_file, file, digest, options, times);
        if (st != GEMRUN_OK)
            close(file);
    }
    bool by_path = st == GEMRUN_E_OPEN && path; /* also where there is no /proc */
    return by_path ? replace_by(h, path, -1, digest, options, times) : st;
}

gemrun_status gemrun_rollback(gemrun_handle_t *h, const char *warmup_prompt,
                              gemrun_replace_times *times)
{
    gemrun_replacement o = {.size = sizeof o, .allow_layout_change = 1, .skip_tests = 1,
                            .warmup_prompt = warmup_prompt};
    gemrun_replace_times t = {.size = sizeof t};
    if (!h || (times && times->size != sizeof t))
        return gs_refuse(GEMRUN_E_ARGUMENT, "gemrun_rollback",
                         "a null pointer or a wrong size; set size, give a handle");
    if (!enter(h))
        return refuse_closing();
    pthread_mutex_lock(&h->changing);
    gs_source from = h->before;
    gemrun_status st = from.path ? replace(h, &from, true, &o, &t)
                                 : gs_refuse(GEMRUN_E_STATE, "handle", "no model before this one; "
                                             "replace it by the one that is wanted");
    pthread_mutex_unlock(&h->changing);
    leave(h);
    if (times)
        *times = t;
    return st;
}

gemrun_status gemrun_handle_disable(gemrun_handle_t *h)
{
    if (!h)
        return gs_refuse(GEMRUN_E_ARGUMENT, "handle", "a null pointer; give an open handle");
    if (!enter(h))
        return refuse_closing();
    pthread_mutex_lock(&h->changing);
    flip(h, NULL, false);
    pthread_mutex_unlock(&h->changing);
    leave(h);
    return GEMRUN_OK;
}

static gemrun_status enable(gemrun_handle_t *h, const char *warmup_prompt)
{
    gemrun_status st = GEMRUN_OK;
    if (h->model) /* only the holder of `changing` sets it */
        return st;
    gs_model *m = open_model(h, h->newest.path, false, &st);
    st = m && warmup_prompt ? warm_up(m, warmup_prompt) : st;
    if (st != GEMRUN_OK) {
        free_model(m);
        return st;
    }
    memcpy(m->facts.digest, h->newest.digest, sizeof m->facts.digest);
    flip(h, m, false);
    return st;
}

gemrun_status gemrun_handle_enable(gemrun_handle_t *h, const char *warmup_prompt)
{
    if (!h)
        return gs_refuse(GEMRUN_E_ARGUMENT, "handle", "a null pointer; give an open handle");
    if (!enter(h))
        return refuse_closing();
    pthread_mutex_lock(&h->changing);
    gemrun_status st = enable(h, warmup_prompt);
    pthread_mutex_unlock(&h->changing);
    leave(h);
    return st;
}

static gs_share lower(gs_share a, gs_share b)
{
    return (gs_share){a.duty < b.duty ? a.duty : b.duty, fewer(a.threads, b.threads)};
}

static gs_shares lower_of(gs_shares a, gs_shares b)
{
    return (gs_shares){lower(a.decode, b.decode), lower(a.prefill, b.prefill)};
}

/* A daemon sees the temperature as well, and more: while it steers, the ladder rests. */
void gs_heed_heat(gemrun_handle_t *h)
{
    gs_pace *p = &h->pace;
    gs_heat *heat = &h->heat;
    const gs_model *m = h->riding ? h->riding : h->model;
    if (m) {
        heat->ladder = m->ladder;
        heat->threads = m->facts.threads;
        heat->chunk = m->chunk;
    }
    heat->rung = gs_climb_rung(&h->climb, &heat->ladder, gs_now(), &heat->level);
    if (gs_attached(h)) {
        heat->rung = (gb_rung){GS_WHOLE, GS_WHOLE, GS_WHOLE, 0};
        heat->level = 0;
    }
    bool fewer_threads = heat->rung.threads < GS_WHOLE;
    gs_share s = {heat->rung.duty,
                  fewer_threads ? gs_share_of(heat->threads, heat->rung.threads) : 0};
    p->heat = (gs_shares){s, s};
    p->now = lower_of(lower_of(p->own, p->daemon), p->heat);
}

static void set_pace(gemrun_handle_t *h, gs_shares *whose, gs_shares shares)
{
    pthread_mutex_lock(&h->lock);
    *whose = shares;
    h->pace.owed = h->pace.owed > 0 ? h->pace.owed : 0; /* nothing saved up under another pace */
    gs_heed_heat(h);
    pthread_cond_broadcast(&h->changed);
    pthread_mutex_unlock(&h->lock);
}

void gs_pace_by_daemon(gemrun_handle_t *h, gs_shares shares)
{
    set_pace(h, &h->pace.daemon, shares);
}

gemrun_status gemrun_handle_pace(gemrun_handle_t *h, uint32_t duty, uint32_t threads,
                                 uint32_t prefill_duty, uint32_t prefill_threads)
{
    bool bad = duty > GS_WHOLE || prefill_duty > GS_WHOLE || threads > MOST_THREADS ||
               prefill_threads > MOST_THREADS;
    if (!h || bad)
        return gs_refuse(GEMRUN_E_ARGUMENT, "pace",
                         "out of range; use a duty of 0 to 1000 and 0 to 8 threads");
    set_pace(h, &h->pace.own, (gs_shares){{duty, threads}, {prefill_duty, prefill_threads}});
    return GEMRUN_OK;
}

gemrun_status gemrun_handle_get_stats(gemrun_handle_t *h, gemrun_handle_stats *out)
{
    if (!h || !out || out->size != sizeof *out)
        return gs_refuse(GEMRUN_E_ARGUMENT, "gemrun_handle_get_stats",
                         "a null pointer or a wrong size; set size");
    pthread_mutex_lock(&h->lock);
    uint32_t waiting = 0;
    for (const gs_waiter *w = h->queue; w; w = w->next)
        waiting++;
    *out = (gemrun_handle_stats){.size = sizeof *out,
                                 .enabled = h->model != NULL,
                                 .attached = gs_attached(h),
                                 .active = h->riding != NULL,
                                 .waiting = waiting,
                                 .duty = h->pace.now.decode.duty,
                                 .threads = h->pace.now.decode.threads,
                                 .requests = h->requests,
                                 .failed = h->failed,
                                 .replaced = h->replaced,
                                 .steps = h->steps,
                                 .last = h->last};
    pthread_mutex_unlock(&h->lock);
    return GEMRUN_OK;
}

static gemrun_handle_t *new_handle(const char *path, const gemrun_config *config)
{
    gemrun_handle_t *h = calloc(1, sizeof *h);
    if (!h)
        return NULL;
    pthread_condattr_t steady;
    pthread_condattr_init(&steady);
    pthread_condattr_setclock(&steady, CLOCK_MONOTONIC);
    pthread_mutex_init(&h->lock, NULL);
    pthread_mutex_init(&h->changing, NULL);
    pthread_mutex_init(&h->attaching, NULL);
    pthread_cond_init(&h->changed, &steady);
    pthread_condattr_destroy(&steady);
    h->pace = (gs_pace){.own = GS_UNPACED, .daemon = GS_UNPACED, .heat = GS_UNPACED,
                        .now = GS_UNPACED, .since = gs_now()};
    h->heat.rung = (gb_rung){GS_WHOLE, GS_WHOLE, GS_WHOLE, 0};
    h->config = config ? *config : gemrun_config_default();
    h->before.file = -1;
    bool named = name_source(&h->newest, path, -1, NULL) == GEMRUN_OK;
    h->kernel = h->config.kernel ? strdup(h->config.kernel) : NULL;
    bool copied = named && !h->kernel == !h->config.kernel;
    h->config.kernel = h->kernel; /* the caller's text may be gone at the next open */
    if (copied)
        return h;
    gemrun_handle_close(h);
    return NULL;
}

gemrun_status gemrun_handle_open(gemrun_handle_t **out, const char *path,
                                 const gemrun_config *config)
{
    gemrun_status st = GEMRUN_OK;
    if (!out || !path)
        return gs_refuse(GEMRUN_E_ARGUMENT, "handle", "a null pointer; give a place and a path");
    *out = NULL;
    if (config && config->size != sizeof *config)
        return gs_refuse(GEMRUN_E_ARGUMENT, "config",
                         "its size is not gemrun_config's; start from gemrun_config_default");
    gemrun_handle_t *h = new_handle(path, config);
    if (!h)
        return gs_refuse(GEMRUN_E_MAP, path, "no memory left for a handle; free some");
    h->model = open_model(h, path, false, &st);
    if (!h->model) {
        gemrun_handle_close(h);
        return st;
    }
    h->facts = h->model->facts;
    *out = h;
    return GEMRUN_OK;
}

void gemrun_handle_close(gemrun_handle_t *h)
{
    if (!h)
        return;
    pthread_mutex_lock(&h->lock);
    h->closing = true; /* the next step of a request ends it */
    pthread_cond_broadcast(&h->changed);
    pthread_mutex_unlock(&h->lock);
    gemrun_detach(h);
    pthread_mutex_lock(&h->lock);
    while (h->inside > 0)
        pthread_cond_wait(&h->changed, &h->lock);
    pthread_mutex_unlock(&h->lock);
    free_model(h->model);
    pthread_cond_destroy(&h->changed);
    pthread_mutex_destroy(&h->attaching);
    pthread_mutex_destroy(&h->changing);
    pthread_mutex_destroy(&h->lock);
    forget(&h->newest);
    forget(&h->before);
    free(h->kernel);
    free(h);
}
