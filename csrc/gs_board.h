/* gs_board.h: inside of gs_board.c, for gemrun --doctor. */
#ifndef GS_BOARD_H
#define GS_BOARD_H

/* The name below hdf/ of the board that a device tree's names stand for, the most specific first;
 * NULL: none is known. A NUL ends each name, an empty name the list. */
const char *gs_board_of(const char *tree);

#endif
