/* gr_tok_check.c: the rules inside the tables of a TOKN section (TOKENS.md), checked once at open.
 * Not part of a GR_MINIMAL build, which does not read these tables. */
#include "gr_tok.h"

#define NONE GB_TOK_NONE
#define LAST_CP 0x10FFFFu

static bool bad_id(const gr_tok *t, uint64_t id)
{
    return id >= t->h->vocab || (t->flags[id] & GB_TOKEN_UNUSED) != 0;
}

/* An id that content may become: a token, and not a control token. */
static bool bad_plain(const gr_tok *t, uint64_t id)
{
    return bad_id(t, id) || (t->flags[id] & GB_TOKEN_CONTROL) != 0;
}

static bool unsorted(const uint64_t *a, uint32_t first, uint32_t end, unsigned shift)
{
    for (uint32_t i = first + 1; i < end; i++)
        if (a[i - 1] >> shift >= a[i] >> shift)
            return true;
    return false;
}

static int check_merges(const gr_tok *t)
{
    uint32_t n = t->h->n_merge;
    if (t->merge_first[0] != 0 || t->merge_first[t->h->vocab] != n)
        return GR_TOK_E_MERGE;
    for (uint32_t left = 0; left < t->h->vocab; left++) {
        uint32_t first = t->merge_first[left], end = t->merge_first[left + 1];
        if (end < first || end > n || unsorted(t->merges, first, end, GB_MERGE_RIGHT))
            return GR_TOK_E_MERGE;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint64_t e = t->merges[i];
        if (bad_id(t, e >> GB_MERGE_RIGHT) || bad_plain(t, GB_MERGE_NEW(e)))
            return GR_TOK_E_ID;
        if (GB_MERGE_RANK(e) >= n)
            return GR_TOK_E_MERGE;
    }
    return GR_TOK_OK;
}

static int check_ids(const gr_tok *t)
{
    const struct gb_tokn *h = t->h;
    bool bad = (h->bos != NONE && bad_id(t, h->bos)) || (h->unk != NONE && bad_id(t, h->unk))
               || ((h->flags & GB_TOKF_ADD_BOS) && h->bos == NONE);
    for (uint32_t i = 0; i < 256; i++)
        bad = bad || (t->byte_id[i] != NONE && bad_plain(t, t->byte_id[i]));
    for (uint32_t i = 0; i < h->n_char; i++)
        bad = bad || bad_plain(t, (uint32_t)t->chars[i]);
    for (uint32_t i = 0; i < h->n_whole; i++)
        bad = bad || bad_plain(t, t->whole[i]);
    for (uint32_t i = 0; i < h->n_stop; i++)
        bad = bad || bad_id(t, t->stop[i]) || (i > 0 && t->stop[i] <= t->stop[i - 1]);
    if (bad)
        return GR_TOK_E_ID;
    return unsorted(t->chars, 0, h->n_char, GB_KEY) ? GR_TOK_E_ORDER : GR_TOK_OK;
}

static int check_trie(const gr_tok *t)
{
    uint32_t n = t->h->n_node;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t first = t->nodes[i].first;
        uint32_t end = i + 1 < n ? t->nodes[i + 1].first : n - 1;
        uint32_t id = t->nodes[i].id;
        if (first > end || end > n - 1 || (i == 0 && (first != 0 || id != NONE))
            || (first < end && first < i)) /* an edge never leads back, so every walk ends */
            return GR_TOK_E_TRIE;
        for (uint32_t k = first + 1; k < end; k++)
            if (t->edges[k] <= t->edges[k - 1])
                return GR_TOK_E_TRIE;
        if (id != NONE && bad_id(t, id))
            return GR_TOK_E_ID;
    }
    return GR_TOK_OK;
}

/* "From this code point on, this value": starts at 0, ascends, values below a limit. */
static bool bad_ranges(const uint64_t *r, uint32_t n, uint32_t values)
{
    bool bad = n == 0 || r[0] >> GB_KEY != 0 || unsorted(r, 0, n, GB_KEY);
    for (uint32_t i = 0; i < n; i++)
        bad = bad || (uint32_t)r[i] >= values;
    return bad;
}

static int check_split(const gr_tok *t)
{
    const struct gb_tokn *h = t->h;
    uint64_t at = 0;
    bool bad = h->n_stage > 0 && bad_ranges(t->ranges, h->n_range, h->n_class);
    for (uint32_t s = 0; s < h->n_stage && !bad; s++) {
        const struct gb_stage *g = &t->stages[s];
        uint64_t end = at + (uint64_t)g->states * (h->n_class + 1);
        bad = g->first != at || g->states < 2 || g->states > GB_TOK_MAX_STATE || end > h->n_cell;
        for (; at < end && !bad; at++)
            bad = (t->cells[at] & GB_CELL_STATE) >= g->states;
    }
    return bad || at != h->n_cell ? GR_TOK_E_SPLIT : GR_TOK_OK;
}

static int check_nfc(const gr_tok *t)
{
    const struct gb_tokn *h = t->h;
    bool bad = unsorted(t->decomp, 0, h->n_decomp, GB_KEY)
               || unsorted(t->comp, 0, h->n_comp, GB_COMP_PAIR);
    if ((h->flags & GB_TOKF_NFC) == 0)
        return h->n_decomp + h->n_decomp_cp + h->n_comp + h->n_ccc ? GR_TOK_E_NFC : GR_TOK_OK;
    for (uint32_t i = 0, at = 0; i < h->n_decomp; i++) {
        uint32_t end = i + 1 < h->n_decomp ? (uint32_t)t->decomp[i + 1] : h->n_decomp_cp;
        bad = bad || (uint32_t)t->decomp[i] != at || end <= at || end > h->n_decomp_cp;
        at = end;
    }
    for (uint32_t i = 0; i < h->n_decomp_cp; i++)
        bad = bad || t->decomp_cp[i] > LAST_CP;
    for (uint32_t i = 0; i < h->n_comp; i++)
        bad = bad || GB_COMP_TO(t->comp[i]) > LAST_CP;
    return bad || bad_ranges(t->ccc, h->n_ccc, 256) ? GR_TOK_E_NFC : GR_TOK_OK;
}

int gr_tok_check(const gr_tok *t)
{
    static int (*const checks[])(const gr_tok *) = {check_merges, check_ids, check_trie,
                                                    check_split, check_nfc};
    int error = GR_TOK_OK;
    for (size_t i = 0; error == GR_TOK_OK && i < sizeof checks / sizeof checks[0]; i++)
        error = checks[i](t);
    return error;
}
