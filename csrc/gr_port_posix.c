/* gr_port_posix.c: the port to Linux. The only file of the engine that sees libc and the system.
 *
 * It refuses to be clever about scheduling: a bounded spin, then a futex. */
#define _GNU_SOURCE
#include "gr_port.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#elif defined(__aarch64__) || defined(__arm__) || defined(__riscv)
#include <sys/auxv.h>
#endif

#include "gr_check.h"

#ifndef SYS_futex
#define SYS_futex SYS_futex_time64 /* 32-bit systems younger than the year 2038 problem */
#endif

enum { POPULATE_READ = 22 }; /* MADV_POPULATE_READ, which older headers lack; Linux 5.14 */

/* ---- memory ---- */

static gemrun_status fail_errno(gr_error *e, gemrun_status code, uint64_t wanted)
{
    return gr_fail(e, code, 0, wanted, (uint64_t)errno);
}

/* A hint, which not every system takes. Anonymous memory takes it before its first page is there,
 * a file where pages are not in the page cache yet. */
static void ask_for_huge_pages(void *p, uint64_t bytes)
{
    (void)madvise(p, (size_t)bytes, MADV_HUGEPAGE);
}

gemrun_status gr_port_map_file(gr_map *out, const char *path, gr_error *e)
{
    *out = (gr_map){0};
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe must not block us */
    if (fd < 0) {
        return fail_errno(e, GEMRUN_E_OPEN, 0);
    }
    struct stat st;
    gemrun_status status = GEMRUN_OK;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        errno = S_ISDIR(st.st_mode) ? EISDIR : EINVAL;
        status = fail_errno(e, GEMRUN_E_OPEN, 0);
    } else if ((uint64_t)st.st_size > SIZE_MAX) {
        errno = EFBIG;
        status = fail_errno(e, GEMRUN_E_OPEN, 0);
    } else if (st.st_size > 0) {
        out->bytes = (uint64_t)st.st_size;
        void *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (p == MAP_FAILED) {
            status = fail_errno(e, GEMRUN_E_MAP, out->bytes);
            *out = (gr_map){0};
        } else {
            out->address = p;
            ask_for_huge_pages(p, out->bytes);
        }
    }
    close(fd);
    return status;
}

void gr_port_prefault(const gr_map *m)
{
    volatile uint8_t sink = 0;
    if (!m->address || madvise(m->address, (size_t)m->bytes, POPULATE_READ) == 0) {
        return;
    }
    for (uint64_t i = 0; i < m->bytes; i += 4096) { /* it may stop half way, or be unknown */
        sink = (uint8_t)(sink ^ m->address[i]);
    }
}

static gemrun_status map_guarded(gr_map *out, uint64_t bytes, uint64_t guard, gr_error *e)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    *out = (gr_map){0};
    uint64_t all = gr_add(bytes, guard);
    void *p = all > SIZE_MAX ? MAP_FAILED
                             : mmap(NULL, (size_t)all, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (p == MAP_FAILED) {
        return fail_errno(e, GEMRUN_E_MAP, bytes);
    }
    if (guard && mprotect(p, (size_t)guard, PROT_NONE) != 0) {
        fail_errno(e, GEMRUN_E_MAP, bytes);
        munmap(p, (size_t)all);
        return GEMRUN_E_MAP;
    }
    ask_for_huge_pages(p, all);
    out->address = (uint8_t *)p + guard;
    out->bytes = bytes;
    for (uint64_t i = 0; i < bytes; i += 4096) {
        ((volatile uint8_t *)out->address)[i] = 0;
    }
    return GEMRUN_OK;
}

gemrun_status gr_port_map(gr_map *out, uint64_t bytes, gr_error *e)
{
    return map_guarded(out, bytes, 0, e);
}

void gr_port_unmap(gr_map *m)
{
    if (m->address) {
        munmap(m->address, (size_t)m->bytes);
    }
    *m = (gr_map){0};
}

uint64_t gr_port_lock(const gr_map *m)
{
    return m->address && mlock(m->address, (size_t)m->bytes) == 0 ? m->bytes : 0;
}

