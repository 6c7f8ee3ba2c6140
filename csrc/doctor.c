/* doctor.c: the checks of gemrun --doctor, and how they are told. See doctor.h.
 *
 * A line is a level, a name and "<what is>; <what to do>". What the system does not tell is no
 * fault. hdf/BRINGUP.md has a row for every name, in this order. */
#define _GNU_SOURCE
#include "doctor.h"

#include <dirent.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "gr_check.h"
#include "gr_ctx.h"
#include "gs_board.h"

#define CPU "/sys/devices/system/cpu/"
#define MIB ((uint64_t)1 << 20)

enum { LINES = 32, SENTENCE = 8192, ZONES = 128, POLICIES = 256, TRIPS = 16, CAP_IPC_LOCK = 14,
       TRIP_LEAST_C = 40, NEAR_C = 10 };

typedef enum level { LEVEL_OK, LEVEL_UNKNOWN, LEVEL_WARN, LEVEL_BAD } level;
static const char *const level_names[] = {"ok", "unknown", "warn", "bad"};

typedef struct line {
    level level;
    const char *name;
    char text[SENTENCE];
} line;

typedef struct doctor {
    const char *root, *path;
    const gemrun_config *config;
    bool has_artifact; /* a good one */
    bool short_of_memory;
    doctor_wants wants;
    line lines[LINES];
    uint32_t count;
} doctor;

__attribute__((format(printf, 4, 5)))
static void say(doctor *d, level level, const char *name, const char *form, ...)
{
    if (d->count < LINES) {
        line *l = &d->lines[d->count++];
        va_list more;
        l->level = level;
        l->name = name;
        va_start(more, form);
        vsnprintf(l->text, sizeof l->text, form, more);
        va_end(more);
    }
}

static bool text_of(const doctor *d, const char *file, char *out, size_t capacity)
{
    return doctor_read(d->root, file, out, capacity);
}

/* "%s%u/%s" below the root: a file of one of several devices. */
static bool text_at(const doctor *d, const char *folder, uint32_t index, const char *file,
                    char *out, size_t capacity)
{
    char path[DOCTOR_PATH];
    snprintf(path, sizeof path, "%s%u/%s", folder, index, file);
    return doctor_read(d->root, path, out, capacity);
}

static bool number_at(const doctor *d, const char *folder, uint32_t index, const char *file,
                      uint64_t *out)
{
    char path[DOCTOR_PATH];
    snprintf(path, sizeof path, "%s%u/%s", folder, index, file);
    return doctor_number(d->root, path, out);
}

static double mib(uint64_t bytes)
{
    return (double)bytes / (double)MIB;
}

/* ---- the board ---- */

static void check_artifact(doctor *d)
{
    if (!d->path) {
        return;
    }
    d->has_artifact = doctor_read_artifact(d->path, &d->wants);
    d->wants.threads = d->config->threads ? d->config->threads : d->wants.threads;
    if (d->has_artifact) {
        say(d, LEVEL_OK, "artifact", "%s for %s, %u thread%s, %.1f MiB", d->wants.model,
            d->wants.target, d->wants.threads, cli_s(d->wants.threads),
            mib(d->wants.total));
    } else {
        say(d, LEVEL_BAD, "artifact", "%s", gemrun_last_error());
    }
}

/* Is one of the board's names, a line each, one that the artifact was made for? */
static bool is_named(const doctor_wants *w, const char *names)
{
    for (uint32_t i = 0; i < w->compatible_count; i++) {
        size_t n = strlen(w->compatible[i]);
        for (const char *p = names; p && *p; p = strchr(p, '\n')) {
            p += *p == '\n';
            if (strncmp(p, w->compatible[i], n) == 0 && (p[n] == 0 || p[n] == '\n')) {
                return true;
            }
        }
    }
    return false;
}

