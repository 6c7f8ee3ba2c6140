/* gm_float.c: half and bfloat16, round to nearest even, in integer arithmetic. */
#include <string.h>

#include "gm_internal.h"

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static int is_finite(float x)
{
    return (bits_of(x) & 0x7f800000u) != 0x7f800000u;
}

/* value >> shift, rounded to nearest, ties to even; 1 <= shift <= 31. */
static uint32_t shift_even(uint32_t value, uint32_t shift)
{
    uint32_t kept = value >> shift, rest = value & ((1u << shift) - 1u), half = 1u << (shift - 1u);
    return kept + (rest > half || (rest == half && (kept & 1u) != 0u) ? 1u : 0u);
}

/* Beyond the range: infinity; NaN stays NaN. */
uint16_t gm_f16_bits(float x)
{
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    uint32_t out;
    if (magnitude > 0x7f800000u) {
        out = 0x7e00u;
    } else if (magnitude >= 0x47800000u) { /* 65536 */
        out = 0x7c00u;
    } else if (magnitude >= 0x38800000u) { /* 2^-14, normal */
        out = shift_even(magnitude - 0x38000000u, 13u);
    } else if (magnitude < 0x33000000u) { /* below 2^-25 */
        out = 0u;
    } else {
        uint32_t exponent = magnitude >> 23;
        out = shift_even((magnitude & 0x7fffffu) | 0x800000u, 126u - exponent);
    }
    return (uint16_t)(sign | out);
}

float gm_f16_value(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
    if (magnitude >= 0x7c00u) {
        return float_of(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    }
    if (magnitude >= 0x400u) {
        return float_of(sign | ((magnitude << 13) + 0x38000000u));
    }
    float value = (float)magnitude * 5.9604644775390625e-08f; /* 2^-24 */
    return sign != 0u ? -value : value;
}

uint16_t gm_bf16_bits(float x)
{
    uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)(bits >> 16 | 0x40u);
    }
    return (uint16_t)shift_even(bits, 16u);
}

float gm_bf16_value(uint16_t bits)
{
    return float_of((uint32_t)bits << 16);
}

int32_t gm_to_f16(const float *in, uint64_t count, uint16_t *out)
{
    if (in == NULL || out == NULL) {
        return GM_ERR_ARG;
    }
    for (uint64_t i = 0; i < count; i++) {
        out[i] = gm_f16_bits(in[i]);
        if ((out[i] & 0x7c00u) == 0x7c00u) {
            return is_finite(in[i]) ? GM_ERR_RANGE : GM_ERR_NONFINITE;
        }
    }
    return GM_OK;
}

int32_t gm_to_bf16(const float *in, uint64_t count, uint16_t *out)
{
    if (in == NULL || out == NULL) {
        return GM_ERR_ARG;
    }
    for (uint64_t i = 0; i < count; i++) {
        out[i] = gm_bf16_bits(in[i]);
        if ((out[i] & 0x7f80u) == 0x7f80u) {
            return is_finite(in[i]) ? GM_ERR_RANGE : GM_ERR_NONFINITE;
        }
    }
    return GM_OK;
}

void gm_from_f16(const uint16_t *in, uint64_t count, float *out)
{
    for (uint64_t i = 0; i < count; i++) {
        out[i] = gm_f16_value(in[i]);
    }
}

void gm_from_bf16(const uint16_t *in, uint64_t count, float *out)
{
    for (uint64_t i = 0; i < count; i++) {
        out[i] = gm_bf16_value(in[i]);
    }
}

int64_t gm_find_nonfinite(const float *values, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        if (!is_finite(values[i])) {
            return (int64_t)i;
        }
    }
    return -1;
}
