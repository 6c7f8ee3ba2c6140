/* fuzz_session.c: throws damaged session files at restore and goes on from some that pass.
 *
 *     fuzz_session COUNT SEED ARTIFACT...   COUNT damaged files of each; ends with lines of figures
 *
 * Per artifact a few states are saved; a copy is damaged (bits, bytes, numbers of the header, cuts,
 * growth), in three of four cases its checksums are made right afterwards, and it is restored into a
 * context with something in it. Of the engine's memory only what a restore may touch is not
 * poisoned then. A refused file must leave the context as it was; one that passes must save to the
 * same bytes, and some of them run to the end of the context. Built with sanitizers by `make fuzz`:
 * a finding is an abort. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "gemrun_session.h"
#include "gr_ctx.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define __asan_poison_memory_region(at, size) ((void)(at), (void)(size))
#define __asan_unpoison_memory_region(at, size) ((void)(at), (void)(size))
#endif

enum { HEADER = 256, STATES = 8, FILE_MAX = 1 << 20, SCRATCH = 192 << 10, RUN_EVERY = 16,
       CODES = 128 };

typedef struct file {
    uint8_t bytes[FILE_MAX];
    size_t size;
} file;

typedef struct figures {
    uint64_t files, sealed, restored, ran, codes[CODES]; /* by -status */
} figures;

static uint64_t state; /* of the random numbers */
static char folder[] = "/tmp/fuzz_session.XXXXXX";

static uint32_t draw(uint32_t bound) /* xorshift64* */
{
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return (uint32_t)(((state * 2685821657736338717u >> 32) * bound) >> 32);
}

static void must(bool good, const char *what)
{
    if (!good) {
        fprintf(stderr, "fuzz_session: %s: %s\n", what, gemrun_last_error());
        abort();
    }
}

static void load(const char *name, file *to)
{
    FILE *f = fopen(name, "rb");
    must(f != NULL, "open");
    to->size = fread(to->bytes, 1, sizeof to->bytes, f);
    must(fclose(f) == 0 && to->size < sizeof to->bytes, "read");
}

static void save(gemrun_context_t *ctx, file *to)
{
    char name[64];
    snprintf(name, sizeof name, "%s/s", folder);
    must(gemrun_session_save(ctx, name) == GEMRUN_OK, "save");
    load(name, to);
}

/* A state with rings that have gone on, guesses behind its end, a random state, or none of it. */
static void make_state(gemrun_context_t *ctx, uint32_t tokens)
{
    uint32_t rows = ctx->e.v.conf.vocab_rows;
    gemrun_request q = gemrun_request_default(ctx);
    q.temperature = 1;
    gemrun_reset_kv_cache(ctx);
    for (uint32_t i = 0; i < tokens; i++)
        must(gemrun_decode(ctx, (int32_t)draw(rows)) > 0, "decode");
    if (tokens > 0 && draw(2))
        must(gemrun_sample(ctx, &q) >= 0, "sample");
    if (draw(4) == 0 && ctx->e.high < ctx->e.context)
        ctx->e.high++;
}

static void seal(file *f)
{
    if (f->size < HEADER)
        return;
    uint32_t crc = gr_crc32(0, f->bytes + HEADER, f->size - HEADER);
    memcpy(f->bytes + 248, &crc, sizeof crc);
    crc = gr_crc32(0, f->bytes, 252);
    memcpy(f->bytes + 252, &crc, sizeof crc);
}

static void change(file *f)
{
    static const uint64_t edges[] = {0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 159, 160, 161, 255,
                                     256, 257, 4096, 65535, 1 << 20, 0x7F80, 0x7F800000, INT32_MAX,
                                     UINT32_MAX, UINT64_C(1) << 32, INT64_MAX, UINT64_MAX};
    if (f->size == 0)
        return;
    /* Figures of the state, any of the header, anywhere. */
    size_t at = draw(3) == 0 ? 16 + draw(96) : draw(2) ? draw(HEADER) : draw((uint32_t)f->size);
    at = at < f->size ? at : f->size - 1;
    size_t width = (size_t)1 << (1 + draw(3)), room = f->size - at;
    uint64_t value = edges[draw(sizeof edges / sizeof edges[0])];
    switch (draw(5)) {
    case 0: f->bytes[at] ^= (uint8_t)(1u << draw(8)); break;
    case 1: f->bytes[at] = (uint8_t)draw(256); break;
    case 2: f->bytes[at] = (uint8_t)(f->bytes[at] + draw(9) - 4); break;
    default:
        at -= at % width;
        room = f->size - at;
        memcpy(f->bytes + at, &value, width < room ? width : room);
    }
}

static void cut(file *f)
{
    size_t size = draw(2) ? draw((uint32_t)f->size) : f->size + draw(5000);
    size = size < FILE_MAX ? size : FILE_MAX - 1;
    if (size > f->size)
        memset(f->bytes + f->size, (int)draw(2), size - f->size);
    f->size = size;
    if (size >= HEADER && draw(2)) /* and the header says so */
        memcpy(f->bytes + 24, &(uint64_t){size}, sizeof(uint64_t));
}

