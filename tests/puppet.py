"""A tiny GPT-OSS checkpoint that gives a prescribed answer: puppet_model(directory, script). The module needs no package.

A script is a list of control tokens ("<|channel|>") and pieces of text. Attention and experts are zero, and each token's row of the head is the
code of the token before it.
"""
import json
import math
import pathlib
import random
import struct

CONTROLS = ["startoftext", "endoftext", "return", "constrain", "channel", "start", "end", "message", "call"]
O200K = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])


def byte_alphabet():
    """GPT-2's spelling of bytes."""
    plain = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    table, n = {b: chr(b) for b in plain}, 0
    for b in range(256):
        if b not in table:
            table[b] = chr(256 + n)
            n += 1
    return table


ALPHABET = byte_alphabet()


def tokenizer_json(pieces):
    """Control tokens first, then the bytes, then whole pieces of text; a word equal to a piece is one token."""
    spell = lambda data: "".join(ALPHABET[b] for b in data)
    vocab = {f"<|{name}|>": i for i, name in enumerate(CONTROLS)}
    for b in range(256):
        vocab[spell(bytes([b]))] = len(vocab)
    for piece in pieces:
        data = piece if isinstance(piece, bytes) else piece.encode()
        if spell(data) not in vocab:
            vocab[spell(data)] = len(vocab)
    added = [dict(id=i, content=f"<|{n}|>", single_word=False, lstrip=False, rstrip=False, normalized=False, special=True) for i, n in enumerate(CONTROLS)]
    return dict(version="1.0", truncation=None, padding=None, added_tokens=added, normalizer=None,
                pre_tokenizer=dict(type="Sequence", pretokenizers=[dict(type="Split", pattern=dict(Regex=O200K), behavior="Isolated", invert=False),
                                                                   dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)]),
                post_processor=None, decoder=dict(type="ByteLevel", add_prefix_space=True, trim_offsets=True, use_regex=True),
                model=dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None, fuse_unk=False,
                           byte_fallback=False, ignore_merges=True, vocab=vocab, merges=[])), vocab


def id_of(vocab, piece):
    if isinstance(piece, str) and piece in vocab and piece.startswith("<|"):
        return vocab[piece]
    data = piece if isinstance(piece, bytes) else piece.encode()
    return vocab["".join(ALPHABET[b] for b in data)]


def bf16(values):
    return struct.pack(f"<{len(values)}H", *(struct.unpack("<I", struct.pack("<f", v))[0] >> 16 for v in values))


def write_safetensors(path, tensors):
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = dict(dtype=dtype, shape=list(shape), data_offsets=[at, at + len(data)])
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(d for _, _, d in tensors.values()))


def config_of(vocab, hidden, inner, layers, heads, kv, dim, experts, per_token=2, **more):
    return dict(model_type="gpt_oss", architectures=["GptOssForCausalLM"], vocab_size=vocab, hidden_size=hidden, intermediate_size=inner,
                num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv, head_dim=dim, num_local_experts=experts,
                num_experts_per_tok=per_token, sliding_window=128, max_position_embeddings=131072, rope_theta=150000, eos_token_id=[2, 1, 8],
                rope_scaling=dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=4096)) | more


