/* gr_kern_avx512.c: kernels for AVX-512 F, BW, DQ, VL and VNNI. A register holds the 16 rows of a
 * panel, or the 16 partial sums of a float sum (NUMERICS.md, 3.1).
 *
 * Compiled with those extensions on; nothing here runs before gr_pick.c has asked the processor. */
#include <immintrin.h>

#include "gr_blocks.h"

#define GR_INLINE static inline __attribute__((always_inline))

typedef int32_t gr_quad __attribute__((may_alias)); /* 4 activation codes, read together */

/* ---- products with quantised weights ---- */

enum {
    TILE = 8 /* tokens whose sums stay in registers beside a group's unpacked codes */
};

typedef struct gr_steps { /* of a block, a vector a group */
    __m512 scale[GB_SUPERBLOCK];
    __m512i zero[GB_SUPERBLOCK]; /* minus the zero point, in sixteenths: low half of 32 bits */
} gr_steps;

GR_INLINE uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

GR_INLINE __m512i bytes16(const uint8_t *p) /* 16 bytes as 32-bit numbers */
{
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
}

GR_INLINE __m512 scale_of(const gr_block *b, uint32_t g)
{
    if (b->format == GB_FMT_Q4H || b->format == GB_FMT_Q8)
        return _mm512_cvtepi32_ps(bytes16(b->meta + (size_t)16 * g));
    __m256i halves = _mm256_loadu_si256((const __m256i *)(const void *)(b->meta + (size_t)32 * g));
    if (b->format == GB_FMT_Q4RAW_F16)
        return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

GR_INLINE void steps_of(const gr_block *b, gr_steps *out)
{
    for (uint32_t g = 0; g < b->count; g++) {
        __m512i zero = _mm512_set1_epi32(128);
        if (b->format == GB_FMT_Q4H)
            zero = bytes16(b->meta + (size_t)16 * (b->count + g));
        out->zero[g] = _mm512_sub_epi16(_mm512_setzero_si512(), zero);
        out->scale[g] = b->format == GB_FMT_Q8_ROWS ? _mm512_set1_ps(1.0f) : scale_of(b, g);
    }
}

/* u[q]: 16 rows x the 4 inputs of quad q, 16 times the code, or the whole code of two planes. */
GR_INLINE void unpack(const uint8_t *high, const uint8_t *low, __m512i u[8])
{
    const __m512i upper = _mm512_set1_epi8((char)0xF0);
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; i++) {
        __m512i h = _mm512_loadu_si512(high + 64 * i);
        u[i] = _mm512_and_si512(_mm512_slli_epi16(h, 4), upper);
        u[i + 4] = _mm512_and_si512(h, upper);
    }
    if (!low)
        return;
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; i++) {
        __m512i l = _mm512_loadu_si512(low + 64 * i);
        u[i] = _mm512_or_si512(u[i], _mm512_andnot_si512(upper, l));
        u[i + 4] = _mm512_or_si512(u[i + 4], _mm512_andnot_si512(upper, _mm512_srli_epi16(l, 4)));
    }
}

typedef struct gr_row { /* a token's activations, from some group on */
    const int8_t *codes;
    const float *sa;
    const int32_t *asum;
} gr_row;

GR_INLINE __m512 group_times(const __m512i u[8], __m512i zero, __m512 scale, const int8_t *codes,
                             const float *sa, const int32_t *asum, __m512 acc)
{
    const gr_quad *x = (const gr_quad *)(const void *)codes;
    __m512i d = _mm512_dpwssd_epi32(_mm512_setzero_si512(), zero, _mm512_set1_epi32(*asum));
#pragma GCC unroll 8
    for (uint32_t q = 0; q < 8; q++)
        d = _mm512_dpbusd_epi32(d, u[q], _mm512_set1_epi32(x[q]));
    __m512 p = _mm512_mul_ps(_mm512_cvtepi32_ps(d), scale);
    return _mm512_fmadd_ps(p, _mm512_set1_ps(*sa), acc);
}

/* A block times some runs of `each` tokens, added to acc. `runs` and `each` are constants after
 * inlining: 4 tokens need no more addresses than the processor has registers for. */
