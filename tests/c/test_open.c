/* test_open.c: the reader on a small artifact: accepted as it is, refused with the right code for
 * every rule that is broken, and never worse than refused for random damage (run it under
 * sanitizers). */
#include "image.h"

static gemrun_status view_of(const uint8_t *bytes, uint64_t size, bool weights, gr_error *e)
{
    static gr_view v;
    uint64_t room = gr_open_tables_size(bytes, size);
    CHECK(room < (uint64_t)16 << 20);
    void *tables = room ? aligned_alloc(64, (size_t)gr_align(room, 64)) : NULL;
    gemrun_status st = gr_open_view(&v, bytes, size, tables, room, weights, e);
    free(tables);
    return st;
}

/* The code for the image, read from a block of exactly its size. */
static gemrun_status status_of(const image *m)
{
    gr_error e = {0};
    uint8_t *exact = aligned_alloc(4096, (size_t)gr_align(m->size + 1, 4096));
    uint8_t *end = exact + gr_align(m->size, 8) - m->size; /* keeps 8-byte sizes on 8 */
    memcpy(end, m->bytes, (size_t)m->size);
    gemrun_status st = view_of(end, m->size, true, &e);
    CHECK(st == GEMRUN_OK || e.code == st);
    free(exact);
    return st;
}

static image copy_of(const image *m)
{
    image c = {aligned_alloc(4096, IMAGE_MAX), m->size};
    memcpy(c.bytes, m->bytes, IMAGE_MAX);
    return c;
}

/* One rule: what is changed, whether the checksums are renewed, and the code that must come. */
typedef struct rule {
    gemrun_status code;
    uint32_t type; /* section, 0: the header */
    size_t at;     /* byte of the section or header */
    uint8_t flip;
    bool reseal;
} rule;

#define HEADER(field) 0, offsetof(gb_header, field)
#define ENTRY(n, field) 0, 512 + (n) * sizeof(gb_section) + offsetof(gb_section, field)
#define IN(type, record, n, field) GB_SEC_##type, (n) * sizeof(record) + offsetof(record, field)

