"""A server of GPT-OSS, measured by its clients: `ingot bench serve` with prompts of 500 random ids and answers of 200 tokens, at 1 to 64 requests at once and
with several kinds of sampling, with random weights of the published shapes. Writes bench/results/<gpu>/serve.json.

    python3 bench/peers/gpu_serve.py --native build/cuda/libingot_bench.so [--ingot build/cuda/ingot] [--llama-server PATH] [--only TEXT] [--quick]

A row's time is the whole time divided by the tokens of all answers, prompts included. The limit of a token is the time of reading the weights of a step of
as many sequences with randomly chosen experts, at the speed of a kernel that only reads, and the products of the prompts at the speed of a plain
product, both measured in this run. Clients, server and GPU are on one machine. `ingot serve` answers all cases of a model from one process.

llama.cpp's `llama-server`, built with CUDA and given by path, is a peer at 20B shapes at temperature 1, with 1, 16 and 64 requests at once: with as many slots, on
a GGUF with random weights of the same formats (synthetic_gguf.py), asked by the same clients in the same run, with two counted requests of each client.
"""
import contextlib
import itertools
import json
import pathlib
import socket
import subprocess
import tempfile
import time
import urllib.request

import torch

import synthetic_gguf
from gpu_common import IN_MEMORY, Native, attempt, begin, ceilings, parsed, print_end, program_options, say_case, describe

PROMPT, ANSWER = 500, 200
MODELS = ("20b", "120b")
LAYERS, EXPERTS = {"20b": 24, "120b": 36}, {"20b": 32, "120b": 128}
# Sampling by its name, the options of `ingot bench serve`, and the numbers of requests at once.
SAMPLING = {"temperature 1": ([], (1, 2, 4, 8, 16, 32, 64)), "greedy": (["--temperature", "0"], (1, 16)), "top-p 0.9": (["--top-p", "0.9"], (1, 16)),
            "top-k 40, min-p 0.05": (["--top-k", "40", "--min-p", "0.05"], (1, 16))}
# llama.cpp's cases and the counted requests of each of its clients, which are few because its steps are long.
RIVAL, RIVAL_SAMPLING, RIVAL_COUNTS, RIVAL_REQUESTS = "llama.cpp", "temperature 1", (1, 16, 64), 2


def label(case):
    return f"gpt-oss-{case[0]}, bf16 dense, {case[1]}"


def weights_of(size, rows):
    """Bytes of weights of a step of `rows` sequences, and operations of a token: random experts, 4 of a layer for each row."""
    hidden, qkv, attention, vocab = 2880, 64 * 64 + 2 * 8 * 64, 64 * 64, 201088
    expert = 3 * hidden * hidden  # gate, up and down
    chosen = EXPERTS[size] * (1 - (1 - 4 / EXPERTS[size]) ** rows)
    dense = hidden * (qkv + attention + EXPERTS[size])
    bytes_ = 2 * vocab * hidden + LAYERS[size] * (2 * dense + chosen * expert * 17 / 32)
    return bytes_, 2 * LAYERS[size] * (dense + 4 * expert)


def limit_us(size, rows, ceiling):
    bytes_, flops = weights_of(size, rows)
    return bytes_ / rows / ceiling["read_TBps"] * 1e-6 + flops * PROMPT / ANSWER / ceiling["bf16_TFLOPs"] * 1e-6


@contextlib.contextmanager
def running(line, port, log):
    """A server, returned as soon as it answers on the port; stopped at the end."""
    with open(log, "wb") as out:
        process = subprocess.Popen([str(word) for word in line], stdout=out, stderr=out)
    try:
        until = time.monotonic() + 300
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                    if answer.status == 200:
                        break
            except OSError:
                pass
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{line[0]}: {' '.join(pathlib.Path(log).read_text(errors='replace').split())[-300:]}")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


SEEDS = itertools.count(1)  # a server that receives a prompt a second time would reuse its work


def ask(options, url, sampling, counts, requests=None):
    """The results of `ingot bench serve` by the number of requests at once, with so many counted requests of each client (default: the option's number)."""
    line = [options.ingot, "bench", "serve", "--url", url, "--vocab", 199998, "--prompt", PROMPT, "--tokens", ANSWER, "--requests", requests or options.requests, "--seed", next(SEEDS),
            "--concurrency", ",".join(map(str, counts)), "--json", *sampling]
    done = subprocess.run([str(word) for word in line], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"bench serve: {done.stderr.strip()[-300:]}")
    found = {r["concurrency"]: r for r in json.loads(done.stdout)["results"]}
    if any(20 * r["reused_tokens"] > r["prompt_tokens"] for r in found.values()):
        raise RuntimeError(f"bench serve: {done.stderr.strip()[-300:]}")
    return found


def us_of(result):
    return 1e6 / result["tokens_per_second"]


def rows_of(case, found, ceiling):
    size, sampling = case
    for n, result in found.items():
        yield {"name": f"{label(case)}, {n} at once", "shape": [n, PROMPT, ANSWER], "dtype": "bf16, mxfp4", "model": f"gpt-oss-{size}", "sampling": sampling,
               "ours_us": us_of(result), "peers": {}, "limit_us": limit_us(size, n, ceiling), "clients": result}