/* Let a restore touch what it may, or everything again. */
static void fence(gemrun_context_t *ctx, bool up)
{
    const gr_engine *e = &ctx->e;
    const gb_header *h = &e->v.header;
    __asan_unpoison_memory_region(e->arena, h->ram_arena);
    if (!up)
        return;
    __asan_poison_memory_region(e->arena, h->ram_arena);
    __asan_unpoison_memory_region(e->buf[GB_BUF_TOK], SCRATCH);
    __asan_unpoison_memory_region(e->buf[GB_BUF_HIDDEN], 4 * (size_t)e->v.conf.hidden);
    __asan_unpoison_memory_region(e->buf[GB_BUF_IDS], 4 * (size_t)e->v.conf.context);
}

static int32_t restore(gemrun_context_t *ctx, int fd, const file *f)
{
    char name[32];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    must(ftruncate(fd, 0) == 0, "truncate");
    must(pwrite(fd, f->bytes, f->size, 0) == (ssize_t)f->size, "write");
    fence(ctx, true);
    int32_t got = gemrun_session_restore(ctx, name);
    fence(ctx, false);
    return got;
}

/* Whatever its values are: no step is worse than not finite. */
static void run(gemrun_context_t *ctx)
{
    gemrun_request q = gemrun_request_default(ctx);
    q.temperature = 1, q.seed_set = 1, q.seed = draw(3), q.reuse = draw(2), q.speculate = draw(7);
    (void)gemrun_sample(ctx, &q);
    (void)gemrun_session_generate(ctx, draw(2) ? "ab" : "", &q, NULL);
    (void)gemrun_generate(ctx, "ab", &q, NULL);
    for (int32_t n = 0; n >= 0;)
        n = gemrun_decode(ctx, (int32_t)draw(ctx->e.v.conf.vocab_rows));
}

static void once(gemrun_context_t *ctx, int fd, const file *from, const file *before, figures *s)
{
    static file damaged, after;
    damaged.size = from->size;
    memcpy(damaged.bytes, from->bytes, from->size);
    for (uint32_t i = 0, n = draw(4); i <= n; i++)
        change(&damaged);
    if (draw(8) == 0)
        cut(&damaged);
    if (draw(4)) {
        seal(&damaged);
        s->sealed++;
    }
    int32_t got = restore(ctx, fd, &damaged);
    s->files++;
    s->codes[got >= 0 ? 0 : -got < CODES ? -got : CODES - 1]++;
    bool look = got >= 0 || s->files % RUN_EVERY == 0;
    if (look) {
        const file *same = got >= 0 ? &damaged : before;
        save(ctx, &after);
        must(after.size == same->size && memcmp(after.bytes, same->bytes, same->size) == 0,
             got >= 0 ? "not what was restored" : "a refused file changed the context");
    }
    if (got >= 0) {
        if (s->restored++ % RUN_EVERY == 0) {
            run(ctx);
            s->ran++;
        }
        must(restore(ctx, fd, before) >= 0, "restore");
    }
}

static void fuzz(const char *path, uint64_t count, figures *s)
{
    static file states[STATES], before;
    gemrun_context_t *model = NULL, *ctx = NULL;
    gemrun_config c = gemrun_config_default();
    c.threads = 1;
    must(gemrun_open(&model, path, &c) == GEMRUN_OK, "open");
    must(gemrun_session_open(&ctx, model, &c) == GEMRUN_OK, "session");
    uint32_t context = ctx->e.v.conf.context;
    for (uint32_t i = 0; i < STATES; i++) {
        make_state(model, i * context / (STATES - 1));
        save(model, states + i);
    }
    make_state(ctx, 40 < context ? 40 : context);
    save(ctx, &before);
    int fd = memfd_create("session", MFD_CLOEXEC);
    must(fd >= 0, "memfd_create");
    for (uint64_t i = 0; i < count; i++)
        once(ctx, fd, states + draw(STATES), &before, s);
    close(fd);
    gemrun_destroy(ctx);
    gemrun_destroy(model);
}

int main(int argc, char **argv)
{
    char name[64];
    figures s = {0};
    if (argc < 4) {
        fputs("usage: fuzz_session COUNT SEED ARTIFACT...\n", stderr);
        return 2;
    }
    must(mkdtemp(folder) != NULL, "mkdtemp");
    state = strtoull(argv[2], NULL, 10) * 2 + 1;
    for (int i = 3; i < argc; i++)
        fuzz(argv[i], strtoull(argv[1], NULL, 10), &s);
    snprintf(name, sizeof name, "%s/s", folder);
    must(unlink(name) == 0 && rmdir(folder) == 0, "clean up");
    printf("fuzz_session: %" PRIu64 " files, %" PRIu64 " with right checksums, %" PRIu64
           " restored, %" PRIu64 " of them run; no finding\nstatus", s.files, s.sealed, s.restored,
           s.ran);
    for (int i = 0; i < CODES; i++)
        if (s.codes[i] > 0)
            printf("  %d: %" PRIu64, -i, s.codes[i]);
    return puts("") < 0;
}
