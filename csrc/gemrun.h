/* gemrun.h: run a compiled language model (.gembin) with known memory and the same answer anywhere.
 *
 *     gemrun_context_t *ctx = gemrun_init("model.gembin");
 *     if (!ctx) { puts(gemrun_last_error()); return 1; }
 *     int32_t tokens[128];
 *     int32_t n = gemrun_infer(ctx, "Hello", tokens, 128);
 *     gemrun_destroy(ctx);
 *
 * Ownership: a context owns everything it hands out; pointers from it live until the next call on
 * it, or gemrun_destroy. Threads: one call at a time per context (a second gets GEMRUN_E_BUSY);
 * gemrun_cancel may be called from any thread or signal handler. All memory is taken in open;
 * nothing is allocated and no file is touched afterwards. The library has no global state; the
 * text of gemrun_last_error() belongs to the calling thread. A context does not survive fork: the
 * child may neither use nor destroy it. The file stays mapped: replace it by rename, never change
 * it in place. CONTRIBUTING.md says what a minimal build (GR_MINIMAL) lacks. */
#ifndef GEMRUN_H
#define GEMRUN_H
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#define GEMRUN_VERSION "0.1.0"
#define GEMRUN_ABI_VERSION 1

#if defined(GEMRUN_SHARED) && defined(__GNUC__)
#define GEMRUN_API __attribute__((visibility("default")))
#else
#define GEMRUN_API
#endif

/* Status codes: numbers are stable. Every call that can fail returns one of these (negative), or a
 * count (0 or more). Classes: -1.. the call, -20.. the file, -70.. the machine, -80.. the run. */
typedef enum gemrun_status {
    GEMRUN_OK = 0,
    GEMRUN_E_ARGUMENT = -1,  /* a null pointer, or a number out of its range */
    GEMRUN_E_BUSY = -2,      /* another thread is inside this context */
    GEMRUN_E_PROMPT = -3,    /* prompt empty, or longer than the context */
    GEMRUN_E_TEXT = -4,      /* text longer than the planned tokenizer scratch */
    GEMRUN_E_NO_CHAT = -5,   /* the artifact has no chat template */
    GEMRUN_E_TOKEN = -6,     /* token id without a row in the vocabulary */
    GEMRUN_E_CONTEXT = -7,   /* kv_cache_size above the compiled context */
    GEMRUN_E_THREADS = -8,   /* thread count or affinity mask not usable */
    GEMRUN_E_SAMPLING = -9,  /* sampling setting out of its range, or every token banned */
    GEMRUN_E_KERNEL = -10,   /* a forced kernel that this CPU cannot run */
    GEMRUN_E_FULL = -11,     /* no room left in the context for one more token */
    GEMRUN_E_STATE = -12,    /* the call needs something earlier, e.g. logits before a prefill */
    GEMRUN_E_OPEN = -20,     /* file cannot be opened or read */
    GEMRUN_E_MAGIC = -21,    /* not a .gembin file */
    GEMRUN_E_BYTE_ORDER = -22,
    GEMRUN_E_VERSION = -23,  /* other major version */
    GEMRUN_E_HEADER_CRC = -24,
    GEMRUN_E_HEADER = -25,   /* a fixed header field has another value, or a reserved byte is set */
    GEMRUN_E_SIZE = -26,     /* cut short, or longer than its header says */
    GEMRUN_E_FEATURE = -27,  /* needs a feature that this engine does not know */
    GEMRUN_E_ABI = -28,      /* needs a newer engine */
    GEMRUN_E_TABLE_CRC = -29,
    GEMRUN_E_TABLE = -30,    /* section table entry out of place, out of order or repeated */
    GEMRUN_E_GAP = -31,      /* non-zero byte between sections */
    GEMRUN_E_SIGNATURE = -32,
    GEMRUN_E_MISSING = -33,  /* a section is absent, or unknown and required */
    GEMRUN_E_SECTION_CRC = -34,
    GEMRUN_E_CONF = -35, GEMRUN_E_LAYR = -36, GEMRUN_E_SEGM = -37, GEMRUN_E_TENS = -38,
    GEMRUN_E_PLAN = -39, GEMRUN_E_ROPE = -40, GEMRUN_E_TOKN = -41, GEMRUN_E_TMPL = -42,
    GEMRUN_E_THRM = -43, GEMRUN_E_TEST = -44, /* a record of that section is wrong */
    GEMRUN_E_RAM = -45,      /* memory figures disagree with the records */
    GEMRUN_E_WEIGHTS_CRC = -46, GEMRUN_E_KVMK = -50, GEMRUN_E_PINP = -51, /* as CONF to TEST */
    GEMRUN_E_ROOT = -47,     /* root digest disagrees (Python reader) */
    GEMRUN_E_SHA256 = -48,   /* a section's SHA-256 disagrees (Python reader) */
    GEMRUN_E_MANIFEST = -49, /* manifest or HDF unreadable, or at odds with the records (Python) */
    GEMRUN_E_MEMORY = -70,   /* less memory available than the header declares */
    GEMRUN_E_MAP = -71,      /* the system refused a mapping or a thread */
    GEMRUN_E_BOARD = -72,    /* built for another known board */
    GEMRUN_E_TEST_FAILED = -80, /* a stored test vector gave another answer */
    GEMRUN_E_NONFINITE = -90 /* NaN or infinity in activations or logits */
} gemrun_status;

