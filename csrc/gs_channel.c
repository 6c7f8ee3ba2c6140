/* gs_channel.c: see gs_channel.h. One thread reads frames and answers what is quick, so that
 * neither a heartbeat nor a new pace ever waits. What takes its time is a job, one at a time, on
 * another thread: the one that called gs_serve, or a second one of an attached program. */
#define _GNU_SOURCE
#include "gs_channel.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "gr_ctx.h"
#include "gs_handle.h"
#include "gs_json.h"

#define MS 1000000
enum { NAME = 65, MESSAGES = 64, STOPS = 8, BANS = 256, EXIT_BROKEN = 8, HELLO_MS = 5000,
       SEND_S = 10, RETRY_MS = 250, RETRY_MOST_MS = 2000, AWAY_MS = 10000 };

typedef struct gs_frame { /* a frame, and what was read in it */
    int file; /* descriptor that came with it, or -1 */
    gs_json json;
    char bytes[GS_FRAME + 1];
} gs_frame;

typedef struct gs_channel {
    gemrun_handle_t *h;
    int fd;                  /* -1: not connected; only the reader sets it, under the lock */
    bool serving;            /* the daemon's own worker: it may generate, and ends with it */
    bool stop, connected;    /* detach; a daemon is there. Under the handle's lock */
    bool broken;             /* the daemon sent what is no frame */
    pthread_t reader, worker;
    pthread_mutex_t writing; /* guards out, and what is written of it */
    gs_out out;
    gs_frame *frame;         /* the newest */
    gs_frame *job;           /* of the job that runs; swapped with frame */
    bool waiting;            /* job is to be run; under the handle's lock */
    bool busy;               /* a job waits or runs; under the handle's lock */
    bool dropped;            /* it was cancelled; under the handle's lock */
    uint64_t job_id;
    double open_ms;
    int wake[2];             /* a pipe that ends a wait for the daemon */
    char socket[sizeof((struct sockaddr_un *)0)->sun_path], name[NAME];
} gs_channel;

static const char *const finishes[] = {"none",         "stop_id",      "stop_string",
                                       "max_tokens",   "context_full", "cancelled",
                                       "deadline",     "callback",     "error"};

/* ---- frames ---- */

static bool send_all(int fd, const uint8_t *bytes, size_t size)
{
    while (size > 0) {
        ssize_t n = send(fd, bytes, size, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        bytes += n;
        size -= (size_t)n;
    }
    return true;
}

static void set_file(gs_frame *f, int file)
{
    if (f->file >= 0)
        close(f->file);
    f->file = file;
}

/* Keep the descriptor of a message; the last one, should there be several. */
static void take_files(struct msghdr *m, gs_frame *f)
{
    for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c; c = CMSG_NXTHDR(m, c)) {
        bool files = c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS;
        for (size_t at = CMSG_LEN(0); files && at + sizeof(int) <= c->cmsg_len; at += sizeof(int)) {
            int file;
            memcpy(&file, (char *)c + at, sizeof file);
            set_file(f, file);
        }
    }
}

/* The next bytes of a frame, and the descriptor beside them. */
static bool read_all(int fd, void *to, size_t size, gs_frame *f)
{
    for (char *at = to; size > 0;) {
        union {
            struct cmsghdr head;
            char bytes[CMSG_SPACE(4 * sizeof(int))];
        } beside;
        struct iovec part = {.iov_base = at, .iov_len = size};
        struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = beside.bytes,
                           .msg_controllen = sizeof beside.bytes};
        ssize_t n = recvmsg(fd, &m, MSG_CMSG_CLOEXEC);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        take_files(&m, f);
        at += n;
        size -= (size_t)n;
    }
    return true;
}

/* The next frame, parsed. False: the peer is gone, or sent what is no frame. */
static bool receive(gs_channel *c)
{
    uint8_t head[4];
    set_file(c->frame, -1);
    if (!read_all(c->fd, head, sizeof head, c->frame))
        return false;
    size_t size = (size_t)head[0] | (size_t)head[1] << 8 | (size_t)head[2] << 16 |
                  (size_t)head[3] << 24;
    c->broken = size == 0 || size > GS_FRAME;
    if (c->broken || !read_all(c->fd, c->frame->bytes, size, c->frame))
        return false;
    c->broken = !gs_parse(&c->frame->json, c->frame->bytes, size) ||
                c->frame->json.values[0].kind != GS_OBJECT;
    return !c->broken;
}

/* Begin an event; the channel's writer is this thread's until send_event. */
static gs_out *begin(gs_channel *c, const char *event)
{
    pthread_mutex_lock(&c->writing);
    gs_begin(&c->out, event);
    return &c->out;
}

