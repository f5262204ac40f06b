"""`ingot bench serve`: its counts, for the server that it starts and for servers that misbehave.

    python3 tests/bench_serve_test.py BINARY [unittest options]
"""
import http.server
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from program import InDirectory, ingot, start

EVENT = '{"choices":[{"index":0,"text":"%s","finish_reason":null}],"usage":null}'
LAST = '{"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d}}'


def bench(*arguments, **more):
    return ingot("bench", "serve", "--json", *arguments, **more)


class FakeServer:
    """A server with /v1/models, whose streams `answer` writes. If `slowly` is set, bytes are sent one at a time."""

    def __init__(self, answer, models='{"data":[{"id":"fake","meta":{"n_vocab":50}}]}', slowly=False):
        fake = self
        fake.requests, fake.connections, fake.lock = [], set(), threading.Lock()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                text = models.encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake.lock:
                    number = len(fake.requests)
                    fake.requests.append((self.path, dict(self.headers), body))
                    fake.connections.add(self.client_address)
                answer(self, body, number)

            def write(self, data):
                for part in [data[i : i + 1] for i in range(len(data))] if slowly else [data]:
                    self.wfile.write(part)
                    self.wfile.flush()

            def stream(self, events, end=True):
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for event in events:
                    data = f"data: {event}\n\n".encode()
                    self.write(b"%x\r\n%b\r\n" % (len(data), data))
                if end:
                    self.write(b"0\r\n\r\n")
                else:
                    self.close_connection = True

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def whole(handler, body, _number):
    n = body["max_tokens"]
    handler.stream([EVENT % "a"] * n + [LAST % (len(body["prompt"]), n), "[DONE]"])


