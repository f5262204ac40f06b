"""The program under test, named by the first argument, for tests that run the program as a user does."""
import atexit
import faulthandler
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest

BINARY = os.path.abspath(sys.argv.pop(1))
# A program with AddressSanitizer or ThreadSanitizer takes ten to fifty times as long: tests that only repeat code with different numbers are left to
# builds without sanitizers.
_program = pathlib.Path(BINARY).read_bytes()
ADDRESS_SANITIZED = b"__asan_init" in _program
SANITIZED = ADDRESS_SANITIZED or b"__tsan_init" in _program
TEXT = "".join(f"The {i}th line says that {i * i % 97} times {i % 13} is äöü {i * i % 97 * (i % 13)}.\n" for i in range(900))
# Options of a very short run.
TINY = ["--preset", "nano", "--set", "model.dim=16", "--set", "model.heads=2", "--set", "model.kv_heads=2", "--set", "model.head_dim=8",
        "--set", "model.mlp_hidden=32", "--set", "model.layers=2", "--set", "model.context=32", "--batch-tokens", "128", "--threads", "1"]
# A file of tests that waits forever prints where each of its threads stands, shortly before `./run test` ends the file.
faulthandler.dump_traceback_later(1100)
# Where these tests run as a background job, SIGINT is ignored, and the processes that they start would ignore it, too. A handler of Python's is not
# inherited, so that those processes begin with the system's default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def ingot(*arguments, stdin=b"", env=None, cwd=None):
    """The result of a run of the program: returncode, text and error."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("INGOT_")} | (env or {})
    run = subprocess.run([BINARY, *map(str, arguments)], input=stdin, capture_output=True, env=environment, cwd=cwd, timeout=120)
    run.text, run.error = run.stdout.decode(), run.stderr.decode(errors="surrogateescape")  # an error may name any file
    return run


def start(*arguments, **more):
    """A process of the program, whose `stderr` is a pipe unless the caller gives another file. Where a test fails before it ends the process, the end of the tests does: ctest waits
    for all processes that hold its output."""
    process = subprocess.Popen([BINARY, *map(str, arguments)], **{"stderr": subprocess.PIPE} | more)
    atexit.register(process.kill)  # does nothing to a process that has ended
    return process


def train_small(data, out, steps):
    """A model of two layers over characters, in seconds."""
    done = ingot("train", "--preset", "nano", "--data", data, "--out", out, "--steps", steps,
                 "--set", "model.layers=2", "--set", "model.dim=64", "--set", "model.heads=4", "--set", "model.kv_heads=4",
                 "--set", "model.head_dim=16", "--set", "model.mlp_hidden=128", "--set", "model.context=64",
                 "--set", "train.batch_tokens=512", "--set", "train.tokenizer=char")
    assert done.returncode == 0, done.error


class InDirectory(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.directory = pathlib.Path(holder.name)

    def file(self, name, content):
        path = self.directory / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def refuses(self, status, message, *arguments, **more):
        """One line on stderr that begins with the command, nothing on stdout, the documented status. On a machine with a GPU, lines before it
        may name the GPU and warn of a missing library."""
        run = ingot(*arguments, **more)
        self.assertEqual((run.returncode, run.text), (status, ""), run.error)
        self.assertRegex(run.error, r"\A(([^\n]+: )?on [^\n]+\n)?(warning: [^\n]+\n)?ingot( [a-z]+)*: [^\n]+\n\Z")
        self.assertRegex(run.error, message)
