/* Tokenizer: byte pair encoding over the tables of a TOKN section (TOKENS.md).
 *
 * Order of work: added tokens are cut out (trie, longest first), the text between them is put into
 * normal form C where the model wants it, split into words by automata, and every word is merged.
 * Merging keeps, per live symbol, the rank of its pair with the next one, and a tournament tree
 * over blocks of eight of them: the lowest rank, leftmost, is found in O(1) and replaced in
 * O(log n), so a word of any length takes n log n steps and 9 bytes per first symbol.
 *
 * It refuses to allocate, to recurse, and to trust anything that gr_tok_open has not checked. */
#include "gr_tok.h"

#include <string.h>

#define NONE GB_TOK_NONE
#define INSIDE 0x80000000u /* a symbol slot inside a longer symbol; the rest is that one's length */
#define BLOCK 8u           /* ranks per leaf of the tournament tree */
#define MAX_TEXT (1u << 29)

/* ---- opening ---- */

const void *gr_take(gr_cursor *c, uint64_t count, uint64_t size)
{
    uint64_t bytes = count * size; /* both below 2^33: no wrap */
    uint64_t end = c->at + bytes;
    uint64_t next = (end + 7u) & ~(uint64_t)7u;
    const uint8_t *p = c->base + c->at;
    if (c->error != GR_TOK_OK) {
        return NULL;
    }
    if (next > c->size) {
        c->error = GR_TOK_E_SIZE;
        return NULL;
    }
    for (uint64_t i = end; i < next; i++) {
        if (c->base[i] != 0) {
            c->error = GR_TOK_E_PADDING;
        }
    }
    c->at = next;
    return p;
}

static bool bad_id(const gr_tok *t, uint32_t id)
{
    return id >= t->h->vocab || (t->flags[id] & GB_TOKEN_UNUSED) != 0;
}

static int check_header(const struct gb_tokn *h)
{
    const uint32_t big = 1u << 24; /* no count of a real tokenizer comes near */
    const uint32_t counts[] = {h->n_merge, h->n_char,   h->n_whole,     h->n_node, h->n_range,
                               h->n_cell,  h->n_decomp, h->n_decomp_cp, h->n_comp, h->n_ccc};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        if (counts[i] >= big) {
            return GR_TOK_E_HEADER;
        }
    }
    for (size_t i = 0; i < sizeof h->reserved / sizeof h->reserved[0]; i++) {
        if (h->reserved[i] != 0) {
            return GR_TOK_E_HEADER;
        }
    }
    if ((h->kind != GB_TOK_SPM && h->kind != GB_TOK_BYTE) || (h->flags & ~(uint32_t)GB_TOKF_ALL)
        || h->vocab == 0 || h->vocab > GB_TOK_MAX_VOCAB || h->n_stop > GB_TOK_MAX_STOP
        || h->n_stage > GB_TOK_MAX_STAGE || h->n_class > GB_TOK_MAX_CLASS || h->n_node == 0) {
        return GR_TOK_E_HEADER;
    }
    return GR_TOK_OK;
}

static int lay_out(const uint8_t *sec, size_t size, gr_tok *t)
{
    gr_cursor c = {sec, 0, size, GR_TOK_OK};
    const struct gb_tokn *h = t->h = gr_take(&c, 1, sizeof *h);
    int error = c.error != GR_TOK_OK ? c.error : check_header(h);
    if (error != GR_TOK_OK) {
        return error;
    }
    t->merges = gr_take(&c, h->n_merge, 8);
    t->merge_first = gr_take(&c, (uint64_t)h->vocab + 1, 4);
    t->piece_block = gr_take(&c, (h->vocab + GB_TOK_BLOCK - 1) / GB_TOK_BLOCK, 4);
    t->piece_len = gr_take(&c, h->vocab, 1);
    t->flags = gr_take(&c, h->vocab, 1);
    t->pieces = gr_take(&c, h->piece_bytes, 1);
    t->byte_id = gr_take(&c, 256, 4);
    t->chars = gr_take(&c, h->n_char, sizeof(struct gb_char));
    t->whole = gr_take(&c, h->n_whole, 4);
    t->nodes = gr_take(&c, h->n_node, sizeof(struct gb_node));
    t->edges = gr_take(&c, h->n_node - 1, 1);
    t->stop = gr_take(&c, h->n_stop, 4);
    t->ranges = gr_take(&c, h->n_range, 4);
    t->stages = gr_take(&c, h->n_stage, sizeof(struct gb_stage));
    t->cells = gr_take(&c, h->n_cell, 2);
    t->decomp = gr_take(&c, h->n_decomp, sizeof(struct gb_decomp));
    t->decomp_cp = gr_take(&c, h->n_decomp_cp, 4);
    t->comp = gr_take(&c, h->n_comp, sizeof(struct gb_comp));
    t->ccc = gr_take(&c, h->n_ccc, 4);
    if (c.error == GR_TOK_OK && c.at != size) {
        c.error = GR_TOK_E_SIZE;
    }
    return c.error;
}

