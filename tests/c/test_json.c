/* test_json.c: the reader and the writer of the control channel (gs_json.h).
 *
 * The reader is compared with a second one below, written apart from it, recursive and with
 * allocations, on tables, on every character, and on texts that are mutated at random: both accept
 * the same texts and see the same values. Run it under sanitizers; texts lie in blocks of their
 * exact size. */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gs_json.h"

#define CHECK(x)                                                                         \
    do {                                                                                 \
        if (!(x)) {                                                                      \
            fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #x);        \
            exit(1);                                                                     \
        }                                                                                \
    } while (0)

enum { FUZZ = 300000, TEXT_MOST = 1 << 20 };

static gs_json json;
static char dumped[TEXT_MOST];
static size_t dumped_size;
static double numbers[GS_VALUES]; /* that are no whole ones, in their order */
static uint32_t number_count;

/* ---- what was read, as a text ---- */

static void dump(const void *bytes, size_t size)
{
    CHECK(dumped_size + size < sizeof dumped);
    memcpy(dumped + dumped_size, bytes, size);
    dumped_size += size;
    dumped[dumped_size] = 0;
}

static void dump_text(const char *text, size_t size)
{
    dump("<", 1);
    dump(text, size);
    dump(">", 1);
}

/* Whole numbers by their digits; others are told apart in `numbers`. */
static void dump_number(const gs_value *v)
{
    char text[64] = "~";
    if (v->is_whole) {
        snprintf(text, sizeof text, "%llu", (unsigned long long)v->whole);
        CHECK((double)v->whole == v->number);
    } else {
        numbers[number_count++] = v->number;
    }
    dump(text, strlen(text));
}

static uint32_t dump_value(const gs_json *j, const gs_value *v)
{
    static const char *const words[] = {"null", "false", "true"};
    uint32_t seen = 1;
    CHECK(v - j->values < j->count);
    if (v->key) {
        dump_text(v->key, strlen(v->key));
        dump(":", 1);
    }
    if (v->kind <= GS_TRUE) {
        dump(words[v->kind], strlen(words[v->kind]));
    } else if (v->kind == GS_NUMBER) {
        dump_number(v);
    } else if (v->kind == GS_STRING) {
        CHECK(strlen(v->text) == v->size);
        dump_text(v->text, v->size);
    } else {
        dump(v->kind == GS_ARRAY ? "[" : "{", 1);
        for (const gs_value *c = gs_first(j, v); c; c = gs_next(j, c)) {
            CHECK((c->key != NULL) == (v->kind == GS_OBJECT));
            seen += dump_value(j, c);
            dump(gs_next(j, c) ? "," : "", gs_next(j, c) ? 1 : 0);
        }
        dump(v->kind == GS_ARRAY ? "]" : "}", 1);
    }
    return seen;
}

/* Read a copy in a block of exactly its size, and the byte that gs_parse may write behind it. */
static bool read_copy(const void *bytes, size_t size)
{
    static char *copy; /* the values point into it until the next call */
    free(copy);
    copy = malloc(size + 1);
    CHECK(copy != NULL);
    memcpy(copy, bytes, size);
    copy[size] = 'x';
    bool good = gs_parse(&json, copy, size);
    dumped_size = number_count = 0;
    dumped[0] = 0;
    if (good) {
        CHECK(dump_value(&json, json.values) == json.count); /* every value hangs somewhere, once */
    }
    CHECK(good == (json.wrong[0] == 0));
    return good;
}

static bool reads(const char *text)
{
    return read_copy(text, strlen(text));
}

/* ---- the second reader ---- */

enum { KEYS = 4096 };

typedef struct second {
    const uint8_t *at, *end;
    uint32_t depth, values;
    struct {
        char *text;
    } keys[KEYS]; /* of the objects that are open */
    uint32_t key_count;
    char *out; /* the same text as dump_value makes */
    size_t size;
    double numbers[GS_VALUES];
    uint32_t number_count;
} second;

static void say(second *s, const void *bytes, size_t size)
{
    CHECK(s->size + size < TEXT_MOST);
    memcpy(s->out + s->size, bytes, size);
    s->size += size;
}

static void blank(second *s)
{
    while (s->at < s->end && memchr(" \t\n\r", *s->at, 4)) {
        s->at++;
    }
}

static bool next_is(second *s, char c)
{
    bool is = s->at < s->end && *s->at == (uint8_t)c;
    s->at += is;
    return is;
}

/* Four digits behind \u. */
static bool unit(second *s, uint32_t *out)
{
    char text[5] = {0}, *behind;
    if (s->end - s->at < 4) {
        return false;
    }
    memcpy(text, s->at, 4);
    for (int i = 0; i < 4; i++) {
        if (!strchr("0123456789abcdefABCDEF", text[i]) || text[i] == 0) {
            return false;
        }
    }
    *out = (uint32_t)strtoul(text, &behind, 16);
    s->at += 4;
    return *behind == 0;
}

