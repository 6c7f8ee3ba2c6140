/* rvv_dots.c: three ways to the dots of a group of q4h codes, one token, vl rows (16 from 256 bits).
 *
 * Counted by mca_armv7_riscv.py, not run: gr_kern_rvv.c has the first, and the second's loads where
 * they are paid once for many tokens. */
#include <riscv_vector.h>
#include <stdint.h>

#define KEEP __attribute__((noinline, used)) static
typedef vint16m1_t dots;

/* A line as it lies, times four activations repeated; narrowing adds. */
KEEP dots as_it_lies(const uint8_t *c, const int32_t *x, size_t vl)
{
    size_t bytes = 4 * vl;
    vint16m4_t s = __riscv_vmv_v_x_i16m4(0, bytes);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        vuint8m2_t w = __riscv_vle8_v_u8m2(c + 64 * i, bytes);
        vint8m2_t l = __riscv_vreinterpret_v_u8m2_i8m2(__riscv_vand_vx_u8m2(w, 15, bytes));
        vint8m2_t h = __riscv_vreinterpret_v_u8m2_i8m2(__riscv_vsrl_vx_u8m2(w, 4, bytes));
        vint32m2_t a = __riscv_vmv_v_x_i32m2(x[i], vl), b = __riscv_vmv_v_x_i32m2(x[i + 4], vl);
        s = __riscv_vwmacc_vv_i16m4(s, l, __riscv_vreinterpret_v_i32m2_i8m2(a), bytes);
        s = __riscv_vwmacc_vv_i16m4(s, h, __riscv_vreinterpret_v_i32m2_i8m2(b), bytes);
    }
    vuint32m4_t four =
        __riscv_vreinterpret_v_u16m4_u32m4(__riscv_vreinterpret_v_i16m4_u16m4(s));
    vuint16m2_t p = __riscv_vadd_vv_u16m2(__riscv_vnsrl_wx_u16m2(four, 0, 2 * vl),
                                          __riscv_vnsrl_wx_u16m2(four, 16, 2 * vl), 2 * vl);
    vuint32m2_t two = __riscv_vreinterpret_v_u16m2_u32m2(p);
    return __riscv_vreinterpret_v_u16m1_i16m1(
        __riscv_vadd_vv_u16m1(__riscv_vnsrl_wx_u16m1(two, 0, vl),
                              __riscv_vnsrl_wx_u16m1(two, 16, vl), vl));
}

/* Inputs parted by a segment load; scalars times rows. */
static inline dots input(dots s, vuint8mf2_t w, const int8_t *x, size_t vl)
{
    vint8mf2_t l = __riscv_vreinterpret_v_u8mf2_i8mf2(__riscv_vand_vx_u8mf2(w, 15, vl));
    vint8mf2_t h = __riscv_vreinterpret_v_u8mf2_i8mf2(__riscv_vsrl_vx_u8mf2(w, 4, vl));
    return __riscv_vwmacc_vx_i16m1(__riscv_vwmacc_vx_i16m1(s, x[0], l, vl), x[16], h, vl);
}

KEEP dots segments(const uint8_t *c, const int8_t *x, size_t vl)
{
    dots s = __riscv_vmv_v_x_i16m1(0, vl);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        vuint8mf2x4_t w = __riscv_vlseg4e8_v_u8mf2x4(c + 64 * i, vl);
        s = input(s, __riscv_vget_v_u8mf2x4_u8mf2(w, 0), x + 4 * i, vl);
        s = input(s, __riscv_vget_v_u8mf2x4_u8mf2(w, 1), x + 4 * i + 1, vl);
        s = input(s, __riscv_vget_v_u8mf2x4_u8mf2(w, 2), x + 4 * i + 2, vl);
        s = input(s, __riscv_vget_v_u8mf2x4_u8mf2(w, 3), x + 4 * i + 3, vl);
    }
    return s;
}

/* Lanes of 16 bits hold four nibbles of two inputs; scalars times lanes, two lanes a row. */
KEEP dots halves(const uint8_t *c, const int8_t *x, size_t vl)
{
    size_t lanes = 2 * vl;
    vuint16m2_t s = __riscv_vmv_v_x_u16m2(0, lanes), t = s;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        vuint16m2_t w = __riscv_vreinterpret_v_u8m2_u16m2(__riscv_vle8_v_u8m2(c + 64 * i, 4 * vl));
        vint32m2_t a = __riscv_vmv_v_x_i32m2(x[4 * i] | (int32_t)x[4 * i + 2] << 16, vl);
        vint32m2_t b = __riscv_vmv_v_x_i32m2(x[4 * i + 1] | (int32_t)x[4 * i + 3] << 16, vl);
        vint32m2_t d = __riscv_vmv_v_x_i32m2(x[4 * i + 16] | (int32_t)x[4 * i + 18] << 16, vl);
        vint32m2_t e = __riscv_vmv_v_x_i32m2(x[4 * i + 17] | (int32_t)x[4 * i + 19] << 16, vl);
        vuint16m2_t n1 = __riscv_vand_vx_u16m2(w, 15, lanes);
        vuint16m2_t n2 = __riscv_vand_vx_u16m2(__riscv_vsrl_vx_u16m2(w, 4, lanes), 15, lanes);
        vuint16m2_t n3 = __riscv_vand_vx_u16m2(__riscv_vsrl_vx_u16m2(w, 8, lanes), 15, lanes);
        vuint16m2_t n4 = __riscv_vsrl_vx_u16m2(w, 12, lanes);
#define LANES(X) __riscv_vreinterpret_v_i16m2_u16m2(__riscv_vreinterpret_v_i32m2_i16m2(X))
        s = __riscv_vmacc_vv_u16m2(s, n1, LANES(a), lanes);
        t = __riscv_vmacc_vv_u16m2(t, n2, LANES(d), lanes);
        s = __riscv_vmacc_vv_u16m2(s, n3, LANES(b), lanes);
        t = __riscv_vmacc_vv_u16m2(t, n4, LANES(e), lanes);
    }
    vuint32m2_t two = __riscv_vreinterpret_v_u16m2_u32m2(__riscv_vadd_vv_u16m2(s, t, lanes));
    return __riscv_vreinterpret_v_u16m1_i16m1(
        __riscv_vadd_vv_u16m1(__riscv_vnsrl_wx_u16m1(two, 0, vl),
                              __riscv_vnsrl_wx_u16m1(two, 16, vl), vl));
}
