/* test_session.c: sessions over one model, and what is in a context saved, restored and forked, on
 * the golden artifacts: every kind of cache, and rings that wrap. Run it from the project's folder,
 * under sanitizers, ThreadSanitizer too. Calls of the system are this program's own, so that each
 * can fail on demand. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "gemrun_session.h"
#include "gr_ctx.h"
#include "image.h"

enum { STEPS = 5, FILE_MAX = 1 << 20, HEAD = 256, IDS_MAX = 256 };

static const char *const models[] = {"f16", "q4raw", "int4", "kvmask", "pinned", "value4", "key4"};
static char folder[] = "/tmp/test_session.XXXXXX";

/* ---- the system, with faults ---- */

typedef struct faults {
    int pread_error, pwrite_error, fsync_error, rename_error; /* errno; 0: none */
    uint32_t after, fsync_after;    /* calls that still go well */
    uint64_t room;                  /* bytes on the disk; 0: any number */
    size_t most;                    /* bytes of a call; 0: as many as asked for */
    bool interrupted;               /* every other call */
    bool short_file;                /* reads end where `after` ends */
    void (*at)(void *arg);          /* runs when `after` has come down to 0 */
    void *arg;
} faults;

static _Thread_local faults fault;
static _Thread_local uint32_t calls;

static bool fails(int error)
{
    if (fault.interrupted && ++calls % 2) {
        errno = EINTR;
        return true;
    }
    if (fault.after > 0) {
        fault.after--;
        return false;
    }
    if (fault.at) {
        fault.at(fault.arg);
        fault.at = NULL;
    }
    errno = error;
    return error != 0;
}

ssize_t pread(int fd, void *data, size_t size, off_t offset)
{
    size = fault.most && size > fault.most ? fault.most : size;
    memset(data, 0, size); /* a sanitizer sees whether there is room */
    bool over = fault.short_file && fault.after == 0;
    if (fails(fault.pread_error)) {
        return -1;
    }
    if (over) {
        return 0;
    }
    return syscall(SYS_pread64, fd, data, size, offset);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset)
{
    size = fault.most && size > fault.most ? fault.most : size;
    if (fails(fault.pwrite_error)) {
        return -1;
    }
    if (fault.room && (uint64_t)offset + size > fault.room) {
        if ((uint64_t)offset >= fault.room) {
            errno = ENOSPC;
            return -1;
        }
        size = (size_t)(fault.room - (uint64_t)offset);
    }
    return syscall(SYS_pwrite64, fd, data, size, offset);
}

int fsync(int fd)
{
    if (fault.fsync_error && fault.fsync_after-- == 0) {
        errno = fault.fsync_error;
        return -1;
    }
    return (int)syscall(SYS_fsync, fd);
}

