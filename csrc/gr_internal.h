/* gr_internal.h: the engine's own structs and the seams between its files.
 *
 * gr_open.c turns bytes into views, the only place that reads offsets from a file. gr_model.c runs
 * tokens through the views. gr_api.c owns the order of things. gr_port_*.c is the only place that
 * may see libc beyond string.h, stdint.h, stddef.h and stdbool.h. */
#ifndef GR_INTERNAL_H
#define GR_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gembin.h"
#include "gemrun.h"
#include "gr_tok.h"

/* ---- errors: a code and two numbers; text is made at the edge from a table ---- */
typedef struct gr_error {
    gemrun_status code;
    uint64_t wanted, found; /* meaning by code: bytes, tokens, version, index, .. */
    uint32_t what;          /* a fourcc of the section, a gr_field of the call, or 0 */
    uint32_t record;        /* index of the record at fault, or GR_NO_RECORD; E_PROMPT and E_FULL:
                             * the compiled context, where only a lower one in use is too small */
    uint32_t threads;       /* E_MEMORY: of the plan that was refused .. */
    uint64_t plan[6];       /* .. weights, tables, arena, KV, engine, stacks, in bytes */
} gr_error;
#define GR_NO_RECORD UINT32_MAX

/* What a call was given that is out of its range (E_ARGUMENT, E_THREADS, E_SAMPLING, E_TOKEN):
 * gr_text.c names it and its range, in which `wanted` is the limit. A real is found as its bits. */
typedef enum gr_field {
    GR_F_NONE, GR_F_SIZE, GR_F_RESERVED, GR_F_ALIGNED, GR_F_MEMORY_SIZE, GR_F_WEIGHTS_CHECK,
    GR_F_FOREIGN_BOARD, GR_F_IGNORE_MEMORY, GR_F_LOCK_MEMORY, GR_F_THREADS, GR_F_THREADS_PINNED,
    GR_F_DECODE_THREADS, GR_F_BALANCE, GR_F_HEAD,
    GR_F_AFFINITY, GR_F_BATCH, GR_F_MAX_TOKENS, GR_F_SPECULATE, GR_F_REUSE, GR_F_ON_FULL,
    GR_F_TEMPERATURE,
    GR_F_TOP_P,
    GR_F_MIN_P, GR_F_PENALTY, GR_F_BANNED_COUNT, GR_F_BIAS_COUNT, GR_F_STOP_COUNT, GR_F_STOP,
    GR_F_BIAS_VALUE, GR_F_BANNED, GR_F_BIAS_ID, GR_F_TOKEN, GR_F_MESSAGES, GR_F_FLAGS,
    GR_F_CAPACITY, GR_F_COUNT
} gr_field;

gemrun_status gr_fail(gr_error *e, gemrun_status code, uint32_t what, uint64_t wanted,
                      uint64_t found);

/* ---- views of an artifact: checked pointers into the image ---- */
typedef struct gr_view {
    gb_header header; /* copies, made before they were checked */
    gb_conf conf;
    gb_thermal thermal;
    const gb_layer *layers;     /* copied tables, in the engine block */
    const gb_tensor *tensors;
    const gb_segment *segments;
    const gb_plan *plans;
    const gb_kv_unit *units;    /* NULL: every KV head keeps all of its layer's window */
    uint32_t layer_count, tensor_count, segment_count, plan_count, unit_count;
    const uint8_t *image; /* start of the mapped file: tensor offsets count from here */
    uint64_t image_size;
    const gb_section *whot;   /* copied, too */
    const gb_rope *ropes;     /* copied; their offsets count from rope_base, in the image */
    const uint8_t *rope_base;
    const uint8_t *tests;     /* gb_test records in the image, a stride apart */
    uint32_t test_count, test_stride;
    const uint32_t *pin_ids;  /* in the image; behind them the blocks (gr_pin.c) */
    uint32_t pin_tokens;      /* 0: no prompt is pinned */
    bool has_chat;
    gr_tok tok;   /* gr_tok.h */
    gr_chat chat;
} gr_view;

/* The first eleven checks of FORMAT.md, section 3: header and signature block. */
gemrun_status gr_open_header(gb_header *h, const uint8_t *image, uint64_t size, gr_error *e);
/* Bytes of the copied tables that gr_open_view needs room for; 0 when the image is too damaged to
 * tell. Reads only the header and the section table. At most GR_TABLES_FIXED above what
 * gr_engine_size counts for the records. */
uint64_t gr_open_tables_size(const uint8_t *image, uint64_t size);
enum { GR_TABLES_FIXED = 12 << 10 }; /* section table, CONF, THRM, ROPE records, alignment */
/* Check everything and fill the view. `tables` is aligned to 64 and stays in use; with less room
 * than gr_open_tables_size says, the first copy without room fails. */
gemrun_status gr_open_view(gr_view *v, const uint8_t *image, uint64_t size, void *tables,
                           uint64_t tables_size, bool check_weights, gr_error *e);
