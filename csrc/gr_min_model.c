/* gr_min_model.c: tokens through a dense transformer in a GR_MINIMAL build, as NUMERICS.md writes
 * it down: quantised weights, int8 KV cache.
 *
 * A step has at most 32 tokens: a ring has that many positions more than its window, so keys and
 * values go straight into it and nothing that the step's first token sees is overwritten. Every
 * product is one run of the thread team; all else is done by the caller's thread. */
#include "gr_min.h"
#ifdef GR_MIN_MVE
#include "gr_min_mve.h"
#endif

enum { ROLES = 27, SCRATCH = 8192 }; /* floats of a thread's scratch on its stack: 32 KB */
_Static_assert(GB_ROLE_DOWN + 1 == ROLES, "one place a role");

typedef struct forward {
    gr_engine *e;
    const gb_layer *l;
    const gb_tensor *t[ROLES]; /* of the layer; of a tensor in several records the first */
    uint32_t count;            /* tokens */
    float *x, *y, *one;        /* residual stream, product [count][hidden]; a normed token */
    gr_act xn, att, h;         /* inputs of q k v, gate_up and head; of o; of down */
    const gb_tensor *weights;  /* of o or down, in turn, .. */
    const gr_act *input;       /* .. and what they take */
    bool bad[GB_MAX_THREADS];  /* not finite */
} forward;

typedef struct codes { /* a head of a query, key or value */
    int8_t *code;
    uint16_t *scale;
} codes;

typedef struct units {
    uint32_t from, to;
} units;

static units share(uint32_t all, uint32_t thread, uint32_t threads)
{
    return (units){(uint32_t)((uint64_t)all * thread / threads),
                   (uint32_t)((uint64_t)all * (thread + 1) / threads)};
}

static uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Heads whose widths together are a multiple of `width`, a power of two. */
static uint32_t heads_to_fill(uint32_t head_dim, uint32_t width)
{
    uint32_t n = 1;
    while (head_dim * n % width)
        n *= 2;
    return n;
}

/* ---- views of weights and buffers ---- */

static gr_mat matrix(const gr_view *v, const gb_tensor *t)
{
    return (gr_mat){.data = v->image + t->offset,
                    .low = t->second_offset ? v->image + t->second_offset : NULL,
                    .seg = v->segments + t->seg_first,
                    .seg_count = t->seg_count,
                    .panel = gr_panel_size(t, v->segments),
                    .cols = t->cols,
                    .groups = t->cols_padded / GB_GROUP};
}

static const float *vector(const forward *f, const gb_tensor *t)
{
    return (const float *)(const void *)(f->e->v.image + t->offset);
}

static uint8_t *behind(uint8_t *p, size_t size)
{
    return p + (size + GB_LINE - 1) / GB_LINE * GB_LINE;
}

static gr_act input_of(const forward *f, uint32_t kind, const gb_tensor *t)
{
    size_t chunk = f->e->v.conf.chunk, groups = t->cols_padded / GB_GROUP;
    uint8_t *p = f->e->buf[kind], *sa = behind(p, chunk * groups * GB_GROUP);
    return (gr_act){.codes = (int8_t *)p, .sa = (float *)(void *)sa,
                    .asum = (int32_t *)(void *)behind(sa, chunk * groups * sizeof(float)),
                    .cols = t->cols, .groups = (uint32_t)groups};
}

static codes query_at(const forward *f, uint32_t token, uint32_t head)
{
    const gb_layer *l = f->l;
    uint8_t *p = f->e->buf[GB_BUF_Q];
    size_t row = (size_t)token * l->heads + head, all = (size_t)f->e->v.conf.chunk * l->heads;
    uint16_t *scales = (uint16_t *)(void *)behind(p, all * l->head_dim);
    return (codes){(int8_t *)p + row * l->head_dim, scales + row * (l->head_dim / l->kv_group)};
}

/* A key or value in its ring: blocks of 32 tokens, K codes, K scales, V codes, V scales. */
static codes stored_at(const forward *f, uint32_t head, uint32_t position, bool value)
{
    const gb_layer *l = f->l;
    size_t dim = l->head_dim, groups = dim / l->kv_group, slot = position % GB_KV_BLOCK;
    size_t half = GB_KV_BLOCK * (dim + groups * sizeof(uint16_t));
    size_t size = (2 * half + GB_LINE - 1) / GB_LINE * GB_LINE;
    size_t index = (size_t)head * l->kv_blocks + position / GB_KV_BLOCK % l->kv_blocks;
    uint8_t *p = f->e->kv + l->kv_offset + index * size + (value ? half : 0);
    return (codes){(int8_t *)p + slot * dim,
                   (uint16_t *)(void *)(p + GB_KV_BLOCK * dim) + slot * groups};
}

