/* gs_json.c: see gs_json.h. */
#include "gs_json.h"

#include <math.h>
#include <string.h>

/* ---- reader ---- */

typedef struct reader {
    gs_json *j;
    char *at, *end;
    uint32_t open[GS_DEPTH], last[GS_DEPTH]; /* containers around, and the last child of each */
    uint32_t depth;
    const char *key; /* of the next value */
} reader;

static bool fail(reader *r, const char *wrong)
{
    r->j->wrong = wrong;
    return false;
}

static char skip(reader *r)
{
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\t' || *r->at == '\n' || *r->at == '\r'))
        r->at++;
    return r->at < r->end ? *r->at : 0;
}

static gs_value *add(reader *r, gs_kind kind)
{
    gs_json *j = r->j;
    if (j->count == GS_VALUES)
        return fail(r, "too many values"), NULL;
    uint32_t index = j->count++;
    j->values[index] = (gs_value){.kind = kind, .key = r->key};
    if (r->depth > 0) {
        uint32_t top = r->depth - 1, *last = &r->last[top];
        gs_value *parent = &j->values[r->open[top]];
        for (uint32_t i = r->key ? parent->first : 0; i; i = j->values[i].next)
            if (strcmp(j->values[i].key, r->key) == 0)
                return fail(r, "a repeated key"), NULL;
        *(*last ? &j->values[*last].next : &parent->first) = index;
        *last = index;
    }
    r->key = NULL;
    return &j->values[index];
}

static bool hex4(reader *r, uint32_t *out)
{
    *out = 0;
    for (int i = 0; i < 4; i++) {
        char c = r->at < r->end ? *r->at++ : 0;
        uint32_t digit = c >= '0' && c <= '9'   ? (uint32_t)(c - '0')
                         : c >= 'a' && c <= 'f' ? (uint32_t)(c - 'a' + 10)
                         : c >= 'A' && c <= 'F' ? (uint32_t)(c - 'A' + 10)
                                                : 16;
        if (digit == 16)
            return fail(r, "a bad \\u escape");
        *out = *out << 4 | digit;
    }
    return true;
}

static char *put_utf8(char *to, uint32_t c)
{
    static const struct {
        uint32_t below;
        uint8_t lead, shift;
    } forms[] = {{0x80, 0, 0}, {0x800, 0xC0, 6}, {0x10000, 0xE0, 12}, {0x110000, 0xF0, 18}};
    size_t form = c < 0x80 ? 0 : c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
    *to++ = (char)(forms[form].lead | c >> forms[form].shift);
    for (uint32_t shift = forms[form].shift; shift > 0; shift -= 6)
        *to++ = (char)(0x80 | (c >> (shift - 6) & 0x3F));
    return to;
}

/* A character behind \u; the low half of a pair is read too. */
static bool unicode(reader *r, char **to)
{
    uint32_t c, low;
    if (!hex4(r, &c))
        return false;
    if (c >= 0xD800 && c < 0xDC00) {
        if (r->end - r->at < 6 || r->at[0] != '\\' || r->at[1] != 'u')
            return fail(r, "half a surrogate pair");
        r->at += 2;
        if (!hex4(r, &low))
            return false;
        if (low < 0xDC00 || low > 0xDFFF)
            return fail(r, "half a surrogate pair");
        c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
    } else if (c >= 0xDC00 && c < 0xE000) {
        return fail(r, "half a surrogate pair");
    }
    if (c == 0)
        return fail(r, "NUL in a string");
    *to = put_utf8(*to, c);
    return true;
}

static bool escape(reader *r, char **to)
{
    static const char from[] = "\"\\/bfnrt", into[] = "\"\\/\b\f\n\r\t";
    char c = r->at < r->end ? *r->at++ : 0;
    if (c == 'u')
        return unicode(r, to);
    const char *found = c ? strchr(from, c) : NULL;
    if (!found)
        return fail(r, "an unknown escape");
    *(*to)++ = into[found - from];
    return true;
}

