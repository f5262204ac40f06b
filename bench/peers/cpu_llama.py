"""Ingot on the CPU beside llama.cpp, in turn on the same files: prompts and tokens of random weights, and answers whose drafts come from lookup. Prints tables; no report.

    python3 bench/peers/cpu_llama.py speed --llama-bench PATH [--sizes smollm2-135m,llama-3.2-1b] [--threads 1,2] [--rounds 3]
    python3 bench/peers/cpu_llama.py lookup --llama-server PATH --model SmolLM2.gguf TASK.txt...

speed: `ingot bench decode --model` and `llama-bench` on a GGUF of a published shape with bf16 weights (synthetic_gguf.py): a prompt, and tokens after the prompt. A
prompt's last token is computed with the head by both.
lookup: greedy answers without drafts and with them, by `ingot generate --draft lookup` and by llama-server with each kind of n-gram drafts. Both receive the same ids,
which llama-server makes of the task's text in the model's chat format. llama.cpp computes weights in blocks with rounded activations, so give a file in bf16.

The best of the rounds counts, because other work on the machine only adds time. Needs the package `gguf` (PyPI) for `speed`.
"""
import argparse
import contextlib
import json
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

# The n-gram drafts of llama-server: its defaults of two kinds, and keys and drafts as short as Ingot's.
LOOKUPS = {"none": [], "ngram-simple": ["--spec-type", "ngram-simple"], "ngram-simple, 3 and 7 tokens": ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "7"],
           "ngram-cache": ["--spec-type", "ngram-cache"]}


def run(*line):
    done = subprocess.run([str(word) for word in line], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, line[:3]))}: {done.stderr.strip()[-300:]}")
    return done.stdout


def speeds(options, file, threads):
    """Tokens per second of the prompt and of the answer, of both programs."""
    found = json.loads(run(options.ingot, "bench", "decode", "--model", file, "--device", "cpu", "--threads", threads, "--context", options.prompt, "--tokens", options.tokens, "--kernels-alone", "--json"))
    ours = (1e3 * options.prompt / found["first_token_ms"], 1e3 / found["token"]["cpu"]["mean_ms"])
    theirs = []
    for sizes in (("-p", options.prompt, "-n", 0), ("-p", 0, "-n", options.tokens, "-d", options.prompt)):
        theirs.append(json.loads(run(options.llama_bench, "-m", file, "-t", threads, *sizes, "-r", 1, "-o", "json"))[-1]["avg_ts"])
    return ours, theirs


def speed(options):
    import synthetic_gguf

    print(f"| shape | threads | prompt of {options.prompt}, tokens/s | llama.cpp | ratio | token, tokens/s | llama.cpp | ratio |\n|---|---:|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for size in options.sizes.split(","):
            file = pathlib.Path(folder) / f"{size}.gguf"
            synthetic_gguf.write(size, "bf16", file)
            for threads in options.threads.split(","):
                rounds = [speeds(options, file, threads) for _ in range(options.rounds)]
                ours, theirs = ([max(r[who][i] for r in rounds) for i in range(2)] for who in range(2))
                cells = [f"{ours[i]:,.1f} | {theirs[i]:,.1f} | {ours[i] / theirs[i]:.2f}" for i in range(2)]
                print(f"| {size} | {threads} | {cells[0]} | {cells[1]} |", flush=True)
            file.unlink()


def ask(url, path, body):
    request = urllib.request.Request(f"{url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.loads(answer.read())


@contextlib.contextmanager
def llama_server(options, more):
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    line = [options.llama_server, "-m", options.model, "-t", options.threads, "-tb", options.threads, "-np", 1, "-c", 4096, "--host", "127.0.0.1", "--port", port, "--no-webui", *more]
    process = subprocess.Popen([str(word) for word in line], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                break
            if process.poll() is not None:
                raise SystemExit(f"{options.llama_server}: ended with status {process.returncode}")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def prompt_ids(options, text):
    with llama_server(options, []) as url:
        prompt = ask(url, "apply-template", {"messages": [{"role": "user", "content": text}]})["prompt"]
        return ask(url, "tokenize", {"content": prompt, "add_special": True, "parse_special": True})["tokens"]


def theirs(options, ids, more):
    """(ids, tokens per second, draft tokens, accepted draft tokens) of an answer, the same for each round."""
    with llama_server(options, more) as url:
        answer = ask(url, "completion", {"prompt": ids, "n_predict": options.tokens, "temperature": 0, "cache_prompt": False, "return_tokens": True})
    times = answer["timings"]
    return answer["tokens"], times["predicted_per_second"], times.get("draft_n", 0), times.get("draft_n_accepted", 0)


def ours(options, ids, draft):
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write(json.dumps(ids) + "\n")
        file.flush()
        answer = json.loads(run(options.ingot, "generate", "--model", options.model, "--device", "cpu", "--threads", options.threads, "--ids", file.name, "--tokens", options.tokens,
                                "--temperature", 0, "--json", "--draft", draft))
    drafts = answer.get("drafts", {"tokens": 0, "accepted": 0})
    return answer["ids"], len(answer["ids"]) / answer["token_seconds"], drafts["tokens"], drafts["accepted"]


def lookup(options):
    print("| task | program | drafts | draft tokens, accepted | tokens/s | over no drafts |\n|---|---|---|---:|---:|---:|")
    for task in options.tasks:
        ids = prompt_ids(options, task.read_text())
        kinds = [("Ingot", how, lambda how=how: ours(options, ids, how)) for how in ("none", "lookup")]
        kinds += [("llama.cpp", how, lambda more=more: theirs(options, ids, more)) for how, more in LOOKUPS.items()]
        rounds = [[measure() for _, _, measure in kinds] for _ in range(options.rounds)]
        for i, (program, how, _) in enumerate(kinds):
            without = max(r[i - [k[0] for k in kinds[:i]].count(program)][1] for r in rounds)  # the program's first kind
            best = max((r[i] for r in rounds), key=lambda answer: answer[1])
            same = "" if best[0] == rounds[0][0][0] else ", other ids"
            print(f"| {task.stem}, {len(ids)} + {len(best[0])} tokens{same} | {program} | {how} | {best[2]}, {best[3]} | {best[1]:.1f} | {best[1] / without:.2f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ingot", default="build/cpu/ingot")
    what = parser.add_subparsers(required=True)
    p = what.add_parser("speed")
    p.add_argument("--llama-bench", required=True)
    p.add_argument("--sizes", default="smollm2-135m,llama-3.2-1b")
    p.add_argument("--threads", default="1,2")
    p.add_argument("--prompt", type=int, default=512)
    p.add_argument("--tokens", type=int, default=32)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--folder", help="where the GGUFs of up to 2.5 GB are written (default: the folder of temporary files)")
    p.set_defaults(measure=speed)
    p = what.add_parser("lookup")
    p.add_argument("--llama-server", required=True)
    p.add_argument("--model", required=True)
    p.add_argument("tasks", nargs="+", type=pathlib.Path)
    p.add_argument("--threads", default="2")
    p.add_argument("--tokens", type=int, default=160)
    p.add_argument("--rounds", type=int, default=3)
    p.set_defaults(measure=lookup)
    options = parser.parse_args()
    options.measure(options)


if __name__ == "__main__":
    sys.exit(main())