static int check_pieces(const gr_tok *t)
{
    uint64_t at = 0;
    for (uint32_t id = 0; id < t->h->vocab; id++) {
        uint32_t flags = t->flags[id];
        if (id % GB_TOK_BLOCK == 0 && t->piece_block[id / GB_TOK_BLOCK] != at) {
            return GR_TOK_E_PIECE;
        }
        if ((flags & ~(uint32_t)GB_TOKEN_ALL) || ((flags & GB_TOKEN_UNUSED) && t->piece_len[id])) {
            return GR_TOK_E_PIECE;
        }
        at += t->piece_len[id];
    }
    return at == t->h->piece_bytes ? GR_TOK_OK : GR_TOK_E_PIECE;
}

static int check_merges(const gr_tok *t)
{
    const struct gb_tokn *h = t->h;
    if (t->merge_first[0] != 0 || t->merge_first[h->vocab] != h->n_merge) {
        return GR_TOK_E_MERGE;
    }
    for (uint32_t left = 0; left < h->vocab; left++) {
        uint32_t first = t->merge_first[left], end = t->merge_first[left + 1];
        if (end < first || end > h->n_merge) {
            return GR_TOK_E_MERGE;
        }
        for (uint32_t i = first; i < end; i++) {
            uint64_t e = t->merges[i];
            uint32_t made = GB_MERGE_NEW(e);
            if (bad_id(t, GB_MERGE_RIGHT(e)) || bad_id(t, made)) {
                return GR_TOK_E_ID;
            }
            if ((t->flags[made] & GB_TOKEN_CONTROL) || GB_MERGE_RANK(e) >= h->n_merge
                || (i > first && GB_MERGE_RIGHT(e) <= GB_MERGE_RIGHT(t->merges[i - 1]))) {
                return GR_TOK_E_MERGE;
            }
        }
    }
    return GR_TOK_OK;
}

static int check_ids(const gr_tok *t)
{
    const struct gb_tokn *h = t->h;
    if ((h->bos != NONE && bad_id(t, h->bos)) || (h->unk != NONE && bad_id(t, h->unk))
        || ((h->flags & GB_TOKF_ADD_BOS) && h->bos == NONE)) {
        return GR_TOK_E_ID;
    }
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t id = t->byte_id[i];
        if (id != NONE && (bad_id(t, id) || (t->flags[id] & GB_TOKEN_CONTROL))) {
            return GR_TOK_E_ID;
        }
    }
    for (uint32_t i = 0; i < h->n_char; i++) {
        if (bad_id(t, t->chars[i].id) || (t->flags[t->chars[i].id] & GB_TOKEN_CONTROL)) {
            return GR_TOK_E_ID;
        }
        if (i > 0 && t->chars[i].cp <= t->chars[i - 1].cp) {
            return GR_TOK_E_ORDER;
        }
    }
    for (uint32_t i = 0; i < h->n_whole; i++) {
        if (bad_id(t, t->whole[i]) || (t->flags[t->whole[i]] & GB_TOKEN_CONTROL)) {
            return GR_TOK_E_ID;
        }
    }
    for (uint32_t i = 0; i < h->n_stop; i++) {
        if (bad_id(t, t->stop[i])) {
            return GR_TOK_E_ID;
        }
        if (i > 0 && t->stop[i] <= t->stop[i - 1]) {
            return GR_TOK_E_ORDER;
        }
    }
    return GR_TOK_OK;
}

static int check_trie(const gr_tok *t)
{
    uint32_t n = t->h->n_node;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t first = t->nodes[i].first;
        uint32_t end = i + 1 < n ? t->nodes[i + 1].first : n - 1;
        uint32_t id = t->nodes[i].id;
        if (first > end || end > n - 1 || (first < end && first < i) || (i == 0 && first != 0)) {
            return GR_TOK_E_TRIE; /* an edge never leads back, so every walk ends */
        }
        if (id != NONE && (i == 0 || bad_id(t, id))) {
            return GR_TOK_E_TRIE;
        }
        for (uint32_t k = first + 1; k < end; k++) {
            if (t->edges[k] <= t->edges[k - 1]) {
                return GR_TOK_E_TRIE;
            }
        }
    }
    return GR_TOK_OK;
}

