#!/usr/bin/env python3
"""The whole chain on any text, for several seeds: train by wall clock, average, score, quantise, code, read back, score, adapt, score.

    tools/experiment.py build/cpu/ingot corpus/ out --seeds 1 2 3 --seconds 60 --train "--preset golf-small" --export "--matrices int6" \
        --stride 64 --adapt "--ttt-lr 1e-4"

The artifact is scored after reading it back: in windows side by side, with --stride N also in sliding windows, and with --adapt also by test-time
training (`ingot eval --ttt`). The last two take long. --part EVERY:TOKENS restricts both, and a plain score beside them, to every EVERY-th held-out
document, cut to its first TOKENS tokens (DATA: shards of `ingot data pack`; the part is written to OUT/part).

    tools/experiment.py --reports bench/results/h100/golf/seed-*.json    # the table of seeds that ran elsewhere, one at a time

Each seed leaves OUT/seed-N (the run) and OUT/seed-N.ingot; OUT/experiment.json holds every number, with mean and deviation over seeds. A finished seed is not
trained again, and `ingot train` resumes an interrupted seed. All seeds are scored on the same held-out text.
"""
import argparse
import array
import json
import pathlib
import shlex
import statistics
import struct
import subprocess
import sys

COLUMNS = (("bits_per_byte_before", "as trained"), ("bits_per_byte_after", "read back"), ("bits_per_byte_part", "of a part"),
           ("bits_per_byte_sliding", "sliding"), ("bits_per_byte_adapted", "adapted"), ("total_bytes", "bytes"))
HEADER = 1024  # bytes of a shard before its tokens


def run(command):
    try:
        done = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE)
    except OSError as error:
        sys.exit(f"experiment: {command[0]}: {error.strerror}")
    if done.returncode != 0:  # the reason is on standard error
        sys.exit(done.returncode)
    return done.stdout


def read(report):
    """The files of a seed."""
    try:
        found = json.loads(report.read_text())
    except OSError as error:
        sys.exit(f"experiment: {report}: {error.strerror}")
    except ValueError:
        found = None
    if not isinstance(found, dict) or not {"seed", "bits_per_byte_before", "bits_per_byte_after", "total_bytes"} <= found.keys():
        sys.exit(f"experiment: {report}: found no result of a seed, expected what this script wrote")
    return found


def options_of(o):
    part = {"part": list(o.part)} if o.part else {}
    return {"data": str(o.data), "seconds": o.seconds, "train": o.train, "export": o.export, "stride": o.stride, "adapt": o.adapt, **part}


def part_of(text):
    every, tokens = (int(n) for n in text.split(":"))
    if every < 1 or tokens < 2:
        raise ValueError
    return every, tokens


def write_part(shards, to, every, tokens):
    """Every `every`-th held-out document of `shards`, cut to its first `tokens` tokens, as one shard in the folder `to`. Every document begins with
    the first token of the shard, and the same token ends the last document. (A shard: 256 int32, the third the number of tokens; then uint16.)"""
    files, text, head = sorted(shards.glob("*val_*.bin")), array.array("H"), None
    for file in files:
        content = file.read_bytes()
        if len(content) < HEADER:
            sys.exit(f"experiment: {file}: found {len(content)} bytes, expected a shard of 16-bit tokens of `ingot data pack`")
        head = struct.unpack("<256i", content[:HEADER])
        if len(content) != HEADER + 2 * head[2]:
            sys.exit(f"experiment: {file}: found {len(content):,} bytes, expected a shard of 16-bit tokens of `ingot data pack`")
        text.frombytes(content[HEADER:])
    if not text:
        sys.exit(f"experiment: {shards}: found no held-out tokens, --part expected shards of 16-bit tokens of `ingot data pack`")
    begins = [i for i, token in enumerate(text) if token == text[0]]
    documents = [text[a:min(b, a + tokens)] for a, b in zip(begins, [*begins[1:], len(text)])]
    part = array.array("H", [token for document in documents[::every] for token in document] + [text[0]])
    to.mkdir(exist_ok=True)
    (to / files[0].name).write_bytes(struct.pack("<256i", *head[:2], len(part), *head[3:]) + part.tobytes())


def read_back(o, artifact):
    """Scores of the artifact besides the plain score, which `ingot export` reports."""
    def score(*options):
        return json.loads(run([o.ingot, "eval", artifact, "--data", o.out / "part" if o.part else o.data, "--json", *options]))
    found = {}
    if o.part:
        found["bits_per_byte_part"] = score()["bits_per_byte"]
    if o.stride:
        sliding = score("--stride", o.stride)
        found |= {"bits_per_byte_sliding": sliding["bits_per_byte"], "sliding_seconds": sliding["seconds"]}
    if o.adapt is not None:
        adapted = score("--ttt", *shlex.split(o.adapt))
        found |= {"bits_per_byte_adapted": adapted["bits_per_byte"], "adapted": {**adapted["ttt"], "seconds": adapted["seconds"]}}
    return found


