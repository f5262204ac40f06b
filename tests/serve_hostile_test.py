"""`ingot serve` with hostile or broken clients: the rows S01 to S24 of the list of attacks, each in a test.

    python3 tests/serve_hostile_test.py BINARY [unittest options]

INGOT_STREAMS=64 makes the last test as large as when run by hand. ELSEWHERE lists the rows of the table that other files test.
"""
import concurrent.futures
import json
import os
import pathlib
import random
import re
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cli_gpt_oss_test
import serve_test
from program import ADDRESS_SANITIZED, BINARY, SANITIZED, start
from serve_test import ENDLESS, Server, WithServer

SOURCE = pathlib.Path(__file__).parent.parent
ELSEWHERE = {
    "S01": {"tests/serve_process_test.py": ["test_slow_headers_and_bodies_are_ended_and_all_other_requests_are_served"]},
    "S07": {"tests/serve_test.py": ["test_garbage_and_floods_of_headers_end_the_connection"]},
    "S09": {"tests/serve_process_test.py": ["test_too_many_requests_get_status_429"],
            "src/ingot/engines/serve/scheduler.test.cpp": ["clients_take_turns_and_too_many_waiting_are_refused", "a_request_that_waits_too_long_for_a_slot_ends_with_an_error"]},
    "S10": {"tests/serve_test.py": ["test_an_answer_ends_when_its_client_has_gone", "test_a_client_that_closes_one_direction_gets_the_stream"]},
    "S12": {"src/ingot/engines/serve/api_request.test.cpp": ["bad_bodies_are_refused_by_the_field_s_name", "sizes_are_bounded"]},
    "S13": {"src/ingot/text/grammar/json_schema.test.cpp": []},
    "S15": {"src/ingot/text/chat/harmony.test.cpp": []},
    "S16": {"src/ingot/engines/serve/answer_text.test.cpp": ["any_ids_are_accepted_and_no_control_token_is_shown"]},
    "S18": {"tests/serve_test.py": ["test_an_unknown_host_name_is_refused", "test_pages_of_other_origins_may_send_requests_only_if_allowed"]},
    "S19": {"tests/serve_process_test.py": ["test_a_server_open_to_every_network_is_refused"]},
    "S20": {"src/ingot/engines/serve/answer_text.test.cpp": ["characters_are_whole_and_incomplete_ones_are_replaced", "a_stop_string_ends_the_text_and_its_logprobs"],
            "src/ingot/engines/serve/service.test.cpp": []},
    "S21": {"src/ingot/engines/serve/service.test.cpp": ["an_internal_error_shows_the_client_only_a_number"]},
    "S22": {"tests/serve_process_test.py": ["test_a_signal_lets_answers_finish", "test_an_answer_that_takes_too_long_is_cut_off_at_the_end", "test_a_port_that_is_taken_costs_nothing"]},
    "S24": {"src/ingot/engines/serve/scheduler_passes.test.cpp": ["many_threads_ask_and_cancel"]},
}
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
BODY = b'{"prompt": "a", "max_tokens": 1}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
LONG = dict(prompt="a", max_tokens=100000, logit_bias=ENDLESS)

SLOW = 10 if SANITIZED else 1  # factor on time limits

setUpModule, tearDownModule = serve_test.setUpModule, serve_test.tearDownModule


def statuses(back):
    return [int(s) for s in re.findall(rb"HTTP/1\.1 (\d{3}) ", back)]


def memory_of(process):
    """Resident bytes of the server; of little meaning under a sanitizer, which keeps freed memory."""
    if ADDRESS_SANITIZED:
        return 0
    return int(re.search(r"VmRSS:\s+(\d+)", pathlib.Path(f"/proc/{process.pid}/status").read_text())[1]) << 10


def cpu_seconds(process):
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def events_of(stream):
    """The events of a whole answer as bytes, chunks put together; complete ones only."""
    head, rest = stream.split(b"\r\n\r\n", 1)
    assert b"chunked" in head.lower(), head
    text, ended = b"", False
    while rest and not ended:
        size, rest = rest.split(b"\r\n", 1)
        n = int(size, 16)
        text, rest, ended = text + rest[:n], rest[n + 2 :], n == 0
    assert ended
    return [e.removeprefix(b"data: ") for e in text.split(b"\n\n") if e and not e.startswith(b":")]


class EveryRow(unittest.TestCase):
    def test_each_row_has_a_test(self):
        names = [name for case in (Slow, SlowInTime, Framing, Bodies, Connections, Gone, Requests, Many, Keyed, Ending) for name in dir(case)]
        for row in (f"S{i:02}" for i in range(1, 25)):
            here = [n for n in names if n.startswith(f"test_{row.lower()}_")]
            self.assertTrue(here or ELSEWHERE.get(row), row)
            for path, tests in ELSEWHERE.get(row, {}).items():
                text = (SOURCE / path).read_text()
                for test in tests:
                    self.assertIn(test, text, row)


