/* doctor_read.c: what gemrun --doctor reads: files of the system, and an artifact. See doctor.h. */
#define _GNU_SOURCE
#include <ctype.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "doctor.h"
#include "gr_check.h"
#include "gr_ctx.h"
#include "gs_json.h"
#include "gs_section.h"
#include "gs_stream.h"

enum { CORES_MOST = 4096 };

/* ---- files ---- */

bool doctor_read(const char *root, const char *file, char *out, size_t capacity)
{
    char path[DOCTOR_PATH];
    struct stat st;
    size_t n = 0;
    ssize_t got = 1;
    out[0] = 0;
    int size = snprintf(path, sizeof path, "%s%s", root, file);
    int fd = size > 0 && (size_t)size < sizeof path
                 ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK) : -1;
    if (fd < 0) {
        return false;
    }
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        got = -1;
    }
    while (got > 0 && n < capacity - 1) {
        got = read(fd, out + n, capacity - 1 - n);
        n += got > 0 ? (size_t)got : 0;
    }
    close(fd);
    while (n > 0 && (out[n - 1] == 0 || isspace((unsigned char)out[n - 1]))) {
        n--;
    }
    out[n] = 0;
    for (size_t i = 0; i < n; i++) {
        out[i] = (char)(out[i] == 0 ? '\n' : out[i]);
    }
    return got >= 0;
}

bool doctor_number(const char *root, const char *file, uint64_t *out)
{
    char text[DOCTOR_WORD], *end;
    if (!doctor_read(root, file, text, sizeof text) || !isdigit((unsigned char)text[0])) {
        return false;
    }
    *out = strtoull(text, &end, 10);
    return *end == 0 || isspace((unsigned char)*end);
}

bool doctor_celsius(const char *root, const char *file, double *out)
{
    char text[DOCTOR_WORD], *end;
    if (!doctor_read(root, file, text, sizeof text)) {
        return false;
    }
    long milli = strtol(text, &end, 10);
    *out = 1e-3 * (double)milli;
    return end != text && *end == 0 && milli >= -100000 && milli <= 150000;
}

bool doctor_cores(const char *list, uint64_t *mask, uint32_t *count)
{
    const char *p = list;
    *mask = 0;
    *count = 0;
    while (isdigit((unsigned char)*p)) {
        char *end;
        unsigned long first = strtoul(p, &end, 10), last = first;
        if (*end == '-' && isdigit((unsigned char)end[1])) {
            last = strtoul(end + 1, &end, 10);
        }
        if (last < first || last >= CORES_MOST) {
            return false;
        }
        for (unsigned long i = first; i <= last; i++) {
            *mask |= i < 64 ? (uint64_t)1 << i : 0;
            ++*count;
        }
        p = *end == ',' && isdigit((unsigned char)end[1]) ? end + 1 : end;
    }
    return *p == 0;
}

/* ---- the artifact ---- */

static void copy(char *out, const char *text, size_t size)
{
    size_t n = size < DOCTOR_WORD - 1 ? size : DOCTOR_WORD - 1;
    memcpy(out, text, n);
    out[n] = 0;
}

static double real_of(const gs_json *j, const gs_value *of, const char *key)
{
    const gs_value *v = of ? gs_get(j, of, key) : NULL;
    return v && v->kind == GS_NUMBER ? v->number : 0;
}

static uint32_t whole_of(const gs_json *j, const gs_value *of, const char *key)
{
    const gs_value *v = of ? gs_get(j, of, key) : NULL;
    return v && v->kind == GS_NUMBER && v->is_whole && v->whole < 4096 ? (uint32_t)v->whole : 0;
}

static void take_mode(const gs_json *j, const gs_value *modes, doctor_wants *w)
{
    for (const gs_value *m = modes ? gs_first(j, modes) : NULL; m; m = gs_next(j, m)) {
        const gs_value *chosen = gs_get(j, m, "default"), *id = gs_get(j, m, "id");
        if (!chosen || chosen->kind != GS_TRUE) {
            continue;
        }
        if (id && id->kind == GS_STRING) {
            copy(w->mode, id->text, id->size);
        }
        w->cores = whole_of(j, m, "cores_online");
        w->cpu_mhz = real_of(j, m, "cpu_max_mhz");
        w->mem_mtps = real_of(j, m, "mem_mtps");
    }
}

/* What the hardware description says; a field that it lacks stays 0. */
static void take_description(const gs_json *j, doctor_wants *w)
{
    const gs_value *all = &j->values[0], *names = gs_get(j, all, "compatible");
    for (const gs_value *v = names ? gs_first(j, names) : NULL; v; v = gs_next(j, v)) {
        if (v->kind == GS_STRING && w->compatible_count < DOCTOR_NAMES) {
            copy(w->compatible[w->compatible_count++], v->text, v->size);
        }
    }
    const gs_value *bsp = gs_get(j, all, "bsp_version");
    if (bsp) {
        copy(w->bsp, bsp->text, bsp->size);
    }
    take_mode(j, gs_get(j, all, "power_mode"), w);
    w->passive_c = real_of(j, gs_get(j, all, "thermal"), "hw_passive_c");
}

static gemrun_status read_description(const gr_view *v, const char *path, doctor_wants *w)
{
    char *text = NULL;
    gs_json *json = malloc(sizeof *json);
    gemrun_status st = json ? gs_description(v, path, json, &text) : GEMRUN_OK;
    if (json && st == GEMRUN_OK && json->count > 0) {
        take_description(json, w);
    }
    free(text);
    free(json);
    return st;
}

bool doctor_read_artifact(const char *path, doctor_wants *out)
{
    gr_map image = {0};
    gr_error e = {0};
    gr_view *v = malloc(sizeof *v);
    void *tables = NULL;
    *out = (doctor_wants){.threads = 0};
    gemrun_status st = v ? gr_port_map_file(&image, path, &e)
                         : gr_fail(&e, GEMRUN_E_MAP, 0, sizeof *v, 0);
    if (st == GEMRUN_OK) {
        uint64_t size = gr_align(gr_add(gr_open_tables_size(image.address, image.bytes), 1), 64);
        tables = size < SIZE_MAX ? aligned_alloc(64, (size_t)size) : NULL;
        st = gr_open_view(v, image.address, image.bytes, tables, tables ? size : 0, false, &e);
    }
    st = st == GEMRUN_OK ? gs_check_cold(v, path) : gr_report(&e, path);
    st = st == GEMRUN_OK ? read_description(v, path, out) : st;
    if (st == GEMRUN_OK) {
        const gb_header *h = &v->header;
        copy(out->model, (const char *)v->conf.name, strnlen((const char *)v->conf.name, 64));
        copy(out->target, (const char *)h->target, strnlen((const char *)h->target, 16));
        out->threads = v->conf.threads;
        out->total = h->ram_total;
        out->lockable = gs_lockable(v);
        out->threshold_c = (double)v->thermal.threshold_c;
    }
    free(tables);
    free(v);
    gr_port_unmap(&image);
    return st == GEMRUN_OK;
}
