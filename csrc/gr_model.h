/* gr_model.h: what gr_model.c and gr_kv.c share. */
#ifndef GR_MODEL_H
#define GR_MODEL_H

#include "gr_internal.h"
#include "gr_kern.h"

/* K and V of the chunk in progress (GB_BUF_KV), each [token][kv head][..] as in the ring. */
typedef struct gr_kv_chunk {
    uint8_t *k, *v;
    uint16_t *ks, *vs; /* int8 only */
    uint32_t element;  /* bytes */
    uint32_t scales;   /* per head and position; 0 for float */
} gr_kv_chunk;

gr_kv_chunk gr_kv_chunk_of(const gr_engine *e, const gb_layer *l);
/* Keep a head of k (or v) of a token of the chunk, in its stored form. False: not finite. */
bool gr_kv_put(const gr_engine *e, const gb_layer *l, bool value, uint32_t token, uint32_t head,
               const float *x);
/* Consecutive positions from `position` on, below `end`: from the ring before the chunk (which
 * starts at e->pos), from the chunk's own store after that. */
gr_span gr_kv_span(const gr_engine *e, const gb_layer *l, uint32_t head, uint32_t position,
                   uint32_t end);
/* The chunk's K and V go to the ring; of a chunk longer than the ring only what fits. */
void gr_kv_store(const gr_engine *e, const gb_layer *l, uint32_t count);
/* Would storing `count` more tokens overwrite keys that a token at e->pos may see? */
bool gr_kv_evicts(const gr_engine *e, uint32_t count);

static inline size_t gr_round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

#endif
