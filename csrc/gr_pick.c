/* gr_pick.c: the kernels of this processor, by layers: what a better instruction set does not do
 * itself is done as the one before does it. All give the same bits, so the choice is of speed. */
#include "gr_internal.h"

#include "gr_kern.h"
#include "gr_port.h"

typedef struct gr_level {
    const gr_kernels *table;
    uint32_t needs; /* gr_cpu bits */
} gr_level;

static const gr_level levels[] = { /* ascending; one name may have several tables in a row */
    {&gr_kernels_base, 0},
#ifndef GR_BASE_ONLY
#if defined(__x86_64__)
    {&gr_kernels_avx2_lanes, GR_CPU_AVX2},
    {&gr_kernels_avx2, GR_CPU_AVX2},
    {&gr_kernels_avx_vnni, GR_CPU_AVX2 | GR_CPU_AVX_VNNI},
    {&gr_kernels_avx512_lanes, GR_CPU_AVX2 | GR_CPU_AVX512_VNNI},
    {&gr_kernels_avx512, GR_CPU_AVX2 | GR_CPU_AVX512_VNNI},
#endif
#if defined(__aarch64__)
    {&gr_kernels_neon, GR_CPU_NEON},
    {&gr_kernels_neon_vec, GR_CPU_NEON},
    {&gr_kernels_dotprod, GR_CPU_NEON | GR_CPU_DOTPROD},
    {&gr_kernels_i8mm, GR_CPU_NEON | GR_CPU_DOTPROD | GR_CPU_I8MM},
#endif
#if defined(__arm__)
    {&gr_kernels_vfpv4, GR_CPU_NEON},
    {&gr_kernels_neon, GR_CPU_NEON},
#endif
#if defined(__riscv)
    {&gr_kernels_v, GR_CPU_RVV},
    {&gr_kernels_rvv, GR_CPU_RVV},
#endif
#endif
};
enum { LEVELS = sizeof levels / sizeof *levels };

static bool runs(const gr_level *l)
{
    return (l->needs & ~gr_port_cpu()) == 0;
}

static bool is_named(const gr_kernels *k, const char *name, size_t size)
{
    return strlen(k->name) == size && memcmp(name, k->name, size) == 0;
}

static void lay_over(gr_kernels *out, const gr_kernels *t)
{
#define TAKE(place) out->place = t->place ? t->place : out->place
    out->name = t->name;
    out->gemv_name = t->gemv ? t->name : out->gemv_name;
    out->gemm_name = t->gemm ? t->name : out->gemm_name;
    TAKE(gemv), TAKE(gemm), TAKE(gemm_float), TAKE(act), TAKE(norm), TAKE(norm_act), TAKE(glu);
    TAKE(rope), TAKE(quantise), TAKE(score), TAKE(score_float), TAKE(value), TAKE(value_float);
    TAKE(softmax), TAKE(finite), TAKE(softcap), TAKE(add), TAKE(divide);
#undef TAKE
}

/* Everything up to the level that is named; size 0: everything that runs. */
static bool lay_up_to(gr_kernels *out, const char *name, size_t size)
{
    bool found = false;
    *out = (gr_kernels){0};
    for (uint32_t i = 0; i < LEVELS; i++) {
        bool named = is_named(levels[i].table, name, size);
        if (found && !named)
            break;
        if (runs(levels + i))
            lay_over(out, levels[i].table), found |= named;
    }
    return found || size == 0;
}

bool gr_kernels_pick(gr_kernels *out, const char *name)
{
    const char *gemv = name ? name : "";
    size_t size = 0;
    while (gemv[size] && gemv[size] != '/')
        size++;
    bool ok = lay_up_to(out, gemv, size) && (size > 0 || !name);
    if (gemv[size] == '/') {
        gr_kernels other;
        const char *gemm = gemv + size + 1;
        ok &= *gemm && lay_up_to(&other, gemm, strlen(gemm));
        if (ok)
            out->gemm = other.gemm, out->gemm_name = other.gemm_name;
    }
    return ok;
}

const char *gr_kernels_at(uint32_t i)
{
    for (uint32_t k = 0; k < LEVELS; k++) {
        const char *name = levels[k].table->name;
        bool first = k == 0 || !is_named(levels[k - 1].table, name, strlen(name));
        if (first && runs(levels + k) && i-- == 0)
            return name;
    }
    return NULL;
}
