/* gemrun_one.c: the whole engine as one file for a compiler: `cc -O2 -ffp-contract=off -c
 * gemrun_one.c`. It has the plain kernels only; the build with CMake adds those for AVX2. With
 * -DGR_PORT_BARE for a board without a system; another port replaces the last lines. With
 * -DGR_MINIMAL: token ids in, token ids out. `gemmake engine --single-file` writes it out. */
#ifndef GR_BASE_ONLY
#define GR_BASE_ONLY
#endif
#define GR_KERN_SUFFIX base
#define _GNU_SOURCE /* of the port, before any header */

#include "gr_open.c"
#include "gr_size.c"
#include "gr_tok_open.c"
#include "gr_math.c"
#include "gr_sample.c"
#include "gr_run.c"
#include "gr_api.c"
#ifdef GR_MINIMAL
#include "gr_min_crc.c"
#include "gr_min_text.c"
#include "gr_min_kern.c"
#include "gr_min_model.c"
#else
#include "gr_crc.c"
#include "gr_text.c"
#include "gr_kern_ref.c"
#include "gr_kv.c"
#include "gr_kv_fill.c"
#include "gr_model.c"
#include "gr_head.c"
#include "gr_pick.c"
#include "gr_facts.c"
#include "gr_planes.c"
#include "gr_spec.c"
#include "gr_pin.c"
#include "gr_cores.c"
#include "gr_adjust.c"
#include "gr_tok_check.c"
#undef NONE
#undef LAST_CP
#undef BLOCK
#include "gr_tok.c"
#include "gr_chat.c"
#include "gr_generate.c"
#include "gr_hooks.c"
#endif
#undef _GNU_SOURCE
#ifdef GR_PORT_BARE
#include "gr_port_bare.c"
#elif defined(__wasi__)
#include "gr_port_wasi.c"
#else
#include "gr_port_posix.c"
#endif
