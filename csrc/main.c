/* main.c: the gemrun command: one artifact, one prompt or a conversation on the terminal.
 *
 * It uses the public interfaces only, but for the processor's features in --info. Text goes to
 * stdout as it is made, everything else to stderr. What it does not do: keep several sessions,
 * serve others than gemctld, guess a template for a model that has none. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli.h"
#include "doctor.h"
#include "gemrun_board.h"
#include "gemrun_control.h"
#include "gemrun_session.h"
#include "gemrun_thermal.h"
#include "gr_port.h"
#include "gs_channel.h"
#include "sensor.h"
#include "tune.h"

enum { EXIT_USAGE = 2, EXIT_TARGET = 4, EXIT_MEMORY = 5, EXIT_FILE = 6, EXIT_RUN = 8,
       EXIT_CANCELLED = 130, MAX_STOPS = 8, MAX_BANS = 4096 };

typedef struct options {
    const char *path, *prompt, *system, *kernel, *head, *on_full, *session, *sensor;
    uint32_t chat, interactive, ignore_eos, tokens, json, info, run_tests, check_weights;
    uint32_t help, version, ignore_memory, lock_memory, tune, constant_work, no_save, doctor;
    uint32_t foreign_board;
    uint64_t decode_threads, balance, speculate, serve;
    uint64_t max_tokens, top_k, seed, threads, kv_cache_size, batch, deadline_ms, affinity;
    float temperature, top_p, min_p, penalty;
    bool seen_top_k, seen_temperature, seen_top_p, seen_min_p, seen_penalty, seen_seed;
    const char *stops[MAX_STOPS];
    uint32_t bans[MAX_BANS];
    uint32_t stop_count, ban_count, full; /* full: on_full as a number */
} options;

/* REAL takes its least and most, ABOVE only more than its least, BELOW only less than its most. */
typedef enum kind { FLAG, NUMBER, MASK, REAL, ABOVE, BELOW, TEXT, STOP, BAN } kind;

#define AT(field) offsetof(options, field)
static const struct option {
    const char *name;
    kind kind;
    size_t at, seen; /* seen: where it is noted that the option was given, or 0 */
    uint64_t least, most;
    const char *help;
} table[] = {
    {"--prompt", TEXT, AT(prompt), 0, 0, 0, "TEXT  continue this text, raw; - reads it from stdin"},
    {"--chat", FLAG, AT(chat), 0, 0, 0, "the prompt is a user's message: use the chat template"},
    {"--system", TEXT, AT(system), 0, 0, 0, "TEXT  system message of a conversation"},
    {"--interactive", FLAG, AT(interactive), 0, 0, 0, "a conversation, one line of stdin a turn"},
    {"--session", TEXT, AT(session), 0, 0, 0,
     "FILE  go on behind what it holds, if it is there; save all to it at the end"},
    {"--no-save", FLAG, AT(no_save), 0, 0, 0, "with --session: leave its file as it is"},
    {"--max-tokens", NUMBER, AT(max_tokens), 0, 1, 1 << 20, "N  end after N tokens (256)"},
    {"--temperature", REAL, AT(temperature), AT(seen_temperature), 0, 100,
     "T  0 is greedy (the model's default, or 0.3)"},
    {"--top-k", NUMBER, AT(top_k), AT(seen_top_k), 0, 1 << 20,
     "K  best K tokens only, 0 is off (the model's, or 64)"},
    {"--top-p", ABOVE, AT(top_p), AT(seen_top_p), 0, 1,
     "P  best tokens that hold P of the weight (the model's, or 0.85)"},
    {"--min-p", BELOW, AT(min_p), AT(seen_min_p), 0, 1,
     "P  tokens at least P times the best one's weight (the model's, or 0)"},
    {"--repetition-penalty", ABOVE, AT(penalty), AT(seen_penalty), 0, 100,
     "R  1 is off (the model's, or 1)"},
    {"--seed", NUMBER, AT(seed), AT(seen_seed), 0, UINT64_MAX, "N  of the random numbers (0)"},
    {"--stop", STOP, 0, 0, 1, 128, "TEXT  end before this text; up to 8 times"},
    {"--ban", BAN, 0, 0, 0, UINT32_MAX, "ID  never this token; repeatable"},
    {"--ignore-eos", FLAG, AT(ignore_eos), 0, 0, 0, "go on past the end of the answer"},
    {"--deadline-ms", NUMBER, AT(deadline_ms), 0, 1, UINT64_MAX / 1000000,
     "MS  end after this time (none)"},
    {"--threads", NUMBER, AT(threads), 0, 1, 8,
     "N  threads (the cores granted, without slow ones, at most the plan)"},
    {"--decode-threads", NUMBER, AT(decode_threads), 0, 1, 8,
     "N  of them for one token at a time (as --tune found, else all)"},
    {"--balance", NUMBER, AT(balance), 0, 0, 2,
     "B  work in pieces: 0 where cores differ, 1 never, 2 always (0)"},
    {"--affinity", MASK, AT(affinity), 0, 1, UINT64_MAX,
     "MASK  pin one thread per set bit, as 0x3 (none)"},
    {"--kv-cache-size", NUMBER, AT(kv_cache_size), 0, 1, UINT32_MAX,
     "N  tokens of context to use, at most the compiled N; memory stays as compiled"},
    {"--prefill-batch-size", NUMBER, AT(batch), 0, 1, UINT32_MAX,
     "N  prompt tokens per step, at most as compiled (as compiled)"},
    {"--kernel", TEXT, AT(kernel), 0, 0, 0,
     "NAME  force a kernel (--info lists them), or GEMV/GEMM"},
    {"--head", TEXT, AT(head), 0, 0, 0,
     "NAME  full, or two-plane: less is read for equal tokens (greedy: two-plane)"},
    {"--on-full", TEXT, AT(on_full), 0, 0, 0,
     "NAME  at the context's end: stop, mark (with [TRUNCATED]), slide (stop)"},
    {"--speculate", NUMBER, AT(speculate), 0, 0, 6,
     "N  guess up to N tokens ahead from the context: same answer, fewer steps (0)"},
    {"--constant-work", FLAG, AT(constant_work), 0, 0, 0,
     "as many instructions a token whatever the data: one thread, full head"},
    {"--ignore-memory", FLAG, AT(ignore_memory), 0, 0, 0, "open with less memory than declared"},
    {"--allow-foreign-board", FLAG, AT(foreign_board), 0, 0, 0,
     "open although built for another known board"},
    {"--sensor", TEXT, AT(sensor), 0, 0, 0,
     "SOURCE  keep cool by file:PATH, hwmon:NAME/tempN, iio:NAME/CHANNEL or zone:TYPE"},
    {"--lock-memory", FLAG, AT(lock_memory), 0, 0, 0,
     "keep it from being paged out, as far as RLIMIT_MEMLOCK allows"},
    {"--tokens", FLAG, AT(tokens), 0, 0, 0, "print token ids instead of text"},
    {"--json", FLAG, AT(json), 0, 0, 0, "print one JSON object with text, tokens and figures"},
    {"--info", FLAG, AT(info), 0, 0, 0, "print what the artifact is, and end"},
    {"--run-tests", FLAG, AT(run_tests), 0, 0, 0, "replay the stored test vectors, and end"},
    {"--doctor", FLAG, AT(doctor), 0, 0, 0,
     "check this device, and MODEL on it where one is named; exit 1: bad"},
    {"--tune", FLAG, AT(tune), 0, 0, 0, "measure how many threads pay here, keep it, and end"},
    {"--serve", NUMBER, AT(serve), 0, 3, 1 << 20,
     "FD  answer gemctld on this open socket until it closes"},
    {"--check-weights", FLAG, AT(check_weights), 0, 0, 0, "check the weights' checksum too"},
    {"--version", FLAG, AT(version), 0, 0, 0, "print the version, and end"},
    {"--help", FLAG, AT(help), 0, 0, 0, "or -h: print this, and end"},
};
enum { OPTIONS = sizeof table / sizeof table[0], NAME_MOST = 32 };

