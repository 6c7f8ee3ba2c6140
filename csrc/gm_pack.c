/* gm_pack.c: layout r16k4. Panels of 16 rows; a line of super-scales, then superblocks of at most
 * eight groups of one format: all codes, then all scales, then all zero points, padded to 64 bytes.
 * A line of 64 code bytes holds 16 rows x 4 inputs in its low nibbles (input quad i of the group)
 * and 16 rows x 4 in its high ones (quad i + 4). */
#include <string.h>

#include "gembin.h"
#include "gm_internal.h"

_Static_assert((int)GM_FMT_F32 == (int)GB_FMT_F32 && (int)GM_FMT_F16 == (int)GB_FMT_F16, "formats");
_Static_assert((int)GM_FMT_Q4H == (int)GB_FMT_Q4H && (int)GM_FMT_Q8 == (int)GB_FMT_Q8, "formats");
_Static_assert((int)GM_FMT_Q4RAW_F16 == (int)GB_FMT_Q4RAW_F16, "formats");
_Static_assert((int)GM_FMT_Q4RAW_BF16 == (int)GB_FMT_Q4RAW_BF16, "formats");
_Static_assert((int)GM_FMT_Q8_ROWS == (int)GB_FMT_Q8_ROWS, "formats");

enum { LINE = 64, PLANE = 256, PANEL_SCALES = GM_PANEL };

/* A superblock inside a panel: where its parts lie, and how many groups it holds. */
typedef struct block {
    uint32_t group, count, format;
    uint64_t codes, scales, zps, end; /* offsets from the panel's start */
} block;

static uint64_t line_up(uint64_t n)
{
    return (n + (uint64_t)LINE - 1u) / (uint64_t)LINE * (uint64_t)LINE;
}

static uint32_t format_at(const uint8_t *formats, uint32_t group)
{
    return formats == NULL ? (uint32_t)GM_FMT_Q4H : formats[group];
}

/* The superblock that starts at group `group` and offset `at`; format 0 = take formats[]. */
static block block_at(const uint8_t *formats, uint32_t fixed, uint32_t group, uint32_t groups,
                      uint64_t at)
{
    block b = {.group = group, .format = fixed != 0u ? fixed : format_at(formats, group)};
    while (b.count < (uint32_t)GM_SUPERBLOCK && group + b.count < groups &&
           (fixed != 0u || format_at(formats, group + b.count) == b.format)) {
        b.count++;
    }
    uint64_t code_bytes = b.format == (uint32_t)GM_FMT_Q8 ? 2u * PLANE : PLANE;
    uint64_t scale_bytes = b.format == (uint32_t)GM_FMT_Q4RAW_F16 ? 2u * GM_PANEL : GM_PANEL;
    b.codes = at;
    b.scales = at + b.count * code_bytes;
    b.zps = b.scales + b.count * scale_bytes;
    b.end = b.zps + (b.format == (uint32_t)GM_FMT_Q4H ? b.count * (uint64_t)GM_PANEL : 0u);
    b.end = at + line_up(b.end - at);
    return b;
}

static uint64_t blocks_end(const uint8_t *formats, uint32_t fixed, uint32_t groups)
{
    uint64_t at = LINE;
    for (uint32_t g = 0; g < groups;) {
        block b = block_at(formats, fixed, g, groups, at);
        at = b.end;
        g += b.count;
    }
    return at;
}

uint64_t gm_panel_bytes(uint32_t format, uint32_t cols, const uint8_t *formats)
{
    if (cols == 0u || cols > (uint32_t)GM_MAX_COLS) {
        return 0u;
    }
    uint32_t groups = gm_groups(cols);
    switch (format) {
    case GM_FMT_F32:
        return line_up((uint64_t)cols * GM_PANEL * 4u);
    case GM_FMT_F16:
        return line_up((uint64_t)cols * GM_PANEL * 2u);
    case GM_FMT_Q4RAW_F16:
    case GM_FMT_Q4RAW_BF16:
        return blocks_end(NULL, (uint32_t)GM_FMT_Q4RAW_F16, groups);
    case GM_FMT_Q8_ROWS:
        return LINE + (uint64_t)groups * PLANE; /* of the high region; the low one has no line */
    case GM_FMT_Q4H:
    case GM_FMT_Q8:
        if (gm_check_formats(formats, groups) != GM_OK) {
            return 0u;
        }
        return blocks_end(formats, formats == NULL ? format : 0u, groups);
    default:
        return 0u;
    }
}

