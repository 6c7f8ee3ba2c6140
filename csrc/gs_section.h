/* gs_section.h: sections of an open artifact, for what is no part of running it. */
#ifndef GS_SECTION_H
#define GS_SECTION_H

#include <stdbool.h>
#include <stddef.h>

#include "gr_ctx.h"

/* The entry of a section whose records have at least `record` bytes. The engine has checked the
 * table; what lies in the mapped file may have changed since. False: there is none like that, or
 * it is not inside the image. */
bool gs_section(const gr_view *v, uint32_t type, uint64_t record, gb_section *out);
/* The resolved hardware description, NUL behind it, for the caller to free; NULL: it is not there,
 * has more than a megabyte, or no memory is left. */
char *gs_description(const gr_view *v, size_t *size);

#endif
