/* image.h: a small valid artifact, made in memory by the size functions of the engine.
 *
 * Two layers, 100 rows of vocabulary: ids 0..94 are the printable ASCII characters, 95..98 the
 * bytes e2 9c 85 f0, 99 is the stop id. Weights are random. image_reseal() renews the checksums, so
 * that a test can damage what lies behind them. */
#ifndef IMAGE_H
#define IMAGE_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gr_check.h"
#include "gr_internal.h"

#define CHECK(x)                                                                         \
    do {                                                                                 \
        if (!(x)) {                                                                      \
            fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #x);        \
            exit(1);                                                                     \
        }                                                                                \
    } while (0)

enum { VOCAB = 100, HIDDEN = 64, LAYERS = 2, FFN = 96, HEAD_DIM = 32, CONTEXT = 64, CHUNK = 16,
       STOP_ID = 99, IMAGE_MAX = 1 << 20 };

typedef struct image {
    uint8_t *bytes; /* on 4096 */
    uint64_t size;
} image;

static uint64_t image_random_state = 1;
static uint32_t image_context = CONTEXT; /* of the next image; at most CONTEXT */

static inline uint32_t image_random(void) /* xorshift64* */
{
    uint64_t *s = &image_random_state;
    *s ^= *s >> 12, *s ^= *s << 25, *s ^= *s >> 27;
    return (uint32_t)(*s * 2685821657736338717u >> 32);
}

static inline gb_section *image_section(const image *m, uint32_t type)
{
    gb_section *s = (gb_section *)(void *)(m->bytes + 512);
    while (s->type != type) {
        s++;
    }
    return s;
}

static inline void *image_data(const image *m, uint32_t type)
{
    return m->bytes + image_section(m, type)->offset;
}

static inline void image_reseal(image *m)
{
    gb_header *h = (gb_header *)(void *)m->bytes;
    gb_section *s = (gb_section *)(void *)(m->bytes + 512);
    for (uint32_t i = 0; i < h->section_count && i < GB_MAX_SECTIONS; i++) {
        if (gr_inside(s[i].offset, s[i].size, m->size)) {
            s[i].crc32 = gr_crc32(0, m->bytes + s[i].offset, (size_t)s[i].size);
        }
    }
    uint64_t table = (uint64_t)h->section_count * sizeof *s;
    if (gr_inside(512, table, m->size)) {
        h->table_crc32 = gr_crc32(0, s, (size_t)table);
    }
    h->header_crc32 = gr_crc32(0, h, offsetof(gb_header, header_crc32));
}

/* ---- sections ---- */

static inline size_t put_table(uint8_t *out, size_t at, const void *data, size_t size)
{
    memcpy(out + at, data, size);
    return gr_align(at + size, 8);
}

static inline uint64_t make_tokn(uint8_t *out)
{
    enum { PIECES = 99 };
    struct gb_tokn h = {.kind = GB_TOK_BYTE, .vocab = VOCAB, .bos = GB_TOK_NONE,
                        .unk = GB_TOK_NONE, .piece_bytes = PIECES, .n_node = 1, .n_stop = 1};
    uint32_t merge_first[VOCAB + 1] = {0}, block[4] = {0, 32, 64, 96}, byte_id[256];
    uint8_t length[VOCAB], flags[VOCAB] = {0}, pieces[PIECES];
    static const uint8_t tail[4] = {0xe2, 0x9c, 0x85, 0xf0};
    for (uint32_t i = 0; i < 256; i++) {
        byte_id[i] = GB_TOK_NONE;
    }
    for (uint32_t i = 0; i < PIECES; i++) {
        length[i] = 1;
        pieces[i] = i < 95 ? (uint8_t)(32 + i) : tail[i - 95];
        byte_id[pieces[i]] = i;
    }
    length[STOP_ID] = 0;
    flags[STOP_ID] = GB_TOKEN_CONTROL;
    struct gb_node root = {0, GB_TOK_NONE};
    uint32_t stop = STOP_ID;
    size_t at = put_table(out, 0, &h, sizeof h);
    at = put_table(out, at, merge_first, sizeof merge_first);
    at = put_table(out, at, block, sizeof block);
    at = put_table(out, at, length, sizeof length);
    at = put_table(out, at, flags, sizeof flags);
    at = put_table(out, at, pieces, sizeof pieces);
    at = put_table(out, at, byte_id, sizeof byte_id);
    at = put_table(out, at, &root, sizeof root);
    return put_table(out, at, &stop, sizeof stop);
}

