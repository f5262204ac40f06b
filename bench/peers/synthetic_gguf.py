"""A GGUF of GPT-OSS's published shapes with random weights, for programs that read GGUF files: the input of `gpu_decode.py --llama-bench` and of
`gpu_serve.py --llama-server`.

    python3 bench/peers/synthetic_gguf.py 20b bf16|q8_0 OUT.gguf

Needs the package `gguf` (PyPI). Experts are MXFP4, the dense matrices bf16 or Q8_0 (8 bits with a scale per 32 numbers), scales such that
activations stay of order one. All layers have the same numbers: the time of a token does not depend on the numbers, but the time of writing the file does. The
tokenizer is that of Ingot's own random weights (src/ingot/models/gpt_oss/synthetic.cpp): bytes, words of letters, the special tokens of o200k_harmony.
"""
import argparse

import numpy

SHAPES = {"20b": dict(layers=24, experts=32), "120b": dict(layers=36, experts=128)}
VOCAB, HIDDEN, HEADS, KV_HEADS, DIM, CHOSEN = 201088, 2880, 64, 8, 64, 4


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


def write(size, dense, path):
    import gguf

    shape, numbers, out = SHAPES[size], Numbers(1), gguf.GGUFWriter(path, "gpt-oss")
    kinds = gguf.GGMLQuantizationType
    for key, value in dict(block_count=shape["layers"], context_length=131072, embedding_length=HIDDEN, feed_forward_length=HIDDEN,
                           expert_feed_forward_length=HIDDEN, expert_count=shape["experts"], expert_used_count=CHOSEN, vocab_size=VOCAB,
                           **{"attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": DIM,
                              "attention.value_length": DIM, "attention.sliding_window": 128,
                              "rope.scaling.original_context_length": 4096}).items():
        out.add_uint32(f"gpt-oss.{key}", value)
    for key, value in {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 150000.0, "rope.scaling.factor": 32.0}.items():
        out.add_float32(f"gpt-oss.{key}", value)
    out.add_string("gpt-oss.rope.scaling.type", "yarn")
    add_tokenizer(gguf, out)

    def matrix(name, data, kind):
        out.add_tensor(name, data, raw_dtype=kind)

    def vector(name, n, scale, mean=0.0):
        out.add_tensor(name, numbers.f32(n, scale, mean))

    as_dense = {"bf16": (numbers.bf16, kinds.BF16), "q8_0": (numbers.q8_0, kinds.Q8_0)}[dense]
    made = {}  # the tensors of one layer, used for all layers

    def product(name, rows, cols):
        key = (rows, cols)
        if key not in made:
            made[key] = as_dense[0](rows, cols, 1 / cols ** 0.5)
        matrix(name, made[key], as_dense[1])

    def experts(name):
        if "experts" not in made:
            made["experts"] = numbers.mxfp4(shape["experts"], HIDDEN, HIDDEN, 1 / HIDDEN ** 0.5)
        matrix(name, made["experts"], kinds.MXFP4)

    product("token_embd.weight", VOCAB, HIDDEN)
    product("output.weight", VOCAB, HIDDEN)
    vector("output_norm.weight", HIDDEN, 0.1, 1)
    for i in range(shape["layers"]):
        layer = f"blk.{i}."
        vector(layer + "attn_norm.weight", HIDDEN, 0.1, 1)
        vector(layer + "post_attention_norm.weight", HIDDEN, 0.1, 1)
        for name, rows in (("q", HEADS * DIM), ("k", KV_HEADS * DIM), ("v", KV_HEADS * DIM)):
            product(layer + f"attn_{name}.weight", rows, HIDDEN)
            vector(layer + f"attn_{name}.bias", rows, 0.2)
        product(layer + "attn_output.weight", HIDDEN, HEADS * DIM)
        vector(layer + "attn_output.bias", HIDDEN, 0.1)
        vector(layer + "attn_sinks.weight", HEADS, 1)
        out.add_tensor(layer + "ffn_gate_inp.weight", numbers.f32(shape["experts"] * HIDDEN, 2 / HIDDEN ** 0.5).reshape(shape["experts"], HIDDEN))
        vector(layer + "ffn_gate_inp.bias", shape["experts"], 0.5)
        for name in ("gate", "up", "down"):
            experts(layer + f"ffn_{name}_exps.weight")
            out.add_tensor(layer + f"ffn_{name}_exps.bias", numbers.f32(shape["experts"] * HIDDEN, 0.1).reshape(shape["experts"], HIDDEN))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("dense", choices=("bf16", "q8_0"))
    parser.add_argument("out")
    options = parser.parse_args()
    write(options.size, options.dense, options.out)


if __name__ == "__main__":
    main()
