/* test_handle.c: a model behind a handle: requests, pace, replacement, and the channel to a daemon,
 * which is played here. Run it under sanitizers, ThreadSanitizer too.
 *
 * Nothing depends on how fast anything is: where time passes the tests wait for a state, and where
 * a share of time is checked it is the processor's, against a bound that a slow machine only
 * widens. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "gr_hooks.h"
#include "gs_channel.h"
#include "gs_handle.h"
#include "gs_json.h"
#include "gs_pace.h"
#include "image.h"

enum { TOKENS = 12, VERSIONS = 2, CLIENTS = 6 };

static char folder[] = "/tmp/gemrunXXXXXX";
static char paths[VERSIONS][64], bad_vector[64], short_context[64], cut[64], socket_path[64];
static int32_t answers[VERSIONS][TOKENS];

static bool said(const char *part)
{
    return strstr(gemrun_last_error(), part) != NULL;
}

static gemrun_config config_of(uint32_t threads)
{
    gemrun_config c = gemrun_config_default();
    c.threads = threads;
    c.ignore_memory = 1;
    return c;
}

static gemrun_request request_of(uint32_t tokens)
{
    return (gemrun_request){.size = sizeof(gemrun_request), .max_tokens = tokens, .top_k = 64,
                            .top_p = 0.85f, .repetition_penalty = 1.0f, .ignore_stop_ids = 1};
}

static gemrun_handle_stats stats_of(gemrun_handle_t *h)
{
    gemrun_handle_stats s = {.size = sizeof s};
    CHECK(gemrun_handle_get_stats(h, &s) == GEMRUN_OK);
    return s;
}

static gemrun_handle_t *open_handle(const char *path)
{
    gemrun_handle_t *h = NULL;
    gemrun_config c = config_of(2);
    if (gemrun_handle_open(&h, path, &c) != GEMRUN_OK) {
        fprintf(stderr, "open: %s\n", gemrun_last_error());
        exit(1);
    }
    return h;
}

static void yield_a_little(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
}

static bool asleep(gemrun_handle_t *h)
{
    pthread_mutex_lock(&h->lock);
    bool is = h->asleep;
    pthread_mutex_unlock(&h->lock);
    return is;
}

static void wait_asleep(gemrun_handle_t *h)
{
    while (!asleep(h)) {
        yield_a_little();
    }
}

static void wait_active(gemrun_handle_t *h, uint32_t active, uint32_t waiting)
{
    for (gemrun_handle_stats s = stats_of(h); s.active != active || s.waiting != waiting;
         s = stats_of(h)) {
        yield_a_little();
    }
}

/* Mappings of a file in this process. */
static uint32_t mappings(const char *path)
{
    char line[512];
    uint32_t count = 0;
    FILE *f = fopen("/proc/self/maps", "r");
    CHECK(f != NULL);
    while (fgets(line, sizeof line, f)) {
        count += strstr(line, path) != NULL;
    }
    fclose(f);
    return count;
}

/* ---- artifacts ---- */

static void write_file(char *out, const char *name, const image *m, size_t size)
{
    snprintf(out, 64, "%s/%s.gembin", folder, name);
    FILE *f = fopen(out, "wb");
    CHECK(f != NULL && fwrite(m->bytes, 1, size, f) == size && fclose(f) == 0);
}

static gemrun_context_t *open_alone(const image *m)
{
    gemrun_context_t *ctx = NULL;
    gemrun_config c = config_of(1);
    CHECK(gemrun_open_mem(&ctx, m->bytes, m->size, NULL, 0, &c) == GEMRUN_OK);
    return ctx;
}

/* An artifact with a test vector that holds. */
static image make_sound(uint64_t seed)
{
    image_random_state = seed;
    image m = image_make();
    gb_test *t = image_data(&m, GB_SEC_TEST);
    gb_conf *c = image_data(&m, GB_SEC_CONF);
    uint32_t steps[4];
    c->temperature = 0.5f; /* not what is there without an artifact */
    image_reseal(&m);
    gemrun_context_t *ctx = open_alone(&m);
    CHECK(gemrun_internal_digest(ctx, t->prompt, t->prompt_count, steps, 4, &t->digest) == 0);
    gemrun_destroy(ctx);
    memcpy(t->steps, steps, sizeof steps);
    image_reseal(&m);
    return m;
}

static void make_files(void)
{
    static const char *const names[VERSIONS] = {"version-a", "version-b"};
    for (uint32_t i = 0; i < VERSIONS; i++) {
        image m = make_sound(i + 1);
        gemrun_request q = request_of(TOKENS);
        gemrun_context_t *ctx = open_alone(&m);
        CHECK(gemrun_generate(ctx, "hello", &q, answers[i]) == TOKENS);
        gemrun_destroy(ctx);
        write_file(paths[i], names[i], &m, m.size);
        if (i == 0) {
            gb_test *t = image_data(&m, GB_SEC_TEST);
            write_file(cut, "cut", &m, m.size - 4096);
            t->digest++;
            image_reseal(&m);
            write_file(bad_vector, "bad-vector", &m, m.size);
        }
        free(m.bytes);
    }
    image_context = CONTEXT / 2;
    image m = make_sound(3);
    write_file(short_context, "short", &m, m.size);
    image_context = CONTEXT;
    free(m.bytes);
    CHECK(memcmp(answers[0], answers[1], sizeof answers[0]) != 0);
    snprintf(socket_path, sizeof socket_path, "%s/s", folder);
}

static void remove_files(void)
{
    const char *const all[] = {paths[0], paths[1], bad_vector, short_context, cut, socket_path};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        unlink(all[i]);
    }
    CHECK(rmdir(folder) == 0);
}

/* ---- a request in a thread of its own ---- */

typedef struct client {
    gemrun_handle_t *h;
    pthread_t thread;
    uint32_t tokens, rounds;
    int32_t ids[CONTEXT], made; /* of the last request */
    atomic_uint heard;          /* pieces of text */
    uint32_t turn;              /* of all requests: this one spoke as so many-th */
    char error[128];
} client;

static atomic_uint turns;

static int count_piece(void *user, int32_t token, const char *text, size_t size)
{
    client *c = user;
    (void)token;
    CHECK(strlen(text) == size);
    if (atomic_fetch_add(&c->heard, 1) == 0) {
        c->turn = atomic_fetch_add(&turns, 1);
    }
    return 0;
}

static void ask(client *c)
{
    gemrun_request q = request_of(c->tokens);
    q.on_text = count_piece;
    q.user = c;
    c->made = gemrun_handle_generate(c->h, "hello", &q, c->ids);
    snprintf(c->error, sizeof c->error, "%s", c->made < 0 ? gemrun_last_error() : "");
}

static void *ask_once(void *arg)
{
    ask(arg);
    return NULL;
}

static void begin(client *c, gemrun_handle_t *h, uint32_t tokens)
{
    *c = (client){.h = h, .tokens = tokens};
    CHECK(pthread_create(&c->thread, NULL, ask_once, c) == 0);
}

static void end(client *c)
{
    CHECK(pthread_join(c->thread, NULL) == 0);
}

/* The version that gave these ids, whole or cut short. */
static uint32_t version_of(const int32_t *ids, int32_t count)
{
    for (uint32_t i = 0; i < VERSIONS; i++) {
        if (count > 0 && memcmp(ids, answers[i], (size_t)count * sizeof *ids) == 0) {
            return i;
        }
    }
    return VERSIONS;
}

static bool answers_as(gemrun_handle_t *h, uint32_t version)
{
    client c = {.h = h, .tokens = TOKENS};
    ask(&c);
    return c.made == TOKENS && version_of(c.ids, c.made) == version;
}

/* ---- one thread ---- */

