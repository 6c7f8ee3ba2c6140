/* helium.c: the products of gr_min_mve.h against plain C, on random and on extreme values; in place
 * of examples/bare_metal/main.c. Prints how many were compared. */
#include "board.h"
#include "gr_min_mve.h"

enum { ROUNDS = 400, PANEL = GB_PANEL };

static uint32_t next(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 16;
}

/* Every fourth fill has the ends of the range alone. */
static void fill(uint32_t *state, uint32_t round, void *to, size_t size, bool is_signed)
{
    uint8_t *bytes = to;
    for (size_t i = 0; i < size; i++) {
        uint32_t value = next(state);
        bytes[i] = (uint8_t)(round % 4 ? value : value % 2 ? 127 : is_signed ? 129 : 255);
    }
}

static bool products_differ(uint32_t *state, uint32_t round)
{
    _Alignas(64) uint8_t codes[256];
    int8_t x[GB_GROUP];
    int32_t d[PANEL], wanted[PANEL] = {0};
    fill(state, round, codes, sizeof codes, false);
    fill(state, round, x, sizeof x, true);
    dots(codes, x, d);
    for (uint32_t r = 0; r < PANEL; r++)
        for (uint32_t k = 0; k < GB_GROUP; k++) {
            uint32_t byte = codes[GB_LINE * (k % 16 / 4) + 4 * r + k % 4];
            wanted[r] += (int32_t)(k < 16 ? byte & 15 : byte >> 4) * x[k];
        }
    return memcmp(d, wanted, sizeof d) != 0;
}

static bool sums_differ(uint32_t *state, uint32_t round)
{
    uint8_t zeros[PANEL], scales[PANEL];
    int32_t low[PANEL], d[PANEL], wanted[PANEL];
    int32_t asum = (int32_t)(next(state) % (2 * 32 * 127 + 1)) - 32 * 127;
    bool has_zeros = round & 1, has_scales = round & 2;
    fill(state, round, zeros, sizeof zeros, false);
    fill(state, round, scales, sizeof scales, false);
    for (uint32_t r = 0; r < PANEL; r++) {
        low[r] = (int32_t)(next(state) % (2 * 60960 + 1)) - 60960; /* 32 * 15 * 127 */
        d[r] = (int32_t)(next(state) % (2 * 60960 + 1)) - 60960;
        int32_t zero = has_zeros ? zeros[r] : 128, scale = has_scales ? scales[r] : 1;
        wanted[r] = (16 * d[r] + low[r] - zero * asum) * scale;
    }
    whole(has_zeros ? zeros : NULL, has_scales ? scales : NULL, asum, low, d);
    return memcmp(d, wanted, sizeof d) != 0;
}

static bool scores_differ(uint32_t *state, uint32_t round)
{
    int8_t a[80], b[80];
    uint32_t n = round % sizeof a;
    int32_t wanted = 0;
    fill(state, round, a, sizeof a, true);
    fill(state, round, b, sizeof b, true);
    for (uint32_t i = 0; i < n; i++)
        wanted += (int32_t)a[i] * b[i];
    return dot_of(a, b, n) != wanted;
}

int main(void)
{
    uint32_t state = 1;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        const char *what = products_differ(&state, round) ? "dots"
                           : sums_differ(&state, round)   ? "whole"
                           : scores_differ(&state, round) ? "dot_of"
                                                          : NULL;
        if (what) {
            board_print(what);
            board_print(": differs from plain C\n");
            return 1;
        }
    }
    board_print("400 rounds equal\n");
    return 0;
}
