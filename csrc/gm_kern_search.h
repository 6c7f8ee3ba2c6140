/* Search of scale and zero point, one lane per matrix row. Included by gm_kern_*.c.
 *
 * A group of 32 weights is written as step * (code - z) with codes 0..15 and z in 0..15.9375. The
 * search tries pairs of bounds (each moved by its own factor), the bounds as they are, and whole
 * lattices (a group that uses only 8..14 steps), refits step and z by weighted least squares for
 * the codes that each pair gives, and keeps the best. Then the row's super-scale is fixed and step
 * and z are brought onto the stored grid, trying the neighbours of the nearest grid point.
 */

typedef struct GM_FN(fit) { /* one lane per row */
    vec step, z, err;
} GM_FN(fit);

typedef struct GM_FN(sums) { /* of q and r = t - code, t = w / step + z */
    vec rr, r, rc, c, cc;
} GM_FN(sums);

/* Residual sums of one candidate; w[32], q[32]. */
GM_INLINE void GM_FN(residuals)(const vec *w, const float *q, vec inv, vec z,
                                GM_FN(sums) *out)
{
    vec rr = {0.0f}, r1 = {0.0f}, rc = {0.0f}, c1 = {0.0f}, cc = {0.0f};
    for (int j = 0; j < GM_GROUP; j++) {
        vec t = w[j] * inv + z;
        vec c = GM_FN(code15)(t);
        vec r = t - c;
        vec qr = r * q[j], qc = c * q[j];
        rr += qr * r;
        r1 += qr;
        rc += qr * c;
        c1 += qc;
        cc += qc * c;
    }
    out->rr = rr;
    out->r = r1;
    out->rc = rc;
    out->c = c1;
    out->cc = cc;
}

/* Tries one (step, z): refit, and replace *best in the lanes where the refit is better. */
GM_INLINE void GM_FN(try_fit)(const vec *w, const float *q, float sq, vec step, vec z,
                              GM_FN(fit) *best)
{
    GM_FN(sums) s;
    GM_FN(residuals)(w, q, 1.0f / step, z, &s);
    vec mean_c = s.c / sq, mean_r = s.r / sq;
    vec var = s.cc - s.c * mean_c;
    vec cov = s.rc - s.r * mean_c;
    ivec spread = var > 1e-6f * sq;
    vec beta = GM_FN(keep)(spread, cov / GM_FN(pick)(spread, var, GM_FN(splat)(1.0f)));
    vec err = s.rr - s.r * mean_r - beta * cov;
    vec grow = 1.0f + beta;
    vec z2 = ((z - mean_r) + beta * mean_c) / grow;
    /* The refit is used only where it stays on the grid; else the candidate counts as it is. */
    ivec fits = (grow > 0.25f) & (z2 >= 0.0f) & (z2 <= GM_Z_MAX);
    err = GM_FN(pick)(fits, err, s.rr);
    err = GM_FN(keep)(err > 0.0f, err) * (step * step);
    ivec better = err < best->err;
    best->err = GM_FN(pick)(better, err, best->err);
    step = GM_FN(pick)(fits, step * grow, step);
    best->step = GM_FN(pick)(better, step, best->step);
    best->z = GM_FN(pick)(better, GM_FN(pick)(fits, z2, z), best->z);
}

/* Best step and z of one group in float, on no grid yet; the largest magnitude of w is 1. */
GM_INLINE GM_FN(fit) GM_FN(best_fit)(const vec *w, const float *q, float sq)
{
    enum { PULLS = 6, LATTICE_FIRST = 8, POLISH = 3 };
    static const float pull[PULLS] = {1.07f, 1.02f, 0.96f, 0.9f, 0.83f, 0.75f};
    vec lo = {0.0f}, hi = {0.0f};
    for (int j = 0; j < GM_GROUP; j++) {
        lo = GM_FN(min)(w[j], lo);
        hi = GM_FN(max)(w[j], hi);
    }
    vec span = hi - lo;
    span = GM_FN(pick)(span > 0.0f, span, GM_FN(splat)(1.0f));
    GM_FN(fit) best = {span / 15.0f, -lo * (15.0f / span), GM_FN(splat)(3e38f)};
    for (int i = 0; i < PULLS; i++) {
        for (int k = 0; k < PULLS; k++) {
            vec a = lo * pull[i], b = hi * pull[k];
            vec range = b - a;
            range = GM_FN(pick)(range > 0.0f, range, GM_FN(splat)(1.0f));
            GM_FN(try_fit)(w, q, sq, range / 15.0f, -a * (15.0f / range), &best);
        }
    }
    for (int n = LATTICE_FIRST; n <= 15; n++) {
        vec step = span / (float)n;
        GM_FN(try_fit)(w, q, sq, step, -lo / step, &best);
    }
    for (int i = 0; i < POLISH; i++) {
        GM_FN(try_fit)(w, q, sq, best.step, best.z, &best);
    }
    return best;
}

