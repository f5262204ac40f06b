"""TensorBoard reads the files of `ingot train --tensorboard`, also of a run that stopped and continued.

    python3 tests/tensorboard_test.py BINARY
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

BINARY = os.path.abspath(sys.argv.pop(1))
try:
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
except ImportError:
    print("skipped: tensorboard is not installed")
    sys.exit(77)

TINY = ["--preset", "nano", "--set", "model.dim=16", "--set", "model.heads=2", "--set", "model.kv_heads=2", "--set", "model.head_dim=8",
        "--set", "model.mlp_hidden=32", "--set", "model.layers=2", "--set", "model.context=32", "--batch-tokens", "128", "--set", "train.log_every=1"]


class TensorBoard(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.directory = pathlib.Path(holder.name)
        self.text = self.directory / "text.txt"
        self.text.write_text("".join(f"line {i * 7919 % 1000} of a small text\n" for i in range(400)))

    def train(self, out, *arguments):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("INGOT_")} | {"INGOT_THREADS": "1"}
        run = subprocess.run([BINARY, "train", *TINY, "--data", self.text, "--out", self.directory / out, "--tensorboard", self.directory / "board",
                              *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=120)
        self.assertEqual(run.returncode, 0, run.stderr)

    def logged(self, out, event="step"):
        lines = [json.loads(line) for line in (self.directory / out / "log.jsonl").read_text().splitlines()]
        return [line for line in lines if line["event"] == event]

    def runs(self):
        board = EventMultiplexer().AddRunsFromDirectory(str(self.directory / "board"))
        board.Reload()
        return board

    def test_runs_have_their_names_and_the_numbers_of_their_logs(self):
        self.train("a", "--steps", 12, "--eval-every", 5)
        self.train("b", "--steps", 3, "--seeds", "1,2")
        board = self.runs()
        self.assertEqual(sorted(board.Runs()), ["a", "b/seed-1", "b/seed-2"])
        steps = self.logged("a")
        names = {"train/loss": "loss", "train/grad_norm": "grad_norm", "train/lr_factor": "lr_factor", "speed/tokens_per_second": "tokens_per_second",
                 "speed/step_seconds": "step_seconds", "speed/flops_per_second": "flops_per_second", "memory/bytes": "memory_bytes"}
        self.assertEqual(set(board.Runs()["a"]["scalars"]), {*names, "held_out/loss", "held_out/bits_per_byte"})
        for tag, key in names.items():
            seen = board.Scalars("a", tag)
            self.assertEqual([s.step for s in seen], list(range(1, 13)), tag)
            for event, line in zip(seen, steps):
                self.assertAlmostEqual(event.value, line[key], delta=1e-6 * abs(line[key]))  # a float there
        scores = board.Scalars("a", "held_out/loss")
        self.assertEqual([s.step for s in scores], [5, 10, 12])
        for event, line in zip(scores, self.logged("a", "score")):
            self.assertAlmostEqual(event.value, line["loss"], delta=1e-6)

    def test_a_run_that_went_back_shows_each_step_once_with_its_last_value(self):
        self.train("a", "--steps", 8, "--checkpoint-every", 4, "--set", "keep_checkpoints=9")
        self.train("a", "--steps", 10, "--from", "step-00000004")
        seen = self.runs().Scalars("a", "train/loss")
        self.assertEqual([s.step for s in seen], list(range(1, 11)))
        last = {line["step"]: line["loss"] for line in self.logged("a")}
        for event in seen:
            self.assertAlmostEqual(event.value, last[event.step], delta=1e-6 * last[event.step])


if __name__ == "__main__":
    unittest.main()
