"""A token of GPT-OSS over several GPUs, and prompts to their first token, beside one GPU in the same process, with random weights of the
published shapes: `ingot bench decode --gpus LIST` and `ingot bench prompt --gpus LIST`, one process per case. Writes
bench/results/<gpu>/decode_gpus.json; with a single GPU the script says so and leaves the report unchanged.

    python3 bench/peers/gpu_decode_gpus.py --native build/cuda/libingot_bench.so [--ingot build/cuda/ingot] [--gpus 2,4] [--only TEXT] [--quick]

Every case is measured over 2, 4 and 8 GPUs, as many as there are, or over the numbers of --gpus; one GPU's figures are those of the same process,
taken once. --only may name a number: `--only "4 GPUs"`.

The limit of a token is the time of the weights and keys that the busiest GPU reads, at the speed of a kernel that only reads; a prompt's limit is
that of gpu_prompt.py for the busiest GPU. `stages` has the stages of a token by GPU: the time of the stage; in this time the exchange, from the sending
of this GPU's part to the arrival of all parts (`last_exchange_us`: on the last GPU, which waited for no other); then the wait for the GPU's own blocks.
`one_stages` has the same for one GPU. Tests check the computed values (models/decode/phased/ranks.cuda.test.cpp).
"""
import json
import subprocess

from gpu_common import Native, add_gpu_counts, begin, ceilings, gpu_counts, measure_each, parsed, program_options

CASES = [dict(size=size, dense=dense, split=split) for size, dense, split in
         (("120b", "bf16", "tensor"), ("120b", "fp8", "tensor"), ("120b", "mxfp4", "tensor"), ("20b", "bf16", "tensor"),
          ("120b", "bf16", "attention-experts"))]
PROMPTS = [dict(size="120b", dense="bf16", split="tensor")]
CONTEXT, LENGTHS = 1024, (100, 1024, 2048, 4096)


def label(case, gpus):
    return f"gpt-oss-{case['size']}, {case['dense']} dense, {gpus} GPUs, {case['split']}"


def run(program, case, counts, ingot, *more):
    line = [str(ingot), "bench", program, "--synthetic", case["size"], "--dense", case["dense"], "--gpus", ",".join(map(str, counts)),
            "--split", case["split"], "--json", *more]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{'; '.join(label(case, gpus) for gpus in counts)}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def measure(case, counts, ingot):
    found = run("decode", case, counts, ingot, "--context", str(CONTEXT), "--phases")
    for shared in found["shared"]:
        def row(name, path, size, peer, of, shared=shared, **more):
            return {"name": label(case, shared["gpus"]) + name, "shape": [CONTEXT], "dtype": f"{case['dense']}, mxfp4",
                    "ours_us": 1e3 * shared["token"][path]["mean_ms"],
                    "peers": {"one GPU": 1e3 * found["token"][path]["mean_ms"], peer: 1e3 * shared["token"][of]["mean_ms"]},
                    "limit_us": size / found["read_TBps"] * 1e-6, "read_TBps": found["read_TBps"], **more}

        yield row("", "megakernel", shared["token_bytes"], "phased", "phased", one=found["token"], one_stages=found["stages"], **shared)
        if "prefiltered" in shared["token"]:
            yield row(", int8 prefilter of the head", "prefiltered", shared["prefiltered_bytes"], "whole_head", "megakernel", prefiltered=shared["token"]["prefiltered"])


def measure_prompts(case, counts, ingot, ceiling):
    for p in run("prompt", case, counts, ingot, *map(str, LENGTHS))["prompts"]:
        limit = max(p["weight_bytes"] / ceiling["read_TBps"], p["flops"] / ceiling["bf16_TFLOPs"]) * 1e-6
        yield {"name": label(case, p["gpus"]) + ", to the first token", "shape": [p["tokens"]], "dtype": f"{case['dense']}, mxfp4",
               "ours_us": 1e3 * p["p50_ms"], "peers": {"one GPU": 1e3 * p["one_gpu_ms"]}, "limit_us": limit, "best_us": 1e3 * p["best_ms"]}


def said(r):
    exchange = ("" if "exchange_idle" not in r else
                f"; an exchange {r['exchange_idle']['exchange_us'] - r['exchange_idle']['grid_barrier_us']:.2f} us more than a grid barrier, under load "
                f"{r['exchange_loaded']['exchange_us'] - r['exchange_loaded']['grid_barrier_us']:.2f}")
    return f"{r['name']:76} {r['ours_us'] / 1e3:.3f} ms a token, {r['ours_us'] / r['peers']['one GPU']:.3f} of one GPU's {r['peers']['one GPU'] / 1e3:.3f}{exchange}"


def said_of_prompt(r):
    return (f"{r['name']:70} {r['shape'][0]:6} tokens: {r['ours_us'] / 1e3:.1f} ms, {r['ours_us'] / r['peers']['one GPU']:.3f} of one GPU's "
            f"{r['peers']['one GPU'] / 1e3:.1f}")


def main():
    parser = program_options()
    add_gpu_counts(parser)
    options = parsed(parser)
    counts = gpu_counts("decode_gpus", options)
    if not counts:
        return

    def name(case):
        prompts, case = case
        return ("prompts, " if prompts else "") + "; ".join(label(case, gpus) for gpus in counts)

    def measured(case, ceiling):
        prompts, case = case
        gpus = [n for n in counts if not options.only or options.only in label(case, n)]
        return measure_prompts(case, gpus, options.ingot, ceiling) if prompts else measure(case, gpus, options.ingot)
    cases = [*((False, case) for case in CASES), *((True, case) for case in PROMPTS)]
    measure_each(begin("decode_gpus", options, cases, name), lambda: ceilings(Native(options.native)), measured, lambda r: said_of_prompt(r) if "to the first token" in r["name"] else said(r))


if __name__ == "__main__":
    main()
