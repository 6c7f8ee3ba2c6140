/* gr_kern.h: the kernel table and the float functions that kernels share (NUMERICS.md, section 2).
 *
 * A kernel computes; it knows no layers, no threads and no files. Every table gives the same bits.
 * The functions here are inline so that a compiler can vectorise them inside a kernel's loop: no
 * branches on values, only choices. */
#ifndef GR_KERN_H
#define GR_KERN_H

#include <float.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "gembin.h"

_Static_assert(FLT_EVAL_METHOD == 0 || FLT_EVAL_METHOD == 16, "binary32 is needed: no x87");

#define GR_ROUND 12582912.0f          /* 1.5 * 2^23: adding it rounds to an integer, ties to even */
#define GR_ROUND_BITS 0x4B400000u     /* its encoding */
#define GR_EXPONENT 0x7F800000u       /* all exponent bits: infinity or NaN */
#define GR_TINY_BITS 0x26800000u      /* 2^-50 */

/* Input of a product: `tokens` rows in one or both forms. */
typedef struct gr_act {
    int8_t *codes;   /* [tokens][cols padded to 32]; NULL when no consumer is quantised */
    float *sa;       /* [tokens][groups] */
    int32_t *asum;   /* [tokens][groups] */
    float *x;        /* [tokens][cols]; NULL when no consumer is float */
    uint32_t cols, groups;
} gr_act;

/* A weight matrix in panels of 16 rows. */
typedef struct gr_mat {
    const uint8_t *data; /* first panel; GB_FMT_Q8_ROWS: of the high planes */
    const uint8_t *low;  /* GB_FMT_Q8_ROWS: low planes, 256 bytes a group, no supers */
    const gb_segment *seg;
    uint64_t panel;      /* bytes of a panel in `data` */
    uint32_t seg_count, cols, groups;
} gr_mat;

/* Consecutive positions of one KV head, in the ring or in the chunk's own store. */
typedef struct gr_span {
    const void *k, *v;        /* int8, half or float, head_dim values a position */
    const uint16_t *ks, *vs;  /* int8: bfloat16 scales, head_dim / group a position, behind codes */
    size_t stride, scale_stride; /* elements from one position to the next */
    size_t next;                 /* bytes from here to the same of the next block; 0: unknown */
    uint32_t count;
    bool key4, value4;           /* k, v hold 4 bits each: not for a kernel (gr_kv_unpack) */
} gr_span;

/* Queries of one KV head: heads that share it, or one head at successive tokens. */
typedef struct gr_queries {
    const int8_t *codes;     /* head_dim values a query */
    const uint16_t *scales;  /* bfloat16, head_dim / group a query */
    size_t stride, scale_stride; /* elements from one query to the next */
    uint32_t count;          /* at most GR_QUERIES */
} gr_queries;
enum { GR_QUERIES = 8 };

/* y[t][0..width) = rows of panels first.. times the activations of tokens token.. */
typedef void (*gr_product)(const gr_mat *m, const gr_act *a, uint32_t first, uint32_t token,
                           uint32_t tokens, uint32_t width, float *y, size_t ldy);

/* What an instruction set does itself. A table may leave places empty: at open the tables that the
 * processor can run are laid over each other, the plain one first (gr_pick.c). */
typedef struct gr_kernels {
    const char *name, *gemv_name, *gemm_name; /* the last two are filled in by gr_kernels_pick */
    gr_product gemv; /* quantised weights, one token: limited by memory */
    gr_product gemm; /* quantised weights, any number of tokens: limited by arithmetic */
    gr_product gemm_float; /* GB_FMT_F32, GB_FMT_F16 */
    /* x[n] -> token t of a; false: not finite */
    bool (*act)(const float *x, gr_act *a, uint32_t t, uint32_t first_group, uint32_t n);
    /* RMSNorm; y may be x; false: not finite */
    bool (*norm)(const float *x, const float *w, uint32_t n, float eps, float *y);
    bool (*norm_act)(const float *x, const float *w, uint32_t n, float eps, gr_act *a, uint32_t t);
    void (*glu)(uint32_t act, const float *g, const float *u, float *h); /* 16 values */
    void (*rope)(float *x, const float *table, uint32_t pairs); /* table: cos, then sin */
    bool (*quantise)(const float *x, uint32_t n, uint32_t group, int8_t *codes, uint16_t *scale);
    /* out[query * ldo + position of the span] = score before the score scale */
    void (*score)(const gr_queries *q, const gr_span *s, uint32_t dim, uint32_t group, float *out,
                  size_t ldo);
    void (*score_float)(uint32_t kv_type, const float *q, const gr_span *s, uint32_t dim,
                        float *out); /* one query */
    /* out[query * ldo + 0..dim) += probabilities e[query * lde + position] times values, for
     * `count` queries; a probability of 0 changes nothing */
    void (*value)(const float *e, size_t lde, uint32_t count, const gr_span *s, uint32_t dim,
                  uint32_t group, float *out, size_t ldo);
    void (*value_float)(uint32_t kv_type, const float *e, const gr_span *s, uint32_t dim,
                        float *out); /* one query */
    /* s[i] -> exp(s[i] * scale, capped, less the maximum), i from skip (0..15) to n; s[0] stands at
     * a position divisible by 16; s[0..skip) becomes 0. Returns the sum. */
    float (*softmax)(float *s, uint32_t skip, uint32_t n, float scale, float cap);
    bool (*finite)(const float *x, uint32_t n);
    void (*softcap)(float *z, uint32_t n, float cap);
    void (*add)(float *x, const float *y, uint32_t n); /* x += y */
    void (*divide)(float *x, float by, uint32_t n);    /* x /= by */
} gr_kernels;