static void test_arguments(void)
{
    gemrun_handle_t *h = NULL;
    gemrun_config c = config_of(1);
    gemrun_handle_stats s = {.size = sizeof s - 8};
    CHECK(gemrun_handle_open(NULL, paths[0], NULL) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_handle_open(&h, NULL, NULL) == GEMRUN_E_ARGUMENT && said("null pointer"));
    c.size -= 8;
    CHECK(gemrun_handle_open(&h, paths[0], &c) == GEMRUN_E_ARGUMENT && !h && said("config: its"));
    c = config_of(9);
    CHECK(gemrun_handle_open(&h, paths[0], &c) == GEMRUN_E_THREADS && !h);
    CHECK(gemrun_handle_open(&h, "/nowhere", NULL) == GEMRUN_E_OPEN && !h && said("/nowhere: "));
    CHECK(gemrun_handle_open(&h, cut, NULL) == GEMRUN_E_SIZE && !h && mappings(cut) == 0);
    h = open_handle(paths[0]);
    gemrun_request q = request_of(1);
    q.size -= 8;
    CHECK(gemrun_handle_generate(h, "x", &q, NULL) == GEMRUN_E_ARGUMENT && said("request: its"));
    CHECK(gemrun_handle_generate(NULL, "x", NULL, NULL) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_handle_generate(h, NULL, NULL, NULL) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_handle_generate(h, "", NULL, NULL) == GEMRUN_E_PROMPT);
    CHECK(gemrun_handle_chat(h, NULL, 1, NULL, NULL) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_handle_run(h, NULL, NULL, NULL) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_handle_get_stats(h, &s) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_handle_get_stats(h, NULL) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_handle_pace(h, 1001, 0, 1000, 0) == GEMRUN_E_ARGUMENT && said("0 to 1000"));
    CHECK(gemrun_handle_pace(h, 1000, 9, 1000, 0) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_handle_pace(h, 1000, 0, 1000, 9) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_handle_pace(NULL, 1000, 0, 1000, 0) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_handle_disable(NULL) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_handle_enable(NULL, NULL) == GEMRUN_E_ARGUMENT);
    CHECK(stats_of(h).requests == 2 && stats_of(h).failed == 2); /* those that reached a model */
    gemrun_handle_cancel(NULL);
    gemrun_handle_cancel(h); /* none is inside: the next one is not meant */
    CHECK(answers_as(h, 0));
    gemrun_handle_close(h);
    gemrun_handle_close(NULL);
}

/* A handle gives what the engine gives. */
static void test_equal_answers(void)
{
    char name[8] = "scalar";
    gemrun_handle_t *h = NULL;
    gemrun_config c = config_of(2);
    c.kernel = name;
    CHECK(gemrun_handle_open(&h, paths[0], &c) == GEMRUN_OK);
    memset(name, 'x', sizeof name - 1); /* the text is the caller's */
    CHECK(stats_of(h).last.size == 0);
    CHECK(answers_as(h, 0) && stats_of(h).last.generated_tokens == TOKENS);
    gemrun_replace_times t = {.size = sizeof t};
    CHECK(gemrun_replace(h, paths[1], NULL, &t) == GEMRUN_OK && t.tests == 1);
    CHECK(answers_as(h, 1) && mappings(paths[0]) == 0 && mappings(paths[1]) == 1);
    gemrun_message m[] = {{GEMRUN_SYSTEM, "sys"}, {GEMRUN_USER, "hi"}};
    int32_t found[CONTEXT], wanted[CONTEXT];
    gemrun_request q = request_of(5);
    gemrun_context_t *ctx = NULL;
    CHECK(gemrun_open(&ctx, paths[1], &(gemrun_config){.size = sizeof c, .ignore_memory = 1}) ==
          GEMRUN_OK);
    CHECK(gemrun_chat(ctx, m, 2, &q, wanted) == 5 && gemrun_handle_chat(h, m, 2, &q, found) == 5);
    CHECK(memcmp(found, wanted, 5 * sizeof *found) == 0);
    CHECK(gemrun_handle_request(NULL).temperature != 0.5f);
    q = gemrun_handle_request(h);
    CHECK(q.temperature == 0.5f && q.size == sizeof q && q.max_tokens == 256);
    int32_t n = gemrun_generate(ctx, "hello", &q, wanted);
    CHECK(gemrun_handle_generate(h, "hello", NULL, found) == n); /* the artifact's defaults */
    CHECK(memcmp(found, wanted, (size_t)n * sizeof *found) == 0);
    gemrun_destroy(ctx);
    gemrun_handle_close(h);
    CHECK(mappings(paths[1]) == 0);
}

static int lower_threads(void *user, uint32_t *threads)
{
    const uint32_t *wanted = user;
    *threads = *wanted > 0 ? *wanted : *threads;
    return *wanted == 99;
}

static int32_t run_steps(gemrun_context_t *ctx, const gemrun_request *paced, void *arg)
{
    uint32_t *own = paced->user ? arg : NULL, threads = 77;
    CHECK(ctx != NULL && own != NULL && paced->on_text && paced->on_step);
    *own = 0; /* neither has a say */
    CHECK(paced->on_step(paced->user, &threads) == 0 && threads == 0);
    *own = 3;
    CHECK(paced->on_step(paced->user, &threads) == 0 && threads == 3);
    *own = 0; /* what it said before stays, as without a handle */
    CHECK(paced->on_step(paced->user, &threads) == 0 && threads == 3);
    *own = 99; /* it ends the run */
    CHECK(paced->on_step(paced->user, &threads) == 1);
    return 5;
}

static int32_t run_limited(gemrun_context_t *ctx, const gemrun_request *paced, void *arg)
{
    uint32_t *own = arg, threads = 77;
    CHECK(ctx != NULL);
    *own = 1; /* the handle allows 2 in a prompt, 4 in tokens */
    CHECK(paced->on_step(paced->user, &threads) == 0 && threads == 1);
    *own = 3;
    CHECK(paced->on_step(paced->user, &threads) == 0 && threads == 2);
    CHECK(paced->on_text(paced->user, 0, "", 0) == 0);
    CHECK(paced->on_step(paced->user, &threads) == 0 && threads == 3);
    *own = 5;
    CHECK(paced->on_step(paced->user, &threads) == 0 && threads == 4);
    return -7;
}

static void test_own_steps(void)
{
    uint32_t own = 0;
    gemrun_handle_t *h = open_handle(paths[0]);
    gemrun_request q = request_of(1);
    q.on_step = lower_threads;
    q.user = &own;
    CHECK(gemrun_handle_run(h, &q, run_steps, &own) == 5);
    CHECK(gemrun_handle_pace(h, 1000, 4, 1000, 2) == GEMRUN_OK);
    CHECK(gemrun_handle_run(h, &q, run_limited, &own) == -7);
    CHECK(stats_of(h).requests == 2 && stats_of(h).failed == 1 && stats_of(h).steps == 7);
    CHECK(stats_of(h).threads == 4 && stats_of(h).duty == 1000);
    gemrun_handle_close(h);
}

static void test_candidates(void)
{
    gemrun_handle_t *h = open_handle(paths[0]);
    static char long_prompt[CONTEXT + 2];
    memset(long_prompt, 'x', CONTEXT + 1);
    gemrun_replacement o = {.size = sizeof o};
    gemrun_replace_times t = {.size = sizeof t};
    CHECK(gemrun_replace(NULL, paths[1], NULL, NULL) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_replace(h, NULL, NULL, NULL) == GEMRUN_E_ARGUMENT);
    o.size -= 8;
    CHECK(gemrun_replace(h, paths[1], &o, NULL) == GEMRUN_E_ARGUMENT);
    t.size -= 8;
    CHECK(gemrun_replace(h, paths[1], NULL, &t) == GEMRUN_E_ARGUMENT);
    o = (gemrun_replacement){.size = sizeof o, .warmup_prompt = long_prompt};
    t.size = sizeof t;
    CHECK(gemrun_replace(h, "/nowhere", NULL, &t) == GEMRUN_E_OPEN && said("/nowhere: "));
    CHECK(gemrun_replace(h, cut, NULL, &t) == GEMRUN_E_SIZE && t.size == sizeof t);
    CHECK(gemrun_replace(h, bad_vector, NULL, &t) == GEMRUN_E_TEST_FAILED && t.tests == 0);
    CHECK(gemrun_replace(h, paths[1], &o, &t) == GEMRUN_E_PROMPT && t.tests == 1);
    CHECK(gemrun_replace(h, short_context, NULL, &t) == GEMRUN_E_CONTEXT && said("compile it"));
    CHECK(stats_of(h).replaced == 0 && answers_as(h, 0) && mappings(paths[0]) == 1);
    CHECK(mappings(paths[1]) + mappings(bad_vector) + mappings(cut) + mappings(short_context) ==
          0);
    o = (gemrun_replacement){.size = sizeof o, .allow_layout_change = 1, .warmup_prompt = "x"};
    CHECK(gemrun_replace(h, short_context, &o, &t) == GEMRUN_OK && t.tests == 1);
    CHECK(stats_of(h).replaced == 1 && mappings(short_context) == 1 && mappings(paths[0]) == 0);
    CHECK(gemrun_replace(h, paths[0], NULL, NULL) == GEMRUN_E_CONTEXT); /* the other way, too */
    o.skip_tests = o.check_weights = 1;
    CHECK(gemrun_replace(h, bad_vector, &o, &t) == GEMRUN_OK && t.tests == 0);
    CHECK(t.open_ms >= 0 && t.test_ms >= 0 && t.warmup_ms >= 0 && t.flip_ms >= 0);
    CHECK(answers_as(h, 0) && stats_of(h).last.kv_used > 0);
    gemrun_handle_close(h);
}

