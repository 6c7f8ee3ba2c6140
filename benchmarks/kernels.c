/* kernels.c: speed of every kernel that this machine runs. `bench_kernels [KERNEL..]`
 *
 * GEMV is compared with plain reading of the same bytes, measured in turns in the same run, because
 * both depend on what else the machine does. Time is a thread's own processor time, the slowest
 * thread's where there are two; all figures are medians. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "gr_internal.h"
#include "gr_kern.h"

enum { REPEATS = 5, MEGA = 1000000, MOST = 663 * MEGA, MAX_TOKENS = 512, MAX_COLS = 8192 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x)
{
    qsort(x, REPEATS, sizeof *x, by_value);
    return x[REPEATS / 2];
}

static void *memory(size_t bytes)
{
    void *p = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (!p)
        fprintf(stderr, "bench_kernels: no memory for %zu bytes\n", bytes), exit(5);
    return p;
}

static uint64_t draw(void)
{
    static uint64_t s = 88172645463325252u;
    s ^= s << 13, s ^= s >> 7, s ^= s << 17;
    return s;
}

static void fill(void *p, size_t bytes)
{
    uint64_t *u = p;
    for (size_t i = 0; i < bytes / 8; i++)
        u[i] = draw();
}

/* ---- what is measured ---- */

typedef struct work {
    gr_product product; /* NULL: read only */
    const uint8_t *data;
    const gr_mat *m;
    const gr_act *a;
    float *y;
    size_t bytes;
    uint32_t panels, tokens;
    pthread_barrier_t *start;
    uint32_t thread, threads;
    double seconds;
} work;

typedef uint64_t wide __attribute__((vector_size(64)));

static void read_part(const work *w)
{
    size_t n = w->bytes / w->threads / 256 * 256, from = n * w->thread;
    const wide *p = (const wide *)(const void *)(w->data + from);
    wide s[4] = {{0}};
    for (size_t i = 0; i < n / sizeof *p; i += 4)
        s[0] += p[i], s[1] += p[i + 1], s[2] += p[i + 2], s[3] += p[i + 3];
    s[0] += s[1] + s[2] + s[3];
    memcpy(w->y + 16 * w->thread, s, sizeof *s); /* so that the loop is not left out */
}

static void product_part(const work *w) /* in units of two panels, like the engine */
{
    uint32_t units = w->panels / 2, from = units * w->thread / w->threads;
    uint32_t end = units * (w->thread + 1) / w->threads;
    for (uint32_t u = from; u < end; u++)
        w->product(w->m, w->a, 2 * u, 0, w->tokens, GB_UNIT, w->y + (size_t)GB_UNIT * u,
                   (size_t)GB_PANEL * w->panels);
}

static void *part(void *arg)
{
    work *w = arg;
    pthread_barrier_wait(w->start);
    double t = now();
    if (w->product)
        product_part(w);
    else
        read_part(w);
    w->seconds = now() - t;
    return NULL;
}

static double seconds(work w, uint32_t threads)
{
    enum { MAX_THREADS = 8 };
    pthread_t id[MAX_THREADS];
    pthread_barrier_t start;
    work each[MAX_THREADS];
    double most = 0.0;
    pthread_barrier_init(&start, NULL, threads);
    w.start = &start, w.threads = threads;
    for (uint32_t i = 0; i < threads; i++)
        each[i] = w, each[i].thread = i;
    for (uint32_t i = 1; i < threads; i++)
        pthread_create(&id[i], NULL, part, &each[i]);
    part(&each[0]);
    for (uint32_t i = 1; i < threads; i++)
        pthread_join(id[i], NULL);
    for (uint32_t i = 0; i < threads; i++)
        most = each[i].seconds > most ? each[i].seconds : most;
    pthread_barrier_destroy(&start);
    return most;
}

/* ---- products ---- */

typedef struct bench {
    uint8_t *data;
    float *y;
    gr_act a;
} bench;

