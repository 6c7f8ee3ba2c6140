/* gr_spec.c: speculation by prompt lookup. Several tokens go through the layers in one step.
 *
 * Behind the newest token stand ids that followed the same two or three tokens earlier in the
 * context. A head is made for one row of the step after the other, as long as the token sampled
 * from it is the one that stands next. The products of a row do not depend on the rows beside it
 * (NUMERICS.md), so an answer has the same ids as without. What was not sampled lies above e->pos
 * in the ring, where nothing is read, and a ring has a block to spare: nothing is pushed out that
 * a later token sees. Not part of a GR_MINIMAL build. */
#include <string.h>

#include "gr_ctx.h"
#include "gr_model.h"

enum { REST = 32, LOSS = 8 }; /* tokens of a pause, and how much is lost before one */

/* Ids at d->ids + 1 that may follow `id`, at most `most`; of the latest place that looks alike,
 * three tokens before two. A draft runs on into `id` and itself. Returns how many. */
static uint32_t look_up(const gr_engine *e, gr_draft *d, uint32_t id, uint32_t most)
{
    const uint32_t *ids = (const uint32_t *)(const void *)e->buf[GB_BUF_IDS];
    uint32_t n = e->pos, at = 0;
    d->ids[0] = id;
    for (uint32_t i = n; i-- > 1;) {
        bool two = ids[i] == id && ids[i - 1] == ids[n - 1];
        bool three = two && i >= 2 && ids[i - 2] == ids[n - 2];
        at = two && (at == 0 || three) ? i + 1 : at;
        if (three)
            break;
    }
    for (uint32_t i = 0; at > 0 && i < most; i++, at++)
        d->ids[i + 1] = at < n ? ids[at] : d->ids[at - n];
    return at > 0 ? most : 0;
}

/* The step in flight is over: was it worth it? A row costs up to half of a step of its own. */
static void judge(gr_draft *d)
{
    uint32_t right = d->used - 1, drafted = d->count - 1;
    d->credit += 2 * (int32_t)right - (int32_t)drafted;
    d->credit = d->credit > LOSS ? LOSS : d->credit;
    d->limit = right < drafted ? right + 1 : gr_least(2 * d->limit, d->most);
    d->count = 0;
    if (d->credit < -LOSS) {
        d->rest = REST;
        d->credit = 0;
    }
}

/* Logits of the next row of the step in flight, whose token is thereby in the cache. */
static gemrun_status next_row(gr_engine *e, gr_draft *d)
{
    const float *rows = (const float *)(const void *)e->buf[GB_BUF_HIDDEN];
    e->pos++;
    d->used++;
    e->logits_valid = gr_head_row(e, rows + (size_t)d->used * e->v.conf.hidden);
    return e->logits_valid ? GEMRUN_OK
                           : gr_fail(&e->err, GEMRUN_E_NONFINITE, 0, e->pos - 1, 1);
}

void gr_begin_drafts(const gr_engine *e, gr_draft *d, uint32_t most)
{
    bool room = e->v.plans[GB_BUF_HIDDEN - 1].size >= gr_buffer_size(&e->v, GR_BUF_ROWS);
    *d = (gr_draft){.most = room ? most : 0, .limit = room ? most : 0};
}

gemrun_status gr_step(gr_engine *e, gr_draft *d, uint32_t id)
{
    if (d->used < d->count && d->ids[d->used] == id) {
        d->right++;
        return next_row(e, d);
    }
    if (d->count > 0)
        judge(d);
    uint32_t most = gr_least(d->limit, gr_least(e->context - e->pos, e->chunk) - 1), n = 0;
    if (d->rest > 0)
        d->rest--;
    else if (most > 0 && !gr_kv_evicts(e, e->pos, most + 1))
        n = look_up(e, d, id, most);
    /* Where a drafted token is not finite, the real one may be. */
    if (n == 0 || gr_forward(e, d->ids, n + 1, 3, NULL, NULL) != GEMRUN_OK) {
        d->rest = n > 0 ? REST : d->rest;
        return gr_forward(e, &id, 1, 1, NULL, NULL);
    }
    size_t row = (size_t)e->v.conf.hidden * sizeof(float);
    memcpy(e->buf[GB_BUF_HIDDEN] + row, e->buf[GB_BUF_X], (n + 1) * row);
    e->pos -= n + 1;
    d->count = n + 1;
    d->used = 0;
    d->drafted += n;
    return next_row(e, d);
}
