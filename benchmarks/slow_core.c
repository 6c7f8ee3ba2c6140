/* slow_core.c: makes a core slower: `slow_core CORE BUSY IDLE`, in microseconds, until killed.
 *
 * A process with a real-time priority takes the core for BUSY, leaves it for IDLE, and so on: to
 * everything else the core looks as fast as IDLE / (BUSY + IDLE) of itself, in slices that are short
 * beside a layer. Needs the right to set such a priority. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return fputs("usage: slow_core CORE BUSY_US IDLE_US\n", stderr), 2;
    struct sched_param priority = {.sched_priority = 10};
    cpu_set_t one;
    int64_t busy = atoll(argv[2]) * 1000, idle = atoll(argv[3]) * 1000;
    CPU_ZERO(&one);
    CPU_SET((unsigned)atoi(argv[1]), &one);
    if (sched_setaffinity(0, sizeof one, &one) != 0)
        return perror("slow_core: sched_setaffinity"), 1;
    if (sched_setscheduler(0, SCHED_FIFO, &priority) != 0)
        return perror("slow_core: sched_setscheduler"), 1;
    prctl(PR_SET_TIMERSLACK, 1UL);
    for (;;) {
        int64_t until = now() + busy, next = until + idle;
        while (now() < until)
            ;
        struct timespec wake = {next / 1000000000, next % 1000000000};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &wake, NULL);
    }
}
