/* gr_port_bare.c: the port to a board without a system: no heap, no threads, no files.
 *
 * The artifact lies in flash and is used in place; the caller gives the memory (gemrun_open_mem).
 * It refuses whatever would need a system: opening by path, memory of its own, a second thread.
 * A tree of all ports is one build: without GR_PORT_BARE this file is empty. */
#include "gr_port.h"

#ifdef GR_PORT_BARE
#include "gemrun_bare.h"

/* A board without a clock: no deadline passes and no time is measured. */
__attribute__((weak)) uint64_t gemrun_bare_now(void)
{
    return 0;
}

/* ---- memory ---- */

gemrun_status gr_port_map_file(gr_map *out, const char *path, gr_error *e)
{
    (void)path;
    *out = (gr_map){0};
    return gr_fail(e, GEMRUN_E_OPEN, 0, 0, 0);
}

void gr_port_prefault(const gr_map *m)
{
    (void)m;
}

gemrun_status gr_port_map(gr_map *out, uint64_t bytes, gr_error *e)
{
    *out = (gr_map){0};
    return gr_fail(e, GEMRUN_E_MAP, 0, bytes, 0);
}

void gr_port_unmap(gr_map *m)
{
    *m = (gr_map){0};
}

uint64_t gr_port_lock(const gr_map *m)
{
    return m->bytes; /* nothing is ever paged out */
}

/* ---- clock, texts, machine ---- */

uint64_t gr_port_now(void)
{
    return gemrun_bare_now();
}

const char *gr_port_reason(uint64_t found)
{
    (void)found;
    return "there is no system";
}

char *gr_port_text(size_t *out_capacity)
{
    static char text[256]; /* one thread runs the engine */
    *out_capacity = sizeof text;
    return text;
}

uint64_t gr_port_memory(const char *root)
{
    (void)root;
    return UINT64_MAX; /* the caller's block is checked by its size */
}

uint32_t gr_port_near(const char *root)
{
    (void)root;
    return 16 << 10;
}

const char *gr_port_kernel(void)
{
    return NULL;
}

/* LTPSIZE of a core with Helium is 4, whole vectors. With another one LE faults, the end of a loop,
 * which compilers use in code for the core without its vectors (+nomve) as well. */
#if defined(__ARM_FEATURE_MVE) || defined(__ARM_ARCH_8_1M_MAIN__)
enum { KEPT_FPSCR = 0, SET_FPSCR = 4 << 16 };
#elif defined(__ARM_ARCH_PROFILE) && __ARM_ARCH_PROFILE == 'M' /* as the system set it */
enum { KEPT_FPSCR = 7 << 16, SET_FPSCR = 0 };
#else
enum { KEPT_FPSCR = 0, SET_FPSCR = 0 };
#endif

/* Rounding to nearest, nothing flushed to zero (NUMERICS F1). A core without a floating-point unit
 * computes in software, which is always so. */
uint64_t gr_fp_enter(void)
{
#if defined(__arm__) && defined(__VFP_FP__) && !defined(__SOFTFP__)
    uint32_t saved, plain;
    __asm__ volatile("vmrs %0, fpscr" : "=r"(saved));
    plain = (saved & KEPT_FPSCR) | SET_FPSCR;
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
#if defined(__arm__) && defined(__VFP_FP__) && !defined(__SOFTFP__)
    __asm__ volatile("vmsr fpscr, %0" : : "r"((uint32_t)saved) : "memory");
#elif defined(__riscv_flen)
    __asm__ volatile("csrw frm, %0" : : "r"((unsigned long)saved) : "memory");
#else
    (void)saved;
#endif
}

#include "gr_port_single.h"
#endif
