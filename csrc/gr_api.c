/* gr_api.c: open, close and the figures of a context.
 *
 * The order of open: map the file, check it, compare memory and machine with what it asks for, map
 * what it declares, read the weights in, start the threads. Whatever fails, everything taken so far
 * is given back. All memory is taken here; a call takes none. */
#include <string.h>

#include "gr_check.h"
#include "gr_ctx.h"
#include "gr_feature.h"
#include "gr_text.h"

enum { TABLES_AT = GR_ENGINE_FIXED - GR_TABLES_FIXED, PAGE = 4096,
       STRUCT_MAX = 4096 };

/* ---- errors, entry and exit ---- */

gemrun_status gr_report(const gr_error *e, const char *object)
{
    size_t capacity;
    char *text = gr_port_text(&capacity);
    gr_explain(e, object, text, capacity);
    return e->code;
}

gemrun_status gr_refuse(gr_field field, uint64_t wanted, uint64_t found)
{
    gr_error e;
    gr_fail(&e, GEMRUN_E_ARGUMENT, field, wanted, found);
    return gr_report(&e, "gemrun");
}

gemrun_status gr_take_struct(void *out, uint32_t known, size_t used, size_t end,
                             const void *given, gr_error *e)
{
    const uint8_t *bytes = given;
    uint32_t size = 0;
    if (!given)
        return gr_fail(e, GEMRUN_E_ARGUMENT, GR_F_NONE, 0, 0);
    memcpy(&size, given, sizeof size);
    if (size == 0 || size > STRUCT_MAX || size % sizeof(void *) != 0) /* no field is cut */
        return gr_fail(e, GEMRUN_E_ARGUMENT, GR_F_SIZE, known, size);
    for (uint32_t i = (uint32_t)used; i < size; i++)
        if (bytes[i] != 0 && (i < end || i >= known)) /* settings that we do not know */
            return i < known ? gr_fail(e, GEMRUN_E_ARGUMENT, GR_F_RESERVED, 0, bytes[i])
                             : gr_fail(e, GEMRUN_E_ARGUMENT, GR_F_SIZE, known, size);
    memset(out, 0, known);
    memcpy(out, given, size < known ? size : known);
    return GEMRUN_OK;
}

gemrun_status gr_enter(gemrun_context_t *ctx)
{
    uint32_t idle = 0;
    if (!ctx)
        return gr_refuse(GR_F_NONE, 0, 0);
    if (!atomic_compare_exchange_strong(&ctx->busy, &idle, 1)) {
        gr_error e; /* the context's own belongs to the call inside */
        gr_fail(&e, GEMRUN_E_BUSY, 0, 0, 0);
        return gr_report(&e, "gemrun");
    }
    ctx->fp = gr_fp_enter();
    return GEMRUN_OK;
}

int32_t gr_leave(gemrun_context_t *ctx, int32_t result)
{
    if (result < 0) {
        if (ctx->e.err.code != (gemrun_status)result)
            gr_fail(&ctx->e.err, (gemrun_status)result, 0, 0, 0);
        gr_report(&ctx->e.err, ctx->name[0] ? ctx->name : "model");
    }
    gr_fp_leave(ctx->fp);
    atomic_store(&ctx->busy, 0);
    return result;
}

/* ---- open ---- */

gemrun_config gemrun_config_default(void)
{
    return (gemrun_config){.size = sizeof(gemrun_config)};
}

