"""A token of GPT-OSS with drafts on a GPU, with random weights of the published shapes: `ingot bench draft`, whose drafts are right as often as asked,
beside the same answers without drafts. Writes bench/results/<gpu>/draft.json.

    python3 bench/peers/gpu_draft.py --native build/cuda/libingot_bench.so [--ingot build/cuda/ingot] [--only TEXT] [--quick]

The limit is one reading of a token's weights and keys for each step, divided by the tokens that a step yields; the further experts of a step's rows
are not counted. A time covers all tokens after the prompt. `ingot bench draft` ends with an error where an answer with drafts and --draft-exact
differs from that of draft steps without a draft.

Beside these, a guess of a draft head of the published sizes (random weights, 32,000 ids, hidden states of three layers) in each format of its
matrices, a seventh of the time of a draft of 7. Its limit is one reading of the matrices that a guess multiplies.
"""
import json
import pathlib
import subprocess
import tempfile

import torch

from gpu_common import Native, begin, ceilings, measure_each, parsed, program_options

MODELS = [dict(size="120b", dense="bf16"), dict(size="20b", dense="bf16")]
CONTEXT, TOKENS = 1024, 512
LENGTHS, ACCEPTED = "3,7", "80"
WITHOUT = "no drafts"  # as `ingot bench draft` names the case
# A head of GPT-OSS as published: numbers, and the matrices that a guess multiplies (fc is multiplied once a token of the model).
HEAD = dict(architectures=["LlamaForCausalLMEagle3"], model_type="llama", hidden_size=2880, intermediate_size=17280, num_hidden_layers=1, num_attention_heads=64,
            num_key_value_heads=8, head_dim=64, rms_norm_eps=1e-5, hidden_act="silu", vocab_size=201088, draft_vocab_size=32000, rope_theta=10000.0)
HEAD_FORMATS = {"bf16": 2.0, "fp8": 1.0, "mxfp4": 17 / 32}  # bytes of a number, without fp8's scales of rows


def label(model):
    return f"gpt-oss-{model['size']}, {model['dense']} dense"


def ask(ingot, what, model, *more):
    line = [str(ingot), "bench", what, "--synthetic", model["size"], "--dense", model["dense"], "--context", str(CONTEXT), *more, "--json"]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{label(model)}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def rows(model, drafts, bytes_of_token, read_TBps):
    """The report's rows for a model."""
    without = next(c["token_ms"] for c in drafts["cases"] if c["name"] == WITHOUT)
    return [{"name": f"{label(model)}, {c['name']}", "shape": [CONTEXT, TOKENS], "dtype": f"{model['dense']}, mxfp4", "ours_us": 1e3 * c["token_ms"],
             "peers": {} if c["name"] == WITHOUT else {"no_drafts": 1e3 * without}, "limit_us": bytes_of_token / read_TBps * 1e-6 / c["tokens_per_step"],
             "tokens_per_step": c["tokens_per_step"], "draft_tokens": c["draft_tokens"], "accepted_tokens": c["accepted_tokens"], "step_costs_ms": drafts["step_costs"]}
            for c in drafts["cases"]]


def write_head(directory, hidden_layers):
    """A head with random weights; returns the numbers that a guess multiplies."""
    from safetensors.torch import save_file
    h = HEAD
    C, I, Q, KV, V = h["hidden_size"], h["intermediate_size"], h["num_attention_heads"] * h["head_dim"], h["num_key_value_heads"] * h["head_dim"], h["draft_vocab_size"]
    n, boundaries = "midlayer.", [2, hidden_layers // 2, hidden_layers - 3]
    matrices = {n + "self_attn.q_proj": (Q, 2 * C), n + "self_attn.k_proj": (KV, 2 * C), n + "self_attn.v_proj": (KV, 2 * C), n + "self_attn.o_proj": (C, Q),
                n + "mlp.gate_proj": (I, C), n + "mlp.up_proj": (I, C), n + "mlp.down_proj": (C, I), "lm_head": (V, C)}
    random = torch.Generator().manual_seed(1)
    tensors = {f"{name}.weight": (torch.randn(shape, generator=random) / shape[1] ** 0.5).bfloat16() for name, shape in (matrices | {"fc": (C, 3 * C)}).items()}
    tensors |= {f"{name}.weight": torch.ones(C, dtype=torch.bfloat16) for name in (n + "input_layernorm", n + "hidden_norm", n + "post_attention_layernorm", "norm")}
    tensors["d2t"] = 6 * torch.arange(V) - torch.arange(V)
    pathlib.Path(directory, "config.json").write_text(json.dumps(h | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": boundaries, "use_aux_hidden_state": True}}))
    save_file(tensors, pathlib.Path(directory, "model.safetensors"))
    return sum(rows * cols for rows, cols in matrices.values())


def head_row(model, form, guess_ms, numbers, read_TBps):
    """The report's row for a guess."""
    return {"name": f"{label(model)}, a guess of a draft head in {form}", "shape": [1, HEAD["hidden_size"], HEAD["intermediate_size"], HEAD["draft_vocab_size"]], "dtype": form,
            "ours_us": 1e3 * guess_ms, "peers": {}, "limit_us": numbers * HEAD_FORMATS[form] / read_TBps * 1e-6}


def said_of_head(r):
    return f"{r['name']:70} {r['ours_us'] / 1e3:8.4f} ms, {100 * r['limit_us'] / r['ours_us']:3.0f} % of the limit"


def said(r):
    return (f"{r['name']:70} {r['ours_us'] / 1e3:8.4f} ms a token, {r['tokens_per_step']:.2f} tokens a step, {100 * r['limit_us'] / r['ours_us']:3.0f} % of the limit"
            + "".join(f", {k} {v / 1e3:.4f}" for k, v in r["peers"].items()))


def heads_of(options, model, read_TBps):
    found = []
    with tempfile.TemporaryDirectory() as directory:
        numbers = write_head(directory, {"120b": 36, "20b": 24}[model["size"]])
        for form in HEAD_FORMATS:
            drafts = ask(options.ingot, "draft", model, "--tokens", "16", "--lengths", "7", "--draft", directory, "--draft-dense", form)
            found.append(head_row(model, form, drafts["guess_cost"], numbers, read_TBps))
    return found


def main():
    options = parsed(program_options("model"))

    def measure(model, ceiling):
        alone = ask(options.ingot, "decode", model, "--tokens", "20", "--megakernel", "--kernels-alone")
        drafts = ask(options.ingot, "draft", model, "--tokens", str(TOKENS), "--lengths", LENGTHS, "--accepted", ACCEPTED)
        return [*rows(model, drafts, alone["token_bytes"], ceiling["read_TBps"]), *heads_of(options, model, ceiling["read_TBps"])]
    measure_each(begin("draft", options, MODELS, label), lambda: ceilings(Native(options.native)), measure, lambda r: said(r) if "tokens_per_step" in r else said_of_head(r))


if __name__ == "__main__":
    main()
