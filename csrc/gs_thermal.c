/* gs_thermal.c: the ladder of an artifact, and runs that keep to it (gemrun_thermal.h).
 *
 * What is told lies in two atomics of the context; everything else is touched by the run's own
 * thread, before a step. The state is zeroed by open and needs no end. */
#define _POSIX_C_SOURCE 200809L
#include "gs_thermal.h"

#include <string.h>
#include <time.h>

#include "gemrun_thermal.h"
#include "gr_check.h"
#include "gs_handle.h"
#include "gs_pace.h"
#include "gs_section.h"

#define MS 1000000
enum { GOOD_AGAIN = 3, MOST_MS = 600000, STALE_LEAST_MS = 100 };
static const float LEAST_C = -40, MOST_C = 150, JUMP_C = 20, /* in a second */
    HYSTERESIS_LEAST_C = 3;
static const uint64_t FAULT_LEAST = 15000ULL * MS;
static const int64_t NAP_LEAST = MS, NAP_MOST = 50 * MS;

/* Where an artifact has none. gemmake/passes/thermal.py makes the others. */
static const gb_rung usual[] = {{1000, 1000, 1000, 0}, {800, 1000, 1000, 0}, {650, 1000, 1000, 0},
                                {500, 1000, 500, 0},   {500, 500, 500, 0},   {350, 500, 500, 0},
                                {200, 500, 250, 0},    {80, 500, 250, 0}};
static const gb_rung free_rung = {1000, 1000, 1000, 0};

/* ---- the ladder ---- */

static gb_ladder usual_ladder(const gb_thermal *t)
{
    gb_ladder l = {.rung_count = GB_MAX_RUNGS, .rise = 1, .fault = 4, .engage_ms = 3000,
                   .release_ms = 15000, .stale_ms = 5000};
    float below = t->hysteresis_c > HYSTERESIS_LEAST_C ? t->hysteresis_c : HYSTERESIS_LEAST_C;
    bool known = t->threshold_c > below && t->threshold_c <= MOST_C;
    l.engage_c = known ? t->threshold_c : 0;
    l.release_c = known ? t->threshold_c - below : 0;
    memcpy(l.rungs, usual, sizeof usual);
    return l;
}

static bool no_more(uint16_t share, uint16_t before)
{
    return share >= 1 && share <= before;
}

static bool rungs_are_good(const gb_ladder *l)
{
    gb_rung before = free_rung;
    for (uint32_t i = 0; i < GB_MAX_RUNGS; i++) {
        gb_rung r = l->rungs[i];
        bool used = i < l->rung_count;
        bool good = used ? no_more(r.duty, before.duty) && no_more(r.threads, before.threads) &&
                               no_more(r.chunk, before.chunk) && r.reserved == 0
                         : (r.duty | r.threads | r.chunk | r.reserved) == 0;
        if (!good)
            return false;
        before = r;
    }
    return true;
}

static bool time_is_good(uint32_t ms, uint32_t least)
{
    return ms >= least && ms <= MOST_MS;
}

static bool is_zero(float x) /* the bit pattern: no minus */
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits == 0;
}

static bool ladder_is_good(const gb_ladder *l)
{
    bool none = is_zero(l->engage_c) && is_zero(l->release_c);
    bool limits = l->release_c > 0 && l->release_c < l->engage_c && l->engage_c <= MOST_C;
    uint32_t rest = 0;
    for (size_t i = 0; i < sizeof l->reserved; i++)
        rest |= l->reserved[i];
    return l->mode <= GB_MODE_SILENT && l->rung_count >= 1 && l->rung_count <= GB_MAX_RUNGS &&
           (none || limits) && l->rise >= 1 && l->rise <= GB_MAX_RUNGS &&
           l->fault < l->rung_count && time_is_good(l->engage_ms, 1) &&
           time_is_good(l->release_ms, 1) && time_is_good(l->stale_ms, STALE_LEAST_MS) &&
           rest == 0 && rungs_are_good(l);
}

bool gs_ladder_of(const gr_view *v, gb_ladder *out)
{
    gb_section s;
    if (!gs_section(v, GB_SEC_THRM, sizeof(gb_thermal) + sizeof *out, &s) ||
        s.size < s.record_size) {
        *out = usual_ladder(&v->thermal);
        return true;
    }
    memcpy(out, v->image + s.offset + sizeof(gb_thermal), sizeof *out);
    return ladder_is_good(out);
}