/* The four nibbles (byte >> shift) & 15 of four consecutive bytes, each in its own byte. */
static uint32_t nibbles(const uint8_t *codes, uint32_t shift)
{
    uint32_t four;
    memcpy(&four, codes, sizeof four);
    return four >> shift & 0x0f0f0f0fu; /* shift 0 or 4: nothing crosses a byte that is kept */
}

/* 256 bytes of one group: nibble (code >> shift) & 15 of 16 rows x 32 inputs. */
static void pack_plane(const uint8_t *codes, size_t pitch, uint32_t rows, uint32_t shift,
                       uint8_t *out)
{
    memset(out, 0, PLANE);
    for (uint32_t r = 0; r < rows; r++) {
        const uint8_t *c = codes + r * pitch;
        for (uint32_t i = 0; i < 4u; i++) {
            uint32_t four = nibbles(c + 4u * i, shift) | nibbles(c + 16u + 4u * i, shift) << 4;
            memcpy(out + i * (uint32_t)LINE + 4u * r, &four, sizeof four);
        }
    }
}

/* The reverse; the nibbles are added in at `shift`. */
static void unpack_plane(const uint8_t *in, uint32_t rows, uint32_t shift, uint8_t *codes,
                         size_t pitch)
{
    for (uint32_t r = 0; r < rows; r++) {
        uint8_t *c = codes + r * pitch;
        for (uint32_t k = 0; k < 16u; k++) {
            uint32_t byte = in[k / 4u * (uint32_t)LINE + r * 4u + k % 4u];
            c[k] = (uint8_t)(c[k] | (byte & 15u) << shift);
            c[k + 16u] = (uint8_t)(c[k + 16u] | byte >> 4 << shift);
        }
    }
}

static void put_f32(uint8_t *out, float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    for (uint32_t i = 0; i < 4u; i++) {
        out[i] = (uint8_t)(bits >> 8u * i);
    }
}

