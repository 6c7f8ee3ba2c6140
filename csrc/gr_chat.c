/* Conversations: the TMPL section's slots around the messages (TOKENS.md).
 *
 * A slot holds control tokens and literal text. Literal text is encoded together with the messages
 * it touches, as the reference does with the rendered conversation, so that the borders come out
 * the same; control tokens come only from the template, never from a message.
 *
 * No template text is interpreted here: gemmake has rendered the checkpoint's template and kept
 * only what stands between the messages. */
#include "gr_tok.h"

#include <string.h>

int gr_chat_open(const uint8_t *sec, size_t size, uint32_t vocab_rows, gr_chat *out)
{
    gr_cursor c = {sec, 0, size, GR_TOK_OK};
    const struct gb_tmpl *h;
    uint64_t text = 0;
    memset(out, 0, sizeof *out);
    if (((uintptr_t)sec & 7u) != 0 || size < sizeof *h)
        return GR_TOK_E_SIZE;
    h = out->h = gr_take(&c, 1, sizeof *h);
    if ((h->flags & ~(uint32_t)GB_TMPLF_ALL) || h->n_item > GB_TMPL_MAX_ITEM
        || h->text_bytes > GB_TMPL_MAX_TEXT || h->reserved[0] || h->reserved[1] || h->reserved[2])
        return GR_TOK_E_HEADER;
    out->items = gr_take(&c, h->n_item, sizeof(struct gb_item));
    out->text = gr_take(&c, h->text_bytes, 1);
    if (c.error != GR_TOK_OK || c.at != size)
        return c.error != GR_TOK_OK ? c.error : GR_TOK_E_SIZE;
    for (uint32_t s = 0; s < GB_SLOT_COUNT; s++)
        if (h->slot[s] > h->slot[s + 1])
            return GR_TOK_E_TMPL;
    for (uint32_t i = 0; i < h->n_item; i++) {
        const struct gb_item *item = &out->items[i];
        if (item->token != GB_TOK_NONE && (item->token >= vocab_rows || item->size != 0))
            return GR_TOK_E_TMPL;
        text += item->size;
    }
    return h->slot[0] == 0 && h->slot[GB_SLOT_COUNT] == h->n_item && text == h->text_bytes
                   && h->n_item - h->slot[GB_SLOT_THINK_CUT] <= 1
               ? GR_TOK_OK
               : GR_TOK_E_TMPL;
}

static bool has_token(const gr_chat *c, uint32_t slot)
{
    for (uint32_t i = c->h->slot[slot]; i < c->h->slot[slot + 1]; i++)
        if (c->items[i].token != GB_TOK_NONE)
            return true;
    return false;
}

/* Bound of the text that is encoded at once: between two control tokens no literal comes twice. */
static size_t longest_run(const gr_chat *c, size_t n, size_t text_len)
{
    bool cuts = has_token(c, GB_SLOT_USER_ASST) && has_token(c, GB_SLOT_ASST_USER);
    return text_len + (cuts ? 1 : n + 1) * c->h->text_bytes;
}

typedef struct {
    const gr_chat *chat;
    const gr_tok *tok;
    uint8_t *run; /* text since the last control token */
    size_t run_len, run_cap;
    void *scratch;
    size_t scratch_size;
    uint32_t *out;
    size_t cap, count;
} talk;

static int64_t add_text(talk *k, const uint8_t *p, size_t len)
{
    if (k->run_cap - k->run_len < len)
        return GR_TOK_E_SCRATCH;
    if (len > 0)
        memcpy(k->run + k->run_len, p, len);
    k->run_len += len;
    return 0;
}

static int64_t end_run(talk *k)
{
    size_t full = k->count < k->cap ? k->count : k->cap;
    int64_t made = gr_tok_encode(k->tok, k->run, k->run_len, false, k->out + full, k->cap - full,
                                 k->scratch, k->scratch_size);
    k->run_len = 0;
    k->count += made > 0 ? (size_t)made : 0;
    return made < 0 ? made : 0;
}

static int64_t add_slot(talk *k, uint32_t slot)
{
    const struct gb_tmpl *h = k->chat->h;
    const struct gb_item *items = k->chat->items;
    size_t at = 0;
    int64_t error = 0;
    for (uint32_t i = 0; i < h->slot[slot]; i++)
        at += items[i].size;
    for (uint32_t i = h->slot[slot]; i < h->slot[slot + 1] && error == 0; i++) {
        if (items[i].token == GB_TOK_NONE) {
            error = add_text(k, k->chat->text + at, items[i].size);
            at += items[i].size;
            continue;
        }
        error = end_run(k);
        if (k->count < k->cap)
            k->out[k->count] = items[i].token;
        k->count++;
    }
    return error;
}

