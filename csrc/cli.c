/* cli.c: see cli.h. */
#include "cli.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>

#include "gemrun_control.h"

gemrun_status cli_open(gemrun_context_t **out, const char *path, const gemrun_config *c)
{
    gemrun_status st = gemrun_open(out, path, c);
    st = st == GEMRUN_OK && !c->ignore_memory ? gemrun_stream(*out) : st;
    if (st != GEMRUN_OK) {
        gemrun_destroy(*out);
        *out = NULL;
    }
    return st;
}

/* Bytes of the character at p that a terminal may have; 0: not this byte. */
static size_t harmless(const unsigned char *p)
{
    size_t more = *p < 0x80 ? 0 : *p < 0xc2 ? 4 : *p < 0xe0 ? 1 : *p < 0xf0 ? 2 : *p < 0xf5 ? 3 : 4;
    if (more == 4 || *p < ' ' || *p == 127) {
        return 0;
    }
    for (size_t i = 1; i <= more; i++) {
        if ((p[i] & 0xc0) != 0x80) {
            return 0;
        }
    }
    uint32_t pair = more > 0 ? (uint32_t)p[0] << 8 | p[1] : 0;
    uint32_t last = more == 2 ? p[2] : 0;
    bool control = pair >= 0xc280 && pair < 0xc2a0; /* U+0080 to U+009F */
    bool turns = (pair == 0xe280 && last >= 0xa8 && last <= 0xae) || /* U+2028 to U+202E .. */
                 (pair == 0xe281 && last >= 0xa6 && last <= 0xa9);   /* .. U+2066 to U+2069 */
    return control || turns ? 0 : more + 1;
}

static void put_clean(FILE *to, const unsigned char *p)
{
    while (*p) {
        size_t n = harmless(p);
        if (n > 0 || (*p == '\n' && !p[1])) {
            n = n > 0 ? n : 1;
            fwrite(p, 1, n, to);
            p += n;
        } else {
            fprintf(to, "\\x%02x", *p++);
        }
    }
}

void cli_print(FILE *to, const char *form, ...)
{
    char near[1024];
    va_list list, again;
    va_start(list, form);
    va_copy(again, list);
    int size = vsnprintf(near, sizeof near, form, list);
    size_t room = size < 0 ? 0 : (size_t)size + 1;
    char *far = room > sizeof near ? malloc(room) : NULL;
    if (far) {
        vsnprintf(far, room, form, again);
    }
    va_end(again);
    va_end(list);
    put_clean(to, (const unsigned char *)(far ? far : near));
    free(far);
}

const char *cli_s(uint64_t count)
{
    return count == 1 ? "" : "s";
}
