/* fuzz_open.c: throws damaged artifacts at the reader and runs what it accepts.
 *
 *     fuzz_open COUNT SEED FILE...     COUNT mutations of each file; ends with one line of figures
 *
 * With -DFUZZ_LIBFUZZER there is no main: libFuzzer calls LLVMFuzzerTestOneInput. Checksums are made
 * right again after a mutation, otherwise every run would end at the first of them. Built with
 * sanitizers by `make fuzz`: a finding is an abort. It decides nothing by time. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gembin.h"
#include "gemrun.h"
#include "gr_internal.h"

enum { HEADER = 256, TABLE = 512, ENTRY = 128, PAGE = 4096, MEMORY = 64 << 20 };

static uint64_t state, accepted;

static uint32_t draw(uint32_t bound)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((state >> 33) % bound);
}

static void put32(uint8_t *at, uint32_t value) { memcpy(at, &value, sizeof value); }

/* Recomputes the checksums of sections, table and header as far as they lie inside the image. */
static void seal(uint8_t *image, size_t size)
{
    uint32_t count;
    if (size < HEADER)
        return;
    memcpy(&count, image + 24, sizeof count);
    if (count <= 64 && size >= TABLE + (size_t)ENTRY * count) {
        for (uint32_t i = 0; i < count; i++) {
            uint8_t *entry = image + TABLE + (size_t)ENTRY * i;
            uint64_t offset, bytes;
            memcpy(&offset, entry + 8, sizeof offset);
            memcpy(&bytes, entry + 16, sizeof bytes);
            if (offset <= size && bytes <= size - offset)
                put32(entry + 36, gr_crc32(0, image + offset, (size_t)bytes));
        }
        put32(image + 248, gr_crc32(0, image + TABLE, (size_t)ENTRY * count));
    }
    put32(image + 252, gr_crc32(0, image, 252));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Opens the image in memory of its own; what opens also has to run. Always 0, for libFuzzer. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t *image = aligned_alloc(PAGE, (size + PAGE) & ~(size_t)(PAGE - 1));
    gemrun_config config = gemrun_config_default();
    int64_t needed;
    if (!image)
        return 0;
    config.threads = 1;
    memcpy(image, data, size);
    seal(image, size);
    needed = gemrun_memory_needed(image, size, &config);
    if (needed >= 0 && needed <= MEMORY) {
        void *memory = aligned_alloc(PAGE, ((size_t)needed + PAGE) & ~(size_t)(PAGE - 1));
        gemrun_context_t *ctx = NULL;
        if (memory && gemrun_open_mem(&ctx, image, size, memory, (size_t)needed, &config) == 0) {
            int32_t tokens[4];
            accepted++;
            (void)gemrun_infer(ctx, "a b", tokens, 4);
            gemrun_destroy(ctx);
        }
        free(memory);
    }
    free(image);
    return 0;
}

#ifndef FUZZ_LIBFUZZER
static uint8_t *slurp(const char *path, size_t *out_size)
{
    FILE *file = fopen(path, "rb");
    uint8_t *bytes = NULL;
    long size;
    if (file && fseek(file, 0, SEEK_END) == 0 && (size = ftell(file)) > 0) {
        rewind(file);
        bytes = malloc((size_t)size);
        *out_size = bytes ? fread(bytes, 1, (size_t)size, file) : 0;
    }
    if (file)
        fclose(file);
    return bytes;
}

/* One to four changes, most of them in the first 16 KiB, where the records are. */
static size_t mutate(uint8_t *image, size_t size)
{
    static const uint32_t edges[] = {0, 1, 2, 31, 64, 255, 256, 65535, 65536, 0x7fffffff, 0xffffffff};
    uint32_t near = size > 16384 ? 16384 : (uint32_t)size;
    for (uint32_t i = 1 + draw(4); i > 0; i--) {
        uint32_t at = draw(draw(8) ? near : (uint32_t)size);
        switch (draw(4)) {
        case 0: image[at] ^= (uint8_t)(1u << draw(8)); break;
        case 1: image[at] = (uint8_t)draw(256); break;
        default:
            if ((at & ~3u) + 4 <= size)
                put32(image + (at & ~3u), edges[draw(sizeof edges / sizeof edges[0])]);
        }
    }
    return draw(32) ? size : draw((uint32_t)size);
}

int main(int argc, char **argv)
{
    uint64_t runs = 0;
    if (argc < 4) {
        fputs("usage: fuzz_open COUNT SEED FILE...\n", stderr);
        return 2;
    }
    state = strtoull(argv[2], NULL, 10) * 2 + 1;
    for (int i = 3; i < argc; i++) {
        size_t size = 0;
        uint8_t *seed = slurp(argv[i], &size), *copy = seed ? malloc(size) : NULL;
        if (!copy || size == 0) {
            fprintf(stderr, "fuzz_open: %s: cannot be read; check the path\n", argv[i]);
            free(seed);
            return 1;
        }
        for (uint64_t n = strtoull(argv[1], NULL, 10); n > 0; n--) {
            memcpy(copy, seed, size);
            runs++;
            (void)LLVMFuzzerTestOneInput(copy, mutate(copy, size));
        }
        free(copy);
        free(seed);
    }
    printf("fuzz_open: %llu images, %llu accepted, no finding\n", (unsigned long long)runs,
           (unsigned long long)accepted);
    return 0;
}
#endif