/* Blank in the sense of the templates' `trim`. */
static bool is_blank(uint32_t cp)
{
    return (cp >= 0x09 && cp <= 0x0D) || (cp >= 0x1C && cp <= 0x20) || cp == 0x85 || cp == 0xA0
           || cp == 0x1680 || (cp >= 0x2000 && cp <= 0x200A) || cp == 0x2028 || cp == 0x2029
           || cp == 0x202F || cp == 0x205F || cp == 0x3000;
}

static void trim(const uint8_t **p, size_t *len)
{
    size_t keep = 0, used;
    bool started = false;
    const uint8_t *text = *p;
    for (size_t at = 0; at < *len; at += used) {
        uint32_t cp;
        bool cut;
        used = gr_utf8_next(text + at, *len - at, &cp, &cut);
        if (!is_blank(cp)) {
            *p = started ? *p : text + at;
            started = true;
            keep = at + used;
        }
    }
    *len = started ? keep - (size_t)(*p - text) : 0;
}

/* Leaves out an assistant's thinking: all up to the last mark, and the line ends after it. */
static void cut_thinking(const gr_chat *c, const uint8_t **p, size_t *len)
{
    const struct gb_item *mark = &c->items[c->h->slot[GB_SLOT_THINK_CUT]];
    size_t n = c->h->slot[GB_SLOT_THINK_CUT] < c->h->n_item ? mark->size : 0;
    for (size_t at = *len; n > 0 && at >= n; at--) {
        if (memcmp(*p + at - n, c->text + c->h->text_bytes - n, n) == 0) {
            *p += at;
            *len -= at;
            while (*len > 0 && **p == '\n') {
                ++*p;
                --*len;
            }
            return;
        }
    }
}

static int64_t add_message(talk *k, const gr_message *m)
{
    static const uint32_t trims[3] = {GB_TMPLF_TRIM_SYSTEM, GB_TMPLF_TRIM_USER,
                                      GB_TMPLF_TRIM_ASST};
    const uint8_t *p = (const uint8_t *)m->text;
    size_t len = m->len;
    if (m->role == GR_ROLE_ASSISTANT)
        cut_thinking(k->chat, &p, &len);
    if (k->chat->h->flags & trims[m->role])
        trim(&p, &len);
    return add_text(k, p, len);
}

/* Order of the roles: [system] user (assistant user)*, or ending with an assistant. */
static int64_t check_roles(const gr_chat *c, const gr_message *m, size_t n, bool prompt)
{
    size_t first = n > 0 && m[0].role == GR_ROLE_SYSTEM ? 1 : 0;
    if (first == 1 && !(c->h->flags & GB_TMPLF_SYSTEM))
        return GR_TOK_E_SYSTEM;
    for (size_t i = first; i < n; i++)
        if (m[i].role != ((i - first) % 2 == 0 ? GR_ROLE_USER : GR_ROLE_ASSISTANT))
            return GR_TOK_E_ROLES;
    if (n == first || (m[n - 1].role == GR_ROLE_ASSISTANT
                       && (prompt || !(c->h->flags & GB_TMPLF_ASST_LAST))))
        return GR_TOK_E_ROLES;
    return 0;
}

int64_t gr_chat_encode(const gr_chat *c, const gr_tok *t, const gr_message *messages, size_t n,
                       bool add_generation_prompt, uint32_t *out_ids, size_t cap, void *scratch,
                       size_t scratch_size)
{
    talk k = {c, t, scratch, 0, 0, NULL, 0, out_ids, cap, 0};
    size_t text = 0, run;
    int64_t error = check_roles(c, messages, n, add_generation_prompt);
    uint32_t slot = GB_SLOT_FIRST;
    for (size_t i = 0; i < n; i++)
        text += messages[i].len;
    run = (longest_run(c, n, text) & ~(size_t)7) + 8;
    if (error != 0 || scratch_size < run)
        return error != 0 ? error : GR_TOK_E_SCRATCH;
    k.run_cap = run;
    k.scratch = k.run + run;
    k.scratch_size = scratch_size - run;
    for (size_t i = 0; i < n && error == 0; i++) {
        if (messages[i].role == GR_ROLE_SYSTEM)
            slot = GB_SLOT_SYSTEM;
        else if (i > 0)
            slot = messages[i - 1].role == GR_ROLE_SYSTEM ? GB_SLOT_SYS_USER
                   : messages[i].role == GR_ROLE_USER     ? GB_SLOT_ASST_USER
                                                          : GB_SLOT_USER_ASST;
        error = add_slot(&k, slot);
        error = error != 0 ? error : add_message(&k, &messages[i]);
    }
    if (error == 0)
        error = add_slot(&k, messages[n - 1].role == GR_ROLE_ASSISTANT ? GB_SLOT_ASST_END
                             : add_generation_prompt                   ? GB_SLOT_GENERATE
                                                                       : GB_SLOT_USER_END);
    error = error != 0 ? error : end_run(&k);
    return error != 0 ? error : (int64_t)k.count;
}