/* False: the peer is gone. Half a frame makes the rest unreadable: the connection ends with it. */
static bool send_event(gs_channel *c)
{
    gs_end(&c->out);
    bool good = c->fd >= 0 && send_all(c->fd, c->out.bytes, c->out.size);
    if (!good && c->fd >= 0)
        shutdown(c->fd, SHUT_RDWR);
    pthread_mutex_unlock(&c->writing);
    return good;
}

static void put(gs_out *o, const char *key, const char *text)
{
    gs_text(o, key, text ? text : "", text ? strlen(text) : 0);
}

static bool send_error(gs_channel *c, uint64_t id, int32_t code, const char *text)
{
    gs_out *o = begin(c, "error");
    gs_whole(o, "id", id);
    gs_signed(o, "code", code);
    put(o, "text", text);
    return send_event(c);
}

/* ---- values of a frame ---- */

static uint64_t whole_of(const gs_frame *f, const char *key, uint64_t most, uint64_t otherwise)
{
    const gs_value *v = gs_get(&f->json, f->json.values, key);
    return v && v->is_whole && v->whole <= most ? v->whole : otherwise;
}

static const char *text_of(const gs_frame *f, const char *key)
{
    const gs_value *v = gs_get(&f->json, f->json.values, key);
    return v && v->kind == GS_STRING ? v->text : NULL;
}

static uint64_t id_of(const gs_frame *f)
{
    return whole_of(f, "id", UINT64_MAX, 0);
}

/* ---- requests (gemrun --serve only) ---- */

typedef enum field_kind { WHOLE32, WHOLE64, REAL, FLAG, MILLISECONDS, ENDING } field_kind;

#define AT(field) offsetof(gemrun_request, field)
static const struct field {
    const char *key;
    field_kind kind;
    size_t at;
} fields[] = {{"max_tokens", WHOLE32, AT(max_tokens)},
              {"temperature", REAL, AT(temperature)},
              {"top_k", WHOLE32, AT(top_k)},
              {"top_p", REAL, AT(top_p)},
              {"min_p", REAL, AT(min_p)},
              {"repetition_penalty", REAL, AT(repetition_penalty)},
              {"seed", WHOLE64, AT(seed)},
              {"deadline_ms", MILLISECONDS, AT(deadline_ns)},
              {"ignore_stop_ids", FLAG, AT(ignore_stop_ids)},
              {"speculate", WHOLE32, AT(speculate)},
              {"reuse", FLAG, AT(reuse)},
              {"on_full", ENDING, AT(on_full)}};

typedef struct job { /* a request as the engine takes it; strings lie in the job's frame */
    gs_channel *c;
    const char *prompt, *stops[STOPS];
    uint32_t bans[BANS];
    gemrun_message messages[MESSAGES];
    size_t count;
    gemrun_request q;
    gemrun_stats s;
    bool lost; /* nobody reads its text */
    bool emptied; /* the cache, behind it */
} job;

/* What is done at the end of the context, by its word. */
static bool ending_of(const gs_value *v, uint32_t *out)
{
    static const char *const words[] = {"stop", "mark", "slide"}; /* as GEMRUN_FULL_STOP and on */
    bool found = false;
    for (uint32_t i = 0; v->kind == GS_STRING && !found && i < 3; i++) {
        found = strcmp(v->text, words[i]) == 0;
        *out = i;
    }
    return found;
}

static bool set_field(gemrun_request *q, const struct field *f, const gs_value *v)
{
    char *to = (char *)q + f->at;
    bool number = v->kind == GS_NUMBER, small = v->is_whole && v->whole <= UINT32_MAX;
    switch (f->kind) {
    case WHOLE32:
        *(uint32_t *)(void *)to = (uint32_t)v->whole;
        return small;
    case WHOLE64:
        *(uint64_t *)(void *)to = v->whole;
        return v->is_whole;
    case MILLISECONDS:
        *(uint64_t *)(void *)to = v->whole * MS;
        return small;
    case REAL:
        *(float *)(void *)to = (float)v->number;
        return number;
    case ENDING:
        return ending_of(v, (uint32_t *)(void *)to);
    default:
        *(uint32_t *)(void *)to = v->kind == GS_TRUE;
        return v->kind == GS_TRUE || v->kind == GS_FALSE;
    }
}

