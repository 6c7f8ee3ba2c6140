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
    TILE = 8, /* tokens whose sums stay in registers beside a group's unpacked codes */
    SOME = 64 /* tokens whose codes of a block stay in the first cache */
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

/* Sums of products with one number of memory for all rows. As an instruction of its own the
 * broadcast takes a fifth more time, and not every compiler leaves it in the product. */
GR_INLINE __m512i plus_quads(__m512i d, __m512i u, const gr_quad *x)
{
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(d) : "v"(u), "m"(*x));
    return d;
}

GR_INLINE __m512i plus_pairs(__m512i d, __m512i u, const int32_t *x)
{
    __asm__("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(d) : "v"(u), "m"(*x));
    return d;
}

GR_INLINE __m512i group_dots(const __m512i u[8], const int8_t *codes, __m512i d)
{
    const gr_quad *x = (const gr_quad *)(const void *)codes;
#pragma GCC unroll 8
    for (uint32_t q = 0; q < 8; q++)
        d = plus_quads(d, u[q], x + q);
    return d;
}

GR_INLINE __m512 plus_group(__m512i d, __m512 scale, const float *sa, __m512 acc)
{
    return _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(d), scale), _mm512_set1_ps(*sa), acc);
}

/* ---- one token ---- */

/* A block times a token. The scales lie behind the codes, and are read behind them: a processor
 * that fetches ahead by itself goes one way. */
GR_INLINE __m512 block_times(const gr_walk *w, const gr_block *b, const gr_act *a, size_t first,
                             __m512 acc)
{
    __m512i d[GB_SUPERBLOCK];
    gr_steps s;
    size_t at = first + b->group;
    for (uint32_t g = 0; g < b->count; g++) {
        __m512i u[8];
        size_t step = (size_t)b->step * g;
        unpack(b->high + step, b->low ? b->low + step : NULL, u);
        gr_prefetch_group(w, b, g);
        d[g] = group_dots(u, a->codes + GB_GROUP * (at + g), _mm512_setzero_si512());
    }
    steps_of(b, &s);
    for (uint32_t g = 0; g < b->count; g++)
        acc = plus_group(plus_pairs(d[g], s.zero[g], a->asum + at + g), s.scale[g],
                         a->sa + at + g, acc);
    return acc;
}

GR_INLINE void put_panel(const gr_mat *m, uint32_t panel, __m512 acc, uint32_t width, float *y)
{
    __m512 super = _mm512_loadu_ps(m->data + m->panel * panel);
    __mmask16 wanted = (__mmask16)(width < GB_PANEL ? (1u << width) - 1 : 0xFFFFu);
    _mm512_mask_storeu_ps(y, wanted, _mm512_mul_ps(super, acc));
}

