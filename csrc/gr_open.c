/* gr_open.c: bytes of an artifact become checked views, or an error code and two numbers.
 *
 * The order and the rules are those of FORMAT.md, section 3. This is the only file that reads an
 * offset from an artifact. Numbers from the file go through gr_check.h alone; header and records
 * are copied before they are checked, so that a writer to the mapped file cannot change them in
 * between; no float is computed with, only its bits are looked at. The work is linear in the file's
 * size. It does not verify SHA-256 or signatures (gemcheck does), and it never allocates. */
#include <string.h>

#include "gr_check.h"
#include "gr_feature.h"
#include "gr_internal.h"

enum { FLOAT_MAX = 0x7f7fffff, FLOAT_1 = 0x3f800000, FLOAT_100 = 0x42c80000 };
#define NO_RECORD GR_NO_RECORD

typedef struct reader {
    gr_view *v;
    gr_error *e;
    const gb_section *entries; /* the copied section table */
    uint32_t count;
    uint8_t *room; /* memory for copies, on 64 bytes */
    uint64_t left;
} reader;

typedef struct range { /* a number, and the least and the greatest that are allowed */
    uint64_t value, least, most;
} range;

gemrun_status gr_fail(gr_error *e, gemrun_status code, uint32_t what, uint64_t wanted,
                      uint64_t found)
{
    *e = (gr_error){.code = code, .wanted = wanted, .found = found, .what = what,
                    .record = NO_RECORD};
    return code;
}

/* The checks say whether all is well; what is not is in r->e. */
static bool fail(reader *r, gemrun_status code, uint32_t what, uint64_t wanted, uint64_t found)
{
    gr_fail(r->e, code, what, wanted, found);
    return false;
}

static bool bad(reader *r, gemrun_status code, uint32_t record, uint64_t wanted, uint64_t found)
{
    gr_fail(r->e, code, 0, wanted, found);
    r->e->record = record;
    return false;
}

static bool equal(reader *r, gemrun_status code, uint32_t what, uint64_t wanted, uint64_t found)
{
    return wanted == found || fail(r, code, what, wanted, found);
}

static bool within(reader *r, gemrun_status code, uint32_t record, const range *table, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (table[i].value < table[i].least || table[i].value > table[i].most) {
            uint64_t limit = table[i].value < table[i].least ? table[i].least : table[i].most;
            return bad(r, code, record, limit, table[i].value);
        }
    return true;
}
#define WITHIN(r, code, record, table) \
    within(r, code, record, table, sizeof(table) / sizeof((table)[0]))

static uint32_t bits(float f)
{
    uint32_t b;
    memcpy(&b, &f, sizeof b);
    return b;
}

static bool all_zero(const void *data, uint64_t size)
{
    const uint8_t *p = data;
    uint8_t any = 0;
    for (uint64_t i = 0; i < size; i++)
        any |= p[i];
    return any == 0;
}

static bool is_text_field(const uint8_t *p, size_t size)
{
    size_t n = 0;
    while (n < size && p[n] != 0)
        n++;
    return all_zero(p + n, size - n);
}

/* ---- header, signature block (rows 1 to 10 of the table) ---- */

static bool check_fixed(reader *r, const gb_header *h, uint64_t size)
{
    bool clean = all_zero(h->reserved, sizeof h->reserved) &&
                 is_text_field(h->target, sizeof h->target);
    const range fixed[] = {{h->header_size, 256, 256}, {h->entry_size, 128, 128},
                           {h->align, GB_ALIGN, GB_ALIGN}, {h->table_offset, 512, 512},
                           {h->section_count, 1, GB_MAX_SECTIONS}, {!clean, 0, 0}};
    if (!WITHIN(r, GEMRUN_E_HEADER, NO_RECORD, fixed) ||
        !equal(r, GEMRUN_E_SIZE, 0, h->file_size, size))
        return false;
    if (h->required_features & ~(uint64_t)GR_REQ_KNOWN)
        return fail(r, GEMRUN_E_FEATURE, 0, GR_REQ_KNOWN, h->required_features);
    return h->engine_abi_min <= GB_ENGINE_ABI ||
           fail(r, GEMRUN_E_ABI, 0, h->engine_abi_min, GB_ENGINE_ABI);
}

static bool check_signature_block(reader *r, const uint8_t *image)
{
    gb_signature s;
    memcpy(&s, image + sizeof(gb_header), sizeof s);
    bool clean = all_zero(s.pad, sizeof s.pad) && all_zero(s.reserved, sizeof s.reserved);
    bool unsigned_clean = s.alg != 0 || (all_zero(s.key_id, sizeof s.key_id) &&
                                         all_zero(s.signature, sizeof s.signature));
    return (s.alg <= 1 && clean && unsigned_clean) || fail(r, GEMRUN_E_SIGNATURE, 0, 1, s.alg);
}

gemrun_status gr_open_header(gb_header *h, const uint8_t *image, uint64_t size, gr_error *e)
{
    reader r = {.e = e};
    if (size > 0 && memcmp(image, GB_MAGIC, size < 8 ? (size_t)size : 8) != 0)
        return gr_fail(e, GEMRUN_E_MAGIC, 0, 0, 0);
    if (size < 512)
        return gr_fail(e, GEMRUN_E_SIZE, 0, 512, size);
    memcpy(h, image, sizeof *h);
    uint32_t crc = gr_crc32(0, h, offsetof(gb_header, header_crc32));
    uint64_t table_end = 512 + (uint64_t)h->section_count * sizeof(gb_section); /* row 11 */
    bool ok = equal(&r, GEMRUN_E_BYTE_ORDER, 0, GB_BYTE_ORDER, h->byte_order) &&
              equal(&r, GEMRUN_E_VERSION, 0, GB_MAJOR, h->major) &&
              equal(&r, GEMRUN_E_HEADER_CRC, 0, h->header_crc32, crc) &&
              check_fixed(&r, h, size) && check_signature_block(&r, image) &&
              (table_end <= size || fail(&r, GEMRUN_E_SIZE, 0, table_end, size));
    return ok ? GEMRUN_OK : e->code;
}