/* What --target is to be for the board of these names, a line each. */
static const char *target_of(const char *names)
{
    char tree[DOCTOR_FILE + 1] = "";
    for (size_t i = 0; names[i]; i++) {
        tree[i] = (char)(names[i] == '\n' ? 0 : names[i]);
        tree[i + 2] = 0;
    }
    const char *known = gs_board_of(tree);
    return known ? known : "FILE.toml (gemmake hdf probe drafts one)";
}

static void check_board(doctor *d)
{
    char names[DOCTOR_FILE], model[DOCTOR_WORD];
    const doctor_wants *w = &d->wants;
    bool told = text_of(d, "/proc/device-tree/compatible", names, sizeof names);
    if (!text_of(d, "/proc/device-tree/model", model, sizeof model) &&
        !text_of(d, "/sys/class/dmi/id/product_name", model, sizeof model)) {
        snprintf(model, sizeof model, "a board without a name");
    }
    int first = (int)strcspn(names, "\n");
    if (!d->has_artifact || w->compatible_count == 0) {
        say(d, LEVEL_OK, "board", "%s%s%.*s%s", model, told ? " (" : "", told ? first : 0, names,
            told ? ")" : "");
    } else if (!told) {
        say(d, LEVEL_UNKNOWN, "board", "%s; no device tree tells whether it is %s", model,
            w->compatible[0]);
    } else if (is_named(w, names)) {
        say(d, LEVEL_OK, "board", "%s, which the artifact was made for", model);
    } else {
        say(d, LEVEL_BAD, "board", "%s (%.*s), and the artifact was made for %s; compile it "
            "with gemmake --target %s", model, first, names, w->compatible[0], target_of(names));
    }
}

/* NVIDIA's: "# R35 (release), REVISION: 4.1, ..". */
static bool l4t_version(const doctor *d, char *out, size_t capacity)
{
    char text[DOCTOR_FILE];
    unsigned major, minor, patch = 0;
    if (!text_of(d, "/etc/nv_tegra_release", text, sizeof text) ||
        sscanf(text, "# R%u (release), REVISION: %u.%u", &major, &minor, &patch) < 2) {
        return false;
    }
    snprintf(out, capacity, "%u.%u.%u", major, minor, patch);
    return true;
}

static void check_bsp(doctor *d)
{
    char version[DOCTOR_WORD], text[DOCTOR_FILE], *name;
    const char *wanted = d->has_artifact ? d->wants.bsp : "";
    if (l4t_version(d, version, sizeof version)) {
        if (*wanted && strcmp(wanted, version) != 0) {
            say(d, LEVEL_BAD, "bsp", "HDF version mismatch: L4T %s, and the artifact was made for "
                "%s; flash that one, or compile it for this one", version, wanted);
        } else {
            say(d, LEVEL_OK, "bsp", "L4T %s%s", version,
                *wanted ? ", which the artifact was made for" : "");
        }
        return;
    }
    text_of(d, "/etc/os-release", text, sizeof text);
    name = strstr(text, "PRETTY_NAME=");
    name = name ? name + strlen("PRETTY_NAME=") : text;
    name += *name == '"';
    name[strcspn(name, "\"\n")] = 0;
    say(d, *wanted ? LEVEL_UNKNOWN : LEVEL_OK, "bsp", "%s%s%s", *name ? name : "a system without "
        "a name", *wanted ? "; it does not tell whether it is support package " : "", wanted);
}

/* ---- cores ---- */

static const char *is_are(uint32_t count)
{
    return count == 1 ? "is" : "are";
}

