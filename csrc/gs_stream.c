/* gs_stream.c: weights that do not stay in memory (FORMAT.md, COLD), read ahead of the steps that
 * use them and given back behind them.
 *
 * All is advice to the system about the mapped file: whatever it does with it, and wherever nobody
 * gives it, a product finds its weights where they lie, so that no bit depends on it. While DOWN of
 * a layer runs, the next layer's QKV and GATE_UP are on their way; while its attention runs, O and
 * DOWN. Nothing is kept here: what to do follows from the records and from how far the pass is. */
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "gemrun_control.h"
#include "gr_check.h"
#include "gr_ctx.h"
#include "gr_model.h"
#include "gs_handle.h"
#include "gs_section.h"
#include "gs_stream.h"

enum {
    PAGEOUT = 21,       /* MADV_PAGEOUT, which older headers lack; Linux 5.4 */
    PIECE = 128 << 10,  /* bytes that a system reads ahead on request, at least */
    SLICE = 128,        /* units of the head that are read ahead by a thread */
    ROWS = 128,         /* of a head that are computed one by one */
    AROUND = 65536,     /* bytes that a system maps around a page */
    PAGE = 4096,        /* of the format, whatever the system's */
    QKV = 1 << GB_ROLE_Q | 1 << GB_ROLE_K | 1 << GB_ROLE_V,
    O = 1 << GB_ROLE_O, GATE_UP = 1 << GB_ROLE_GATE_UP, DOWN = 1 << GB_ROLE_DOWN
};

typedef struct colds { /* the records, in the image */
    const uint8_t *at;
    uint32_t stride;
    uint64_t count;
} colds;

typedef struct plane { /* of a tensor, and how it is read */
    const gb_tensor *t;
    uint32_t index, by;
    uint64_t offset, size, panel; /* bytes, in the image; of 16 rows */
} plane;

static colds find_colds(const gr_view *v)
{
    gb_section s;
    if (!gs_section(v, GB_SEC_COLD, sizeof(gb_cold), &s))
        return (colds){0};
    return (colds){v->image + s.offset, s.record_size, s.size / s.record_size};
}

/* The i-th record. False: it names nothing that could be cold. */
static bool plane_at(const gr_view *v, const colds *c, uint64_t i, plane *out)
{
    gb_cold r;
    memcpy(&r, c->at + i * c->stride, sizeof r);
    if (r.tensor >= v->tensor_count || r.plane > 1 || r.by > GB_COLD_ROWS || r.reserved != 0)
        return false;
    const gb_tensor *t = &v->tensors[r.tensor];
    bool table = t->role == GB_ROLE_EMBED || t->role == GB_ROLE_HEAD;
    bool matrix = t->role < 32 && (1u << t->role & (QKV | O | GATE_UP | DOWN)) != 0;
    if (!table && !matrix)
        return false;
    *out = (plane){.t = t, .index = 2 * r.tensor + r.plane, .by = r.by,
                   .offset = r.plane ? t->second_offset : t->offset,
                   .size = r.plane ? t->second_size : t->size};
    out->panel = out->size / (t->rows_padded / GB_PANEL);
    if (r.by == GB_COLD_ROWS)
        return table && out->size > 0;
    return r.plane == 0 && t->role != GB_ROLE_EMBED;
}

/* ---- what stays ---- */

enum { AT_QKV, AT_O, AT_GATE_UP, AT_DOWN, STEPS };

static uint32_t step_of(uint32_t role)
{
    uint32_t bit = 1u << role;
    return bit & QKV ? AT_QKV : bit & O ? AT_O : bit & GATE_UP ? AT_GATE_UP : AT_DOWN;
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Of a plane's whole pages those that are not there at once. */
static uint64_t away(const gb_conf *c, const plane *p)
{
    bool head = p->t->role == GB_ROLE_HEAD;
    uint64_t from = gr_align(p->offset, PAGE), to = (p->offset + p->size) / PAGE * PAGE;
    uint64_t pages = to > from ? to - from : 0, rows = c->chunk + (head ? (uint64_t)ROWS : 0);
    uint64_t held = p->by == GB_COLD_ROWS ? rows * (AROUND + p->panel) : 0;
    held += head ? (uint64_t)4 * SLICE * p->panel * c->threads : 0;
    return pages - least(pages, held);
}

/* The streamed matrices of layers that are there at once (4.6). */
static uint64_t window_of(uint64_t of[][STEPS], uint32_t layers)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < layers; i++) {
        const uint64_t *now = of[i], *next = of[(i + 1) % layers];
        most = gr_max(most, now[AT_O] + now[AT_GATE_UP] + now[AT_DOWN]);
        most = gr_max(most, now[AT_DOWN] + next[AT_QKV] + next[AT_GATE_UP]);
    }
    return most;
}