typedef struct gemrun_context gemrun_context_t;

/* Called for every piece of text: whole UTF-8 characters, NUL-terminated, `size` bytes, may be
 * empty. `token` is the id that completed it, or -1 for text flushed at the end. Return non-zero
 * to stop. Must not call the context, except gemrun_cancel. */
typedef int (*gemrun_text_fn)(void *user, int32_t token, const char *text, size_t size);

/* Called before every step (chunk or token): it may sleep to pace the run, and lower `threads`. */
typedef int (*gemrun_step_fn)(void *user, uint32_t *threads); /* non-zero stops, as on_text */
/* Called with the logits that follow position `position`: `count` floats, valid during the call. */
typedef int (*gemrun_logits_fn)(void *user, uint32_t position, const float *logits, uint32_t count);

typedef enum gemrun_weights_check { /* CRC-32 of the weights at open; all else is always checked */
    GEMRUN_WEIGHTS_UNCHECKED = 0,
    GEMRUN_WEIGHTS_FULL = 1
} gemrun_weights_check;

typedef enum gemrun_head { /* two planes read less: default: in greedy runs; 2: top_k to 64 too */
    GEMRUN_HEAD_DEFAULT, GEMRUN_HEAD_FULL, GEMRUN_HEAD_TWO_PLANE } gemrun_head;

enum { GEMRUN_FULL_STOP, GEMRUN_FULL_MARK, GEMRUN_FULL_SLIDE }; /* at the end of the context */
/* How to open. Start from gemrun_config_default(); zero means the default everywhere. */
typedef struct gemrun_config {
    uint32_t size;               /* sizeof(gemrun_config), set by gemrun_config_default */
    uint32_t kv_cache_size;      /* tokens in use, 1..compiled context, the default; frees none */
    uint32_t prefill_batch_size; /* tokens per prefill step, up to the compiled chunk */
    uint32_t threads;            /* 1..8; default: cores granted, no slow ones, at most the plan */
    uint64_t thread_affinity;    /* one thread is pinned to each set bit's core; 0: none */
    uint32_t weights_check;      /* gemrun_weights_check */
    uint32_t allow_foreign_board;/* 1: although built for another board; see gemrun_board.h */
    uint32_t ignore_memory;      /* 1: do not refuse when less memory is available than declared */
    uint32_t lock_memory;        /* 1: mlock; failure is a warning in gemrun_stats.locked_bytes */
    const char *kernel;          /* "avx2", .. or "GEMV/GEMM"; NULL: $GEMRUN_KERNEL, or the best */
    uint32_t decode_threads;     /* of one token at a time, 1..8; default, and at most: threads */
    uint32_t balance;            /* work by turns: 0 where cores differ, 1 never, 2 always */
    uint32_t head, reserved[5];  /* gemrun_head; 0 */
} gemrun_config;

