/* host.c: the same program on a host with a system, to compare with. */
#include <stdio.h>
#include <stdlib.h>

#include "board.h"

void board_print(const char *text)
{
    fputs(text, stdout);
}

_Noreturn void board_exit(int code)
{
    exit(code);
}