static const char *take_messages(job *j, const gs_json *json, const gs_value *list)
{
    static const char *const roles[] = {"system", "user", "assistant"};
    if (list->kind != GS_ARRAY || !list->first)
        return "messages: no list of objects";
    for (const gs_value *m = gs_first(json, list); m; m = gs_next(json, m)) {
        const gs_value *role = gs_get(json, m, "role"), *text = gs_get(json, m, "text");
        uint32_t r = 0;
        if (j->count == MESSAGES)
            return "messages: more than 64";
        if (!role || role->kind != GS_STRING || !text || text->kind != GS_STRING)
            return "messages: no role or no text";
        while (r < 3 && strcmp(role->text, roles[r]) != 0)
            r++;
        if (r == 3)
            return "messages: a role is not system, user or assistant";
        j->messages[j->count++] = (gemrun_message){(gemrun_role)r, text->text};
    }
    return NULL;
}

static const char *take_stops(job *j, const gs_json *json, const gs_value *list)
{
    if (list->kind != GS_ARRAY)
        return "stop: no list of up to 8 texts";
    for (const gs_value *v = gs_first(json, list); v; v = gs_next(json, v)) {
        if (v->kind != GS_STRING || j->q.stop_string_count == STOPS)
            return "stop: no list of up to 8 texts";
        j->stops[j->q.stop_string_count++] = v->text;
    }
    j->q.stop_strings = j->stops;
    return NULL;
}

static const char *take_bans(job *j, const gs_json *json, const gs_value *list)
{
    if (list->kind != GS_ARRAY)
        return "banned: no list of up to 256 token ids";
    for (const gs_value *v = gs_first(json, list); v; v = gs_next(json, v)) {
        if (!v->is_whole || v->whole > UINT32_MAX || j->q.banned_count == BANS)
            return "banned: no list of up to 256 token ids";
        j->bans[j->q.banned_count++] = (uint32_t)v->whole;
    }
    j->q.banned = j->bans;
    return NULL;
}

/* The request in a frame; what is not in it keeps the artifact's default. Returns what is wrong,
 * or NULL. */
static const char *take_request(job *j, const gs_frame *f)
{
    const gs_json *json = &f->json;
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        const gs_value *v = gs_get(json, json->values, fields[i].key);
        if (v && !set_field(&j->q, &fields[i], v))
            return fields[i].key;
    }
    j->q.seed_set = gs_get(json, json->values, "seed") != NULL;
    const gs_value *stop = gs_get(json, json->values, "stop");
    const gs_value *messages = gs_get(json, json->values, "messages");
    const gs_value *banned = gs_get(json, json->values, "banned");
    const char *wrong = stop ? take_stops(j, json, stop) : NULL;
    wrong = wrong || !banned ? wrong : take_bans(j, json, banned);
    j->prompt = text_of(f, "prompt");
    if (!wrong && !j->prompt == !messages)
        return "prompt: one of prompt and messages is needed";
    return wrong || !messages ? wrong : take_messages(j, json, messages);
}

static int on_text(void *user, int32_t token, const char *text, size_t size)
{
    job *j = user;
    gs_out *o = begin(j->c, "token");
    gs_whole(o, "id", j->c->job_id);
    gs_signed(o, "token", token);
    gs_text(o, "text", text, size);
    j->lost = !send_event(j->c);
    return j->lost;
}

/* A cancel may have come before the run: then there was nothing yet to be cancelled. */
static int on_step(void *user, uint32_t *threads)
{
    const job *j = user;
    (void)threads;
    pthread_mutex_lock(&j->c->h->lock);
    bool dropped = j->c->dropped;
    pthread_mutex_unlock(&j->c->h->lock);
    if (dropped)
        gemrun_handle_cancel(j->c->h);
    return 0;
}

static int32_t run_generate(gemrun_context_t *ctx, const gemrun_request *paced, void *arg)
{
    job *j = arg;
    j->q = gemrun_request_default(ctx);
    const char *wrong = take_request(j, j->c->job);
    if (wrong)
        return gs_refuse(GEMRUN_E_ARGUMENT, "request", wrong);
    j->q.user = paced->user;
    j->q.on_step = paced->on_step;
    j->q.on_text = paced->on_text;
    int32_t n = j->count > 0 ? gemrun_chat(ctx, j->messages, j->count, &j->q, NULL)
                             : gemrun_generate(ctx, j->prompt, &j->q, NULL);
    j->s.size = sizeof j->s;
    if (n >= 0)
        gemrun_get_stats(ctx, &j->s);
    uint64_t full = whole_of(j->c->job, "reset", 100, 101); /* percent; 101: never */
    j->emptied = n >= 0 && 100 * (uint64_t)j->s.kv_used >= full * j->s.kv_size;
    if (j->emptied)
        gemrun_reset_kv_cache(ctx);
    return n;
}

/* Tests keep the pace of tokens: the prompts of all of them can be minutes of work. */
static int32_t run_tests(gemrun_context_t *ctx, const gemrun_request *paced, void *arg)
{
    (void)arg;
    paced->on_text(paced->user, 0, "", 0);
    int32_t n = gr_run_tests(ctx, paced->on_step, paced->user);
    return n == GEMRUN_E_STATE ? gs_refuse(n, "tests", "they were cancelled; run them again") : n;
}