/* What is the model's fault is told apart from what is its caller's. */
static void test_faults(void)
{
    image m = make_sound(4);
    char sick[64];
    const gb_conf *c = image_data(&m, GB_SEC_CONF);
    const gb_tensor *t = image_data(&m, GB_SEC_TENS);
    const uint32_t nan = 0x7fc00000u;
    static char long_prompt[CONTEXT + 2];
    memset(long_prompt, 'x', CONTEXT + 1);
    memcpy(m.bytes + t[c->tens_final_norm].offset, &nan, sizeof nan);
    write_file(sick, "sick", &m, m.size);
    free(m.bytes);
    gemrun_handle_t *h = open_handle(paths[0]);
    gemrun_replacement o = {.size = sizeof o, .skip_tests = 1};
    CHECK(gemrun_handle_generate(h, long_prompt, NULL, NULL) == GEMRUN_E_PROMPT);
    CHECK(answers_as(h, 0) && h->faults == 0 && stats_of(h).failed == 1 && h->tokens == TOKENS);
    CHECK(gemrun_replace(h, sick, &o, NULL) == GEMRUN_OK);
    CHECK(gemrun_handle_generate(h, "hello", NULL, NULL) == GEMRUN_E_NONFINITE && h->faults == 1);
    CHECK(gemrun_rollback(h, NULL, NULL) == GEMRUN_OK && answers_as(h, 0) && h->faults == 1);
    CHECK(h->tokens == 2 * TOKENS);
    gemrun_handle_close(h);
    unlink(sick);
}

/* One step back, to the file of the model before, whatever happened to its name since. */
static void test_rollback(void)
{
    gemrun_handle_t *h = open_handle(paths[0]);
    gemrun_replacement o = {.size = sizeof o, .allow_layout_change = 1};
    gemrun_replace_times t = {.size = sizeof t - 8};
    CHECK(gemrun_rollback(NULL, NULL, NULL) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_rollback(h, NULL, &t) == GEMRUN_E_ARGUMENT);
    t.size = sizeof t;
    CHECK(gemrun_rollback(h, NULL, &t) == GEMRUN_E_STATE && said("no model before"));
    CHECK(gemrun_replace(h, cut, NULL, NULL) == GEMRUN_E_SIZE);
    CHECK(gemrun_rollback(h, NULL, NULL) == GEMRUN_E_STATE); /* what failed was never in use */
    CHECK(gemrun_replace(h, paths[1], NULL, NULL) == GEMRUN_OK && answers_as(h, 1));
    CHECK(gemrun_rollback(h, "x", &t) == GEMRUN_OK && t.tests == 0 && t.open_ms >= 0);
    CHECK(answers_as(h, 0) && mappings(paths[0]) == 1 && mappings(paths[1]) == 0);
    CHECK(gemrun_rollback(h, NULL, NULL) == GEMRUN_E_STATE && stats_of(h).replaced == 2);
    CHECK(gemrun_replace(h, short_context, &o, NULL) == GEMRUN_OK);
    CHECK(gemrun_handle_disable(h) == GEMRUN_OK);
    CHECK(gemrun_rollback(h, NULL, NULL) == GEMRUN_OK && answers_as(h, 0)); /* enabled by it */
    CHECK(gemrun_replace(h, paths[1], NULL, NULL) == GEMRUN_OK);
    CHECK(rename(paths[0], socket_path) == 0);
    CHECK(gemrun_rollback(h, NULL, NULL) == GEMRUN_E_OPEN && answers_as(h, 1));
    CHECK(rename(socket_path, paths[0]) == 0);
    CHECK(gemrun_rollback(h, NULL, NULL) == GEMRUN_OK && answers_as(h, 0)); /* it can be again */
    CHECK(h->faults == 0);
    gemrun_handle_close(h);
}

static void test_disable(void)
{
    gemrun_handle_t *h = open_handle(paths[0]);
    gemrun_replacement o = {.size = sizeof o};
    CHECK(gemrun_handle_enable(h, "x") == GEMRUN_OK && mappings(paths[0]) == 1);
    CHECK(gemrun_handle_disable(h) == GEMRUN_OK && mappings(paths[0]) == 0);
    CHECK(gemrun_handle_disable(h) == GEMRUN_OK && !stats_of(h).enabled);
    CHECK(gemrun_handle_generate(h, "hello", NULL, NULL) == GEMRUN_E_STATE && said("enable it"));
    static char long_prompt[CONTEXT + 2];
    memset(long_prompt, 'x', CONTEXT + 1);
    CHECK(gemrun_handle_enable(h, long_prompt) == GEMRUN_E_PROMPT && mappings(paths[0]) == 0);
    CHECK(gemrun_handle_enable(h, "x") == GEMRUN_OK && stats_of(h).enabled && answers_as(h, 0));
    CHECK(gemrun_handle_disable(h) == GEMRUN_OK);
    CHECK(gemrun_replace(h, cut, &o, NULL) == GEMRUN_E_SIZE && !stats_of(h).enabled);
    CHECK(gemrun_replace(h, short_context, &o, NULL) == GEMRUN_E_CONTEXT); /* still compared */
    CHECK(gemrun_replace(h, paths[1], &o, NULL) == GEMRUN_OK && answers_as(h, 1));
    CHECK(gemrun_handle_disable(h) == GEMRUN_OK && gemrun_handle_enable(h, NULL) == GEMRUN_OK);
    CHECK(answers_as(h, 1) && mappings(paths[0]) == 0); /* from the newest path */
    CHECK(rename(paths[1], cut) == 0 && gemrun_handle_disable(h) == GEMRUN_OK);
    CHECK(gemrun_handle_enable(h, NULL) == GEMRUN_E_OPEN && !stats_of(h).enabled);
    CHECK(rename(cut, paths[1]) == 0 && gemrun_handle_enable(h, NULL) == GEMRUN_OK);
    CHECK(gemrun_handle_disable(h) == GEMRUN_OK);
    gemrun_handle_close(h); /* while it is disabled */
}

/* ---- pace ---- */

/* A duty of 0 holds the prompt, or the tokens, until it is raised. */
static void test_pause(void)
{
    client c;
    gemrun_handle_t *h = open_handle(paths[0]);
    CHECK(gemrun_handle_pace(h, 0, 0, 0, 0) == GEMRUN_OK);
    begin(&c, h, TOKENS);
    wait_asleep(h);
    uint64_t steps = stats_of(h).steps;
    for (int i = 0; i < 10; i++) {
        yield_a_little();
        gemrun_handle_pace(h, 0, 0, 0, 0); /* wakes it, for nothing */
    }
    CHECK(steps == 1 && stats_of(h).steps == 1 && atomic_load(&c.heard) == 0);
    CHECK(gemrun_handle_pace(h, 0, 0, 1000, 0) == GEMRUN_OK); /* the prompt may go */
    while (atomic_load(&c.heard) == 0 || !asleep(h)) {
        yield_a_little();
    }
    steps = stats_of(h).steps;
    yield_a_little();
    CHECK(stats_of(h).steps == steps && atomic_load(&c.heard) == 1);
    CHECK(gemrun_handle_pace(h, 1000, 0, 0, 0) == GEMRUN_OK); /* prompts are of no concern now */
    end(&c);
    CHECK(c.made == TOKENS && version_of(c.ids, c.made) == 0);
    gemrun_handle_close(h);
}

/* Neither a pause nor a slow pace holds a request beyond its deadline. */
static void test_deadline_ends_a_sleep(void)
{
    int32_t ids[CONTEXT];
    gemrun_handle_t *h = open_handle(paths[0]);
    gemrun_request q = request_of(TOKENS);
    q.deadline_ns = 50 * 1000000u;
    for (uint32_t duty = 0; duty < 2; duty++) { /* 1: a step of 1 ms sleeps 1 s */
        gemrun_handle_pace(h, duty, 0, duty, 0);
        uint64_t begun = gs_now();
        int32_t made = gemrun_handle_generate(h, "hello", &q, ids);
        CHECK(made >= 0 && made < (int32_t)TOKENS && gs_now() - begun >= q.deadline_ns);
        CHECK(duty > 0 || made == 0);
        CHECK(stats_of(h).last.finish == GEMRUN_FINISH_DEADLINE);
    }
    gemrun_handle_close(h);
}

static void test_cancel(void)
{
    client c;
    gemrun_handle_t *h = open_handle(paths[0]);
    gemrun_handle_pace(h, 0, 0, 0, 0);
    begin(&c, h, TOKENS);
    wait_asleep(h);
    gemrun_handle_cancel(h);
    end(&c);
    CHECK(c.made == 0 && stats_of(h).last.finish == GEMRUN_FINISH_CANCELLED);
    gemrun_handle_pace(h, 0, 0, 1000, 0);
    begin(&c, h, TOKENS);
    while (atomic_load(&c.heard) == 0 || !asleep(h)) {
        yield_a_little();
    }
    CHECK(gemrun_replace(h, paths[1], NULL, NULL) == GEMRUN_OK);
    gemrun_handle_cancel(h); /* the one inside, although its model is not the handle's any more */
    end(&c);
    CHECK(c.made == 1 && stats_of(h).last.finish == GEMRUN_FINISH_CANCELLED);
    begin(&c, h, TOKENS);
    while (atomic_load(&c.heard) == 0 || !asleep(h)) {
        yield_a_little();
    }
    CHECK(gemrun_handle_disable(h) == GEMRUN_OK && mappings(paths[1]) == 1);
    gemrun_handle_cancel(h);
    end(&c);
    CHECK(c.made == 1 && mappings(paths[1]) == 0);
    gemrun_handle_close(h);
}

