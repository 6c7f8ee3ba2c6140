/* gr_lanes_avx512.h: 16 numbers at a time with AVX-512: what gr_kern_lanes.c is written in.
 *
 * gr_lanes_avx2.h has the same names; what each one has to do is said here. `some` variants touch
 * the first n of 16 only; what they do not read is 0. */
#ifndef GR_LANES_AVX512_H
#define GR_LANES_AVX512_H

#include <immintrin.h>

#include "gr_kern.h"

#define GR_INLINE static inline __attribute__((always_inline))
#define GR_LANES_NAME "avx512-vnni"

GR_INLINE float root(float x) /* the square root, correctly rounded */
{
    return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x)));
}

typedef __m512 lanes;
typedef __m512i ilanes;

GR_INLINE __mmask16 first_lanes(uint32_t n)
{
    return (__mmask16)((1u << n) - 1);
}

GR_INLINE lanes load(const float *p) { return _mm512_loadu_ps(p); }
GR_INLINE void store(float *p, lanes x) { _mm512_storeu_ps(p, x); }

GR_INLINE lanes load_some(const float *p, uint32_t n)
{
    return _mm512_maskz_loadu_ps(first_lanes(n), p);
}

GR_INLINE void store_some(float *p, lanes x, uint32_t n)
{
    _mm512_mask_storeu_ps(p, first_lanes(n), x);
}

GR_INLINE lanes all(float x) { return _mm512_set1_ps(x); }
GR_INLINE lanes plus(lanes x, lanes y) { return _mm512_add_ps(x, y); }
GR_INLINE lanes minus(lanes x, lanes y) { return _mm512_sub_ps(x, y); }
GR_INLINE lanes times(lanes x, lanes y) { return _mm512_mul_ps(x, y); }
GR_INLINE lanes over(lanes x, lanes y) { return _mm512_div_ps(x, y); }
GR_INLINE lanes fused(lanes x, lanes y, lanes z) { return _mm512_fmadd_ps(x, y, z); }
GR_INLINE lanes larger(lanes x, lanes y) { return _mm512_max_ps(x, y); }

GR_INLINE lanes where_less(lanes x, lanes y, lanes yes, lanes no) /* x < y ? yes : no */
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), no, yes);
}

GR_INLINE lanes between(uint32_t from, uint32_t end, lanes yes, lanes no) /* lanes from..end */
{
    return _mm512_mask_blend_ps(first_lanes(end) & (__mmask16)~first_lanes(from), no, yes);
}

GR_INLINE ilanes bits_of(lanes x) { return _mm512_castps_si512(x); }
GR_INLINE lanes of_bits(ilanes x) { return _mm512_castsi512_ps(x); }
GR_INLINE ilanes all_bits(uint32_t x) { return _mm512_set1_epi32((int32_t)x); }
GR_INLINE ilanes bits_and(ilanes x, ilanes y) { return _mm512_and_si512(x, y); }
GR_INLINE ilanes bits_or(ilanes x, ilanes y) { return _mm512_or_si512(x, y); }
GR_INLINE ilanes bits_plus(ilanes x, ilanes y) { return _mm512_add_epi32(x, y); }
GR_INLINE ilanes bits_minus(ilanes x, ilanes y) { return _mm512_sub_epi32(x, y); }
GR_INLINE ilanes bits_up23(ilanes x) { return _mm512_slli_epi32(x, 23); }
GR_INLINE ilanes bits_larger(ilanes x, ilanes y) { return _mm512_max_epu32(x, y); }
GR_INLINE uint32_t largest_bits(ilanes x) { return _mm512_reduce_max_epu32(x); }
GR_INLINE int32_t sum_bits(ilanes x) { return _mm512_reduce_add_epi32(x); }
GR_INLINE float largest(lanes x) { return _mm512_reduce_max_ps(x); }

/* The tree of NUMERICS.md, 3.1. */
GR_INLINE float sum(lanes x)
{
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

/* Codes: numbers from -128 to 127, a byte each. */
GR_INLINE void store_codes(int8_t *p, ilanes x, uint32_t n)
{
    _mm_mask_storeu_epi8(p, first_lanes(n), _mm512_cvtepi32_epi8(x));
}

GR_INLINE lanes load_halves(const uint16_t *p, uint32_t n)
{
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}

GR_INLINE lanes load_brains(const uint16_t *p, uint32_t n) /* bfloat16 */
{
    __m512i x = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(n), p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
}

GR_INLINE lanes load_brains_apart(const uint16_t *p, size_t stride, uint32_t n)
{
    const __m512i steps = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i at = _mm512_mullo_epi32(steps, _mm512_set1_epi32((int32_t)stride));
    /* A number is taken with the two bytes before it, which are there: see gr_span. */
    __m512i x = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), first_lanes(n), at, p - 1, 2);
    return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32((int32_t)0xFFFF0000u)));
}

