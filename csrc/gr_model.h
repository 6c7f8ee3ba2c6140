/* gr_model.h: what gr_model.c, gr_head.c and gr_kv.c share. */
#ifndef GR_MODEL_H
#define GR_MODEL_H

#include "gr_internal.h"
#include "gr_kern.h"

/* K and V of the pass in progress (GB_BUF_KV), each [row][kv head][..] as in the ring. */
typedef struct gr_kv_chunk {
    uint8_t *k, *v;
    uint16_t *ks, *vs; /* int8 only */
    uint32_t element;  /* bytes */
    uint32_t scales;   /* per head and position; 0 for float */
} gr_kv_chunk;

/* Parts of a ring block, in bytes from its start. */
typedef struct gr_kv_block {
    size_t size, ks, v, vs; /* K codes are at 0 */
} gr_kv_block;

gr_kv_block gr_kv_block_of(const gr_engine *e, const gb_layer *l, uint32_t flags); /* of a unit */
/* The block where a position of a unit stands, of `size` bytes. */
uint8_t *gr_kv_ring_block(const gr_engine *e, const gb_layer *l, const gb_kv_unit *u,
                          uint32_t position, size_t size);
gr_kv_chunk gr_kv_chunk_of(const gr_engine *e, const gb_layer *l);
/* Keep a head of k (or v) of a row of the pass, in its stored form. False: not finite. */
bool gr_kv_put(const gr_engine *e, const gb_layer *l, bool value, uint32_t row, uint32_t head,
               const float *x);
/* What a KV head keeps, and where. */
gb_kv_unit gr_kv_unit_of(const gr_view *v, const gb_layer *l, uint32_t head);
/* What a query at `position` sees of a KV head: positions below `sink`, and those from `from` to
 * its own. Both are whole blocks where `sink` is not 0. */
typedef struct gr_seen {
    uint32_t sink, from;
} gr_seen;

gr_seen gr_kv_seen(const gr_engine *e, const gb_layer *l, uint32_t head, uint32_t position);
/* Consecutive positions from `position` on, below `end`: from the ring before the chunk (which
 * starts at e->pos), from the chunk's own store after that. */
gr_span gr_kv_span(const gr_engine *e, const gb_layer *l, uint32_t head, uint32_t position,
                   uint32_t end);
/* Keys or values of 4 bits of a span, which begin at `from`, as codes [GB_KV_BLOCK][dim] that a
 * kernel takes in their place. Returns codes. */
const int8_t *gr_kv_unpack(gr_span *s, const void *from, uint32_t dim, int8_t *codes);
/* A query or a key before it is quantised for keys of 4 bits (NUMERICS.md, 7): outliers are spread
 * over the head, and products stay what they are. */
void gr_kv_rotate(float *x, uint32_t dim, bool query);
/* K and V of the engine's rows go to the ring; of more rows than the ring holds only what fits. */
void gr_kv_store(const gr_engine *e, const gb_layer *l);
/* Would `count` tokens from `from` on overwrite keys that a token at `from` may see? */
bool gr_kv_evicts(const gr_engine *e, uint32_t from, uint32_t count);

/* What a query at `position` sees where a head of a layer with that window keeps `u`. */
gr_seen gr_kv_unit_seen(const gb_kv_unit *u, uint32_t window, uint32_t position);
/* The output [head_dim] of a watched head, were it to keep `u`. */
void gr_attend_as(const gr_watched *w, const gb_kv_unit *u, float *out);

/* Was anything of the last pass not finite? */
static inline bool gr_bad(const gr_engine *e)
{
    uint32_t bad = 0;
    for (uint32_t i = 0; i <= GB_MAX_THREADS; i++)
        bad |= e->bad[i];
    return bad != 0;
}

/* ---- views of weights and buffers (gr_model.c) ---- */
gr_mat gr_matrix(const gr_view *v, const gb_tensor *t);
const float *gr_vector(const gr_view *v, const gb_tensor *t);
bool gr_takes_floats(const gr_view *v, const gb_tensor *t);
/* y[t][0..width) = rows of panels first.. times tokens token..; one token goes by the GEMV. */
void gr_multiply(const gr_engine *e, const gr_mat *m, const gr_act *a, uint32_t first,
                 uint32_t token, uint32_t tokens, uint32_t width, float *y, size_t ldy);
/* An activation buffer in the forms that its consumers want: codes, then floats. */
gr_act gr_activations(const gr_engine *e, uint32_t kind, uint32_t cols, bool codes, bool floats);
gr_act gr_input_of(const gr_engine *e, uint32_t kind, const gb_tensor *t);

/* ---- the head (gr_head.c) ---- */
typedef struct gr_head { /* logits of one token: GB_BUF_HIDDEN, GB_BUF_LOGITS */
    gr_engine *e;
    const float *x; /* its residual stream [hidden], or NULL: its final norm is there */
    const uint32_t *ids; /* of this step, the token's the last; not yet in the context */
    uint32_t count;
    gr_mat m;       /* this and the following are made by a serial step: the weights */
    gr_act xn;      /* the final norm */
    gr_engine *const *of; /* of a shared pass: the engines of `count` rows x; NULL: e */
    uint32_t rows;  /* .. of which the last of every engine that wants logits */
} gr_head;

void gr_head_part(gr_head *h, uint32_t thread, uint32_t threads); /* on every thread */
/* The same for every engine of a shared pass that wants logits: all of them, always. */
void gr_head_share(gr_head *h, uint32_t thread, uint32_t threads);
/* Exact logits of up to 32 rows from a panel on. */
void gr_head_rows(gr_head *h, uint32_t panel, uint32_t rows, uint32_t thread);
/* Logits of one token, by a run of the team of their own; x as in gr_head. False: not finite. */
bool gr_head_row(gr_engine *e, const float *x);
/* Logits of every token x [count][hidden], in order. `fn` runs with the team at rest; when it stops
 * early, the logits kept are those after the last token all the same. False: not finite. */
bool gr_heads(gr_engine *e, const float *x, uint32_t count, gemrun_logits_fn fn, void *user);

/* gr_planes.c: a serial step that tells whether only the best logits are wanted, and the parts. */
bool gr_planes_begin(gr_head *h);
void gr_planes_part(gr_head *h, uint32_t thread, uint32_t threads);

void gr_tell(const gr_engine *e, uint32_t step, uint32_t at);

/* ---- splits ---- */
typedef struct gr_range {
    uint32_t from, to;
} gr_range;

static inline uint32_t gr_least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static inline gr_range gr_share(uint32_t units, uint32_t thread, uint32_t threads)
{
    return (gr_range){(uint32_t)((uint64_t)units * thread / threads),
                      (uint32_t)((uint64_t)units * (thread + 1) / threads)};
}

/* The units of a thread: one contiguous share; where cores differ, of half of them, and then pieces
 * of the rest until nothing is left. */
typedef void (*gr_some)(void *arg, gr_range units, uint32_t thread);
void gr_split(const gr_engine *e, uint32_t units, gr_some some, void *arg, uint32_t thread,
              uint32_t threads);

static inline size_t gr_round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

#endif
