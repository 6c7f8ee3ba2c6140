/* mem.c: the five functions that the engine asks of a C library, for a compiler without one. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

void *memcpy(void *restrict to, const void *restrict from, size_t size)
{
    uint8_t *t = to;
    const uint8_t *f = from;
    while (size-- > 0)
        *t++ = *f++;
    return to;
}

void *memmove(void *to, const void *from, size_t size)
{
    uint8_t *t = to;
    const uint8_t *f = from;
    if ((uintptr_t)t < (uintptr_t)f)
        return memcpy(to, from, size); /* forwards is right */
    while (size-- > 0)
        t[size] = f[size];
    return to;
}

void *memset(void *to, int value, size_t size)
{
    uint8_t *t = to;
    while (size-- > 0)
        *t++ = (uint8_t)value;
    return to;
}

int memcmp(const void *a, const void *b, size_t size)
{
    const uint8_t *x = a, *y = b;
    for (; size > 0; size--, x++, y++)
        if (*x != *y)
            return *x < *y ? -1 : 1;
    return 0;
}

size_t strlen(const char *text)
{
    size_t n = 0;
    while (text[n])
        n++;
    return n;
}