/* U and A before the turns, S before the system text. */
static inline uint64_t make_tmpl(uint8_t *out)
{
    struct gb_tmpl h = {.flags = GB_TMPLF_SYSTEM | GB_TMPLF_ASST_LAST, .n_item = 6,
                        .text_bytes = 6, .slot = {0, 1, 2, 3, 4, 5, 6, 6, 6, 6}};
    struct gb_item items[6];
    for (int i = 0; i < 6; i++) {
        items[i] = (struct gb_item){GB_TOK_NONE, 1};
    }
    size_t at = put_table(out, 0, &h, sizeof h);
    at = put_table(out, at, items, sizeof items);
    return put_table(out, at, "USUAUA", 6);
}

static inline uint64_t make_rope(uint8_t *out)
{
    gb_rope r = {HEAD_DIM / 2, image_context, 64};
    memcpy(out, &r, sizeof r);
    for (uint32_t p = 0; p < image_context; p++) {
        float *row = (float *)(void *)(out + 64) + p * HEAD_DIM;
        for (uint32_t i = 0; i < HEAD_DIM / 2; i++) { /* any rotation: (3/5, 4/5) or none */
            row[i] = (p + i) % 2 ? 0.6f : 1.0f;
            row[HEAD_DIM / 2 + i] = (p + i) % 2 ? 0.8f : 0.0f;
        }
    }
    return 64 + image_context * HEAD_DIM * sizeof(float);
}

typedef struct maker { /* TENS, SEGM and WHOT as they grow */
    gb_tensor tensors[64];
    gb_segment segments[64];
    uint32_t count;
    uint64_t end; /* in WHOT */
    uint8_t *weights;
} maker;

static inline void add_tensor(maker *m, uint32_t role, int32_t layer, uint32_t rows,
                              uint32_t cols, uint32_t slab)
{
    gb_tensor *t = m->tensors + m->count;
    gb_segment *s = m->segments + m->count;
    bool vector = rows == 1, table = role == GB_ROLE_HEAD;
    *s = (gb_segment){vector ? GB_FMT_VECTOR : table ? GB_FMT_Q8_ROWS : GB_FMT_Q4H, 0,
                      (cols + 31) / 32, 0};
    *t = (gb_tensor){.role = role, .layer = layer, .seg_first = m->count, .seg_count = 1,
                     .rows = rows, .cols = cols, .slab_count = slab,
                     .rows_padded = vector ? 1 : (uint32_t)gr_align(rows, 16),
                     .cols_padded = vector ? cols : (uint32_t)gr_align(cols, 32),
                     .parts = role == GB_ROLE_GATE_UP ? 2 : 1};
    t->offset = gr_align(m->end, 256);
    t->size = gr_tensor_size(t, m->segments);
    m->end = t->offset + t->size;
    uint8_t *data = m->weights + t->offset;
    for (uint64_t i = 0; i < t->size; i++) {
        data[i] = (uint8_t)image_random();
    }
    if (vector) {
        for (uint32_t i = 0; i < t->size / 4; i++) {
            ((float *)(void *)data)[i] = i < cols ? 1.0f : 0.0f;
        }
    }
    uint64_t panel = gr_panel_size(t, m->segments);
    for (uint64_t at = 0; !vector && at < t->size; at += panel) {
        for (uint32_t i = 0; i < 16; i++) {
            ((float *)(void *)(data + at))[i] = 1.0f / 4096;
        }
    }
    if (table) {
        t->second_offset = gr_align(m->end, 256);
        t->second_size = gr_tensor_second_size(t);
        m->end = t->second_offset + t->second_size;
        for (uint64_t i = t->second_offset; i < m->end; i++) {
            m->weights[i] = (uint8_t)image_random();
        }
    }
    m->count++;
}

