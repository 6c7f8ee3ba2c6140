/* steady.c: work that always takes the same instructions and touches no memory, as a library for
 * neighbours.py: how its time varies is the machine's doing, not the program's. */
#include <stdint.h>

uint64_t additions(uint64_t count);

uint64_t additions(uint64_t count) /* each waits for the one before */
{
    uint64_t sum = 0;
    for (uint64_t i = 0; i < count; i++) {
        sum += i;
        __asm__ volatile("" : "+r"(sum)); /* no compiler adds them up beforehand */
    }
    return sum;
}
