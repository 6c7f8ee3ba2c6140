/* Sums over lower triangles: Hessian accumulation and the trailing update of the factorisation.
 * Included by gm_kern.h. One lane per matrix column; every element has its own fixed order, so the
 * blocks of work may be taken in any order. */

#define GM_HALF (GM_V / 2) /* doubles of a dvec */

typedef struct GM_FN(block) {
    uint32_t row, row_end, col, col_end;
} GM_FN(block);

/* The item's block of the lower triangle of n x n; 0 where it lies above the diagonal. */
static inline int GM_FN(tri_block)(uint64_t item, uint32_t n, GM_FN(block) *out)
{
    uint32_t down = (n + GM_TRI_ROWS - 1u) / GM_TRI_ROWS;
    uint32_t across = (uint32_t)(item / down);
    out->row = (down - 1u - (uint32_t)(item % down)) * GM_TRI_ROWS; /* longest rows first */
    out->col = across * GM_TRI_COLS;
    out->row_end = out->row + GM_TRI_ROWS < n ? out->row + GM_TRI_ROWS : n;
    out->col_end = out->col + GM_TRI_COLS < n ? out->col + GM_TRI_COLS : n;
    return out->row_end > out->col;
}

/* Sums over one block of at most 32 tokens for rows i..i+3 and columns j..j+2V-1. */
GM_INLINE void GM_FN(hessian_tile)(const float *x, uint32_t tokens, uint32_t cols, uint32_t i,
                                   uint32_t j, double *hessian)
{
    vec sum[4][2];
    memset(sum, 0, sizeof sum);
    for (uint32_t t = 0; t < tokens; t++) {
        const float *from = x + (size_t)t * cols;
        vec a, b;
        memcpy(&a, from + j, sizeof a);
        memcpy(&b, from + j + GM_V, sizeof b);
        for (uint32_t r = 0; r < 4u; r++) {
            sum[r][0] += a * from[i + r];
            sum[r][1] += b * from[i + r];
        }
    }
    for (uint32_t r = 0; r < 4u; r++) {
        double *to = hessian + (size_t)(i + r) * cols + j;
        for (uint32_t l = 0; l < GM_V; l++) {
            to[l] += (double)sum[r][0][l];
            to[l + GM_V] += (double)sum[r][1][l];
        }
    }
}

GM_INLINE void GM_FN(hessian_one)(const float *x, uint32_t tokens, uint32_t cols, uint32_t i,
                                  uint32_t j, double *hessian)
{
    float sum = 0.0f;
    for (uint32_t t = 0; t < tokens; t++) {
        sum += x[(size_t)t * cols + j] * x[(size_t)t * cols + i];
    }
    hessian[(size_t)i * cols + j] += (double)sum;
}

/* All elements of a block for one block of tokens. */
GM_INLINE void GM_FN(hessian_block)(const float *x, uint32_t tokens, uint32_t cols,
                                    const GM_FN(block) *block, double *hessian)
{
    uint32_t i = block->row;
    for (; i + 4u <= block->row_end; i += 4u) {
        uint32_t end = block->col_end < i + 4u ? block->col_end : i + 4u;
        uint32_t j = block->col;
        for (; j < end && j + 2u * GM_V <= cols; j += 2u * GM_V) {
            GM_FN(hessian_tile)(x, tokens, cols, i, j, hessian);
        }
        for (; j < end; j++) {
            for (uint32_t r = 0; r < 4u; r++) {
                GM_FN(hessian_one)(x, tokens, cols, i + r, j, hessian);
            }
        }
    }
    for (; i < block->row_end; i++) {
        for (uint32_t j = block->col; j < block->col_end && j <= i; j++) {
            GM_FN(hessian_one)(x, tokens, cols, i, j, hessian);
        }
    }
}

GM_TARGET static int32_t GM_FN(hessian)(const void *context, uint64_t item, void *scratch)
{
    const gm_hessian_job *job = context;
    GM_FN(block) block;
    (void)scratch;
    if (!GM_FN(tri_block)(item, job->cols, &block)) {
        return GM_OK;
    }
    for (uint32_t t = 0; t < job->tokens; t += 32u) {
        uint32_t left = job->tokens - t;
        GM_FN(hessian_block)(job->x + (size_t)t * job->cols, left < 32u ? left : 32u, job->cols,
                             &block, job->hessian);
    }
    return GM_OK;
}

