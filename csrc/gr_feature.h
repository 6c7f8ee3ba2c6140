/* gr_feature.h: what this build reads of an artifact. A minimal one knows no float weights and no
 * float KV cache, and makes short steps (gr_min_model.c). */
#ifndef GR_FEATURE_H
#define GR_FEATURE_H

#include <stdbool.h>
#include <stdint.h>

#include "gembin.h"

#ifdef GR_MINIMAL
enum { GR_REQ_KNOWN = GB_REQ_KNOWN & ~(GB_REQ_FLOAT | GB_REQ_KV_FLOAT | GB_REQ_KV_MASK |
                                        GB_REQ_KV_4BIT),
       GR_KV_FIRST = GB_KV_INT8,
       GR_STEP_MAX = GB_KV_BLOCK }; /* tokens of a prefill step */
#else
enum { GR_REQ_KNOWN = GB_REQ_KNOWN, GR_KV_FIRST = GB_KV_F32, GR_STEP_MAX = GB_MAX_CHUNK };
#endif

static inline bool gr_is_float(uint32_t format)
{
#ifdef GR_MINIMAL
    return (void)format, false;
#else
    return format == GB_FMT_F32 || format == GB_FMT_F16;
#endif
}

#endif