/* Bytes of a code point, by the table of RFC 3629. */
static size_t encode(uint32_t c, uint8_t *out)
{
    if (c < 0x80) {
        out[0] = (uint8_t)c;
        return 1;
    }
    size_t n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (size_t i = n; i-- > 1; c >>= 6) {
        out[i] = (uint8_t)(0x80 | (c & 63));
    }
    out[0] = (uint8_t)((n == 2 ? 0xC0 : n == 3 ? 0xE0 : 0xF0) | c);
    return n;
}

/* Size of a character that is the shortest form of a code point; 0: it is none. */
static size_t decode(const uint8_t *p, size_t room)
{
    uint8_t again[4];
    size_t n = p[0] < 0x80 ? 1 : p[0] >> 5 == 6 ? 2 : p[0] >> 4 == 14 ? 3 : p[0] >> 3 == 30 ? 4 : 0;
    if (n == 0 || n > room) {
        return 0;
    }
    uint32_t c = n == 1 ? p[0] : p[0] & (0x7Fu >> n);
    for (size_t i = 1; i < n; i++) {
        if (p[i] >> 6 != 2) {
            return 0;
        }
        c = c << 6 | (p[i] & 63);
    }
    bool good = c < 0x110000 && (c < 0xD800 || c > 0xDFFF) && encode(c, again) == n;
    return good && memcmp(again, p, n) == 0 ? n : 0;
}

