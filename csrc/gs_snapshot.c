/* gs_snapshot.c: what rings hold at a place of the cache, kept in the caller's memory
 * (gemrun_session.h). Heads that keep every token lose nothing when the cache goes on, so that
 * only the ids and the rings are copied. */
#include <string.h>

#include "gemrun_session.h"
#include "gr_check.h"
#include "gr_ctx.h"
#include "gr_model.h"
#include "gs_handle.h"

typedef struct snapshot { /* at the start of the memory; then ids, then rings */
    uint8_t root_sha256[32];
    uint32_t kv_layout_id, context; /* positions in use */
    uint32_t tokens, high;
    uint64_t size;
} snapshot;

static gemrun_status refuse(const gemrun_context_t *ctx, gemrun_status code, const char *what)
{
    return gs_refuse(code, ctx->name[0] ? ctx->name : "model", what);
}

static uint64_t ids_size(const gr_engine *e)
{
    return gr_align(4 * (uint64_t)e->context, GB_LINE);
}

static uint8_t *ids_of(const snapshot *s)
{
    return (uint8_t *)(uintptr_t)s + gr_align(sizeof *s, GB_LINE);
}

/* Every ring of less than the whole context, one behind the other: from the cache to `to`, from
 * `from` to the cache, or neither. Returns their bytes. */
static uint64_t walk(const gr_engine *e, uint8_t *to, const uint8_t *from)
{
    const gr_view *v = &e->v;
    uint32_t all = (v->conf.context + GB_KV_BLOCK - 1) / GB_KV_BLOCK;
    uint64_t at = 0;
    for (uint32_t i = 0; i < v->layer_count; i++) {
        const gb_layer *l = &v->layers[i];
        for (uint32_t h = 0; h < l->kv_heads; h++) {
            const gb_kv_unit u = gr_kv_unit_of(v, l, h);
            uint64_t size = u.blocks * gr_kv_block_size(v, l, u.flags);
            uint8_t *ring = e->kv + l->kv_offset + u.first * gr_kv_step(v, l);
            if (u.blocks >= all)
                continue;
            if (to)
                memcpy(to + at, ring, (size_t)size);
            if (from)
                memcpy(ring, from + at, (size_t)size);
            at += size;
        }
    }
    return at;
}

static uint64_t size_of(const gr_engine *e)
{
    return gr_align(sizeof(snapshot), GB_LINE) + ids_size(e) + walk(e, NULL, NULL);
}

static snapshot header_of(const gr_engine *e)
{
    snapshot s = {.kv_layout_id = e->v.header.kv_layout_id, .context = e->context,
                  .tokens = e->pos, .high = e->high, .size = size_of(e)};
    memcpy(s.root_sha256, e->v.header.root_sha256, sizeof s.root_sha256);
    return s;
}

int64_t gemrun_snapshot_size(const gemrun_context_t *ctx)
{
    return ctx ? (int64_t)size_of(&ctx->e) : gr_refuse(GR_F_NONE, 0, 0);
}

gemrun_status gemrun_snapshot_take(gemrun_context_t *ctx, void *memory, size_t size)
{
    if (!memory)
        return gr_refuse(GR_F_NONE, 0, 0);
    gemrun_status st = gr_enter(ctx);
    if (st != GEMRUN_OK)
        return st;
    const gr_engine *e = &ctx->e;
    snapshot s = header_of(e);
    if (size < s.size) {
        st = refuse(ctx, GEMRUN_E_ARGUMENT, "the memory for a snapshot is too small; give as much "
                    "as gemrun_snapshot_size says");
    } else {
        memcpy(memory, &s, sizeof s);
        memcpy(ids_of(memory), e->buf[GB_BUF_IDS], s.tokens * sizeof(uint32_t));
        walk(e, ids_of(memory) + ids_size(e), NULL);
    }
    gr_leave(ctx, 0); /* the sentence is there already */
    return st;
}

/* Is it of this context, and are its tokens still the first ones of the cache? */
static gemrun_status check(const gemrun_context_t *ctx, const snapshot *s, const void *memory)
{
    const gr_engine *e = &ctx->e;
    snapshot ours = header_of(e);
    bool same = s->size == ours.size && s->context == ours.context &&
                s->kv_layout_id == ours.kv_layout_id &&
                memcmp(s->root_sha256, ours.root_sha256, sizeof ours.root_sha256) == 0;
    if (!same)
        return refuse(ctx, GEMRUN_E_ROOT, "not a snapshot of a context like this; take one here");
    return s->tokens <= e->pos && memcmp(ids_of(memory), e->buf[GB_BUF_IDS],
                                         s->tokens * sizeof(uint32_t)) == 0
               ? GEMRUN_OK
               : refuse(ctx, GEMRUN_E_STATE, "the cache does not begin with the snapshot's tokens "
                        "any more; compute them, and take another one");
}

int32_t gemrun_snapshot_back(gemrun_context_t *ctx, const void *memory, size_t size)
{
    snapshot s;
    if (!memory)
        return gr_refuse(GR_F_NONE, 0, 0);
    gemrun_status st = gr_enter(ctx);
    if (st != GEMRUN_OK)
        return st;
    gr_engine *e = &ctx->e;
    if (size < size_of(e)) {
        st = refuse(ctx, GEMRUN_E_SIZE, "too short for a snapshot; take one here");
    } else {
        memcpy(&s, memory, sizeof s);
        st = check(ctx, &s, memory);
    }
    if (st == GEMRUN_OK) {
        walk(e, NULL, ids_of(memory) + ids_size(e));
        e->pos = s.tokens;
        e->high = s.high;
        e->logits_valid = false;
    }
    int32_t tokens = (int32_t)e->pos;
    gr_leave(ctx, 0);
    return st == GEMRUN_OK ? tokens : (int32_t)st;
}
