/* gm_search.c: entry points of the quantisation searches and of error feedback. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gm_internal.h"

static int32_t check_rows(const gm_rows *rows)
{
    if (rows == NULL || rows->codes == NULL || rows->scales == NULL || rows->zps == NULL ||
        rows->supers == NULL) {
        return GM_ERR_ARG;
    }
    return gm_check_shape(rows->rows, rows->cols);
}

static uint64_t tiles_of(uint32_t rows, uint32_t tile)
{
    return ((uint64_t)rows + tile - 1u) / tile;
}

int32_t gm_search_rows(const float *weights, const float *importance, const uint8_t *formats,
                       gm_rows *out, int32_t threads, uint32_t flags)
{
    int32_t status = weights == NULL ? GM_ERR_ARG : check_rows(out);
    status = status == GM_OK ? gm_check_run(threads, flags) : status;
    status = status == GM_OK ? gm_check_formats(formats, gm_groups(out->cols)) : status;
    if (status != GM_OK) {
        return status;
    }
    gm_search_job job = {.weights = weights, .formats = formats, .out = out};
    job.levels = GM_SEARCH_LEVELS;
    status = gm_weighting_make(importance, out->cols, &job.by);
    if (status != GM_OK) {
        return status;
    }
    const gm_kernels *kernels = gm_pick(flags);
    status = gm_run(kernels->search, &job, tiles_of(out->rows, kernels->lanes), threads,
                    kernels->search_scratch(out->cols));
    gm_weighting_free(&job.by);
    return status;
}

/* Importance of a row's columns, the largest 1: a q8 row has one scale, not one per group. */
GM_APART static int32_t scale_importance(const float *importance, uint32_t cols, float *q)
{
    float top = 0.0f;
    for (uint32_t c = 0; c < cols && importance != NULL; c++) {
        if (!(importance[c] >= 0.0f && importance[c] <= 3.4e38f)) {
            return GM_ERR_NONFINITE;
        }
        top = importance[c] > top ? importance[c] : top;
    }
    for (uint32_t c = 0; c < cols; c++) {
        float v = importance != NULL && top > 0.0f ? importance[c] / top : 1.0f;
        q[c] = v > GM_Q_MIN ? v : GM_Q_MIN;
    }
    return GM_OK;
}

int32_t gm_search_q8_rows(const float *weights, const float *importance, uint32_t rows,
                          uint32_t cols, uint8_t *codes, float *supers, int32_t threads,
                          uint32_t flags)
{
    int32_t status = weights == NULL || codes == NULL || supers == NULL
                         ? GM_ERR_ARG
                         : gm_check_shape(rows, cols);
    status = status == GM_OK ? gm_check_run(threads, flags) : status;
    if (status != GM_OK) {
        return status;
    }
    float *q = malloc(sizeof(float) * cols);
    if (q == NULL) {
        return GM_ERR_MEMORY;
    }
    fenv_t saved;
    gm_fp_enter(&saved);
    status = scale_importance(importance, cols, q);
    gm_fp_leave(&saved);
    if (status != GM_OK) {
        free(q);
        return status;
    }
    gm_q8_job job = {weights, rows, cols, q, codes, supers};
    const gm_kernels *kernels = gm_pick(flags);
    status = gm_run(kernels->q8, &job, tiles_of(rows, kernels->lanes), threads,
                    kernels->q8_scratch(cols));
    free(q);
    return status;
}

int32_t gm_hessian_add(double *hessian, const float *x, uint32_t tokens, uint32_t cols,
                       int32_t threads, uint32_t flags)
{
    int32_t status = hessian == NULL || x == NULL ? GM_ERR_ARG : gm_check_run(threads, flags);
    status = status == GM_OK ? gm_check_shape(tokens, cols) : status;
    if (status != GM_OK) {
        return status;
    }
    if (cols > (uint32_t)GM_MAX_GPTQ_COLS) {
        return GM_ERR_LIMIT;
    }
    if (gm_find_nonfinite(x, (uint64_t)tokens * cols) >= 0) {
        return GM_ERR_NONFINITE;
    }
    gm_hessian_job job = {hessian, x, tokens, cols};
    return gm_run(gm_pick(flags)->hessian, &job, gm_tri_items(cols), threads, 0u);
}

uint64_t gm_feedback_floats(uint32_t cols)
{
    if (cols == 0u || cols > (uint32_t)GM_MAX_GPTQ_COLS) {
        return 0u;
    }
    return gm_panel_at(gm_groups(cols));
}

