"""packaging/nginx.conf in front of `ingot serve`: TLS, events without delay, clients that disconnect, large bodies.

    python3 tests/proxy_test.py BINARY [unittest options]

Without nginx and openssl the script prints a message and ends with status 77.
"""
import json
import os
import pathlib
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import unittest

NGINX = shutil.which("nginx") or next(filter(os.path.exists, ["/usr/sbin/nginx"]), None)
if NGINX is None or shutil.which("openssl") is None:
    print("no nginx or no openssl: the proxy is not tested")
    sys.exit(77)
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import serve_test
from serve_test import ENDLESS

SNIPPET = pathlib.Path(__file__).parent.parent / "packaging/nginx.conf"
CONFIGURATION = """daemon off; pid {d}/pid; error_log {d}/error.log; worker_processes 1;
events {{}}
http {{
  access_log off; client_body_temp_path {d}/body; proxy_temp_path {d}/proxy; fastcgi_temp_path {d}/fastcgi; uwsgi_temp_path {d}/uwsgi; scgi_temp_path {d}/scgi;
  server {{ listen 127.0.0.1:{port} ssl; server_name chat.example; ssl_certificate {d}/cert; ssl_certificate_key {d}/key; include {d}/snippet; }}
}}
"""


class Proxy(serve_test.WithServer):
    OPTIONS = ("--allow-host", "chat.example", "--context", "60000")

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        holder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(holder.cleanup)
        d = pathlib.Path(holder.name)
        d.chmod(0o755)
        subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=chat.example", "-addext", "subjectAltName=DNS:chat.example",
                        "-keyout", d / "key", "-out", d / "cert"], check=True, capture_output=True)
        text = SNIPPET.read_text()
        assert "http://127.0.0.1:8080;" in text
        (d / "snippet").write_text(text.replace("127.0.0.1:8080", f"127.0.0.1:{cls.server.port}"))
        with socket.create_server(("127.0.0.1", 0)) as free:
            cls.port = free.getsockname()[1]
        (d / "nginx.conf").write_text(CONFIGURATION.format(d=d, port=cls.port))
        cls.nginx = subprocess.Popen([NGINX, "-p", d, "-c", d / "nginx.conf"], stderr=subprocess.DEVNULL)
        cls.addClassCleanup(cls.end_nginx)
        cls.trust = ssl.create_default_context(cafile=d / "cert")
        deadline = time.monotonic() + 20
        while True:
            try:
                cls.connect().close()
                break
            except OSError:
                assert cls.nginx.poll() is None and time.monotonic() < deadline, (d / "error.log").read_text()
                time.sleep(0.05)

    @classmethod
    def end_nginx(cls):
        cls.nginx.terminate()
        cls.nginx.wait(20)

    @classmethod
    def connect(cls):
        return cls.trust.wrap_socket(socket.create_connection(("127.0.0.1", cls.port), timeout=60), server_hostname="chat.example")

    def ask(self, method, path, body=b"", more=""):
        s = self.connect()
        s.sendall(f"{method} {path} HTTP/1.1\r\nHost: chat.example\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body)
        return s

    def answer(self, *arguments):
        back = b""
        with self.ask(*arguments, "Connection: close\r\n") as s:
            while part := s.recv(65536):
                back += part
        return int(back[9:12]), back

    def test_requests_and_refusals_pass(self):
        self.assertEqual(self.answer("GET", "/health", b"")[0], 200)
        self.assertEqual(self.answer("POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 1}')[0], 200)
        self.assertEqual(self.answer("POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 1}'.ljust(4 << 20))[0], 200)
        self.assertEqual(self.answer("POST", "/v1/completions", b'{"n": 9}')[0], 400)
        self.assertIn(b"<title>Ingot</title>", self.answer("GET", "/", b"")[1])

    def test_events_come_one_by_one(self):
        body = json.dumps(dict(prompt="a", max_tokens=12000, stream=True, logit_bias=ENDLESS)).encode()
        with self.ask("POST", "/v1/completions", body) as s:
            first = s.recv(65536)
            self.assertIn(b" 200 ", first[:20])
            self.server.until("num_requests_running", 1)  # headers may arrive before the answer begins; the stream continues
            end = first[-200:]
            while b"[DONE]" not in end:
                part = s.recv(65536)
                self.assertTrue(part)
                end = (end + part)[-200:]

    def test_a_client_that_goes_away_ends_its_answer(self):
        aborted = self.server.metric('request_success_total{finished_reason="abort"}')
        for stream in (True, False):
            body = json.dumps(dict(prompt="a", max_tokens=59000, stream=stream, logit_bias=ENDLESS)).encode()
            s = self.ask("POST", "/v1/completions", body)
            self.server.until("num_requests_running", 1)
            s.close()
            self.server.until("num_requests_running", 0, 10)
        self.assertEqual(self.server.metric('request_success_total{finished_reason="abort"}'), aborted + 2)


setUpModule, tearDownModule = serve_test.setUpModule, serve_test.tearDownModule
if __name__ == "__main__":
    unittest.main()