static const rule rules[] = {
    {GEMRUN_E_MAGIC, HEADER(magic), 1, true},
    {GEMRUN_E_BYTE_ORDER, HEADER(byte_order), 1, true},
    {GEMRUN_E_VERSION, HEADER(major), 2, true},
    {GEMRUN_OK, HEADER(minor), 4, true}, /* a newer minor passes */
    {GEMRUN_E_HEADER_CRC, HEADER(file_size), 1, false},
    {GEMRUN_E_HEADER, HEADER(header_size), 1, true},
    {GEMRUN_E_HEADER, HEADER(entry_size), 1, true},
    {GEMRUN_E_HEADER, HEADER(align), 1, true},
    {GEMRUN_E_HEADER, HEADER(table_offset), 1, true},
    {GEMRUN_E_HEADER, HEADER(section_count), 0x80, true},
    {GEMRUN_E_HEADER, HEADER(reserved), 1, true},
    {GEMRUN_E_HEADER, 0, offsetof(gb_header, target) + 15, 1, true},
    {GEMRUN_E_SIZE, HEADER(file_size), 1, true},
    {GEMRUN_E_FEATURE, 0, offsetof(gb_header, required_features) + 7, 1, true},
    {GEMRUN_OK, HEADER(optional_features), 0xff, true},
    {GEMRUN_E_ABI, HEADER(engine_abi_min), 4, true},
    {GEMRUN_E_SIGNATURE, 0, 256, 1, false}, /* alg 1 alone is allowed, 3 is not: see below */
    {GEMRUN_E_SIGNATURE, 0, 300, 1, false},
    {GEMRUN_E_TABLE_CRC, ENTRY(3, flags), 2, false},
    {GEMRUN_E_TABLE, ENTRY(3, name), 1, true},
    {GEMRUN_E_TABLE, ENTRY(3, offset), 1, true},
    {GEMRUN_E_TABLE, ENTRY(3, size), 1, true},
    {GEMRUN_E_TABLE, ENTRY(3, mem_size), 1, true},
    {GEMRUN_E_TABLE, ENTRY(3, record_count), 1, true},
    {GEMRUN_E_TABLE, ENTRY(3, reserved0), 1, true},
    {GEMRUN_E_TABLE, ENTRY(3, reserved1), 1, true},
    {GEMRUN_E_TABLE, 0, 512 + 3 * sizeof(gb_section) + 7, 1, true},
    {GEMRUN_E_SECTION_CRC, IN(LAYR, gb_layer, 0, heads), 1, false},
    {GEMRUN_E_CONF, GB_SEC_CONF, offsetof(gb_conf, layer_count) + 2, 1, true},
    {GEMRUN_E_CONF, IN(CONF, gb_conf, 0, text_limit), 1, true},
    {GEMRUN_E_CONF, IN(CONF, gb_conf, 0, act_mode), 1, true},
    {GEMRUN_E_CONF, IN(CONF, gb_conf, 0, final_softcap), 1, true},
    {GEMRUN_E_CONF, IN(CONF, gb_conf, 0, reserved), 1, true},
    {GEMRUN_E_LAYR, IN(LAYR, gb_layer, 1, kind), 1, true},
    {GEMRUN_E_LAYR, IN(LAYR, gb_layer, 1, head_dim), 1, true},
    {GEMRUN_E_LAYR, IN(LAYR, gb_layer, 1, rope), 1, true},
    {GEMRUN_E_LAYR, IN(LAYR, gb_layer, 1, kv_source), 1, true},
    {GEMRUN_E_LAYR, IN(LAYR, gb_layer, 1, kv_group), 16, true},
    {GEMRUN_E_LAYR, IN(LAYR, gb_layer, 1, kv_offset), 64, true},
    {GEMRUN_E_LAYR, IN(LAYR, gb_layer, 1, kv_size), 64, true},
    {GEMRUN_E_LAYR, IN(LAYR, gb_layer, 1, kv_blocks), 1, true},
    {GEMRUN_E_LAYR, IN(LAYR, gb_layer, 1, sparsity_z), 1, true},
    {GEMRUN_E_LAYR, IN(LAYR, gb_layer, 1, reserved), 1, true},
    {GEMRUN_E_SEGM, IN(SEGM, gb_segment, 2, format), 16, true},
    {GEMRUN_E_SEGM, IN(SEGM, gb_segment, 2, reserved), 1, true},
    {GEMRUN_E_TENS, IN(SEGM, gb_segment, 2, first_group), 1, true},
    {GEMRUN_E_TENS, IN(SEGM, gb_segment, 2, group_count), 1, true},
    {GEMRUN_E_TENS, IN(SEGM, gb_segment, 2, format), 4, true}, /* Q4H becomes Q8_ROWS */
    {GEMRUN_E_TENS, IN(TENS, gb_tensor, 1, role), 1, true},
    {GEMRUN_E_TENS, IN(TENS, gb_tensor, 1, layer), 1, true},
    {GEMRUN_E_TENS, IN(TENS, gb_tensor, 1, seg_first), 0x80, true},
    {GEMRUN_E_TENS, IN(TENS, gb_tensor, 1, seg_count), 2, true},
    {GEMRUN_E_TENS, IN(TENS, gb_tensor, 1, rows), 1, true},
    {GEMRUN_E_TENS, IN(TENS, gb_tensor, 1, cols_padded), 32, true},
    {GEMRUN_E_TENS, IN(TENS, gb_tensor, 1, slab_count), 1, true},
    {GEMRUN_E_TENS, IN(TENS, gb_tensor, 1, parts), 2, true},
    {GEMRUN_E_TENS, 0, 0, 0, true}, /* a byte between two regions: see below */
    {GEMRUN_E_TENS, IN(TENS, gb_tensor, 1, size), 64, true},
    {GEMRUN_E_TENS, IN(TENS, gb_tensor, 1, second_size), 1, true},
    {GEMRUN_E_TENS, IN(TENS, gb_tensor, 1, reserved), 1, true},
    {GEMRUN_E_TENS, IN(CONF, gb_conf, 0, tens_head), 1, true},
    {GEMRUN_E_TENS, IN(CONF, gb_conf, 0, flags), 1, true}, /* untied, but no EMBED record */
    {GEMRUN_E_TENS, IN(LAYR, gb_layer, 1, tens_first), 1, true},
    {GEMRUN_E_PLAN, IN(PLAN, gb_plan, 4, kind), 1, true},
    {GEMRUN_E_PLAN, IN(PLAN, gb_plan, 4, first_op), 1, true},
    {GEMRUN_E_PLAN, IN(PLAN, gb_plan, 4, size), 64, true},
    {GEMRUN_E_PLAN, IN(PLAN, gb_plan, 4, offset), 1, true},
    {GEMRUN_E_PLAN, IN(PLAN, gb_plan, 4, reserved), 1, true},
    {GEMRUN_E_ROPE, IN(ROPE, gb_rope, 0, pairs), 1, true},
    {GEMRUN_E_ROPE, IN(ROPE, gb_rope, 0, positions), 1, true},
    {GEMRUN_E_ROPE, IN(ROPE, gb_rope, 0, offset), 64, true},
    {GEMRUN_E_ROPE, GB_SEC_ROPE, 20, 1, true}, /* between record and table */
    {GEMRUN_E_THRM, IN(THRM, gb_thermal, 0, mode), 1, true},
    {GEMRUN_E_THRM, GB_SEC_THRM, 3, 0x80, true}, /* minus zero */
    {GEMRUN_E_TEST, IN(TEST, gb_test, 0, step_count), 0x80, true},
    {GEMRUN_E_TEST, IN(TEST, gb_test, 0, prompt), 0x80, true},
    {GEMRUN_E_TEST, GB_SEC_TEST, 16 + 4 * 399, 1, true}, /* behind the prompt */
    {GEMRUN_E_TOKN, IN(TOKN, struct gb_tokn, 0, vocab), 1, true},
    {GEMRUN_E_TMPL, IN(TMPL, struct gb_tmpl, 0, flags), 0x80, true},
    {GEMRUN_E_RAM, HEADER(ram_total), 1, true},
    {GEMRUN_E_RAM, 0, offsetof(gb_header, ram_arena) + 2, 1, true},
    {GEMRUN_E_RAM, HEADER(kv_layout_id), 1, true},
    {GEMRUN_OK, HEADER(ram_budget), 1, true},
    {GEMRUN_OK, HEADER(isa), 9, true},
    {GEMRUN_E_WEIGHTS_CRC, GB_SEC_WHOT, 5, 1, false},
};

