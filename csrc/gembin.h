/* gembin.h: the on-disk structs, enums and limits of the .gembin format, version 1.0.
 *
 * The text of the format is FORMAT.md; this file is the single source of struct layout and a test
 * compares gemrun/format/spec.py with it. No functions here. All integers are little-endian, all
 * offsets count from the start of the file unless stated, all reserved bytes are zero and checked.
 * Records may only grow at their end; values are never renumbered or reused. */
#ifndef GEMBIN_H
#define GEMBIN_H

#include <stddef.h>
#include <stdint.h>

#include "gb_tokens.h" /* the structs of TOKN and TMPL */

#define GB_MAGIC "\x8bGEM\r\n\x1a\n" /* high bit, name, CR LF, ^Z, LF: text-mode damage shows */
#define GB_BYTE_ORDER 0x01020304u
#define GB_MAJOR 1u
#define GB_MINOR 0u
#define GB_ENGINE_ABI 3u /* raised when an engine must refuse older artifacts' successors */

/* ---- limits, checked before anything else is believed (rule B) ---- */
enum {
    GB_ALIGN = 256,          /* every section and every tensor */
    GB_WEIGHT_ALIGN = 65536, /* WHOT: the largest Arm page */
    GB_LINE = 64,            /* supers, superblocks, arena buffers, KV blocks */
    GB_PANEL = 16,           /* rows of a panel */
    GB_GROUP = 32,           /* inputs of a quantisation group */
    GB_SUPERBLOCK = 8,       /* groups of a full superblock */
    GB_UNIT = 32,            /* output rows of a unit of work */
    GB_KV_BLOCK = 32,        /* tokens of a KV ring block */
    GB_HIDDEN_ROWS = 8,      /* of GB_BUF_HIDDEN: an output, and the tokens of a speculative step */
    GB_MAX_SECTIONS = 64,
    GB_MAX_LAYERS = 256,
    GB_MAX_TENSORS = 65536,
    GB_MAX_SEGMENTS = 65536,
    GB_MAX_PLAN = 64,
    GB_MAX_ROPES = 4,
    GB_MAX_VOCAB = 1 << 20,
    GB_MAX_CONTEXT = 1 << 20,
    GB_MAX_CHUNK = 4096,
    GB_MAX_HIDDEN = 65536,
    GB_MAX_FFN = 1 << 20,
    GB_MAX_HEADS = 1024,
    GB_MAX_HEAD_DIM = 512,
    GB_MAX_THREADS = 8,
    GB_MAX_TESTS = 64,
    GB_TEST_PROMPT = 400, /* ids a test vector can hold */
    GB_TEST_STEPS = 64,
    GB_MAX_MANIFEST = 16 << 20
};

/* ---- section types (fourcc, first letter in the lowest byte) ---- */
#define GB_FOURCC(a, b, c, d) \
    ((uint32_t)(a) | (uint32_t)(b) << 8 | (uint32_t)(c) << 16 | (uint32_t)(d) << 24)
#define GB_SEC_CONF GB_FOURCC('C', 'O', 'N', 'F') /* one gb_conf */
#define GB_SEC_LAYR GB_FOURCC('L', 'A', 'Y', 'R') /* gb_layer[] in execution order */
#define GB_SEC_SEGM GB_FOURCC('S', 'E', 'G', 'M') /* gb_segment[] */
#define GB_SEC_TENS GB_FOURCC('T', 'E', 'N', 'S') /* gb_tensor[] by data offset; vectors too */
#define GB_SEC_PLAN GB_FOURCC('P', 'L', 'A', 'N') /* gb_plan[] by kind */
#define GB_SEC_ROPE GB_FOURCC('R', 'O', 'P', 'E') /* gb_rope[], then tables */
#define GB_SEC_TOKN GB_FOURCC('T', 'O', 'K', 'N') /* TOKENS.md */
#define GB_SEC_TMPL GB_FOURCC('T', 'M', 'P', 'L') /* TOKENS.md; optional: no chat mode without */
#define GB_SEC_KVMK GB_FOURCC('K', 'V', 'M', 'K') /* gb_kv_unit[]; with KV_MASK or KV_4BIT */
#define GB_SEC_THRM GB_FOURCC('T', 'H', 'R', 'M') /* one gb_thermal */
#define GB_SEC_TEST GB_FOURCC('T', 'E', 'S', 'T') /* gb_test[] */
#define GB_SEC_PINP GB_FOURCC('P', 'I', 'N', 'P') /* gb_pin, then ids, ring blocks; optional */
#define GB_SEC_COLD GB_FOURCC('C', 'O', 'L', 'D') /* gb_cold[]; optional, not the engine's */
#define GB_SEC_HDFJ GB_FOURCC('H', 'D', 'F', 'J') /* resolved HDF, canonical JSON */
#define GB_SEC_MANI GB_FOURCC('M', 'A', 'N', 'I') /* msgpack, never read by the engine */
#define GB_SEC_WHOT GB_FOURCC('W', 'H', 'O', 'T') /* weights, mapped and used where they lie */
/* reserved for later: GRAM */

