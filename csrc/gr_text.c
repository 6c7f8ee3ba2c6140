/* gr_text.c: what a status code means, in words. Left out, the engine reports numbers alone.
 *
 * A sentence is "<what is wrong>; <what to do>"; the figures of a gr_error go before the
 * semicolon. No libc, no allocation: text goes into the buffer of the caller and is cut where it
 * does not fit. */
#include <string.h>

#include "gr_text.h"

typedef enum detail { /* which figures of the error say something */
    PLAIN, BYTES, TOKENS, NUMBERS, HEX, FOUND, SECTION, SECTION_HEX, RECORD, REASON, LAST, FIELD,
    KERNELS
} detail;

typedef enum shape { NUMBER, MASK, REAL, INDEX } shape; /* how a field's value is shown */

/* By gr_field. In a range, # is the limit. */
static const struct {
    const char *name, *range;
} fields[GR_F_COUNT] = {
    [GR_F_SIZE] = {"size", "#, the struct's sizeof"},
    [GR_F_RESERVED] = {"reserved", "0"},
    [GR_F_ALIGNED] = {"image or memory", "addresses that are multiples of #"},
    [GR_F_MEMORY_SIZE] = {"memory_size", "at least #"},
    [GR_F_WEIGHTS_CHECK] = {"weights_check", "0 or 1"},
    [GR_F_FOREIGN_BOARD] = {"allow_foreign_board", "0 or 1"},
    [GR_F_IGNORE_MEMORY] = {"ignore_memory", "0 or 1"},
    [GR_F_LOCK_MEMORY] = {"lock_memory", "0 or 1"},
    [GR_F_THREADS] = {"threads", "1 to #"},
    [GR_F_THREADS_PINNED] = {"threads", "1 to #, the bits of the affinity mask"},
    [GR_F_DECODE_THREADS] = {"decode_threads", "1 to #"},
    [GR_F_BALANCE] = {"balance", "0 to #"},
    [GR_F_HEAD] = {"head", "0 to #"},
    [GR_F_AFFINITY] = {"thread_affinity", "bits of #, the cores allowed"},
    [GR_F_BATCH] = {"prefill_batch_size", "1 to #"},
    [GR_F_MAX_TOKENS] = {"max_tokens", "1 to #"},
    [GR_F_SPECULATE] = {"speculate", "0 to #"},
    [GR_F_REUSE] = {"reuse", "0 or 1"},
    [GR_F_ON_FULL] = {"on_full", "0 to #"},
    [GR_F_TEMPERATURE] = {"temperature", "0 to 100"},
    [GR_F_TOP_P] = {"top_p", "more than 0, up to 1"},
    [GR_F_MIN_P] = {"min_p", "0 to less than 1"},
    [GR_F_PENALTY] = {"repetition_penalty",
                      "more than 0, up to 100, and none that makes logits infinite"},
    [GR_F_BANNED_COUNT] = {"banned_count", "0 to #"},
    [GR_F_BIAS_COUNT] = {"bias_count", "0 to #"},
    [GR_F_STOP_COUNT] = {"stop_string_count", "0 to #"},
    [GR_F_STOP] = {"stop_strings", "UTF-8 of 1 to # bytes"},
    [GR_F_BIAS_VALUE] = {"bias_values", "finite numbers whose sum with a logit is finite"},
    [GR_F_BANNED] = {"banned", "0 to #"},
    [GR_F_BIAS_ID] = {"bias_ids", "0 to #"},
    [GR_F_TOKEN] = {"token id", "0 to #"},
    [GR_F_MESSAGES] = {"messages", "a text and a role of 0 to #"},
    [GR_F_FLAGS] = {"flags", "0 to #"},
    [GR_F_CAPACITY] = {"capacity", "at least #"},
};

static shape shape_of(uint32_t field)
{
    switch (field) {
    case GR_F_ALIGNED:
    case GR_F_AFFINITY:
        return MASK;
    case GR_F_TEMPERATURE:
    case GR_F_TOP_P:
    case GR_F_MIN_P:
    case GR_F_PENALTY:
        return REAL;
    case GR_F_STOP:
    case GR_F_BIAS_VALUE:
    case GR_F_MESSAGES:
        return INDEX;
    default:
        return NUMBER;
    }
}