static uint64_t nanoseconds(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* A step of half a millisecond: those of a tiny model are shorter than going to sleep takes. */
static int spin(void *user, int32_t token, const char *text, size_t size)
{
    (void)user, (void)token, (void)text, (void)size;
    uint64_t begun = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
    while (nanoseconds(CLOCK_THREAD_CPUTIME_ID) - begun < 500000) {
    }
    return 0;
}

/* Steps get at most their share of the time, over requests of many sizes; a fifth of a second of
 * rest may be saved up. A machine that is busy otherwise only makes the share smaller. */
static void test_duty(void)
{
    CHECK(gs_rest_of(500, 80, 80) == 80 && gs_rest_of(250, 80, 80) == 240);
    CHECK(gs_rest_of(500, 80, 40) == 0);   /* the processor was another's for half of it */
    CHECK(gs_rest_of(500, 80, 10) == -60); /* and more than was owed */
    CHECK(gs_rest_of(1000, 80, 10) == 0);  /* where none is owed none is saved up */
    gemrun_handle_t *h = NULL;
    gemrun_config c = config_of(1);
    CHECK(gemrun_handle_open(&h, paths[0], &c) == GEMRUN_OK);
    CHECK(gemrun_handle_pace(h, 200, 0, 200, 0) == GEMRUN_OK);
    uint64_t begun = nanoseconds(CLOCK_MONOTONIC), busy = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
    for (uint32_t i = 0; nanoseconds(CLOCK_THREAD_CPUTIME_ID) - busy < 150000000u; i++) {
        gemrun_request q = request_of(1 + i % 40);
        q.on_text = spin;
        CHECK(gemrun_handle_generate(h, "hello", &q, NULL) == (int32_t)q.max_tokens);
    }
    double used = (double)(nanoseconds(CLOCK_THREAD_CPUTIME_ID) - busy);
    double passed = (double)(nanoseconds(CLOCK_MONOTONIC) - begun);
    CHECK(used <= 0.2 * (passed + 2e8));
    gemrun_handle_close(h);
}

/* ---- several threads ---- */

/* Requests come in the order of their calls, and those that wait for a replaced model's last one
 * begin on the new one. */
static void test_turns(void)
{
    client c[CLIENTS];
    gemrun_handle_t *h = open_handle(paths[0]);
    uint32_t first = atomic_load(&turns);
    gemrun_handle_pace(h, 0, 0, 0, 0);
    for (uint32_t i = 0; i < CLIENTS; i++) {
        begin(&c[i], h, TOKENS);
        wait_active(h, 1, i);
    }
    CHECK(gemrun_replace(h, paths[1], NULL, NULL) == GEMRUN_OK);
    CHECK(mappings(paths[0]) == 1 && mappings(paths[1]) == 1);
    CHECK(stats_of(h).active == 1 && stats_of(h).waiting == CLIENTS - 1);
    gemrun_handle_pace(h, 1000, 0, 1000, 0);
    for (uint32_t i = 0; i < CLIENTS; i++) {
        end(&c[i]);
        CHECK(c[i].made == TOKENS && version_of(c[i].ids, TOKENS) == (i > 0));
        CHECK(c[i].turn == first + i);
    }
    CHECK(mappings(paths[0]) == 0 && mappings(paths[1]) == 1 && stats_of(h).failed == 0);
    gemrun_handle_pace(h, 0, 0, 0, 0);
    for (uint32_t i = 0; i < CLIENTS; i++) {
        begin(&c[i], h, TOKENS);
        wait_active(h, 1, i);
    }
    CHECK(gemrun_handle_disable(h) == GEMRUN_OK); /* who waits is refused, who is inside ends */
    for (uint32_t i = 1; i < CLIENTS; i++) {
        end(&c[i]);
        CHECK(c[i].made == GEMRUN_E_STATE && strstr(c[i].error, "disabled"));
    }
    CHECK(stats_of(h).active == 1 && mappings(paths[1]) == 1);
    gemrun_handle_pace(h, 1000, 0, 1000, 0);
    end(&c[0]);
    CHECK(c[0].made == TOKENS && version_of(c[0].ids, TOKENS) == 1 && mappings(paths[1]) == 0);
    gemrun_handle_close(h);
}

/* Requests that have ended, are inside or wait. */
static void wait_begun(gemrun_handle_t *h, uint64_t count)
{
    for (gemrun_handle_stats s = stats_of(h); s.requests + s.active + s.waiting < count;
         s = stats_of(h)) {
        yield_a_little();
    }
}

static void test_close(void)
{
    client c[CLIENTS];
    for (uint32_t round = 0; round < 20; round++) {
        gemrun_handle_t *h = open_handle(paths[0]);
        gemrun_handle_pace(h, round % 2 ? 0 : 100, 0, round % 2 ? 0 : 100, 0);
        for (uint32_t i = 0; i < CLIENTS; i++) {
            begin(&c[i], h, CONTEXT - 8);
            wait_begun(h, i + 1); /* a call behind the close would be this test's mistake */
        }
        gemrun_handle_close(h);
        CHECK(mappings(paths[0]) == 0);
        for (uint32_t i = 0; i < CLIENTS; i++) {
            end(&c[i]);
            CHECK(c[i].made >= 0 || (c[i].made == GEMRUN_E_STATE && strstr(c[i].error, "closes")));
            CHECK(round % 2 == 0 || i == 0 || c[i].made == GEMRUN_E_STATE);
        }
    }
}

static void *ask_often(void *arg)
{
    client *c = arg;
    for (uint32_t i = 0; i < c->rounds; i++) {
        ask(c);
        CHECK(c->made == TOKENS && version_of(c->ids, TOKENS) < VERSIONS);
    }
    return NULL;
}

static void test_replace_under_load(void)
{
    enum { ROUNDS = 40, REPLACEMENTS = 30 };
    client c[CLIENTS];
    gemrun_handle_t *h = open_handle(paths[0]);
    for (uint32_t i = 0; i < CLIENTS; i++) {
        c[i] = (client){.h = h, .tokens = TOKENS, .rounds = ROUNDS};
        CHECK(pthread_create(&c[i].thread, NULL, ask_often, &c[i]) == 0);
    }
    for (uint32_t i = 1; i <= REPLACEMENTS; i++) {
        CHECK(gemrun_replace(h, i % 5 ? paths[i % 2] : bad_vector, NULL, NULL) ==
              (i % 5 ? GEMRUN_OK : GEMRUN_E_TEST_FAILED));
    }
    for (uint32_t i = 0; i < CLIENTS; i++) {
        end(&c[i]);
    }
    gemrun_handle_stats s = stats_of(h);
    CHECK(s.requests == CLIENTS * ROUNDS && s.failed == 0 && s.active + s.waiting == 0);
    CHECK(s.replaced == REPLACEMENTS - REPLACEMENTS / 5);
    CHECK(mappings(paths[0]) + mappings(paths[1]) == 1 && mappings(bad_vector) == 0);
    gemrun_handle_close(h);
    CHECK(mappings(folder) == 0);
}

/* Everything at once: what is whole is right, what is cut short is the beginning of an answer. */
typedef struct storm {
    gemrun_handle_t *h;
    atomic_uint answered, left;
} storm;

static void *storm_of_requests(void *arg)
{
    storm *s = arg;
    client c = {.h = s->h, .tokens = TOKENS};
    while (atomic_load(&s->left) > 0) {
        ask(&c);
        CHECK(c.made >= 0 || c.made == GEMRUN_E_STATE);
        CHECK(c.made <= 0 || version_of(c.ids, c.made) < VERSIONS);
        atomic_fetch_add(&s->answered, c.made == TOKENS);
    }
    return NULL;
}

static void *storm_of_changes(void *arg)
{
    storm *s = arg;
    for (uint32_t i = 0; atomic_load(&s->left) > 0; i++) {
        gemrun_status st = i % 5 == 0   ? gemrun_handle_disable(s->h)
                           : i % 5 == 1 ? gemrun_handle_enable(s->h, "x")
                                        : gemrun_replace(s->h, paths[i % 2], NULL, NULL);
        CHECK(st == GEMRUN_OK);
    }
    return NULL;
}

static void *storm_of_attaching(void *arg)
{
    storm *s = arg;
    while (atomic_load(&s->left) > 0) {
        gemrun_status st = gemrun_attach(s->h, socket_path, "storm"); /* nobody is there */
        CHECK(st == GEMRUN_OK || st == GEMRUN_E_STATE);
        gemrun_detach(s->h);
    }
    return NULL;
}

static void test_storm(void)
{
    void *(*const bodies[])(void *) = {storm_of_requests, storm_of_requests, storm_of_changes,
                                       storm_of_changes, storm_of_attaching, storm_of_attaching};
    enum { THREADS = sizeof bodies / sizeof bodies[0] };
    pthread_t threads[THREADS];
    storm s = {.h = open_handle(paths[0])};
    atomic_store(&s.left, 1);
    for (uint32_t i = 0; i < THREADS; i++) {
        CHECK(pthread_create(threads + i, NULL, bodies[i], &s) == 0);
    }
    for (uint32_t i = 0; i < 200; i++) {
        gemrun_handle_pace(s.h, i % 3 ? 1000 : 0, i % 4, 500 + i % 2, i % 3);
        if (i % 8 == 0) {
            gemrun_handle_cancel(s.h);
        }
        CHECK(stats_of(s.h).active <= 1);
        yield_a_little();
    }
    gemrun_handle_pace(s.h, 1000, 0, 1000, 0);
    while (atomic_load(&s.answered) < 2) {
        yield_a_little();
    }
    atomic_store(&s.left, 0);
    for (uint32_t i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    gemrun_handle_close(s.h);
    CHECK(mappings(folder) == 0);
}

/* ---- the daemon's side of a channel ---- */

typedef struct peer {
    int fd;
    gs_json json;
    char bytes[GS_FRAME + 1];
} peer;

static void get(int fd, void *to, size_t size)
{
    for (char *at = to; size > 0;) {
        ssize_t n = read(fd, at, size);
        CHECK(n > 0);
        at += n;
        size -= (size_t)n;
    }
}

static void tell(const peer *p, const char *frame)
{
    uint32_t size = (uint32_t)strlen(frame);
    uint8_t head[] = {(uint8_t)size, (uint8_t)(size >> 8), (uint8_t)(size >> 16), 0};
    CHECK(send(p->fd, head, 4, MSG_NOSIGNAL) == 4);
    CHECK(send(p->fd, frame, size, MSG_NOSIGNAL) == (ssize_t)size);
}

/* The next event; its name. */
static const char *hear(peer *p)
{
    uint8_t head[4];
    get(p->fd, head, sizeof head);
    size_t size = (size_t)head[0] | (size_t)head[1] << 8 | (size_t)head[2] << 16;
    CHECK(size > 0 && size <= GS_FRAME);
    get(p->fd, p->bytes, size);
    CHECK(gs_parse(&p->json, p->bytes, size));
    const gs_value *v = gs_get(&p->json, p->json.values, "event");
    CHECK(v && v->kind == GS_STRING);
    return v->text;
}

static const gs_value *field(const peer *p, const char *key)
{
    static const gs_value none;
    const gs_value *v = gs_get(&p->json, p->json.values, key);
    return v ? v : &none;
}

static bool hears(peer *p, const char *event, uint64_t id)
{
    const char *found = hear(p);
    bool good = strcmp(found, event) == 0 && field(p, "id")->whole == id;
    if (!good) {
        fprintf(stderr, "heard %s %llu, not %s\n", found,
                (unsigned long long)field(p, "id")->whole, event);
    }
    return good;
}

static bool hears_error(peer *p, uint64_t id, int code)
{
    return hears(p, "error", id) && field(p, "code")->number == (double)code;
}

static int listen_at(void)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    unlink(socket_path);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    memcpy(at.sun_path, socket_path, sizeof socket_path);
    CHECK(fd >= 0 && bind(fd, (const struct sockaddr *)&at, sizeof at) == 0);
    CHECK(listen(fd, 4) == 0);
    return fd;
}

/* Accept a program and read its first line. */
static void meet(peer *p, int door)
{
    static const char wanted[] = "{\"v\":1,\"id\":\"1\",\"method\":\"attach\",\"params\":"
                                 "{\"name\":\"agv-7\"}}\n";
    char line[sizeof wanted];
    p->fd = accept(door, NULL, NULL);
    CHECK(p->fd >= 0);
    get(p->fd, line, sizeof wanted - 1);
    CHECK(memcmp(line, wanted, sizeof wanted - 1) == 0);
}

static void welcome(peer *p, int door)
{
    static const char reply[] = "{\"v\":1,\"id\":\"1\",\"result\":{}}\n";
    meet(p, door);
    CHECK(write(p->fd, reply, sizeof reply - 1) == (ssize_t)sizeof reply - 1);
    CHECK(!strcmp(hear(p), "ready"));
    CHECK(!strcmp(field(p, "name")->text, "tiny") && field(p, "pid")->whole == (uint64_t)getpid());
    CHECK(field(p, "context")->whole == CONTEXT && field(p, "ram_total")->whole > 0);
}

static void test_attach_arguments(void)
{
    static char long_path[200];
    static const char *const names[] = {"", ".a", "-a", "_a", "A", "a b", "a/b", "\xc3\xa9"};
    gemrun_handle_t *h = open_handle(paths[0]);
    memset(long_path, 'x', 108);
    CHECK(gemrun_attach(NULL, socket_path, "a") == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_attach(h, NULL, "a") == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_attach(h, "", "a") == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_attach(h, long_path, "a") == GEMRUN_E_ARGUMENT && said("107 bytes"));
    CHECK(gemrun_attach(h, socket_path, NULL) == GEMRUN_E_ARGUMENT);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        CHECK(gemrun_attach(h, socket_path, names[i]) == GEMRUN_E_ARGUMENT && said("64 of a-z"));
    }
    long_path[65] = 0;
    CHECK(gemrun_attach(h, socket_path, long_path) == GEMRUN_E_ARGUMENT);
    long_path[64] = 0;
    CHECK(gemrun_attach(h, socket_path, long_path) == GEMRUN_OK);
    CHECK(gemrun_attach(h, socket_path, "b") == GEMRUN_E_STATE && said("detach first"));
    CHECK(!stats_of(h).attached && answers_as(h, 0)); /* nobody is there: no matter */
    gemrun_detach(h);
    gemrun_detach(h);
    gemrun_detach(NULL);
    CHECK(gemrun_attach(h, socket_path, "c") == GEMRUN_OK);
    gemrun_handle_close(h); /* detaches */
}