/* ---- section table (rows 12 to 16) ---- */

static const uint32_t required[] = {GB_SEC_CONF, GB_SEC_LAYR, GB_SEC_TENS, GB_SEC_SEGM,
                                    GB_SEC_PLAN, GB_SEC_TOKN, GB_SEC_ROPE, GB_SEC_THRM,
                                    GB_SEC_TEST, GB_SEC_HDFJ, GB_SEC_MANI, GB_SEC_WHOT};
enum { REQUIRED_COUNT = sizeof required / sizeof required[0],
       MAX_UNITS = GB_MAX_LAYERS * GB_MAX_HEADS };

static const gb_section *find(const reader *r, uint32_t type)
{
    for (uint32_t i = 0; i < r->count; i++)
        if (r->entries[i].type == type)
            return r->entries + i;
    return NULL;
}

static void *take(reader *r, uint64_t size)
{
    uint64_t padded = gr_align(size, GB_LINE);
    if (padded > r->left)
        return NULL;
    void *p = r->room;
    r->room += padded;
    r->left -= padded;
    return p;
}

/* `end` is where the table or the section before ends. */
static bool entry_is_good(const gb_section *s, uint64_t end)
{
    uint8_t name[16] = {(uint8_t)s->type, (uint8_t)(s->type >> 8), (uint8_t)(s->type >> 16),
                        (uint8_t)(s->type >> 24)};
    uint32_t known = GB_SECF_REQUIRED | GB_SECF_HOT | GB_SECF_COLD | GB_SECF_SECRET;
    uint64_t align = s->type == GB_SEC_WHOT ? GB_WEIGHT_ALIGN : GB_ALIGN;
    uint64_t records = s->record_size ? gr_mul(s->record_size, s->record_count) : s->size;
    bool cold = s->type == GB_SEC_WHOT && s->flags & GB_SECF_COLD;
    return memcmp(s->name, name, sizeof name) == 0 && (s->flags & ~known) == 0 &&
           all_zero(s->reserved0, sizeof s->reserved0) &&
           all_zero(s->reserved1, sizeof s->reserved1) &&
           (cold ? s->mem_size <= s->size : s->mem_size == s->size) &&
           records == s->size && (s->record_size != 0 || s->record_count == 0) &&
           s->offset == gr_align(end, align) && end != GR_TOO_BIG;
}

static bool check_entries(reader *r)
{
    const uint64_t first = 512 + (uint64_t)r->count * sizeof(gb_section), size = r->v->image_size;
    uint64_t end = first;
    for (uint32_t i = 0; i < r->count; i++) {
        const gb_section *s = r->entries + i;
        if (!entry_is_good(s, end) || !gr_inside(s->offset, s->size, size) || find(r, s->type) != s)
            return fail(r, GEMRUN_E_TABLE, s->type, end, s->offset);
        end = s->offset + s->size;
    }
    if (!equal(r, GEMRUN_E_TABLE, 0, gr_align(end, GB_ALIGN), size))
        return false;
    end = first;
    for (uint32_t i = 0; i <= r->count; i++) {
        uint64_t next = i < r->count ? r->entries[i].offset : size;
        if (!all_zero(r->v->image + end, next - end))
            return fail(r, GEMRUN_E_GAP, 0, next, end);
        end = i < r->count ? next + r->entries[i].size : size;
    }
    return true;
}

static bool check_presence(reader *r)
{
    for (size_t i = 0; i < REQUIRED_COUNT; i++)
        if (!find(r, required[i]))
            return fail(r, GEMRUN_E_MISSING, required[i], 0, 0);
    bool mask = (r->v->header.required_features & (GB_REQ_KV_MASK | GB_REQ_KV_4BIT)) != 0;
    if (mask != (find(r, GB_SEC_KVMK) != NULL))
        return fail(r, GEMRUN_E_MISSING, GB_SEC_KVMK, mask, !mask);
    for (uint32_t i = 0; i < r->count; i++) {
        const gb_section *s = r->entries + i;
        bool known = s->type == GB_SEC_TMPL || s->type == GB_SEC_KVMK || s->type == GB_SEC_PINP;
        for (size_t k = 0; k < REQUIRED_COUNT; k++)
            known = known || s->type == required[k];
        if (!known && (s->flags & GB_SECF_REQUIRED))
            return fail(r, GEMRUN_E_MISSING, s->type, 0, 1);
    }
    return true;
}

static bool check_crc(reader *r, gemrun_status code, const gb_section *s)
{
    uint32_t crc = gr_crc32(0, r->v->image + s->offset, (size_t)s->size);
    return equal(r, code, s->type, s->crc32, crc);
}

static bool open_table(reader *r)
{
    gr_view *v = r->v;
    uint64_t size = (uint64_t)v->header.section_count * sizeof(gb_section);
    gb_section *copy = take(r, size);
    if (!copy) /* the file changed after its tables were measured */
        return fail(r, GEMRUN_E_TABLE, 0, size, r->left);
    memcpy(copy, v->image + 512, (size_t)size);
    r->entries = copy;
    r->count = v->header.section_count;
    uint32_t crc = gr_crc32(0, copy, (size_t)size);
    bool ok = equal(r, GEMRUN_E_TABLE_CRC, 0, v->header.table_crc32, crc) && check_entries(r) &&
              check_presence(r);
    r->v->whot = find(r, GB_SEC_WHOT);
    for (uint32_t i = 0; ok && i < r->count; i++)
        ok = copy[i].type == GB_SEC_WHOT || check_crc(r, GEMRUN_E_SECTION_CRC, copy + i);
    return ok;
}

