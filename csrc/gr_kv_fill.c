/* gr_kv_fill.c: keys and values go to the store of the pass in progress, and from there to the
 * rings (gr_kv.c): after the whole pass has attended, so that it never evicts what its own first
 * tokens see. */
#include "gr_model.h"

/* Positions that a unit's ring holds, without the sink. */
static uint32_t ring_positions(const gb_kv_unit *u)
{
    return (u->blocks - u->sink) * GB_KV_BLOCK;
}

static uint32_t level_of(int8_t code)
{
    return (uint32_t)(code + 127) * 241 >> 12; /* a 17th, exact up to 254 */
}

/* A position's codes to its place in a block: as they are, or codes i and i + half in a byte. */
static void store(bool narrow, const uint8_t *from, uint8_t *block, uint32_t slot, size_t size)
{
    const int8_t *codes = (const int8_t *)from;
    size_t half = size / 2;
    if (!narrow)
        memcpy(block + slot * size, from, size);
    for (size_t i = 0; narrow && i < half; i++)
        block[slot * half + i] = (uint8_t)(level_of(codes[i]) | level_of(codes[half + i]) << 4);
}

bool gr_kv_put(const gr_engine *e, const gb_layer *l, bool value, uint32_t row, uint32_t head,
               const float *x)
{
    gr_kv_chunk c = gr_kv_chunk_of(e, l);
    size_t at = (size_t)row * l->kv_heads + head;
    uint8_t *to = (value ? c.v : c.k) + at * l->head_dim * c.element;
    if (e->v.conf.kv_type == GB_KV_INT8) {
        int8_t *codes = (int8_t *)to;
        bool ok = e->kern->quantise(x, l->head_dim, l->kv_group, codes,
                                    (value ? c.vs : c.ks) + at * c.scales);
        uint32_t flag = value ? GB_UNITF_VALUE4 : GB_UNITF_KEY4;
        bool narrow = gr_kv_unit_of(&e->v, l, head).flags & flag;
        for (uint32_t i = 0; narrow && i < l->head_dim; i++) /* as it comes back from the ring */
            codes[i] = (int8_t)((int32_t)level_of(codes[i]) * 17 - 119);
        return ok;
    }
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

void gr_kv_store(const gr_engine *e, const gb_layer *l)
{
    gr_kv_chunk c = gr_kv_chunk_of(e, l);
    size_t codes = (size_t)l->head_dim * c.element, scales = c.scales * sizeof(uint16_t);
    for (uint32_t h = 0; h < l->kv_heads; h++) {
        const gb_kv_unit u = gr_kv_unit_of(&e->v, l, h);
        gr_kv_block b = gr_kv_block_of(e, l, u.flags);
        uint32_t sink = u.sink * GB_KV_BLOCK, capacity = ring_positions(&u);
        for (uint32_t t = 0; t < e->rows; t++) {
            if (e->pos + t >= sink && e->rows - t > capacity)
                continue; /* the chunk's own end stands there */
            uint32_t slot = (e->pos + t) % GB_KV_BLOCK;
            size_t row = (size_t)(e->row + t) * l->kv_heads + h;
            uint8_t *block = gr_kv_ring_block(e, l, &u, e->pos + t, b.size);
            store(u.flags & GB_UNITF_KEY4, c.k + row * codes, block, slot, codes);
            store(u.flags & GB_UNITF_VALUE4, c.v + row * codes, block + b.v, slot, codes);
            memcpy(block + b.ks + slot * scales, c.ks + row * c.scales, scales);
            memcpy(block + b.vs + slot * scales, c.vs + row * c.scales, scales);
        }
    }
}

bool gr_kv_evicts(const gr_engine *e, uint32_t from, uint32_t count)
{
    for (uint32_t i = 0; i < e->v.layer_count; i++) {
        const gb_layer *l = &e->v.layers[i];
        for (uint32_t h = 0; h < l->kv_heads; h++) {
            const gb_kv_unit u = gr_kv_unit_of(&e->v, l, h);
            uint32_t oldest = gr_kv_seen(e, l, h, from).from, sink = u.sink * GB_KV_BLOCK;
            oldest = oldest > sink ? oldest : sink;
            if (from > oldest && from + count > oldest + ring_positions(&u))
                return true;
        }
    }
    return false;
}

void gr_kv_reset(gr_engine *e)
{
    e->pos = e->high = 0; /* what stands above a position is never read */
    e->logits_valid = false;
}