GR_INLINE void block_times(const gr_block *b, const gr_row *row, size_t groups, uint32_t runs,
                           uint32_t each, bool first, __m512 *acc)
{
    gr_steps s;
    steps_of(b, &s);
    for (uint32_t g = 0; g < b->count; g++) {
        __m512i u[8];
        size_t step = (size_t)b->step * g, at = b->group + g;
        unpack(b->high + step, b->low ? b->low + step : NULL, u);
        if (first)
            gr_prefetch_group(b, g);
#pragma GCC unroll 2
        for (uint32_t r = 0; r < runs; r++) {
            const int8_t *codes = row[r].codes + GB_GROUP * at;
            const float *sa = row[r].sa + at;
            const int32_t *asum = row[r].asum + at;
#pragma GCC unroll 4
            for (uint32_t t = 0; t < each; t++)
                acc[each * r + t] = group_times(u, s.zero[g], s.scale[g],
                                                codes + GB_GROUP * groups * t, sa + groups * t,
                                                asum + groups * t, acc[each * r + t]);
        }
    }
}

/* A panel times runs of tokens that begin at token[0..runs). */
GR_INLINE void tile(const gr_mat *m, const gr_act *a, uint32_t panel, const uint32_t *token,
                    uint32_t runs, uint32_t each, bool first, uint32_t width, float *const *y,
                    size_t ldy)
{
    __m512 acc[TILE], super = _mm512_loadu_ps(m->data + m->panel * panel);
    __mmask16 wanted = (__mmask16)(width < GB_PANEL ? (1u << width) - 1 : 0xFFFFu);
    gr_row row[2];
    gr_walk walk = gr_walk_panel(m, panel);
    gr_block b;
    for (uint32_t t = 0; t < runs * each; t++)
        acc[t] = _mm512_setzero_ps();
    for (uint32_t r = 0; r < runs; r++) {
        size_t at = (size_t)token[r] * a->groups;
        row[r] = (gr_row){a->codes + GB_GROUP * at, a->sa + at, a->asum + at};
    }
    while (gr_walk_next(&walk, &b))
        block_times(&b, row, a->groups, runs, each, first, acc);
    for (uint32_t t = 0; t < runs * each; t++)
        _mm512_mask_storeu_ps(y[t / each] + t % each * ldy, wanted, _mm512_mul_ps(super, acc[t]));
}

static void tile1(const gr_mat *m, const gr_act *a, uint32_t panel, uint32_t token, uint32_t width,
                  float *y)
{
    tile(m, a, panel, &token, 1, 1, true, width, &y, 0);
}

/* Tokens first..first + 4 and second..second + 4; where the two overlap, the same numbers come
 * twice. */
static void tile8(const gr_mat *m, const gr_act *a, uint32_t panel, uint32_t token, uint32_t first,
                  uint32_t second, uint32_t width, float *y, size_t ldy)
{
    tile(m, a, panel, (uint32_t[]){token + first, token + second}, 2, TILE / 2, first == 0, width,
         (float *[]){y + first * ldy, y + second * ldy}, ldy);
}

static void k_gemv(const gr_mat *m, const gr_act *a, uint32_t first, uint32_t token,
                   uint32_t tokens, uint32_t width, float *y, size_t ldy)
{
    for (uint32_t t = 0; t < tokens; t++)
        for (uint32_t col = 0; col < width; col += GB_PANEL)
            tile1(m, a, first + col / GB_PANEL, token + t, width - col, y + t * ldy + col);
}

/* Less than half a tile: one by one. */
static void panel_times(const gr_mat *m, const gr_act *a, uint32_t panel, uint32_t token,
                        uint32_t tokens, uint32_t width, float *y, size_t ldy)
{
    enum { HALF = TILE / 2 };
    if (tokens < HALF)
        for (uint32_t t = 0; t < tokens; t++)
            tile1(m, a, panel, token + t, width, y + t * ldy);
    else
        for (uint32_t t = 0; t < tokens; t += TILE)
            tile8(m, a, panel, token, least(t, tokens - HALF), least(t + HALF, tokens - HALF),
                  width, y, ldy);
}

static void k_gemm(const gr_mat *m, const gr_act *a, uint32_t first, uint32_t token,
                   uint32_t tokens, uint32_t width, float *y, size_t ldy)
{
    for (uint32_t col = 0; col < width; col += GB_PANEL)
        panel_times(m, a, first + col / GB_PANEL, token, tokens, width - col, y + col, ldy);
}

const gr_kernels gr_kernels_avx512 = {.name = "avx512-vnni", .gemv = k_gemv, .gemm = k_gemm};
