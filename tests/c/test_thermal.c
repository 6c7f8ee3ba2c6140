/* test_thermal.c: the ladder of an artifact: its rules, going up and down, a simulated board held
 * below its threshold, and runs whose answer does not depend on any of it. Time is made up. */
#define _GNU_SOURCE
#include "gemrun_thermal.h"
#include "gs_handle.h"
#include "gs_thermal.h"
#include "image.h"

#include <fcntl.h>
#include <math.h>
#include <unistd.h>

#define MS 1000000u
#define S (1000u * MS)
enum { TOKENS = 24, RECORD = sizeof(gb_thermal) + sizeof(gb_ladder) };

static const gb_rung steps[] = {{1000, 1000, 1000, 0}, {800, 1000, 1000, 0}, {650, 1000, 1000, 0},
                                {500, 1000, 500, 0},   {500, 500, 500, 0},   {350, 500, 500, 0},
                                {200, 500, 250, 0},    {80, 500, 250, 0}};

static gb_ladder ladder_of(uint32_t mode)
{
    gb_ladder l = {.mode = mode, .rung_count = 8, .engage_c = 75, .release_c = 70, .rise = 1,
                   .fault = 4, .engage_ms = 3000, .release_ms = 15000, .stale_ms = 5000};
    memcpy(l.rungs, steps, sizeof steps);
    if (mode == GB_MODE_AGGRESSIVE) {
        l.rise = 2;
        l.engage_c = 70;
        l.release_c = 65;
    } else if (mode == GB_MODE_CONSERVATIVE || mode == GB_MODE_SILENT) {
        memset(l.rungs, 0, sizeof l.rungs);
        memcpy(l.rungs, steps + 4, 4 * sizeof *steps);
        l.rung_count = 4;
        l.fault = 0;
    }
    return l;
}

/* ---- rules ---- */

static _Alignas(4096) uint8_t file[4096];

/* A view of a file of one section: THRM, with a record of `size` bytes. */
static gr_view view_of(const gb_ladder *l, uint32_t size)
{
    gb_section s = {.type = GB_SEC_THRM, .offset = 1024, .size = size, .record_size = size,
                    .record_count = 1};
    memset(file, 0, sizeof file);
    memcpy(file + 512, &s, sizeof s);
    memcpy(file + 1024 + sizeof(gb_thermal), l, sizeof *l);
    gr_view v = {.image = file, .image_size = sizeof file};
    v.header.section_count = 1;
    v.thermal = (gb_thermal){.threshold_c = 81, .hysteresis_c = 1};
    return v;
}

static bool accepts(gb_ladder l)
{
    gb_ladder out;
    gr_view v = view_of(&l, RECORD);
    return gs_ladder_of(&v, &out);
}

#define REFUSES(change)                                                                   \
    do {                                                                                  \
        gb_ladder l = ladder_of(GB_MODE_BALANCED);                                        \
        change;                                                                           \
        CHECK(!accepts(l));                                                               \
    } while (0)

static void test_rules(void)
{
    for (uint32_t mode = 0; mode <= GB_MODE_SILENT; mode++)
        CHECK(accepts(ladder_of(mode)));
    gb_ladder none = ladder_of(0);
    none.engage_c = none.release_c = 0;
    CHECK(accepts(none));
    REFUSES(l.mode = 5);
    REFUSES(l.rung_count = 0);
    REFUSES(l.rung_count = 9);
    REFUSES(l.rung_count = 7); /* an eighth rung that is not used */
    REFUSES(l.engage_c = 0);
    REFUSES(l.release_c = 0);
    REFUSES(l.release_c = 75);
    REFUSES(l.engage_c = 151);
    REFUSES(l.engage_c = NAN);
    REFUSES(l.release_c = NAN);
    REFUSES((l.engage_c = -0.0f, l.release_c = 0));
    REFUSES(l.engage_c = INFINITY);
    REFUSES(l.rise = 0);
    REFUSES(l.rise = 9);
    REFUSES(l.fault = 8);
    REFUSES(l.engage_ms = 0);
    REFUSES(l.release_ms = 600001);
    REFUSES(l.stale_ms = 99);
    REFUSES(l.rungs[0].duty = 1001);
    REFUSES(l.rungs[1].duty = 0);
    REFUSES(l.rungs[2].duty = 801); /* more than the rung before */
    REFUSES(l.rungs[3].threads = 0);
    REFUSES(l.rungs[5].threads = 501);
    REFUSES(l.rungs[4].chunk = 0);
    REFUSES(l.rungs[4].chunk = 501);
    REFUSES(l.rungs[7].reserved = 1);
    REFUSES(l.reserved[27] = 1);
}

