/* gs_section.c: see gs_section.h. */
#include "gs_section.h"

#include <stdlib.h>
#include <string.h>

#include "gr_check.h"

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

char *gs_description(const gr_view *v, size_t *size)
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
