/* gs_channel.h: frames between an engine and the daemon that steers it (gemctl/PROTOCOL.md, "The
 * engine's channel"). A frame is four bytes of length, little-endian, and one JSON object.
 *
 * gemrun --serve answers requests of its daemon; a program that attaches makes its own requests,
 * and lets the daemon see, pace, disable and replace. */
#ifndef GS_CHANNEL_H
#define GS_CHANNEL_H

#include "gemrun_control.h"

/* Serve on a connected socket until it closes: open `path`, say "ready" or "error", then answer.
 * Returns 0, or the negative status of an open that failed, which was told as well. */
int32_t gs_serve(int fd, const char *path, const gemrun_config *config);

#endif
