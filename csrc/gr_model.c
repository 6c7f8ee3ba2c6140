/* gr_model.c: tokens through a dense transformer, as NUMERICS.md writes it down.
 *
 * A chunk of tokens goes through all layers in one run of the thread team. Every step is cut into
 * units of 32 output rows, whole heads, or one token's heads; a thread takes a contiguous share.
 * Between the steps stand five barriers a layer (seven where the norms of many tokens are shared
 * out); what must be done once is done by the last thread to arrive. Nothing is allocated, no file
 * is touched, and no split shows in a result. */
#include "gr_model.h"

enum {
    ROLES = 27,
    SCRATCH = 8192, /* floats of a thread's scratch on its stack: 32 KB */
    MANY = 8,       /* tokens whose norms are worth a barrier more */
    TILES = 8       /* tokens: whole tiles of every GEMM */
};
_Static_assert(GB_ROLE_DOWN + 1 == ROLES, "one place a role");

typedef struct gr_fwd {
    gr_engine *e;
    const uint32_t *ids;  /* [count], or NULL: the hidden states are given */
    float *x, *y;         /* residual stream and product [count][hidden] */
    uint32_t count, want; /* tokens; see gr_forward */
    uint32_t threads;     /* that take part */
    uint32_t layer;       /* this and the following are changed by serial steps only */
    uint32_t first;       /* of the layer's tokens that go beyond keys and values */
    uint32_t from;        /* first token of the step between two products, in which .. */
    bool add;             /* .. X += Y, */
    const float *post;    /* by this norm of Y, or NULL, */
    const float *norm;    /* and then X -> XN by this one, or NULL */
    const gb_layer *l;
    const gb_tensor *t[ROLES]; /* of the layer; of a tensor in several records the first */
    gr_act xn, att, h;         /* inputs of q k v and gate_up; of o; of down */
    gr_engine *const *of; /* [count]: whose row it is, in a shared pass; NULL: e's */
    bool apart;           /* every row is another engine's */
    gr_head head;
} gr_fwd;

static gr_engine *owner(const gr_fwd *f, uint32_t row)
{
    return f->of ? f->of[row] : f->e;
}

/* Position of a row in its owner's cache. */
static uint32_t place(const gr_fwd *f, uint32_t row)
{
    const gr_engine *o = owner(f, row);
    return o->pos + row - o->row;
}

static void mark(const gr_fwd *f, uint32_t row, uint32_t thread, bool good)
{
    if (!good)
        owner(f, row)->bad[thread] = true;
}

static uint32_t sets(uint32_t n, uint32_t of) /* the last one perhaps smaller */
{
    return (n + of - 1) / of;
}

/* Heads whose widths together are a multiple of `width`, a power of two. */
static uint32_t heads_to_fill(uint32_t head_dim, uint32_t width)
{
    uint32_t n = 1;
    while (head_dim * n % width)
        n *= 2;
    return n;
}

void gr_split(const gr_engine *e, uint32_t units, gr_some some, void *arg, uint32_t thread,
              uint32_t threads)
{
    bool balance = e->balance && threads > 1;
    uint32_t shared = balance ? units / 2 : units, piece = units / (16 * threads) + 1, from;
    some(arg, gr_share(shared, thread, threads), thread);
    while (balance && (from = shared + gr_team_take(e->team, piece)) < units)
        some(arg, (gr_range){from, gr_least(from + piece, units)}, thread);
}

/* ---- views of weights and buffers ---- */

gr_mat gr_matrix(const gr_view *v, const gb_tensor *t)
{
    return (gr_mat){
        .data = v->image + t->offset,
        .low = t->second_offset ? v->image + t->second_offset : NULL,
        .seg = v->segments + t->seg_first,
        .seg_count = t->seg_count,
        .panel = gr_panel_size(t, v->segments),
        .cols = t->cols,
        .groups = t->cols_padded / GB_GROUP,
    };
}

const float *gr_vector(const gr_view *v, const gb_tensor *t)
{
    return (const float *)(const void *)(v->image + t->offset);
}

bool gr_takes_floats(const gr_view *v, const gb_tensor *t)
{
    uint32_t format = v->segments[t->seg_first].format;
    return format == GB_FMT_F32 || format == GB_FMT_F16;
}

