/* gr_text.c: what a status code means, in words. Left out, the engine reports numbers alone.
 *
 * A sentence is "<what is wrong>; <what to do>"; the figures of a gr_error go before the
 * semicolon. No libc, no allocation: text goes into the buffer of the caller and is cut where it
 * does not fit. */
#include <stddef.h>
#include <string.h>

#include "gr_text.h"
#include "gr_text_list.h"

typedef enum shape { NUMBER, MASK, REAL, INDEX } shape; /* how a field's value is shown */

/* The texts lie in one struct each and are found by their offsets in it: pointers to them would be
 * a hundredth of the engine. */
#define TEXTS(field, name, range) char field##_name[sizeof name], field##_range[sizeof range];
#define VALUES(field, name, range) name, range,
#define PLACES(field, name, range) \
    [field] = {offsetof(struct field_texts, field##_name), \
               offsetof(struct field_texts, field##_range)},
static const struct field_texts {
    FIELDS(TEXTS)
} field_texts = {FIELDS(VALUES)};
static const struct {
    uint16_t name, range;
} fields[GR_F_COUNT] = {FIELDS(PLACES)};
#undef TEXTS
#undef VALUES
#undef PLACES

static const char *field_text(uint16_t place)
{
    return (const char *)&field_texts + place;
}

static shape shape_of(uint32_t field)
{
    switch (field) {
    case GR_F_ALIGNED:
    case GR_F_AFFINITY:
        return MASK;
    case GR_F_TEMPERATURE:
    case GR_F_TOP_P:
    case GR_F_MIN_P:
    case GR_F_PENALTY:
        return REAL;
    case GR_F_STOP:
    case GR_F_BIAS_VALUE:
    case GR_F_MESSAGES:
        return INDEX;
    default:
        return NUMBER;
    }
}

#define TEXT(code, figures, text) char code##_text[sizeof text];
#define VALUE(code, figures, text) text,
#define PLACE(code, figures, text) {code, figures, offsetof(struct sentence_texts, code##_text)},
static const struct sentence_texts {
    SENTENCES(TEXT)
} sentence_texts = {SENTENCES(VALUE)};
static const struct {
    int8_t code;
    uint8_t figures;
    uint16_t place;
} sentences[] = {SENTENCES(PLACE)};
#undef TEXT
#undef VALUE
#undef PLACE

static const char *sentence(size_t i)
{
    return (const char *)&sentence_texts + sentences[i].place;
}

typedef struct writer {
    char *out;
    size_t used, capacity;
} writer;

static void put(writer *w, const char *text, size_t size)
{
    size_t room = w->capacity - 1 - w->used, n = size < room ? size : room;
    memcpy(w->out + w->used, text, n);
    w->used += n;
    w->out[w->used] = 0;
}

static void put_text(writer *w, const char *text)
{
    put(w, text, strlen(text));
}

static void put_number(writer *w, uint64_t value, uint64_t base)
{
    char digits[24];
    size_t n = sizeof digits;
    do {
        digits[--n] = "0123456789abcdef"[value % base];
        value /= base;
    } while (value > 0);
    put_text(w, base == 16 ? "0x" : "");
    put(w, digits + n, sizeof digits - n);
}

/* `unit` in the singular. */
static void put_count(writer *w, uint64_t value, uint64_t base, const char *unit)
{
    put_number(w, value, base);
    put_text(w, unit);
    put_text(w, *unit && value != 1 ? "s" : "");
}

static void put_pair(writer *w, const gr_error *e, uint64_t base, const char *unit)
{
    put_text(w, "wanted ");
    put_count(w, e->wanted, base, unit);
    put_text(w, ", found ");
    put_count(w, e->found, base, unit);
}

/* Three decimals are enough to tell a wrong setting. */
static void put_real(writer *w, uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    if (!(f - f == 0.0f) || f >= 1e9f || f <= -1e9f) {
        put_text(w, f != f ? "not a number" : f < 0 ? "a huge negative number" : "a huge number");
        return;
    }
    uint64_t thousandths = (uint64_t)((f < 0 ? -(double)f : (double)f) * 1000 + 0.5);
    if (thousandths == 0 && f != 0) {
        put_text(w, f < 0 ? "a tiny negative number" : "a tiny number");
        return;
    }
    put_text(w, f < 0 ? "-" : "");
    put_number(w, thousandths / 1000, 10);
    for (uint32_t rest = (uint32_t)(thousandths % 1000), scale = 100; rest > 0; scale /= 10) {
        put_text(w, scale == 100 ? "." : "");
        put_number(w, rest / scale, 10);
        rest %= scale;
    }
}

/* "<name>: <value> is out of range; use <range>" */
static void put_field(writer *w, const gr_error *e)
{
    shape shape = shape_of(e->what);
    uint64_t base = shape == MASK ? 16 : 10, found = e->found;
    put_text(w, field_text(fields[e->what].name));
    put_text(w, ": ");
    put_text(w, shape == INDEX ? "number " : "");
    if (shape == REAL) {
        put_real(w, (uint32_t)found);
    } else {
        bool negative = shape == NUMBER && found > INT64_MAX;
        put_text(w, negative ? "-" : "");
        put_number(w, negative ? 0 - found : found, base);
    }
    put_text(w, shape == INDEX ? " is not usable; use " : " is out of range; use ");
    for (const char *p = field_text(fields[e->what].range); *p != 0; p++)
        if (*p == '#')
            put_number(w, e->wanted, base);
        else
            put(w, p, 1);
}

/* What a refused model would take (O34). */
static void put_plan(writer *w, const gr_error *e)
{
    static const char names[6][12] = {": weights ", ", tables ", ", arena ",
                                      ", KV ",      ", engine ", ", stacks "};
    uint64_t total = 0;
    for (uint32_t i = 0; i < 6; i++) {
        put_text(w, names[i]);
        put_number(w, e->plan[i], 10);
        total += e->plan[i];
    }
    put_text(w, ", total ");
    put_number(w, total, 10);
    put_text(w, " with ");
    put_count(w, e->threads, 10, " thread");
}

static void put_kernels(writer *w)
{
    put_text(w, "available: ");
    for (uint32_t i = 0; gr_kernels_at(i); i++) {
        put_text(w, i ? ", " : "");
        put_text(w, gr_kernels_at(i));
    }
}

static void put_section(writer *w, uint32_t type)
{
    char name[4];
    for (uint32_t i = 0; i < 4; i++) {
        char c = (char)(type >> 8 * i & 127);
        name[i] = c >= 'A' && c <= 'Z' ? c : '?';
    }
    put(w, name, type ? sizeof name : 0);
}

static void put_figures(writer *w, detail figures, const gr_error *e)
{
    put_text(w, " (");
    switch (figures) {
    case BYTES:
        put_pair(w, e, 10, " byte");
        if (e->threads > 0)
            put_plan(w, e);
        break;
    case KERNELS: put_kernels(w); break;
    case TOKENS:
        put_count(w, e->wanted, 10, " token");
        put_text(w, ", room for ");
        put_number(w, e->found, 10);
        break;
    case HEX:     put_pair(w, e, 16, ""); break;
    case SECTION: put_section(w, e->what); break;
    case REASON:  put_text(w, gr_port_reason(e->found)); break;
    case LAST:    put_text(w, "byte "); put_number(w, e->found, 10); break;
    case FOUND:   put_text(w, "number "); put_number(w, e->found, 10); break;
    case SECTION_HEX:
        put_section(w, e->what);
        put_text(w, ", ");
        put_pair(w, e, 16, "");
        break;
    case RECORD:
        if (e->record != GR_NO_RECORD) {
            put_text(w, "record ");
            put_number(w, e->record, 10);
            put_text(w, ", ");
        }
        put_pair(w, e, 10, "");
        break;
    default: put_pair(w, e, 10, ""); break;
    }
    put_text(w, ")");
}

static size_t index_of(gemrun_status code)
{
    for (size_t i = 0; i < sizeof sentences / sizeof sentences[0]; i++)
        if (sentences[i].code == code)
            return i;
    return 0;
}

const char *gemrun_status_text(gemrun_status status)
{
    size_t i = index_of(status);
    return i == 0 && status != GEMRUN_OK ? "unknown status; see gemrun.h" : sentence(i);
}

/* A context that was set too low asks for another remedy than a compiled one. */
static void put_remedy(writer *w, const gr_error *e, const char *remedy)
{
    bool room = e->code == GEMRUN_E_PROMPT || e->code == GEMRUN_E_FULL;
    if (!room || e->record == GR_NO_RECORD) {
        put_text(w, remedy);
        return;
    }
    while (*remedy != ',')
        put(w, remedy++, 1);
    put_text(w, ", or raise --kv-cache-size (kv_cache_size) from ");
    put_number(w, e->found, 10);
    put_text(w, " to at most the compiled ");
    put_number(w, e->record, 10);
}

/* Of a name without end its beginning and its end. */
static void put_object(writer *w, const char *object)
{
    size_t size = strlen(object), part = w->capacity / 4;
    if (size > 2 * part) {
        put(w, object, part);
        put(w, "...", 3);
        object += size - part;
    }
    put_text(w, object);
}

void gr_explain(const gr_error *e, const char *object, char *out, size_t capacity)
{
    writer w = {out, 0, capacity};
    size_t i = index_of(e->code);
    uint32_t figures = sentences[i].figures;
    const char *text = sentence(i), *remedy = text;
    while (*remedy != ';' && *remedy != 0)
        remedy++;
    out[0] = 0;
    put_object(&w, object);
    put_text(&w, ": ");
    if (figures == FIELD && e->what > GR_F_NONE && e->what < GR_F_COUNT) {
        put_field(&w, e);
        return;
    }
    if (e->code == GEMRUN_E_PROMPT && e->wanted == 0) {
        put_text(&w, "the prompt is empty; give it some text");
        return;
    }
    put(&w, text, (size_t)(remedy - text));
    if (figures != PLAIN && figures != FIELD)
        put_figures(&w, (detail)figures, e);
    put_remedy(&w, e, remedy);
}
