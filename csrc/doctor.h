/* doctor.h: gemrun --doctor: the checklist of hdf/BRINGUP.md, line by line, on this device.
 *
 * Part of the gemrun command, not of the engine. It reads files below /proc, /sys and /etc and the
 * artifact's own records, and changes nothing. The environment's GEMRUN_ROOT is put before these
 * paths: a tree of files stands for a board then, in tests. */
#ifndef DOCTOR_H
#define DOCTOR_H

#include <stdbool.h>
#include <stdint.h>

#include "gemrun.h"

/* Check and print, as text or as one JSON object. `path` is an artifact, or NULL. Returns the exit
 * code: 0, or 1 where something is bad. */
int doctor_run(const char *path, bool json, const gemrun_config *c);

/* ---- for doctor_*.c ---- */

enum { DOCTOR_PATH = 1024, DOCTOR_FILE = 4096, DOCTOR_WORD = 128, DOCTOR_NAMES = 16 };

/* What an artifact says of its board; 0 or an empty text: nothing. */
typedef struct doctor_wants {
    char model[DOCTOR_WORD], target[DOCTOR_WORD];
    char bsp[DOCTOR_WORD];  /* version of the board support package */
    char mode[DOCTOR_WORD]; /* its default power mode */
    char compatible[DOCTOR_NAMES][DOCTOR_WORD];
    uint32_t compatible_count, threads, cores;
    uint64_t total, lockable; /* bytes for the planned threads; of them what lock_memory keeps */
    double cpu_mhz, mem_mtps, passive_c, threshold_c;
} doctor_wants;

/* False: the artifact is no good one, and gemrun_last_error() says why. */
bool doctor_read_artifact(const char *path, doctor_wants *out);

/* Text of a file below the root, without what follows its last line's end; false: there is none.
 * A NUL between two words becomes a line's end. */
bool doctor_read(const char *root, const char *file, char *out, size_t capacity);
/* A whole number at the beginning of a file. */
bool doctor_number(const char *root, const char *file, uint64_t *out);
/* A temperature in thousandths of a degree, -100 to 150 C: what is beyond is no sensor's. */
bool doctor_celsius(const char *root, const char *file, double *out);
/* A list of cores such as "0-3,5" as a mask of the first 64, and how many it names; an empty one
 * names none. False: it is no such list. */
bool doctor_cores(const char *list, uint64_t *mask, uint32_t *count);

#endif