void gr_multiply(const gr_engine *e, const gr_mat *m, const gr_act *a, uint32_t first,
                 uint32_t token, uint32_t tokens, uint32_t width, float *y, size_t ldy)
{
    const gr_kernels *k = e->kern;
    uint32_t format = m->seg->format; /* float formats have one segment */
    bool floats = format == GB_FMT_F32 || format == GB_FMT_F16;
    gr_product product = floats ? k->gemm_float : tokens == 1 ? k->gemv : k->gemm;
    uint32_t near = e->near / (a->groups * GB_GROUP), some = near < TILES ? TILES : near, n;
    for (uint32_t t = 0; t < tokens; t += n) { /* their inputs are read again for every panel */
        n = gr_least(tokens - t, some / TILES * TILES);
        product(m, a, first, token + t, n, width, y + t * ldy, ldy);
    }
}

gr_act gr_activations(const gr_engine *e, uint32_t kind, uint32_t cols, bool codes, bool floats)
{
    size_t chunk = e->v.conf.chunk, groups = (cols + GB_GROUP - 1) / GB_GROUP;
    gr_act a = {.cols = cols, .groups = (uint32_t)groups};
    uint8_t *p = e->buf[kind];
    if (codes) {
        a.codes = (int8_t *)p;
        p += gr_round_up(chunk * groups * GB_GROUP, GB_LINE);
        a.sa = (float *)(void *)p;
        p += gr_round_up(chunk * groups * sizeof(float), GB_LINE);
        a.asum = (int32_t *)(void *)p;
        p += gr_round_up(chunk * groups * sizeof(int32_t), GB_LINE);
    }
    if (floats)
        a.x = (float *)(void *)p;
    return a;
}

gr_act gr_input_of(const gr_engine *e, uint32_t kind, const gb_tensor *t)
{
    bool floats = gr_takes_floats(&e->v, t);
    return gr_activations(e, kind, t->cols, !floats, floats);
}

static void find_tensors(gr_fwd *f)
{
    const gr_view *v = &f->e->v;
    f->l = &v->layers[f->layer];
    memset(f->t, 0, sizeof f->t);
    for (uint32_t i = f->l->tens_count; i-- > 0;) {
        const gb_tensor *t = &v->tensors[f->l->tens_first + i];
        if (t->role < ROLES)
            f->t[t->role] = t;
    }
}

/* ---- between the products ---- */

static void offer(const gr_fwd *f, uint32_t stage, const gr_act *a) /* to who wants to know */
{
    const gr_engine *e = f->e;
    gr_tell(e, stage, f->layer);
    if (e->capture && a->x)
        e->capture(e->capture_user, f->layer, stage, a->x, f->count, a->cols);
}

/* X += Y, normed first in a sandwich block; X -> XN. False: not finite. */
static bool next_input(const gr_fwd *f, uint32_t token)
{
    const gr_engine *e = f->e;
    uint32_t hidden = e->v.conf.hidden;
    float eps = e->v.conf.norm_eps;
    float *x = f->x + (size_t)token * hidden, *y = f->y + (size_t)token * hidden;
    gr_act xn = f->xn;
    bool ok = true;
    if (f->post)
        ok &= e->kern->norm(y, f->post, hidden, eps, y);
    if (f->add)
        e->kern->add(x, y, hidden);
    if (f->norm)
        ok &= e->kern->norm_act(x, f->norm, hidden, eps, &xn, token);
    return ok;
}

static void next_few(gr_fwd *f)
{
    for (uint32_t t = f->from; f->count < MANY && t < f->count; t++)
        mark(f, t, GB_MAX_THREADS, next_input(f, t));
}

static const float *weights(const gr_fwd *f, uint32_t role)
{
    return gr_vector(&f->e->v, f->t[role]);
}

static const float *post_norm(const gr_fwd *f, uint32_t role)
{
    return f->l->block == GB_BLOCK_SANDWICH ? weights(f, role) : NULL;
}

/* Of a last layer's tokens whose logits nobody wants, only keys and values are, unless watched. */
static uint32_t first_wanted(const gr_fwd *f)
{
    bool last = f->layer + 1 == f->e->v.layer_count;
    bool all = f->want >= 2 || !f->ids || f->of || f->e->watch;
    return !last || all ? 0 : f->count - f->want;
}

static void begin_layer(void *arg)
{
    gr_fwd *f = arg;
    find_tensors(f);
    const gr_view *v = &f->e->v;
    const gb_tensor *q = f->t[GB_ROLE_Q], *k = f->t[GB_ROLE_K], *val = f->t[GB_ROLE_V];
    bool fq = gr_takes_floats(v, q), fk = gr_takes_floats(v, k), fv = gr_takes_floats(v, val);
    f->xn = gr_activations(f->e, GB_BUF_XN, q->cols, !(fq && fk && fv), fq || fk || fv);
    f->att = gr_input_of(f->e, GB_BUF_ATT, f->t[GB_ROLE_O]);
    f->h = gr_input_of(f->e, GB_BUF_H, f->t[GB_ROLE_DOWN]);
    f->norm = weights(f, GB_ROLE_ATTN_NORM);
    f->from = 0;
    f->first = first_wanted(f);
    next_few(f);
}