static const char *const finishes[] = {"none",         "stop_id",   "stop_string",
                                       "max_tokens",   "context_full", "cancelled",
                                       "deadline",     "callback",  "error"};

/* ---- command line ---- */

static int usage(const char *object, const char *what)
{
    cli_print(stderr, "gemrun: %s: %s; see gemrun --help\n", object, what);
    return EXIT_USAGE;
}

static int help(void)
{
    puts("usage: gemrun MODEL.gembin --prompt TEXT [options]\n"
         "       gemrun --doctor [MODEL.gembin]\n"
         "\n"
         "Runs a compiled model. --prompt alone is continued as it stands, even where the model\n"
         "has a chat template: --chat and --interactive use that. --option=value works as well.\n"
         "Defaults are in parentheses.\n"
         "\n"
         "With --session a raw prompt goes on behind the text, an empty one from its end; with\n"
         "--chat a turn is put behind the conversation, whose earlier answers stay as they were\n"
         "made. Interactive ones are saved when stdin ends (Ctrl-D).\n");
    for (size_t i = 0; i < OPTIONS; i++) {
        const char *words = table[i].help, *gap = strstr(words, "  ");
        char left[40];
        int shown = gap ? (int)(gap - words) : 0;
        snprintf(left, sizeof left, "%s %.*s", table[i].name, shown, words);
        printf("  %-22s  %s\n", left, gap ? gap + 2 : words);
    }
    puts("\nExit: 0 done, 1 something is bad (--doctor), 2 usage, 4 board, 5 memory, 6 file,\n"
         "8 run failed, 130 cancelled.");
    return 0;
}

/* "<option>: <value> is <what>; use <range>" */
static int refuse_value(const struct option *at, const char *value, const char *what)
{
    const char *form = at->kind == MASK    ? "0x%llx to 0x%llx\n"
                       : at->kind == ABOVE ? "more than %llu, up to %llu\n"
                       : at->kind == BELOW ? "%llu to less than %llu\n"
                       : at->kind == STOP  ? "%llu to %llu bytes\n"
                                           : "%llu to %llu\n";
    cli_print(stderr, "gemrun: %s: %s is %s; use ", at->name, *value ? value : "an empty text",
              what);
    cli_print(stderr, form, (unsigned long long)at->least, (unsigned long long)at->most);
    return EXIT_USAGE;
}

/* Decimal, or hexadecimal behind 0x; a leading zero is no octal number. */
static int parse_number(const struct option *at, const char *text, uint64_t *out)
{
    const char *digits = text + (*text == '-');
    bool hex = digits[0] == '0' && (digits[1] == 'x' || digits[1] == 'X');
    digits += hex ? 2 : 0;
    if (!*digits || digits[strspn(digits, hex ? "0123456789abcdefABCDEF" : "0123456789")] != 0) {
        return refuse_value(at, text, "no whole number");
    }
    errno = 0;
    *out = strtoull(digits, NULL, hex ? 16 : 10);
    bool good = *text != '-' && errno == 0 && *out >= at->least && *out <= at->most;
    return good ? 0 : refuse_value(at, text, "out of range");
}