gemrun_status gr_check_weights(const gr_view *v, gr_error *e); /* the CRC of WHOT */

/* ---- sizes (rule C: recomputed, must equal what the file says); gr_size.c ---- */
uint64_t gr_tensor_size(const gb_tensor *t, const gb_segment *segments); /* 0: not valid */
uint64_t gr_tensor_second_size(const gb_tensor *t);
uint64_t gr_panel_size(const gb_tensor *t, const gb_segment *segments);  /* bytes of one panel */
uint64_t gr_kv_layer_size(const gr_view *v, const gb_layer *l); /* ring bytes */
uint64_t gr_kv_block_size(const gr_view *v, const gb_layer *l, uint32_t flags); /* of a unit */
uint64_t gr_kv_step(const gr_view *v, const gb_layer *l); /* bytes that gb_kv_unit.first counts */
uint32_t gr_kv_layer_blocks(uint32_t context, uint32_t window);
uint64_t gr_buffer_size(const gr_view *v, uint32_t kind); /* or GR_BUF_ROWS */
enum { GR_BUF_ROWS = GB_BUF_HIDDEN + 1 }; /* the second size of HIDDEN; has no record */
uint64_t gr_engine_size(const gr_view *v); /* ram_engine */
enum { GR_STACK_SIZE = 256 << 10, GR_ENGINE_FIXED = 64 << 10 };

/* ---- crc ---- */
uint32_t gr_crc32(uint32_t crc, const void *data, size_t size); /* zlib's, start with 0 */
/* The same not complemented, of the data's beginning; returns how many bytes a processor with the
 * bits `cpu` has taken (gr_kern_crc.c). */
size_t gr_crc_some(uint32_t *c, const uint8_t *p, size_t size, uint32_t cpu);

/* ---- the thread team (gr_port_*.c) ---- */
typedef struct gr_team gr_team;
typedef void (*gr_body)(void *arg, uint32_t thread, uint32_t threads);
/* Run body on the first `threads` of the team, the caller being thread 0; returns when all are
 * done. Floating point is set up on every thread (NUMERICS F1). */
void gr_team_run(gr_team *team, uint32_t threads, gr_body body, void *arg);
/* Wait for all threads of the team inside a body. The last to arrive runs `serial(arg)` (may be
 * NULL) before anybody goes on. Short spin, then sleep. */
void gr_team_barrier(gr_team *team, void (*serial)(void *arg), void *arg);
/* Inside a body: how many units were taken since the last barrier, before these. */
uint32_t gr_team_take(gr_team *team, uint32_t units);

/* ---- the engine ---- */
typedef struct gr_kernels gr_kernels; /* gr_kern.h: a table of functions, chosen at open */

/* Internal hook of the compiler's calibration: float inputs of the products of one layer, only
 * when its weights are float. stage is a gb_op (QKV, O, GATE_UP, DOWN); x is [rows][cols]. */
typedef void (*gr_capture)(void *user, uint32_t layer, uint32_t stage, const float *x,
                           uint32_t rows, uint32_t cols);

/* Internal hook of the compiler's measurements of KV heads: one head of one token, right after it
 * attended. */
typedef struct gr_watched {
    uint32_t layer, head, position;
    uint32_t first;       /* position of weights[0]; 0 where the layer has no window */
    const float *weights; /* up to position: probabilities before the division; gone after .. */
    const float *out;     /* [head_dim] */
    const void *pass;     /* .. gr_attend_as, which takes the rest */
    uint32_t token, thread;
} gr_watched;
typedef void (*gr_watch)(void *user, const gr_watched *w); /* on the threads of the team */

/* Internal hook of weights that do not stay in memory (gs_stream.c): how far a pass has come. Step
 * QKV: those of layer `at` are done, DOWN: all of it before DOWN, which is next; by a serial step.
 * A thread begins with .. HEAD: both planes of the unit `at` of the head, SCORES: its data alone,
 * ROWS: the panel `at`, of whose second plane it may need rows. */
enum { GR_SCORES = 64, GR_ROWS };
typedef struct gr_engine gr_engine;
typedef void (*gr_ahead)(const gr_engine *e, uint32_t step, uint32_t at);

