/* gs_session.c: sessions over one mapped model; what is in a context, saved, restored and forked
 * (gemrun_session.h; gs_turn.c goes on from there). SESSION.md has the file format and the order
 * of checks.
 *
 * No call takes memory: what is read and written goes through the tokenizer's scratch, which no
 * call needs that is not inside. A file is read twice, to check it and to use it, so that a refused
 * one leaves the context as it was without a second cache to hold it. */
#define _POSIX_C_SOURCE 200809L
#include "gemrun_session.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gr_check.h"
#include "gr_ctx.h"
#include "gr_model.h"
#include "gs_handle.h"
#include "gs_pin.h"

#define MAGIC "\x8bGES\r\n\x1a\n"
enum { VERSION = 1, HEADER = 256, BUFFER = 192 << 10, PIECE = 64 << 10, TRIES = 16,
       PATH = 4096, SENTENCE = 512 };
enum { HAS_LOGITS = 1, HAS_RANDOM = 2, KNOWN_FLAGS = 3 };

typedef struct header { /* of a file */
    uint8_t magic[8];
    uint32_t byte_order, version, header_size, flags;
    uint64_t file_size, kv_bytes;
    uint8_t root_sha256[32]; /* of the artifact .. */
    uint32_t table_crc32;    /* .. which the engine did check */
    uint32_t kv_layout_id, kv_type;
    uint32_t tokens, high;   /* in the cache; and at most since it was empty */
    uint32_t hidden;         /* floats of the final norm output; 0: no logits */
    uint64_t seed, random;   /* of the random state; 0, 0 without one */
    uint8_t name[64];        /* of the model, for people */
    uint8_t reserved[72];
    uint32_t body_crc32, header_crc32;
} header;

_Static_assert(sizeof(header) == HEADER, "header");
_Static_assert(offsetof(header, root_sha256) == 40 && offsetof(header, seed) == 96, "header");
_Static_assert(offsetof(header, body_crc32) == 248, "header");
_Static_assert(BUFFER >= 2 * GB_KV_BLOCK * GB_MAX_HEAD_DIM * (int)sizeof(float), "a KV block fits");
_Static_assert(BUFFER <= 32 * (16 + 4096) + 65536, "GB_BUF_TOK of a context of one token");

static gemrun_status refuse(gemrun_status code, const char *object, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static gemrun_status refuse(gemrun_status code, const char *object, const char *format, ...)
{
    char what[SENTENCE];
    va_list values;
    va_start(values, format);
    vsnprintf(what, sizeof what, format, values);
    va_end(values);
    return gs_refuse(code, object, what);
}

static const char *name_of(const gemrun_context_t *ctx)
{
    return ctx->name[0] ? ctx->name : "model";
}

/* ---- what is in use of the cache ---- */

typedef struct ring { /* blocks of a KV head, for a number of tokens in the cache */
    uint8_t *at;          /* used of them are in use, from the first on */
    uint32_t used, blocks, sink;
    uint32_t tokens, from; /* the next token sees positions from `from` on, and the sink */
    uint32_t high;
    size_t codes[2], scales, block; /* bytes: of a position's K, V; of a block */
    bool packed[2];                 /* K, V hold two codes of 4 bits a byte */
} ring;

typedef struct stretch { /* neighbours in a block that are all in use, or none is */
    uint32_t from, to;
    bool live;
} stretch;

typedef struct area {
    size_t at, size;
    bool scales, packed;
} area;

static ring ring_of(const gr_engine *e, const gb_layer *l, uint32_t head, uint32_t tokens,
                    uint32_t high)
{
    uint32_t type = e->v.conf.kv_type, blocks = (tokens + GB_KV_BLOCK - 1) / GB_KV_BLOCK;
    gb_kv_unit u = gr_kv_unit_of(&e->v, l, head);
    ring r = {.blocks = u.blocks, .sink = u.sink, .tokens = tokens, .high = high};
    size_t codes = l->head_dim * (type == GB_KV_INT8 ? 1u : type == GB_KV_F16 ? 2u : 4u);
    r.packed[0] = u.flags & GB_UNITF_KEY4;
    r.packed[1] = u.flags & GB_UNITF_VALUE4;
    for (uint32_t i = 0; i < 2; i++)
        r.codes[i] = r.packed[i] ? codes / 2 : codes;
    r.scales = type == GB_KV_INT8 ? l->head_dim / l->kv_group * sizeof(uint16_t) : 0;
    r.block = (size_t)gr_kv_block_size(&e->v, l, u.flags);
    r.at = e->kv + l->kv_offset + u.first * gr_kv_step(&e->v, l);
    r.used = gr_least(r.blocks, blocks);
    r.from = gr_kv_seen(e, l, head, tokens).from;
    return r;
}

static uint64_t kv_bytes(const gr_engine *e, uint32_t tokens)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < e->v.layer_count; i++) {
        const gb_layer *l = &e->v.layers[i];
        for (uint32_t h = 0; h < l->kv_heads; h++) {
            ring r = ring_of(e, l, h, tokens, tokens);
            sum += (uint64_t)r.used * r.block;
        }
    }
    return sum;
}