/* A table of "from this code point on, this value": starts at 0, ascends. */
static bool bad_ranges(const uint32_t *r, uint32_t n, uint32_t values)
{
    if (n == 0 || r[0] >> 8 != 0) {
        return true;
    }
    for (uint32_t i = 0; i < n; i++) {
        if ((r[i] & 0xFFu) >= values || (i > 0 && r[i] >> 8 <= r[i - 1] >> 8)) {
            return true;
        }
    }
    return false;
}

static int check_split(const gr_tok *t)
{
    const struct gb_tokn *h = t->h;
    uint64_t at = 0, columns = (uint64_t)h->n_class + 1;
    if (h->n_stage > 0 && bad_ranges(t->ranges, h->n_range, h->n_class)) {
        return GR_TOK_E_SPLIT;
    }
    for (uint32_t s = 0; s < h->n_stage; s++) {
        const struct gb_stage *g = &t->stages[s];
        if (g->first != at || g->states < 2 || g->states > GB_TOK_MAX_STATE) {
            return GR_TOK_E_SPLIT;
        }
        at += g->states * columns;
        if (at > h->n_cell) {
            return GR_TOK_E_SPLIT;
        }
        for (uint64_t i = g->first; i < at; i++) {
            if ((t->cells[i] & GB_CELL_STATE) >= g->states) {
                return GR_TOK_E_SPLIT;
            }
        }
    }
    return at == h->n_cell ? GR_TOK_OK : GR_TOK_E_SPLIT;
}

static int check_nfc(const gr_tok *t)
{
    const struct gb_tokn *h = t->h;
    if ((h->flags & GB_TOKF_NFC) == 0) {
        return h->n_decomp + h->n_decomp_cp + h->n_comp + h->n_ccc ? GR_TOK_E_NFC : GR_TOK_OK;
    }
    if (bad_ranges(t->ccc, h->n_ccc, 256)) {
        return GR_TOK_E_NFC;
    }
    for (uint32_t i = 0; i < h->n_decomp; i++) {
        uint32_t end = i + 1 < h->n_decomp ? t->decomp[i + 1].first : h->n_decomp_cp;
        if (t->decomp[i].first >= end || end > h->n_decomp_cp || (i == 0 && t->decomp[i].first)
            || (i > 0 && t->decomp[i].cp <= t->decomp[i - 1].cp)) {
            return GR_TOK_E_NFC;
        }
    }
    for (uint32_t i = 0; i < h->n_decomp_cp; i++) {
        if (t->decomp_cp[i] > 0x10FFFF) {
            return GR_TOK_E_NFC;
        }
    }
    for (uint32_t i = 0; i < h->n_comp; i++) {
        const struct gb_comp *a = &t->comp[i];
        if (a->to > 0x10FFFF || a->zero != 0
            || (i > 0 && (a[-1].first > a->first
                          || (a[-1].first == a->first && a[-1].second >= a->second)))) {
            return GR_TOK_E_NFC;
        }
    }
    return GR_TOK_OK;
}

int gr_tok_open(const uint8_t *sec, size_t size, uint32_t vocab_rows, gr_tok *out)
{
    static int (*const checks[])(const gr_tok *) = {check_pieces, check_merges, check_ids,
                                                    check_trie,   check_split,  check_nfc};
    int error;
    memset(out, 0, sizeof *out);
    if (((uintptr_t)sec & 7u) != 0 || size < sizeof(struct gb_tokn)) {
        return GR_TOK_E_SIZE;
    }
    error = lay_out(sec, size, out);
    if (error == GR_TOK_OK && out->h->vocab != vocab_rows) {
        error = GR_TOK_E_VOCAB;
    }
    for (size_t i = 0; error == GR_TOK_OK && i < sizeof checks / sizeof checks[0]; i++) {
        error = checks[i](out);
    }
    return error;
}

/* ---- characters ---- */