/* Bytes of the UTF-8 character at p, which has at least one; 0: it is none. */
static size_t utf8_size(const char *p, const char *end)
{
    const uint8_t *u = (const uint8_t *)p;
    size_t n = u[0] < 0x80 ? 1 : u[0] < 0xC2 ? 0 : u[0] < 0xE0 ? 2 : u[0] < 0xF0 ? 3
               : u[0] < 0xF5 ? 4 : 0;
    if (n == 0 || (size_t)(end - p) < n)
        return 0;
    for (size_t i = 1; i < n; i++)
        if (u[i] < 0x80 || u[i] > 0xBF)
            return 0;
    bool bad = (u[0] == 0xE0 && u[1] < 0xA0) || (u[0] == 0xED && u[1] > 0x9F) ||
               (u[0] == 0xF0 && u[1] < 0x90) || (u[0] == 0xF4 && u[1] > 0x8F);
    return bad ? 0 : n;
}

/* A string in place; the quote is next. It never grows, so it ends before its closing quote. */
static bool string(reader *r, const char **text, size_t *size)
{
    char *to = ++r->at;
    *text = to;
    while (r->at < r->end && *r->at != '"') {
        size_t n = utf8_size(r->at, r->end);
        if (n == 0 || (uint8_t)*r->at < 0x20)
            return fail(r, n == 0 ? "text that is not UTF-8" : "a control character in a string");
        if (*r->at == '\\') {
            r->at++;
            if (!escape(r, &to))
                return false;
            continue;
        }
        memmove(to, r->at, n);
        to += n;
        r->at += n;
    }
    if (r->at == r->end)
        return fail(r, "a string without end");
    r->at++;
    *to = 0;
    *size = (size_t)(to - *text);
    return true;
}

static uint32_t digits(reader *r, uint64_t *value, bool *fits, int *scale)
{
    uint32_t n = 0;
    for (; r->at < r->end && *r->at >= '0' && *r->at <= '9'; r->at++, n++) {
        uint64_t digit = (uint64_t)(*r->at - '0');
        if (!*fits || *value > (UINT64_MAX - digit) / 10) { /* what does not fit only scales */
            *fits = false;
            *scale += 1;
        } else {
            *value = *value * 10 + digit;
        }
    }
    return n;
}

/* value * 10^scale. Rounded once, and so correctly, up to 15 digits and 10^22 or 10^-22: beyond,
 * it may be two of the last bit away. Too large is infinity, too small 0. */
static double scaled(uint64_t value, int scale)
{
    enum { ONE_STEP = 300 }; /* 10^300 and its inverse are both far from the ends */
    double x = (double)value;
    if (value == 0 || scale >= 0)
        return value == 0 ? 0 : x * pow(10.0, scale);
    if (scale >= -ONE_STEP)
        return x / pow(10.0, -scale);
    return x / pow(10.0, ONE_STEP) / pow(10.0, -scale - ONE_STEP);
}

/* The power of ten behind an e, if there is one, added to the scale. */
static bool exponent(reader *r, bool *whole, int *scale)
{
    enum { MOST = 1000000 }; /* more than a frame has digits to bring back */
    uint64_t power = 0;
    bool fits = true;
    int over = 0;
    if (r->at == r->end || (*r->at != 'e' && *r->at != 'E'))
        return true;
    r->at++;
    *whole = false;
    bool down = r->at < r->end && *r->at == '-';
    r->at += r->at < r->end && (*r->at == '-' || *r->at == '+');
    if (digits(r, &power, &fits, &over) == 0)
        return false;
    int n = !fits || power > MOST ? MOST : (int)power;
    *scale += down ? -n : n;
    return true;
}