def slow_reader(server, body=LONG):
    """A streaming request on a socket with a small buffer, which the test reads as slowly as it likes."""
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    s.settimeout(20)
    s.connect(("127.0.0.1", server.port))
    text = json.dumps(body | dict(stream=True)).encode()
    s.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(text) + text)
    return s


class Slow(WithServer):
    OPTIONS = ("--patience", 3, "--context", "130000", "--slots", 2)

    def test_s01_a_client_that_does_not_read_gets_no_more_tokens_and_is_disconnected(self):
        before, memory = self.server.metric("generation_tokens_total"), memory_of(self.server.process)
        silent = slow_reader(self.server)
        self.server.until("num_requests_running", 1)
        # Other clients are answered meanwhile.
        self.assertEqual(self.server.request("POST", "/v1/completions", BODY.decode())[0], 200)
        self.server.until("num_requests_running", 0, 30 * SLOW)
        self.assertLess(self.server.metric("generation_tokens_total") - before, 20000)  # of 100,000
        self.assertLess(memory_of(self.server.process) - memory, 32 << 20)
        silent.close()

    def test_s01_a_client_that_reads_too_slowly_is_disconnected(self):
        slow = slow_reader(self.server)
        self.server.until("num_requests_running", 1)
        started = time.monotonic()
        try:
            while slow.recv(64):
                self.assertLess(time.monotonic() - started, 40 * SLOW)
                time.sleep(0.05)
        except ConnectionError:
            pass
        self.server.until("num_requests_running", 0)
        slow.close()


class SlowInTime(WithServer):
    """Enough patience for a reader that a busy machine slows down further."""

    OPTIONS = ("--patience", 60, "--context", "130000", "--slots", 2)

    def test_s01_a_client_that_reads_slowly_gets_every_event_once(self):
        body = dict(prompt="user", max_tokens=4000, seed=3, logit_bias=ENDLESS)
        slow, back = slow_reader(self.server, body), b""
        while not back.endswith(b"\r\n0\r\n\r\n"):
            part = slow.recv(32768)
            self.assertTrue(part, back[-100:])
            back += part
            time.sleep(0.004)
        slow.close()
        events = events_of(back)
        self.assertEqual(events[-1], b"[DONE]")
        whole = json.loads(self.server.request("POST", "/v1/completions", body)[1])
        self.assertEqual("".join(c["text"] for e in events[:-1] for c in json.loads(e)["choices"]), whole["choices"][0]["text"])


