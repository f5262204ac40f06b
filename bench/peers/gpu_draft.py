"""A token of GPT-OSS with drafts on a GPU, with random weights of the published shapes: `ingot bench draft`, whose drafts are right as often as asked,
beside the same answers without drafts. Writes bench/results/<gpu>/draft.json.

    python3 bench/peers/gpu_draft.py --native build/cuda/libingot_bench.so [--ingot build/cuda/ingot] [--only TEXT] [--quick]

The limit is one reading of a token's weights and keys for each step, divided by the tokens that a step yields; the further experts of a step's rows
are not counted. A time covers all tokens after the prompt. `ingot bench draft` ends with an error where an answer with drafts differs from that of
draft steps without a draft.
"""
import json
import subprocess

import torch

from gpu_common import Native, ceilings, gpu_state, parsed, picked, program_options, write_report

MODELS = [dict(size="120b", dense="bf16"), dict(size="20b", dense="bf16")]
CONTEXT, TOKENS = 1024, 512
LENGTHS, ACCEPTED = "3,7", "80"
WITHOUT = "no drafts"  # as `ingot bench draft` names the case
CASES = 6


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


def said(r):
    return (f"{r['name']:70} {r['ours_us'] / 1e3:8.4f} ms a token, {r['tokens_per_step']:.2f} tokens a step, {100 * r['limit_us'] / r['ours_us']:3.0f} % of the limit"
            + "".join(f", {k} {v / 1e3:.4f}" for k, v in r["peers"].items()))


def main():
    options = parsed(program_options("model"))
    ceiling = ceilings(Native(options.native))
    torch.cuda.empty_cache()
    chosen = picked(MODELS, options, label)
    results, before = [], gpu_state()
    for model in chosen:
        alone = ask(options.ingot, "decode", model, "--tokens", "20", "--megakernel", "--kernels-alone")
        drafts = ask(options.ingot, "draft", model, "--tokens", str(TOKENS), "--lengths", LENGTHS, "--accepted", ACCEPTED)
        for r in rows(model, drafts, alone["token_bytes"], ceiling["read_TBps"]):
            results.append(r)
            print(said(r), flush=True)
        if not (options.only or options.quick):
            write_report("draft", results, ceiling, {"clocks": {"fields": "SM MHz, memory MHz, W, C", "before": before, "after": gpu_state()}}, cases=CASES * len(chosen))


if __name__ == "__main__":
    main()
