#!/usr/bin/env python3
"""GPT-OSS in GGUF files, written by PyPI's `gguf` package, against the same weights as safetensors and against the definition.

    parity_gguf.py BUILD/parity_gpt_oss BUILD/parity_tokenizer BUILD/ingot [--skip-without-peers]

One random checkpoint, MXFP4 experts and bf16 otherwise, under llama.cpp's names, split or not. Types that hold the numbers exactly (BF16 and
MXFP4) give the same bits as the safetensors; F32 and F16, for which products add in another order, the same losses to rounding. Q8_0 gives the
losses of the definition with the numbers that the package itself decodes, rounded to bf16, and these losses differ from the original's by the error
of Q8_0 in the definition. Dense matrices of 4 and 5 bits around MXFP4 experts give the definition's logits with the numbers that the package decodes.
The tokenizer inside gives the ids of the tokenizer.json of the same rules.
"""
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import parity_peers

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "spec"))
with parity_peers.required():
    import gguf
    import numpy as np
    import tokenizers  # noqa: F401
    import torch
    import transformers  # noqa: F401

import gpt_oss as spec  # noqa: E402
import parity_gpt_oss as checkpoints  # noqa: E402
import parity_tokenizer as vocabularies  # noqa: E402

TYPES = gguf.GGMLQuantizationType
SIZES = checkpoints.PUBLISHED | dict(num_hidden_layers=2)
NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "mlp.router": "ffn_gate_inp", "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"}


# --- files -------------------------------------------------------------------------------------------------------------
def new_name(name):
    """llama.cpp's name of a tensor that is not an expert's."""
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    if name in top:
        return top[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    if rest == "self_attn.sinks":
        return f"blk.{layer}.attn_sinks.weight"
    what, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{NAMES[what]}.{kind}"


def mxfp4_rows(blocks, scales):
    """(E, N, K/32, 16) and (E, N, K/32) as ggml's blocks: a scale, then number 0 with 16, 1 with 17, ..."""
    numbers = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    packed = numbers[..., :16] | numbers[..., 16:] << 4
    return torch.cat([scales.unsqueeze(-1), packed], -1).flatten(-2).contiguous().numpy()


def write_gguf(path, tensors, dense, experts, split=0, vocabulary=None):
    w = gguf.GGUFWriter(path, "gpt-oss", split_max_tensors=split)
    s = SIZES
    w.add_context_length(s["max_position_embeddings"])
    w.add_embedding_length(s["hidden_size"])
    w.add_block_count(s["num_hidden_layers"])
    w.add_feed_forward_length(s["intermediate_size"])
    w.add_expert_feed_forward_length(s["intermediate_size"])
    w.add_head_count(s["num_attention_heads"])
    w.add_head_count_kv(s["num_key_value_heads"])
    w.add_key_length(s["head_dim"])
    w.add_value_length(s["head_dim"])
    w.add_sliding_window(s["sliding_window"])
    w.add_expert_count(s["num_local_experts"])
    w.add_expert_used_count(s["num_experts_per_tok"])
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(150000.0)
    w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    w.add_rope_scaling_factor(32.0)
    w.add_rope_scaling_orig_ctx_len(4096)
    w.add_quantization_version(2)
    if vocabulary:
        vocabulary(w)

    def put(name, t, kind):
        if kind == TYPES.F32:
            return w.add_tensor(name, np.ascontiguousarray(t.float().numpy()))
        w.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(t.float().numpy()), kind), raw_dtype=kind)

    def put_experts(name, blocks, scales):
        if experts == TYPES.MXFP4:
            w.add_tensor(name, mxfp4_rows(blocks, scales), raw_dtype=TYPES.MXFP4)
        else:
            put(name, spec.mxfp4_decode(blocks, scales, torch.float32), experts)

    for name, t in tensors.items():
        if name.endswith(("_blocks", "_scales")):
            if name.endswith("_scales"):
                continue
            blocks, scales = t, tensors[name.replace("_blocks", "_scales")]
            layer = name.split(".")[2]
            if "down_proj" in name:
                put_experts(f"blk.{layer}.ffn_down_exps.weight", blocks, scales)
            else:
                put_experts(f"blk.{layer}.ffn_gate_exps.weight", blocks[:, ::2], scales[:, ::2])
                put_experts(f"blk.{layer}.ffn_up_exps.weight", blocks[:, 1::2], scales[:, 1::2])
        elif "experts" in name:
            layer = name.split(".")[2]
            if "down_proj" in name:
                put(f"blk.{layer}.ffn_down_exps.bias", t, TYPES.F32)
            else:
                put(f"blk.{layer}.ffn_gate_exps.bias", t[:, ::2], TYPES.F32)
                put(f"blk.{layer}.ffn_up_exps.bias", t[:, 1::2], TYPES.F32)
        else:
            put(new_name(name), t, dense if t.dim() == 2 else TYPES.F32)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def as_decoded(tensors, dense, experts):
    """The tensors as the package decodes them, rounded to bf16, under Hugging Face's names: the definition's weights for that file."""
    def again(t, kind):
        rows = np.ascontiguousarray(t.float().numpy())
        return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind).reshape(rows.shape)).bfloat16()

    out = {}
    for name, t in tensors.items():
        if name.endswith("_blocks"):
            wide = spec.mxfp4_decode(t, tensors[name.replace("_blocks", "_scales")], torch.float32)
            out[name.removesuffix("_blocks")] = again(wide, experts).transpose(1, 2).contiguous()
        elif not name.endswith("_scales"):
            out[name] = again(t, dense) if t.dim() == 2 and "experts" not in name else t
    return out


