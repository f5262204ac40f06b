"""A load on `ingot serve`: idle connections, clients that stream and now and then go away, and a watch on /health beside them.

    python3 tests/serve_load.py BINARY [--seconds 600] [--idle 256] [--busy 32] [--slots 8] [--json REPORT]
    python3 tests/serve_load.py BINARY --overhead RUN [--seconds 60] [--json REPORT]

The first holds a small random model to this: no event lost or doubled (every whole stream says what the request says alone), no growth of memory, 99 of 100
answers of /health in time (--health-ms, of which a machine busy with other things needs more). The second compares the time of a token of RUN, a model of
`ingot train`, between `ingot generate` and one stream of the server, in turns, at their best. Ends with 1 where something does not hold.
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
    p.add_argument("--slots", type=int, default=8)
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


class Client:
    """Streams one request after the other on one connection."""

    BODIES = [dict(prompt="user " * (1 + i % 7) + str(i), max_tokens=20 + 9 * (i % 11), logit_bias=serve_test.ENDLESS,
                   **(dict(temperature=0) if i % 2 else dict(temperature=1, seed=i))) for i in range(40)] if OPTIONS else []

    def __init__(self, port, alone, number):
        self.port, self.alone, self.noise = port, alone, random.Random(number)
        self.whole = self.broken = self.events = 0
        self.wrong = []

    def run(self, end):
        self.socket = connect(self.port)
        while time.monotonic() < end and not self.wrong:
            which = self.noise.randrange(len(self.BODIES))
            leave_after = self.noise.randrange(1, 15000) if self.noise.random() < 0.2 else None
            try:
                self.one(which, leave_after)
            except (OSError, ValueError, KeyError) as e:
                self.wrong.append(repr(e))
        self.socket.close()

    def one(self, which, leave_after):
        self.socket.sendall(post(self.BODIES[which] | dict(stream=True)))
        back = b""
        while not back.endswith(b"\r\n0\r\n\r\n"):
            if leave_after is not None and len(back) >= leave_after:
                self.socket.close()
                self.socket, self.broken = connect(self.port), self.broken + 1
                return
            part = self.socket.recv(65536)
            if not part:
                raise ValueError("the connection ended before the answer")
            back += part
        head, text = back.split(b"\r\n\r\n", 1)
        data = b"".join(re.split(rb"\r\n[0-9a-fA-F]+\r\n", b"\r\n" + text[: -len(b"\r\n0\r\n\r\n")]))
        events = [e[6:] for e in data.split(b"\n\n") if e.startswith(b"data: ")]
        choices = [json.loads(e)["choices"][0] for e in events[:-1]]
        said, ends = "".join(c["text"] for c in choices), [c["finish_reason"] for c in choices if c["finish_reason"]]
        if not head.startswith(b"HTTP/1.1 200 ") or events[-1] != b"[DONE]" or len(ends) != 1 or said != self.alone[which]:
            self.wrong.append(f"request {which}: {said!r}, expected {self.alone[which]!r}; {ends}, {events[-1]!r}")
        self.whole += 1
        self.events += len(events)


def percentile(values, p):
    return sorted(values)[min(len(values) - 1, int(len(values) * p))]


def load(o):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, o.idle + o.busy + 256)), hard))
    server = serve_test.Server("--slots", o.slots, "--queue", o.busy + 8, "--connections", o.idle + o.busy + 64, "--patience", 3600)
    memory_file = pathlib.Path(f"/proc/{server.process.pid}/status")
    memory = lambda: int(re.search(r"VmRSS:\s+(\d+)", memory_file.read_text())[1]) / 1024
    alone = [json.loads(server.request("POST", "/v1/completions", body)[1])["choices"][0]["text"] for body in Client.BODIES]
    idle = [connect(server.port) for _ in range(o.idle)]
    results = multiprocessing.Queue()
    health = multiprocessing.Process(target=watch_health, args=(server.port, o.seconds, results))
    health.start()
    clients = [Client(server.port, alone, i) for i in range(o.busy)]
    end = time.monotonic() + o.seconds
    threads = [threading.Thread(target=c.run, args=(end,)) for c in clients]
    for t in threads:
        t.start()
    held = []
    while time.monotonic() < end:
        time.sleep(min(1, o.seconds / 20))
        held.append(memory())
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
    failed = server.metric('request_success_total{finished_reason="error"}')
    status = server.stop()
    early, late = statistics.median(held[len(held) // 10 : len(held) // 4 + 1]), statistics.median(held[-len(held) // 4 :])
    wrong = [w for c in clients for w in c.wrong]
    report = dict(suite="serve_load", seconds=o.seconds, idle=o.idle, busy=o.busy, slots=o.slots, whole_streams=sum(c.whole for c in clients), broken_off=sum(c.broken for c in clients),
                  events=sum(c.events for c in clients), wrong=len(wrong), idle_kept=kept, health_asked=len(took),
                  health_ms=dict(p50=round(statistics.median(took), 2), p99=round(percentile(took, 0.99), 2), most=round(max(took), 2)),
                  memory_mb=dict(early=round(early, 1), late=round(late, 1), most=round(max(held), 1)))
    problems = wrong[:3]
    problems += ["the server failed"] if status != 0 or failed else []
    problems += [f"{kept} of {o.idle} idle connections were kept"] if kept != o.idle else []
    problems += [f"memory grew from {early} to {late} MB"] if late - early > o.growth_mb else []
    problems += [f"/health took {report['health_ms']} ms"] if report["health_ms"]["p99"] > o.health_ms else []
    problems += ["no whole stream"] if not report["whole_streams"] else []
    return report, problems


def streamed_token(port, prompt, tokens):
    """Seconds from a token to the next of a stream, as the server's `timings` say: what comes to a client comes later, beside the next token."""
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