static void run(forward *f, gr_body body)
{
    gr_team_run(f->e->team, f->e->threads, body, f);
}

/* ---- embedding: rows in two planes ---- */

static void embed(const gr_view *v, uint32_t id, float *x)
{
    gr_mat m = matrix(v, &v->tensors[v->conf.tens_embed]);
    const uint8_t *panel = m.data + m.panel * (id / GB_PANEL), *high = panel + GB_LINE;
    const uint8_t *low = m.low + (size_t)256 * m.groups * (id / GB_PANEL);
    uint32_t row = id % GB_PANEL;
    float super = ((const float *)(const void *)panel)[row];
    for (uint32_t k = 0; k < m.cols; k++) {
        uint32_t quad = k % GB_GROUP / 4, shift = quad / 4 * 4; /* low nibbles: quads 0..3 */
        size_t at = (size_t)256 * (k / GB_GROUP) + 64 * (quad % 4) + 4 * row + k % 4;
        int32_t code = 16 * (high[at] >> shift & 15) + (low[at] >> shift & 15) - 128;
        x[k] = super * (float)code * v->conf.embed_scale;
    }
}

/* ---- q, k, v: a unit is the whole heads of a whole number of panels ---- */

/* A product's row of one head, in place: bias, norm, RoPE; then to its place. */
static bool finish_head(const forward *f, uint32_t role, uint32_t token, uint32_t head, float *y)
{
    const gr_engine *e = f->e;
    const gb_layer *l = f->l;
    uint32_t dim = l->head_dim, position = e->pos + token;
    bool ok = true;
    if (l->flags & GB_LAYERF_QKV_BIAS) {
        const float *b = vector(f, f->t[GB_ROLE_Q_BIAS + (role - GB_ROLE_Q)]) + (size_t)head * dim;
        for (uint32_t i = 0; i < dim; i++)
            y[i] += b[i];
    }
    if (role != GB_ROLE_V) {
        const gb_rope *rope = &e->v.ropes[l->rope];
        const float *table = (const float *)(const void *)(e->v.rope_base + rope->offset);
        if (l->flags & GB_LAYERF_QK_NORM)
            ok = gr_min_norm(y, vector(f, f->t[GB_ROLE_Q_NORM + (role - GB_ROLE_Q)]), dim,
                             e->v.conf.norm_eps, y);
        gr_min_rope(y, table + (size_t)position * 2 * rope->pairs, rope->pairs);
    }
    codes to = role == GB_ROLE_Q ? query_at(f, token, head)
                                 : stored_at(f, head, position, role == GB_ROLE_V);
    return gr_min_quantise(y, dim, l->kv_group, to.code, to.scale) && ok;
}

static bool qkv_unit(const forward *f, uint32_t role, uint32_t head, uint32_t heads)
{
    const gb_tensor *t = f->t[role];
    while (head >= t->slab_first + t->slab_count)
        t++; /* the records of a role follow each other in head order */
    float y[SCRATCH];
    gr_mat m = matrix(&f->e->v, t);
    uint32_t dim = f->l->head_dim, panel = (head - t->slab_first) * dim / GB_PANEL;
    bool ok = true;
    for (uint32_t i = 0; i < f->count; i++) {
        gr_min_product(&m, &f->xn, panel, i, 1, heads * dim, y, SCRATCH);
        for (uint32_t h = 0; h < heads; h++)
            ok &= finish_head(f, role, i, head + h, y + h * dim);
    }
    return ok;
}

static void qkv(void *arg, uint32_t thread, uint32_t threads)
{
    forward *f = arg;
    const gb_layer *l = f->l;
    uint32_t each = heads_to_fill(l->head_dim, GB_PANEL);
    uint32_t q = (l->heads + each - 1) / each, kv = (l->kv_heads + each - 1) / each;
    units r = share(q + 2 * kv, thread, threads);
    for (uint32_t u = r.from; u < r.to; u++) {
        uint32_t role = u < q ? GB_ROLE_Q : u < q + kv ? GB_ROLE_K : GB_ROLE_V;
        uint32_t head = (u < q ? u : (u - q) % kv) * each;
        uint32_t all = u < q ? l->heads : l->kv_heads;
        f->bad[thread] |= !qkv_unit(f, role, head, least(each, all - head));
    }
}

/* ---- attention: a unit is one token and heads that fill whole groups of o's input ---- */

#ifndef GR_MIN_MVE
static int32_t dot_of(const int8_t *a, const int8_t *b, uint32_t n)
{
    int32_t sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += (int32_t)a[i] * b[i];
    return sum;
}
#endif

static float score(codes q, codes k, uint32_t dim, uint32_t group)
{
    float acc = 0.0f;
    for (uint32_t i = 0, g = 0; i < dim; i += group, g++)
        acc = gr_fmaf((float)dot_of(q.code + i, k.code + i, group),
                      gr_bf16(q.scale[g]) * gr_bf16(k.scale[g]), acc);
    return acc;
}

