/* gr_size.c: the size of everything, computed from shapes (rule C).
 *
 * The reader compares these with what a file says, the kernels take panel sizes from here, and
 * FORMAT.md states the same formulas. Nothing here reads a file or trusts a product: see
 * gr_check.h. */
#include "gr_check.h"
#include "gr_feature.h"
#include "gr_internal.h"

/* Bytes of a superblock of `groups` groups: codes, scales and zero points, or two-byte scales; for
 * q8 two planes and scales. */
static uint64_t super_size(uint32_t format, uint64_t groups)
{
    return gr_align(gr_mul(groups, format == GB_FMT_Q8 ? 528 : 288), GB_LINE);
}

uint64_t gr_panel_size(const gb_tensor *t, const gb_segment *segments)
{
    const gb_segment *s = segments + t->seg_first;
    if (s->format == GB_FMT_VECTOR)
        return gr_align(gr_mul(t->cols, 4), GB_LINE);
    if (gr_is_float(s->format))
        return gr_align(gr_mul(t->cols, s->format == GB_FMT_F32 ? 64 : 32), GB_LINE);
    uint64_t size = GB_LINE; /* super-scales */
    if (s->format == GB_FMT_Q8_ROWS)
        return gr_add(size, gr_mul(s->group_count, 256));
    for (uint32_t i = 0; i < t->seg_count; i++) {
        uint64_t full = s[i].group_count / GB_SUPERBLOCK, rest = s[i].group_count % GB_SUPERBLOCK;
        size = gr_add(size, gr_mul(full, super_size(s[i].format, GB_SUPERBLOCK)));
        size = gr_add(size, super_size(s[i].format, rest));
    }
    return size;
}

uint64_t gr_tensor_size(const gb_tensor *t, const gb_segment *segments)
{
    if (segments[t->seg_first].format == GB_FMT_VECTOR)
        return gr_panel_size(t, segments);
    uint64_t panels = gr_mul(t->parts, t->rows_padded / GB_PANEL);
    return gr_mul(panels, gr_panel_size(t, segments));
}

uint64_t gr_tensor_second_size(const gb_tensor *t)
{
    uint64_t groups = t->cols_padded / GB_GROUP;
    return gr_mul(t->rows_padded / GB_PANEL, gr_mul(groups, 256));
}

/* ---- KV ---- */

uint32_t gr_kv_layer_blocks(uint32_t context, uint32_t window)
{
    uint64_t all = gr_align(context, GB_KV_BLOCK) / GB_KV_BLOCK;
    uint64_t ring = gr_align(window, GB_KV_BLOCK) / GB_KV_BLOCK + 1; /* a block is written early */
    return (uint32_t)(window == 0 || ring > all ? all : ring);
}

/* Bytes of one token's codes, and of its scales, for K or V of one head. */
static uint64_t kv_codes(uint32_t kv_type, const gb_layer *l)
{
    return gr_mul(l->head_dim, kv_type == GB_KV_INT8 ? 1 : kv_type == GB_KV_F16 ? 2 : 4);
}

static uint64_t kv_scales(uint32_t kv_type, const gb_layer *l)
{
    return kv_type == GB_KV_INT8 && l->kv_group ? gr_mul(l->head_dim / l->kv_group, 2) : 0;
}

uint64_t gr_kv_block_size(const gr_view *v, const gb_layer *l, uint32_t flags)
{
    uint64_t codes = kv_codes(v->conf.kv_type, l), scales = kv_scales(v->conf.kv_type, l);
    uint64_t keys = flags & GB_UNITF_KEY4 ? codes / 2 : codes;
    uint64_t values = flags & GB_UNITF_VALUE4 ? codes / 2 : codes;
    return gr_align(GB_KV_BLOCK * (keys + values + 2 * scales), GB_LINE);
}

uint64_t gr_kv_step(const gr_view *v, const gb_layer *l)
{
    bool lines = (v->header.required_features & GB_REQ_KV_4BIT) != 0;
    return lines ? GB_LINE : gr_kv_block_size(v, l, 0);
}

uint64_t gr_kv_layer_size(const gr_view *v, const gb_layer *l)
{
    uint64_t block = gr_kv_block_size(v, l, 0);
    if (!v->units)
        return gr_mul(gr_mul(l->kv_heads, l->kv_blocks), block);
    const gb_kv_unit *last = v->units + l->unit_first + l->kv_heads - 1;
    uint64_t first = gr_mul(last->first, gr_kv_step(v, l)); /* one behind the other */
    return gr_add(first, gr_mul(last->blocks, gr_kv_block_size(v, l, last->flags)));
}

/* ---- arena ---- */

/* The chunk's K and V of the largest layer: four parts, each on a line. */
static uint64_t kv_scratch(const gr_view *v)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < v->layer_count; i++) {
        const gb_layer *l = v->layers + i;
        uint64_t rows = gr_mul(v->conf.chunk, l->kv_heads);
        uint64_t codes = gr_align(gr_mul(rows, kv_codes(v->conf.kv_type, l)), GB_LINE);
        uint64_t scales = gr_align(gr_mul(rows, kv_scales(v->conf.kv_type, l)), GB_LINE);
        most = gr_max(most, gr_mul(gr_add(codes, scales), 2));
    }
    return most;
}