/* A group as it will be stored; all values are whole numbers. */
typedef struct GM_FN(grid) {
    vec scale, zp, err;
} GM_FN(grid);

GM_INLINE vec GM_FN(error_at)(const vec *w, const float *q, vec inv, vec z, vec *drift)
{
    vec rr = {0.0f}, r1 = {0.0f};
    for (int j = 0; j < GM_GROUP; j++) {
        vec t = w[j] * inv + z;
        vec r = t - GM_FN(code15)(t);
        vec qr = r * q[j];
        rr += qr * r;
        r1 += qr;
    }
    *drift = r1;
    return rr;
}

GM_INLINE vec GM_FN(whole)(vec x, float lo, float hi) /* round(clamp(x, lo, hi)) */
{
    x = GM_FN(max)(GM_FN(min)(x, GM_FN(splat)(hi)), GM_FN(splat)(lo));
    return (x + GM_ROUND) - GM_ROUND;
}

GM_INLINE void GM_FN(try_grid)(const vec *w, const float *q, vec unit, vec scale, vec zp,
                               GM_FN(grid) *best)
{
    vec step = scale * unit, drift;
    vec err = GM_FN(error_at)(w, q, 1.0f / step, zp * 0.0625f, &drift) * (step * step);
    ivec better = err < best->err;
    best->err = GM_FN(pick)(better, err, best->err);
    best->scale = GM_FN(pick)(better, scale, best->scale);
    best->zp = GM_FN(pick)(better, zp, best->zp);
}

/* Brings a fit onto the grid of scale8 and zp. unit is the step that scale8 = 1 means, in the
 * scaled weights' measure. A group that is written best by zeros gets scale 0. */
GM_INLINE GM_FN(grid) GM_FN(snap)(const vec *w, const float *q, float sq, vec unit,
                                  const GM_FN(fit) *fit)
{
    vec zero = {0.0f};
    GM_FN(grid) best = {zero, zero, GM_FN(splat)(3e38f)};
    vec nearest = GM_FN(whole)(fit->step / unit, 1.0f, 255.0f);
    for (int d = -1; d <= 1; d++) {
        vec scale = GM_FN(whole)(nearest + (float)d, 1.0f, 255.0f);
        vec drift;
        (void)GM_FN(error_at)(w, q, 1.0f / (scale * unit), fit->z, &drift);
        vec zp = GM_FN(whole)((fit->z - drift / sq) * 16.0f, 0.0f, 255.0f);
        GM_FN(try_grid)(w, q, unit, scale, zp, &best);
    }
    vec center = best.zp, scale = best.scale;
    for (int d = -1; d <= 1; d += 2) {
        GM_FN(try_grid)(w, q, unit, scale, GM_FN(whole)(center + (float)d, 0.0f, 255.0f), &best);
    }
    vec none = {0.0f};
    for (int j = 0; j < GM_GROUP; j++) {
        none += (w[j] * q[j]) * w[j];
    }
    ivec used = best.err < none;
    best.scale = GM_FN(keep)(used, best.scale);
    best.zp = GM_FN(keep)(used, best.zp);
    return best;
}

/* q8 group: the scale8 at or above amax / 127 and its lower neighbour. */
GM_INLINE GM_FN(grid) GM_FN(snap_q8)(const vec *w, const float *q, vec unit)
{
    vec zero = {0.0f}, none = {0.0f};
    GM_FN(grid) best = {zero, zero, GM_FN(splat)(3e38f)};
    vec nearest = GM_FN(whole)((1.0f / 127.0f) / unit, 1.0f, 255.0f);
    for (int d = -1; d <= 1; d++) {
        vec scale = GM_FN(whole)(nearest + (float)d, 1.0f, 255.0f);
        vec step = scale * unit, inv = 1.0f / step, rr = {0.0f};
        for (int j = 0; j < GM_GROUP; j++) {
            vec t = w[j] * inv;
            vec r = t - GM_FN(code127)(t);
            rr += (r * q[j]) * r;
        }
        rr *= step * step;
        ivec better = rr < best.err;
        best.err = GM_FN(pick)(better, rr, best.err);
        best.scale = GM_FN(pick)(better, scale, best.scale);
    }
    for (int j = 0; j < GM_GROUP; j++) {
        none += (w[j] * q[j]) * w[j];
    }
    best.scale = GM_FN(keep)(best.err < none, best.scale);
    return best;
}

