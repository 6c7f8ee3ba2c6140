/* gr_planes.c: the head where only the best tokens are wanted (NUMERICS.md, 6.1).
 *
 * The high plane gives every row a score and a bound. Exact logits of the best by score set a bar;
 * rows whose bound does not reach it are out. The others' scores become better with the low nibbles
 * of the inputs that weigh most, until they are out too, or their panel is computed in full. Exact
 * logits come from the same product as in the full head. Not part of a GR_MINIMAL build. */
#include "gr_ctx.h"
#include "gr_model.h"

enum {
    LINE = 256, /* bytes of a plane with a group of a panel */
    GROUPS = 512 /* a wider head is computed in full */
};
#define FORCED gr_float(GR_EXPONENT) /* infinity: a bound that reaches any bar */

void gr_take_head(gemrun_context_t *ctx, const gemrun_config *q)
{
    const gr_view *v = &ctx->e.v;
    const gb_tensor *t = &v->tensors[v->conf.tens_head];
    bool fits = v->segments[t->seg_first].format == GB_FMT_Q8_ROWS &&
                t->cols_padded <= GB_GROUP * GROUPS;
    ctx->planes.margin = GR_MARGIN;
    ctx->planes.most = q->head == GEMRUN_HEAD_TWO_PLANE ? GR_KEEP : 1; /* by default greedy only */
    ctx->e.planes = fits && q->head != GEMRUN_HEAD_FULL ? &ctx->planes : NULL;
}

static float *logits_of(const gr_head *h, uint32_t panel)
{
    return (float *)(void *)h->e->buf[GB_BUF_LOGITS] + (size_t)GB_PANEL * panel;
}

static uint32_t rows_of(const gr_head *h, uint32_t panel)
{
    return gr_least(GB_PANEL, h->e->v.conf.vocab_rows - GB_PANEL * panel);
}

static float magnitude(float x)
{
    return x < 0 ? -x : x;
}

/* How many rows may reach the bar: score z, super-scale s, and what is not yet known. A NaN may. */
static uint32_t reaching(const gr_planes *p, const float *z, const float *s, uint32_t step,
                         uint32_t rows)
{
    uint32_t n = 0;
    for (uint32_t r = 0; r < rows; r++)
        n += !(z[r] + magnitude(s[r]) * p->reach[step] < p->bar);
    return n;
}

static bool precedes(float z, uint32_t row, const gr_ranked *b)
{
    return z > b->z || (z == b->z && row < b->row);
}

static void rank(gr_ranking *best, float z, uint32_t row)
{
    gr_ranked *at = best->at;
    uint32_t i = best->count < best->most ? best->count++ : best->most - 1; /* the last goes */
    for (; i > 0 && precedes(z, row, &at[i - 1]); i--)
        at[i] = at[i - 1];
    at[i] = (gr_ranked){z, row};
}

/* Would a row be among the best? Rows without a token never are. */
static bool ranks(const gr_head *h, const gr_ranking *best, float z, uint32_t row)
{
    return (best->count < best->most || precedes(z, row, &best->at[best->most - 1])) &&
           !(gr_tok_flags(&h->e->v.tok, row) & GB_TOKEN_UNUSED);
}

/* ---- serial steps ---- */

/* The groups of inputs with most energy, in that order, and how far what is left can reach. */
static void weigh_inputs(gr_planes *p, const gr_act *a)
{
    const float spread = p->margin * 0x1.270682p+2f; /* sqrt(255 / 12): low nibbles around 7.5 */
    float energy[GROUPS], left = 0.0f, centre = 0.0f;
    for (uint32_t g = 0; g < a->groups; g++) {
        int32_t squares = 0;
        for (uint32_t i = GB_GROUP * g; i < GB_GROUP * (g + 1); i++)
            squares += a->codes[i] * a->codes[i];
        energy[g] = (a->sa[g] * a->sa[g]) * (float)squares;
        left += energy[g];
        centre = gr_fmaf(a->sa[g], (float)a->asum[g], centre);
    }
    const float least = left / 16.0f; /* rounding errors stay far below what this reaches */
    p->centre = 7.5f * centre;
    p->reach[0] = spread * gr_sqrtf(left);
    for (p->steps = 0; p->steps < GR_STEPS; p->steps++) {
        uint32_t g = 0;
        for (uint32_t k = 1; k < a->groups; k++)
            g = energy[k] > energy[g] ? k : g;
        left -= energy[g];
        energy[g] = 0.0f;
        if (!(left > least))
            break;
        p->group[p->steps] = g;
        p->reach[p->steps + 1] = spread * gr_sqrtf(left);
    }
}