/* gr_kern_ref.c, complete: everywhere, and a second time compiled for better processors. */
extern const gr_kernels gr_kernels_base;
#ifndef GR_BASE_ONLY
#if defined(__x86_64__)
extern const gr_kernels gr_kernels_avx2_lanes, gr_kernels_avx2;
extern const gr_kernels gr_kernels_avx_vnni, gr_kernels_avx512_lanes, gr_kernels_avx512;
#endif
#if defined(__aarch64__)
extern const gr_kernels gr_kernels_neon, gr_kernels_neon_vec;
extern const gr_kernels gr_kernels_dotprod, gr_kernels_i8mm;
#endif
#if defined(__arm__)
extern const gr_kernels gr_kernels_vfpv4, gr_kernels_neon;
#endif
#if defined(__riscv)
extern const gr_kernels gr_kernels_v, gr_kernels_rvv;
#endif
#endif

float gr_sqrtf(float x); /* gr_math.c: correctly rounded */

/* ---- encodings: by a union, as a freestanding compiler calls a function for each memcpy ---- */
union gr_word {
    uint32_t u;
    float x;
};

union gr_double {
    uint64_t u;
    double x;
};

static inline uint32_t gr_bits(float x)
{
    return ((union gr_word){.x = x}).u;
}

static inline float gr_float(uint32_t u)
{
    return ((union gr_word){.u = u}).x;
}

/* first ? a : b, by a mask: float arithmetic that only one side needs would become a branch, which
 * no compiler vectorises. */
static inline uint32_t gr_pick(bool first, uint32_t a, uint32_t b)
{
    uint32_t mask = 0u - (uint32_t)first;
    return (a & mask) | (b & ~mask);
}

static inline float gr_and(float x, uint32_t mask)
{
    return gr_float(gr_bits(x) & mask);
}

/* All bits, or none for a group that is too small or not finite: it becomes zeros by the same steps
 * as any other (D5). amax is the encoding of its largest magnitude. */
static inline uint32_t gr_usable(uint32_t amax)
{
    return 0u - ((uint32_t)(amax >= GR_TINY_BITS) & (uint32_t)(amax < GR_EXPONENT));
}

static inline float gr_bf16(uint16_t h)
{
    return gr_float((uint32_t)h << 16);
}

static inline float gr_half(uint16_t h) /* exact */
{
    uint32_t u = (uint32_t)(h & 0x7FFFu) << 13;
    uint32_t exponent = u & 0x0F800000u;
    u += 112u << 23; /* exponent bias 15 -> 127 */
    uint32_t small = gr_bits(gr_float(u + (1u << 23)) - gr_float(113u << 23));
    u += exponent == 0x0F800000u ? 112u << 23 : 0;
    return gr_float(gr_pick(exponent == 0, small, u) | (uint32_t)(h & 0x8000u) << 16);
}

static inline uint16_t gr_to_half(float x) /* to nearest even; NaN stays one */
{
    uint32_t u = gr_bits(x), sign = u >> 16 & 0x8000u, a = u & 0x7FFFFFFFu, h;
    if (a >= 0x47800000u) /* 65536 and up, infinity, NaN */
        h = a > GR_EXPONENT ? 0x7E00u : 0x7C00u;
    else if (a < 0x38800000u) /* below 2^-14: let an addition round at the last subnormal bit */
        h = gr_bits(gr_float(a) + 0.5f) - 0x3F000000u;
    else
        h = (a + 0xFFFu + (a >> 13 & 1u) - (112u << 23)) >> 13;
    return (uint16_t)(sign | h);
}

/* ---- fmaf, exact everywhere ---- */
#if defined(__FMA__) || defined(__aarch64__) || defined(__ARM_FEATURE_FMA) || defined(__riscv_f)
#define GR_HAS_FMA 1
#define gr_fmaf(x, y, z) __builtin_fmaf((x), (y), (z))
#else
/* gr_math.c; a call, in one file as well: size matters more here. */
__attribute__((noinline)) float gr_fmaf_soft(float x, float y, float z);
#define gr_fmaf(x, y, z) gr_fmaf_soft((x), (y), (z))
#endif

