/* main.c: the gemrun command: one artifact, one prompt or a conversation on the terminal.
 *
 * It uses the public interface only, but for the processor's features in --info. Text goes to
 * stdout as it is made, everything else to stderr. What it does not do: keep sessions, serve
 * others, guess a template for a model that has none. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gemrun.h"
#include "gr_port.h"

enum { EXIT_USAGE = 2, EXIT_TARGET = 4, EXIT_MEMORY = 5, EXIT_FILE = 6, EXIT_RUN = 8,
       EXIT_CANCELLED = 130, MAX_STOPS = 8, MAX_BANS = 4096 };

typedef struct options {
    const char *path, *prompt, *system, *kernel;
    uint32_t chat, interactive, ignore_eos, tokens, json, info, run_tests, check_weights;
    uint32_t help, version, ignore_memory, lock_memory;
    uint64_t max_tokens, top_k, seed, threads, kv_cache_size, batch, deadline_ms, affinity;
    float temperature, top_p, min_p, penalty;
    bool seen_top_k, seen_temperature, seen_top_p, seen_min_p, seen_penalty, seen_seed;
    const char *stops[MAX_STOPS];
    uint32_t bans[MAX_BANS];
    uint32_t stop_count, ban_count;
} options;

typedef enum kind { FLAG, NUMBER, REAL, TEXT, STOP, BAN } kind;

#define AT(field) offsetof(options, field)
static const struct option {
    const char *name;
    kind kind;
    size_t at, seen; /* seen: where it is noted that the option was given, or 0 */
    uint64_t most;
    const char *help;
} table[] = {
    {"--prompt", TEXT, AT(prompt), 0, 0, "TEXT  continue this text, raw; - reads it from stdin"},
    {"--chat", FLAG, AT(chat), 0, 0, "the prompt is a user's message: use the chat template"},
    {"--system", TEXT, AT(system), 0, 0, "TEXT  system message of a conversation"},
    {"--interactive", FLAG, AT(interactive), 0, 0, "a conversation, one line of stdin a turn"},
    {"--max-tokens", NUMBER, AT(max_tokens), 0, 1 << 20, "N  end after N tokens (256)"},
    {"--temperature", REAL, AT(temperature), AT(seen_temperature), 0, "T  0 is greedy"},
    {"--top-k", NUMBER, AT(top_k), AT(seen_top_k), 1 << 20, "K  best K tokens only, 0 is off"},
    {"--top-p", REAL, AT(top_p), AT(seen_top_p), 0, "P  best tokens that hold P of the weight"},
    {"--min-p", REAL, AT(min_p), AT(seen_min_p), 0, "P  tokens at least P times the best one's"},
    {"--repetition-penalty", REAL, AT(penalty), AT(seen_penalty), 0, "R  1 is off"},
    {"--seed", NUMBER, AT(seed), AT(seen_seed), UINT64_MAX, "N  of the random numbers (0)"},
    {"--stop", STOP, 0, 0, 0, "TEXT  end before this text; up to 8 times"},
    {"--ban", BAN, 0, 0, UINT32_MAX, "ID  never this token; repeatable"},
    {"--ignore-eos", FLAG, AT(ignore_eos), 0, 0, "go on past the end of the answer"},
    {"--deadline-ms", NUMBER, AT(deadline_ms), 0, UINT64_MAX / 1000000, "MS  end after this time"},
    {"--threads", NUMBER, AT(threads), 0, 8, "N  of 1 to 8 threads"},
    {"--affinity", NUMBER, AT(affinity), 0, UINT64_MAX, "MASK  pin one thread per set bit, 0x3"},
    {"--kv-cache-size", NUMBER, AT(kv_cache_size), 0, 1 << 20, "N  tokens of context"},
    {"--prefill-batch-size", NUMBER, AT(batch), 0, 4096, "N  prompt tokens per step"},
    {"--kernel", TEXT, AT(kernel), 0, 0, "NAME  force a kernel: scalar, avx2"},
    {"--ignore-memory", FLAG, AT(ignore_memory), 0, 0, "open with less memory than declared"},
    {"--lock-memory", FLAG, AT(lock_memory), 0, 0, "keep everything from being paged out"},
    {"--tokens", FLAG, AT(tokens), 0, 0, "print token ids instead of text"},
    {"--json", FLAG, AT(json), 0, 0, "print one JSON object with text, tokens and figures"},
    {"--info", FLAG, AT(info), 0, 0, "print what the artifact is, and end"},
    {"--run-tests", FLAG, AT(run_tests), 0, 0, "replay the stored test vectors, and end"},
    {"--check-weights", FLAG, AT(check_weights), 0, 0, "check the weights' checksum too"},
    {"--version", FLAG, AT(version), 0, 0, "print the version, and end"},
    {"--help", FLAG, AT(help), 0, 0, "print this, and end"},
};
enum { OPTIONS = sizeof table / sizeof table[0] };