size_t gr_utf8_next(const uint8_t *p, size_t n, uint32_t *cp, bool *cut)
{
    uint32_t c = p[0], need, low = 0x80, high = 0xBF;
    *cut = false;
    if (c < 0x80) {
        *cp = c;
        return 1;
    }
    *cp = 0xFFFD;
    if (c < 0xC2 || c > 0xF4) {
        return 1;
    }
    need = c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
    low = c == 0xE0 ? 0xA0 : c == 0xF0 ? 0x90 : low; /* no overlong forms, */
    high = c == 0xED ? 0x9F : c == 0xF4 ? 0x8F : high; /* surrogates, nothing above 10FFFF */
    c &= 0x7Fu >> need;
    for (uint32_t i = 1; i < need; i++) {
        if (i == n) {
            *cut = true;
            return i;
        }
        if (p[i] < low || p[i] > high) {
            return i;
        }
        c = c << 6 | (p[i] & 0x3Fu);
        low = 0x80;
        high = 0xBF;
    }
    *cp = c;
    return need;
}

size_t gr_utf8_put(uint32_t cp, uint8_t *out)
{
    size_t n = cp < 0x80 ? 1 : cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;
    static const uint8_t lead[5] = {0, 0, 0xC0, 0xE0, 0xF0};
    for (size_t i = n; i-- > 1; cp >>= 6) {
        out[i] = (uint8_t)(0x80u | (cp & 0x3Fu));
    }
    out[0] = (uint8_t)(lead[n] | cp);
    return n;
}

size_t gr_utf8_push(gr_utf8_stream *s, const uint8_t *in, size_t n, uint8_t *out)
{
    size_t made = 0;
    for (size_t i = 0; i < n; i++) {
        s->held[s->n++] = in[i];
        while (s->n > 0) {
            uint32_t cp;
            bool cut;
            size_t used = gr_utf8_next(s->held, s->n, &cp, &cut);
            if (cut) {
                break;
            }
            made += gr_utf8_put(cp, out + made);
            s->n = (uint8_t)(s->n - used);
            memmove(s->held, s->held + used, s->n);
        }
    }
    return made;
}

size_t gr_utf8_flush(gr_utf8_stream *s, uint8_t *out)
{
    size_t made = s->n > 0 ? gr_utf8_put(0xFFFD, out) : 0; /* what is held is one cut character */
    s->n = 0;
    return made;
}

/* Value of the last range that starts at or before cp. */
static uint32_t range_of(const uint32_t *r, uint32_t n, uint32_t cp)
{
    uint32_t low = 0;
    while (n - low > 1) {
        uint32_t mid = low + (n - low) / 2;
        if (r[mid] >> 8 <= cp) {
            low = mid;
        } else {
            n = mid;
        }
    }
    return r[low] & 0xFFu;
}

/* ---- pieces ---- */

static const uint8_t *piece_at(const gr_tok *t, uint32_t id)
{
    size_t at = t->piece_block[id / GB_TOK_BLOCK];
    for (uint32_t i = id - id % GB_TOK_BLOCK; i < id; i++) {
        at += t->piece_len[i];
    }
    return t->pieces + at;
}

uint8_t gr_tok_flags(const gr_tok *t, uint32_t id)
{
    return id < t->h->vocab ? t->flags[id] : (uint8_t)GB_TOKEN_UNUSED;
}

size_t gr_tok_piece_all(const gr_tok *t, uint32_t id, uint8_t *out)
{
    size_t n = id < t->h->vocab ? t->piece_len[id] : 0;
    if (n > 0) {
        memcpy(out, piece_at(t, id), n);
    }
    return n;
}

size_t gr_tok_piece(const gr_tok *t, uint32_t id, uint8_t *out)
{
    return gr_tok_flags(t, id) & GB_TOKEN_CONTROL ? 0 : gr_tok_piece_all(t, id, out);
}

bool gr_tok_is_stop(const gr_tok *t, uint32_t id)
{
    for (uint32_t i = 0; i < t->h->n_stop; i++) {
        if (t->stop[i] == id) {
            return true;
        }
    }
    return false;
}

/* ---- merging one word ---- */

typedef struct {
    const gr_tok *t;
    uint32_t *out;
    size_t cap, count;
    bool allow_control;
    uint8_t *norm;     /* text that had to be rewritten */
    size_t norm_cap;   /* bytes */
    uint8_t *work;     /* symbols of a word, or code points of a segment; on 8 bytes */
    size_t work_cap;   /* bytes */
} job;