static void test_usual_ladder(void)
{
    gb_ladder l = ladder_of(0), out;
    gr_view v = view_of(&l, sizeof(gb_thermal));
    CHECK(gs_ladder_of(&v, &out));
    CHECK(out.engage_c == 81 && out.release_c == 78); /* a hysteresis of 3 at least */
    CHECK(accepts(out));
    v = view_of(&l, sizeof(gb_thermal)); /* accepts() made another file */
    v.thermal.threshold_c = 0;
    CHECK(gs_ladder_of(&v, &out));
    CHECK(out.engage_c == 0 && out.release_c == 0 && accepts(out));
    v = view_of(&l, RECORD);
    v.image_size = 1024 + RECORD - 1; /* the table says more than there is */
    CHECK(gs_ladder_of(&v, &out) && out.engage_c == 81);
}

static void test_shares(void)
{
    CHECK(gs_share_of(6, 1000) == 6 && gs_share_of(6, 500) == 3 && gs_share_of(5, 500) == 3);
    CHECK(gs_share_of(1, 1) == 1 && gs_share_of(128, 250) == 32);
}

/* ---- up and down ---- */

typedef struct walk { /* a climb with its ladder and clock */
    gs_climb c;
    gb_ladder l;
    uint64_t now;
} walk;

/* Tell `celsius` after `ms`; the rung's number. */
static uint32_t at(walk *w, uint32_t ms, float celsius)
{
    uint32_t level;
    w->now += (uint64_t)ms * MS;
    gs_climb_tell(&w->c, celsius, w->now);
    gs_climb_rung(&w->c, &w->l, w->now, &level);
    return level;
}

static uint32_t later(walk *w, uint32_t ms)
{
    uint32_t level;
    w->now += (uint64_t)ms * MS;
    gs_climb_rung(&w->c, &w->l, w->now, &level);
    return level;
}

static void test_hysteresis(void)
{
    walk w = {.l = ladder_of(GB_MODE_BALANCED), .now = S};
    CHECK(later(&w, 1000) == 0 && !w.c.told);
    CHECK(at(&w, 500, 74.9f) == 0);
    CHECK(at(&w, 500, 75.0f) == 1); /* at once .. */
    CHECK(at(&w, 2900, 76.0f) == 1);
    CHECK(at(&w, 200, 76.0f) == 2); /* .. and again after engage_ms */
    CHECK(at(&w, 3000, 74.0f) == 2); /* between the two nothing changes */
    for (int i = 0; i < 40; i++)
        CHECK(at(&w, 1000, 70.1f) == 2);
    CHECK(at(&w, 1000, 70.0f) == 1);
    CHECK(at(&w, 4000, 69.0f) == 1);
    CHECK(at(&w, 4000, 69.0f) == 1);
    CHECK(at(&w, 4000, 69.0f) == 1);
    CHECK(at(&w, 4000, 69.0f) == 0);
    for (int i = 0; i < 40; i++)
        at(&w, 3000, 80.0f);
    CHECK(at(&w, 3000, 80.0f) == 7); /* the last one, never a stop */
    w = (walk){.l = ladder_of(GB_MODE_AGGRESSIVE), .now = S};
    CHECK(at(&w, 500, 70) == 2 && at(&w, 3000, 70) == 4);
    for (int i = 0; i < 4; i++)
        at(&w, 3000, 70);
    CHECK(at(&w, 3000, 70) == 7);
}

/* A board that cooled while nothing ran need not go down rung by rung. */
static void test_a_pause_counts(void)
{
    walk w = {.l = ladder_of(GB_MODE_BALANCED), .now = S};
    for (int i = 0; i < 5; i++)
        at(&w, 3000, 76);
    CHECK(at(&w, 1000, 74) == 5);
    for (int i = 0; i < 60; i++) { /* told, but no step */
        w.now += S;
        gs_climb_tell(&w.c, 60, w.now);
    }
    CHECK(later(&w, 0) == 0);
    for (int i = 0; i < 5; i++)
        at(&w, 3000, 76); /* 16 degrees in 3 s: no jump */
    for (int i = 0; i < 60; i++)
        at(&w, 1000, 74);
    CHECK(at(&w, 1000, 70) == 4); /* hot until now: one rung only */
}

