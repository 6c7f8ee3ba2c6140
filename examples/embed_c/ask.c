/* ask.c: the smallest program with a model in it; README.md says how to build it in each way.
 *
 *     ask MODEL.gembin [PROMPT]
 *
 * Replays the test vectors that the artifact carries, so that it is known that this build computes
 * what the compile host computed; then completes PROMPT. A minimal engine has no calls with text:
 * with -DGR_MINIMAL the vectors are all. */
#include <gemrun.h>

#include <stdio.h>

#ifndef GR_MINIMAL
static int print(void *user, int32_t token, const char *text, size_t size)
{
    (void)user, (void)token;
    fwrite(text, 1, size, stdout);
    return 0;
}
#endif

int main(int argc, char **argv)
{
    gemrun_context_t *ctx = NULL;
    gemrun_config config = gemrun_config_default();
    if (argc < 2) {
        fprintf(stderr, "usage: ask MODEL.gembin [PROMPT]\n");
        return 2;
    }
    config.allow_foreign_board = 1;
    int32_t result = gemrun_open(&ctx, argv[1], &config);
    int32_t passed = result < 0 ? result : gemrun_run_tests(ctx);
#ifndef GR_MINIMAL
    if (passed >= 0 && argc > 2) {
        gemrun_request request = gemrun_request_default(ctx);
        request.max_tokens = 32;
        request.on_text = print;
        result = gemrun_generate(ctx, argv[2], &request, NULL);
        printf("\n");
    }
#endif
    if (passed < 0 || result < 0)
        fprintf(stderr, "ask: %s\n", gemrun_last_error());
    else
        printf("ask: %d test vectors passed\n", (int)passed);
    gemrun_destroy(ctx);
    return passed < 0 || result < 0;
}