static void check_cores(doctor *d)
{
    char online[DOCTOR_FILE], present[DOCTOR_FILE];
    uint32_t on = 0, all = 0, wanted = d->wants.cores, threads = d->wants.threads;
    uint64_t up = 0, there = 0;
    if (!text_of(d, CPU "online", online, sizeof online) || !doctor_cores(online, &up, &on) ||
        on == 0) {
        say(d, LEVEL_UNKNOWN, "cores", "the system does not tell which are online");
        return;
    }
    if (!text_of(d, CPU "present", present, sizeof present) ||
        !doctor_cores(present, &there, &all)) {
        there = all = 0;
    }
    uint64_t off = there & ~up;
    all = all < on ? on : all;
    unsigned first = off ? (unsigned)__builtin_ctzll(off) : 0;
    if (on < all && (wanted == 0 || on < wanted)) {
        say(d, LEVEL_WARN, "cores", "%u of %u %s online (%s); echo 1 > " CPU "cpu%u/online, or on "
            "a Jetson choose a power mode with more: nvpmodel -q", on, all, is_are(on), online,
            first);
    } else if (on < threads) {
        say(d, LEVEL_WARN, "cores", "%u %s online and the artifact is planned for %u threads; "
            "compile it with --run-threads %u", on, is_are(on), threads, on);
    } else {
        say(d, LEVEL_OK, "cores", "%u of %u %s online", on, all, is_are(on));
    }
}

static void check_isolated(doctor *d)
{
    char list[DOCTOR_FILE], online[DOCTOR_FILE];
    uint32_t apart = 0, on = 0, threads = d->wants.threads;
    uint64_t mask = 0, up = 0;
    if (!text_of(d, CPU "isolated", list, sizeof list) || !doctor_cores(list, &mask, &apart)) {
        say(d, LEVEL_UNKNOWN, "isolated", "the system does not tell which cores are isolated");
        return;
    }
    if (!text_of(d, CPU "online", online, sizeof online) || !doctor_cores(online, &up, &on) ||
        on == 0) {
        up = UINT64_MAX;
        on = 0;
    }
    uint64_t off = mask & ~up;
    mask &= up;
    uint32_t left = on - (uint32_t)__builtin_popcountll(mask);
    if (off) {
        say(d, LEVEL_WARN, "isolated", "core%s %s, and core %u of them is off: nothing runs there; "
            "echo 1 > " CPU "cpu%u/online, or take it out of isolcpus", cli_s(apart), list,
            (unsigned)__builtin_ctzll(off), (unsigned)__builtin_ctzll(off));
    } else if (apart == 0) {
        say(d, LEVEL_OK, "isolated", "none; where tokens must come steadily beside other programs, "
            "isolcpus=N on the kernel's command line and --affinity keep cores for the engine");
    } else if (on > 0 && left < threads) {
        say(d, LEVEL_WARN, "isolated", "core%s %s, which leaves %u for the %u thread%s planned; "
            "give the engine the isolated ones with --affinity 0x%llx", cli_s(apart), list, left,
            threads, cli_s(threads), (unsigned long long)mask);
    } else {
        say(d, LEVEL_OK, "isolated", "core%s %s: only --affinity 0x%llx uses %s", cli_s(apart),
            list, (unsigned long long)mask, apart == 1 ? "it" : "them");
    }
}

static void check_governor(doctor *d)
{
    char name[DOCTOR_WORD], other[DOCTOR_WORD] = "";
    uint32_t seen = 0, where = 0;
    for (uint32_t i = 0; i < POLICIES; i++) {
        if (!text_at(d, CPU "cpufreq/policy", i, "scaling_governor", name, sizeof name)) {
            continue;
        }
        seen++;
        if (strcmp(name, "performance") != 0 && !*other) {
            snprintf(other, sizeof other, "%s", name);
            where = i;
        }
    }
    if (seen == 0) {
        say(d, LEVEL_UNKNOWN, "governor", "no clock is governed here: fixed, or a virtual machine");
    } else if (*other) {
        say(d, LEVEL_WARN, "governor", "%s: after a rest the first tokens come late; echo "
            "performance > " CPU "cpufreq/policy%u/scaling_governor, and so for each policy", other,
            where);
    } else {
        say(d, LEVEL_OK, "governor", "performance");
    }
}

