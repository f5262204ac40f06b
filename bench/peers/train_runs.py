"""Runs of `ingot train` for benchmarks: steps of the preset golf over random tokens in documents, timed by the log. Tests check the computed values
(models/gpt, engines/train); these are times only."""
import json
import math
import pathlib
import random
import struct
import subprocess
import tempfile

import torch

from gpu_common import IN_MEMORY, ROOT, Native, begin, ceilings, measure_each, median, parsed, program_options

PRESET = json.loads((ROOT / "presets" / "golf.json").read_text(encoding="utf-8"))
TOKENS = 98304  # tokens of a pass


def document_lengths(tokens, longest, seed):
    """Lengths with a median of 475 tokens, as in web text, 195 documents in 98,304 tokens; the last document is cut."""
    draw, lengths = random.Random(seed), []
    while sum(lengths) < tokens:
        lengths.append(max(2, min(longest, round(draw.lognormvariate(math.log(475), 0.344)))))
    lengths[-1] -= sum(lengths) - tokens
    return lengths


def write_shard(path, tokens, vocab, seed):
    """Documents of random tokens, each behind the token 0, which starts a document in the tokenizer of write_data."""
    ids = torch.randint(1, vocab, (tokens,), generator=torch.Generator().manual_seed(seed)).to(torch.int16)
    at = 0
    for length in document_lengths(tokens, PRESET["model"]["context"], seed):
        ids[at] = 0
        at += length
    path.write_bytes(struct.pack("<256i", 20240520, 1, tokens, *[0] * 253) + bytes(ids.untyped_storage()))


def write_data(ingot, folder, vocab, tokens):
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(3, 9))) for _ in range(2 * vocab)]
    (folder / "words.txt").write_text(" ".join(draw.choices(words, k=25 * vocab)), encoding="utf-8")
    done = subprocess.run([ingot, "tokenizer", "train", "--data", folder / "words.txt", "--vocab", str(vocab), "--out", folder / "tokenizer.json"],
                          capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise RuntimeError(f"ingot tokenizer: {done.stderr.strip()[-400:]}")
    (folder / "shards").mkdir()
    write_shard(folder / "shards" / "random_train_000000.bin", 12 * tokens, vocab, 1)
    write_shard(folder / "shards" / "random_val_000000.bin", tokens // 4, vocab, 2)


def measured_of(logged, warm):
    """The logged steps of a run without the first `warm` steps."""
    measured = sorted(logged[warm:], key=lambda entry: entry["step_seconds"])
    first = logged[0]  # the log smooths its rates from the first step on, so only the first step's rate is its own
    return {"ms": 1e3 * measured[len(measured) // 2]["step_seconds"], "flops": first["flops_per_second"] * first["step_seconds"],
            "memory_bytes": max(entry["memory_bytes"] for entry in logged)}


def how_far(log, said):
    """How far a run came that had to be ended: its last log lines and its last message (bytes, text or None)."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    said = (said.decode(errors="replace") if isinstance(said, bytes) else said or "").strip()
    logged = " ".join(line[:300] for line in lines[-2:]) or "nothing, not even its start"
    return f"It logged {logged}; it said {said[-400:] or 'nothing'}"


def measure_ours(options, folder, applications, passes, steps, warm=4, more=()):
    """The median step of a run with options `more`: milliseconds, the floating-point operations of a step, and the memory of the GPU in use."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as run:
        out = pathlib.Path(run) / "run"
        line = [options.ingot, "train", "--preset", "golf", "--data", folder / "shards", "--tokenizer", folder / "tokenizer.json", "--out", out,
                "--steps", str(warm + steps), "--accumulation", str(passes), "--device", options.device, "--batch-tokens", str(options.tokens),
                "--set", f"model.loop_from={0 if applications == 17 else 1}", "--set", "train.log_every=1", *options.shrink, *more]
        try:
            done = subprocess.run(line, capture_output=True, text=True, timeout=options.limit)
        except subprocess.TimeoutExpired as ended:
            raise RuntimeError(f"ingot train: not done after {options.limit:g} s. {how_far(out / 'log.jsonl', ended.stderr)}") from None
        if done.returncode != 0:
            raise RuntimeError(f"ingot train: {done.stderr.strip()[-400:]}")
        log = [json.loads(text) for text in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    logged = [entry for entry in log if entry["event"] == "step"]
    assert len(logged) == warm + steps and all(entry["looping"] == (applications == 17) for entry in logged), "the run was another one"
    return measured_of(logged, warm)


def in_turn(variants, rounds=2):
    """The results of each of `variants`, functions by name, over several rounds: first to last, then back, so that drift affects all alike."""
    found = {name: [] for name in variants}
    for i in range(rounds):
        for name in list(variants)[::-1 if i % 2 else 1]:
            found[name].append(variants[name]())
    return found


def median_of(rounds, key="ms"):
    return median([r[key] for r in rounds])


class Used:
    """The GPU memory in use before a run, which the run's log includes."""

    def __init__(self):
        torch.cuda.empty_cache()
        self.bytes = self.now()

    def now(self):
        free, whole = torch.cuda.mem_get_info()
        return whole - free

    def taken_by(self, rounds):
        self.bytes = min(self.bytes, self.now())  # a process that has just ended may still hold memory at first
        return rounds[-1]["memory_bytes"] - self.bytes


def run_options(steps="timed steps of each run"):
    parser = program_options()
    parser.add_argument("--steps", type=int, default=12, help=f"{steps} (default: 12)")
    parser.add_argument("--limit", type=float, default=60, help="seconds that a run may take (default: 60)")
    return parser


def parsed_runs(parser):
    options = parsed(parser)
    options.device, options.tokens, options.shrink = "cuda", TOKENS, ()
    return options


def measure_cases(suite, options, cases, names, measure, said, **more):
    """Measures the cases that the suite's report lacks. measure(case, options, folder, ceiling, used) yields a case's results with the names
    names(case); said(row) is a line for each; more: further entries of the report."""
    used = Used()
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)

        def measured(case, ceiling):
            if not (folder / "shards").exists():
                write_data(options.ingot, folder, PRESET["model"]["vocab"], options.tokens)
            return measure(case, options, folder, ceiling, used)
        measure_each(begin(suite, options, cases, lambda case: "; ".join(names(case))), lambda: ceilings(Native(options.native)), measured, said, **more)
