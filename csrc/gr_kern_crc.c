/* gr_kern_crc.c: the checksum of much data, by instructions that some processors have for it. Both
 * ways give the polynomial's residue, so that gr_crc.c goes on from there. */
#include <string.h>

#include "gr_internal.h"

#if defined(__x86_64__)
#include <immintrin.h>

enum { STEP = 64 }; /* bytes: four registers */

/* A register moves 64 bytes on: its halves times x^(4 * 128 + 32) and x^(4 * 128 - 32), reduced (V.
 * Gopal and others, "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ", Intel 2009).
 * What is left in the four is as long a message with the same checksum. */
__attribute__((target("pclmul"))) static size_t some(uint32_t *c, const uint8_t *p, size_t size)
{
    const __m128i far = _mm_set_epi64x(0x1C6E41596, 0x154442BD4);
    __m128i x[4];
    uint8_t rest[STEP];
    size_t at = STEP;
    for (uint32_t i = 0; i < 4; i++)
        x[i] = _mm_loadu_si128((const __m128i *)(const void *)(p + 16 * i));
    x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int32_t)*c));
    for (; at + STEP <= size; at += STEP)
#pragma GCC unroll 4
        for (uint32_t i = 0; i < 4; i++) {
            __m128i next = _mm_loadu_si128((const __m128i *)(const void *)(p + at + 16 * i));
            __m128i low = _mm_clmulepi64_si128(x[i], far, 0x00);
            __m128i high = _mm_clmulepi64_si128(x[i], far, 0x11);
            x[i] = _mm_xor_si128(_mm_xor_si128(low, high), next);
        }
    memcpy(rest, x, sizeof rest);
    *c = ~gr_crc32(UINT32_MAX, rest, sizeof rest);
    return at;
}
#elif defined(__aarch64__)
#include <arm_acle.h>

enum { STEP = 8 };

__attribute__((target("arch=armv8-a+crc"))) static size_t some(uint32_t *c, const uint8_t *p,
                                                               size_t size)
{
    size_t at = 0;
    for (; at + STEP <= size; at += STEP) {
        uint64_t eight;
        memcpy(&eight, p + at, sizeof eight);
        *c = __crc32d(*c, eight);
    }
    return at;
}
#else
enum { STEP = 1 };

static size_t some(uint32_t *c, const uint8_t *p, size_t size)
{
    (void)c, (void)p, (void)size;
    return 0;
}
#endif

size_t gr_crc_some(uint32_t *c, const uint8_t *p, size_t size, uint32_t cpu)
{
    return cpu & GR_CPU_CRC && size >= STEP ? some(c, p, size) : 0;
}
