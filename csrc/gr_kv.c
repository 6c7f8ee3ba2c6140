/* gr_kv.c: where keys and values stand: the ring of every layer, and the store of the pass in
 * progress. gr_kv_fill.c puts them there.
 *
 * A layer's ring is [kv head][block]; a block holds 32 tokens of one head: K codes, K scales, V
 * codes, V scales; in some heads codes of K, of V or of both have 4 bits. Position p stands in
 * block (p / 32) mod blocks; a head that keeps a part has its first blocks, the sink, before its
 * ring. */
#include "gr_model.h"

static uint32_t element_size(uint32_t kv_type)
{
    return kv_type == GB_KV_INT8 ? 1 : kv_type == GB_KV_F16 ? 2 : 4;
}

static uint32_t scale_count(const gr_engine *e, const gb_layer *l)
{
    return e->v.conf.kv_type == GB_KV_INT8 ? l->head_dim / l->kv_group : 0;
}

gr_kv_block gr_kv_block_of(const gr_engine *e, const gb_layer *l, uint32_t flags)
{
    size_t codes = (size_t)GB_KV_BLOCK * l->head_dim * element_size(e->v.conf.kv_type);
    size_t scales = (size_t)GB_KV_BLOCK * scale_count(e, l) * sizeof(uint16_t);
    size_t keys = flags & GB_UNITF_KEY4 ? codes / 2 : codes;
    size_t values = flags & GB_UNITF_VALUE4 ? codes / 2 : codes;
    return (gr_kv_block){.size = keys + values + 2 * scales, /* whole lines: gr_kv_block_size */
                         .ks = keys, .v = keys + scales, .vs = keys + scales + values};
}

gb_kv_unit gr_kv_unit_of(const gr_view *v, const gb_layer *l, uint32_t head)
{
    return v->units ? v->units[l->unit_first + head]
                    : (gb_kv_unit){.blocks = l->kv_blocks, .first = head * l->kv_blocks};
}

uint8_t *gr_kv_ring_block(const gr_engine *e, const gb_layer *l, const gb_kv_unit *u,
                          uint32_t position, size_t size)
{
    uint32_t block = position / GB_KV_BLOCK, ring = u->blocks - u->sink;
    size_t index = block < u->sink ? block : u->sink + (block - u->sink) % ring;
    bool lines = (e->v.header.required_features & GB_REQ_KV_4BIT) != 0;
    size_t step = lines ? GB_LINE : gr_kv_block_of(e, l, 0).size; /* as gr_kv_step */
    return e->kv + l->kv_offset + u->first * step + index * size;
}

/* ---- 4 bits: every 17th code. A byte holds code i, and code i + half above ---- */

void gr_kv_rotate(float *x, uint32_t dim, bool query)
{
    uint32_t h = 1;
    for (; dim % (2 * h) == 0; h *= 2) {
        for (uint32_t i = 0; i < dim; i = ((i | h) + 1) & ~h) { /* those without the bit h */
            float a = x[i], b = x[i + h];
            x[i] = a + b;
            x[i + h] = a - b;
        }
    }
    for (uint32_t i = 0; query && i < dim; i++)
        x[i] *= 1.0f / (float)h; /* exact */
}

/* Eight levels to codes, byte by byte: 17 n - 119 modulo 256. */
static uint64_t codes_of(uint64_t levels)
{
    uint64_t x = levels * 17, high = UINT64_C(0x8080808080808080); /* no carry: 15 * 17 is 255 */
    return ((x | high) - UINT64_C(0x7777777777777777)) ^ (~x & high);
}

static void unpack(const uint8_t *from, int8_t *codes, uint32_t half)
{
    const uint64_t mask = UINT64_C(0x0F0F0F0F0F0F0F0F);
    for (uint32_t i = 0; i < half; i += sizeof mask) { /* a whole number of times */
        uint64_t pairs, low, high;
        memcpy(&pairs, from + i, sizeof pairs);
        low = codes_of(pairs & mask), high = codes_of(pairs >> 4 & mask);
        memcpy(codes + i, &low, sizeof low);
        memcpy(codes + half + i, &high, sizeof high);
    }
}