/* ---- clock, texts ---- */

uint64_t gr_port_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

const char *gr_port_reason(uint64_t found)
{
    return found == 0 ? "refused" : strerror((int)found);
}

char *gr_port_text(size_t *out_capacity)
{
    static _Thread_local char text[8192]; /* a path of 4096 bytes is half of it */
    *out_capacity = sizeof text;
    return text;
}

/* ---- what the machine grants ---- */

enum { PATH_SIZE = 768, FILE_SIZE = 8192 };

static bool read_text(const char *path, char *out, size_t capacity)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); /* a pipe is read empty */
    if (fd < 0) {
        return false;
    }
    size_t n = 0;
    ssize_t got = 1;
    while (got > 0 && n < capacity - 1) {
        got = read(fd, out + n, capacity - 1 - n);
        n += got > 0 ? (size_t)got : 0;
    }
    out[n] = 0;
    close(fd);
    return got >= 0;
}

/* The number behind `key` at the start of a line; `fallback` where it is missing or no number. */
static uint64_t number_after(const char *text, const char *key, uint64_t fallback)
{
    size_t n = strlen(key);
    for (const char *line = text; line && *line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, key, n) == 0) {
            const char *p = line + n + strspn(line + n, " \t");
            uint64_t value = 0;
            bool any = false;
            for (; *p >= '0' && *p <= '9'; p++, any = true) {
                value = gr_add(gr_mul(value, 10), (uint64_t)(*p - '0'));
            }
            return any ? value : fallback;
        }
    }
    return fallback;
}

static uint64_t file_number(const char *dir, const char *name, const char *key, uint64_t fallback)
{
    char path[PATH_SIZE + 64], text[FILE_SIZE];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return read_text(path, text, sizeof text) ? number_after(text, key, fallback) : fallback;
}

/* Bytes that a control group leaves. Its page cache can be dropped and does not count as used. */
static uint64_t memory_left(const char *dir)
{
    uint64_t limit = file_number(dir, "memory.max", "", GR_TOO_BIG);
    uint64_t used = file_number(dir, "memory.current", "", 0), cache;
    if (limit != GR_TOO_BIG) {
        cache = gr_add(file_number(dir, "memory.stat", "inactive_file ", 0),
                       file_number(dir, "memory.stat", "active_file ", 0));
    } else {
        limit = file_number(dir, "memory.limit_in_bytes", "", GR_TOO_BIG);
        used = file_number(dir, "memory.usage_in_bytes", "", 0);
        cache = gr_add(file_number(dir, "memory.stat", "total_inactive_file ", 0),
                       file_number(dir, "memory.stat", "total_active_file ", 0));
    }
    used -= cache < used ? cache : used;
    return limit == GR_TOO_BIG ? GR_TOO_BIG : limit - (used < limit ? used : limit);
}

/* Whole processors of a control group's quota. */
static uint64_t cores_left(const char *dir)
{
    uint64_t none = GR_TOO_BIG, quota = none, period = none;
    char path[PATH_SIZE + 64], text[FILE_SIZE];
    snprintf(path, sizeof path, "%s/cpu.max", dir);
    if (read_text(path, text, sizeof text)) { /* "150000 100000", or "max 100000" */
        const char *blank = strchr(text, ' ');
        quota = number_after(text, "", none);
        period = blank ? number_after(blank + 1, "", none) : none;
    } else {
        quota = file_number(dir, "cpu.cfs_quota_us", "", none);
        period = file_number(dir, "cpu.cfs_period_us", "", none);
    }
    if (quota == none || period == none || period == 0) {
        return none;
    }
    return quota / period > 0 ? quota / period : 1;
}

/* Whether a list of names with commas between holds one. */
static bool has_name(const char *list, const char *name)
{
    size_t n = strlen(name);
    for (const char *p = list; p; p = strchr(p, ',')) {
        p += *p == ',';
        if (strncmp(p, name, n) == 0 && (p[n] == 0 || p[n] == ',')) {
            return true;
        }
    }
    return false;
}