static int32_t run_reset(gemrun_context_t *ctx, const gemrun_request *paced, void *arg)
{
    (void)paced, (void)arg;
    gemrun_reset_kv_cache(ctx);
    return 0;
}

static void put_run(gs_out *o, const gemrun_stats *s)
{
    put(o, "finish", finishes[s->finish]);
    gs_whole(o, "prompt_tokens", s->prompt_tokens);
    gs_whole(o, "generated_tokens", s->generated_tokens);
    gs_real(o, "ttft_ms", s->ttft_ms);
    gs_real(o, "prefill_tps", s->prefill_tps);
    gs_real(o, "decode_tps", s->decode_tps);
    gs_real(o, "decode_max_ms", s->decode_max_ms);
    gs_whole(o, "kv_used", s->kv_used);
    gs_whole(o, "kv_size", s->kv_size);
    gs_whole(o, "drafted", s->drafted);
    gs_whole(o, "accepted", s->accepted);
    gs_whole(o, "reused", s->reused);
    gs_whole(o, "slides", s->slides);
    gs_whole(o, "nonfinite_errors", s->nonfinite_errors);
}

/* ---- what is answered at once ---- */

static void answer_ping(gs_channel *c)
{
    gemrun_handle_t *h = c->h;
    pthread_mutex_lock(&h->lock);
    bool busy = c->serving ? c->busy : h->riding != NULL, asleep = h->asleep;
    uint64_t steps = h->steps;
    pthread_mutex_unlock(&h->lock);
    gs_out *o = begin(c, "pong");
    gs_whole(o, "n", whole_of(c->frame, "n", UINT64_MAX, 0));
    gs_bool(o, "busy", busy);
    gs_bool(o, "asleep", asleep);
    gs_whole(o, "steps", steps);
    send_event(c);
}

/* A duty in thousandths; the least that is above 0 stays above 0. */
static bool duty_of(const gs_frame *f, const char *key, uint32_t *out)
{
    const gs_value *v = gs_get(&f->json, f->json.values, key);
    bool good = v && v->kind == GS_NUMBER && v->number >= 0 && v->number <= 1;
    double share = good ? v->number * 1000 : 0;
    *out = share > 0 && share < 1 ? 1 : (uint32_t)(share + 0.5);
    return good;
}

static void answer_pace(gs_channel *c)
{
    uint32_t duty, prefill_duty;
    uint32_t threads = (uint32_t)whole_of(c->frame, "threads", 8, 0);
    uint32_t prefill_threads = (uint32_t)whole_of(c->frame, "prefill_threads", 8, threads);
    bool good = duty_of(c->frame, "duty", &duty);
    if (!duty_of(c->frame, "prefill_duty", &prefill_duty))
        prefill_duty = duty;
    if (!good) {
        send_error(c, id_of(c->frame), GEMRUN_E_ARGUMENT, "pace: duty is no number of 0 to 1");
        return;
    }
    gs_pace_by_daemon(c->h, (gs_shares){{duty, threads}, {prefill_duty, prefill_threads}});
    gs_out *o = begin(c, "pace");
    gs_whole(o, "id", id_of(c->frame));
    gs_real(o, "duty", (double)duty / 1000);
    gs_whole(o, "threads", threads);
    gs_real(o, "prefill_duty", (double)prefill_duty / 1000);
    gs_whole(o, "prefill_threads", prefill_threads);
    send_event(c);
}

/* What a model is, for the daemon. */
static void put_facts(gs_out *o, const gs_facts *f)
{
    put(o, "name", f->name);
    put(o, "family", f->family);
    put(o, "target", f->target);
    put(o, "kernel", f->kernel);
    gs_whole(o, "context", f->context);
    gs_whole(o, "kv_type", f->kv_type);
    gs_bool(o, "has_chat", f->has_chat != 0);
    gs_whole(o, "ram_kv", f->ram_kv);
    gs_whole(o, "locked_bytes", f->locked);
    gs_whole(o, "unlocked_bytes", f->unlocked);
}

/* The newest request's figures; the cache is that of the model in use, in which one of another
 * model left nothing. */
static void put_last(gs_out *o, gemrun_stats last, const gs_facts *f)
{
    if (last.kv_size != f->kv_size)
        last.kv_used = 0;
    last.kv_size = f->kv_size;
    put_run(o, &last);
}

