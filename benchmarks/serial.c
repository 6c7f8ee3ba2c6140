/* serial.c: a controller and a device on a serial line (a pair of pseudo terminals), which talk
 * every 10 ms. `serial SECONDS`; SIGTERM ends it before.
 *
 * The controller sends 8 bytes at fixed times and waits for the device, another process, to send
 * them back. One JSON line, in microseconds: how late the controller woke (wake), and how long the
 * answer took (answer): median, p99 and maximum, and the exchanges that took longer than a period. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

enum { PERIOD_NS = 10000000, FRAME = 8, MOST = 400000 };
static const int64_t SECOND = 1000000000;
static volatile sig_atomic_t stopped;

static void stop(int number)
{
    (void)number;
    stopped = 1;
}

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * SECOND + t.tv_nsec;
}

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static void move(int fd, uint8_t *frame, int writing) /* a whole frame, in pieces if need be */
{
    for (size_t done = 0; done < FRAME;) {
        ssize_t n = writing ? write(fd, frame + done, FRAME - done)
                            : read(fd, frame + done, FRAME - done);
        if (n <= 0)
            fail("serial: the line");
        done += (size_t)n;
    }
}

static int raw_line(int fd)
{
    struct termios mode;
    if (tcgetattr(fd, &mode) != 0)
        fail("serial: tcgetattr");
    cfmakeraw(&mode);
    if (tcsetattr(fd, TCSANOW, &mode) != 0)
        fail("serial: tcsetattr");
    return fd;
}

static void device(const char *name)
{
    uint8_t frame[FRAME];
    int fd = open(name, O_RDWR | O_NOCTTY);
    if (fd < 0)
        fail(name);
    raw_line(fd);
    for (;;) {
        move(fd, frame, 0);
        move(fd, frame, 1);
    }
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print(const char *name, double *x, uint32_t n)
{
    qsort(x, n, sizeof *x, by_value);
    printf("\"%s\": {\"median\": %.1f, \"p99\": %.1f, \"max\": %.1f}, ", name, x[n / 2],
           x[(uint64_t)n * 99 / 100], x[n - 1]);
}

/* One exchange that is due at a time; returns when it was done, 0 for a wrong answer. */
static int64_t exchange(int line, uint32_t number, int64_t due, double *wake, double *answer)
{
    uint8_t frame[FRAME] = {(uint8_t)number}, back[FRAME];
    struct timespec t = {due / SECOND, due % SECOND};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) != 0)
        ;
    int64_t woke = now();
    move(line, frame, 1);
    move(line, back, 0);
    int64_t done = now();
    *wake = 1e-3 * (double)(woke - due);
    *answer = 1e-3 * (double)(done - woke);
    return memcmp(frame, back, FRAME) == 0 ? done : 0;
}

static int open_line(pid_t *child)
{
    int line = posix_openpt(O_RDWR | O_NOCTTY);
    if (line < 0 || grantpt(line) != 0 || unlockpt(line) != 0)
        fail("serial: no pseudo terminal");
    raw_line(line);
    *child = fork();
    if (*child < 0)
        fail("serial: fork");
    if (*child == 0)
        device(ptsname(line));
    usleep(200000); /* the device opens its end */
    return line;
}

int main(int argc, char **argv)
{
    static double wake[MOST], answer[MOST];
    double seconds = argc == 2 ? atof(argv[1]) : 0;
    if (seconds <= 0 || seconds > 3600)
        return fprintf(stderr, "usage: serial SECONDS (up to 3600)\n"), 2;
    uint32_t most = (uint32_t)(seconds * 100) + 1, count = 0, missed = 0;
    pid_t child;
    int line = open_line(&child);
    struct sigaction action = {.sa_handler = stop, .sa_flags = SA_RESTART};
    sigaction(SIGTERM, &action, NULL);
    int64_t due = now();
    while (count < most && !stopped) {
        due += PERIOD_NS;
        int64_t done = exchange(line, count, due, &wake[count], &answer[count]);
        if (!done)
            return fprintf(stderr, "serial: the answer is another frame\n"), 1;
        count++;
        if (done - due > PERIOD_NS) { /* a late exchange does not make the next ones late */
            missed++;
            due = done;
        }
    }
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    printf("{");
    print("wake", wake, count);
    print("answer", answer, count);
    printf("\"exchanges\": %u, \"missed\": %u}\n", count, missed);
    return 0;
}
