/* gm_internal.h: what the files of the compile-host helper share. */
#ifndef GM_INTERNAL_H
#define GM_INTERNAL_H

#include <fenv.h>

#include "gm_helper.h"

#define GM_SUPER_MIN 9.094947017729282379150390625e-13f /* 2^-40: below it a super is stored as 0 */
#define GM_AMAX_MIN 7.8886090522101181e-31f             /* 2^-100: below it a group counts as 0 */
#define GM_Q_MIN 6.103515625e-05f                        /* 2^-14: least relative importance */
#define GM_Z_MAX 15.9375f                               /* 255 sixteenths */
#define GM_SEARCH_LEVELS 252.0f /* scale8 of a row's largest group: room for its neighbours */
#define GM_GPTQ_LEVELS 208.0f   /* more room: error feedback enlarges some groups */
#define GM_GPTQ_SETS 4u         /* row tiles that share a pass over a feedback panel */
#define GM_FACTOR_BLOCK 64u     /* rows of a block of the factorisation */

/* Importance of a matrix' columns, scaled per group so that the largest is 1. */
typedef struct gm_weighting {
    float *q;  /* [cp], 0 in padded columns */
    float *sq; /* [groups], sums of q ascending */
} gm_weighting;

typedef struct gm_search_job {
    const float *weights;
    const uint8_t *formats;
    const gm_rows *out;
    gm_weighting by;
    const gm_feedback *feedback; /* NULL: search only */
    float levels;
} gm_search_job;

typedef struct gm_q8_job {
    const float *weights;
    uint32_t rows, cols;
    const float *q; /* [cp] */
    uint8_t *codes;
    float *supers;
} gm_q8_job;

typedef struct gm_hessian_job {
    double *hessian;
    const float *x;
    uint32_t tokens, cols;
} gm_hessian_job;

typedef struct gm_factor_job { /* rows [first, last) of N are final; update the rows before them */
    double *hessian;
    uint32_t cols, first, last;
    double floor;
} gm_factor_job;

/* A job handles one item with a private scratch; returns GM_OK or a negative status. */
typedef int32_t (*gm_job)(const void *context, uint64_t item, void *scratch);

/* Kernels of one instruction set. Results are equal for all of them. */
typedef struct gm_kernels {
    uint32_t lanes; /* rows of a tile */
    size_t (*search_scratch)(uint32_t cols);
    gm_job search; /* item = tile of `lanes` rows */
    size_t (*gptq_scratch)(uint32_t cols);
    gm_job gptq; /* item = GM_GPTQ_SETS tiles */
    size_t (*q8_scratch)(uint32_t cols);
    gm_job q8;          /* item = tile */
    gm_job hessian;     /* item = gm_block_pair */
    gm_job factor_tail; /* item = gm_block_pair */
    void (*factor_head)(const gm_factor_job *job);
} gm_kernels;

extern const gm_kernels gm_kernels_base;
#if defined(__x86_64__) && defined(__GNUC__)
#define GM_HAVE_AVX2 1
extern const gm_kernels gm_kernels_avx2;
#endif

const gm_kernels *gm_pick(uint32_t flags);

/* Runs items 0..items-1, each once, with `scratch` bytes (64-aligned) per thread. Floating point
 * runs in the default environment. Returns the smallest status of all items. */
int32_t gm_run(gm_job job, const void *context, uint64_t items, int32_t threads, size_t scratch);

/* Default floating-point environment and back: a host may have set flush-to-zero or another
 * rounding, and the numbers must not follow it. Work between the two calls stands in functions that
 * are not inlined, because compilers move plain arithmetic across such calls. */
void gm_fp_enter(fenv_t *saved);
void gm_fp_leave(const fenv_t *saved);
#if defined(__GNUC__)
#define GM_APART __attribute__((noinline))
#else
#define GM_APART
#endif

int32_t gm_check_run(int32_t threads, uint32_t flags); /* GM_OK or GM_ERR_ARG */
int32_t gm_check_shape(uint32_t rows, uint32_t cols);
int32_t gm_check_formats(const uint8_t *formats, uint32_t groups);
int32_t gm_weighting_make(const float *importance, uint32_t cols, gm_weighting *out);
void gm_weighting_free(gm_weighting *weighting);

static inline uint32_t gm_groups(uint32_t cols)
{
    return (cols + (uint32_t)GM_GROUP - 1u) / (uint32_t)GM_GROUP;
}

static inline uint32_t gm_padded(uint32_t cols)
{
    return gm_groups(cols) * (uint32_t)GM_GROUP;
}

static inline int gm_is_q8(const uint8_t *formats, uint32_t group)
{
    return formats != NULL && formats[group] == (uint8_t)GM_FMT_Q8;
}

/* Lower triangles are worked on in blocks of GM_TRI_ROWS x GM_TRI_COLS elements. */
#define GM_TRI_ROWS 64u
#define GM_TRI_COLS 256u

static inline uint64_t gm_tri_items(uint32_t n)
{
    uint64_t down = (n + GM_TRI_ROWS - 1u) / GM_TRI_ROWS;
    return down * ((n + GM_TRI_COLS - 1u) / GM_TRI_COLS);
}

/* Floats before the feedback panel of group g: panel g has 32 * (g + 1) rows of 32. */
static inline size_t gm_panel_at(uint32_t g)
{
    return (size_t)GM_GROUP * GM_GROUP * ((size_t)g * (g + 1u) / 2u);
}

uint16_t gm_f16_bits(float x);
float gm_f16_value(uint16_t bits);
uint16_t gm_bf16_bits(float x);
float gm_bf16_value(uint16_t bits);

#endif