/* The least that a control group of this process, or one above it, leaves. */
static uint64_t least_in_groups(const char *root, const char *controller,
                                uint64_t (*left)(const char *dir))
{
    char path[PATH_SIZE], groups[FILE_SIZE], dir[PATH_SIZE];
    uint64_t least = GR_TOO_BIG;
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    if (!read_text(path, groups, sizeof groups)) {
        return least;
    }
    for (char *line = groups, *next; line && *line; line = next) {
        next = strchr(line, '\n'); /* a line: number:controllers:path, 0::path in version 2 */
        if (next) {
            *next++ = 0;
        }
        char *names = strchr(line, ':'), *group = names ? strchr(names + 1, ':') : NULL;
        if (!group) {
            continue;
        }
        *group++ = 0;
        bool second = *++names == 0;
        if (!second && !has_name(names, controller)) {
            continue;
        }
        for (char *slash = group; slash != NULL;) {
            int size = snprintf(dir, sizeof dir, "%s/sys/fs/cgroup/%s%s", root,
                                second ? "." : controller, group);
            if (size > 0 && (size_t)size < sizeof dir) {
                uint64_t here = left(dir);
                least = here < least ? here : least;
            }
            slash = strrchr(group, '/');
            if (slash) { /* the group above is next; the empty path is the mount itself */
                *slash = 0;
            }
        }
    }
    return least;
}

uint64_t gr_port_group_memory(const char *root)
{
    return least_in_groups(root, "memory", memory_left);
}

uint64_t gr_port_memory(const char *root)
{
    char dir[PATH_SIZE];
    snprintf(dir, sizeof dir, "%s/proc", root);
    uint64_t free_kb = file_number(dir, "meminfo", "MemAvailable:", GR_TOO_BIG);
    uint64_t system = gr_mul(free_kb, free_kb == GR_TOO_BIG ? 1 : 1024);
    uint64_t groups = gr_port_group_memory(root);
    return groups < system ? groups : system;
}

uint64_t gr_port_affinity(void)
{
    cpu_set_t set;
    uint64_t mask = 0;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        for (unsigned i = 0; i < 64; i++) {
            mask |= CPU_ISSET(i, &set) ? (uint64_t)1 << i : 0;
        }
    }
    return mask;
}

static void set_of(uint64_t mask, cpu_set_t *out)
{
    CPU_ZERO(out);
    for (unsigned i = 0; i < 64; i++) {
        if (mask >> i & 1) {
            CPU_SET(i, out);
        }
    }
}

/* Belongs to the thread like its mask does: a new thread begins unbound, whoever had its stack. */
static _Thread_local struct binding {
    uint64_t mask; /* 0: not bound by us */
    cpu_set_t before;
} binding;

bool gr_port_pin(uint64_t mask)
{
    struct binding *own = &binding;
    cpu_set_t set, now;
    if (own->mask == mask) {
        return true;
    }
    if (own->mask == 0 && sched_getaffinity(0, sizeof own->before, &own->before) != 0) {
        return false;
    }
    set_of(mask, &set);
    if (sched_setaffinity(0, sizeof set, &set) != 0) {
        return false;
    }
    own->mask = mask;
    return sched_getaffinity(0, sizeof now, &now) == 0 && CPU_EQUAL(&set, &now);
}

void gr_port_unpin(void)
{
    struct binding *own = &binding;
    if (own->mask != 0) {
        sched_setaffinity(0, sizeof own->before, &own->before);
        own->mask = 0;
    }
}

uint64_t gr_nth_bit(uint64_t mask, uint32_t n)
{
    for (; n > 0; n--) {
        mask &= mask - 1;
    }
    return mask & (0 - mask);
}

uint32_t gr_port_cores(const char *root)
{
    cpu_set_t set;
    uint64_t allowed = 1;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        allowed = (uint64_t)CPU_COUNT(&set);
    }
    uint64_t quota = least_in_groups(root, "cpu", cores_left);
    uint64_t cores = quota < allowed ? quota : allowed;
    return cores < 1 ? 1 : (uint32_t)cores;
}