static const struct {
    int16_t code;
    uint8_t figures;
    const char *text;
} sentences[] = {
    {GEMRUN_OK, PLAIN, "no error; go on"},
    {GEMRUN_E_ARGUMENT, FIELD, "an argument is null or out of range; see gemrun.h"},
    {GEMRUN_E_BUSY, PLAIN,
     "another thread is inside this context; wait for it, or open a second context"},
    {GEMRUN_E_PROMPT, TOKENS,
     "the prompt is longer than the context; shorten it, or compile with a larger "
     "--kv-cache-size"},
    {GEMRUN_E_TEXT, BYTES, "the text is longer than the planned scratch; shorten it"},
    {GEMRUN_E_NO_CHAT, PLAIN,
     "no chat template, or messages that do not fit it; use a raw prompt, or compile with one"},
    {GEMRUN_E_TOKEN, FIELD, "a token id is outside the vocabulary; check the ids"},
    {GEMRUN_E_CONTEXT, TOKENS,
     "kv_cache_size is above the compiled context; ask for less, or compile with a larger "
     "--kv-cache-size"},
    {GEMRUN_E_THREADS, FIELD,
     "the thread count or affinity mask cannot be used; allow more cores or ask for fewer threads"},
    {GEMRUN_E_SAMPLING, FIELD, "bans leave no token to sample; ban fewer"},
    {GEMRUN_E_KERNEL, KERNELS,
     "this processor cannot run the wanted kernel; leave the choice open"},
    {GEMRUN_E_FULL, TOKENS,
     "the context has no room left; reset it, or compile with a larger --kv-cache-size"},
    {GEMRUN_E_STATE, PLAIN, "the call needs a prefill before it; call gemrun_prefill"},
    {GEMRUN_E_OPEN, REASON, "cannot be opened; check the path and its permissions"},
    {GEMRUN_E_MAGIC, PLAIN, "not a .gembin file; compile the model with gemmake"},
    {GEMRUN_E_BYTE_ORDER, HEX,
     "the byte order is not this machine's; run it on a little-endian machine"},
    {GEMRUN_E_VERSION, NUMBERS, "another major format version; rebuild with a matching gemmake"},
    {GEMRUN_E_HEADER_CRC, HEX, "the header's checksum disagrees; copy the file again"},
    {GEMRUN_E_HEADER, NUMBERS, "a header field has an impossible value; rebuild the file"},
    {GEMRUN_E_SIZE, BYTES, "the file is cut short or too long; copy it again"},
    {GEMRUN_E_FEATURE, HEX, "it needs features that this engine does not know; use a newer gemrun"},
    {GEMRUN_E_ABI, NUMBERS, "it needs a newer engine; use a newer gemrun"},
    {GEMRUN_E_TABLE_CRC, HEX, "the section table's checksum disagrees; copy the file again"},
    {GEMRUN_E_TABLE, SECTION, "the section table is out of order; rebuild the file"},
    {GEMRUN_E_GAP, LAST, "bytes between sections are not zero; rebuild the file"},
    {GEMRUN_E_SIGNATURE, FOUND, "the signature block is malformed; sign the file again"},
    {GEMRUN_E_MISSING, SECTION,
     "a section is missing, or unknown and required; rebuild it, or use a newer gemrun"},
    {GEMRUN_E_SECTION_CRC, SECTION_HEX, "a section's checksum disagrees; copy the file again"},
    {GEMRUN_E_CONF, RECORD, "CONF, the model's constants, breaks a rule; rebuild the file"},
    {GEMRUN_E_LAYR, RECORD, "LAYR, the layers, breaks a rule; rebuild the file"},
    {GEMRUN_E_KVMK, RECORD, "KVMK, what KV heads keep, breaks a rule; rebuild the file"},
    {GEMRUN_E_PINP, RECORD, "PINP, the pinned prompt, breaks a rule; rebuild the file"},
    {GEMRUN_E_SEGM, RECORD, "SEGM, the weight segments, breaks a rule; rebuild the file"},
    {GEMRUN_E_TENS, RECORD, "TENS, the tensors, breaks a rule; rebuild the file"},
    {GEMRUN_E_PLAN, RECORD, "PLAN, the memory plan, breaks a rule; rebuild the file"},
    {GEMRUN_E_ROPE, RECORD, "ROPE, the rotary tables, breaks a rule; rebuild the file"},
    {GEMRUN_E_TOKN, FOUND, "TOKN, the tokenizer, breaks a rule; rebuild the file"},
    {GEMRUN_E_TMPL, FOUND, "TMPL, the chat template, breaks a rule; rebuild the file"},
    {GEMRUN_E_THRM, RECORD, "THRM, the thermal policy, breaks a rule; rebuild the file"},
    {GEMRUN_E_TEST, RECORD, "TEST, the test vectors, breaks a rule; rebuild the file"},
    {GEMRUN_E_RAM, BYTES, "the memory figures disagree with the records; rebuild the file"},
    {GEMRUN_E_WEIGHTS_CRC, HEX, "the weights' checksum disagrees; copy the file again"},
    {GEMRUN_E_ROOT, PLAIN, "the root digest disagrees; copy the file again"},
    {GEMRUN_E_SHA256, SECTION, "a section's SHA-256 disagrees; copy the file again"},
    {GEMRUN_E_MANIFEST, PLAIN, "the manifest disagrees with the records; rebuild the file"},
    {GEMRUN_E_MEMORY, BYTES,
     "less memory is available than the model takes; free some, compile with a smaller "
     "--kv-cache-size, or set ignore_memory"},
    {GEMRUN_E_MAP, REASON, "the system refused memory or a thread; free memory, raise its limits"},
    {GEMRUN_E_BOARD, PLAIN, "built for another board; rebuild with the right --target"},
    {GEMRUN_E_TEST_FAILED, NUMBERS,
     "a stored test vector gave another answer; do not use this machine or build, and report it"},
    {GEMRUN_E_NONFINITE, FOUND,
     "the model produced NaN or infinity; check the weights with --check-weights"},
};