static int parse_real(const struct option *at, const char *text, float *out)
{
    char *end;
    *out = strtof(text, &end);
    if (*text == 0 || *end != 0) {
        return refuse_value(at, text, "no number");
    }
    float least = (float)at->least, most = (float)at->most;
    bool good = (at->kind == ABOVE ? *out > least : *out >= least) &&
                (at->kind == BELOW ? *out < most : *out <= most);
    return good ? 0 : refuse_value(at, text, "out of range");
}

static int store(options *o, const struct option *at, const char *value)
{
    char *field = (char *)o + at->at;
    uint64_t number = 0;
    if (at->seen) {
        *((bool *)o + at->seen / sizeof(bool)) = true;
    }
    switch (at->kind) {
    case FLAG:   *(uint32_t *)(void *)field = 1; return 0;
    case TEXT:   *(const char **)(void *)field = value; return 0;
    case REAL:
    case ABOVE:
    case BELOW:  return parse_real(at, value, (float *)(void *)field);
    case NUMBER:
    case MASK:   return parse_number(at, value, (uint64_t *)(void *)field);
    case STOP:
        if (strlen(value) < at->least || strlen(value) > at->most) {
            return refuse_value(at, value, "too short or too long");
        }
        if (o->stop_count == MAX_STOPS) {
            return usage(at->name, "given more than 8 times");
        }
        o->stops[o->stop_count++] = value;
        return 0;
    default:
        if (o->ban_count == MAX_BANS) {
            return usage(at->name, "given more than 4096 times");
        }
        if (parse_number(at, value, &number) != 0) {
            return EXIT_USAGE;
        }
        o->bans[o->ban_count++] = (uint32_t)number;
        return 0;
    }
}

/* A word of an option as the number that it stands for. NULL: as it is. */
static int parse_word(const char *option, const char *name, const char *const *words,
                      uint32_t count, uint32_t *out)
{
    for (uint32_t i = 0; name && i < count; i++) {
        if (words[i] && strcmp(name, words[i]) == 0) {
            *out = i;
            return 0;
        }
    }
    if (!name) {
        return 0;
    }
    cli_print(stderr, "gemrun: %s: %s is unknown; use", option, *name ? name : "an empty text");
    for (uint32_t i = 0; i < count; i++) {
        if (words[i]) {
            cli_print(stderr, "%s%s", i + 1 < count ? " " : " or ", words[i]);
        }
    }
    fputs("\n", stderr);
    return EXIT_USAGE;
}

static int parse_words(options *o, gemrun_config *c)
{
    static const char *const heads[] = {[GEMRUN_HEAD_FULL] = "full",
                                        [GEMRUN_HEAD_TWO_PLANE] = "two-plane"};
    static const char *const ends[] = {"stop", "mark", "slide"};
    int code = parse_word("--head", o->head, heads, 3, &c->head);
    return code ? code : parse_word("--on-full", o->on_full, ends, 3, &o->full);
}

/* What makes the work of a step depend on more than its position does not go with the option. */
static int take_constant_work(const options *o, gemrun_config *c)
{
    const char *against = o->threads > 1                      ? "--threads"
                          : c->head == GEMRUN_HEAD_TWO_PLANE ? "--head"
                          : o->speculate > 0                 ? "--speculate"
                                                             : NULL;
    if (o->constant_work && against) {
        cli_print(stderr, "gemrun: %s: not with --constant-work, which takes one thread, the full "
                  "head and no guesses; leave one of them out\n", against);
        return EXIT_USAGE;
    }
    if (o->constant_work) {
        c->threads = 1;
        c->head = GEMRUN_HEAD_FULL;
    }
    return 0;
}

/* How many letters must change, come or go to make one name of the other. */
static size_t distance(const char *a, size_t n, const char *b)
{
    size_t row[NAME_MOST + 1], m = strlen(b);
    for (size_t k = 0; k <= m; k++) {
        row[k] = k;
    }
    for (size_t i = 1; i <= n; i++) {
        size_t corner = row[0]; /* of the row above, a column to the left */
        row[0] = i;
        for (size_t k = 1; k <= m; k++) {
            size_t above = row[k], least = above < row[k - 1] ? above : row[k - 1];
            size_t changed = corner + (a[i - 1] != b[k - 1]);
            row[k] = least + 1 < changed ? least + 1 : changed;
            corner = above;
        }
    }
    return row[m];
}

static int unknown(const char *name, size_t size)
{
    size_t nearest = 0, least = SIZE_MAX;
    for (size_t i = 0; i < OPTIONS; i++) {
        size_t d = distance(name, size, table[i].name);
        bool begins = size > 3 && strncmp(name, table[i].name, size) == 0;
        d = begins ? 1 : d; /* what is cut short is not far */
        nearest = d < least ? i : nearest;
        least = d < least ? d : least;
    }
    cli_print(stderr, "gemrun: %.*s: unknown option; ", (int)size, name);
    if (least <= size / 4) {
        cli_print(stderr, "did you mean %s?\n", table[nearest].name);
    } else {
        cli_print(stderr, "see gemrun --help\n");
    }
    return EXIT_USAGE;
}

static const struct option *option_named(const char *name, size_t size)
{
    for (size_t i = 0; i < OPTIONS; i++) {
        if (strlen(table[i].name) == size && memcmp(name, table[i].name, size) == 0) {
            return table + i;
        }
    }
    return NULL;
}

/* One option; `next` is the argument behind it, or NULL. Moves `*at` where that is its value. */
static int parse_option(options *o, const char *word, const char *next, int *at)
{
    const char *value = strchr(word, '=');
    size_t size = value ? (size_t)(value - word) : strlen(word);
    const struct option *option = option_named(word, size);
    option = option || strcmp(word, "-h") != 0 ? option : option_named("--help", 6);
    if (!option) {
        return unknown(word, size);
    }
    if (option->kind == FLAG && value) {
        return usage(option->name, "takes no value");
    }
    if (option->kind != FLAG && !value && !next) {
        return usage(option->name, "its value is missing");
    }
    *at += option->kind != FLAG && !value;
    return store(o, option, value ? value + 1 : next);
}

