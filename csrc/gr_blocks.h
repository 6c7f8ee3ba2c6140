/* gr_blocks.h: a panel of quantised weights as its blocks, for kernels: up to 8 groups of one
 * format each, in the order of the bytes. This file knows the layout (FORMAT.md), so that kernels
 * only compute. */
#ifndef GR_BLOCKS_H
#define GR_BLOCKS_H

#include "gr_kern.h"

typedef struct gr_block {
    const uint8_t *high;    /* codes of its first group */
    const uint8_t *low;     /* the second plane of that group; NULL: there is none */
    const uint8_t *meta;    /* 16 scales a group, then what the format has of zero points */
    uint32_t step;          /* bytes from one group's codes to the next's, in both planes */
    uint32_t share;         /* bytes of a group in the block */
    uint32_t format, group, count; /* GB_FMT_*; first group; 1..8 groups */
} gr_block;

/* Where a walk over a panel stands; gr_walk_panel begins one. */
typedef struct gr_walk {
    const gr_mat *m;
    const uint8_t *high, *low;
    const uint8_t *end, *end_low; /* of the panel */
    uint32_t segment, group, turns;
} gr_walk;

/* `turns` panels are walked side by side, and then as many behind them. */
static inline gr_walk gr_walk_panel(const gr_mat *m, uint32_t panel, uint32_t turns)
{
    gr_walk w = {.m = m, .high = m->data + m->panel * panel + GB_LINE, .turns = turns};
    w.end = w.high + m->panel - GB_LINE;
    if (m->low) {
        w.low = m->low + (size_t)256 * m->groups * panel;
        w.end_low = w.low + (size_t)256 * m->groups;
    }
    return w;
}

static inline bool gr_walk_next(gr_walk *w, gr_block *out)
{
    if (w->segment == w->m->seg_count)
        return false;
    const gb_segment *s = &w->m->seg[w->segment];
    uint32_t left = s->first_group + s->group_count - w->group;
    uint32_t n = left < GB_SUPERBLOCK ? left : GB_SUPERBLOCK;
    bool body = s->format == GB_FMT_Q8; /* both planes of a group follow each other */
    uint32_t step = body ? 512 : 256, meta = body ? 16 : s->format == GB_FMT_Q8_ROWS ? 0 : 32;
    *out = (gr_block){.high = w->high, .low = body ? w->high + 256 : w->low,
                      .meta = w->high + (size_t)step * n, .step = step, .share = step + meta,
                      .format = s->format, .group = w->group, .count = n};
    w->high += (n * (step + meta) + GB_LINE - 1) / GB_LINE * GB_LINE;
    if (w->low)
        w->low += (size_t)step * n;
    w->group += n;
    w->segment += left == n;
    return true;
}

static inline void gr_prefetch(const uint8_t *p, const uint8_t *end, size_t gap, uint32_t bytes)
{
    p += p < end ? 0 : gap;
    for (end = p + bytes; p < end; p += GB_LINE)
        __builtin_prefetch(p, 0, 2);
}

/* A stream at the speed of memory: what is used two superblocks later, as much as group g of a
 * block takes, scales included, into the L2. Further in, or all at once, is slower. */
static inline void gr_prefetch_group(const gr_walk *w, const gr_block *b, uint32_t g)
{
    enum { AHEAD = 2 * 288 * GB_SUPERBLOCK };
    size_t at = (size_t)b->share * g + AHEAD / w->turns, gap = w->turns - 1;
    gr_prefetch(b->high + at, w->end, gap * w->m->panel, b->share);
    if (b->format == GB_FMT_Q8_ROWS && b->low)
        gr_prefetch(b->low + at, w->end_low, gap * 256 * w->m->groups, b->share);
}

#endif