const int8_t *gr_kv_unpack(gr_span *s, const void *from, uint32_t dim, int8_t *codes)
{
    for (uint32_t p = 0; p < s->count; p++) {
        const uint8_t *at = (const uint8_t *)from + (size_t)p * dim / 2;
        __builtin_prefetch(at + s->next); /* without it a token took a tenth longer */
        unpack(at, codes + (size_t)p * dim, dim / 2);
    }
    s->next = 0;
    return codes;
}

gr_seen gr_kv_unit_seen(const gb_kv_unit *u, uint32_t window, uint32_t position)
{
    uint32_t end = position + 1;
    if (u->recent > 0) { /* whole blocks: a sum's lanes are the same with a gap before them */
        end = (uint32_t)gr_round_up(end, GB_KV_BLOCK);
        window = (uint32_t)u->recent * GB_KV_BLOCK;
    }
    uint32_t from = window && end > window ? end - window : 0, sink = u->sink * GB_KV_BLOCK;
    return u->recent > 0 && from <= sink ? (gr_seen){0, 0} : (gr_seen){sink, from};
}

gr_seen gr_kv_seen(const gr_engine *e, const gb_layer *l, uint32_t head, uint32_t position)
{
    const gb_kv_unit u = gr_kv_unit_of(&e->v, l, head);
    return gr_kv_unit_seen(&u, l->window, position);
}

gr_kv_chunk gr_kv_chunk_of(const gr_engine *e, const gb_layer *l)
{
    gr_kv_chunk c = {.element = element_size(e->v.conf.kv_type), .scales = scale_count(e, l)};
    size_t rows = (size_t)e->v.conf.chunk * l->kv_heads;
    size_t codes = gr_round_up(rows * l->head_dim * c.element, GB_LINE);
    size_t scales = gr_round_up(rows * c.scales * sizeof(uint16_t), GB_LINE);
    c.k = e->store;
    c.ks = (uint16_t *)(void *)(c.k + codes);
    c.v = c.k + codes + scales;
    c.vs = (uint16_t *)(void *)(c.v + codes);
    return c;
}

gr_span gr_kv_span(const gr_engine *e, const gb_layer *l, uint32_t head, uint32_t position,
                   uint32_t end)
{
    uint32_t scales = scale_count(e, l);
    gr_span s = {.stride = l->head_dim, .scale_stride = scales};
    if (position >= e->pos) {
        gr_kv_chunk c = gr_kv_chunk_of(e, l);
        size_t row = (size_t)(e->row + position - e->pos) * l->kv_heads + head;
        s.k = c.k + row * l->head_dim * c.element;
        s.v = c.v + row * l->head_dim * c.element;
        s.ks = c.ks + row * scales;
        s.vs = c.vs + row * scales;
        s.stride *= l->kv_heads;
        s.scale_stride *= l->kv_heads;
        s.count = end - position;
        return s;
    }
    const gb_kv_unit u = gr_kv_unit_of(&e->v, l, head);
    gr_kv_block b = gr_kv_block_of(e, l, u.flags);
    const uint8_t *block = gr_kv_ring_block(e, l, &u, position, b.size);
    uint32_t slot = position % GB_KV_BLOCK, room = GB_KV_BLOCK - slot;
    size_t at = (size_t)slot * l->head_dim * element_size(e->v.conf.kv_type);
    end = end < e->pos ? end : e->pos;
    s.key4 = u.flags & GB_UNITF_KEY4;
    s.value4 = u.flags & GB_UNITF_VALUE4;
    s.k = block + (s.key4 ? at / 2 : at);
    s.v = block + b.v + (s.value4 ? at / 2 : at);
    s.ks = (const uint16_t *)(const void *)(block + b.ks) + slot * scales;
    s.vs = (const uint16_t *)(const void *)(block + b.vs) + slot * scales;
    s.count = end - position < room ? end - position : room;
    s.next = b.size;
    return s;
}
