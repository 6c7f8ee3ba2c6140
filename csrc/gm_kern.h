/* gm_kern.h: all kernels of one instruction set; the including file defines GM_V, GM_TARGET, GM_FN
 * and GM_KERNELS. */
#include <math.h>
#include <string.h>

#include "gm_internal.h"
#include "gm_vec.h"

#include "gm_kern_search.h"
#include "gm_kern_q8.h"
#include "gm_kern_matrix.h"
#include "gm_kern_gptq.h"

const gm_kernels GM_KERNELS = {
    .lanes = GM_V,
    .search_scratch = GM_FN(search_scratch),
    .search = GM_FN(search),
    .gptq_scratch = GM_FN(gptq_scratch),
    .gptq = GM_FN(gptq),
    .q8_scratch = GM_FN(q8_scratch),
    .q8 = GM_FN(q8),
    .hessian = GM_FN(hessian),
    .factor_tail = GM_FN(factor_tail),
    .factor_head = GM_FN(factor_head),
};