/* Adds the damping to the diagonal; returns it, or a negative number where H is not finite. */
GM_APART static double damp(double *hessian, uint32_t n, double damping)
{
    double sum = 0.0;
    for (uint32_t i = 0; i < n; i++) {
        const double *row = hessian + (size_t)i * n;
        for (uint32_t j = 0; j <= i; j++) {
            if (!(row[j] - row[j] == 0.0)) {
                return -1.0;
            }
        }
        sum += row[i];
    }
    double add = damping * (sum / (double)n);
    add = add > 0.0 ? add : 1.0; /* no calibration token touched any column */
    for (uint32_t i = 0; i < n; i++) {
        hessian[(size_t)i * n + i] += add;
    }
    return add;
}

typedef struct panel_job {
    const double *factor;
    const gm_feedback *out;
} panel_job;

/* Feedback panel of one group of columns: [columns before and in the group][32]. */
static int32_t fill_panel(const void *context, uint64_t item, void *scratch)
{
    const panel_job *job = context;
    uint32_t n = job->out->cols, base = (uint32_t)item * (uint32_t)GM_GROUP;
    float *panel = job->out->panels + gm_panel_at((uint32_t)item);
    (void)scratch;
    memset(panel, 0, sizeof(float) * (base + (uint32_t)GM_GROUP) * (uint32_t)GM_GROUP);
    for (uint32_t j = 0; j < (uint32_t)GM_GROUP && base + j < n; j++) {
        const double *row = job->factor + (size_t)(base + j) * n;
        double pivot = row[base + j];
        job->out->diag[base + j] = (float)(pivot * pivot);
        for (uint32_t i = 0; i < base + j; i++) {
            panel[(size_t)i * GM_GROUP + j] = (float)(row[i] / pivot);
        }
    }
    return GM_OK;
}

/* H + damping = N^T N in place: the block of last rows, then what it leaves to the rows above. */
static int32_t factorise(double *hessian, double damping, uint32_t cols, int32_t threads,
                         const gm_kernels *kernels)
{
    gm_factor_job job = {.hessian = hessian, .cols = cols};
    int32_t status = GM_OK;
    job.floor = damp(hessian, cols, damping);
    if (job.floor < 0.0) {
        return GM_ERR_NONFINITE;
    }
    for (job.last = cols; job.last > 0u && status == GM_OK; job.last = job.first) {
        job.first = job.last > GM_FACTOR_BLOCK ? job.last - GM_FACTOR_BLOCK : 0u;
        kernels->factor_head(&job);
        status = gm_run(kernels->factor_tail, &job, gm_tri_items(job.first), threads, 0u);
    }
    return status;
}

int32_t gm_gptq_prepare(double *hessian, double damping, gm_feedback *out, int32_t threads,
                        uint32_t flags)
{
    if (hessian == NULL || out == NULL || out->panels == NULL || out->diag == NULL ||
        out->cols == 0u || !(damping > 0.0 && damping <= 1.0)) {
        return GM_ERR_ARG;
    }
    if (out->cols > (uint32_t)GM_MAX_GPTQ_COLS) {
        return GM_ERR_LIMIT;
    }
    int32_t status = gm_check_run(threads, flags);
    if (status != GM_OK) {
        return status;
    }
    fenv_t saved;
    gm_fp_enter(&saved);
    status = factorise(hessian, damping, out->cols, threads, gm_pick(flags));
    gm_fp_leave(&saved);
    panel_job panels = {hessian, out};
    return status != GM_OK ? status
                           : gm_run(fill_panel, &panels, gm_groups(out->cols), threads, 0u);
}

int32_t gm_gptq_rows(const float *weights, const gm_feedback *feedback, const uint8_t *formats,
                     gm_rows *out, int32_t threads, uint32_t flags)
{
    int32_t status = weights == NULL || feedback == NULL || feedback->panels == NULL ||
                             feedback->diag == NULL
                         ? GM_ERR_ARG
                         : check_rows(out);
    status = status == GM_OK ? gm_check_run(threads, flags) : status;
    status = status == GM_OK ? gm_check_formats(formats, gm_groups(out->cols)) : status;
    if (status != GM_OK) {
        return status;
    }
    if (feedback->cols != out->cols || out->cols > (uint32_t)GM_MAX_GPTQ_COLS) {
        return GM_ERR_SIZE;
    }
    gm_search_job job = {.weights = weights, .formats = formats, .out = out, .feedback = feedback};
    job.levels = GM_GPTQ_LEVELS;
    status = gm_weighting_make(feedback->diag, out->cols, &job.by);
    if (status != GM_OK) {
        return status;
    }
    const gm_kernels *kernels = gm_pick(flags);
    status = gm_run(kernels->gptq, &job, tiles_of(out->rows, kernels->lanes * GM_GPTQ_SETS),
                    threads, kernels->gptq_scratch(out->cols));
    gm_weighting_free(&job.by);
    return status;
}