enum { GB_SECF_REQUIRED = 1, GB_SECF_HOT = 2, GB_SECF_COLD = 4, GB_SECF_SECRET = 8 };

/* ---- required features: an unknown bit refuses (64-bit field) ---- */
enum {
    GB_REQ_DENSE = 1u << 0,   /* dense layers, numerics version 1 */
    GB_REQ_Q4H = 1u << 1,
    GB_REQ_Q4RAW = 1u << 2,
    GB_REQ_Q8 = 1u << 3,
    GB_REQ_FLOAT = 1u << 4,   /* f32 or f16 matrices */
    GB_REQ_KV_INT8 = 1u << 5,
    GB_REQ_KV_FLOAT = 1u << 6,
    GB_REQ_KV_MASK = 1u << 7, /* some KV heads keep a part of the positions */
    GB_REQ_KV_VALUE4 = 1u << 8, /* some KV heads hold values of 4 bits, */
    GB_REQ_KV_KEY4 = 1u << 9,   /* .. keys */
    GB_REQ_KV_4BIT = GB_REQ_KV_VALUE4 | GB_REQ_KV_KEY4,
    GB_REQ_KNOWN = 0x3ff
};

enum {
    GB_ISA_ANY = 0, GB_ISA_X86_64 = 1, GB_ISA_AARCH64 = 2, GB_ISA_ARMV7 = 3, GB_ISA_RISCV64 = 4
};

enum gb_format {
    GB_FMT_F32 = 1,        /* 16-row panels, input-major: 16 floats an input */
    GB_FMT_F16 = 2,        /* the same, IEEE half */
    GB_FMT_Q4H = 3,        /* NUMERICS W1 */
    GB_FMT_Q4RAW_F16 = 4,  /* NUMERICS W3, half scales */
    GB_FMT_Q4RAW_BF16 = 5, /* NUMERICS W3, bfloat16 scales */
    GB_FMT_Q8 = 6,         /* NUMERICS W2, body: planes and scale8 inside superblocks */
    GB_FMT_Q8_ROWS = 7,    /* NUMERICS W2, embedding and head: two regions, a super per row */
    GB_FMT_VECTOR = 8      /* norms and biases: cols floats, one row, no panels */
};

enum gb_role { /* gemmake/model.py has the shapes; GATE and UP (23, 24) never reach a file */
    GB_ROLE_EMBED = 1, GB_ROLE_HEAD = 2, GB_ROLE_FINAL_NORM = 3,
    GB_ROLE_ATTN_NORM = 10, GB_ROLE_Q = 11, GB_ROLE_K = 12, GB_ROLE_V = 13, GB_ROLE_O = 14,
    GB_ROLE_Q_BIAS = 15, GB_ROLE_K_BIAS = 16, GB_ROLE_V_BIAS = 17,
    GB_ROLE_Q_NORM = 18, GB_ROLE_K_NORM = 19, GB_ROLE_POST_ATTN_NORM = 20,
    GB_ROLE_FFN_NORM = 21, GB_ROLE_POST_FFN_NORM = 22, GB_ROLE_GATE_UP = 25, GB_ROLE_DOWN = 26
};