/* Copy the records of a section, `known` bytes of each. NULL: the failure is in r->e. */
static const void *copy_records(reader *r, uint32_t type, gemrun_status code, uint64_t known,
                                uint64_t least, uint64_t most)
{
    const gb_section *s = find(r, type);
    const range table[] = {{s->record_size, known, UINT32_MAX}, {s->record_count, least, most}};
    if (!WITHIN(r, code, NO_RECORD, table))
        return NULL;
    uint8_t *copy = take(r, gr_mul(known, s->record_count));
    if (!copy)
        bad(r, code, NO_RECORD, gr_mul(known, s->record_count), r->left);
    const uint8_t *from = r->v->image + s->offset;
    for (uint64_t i = 0; copy && i < s->record_count; i++)
        memcpy(copy + i * known, from + i * s->record_size, (size_t)known);
    return copy;
}

uint64_t gr_open_tables_size(const uint8_t *image, uint64_t size)
{
    static const struct {
        uint32_t type;
        uint64_t bytes, most;
    } known[] = {{GB_SEC_LAYR, sizeof(gb_layer), GB_MAX_LAYERS},
                 {GB_SEC_TENS, sizeof(gb_tensor), GB_MAX_TENSORS},
                 {GB_SEC_SEGM, sizeof(gb_segment), GB_MAX_SEGMENTS},
                 {GB_SEC_PLAN, sizeof(gb_plan), GB_MAX_PLAN},
                 {GB_SEC_KVMK, sizeof(gb_kv_unit), MAX_UNITS}};
    gb_header h;
    gr_error e;
    if (gr_open_header(&h, image, size, &e) != GEMRUN_OK)
        return 0;
    uint64_t total = GR_TABLES_FIXED;
    for (uint32_t i = 0; i < h.section_count; i++) {
        gb_section s;
        memcpy(&s, image + 512 + (size_t)i * sizeof s, sizeof s);
        for (size_t k = 0; k < sizeof known / sizeof known[0]; k++)
            if (s.type == known[k].type && s.record_count <= known[k].most)
                total += s.record_count * known[k].bytes;
    }
    return total;
}

/* ---- CONF, LAYR, SEGM ---- */

static bool open_conf(reader *r)
{
    const gb_conf *copy = copy_records(r, GB_SEC_CONF, GEMRUN_E_CONF, sizeof *copy, 1, 1);
    if (!copy)
        return false;
    r->v->conf = *copy;
    const gb_conf *c = &r->v->conf;
    bool capped = (c->flags & GB_CONFF_FINAL_SOFTCAP) != 0;
    uint32_t zero = !all_zero(c->reserved, sizeof c->reserved) || c->reserved0 != 0 ||
                    !is_text_field(c->family, sizeof c->family) ||
                    !is_text_field(c->name, sizeof c->name);
    uint64_t text = 16 * (uint64_t)c->context + 4096;
    const range table[] = {
        {c->layer_count, 1, GB_MAX_LAYERS}, {c->hidden, 1, GB_MAX_HIDDEN},
        {c->vocab_rows, 1, GB_MAX_VOCAB}, {c->rope_count, 1, GB_MAX_ROPES},
        {c->context, 1, GB_MAX_CONTEXT}, {c->trained_context, 1, GB_MAX_CONTEXT},
        {c->chunk, 1, GB_MAX_CHUNK}, {c->threads, 1, GB_MAX_THREADS},
        {c->kv_type, GR_KV_FIRST, GB_KV_INT8},
        {c->flags, 0, GB_CONFF_TIED | GB_CONFF_FINAL_SOFTCAP},
        {c->act_mode, 0, 0}, {bits(c->norm_eps), 0, FLOAT_MAX},
        {bits(c->embed_scale), 1, FLOAT_MAX},
        {bits(c->final_softcap), capped, capped ? FLOAT_MAX : 0},
        {bits(c->temperature), 0, FLOAT_100}, {bits(c->top_p), 1, FLOAT_1},
        {bits(c->min_p), 0, FLOAT_1 - 1}, {bits(c->repetition_penalty), 1, FLOAT_100},
        {c->top_k, 0, GB_MAX_VOCAB}, {zero, 0, 0}, {c->text_limit, text, text}};
    return WITHIN(r, GEMRUN_E_CONF, 0, table);
}

_Static_assert(GB_REQ_KV_VALUE4 == GB_UNITF_VALUE4 << 8 && GB_REQ_KV_KEY4 == GB_UNITF_KEY4 << 8,
               "a unit's flag is its feature");

/* What a layer's KV heads keep: all of its window, or, where there is none, a part; what has 4 bits
 * goes eight bytes at a time. */
static bool check_units(reader *r, uint32_t index)
{
    const gr_view *v = r->v;
    const gb_layer *l = v->layers + index;
    uint64_t start = index ? (uint64_t)l[-1].unit_first + l[-1].kv_heads : 0, first = 0;
    uint64_t narrow = v->conf.kv_type == GB_KV_INT8 && l->head_dim % 16 == 0
                          ? (v->header.required_features & GB_REQ_KV_4BIT) >> 8 : 0;
    start = v->units ? start : 0;
    if (l->unit_first != start)
        return bad(r, GEMRUN_E_LAYR, index, start, l->unit_first);
    if (v->units && start + l->kv_heads > v->unit_count)
        return bad(r, GEMRUN_E_KVMK, NO_RECORD, start + l->kv_heads, v->unit_count);
    for (uint32_t h = 0; v->units && h < l->kv_heads; h++) {
        const gb_kv_unit *u = v->units + start + h;
        bool all = u->recent == 0, some = !all && l->window == 0;
        uint64_t ring = all ? l->kv_blocks : (uint64_t)u->sink + u->recent + 1;
        const range table[] = {
            {u->recent, 0, some ? l->kv_blocks : 0}, {u->sink, some, some ? l->kv_blocks : 0},
            {ring, 1, all ? l->kv_blocks : (uint64_t)l->kv_blocks - 1},
            {u->blocks, ring, ring}, {u->first, first, first},
            {u->flags & ~narrow, 0, 0}};
        if (!WITHIN(r, GEMRUN_E_KVMK, l->unit_first + h, table))
            return false;
        first += u->blocks * gr_kv_block_size(v, l, u->flags) / gr_kv_step(v, l);
    }
    return true;
}