static void end_qkv(void *arg)
{
    gr_fwd *f = arg;
    offer(f, GB_OP_QKV, &f->xn);
}

static void end_attention(void *arg) /* KV -> ring */
{
    gr_fwd *f = arg;
    for (uint32_t t = 0; t < f->count; t += owner(f, t)->rows)
        gr_kv_store(owner(f, t), f->l);
    offer(f, GB_OP_O, &f->att);
}

static void begin_ffn(void *arg)
{
    gr_fwd *f = arg;
    f->xn = gr_input_of(f->e, GB_BUF_XN, f->t[GB_ROLE_GATE_UP]);
    f->add = true;
    f->post = post_norm(f, GB_ROLE_POST_ATTN_NORM);
    f->norm = weights(f, GB_ROLE_FFN_NORM);
    f->from = f->first;
    next_few(f);
}

static void end_gate_up(void *arg)
{
    gr_fwd *f = arg;
    offer(f, GB_OP_GATE_UP, &f->xn);
    offer(f, GB_OP_DOWN, &f->h);
}

static void end_layer(void *arg) /* and begin the next */
{
    gr_fwd *f = arg;
    f->post = post_norm(f, GB_ROLE_POST_FFN_NORM);
    f->norm = NULL;
    f->from = f->first;
    if (++f->layer < f->e->v.layer_count)
        begin_layer(f);
    else
        next_few(f);
}

/* A barrier, and the next input: of few tokens made by the last thread to arrive, of many by all
 * threads, which takes a second barrier. */
static void meet(gr_fwd *f, void (*once)(void *arg), uint32_t thread, uint32_t threads)
{
    gr_team *team = f->e->team;
    gr_team_barrier(team, once, f);
    if (f->count < MANY)
        return;
    gr_range r = gr_share(f->count - f->from, thread, threads);
    for (uint32_t t = f->from + r.from; t < f->from + r.to; t++)
        mark(f, t, thread, next_input(f, t));
    gr_team_barrier(team, NULL, NULL);
}

/* ---- embedding ---- */

static void embed_row(const gr_view *v, const gb_tensor *t, uint32_t id, float *x)
{
    gr_mat m = gr_matrix(v, t);
    const uint8_t *panel = m.data + m.panel * (id / GB_PANEL), *codes = panel + GB_LINE;
    const uint8_t *low = m.low ? m.low + (size_t)256 * m.groups * (id / GB_PANEL) : NULL;
    uint32_t row = id % GB_PANEL, format = m.seg->format;
    float super = ((const float *)(const void *)panel)[row], scale = v->conf.embed_scale;
    for (uint32_t k = 0; k < m.cols; k++) {
        size_t at = (size_t)k * GB_PANEL + row;
        uint32_t quad = k % GB_GROUP / 4, shift = quad / 4 * 4; /* low nibbles: quads 0..3 */
        size_t byte = (size_t)256 * (k / GB_GROUP) + 64 * (quad % 4) + 4 * row + k % 4;
        float value;
        if (format == GB_FMT_F32)
            value = ((const float *)(const void *)panel)[at];
        else if (format == GB_FMT_F16)
            value = gr_half(((const uint16_t *)(const void *)panel)[at]);
        else
            value = super * (float)(16 * (codes[byte] >> shift & 15) +
                                    (low[byte] >> shift & 15) - 128);
        x[k] = value * scale;
    }
}

static void embed(void *arg, gr_range tokens, uint32_t thread)
{
    gr_fwd *f = arg;
    const gr_view *v = &f->e->v;
    (void)thread;
    for (uint32_t t = tokens.from; t < tokens.to; t++)
        embed_row(v, &v->tensors[v->conf.tens_embed], f->ids[t],
                  f->x + (size_t)t * v->conf.hidden);
}

/* ---- q, k, v: a unit is the whole heads of a whole number of panels ---- */

static uint16_t *query_scales(const gr_engine *e, const gb_layer *l)
{
    size_t codes = (size_t)e->v.conf.chunk * l->heads * l->head_dim;
    return (uint16_t *)(void *)(e->buf[GB_BUF_Q] + gr_round_up(codes, GB_LINE));
}

