"""A token of GPT-OSS on a GPU, by one kernel and by a launch a phase, with random weights of the published shapes: `ingot bench decode`
for every context and format, and whole answers from prompt to end. Writes bench/results/<gpu>/decode.json.

    python3 bench/peers/gpu_decode.py --native build/cuda/libingot_bench.so [--ingot build/cuda/ingot] [--llama-bench PATH] [--only TEXT] [--quick]

The limit is the bytes of weights and keys that a token reads, at what memory gives a kernel that only reads, in the same process.
What a token computes is tested (models/gpt_oss/decode/decode.cuda.test.cpp): through all layers of random weights a rounding decides
which experts are taken, and two right answers differ.

llama.cpp is a peer at 20B shapes where its `llama-bench`, built with CUDA, is given by path: on a GGUF with random weights (synthetic_gguf.py)
whose dense matrices are bf16, or Q8_0, its nearest to fp8; both have the same bytes of experts.
"""
import argparse
import json
import os
import pathlib
import subprocess
import tempfile

import torch

import synthetic_gguf
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


RIVAL = "llama.cpp"
RIVAL_FORMS = {"bf16": "bf16", "fp8": "q8_0"}


def measure_rival(bench, case, folder):
    """Microseconds a token of llama-bench behind a context of the case's length, and what it says of itself."""
    file = pathlib.Path(folder) / f"{case['dense']}.gguf"
    try:
        synthetic_gguf.write(case["size"], RIVAL_FORMS[case["dense"]], file)
        done = subprocess.run([str(bench), "-m", str(file), "-ngl", "99", "-fa", "1", "-p", "0", "-n", "128", "-d", str(case["context"]), "-r", "3",
                               "-o", "json"], capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"})
        if done.returncode != 0:
            raise RuntimeError(f"status {done.returncode}: {' '.join(done.stderr.split())[-160:]}")
        found = json.loads(done.stdout)[-1]
    finally:
        file.unlink(missing_ok=True)
    return found["avg_ns"] / found["n_gen"] * 1e-3, {k: found[k] for k in ("build_commit", "build_number", "model_size", "stddev_ns", "n_gen", "n_depth")}


def add_rival(result, case, bench, folder):
    if case["size"] != "20b" or case["context"] != 1024 or case["prompt"] or case["dense"] not in RIVAL_FORMS:
        return
    if bench is None:
        result["absent"] = {RIVAL: "not given by path"}
        return
    try:
        result["peers"][RIVAL], result[RIVAL] = measure_rival(bench, case, folder)
    except (ImportError, OSError, RuntimeError) as e:
        result["absent"] = {RIVAL: f"{type(e).__name__}: {str(e)[:200]}"}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--native", required=True)
    parser.add_argument("--ingot", type=pathlib.Path, help="the program (default: beside the library)")
    parser.add_argument("--llama-bench", type=pathlib.Path, help="llama.cpp's program, built with CUDA: a peer at 20B shapes")
    parser.add_argument("--folder", default="/dev/shm", help="where its GGUFs of 14 GB are written (default: /dev/shm)")
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
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            add_rival(r, case, options.llama_bench, folder)
        results.append(r)
        print(f"{r['name']:44} {case['context']:7} tokens: {r['ours_us'] / 1e3:.3f} ms a token, {100 * r['limit_us'] / r['ours_us']:.0f} % of reading alone, "
              f"phased {r['peers']['phased'] / 1e3:.3f}" + (f", first token {r['answer']['first_token_ms']:.0f} ms, "
              f"whole {r['answer']['whole_ms'] / 1e3:.2f} s" if "answer" in r else "")
              + (f", {RIVAL} {r['peers'][RIVAL] / 1e3:.3f}" if RIVAL in r["peers"] else "")
              + "".join(f", {p} absent: {why}" for p, why in r.get("absent", {}).items()), flush=True)
        if not (options.only or options.quick):
            write_report("decode", results, ceiling, {"clocks": {"fields": "SM MHz, memory MHz, W, C", "before": before, "after": gpu_state()}},
                         cases=len(chosen))


if __name__ == "__main__":
    main()