static void test_rules(const image *good)
{
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        const rule *r = rules + i;
        image m = copy_of(good);
        uint8_t *at = r->type ? image_data(&m, r->type) : m.bytes;
        at[r->at] ^= r->flip;
        if (r->type == 0 && r->at == 256) {
            at[256] = 3;
        }
        if (r->flip == 0) { /* the byte before the head's low plane */
            const gb_conf *c = image_data(&m, GB_SEC_CONF);
            const gb_tensor *t = image_data(&m, GB_SEC_TENS);
            CHECK(t[c->tens_head].offset + t[c->tens_head].size < t[c->tens_head].second_offset);
            m.bytes[t[c->tens_head].second_offset - 1] = 1;
        }
        if (r->reseal) {
            image_reseal(&m);
        }
        gemrun_status st = status_of(&m);
        if (st != r->code) {
            fprintf(stderr, "rule %zu: code %d, wanted %d\n", i, st, r->code);
            exit(1);
        }
        free(m.bytes);
    }
}

static void test_cuts(const image *good)
{
    image m = copy_of(good);
    for (uint64_t size = 0; size < good->size; size += size < 1024 ? 1 : 255) {
        m.size = size;
        gemrun_status st = status_of(&m);
        CHECK(st == GEMRUN_E_SIZE);
    }
    m.size = good->size + 256; /* longer than the header says */
    CHECK(status_of(&m) == GEMRUN_E_SIZE);
    free(m.bytes);
}

static void test_tables(const image *good)
{
    image m = copy_of(good);
    gb_section *s = image_section(&m, GB_SEC_MANI);
    m.bytes[s->offset + s->size] = 1; /* in a gap */
    CHECK(status_of(&m) == GEMRUN_E_GAP);
    memcpy(m.bytes, good->bytes, IMAGE_MAX);
    memcpy(s->name, "ABCD", 4); /* a required section under a name that nobody knows */
    s->type = GB_FOURCC('A', 'B', 'C', 'D');
    image_reseal(&m);
    CHECK(status_of(&m) == GEMRUN_E_MISSING);
    memcpy(m.bytes, good->bytes, IMAGE_MAX);
    s = image_section(&m, GB_SEC_TMPL); /* unknown: skipped, or refused if required */
    memcpy(s->name, "ABCD", 4);
    s->type = GB_FOURCC('A', 'B', 'C', 'D');
    image_reseal(&m);
    CHECK(status_of(&m) == GEMRUN_OK);
    s->flags = GB_SECF_REQUIRED;
    image_reseal(&m);
    CHECK(status_of(&m) == GEMRUN_E_MISSING);
    memcpy(m.bytes, good->bytes, IMAGE_MAX);
    s = image_section(&m, GB_SEC_TMPL);
    memcpy(s->name, "MANI", 4); /* twice the same */
    s->type = GB_SEC_MANI;
    image_reseal(&m);
    CHECK(status_of(&m) == GEMRUN_E_TABLE);
    free(m.bytes);
}