static void test_questions(gemrun_handle_t *h, peer *p)
{
    CHECK(stats_of(h).attached);
    tell(p, "{\"op\":\"ping\",\"n\":18446744073709551615}");
    CHECK(hears(p, "pong", 0) && field(p, "n")->whole == UINT64_MAX);
    CHECK(field(p, "busy")->kind == GS_FALSE && field(p, "asleep")->kind == GS_FALSE);
    tell(p, "{\"op\":\"stats\",\"id\":1}");
    CHECK(hears(p, "stats", 1) && field(p, "enabled")->kind == GS_TRUE);
    CHECK(field(p, "ram_total")->whole > 0 && !field(p, "finish")->text);
    CHECK(answers_as(h, 0));
    tell(p, "{\"op\":\"stats\",\"id\":2}");
    CHECK(hears(p, "stats", 2) && field(p, "requests")->whole == 1);
    CHECK(!strcmp(field(p, "finish")->text, "max_tokens"));
    CHECK(field(p, "generated_tokens")->whole == TOKENS);
    tell(p, "{\"op\":\"fly\",\"id\":3}");
    CHECK(hears_error(p, 3, GEMRUN_E_ARGUMENT));
    tell(p, "{\"id\":4}");
    CHECK(hears_error(p, 4, GEMRUN_E_ARGUMENT));
    static const char *const foreign[] = {"generate", "test", "reset"}; /* are for workers */
    for (size_t i = 0; i < 3; i++) {
        char frame[80];
        snprintf(frame, sizeof frame, "{\"op\":\"%s\",\"id\":5,\"prompt\":\"x\"}", foreign[i]);
        tell(p, frame);
        CHECK(hears_error(p, 5, GEMRUN_E_STATE));
    }
    tell(p, "{\"op\":\"pace\",\"id\":6,\"duty\":2}");
    CHECK(hears_error(p, 6, GEMRUN_E_ARGUMENT));
    tell(p, "{\"op\":\"pace\",\"id\":7,\"duty\":0.0001,\"threads\":3}");
    CHECK(hears(p, "pace", 7) && stats_of(h).duty == 1 && stats_of(h).threads == 3);
    gemrun_handle_pace(h, 500, 1, 1000, 0); /* both hold */
    CHECK(stats_of(h).duty == 1 && stats_of(h).threads == 1);
    tell(p, "{\"op\":\"pace\",\"id\":8,\"duty\":1}");
    CHECK(hears(p, "pace", 8) && stats_of(h).duty == 500 && stats_of(h).threads == 1);
    gemrun_handle_pace(h, 1000, 0, 1000, 0);
}