static gr_mat matrix(const bench *b, gb_segment *seg, uint32_t format, uint32_t cols)
{
    uint32_t groups = cols / GB_GROUP, group = format == GB_FMT_Q8_ROWS ? 256 : 288;
    *seg = (gb_segment){format, 0, groups, 0};
    gr_mat m = {.data = b->data, .seg = seg, .seg_count = 1, .cols = cols, .groups = groups};
    m.panel = GB_LINE + (size_t)group * groups;
    if (format == GB_FMT_Q8_ROWS) /* the low planes lie behind the high ones */
        m.low = b->data + MOST / 2 / GB_LINE * GB_LINE;
    return m;
}

static void shape(gr_act *a, uint32_t cols)
{
    a->cols = cols, a->groups = cols / GB_GROUP;
    for (size_t i = 0; i < (size_t)MAX_TOKENS * a->groups; i++) {
        a->sa[i] = 1e-3f, a->asum[i] = 0;
        for (size_t k = 32 * i; k < 32 * i + 32; k++) {
            a->codes[k] = (int8_t)((int)(draw() % 255) - 127);
            a->asum[i] += a->codes[k];
        }
    }
}

static void bench_gemv(bench *b, const gr_kernels *k, uint32_t format, const char *name)
{
    static const uint32_t sizes[] = {72, 151, 235, 663};
    gb_segment seg;
    gr_mat m = matrix(b, &seg, format, 2048);
    shape(&b->a, m.cols);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (uint32_t threads = 1; threads <= 2; threads++) {
            double read[REPEATS], mine[REPEATS];
            size_t row = (size_t)m.panel + (m.low ? (size_t)256 * m.groups : 0);
            work w = {.data = b->data, .m = &m, .a = &b->a, .y = b->y, .tokens = 1};
            w.panels = (uint32_t)((size_t)sizes[i] * MEGA / row / 2 * 2);
            w.bytes = row * w.panels;
            for (uint32_t r = 0; r < REPEATS; r++) {
                w.product = NULL;
                read[r] = (double)w.bytes / seconds(w, threads) * 1e-9;
                w.product = k->gemv;
                mine[r] = (double)w.bytes / seconds(w, threads) * 1e-9;
            }
            double plain = median(read), gemv = median(mine);
            printf("%-12s %-8s %4u MB %u thread%s %6.1f GB/s  of %6.1f read: %.2f\n", k->gemv_name,
                   name, sizes[i], threads, threads > 1 ? "s" : " ", gemv, plain, gemv / plain);
        }
}

static void bench_gemm(bench *b, const gr_kernels *k, uint32_t format, const char *name)
{
    static const uint32_t shapes[][2] = {{640, 2048}, {576, 1536}, {2048, 8192}};
    static const uint32_t tokens[] = {1, 8, 32, 128, 512};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        gb_segment seg;
        gr_mat m = matrix(b, &seg, format, shapes[i][1]);
        shape(&b->a, m.cols);
        printf("%-12s %-8s %4ux%u:", k->gemm_name, name, shapes[i][0], shapes[i][1]);
        for (size_t j = 0; j < sizeof tokens / sizeof *tokens; j++) {
            double rate[REPEATS];
            work w = {.product = k->gemm, .data = b->data, .m = &m, .a = &b->a, .y = b->y,
                      .panels = shapes[i][0] / GB_PANEL, .tokens = tokens[j]};
            double macs = (double)shapes[i][0] * shapes[i][1] * tokens[j];
            uint32_t times = (uint32_t)(3e8 / macs) + 1;
            for (uint32_t r = 0; r < REPEATS; r++) {
                double t = 0;
                for (uint32_t n = 0; n < times; n++)
                    t += seconds(w, 1);
                rate[r] = macs * times / t * 1e-9;
            }
            printf("  %u: %.1f", tokens[j], median(rate));
        }
        printf("  GMAC/s at a number of tokens\n");
    }
}

/* ---- attention over 1024 positions in blocks of 32, int8 KV in groups of 64 ---- */

enum { POSITIONS = 1024, GROUP = 64, MAX_DIM = 256, STEPS = 3 };

typedef struct attention {
    int8_t kv[POSITIONS * MAX_DIM], q[GR_QUERIES * MAX_DIM];
    uint16_t scales[POSITIONS * MAX_DIM / GROUP];
    float s[GR_QUERIES * POSITIONS], out[GR_QUERIES * MAX_DIM];
} attention;

