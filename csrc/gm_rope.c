/* gm_rope.c: rotary tables from own elementary functions in double.
 *
 * libm differs between machines in the last bits, so sin, cos, exp and log are evaluated here by
 * Taylor series with a fixed order of IEEE operations; errors stay near one unit of the last place
 * of a double, far below the float32 rounding of the table.
 */
#include <string.h>

#include "gm_internal.h"

#define TWO_OVER_PI 0x1.45f306dc9c883p-1
#define PI_2_A 0x1.921fb54400000p+0 /* pi / 2 in three parts of 33 bits: n * part is exact */
#define PI_2_B 0x1.0b4611a600000p-34
#define PI_2_C 0x1.3198a2e000000p-69
#define TWO_PI 0x1.921fb54442d18p+2
#define INV_LN2 0x1.71547652b82fep+0
#define LN2_A 0x1.62e42fef00000p-1 /* log 2 in two parts, the first of 33 bits */
#define LN2_B 0x1.473de6af278edp-34
#define ROUND_DOUBLE 6755399441055744.0 /* 1.5 * 2^52 */

/* x = n * pi / 2 + hi + lo with |hi| <= pi / 4; returns n mod 4. */
static uint32_t reduce(double x, double *hi, double *lo)
{
    double n = (x * TWO_OVER_PI + ROUND_DOUBLE) - ROUND_DOUBLE;
    double r = x - n * PI_2_A;
    double b = n * PI_2_B;
    double h = r - b;
    double rest = (r - h) - b;
    *hi = h;
    *lo = rest - n * PI_2_C;
    return (uint32_t)((int64_t)n & 3);
}

/* sin(h + l) and cos(h + l) for |h| <= pi / 4 and a tiny l. */
static double sin_small(double h, double l)
{
    double x = h * h;
    double p = 1.0 / 355687428096000.0;
    p = p * x - 1.0 / 1307674368000.0;
    p = p * x + 1.0 / 6227020800.0;
    p = p * x - 1.0 / 39916800.0;
    p = p * x + 1.0 / 362880.0;
    p = p * x - 1.0 / 5040.0;
    p = p * x + 1.0 / 120.0;
    p = p * x - 1.0 / 6.0;
    return h + (h * (x * p) + l * (1.0 - 0.5 * x));
}

static double cos_small(double h, double l)
{
    double x = h * h;
    double p = -1.0 / 6402373705728000.0;
    p = p * x + 1.0 / 20922789888000.0;
    p = p * x - 1.0 / 87178291200.0;
    p = p * x + 1.0 / 479001600.0;
    p = p * x - 1.0 / 3628800.0;
    p = p * x + 1.0 / 40320.0;
    p = p * x - 1.0 / 720.0;
    p = p * x + 1.0 / 24.0;
    double half = 0.5 * x;
    double top = 1.0 - half;
    return top + (((1.0 - top) - half) + (x * (x * p) - l * h));
}

static double quadrant(uint32_t n, double h, double l)
{
    switch (n & 3u) {
    case 0u:
        return sin_small(h, l);
    case 1u:
        return cos_small(h, l);
    case 2u:
        return -sin_small(h, l);
    default:
        return -cos_small(h, l);
    }
}

static int in_range(double x)
{
    return x > -2147483648.0 && x < 2147483648.0;
}

double gm_sin(double x)
{
    double h, l;
    uint32_t n = reduce(in_range(x) ? x : 0.0, &h, &l);
    return quadrant(n, h, l);
}

double gm_cos(double x)
{
    double h, l;
    uint32_t n = reduce(in_range(x) ? x : 0.0, &h, &l);
    return quadrant(n + 1u, h, l);
}