static bool number(reader *r)
{
    gs_value *v = add(r, GS_NUMBER);
    bool minus = *r->at == '-', fits = true, whole = true;
    uint64_t value = 0;
    int scale = 0, lost = 0;
    if (!v)
        return false;
    r->at += minus;
    bool zero = r->at < r->end && *r->at == '0';
    uint32_t n = digits(r, &value, &fits, &scale);
    bool good = n == 1 || (n > 0 && !zero);
    if (good && r->at < r->end && *r->at == '.') {
        r->at++;
        whole = false;
        n = digits(r, &value, &fits, &lost);
        scale -= (int)n - lost;
        good = n > 0;
    }
    if (!good || !exponent(r, &whole, &scale))
        return fail(r, "a malformed number");
    v->number = scaled(value, scale);
    v->is_whole = whole && fits && (!minus || value == 0);
    v->whole = v->is_whole ? value : 0;
    if (minus)
        v->number = -v->number;
    return isfinite(v->number) ? true : fail(r, "a number out of range");
}

static bool word(reader *r)
{
    static const struct {
        const char *text;
        gs_kind kind;
    } words[] = {{"null", GS_NULL}, {"false", GS_FALSE}, {"true", GS_TRUE}};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        size_t n = strlen(words[i].text);
        if ((size_t)(r->end - r->at) >= n && memcmp(r->at, words[i].text, n) == 0) {
            r->at += n;
            return add(r, words[i].kind) != NULL;
        }
    }
    return fail(r, "no value where one is needed");
}

/* The key of an object's next member, and its colon. */
static bool key(reader *r)
{
    size_t size;
    if (skip(r) != '"')
        return fail(r, "no key where one is needed");
    if (!string(r, &r->key, &size))
        return false;
    if (skip(r) != ':')
        return fail(r, "no colon behind a key");
    r->at++;
    return true;
}

static bool open_container(reader *r, bool *empty)
{
    bool object = *r->at++ == '{';
    if (r->depth == GS_DEPTH)
        return fail(r, "nested too deep");
    const gs_value *v = add(r, object ? GS_OBJECT : GS_ARRAY);
    if (!v)
        return false;
    r->open[r->depth] = (uint32_t)(v - r->j->values);
    r->last[r->depth++] = 0;
    *empty = skip(r) == (object ? '}' : ']');
    return *empty || !object || key(r);
}

/* What may follow a value: the end of what is open, or a comma and the next. */
static bool close_containers(reader *r, bool *done)
{
    for (;;) {
        char c = skip(r);
        *done = r->depth == 0;
        if (*done)
            return r->at == r->end ? true : fail(r, "text behind the end");
        bool object = r->j->values[r->open[r->depth - 1]].kind == GS_OBJECT;
        if (c == (object ? '}' : ']')) {
            r->at++;
            r->depth--;
        } else if (c == ',') {
            r->at++;
            return !object || key(r);
        } else {
            return fail(r, "no comma between two values");
        }
    }
}

bool gs_parse(gs_json *j, char *text, size_t size)
{
    reader r = {.j = j, .at = text, .end = text + size};
    text[size] = 0;
    *j = (gs_json){.wrong = ""};
    for (bool done = false; !done;) {
        char c = skip(&r);
        bool empty = true, good;
        if (c == '{' || c == '[') {
            good = open_container(&r, &empty);
            if (good && !empty)
                continue;
        } else if (c == '"') {
            gs_value *v = add(&r, GS_STRING);
            good = v && string(&r, &v->text, &v->size);
        } else {
            good = c == '-' || (c >= '0' && c <= '9') ? number(&r) : word(&r);
        }
        if (!good || !close_containers(&r, &done))
            return false;
    }
    return true;
}

const gs_value *gs_first(const gs_json *j, const gs_value *of)
{
    return of && of->first ? &j->values[of->first] : NULL;
}

const gs_value *gs_next(const gs_json *j, const gs_value *v)
{
    return v->next ? &j->values[v->next] : NULL;
}

const gs_value *gs_get(const gs_json *j, const gs_value *of, const char *name)
{
    const gs_value *v = of && of->kind == GS_OBJECT ? gs_first(j, of) : NULL;
    while (v && strcmp(v->key, name) != 0)
        v = gs_next(j, v);
    return v && v->kind != GS_NULL ? v : NULL;
}

