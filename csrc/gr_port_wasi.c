/* gr_port_wasi.c: the port to WebAssembly with WASI (preview 1): one thread, files are read whole.
 *
 * Outside WASI this file is empty: a tree of all ports is one build. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* CLOCK_MONOTONIC; before any header */
#endif
#include "gr_port.h"

#ifdef __wasi__
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "gr_check.h"
#include "gr_port_single.h"

enum { ON_PAGE = 4096 }; /* the format wants addresses on it */

/* ---- memory ---- */

gemrun_status gr_port_map(gr_map *out, uint64_t bytes, gr_error *e)
{
    *out = (gr_map){0};
    uint64_t all = gr_align(bytes, ON_PAGE);
    uint8_t *p = all > SIZE_MAX ? NULL : aligned_alloc(ON_PAGE, (size_t)all);
    if (!p) {
        return gr_fail(e, GEMRUN_E_MAP, 0, bytes, ENOMEM);
    }
    memset(p, 0, (size_t)all);
    *out = (gr_map){p, bytes};
    return GEMRUN_OK;
}

void gr_port_unmap(gr_map *m)
{
    free(m->address);
    *m = (gr_map){0};
}

static bool read_all(int fd, const gr_map *m)
{
    uint64_t done = 0;
    ssize_t got = 1;
    while (done < m->bytes && got > 0) {
        got = read(fd, m->address + done, (size_t)(m->bytes - done));
        done += got > 0 ? (uint64_t)got : 0;
    }
    errno = got == 0 ? EIO : errno; /* it was cut meanwhile */
    return done == m->bytes;
}

gemrun_status gr_port_map_file(gr_map *out, const char *path, gr_error *e)
{
    *out = (gr_map){0};
    int fd = open(path, O_RDONLY);
    struct stat st;
    gemrun_status status = GEMRUN_OK;
    if (fd < 0 || fstat(fd, &st) != 0) {
        status = gr_fail(e, GEMRUN_E_OPEN, 0, 0, (uint64_t)errno);
    } else if (!S_ISREG(st.st_mode)) {
        status = gr_fail(e, GEMRUN_E_OPEN, 0, 0, S_ISDIR(st.st_mode) ? EISDIR : EINVAL);
    } else if (st.st_size > 0) {
        status = gr_port_map(out, (uint64_t)st.st_size, e);
        if (status == GEMRUN_OK && !read_all(fd, out)) {
            status = gr_fail(e, GEMRUN_E_OPEN, 0, 0, (uint64_t)errno);
            gr_port_unmap(out);
        }
    }
    if (fd >= 0) {
        close(fd);
    }
    return status;
}

void gr_port_prefault(const gr_map *m)
{
    (void)m; /* it was read */
}

uint64_t gr_port_lock(const gr_map *m)
{
    (void)m;
    return 0;
}

/* ---- clock, texts, machine ---- */

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
    static char text[768]; /* one thread */
    *out_capacity = sizeof text;
    return text;
}

uint64_t gr_port_memory(const char *root)
{
    (void)root;
    return GR_TOO_BIG; /* the host does not tell; memory that it refuses is GEMRUN_E_MAP */
}

uint32_t gr_port_near(const char *root)
{
    (void)root;
    return 64 << 10;
}

const char *gr_port_kernel(void)
{
    const char *name = getenv("GEMRUN_KERNEL");
    return name && *name ? name : NULL;
}

/* WebAssembly always rounds to nearest and keeps denormal numbers (NUMERICS F1). */
uint64_t gr_fp_enter(void)
{
    return 0;
}

void gr_fp_leave(uint64_t saved)
{
    (void)saved;
}
#endif
