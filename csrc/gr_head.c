/* gr_head.c: the residual stream of one token becomes logits, as NUMERICS.md writes it down.
 *
 * The final norm is a serial step; then the rows are cut into units of 32, of which a thread takes
 * a contiguous share. */
#include "gr_model.h"

static void begin(void *arg) /* the final norm */
{
    gr_head *h = arg;
    gr_engine *e = h->e;
    const gr_view *v = &e->v;
    uint32_t hidden = v->conf.hidden;
    float *y = (float *)(void *)e->buf[GB_BUF_HIDDEN];
    h->xn = gr_input_of(e, GB_BUF_XN, &v->tensors[v->conf.tens_head]);
    bool ok = e->kern->norm(h->x, gr_vector(v, &v->tensors[v->conf.tens_final_norm]), hidden,
                            v->conf.norm_eps, y);
    ok &= e->kern->act(y, &h->xn, 0, 0, hidden);
    h->bad[GB_MAX_THREADS] |= !ok;
}

void gr_head_part(gr_head *h, uint32_t thread, uint32_t threads)
{
    const gr_engine *e = h->e;
    const gb_conf *conf = &e->v.conf;
    gr_team_barrier(e->team, begin, h);
    gr_mat m = gr_matrix(&e->v, &e->v.tensors[conf->tens_head]);
    gr_range r = gr_share((conf->vocab_rows + GB_UNIT - 1) / GB_UNIT, thread, threads);
    for (uint32_t u = r.from; u < r.to; u++) {
        uint32_t rows = gr_least(GB_UNIT, conf->vocab_rows - GB_UNIT * u);
        float *z = (float *)(void *)e->buf[GB_BUF_LOGITS] + (size_t)GB_UNIT * u;
        gr_multiply(e, &m, &h->xn, 2 * u, 0, 1, rows, z, GB_UNIT);
        h->bad[thread] |= !e->kern->finite(z, rows);
        if (conf->flags & GB_CONFF_FINAL_SOFTCAP)
            e->kern->softcap(z, rows, conf->final_softcap);
    }
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

bool gr_heads(gr_engine *e, const float *x, uint32_t count, gemrun_logits_fn fn, void *user)
{
    const gb_conf *conf = &e->v.conf;
    const float *z = (const float *)(const void *)e->buf[GB_BUF_LOGITS];
    bool good = true, stop = false;
    for (uint32_t t = 0; t < count && good; t++) {
        if (stop)
            t = count - 1;
        gr_head h = {.e = e, .x = x + (size_t)t * conf->hidden};
        gr_team_run(e->team, e->decode_threads, alone, &h);
        good = !gr_head_bad(&h);
        if (good && !stop)
            stop = fn(user, e->pos + t, z, conf->vocab_rows) != 0;
    }
    return good;
}
