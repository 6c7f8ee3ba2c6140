/* On-disk structs of the sections TOKN and TMPL; the text that explains them is TOKENS.md.
 * Little-endian, no pointers, no padding inside a struct. A section starts with its header; the
 * tables follow in the order of their counts, each on 8 bytes, gaps zero. Their positions follow
 * from the counts, so there is no stored offset that could be wrong. */
#ifndef GB_TOKENS_H
#define GB_TOKENS_H

#include <stddef.h>
#include <stdint.h>

#define GB_TOK_NONE 0xFFFFFFFFu   /* "no such token" */
#define GB_TOK_MAX_VOCAB 0x100000u /* ids take 20 bits in a merge entry */
#define GB_TOK_MAX_PIECE 255u     /* bytes of one token */
#define GB_TOK_MAX_STOP 64u
#define GB_TOK_MAX_STAGE 4u       /* chained split patterns */
#define GB_TOK_MAX_CLASS 255u     /* code point classes */
#define GB_TOK_MAX_STATE 0x7FFFu  /* states of one split automaton */
#define GB_TOK_BLOCK 32u          /* tokens per stored piece position */

enum gb_tok_kind {
    GB_TOK_SPM = 1,  /* characters are the first symbols, unknown ones fall back to bytes */
    GB_TOK_BYTE = 2  /* bytes are the first symbols, text is split by the stages before */
};

enum gb_tok_flag {
    GB_TOKF_ADD_BOS = 1,  /* a raw prompt starts with bos */
    GB_TOKF_NFC = 2,      /* text is put into normal form C */
    GB_TOKF_FUSE_UNK = 4, /* neighbouring unknown symbols become one */
    GB_TOKF_SPACE = 8,    /* ' ' is written U+2581 in the vocabulary */
    GB_TOKF_ALL = 15
};

enum gb_token_flag {
    GB_TOKEN_CONTROL = 1, /* never made from content, decodes to nothing */
    GB_TOKEN_BYTE = 2,    /* byte fallback: one byte, maybe a part of a character */
    GB_TOKEN_UNUSED = 4,  /* a row without a token: must not be sampled */
    GB_TOKEN_ADDED = 8,   /* matched as a whole before anything else */
    GB_TOKEN_ALL = 15
};

struct gb_tokn {
    uint32_t kind;
    uint32_t flags;
    uint32_t vocab;       /* rows of the embedding; every id is smaller */
    uint32_t bos;         /* or NONE */
    uint32_t unk;         /* or NONE: unknown symbols are dropped */
    uint32_t piece_bytes; /* all pieces together */
    uint32_t n_merge;
    uint32_t n_char;
    uint32_t n_whole;
    uint32_t n_node;
    uint32_t n_stop;
    uint32_t n_stage;
    uint32_t n_class;
    uint32_t n_range;
    uint32_t n_cell;
    uint32_t n_decomp;
    uint32_t n_decomp_cp;
    uint32_t n_comp;
    uint32_t n_ccc;
    uint32_t reserved[5];
};

/* Sorted tables hold one u64 per entry, the key in the high bits, ascending by key:
 *   merges  right id << 44 | new id << 24 | rank        ascending within one left id
 *   chars   code point << 32 | id                       tokens of one character
 *   ranges  first code point << 32 | class              up to the next entry's first
 *   ccc     first code point << 32 | combining class    likewise
 *   decomp  code point << 32 | first index in decomp_cp, up to the next entry's first
 *   comp    first << 42 | second << 21 | composed       code points */
#define GB_MERGE_RIGHT 44
#define GB_MERGE_NEW(e) ((uint32_t)((e) >> 24) & 0xFFFFFu)
#define GB_MERGE_RANK(e) ((uint32_t)(e) & 0xFFFFFFu)
#define GB_KEY 32       /* key of chars, ranges, ccc and decomp */
#define GB_COMP_PAIR 21 /* key of comp: both code points */
#define GB_COMP_TO(e) ((uint32_t)(e) & 0x1FFFFFu)

struct gb_node {  /* trie of added tokens in breadth-first order: edge k leads to node k + 1 */
    uint32_t first; /* first edge; the edges end where those of the next node start */
    uint32_t id;    /* token that ends here, or NONE */
};

struct gb_stage {  /* one split automaton */
    uint32_t states; /* state 0 is dead, 1 is the start */
    uint32_t first;  /* first cell; states x (n_class + 1) cells, last column: end of text */
};

#define GB_CELL_MATCH 0x8000u /* the match may end before this character */
#define GB_CELL_STATE 0x7FFFu /* next state */

/* ---- TMPL ---- */

#define GB_TMPL_MAX_TEXT 65536u /* bytes of all literals */
#define GB_TMPL_MAX_ITEM 4096u

enum gb_tmpl_slot {
    GB_SLOT_FIRST = 0,     /* before the first user text, no system text given */
    GB_SLOT_SYSTEM = 1,    /* before the system text */
    GB_SLOT_SYS_USER = 2,  /* between system and first user text */
    GB_SLOT_USER_ASST = 3, /* between user and assistant text */
    GB_SLOT_ASST_USER = 4, /* between assistant and user text */
    GB_SLOT_GENERATE = 5,  /* after the last user text, the assistant is to answer */
    GB_SLOT_USER_END = 6,  /* after the last user text, no answer wanted */
    GB_SLOT_ASST_END = 7,  /* after the last assistant text */
    GB_SLOT_THINK_CUT = 8, /* text: an assistant's text up to its last occurrence is left out */
    GB_SLOT_COUNT = 9
};

enum gb_tmpl_flag {
    GB_TMPLF_SYSTEM = 1,         /* a system text is possible */
    GB_TMPLF_ASST_LAST = 2,      /* a conversation may end with an assistant's text */
    GB_TMPLF_TRIM_SYSTEM = 4,    /* blanks around the text are dropped */
    GB_TMPLF_TRIM_USER = 8,
    GB_TMPLF_TRIM_ASST = 16,
    GB_TMPLF_ALL = 31
};

struct gb_tmpl {
    uint32_t flags;
    uint32_t n_item;
    uint32_t text_bytes;
    uint32_t slot[GB_SLOT_COUNT + 1]; /* items of slot s: slot[s] .. slot[s + 1] - 1 */
    uint32_t reserved[3];
};

struct gb_item {  /* a control token, or literal text that is encoded with its neighbours */
    uint32_t token; /* or NONE: text */
    uint32_t size;  /* bytes of text, which follow those of the items before; 0 for a token */
};

#define GB_TOK_SIZE(type, bytes) \
    _Static_assert(sizeof(struct type) == (bytes), "size of struct " #type)
GB_TOK_SIZE(gb_tokn, 96);
GB_TOK_SIZE(gb_node, 8);
GB_TOK_SIZE(gb_stage, 8);
GB_TOK_SIZE(gb_tmpl, 64);
GB_TOK_SIZE(gb_item, 8);
_Static_assert(offsetof(struct gb_tokn, n_merge) == 24, "gb_tokn.n_merge");
_Static_assert(offsetof(struct gb_tokn, n_ccc) == 72, "gb_tokn.n_ccc");
_Static_assert(offsetof(struct gb_tmpl, slot) == 12, "gb_tmpl.slot");

#endif