static int parse(int argc, char **argv, options *o)
{
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] == '-') {
            int code = parse_option(o, argv[i], i + 1 < argc ? argv[i + 1] : NULL, &i);
            if (code != 0) {
                return code;
            }
        } else if (o->path) {
            return usage(argv[i], "a second file");
        } else {
            o->path = argv[i];
        }
    }
    if (o->help || o->version || o->doctor) {
        return 0;
    }
    if (!o->path) {
        return usage("MODEL.gembin", "no file given");
    }
    if (o->no_save && !o->session) {
        return usage("--no-save", "is for --session, which was not given");
    }
    if (o->session && !*o->session) {
        return usage("--session", "its name is empty");
    }
    if (o->sensor && o->serve) {
        return usage("--sensor", "is not for --serve, whose pace is gemctld's");
    }
    if (o->session && !o->prompt && !o->interactive) {
        return usage("--session", "needs a --prompt to go on with, or --interactive");
    }
    if (o->prompt || o->interactive || o->info || o->run_tests || o->check_weights || o->tune ||
        o->serve) {
        return 0;
    }
    cli_print(stderr, "gemrun: %s: nothing to do; try --prompt TEXT, --interactive or --info\n",
              o->path);
    return EXIT_USAGE;
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

static const char *root(void) /* before /proc and /sys; for tests */
{
    const char *own = getenv("GEMRUN_ROOT");
    return own ? own : "";
}

/* Causes that an operator meets as "it does not fit, or does not fit together". */
static bool is_layout(int32_t status)
{
    static const int32_t causes[] = {GEMRUN_E_MEMORY, GEMRUN_E_MAP,  GEMRUN_E_CONTEXT,
                                     GEMRUN_E_RAM,    GEMRUN_E_PLAN, GEMRUN_E_ABI};
    for (size_t i = 0; i < sizeof causes / sizeof causes[0]; i++) {
        if (status == causes[i]) {
            return true;
        }
    }
    return false;
}

/* The engine names a setting as gemrun.h does; here it is the option of that name. */
static bool is_about_option(const char *sentence)
{
    static const char *const fields[] = {"threads: ", "thread_affinity: ", "prefill_batch_size: "};
    static const char *const names[] = {"--threads", "--affinity", "--prefill-batch-size"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        size_t size = strlen(fields[i]);
        if (strncmp(sentence, fields[i], size) == 0) {
            cli_print(stderr, "gemrun: %s: %s\n", names[i], sentence + size);
            return true;
        }
    }
    return false;
}

static int load_failed(const options *o, int32_t status)
{
    const char *text = gemrun_last_error();
    size_t n = strlen(o->path);
    const char *sentence = strncmp(text, o->path, n) == 0 ? text + n + 2 : text;
    if (status == GEMRUN_E_KERNEL) {
        const char *from = o->kernel ? "gemrun: --kernel" : "gemrun: GEMRUN_KERNEL";
        const char *name = o->kernel ? o->kernel : getenv("GEMRUN_KERNEL");
        cli_print(stderr, "%s: %s: %s\n", from, name ? name : "", sentence);
    } else if (!is_about_option(sentence)) {
        char more[256];
        gemrun_explain_memory((gemrun_status)status, o->path, root(), more, sizeof more);
        cli_print(stderr, "Model load failed: %s%s%s\n",
                  is_layout(status) ? "Memory layout mismatch: " : "", text, more);
    }
    return exit_code(status);
}

static int run_failed(int32_t status)
{
    cli_print(stderr, "gemrun: %s\n", gemrun_last_error());
    return exit_code(status);
}

/* An artifact for a board that is not this one. */
static int check_board(gemrun_context_t *ctx, const options *o)
{
    int32_t found = o->foreign_board ? 0 : gemrun_check_board(ctx, o->path, root());
    if (found < 0) {
        return load_failed(o, found);
    }
    if (found > 0) {
        cli_print(stderr, "gemrun: warning: %s\n", gemrun_last_error());
    }
    return 0;
}

/* What only the artifact can tell of the options. */
static int check_options(gemrun_context_t *ctx, const options *o)
{
    gemrun_info f = {.size = sizeof f};
    gemrun_status st = gemrun_get_info(ctx, &f);
    if (st != GEMRUN_OK) {
        return run_failed(st);
    }
    const char *wants = o->interactive ? "--interactive" : o->chat ? "--chat" : "--system";
    if (!f.has_chat && (o->interactive || (o->prompt && (o->chat || o->system)))) {
        cli_print(stderr, "gemrun: %s: %s has no chat template; use --prompt alone, or an "
                  "instruction-tuned checkpoint\n", wants, o->path);
        return EXIT_USAGE;
    }
    for (uint32_t i = 0; i < o->ban_count; i++) {
        if (o->bans[i] >= f.vocab_rows) {
            cli_print(stderr, "gemrun: --ban: %u is out of range; use 0 to %u\n", o->bans[i],
                      f.vocab_rows - 1);
            return EXIT_USAGE;
        }
    }
    return 0;
}

