"""An engine in NumPy, for tests only: written from csrc/NUMERICS.md and csrc/gembin.h.

It shares no code with gemrun or gemmake. Loops run over the reduction index in ascending order and
NumPy works across rows, tokens and heads, so every float32 operation is the one of the contract.

    records.py    bytes of an artifact -> records (no checks; damaged files are not its business)
    formats.py    r16k4 panels -> matrices, and the products with them
    floatmath.py  exact fmaf, reductions, exp, tanh, norms, RoPE, softmax
    interp.py     token ids -> logits
    sampler.py    logits -> token id
    make_image.py a random artifact of any shape, made with struct and NumPy alone
"""
