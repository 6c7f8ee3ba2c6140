/* gemrun_bare.h: what a board without a system may give the engine (gr_port_bare.c).
 *
 * Everything has a default. One thread (or task) calls the engine; an interrupt may call
 * gemrun_cancel. A task of an RTOS that is switched away keeps its floating-point registers. */
#ifndef GEMRUN_BARE_H
#define GEMRUN_BARE_H
#include <stdint.h>

/* Nanoseconds of a clock that never jumps. By default there is none: figures of time are 0, and a
 * deadline never passes. Define it to have them. */
uint64_t gemrun_bare_now(void);

#endif
