/* Runs damaged TOKN and TMPL sections through the tokenizer; built with sanitizers by
 * test_tok_sections.py. Arguments: rows, and a file of cases: u32 kind (0 TOKN, 1 TMPL), u32 size,
 * bytes; the first TOKN must be good, it serves the TMPL cases. Prints how many were refused. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gr_tok.h"

static const char *const TEXTS[] = {
    "Hello world, it's 12345 <|im_start|>user\n\n  na\xc3\xafve \xff\xe2\x9c caf\x65\xcc\x81 ",
    "\xf0\x9f\x91\xa8\xe2\x80\x8d\xf0\x9f\x91\xa9 \xea\xb0\x80\xe1\x84\x80\xe1\x85\xa1 aaaaaaaaaaaa",
    "<think>x</think><|end|><start_of_turn>\n\n\n",
};

static void use_tok(const gr_tok *t, uint32_t rows)
{
    uint8_t piece[256], text[3 * 256 + 8];
    gr_utf8_stream stream = {{0}, 0};
    for (size_t i = 0; i < sizeof TEXTS / sizeof TEXTS[0]; i++) {
        size_t len = strlen(TEXTS[i]), need = gr_tok_scratch_size(len), cap = 3 * len + 1;
        uint32_t *ids = malloc(cap * sizeof *ids);
        void *scratch = malloc(need);
        int64_t n = gr_tok_encode(t, (const uint8_t *)TEXTS[i], len, i == 0, ids, cap, scratch, need);
        for (int64_t k = 0; k < n; k++) {
            size_t size = gr_tok_piece_all(t, ids[k], piece);
            if (ids[k] >= rows) {
                abort();
            }
            gr_utf8_push(&stream, piece, size, text);
        }
        free(ids);
        free(scratch);
    }
    gr_utf8_flush(&stream, text);
    for (uint32_t id = 0; id < rows + 2; id++) {
        gr_tok_piece(t, id, piece);
        gr_tok_is_stop(t, id);
    }
}

static void use_chat(const gr_chat *c, const gr_tok *t)
{
    const gr_message talk[] = {{GR_ROLE_SYSTEM, " s ", 3}, {GR_ROLE_USER, "\xe3\x80\x80u", 4},
                               {GR_ROLE_ASSISTANT, "<think>\n</think>\n\na", 19},
                               {GR_ROLE_USER, "", 0}};
    for (size_t first = 0; first < 2; first++) {
        for (size_t n = 1; first + n <= 4; n++) {
            size_t run = 26 + (n + 1) * c->h->text_bytes, cap = 4096; /* text encoded at once */
            size_t need = gr_tok_scratch_size(run) + (run & ~(size_t)7) + 8;
            uint32_t *ids = malloc(cap * sizeof *ids);
            void *scratch = malloc(need);
            gr_chat_encode(c, t, talk + first, n, n % 2 == 1, ids, cap, scratch, need);
            free(ids);
            free(scratch);
        }
    }
}

int main(int argc, char **argv)
{
    FILE *f = argc == 3 ? fopen(argv[2], "rb") : NULL;
    uint32_t rows, head[2];
    uint64_t *base = NULL;
    unsigned refused = 0, accepted = 0;
    gr_tok good;
    if (f == NULL) {
        return 2;
    }
    rows = (uint32_t)strtoul(argv[1], NULL, 10);
    while (fread(head, sizeof head, 1, f) == 1) {
        uint64_t *data = malloc(head[1] ? head[1] : 1); /* exact, so that an overrun is seen */
        gr_tok tok;
        gr_chat chat;
        if (head[1] && fread(data, head[1], 1, f) != 1) {
            return 2;
        }
        if (head[0] == 0 && gr_tok_open((uint8_t *)data, head[1], rows, &tok) == GR_TOK_OK) {
            use_tok(&tok, rows);
            accepted++;
            if (base == NULL) {
                base = data;
                good = tok;
                continue;
            }
        } else if (head[0] == 1 && base != NULL
                   && gr_chat_open((uint8_t *)data, head[1], rows, &chat) == GR_TOK_OK) {
            use_chat(&chat, &good);
            accepted++;
        } else {
            refused++;
        }
        free(data);
    }
    free(base);
    fclose(f);
    printf("%u %u\n", refused, accepted);
    return 0;
}