/* What was to stay in memory and may not: a run may then wait for the disk. */
static void warn_unlocked(gemrun_context_t *ctx, const options *o)
{
    gemrun_stats s = {.size = sizeof s};
    struct rlimit limit;
    uint64_t wanted = gemrun_lockable(ctx);
    if (gemrun_get_stats(ctx, &s) != GEMRUN_OK || getrlimit(RLIMIT_MEMLOCK, &limit) != 0 ||
        s.locked_bytes >= wanted) {
        return;
    }
    cli_print(stderr, "gemrun: --lock-memory: warning: %.1f of %.1f MB are locked, ",
              (double)s.locked_bytes * 1e-6, (double)wanted * 1e-6);
    if (limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < wanted) {
        cli_print(stderr, "RLIMIT_MEMLOCK is %.1f MB; raise it with ulimit -l unlimited, or with "
                  "LimitMEMLOCK= in a unit\n", (double)limit.rlim_cur * 1e-6);
    } else if (o->ignore_memory && s.locked_bytes > 0) {
        fputs("--ignore-memory keeps no weights that pass through; leave it out\n", stderr);
    } else {
        fputs("the system refuses more; free memory, or leave it out\n", stderr);
    }
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
    gemrun_context_t *ctx;
    text text;
    int32_t status; /* a count, or why there is no answer */
    bool lost;      /* no memory was left for the text */
    bool more;      /* it came to its first token: a session has more than before */
} answer;

static volatile sig_atomic_t caught; /* a signal came during this answer */

static int on_text(void *user, int32_t token, const char *bytes, size_t size)
{
    answer *a = user;
    bool good = true;
    if (caught) { /* it may have come before the run began, which forgets it */
        gemrun_cancel(a->ctx);
    }
    a->lost = !append(&a->text, bytes, size);
    if (a->o->tokens && !a->o->json && token >= 0) {
        good = printf("%d ", token) > 0;
    } else if (!a->o->tokens && !a->o->json) {
        good = fwrite(bytes, 1, size, stdout) == size;
    }
    return a->lost || !good || fflush(stdout) != 0;
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
    printf("\"head_candidates\": %.3f, \"head_candidates_max\": %.0f, ", s->head_candidates,
           s->head_candidates_max);
    printf("\"reused\": %llu, ", (unsigned long long)s->reused);
    printf("\"drafted\": %llu, \"accepted\": %llu, ", (unsigned long long)s->drafted,
           (unsigned long long)s->accepted);
    gemrun_thermal_state t = {.size = sizeof t};
    if (a->o->sensor && gemrun_get_thermal(a->ctx, &t) == GEMRUN_OK) {
        printf("\"temp_c\": %.1f, \"throttle_level\": %u, \"throttle_fault\": %s, ",
               (double)t.celsius, t.level, t.fault ? "true" : "false");
    }
    printf("\"ram_total\": %llu, \"locked_bytes\": %llu, \"tokens\": [",
           (unsigned long long)s->ram_total, (unsigned long long)s->locked_bytes);
    for (int32_t i = 0; i < count; i++) {
        printf("%s%d", i ? ", " : "", ids[i]);
    }
    printf("], \"text\": ");
    print_string(a->text.bytes ? a->text.bytes : "", a->text.size);
    puts("}");
}

static void print_stats(const gemrun_stats *s)
{
    char head[80] = "", draft[80] = "", held[40] = "", locked[40] = "";
    if (s->locked_bytes > 0) {
        snprintf(locked, sizeof locked, ", %.1f MB of it locked", (double)s->locked_bytes * 1e-6);
    }
    if (s->reused > 0) {
        snprintf(held, sizeof held, " (%llu in the cache)", (unsigned long long)s->reused);
    }
    if (s->head_candidates_max > 0) {
        snprintf(head, sizeof head, "; head %.1f candidates a token, at most %.0f",
                 s->head_candidates, s->head_candidates_max);
    }
    if (s->drafted > 0) {
        snprintf(draft, sizeof draft, "; %llu of %llu guessed token%s right",
                 (unsigned long long)s->accepted, (unsigned long long)s->drafted,
                 s->drafted == 1 ? " was" : "s were");
    }
    cli_print(stderr,
              "%u token%s (%s), first after %.1f ms, %.2f tok/s; prompt %u token%s%s, %.1f tok/s; "
              "context %u of %u%s%s; memory %.1f MB with %u thread%s%s\n",
              s->generated_tokens, cli_s(s->generated_tokens), finishes[s->finish], s->ttft_ms,
              s->decode_tps, s->prompt_tokens, cli_s(s->prompt_tokens), held, s->prefill_tps,
              s->kv_used, s->kv_size, head, draft, (double)s->ram_total * 1e-6, s->threads,
              cli_s(s->threads), locked);
}

static void print_thermal(gemrun_context_t *ctx)
{
    gemrun_thermal_state t = {.size = sizeof t};
    if (gemrun_get_thermal(ctx, &t) == GEMRUN_OK) {
        cli_print(stderr, "%.1f C%s: rung %u of %u, %.0f %% of the time, %u thread%s\n",
                  (double)t.celsius, t.fault ? ", not believed" : "", t.level, t.levels - 1,
                  t.duty / 10.0, t.threads, cli_s(t.threads));
    }
}

/* What --tune found, or what it could. */
static void print_tuning(const gemrun_stats *s, const options *o)
{
    const tuning t = tune_read();
    if (s->threads == 1) {
        puts("\ntuned      no: with 1 thread there is nothing to choose");
    } else if (t.threads > 0) {
        printf("\ntuned      %u of %u threads decode, work %s\n", t.decode_threads, t.threads,
               t.balance == 2 ? "in pieces" : "in even shares");
    } else {
        putchar('\n');
        cli_print(stdout, "tuned      no; gemrun %s --tune finds how many threads pay\n", o->path);
    }
}

