/* gr_kern_avx2.c: products for AVX2 with FMA and F16C, compiled a second time with AVX-VNNI.
 *
 * A register holds 8 rows, half a panel. The two builds differ in how they sum products of bytes:
 * see `dots`. */
#include <immintrin.h>

#include "gr_blocks.h"

#define GR_INLINE static inline __attribute__((always_inline))
#define GR_GLUE2(a, b) a##b
#define GR_GLUE(a, b) GR_GLUE2(a, b)
#ifdef __AVXVNNI__
#define GR_NAME "avx-vnni"
#else
#define GR_NAME "avx2"
#endif

enum {
    HALF = GB_PANEL / 2,
    TILE = 4 /* tokens whose sums stay in registers beside a group's unpacked codes */
};

typedef int32_t gr_quad __attribute__((may_alias)); /* 4 activation codes, read together */

typedef struct gr_steps { /* of a block, a vector a group and half */
    __m256 scale[GB_SUPERBLOCK][2];
    __m256i zero[GB_SUPERBLOCK][2]; /* minus the zero point, in sixteenths: low half of 32 bits */
} gr_steps;

GR_INLINE __m256i bytes8(const uint8_t *p) /* 8 bytes as 32-bit numbers */
{
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
}

GR_INLINE __m256 scale_of(const gr_block *b, uint32_t at)
{
    if (b->format == GB_FMT_Q4H || b->format == GB_FMT_Q8)
        return _mm256_cvtepi32_ps(bytes8(b->meta + at));
    __m128i halves = _mm_loadu_si128((const __m128i *)(const void *)(b->meta + 2 * (size_t)at));
    if (b->format == GB_FMT_Q4RAW_F16)
        return _mm256_cvtph_ps(halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

GR_INLINE void steps_of(const gr_block *b, gr_steps *out)
{
    for (uint32_t i = 0; i < 2 * b->count; i++) {
        __m256i zero = _mm256_set1_epi32(128);
        if (b->format == GB_FMT_Q4H)
            zero = bytes8(b->meta + GB_PANEL * b->count + HALF * i);
        out->zero[i / 2][i % 2] = _mm256_sub_epi16(_mm256_setzero_si256(), zero);
        out->scale[i / 2][i % 2] =
            b->format == GB_FMT_Q8_ROWS ? _mm256_set1_ps(1.0f) : scale_of(b, HALF * i);
    }
}

GR_INLINE __m256i line_at(const uint8_t *p)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)p);
}

#ifdef __AVXVNNI__
/* u[q]: 8 rows x the 4 inputs of quad q, 16 times the code, or the whole code of two planes. */
GR_INLINE void unpack(const uint8_t *high, const uint8_t *low, __m256i u[8])
{
    const __m256i upper = _mm256_set1_epi8((char)0xF0);
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; i++) {
        __m256i h = line_at(high + 64 * i);
        u[i] = _mm256_and_si256(_mm256_slli_epi16(h, 4), upper);
        u[i + 4] = _mm256_and_si256(h, upper);
    }
    if (!low)
        return;
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; i++) {
        __m256i l = line_at(low + 64 * i);
        u[i] = _mm256_or_si256(u[i], _mm256_andnot_si256(upper, l));
        u[i + 4] = _mm256_or_si256(u[i + 4], _mm256_andnot_si256(upper, _mm256_srli_epi16(l, 4)));
    }
}

/* d[t] += 16 * dot of the high plane, + dot of the low one, for tokens at x, x + ldx, .. */
GR_INLINE void dots(const uint8_t *high, const uint8_t *low, const int8_t *x, size_t ldx,
                    uint32_t tokens, __m256i *d)
{
    __m256i u[8];
    unpack(high, low, u);
#pragma GCC unroll 8
    for (uint32_t t = 0; t < tokens; t++, x += ldx) {
        const gr_quad *quad = (const gr_quad *)(const void *)x;
#pragma GCC unroll 8
        for (uint32_t q = 0; q < 8; q++)
            d[t] = _mm256_dpbusd_avx_epi32(d[t], u[q], _mm256_set1_epi32(quad[q]));
    }
}
#else
/* d[t] += weight * dot of one plane. The 8 pairs of products of a row fit into 16 bits together:
 * 16 * 15 * 127 = 30480. */