static bool put_query(const gr_engine *e, const gb_layer *l, uint32_t token, uint32_t head,
                      const float *q)
{
    size_t row = (size_t)token * l->heads + head;
    if (e->v.conf.kv_type == GB_KV_INT8)
        return e->kern->quantise(q, l->head_dim, l->kv_group,
                                 (int8_t *)e->buf[GB_BUF_Q] + row * l->head_dim,
                                 query_scales(e, l) + row * (l->head_dim / l->kv_group));
    memcpy((float *)(void *)e->buf[GB_BUF_Q] + row * l->head_dim, q, l->head_dim * sizeof *q);
    return e->kern->finite(q, l->head_dim);
}

/* A product's row of one head, in place: bias, norm, RoPE; then to its buffer. */
static bool finish_head(const gr_fwd *f, uint32_t role, uint32_t token, uint32_t head, float *y)
{
    const gr_engine *e = f->e;
    const gb_layer *l = f->l;
    bool ok = true;
    if (l->flags & GB_LAYERF_QKV_BIAS) {
        const gb_tensor *b = f->t[GB_ROLE_Q_BIAS + (role - GB_ROLE_Q)];
        e->kern->add(y, gr_vector(&e->v, b) + (size_t)head * l->head_dim, l->head_dim);
    }
    if (role == GB_ROLE_V)
        return gr_kv_put(e, l, true, token, head, y);
    if (l->flags & GB_LAYERF_QK_NORM) {
        const gb_tensor *w = f->t[GB_ROLE_Q_NORM + (role - GB_ROLE_Q)];
        ok = e->kern->norm(y, gr_vector(&e->v, w), l->head_dim, e->v.conf.norm_eps, y);
    }
    const gb_rope *rope = &e->v.ropes[l->rope];
    const float *table = (const float *)(const void *)(e->v.rope_base + rope->offset);
    e->kern->rope(y, table + (size_t)place(f, token) * 2 * rope->pairs, rope->pairs);
    bool query = role == GB_ROLE_Q;
    uint32_t kv_head = query ? head / (l->heads / l->kv_heads) : head;
    if (gr_kv_unit_of(&e->v, l, kv_head).flags & GB_UNITF_KEY4)
        gr_kv_rotate(y, l->head_dim, query);
    ok &= query ? put_query(e, l, token, head, y) : gr_kv_put(e, l, false, token, head, y);
    return ok;
}

static void qkv_unit(const gr_fwd *f, uint32_t role, uint32_t head, uint32_t heads,
                     uint32_t thread)
{
    const gr_engine *e = f->e;
    const gb_tensor *t = f->t[role];
    while (head >= t->slab_first + t->slab_count)
        t++; /* the records of a role follow each other in head order */
    float y[SCRATCH];
    gr_mat m = gr_matrix(&e->v, t);
    uint32_t dim = f->l->head_dim, width = heads * dim, some = SCRATCH / width, n;
    uint32_t panel = (head - t->slab_first) * dim / GB_PANEL;
    some = some > 4 ? some / 4 * 4 : some;
    uint32_t first = role == GB_ROLE_Q ? f->first : 0;
    for (; first < f->count; first += n) {
        n = gr_least(some, f->count - first);
        gr_multiply(e, &m, &f->xn, panel, first, n, width, y, width);
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t h = 0; h < heads; h++)
                mark(f, first + i, thread, finish_head(f, role, first + i, head + h,
                                                       y + (size_t)i * width + h * dim));
    }
}

static void qkv(void *arg, gr_range units, uint32_t thread)
{
    gr_fwd *f = arg;
    const gb_layer *l = f->l;
    uint32_t each = heads_to_fill(l->head_dim, GB_PANEL);
    uint32_t q = sets(l->heads, each), kv = sets(l->kv_heads, each);
    for (uint32_t u = units.from; u < units.to; u++) {
        uint32_t role = u < q ? GB_ROLE_Q : u < q + kv ? GB_ROLE_K : GB_ROLE_V;
        uint32_t head = (u < q ? u : (u - q) % kv) * each;
        uint32_t all = u < q ? l->heads : l->kv_heads;
        qkv_unit(f, role, head, gr_least(each, all - head), thread);
    }
}

static uint32_t qkv_units(const gb_layer *l)
{
    uint32_t each = heads_to_fill(l->head_dim, GB_PANEL);
    return sets(l->heads, each) + 2 * sets(l->kv_heads, each);
}

/* ---- attention: a unit is one token and heads that fill whole groups of o's input ---- */

