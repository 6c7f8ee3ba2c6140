/* gm_dequant.c: stored rows back to float32, and error sums. */
#include "gm_internal.h"

GM_APART static int32_t dequant_rows(const gm_rows *in, const uint8_t *formats, float *out)
{
    if (in == NULL || out == NULL || in->codes == NULL || in->scales == NULL || in->zps == NULL ||
        in->supers == NULL) {
        return GM_ERR_ARG;
    }
    uint32_t groups = gm_groups(in->cols), cp = gm_padded(in->cols);
    int32_t status = gm_check_shape(in->rows, in->cols);
    status = status == GM_OK ? gm_check_formats(formats, groups) : status;
    for (uint32_t r = 0; status == GM_OK && r < in->rows; r++) {
        for (uint32_t c = 0; c < in->cols; c++) {
            uint32_t g = c / (uint32_t)GM_GROUP;
            size_t at = (size_t)r * groups + g;
            int32_t code = in->codes[(size_t)r * cp + c];
            int32_t number = gm_is_q8(formats, g) ? code - 128 : 16 * code - in->zps[at];
            /* Exact up to the product with the super-scale: |scale * number| < 2^17. */
            out[(size_t)r * in->cols + c] = in->supers[r] * (float)(in->scales[at] * number);
        }
    }
    return status;
}

GM_APART static int32_t dequant_q8_rows(const uint8_t *codes, const float *supers, uint32_t rows,
                                        uint32_t cols, float *out)
{
    int32_t status = codes == NULL || supers == NULL || out == NULL ? GM_ERR_ARG
                                                                    : gm_check_shape(rows, cols);
    uint32_t cp = gm_padded(cols);
    for (uint32_t r = 0; status == GM_OK && r < rows; r++) {
        for (uint32_t c = 0; c < cols; c++) {
            int32_t number = (int32_t)codes[(size_t)r * cp + c] - 128;
            out[(size_t)r * cols + c] = supers[r] * (float)number;
        }
    }
    return status;
}

GM_APART static int32_t dequant_q4raw(const uint8_t *codes, const uint16_t *scales, uint32_t rows,
                                      uint32_t cols, uint32_t format, float *out)
{
    int half = format == (uint32_t)GM_FMT_Q4RAW_F16;
    if (codes == NULL || scales == NULL || out == NULL ||
        (!half && format != (uint32_t)GM_FMT_Q4RAW_BF16)) {
        return GM_ERR_ARG;
    }
    int32_t status = gm_check_shape(rows, cols);
    uint32_t groups = gm_groups(cols), cp = gm_padded(cols);
    for (uint32_t r = 0; status == GM_OK && r < rows; r++) {
        for (uint32_t c = 0; c < cols; c++) {
            uint16_t bits = scales[(size_t)r * groups + c / (uint32_t)GM_GROUP];
            float scale = half ? gm_f16_value(bits) : gm_bf16_value(bits);
            int32_t number = (int32_t)codes[(size_t)r * cp + c] - 8;
            out[(size_t)r * cols + c] = scale * (float)number;
        }
    }
    return status;
}

GM_APART static int32_t error_sums(const float *a, const float *b, const float *importance,
                                   uint32_t rows, uint32_t cols, double *error, double *power)
{
    int32_t status = a == NULL || b == NULL || error == NULL || power == NULL
                         ? GM_ERR_ARG
                         : gm_check_shape(rows, cols);
    for (uint32_t r = 0; status == GM_OK && r < rows; r++) {
        double miss = 0.0, whole = 0.0;
        for (uint32_t c = 0; c < cols; c++) {
            size_t at = (size_t)r * cols + c;
            double q = importance != NULL ? (double)importance[c] : 1.0;
            double d = (double)a[at] - (double)b[at];
            miss += q * (d * d);
            whole += q * ((double)a[at] * (double)a[at]);
        }
        error[r] = miss;
        power[r] = whole;
    }
    return status;
}

int32_t gm_dequant_rows(const gm_rows *in, const uint8_t *formats, float *out)
{
    fenv_t saved;
    gm_fp_enter(&saved);
    int32_t status = dequant_rows(in, formats, out);
    gm_fp_leave(&saved);
    return status;
}

int32_t gm_dequant_q8_rows(const uint8_t *codes, const float *supers, uint32_t rows, uint32_t cols,
                           float *out)
{
    fenv_t saved;
    gm_fp_enter(&saved);
    int32_t status = dequant_q8_rows(codes, supers, rows, cols, out);
    gm_fp_leave(&saved);
    return status;
}

int32_t gm_dequant_q4raw(const uint8_t *codes, const uint16_t *scales, uint32_t rows, uint32_t cols,
                         uint32_t format, float *out)
{
    fenv_t saved;
    gm_fp_enter(&saved);
    int32_t status = dequant_q4raw(codes, scales, rows, cols, format, out);
    gm_fp_leave(&saved);
    return status;
}

int32_t gm_error_sums(const float *a, const float *b, const float *importance, uint32_t rows,
                      uint32_t cols, double *error, double *power)
{
    fenv_t saved;
    gm_fp_enter(&saved);
    int32_t status = error_sums(a, b, importance, rows, cols, error, power);
    gm_fp_leave(&saved);
    return status;
}