int rename(const char *from, const char *to)
{
    if (fault.rename_error) {
        errno = fault.rename_error;
        return -1;
    }
    return (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

/* ---- helpers ---- */

static const char *model_path(const char *name)
{
    static _Thread_local char path[96];
    snprintf(path, sizeof path, "tests/golden/v1.0/tiny-%s.gembin", name);
    return path;
}

static const char *place(const char *name)
{
    static _Thread_local char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static gemrun_config threads(uint32_t n)
{
    gemrun_config c = gemrun_config_default();
    c.threads = n;
    c.ignore_memory = 1;
    return c;
}

static gemrun_context_t *open_model(const char *name, uint32_t n)
{
    gemrun_context_t *ctx = NULL;
    gemrun_config c = threads(n);
    if (gemrun_open(&ctx, model_path(name), &c) != GEMRUN_OK) {
        fprintf(stderr, "open: %s\n", gemrun_last_error());
        exit(1);
    }
    return ctx;
}

static gemrun_context_t *session_of(gemrun_context_t *model, uint32_t n)
{
    gemrun_context_t *ctx = NULL;
    gemrun_config c = threads(n);
    CHECK(gemrun_session_open(&ctx, model, &c) == GEMRUN_OK && ctx);
    return ctx;
}

static bool said(const char *part)
{
    return strstr(gemrun_last_error(), part) != NULL;
}

static gemrun_info info_of(const gemrun_context_t *ctx)
{
    gemrun_info i = {.size = sizeof i};
    CHECK(gemrun_get_info(ctx, &i) == GEMRUN_OK);
    return i;
}

static uint32_t used(gemrun_context_t *ctx)
{
    gemrun_stats s = {.size = sizeof s};
    CHECK(gemrun_get_stats(ctx, &s) == GEMRUN_OK);
    return s.kv_used;
}

static uint64_t mix(uint64_t hash, const void *data, size_t size)
{
    const uint8_t *p = data;
    for (size_t i = 0; i < size; i++) {
        hash = (hash ^ p[i]) * 1099511628211u;
    }
    return hash;
}

/* What can be seen of a context without changing it. */
static uint64_t seen(gemrun_context_t *ctx)
{
    uint32_t n, tokens = used(ctx);
    uint64_t hash = mix(14695981039346656037u, &tokens, sizeof tokens);
    const float *logits = gemrun_logits(ctx, &n);
    hash = logits ? mix(hash, logits, n * sizeof *logits) : hash;
    const float *embedding = gemrun_embedding(ctx, &n);
    return embedding ? mix(hash, embedding, n * sizeof *embedding) : hash;
}

/* What follows: sampled with the random state, decoded, a chunk, and to the end of the context. */
static uint64_t follow(gemrun_context_t *ctx)
{
    uint64_t hash = seen(ctx);
    gemrun_request q = gemrun_request_default(ctx);
    uint32_t context = info_of(ctx).context, rows = info_of(ctx).vocab_rows;
    q.temperature = 2, q.top_p = 1, q.top_k = 0, q.seed_set = 1, q.seed = 5;
    for (uint32_t i = 0; i < STEPS && used(ctx) < context; i++) {
        int32_t id = gemrun_sample(ctx, &q);
        hash = mix(hash, &id, sizeof id);
        id = id < 0 ? (int32_t)(i * 3) : id;
        CHECK(gemrun_decode(ctx, id) > 0);
        hash = mix(hash, &(uint64_t){seen(ctx)}, sizeof(uint64_t));
    }
    while (used(ctx) < context) {
        int32_t ids[24];
        uint32_t n = context - used(ctx) < 24 ? context - used(ctx) : 24;
        for (uint32_t i = 0; i < n; i++) {
            ids[i] = (int32_t)((used(ctx) + 7 * i) % rows);
        }
        CHECK(gemrun_prefill(ctx, ids, n) > 0);
        hash = mix(hash, &(uint64_t){seen(ctx)}, sizeof(uint64_t));
    }
    return hash;
}

static void fill(gemrun_context_t *ctx, uint32_t tokens, uint32_t step)
{
    uint32_t rows = info_of(ctx).vocab_rows;
    int32_t ids[IDS_MAX];
    for (uint32_t i = 0; i < tokens; i++) {
        ids[i] = (int32_t)((i * i + 11) % rows);
    }
    gemrun_reset_kv_cache(ctx);
    for (uint32_t done = 0, n; done < tokens; done += n) {
        n = tokens - done < step ? tokens - done : step;
        CHECK(gemrun_prefill(ctx, ids + done, n) == (int32_t)(done + n));
    }
}

static size_t slurp(const char *path, uint8_t *out)
{
    FILE *f = fopen(path, "rb");
    CHECK(f != NULL);
    size_t n = fread(out, 1, FILE_MAX, f);
    fclose(f);
    return n;
}

static void spill(const char *path, const uint8_t *data, size_t size)
{
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(data, 1, size, f) == size && fclose(f) == 0);
}

static void seal(uint8_t *file, size_t size)
{
    uint32_t crc = size > HEAD ? gr_crc32(0, file + HEAD, size - HEAD) : 0;
    memcpy(file + 248, &crc, sizeof crc);
    crc = gr_crc32(0, file, 252);
    memcpy(file + 252, &crc, sizeof crc);
}

static uint32_t entries(void) /* files in the folder */
{
    char command[128];
    unsigned n = 0;
    snprintf(command, sizeof command, "ls -A %s | wc -l", folder);
    FILE *f = popen(command, "r");
    CHECK(f && fscanf(f, "%u", &n) == 1);
    pclose(f);
    return n;
}

/* ---- sessions ---- */

static uint64_t mapped(gemrun_context_t *ctx)
{
    gemrun_region regions[16];
    uint32_t n = gemrun_regions(ctx, regions, 16);
    uint64_t sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        CHECK(strcmp(regions[i].name, "weights+tables") != 0);
#if defined(__SANITIZE_THREAD__) /* it makes stacks larger */
        if (strcmp(regions[i].name, "stacks") == 0) {
            regions[i].bytes = GR_STACK_SIZE;
        }
#endif
        sum += regions[i].bytes;
    }
    return sum;
}

static void test_open(void)
{
    gemrun_context_t *model = open_model("int4", 2), *a = NULL;
    uint64_t want;
    fill(model, 40, 16);
    want = follow(model);
    for (uint32_t n = 0; n <= 8; n++) {
        gemrun_context_t *s = session_of(model, n), *of = session_of(s, n);
        CHECK(s->e.v.image == model->e.v.image && of->e.v.image == model->e.v.image);
        CHECK(mapped(s) == (uint64_t)gemrun_session_memory(model, n) && mapped(of) == mapped(s));
        CHECK(s->e.threads == (n ? n : 2));
        fill(of, 40, 7);
        fill(s, 40, 5);
        CHECK(follow(s) == want && follow(of) == want);
        gemrun_destroy(s);
        gemrun_destroy(of);
    }
    CHECK(gemrun_session_open(&a, model, NULL) == GEMRUN_OK && a->e.threads == 2);
    gemrun_destroy(a);
    gemrun_config c = threads(0);
    c.kv_cache_size = 20;
    CHECK(gemrun_session_open(&a, model, &c) == GEMRUN_OK && a->e.context == 20);
    gemrun_destroy(a);
    c.kv_cache_size = 2000;
    CHECK(gemrun_session_open(&a, model, &c) == GEMRUN_E_CONTEXT && !a);
    CHECK(said("tiny-int4: kv_cache_size is above the compiled context (2000 tokens, room for 64"));
    c = threads(9);
    CHECK(gemrun_session_open(&a, model, &c) == GEMRUN_E_THREADS && said("tiny-int4: threads: 9"));
    c = threads(1);
    c.reserved[0] = 1;
    CHECK(gemrun_session_open(&a, model, &c) == GEMRUN_E_ARGUMENT && said("tiny-int4: reserved"));
    CHECK(gemrun_session_open(NULL, model, NULL) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_session_open(&a, NULL, NULL) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_session_memory(NULL, 1) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_session_memory(model, 9) == GEMRUN_E_THREADS && said("tiny-int4: threads: 9"));
    gemrun_destroy(model);
}

/* Of an image in the caller's memory, which is aligned and stays. */
static void test_open_mem(void)
{
    image m = image_make();
    gemrun_context_t *model = NULL;
    gemrun_config c = threads(1);
    int64_t needed = gemrun_memory_needed(m.bytes, m.size, &c);
    uint8_t *block = aligned_alloc(4096, (size_t)needed);
    CHECK(gemrun_open_mem(&model, m.bytes, m.size, block, (size_t)needed, &c) == GEMRUN_OK);
    CHECK(gemrun_session_memory(model, 1) == needed);
    gemrun_context_t *s = session_of(model, 2);
    CHECK(mapped(s) == (uint64_t)gemrun_session_memory(model, 2));
    fill(model, 33, 16);
    CHECK(gemrun_session_fork(s, model) == GEMRUN_OK);
    CHECK(gemrun_session_save(model, place("mem")) == GEMRUN_OK);
    uint64_t want = follow(model);
    CHECK(follow(s) == want);
    CHECK(gemrun_session_restore(model, place("mem")) == 33 && follow(model) == want);
    gemrun_destroy(s);
    gemrun_destroy(model);
    free(block);
    free(m.bytes);
}

/* ---- the same bits ---- */

static void draw_some(gemrun_context_t *ctx) /* so that the random state has gone on */
{
    gemrun_request q = gemrun_request_default(ctx);
    q.temperature = 2, q.top_k = 0, q.seed_set = 1, q.seed = 5;
    for (uint32_t i = 0; i < 3; i++) {
        (void)gemrun_sample(ctx, &q);
    }
}

static void test_equal(const char *name)
{
    static uint8_t first[FILE_MAX], again[FILE_MAX];
    static const uint32_t places[] = {0,  1,  15, 16,  17,  31,  32,  33,  63,  64,  65,
                                      95, 96, 97, 127, 128, 129, 158, 159, 160};
    gemrun_context_t *a = open_model(name, 2), *b = session_of(a, 1), *c = session_of(a, 3);
    uint32_t context = info_of(a).context;
    for (uint32_t i = 0; i < sizeof places / sizeof places[0] && places[i] <= context; i++) {
        uint32_t n = places[i];
        fill(a, n, i % 3 ? 16 : 5);
        if (i % 2) {
            draw_some(a);
        }
        fill(b, context - n, 16); /* whatever was there before */
        fill(c, i % 4 * 10, 3);
        CHECK(gemrun_session_save(a, place("equal")) == GEMRUN_OK);
        uint64_t now = seen(a), high = a->e.high;
        CHECK(gemrun_session_restore(b, place("equal")) == (int32_t)n && seen(b) == now);
        CHECK(gemrun_session_fork(c, a) == GEMRUN_OK && seen(c) == now);
        CHECK(b->e.high == high && c->e.high == high && seen(a) == now);
        CHECK(memcmp(b->e.buf[GB_BUF_IDS], a->e.buf[GB_BUF_IDS], 4 * (size_t)n) == 0);
        size_t size = slurp(place("equal"), first);
        CHECK(gemrun_session_save(c, place("again")) == GEMRUN_OK);
        CHECK(slurp(place("again"), again) == size && memcmp(first, again, size) == 0);
        CHECK(gemrun_session_save(b, place("again")) == GEMRUN_OK);
        CHECK(slurp(place("again"), again) == size && memcmp(first, again, size) == 0);
        uint64_t want = follow(a);
        CHECK(follow(b) == want && follow(c) == want);
        CHECK(gemrun_session_restore(a, place("equal")) == (int32_t)n && follow(a) == want);
    }
    gemrun_destroy(b);
    gemrun_destroy(c);
    gemrun_destroy(a);
}

/* A file has what is in use, and nothing of what was there before. */
static void test_nothing_else(void)
{
    static uint8_t first[FILE_MAX], again[FILE_MAX];
    gemrun_context_t *a = open_model("kvmask", 1);
    for (uint32_t n = 0; n <= 160; n += 9) {
        fill(a, n, 16);
        CHECK(gemrun_session_save(a, place("one")) == GEMRUN_OK);
        memset(a->e.kv, 0x55, (size_t)a->e.v.header.ram_kv); /* as if of another conversation */
        fill(a, n, 3);
        CHECK(gemrun_session_save(a, place("two")) == GEMRUN_OK);
        size_t size = slurp(place("one"), first);
        CHECK(slurp(place("two"), again) == size && memcmp(first, again, size) == 0);
    }
    for (uint32_t n = 1; n < 150; n += 4) { /* guesses that were wrong stand behind the end */
        const char *names[] = {"one", "two"};
        for (uint32_t i = 0; i < 2; i++) {
            fill(a, n, 16);
            CHECK(gemrun_prefill(a, (const int32_t[]){3, (int32_t)i, 5, 7 + (int32_t)i}, 4) > 0);
            a->e.pos = n;
            a->e.logits_valid = false;
            CHECK(gemrun_session_save(a, place(names[i])) == GEMRUN_OK);
        }
        size_t size = slurp(place("one"), first);
        CHECK(slurp(place("two"), again) == size && memcmp(first, again, size) == 0);
    }
    gemrun_destroy(a);
}

/* A conversation that goes on with reuse, and back, with guesses: the same figures, too. */
static void test_reuse(const char *name)
{
    static const char *const prompts[] = {"abcabcabcabcabc", "abcabcabcabcabcxyz", "abcabcab",
                                          "abcabcabzzabcabcabc", "abcabcabzzabcabcabcqq", "a"};
    gemrun_context_t *a = open_model(name, 2), *b = session_of(a, 3), *c = session_of(a, 1);
    for (uint32_t i = 0; i < 60; i++) {
        gemrun_request q = gemrun_request_default(a);
        int32_t out[3][64];
        gemrun_context_t *all[] = {a, b, c};
        gemrun_stats s[3];
        q.max_tokens = 1 + i * 7 % 30;
        q.reuse = i % 5 != 4;
        q.speculate = i % 2 ? 6 : 0;
        q.temperature = i % 3 ? 0.0f : 1.0f;
        q.ignore_stop_ids = 1;
        const char *prompt = prompts[i * 5 % 6];
        CHECK(gemrun_session_save(a, place("reuse")) == GEMRUN_OK);
        CHECK(gemrun_session_restore(b, place("reuse")) >= 0);
        CHECK(gemrun_session_fork(c, a) == GEMRUN_OK);
        int32_t n[3];
        for (uint32_t k = 0; k < 3; k++) {
            n[k] = gemrun_generate(all[k], prompt, &q, out[k]);
            s[k] = (gemrun_stats){.size = sizeof s[k]};
            CHECK(n[k] > 0 && gemrun_get_stats(all[k], s + k) == GEMRUN_OK);
            CHECK(n[k] == n[0] && memcmp(out[k], out[0], 4 * (size_t)n[0]) == 0);
            CHECK(s[k].reused == s[0].reused && s[k].kv_used == s[0].kv_used);
            CHECK(seen(all[k]) == seen(a) && all[k]->e.high == a->e.high);
        }
    }
    gemrun_destroy(b);
    gemrun_destroy(c);
    gemrun_destroy(a);
}

/* A screened head: only the best logits are there, and all of them when asked for. */
static void test_heads(void)
{
    gemrun_context_t *a = open_model("int4", 2), *b = NULL, *c = NULL;
    gemrun_config two = threads(2), full = threads(1);
    two.head = GEMRUN_HEAD_TWO_PLANE, full.head = GEMRUN_HEAD_FULL;
    CHECK(gemrun_session_open(&b, a, &two) == GEMRUN_OK);
    CHECK(gemrun_session_open(&c, a, &full) == GEMRUN_OK);
    gemrun_request q = gemrun_request_default(a);
    q.temperature = 0, q.max_tokens = 9, q.ignore_stop_ids = 1;
    int32_t out[16];
    CHECK(gemrun_generate(a, "abc", &q, out) == 9 && a->e.screened);
    CHECK(gemrun_session_save(a, place("head")) == GEMRUN_OK && a->e.screened);
    CHECK(gemrun_session_restore(b, place("head")) > 0);
    CHECK(gemrun_session_fork(c, a) == GEMRUN_OK && c->e.screened && a->e.screened);
    uint64_t want = follow(a);
    CHECK(follow(b) == want && follow(c) == want);
    q.repetition_penalty = 1.3f; /* which changes the logits: there are none any more */
    CHECK(gemrun_generate(a, "abc", &q, out) == 9 && !gemrun_logits(a, NULL));
    CHECK(gemrun_session_save(a, place("head")) == GEMRUN_OK);
    CHECK(gemrun_session_restore(b, place("head")) > 0 && !gemrun_logits(b, NULL));
    CHECK(!gemrun_embedding(b, NULL) && gemrun_session_fork(c, a) == GEMRUN_OK);
    CHECK(gemrun_sample(b, &q) == GEMRUN_E_STATE && !gemrun_logits(c, NULL));
    want = follow(a);
    CHECK(follow(b) == want && follow(c) == want);
    gemrun_destroy(b);
    gemrun_destroy(c);
    gemrun_destroy(a);
}

/* A step that failed has gone on in the rings and was taken back: what stands there is older than
 * the rings' furthest place tells. */
static void test_after_a_failed_step(void)
{
    gemrun_context_t *a = open_model("kvmask", 1), *b = session_of(a, 1), *c = session_of(a, 1);
    for (uint32_t n = 20; n <= 110; n += 6) {
        fill(a, n, 16);
        a->e.high = n + 40 > 160 ? 160 : n + 40;
        CHECK(gemrun_session_save(a, place("failed")) == GEMRUN_OK);
        CHECK(gemrun_session_restore(b, place("failed")) == (int32_t)n);
        CHECK(gemrun_session_fork(c, a) == GEMRUN_OK);
        uint64_t want = follow(a);
        CHECK(follow(b) == want && follow(c) == want);
    }
    gemrun_destroy(b);
    gemrun_destroy(c);
    gemrun_destroy(a);
}

/* ---- behind what is in the context ---- */

typedef struct watched { /* what a run's callbacks see */
    uint32_t steps, most_steps, tokens, most_tokens; /* it is ended after so many; 0: never */
} watched;

static int count_step(void *user, uint32_t *allowed)
{
    watched *w = user;
    (void)allowed;
    return w->most_steps > 0 && w->steps++ >= w->most_steps - 1;
}

static int count_token(void *user, int32_t token, const char *text, size_t size)
{
    watched *w = user;
    (void)text, (void)size;
    w->tokens += token >= 0;
    return w->most_tokens > 0 && w->tokens >= w->most_tokens;
}

/* The same by hand, from an empty cache: `ids` grows by the text and the answer. */
static void by_hand(gemrun_context_t *ctx, const char *text, const gemrun_request *q,
                    const int32_t *answer, int32_t count, int32_t *ids, uint32_t *n)
{
    uint32_t flags = *n == 0 ? 3 : 2;
    int32_t made = gemrun_tokenize(ctx, text, strlen(text), flags, ids + *n, IDS_MAX - *n);
    CHECK(made >= 0);
    *n += (uint32_t)made;
    gemrun_reset_kv_cache(ctx);
    CHECK(gemrun_prefill(ctx, ids, *n) == (int32_t)*n);
    for (int32_t i = 0; i < count; i++) {
        ids[*n] = gemrun_sample(ctx, q);
        CHECK(ids[*n] == answer[i]);
        CHECK(used(ctx) == info_of(ctx).context || gemrun_decode(ctx, ids[*n]) > 0);
        ++*n;
    }
}

static void test_behind(const char *name)
{
    static const char *const texts[] = {"abcabcabc", "xyz", "", " and cabcabca", "abc"};
    gemrun_context_t *a = open_model(name, 2), *b = session_of(a, 1);
    uint32_t context = info_of(a).context;
    for (uint32_t i = 0; i < 4; i++) {
        gemrun_request q = gemrun_request_default(a);
        watched w = {0};
        int32_t ids[IDS_MAX], out[IDS_MAX];
        uint32_t n = 0;
        q.temperature = i % 2 ? 1.5f : 0.0f, q.seed_set = 1, q.seed = i;
        q.speculate = i == 2 ? 6 : 0, q.repetition_penalty = i == 3 ? 1.2f : 1.0f;
        q.ignore_stop_ids = 1, q.user = &w, q.on_text = count_token, q.on_step = count_step;
        gemrun_reset_kv_cache(a);
        for (uint32_t k = 0; k < sizeof texts / sizeof texts[0]; k++) {
            q.max_tokens = k == 4 ? 1000 : 2 + k; /* the last one to the end of the context */
            int32_t made = gemrun_session_generate(a, texts[k], &q, k == 1 ? NULL : out);
            CHECK(made > 0 && (k == 4 || made == (int32_t)q.max_tokens));
            if (k == 1) { /* as a run without tokens is to be tried, too */
                gemrun_request again = q;
                again.reuse = 0;
                gemrun_reset_kv_cache(b);
                CHECK(gemrun_prefill(b, ids, n) == (int32_t)n);
                CHECK(gemrun_session_generate(b, texts[k], &again, out) == made);
                CHECK(seen(b) == seen(a));
            }
            by_hand(b, texts[k], &q, out, made, ids, &n);
            CHECK(used(a) == (n < context ? n : context) && seen(a) == seen(b));
        }
        CHECK(used(a) == context && w.tokens > 10);
        uint64_t before = seen(a);
        CHECK(gemrun_session_generate(a, "x", &q, out) == GEMRUN_E_PROMPT && seen(a) == before);
        CHECK(said("the prompt's 1 tokens do not fit behind the ") && said("begin another"));
        CHECK(gemrun_session_generate(a, "", &q, out) == 1 && used(a) == context);
    }
    gemrun_destroy(b);
    gemrun_destroy(a);
}

/* A run that ends early: before its first token nothing came to the context, behind it the token. */
static void test_early_ends(const char *name)
{
    static const char text[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJ"; /* more than two chunks */
    gemrun_context_t *a = open_model(name, 1), *b = session_of(a, 2);
    gemrun_request q = gemrun_request_default(a);
    int32_t ids[64], out[8];
    int32_t made = gemrun_tokenize(a, text, sizeof text - 1, 2, ids, 64);
    CHECK(made > 17 && made < 40);
    for (uint32_t steps = 1; steps < 5; steps++) {
        watched w = {.most_steps = steps};
        gemrun_stats s = {.size = sizeof s};
        q.ignore_stop_ids = 1, q.user = &w, q.on_step = count_step, q.max_tokens = 4;
        fill(a, 20, 16);
        fill(b, 20, 16);
        int32_t n = gemrun_session_generate(a, text, &q, out);
        CHECK(gemrun_get_stats(a, &s) == GEMRUN_OK && s.finish == GEMRUN_FINISH_CALLBACK);
        CHECK(n >= 0 && (steps > 1 || n == 0));
        if (n > 0) {
            CHECK(s.kv_used == 20 + (uint32_t)made + (uint32_t)n);
            continue;
        }
        CHECK(s.kv_used == 20 || (s.kv_used == 0 && steps > 1));
        CHECK(!gemrun_logits(a, NULL));
        fill(b, s.kv_used, 16);
        CHECK(gemrun_decode(a, 7) > 0 && gemrun_decode(b, 7) > 0 && seen(a) == seen(b));
    }
    watched w = {.most_tokens = 1};
    q.user = &w, q.on_step = NULL, q.on_text = count_token;
    fill(a, 5, 16);
    CHECK(gemrun_session_generate(a, "abc", &q, out) == 1);
    fill(b, 5, 16);
    CHECK(gemrun_tokenize(b, "abc", 3, 2, ids, 64) > 0);
    CHECK(gemrun_prefill(b, ids, used(a) - 6) > 0 && gemrun_decode(b, out[0]) > 0);
    CHECK(seen(a) == seen(b));
    gemrun_destroy(b);
    gemrun_destroy(a);
}

static uint32_t put_text(gemrun_context_t *ctx, const char *text, int32_t *ids)
{
    int32_t n = gemrun_tokenize(ctx, text, strlen(text), 0, ids, 64);
    CHECK(n > 0);
    return (uint32_t)n;
}

/* By the template of golden/make.py: BOS, texts, and END before every line with a role. */
static void test_turns(void)
{
    enum { BOS = 262, END = 263 };
    static const char *const asked[] = {"hi", "  yo ", "\x01"}, *const shown[] = {
        "\nuser\nhi", "\nuser\nyo", "\nuser\n\x01"};
    gemrun_context_t *a = open_model("int4", 2), *b = session_of(a, 1), *c = open_model("f16", 1);
    gemrun_request q = gemrun_request_default(a);
    int32_t ids[IDS_MAX], out[8];
    uint32_t n = 0;
    q.max_tokens = 3, q.ignore_stop_ids = 1, q.temperature = 1, q.reuse = 1;
    for (uint32_t i = 0; i < 3; i++) {
        CHECK(gemrun_session_turn(a, NULL, asked[i], &q, out) == 3);
        ids[n++] = i ? END : BOS;
        n += put_text(a, shown[i] + !i, ids + n);
        ids[n++] = END;
        n += put_text(a, "\nmodel\n", ids + n);
        gemrun_reset_kv_cache(b);
        CHECK(gemrun_prefill(b, ids, n) == (int32_t)n);
        for (uint32_t k = 0; k < 3; k++) {
            ids[n] = gemrun_sample(b, &q);
            CHECK(ids[n] == out[k] && gemrun_decode(b, ids[n++]) > 0);
        }
        CHECK(used(a) == n && seen(a) == seen(b));
    }
    uint64_t before = seen(a);
    CHECK(gemrun_session_turn(a, "be short", "abc", &q, out) == GEMRUN_E_NO_CHAT);
    CHECK(said("tiny-int4: a system message belongs to the beginning of a conversation; leave"));
    CHECK(gemrun_session_turn(a, NULL, "longer and longer and longer", &q, out) == GEMRUN_E_PROMPT);
    CHECK(said("do not fit behind the ") && seen(a) == before);
    gemrun_reset_kv_cache(a);
    CHECK(gemrun_session_turn(a, "be short", "abc", &q, out) == GEMRUN_E_NO_CHAT && used(a) == 0);
    CHECK(gemrun_session_turn(c, NULL, "abc", &q, out) == GEMRUN_E_NO_CHAT);
    CHECK(said("tiny-f16: no chat template"));
    gemrun_destroy(c);
    gemrun_destroy(b);
    gemrun_destroy(a);
}

static int from_inside(void *user, int32_t token, const char *text, size_t size)
{
    (void)token, (void)text, (void)size;
    CHECK(gemrun_session_generate(user, "abc", NULL, NULL) == GEMRUN_E_BUSY);
    CHECK(gemrun_session_turn(user, NULL, "abc", NULL, NULL) == GEMRUN_E_BUSY);
    return 1;
}

static void test_behind_refused(void)
{
    gemrun_context_t *a = open_model("int4", 1);
    gemrun_request q = gemrun_request_default(a), wrong = q;
    static char longer[7000];
    fill(a, 20, 16);
    uint64_t before = seen(a);
    wrong.max_tokens = 0;
    memset(longer, 'a', sizeof longer - 1);
    CHECK(gemrun_session_generate(NULL, "abc", &q, NULL) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_session_generate(a, NULL, &q, NULL) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_session_turn(a, "x", NULL, &q, NULL) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_session_generate(a, "abc", NULL, NULL) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_session_generate(a, "abc", &wrong, NULL) == GEMRUN_E_ARGUMENT);
    CHECK(said("tiny-int4: max_tokens: 0 is out of range"));
    CHECK(gemrun_session_turn(a, NULL, "abc", &q, NULL) == GEMRUN_E_STATE);
    CHECK(said("tiny-int4: what is in the context is no conversation; go on with raw text"));
    CHECK(gemrun_session_generate(a, longer, &q, NULL) == GEMRUN_E_TEXT);
    longer[60] = 0;
    CHECK(gemrun_session_generate(a, longer, &q, NULL) == GEMRUN_E_PROMPT);
    CHECK(said("do not fit behind the 20 in the context (room for 64); shorten it"));
    CHECK(seen(a) == before);
    gemrun_reset_kv_cache(a);
    longer[60] = 'a', longer[100] = 0;
    CHECK(gemrun_session_generate(a, longer, &q, NULL) == GEMRUN_E_PROMPT && used(a) == 0);
    CHECK(said("the prompt is longer than the context ("));
    q.on_text = from_inside, q.user = a;
    CHECK(gemrun_session_generate(a, "abc", &q, NULL) == 1);
    gemrun_destroy(a);
}

/* ---- what is refused ---- */

typedef struct forgery {
    gemrun_status code;
    size_t at;
    uint64_t value;
    uint32_t width; /* bytes written; 0: an exclusive-or of one */
    bool sealed;
    const char *says;
} forgery;

static const forgery forgeries[] = {
    {GEMRUN_E_MAGIC, 0, 1, 0, true, "no saved session"},
    {GEMRUN_E_MAGIC, 7, 1, 0, true, "no saved session"},
    {GEMRUN_E_BYTE_ORDER, 8, 0x04030201, 4, true, "another byte order"},
    {GEMRUN_E_VERSION, 12, 2, 4, true, "version 2 of the format, this engine has 1; use a newer"},
    {GEMRUN_E_VERSION, 12, 0, 4, true, "save it again"},
    {GEMRUN_E_HEADER_CRC, 84, 1, 0, false, "header's checksum disagrees"},
    {GEMRUN_E_HEADER_CRC, 253, 1, 0, false, "header's checksum disagrees"},
    {GEMRUN_E_HEADER, 16, 512, 4, true, "a field of its header"},
    {GEMRUN_E_HEADER, 20, 4, 0, true, "a field of its header"},
    {GEMRUN_E_HEADER, 175, 1, 1, true, "a field of its header"}, /* behind the name's end */
    {GEMRUN_E_HEADER, 176, 1, 1, true, "a field of its header"},
    {GEMRUN_E_HEADER, 247, 1, 1, true, "a field of its header"},
    {GEMRUN_E_SIZE, 24, 1 << 20, 8, true, "cut short ("},
    {GEMRUN_E_SIZE, 24, UINT64_MAX, 8, true, "cut short ("},
    {GEMRUN_E_SIZE, 24, 256, 8, true, "longer than it should be ("},
    {GEMRUN_E_ROOT, 40, 1, 0, true, "another build of tiny-int4, with another content"},
    {GEMRUN_E_ROOT, 72, 1, 0, true, "another build of tiny-int4, with another content"},
    {GEMRUN_E_ROOT, 112, 2, 0, true, "another model (viny-int4, this is tiny-int4)"},
    {GEMRUN_E_ROOT, 113, 0x1B, 1, true, "another model (t?ny-int4, this is tiny-int4)"},
    {GEMRUN_E_CONTEXT, 76, 1, 0, true, "another layout (type 2, layout 0x"},
    {GEMRUN_E_CONTEXT, 80, 1, 4, true, "another layout (type 1, layout 0x"},
    {GEMRUN_E_HEADER, 32, 0, 8, true, "a figure of its header"},
    {GEMRUN_E_HEADER, 32, UINT64_MAX, 8, true, "a figure of its header"},
    {GEMRUN_E_HEADER, 84, 0, 4, true, "a figure of its header"},
    {GEMRUN_E_HEADER, 84, 34, 4, true, "a figure of its header"}, /* another block would do */
    {GEMRUN_E_HEADER, 84, UINT32_MAX, 4, true, "a figure of its header"},
    {GEMRUN_E_HEADER, 88, 0, 4, true, "a figure of its header"},
    {GEMRUN_E_HEADER, 88, 65, 4, true, "a figure of its header"},
    {GEMRUN_E_HEADER, 88, UINT32_MAX, 4, true, "a figure of its header"},
    {GEMRUN_E_HEADER, 92, 0, 4, true, "a figure of its header"},
    {GEMRUN_E_HEADER, 92, 48, 4, true, "a figure of its header"},
    {GEMRUN_E_HEADER, 20, 2, 4, true, "a figure of its header"}, /* no logits, but their output */
    {GEMRUN_E_HEADER, 20, 1, 4, true, "a figure of its header"}, /* a random state not told of */
    {GEMRUN_E_SECTION_CRC, 256, 1, 0, false, "damaged, its checksum disagrees (wanted 0x"},
    {GEMRUN_E_HEADER, 256, 0x7F800000, 4, true, "a value in it"}, /* final norm: infinity */
    {GEMRUN_E_HEADER, 256, 0xFFC00000, 4, true, "a value in it"}, /* .. NaN */
    {GEMRUN_E_HEADER, 256 + 128, 264, 4, true, "a value in it"}, /* an id without a row */
    {GEMRUN_E_HEADER, 256 + 128, UINT32_MAX, 4, true, "a value in it"},
    {GEMRUN_E_HEADER, 256 + 128 + 132, 1, 1, true, "a value in it"}, /* padding behind the ids */
    {GEMRUN_E_HEADER, 256 + 128 + 192, 0x80, 1, true, "a value in it"}, /* K, block 0, code -128 */
    {GEMRUN_E_HEADER, 256 + 128 + 192 + 512, 0x7F80, 2, true, "a value in it"}, /* its scale */
    {GEMRUN_E_HEADER, 256 + 128 + 192 + 512, 0x8001, 2, true, "a value in it"}, /* below 0 */
    {GEMRUN_E_HEADER, 256 + 128 + 192 + 1152 + 80, 1, 1, true, "a value in it"}, /* not in use */
};

/* A context with something in it, and that a refused file changes nothing of it. */
static void test_refused(void)
{
    static uint8_t good[FILE_MAX], file[FILE_MAX];
    gemrun_context_t *a = open_model("int4", 1), *b = session_of(a, 2);
    fill(a, 33, 16);
    draw_some(a);
    CHECK(gemrun_session_save(a, place("good")) == GEMRUN_OK);
    size_t size = slurp(place("good"), good);
    fill(b, 12, 16);
    CHECK(gemrun_session_save(b, place("before")) == GEMRUN_OK);
    uint64_t before = seen(b), after = follow(b);
    CHECK(gemrun_session_restore(b, place("before")) == 12);
    for (size_t i = 0; i < sizeof forgeries / sizeof forgeries[0]; i++) {
        const forgery *f = forgeries + i;
        memcpy(file, good, size);
        if (f->width) {
            memcpy(file + f->at, &f->value, f->width);
        } else {
            file[f->at] ^= (uint8_t)f->value;
        }
        if (f->sealed) {
            seal(file, size);
        }
        spill(place("bad"), file, size);
        int32_t got = gemrun_session_restore(b, place("bad"));
        if (got != f->code || !said(f->says) || !said(place("bad"))) {
            fprintf(stderr, "forgery %zu: %d, %s\n", i, got, gemrun_last_error());
            exit(1);
        }
        CHECK(seen(b) == before);
    }
    CHECK(follow(b) == after);
    CHECK(gemrun_session_restore(b, place("good")) == 33);
    gemrun_destroy(b);
    gemrun_destroy(a);
}

static void test_every_length(void)
{
    static uint8_t good[FILE_MAX], file[FILE_MAX + 1];
    gemrun_context_t *a = open_model("q4raw", 1);
    fill(a, 5, 16);
    CHECK(gemrun_session_save(a, place("cut")) == GEMRUN_OK);
    size_t size = slurp(place("cut"), good);
    uint64_t before = seen(a);
    for (size_t n = 0; n <= size + 1; n += n < 300 || n + 300 > size ? 1 : 61) {
        memcpy(file, good, size);
        for (uint32_t sealed = 0; sealed < 2 && n != size; sealed++) {
            if (sealed && n >= HEAD) { /* and the header says so */
                memcpy(file + 24, &(uint64_t){n}, sizeof(uint64_t));
                seal(file, n);
            }
            spill(place("cut"), file, n);
            int32_t got = gemrun_session_restore(a, place("cut"));
            CHECK(got == (sealed && n >= HEAD ? GEMRUN_E_HEADER : GEMRUN_E_SIZE));
            CHECK(seen(a) == before);
        }
    }
    gemrun_destroy(a);
}

static void test_other_models(void)
{
    gemrun_context_t *a = open_model("int4", 1), *b = open_model("q4raw", 1), *c = NULL, *d = NULL;
    image first = image_make(), second = image_make(); /* other weights, no root, one name */
    gemrun_config one = threads(1), little = threads(1);
    fill(a, 20, 16);
    CHECK(gemrun_session_save(a, place("int4")) == GEMRUN_OK);
    CHECK(gemrun_session_restore(b, place("int4")) == GEMRUN_E_ROOT);
    CHECK(said("saved from another model (tiny-int4, this is tiny-q4raw); restore it"));
    CHECK(gemrun_session_fork(b, a) == GEMRUN_E_ROOT && said("tiny-q4raw: not of one artifact"));
    gemrun_destroy(b);
    b = open_model("int4", 1); /* the same file, mapped a second time */
    CHECK(gemrun_session_fork(b, a) == GEMRUN_OK && seen(b) == seen(a));
    CHECK(gemrun_session_restore(b, place("int4")) == 20 && seen(b) == seen(a));
    CHECK(gemrun_open_mem(&c, first.bytes, first.size, NULL, 0, &one) == GEMRUN_OK);
    CHECK(gemrun_open_mem(&d, second.bytes, second.size, NULL, 0, &one) == GEMRUN_OK);
    fill(c, 20, 16);
    CHECK(gemrun_session_save(c, place("tiny")) == GEMRUN_OK);
    CHECK(gemrun_session_restore(d, place("tiny")) == GEMRUN_E_ROOT && used(d) == 0);
    CHECK(said("another build of tiny, with another content"));
    CHECK(gemrun_session_fork(d, c) == GEMRUN_E_ROOT && used(d) == 0);
    gemrun_destroy(c);
    gemrun_destroy(d);
    free(first.bytes);
    free(second.bytes);
    little.kv_cache_size = 19;
    CHECK(gemrun_session_open(&c, a, &little) == GEMRUN_OK);
    CHECK(gemrun_session_restore(c, place("int4")) == GEMRUN_E_FULL);
    CHECK(said("20 tokens, longer than this context's kv_cache_size of 19; open one with 20"));
    CHECK(gemrun_session_fork(c, a) == GEMRUN_E_FULL && said("kv_cache_size of 19"));
    gemrun_destroy(c);
    little.kv_cache_size = 20;
    CHECK(gemrun_session_open(&c, a, &little) == GEMRUN_OK);
    CHECK(gemrun_session_restore(c, place("int4")) == 20 && seen(c) == seen(a));
    CHECK(gemrun_session_fork(c, a) == GEMRUN_OK && seen(c) == seen(a));
    CHECK(gemrun_decode(c, 1) == GEMRUN_E_FULL);
    gemrun_destroy(c);
    gemrun_destroy(b);
    gemrun_destroy(a);
}

static int inside(void *user, int32_t token, const char *text, size_t size)
{
    gemrun_context_t **both = user;
    (void)token, (void)text, (void)size;
    CHECK(gemrun_session_save(both[0], place("busy")) == GEMRUN_E_BUSY);
    CHECK(gemrun_session_restore(both[0], place("int4")) == GEMRUN_E_BUSY);
    CHECK(gemrun_session_fork(both[0], both[1]) == GEMRUN_E_BUSY);
    CHECK(gemrun_session_fork(both[1], both[0]) == GEMRUN_E_BUSY);
    CHECK(used(both[1]) == 20); /* which is free again */
    gemrun_context_t *s = session_of(both[0], 1); /* a running model may have one more */
    CHECK(gemrun_session_fork(s, both[1]) == GEMRUN_OK && used(s) == 20);
    gemrun_destroy(s);
    return 0;
}

static void test_arguments(void)
{
    gemrun_context_t *both[] = {open_model("int4", 2), NULL}, *a = both[0];
    both[1] = session_of(a, 1);
    CHECK(gemrun_session_save(NULL, place("x")) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_session_save(a, NULL) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_session_restore(NULL, place("x")) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_session_restore(a, NULL) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_session_fork(a, NULL) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_session_fork(NULL, a) == GEMRUN_E_ARGUMENT);
    CHECK(gemrun_session_fork(a, a) == GEMRUN_E_ARGUMENT && said("between two contexts"));
    fill(both[1], 20, 16);
    gemrun_request q = gemrun_request_default(a);
    q.max_tokens = 2, q.on_text = inside, q.user = both, q.ignore_stop_ids = 1;
    CHECK(gemrun_generate(a, "abc", &q, NULL) == 2);
    gb_kv_unit units[4] = {{.blocks = 2}, {.blocks = 2}};
    const gb_kv_unit *none = a->e.v.units;
    a->e.v.units = units; /* as the compiler's hook does */
    CHECK(gemrun_session_save(a, place("x")) == GEMRUN_E_STATE && said("a measurement hides"));
    CHECK(gemrun_session_restore(a, place("int4")) == GEMRUN_E_STATE);
    CHECK(gemrun_session_fork(a, both[1]) == GEMRUN_E_STATE);
    CHECK(gemrun_session_fork(both[1], a) == GEMRUN_E_STATE);
    a->e.v.units = none;
    gemrun_destroy(both[1]);
    gemrun_destroy(a);
}

/* ---- files ---- */

static void test_places(void)
{
    gemrun_context_t *a = open_model("int4", 1);
    char target[512], path[600];
    struct stat st;
    fill(a, 20, 16);
    CHECK(gemrun_session_save(a, "/dev/full") == GEMRUN_E_OPEN && said("is no regular file"));
    CHECK(gemrun_session_save(a, "/dev/null") == GEMRUN_E_OPEN && said("is no regular file"));
    CHECK(gemrun_session_save(a, folder) == GEMRUN_E_OPEN && said("is a folder"));
    CHECK(gemrun_session_save(a, "") == GEMRUN_E_OPEN);
    CHECK(gemrun_session_save(a, place("nowhere/x")) == GEMRUN_E_OPEN);
    CHECK(said("nowhere/x: cannot be written (No such file or directory); check"));
    CHECK(gemrun_session_save(a, "/proc/x") == GEMRUN_E_OPEN && said("cannot be written ("));
    CHECK(gemrun_session_restore(a, place("nowhere")) == GEMRUN_E_OPEN);
    CHECK(said("nowhere: cannot be opened (No such file or directory); check"));
    CHECK(gemrun_session_restore(a, folder) == GEMRUN_E_OPEN && said("(Is a directory)"));
    CHECK(gemrun_session_restore(a, "/dev/zero") == GEMRUN_E_OPEN);
    CHECK(gemrun_session_restore(a, model_path("int4")) == GEMRUN_E_MAGIC);
    CHECK(mkfifo(place("pipe"), 0600) == 0 && gemrun_session_restore(a, place("pipe")) ==
          GEMRUN_E_OPEN);
    CHECK(gemrun_session_save(a, place("pipe")) == GEMRUN_E_OPEN && unlink(place("pipe")) == 0);
    memset(path, 'x', sizeof path); /* too long a name, and too long a path */
    snprintf(path, sizeof path, "%s/%0250d", folder, 1);
    CHECK(gemrun_session_save(a, path) == GEMRUN_E_OPEN && said("File name too long"));
    CHECK(gemrun_session_save(a, place("plain")) == GEMRUN_OK);
    CHECK(stat(place("plain"), &st) == 0 && (st.st_mode & 0777) == 0600);
    snprintf(target, sizeof target, "%s", place("target"));
    spill(target, (const uint8_t *)"kept", 4);
    CHECK(symlink(target, place("link")) == 0);
    CHECK(gemrun_session_restore(a, place("link")) == GEMRUN_E_MAGIC); /* it is followed */
    CHECK(gemrun_session_save(a, place("link")) == GEMRUN_OK);         /* it is replaced */
    CHECK(lstat(place("link"), &st) == 0 && S_ISREG(st.st_mode));
    CHECK(stat(target, &st) == 0 && st.st_size == 4);
    CHECK(gemrun_session_restore(a, place("link")) == 20);
    CHECK(chdir(folder) == 0 && gemrun_session_save(a, "here") == GEMRUN_OK);
    CHECK(gemrun_session_restore(a, "./here") == 20);
    gemrun_destroy(a);
}

/* Every call of the system fails once: what was there stays, no partial file does, and a file that
 * is written in small pieces is the same. */
static void test_writing(void)
{
    static uint8_t first[FILE_MAX], again[FILE_MAX];
    static const struct {
        faults f;
        const char *says;
    } cases[] = {{{.pwrite_error = ENOSPC}, "No space left on device"},
                 {{.pwrite_error = EIO}, "Input/output error"},
                 {{.pwrite_error = EIO, .after = 1}, "Input/output error"},
                 {{.room = 1}, "No space left on device"},
                 {{.room = 300, .most = 100}, "No space left on device"},
                 {{.fsync_error = EIO}, "Input/output error"},
                 {{.rename_error = EACCES}, "Permission denied"}};
    gemrun_context_t *a = open_model("kvmask", 1);
    fill(a, 100, 16);
    CHECK(gemrun_session_save(a, place("kept")) == GEMRUN_OK);
    size_t size = slurp(place("kept"), first);
    fill(a, 90, 16);
    CHECK(gemrun_session_save(a, place("little")) == GEMRUN_OK);
    size_t need = slurp(place("little"), again);
    uint32_t files = entries();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fault = cases[i].f;
        CHECK(gemrun_session_save(a, place("kept")) == GEMRUN_E_OPEN && said(cases[i].says));
        fault = (faults){0};
        CHECK(slurp(place("kept"), again) == size && memcmp(first, again, size) == 0);
        CHECK(entries() == files);
    }
    for (uint64_t room = 2; room < need; room += 997) {
        fault = (faults){.room = room};
        CHECK(gemrun_session_save(a, place("kept")) == GEMRUN_E_OPEN);
    }
    fault = (faults){.fsync_error = EIO, .fsync_after = 1}; /* of the folder */
    CHECK(gemrun_session_save(a, place("other")) == GEMRUN_E_OPEN && said("may not outlast"));
    fault = (faults){.fsync_error = EINVAL, .fsync_after = 1};
    CHECK(gemrun_session_save(a, place("other")) == GEMRUN_OK);
    fault = (faults){0};
    CHECK(entries() == files + 1 && gemrun_session_restore(a, place("other")) == 90);
    size = slurp(place("other"), first);
    for (size_t most = 1; most < 10000; most = most * 7 + 1) {
        fault = (faults){.most = most, .interrupted = most % 2};
        CHECK(gemrun_session_save(a, place("other")) == GEMRUN_OK);
        CHECK(gemrun_session_restore(a, place("other")) == 90);
        fault = (faults){0};
        CHECK(slurp(place("other"), again) == size && memcmp(first, again, size) == 0);
    }
    gemrun_destroy(a);
}

static void grow_up(void *arg) /* the file becomes another one while it is read */
{
    uint8_t *file = ((void **)arg)[0];
    spill(place("change"), file, *(size_t *)((void **)arg)[1]);
}

static void test_reading(void)
{
    static uint8_t good[FILE_MAX], bad[FILE_MAX];
    gemrun_context_t *a = open_model("kvmask", 1), *b = session_of(a, 1);
    fill(a, 100, 16);
    CHECK(gemrun_session_save(a, place("change")) == GEMRUN_OK);
    size_t size = slurp(place("change"), good), little = 5000;
    void *longer[] = {bad, &size}, *shorter[] = {bad, &little};
    CHECK(size < 192 << 10); /* so that it is read in three: header, check, use */
    for (uint32_t after = 0; after < 3; after++) {
        static const int32_t codes[] = {GEMRUN_E_OPEN, GEMRUN_E_SIZE, GEMRUN_E_SECTION_CRC,
                                        GEMRUN_E_SIZE};
        for (uint32_t kind = 0; kind < 4; kind++) {
            memcpy(bad, good, size);
            bad[size - 1] ^= 1;
            spill(place("change"), good, size);
            fill(b, 30, 16);
            uint64_t before = seen(b);
            fault = (faults){.after = after, .pread_error = kind == 0 ? EIO : 0,
                             .short_file = kind == 1, .at = kind > 1 ? grow_up : NULL,
                             .arg = kind == 2 ? longer : shorter};
            int32_t got = gemrun_session_restore(b, place("change"));
            fault = (faults){0};
            CHECK(got == codes[kind]);
            CHECK(after < 2 ? seen(b) == before : used(b) == 0);
            CHECK(after < 2 || said("the cache is empty now"));
            if (after == 2) {
                CHECK(!gemrun_logits(b, NULL));
                CHECK((gemrun_session_restore(a, place("change")) < 0) == (kind > 1));
                fill(b, 33, 16);
                fill(a, 33, 16);
                CHECK(follow(b) == follow(a));
            }
        }
    }
    gemrun_destroy(b);
    gemrun_destroy(a);
}

/* ---- threads ---- */

typedef struct job {
    gemrun_context_t *ctx, *other;
    uint32_t tokens;
    uint64_t want;
    char name[32];
} job;

static void *work(void *arg)
{
    job *j = arg;
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, j->name);
    for (uint32_t i = 0; i < 4; i++) {
        fill(j->ctx, j->tokens, 16);
        CHECK(gemrun_session_save(j->ctx, path) == GEMRUN_OK);
        gemrun_reset_kv_cache(j->ctx);
        CHECK(gemrun_session_restore(j->ctx, path) == (int32_t)j->tokens);
        gemrun_status st;
        while ((st = gemrun_session_fork(j->ctx, j->other)) == GEMRUN_E_BUSY) {
            sched_yield();
        }
        CHECK(st == GEMRUN_OK);
        CHECK(gemrun_session_restore(j->ctx, path) == (int32_t)j->tokens);
        CHECK(follow(j->ctx) == j->want);
        gemrun_context_t *more = session_of(j->ctx, 2);
        gemrun_destroy(more);
    }
    return NULL;
}

