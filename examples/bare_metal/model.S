/* model.S: the artifact as it would lie in flash, on the 4096 bytes that the format wants. */
#ifndef MODEL_SECTION
#define MODEL_SECTION .model
#endif
    .section MODEL_SECTION, "a"
    .balign 4096
    .global model
model:
    .incbin MODEL_PATH
    .global model_end
model_end:
    .byte 0
#if defined(__linux__)
    .section .note.GNU-stack, "", %progbits
#endif