/* Speeds of the processors of `mask`, GR_TOO_BIG where the system does not tell. Returns the
 * highest, 0 where it tells of none. Arm systems tell every core's capacity; elsewhere the highest
 * clock has to do. */
static uint64_t speeds_of(const char *root, uint64_t mask, uint64_t speed[64])
{
    static const char *const files[] = {"cpu_capacity", "cpufreq/cpuinfo_max_freq"};
    uint64_t most = 0;
    for (size_t f = 0; f < sizeof files / sizeof files[0] && most == 0; f++) {
        for (unsigned i = 0; i < 64; i++) {
            char dir[PATH_SIZE];
            snprintf(dir, sizeof dir, "%s/sys/devices/system/cpu/cpu%u", root, i);
            speed[i] = mask >> i & 1 ? file_number(dir, files[f], "", GR_TOO_BIG) : GR_TOO_BIG;
            most = speed[i] != GR_TOO_BIG && speed[i] > most ? speed[i] : most;
        }
    }
    return most;
}

bool gr_port_uneven(const char *root)
{
    uint64_t speed[64], most = speeds_of(root, gr_port_affinity(), speed);
    bool uneven = false;
    for (unsigned i = 0; i < 64 && most > 0; i++) {
        uneven |= speed[i] != GR_TOO_BIG && most - speed[i] > most / 8;
    }
    return uneven;
}

uint32_t gr_port_fast_cores(const char *root)
{
    uint64_t speed[64], most = speeds_of(root, gr_port_affinity(), speed);
    uint32_t all = gr_port_cores(root), slow = 0;
    for (unsigned i = 0; i < 64 && most > 0; i++) {
        slow += speed[i] != GR_TOO_BIG && speed[i] < most - most / 3;
    }
    return slow < all ? all - slow : 1;
}

/* Processors of `mask` that share a cache, told as a hexadecimal mask with commas; at least 1. */
static unsigned sharers(const char *dir, uint64_t mask)
{
    char path[PATH_SIZE + 64], text[FILE_SIZE];
    uint64_t map = 0;
    unsigned n = 0;
    snprintf(path, sizeof path, "%s/shared_cpu_map", dir);
    if (read_text(path, text, sizeof text)) {
        for (const char *p = text; *p && *p != '\n'; p++) { /* those above 64 are shifted out */
            const char *digits = "0123456789abcdef", *at = strchr(digits, *p);
            map = at ? map << 4 | (uint64_t)(at - digits) : map;
        }
    }
    for (map &= mask; map != 0; map &= map - 1) {
        n++;
    }
    return n > 0 ? n : 1;
}

uint32_t gr_port_near(const char *root)
{
    const uint64_t unknown = 256 << 10, most = 64 << 20, least = 128 << 10;
    uint64_t mask = gr_port_affinity(), near = GR_TOO_BIG;
    for (unsigned i = 0; i < 64; i++) {
        for (unsigned k = 0; k < 5 && (mask >> i & 1); k++) { /* caches of a processor */
            char dir[PATH_SIZE];
            snprintf(dir, sizeof dir, "%s/sys/devices/system/cpu/cpu%u/cache/index%u", root, i, k);
            if (file_number(dir, "level", "", 0) == 2) {
                uint64_t share = gr_mul(file_number(dir, "size", "", 0), 1024) / sharers(dir, mask);
                near = share > 0 && share < near ? share : near;
                break;
            }
        }
    }
    near = near == GR_TOO_BIG ? unknown : near > most ? most : near;
    return (uint32_t)(near < least ? least : near) / 2;
}

/* ---- processor ---- */

#if defined(__x86_64__) || defined(__i386__)
static bool cpu_bit_of(unsigned leaf, unsigned part, unsigned reg, unsigned bit)
{
    unsigned r[4] = {0};
    return __get_cpuid_count(leaf, part, r, r + 1, r + 2, r + 3) && (r[reg] >> bit & 1);
}

