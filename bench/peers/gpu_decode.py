"""A token of GPT-OSS on a GPU, by one kernel and by a launch a phase, with random weights of the published shapes: `ingot bench decode`
for every context and format, and whole answers from prompt to end. Writes bench/results/<gpu>/decode.json.

    python3 bench/peers/gpu_decode.py --native build/cuda/libingot_bench.so [--ingot build/cuda/ingot] [--only TEXT] [--quick]

The limit is the bytes of weights and keys that a token reads, at what memory gives a kernel that only reads, in the same process.
What a token computes is tested (models/gpt_oss/decode/decode.cuda.test.cpp): through all layers of random weights a rounding decides
which experts are taken, and two right answers differ.
"""
import argparse
import json
import pathlib
import subprocess

import torch

from gpu_common import Native, ceilings, gpu_state, write_report

CONTEXTS = {("120b", "bf16"): (128, 1024, 8192, 32768, 130000), ("120b", "fp8"): (1024,), ("120b", "mxfp4"): (1024, 32768),
            ("20b", "bf16"): (1024, 8192), ("20b", "fp8"): (1024,), ("20b", "mxfp4"): (1024,)}
ANSWERS = ((100, 100), (1024, 100), (1024, 1024), (2048, 2048))


def cases():
    out = [dict(size=size, dense=dense, context=min(context, 130000), tokens=200, prompt=False)
           for (size, dense), contexts in CONTEXTS.items() for context in contexts]
    return out + [dict(size="120b", dense="bf16", context=a, tokens=b, prompt=True) for a, b in ANSWERS]


def label(case):
    what = f"gpt-oss-{case['size']}, {case['dense']} dense"
    return what + (f", answers of {case['tokens']}" if case["prompt"] else "")


def measure(case, ingot):
    line = [str(ingot), "bench", "decode", "--synthetic", case["size"], "--dense", case["dense"], "--context", str(case["context"]),
            "--tokens", str(case["tokens"]), "--json"] + (["--prompt"] if case["prompt"] else [])
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{label(case)}: {done.stderr.strip()}")
    found = json.loads(done.stdout)
    ours, phased = found["token"]["megakernel"], found["token"]["phased"]
    result = {"name": label(case), "shape": [case["context"]], "dtype": f"{case['dense']}, mxfp4", "ours_us": 1e3 * ours["mean_ms"],
              "peers": {"phased": 1e3 * phased["mean_ms"]}, "limit_us": found["token_bytes"] / found["read_TBps"] * 1e-6,
              "token": found["token"], "read_TBps": found["read_TBps"],
              "token_bytes": found["token_bytes"], "prompt_ms_of_16": found["prompt_ms_of_16"]}
    if case["prompt"]:
        first = found["first_token_ms"]
        result["answer"] = {"first_token_ms": first, "token_ms": ours["mean_ms"], "whole_ms": first + (case["tokens"] - 1) * ours["mean_ms"]}
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--native", required=True)
    parser.add_argument("--ingot", type=pathlib.Path, help="the program (default: beside the library)")
    parser.add_argument("--only", help="only cases whose name holds this, and no report")
    parser.add_argument("--quick", action="store_true", help="the first case, and no report")
    options = parser.parse_args()
    ingot = (options.ingot or pathlib.Path(options.native).parent / "ingot").resolve()
    ceiling = ceilings(Native(options.native))
    torch.cuda.empty_cache()
    chosen = [c for c in (cases()[:1] if options.quick else cases()) if not options.only or options.only in label(c)]
    results, before = [], gpu_state()
    for case in chosen:
        r = measure(case, ingot)
        results.append(r)
        print(f"{r['name']:44} {case['context']:7} tokens: {r['ours_us'] / 1e3:.3f} ms a token, {100 * r['limit_us'] / r['ours_us']:.0f} % of reading alone, "
              f"phased {r['peers']['phased'] / 1e3:.3f}" + (f", first token {r['answer']['first_token_ms']:.0f} ms, "
              f"whole {r['answer']['whole_ms'] / 1e3:.2f} s" if "answer" in r else ""), flush=True)
        if not (options.only or options.quick):
            write_report("decode", results, ceiling, {"clocks": {"fields": "SM MHz, memory MHz, W, C", "before": before, "after": gpu_state()}},
                         cases=len(chosen))


if __name__ == "__main__":
    main()
