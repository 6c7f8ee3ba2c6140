/* test_fpenv.c: the floating-point environment of the host does not reach a result (NUMERICS 1.1).
 *
 *     test_fpenv                       gr_fp_enter, gr_fp_leave and the software fmaf
 *     test_fpenv ARTIFACT THREADS      the whole engine: equal logits, the caller's state restored
 *
 * Prints the digest of the logits, for comparing with other machines. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gemrun.h"
#include "gr_internal.h"

typedef struct mode {
    const char *name;
    uint64_t bits;
} mode;

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
enum { STICKY = 0x3F };
static const mode modes[] = {
    {"default", 0x1F80},
    {"flush to zero", 0x1F80 | 0x8000 | 0x0040},
    {"round down", 0x1F80 | 0x2000},
    {"round up", 0x1F80 | 0x4000},
    {"round to zero and flush", 0x1F80 | 0x6000 | 0x8040},
    {"exceptions on", 0x0000},
};
static uint64_t get_state(void) { return _mm_getcsr() & ~(uint64_t)STICKY; }
static void set_state(uint64_t bits) { _mm_setcsr((unsigned)bits); }
#elif defined(__aarch64__)
static const mode modes[] = {
    {"default", 0},
    {"flush to zero", 1u << 24},
    {"round down", 2u << 22},
    {"round up", 1u << 22},
    {"round to zero and flush", 3u << 22 | 1u << 24},
};
static uint64_t get_state(void)
{
    uint64_t bits;
    __asm__ volatile("mrs %0, fpcr" : "=r"(bits));
    return bits;
}
static void set_state(uint64_t bits) { __asm__ volatile("msr fpcr, %0" : : "r"(bits)); }
#elif defined(__arm__)
static const mode modes[] = {
    {"default", 0},
    {"flush to zero", 1u << 24},
    {"round down", 2u << 22},
    {"round up", 1u << 22},
    {"round to zero and flush", 3u << 22 | 1u << 24},
};
enum { RESULTS = 0x9F }; /* sticky flags; the flags of the last comparison are above */
static uint64_t get_state(void)
{
    uint32_t bits;
    __asm__ volatile("vmrs %0, fpscr" : "=r"(bits));
    return bits & 0x0FFFFFFFu & ~(uint32_t)RESULTS;
}
static void set_state(uint64_t bits)
{
    __asm__ volatile("vmsr fpscr, %0" : : "r"((uint32_t)bits));
}
#elif defined(__riscv_flen)
static const mode modes[] = {{"default", 0}, {"to zero", 1}, {"round down", 2}, {"round up", 3},
                             {"ties away", 4}};
static uint64_t get_state(void)
{
    unsigned long bits;
    __asm__ volatile("frrm %0" : "=r"(bits));
    return bits;
}
static void set_state(uint64_t bits)
{
    __asm__ volatile("fsrm %0" : : "r"((unsigned long)bits));
}
#else
static const mode modes[] = {{"default", 0}};
static uint64_t get_state(void) { return 0; }
static void set_state(uint64_t bits) { (void)bits; }
#endif
enum { MODES = sizeof modes / sizeof modes[0], TOKENS = 40 };

static int failures;

static void expect(bool good, const char *what, const char *where)
{
    if (!good) {
        fprintf(stderr, "test_fpenv: %s: %s\n", where, what);
        failures++;
    }
}

/* Results that another rounding, or flushing, changes. */
static uint32_t probe(void)
{
    volatile float third = 1.0f, tiny = 0x1p-140f;
    float sum = third / 3.0f + gr_fmaf_soft(third / 3.0f, 0x1.000002p0f, -0x1p-25f);
    float small = tiny * 0.5f + gr_fmaf_soft(tiny, 0.5f, 0.0f);
    uint32_t a, b;
    memcpy(&a, &sum, sizeof a);
    memcpy(&b, &small, sizeof b);
    return a * 31u + b;
}

static void test_enter_and_leave(void)
{
    uint32_t want = 0;
    for (size_t i = 0; i < MODES; i++) {
        set_state(modes[i].bits);
        uint64_t before = get_state(), saved = gr_fp_enter();
        uint32_t got = probe();
        gr_fp_leave(saved);
        uint64_t after = get_state();
        set_state(modes[0].bits);
        want = i == 0 ? got : want;
        expect(before == after, "the caller's state is not restored", modes[i].name);
        expect(got == want, "another result inside gr_fp_enter", modes[i].name);
    }
}

typedef struct sum {
    uint64_t digest;
} sum;

static int add(void *user, uint32_t position, const float *logits, uint32_t count)
{
    sum *s = user;
    (void)position;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t u;
        memcpy(&u, &logits[i], sizeof u);
        for (int k = 0; k < 4; k++, u >>= 8) {
            s->digest = (s->digest ^ (u & 0xFFu)) * 1099511628211u;
        }
    }
    return 0;
}

#define CHECKED(call) \
    do { \
        int64_t status_ = (int64_t)(call); \
        bad |= status_ < 0; \
        moved |= get_state() != before; \
    } while (0)

/* Open, evaluate, decode, sample, generate and close under one mode; all results in one digest. */
static uint64_t run(const char *path, uint32_t threads, const mode *m)
{
    gemrun_context_t *ctx = NULL;
    int32_t ids[TOKENS], out[8];
    bool bad = false, moved = false;
    sum s = {14695981039346656037u};
    for (int32_t i = 0; i < TOKENS; i++) {
        ids[i] = i * 7 % 61;
    }
    gemrun_config config = gemrun_config_default();
    config.threads = threads;
    config.ignore_memory = 1;
    set_state(m->bits);
    uint64_t before = get_state();
    CHECKED(gemrun_open(&ctx, path, &config));
    if (ctx) {
        uint32_t count = 0;
        gemrun_request request = gemrun_request_default(ctx);
        CHECKED(gemrun_eval(ctx, ids, TOKENS, add, &s));
        CHECKED(gemrun_decode(ctx, 3));
        const float *logits = gemrun_logits(ctx, &count);
        add(&s, 0, logits, count);
        request.max_tokens = 8;
        request.seed = 5;
        request.temperature = 0.7f;
        request.ignore_stop_ids = 1;
        int32_t made = gemrun_generate(ctx, "a word", &request, out);
        CHECKED(made);
        for (int32_t i = 0; i < made; i++) {
            s.digest = (s.digest ^ (uint32_t)out[i]) * 1099511628211u;
        }
        CHECKED(gemrun_tokenize(ctx, "a word", 6, 0, out, 8));
        gemrun_destroy(ctx);
        moved |= get_state() != before;
    }
    set_state(modes[0].bits);
    expect(!bad, gemrun_last_error(), m->name);
    expect(!moved, "a call changed the caller's floating-point state", m->name);
    return s.digest;
}

int main(int argc, char **argv)
{
    test_enter_and_leave();
    if (argc == 3) {
        uint32_t threads = (uint32_t)strtoul(argv[2], NULL, 10);
        uint64_t want = run(argv[1], threads, &modes[0]);
        for (size_t i = 1; i < MODES; i++) {
            expect(run(argv[1], threads, &modes[i]) == want, "another result", modes[i].name);
        }
        printf("%016" PRIx64 "\n", want);
    }
    return failures ? 1 : 0;
}