static bool check_layer(reader *r, uint32_t index, uint64_t kv_offset)
{
    const gb_conf *c = &r->v->conf;
    const gb_layer *l = r->v->layers + index;
    bool capped = (l->flags & GB_LAYERF_ATTN_SOFTCAP) != 0, int8 = c->kv_type == GB_KV_INT8;
    uint32_t known = GB_LAYERF_QK_NORM | GB_LAYERF_QKV_BIAS | GB_LAYERF_ATTN_SOFTCAP;
    uint32_t group = l->kv_group, blocks = gr_kv_layer_blocks(c->context, l->window);
    const range table[] = {
        {l->kind, GB_LAYER_DENSE, GB_LAYER_DENSE}, {l->flags, 0, known},
        {l->heads, 1, GB_MAX_HEADS}, {l->kv_heads, 1, l->heads},
        {l->head_dim, 2, GB_MAX_HEAD_DIM}, {l->head_dim % 2, 0, 0}, {l->ffn, 1, GB_MAX_FFN},
        {l->rope, 0, (uint64_t)c->rope_count - 1}, {l->window, 0, GB_MAX_CONTEXT},
        {l->block, 0, GB_BLOCK_SANDWICH}, {l->act, 0, GB_ACT_SILU},
        {bits(l->score_scale), 1, FLOAT_MAX},
        {bits(l->attn_softcap), capped, capped ? FLOAT_MAX : 0}, {l->kv_source, index, index},
        {group, int8 ? 1 : 0, int8 ? l->head_dim : 0},
        {bits(l->sparsity_z) | !all_zero(l->reserved, sizeof l->reserved), 0, 0},
        {l->kv_blocks, blocks, blocks}, {l->kv_offset, kv_offset, kv_offset}};
    if (!WITHIN(r, GEMRUN_E_LAYR, index, table))
        return false;
    if (l->heads % l->kv_heads != 0)
        return bad(r, GEMRUN_E_LAYR, index, l->kv_heads, l->heads);
    if (int8 && ((group != 32 && group != 64 && group != l->head_dim) || l->head_dim % group))
        return bad(r, GEMRUN_E_LAYR, index, l->head_dim, group);
    if (!check_units(r, index))
        return false;
    uint64_t size = gr_kv_layer_size(r->v, l);
    return l->kv_size == size || bad(r, GEMRUN_E_LAYR, index, size, l->kv_size);
}

static bool open_units(reader *r)
{
    gr_view *v = r->v;
    const gb_section *s = find(r, GB_SEC_KVMK);
    if (!s)
        return true;
    v->units = copy_records(r, GB_SEC_KVMK, GEMRUN_E_KVMK, sizeof(gb_kv_unit), 1, MAX_UNITS);
    v->unit_count = v->units ? (uint32_t)s->record_count : 0;
    return v->units != NULL;
}

static bool open_layers(reader *r)
{
    gr_view *v = r->v;
    uint32_t count = v->conf.layer_count;
    v->layers = copy_records(r, GB_SEC_LAYR, GEMRUN_E_LAYR, sizeof(gb_layer), count, count);
    if (!v->layers)
        return false;
    v->layer_count = count;
    bool ok = open_units(r);
    uint64_t kv = 0;
    uint32_t units = 0;
    for (uint32_t i = 0; ok && i < count; i++) {
        ok = check_layer(r, i, kv);
        kv = gr_add(kv, v->layers[i].kv_size);
        units += v->layers[i].kv_heads;
    }
    return ok && (!v->units || equal(r, GEMRUN_E_KVMK, GB_SEC_KVMK, units, v->unit_count));
}

static bool open_segments(reader *r)
{
    gr_view *v = r->v;
    v->segments = copy_records(r, GB_SEC_SEGM, GEMRUN_E_SEGM, sizeof(gb_segment), 1,
                               GB_MAX_SEGMENTS);
    if (!v->segments)
        return false;
    v->segment_count = (uint32_t)find(r, GB_SEC_SEGM)->record_count;
    bool ok = true;
    for (uint32_t i = 0; ok && i < v->segment_count; i++) {
        const gb_segment *s = v->segments + i;
        const range table[] = {{s->format, GB_FMT_F32, GB_FMT_VECTOR}, {s->first_group, 0, 65536},
                               {s->group_count, 1, 65536}, {s->reserved, 0, 0}};
        ok = WITHIN(r, GEMRUN_E_SEGM, i, table);
    }
    return ok;
}

/* ---- TENS ---- */

typedef struct walk { /* through TENS in execution order, and with it through WHOT */
    uint32_t next;    /* index of the record to be checked */
    uint64_t end, whot_end; /* file offsets: end of the last region, of WHOT */
} walk;

/* A region must start on 256 behind the last one, nothing but zeros between. */
static bool region_fits(const reader *r, walk *w, uint64_t offset, uint64_t size)
{
    if (offset != gr_align(w->end, GB_ALIGN) || !gr_inside(offset, size, w->whot_end) ||
        !all_zero(r->v->image + w->end, offset - w->end))
        return false;
    w->end = offset + size;
    return true;
}

