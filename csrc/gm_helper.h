/* gm_helper.h: the compile-host helper of gemmake: quantisation search, error feedback, packing.
 *
 * Every number that decides a stored byte is made here from IEEE + - * / and sqrt in a fixed
 * order, so results do not depend on thread count, instruction set or compiler flags. Work is
 * split over rows (or output columns) only. No function prints, aborts or keeps state; each returns
 * GM_OK or a negative status, and outputs are undefined after a failure.
 *
 * Common arguments: `threads` 1..64; `flags` 0 or GM_BASELINE; `importance` [cols] >= 0 or NULL for
 * equal weights; matrices are row-major and contiguous. "cp" is cols rounded up to 32, "groups" is
 * cp / 32. The text between the two cffi lines is also the declaration for Python.
 */
#ifndef GM_HELPER_H
#define GM_HELPER_H

#include <stddef.h>
#include <stdint.h>

/* cffi: begin */
enum gm_status {
    GM_OK = 0,
    GM_ERR_ARG = -1,       /* a NULL pointer, a size of 0 or an unknown flag, kind or format */
    GM_ERR_SIZE = -2,      /* the output has not exactly the size that the format asks for */
    GM_ERR_LIMIT = -3,     /* rows, columns or positions above the limits below */
    GM_ERR_MEMORY = -4,    /* scratch could not be allocated */
    GM_ERR_THREAD = -5,    /* a thread could not be started */
    GM_ERR_NONFINITE = -6, /* NaN or infinity among the inputs */
    GM_ERR_RANGE = -7      /* a value does not fit the format, or a code is out of range */
};

enum gm_limits {
    GM_GROUP = 32,         /* inputs of a group */
    GM_PANEL = 16,         /* rows of a panel */
    GM_SUPERBLOCK = 8,     /* groups of a full superblock */
    GM_MAX_ROWS = 1 << 20,
    GM_MAX_COLS = 1 << 20,
    GM_MAX_GPTQ_COLS = 16384, /* the Hessian's lower triangle is 1.1 GB there */
    GM_MAX_TOKENS = 1 << 20,
    GM_MAX_THREADS = 64
};

enum gm_flags { GM_BASELINE = 1 /* do not use instruction sets above the build's baseline */ };

enum gm_format { /* values of the TENS record */
    GM_FMT_F32 = 1,
    GM_FMT_F16 = 2,
    GM_FMT_Q4H = 3,
    GM_FMT_Q4RAW_F16 = 4,
    GM_FMT_Q4RAW_BF16 = 5,
    GM_FMT_Q8 = 6,
    GM_FMT_Q8_ROWS = 7
};

enum gm_rope_kind { GM_ROPE_DEFAULT = 0, GM_ROPE_LINEAR = 1, GM_ROPE_LLAMA3 = 2 };

/* Quantised rows of a body matrix. A group is q4h: super * scale * (16 * code - zp) with codes
 * 0..15, or q8: super * scale * (code - 128) with codes 1..255 and zp 0. Scale 0 marks an all-zero
 * group; its codes and zp are 0 (q8: codes 128). Codes of padded columns are 0. */
typedef struct gm_rows {
    uint32_t rows, cols;
    uint8_t *codes;  /* [rows][cp] */
    uint8_t *scales; /* [rows][groups] */
    uint8_t *zps;    /* [rows][groups], sixteenths of a step */
    float *supers;   /* [rows] */
} gm_rows;

/* A prepared Hessian: see gm_gptq_prepare. */
typedef struct gm_feedback {
    uint32_t cols;
    float *panels; /* [gm_feedback_floats(cols)] */
    float *diag;   /* [cols] */
} gm_feedback;

/* CPUs that this process may run on, 1..64. */
int32_t gm_cpu_count(void);

/* Search of q4h and q8 groups. formats[groups] holds GM_FMT_Q4H or GM_FMT_Q8; NULL = all q4h. */
int32_t gm_search_rows(const float *weights, const float *importance, const uint8_t *formats,
                       gm_rows *out, int32_t threads, uint32_t flags);

/* x^T x of `tokens` rows, added to the lower triangle of hessian [cols][cols] (the rest is not
 * read; parts near the diagonal may be written). Tokens are taken in blocks of 32 from the start of
 * the call: float32 inside a block, float64 across blocks, both ascending. */
int32_t gm_hessian_add(double *hessian, const float *x, uint32_t tokens, uint32_t cols,
                       int32_t threads, uint32_t flags);

/* Factorises H + damping * mean(diag H) * I = N^T N (N lower), in place, then writes the feedback
 * coefficients N[k][i] / N[k][k] in panels of 32 columns and diag = N[k][k]^2. Columns that no
 * calibration token touched stay independent of all others. */
int32_t gm_gptq_prepare(double *hessian, double damping, gm_feedback *out, int32_t threads,
                        uint32_t flags);
uint64_t gm_feedback_floats(uint32_t cols); /* 0 where cols is out of range */

