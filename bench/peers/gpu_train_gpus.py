"""A training step of the preset golf over several GPUs beside the same step on one, in turn: `ingot train --gpus N`. Writes
bench/results/<gpu>/train_gpus.json; with a single GPU the script says so and leaves the report unchanged.

    python3 bench/peers/gpu_train_gpus.py --native build/cuda/libingot_bench.so [--ingot build/cuda/ingot] [--gpus 2,4] [--only TEXT] [--quick]

Every case is measured over 2, 4 and 8 GPUs, as many as there are, or over the numbers of --gpus. All make the same passes of 98,304 tokens per step: the case's
number of passes on each GPU of the largest number, and equal shares on fewer GPUs. A step therefore includes all exchanges and waits. One GPU's time,
measured once per case, over Ingot's time is the speed-up. Times are whole steps of the program, from its log, batches and log included, medians of two
rounds in turn. The limit is the time of the operations on all GPUs. Tests check that the weights equal those of one GPU (engines/train/ranks.cuda.test.cpp).
"""
import math
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from gpu_common import add_gpu_counts, gpu_counts  # noqa: E402
from train_runs import in_turn, measure_cases, measure_ours, median_of, parsed_runs, run_options  # noqa: E402

CASES = ((11, 1), (11, 4), (17, 1))  # layer calls, and passes per GPU with the most GPUs


def label(case, gpus, counts):
    applications, passes = case
    each = passes * math.lcm(*counts) // gpus
    return f"golf, {applications} applications, {gpus} GPUs, a step of {each} pass{'es' if each > 1 else ''} on each"


def measure(case, options, folder, ceiling, used):
    applications, passes = case
    warm, steps = (4, options.steps) if passes == 1 else (2, max(1, options.steps // 2))
    passes *= math.lcm(*options.counts)
    found = in_turn({gpus: lambda gpus=gpus: measure_ours(options, folder, applications, passes, steps, warm=warm, more=options.ranks(gpus))
                     for gpus in (1, *options.counts)})
    one, one_us = found[1], 1e3 * median_of(found[1])
    for gpus in options.counts:
        several, us = found[gpus], 1e3 * median_of(found[gpus])
        yield {"name": label(case, gpus, options.counts), "shape": [passes * options.tokens], "dtype": "bf16", "ours_us": us, "peers": {"one GPU": one_us},
               "limit_us": one[0]["flops"] / gpus / ceiling["bf16_TFLOPs"] * 1e-6,
               "tokens_per_second": {name: passes * options.tokens / t * 1e6 for name, t in (("ours", us), ("one GPU", one_us))},
               "memory_bytes": {"ours": used.taken_by(several), "one GPU": used.taken_by(one)},  # on the first GPU
               "rounds_ms": {"ours": [r["ms"] for r in several], "one GPU": [r["ms"] for r in one]}}


def name_nccl():
    """The NCCL of this process's PyTorch, for a program that does not find NCCL itself."""
    mapped = pathlib.Path("/proc/self/maps").read_text(encoding="utf-8").split()
    for path in mapped:
        if "libnccl.so" in path:
            os.environ.setdefault("INGOT_NCCL", path)


def options_of():
    parser = run_options("timed steps of each run, half as many where a GPU has several passes")
    add_gpu_counts(parser)
    options = parsed_runs(parser)
    options.counts = gpu_counts("train_gpus", options)
    options.ranks = lambda gpus: ["--gpus", str(gpus)] if gpus > 1 else []
    return options


def said(r):
    one_us = r["peers"]["one GPU"]
    return (f"{r['name']}: {r['ours_us'] / 1e3:.2f} ms, one GPU {one_us / 1e3:.2f}: {one_us / r['ours_us']:.3f} times as fast, "
          f"{r['tokens_per_second']['ours'] * 1e-6:.3f} M tokens/s, {r['memory_bytes']['ours'] / 2**30:.1f} GiB; rounds {r['rounds_ms']}")


def main():
    options = options_of()
    if not options.counts:
        return
    name_nccl()
    measure_cases("train_gpus", options, CASES, lambda case: [label(case, gpus, options.counts) for gpus in options.counts], measure, said,
                  gpus=options.counts)


if __name__ == "__main__":
    main()