static void test_faults(void)
{
    walk w = {.l = ladder_of(GB_MODE_BALANCED), .now = S};
    CHECK(at(&w, 500, 50) == 0 && later(&w, 5000) == 0);
    CHECK(later(&w, 1) == 4 && w.c.fault); /* stale */
    CHECK(later(&w, 3600000) == 4);
    CHECK(at(&w, 500, 50) == 4 && at(&w, 500, 50) == 4 && at(&w, 500, 50) == 4);
    for (int i = 0; i < 26; i++)
        CHECK(at(&w, 500, 50) == 4);
    CHECK(at(&w, 1000, 50) == 0 && !w.c.fault); /* 15 s and three good ones later */
    const float impossible[] = {-41, 151, NAN, INFINITY, -INFINITY};
    for (size_t i = 0; i < sizeof impossible / sizeof impossible[0]; i++) {
        CHECK(at(&w, 500, impossible[i]) == 4 && w.c.fault && w.c.celsius == 50);
        for (int k = 0; k < 40; k++)
            at(&w, 500, 50);
        CHECK(at(&w, 500, 50) == 0);
    }
    CHECK(at(&w, 500, 70.5f) == 4); /* 20.5 degrees in half a second */
    for (int k = 0; k < 40; k++)
        at(&w, 500, 70.5f);
    CHECK(at(&w, 500, 70.5f) == 0);
    CHECK(at(&w, 3000, 20) == 0); /* 50 degrees in 3 s are none */
    for (int i = 0; i < 6; i++)
        at(&w, 3000, 76);
    CHECK(w.c.level == 6 && at(&w, 100, 200) == 6); /* a fault is no reason to speed up */
    w = (walk){.l = ladder_of(GB_MODE_BALANCED), .now = S};
    w.l.engage_c = w.l.release_c = 0; /* no limit is known: only the fault counts */
    CHECK(at(&w, 500, 140) == 0 && at(&w, 500, 200) == 4);
}

/* ---- a simulated board ---- */

typedef struct plant { /* as tests/plant.py: the die over its sink over the air; 84 C at 25 C */
    double die, sink, air;
    double past[8]; /* the sensor is 1.5 s late */
} plant;

static plant plant_at(double air)
{
    plant p = {.die = air + 7 * 2.4, .sink = air + 7 * 1.9, .air = air};
    for (int i = 0; i < 8; i++)
        p.past[i] = p.die;
    return p;
}

static void run_for_a_quarter(plant *p, gb_rung r)
{
    double power = 7 + 17.5 * r.duty / 1000 * r.threads / 1000, flow = (p->die - p->sink) / 0.5;
    p->die += 0.25 * (power - flow) * 0.5 / 3;
    p->sink += 0.25 * (flow - (p->sink - p->air) / 1.9) * 1.9 / 110;
    memmove(p->past, p->past + 1, sizeof p->past - sizeof *p->past);
    p->past[7] = p->die;
}

typedef struct trace {
    double peak, last_peak, work; /* of all, of the last ten minutes; mean duty times threads */
    uint32_t changes;             /* of the level, in the last ten minutes */
} trace;

static trace simulate(const gb_ladder *l, double air, bool throttled)
{
    plant p = plant_at(air);
    gs_climb c = {0};
    trace t = {0};
    enum { TICKS = 4 * 3600, LAST = TICKS - 4 * 600 };
    uint32_t level = 0, before = 0;
    for (uint32_t i = 0; i < TICKS; i++) {
        uint64_t now = S + (uint64_t)i * 250 * MS;
        double noise = 0.3 * ((double)image_random() / 4294967296.0 - 0.5);
        if (throttled && i % 2 == 0)
            gs_climb_tell(&c, (float)(p.past[2] + noise), now);
        gb_rung r = gs_climb_rung(&c, l, now, &level);
        run_for_a_quarter(&p, r);
        t.peak = p.die > t.peak ? p.die : t.peak;
        t.last_peak = i > LAST && p.die > t.last_peak ? p.die : t.last_peak;
        t.work += r.duty / 1000.0 * r.threads / 1000 / TICKS;
        t.changes += i > LAST && level != before;
        before = level;
    }
    return t;
}