static void test_orders(gemrun_handle_t *h, peer *p)
{
    char frame[200];
    client c;
    tell(p, "{\"op\":\"pace\",\"id\":1,\"duty\":0}");
    CHECK(hears(p, "pace", 1));
    begin(&c, h, TOKENS);
    wait_asleep(h);
    tell(p, "{\"op\":\"ping\",\"n\":7}");
    CHECK(hears(p, "pong", 0) && field(p, "busy")->kind == GS_TRUE);
    CHECK(field(p, "asleep")->kind == GS_TRUE);
    tell(p, "{\"op\":\"cancel\",\"id\":1}"); /* the program's requests are its own */
    snprintf(frame, sizeof frame, "{\"op\":\"replace\",\"id\":2,\"path\":\"%s\"}", paths[1]);
    tell(p, frame);
    CHECK(hears(p, "replaced", 2) && field(p, "tests")->whole == 1);
    tell(p, "{\"op\":\"pace\",\"id\":3,\"duty\":1}");
    CHECK(hears(p, "pace", 3));
    end(&c);
    CHECK(c.made == TOKENS && version_of(c.ids, TOKENS) == 0 && answers_as(h, 1));
    snprintf(frame, sizeof frame, "{\"op\":\"replace\",\"id\":4,\"path\":\"%s\"}", bad_vector);
    tell(p, frame);
    CHECK(hears_error(p, 4, GEMRUN_E_TEST_FAILED) && answers_as(h, 1));
    tell(p, "{\"op\":\"replace\",\"id\":5}");
    CHECK(hears_error(p, 5, GEMRUN_E_ARGUMENT));
    snprintf(frame, sizeof frame, "{\"op\":\"replace\",\"id\":6,\"path\":\"%s\"}", short_context);
    tell(p, frame);
    CHECK(hears_error(p, 6, GEMRUN_E_CONTEXT));
    tell(p, "{\"op\":\"disable\",\"id\":7}");
    CHECK(hears(p, "disabled", 7) && mappings(paths[1]) == 0);
    tell(p, "{\"op\":\"stats\",\"id\":8}");
    CHECK(hears(p, "stats", 8) && field(p, "enabled")->kind == GS_FALSE);
    CHECK(field(p, "ram_total")->whole == 0);
    tell(p, "{\"op\":\"enable\",\"id\":9,\"warmup_prompt\":\"x\"}");
    CHECK(hears(p, "enabled", 9) && answers_as(h, 1));
    snprintf(frame, sizeof frame, "{\"op\":\"replace\",\"id\":10,\"path\":\"%s\"}", paths[0]);
    tell(p, frame);
    CHECK(hears(p, "replaced", 10) && answers_as(h, 0));
}

/* The daemon goes in the middle of a replacement: the answer to its question is not sent to the
 * next one, whose questions have the same numbers. */
static void test_answer_to_nobody(gemrun_handle_t *h, peer *p, int door)
{
    char frame[200];
    struct pollfd knock = {.fd = door, .events = POLLIN};
    snprintf(frame, sizeof frame, "{\"op\":\"replace\",\"id\":1,\"path\":\"%s\"}", paths[1]);
    pthread_mutex_lock(&h->changing); /* the replacement cannot go on */
    tell(p, frame);
    tell(p, "{\"op\":\"ping\"}");
    CHECK(hears(p, "pong", 0));
    tell(p, "{\"op\":\"enable\",\"id\":2}");
    CHECK(hears_error(p, 2, GEMRUN_E_BUSY));
    tell(p, "{\"op\":\"pace\",\"id\":3,\"duty\":1}"); /* that is never in its way */
    CHECK(hears(p, "pace", 3));
    close(p->fd);
    bool early = poll(&knock, 1, 600) > 0; /* time enough for it to come, if it would */
    if (early) {
        welcome(p, door);
    }
    pthread_mutex_unlock(&h->changing);
    if (!early) {
        welcome(p, door);
    }
    tell(p, "{\"op\":\"stats\",\"id\":1}");
    CHECK(hears(p, "stats", 1) && field(p, "replaced")->whole == 3 && answers_as(h, 1));
}

/* The daemon goes and comes, and sends garbage. */
static void test_daemon_comes_and_goes(gemrun_handle_t *h, peer *p, int door)
{
    static const uint8_t garbage[] = {5, 0, 0, 0, '{', 'x', ':', '1', '}'};
    static const uint8_t too_long[] = {1, 0, 4, 0};
    client c;
    tell(p, "{\"op\":\"pace\",\"id\":1,\"duty\":0.001}");
    CHECK(hears(p, "pace", 1));
    begin(&c, h, TOKENS);
    close(p->fd);
    welcome(p, door); /* it came back by itself, */
    CHECK(stats_of(h).duty == 1); /* and its pace stayed for the moment */
    tell(p, "{\"op\":\"pace\",\"id\":1,\"duty\":1}");
    CHECK(hears(p, "pace", 1));
    end(&c);
    CHECK(c.made == TOKENS && version_of(c.ids, TOKENS) == 0);
    CHECK(write(p->fd, garbage, sizeof garbage) == (ssize_t)sizeof garbage);
    CHECK(read(p->fd, p->bytes, 1) == 0);
    close(p->fd);
    welcome(p, door);
    CHECK(write(p->fd, too_long, sizeof too_long) == (ssize_t)sizeof too_long);
    CHECK(read(p->fd, p->bytes, 1) == 0);
    close(p->fd);
    welcome(p, door);
    tell(p, "{\"op\":\"ping\",\"n\":1}");
    CHECK(hears(p, "pong", 0));
    test_answer_to_nobody(h, p, door);
    close(p->fd);
}

/* Refused, the program asks again; a detach ends every kind of waiting. */
static void test_detach(gemrun_handle_t *h, peer *p, int door)
{
    static const char no[] = "{\"v\":1,\"id\":\"1\",\"error\":{\"code\":\"forbidden\","
                             "\"message\":\"no \\\"result\\\"\",\"retryable\":false}}\n";
    meet(p, door);
    CHECK(write(p->fd, no, sizeof no - 1) == (ssize_t)sizeof no - 1);
    CHECK(read(p->fd, p->bytes, 1) == 0 && !stats_of(h).attached);
    close(p->fd);
    gemrun_detach(h); /* between two attempts */
    CHECK(gemrun_attach(h, socket_path, "agv-7") == GEMRUN_OK);
    meet(p, door);
    gemrun_detach(h); /* while it waits for the welcome */
    CHECK(read(p->fd, p->bytes, 1) == 0);
    close(p->fd);
    CHECK(gemrun_attach(h, socket_path, "agv-7") == GEMRUN_OK);
    welcome(p, door);
    tell(p, "{\"op\":\"pace\",\"id\":1,\"duty\":0.25}");
    CHECK(hears(p, "pace", 1) && stats_of(h).duty == 250);
    gemrun_detach(h); /* in the middle of a conversation; the pace goes with the daemon */
    CHECK(stats_of(h).duty == 1000 && !stats_of(h).attached);
    CHECK(read(p->fd, p->bytes, 1) == 0);
    close(p->fd);
    CHECK(gemrun_attach(h, socket_path, "agv-7") == GEMRUN_OK);
    welcome(p, door);
    int flags = fcntl(p->fd, F_GETFL);
    fcntl(p->fd, F_SETFL, flags | O_NONBLOCK);
    static const uint8_t ping[] = "\x0d\0\0\0{\"op\":\"ping\"}";
    for (uint32_t full = 0; full < 20;) { /* until neither side takes any more */
        ssize_t n = send(p->fd, ping, sizeof ping - 1, MSG_NOSIGNAL);
        CHECK(n == (ssize_t)sizeof ping - 1 || (n < 0 && errno == EAGAIN));
        full = n < 0 ? full + 1 : 0;
        if (n < 0) {
            yield_a_little();
        }
    }
    gemrun_detach(h); /* while it cannot send */
    close(p->fd);
    CHECK(gemrun_attach(h, socket_path, "agv-7") == GEMRUN_OK);
    welcome(p, door);
    tell(p, "{\"op\":\"disable\",\"id\":1}");
    tell(p, "{\"op\":\"enable\",\"id\":2}");
    gemrun_handle_close(h); /* with orders on their way */
    close(p->fd);
}

