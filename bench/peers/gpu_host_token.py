"""The host's cost of a token of GPT-OSS: the time of a token in `ingot generate`, for a client of `ingot serve`, and in Python, over the time of the
kernels alone, with random weights of the published shapes. Writes bench/results/<gpu>/host_token.json.

    PYTHONPATH=build/cuda/python python3 bench/peers/gpu_host_token.py --native build/cuda/libingot_bench.so [--ingot build/cuda/ingot] [--only TEXT] [--quick]

All rows are one stream of 1,000 tokens after a prompt of 1,024. The limit of a row is the time of the kernels alone for the same tokens: greedy, or at
temperature 1, which filters begin from too. *Decoder* is the call that the three remaining rows use, in `ingot bench decode`. Medians of three rounds
in turn; `generate` runs in a process of its own each time, and Python in a process per round, so their rows contain the recording of the token's graph.
"""
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import torch

from gpu_common import IN_MEMORY, Native, begin, ceilings, median, parsed, print_end, program_options, say_case, describe
from gpu_serve import free_port, running

SIZE, PROMPT, TOKENS = "20b", 1024, 1000
SAMPLING = {"greedy": dict(temperature=0), "temperature 1": {}, "top-p 0.9": dict(top_p=0.9), "top-k 40, min-p 0.05": dict(top_k=40, min_p=0.05)}
# The program of the Python rows. The program prints the seconds of a token of generate() and of stream() for each sampling.
IN_PYTHON = """
import json, random, sys, time
import ingot
options = json.loads(sys.argv[1])
model = ingot.engine.Model("synthetic:" + options["size"], device=options["device"], context=options["prompt"] + options["tokens"])
noise = random.Random(options["seed"])
ask = lambda: [noise.randrange(256, options["vocab"]) for _ in range(options["prompt"])]
found = {}
for name, sampling in options["sampling"].items():
    answer = model.generate(ask(), raw=True, past_end=True, max_tokens=options["tokens"], **sampling)
    at = [time.perf_counter() for _ in model.stream(ask(), raw=True, past_end=True, max_tokens=options["tokens"], **sampling)]
    found[name] = {"generate": answer.token_seconds / len(answer.ids), "stream": (at[-1] - at[0]) / (options["tokens"] - 1)}
print(json.dumps(found))
"""


def run(*line):
    done = subprocess.run([str(word) for word in line], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{line[1]}: {done.stderr.strip()[-400:]}")
    return json.loads(done.stdout.splitlines()[-1])


def flags(sampling):
    return [word for name, value in sampling.items() for word in (f"--{name.replace('_', '-')}", value)]


def kernels_and_decoder(options):
    """Milliseconds by sampling of the kernels alone, and through the decoder."""
    found = run(options.ingot, "bench", "decode", "--synthetic", SIZE, "--megakernel", "--context", PROMPT, "--tokens", TOKENS, "--json")
    token = found["token"]
    kernels = {name: (token["prefiltered"] if name == "greedy" else token["sampled"])["mean_ms"] for name in SAMPLING}
    return kernels, {name: found["sampled"][0]["token"][name]["mean_ms"] for name in SAMPLING}


def generate(options, sampling, seed, folder):
    ids = pathlib.Path(folder) / "ids.jsonl"
    noise = random.Random(seed)
    ids.write_text(json.dumps([noise.randrange(256, options.vocab) for _ in range(PROMPT)]) + "\n")
    found = run(options.ingot, "generate", "--model", f"synthetic:{SIZE}", "--device", options.device, "--ids", ids, "--tokens", TOKENS, "--past-end", "--json", *flags(sampling))
    return 1e3 * found["token_seconds"] / len(found["ids"])


def client(options, sampling, seed, url):
    found = run(options.ingot, "bench", "serve", "--url", url, "--vocab", options.vocab, "--concurrency", 1, "--requests", 1, "--prompt", PROMPT, "--tokens", TOKENS, "--seed", seed,
                "--json", *flags(sampling))
    return found["results"][0]["token_ms"]


def python(options, names, seed):
    return run(sys.executable, "-c", IN_PYTHON, json.dumps(dict(size=SIZE, device=options.device, prompt=PROMPT, tokens=TOKENS, seed=seed, vocab=options.vocab,
                                                                sampling={name: SAMPLING[name] for name in names})))


def measure(report, options, folder):
    """The missing cases that fit into the time together, in turn: a server and a Python process serve all of them. The seconds of a case are an equal share."""
    begun, names = report.now(), report.fitting()
    kernels, decoder = kernels_and_decoder(options)
    seen = {name: {"decoder": [decoder[name]]} for name in names}
    port = free_port()
    with running([options.ingot, "serve", "--model", f"synthetic:{SIZE}", "--device", options.device, "--slots", 1, "--port", port], port, pathlib.Path(folder) / "ingot.log") as url:
        for seed in range(1, options.rounds + 1):
            in_python = python(options, names, seed)
            for i, name in enumerate(names):
                for place, ms in (("generate", generate(options, SAMPLING[name], seed, folder)), ("a client of serve", client(options, SAMPLING[name], 100 * seed + i, url)),
                                  ("Python, generate()", 1e3 * in_python[name]["generate"]), ("Python, stream()", 1e3 * in_python[name]["stream"])):
                    seen[name].setdefault(place, []).append(ms)
    seconds = (report.now() - begun) / len(names)
    for name in names:
        say_case(report, list(rows_of(kernels, {name: seen[name]})), said, name=name, seconds=seconds)


def rows_of(kernels, seen):
    for name, of_place in seen.items():
        for place, ms in of_place.items():
            yield {"name": f"gpt-oss-{SIZE}, {name}, {place}", "shape": [PROMPT, TOKENS], "dtype": "bf16, mxfp4", "ours_us": 1e3 * median(ms), "peers": {"kernels": 1e3 * kernels[name]},
                   "limit_us": 1e3 * kernels[name], "rounds_us": [1e3 * x for x in ms]}


def said(r):
    return f"{r['name']:56} {r['ours_us'] / 1e3:7.4f} ms, {100 * (r['ours_us'] / r['limit_us'] - 1):5.1f} % over the kernels alone ({r['limit_us'] / 1e3:.4f} ms)"


def main():
    parser = program_options("sampling")
    parser.add_argument("--rounds", type=int, default=3)
    options = parsed(parser)
    options.device, options.vocab = "cuda", 199998
    report = begin("host_token", options, list(SAMPLING), str)
    if report.fitting():
        describe(report, ceilings(Native(options.native)))
        torch.cuda.empty_cache()
        with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
            measure(report, options, folder)
    print_end(report)


if __name__ == "__main__":
    main()