static bool is_vector_role(uint32_t role)
{
    return role == GB_ROLE_FINAL_NORM || role == GB_ROLE_ATTN_NORM || role == GB_ROLE_FFN_NORM ||
           role == GB_ROLE_POST_FFN_NORM ||
           (role >= GB_ROLE_Q_BIAS && role <= GB_ROLE_POST_ATTN_NORM);
}

static bool formats_fit(const gb_tensor *t, const gb_segment *s)
{
    uint32_t first = s->format;
    if (is_vector_role(t->role))
        return t->seg_count == 1 && first == GB_FMT_VECTOR;
    if (gr_is_float(first))
        return t->seg_count == 1;
    if (t->role == GB_ROLE_EMBED || t->role == GB_ROLE_HEAD)
        return t->seg_count == 1 && first == GB_FMT_Q8_ROWS;
    for (uint32_t i = 0; i < t->seg_count; i++)
        if (s[i].format < GB_FMT_Q4H || s[i].format > GB_FMT_Q8)
            return false;
    return true;
}

/* Segments cover the groups in order. The regions are checked before: they bound the loop, since
 * every segment takes at least 288 bytes of a tensor. */
static bool segments_cover(const gb_tensor *t, const gb_segment *s)
{
    uint64_t group = 0;
    for (uint32_t i = 0; i < t->seg_count; i++) {
        if (s[i].first_group != group)
            return false;
        group += s[i].group_count;
    }
    return group == gr_align(t->cols, GB_GROUP) / GB_GROUP;
}

/* The next record: all but its slab. */
static bool check_tensor(reader *r, walk *w, uint32_t role, int32_t layer, uint64_t rows,
                         uint64_t cols)
{
    const gr_view *v = r->v;
    const gb_tensor *t = v->tensors + w->next;
    bool vector = is_vector_role(role), two = role == GB_ROLE_GATE_UP;
    uint64_t rows_padded = vector ? 1 : gr_align(rows, GB_PANEL);
    uint64_t cols_padded = vector ? cols : gr_align(cols, GB_GROUP);
    const range table[] = {
        {t->role, role, role}, {t->rows, rows, rows}, {t->cols, cols, cols},
        {t->rows_padded, rows_padded, rows_padded}, {t->cols_padded, cols_padded, cols_padded},
        {t->parts, two ? 2 : 1, two ? 2 : 1},
        {t->reserved0 | !all_zero(t->reserved, sizeof t->reserved), 0, 0},
        {t->layer != layer, 0, 0},
        {t->seg_count, 1, v->segment_count}, {t->seg_first, 0, v->segment_count - t->seg_count},
        {t->seg_count, 1, t->size / GB_GROUP}};
    if (!WITHIN(r, GEMRUN_E_TENS, w->next, table))
        return false;
    const gb_segment *s = v->segments + t->seg_first;
    if (!region_fits(r, w, t->offset, t->size))
        return bad(r, GEMRUN_E_TENS, w->next, w->end, t->offset);
    if (!segments_cover(t, s) || !formats_fit(t, s))
        return bad(r, GEMRUN_E_TENS, w->next, cols_padded, s->format);
    uint64_t size = gr_tensor_size(t, v->segments);
    bool planes = s->format == GB_FMT_Q8_ROWS;
    uint64_t second = planes ? gr_tensor_second_size(t) : 0;
    if (t->size != size || t->second_size != second)
        return bad(r, GEMRUN_E_TENS, w->next, gr_add(size, second),
                   gr_add(t->size, t->second_size));
    if (planes ? !region_fits(r, w, t->second_offset, second) : t->second_offset != 0)
        return bad(r, GEMRUN_E_TENS, w->next, w->end, t->second_offset);
    w->next++;
    return true;
}

/* Records of one role that together cover `heads` heads of `head_dim` rows, in order. */
static bool check_slabs(reader *r, walk *w, uint32_t role, int32_t layer, uint32_t heads,
                        uint32_t head_dim)
{
    for (uint32_t covered = 0; covered < heads;) {
        if (w->next >= r->v->tensor_count)
            return bad(r, GEMRUN_E_TENS, w->next, role, 0);
        const gb_tensor *t = r->v->tensors + w->next;
        uint64_t rows = gr_mul(t->slab_count, head_dim);
        uint64_t rest = t->slab_count == heads ? 0 : rows % GB_PANEL; /* a part ends on a panel */
        const range table[] = {{t->slab_first, covered, covered},
                               {t->slab_count, 1, heads - covered}, {rest, 0, 0}};
        if (!WITHIN(r, GEMRUN_E_TENS, w->next, table) ||
            !check_tensor(r, w, role, layer, rows, r->v->conf.hidden))
            return false;
        covered += t->slab_count;
    }
    return true;
}

/* One record of a role; only O has a slab, of all heads. */
static bool check_one(reader *r, walk *w, uint32_t role, int32_t layer, uint64_t rows,
                      uint64_t cols)
{
    if (w->next >= r->v->tensor_count)
        return bad(r, GEMRUN_E_TENS, w->next, role, 0);
    const gb_tensor *t = r->v->tensors + w->next;
    uint64_t heads = role == GB_ROLE_O ? r->v->layers[layer].heads : 0;
    const range table[] = {{t->slab_first, 0, 0}, {t->slab_count, heads, heads}};
    return WITHIN(r, GEMRUN_E_TENS, w->next, table) && check_tensor(r, w, role, layer, rows, cols);
}