/* One panel, or two by turns: of two streams more is fetched ahead than of one. */
static void tile1(const gr_mat *m, const gr_act *a, uint32_t panel, uint32_t token, uint32_t width,
                  float *y)
{
    __m512 acc[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    size_t first = (size_t)token * a->groups;
    uint32_t turns = width > GB_PANEL ? 2 : 1;
    gr_walk walk[2] = {gr_walk_panel(m, panel, turns), gr_walk_panel(m, panel + 1, turns)};
    gr_block b;
    for (uint32_t k = 0; gr_walk_next(&walk[k], &b); k = turns - 1 - k)
        acc[k] = block_times(&walk[k], &b, a, first, acc[k]);
    for (uint32_t k = 0; k < turns; k++)
        put_panel(m, panel + k, acc[k], width - GB_PANEL * k, y + GB_PANEL * k);
}

static void k_gemv(const gr_mat *m, const gr_act *a, uint32_t first, uint32_t token,
                   uint32_t tokens, uint32_t width, float *y, size_t ldy)
{
    for (uint32_t t = 0; t < tokens; t++)
        for (uint32_t col = 0; col < width; col += 2 * GB_PANEL)
            tile1(m, a, first + col / GB_PANEL, token + t, width - col, y + t * ldy + col);
}

/* ---- many tokens: a block of weights is unpacked once, then goes through tiles of tokens ---- */

typedef struct gr_unpacked {
    __m512i u[GB_SUPERBLOCK][8];
    gr_steps steps;
    uint32_t group, count;
} gr_unpacked;

static void unpack_block(const gr_walk *walk, const gr_block *b, bool ahead, gr_unpacked *out)
{
    steps_of(b, &out->steps);
    out->group = b->group;
    out->count = b->count;
    for (uint32_t g = 0; g < b->count; g++) {
        size_t step = (size_t)b->step * g;
        unpack(b->high + step, b->low ? b->low + step : NULL, out->u[g]);
        if (ahead)
            gr_prefetch_group(walk, b, g);
    }
}

/* Tokens token..token + 8, of which those from `end` on are the one before `end` again. */
static void block_tile(const gr_unpacked *w, const gr_act *a, uint32_t token, uint32_t end,
                       __m512 *sums)
{
    float sa[TILE][GB_SUPERBLOCK];
    int32_t asum[TILE][GB_SUPERBLOCK];
    const int8_t *codes[TILE];
    __m512 acc[TILE];
#pragma GCC unroll 8
    for (uint32_t t = 0; t < TILE; t++) {
        size_t at = (size_t)least(token + t, end - 1) * a->groups + w->group;
        codes[t] = a->codes + GB_GROUP * at;
        acc[t] = sums[t];
        for (uint32_t line = 0; line < 4; line++) /* of the next tile */
            __builtin_prefetch(codes[t] + (size_t)TILE * GB_GROUP * a->groups + GB_LINE * line);
        __mmask8 some = (__mmask8)((1u << w->count) - 1);
        _mm256_storeu_ps(sa[t], _mm256_maskz_loadu_ps(some, a->sa + at));
        _mm256_storeu_si256((__m256i *)(void *)asum[t],
                            _mm256_maskz_loadu_epi32(some, a->asum + at));
    }
    for (uint32_t g = 0; g < w->count; g++) {
        const float *scale = sa[0] + g;
        const int32_t *sum = asum[0] + g;
        __asm__("" : "+r"(scale), "+r"(sum)); /* one register each, not one a token */
#pragma GCC unroll 8
        for (uint32_t t = 0; t < TILE; t++) {
            __asm__("" : "+r"(codes[t]));
            __m512i d = plus_pairs(_mm512_setzero_si512(), w->steps.zero[g],
                                   sum + GB_SUPERBLOCK * t);
            acc[t] = plus_group(group_dots(w->u[g], codes[t], d), w->steps.scale[g],
                                scale + GB_SUPERBLOCK * t, acc[t]);
            codes[t] += GB_GROUP;
        }
    }
#pragma GCC unroll 8
    for (uint32_t t = 0; t < TILE; t++)
        sums[t] = acc[t];
}

static void panel_times(const gr_mat *m, const gr_act *a, uint32_t panel, uint32_t token,
                        uint32_t tokens, bool ahead, uint32_t width, float *y, size_t ldy)
{
    __m512 sums[SOME];
    gr_walk walk = gr_walk_panel(m, panel, 1);
    gr_unpacked w;
    gr_block b;
    for (uint32_t t = 0; t < SOME; t++)
        sums[t] = _mm512_setzero_ps();
    while (gr_walk_next(&walk, &b)) {
        unpack_block(&walk, &b, ahead, &w);
        for (uint32_t t = 0; t < tokens; t += TILE)
            block_tile(&w, a, token + t, token + tokens, sums + t);
    }
    for (uint32_t t = 0; t < tokens; t++)
        put_panel(m, panel, sums[t], width, y + t * ldy);
}

static void k_gemm(const gr_mat *m, const gr_act *a, uint32_t first, uint32_t token,
                   uint32_t tokens, uint32_t width, float *y, size_t ldy)
{
    if (tokens < TILE / 2) {
        k_gemv(m, a, first, token, tokens, width, y, ldy);
        return;
    }
    for (uint32_t t = 0, n; t < tokens; t += n) {
        n = least(tokens - t, SOME);
        for (uint32_t col = 0; col < width; col += GB_PANEL)
            panel_times(m, a, first + col / GB_PANEL, token + t, n, t == 0, width - col,
                        y + t * ldy + col, ldy);
    }
}

const gr_kernels gr_kernels_avx512 = {.name = "avx512-vnni", .gemv = k_gemv, .gemm = k_gemm};