static const char *const finishes[] = {"none",         "stop_id",   "stop_string",
                                       "max_tokens",   "context_full", "cancelled",
                                       "deadline",     "callback",  "error"};

/* ---- command line ---- */

static int usage(const char *object, const char *what)
{
    fprintf(stderr, "gemrun: %s: %s; see gemrun --help\n", object, what);
    return EXIT_USAGE;
}

static int help(void)
{
    puts("usage: gemrun MODEL.gembin --prompt TEXT [options]\n"
         "\n"
         "Runs a compiled model. --prompt alone is continued as it stands, even where the model\n"
         "has a chat template: --chat and --interactive use that.\n");
    for (size_t i = 0; i < OPTIONS; i++) {
        const char *words = table[i].help, *gap = strstr(words, "  ");
        char left[40];
        int shown = gap ? (int)(gap - words) : 0;
        snprintf(left, sizeof left, "%s %.*s", table[i].name, shown, words);
        printf("  %-26s  %s\n", left, gap ? gap + 2 : words);
    }
    puts("\nExit: 0 done, 2 usage, 5 memory, 6 file, 8 run failed, 130 cancelled.");
    return 0;
}

static bool parse_number(const char *text, uint64_t most, uint64_t *out)
{
    char *end;
    errno = 0;
    *out = strtoull(text, &end, 0);
    return text[0] >= '0' && text[0] <= '9' && *end == 0 && errno == 0 && *out <= most;
}

static bool parse_real(const char *text, float *out)
{
    char *end;
    *out = strtof(text, &end);
    return *text != 0 && *end == 0;
}

static bool store(options *o, const struct option *at, const char *value)
{
    char *field = (char *)o + at->at;
    uint64_t number = 0;
    if (at->seen) {
        *((bool *)o + at->seen / sizeof(bool)) = true;
    }
    switch (at->kind) {
    case FLAG:   *(uint32_t *)(void *)field = 1; return true;
    case TEXT:   *(const char **)(void *)field = value; return true;
    case REAL:   return parse_real(value, (float *)(void *)field);
    case NUMBER: return parse_number(value, at->most, (uint64_t *)(void *)field);
    case STOP:
        if (o->stop_count == MAX_STOPS) {
            return false;
        }
        o->stops[o->stop_count++] = value;
        return true;
    default:
        if (o->ban_count == MAX_BANS || !parse_number(value, at->most, &number)) {
            return false;
        }
        o->bans[o->ban_count++] = (uint32_t)number;
        return true;
    }
}

static int parse(int argc, char **argv, options *o)
{
    for (int i = 1; i < argc; i++) {
        const struct option *at = NULL;
        for (size_t k = 0; k < OPTIONS && !at; k++) {
            at = strcmp(argv[i], table[k].name) == 0 ? table + k : NULL;
        }
        if (!at && argv[i][0] == '-') {
            return usage(argv[i], "unknown option");
        }
        if (!at) {
            if (o->path) {
                return usage(argv[i], "a second file");
            }
            o->path = argv[i];
            continue;
        }
        if (at->kind != FLAG && i + 1 == argc) {
            return usage(argv[i], "its value is missing");
        }
        const char *value = at->kind == FLAG ? NULL : argv[++i];
        if (!store(o, at, value)) {
            return usage(at->name, "a value that is not allowed, or one too many");
        }
    }
    if (o->help || o->version) {
        return 0;
    }
    if (!o->path) {
        return usage("MODEL.gembin", "no file given");
    }
    bool acts = o->prompt || o->interactive || o->info || o->run_tests || o->check_weights;
    return acts ? 0 : usage("--prompt", "nothing to do");
}

/* ---- errors ---- */

static int exit_code(int32_t status)
{
    if (status > GEMRUN_E_OPEN) {
        return status == GEMRUN_E_CONTEXT ? EXIT_MEMORY : EXIT_USAGE;
    }
    if (status > GEMRUN_E_MEMORY) {
        return EXIT_FILE;
    }
    if (status == GEMRUN_E_BOARD) {
        return EXIT_TARGET;
    }
    return status > GEMRUN_E_TEST_FAILED ? EXIT_MEMORY : EXIT_RUN;
}