/* Sessions run beside each other, take turns at one that they fork from, and answer as alone. */
static void test_threads(void)
{
    enum { JOBS = 3 };
    gemrun_context_t *model = open_model("kvmask", 2), *shared = session_of(model, 1);
    job jobs[JOBS];
    pthread_t ids[JOBS];
    fill(shared, 50, 16);
    for (uint32_t i = 0; i < JOBS; i++) {
        jobs[i] = (job){.ctx = i ? session_of(model, i) : model, .other = shared,
                        .tokens = 30 + 40 * i};
        snprintf(jobs[i].name, sizeof jobs[i].name, "thread%u", i);
        fill(jobs[i].ctx, jobs[i].tokens, 16);
        jobs[i].want = follow(jobs[i].ctx);
    }
    for (uint32_t i = 0; i < JOBS; i++) {
        CHECK(pthread_create(ids + i, NULL, work, jobs + i) == 0);
    }
    for (uint32_t i = 0; i < JOBS; i++) {
        CHECK(pthread_join(ids[i], NULL) == 0);
    }
    CHECK(used(shared) == 50);
    for (uint32_t i = 1; i < JOBS; i++) {
        gemrun_destroy(jobs[i].ctx);
    }
    gemrun_destroy(shared);
    gemrun_destroy(model);
}

