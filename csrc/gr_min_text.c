/* gr_min_text.c: errors of a GR_MINIMAL build, by their number alone; gr_text.c has the words. */
#include "gr_text.h"

void gr_explain(const gr_error *e, const char *object, char *out, size_t capacity)
{
    static const char before[] = "gemrun: status -";
    uint32_t code = (uint32_t)-(int32_t)e->code, scale = 100;
    size_t n = 0;
    (void)object;
    while (before[n] != 0 && n + 4 < capacity) {
        out[n] = before[n];
        n++;
    }
    for (; scale > 0; scale /= 10)
        if (code >= scale || scale == 1)
            out[n++] = (char)('0' + code / scale % 10);
    out[n] = 0;
}