/* Can what stands in a row of a block still be read? It is the newest position that belongs there,
 * which the next token sees, or one that a prompt alike can go back to: then the ring has not gone
 * on over it, not even by a guess. */
static bool is_live(const ring *r, uint32_t block, uint32_t row)
{
    uint64_t position = (uint64_t)block * GB_KV_BLOCK + row;
    uint64_t turn = (uint64_t)(r->blocks - r->sink) * GB_KV_BLOCK;
    if (block < r->sink || position >= r->tokens)
        return position < r->tokens;
    position += (r->tokens - 1 - position) / turn * turn;
    return position >= r->from || position + turn >= r->high;
}

static stretch run_at(const ring *r, uint32_t block, uint32_t row)
{
    stretch run = {.from = row, .to = row + 1, .live = is_live(r, block, row)};
    while (run.to < GB_KV_BLOCK && is_live(r, block, run.to) == run.live)
        run.to++;
    return run;
}

/* Where the codes and scales of a run stand in its block: K, then V. */
static void areas_of(const ring *r, const stretch *run, area out[4])
{
    size_t rows = run->to - run->from, from = run->from, at = 0;
    for (uint32_t i = 0; i < 2; i++) {
        size_t codes = r->codes[i];
        out[2 * i] = (area){at + from * codes, rows * codes, false, r->packed[i]};
        at += GB_KV_BLOCK * codes;
        out[2 * i + 1] = (area){at + from * r->scales, rows * r->scales, true, false};
        at += GB_KV_BLOCK * r->scales;
    }
}

/* ---- values ---- */

static bool all_zero(const uint8_t *p, size_t size)
{
    uint8_t any = 0;
    for (size_t i = 0; i < size; i++)
        any |= p[i];
    return any == 0;
}

static bool floats_finite(const uint8_t *p, size_t size)
{
    bool bad = false;
    for (size_t i = 0; i < size; i += sizeof(uint32_t)) {
        uint32_t u;
        memcpy(&u, p + i, sizeof u);
        bad |= (u & 0x7F800000u) == 0x7F800000u;
    }
    return !bad;
}

/* Halves: exponent 0x7C00. Scales of an int8 cache (bfloat16) are not negative, too. */
static bool halves_below(const uint8_t *p, size_t size, uint32_t mask, uint32_t end)
{
    bool bad = false;
    for (size_t i = 0; i < size; i += sizeof(uint16_t)) {
        uint16_t u;
        memcpy(&u, p + i, sizeof u);
        bad |= (u & mask) >= end;
    }
    return !bad;
}

static bool codes_good(const uint8_t *p, size_t size) /* -127..127 */
{
    bool bad = false;
    for (size_t i = 0; i < size; i++)
        bad |= p[i] == 0x80;
    return !bad;
}

static bool pairs_good(const uint8_t *p, size_t size) /* 0..14 twice */
{
    bool bad = false;
    for (size_t i = 0; i < size; i++)
        bad |= (p[i] & 0x0F) == 0x0F || (p[i] & 0xF0) == 0xF0;
    return !bad;
}

static bool area_good(const uint8_t *p, const area *a, uint32_t kv_type)
{
    if (a->scales)
        return halves_below(p + a->at, a->size, 0xFFFF, 0x7F80);
    if (a->packed)
        return pairs_good(p + a->at, a->size);
    if (kv_type == GB_KV_INT8)
        return codes_good(p + a->at, a->size);
    return kv_type == GB_KV_F16 ? halves_below(p + a->at, a->size, 0x7C00, 0x7C00)
                                : floats_finite(p + a->at, a->size);
}

static bool block_good(const ring *r, uint32_t block, const uint8_t *p, uint32_t kv_type)
{
    bool good = true;
    stretch run;
    for (uint32_t row = 0; row < GB_KV_BLOCK && good; row = run.to) {
        area areas[4];
        run = run_at(r, block, row);
        areas_of(r, &run, areas);
        for (uint32_t i = 0; i < 4; i++)
            good &= run.live ? area_good(p, &areas[i], kv_type)
                             : all_zero(p + areas[i].at, areas[i].size);
    }
    return good;
}

/* ---- files ---- */