/* A step of one, a step of the other: each as if it were alone. */
static void test_interleaved(void)
{
    gemrun_context_t *a = open_model("kvmask", 2), *b = session_of(a, 1), *c = session_of(a, 1);
    gemrun_request q = gemrun_request_default(a);
    uint64_t alone[2] = {0}, both[2] = {0};
    q.temperature = 1, q.top_k = 0;
    for (uint32_t way = 0; way < 3; way++) { /* b alone, c alone, both */
        gemrun_context_t *two[] = {b, c};
        fill(b, 31, 16);
        fill(c, 62, 16);
        for (uint32_t i = 0; i < 80; i++) {
            for (uint32_t k = 0; k < 2; k++) {
                uint64_t *hash = way < 2 ? alone + k : both + k;
                if (way == 2 || way == k) {
                    int32_t id = gemrun_sample(two[k], &q);
                    CHECK(gemrun_decode(two[k], id) > 0);
                    *hash = mix(*hash, &(uint64_t){seen(two[k])}, sizeof(uint64_t));
                }
            }
        }
    }
    CHECK(alone[0] == both[0] && alone[1] == both[1] && alone[0] != alone[1]);
    gemrun_destroy(c);
    gemrun_destroy(b);
    gemrun_destroy(a);
}

int main(void)
{
    char command[128], here[1024];
    CHECK(mkdtemp(folder) != NULL && getcwd(here, sizeof here));
    test_open();
    test_open_mem();
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        test_equal(models[i]);
        test_reuse(models[i]);
        test_behind(models[i]);
        test_early_ends(models[i]);
    }
    test_nothing_else();
    test_heads();
    test_after_a_failed_step();
    test_turns();
    test_behind_refused();
    test_refused();
    test_every_length();
    test_other_models();
    test_arguments();
    test_writing();
    test_reading();
    test_threads();
    test_interleaved();
    test_places();
    CHECK(chdir(here) == 0);
    snprintf(command, sizeof command, "rm -r %s", folder);
    CHECK(system(command) == 0);
    puts("test_session: ok");
    return 0;
}
