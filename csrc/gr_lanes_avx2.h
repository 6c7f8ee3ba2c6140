/* gr_lanes_avx2.h: 16 numbers at a time with AVX2 and FMA; gr_lanes_avx512.h says what is what. */
#ifndef GR_LANES_AVX2_H
#define GR_LANES_AVX2_H

#include <immintrin.h>

#include "gr_kern.h"

#define GR_INLINE static inline __attribute__((always_inline))
#define GR_LANES_NAME "avx2"

GR_INLINE float root(float x)
{
    return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x)));
}

typedef struct lanes {
    __m256 a, b; /* lanes 0..7, lanes 8..15 */
} lanes;

typedef struct ilanes {
    __m256i a, b;
} ilanes;

GR_INLINE lanes load(const float *p)
{
    return (lanes){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}

GR_INLINE void store(float *p, lanes x)
{
    _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b);
}

GR_INLINE ilanes first_lanes(uint32_t n) /* all bits set in the first n */
{
    __m256i count = _mm256_set1_epi32((int32_t)n);
    return (ilanes){
        _mm256_cmpgt_epi32(count, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
        _mm256_cmpgt_epi32(count, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15))};
}

GR_INLINE lanes load_some(const float *p, uint32_t n)
{
    ilanes wanted = first_lanes(n);
    return (lanes){_mm256_maskload_ps(p, wanted.a), _mm256_maskload_ps(p + 8, wanted.b)};
}

GR_INLINE void store_some(float *p, lanes x, uint32_t n)
{
    ilanes wanted = first_lanes(n);
    if (n == 16) { /* a store with a mask is slow on some processors */
        store(p, x);
        return;
    }
    _mm256_maskstore_ps(p, wanted.a, x.a), _mm256_maskstore_ps(p + 8, wanted.b, x.b);
}

GR_INLINE lanes all(float x)
{
    __m256 v = _mm256_set1_ps(x);
    return (lanes){v, v};
}

GR_INLINE lanes plus(lanes x, lanes y)
{
    return (lanes){_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}

GR_INLINE lanes minus(lanes x, lanes y)
{
    return (lanes){_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}

GR_INLINE lanes times(lanes x, lanes y)
{
    return (lanes){_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}

GR_INLINE lanes over(lanes x, lanes y)
{
    return (lanes){_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}

GR_INLINE lanes fused(lanes x, lanes y, lanes z)
{
    return (lanes){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}

GR_INLINE lanes larger(lanes x, lanes y)
{
    return (lanes){_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}

GR_INLINE lanes where_less(lanes x, lanes y, lanes yes, lanes no)
{
    return (lanes){_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
                   _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}

GR_INLINE lanes between(uint32_t from, uint32_t end, lanes yes, lanes no)
{
    ilanes f = first_lanes(from), e = first_lanes(end);
    return (lanes){
        _mm256_blendv_ps(no.a, yes.a, _mm256_castsi256_ps(_mm256_andnot_si256(f.a, e.a))),
        _mm256_blendv_ps(no.b, yes.b, _mm256_castsi256_ps(_mm256_andnot_si256(f.b, e.b)))};
}

GR_INLINE ilanes bits_of(lanes x)
{
    return (ilanes){_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)};
}

GR_INLINE lanes of_bits(ilanes x)
{
    return (lanes){_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)};
}

GR_INLINE ilanes all_bits(uint32_t x)
{
    __m256i v = _mm256_set1_epi32((int32_t)x);
    return (ilanes){v, v};
}

GR_INLINE ilanes bits_and(ilanes x, ilanes y)
{
    return (ilanes){_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)};
}

GR_INLINE ilanes bits_or(ilanes x, ilanes y)
{
    return (ilanes){_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)};
}

GR_INLINE ilanes bits_plus(ilanes x, ilanes y)
{
    return (ilanes){_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}

GR_INLINE ilanes bits_minus(ilanes x, ilanes y)
{
    return (ilanes){_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)};
}

GR_INLINE ilanes bits_up23(ilanes x)
{
    return (ilanes){_mm256_slli_epi32(x.a, 23), _mm256_slli_epi32(x.b, 23)};
}

GR_INLINE ilanes bits_larger(ilanes x, ilanes y)
{
    return (ilanes){_mm256_max_epu32(x.a, y.a), _mm256_max_epu32(x.b, y.b)};
}

GR_INLINE uint32_t largest_bits(ilanes x)
{
    __m256i a = _mm256_max_epu32(x.a, x.b);
    __m128i b = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    b = _mm_max_epu32(b, _mm_shuffle_epi32(b, 0x4E));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(b, _mm_shuffle_epi32(b, 0xB1)));
}

GR_INLINE int32_t sum_bits(ilanes x)
{
    __m256i a = _mm256_add_epi32(x.a, x.b);
    __m128i b = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    b = _mm_add_epi32(b, _mm_shuffle_epi32(b, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(b, _mm_shuffle_epi32(b, 0xB1)));
}

GR_INLINE float largest(lanes x)
{
    __m256 a = _mm256_max_ps(x.a, x.b);
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

GR_INLINE float sum(lanes x)
{
    __m256 a = _mm256_add_ps(x.a, x.b);
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

GR_INLINE void store_codes(int8_t *p, ilanes x, uint32_t n)
{
    __m256i y = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);
    int8_t all16[16];
    __m128i z = _mm_packs_epi16(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
    _mm_storeu_si128((__m128i *)(void *)(n == 16 ? p : all16), z);
    if (n < 16)
        memcpy(p, all16, n);
}

GR_INLINE lanes load_halves(const uint16_t *p, uint32_t n)
{
    uint16_t some[16] = {0};
    if (n < 16)
        memcpy(some, p, n * sizeof *p), p = some;
    return (lanes){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p)),
                   _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(p + 8)))};
}

GR_INLINE __m256 brains8(__m128i x)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}