/* Quantisation with error feedback: each group is searched when it is entered, on weights that
 * carry the errors of all columns before it; then its columns are rounded one after another. */
int32_t gm_gptq_rows(const float *weights, const gm_feedback *feedback, const uint8_t *formats,
                     gm_rows *out, int32_t threads, uint32_t flags);

/* One scale a row, codes 1..255 = value + 128 in codes[rows][cp]; padded columns hold 0. */
int32_t gm_search_q8_rows(const float *weights, const float *importance, uint32_t rows,
                          uint32_t cols, uint8_t *codes, float *supers, int32_t threads,
                          uint32_t flags);

/* q4raw: scale * (code - 8), scales as bits of `format` (GM_FMT_Q4RAW_F16 or _BF16). exact[rows]
 * (may be NULL) counts the groups of a row that were reproduced bit for bit. */
int32_t gm_search_q4raw(const float *weights, const float *importance, uint32_t rows, uint32_t cols,
                        uint32_t format, uint8_t *codes, uint16_t *scales, uint32_t *exact,
                        int32_t threads);

/* Back to float32, [rows][cols]. */
int32_t gm_dequant_rows(const gm_rows *in, const uint8_t *formats, float *out);
int32_t gm_dequant_q8_rows(const uint8_t *codes, const float *supers, uint32_t rows, uint32_t cols,
                           float *out);
int32_t gm_dequant_q4raw(const uint8_t *codes, const uint16_t *scales, uint32_t rows, uint32_t cols,
                         uint32_t format, float *out);

/* Per row: sum of q * (a - b)^2 into error[rows] and of q * a^2 into power[rows], in float64,
 * columns ascending. */
int32_t gm_error_sums(const float *a, const float *b, const float *importance, uint32_t rows,
                      uint32_t cols, double *error, double *power);

/* First index of a NaN or infinity in values[count], or -1. */
int64_t gm_find_nonfinite(const float *values, uint64_t count);

/* Packing into layout r16k4. Sizes in bytes; 0 where an argument is out of range. Panel p goes to
 * out + p * stride; stride = gm_panel_bytes for one matrix, twice that for the two interleaved
 * matrices of GATE_UP (the second one starts at out + gm_panel_bytes). `size` is the bytes from out
 * to the end of the last panel, checked. */
uint64_t gm_panel_bytes(uint32_t format, uint32_t cols, const uint8_t *formats);
int32_t gm_pack_rows(const gm_rows *in, const uint8_t *formats, uint8_t *out, uint64_t stride,
                     uint64_t size);
int32_t gm_pack_q4raw(const uint8_t *codes, const uint16_t *scales, uint32_t rows, uint32_t cols,
                      uint8_t *out, uint64_t stride, uint64_t size);
int32_t gm_pack_q8_rows(const uint8_t *codes, const float *supers, uint32_t rows, uint32_t cols,
                        uint8_t *high, uint64_t high_size, uint8_t *low, uint64_t low_size);
int32_t gm_pack_float(const float *weights, uint32_t rows, uint32_t cols, uint32_t format,
                      uint8_t *out, uint64_t stride, uint64_t size);
int32_t gm_unpack_rows(const uint8_t *in, uint64_t stride, uint64_t size, const uint8_t *formats,
                       gm_rows *out);
int32_t gm_unpack_q8_rows(const uint8_t *high, uint64_t high_size, const uint8_t *low,
                          uint64_t low_size, uint32_t rows, uint32_t cols, uint8_t *codes,
                          float *supers);
int32_t gm_unpack_q4raw(const uint8_t *in, uint64_t stride, uint64_t size, uint32_t rows,
                        uint32_t cols, uint8_t *codes, uint16_t *scales);

/* IEEE half and bfloat16, round to nearest even. f32 -> f16 beyond 65504 is GM_ERR_RANGE. */
int32_t gm_to_f16(const float *in, uint64_t count, uint16_t *out);
int32_t gm_to_bf16(const float *in, uint64_t count, uint16_t *out);
void gm_from_f16(const uint16_t *in, uint64_t count, float *out);
void gm_from_bf16(const uint16_t *in, uint64_t count, float *out);

/* RoPE. freqs[dims / 2]; table [positions][cos of dims / 2, sin of dims / 2]. low, high, original:
 * llama3 only. */
int32_t gm_rope_freqs(double theta, uint32_t dims, int32_t kind, double factor, double low,
                      double high, double original, double *freqs);
int32_t gm_rope_table(const double *freqs, uint32_t pairs, uint32_t positions, float *table,
                      int32_t threads);

/* Reads `bytes` (a multiple of 256) from an address that is a multiple of 64; *sum of its words. */
int32_t gm_read_lines(const uint8_t *data, uint64_t bytes, uint64_t *sum);

/* Own elementary functions, for tests: |x| < 2^31 for sin and cos, x > 0 for log. */
double gm_sin(double x);
double gm_cos(double x);
double gm_exp(double x);
double gm_log(double x);
/* cffi: end */

#endif