static bool check_layer_tensors(reader *r, walk *w, uint32_t index)
{
    const gb_layer *l = r->v->layers + index;
    uint32_t first = w->next, hidden = r->v->conf.hidden;
    int32_t at = (int32_t)index;
    uint64_t wide = gr_mul(l->heads, l->head_dim), kv = gr_mul(l->kv_heads, l->head_dim);
    bool bias = (l->flags & GB_LAYERF_QKV_BIAS) != 0, post = l->block == GB_BLOCK_SANDWICH;
    bool norm = (l->flags & GB_LAYERF_QK_NORM) != 0, ok = true;
    const struct {
        uint32_t role, heads; /* heads: a role that may be split into slabs */
        uint64_t rows, cols;
        bool there;
    } want[] = {
        {GB_ROLE_ATTN_NORM, 0, 1, hidden, true}, {GB_ROLE_Q, l->heads, 0, 0, true},
        {GB_ROLE_K, l->kv_heads, 0, 0, true},    {GB_ROLE_V, l->kv_heads, 0, 0, true},
        {GB_ROLE_Q_BIAS, 0, 1, wide, bias},      {GB_ROLE_K_BIAS, 0, 1, kv, bias},
        {GB_ROLE_V_BIAS, 0, 1, kv, bias},        {GB_ROLE_Q_NORM, 0, 1, l->head_dim, norm},
        {GB_ROLE_K_NORM, 0, 1, l->head_dim, norm}, {GB_ROLE_O, 0, hidden, wide, true},
        {GB_ROLE_POST_ATTN_NORM, 0, 1, hidden, post}, {GB_ROLE_FFN_NORM, 0, 1, hidden, true},
        {GB_ROLE_GATE_UP, 0, l->ffn, hidden, true},   {GB_ROLE_DOWN, 0, hidden, l->ffn, true},
        {GB_ROLE_POST_FFN_NORM, 0, 1, hidden, post}};
    for (size_t i = 0; ok && i < sizeof want / sizeof want[0]; i++)
        if (want[i].heads)
            ok = check_slabs(r, w, want[i].role, at, want[i].heads, l->head_dim);
        else if (want[i].there)
            ok = check_one(r, w, want[i].role, at, want[i].rows, want[i].cols);
    uint32_t count = w->next - first;
    const range table[] = {{l->tens_first, first, first}, {l->tens_count, count, count}};
    return ok && WITHIN(r, GEMRUN_E_TENS, first, table);
}

static bool open_tensors(reader *r)
{
    gr_view *v = r->v;
    const gb_conf *c = &v->conf;
    const gb_section *s = v->whot;
    v->tensors = copy_records(r, GB_SEC_TENS, GEMRUN_E_TENS, sizeof(gb_tensor), 1, GB_MAX_TENSORS);
    if (!v->tensors)
        return false;
    v->tensor_count = (uint32_t)find(r, GB_SEC_TENS)->record_count;
    walk w = {0, s->offset, s->offset + s->size};
    bool tied = (c->flags & GB_CONFF_TIED) != 0;
    bool ok = tied || check_one(r, &w, GB_ROLE_EMBED, -1, c->vocab_rows, c->hidden);
    for (uint32_t i = 0; ok && i < v->layer_count; i++)
        ok = check_layer_tensors(r, &w, i);
    uint32_t norm = w.next, head = w.next + 1, embed = tied ? head : 0;
    ok = ok && check_one(r, &w, GB_ROLE_FINAL_NORM, -1, 1, c->hidden) &&
         check_one(r, &w, GB_ROLE_HEAD, -1, c->vocab_rows, c->hidden);
    const range table[] = {{v->tensor_count, w.next, w.next}, {c->tens_final_norm, norm, norm},
                           {c->tens_head, head, head}, {c->tens_embed, embed, embed}};
    if (!ok || !WITHIN(r, GEMRUN_E_TENS, NO_RECORD, table))
        return false;
    uint64_t rest = w.whot_end - w.end;
    return (rest < GB_ALIGN && all_zero(v->image + w.end, rest)) ||
           bad(r, GEMRUN_E_TENS, NO_RECORD, w.whot_end, w.end);
}

/* ---- PLAN, ROPE, TEST ---- */

static const uint8_t lifetimes[][2] = { /* of gb_buffer, from kind 1 */
    {GB_OP_EMBED, GB_OP_HEAD}, {GB_OP_EMBED, GB_OP_HEAD}, {GB_OP_QKV, GB_OP_ATTN},
    {GB_OP_QKV, GB_OP_ATTN}, {GB_OP_ATTN, GB_OP_O}, {GB_OP_ATTN, GB_OP_ATTN},
    {GB_OP_O, GB_OP_DOWN}, {GB_OP_GATE_UP, GB_OP_DOWN}, {GB_OP_TOK, GB_OP_SAMPLE},
    {GB_OP_SAMPLE, GB_OP_SAMPLE}, {GB_OP_SAMPLE, GB_OP_SAMPLE}, {GB_OP_TOK, GB_OP_SAMPLE},
    {GB_OP_TOK, GB_OP_SAMPLE}, {GB_OP_TOK, GB_OP_TOK}, {GB_OP_TOK, GB_OP_SAMPLE}};
enum { PLAN_COUNT = sizeof lifetimes / sizeof lifetimes[0] };

static bool clash(const gb_plan *a, const gb_plan *b)
{
    bool meet = a->first_op <= b->last_op && b->first_op <= a->last_op;
    return meet && a->offset < b->offset + b->size && b->offset < a->offset + a->size;
}

