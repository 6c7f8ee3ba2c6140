/* Tokenizer: byte pair encoding over the tables of a TOKN section (TOKENS.md).
 *
 * Order of work: added tokens are cut out (trie, longest first), the text between them is put into
 * normal form C where the model wants it, split into words by automata, and every word is merged.
 * Merging keeps, per live symbol, the rank of its pair with the next one, and a tournament tree
 * over blocks of eight of them: the lowest rank, leftmost, is found at once and replaced in log n
 * steps, so a word of any length takes n log n, and 9 bytes per first symbol.
 *
 * It refuses to allocate, to recurse, and to trust anything that gr_tok_open has not checked. Not
 * part of a GR_MINIMAL build: its host sends ids. */
#include "gr_tok.h"

#include <string.h>

#define NONE GB_TOK_NONE
#define INSIDE 0x80000000u /* a symbol slot inside a longer symbol; the rest is that one's length */
#define BLOCK 8u           /* ranks per leaf of the tournament tree */
#define MAX_TEXT ((size_t)1 << 29)

/* First index in a[low..high) whose key (entry >> shift) is not below key; high if none. */
static uint32_t lower(const uint64_t *a, uint32_t low, uint32_t high, unsigned shift, uint64_t key)
{
    while (low < high) {
        uint32_t mid = low + (high - low) / 2;
        if (a[mid] >> shift < key)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

/* Value of the range that cp lies in. */
static uint32_t range_of(const uint64_t *ranges, uint32_t n, uint32_t cp)
{
    return (uint32_t)ranges[lower(ranges, 0, n, GB_KEY, (uint64_t)cp + 1) - 1];
}

/* ---- characters ---- */

size_t gr_utf8_next(const uint8_t *p, size_t n, uint32_t *cp, bool *cut)
{
    uint32_t c = p[0], need = c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
    uint32_t low = c == 0xE0 ? 0xA0 : c == 0xF0 ? 0x90 : 0x80;  /* no overlong forms, */
    uint32_t high = c == 0xED ? 0x9F : c == 0xF4 ? 0x8F : 0xBF; /* surrogates, above 10FFFF */
    *cut = false;
    *cp = c < 0x80 ? c : 0xFFFD;
    if (c < 0xC2 || c > 0xF4)
        return 1;
    c &= 0x7Fu >> need;
    for (uint32_t i = 1; i < need; i++) {
        *cut = i == n;
        if (i == n || p[i] < low || p[i] > high)
            return i;
        c = c << 6 | (p[i] & 0x3Fu);
        low = 0x80;
        high = 0xBF;
    }
    *cp = c;
    return need;
}

size_t gr_utf8_put(uint32_t cp, uint8_t *out)
{
    static const uint8_t lead[5] = {0, 0, 0xC0, 0xE0, 0xF0};
    size_t n = cp < 0x80 ? 1 : cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;
    for (size_t i = n; i-- > 1; cp >>= 6)
        out[i] = (uint8_t)(0x80u | (cp & 0x3Fu));
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
            if (cut)
                break;
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

/* ---- pieces ---- */

static const uint8_t *piece_at(const gr_tok *t, uint32_t id)
{
    const uint8_t *p = t->pieces + t->piece_block[id / GB_TOK_BLOCK];
    for (uint32_t i = id - id % GB_TOK_BLOCK; i < id; i++)
        p += t->piece_len[i];
    return p;
}

size_t gr_tok_piece_all(const gr_tok *t, uint32_t id, uint8_t *out)
{
    size_t n = id < t->h->vocab ? t->piece_len[id] : 0;
    if (n > 0)
        memcpy(out, piece_at(t, id), n);
    return n;
}

size_t gr_tok_piece(const gr_tok *t, uint32_t id, uint8_t *out)
{
    return gr_tok_flags(t, id) & GB_TOKEN_CONTROL ? 0 : gr_tok_piece_all(t, id, out);
}

bool gr_tok_is_stop(const gr_tok *t, uint32_t id)
{
    for (uint32_t i = 0; i < t->h->n_stop; i++)
        if (t->stop[i] == id)
            return true;
    return false;
}

/* ---- merging one word ---- */

typedef struct {
    const gr_tok *t;
    bool allow_control;
    int error; /* the first that happened; later steps do nothing */
    uint32_t *out;
    size_t cap, count;
    uint8_t *norm; /* rewritten text */
    size_t norm_cap;
    uint8_t *work; /* symbols of a word, or code points of a segment; on 8 bytes */
    size_t work_cap;
} job;

typedef struct {
    const gr_tok *t;
    uint32_t n, blocks;
    uint32_t *id;   /* [n] token of a live symbol, INSIDE | length in a long one's 2nd, last slot */
    uint32_t *rank; /* [n] rank of the merge with the next symbol, or NONE */
    uint32_t *win;  /* [2 blocks] winners; root at 1, leaf of block b at blocks + b */
} word;

static void emit(job *j, uint32_t id)
{
    if (j->count < j->cap)
        j->out[j->count] = id;
    j->count++;
}

/* The merge of two tokens, or NULL. */
static const uint64_t *merge_of(const gr_tok *t, uint32_t left, uint32_t right)
{
    uint32_t end = t->merge_first[left + 1];
    uint32_t i = lower(t->merges, t->merge_first[left], end, GB_MERGE_RIGHT, right);
    return i < end && t->merges[i] >> GB_MERGE_RIGHT == right ? &t->merges[i] : NULL;
}

static uint32_t rank_of(const gr_tok *t, uint32_t left, uint32_t right)
{
    const uint64_t *e = merge_of(t, left, right);
    return e != NULL ? GB_MERGE_RANK(*e) : NONE;
}

static uint32_t after(const word *w, uint32_t p)
{
    return p + 1 < w->n && (w->id[p + 1] & INSIDE) ? p + (w->id[p + 1] & ~INSIDE) : p + 1;
}

static uint32_t before(const word *w, uint32_t p)
{
    return w->id[p - 1] & INSIDE ? p - (w->id[p - 1] & ~INSIDE) : p - 1;
}

static void play_leaf(word *w, uint32_t block)
{
    uint32_t best = block * BLOCK;
    uint32_t end = w->n - best < BLOCK ? w->n : best + BLOCK;
    for (uint32_t i = best + 1; i < end; i++)
        best = w->rank[i] < w->rank[best] ? i : best;
    w->win[w->blocks + block] = best;
}

static void play_node(word *w, uint32_t node)
{
    uint32_t a = w->win[2 * node], b = w->win[2 * node + 1];
    bool first = w->rank[a] != w->rank[b] ? w->rank[a] < w->rank[b] : a < b;
    w->win[node] = first ? a : b;
}

static void set_rank(word *w, uint32_t p, uint32_t rank)
{
    if (w->rank[p] != rank) {
        w->rank[p] = rank;
        play_leaf(w, p / BLOCK);
        for (uint32_t i = (w->blocks + p / BLOCK) / 2; i > 0; i /= 2)
            play_node(w, i);
    }
}

static void merge_word(word *w)
{
    for (uint32_t i = 0; i < w->n; i++)
        w->rank[i] = i + 1 < w->n ? rank_of(w->t, w->id[i], w->id[i + 1]) : NONE;
    for (uint32_t b = 0; b < w->blocks; b++)
        play_leaf(w, b);
    for (uint32_t i = w->blocks - 1; i > 0; i--)
        play_node(w, i);
    while (w->rank[w->win[1]] != NONE) {
        uint32_t p = w->win[1], q = after(w, p), end = after(w, q);
        w->id[p] = GB_MERGE_NEW(*merge_of(w->t, w->id[p], w->id[q]));
        w->id[p + 1] = w->id[end - 1] = INSIDE | (end - p);
        set_rank(w, q, NONE);
        set_rank(w, p, end < w->n ? rank_of(w->t, w->id[p], w->id[end]) : NONE);
        if (p > 0) {
            uint32_t left = before(w, p);
            set_rank(w, left, rank_of(w->t, w->id[left], w->id[p]));
        }
    }
}

static uint32_t char_id(const gr_tok *t, uint32_t cp)
{
    uint32_t n = t->h->n_char, i = lower(t->chars, 0, n, GB_KEY, cp);
    return i < n && t->chars[i] >> GB_KEY == cp ? (uint32_t)t->chars[i] : NONE;
}

/* First symbols of a word: its characters or its bytes. False: they do not fit into cap. */
static bool first_symbols(word *w, const uint8_t *p, size_t len, size_t cap)
{
    const gr_tok *t = w->t;
    bool unknown = false;
    size_t used = 1;
    for (size_t at = 0; at < len; at += used) {
        uint32_t cp = 0, id = NONE;
        bool cut;
        if (t->h->kind == GB_TOK_SPM) {
            used = gr_utf8_next(p + at, len - at, &cp, &cut);
            id = char_id(t, cp == ' ' && (t->h->flags & GB_TOKF_SPACE) ? 0x2581 : cp);
        }
        for (size_t i = 0; i < (id == NONE ? used : 1); i++) {
            uint32_t symbol = id == NONE ? t->byte_id[p[at + i]] : id;
            bool again = unknown && i == 0 && (t->h->flags & GB_TOKF_FUSE_UNK);
            unknown = symbol == NONE;
            symbol = unknown ? t->h->unk : symbol;
            if (symbol != NONE && !(unknown && (again || i > 0))) { /* one unk per character */
                if (w->n >= cap)
                    return false;
                w->id[w->n++] = symbol;
            }
        }
    }
    return true;
}

/* A word that is a token although merging would not lead there. */
static uint32_t whole_word(const gr_tok *t, const uint8_t *p, size_t len)
{
    uint32_t low = 0, high = t->h->n_whole;
    while (low < high) {
        uint32_t mid = low + (high - low) / 2, id = t->whole[mid];
        size_t n = t->piece_len[id];
        int order = memcmp(piece_at(t, id), p, n < len ? n : len);
        if (order == 0 && n == len)
            return id;
        if (order < 0 || (order == 0 && n < len))
            low = mid + 1;
        else
            high = mid;
    }
    return NONE;
}

static void encode_word(job *j, const uint8_t *p, size_t len)
{
    word w = {j->t, 0, 0, (uint32_t *)(void *)j->work, NULL, NULL};
    size_t cap = j->work_cap / 9; /* 4 + 4 bytes a symbol, and 8 a block but for its first */
    uint32_t id = whole_word(j->t, p, len);
    if (id != NONE) {
        emit(j, id);
        return;
    }
    if (!first_symbols(&w, p, len, cap > 16 ? cap - 16 : 0)) {
        j->error = j->error != 0 ? j->error : GR_TOK_E_SCRATCH;
        return;
    }
    w.blocks = (w.n + BLOCK - 1) / BLOCK;
    w.rank = w.id + w.n;
    w.win = w.rank + w.n;
    if (w.n > 1)
        merge_word(&w);
    for (uint32_t i = 0; i < w.n; i = after(&w, i))
        emit(j, w.id[i]);
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
    if (match > 0)
        return match;
    while (at < len && match == 0) {
        uint32_t cp;
        bool cut;
        at += gr_utf8_next(p + at, len - at, &cp, &cut);
        match = match_at(t, s, p + at, len - at);
    }
    return at;
}

static void encode_words(job *j, const uint8_t *p, size_t len)
{
    size_t end[GB_TOK_MAX_STAGE + 1] = {len}; /* end of the current part of every stage */
    uint32_t level = 0;
    for (size_t at = 0; at < len; at = end[level]) {
        while (level > 0 && end[level] == at)
            level--;
        for (; level < j->t->h->n_stage; level++)
            end[level + 1] = at + next_part(j->t, &j->t->stages[level], p + at, end[level] - at);
        encode_word(j, p + at, end[level] - at);
    }
}

/* ---- normal form C ---- */

typedef struct {
    uint32_t *cp; /* [n] */
    size_t n, cap;
} points;

enum {
    S_BASE = 0xAC00, /* Hangul, by arithmetic */
    L_BASE = 0x1100,
    V_BASE = 0x1161,
    T_BASE = 0x11A7,
    L_COUNT = 19,
    V_COUNT = 21,
    T_COUNT = 28,
    S_COUNT = 11172
};

static bool put_points(points *v, const uint32_t *cp, size_t n)
{
    if (v->cap - v->n < n)
        return false;
    memcpy(v->cp + v->n, cp, n * sizeof *cp);
    v->n += n;
    return true;
}

static bool decompose(const gr_tok *t, points *v, uint32_t cp)
{
    uint32_t n = t->h->n_decomp, i, end;
    if (cp - S_BASE < S_COUNT) {
        uint32_t s = cp - S_BASE;
        uint32_t jamo[3] = {L_BASE + s / (V_COUNT * T_COUNT),
                            V_BASE + s % (V_COUNT * T_COUNT) / T_COUNT, T_BASE + s % T_COUNT};
        return put_points(v, jamo, s % T_COUNT != 0 ? 3 : 2);
    }
    i = cp < 0xC0 ? n : lower(t->decomp, 0, n, GB_KEY, cp); /* none below */
    if (i == n || t->decomp[i] >> GB_KEY != cp)
        return put_points(v, &cp, 1);
    end = i + 1 < n ? (uint32_t)t->decomp[i + 1] : t->h->n_decomp_cp;
    return put_points(v, t->decomp_cp + (uint32_t)t->decomp[i], end - (uint32_t)t->decomp[i]);
}

static uint32_t class_of(const gr_tok *t, uint32_t cp)
{
    return cp < 0x300 ? 0 : range_of(t->ccc, t->h->n_ccc, cp);
}

/* Sorts a run of combining characters by class, stably and in linear time. */
static void count_sort(const gr_tok *t, uint32_t *cp, size_t n, uint32_t *spare)
{
    uint32_t start[257] = {0};
    for (size_t i = 0; i < n; i++)
        start[class_of(t, cp[i]) + 1]++;
    for (size_t c = 1; c < 257; c++)
        start[c] += start[c - 1];
    memcpy(spare, cp, n * sizeof *cp);
    for (size_t i = 0; i < n; i++)
        cp[start[class_of(t, spare[i])]++] = spare[i];
}

static void reorder(const gr_tok *t, points *v, uint32_t *spare)
{
    for (size_t i = 0, end; i < v->n; i = end + 1) {
        for (end = i; end < v->n && class_of(t, v->cp[end]) != 0; end++) {
        }
        if (end - i > 1)
            count_sort(t, v->cp + i, end - i, spare);
    }
}

static uint32_t compose_pair(const gr_tok *t, uint32_t a, uint32_t b)
{
    uint64_t key = (uint64_t)a << 21 | b;
    uint32_t i;
    if (a - L_BASE < L_COUNT && b - V_BASE < V_COUNT)
        return S_BASE + ((a - L_BASE) * V_COUNT + (b - V_BASE)) * T_COUNT;
    if (a - S_BASE < S_COUNT && (a - S_BASE) % T_COUNT == 0 && b - T_BASE - 1 < T_COUNT - 1)
        return a + (b - T_BASE);
    i = lower(t->comp, 0, t->h->n_comp, GB_COMP_PAIR, key);
    return i < t->h->n_comp && t->comp[i] >> GB_COMP_PAIR == key ? GB_COMP_TO(t->comp[i]) : NONE;
}

static void compose(const gr_tok *t, points *v)
{
    size_t made = 0, starter = SIZE_MAX;
    uint32_t last = 0; /* combining class of what was kept last after the starter */
    for (size_t i = 0; i < v->n; i++) {
        uint32_t cp = v->cp[i], c = class_of(t, cp), both = NONE;
        if (starter != SIZE_MAX && (starter + 1 == made || (last != 0 && last < c)))
            both = compose_pair(t, v->cp[starter], cp);
        if (both != NONE) {
            v->cp[starter] = both;
            continue;
        }
        starter = c == 0 ? made : starter;
        last = c;
        v->cp[made++] = cp;
    }
    v->n = made;
}

/* Rewrites p[0..len) into j->norm: wrong bytes as U+FFFD, and normal form C where the model wants
 * it. Returns the new length, 0 after an error. */
static size_t rewrite(job *j, const uint8_t *p, size_t len)
{
    points v = {(uint32_t *)(void *)j->work, 0, j->work_cap / 8};
    size_t made = 0, used = 0;
    bool fits = true, nfc = (j->t->h->flags & GB_TOKF_NFC) != 0;
    for (size_t at = 0; at < len && fits; at += used) {
        uint32_t cp;
        bool cut;
        used = gr_utf8_next(p + at, len - at, &cp, &cut);
        fits = nfc ? decompose(j->t, &v, cp) : put_points(&v, &cp, 1);
    }
    if (nfc && fits) {
        reorder(j->t, &v, v.cp + v.cap);
        compose(j->t, &v);
    }
    for (size_t i = 0; i < v.n && fits; i++) {
        fits = j->norm_cap - made >= 4;
        made += fits ? gr_utf8_put(v.cp[i], j->norm + made) : 0;
    }
    if (!fits && j->error == 0)
        j->error = GR_TOK_E_SCRATCH;
    return fits ? made : 0;
}

/* ---- a whole text ---- */

/* Longest added token at p; its length, 0 for none. */
static size_t added_at(const job *j, const uint8_t *p, size_t len, uint32_t *out_id)
{
    const gr_tok *t = j->t;
    uint32_t node = 0, n = t->h->n_node;
    size_t best = 0;
    for (size_t at = 0; at < len; at++) {
        uint32_t k = t->nodes[node].first, end = node + 1 < n ? t->nodes[node + 1].first : n - 1;
        while (k < end && t->edges[k] < p[at])
            k++;
        if (k == end || t->edges[k] != p[at])
            break;
        node = k + 1;
        if (t->nodes[node].id != NONE
            && (j->allow_control || !(t->flags[t->nodes[node].id] & GB_TOKEN_CONTROL))) {
            best = at + 1;
            *out_id = t->nodes[node].id;
        }
    }
    return best;
}

static void encode_segment(job *j, const uint8_t *p, size_t len)
{
    if (j->t->h->flags & GB_TOKF_NFC) {
        len = rewrite(j, p, len);
        p = j->norm;
    }
    encode_words(j, p, len);
}

int64_t gr_tok_encode(const gr_tok *t, const uint8_t *text, size_t len, bool allow_control,
                      uint32_t *out_ids, size_t cap, void *scratch, size_t scratch_size)
{
    job j = {t, allow_control, 0, out_ids, cap, 0, scratch, 0, NULL, 0};
    size_t from = 0, at = 0;
    if (len > MAX_TEXT || ((uintptr_t)scratch & 7u) != 0 || scratch_size < len * 3 + 16)
        return GR_TOK_E_SCRATCH;
    j.norm_cap = (len * 3 + 16) & ~(size_t)7;
    j.work = j.norm + j.norm_cap;
    j.work_cap = scratch_size - j.norm_cap;
    if (!(t->h->flags & GB_TOKF_NFC)) {
        len = rewrite(&j, text, len);
        text = j.norm;
    }
    while (at < len && j.error == 0) {
        uint32_t id = NONE;
        size_t n = added_at(&j, text + at, len - at, &id);
        if (n > 0) {
            encode_segment(&j, text + from, at - from);
            emit(&j, id);
            from = at + n;
        }
        at += n > 0 ? n : 1;
    }
    encode_segment(&j, text + from, len - from);
    return j.error != 0 ? j.error : (int64_t)j.count;
}
