/* fuzz_open.c: throws damaged artifacts at the reader and runs some of what it accepts.
 *
 *     fuzz_open COUNT SEED FILE...     COUNT mutations of each file; ends with lines of figures,
 *                                      also after Ctrl-C or SIGTERM
 *
 * All in memory and in one process: an image is damaged where it lies, read, and mended again. In
 * three of four images the checksums are made right after the damage, otherwise every run would
 * end at the first of them; one of RUN_EVERY that open also has to run. With -DFUZZ_LIBFUZZER
 * there is no main: libFuzzer calls LLVMFuzzerTestOneInput. Built with sanitizers by `make fuzz`: a
 * finding is an abort. Times are told and decide nothing. */
#define _POSIX_C_SOURCE 200809L
#include <inttypes.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "gembin.h"
#include "gemrun.h"
#include "gr_internal.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define __asan_poison_memory_region(at, size) ((void)(at), (void)(size))
#define __asan_unpoison_memory_region(at, size) ((void)(at), (void)(size))
#endif

enum { HEADER = 256, TABLE = 512, ENTRY = 128, ENTRIES = 64, HEAD = TABLE + ENTRY * ENTRIES,
       PAGE = 4096, MEMORY = 64 << 20, TABLES = 4 << 20, CHANGES = 4, GUARD = 64 << 10,
       RUN_EVERY = 16, CODES = 128 };

typedef struct room {
    uint8_t *bytes;
    size_t size;
} room;

typedef struct figures {
    uint64_t images, sealed, opened, ran;
    uint64_t codes[CODES]; /* by -status */
} figures;

static room tables, memory; /* as large as is ever allowed, made once */
static uint64_t state;      /* of the random numbers */

static uint32_t draw(uint32_t bound)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((state >> 33) % bound);
}

static void put32(uint8_t *at, uint32_t value) { memcpy(at, &value, sizeof value); }

