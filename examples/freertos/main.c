/* main.c: a model beside other work under FreeRTOS. The model runs in a task of low priority and is
 * interrupted whenever the task of high priority has something to do; what it computes is the same.
 *
 * The model's part is ../bare_metal/main.c, compiled as run_model. */
#include <FreeRTOS.h>
#include <task.h>

#include <gemrun_bare.h>

#include "board.h"

enum { MODEL_STACK = 16384, BEAT_STACK = 256 }; /* words */

int run_model(void);

static StackType_t model_stack[MODEL_STACK], beat_stack[BEAT_STACK];
static StaticTask_t model_task, beat_task;
static volatile uint32_t beats;

/* The engine's clock: deadlines and figures of time work. */
uint64_t gemrun_bare_now(void)
{
    return (uint64_t)xTaskGetTickCount() * (1000000000u / configTICK_RATE_HZ);
}

static void print_count(const char *before, uint32_t value, const char *after)
{
    char text[12], *at = text + sizeof text - 1;
    *at = 0;
    do {
        *--at = (char)('0' + value % 10);
        value /= 10;
    } while (value > 0);
    board_print(before);
    board_print(at);
    board_print(after);
}

static void beat(void *arg)
{
    (void)arg;
    for (TickType_t last = xTaskGetTickCount();; beats++)
        vTaskDelayUntil(&last, 2);
}

static void ask(void *arg)
{
    (void)arg;
    int result = run_model();
    print_count("interrupted: ", beats, " times\n");
    print_count("stack left: ", 4 * (uint32_t)uxTaskGetStackHighWaterMark(NULL), " bytes\n");
    board_exit(result == 0 && beats > 0 ? 0 : 1);
}

void vApplicationStackOverflowHook(TaskHandle_t task, char *name)
{
    (void)task;
    board_print(name);
    board_print(": stack overflow\n");
    board_exit(3);
}

int main(void)
{
    xTaskCreateStatic(ask, "model", MODEL_STACK, NULL, 1, model_stack, &model_task);
    xTaskCreateStatic(beat, "beat", BEAT_STACK, NULL, 2, beat_stack, &beat_task);
    vTaskStartScheduler();
    return 1;
}
