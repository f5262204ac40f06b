"""A GGUF of the published shapes of GPT-OSS, Llama, Qwen3 or SmolLM2 with random weights, for programs that read GGUF files: the input of
`gpu_decode.py --llama-bench`, `gpu_families.py --llama-bench` and `gpu_serve.py --llama-server`.

    python3 bench/peers/synthetic_gguf.py 20b|120b|llama-3.2-1b|qwen3-4b|... bf16|q8_0 OUT.gguf

Needs the package `gguf` (PyPI). Experts are MXFP4, the dense matrices bf16 or Q8_0 (8 bits with a scale per 32 numbers), scales such that
activations stay of order one. All layers have the same numbers: the time of a token does not depend on the numbers, but the time of writing the file does. The
tokenizer of GPT-OSS is that of Ingot's own random weights (src/ingot/models/gpt_oss/synthetic.cpp): bytes, words of letters, the special tokens of o200k_harmony.
The other files have no tokenizer, because their readers measure ids.
"""
import argparse
import importlib
import os
import sys

import numpy

SHAPES = {"20b": dict(layers=24, experts=32), "120b": dict(layers=36, experts=128)}
# The dense families: the shapes of `ingot bench decode --synthetic`, all with tied embeddings.
FAMILIES = {
    "llama-3.2-1b": dict(architecture="llama", layers=16, hidden=2048, heads=32, kv_heads=8, dim=64, intermediate=8192, vocab=128256, theta=5e5, eps=1e-5, scaled_rope=True),
    "qwen3-4b": dict(architecture="qwen3", layers=36, hidden=2560, heads=32, kv_heads=8, dim=128, intermediate=9728, vocab=151936, theta=1e6, eps=1e-6),
    "qwen3-0.6b": dict(architecture="qwen3", layers=28, hidden=1024, heads=16, kv_heads=8, dim=128, intermediate=3072, vocab=151936, theta=1e6, eps=1e-6),
    "smollm2-135m": dict(architecture="llama", layers=30, hidden=576, heads=9, kv_heads=3, dim=64, intermediate=1536, vocab=49152, theta=1e5, eps=1e-5),
}
NEEDED = "found no package gguf, which writes llama.cpp's files of random weights; expected it installed (pip install gguf) or on PYTHONPATH"
VOCAB, HIDDEN, HEADS, KV_HEADS, DIM, CHOSEN = 201088, 2880, 64, 8, 64, 4


def check_llama(option, program):
    """Ends the process with one line if llama.cpp's `program`, given by `option`, or the package that writes its files is not there: its rows would be
    missing at the end of a long run."""
    if program is None:
        return
    if not os.access(program, os.X_OK):
        sys.exit(f"{option}: found no program {program}")
    try:
        importlib.import_module("gguf")
    except ImportError as e:
        sys.exit(f"{option}: {NEEDED} ({e})")