/* h[i][j] -= n[k][i] * n[k][j] for k = last-1 down to first; rows i..i+3, columns j..j+2*HALF-1. */
GM_INLINE void GM_FN(factor_tile)(double *n, uint32_t cols, uint32_t first, uint32_t last,
                                  uint32_t i, uint32_t j)
{
    dvec h[4][2];
    for (uint32_t r = 0; r < 4u; r++) {
        memcpy(h[r], n + (size_t)(i + r) * cols + j, sizeof h[r]);
    }
    for (uint32_t k = last; k-- > first;) {
        const double *from = n + (size_t)k * cols;
        dvec a, b;
        memcpy(&a, from + j, sizeof a);
        memcpy(&b, from + j + GM_HALF, sizeof b);
        for (uint32_t r = 0; r < 4u; r++) {
            h[r][0] -= a * from[i + r];
            h[r][1] -= b * from[i + r];
        }
    }
    for (uint32_t r = 0; r < 4u; r++) {
        memcpy(n + (size_t)(i + r) * cols + j, h[r], sizeof h[r]);
    }
}

GM_INLINE void GM_FN(factor_one)(double *n, uint32_t cols, uint32_t first, uint32_t last,
                                 uint32_t i, uint32_t j)
{
    double h = n[(size_t)i * cols + j];
    for (uint32_t k = last; k-- > first;) {
        h -= n[(size_t)k * cols + j] * n[(size_t)k * cols + i];
    }
    n[(size_t)i * cols + j] = h;
}

/* Trailing update by rows [first, last) of N on the rows before them. */
GM_TARGET static int32_t GM_FN(factor_tail)(const void *context, uint64_t item, void *scratch)
{
    const gm_factor_job *job = context;
    GM_FN(block) block;
    (void)scratch;
    if (!GM_FN(tri_block)(item, job->first, &block)) {
        return GM_OK;
    }
    double *n = job->hessian;
    uint32_t i = block.row;
    for (; i + 4u <= block.row_end; i += 4u) {
        uint32_t end = block.col_end < i + 4u ? block.col_end : i + 4u;
        uint32_t j = block.col;
        for (; j < end && j + 2u * GM_HALF <= block.col_end; j += 2u * GM_HALF) {
            GM_FN(factor_tile)(n, job->cols, job->first, job->last, i, j);
        }
        for (; j < end; j++) {
            for (uint32_t r = 0; r < 4u; r++) {
                GM_FN(factor_one)(n, job->cols, job->first, job->last, i + r, j);
            }
        }
    }
    for (; i < block.row_end; i++) {
        for (uint32_t j = block.col; j < block.col_end && j <= i; j++) {
            GM_FN(factor_one)(n, job->cols, job->first, job->last, i, j);
        }
    }
    return GM_OK;
}

/* Rows last-1 down to first: pivot, scaling, then the other rows of the block. */
GM_TARGET static void GM_FN(factor_head)(const gm_factor_job *job)
{
    uint32_t cols = job->cols;
    for (uint32_t k = job->last; k-- > job->first;) {
        double *row = job->hessian + (size_t)k * cols;
        /* In exact arithmetic no pivot is below the damping; rounding must not make it so. */
        double pivot = row[k] > job->floor ? row[k] : job->floor;
        double root = sqrt(pivot);
        row[k] = root;
        for (uint32_t j = 0; j < k; j++) {
            row[j] /= root;
        }
        for (uint32_t i = job->first; i < k; i++) {
            double *to = job->hessian + (size_t)i * cols;
            double factor = row[i];
            uint32_t j = 0;
            for (; j + GM_HALF <= i + 1u; j += GM_HALF) {
                dvec a, h;
                memcpy(&a, row + j, sizeof a);
                memcpy(&h, to + j, sizeof h);
                h -= a * factor;
                memcpy(to + j, &h, sizeof h);
            }
            for (; j <= i; j++) {
                to[j] -= row[j] * factor;
            }
        }
    }
}