/* Causes that an operator meets as "it does not fit, or does not fit together". */
static bool is_layout(int32_t status)
{
    return status == GEMRUN_E_MEMORY || status == GEMRUN_E_MAP || status == GEMRUN_E_CONTEXT ||
           status == GEMRUN_E_SIZE || status == GEMRUN_E_TABLE || status == GEMRUN_E_GAP ||
           (status <= GEMRUN_E_CONF && status >= GEMRUN_E_ROPE) || status == GEMRUN_E_RAM;
}

static int load_failed(int32_t status)
{
    fprintf(stderr, "Model load failed: %s%s\n",
            is_layout(status) ? "Memory layout mismatch: " : "", gemrun_last_error());
    return exit_code(status);
}

static int run_failed(int32_t status)
{
    fprintf(stderr, "gemrun: %s\n", gemrun_last_error());
    return exit_code(status);
}

/* ---- output ---- */

typedef struct text {
    char *bytes;
    size_t size;
} text;

static bool append(text *t, const char *bytes, size_t size)
{
    char *grown = realloc(t->bytes, t->size + size + 1);
    if (!grown) {
        return false;
    }
    memcpy(grown + t->size, bytes, size);
    t->bytes = grown;
    t->size += size;
    grown[t->size] = 0;
    return true;
}

typedef struct answer { /* what a run makes */
    const options *o;
    text text;
} answer;

static int on_text(void *user, int32_t token, const char *bytes, size_t size)
{
    answer *a = user;
    bool kept = append(&a->text, bytes, size), good = true;
    if (a->o->tokens && !a->o->json && token >= 0) {
        good = printf("%d ", token) > 0;
    } else if (!a->o->tokens && !a->o->json) {
        good = fwrite(bytes, 1, size, stdout) == size;
    }
    return !kept || !good || fflush(stdout) != 0;
}

static void print_string(const char *s, size_t size)
{
    putchar('"');
    for (size_t i = 0; i < size; i++) {
        unsigned char c = (unsigned char)s[i];
        if (c == '"' || c == '\\') {
            printf("\\%c", c);
        } else if (c < 32 || c == 127) {
            printf("\\u%04x", c);
        } else {
            putchar(c);
        }
    }
    putchar('"');
}

static void print_json(const answer *a, const int32_t *ids, int32_t count, const gemrun_stats *s)
{
    printf("{\"ttft_ms\": %.3f, \"throughput_tps\": %.3f, \"kv_cache_used\": %u, ", s->ttft_ms,
           s->decode_tps, s->kv_used);
    printf("\"kv_cache_size\": %u, \"prompt_tokens\": %u, \"generated_tokens\": %u, ", s->kv_size,
           s->prompt_tokens, s->generated_tokens);
    printf("\"prefill_tps\": %.3f, \"decode_max_ms\": %.3f, \"threads\": %u, \"finish\": \"%s\", ",
           s->prefill_tps, s->decode_max_ms, s->threads, finishes[s->finish]);
    printf("\"ram_total\": %llu, \"tokens\": [", (unsigned long long)s->ram_total);
    for (int32_t i = 0; i < count; i++) {
        printf("%s%d", i ? ", " : "", ids[i]);
    }
    printf("], \"text\": ");
    print_string(a->text.bytes ? a->text.bytes : "", a->text.size);
    puts("}");
}

static void print_stats(const gemrun_stats *s)
{
    fprintf(stderr,
            "%u tokens (%s), first after %.1f ms, %.2f tok/s; prompt %u tokens, %.1f tok/s; "
            "context %u of %u; memory %.1f MB, %u threads\n",
            s->generated_tokens, finishes[s->finish], s->ttft_ms, s->decode_tps, s->prompt_tokens,
            s->prefill_tps, s->kv_used, s->kv_size, (double)s->ram_total * 1e-6, s->threads);
}