# --- losses ------------------------------------------------------------------------------------------------------------
def native_logits(program, path, ids):
    with tempfile.TemporaryDirectory() as temporary:
        asked, found = Path(temporary) / "cases.json", Path(temporary) / "out.f32"
        asked.write_text(json.dumps(dict(cases=[dict(ids=ids, rows=list(range(len(ids))), greedy=0, batches=[64])], layers=0)))
        subprocess.run([program, str(path), str(asked), str(found)], check=True)
        return torch.from_numpy(np.fromfile(found, "<f4")).view(len(ids), -1).double()


def losses(logits, ids):
    return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")


def model_files(report, program, ingot, root):
    model = checkpoints.random_model(SIZES, 11)
    tensors = checkpoints.published_tensors(model)
    checkpoints.write_sharded(tensors, checkpoints.published_config(model), root / "hf", 2)
    ids = torch.randint(SIZES["vocab_size"], (200,), generator=torch.Generator().manual_seed(3)).tolist()
    config = spec.read_config(root / "hf")

    def defined(directory, dtype):
        with torch.no_grad():
            return spec.logits(config, spec.read_weights(directory, config, dtype), ids).double()

    want = native_logits(program, root / "hf", ids)
    exact = defined(root / "hf", torch.float64)
    own = checkpoints.distance(defined(root / "hf", torch.float32), exact)
    limit = checkpoints.native_limit(own)
    report.add("safetensors: native - definition", checkpoints.distance(want, exact), limit)

    def file(name, *types, **more):
        write_gguf(root / f"{name}.gguf", tensors, *types, **more)
        return root / f"{name}.gguf"

    for name, more in (("mxfp4", {}), ("split", dict(split=7))):
        path = file(name, TYPES.BF16, TYPES.MXFP4, **more)
        if more:
            parts = sorted(root.glob("split-*.gguf"))
            assert len(parts) > 3, "expected several parts"
            path = parts[0]
        report.add(f"BF16 and MXFP4, {name}: bit for bit", float(not torch.equal(native_logits(program, path, ids), want)), 0.0)
        archive = root / f"{name}.ingot"
        subprocess.run([ingot, "convert", str(path), str(archive)], check=True, stdout=subprocess.DEVNULL)
        subprocess.run([ingot, "convert", str(root / "hf"), str(root / "hf.ingot")], check=True, stdout=subprocess.DEVNULL)
        report.add(f"{name}, converted: bit for bit",
                   float(not torch.equal(native_logits(program, archive, ids), native_logits(program, root / "hf.ingot", ids))), 0.0)
    for kind in (TYPES.F32, TYPES.F16):
        found = native_logits(program, file(kind.name, kind, kind), ids)
        # F16 keeps bf16's numbers, except for numbers below 2^-14, where the error is up to 2^-25: less than fp32's error in sums over a row.
        report.add(f"{kind.name}: native - definition", checkpoints.distance(found, exact), limit)

    found = native_logits(program, file("q8", TYPES.Q8_0, TYPES.Q8_0), ids)
    decoded = as_decoded(tensors, TYPES.Q8_0, TYPES.Q8_0)
    checkpoints.write_sharded(decoded, checkpoints.published_config(model), root / "decoded", 1)
    expected = defined(root / "decoded", torch.float64)
    report.add("Q8_0: native - definition of what the package decodes", checkpoints.distance(found, expected), limit)
    cost = float((losses(expected, ids) - losses(exact, ids)).abs().mean())
    mean = float((losses(found, ids) - losses(want, ids)).abs().mean())
    print(f"       Q8_0 costs the definition {cost:.2e} of loss a token")
    # A row's logits differ by at most the limit of their norm, and a loss by at most twice the largest difference.
    slack = 2 * 2 * limit * float(exact.norm(dim=-1).max())
    report.add("Q8_0: losses differ by what it costs the definition", abs(mean - cost), slack)
    mixed = native_logits(program, file("published", TYPES.Q8_0, TYPES.MXFP4), ids)
    checkpoints.write_sharded({n: t for n, t in decoded.items() if "experts." not in n} | {n: t for n, t in tensors.items() if "experts." in n},
                              checkpoints.published_config(model), root / "published", 1)
    report.add("Q8_0 and MXFP4, as published: native - definition", checkpoints.distance(mixed, defined(root / "published", torch.float64)), limit)

    # Smaller types of dense matrices around MXFP4 experts. Experts keep their own bits, as the file holds these unchanged.
    for kind in (TYPES.Q4_0, TYPES.Q4_1, TYPES.Q5_0, TYPES.Q5_1):
        found = native_logits(program, file(kind.name, kind, TYPES.MXFP4), ids)
        dense = {n: t for n, t in as_decoded(tensors, kind, TYPES.Q8_0).items() if "experts." not in n}
        checkpoints.write_sharded(dense | {n: t for n, t in tensors.items() if "experts." in n}, checkpoints.published_config(model), root / kind.name, 1)
        report.add(f"{kind.name} and MXFP4: native - definition of what the package decodes",
                   checkpoints.distance(found, defined(root / kind.name, torch.float64)), limit)
    info = json.loads(subprocess.run([ingot, "info", "--json", str(root / "published.gguf")], check=True, capture_output=True, text=True).stdout)
    report.add("info counts the types", float(set(info["types"]) != {"F32", "MXFP4", "Q8_0"}), 0.0)