/* Successive tokens of one head, or heads of one token that share keys and values: they read them
 * together. Row i is (token + i, head) or (token, head + i). */
typedef struct gr_tile {
    uint32_t token, head, rows;
    bool heads;
    uint32_t sink;       /* positions from 0 that all rows see .. */
    uint32_t begin, end; /* .. besides these, which any row sees */
    float *s;            /* [rows][ld]: scores, then probabilities, in columns */
    size_t ld;
} gr_tile;

static gr_seen seen_by(const gr_fwd *f, uint32_t token, uint32_t head)
{
    const gb_layer *l = f->l;
    return gr_kv_seen(f->e, l, head / (l->heads / l->kv_heads), place(f, token));
}

/* Column of a score: the sink's, then the others', from begin & ~15. A column is its position
 * modulo 16: sink and begin are whole blocks where there is a gap. */
static uint32_t column(const gr_tile *t, uint32_t position)
{
    return position < t->sink ? position : t->sink + position - t->begin / 16 * 16;
}

/* The first position from `position` on that a row sees, beyond the gap. */
static uint32_t onward(const gr_tile *t, uint32_t position)
{
    return position >= t->sink && position < t->begin ? t->begin : position;
}

static gr_span span_at(const gr_fwd *f, const gr_tile *t, uint32_t position)
{
    const gb_layer *l = f->l;
    return gr_kv_span(owner(f, t->token), l, t->head / (l->heads / l->kv_heads), position,
                      position < t->sink ? t->sink : t->end);
}

static void score_tile(const gr_fwd *f, const gr_tile *t, const gr_span *span, float *to)
{
    const gr_engine *e = f->e;
    const gb_layer *l = f->l;
    uint32_t dim = l->head_dim, type = e->v.conf.kv_type;
    size_t row = (size_t)t->token * l->heads + t->head, step = t->heads ? 1 : l->heads;
    if (type == GB_KV_INT8) {
        uint32_t scales = dim / l->kv_group;
        gr_queries q = {(const int8_t *)e->buf[GB_BUF_Q] + row * dim,
                        query_scales(e, l) + row * scales, step * dim, step * scales, t->rows};
        e->kern->score(&q, span, dim, l->kv_group, to, t->ld);
        return;
    }
    const float *q = (const float *)(const void *)e->buf[GB_BUF_Q] + row * dim;
    for (uint32_t i = 0; i < t->rows; i++)
        e->kern->score_float(type, q + i * step * dim, span, dim, to + i * t->ld);
}

/* Scores of a row become probabilities before the division; 0 where it sees nothing. */
static float softmax_row(const gr_fwd *f, const gr_tile *t, uint32_t i)
{
    const gb_layer *l = f->l;
    uint32_t token = t->token + (t->heads ? 0 : i), end = place(f, token) + 1;
    uint32_t begin = t->sink ? 0 : seen_by(f, token, t->head).from, skip = begin % 16;
    uint32_t first = column(t, begin - skip), last = column(t, end);
    float *s = t->s + i * t->ld;
    memset(s, 0, first * sizeof *s);
    memset(s + last, 0, (t->end - end) * sizeof *s);
    float cap = l->flags & GB_LAYERF_ATTN_SOFTCAP ? l->attn_softcap : 0.0f;
    return f->e->kern->softmax(s + first, skip, last - first, l->score_scale, cap);
}

static size_t score_room(const gr_fwd *f) /* floats of a thread */
{
    return (size_t)GB_MAX_THREADS * f->e->v.conf.context / f->threads;
}

static float *scores_of(const gr_fwd *f, uint32_t thread)
{
    return (float *)(void *)f->e->buf[GB_BUF_SCORES] + score_room(f) * thread;
}

