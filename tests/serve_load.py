"""A load on `ingot serve`: idle connections, clients that stream and sometimes disconnect, slow readers, and at the same time a watch on /health.

    python3 tests/serve_load.py BINARY [--seconds 600] [--idle 256] [--busy 32] [--slow 4] [--slots 8] [--json REPORT]
    python3 tests/serve_load.py BINARY --synthetic 20b --busy 64 --slots 64 [--seconds 300] [--serve OPTIONS] [--json REPORT]
    python3 tests/serve_load.py BINARY --overhead RUN [--seconds 60] [--json REPORT]

The first holds a small random model to this: no event lost or doubled (every whole stream has the text of the same request alone), no growth of
memory, 99 of 100 answers of /health in time (--health-ms; a busy machine needs a larger limit). The second does the same with random weights of
GPT-OSS's shapes, on a GPU where there is one: on a GPU an answer may differ by roundings beside other answers. Instead every event must begin at the
end of the event before (each token comes with its place in the text), the server's own counts must agree, and the GPU's memory must not grow either.
The third compares the time of a token of RUN, a model of `ingot train`, between `ingot generate` and one stream of the server, in turns, at their
best. Ends with 1 where something does not hold.
"""
import argparse
import datetime
import json
import multiprocessing
import os
import pathlib
import random
import re
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))


def options():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("binary")
    p.add_argument("--seconds", type=float, default=600)
    p.add_argument("--idle", type=int, default=256)
    p.add_argument("--busy", type=int, default=32)
    p.add_argument("--slow", type=int, default=4, help="clients that read slowly, beside the busy ones")
    p.add_argument("--slots", type=int, default=8)
    p.add_argument("--synthetic", metavar="SIZE", help="random weights: 20b, 120b or small")
    p.add_argument("--serve", default="", metavar="OPTIONS", help="more options of `ingot serve`, in one word")
    p.add_argument("--health-ms", type=float, default=50)
    p.add_argument("--growth-mb", type=float, default=8)
    p.add_argument("--overhead", metavar="RUN")
    p.add_argument("--json", metavar="REPORT")
    return p.parse_args()


OPTIONS = options() if __name__ == "__main__" else None
if OPTIONS:
    sys.argv = [sys.argv[0], OPTIONS.binary]  # the tests' own module reads this argument
    import serve_test


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=120)


def post(body):
    text = json.dumps(body)
    return f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


def watch_health(port, seconds, results):
    """Of its own process: milliseconds of each GET /health on one connection."""
    took, s, end = [], connect(port), time.monotonic() + seconds
    while time.monotonic() < end:
        started = time.perf_counter()
        s.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert s.recv(4096).startswith(b"HTTP/1.1 200 "), "/health failed"
        took.append((time.perf_counter() - started) * 1e3)
        time.sleep(0.02)
    results.put(took)


def tiny_bodies():
    return [dict(prompt="user " * (1 + i % 7) + str(i), max_tokens=20 + 9 * (i % 11), logit_bias=serve_test.ENDLESS,
                 **(dict(temperature=0) if i % 2 else dict(temperature=1, seed=i))) for i in range(40)]


