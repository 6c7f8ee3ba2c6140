/* test_math.c: float primitives against the machine's own arithmetic (NUMERICS.md, sections 1, 2).
 *
 * Square roots and halves are compared with exact integer arithmetic, fmaf with the C library's,
 * which is exact. The polynomials have tests of their own against 40 digits. */
#include <math.h>
#include <stdio.h>

#include "gr_internal.h"
#include "gr_kern.h"

static int failures;
static uint32_t seed = 1;

static uint32_t draw(void)
{
    seed = seed * 1664525u + 1013904223u;
    return seed >> 8 ^ seed << 16;
}

static void expect(bool good, const char *what, uint32_t a, uint32_t b)
{
    if (!good && failures++ < 10)
        fprintf(stderr, "test_math: %s: %08x %08x\n", what, (unsigned)a, (unsigned)b);
}

/* r is the root of x rounded to nearest: (r - half a unit)^2 <= x <= (r + half a unit)^2. */
static void check_root(uint32_t bits)
{
    float x = gr_float(bits), r = gr_sqrtf(x);
    double unit = (double)gr_float(gr_bits(r) + 1) - (double)r;
    double low = (double)r - unit / 2, high = (double)r + unit / 2; /* 25 bits: squares are exact */
    expect(low * low <= (double)x && (double)x <= high * high, "sqrt", bits, gr_bits(r));
}

static void test_sqrt(void)
{
    for (uint32_t b = 0x3F800000u; b < 0x40800000u; b += 5) /* [1, 4) */
        check_root(b);
    for (uint32_t i = 0; i < 200000; i++)
        check_root(draw() % GR_EXPONENT | 1u);
    check_root(1), check_root(0x007FFFFFu), check_root(0x00800000u), check_root(0x7F7FFFFFu);
    expect(gr_bits(gr_sqrtf(0.0f)) == 0, "sqrt of zero", 0, 0);
    expect(gr_bits(gr_sqrtf(-0.0f)) == 0x80000000u, "sqrt of -0", 0, 0);
    float infinite = gr_float(GR_EXPONENT), negative = gr_sqrtf(-1.0f);
    expect(gr_bits(gr_sqrtf(infinite)) == GR_EXPONENT, "sqrt of infinity", 0, 0);
    expect(negative != negative, "sqrt of -1 is a NaN", gr_bits(negative), 0);
}

static void check_fmaf(float x, float y, float z)
{
    uint32_t got = gr_bits(gr_fmaf_soft(x, y, z)), want = gr_bits(fmaf(x, y, z));
    bool both_nan = (got & 0x7FFFFFFFu) > GR_EXPONENT && (want & 0x7FFFFFFFu) > GR_EXPONENT;
    expect(got == want || both_nan, "fmaf", got, want);
}

static void test_fmaf(void)
{
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < 2000000; i++)
        check_fmaf(gr_float(draw()), gr_float(draw()), gr_float(draw()));
    for (uint32_t i = 1; i < 4096; i++) { /* a product just beside half a unit of z */
        float x = (1.0f + (float)i * 0x1p-23f) * 0x1p-12f;
        float y = (1.0f - (float)i * 0x1p-23f) * 0x1p-12f;
        float z = 1.0f + (float)(draw() % 1024) * 0x1p-23f;
        check_fmaf(x, y, z), check_fmaf(-x, y, z), check_fmaf(x, y, -z), check_fmaf(y, y, z);
        wrong += (float)((double)x * (double)y + (double)z) != fmaf(x, y, z);
        check_fmaf(x, gr_float(draw() % 0x3000000u), gr_float(draw() % 0x1000000u)); /* subnormal */
    }
    expect(wrong > 100, "the hard cases catch the form that rounds twice", wrong, 0);
    check_fmaf(0.0f, -1.0f, 0.0f), check_fmaf(0.0f, -1.0f, -0.0f), check_fmaf(1.0f, 1.0f, -1.0f);
}

static void test_half(void)
{
    for (uint32_t h = 0; h < 0x10000u; h++) {
        uint32_t exponent = h >> 10 & 31u, fraction = h & 0x3FFu;
        float value = gr_half((uint16_t)h);
        if (exponent == 31u) {
            expect((value != value) == (fraction != 0), "half", h, gr_bits(value));
            continue;
        }
        double want = exponent ? 1024.0 + fraction : fraction;
        want = ldexp(want, exponent ? (int)exponent - 25 : -24);
        expect((double)value == (h & 0x8000u ? -want : want), "half", h, gr_bits(value));
        expect(gr_to_half(value) == h, "half and back", h, gr_to_half(value));
        /* the middle between two halves goes to the even one, its neighbours to theirs */
        if (exponent < 30 && !(h & 0x8000u)) {
            float next = gr_half((uint16_t)(h + 1)), middle = value + (next - value) / 2;
            uint32_t even = h + (h & 1u);
            expect(gr_to_half(middle) == even, "tie", h, gr_to_half(middle));
            expect(gr_to_half(gr_float(gr_bits(middle) + 1)) == h + 1, "above", h, 0);
            expect(gr_to_half(gr_float(gr_bits(middle) - 1)) == h, "below", h, 0);
        }
    }
    expect(gr_to_half(65519.0f) == 0x7BFFu && gr_to_half(65520.0f) == 0x7C00u, "overflow", 0, 0);
}

int main(void)
{
    test_sqrt();
    test_fmaf();
    test_half();
    if (failures)
        fprintf(stderr, "test_math: %d failures\n", failures);
    return failures != 0;
}
