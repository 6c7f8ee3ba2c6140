/* gs_board.c: the machine against the board that an artifact was built for (gemrun_board.h). */
#define _POSIX_C_SOURCE 200809L
#include "gemrun_board.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "gr_check.h"
#include "gr_ctx.h"
#include "gs_board.h"
#include "gs_boards.h"
#include "gs_handle.h"
#include "gs_json.h"
#include "gs_section.h"

enum { PATH = 512, TREE = 4096, LINE = 160 };

/* ---- the machine ---- */

static const char *root_of(const char *given)
{
    const char *own = given ? given : getenv("GEMRUN_ROOT");
    return own ? own : "";
}

/* Names of the device tree, NUL behind each, an empty one behind the last; empty: there is none. */
static size_t read_tree(const char *root, char *out)
{
    char path[PATH];
    int n = snprintf(path, sizeof path, "%s/proc/device-tree/compatible", root);
    FILE *f = n > 0 && (size_t)n < sizeof path ? gs_open_regular(path) : NULL;
    size_t size = f ? fread(out, 1, TREE - 2, f) : 0;
    if (f)
        fclose(f);
    out[size] = out[size + 1] = 0;
    for (size_t i = 0; i < size; i++) /* they go into messages; no board is known by such a name */
        out[i] = out[i] == 0 || (out[i] >= ' ' && out[i] <= '~') ? out[i] : '?';
    return size;
}

static const char *next_name(const char *name)
{
    return name + strlen(name) + 1;
}

enum { BOARDS = sizeof gs_boards / sizeof gs_boards[0] };

/* The place in gs_boards of one of the names, the most specific first; BOARDS: none is known. */
static size_t known_board(const char *tree)
{
    for (const char *name = tree; *name; name = next_name(name))
        for (size_t i = 0; i < BOARDS; i++)
            if (strcmp(name, gs_boards[i].compatible) == 0)
                return i;
    return BOARDS;
}

const char *gs_board_of(const char *tree)
{
    size_t known = known_board(tree);
    return known < BOARDS ? gs_boards[known].id : NULL;
}

/* ---- the artifact ---- */

static bool in_tree(const char *tree, const gs_value *v)
{
    for (const char *name = tree; *name; name = next_name(name))
        if (v->kind == GS_STRING && strcmp(name, v->text) == 0)
            return true;
    return false;
}

typedef enum fit { FITS, UNKNOWN, FOREIGN } fit;

/* Both are processors of one maker's kind: a 32-bit system may run on a 64-bit board. */
static bool one_kind(uint32_t a, uint32_t b)
{
    bool arm = (a == GB_ISA_AARCH64 || a == GB_ISA_ARMV7) &&
               (b == GB_ISA_AARCH64 || b == GB_ISA_ARMV7);
    return a == b || a == GB_ISA_ANY || arm;
}

/* `here`: the name of this machine, for a message. A board that no device tree names (an x86 one, a
 * draft of one's own) cannot be told from others, but by its processor. */
static fit compare(const gs_json *j, const char *tree, uint32_t isa, const char **here)
{
    const gs_value *names = gs_get(j, j->values, "compatible");
    const gs_value *first = names && names->kind == GS_ARRAY ? gs_first(j, names) : NULL;
    for (const gs_value *v = first; v; v = gs_next(j, v))
        if (in_tree(tree, v))
            return FITS;
    size_t known = known_board(tree);
    *here = known < BOARDS ? gs_boards[known].id : *here;
    if (!first)
        return known < BOARDS && !one_kind(isa, gs_boards[known].isa) ? FOREIGN : FITS;
    return known < BOARDS ? FOREIGN : UNKNOWN;
}

static bool is_generic(const gemrun_context_t *ctx)
{
    return strncmp(ctx->target, "generic-", 8) == 0;
}

static int32_t judge(const gemrun_context_t *ctx, const char *object, fit fits, const char *here)
{
    char text[2 * LINE];
    if (fits == FITS)
        return 0;
    if (fits == FOREIGN)
        snprintf(text, sizeof text, "HDF version mismatch: built for %s, this is %.64s; rebuild "
                 "with --target %.64s, or add --allow-foreign-board (allow_foreign_board)",
                 ctx->target, here, here);
    else
        snprintf(text, sizeof text, "built for %s, and this is %.64s, which no board is known by; "
                 "rebuild for it if it is another", ctx->target, here);
    gs_refuse(GEMRUN_E_BOARD, object, text);
    return fits == FOREIGN ? GEMRUN_E_BOARD : 1;
}