GR_INLINE lanes load_brains(const uint16_t *p, uint32_t n)
{
    uint16_t some[16] = {0};
    if (n < 16)
        memcpy(some, p, n * sizeof *p), p = some;
    return (lanes){brains8(_mm_loadu_si128((const __m128i *)(const void *)p)),
                   brains8(_mm_loadu_si128((const __m128i *)(const void *)(p + 8)))};
}

GR_INLINE lanes load_brains_apart(const uint16_t *p, size_t stride, uint32_t n)
{
    float x[16] = {0.0f};
    for (uint32_t i = 0; i < n; i++)
        x[i] = gr_bf16(p[i * stride]);
    return load(x);
}

GR_INLINE lanes load_codes(const int8_t *p, uint32_t n)
{
    int8_t some[16] = {0};
    if (n < 16)
        memcpy(some, p, n), p = some;
    __m128i x = _mm_loadu_si128((const __m128i *)(const void *)p);
    return (lanes){_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)),
                   _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}

/* ---- dot products of queries with 16 keys ---- */

enum {
    DOT_STEP = 32,
    HALF_STEPS = 0, /* no cache has groups of 16, but where it is the whole head */
    VALUE_ONE = 2,
    VALUE_MANY = 1,
    FLOAT_TILE = 4,
};

/* As with AVX-512, but a vector has two 128-bit parts, and codes stay signed. */
typedef struct gr_keys {
    __m256i t[16];
} gr_keys;

typedef struct gr_dots {
    __m256i sum[4];
} gr_dots;

GR_INLINE void clear_dots(gr_dots *d)
{
    d->sum[0] = d->sum[1] = d->sum[2] = d->sum[3] = _mm256_setzero_si256();
}

GR_INLINE __m256i load_bytes(const int8_t *p, uint32_t n)
{
    int8_t some[32] = {0};
    if (n < 32)
        memcpy(some, p, n), p = some;
    return _mm256_loadu_si256((const __m256i *)(const void *)p);
}

GR_INLINE void load_keys(const int8_t *const row[16], uint32_t at, uint32_t n, gr_keys *out)
{
    for (uint32_t set = 0; set < 4; set++) {
        __m256i x[4], *t = out->t + 4 * set;
        for (uint32_t i = 0; i < 4; i++)
            x[i] = load_bytes(row[4 * set + i] + at, n);
        __m256i a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpackhi_epi32(x[0], x[1]);
        __m256i c = _mm256_unpacklo_epi32(x[2], x[3]), d = _mm256_unpackhi_epi32(x[2], x[3]);
        t[0] = _mm256_unpacklo_epi64(a, c), t[1] = _mm256_unpackhi_epi64(a, c);
        t[2] = _mm256_unpacklo_epi64(b, d), t[3] = _mm256_unpackhi_epi64(b, d);
    }
}

/* |k| * (q with the sign of k): two products are at most 2 * 127 * 127 and fit into 16 bits. */
GR_INLINE void dot_keys(const gr_keys *k, const int8_t *q, uint32_t n, gr_dots *d)
{
    __m256i x = load_bytes(q, n), ones = _mm256_set1_epi16(1);
    __m256i p[4] = {_mm256_shuffle_epi32(x, 0x00), _mm256_shuffle_epi32(x, 0x55),
                    _mm256_shuffle_epi32(x, 0xAA), _mm256_shuffle_epi32(x, 0xFF)};
    for (uint32_t set = 0; set < 4; set++) {
        __m256i total = d->sum[set];
#pragma GCC unroll 4
        for (uint32_t j = 0; j < 4; j++) {
            __m256i t = k->t[4 * set + j];
            __m256i two = _mm256_maddubs_epi16(_mm256_abs_epi8(t), _mm256_sign_epi8(p[j], t));
            total = _mm256_add_epi32(total, _mm256_madd_epi16(two, ones));
        }
        d->sum[set] = total;
    }
}

GR_INLINE __m256i add_parts(__m256i x, __m256i y) /* halves: of x, then of y */
{
    return _mm256_add_epi32(_mm256_permute2x128_si256(x, y, 0x20),
                            _mm256_permute2x128_si256(x, y, 0x31));
}

GR_INLINE lanes dots_of(const gr_dots *d)
{
    return (lanes){_mm256_cvtepi32_ps(add_parts(d->sum[0], d->sum[1])),
                   _mm256_cvtepi32_ps(add_parts(d->sum[2], d->sum[3]))};
}

GR_INLINE lanes half_dots(const gr_dots *d, bool second)
{
    const __m256i *x = d->sum;
    if (second)
        return (lanes){_mm256_cvtepi32_ps(_mm256_permute2x128_si256(x[0], x[1], 0x31)),
                       _mm256_cvtepi32_ps(_mm256_permute2x128_si256(x[2], x[3], 0x31))};
    return (lanes){_mm256_cvtepi32_ps(_mm256_permute2x128_si256(x[0], x[1], 0x20)),
                   _mm256_cvtepi32_ps(_mm256_permute2x128_si256(x[2], x[3], 0x20))};
}

#endif