static void check_clock(doctor *d)
{
    uint64_t most = 0, least = UINT64_MAX, full = 0, limit, hardware, now = 0;
    uint32_t where = 0;
    for (uint32_t i = 0; i < POLICIES; i++) {
        if (!number_at(d, CPU "cpufreq/policy", i, "scaling_max_freq", &limit)) {
            continue;
        }
        if (!number_at(d, CPU "cpufreq/policy", i, "cpuinfo_max_freq", &hardware)) {
            hardware = limit;
        }
        uint64_t wanted = hardware, mode = (uint64_t)(d->wants.cpu_mhz * 1000);
        wanted = mode > 0 && mode < wanted ? mode : wanted; /* the power mode may cap it */
        if (limit < wanted - wanted / 50 && limit < least) {
            least = limit;
            full = wanted;
            where = i;
        }
        most = limit > most ? limit : most;
        number_at(d, CPU "cpufreq/policy", i, "scaling_cur_freq", &now);
    }
    if (most == 0) {
        say(d, LEVEL_UNKNOWN, "clock", "the system does not tell");
    } else if (full > 0) {
        say(d, LEVEL_WARN, "clock", "capped at %.0f of %.0f MHz; on a Jetson choose another power "
            "mode (nvpmodel -q), else echo %llu > " CPU "cpufreq/policy%u/scaling_max_freq",
            (double)least * 1e-3, (double)full * 1e-3, (unsigned long long)full, where);
    } else if (now > 0) {
        say(d, LEVEL_OK, "clock", "up to %.0f MHz, now %.0f MHz", (double)most * 1e-3,
            (double)now * 1e-3);
    } else {
        say(d, LEVEL_OK, "clock", "up to %.0f MHz", (double)most * 1e-3);
    }
}

/* ---- memory ---- */

static bool is_memory_device(const char *name)
{
    static const char *const words[] = {"dmc", "emc", "ddr", "dram"};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        if (strstr(name, words[i])) {
            return true;
        }
    }
    return false;
}

/* Clock of the memory and its present limit, in hertz: Jetson's by debugfs, else devfreq's. */
static bool memory_clock(const doctor *d, uint64_t *now, uint64_t *limit)
{
    static const char emc[] = "/sys/kernel/debug/bpmp/debug/clk/emc/";
    char path[DOCTOR_PATH];
    *now = *limit = 0;
    snprintf(path, sizeof path, "%srate", emc);
    if (doctor_number(d->root, path, now)) {
        snprintf(path, sizeof path, "%smax_rate", emc);
        doctor_number(d->root, path, limit);
        return true;
    }
    snprintf(path, sizeof path, "%s/sys/class/devfreq", d->root);
    DIR *folder = opendir(path);
    bool found = false;
    for (struct dirent *entry; folder && !found && (entry = readdir(folder)) != NULL;) {
        if (is_memory_device(entry->d_name)) {
            snprintf(path, sizeof path, "/sys/class/devfreq/%s/cur_freq", entry->d_name);
            found = doctor_number(d->root, path, now);
            snprintf(path, sizeof path, "/sys/class/devfreq/%s/max_freq", entry->d_name);
            doctor_number(d->root, path, limit);
        }
    }
    if (folder) {
        closedir(folder);
    }
    return found;
}

static void check_ddr(doctor *d)
{
    uint64_t now, limit;
    if (!memory_clock(d, &now, &limit)) {
        say(d, LEVEL_UNKNOWN, "ddr", "the system does not tell (on a Jetson: to root, with debugfs "
            "mounted)");
        return;
    }
    double most = 2e-6 * (double)(limit > 0 ? limit : now), wanted = d->wants.mem_mtps;
    if (wanted > 0 && most < 0.97 * wanted) {
        say(d, LEVEL_WARN, "ddr", "at most %.0f MT/s, and mode %s of the artifact's board has "
            "%.0f; on a Jetson choose that power mode: nvpmodel -q, nvpmodel -m N", most,
            d->wants.mode, wanted);
    } else {
        say(d, LEVEL_OK, "ddr", "%.0f MT/s now, at most %.0f", 2e-6 * (double)now, most);
    }
}

