/* gs_section.c: see gs_section.h. */
#define _POSIX_C_SOURCE 200809L
#include "gs_section.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gr_check.h"
#include "gs_handle.h"

enum { TABLE = 512, MOST_JSON = 1 << 20 }; /* where every table begins (FORMAT.md, section 3) */

bool gs_section(const gr_view *v, uint32_t type, uint64_t record, gb_section *out)
{
    for (uint32_t i = 0; i < v->header.section_count && i < GB_MAX_SECTIONS; i++) {
        gb_section s;
        memcpy(&s, v->image + TABLE + i * sizeof s, sizeof s);
        if (s.type == type && s.record_size >= record &&
            gr_inside(s.offset, s.size, v->image_size)) {
            *out = s;
            return true;
        }
    }
    return false;
}

/* NULL: it is not there, too large, or no memory is left. */
static char *copy_description(const gr_view *v, size_t *size)
{
    gb_section s;
    bool good = gs_section(v, GB_SEC_HDFJ, 0, &s) && s.size <= MOST_JSON;
    char *text = good ? malloc((size_t)s.size + 1) : NULL;
    if (text) {
        memcpy(text, v->image + s.offset, (size_t)s.size);
        text[s.size] = 0;
        *size = (size_t)s.size;
    }
    return text;
}

/* What is wrong with the fields that are read here, or NULL. */
static const char *wrong_fields(const gs_json *j)
{
    const gs_value *names = gs_get(j, j->values, "compatible");
    const gs_value *bsp = gs_get(j, j->values, "bsp_version");
    if (j->values[0].kind != GS_OBJECT)
        return "no object";
    if (bsp && bsp->kind != GS_STRING)
        return "a bsp_version that is no text";
    if (names && names->kind != GS_ARRAY)
        return "a compatible that is no list";
    for (const gs_value *v = names ? gs_first(j, names) : NULL; v; v = gs_next(j, v))
        if (v->kind != GS_STRING)
            return "a compatible that is no text";
    return NULL;
}

gemrun_status gs_description(const gr_view *v, const char *object, gs_json *j, char **text)
{
    size_t size = 0;
    char what[160];
    j->count = 0;
    *text = copy_description(v, &size);
    if (!*text)
        return GEMRUN_OK;
    bool parsed = gs_parse(j, *text, size);
    if (!parsed && j->count == GS_VALUES) {
        j->count = 0;
        return GEMRUN_OK;
    }
    const char *wrong = parsed ? wrong_fields(j) : j->wrong;
    if (!wrong)
        return GEMRUN_OK;
    snprintf(what, sizeof what, "section HDFJ, the hardware description, is malformed (%s); "
             "rebuild the file", wrong);
    return gs_refuse(GEMRUN_E_MANIFEST, object, what);
}

FILE *gs_open_regular(const char *path)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    FILE *f = fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode) ? fdopen(fd, "rb") : NULL;
    if (!f && fd >= 0)
        close(fd);
    return f;
}
