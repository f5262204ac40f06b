#!/usr/bin/env python3
"""Milliseconds of one CPU training step (forward, backward, optimizer) in PyTorch, and its memory.

    train_step.py [--native build/cpu/ingot] [--shape nano|golf] [--mode eager|compile|native] [--precision fp32|bf16]
                  [--threads 2] [--steps N] [--rounds N] [--json FILE]

Without --shape, --mode or --precision all combinations are measured, each in a separate process, so that the peak resident set
belongs to a single combination. With --native the same step is measured in Ingot too (`ingot bench train_step`), between PyTorch's modes. On a shared
machine use several rounds, which take the modes in turn; each mode's median round counts. If FILE
has a report of the same CPU and number of threads, its results of other shapes, modes and precisions stay. memory_mib is the peak
resident set less the resident set after the imports. The same optimizer runs on both sides: nano with AdamW, golf with
Muon, AdamW and an average of the weights (recipes in spec/optimizer.py).
"""
import argparse
import datetime
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")
import torch  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent))
from torch_gpt import TorchGpt, TorchOptimizer, spec  # noqa: E402
from optimizer import Recipe  # noqa: E402

# The golf features at a size a CPU trains: 6 layers, 256 wide, context 512, no recurrence.
SHAPES = {
    "nano": dict(
        config=dict(vocab=65, dim=128, layers=4, heads=4, kv_heads=4, head_dim=32, mlp_hidden=512, context=64, activation="gelu",
                    learned_positions=True),
        batch=12, length=64, recipe=Recipe(warmup_steps=100, decay="cosine", min_lr=0.1)),
    "golf": dict(
        config=dict(vocab=1024, dim=256, layers=6, heads=8, kv_heads=4, head_dim=32, mlp_hidden=1024, context=512,
                    activation="leaky_relu_squared", embed_norm=True, norm_weight=False, norm_eps=2**-23, layer_scale=True,
                    rotary_dim=8, rope_sign=-1, qk_norm=True, qk_gain=True, qk_gain_init=5, xsa_layers=6, resid_mix=True,
                    branch_scale=True, unet_skips=True, skip_gates=True, lane_start=4, softcap=30, init="orthogonal",
                    embed_std=0.005),
        batch=8, length=512,
        recipe=Recipe(matrix_optimizer="muon", matrix_lr=0.022, matrix_decay=0.095, embed_lr=0.03, embed_decay=0.085,
                      scalar_lr=0.02, scalar_decay=0.02, beta2=0.95, clip=0.3, warmdown=0.72, ema_horizon=0.06)),
}


LEVELS = [("amx_bf16", "AVX-512 with AMX"), ("avx512_bf16", "AVX-512 with bf16"), ("avx512vl", "AVX-512")]


def resident_mib():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(shape, mode, precision, threads, steps):
    torch.set_num_threads(threads)
    at_import = resident_mib()
    s = SHAPES[shape]
    config = spec.GptConfig(**s["config"])
    model = TorchGpt(config, spec.initialise(config, 1, torch.float32), s["length"])
    bf16 = precision == "bf16"
    optimizer = TorchOptimizer(model, s["recipe"], 2000, torch.bfloat16 if bf16 else torch.float32)
    forward = torch.compile(model, fullgraph=True, dynamic=False) if mode == "compile" else model
    batches = torch.randint(config.vocab, (8, 2, s["batch"], s["length"]), generator=torch.Generator().manual_seed(1))

    def step(i):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = forward(*batches[i % len(batches)])
        loss.backward()
        optimizer.step()
        return loss.detach()

    started = time.perf_counter()
    step(0)
    first = time.perf_counter() - started
    for i in range(1, 4):
        step(i)
    times = []
    for i in range(steps):
        started = time.perf_counter()
        step(i)
        times.append(1e3 * (time.perf_counter() - started))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return dict(shape=shape, mode=mode, precision=precision, threads=threads, tokens=s["batch"] * s["length"], steps=steps,
                ms=statistics.median(times), min_ms=min(times), first_step_s=first, memory_mib=peak - at_import,
                parameters=sum(p.numel() for p in model.parameters()), torch=torch.__version__)


def measure_native(binary, shape, precision, threads):
    """The same step in `ingot bench`; None if this CPU has no bf16 products. Memory: the peak minus the peak of `ingot --version`."""
    name, dtype = {"nano": "nano", "golf": "golf-small"}[shape], {"fp32": "f32", "bf16": "bf16"}[precision]

    def run(*command):
        wrapper = "import resource, subprocess, sys; r = subprocess.run(sys.argv[1:], capture_output=True, text=True, check=True); " \
                  "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024); print(r.stdout)"
        out = subprocess.run([sys.executable, "-c", wrapper, binary, *command], check=True, capture_output=True, text=True).stdout
        peak, _, text = out.partition("\n")
        return float(peak), text

    idle, _ = run("--version")
    peak, text = run("bench", f"train_step/{name}/step/{dtype}", "--seconds", "8", "--threads", str(threads), "--json")
    results = json.loads(text)["results"]
    if not results:
        return None
    r = results[0]
    return dict(shape=shape, mode="native", precision=precision, threads=threads, steps=r["repeats"], ms=r["median_us"] / 1e3,
                min_ms=r["min_us"] / 1e3, memory_mib=peak - idle, percent_of_fma_bound=r["percent_of_limit"])


