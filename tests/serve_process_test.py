"""`ingot serve` as a process: keys, the queue, slow clients, and how the server begins and ends.

    python3 tests/serve_process_test.py BINARY [unittest options]
"""
import http.client
import json
import os
import pathlib
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import serve_test
from program import TEXT, TINY, ingot, start
from serve_test import ENDLESS, Server, WithServer

setUpModule, tearDownModule = serve_test.setUpModule, serve_test.tearDownModule


class Keys(WithServer):
    @classmethod
    def setUpClass(cls):
        holder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(holder.cleanup)
        keys = pathlib.Path(holder.name, "keys")
        keys.write_text("# ours\nsecret-one\r\n\n \tsecret-two\n")
        cls.OPTIONS = ("--api-key-file", keys, "--host", "0.0.0.0", "--slots", 1)  # with one slot, a request can find the tokens of an earlier request
        super().setUpClass()

    def test_one_of_the_keys_opens_and_nothing_else(self):
        for status, key in ((200, "Bearer secret-one"), (200, "bearer secret-two"), (401, None), (401, ""), (401, "Bearer "), (401, "Bearer secret-on"), (401, "Bearer secret-one2"),
                            (401, "Basic secret-one"), (401, "secret-one"), (401, "Bearer # ours")):
            headers = {} if key is None else {"Authorization": key}
            for method, path, body in (("GET", "/v1/models", None), ("GET", "/metrics", None), ("POST", "/v1/completions", '{"prompt": "a", "max_tokens": 1}')):
                self.assertEqual(self.server.request(method, path, body, headers)[0], status, (key, path))
        for path in ("/v1/none", "//v1/models", "/v1/%2e/models"):
            self.assertEqual(self.server.request("GET", path)[0], 401)
        twice = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer secret-one\r\nAuthorization: Bearer secret-one\r\nConnection: close\r\n\r\n"
        self.assertIn(b" 401 ", self.server.raw(twice)[:20])
        self.assertEqual(self.server.request("GET", "/health")[0], 200)

    def test_the_prompts_of_one_key_are_not_reused_for_another(self):
        cached = []
        for key in ("one", "one", "two"):
            text = self.server.request("POST", "/v1/completions", dict(prompt="user assistant final " * 5, max_tokens=1), {"Authorization": f"Bearer secret-{key}"})[1]
            cached.append(json.loads(text)["usage"]["prompt_tokens_details"]["cached_tokens"])
        self.assertEqual((cached[0], cached[1] > 0, cached[2]), (0, True, 0))


class Queue(WithServer):
    OPTIONS = ("--slots", 1, "--queue", 1, "--context", "60000")

    def test_too_many_requests_get_status_429(self):
        long = dict(prompt="a", max_tokens=59000, logit_bias=ENDLESS)
        first = self.server.stream(long)
        self.server.until("num_requests_running", 1)
        second = threading.Thread(target=lambda: self.server.request("POST", "/v1/completions", dict(prompt="b", max_tokens=1)))
        second.start()
        self.server.until("num_requests_waiting", 1)
        status, text, headers = self.server.request("POST", "/v1/completions", dict(prompt="c"))
        self.assertEqual((status, headers["Retry-After"], json.loads(text)["error"]["type"]), (429, "1", "rate_limit_error"))
        first.close()
        second.join()
        self.assertEqual(self.server.request("POST", "/v1/completions", dict(prompt="c"))[0], 200)
        self.assertEqual(self.server.metric("request_refused_total"), 1)


class Patience(WithServer):
    OPTIONS = ("--patience", 1, "--connections", 40)

    def test_slow_headers_and_bodies_are_ended_and_all_other_requests_are_served(self):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n"
        slow = [socket.create_connection(("127.0.0.1", self.server.port), timeout=10) for _ in range(30)]
        ended, started = {}, time.monotonic()
        for i, s in enumerate(slow):
            s.sendall(head + b"\r\n" if i % 3 == 0 else head if i % 3 == 1 else b"")
        while len(ended) < len(slow):
            self.assertLess(time.monotonic() - started, 20)
            for i, s in enumerate(slow):
                if i in ended:
                    continue
                try:
                    if i % 3 != 2:
                        s.send(b"a" if i % 3 == 0 else b"X-%d: y\r\n" % i)
                    s.setblocking(False)
                    if s.recv(1000) == b"":
                        ended[i] = time.monotonic() - started
                except BlockingIOError:
                    pass
                except OSError:
                    ended[i] = time.monotonic() - started
                s.setblocking(True)
            before = time.monotonic()
            self.assertEqual(self.server.request("GET", "/health")[0], 200)
            self.assertLess(time.monotonic() - before, 3)
            time.sleep(0.1)
        self.assertGreater(min(ended.values()), 0.8)
        for s in slow:
            s.close()

    def test_more_connections_than_allowed_are_turned_away_and_room_comes_back(self):
        many = [socket.create_connection(("127.0.0.1", self.server.port), timeout=5) for _ in range(60)]
        for s in many:
            s.close()
        deadline = time.monotonic() + 10
        while True:
            try:
                if self.server.request("GET", "/health")[0] == 200:
                    return
            except (OSError, http.client.HTTPException):
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.05)