enum { GB_BLOCK_PRE = 0, GB_BLOCK_SANDWICH = 1 };
enum { GB_ACT_GELU_TANH = 0, GB_ACT_SILU = 1 };
enum { GB_LAYER_DENSE = 0 };
enum { GB_LAYERF_QK_NORM = 1, GB_LAYERF_QKV_BIAS = 2, GB_LAYERF_ATTN_SOFTCAP = 4 };
enum { GB_CONFF_TIED = 1, GB_CONFF_FINAL_SOFTCAP = 2 };
enum { GB_KV_F32 = 0, GB_KV_F16 = 1, GB_KV_INT8 = 2 };
enum { GB_UNITF_VALUE4 = 1, GB_UNITF_KEY4 = 2 }; /* values, keys of 4 bits; int8 only */
enum { GB_COLD_STREAM = 0, GB_COLD_ROWS = 1 };    /* read in order for every token, or by rows */

typedef struct gb_header {
    uint8_t magic[8];
    uint32_t byte_order;
    uint16_t major, minor;
    uint32_t header_size, entry_size, section_count, align; /* 256, 128, n, 256 */
    uint64_t file_size, table_offset;                       /* bytes; 512 */
    uint64_t required_features, optional_features;
    uint64_t ram_weights; /* mem_size of WHOT, rounded up to 4096 */
    uint64_t ram_arena;   /* end of the last PLAN buffer, rounded up to 4096 */
    uint64_t ram_kv;      /* end of the last layer's ring, rounded up to 4096 */
    uint64_t ram_total;   /* weights + arena + kv + tables + engine + stacks */
    uint64_t ram_budget;  /* what the target grants; 0 = not stated */
    uint32_t isa, isa_features, engine_abi_min, kv_layout_id;
    uint8_t hdf_sha256[32], root_sha256[32];
    uint8_t target[16];   /* NUL-padded, not terminated at 16 characters */
    uint64_t ram_tables;  /* the file without WHOT: pad(file_size, 4096) - pad(size, 4096) */
    uint64_t ram_engine;  /* FORMAT.md, "Memory" */
    uint64_t ram_stacks;  /* thread stacks for the planned thread count */
    uint8_t reserved[24];
    uint32_t table_crc32, header_crc32;
} gb_header;

typedef struct gb_signature { /* outside the root: signing changes only these bytes */
    uint16_t alg;             /* 0 none, 1 Ed25519 */
    uint8_t pad[6], key_id[8], signature[64], reserved[176];
} gb_signature;

typedef struct gb_section {
    uint32_t type, flags;
    uint64_t offset, size, mem_size; /* bytes; mem_size < size: of cold weights */
    uint32_t record_size, crc32;     /* record_size 0 where the section is not an array */
    uint64_t record_count;
    uint8_t reserved0[16], sha256[32], name[16], reserved1[16];
} gb_section;

typedef struct gb_conf {
    uint32_t layer_count, hidden, vocab_rows, rope_count;
    uint32_t context;         /* compiled positions: KV, RoPE tables and totals are for these */
    uint32_t trained_context, chunk; /* positions; tokens of a prefill chunk */
    uint32_t threads;         /* planned thread count, 1..8 */
    uint32_t kv_type, flags;  /* GB_KV_*, GB_CONFF_* */
    uint32_t tens_embed, tens_head, tens_final_norm; /* TENS indices; tied: embed == head */
    uint32_t act_mode;        /* 0 = per token and group of 32 */
    float norm_eps, embed_scale, final_softcap;
    float temperature, top_p, min_p, repetition_penalty; /* sampling defaults */
    uint32_t top_k;
    uint32_t text_limit;      /* bytes of text that the tokenizer scratch is planned for */
    uint32_t reserved0;
    uint8_t family[16];       /* NUL-padded name, for people */
    uint8_t name[64];         /* NUL-padded model name */
    uint8_t reserved[80];
} gb_conf;

typedef struct gb_layer {
    uint32_t kind, flags, heads, kv_heads, head_dim, ffn, rope, window; /* window 0 = all */
    uint32_t block, act;
    float score_scale, attn_softcap;
    uint32_t kv_source;  /* layer whose ring is read: its own index in version 1.0 families */
    uint32_t kv_group;   /* inputs that share a KV scale: 32, 64 or head_dim (int8 only) */
    uint64_t kv_offset, kv_size; /* bytes from the start of the KV region */
    uint32_t kv_blocks;  /* ring blocks of 32 tokens */
    uint32_t tens_first, tens_count; /* this layer's records in TENS */
    float sparsity_z;    /* reserved for later kinds, zero now, like the rest */
    uint32_t unit_first; /* this layer's first record in KVMK; 0 without that section */
    uint8_t reserved[36];
} gb_layer;