static int print_info(gemrun_context_t *ctx, const options *o)
{
    static const char *const kinds[] = {"f32", "f16", "int8"};
    gemrun_info f = {.size = sizeof f};
    gemrun_stats s = {.size = sizeof s};
    char features[160], bsp[64];
    bool stated = gemrun_bsp_version(ctx, bsp, sizeof bsp) > 0;
    gemrun_status st = gemrun_get_info(ctx, &f);
    st = st == GEMRUN_OK ? gemrun_get_stats(ctx, &s) : st;
    if (st != GEMRUN_OK) {
        return run_failed(st);
    }
    gr_port_features(features, sizeof features);
    cli_print(stdout, "model      %s (%s), for %s%s%s\n", f.name, f.family, f.target,
              stated ? ", support package " : "", stated ? bsp : "");
    printf("shape      %u layer%s, hidden %u, vocabulary %u\n", f.layers, cli_s(f.layers), f.hidden,
           f.vocab_rows);
    printf("context    %u token%s compiled, %u in use; prefill %u at a time; KV %s\n", f.context,
           cli_s(f.context), s.kv_size, f.chunk, kinds[f.kv_type < 3 ? f.kv_type : 0]);
    printf("chat       %s\n", f.has_chat ? "yes" : "no template");
    if (f.pinned_prompt > 0) {
        printf("pinned     a prompt of %llu token%s\n", (unsigned long long)f.pinned_prompt,
               cli_s(f.pinned_prompt));
    }
    printf("stop ids  ");
    for (uint32_t i = 0; i < f.stop_id_count; i++) {
        printf(" %u", f.stop_ids[i]);
    }
    uint32_t cores = gr_port_cores("");
    printf("\nprocessor  %s; %u thread%s, %u planned, %u core%s allowed\n", features, s.threads,
           cli_s(s.threads), f.threads_planned, cores, cli_s(cores));
    printf("kernel     %s; this processor runs", f.kernel);
    for (uint32_t i = 0; gr_kernels_at(i); i++) {
        printf("%s %s", i ? "," : "", gr_kernels_at(i));
    }
    print_tuning(&s, o);
    printf("memory     %llu bytes: weights %llu, tables %llu, arena %llu, KV %llu, engine %llu, "
           "stacks %llu\n", (unsigned long long)s.ram_total, (unsigned long long)s.ram_weights,
           (unsigned long long)s.ram_tables, (unsigned long long)s.ram_arena,
           (unsigned long long)s.ram_kv, (unsigned long long)s.ram_engine,
           (unsigned long long)s.ram_stacks);
    printf("declared   %llu bytes for %u thread%s\n", (unsigned long long)s.declared_total,
           f.threads_planned, cli_s(f.threads_planned));
    return 0;
}

/* ---- runs ---- */

static gemrun_context_t *volatile interruptible; /* for the signal handler */

static void on_signal(int signal)
{
    (void)signal;
    caught = 1;
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
    q.speculate = (uint32_t)o->speculate;
    q.on_full = o->full;
    q.reuse = o->interactive ? 1 : 0; /* a turn repeats the conversation before it */
    q.on_text = on_text;
    q.user = a;
    return q;
}

typedef struct tally { /* figures of a conversation */
    uint32_t turns, tokens, timed;
    double seconds; /* that the timed tokens took: all but the first of each answer */
} tally;

static void add_turn(tally *t, const gemrun_stats *s)
{
    t->turns++;
    t->tokens += s->generated_tokens;
    if (s->decode_tps > 0 && s->generated_tokens > 1) {
        t->timed += s->generated_tokens - 1;
        t->seconds += (s->generated_tokens - 1) / s->decode_tps;
    }
}

static void print_tally(gemrun_context_t *ctx, const tally *t)
{
    gemrun_stats s = {.size = sizeof s};
    if (t->turns > 0 && gemrun_get_stats(ctx, &s) == GEMRUN_OK) {
        cli_print(stderr, "%u turn%s, %u token%s, %.2f tok/s; context %u of %u; memory %.1f MB "
                  "with %u thread%s\n", t->turns, cli_s(t->turns), t->tokens, cli_s(t->tokens),
                  t->timed > 0 ? t->timed / t->seconds : 0.0, s.kv_used, s.kv_size,
                  (double)s.ram_total * 1e-6, s.threads, cli_s(s.threads));
    }
}

static int no_memory(const char *object)
{
    cli_print(stderr, "gemrun: %s: no memory left for it; free some, or start a new one\n", object);
    return EXIT_MEMORY;
}

static void print_answer(const answer *a, const int32_t *ids, const gemrun_stats *s, bool figures)
{
    if (a->o->json) {
        print_json(a, ids, a->status, s);
    } else {
        puts("");
    }
    if (fflush(stdout) == 0 && figures && !a->o->json) {
        print_stats(s);
        if (a->o->sensor) {
            print_thermal(a->ctx);
        }
    }
}

/* ---- sessions ---- */

static uint32_t cached(gemrun_context_t *ctx) /* tokens */
{
    gemrun_stats s = {.size = sizeof s};
    return gemrun_get_stats(ctx, &s) == GEMRUN_OK ? s.kv_used : 0;
}

/* Better said before a long conversation than after it. */
static int check_folder(const char *path)
{
    const char *slash = strrchr(path, '/');
    char *folder = slash ? strndup(path, (size_t)(slash - path) + 1) : strdup(".");
    if (!folder) {
        return no_memory("--session");
    }
    bool good = access(folder, W_OK | X_OK) == 0;
    if (!good) {
        cli_print(stderr, "gemrun: --session: %s could not be saved (%s: %s); name a file "
                  "elsewhere, or add --no-save\n", path, folder, strerror(errno));
    }
    free(folder);
    return good ? 0 : EXIT_FILE;
}