static void attend(const gr_kernels *k, attention *a, uint32_t dim, uint32_t queries, double *t)
{
    gr_queries q = {a->q, a->scales, dim, dim / GROUP, queries};
    gr_span span = {.stride = dim, .scale_stride = dim / GROUP, .count = GB_KV_BLOCK};
    double begin = now();
    for (uint32_t step = 0; step < STEPS; step++) {
        for (uint32_t i = 0; step == 1 && i < queries; i++)
            (void)k->softmax(a->s + i * POSITIONS, 0, POSITIONS, 0.1f, 0.0f);
        for (uint32_t p = 0; step != 1 && p < POSITIONS; p += span.count) {
            span.k = span.v = a->kv + p * dim;
            span.ks = span.vs = a->scales + p * (dim / GROUP);
            if (step == 0)
                k->score(&q, &span, dim, GROUP, a->s + p, POSITIONS);
            else
                k->value(a->s + p, POSITIONS, queries, &span, dim, GROUP, a->out, MAX_DIM);
        }
        double end = now();
        t[step] = (end - begin) * 1e9 / POSITIONS / queries;
        begin = end;
    }
}

static void bench_attention(const gr_kernels *k)
{
    static attention a;
    for (size_t i = 0; i < sizeof a.kv; i++)
        a.kv[i] = (int8_t)((int)(draw() % 255) - 127);
    memcpy(a.q, a.kv, sizeof a.q);
    for (size_t i = 0; i < sizeof a.scales / sizeof *a.scales; i++)
        a.scales[i] = 0x3C10; /* 0.0088 */
    for (uint32_t dim = 64; dim <= MAX_DIM; dim *= 4)
        for (uint32_t queries = 1; queries <= GR_QUERIES; queries *= 2) {
            enum { TIMES = 50 };
            double each[STEPS][REPEATS], t[STEPS], best[STEPS];
            for (uint32_t r = 0; r < REPEATS; r++) {
                for (uint32_t n = 0; n < TIMES; n++) {
                    attend(k, &a, dim, queries, t);
                    for (uint32_t i = 0; i < STEPS; i++)
                        best[i] = n == 0 || t[i] < best[i] ? t[i] : best[i];
                }
                for (uint32_t i = 0; i < STEPS; i++)
                    each[i][r] = best[i];
            }
            printf("%-12s attention dim %3u, %u queries: score %.2f  softmax %.2f  value %.2f"
                   "  ns per query and position\n", k->name, dim, queries, median(each[0]),
                   median(each[1]), median(each[2]));
        }
}

static void print_cpu(void)
{
    char line[256];
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, "model name", 10) == 0 || strncmp(line, "cpu family", 10) == 0 ||
            strncmp(line, "model\t", 6) == 0 || strncmp(line, "CPU part", 8) == 0)
            printf("%s", line);
        else if (line[0] == '\n')
            break;
    if (f)
        fclose(f);
}

static bool wanted(int argc, char **argv, const char *name)
{
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], name) == 0)
            return true;
    return argc == 1;
}

int main(int argc, char **argv)
{
    enum { GROUPS = MAX_TOKENS * MAX_COLS / GB_GROUP };
    bench b = {.data = memory(MOST), .y = memory((size_t)4 << 24)};
    b.a = (gr_act){.codes = memory((size_t)GROUPS * GB_GROUP), .sa = memory(4 * (size_t)GROUPS),
                   .asum = memory(4 * (size_t)GROUPS)};
    fill(b.data, MOST);
    print_cpu();
    for (uint32_t i = 0; gr_kernels_at(i); i++) {
        gr_kernels k;
        if (!wanted(argc, argv, gr_kernels_at(i)) || !gr_kernels_pick(&k, gr_kernels_at(i)))
            continue;
        bench_gemv(&b, &k, GB_FMT_Q4H, "q4h");
        bench_gemv(&b, &k, GB_FMT_Q8_ROWS, "q8 rows");
        bench_gemm(&b, &k, GB_FMT_Q4H, "q4h");
        bench_gemm(&b, &k, GB_FMT_Q8_ROWS, "q8 rows");
        bench_attention(&k);
    }
    return 0;
}