static bool open_plan(reader *r)
{
    gr_view *v = r->v;
    v->plans = copy_records(r, GB_SEC_PLAN, GEMRUN_E_PLAN, sizeof(gb_plan), PLAN_COUNT,
                            PLAN_COUNT);
    if (!v->plans)
        return false;
    v->plan_count = PLAN_COUNT;
    for (uint32_t i = 0; i < PLAN_COUNT; i++) {
        const gb_plan *p = v->plans + i;
        uint64_t size = gr_buffer_size(v, i + 1), most = (uint64_t)1 << 40;
        if (i + 1 == GB_BUF_HIDDEN && p->size == gr_buffer_size(v, GR_BUF_ROWS))
            size = p->size;
        const range table[] = {
            {p->kind, i + 1, i + 1}, {p->first_op, lifetimes[i][0], lifetimes[i][0]},
            {p->last_op, lifetimes[i][1], lifetimes[i][1]}, {p->size, size, size},
            {p->offset % GB_LINE, 0, 0}, {gr_add(p->offset, p->size), 0, most},
            {p->reserved0 | !all_zero(p->reserved, sizeof p->reserved), 0, 0}};
        if (!WITHIN(r, GEMRUN_E_PLAN, i, table))
            return false;
        for (uint32_t k = 0; k < i; k++)
            if (clash(p, v->plans + k))
                return bad(r, GEMRUN_E_PLAN, i, v->plans[k].offset, p->offset);
    }
    return true;
}

static bool open_ropes(reader *r)
{
    gr_view *v = r->v;
    const gb_section *s = find(r, GB_SEC_ROPE);
    uint64_t end = v->conf.rope_count * sizeof(gb_rope);
    gb_rope *copy = take(r, end);
    if (!copy || end > s->size)
        return bad(r, GEMRUN_E_ROPE, NO_RECORD, end, s->size);
    memcpy(copy, v->image + s->offset, (size_t)end);
    v->ropes = copy;
    v->rope_base = v->image + s->offset;
    for (uint32_t i = 0; i < v->conf.rope_count; i++) {
        uint64_t start = gr_align(end, GB_LINE);
        uint64_t size = gr_mul(gr_mul(copy[i].pairs, copy[i].positions), 8);
        const range table[] = {{copy[i].positions, v->conf.context, v->conf.context},
                               {copy[i].pairs, 1, GB_MAX_HEAD_DIM / 2},
                               {copy[i].offset, start, start}};
        if (!WITHIN(r, GEMRUN_E_ROPE, i, table))
            return false;
        if (!gr_inside(start, size, s->size) || !all_zero(v->rope_base + end, start - end))
            return bad(r, GEMRUN_E_ROPE, i, gr_add(start, size), s->size);
        end = start + size;
    }
    if (s->size - end >= GB_LINE || !all_zero(v->rope_base + end, s->size - end))
        return bad(r, GEMRUN_E_ROPE, NO_RECORD, end, s->size);
    for (uint32_t i = 0; i < v->layer_count; i++) {
        const gb_layer *l = v->layers + i;
        if (copy[l->rope].pairs != l->head_dim / 2)
            return bad(r, GEMRUN_E_ROPE, l->rope, l->head_dim / 2, copy[l->rope].pairs);
    }
    return true;
}

#ifndef GR_MINIMAL
static bool open_thermal(reader *r)
{
    const gb_thermal *copy = copy_records(r, GB_SEC_THRM, GEMRUN_E_THRM, sizeof *copy, 1, 1);
    if (!copy)
        return false;
    r->v->thermal = *copy;
    const range table[] = {{bits(copy->threshold_c), 0, FLOAT_MAX},
                           {bits(copy->hysteresis_c), 0, FLOAT_MAX},
                           {bits(copy->device_max_c), 0, FLOAT_MAX}, {copy->mode, 0, 0},
                           {!all_zero(copy->reserved, sizeof copy->reserved), 0, 0}};
    return WITHIN(r, GEMRUN_E_THRM, 0, table);
}
#endif

static bool check_test(reader *r, uint32_t index, const gb_test *t)
{
    const gb_conf *c = &r->v->conf;
    const range table[] = {{t->prompt_count, 1, GB_TEST_PROMPT},
                           {t->step_count, 1, GB_TEST_STEPS},
                           {gr_add(t->prompt_count, t->step_count), 2, c->context},
                           {!all_zero(t->reserved, sizeof t->reserved), 0, 0}};
    bool ok = WITHIN(r, GEMRUN_E_TEST, index, table);
    for (uint32_t i = 0; ok && i < GB_TEST_PROMPT + GB_TEST_STEPS; i++) {
        bool prompt = i < GB_TEST_PROMPT;
        uint32_t id = prompt ? t->prompt[i] : t->steps[i - GB_TEST_PROMPT];
        bool used = prompt ? i < t->prompt_count : i - GB_TEST_PROMPT < t->step_count;
        uint32_t most = used ? c->vocab_rows - 1 : 0;
        ok = id <= most || bad(r, GEMRUN_E_TEST, index, most, id);
    }
    return ok;
}

static bool open_tests(reader *r)
{
    const gb_section *s = find(r, GB_SEC_TEST);
    const range table[] = {{s->record_size, sizeof(gb_test), UINT32_MAX},
                           {s->record_count, 1, GB_MAX_TESTS}};
    bool ok = WITHIN(r, GEMRUN_E_TEST, NO_RECORD, table);
    for (uint32_t i = 0; ok && i < s->record_count; i++) {
        gb_test t;
        memcpy(&t, r->v->image + s->offset + (uint64_t)i * s->record_size, sizeof t);
        ok = check_test(r, i, &t);
    }
    r->v->tests = r->v->image + s->offset;
    r->v->test_stride = s->record_size;
    r->v->test_count = (uint32_t)s->record_count;
    return ok;
}

/* ---- TOKN, TMPL, PINP, RAM, WHOT ---- */

