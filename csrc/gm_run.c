/* gm_run.c: threads, argument checks and the choice of kernels. */
#if defined(__linux__)
#define _GNU_SOURCE /* sched_getaffinity */
#include <sched.h>
#else
#define _POSIX_C_SOURCE 200809L
#endif
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "gm_internal.h"

typedef struct gm_team {
    gm_job job;
    const void *context;
    uint64_t items;
    atomic_uint_fast64_t next;
    atomic_int_fast32_t status;
} gm_team;

typedef struct gm_member {
    gm_team *team;
    void *scratch;
    pthread_t thread;
} gm_member;

void gm_fp_enter(fenv_t *saved)
{
    fegetenv(saved);
    fesetenv(FE_DFL_ENV);
}

void gm_fp_leave(const fenv_t *saved)
{
    fesetenv(saved);
}

static void *member_run(void *argument)
{
    gm_member *member = argument;
    gm_team *team = member->team;
    fenv_t saved;
    gm_fp_enter(&saved);
    for (;;) {
        uint64_t item = atomic_fetch_add(&team->next, 1u);
        if (item >= team->items) {
            break;
        }
        int_fast32_t status = team->job(team->context, item, member->scratch);
        int_fast32_t seen = atomic_load(&team->status);
        while (status < seen && !atomic_compare_exchange_weak(&team->status, &seen, status)) {
        }
    }
    gm_fp_leave(&saved);
    return NULL;
}

/* Starts members 1..count-1; returns how many run, without member 0. */
static uint32_t team_start(gm_member *members, uint32_t count)
{
    uint32_t started = 0;
    while (started + 1u < count &&
           pthread_create(&members[started + 1u].thread, NULL, member_run,
                          &members[started + 1u]) == 0) {
        started++;
    }
    return started;
}

int32_t gm_run(gm_job job, const void *context, uint64_t items, int32_t threads, size_t scratch)
{
    gm_member members[GM_MAX_THREADS];
    gm_team team = {.job = job, .context = context, .items = items};
    uint32_t count = items < (uint64_t)threads ? (uint32_t)items : (uint32_t)threads;
    size_t each = (scratch + 63u) / 64u * 64u;
    unsigned char *block = NULL;
    if (items == 0u) {
        return GM_OK;
    }
    if (each != 0u) {
        block = aligned_alloc(64u, each * count);
        if (block == NULL) {
            return GM_ERR_MEMORY;
        }
    }
    atomic_init(&team.next, 0u);
    atomic_init(&team.status, GM_OK);
    for (uint32_t i = 0; i < count; i++) {
        members[i].team = &team;
        members[i].scratch = each != 0u ? block + i * each : NULL;
    }
    /* If a thread cannot start, the others take its items: slower, same result. */
    uint32_t started = team_start(members, count);
    member_run(&members[0]);
    for (uint32_t i = 1; i <= started; i++) {
        pthread_join(members[i].thread, NULL);
    }
    free(block);
    return (int32_t)atomic_load(&team.status);
}

int32_t gm_cpu_count(void)
{
    long count = sysconf(_SC_NPROCESSORS_ONLN);
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        count = CPU_COUNT(&set);
    }
#endif
    count = count < 1 ? 1 : count;
    return count > GM_MAX_THREADS ? GM_MAX_THREADS : (int32_t)count;
}

const gm_kernels *gm_pick(uint32_t flags)
{
#ifdef GM_HAVE_AVX2
    if ((flags & (uint32_t)GM_BASELINE) == 0u && __builtin_cpu_supports("avx2")) {
        return &gm_kernels_avx2;
    }
#endif
    (void)flags;
    return &gm_kernels_base;
}

int32_t gm_check_run(int32_t threads, uint32_t flags)
{
    int good = threads >= 1 && threads <= GM_MAX_THREADS && (flags & ~(uint32_t)GM_BASELINE) == 0u;
    return good ? GM_OK : GM_ERR_ARG;
}

int32_t gm_check_shape(uint32_t rows, uint32_t cols)
{
    if (rows == 0u || cols == 0u) {
        return GM_ERR_ARG;
    }
    return rows > (uint32_t)GM_MAX_ROWS || cols > (uint32_t)GM_MAX_COLS ? GM_ERR_LIMIT : GM_OK;
}

int32_t gm_check_formats(const uint8_t *formats, uint32_t groups)
{
    for (uint32_t g = 0; formats != NULL && g < groups; g++) {
        if (formats[g] != (uint8_t)GM_FMT_Q4H && formats[g] != (uint8_t)GM_FMT_Q8) {
            return GM_ERR_ARG;
        }
    }
    return GM_OK;
}

/* Scales a group's importance to a maximum of 1; all zero means all equal. The floor keeps a
 * column that calibration never saw from being clipped away. */
GM_APART static void weigh_group(const float *importance, uint32_t count, float *q, float *sq)
{
    float top = 0.0f, sum = 0.0f;
    for (uint32_t j = 0; j < count; j++) {
        float v = importance != NULL ? importance[j] : 1.0f;
        top = v > top ? v : top;
    }
    for (uint32_t j = 0; j < (uint32_t)GM_GROUP; j++) {
        float v = 0.0f;
        if (j < count) {
            v = importance != NULL && top > 0.0f ? importance[j] / top : 1.0f;
            v = v > GM_Q_MIN ? v : GM_Q_MIN;
        }
        q[j] = v;
        sum += v;
    }
    *sq = sum;
}

int32_t gm_weighting_make(const float *importance, uint32_t cols, gm_weighting *out)
{
    uint32_t groups = gm_groups(cols);
    for (uint32_t c = 0; importance != NULL && c < cols; c++) {
        if (!(importance[c] >= 0.0f && importance[c] <= 3.4e38f)) {
            return GM_ERR_NONFINITE;
        }
    }
    out->q = malloc(sizeof(float) * gm_padded(cols));
    out->sq = malloc(sizeof(float) * groups);
    if (out->q == NULL || out->sq == NULL) {
        gm_weighting_free(out);
        return GM_ERR_MEMORY;
    }
    fenv_t saved;
    gm_fp_enter(&saved);
    for (uint32_t g = 0; g < groups; g++) {
        uint32_t first = g * (uint32_t)GM_GROUP;
        uint32_t left = cols - first;
        weigh_group(importance != NULL ? importance + first : NULL,
                    left < (uint32_t)GM_GROUP ? left : (uint32_t)GM_GROUP, out->q + first,
                    out->sq + g);
    }
    gm_fp_leave(&saved);
    return GM_OK;
}

void gm_weighting_free(gm_weighting *weighting)
{
    free(weighting->q);
    free(weighting->sq);
    weighting->q = NULL;
    weighting->sq = NULL;
}
