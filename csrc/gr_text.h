/* gr_text.h: errors in words. */
#ifndef GR_TEXT_H
#define GR_TEXT_H

#include "gr_port.h"

/* "<object>: <what is wrong> (<figures>); <what to do>" into out. */
void gr_explain(const gr_error *e, const char *object, char *out, size_t capacity);

#endif