/* The product is exact in double. The sum is rounded to odd, so rounding it again to float gives
 * what one rounding of the true sum gives: 53 bits are two more than twice 24. */
static inline float gr_fmaf_exact(float x, float y, float z)
{
    double p = (double)x * (double)y, s = p + (double)z, b = s - p;
    double error = (p - (s - b)) + ((double)z - b);
    uint64_t u = ((union gr_double){.x = s}).u, e = ((union gr_double){.x = error}).u;
    uint64_t inexact = (uint64_t)(error < 0.0) | (uint64_t)(error > 0.0); /* NaN: s is not finite */
    uint64_t even = ~u & inexact & 1u, down = 0u - ((e ^ u) >> 63);
    u += (even ^ down) - down; /* even, or its negative */
    return (float)((union gr_double){.u = u}).x;
}

/* ---- functions, NUMERICS.md section 2 ---- */
static inline float gr_exp(float x)
{
    float c = gr_float(gr_pick(x > 88.0f, 0x42B00000u, gr_bits(x))); /* 88 */
    float t = c * 0x1.715476p+0f + GR_ROUND;
    float n = t - GR_ROUND;
    float r = gr_fmaf(n, -0x1.62e400p-1f, c);
    r = gr_fmaf(n, -0x1.7f7d1cp-20f, r);
    float p = 0x1.6a4748p-10f;
    p = gr_fmaf(p, r, 0x1.1239a2p-7f);
    p = gr_fmaf(p, r, 0x1.5558b6p-5f);
    p = gr_fmaf(p, r, 0x1.555492p-3f);
    p = gr_fmaf(p, r, 0x1.fffffcp-2f);
    p = gr_fmaf(p, r, 1.0f);
    p = gr_fmaf(p, r, 1.0f);
    uint32_t y = gr_bits(p) + ((gr_bits(t) - GR_ROUND_BITS) << 23);
    return gr_float(gr_pick(x < -87.0f, 0, y));
}

static inline float gr_tanh(float x)
{
    float a = gr_float(gr_bits(x) & 0x7FFFFFFFu), z = x * x;
    float p = -0x1.750ce2p-8f;
    p = gr_fmaf(p, z, 0x1.51f8cep-6f);
    p = gr_fmaf(p, z, -0x1.b835a4p-5f);
    p = gr_fmaf(p, z, 0x1.1106f6p-3f);
    p = gr_fmaf(p, z, -0x1.555532p-2f);
    float small = gr_fmaf(x * z, p, x);
    float t = gr_exp(-2.0f * a);
    float large = (1.0f - t) / (1.0f + t); /* never negative */
    uint32_t sign = gr_bits(x) & 0x80000000u;
    return gr_float(gr_pick(a < 0.625f, gr_bits(small), gr_bits(large) | sign));
}

static inline float gr_silu(float x)
{
    float e = gr_exp(gr_float(gr_bits(x) | 0x80000000u));
    float top = gr_float(gr_pick(x >= 0.0f, 0x3F800000u, gr_bits(e))); /* 1 or e */
    return x * (top / (1.0f + e));
}

static inline float gr_gelu(float x)
{
    float c = (x * x) * x;
    return (0.5f * x) * (1.0f + gr_tanh(0x1.988454p-1f * (x + 0x1.6e4e26p-5f * c)));
}

static inline float gr_cap(float z, float cap)
{
    return cap * gr_tanh(z / cap);
}

/* ---- scores, for kernels whose own part is the integer dot ---- */
typedef int32_t (*gr_dot)(const int8_t *x, const int8_t *y, uint32_t n);

static inline __attribute__((always_inline)) void gr_score_by(gr_dot dot, const gr_queries *q,
                                                              const gr_span *s, uint32_t dim,
                                                              uint32_t group, float *out,
                                                              size_t ldo)
{
    for (uint32_t p = 0; p < s->count; p++) {
        const int8_t *k = (const int8_t *)s->k + p * s->stride;
        const uint16_t *ks = s->ks + p * s->scale_stride;
        for (uint32_t i = 0; i < q->count; i++) {
            const int8_t *codes = q->codes + i * q->stride;
            const uint16_t *qs = q->scales + i * q->scale_stride;
            float acc = 0.0f;
            for (uint32_t at = 0, g = 0; at < dim; at += group, g++)
                acc = gr_fmaf((float)dot(codes + at, k + at, group),
                              gr_bf16(qs[g]) * gr_bf16(ks[g]), acc);
            out[i * ldo + p] = acc;
        }
    }
}

#endif