static void test_a_board_stays_below_its_threshold(void)
{
    const double airs[] = {25, 35, 45};
    for (uint32_t mode = 0; mode <= GB_MODE_SILENT; mode++) {
        gb_ladder l = ladder_of(mode);
        for (size_t i = 0; i < sizeof airs / sizeof airs[0]; i++) {
            trace free = simulate(&l, airs[i], false), held = simulate(&l, airs[i], true);
            printf("mode %u, air %2.0f C: free %5.1f C; held %4.1f C at most, later %4.1f C, "
                   "work %3.0f %%, %u changes in ten minutes\n", mode, airs[i], free.peak,
                   held.peak, held.last_peak, 100 * held.work, held.changes);
            CHECK(free.peak > 82);
            CHECK(held.peak < l.engage_c + 2 && held.last_peak < l.engage_c + 2);
            CHECK(held.work > 0.1 && held.changes < 60);
        }
    }
}

/* ---- runs ---- */

static uint64_t clock_now = S, slept;
static uint64_t busy_ns = 10 * MS; /* of a step */
static uint32_t naps;

static uint64_t made_up_now(void *user)
{
    (void)user;
    return clock_now;
}

static void made_up_sleep(void *user, uint64_t ns)
{
    (void)user;
    clock_now += ns;
    slept += ns;
    naps++;
}

typedef struct script { /* what a run is told, and what it is seen to do */
    gemrun_context_t *ctx;
    uint32_t kind, steps;
    uint32_t least_threads, least_chunk;
    bool levels[8];
} script;

/* Temperatures as no board has them. */
static float wild(const script *s)
{
    static const float values[] = {20, 90, 60, 76, NAN, 200, 74, -60, 71, 80, 65, 150};
    return s->kind == 0   ? values[s->steps % (sizeof values / sizeof values[0])]
           : s->kind == 1 ? 76
                          : (float)(image_random() % 200) - 45;
}

static int each_step(void *user, uint32_t *threads)
{
    script *s = user;
    gemrun_thermal_state st = {.size = sizeof st};
    (void)threads;
    clock_now += busy_ns;
    if (s->kind < 3)
        clock_now += s->steps % 3 == 0 ? 3 * S : 0; /* time for another rung */
    gemrun_set_temperature(s->ctx, s->kind < 3 ? wild(s) : 50);
    s->steps++;
    CHECK(gemrun_get_thermal(s->ctx, &st) == GEMRUN_OK);
    s->levels[st.level] = true;
    s->least_threads = st.threads < s->least_threads ? st.threads : s->least_threads;
    s->least_chunk = st.chunk < s->least_chunk ? st.chunk : s->least_chunk;
    return 0;
}

/* An artifact with a ladder. */
static image image_with(const gb_ladder *l)
{
    image m = image_make();
    gb_section *s = image_section(&m, GB_SEC_THRM);
    uint8_t *record = image_data(&m, GB_SEC_THRM);
    s->size = s->mem_size = s->record_size = RECORD;
    memcpy(record + sizeof(gb_thermal), l, sizeof *l);
    image_reseal(&m);
    return m;
}

static gemrun_context_t *open_with(const image *m, uint32_t threads)
{
    gemrun_context_t *ctx = NULL;
    gemrun_config c = gemrun_config_default();
    c.threads = threads;
    c.ignore_memory = 1;
    CHECK(gemrun_open_mem(&ctx, m->bytes, m->size, NULL, 0, &c) == GEMRUN_OK);
    return ctx;
}

static void made_up_time(gemrun_context_t *ctx)
{
    gemrun_thermal_config c = {.size = sizeof c, .now = made_up_now, .sleep = made_up_sleep};
    CHECK(gemrun_thermal_configure(ctx, &c) == GEMRUN_OK);
}

static gemrun_request request_of(gemrun_context_t *ctx)
{
    gemrun_request q = gemrun_request_default(ctx);
    q.max_tokens = TOKENS;
    q.ignore_stop_ids = 1;
    return q;
}

static const char prompt[] = "a prompt that takes more than one step";

typedef struct made { /* by a run */
    int32_t n, ids[TOKENS];
    float logits[VOCAB];
} made;