typedef struct stream { /* the part of a file behind its header */
    int fd;
    uint8_t *buffer;   /* of BUFFER bytes */
    size_t at, used;   /* reading: handed out of those read */
    uint64_t offset, end; /* in the file */
    uint32_t crc;
    int error;         /* errno of what failed; 0: nothing, EOF_EARLY: less than there was */
} stream;
enum { EOF_EARLY = -1 };

static stream stream_of(const gr_engine *e, int fd, uint64_t end)
{
    return (stream){.fd = fd, .buffer = e->buf[GB_BUF_TOK], .offset = HEADER, .end = end};
}

static int write_at(int fd, const uint8_t *data, size_t size, uint64_t offset)
{
    while (size > 0) {
        ssize_t n = pwrite(fd, data, size, (off_t)offset);
        if (n == 0 || (n < 0 && errno != EINTR))
            return n == 0 ? EIO : errno;
        size_t done = n > 0 ? (size_t)n : 0;
        data += done, size -= done, offset += done;
    }
    return 0;
}

/* Up to `size` bytes; fewer only at the file's end. */
static int read_at(int fd, uint8_t *data, size_t size, uint64_t offset, size_t *out_got)
{
    *out_got = 0;
    while (*out_got < size) {
        ssize_t n = pread(fd, data + *out_got, size - *out_got, (off_t)(offset + *out_got));
        if (n < 0 && errno != EINTR)
            return errno;
        if (n == 0)
            break;
        *out_got += n > 0 ? (size_t)n : 0;
    }
    return 0;
}

static void flush(stream *s)
{
    s->crc = gr_crc32(s->crc, s->buffer, s->used);
    if (!s->error)
        s->error = write_at(s->fd, s->buffer, s->used, s->offset);
    s->offset += s->used;
    s->used = 0;
}

/* Room for the next `size` bytes of the file, at most BUFFER. */
static uint8_t *room_for(stream *s, size_t size)
{
    if (size > BUFFER - s->used)
        flush(s);
    s->used += size;
    return s->buffer + s->used - size;
}

/* The next `size` bytes of the file, at most BUFFER; NULL: see s->error. */
static const uint8_t *next_bytes(stream *s, size_t size)
{
    if (s->used - s->at < size) {
        size_t rest = s->used - s->at, got = 0, more = BUFFER - rest;
        memmove(s->buffer, s->buffer + s->at, rest);
        more = s->end - s->offset < more ? (size_t)(s->end - s->offset) : more;
        s->error = read_at(s->fd, s->buffer + rest, more, s->offset, &got);
        s->crc = gr_crc32(s->crc, s->buffer + rest, got);
        s->offset += got;
        s->used = rest + got;
        s->at = 0;
        if (!s->error && s->used < size)
            s->error = EOF_EARLY;
        if (s->error)
            return NULL;
    }
    s->at += size;
    return s->buffer + s->at - size;
}

/* ---- the header ---- */

static uint64_t padded(uint64_t size)
{
    return gr_align(size, GB_LINE);
}

static header header_of(const gemrun_context_t *ctx)
{
    const gr_engine *e = &ctx->e;
    const gb_header *a = &e->v.header;
    header h = {.byte_order = GB_BYTE_ORDER, .version = VERSION, .header_size = HEADER,
                .table_crc32 = a->table_crc32, .kv_layout_id = a->kv_layout_id,
                .kv_type = e->v.conf.kv_type, .tokens = e->pos, .high = e->high};
    memcpy(h.magic, MAGIC, sizeof h.magic);
    memcpy(h.root_sha256, a->root_sha256, sizeof h.root_sha256);
    memcpy(h.name, e->v.conf.name, sizeof h.name);
    h.flags = (e->logits_valid ? HAS_LOGITS : 0) | (ctx->rng_ready ? HAS_RANDOM : 0);
    h.hidden = e->logits_valid ? e->v.conf.hidden : 0;
    h.seed = ctx->rng_ready ? ctx->rng_seed : 0;
    h.random = ctx->rng_ready ? ctx->rng.state : 0;
    h.kv_bytes = kv_bytes(e, e->pos);
    h.file_size = HEADER + padded(4 * (uint64_t)h.hidden) + padded(4 * (uint64_t)h.tokens) +
                  h.kv_bytes;
    return h;
}

