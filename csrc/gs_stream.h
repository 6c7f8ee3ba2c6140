/* gs_stream.h: what of an artifact's weights stays in memory (FORMAT.md, COLD and 4.6). */
#ifndef GS_STREAM_H
#define GS_STREAM_H

#include "gr_ctx.h"

/* Are the records of COLD such as can be followed, and is mem_size of WHOT what they come to? An
 * artifact without them holds all. For who counts on that figure; `object` is for the message. */
gemrun_status gs_check_cold(const gr_view *v, const char *object);
/* Bytes that lock_memory keeps: all but what is streamed or read by rows, and the stacks. */
uint64_t gs_lockable(const gr_view *v);

#endif