class Process(unittest.TestCase):
    """The beginning and the end of a server."""

    def setUp(self):
        if serve_test.WITHOUT:
            self.skipTest("built without libmicrohttpd")

    def refuses(self, status, message, *arguments):
        run = ingot("serve", "--model", serve_test.MODEL.model, *arguments)
        self.assertEqual((run.returncode, run.text), (status, ""), run.error)
        self.assertRegex(run.error, message)

    def test_a_server_open_to_every_network_is_refused(self):
        self.refuses(2, "--host: found 0.0.0.0 without --api-key-file", "--host", "0.0.0.0", "--port", 0)
        with tempfile.NamedTemporaryFile() as empty:
            self.refuses(3, "found no key", "--api-key-file", empty.name, "--port", 0)
        server = Server("--host", "0.0.0.0", "--insecure")
        self.assertEqual(server.request("GET", "/v1/models")[0], 200)
        self.assertEqual(server.stop(), 0)

    def test_requests_that_no_client_could_send_or_read_are_refused(self):
        for origin in ("friend.example", "https://", "https://friend.example/", "https://friend.example/page", "*"):
            self.refuses(2, "--cors-origin: found .*, expected a scheme and a host alone", "--port", 0, "--cors-origin", origin)
        for date in ("2026-02-30", "31.1.2026", "tomorrow"):
            self.refuses(2, f"--date: found '{date}', expected one like 2026-01-31, or none", "--port", 0, "--date", date)
        self.refuses(2, "--name: found a name with control characters", "--port", 0, "--name", "a\nb")

    def test_a_model_s_name_may_have_slashes_and_blanks(self):
        server = Server(name="org/tiny model")
        for path in ("org/tiny%20model", "org%2Ftiny%20model", "org%2ftiny%20model"):
            status, text, _ = server.request("GET", "/v1/models/" + path)
            self.assertEqual((status, json.loads(text).get("id")), (200, "org/tiny model"))
        self.assertEqual(server.request("GET", "/v1/models/tiny")[0], 404)
        self.assertEqual(server.stop(), 0)

    def test_random_weights_are_served_with_a_tokenizer_of_their_own(self):
        process = start("serve", "--synthetic", "small", "--port", 0, "--date", "none", "--device", "cpu")
        lines = []
        while not lines or " at http://" not in lines[-1]:
            lines.append(process.stderr.readline().decode())
            self.assertTrue(lines[-1], lines)
        self.assertIn("synthetic:small: random weights: every answer is random text\n", lines)
        port = int(re.search(r"serving synthetic:small at http://127.0.0.1:(\d+) ", lines[-1])[1])

        def ask(path, body):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            text = connection.getresponse().read().decode()
            connection.close()
            return text

        for prompt, tokens in (("Once", 4), (list(range(500, 530)), 30)):
            answer = json.loads(ask("/v1/completions", dict(prompt=prompt, max_tokens=5, seed=1)))
            self.assertEqual((answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]), (tokens, 5))
            self.assertEqual(answer, json.loads(ask("/v1/completions", dict(prompt=prompt, max_tokens=5, seed=1))) | {k: answer[k] for k in ("id", "created", "usage", "timings")})
        chat = json.loads(ask("/v1/chat/completions", dict(messages=[dict(role="user", content="Hi")], max_tokens=5, seed=1)))  # other seeds may end earlier
        self.assertEqual(chat["usage"]["completion_tokens"], 5)
        self.assertTrue(ask("/v1/completions", dict(prompt="a", max_tokens=5, stream=True)).endswith("data: [DONE]\n\n"))
        process.terminate()
        self.assertEqual(process.wait(60), 0)
        process.stderr.close()
        self.refuses(2, "expected one of them", "--synthetic", "small")

    def test_a_port_that_is_taken_costs_nothing(self):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.refuses(6, "127.0.0.1:[0-9]+: Address already in use; --port chooses another", "--port", taken.getsockname()[1])

    def test_a_signal_lets_answers_finish(self):
        server = Server("--context", "60000")
        s = server.stream(dict(prompt="a", max_tokens=3000, logit_bias=ENDLESS))
        server.process.terminate()
        back = b""
        while part := s.recv(65536):
            back += part
            if b"[DONE]" in back:
                break
        self.assertIn(b"data: [DONE]", back)
        s.close()
        self.assertEqual(server.stop(signals=0), 0, server.log)  # a second signal would not wait

    def test_an_answer_that_takes_too_long_is_cut_off_at_the_end(self):
        server = Server("--context", "130000", "--drain", 0.2)
        s = server.stream(dict(prompt="a", max_tokens=129000, logit_bias=ENDLESS))
        said = []

        def read():
            while part := s.recv(65536):
                said.append(part)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        started = time.monotonic()
        self.assertEqual(server.stop(), 0, server.log)
        self.assertLess(time.monotonic() - started, 20)
        self.assertIn("some answers were cut off", server.log)
        reader.join()
        self.assertIn(b'{"error":{"message":"the answer was cut off', b"".join(said)[-400:])
        s.close()

    def test_a_model_of_documents_completes_and_has_no_chat(self):
        with tempfile.TemporaryDirectory() as directory:
            run, text = pathlib.Path(directory, "run"), pathlib.Path(directory, "text.txt")
            text.write_text(TEXT)
            trained = ingot("train", *TINY, "--steps", 2, "--data", text, "--out", run)
            self.assertEqual(trained.returncode, 0, trained.error)
            server = Server(model=run)
            status, answer, _ = server.request("POST", "/v1/completions", dict(prompt="The", max_tokens=8, temperature=0))
            self.assertEqual((status, json.loads(answer)["usage"]["completion_tokens"] <= 8), (200, True), answer)
            status, answer, _ = server.request("POST", "/v1/chat/completions", dict(messages=[dict(role="user", content="a")]))
            self.assertEqual((status, json.loads(answer)["error"]["code"]), (400, "unsupported_model"))
            self.assertEqual(server.stop(), 0)
            self.exported(run, text, directory)

    # An artifact is served like a run, with the tokenizer beside the file, and gives the same text as `generate`.
    def exported(self, run, text, directory):
        file = pathlib.Path(directory, "small.ingot")
        done = ingot("export", run, file, "--data", text, "--batches", 4, "--batch-tokens", 128)
        self.assertEqual(done.returncode, 0, done.error)
        server = Server(model=file)
        options = dict(prompt="The", max_tokens=12, temperature=0)
        status, answer, _ = server.request("POST", "/v1/completions", options)
        self.assertEqual(status, 200, answer)
        expected = ingot("generate", file, "--prompt", "The", "--tokens", 12, "--temperature", 0, "--json")
        self.assertEqual(json.loads(answer)["choices"][0]["text"], json.loads(expected.text)["text"])
        self.assertFalse(json.loads(server.request("GET", "/v1/models")[1])["data"][0]["chat"])
        self.assertEqual(server.stop(), 0)
        # An artifact in place of RUN is refused if the tokenizer beside the file is a different one.
        server = start("serve", file, "--port", 0)
        line = server.stderr.readline().decode()
        server.terminate()
        self.assertEqual((server.wait(60), "serving small.ingot at http://127.0.0.1:" in line), (0, True), line)
        server.stderr.close()
        shutil.copy(serve_test.MODEL.model / "tokenizer.json", f"{file}.tokenizer")
        refused = ingot("serve", file, "--port", 0)
        self.assertEqual((refused.returncode, "tokenizer" in refused.error), (3, True), refused.error)

    def test_the_demo_s_prompt_opens_the_page_on_the_model_just_trained(self):
        with tempfile.TemporaryDirectory() as directory:
            text, out = pathlib.Path(directory, "text.txt"), pathlib.Path(directory, "demo")
            text.write_text(TEXT)
            tiny = [word for word in TINY if word != "--batch-tokens"]
            tiny[tiny.index("128") : tiny.index("128") + 1] = ["--set", "train.batch_tokens=128"]
            terminal, end = os.openpty()
            demo = start("demo", *tiny, "--data", text, "--out", out, "--seconds", 1, "--prompt", "The", stdin=end, stdout=end)
            os.close(end)
            shown = b""
            while b"> " not in shown:
                shown += os.read(terminal, 1000)
            self.assertIn(b"/serve opens a page", shown)
            os.write(terminal, b"/serve\n")
            log = ""
            while "serving run at" not in log:
                line = demo.stderr.readline().decode()
                self.assertTrue(line, log)
                log += line
            port = int(re.search(r"http://127.0.0.1:(\d+) ", log)[1])
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("GET", "/")
            self.assertIn(b"<title>Ingot</title>", connection.getresponse().read())
            connection.close()
            demo.terminate()
            self.assertEqual(demo.wait(60), 0)
            demo.stderr.close()
            os.close(terminal)


if __name__ == "__main__":
    unittest.main()
