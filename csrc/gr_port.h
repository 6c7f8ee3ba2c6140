/* gr_port.h: everything that the engine asks of the machine. One gr_port_*.c per kind of system.
 *
 * Memory comes in whole mappings at open, threads are made at open; nothing here is called between
 * two tokens except the team, the clock and the floating-point environment. */
#ifndef GR_PORT_H
#define GR_PORT_H

#include "gr_check.h"
#include "gr_internal.h"

typedef struct gr_map {
    uint8_t *address; /* NULL: nothing is mapped */
    uint64_t bytes;
} gr_map;

/* A file, read-only; what is looked at is read. An empty file gives no address and no failure. */
gemrun_status gr_port_map_file(gr_map *out, const char *path, gr_error *e);
void gr_port_prefault(const gr_map *m); /* every page read once; nothing to do without an address */
/* Zeroed memory, every page touched. */
gemrun_status gr_port_map(gr_map *out, uint64_t bytes, gr_error *e);
void gr_port_unmap(gr_map *m);
uint64_t gr_port_lock(const gr_map *m); /* bytes kept from being paged out: all of them, or 0 */

uint64_t gr_port_now(void); /* nanoseconds of a clock that never jumps */
/* What a new mapping may take: available memory, or what the control groups leave, in bytes.
 * `root` is put before every path ("" but in tests). */
uint64_t gr_port_memory(const char *root);
/* Of these what the control groups leave; GR_TOO_BIG: they set no limit. */
uint64_t gr_port_group_memory(const char *root);
/* The limit of a control group in which a run of so many bytes opens: its process and page tables
 * come beside (gemrun/format/sizes.py says how that was measured). */
static inline uint64_t gr_group_limit(uint64_t total)
{
    uint64_t beside = ((uint64_t)1 << 20) + total / 4096 * 8;
    return gr_add(gr_add(total, beside), 65535) / 65536 * 65536;
}
/* Processors of the thread's affinity mask and of the CPU quota, rounded down, at least 1. */
uint32_t gr_port_cores(const char *root);
/* Do the processors that the thread may use differ in speed by more than an eighth? */
bool gr_port_uneven(const char *root);
/* gr_port_cores without those below two thirds of the fastest one's speed: in a team every thread
 * waits for the slowest, and such a core costs more than it does. At least 1. */
uint32_t gr_port_fast_cores(const char *root);
/* Half of a processor's share of its second cache, in bytes: the least of those that the thread may
 * use, 64 KB to 32 MB; 128 KB where the system does not tell. */
uint32_t gr_port_near(const char *root);
uint64_t gr_port_affinity(void); /* of the calling thread, the first 64 processors */
/* Bind the calling thread to the processors of `mask`, until unpin on this thread; false: it is
 * not bound. A thread that is bound already costs no system call. */
bool gr_port_pin(uint64_t mask);
void gr_port_unpin(void); /* what it was before the first pin; nothing where there was none */
uint64_t gr_nth_bit(uint64_t mask, uint32_t n); /* the n-th set bit alone, from 0; 0: none */
const char *gr_port_reason(uint64_t found); /* text of gr_error.found of E_OPEN and E_MAP */
char *gr_port_text(size_t *out_capacity);   /* the calling thread's error text */
uint32_t gr_port_cpu(void); /* gr_cpu bits: what the processor has and the system saves */
const char *gr_port_kernel(void); /* the kernel that the environment forces, or NULL */
void gr_port_features(char *out, size_t capacity); /* names of the CPU's vector extensions */

/* The team lives in memory of the caller: gr_team_bytes, on 64 bytes. Every worker has a stack of
 * GR_STACK_SIZE, a mapping of its own with a guard page below it. With an affinity mask worker i
 * is pinned to the i-th set bit; thread 0 is whoever calls. */
uint64_t gr_team_bytes(void);
gemrun_status gr_team_start(gr_team *team, uint32_t threads, uint64_t affinity, gr_error *e);
void gr_team_stop(gr_team *team); /* also after a failed start, and of zeroed memory */
uint32_t gr_team_pinned(const gr_team *team); /* workers whose pinning was read back */
gr_map gr_team_stack(const gr_team *team, uint32_t worker);

#endif