/* Rows [row, row + GM_V) transposed to tile[cp], zero beyond the matrix. */
GM_INLINE void GM_FN(load_tile)(const float *weights, uint32_t rows, uint32_t cols, uint64_t row,
                                vec *tile)
{
    uint32_t cp = gm_padded(cols);
    float *to = (float *)tile;
    memset(tile, 0, sizeof(vec) * cp);
    for (uint32_t r = 0; r < GM_V && row + r < rows; r++) {
        const float *from = weights + (row + r) * cols;
        for (uint32_t c = 0; c < cols; c++) {
            to[c * GM_V + r] = from[c];
        }
    }
}

/* Largest magnitudes of a group; *bad becomes NaN in a lane that holds NaN or infinity. */
GM_INLINE vec GM_FN(group_amax)(const vec *w, vec *bad)
{
    vec top = {0.0f}, sum = {0.0f};
    for (int j = 0; j < GM_GROUP; j++) {
        top = GM_FN(max)(w[j], top);
        top = GM_FN(max)(-w[j], top);
        sum += w[j] - w[j];
    }
    *bad += sum;
    return GM_FN(keep)(top >= GM_AMAX_MIN, top);
}

/* Divides a group by its largest magnitude; an all-zero lane stays zero. */
GM_INLINE vec GM_FN(scale_group)(const vec *w, vec amax, vec *out)
{
    ivec used = amax > 0.0f;
    vec inv = GM_FN(keep)(used, 1.0f / GM_FN(pick)(used, amax, GM_FN(splat)(1.0f)));
    for (int j = 0; j < GM_GROUP; j++) {
        out[j] = w[j] * inv;
    }
    return GM_FN(pick)(used, amax, GM_FN(splat)(1.0f));
}

GM_INLINE int GM_FN(any_bad)(vec bad)
{
    for (int l = 0; l < GM_V; l++) {
        if (!(bad[l] == 0.0f)) {
            return 1;
        }
    }
    return 0;
}

/* First pass over a tile: a fit for every group and the rows' super-scales. */
GM_TARGET static int32_t GM_FN(fit_tile)(const gm_search_job *job, const vec *tile,
                                         GM_FN(fit) *fits, vec *amax, vec *super)
{
    uint32_t groups = gm_groups(job->out->cols);
    vec bad = {0.0f}, need = {0.0f}, w[GM_GROUP];
    for (uint32_t g = 0; g < groups; g++) {
        const vec *from = tile + g * (uint32_t)GM_GROUP;
        amax[g] = GM_FN(group_amax)(from, &bad);
        vec measure = GM_FN(scale_group)(from, amax[g], w);
        vec wanted = amax[g] / 127.0f;
        if (!gm_is_q8(job->formats, g)) {
            const float *q = job->by.q + g * (uint32_t)GM_GROUP;
            fits[g] = GM_FN(best_fit)(w, q, job->by.sq[g]);
            wanted = GM_FN(keep)(amax[g] > 0.0f, (fits[g].step * measure) * 0.0625f);
        }
        need = GM_FN(max)(wanted, need);
    }
    vec s = need / job->levels;
    *super = GM_FN(keep)(s >= GM_SUPER_MIN, s);
    return GM_FN(any_bad)(bad) ? GM_ERR_NONFINITE : GM_OK;
}

/* Grid point of one group, given the rows' super-scales; w is scaled, measure its unit. */
GM_INLINE GM_FN(grid) GM_FN(place)(const gm_search_job *job, uint32_t g, const vec *w, vec measure,
                                   vec super, const GM_FN(fit) *fit)
{
    const float *q = job->by.q + g * (uint32_t)GM_GROUP;
    ivec alive = super > 0.0f;
    vec unit = GM_FN(pick)(alive, super, GM_FN(splat)(1.0f)) / measure;
    GM_FN(grid) grid = gm_is_q8(job->formats, g)
                           ? GM_FN(snap_q8)(w, q, unit)
                           : GM_FN(snap)(w, q, job->by.sq[g], unit * 16.0f, fit);
    grid.scale = GM_FN(keep)(alive, grid.scale);
    grid.zp = GM_FN(keep)(alive, grid.zp);
    return grid;
}