GR_INLINE void plane(const uint8_t *codes, const int8_t *x, size_t ldx, uint32_t tokens,
                     int16_t weight, __m256i *d)
{
    const __m256i lower = _mm256_set1_epi8(15);
    __m256i u[8];
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; i++) {
        __m256i c = line_at(codes + 64 * i);
        u[i] = _mm256_and_si256(c, lower);
        u[i + 4] = _mm256_and_si256(_mm256_srli_epi16(c, 4), lower);
    }
#pragma GCC unroll 8
    for (uint32_t t = 0; t < tokens; t++) {
        const gr_quad *quad = (const gr_quad *)(const void *)(x + t * ldx);
        __m256i sum = _mm256_maddubs_epi16(u[0], _mm256_set1_epi32(quad[0]));
#pragma GCC unroll 8
        for (uint32_t q = 1; q < 8; q++)
            sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(u[q], _mm256_set1_epi32(quad[q])));
        d[t] = _mm256_add_epi32(d[t], _mm256_madd_epi16(sum, _mm256_set1_epi16(weight)));
    }
}

/* The same result. One token: its codes stay in registers for both planes; the loop keeps a
 * compiler from trying so with more. */
GR_INLINE void dots(const uint8_t *high, const uint8_t *low, const int8_t *x, size_t ldx,
                    uint32_t tokens, __m256i *d)
{
    const uint8_t *planes[] = {high, low};
    if (tokens == 1) {
        plane(high, x, ldx, 1, 16, d);
        if (low)
            plane(low, x, ldx, 1, 1, d);
        return;
    }
    for (uint32_t p = 0; p < 2 && planes[p]; p++)
        plane(planes[p], x, ldx, tokens, p == 0 ? 16 : 1, d);
}
#endif

/* Half a group of a block times `tokens` tokens, added to acc. */
GR_INLINE void group_times(const gr_block *b, const gr_steps *s, uint32_t g, uint32_t half,
                           const gr_act *a, uint32_t token, uint32_t tokens, __m256 *acc)
{
    size_t at = (size_t)token * a->groups + b->group + g, step = b->step * g + 32 * half;
    __m256i d[TILE];
#pragma GCC unroll 8
    for (uint32_t t = 0; t < tokens; t++)
        d[t] = _mm256_madd_epi16(s->zero[g][half], _mm256_set1_epi32(a->asum[at + t * a->groups]));
    dots(b->high + step, b->low ? b->low + step : NULL, a->codes + at * GB_GROUP,
         (size_t)a->groups * GB_GROUP, tokens, d);
#pragma GCC unroll 8
    for (uint32_t t = 0; t < tokens; t++) {
        __m256 p = _mm256_mul_ps(_mm256_cvtepi32_ps(d[t]), s->scale[g][half]);
        acc[t] = _mm256_fmadd_ps(p, _mm256_set1_ps(a->sa[at + t * a->groups]), acc[t]);
    }
}

GR_INLINE void put_panel(const gr_mat *m, uint32_t panel, const __m256 *low, const __m256 *high,
                         uint32_t width, float *y)
{
    const float *super = (const float *)(const void *)(m->data + m->panel * panel);
    float row[GB_PANEL];
    _mm256_storeu_ps(row, _mm256_mul_ps(_mm256_loadu_ps(super), *low));
    _mm256_storeu_ps(row + HALF, _mm256_mul_ps(_mm256_loadu_ps(super + HALF), *high));
    memcpy(y, row, sizeof *y * (width < GB_PANEL ? width : GB_PANEL));
}

/* ---- one token ---- */

/* A block times a token, whose codes both halves share in registers. The scales lie behind the
 * codes, and are read behind them: a processor that fetches ahead by itself goes one way. */
GR_INLINE void block_once(const gr_walk *w, const gr_block *b, const gr_act *a, uint32_t token,
                          __m256 acc[2])
{
    __m256i d[GB_SUPERBLOCK][2];
    gr_steps s;
    size_t at = (size_t)token * a->groups + b->group;
    for (uint32_t g = 0; g < b->count; g++) {
        size_t step = (size_t)b->step * g;
        gr_prefetch_group(w, b, g);
#pragma GCC unroll 2
        for (uint32_t half = 0; half < 2; half++) {
            d[g][half] = _mm256_setzero_si256();
            dots(b->high + step + 32 * half, b->low ? b->low + step + 32 * half : NULL,
                 a->codes + (at + g) * GB_GROUP, 0, 1, &d[g][half]);
        }
    }
    steps_of(b, &s);
    for (uint32_t g = 0; g < b->count; g++)
#pragma GCC unroll 2
        for (uint32_t half = 0; half < 2; half++) {
            __m256i zero = _mm256_madd_epi16(s.zero[g][half], _mm256_set1_epi32(a->asum[at + g]));
            __m256 p = _mm256_cvtepi32_ps(_mm256_add_epi32(d[g][half], zero));
            acc[half] = _mm256_fmadd_ps(_mm256_mul_ps(p, s.scale[g][half]),
                                        _mm256_set1_ps(a->sa[at + g]), acc[half]);
        }
}

