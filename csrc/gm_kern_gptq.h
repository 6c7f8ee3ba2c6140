/* Rounding with error feedback, one lane per matrix row. Included by gm_kern.h.
 *
 * With H = N^T N (N lower triangular) the loss (w - v) H (w - v)^T is the sum over columns k of
 * N[k][k]^2 * (w[k] + sum over i < k of (w[i] - v[i]) * N[k][i] / N[k][k] - v[k])^2. So column k is
 * rounded after adding the weighted errors of all columns before it, N[k][k]^2 is its importance,
 * and no inverse of H is needed.
 */

enum { GM_FN(AHEAD) = 512 }; /* columns of errors that stay in the first cache */

/* sum[k] += error[i] * panel[i][k] for i = from..to-1 ascending, k = 0..31. */
GM_INLINE void GM_FN(feed)(const vec *error, const float *panel, uint32_t from, uint32_t to,
                           vec *sum)
{
    for (int k = 0; k < GM_GROUP; k += 8) {
        vec s0 = sum[k], s1 = sum[k + 1], s2 = sum[k + 2], s3 = sum[k + 3];
        vec s4 = sum[k + 4], s5 = sum[k + 5], s6 = sum[k + 6], s7 = sum[k + 7];
        for (uint32_t i = from; i < to; i++) {
            const float *a = panel + (size_t)i * GM_GROUP + k;
            vec e = error[i];
            s0 += e * a[0];
            s1 += e * a[1];
            s2 += e * a[2];
            s3 += e * a[3];
            s4 += e * a[4];
            s5 += e * a[5];
            s6 += e * a[6];
            s7 += e * a[7];
        }
        sum[k] = s0, sum[k + 1] = s1, sum[k + 2] = s2, sum[k + 3] = s3;
        sum[k + 4] = s4, sum[k + 5] = s5, sum[k + 6] = s6, sum[k + 7] = s7;
    }
}

/* Rounds the columns of group g one after another at the given grid point. sum[32] holds the
 * errors fed from earlier groups; w[32] the original weights, d[32] the importance. Writes codes
 * and errors and returns the group's loss. */
GM_INLINE vec GM_FN(round_group)(const vec *w, const vec *fed, const float *panel, const float *d,
                                 int q8, vec super, const GM_FN(grid) *grid, vec *codes,
                                 vec *error)
{
    vec sum[GM_GROUP], loss = {0.0f};
    ivec used = grid->scale > 0.0f;
    vec step = grid->scale * (q8 ? super : super * 16.0f);
    vec inv = GM_FN(keep)(used, 1.0f / GM_FN(pick)(used, step, GM_FN(splat)(1.0f)));
    vec z = grid->zp * 0.0625f;
    memcpy(sum, fed, sizeof sum);
    for (int j = 0; j < GM_GROUP; j++) {
        vec want = w[j] + sum[j];
        vec code = GM_FN(code)(q8, want * inv + z);
        vec number = q8 ? code : code * 16.0f - grid->zp;
        vec value = super * (grid->scale * number);
        vec miss = want - value;
        codes[j] = code;
        error[j] = w[j] - value;
        loss += (miss * d[j]) * miss;
        for (int k = j + 1; k < GM_GROUP; k++) {
            sum[k] += error[j] * panel[(size_t)j * GM_GROUP + (size_t)k];
        }
    }
    return loss;
}

/* A group of one tile as it is rounded at a grid point. */
typedef struct GM_FN(rounded) {
    GM_FN(grid) grid;
    vec codes[GM_GROUP], error[GM_GROUP], loss;
} GM_FN(rounded);

/* Rounds at a moved grid point and keeps it in the lanes where it loses less. */
GM_INLINE void GM_FN(try_rounding)(const vec *w, const vec *fed, const float *panel,
                                   const float *d, vec super, vec scale, vec zp,
                                   GM_FN(rounded) *best)
{
    GM_FN(rounded) other;
    ivec used = best->grid.scale > 0.0f;
    other.grid.scale = GM_FN(keep)(used, GM_FN(whole)(scale, 1.0f, 255.0f));
    other.grid.zp = GM_FN(keep)(used, GM_FN(whole)(zp, 0.0f, 255.0f));
    other.loss =
        GM_FN(round_group)(w, fed, panel, d, 0, super, &other.grid, other.codes, other.error);
    ivec better = other.loss < best->loss;
    best->loss = GM_FN(pick)(better, other.loss, best->loss);
    best->grid.scale = GM_FN(pick)(better, other.grid.scale, best->grid.scale);
    best->grid.zp = GM_FN(pick)(better, other.grid.zp, best->grid.zp);
    for (int j = 0; j < GM_GROUP; j++) {
        best->codes[j] = GM_FN(pick)(better, other.codes[j], best->codes[j]);
        best->error[j] = GM_FN(pick)(better, other.error[j], best->error[j]);
    }
}

/* The search weighs columns one by one; only rounding shows what feedback inside of the group makes
 * up for. So a q4h group is rounded at some scales near the searched one, then at some zero points
 * near its own. */
