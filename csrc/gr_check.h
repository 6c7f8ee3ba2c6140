/* gr_check.h: the only arithmetic that may touch a number from a file (rule A).
 *
 * Everything is 64 bits and saturates: GR_TOO_BIG means "does not fit", stays what it is through
 * further steps, and never equals a size or an offset inside a real file. So a chain of steps
 * needs one comparison at its end and cannot wrap on the way. */
#ifndef GR_CHECK_H
#define GR_CHECK_H

#include <stdbool.h>
#include <stdint.h>

#define GR_TOO_BIG UINT64_MAX

static inline uint64_t gr_add(uint64_t a, uint64_t b)
{
    return a > GR_TOO_BIG - b ? GR_TOO_BIG : a + b;
}

static inline uint64_t gr_mul(uint64_t a, uint64_t b)
{
    if (a == GR_TOO_BIG || b == GR_TOO_BIG)
        return GR_TOO_BIG;
    return b != 0 && a > GR_TOO_BIG / b ? GR_TOO_BIG : a * b;
}

/* n rounded up to a multiple of `align`, a power of two. */
static inline uint64_t gr_align(uint64_t n, uint64_t align)
{
    return n > GR_TOO_BIG - (align - 1) ? GR_TOO_BIG : (n + align - 1) & ~(align - 1);
}

static inline uint64_t gr_max(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* Whether [offset, offset + size) lies inside [0, limit). */
static inline bool gr_inside(uint64_t offset, uint64_t size, uint64_t limit)
{
    return offset <= limit && size <= limit - offset;
}

#endif
