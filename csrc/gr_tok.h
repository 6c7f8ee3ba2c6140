/* Text <-> token ids, and conversations -> token ids. Internal header of gr_tok*.c and gr_chat.c.
 *
 * A section is checked once by gr_tok_open / gr_chat_open and then read where it lies; it must stay
 * mapped and unchanged for as long as the gr_tok / gr_chat is used. Nothing here allocates: the
 * caller passes scratch memory, aligned to 8 bytes. */
#ifndef GR_TOK_H
#define GR_TOK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gb_tokens.h"

/* Reasons of gr_tok_open and gr_chat_open. Values are stable. */
enum {
    GR_TOK_OK = 0,
    GR_TOK_E_SIZE = 1,    /* the section is not exactly as long as its counts say, or not aligned */
    GR_TOK_E_HEADER = 2,  /* unknown kind or flag, a count over its limit, reserved not zero */
    GR_TOK_E_PADDING = 3, /* a gap between tables is not zero */
    GR_TOK_E_ID = 4,      /* a token id is not below the vocabulary, or marked as no token */
    GR_TOK_E_MERGE = 5,   /* merge lists out of order or out of range */
    GR_TOK_E_PIECE = 6,   /* piece positions or token flags are wrong */
    GR_TOK_E_ORDER = 7,   /* a sorted table is out of order */
    GR_TOK_E_TRIE = 8,    /* the trie of added tokens is malformed */
    GR_TOK_E_SPLIT = 9,   /* split stages, classes or transitions are malformed */
    GR_TOK_E_NFC = 10,    /* normal form tables are malformed */
    GR_TOK_E_VOCAB = 11,  /* the vocabulary differs from the embedding's rows */
    GR_TOK_E_TMPL = 12    /* template slots, items or text are malformed */
};

/* Results of the encoders below zero. */
enum {
    GR_TOK_E_SCRATCH = -1, /* scratch too small */
    GR_TOK_E_ROLES = -3,   /* not [system] user (assistant user)*, or an order the template lacks */
    GR_TOK_E_SYSTEM = -4   /* the template has no place for a system text */
};

typedef struct {
    const struct gb_tokn *h;
    const uint64_t *merges;
    const uint32_t *merge_first; /* [vocab + 1] */
    const uint32_t *piece_block; /* [ceil(vocab / GB_TOK_BLOCK)] position of every 32nd piece */
    const uint8_t *piece_len;    /* [vocab] */
    const uint8_t *flags;        /* [vocab] */
    const uint8_t *pieces;
    const uint32_t *byte_id; /* [256] or NONE */
    const uint64_t *chars;
    const uint32_t *whole; /* ascending by their bytes */
    const struct gb_node *nodes;
    const uint8_t *edges;
    const uint32_t *stop;
    const uint64_t *ranges;
    const struct gb_stage *stages;
    const uint16_t *cells;
    const uint64_t *decomp;
    const uint32_t *decomp_cp;
    const uint64_t *comp;
    const uint64_t *ccc;
} gr_tok;

/* Checks a TOKN section completely. 0 or a reason above; *out is valid only after 0. */
int gr_tok_open(const uint8_t *sec, size_t size, uint32_t vocab_rows, gr_tok *out);
/* Its part behind the layout and the pieces: the rules inside every other table. */
int gr_tok_check(const gr_tok *t);

/* Scratch bytes for gr_tok_encode of a text of n bytes. */
#define gr_tok_scratch_size(n) ((size_t)(n) * 32u + 256u)

/* Ids of a text, without bos. Invalid UTF-8 reads as U+FFFD. Control tokens written out in the text
 * become ids only if allow_control; content must never be given that way. Returns the count, also
 * where it is more than `cap`: then the first cap are there; or GR_TOK_E_SCRATCH. */
int64_t gr_tok_encode(const gr_tok *t, const uint8_t *text, size_t len, bool allow_control,
                      uint32_t *out_ids, size_t cap, void *scratch, size_t scratch_size);

/* Bytes of one token into out (256 bytes or more); control tokens are empty. Returns the length. */
size_t gr_tok_piece(const gr_tok *t, uint32_t id, uint8_t *out);
/* The same with control tokens written out. */
size_t gr_tok_piece_all(const gr_tok *t, uint32_t id, uint8_t *out);
/* GB_TOKEN_* flags of an id; GB_TOKEN_UNUSED for an id outside the vocabulary. */
uint8_t gr_tok_flags(const gr_tok *t, uint32_t id);
bool gr_tok_is_stop(const gr_tok *t, uint32_t id);

/* One character from p[0..n), n > 0. Returns the bytes used. A wrong sequence gives U+FFFD for its
 * longest valid beginning. *cut tells that all n bytes are the valid beginning of a character. */
size_t gr_utf8_next(const uint8_t *p, size_t n, uint32_t *cp, bool *cut);
size_t gr_utf8_put(uint32_t cp, uint8_t *out); /* 1 to 4 bytes */

/* Joins the bytes of tokens into whole characters. Zero-initialise. */
typedef struct {
    uint8_t held[4];
    uint8_t n;
} gr_utf8_stream;
/* Takes n bytes, writes the characters that are complete, at most 3 n + 3 bytes. */
size_t gr_utf8_push(gr_utf8_stream *s, const uint8_t *in, size_t n, uint8_t *out);
/* Ends the text: a half character becomes U+FFFD (3 bytes at most). */
size_t gr_utf8_flush(gr_utf8_stream *s, uint8_t *out);

/* ---- conversations (gr_chat.c) ---- */

enum { GR_ROLE_SYSTEM = 0, GR_ROLE_USER = 1, GR_ROLE_ASSISTANT = 2 };

typedef struct {
    int role;
    const char *text; /* UTF-8, need not end with a zero byte */
    size_t len;       /* bytes */
} gr_message;

typedef struct {
    const struct gb_tmpl *h;
    const struct gb_item *items;
    const uint8_t *text;
} gr_chat;

/* Checks a TMPL section completely. 0 or a reason above. */
int gr_chat_open(const uint8_t *sec, size_t size, uint32_t vocab_rows, gr_chat *out);

/* Ids of a conversation, bos included where the template has one. Returns the count, as above, or
 * one of the negative results. */
int64_t gr_chat_encode(const gr_chat *c, const gr_tok *t, const gr_message *messages, size_t n,
                       bool add_generation_prompt, uint32_t *out_ids, size_t cap, void *scratch,
                       size_t scratch_size);

/* What the two files share: table layout. Takes count x size bytes at the cursor, on 8 bytes. */
typedef struct {
    const uint8_t *base;
    uint64_t at, size;
    int error;
} gr_cursor;
const void *gr_take(gr_cursor *c, uint64_t count, uint64_t size);

#endif