def checkpoint_tensors(c, fill, experts="mxfp4", seed=1):
    """name -> (dtype, shape, bytes) under Hugging Face's names; fill(name, count) gives numbers."""
    noise = random.Random(seed)
    t = {}
    C, E, I = c["hidden_size"], c["num_local_experts"], c["intermediate_size"]
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]

    def add(name, *shape):
        t[name] = ("BF16", shape, bf16(fill(name, math.prod(shape))))

    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        add(name, c["vocab_size"], C)
    add("model.norm.weight", C)
    for layer in range(c["num_hidden_layers"]):
        n = f"model.layers.{layer}."
        add(n + "input_layernorm.weight", C)
        add(n + "post_attention_layernorm.weight", C)
        for name, rows, cols in (("q", q, C), ("k", kv, C), ("v", kv, C), ("o", C, q)):
            add(f"{n}self_attn.{name}_proj.weight", rows, cols)
            add(f"{n}self_attn.{name}_proj.bias", rows)
        add(n + "self_attn.sinks", c["num_attention_heads"])
        add(n + "mlp.router.weight", E, C)
        add(n + "mlp.router.bias", E)
        if experts == "mxfp4":
            for name, rows, cols in (("gate_up_proj", 2 * I, C), ("down_proj", C, I)):
                t[f"{n}mlp.experts.{name}_blocks"] = ("U8", (E, rows, cols // 32, 16), noise.randbytes(E * rows * cols // 2))
                t[f"{n}mlp.experts.{name}_scales"] = ("U8", (E, rows, cols // 32), bytes(noise.choice(range(121, 125)) for _ in range(E * rows * cols // 32)))
        else:
            add(n + "mlp.experts.gate_up_proj", E, C, 2 * I)
            add(n + "mlp.experts.down_proj", E, I, C)
        add(n + "mlp.experts.gate_up_proj_bias", E, 2 * I)
        add(n + "mlp.experts.down_proj_bias", E, C)
    return t


WORDS = ["assistant", "analysis", "commentary", "final", "user", "system", "developer", " to", "json"]


def puppet_model(path, script, after=None, word=None, hidden=128):
    """After the prompt's last token, `assistant`, the model answers script[0], then script[1]... A piece may occur twice: an attention head
    distinguishes the two occurrences by a mark, a piece that occurs once and between the two. With `after` and `word` the model answers
    `after` instead wherever that word occurs in the prompt."""
    path = pathlib.Path(path)
    path.mkdir(parents=True, exist_ok=True)
    pieces = list(script) + list(after or []) + ([word] if word else [])
    tokenizer, vocab = tokenizer_json(WORDS + [p for p in pieces if not (isinstance(p, str) and p.startswith("<|"))])
    follows = {}  # id -> [successor before the mark, successor after the mark]
    ids = [id_of(vocab, "assistant")] + [id_of(vocab, p) for p in script]
    if after is None:
        for before, now in zip(ids, ids[1:]):
            follows.setdefault(before, []).append(now)
        assert all(len(f) <= 2 for f in follows.values()), script
        twice = [b for b, f in follows.items() if len(set(f)) > 1]
        low = max([ids.index(b) for b in twice], default=0)
        high = min([ids.index(b, ids.index(b) + 1) for b in twice], default=len(ids))
        marks = [i for i in range(low + 1, high) if ids.count(ids[i]) == 1 and ids[i] >= len(CONTROLS) + 256] if twice else []
        assert marks or not twice, "no piece that stands once lies between"
        mark = ids[marks[-1]] if marks else -1
    else:
        mark = id_of(vocab, word)
        for before, now in zip(ids, ids[1:]):
            follows[before] = [now, now]
        ids = [id_of(vocab, "assistant")] + [id_of(vocab, p) for p in after]
        for before, now in zip(ids, ids[1:]):
            follows.setdefault(before, [now, now])[1] = now
    width = hidden + 32  # codes, then: a constant, the mark, the head's output
    one, marked, seen = hidden, hidden + 1, hidden + 2
    c = config_of(len(vocab), width, 32, 1, 2, 1, 32, 2, sliding_window=4096)
    noise = random.Random(7)
    codes = [[noise.choice((-1.0, 1.0)) for _ in range(hidden)] + [0.0] * 32 for _ in range(len(vocab))]
    for i, code in enumerate(codes):
        code[one], code[marked] = 1.0, 1.0 if i == mark else 0.0
    head = [[0.0] * width for _ in range(len(vocab))]
    for before, f in follows.items():
        both = len(set(f)) > 1
        for k, now in enumerate(f if both else f[:1]):
            for d in range(hidden):
                head[now][d] += codes[before][d] * (0.9 if both and k == 1 else 1.0)
            if both and k == 1:
                head[now][seen] += 5.0

    def fill(name, n):
        if name == "model.embed_tokens.weight":
            return [v for row in codes for v in row]
        if name == "lm_head.weight":
            return [v for row in head for v in row]
        values = [1.0 if "norm" in name else 0.0] * n
        if name.endswith("q_proj.weight"):
            values[15 * width + one] = 16.0
        if name.endswith("k_proj.weight"):
            values[15 * width + marked] = 16.0  # of the pair with the lowest frequency
        if name.endswith("v_proj.weight"):
            values[marked] = 1.0
        if name.endswith("o_proj.weight"):
            values[seen * 64] = 8.0
        return values

    write_safetensors(path / "model.safetensors", checkpoint_tensors(c, fill, "bf16"))
    (path / "config.json").write_text(json.dumps(c))
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path