GR_INLINE lanes load_codes(const int8_t *p, uint32_t n)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first_lanes(n), p)));
}

/* ---- dot products of queries with 16 keys ---- */

enum {
    DOT_STEP = 64,   /* codes of a key that are taken at once .. */
    HALF_STEPS = 1,  /* .. also where they are of two groups */
    VALUE_ONE = 4,   /* vectors of sums of one query that stay in registers .. */
    VALUE_MANY = 4,  /* .. and of each of up to four */
    FLOAT_TILE = 8,  /* tokens whose sums do */
};

/* 16 keys' codes plus 128, in sets of 4 keys. 32-bit lane (b, i) of t[4 * set + j] holds codes
 * 16b + 4j.. of key 4 * set + i. */
typedef struct gr_keys {
    __m512i t[16];
} gr_keys;

/* sum[set]: lane (b, i) belongs to key 4 * set + i; the four b are yet to be added. */
typedef struct gr_dots {
    __m512i sum[4];
} gr_dots;

GR_INLINE void clear_dots(gr_dots *d)
{
    d->sum[0] = d->sum[1] = d->sum[2] = d->sum[3] = _mm512_setzero_si512();
}

GR_INLINE __mmask64 first_bytes(uint32_t n)
{
    return n < 64 ? ((__mmask64)1 << n) - 1 : ~(__mmask64)0;
}

/* Codes at..at + n of 16 keys, n <= DOT_STEP; row[i] is where key i begins. */
GR_INLINE void load_keys(const int8_t *const row[16], uint32_t at, uint32_t n, gr_keys *out)
{
    const __m512i offset = _mm512_set1_epi8((char)0x80);
#pragma GCC unroll 4
    for (uint32_t set = 0; set < 4; set++) {
        __m512i x[4], *t = out->t + 4 * set;
#pragma GCC unroll 4
        for (uint32_t i = 0; i < 4; i++)
            x[i] = _mm512_xor_si512(
                _mm512_maskz_loadu_epi8(first_bytes(n), row[4 * set + i] + at), offset);
        __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
        __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
        t[0] = _mm512_unpacklo_epi64(a, c), t[1] = _mm512_unpackhi_epi64(a, c);
        t[2] = _mm512_unpacklo_epi64(b, d), t[3] = _mm512_unpackhi_epi64(b, d);
    }
}

/* d += products with n codes of a query. The keys' 128 is taken away again: 128 * sum of q. */
GR_INLINE void dot_keys(const gr_keys *k, const int8_t *q, uint32_t n, gr_dots *d)
{
    __m512i x = _mm512_maskz_loadu_epi8(first_bytes(n), q), less = _mm512_setzero_si512();
    __m512i p[4] = {_mm512_shuffle_epi32(x, 0x00), _mm512_shuffle_epi32(x, 0x55),
                    _mm512_shuffle_epi32(x, 0xAA), _mm512_shuffle_epi32(x, 0xFF)};
#pragma GCC unroll 4
    for (uint32_t j = 0; j < 4; j++)
        less = _mm512_dpbusd_epi32(less, _mm512_set1_epi8((char)0x80), p[j]);
#pragma GCC unroll 4
    for (uint32_t set = 0; set < 4; set++) {
        __m512i sum = _mm512_sub_epi32(d->sum[set], less);
#pragma GCC unroll 4
        for (uint32_t j = 0; j < 4; j++)
            sum = _mm512_dpbusd_epi32(sum, k->t[4 * set + j], p[j]);
        d->sum[set] = sum;
    }
}

GR_INLINE __m512i add_parts(__m512i x, __m512i y) /* neighbouring quarters: of x, then of y */
{
    return _mm512_add_epi32(_mm512_shuffle_i32x4(x, y, 0x88), _mm512_shuffle_i32x4(x, y, 0xDD));
}

GR_INLINE lanes dots_of(const gr_dots *d) /* a lane a key */
{
    return _mm512_cvtepi32_ps(
        add_parts(add_parts(d->sum[0], d->sum[1]), add_parts(d->sum[2], d->sum[3])));
}

GR_INLINE lanes half_dots(const gr_dots *d, bool second) /* of half of a step's codes */
{
    __m512i x = add_parts(d->sum[0], d->sum[1]), y = add_parts(d->sum[2], d->sum[3]);
    return _mm512_cvtepi32_ps(second ? _mm512_shuffle_i32x4(x, y, 0xDD)
                                     : _mm512_shuffle_i32x4(x, y, 0x88));
}

#endif
