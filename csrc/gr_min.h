/* gr_min.h: what gr_min_model.c and gr_min_kern.c share. Of a GR_MINIMAL build alone. */
#ifndef GR_MIN_H
#define GR_MIN_H

#include "gr_internal.h"
#include "gr_kern.h" /* its float functions and structs; no table of kernels is used */

#if defined(__ARM_FEATURE_MVE) && !defined(GR_MIN_PLAIN)
#define GR_MIN_MVE 1 /* gr_min_mve.h */
#endif

/* y[t][0..width) = rows of panels first.. times the activations of tokens token.. */
void gr_min_product(const gr_mat *m, const gr_act *a, uint32_t first, uint32_t token,
                    uint32_t tokens, uint32_t width, float *y, size_t ldy);
/* The rest as in gr_kernels. False: not finite. */
bool gr_min_act(const float *x, gr_act *a, uint32_t t, uint32_t first_group, uint32_t n);
bool gr_min_norm(const float *x, const float *w, uint32_t n, float eps, float *y);
bool gr_min_quantise(const float *x, uint32_t n, uint32_t group, int8_t *codes, uint16_t *scale);
float gr_min_softmax(float *s, uint32_t skip, uint32_t n, float scale, float cap);
void gr_min_rope(float *x, const float *table, uint32_t pairs);
void gr_min_glu(uint32_t act, const float *g, const float *u, float *h);

#endif