static int print_info(gemrun_context_t *ctx)
{
    static const char *const kinds[] = {"f32", "f16", "int8"};
    gemrun_info f = {.size = sizeof f};
    gemrun_stats s = {.size = sizeof s};
    char features[160];
    gemrun_status st = gemrun_get_info(ctx, &f);
    st = st == GEMRUN_OK ? gemrun_get_stats(ctx, &s) : st;
    if (st != GEMRUN_OK) {
        return run_failed(st);
    }
    gr_port_features(features, sizeof features);
    printf("model      %s (%s), for %s\n", f.name, f.family, f.target);
    printf("shape      %u layers, hidden %u, vocabulary %u\n", f.layers, f.hidden, f.vocab_rows);
    printf("context    %u tokens compiled, %u in use; prefill %u at a time; KV %s\n", f.context,
           s.kv_size, f.chunk, kinds[f.kv_type < 3 ? f.kv_type : 0]);
    printf("chat       %s\n", f.has_chat ? "yes" : "no template");
    printf("stop ids  ");
    for (uint32_t i = 0; i < f.stop_id_count; i++) {
        printf(" %u", f.stop_ids[i]);
    }
    printf("\nprocessor  %s; kernel %s; %u threads, %u planned, %u cores allowed\n", features,
           f.kernel, s.threads, f.threads_planned, gr_port_cores(""));
    printf("memory     %llu bytes: weights %llu, tables %llu, arena %llu, KV %llu, engine %llu, "
           "stacks %llu\n", (unsigned long long)s.ram_total, (unsigned long long)s.ram_weights,
           (unsigned long long)s.ram_tables, (unsigned long long)s.ram_arena,
           (unsigned long long)s.ram_kv, (unsigned long long)s.ram_engine,
           (unsigned long long)s.ram_stacks);
    printf("declared   %llu bytes for %u threads\n", (unsigned long long)s.declared_total,
           f.threads_planned);
    return 0;
}

/* ---- runs ---- */

static gemrun_context_t *volatile interruptible; /* for the signal handler */

static void on_signal(int signal)
{
    (void)signal;
    gemrun_cancel(interruptible);
}

static void catch_signals(gemrun_context_t *ctx)
{
    struct sigaction act = {.sa_handler = ctx ? on_signal : SIG_DFL,
                            .sa_flags = (int)SA_RESETHAND}; /* a second one ends the process */
    interruptible = ctx;
    sigaction(SIGINT, &act, NULL);
    sigaction(SIGTERM, &act, NULL);
}

static gemrun_request request_of(gemrun_context_t *ctx, const options *o, answer *a)
{
    gemrun_request q = gemrun_request_default(ctx);
    q.max_tokens = o->max_tokens ? (uint32_t)o->max_tokens : q.max_tokens;
    q.temperature = o->seen_temperature ? o->temperature : q.temperature;
    q.top_k = o->seen_top_k ? (uint32_t)o->top_k : q.top_k;
    q.top_p = o->seen_top_p ? o->top_p : q.top_p;
    q.min_p = o->seen_min_p ? o->min_p : q.min_p;
    q.repetition_penalty = o->seen_penalty ? o->penalty : q.repetition_penalty;
    q.seed_set = o->seen_seed;
    q.seed = o->seed;
    q.deadline_ns = o->deadline_ms * 1000000;
    q.banned = o->bans;
    q.banned_count = o->ban_count;
    q.stop_strings = o->stops;
    q.stop_string_count = o->stop_count;
    q.ignore_stop_ids = o->ignore_eos;
    q.on_text = on_text;
    q.user = a;
    return q;
}

/* One answer; messages NULL: the raw prompt. The text stays in `a` for the caller to free. */
static int32_t answer_once(gemrun_context_t *ctx, const options *o, const char *prompt,
                           const gemrun_message *messages, size_t count, answer *a, bool quiet)
{
    gemrun_request q = request_of(ctx, o, a);
    gemrun_stats s = {.size = sizeof s};
    int32_t *ids = malloc(q.max_tokens * sizeof *ids);
    if (!ids) {
        return GEMRUN_E_MAP;
    }
    catch_signals(ctx);
    int32_t n = messages ? gemrun_chat(ctx, messages, count, &q, ids)
                         : gemrun_generate(ctx, prompt, &q, ids);
    catch_signals(NULL);
    if (n >= 0 && gemrun_get_stats(ctx, &s) == GEMRUN_OK) {
        if (o->json) {
            print_json(a, ids, n, &s);
        } else {
            puts("");
            fflush(stdout);
            if (!quiet) {
                print_stats(&s);
            }
        }
    }
    free(ids);
    return n >= 0 && s.finish == GEMRUN_FINISH_CANCELLED ? INT32_MAX : n;
}

static int run_once(gemrun_context_t *ctx, const options *o, const char *prompt)
{
    const gemrun_message messages[] = {{GEMRUN_SYSTEM, o->system}, {GEMRUN_USER, prompt}};
    size_t skip = o->system ? 0 : 1;
    answer a = {.o = o};
    bool chat = o->chat || o->system;
    int32_t n = answer_once(ctx, o, prompt, chat ? messages + skip : NULL, 2 - skip, &a, false);
    free(a.text.bytes);
    return n < 0 ? run_failed(n) : n == INT32_MAX ? EXIT_CANCELLED : 0;
}