class Framing(WithServer):
    """Headers: nothing that two servers could read in two ways, nothing too large."""

    def refused(self, data, expected={400}):
        """The refusal comes at once and closes the connection, and the following bytes are not read as another request."""
        started = time.monotonic()
        back = self.server.raw(data + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        self.assertLess(time.monotonic() - started, 5, data[:200])
        self.assertLessEqual(set(statuses(back)), expected, (data[:200], back[:200]))

    def test_s02_lines_count_and_addresses_have_limits(self):
        end = b"Connection: close\r\n\r\n"
        line = lambda n: GET + b"X: " + b"a" * (n - 3) + b"\r\n" + end
        count = lambda n: GET + b"X: y\r\n" * (n - 2) + end
        address = lambda n: b"GET /health?" + b"a" * (n - 9) + b" HTTP/1.1\r\nHost: localhost\r\n" + end
        for make, limit, status in ((line, 8192, 431), (count, 100, 431), (address, 8192, 414)):
            for n, expected in ((limit - 1, 200), (limit, 200), (limit + 1, status)):
                self.assertEqual(statuses(self.server.raw(make(n))), [expected], (status, n))
        for data in (GET + b"".join(b"X%d: " % i + b"a" * 8000 + b"\r\n" for i in range(5)) + end, GET + b"a" * 70000, b"GET /" + b"a" * 70000, b"a" * 70000):
            self.refused(data, {400, 414, 431, 501})

    def test_s05_ambiguous_headers_are_refused_and_the_connection_is_closed(self):
        n = len(BODY)
        for lines in (LENGTH + CHUNKED, CHUNKED + LENGTH, LENGTH + LENGTH, LENGTH + b"Content-Length: 1\r\n", b"Content-Length: 1, 1\r\n", b"Content-Length: +%d\r\n" % n,
                      b"Content-Length: -1\r\n", b"Content-Length: 0x20\r\n", b"Content-Length:\r\n", b"Content-Length: 99999999999999999999\r\n",
                      b"Transfer-Encoding: chunked, identity\r\n", b"Transfer-Encoding: identity\r\n", b"Transfer-Encoding: gzip\r\n", b"Transfer-Encoding: xchunked\r\n",
                      CHUNKED + CHUNKED, b"Transfer-Encoding : chunked\r\n", b"Transfer-Encoding\t: chunked\r\n", b"Content-Length : %d\r\n" % n,
                      b"Content-Length: %d\r\n 0\r\n" % n, b"Content-Length:\r\n %d\r\n" % n, b"Transfer-Encoding:\r\n chunked\r\n", b"X: a\r\n b\r\n" + LENGTH, LENGTH + b"X: a\r\n\tb\r\n",
                      b"X: a\nY: b\r\n" + LENGTH, b"X: a\rTransfer-Encoding: chunked\r\n" + LENGTH, LENGTH + b"X: a\rb\r\n", b"X\r: a\r\n" + LENGTH,
                      b"X: a\0b\r\n" + LENGTH, LENGTH + b"X: a\0b\r\n", LENGTH + b"X: a\0\0\0\0b\r\n", b"X\0: a\r\n" + LENGTH, LENGTH + b"X: \x01\r\n", LENGTH + b"X: \x7f\r\n",
                      LENGTH + b": a\r\n", LENGTH + b"X\r\n", LENGTH + b"X(: a\r\n", LENGTH + b"X y: a\r\n", LENGTH + b"Host: localhost\r\n", LENGTH + b"Host: other\r\n"):
            with self.subTest(lines=lines):
                self.refused(POST + lines + b"\r\n" + BODY, {400, 413})
        get = lambda line, rest=b"Host: localhost\r\n\r\n": line + b"\r\n" + rest
        for data in (get(b"GET /health HTTP/1.1", b"\r\n"), get(b"GET /health HTTP/1.0", b"\r\n"), get(b"GET http://other/health HTTP/1.1"), get(b"GET http://localhost/health HTTP/1.1"),
                     get(b"GET  /health HTTP/1.1"), get(b"GET /health HTTP/1.2"), get(b"GET /health http/1.1"), get(b"GET /health"), get(b"GET health HTTP/1.1"), get(b"GET /hea lth HTTP/1.1"),
                     b"GET /health HTTP/1.1\r\n Host: localhost\r\nHost: localhost\r\n\r\n", b"GET /health HTTP/1.1\nHost: localhost\n\n", b"GET /health HTTP/1.1\r\nHost: localhost\n\r\n",
                     b"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n" + CHUNKED + b"\r\n20\r\n" + BODY + b"\r\n0\r\n\r\n"):
            with self.subTest(data=data):
                self.refused(data, {400, 505})

    def test_s06_nothing_of_a_request_comes_back_in_a_header(self):
        known = {b"date", b"connection", b"content-type", b"content-length", b"x-content-type-options", b"www-authenticate", b"retry-after"}
        body = b'{"model": "a\\r\\nX-Evil: 1", "prompt": "a"}'
        for data in (b"GET /v1/%0d%0aX-Evil:%201 HTTP/1.1\r\nHost: localhost\r\n", b"GET /health?%0d%0aX-Evil:1 HTTP/1.1\r\nHost: localhost\r\n", GET + b"Origin: http://a%0d%0aX-Evil: 1\r\n",
                     b"GET /health%00 HTTP/1.1\r\nHost: localhost\r\n", b"GET /health HTTP/1.1\r\nHost: localhost%0d%0aX-Evil:1\r\n", POST + b"Content-Length: %d\r\n" % len(body)):
            back = self.server.raw(data + b"Connection: close\r\n\r\n" + body)
            lines = back.split(b"\r\n\r\n")[0].split(b"\r\n")[1:]
            self.assertLessEqual({line.split(b":")[0].lower() for line in lines}, known, back)
        self.assertEqual(self.server.request("GET", "/health%00")[0], 404)

    def test_s07_requests_behind_one_another_are_answered_in_order_and_an_error_with_a_body_closes(self):
        last = GET + b"Connection: close\r\n\r\n"
        back = self.server.raw(GET + b"\r\n" + b"GET /v1/none HTTP/1.1\r\nHost: localhost\r\n\r\n" + POST + LENGTH + b"\r\n" + BODY + b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n" + last)
        self.assertEqual(statuses(back), [200, 404, 200, 200, 200])
        self.assertLess(back.index(b"text_completion"), back.index(b"max_model_len"))
        for bad in (POST.replace(b"/v1/completions", b"/v1/none"), POST.replace(b"application/json", b"text/plain"), POST.replace(b"POST", b"PUT")):
            self.assertEqual(len(statuses(self.server.raw(bad + LENGTH + b"\r\n" + BODY + last))), 1)
        for greeting in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500) + b"\r\n\r\n", b"\r\n\r\n\r\nhello\r\n\r\n", b"GET\r\n\r\n"):
            self.refused(greeting, {400, 501, 505})

    def test_s07_expect_is_answered_before_the_body(self):
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=10) as s:
            s.sendall(POST + LENGTH + b"Expect: 100-continue\r\nConnection: close\r\n\r\n")
            self.assertIn(b" 100 ", s.recv(1000))
            s.sendall(BODY)
            back = b""
            while part := s.recv(65536):
                back += part
            self.assertEqual(statuses(back), [200])
        self.assertEqual(statuses(self.server.raw(POST + b"Content-Length: 9999999\r\nExpect: 100-continue\r\n\r\n")), [413])