/* What of `size` bytes of weights is in memory at once. False: a record that cannot be followed. */
static bool resident(const gr_view *v, uint64_t size, uint64_t *out)
{
    const colds c = find_colds(v);
    uint64_t of[GB_MAX_LAYERS][STEPS] = {{0}}, rest = size;
    plane p, before = {0};
    for (uint64_t i = 0; i < c.count; i++, before = p) {
        if (!plane_at(v, &c, i, &p) || (i > 0 && p.index <= before.index))
            return false;
        rest -= away(&v->conf, &p);
        if (p.by == GB_COLD_STREAM && p.t->layer >= 0)
            of[p.t->layer][step_of(p.t->role)] += p.size;
    }
    *out = least(size, rest + window_of(of, v->layer_count));
    return true;
}

gemrun_status gs_check_cold(const gr_view *v, const char *object)
{
    gb_section s;
    gr_error e;
    uint64_t held;
    if (!gs_section(v, GB_SEC_WHOT, 0, &s) || !resident(v, s.size, &held))
        return gs_refuse(GEMRUN_E_TABLE, object,
                         "section COLD names what cannot be cold, or out of order; compile the "
                         "artifact again");
    if (s.mem_size == held)
        return GEMRUN_OK;
    gr_fail(&e, GEMRUN_E_RAM, GB_SEC_WHOT, held, s.mem_size);
    return gr_report(&e, object);
}

/* ---- advice ---- */

/* The whole pages of a part of the file. */
static gr_map pages_of(const gr_view *v, uint64_t offset, uint64_t size)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t from = gr_align(offset, page), to = (offset + size) / page * page;
    gr_map m = {0};
    if (from < to) {
        m.bytes = to - from;
        memcpy(&m.address, &v->image, sizeof m.address); /* only read, and only advised about */
        m.address += from;
    }
    return m;
}

static void advise(const gr_map *m, int advice)
{
    if (m->address)
        (void)madvise(m->address, (size_t)m->bytes, advice);
}

/* A system takes one request as far as it reads ahead at once: it is asked piece by piece. */
static void fetch(const gr_map *m)
{
    for (uint64_t at = 0; at < m->bytes; at += PIECE) {
        uint64_t left = m->bytes - at;
        (void)madvise(m->address + at, (size_t)(left < PIECE ? left : PIECE), MADV_WILLNEED);
    }
}

/* The page cache keeps it as long as there is room. */
static void let_go(const gr_map *m)
{
    advise(m, MADV_DONTNEED);
}

/* From the page cache first: behind DONTNEED the system no longer sees whose pages they were. */
static void give_back(const gr_map *m)
{
    advise(m, PAGEOUT);
    let_go(m);
}

typedef void (*act)(const gr_map *m);

/* Streamed matrices of a layer that have one of `roles`. */
static void each(const gr_view *v, uint32_t layer, uint32_t roles, act what)
{
    const colds c = find_colds(v);
    plane p;
    for (uint64_t i = 0; i < c.count; i++)
        if (plane_at(v, &c, i, &p) && p.by == GB_COLD_STREAM && p.t->layer == (int32_t)layer &&
            (1u << p.t->role & roles) != 0) {
            gr_map m = pages_of(v, p.offset, p.size);
            what(&m);
        }
}

/* Planes of no layer that are read `by`, before a pass of layers and before a head. */
static void sweep(const gr_view *v, uint32_t by, act what)
{
    const colds c = find_colds(v);
    plane p;
    for (uint64_t i = 0; i < c.count; i++)
        if (plane_at(v, &c, i, &p) && p.t->layer < 0 && p.by == by) {
            gr_map m = pages_of(v, p.offset, p.size);
            what(&m);
        }
}

/* A part of a plane of the head: so many units from `unit` on. */
static gr_map units_of(const gr_view *v, const plane *p, uint64_t unit, uint64_t count)
{
    uint64_t each_unit = GB_UNIT / GB_PANEL * p->panel, at = unit * each_unit;
    uint64_t left = at < p->size ? p->size - at : 0, bytes = count * each_unit;
    return pages_of(v, p->offset + at, bytes < left ? bytes : left);
}

/* A thread is at `unit` of the head: the slice behind it goes, the one after this is asked for,
 * unless only rows are read of it. */