/* out: [rows][ldo], of which this head's are dim values. */
static void attend(const gr_fwd *f, const gr_tile *t, float *out, size_t ldo)
{
    const gr_engine *e = f->e;
    const gb_layer *l = f->l;
    uint32_t type = e->v.conf.kv_type, dim = l->head_dim;
    float total[GR_QUERIES];
    int8_t codes[GB_KV_BLOCK * GB_MAX_HEAD_DIM];
    gr_span span;
    for (uint32_t p = onward(t, 0); p < t->end; p = onward(t, p + span.count)) {
        span = span_at(f, t, p);
        if (span.key4)
            span.k = gr_kv_unpack(&span, span.k, dim, codes);
        score_tile(f, t, &span, t->s + column(t, p));
    }
    for (uint32_t i = 0; i < t->rows; i++) {
        total[i] = softmax_row(f, t, i);
        memset(out + i * ldo, 0, dim * sizeof *out);
    }
    for (uint32_t p = onward(t, 0); p < t->end; p = onward(t, p + span.count)) {
        span = span_at(f, t, p);
        const float *s = t->s + column(t, p);
        if (span.value4)
            span.v = gr_kv_unpack(&span, span.v, dim, codes);
        if (type == GB_KV_INT8)
            e->kern->value(s, t->ld, t->rows, &span, dim, l->kv_group, out, ldo);
        for (uint32_t i = 0; type != GB_KV_INT8 && i < t->rows; i++)
            e->kern->value_float(type, s + i * t->ld, &span, dim, out + i * ldo);
    }
    for (uint32_t i = 0; i < t->rows; i++)
        e->kern->divide(out + i * ldo, total[i], dim);
}

void gr_attend_as(const gr_watched *w, const gb_kv_unit *u, float *out)
{
    const gr_fwd *f = w->pass;
    gr_seen seen = gr_kv_unit_seen(u, f->l->window, w->position);
    gr_tile t = {.token = w->token, .head = w->head, .rows = 1, .sink = seen.sink,
                 .begin = seen.from, .end = w->position + 1, .s = scores_of(f, w->thread)};
    attend(f, &t, out, f->l->head_dim);
}

/* To the compiler's cache template. */
static void show(const gr_fwd *f, const gr_tile *t, uint32_t thread, const float *out)
{
    gr_watched w = {.layer = f->layer, .head = t->head, .position = place(f, t->token),
                    .first = t->begin / 16 * 16,
                    .weights = t->s, .out = out, .pass = f, .token = t->token, .thread = thread};
    if (f->e->watch)
        f->e->watch(f->e->watch_user, &w);
}

/* As many rows, up to `most`, as a thread's share of the score buffer holds. */
static gr_tile tile_at(const gr_fwd *f, uint32_t thread, uint32_t token, uint32_t head,
                       uint32_t most, bool heads)
{
    gr_seen seen = seen_by(f, token, head);
    gr_tile t = {.token = token, .head = head, .heads = heads, .sink = seen.sink,
                 .begin = seen.from};
    size_t room = score_room(f);
    t.s = scores_of(f, thread);
    for (uint32_t rows = 1; rows <= most; rows++) {
        uint32_t last = token + (heads ? 0 : rows - 1), end = place(f, last) + 1;
        size_t ld = gr_round_up(column(&t, end), 16);
        seen = seen_by(f, last, head); /* rows of a tile have one gap */
        bool same = seen.sink == t.sink && (t.sink == 0 || seen.from == t.begin);
        if (rows > 1 && (!same || ld * rows > room))
            break;
        t.rows = rows, t.end = end, t.ld = ld;
    }
    return t;
}

/* Units lie one behind the other, so that those of a tile do: heads outside, tokens inside; where
 * no token shares its keys with another, tokens outside. */
static void attention(void *arg, gr_range units, uint32_t thread)
{
    gr_fwd *f = arg;
    const gb_layer *l = f->l;
    uint32_t each = heads_to_fill(l->head_dim, GB_GROUP), shared = l->heads / l->kv_heads;
    uint32_t width = each * l->head_dim, tokens = f->count - f->first;
    bool together = each == 1 && (tokens == 1 || f->apart); /* heads */
    gr_tile t;
    for (uint32_t u = units.from; u < units.to; u += t.rows) {
        uint32_t head = together ? u % l->heads : u / tokens * each;
        uint32_t token = f->first + (together ? u / l->heads : u % tokens);
        uint32_t heads = gr_least(each, l->heads - head);
        const gr_engine *o = owner(f, token);
        uint32_t run = together ? shared - head % shared : o->row + o->rows - token;
        float out[SCRATCH];
        uint32_t most = gr_least(SCRATCH / width, GR_QUERIES);
        most = gr_least(f->e->watch ? 1 : most, gr_least(units.to - u, run));
        for (uint32_t h = 0; h < heads; h++) {
            t = tile_at(f, thread, token, head + h, most, together);
            most = t.rows; /* a head before may have taken more: it is run again from there */
            attend(f, &t, out + (size_t)h * l->head_dim, width);
            show(f, &t, thread, out + (size_t)h * l->head_dim);
        }
        for (uint32_t i = 0; i < t.rows; i++) {
            uint32_t row = token + (together ? 0 : i), group = head + (together ? i : 0);
            mark(f, row, thread, f->e->kern->act(out + (size_t)i * width, &f->att, row,
                                                 group * l->head_dim / GB_GROUP,
                                                 heads * l->head_dim));
        }
    }
}

