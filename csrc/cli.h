/* cli.h: what the files of the gemrun command share. */
#ifndef CLI_H
#define CLI_H

#include <stdint.h>
#include <stdio.h>

#include "gemrun.h"

/* gemrun_open as every use of the command wants it: weights that pass through are held as declared,
 * unless memory is ignored. */
gemrun_status cli_open(gemrun_context_t **out, const char *path, const gemrun_config *c);
/* fprintf of a text that may hold what others wrote (an artifact, the system's files, a path): what
 * could steer a terminal, and what is no UTF-8, is shown as \xNN. Its own last line end stays. */
__attribute__((format(printf, 2, 3))) void cli_print(FILE *to, const char *form, ...);
/* The end of a counted noun. */
const char *cli_s(uint64_t count);

#endif