typedef struct writer {
    char *out;
    size_t used, capacity;
} writer;

static void put(writer *w, const char *text, size_t size)
{
    size_t room = w->capacity - 1 - w->used, n = size < room ? size : room;
    memcpy(w->out + w->used, text, n);
    w->used += n;
    w->out[w->used] = 0;
}

static void put_text(writer *w, const char *text)
{
    put(w, text, strlen(text));
}

static void put_number(writer *w, uint64_t value, uint64_t base)
{
    char digits[24];
    size_t n = sizeof digits;
    do {
        digits[--n] = "0123456789abcdef"[value % base];
        value /= base;
    } while (value > 0);
    put_text(w, base == 16 ? "0x" : "");
    put(w, digits + n, sizeof digits - n);
}

static void put_pair(writer *w, const gr_error *e, uint64_t base, const char *unit)
{
    put_text(w, "wanted ");
    put_number(w, e->wanted, base);
    put_text(w, unit);
    put_text(w, ", found ");
    put_number(w, e->found, base);
    put_text(w, unit);
}

/* Three decimals are enough to tell a wrong setting. */
static void put_real(writer *w, uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    if (!(f - f == 0.0f) || f >= 1e9f || f <= -1e9f) {
        put_text(w, f != f ? "not a number" : f < 0 ? "a huge negative number" : "a huge number");
        return;
    }
    uint64_t thousandths = (uint64_t)((f < 0 ? -(double)f : (double)f) * 1000 + 0.5);
    if (thousandths == 0 && f != 0) {
        put_text(w, f < 0 ? "a tiny negative number" : "a tiny number");
        return;
    }
    put_text(w, f < 0 ? "-" : "");
    put_number(w, thousandths / 1000, 10);
    for (uint32_t rest = (uint32_t)(thousandths % 1000), scale = 100; rest > 0; scale /= 10) {
        put_text(w, scale == 100 ? "." : "");
        put_number(w, rest / scale, 10);
        rest %= scale;
    }
}

/* "<name>: <value> is out of range; use <range>" */
static void put_field(writer *w, const gr_error *e)
{
    shape shape = shape_of(e->what);
    uint64_t base = shape == MASK ? 16 : 10, found = e->found;
    put_text(w, fields[e->what].name);
    put_text(w, ": ");
    put_text(w, shape == INDEX ? "number " : "");
    if (shape == REAL) {
        put_real(w, (uint32_t)found);
    } else {
        bool negative = shape == NUMBER && found > INT64_MAX;
        put_text(w, negative ? "-" : "");
        put_number(w, negative ? 0 - found : found, base);
    }
    put_text(w, shape == INDEX ? " is not usable; use " : " is out of range; use ");
    for (const char *p = fields[e->what].range; *p != 0; p++)
        if (*p == '#')
            put_number(w, e->wanted, base);
        else
            put(w, p, 1);
}

