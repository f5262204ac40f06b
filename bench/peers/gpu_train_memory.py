"""A training step of the preset golf with the forward pass's activations kept, which is the default where the GPU has the memory,
beside a step that computes them again (`train.keep_activations=false`): time and memory. Writes bench/results/<gpu>/train_memory.json.

    python3 bench/peers/gpu_train_memory.py --native build/cuda/libingot_bench.so [--ingot build/cuda/ingot] [--only TEXT] [--quick]

A step of one pass of 98,304 tokens, as gpu_train.py times it: whole steps of the program from its log, medians of two rounds in turn. Memory is
the GPU memory that a run adds, its context included.
"""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from train_runs import in_turn, measure_cases, measure_ours, median_of, parsed_runs, run_options  # noqa: E402

CASES = (11, 17)  # layer calls


def names(applications):
    return [f"golf, {applications} applications, whole step"]


def measure(applications, options, folder, ceiling, used):
    found = in_turn({kept: lambda kept=kept: measure_ours(options, folder, applications, 1, options.steps,
                                                          more=["--set", f"train.keep_activations={kept}"]) for kept in ("true", "false")})
    kept, formed = found["true"], found["false"]
    us, formed_us = 1e3 * median_of(kept), 1e3 * median_of(formed)
    yield {"name": names(applications)[0], "shape": [options.tokens], "dtype": "bf16", "ours_us": us, "peers": {"formed_again": formed_us},
           "limit_us": kept[0]["flops"] / ceiling["bf16_TFLOPs"] * 1e-6,
           "tokens_per_second": {"ours": options.tokens / us * 1e6, "formed_again": options.tokens / formed_us * 1e6},
           "memory_bytes": {"ours": used.taken_by(kept), "formed_again": used.taken_by(formed)},
           "rounds_ms": {"ours": [r["ms"] for r in kept], "formed_again": [r["ms"] for r in formed]}}


def said(r):
    return (f"{r['name']}: " + "; ".join(f"{name} {us / 1e3:.2f} ms, {r['tokens_per_second'][name] * 1e-6:.3f} M tokens/s, "
                                       f"{r['memory_bytes'][name] / 2**30:.1f} GiB" for name, us in {"ours": r["ours_us"], **r["peers"]}.items()))


def main():
    measure_cases("train_memory", parsed_runs(run_options()), CASES, names, measure, said)


if __name__ == "__main__":
    main()