static bool cpu_bit(unsigned leaf, unsigned reg, unsigned bit)
{
    return cpu_bit_of(leaf, 0, reg, bit);
}

static uint32_t saved_state(void) /* which registers the system saves: bit 2 is AVX's */
{
    uint32_t low = 0, high = 0;
    if (cpu_bit(1, 2, 27)) {
        __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    }
    return low;
}

uint32_t gr_port_cpu(void)
{
    uint32_t saved = saved_state(), cpu = 0;
    bool avx2 = cpu_bit(7, 1, 5) && cpu_bit(1, 2, 12) && cpu_bit(1, 2, 29);
    bool avx512 = cpu_bit(7, 1, 16) && cpu_bit(7, 1, 17) && cpu_bit(7, 1, 30) && cpu_bit(7, 1, 31);
    if ((saved & 6) == 6 && avx2) {
        cpu |= GR_CPU_AVX2;
        cpu |= cpu_bit_of(7, 1, 0, 4) ? GR_CPU_AVX_VNNI : 0;
        cpu |= (saved & 0xe6) == 0xe6 && avx512 && cpu_bit(7, 2, 11) ? GR_CPU_AVX512_VNNI : 0;
    }
    cpu |= cpu_bit(1, 2, 1) ? GR_CPU_CRC : 0;
    return cpu;
}
#else
#if defined(__riscv)
/* Some cores set the bit for the draft 0.7.1. It has no tail policy in vtype, so this vsetvli
 * t0, zero, e8, m1, ta, ma leaves vl = 0 there; else t0 becomes the bytes of a register. */
static bool has_vectors_1_0(void)
{
    register unsigned long bytes __asm__("t0");
    __asm__ volatile(".4byte 0x0C0072D7" : "=r"(bytes));
    return bytes >= 16;
}
#endif

uint32_t gr_port_cpu(void)
{
    uint32_t cpu = 0;
#if defined(__aarch64__)
    unsigned long a = getauxval(AT_HWCAP), b = getauxval(AT_HWCAP2);
    cpu |= a >> 1 & 1 ? GR_CPU_NEON : 0;
    cpu |= a >> 7 & 1 ? GR_CPU_CRC : 0;
    cpu |= a >> 20 & 1 ? GR_CPU_DOTPROD : 0;
    cpu |= b >> 13 & 1 ? GR_CPU_I8MM : 0;
#elif defined(__arm__)
    cpu |= (getauxval(AT_HWCAP) >> 12 & 1) && (getauxval(AT_HWCAP) >> 16 & 1) ? GR_CPU_NEON : 0;
#elif defined(__riscv)
    cpu |= getauxval(AT_HWCAP) >> ('V' - 'A') & 1 && has_vectors_1_0() ? GR_CPU_RVV : 0;
#endif
    return cpu;
}
#endif

void gr_port_features(char *out, size_t capacity)
{
    static const char *const names[] = {"avx2+fma", "avx-vnni", "avx512-vnni", "neon",
                                        "dotprod", "i8mm", "rvv", "crc32"};
    uint32_t cpu = gr_port_cpu();
    size_t n = 0;
    snprintf(out, capacity, "no vector extension");
    for (uint32_t i = 0; i < sizeof names / sizeof *names && n < capacity; i++) {
        if (cpu >> i & 1) {
            n += (size_t)snprintf(out + n, capacity - n, "%s%s", n ? " " : "", names[i]);
        }
    }
}

const char *gr_port_kernel(void)
{
    const char *name = getenv("GEMRUN_KERNEL");
    return name && *name ? name : NULL;
}