bool gr_planes_begin(gr_head *h)
{
    gr_planes *p = h->e->planes;
    const gemrun_request *q = p ? p->request : NULL;
    uint32_t keep = !q ? 0 : q->temperature > 0 ? q->top_k : 1;
    if (keep == 0 || keep > p->most)
        return false;
    p->keep = keep;
    for (uint32_t i = 0; i < GB_MAX_THREADS; i++)
        p->best[i] = (gr_ranking){.most = keep < 8 ? 16 : 2 * keep};
    atomic_store(&p->found, 0);
    weigh_inputs(p, &h->xn);
    return true;
}

/* A row whose logit the request will change is computed, whatever its score. */
static void force(const gr_head *h, const uint32_t *ids, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (ids[i] < h->e->v.conf.vocab_rows)
            logits_of(h, 0)[ids[i]] = FORCED;
}

/* The exact logit that as many rows reach as are wanted: of the best by score, each. */
static void set_bar(void *arg)
{
    gr_head *h = arg;
    gr_planes *p = h->e->planes;
    const gemrun_request *q = p->request;
    gr_ranking *pool = &p->best[0], exact = {.most = GR_POOL};
    force(h, q->banned, q->banned_count);
    force(h, q->bias_ids, q->bias_count);
    if (q->repetition_penalty != 1.0f) { /* tokens of the context, and those of this step */
        force(h, (const uint32_t *)(const void *)h->e->buf[GB_BUF_IDS], h->e->pos);
        force(h, h->ids, h->ids ? h->count : 0);
    }
    for (uint32_t k = 1; k < GB_MAX_THREADS; k++)
        for (uint32_t i = 0; i < p->best[k].count; i++)
            if (ranks(h, pool, p->best[k].at[i].z, p->best[k].at[i].row))
                rank(pool, p->best[k].at[i].z, p->best[k].at[i].row);
    for (uint32_t i = 0; i < pool->count; i++) {
        uint32_t row = pool->at[i].row, panel = row / GB_PANEL;
        float y[GB_PANEL];
        if (!(logits_of(h, 0)[row] < FORCED))
            continue;
        gr_multiply(h->e, &h->m, &h->xn, panel, 0, 1, rows_of(h, panel), y, GB_PANEL);
        h->e->bad[GB_MAX_THREADS] |= !h->e->kern->finite(y, rows_of(h, panel));
        rank(&exact, y[row % GB_PANEL], row);
    }
    p->bar = exact.count < p->keep ? -FLT_MAX : exact.at[p->keep - 1].z;
}

static void count(void *arg)
{
    gr_planes *p = ((gr_head *)arg)->e->planes;
    uint32_t found = atomic_load(&p->found);
    p->heads++;
    p->candidates += found;
    p->most_candidates = found > p->most_candidates ? found : p->most_candidates;
}

/* ---- shares of a thread ---- */

/* How far rows reach, to LOGITS, and the best by score. Super-scales lie far apart: they are read
 * here, and hardly again. */
