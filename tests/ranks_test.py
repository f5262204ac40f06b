"""Runs `ingot train` in several processes as a user would: started by itself or by torchrun, killed, stopped and resumed.

    python3 tests/ranks_test.py BINARY [unittest options]
"""
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from program import BINARY, SANITIZED

TEXT = "".join(f"line {i * 7919 % 1000} of a small text\n" for i in range(1500))
TINY = ["--preset", "nano", "--set", "model.dim=16", "--set", "model.heads=2", "--set", "model.kv_heads=2", "--set", "model.head_dim=8",
        "--set", "model.mlp_hidden=32", "--set", "model.layers=2", "--set", "model.context=32", "--batch-tokens", "128"]
TORCHRUN = "MASTER_ADDR MASTER_PORT RANK WORLD_SIZE LOCAL_RANK".split()


class Ranks(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.directory = pathlib.Path(holder.name)
        self.text, self.out = self.directory / "text.txt", self.directory / "run"
        self.text.write_text(TEXT)
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("INGOT_") and k not in TORCHRUN} | {"INGOT_THREADS": "1"}

    def command(self, *arguments, out=None):
        return [BINARY, "train", *TINY, "--data", str(self.text), "--out", str(out or self.out), *map(str, arguments)]

    def start(self, command, env=None):
        # A process that receives signals, also where these tests run as a background job, in its own process group.
        default = lambda: (os.setpgid(0, 0), signal.signal(signal.SIGINT, signal.SIG_DFL))
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env or self.environment, preexec_fn=default)
        self.addCleanup(lambda: process.poll() is None and os.killpg(process.pid, signal.SIGKILL))
        return process

    def finish(self, process, status):
        error = process.communicate(timeout=60)[1]
        self.assertEqual(process.returncode, status, error)
        return error

    def train(self, *arguments, status=0, out=None):
        return self.finish(self.start(self.command(*arguments, out=out)), status)

    def hash_of(self, run):
        info = subprocess.run([BINARY, "info", str(run), "--json"], capture_output=True, env=self.environment, check=True)
        return json.loads(info.stdout)["parameter_hash"]

    def undisturbed(self, *arguments):
        """The hash after the same steps by one process."""
        self.train(*arguments, out=self.directory / "whole")
        return self.hash_of(self.directory / "whole")

    def wait_for(self, condition):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not condition():
            time.sleep(0.005)
        self.assertTrue(condition())

    def wait_for_step(self, step):
        log = self.out / "log.jsonl"
        self.wait_for(lambda: log.exists() and f'"step":{step},' in log.read_text())

    def children(self, process):
        """The processes of the ranks, in the order of the ranks."""
        task = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
        return [int(pid) for pid in task.read_text().split()]

    def gone(self, pids):
        self.wait_for(lambda: not any(pathlib.Path(f"/proc/{p}").exists() for p in pids))

    def test_several_processes_end_with_the_bits_of_one(self):
        error = self.train("--steps", 30, "--ranks", 3)
        self.assertIn("3 ranks: 3 passes of 128 tokens a step\n", error)
        self.assertEqual(error.count("\nsaved "), 1)  # a single rank prints
        self.assertEqual(self.hash_of(self.out), self.undisturbed("--steps", 30, "--accumulation", 3))

    def test_a_run_continues_with_another_number_of_ranks_and_the_same_passes(self):
        for ranks, steps in ((4, 10), (2, 20), (1, 30)):
            error = self.train("--steps", steps, *(["--ranks", ranks] if ranks > 1 else []))
            self.assertIn(" passes of 128 tokens a step\n", error)
            self.assertIn(f"\nsaved {self.out}/step-{steps:08}", error)
        self.assertEqual(json.loads((self.out / "config.json").read_text())["train"]["accumulation"], 4)
        error = self.train("--steps", 40, "--ranks", 3, status=2)
        self.assertTrue(error.endswith("train.accumulation: found 4 passes per step, expected a multiple of 3, the number of ranks that share them\n"), error)

    def test_a_rank_that_is_killed_ends_all_and_is_named_and_the_run_goes_on(self):
        steps = ["--steps", 300 if SANITIZED else 1500, "--accumulation", 3, "--checkpoint-every", 50]
        for victim in (1, 0):
            process = self.start(self.command(*steps, "--ranks", 3))
            self.wait_for_step(60 if victim == 1 else 150)
            ranks = self.children(process)
            os.kill(ranks[victim], signal.SIGKILL)
            killed = time.monotonic()
            last = self.finish(process, 5).splitlines()[-1]
            self.assertLess(time.monotonic() - killed, 10)
            self.assertRegex(last, rf"ingot train: rank {victim} of 3 was ended by signal 9 \(Killed\), .*; the last checkpoint is \S+/step-\d+, from")
            self.gone(ranks)
        self.train(*steps, "--ranks", 3)
        self.assertEqual(self.hash_of(self.out), self.undisturbed(*steps))

    def test_a_rank_that_hangs_ends_all_within_the_deadline_and_is_named(self):
        process = self.start(self.command("--steps", 1000000, "--ranks", 3, "--rank-timeout", 2))
        self.wait_for_step(20)
        ranks = self.children(process)
        os.kill(ranks[2], signal.SIGSTOP)
        error = self.finish(process, 5)
        self.assertRegex(error.splitlines()[-1], r"ingot train: rank 2 does not answer: found no byte for 2 s .*; there is no checkpoint yet")
        self.assertEqual(error.count("does not answer"), 1)
        self.gone(ranks)

    def test_a_signal_saves_and_stops_all(self):
        count = 250 if SANITIZED else 2000
        steps = ["--steps", count, "--accumulation", 2]
        process = self.start(self.command(*steps, "--ranks", 2))
        self.wait_for_step(20)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all ranks
        error = self.finish(process, 130)
        self.assertRegex(error.splitlines()[-1], rf"ingot train: stopped at step \d+ of {count}, saved in \S+; to resume: ingot train .* --ranks 2\Z")
        self.train(*steps)  # by a single process
        self.assertEqual(self.hash_of(self.out), self.undisturbed(*steps))

    def test_ranks_save_and_stop_when_the_starting_process_has_ended(self):
        process = self.start(self.command("--steps", 1000000, "--ranks", 2))
        self.wait_for_step(20)
        ranks = self.children(process)
        process.kill()
        self.gone(ranks)
        process.communicate(timeout=60)
        self.assertTrue(any(p.name.startswith("step-") for p in self.out.iterdir()))

    def test_an_error_of_all_ranks_is_one_line(self):
        for arguments, message in ((["--ranks", 2, "--accumulation", 3], "--accumulation: found 3 passes per step, expected a multiple of 2, "),
                                   (["--ranks", 2, "--accumulation", 1], "--accumulation: found 1 passes per step, expected a multiple of 2, "),
                                   (["--ranks", 2, "--gpus", 3], "found --gpus 3 and --ranks 2, expected one of them")):
            error = self.train("--steps", 5, *arguments, status=2)
            self.assertTrue(error.startswith("ingot train: " + message), error)
            self.assertEqual(error.count("\n"), 1, error)
        self.assertFalse((self.out / "config.json").exists())
        for variables, message in (({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: found '2', expected a number from 0 to 1"),
                                   ({"RANK": "0"}, "WORLD_SIZE: found nothing"),
                                   ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1000"}, "MASTER_ADDR: found nothing")):
            error = self.finish(self.start(self.command("--steps", 5), env=self.environment | variables), 2)
            self.assertTrue(error.startswith("ingot train: " + message), error)

    @unittest.skipUnless(importlib.util.find_spec("torch"), "needs torchrun")
    def test_torchrun_starts_the_ranks(self):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
        self.finish(self.start(torchrun + self.command("--steps", 30)), 0)
        self.assertEqual(self.hash_of(self.out), self.undisturbed("--steps", 30, "--accumulation", 2))


if __name__ == "__main__":
    unittest.main()