/* Rounding to nearest, nothing flushed to zero (NUMERICS F1). */
uint64_t gr_fp_enter(void)
{
#if defined(__x86_64__) || defined(__SSE__)
    uint32_t saved, plain = 0x1f80; /* all exceptions masked */
    __asm__ volatile("stmxcsr %0" : "=m"(saved));
    __asm__ volatile("ldmxcsr %0" : : "m"(plain) : "memory");
    return saved;
#elif defined(__aarch64__)
    uint64_t saved, plain = 0;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    __asm__ volatile("msr fpcr, %0" : : "r"(plain) : "memory");
    return saved;
#elif defined(__arm__) && defined(__VFP_FP__) && !defined(__SOFTFP__)
    uint32_t saved, plain = 0;
    __asm__ volatile("vmrs %0, fpscr" : "=r"(saved));
    __asm__ volatile("vmsr fpscr, %0" : : "r"(plain) : "memory");
    return saved;
#elif defined(__riscv_flen)
    unsigned long saved;
    __asm__ volatile("csrrwi %0, frm, 0" : "=r"(saved) : : "memory");
    return saved;
#else
    return 0;
#endif
}

void gr_fp_leave(uint64_t saved)
{
#if defined(__x86_64__) || defined(__SSE__)
    uint32_t value = (uint32_t)saved;
    __asm__ volatile("ldmxcsr %0" : : "m"(value) : "memory");
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(saved) : "memory");
#elif defined(__arm__) && defined(__VFP_FP__) && !defined(__SOFTFP__)
    __asm__ volatile("vmsr fpscr, %0" : : "r"((uint32_t)saved) : "memory");
#elif defined(__riscv_flen)
    __asm__ volatile("csrw frm, %0" : : "r"((unsigned long)saved) : "memory");
#else
    (void)saved;
#endif
}

/* ---- the team ---- */

#if defined(__SANITIZE_THREAD__) /* it keeps its own state on a thread's stack */
enum { STACK_MAPPED = GR_STACK_SIZE + (4 << 20) };
#else
enum { STACK_MAPPED = GR_STACK_SIZE };
#endif

typedef struct gate { /* a number that changes, and how many sleep until it does */
    _Alignas(64) _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
} gate;

typedef struct member {
    gate job; /* opened once for every job that it has a part in */
    gr_team *team;
    uint32_t index;
    bool running;
    pthread_t thread;
    gr_map stack;
} member;

struct gr_team {
    gate phase; /* the barrier opened */
    _Alignas(64) _Atomic uint32_t arrived;
    _Alignas(64) _Atomic uint32_t taken; /* units since the last barrier */
    uint32_t threads, active, spin, pinned;
    bool stop;
    gr_body body;
    void *arg;
    member members[GB_MAX_THREADS]; /* 0 is whoever calls */
};

uint64_t gr_team_bytes(void)
{
    return gr_align(sizeof(gr_team), GB_LINE);
}

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__) || defined(__arm__)
    __asm__ volatile("yield");
#elif defined(__riscv)
    __asm__ volatile(".4byte 0x0100000F"); /* pause; a fence without effect where it is unknown */
#endif
}