static bool read_all(text *t)
{
    char part[4096];
    size_t n;
    while ((n = fread(part, 1, sizeof part, stdin)) > 0) {
        if (memchr(part, 0, n) || !append(t, part, n)) {
            return false;
        }
    }
    return !ferror(stdin) && (t->bytes || append(t, "", 0));
}

static int run_prompt(gemrun_context_t *ctx, const options *o)
{
    text input = {0};
    if (strcmp(o->prompt, "-") != 0) {
        return run_once(ctx, o, o->prompt);
    }
    int code = read_all(&input) ? run_once(ctx, o, input.bytes)
                                : usage("stdin", "unreadable, or holds a zero byte");
    free(input.bytes);
    return code;
}

/* The history is ours: every turn goes to the engine as a whole. */
static int converse(gemrun_context_t *ctx, const options *o)
{
    gemrun_message *messages = NULL;
    size_t count = 0, capacity = 0;
    char *line = NULL;
    size_t room = 0;
    ssize_t got;
    int code = 0;
    while (code == 0) {
        if (count + 3 > capacity) {
            gemrun_message *grown = realloc(messages, (2 * capacity + 8) * sizeof *messages);
            if (!grown) {
                break;
            }
            messages = grown;
            capacity = 2 * capacity + 8;
        }
        if (count == 0 && o->system) {
            messages[count++] = (gemrun_message){GEMRUN_SYSTEM, strdup(o->system)};
        }
        fputs("> ", stderr);
        got = getline(&line, &room, stdin);
        if (got < 0) {
            break;
        }
        line[strcspn(line, "\n")] = 0;
        if (line[0] == 0) {
            continue;
        }
        answer a = {.o = o};
        messages[count++] = (gemrun_message){GEMRUN_USER, strdup(line)};
        int32_t n = answer_once(ctx, o, NULL, messages, count, &a, true);
        if (n == GEMRUN_E_PROMPT || n == GEMRUN_E_TEXT) { /* say so, forget the turn, go on */
            run_failed(n);
            free((void *)(uintptr_t)messages[--count].text);
        } else if (n < 0) {
            code = run_failed(n);
        } else {
            char *reply = a.text.bytes ? a.text.bytes : strdup("");
            a.text.bytes = NULL;
            messages[count++] = (gemrun_message){GEMRUN_ASSISTANT, reply};
        }
        free(a.text.bytes);
    }
    for (size_t i = 0; i < count; i++) {
        free((void *)(uintptr_t)messages[i].text);
    }
    free(messages);
    free(line);
    return code;
}

static int run_tests(gemrun_context_t *ctx)
{
    int32_t n = gemrun_run_tests(ctx);
    if (n < 0) {
        return run_failed(n);
    }
    printf("%d test vectors passed\n", n);
    return 0;
}

int main(int argc, char **argv)
{
    static options o;
    int code = parse(argc, argv, &o);
    if (code != 0 || o.help) {
        return code != 0 ? code : help();
    }
    if (o.version) {
        printf("gemrun %s\n", gemrun_version());
        return 0;
    }
    gemrun_config c = gemrun_config_default();
    c.threads = (uint32_t)o.threads;
    c.thread_affinity = o.affinity;
    c.kv_cache_size = (uint32_t)o.kv_cache_size;
    c.prefill_batch_size = (uint32_t)o.batch;
    c.kernel = o.kernel;
    c.ignore_memory = o.ignore_memory;
    c.lock_memory = o.lock_memory;
    c.weights_check = o.check_weights ? GEMRUN_WEIGHTS_FULL : GEMRUN_WEIGHTS_UNCHECKED;
    gemrun_context_t *ctx = NULL;
    gemrun_status st = gemrun_open(&ctx, o.path, &c);
    if (st != GEMRUN_OK) {
        return load_failed(st);
    }
    if (o.check_weights) {
        fprintf(stderr, "weights: checksum agrees\n");
    }
    code = o.info ? print_info(ctx) : 0;
    code = code == 0 && o.run_tests ? run_tests(ctx) : code;
    code = code == 0 && o.interactive ? converse(ctx, &o) : code;
    code = code == 0 && o.prompt && !o.interactive ? run_prompt(ctx, &o) : code;
    gemrun_destroy(ctx);
    return fflush(stdout) != 0 && code == 0 ? EXIT_RUN : code;
}
