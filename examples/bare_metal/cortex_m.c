/* cortex_m.c: start of a Cortex-M core, and text and end by semihosting (the emulator's, or a
 * debugger's). */
#include <stdint.h>

#include "board.h"

extern uint32_t stack_top[], data_start[], data_end[], bss_start[], bss_end[];
extern const uint32_t data_load[];
void reset(void);
void SVC_Handler(void);
void PendSV_Handler(void);
void SysTick_Handler(void);

enum { SYS_WRITE0 = 0x04, SYS_EXIT_EXTENDED = 0x20 };

static int semihost(uint32_t operation, const void *argument)
{
    register uint32_t r0 __asm__("r0") = operation;
    register const void *r1 __asm__("r1") = argument;
    __asm__ volatile("bkpt 0xAB" : "+r"(r0) : "r"(r1) : "memory");
    return (int)r0;
}

void board_print(const char *text)
{
    semihost(SYS_WRITE0, text);
}

_Noreturn void board_exit(int code)
{
    const uint32_t why[2] = {0x20026, (uint32_t)code}; /* the application ended */
    semihost(SYS_EXIT_EXTENDED, why);
    for (;;) {
    }
}

static void fault(void)
{
    board_print("fault\n");
    board_exit(2);
}

void reset(void)
{
#if defined(__ARM_FP)
    *(volatile uint32_t *)0xE000ED88 |= 0xFu << 20; /* CPACR: the floating-point unit is on */
    __asm__ volatile("dsb\n\tisb" : : : "memory");
#endif
    for (uint32_t *to = data_start, i = 0; to + i < data_end; i++)
        to[i] = data_load[i];
    for (uint32_t *to = bss_start; to < bss_end; to++)
        *to = 0;
    board_exit(main());
}

/* An RTOS has these of its own. */
__attribute__((weak)) void SVC_Handler(void)
{
    fault();
}

__attribute__((weak)) void PendSV_Handler(void)
{
    fault();
}

__attribute__((weak)) void SysTick_Handler(void)
{
    fault();
}

typedef void (*handler)(void);
__attribute__((used, section(".vectors"))) static const struct {
    uint32_t *stack;
    handler handlers[15];
} vectors = {stack_top, {reset, fault, fault, fault, fault, fault, fault, fault, fault, fault,
                         SVC_Handler, fault, fault, PendSV_Handler, SysTick_Handler}};
