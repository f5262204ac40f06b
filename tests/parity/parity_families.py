#!/usr/bin/env python3
"""The families of decoders against Hugging Face transformers, on small random checkpoints.

    parity_families.py BUILD/ingot [--only NAME] [--keep DIR] [--device cpu|cuda] [--skip-without-peers]

For each family transformers makes models with random weights, random weights of norms and random biases, and saves them in f32. Ingot
reads the directory, an archive in bf16 and, where the package gguf is installed, a GGUF file with the same numbers (queries and keys permuted as llama.cpp
does, llama3's divisors as a tensor), and scores random ids on the CPU (`ingot eval --ids`). The loss at every position must be within
2e-3 of transformers' in fp32: rounding is some 1e-5, and every fault of the architecture is far more. With --device cuda weights and
inputs of products are bf16: the differences must be no larger, in the mean and at the most, than those of transformers in bf16, whose
residual stream is bf16 too. Models that no GPU path computes must be refused.
Sizes are chosen so that nothing agrees by chance: head_dim is not hidden / heads, queries share a key in groups of 1, 3 and 7, the
contexts reach past the original length of a scaled RoPE, heads are tied and untied, and config.json is in the old and the new spelling.
"""
import copy
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import parity_peers

LIMIT = 2e-3
with parity_peers.required():
    import numpy as np
    import torch
    import transformers
try:
    import gguf
except ImportError:
    gguf = None

COMMON = dict(vocab_size=151, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
              head_dim=16, max_position_embeddings=1024, bos_token_id=1, eos_token_id=2, pad_token_id=None)
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", rope_theta=1000000.0, factor=4.0, original_max_position_embeddings=64)

# name: (config class, its arguments, the architecture of its GGUF file)
CASES = {
    "llama": ("LlamaConfig", dict(num_key_value_heads=2, rms_norm_eps=1e-5), "llama"),
    "llama3": ("LlamaConfig", dict(num_key_value_heads=6, rope_parameters=LLAMA3, tie_word_embeddings=True), "llama"),
    "llama_biases": ("LlamaConfig", dict(hidden_size=56, num_attention_heads=7, num_key_value_heads=1, head_dim=24, attention_bias=True,
                                          mlp_bias=True), None),
    "llama_linear": ("LlamaConfig", dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0)), "llama"),
    "mistral": ("MistralConfig", dict(sliding_window=None, rms_norm_eps=1e-5), "llama"),
    "mistral_window": ("MistralConfig", dict(sliding_window=40), None),
    "qwen2": ("Qwen2Config", dict(), "qwen2"),
    "qwen2_window": ("Qwen2Config", dict(use_sliding_window=True, sliding_window=50, max_window_layers=1), None),
    "qwen3": ("Qwen3Config", dict(head_dim=32, tie_word_embeddings=True), "qwen3"),
    "qwen3_biases": ("Qwen3Config", dict(attention_bias=True, rope_parameters=YARN), None),
    "qwen3_yarn": ("Qwen3Config", dict(rope_parameters=YARN | dict(beta_fast=12.0, beta_slow=2.0)), "qwen3"),
    "qwen3_moe": ("Qwen3MoeConfig", dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True), "qwen3moe"),
    "qwen3_moe_window": ("Qwen3MoeConfig", dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True, use_sliding_window=True,
                                                sliding_window=30, max_window_layers=2), None),
    "qwen3_moe_sums": ("Qwen3MoeConfig", dict(num_experts=5, num_experts_per_tok=3, moe_intermediate_size=32, norm_topk_prob=False), None),
    "gemma3": ("Gemma3TextConfig", dict(num_hidden_layers=7, sliding_window=33, query_pre_attn_scalar=20, tie_word_embeddings=True), None),
    "gemma3_gguf": ("Gemma3TextConfig", dict(num_hidden_layers=7, hidden_size=64, num_attention_heads=8, sliding_window=33,
                                             query_pre_attn_scalar=16, final_logit_softcapping=30.0), "gemma3"),
    "llama_yarn": ("LlamaConfig", dict(rope_parameters=YARN | dict(rope_theta=10000.0)), None),
}


def random_model(name):
    """Every parameter random, at a scale that gives logits of standard deviation 2 and more."""
    config_class, sizes, _ = CASES[name]
    torch.manual_seed(len(name) * 1000 + sum(map(ord, name)))
    config = getattr(transformers, config_class)(**(COMMON | sizes))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    unit = 0.0 if "Gemma" in config_class else 1.0  # Gemma multiplies by 1 + w
    with torch.no_grad():
        for parameter, p in model.named_parameters():
            if "norm" in parameter:
                p.copy_(torch.randn(p.shape) * 0.3 + unit)
            elif p.dim() == 1:
                p.copy_(torch.randn(p.shape) * 0.3)
            else:
                p.copy_(torch.randn(p.shape) * (1.0 if "embed" in parameter else 1.5 / p.shape[-1] ** 0.5))
            p.copy_(p.bfloat16())  # for the same numbers in an archive in bf16
    return model.float().eval()