typedef struct gb_kv_unit { /* what a KV head of a layer keeps, in blocks of 32 tokens */
    uint32_t sink;          /* from the start .. */
    uint16_t recent, flags; /* .. and up to a query's own; 0, 0: all of the window; GB_UNITF_* */
    uint32_t blocks;        /* of its ring: sink + recent + 1, or all */
    uint32_t first;         /* where that begins in the layer's: blocks; with KV_4BIT 64 bytes */
} gb_kv_unit;

typedef struct gb_segment { /* a run of groups of one format, equal for all panels of a tensor */
    uint32_t format, first_group, group_count, reserved;
} gb_segment;

typedef struct gb_tensor {
    uint32_t role;
    int32_t layer;         /* -1: embed, head, final norm */
    uint32_t seg_first, seg_count;
    uint32_t rows, cols, rows_padded, cols_padded; /* to 16 and 32; a vector is 1 x n, unpadded */
    uint32_t slab_first, slab_count; /* heads covered (q, k, v: rows; o: columns), else 0, 0 */
    uint32_t parts;        /* 2 for GATE_UP (rows are per part), else 1 */
    uint32_t reserved0;
    uint64_t offset, size; /* of the data, or of the high plane */
    uint64_t second_offset, second_size; /* the low plane of GB_FMT_Q8_ROWS, else 0 */
    uint8_t reserved[16];
} gb_tensor;

enum gb_buffer { /* arena buffers; FORMAT.md, "Memory", has the size of each */
    GB_BUF_X = 1,       /* residual stream [chunk][hidden] f32 */
    GB_BUF_XN = 2,      /* normed activations, input of q k v, gate_up and head */
    GB_BUF_Q = 3,       /* queries after norm and RoPE, quantised with an int8 KV */
    GB_BUF_KV = 4,      /* K and V of the chunk, as they will stand in the ring */
    GB_BUF_ATT = 5,     /* attention output, input of o */
    GB_BUF_SCORES = 6,  /* [8 threads][context] f32 */
    GB_BUF_Y = 7,       /* product of o or down [chunk][hidden] f32 */
    GB_BUF_H = 8,       /* gated activations, input of down */
    GB_BUF_LOGITS = 9,  /* [vocab rows padded to 32] f32 */
    GB_BUF_CAND = 10,   /* sampler candidates [vocab rows padded to 32] u32 */
    GB_BUF_SEEN = 11,   /* bit per vocabulary row, repetition penalty */
    GB_BUF_IDS = 12,    /* [context] u32 token ids in the KV cache */
    GB_BUF_PROMPT = 13, /* [context + 1] u32 ids of an encoded prompt */
    GB_BUF_TOK = 14,    /* tokenizer scratch */
    GB_BUF_HIDDEN = 15  /* [hidden] f32, final-norm output of the last position; or [8][hidden]:
                         * then residual streams of a speculative step's tokens */
};
enum gb_op { /* the steps between which a buffer lives; QKV..DOWN repeat per layer */
    GB_OP_TOK = 0, GB_OP_EMBED = 1, GB_OP_QKV = 2, GB_OP_ATTN = 3, GB_OP_O = 4,
    GB_OP_GATE_UP = 5, GB_OP_DOWN = 6, GB_OP_HEAD = 7, GB_OP_SAMPLE = 8
};

typedef struct gb_plan {
    uint32_t kind, first_op, last_op, reserved0;
    uint64_t offset, size; /* bytes inside the arena, offset on 64 */
    uint8_t reserved[16];
} gb_plan;

typedef struct gb_rope { /* table at offset: [positions][cos of pairs, then sin of pairs] f32 */
    uint32_t pairs, positions;
    uint64_t offset; /* from the start of the section, on 64 */
} gb_rope;

typedef struct gb_thermal {
    float threshold_c;  /* throttle from here; 0 = not set */
    float hysteresis_c; /* K below the threshold at which it is released */
    float device_max_c; /* continuous limit of the board's policy; 0 = unknown */
    uint32_t mode;      /* 0: the mode is that of gb_ladder */
    uint8_t reserved[48];
} gb_thermal;