static void score(void *arg, gr_range units, uint32_t thread)
{
    gr_head *h = arg;
    gr_planes *p = h->e->planes;
    gr_mat m = h->m;
    m.low = NULL;
    for (uint32_t u = units.from; u < units.to; u++) {
        uint32_t first = GB_UNIT * u, rows = gr_least(GB_UNIT, h->e->v.conf.vocab_rows - first);
        float *z = logits_of(h, 0) + first, super;
        gr_tell(h->e, GR_SCORES, u);
        gr_multiply(h->e, &m, &h->xn, first / GB_PANEL, 0, 1, rows, z, GB_UNIT);
        h->e->bad[thread] |= !h->e->kern->finite(z, rows);
        for (uint32_t r = 0; r < rows; r++) {
            memcpy(&super, m.data + m.panel * ((first + r) / GB_PANEL) + 4 * (r % GB_PANEL), 4);
            z[r] += super * p->centre;
            if (ranks(h, &p->best[thread], z[r], first + r))
                rank(&p->best[thread], z[r], first + r);
            z[r] += magnitude(super) * p->reach[0];
        }
    }
}

/* Do rows of a panel still reach the bar, as the low nibbles of group after group come in? */
static bool survives(const gr_head *h, uint32_t panel)
{
    static const gb_segment part = {.format = GB_FMT_Q8_ROWS, .group_count = 1};
    const gr_planes *p = h->e->planes;
    _Alignas(64) uint8_t copy[GB_LINE + LINE]; /* a panel whose super-scales are 1 */
    gr_mat one = {.data = copy, .seg = &part, .seg_count = 1, .panel = sizeof copy,
                  .cols = GB_GROUP, .groups = 1};
    float z[GB_PANEL], y[GB_PANEL], super[GB_PANEL];
    memcpy(super, h->m.data + h->m.panel * panel, sizeof super);
    for (uint32_t r = 0; r < GB_PANEL; r++)
        y[r] = 1.0f;
    memcpy(copy, y, sizeof y);
    for (uint32_t r = 0; r < GB_PANEL; r++)
        z[r] = logits_of(h, panel)[r] - magnitude(super[r]) * p->reach[0];
    for (uint32_t s = 0; s < p->steps; s++) {
        uint32_t g = p->group[s];
        gr_act a = {.codes = h->xn.codes + (size_t)GB_GROUP * g, .sa = h->xn.sa + g,
                    .asum = h->xn.asum + g, .cols = GB_GROUP, .groups = 1};
        float half = 0.5f * *a.sa * (float)*a.asum;
        memcpy(copy + GB_LINE, h->m.low + LINE * ((size_t)h->m.groups * panel + g), LINE);
        h->e->kern->gemv(&one, &a, 0, 0, 1, GB_PANEL, y, GB_PANEL);
        for (uint32_t r = 0; r < GB_PANEL; r++) /* y: 16 times the low nibbles around 8 */
            z[r] += super[r] * (0.0625f * y[r] + half);
        if (reaching(p, z, super, s + 1, rows_of(h, panel)) == 0)
            return false;
    }
    return true;
}

/* What reaches the bar is computed, the rest becomes minus infinity. */
static void settle(gr_head *h, uint32_t thread, uint32_t threads)
{
    gr_planes *p = h->e->planes;
    uint32_t all = 0;
    for (uint32_t panel = thread; GB_PANEL * panel < h->e->v.conf.vocab_rows; panel += threads) {
        uint32_t rows = rows_of(h, panel), found = 0;
        float *u = logits_of(h, panel);
        gr_tell(h->e, GR_ROWS, panel);
        for (uint32_t r = 0; r < rows; r++)
            found += !(u[r] < p->bar);
        all += found;
        if (found > 0 && survives(h, panel)) {
            gr_head_rows(h, panel, rows, thread);
            continue;
        }
        for (uint32_t r = 0; r < rows; r++)
            u[r] = -FORCED;
    }
    atomic_fetch_add(&p->found, all);
}

void gr_planes_part(gr_head *h, uint32_t thread, uint32_t threads)
{
    uint32_t units = (h->e->v.conf.vocab_rows + GB_UNIT - 1) / GB_UNIT;
    gr_split(h->e, units, score, h, thread, threads);
    gr_team_barrier(h->e->team, set_bar, h);
    settle(h, thread, threads);
    gr_team_barrier(h->e->team, count, h);
}
