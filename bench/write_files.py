"""How fast the files of models are written: `ingot convert` of a checkpoint in the shapes of GPT-OSS-20B, to the same bits and to fewer, and `--verify`, beside cp
of the checkpoint; and one save of a run of the preset golf. Writes bench/cpu/<MACHINE>/write_files.json.

    python3 bench/write_files.py --program build/cpu/ingot [--dir /dev/shm] [--layers 6] [--device auto] --out bench/cpu/MACHINE/write_files.json

The checkpoint has random numbers, the whole vocabulary and the first --layers of the 24 layers (all 24: 28 GB with an archive). Files lie in memory by default, so that no disk
decides. Medians of --rounds in turn. A save's time is the difference of two runs of the same steps, one of which saves after each step.
"""
import argparse
import datetime
import json
import os
import pathlib
import random
import re
import shutil
import statistics
import subprocess
import tempfile
import time

from archive_load import write_checkpoint

STEPS = 6


def seconds_of(*command):
    start = time.monotonic()
    run = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if run.returncode != 0:
        raise SystemExit(f"{command[1]}: {run.stderr.strip()[-400:]}")
    return time.monotonic() - start


def convert_rounds(program, folder, layers, rounds):
    """Seconds of each way to write the checkpoint, and the bytes that it writes or reads."""
    checkpoint, archive, small = folder / "checkpoint", folder / "model.ingot", folder / "small.ingot"
    write_checkpoint(checkpoint, layers)
    source = checkpoint / "model.safetensors"
    ways = {"cp of the checkpoint": ("cp", source, folder / "copy"), "convert, the same bits": (program, "convert", checkpoint, archive),
            "convert, attention and head in mxfp4": (program, "convert", checkpoint, small, "--dense", "mxfp4"), "convert --verify": (program, "convert", "--verify", archive)}
    seen = {way: [] for way in ways}
    for _ in range(rounds):
        for way, command in ways.items():
            seen[way].append(seconds_of(*command))
        (folder / "copy").unlink()
    size = source.stat().st_size
    return [dict(name=way, seconds=statistics.median(s), bytes=archive.stat().st_size if way.endswith("verify") else size, rounds=s) for way, s in seen.items()]


def save_rounds(program, folder, device, rounds):
    """Seconds of one save of golf, and its bytes."""
    noise, words = random.Random(1), folder / "words.txt"
    vocabulary = ["".join(noise.choices("abcdefghijklmnopqrstuvwxyz", k=noise.randint(3, 9))) for _ in range(16384)]
    words.write_text(" ".join(noise.choices(vocabulary, k=200000)))
    seconds_of(program, "tokenizer", "train", "--data", words, "--vocab", 8192, "--out", folder / "tokenizer.json")

    def train(every):
        out = folder / f"run-{every}"
        shutil.rmtree(out, ignore_errors=True)
        took = seconds_of(program, "train", "--preset", "golf", "--data", words, "--tokenizer", folder / "tokenizer.json", "--out", out, "--device", device, "--steps", STEPS,
                          "--accumulation", 1, "--batch-tokens", 2048, "--checkpoint-every", every)
        return took, out
    seen = []
    for _ in range(rounds):
        (at_end, _), (each, out) = train(0), train(1)
        seen.append((each - at_end) / (STEPS - 1))
    newest = sorted(out.glob("step-*"))[-1]
    return dict(name="a save of the preset golf", seconds=statistics.median(seen), bytes=sum(f.stat().st_size for f in newest.rglob("*") if f.is_file()), rounds=seen)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--program", required=True, type=pathlib.Path)
    p.add_argument("--dir", type=pathlib.Path, default=pathlib.Path("/dev/shm"))
    p.add_argument("--layers", type=int, default=6)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of the training run (default: auto)")
    p.add_argument("--out", type=pathlib.Path)
    o = p.parse_args()
    program = o.program.resolve()
    with tempfile.TemporaryDirectory(dir=o.dir) as folder:
        results = [save_rounds(program, pathlib.Path(folder), o.device, o.rounds)]
    with tempfile.TemporaryDirectory(dir=o.dir) as folder:
        results = convert_rounds(program, pathlib.Path(folder), o.layers, o.rounds) + results
    model = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    report = dict(suite="write_files", cpu=model[1] if model else "unknown", threads=os.cpu_count(), date=str(datetime.date.today()), place=str(o.dir), layers=o.layers, of_layers=24,
                  device=o.device, results=results)
    for r in results:
        print(f"{r['name']:40} {r['bytes'] / 1e9:6.2f} GB in {r['seconds']:6.2f} s, {r['bytes'] / r['seconds'] / 1e9:5.2f} GB/s")
    if o.out:
        o.out.parent.mkdir(parents=True, exist_ok=True)
        o.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