def print_row(r):
    print(f"{r['shape']:5} {r['mode']:8} {r['precision']}  {r['ms']:8.1f} ms/step  {r['memory_mib']:7.0f} MiB", flush=True)


def summarise(results):
    for shape in SHAPES:
        for precision in ("fp32", "bf16"):
            ours = [r for r in results if (r["shape"], r["precision"], r["mode"]) == (shape, precision, "native")]
            peers = [r for r in results if (r["shape"], r["precision"]) == (shape, precision) and r["mode"] != "native"]
            if ours and peers:
                best = min(peers, key=lambda r: r["ms"])
                print(f"{shape:5} {precision}: {best['ms'] / ours[0]['ms']:.2f}x as fast as PyTorch {best['mode']}, "
                      f"{ours[0]['memory_mib'] / best['memory_mib']:.2f} of its memory")


def kept_results(path, cpu, threads, fresh):
    """Results of an earlier report that were not measured again, each with its date and command."""
    if not Path(path).exists():
        return []
    old = json.loads(Path(path).read_text())
    if (old["cpu"], old["threads"]) != (cpu, threads):
        return []
    key = lambda r: (r["shape"], r["mode"], r["precision"])
    again = [key(r) for r in fresh]
    return [dict(dict(date=old["date"], command=old["command"]), **r) for r in old["results"] if key(r) not in again]


def measure_apart(shape, mode, precision, args):
    """Measures one mode in a separate process; None if Ingot has no bf16 products on this CPU."""
    if mode == "native":
        return measure_native(args.native, shape, precision, args.threads)
    command = [sys.executable, __file__, "--shape", shape, "--mode", mode, "--precision", precision, "--threads", str(args.threads),
               "--steps", str(args.steps)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=dict(os.environ, OMP_NUM_THREADS=str(args.threads)))
    return json.loads(done.stdout.splitlines()[-1])


def measure_in_turn(shape, modes, precision, args):
    """Each mode's median round, with the times of all rounds."""
    rounds = {mode: [] for mode in modes}
    for _ in range(args.rounds):
        for mode in modes:
            if result := measure_apart(shape, mode, precision, args):
                rounds[mode].append(result)
    for of_mode in filter(None, rounds.values()):
        middle = sorted(of_mode, key=lambda r: r["ms"])[(len(of_mode) - 1) // 2]
        print_row(middle)
        yield dict(middle, round_ms=[r["ms"] for r in of_mode])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--native", help="path of the ingot binary")
    parser.add_argument("--mode", choices=["eager", "compile", "native"])
    parser.add_argument("--precision", choices=["fp32", "bf16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=0, help="timed steps; 0: 50 for nano, 10 for golf")
    parser.add_argument("--rounds", type=int, default=1, help="how often each mode is measured, in turn")
    parser.add_argument("--json", help="also write the results here")
    args = parser.parse_args()
    modes = ["eager", "native", "compile"] if args.native else ["eager", "compile"]
    asked = [(args.shape, list(SHAPES)), (args.mode, modes), (args.precision, ["fp32", "bf16"])]
    shapes, modes, precisions = ([one] if one else every for one, every in asked)
    if len(shapes) == len(modes) == len(precisions) == 1 and modes[0] != "native":
        steps = args.steps or (50 if args.shape == "nano" else 10)
        results = [measure(args.shape, args.mode, args.precision, args.threads, steps)]
        print(json.dumps(results[0]))
    else:
        results = [r for shape in shapes for precision in precisions for r in measure_in_turn(shape, modes, precision, args)]
        summarise(results)
    if args.json:
        with open("/proc/cpuinfo") as f:
            cpu = next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), "unknown")
            f.seek(0)
            flags = f.read()
        level = next((name for flag, name in LEVELS if flag in flags), "AVX2")
        command = re.sub(r" --json \S+", "", " ".join(["bench/peers/train_step.py", *sys.argv[1:]]))
        today = datetime.date.today().isoformat()
        results = kept_results(args.json, cpu, args.threads, results) + [dict(r, date=today, command=command) for r in results]
        report = dict(suite="train_step", cpu=cpu, level=level, threads=args.threads, torch=torch.__version__,
                      date=today, command=command, results=results)
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
