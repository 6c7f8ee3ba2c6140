/* gm_kern_base.c: the helper's kernels for any machine, four rows side by side. */
#define GM_V 4
#define GM_TARGET
#define GM_FN(name) gm4_##name
#define GM_KERNELS gm_kernels_base
#include "gm_kern.h"
