#!/usr/bin/env python3
"""The CPU engine against spec/decoder.py in fp64, on random small models of every family.

    parity_decoder.py BUILD/ingot [--cases 4] [--seed 1] [--only FAMILY] [--skip-without-peers]

Each case draws a config of its family: head_dim unlike hidden / heads, queries that share a key in groups of 1, 3 and 7, tied and untied
heads, every scaling of RoPE that the family's files have, windows, biases, experts with and without renormalised weights. All weights are
random, those of norms and biases too. The config is written in the old or in the new spelling, and the losses of sequences of up to 200
tokens, past the original context of a scaled RoPE, are compared at every position. A difference of fp32 from fp64 is some 1e-5.
"""
import json
import math
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import parity_peers

LIMIT = 3e-4
ROOT = Path(__file__).resolve().parents[2]
with parity_peers.required():
    import torch
sys.path.insert(0, str(ROOT))
from spec import decoder  # noqa: E402

ORIGINAL = 48  # context before a scaled RoPE
LENGTHS = (2, 33, 129, 200)


class Draw:
    """Random choices of one case."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def below(self, n):
        return int(torch.randint(n, (1,), generator=self.generator))

    def one_of(self, *values):
        return values[self.below(len(values))]


def draw_rope(draw, kinds, case):
    """A table, its new spelling, and its old one: (rope_theta, rope_scaling)."""
    theta = draw.one_of(10000.0, 100000.0, 500000.0)
    kind = kinds[case % len(kinds)]
    if kind == "default":
        return decoder.RopeTable(theta), dict(rope_type="default", rope_theta=theta), (theta, None)
    factor = draw.one_of(2.0, 4.0, 8.0)
    table, keys = decoder.RopeTable(theta, kind, factor), dict(rope_type=kind, factor=factor)
    if kind == "llama3":
        table.original, table.slow, table.fast = ORIGINAL, 1.0, 4.0
        keys |= dict(original_max_position_embeddings=ORIGINAL, low_freq_factor=1.0, high_freq_factor=4.0)
    if kind == "yarn":
        table.original = ORIGINAL
        keys |= dict(original_max_position_embeddings=ORIGINAL)
        if draw.below(2):
            table.fast, table.slow, table.truncate, table.attention_factor = 16.0, 2.0, False, 1.25
            keys |= dict(beta_fast=16.0, beta_slow=2.0, truncate=False, attention_factor=1.25)
    return table, keys | dict(rope_theta=theta), (theta, keys)


def draw_sizes(draw):
    group, kv_heads = draw.one_of(1, 3, 7), draw.one_of(1, 2)
    heads, head_dim = group * kv_heads, draw.one_of(16, 24, 32)
    hidden = draw.one_of(*(n for n in (40, 48, 64, 72) if n != heads * head_dim))
    return dict(vocab=draw.one_of(97, 130), hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
                intermediate=draw.one_of(40, 56, 88), tied=bool(draw.below(2)), norm_eps=draw.one_of(1e-5, 1e-6, 1e-3))


def draw_case(family, draw, case):
    """The Spec, and config.json in both spellings."""
    sizes, layers = draw_sizes(draw), draw.one_of(2, 3)
    layer = [decoder.Layer() for _ in range(layers)]
    table, new, old = draw_rope(draw, ("llama3", "default", "linear", "yarn") if family in ("llama", "mistral") else ("yarn", "default"), case)
    s = decoder.Spec(layer=layer, rope=[table], **sizes)
    c = dict(model_type=family, vocab_size=s.vocab, hidden_size=s.hidden, intermediate_size=s.intermediate, num_hidden_layers=layers,
             num_attention_heads=s.heads, num_key_value_heads=s.kv_heads, head_dim=s.head_dim, rms_norm_eps=s.norm_eps,
             max_position_embeddings=1024, tie_word_embeddings=s.tied, bos_token_id=None, eos_token_id=2)
    older = {}
    if family == "llama":
        s.qkv_bias = s.output_bias = c["attention_bias"] = bool(draw.below(2))
        s.mlp_bias = c["mlp_bias"] = bool(draw.below(2))
    if family == "mistral":
        window = c["sliding_window"] = draw.one_of(None, 20, 64)
        for l in layer:
            l.window = window or 0
    if family.startswith("qwen"):
        c |= dict(use_sliding_window=bool(draw.below(2)), sliding_window=29, max_window_layers=1)
        if c["use_sliding_window"]:
            for l in layer if family == "qwen3_moe" else layer[1:]:  # transformers' mixtures have the window in all layers
                l.window = 29
        s.qkv_bias = True
    if family.startswith("qwen3"):
        s.qk_norm = True
        s.qkv_bias = s.output_bias = c["attention_bias"] = bool(draw.below(2))
    if family == "qwen3_moe":
        s.experts, s.experts_per_token, s.renormalise = draw.one_of(4, 5), draw.one_of(1, 2, 3), bool(draw.below(2))
        c |= dict(num_experts=s.experts, num_experts_per_tok=s.experts_per_token, moe_intermediate_size=s.intermediate,
                  intermediate_size=999, decoder_sparse_step=1, mlp_only_layers=[])
        if s.renormalise or draw.below(2):
            c["norm_topk_prob"] = s.renormalise  # absent: false
        for l in layer:
            l.experts = True
    if family == "gemma3_text":
        layers = c["num_hidden_layers"] = 7
        s.layer = [decoder.Layer(window=0 if i % 6 == 5 else 21, rope=0 if i % 6 == 5 else 1) for i in range(layers)]
        local = draw.one_of(10000.0, 3000.0)
        table, new, old = draw_rope(draw, ("linear", "default"), case)
        s.rope = [table, decoder.RopeTable(local)]
        s.unit_offset = s.post_norm = s.qk_norm = True
        s.gate, scalar = "geglu", draw.one_of(20, 33)
        s.attention_scale, s.logit_softcap = scalar ** -0.5, draw.one_of(0.0, 25.0)
        single = bool(draw.below(2))  # bf16 files round the scale of the embedding
        root = torch.tensor(math.sqrt(s.hidden))
        s.embedding_scale = math.sqrt(s.hidden) if single else float(root.bfloat16())
        c |= dict(sliding_window=21, query_pre_attn_scalar=scalar, final_logit_softcapping=s.logit_softcap or None, attn_logit_softcapping=None,
                  hidden_activation="gelu_pytorch_tanh", torch_dtype="float32" if single else "bfloat16")
        new = dict(full_attention=new, sliding_attention=dict(rope_type="default", rope_theta=local))
        older = dict(rope_local_base_freq=local, sliding_window_pattern=6)
    else:
        c["hidden_act"] = "silu"
    return s, c | dict(rope_parameters=new), c | dict(rope_theta=old[0], rope_scaling=old[1]) | older


def names_of(s, family):
    """The name of each weight in a checkpoint, by its name in spec/decoder.py; of experts a list."""
    gemma = family == "gemma3_text"
    norms = {"attention_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm", "post_mlp_norm": "post_feedforward_layernorm",
             "mlp_norm": "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"}
    out = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
    for name in decoder.shapes(s):
        if name in out:
            continue
        l, part = name.split(".", 1)
        here, part = f"model.layers.{l}.", part.split(".")
        if part[0] in norms:
            out[name] = here + norms[part[0]] + ".weight"
        elif part[0] in ("q_norm", "k_norm"):
            out[name] = f"{here}self_attn.{part[0]}.weight"
        elif part[0] in "qkvo":
            out[name] = f"{here}self_attn.{part[0]}_proj.{part[1]}"
        elif part[0] == "router":
            out[name] = f"{here}mlp.gate.{part[1]}"
        elif s.layer[int(l)].experts:
            out[name] = [f"{here}mlp.experts.{e}.{part[0]}_proj.{part[1]}" for e in range(s.experts)]
        else:
            out[name] = f"{here}mlp.{part[0]}_proj.{part[1]}"
    return out


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, x in tensors.items():
        content = x.float().contiguous().numpy().tobytes()
        header[name] = dict(dtype="F32", shape=list(x.shape), data_offsets=[len(data), len(data) + len(content)])
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_model(directory, s, weights, config, family):
    directory.mkdir()
    tensors = {}
    for name, where in names_of(s, family).items():
        if name == "head" and s.tied:
            continue
        if isinstance(where, list):
            tensors.update(zip(where, weights[name]))
        else:
            tensors[where] = weights[name]
    write_safetensors(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps(config))


def losses_of_ingot(program, path, lists, directory):
    file = directory / "ids.jsonl"
    file.write_text("".join(json.dumps(ids) + "\n" for ids in lists))
    done = subprocess.run([program, "eval", "--model", path, "--ids", file, "--device", "cpu", "--json"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{path}: {done.stderr}")
    return [torch.tensor(q["losses"], dtype=torch.float64) for q in json.loads(done.stdout)["sequences"]]


def main():
    parser = parity_peers.parser(__doc__)
    parser.add_argument("program")
    parser.add_argument("--cases", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    failures, groups = 0, set()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for family in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text"):
            worst = 0.0
            for case in range(options.cases if options.only in ("", family) else 0):
                draw = Draw(options.seed * 1000003 + case * 101 + sum(map(ord, family)))
                s, new, old = draw_case(family, draw, case)
                groups.add(s.heads // s.kv_heads)
                weights = decoder.random_weights(s, draw.generator)
                lists = [torch.randint(s.vocab, (n,), generator=draw.generator).tolist() for n in LENGTHS]
                expected = [decoder.losses(s, weights, ids) for ids in lists]
                path = root / f"{family}-{case}"
                write_model(path, s, weights, old if draw.below(2) else new, family)
                found = losses_of_ingot(options.program, path, lists, root)
                difference = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
                worst = max(worst, difference)
                if not difference <= LIMIT:
                    failures += 1
                    print(f"{family}, case {case}: worst difference {difference:.1e}, expected at most {LIMIT}: {s}")
            print(f"{family:12} worst difference {worst:.1e}", flush=True)
    print("queries for each key: " + ", ".join(map(str, sorted(groups))))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