/* How to sample and when to stop. Start from gemrun_request_default(ctx). */
typedef struct gemrun_request {
    uint32_t size;              /* sizeof(gemrun_request) */
    uint32_t max_tokens;        /* 1 and up; default 256 */
    float temperature;          /* 0: greedy; up to 100; default of the artifact, 0.3 */
    uint32_t top_k;             /* 0: off; default 64 */
    float top_p;                /* (0, 1]; default 0.85 */
    float min_p;                /* [0, 1); default 0 */
    float repetition_penalty;   /* (0, 100]; 1: off */
    uint32_t seed_set;          /* 1: use seed; 0: seed 0 is used, answers repeat either way */
    uint64_t seed;
    uint64_t deadline_ns;       /* from the start of the call; 0: none */
    const uint32_t *banned;     /* token ids that are never sampled, or NULL */
    uint32_t banned_count, bias_count; /* up to 4096 each */
    const uint32_t *bias_ids;   /* token ids .. */
    const float *bias_values;   /* .. and what is added to their logits, finite */
    const char *const *stop_strings; /* UTF-8, up to 8, each 1..128 bytes */
    uint32_t stop_string_count;
    uint32_t ignore_stop_ids;   /* 1: run to max_tokens */
    gemrun_text_fn on_text;     /* may be NULL */
    void *user;
    gemrun_step_fn on_step;     /* may be NULL */
    uint32_t speculate, reuse, on_full, reserved[3]; /* ids to guess; 1: keep the cache; FULL_* */
} gemrun_request;

typedef enum gemrun_role { GEMRUN_SYSTEM = 0, GEMRUN_USER = 1, GEMRUN_ASSISTANT = 2 } gemrun_role;
typedef struct gemrun_message {
    gemrun_role role;
    const char *text; /* UTF-8, NUL-terminated; control tokens in it are plain text */
} gemrun_message;

typedef enum gemrun_finish { /* why the last run ended */
    GEMRUN_FINISH_NONE = 0, GEMRUN_FINISH_STOP_ID = 1, GEMRUN_FINISH_STOP_STRING = 2,
    GEMRUN_FINISH_MAX_TOKENS = 3, GEMRUN_FINISH_CONTEXT_FULL = 4, GEMRUN_FINISH_CANCELLED = 5,
    GEMRUN_FINISH_DEADLINE = 6, GEMRUN_FINISH_CALLBACK = 7, GEMRUN_FINISH_ERROR = 8
} gemrun_finish;

typedef struct gemrun_stats {
    uint32_t size;               /* sizeof(gemrun_stats), set by the caller */
    uint32_t prompt_tokens, generated_tokens; /* of the last run */
    uint32_t kv_used, kv_size;   /* tokens in the cache now, and its size */
    uint32_t finish;             /* gemrun_finish of the last run */
    double ttft_ms;              /* call to first token of the last run */
    double prefill_tps, decode_tps; /* tokens per second of the last run; 0 if there were none */
    double decode_max_ms;        /* longest single decode step of the last run */
    uint64_t nonfinite_errors;   /* since open */
    uint64_t ram_weights, ram_tables, ram_arena, ram_kv, ram_engine, ram_stacks; /* bytes */
    uint64_t ram_total;          /* their sum: for this thread count */
    uint64_t declared_total;     /* ram_total of the header: for the planned thread count */
    uint64_t locked_bytes;       /* of lock_memory */
    uint32_t threads, pinned;    /* in use; whose affinity was set and read back */
    double head_candidates, head_candidates_max; /* rows a token of the last run; 0: full heads */
    uint64_t drafted, accepted, reused, slides, reserved[2]; /* ids: guessed, right; kept; times */
} gemrun_stats;

typedef struct gemrun_info { /* facts of an artifact; strings live as long as the context */
    uint32_t size;               /* sizeof(gemrun_info), set by the caller */
    uint32_t vocab_rows, context, chunk, layers, hidden, threads_planned;
    uint32_t has_chat, stop_id_count;
    const uint32_t *stop_ids;
    int32_t bos_id;              /* -1: none */
    uint32_t kv_type;            /* 0 f32, 1 f16, 2 int8 */
    const char *name, *family, *target, *kernel;
    uint64_t pinned_prompt, reserved[7]; /* its tokens; 0: none (gemmake --pin-prompt) */
} gemrun_info;

typedef struct gemrun_region { /* a mapping of the engine, to compare with what is declared */
    const char *name;            /* weights+tables, arena, kv, engine, stacks */
    const void *address;
    size_t bytes;
} gemrun_region;

/* ---- open and close ---- */
GEMRUN_API gemrun_context_t *gemrun_init(const char *path); /* NULL on failure */
GEMRUN_API gemrun_config gemrun_config_default(void);
GEMRUN_API gemrun_status gemrun_open(gemrun_context_t **out_ctx, const char *path,
                                     const gemrun_config *config);
