/* attached.c: a program of yours with a model in it, which gemctld may watch, pace, disable and
 * replace while it runs. README.md says how to build it.
 *
 *     attached MODEL.gembin [SOCKET NAME]
 *
 * Asks the model the same thing again and again and prints the answers, until SIGINT or SIGTERM.
 * The loop knows nothing of replacements: a request keeps the model that it began with. */
#define _POSIX_C_SOURCE 200809L
#include <gemrun_control.h>

#include <signal.h>
#include <stdio.h>
#include <time.h>

static volatile sig_atomic_t stop;

static void end(int number)
{
    (void)number;
    stop = 1;
}

/* Text of the answer, as it is made. Non-zero ends it. */
static int print(void *user, int32_t token, const char *text, size_t size)
{
    (void)user, (void)token;
    fwrite(text, 1, size, stdout);
    return stop;
}

static int failed(const char *what)
{
    fprintf(stderr, "attached: %s: %s\n", what, gemrun_last_error());
    return 1;
}

static int ask_until_stopped(gemrun_handle_t *h)
{
    gemrun_request q = gemrun_handle_request(h);
    q.max_tokens = 16;
    q.on_text = print;
    while (!stop) {
        int32_t n = gemrun_handle_generate(h, "The conveyor", &q, NULL);
        if (n >= 0) {
            puts("");
        } else if (n != GEMRUN_E_STATE) { /* disabled is no failure: it will be enabled again */
            return failed("answer");
        }
        fflush(stdout);
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    }
    return 0;
}

int main(int argc, char **argv)
{
    gemrun_handle_t *h = NULL;
    if (argc != 2 && argc != 4) {
        fprintf(stderr, "usage: attached MODEL.gembin [SOCKET NAME]\n");
        return 2;
    }
    signal(SIGINT, end);
    signal(SIGTERM, end);
    if (gemrun_handle_open(&h, argv[1], NULL) != GEMRUN_OK) {
        return failed("open");
    }
    int code = 0;
    if (argc == 4 && gemrun_attach(h, argv[2], argv[3]) != GEMRUN_OK) {
        code = failed("attach");
    }
    code = code ? code : ask_until_stopped(h);
    gemrun_handle_close(h);
    return code;
}
