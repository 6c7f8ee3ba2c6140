/* gr_crc.c: CRC-32 as zlib computes it, a byte a step where the processor has no better way.
 *
 * The table of a byte is the exclusive-or of the tables of its bits (the checksum is linear), so
 * 1 KB of table is written here as eight constants and built by the compiler. */
#include "gr_internal.h"
#include "gr_port.h"

enum { MUCH = 4096 }; /* bytes that are worth asking the processor */

#define BYTE(i, a, b, c, d, e, f, g, h)                                                     \
    (((i) & 1 ? a : 0u) ^ ((i) & 2 ? b : 0u) ^ ((i) & 4 ? c : 0u) ^ ((i) & 8 ? d : 0u) ^    \
     ((i) & 16 ? e : 0u) ^ ((i) & 32 ? f : 0u) ^ ((i) & 64 ? g : 0u) ^ ((i) & 128 ? h : 0u))
#define ROW4(i, ...) BYTE(i, __VA_ARGS__), BYTE((i) + 1, __VA_ARGS__),                      \
                     BYTE((i) + 2, __VA_ARGS__), BYTE((i) + 3, __VA_ARGS__)
#define ROW16(i, ...) ROW4(i, __VA_ARGS__), ROW4((i) + 4, __VA_ARGS__),                     \
                      ROW4((i) + 8, __VA_ARGS__), ROW4((i) + 12, __VA_ARGS__)
#define ROW64(i, ...) ROW16(i, __VA_ARGS__), ROW16((i) + 16, __VA_ARGS__),                  \
                      ROW16((i) + 32, __VA_ARGS__), ROW16((i) + 48, __VA_ARGS__)
#define TABLE(...) {ROW64(0, __VA_ARGS__), ROW64(64, __VA_ARGS__),                          \
                    ROW64(128, __VA_ARGS__), ROW64(192, __VA_ARGS__)}

static const uint32_t table[256] =
    TABLE(0x77073096u, 0xEE0E612Cu, 0x076DC419u, 0x0EDB8832u,
          0x1DB71064u, 0x3B6E20C8u, 0x76DC4190u, 0xEDB88320u);

uint32_t gr_crc32(uint32_t crc, const void *data, size_t size)
{
    const uint8_t *p = data;
    uint32_t c = ~crc;
#ifndef GR_BASE_ONLY
    size_t done = size < MUCH ? 0 : gr_crc_some(&c, p, size, gr_port_cpu());
    p += done, size -= done;
#endif
    for (; size > 0; size--, p++)
        c = table[(c ^ *p) & 255] ^ c >> 8;
    return ~c;
}