static made run(gemrun_context_t *ctx, const gemrun_request *q)
{
    made m = {0};
    uint32_t count = 0;
    m.n = gemrun_generate(ctx, prompt, q, m.ids);
    const float *logits = gemrun_logits(ctx, &count);
    CHECK(m.n == TOKENS && logits && count == VOCAB);
    memcpy(m.logits, logits, sizeof m.logits);
    return m;
}

static void test_no_answer_depends_on_it(void)
{
    bool seen[8] = {0};
    for (uint32_t mode = 0; mode <= GB_MODE_SILENT; mode++) {
        image_random_state = 1; /* the same model again */
        gb_ladder l = ladder_of(mode);
        image m = image_with(&l);
        for (uint32_t threads = 1; threads <= 4; threads += 3) {
            gemrun_context_t *ctx = open_with(&m, threads);
            gemrun_request plain = request_of(ctx);
            made wanted = run(ctx, &plain);
            made_up_time(ctx);
            for (uint32_t kind = 0; kind < 3; kind++) {
                script s = {.ctx = ctx, .kind = kind, .least_threads = 99, .least_chunk = 99};
                gemrun_request own = plain;
                gemrun_pacer pacer;
                own.on_step = each_step;
                own.user = &s;
                gemrun_request q = gemrun_paced(ctx, &pacer, &own);
                uint64_t before = slept;
                made found = run(ctx, &q);
                CHECK(memcmp(&found, &wanted, sizeof found) == 0);
                CHECK(slept > before && s.steps >= TOKENS);
                CHECK(s.least_chunk < CHUNK && (threads == 1 || s.least_threads == 2));
                CHECK(ctx->e.chunk == CHUNK); /* what was opened is back */
                for (uint32_t i = 0; i < 8; i++)
                    seen[i] = seen[i] || s.levels[i];
            }
            gemrun_destroy(ctx);
        }
        free(m.bytes);
    }
    for (uint32_t i = 1; i < 8; i++)
        CHECK(seen[i]);
}

/* Two thirds of the time, exactly, however long a step is; a fifth of a second is given ahead. */
static void test_pace(void)
{
    image_random_state = 1;
    gb_ladder l = ladder_of(GB_MODE_CONSERVATIVE);
    l.rungs[0] = (gb_rung){625, 500, 500, 0};
    image m = image_with(&l);
    gemrun_context_t *ctx = open_with(&m, 2);
    const uint64_t lengths[] = {MS, 100 * MS, 2000 * MS};
    for (uint32_t i = 0; i < 3; i++) {
        script s = {.ctx = ctx, .kind = 3, .least_threads = 9, .least_chunk = 99};
        gemrun_pacer pacer;
        made_up_time(ctx);
        CHECK(gemrun_set_temperature(ctx, 50) == GEMRUN_OK);
        gemrun_request own = request_of(ctx);
        own.on_step = each_step;
        own.user = &s;
        busy_ns = lengths[i];
        slept = 0;
        gemrun_request q = gemrun_paced(ctx, &pacer, &own);
        run(ctx, &q);
        double paid = (double)(s.steps - 1) * (double)busy_ns * 0.6; /* nothing before the first */
        double wanted = paid > 200e6 ? paid - 200e6 : 0;
        printf("%u steps of %.0f ms: %.1f ms asleep, wanted %.1f\n", s.steps,
               (double)busy_ns * 1e-6, (double)slept * 1e-6, wanted * 1e-6);
        CHECK(fabs((double)slept - wanted) < 1.1 * MS);
        CHECK(s.least_threads == 1 && s.least_chunk == CHUNK / 2);
    }
    busy_ns = 10 * MS;
    gemrun_destroy(ctx);
    free(m.bytes);
}

