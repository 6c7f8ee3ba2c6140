/* gemrun_board.h: is this the machine that an artifact was built for? gemrun_open does not ask: its
 * engine has no room for names of boards. The gemrun command, Python and handles do.
 * Link gemrun_control.
 *
 *     int32_t found = gemrun_check_board(ctx, "model.gembin", NULL);
 *     if (found != 0) puts(gemrun_last_error());    (1: a warning; below 0: a refusal)
 */
#ifndef GEMRUN_BOARD_H
#define GEMRUN_BOARD_H
#include "gemrun.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The board that the artifact was built for, by the `compatible` list of its hardware description,
 * against /proc/device-tree/compatible below `root` (NULL: $GEMRUN_ROOT, for tests, or "").
 * 0: it is this one, or the artifact is for any. 1: this machine is not known; it may be right, and
 * its memory, time and temperature are nobody's promise. GEMRUN_E_BOARD: this is another board that
 * is known. GEMRUN_E_MANIFEST: the description is malformed. Where it is not 0 gemrun_last_error()
 * has the sentence, about `object`. */
GEMRUN_API int32_t gemrun_check_board(const gemrun_context_t *ctx, const char *object,
                                      const char *root);
/* Version of the board support package that the artifact was built for (gemmake --bsp-version, or
 * the board's description). Returns its size, 0 where none is stated. */
GEMRUN_API size_t gemrun_bsp_version(const gemrun_context_t *ctx, char *out, size_t capacity);
/* Where the bytes that GEMRUN_E_MEMORY and GEMRUN_E_MAP speak of come from, for the end of their
 * sentence: what the machine and its control group leave; what the artifact at `path` (NULL: not
 * said) takes, and the limits of the process. Returns the size; `root` as above. */
GEMRUN_API size_t gemrun_explain_memory(gemrun_status status, const char *path, const char *root,
                                        char *out, size_t capacity);

#ifdef __cplusplus
}
#endif
#endif
