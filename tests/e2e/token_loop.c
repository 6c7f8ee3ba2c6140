/* token_loop.c: generate tokens and show what happens between two of them.
 *
 *     token_loop MODEL THREADS TOKENS greedy|all|steps|pinned|leak trace|sealed
 *
 * Every token writes a marker line to stdout with one write(2). greedy: plain requests; all: every
 * setting of a request; steps: gemrun_sample and gemrun_decode instead of gemrun_generate; pinned:
 * the same with an affinity; leak: the callback breaks the rules once, to show that it is noticed.
 * sealed: behind the first token a seccomp filter ends the process at any system call but futex,
 * the clock and write. The last line
 * is "allocations N": calls of malloc and its kin between first and last token, counted by the ones
 * below, which replace the C library's. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "gemrun.h"

#if defined(__x86_64__)
#define ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCH AUDIT_ARCH_AARCH64
#else
#error "add the audit constant of this architecture"
#endif

/* ---- counted allocation ---- */
extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *old, size_t size);
extern void *__libc_memalign(size_t align, size_t size);
extern void __libc_free(void *memory);

static _Atomic uint32_t calls;

void *malloc(size_t size)
{
    atomic_fetch_add(&calls, 1);
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    atomic_fetch_add(&calls, 1);
    return __libc_calloc(count, size);
}

void *realloc(void *old, size_t size)
{
    atomic_fetch_add(&calls, 1);
    return __libc_realloc(old, size);
}

void *aligned_alloc(size_t align, size_t size)
{
    atomic_fetch_add(&calls, 1);
    return __libc_memalign(align, size);
}

int posix_memalign(void **out, size_t align, size_t size)
{
    atomic_fetch_add(&calls, 1);
    *out = __libc_memalign(align, size);
    return *out ? 0 : ENOMEM;
}

void free(void *memory)
{
    atomic_fetch_add(&calls, 1);
    __libc_free(memory);
}

/* ---- markers ---- */
typedef struct loop {
    uint32_t seen, first, last; /* the counter at the first and the latest token */
    bool sealed, leak;
} loop;

static void say(const char *word, uint32_t number)
{
    char line[64];
    int n = snprintf(line, sizeof line, "%s %u\n", word, number);
    if (write(1, line, (size_t)n) != n) {
        _exit(5);
    }
}

/* From here on only these calls, for every thread of the process. */
static void seal(void)
{
#define ALLOW(call)                                                                                \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (call), 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
    static struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCH, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        ALLOW(SYS_futex),
        ALLOW(SYS_clock_gettime),
        ALLOW(SYS_write),
        ALLOW(SYS_restart_syscall), /* the kernel's own way to go on after a stop */
        ALLOW(SYS_exit_group),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_fprog program = {sizeof code / sizeof code[0], code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) != 0) {
        say("no seccomp, errno", (uint32_t)errno);
        _exit(77);
    }
}

static int on_text(void *user, int32_t token, const char *text, size_t size)
{
    loop *l = user;
    (void)text, (void)size;
    if (token < 0) {
        return 0; /* text that was held back */
    }
    l->last = atomic_load(&calls);
    say("token", ++l->seen);
    if (l->seen == 1) {
        l->first = l->last;
        if (l->sealed) {
            seal();
        }
    }
    if (l->seen == 3 && l->leak) {
        free(malloc(1));
        getppid();
    }
    return 0;
}

/* ---- runs ---- */
static int32_t generate(gemrun_context_t *ctx, uint32_t count, bool all, loop *l)
{
    static const char *const stops[] = {"no such text at all", "\x01\x02\x03"};
    static const uint32_t banned[] = {5, 6, 7}, biased[] = {8, 9};
    static const float bias[] = {0.5f, -0.5f};
    gemrun_request q = gemrun_request_default(ctx);
    q.max_tokens = count;
    q.temperature = 0;
    q.ignore_stop_ids = 1;
    q.on_text = on_text;
    q.user = l;
    if (all) {
        q.temperature = 0.9f;
        q.top_k = 40;
        q.top_p = 0.95f;
        q.min_p = 0.001f;
        q.repetition_penalty = 1.1f;
        q.seed_set = 1;
        q.seed = 7;
        q.deadline_ns = 3600u * (uint64_t)1000000000;
        q.banned = banned;
        q.banned_count = 3;
        q.bias_ids = biased;
        q.bias_values = bias;
        q.bias_count = 2;
        q.stop_strings = stops;
        q.stop_string_count = 2;
    }
    return gemrun_generate(ctx, "The conveyor stops when", &q, NULL);
}

static int32_t steps(gemrun_context_t *ctx, uint32_t count, loop *l)
{
    const char *prompt = "The conveyor stops when";
    int32_t ids[64];
    gemrun_request q = gemrun_request_default(ctx);
    q.temperature = 0;
    int32_t n = gemrun_tokenize(ctx, prompt, strlen(prompt), 1, ids, 64);
    n = n < 0 ? n : gemrun_prefill(ctx, ids, (size_t)n);
    for (uint32_t i = 0; n >= 0 && i < count; i++) {
        n = gemrun_sample(ctx, &q);
        if (n >= 0) {
            on_text(l, n, "", 0);
            n = gemrun_decode(ctx, n);
        }
    }
    return n < 0 ? n : (int32_t)count;
}

/* The first `count` processors that this process may use. */
static uint64_t affinity(uint32_t count)
{
    cpu_set_t set;
    uint64_t mask = 0;
    sched_getaffinity(0, sizeof set, &set);
    for (unsigned i = 0; i < 64 && count > 0; i++) {
        if (CPU_ISSET(i, &set)) {
            mask |= (uint64_t)1 << i;
            count--;
        }
    }
    return mask;
}

int main(int argc, char **argv)
{
    if (argc != 6) {
        return 2;
    }
    uint32_t count = (uint32_t)strtoul(argv[3], NULL, 10);
    loop l = {.sealed = strcmp(argv[5], "sealed") == 0, .leak = argv[4][0] == 'l'};
    gemrun_config config = gemrun_config_default();
    config.threads = (uint32_t)strtoul(argv[2], NULL, 10);
    bool pinned = strcmp(argv[4], "pinned") == 0;
    config.thread_affinity = pinned ? affinity(config.threads) : 0;
    gemrun_context_t *ctx = NULL;
    if (gemrun_open(&ctx, argv[1], &config) != GEMRUN_OK) {
        fprintf(stderr, "%s\n", gemrun_last_error());
        return 3;
    }
    int32_t made = pinned || strcmp(argv[4], "steps") == 0
                       ? steps(ctx, count, &l)
                       : generate(ctx, count, argv[4][0] == 'a', &l);
    say("made", made < 0 ? 0 : (uint32_t)made);
    say("allocations", l.last - l.first);
    _exit(0); /* a sealed process cannot close what it has opened */
}