static double power_of_two(int32_t k) /* -1022 <= k <= 1023 */
{
    uint64_t bits = (uint64_t)(k + 1023) << 52;
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

double gm_exp(double x)
{
    x = x > 700.0 ? 700.0 : x;
    x = x < -700.0 ? -700.0 : x;
    double k = (x * INV_LN2 + ROUND_DOUBLE) - ROUND_DOUBLE;
    double hi = x - k * LN2_A, lo = k * LN2_B;
    double r = hi - lo;
    double rest = (hi - r) - lo;
    double p = 1.0 / 87178291200.0;
    for (int n = 13; n >= 2; n--) {
        static const double factorial[14] = {
            1.0, 1.0, 2.0, 6.0, 24.0, 120.0, 720.0, 5040.0, 40320.0, 362880.0, 3628800.0,
            39916800.0, 479001600.0, 6227020800.0};
        p = p * r + 1.0 / factorial[n];
    }
    return (1.0 + (r + (r * r * p + rest))) * power_of_two((int32_t)k);
}

/* log(m * 2^k) with m near 1 by the odd series in (m - 1) / (m + 1); 0 for x <= 0. */
double gm_log(double x)
{
    uint64_t bits;
    if (!(x >= 2.2250738585072014e-308 && x <= 1.7976931348623157e308)) {
        return 0.0;
    }
    memcpy(&bits, &x, sizeof bits);
    int32_t k = (int32_t)(bits >> 52) - 1023;
    double m = x * power_of_two(k < 1023 ? -k : -1022) * (k < 1023 ? 1.0 : 0.5);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        k += 1;
    }
    double f = m - 1.0;
    double s = f / (m + 1.0);
    double z = s * s, p = 0.0;
    for (int n = 25; n >= 3; n -= 2) {
        p = p * z + 1.0 / (double)n;
    }
    /* 2 s = f - s f, and f is exact. */
    double tail = 2.0 * s * (z * p) - s * f;
    double n = (double)k;
    return n * LN2_A + (f + (tail + n * LN2_B));
}

GM_APART static void fill_freqs(double theta, uint32_t dims, int32_t kind, double factor,
                                double low, double high, double original, double *freqs)
{
    double log_theta = gm_log(theta);
    for (uint32_t i = 0; i < dims / 2u; i++) {
        double f = gm_exp(-((2.0 * (double)i * log_theta) / (double)dims));
        double wave = TWO_PI / f;
        if (kind == GM_ROPE_LINEAR || (kind == GM_ROPE_LLAMA3 && wave > original / low)) {
            f = f / factor;
        } else if (kind == GM_ROPE_LLAMA3 && wave >= original / high) {
            double smooth = (original / wave - low) / (high - low);
            f = (1.0 - smooth) * (f / factor) + smooth * f;
        }
        freqs[i] = f;
    }
}

int32_t gm_rope_freqs(double theta, uint32_t dims, int32_t kind, double factor, double low,
                      double high, double original, double *freqs)
{
    int scaled = kind == GM_ROPE_LINEAR || kind == GM_ROPE_LLAMA3;
    if (freqs == NULL || dims < 2u || dims % 2u != 0u || dims > 65536u ||
        !(theta > 1.0 && theta < 1e18) || (!scaled && kind != GM_ROPE_DEFAULT) ||
        (scaled && !(factor >= 1.0 && factor < 1e9))) {
        return GM_ERR_ARG;
    }
    if (kind == GM_ROPE_LLAMA3 &&
        !(low > 0.0 && high > low && high < 1e9 && original >= 1.0 && original < 1e12)) {
        return GM_ERR_ARG;
    }
    fenv_t saved;
    gm_fp_enter(&saved);
    fill_freqs(theta, dims, kind, factor, low, high, original, freqs);
    gm_fp_leave(&saved);
    return GM_OK;
}

typedef struct table_job {
    const double *freqs;
    uint32_t pairs;
    float *table;
} table_job;

static int32_t fill_row(const void *context, uint64_t item, void *scratch)
{
    const table_job *job = context;
    float *row = job->table + (size_t)item * job->pairs * 2u;
    (void)scratch;
    for (uint32_t i = 0; i < job->pairs; i++) {
        double h, l;
        uint32_t n = reduce((double)item * job->freqs[i], &h, &l);
        row[i] = (float)quadrant(n + 1u, h, l);
        row[job->pairs + i] = (float)quadrant(n, h, l);
    }
    return GM_OK;
}

int32_t gm_rope_table(const double *freqs, uint32_t pairs, uint32_t positions, float *table,
                      int32_t threads)
{
    if (freqs == NULL || table == NULL || pairs == 0u || positions == 0u) {
        return GM_ERR_ARG;
    }
    if (pairs > 32768u || positions > (1u << 20)) {
        return GM_ERR_LIMIT;
    }
    int32_t status = gm_check_run(threads, 0u);
    for (uint32_t i = 0; status == GM_OK && i < pairs; i++) {
        status = freqs[i] >= 0.0 && freqs[i] <= 1.0 ? GM_OK : GM_ERR_RANGE;
    }
    table_job job = {freqs, pairs, table};
    return status == GM_OK ? gm_run(fill_row, &job, positions, threads, 0u) : status;
}