/* Without a temperature nothing is paced, nor where it is off. */
static void test_off(void)
{
    image_random_state = 1;
    gb_ladder l = ladder_of(GB_MODE_CONSERVATIVE);
    image m = image_with(&l);
    gemrun_context_t *ctx = open_with(&m, 1);
    gemrun_thermal_state st = {.size = sizeof st};
    gemrun_pacer pacer;
    gemrun_request plain = request_of(ctx), q;
    made_up_time(ctx);
    slept = 0;
    q = gemrun_paced(ctx, &pacer, &plain);
    run(ctx, &q);
    CHECK(slept == 0);
    CHECK(gemrun_get_thermal(ctx, &st) == GEMRUN_OK && !st.told && st.duty == 1000);
    gemrun_thermal_config off = {.size = sizeof off, .off = 1, .now = made_up_now,
                                 .sleep = made_up_sleep};
    CHECK(gemrun_thermal_configure(ctx, &off) == GEMRUN_OK);
    CHECK(gemrun_set_temperature(ctx, 200) == GEMRUN_OK);
    q = gemrun_paced(ctx, &pacer, &plain);
    run(ctx, &q);
    CHECK(slept == 0);
    gemrun_destroy(ctx);
    free(m.bytes);
}

static float asked_temperature = 76;
static uint32_t asked;

static float ask_temperature(void *user)
{
    (void)user;
    asked++;
    clock_now += 4 * S;
    return asked_temperature;
}

static void test_a_callback_is_asked_between_tokens(void)
{
    image_random_state = 1;
    gb_ladder l = ladder_of(GB_MODE_BALANCED);
    image m = image_with(&l);
    gemrun_context_t *ctx = open_with(&m, 1);
    gemrun_thermal_state st = {.size = sizeof st};
    gemrun_thermal_config c = {.size = sizeof c, .temperature = ask_temperature,
                               .now = made_up_now, .sleep = made_up_sleep};
    gemrun_pacer pacer;
    CHECK(gemrun_thermal_configure(ctx, &c) == GEMRUN_OK);
    gemrun_request plain = request_of(ctx), q = gemrun_paced(ctx, &pacer, &plain);
    run(ctx, &q);
    CHECK(asked >= TOKENS);
    CHECK(gemrun_get_thermal(ctx, &st) == GEMRUN_OK && st.level == 7 && st.celsius == 76);
    asked_temperature = NAN; /* nothing new: it becomes old */
    q = gemrun_paced(ctx, &pacer, &plain);
    run(ctx, &q);
    CHECK(gemrun_get_thermal(ctx, &st) == GEMRUN_OK && st.fault && st.level == 7);
    gemrun_destroy(ctx);
    free(m.bytes);
}

/* A cancel and a deadline end a sleep that would be long. */
static int cancel_later(void *user, uint32_t *threads)
{
    script *s = user;
    (void)threads;
    clock_now += 60ull * S;
    gemrun_set_temperature(s->ctx, 50);
    if (++s->steps == 4)
        gemrun_cancel(s->ctx);
    return 0;
}

static void test_a_sleep_ends(void)
{
    image_random_state = 1;
    gb_ladder l = ladder_of(GB_MODE_CONSERVATIVE);
    image m = image_with(&l);
    gemrun_context_t *ctx = open_with(&m, 1);
    gemrun_stats st = {.size = sizeof st};
    gemrun_pacer pacer;
    script s = {.ctx = ctx};
    made_up_time(ctx);
    gemrun_request own = request_of(ctx);
    own.on_step = cancel_later;
    own.user = &s;
    gemrun_request q = gemrun_paced(ctx, &pacer, &own);
    uint64_t before = slept;
    CHECK(gemrun_generate(ctx, "x", &q, NULL) >= 0);
    CHECK(gemrun_get_stats(ctx, &st) == GEMRUN_OK && st.finish == GEMRUN_FINISH_CANCELLED);
    CHECK(slept - before < 130ull * S); /* two steps were paid for, not the third */
    s.steps = 10;
    own.deadline_ns = 70ull * S;
    q = gemrun_paced(ctx, &pacer, &own);
    before = slept;
    CHECK(gemrun_generate(ctx, "x", &q, NULL) >= 0);
    CHECK(slept - before <= 70ull * S + 100 * MS);
    gemrun_destroy(ctx);
    free(m.bytes);
}