# How llama.cpp's server samples, in the order in which it is tried: a build may end with an error where it is asked to sample on the GPU.
RIVAL_SAMPLERS = {"on the GPU": ["--backend-sampling"], "on one CPU thread for all slots": []}


def rival_results(options, gguf, counts, folder):
    """The results of `ask` from llama.cpp's server, and how it sampled."""
    for sampler, flags in RIVAL_SAMPLERS.items():
        port, slots = free_port(), max(counts)
        line = [options.llama_server, "-m", gguf, "-ngl", 99, "-np", slots, "-c", slots * (PROMPT + ANSWER + 68), "--host", "127.0.0.1", "--port", port, "--no-webui", *flags]
        try:
            with running(line, port, pathlib.Path(folder) / "llama.log") as url:
                found = ask(options, url, SAMPLING[RIVAL_SAMPLING][0], counts, RIVAL_REQUESTS)
            if not all(r["tokens_per_second"] > 0 for r in found.values()):
                raise RuntimeError(f"{options.llama_server}: no tokens, {sum(r['errors'] for r in found.values())} failed requests")
            return found, sampler
        except RuntimeError as e:
            failure = e
    raise failure


def add_rival(rows, options, folder):
    """llama.cpp's times into those of a case's rows that it is asked for; a failure becomes their reason."""
    rows = [r for r in rows if r["shape"][0] in RIVAL_COUNTS]
    gguf = pathlib.Path(folder) / "20b.gguf"
    try:
        if options.llama_server is None:
            raise LookupError("not given by path")
        synthetic_gguf.write("20b", "bf16", gguf)
        found, sampler = rival_results(options, gguf, [r["shape"][0] for r in rows], folder)
        for r in rows:
            theirs = found[r["shape"][0]]
            r["peers"][RIVAL], r[RIVAL] = us_of(theirs), {**theirs, "sampled": sampler}
    except (ImportError, LookupError, OSError, RuntimeError, ZeroDivisionError) as e:
        for r in rows:
            r["absent"] = {RIVAL: str(e)[:300] if isinstance(e, LookupError) else f"{type(e).__name__}: {str(e)[-300:]}"}
    finally:
        gguf.unlink(missing_ok=True)


def said(r):
    c = r["clients"]
    return (f"{r['name']:56} {c['tokens_per_second']:7.0f} tokens/s, {c['token_ms']:6.2f} ms a token, first {c['first_token_ms']['p50']:6.1f} / {c['first_token_ms']['p99']:6.1f} ms, "
            f"between {c['between_tokens_ms']['p50']:6.2f} / {c['between_tokens_ms']['p99']:6.2f} ms, {100 * r['limit_us'] / r['ours_us']:3.0f} % of the limit"
            + (f", {c['errors']} errors" if c["errors"] else "") + "".join(f", {p} {1e6 / us:.0f} tokens/s" for p, us in r["peers"].items())
            + "".join(f", {p}: {why}" for p, why in r.get("absent", {}).items()))


def measure_model(size, report, options, ceiling, folder):
    """The missing cases of a model that fit into the time, from one process of `ingot serve`; then llama.cpp's server, whose times belong to the rows of one case."""
    of_rival = [name for name, case in report.cases.items() if case == ("20b", RIVAL_SAMPLING)]
    of_model = [name for name, case in report.cases.items() if case[0] == size]
    chosen = sorted(report.fitting(of_model), key=lambda name: name in of_rival)  # last, because its rows are added after the rival's time
    if not chosen:
        return
    with_rival, port = None, free_port()
    line = [options.ingot, "serve", "--synthetic", size, "--slots", options.slots, "--port", port]
    with running(line, port, pathlib.Path(folder) / "ingot.log") as url:
        for name in chosen:
            begun, case = report.now(), report.cases[name]
            arguments, counts = SAMPLING[case[1]]
            with attempt(report, name):
                rows = list(rows_of(case, ask(options, url, arguments, counts), ceiling))
                if name in of_rival:
                    with_rival = name, rows, report.now() - begun
                else:
                    say_case(report, rows, said, name=name, seconds=report.now() - begun)
    if with_rival:
        name, rows, seconds = with_rival
        begun = report.now()
        add_rival(rows, options, folder)
        say_case(report, rows, said, name=name, seconds=seconds + report.now() - begun)


def main():
    parser = program_options()
    parser.add_argument("--llama-server", type=pathlib.Path, help="llama.cpp's server, built with CUDA: a peer at 20B shapes")
    parser.add_argument("--requests", type=int, default=3, help="counted requests of each client (default: 3)")
    parser.add_argument("--slots", type=int, default=64, help="of `ingot serve` (default: 64)")
    parser.add_argument("--folder", default=IN_MEMORY, help="where the GGUF of 14 GB is written (default: memory)")
    options = parsed(parser)
    synthetic_gguf.check_llama("serve: --llama-server", options.llama_server)
    report = begin("serve", options, [(size, sampling) for size in MODELS for sampling in SAMPLING], label)
    if report.fitting():
        ceiling = ceilings(Native(options.native))
        torch.cuda.empty_cache()
        describe(report, ceiling, slots=options.slots)
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            for size in MODELS:
                measure_model(size, report, options, ceiling, folder)
    print_end(report)


if __name__ == "__main__":
    main()