/* Sizes in KiB of what is swapped to, and the first one's name: zram is memory, not a disk. */
static void sum_swaps(char *text, bool zram, uint64_t *kib, char *name)
{
    char *rest = NULL;
    *kib = 0;
    name[0] = 0;
    for (char *row = strtok_r(text, "\n", &rest); row; row = strtok_r(NULL, "\n", &rest)) {
        char device[DOCTOR_WORD], kind[DOCTOR_WORD];
        unsigned long long size = 0;
        if (sscanf(row, "%127s %127s %llu", device, kind, &size) == 3 &&
            (strncmp(device, "/dev/zram", 9) == 0) == zram) {
            *kib += size;
            if (!*name) {
                snprintf(name, DOCTOR_WORD, "%s", device);
            }
        }
    }
}

static void check_swap(doctor *d)
{
    char text[DOCTOR_FILE], again[DOCTOR_FILE], name[DOCTOR_WORD], on[DOCTOR_WORD] = "";
    uint64_t disk, memory;
    if (!text_of(d, "/proc/swaps", text, sizeof text)) {
        say(d, LEVEL_UNKNOWN, "swap", "the system does not tell");
        say(d, LEVEL_UNKNOWN, "zram", "the system does not tell");
    } else {
        memcpy(again, text, sizeof again);
        sum_swaps(text, false, &disk, name);
        if (disk > 0) {
            say(d, LEVEL_WARN, "swap", "%.0f MiB on %s: a model that was paged out answers late; "
                "swapoff -a, and take it out of /etc/fstab", mib(disk * 1024), name);
        } else {
            say(d, LEVEL_OK, "swap", "none");
        }
        sum_swaps(again, true, &memory, name);
        if (memory > 0) {
            say(d, LEVEL_WARN, "zram", "%.0f MiB: it takes memory and cores while the engine runs; "
                "systemctl disable --now nvzramconfig (Jetson), or zramswap", mib(memory * 1024));
        } else {
            say(d, LEVEL_OK, "zram", "none");
        }
    }
    if (!text_of(d, "/sys/module/zswap/parameters/enabled", on, sizeof on) || *on != 'Y') {
        say(d, LEVEL_OK, "zswap", "off");
    } else {
        say(d, LEVEL_WARN, "zswap", "on: what is swapped takes cores; echo N > "
            "/sys/module/zswap/parameters/enabled, and zswap.enabled=0 on the kernel's command "
            "line");
    }
}

/* `there` bytes are available: is that what a control group leaves, not what the machine has? Both
 * are read while others take and give back, so that they need not be equal. */
static bool group_limits(const doctor *d, uint64_t there)
{
    uint64_t left = gr_port_group_memory(d->root);
    return left != GR_TOO_BIG && (left <= there || left - there <= 1u << 20);
}

static void check_memory(doctor *d)
{
    uint64_t there = gr_port_memory(d->root), wanted = d->wants.total;
    bool group = there != GR_TOO_BIG && group_limits(d, there);
    const char *whose = group ? " in the control group" : "";
    char larger[80];
    snprintf(larger, sizeof larger, "raise its limit to %llu (memory.max; MemoryMax= of a unit)",
             (unsigned long long)gr_group_limit(wanted));
    if (there == GR_TOO_BIG) {
        say(d, LEVEL_UNKNOWN, "memory", "the system does not tell what is available");
    } else if (there < wanted) {
        d->short_of_memory = true;
        say(d, LEVEL_BAD, "memory", "%llu bytes are available%s, the artifact takes %llu: %.1f MiB "
            "are missing; %s, or compile with a smaller --kv-cache-size", (unsigned long long)there,
            whose, (unsigned long long)wanted, mib(wanted - there), group
            ? larger
            : "end other programs (a desktop: systemctl set-default multi-user.target)");
    } else if (wanted > 0) {
        say(d, LEVEL_OK, "memory", "%.0f MiB are available%s, the artifact takes %.1f", mib(there),
            whose, mib(wanted));
    } else {
        say(d, LEVEL_OK, "memory", "%.0f MiB are available%s", mib(there), whose);
    }
}