class OwnServer(InDirectory):
    def setUp(self):
        super().setUp()
        if "without libmicrohttpd" in ingot("serve", "none", "--port", 0).error:
            self.skipTest("built without libmicrohttpd")

    def test_every_token_of_every_answer_is_counted_at_every_concurrency(self):
        run = bench("--synthetic", "small", "--concurrency", "1,3", "--requests", 2, "--prompt", 40, "--tokens", 7, "--serve", "--device cpu")
        self.assertEqual(run.returncode, 0, run.error)
        report = json.loads(run.text)
        self.assertEqual((report["model"], report["prompt"], report["answer"], report["url"]), ("synthetic:small", "40", "7", None))
        for clients, result in zip((1, 3), report["results"], strict=True):
            self.assertEqual([result[k] for k in ("concurrency", "requests", "errors", "prompt_tokens", "tokens")], [clients, 2 * clients, 0, 80 * clients, 14 * clients])
            self.assertAlmostEqual(result["tokens_per_second"], result["tokens"] / result["seconds"])
            self.assertGreater(result["seconds"], 0)
            for times in (result["first_token_ms"], result["between_tokens_ms"]):
                self.assertLessEqual(0, times["p50"])
                self.assertLessEqual(times["p50"], times["p99"])
        table = ingot("bench", "serve", "--synthetic", "small", "--concurrency", "2", "--requests", 1, "--prompt", 4, "--tokens", 3, "--serve", "--device cpu --slots 1")
        self.assertRegex(table.text, r"\Asynthetic:small: prompts of 4 and answers of 3 tokens, temperature 1.00\n +at once .* p99 ms\n +2 +2 +0 +.*\d\n\Z")

    def test_no_prompt_is_sent_twice_and_a_server_that_knows_the_prompts_is_noticed(self):
        with FakeServer(whole) as server:
            for more in (["--concurrency", "1,2,4"], ["--rate", "100,200", "--requests", 9]):
                server.requests.clear()
                run = bench("--url", server.url, "--prompt", 8, "--tokens", 2, *more)
                self.assertEqual((run.returncode, run.error), (0, ""))
                self.assertEqual(len({tuple(body["prompt"]) for _, _, body in server.requests}), len(server.requests))
        server = start("serve", "--synthetic", "small", "--device", "cpu", "--port", 0, "--slots", 2)
        log = ""
        while not (found := re.search(r" at (http://\S+) ", log)):
            log += server.stderr.readline().decode()
        ask = lambda seed: bench("--url", found[1], "--concurrency", "1", "--requests", 2, "--warm-up", 0, "--prompt", 30, "--tokens", 2, "--seed", seed)
        first, second, other = ask(1), ask(1), ask(2)
        server.terminate()
        self.assertEqual(server.wait(30), 0)
        server.stderr.close()
        self.assertEqual((first.error, other.error), ("", ""))
        self.assertIn("of 60 tokens of the prompts before: another --seed sends other prompts", second.error)
        self.assertGreater(json.loads(second.text)["results"][0]["reused_tokens"], 20)

    def test_requests_that_arrive_at_a_rate_are_all_answered(self):
        run = bench("--synthetic", "small", "--rate", "50", "--requests", 10, "--prompt", "4-20", "--tokens", "2-5", "--serve", "--device cpu")
        result = json.loads(run.text)["results"][0]
        self.assertEqual((result["rate"], result["requests"], result["errors"]), (50, 10, 0))
        self.assertTrue(20 <= result["tokens"] <= 50 and 40 <= result["prompt_tokens"] <= 200, result)
        burst = json.loads(bench("--synthetic", "small", "--rate", "5000", "--requests", 150, "--prompt", 4, "--tokens", 8, "--serve", "--device cpu --slots 1").text)["results"][0]
        self.assertEqual((burst["requests"], burst["errors"], burst["tokens"]), (150, 0, 150 * 8))  # more requests wait than a server's queue holds by default

    def test_the_time_at_a_rate_begins_with_the_first_request(self):
        with FakeServer(whole) as server:
            result = json.loads(bench("--url", server.url, "--rate", "0.02", "--requests", 1, "--prompt", 4, "--tokens", 2).text)["results"][0]
        self.assertEqual((result["requests"], result["errors"]), (1, 0))
        self.assertLess(result["seconds"], 2)  # the mean gap between two requests is 50 s

    def test_more_clients_than_a_server_has_slots_connections_or_places_to_wait_are_all_answered(self):
        for clients, options in ((80, "--slots 4"), (300, "")):
            run = bench("--synthetic", "small", "--concurrency", clients, "--requests", 1, "--warm-up", 0, "--prompt", 4, "--tokens", 2, "--serve", "--device cpu --context 64 " + options)
            result = json.loads(run.text)["results"][0]
            self.assertEqual((run.returncode, result["requests"], result["errors"], result["tokens"]), (0, clients, 0, 2 * clients), run.error)
            self.assertLess(result["first_token_ms"]["p99"], 25e3)  # a client without a connection would get one after the patience with an idle one, 30 s

    def test_a_refusal_of_the_server_is_an_error_of_the_request(self):
        run = bench("--synthetic", "small", "--concurrency", "1", "--prompt", 20, "--tokens", 3, "--serve", "--device cpu --context 16")
        self.assertEqual(run.returncode, 5, run.error)
        result = json.loads(run.text)["results"][0]
        self.assertEqual((result["requests"], result["errors"], result["tokens"]), (3, 3, 0))
        self.assertIn("status 400: ", result["first_error"])
        self.assertIn("all requests failed: status 400: ", run.error)

    def test_the_server_ends_with_this_command_however_it_ends(self):
        for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)):
            process = start("bench", "serve", "--synthetic", "small", "--concurrency", "4", "--requests", 10000, "--serve", "--device cpu", stdout=subprocess.DEVNULL)
            while b"serving " not in process.stderr.readline():
                pass
            (child,) = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            process.send_signal(number)
            process.stderr.close()
            self.assertEqual(process.wait(30), status)
            deadline = time.monotonic() + 10  # shorter than the time that a server gives its running answers
            while pathlib.Path(f"/proc/{child}/exe").exists():
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.01)

    def test_an_error_of_the_server_is_this_command_s_error(self):
        self.refuses(4, "none: found no such file", "bench", "serve", "--model", "none")
        self.refuses(2, "--slots: found '257', expected an integer from 0 to 256", "bench", "serve", "--synthetic", "small", "--serve", "--slots 257")
        self.refuses(2, "found neither RUN nor --model", "bench", "serve")
        self.refuses(2, "found --concurrency, which changes nothing with --rate", "bench", "serve", "--synthetic", "small", "--rate", "5", "--concurrency", "3")


