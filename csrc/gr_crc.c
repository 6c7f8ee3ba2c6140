/* gr_crc.c: CRC-32 as zlib computes it, four bytes a step where the processor has no better way.
 *
 * The table of a byte is the exclusive-or of the tables of its bits (the checksum is linear), so
 * the four 1 KB tables are written here as eight constants each and built by the compiler. */
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

static const uint32_t table[4][256] = { /* table[k]: a byte followed by k zero bytes */
    TABLE(0x77073096u, 0xEE0E612Cu, 0x076DC419u, 0x0EDB8832u,
          0x1DB71064u, 0x3B6E20C8u, 0x76DC4190u, 0xEDB88320u),
    TABLE(0x191B3141u, 0x32366282u, 0x646CC504u, 0xC8D98A08u,
          0x4AC21251u, 0x958424A2u, 0xF0794F05u, 0x3B83984Bu),
    TABLE(0x01C26A37u, 0x0384D46Eu, 0x0709A8DCu, 0x0E1351B8u,
          0x1C26A370u, 0x384D46E0u, 0x709A8DC0u, 0xE1351B80u),
    TABLE(0xB8BC6765u, 0xAA09C88Bu, 0x8F629757u, 0xC5B428EFu,
          0x5019579Fu, 0xA032AF3Eu, 0x9B14583Du, 0xED59B63Bu)};

static uint32_t load(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

uint32_t gr_crc32(uint32_t crc, const void *data, size_t size)
{
    const uint8_t *p = data;
    uint32_t c = ~crc;
#ifndef GR_BASE_ONLY
    size_t done = size < MUCH ? 0 : gr_crc_some(&c, p, size, gr_port_cpu());
    p += done, size -= done;
#endif
    for (; size >= 4; size -= 4, p += 4) {
        c ^= load(p);
        c = table[3][c & 255] ^ table[2][c >> 8 & 255] ^ table[1][c >> 16 & 255] ^
            table[0][c >> 24];
    }
    for (; size > 0; size--, p++)
        c = table[0][(c ^ *p) & 255] ^ c >> 8;
    return ~c;
}