static void answer_stats(gs_channel *c)
{
    gemrun_handle_stats s = {.size = sizeof s};
    gemrun_handle_get_stats(c->h, &s);
    pthread_mutex_lock(&c->h->lock);
    gs_facts f = c->h->facts;
    uint64_t tokens = c->h->tokens, faults = c->h->faults;
    bool way_back = c->h->before.path != NULL;
    pthread_mutex_unlock(&c->h->lock);
    gs_out *o = begin(c, "stats");
    gs_whole(o, "id", id_of(c->frame));
    gs_bool(o, "enabled", s.enabled != 0);
    put_facts(o, &f); /* of the newest model, as its memory */
    put(o, "digest", f.digest);
    gs_bool(o, "way_back", way_back);
    gs_whole(o, "ram_total", s.enabled ? f.ram_total : 0);
    gs_whole(o, "active", s.active);
    gs_whole(o, "waiting", s.waiting);
    gs_real(o, "duty", (double)s.duty / 1000);
    gs_whole(o, "threads", s.threads);
    gs_whole(o, "requests", s.requests);
    gs_whole(o, "failed", s.failed);
    gs_whole(o, "faults", faults);
    gs_whole(o, "tokens", tokens);
    gs_whole(o, "replaced", s.replaced);
    gs_whole(o, "steps", s.steps);
    if (s.last.size > 0)
        put_last(o, s.last, &f);
    else
        gs_whole(o, "kv_size", f.kv_size);
    send_event(c);
}

/* Of a program's own requests none is the daemon's to end. */
static void answer_cancel(gs_channel *c)
{
    pthread_mutex_lock(&c->h->lock);
    bool meant = c->serving && c->busy && c->job_id == id_of(c->frame);
    c->dropped = c->dropped || meant;
    pthread_mutex_unlock(&c->h->lock);
    if (meant)
        gemrun_handle_cancel(c->h);
}

/* ---- jobs ---- */

/* Begin the answer to the job that ran. It is over before the answer is sent: the daemon sends the
 * next one as soon as it has it. */
static gs_out *begin_answer(gs_channel *c, const char *event)
{
    uint64_t id = c->job_id;
    gs_out *o = begin(c, event);
    pthread_mutex_lock(&c->h->lock);
    c->busy = false;
    pthread_cond_broadcast(&c->h->changed);
    pthread_mutex_unlock(&c->h->lock);
    gs_whole(o, "id", id);
    return o;
}

static void answer_failure(gs_channel *c, int32_t code, const char *text)
{
    gs_out *o = begin_answer(c, "error");
    gs_signed(o, "code", code);
    put(o, "text", text);
    send_event(c);
}

static void job_request(gs_channel *c)
{
    job j = {.c = c};
    const char *op = text_of(c->job, "op");
    bool tests = strcmp(op, "test") == 0, generate = strcmp(op, "generate") == 0;
    gemrun_request ours = {.size = sizeof ours, .on_text = generate ? on_text : NULL,
                           .on_step = on_step, .user = &j};
    int32_t n = gemrun_handle_run(c->h, &ours, generate ? run_generate
                                               : tests  ? run_tests
                                                        : run_reset, &j);
    if (n < 0) {
        answer_failure(c, n, gemrun_last_error());
        return;
    }
    gs_out *o = begin_answer(c, generate ? "done" : tests ? "tested" : "reset");
    if (generate) {
        put_run(o, &j.s);
        gs_whole(o, "reset", j.emptied);
    } else if (tests) {
        gs_whole(o, "passed", (uint64_t)n);
    }
    send_event(c);
}

/* By the file that came with the frame, else by its path. */
static gemrun_status replace_model(gs_channel *c, gemrun_replace_times *t)
{
    const gs_frame *f = c->job;
    gemrun_replacement o = {.size = sizeof o, .warmup_prompt = text_of(f, "warmup_prompt")};
    o.allow_layout_change = (uint32_t)whole_of(f, "allow_layout_change", 1, 0);
    int file = c->job->file;
    c->job->file = -1;
    if (file < 0 && !text_of(f, "path"))
        return gs_refuse(GEMRUN_E_ARGUMENT, "replace", "no file and no path; send one");
    return gs_replace_stored(c->h, text_of(f, "path"), file, text_of(f, "digest"), &o, t);
}

/* Another version, or with "rollback" the one before this one. */
static void job_replace(gs_channel *c)
{
    gemrun_replace_times t = {.size = sizeof t};
    bool back = strcmp(text_of(c->job, "op"), "rollback") == 0;
    gemrun_status st = back ? gemrun_rollback(c->h, text_of(c->job, "warmup_prompt"), &t)
                            : replace_model(c, &t);
    if (st != GEMRUN_OK) {
        answer_failure(c, st, gemrun_last_error());
        return;
    }
    gs_out *out = begin_answer(c, "replaced");
    gs_whole(out, "tests", t.tests);
    gs_real(out, "open_ms", t.open_ms);
    gs_real(out, "test_ms", t.test_ms);
    gs_real(out, "warmup_ms", t.warmup_ms);
    gs_real(out, "flip_ms", t.flip_ms);
    send_event(c);
}