static void test_plan_overlap(const image *good)
{
    image m = copy_of(good);
    gb_plan *p = image_data(&m, GB_SEC_PLAN);
    p[GB_BUF_CAND - 1].offset = p[GB_BUF_TOK - 1].offset; /* SAMPLE and TOK never meet */
    image_reseal(&m);
    CHECK(status_of(&m) == GEMRUN_OK);
    p[GB_BUF_CAND - 1].offset = p[GB_BUF_SEEN - 1].offset;
    image_reseal(&m);
    CHECK(status_of(&m) == GEMRUN_E_PLAN);
    free(m.bytes);
}

/* What the reader accepts, the engine runs: to tokens or to an error. */
static void run_image(const image *m)
{
    gemrun_context_t *ctx = NULL;
    gemrun_config c = gemrun_config_default();
    int32_t out[4];
    c.threads = 1;
    c.ignore_memory = 1;
    gemrun_status st = gemrun_open_mem(&ctx, m->bytes, m->size, NULL, 0, &c);
    CHECK(st == GEMRUN_OK);
    int32_t n = gemrun_infer(ctx, "0123456789 0123456789", out, 4);
    CHECK(n <= 4 && (n >= 0 || n == GEMRUN_E_NONFINITE || n == GEMRUN_E_PROMPT ||
                     n == GEMRUN_E_SAMPLING));
    (void)gemrun_run_tests(ctx);
    gemrun_destroy(ctx);
}

/* Weights that do not all stay in memory: fewer are declared, with the flag alone. */
static void test_cold(const image *good)
{
    image m = copy_of(good);
    gb_section *s = image_section(&m, GB_SEC_WHOT);
    gb_header *h = (gb_header *)(void *)m.bytes;
    uint64_t held = 4096, less = h->ram_weights - held;
    CHECK(s->size > 2 * held);
    s->mem_size = held;
    h->ram_weights -= less, h->ram_total -= less;
    image_reseal(&m);
    CHECK(status_of(&m) == GEMRUN_E_TABLE);
    s->flags |= GB_SECF_COLD;
    image_reseal(&m);
    CHECK(status_of(&m) == GEMRUN_OK);
    run_image(&m);
    h->ram_weights += less, h->ram_total += less;
    image_reseal(&m);
    CHECK(status_of(&m) == GEMRUN_E_RAM);
    s->mem_size = s->size + 1;
    image_reseal(&m);
    CHECK(status_of(&m) == GEMRUN_E_TABLE);
    free(m.bytes);
}

/* Random damage behind right checksums: any status, no crash. */
static void test_damage(const image *good, uint32_t rounds)
{
    image m = copy_of(good);
    uint32_t passed = 0;
    for (uint32_t i = 0; i < rounds; i++) {
        uint64_t limit = image_random() % 4 ? image_section(good, GB_SEC_WHOT)->offset : m.size;
        for (uint32_t k = image_random() % 3 + 1; k > 0; k--) {
            uint64_t at = image_random() % limit;
            uint32_t how = image_random() % 4;
            m.bytes[at] = (uint8_t)(how == 0 ? 0 : how == 1 ? 0xff : image_random());
        }
        image_reseal(&m);
        if (status_of(&m) == GEMRUN_OK) {
            passed++;
            run_image(&m);
        }
        memcpy(m.bytes, good->bytes, (size_t)m.size);
    }
    printf("damage: %u of %u accepted\n", passed, rounds);
    free(m.bytes);
}

int main(int argc, char **argv)
{
    image good = image_make();
    image_random_state = argc > 1 ? strtoull(argv[1], NULL, 10) | 1 : 77;
    CHECK(status_of(&good) == GEMRUN_OK);
    CHECK(gr_crc32(0, "123456789", 9) == 0xcbf43926u);
    CHECK(gr_crc32(gr_crc32(0, "1234", 4), "56789", 5) == 0xcbf43926u);
    static uint8_t much[3 * 4096 + 100]; /* enough for a processor's own instructions */
    for (size_t i = 0; i < sizeof much; i++)
        much[i] = (uint8_t)(i * i >> 3 ^ i);
    for (size_t size = 4000; size + 3 < sizeof much; size += 333) {
        uint32_t slow = 0x12345678; /* by pieces that are too short for them */
        for (size_t at = 0, n; at < size; at += n) {
            n = size - at < 77 ? size - at : 77;
            slow = gr_crc32(slow, much + 3 + at, n);
        }
        CHECK(gr_crc32(0x12345678, much + 3, size) == slow);
    }
    test_rules(&good);
    test_cuts(&good);
    test_tables(&good);
    test_plan_overlap(&good);
    test_cold(&good);
    test_damage(&good, argc > 2 ? (uint32_t)atoi(argv[2]) : 3000);
    free(good.bytes);
    puts("test_open: ok");
    return 0;
}