GM_INLINE void GM_FN(round_near)(const vec *w, const vec *fed, const float *panel, const float *d,
                                 vec super, GM_FN(rounded) *best)
{
    enum { SCALES = 6, SHIFTS = 4 };
    static const float factor[SCALES] = {0.94f, 0.96f, 0.98f, 1.02f, 1.04f, 1.06f};
    static const float shift[SHIFTS] = {-4.0f, -2.0f, 2.0f, 4.0f};
    GM_FN(grid) from = best->grid;
    for (int i = 0; i < SCALES; i++) {
        GM_FN(try_rounding)(w, fed, panel, d, super, from.scale * factor[i], from.zp, best);
    }
    from = best->grid;
    for (int i = 0; i < SHIFTS; i++) {
        GM_FN(try_rounding)(w, fed, panel, d, super, from.scale, from.zp + shift[i], best);
    }
}

/* One group of one tile: search on the fed weights, then rounding; best of a few grid points. */
GM_INLINE void GM_FN(enter_group)(const gm_search_job *job, uint64_t row, uint32_t g, const vec *w,
                                  const vec *fed, vec super, vec *error)
{
    uint32_t base = g * (uint32_t)GM_GROUP;
    const float *panel = job->feedback->panels + gm_panel_at(g) + (size_t)base * GM_GROUP;
    const float *d = job->by.q + base;
    int q8 = gm_is_q8(job->formats, g);
    vec now[GM_GROUP], scaled[GM_GROUP], bad = {0.0f};
    for (int j = 0; j < GM_GROUP; j++) {
        now[j] = w[j] + fed[j];
    }
    vec measure = GM_FN(scale_group)(now, GM_FN(group_amax)(now, &bad), scaled);
    GM_FN(fit) fit;
    memset(&fit, 0, sizeof fit);
    if (!q8) {
        fit = GM_FN(best_fit)(scaled, d, job->by.sq[g]);
    }
    GM_FN(rounded) best;
    best.grid = GM_FN(place)(job, g, scaled, measure, super, &fit);
    best.loss =
        GM_FN(round_group)(w, fed, panel, d, q8, super, &best.grid, best.codes, best.error);
    if (!q8) {
        GM_FN(round_near)(w, fed, panel, d, super, &best);
    }
    memcpy(error, best.error, sizeof best.error);
    GM_FN(store_grid)(job->out, row, g, &best.grid);
    for (uint32_t j = 0; j < (uint32_t)GM_GROUP; j++) {
        int real = base + j < job->out->cols;
        vec code = best.codes[j];
        GM_FN(store_code)(job->out, row, base + j, real ? code : code - code,
                          q8 && real ? 128.0f : 0.0f);
    }
}

static size_t GM_FN(gptq_scratch)(uint32_t cols)
{
    size_t tile = sizeof(vec) * gm_padded(cols) * 2u; /* weights and errors */
    return tile * GM_GPTQ_SETS +
           (sizeof(GM_FN(fit)) + sizeof(vec)) * gm_groups(cols); /* first pass */
}

/* Errors of all columns before group g, for every tile of the item. */
GM_INLINE void GM_FN(feed_sets)(const float *panel, uint32_t until, size_t cp, const vec *errors,
                                vec fed[GM_GPTQ_SETS][GM_GROUP])
{
    memset(fed, 0, sizeof(vec) * GM_GPTQ_SETS * GM_GROUP);
    for (uint32_t from = 0; from < until; from += GM_FN(AHEAD)) {
        uint32_t to = from + GM_FN(AHEAD) < until ? from + GM_FN(AHEAD) : until;
        for (uint32_t s = 0; s < GM_GPTQ_SETS; s++) {
            GM_FN(feed)(errors + s * cp, panel, from, to, fed[s]);
        }
    }
}

GM_TARGET static int32_t GM_FN(gptq)(const void *context, uint64_t item, void *scratch)
{
    const gm_search_job *job = context;
    const gm_rows *out = job->out;
    size_t cp = gm_padded(out->cols);
    uint32_t groups = gm_groups(out->cols);
    uint64_t row = item * (GM_GPTQ_SETS * GM_V);
    vec *tiles = scratch;
    vec *errors = tiles + cp * GM_GPTQ_SETS;
    vec *amax = errors + cp * GM_GPTQ_SETS;
    GM_FN(fit) *fits = (GM_FN(fit) *)(amax + groups);
    vec super[GM_GPTQ_SETS], fed[GM_GPTQ_SETS][GM_GROUP];
    for (uint32_t s = 0; s < GM_GPTQ_SETS; s++) {
        uint64_t first = row + s * GM_V;
        GM_FN(load_tile)(job->weights, out->rows, out->cols, first, tiles + s * cp);
        int32_t status = GM_FN(fit_tile)(job, tiles + s * cp, fits, amax, &super[s]);
        if (status != GM_OK) {
            return status;
        }
        GM_FN(store_supers)(out, first, super[s]);
    }
    for (uint32_t g = 0; g < groups; g++) {
        uint32_t base = g * (uint32_t)GM_GROUP;
        GM_FN(feed_sets)(job->feedback->panels + gm_panel_at(g), base, cp, errors, fed);
        for (uint32_t s = 0; s < GM_GPTQ_SETS; s++) {
            GM_FN(enter_group)(job, row + s * GM_V, g, tiles + s * cp + base, fed[s], super[s],
                               errors + s * cp + base);
        }
    }
    return GM_OK;
}