static void test_attached(void)
{
    static peer p;
    int door = listen_at();
    gemrun_handle_t *h = open_handle(paths[0]);
    CHECK(gemrun_attach(h, socket_path, "agv-7") == GEMRUN_OK);
    welcome(&p, door);
    test_questions(h, &p);
    test_orders(h, &p);
    test_daemon_comes_and_goes(h, &p, door);
    test_detach(h, &p, door);
    close(door);
    unlink(socket_path);
    CHECK(mappings(folder) == 0);
}

/* ---- files beside the frames ---- */

/* A frame, and descriptors with its first byte. */
static void tell_with(const peer *p, const char *frame, const int *files, size_t count)
{
    uint32_t size = (uint32_t)strlen(frame);
    uint8_t head[] = {(uint8_t)size, (uint8_t)(size >> 8), 0, 0};
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(4 * sizeof(int))];
    } beside;
    struct iovec parts[] = {{head, sizeof head}, {(void *)(uintptr_t)frame, size}};
    struct msghdr m = {.msg_iov = parts, .msg_iovlen = 2, .msg_control = beside.bytes,
                       .msg_controllen = CMSG_SPACE(count * sizeof(int))};
    memset(&beside, 0, sizeof beside);
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    *c = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS,
                          .cmsg_len = CMSG_LEN(count * sizeof(int))};
    memcpy(CMSG_DATA(c), files, count * sizeof(int));
    CHECK(sendmsg(p->fd, &m, MSG_NOSIGNAL) == (ssize_t)(sizeof head + size));
}

static uint32_t open_files(void)
{
    uint32_t count = 0;
    DIR *d = opendir("/proc/self/fd");
    CHECK(d != NULL);
    while (readdir(d)) {
        count++;
    }
    closedir(d);
    return count;
}

/* Descriptors of this process once the program has read all that was sent. */
static uint32_t open_files_now(peer *p)
{
    tell(p, "{\"op\":\"ping\"}"); /* what came with the frame before it is closed by now */
    CHECK(hears(p, "pong", 0));
    return open_files();
}

/* What the daemon is told of the version in use, and of the one before. */
static bool has_version(peer *p, const char *digest, gs_kind way_back)
{
    tell(p, "{\"op\":\"stats\",\"id\":90}");
    return hears(p, "stats", 90) && strcmp(field(p, "digest")->text, digest) == 0 &&
           field(p, "way_back")->kind == way_back;
}

/* A version that the program could not open by its path comes as a descriptor. */
static void test_files_of_frames(void)
{
    static peer p;
    char frame[200];
    int door = listen_at(), pair[2];
    gemrun_handle_t *h = open_handle(paths[0]);
    CHECK(gemrun_attach(h, socket_path, "agv-7") == GEMRUN_OK);
    welcome(&p, door);
    uint32_t before = open_files_now(&p);
    int file = open(paths[1], O_RDONLY), place = open(folder, O_RDONLY);
    CHECK(file >= 0 && place >= 0 && pipe(pair) == 0);
    tell_with(&p, "{\"op\":\"replace\",\"id\":1,\"path\":\"/nowhere\",\"digest\":\"0a1b\"}", &file,
              1);
    CHECK(hears(&p, "replaced", 1) && answers_as(h, 1));
    close(file);
    CHECK(open_files_now(&p) == before + 4); /* the handle's own, and three of this test */
    CHECK(has_version(&p, "0a1b", GS_TRUE));
    tell(&p, "{\"op\":\"disable\",\"id\":2}");
    CHECK(hears(&p, "disabled", 2) && mappings(paths[1]) == 0);
    tell(&p, "{\"op\":\"enable\",\"id\":3}");
    CHECK(hears(&p, "enabled", 3) && answers_as(h, 1)); /* it can be opened again */

    int many[] = {place, pair[0], pair[1], place};
    for (uint32_t i = 1; i <= 4; i++) { /* what nobody asked for is not kept */
        tell_with(&p, "{\"op\":\"ping\"}", many, i);
        CHECK(hears(&p, "pong", 0));
    }
    tell_with(&p, "{\"op\":\"enable\",\"id\":4}", many, 4);
    CHECK(hears(&p, "enabled", 4));
    tell_with(&p, "{\"op\":\"replace\",\"id\":5,\"path\":\"/nowhere\"}", &place, 1);
    CHECK(hears_error(&p, 5, GEMRUN_E_OPEN) && answers_as(h, 1));
    file = open(bad_vector, O_RDONLY);
    tell_with(&p, "{\"op\":\"replace\",\"id\":6,\"path\":\"/nowhere\"}", &file, 1);
    CHECK(hears_error(&p, 6, GEMRUN_E_TEST_FAILED) && answers_as(h, 1));
    close(file);
    CHECK(open_files_now(&p) == before + 4);
    snprintf(frame, sizeof frame, "{\"op\":\"replace\",\"id\":7,\"path\":\"%s\"}", paths[0]);
    tell_with(&p, frame, &pair[0], 1); /* no file: then by the path, as without one */
    CHECK(hears(&p, "replaced", 7) && answers_as(h, 0) && has_version(&p, "", GS_TRUE));
    CHECK(open_files_now(&p) == before + 4); /* that of the model before: for a rollback */
    tell(&p, "{\"op\":\"rollback\",\"id\":9}");
    CHECK(hears(&p, "replaced", 9) && answers_as(h, 1) && has_version(&p, "0a1b", GS_FALSE));
    tell(&p, "{\"op\":\"rollback\",\"id\":10}");
    CHECK(hears_error(&p, 10, GEMRUN_E_STATE) && answers_as(h, 1));
    CHECK(open_files_now(&p) == before + 4);
    for (int i = 0; i < 2; i++) { /* a file is closed once no step leads back to it */
        tell_with(&p, frame, &pair[0], 1);
        CHECK(hears(&p, "replaced", 7) && answers_as(h, 0));
        CHECK(open_files_now(&p) == before + (i ? 3 : 4));
    }
    file = open(paths[1], O_RDONLY);
    tell_with(&p, "{\"op\":\"replace\",\"id\":8}", &file, 1);
    CHECK(hears(&p, "replaced", 8) && answers_as(h, 1));
    tell_with(&p, "{\"op\":\"ping\"}", many, 4); /* and never read: the program goes */
    gemrun_handle_close(h);
    for (uint32_t i = 0; i < 2; i++) {
        close(pair[i]);
    }
    close(place);
    close(file);
    close(p.fd);
    close(door);
    unlink(socket_path);
    CHECK(mappings(folder) == 0 && open_files() == before - 5);
}

/* ---- gemrun --serve ---- */

static pid_t start_worker(peer *p, const char *path)
{
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        gemrun_config c = config_of(2);
        close(pair[0]);
        _exit(gs_serve(pair[1], path, &c) == 0 ? 0 : 6);
    }
    close(pair[1]);
    p->fd = pair[0];
    return pid;
}

static int exit_code(pid_t pid)
{
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* Tokens of an answer up to its last event, whose name is returned. */
static const char *hear_answer(peer *p, uint64_t id, uint32_t *tokens)
{
    const char *event = hear(p);
    for (*tokens = 0; strcmp(event, "token") == 0; event = hear(p), ++*tokens) {
        CHECK(field(p, "id")->whole == id && field(p, "text")->kind == GS_STRING);
        int32_t token = (int32_t)field(p, "token")->number;
        CHECK(*tokens >= TOKENS || token == answers[0][*tokens]);
    }
    CHECK(field(p, "id")->whole == id);
    return event;
}

#define HELLO "\"prompt\":\"hello\",\"temperature\":0,\"ignore_stop_ids\":true"

static void test_serve_requests(peer *p)
{
    uint32_t tokens;
    static const char *const wrong[] = {
        "{\"op\":\"generate\",\"id\":3}",
        "{\"op\":\"generate\",\"id\":3,\"prompt\":1}",
        "{\"op\":\"generate\",\"id\":3,\"prompt\":\"x\",\"messages\":[]}",
        "{\"op\":\"generate\",\"id\":3,\"messages\":[]}",
        "{\"op\":\"generate\",\"id\":3,\"messages\":[{\"role\":\"cat\",\"text\":\"x\"}]}",
        "{\"op\":\"generate\",\"id\":3,\"messages\":[{\"role\":\"user\"}]}",
        "{\"op\":\"generate\",\"id\":3,\"prompt\":\"x\",\"stop\":\"end\"}",
        "{\"op\":\"generate\",\"id\":3,\"prompt\":\"x\",\"stop\":[1]}",
        "{\"op\":\"generate\",\"id\":3,\"prompt\":\"x\",\"max_tokens\":-1}",
        "{\"op\":\"generate\",\"id\":3,\"prompt\":\"x\",\"max_tokens\":4294967296}",
        "{\"op\":\"generate\",\"id\":3,\"prompt\":\"x\",\"seed\":1.5}",
        "{\"op\":\"generate\",\"id\":3,\"prompt\":\"x\",\"temperature\":\"hot\"}",
        "{\"op\":\"generate\",\"id\":3,\"prompt\":\"x\",\"ignore_stop_ids\":1}",
        "{\"op\":\"generate\",\"id\":3,\"prompt\":\"x\",\"reuse\":1}",
        "{\"op\":\"generate\",\"id\":3,\"prompt\":\"x\",\"on_full\":2}",
        "{\"op\":\"generate\",\"id\":3,\"prompt\":\"x\",\"on_full\":\"sliding\"}"};
    tell(p, "{\"op\":\"generate\",\"id\":1,\"max_tokens\":12," HELLO "}");
    CHECK(!strcmp(hear_answer(p, 1, &tokens), "done") && tokens >= TOKENS);
    CHECK(field(p, "generated_tokens")->whole == TOKENS);
    tell(p, "{\"op\":\"generate\",\"id\":2,\"max_tokens\":4,\"messages\":[{\"role\":\"user\","
            "\"text\":\"hi\"}],\"stop\":[\"~~~~\"],\"reset\":1,\"deadline_ms\":60000}");
    CHECK(hear(p) && field(p, "id")->whole == 2);
    while (strcmp(field(p, "event")->text, "done") != 0) {
        hear(p);
    }
    CHECK(field(p, "kv_used")->whole == 0 || field(p, "kv_used")->whole > 0);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        tell(p, wrong[i]);
        CHECK(hears_error(p, 3, GEMRUN_E_ARGUMENT));
    }
    tell(p, "{\"op\":\"test\",\"id\":4}");
    CHECK(hears(p, "tested", 4) && field(p, "passed")->whole == 1);
    tell(p, "{\"op\":\"reset\",\"id\":5}");
    CHECK(hears(p, "reset", 5));
}