int32_t gemrun_check_board(const gemrun_context_t *ctx, const char *object, const char *root)
{
    char tree[TREE];
    fit fits = UNKNOWN; /* of a description too large to look through as well */
    if (!ctx || !object)
        return gs_refuse(GEMRUN_E_ARGUMENT, "gemrun_check_board",
                         "a null pointer; give an open context and its name");
    read_tree(root_of(root), tree);
    const char *here = *tree ? tree : "a machine without a device tree";
    char *text = NULL;
    gs_json *j = malloc(sizeof *j);
    int32_t found = j ? (int32_t)gs_description(&ctx->e.v, object, j, &text) : 0;
    if (j && found == GEMRUN_OK && j->count > 0)
        fits = compare(j, tree, ctx->e.v.header.isa, &here);
    if (found == GEMRUN_OK && !is_generic(ctx))
        found = judge(ctx, object, fits, here);
    free(text);
    free(j);
    return found;
}

size_t gemrun_bsp_version(const gemrun_context_t *ctx, char *out, size_t capacity)
{
    char *text = NULL;
    gs_json *j = ctx && out && capacity > 0 ? malloc(sizeof *j) : NULL;
    bool read = j && gs_description(&ctx->e.v, "model", j, &text) == GEMRUN_OK && j->count > 0;
    const gs_value *v = read ? gs_get(j, j->values, "bsp_version") : NULL;
    if (out && capacity > 0)
        snprintf(out, capacity, "%s", v ? v->text : "");
    free(text);
    free(j);
    return out && capacity > 0 ? strlen(out) : 0;
}

/* ---- memory ---- */

static uint64_t available(const char *root)
{
    char path[PATH], line[LINE];
    unsigned long long kb = 0;
    int n = snprintf(path, sizeof path, "%s/proc/meminfo", root);
    FILE *f = n > 0 && (size_t)n < sizeof path ? gs_open_regular(path) : NULL;
    bool found = false;
    while (f && !found && fgets(line, sizeof line, f))
        found = sscanf(line, "MemAvailable: %llu kB", &kb) == 1;
    if (f)
        fclose(f);
    return found ? (uint64_t)kb * 1024 : GR_TOO_BIG;
}

/* Bytes that a run of the artifact takes, by its header; 0: it cannot be read. */
static uint64_t declared(const char *path)
{
    gb_header h;
    FILE *f = path ? gs_open_regular(path) : NULL;
    bool read = f && fread(&h, 1, sizeof h, f) == sizeof h;
    if (f)
        fclose(f);
    return read && memcmp(h.magic, GB_MAGIC, sizeof h.magic) == 0 ? h.ram_total : 0;
}

static void put_limit(char *out, size_t capacity, const char *name, int which)
{
    struct rlimit limit;
    size_t used = strlen(out);
    if (getrlimit(which, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
        snprintf(out + used, capacity - used, "%s%s %llu", used > 0 ? ", " : " (", name,
                 (unsigned long long)limit.rlim_cur);
}

size_t gemrun_explain_memory(gemrun_status status, const char *path, const char *root, char *out,
                             size_t capacity)
{
    const char *from = root_of(root);
    if (!out || capacity == 0)
        return 0;
    out[0] = 0;
    if (status == GEMRUN_E_MEMORY) {
        uint64_t machine = available(from), left = gr_port_memory(from);
        uint64_t limit = declared(path);
        if (left < machine && limit > 0)
            snprintf(out, capacity, " (the control group leaves %llu bytes: raise its limit to "
                     "%llu)", (unsigned long long)left, (unsigned long long)gr_group_limit(limit));
        else if (left < machine)
            snprintf(out, capacity, " (the control group leaves %llu bytes: raise its limit)",
                     (unsigned long long)left);
        else
            snprintf(out, capacity, " (page cache that gives way counts as available: dropping it "
                     "does not help)");
    } else if (status == GEMRUN_E_MAP) {
        uint64_t wanted = declared(path);
        if (wanted > 0)
            snprintf(out, capacity, " (a run takes %llu", (unsigned long long)wanted);
        put_limit(out, capacity, "limit of address space", RLIMIT_AS);
        put_limit(out, capacity, "limit of data", RLIMIT_DATA);
        size_t used = strlen(out);
        if (used > 0)
            snprintf(out + used, capacity - used, " bytes)");
    }
    return strlen(out);
}