def in_the_old_spelling(config):
    """The config in the spelling of versions before transformers 5: rope_theta and rope_scaling stand beside the sizes."""
    rope = dict(config.pop("rope_parameters"))
    if "full_attention" in rope:
        config["rope_theta"] = rope["full_attention"]["rope_theta"]
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        scaling = {k: v for k, v in rope["full_attention"].items() if k != "rope_theta"}
    else:
        config["rope_theta"] = rope.pop("rope_theta")
        scaling = rope
    config["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    config.pop("layer_types", None)
    return config


def write_gguf(model, architecture, path):
    c = model.config
    w = gguf.GGUFWriter(path, architecture)
    w.add_block_count(c.num_hidden_layers)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_key_length(c.head_dim)
    w.add_value_length(c.head_dim)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    rope = c.rope_parameters.get("full_attention", c.rope_parameters)
    w.add_rope_freq_base(rope["rope_theta"])
    w.add_rope_dimension_count(c.head_dim)
    if rope["rope_type"] in ("linear", "yarn"):
        w.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        w.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        w.add_rope_scaling_orig_ctx_len(int(rope["original_max_position_embeddings"]))
        for name in {"beta_fast", "beta_slow"} & rope.keys():
            w.add_float32(f"{architecture}.rope.scaling.yarn_{name}", rope[name])
    if rope["rope_type"] == "llama3":
        w.add_tensor("rope_freqs.weight", llama3_divisors(rope, c.head_dim))
    if architecture == "qwen3moe":
        w.add_expert_count(c.num_experts)
        w.add_expert_used_count(c.num_experts_per_tok)
        w.add_expert_feed_forward_length(c.moe_intermediate_size)
    if architecture == "gemma3":
        w.add_sliding_window(c.sliding_window)
        w.add_rope_freq_base_swa(c.rope_parameters["sliding_attention"]["rope_theta"])
        w.add_final_logit_softcapping(c.final_logit_softcapping)
    w.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH_NAMES and
                                     next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == architecture), c.num_hidden_layers)
    for name, p in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        x = p.float().numpy()
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = c.num_attention_heads if ".q_proj." in name else c.num_key_value_heads
            x = x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
        if name.endswith("experts.gate_up_proj"):  # gate above up
            layer = f"blk.{name.split('.')[2]}."
            for part, rows in (("gate", slice(None, c.moe_intermediate_size)), ("up", slice(c.moe_intermediate_size, None))):
                w.add_tensor(f"{layer}ffn_{part}_exps.weight", np.ascontiguousarray(x[:, rows]))
            continue
        if name.endswith("experts.down_proj"):
            w.add_tensor(f"blk.{name.split('.')[2]}.ffn_down_exps.weight", x)
            continue
        if architecture == "gemma3" and "norm" in name:
            x = x + 1
        w.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(x))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def llama3_divisors(rope, dim):
    frequency = rope["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    turns = rope["original_max_position_embeddings"] * frequency / (2 * np.pi)
    share = np.clip((turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"]), 0, 1)
    return (1 / ((1 - share) / rope["factor"] + share)).astype(np.float32)


def losses_of_transformers(model, lists):
    out = []
    for ids in lists:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1].double()
        out.append(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").numpy())
    return out


def losses_of_ingot(program, path, lists, directory, device):
    file = directory / "ids.jsonl"
    file.write_text("".join(json.dumps(ids) + "\n" for ids in lists))
    done = subprocess.run([program, "eval", "--model", path, "--ids", file, "--device", device, "--json"], capture_output=True, text=True)
    if device == "cuda" and "not renormalised" in done.stderr:
        return None
    if done.returncode != 0:
        sys.exit(f"{path}: {done.stderr}")
    return [np.array(s["losses"]) for s in json.loads(done.stdout)["sequences"]]


def largest_and_mean(found, expected):
    differences = np.concatenate([np.abs(a - b) for a, b in zip(found, expected)])
    return differences.max(), differences.mean()


def main():
    parser = parity_peers.parser(__doc__)
    parser.add_argument("program")
    parser.add_argument("--only", default="")
    parser.add_argument("--keep")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(options.keep or temporary)
        for name in CASES:
            if options.only and options.only != name:
                continue
            model = random_model(name)
            lists = [torch.randint(0, COMMON["vocab_size"], (n,)).tolist() for n in (2, 127, 130, 300)]
            expected = losses_of_transformers(model, lists)
            limit = mean_limit = LIMIT
            if options.device == "cuda":
                limit, mean_limit = largest_and_mean(losses_of_transformers(copy.deepcopy(model).bfloat16(), lists), expected)
            directory = root / name
            model.save_pretrained(directory)
            forms = {"new spelling": directory}
            config = json.loads((directory / "config.json").read_text())
            older = root / (name + "-old")
            older.mkdir(exist_ok=True)
            (older / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
            (older / "config.json").write_text(json.dumps(in_the_old_spelling(config)))
            forms["old spelling"] = older
            if gguf and CASES[name][2]:
                forms["gguf"] = root / (name + ".gguf")
                write_gguf(model, CASES[name][2], forms["gguf"])
            forms["archive"] = root / (name + ".ingot")
            subprocess.run([options.program, "convert", directory, forms["archive"]], check=True, capture_output=True)
            for form, path in forms.items():
                found = losses_of_ingot(options.program, path, lists, root, options.device)
                if found is None:
                    refused = name == "qwen3_moe_sums"
                    failures += not refused
                    print(f"{name:20} {form:14} refused" + ("" if refused else "  FAILED: expected losses"), flush=True)
                    continue
                worst, mean = largest_and_mean(found, expected)
                passed = worst <= limit and mean <= mean_limit
                failures += not passed
                print(f"{name:20} {form:14} worst difference {worst:.1e}, mean {mean:.1e}, losses {expected[-1].min():.2f} to "
                      f"{expected[-1].max():.2f}" + ("" if passed else f"  FAILED: expected at most {limit:.1e}, mean {mean_limit:.1e}"),
                      flush=True)
    if gguf is None:
        print("GGUF files were not compared: the package gguf is not installed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
