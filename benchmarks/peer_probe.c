/* peer_probe.c: opens a model with a peer's own library and tells when it was open, when the first
 * token was there, and what memory it took. `peer_probe MODEL THREADS CONTEXT STEPS ID..`
 *
 * Times begin when main does, so that loading the program's libraries does not count. The ids are
 * the prompt; STEPS more tokens follow greedily. One JSON line. -DPEER_IK: for ik_llama.cpp. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "llama.h"

enum { MAX_IDS = 8192 };

static double now(void) /* ms */
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

static void quiet(enum ggml_log_level level, const char *text, void *user)
{
    (void)user;
    if (level == GGML_LOG_LEVEL_ERROR)
        fputs(text, stderr);
}

static void fail(const char *what)
{
    fprintf(stderr, "peer_probe: %s\n", what);
    exit(1);
}

static void decode(struct llama_context *ctx, llama_token *ids, int count, int at)
{
#ifdef PEER_IK
    struct llama_batch batch = llama_batch_get_one(ids, count, at, 0);
#else
    struct llama_batch batch = llama_batch_get_one(ids, count);
    (void)at;
#endif
    if (llama_decode(ctx, batch) != 0)
        fail("decode failed");
}

static llama_token best(struct llama_context *ctx, int vocab)
{
    const float *logits = llama_get_logits_ith(ctx, -1);
    llama_token most = 0;
    for (llama_token i = 1; i < vocab; i++)
        if (logits[i] > logits[most])
            most = i;
    return most;
}

static long memory(const char *key) /* KiB */
{
    char line[256];
    long value = -1;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, key, strlen(key)) == 0)
            value = strtol(line + strlen(key), NULL, 10);
    if (f)
        fclose(f);
    return value;
}

int main(int argc, char **argv)
{
    static llama_token ids[MAX_IDS];
    double start = now();
    if (argc < 6 || argc - 5 > MAX_IDS)
        fail("usage: peer_probe MODEL THREADS CONTEXT STEPS ID..");
    int threads = atoi(argv[2]), steps = atoi(argv[4]), count = argc - 5;
    for (int i = 0; i < count; i++)
        ids[i] = (llama_token)atoi(argv[5 + i]);
    llama_log_set(quiet, NULL);
    llama_backend_init();
    struct llama_model *model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model)
        fail("the model cannot be loaded");
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = (uint32_t)atoi(argv[3]);
    params.n_threads = params.n_threads_batch = threads;
#ifdef PEER_IK
    params.flash_attn = true; /* as its own llama-bench has it */
#endif
    struct llama_context *ctx = llama_init_from_model(model, params);
    if (!ctx)
        fail("the context cannot be made");
#ifdef PEER_IK
    int vocab = llama_n_vocab(model);
#else
    int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
#endif
    double open = now();
    decode(ctx, ids, count, 0);
    llama_token next = best(ctx, vocab);
    double first = now();
    for (int i = 0; i < steps; i++) {
        decode(ctx, &next, 1, count + i);
        next = best(ctx, vocab);
    }
    printf("{\"open_ms\": %.3f, \"first_ms\": %.3f, \"steps_ms\": %.3f, \"peak_kib\": %ld}\n",
           open - start, first - start, now() - first, memory("VmHWM:"));
    llama_free(ctx);
#ifdef PEER_IK
    llama_free_model(model);
#else
    llama_model_free(model);
#endif
    return 0;
}
