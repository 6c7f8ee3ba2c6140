/* gr_adjust.c: what a request changes in the logits before a token is sampled, and the check of its
 * lists. Not part of a GR_MINIMAL build, which refuses such requests. */
#include <string.h>

#include "gr_ctx.h"
#include "gr_kern.h"

/* ---- the lists of a request ---- */

static bool is_text(const char *s, size_t least, size_t most)
{
    size_t n = 0;
    while (n <= most && s[n] != 0)
        n++;
    for (size_t i = 0, used; i < n; i += used) {
        uint32_t cp;
        bool cut;
        used = gr_utf8_next((const uint8_t *)s + i, n - i, &cp, &cut);
        if (cp == 0xFFFD && (cut || used != 3 || (uint8_t)s[i] != 0xEF))
            return false;
    }
    return n >= least && n <= most;
}

gemrun_status gr_check_lists(gr_engine *e, const gemrun_request *q)
{
    uint32_t rows = e->v.conf.vocab_rows;
    const uint32_t counts[] = {q->banned_count, q->bias_count, q->stop_string_count};
    const uint32_t most[] = {GR_MAX_LIST, GR_MAX_LIST, GR_MAX_STOPS};
    for (uint32_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
        if (counts[i] > most[i])
            return gr_fail(&e->err, GEMRUN_E_ARGUMENT, GR_F_BANNED_COUNT + i, most[i], counts[i]);
    if ((q->banned_count && !q->banned) || (q->stop_string_count && !q->stop_strings) ||
        (q->bias_count && (!q->bias_ids || !q->bias_values)))
        return gr_fail(&e->err, GEMRUN_E_ARGUMENT, GR_F_NONE, 0, 0);
    for (uint32_t i = 0; i < q->banned_count; i++)
        if (q->banned[i] >= rows)
            return gr_fail(&e->err, GEMRUN_E_TOKEN, GR_F_BANNED, rows - 1, q->banned[i]);
    for (uint32_t i = 0; i < q->bias_count; i++) {
        if (q->bias_ids[i] >= rows)
            return gr_fail(&e->err, GEMRUN_E_TOKEN, GR_F_BIAS_ID, rows - 1, q->bias_ids[i]);
        if (!(q->bias_values[i] - q->bias_values[i] == 0.0f))
            return gr_fail(&e->err, GEMRUN_E_SAMPLING, GR_F_BIAS_VALUE, 0, i);
    }
    for (uint32_t i = 0; i < q->stop_string_count; i++)
        if (!q->stop_strings[i] || !is_text(q->stop_strings[i], 1, GR_MAX_STOP))
            return gr_fail(&e->err, GEMRUN_E_ARGUMENT, GR_F_STOP, GR_MAX_STOP, i);
    return GEMRUN_OK;
}

/* ---- bias, bans, repetition penalty ---- */

/* Bits of minus infinity: what a ban writes. No arithmetic is done with it. */
static const uint32_t MINUS_INFINITY = 0xff800000u;

static void ban(float *logit)
{
    memcpy(logit, &MINUS_INFINITY, sizeof *logit);
}

static bool seen_before(uint32_t *bits, uint32_t id)
{
    bool was = bits[id / 32] >> id % 32 & 1;
    bits[id / 32] |= (uint32_t)1 << id % 32;
    return was;
}

/* Every token of the context once: a positive logit is divided, a negative one multiplied. */
static gemrun_status penalise(gr_engine *e, float *logits, uint32_t rows, float penalty)
{
    const uint32_t *ids = (const uint32_t *)(const void *)e->buf[GB_BUF_IDS];
    uint32_t *seen = (uint32_t *)(void *)e->buf[GB_BUF_SEEN];
    memset(seen, 0, (rows + 31) / 32 * sizeof *seen);
    for (uint32_t i = 0; i < e->pos; i++) {
        if (ids[i] >= rows)
            continue; /* never written by a call; a second lock */
        float *l = logits + ids[i];
        if (!seen_before(seen, ids[i]) && gr_finite(*l)) {
            *l = *l > 0 ? *l / penalty : *l * penalty;
            if (!gr_finite(*l)) /* the logit was: it is the setting's fault */
                return gr_fail(&e->err, GEMRUN_E_SAMPLING, GR_F_PENALTY, 0, gr_bits(penalty));
        }
    }
    return GEMRUN_OK;
}

gemrun_status gr_adjust(gr_engine *e, const gemrun_request *q, float *logits, uint32_t rows)
{
    for (uint32_t i = 0; i < q->bias_count; i++)
        logits[q->bias_ids[i]] += q->bias_values[i];
    for (uint32_t i = 0; i < q->banned_count; i++)
        ban(logits + q->banned[i]);
    for (uint32_t i = 0; i < q->bias_count; i++) { /* a sum may have left the range */
        float l = logits[q->bias_ids[i]];
        if (!gr_finite(l) && l > 0)
            return gr_fail(&e->err, GEMRUN_E_SAMPLING, GR_F_BIAS_VALUE, 0, i);
    }
    return q->repetition_penalty == 1.0f ? GEMRUN_OK
                                         : penalise(e, logits, rows, q->repetition_penalty);
}