/* One panel, or two by turns: of two streams more is fetched ahead than of one. */
static void tile1(const gr_mat *m, const gr_act *a, uint32_t panel, uint32_t token, uint32_t width,
                  float *y)
{
    __m256 acc[2][2] = {{_mm256_setzero_ps(), _mm256_setzero_ps()},
                        {_mm256_setzero_ps(), _mm256_setzero_ps()}};
    uint32_t turns = width > GB_PANEL ? 2 : 1;
    gr_walk walk[2] = {gr_walk_panel(m, panel, turns), gr_walk_panel(m, panel + 1, turns)};
    gr_block b;
    for (uint32_t k = 0; gr_walk_next(&walk[k], &b); k = turns - 1 - k)
        block_once(&walk[k], &b, a, token, acc[k]);
    for (uint32_t k = 0; k < turns; k++)
        put_panel(m, panel + k, &acc[k][0], &acc[k][1], width - GB_PANEL * k, y + GB_PANEL * k);
}

static void k_gemv(const gr_mat *m, const gr_act *a, uint32_t first, uint32_t token,
                   uint32_t tokens, uint32_t width, float *y, size_t ldy)
{
    for (uint32_t t = 0; t < tokens; t++)
        for (uint32_t col = 0; col < width; col += 2 * GB_PANEL)
            tile1(m, a, first + col / GB_PANEL, token + t, width - col, y + t * ldy + col);
}

/* ---- four tokens: a half's weights stay in registers for all of them ---- */

static void tile4(const gr_mat *m, const gr_act *a, uint32_t panel, uint32_t token, bool first,
                  uint32_t width, float *y, size_t ldy)
{
    __m256 acc[2][TILE];
    gr_walk walk = gr_walk_panel(m, panel, 1);
    gr_block b;
    for (uint32_t t = 0; t < TILE; t++)
        acc[0][t] = acc[1][t] = _mm256_setzero_ps();
    while (gr_walk_next(&walk, &b)) {
        gr_steps s;
        steps_of(&b, &s);
        for (uint32_t half = 0; half < 2; half++)
            for (uint32_t g = 0; g < b.count; g++) {
                if (first && half == 0)
                    gr_prefetch_group(&walk, &b, g);
                group_times(&b, &s, g, half, a, token, TILE, acc[half]);
            }
    }
    for (uint32_t t = 0; t < TILE; t++)
        put_panel(m, panel, &acc[0][t], &acc[1][t], width, y + t * ldy);
}

/* Tokens of a panel in tiles. The last tile may overlap the one before: the same numbers again. */
static void panel_times(const gr_mat *m, const gr_act *a, uint32_t panel, uint32_t token,
                        uint32_t tokens, uint32_t width, float *y, size_t ldy)
{
    for (uint32_t t = 0; t < tokens; t += TILE) {
        uint32_t at = tokens - t < TILE ? tokens - TILE : t;
        tile4(m, a, panel, token + at, t == 0, width, y + at * ldy, ldy);
    }
}

static void k_gemm(const gr_mat *m, const gr_act *a, uint32_t first, uint32_t token,
                   uint32_t tokens, uint32_t width, float *y, size_t ldy)
{
    if (tokens < TILE)
        k_gemv(m, a, first, token, tokens, width, y, ldy);
    for (uint32_t col = 0; tokens >= TILE && col < width; col += GB_PANEL)
        panel_times(m, a, first + col / GB_PANEL, token, tokens, width - col, y + col, ldy);
}

const gr_kernels GR_GLUE(gr_kernels_, GR_KERN_SUFFIX) = {
    .name = GR_NAME, .gemv = k_gemv, .gemm = k_gemm,
};