uint32_t gs_share_of(uint32_t whole, uint32_t thousandths)
{
    return (uint32_t)(((uint64_t)whole * thousandths + GS_WHOLE - 1) / GS_WHOLE);
}

/* ---- up and down ---- */

static bool has_jumped(const gs_climb *c, float celsius, uint64_t now)
{
    float seconds = (float)(now - c->read) * 1e-9f;
    float most = JUMP_C * (seconds > 1 ? seconds : 1);
    float by = celsius > c->celsius ? celsius - c->celsius : c->celsius - celsius;
    return c->known && by > most;
}

void gs_climb_tell(gs_climb *c, float celsius, uint64_t now)
{
    bool plausible = celsius >= LEAST_C && celsius <= MOST_C; /* not a number: not */
    bool good = plausible && !has_jumped(c, celsius, now);
    c->good = !good ? 0 : c->good < GOOD_AGAIN ? c->good + 1 : GOOD_AGAIN;
    if (!good) {
        c->doubted = true;
        c->faulted = now;
    }
    if (plausible) {
        c->celsius = celsius;
        c->known = true;
    }
    c->told = true;
    c->read = now;
}

static bool is_stale(const gs_climb *c, const gb_ladder *l, uint64_t now)
{
    return now > c->read && now - c->read > (uint64_t)l->stale_ms * MS;
}

static void heed_fault(gs_climb *c, bool stale, uint64_t now)
{
    if (stale) {
        c->doubted = true;
        c->faulted = now;
        c->good = 0;
    }
    c->fault = c->doubted && (now - c->faulted < FAULT_LEAST || c->good < GOOD_AGAIN);
    c->doubted = c->fault;
}

/* A rung more, or as many less as there was time for since somebody asked. */
static void climb(gs_climb *c, const gb_ladder *l, uint64_t now)
{
    uint32_t top = l->rung_count - 1, level = c->level < top ? c->level : top;
    uint64_t rested = c->moved ? now - c->changed : UINT64_MAX;
    uint64_t release = (uint64_t)l->release_ms * MS;
    if (c->celsius >= l->engage_c && rested >= (uint64_t)l->engage_ms * MS) {
        level = l->rise < top - level ? level + l->rise : top;
    } else if (c->celsius <= l->release_c && !c->fault && level > 0 && rested >= release) {
        uint64_t times = 1 + (now - c->asked) / release;
        level = times < level ? level - (uint32_t)times : 0;
    }
    if (level != c->level) {
        c->level = level;
        c->changed = now;
        c->moved = true;
    }
}

gb_rung gs_climb_rung(gs_climb *c, const gb_ladder *l, uint64_t now, uint32_t *level)
{
    *level = 0;
    if (!c->told)
        return free_rung;
    bool stale = is_stale(c, l, now);
    heed_fault(c, stale, now);
    if (!stale && c->known && l->engage_c > 0)
        climb(c, l, now);
    c->asked = now;
    *level = c->fault && c->level < l->fault ? l->fault : c->level;
    return l->rungs[*level];
}

/* ---- a context's state ---- */

typedef struct thermal { /* in gemrun_context.control, zeroed by open */
    _Atomic uint64_t told; /* when, by the clock in use; 0: nothing yet */
    _Atomic uint32_t bits; /* the temperature's */
    uint32_t ready;        /* the ladder was taken */
    gb_ladder ladder;
    gs_climb climb;
    gemrun_thermal_config from;
    uint64_t heeded;       /* `told` of the last temperature that the climb knows */
    uint64_t since, text;  /* when the last step began; when text came last */
    int64_t owed;          /* nanoseconds of sleep; below 0: slept ahead */
    uint32_t chunk;        /* as opened; 0: not looked at yet */
} thermal;

static thermal *state_of(gemrun_context_t *ctx)
{
    _Static_assert(sizeof(thermal) <= sizeof ctx->control, "gemrun_context.control");
    return (thermal *)(void *)ctx->control;
}

static uint64_t clock_of(const thermal *t)
{
    return t->from.now ? t->from.now(t->from.user) : gr_port_now();
}

static void nap(const thermal *t, uint64_t ns)
{
    struct timespec left = {.tv_sec = (time_t)(ns / 1000000000u),
                            .tv_nsec = (long)(ns % 1000000000u)};
    if (t->from.sleep)
        t->from.sleep(t->from.user, ns);
    else
        nanosleep(&left, NULL);
}

static gemrun_status refuse_ladder(void)
{
    return gs_refuse(GEMRUN_E_THRM, "THRM", "the ladder of the thermal policy breaks a rule; "
                     "compile the artifact again");
}