/* What a refused model would take (O34). */
static void put_plan(writer *w, const gr_error *e)
{
    static const char names[6][12] = {": weights ", ", tables ", ", arena ",
                                      ", KV ",      ", engine ", ", stacks "};
    uint64_t total = 0;
    for (uint32_t i = 0; i < 6; i++) {
        put_text(w, names[i]);
        put_number(w, e->plan[i], 10);
        total += e->plan[i];
    }
    put_text(w, ", total ");
    put_number(w, total, 10);
    put_text(w, " with ");
    put_number(w, e->threads, 10);
    put_text(w, " threads");
}

static void put_kernels(writer *w)
{
    put_text(w, "available: ");
    for (uint32_t i = 0; gr_kernels_at(i); i++) {
        put_text(w, i ? ", " : "");
        put_text(w, gr_kernels_at(i));
    }
}

static void put_section(writer *w, uint32_t type)
{
    char name[4];
    for (uint32_t i = 0; i < 4; i++) {
        char c = (char)(type >> 8 * i & 127);
        name[i] = c >= 'A' && c <= 'Z' ? c : '?';
    }
    put(w, name, type ? sizeof name : 0);
}

static void put_figures(writer *w, detail figures, const gr_error *e)
{
    put_text(w, " (");
    switch (figures) {
    case BYTES:
        put_pair(w, e, 10, " bytes");
        if (e->threads > 0)
            put_plan(w, e);
        break;
    case KERNELS: put_kernels(w); break;
    case TOKENS:
        put_number(w, e->wanted, 10);
        put_text(w, " tokens, room for ");
        put_number(w, e->found, 10);
        break;
    case HEX:     put_pair(w, e, 16, ""); break;
    case SECTION: put_section(w, e->what); break;
    case REASON:  put_text(w, gr_port_reason(e->found)); break;
    case LAST:    put_text(w, "byte "); put_number(w, e->found, 10); break;
    case FOUND:   put_text(w, "number "); put_number(w, e->found, 10); break;
    case SECTION_HEX:
        put_section(w, e->what);
        put_text(w, ", ");
        put_pair(w, e, 16, "");
        break;
    case RECORD:
        if (e->record != GR_NO_RECORD) {
            put_text(w, "record ");
            put_number(w, e->record, 10);
            put_text(w, ", ");
        }
        put_pair(w, e, 10, "");
        break;
    default: put_pair(w, e, 10, ""); break;
    }
    put_text(w, ")");
}

static size_t index_of(gemrun_status code)
{
    for (size_t i = 0; i < sizeof sentences / sizeof sentences[0]; i++)
        if (sentences[i].code == code)
            return i;
    return 0;
}

const char *gemrun_status_text(gemrun_status status)
{
    size_t i = index_of(status);
    return i == 0 && status != GEMRUN_OK ? "unknown status; see gemrun.h" : sentences[i].text;
}

/* A context that was set too low asks for another remedy than a compiled one. */
static void put_remedy(writer *w, const gr_error *e, const char *remedy)
{
    bool room = e->code == GEMRUN_E_PROMPT || e->code == GEMRUN_E_FULL;
    if (!room || e->record == GR_NO_RECORD) {
        put_text(w, remedy);
        return;
    }
    while (*remedy != ',')
        put(w, remedy++, 1);
    put_text(w, ", or raise --kv-cache-size (kv_cache_size) from ");
    put_number(w, e->found, 10);
    put_text(w, " to at most the compiled ");
    put_number(w, e->record, 10);
}

void gr_explain(const gr_error *e, const char *object, char *out, size_t capacity)
{
    writer w = {out, 0, capacity};
    size_t i = index_of(e->code);
    uint32_t figures = sentences[i].figures;
    const char *text = sentences[i].text, *remedy = text;
    while (*remedy != ';' && *remedy != 0)
        remedy++;
    out[0] = 0;
    put_text(&w, object);
    put_text(&w, ": ");
    if (figures == FIELD && e->what > GR_F_NONE && e->what < GR_F_COUNT) {
        put_field(&w, e);
        return;
    }
    if (e->code == GEMRUN_E_PROMPT && e->wanted == 0) {
        put_text(&w, "the prompt is empty; give it some text");
        return;
    }
    put(&w, text, (size_t)(remedy - text));
    if (figures != PLAIN && figures != FIELD)
        put_figures(&w, (detail)figures, e);
    put_remedy(&w, e, remedy);
}
