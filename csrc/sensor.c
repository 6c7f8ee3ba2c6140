/* sensor.c: see sensor.h. */
#define _GNU_SOURCE
#include "sensor.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { PATH = 4096, NAME = 96, TEXT = 256, PERIOD_MS = 100, LEAVE_TIMES = 10 };
static const double GATED_C = -200; /* what drivers report for a zone without power */

typedef enum kind { SOURCE_FILE, SOURCE_HWMON, SOURCE_IIO, SOURCE_ZONE } kind;

static const struct {
    const char *prefix, *folder, *begins, *name; /* of the folders to look in, and their name */
} kinds[] = {
    [SOURCE_FILE] = {"file:", NULL, NULL, NULL},
    [SOURCE_HWMON] = {"hwmon:", "/sys/class/hwmon", "hwmon", "name"},
    [SOURCE_IIO] = {"iio:", "/sys/bus/iio/devices", "iio:device", "name"},
    [SOURCE_ZONE] = {"zone:", "/sys/class/thermal", "thermal_zone", "type"},
};
enum { KINDS = sizeof kinds / sizeof kinds[0] };

struct sensor {
    kind kind;
    char root[PATH], path[PATH]; /* path: of a file */
    char name[NAME], channel[NAME];
    double scale;
    struct stat mark; /* of the file, when its value was told */
    bool marked;
    gemrun_context_t *ctx;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool stop, ended; /* under the lock */
};

/* ---- reading ---- */

static bool read_text(const char *path, char *out, struct stat *st)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return false;
    ssize_t n = fstat(fd, st) == 0 && S_ISREG(st->st_mode) ? read(fd, out, TEXT - 1) : -1;
    int saved = n < 0 && !S_ISREG(st->st_mode) ? EINVAL : errno;
    close(fd);
    errno = saved;
    out[n > 0 ? n : 0] = 0;
    while (n > 0 && strchr(" \t\r\n", out[n - 1]))
        out[--n] = 0;
    return n >= 0;
}

static bool read_number(const char *path, double *out, struct stat *st)
{
    char text[TEXT], *end;
    if (!read_text(path, text, st))
        return false;
    *out = strtod(text, &end);
    bool good = text[0] != 0 && *end == 0 && text[strspn(text, "0123456789+-.eE")] == 0;
    errno = good ? 0 : ENODATA;
    return good;
}

static bool join(char *out, const char *folder, const char *name, const char *suffix)
{
    int n = snprintf(out, PATH, "%s/%s%s", folder, name, suffix);
    return n > 0 && n < PATH;
}

/* Degrees of one chip or zone. */
static bool read_folder(const sensor *s, const char *folder, double *out)
{
    char path[PATH];
    struct stat st;
    double raw, offset = 0, scale = 1;
    if (s->kind == SOURCE_ZONE) {
        bool good = join(path, folder, "temp", "") && read_number(path, &raw, &st);
        *out = good ? raw / 1000 : 0;
        return good && raw != -256;
    }
    if (join(path, folder, s->channel, "_input") && read_number(path, &raw, &st)) {
        *out = raw / 1000;
        return true;
    }
    if (!join(path, folder, s->channel, "_raw") || !read_number(path, &raw, &st))
        return false;
    if (!join(path, folder, s->channel, "_offset") || !read_number(path, &offset, &st))
        offset = 0;
    if (!join(path, folder, s->channel, "_scale") || !read_number(path, &scale, &st))
        scale = 1;
    *out = (raw + offset) * scale / 1000;
    return true;
}

/* The hottest of the chips or zones of that name. */
static bool read_folders(const sensor *s, double *out)
{
    char parent[PATH], folder[PATH], path[PATH], text[TEXT];
    struct stat st;
    bool found = false;
    if (!join(parent, s->root, kinds[s->kind].folder + 1, ""))
        return false;
    DIR *dir = opendir(parent);
    const char *begins = kinds[s->kind].begins;
    for (struct dirent *d; dir && (d = readdir(dir)) != NULL;) {
        double here;
        bool named = strncmp(d->d_name, begins, strlen(begins)) == 0 &&
                     join(folder, parent, d->d_name, "") &&
                     join(path, folder, kinds[s->kind].name, "") && read_text(path, text, &st) &&
                     strcmp(text, s->name) == 0;
        if (named && read_folder(s, folder, &here) && here > GATED_C) {
            *out = found && *out > here ? *out : here;
            found = true;
        }
    }
    if (dir)
        closedir(dir);
    errno = found ? 0 : ENOENT;
    return found;
}

static bool is_virtual(const char *path)
{
    return strncmp(path, "/sys/", 5) == 0 || strncmp(path, "/proc/", 6) == 0;
}

/* A new value. False: there is none, or none since the last one. */
static bool read_sensor(sensor *s, double *out)
{
    struct stat st;
    if (s->kind != SOURCE_FILE)
        return read_folders(s, out);
    if (!read_number(s->path, out, &st))
        return false;
    *out *= s->scale;
    bool same = s->marked && st.st_ino == s->mark.st_ino && st.st_size == s->mark.st_size &&
                st.st_mtim.tv_sec == s->mark.st_mtim.tv_sec &&
                st.st_mtim.tv_nsec == s->mark.st_mtim.tv_nsec;
    s->mark = st;
    s->marked = true;
    return !same || is_virtual(s->path);
}