static void take_ladder(gemrun_context_t *ctx, thermal *t)
{
    if (!t->ready && !gs_ladder_of(&ctx->e.v, &t->ladder)) /* changed since it was told */
        t->ladder = usual_ladder(&ctx->e.v.thermal);
    t->ready = 1;
}

static gb_rung rung_now(thermal *t, uint64_t now, uint32_t *level)
{
    uint64_t told = atomic_load_explicit(&t->told, memory_order_acquire);
    uint32_t bits = atomic_load_explicit(&t->bits, memory_order_relaxed);
    float celsius;
    *level = 0;
    if (t->from.off)
        return free_rung;
    if (told != t->heeded) {
        memcpy(&celsius, &bits, sizeof celsius);
        gs_climb_tell(&t->climb, celsius, told);
        t->heeded = told;
    }
    if (t->from.temperature) {
        celsius = t->from.temperature(t->from.user);
        if (celsius == celsius)
            gs_climb_tell(&t->climb, celsius, now);
    }
    return gs_climb_rung(&t->climb, &t->ladder, now, level);
}

gemrun_status gemrun_set_temperature(gemrun_context_t *ctx, float celsius)
{
    gb_ladder l;
    uint32_t bits;
    if (!ctx)
        return gs_refuse(GEMRUN_E_ARGUMENT, "gemrun_set_temperature",
                         "a null pointer; give an open context");
    if (!gs_ladder_of(&ctx->e.v, &l))
        return refuse_ladder();
    thermal *t = state_of(ctx);
    memcpy(&bits, &celsius, sizeof bits);
    atomic_store_explicit(&t->bits, bits, memory_order_relaxed);
    atomic_store_explicit(&t->told, clock_of(t) | 1, memory_order_release); /* never 0 */
    return GEMRUN_OK;
}

gemrun_status gemrun_thermal_configure(gemrun_context_t *ctx, const gemrun_thermal_config *config)
{
    gb_ladder l;
    if (!ctx || !config || config->size != sizeof *config || config->off > 1)
        return gs_refuse(GEMRUN_E_ARGUMENT, "gemrun_thermal_configure",
                         "a null pointer, a wrong size, or off is neither 0 nor 1; set size");
    if (!gs_ladder_of(&ctx->e.v, &l))
        return refuse_ladder();
    thermal *t = state_of(ctx);
    uint32_t chunk = t->chunk;
    memset(t, 0, sizeof *t); /* another clock: what was told belongs to the old one */
    t->from = *config;
    t->chunk = chunk;
    return GEMRUN_OK;
}

static gemrun_thermal_state state_by(const gs_climb *c, const gb_ladder *l, gb_rung r,
                                     uint32_t level, uint32_t threads, uint32_t chunk)
{
    return (gemrun_thermal_state){
        .size = sizeof(gemrun_thermal_state), .told = c->told, .mode = l->mode, .level = level,
        .levels = l->rung_count, .duty = r.duty, .threads = gs_share_of(threads, r.threads),
        .chunk = gs_share_of(chunk, r.chunk), .fault = c->fault,
        .celsius = c->known ? c->celsius : 0, .engage_c = l->engage_c, .release_c = l->release_c};
}

gemrun_status gemrun_get_thermal(const gemrun_context_t *ctx, gemrun_thermal_state *out)
{
    gemrun_context_t *own = (gemrun_context_t *)(uintptr_t)ctx;
    uint32_t level;
    if (!ctx || !out || out->size != sizeof *out)
        return gs_refuse(GEMRUN_E_ARGUMENT, "gemrun_get_thermal",
                         "a null pointer or a wrong size; set size");
    thermal *t = state_of(own);
    take_ladder(own, t);
    gb_rung r = rung_now(t, clock_of(t), &level);
    *out = state_by(&t->climb, &t->ladder, r, level, own->e.threads,
                    t->chunk ? t->chunk : own->e.chunk);
    return GEMRUN_OK;
}

/* ---- a run that keeps to it ---- */

/* Time of the step that ended; of a run's first call, of the last step of the run before, whose
 * pause since then counts as sleep. */
static uint64_t busy_until(gemrun_pacer *p, thermal *t, uint64_t now)
{
    if (p->begun)
        return now - t->since;
    p->begun = 1;
    bool ended = t->text > t->since;
    uint64_t last = ended ? t->text : t->since;
    t->owed = gs_owed(t->owed - (int64_t)(now - last));
    return ended && t->since > 0 ? t->text - t->since : 0;
}

