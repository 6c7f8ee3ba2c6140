/* gr_text_list.h: the texts of gr_text.c, as lists: each line is handed to X. */
#ifndef GR_TEXT_LIST_H
#define GR_TEXT_LIST_H

typedef enum detail { /* which figures of the error say something */
    PLAIN, BYTES, TOKENS, NUMBERS, HEX, FOUND, SECTION, SECTION_HEX, RECORD, REASON, LAST, FIELD,
    KERNELS
} detail;

/* X(gr_field, name, range): in a range, # is the limit. */
#define FIELDS(X) \
    X(GR_F_SIZE, "size", "#, the struct's sizeof") \
    X(GR_F_RESERVED, "reserved", "0") \
    X(GR_F_ALIGNED, "image or memory", "addresses that are multiples of #") \
    X(GR_F_MEMORY_SIZE, "memory_size", "at least #") \
    X(GR_F_WEIGHTS_CHECK, "weights_check", "0 or 1") \
    X(GR_F_FOREIGN_BOARD, "allow_foreign_board", "0 or 1") \
    X(GR_F_IGNORE_MEMORY, "ignore_memory", "0 or 1") \
    X(GR_F_LOCK_MEMORY, "lock_memory", "0 or 1") \
    X(GR_F_THREADS, "threads", "1 to #") \
    X(GR_F_THREADS_PINNED, "threads", "1 to #, the bits of the affinity mask") \
    X(GR_F_DECODE_THREADS, "decode_threads", "1 to #") \
    X(GR_F_BALANCE, "balance", "0 to #") \
    X(GR_F_HEAD, "head", "0 to #") \
    X(GR_F_AFFINITY, "thread_affinity", "bits of #, the cores allowed") \
    X(GR_F_BATCH, "prefill_batch_size", "1 to #") \
    X(GR_F_MAX_TOKENS, "max_tokens", "1 to #") \
    X(GR_F_SPECULATE, "speculate", "0 to #") \
    X(GR_F_REUSE, "reuse", "0 or 1") \
    X(GR_F_ON_FULL, "on_full", "0 to #") \
    X(GR_F_TEMPERATURE, "temperature", "0 to 100") \
    X(GR_F_TOP_P, "top_p", "more than 0, up to 1") \
    X(GR_F_MIN_P, "min_p", "0 to less than 1") \
    X(GR_F_PENALTY, "repetition_penalty", \
      "more than 0, up to 100, and none that makes logits infinite") \
    X(GR_F_BANNED_COUNT, "banned_count", "0 to #") \
    X(GR_F_BIAS_COUNT, "bias_count", "0 to #") \
    X(GR_F_STOP_COUNT, "stop_string_count", "0 to #") \
    X(GR_F_STOP, "stop_strings", "UTF-8 of 1 to # bytes") \
    X(GR_F_BIAS_VALUE, "bias_values", "finite numbers whose sum with a logit is finite") \
    X(GR_F_BANNED, "banned", "0 to #") \
    X(GR_F_BIAS_ID, "bias_ids", "0 to #") \
    X(GR_F_TOKEN, "token id", "0 to #") \
    X(GR_F_MESSAGES, "messages", "a text and a role of 0 to #") \
    X(GR_F_FLAGS, "flags", "0 to #") \
    X(GR_F_CAPACITY, "capacity", "at least #")