static void attend(const forward *f, uint32_t thread, uint32_t token, uint32_t head, float *out)
{
    const gr_engine *e = f->e;
    const gb_layer *l = f->l;
    uint32_t dim = l->head_dim, from = head / (l->heads / l->kv_heads), end = e->pos + token + 1;
    uint32_t begin = l->window && end > l->window ? end - l->window : 0, skip = begin % 16;
    float *s = (float *)(void *)e->buf[GB_BUF_SCORES] + (size_t)thread * e->v.conf.context + skip;
    codes q = query_at(f, token, head);
    for (uint32_t p = begin; p < end; p++)
        s[p - begin] = score(q, stored_at(f, from, p, false), dim, l->kv_group);
    float cap = l->flags & GB_LAYERF_ATTN_SOFTCAP ? l->attn_softcap : 0.0f;
    float total = gr_min_softmax(s - skip, skip, skip + (end - begin), l->score_scale, cap);
    memset(out, 0, dim * sizeof *out);
    for (uint32_t p = begin; p < end; p++) {
        codes v = stored_at(f, from, p, true);
        for (uint32_t i = 0; i < dim; i++)
            out[i] = gr_fmaf(s[p - begin] * gr_bf16(v.scale[i / l->kv_group]), (float)v.code[i],
                             out[i]);
    }
    for (uint32_t i = 0; i < dim; i++)
        out[i] = out[i] / total;
}

static void attention(void *arg, uint32_t thread, uint32_t threads)
{
    forward *f = arg;
    const gb_layer *l = f->l;
    uint32_t each = heads_to_fill(l->head_dim, GB_GROUP), sets = (l->heads + each - 1) / each;
    units r = share(sets * f->count, thread, threads);
    for (uint32_t u = r.from; u < r.to; u++) {
        uint32_t head = u / f->count * each, token = u % f->count;
        uint32_t heads = least(each, l->heads - head);
        float out[SCRATCH];
        for (uint32_t h = 0; h < heads; h++)
            attend(f, thread, token, head + h, out + (size_t)h * l->head_dim);
        f->bad[thread] |= !gr_min_act(out, &f->att, token, head * l->head_dim / GB_GROUP,
                                      heads * l->head_dim);
    }
}

/* ---- the other products: units of 32 rows ---- */

static void product(void *arg, uint32_t thread, uint32_t threads)
{
    const forward *f = arg;
    gr_mat m = matrix(&f->e->v, f->weights);
    uint32_t rows = f->e->v.conf.hidden;
    units r = share((rows + GB_UNIT - 1) / GB_UNIT, thread, threads);
    for (uint32_t u = r.from; u < r.to; u++)
        gr_min_product(&m, f->input, 2 * u, 0, f->count, least(GB_UNIT, rows - GB_UNIT * u),
                       f->y + (size_t)GB_UNIT * u, rows);
}

static void gate_up(void *arg, uint32_t thread, uint32_t threads)
{
    forward *f = arg;
    gr_mat m = matrix(&f->e->v, f->t[GB_ROLE_GATE_UP]);
    units r = share((f->l->ffn + GB_UNIT - 1) / GB_UNIT, thread, threads);
    for (uint32_t u = r.from; u < r.to; u++) {
        uint32_t rows = least(GB_UNIT, f->l->ffn - GB_UNIT * u);
        for (uint32_t t = 0; t < f->count; t++) {
            float y[2 * GB_PANEL], h[GB_UNIT]; /* panels alternate: gate 16, up 16 */
            for (uint32_t i = 0; i < rows; i += GB_PANEL) {
                gr_min_product(&m, &f->xn, 4 * u + i / 8, t, 1, 2 * GB_PANEL, y, 0);
                gr_min_glu(f->l->act, y, y + GB_PANEL, h + i);
            }
            f->bad[thread] |= !gr_min_act(h, &f->h, t, u, rows);
        }
    }
}

static void head(void *arg, uint32_t thread, uint32_t threads)
{
    forward *f = arg;
    const gb_conf *c = &f->e->v.conf;
    gr_mat m = matrix(&f->e->v, &f->e->v.tensors[c->tens_head]);
    units r = share((c->vocab_rows + GB_UNIT - 1) / GB_UNIT, thread, threads);
    for (uint32_t u = r.from; u < r.to; u++) {
        uint32_t rows = least(GB_UNIT, c->vocab_rows - GB_UNIT * u);
        float *z = (float *)(void *)f->e->buf[GB_BUF_LOGITS] + (size_t)GB_UNIT * u;
        gr_min_product(&m, &f->xn, 2 * u, 0, 1, rows, z, GB_UNIT);
        for (uint32_t i = 0; i < rows; i++) {
            f->bad[thread] |= (gr_bits(z[i]) & GR_EXPONENT) == GR_EXPONENT;
            if (c->flags & GB_CONFF_FINAL_SOFTCAP)
                z[i] = gr_cap(z[i], c->final_softcap);
        }
    }
}

