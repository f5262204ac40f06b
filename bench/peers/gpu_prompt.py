"""Prompts of GPT-OSS on a GPU to their first token, with random weights of the published shapes: `ingot bench prompt` for every format, beside the
same prompts in passes of 16 tokens by the decode kernels. Writes bench/results/<gpu>/prompt.json.

    python3 bench/peers/gpu_prompt.py --native build/cuda/libingot_bench.so [--ingot build/cuda/ingot] [--only TEXT] [--quick]

The limit is the larger of two times: of reading the weights of randomly chosen experts once per chunk, at the speed of a kernel that only
reads, and of all products at the speed of a plain product, both measured in this run. Tests check the results of prompts
(models/decode/phased/decode.cuda.test.cpp).
"""
import json
import subprocess

from gpu_common import Native, begin, ceilings, measure_each, parsed, program_options

MODELS = (("120b", "bf16"), ("120b", "mxfp4"), ("20b", "bf16"))
LENGTHS = (100, 1024, 2048, 4096, 16384)


def measure(size, dense, ingot, ceiling):
    line = [str(ingot), "bench", "prompt", "--synthetic", size, "--dense", dense, "--steps", "--json", *map(str, LENGTHS)]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"gpt-oss-{size}, {dense} dense: {done.stderr.strip()}")
    found = json.loads(done.stdout)
    for p in found["prompts"]:
        limit = max(p["weight_bytes"] / ceiling["read_TBps"], p["flops"] / ceiling["bf16_TFLOPs"]) * 1e-6
        yield {"name": f"gpt-oss-{size}, {dense} dense, to the first token", "shape": [p["tokens"]], "dtype": f"{dense}, mxfp4",
               "ours_us": 1e3 * p["p50_ms"], "peers": {"steps": 1e3 * p["steps_ms"]}, "limit_us": limit, "best_us": 1e3 * p["best_ms"],
               "chunk": found["chunk"]}


def main():
    options = parsed(program_options("model"))

    def said(r):
        return (f"{r['name']:48} {r['shape'][0]:7} tokens: {r['ours_us'] / 1e3:8.1f} ms, {100 * r['limit_us'] / r['ours_us']:.0f} % of the limit, "
                f"in steps of 16 {r['peers']['steps'] / 1e3:.0f} ms")
    measure_each(begin("prompt", options, MODELS, lambda model: f"gpt-oss-{model[0]}, {model[1]} dense"), lambda: ceilings(Native(options.native)),
                 lambda model, ceiling: measure(*model, options.ingot, ceiling), said)


if __name__ == "__main__":
    main()