# --- the tokenizer -----------------------------------------------------------------------------------------------------
def tokenizer_files(report, program, root):
    rng = random.Random(5)
    texts = vocabularies.texts_of(rng, 800)
    learned = root / "learned.json"
    subprocess.run([program, "--train", "3000", str(learned)], input=vocabularies.frames(texts), check=True)
    vocab = json.loads(learned.read_text())["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    ranks = {bytes(vocabularies.BYTE_OF[c] for c in t): i for i, t in enumerate(tokens)}
    _, path = vocabularies.write_forms(ranks, root)
    published = json.loads(Path(path).read_text())
    specials = [t["content"] for t in published["added_tokens"]]

    def vocabulary(w):
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre("gpt-4o")
        w.add_token_list([*published["model"]["vocab"], *specials, "[PAD]"])
        w.add_token_types([gguf.TokenType.NORMAL] * len(ranks) + [gguf.TokenType.CONTROL] * len(specials) + [gguf.TokenType.UNUSED])
        w.add_token_merges([" ".join(m) for m in published["model"]["merges"]])

    w = gguf.GGUFWriter(root / "vocabulary.gguf", "gpt-oss")
    vocabulary(w)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()
    (root / "tokenizer.json").write_text(Path(path).read_text())
    found, want = (vocabularies.ours(program, str(p), texts) for p in (root / "vocabulary.gguf", path))
    report.add(f"the tokenizer inside: {len(texts)} texts, ids that differ", float(sum(a != b for a, b in zip(found, want, strict=True))), 0.0)
    return dict(vocab_size=len(ranks) + len(specials) + 1), vocabulary


def answers(report, ingot, root, sizes, vocabulary):
    """A question through the tokenizer of each form: the file's own, that of its archive, and the one beside the safetensors."""
    names = json.loads((root / "tokenizer.json").read_text())["added_tokens"]
    ends = [t["id"] for name in ("<|return|>", "<|endoftext|>", "<|call|>") for t in names if t["content"] == name]
    SIZES.update(sizes)
    model = checkpoints.random_model(SIZES, 12)
    tensors = checkpoints.published_tensors(model)
    checkpoints.write_sharded(tensors, checkpoints.published_config(model) | dict(eos_token_id=ends), root / "model", 1)
    (root / "tokenizer.json").rename(root / "model" / "tokenizer.json")
    write_gguf(root / "model.gguf", tensors, TYPES.BF16, TYPES.MXFP4, vocabulary=vocabulary)
    (root / "alone").mkdir()
    (root / "alone" / "model.gguf").hardlink_to(root / "model.gguf")
    subprocess.run([ingot, "convert", str(root / "alone"), str(root / "model.ingot")], check=True, stdout=subprocess.DEVNULL)
    for command in (["generate", "--prompt", "Hello, world", "--tokens", "12", "--temperature", "0", "--json", "--date", "2026-01-01"],):
        said = []
        for path in ("model", "model.gguf", "alone", "model.ingot"):
            done = subprocess.run([ingot, *command, "--model", str(root / path)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            found = json.loads(done.stdout)
            said.append({k: v for k, v in found.items() if "second" not in k and "per" not in k and "load" not in k})
        report.add("a question is answered alike by every form", float(any(s != said[0] for s in said)), 0.0)
    text = root / "text.txt"
    text.write_text("Hello, world. " * 40)
    scored = [json.loads(subprocess.run([ingot, "eval", "--data", str(text), "--context", "50", "--stride", "20", "--json", "--model", str(root / path)],
                                        check=True, capture_output=True, text=True).stdout) for path in ("model", "alone", "model.ingot")]
    report.add("text has the same loss under each", max(abs(s["loss"] - scored[0]["loss"]) for s in scored), 1e-5)
    report.add("and as many tokens", float(any(s["targets"] != scored[0]["targets"] for s in scored)), 0.0)


def main():
    parser = parity_peers.parser(__doc__)
    parser.add_argument("model", help="target `parity_gpt_oss`")
    parser.add_argument("tokenizer", help="target `parity_tokenizer`")
    parser.add_argument("ingot", help="the program")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = checkpoints.Report()
    with tempfile.TemporaryDirectory() as temporary:
        sizes, vocabulary = tokenizer_files(report, args.tokenizer, Path(temporary))
        model_files(report, args.model, args.ingot, Path(temporary))
        answers(report, args.ingot, Path(temporary), sizes, vocabulary)
    print(f"{report.passed} passed, {report.failed} failed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