static uint64_t query_size(const gr_view *v, uint64_t width)
{
    uint64_t chunk = v->conf.chunk, groups = 0;
    if (v->conf.kv_type != GB_KV_INT8)
        return gr_mul(gr_mul(chunk, width), 4);
    for (uint32_t i = 0; i < v->layer_count; i++) {
        const gb_layer *l = v->layers + i;
        if (l->kv_group)
            groups = gr_max(groups, gr_mul(l->heads, l->head_dim / l->kv_group));
    }
    uint64_t scales = gr_align(gr_mul(gr_mul(chunk, groups), 4), GB_LINE);
    return gr_add(gr_align(gr_mul(chunk, width), GB_LINE), scales);
}

#ifndef GR_MINIMAL
static bool consumes(uint32_t role, uint32_t kind)
{
    switch (kind) {
    case GB_BUF_XN:
        return role == GB_ROLE_Q || role == GB_ROLE_K || role == GB_ROLE_V ||
               role == GB_ROLE_GATE_UP || role == GB_ROLE_HEAD;
    case GB_BUF_ATT:
        return role == GB_ROLE_O;
    default:
        return role == GB_ROLE_DOWN;
    }
}

/* Bit 0: a consumer of the buffer is quantised, bit 1: one is float. */
static uint32_t consumers(const gr_view *v, uint32_t kind)
{
    uint32_t found = 0;
    for (uint32_t i = 0; i < v->tensor_count; i++) {
        const gb_tensor *t = v->tensors + i;
        if (consumes(t->role, kind))
            found |= gr_is_float(v->segments[t->seg_first].format) ? 2 : 1;
    }
    return found;
}
#endif

/* Input of a product, n wide: quantised if a consumer is, and float if a consumer is. */
static uint64_t act_size(const gr_view *v, uint32_t kind, uint64_t n)
{
    uint64_t chunk = v->conf.chunk, wide = gr_align(n, GB_GROUP);
    uint64_t side = gr_align(gr_mul(gr_mul(chunk, wide / GB_GROUP), 4), GB_LINE);
    uint64_t size = gr_add(gr_align(gr_mul(chunk, wide), GB_LINE), gr_mul(side, 2));
    (void)kind; /* a minimal build's inputs are quantised */
#ifndef GR_MINIMAL
    uint32_t found = consumers(v, kind);
    size = found & 1 ? size : 0;
    if (found & 2)
        size = gr_add(size, gr_align(gr_mul(gr_mul(chunk, n), 4), GB_LINE));
#endif
    return size;
}

uint64_t gr_buffer_size(const gr_view *v, uint32_t kind)
{
    const gb_conf *c = &v->conf;
    uint64_t context = c->context, rows = gr_align(c->vocab_rows, GB_UNIT), width = 0, ffn = 0;
    uint64_t stream = gr_mul(gr_mul(c->chunk, c->hidden), 4), size = 0;
    for (uint32_t i = 0; i < v->layer_count; i++) {
        width = gr_max(width, gr_mul(v->layers[i].heads, v->layers[i].head_dim));
        ffn = gr_max(ffn, v->layers[i].ffn);
    }
    switch (kind) {
    case GB_BUF_X:      size = stream; break;
    case GB_BUF_XN:     size = act_size(v, kind, c->hidden); break;
    case GB_BUF_Q:      size = query_size(v, width); break;
    case GB_BUF_KV:     size = kv_scratch(v); break;
    case GB_BUF_ATT:    size = act_size(v, kind, width); break;
    case GB_BUF_SCORES: size = gr_mul(context, 4 * GB_MAX_THREADS); break;
    case GB_BUF_Y:      size = stream; break;
    case GB_BUF_H:      size = act_size(v, kind, ffn); break;
    case GB_BUF_LOGITS: size = gr_mul(rows, 4); break;
    case GB_BUF_CAND:   size = gr_mul(rows, 4); break;
    case GB_BUF_SEEN:   size = rows / 8; break;
    case GB_BUF_IDS:    size = gr_mul(context, 4); break;
    case GB_BUF_PROMPT: size = gr_mul(gr_add(context, 1), 4); break;
    case GB_BUF_TOK:    size = gr_add(gr_mul(c->text_limit, 32), 65536); break;
    case GB_BUF_HIDDEN: size = gr_mul(c->hidden, 4); break;
    case GR_BUF_ROWS:   size = gr_mul(c->hidden, 4 * GB_HIDDEN_ROWS); break;
    default:            break;
    }
    return gr_align(size, GB_LINE);
}

uint64_t gr_engine_size(const gr_view *v)
{
    uint64_t size = GR_ENGINE_FIXED;
    size = gr_add(size, gr_mul(v->layer_count, sizeof(gb_layer)));
    size = gr_add(size, gr_mul(v->tensor_count, sizeof(gb_tensor)));
    size = gr_add(size, gr_mul(v->segment_count, sizeof(gb_segment)));
    size = gr_add(size, gr_mul(v->plan_count, sizeof(gb_plan)));
    size = gr_add(size, gr_mul(v->unit_count, sizeof(gb_kv_unit)));
    return gr_align(size, 4096);
}