class Numbers:
    """Random data of every kind, cut from pools that are made once."""

    def __init__(self, seed):
        random = numpy.random.default_rng(seed)
        self._bytes = random.integers(0, 256, 1 << 26, dtype=numpy.uint8)
        self._normal = random.standard_normal(1 << 22, dtype=numpy.float32)

    def f32(self, n, scale, mean=0.0):
        return mean + scale * numpy.resize(self._normal, n)

    def bf16(self, rows, cols, scale):
        return numpy.resize((scale * self._normal).view(numpy.uint32) >> 16, rows * cols).astype(numpy.uint16).view(numpy.uint8).reshape(rows, 2 * cols)

    def q8_0(self, rows, cols, scale):
        blocks = numpy.resize(self._bytes, rows * cols // 32 * 34).reshape(-1, 34)
        blocks[:, :2] = numpy.frombuffer(numpy.float16(scale / 74).tobytes(), numpy.uint8)  # 74: the deviation of a byte
        return blocks.reshape(rows, cols // 32 * 34)

    def mxfp4(self, experts, rows, cols, scale):
        blocks = numpy.resize(self._bytes, experts * rows * cols // 32 * 17).reshape(-1, 17)
        blocks[:, 0] = 127 + round(float(numpy.log2(scale / 2.7)))  # 2.7: the deviation of four random bits
        return blocks.reshape(experts, rows, cols // 32 * 17)


SPECIALS = {0: "startoftext", 1: "endoftext", 4: "return", 5: "constrain", 7: "channel", 8: "start", 9: "end", 10: "message", 14: "call", 20: "endofprompt"}
ORDINARY = 199998  # ids below stand for bytes and words


def letters(byte_alphabet, n):
    """A word for each number: a space and the number's digits to the base 26."""
    digits = ""
    while n > 0 or not digits:
        digits, n = chr(ord("a") + n % 26) + digits, n // 26
    return byte_alphabet[ord(" ")] + digits


def add_tokenizer(gguf, out):
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    alphabet = {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(others)}}  # GPT-2's spelling of bytes
    tokens = [alphabet[b] for b in range(256)] + [letters(alphabet, i) for i in range(ORDINARY - 256)]
    tokens += [f"<|{SPECIALS.get(i, f'reserved_{ORDINARY + i}')}|>" for i in range(VOCAB - ORDINARY)]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-4o")
    out.add_token_list(tokens)
    out.add_token_types([gguf.TokenType.NORMAL] * ORDINARY + [gguf.TokenType.CONTROL] * (VOCAB - ORDINARY))
    out.add_token_merges([f"{alphabet[ord(' ')]} a"])  # one, because readers expect some
    out.add_bos_token_id(ORDINARY)
    out.add_eos_token_id(200002)


class Tensors:
    """Adds random tensors to a file. Dense matrices of one shape have the same numbers."""

    def __init__(self, gguf, out, dense):
        self.numbers, self._kinds, self._out = Numbers(1), gguf.GGMLQuantizationType, out
        self._dense = {"bf16": (self.numbers.bf16, self._kinds.BF16), "q8_0": (self.numbers.q8_0, self._kinds.Q8_0)}[dense]
        self._made = {}

    def vector(self, name, n, scale, mean=0.0):
        self._out.add_tensor(name, self.numbers.f32(n, scale, mean))

    def product(self, name, rows, cols):
        if (rows, cols) not in self._made:
            self._made[rows, cols] = self._dense[0](rows, cols, 1 / cols ** 0.5)
        self._out.add_tensor(name, self._made[rows, cols], raw_dtype=self._dense[1])

    def experts(self, name, experts):
        if "experts" not in self._made:
            self._made["experts"] = self.numbers.mxfp4(experts, HIDDEN, HIDDEN, 1 / HIDDEN ** 0.5)
        self._out.add_tensor(name, self._made["experts"], raw_dtype=self._kinds.MXFP4)

    def rows(self, name, rows, cols, scale):
        self._out.add_tensor(name, self.numbers.f32(rows * cols, scale).reshape(rows, cols))


def add_metadata(out, architecture, integers, numbers):
    for key, value in integers.items():
        out.add_uint32(f"{architecture}.{key}", value)
    for key, value in numbers.items():
        out.add_float32(f"{architecture}.{key}", value)


def add_gpt_oss(gguf, out, size, dense):
    shape, add = SHAPES[size], Tensors(gguf, out, dense)
    add_metadata(out, "gpt-oss", {
        "block_count": shape["layers"], "context_length": 131072, "embedding_length": HIDDEN, "feed_forward_length": HIDDEN,
        "expert_feed_forward_length": HIDDEN, "expert_count": shape["experts"], "expert_used_count": CHOSEN, "vocab_size": VOCAB,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": DIM, "attention.value_length": DIM,
        "attention.sliding_window": 128, "rope.scaling.original_context_length": 4096,
    }, {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 150000.0, "rope.scaling.factor": 32.0})
    out.add_string("gpt-oss.rope.scaling.type", "yarn")
    add_tokenizer(gguf, out)
    add.product("token_embd.weight", VOCAB, HIDDEN)
    add.product("output.weight", VOCAB, HIDDEN)
    add.vector("output_norm.weight", HIDDEN, 0.1, 1)
    for i in range(shape["layers"]):
        layer = f"blk.{i}."
        add.vector(layer + "attn_norm.weight", HIDDEN, 0.1, 1)
        add.vector(layer + "post_attention_norm.weight", HIDDEN, 0.1, 1)
        for name, rows in (("q", HEADS * DIM), ("k", KV_HEADS * DIM), ("v", KV_HEADS * DIM)):
            add.product(layer + f"attn_{name}.weight", rows, HIDDEN)
            add.vector(layer + f"attn_{name}.bias", rows, 0.2)
        add.product(layer + "attn_output.weight", HIDDEN, HEADS * DIM)
        add.vector(layer + "attn_output.bias", HIDDEN, 0.1)
        add.vector(layer + "attn_sinks.weight", HEADS, 1)
        add.rows(layer + "ffn_gate_inp.weight", shape["experts"], HIDDEN, 2 / HIDDEN ** 0.5)
        add.vector(layer + "ffn_gate_inp.bias", shape["experts"], 0.5)
        for name in ("gate", "up", "down"):
            add.experts(layer + f"ffn_{name}_exps.weight", shape["experts"])
            add.rows(layer + f"ffn_{name}_exps.bias", shape["experts"], HIDDEN, 0.1)


def llama3_divisors(dim, theta, factor=32, low=1, high=4, original=8192):
    """What Llama 3.2's scaled RoPE divides each of the dim / 2 frequencies by."""
    wavelength = 2 * numpy.pi * theta ** (numpy.arange(0, dim, 2) / dim)
    share = numpy.clip((original / wavelength - low) / (high - low), 0, 1)  # of the unscaled frequency
    return (1 / (share + (1 - share) / factor)).astype(numpy.float32)


def add_family(gguf, out, size, dense):
    shape, add = FAMILIES[size], Tensors(gguf, out, dense)
    hidden, heads, kv_heads, dim, vocab = (shape[key] for key in ("hidden", "heads", "kv_heads", "dim", "vocab"))
    add_metadata(out, shape["architecture"], {
        "block_count": shape["layers"], "context_length": 131072, "embedding_length": hidden, "feed_forward_length": shape["intermediate"], "vocab_size": vocab,
        "attention.head_count": heads, "attention.head_count_kv": kv_heads, "attention.key_length": dim, "attention.value_length": dim,
        "rope.dimension_count": dim,
    }, {"attention.layer_norm_rms_epsilon": shape["eps"], "rope.freq_base": shape["theta"]})
    out.add_tokenizer_model("none")
    add.product("token_embd.weight", vocab, hidden)  # the head too
    add.vector("output_norm.weight", hidden, 0.1, 1)
    if shape.get("scaled_rope"):
        out.add_tensor("rope_freqs.weight", llama3_divisors(dim, shape["theta"]))
    for i in range(shape["layers"]):
        layer = f"blk.{i}."
        add.vector(layer + "attn_norm.weight", hidden, 0.1, 1)
        add.vector(layer + "ffn_norm.weight", hidden, 0.1, 1)
        if shape["architecture"] == "qwen3":
            add.vector(layer + "attn_q_norm.weight", dim, 0.1, 1)
            add.vector(layer + "attn_k_norm.weight", dim, 0.1, 1)
        for name, rows, cols in (("attn_q", heads * dim, hidden), ("attn_k", kv_heads * dim, hidden), ("attn_v", kv_heads * dim, hidden), ("attn_output", hidden, heads * dim),
                                 ("ffn_gate", shape["intermediate"], hidden), ("ffn_up", shape["intermediate"], hidden), ("ffn_down", hidden, shape["intermediate"])):
            add.product(f"{layer}{name}.weight", rows, cols)


def write(size, dense, path):
    import gguf

    out = gguf.GGUFWriter(path, FAMILIES[size]["architecture"] if size in FAMILIES else "gpt-oss")
    (add_family if size in FAMILIES else add_gpt_oss)(gguf, out, size, dense)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("size", choices=[*SHAPES, *FAMILIES])
    parser.add_argument("dense", choices=("bf16", "q8_0"))
    parser.add_argument("out")
    options = parser.parse_args()
    write(options.size, options.dense, options.out)


if __name__ == "__main__":
    main()