static uint32_t attention_units(const gr_fwd *f)
{
    return sets(f->l->heads, heads_to_fill(f->l->head_dim, GB_GROUP)) * (f->count - f->first);
}

/* ---- feed-forward and the other products: units of 32 rows ---- */

static void product(const gr_fwd *f, uint32_t role, const gr_act *a, gr_range units)
{
    gr_mat m = gr_matrix(&f->e->v, f->t[role]); /* o or down -> Y */
    uint32_t rows = f->e->v.conf.hidden, first = f->first;
    for (uint32_t u = units.from; u < units.to; u++)
        gr_multiply(f->e, &m, a, 2 * u, first, f->count - first,
                    gr_least(GB_UNIT, rows - GB_UNIT * u),
                    f->y + (size_t)first * rows + (size_t)GB_UNIT * u, rows);
}

static void attention_out(void *arg, gr_range units, uint32_t thread)
{
    const gr_fwd *f = arg;
    (void)thread;
    product(f, GB_ROLE_O, &f->att, units);
}

static void down(void *arg, gr_range units, uint32_t thread)
{
    const gr_fwd *f = arg;
    (void)thread;
    product(f, GB_ROLE_DOWN, &f->h, units);
}

static void gate_up(void *arg, gr_range units, uint32_t thread)
{
    gr_fwd *f = arg;
    const gr_kernels *kern = f->e->kern;
    gr_mat m = gr_matrix(&f->e->v, f->t[GB_ROLE_GATE_UP]);
    for (uint32_t u = units.from; u < units.to; u++) {
        enum { WIDTH = 2 * GB_UNIT, SOME = SCRATCH / WIDTH };
        float y[SCRATCH], h[GB_UNIT]; /* a row of y: gate 16, up 16, gate 16, up 16 */
        uint32_t rows = gr_least(GB_UNIT, f->l->ffn - GB_UNIT * u), n;
        uint32_t half = gr_least(rows, GB_PANEL);
        for (uint32_t first = f->first; first < f->count; first += n) {
            n = gr_least(SOME, f->count - first);
            gr_multiply(f->e, &m, &f->xn, 4 * u, first, n, rows > half ? WIDTH : GB_UNIT, y,
                        WIDTH);
            for (uint32_t i = 0; i < n; i++) {
                const float *g = y + WIDTH * i;
                kern->glu(f->l->act, g, g + GB_PANEL, h);
                if (rows > half)
                    kern->glu(f->l->act, g + GB_UNIT, g + GB_UNIT + GB_PANEL, h + GB_PANEL);
                mark(f, first + i, thread, kern->act(h, &f->h, first + i, u, rows));
            }
        }
    }
}

/* ---- the forward pass, on every thread of the team ---- */

static void layers(void *arg, uint32_t thread, uint32_t threads)
{
    gr_fwd *f = arg;
    const gr_engine *e = f->e;
    uint32_t rows = sets(e->v.conf.hidden, GB_UNIT);
    if (f->ids)
        gr_split(e, f->count, embed, f, thread, threads);                 /* ids -> X */
    meet(f, begin_layer, thread, threads);                                /* X -> XN */
    for (uint32_t i = 0; i < e->v.layer_count; i++) {
        gr_split(e, qkv_units(f->l), qkv, f, thread, threads);            /* XN -> Q, KV */
        gr_team_barrier(e->team, end_qkv, f);
        gr_split(e, attention_units(f), attention, f, thread, threads);   /* Q, KV -> ATT */
        gr_team_barrier(e->team, end_attention, f);                       /* KV -> ring */
        if (f->first < f->count)
            gr_split(e, rows, attention_out, f, thread, threads);         /* ATT -> Y */
        meet(f, begin_ffn, thread, threads);                              /* X += Y -> XN */
        gr_split(e, sets(f->l->ffn, GB_UNIT), gate_up, f, thread, threads); /* XN -> H */
        gr_team_barrier(e->team, end_gate_up, f);
        if (f->first < f->count)
            gr_split(e, rows, down, f, thread, threads);                  /* H -> Y */
        meet(f, end_layer, thread, threads);                              /* X += Y -> XN */
    }
    if (f->of)
        gr_head_share(&f->head, thread, threads);                         /* X -> LOGITS */
    else if (f->want == 1)
        gr_head_part(&f->head, thread, threads);
}

/* ---- entry points ---- */