/* Rows 2 to 8 of SESSION.md; `got` bytes of the header were read. */
static gemrun_status check_form(const char *path, const header *h, size_t got, uint64_t size)
{
    if (got > 0 && memcmp(h->magic, MAGIC, gr_least((uint32_t)got, sizeof h->magic)) != 0)
        return refuse(GEMRUN_E_MAGIC, path, "no saved session; name a file that save has written");
    if (got < HEADER)
        return refuse(GEMRUN_E_SIZE, path, "cut short (%zu bytes, its header has %d); save it "
                      "again", got, HEADER);
    if (h->byte_order != GB_BYTE_ORDER)
        return refuse(GEMRUN_E_BYTE_ORDER, path, "saved with another byte order; save it here");
    if (h->version != VERSION)
        return refuse(GEMRUN_E_VERSION, path, "version %u of the format, this engine has %d; %s",
                      h->version, VERSION, h->version > VERSION ? "use a newer gemrun"
                                                                : "save it again");
    if (gr_crc32(0, h, offsetof(header, header_crc32)) != h->header_crc32)
        return refuse(GEMRUN_E_HEADER_CRC, path, "damaged, its header's checksum disagrees; "
                      "use another copy");
    size_t n = strnlen((const char *)h->name, sizeof h->name);
    if (h->header_size != HEADER || (h->flags & ~(uint32_t)KNOWN_FLAGS) != 0 ||
        !all_zero(h->reserved, sizeof h->reserved) || !all_zero(h->name + n, sizeof h->name - n))
        return refuse(GEMRUN_E_HEADER, path, "a field of its header has an impossible value; "
                      "save it again");
    if (h->file_size != size)
        return refuse(GEMRUN_E_SIZE, path, "%s (%llu bytes, its header says %llu); save it again",
                      size < h->file_size ? "cut short" : "longer than it should be",
                      (unsigned long long)size, (unsigned long long)h->file_size);
    return GEMRUN_OK;
}

/* A name from a file, in print. */
static void show_name(const uint8_t name[64], char out[65])
{
    size_t n = strnlen((const char *)name, 64);
    for (size_t i = 0; i < n; i++)
        out[i] = (char)(name[i] >= 0x20 && name[i] < 0x7F ? name[i] : '?');
    out[n] = 0;
}

/* Rows 9 and 10: is it of this model? */
static gemrun_status check_model(const char *path, const header *h, const gr_view *v)
{
    const gb_header *a = &v->header;
    bool root = memcmp(h->root_sha256, a->root_sha256, sizeof h->root_sha256) == 0 &&
                h->table_crc32 == a->table_crc32;
    bool layout = h->kv_type == v->conf.kv_type && h->kv_layout_id == a->kv_layout_id;
    char theirs[65], ours[65];
    show_name(h->name, theirs);
    show_name(v->conf.name, ours);
    if (memcmp(h->name, v->conf.name, sizeof h->name) != 0)
        return refuse(GEMRUN_E_ROOT, path, "saved from another model (%s, this is %s); restore it "
                      "with its own", theirs, ours);
    if (!root)
        return refuse(GEMRUN_E_ROOT, path, "saved from another build of %s, with another %s; "
                      "restore it with its own", ours, layout ? "content" : "layout of the cache");
    if (!layout)
        return refuse(GEMRUN_E_CONTEXT, path, "saved from a cache of another layout (type %u, "
                      "layout 0x%x; here %u, 0x%x); save it again", h->kv_type, h->kv_layout_id,
                      v->conf.kv_type, a->kv_layout_id);
    return GEMRUN_OK;
}

static gemrun_status check_room(const char *object, const gr_engine *e, uint32_t tokens)
{
    return tokens <= e->context
               ? GEMRUN_OK
               : refuse(GEMRUN_E_FULL, object, "%u tokens, longer than this context's "
                        "kv_cache_size of %u; open one with %u or more", tokens, e->context,
                        tokens);
}

/* Rows 11 and 12: the state it tells of is one that this context can have. */
static gemrun_status check_state(const char *path, const header *h, const gr_engine *e)
{
    const gb_conf *c = &e->v.conf;
    bool logits = (h->flags & HAS_LOGITS) != 0, random = (h->flags & HAS_RANDOM) != 0;
    bool good = h->tokens <= h->high && h->high <= c->context && (!logits || h->tokens > 0) &&
                h->hidden == (logits ? c->hidden : 0) && (random || (h->seed | h->random) == 0);
    uint64_t kv = good ? kv_bytes(e, h->tokens) : 0;
    uint64_t size = HEADER + padded(4 * (uint64_t)h->hidden) + padded(4 * (uint64_t)h->tokens) + kv;
    if (!good || h->kv_bytes != kv || h->file_size != size)
        return refuse(GEMRUN_E_HEADER, path, "a figure of its header cannot be; save it again");
    return check_room(path, e, h->tokens);
}

/* ---- save ---- */