class Bodies(WithServer):
    OPTIONS = ("--patience", 4)

    def test_s03_the_limit_of_a_body_is_the_same_in_every_form(self):
        limit = 4 << 20
        for n, status in ((limit - 1, 200), (limit, 200), (limit + 1, 413)):
            body = BODY.ljust(n)
            if n <= limit:
                self.assertEqual(statuses(self.server.raw(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % n + body)), [status])
            self.assertEqual(statuses(self.server.raw(POST + b"Connection: close\r\n" + CHUNKED + b"\r\n%x\r\n" % n + body + b"\r\n0\r\n\r\n"))[:1], [status])
        started = time.monotonic()
        self.assertEqual(statuses(self.server.raw(POST + b"Content-Length: %d\r\n\r\n" % (limit + 1))), [413])  # before any part of the body is read
        self.assertLess(time.monotonic() - started, 3)
        self.assertEqual(statuses(self.server.raw(POST + b"Connection: close\r\n\r\n")), [400])  # neither length nor chunks: empty

    def test_s04_chunks_are_read_strictly(self):
        head = POST + b"Connection: close\r\n" + CHUNKED + b"\r\n"
        size = b"%x" % len(BODY)
        for good in (size + b"\r\n" + BODY + b"\r\n0\r\n\r\n", size + b"\r\n" + BODY + b"\r\n0\r\nHost: other\r\nContent-Length: 5\r\n\r\n",
                     b"".join(b"1\r\n%c\r\n" % c for c in BODY) + b"0\r\n\r\n"):
            self.assertEqual(statuses(self.server.raw(head + good)), [200], good)
        # libmicrohttpd 1.0 refuses extensions.
        self.assertIn(statuses(self.server.raw(head + size + b";a=b\r\n" + BODY + b"\r\n0\r\n\r\n")), ([200], [400]))
        for bad in (b"-2\r\nab\r\n", b"0x2\r\nab\r\n", b"+5\r\nabcde\r\n", b" 2\r\nab\r\n", b"2 \r\nab\r\n", b"1" * 17 + b"\r\nab\r\n", b"f" * 16 + b"\r\nab\r\n", b"zz\r\nab\r\n", b"\r\n", b";a\r\nab\r\n", b"2\r\nabc\r\n",
                    b"2;" + b"a" * 65536 + b"\r\nab\r\n", size + b"\r\n" + BODY + b"\r\n", size + b"\r\n" + BODY[:9]):
            memory, started = memory_of(self.server.process), time.monotonic()
            self.assertNotIn(200, statuses(self.server.raw(head + bad, end=True)), bad[:40])
            self.assertLess(time.monotonic() - started, 9)
            self.assertLess(memory_of(self.server.process) - memory, 16 << 20)

    def test_s04_a_body_of_millions_of_pieces_is_ended(self):
        memory = memory_of(self.server.process)
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=20) as s:
            s.sendall(POST + CHUNKED + b"\r\n")
            with self.assertRaises(OSError):  # before the three millions are through
                for _ in range(300):
                    s.sendall(b"1\r\na\r\n" * 10000)
        self.assertLess(memory_of(self.server.process) - memory, 16 << 20)
        self.assertEqual(self.server.request("GET", "/health")[0], 200)

    def test_s04_a_body_without_its_end_is_ended_in_time(self):
        started = time.monotonic()
        self.assertEqual(statuses(self.server.raw(POST + CHUNKED + b"\r\n2\r\n{}\r\n")), [])
        self.assertLess(time.monotonic() - started, 9.5)


class Connections(unittest.TestCase):
    def setUp(self):
        if serve_test.WITHOUT:
            self.skipTest("built without libmicrohttpd")

    def server(self, *options):
        server = Server(*options)
        self.addCleanup(lambda: self.assertEqual(server.stop(), 0, server.log))
        return server

    def open(self, server, n):
        many = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(n)]
        self.addCleanup(lambda: [s.close() for s in many])
        return many

    def answered(self, s, seconds):
        """Whether a connection is served within a time."""
        s.settimeout(seconds)
        try:
            s.sendall(GET + b"\r\n")
            return s.recv(1000).startswith(b"HTTP/1.1 200")
        except OSError:
            return False

    def until_healthy(self, server):
        deadline = time.monotonic() + 20
        while True:
            try:
                if server.request("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)

    def test_s08_beyond_the_limit_of_one_address_none_is_served_and_room_comes_back(self):
        server = self.server("--connections", 40, "--connections-of-one", 5)
        many = self.open(server, 5)
        self.assertTrue(all(self.answered(s, 10) for s in many))
        self.assertFalse(self.answered(self.open(server, 1)[0], 2))
        self.assertTrue(self.answered(many[0], 10))
        for s in many:
            s.close()
        self.until_healthy(server)

    def test_s08_there_is_a_descriptor_for_each_connection_and_the_limit_costs_no_work(self):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))  # a server inherits this limit
        try:
            server = self.server("--connections", 150)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        descriptors = lambda: len(os.listdir(f"/proc/{server.process.pid}/fd"))
        used = descriptors()
        many = self.open(server, 220)
        time.sleep(0.5)
        self.assertGreater(descriptors(), 100)
        before = cpu_seconds(server.process)
        time.sleep(1)
        self.assertLess(cpu_seconds(server.process) - before, 0.2)
        for s in many:
            s.close()
        self.until_healthy(server)
        deadline = time.monotonic() + 10
        while descriptors() > used + 2:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)
        run = subprocess.run(["bash", "-c", 'ulimit -n 200; exec "$0" serve --model "$1" --port 0', BINARY, serve_test.MODEL.model], capture_output=True, timeout=60)
        self.assertEqual((run.returncode, run.stderr.split()), (2, b"ingot serve: --connections: found 256, but this process may open no more than 200 files, of which it keeps 64".split()))