/* What the session's file holds goes into the cache; without a file it begins empty. */
static int begin_session(gemrun_context_t *ctx, const options *o)
{
    struct stat st;
    int code = o->no_save ? 0 : check_folder(o->session);
    if (code != 0) {
        return code;
    }
    bool there = stat(o->session, &st) == 0 || errno != ENOENT; /* restore says what is wrong */
    int32_t n = there ? gemrun_session_restore(ctx, o->session) : 0;
    if (n < 0) {
        return run_failed(n);
    }
    if (n > 0 && o->system) {
        cli_print(stderr, "gemrun: --system: the conversation in %s has begun already; leave it "
                  "out, or name another file\n", o->session);
        return EXIT_USAGE;
    }
    if (!o->json && there) {
        cli_print(stderr, "%s: %d token%s\n", o->session, n, cli_s((uint64_t)n));
    } else if (!o->json) {
        cli_print(stderr, "%s: begins empty\n", o->session);
    }
    return 0;
}

/* `more`: there is more to keep than before. */
static int end_session(gemrun_context_t *ctx, const options *o, int code, bool more)
{
    if (o->no_save || (code != 0 && code != EXIT_CANCELLED)) {
        return code;
    }
    if (!more) {
        cli_print(stderr, "gemrun: %s: left as it was, no answer came to its first token; run it "
                  "again\n", o->session);
        return code;
    }
    gemrun_status st = gemrun_session_save(ctx, o->session);
    return st == GEMRUN_OK ? code : run_failed(st);
}

/* A turn was cancelled so early that the cache could not be taken back to what was before it. */
static int session_lost(const options *o)
{
    cli_print(stderr, "gemrun: %s: cancelled when the turn had replaced earlier tokens; the file "
              "is as it was, go on from that\n", o->session);
    return EXIT_RUN;
}

/* One run; of a session behind what is in the cache. */
static int32_t ask(gemrun_context_t *ctx, const options *o, const char *prompt,
                   const gemrun_message *messages, size_t count, const gemrun_request *q,
                   int32_t *ids)
{
    if (!o->session) {
        return messages ? gemrun_chat(ctx, messages, count, q, ids)
                        : gemrun_generate(ctx, prompt, q, ids);
    }
    const char *system = cached(ctx) == 0 ? o->system : NULL;
    return messages ? gemrun_session_turn(ctx, system, messages[count - 1].text, q, ids)
                    : gemrun_session_generate(ctx, prompt, q, ids);
}

/* ---- answers ---- */

/* One answer; messages NULL: the raw prompt. The text stays in `a` for the caller to free. With
 * `t` it is a turn, and the figures come at the end. Returns the exit code. */
static int answer_once(gemrun_context_t *ctx, const char *prompt, const gemrun_message *messages,
                       size_t count, answer *a, tally *t)
{
    gemrun_pacer pacer;
    gemrun_request q = request_of(ctx, a->o, a);
    q = a->o->sensor ? gemrun_paced(ctx, &pacer, &q) : q;
    gemrun_stats s = {.size = sizeof s};
    int32_t *ids = malloc(q.max_tokens * sizeof *ids);
    if (!ids) {
        return no_memory("--max-tokens");
    }
    a->ctx = ctx;
    caught = 0;
    catch_signals(ctx);
    a->status = ask(ctx, a->o, prompt, messages, count, &q, ids);
    catch_signals(NULL);
    if (a->status >= 0 && gemrun_get_stats(ctx, &s) == GEMRUN_OK) {
        a->more = s.generated_tokens > 0 || s.finish == GEMRUN_FINISH_STOP_ID;
        print_answer(a, ids, &s, !t);
        if (t) {
            add_turn(t, &s);
        }
    }
    free(ids);
    if (a->status < 0) {
        return run_failed(a->status);
    }
    if (a->lost) {
        return no_memory("answer");
    }
    if (s.finish == GEMRUN_FINISH_CALLBACK || ferror(stdout)) {
        return EXIT_RUN; /* what is wrong with stdout is said at the end */
    }
    return s.finish == GEMRUN_FINISH_CANCELLED ? EXIT_CANCELLED : 0;
}

