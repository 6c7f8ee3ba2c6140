/* firmware.c: in place of examples/bare_metal/main.c, for firmware.py: instructions of a prefill and
 * of a decode, in an emulator whose clock goes on by a nanosecond an instruction (-icount shift=0).
 *
 * The clock is the core's SysTick; firmware.py says its MHz. */
#include <gemrun.h>

#include <stdint.h>

#include "board.h"

enum { TOKENS = 24, STEPS = 8, MEMORY = 3 << 20, TURN = 1 << 24 };
#define SYSTICK ((volatile uint32_t *)0xE000E010) /* control, reload, value */

extern const uint8_t model[], model_end[]; /* model.S */
static _Alignas(4096) uint8_t memory[MEMORY];
static volatile uint32_t turns;
void SysTick_Handler(void);

void SysTick_Handler(void)
{
    turns++;
}

static uint64_t instructions(void)
{
    uint32_t before, value;
    do {
        before = turns;
        value = SYSTICK[2];
    } while (before != turns);
    return ((uint64_t)before * TURN + (TURN - 1 - value)) * 1000 / MHZ;
}

static void print_number(const char *name, uint64_t value)
{
    char text[24], *at = text + sizeof text - 1;
    *at = 0;
    do {
        *--at = (char)('0' + value % 10);
        value /= 10;
    } while (value > 0);
    board_print(name);
    board_print(at);
    board_print("\n");
}

static int measure(gemrun_context_t *ctx)
{
    int32_t ids[TOKENS];
    uint64_t start, filled;
    for (int32_t i = 0; i < TOKENS; i++)
        ids[i] = i * 7 % 61;
    start = instructions();
    if (gemrun_prefill(ctx, ids, TOKENS) < 0)
        return 1;
    filled = instructions();
    for (int i = 0; i < STEPS; i++)
        if (gemrun_decode(ctx, ids[i]) < 0)
            return 1;
    print_number("decode: ", (instructions() - filled) / STEPS);
    print_number("prefill: ", filled - start);
    return 0;
}

int main(void)
{
    gemrun_context_t *ctx = NULL;
    gemrun_config config = gemrun_config_default();
    config.threads = 1;
    config.allow_foreign_board = 1;
    if (gemrun_open_mem(&ctx, model, (size_t)(model_end - model), memory, sizeof memory, &config) !=
        GEMRUN_OK) {
        board_print(gemrun_last_error());
        return 1;
    }
    SYSTICK[1] = TURN - 1;
    SYSTICK[2] = 0;
    SYSTICK[0] = 7; /* the core's clock, an interrupt a turn, on */
    return measure(ctx);
}
