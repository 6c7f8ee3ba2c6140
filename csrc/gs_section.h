/* gs_section.h: sections of an open artifact, for what is no part of running it. */
#ifndef GS_SECTION_H
#define GS_SECTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include "gr_ctx.h"
#include "gs_json.h"

/* The entry of a section whose records have at least `record` bytes. The engine has checked the
 * table; what lies in the mapped file may have changed since. False: there is none like that, or
 * it is not inside the image. */
bool gs_section(const gr_view *v, uint32_t type, uint64_t record, gb_section *out);
/* The resolved hardware description as JSON. *text, which its values lie in, is the caller's to
 * free. GEMRUN_OK: j->count is 0 where it could not be looked through: it has more than a megabyte
 * or than GS_VALUES values, or no memory is left. GEMRUN_E_MANIFEST: it is malformed, and the
 * sentence about `object` is the thread's error text. */
gemrun_status gs_description(const gr_view *v, const char *object, gs_json *j, char **text);
/* fopen to read a regular file; NULL for anything else. It never waits, as a pipe would. */
FILE *gs_open_regular(const char *path);

#endif