/* ---- the source's name ---- */

static bool copy(char *out, size_t capacity, const char *text, size_t size)
{
    if (size == 0 || size >= capacity)
        return false;
    memcpy(out, text, size);
    out[size] = 0;
    return true;
}

static bool parse_file(sensor *s, const char *text)
{
    const char *colon = strrchr(text, ':');
    char *end = NULL;
    s->scale = colon ? strtod(colon + 1, &end) : 1;
    bool scaled = colon && end != colon + 1 && *end == 0 && s->scale != 0;
    if (!scaled)
        s->scale = 1; /* the colon is the path's */
    return copy(s->path, sizeof s->path, text, scaled ? (size_t)(colon - text) : strlen(text));
}

static bool parse(sensor *s, const char *source)
{
    size_t at = 0, i = 0;
    while (i < KINDS && strncmp(source, kinds[i].prefix, strlen(kinds[i].prefix)) != 0)
        i++;
    if (i == KINDS)
        return false;
    s->kind = (kind)i;
    at = strlen(kinds[i].prefix);
    const char *name = source + at, *slash = strchr(name, '/');
    if (s->kind == SOURCE_FILE)
        return parse_file(s, name);
    if (s->kind == SOURCE_ZONE)
        return copy(s->name, sizeof s->name, name, strlen(name));
    return slash && !strchr(slash + 1, '/') &&
           copy(s->name, sizeof s->name, name, (size_t)(slash - name)) &&
           copy(s->channel, sizeof s->channel, slash + 1, strlen(slash + 1));
}

/* ---- the thread ---- */

static void wait_a_little(sensor *s, long ms) /* under the lock; ends early where it changes */
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_nsec += ms % 1000 * 1000000;
    t.tv_sec += ms / 1000 + t.tv_nsec / 1000000000;
    t.tv_nsec %= 1000000000;
    pthread_cond_timedwait(&s->changed, &s->lock, &t);
}

/* A read may hang, on a dead server: nobody waits for it, and nothing is told after a stop. */
static void *follow(void *arg)
{
    sensor *s = arg;
    double celsius;
    pthread_mutex_lock(&s->lock);
    while (!s->stop) {
        pthread_mutex_unlock(&s->lock);
        bool fresh = read_sensor(s, &celsius);
        pthread_mutex_lock(&s->lock);
        if (fresh && !s->stop)
            gemrun_set_temperature(s->ctx, (float)celsius);
        if (!s->stop)
            wait_a_little(s, PERIOD_MS);
    }
    s->ended = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static void free_sensor(sensor *s)
{
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

static sensor *new_sensor(const char *root, gemrun_context_t *ctx)
{
    sensor *s = calloc(1, sizeof *s);
    pthread_condattr_t steady;
    if (!s)
        return NULL;
    pthread_condattr_init(&steady);
    pthread_condattr_setclock(&steady, CLOCK_MONOTONIC);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, &steady);
    pthread_condattr_destroy(&steady);
    s->ctx = ctx;
    snprintf(s->root, sizeof s->root, "%s", root);
    return s;
}

static bool believed(gemrun_context_t *ctx)
{
    gemrun_thermal_state t = {.size = sizeof t};
    return gemrun_get_thermal(ctx, &t) != GEMRUN_OK || !t.fault;
}

sensor *sensor_start(const char *source, const char *root, gemrun_context_t *ctx, char *wrong,
                     size_t capacity)
{
    static const char forms[] =
        "name file:PATH[:SCALE], hwmon:NAME/tempN, iio:NAME/CHANNEL or zone:TYPE";
    sensor *s = new_sensor(root, ctx);
    double celsius;
    if (!s) {
        snprintf(wrong, capacity, "no memory left for it; free some");
    } else if (!parse(s, source)) {
        snprintf(wrong, capacity, "%s is no sensor; %s", source, forms);
    } else if (!read_sensor(s, &celsius)) {
        snprintf(wrong, capacity, "%s gives no temperature (%s); %s", source, strerror(errno),
                 forms);
    } else if (gemrun_set_temperature(ctx, (float)celsius) != GEMRUN_OK) {
        snprintf(wrong, capacity, "%s", gemrun_last_error());
    } else if (!believed(ctx)) {
        snprintf(wrong, capacity,
                 "%s gives %.7g, which is no temperature in degrees Celsius; a file in thousandths "
                 "of a degree is file:PATH:0.001",
                 source, celsius);
    } else if (pthread_create(&s->thread, NULL, follow, s) != 0) {
        snprintf(wrong, capacity, "no thread left to read it; allow more processes");
    } else {
        return s;
    }
    if (s)
        free_sensor(s);
    return NULL;
}

void sensor_stop(sensor *s)
{
    if (!s)
        return;
    pthread_mutex_lock(&s->lock);
    s->stop = true;
    pthread_cond_broadcast(&s->changed);
    for (int i = 0; i < LEAVE_TIMES && !s->ended; i++)
        wait_a_little(s, PERIOD_MS);
    bool ended = s->ended;
    pthread_mutex_unlock(&s->lock);
    if (ended) {
        pthread_join(s->thread, NULL);
        free_sensor(s);
    } else {
        pthread_detach(s->thread); /* it hangs in a read; the process may end without it */
    }
}