static uint64_t get64(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint32_t entries_of(const uint8_t *image, size_t size)
{
    uint32_t count = 0;
    if (size >= HEADER)
        memcpy(&count, image + 24, sizeof count);
    return count <= ENTRIES && size >= TABLE + (size_t)ENTRY * count ? count : 0;
}

/* Whether one of the changes touches `count` bytes at `from`. */
static bool touched(const size_t *changes, uint32_t count, uint64_t from, uint64_t bytes)
{
    for (uint32_t i = 0; i < count; i++)
        if (changes[i] + 8 > from && changes[i] < from + bytes)
            return true;
    return false;
}

/* Makes the checksums right again: of the sections that the changes touch (all with NULL), of the
 * table and of the header, as far as they lie inside the image. */
static void seal(uint8_t *image, size_t size, const size_t *changes, uint32_t changed)
{
    uint32_t count = entries_of(image, size);
    for (uint32_t i = 0; i < count; i++) {
        uint8_t *entry = image + TABLE + (size_t)ENTRY * i;
        uint64_t offset = get64(entry + 8), bytes = get64(entry + 16);
        bool inside = offset <= size && bytes <= size - offset;
        if (inside && (!changes || touched(changes, changed, offset, bytes) ||
                       touched(changes, changed, TABLE + (uint64_t)ENTRY * i, ENTRY)))
            put32(entry + 36, gr_crc32(0, image + offset, (size_t)bytes));
    }
    if (count > 0)
        put32(image + 248, gr_crc32(0, image + TABLE, (size_t)ENTRY * count));
    if (size >= HEADER)
        put32(image + 252, gr_crc32(0, image, 252));
}

static room room_of(size_t size)
{
    room r = {aligned_alloc(PAGE, (size + PAGE - 1) & ~(size_t)(PAGE - 1)), size};
    if (!r.bytes) {
        fputs("fuzz_open: host: out of memory; free some\n", stderr);
        exit(1);
    }
    return r;
}

/* The first `size` bytes; what lies behind them is out of bounds. */
static uint8_t *lend(room r, size_t size)
{
    size_t behind = r.size - size;
    __asan_unpoison_memory_region(r.bytes, size);
    __asan_poison_memory_region(r.bytes + size, behind < GUARD ? behind : GUARD);
    return r.bytes;
}

/* The reader alone. */
static gemrun_status read_image(const uint8_t *image, size_t size)
{
    gr_view v;
    gr_error e;
    uint64_t needed = gr_open_tables_size(image, size);
    if (needed > TABLES)
        needed = 0; /* the first copy will be refused */
    return gr_open_view(&v, image, size, lend(tables, (size_t)needed), needed, false, &e);
}

/* The whole engine; what opens also has to run. True if it did. */
static bool run_image(const uint8_t *image, size_t size)
{
    gemrun_config config = gemrun_config_default();
    gemrun_context_t *ctx = NULL;
    int32_t tokens[4];
    config.threads = 1;
    int64_t needed = gemrun_memory_needed(image, size, &config);
    if (needed < 0 || needed > MEMORY)
        return false;
    uint8_t *block = lend(memory, (size_t)needed);
    if (gemrun_open_mem(&ctx, image, size, block, (size_t)needed, &config) != GEMRUN_OK)
        return false;
    (void)gemrun_infer(ctx, "a b", tokens, 4);
    gemrun_destroy(ctx);
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* For libFuzzer: always sealed, read, and run if it opens. Always 0. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    room image = room_of(size + 1);
    if (!memory.bytes) {
        tables = room_of(TABLES);
        memory = room_of(MEMORY);
    }
    memcpy(image.bytes, data, size);
    seal(image.bytes, size, NULL, 0);
    (void)lend(image, size);
    if (read_image(image.bytes, size) == GEMRUN_OK)
        (void)run_image(image.bytes, size);
    __asan_unpoison_memory_region(image.bytes, image.size);
    free(image.bytes);
    return 0;
}

#ifndef FUZZ_LIBFUZZER
static room slurp(const char *path)
{
    room r = {0};
    FILE *file = fopen(path, "rb");
    long size = 0;
    if (file && fseek(file, 0, SEEK_END) == 0 && (size = ftell(file)) > HEAD) {
        rewind(file);
        r = room_of((size_t)size);
        r.size = fread(r.bytes, 1, (size_t)size, file);
    }
    if (file)
        fclose(file);
    return r;
}

/* Where to damage: header, table, or a section, there more often near its start. */
static size_t place(const uint8_t *image, size_t size)
{
    uint32_t count = entries_of(image, size), kind = draw(6);
    if (kind == 0 || count == 0)
        return draw(HEADER);
    const uint8_t *entry = image + TABLE + (size_t)ENTRY * draw(count);
    if (kind == 1)
        return (size_t)(entry - image) + draw(ENTRY);
    uint64_t offset = get64(entry + 8), bytes = get64(entry + 16);
    if (bytes == 0 || bytes > size || offset > size - bytes)
        return draw((uint32_t)size);
    uint32_t a = draw((uint32_t)bytes), b = draw((uint32_t)bytes);
    return (size_t)offset + (a < b ? a : b);
}

/* One change of at most eight bytes; returns where. */
static size_t change(uint8_t *image, size_t size)
{
    static const uint64_t edges[] = {0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 255, 256, 257, 4096,
                                     65535, 65536, 1 << 20, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF,
                                     UINT64_C(1) << 32, INT64_MAX, UINT64_C(1) << 63, UINT64_MAX};
    size_t at = place(image, size), width = (size_t)1 << (1 + draw(3)); /* 2, 4 or 8 */
    uint64_t value = edges[draw(sizeof edges / sizeof edges[0])];
    switch (draw(5)) {
    case 0: image[at] ^= (uint8_t)(1u << draw(8)); return at;
    case 1: image[at] = (uint8_t)draw(256); return at;
    case 2: /* a little more or less than what stands there */
        image[at] = (uint8_t)(image[at] + draw(9) - 4);
        return at;
    default:
        at -= at % width;
        memcpy(image + at, &value, at + width <= size ? width : size - at);
        return at;
    }
}

/* Damages the image where it lies, has it read, and mends it from `seed`. */
static void once(room seed, uint8_t *image, figures *f)
{
    size_t changes[CHANGES], size = seed.size;
    uint32_t changed = 1 + draw(CHANGES);
    for (uint32_t i = 0; i < changed; i++)
        changes[i] = change(image, size);
    if (draw(32) == 0) {
        size = draw((uint32_t)size);
        if (size >= HEADER && draw(2)) /* and the header says so */
            memcpy(image + 32, &(uint64_t){size}, sizeof(uint64_t));
    }
    if (draw(4)) {
        seal(image, size, changes, changed);
        f->sealed++;
    }
    __asan_poison_memory_region(image + size, seed.size - size);
    gemrun_status st = read_image(image, size);
    f->images++;
    f->codes[-st < CODES ? -st : CODES - 1]++;
    if (st == GEMRUN_OK && f->opened++ % RUN_EVERY == 0)
        f->ran += run_image(image, size);
    __asan_unpoison_memory_region(image, seed.size);
    memcpy(image, seed.bytes, HEAD);
    for (uint32_t i = 0; i < changed; i++) {
        size_t left = seed.size - changes[i];
        memcpy(image + changes[i], seed.bytes + changes[i], left < 8 ? left : 8);
    }
}

static volatile sig_atomic_t stopped;

static void on_signal(int number)
{
    stopped = number;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void fuzz_file(room seed, uint64_t count, figures *f)
{
    room image = room_of(seed.size);
    memcpy(image.bytes, seed.bytes, seed.size);
    for (double start = now(), shown = start; count > 0 && !stopped; count--) {
        once(seed, image.bytes, f);
        if (f->images % 65536 == 0 && now() - shown >= 10) {
            shown = now();
            fprintf(stderr, "fuzz_open: %" PRIu64 " images, %" PRIu64 " left of this file\n",
                    f->images, count - 1);
        }
    }
    free(image.bytes);
}

int main(int argc, char **argv)
{
    figures f = {0};
    double start = now();
    if (argc < 4) {
        fputs("usage: fuzz_open COUNT SEED FILE...\n", stderr);
        return 2;
    }
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    state = strtoull(argv[2], NULL, 10) * 2 + 1;
    tables = room_of(TABLES);
    memory = room_of(MEMORY);
    for (int i = 3; i < argc && !stopped; i++) {
        room seed = slurp(argv[i]);
        if (!seed.bytes) {
            fprintf(stderr, "fuzz_open: %s: cannot be read, or is no artifact; check the path\n",
                    argv[i]);
            return 1;
        }
        fuzz_file(seed, strtoull(argv[1], NULL, 10), &f);
        free(seed.bytes);
    }
    free(tables.bytes);
    free(memory.bytes);
    printf("fuzz_open: %" PRIu64 " images, %" PRIu64 " with right checksums, %" PRIu64 " opened, %"
           PRIu64 " of them run; %.0f images/s, no finding\n", f.images, f.sealed, f.opened, f.ran,
           (double)f.images / (now() - start));
    printf("status");
    for (int i = 0; i < CODES; i++)
        if (f.codes[i] > 0)
            printf("  %d: %" PRIu64, -i, f.codes[i]);
    return puts("") < 0;
}
#endif