static void put(stream *s, const uint8_t *data, uint64_t size)
{
    size_t rest = (size_t)(padded(size) - size);
    for (size_t n; size > 0; size -= n, data += n) {
        n = size < PIECE ? (size_t)size : PIECE;
        memcpy(room_for(s, n), data, n);
    }
    memset(room_for(s, rest), 0, rest);
}

static void copy_block(uint8_t *to, const ring *r, uint32_t block)
{
    stretch run;
    memcpy(to, r->at + block * r->block, r->block);
    for (uint32_t row = 0; row < GB_KV_BLOCK; row = run.to) {
        area areas[4];
        run = run_at(r, block, row);
        areas_of(r, &run, areas);
        for (uint32_t i = 0; i < 4 && !run.live; i++)
            memset(to + areas[i].at, 0, areas[i].size); /* nobody learns what stood there */
    }
}

/* 0, or errno. */
static int write_session(const gemrun_context_t *ctx, int fd)
{
    const gr_engine *e = &ctx->e;
    header h = header_of(ctx);
    stream s = stream_of(e, fd, h.file_size);
    put(&s, e->buf[GB_BUF_HIDDEN], 4 * (uint64_t)h.hidden);
    put(&s, e->buf[GB_BUF_IDS], 4 * (uint64_t)h.tokens);
    for (uint32_t i = 0; i < e->v.layer_count && !s.error; i++) {
        const gb_layer *l = &e->v.layers[i];
        for (uint32_t head = 0; head < l->kv_heads; head++) {
            ring r = ring_of(e, l, head, h.tokens, h.high);
            for (uint32_t b = 0; b < r.used && !s.error; b++)
                copy_block(room_for(&s, r.block), &r, b);
        }
    }
    flush(&s);
    h.body_crc32 = s.crc;
    h.header_crc32 = gr_crc32(0, &h, offsetof(header, header_crc32));
    if (!s.error)
        s.error = write_at(fd, (const uint8_t *)&h, sizeof h, 0);
    if (!s.error && fsync(fd) != 0)
        s.error = errno;
    return s.error;
}