/* Rows from `row` on are the engine's, in a pass that `lead` leads. */
static void begin_rows(gr_engine *e, const gr_engine *lead, uint32_t row, uint32_t rows)
{
    e->store = lead->buf[GB_BUF_KV];
    e->row = row;
    e->rows = rows;
    memset(e->bad, 0, sizeof e->bad);
    e->high = e->pos + rows > e->high ? e->pos + rows : e->high;
}

static void pass(gr_engine *e, gr_fwd *f)
{
    size_t last = f->of ? 0 : f->count - 1;
    f->e = e;
    f->x = (float *)(void *)e->buf[GB_BUF_X];
    f->y = (float *)(void *)e->buf[GB_BUF_Y];
    f->head = (gr_head){.e = e, .x = f->x + last * e->v.conf.hidden, .ids = f->ids,
                        .count = f->count, .of = f->of};
    f->threads = gr_step_threads(e, f->count < MANY ? e->decode_threads : e->threads);
    gr_team_run(e->team, f->threads, layers, f);
}

static bool run(gr_engine *e, gr_fwd *f)
{
    begin_rows(e, e, 0, f->count);
    pass(e, f);
    return !gr_bad(e);
}

/* After a failure: what a long chunk has pushed out of a sliding window is computed again from the
 * ids, so that the cache is as it was. Without ids there is no such cache to keep. */
static gemrun_status fail_nonfinite(gr_engine *e, bool ids)
{
    uint32_t had = e->pos, position = e->pos, rows = e->rows;
    e->logits_valid = false;
    if (gr_kv_evicts(e, e->pos, rows)) {
        e->pos = 0;
        while (ids && e->pos < had) {
            gr_fwd again = {.ids = (const uint32_t *)(const void *)e->buf[GB_BUF_IDS] + e->pos,
                            .count = gr_least(e->chunk, had - e->pos)};
            (void)run(e, &again); /* it was finite the first time */
            e->pos += again.count;
        }
    }
    return gr_fail(&e->err, GEMRUN_E_NONFINITE, 0, position, rows);
}

/* The rows are in the cache. */
static void keep_rows(gr_engine *e, const uint32_t *ids, bool logits)
{
    if (ids)
        memcpy(e->buf[GB_BUF_IDS] + e->pos * sizeof *ids, ids, e->rows * sizeof *ids);
    e->pos += e->rows;
    e->logits_valid = logits;
}

static gemrun_status step(gr_engine *e, gr_fwd *f, gemrun_logits_fn fn, void *user)
{
    if (f->count == 0 || f->count > e->chunk || f->count > e->context - e->pos)
        return gr_fail(&e->err, GEMRUN_E_ARGUMENT, 0, e->chunk, f->count);
    if (!run(e, f) || (f->want == 2 && !gr_heads(e, f->x, f->count, fn, user)))
        return fail_nonfinite(e, f->ids != NULL);
    keep_rows(e, f->ids, f->want != 0);
    return GEMRUN_OK;
}

gemrun_status gr_forward(gr_engine *e, const uint32_t *ids, uint32_t count, uint32_t want,
                         gemrun_logits_fn fn, void *user)
{
    gr_fwd f = {.ids = ids, .count = count, .want = want};
    return step(e, &f, fn, user);
}

gemrun_status gr_forward_hidden(gr_engine *e, float *x, uint32_t count)
{
    gr_fwd f = {.count = count};
    size_t bytes = (size_t)gr_least(count, e->chunk) * e->v.conf.hidden * sizeof *x;
    memcpy(e->buf[GB_BUF_X], x, bytes);
    gemrun_status st = step(e, &f, NULL, NULL);
    if (st == GEMRUN_OK)
        memcpy(x, e->buf[GB_BUF_X], bytes);
    return st;
}

void gr_forward_many(gr_engine *e, gr_engine *const *of, const uint32_t *ids, uint32_t count)
{
    gr_fwd f = {.ids = ids, .count = count, .of = of, .apart = true};
    for (uint32_t t = 0, n; t < count; t += n) {
        for (n = 1; t + n < count && of[t + n] == of[t]; n++)
            f.apart = false;
        begin_rows(of[t], e, t, n);
        of[t]->err.code = GEMRUN_OK;
    }
    pass(e, &f);
    for (uint32_t t = 0, n; t < count; t += n) {
        gr_engine *o = of[t];
        n = o->rows; /* a failure's own passes change it */
        if (gr_bad(o))
            fail_nonfinite(o, true);
        else
            keep_rows(o, ids + t, o->wanted);
    }
}