class OtherServers(InDirectory):
    def test_answers_are_read_from_chunks_of_any_size_over_connections_that_stay(self):
        for slowly in (False, True):
            with self.subTest(slowly=slowly), FakeServer(whole, slowly=slowly) as server:
                key = self.file("key", "# of the server\n\nsecret \nsecond\n")
                run = bench("--url", server.url + "/v1", "--concurrency", "2", "--requests", 2, "--warm-up", 1, "--prompt", 5, "--tokens", "3-6", "--api-key-file", key, "--top-p", 0.9, "--seed", 7)
                self.assertEqual(run.returncode, 0, run.error)
                result = json.loads(run.text)["results"][0]
                self.assertEqual((result["requests"], result["errors"], result["prompt_tokens"]), (4, 0, 20))
                self.assertEqual(len(server.requests), 6)
                self.assertEqual(len(server.connections), 2)
                bodies = [body for _, _, body in server.requests]
                for path, headers, body in server.requests:
                    self.assertEqual((path, headers["Authorization"], body["model"], body["stream"], body["top_p"], body["temperature"]), ("/v1/completions", "Bearer secret", "fake", True, 0.9, 1))
                    self.assertTrue(all(0 <= i < 50 for i in body["prompt"]) and 3 <= body["max_tokens"] <= 6, body)
                self.assertEqual(len({(*body["prompt"], body["seed"]) for body in bodies}), 6)  # no prompt is met twice
                with FakeServer(whole) as again:
                    bench("--url", again.url, "--concurrency", "2", "--requests", 2, "--warm-up", 1, "--prompt", 5, "--tokens", "3-6", "--top-p", 0.9, "--seed", 7)
                    self.assertCountEqual([json.dumps(b) for _, _, b in again.requests], [json.dumps(b) for b in bodies])

    def test_refused_truncated_and_failed_streams_are_errors_and_all_other_streams_are_counted(self):
        def refused(handler, body, _):
            text = b'{"error":{"message":"too many"}}\n'
            handler.send_response(429)
            handler.send_header("Content-Length", str(len(text)))
            handler.end_headers()
            handler.wfile.write(text)

        cut = lambda handler, body, _: handler.stream([EVENT % "a"] * 2, end=False)
        undone = lambda handler, body, _: handler.stream([EVENT % "a"] * 2)
        failed = lambda handler, body, _: handler.stream([EVENT % "a", '{"error":{"message":"out of order"}}', "[DONE]"])
        silent = lambda handler, body, _: handler.stream([EVENT % "", "[DONE]"])
        for bad, message in ((refused, 'status 429: {"error":{"message":"too many"}}'), (cut, "the connection ended before the end of an answer"), (undone, r"the stream ended without \[DONE\]"),
                             (failed, "out of order"), (silent, "an answer without text")):
            def some(handler, body, number):
                (bad if number in (1, 3) else whole)(handler, body, number)

            with self.subTest(message=message), FakeServer(some) as server:
                run = bench("--url", server.url, "--concurrency", "1", "--requests", 5, "--warm-up", 0, "--prompt", 5, "--tokens", 4)
                self.assertEqual(run.returncode, 0, run.error)
                result = json.loads(run.text)["results"][0]
                self.assertEqual((result["requests"], result["errors"], result["tokens"], result["prompt_tokens"]), (5, 2, 12, 15))
                self.assertRegex(result["first_error"], message)
                self.assertIn("2 of 5 requests failed: ", run.error)

    def test_a_server_that_stops_sending_costs_the_patience_and_no_more(self):
        stopped = threading.Event()

        def stall(handler, body, _):
            handler.send_response(200)
            handler.send_header("Content-Length", "100")
            handler.end_headers()
            stopped.wait(20)

        with FakeServer(stall) as server:
            run = bench("--url", server.url, "--concurrency", "1", "--requests", 1, "--warm-up", 0, "--patience", 0.3)
            stopped.set()
        self.assertEqual(run.returncode, 5)
        self.assertIn("no byte of an answer within 0.3 s", json.loads(run.text)["results"][0]["first_error"])

    def test_a_server_that_cannot_be_measured_is_one_error(self):
        self.refuses(3, "key: found no key, expected one a line", "bench", "serve", "--url", "http://127.0.0.1:9", "--api-key-file", self.file("key", "# none\n"))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.refuses(5, f"http://127.0.0.1:{port}: Connection refused", "bench", "serve", "--url", f"http://127.0.0.1:{port}")
        for url in ("https://127.0.0.1", "127.0.0.1:80", "http://", "http://a:0", "http://a:1x", "http://u@a", "http://[::1"):
            self.refuses(2, re.escape(f"found the URL '{url}', expected one like"), "bench", "serve", "--url", url)
        for option, value, message in (("--prompt", "5-2", "expected a number of tokens or a range"), ("--tokens", "x", "expected a number of tokens"), ("--rate", "0", "expected numbers of requests a second"),
                                       ("--concurrency", "5000", "expected at most 4096")):
            self.refuses(2, f"{option}: found .*, {message}|{option}: found 5000, {message}", "bench", "serve", "--url", "http://127.0.0.1:1", option, value)
        self.refuses(2, "found --synthetic, which changes nothing with --url", "bench", "serve", "--url", "http://127.0.0.1:1", "--synthetic", "small")
        for models, status, message in (('{"data":[{"id":"m"}]}', 2, "expected --vocab N"), ("{}", 3, "expected a list of models"), ("<html>", 3, "/v1/models")):
            with FakeServer(whole, models=models) as server:
                self.refuses(status, message, "bench", "serve", "--url", server.url)


if __name__ == "__main__":
    unittest.main()