static int run_once(gemrun_context_t *ctx, const options *o, const char *prompt)
{
    const gemrun_message messages[] = {{GEMRUN_SYSTEM, o->system}, {GEMRUN_USER, prompt}};
    size_t skip = o->system ? 0 : 1;
    answer a = {.o = o};
    bool chat = o->chat || o->system;
    int code = answer_once(ctx, prompt, chat ? messages + skip : NULL, 2 - skip, &a, NULL);
    free(a.text.bytes);
    return o->session ? end_session(ctx, o, code, a.more) : code;
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

typedef struct history { /* of a conversation; the texts are ours */
    gemrun_message *messages;
    size_t count, capacity;
} history;

/* Takes `text`, which comes from malloc; NULL is refused. */
static bool add_message(history *h, gemrun_role role, char *text)
{
    if (h->count == h->capacity) {
        size_t capacity = 2 * h->capacity + 8;
        gemrun_message *grown = realloc(h->messages, capacity * sizeof *grown);
        if (!grown) {
            free(text);
            return false;
        }
        h->messages = grown;
        h->capacity = capacity;
    }
    if (text) {
        h->messages[h->count++] = (gemrun_message){role, text};
    }
    return text != NULL;
}

static void drop_message(history *h)
{
    free((void *)(uintptr_t)h->messages[--h->count].text);
}

/* A prompt sign is for somebody who types. */
static bool next_line(char **line, size_t *room)
{
    if (isatty(STDIN_FILENO)) {
        fputs("> ", stderr);
    }
    if (getline(line, room, stdin) < 0) {
        return false;
    }
    (*line)[strcspn(*line, "\n")] = 0;
    return true;
}

/* The history is ours: every turn goes to the engine as a whole. Of a session it has the turns, and
 * only the newest one is passed on. */
static int converse(gemrun_context_t *ctx, const options *o)
{
    history h = {0};
    tally t = {0};
    char *line = NULL;
    size_t room = 0;
    int code = 0;
    bool more = false;
    bool good = !o->system || add_message(&h, GEMRUN_SYSTEM, strdup(o->system));
    while (good && code == 0 && next_line(&line, &room)) {
        if (line[0] == 0) {
            continue;
        }
        answer a = {.o = o};
        uint32_t before = o->session ? cached(ctx) : 0;
        good = add_message(&h, GEMRUN_USER, strdup(line));
        code = good ? answer_once(ctx, NULL, h.messages, h.count, &a, &t) : 0;
        code = code == EXIT_CANCELLED ? 0 : code; /* that ends the answer, not the conversation */
        more = more || a.more;
        if (a.status == GEMRUN_E_PROMPT || a.status == GEMRUN_E_TEXT) {
            code = 0; /* it was said: forget the turn, go on */
            drop_message(&h);
        } else if (good && code == 0) {
            good = add_message(&h, GEMRUN_ASSISTANT, a.text.bytes ? a.text.bytes : strdup(""));
            a.text.bytes = NULL;
        }
        free(a.text.bytes);
        code = code == 0 && before > 0 && cached(ctx) == 0 ? session_lost(o) : code;
    }
    if (!good) {
        code = no_memory("conversation");
    }
    if (!o->json) {
        print_tally(ctx, &t);
    }
    while (h.count > 0) {
        drop_message(&h);
    }
    free(h.messages);
    free(line);
    return o->session && t.turns > 0 ? end_session(ctx, o, code, more) : code;
}

static int run_tests(gemrun_context_t *ctx)
{
    int32_t n = gemrun_run_tests(ctx);
    if (n < 0) {
        return run_failed(n);
    }
    printf("%d test vector%s passed\n", n, cli_s((uint64_t)n));
    return 0;
}

static int start_sensor(gemrun_context_t *ctx, const options *o, sensor **out)
{
    size_t capacity = strlen(o->sensor) + 1024;
    char *wrong = malloc(capacity);
    if (!wrong) {
        return no_memory("--sensor");
    }
    *out = sensor_start(o->sensor, root(), ctx, wrong, capacity);
    if (!*out) {
        cli_print(stderr, "gemrun: --sensor: %s\n", wrong);
    }
    free(wrong);
    return *out ? 0 : EXIT_USAGE;
}

/* Everything that was asked of an open artifact. */
static int work(gemrun_context_t *ctx, const options *o)
{
    sensor *s = NULL;
    int code = check_board(ctx, o);
    code = code == 0 ? check_options(ctx, o) : code;
    code = code == 0 && o->sensor ? start_sensor(ctx, o, &s) : code;
    code = code == 0 && o->info ? print_info(ctx, o) : code;
    code = code == 0 && o->run_tests ? run_tests(ctx) : code;
    code = code == 0 && o->session ? begin_session(ctx, o) : code;
    code = code == 0 && o->interactive ? converse(ctx, o) : code;
    code = code == 0 && o->prompt && !o->interactive ? run_prompt(ctx, o) : code;
    sensor_stop(s);
    return code;
}

static int run(int argc, char **argv)
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
    code = parse_words(&o, &c);
    if (code != 0) {
        return code;
    }
    c.threads = (uint32_t)o.threads;
    code = take_constant_work(&o, &c);
    if (code != 0) {
        return code;
    }
    c.decode_threads = (uint32_t)o.decode_threads;
    c.balance = (uint32_t)o.balance;
    c.thread_affinity = o.affinity;
    c.kv_cache_size = (uint32_t)o.kv_cache_size;
    c.prefill_batch_size = (uint32_t)o.batch;
    c.kernel = o.kernel;
    c.ignore_memory = o.ignore_memory;
    c.allow_foreign_board = o.foreign_board || o.serve; /* gemctld has looked at it */
    c.lock_memory = o.lock_memory;
    c.weights_check = o.check_weights ? GEMRUN_WEIGHTS_FULL : GEMRUN_WEIGHTS_UNCHECKED;
    if (o.doctor) {
        return doctor_run(o.path, o.json, &c);
    }
    if (o.tune) {
        return tune_run(o.path, &c);
    }
    const tuning known = tune_read();
    tune_apply(&known, &c);
    gemrun_context_t *ctx = NULL;
    gemrun_status st = o.serve ? (gemrun_status)gs_serve((int)o.serve, o.path, &c)
                               : cli_open(&ctx, o.path, &c);
    if (st != GEMRUN_OK) {
        return load_failed(&o, st);
    }
    if (o.check_weights) {
        cli_print(stderr, "weights: checksum agrees\n");
    }
    if (o.lock_memory) {
        warn_unlocked(ctx, &o);
    }
    code = work(ctx, &o);
    gemrun_destroy(ctx);
    return code;
}

/* What could not be written is no success: a full disk, a reader that went away. */
int main(int argc, char **argv)
{
    int code = run(argc, argv);
    bool wrong = fflush(stdout) != 0 || ferror(stdout) != 0;
    wrong = (fclose(stdout) != 0 && errno != EBADF) || wrong; /* never open, nothing to write */
    if (wrong) {
        fputs("gemrun: stdout: the output could not be written in full; free room on its disk, or "
              "give it a reader that stays\n", stderr);
    }
    return wrong && code == 0 ? EXIT_RUN : code;
}