/* Does the process lock memory whatever its limit says? */
static bool may_lock_all(const doctor *d)
{
    char text[DOCTOR_FILE];
    const char *row = text_of(d, "/proc/self/status", text, sizeof text)
                          ? strstr(text, "CapEff:") : NULL;
    return row && strtoull(row + strlen("CapEff:"), NULL, 16) >> CAP_IPC_LOCK & 1;
}

static void check_memlock(doctor *d)
{
    static const char key[] = "Max locked memory";
    char text[DOCTOR_FILE], word[DOCTOR_WORD];
    const char *row = text_of(d, "/proc/self/limits", text, sizeof text) ? strstr(text, key) : NULL;
    if (!row || sscanf(row + sizeof key - 1, "%127s", word) != 1) {
        say(d, LEVEL_UNKNOWN, "memlock", "the system does not tell");
        return;
    }
    uint64_t limit = strcmp(word, "unlimited") == 0 ? UINT64_MAX : strtoull(word, NULL, 10);
    uint64_t wanted = d->wants.lockable;
    if (limit == UINT64_MAX || may_lock_all(d)) {
        say(d, LEVEL_OK, "memlock", "no limit");
    } else if (limit < wanted) {
        say(d, LEVEL_WARN, "memlock", "%.1f MiB may be locked, --lock-memory wants %.1f; ulimit -l "
            "unlimited, LimitMEMLOCK=infinity in a unit, memlock in /etc/security/limits.conf",
            mib(limit), mib(wanted));
    } else {
        say(d, LEVEL_OK, "memlock", "%.1f MiB may be locked", mib(limit));
    }
}

static void check_pages(doctor *d)
{
    static const char key[] = "KernelPageSize:";
    char text[DOCTOR_FILE];
    const char *row = text_of(d, "/proc/self/smaps", text, sizeof text) ? strstr(text, key) : NULL;
    uint64_t kib = row ? strtoull(row + sizeof key - 1, NULL, 10) : 0;
    if (kib == 0) {
        say(d, LEVEL_UNKNOWN, "page-size", "the system does not tell");
    } else if (kib <= 4) {
        say(d, LEVEL_OK, "page-size", "%llu KiB", (unsigned long long)kib);
    } else if (kib <= 64) { /* five mappings and the stacks */
        say(d, LEVEL_OK, "page-size", "%llu KiB: mappings end on these, so a run may take %llu KiB "
            "more than is declared", (unsigned long long)kib,
            (unsigned long long)((kib - 4) * (5 + (uint64_t)GB_MAX_THREADS)));
    } else {
        say(d, LEVEL_WARN, "page-size", "%llu KiB, and artifacts are laid out for up to 64; boot a "
            "kernel with smaller pages", (unsigned long long)kib);
    }
}

static void check_huge_pages(doctor *d)
{
    static const char file[] = "/sys/kernel/mm/transparent_hugepage/enabled";
    char text[DOCTOR_WORD];
    if (!text_of(d, file, text, sizeof text)) {
        say(d, LEVEL_UNKNOWN, "huge-pages", "this kernel has none");
    } else if (strstr(text, "[never]")) {
        say(d, LEVEL_WARN, "huge-pages", "never: a token takes up to an eighth longer; echo "
            "madvise > %s", file);
    } else {
        say(d, LEVEL_OK, "huge-pages", "%s",
            strstr(text, "[always]") ? "always" : "where they are asked for, as the engine does");
    }
}