/* Behind gb_thermal in the record of THRM, where record_size has room for it: what a program that
 * is told the temperature does by itself (gemrun_thermal.h). */
enum { GB_MAX_RUNGS = 8 };
enum { /* throttle modes */
    GB_MODE_BALANCED = 0, GB_MODE_PERFORMANCE = 1, GB_MODE_AGGRESSIVE = 2,
    GB_MODE_CONSERVATIVE = 3, GB_MODE_SILENT = 4
};

typedef struct gb_rung { /* thousandths: of the time, the threads and the chunk that were opened */
    uint16_t duty, threads, chunk;
    uint16_t reserved;
} gb_rung;

typedef struct gb_ladder {
    uint32_t mode;       /* GB_MODE_*: how it was made */
    uint32_t rung_count; /* 1..8; the first one holds while nothing is hot */
    float engage_c, release_c; /* up from here on, down from there; both 0: no limit is known */
    uint32_t rise;       /* rungs at a time, upwards */
    uint32_t fault;      /* this rung, or a higher one, while the sensor cannot be believed */
    uint32_t engage_ms, release_ms; /* on a rung before the next one up, down */
    uint32_t stale_ms;   /* a temperature that is older is none */
    gb_rung rungs[GB_MAX_RUNGS];
    uint8_t reserved[28];
} gb_ladder;

typedef struct gb_pin { /* then u32 ids, zeros up to a line, and the ring blocks of their tokens */
    uint32_t tokens;
    uint8_t reserved[60];
} gb_pin;

typedef struct gb_cold { /* a plane of a tensor that does not stay in memory */
    uint32_t tensor, plane; /* TENS index; 0: its data, 1: its second plane */
    uint32_t by, reserved;  /* GB_COLD_* */
} gb_cold;

typedef struct gb_test { /* greedy from an empty cache; ids beyond the counts are zero */
    uint32_t prompt_count, step_count;
    uint64_t digest; /* FNV-1a 64 over the logits' bytes: last prompt position, then each step */
    uint32_t prompt[GB_TEST_PROMPT];
    uint32_t steps[GB_TEST_STEPS];
    uint8_t reserved[176];
} gb_test;

_Static_assert(sizeof(gb_header) == 256, "gb_header");
_Static_assert(offsetof(gb_header, required_features) == 48, "gb_header");
_Static_assert(offsetof(gb_header, isa) == 104, "gb_header");
_Static_assert(offsetof(gb_header, hdf_sha256) == 120, "gb_header");
_Static_assert(offsetof(gb_header, target) == 184, "gb_header");
_Static_assert(offsetof(gb_header, table_crc32) == 248, "gb_header");
_Static_assert(sizeof(gb_signature) == 256, "gb_signature");
_Static_assert(sizeof(gb_section) == 128, "gb_section");
_Static_assert(offsetof(gb_section, sha256) == 64, "gb_section");
_Static_assert(sizeof(gb_conf) == 256, "gb_conf");
_Static_assert(offsetof(gb_conf, family) == 96, "gb_conf");
_Static_assert(sizeof(gb_layer) == 128, "gb_layer");
_Static_assert(offsetof(gb_layer, kv_offset) == 56, "gb_layer");
_Static_assert(sizeof(gb_kv_unit) == 16, "gb_kv_unit");
_Static_assert(sizeof(gb_segment) == 16, "gb_segment");
_Static_assert(sizeof(gb_tensor) == 96, "gb_tensor");
_Static_assert(offsetof(gb_tensor, offset) == 48, "gb_tensor");
_Static_assert(sizeof(gb_plan) == 48, "gb_plan");
_Static_assert(sizeof(gb_rope) == 16, "gb_rope");
_Static_assert(sizeof(gb_thermal) == 64, "gb_thermal");
_Static_assert(sizeof(gb_rung) == 8, "gb_rung");
_Static_assert(sizeof(gb_ladder) == 128, "gb_ladder");
_Static_assert(sizeof(gb_pin) == 64, "gb_pin");
_Static_assert(sizeof(gb_cold) == 16, "gb_cold");
_Static_assert(sizeof(gb_test) == 2048, "gb_test");

#endif