/* X(code, figures, "what is wrong; what to do") */
#define SENTENCES(X) \
    X(GEMRUN_OK, PLAIN, "no error; go on") \
    X(GEMRUN_E_ARGUMENT, FIELD, "an argument is null or out of range; see gemrun.h") \
    X(GEMRUN_E_BUSY, PLAIN, \
      "another thread is inside this context; wait for it, or open another") \
    X(GEMRUN_E_PROMPT, TOKENS, \
      "the prompt is longer than the context; shorten it, or compile with a larger " \
      "--kv-cache-size") \
    X(GEMRUN_E_TEXT, BYTES, "the text is longer than the planned scratch; shorten it") \
    X(GEMRUN_E_NO_CHAT, PLAIN, \
      "no chat template, or messages that do not fit it; use a raw prompt, or compile with one") \
    X(GEMRUN_E_TOKEN, FIELD, "a token id is outside the vocabulary; check the ids") \
    X(GEMRUN_E_CONTEXT, TOKENS, \
      "kv_cache_size is above the compiled context; ask for less, or compile with a larger " \
      "--kv-cache-size") \
    X(GEMRUN_E_THREADS, FIELD, \
      "the thread count or affinity mask cannot be used; allow more cores or ask for fewer " \
      "threads") \
    X(GEMRUN_E_SAMPLING, FIELD, "bans leave no token to sample; ban fewer") \
    X(GEMRUN_E_KERNEL, KERNELS, \
      "this processor cannot run the wanted kernel; leave the choice open") \
    X(GEMRUN_E_FULL, TOKENS, \
      "the context has no room left; reset it, or compile with a larger --kv-cache-size") \
    X(GEMRUN_E_STATE, PLAIN, "the call needs a prefill before it; call gemrun_prefill") \
    X(GEMRUN_E_OPEN, REASON, "cannot be opened; check the path and its permissions") \
    X(GEMRUN_E_MAGIC, PLAIN, "not a .gembin file; compile the model with gemmake") \
    X(GEMRUN_E_BYTE_ORDER, HEX, \
      "the byte order is not this machine's; run it on a little-endian machine") \
    X(GEMRUN_E_VERSION, NUMBERS, \
      "another major format version; rebuild with a matching gemmake") \
    X(GEMRUN_E_HEADER_CRC, HEX, "the header's checksum disagrees; copy the file again") \
    X(GEMRUN_E_HEADER, NUMBERS, "a header field has an impossible value; rebuild the file") \
    X(GEMRUN_E_SIZE, BYTES, "the file is cut short or too long; copy it again") \
    X(GEMRUN_E_FEATURE, HEX, \
      "it needs features that this engine lacks; use a newer gemrun") \
    X(GEMRUN_E_ABI, NUMBERS, "it needs a newer engine; use a newer gemrun") \
    X(GEMRUN_E_TABLE_CRC, HEX, "the section table's checksum disagrees; copy the file again") \
    X(GEMRUN_E_TABLE, SECTION, "the section table is out of order; rebuild the file") \
    X(GEMRUN_E_GAP, LAST, "bytes between sections are not zero; rebuild the file") \
    X(GEMRUN_E_SIGNATURE, FOUND, "the signature block is malformed; sign the file again") \
    X(GEMRUN_E_MISSING, SECTION, \
      "a section is missing, or unknown and required; rebuild it, or use a newer gemrun") \
    X(GEMRUN_E_SECTION_CRC, SECTION_HEX, "a section's checksum disagrees; copy the file again") \
    X(GEMRUN_E_CONF, RECORD, "CONF, the model's constants, breaks a rule; rebuild the file") \
    X(GEMRUN_E_LAYR, RECORD, "LAYR, the layers, breaks a rule; rebuild the file") \
    X(GEMRUN_E_KVMK, RECORD, "KVMK, what KV heads keep, breaks a rule; rebuild the file") \
    X(GEMRUN_E_PINP, RECORD, "PINP, the pinned prompt, breaks a rule; rebuild the file") \
    X(GEMRUN_E_SEGM, RECORD, "SEGM, the weight segments, breaks a rule; rebuild the file") \
    X(GEMRUN_E_TENS, RECORD, "TENS, the tensors, breaks a rule; rebuild the file") \
    X(GEMRUN_E_PLAN, RECORD, "PLAN, the memory plan, breaks a rule; rebuild the file") \
    X(GEMRUN_E_ROPE, RECORD, "ROPE, the rotary tables, breaks a rule; rebuild the file") \
    X(GEMRUN_E_TOKN, FOUND, "TOKN, the tokenizer, breaks a rule; rebuild the file") \
    X(GEMRUN_E_TMPL, FOUND, "TMPL, the chat template, breaks a rule; rebuild the file") \
    X(GEMRUN_E_THRM, RECORD, "THRM, the thermal policy, breaks a rule; rebuild the file") \
    X(GEMRUN_E_TEST, RECORD, "TEST, the test vectors, breaks a rule; rebuild the file") \
    X(GEMRUN_E_RAM, BYTES, "the memory figures disagree with the records; rebuild the file") \
    X(GEMRUN_E_WEIGHTS_CRC, HEX, "the weights' checksum disagrees; copy the file again") \
    X(GEMRUN_E_ROOT, PLAIN, "the root digest disagrees; copy the file again") \
    X(GEMRUN_E_SHA256, SECTION, "a section's SHA-256 disagrees; copy the file again") \
    X(GEMRUN_E_MANIFEST, PLAIN, "the manifest disagrees with the records; rebuild the file") \
    X(GEMRUN_E_MEMORY, BYTES, \
      "less memory is available than the model takes; free some, compile with a smaller " \
      "--kv-cache-size, or set ignore_memory") \
    X(GEMRUN_E_MAP, REASON, \
      "the system refused memory or a thread; free memory, raise its limits") \
    X(GEMRUN_E_BOARD, PLAIN, "built for another board; rebuild with the right --target") \
    X(GEMRUN_E_TEST_FAILED, NUMBERS, \
      "a stored test vector gave another answer, from whole weights; do not use this " \
      "machine or build, and report it") \
    X(GEMRUN_E_NONFINITE, FOUND, \
      "the model produced NaN or infinity; check the weights with --check-weights")

#endif