/* ---- temperature ---- */

/* The lowest passive trip of a zone in degrees; 0: it has none. */
static double passive_of(const doctor *d, uint32_t zone)
{
    char folder[DOCTOR_WORD], kind[DOCTOR_WORD];
    double least = 0;
    snprintf(folder, sizeof folder, "/sys/class/thermal/thermal_zone%u/trip_point_", zone);
    for (uint32_t i = 0; i < TRIPS; i++) {
        char path[DOCTOR_PATH];
        uint64_t at;
        snprintf(path, sizeof path, "%s%u_type", folder, i);
        bool passive = text_of(d, path, kind, sizeof kind) && strcmp(kind, "passive") == 0;
        snprintf(path, sizeof path, "%s%u_temp", folder, i);
        if (passive && doctor_number(d->root, path, &at)) {
            double celsius = 1e-3 * (double)at; /* some systems have trips that mean nothing */
            least = celsius >= TRIP_LEAST_C && (least == 0 || celsius < least) ? celsius : least;
        }
    }
    return least;
}

/* A device that slows the processor down now; a fan does not. */
static bool is_throttled(const doctor *d)
{
    static const char folder[] = "/sys/class/thermal/cooling_device";
    for (uint32_t i = 0; i < ZONES; i++) {
        char kind[DOCTOR_WORD];
        uint64_t state = 0;
        if (text_at(d, folder, i, "type", kind, sizeof kind) &&
            number_at(d, folder, i, "cur_state", &state) && state > 0 &&
            (strstr(kind, "cpu") || strstr(kind, "Processor"))) {
            return true;
        }
    }
    return false;
}

typedef struct zone { /* the one that is nearest to its trip, else the hottest */
    uint32_t seen, read; /* zones that are there, and of them those that give a temperature */
    double celsius, passive, key;
    char name[DOCTOR_WORD];
} zone;

static zone nearest_zone(const doctor *d)
{
    static const char folder[] = "/sys/class/thermal/thermal_zone";
    zone found = {.key = 2000};
    for (uint32_t i = 0; i < ZONES; i++) {
        char path[DOCTOR_PATH], kind[DOCTOR_WORD];
        double celsius;
        snprintf(path, sizeof path, "%s%u/temp", folder, i);
        bool read = doctor_celsius(d->root, path, &celsius);
        found.seen += read || text_at(d, folder, i, "type", kind, sizeof kind);
        found.read += read;
        if (!read) {
            continue;
        }
        double trip = passive_of(d, i);
        trip = trip > 0 ? trip : d->wants.passive_c;
        double key = (trip > 0 ? trip : 1000) - celsius;
        if (key < found.key) {
            found.celsius = celsius;
            found.passive = trip;
            found.key = key;
            text_at(d, folder, i, "type", found.name, sizeof found.name);
        }
    }
    return found;
}

static void check_temperature(doctor *d)
{
    const zone z = nearest_zone(d);
    double hottest = z.celsius, passive = z.passive, threshold = d->wants.threshold_c;
    const char *name = z.name;
    if (z.seen == 0) {
        say(d, LEVEL_UNKNOWN, "temperature", "no thermal zone; gemctl takes sensors of others");
    } else if (z.read == 0) {
        say(d, LEVEL_UNKNOWN, "temperature", "%u thermal zone%s, and none gives a temperature; "
            "gemctl takes sensors of others", z.seen, cli_s(z.seen));
    } else if (passive > 0 && hottest >= passive) {
        say(d, LEVEL_BAD, "temperature", "%s has %.1f C, and from %.0f C on the system slows down; "
            "mend the cooling", name, hottest, passive);
    } else if (is_throttled(d)) {
        say(d, LEVEL_WARN, "temperature", "%s has %.1f C, and the system slows the processor down; "
            "let it cool, mend the cooling", name, hottest);
    } else if ((threshold > 0 && hottest >= threshold) ||
               (passive > 0 && hottest > passive - NEAR_C)) {
        say(d, LEVEL_WARN, "temperature", "%s has %.1f C before any load; mend the cooling, or let "
            "it cool", name, hottest);
    } else {
        say(d, LEVEL_OK, "temperature", "%s has %.1f C", name, hottest);
    }
}