/* A new file beside `path`, for its owner only; -1: errno says why. */
static int open_partial(const char *path, char partial[PATH])
{
    int fd = -1;
    for (uint32_t i = 0; i < TRIES && fd < 0; i++) {
        uint32_t number = (uint32_t)(gs_now() + (uint64_t)getpid() * 2654435761u + i);
        int n = snprintf(partial, PATH, "%s.%08x.partial", path, number);
        if (n < 0 || n >= PATH) {
            errno = ENAMETOOLONG;
            return -1;
        }
        fd = open(partial, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (fd < 0 && errno != EEXIST && errno != EINTR)
            return -1;
    }
    return fd;
}

/* The new name is on the disk. 0, or errno. */
static int sync_folder(const char *path)
{
    char folder[PATH];
    const char *slash = strrchr(path, '/');
    size_t n = slash ? (size_t)(slash - path) + (slash == path) : 0;
    memcpy(folder, path, n);
    folder[n] = 0;
    int fd = open(n > 0 ? folder : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return errno;
    int error = fsync(fd) == 0 || errno == EINVAL ? 0 : errno; /* some systems have none of it */
    close(fd);
    return error;
}

/* What is at `path` may be replaced. */
static gemrun_status check_place(const char *path)
{
    struct stat st;
    if (path[0] == 0)
        return refuse(GEMRUN_E_OPEN, "path", "is empty; name a file");
    if (lstat(path, &st) != 0 || S_ISREG(st.st_mode) || S_ISLNK(st.st_mode))
        return GEMRUN_OK;
    return refuse(GEMRUN_E_OPEN, path, "%s; name a file",
                  S_ISDIR(st.st_mode) ? "is a folder" : "is no regular file");
}

static gemrun_status save(gemrun_context_t *ctx, const char *path)
{
    char partial[PATH];
    gemrun_status st = check_place(path);
    if (st != GEMRUN_OK)
        return st;
    int fd = open_partial(path, partial), error = 0;
    if (fd < 0)
        return refuse(GEMRUN_E_OPEN, path, "cannot be written (%s); check the path and its "
                      "permissions", strerror(errno));
    error = write_session(ctx, fd);
    if (close(fd) != 0 && !error)
        error = errno;
    if (!error && rename(partial, path) != 0)
        error = errno;
    if (error) {
        unlink(partial);
        return refuse(GEMRUN_E_OPEN, path, "cannot be written (%s); free some room, or name "
                      "another place", strerror(error));
    }
    error = sync_folder(path);
    return !error ? GEMRUN_OK
                  : refuse(GEMRUN_E_OPEN, path, "is written, but its name may not outlast a power "
                           "cut (%s); name another folder", strerror(error));
}

/* A hook of the compiler lets heads see less: what is computed then is of no artifact. */
static gemrun_status check_whole(const gemrun_context_t *ctx)
{
    return ctx->e.v.units && ctx->e.v.unit_count == 0
               ? refuse(GEMRUN_E_STATE, name_of(ctx), "a measurement hides a part of its cache; "
                        "end it first")
               : GEMRUN_OK;
}

gemrun_status gemrun_session_save(gemrun_context_t *ctx, const char *path)
{
    if (!path)
        return gr_refuse(GR_F_NONE, 0, 0);
    gemrun_status st = gr_enter(ctx);
    if (st != GEMRUN_OK)
        return st;
    st = check_whole(ctx);
    st = st == GEMRUN_OK ? save(ctx, path) : st;
    gr_leave(ctx, 0); /* the sentence is there already */
    return st;
}

/* ---- blocks for the compiler ---- */

int64_t gs_session_blocks(gemrun_context_t *ctx, uint8_t *out, uint64_t capacity)
{
    gemrun_status st = gr_enter(ctx);
    if (st != GEMRUN_OK)
        return st;
    const gr_engine *e = &ctx->e;
    uint64_t size = kv_bytes(e, e->pos);
    for (uint32_t i = 0; i < e->v.layer_count && size <= capacity; i++) {
        const gb_layer *l = &e->v.layers[i];
        for (uint32_t head = 0; head < l->kv_heads; head++) {
            ring r = ring_of(e, l, head, e->pos, e->high);
            for (uint32_t b = 0; b < r.used; b++, out += r.block)
                copy_block(out, &r, b);
        }
    }
    gr_leave(ctx, 0);
    return (int64_t)size;
}

/* ---- restore ---- */

typedef struct reading { /* a file on its way into a context, or through the checks */
    stream s;
    gr_engine *e;
    const header *h;
    bool use; /* put it in place */
    bool good; /* its values are */
} reading;

/* The next `size` bytes and their padding, into `to`. False: s.error, or not good. */
static bool take(reading *r, uint8_t *to, uint64_t size,
                 bool (*check)(const gr_engine *e, const uint8_t *p, size_t size))
{
    size_t rest = (size_t)(padded(size) - size);
    const uint8_t *p;
    for (size_t n; size > 0; size -= n, to += n) {
        n = size < PIECE ? (size_t)size : PIECE;
        p = next_bytes(&r->s, n);
        if (!p || !(r->good = check(r->e, p, n)))
            return false;
        if (r->use)
            memcpy(to, p, n);
    }
    p = next_bytes(&r->s, rest);
    return p && (r->good = all_zero(p, rest));
}

static bool hidden_good(const gr_engine *e, const uint8_t *p, size_t size)
{
    (void)e;
    return floats_finite(p, size);
}

static bool ids_good(const gr_engine *e, const uint8_t *p, size_t size)
{
    uint32_t id, most = 0;
    for (size_t i = 0; i < size; i += sizeof id) {
        memcpy(&id, p + i, sizeof id);
        most = id > most ? id : most;
    }
    return most < e->v.conf.vocab_rows;
}

static bool take_ring(reading *r, const ring *to)
{
    for (uint32_t b = 0; b < to->used; b++) {
        const uint8_t *p = next_bytes(&r->s, to->block);
        if (!p || !(r->good = block_good(to, b, p, r->h->kv_type)))
            return false;
        if (r->use)
            memcpy(to->at + b * to->block, p, to->block);
    }
    return true;
}

static bool take_body(reading *r)
{
    gr_engine *e = r->e;
    bool ok = take(r, e->buf[GB_BUF_HIDDEN], 4 * (uint64_t)r->h->hidden, hidden_good) &&
              take(r, e->buf[GB_BUF_IDS], 4 * (uint64_t)r->h->tokens, ids_good);
    for (uint32_t i = 0; i < e->v.layer_count && ok; i++) {
        const gb_layer *l = &e->v.layers[i];
        for (uint32_t head = 0; head < l->kv_heads && ok; head++) {
            ring to = ring_of(e, l, head, r->h->tokens, r->h->high);
            ok = take_ring(r, &to);
        }
    }
    return ok;
}

/* The checksum is that of all bytes, also where a value was wrong half way. */
static void read_rest(stream *s)
{
    while (!s->error && s->offset < s->end) {
        s->at = s->used;
        (void)next_bytes(s, 1);
    }
}

/* Rows 13 and 14 of SESSION.md; then, with `use`, everything is in place. */
static gemrun_status read_body(gr_engine *e, int fd, const char *path, const header *h, bool use)
{
    reading r = {.s = stream_of(e, fd, h->file_size), .e = e, .h = h, .use = use, .good = true};
    (void)take_body(&r);
    read_rest(&r.s);
    if (r.s.error)
        return refuse(r.s.error == EOF_EARLY ? GEMRUN_E_SIZE : GEMRUN_E_OPEN, path,
                      "cannot be read to its end (%s); use another copy",
                      r.s.error == EOF_EARLY ? "it became shorter" : strerror(r.s.error));
    if (r.s.crc != h->body_crc32)
        return refuse(GEMRUN_E_SECTION_CRC, path, "damaged, its checksum disagrees (wanted 0x%08x, "
                      "found 0x%08x); use another copy", h->body_crc32, r.s.crc);
    return r.good ? GEMRUN_OK
                  : refuse(GEMRUN_E_HEADER, path, "a value in it cannot be (an id, or no finite "
                           "number); save it again");
}

static void take_state(gemrun_context_t *ctx, const header *h)
{
    gr_engine *e = &ctx->e;
    e->pos = h->tokens;
    e->high = h->high;
    e->logits_valid = (h->flags & HAS_LOGITS) != 0;
    e->screened = e->logits_valid; /* logits come from GB_BUF_HIDDEN when they are asked for */
    gr_rng_seed(&ctx->rng, h->seed);
    ctx->rng.state = h->random;
    ctx->rng_seed = h->seed;
    ctx->rng_ready = (h->flags & HAS_RANDOM) != 0;
}

static gemrun_status restore(gemrun_context_t *ctx, int fd, const char *path)
{
    gr_engine *e = &ctx->e;
    struct stat file;
    header h = {0};
    size_t got = 0;
    int error = fstat(fd, &file) != 0 ? errno : 0;
    if (!error && !S_ISREG(file.st_mode))
        error = S_ISDIR(file.st_mode) ? EISDIR : EINVAL;
    error = error ? error : read_at(fd, (uint8_t *)&h, sizeof h, 0, &got);
    if (error)
        return refuse(GEMRUN_E_OPEN, path, "cannot be read (%s); check the path and its "
                      "permissions", strerror(error));
    gemrun_status st = check_form(path, &h, got, (uint64_t)file.st_size);
    st = st == GEMRUN_OK ? check_model(path, &h, &e->v) : st;
    st = st == GEMRUN_OK ? check_state(path, &h, e) : st;
    st = st == GEMRUN_OK ? read_body(e, fd, path, &h, false) : st;
    if (st != GEMRUN_OK)
        return st;
    st = read_body(e, fd, path, &h, true);
    if (st != GEMRUN_OK) {
        gr_reset(ctx);
        return refuse(st, path, "changed, or could not be read, while it was put in place; the "
                      "cache is empty now, restore it again");
    }
    take_state(ctx, &h);
    return GEMRUN_OK;
}

int32_t gemrun_session_restore(gemrun_context_t *ctx, const char *path)
{
    if (!path)
        return gr_refuse(GR_F_NONE, 0, 0);
    gemrun_status st = gr_enter(ctx);
    if (st != GEMRUN_OK)
        return st;
    st = check_whole(ctx);
    if (st == GEMRUN_OK) {
        int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); /* no wait for a pipe */
        st = fd >= 0 ? restore(ctx, fd, path)
                     : refuse(GEMRUN_E_OPEN, path, "cannot be opened (%s); check the path and its "
                              "permissions", strerror(errno));
        if (fd >= 0)
            close(fd);
    }
    int32_t tokens = (int32_t)ctx->e.pos;
    gr_leave(ctx, 0); /* the sentence is there already */
    return st == GEMRUN_OK ? tokens : (int32_t)st;
}

/* ---- fork ---- */

bool gs_one_artifact(const gemrun_context_t *one, const gemrun_context_t *other)
{
    const gb_header *a = &one->e.v.header, *b = &other->e.v.header;
    return memcmp(a->root_sha256, b->root_sha256, sizeof a->root_sha256) == 0 &&
           a->table_crc32 == b->table_crc32 && a->kv_layout_id == b->kv_layout_id;
}

static gemrun_status check_pair(const gemrun_context_t *to, const gemrun_context_t *from)
{
    if (!gs_one_artifact(to, from))
        return refuse(GEMRUN_E_ROOT, name_of(to), "not of one artifact with %s, whose cache it was "
                      "to take over; open a session of it", name_of(from));
    gemrun_status st = check_room(name_of(to), &to->e, from->e.pos);
    st = st == GEMRUN_OK ? check_whole(to) : st;
    return st == GEMRUN_OK ? check_whole(from) : st;
}

static void copy_state(gemrun_context_t *to, const gemrun_context_t *from)
{
    gr_engine *t = &to->e;
    const gr_engine *f = &from->e;
    const gb_conf *c = &f->v.conf;
    for (uint32_t i = 0; i < f->v.layer_count; i++) {
        const gb_layer *l = &f->v.layers[i];
        for (uint32_t head = 0; head < l->kv_heads; head++) {
            ring r = ring_of(f, l, head, f->pos, f->high);
            memcpy(t->kv + (r.at - f->kv), r.at, r.used * r.block);
        }
    }
    memcpy(t->buf[GB_BUF_IDS], f->buf[GB_BUF_IDS], f->pos * sizeof(uint32_t));
    if (f->logits_valid) {
        memcpy(t->buf[GB_BUF_HIDDEN], f->buf[GB_BUF_HIDDEN], c->hidden * sizeof(float));
        memcpy(t->buf[GB_BUF_LOGITS], f->buf[GB_BUF_LOGITS], c->vocab_rows * sizeof(float));
    }
    t->pos = f->pos;
    t->high = f->high;
    t->logits_valid = f->logits_valid;
    t->screened = f->screened;
    to->rng = from->rng;
    to->rng_seed = from->rng_seed;
    to->rng_ready = from->rng_ready;
}

gemrun_status gemrun_session_fork(gemrun_context_t *to, gemrun_context_t *from)
{
    if (!to || !from || to == from)
        return to && from ? refuse(GEMRUN_E_ARGUMENT, name_of(to), "a fork is between two "
                                   "contexts; give another one")
                          : gr_refuse(GR_F_NONE, 0, 0);
    gemrun_status st = gr_enter(to);
    if (st != GEMRUN_OK)
        return st;
    st = gr_enter(from);
    if (st == GEMRUN_OK) {
        st = check_pair(to, from);
        if (st == GEMRUN_OK)
            copy_state(to, from);
        gr_leave(from, 0);
    }
    gr_leave(to, 0); /* the sentence is there already */
    return st;
}

/* ---- open ---- */

static uint64_t memory_of(const gemrun_context_t *model, uint32_t threads)
{
    const gb_header *h = &model->e.v.header;
    return h->ram_arena + h->ram_kv + model->engine.bytes + (threads - 1) * (uint64_t)GR_STACK_SIZE;
}

int64_t gemrun_session_memory(const gemrun_context_t *model, uint32_t threads)
{
    gr_error e;
    if (!model)
        return gr_refuse(GR_F_NONE, 0, 0);
    if (threads > GB_MAX_THREADS) {
        gr_fail(&e, GEMRUN_E_THREADS, GR_F_THREADS, GB_MAX_THREADS, threads);
        return gr_report(&e, name_of(model));
    }
    return (int64_t)memory_of(model, threads ? threads : model->e.threads);
}

/* The engine speaks of an image that it was given; here it is a model with a name. */
static void rename_object(const char *name)
{
    static const char object[] = "image: ";
    size_t capacity, n = sizeof object - 1;
    char rest[1024], *text = gr_port_text(&capacity);
    if (strncmp(text, object, n) == 0) {
        snprintf(rest, sizeof rest, "%s", text + n);
        snprintf(text, capacity, "%s: %s", name, rest);
    }
}

gemrun_status gemrun_session_open(gemrun_context_t **out, gemrun_context_t *model,
                                  const gemrun_config *config)
{
    gemrun_config q = gemrun_config_default();
    gr_error e;
    if (!out || !model)
        return gr_refuse(GR_F_NONE, 0, 0);
    *out = NULL;
    if (config && gr_take_struct(&q, sizeof q, GR_RESERVED(gemrun_config), config, &e) != GEMRUN_OK)
        return gr_report(&e, name_of(model));
    q.size = sizeof q;
    if (q.threads == 0 && q.thread_affinity == 0)
        q.threads = model->e.threads;
    bool counted = q.threads >= 1 && q.threads <= GB_MAX_THREADS && q.ignore_memory == 0;
    uint64_t wanted = counted ? memory_of(model, q.threads) : 0;
    uint64_t available = counted ? gr_port_memory("") : 0;
    if (wanted > available) { /* the engine's own sentence counts the weights, too */
        gr_fail(&e, GEMRUN_E_MEMORY, 0, wanted, available);
        return gr_report(&e, name_of(model));
    }
    const gr_view *v = &model->e.v; /* nothing of it changes after open */
    gemrun_status st = gemrun_open_mem(out, v->image, (size_t)v->image_size, NULL, 0, &q);
    if (st != GEMRUN_OK)
        rename_object(name_of(model));
    else
        (*out)->e.ahead = model->e.ahead; /* the mapping is the same */
    return st;
}