struct gr_engine {
    gr_view v;
    const gr_kernels *kern;
    gr_team *team;
    uint32_t threads;
    uint32_t decode_threads; /* of one token at a time: more than fill the memory bus do not help */
    uint32_t allowed; /* threads of a step, by on_step; 0: all */
    bool balance;     /* threads take a part of the work one piece at a time: cores differ */
    uint32_t context; /* positions in use: kv_cache_size */
    uint32_t chunk;   /* tokens of a prefill step in use */
    uint32_t near;    /* bytes of activations that stay in a core's second cache */
    uint8_t *arena, *kv; /* v.header.ram_arena and ram_kv bytes, zeroed and touched */
    uint8_t *buf[16];    /* arena buffers by gb_buffer kind */
    uint32_t pos;        /* tokens in the cache */
    uint32_t high;       /* .. at most, since it was empty: so far rings have gone on */
    bool logits_valid;
    bool screened;       /* they are minus infinity where they are not among the best */
    bool wanted;         /* a shared pass makes logits of the last token */
    bool bad[GB_MAX_THREADS + 1]; /* not finite, in the pass; the last one is for serial steps */
    uint32_t row, rows;  /* of the pass that are this engine's: where they begin, how many */
    uint8_t *store;      /* K and V of the pass: GB_BUF_KV of the engine that leads it */
    struct gr_planes *planes; /* gr_planes.h; NULL: always the full head */
    gr_error err;
    gr_ahead ahead;     /* NULL: all weights stay */
    gr_capture capture; /* NULL in normal use */
    void *capture_user;
    gr_watch watch; /* NULL in normal use */
    void *watch_user;
};

static inline uint32_t gr_step_threads(const gr_engine *e, uint32_t most)
{
    return e->allowed > 0 && e->allowed < most ? e->allowed : most;
}

/* One chunk (1..chunk tokens) at e->pos; the ring, e->pos and GB_BUF_IDS advance on success.
 * want: 0 no logits, 1 logits of the last token, 2 `fn` after every token, 3 GB_BUF_X is complete
 * for heads to come. Non-finite values: GEMRUN_E_NONFINITE, and the cache is as it was. */
gemrun_status gr_forward(gr_engine *e, const uint32_t *ids, uint32_t count, uint32_t want,
                         gemrun_logits_fn fn, void *user);
/* One pass for several engines of one artifact: `e` leads it, with its buffers, team and kernels,
 * and need not be one of them. Row i of `count` is the next token ids[i] of the engine of[i]; the
 * rows of an engine follow each other. Each engine is as after gr_forward of its own rows, with
 * logits where it has `wanted`, or has its error in o->err.code, which is 0 otherwise. */
void gr_forward_many(gr_engine *e, gr_engine *const *of, const uint32_t *ids, uint32_t count);
/* Calibration: run the layers over given hidden states x [count][hidden], in place, no embedding,
 * no head. Same cache rules. */
gemrun_status gr_forward_hidden(gr_engine *e, float *x, uint32_t count);
void gr_kv_reset(gr_engine *e);

/* ---- the pinned prompt (gr_pin.c); a minimal build has none ---- */
uint64_t gr_pin_size(const gr_view *v, uint32_t tokens); /* of its section */
/* So far as a prompt of `count` ids begins with the pinned ones, but for its last id, and further
 * than the cache holds it: put them into the cache. Returns the tokens in it. */
uint32_t gr_pin_take(gr_engine *e, const uint32_t *ids, uint32_t count);

/* ---- kernels (gr_pick.c) ---- */
typedef enum gr_cpu { /* what a processor has and the system saves: bits of gr_port_cpu */
    GR_CPU_AVX2 = 1, /* with FMA and F16C */
    GR_CPU_AVX_VNNI = 2,
    GR_CPU_AVX512_VNNI = 4, /* with F, BW, DQ and VL */
    GR_CPU_NEON = 8, /* Armv8; on Armv7 with VFPv4 */
    GR_CPU_DOTPROD = 16,
    GR_CPU_I8MM = 32,
    GR_CPU_RVV = 64, /* 1.0 */
    GR_CPU_CRC = 128 /* for the checksum: PCLMULQDQ, or Arm's CRC32 */
} gr_cpu;
/* Fill `out` for this processor: the best of everything, or nothing better than `name`: a kernel,
 * or one for GEMV and one for GEMM with a slash between. NULL: the best. False: the name is unknown
 * or the processor cannot run it. */
bool gr_kernels_pick(gr_kernels *out, const char *name);
const char *gr_kernels_at(uint32_t i); /* names of those that run here, ascending; NULL: end */

/* ---- sampling (gr_sample.c) ---- */
typedef struct gr_rng {
    uint64_t state, inc; /* PCG32 */
} gr_rng;
void gr_rng_seed(gr_rng *r, uint64_t seed);
/* Pick a token from GB_BUF_LOGITS (changed in place by penalties, bans and bias). */
gemrun_status gr_sample(gr_engine *e, const gemrun_request *q, gr_rng *rng, uint32_t *out_id);

/* ---- floating-point environment (NUMERICS F1), inline assembly in the port ---- */
uint64_t gr_fp_enter(void); /* set round-to-nearest, no flush to zero; returns what was set */
void gr_fp_leave(uint64_t saved);

/* ---- exact float primitives (gr_math.c) ---- */
float gr_fmaf_soft(float x, float y, float z); /* F2: exact without the instruction */
float gr_sqrtf(float x);                       /* correctly rounded */
float gr_expf(float x);
float gr_tanhf(float x);

#endif
