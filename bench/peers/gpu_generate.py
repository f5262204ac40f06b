"""A token of generation by small models of `ingot train` on a GPU, one stream, greedy and sampled: `ingot generate`, beside the same program on the
machine's CPU. Writes bench/results/<gpu>/generate.json.

    python3 bench/peers/gpu_generate.py --native build/cuda/libingot_bench.so [--ingot build/cuda/ingot] [--only TEXT] [--quick]

The models are trained for a few steps on random text; their output does not matter. A time is the program's own time for all tokens after the
prompt, divided by their number. The time includes the recording of the token's graph and the sliding of windows: nano sees 64 tokens, and a full
window reads half of its tokens again. Medians of three rounds in turn, each in a process; of golf's 1,000 tokens the CPU makes the first 64.
The limit is one reading of all parameters in bf16 from memory. Tests check the GPU's tokens (models/gpt/generate/device_decoder.cuda.test.cpp);
these are times only.
"""
import json
import pathlib
import random
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from gpu_common import IN_MEMORY, Native, begin, ceilings, measure_each, parsed, program_options  # noqa: E402
from train_runs import PRESET, in_turn, median_of, write_data  # noqa: E402

DRAWS = {"greedy": ["--temperature", "0"], "sampled": ["--temperature", "0.8"]}
# Model, sampling, tokens, and the number of tokens on the CPU.
CASES = (("nano", "greedy", 2000, 2000), ("nano", "sampled", 2000, 2000), ("golf", "sampled", 1000, 64))


def label(case):
    return f"{case[0]}, {case[1]}"


def run(options, *line):
    done = subprocess.run([options.ingot, *map(str, line)], capture_output=True, text=True, timeout=options.limit)
    if done.returncode != 0:
        raise RuntimeError(f"ingot {line[0]}: {done.stderr.strip()[-400:]}")
    return done.stdout


def make_run(options, model, folder):
    """A run of `model` in `folder` over random text: characters of nano's vocabulary, or golf's random tokens with all layer calls."""
    if model == "nano":
        letters = "".join(chr(c) for c in range(48, 48 + 65))
        text = folder / "text.txt"
        text.write_text("".join(random.Random(1).choices(letters, k=50000)), encoding="utf-8")
        more = ["--data", text, "--steps", 20]
    else:
        write_data(options.ingot, folder, PRESET["model"]["vocab"], 8192)
        more = ["--data", folder / "shards", "--tokenizer", folder / "tokenizer.json", "--steps", 1, "--accumulation", 1, "--batch-tokens", 8192,
                "--set", "model.loop_from=0", *options.shrink]
    run(options, "train", "--preset", model, *more, "--out", folder / "run", "--device", options.device)
    return folder / "run"


def generate(options, run_folder, draw, tokens, *where):
    found = json.loads(run(options, "generate", run_folder, "--prompt", "A", "--tokens", tokens, *DRAWS[draw], "--seed", 1, "--past-end", "--json", *where))
    assert len(found["ids"]) == tokens, (draw, tokens, len(found["ids"]))
    return {"us": 1e6 * found["token_seconds"] / tokens}


def measure(case, options, run_folder, ceiling):
    _, draw, tokens, cpu_tokens = case
    found = in_turn({"ours": lambda: generate(options, run_folder, draw, tokens, "--device", options.device),
                     "cpu": lambda: generate(options, run_folder, draw, cpu_tokens, "--device", "cpu"),
                     "cpu_one_thread": lambda: generate(options, run_folder, draw, cpu_tokens, "--device", "cpu", "--threads", 1)}, rounds=3)
    us = {name: median_of(rounds, "us") for name, rounds in found.items()}
    weight_bytes = json.loads(run(options, "info", run_folder, "--json"))["weight_bytes"]["bf16"]
    return {"name": label(case), "shape": [tokens], "cpu_tokens": cpu_tokens, "dtype": "bf16", "ours_us": us["ours"], "peers": {k: v for k, v in us.items() if k != "ours"},
            "limit_us": weight_bytes / ceiling["read_TBps"] * 1e-6, "tokens_per_second": {name: 1e6 / t for name, t in us.items()},
            "rounds_us": {name: [r["us"] for r in rounds] for name, rounds in found.items()}}


def options_of():
    parser = program_options()
    parser.add_argument("--limit", type=float, default=60, help="seconds that a process may take (default: 60)")
    options = parsed(parser)
    options.device, options.shrink = "cuda", ()
    return options


def main():
    options = options_of()
    machine, runs = json.loads(run(options, "doctor", "--json")), {}
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as temporary:
        def measured(case, ceiling):
            model = case[0]
            if model not in runs:
                folder = pathlib.Path(temporary) / model
                folder.mkdir()
                runs[model] = make_run(options, model, folder)
            return measure(case, options, runs[model], ceiling)

        def said(r):
            return f"{r['name']}, {r['shape'][0]} tokens: " + ", ".join(f"{name} {rate:,.0f} tokens/s" for name, rate in r["tokens_per_second"].items())
        measure_each(begin("generate", options, CASES, label), lambda: ceilings(Native(options.native)), measured, said, cpu=machine["cpu"])


if __name__ == "__main__":
    main()
