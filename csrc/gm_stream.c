/* gm_stream.c: plain reading of memory; `gemmake hdf probe` measures its bandwidth with it. */
#include "gm_internal.h"

enum { LINE = 64, AT_ONCE = 4 * LINE };

typedef uint64_t line __attribute__((vector_size(LINE)));

int32_t gm_read_lines(const uint8_t *data, uint64_t bytes, uint64_t *sum)
{
    if (data == NULL || sum == NULL || bytes % AT_ONCE != 0 || (uintptr_t)data % LINE != 0) {
        return GM_ERR_ARG;
    }
    const line *p = (const line *)(const void *)data;
    line s[4] = {{0}};
    for (uint64_t i = 0; i < bytes / LINE; i += 4) {
        s[0] += p[i], s[1] += p[i + 1], s[2] += p[i + 2], s[3] += p[i + 3];
    }
    line all = s[0] + s[1] + s[2] + s[3];
    *sum = 0; /* so that no reading is left out */
    for (uint32_t i = 0; i < LINE / sizeof(uint64_t); i++) {
        *sum += all[i];
    }
    return GM_OK;
}