typedef struct {
    const gr_tok *t;
    uint32_t n;
    uint32_t blocks;
    uint32_t *id;   /* [n] token of a live symbol, INSIDE | length in a long one's 2nd, last slot */
    uint32_t *rank; /* [n] rank of the merge with the next symbol, or NONE */
    uint32_t *win;  /* [2 blocks] winners; root at 1, leaf of block b at blocks + b */
} word;

static uint64_t find_merge(const gr_tok *t, uint32_t left, uint32_t right)
{
    uint32_t low = t->merge_first[left], high = t->merge_first[left + 1];
    while (low < high) {
        uint32_t mid = low + (high - low) / 2;
        uint32_t r = GB_MERGE_RIGHT(t->merges[mid]);
        if (r == right) {
            return t->merges[mid];
        }
        if (r < right) {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    return UINT64_MAX; /* reads as rank 0xFFFFFF, which no merge has */
}

static uint32_t rank_of(const gr_tok *t, uint32_t left, uint32_t right)
{
    uint64_t e = find_merge(t, left, right);
    return e == UINT64_MAX ? NONE : GB_MERGE_RANK(e);
}

static uint32_t next_of(const word *w, uint32_t p)
{
    return p + 1 < w->n && (w->id[p + 1] & INSIDE) ? p + (w->id[p + 1] & ~INSIDE) : p + 1;
}

static uint32_t before(const word *w, uint32_t p)
{
    return w->id[p - 1] & INSIDE ? p - (w->id[p - 1] & ~INSIDE) : p - 1;
}

static uint32_t better(const word *w, uint32_t a, uint32_t b)
{
    if (w->rank[a] != w->rank[b]) {
        return w->rank[a] < w->rank[b] ? a : b;
    }
    return a < b ? a : b;
}

static void play_leaf(word *w, uint32_t block)
{
    uint32_t best = block * BLOCK;
    uint32_t end = w->n - best < BLOCK ? w->n : best + BLOCK;
    for (uint32_t i = best + 1; i < end; i++) {
        best = w->rank[i] < w->rank[best] ? i : best;
    }
    w->win[w->blocks + block] = best;
}

static void set_rank(word *w, uint32_t p, uint32_t rank)
{
    if (w->rank[p] == rank) {
        return;
    }
    w->rank[p] = rank;
    play_leaf(w, p / BLOCK);
    for (uint32_t i = (w->blocks + p / BLOCK) / 2; i > 0; i /= 2) {
        w->win[i] = better(w, w->win[2 * i], w->win[2 * i + 1]);
    }
}

static void merge_word(word *w)
{
    const gr_tok *t = w->t;
    for (uint32_t i = 0; i < w->n; i++) {
        w->rank[i] = i + 1 < w->n ? rank_of(t, w->id[i], w->id[i + 1]) : NONE;
    }
    for (uint32_t b = 0; b < w->blocks; b++) {
        play_leaf(w, b);
    }
    for (uint32_t i = w->blocks - 1; i > 0; i--) {
        w->win[i] = better(w, w->win[2 * i], w->win[2 * i + 1]);
    }
    while (w->rank[w->win[1]] != NONE) {
        uint32_t p = w->win[1], q = next_of(w, p), end = next_of(w, q);
        w->id[p] = GB_MERGE_NEW(find_merge(t, w->id[p], w->id[q]));
        w->id[p + 1] = w->id[end - 1] = INSIDE | (end - p);
        set_rank(w, q, NONE);
        set_rank(w, p, end < w->n ? rank_of(t, w->id[p], w->id[end]) : NONE);
        if (p > 0) {
            uint32_t prev = before(w, p);
            set_rank(w, prev, rank_of(t, w->id[prev], w->id[p]));
        }
    }
}

static uint32_t char_id(const gr_tok *t, uint32_t cp)
{
    uint32_t low = 0, high = t->h->n_char;
    while (low < high) {
        uint32_t mid = low + (high - low) / 2;
        if (t->chars[mid].cp == cp) {
            return t->chars[mid].id;
        }
        if (t->chars[mid].cp < cp) {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    return NONE;
}

/* First symbols of a word into w->id. False: they do not fit into cap. */
static bool first_symbols(word *w, const uint8_t *p, size_t len, size_t cap)
{
    const gr_tok *t = w->t;
    bool unknown = false;
    size_t used;
    for (size_t at = 0; at < len; at += used) {
        uint32_t cp = 0, id = NONE;
        bool cut;
        used = 1;
        if (t->h->kind == GB_TOK_SPM) {
            used = gr_utf8_next(p + at, len - at, &cp, &cut);
            id = char_id(t, cp == ' ' && (t->h->flags & GB_TOKF_SPACE) ? 0x2581 : cp);
        }
        for (size_t i = 0; i < (id == NONE ? used : 1); i++) {
            uint32_t symbol = id == NONE ? t->byte_id[p[at + i]] : id;
            bool unk = symbol == NONE;
            if (unk && (t->h->unk == NONE || (unknown && (t->h->flags & GB_TOKF_FUSE_UNK)))) {
                continue;
            }
            if (w->n >= cap) {
                return false;
            }
            w->id[w->n++] = unk ? t->h->unk : symbol;
            unknown = unk;
            if (unk) {
                break; /* one unknown per character */
            }
        }
    }
    return true;
}

static int emit(job *j, uint32_t id)
{
    if (j->count >= j->cap) {
        return GR_TOK_E_CAP;
    }
    j->out[j->count++] = id;
    return 0;
}

/* A word that is a token although merging would not lead there. */
static uint32_t whole_word(const gr_tok *t, const uint8_t *p, size_t len)
{
    uint32_t low = 0, high = t->h->n_whole;
    while (low < high) {
        uint32_t mid = low + (high - low) / 2;
        uint32_t id = t->whole[mid];
        size_t n = t->piece_len[id];
        int order = memcmp(piece_at(t, id), p, n < len ? n : len);
        if (order == 0 && n == len) {
            return id;
        }
        if (order < 0 || (order == 0 && n < len)) {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    return NONE;
}

static int encode_word(job *j, const uint8_t *p, size_t len)
{
    size_t cap = j->work_cap / 9 > 16 ? j->work_cap / 9 - 8 : 0; /* 4 + 4 + 2 x 4 / BLOCK */
    uint32_t id = whole_word(j->t, p, len);
    word w = {j->t, 0, 0, (uint32_t *)(void *)j->work, NULL, NULL};
    if (id != NONE) {
        return emit(j, id);
    }
    if (!first_symbols(&w, p, len, cap)) {
        return GR_TOK_E_SCRATCH;
    }
    w.blocks = (w.n + BLOCK - 1) / BLOCK;
    w.rank = w.id + w.n;
    w.win = w.rank + w.n;
    if (w.n > 1) {
        merge_word(&w);
    }
    for (uint32_t i = 0; i < w.n; i = next_of(&w, i)) {
        int error = emit(j, w.id[i]);
        if (error != 0) {
            return error;
        }
    }
    return 0;
}

/* ---- splitting ---- */

/* Length of the stage's match at p, 0 for none. The automaton looks one character ahead: a cell
 * tells both whether a match may end before that character and where the character leads. */
static size_t match_at(const gr_tok *t, const struct gb_stage *s, const uint8_t *p, size_t len)
{
    uint32_t columns = t->h->n_class + 1, state = 1;
    size_t at = 0, best = 0;
    while (state != 0) {
        uint32_t cp, class = t->h->n_class, cell;
        size_t used = 0;
        bool cut;
        if (at < len) {
            used = gr_utf8_next(p + at, len - at, &cp, &cut);
            class = range_of(t->ranges, t->h->n_range, cp);
        }
        cell = t->cells[s->first + (size_t)state * columns + class];
        best = cell & GB_CELL_MATCH ? at : best;
        state = at < len ? cell & GB_CELL_STATE : 0;
        at += used;
    }
    return best;
}

/* Length of the next part of p: a match, or everything up to the next match. */
static size_t next_part(const gr_tok *t, const struct gb_stage *s, const uint8_t *p, size_t len)
{
    size_t match = match_at(t, s, p, len), at = 0;
    while (match == 0 && at < len) {
        uint32_t cp;
        bool cut;
        at += gr_utf8_next(p + at, len - at, &cp, &cut);
        match = at < len && match_at(t, s, p + at, len - at) > 0;
        if (match > 0) {
            return at;
        }
    }
    return match > 0 ? match : len;
}

static int encode_words(job *j, const uint8_t *p, size_t len)
{
    size_t end[GB_TOK_MAX_STAGE + 1] = {len}; /* end of the current part of every stage */
    uint32_t level = 0;
    size_t at = 0;
    while (at < len) {
        int error;
        while (level < j->t->h->n_stage) {
            end[level + 1] = at + next_part(j->t, &j->t->stages[level], p + at, end[level] - at);
            level++;
        }
        error = encode_word(j, p + at, end[level] - at);
        if (error != 0) {
            return error;
        }
        at = end[level];
        while (level > 0 && end[level] == at) {
            level--;
        }
    }
    return 0;
}

/* ---- normal form C ---- */

typedef struct {
    uint32_t *cp; /* [n] */
    size_t n, cap;
} points;

enum { S_BASE = 0xAC00, L_BASE = 0x1100, V_BASE = 0x1161, T_BASE = 0x11A7,
       L_COUNT = 19, V_COUNT = 21, T_COUNT = 28, S_COUNT = 11172 }; /* Hangul, by arithmetic */

static bool put_point(points *v, uint32_t cp)
{
    if (v->n >= v->cap) {
        return false;
    }
    v->cp[v->n++] = cp;
    return true;
}

static bool decompose(const gr_tok *t, points *v, uint32_t cp)
{
    uint32_t low = 0, high = t->h->n_decomp;
    if (cp - S_BASE < S_COUNT) {
        uint32_t s = cp - S_BASE, tail = s % T_COUNT;
        return put_point(v, L_BASE + s / (V_COUNT * T_COUNT))
               && put_point(v, V_BASE + s % (V_COUNT * T_COUNT) / T_COUNT)
               && (tail == 0 || put_point(v, T_BASE + tail));
    }
    while (low < high) {
        uint32_t mid = low + (high - low) / 2;
        if (t->decomp[mid].cp < cp) {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    if (low == t->h->n_decomp || t->decomp[low].cp != cp) {
        return put_point(v, cp);
    }
    high = low + 1 < t->h->n_decomp ? t->decomp[low + 1].first : t->h->n_decomp_cp;
    for (uint32_t i = t->decomp[low].first; i < high; i++) {
        if (!put_point(v, t->decomp_cp[i])) {
            return false;
        }
    }
    return true;
}

/* Sorts runs of combining characters by class, stably, by counting: linear for any run. */
static void reorder(const gr_tok *t, points *v, uint32_t *spare)
{
    for (size_t i = 0; i < v->n;) {
        uint32_t count[257] = {0};
        size_t end = i;
        bool sorted = true;
        uint32_t last = 0;
        for (; end < v->n; end++) {
            uint32_t c = range_of(t->ccc, t->h->n_ccc, v->cp[end]);
            if (c == 0) {
                break;
            }
            sorted = sorted && c >= last;
            last = c;
            count[c + 1]++;
        }
        if (!sorted) {
            for (size_t c = 1; c < 257; c++) {
                count[c] += count[c - 1];
            }
            memcpy(spare, v->cp + i, (end - i) * 4);
            for (size_t k = 0; k < end - i; k++) {
                uint32_t c = range_of(t->ccc, t->h->n_ccc, spare[k]);
                v->cp[i + count[c]++] = spare[k];
            }
        }
        i = end > i ? end : i + 1;
    }
}

static uint32_t compose_pair(const gr_tok *t, uint32_t a, uint32_t b)
{
    uint32_t low = 0, high = t->h->n_comp;
    if (a - L_BASE < L_COUNT && b - V_BASE < V_COUNT) {
        return S_BASE + ((a - L_BASE) * V_COUNT + (b - V_BASE)) * T_COUNT;
    }
    if (a - S_BASE < S_COUNT && (a - S_BASE) % T_COUNT == 0 && b - T_BASE - 1 < T_COUNT - 1) {
        return a + (b - T_BASE);
    }
    while (low < high) {
        uint32_t mid = low + (high - low) / 2;
        const struct gb_comp *c = &t->comp[mid];
        if (c->first == a && c->second == b) {
            return c->to;
        }
        if (c->first < a || (c->first == a && c->second < b)) {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    return NONE;
}

static void compose(const gr_tok *t, points *v)
{
    size_t made = 0, starter = SIZE_MAX;
    uint32_t last = 0; /* combining class of what was kept last after the starter, 0 if nothing */
    for (size_t i = 0; i < v->n; i++) {
        uint32_t cp = v->cp[i], c = range_of(t->ccc, t->h->n_ccc, cp), both = NONE;
        if (starter != SIZE_MAX && (starter + 1 == made || (last != 0 && last < c))) {
            both = compose_pair(t, v->cp[starter], cp);
        }
        if (both != NONE) {
            v->cp[starter] = both;
            continue;
        }
        if (c == 0) {
            starter = made;
        }
        last = c;
        v->cp[made++] = cp;
    }
    v->n = made;
}

/* Rewrites p[0..len) into j->norm: normal form C if nfc, wrong bytes as U+FFFD in any case. */
static int rewrite(job *j, bool nfc, const uint8_t *p, size_t len, size_t *out_len)
{
    points v = {(uint32_t *)(void *)j->work, 0, j->work_cap / 8};
    size_t made = 0, used;
    for (size_t at = 0; at < len; at += used) {
        uint32_t cp;
        bool cut;
        used = gr_utf8_next(p + at, len - at, &cp, &cut);
        if (!(nfc ? decompose(j->t, &v, cp) : put_point(&v, cp))) {
            return GR_TOK_E_SCRATCH;
        }
    }
    if (nfc) {
        reorder(j->t, &v, v.cp + v.cap);
        compose(j->t, &v);
    }
    for (size_t i = 0; i < v.n; i++) {
        if (j->norm_cap - made < 4) {
            return GR_TOK_E_SCRATCH;
        }
        made += gr_utf8_put(v.cp[i], j->norm + made);
    }
    *out_len = made;
    return 0;
}

/* ---- a whole text ---- */

static bool is_ascii(const uint8_t *p, size_t len)
{
    uint8_t seen = 0;
    for (size_t i = 0; i < len; i++) {
        seen |= p[i];
    }
    return seen < 0x80;
}

static int encode_segment(job *j, const uint8_t *p, size_t len)
{
    if ((j->t->h->flags & GB_TOKF_NFC) && !is_ascii(p, len)) {
        int error = rewrite(j, true, p, len, &len);
        if (error != 0) {
            return error;
        }
        p = j->norm;
    }
    return encode_words(j, p, len);
}

/* Longest added token at p; its length, 0 for none. */
static size_t added_at(const job *j, const uint8_t *p, size_t len, uint32_t *out_id)
{
    const gr_tok *t = j->t;
    uint32_t node = 0, n = t->h->n_node;
    size_t best = 0;
    for (size_t at = 0; at < len; at++) {
        uint32_t k = t->nodes[node].first, end = node + 1 < n ? t->nodes[node + 1].first : n - 1;
        while (k < end && t->edges[k] < p[at]) {
            k++;
        }
        if (k == end || t->edges[k] != p[at]) {
            break;
        }
        node = k + 1;
        if (t->nodes[node].id != NONE
            && (j->allow_control || !(t->flags[t->nodes[node].id] & GB_TOKEN_CONTROL))) {
            best = at + 1;
            *out_id = t->nodes[node].id;
        }
    }
    return best;
}

static bool is_utf8(const uint8_t *p, size_t len)
{
    for (size_t at = 0; at < len;) {
        uint32_t cp;
        bool cut;
        size_t used = gr_utf8_next(p + at, len - at, &cp, &cut);
        if (cp == 0xFFFD && (used != 3 || p[at] != 0xEF || p[at + 2] != 0xBD)) {
            return false;
        }
        at += used;
    }
    return true;
}

int64_t gr_tok_encode(const gr_tok *t, const uint8_t *text, size_t len, bool allow_control,
                      uint32_t *out_ids, size_t cap, void *scratch, size_t scratch_size)
{
    job j = {t, out_ids, cap, 0, allow_control, scratch, 0, NULL, 0};
    size_t from = 0, at = 0, norm = (len * 3 + 4 + 7) & ~(size_t)7;
    if (len > MAX_TEXT || scratch_size < norm || ((uintptr_t)scratch & 7u) != 0) {
        return GR_TOK_E_SCRATCH;
    }
    j.norm_cap = norm;
    j.work = j.norm + norm;
    j.work_cap = (scratch_size - norm) & ~(size_t)7;
    if (!(t->h->flags & GB_TOKF_NFC) && !is_utf8(text, len)) {
        int error = rewrite(&j, false, text, len, &len);
        if (error != 0) {
            return error;
        }
        text = j.norm;
    }
    while (at < len) {
        uint32_t id = NONE;
        size_t n = added_at(&j, text + at, len - at, &id);
        int error = 0;
        if (n > 0) {
            error = encode_segment(&j, text + from, at - from);
            error = error != 0 ? error : emit(&j, id);
            from = at + n;
        }
        if (error != 0) {
            return error;
        }
        at += n > 0 ? n : 1;
    }
    if (from < len) {
        int error = encode_segment(&j, text + from, len - from);
        if (error != 0) {
            return error;
        }
    }
    return (int64_t)j.count;
}
