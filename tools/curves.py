#!/usr/bin/env python3
"""Loss curves of short runs of the small presets on a GPU (bf16), beside seeds of the same runs on the CPU (fp32).

    tools/curves.py build/cpu/ingot curves.json --device cpu       # no GPU needed
    tools/curves.py build/cuda/ingot curves.json --device cuda
    tools/curves.py curves.json [--picture curves.svg]             # only compares

The text is generated, the same each time, of words with the frequencies of natural words. Runs are added to the file; if the file has runs of both
devices, their curves are compared. In the mean over steps a GPU's run may differ from the CPU's run of the same seed by no more than two seeds differ
on the CPU, and the mean over seeds of the held-out loss by no more than twice the CPU's deviation of one seed. Exits 1 if a preset is outside.
"""
import argparse
import concurrent.futures
import hashlib
import itertools
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

STEPS = {"nano": 200, "nano-golf": 200, "golf-small": 80}


def made_text(words=60000):
    """Sentences of 3,000 made-up words. The n-th word has the frequency 1 / n; some words are always followed by one of a few words."""
    draw = random.Random(1)
    known = ["".join(draw.choices("aeiou" if i % 2 else "bcdfghlmnprstvw", k=1)[0] for i in range(draw.randint(2, 9))) for _ in range(3000)]
    weights, after = [1 / (n + 1) for n in range(len(known))], {w: draw.choices(known, k=4) for w in known[::3]}
    drawn = iter(draw.choices(known, weights, k=words))
    sentences = []
    for first in drawn:
        sentence = [first]
        while len(sentence) < draw.randint(4, 14):
            sentence.append(draw.choice(after[sentence[-1]]) if sentence[-1] in after else next(drawn, first))
        sentences.append(" ".join(sentence).capitalize() + ".")
    return "\n".join(" ".join(sentences[i:i + 8]) for i in range(0, len(sentences), 8)) + "\n"


def run(o, preset, seed, folder):
    out = pathlib.Path(folder) / f"{preset}-{seed}"
    done = subprocess.run([o.ingot, "train", "--preset", preset, "--data", pathlib.Path(folder) / "text.txt", "--out", out, "--steps", str(STEPS[preset]), "--device", o.device,
                           "--seed", str(seed), "--set", "train.log_every=1"], capture_output=True, text=True, timeout=o.limit,
                          env={**os.environ, "INGOT_THREADS": str(o.threads)})
    if done.returncode != 0:
        raise RuntimeError(f"{preset}, seed {seed}: {done.stderr.strip()[-300:]}")
    log = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return {"loss": [round(e["loss"], 6) for e in log if e["event"] == "step"], "held_out": [e["loss"] for e in log if e["event"] == "score"][-1]}


def apart(a, b):
    return statistics.mean(abs(x - y) for x, y in zip(a["loss"], b["loss"]))


def compare(preset, cpu, gpu):
    """The sentence about a preset, and whether the GPU's runs are within the spread of the CPU's runs."""
    pairs = [(cpu[s], gpu[s]) for s in sorted(cpu.keys() & gpu.keys())]
    seeds = statistics.mean(apart(a, b) for a, b in itertools.combinations(cpu.values(), 2))
    same = max(apart(a, b) for a, b in pairs)
    held = [statistics.mean(r["held_out"] for r in runs.values()) for runs in (cpu, gpu)]
    deviation = statistics.stdev(r["held_out"] for r in cpu.values())
    within = same <= seeds and abs(held[0] - held[1]) <= 2 * deviation
    print(f"{preset}: of one seed {same:.4f} apart, of two seeds on the CPU {seeds:.4f}; held out {held[0]:.4f} on the CPU (deviation {deviation:.4f}), "
          f"{held[1]:.4f} on the GPU: {'within' if within else 'OUTSIDE'}")
    steps = len(pairs[0][0]["loss"])
    print("  step      " + " ".join(f"{f'{name} {s}':>8}" for s in sorted(cpu.keys() & gpu.keys()) for name in ("cpu", "gpu")))
    for i in sorted({0, 1, 2, 4, 9, steps // 4, steps // 2, steps - 1} & set(range(steps))):
        print(f"  {i + 1:4d}      " + " ".join(f"{r['loss'][i]:8.4f}" for pair in pairs for r in pair))
    return within


def picture(runs, file):
    """Losses by step, one panel per preset: the CPU's seeds as lines, the GPU's as dashes."""
    width, height, left, gap, top = 300, 200, 42, 24, 30
    parts = []
    for n, (preset, devices) in enumerate(runs.items()):
        curves = [(device, r["loss"]) for device in ("cpu", "cuda") for r in devices.get(device, {}).values()]
        steps = len(curves[0][1])
        low, high = min(min(c) for _, c in curves), max(max(c) for _, c in curves)
        x0 = left + n * (width + left + gap)

        def at(i, loss):
            return f"{x0 + width * i / (steps - 1):.1f},{top + height * (high - loss) / (high - low):.1f}"
        parts.append(f'<rect x="{x0}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#999"/>'
                     f'<text x="{x0}" y="{top - 8}">{preset}, {steps} steps</text>'
                     f'<text x="{x0 - 4}" y="{top + 10}" text-anchor="end">{high:.2f}</text><text x="{x0 - 4}" y="{top + height}" text-anchor="end">{low:.2f}</text>')
        for device, losses in curves:
            style = 'stroke="#1f6fb4"' if device == "cpu" else 'stroke="#d9601a" stroke-dasharray="4 3"'
            parts.append(f'<polyline fill="none" stroke-width="1" {style} points="{" ".join(at(i, loss) for i, loss in enumerate(losses))}"/>')
    whole = len(runs) * (width + left + gap)
    parts.append(f'<text x="{left}" y="{top + height + 22}">training loss by step: fp32 on the CPU (lines), bf16 on the GPU (dashes), three seeds each</text>')
    file.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {top + height + 34}" font-family="sans-serif" font-size="12">'
                    f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n', encoding="utf-8")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("ingot", type=pathlib.Path, help="the binary; alone: the file to compare")
    p.add_argument("out", type=pathlib.Path, nargs="?")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--presets", nargs="+", choices=STEPS, default=list(STEPS))
    p.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    p.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    p.add_argument("--threads", type=int, default=2, help="of each run (default: 2)")
    p.add_argument("--picture", type=pathlib.Path, help="draw them all as SVG")
    p.add_argument("--limit", type=float, default=3600, help="seconds that a run may take")
    o = p.parse_args()
    file = o.out or o.ingot
    said = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if o.out:
        o.ingot, text = o.ingot.resolve(), made_text()
        digest = hashlib.sha256(text.encode()).hexdigest()
        if said.setdefault("text", digest) != digest:
            sys.exit(f"curves: {file}: found runs of another text, expected the same, or another OUT")
        with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(o.jobs) as pool:
            (pathlib.Path(folder) / "text.txt").write_text(text, encoding="utf-8")
            wanted = {(preset, seed): pool.submit(run, o, preset, seed, folder) for preset in o.presets for seed in o.seeds}
            for (preset, seed), made in wanted.items():
                said.setdefault("runs", {}).setdefault(preset, {}).setdefault(o.device, {})[str(seed)] = made.result()
        file.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    if o.picture:
        picture(said["runs"], o.picture)
    if not said.get("runs"):
        sys.exit(f"curves: {file}: found no runs, expected some of an earlier call")
    good = [compare(preset, runs["cpu"], runs["cuda"]) for preset, runs in said.get("runs", {}).items() if "cpu" in runs and "cuda" in runs]
    if not all(good):
        sys.exit(1)


if __name__ == "__main__":
    main()
