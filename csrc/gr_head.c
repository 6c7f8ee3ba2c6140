/* gr_head.c: the residual stream of one token becomes logits, as NUMERICS.md writes it down.
 *
 * The final norm is a serial step; then the rows are cut into units of 32, which the threads share
 * out. gr_planes.c does it with fewer bytes where only the best tokens are wanted. */
#include "gr_ctx.h"
#include "gr_model.h"

static void begin(void *arg) /* the final norm */
{
    gr_head *h = arg;
    gr_engine *e = h->e;
    const gr_view *v = &e->v;
    uint32_t hidden = v->conf.hidden;
    float *y = (float *)(void *)e->buf[GB_BUF_HIDDEN];
    h->m = gr_matrix(v, &v->tensors[v->conf.tens_head]);
    h->xn = gr_input_of(e, GB_BUF_XN, &v->tensors[v->conf.tens_head]);
    bool ok = !h->x || e->kern->norm(h->x, gr_vector(v, &v->tensors[v->conf.tens_final_norm]),
                                     hidden, v->conf.norm_eps, y);
    ok &= e->kern->act(y, &h->xn, 0, 0, hidden);
    h->bad[GB_MAX_THREADS] |= !ok;
    e->screened = gr_planes_begin(h);
}

void gr_head_rows(gr_head *h, uint32_t panel, uint32_t rows, uint32_t thread)
{
    const gr_engine *e = h->e;
    float *z = (float *)(void *)e->buf[GB_BUF_LOGITS] + (size_t)GB_PANEL * panel;
    gr_multiply(e, &h->m, &h->xn, panel, 0, 1, rows, z, rows);
    h->bad[thread] |= !e->kern->finite(z, rows);
    if (e->v.conf.flags & GB_CONFF_FINAL_SOFTCAP)
        e->kern->softcap(z, rows, e->v.conf.final_softcap);
}

static void every_row(void *arg, gr_range units, uint32_t thread)
{
    gr_head *h = arg;
    uint32_t all = h->e->v.conf.vocab_rows;
    for (uint32_t u = units.from; u < units.to; u++)
        gr_head_rows(h, 2 * u, gr_least(GB_UNIT, all - GB_UNIT * u), thread);
}

void gr_head_part(gr_head *h, uint32_t thread, uint32_t threads)
{
    const gr_engine *e = h->e;
    uint32_t units = (e->v.conf.vocab_rows + GB_UNIT - 1) / GB_UNIT;
    gr_team_barrier(e->team, begin, h);
    if (e->screened)
        gr_planes_part(h, thread, threads);
    else
        gr_split(e, units, every_row, h, thread, threads);
}

bool gr_head_bad(const gr_head *h)
{
    bool bad = false;
    for (uint32_t i = 0; i <= GB_MAX_THREADS; i++)
        bad |= h->bad[i];
    return bad;
}

static void alone(void *arg, uint32_t thread, uint32_t threads)
{
    gr_head_part(arg, thread, threads);
}

bool gr_head_row(gr_engine *e, const float *x)
{
    gr_head h = {.e = e, .x = x};
    gr_team_run(e->team, gr_step_threads(e, e->decode_threads), alone, &h);
    return !gr_head_bad(&h);
}

bool gr_heads(gr_engine *e, const float *x, uint32_t count, gemrun_logits_fn fn, void *user)
{
    const gb_conf *conf = &e->v.conf;
    const float *z = (const float *)(const void *)e->buf[GB_BUF_LOGITS];
    bool good = true, stop = false;
    for (uint32_t t = 0; t < count && good; t++) {
        if (stop)
            t = count - 1;
        good = gr_head_row(e, x + (size_t)t * conf->hidden);
        if (good && !stop)
            stop = fn(user, e->pos + t, z, conf->vocab_rows) != 0;
    }
    return good;
}

bool gr_head_all(gr_engine *e)
{
    return !e->screened || gr_head_row(e, NULL);
}
