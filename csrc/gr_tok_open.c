/* gr_tok_open.c: the tables of a TOKN section (TOKENS.md), laid out and measured.
 *
 * A GR_MINIMAL build reads no more of the section than this: which ids are tokens. */
#include "gr_tok.h"

#include <string.h>

const void *gr_take(gr_cursor *c, uint64_t count, uint64_t size)
{
    uint64_t end = c->at + count * size; /* all three below 2^36: no wrap */
    uint64_t next = (end + 7u) & ~(uint64_t)7u;
    const uint8_t *p = c->base + c->at;
    if (c->error != GR_TOK_OK || next > c->size) {
        c->error = c->error != GR_TOK_OK ? c->error : GR_TOK_E_SIZE;
        return NULL;
    }
    for (uint64_t i = end; i < next; i++)
        c->error = c->base[i] != 0 ? GR_TOK_E_PADDING : c->error;
    c->at = next;
    return p;
}

static int check_header(const struct gb_tokn *h)
{
    const uint32_t counts[] = {h->n_merge, h->n_char,   h->n_whole,     h->n_node, h->n_range,
                               h->n_cell,  h->n_decomp, h->n_decomp_cp, h->n_comp, h->n_ccc};
    uint32_t bad = h->flags & ~(uint32_t)GB_TOKF_ALL;
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
        bad |= counts[i] >> 24; /* no count of a real tokenizer comes near */
    for (size_t i = 0; i < sizeof h->reserved / sizeof h->reserved[0]; i++)
        bad |= h->reserved[i];
    return bad != 0 || (h->kind != GB_TOK_SPM && h->kind != GB_TOK_BYTE) || h->vocab == 0
                   || h->vocab > GB_TOK_MAX_VOCAB || h->n_stop > GB_TOK_MAX_STOP
                   || h->n_stage > GB_TOK_MAX_STAGE || h->n_class > GB_TOK_MAX_CLASS
                   || h->n_node == 0
               ? GR_TOK_E_HEADER
               : GR_TOK_OK;
}

static int lay_out(const uint8_t *sec, size_t size, gr_tok *t)
{
    gr_cursor c = {sec, 0, size, GR_TOK_OK};
    const struct gb_tokn *h = t->h = gr_take(&c, 1, sizeof *h);
    int error = c.error != GR_TOK_OK ? c.error : check_header(h);
    if (error != GR_TOK_OK)
        return error;
    t->merges = gr_take(&c, h->n_merge, 8);
    t->merge_first = gr_take(&c, (uint64_t)h->vocab + 1, 4);
    t->piece_block = gr_take(&c, (h->vocab + GB_TOK_BLOCK - 1) / GB_TOK_BLOCK, 4);
    t->piece_len = gr_take(&c, h->vocab, 1);
    t->flags = gr_take(&c, h->vocab, 1);
    t->pieces = gr_take(&c, h->piece_bytes, 1);
    t->byte_id = gr_take(&c, 256, 4);
    t->chars = gr_take(&c, h->n_char, 8);
    t->whole = gr_take(&c, h->n_whole, 4);
    t->nodes = gr_take(&c, h->n_node, sizeof(struct gb_node));
    t->edges = gr_take(&c, h->n_node - 1, 1);
    t->stop = gr_take(&c, h->n_stop, 4);
    t->ranges = gr_take(&c, h->n_range, 8);
    t->stages = gr_take(&c, h->n_stage, sizeof(struct gb_stage));
    t->cells = gr_take(&c, h->n_cell, 2);
    t->decomp = gr_take(&c, h->n_decomp, 8);
    t->decomp_cp = gr_take(&c, h->n_decomp_cp, 4);
    t->comp = gr_take(&c, h->n_comp, 8);
    t->ccc = gr_take(&c, h->n_ccc, 8);
    return c.error == GR_TOK_OK && c.at != size ? GR_TOK_E_SIZE : c.error;
}

static int check_pieces(const gr_tok *t)
{
    uint64_t at = 0;
    for (uint32_t id = 0; id < t->h->vocab; id++) {
        uint32_t flags = t->flags[id];
        if ((id % GB_TOK_BLOCK == 0 && t->piece_block[id / GB_TOK_BLOCK] != at)
            || (flags & ~(uint32_t)GB_TOKEN_ALL)
            || ((flags & GB_TOKEN_UNUSED) && t->piece_len[id] != 0))
            return GR_TOK_E_PIECE;
        at += t->piece_len[id];
    }
    return at == t->h->piece_bytes ? GR_TOK_OK : GR_TOK_E_PIECE;
}

int gr_tok_open(const uint8_t *sec, size_t size, uint32_t vocab_rows, gr_tok *out)
{
    memset(out, 0, sizeof *out);
    if (((uintptr_t)sec & 7u) != 0)
        return GR_TOK_E_SIZE;
    int error = lay_out(sec, size, out);
    if (error == GR_TOK_OK && out->h->vocab != vocab_rows)
        error = GR_TOK_E_VOCAB;
    if (error == GR_TOK_OK)
        error = check_pieces(out);
#ifndef GR_MINIMAL
    if (error == GR_TOK_OK)
        error = gr_tok_check(out);
#endif
    return error;
}

uint8_t gr_tok_flags(const gr_tok *t, uint32_t id)
{
    return id < t->h->vocab ? t->flags[id] : (uint8_t)GB_TOKEN_UNUSED;
}