class Gone(WithServer):
    OPTIONS = ("--slots", 1, "--queue", 8, "--context", "130000")

    def ask(self, body):
        s = socket.create_connection(("127.0.0.1", self.server.port), timeout=20)
        text = json.dumps(body).encode()
        s.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(text) + text)
        return s

    def ended(self, gauge, value):
        started = time.monotonic()
        self.server.until(gauge, value, 10)
        return time.monotonic() - started

    def test_s10_a_client_that_goes_away_frees_its_slot(self):
        reset = lambda s: (s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)), s.close())
        took = []
        for stream in (True, False):
            for leave in (socket.socket.close, reset):
                first = self.ask(LONG | dict(stream=stream))
                self.server.until("num_requests_running", 1)
                waiting = self.ask(LONG | dict(stream=stream))
                self.server.until("num_requests_waiting", 1)
                leave(waiting)  # in the queue
                took.append(self.ended("num_requests_waiting", 0))
                leave(first)  # in the middle
                took.append(self.ended("num_requests_running", 0))
                long = self.ask(LONG | dict(stream=stream, prompt=[20 + i % 300 for i in range(120000)]))
                self.server.until("num_requests_running", 1)
                leave(long)  # before the first token
                took.append(self.ended("num_requests_running", 0))
        self.assertLess(sorted(took)[len(took) // 2], 1 * SLOW, took)  # 0.1 s on an idle machine
        for _ in range(12):  # more often than there are places
            s = self.ask(LONG | dict(stream=True))
            s.recv(100)
            reset(s)
        self.server.until("num_requests_waiting", 0)
        self.server.until("num_requests_running", 0)
        self.assertEqual(self.server.request("POST", "/v1/completions", BODY.decode())[0], 200)


class Requests(WithServer):
    """Bodies that are JSON or almost JSON."""

    def chat(self, **more):
        return self.server.request("POST", "/v1/chat/completions", dict(messages=[dict(role="user", content="Hi")], max_completion_tokens=4) | more)

    def refused(self, path, body, statuses={400}):
        started = time.monotonic()
        status, text, _ = self.server.request("POST", path, body)
        self.assertIn(status, statuses, (str(body)[:200], text))
        error = json.loads(text)["error"]
        self.assertEqual(set(error), {"message", "type", "param", "code"})
        self.assertLess(len(text), 1000)
        self.assertNotRegex(error["message"], rf"0x[0-9a-f]{{6}}|/tmp/|{re.escape(str(SOURCE.resolve()))}|\.cpp")  # S21
        self.assertLess(time.monotonic() - started, 5 * SLOW)
        return error

    def test_s11_bodies_that_are_not_such_json_are_refused(self):
        for body in (b"", b"{", b"[]", b"null", b"7", b'"a"', b"{}", b"{'prompt': 'a'}", b'{"prompt": "a"} x', b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "\xff"}', b'\xef\xbb\xbf{"prompt": "a"}',
                     '{"prompt": "a"}'.encode("utf-16"), b'{"prompt": NaN}', b'{"prompt": "a", "temperature": "1"}', b'{"prompt": "a", "stream": 1}', b'{"prompt": {"a": 1}}', b'{"prompt": "a\0b"}', b"\x1f\x8b\x08" + bytes(20),
                     b"[" * 100000, b'{"a":' * 100000, b'{"prompt": "' + b"\\u0000" * 100 + b"x"):
            with self.subTest(body=body[:40]):
                self.refused("/v1/completions", body)

    def test_s12_numbers_and_sizes_out_of_range_are_refused(self):
        many = [dict(role="user", content="a")] * 100000
        for more in (dict(n=10**6), dict(n=0), dict(n=2**64), dict(max_tokens=-1), dict(max_tokens=2**63), dict(max_tokens=1e18), dict(max_tokens=1.5), dict(best_of=2), dict(logprobs=10**9),
                     dict(stop=["a"] * 100000), dict(stop="a" * 10**6), dict(stop=[""]), dict(logit_bias={str(i): 1 for i in range(100000)}), dict(logit_bias={"1": 1e9}), dict(seed=2**64),
                     dict(temperature=999999), dict(temperature=-1), dict(top_p=-1), dict(min_p=2), dict(frequency_penalty=3), dict(prompt=["a"] * 100000), dict(prompt=[1] * 100000)):
            with self.subTest(field=list(more)[0]):
                self.refused("/v1/completions", dict(prompt="a") | more)
        for more in (dict(messages=many), dict(top_logprobs=10**9, logprobs=True), dict(tools=[dict(type="function", function=dict(name="a"))] * 10000), dict(max_completion_tokens=0)):
            with self.subTest(field=list(more)[0]):
                self.refused("/v1/chat/completions", dict(messages=[dict(role="user", content="a")]) | more)
        status, text, _ = self.server.request("POST", "/v1/completions", dict(prompt="\n" * 4000, max_tokens=2**31 - 1))
        self.assertEqual(status, 200)  # clipped to the context
        self.assertLessEqual(json.loads(text)["usage"]["total_tokens"], 8193)

    def test_s13_schemas_that_cost_too_much_are_refused_in_time(self):
        deep = '{"type": "array", "items": ' * 2000 + "{}" + "}" * 2000
        wide = dict(type="object", properties={f"p{i}": dict(type="object", properties={f"q{k}": dict(type="number") for k in range(50)}) for i in range(400)})
        circle = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
        twice = {"$defs": {f"a{i}": dict(anyOf=[{"$ref": f"#/$defs/a{i + 1}"}] * 2) for i in range(40)} | {"a40": dict(type="null")}, "$ref": "#/$defs/a0"}
        for schema in (dict(type="string", pattern="(a|b)*a(a|b){40}"), dict(type="string", pattern="((a{99}){99}){99}"), circle, dict(enum=["a" * 1000 + str(i) for i in range(4000)]), dict(type="array", minItems=10**9), dict(type="string", minLength=10**9)):
            self.refused("/v1/chat/completions", dict(messages=[dict(role="user", content="a")], response_format=dict(type="json_schema", json_schema=dict(name="a", schema=schema))))
        self.refused("/v1/chat/completions", '{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ' + deep + "}}}")
        for schema in (wide, twice, dict(type="string", pattern="(a+)+$")):  # read or refused, soon
            started = time.monotonic()
            self.assertIn(self.chat(response_format=dict(type="json_schema", json_schema=dict(name="a", schema=schema)))[0], (200, 400))
            self.assertLess(time.monotonic() - started, 10 * SLOW)

    def test_s14_nothing_to_answer_is_refused(self):
        for prompt in ([], [[]], [""] * 9, [[1], []], [-1], None, {}, True):
            with self.subTest(prompt=prompt):
                self.refused("/v1/completions", dict(prompt=prompt))
        user = dict(role="user", content="a")
        for messages in ([], [{}], None, "a", [dict(role="king", content="a")], [dict(role="user")], [dict(role="user", content=None)], [dict(role="user", content=7)],
                         [dict(role="user", content=[dict(type="image_url", image_url=dict(url="x"))])], [dict(role="tool", content="a")], [user, dict(role="assistant")]):
            with self.subTest(messages=messages):
                self.refused("/v1/chat/completions", dict(messages=messages))
        status, text, _ = self.server.request("POST", "/v1/completions", dict(prompt="", max_tokens=1))
        self.assertIn(status, (200, 400), text)

    def test_s15_control_tokens_spelled_out_are_text_in_every_field(self):
        spelled = "".join(f"<|{name}|>" for name in cli_gpt_oss_test.Chat.SPECIALS) * 3  # 27 of them, each of several ordinary tokens
        call = dict(id="c", type="function", function=dict(name="f", arguments="{}"))
        function = lambda d: [dict(type="function", function=dict(name="f", description=d, parameters=dict(type="object", properties={"a": dict(type="string", description=d)})))]
        user = dict(role="user", content="a")
        places = dict(user=lambda t: dict(messages=[dict(role="user", content="a" + t)]), system=lambda t: dict(messages=[dict(role="system", content="a" + t), user]),
                      developer=lambda t: dict(messages=[dict(role="developer", content="a" + t), user]), parts=lambda t: dict(messages=[dict(role="user", content=[dict(type="text", text="a" + t)])]),
                      assistant=lambda t: dict(messages=[user, dict(role="assistant", content="a" + t), user]), tool=lambda t: dict(messages=[user, dict(role="assistant", tool_calls=[call]), dict(role="tool", tool_call_id="c", content="a" + t)], tools=function("")),
                      arguments=lambda t: dict(messages=[user, dict(role="assistant", tool_calls=[call | dict(function=dict(name="f", arguments="{}" + t))]), dict(role="tool", tool_call_id="c", content="a")], tools=function("")),
                      description=lambda t: dict(messages=[user], tools=function("a" + t)))
        tokens = lambda body: json.loads(self.server.request("POST", "/v1/chat/completions", dict(max_completion_tokens=1) | body)[1])["usage"]["prompt_tokens"]
        for place, of in places.items():
            with self.subTest(place=place):
                self.assertGreater(tokens(of(spelled)) - tokens(of("")), 3 * 27)
        prompt = json.loads(self.server.request("POST", "/v1/completions", dict(prompt=spelled, max_tokens=1))[1])
        self.assertGreater(prompt["usage"]["prompt_tokens"], 3 * 27)
        for name in ("a<|end|>", "a b", "", "a\n", "a to=x", "x" * 1000):
            self.refused("/v1/chat/completions", dict(messages=[user], tools=[dict(type="function", function=dict(name=name))]))
        self.assertEqual(self.chat(stop=["<|end|>"])[0], 200)

    def test_s16_any_tokens_of_a_model_give_a_valid_answer(self):
        controls = {str(i): 6 for i in range(9)}  # a model whose answer has little else
        for seed in range(40):
            status, text, _ = self.chat(seed=seed, temperature=2, max_completion_tokens=40, logit_bias=controls if seed % 2 else None)
            self.assertEqual(status, 200, text)
            choice = json.loads(text)["choices"][0]
            self.assertIn(choice["finish_reason"], ("stop", "length", "tool_calls"))
            self.assertNotRegex(json.dumps(choice), r"<\|(start|end|message|channel|return|call|constrain)\|>")

    def test_s20_every_event_is_json_and_their_text_equals_the_whole_answer(self):
        for seed in range(10):
            # Characters of several bytes, and stop strings that begin with one another.
            body = dict(prompt="\u65e5\u672c", seed=seed, max_tokens=60, temperature=2, logit_bias=ENDLESS | {str(i): 5 for i in range(150, 260)}, stop=["aab", "ab", "\u00e9"] if seed % 2 else None)
            text = json.dumps(body | dict(stream=True)).encode()
            back = self.server.raw(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(text) + text)
            events = events_of(back)
            self.assertEqual((events[-1], events.count(b"[DONE]")), (b"[DONE]", 1))
            said = "".join(c["text"] for e in events[:-1] for c in json.loads(e.decode())["choices"])
            self.assertEqual(said, json.loads(self.server.request("POST", "/v1/completions", body)[1])["choices"][0]["text"])

    def test_s23_nothing_of_a_request_comes_into_the_log(self):
        # The name of a field that is ignored is logged, as one line of plain text; its value is not.
        for body in ({"prompt": "SECRET \x1b[31m\nfake line"}, {"prompt": "a", "field\x1b\nfake line": "SECRET"}, {"model": "SECRET", "prompt": "a"}, b"SECRET {", {"prompt": "a", "user": "SECRET"}):
            self.server.request("POST", "/v1/completions", body, {"X-Secret": "SECRET", "Authorization": "Bearer SECRET"})
        self.server.raw(b"SECRET SECRET SECRET\r\n\r\n")
        self.server.request("GET", "/SECRET")
        self.assertNotIn("SECRET", self.server.log)
        self.assertIn('"field\\u001b\\nfake line"', self.server.log_until("fake line"))
        self.assertNotIn("\x1b", self.server.log)


class Many(WithServer):
    OPTIONS = ("--slots", 8, "--queue", 1000)

    def test_s24_many_streams_with_cancellations_get_the_same_answers_as_alone(self):
        streams, rounds = int(os.environ.get("INGOT_STREAMS", 16)), int(os.environ.get("INGOT_ROUNDS", 2))
        mixes = [dict(temperature=0), dict(temperature=0, stop=["e", "zz"]), dict(temperature=0, logprobs=2), dict(temperature=0, frequency_penalty=1), dict(temperature=1, seed=5), dict(temperature=0.7, top_p=0.9, seed=6, n=2),
                 dict(temperature=0, logit_bias=ENDLESS), dict(temperature=1.5, min_p=0.1, seed=7)]
        bodies = [dict(prompt="user " * (1 + i % 5) + str(i % 8), max_tokens=20 + 7 * (i % 4)) | mixes[i % 8] for i in range(16)]
        text_of = lambda answer: [c["text"] for c in answer["choices"]]
        alone = [text_of(json.loads(self.server.request("POST", "/v1/completions", body)[1])) for body in bodies]
        self.server.until("num_requests_running", 0)

        def one(i):
            noise = random.Random(i)
            body = bodies[i % 16]
            if noise.random() < 0.4:
                with self.server.stream(LONG | dict(max_tokens=8000)) as s:
                    time.sleep(noise.random() * 0.05)
                    return s.recv(noise.randrange(1, 5000)) and 0
            text = json.dumps(body | dict(stream=True)).encode()
            events = events_of(self.server.raw(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(text) + text, seconds=300))
            self.assertEqual((events[-1], events.count(b"[DONE]")), (b"[DONE]", 1))
            said, ends = [""] * len(alone[i % 16]), [0] * len(alone[i % 16])
            for event in events[:-1]:
                for c in json.loads(event)["choices"]:
                    said[c["index"]] += c["text"]
                    ends[c["index"]] += c["finish_reason"] is not None
            self.assertEqual((said, ends), (alone[i % 16], [1] * len(said)), body)
            return 1

        with concurrent.futures.ThreadPoolExecutor(streams) as pool:
            whole = sum(pool.map(one, range(streams * rounds)))
        self.assertGreater(whole, streams * rounds // 3)
        self.server.until("num_requests_running", 0)
        self.server.until("num_requests_waiting", 0)
        self.assertNotIn("ThreadSanitizer", self.server.log)


class Keyed(WithServer):
    @classmethod
    def setUpClass(cls):
        holder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(holder.cleanup)
        keys = pathlib.Path(holder.name, "keys")
        keys.write_text("secret-one\n")
        cls.OPTIONS = ("--api-key-file", keys)
        super().setUpClass()

    def test_s17_without_a_key_every_path_and_method_says_the_same(self):
        answers = set()
        for path in ("/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/metrics", "/v1/none", "//v1/models", "/v1/../health", "/v1/%2e%2e/health", "/%68ealth", "/health/", "/v1/models?api_key=secret-one",
                     "/tokenize", "/v1", "/.env", "/index.html"):
            for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "HEAD"):
                status, text, headers = self.server.request(method, path, "{}" if method in ("POST", "PUT", "PATCH") else None)
                self.assertEqual((status, headers["WWW-Authenticate"]), (401, "Bearer"), (method, path))
                answers.add(text)
        self.assertEqual(len(answers - {""}), 1)
        key = lambda k: self.server.request("GET", "/v1/models", headers={"Authorization": k})[0]
        self.assertEqual([key(k) for k in ("Bearer secret-one", "BEARER secret-one", "Bearer secret-on", "Bearer secret-one2", "Bearer  secret-one", "Bearer", "Bearer " + "a" * 8000)], [200, 200, 401, 401, 401, 401, 401])
        for status, method, path in ((200, "GET", "/health"), (200, "HEAD", "/health"), (200, "GET", "/"), (405, "POST", "/health"), (405, "DELETE", "/")):
            self.assertEqual(self.server.request(method, path)[0], status, (method, path))
        self.assertNotIn("secret", self.server.log)


class Ending(unittest.TestCase):
    def setUp(self):
        if serve_test.WITHOUT:
            self.skipTest("built without libmicrohttpd")

    def test_s22_while_the_server_drains_new_requests_get_503_and_answers_continue(self):
        server = Server("--context", "130000", "--drain", 60)
        s = server.stream(dict(prompt="a", max_tokens=10000, logit_bias=ENDLESS))
        idle = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        idle.sendall(GET + b"\r\n")
        self.assertIn(b" 200 ", idle.recv(1000))
        said = []
        reader = threading.Thread(target=lambda: said.extend(iter(lambda: s.recv(1 << 16), b"")), daemon=True)
        reader.start()
        server.process.terminate()
        deadline = time.monotonic() + 10
        while server.request("GET", "/health")[0] != 503:
            self.assertLess(time.monotonic(), deadline)
        for method, path, body in (("POST", "/v1/completions", BODY.decode()), ("GET", "/v1/models", None), ("POST", "/v1/chat/completions", '{"messages": [{"role": "user", "content": "a"}]}')):
            status, text, headers = server.request(method, path, body)
            self.assertEqual((status, headers["Retry-After"]), (503, "1"), text)
            self.assertIn("closing", json.loads(text)["error"]["message"])
        idle.sendall(GET + b"\r\n")
        self.assertIn(b" 503 ", idle.recv(1000))
        self.assertEqual(server.stop(signals=0), 0, server.log)
        reader.join()
        self.assertIn(b"data: [DONE]", b"".join(said)[-200:])
        for each in (s, idle):
            each.close()

    def test_s23_a_log_that_cannot_be_written_stops_nothing(self):
        if not os.path.exists("/dev/full"):
            self.skipTest("no /dev/full")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with open("/dev/full", "w") as full:
            process = start("serve", "--model", serve_test.MODEL.model, "--port", port, "--date", "none", stderr=full)
        deadline = time.monotonic() + 30
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=10) as s:
                    s.sendall(POST + LENGTH + b"Connection: close\r\n\r\n" + BODY)
                    back = s.recv(1 << 16)
                if statuses(back) == [200]:
                    break
            except OSError:
                pass
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.1)
        process.terminate()
        self.assertEqual(process.wait(60), 0)


if __name__ == "__main__":
    unittest.main()
