/* gr_text.c: what a status code means, in words. Left out, the engine reports numbers alone.
 *
 * A sentence is "<what is wrong>; <what to do>"; the figures of a gr_error go before the
 * semicolon. No libc, no allocation: text goes into the buffer of the caller and is cut where it
 * does not fit. */
#include <string.h>

#include "gr_text.h"

typedef enum detail { /* which figures of the error say something */
    PLAIN, BYTES, TOKENS, NUMBERS, HEX, FOUND, SECTION, SECTION_HEX, RECORD, REASON, LAST
} detail;

static const struct {
    int16_t code;
    uint8_t figures;
    const char *text;
} sentences[] = {
    {GEMRUN_OK, PLAIN, "no error; go on"},
    {GEMRUN_E_ARGUMENT, NUMBERS, "an argument is null or out of range; see gemrun.h"},
    {GEMRUN_E_BUSY, PLAIN,
     "another thread is inside this context; wait for it, or open a second context"},
    {GEMRUN_E_PROMPT, TOKENS,
     "the prompt is empty or longer than the context; shorten it, or compile with a larger "
     "--kv-cache-size"},
    {GEMRUN_E_TEXT, BYTES, "the text is longer than the planned scratch; shorten it"},
    {GEMRUN_E_NO_CHAT, PLAIN,
     "no chat template, or messages that do not fit it; use a raw prompt, or compile with one"},
    {GEMRUN_E_TOKEN, NUMBERS, "a token id is outside the vocabulary; check the ids"},
    {GEMRUN_E_CONTEXT, TOKENS,
     "the wanted context is above the compiled one; ask for less, or compile with a larger "
     "--kv-cache-size"},
    {GEMRUN_E_THREADS, NUMBERS,
     "the thread count or affinity mask cannot be used; allow more cores or ask for fewer threads"},
    {GEMRUN_E_SAMPLING, FOUND,
     "a sampling setting is out of range, or bans leave no token; see gemrun_request"},
    {GEMRUN_E_KERNEL, PLAIN, "this processor cannot run the wanted kernel; leave the choice open"},
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
    case BYTES:   put_pair(w, e, 10, " bytes"); break;
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
    for (size_t i = 0; i < sizeof sentences / sizeof sentences[0]; i++) {
        if (sentences[i].code == code) {
            return i;
        }
    }
    return 0;
}

const char *gemrun_status_text(gemrun_status status)
{
    size_t i = index_of(status);
    return i == 0 && status != GEMRUN_OK ? "unknown status; see gemrun.h" : sentences[i].text;
}

void gr_explain(const gr_error *e, const char *object, char *out, size_t capacity)
{
    writer w = {out, 0, capacity};
    size_t i = index_of(e->code);
    const char *text = sentences[i].text, *remedy = text;
    while (*remedy != ';' && *remedy != 0) {
        remedy++;
    }
    out[0] = 0;
    put_text(&w, object);
    put_text(&w, ": ");
    put(&w, text, (size_t)(remedy - text));
    if (sentences[i].figures != PLAIN) {
        put_figures(&w, (detail)sentences[i].figures, e);
    }
    put_text(&w, remedy);
}