static bool open_tokens(reader *r)
{
    gr_view *v = r->v;
    const gb_section *s = find(r, GB_SEC_TOKN);
    int reason = gr_tok_open(v->image + s->offset, (size_t)s->size, v->conf.vocab_rows, &v->tok);
    return reason == GR_TOK_OK || bad(r, GEMRUN_E_TOKN, NO_RECORD, 0, (uint64_t)reason);
}

#ifndef GR_MINIMAL
static bool open_chat(reader *r)
{
    gr_view *v = r->v;
    const gb_section *s = find(r, GB_SEC_TMPL);
    v->has_chat = s != NULL;
    if (!s)
        return true;
    int reason = gr_chat_open(v->image + s->offset, (size_t)s->size, v->conf.vocab_rows, &v->chat);
    return reason == GR_TOK_OK || bad(r, GEMRUN_E_TMPL, NO_RECORD, 0, (uint64_t)reason);
}

static bool open_pin(reader *r)
{
    gr_view *v = r->v;
    const gb_section *s = find(r, GB_SEC_PINP);
    gb_pin p;
    if (!s)
        return true;
    if (s->size < sizeof p)
        return bad(r, GEMRUN_E_PINP, NO_RECORD, sizeof p, s->size);
    const uint8_t *at = v->image + s->offset;
    memcpy(&p, at, sizeof p);
    if (p.tokens == 0 || p.tokens >= v->conf.context)
        return bad(r, GEMRUN_E_PINP, NO_RECORD, v->conf.context - 1, p.tokens);
    uint64_t size = gr_pin_size(v, p.tokens), end = sizeof p + 4 * (uint64_t)p.tokens;
    if (s->size != size || !all_zero(p.reserved, sizeof p.reserved) ||
        !all_zero(at + end, gr_align(end, GB_LINE) - end))
        return bad(r, GEMRUN_E_PINP, NO_RECORD, size, s->size);
    v->pin_ids = (const uint32_t *)(const void *)(at + sizeof p);
    v->pin_tokens = p.tokens;
    for (uint32_t i = 0; i < p.tokens; i++)
        if (v->pin_ids[i] >= v->conf.vocab_rows)
            return bad(r, GEMRUN_E_PINP, i, v->conf.vocab_rows - 1, v->pin_ids[i]);
    return true;
}
#endif

static uint32_t layout_id(const gr_view *v)
{
    const uint32_t head[] = {v->conf.kv_type, v->conf.context, v->layer_count};
    uint32_t crc = gr_crc32(0, head, sizeof head);
    for (uint32_t i = 0; i < v->layer_count; i++) {
        const gb_layer *l = v->layers + i;
        const uint32_t one[] = {l->kv_heads, l->head_dim, l->kv_group, l->kv_blocks, l->window};
        crc = gr_crc32(crc, one, sizeof one);
    }
    for (uint32_t i = 0; i < v->unit_count; i++) /* sink, recent and flags */
        crc = gr_crc32(crc, v->units + i, offsetof(gb_kv_unit, blocks));
    return crc;
}

static bool check_totals(reader *r)
{
    const gr_view *v = r->v;
    const gb_header *h = &v->header;
    uint64_t page = 4096, arena = 0, kv = 0, total = 0;
    for (uint32_t i = 0; i < v->plan_count; i++)
        arena = gr_max(arena, v->plans[i].offset + v->plans[i].size);
    for (uint32_t i = 0; i < v->layer_count; i++)
        kv = gr_add(kv, v->layers[i].kv_size);
    const gb_section *whot = v->whot;
    uint64_t weights = gr_align(whot->size, page);
    uint64_t file = gr_align(v->image_size, page);
    const uint64_t want[] = {gr_align(whot->mem_size, page), gr_align(arena, page),
                             gr_align(kv, page), file > weights ? file - weights : 0,
                             gr_engine_size(v), gr_mul(v->conf.threads - 1, GR_STACK_SIZE)};
    const uint64_t have[] = {h->ram_weights, h->ram_arena,  h->ram_kv,
                             h->ram_tables,  h->ram_engine, h->ram_stacks};
    for (uint32_t i = 0; i < sizeof want / sizeof want[0]; i++) {
        total = gr_add(total, want[i]);
        if (want[i] != have[i] || want[i] == GR_TOO_BIG)
            return bad(r, GEMRUN_E_RAM, NO_RECORD, want[i], have[i]);
    }
    const range table[] = {{h->ram_total, total, total},
                           {h->kv_layout_id, layout_id(v), layout_id(v)}};
    return WITHIN(r, GEMRUN_E_RAM, NO_RECORD, table);
}

gemrun_status gr_check_weights(const gr_view *v, gr_error *e)
{
    reader r = {.v = (gr_view *)(uintptr_t)v, .e = e};
    return check_crc(&r, GEMRUN_E_WEIGHTS_CRC, v->whot) ? GEMRUN_OK : e->code;
}

gemrun_status gr_open_view(gr_view *v, const uint8_t *image, uint64_t size, void *tables,
                           uint64_t tables_size, bool check_weights, gr_error *e)
{
    static bool (*const steps[])(reader *) = {
        open_table, open_conf, open_layers, open_segments, open_tensors, open_plan, open_ropes,
#ifndef GR_MINIMAL
        open_thermal,
#endif
        open_tests, open_tokens,
#ifndef GR_MINIMAL
        open_chat, open_pin,
#endif
        check_totals};
    memset(v, 0, sizeof *v);
    v->image = image;
    v->image_size = size;
    reader r = {.v = v, .e = e, .room = tables, .left = tables_size};
    bool ok = gr_open_header(&v->header, image, size, e) == GEMRUN_OK;
    for (size_t i = 0; ok && i < sizeof steps / sizeof steps[0]; i++)
        ok = steps[i](&r);
    if (ok && check_weights)
        return gr_check_weights(v, e);
    return ok ? GEMRUN_OK : e->code;
}