static void job_enable(gs_channel *c)
{
    bool on = strcmp(text_of(c->job, "op"), "enable") == 0;
    gemrun_status st = on ? gemrun_handle_enable(c->h, text_of(c->job, "warmup_prompt"))
                          : gemrun_handle_disable(c->h);
    if (st != GEMRUN_OK) {
        answer_failure(c, st, gemrun_last_error());
        return;
    }
    begin_answer(c, on ? "enabled" : "disabled");
    send_event(c);
}

static const struct op {
    const char *name;
    void (*run)(gs_channel *c);
    bool is_job, for_workers;
} ops[] = {{"ping", answer_ping, 0, 0},       {"pace", answer_pace, 0, 0},
           {"stats", answer_stats, 0, 0},     {"cancel", answer_cancel, 0, 0},
           {"replace", job_replace, 1, 0},    {"rollback", job_replace, 1, 0},
           {"enable", job_enable, 1, 0},      {"disable", job_enable, 1, 0},
           {"generate", job_request, 1, 1},   {"test", job_request, 1, 1},
           {"reset", job_request, 1, 1}};

static const struct op *op_of(const gs_frame *f)
{
    const char *op = text_of(f, "op");
    for (size_t i = 0; op && i < sizeof ops / sizeof ops[0]; i++)
        if (strcmp(op, ops[i].name) == 0)
            return ops + i;
    return NULL;
}

/* Hand the frame over as the next job; its buffer is the job's from now on. */
static void start_job(gs_channel *c)
{
    pthread_mutex_lock(&c->h->lock);
    bool taken = c->busy || c->stop; /* at a detach nobody is left to run it */
    if (!taken) {
        gs_frame *free_one = c->job;
        c->job = c->frame;
        c->frame = free_one;
        c->job_id = id_of(c->job);
        c->dropped = false;
        c->waiting = c->busy = true;
        pthread_cond_broadcast(&c->h->changed);
    }
    pthread_mutex_unlock(&c->h->lock);
    if (taken)
        send_error(c, id_of(c->frame), GEMRUN_E_BUSY, "a request runs here; send it later");
}

/* Run jobs until a detach. */
static void *work(void *arg)
{
    gs_channel *c = arg;
    for (;;) {
        pthread_mutex_lock(&c->h->lock);
        while (!c->waiting && !c->stop)
            pthread_cond_wait(&c->h->changed, &c->h->lock);
        bool run = c->waiting;
        c->waiting = false;
        pthread_mutex_unlock(&c->h->lock);
        if (!run)
            return NULL;
        op_of(c->job)->run(c);
    }
}

/* Answer frames until the daemon is gone. */
static void converse(gs_channel *c)
{
    while (receive(c)) {
        const struct op *op = op_of(c->frame);
        if (!op)
            send_error(c, id_of(c->frame), GEMRUN_E_ARGUMENT, "an unknown op");
        else if (op->for_workers && !c->serving)
            send_error(c, id_of(c->frame), GEMRUN_E_STATE,
                       "an attached program makes its own requests; ask a worker");
        else if (op->is_job)
            start_job(c);
        else
            op->run(c);
    }
}

/* A thread that takes no signals: they are the program's. */
static bool start_thread(pthread_t *thread, void *(*body)(void *), gs_channel *c)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = pthread_create(thread, NULL, body, c) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return started;
}

static void send_ready(gs_channel *c)
{
    pthread_mutex_lock(&c->h->lock);
    gs_facts f = c->h->facts;
    bool enabled = c->h->model != NULL;
    pthread_mutex_unlock(&c->h->lock);
    gs_out *o = begin(c, "ready");
    put_facts(o, &f);
    put(o, "version", gemrun_version());
    gs_whole(o, "pid", (uint64_t)getpid());
    gs_whole(o, "kv_size", f.kv_size);
    gs_whole(o, "threads", f.threads);
    gs_whole(o, "ram_total", f.ram_total);
    gs_bool(o, "enabled", enabled);
    gs_real(o, "open_ms", c->open_ms);
    send_event(c);
}

/* ---- the daemon's own worker ---- */

static void *serve_frames(void *arg)
{
    gs_channel *c = arg;
    converse(c);
    _exit(c->broken ? EXIT_BROKEN : 0); /* a worker without a daemon has no work */
}