def synthetic_bodies(vocab, longest):
    """Prompts of ids, long and short, under every kind of sampling; each token of an answer comes with its logprob."""
    noise = random.Random(1)
    kinds = [dict(temperature=1), dict(temperature=0), dict(top_p=0.9), dict(top_k=40, min_p=0.05), dict(temperature=1, frequency_penalty=0.5)]
    return [dict(prompt=[noise.randrange(256, vocab) for _ in range(noise.choice((3, 40, longest // 4, longest)))], max_tokens=noise.randrange(5, longest),
                 seed=i, logprobs=0, **kinds[i % len(kinds)]) for i in range(60)]


class Client:
    """Streams one request after the other on one connection. `alone`: the answers of the requests alone, or None where answers may differ. A slow client takes
    little at a time, rarely leaves, and asks for long answers."""

    def __init__(self, port, bodies, alone, number, slow=False):
        self.port, self.bodies, self.alone, self.noise, self.slow = port, bodies, alone, random.Random(number), slow
        self.whole = self.broken = self.events = self.tokens = 0
        self.wrong = []

    def connect(self):
        s = socket.socket()
        if self.slow:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.settimeout(120)
        s.connect(("127.0.0.1", self.port))
        return s

    def run(self, end):
        self.socket = self.connect()
        while time.monotonic() < end and not self.wrong:
            which = self.noise.randrange(len(self.bodies))
            leave_after = self.noise.randrange(1, 15000) if self.noise.random() < (0.05 if self.slow else 0.2) else None
            try:
                self.one(which, leave_after)
            except (OSError, ValueError, KeyError, IndexError) as e:
                self.wrong.append(f"request {which}: {e!r}")
        self.socket.close()

    def one(self, which, leave_after):
        self.socket.sendall(post(self.bodies[which] | dict(stream=True, stream_options=dict(include_usage=True))))
        back = b""
        while not back.endswith(b"\r\n0\r\n\r\n"):
            if leave_after is not None and len(back) >= leave_after:
                self.socket.close()
                self.socket, self.broken = self.connect(), self.broken + 1
                return
            part = self.socket.recv(2000 if self.slow else 65536)
            if not part:
                raise ValueError("the connection ended before the answer")
            back += part
            if self.slow:
                time.sleep(0.01)
        head, text = back.split(b"\r\n\r\n", 1)
        data = b"".join(re.split(rb"\r\n[0-9a-fA-F]+\r\n", b"\r\n" + text[: -len(b"\r\n0\r\n\r\n")]))
        events = [e[6:] for e in data.split(b"\n\n") if e.startswith(b"data: ")]
        self.check(which, head, [json.loads(e) for e in events[:-1]], events[-1])
        self.whole += 1
        self.events += len(events)

    def check(self, which, head, events, last):
        choices, usage = [e["choices"][0] for e in events if e["choices"]], events[-1]["usage"]
        said, ends = "".join(c["text"] for c in choices), [c["finish_reason"] for c in choices if c["finish_reason"]]
        told = lambda: f"request {which}: {head[:40]!r} {said!r}, {ends}, {usage}, {last!r}"
        if not head.startswith(b"HTTP/1.1 200 ") or last != b"[DONE]" or len(ends) != 1 or ends[0] not in ("length", "stop"):
            self.wrong.append(told())
        if self.alone and said != self.alone[which]:
            self.wrong.append(f"{told()}, expected {self.alone[which]!r}")
        if "logprobs" in self.bodies[which]:  # an event that is lost or doubled moves the places of all later ones
            place, tokens = 0, 0
            for choice in choices:
                if choice["logprobs"]:
                    tokens += len(choice["logprobs"]["tokens"])
                    if choice["logprobs"]["text_offset"][0] != place:
                        self.wrong.append(f"{told()}: {choice} after {place} characters")
                place += len(choice["text"])
            if tokens > usage["completion_tokens"]:  # fewer if a control token, which has no text, was among the tokens
                self.wrong.append(f"{told()}, with {tokens} tokens")
        if ends == ["length"] and usage["completion_tokens"] != self.bodies[which]["max_tokens"]:
            self.wrong.append(f"{told()}, expected {self.bodies[which]['max_tokens']} tokens")
        self.tokens += usage["completion_tokens"]


def percentile(values, p):
    return sorted(values)[min(len(values) - 1, int(len(values) * p))]


def gpu_memory_mb(process):
    """Megabytes of GPU memory that a process holds, summed over all GPUs. Where the driver does not list processes: the memory that all programs hold
    together. Without a GPU: 0."""
    for query in ("--query-compute-apps=pid,used_memory", "--query-gpu=memory.used"):
        try:
            found = subprocess.run(["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20)
        except OSError:
            return 0
        rows = [line.split(", ") for line in found.stdout.splitlines()] if found.returncode == 0 else []
        used = [row[-1] for row in rows if len(row) == 1 or row[0] == str(process)]
        if used and all(number.replace(".", "").isdigit() for number in used):
            return sum(map(float, used))
    return 0


def count(server):
    """The server's counts of ended requests by reason, and of sampled tokens."""
    ends = {reason: server.metric(f'request_success_total{{finished_reason="{reason}"}}') for reason in ("stop", "length", "abort", "error")}
    return ends, server.metric("generation_tokens_total")


def growth(values):
    """The median early on, after the first memory was taken, and at the end."""
    return statistics.median(values[len(values) // 10 : len(values) // 4 + 1]), statistics.median(values[-len(values) // 4 :])


def bodies_of(o, server):
    if not o.synthetic:
        return tiny_bodies()
    model = json.loads(server.request("GET", "/v1/models")[1])["data"][0]
    return synthetic_bodies(model["meta"]["n_vocab"] - 16, min(600, model["max_model_len"] // 3) if o.synthetic != "small" else 60)


def load(o):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, o.idle + o.busy + o.slow + 256)), hard))
    model = dict(model=f"synthetic:{o.synthetic}") if o.synthetic else {}
    server = serve_test.Server("--slots", o.slots, "--queue", o.busy + o.slow + 8, "--connections", o.idle + o.busy + o.slow + 64, "--patience", 3600, *o.serve.split(), **model)
    memory_file = pathlib.Path(f"/proc/{server.process.pid}/status")
    memory = lambda: int(re.search(r"VmRSS:\s+(\d+)", memory_file.read_text())[1]) / 1024
    bodies = bodies_of(o, server)
    on_gpu = bool(o.synthetic) and f"{model['model']}: on " in server.log
    alone = [] if on_gpu else [json.loads(server.request("POST", "/v1/completions", body)[1])["choices"][0]["text"] for body in bodies]
    before, _ = count(server)
    idle = [connect(server.port) for _ in range(o.idle)]
    results = multiprocessing.Queue()
    health = multiprocessing.Process(target=watch_health, args=(server.port, o.seconds, results))
    health.start()
    clients = [Client(server.port, bodies, alone, i, slow=i >= o.busy) for i in range(o.busy + o.slow)]
    end = time.monotonic() + o.seconds
    threads = [threading.Thread(target=c.run, args=(end,)) for c in clients]
    for t in threads:
        t.start()
    held, held_by_gpu = [], []
    while time.monotonic() < end:
        time.sleep(min(1, o.seconds / 20))
        held.append(memory())
        held_by_gpu.append(gpu_memory_mb(server.process.pid) if on_gpu else 0)
    for t in threads:
        t.join()
    took = results.get(timeout=60)
    health.join()
    kept = 0  # idle connections that are still open
    for s in idle:
        s.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        kept += s.recv(4096).startswith(b"HTTP/1.1 200 ")
        s.close()
    server.until("num_requests_running", 0)
    ends, sampled = count(server)
    status = server.stop()
    (early, late), (gpu_early, gpu_late) = growth(held), growth(held_by_gpu)
    wrong = [w for c in clients for w in c.wrong]
    whole, broken, tokens = (sum(getattr(c, name) for c in clients) for name in ("whole", "broken", "tokens"))
    ended = sum(ends.values()) - sum(before.values())
    answered = ended - (ends["abort"] - before["abort"])  # a client may leave after the last token
    report = dict(suite="serve_load", model=model.get("model", "tiny"), seconds=o.seconds, idle=o.idle, busy=o.busy, slow=o.slow, slots=o.slots, whole_streams=whole, broken_off=broken,
                  events=sum(c.events for c in clients), tokens=tokens, wrong=len(wrong), ended={k: v - before[k] for k, v in ends.items()}, idle_kept=kept, health_asked=len(took),
                  health_ms=dict(p50=round(statistics.median(took), 2), p99=round(percentile(took, 0.99), 2), most=round(max(took), 2)),
                  memory_mb=dict(early=round(early, 1), late=round(late, 1), most=round(max(held), 1)), gpu_memory_mb=dict(early=gpu_early, late=gpu_late))
    problems = wrong[:3]
    problems += ["the server failed"] if status != 0 or ends["error"] else []
    problems += [f"the server ended {ended} requests, expected {whole + broken}"] if ended != whole + broken else []
    problems += [f"the server answered {answered} requests whole, expected {whole} to {whole + broken}"] if not whole <= answered <= whole + broken else []
    problems += [f"the server sampled {sampled} tokens, and clients received {tokens}"] if sampled < tokens else []
    problems += [f"{kept} of {o.idle} idle connections were kept"] if kept != o.idle else []
    problems += [f"memory grew from {early} to {late} MB"] if late - early > o.growth_mb else []
    problems += [f"the GPU's memory grew from {gpu_early} to {gpu_late} MB"] if gpu_late - gpu_early > 64 else []
    problems += [f"/health took {report['health_ms']} ms"] if report["health_ms"]["p99"] > o.health_ms else []
    problems += ["no whole stream"] if not report["whole_streams"] else []
    return report, problems


def streamed_token(port, prompt, tokens):
    """Seconds from a token to the next of a stream, by the server's `timings`: a client receives a text later, together with the next token."""
    s, back = connect(port), b""
    s.sendall(post(dict(prompt=prompt, max_tokens=tokens, temperature=0, stream=True, stream_options=dict(include_usage=True))))
    while not back.endswith(b"\r\n0\r\n\r\n"):
        part = s.recv(65536)
        assert part, back
        back += part
    s.close()
    said = re.search(rb'"predicted_n":(\d+),"predicted_ms":([\d.]+)', back)
    return float(said[2]) / 1e3 / (int(said[1]) - 1)  # the process may have ended early


def overhead(o):
    prompt, tokens = "The", 100
    server = serve_test.Server("--slots", 1, model=o.overhead)
    bare, streamed = [], []
    end = time.monotonic() + o.seconds
    while time.monotonic() < end or len(bare) < 3:
        run = serve_test.ingot("generate", o.overhead, "--prompt", prompt, "--tokens", tokens, "--temperature", 0, "--past-end", "--json")
        answer = json.loads(run.text)
        bare.append(answer["token_seconds"] / (len(answer["ids"]) - 1))
        streamed.append(streamed_token(server.port, prompt, tokens))
    assert server.stop() == 0, server.log
    ms = lambda values: dict(median=round(statistics.median(values) * 1e3, 4), least=round(min(values) * 1e3, 4))
    report = dict(suite="serve_overhead", pairs=len(bare), tokens=tokens, bare_ms=ms(bare), streamed_ms=ms(streamed),
                  overhead_percent=dict(median=round((statistics.median(s / b for s, b in zip(streamed, bare)) - 1) * 100, 2), least=round((min(streamed) / min(bare) - 1) * 100, 2)))
    return report, [] if report["overhead_percent"]["least"] < 2 else [f"a token costs {report['overhead_percent']} % more"]


def main():
    o = OPTIONS
    cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    before = os.getloadavg()[0]
    serve_test.setUpModule()
    if serve_test.WITHOUT:
        print("built without libmicrohttpd")
        return 77
    report, problems = overhead(o) if o.overhead else load(o)
    serve_test.tearDownModule()
    report |= dict(date=datetime.date.today().isoformat(), cpu=cpu[1] if cpu else "", threads=os.cpu_count(), load_average=dict(before=round(before, 1), after=round(os.getloadavg()[0], 1)),
                   commit=subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=pathlib.Path(__file__).parent, capture_output=True, text=True).stdout.strip())
    text = json.dumps(report, indent=1)
    print(text)
    if o.json:
        pathlib.Path(o.json).write_text(text + "\n")
    for p in problems:
        print(f"serve_load: {p}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