static inline void make_layers(maker *m, gb_layer *layers)
{
    uint64_t kv = 0;
    for (uint32_t i = 0; i < LAYERS; i++) {
        int32_t at = (int32_t)i;
        gb_layer *l = layers + i;
        *l = (gb_layer){.heads = 2, .kv_heads = 1, .head_dim = HEAD_DIM, .ffn = FFN,
                        .window = i % 2 ? 32 : 0, .score_scale = 0.25f, .kv_source = i,
                        .kv_group = 32, .kv_offset = kv, .tens_first = m->count};
        l->kv_blocks = gr_kv_layer_blocks(image_context, l->window);
        l->kv_size = gr_kv_layer_size(&(gr_view){.conf.kv_type = GB_KV_INT8}, l);
        kv += l->kv_size;
        add_tensor(m, GB_ROLE_ATTN_NORM, at, 1, HIDDEN, 0);
        add_tensor(m, GB_ROLE_Q, at, 2 * HEAD_DIM, HIDDEN, 2);
        add_tensor(m, GB_ROLE_K, at, HEAD_DIM, HIDDEN, 1);
        add_tensor(m, GB_ROLE_V, at, HEAD_DIM, HIDDEN, 1);
        add_tensor(m, GB_ROLE_O, at, HIDDEN, 2 * HEAD_DIM, 2);
        add_tensor(m, GB_ROLE_FFN_NORM, at, 1, HIDDEN, 0);
        add_tensor(m, GB_ROLE_GATE_UP, at, FFN, HIDDEN, 0);
        add_tensor(m, GB_ROLE_DOWN, at, HIDDEN, FFN, 0);
        l->tens_count = m->count - l->tens_first;
    }
    add_tensor(m, GB_ROLE_FINAL_NORM, -1, 1, HIDDEN, 0);
    add_tensor(m, GB_ROLE_HEAD, -1, VOCAB, HIDDEN, 0);
}

static const uint8_t image_lives[15][2] = {{1, 7}, {1, 7}, {2, 3}, {2, 3}, {3, 4},
                                           {3, 3}, {4, 6}, {5, 6}, {0, 8}, {8, 8},
                                           {8, 8}, {0, 8}, {0, 8}, {0, 0}, {0, 8}};

static inline uint64_t make_plan(const gr_view *v, gb_plan *plan)
{
    uint64_t end = 0; /* nothing shares a byte: a plan need not be good */
    for (uint32_t i = 0; i < 15; i++) {
        plan[i] = (gb_plan){.kind = i + 1, .first_op = image_lives[i][0],
                            .last_op = image_lives[i][1], .offset = end,
                            .size = gr_buffer_size(v, i + 1)};
        end += plan[i].size;
    }
    return end;
}

/* ---- the whole ---- */

typedef struct part {
    uint32_t type, record;
    const void *data;
    uint64_t size;
} part;

static inline void put_parts(image *m, const part *parts, uint32_t count)
{
    gb_section *s = (gb_section *)(void *)(m->bytes + 512);
    uint64_t end = 512 + count * sizeof *s;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t align = parts[i].type == GB_SEC_WHOT ? GB_WEIGHT_ALIGN : GB_ALIGN;
        s[i] = (gb_section){.type = parts[i].type, .offset = gr_align(end, align),
                            .size = parts[i].size, .mem_size = parts[i].size,
                            .record_size = parts[i].record,
                            .flags = parts[i].type == GB_SEC_TMPL ? 0 : GB_SECF_REQUIRED};
        s[i].record_count = parts[i].record ? parts[i].size / parts[i].record : 0;
        for (uint32_t k = 0; k < 4; k++) {
            s[i].name[k] = (uint8_t)(parts[i].type >> 8 * k);
        }
        if (parts[i].size) {
            memcpy(m->bytes + s[i].offset, parts[i].data, (size_t)parts[i].size);
        }
        end = s[i].offset + s[i].size;
    }
    m->size = gr_align(end, GB_ALIGN);
}