static void slice(const gr_view *v, uint32_t unit, uint32_t step)
{
    const colds c = find_colds(v);
    uint32_t before = unit < SLICE ? 0 : SLICE;
    plane p;
    for (uint64_t i = 0; i < c.count; i++) {
        if (!plane_at(v, &c, i, &p) || p.t->role != GB_ROLE_HEAD ||
            step == (p.index % 2 ? GR_SCORES : GR_ROWS))
            continue;
        gr_map behind = units_of(v, &p, unit - before, before);
        gr_map next = units_of(v, &p, unit + SLICE, SLICE);
        if (step == GR_ROWS) {
            let_go(&behind);
        } else {
            give_back(&behind);
            fetch(&next);
        }
    }
}

static void at_head(const gr_engine *e, uint32_t step, uint32_t at)
{
    uint32_t unit = step == GR_ROWS ? at / (GB_UNIT / GB_PANEL) : at;
    uint32_t past = step == GR_ROWS ? at % (GB_UNIT / GB_PANEL * SLICE) : at % SLICE;
    if (step != GR_ROWS && at == 0)
        sweep(&e->v, GB_COLD_ROWS, let_go);
    if (past < (step == GR_ROWS ? e->threads : 1)) /* whose panels are every n-th */
        slice(&e->v, unit / SLICE * SLICE, step);
}

static void ahead(const gr_engine *e, uint32_t step, uint32_t at)
{
    const gr_view *v = &e->v;
    uint32_t n = v->layer_count;
    if (step == GB_OP_HEAD || step == GR_SCORES || step == GR_ROWS)
        at_head(e, step, at);
    if (step == GB_OP_QKV) {
        if (at == 0) {
            sweep(v, GB_COLD_STREAM, give_back);
            sweep(v, GB_COLD_ROWS, let_go);
        }
        each(v, at, QKV, give_back);
        each(v, (at + n - 1) % n, DOWN, give_back);
        each(v, at, O | DOWN, fetch);
    }
    if (step == GB_OP_DOWN) {
        each(v, at, O | GATE_UP, give_back);
        each(v, (at + 1) % n, QKV | GATE_UP, fetch);
    }
}

/* ---- the start ---- */

/* Read in, and lock, what lies between the cold planes. */
static void take_hot(gemrun_context_t *ctx, uint64_t from, uint64_t to)
{
    if (from >= to)
        return;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    gr_map m = {ctx->image.address + from / page * page, to - from / page * page};
    gr_port_prefault(&m);
    if (ctx->locked > 0)
        ctx->locked += gr_port_lock(&m);
}

gemrun_status gemrun_stream(gemrun_context_t *ctx)
{
    if (!ctx)
        return gr_refuse(GR_F_NONE, 0, 0);
    const gr_view *v = &ctx->e.v;
    const colds c = find_colds(v);
    uint64_t hot = 0;
    plane p;
    gemrun_status st = gs_check_cold(v, ctx->name[0] ? ctx->name : "model");
    if (st != GEMRUN_OK || c.count == 0 || !ctx->image.address)
        return st; /* all stays, or it is not our file to advise about */
    for (uint64_t i = 0; i < c.count && plane_at(v, &c, i, &p); i++) {
        gr_map m = pages_of(v, p.offset, p.size);
        advise(&m, MADV_NOHUGEPAGE); /* whose pages are read ahead by megabytes */
        advise(&m, p.by == GB_COLD_ROWS ? MADV_RANDOM : MADV_NORMAL);
        if (m.address) {
            uint64_t start = (uint64_t)(m.address - ctx->image.address);
            take_hot(ctx, hot, start);
            hot = start + m.bytes;
        }
    }
    take_hot(ctx, hot, ctx->image.bytes);
    if (ctx->e.planes) /* its low plane may be what is read by rows: sampling screens, too */
        ctx->planes.most = GR_KEEP;
    ctx->e.ahead = ahead;
    each(v, 0, QKV | GATE_UP, fetch);
    return GEMRUN_OK;
}

uint64_t gs_lockable(const gr_view *v)
{
    const gb_header *h = &v->header;
    const colds c = find_colds(v);
    uint64_t bytes = v->image_size + h->ram_arena + h->ram_kv + h->ram_engine;
    plane p;
    for (uint64_t i = 0; i < c.count && plane_at(v, &c, i, &p); i++)
        bytes -= pages_of(v, p.offset, p.size).bytes;
    return bytes;
}

uint64_t gemrun_lockable(const gemrun_context_t *ctx)
{
    return ctx ? gs_lockable(&ctx->e.v) : 0;
}