def columns(seeds):
    return [(key, title) for key, title in COLUMNS if key in seeds[0]]


def one_seed(o, seed):
    directory, artifact, report = (o.out / f"seed-{seed}{end}" for end in ("", ".ingot", ".json"))
    options = options_of(o)
    if not report.exists():
        length = ["--set", f"train.seconds={o.seconds}"] if o.seconds else []
        run([o.ingot, "train", "--data", o.data, "--out", directory, "--set", f"train.seed={seed}", *length, *shlex.split(o.train)])
        exported = run([o.ingot, "export", directory, artifact, "--data", o.data, "--json", *shlex.split(o.export)])
        partial = report.with_suffix(".partial")
        partial.write_text(json.dumps({"seed": seed, "options": options, **json.loads(exported), **read_back(o, artifact)}))
        partial.replace(report)
    result = read(report)
    if result.pop("options", None) != options:
        sys.exit(f"experiment: {report}: found a result of other options, expected the same, or another OUT")
    return {**result, "seed": seed}


def read_reports(files):
    """The results of seeds that ran one at a time, perhaps on other machines, with the same options."""
    seeds = [read(f) for f in files]
    for file, s in zip(files, seeds):
        if s.get("options") != seeds[0].get("options"):
            sys.exit(f"experiment: {file}: found a result of other options than {files[0]}'s, expected the same")
    if len({s["seed"] for s in seeds}) < len(seeds):
        sys.exit(f"experiment: found seeds {[s['seed'] for s in seeds]}, expected each once")
    return sorted(seeds, key=lambda s: s["seed"])


def summary(seeds):
    """Mean over seeds and deviation of one seed (n - 1); no deviation for a single seed."""
    values = {key: [s[key] for s in seeds] for key, _ in columns(seeds)}
    values["cost"] = [s["bits_per_byte_after"] - s["bits_per_byte_before"] for s in seeds]
    if "bits_per_byte_adapted" in values:
        values["gain"] = [s.get("bits_per_byte_part", s["bits_per_byte_after"]) - s["bits_per_byte_adapted"] for s in seeds]
    return {key: {"mean": statistics.mean(v), "deviation": statistics.stdev(v) if len(v) > 1 else None} for key, v in values.items()}


def show(key, value):
    return "-" if value is None else f"{value:,.0f}" if key == "total_bytes" else f"{value:.4f}"


def show_table(seeds):
    of_all = summary(seeds)
    rows = [["seed", *(title for _, title in columns(seeds))]]
    rows += [[str(s["seed"]), *(show(key, s[key]) for key, _ in columns(seeds))] for s in seeds]
    rows += [[name, *(show(key, of_all[key][name]) for key, _ in columns(seeds))] for name in ("mean", "deviation")]
    for row in rows:
        print("  ".join(cell.rjust(12) for cell in row))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("ingot", type=pathlib.Path, nargs="?", help="the binary")
    p.add_argument("data", type=pathlib.Path, nargs="?")
    p.add_argument("out", type=pathlib.Path, nargs="?")
    p.add_argument("--reports", type=pathlib.Path, nargs="+", metavar="SEED.json", help="instead: put together what seeds gave")
    p.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    p.add_argument("--seconds", type=float, default=0, help="of training, each seed; 0: as many steps as the options of --train say")
    p.add_argument("--train", default="", help="options of `ingot train`, as one word")
    p.add_argument("--export", default="", help="options of `ingot export`, as one word")
    p.add_argument("--stride", type=int, default=0, help="score what was read back by sliding windows of this stride too")
    p.add_argument("--part", type=part_of, metavar="EVERY:TOKENS", help="sliding and adapted scores of these documents alone, cut to so many tokens")
    p.add_argument("--adapt", help="score it by test-time training too: options of `ingot eval --ttt`, as one word")
    o = p.parse_args()
    if o.reports:
        return show_table(read_reports(o.reports))
    if o.out is None:
        p.error("expected INGOT, DATA and OUT, or --reports")
    if len(set(o.seeds)) < len(o.seeds):
        p.error(f"--seeds: found {o.seeds}, expected each once")
    try:
        o.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"experiment: {o.out}: {error.strerror}")
    if o.part:
        write_part(o.data, o.out / "part", *o.part)
    seeds = [one_seed(o, seed) for seed in o.seeds]
    said = {**options_of(o), "seeds": seeds, "summary": summary(seeds)}
    (o.out / "experiment.json").write_text(json.dumps(said, indent=2) + "\n")
    show_table(seeds)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # the running program has reported what was saved
        sys.exit(130)