static inline image image_make(void)
{
    image m = {aligned_alloc(4096, IMAGE_MAX), 0};
    static uint8_t weights[IMAGE_MAX / 2], tokn[8192], tmpl[256], rope[64 + CONTEXT * 128];
    static maker k;
    static gb_test test;
    gb_layer layers[LAYERS];
    gb_plan plan[15];
    gb_thermal thermal = {0};
    gb_conf conf = {.layer_count = LAYERS, .hidden = HIDDEN, .vocab_rows = VOCAB, .rope_count = 1,
                    .context = image_context, .trained_context = image_context,
                    .chunk = CHUNK, .threads = 2,
                    .kv_type = GB_KV_INT8, .flags = GB_CONFF_TIED, .norm_eps = 1e-6f,
                    .embed_scale = 1.0f, .temperature = 0.3f, .top_p = 0.85f,
                    .repetition_penalty = 1.0f, .top_k = 64,
                    .text_limit = 16 * image_context + 4096,
                    .family = "test", .name = "tiny"};
    CHECK(m.bytes != NULL);
    memset(m.bytes, 0, IMAGE_MAX);
    k = (maker){.weights = weights};
    make_layers(&k, layers);
    conf.tens_final_norm = k.count - 2;
    conf.tens_head = conf.tens_embed = k.count - 1;
    gr_view v = {.conf = conf, .layers = layers, .tensors = k.tensors, .segments = k.segments,
                 .layer_count = LAYERS, .tensor_count = k.count, .segment_count = k.count,
                 .plan_count = 15};
    uint64_t arena = make_plan(&v, plan);
    test = (gb_test){.prompt_count = 20, .step_count = 4};
    for (uint32_t i = 0; i < test.prompt_count; i++) {
        test.prompt[i] = i * 7 % VOCAB;
    }
    part parts[] = {{GB_SEC_CONF, sizeof conf, &conf, sizeof conf},
                    {GB_SEC_LAYR, sizeof(gb_layer), layers, sizeof layers},
                    {GB_SEC_TENS, sizeof(gb_tensor), k.tensors, k.count * sizeof(gb_tensor)},
                    {GB_SEC_SEGM, sizeof(gb_segment), k.segments, k.count * sizeof(gb_segment)},
                    {GB_SEC_PLAN, sizeof(gb_plan), plan, sizeof plan},
                    {GB_SEC_TOKN, 0, tokn, make_tokn(tokn)},
                    {GB_SEC_TMPL, 0, tmpl, make_tmpl(tmpl)},
                    {GB_SEC_ROPE, 0, rope, make_rope(rope)},
                    {GB_SEC_THRM, sizeof thermal, &thermal, sizeof thermal},
                    {GB_SEC_TEST, sizeof test, &test, sizeof test},
                    {GB_SEC_HDFJ, 0, "{}", 2},
                    {GB_SEC_MANI, 0, "\x80", 1},
                    {GB_SEC_WHOT, 0, weights, k.end}};
    enum { PARTS = sizeof parts / sizeof parts[0] };
    put_parts(&m, parts, PARTS);
    gb_tensor *t = image_data(&m, GB_SEC_TENS);
    uint64_t base = image_section(&m, GB_SEC_WHOT)->offset;
    for (uint32_t i = 0; i < k.count; i++) { /* now it is known where WHOT lies */
        t[i].offset += base;
        t[i].second_offset += t[i].second_size ? base : 0;
    }
    gb_header h = {.byte_order = GB_BYTE_ORDER, .major = GB_MAJOR, .header_size = 256,
                   .entry_size = 128, .section_count = PARTS, .align = GB_ALIGN,
                   .file_size = m.size, .table_offset = 512,
                   .required_features = GB_REQ_DENSE | GB_REQ_Q4H | GB_REQ_Q8 | GB_REQ_KV_INT8,
                   .ram_weights = gr_align(k.end, 4096), .ram_arena = gr_align(arena, 4096),
                   .ram_kv = gr_align(layers[0].kv_size + layers[1].kv_size, 4096),
                   .ram_engine = gr_engine_size(&v), .ram_stacks = GR_STACK_SIZE,
                   .engine_abi_min = 1, .target = "generic-x86-64"};
    memcpy(h.magic, GB_MAGIC, 8);
    h.ram_tables = gr_align(m.size, 4096) - h.ram_weights;
    h.ram_total = h.ram_weights + h.ram_arena + h.ram_kv + h.ram_tables + h.ram_engine +
                  h.ram_stacks;
    uint32_t id[3 + 5 * LAYERS] = {conf.kv_type, image_context, LAYERS};
    for (uint32_t i = 0; i < LAYERS; i++) {
        const uint32_t one[] = {layers[i].kv_heads, HEAD_DIM, 32, layers[i].kv_blocks,
                                layers[i].window};
        memcpy(id + 3 + 5 * i, one, sizeof one);
    }
    h.kv_layout_id = gr_crc32(0, id, sizeof id);
    memcpy(m.bytes, &h, sizeof h);
    image_reseal(&m);
    return m;
}

#endif
