/* riscv.c: start of the first hart of QEMU's `virt` board in machine mode; text goes to its serial
 * port, the end to its test device. */
#include <stdint.h>

#include "board.h"

#define SERIAL ((volatile uint8_t *)0x10000000)
#define TEST ((volatile uint32_t *)0x100000)
extern uint64_t bss_start[], bss_end[];
void reset(void);

__asm__(".section .start, \"ax\"\n"
        ".global _start\n"
        "_start:\n"
        "    csrr t0, mhartid\n"
        "1:  bnez t0, 1b\n"
        "    la sp, stack_top\n"
        "    li t0, 0x2000\n" /* mstatus.FS: the floating-point unit is on */
        "    csrs mstatus, t0\n"
        "    call reset\n"
        ".text\n");

void board_print(const char *text)
{
    for (; *text; text++)
        *SERIAL = (uint8_t)*text;
}

_Noreturn void board_exit(int code)
{
    *TEST = code == 0 ? 0x5555 : (uint32_t)code << 16 | 0x3333;
    for (;;) {
    }
}

void reset(void)
{
    for (uint64_t *to = bss_start; to < bss_end; to++)
        *to = 0;
    board_exit(main());
}
