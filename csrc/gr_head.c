/* gr_head.c: the residual stream of one token becomes logits, as NUMERICS.md writes it down.
 *
 * The final norm is a serial step; then the rows are cut into units of 32, which the threads share
 * out. gr_planes.c does it with fewer bytes where only the best tokens are wanted. */
#include "gr_ctx.h"
#include "gr_model.h"

void gr_tell(const gr_engine *e, uint32_t step, uint32_t at)
{
    if (e->ahead)
        e->ahead(e, step, at);
}

static void find_weights(gr_head *h)
{
    const gb_tensor *t = &h->e->v.tensors[h->e->v.conf.tens_head];
    h->m = gr_matrix(&h->e->v, t);
    h->xn = gr_input_of(h->e, GB_BUF_XN, t);
}

/* The final norm of x, kept by the engine `o`; NULL: it is there. -> row of the head's input. */
static void final_norm(gr_head *h, gr_engine *o, const float *x, uint32_t row)
{
    const gr_kernels *k = h->e->kern;
    const gr_view *v = &h->e->v;
    uint32_t hidden = v->conf.hidden;
    float *y = (float *)(void *)o->buf[GB_BUF_HIDDEN];
    bool ok = !x || k->norm(x, gr_vector(v, &v->tensors[v->conf.tens_final_norm]), hidden,
                            v->conf.norm_eps, y);
    ok &= k->act(y, &h->xn, row, 0, hidden);
    o->bad[GB_MAX_THREADS] |= !ok;
}

static float *logits_at(const gr_engine *o, uint32_t panel)
{
    return (float *)(void *)o->buf[GB_BUF_LOGITS] + (size_t)GB_PANEL * panel;
}

static void end_rows(const gr_head *h, gr_engine *o, float *z, uint32_t rows, uint32_t thread)
{
    const gr_engine *e = h->e;
    o->bad[thread] |= !e->kern->finite(z, rows);
    if (e->v.conf.flags & GB_CONFF_FINAL_SOFTCAP)
        e->kern->softcap(z, rows, e->v.conf.final_softcap);
}

static void begin(void *arg)
{
    gr_head *h = arg;
    find_weights(h);
    final_norm(h, h->e, h->x, 0);
    h->e->screened = gr_planes_begin(h);
}

void gr_head_rows(gr_head *h, uint32_t panel, uint32_t rows, uint32_t thread)
{
    float *z = logits_at(h->e, panel);
    gr_multiply(h->e, &h->m, &h->xn, panel, 0, 1, rows, z, rows);
    end_rows(h, h->e, z, rows, thread);
}

static void every_row(void *arg, gr_range units, uint32_t thread)
{
    gr_head *h = arg;
    uint32_t all = h->e->v.conf.vocab_rows;
    for (uint32_t u = units.from; u < units.to; u++) {
        gr_tell(h->e, GB_OP_HEAD, u);
        gr_head_rows(h, 2 * u, gr_least(GB_UNIT, all - GB_UNIT * u), thread);
    }
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

/* ---- several engines: the weights are read once for all ---- */

static void begin_share(void *arg)
{
    gr_head *h = arg;
    find_weights(h);
    for (uint32_t i = 0; i < h->count; i += h->of[i]->rows) {
        gr_engine *o = h->of[i];
        size_t last = i + o->rows - 1;
        o->screened = false;
        if (o->wanted)
            final_norm(h, o, h->x + last * h->e->v.conf.hidden, h->rows++);
    }
}

static void every_row_share(void *arg, gr_range units, uint32_t thread)
{
    enum { SOME = 128 };
    gr_head *h = arg;
    uint32_t all = h->e->v.conf.vocab_rows;
    float y[SOME * GB_UNIT];
    for (uint32_t u = units.from; u < units.to; u++) {
        uint32_t rows = gr_least(GB_UNIT, all - GB_UNIT * u), n = 0;
        gr_tell(h->e, GB_OP_HEAD, u);
        for (uint32_t i = 0; i < h->count; i += h->of[i]->rows) {
            if (!h->of[i]->wanted)
                continue;
            if (n % SOME == 0)
                gr_multiply(h->e, &h->m, &h->xn, 2 * u, n, gr_least(SOME, h->rows - n), rows, y,
                            GB_UNIT);
            float *z = logits_at(h->of[i], 2 * u);
            memcpy(z, y + n++ % SOME * GB_UNIT, rows * sizeof *z);
            end_rows(h, h->of[i], z, rows, thread);
        }
    }
}

void gr_head_share(gr_head *h, uint32_t thread, uint32_t threads)
{
    uint32_t units = (h->e->v.conf.vocab_rows + GB_UNIT - 1) / GB_UNIT;
    gr_team_barrier(h->e->team, begin_share, h);
    if (h->rows > 0)
        gr_split(h->e, units, every_row_share, h, thread, threads);
}

static void alone(void *arg, uint32_t thread, uint32_t threads)
{
    gr_head_part(arg, thread, threads);
}

bool gr_head_row(gr_engine *e, const float *x)
{
    gr_head h = {.e = e, .x = x};
    memset(e->bad, 0, sizeof e->bad);
    gr_team_run(e->team, gr_step_threads(e, e->decode_threads), alone, &h);
    return !gr_bad(e);
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