/* The finish of an answer to `text`, which a test has written. */
static const char *finish_of(peer *p, const char *text, uint64_t id, uint32_t *tokens)
{
    tell(p, text);
    CHECK(!strcmp(hear_answer(p, id, tokens), "done"));
    return field(p, "finish")->text;
}

/* At the end of the context: stop, mark, slide. What was kept of a prompt is told. */
static void test_serve_ends(peer *p)
{
    uint32_t plain, tokens;
#define ENDLESS(id) "{\"op\":\"generate\",\"id\":" id ",\"max_tokens\":4000," HELLO
    CHECK(!strcmp(finish_of(p, ENDLESS("11") "}", 11, &plain), "context_full"));
    CHECK(field(p, "slides")->whole == 0 && field(p, "reused")->whole == 0);
    CHECK(!strcmp(finish_of(p, ENDLESS("12") ",\"on_full\":\"stop\",\"reuse\":true}", 12, &tokens),
                  "context_full") && tokens == plain);
    CHECK(field(p, "reused")->whole == field(p, "prompt_tokens")->whole - 1);
    CHECK(!strcmp(finish_of(p, ENDLESS("13") ",\"on_full\":\"mark\"}", 13, &tokens),
                  "context_full") && tokens == plain + 1);
    CHECK(field(p, "reused")->whole == 0);
    CHECK(!strcmp(finish_of(p, ENDLESS("14") ",\"on_full\":\"slide\"}", 14, &tokens),
                  "context_full") && tokens == plain); /* two blocks are too few to slide */
#undef ENDLESS
}

/* A cancel counts however early it comes: every one of these would never end by itself. */
static void test_serve_cancel(peer *p)
{
    uint32_t tokens;
    tell(p, "{\"op\":\"pace\",\"id\":6,\"duty\":0}");
    CHECK(hears(p, "pace", 6));
    for (uint32_t i = 0; i < 100; i++) {
        tell(p, "{\"op\":\"generate\",\"id\":7,\"max_tokens\":12," HELLO "}");
        if (i % 4 == 3) {
            tell(p, "{\"op\":\"generate\",\"id\":8,\"prompt\":\"x\"}");
            CHECK(hears_error(p, 8, GEMRUN_E_BUSY));
            tell(p, "{\"op\":\"cancel\",\"id\":8}"); /* another one is not meant */
            tell(p, "{\"op\":\"ping\",\"n\":1}");
            CHECK(hears(p, "pong", 0) && field(p, "busy")->kind == GS_TRUE);
        }
        tell(p, "{\"op\":\"cancel\",\"id\":7}");
        CHECK(!strcmp(hear_answer(p, 7, &tokens), "done") && tokens == 0);
        CHECK(!strcmp(field(p, "finish")->text, "cancelled"));
    }
    tell(p, "{\"op\":\"pace\",\"id\":9,\"duty\":1}");
    CHECK(hears(p, "pace", 9));
    tell(p, "{\"op\":\"generate\",\"id\":10,\"max_tokens\":12," HELLO "}");
    CHECK(!strcmp(hear_answer(p, 10, &tokens), "done") && tokens >= TOKENS);
}

/* Wait until a ping finds the worker asleep in a request; the steps that it has made. */
static uint64_t steps_asleep(peer *p)
{
    do {
        tell(p, "{\"op\":\"ping\",\"n\":1}");
        CHECK(hears(p, "pong", 0) && field(p, "busy")->kind == GS_TRUE);
    } while (field(p, "asleep")->kind != GS_TRUE);
    return field(p, "steps")->whole;
}

/* The stored tests keep the pace of tokens, step by step, and can be cancelled. */
static void test_serve_tests(peer *p)
{
    tell(p, "{\"op\":\"pace\",\"id\":20,\"duty\":0,\"prefill_duty\":1}");
    CHECK(hears(p, "pace", 20));
    tell(p, "{\"op\":\"test\",\"id\":21}");
    uint64_t steps = steps_asleep(p);
    CHECK(steps_asleep(p) == steps);
    tell(p, "{\"op\":\"pace\",\"id\":22,\"duty\":1}");
    for (int i = 0, tested = 0; i < 2; i++) { /* two threads answer, in any order */
        bool is_pace = strcmp(hear(p), "pace") == 0;
        CHECK(field(p, "id")->whole == (is_pace ? 22 : 21));
        CHECK(is_pace || (field(p, "passed")->whole == 1 && !tested++));
    }
    tell(p, "{\"op\":\"ping\",\"n\":1}");
    CHECK(hears(p, "pong", 0) && field(p, "steps")->whole > steps + 1);
    tell(p, "{\"op\":\"pace\",\"id\":23,\"duty\":0}");
    CHECK(hears(p, "pace", 23));
    tell(p, "{\"op\":\"test\",\"id\":24}");
    steps_asleep(p);
    tell(p, "{\"op\":\"cancel\",\"id\":24}");
    CHECK(hears_error(p, 24, GEMRUN_E_STATE) && strstr(field(p, "text")->text, "cancelled"));
    tell(p, "{\"op\":\"pace\",\"id\":25,\"duty\":1,\"threads\":1}");
    CHECK(hears(p, "pace", 25));
    tell(p, "{\"op\":\"test\",\"id\":26}"); /* as before, with fewer threads */
    CHECK(hears(p, "tested", 26) && field(p, "passed")->whole == 1);
}

/* Before any thread of ours is made: the worker is a fork. */
static void test_serve(void)
{
    static peer p;
    static const uint8_t garbage[] = {1, 0, 0, 0, '}'};
    pid_t pid = start_worker(&p, cut);
    CHECK(hears_error(&p, 0, GEMRUN_E_SIZE) && exit_code(pid) == 6);
    close(p.fd);
    pid = start_worker(&p, paths[0]);
    CHECK(!strcmp(hear(&p), "ready") && field(&p, "open_ms")->number >= 0);
    CHECK(!strcmp(field(&p, "version")->text, gemrun_version()));
    test_serve_requests(&p);
    test_serve_ends(&p);
    test_serve_cancel(&p);
    test_serve_tests(&p);
    close(p.fd);
    CHECK(exit_code(pid) == 0);
    pid = start_worker(&p, paths[0]);
    CHECK(!strcmp(hear(&p), "ready"));
    tell(&p, "{\"op\":\"generate\",\"id\":1,\"max_tokens\":40," HELLO "}");
    CHECK(write(p.fd, garbage, sizeof garbage) == (ssize_t)sizeof garbage);
    CHECK(exit_code(pid) == 8);
    close(p.fd);
}

int main(void)
{
    CHECK(mkdtemp(folder) != NULL);
    make_files();
    test_serve();
    test_arguments();
    test_equal_answers();
    test_own_steps();
    test_candidates();
    test_faults();
    test_rollback();
    test_disable();
    test_pause();
    test_deadline_ends_a_sleep();
    test_cancel();
    test_duty();
    test_turns();
    test_close();
    test_replace_under_load();
    test_storm();
    test_attach_arguments();
    test_attached();
    test_files_of_frames();
    remove_files();
    puts("test_handle: ok");
    return 0;
}