/* NULL: the default. */
static gemrun_status take_config(gemrun_config *q, const gemrun_config *given, gr_error *e)
{
    if (!given) {
        *q = gemrun_config_default();
        return GEMRUN_OK;
    }
    if (gr_take_struct(q, sizeof *q, GR_RESERVED(gemrun_config), given, e) != GEMRUN_OK)
        return GEMRUN_E_ARGUMENT;
    const struct {
        gr_field field;
        uint32_t value, most;
    } numbers[] = {{GR_F_WEIGHTS_CHECK, q->weights_check, 1},
                   {GR_F_FOREIGN_BOARD, q->allow_foreign_board, 1},
                   {GR_F_IGNORE_MEMORY, q->ignore_memory, 1},
                   {GR_F_LOCK_MEMORY, q->lock_memory, 1},
                   {GR_F_THREADS, q->threads, GB_MAX_THREADS},
                   {GR_F_DECODE_THREADS, q->decode_threads, GB_MAX_THREADS},
                   {GR_F_BALANCE, q->balance, 2},
                   {GR_F_HEAD, q->head, GEMRUN_HEAD_TWO_PLANE}};
    for (uint32_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (numbers[i].value > numbers[i].most)
            return gr_fail(e, numbers[i].most == GB_MAX_THREADS ? GEMRUN_E_THREADS
                                                                : GEMRUN_E_ARGUMENT,
                           numbers[i].field, numbers[i].most, numbers[i].value);
    return GEMRUN_OK;
}

/* The engine block's size by the section table, 0 where the image is too damaged to tell. */
static uint64_t engine_size(const uint8_t *image, uint64_t size)
{
    uint64_t tables = gr_open_tables_size(image, size);
    return tables == 0 ? 0 : gr_align(gr_add(tables, TABLES_AT), PAGE);
}

static gemrun_status choose_threads(gemrun_context_t *ctx, const gemrun_config *q)
{
    gr_engine *e = &ctx->e;
    uint32_t planned = e->v.conf.threads, cores = q->threads ? 0 : gr_port_fast_cores("");
    e->threads = q->threads ? q->threads : cores < planned ? cores : planned;
    e->near = gr_port_near("");
    gemrun_status st = q->thread_affinity ? gr_take_cores(ctx, q) : GEMRUN_OK;
    bool fewer = q->decode_threads > 0 && q->decode_threads < e->threads;
    e->decode_threads = fewer ? q->decode_threads : e->threads;
    e->balance = q->balance == 2 || (q->balance == 0 && e->threads > 1 && gr_port_uneven(""));
    return st;
}

/* Everything of the config that the artifact has a say in. */
static gemrun_status apply_config(gemrun_context_t *ctx, const gemrun_config *q)
{
    gr_engine *e = &ctx->e;
    const gb_conf *c = &e->v.conf;
    e->context = q->kv_cache_size ? q->kv_cache_size : c->context;
    e->chunk = q->prefill_batch_size ? q->prefill_batch_size : c->chunk;
    if (e->context > c->context)
        return gr_fail(&e->err, GEMRUN_E_CONTEXT, 0, e->context, c->context);
    if (e->chunk > c->chunk)
        return gr_fail(&e->err, GEMRUN_E_ARGUMENT, GR_F_BATCH, c->chunk, e->chunk);
    e->chunk = e->chunk < GR_STEP_MAX ? e->chunk : GR_STEP_MAX;
    gr_take_head(ctx, q);
    gemrun_status st = gr_take_kernels(ctx, q->kernel);
    return st == GEMRUN_OK ? choose_threads(ctx, q) : st;
}

static gemrun_status check_memory(gemrun_context_t *ctx, const gemrun_config *q)
{
    const gb_header *h = &ctx->e.v.header;
    uint64_t stacks = gr_mul(ctx->e.threads - 1, GR_STACK_SIZE), wanted = stacks;
    if (ctx->image.address)
        wanted = gr_add(wanted, gr_add(h->ram_weights, h->ram_tables));
    uint64_t available = q->ignore_memory ? GR_TOO_BIG : gr_port_memory("");
    if (ctx->owns_memory) { /* the engine's block is there already */
        wanted = gr_add(wanted, gr_add(h->ram_arena, gr_add(h->ram_kv, h->ram_engine)));
        available = gr_add(available, h->ram_engine);
    }
    if (wanted <= available)
        return GEMRUN_OK;
    const uint64_t plan[] = {h->ram_weights, h->ram_tables, h->ram_arena,
                             h->ram_kv,      h->ram_engine, stacks};
    gr_fail(&ctx->e.err, GEMRUN_E_MEMORY, 0, wanted, available);
    memcpy(ctx->e.err.plan, plan, sizeof plan);
    ctx->e.err.threads = ctx->e.threads;
    return GEMRUN_E_MEMORY;
}

static gemrun_status take_memory(gemrun_context_t *ctx, const gemrun_config *q)
{
    gr_engine *e = &ctx->e;
    const gb_header *h = &e->v.header;
    gemrun_status st = GEMRUN_OK;
    if (ctx->owns_memory) {
        st = gr_port_map(&ctx->arena, h->ram_arena, &e->err);
        st = st == GEMRUN_OK ? gr_port_map(&ctx->kv, h->ram_kv, &e->err) : st;
    } else {
        ctx->arena = (gr_map){ctx->engine.address + ctx->engine.bytes, h->ram_arena};
        ctx->kv = (gr_map){ctx->arena.address + h->ram_arena, h->ram_kv};
        memset(ctx->arena.address, 0, (size_t)(h->ram_arena + h->ram_kv));
    }
    if (st != GEMRUN_OK)
        return st;
    e->arena = ctx->arena.address;
    e->kv = ctx->kv.address;
    for (uint32_t i = 0; i < e->v.plan_count; i++)
        e->buf[e->v.plans[i].kind] = e->arena + e->v.plans[i].offset;
    gr_map stays = ctx->image;
    if (h->ram_weights + h->ram_tables < e->v.image_size) /* gemrun_stream's */
        stays.address = NULL;
    gr_port_prefault(&stays);
    if (q->lock_memory)
        ctx->locked = gr_port_lock(&stays) + gr_port_lock(&ctx->engine) +
                      gr_port_lock(&ctx->arena) + gr_port_lock(&ctx->kv);
    return GEMRUN_OK;
}

static gemrun_status start_threads(gemrun_context_t *ctx, const gemrun_config *q)
{
    gr_engine *e = &ctx->e;
    ctx->pinned = gr_bind(ctx); /* thread 0 is whoever runs the model: try it once, to report it */
    gr_unpin(ctx);
    e->team = (gr_team *)(void *)((uint8_t *)ctx + gr_align(sizeof *ctx, GB_LINE));
    return gr_team_start(e->team, e->threads, q->thread_affinity, &e->err);
}

static void release(gemrun_context_t *ctx)
{
    gr_map image = ctx->image, engine = ctx->engine;
    bool ours = ctx->owns_memory;
    if (ctx->e.team)
        gr_team_stop(ctx->e.team);
    if (ours) {
        gr_port_unmap(&ctx->arena);
        gr_port_unmap(&ctx->kv);
        gr_port_unmap(&engine); /* ctx lies in it */
    }
    gr_port_unmap(&image);
}

/* `image` is ours to unmap if owned; `memory` is the caller's block or empty. */
static gemrun_status open_image(gemrun_context_t **out, gr_map image, bool owned, gr_map memory,
                                const gemrun_config *q, gr_error *e)
{
    gr_map engine = {memory.address, engine_size(image.address, image.bytes)};
    gemrun_status st = GEMRUN_OK;
    if (engine.bytes == 0) { /* let the reader say what is wrong */
        gr_view v;
        return gr_open_view(&v, image.address, image.bytes, NULL, 0, false, e);
    }
    if (memory.address && memory.bytes < engine.bytes)
        return gr_fail(e, GEMRUN_E_ARGUMENT, GR_F_MEMORY_SIZE, engine.bytes, memory.bytes);
    if (memory.address)
        memset(engine.address, 0, (size_t)engine.bytes);
    else if ((st = gr_port_map(&engine, engine.bytes, e)) != GEMRUN_OK)
        return st;
    gemrun_context_t *ctx = (gemrun_context_t *)(void *)engine.address;
    ctx->engine = engine;
    ctx->owns_memory = memory.address == NULL;
    st = gr_open_view(&ctx->e.v, image.address, image.bytes, engine.address + TABLES_AT,
                      engine.bytes - TABLES_AT, q->weights_check == GEMRUN_WEIGHTS_FULL,
                      &ctx->e.err);
    if (st == GEMRUN_OK) {
        uint64_t needed = engine.bytes + ctx->e.v.header.ram_arena + ctx->e.v.header.ram_kv;
        ctx->image = owned ? image : (gr_map){0};
        gr_copy_names(ctx);
        st = memory.address && memory.bytes < needed
                 ? gr_fail(&ctx->e.err, GEMRUN_E_ARGUMENT, GR_F_MEMORY_SIZE, needed, memory.bytes)
                 : GEMRUN_OK;
    }
    gemrun_status (*const steps[])(gemrun_context_t *, const gemrun_config *) = {
        apply_config, check_memory, take_memory, start_threads};
    for (size_t i = 0; st == GEMRUN_OK && i < sizeof steps / sizeof steps[0]; i++)
        st = steps[i](ctx, q);
    if (st != GEMRUN_OK) {
        *e = ctx->e.err;
        ctx->image = (gr_map){0}; /* stays with the caller */
        release(ctx);
        return st;
    }
    *out = ctx;
    return GEMRUN_OK;
}

gemrun_status gemrun_open(gemrun_context_t **out_ctx, const char *path,
                          const gemrun_config *config)
{
    gemrun_config q;
    gr_map image = {0};
    gr_error e;
    if (!out_ctx || !path)
        return gr_refuse(GR_F_NONE, 0, 0);
    *out_ctx = NULL;
    gemrun_status st = take_config(&q, config, &e);
    st = st == GEMRUN_OK ? gr_port_map_file(&image, path, &e) : st;
    st = st == GEMRUN_OK ? open_image(out_ctx, image, true, (gr_map){0}, &q, &e) : st;
    if (st != GEMRUN_OK) {
        gr_port_unmap(&image);
        gr_report(&e, path);
    }
    return st;
}

gemrun_status gemrun_open_mem(gemrun_context_t **out_ctx, const void *image, size_t image_size,
                              void *memory, size_t memory_size, const gemrun_config *config)
{
    gemrun_config q;
    gr_error e;
    if (!out_ctx || !image)
        return gr_refuse(GR_F_NONE, 0, 0);
    if (((uintptr_t)image | (uintptr_t)memory) % PAGE != 0)
        return gr_refuse(GR_F_ALIGNED, PAGE, (uintptr_t)image | (uintptr_t)memory);
    *out_ctx = NULL;
    union { /* the image is only read; a map holds what could also be written */
        const void *given;
        uint8_t *address;
    } bytes = {image};
    gemrun_status st = take_config(&q, config, &e);
    if (st == GEMRUN_OK)
        st = open_image(out_ctx, (gr_map){bytes.address, image_size}, false,
                        (gr_map){memory, memory ? memory_size : 0}, &q, &e);
    return st == GEMRUN_OK ? st : gr_report(&e, "image");
}

int64_t gemrun_memory_needed(const void *image, size_t image_size, const gemrun_config *config)
{
    gb_header h;
    gr_error e;
    (void)config; /* a lower kv_cache_size limits the positions, not the plan */
    if (!image)
        return gr_refuse(GR_F_NONE, 0, 0);
    if (gr_open_header(&h, image, image_size, &e) != GEMRUN_OK)
        return gr_report(&e, "image");
    uint64_t need = gr_add(engine_size(image, image_size), gr_add(h.ram_arena, h.ram_kv));
    if (need > INT64_MAX) {
        gr_fail(&e, GEMRUN_E_RAM, 0, INT64_MAX, need);
        return gr_report(&e, "image");
    }
    return (int64_t)need;
}

gemrun_context_t *gemrun_init(const char *path)
{
    gemrun_context_t *ctx = NULL;
    gemrun_open(&ctx, path, NULL);
    return ctx;
}

void gemrun_destroy(gemrun_context_t *ctx)
{
    if (ctx) {
        gr_port_unpin(); /* where steps have left this thread bound */
        release(ctx);
    }
}

/* ---- figures ---- */

gemrun_status gemrun_get_stats(const gemrun_context_t *ctx, gemrun_stats *out)
{
    gemrun_context_t *own = (gemrun_context_t *)(uintptr_t)ctx;
    if (!out || out->size != sizeof *out)
        return gr_refuse(out ? GR_F_SIZE : GR_F_NONE, sizeof *out, out ? out->size : 0);
    gemrun_status st = gr_enter(own);
    if (st != GEMRUN_OK)
        return st;
    const gr_engine *e = &ctx->e;
    const gb_header *h = &e->v.header;
    *out = ctx->last;
    out->size = sizeof *out;
    out->kv_used = e->pos;
    out->kv_size = e->context;
    out->ram_weights = h->ram_weights;
    out->ram_tables = h->ram_tables;
    out->ram_arena = ctx->arena.bytes;
    out->ram_kv = ctx->kv.bytes;
    out->ram_engine = ctx->engine.bytes;
    out->ram_stacks = (uint64_t)(e->threads - 1) * GR_STACK_SIZE;
    out->ram_total = out->ram_weights + out->ram_tables + out->ram_arena + out->ram_kv +
                     out->ram_engine + out->ram_stacks;
    out->declared_total = h->ram_total;
    out->locked_bytes = ctx->locked;
    out->threads = e->threads;
    out->pinned = ctx->pinned + gr_team_pinned(e->team);
    return gr_leave(own, GEMRUN_OK);
}

const char *gemrun_last_error(void)
{
    size_t capacity;
    return gr_port_text(&capacity);
}
