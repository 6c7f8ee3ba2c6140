/* gr_pin.c: the pinned prompt (FORMAT.md, PINP): keys and values that were computed when the
 * artifact was compiled. So far as a prompt begins with the pinned ids they are copied into the
 * cache: the bytes that a prefill would have left there, so every answer is the same. Not part of
 * a GR_MINIMAL build, which computes every prompt. */
#include <string.h>

#include "gr_check.h"
#include "gr_model.h"

/* Bytes of the blocks in use behind `tokens` tokens, ring after ring. With a cache: what is at
 * `from` goes there, of every ring the blocks of the first `taken` tokens. */
static uint64_t pin_blocks(const gr_view *v, uint32_t tokens, uint32_t taken,
                           const uint8_t *from, uint8_t *kv)
{
    uint32_t all = (tokens + GB_KV_BLOCK - 1) / GB_KV_BLOCK;
    uint32_t some = (taken + GB_KV_BLOCK - 1) / GB_KV_BLOCK;
    uint64_t at = 0;
    for (uint32_t i = 0; i < v->layer_count; i++) {
        const gb_layer *l = v->layers + i;
        uint64_t step = gr_kv_step(v, l);
        for (uint32_t h = 0; h < l->kv_heads; h++) {
            gb_kv_unit u = gr_kv_unit_of(v, l, h);
            uint64_t block = gr_kv_block_size(v, l, u.flags);
            if (kv)
                memcpy(kv + l->kv_offset + u.first * step, from + at,
                       (size_t)(gr_least(some, u.blocks) * block));
            at += gr_least(all, u.blocks) * block;
        }
    }
    return at;
}

static uint64_t pin_ids_size(uint32_t tokens)
{
    return gr_align(tokens * (uint64_t)sizeof(uint32_t), GB_LINE);
}

uint64_t gr_pin_size(const gr_view *v, uint32_t tokens)
{
    return sizeof(gb_pin) + pin_ids_size(tokens) + pin_blocks(v, tokens, 0, NULL, NULL);
}

uint32_t gr_pin_take(gr_engine *e, const uint32_t *ids, uint32_t count)
{
    const gr_view *v = &e->v;
    uint32_t n = 0, tokens = v->pin_tokens;
    while (n < tokens && n + 1 < count && ids[n] == v->pin_ids[n])
        n++;
    if (n > e->pos && !gr_kv_evicts(e, n, tokens - n)) {
        pin_blocks(v, tokens, n, (const uint8_t *)v->pin_ids + pin_ids_size(tokens), e->kv);
        memcpy(e->buf[GB_BUF_IDS], ids, n * sizeof *ids);
        e->pos = n;
        e->high = tokens; /* so far the rings had gone on */
    }
    return e->pos;
}
