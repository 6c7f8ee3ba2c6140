/* gm_q4raw.c: a 16-bit scale per group, zero point 8. Weights that lie on such a lattice already
 * (quantisation-aware training) come out bit for bit; others get the best scale of a short search.
 */
#include <stdlib.h>
#include <string.h>

#include "gm_internal.h"

typedef struct raw_job {
    const float *weights;
    uint32_t rows, cols, format;
    gm_weighting by;
    uint8_t *codes;
    uint16_t *scales;
    uint32_t *exact;
} raw_job;

static float scale_value(uint32_t format, uint16_t bits)
{
    return format == (uint32_t)GM_FMT_Q4RAW_F16 ? gm_f16_value(bits) : gm_bf16_value(bits);
}

/* Nearest scale of the format; a magnitude beyond it becomes the largest finite one. */
static uint16_t scale_bits(uint32_t format, float x)
{
    uint16_t bits = format == (uint32_t)GM_FMT_Q4RAW_F16 ? gm_f16_bits(x) : gm_bf16_bits(x);
    uint16_t inf = format == (uint32_t)GM_FMT_Q4RAW_F16 ? 0x7c00u : 0x7f80u;
    return (bits & 0x7fffu) >= inf ? (uint16_t)((bits & 0x8000u) | (inf - 1u)) : bits;
}

static float round_code(float t) /* -8..7 */
{
    t = t > 7.0f ? 7.0f : t;
    t = t < -8.0f ? -8.0f : t;
    return (t + 12582912.0f) - 12582912.0f;
}

/* Whether every weight of the group is exactly scale * (-8..7). */
static int is_lattice(const float *w, uint32_t count, float scale)
{
    for (uint32_t j = 0; j < count; j++) {
        if (scale * round_code(w[j] / scale) != w[j]) {
            return 0;
        }
    }
    return 1;
}

/* Weighted error at a stored scale; *refit becomes the least-squares scale for its codes. */
static float group_error(const float *w, const float *q, uint32_t count, float scale, float *refit)
{
    float rr = 0.0f, wc = 0.0f, cc = 0.0f;
    for (uint32_t j = 0; j < count; j++) {
        float c = round_code(w[j] / scale);
        float r = w[j] - scale * c;
        rr += (r * q[j]) * r;
        wc += (w[j] * q[j]) * c;
        cc += (c * q[j]) * c;
    }
    *refit = cc > 0.0f ? wc / cc : scale;
    return rr;
}

static uint16_t best_scale(const raw_job *job, const float *w, const float *q, uint32_t count,
                           float extreme)
{
    static const float levels[10] = {-8.0f, -7.5f, -8.5f, -9.0f, -7.0f,
                                     7.0f,  7.5f,  8.0f,  8.5f,  9.0f};
    uint16_t best = 0;
    float least = 3e38f;
    for (uint32_t i = 0; i < 10u; i++) {
        float start = extreme / levels[i];
        for (uint32_t step = 0; step < 3u; step++) {
            uint16_t bits = scale_bits(job->format, start);
            float scale = scale_value(job->format, bits), refit;
            if (scale == 0.0f) {
                break;
            }
            float error = group_error(w, q, count, scale, &refit);
            if (error < least) {
                least = error;
                best = bits;
            }
            start = refit;
        }
    }
    return best;
}

/* Returns 1 where the group was reproduced exactly. */
static uint32_t raw_group(const raw_job *job, const float *w, const float *q, uint32_t count,
                          uint8_t *codes, uint16_t *out)
{
    float extreme = 0.0f;
    for (uint32_t j = 0; j < count; j++) {
        float a = w[j] < 0.0f ? -w[j] : w[j], b = extreme < 0.0f ? -extreme : extreme;
        extreme = a > b ? w[j] : extreme;
    }
    *out = 0;
    memset(codes, 8, count);
    if (extreme == 0.0f) {
        return 1;
    }
    uint32_t exact = 0;
    for (int32_t level = -8; level <= 7 && exact == 0u; level++) {
        uint16_t bits = level != 0 ? scale_bits(job->format, extreme / (float)level) : 0u;
        float scale = scale_value(job->format, bits);
        if (scale != 0.0f && is_lattice(w, count, scale)) {
            *out = bits;
            exact = 1;
        }
    }
    if (exact == 0u) {
        *out = best_scale(job, w, q, count, extreme);
    }
    float scale = scale_value(job->format, *out);
    for (uint32_t j = 0; j < count && scale != 0.0f; j++) {
        codes[j] = (uint8_t)(int32_t)(round_code(w[j] / scale) + 8.0f);
    }
    return exact;
}

static int32_t raw_row(const void *context, uint64_t item, void *scratch)
{
    const raw_job *job = context;
    uint32_t groups = gm_groups(job->cols), cp = gm_padded(job->cols), exact = 0;
    const float *w = job->weights + item * job->cols;
    uint8_t *codes = job->codes + item * cp;
    (void)scratch;
    if (gm_find_nonfinite(w, job->cols) >= 0) {
        return GM_ERR_NONFINITE;
    }
    for (uint32_t g = 0; g < groups; g++) {
        uint32_t base = g * (uint32_t)GM_GROUP, left = job->cols - base;
        exact += raw_group(job, w + base, job->by.q + base,
                           left < (uint32_t)GM_GROUP ? left : (uint32_t)GM_GROUP, codes + base,
                           job->scales + item * groups + g);
    }
    memset(codes + job->cols, 0, cp - job->cols);
    if (job->exact != NULL) {
        job->exact[item] = exact;
    }
    return GM_OK;
}

int32_t gm_search_q4raw(const float *weights, const float *importance, uint32_t rows, uint32_t cols,
                        uint32_t format, uint8_t *codes, uint16_t *scales, uint32_t *exact,
                        int32_t threads)
{
    if (weights == NULL || codes == NULL || scales == NULL ||
        (format != (uint32_t)GM_FMT_Q4RAW_F16 && format != (uint32_t)GM_FMT_Q4RAW_BF16)) {
        return GM_ERR_ARG;
    }
    int32_t status = gm_check_shape(rows, cols);
    status = status == GM_OK ? gm_check_run(threads, 0u) : status;
    if (status != GM_OK) {
        return status;
    }
    raw_job job = {.weights = weights, .rows = rows, .cols = cols, .format = format};
    job.codes = codes;
    job.scales = scales;
    job.exact = exact;
    status = gm_weighting_make(importance, cols, &job.by);
    if (status == GM_OK) {
        status = gm_run(raw_row, &job, rows, threads, 0u);
        gm_weighting_free(&job.by);
    }
    return status;
}