static void free_channel(gs_channel *c)
{
    if (!c)
        return;
    for (int i = 0; i < 2; i++)
        if (c->wake[i] >= 0)
            close(c->wake[i]);
    pthread_mutex_destroy(&c->writing);
    for (int i = 0; i < 2; i++) {
        gs_frame *f = i ? c->job : c->frame;
        if (f)
            set_file(f, -1);
        free(f);
    }
    free(c);
}

static gs_channel *new_channel(gemrun_handle_t *h, int fd)
{
    gs_channel *c = calloc(1, sizeof *c);
    if (!c)
        return NULL;
    pthread_mutex_init(&c->writing, NULL);
    c->h = h;
    c->fd = fd;
    c->wake[0] = c->wake[1] = -1;
    c->frame = malloc(sizeof *c->frame);
    c->job = malloc(sizeof *c->job);
    if (c->frame)
        c->frame->file = -1;
    if (c->job)
        c->job->file = -1;
    if (c->frame && c->job)
        return c;
    free_channel(c);
    return NULL;
}

int32_t gs_serve(int fd, const char *path, const gemrun_config *config)
{
    gemrun_handle_t *h = NULL;
    gs_channel *c = new_channel(NULL, fd);
    uint64_t start = gs_now();
    gemrun_status st = c ? gemrun_handle_open(&h, path, config)
                         : gs_refuse(GEMRUN_E_MAP, path, "no memory left for a channel; free some");
    if (st != GEMRUN_OK) {
        if (c)
            send_error(c, 0, st, gemrun_last_error());
        free_channel(c);
        return st;
    }
    c->h = h;
    c->serving = true;
    c->open_ms = (double)(gs_now() - start) / MS;
    send_ready(c);
    if (!start_thread(&c->reader, serve_frames, c))
        _exit(1);
    work(c); /* until serve_frames ends the process */
    return 0;
}

/* ---- an attached program ---- */

bool gs_attached(const gemrun_handle_t *h)
{
    return h->channel && h->channel->connected;
}

static void set_connected(gs_channel *c, int fd)
{
    pthread_mutex_lock(&c->h->lock);
    c->fd = fd;
    c->connected = fd >= 0;
    pthread_mutex_unlock(&c->h->lock);
}

static bool stopped(gs_channel *c)
{
    pthread_mutex_lock(&c->h->lock);
    bool stop = c->stop;
    pthread_mutex_unlock(&c->h->lock);
    return stop;
}

/* Wait for bytes (fd >= 0), but not for longer than `ms`, and not for a detach. */
static bool await(const gs_channel *c, int fd, int ms)
{
    struct pollfd p[] = {{.fd = c->wake[0], .events = POLLIN}, {.fd = fd, .events = POLLIN}};
    return poll(p, fd >= 0 ? 2 : 1, ms) > 0 && p[0].revents == 0;
}

/* The daemon's answer to the first line: a result. False: it refuses, hangs, or is gone. */
static bool welcomed(gs_channel *c, int fd)
{
    char *reply = c->frame->bytes;
    uint64_t until = gs_now() + (uint64_t)HELLO_MS * MS;
    for (size_t n = 0; n < 4096 && gs_now() < until;) {
        ssize_t got = read(fd, reply + n, 1); /* no byte of the frames behind the line */
        if (got == 1 && reply[n] == '\n')
            return gs_parse(&c->frame->json, reply, n) &&
                   gs_get(&c->frame->json, c->frame->json.values, "result") != NULL;
        n += got == 1;
        bool again = got < 0 && (errno == EINTR || errno == EAGAIN);
        if (got == 0 || (got < 0 && !again) || (again && !await(c, fd, HELLO_MS)))
            return false;
    }
    return false;
}

/* Connected and known to the daemon under our name, or -1. Nothing here waits for a daemon that
 * hangs: a detach may come at any time. */
static int reach_daemon(gs_channel *c)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    struct timeval most = {.tv_sec = SEND_S};
    char line[160];
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    memcpy(to.sun_path, c->socket, sizeof to.sun_path);
    int n = snprintf(line, sizeof line, "{\"v\":1,\"id\":\"1\",\"method\":\"attach\",\"params\":"
                     "{\"name\":\"%s\"}}\n", c->name);
    bool good = fd >= 0 && connect(fd, (const struct sockaddr *)&to, sizeof to) == 0 &&
                send_all(fd, (const uint8_t *)line, (size_t)n) && welcomed(c, fd) &&
                fcntl(fd, F_SETFL, 0) == 0 &&
                setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &most, sizeof most) == 0;
    if (!good && fd >= 0)
        close(fd);
    return good ? fd : -1;
}

/* One connection, from the greeting to its end. A job on its way answers here, or nobody: its id
 * is another request's on the next connection. */
