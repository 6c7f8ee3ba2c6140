/* gr_sample.c: logits become a token id.
 *
 * Order: bias, bans, repetition penalty (gr_adjust.c), rows without a token; then greedy, or
 * temperature, top-k, softmax, top-p, min-p and one PCG32 draw. Candidates are ordered by logit
 * descending, then id ascending (NUMERICS S1); sums run over ids ascending, or over candidates in
 * that order, in double. The vocabulary is never sorted as a whole: a heap gives the candidates one
 * by one.
 * All scratch is in the arena: GB_BUF_CAND (ids) and GB_BUF_SEEN (a bit per row). */
#include <string.h>

#include "gr_ctx.h"
#include "gr_kern.h"

typedef struct pool {
    const float *logits;
    uint32_t *ids; /* ids[0..count) is a heap; popped ids stand behind it, the best one last */
    uint32_t count;
    float best, temperature;
} pool;

void gr_rng_seed(gr_rng *r, uint64_t seed)
{
    r->inc = 0xda3e39cb94b95bdbu; /* PCG32's default stream, odd */
    r->state = (r->inc + seed) * 6364136223846793005u + r->inc;
}

static uint32_t draw(gr_rng *r)
{
    uint64_t s = r->state;
    r->state = s * 6364136223846793005u + r->inc;
    uint32_t x = (uint32_t)((s >> 18 ^ s) >> 27), turn = (uint32_t)(s >> 59);
    return x >> turn | x << (-turn & 31);
}

static bool ranks_before(const float *logits, uint32_t a, uint32_t b)
{
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

/* Restore the heap below `at`: best first, or the worst first with `worst`. */
static void sift(const float *logits, uint32_t *ids, uint32_t count, uint32_t at, bool worst)
{
    uint32_t moved = ids[at];
    for (uint32_t child = 2 * at + 1; child < count; child = 2 * at + 1) {
        if (child + 1 < count && ranks_before(logits, ids[child + 1], ids[child]) != worst)
            child++;
        if (ranks_before(logits, ids[child], moved) == worst)
            break;
        ids[at] = ids[child];
        at = child;
    }
    ids[at] = moved;
}

static void make_heap(const float *logits, uint32_t *ids, uint32_t count, bool worst)
{
    for (uint32_t i = count / 2; i-- > 0;)
        sift(logits, ids, count, i, worst);
}

/* Move the best id behind the heap and return it. */
static uint32_t pop(pool *p)
{
    uint32_t best = p->ids[0];
    p->ids[0] = p->ids[--p->count];
    p->ids[p->count] = best;
    if (p->count > 0)
        sift(p->logits, p->ids, p->count, 0, false);
    return best;
}

static bool may_be_sampled(const gr_engine *e, const float *logits, uint32_t id)
{
    return gr_finite(logits[id]) && !(gr_tok_flags(&e->v.tok, id) & GB_TOKEN_UNUSED);
}

/* The top_k best ids, ascending by id, or all of them. */
static uint32_t choose(const gr_engine *e, const float *logits, uint32_t rows, uint32_t top_k,
                       uint32_t *ids)
{
    uint32_t count = 0, most = top_k == 0 || top_k > rows ? rows : top_k;
    for (uint32_t id = 0; id < rows; id++) {
        if ((count == most && !ranks_before(logits, id, ids[0])) ||
            !may_be_sampled(e, logits, id))
            continue;
        if (count < most) {
            ids[count++] = id;
            if (count == most && most < rows)
                make_heap(logits, ids, count, true);
        } else {
            ids[0] = id;
            sift(logits, ids, count, 0, true);
        }
    }
    if (count < most || most == rows)
        return count; /* no heap was made, they stand in order */
    uint32_t worst = ids[0], kept = 0;
    for (uint32_t id = 0; id < rows; id++)
        if (!ranks_before(logits, worst, id) && may_be_sampled(e, logits, id))
            ids[kept++] = id;
    return kept;
}

/* Not normalised: 1 for the best. */
static float weight(const pool *p, uint32_t id)
{
    return gr_expf((p->logits[id] - p->best) / p->temperature);
}

static uint32_t pick(pool *p, const gemrun_request *q, gr_rng *rng)
{
    uint32_t all = p->count;
    double total = 0, mass = 0;
    for (uint32_t i = 0; i < all; i++)
        total += (double)weight(p, p->ids[i]);
    make_heap(p->logits, p->ids, all, false);
    bool cut = q->top_p < 1.0f || q->min_p > 0.0f;
    while (cut && p->count > 0 && mass < (double)q->top_p * total) {
        float w = weight(p, p->ids[0]);
        if (w < q->min_p && mass > 0)
            break;
        mass += (double)w;
        pop(p);
    }
    uint32_t kept = cut ? all - p->count : all, id = 0;
    double target = (double)draw(rng) / 4294967296.0 * (cut ? mass : total), sum = 0;
    for (uint32_t i = 0; i < kept; i++) {
        id = i < all - p->count ? p->ids[all - 1 - i] : pop(p);
        sum += (double)weight(p, id);
        if (sum > target)
            break;
    }
    return id;
}

gemrun_status gr_sample(gr_engine *e, const gemrun_request *q, gr_rng *rng, uint32_t *out_id)
{
    float *logits = (float *)(void *)e->buf[GB_BUF_LOGITS];
    uint32_t rows = e->v.conf.vocab_rows, best = UINT32_MAX;
    for (uint32_t i = 0; i < rows && !e->screened; i++) /* before anything could hide it (O20) */
        if (!gr_finite(logits[i]))
            return gr_fail(&e->err, GEMRUN_E_NONFINITE, 0, 0, i);
    gemrun_status st = gr_adjust(e, q, logits, rows);
    if (st != GEMRUN_OK)
        return st;
    for (uint32_t id = 0; id < rows; id++)
        if ((best == UINT32_MAX || logits[id] > logits[best]) && may_be_sampled(e, logits, id))
            best = id;
    if (best == UINT32_MAX) /* everything is banned */
        return gr_fail(&e->err, GEMRUN_E_SAMPLING, 0, rows, q->banned_count);
    *out_id = best;
    if (q->temperature > 0) {
        uint32_t *ids = (uint32_t *)(void *)e->buf[GB_BUF_CAND];
        pool p = {logits, ids, 0, logits[best], q->temperature};
        p.count = choose(e, logits, rows, q->top_k, ids);
        *out_id = pick(&p, q, rng);
    }
    return GEMRUN_OK;
}
