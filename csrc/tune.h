/* tune.h: how many threads a token is worth on this machine, measured once and kept in a file.
 *
 * The gemrun command measures (--tune) and reads the file at every start; the library never does.
 * No result depends on it, only the time that one takes. */
#ifndef TUNE_H
#define TUNE_H

#include <stdbool.h>
#include <stdint.h>

#include "gemrun.h"

typedef struct tuning {
    uint32_t threads;        /* that were there when it was measured; 0: nothing is known */
    uint32_t decode_threads; /* 1..threads: more do not make a token faster */
    uint32_t balance;        /* gemrun_config.balance: 1 or 2 */
} tuning;

/* What was measured on this machine, if its processor and threads are still the same. */
tuning tune_read(void);
/* Set what the caller left open, for an open with as many threads as were measured. */
void tune_apply(const tuning *t, gemrun_config *c);
/* Measure with the artifact at `path`, print a table, keep the result. Returns the exit code. */
int tune_run(const char *path, const gemrun_config *c);

#endif
