/* gs_json.h: JSON for the control channel: a strict reader without allocation, a small writer.
 *
 * The reader decodes strings where they lie and keeps every value in a table of fixed size. It
 * refuses what RFC 8259 refuses, and more: repeated keys, NUL in a string, text that is not UTF-8,
 * deep nesting, more values than the table holds. Numbers need no locale. */
#ifndef GS_JSON_H
#define GS_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { GS_VALUES = 512, GS_DEPTH = 6, GS_FRAME = 1 << 18 }; /* most values, depth, frame bytes */

typedef enum gs_kind {
    GS_NULL, GS_FALSE, GS_TRUE, GS_NUMBER, GS_STRING, GS_ARRAY, GS_OBJECT
} gs_kind;

typedef struct gs_value {
    gs_kind kind;
    const char *key;  /* of an object's member, NUL-terminated; NULL elsewhere */
    const char *text; /* of a string, UTF-8, NUL-terminated */
    size_t size;      /* its bytes */
    double number;
    uint64_t whole;   /* the number, where is_whole: from 0 to 2^64 - 1, without fraction */
    bool is_whole;
    uint32_t first, next; /* index of its first child, of its next sibling; 0: none */
} gs_value;

typedef struct gs_json { /* values[0] is the outermost */
    gs_value values[GS_VALUES];
    uint32_t count;
    const char *wrong; /* after a failure: what was wrong, a few words */
} gs_json;

/* Read `size` bytes, which are changed; text[size] must be writable. False: see wrong. */
bool gs_parse(gs_json *j, char *text, size_t size);
/* Member of an object, or NULL: absent, null, or `of` is no object. */
const gs_value *gs_get(const gs_json *j, const gs_value *of, const char *key);
const gs_value *gs_first(const gs_json *j, const gs_value *of); /* child, or NULL */
const gs_value *gs_next(const gs_json *j, const gs_value *v);   /* sibling, or NULL */

/* A frame in the making: four bytes of length, little-endian, then one object. What does not fit
 * is left out as a whole and sets `full`. */
typedef struct gs_out {
    uint8_t bytes[4 + (1 << 16)];
    size_t size;
    bool full;
} gs_out;

void gs_begin(gs_out *o, const char *event);
void gs_text(gs_out *o, const char *key, const char *text, size_t size);
void gs_whole(gs_out *o, const char *key, uint64_t value);
void gs_signed(gs_out *o, const char *key, int64_t value);
void gs_real(gs_out *o, const char *key, double value); /* three decimals; null if not finite */
void gs_bool(gs_out *o, const char *key, bool value);
void gs_end(gs_out *o); /* closes the object and writes the length */

#endif