static void stay_connected(gs_channel *c, int fd)
{
    set_connected(c, fd);
    if (!stopped(c)) {
        send_ready(c);
        converse(c);
    }
    pthread_mutex_lock(&c->h->lock);
    c->connected = false;
    while (c->busy)
        pthread_cond_wait(&c->h->changed, &c->h->lock);
    pthread_mutex_unlock(&c->h->lock);
    pthread_mutex_lock(&c->writing); /* its answer may be on its way */
    pthread_mutex_unlock(&c->writing);
    set_connected(c, -1);
    close(fd);
}

static void *stay_attached(void *arg)
{
    gs_channel *c = arg;
    uint64_t seen = gs_now();
    for (int wait = RETRY_MS; !stopped(c);) {
        int fd = reach_daemon(c);
        if (fd >= 0) {
            stay_connected(c, fd);
            seen = gs_now();
            wait = RETRY_MS;
        } else if (gs_now() - seen >= (uint64_t)AWAY_MS * MS) {
            gs_pace_by_daemon(c->h, GS_UNPACED); /* no brake is left on by one that is gone */
        }
        await(c, -1, wait); /* after a connection too: it may end at once, again and again */
        wait = wait * 2 < RETRY_MOST_MS ? wait * 2 : RETRY_MOST_MS;
    }
    return NULL;
}

static bool is_name(const char *name)
{
    size_t n = name ? strlen(name) : 0;
    bool good = n > 0 && n < NAME && name[0] != '.' && name[0] != '_' && name[0] != '-';
    return good && strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789._-") == n;
}

/* A channel with both threads running, or NULL. The lock of attaching is held. */
static gs_channel *start_channel(gemrun_handle_t *h, const char *socket, const char *name)
{
    gs_channel *c = new_channel(h, -1);
    if (!c)
        return NULL;
    memcpy(c->socket, socket, strlen(socket) + 1);
    memcpy(c->name, name, strlen(name) + 1);
    bool piped = pipe2(c->wake, O_CLOEXEC) == 0;
    bool working = piped && start_thread(&c->worker, work, c);
    if (working && start_thread(&c->reader, stay_attached, c))
        return c;
    pthread_mutex_lock(&h->lock);
    c->stop = true;
    pthread_cond_broadcast(&h->changed);
    pthread_mutex_unlock(&h->lock);
    if (working)
        pthread_join(c->worker, NULL);
    free_channel(c);
    return NULL;
}

gemrun_status gemrun_attach(gemrun_handle_t *h, const char *socket, const char *name)
{
    gemrun_status st = GEMRUN_OK;
    if (!h || !socket || !*socket || strlen(socket) >= sizeof h->channel->socket)
        return gs_refuse(GEMRUN_E_ARGUMENT, "gemrun_attach",
                         "no handle, or a socket's path of none or over 107 bytes; shorten it");
    if (!is_name(name))
        return gs_refuse(GEMRUN_E_ARGUMENT, "gemrun_attach",
                         "a name has 1 to 64 of a-z, 0-9, '.', '_' and '-'; choose another");
    pthread_mutex_lock(&h->attaching);
    gs_channel *c = h->channel ? NULL : start_channel(h, socket, name);
    if (h->channel)
        st = gs_refuse(GEMRUN_E_STATE, "gemrun_attach", "attached already; detach first");
    else if (!c)
        st = gs_refuse(GEMRUN_E_MAP, "gemrun_attach",
                       "no memory, descriptor or thread left; free some");
    pthread_mutex_lock(&h->lock);
    h->channel = c ? c : h->channel;
    pthread_mutex_unlock(&h->lock);
    pthread_mutex_unlock(&h->attaching);
    return st;
}

/* Under the lock the reader cannot close the connection, and its number is not another's. */
static void stop_channel(gs_channel *c)
{
    gemrun_handle_t *h = c->h;
    pthread_mutex_lock(&h->lock);
    c->stop = true;
    if (c->fd >= 0)
        shutdown(c->fd, SHUT_RDWR);
    pthread_cond_broadcast(&h->changed);
    pthread_mutex_unlock(&h->lock);
    ssize_t woken = write(c->wake[1], "", 1);
    (void)woken; /* the pipe is empty, and its other end open */
    pthread_join(c->reader, NULL);
    pthread_join(c->worker, NULL);
    pthread_mutex_lock(&h->lock);
    h->channel = NULL;
    pthread_mutex_unlock(&h->lock);
    gs_pace_by_daemon(h, GS_UNPACED);
    free_channel(c);
}

void gemrun_detach(gemrun_handle_t *h)
{
    if (!h)
        return;
    pthread_mutex_lock(&h->attaching);
    if (h->channel)
        stop_channel(h->channel);
    pthread_mutex_unlock(&h->attaching);
}
