/* gr_kv.c: keys and values, the ring of every layer and the store of the chunk in progress.
 *
 * A layer's ring is [kv head][block]; a block holds 32 tokens of one head: K codes, K scales, V
 * codes, V scales. Position p stands in block (p / 32) mod blocks. The ring is written after the
 * whole chunk has attended, so a chunk never evicts what its own first tokens see. */
#include "gr_model.h"

/* Parts of a ring block, in bytes from its start. */
typedef struct gr_kv_block {
    size_t size, ks, v, vs; /* K codes are at 0 */
} gr_kv_block;

static uint32_t element_size(uint32_t kv_type)
{
    return kv_type == GB_KV_INT8 ? 1 : kv_type == GB_KV_F16 ? 2 : 4;
}

static uint32_t scale_count(const gr_engine *e, const gb_layer *l)
{
    return e->v.conf.kv_type == GB_KV_INT8 ? l->head_dim / l->kv_group : 0;
}

static gr_kv_block block_of(const gr_engine *e, const gb_layer *l)
{
    size_t codes = (size_t)GB_KV_BLOCK * l->head_dim * element_size(e->v.conf.kv_type);
    size_t scales = (size_t)GB_KV_BLOCK * scale_count(e, l) * sizeof(uint16_t);
    return (gr_kv_block){.size = gr_round_up(2 * (codes + scales), GB_LINE),
                         .ks = codes, .v = codes + scales, .vs = 2 * codes + scales};
}

static uint8_t *ring_block(const gr_engine *e, const gb_layer *l, uint32_t head, uint32_t position,
                           size_t size)
{
    size_t index = (size_t)head * l->kv_blocks + position / GB_KV_BLOCK % l->kv_blocks;
    return e->kv + l->kv_offset + index * size;
}

gr_kv_chunk gr_kv_chunk_of(const gr_engine *e, const gb_layer *l)
{
    gr_kv_chunk c = {.element = element_size(e->v.conf.kv_type), .scales = scale_count(e, l)};
    size_t rows = (size_t)e->v.conf.chunk * l->kv_heads;
    size_t codes = gr_round_up(rows * l->head_dim * c.element, GB_LINE);
    size_t scales = gr_round_up(rows * c.scales * sizeof(uint16_t), GB_LINE);
    c.k = e->buf[GB_BUF_KV];
    c.ks = (uint16_t *)(void *)(c.k + codes);
    c.v = c.k + codes + scales;
    c.vs = (uint16_t *)(void *)(c.v + codes);
    return c;
}

bool gr_kv_put(const gr_engine *e, const gb_layer *l, bool value, uint32_t token, uint32_t head,
               const float *x)
{
    gr_kv_chunk c = gr_kv_chunk_of(e, l);
    size_t row = (size_t)token * l->kv_heads + head;
    uint8_t *to = (value ? c.v : c.k) + row * l->head_dim * c.element;
    if (e->v.conf.kv_type == GB_KV_INT8)
        return e->kern->quantise(x, l->head_dim, l->kv_group, (int8_t *)to,
                                 (value ? c.vs : c.ks) + row * c.scales);
    if (e->v.conf.kv_type == GB_KV_F32) {
        memcpy(to, x, l->head_dim * sizeof *x);
        return e->kern->finite(x, l->head_dim);
    }
    bool finite = true;
    for (uint32_t i = 0; i < l->head_dim; i++) {
        uint16_t h = gr_to_half(x[i]);
        finite &= (h & 0x7C00u) != 0x7C00u;
        memcpy(to + 2 * (size_t)i, &h, sizeof h);
    }
    return finite;
}

gr_span gr_kv_span(const gr_engine *e, const gb_layer *l, uint32_t head, uint32_t position,
                   uint32_t end)
{
    uint32_t scales = scale_count(e, l);
    gr_span s = {.stride = l->head_dim, .scale_stride = scales};
    if (position >= e->pos) {
        gr_kv_chunk c = gr_kv_chunk_of(e, l);
        size_t row = (size_t)(position - e->pos) * l->kv_heads + head;
        s.k = c.k + row * l->head_dim * c.element;
        s.v = c.v + row * l->head_dim * c.element;
        s.ks = c.ks + row * scales;
        s.vs = c.vs + row * scales;
        s.stride *= l->kv_heads;
        s.scale_stride *= l->kv_heads;
        s.count = end - position;
        return s;
    }
    gr_kv_block b = block_of(e, l);
    const uint8_t *block = ring_block(e, l, head, position, b.size);
    uint32_t slot = position % GB_KV_BLOCK, room = GB_KV_BLOCK - slot;
    size_t at = (size_t)slot * l->head_dim * element_size(e->v.conf.kv_type);
    end = end < e->pos ? end : e->pos;
    s.k = block + at;
    s.v = block + b.v + at;
    s.ks = (const uint16_t *)(const void *)(block + b.ks) + slot * scales;
    s.vs = (const uint16_t *)(const void *)(block + b.vs) + slot * scales;
    s.count = end - position < room ? end - position : room;
    s.next = b.size;
    return s;
}

void gr_kv_store(const gr_engine *e, const gb_layer *l, uint32_t count)
{
    gr_kv_chunk c = gr_kv_chunk_of(e, l);
    gr_kv_block b = block_of(e, l);
    uint32_t capacity = l->kv_blocks * GB_KV_BLOCK;
    size_t codes = (size_t)l->head_dim * c.element, scales = c.scales * sizeof(uint16_t);
    for (uint32_t t = count > capacity ? count - capacity : 0; t < count; t++) {
        uint32_t slot = (e->pos + t) % GB_KV_BLOCK;
        for (uint32_t h = 0; h < l->kv_heads; h++) {
            size_t row = (size_t)t * l->kv_heads + h;
            uint8_t *block = ring_block(e, l, h, e->pos + t, b.size);
            memcpy(block + slot * codes, c.k + row * codes, codes);
            memcpy(block + b.v + slot * codes, c.v + row * codes, codes);
            memcpy(block + b.ks + slot * scales, c.ks + row * c.scales, scales);
            memcpy(block + b.vs + slot * scales, c.vs + row * c.scales, scales);
        }
    }
}

bool gr_kv_evicts(const gr_engine *e, uint32_t count)
{
    for (uint32_t i = 0; i < e->v.layer_count; i++) {
        const gb_layer *l = &e->v.layers[i];
        uint32_t capacity = l->kv_blocks * GB_KV_BLOCK;
        uint32_t oldest = l->window && e->pos + 1 > l->window ? e->pos + 1 - l->window : 0;
        if (e->pos > oldest && e->pos + count > oldest + capacity)
            return true;
    }
    return false;
}

void gr_kv_reset(gr_engine *e)
{
    e->pos = 0; /* what stands above a position is never read */
    e->logits_valid = false;
}