/* ---- writer ---- */

static void put(gs_out *o, const char *bytes, size_t size)
{
    if (size > sizeof o->bytes - 1 - o->size) { /* the closing brace always fits */
        o->full = true;
        return;
    }
    memcpy(o->bytes + o->size, bytes, size);
    o->size += size;
}

/* What is not UTF-8, as a file's name may be, becomes U+FFFD: the reader would refuse all of it. */
static void put_string(gs_out *o, const char *text, size_t size)
{
    static const char hex[] = "0123456789abcdef";
    put(o, "\"", 1);
    for (size_t i = 0, n; i < size; i += n) {
        unsigned char c = (unsigned char)text[i];
        char escaped[6] = {'\\', 'u', '0', '0', hex[c >> 4], hex[c & 15]};
        n = utf8_size(text + i, text + size);
        if (c == '"' || c == '\\')
            put(o, (char[]){'\\', (char)c}, 2);
        else if (c < 32 || c == 127)
            put(o, escaped, 6);
        else
            put(o, n > 0 ? text + i : "\xef\xbf\xbd", n > 0 ? n : 3);
        n = n > 0 ? n : 1;
    }
    put(o, "\"", 1);
}

static void put_key(gs_out *o, const char *name)
{
    if (o->size > 5)
        put(o, ",", 1);
    put_string(o, name, strlen(name));
    put(o, ":", 1);
}

static void put_whole(gs_out *o, uint64_t value)
{
    char text[20];
    size_t n = 0;
    do
        text[sizeof text - ++n] = (char)('0' + value % 10);
    while ((value /= 10) > 0);
    put(o, text + sizeof text - n, n);
}

/* All of a member or nothing of it: what is cut would be no JSON. Nothing follows a lost one. */
static void keep(gs_out *o, size_t before)
{
    o->size = o->full ? before : o->size;
}

void gs_begin(gs_out *o, const char *event)
{
    o->size = 4;
    o->full = false;
    put(o, "{", 1);
    gs_text(o, "event", event, strlen(event));
}

void gs_text(gs_out *o, const char *name, const char *text, size_t size)
{
    size_t before = o->size;
    put_key(o, name);
    put_string(o, text, size);
    keep(o, before);
}

void gs_whole(gs_out *o, const char *name, uint64_t value)
{
    size_t before = o->size;
    put_key(o, name);
    put_whole(o, value);
    keep(o, before);
}

void gs_signed(gs_out *o, const char *name, int64_t value)
{
    size_t before = o->size;
    put_key(o, name);
    if (value < 0)
        put(o, "-", 1);
    put_whole(o, value < 0 ? 0 - (uint64_t)value : (uint64_t)value);
    keep(o, before);
}

void gs_real(gs_out *o, const char *name, double value)
{
    size_t before = o->size;
    bool good = isfinite(value) && fabs(value) < 9e15;
    uint64_t thousandths = good ? (uint64_t)(fabs(value) * 1000 + 0.5) : 0;
    char rest[] = {'.', (char)('0' + thousandths / 100 % 10), (char)('0' + thousandths / 10 % 10),
                   (char)('0' + thousandths % 10)};
    put_key(o, name);
    if (good) {
        if (value < 0)
            put(o, "-", 1);
        put_whole(o, thousandths / 1000);
        put(o, rest, sizeof rest);
    } else {
        put(o, "null", 4);
    }
    keep(o, before);
}

void gs_bool(gs_out *o, const char *name, bool value)
{
    size_t before = o->size;
    put_key(o, name);
    put(o, value ? "true" : "false", value ? 4 : 5);
    keep(o, before);
}

void gs_end(gs_out *o)
{
    o->bytes[o->size++] = '}'; /* put() leaves room for it */
    uint32_t size = (uint32_t)o->size - 4;
    for (int i = 0; i < 4; i++)
        o->bytes[i] = (uint8_t)(size >> 8 * i);
}