static void test_wrong_calls(void)
{
    image_random_state = 1;
    gb_ladder l = ladder_of(GB_MODE_BALANCED);
    l.rise = 0;
    image m = image_with(&l);
    gemrun_context_t *ctx = open_with(&m, 1); /* the engine does not look at it */
    gemrun_thermal_state st = {.size = sizeof st};
    gemrun_thermal_config c = {.size = sizeof c};
    CHECK(gemrun_set_temperature(ctx, 50) == GEMRUN_E_THRM);
    CHECK(strstr(gemrun_last_error(), "compile the artifact again"));
    CHECK(gemrun_thermal_configure(ctx, &c) == GEMRUN_E_THRM);
    CHECK(gemrun_set_temperature(NULL, 50) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_thermal_configure(ctx, NULL) == GEMRUN_E_ARGUMENT);
    c.off = 2;
    CHECK(gemrun_thermal_configure(ctx, &c) == GEMRUN_E_ARGUMENT);
    st.size = 1;
    CHECK(gemrun_get_thermal(ctx, &st) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_handle_set_temperature(NULL, 1) == GEMRUN_E_ARGUMENT);
    gemrun_pacer pacer;
    gemrun_request odd = request_of(ctx);
    odd.size = 4096; /* more than there is is not read */
    gemrun_request q = gemrun_paced(ctx, &pacer, &odd);
    CHECK(gemrun_generate(ctx, "x", &q, NULL) == GEMRUN_E_ARGUMENT);
    gemrun_destroy(ctx);
    free(m.bytes);
}

/* ---- a handle ---- */

static void test_handle(void)
{
    char path[] = "/tmp/gemrun-thermal-XXXXXX";
    int fd = mkstemp(path);
    image_random_state = 1;
    gb_ladder l = ladder_of(GB_MODE_BALANCED);
    image m = image_with(&l);
    CHECK(fd >= 0 && write(fd, m.bytes, m.size) == (ssize_t)m.size && close(fd) == 0);
    gemrun_handle_t *h = NULL;
    gemrun_config c = gemrun_config_default();
    c.threads = 4;
    c.ignore_memory = 1;
    CHECK(gemrun_handle_open(&h, path, &c) == GEMRUN_OK);
    gemrun_thermal_state st = {.size = sizeof st};
    CHECK(gemrun_handle_get_thermal(h, &st) == GEMRUN_OK && !st.told && st.duty == 1000);
    gemrun_request q = gemrun_handle_request(h);
    int32_t wanted[TOKENS], found[TOKENS];
    q.max_tokens = TOKENS;
    q.ignore_stop_ids = 1;
    CHECK(gemrun_handle_generate(h, prompt, &q, wanted) == TOKENS);
    CHECK(gemrun_handle_set_temperature(h, 50) == GEMRUN_OK);
    CHECK(gemrun_handle_set_temperature(h, 200) == GEMRUN_OK); /* a fault: the rung of it */
    CHECK(gemrun_handle_get_thermal(h, &st) == GEMRUN_OK && st.fault && st.level == 4);
    CHECK(st.duty == 500 && st.threads == 2 && st.chunk == CHUNK / 2 && st.mode == 0);
    gemrun_handle_stats hs = {.size = sizeof hs};
    CHECK(gemrun_handle_get_stats(h, &hs) == GEMRUN_OK && hs.duty == 500 && hs.threads == 2);
    CHECK(gemrun_handle_pace(h, 300, 3, 300, 3) == GEMRUN_OK); /* the lower of both */
    CHECK(gemrun_handle_get_stats(h, &hs) == GEMRUN_OK && hs.duty == 300 && hs.threads == 2);
    CHECK(gemrun_handle_pace(h, 1000, 0, 1000, 0) == GEMRUN_OK);
    CHECK(gemrun_handle_generate(h, prompt, &q, found) == TOKENS);
    CHECK(memcmp(wanted, found, sizeof found) == 0);
    CHECK(h->model->ctx->e.chunk == CHUNK);
    gemrun_handle_close(h);
    unlink(path);
    l.fault = 8;
    free(m.bytes);
    m = image_with(&l);
    fd = open(path, O_CREAT | O_EXCL | O_WRONLY, 0600);
    CHECK(fd >= 0 && write(fd, m.bytes, m.size) == (ssize_t)m.size && close(fd) == 0);
    CHECK(gemrun_handle_open(&h, path, &c) == GEMRUN_E_THRM);
    unlink(path);
    free(m.bytes);
}

int main(void)
{
    test_rules();
    test_usual_ladder();
    test_shares();
    test_hysteresis();
    test_a_pause_counts();
    test_faults();
    test_a_board_stays_below_its_threshold();
    test_no_answer_depends_on_it();
    test_pace();
    test_off();
    test_a_callback_is_asked_between_tokens();
    test_a_sleep_ends();
    test_wrong_calls();
    test_handle();
    return 0;
}
