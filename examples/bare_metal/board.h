/* board.h: what main.c needs of a board: a place for text, and an end. */
#ifndef BOARD_H
#define BOARD_H

void board_print(const char *text);
_Noreturn void board_exit(int code);
int main(void);

#endif
