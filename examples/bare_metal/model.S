/* model.S: the artifact as it would lie in flash, on the 4096 bytes that the format wants. */
#if defined(__wasm__)
    .section .rodata.model, "", @
    .type model, @object
    .type model_end, @object
    .size model, model_end - model
    .size model_end, 1
#else
#ifndef MODEL_SECTION
#define MODEL_SECTION .model
#endif
    .section MODEL_SECTION, "a"
#endif
    .balign 4096
    .globl model
model:
    .incbin MODEL_PATH
    .globl model_end
model_end:
    .byte 0
#if defined(__linux__)
    .section .note.GNU-stack, "", %progbits
#endif
