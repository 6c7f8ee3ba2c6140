/* main.c: a model under Zephyr. Its part is ../../bare_metal/main.c, compiled as run_model. */
#if __has_include(<zephyr/kernel.h>)
#include <zephyr/kernel.h>
#include <zephyr/sys/printk.h>
#else /* before Zephyr 3.1 */
#include <kernel.h>
#include <sys/printk.h>
#endif

#include <gemrun_bare.h>

#include "board.h"

int run_model(void);

/* The engine's clock: deadlines and figures of time work. */
uint64_t gemrun_bare_now(void)
{
    return k_ticks_to_ns_floor64((uint64_t)k_uptime_ticks());
}

void board_print(const char *text)
{
    printk("%s", text);
}

int main(void)
{
    int result = run_model();
    printk("result: %d\n", result);
    return result;
}