/* Sleep for the step that just ended. A new rung counts from there. */
static gb_rung keep_pace(gemrun_pacer *p, thermal *t)
{
    uint64_t ended = clock_of(t), now = ended, busy = busy_until(p, t, ended);
    int64_t before = t->owed, left;
    uint32_t level;
    gb_rung r;
    for (;; now = clock_of(t)) {
        r = rung_now(t, now, &level);
        left = before + gs_sleep_of(r.duty, busy) - (int64_t)(now - ended);
        bool over = atomic_load_explicit(&p->ctx->cancel, memory_order_relaxed) ||
                    (p->deadline > 0 && now >= p->deadline);
        if (left < NAP_LEAST || over)
            break;
        int64_t most = p->deadline > 0 && p->deadline - now < (uint64_t)NAP_MOST
                           ? (int64_t)(p->deadline - now) : NAP_MOST;
        nap(t, (uint64_t)(left < most ? left : most));
    }
    t->owed = gs_owed(left);
    t->since = now;
    return r;
}

static int on_step(void *user, uint32_t *threads)
{
    gemrun_pacer *p = user;
    gr_engine *e = &p->ctx->e;
    thermal *t = state_of(p->ctx);
    t->chunk = t->chunk ? t->chunk : e->chunk;
    e->chunk = t->chunk; /* what a run that ends here leaves behind */
    if (p->on_step && p->on_step(p->user, &p->threads) != 0)
        return 1;
    take_ladder(p->ctx, t);
    gb_rung r = keep_pace(p, t);
    if (!p->decoding && !atomic_load_explicit(&p->ctx->cancel, memory_order_relaxed))
        e->chunk = gs_share_of(t->chunk, r.chunk);
    uint32_t own = p->threads, most = r.threads < GS_WHOLE ? gs_share_of(e->threads, r.threads) : 0;
    *threads = most > 0 && (own == 0 || most < own) ? most : own;
    return 0;
}

static int on_text(void *user, int32_t token, const char *text, size_t size)
{
    gemrun_pacer *p = user;
    thermal *t = state_of(p->ctx);
    p->decoding = 1;
    if (t->chunk > 0)
        p->ctx->e.chunk = t->chunk; /* only a prompt comes in smaller pieces */
    t->text = clock_of(t);
    return p->on_text ? p->on_text(p->user, token, text, size) : 0;
}

gemrun_request gemrun_paced(gemrun_context_t *ctx, gemrun_pacer *pacer,
                            const gemrun_request *request)
{
    gemrun_request q = gemrun_request_default(ctx);
    if (request) { /* a shorter one is of an older header; the engine refuses a longer one */
        bool fits = request->size > 0 && request->size <= sizeof q;
        memset(&q, 0, sizeof q);
        memcpy(&q, request, fits ? request->size : sizeof q.size);
        q.size = fits ? sizeof q : 0;
    }
    if (!ctx || !pacer)
        return q;
    *pacer = (gemrun_pacer){.ctx = ctx, .on_text = q.on_text, .on_step = q.on_step,
                            .user = q.user};
    if (q.deadline_ns > 0)
        pacer->deadline = gr_add(clock_of(state_of(ctx)), q.deadline_ns);
    q.on_text = on_text;
    q.on_step = on_step;
    q.user = pacer;
    return q;
}

/* ---- a handle ---- */

gemrun_status gemrun_handle_set_temperature(gemrun_handle_t *h, float celsius)
{
    if (!h)
        return gs_refuse(GEMRUN_E_ARGUMENT, "gemrun_handle_set_temperature",
                         "a null pointer; give an open handle");
    pthread_mutex_lock(&h->lock);
    gs_climb_tell(&h->climb, celsius, gs_now());
    gs_heed_heat(h);
    pthread_cond_broadcast(&h->changed); /* a step that sleeps looks again */
    pthread_mutex_unlock(&h->lock);
    return GEMRUN_OK;
}

gemrun_status gemrun_handle_get_thermal(gemrun_handle_t *h, gemrun_thermal_state *out)
{
    if (!h || !out || out->size != sizeof *out)
        return gs_refuse(GEMRUN_E_ARGUMENT, "gemrun_handle_get_thermal",
                         "a null pointer or a wrong size; set size");
    pthread_mutex_lock(&h->lock);
    gs_heed_heat(h);
    const gs_heat *heat = &h->heat;
    *out = state_by(&h->climb, &heat->ladder, heat->rung, heat->level, heat->threads, heat->chunk);
    pthread_mutex_unlock(&h->lock);
    return GEMRUN_OK;
}