/* The caller's bytes: `image` (aligned to 4096) must live and stay unchanged until destroy.
 * `memory` (aligned to 4096) holds arena, KV and engine; its size: gemrun_memory_needed. Worker
 * stacks are still mapped unless threads is 1. NULL memory: the engine maps its own. */
GEMRUN_API gemrun_status gemrun_open_mem(gemrun_context_t **out_ctx, const void *image,
                                         size_t image_size, void *memory, size_t memory_size,
                                         const gemrun_config *config);
GEMRUN_API int64_t gemrun_memory_needed(const void *image, size_t image_size,
                                        const gemrun_config *config);
GEMRUN_API void gemrun_destroy(gemrun_context_t *ctx); /* NULL is fine */
GEMRUN_API void gemrun_reset_kv_cache(gemrun_context_t *ctx); /* also unpins a calling thread */

/* ---- text in, text out ---- */
/* Greedy or sampled by the artifact's defaults, from an empty cache; ids go to `tokens` (room for
 * max_tokens). Returns their count, or a negative status. The closing stop id is not included. */
GEMRUN_API int32_t gemrun_infer(gemrun_context_t *ctx, const char *prompt, int32_t *tokens,
                                int32_t max_tokens);
GEMRUN_API gemrun_request gemrun_request_default(const gemrun_context_t *ctx);
/* The same with settings; tokens may be NULL. The cache is reset first. */
GEMRUN_API int32_t gemrun_generate(gemrun_context_t *ctx, const char *prompt,
                                   const gemrun_request *request, int32_t *tokens);
GEMRUN_API int32_t gemrun_chat(gemrun_context_t *ctx, const gemrun_message *messages, size_t count,
                               const gemrun_request *request, int32_t *tokens);
GEMRUN_API void gemrun_cancel(gemrun_context_t *ctx); /* ends the running call at the next token */

/* ---- tokens ---- */
/* flags: bit 0 add bos as the model asks, bit 1 parse control tokens. Returns the count. */
GEMRUN_API int32_t gemrun_tokenize(gemrun_context_t *ctx, const char *text, size_t size,
                                   uint32_t flags, int32_t *ids, size_t capacity);
/* Text of ids; flags bit 0: exact bytes instead of U+FFFD for invalid ones, bit 1: show control
 * tokens. Returns the byte count, NUL not counted; at most capacity - 1 bytes are written. */
GEMRUN_API int64_t gemrun_detokenize(gemrun_context_t *ctx, const int32_t *ids, size_t count,
                                     uint32_t flags, char *text, size_t capacity);
/* Append ids; returns the tokens in the cache; a failure after the first step empties it. With an
 * affinity the calling thread stays pinned until a reset, a run or destroy: steps cost no calls. */
GEMRUN_API int32_t gemrun_prefill(gemrun_context_t *ctx, const int32_t *ids, size_t count);
GEMRUN_API int32_t gemrun_decode(gemrun_context_t *ctx, int32_t id); /* one token, as prefill */
GEMRUN_API int32_t gemrun_sample(gemrun_context_t *ctx, const gemrun_request *request); /* an id */
GEMRUN_API int32_t gemrun_eval(gemrun_context_t *ctx, const int32_t *ids, size_t count,
                               gemrun_logits_fn fn, void *user); /* logits after every position */
/* Logits, all of them whatever the head, and final-norm output of the last token; NULL before a
 * prefill, and once the logits were changed by sampling with a bias, a ban or a penalty. */
GEMRUN_API const float *gemrun_logits(const gemrun_context_t *ctx, uint32_t *out_count);
GEMRUN_API const float *gemrun_embedding(const gemrun_context_t *ctx, uint32_t *out_count);
GEMRUN_API int32_t gemrun_run_tests(gemrun_context_t *ctx); /* stored vectors: how many passed */

/* ---- facts ---- */
GEMRUN_API gemrun_status gemrun_get_stats(const gemrun_context_t *ctx, gemrun_stats *out);
GEMRUN_API gemrun_status gemrun_get_info(const gemrun_context_t *ctx, gemrun_info *out);
GEMRUN_API uint32_t gemrun_regions(const gemrun_context_t *ctx, gemrun_region *out,
                                   uint32_t capacity); /* returns how many there are */
GEMRUN_API const char *gemrun_status_text(gemrun_status status); /* one sentence */
GEMRUN_API const char *gemrun_last_error(void);                  /* of this thread, never NULL */
GEMRUN_API const char *gemrun_version(void);
#ifdef __cplusplus
}
#endif
#endif
