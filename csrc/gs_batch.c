/* gs_batch.c: several sessions in one pass over the weights (gemrun_batch.h). gr_model.c runs it;
 * here is who takes part, and with how many tokens. */
#include "gemrun_batch.h"

#include <string.h>

#include "gr_check.h"
#include "gr_ctx.h"
#include "gr_feature.h"
#include "gr_model.h"
#include "gs_handle.h"

enum { ROWS = 256 }; /* of a pass, at most: they stand on the stack */

static gr_engine *engine_of(const gemrun_batch_item *item)
{
    return &item->session->e;
}

static uint32_t rest_of(const gemrun_batch_item *item)
{
    return item->status == GEMRUN_OK ? (uint32_t)item->count - item->appended : 0;
}

/* ---- who takes part ---- */

static gemrun_status check_ids(gemrun_batch_item *item)
{
    gr_engine *e = engine_of(item);
    if (!item->ids || item->count == 0 || item->more > 1)
        return gr_fail(&e->err, GEMRUN_E_ARGUMENT, GR_F_NONE, 0, 0);
    if (item->count > e->context - e->pos)
        return gr_no_room(e, GEMRUN_E_FULL, gr_add(e->pos, item->count));
    return gr_check_ids(e, (const uint32_t *)(const void *)item->ids, item->count);
}

/* Take the item's session; a refused one is given back at once. */
static void join(gemrun_batch_item *item, const gemrun_context_t *lead)
{
    item->appended = 0;
    item->status = gr_enter(item->session);
    if (item->status != GEMRUN_OK)
        return;
    item->status = check_ids(item);
    if (item->status != GEMRUN_OK) {
        gr_leave(item->session, item->status);
    } else if (lead && !gs_one_artifact(lead, item->session)) {
        gr_leave(item->session, 0);
        item->status = gs_refuse(GEMRUN_E_ROOT, item->session->name,
                                 "not of one artifact with the batch's first session; open it "
                                 "as a session of that one");
    }
}

static void leave(const gemrun_batch_item *item)
{
    bool failed = item->status == GEMRUN_E_NONFINITE; /* the only one that a pass ends with */
    if (failed || item->status == GEMRUN_OK)
        gr_leave(item->session, item->status);
}

/* ---- passes ---- */

typedef struct pass { /* rows of it, on the caller's stack */
    gr_engine *of[ROWS];
    uint32_t ids[ROWS];
    uint32_t count;
} pass;

/* How many rows item i gets of `room`: one as long as there are any, and a prompt what is left over
 * by those behind it. */
static uint32_t rows_for(const gemrun_batch_item *items, size_t i, size_t count, uint32_t room)
{
    uint32_t rest = rest_of(&items[i]), behind = 0;
    for (size_t k = i + 1; k < count && behind < room; k++)
        behind += rest_of(&items[k]) > 0;
    uint32_t most = room > behind ? room - behind : 1;
    most = gr_least(most, engine_of(&items[i])->chunk);
    return gr_least(rest, gr_least(most, room));
}

static void fill(pass *p, gemrun_batch_item *items, size_t count, uint32_t room)
{
    p->count = 0;
    for (size_t i = 0; i < count && p->count < room; i++) {
        if (rest_of(&items[i]) == 0)
            continue;
        gr_engine *e = engine_of(&items[i]);
        uint32_t rows = rows_for(items, i, count, room - p->count);
        memcpy(p->ids + p->count, items[i].ids + items[i].appended, rows * sizeof *p->ids);
        for (uint32_t k = 0; k < rows; k++)
            p->of[p->count++] = e;
        e->wanted = rows == rest_of(&items[i]) && !items[i].more;
    }
}

/* What the pass made of every item in it. */
static void settle(gemrun_batch_item *items, size_t count, const pass *p)
{
    uint32_t row = 0;
    for (size_t i = 0; i < count && row < p->count; i++) {
        gr_engine *e = items[i].status == GEMRUN_OK ? engine_of(&items[i]) : NULL;
        uint32_t rows = 0;
        while (row < p->count && p->of[row] == e)
            row++, rows++;
        if (rows == 0)
            continue;
        items[i].status = e->err.code;
        if (items[i].status == GEMRUN_OK) {
            items[i].appended += rows;
            continue;
        }
        items[i].session->last.nonfinite_errors++;
        if (items[i].appended > 0) /* what it overwrote is gone, as by gr_append */
            gr_reset(items[i].session);
    }
}

static void run(gemrun_context_t *lead, gemrun_batch_item *items, size_t count)
{
    pass p;
    uint32_t room = gemrun_batch_room(lead);
    gr_bind(lead);
    for (fill(&p, items, count, room); p.count > 0; fill(&p, items, count, room)) {
        gr_forward_many(&lead->e, p.of, p.ids, p.count);
        settle(items, count, &p);
    }
    gr_unpin(lead);
}

uint32_t gemrun_batch_room(const gemrun_context_t *session)
{
    return session ? gr_least(session->e.chunk, ROWS) : 0;
}

int32_t gemrun_batch_append(gemrun_batch_item *items, size_t count)
{
    gemrun_context_t *lead = NULL;
    int32_t good = 0;
    if (!items || count == 0 || count > INT32_MAX)
        return gr_refuse(GR_F_NONE, 0, 0);
    for (size_t i = 0; i < count; i++) {
        join(&items[i], lead);
        lead = lead || items[i].status != GEMRUN_OK ? lead : items[i].session;
    }
    if (lead)
        run(lead, items, count);
    for (size_t i = count; i-- > 0;) { /* as nested calls end */
        leave(&items[i]);
        good += items[i].status == GEMRUN_OK;
    }
    return good;
}