static void gate_wait(gate *g, uint32_t old, uint32_t spin)
{
    for (uint32_t i = 0; i < spin; i++) {
        if (atomic_load_explicit(&g->value, memory_order_acquire) != old) {
            return;
        }
        relax();
    }
    atomic_fetch_add(&g->sleepers, 1);
    while (atomic_load(&g->value) == old) {
        syscall(SYS_futex, &g->value, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
    }
    atomic_fetch_sub(&g->sleepers, 1);
}

/* Sequentially consistent on both sides: either the sleeper sees the new value, or it is seen. */
static void gate_open(gate *g)
{
    atomic_fetch_add(&g->value, 1);
    if (atomic_load(&g->sleepers) != 0) {
        syscall(SYS_futex, &g->value, FUTEX_WAKE_PRIVATE, GB_MAX_THREADS, NULL, NULL, 0);
    }
}

void gr_team_barrier(gr_team *team, void (*serial)(void *arg), void *arg)
{
    uint32_t phase = atomic_load_explicit(&team->phase.value, memory_order_acquire);
    uint32_t active = team->active; /* once all have arrived, the next job may change it */
    if (atomic_fetch_add(&team->arrived, 1) + 1 < active) {
        gate_wait(&team->phase, phase, team->spin);
        return;
    }
    if (serial) {
        serial(arg);
    }
    atomic_store_explicit(&team->taken, 0, memory_order_relaxed);
    atomic_store(&team->arrived, 0);
    gate_open(&team->phase);
}

uint32_t gr_team_take(gr_team *team, uint32_t units)
{
    return atomic_fetch_add_explicit(&team->taken, units, memory_order_relaxed);
}

void gr_team_run(gr_team *team, uint32_t threads, gr_body body, void *arg)
{
    team->active = threads < team->threads ? threads : team->threads;
    team->body = body;
    team->arg = arg;
    atomic_store_explicit(&team->taken, 0, memory_order_relaxed);
    for (uint32_t i = 1; i < team->active; i++) {
        gate_open(&team->members[i].job);
    }
    body(arg, 0, team->active);
    gr_team_barrier(team, NULL, NULL);
}

static void *work(void *arg)
{
    member *m = arg;
    gr_team *team = m->team;
    gr_fp_enter();
    for (uint32_t job = 0;; job++) { /* one job more each time: nobody can miss one */
        gate_wait(&m->job, job, team->spin);
        if (team->stop) {
            return NULL;
        }
        team->body(team->arg, m->index, team->active);
        gr_team_barrier(team, NULL, NULL);
    }
}

static bool pin_worker(pthread_t thread, uint64_t bit)
{
    cpu_set_t set, now;
    set_of(bit, &set);
    return pthread_setaffinity_np(thread, sizeof set, &set) == 0 &&
           pthread_getaffinity_np(thread, sizeof now, &now) == 0 && CPU_EQUAL(&set, &now);
}

static gemrun_status start_worker(member *m, gr_error *e)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    gemrun_status st = map_guarded(&m->stack, STACK_MAPPED, page, e);
    if (st != GEMRUN_OK) {
        return st;
    }
    pthread_attr_t attr;
    sigset_t all, before;
    sigfillset(&all);
    pthread_attr_init(&attr);
    int rc = pthread_attr_setstack(&attr, m->stack.address, (size_t)m->stack.bytes);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals go to the host's own threads */
    rc = rc ? rc : pthread_create(&m->thread, &attr, work, m);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    m->running = rc == 0;
    return rc == 0 ? GEMRUN_OK : gr_fail(e, GEMRUN_E_MAP, 0, GR_STACK_SIZE, (uint64_t)rc);
}

static void nothing(void *arg, uint32_t thread, uint32_t threads)
{
    (void)arg, (void)thread, (void)threads;
}

gemrun_status gr_team_start(gr_team *team, uint32_t threads, uint64_t affinity, gr_error *e)
{
    memset(team, 0, sizeof *team);
    uint32_t cores = gr_port_cores("");
    team->threads = threads;
    team->spin = threads > cores ? 16 : 4000; /* about a hundred microseconds, or next to none */
    for (uint32_t i = 1; i < threads; i++) {
        team->members[i].team = team;
        team->members[i].index = i;
        gemrun_status st = start_worker(team->members + i, e);
        if (st != GEMRUN_OK) {
            return st;
        }
        if (affinity) {
            team->pinned += pin_worker(team->members[i].thread, gr_nth_bit(affinity, i));
        }
    }
    gr_team_run(team, threads, nothing, NULL); /* all are up */
    return GEMRUN_OK;
}

void gr_team_stop(gr_team *team)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    team->stop = true;
    for (uint32_t i = 1; i < GB_MAX_THREADS; i++) {
        member *m = team->members + i;
        if (m->running) {
            gate_open(&m->job);
            pthread_join(m->thread, NULL);
        }
        if (m->stack.address) {
            gr_map whole = {m->stack.address - page, m->stack.bytes + page};
            gr_port_unmap(&whole);
        }
        m->running = false;
        m->stack = (gr_map){0};
    }
}

uint32_t gr_team_pinned(const gr_team *team)
{
    return team->pinned;
}

gr_map gr_team_stack(const gr_team *team, uint32_t worker)
{
    return team->members[worker].stack;
}