static float get_f32(const uint8_t *in)
{
    uint32_t bits = 0;
    float x;
    for (uint32_t i = 0; i < 4u; i++) {
        bits |= (uint32_t)in[i] << 8u * i;
    }
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* GM_OK where `size` is exactly what panels of these rows at this stride take. */
static int32_t check_panels(uint32_t rows, uint64_t panel, uint64_t stride, uint64_t size)
{
    uint64_t panels = ((uint64_t)rows + GM_PANEL - 1u) / GM_PANEL;
    if (panel == 0u || stride < panel || stride > (uint64_t)1 << 40) {
        return GM_ERR_ARG;
    }
    return size == (panels - 1u) * stride + panel ? GM_OK : GM_ERR_SIZE;
}

static uint32_t rows_here(uint32_t rows, uint32_t first)
{
    return rows - first < (uint32_t)GM_PANEL ? rows - first : (uint32_t)GM_PANEL;
}

static void pack_supers(const float *supers, uint32_t count, uint8_t *out)
{
    memset(out, 0, LINE);
    for (uint32_t r = 0; r < count; r++) {
        put_f32(out + 4u * r, supers[r]);
    }
}

/* One superblock of q4h or q8; zeroes the padding too. */
static void pack_block(const gm_rows *in, uint32_t first, uint32_t count, const block *b,
                       uint8_t *panel)
{
    uint32_t groups = gm_groups(in->cols), cp = gm_padded(in->cols);
    int q8 = b->format == (uint32_t)GM_FMT_Q8;
    memset(panel + b->scales, 0, b->end - b->scales);
    for (uint32_t i = 0; i < b->count; i++) {
        uint32_t g = b->group + i;
        const uint8_t *codes = in->codes + (size_t)first * cp + (size_t)g * GM_GROUP;
        uint8_t *to = panel + b->codes + (uint64_t)i * (q8 ? 2u * PLANE : PLANE);
        pack_plane(codes, cp, count, q8 ? 4u : 0u, to);
        if (q8) {
            pack_plane(codes, cp, count, 0u, to + PLANE);
        }
        for (uint32_t r = 0; r < count; r++) {
            size_t at = (size_t)(first + r) * groups + g;
            panel[b->scales + (uint64_t)i * PANEL_SCALES + r] = in->scales[at];
            if (!q8) {
                panel[b->zps + (uint64_t)i * PANEL_SCALES + r] = in->zps[at];
            }
        }
    }
}

static int32_t check_rows(const gm_rows *rows, const uint8_t *formats)
{
    if (rows == NULL || rows->codes == NULL || rows->scales == NULL || rows->zps == NULL ||
        rows->supers == NULL) {
        return GM_ERR_ARG;
    }
    int32_t status = gm_check_shape(rows->rows, rows->cols);
    return status == GM_OK ? gm_check_formats(formats, gm_groups(rows->cols)) : status;
}

/* Not 0 where one of `count` codes of a group is out of range or a padded one is not 0. */
static uint32_t bad_codes(const uint8_t *codes, uint32_t count, int q8)
{
    uint32_t bad = 0;
    for (uint32_t j = 0; j < count; j++) {
        bad |= q8 ? (uint32_t)(codes[j] == 0u) : (uint32_t)(codes[j] >> 4);
    }
    for (uint32_t j = count; j < (uint32_t)GM_GROUP; j++) {
        bad |= codes[j];
    }
    return bad;
}

/* The same for rows of a single format. */
static int bad_rows(const uint8_t *codes, uint32_t rows, uint32_t cols, int q8)
{
    uint32_t groups = gm_groups(cols), bad = 0;
    for (uint32_t r = 0; r < rows; r++) {
        for (uint32_t g = 0; g < groups; g++, codes += GM_GROUP) {
            uint32_t left = cols - g * (uint32_t)GM_GROUP;
            bad |= bad_codes(codes, left < (uint32_t)GM_GROUP ? left : (uint32_t)GM_GROUP, q8);
        }
    }
    return bad != 0u;
}

/* Codes that a format cannot hold are an error of the caller, never masked away. */
static int32_t check_codes(const gm_rows *in, const uint8_t *formats)
{
    uint32_t cp = gm_padded(in->cols);
    uint32_t bad = 0;
    for (uint32_t r = 0; r < in->rows; r++) {
        const uint8_t *codes = in->codes + (size_t)r * cp;
        for (uint32_t g = 0; g < cp / (uint32_t)GM_GROUP; g++, codes += GM_GROUP) {
            uint32_t left = in->cols - g * (uint32_t)GM_GROUP;
            bad |= bad_codes(codes, left < (uint32_t)GM_GROUP ? left : (uint32_t)GM_GROUP,
                             gm_is_q8(formats, g));
        }
    }
    return bad != 0u ? GM_ERR_RANGE : GM_OK;
}

int32_t gm_pack_rows(const gm_rows *in, const uint8_t *formats, uint8_t *out, uint64_t stride,
                     uint64_t size)
{
    int32_t status = out == NULL ? GM_ERR_ARG : check_rows(in, formats);
    if (status != GM_OK) {
        return status;
    }
    uint32_t groups = gm_groups(in->cols);
    status = check_panels(in->rows, blocks_end(formats, 0u, groups), stride, size);
    status = status == GM_OK ? check_codes(in, formats) : status;
    for (uint32_t first = 0; status == GM_OK && first < in->rows; first += (uint32_t)GM_PANEL) {
        uint8_t *panel = out + first / (uint32_t)GM_PANEL * stride;
        uint32_t count = rows_here(in->rows, first);
        uint64_t at = LINE;
        pack_supers(in->supers + first, count, panel);
        for (uint32_t g = 0; g < groups;) {
            block b = block_at(formats, 0u, g, groups, at);
            pack_block(in, first, count, &b, panel);
            at = b.end;
            g += b.count;
        }
    }
    return status;
}

static void unpack_block(const uint8_t *panel, uint32_t first, uint32_t count, const block *b,
                         gm_rows *out)
{
    uint32_t groups = gm_groups(out->cols), cp = gm_padded(out->cols);
    int q8 = b->format == (uint32_t)GM_FMT_Q8;
    for (uint32_t i = 0; i < b->count; i++) {
        uint32_t g = b->group + i;
        uint8_t *codes = out->codes + (size_t)first * cp + (size_t)g * GM_GROUP;
        const uint8_t *from = panel + b->codes + (uint64_t)i * (q8 ? 2u * PLANE : PLANE);
        unpack_plane(from, count, q8 ? 4u : 0u, codes, cp);
        if (q8) {
            unpack_plane(from + PLANE, count, 0u, codes, cp);
        }
        for (uint32_t r = 0; r < count; r++) {
            size_t at = (size_t)(first + r) * groups + g;
            out->scales[at] = panel[b->scales + (uint64_t)i * PANEL_SCALES + r];
            out->zps[at] = q8 ? 0u : panel[b->zps + (uint64_t)i * PANEL_SCALES + r];
        }
    }
}

int32_t gm_unpack_rows(const uint8_t *in, uint64_t stride, uint64_t size, const uint8_t *formats,
                       gm_rows *out)
{
    int32_t status = in == NULL ? GM_ERR_ARG : check_rows(out, formats);
    if (status != GM_OK) {
        return status;
    }
    uint32_t groups = gm_groups(out->cols);
    status = check_panels(out->rows, blocks_end(formats, 0u, groups), stride, size);
    if (status != GM_OK) {
        return status;
    }
    memset(out->codes, 0, (size_t)out->rows * gm_padded(out->cols));
    for (uint32_t first = 0; first < out->rows; first += (uint32_t)GM_PANEL) {
        const uint8_t *panel = in + first / (uint32_t)GM_PANEL * stride;
        uint32_t count = rows_here(out->rows, first);
        uint64_t at = LINE;
        for (uint32_t r = 0; r < count; r++) {
            out->supers[first + r] = get_f32(panel + 4u * r);
        }
        for (uint32_t g = 0; g < groups;) {
            block b = block_at(formats, 0u, g, groups, at);
            unpack_block(panel, first, count, &b, out);
            at = b.end;
            g += b.count;
        }
    }
    return GM_OK;
}

int32_t gm_pack_q4raw(const uint8_t *codes, const uint16_t *scales, uint32_t rows, uint32_t cols,
                      uint8_t *out, uint64_t stride, uint64_t size)
{
    static const float sixteenth[GM_PANEL] = {
        0.0625f, 0.0625f, 0.0625f, 0.0625f, 0.0625f, 0.0625f, 0.0625f, 0.0625f,
        0.0625f, 0.0625f, 0.0625f, 0.0625f, 0.0625f, 0.0625f, 0.0625f, 0.0625f};
    int32_t status = codes == NULL || scales == NULL || out == NULL ? GM_ERR_ARG
                                                                    : gm_check_shape(rows, cols);
    if (status != GM_OK) {
        return status;
    }
    uint32_t groups = gm_groups(cols), cp = gm_padded(cols);
    status = check_panels(rows, gm_panel_bytes(GM_FMT_Q4RAW_F16, cols, NULL), stride, size);
    status = status == GM_OK && bad_rows(codes, rows, cols, 0) ? GM_ERR_RANGE : status;
    for (uint32_t first = 0; status == GM_OK && first < rows; first += (uint32_t)GM_PANEL) {
        uint8_t *panel = out + first / (uint32_t)GM_PANEL * stride;
        uint32_t count = rows_here(rows, first);
        uint64_t at = LINE;
        pack_supers(sixteenth, count, panel);
        for (uint32_t g = 0; g < groups;) {
            block b = block_at(NULL, (uint32_t)GM_FMT_Q4RAW_F16, g, groups, at);
            memset(panel + b.scales, 0, b.end - b.scales);
            for (uint32_t i = 0; i < b.count; i++) {
                pack_plane(codes + (size_t)first * cp + (size_t)(g + i) * GM_GROUP, cp, count, 0u,
                           panel + b.codes + (uint64_t)i * PLANE);
                for (uint32_t r = 0; r < count; r++) {
                    uint16_t s = scales[(size_t)(first + r) * groups + g + i];
                    uint8_t *to = panel + b.scales + (uint64_t)i * 2u * GM_PANEL + 2u * r;
                    to[0] = (uint8_t)s;
                    to[1] = (uint8_t)(s >> 8);
                }
            }
            at = b.end;
            g += b.count;
        }
    }
    return status;
}

int32_t gm_unpack_q4raw(const uint8_t *in, uint64_t stride, uint64_t size, uint32_t rows,
                        uint32_t cols, uint8_t *codes, uint16_t *scales)
{
    int32_t status = in == NULL || codes == NULL || scales == NULL ? GM_ERR_ARG
                                                                   : gm_check_shape(rows, cols);
    if (status != GM_OK) {
        return status;
    }
    uint32_t groups = gm_groups(cols), cp = gm_padded(cols);
    status = check_panels(rows, gm_panel_bytes(GM_FMT_Q4RAW_F16, cols, NULL), stride, size);
    if (status != GM_OK) {
        return status;
    }
    memset(codes, 0, (size_t)rows * cp);
    for (uint32_t first = 0; first < rows; first += (uint32_t)GM_PANEL) {
        const uint8_t *panel = in + first / (uint32_t)GM_PANEL * stride;
        uint32_t count = rows_here(rows, first);
        uint64_t at = LINE;
        for (uint32_t g = 0; g < groups;) {
            block b = block_at(NULL, (uint32_t)GM_FMT_Q4RAW_F16, g, groups, at);
            for (uint32_t i = 0; i < b.count; i++) {
                unpack_plane(panel + b.codes + (uint64_t)i * PLANE, count, 0u,
                             codes + (size_t)first * cp + (size_t)(g + i) * GM_GROUP, cp);
                for (uint32_t r = 0; r < count; r++) {
                    const uint8_t *s = panel + b.scales + (uint64_t)i * 2u * GM_PANEL + 2u * r;
                    scales[(size_t)(first + r) * groups + g + i] = (uint16_t)(s[0] | s[1] << 8);
                }
            }
            at = b.end;
            g += b.count;
        }
    }
    return GM_OK;
}

/* Sizes of the two regions of q8 rows. */
static int32_t check_regions(uint32_t rows, uint32_t cols, uint64_t high_size, uint64_t low_size)
{
    int32_t status = gm_check_shape(rows, cols);
    if (status != GM_OK) {
        return status;
    }
    uint64_t panels = ((uint64_t)rows + GM_PANEL - 1u) / GM_PANEL;
    uint64_t plane = (uint64_t)gm_groups(cols) * PLANE;
    int good = high_size == panels * (LINE + plane) && low_size == panels * plane;
    return good ? GM_OK : GM_ERR_SIZE;
}

int32_t gm_pack_q8_rows(const uint8_t *codes, const float *supers, uint32_t rows, uint32_t cols,
                        uint8_t *high, uint64_t high_size, uint8_t *low, uint64_t low_size)
{
    if (codes == NULL || supers == NULL || high == NULL || low == NULL) {
        return GM_ERR_ARG;
    }
    int32_t status = check_regions(rows, cols, high_size, low_size);
    if (status != GM_OK) {
        return status;
    }
    uint32_t groups = gm_groups(cols), cp = gm_padded(cols);
    if (bad_rows(codes, rows, cols, 1)) {
        return GM_ERR_RANGE;
    }
    for (uint32_t first = 0; first < rows; first += (uint32_t)GM_PANEL) {
        uint32_t count = rows_here(rows, first);
        const uint8_t *from = codes + (size_t)first * cp;
        pack_supers(supers + first, count, high);
        high += LINE;
        for (uint32_t g = 0; g < groups; g++, high += PLANE, low += PLANE) {
            pack_plane(from + (size_t)g * GM_GROUP, cp, count, 4u, high);
            pack_plane(from + (size_t)g * GM_GROUP, cp, count, 0u, low);
        }
    }
    return GM_OK;
}

int32_t gm_unpack_q8_rows(const uint8_t *high, uint64_t high_size, const uint8_t *low,
                          uint64_t low_size, uint32_t rows, uint32_t cols, uint8_t *codes,
                          float *supers)
{
    if (codes == NULL || supers == NULL || high == NULL || low == NULL) {
        return GM_ERR_ARG;
    }
    int32_t status = check_regions(rows, cols, high_size, low_size);
    if (status != GM_OK) {
        return status;
    }
    uint32_t groups = gm_groups(cols), cp = gm_padded(cols);
    memset(codes, 0, (size_t)rows * cp);
    for (uint32_t first = 0; first < rows; first += (uint32_t)GM_PANEL) {
        uint32_t count = rows_here(rows, first);
        uint8_t *to = codes + (size_t)first * cp;
        for (uint32_t r = 0; r < count; r++) {
            supers[first + r] = get_f32(high + 4u * r);
        }
        high += LINE;
        for (uint32_t g = 0; g < groups; g++, high += PLANE, low += PLANE) {
            unpack_plane(high, count, 4u, to + (size_t)g * GM_GROUP, cp);
            unpack_plane(low, count, 0u, to + (size_t)g * GM_GROUP, cp);
        }
    }
    return GM_OK;
}

int32_t gm_pack_float(const float *weights, uint32_t rows, uint32_t cols, uint32_t format,
                      uint8_t *out, uint64_t stride, uint64_t size)
{
    int half = format == (uint32_t)GM_FMT_F16;
    if (weights == NULL || out == NULL || (!half && format != (uint32_t)GM_FMT_F32)) {
        return GM_ERR_ARG;
    }
    int32_t status = gm_check_shape(rows, cols);
    uint64_t panel = gm_panel_bytes(format, cols, NULL), width = half ? 2u : 4u;
    status = status == GM_OK ? check_panels(rows, panel, stride, size) : status;
    if (status != GM_OK) {
        return status;
    }
    for (uint32_t first = 0; first < rows; first += (uint32_t)GM_PANEL) {
        uint8_t *to = out + first / (uint32_t)GM_PANEL * stride;
        memset(to, 0, panel);
        for (uint32_t r = 0; r < rows_here(rows, first); r++) {
            const float *from = weights + (size_t)(first + r) * cols;
            for (uint32_t c = 0; c < cols; c++) {
                uint8_t *at = to + ((uint64_t)c * GM_PANEL + r) * width;
                uint16_t bits = half ? gm_f16_bits(from[c]) : 0u;
                if (!(from[c] - from[c] == 0.0f)) {
                    return GM_ERR_NONFINITE;
                }
                if (!half) {
                    put_f32(at, from[c]);
                } else if ((bits & 0x7c00u) == 0x7c00u) {
                    return GM_ERR_RANGE;
                } else {
                    at[0] = (uint8_t)bits;
                    at[1] = (uint8_t)(bits >> 8);
                }
            }
        }
    }
    return GM_OK;
}