/* Code of t = w / step + z, or of t = w / step for q8, as the stored byte. */
GM_INLINE vec GM_FN(code)(int q8, vec t)
{
    return q8 ? GM_FN(code127)(t) : GM_FN(code15)(t);
}

GM_INLINE void GM_FN(store_code)(const gm_rows *out, uint64_t row, uint32_t col, vec code,
                                 float add)
{
    uint32_t cp = gm_padded(out->cols);
    for (uint32_t r = 0; r < GM_V && row + r < out->rows; r++) {
        out->codes[(row + r) * cp + col] = (uint8_t)(int32_t)(code[r] + add);
    }
}

GM_INLINE void GM_FN(store_grid)(const gm_rows *out, uint64_t row, uint32_t g,
                                 const GM_FN(grid) *grid)
{
    uint32_t groups = gm_groups(out->cols);
    for (uint32_t r = 0; r < GM_V && row + r < out->rows; r++) {
        out->scales[(row + r) * groups + g] = (uint8_t)(int32_t)grid->scale[r];
        out->zps[(row + r) * groups + g] = (uint8_t)(int32_t)grid->zp[r];
    }
}

/* Codes of a group from scaled weights; lanes with scale 0 get code 0 (q8: 128). */
GM_INLINE void GM_FN(store_codes)(const gm_search_job *job, uint64_t row, uint32_t g, const vec *w,
                                  vec unit, const GM_FN(grid) *grid)
{
    int q8 = gm_is_q8(job->formats, g);
    ivec used = grid->scale > 0.0f;
    vec step = grid->scale * (q8 ? unit : unit * 16.0f);
    vec inv = GM_FN(keep)(used, 1.0f / GM_FN(pick)(used, step, GM_FN(splat)(1.0f)));
    vec z = grid->zp * 0.0625f;
    for (uint32_t j = 0; j < (uint32_t)GM_GROUP; j++) {
        uint32_t col = g * (uint32_t)GM_GROUP + j;
        vec code = {0.0f};
        if (col < job->out->cols) {
            code = GM_FN(code)(q8, w[j] * inv + z);
        }
        GM_FN(store_code)(job->out, row, col, code, q8 && col < job->out->cols ? 128.0f : 0.0f);
    }
}

GM_INLINE void GM_FN(store_supers)(const gm_rows *out, uint64_t row, vec super)
{
    for (uint32_t r = 0; r < GM_V && row + r < out->rows; r++) {
        out->supers[row + r] = super[r];
    }
}

static size_t GM_FN(search_scratch)(uint32_t cols)
{
    return sizeof(vec) * gm_padded(cols) + (sizeof(GM_FN(fit)) + sizeof(vec)) * gm_groups(cols);
}

GM_TARGET static int32_t GM_FN(search)(const void *context, uint64_t item, void *scratch)
{
    const gm_search_job *job = context;
    const gm_rows *out = job->out;
    uint32_t groups = gm_groups(out->cols);
    uint64_t row = item * GM_V;
    vec *tile = scratch;
    vec *amax = tile + gm_padded(out->cols);
    GM_FN(fit) *fits = (GM_FN(fit) *)(amax + groups);
    vec super, w[GM_GROUP];
    GM_FN(load_tile)(job->weights, out->rows, out->cols, row, tile);
    int32_t status = GM_FN(fit_tile)(job, tile, fits, amax, &super);
    if (status != GM_OK) {
        return status;
    }
    GM_FN(store_supers)(out, row, super);
    for (uint32_t g = 0; g < groups; g++) {
        vec measure = GM_FN(scale_group)(tile + g * (uint32_t)GM_GROUP, amax[g], w);
        GM_FN(grid) grid = GM_FN(place)(job, g, w, measure, super, &fits[g]);
        vec unit = GM_FN(pick)(super > 0.0f, super, GM_FN(splat)(1.0f)) / measure;
        GM_FN(store_grid)(out, row, g, &grid);
        GM_FN(store_codes)(job, row, g, w, unit, &grid);
    }
    return GM_OK;
}