/* ---- the answer ---- */

static void check_digests(doctor *d)
{
    gemrun_context_t *ctx = NULL;
    gemrun_info f = {.size = sizeof f};
    if (!d->has_artifact) {
        return;
    }
    if (d->short_of_memory) {
        say(d, LEVEL_UNKNOWN, "digests", "not compared: memory is short");
        return;
    }
    int32_t n = cli_open(&ctx, d->path, d->config) == GEMRUN_OK ? gemrun_run_tests(ctx) : -1;
    if (n >= 0 && gemrun_get_info(ctx, &f) == GEMRUN_OK) {
        say(d, LEVEL_OK, "digests", "%d test vector%s the stored logits, bit for bit, with "
            "kernel %s", n, n == 1 ? " gives" : "s give", f.kernel);
    } else {
        say(d, LEVEL_BAD, "digests", "%s", gemrun_last_error());
    }
    gemrun_destroy(ctx);
}

/* ---- output ---- */

static uint32_t count_of(const doctor *d, level level)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < d->count; i++) {
        n += d->lines[i].level == level;
    }
    return n;
}

static void print_text(const doctor *d)
{
    for (uint32_t i = 0; i < d->count; i++) {
        const line *l = &d->lines[i];
        cli_print(stdout, "%-8s%-12s%s\n", level_names[l->level], l->name, l->text);
    }
    uint32_t warnings = count_of(d, LEVEL_WARN);
    printf("%u checks, %u warning%s, %u bad\n", d->count, warnings, cli_s(warnings),
           count_of(d, LEVEL_BAD));
}

/* What is no printable ASCII may come from a file in any code: a question mark stands for it. */
static void print_word(const char *text)
{
    putchar('"');
    for (const char *p = text; *p; p++) {
        if (*p == '"' || *p == '\\') {
            putchar('\\');
        }
        putchar(*p >= ' ' && *p <= '~' ? *p : '?');
    }
    putchar('"');
}

static void print_json(const doctor *d)
{
    printf("{\"checks\": [");
    for (uint32_t i = 0; i < d->count; i++) {
        const line *l = &d->lines[i];
        printf("%s{\"level\": \"%s\", \"name\": \"%s\", \"text\": ", i ? ", " : "",
               level_names[l->level], l->name);
        print_word(l->text);
        putchar('}');
    }
    printf("], \"warnings\": %u, \"bad\": %u}\n", count_of(d, LEVEL_WARN), count_of(d, LEVEL_BAD));
}

int doctor_run(const char *path, bool json, const gemrun_config *c)
{
    static void (*const checks[])(doctor *) = {
        check_artifact, check_board,   check_bsp,    check_cores,  check_isolated,
        check_governor, check_clock,   check_ddr,    check_swap,   check_memory,
        check_memlock,  check_pages,   check_huge_pages, check_temperature, check_digests};
    const char *root = getenv("GEMRUN_ROOT");
    doctor *d = calloc(1, sizeof *d);
    if (!d) {
        fputs("gemrun: --doctor: no memory left for it; free some\n", stderr);
        return 1;
    }
    d->root = root ? root : "";
    d->path = path;
    d->config = c;
    for (size_t i = 0; i < sizeof checks / sizeof checks[0]; i++) {
        checks[i](d);
    }
    if (json) {
        print_json(d);
    } else {
        print_text(d);
    }
    int code = count_of(d, LEVEL_BAD) > 0;
    free(d);
    return code;
}
