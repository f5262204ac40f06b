"""Prints the values that src/ingot/io/formats/gguf_blocks.test.cpp expects: hashes of the numbers that the Python package gguf dequantises.

    python3 tools/make_gguf_goldens.py        needs numpy and gguf
"""
import gguf
import numpy as np

# The type, bytes of a block, and where its f16 numbers begin.
TYPES = dict(Q4_0=(18, [0]), Q4_1=(20, [0, 2]), Q5_0=(22, [0]), Q5_1=(24, [0, 2]), Q8_0=(34, [0]), Q4_K=(144, [0, 2]), Q5_K=(176, [0, 2]), Q6_K=(210, [208]))
BLOCKS = 16


def blocks_of(size, halves):
    """The high byte of each step of a linear congruence; f16 numbers are made finite."""
    state, data = 1, bytearray()
    for _ in range(size * BLOCKS):
        state = (state * 1664525 + 1013904223) % 2**32
        data.append(state >> 24)
    for block in range(BLOCKS):
        for half in halves:
            data[block * size + half + 1] &= 0xBF
    return np.frombuffer(bytes(data), np.uint8).reshape(BLOCKS, size)


def fnv(data):
    h = 0xCBF29CE484222325
    for byte in data:
        h = (h ^ byte) * 0x100000001B3 % 2**64
    return h


for name, (size, halves) in TYPES.items():
    numbers = gguf.quants.dequantize(blocks_of(size, halves), gguf.GGMLQuantizationType[name]).astype("<f4")
    print(f'    {{"{name}", {{{", ".join(map(str, halves))}}}, {float(numbers.flat[1])!r}f, {float(numbers.flat[-1])!r}f, 0x{fnv(numbers.tobytes()):016x}}},')