/* ---- the forward pass ---- */

static void normed(forward *f, const float *x, const gb_tensor *w, uint32_t token) /* -> XN */
{
    const gb_conf *c = &f->e->v.conf;
    bool ok = gr_min_norm(x, vector(f, w), c->hidden, c->norm_eps, f->one);
    f->bad[0] |= !gr_min_act(f->one, &f->xn, token, 0, c->hidden) || !ok;
}

static void multiply(forward *f, uint32_t role, const gr_act *input, uint32_t post) /* X += W A */
{
    uint32_t hidden = f->e->v.conf.hidden;
    f->weights = f->t[role];
    f->input = input;
    run(f, product);
    for (uint32_t t = 0; t < f->count; t++) {
        float *x = f->x + (size_t)t * hidden, *y = f->y + (size_t)t * hidden;
        if (f->l->block == GB_BLOCK_SANDWICH)
            f->bad[0] |= !gr_min_norm(y, vector(f, f->t[post]), hidden, f->e->v.conf.norm_eps, y);
        for (uint32_t i = 0; i < hidden; i++)
            x[i] += y[i];
    }
}

static void layer(forward *f, const gb_layer *l)
{
    const gr_view *v = &f->e->v;
    f->l = l;
    for (uint32_t i = l->tens_count; i-- > 0;)
        f->t[v->tensors[l->tens_first + i].role] = &v->tensors[l->tens_first + i];
    f->xn = input_of(f, GB_BUF_XN, f->t[GB_ROLE_Q]);
    f->att = input_of(f, GB_BUF_ATT, f->t[GB_ROLE_O]);
    f->h = input_of(f, GB_BUF_H, f->t[GB_ROLE_DOWN]);
    for (uint32_t t = 0; t < f->count; t++)
        normed(f, f->x + (size_t)t * v->conf.hidden, f->t[GB_ROLE_ATTN_NORM], t);
    run(f, qkv);
    run(f, attention);
    multiply(f, GB_ROLE_O, &f->att, GB_ROLE_POST_ATTN_NORM);
    for (uint32_t t = 0; t < f->count; t++)
        normed(f, f->x + (size_t)t * v->conf.hidden, f->t[GB_ROLE_FFN_NORM], t);
    run(f, gate_up);
    multiply(f, GB_ROLE_DOWN, &f->h, GB_ROLE_POST_FFN_NORM);
}

static bool is_good(const forward *f)
{
    bool bad = false;
    for (uint32_t i = 0; i < GB_MAX_THREADS; i++)
        bad |= f->bad[i];
    return !bad;
}

gemrun_status gr_forward(gr_engine *e, const uint32_t *ids, uint32_t count, uint32_t want,
                         gemrun_logits_fn fn, void *user)
{
    const gb_conf *c = &e->v.conf;
    forward f = {.e = e, .count = count, .x = (float *)(void *)e->buf[GB_BUF_X],
                 .y = (float *)(void *)e->buf[GB_BUF_Y],
                 .one = (float *)(void *)e->buf[GB_BUF_HIDDEN]};
    if (count == 0 || count > e->chunk || count > e->context - e->pos)
        return gr_fail(&e->err, GEMRUN_E_ARGUMENT, 0, e->chunk, count);
    for (uint32_t t = 0; t < count; t++)
        embed(&e->v, ids[t], f.x + (size_t)t * c->hidden);
    for (uint32_t i = 0; i < c->layer_count; i++)
        layer(&f, e->v.layers + i);
    bool stop = want != 2;
    for (uint32_t t = 0; want != 0 && t < count && is_good(&f); t++) {
        t = stop ? count - 1 : t; /* the logits kept are those after the last token */
        normed(&f, f.x + (size_t)t * c->hidden, &e->v.tensors[c->tens_final_norm], 0);
        run(&f, head);
        if (!stop && is_good(&f))
            stop = fn(user, e->pos + t, (const float *)(const void *)e->buf[GB_BUF_LOGITS],
                      c->vocab_rows) != 0;
    }
    e->logits_valid = want != 0 && is_good(&f);
    if (!is_good(&f))
        return gr_fail(&e->err, GEMRUN_E_NONFINITE, 0, e->pos, count);
    memcpy(e->buf[GB_BUF_IDS] + e->pos * sizeof *ids, ids, count * sizeof *ids);
    e->pos += count;
    return GEMRUN_OK;
}

void gr_kv_reset(gr_engine *e)
{
    e->pos = 0; /* what stands above a position is never read */
    e->logits_valid = false;
}
