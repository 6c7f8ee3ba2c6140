/* One 8-bit scale a row (embedding and head), one lane per row. Included by gm_kern.h. */

static size_t GM_FN(q8_scratch)(uint32_t cols)
{
    return sizeof(vec) * gm_padded(cols);
}

/* One candidate: codes at this step, refit of the step, weighted error after the refit. */
GM_INLINE void GM_FN(try_q8)(const vec *w, const float *q, uint32_t cols, vec step, vec *best_step,
                             vec *best_err)
{
    vec inv = 1.0f / step, rr = {0.0f}, rc = {0.0f}, cc = {0.0f};
    for (uint32_t c = 0; c < cols; c++) {
        vec t = w[c] * inv;
        vec code = GM_FN(code127)(t);
        vec r = t - code;
        vec qr = r * q[c];
        rr += qr * r;
        rc += qr * code;
        cc += (code * q[c]) * code;
    }
    ivec some = cc > 0.0f;
    vec beta = GM_FN(keep)(some, rc / GM_FN(pick)(some, cc, GM_FN(splat)(1.0f)));
    vec err = (rr - beta * rc) * (step * step);
    ivec better = err < *best_err;
    *best_err = GM_FN(pick)(better, err, *best_err);
    *best_step = GM_FN(pick)(better, step + step * beta, *best_step);
}

GM_TARGET static int32_t GM_FN(q8)(const void *context, uint64_t item, void *scratch)
{
    static const float pull[4] = {1.0f, 0.985f, 0.97f, 0.95f};
    const gm_q8_job *job = context;
    uint32_t cols = job->cols, cp = gm_padded(cols);
    uint64_t row = item * GM_V;
    vec *w = scratch;
    vec amax = {0.0f}, bad = {0.0f};
    GM_FN(load_tile)(job->weights, job->rows, cols, row, w);
    for (uint32_t c = 0; c < cols; c++) {
        amax = GM_FN(max)(w[c], amax);
        amax = GM_FN(max)(-w[c], amax);
        bad += w[c] - w[c];
    }
    if (GM_FN(any_bad)(bad)) {
        return GM_ERR_NONFINITE;
    }
    ivec used = amax >= 127.0f * GM_SUPER_MIN;
    vec measure = GM_FN(pick)(used, amax, GM_FN(splat)(1.0f));
    vec shrink = GM_FN(keep)(used, 1.0f / measure);
    for (uint32_t c = 0; c < cols; c++) {
        w[c] = w[c] * shrink;
    }
    vec step = GM_FN(splat)(1.0f / 127.0f), err = GM_FN(splat)(3e38f);
    for (int i = 0; i < 4; i++) {
        GM_FN(try_q8)(w, job->q, cols, GM_FN(splat)(pull[i] / 127.0f), &step, &err);
    }
    vec super = GM_FN(keep)(used, step * measure);
    super = GM_FN(keep)(super >= GM_SUPER_MIN, super);
    vec inv = GM_FN(keep)(super > 0.0f, 1.0f / step);
    for (uint32_t r = 0; r < GM_V && row + r < job->rows; r++) {
        job->supers[row + r] = super[r];
        memset(job->codes + (row + r) * cp + cols, 0, cp - cols);
    }
    for (uint32_t c = 0; c < cols; c++) {
        vec code = GM_FN(code127)(w[c] * inv) + 128.0f;
        for (uint32_t r = 0; r < GM_V && row + r < job->rows; r++) {
            job->codes[(row + r) * cp + c] = (uint8_t)(int32_t)code[r];
        }
    }
    return GM_OK;
}