static bool second_escape(second *s, uint8_t *to, size_t *n)
{
    static const char names[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
    uint32_t c, low;
    *n = 1;
    for (size_t i = 0; names[i]; i++) {
        if (next_is(s, names[i])) {
            to[0] = (uint8_t)meant[i];
            return true;
        }
    }
    if (!next_is(s, 'u') || !unit(s, &c) || c == 0 || (c >= 0xDC00 && c <= 0xDFFF)) {
        return false;
    }
    if (c >= 0xD800 && c <= 0xDBFF) {
        if (!next_is(s, '\\') || !next_is(s, 'u') || !unit(s, &low) || low < 0xDC00 ||
            low > 0xDFFF) {
            return false;
        }
        c = 0x10000 + (c - 0xD800) * 0x400 + (low - 0xDC00);
    }
    *n = encode(c, to);
    return true;
}

static bool second_string(second *s, char *to)
{
    if (!next_is(s, '"')) {
        return false;
    }
    for (;;) {
        uint8_t made[4];
        size_t n = 0;
        if (s->at == s->end || *s->at < 32) {
            return false;
        }
        if (next_is(s, '"')) {
            *to = 0;
            return true;
        }
        if (next_is(s, '\\')) {
            if (!second_escape(s, made, &n)) {
                return false;
            }
        } else {
            n = decode(s->at, (size_t)(s->end - s->at));
            if (n == 0) {
                return false;
            }
            memcpy(made, s->at, n);
            s->at += n;
        }
        memcpy(to, made, n);
        to += n;
    }
}

static size_t run_of_digits(second *s)
{
    const uint8_t *from = s->at;
    while (s->at < s->end && *s->at >= '0' && *s->at <= '9') {
        s->at++;
    }
    return (size_t)(s->at - from);
}

/* Numbers go through the C library; main() keeps the locale "C". */
static bool second_number(second *s)
{
    const uint8_t *from = s->at;
    bool minus = next_is(s, '-'), whole = true;
    const uint8_t *first = s->at;
    size_t n = run_of_digits(s);
    if (n == 0 || (n > 1 && *first == '0')) {
        return false;
    }
    if (next_is(s, '.')) {
        whole = false;
        if (run_of_digits(s) == 0) {
            return false;
        }
    }
    if (next_is(s, 'e') || next_is(s, 'E')) {
        whole = false;
        if (!next_is(s, '-')) {
            next_is(s, '+');
        }
        if (run_of_digits(s) == 0) {
            return false;
        }
    }
    size_t size = (size_t)(s->at - from);
    char *copy = calloc(1, size + 1);
    CHECK(copy != NULL);
    memcpy(copy, from, size);
    double value = strtod(copy, NULL);
    char again[32];
    unsigned long long number = minus ? 0 : strtoull(copy, NULL, 10);
    int length = snprintf(again, sizeof again, "%llu", number);
    bool same = (size_t)length == n && memcmp(again, first, n) == 0;
    whole = whole && (minus ? n == 1 && *first == '0' : same);
    free(copy);
    say(s, whole ? again : "~", whole ? (size_t)length : 1);
    if (!whole) {
        s->numbers[s->number_count++] = value;
    }
    return isfinite(value);
}

static bool second_value(second *s, const char *key);

static bool second_key(second *s, uint32_t base, char **out)
{
    char *text = malloc((size_t)(s->end - s->at) + 4);
    CHECK(text != NULL && s->key_count < KEYS);
    s->keys[s->key_count++].text = text;
    *out = text;
    if (!second_string(s, text)) {
        return false;
    }
    for (uint32_t i = base; i + 1 < s->key_count; i++) {
        if (strcmp(s->keys[i].text, text) == 0) {
            return false;
        }
    }
    blank(s);
    return next_is(s, ':');
}

static bool second_container(second *s, bool object)
{
    uint32_t base = s->key_count;
    if (++s->depth > GS_DEPTH) {
        return false;
    }
    say(s, object ? "{" : "[", 1);
    blank(s);
    for (bool first = true; !next_is(s, object ? '}' : ']'); first = false) {
        char *key = NULL;
        if (!first && !next_is(s, ',')) {
            return false;
        }
        say(s, ",", first ? 0 : 1);
        blank(s);
        if ((object && !second_key(s, base, &key)) || !second_value(s, key)) {
            return false;
        }
        blank(s);
    }
    say(s, object ? "}" : "]", 1);
    while (s->key_count > base) {
        free(s->keys[--s->key_count].text);
    }
    s->depth--;
    return true;
}

static bool second_value(second *s, const char *key)
{
    static const char *const words[] = {"null", "false", "true"};
    blank(s);
    if (++s->values > GS_VALUES) {
        return false;
    }
    if (key) {
        say(s, "<", 1);
        say(s, key, strlen(key));
        say(s, ">:", 2);
    }
    if (next_is(s, '{')) {
        return second_container(s, true);
    }
    if (next_is(s, '[')) {
        return second_container(s, false);
    }
    for (size_t i = 0; i < 3; i++) {
        size_t n = strlen(words[i]);
        if ((size_t)(s->end - s->at) >= n && memcmp(s->at, words[i], n) == 0) {
            s->at += n;
            say(s, words[i], n);
            return true;
        }
    }
    if (s->at < s->end && *s->at == '"') {
        char *text = malloc((size_t)(s->end - s->at) + 4);
        CHECK(text != NULL);
        bool good = second_string(s, text);
        say(s, "<", 1);
        say(s, text, good ? strlen(text) : 0);
        say(s, ">", 1);
        free(text);
        return good;
    }
    return second_number(s);
}

/* Distance in units of the last place. */
static uint64_t places(double a, double b)
{
    uint64_t x, y;
    memcpy(&x, &a, sizeof x);
    memcpy(&y, &b, sizeof y);
    return x > y ? x - y : y - x;
}

/* Both readers on a text; they must agree. True: it is JSON as we take it. */
static bool agree(const void *bytes, size_t size)
{
    static char out[TEXT_MOST];
    static second s;
    s = (second){.at = bytes, .end = (const uint8_t *)bytes + size, .out = out};
    bool wanted = second_value(&s, NULL);
    blank(&s);
    wanted = wanted && s.at == s.end;
    while (s.key_count > 0) {
        free(s.keys[--s.key_count].text);
    }
    bool found = read_copy(bytes, size);
    bool same = found == wanted && (!found || number_count == s.number_count) &&
                (!found || (dumped_size == s.size && memcmp(dumped, out, s.size) == 0));
    for (uint32_t i = 0; same && found && i < number_count; i++) {
        same = places(numbers[i], s.numbers[i]) <= 2;
    }
    if (!same) {
        fprintf(stderr, "one reader %s, the other %s (%s): %.*s\n%s\n%.*s\n",
                wanted ? "takes it" : "refuses", found ? "takes it" : "refuses", json.wrong,
                (int)size, (const char *)bytes, dumped, (int)s.size, out);
        exit(1);
    }
    return found;
}

/* ---- tables ---- */

static const struct {
    const char *text, *seen;
} good[] = {
    {"{}", "{}"},
    {" \t\r\n[ ] \n", "[]"},
    {"null", "null"},
    {"true", "true"},
    {"\"\"", "<>"},
    {"[[[[[[]]]]]]", "[[[[[[]]]]]]"},
    {"{\"a\":{\"a\":[{\"a\":{\"a\":{}}}]}}", "{<a>:{<a>:[{<a>:{<a>:{}}}]}}"},
    {"[null,true,false,\"x\",1,{},[]]", "[null,true,false,<x>,1,{},[]]"},
    {"{\"op\" : \"ping\" ,\"n\": 7 }", "{<op>:<ping>,<n>:7}"},
    {"{\"a\":1,\"A\":2,\"\":3,\"a \":4}", "{<a>:1,<A>:2,<>:3,<a >:4}"},
    {"[{\"a\":1},{\"a\":2}]", "[{<a>:1},{<a>:2}]"},
    {"{\"a\":{\"a\":1},\"b\":{\"a\":2}}", "{<a>:{<a>:1},<b>:{<a>:2}}"},
    {"\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"", "<\"\\/\b\f\n\r\t>"},
    {"\"\\u0041\\u00e9\\u20AC\\uFFFF\"", "<A\xc3\xa9\xe2\x82\xac\xef\xbf\xbf>"},
    {"\"\\uD800\\uDC00\\uDBFF\\uDFFF\"", "<\xf0\x90\x80\x80\xf4\x8f\xbf\xbf>"},
    {"\"\\uD7FF\\uE000\"", "<\xed\x9f\xbf\xee\x80\x80>"},
    {"\"\\u0001\\u001f\x7f\"", "<\x01\x1f\x7f>"},
    {"{\"k\\u0065y\":1}", "{<key>:1}"},
    {"0", "0"},
    {"-0", "0"},
    {"18446744073709551615", "18446744073709551615"},
    {"9007199254740993", "9007199254740993"},
};

static const struct {
    const char *text;
    double number;
} reals[] = {
    {"-0.0", -0.0},
    {"-1", -1.0},
    {"18446744073709551616", 18446744073709551616.0},
    {"184467440737095516190", 184467440737095516190.0},
    {"99999999999999999999999999", 1e+26},
    {"1.0", 1.0},
    {"1e2", 100.0},
    {"1E+2", 100.0},
    {"1e-2", 0.01},
    {"0.1", 0.1},
    {"-2.5e-3", -0.0025},
    {"1e308", 1e+308},
    {"1.7976931348623e308", 1.7976931348623e+308},
    {"1e-308", 1e-308},
    {"1e-400", 0.0},
    {"-1e-400", -0.0},
    {"0e999999999999999999999", 0.0},
    {"1e-999999999999999999999", 0.0},
    {"1e0000000000000000000000000002", 100.0},
};

static const struct {
    const char *text, *wrong;
} bad[] = {
    {"", "no value where one is needed"},
    {"  ", "no value where one is needed"},
    {"[", "no value where one is needed"},
    {"[1,]", "no value where one is needed"},
    {"[,1]", "no value where one is needed"},
    {"{\"a\":}", "no value where one is needed"},
    {"nul", "no value where one is needed"},
    {"True", "no value where one is needed"},
    {"NaN", "no value where one is needed"},
    {"Infinity", "no value where one is needed"},
    {"+1", "no value where one is needed"},
    {".5", "no value where one is needed"},
    {"'a'", "no value where one is needed"},
    {"\xef\xbb\xbf{}", "no value where one is needed"},
    {"// x\n1", "no value where one is needed"},
    {"{", "no key where one is needed"},
    {"{\"a\":1,}", "no key where one is needed"},
    {"{a:1}", "no key where one is needed"},
    {"{1:2}", "no key where one is needed"},
    {"{,}", "no key where one is needed"},
    {"{\"a\"}", "no colon behind a key"},
    {"{\"a\" 1}", "no colon behind a key"},
    {"{\"a\"", "no colon behind a key"},
    {"[1 2]", "no comma between two values"},
    {"[1", "no comma between two values"},
    {"[1}", "no comma between two values"},
    {"{\"a\":1]", "no comma between two values"},
    {"{\"a\":1 \"b\":2}", "no comma between two values"},
    {"[truefalse]", "no comma between two values"},
    {"[0x10]", "no comma between two values"},
    {"[1_000]", "no comma between two values"},
    {"1 2", "text behind the end"},
    {"{}{}", "text behind the end"},
    {"{}]", "text behind the end"},
    {"nullx", "text behind the end"},
    {"01", "a malformed number"},
    {"-01", "a malformed number"},
    {"00", "a malformed number"},
    {"-", "a malformed number"},
    {"--1", "a malformed number"},
    {"1.", "a malformed number"},
    {"1.e5", "a malformed number"},
    {"1e", "a malformed number"},
    {"1e+", "a malformed number"},
    {"[1e-]", "a malformed number"},
    {"1e400", "a number out of range"},
    {"-1e400", "a number out of range"},
    {"1e309", "a number out of range"},
    {"1e999999999999999999999", "a number out of range"},
    {"\"a", "a string without end"},
    {"\"a\\\"", "a string without end"},
    {"{\"a", "a string without end"},
    {"\"\t\"", "a control character in a string"},
    {"\"\n\"", "a control character in a string"},
    {"\"\\x\"", "an unknown escape"},
    {"\"\\a\"", "an unknown escape"},
    {"\"\\U0041\"", "an unknown escape"},
    {"\"\\", "an unknown escape"},
    {"\"\\u12", "a bad \\u escape"},
    {"\"\\u12g4\"", "a bad \\u escape"},
    {"\"\\u\"", "a bad \\u escape"},
    {"\"\\u-123\"", "a bad \\u escape"},
    {"\"\\ud800\\u12zz\"", "a bad \\u escape"},
    {"\"\\ud800\\u12\"", "half a surrogate pair"},
    {"\"\\ud800\"", "half a surrogate pair"},
    {"\"\\ud800x\\udc00\"", "half a surrogate pair"},
    {"\"\\ud800\\n1234\"", "half a surrogate pair"},
    {"\"\\ud800\\ud800\"", "half a surrogate pair"},
    {"\"\\ud800\\u0041\"", "half a surrogate pair"},
    {"\"\\ud800\\ue000\"", "half a surrogate pair"},
    {"\"\\udc00\\ud800\"", "half a surrogate pair"},
    {"\"\\udfff\"", "half a surrogate pair"},
    {"\"\\u0000\"", "NUL in a string"},
    {"{\"a\\u0000\":1}", "NUL in a string"},
    {"\"\x80\"", "text that is not UTF-8"},
    {"\"\xc0\x80\"", "text that is not UTF-8"},
    {"\"\xc1\xbf\"", "text that is not UTF-8"},
    {"\"\xe0\x9f\xbf\"", "text that is not UTF-8"},
    {"\"\xed\xa0\x80\"", "text that is not UTF-8"},
    {"\"\xf0\x8f\xbf\xbf\"", "text that is not UTF-8"},
    {"\"\xf4\x90\x80\x80\"", "text that is not UTF-8"},
    {"\"\xf5\x80\x80\x80\"", "text that is not UTF-8"},
    {"\"\xff\"", "text that is not UTF-8"},
    {"\"\xe2\x82\"", "text that is not UTF-8"},
    {"\"\xe2\x82", "text that is not UTF-8"},
    {"{\"a\":1,\"a\":2}", "a repeated key"},
    {"{\"a\":1,\"\\u0061\":2}", "a repeated key"},
    {"{\"\":1,\"b\":{},\"\":2}", "a repeated key"},
    {"[[[[[[[]]]]]]]", "nested too deep"},
    {"{\"a\":{\"a\":{\"a\":{\"a\":{\"a\":{\"a\":{}}}}}}}", "nested too deep"},
};
enum { GOOD = sizeof good / sizeof good[0], REALS = sizeof reals / sizeof reals[0],
       BAD = sizeof bad / sizeof bad[0] };

static void test_tables(void)
{
    for (size_t i = 0; i < GOOD; i++) {
        if (!reads(good[i].text) || strcmp(dumped, good[i].seen) != 0) {
            fprintf(stderr, "%s: %s, %s\n", good[i].text, dumped, json.wrong);
            exit(1);
        }
        CHECK(agree(good[i].text, strlen(good[i].text)));
    }
    for (size_t i = 0; i < REALS; i++) {
        CHECK(agree(reals[i].text, strlen(reals[i].text)) && !strcmp(dumped, "~"));
        CHECK(numbers[0] == reals[i].number && !signbit(numbers[0]) == !signbit(reals[i].number));
    }
    for (size_t i = 0; i < BAD; i++) {
        if (reads(bad[i].text) || strcmp(json.wrong, bad[i].wrong) != 0) {
            fprintf(stderr, "%s: %s\n", bad[i].text, json.wrong);
            exit(1);
        }
        CHECK(!agree(bad[i].text, strlen(bad[i].text)));
    }
    CHECK(!read_copy("\"a\0b\"", 5) && strstr(json.wrong, "control"));
    CHECK(!read_copy("{}\0", 3) && strstr(json.wrong, "behind the end"));
    CHECK(!read_copy("\0", 1) && strstr(json.wrong, "no value"));
}

/* 512 values are read, the container among them, and one more is not. */
static void test_count(void)
{
    static char text[8 * GS_VALUES];
    for (size_t values = GS_VALUES - 1; values <= GS_VALUES + 1; values++) {
        size_t n = 0;
        text[n++] = '[';
        for (size_t i = 1; i < values; i++) {
            n += (size_t)snprintf(text + n, sizeof text - n, i > 1 ? ",%zu" : "%zu", i);
        }
        text[n++] = ']';
        CHECK(agree(text, n) == (values <= GS_VALUES));
        CHECK(values <= GS_VALUES ? json.count == values : !strcmp(json.wrong, "too many values"));
        n = 0;
        for (size_t i = 0; i + 1 < values; i++) {
            n += (size_t)snprintf(text + n, sizeof text - n, "%s\"%zu\":1", i ? "," : "{", i);
        }
        text[n++] = '}';
        CHECK(agree(text, n) == (values <= GS_VALUES));
    }
}

static void test_access(void)
{
    CHECK(reads("{\"a\":null,\"b\":[1,2],\"c\":\"x\",\"d\":{\"e\":true}}"));
    const gs_value *top = json.values;
    CHECK(gs_get(&json, top, "a") == NULL && gs_get(&json, top, "z") == NULL);
    CHECK(gs_get(&json, gs_get(&json, top, "b"), "a") == NULL);
    CHECK(gs_get(&json, NULL, "a") == NULL && gs_first(&json, NULL) == NULL);
    CHECK(gs_get(&json, gs_get(&json, top, "c"), "a") == NULL);
    const gs_value *b = gs_first(&json, gs_get(&json, top, "b"));
    CHECK(b->whole == 1 && gs_next(&json, b)->whole == 2);
    CHECK(gs_next(&json, gs_next(&json, b)) == NULL);
    CHECK(gs_get(&json, gs_get(&json, top, "d"), "e")->kind == GS_TRUE);
    CHECK(reads("[]") && gs_first(&json, json.values) == NULL);
}

/* ---- every character ---- */

/* All code points that may be written out, and as \u escapes, in texts of some thousands each. */
static void test_characters(void)
{
    enum { EACH = 8192 };
    static char plain[4 * EACH + 8], escaped[12 * EACH + 8];
    for (uint32_t from = 1; from < 0x110000; from += EACH) {
        size_t n = 1, m = 1;
        plain[0] = escaped[0] = '"';
        for (uint32_t c = from; c < from + EACH && c < 0x110000; c++) {
            if (c >= 0xD800 && c <= 0xDFFF) {
                continue;
            }
            if (c >= 32 && c != '"' && c != '\\') {
                n += encode(c, (uint8_t *)plain + n);
            }
            uint32_t pair = c - 0x10000;
            m += (size_t)(c < 0x10000
                              ? snprintf(escaped + m, 13, "\\u%04x", c)
                              : snprintf(escaped + m, 13, "\\u%04X\\u%04x", 0xD800 + (pair >> 10),
                                         0xDC00 + (pair & 0x3FF)));
        }
        plain[n++] = escaped[m++] = '"';
        CHECK(agree(plain, n) && dumped_size == n && memcmp(dumped + 1, plain + 1, n - 2) == 0);
        CHECK(agree(escaped, m));
    }
}

/* All pairs of bytes in a string, every lead byte with tails at the ends of their ranges. */
static void test_bytes(void)
{
    static const uint8_t tails[] = {0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0};
    uint32_t taken = 0;
    for (uint32_t i = 0; i < 65536; i++) {
        uint8_t text[] = {'"', (uint8_t)(i >> 8), (uint8_t)i, '"'};
        taken += agree(text, sizeof text);
    }
    for (uint32_t lead = 0xC0; lead < 256; lead++) {
        for (uint32_t i = 0; i < 512; i++) {
            uint8_t text[] = {'"', (uint8_t)lead, tails[i & 7], tails[i >> 3 & 7], tails[i >> 6],
                              '"'};
            taken += agree(text, sizeof text);
            text[4] = '"';
            agree(text, sizeof text - 1);
        }
    }
    CHECK(taken > 94 * 94 + 30 * 64); /* those that must be good */
}

/* ---- numbers ---- */

static uint64_t random_state = 1;

static uint32_t random_below(uint32_t n) /* xorshift64* */
{
    uint64_t *s = &random_state;
    *s ^= *s >> 12, *s ^= *s << 25, *s ^= *s >> 27;
    return (uint32_t)((*s * 2685821657736338717u >> 32) * n >> 32);
}

static double read_number(const char *text)
{
    CHECK(reads(text) && json.values[0].kind == GS_NUMBER);
    return json.values[0].number;
}

/* Numbers as people and as Python write them: exact up to 15 digits and a power of 22, and never
 * more than two of the last place away. */
static void test_numbers(void)
{
    char text[80];
    uint64_t worst = 0;
    for (uint32_t i = 0; i < 200000; i++) {
        uint64_t bits = (uint64_t)random_below(UINT32_MAX) << 32 | random_below(UINT32_MAX);
        double value = (double)random_below(1u << 30) / (double)(1u + random_below(1u << 20));
        if (i % 2) {
            memcpy(&value, &bits, sizeof value);
        }
        if (!isfinite(value)) {
            continue;
        }
        snprintf(text, sizeof text, "%.*g", i % 3 ? 17 : 15, value);
        if (fabs(strtod(text, NULL)) > DBL_MAX * 0.999) {
            continue;
        }
        uint64_t off = places(read_number(text), strtod(text, NULL));
        worst = off > worst ? off : worst;
    }
    CHECK(worst <= 2);
    for (uint32_t i = 0; i < 100000; i++) {
        uint64_t digits = (uint64_t)random_below(1000000) * 1000000000u + random_below(1000000000);
        snprintf(text, sizeof text, "%llue%d", (unsigned long long)digits,
                 (int)random_below(45) - 22);
        CHECK(read_number(text) == strtod(text, NULL));
    }
    for (uint32_t i = 0; i <= 1000; i++) { /* every duty */
        snprintf(text, sizeof text, "%u.%03u", i / 1000, i % 1000);
        CHECK(read_number(text) == (double)i / 1000);
    }
    CHECK(signbit(read_number("-0")) && json.values[0].is_whole && json.values[0].whole == 0);
}

/* ---- random texts ---- */

static const char *const pieces[] = {
    "{",     "}",      "[",       "]",      ",",        ":",      "\"",      "\\",     "\\u",
    "\\u00", "\\ud83d", "\\ude00", "\"a\"",  "\"op\":",  "null",   "true",    "false",  "-",
    "0",     "1",      "9",       ".",      "e",        "E+",     "e-",      "1e308",  "1e-320",
    "00",    " ",      "\n",      "\x7f",   "\xc3\xa9", "\xe2\x82", "\xf0\x9f\x98\x80", "\x80",
    "\xff",
    "18446744073709551615", "184467440737095516150", "{\"a\":1,\"a\":2}", "[[[[[[", "]]]]]]"};

static const char *const frames[] = {
    "{\"op\":\"generate\",\"id\":7,\"prompt\":\"Hello\",\"max_tokens\":32,\"temperature\":0.3,"
    "\"stop\":[\"a\",\"b\"],\"seed\":18446744073709551615}",
    "{\"op\":\"generate\",\"id\":8,\"messages\":[{\"role\":\"user\",\"text\":\"Wie hei\xc3\x9ft "
    "du? \\ud83d\\ude00\"},{\"role\":\"assistant\",\"text\":\"\"}],\"top_p\":1e-1}",
    "{\"op\":\"pace\",\"id\":9,\"duty\":0.25,\"threads\":2,\"prefill_duty\":1.0}",
    "{\"op\":\"replace\",\"id\":10,\"path\":\"/var/lib/x.gembin\",\"warmup_prompt\":null}",
    "[1,-2.5,3e4,[[[[[0]]]]],{\"a\":{\"b\":[]}}]"};

enum { FRAMES = sizeof frames / sizeof frames[0] };

static size_t mutate(uint8_t *text, size_t size, size_t room)
{
    uint32_t at = random_below((uint32_t)size + 1), kind = random_below(6);
    if (kind == 0 && at < size) { /* a bit */
        text[at] ^= (uint8_t)(1u << random_below(8));
    } else if (kind == 1 && at < size) { /* cut some */
        size_t n = 1 + random_below((uint32_t)(size - at) < 8 ? (uint32_t)(size - at) : 8);
        memmove(text + at, text + at + n, size - at - n);
        size -= n;
    } else if (kind == 2) { /* the end */
        size = random_below(8) == 0 ? at : size;
    } else if (kind == 3 && size > 0) { /* a part twice */
        size_t n = 1 + random_below((uint32_t)(size - at) / 2 + 1);
        n = n > size - at ? size - at : n;
        if (size + n <= room) {
            memmove(text + at + n, text + at, size - at);
            size += n;
        }
    } else { /* a piece */
        const char *piece = pieces[random_below(sizeof pieces / sizeof pieces[0])];
        size_t n = strlen(piece);
        if (size + n <= room) {
            memmove(text + at + n, text + at, size - at);
            memcpy(text + at, piece, n);
            size += n;
        }
    }
    return size;
}

/* A number near the end of the range may be finite for one and infinite for the other. */
static bool near_the_end(const uint8_t *text, size_t size)
{
    for (size_t i = 0; i + 3 < size; i++) {
        if (memcmp(text + i, "e308", 4) == 0 || memcmp(text + i, "e30", 3) == 0) {
            return true;
        }
    }
    return false;
}

static void test_random(void)
{
    static uint8_t text[2048], before[2048];
    uint32_t taken = 0, skipped = 0;
    size_t before_size = 0;
    for (uint32_t i = 0; i < FUZZ; i++) {
        size_t size;
        if (before_size > 0 && random_below(4) > 0) { /* go on from one that was good */
            size = before_size;
            memcpy(text, before, size);
        } else {
            uint32_t which = random_below(GOOD + REALS + FRAMES);
            const char *from = which < GOOD           ? good[which].text
                               : which < GOOD + REALS ? reals[which - GOOD].text
                                                      : frames[which - GOOD - REALS];
            size = strlen(from);
            memcpy(text, from, size);
        }
        for (uint32_t n = 1 + random_below(3); n > 0; n--) {
            size = mutate(text, size, 600);
        }
        if (near_the_end(text, size)) {
            read_copy(text, size);
            skipped++;
        } else if (agree(text, size)) {
            taken++;
            before_size = size;
            memcpy(before, text, size);
        }
    }
    CHECK(taken > FUZZ / 20 && taken < FUZZ - FUZZ / 20 && skipped < FUZZ / 10);
}

/* ---- the writer ---- */

static gs_out out;

/* The frame, read back. */
static bool reads_back(void)
{
    size_t size = (size_t)out.bytes[0] | (size_t)out.bytes[1] << 8 | (size_t)out.bytes[2] << 16 |
                  (size_t)out.bytes[3] << 24;
    CHECK(size == out.size - 4);
    return agree(out.bytes + 4, size);
}

static void test_writer(void)
{
    gs_begin(&out, "e");
    gs_text(&out, "a\"b", "\"\\/\n\x01\x7f\xc3\xa9", 8);
    gs_whole(&out, "most", UINT64_MAX);
    gs_whole(&out, "zero", 0);
    gs_signed(&out, "least", INT64_MIN);
    gs_signed(&out, "minus", -1);
    gs_signed(&out, "plus", INT64_MAX);
    gs_bool(&out, "yes", true);
    gs_bool(&out, "no", false);
    gs_end(&out);
    CHECK(!out.full && reads_back());
    CHECK(!strcmp(dumped, "{<event>:<e>,<a\"b>:<\"\\/\n\x01\x7f\xc3\xa9>,"
                          "<most>:18446744073709551615,<zero>:0,<least>:~,"
                          "<minus>:~,<plus>:9223372036854775807,<yes>:true,<no>:false}"));
}

static void test_reals(void)
{
    static const struct {
        double value;
        const char *text;
    } written[] = {{0, "0.000"},       {1.5, "1.500"},         {-2.25, "-2.250"},
                 {0.0004, "0.000"},  {0.0005, "0.001"},      {-0.0001, "-0.000"},
                 {0.9996, "1.000"},  {123456.789, "123456.789"}, {1e15, "1000000000000000.000"},
                 {9e15, "null"},     {-1e300, "null"},       {INFINITY, "null"},
                 {-INFINITY, "null"}, {NAN, "null"},         {DBL_MIN, "0.000"}};
    for (size_t i = 0; i < sizeof written / sizeof written[0]; i++) {
        char wanted[80];
        gs_begin(&out, "");
        gs_real(&out, "x", written[i].value);
        gs_end(&out);
        CHECK(reads_back());
        int n = snprintf(wanted, sizeof wanted, "{\"event\":\"\",\"x\":%s}", written[i].text);
        CHECK(out.size == (size_t)n + 4 && memcmp(out.bytes + 4, wanted, (size_t)n) == 0);
    }
}

/* What is not UTF-8 becomes U+FFFD, byte by byte; the rest stays. */
static void test_writer_of_any_bytes(void)
{
    gs_begin(&out, "x");
    gs_text(&out, "path", "/a\xff/\xe2\x82/\xc3\xa9\xe2", 10);
    gs_end(&out);
    CHECK(reads_back());
    CHECK(!strcmp(dumped, "{<event>:<x>,<path>:</a\xef\xbf\xbd/\xef\xbf\xbd\xef\xbf\xbd/\xc3\xa9"
                          "\xef\xbf\xbd>}"));
    for (uint32_t i = 0; i < 20000; i++) {
        char bytes[16];
        for (size_t k = 0; k < sizeof bytes; k++) {
            bytes[k] = (char)random_below(256);
        }
        gs_begin(&out, "x");
        gs_text(&out, "any", bytes, sizeof bytes);
        gs_end(&out);
        bool nul = memchr(bytes, 0, sizeof bytes) != NULL; /* is written, and refused by us */
        CHECK(reads_back() == !nul);
    }
}

/* A frame that is full stays JSON: a member is there as a whole or not at all. */
static void test_full(void)
{
    static char text[1 << 17];
    memset(text, 'x', sizeof text);
    for (size_t size = (1 << 16) - 64; size < (1 << 16) + 8; size++) {
        for (int quotes = 0; quotes < 2; quotes++) {
            memset(text, quotes ? '"' : 'x', sizeof text);
            gs_begin(&out, "t");
            gs_text(&out, "a", text, quotes ? size / 2 : size);
            bool lost = out.full;
            gs_whole(&out, "n", 12345);
            gs_real(&out, "r", 1);
            gs_bool(&out, "b", true);
            gs_end(&out);
            CHECK(out.size <= sizeof out.bytes && reads_back());
            CHECK((gs_get(&json, json.values, "a") == NULL) == lost);
            CHECK(!lost || json.count == 2);
            CHECK(out.full == (gs_get(&json, json.values, "b") == NULL));
        }
    }
    gs_begin(&out, "t");
    gs_text(&out, "a", text, sizeof text);
    gs_end(&out);
    CHECK(out.full && reads_back() && !strcmp(dumped, "{<event>:<t>}"));
    gs_begin(&out, "t"); /* the next frame is not full */
    CHECK(!out.full);
}

int main(void)
{
    test_tables();
    test_count();
    test_access();
    test_characters();
    test_bytes();
    test_numbers();
    test_random();
    test_writer();
    test_reals();
    test_writer_of_any_bytes();
    test_full();
    printf("test_json: ok\n");
    return 0;
}
