"""Training from the command line: runs, their logs and plots, messages, the precedence of option sources.

    python3 tests/cli_runs_test.py BINARY [unittest options]
"""
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import unittest

from program import BINARY, TEXT, TINY, InDirectory, ingot, start


class Plot(InDirectory):
    def run_of(self, name, losses, tail=""):
        directory = self.directory / name
        directory.mkdir()
        lines = ['{"event": "start", "seed": 1}\n'] + [f'{{"step": {i}, "loss": {v}}}\n' for i, v in enumerate(losses)]
        (directory / "log.jsonl").write_text("".join(lines) + tail)
        return directory

    def test_a_device_is_not_replaced_by_a_picture(self):
        log = self.file("log.jsonl", '{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}\n')
        os.mkfifo(self.directory / "pipe")
        self.refuses(5, "pipe: found a special file", "plot", log, "--out", self.directory / "pipe")

    def test_several_runs_become_one_svg_whose_scale_is_round(self):
        out = self.directory / "x.svg"
        a, b = self.run_of("a", [5.0, 4.0, 3.1]), self.run_of("b<&>", [4.9, 4.2, 3.5], tail='{"step": 3, "lo')
        run = ingot("plot", a, b, "--out", out, env={"LC_ALL": "de_DE.UTF-8", "LC_NUMERIC": "de_DE.UTF-8"})
        self.assertEqual(run.returncode, 0, run.error)
        import xml.etree.ElementTree as tree
        words = ["".join(t.itertext()) for t in tree.parse(out).iter() if t.tag.endswith("text")]
        self.assertIn("4.0", words)
        self.assertTrue(any(w.endswith("loss  3.100") for w in words), words)
        self.assertTrue(any("b<&>" in w for w in words), words)

    def test_a_repeated_step_counts_once_the_later_line(self):
        run = self.run_of("a", [5.0, 4.0], tail='{"step": 1, "loss": 2.5}\n')
        out = self.directory / "x.svg"
        self.assertEqual(ingot("plot", run, "--out", out).returncode, 0)
        self.assertIn("2.500", out.read_text())
        self.assertNotIn("4.5<", out.read_text().split("2.500")[1])

    def test_steps_after_the_checkpoint_to_which_a_run_went_back_are_not_plotted(self):
        run = self.run_of("a", [5.0, 4.0, 3.0, 2.0], tail='{"event": "resume", "step": 1}\n')
        out = self.directory / "x.svg"
        self.assertEqual(ingot("plot", run, "--out", out).returncode, 0)
        self.assertIn("4.000", out.read_text())

    def test_the_legend_stands_above_the_data_and_the_axis_is_named_after_all_of_it(self):
        import xml.etree.ElementTree as tree
        logs = [self.directory / f"a-directory-with-quite-a-long-name/and-{i}" for i in range(6)]
        for log in logs:
            log.mkdir(parents=True)
            (log / "log.jsonl").write_text("".join(f'{{"event": "step", "step": {i}, "loss": {9 - i % 3}, "grad_norm": 1.5}}\n' for i in range(30)))
        out = self.directory / "x.svg"
        for arguments, label in ((["--y", "loss"], "loss"), (["--y", "loss", "--y", "score.loss"], "loss"), (["--y", "loss", "--y", "grad_norm"], "loss, grad_norm")):
            run = ingot("plot", *logs, *arguments, "--out", out)
            self.assertEqual(run.returncode, 0, run.error)
            svg = tree.parse(out).getroot()
            width = float(svg.get("viewBox").split()[2])
            texts = [t for t in svg.iter() if t.tag.endswith("text")]
            self.assertEqual([t.text for t in texts if t.get("transform")], [label])
            entries = [t for t in texts if re.search(r"  \d\.\d{3}$", t.text)]
            lines = [p for p in svg.iter() if p.tag.endswith("polyline")]
            self.assertEqual((len(entries), len(lines)), (6 * len(set(label.split(", "))), 12 * len(set(label.split(", ")))))  # each raw and smoothed
            highest = min(float(point.split(",")[1]) for line in lines for point in line.get("points").split())
            self.assertTrue(all(float(t.get("y")) < highest and float(t.get("x")) + 6.5 * len(t.text) < width for t in entries))
            self.assertEqual(len({(t.get("x"), t.get("y")) for t in entries}), len(entries))

    def test_bad_logs_are_refused(self):
        self.refuses(4, "nothing", "plot", self.directory / "nothing")
        self.refuses(3, r"x\.jsonl:2: byte 0", "plot", self.file("x.jsonl", '{"step": 1, "loss": 2}\nbroken\n'))
        self.refuses(3, "found no record with the numbers 'step' and 'loss'.*; numbers in this log: a\n", "plot", self.file("y.jsonl", '{"a": 1}\n'))
        log = self.file("z.jsonl", '{"step": 1, "loss": 2}\n{"event": "score", "step": 1, "loss": 3}\n')
        self.refuses(3, "; numbers in this log: loss, score.loss, score.step, step\n", "plot", log, "--y", "los")


class Runs(InDirectory):
    def setUp(self):
        super().setUp()
        self.text, self.run_directory = self.file("text.txt", TEXT), self.directory / "run"

    def train(self, *arguments, out=None):
        return ["train", *TINY, "--data", self.text, "--out", out or self.run_directory, *arguments]

    def test_a_run_is_trained_scored_sampled_described_and_plotted(self):
        run = ingot(*self.train("--steps", 30))
        self.assertEqual((run.returncode, run.text), (0, ""), run.error)
        score = json.loads(ingot("eval", self.run_directory, "--data", self.text, "--json").text)
        self.assertEqual(score["step"], 30)
        self.assertIn(f"loss {score['loss']:.4f}", run.error)  # the score printed by training for the same held-out part
        whole = json.loads(ingot("eval", self.run_directory, "--data", self.text, "--split", "all", "--json").text)
        self.assertGreater(whole["bytes"], 5 * score["bytes"])
        evaluate = ["eval", self.run_directory, "--data", self.text]
        self.refuses(2, "--context: found 64, expected at most 32, the model's", *evaluate, "--context", 64)  # nano learned 32 positions
        self.refuses(2, "--stride: found 33, expected at most the context of 32", *evaluate, "--stride", 33)
        self.refuses(2, "found --flat and --stride, expected one of them", *evaluate, "--stride", 3, "--flat")
        self.assertAlmostEqual(score["perplexity"], math.exp(score["loss"]), places=9)
        generate = ["generate", self.run_directory, "--prompt", "The ", "--tokens", 20, "--temperature", "0.8"]
        first = ingot(*generate, "--seed", 1)
        self.assertTrue(first.text.startswith("The "), first.error)
        self.assertEqual(first.text, ingot(*generate, "--seed", 1, "--threads", 1).text)
        self.assertNotEqual(first.text, ingot(*generate, "--seed", 2).text)
        report = json.loads(ingot(*generate, "--seed", 1, "--json").text)
        self.assertEqual("The " + report["text"], first.text.removesuffix("\n"))
        self.assertEqual((len(report["ids"]), report["finish"], report["prompt_tokens"]), (20, "length", 4))
        self.refuses(2, "--layers: found 1, expected none with a model of `ingot train`", *generate, "--layers", 1)
        self.refuses(7, "run: found a run of `ingot train`, expected GPT-OSS, Llama, .*; `ingot generate`, `eval` and `serve` take runs", "chat", "--model", self.run_directory)
        self.refuses(7, "--gpus: found 2 for a model of the kind gpt, ", *generate, "--gpus", "2")
        self.refuses(7, "run: found a model on cpu whose engine computes no drafts, expected a published model", "bench", "draft", "--model", self.run_directory, "--context", 8, "--tokens", 8)
        self.assertEqual(ingot(*generate[:2], "--tokens", 20, "--temperature", "0.8", stdin=b"The ").text, first.text)
        described = json.loads(ingot("info", self.run_directory, "--json").text)
        self.assertEqual((described["step"], described["parameter_hash"]), (30, score["parameter_hash"]))
        svg = self.directory / "x.svg"
        self.assertEqual(ingot("plot", self.run_directory, "--out", svg).returncode, 0)
        self.assertIn("held-out loss", svg.read_text())

    def test_an_error_of_a_command_names_the_variable_or_the_key_that_gave_the_value(self):
        self.assertEqual(ingot(*self.train("--steps", 1)).returncode, 0)
        evaluate, wrong = ["eval", self.run_directory, "--data", self.text], "found 33, expected at most the context of 32"
        self.refuses(2, f"eval: INGOT_STRIDE: {wrong}", *evaluate, env=dict(INGOT_STRIDE="33"))
        self.refuses(2, f"eval: stride: {wrong}", *evaluate, "--set", "stride=33", env=dict(INGOT_STRIDE="3"))
        self.refuses(2, f"eval: stride: {wrong}", *evaluate, "--config", self.file("c.json", '{"stride": 33}'))
        self.refuses(2, f"eval: --stride: {wrong}", *evaluate, "--stride", 33, env=dict(INGOT_STRIDE="3"))
        self.refuses(2, "eval: found INGOT_FLAT and --stride, expected one of them", *evaluate, "--stride", 3, env=dict(INGOT_FLAT="1"))
        self.refuses(2, "eval: found flat and INGOT_STRIDE, expected one of them", *evaluate, "--set", "flat=true", env=dict(INGOT_STRIDE="3"))
        generate = ["generate", self.run_directory, "--prompt", "The"]  # an option that may be repeated
        self.refuses(2, "generate: INGOT_STOP_ID: found '-1', expected an id from 0 to", *generate, env=dict(INGOT_STOP_ID="-1"))
        self.refuses(2, "generate: stop_id: found '-1', expected an id from 0 to", *generate, "--set", "stop_id=-1")
        self.refuses(2, "generate: --stop-id: found '-1', expected an id from 0 to", *generate, "--stop-id", "-1", env=dict(INGOT_STOP_ID="1"))
        train = self.train("--steps", 1, out=self.directory / "other")
        self.refuses(2, "train: INGOT_SEEDS: found 'x', expected numbers", *train, env=dict(INGOT_SEEDS="1,x"))
        self.refuses(2, "train: found --preset and INGOT_INIT_FROM, expected one of them", *train, env=dict(INGOT_INIT_FROM=str(self.run_directory)))
        self.refuses(2, "train: found --preset and train.init_from, expected one of them", *train, "--set", f"init_from={self.run_directory}")
        pack = ["data", "pack", "--data", self.text, "--tokenizer", self.run_directory / "tokenizer.json", "--out", self.directory / "shards"]
        self.assertEqual(ingot(*pack, "--held-out-every", 0).returncode, 0)  # advice names the option
        self.refuses(4, r"shards: found no held-out shards \(val_\*\.bin\), expected some; --split all scores every shard", *evaluate[:3], self.directory / "shards",
                     env=dict(INGOT_SPLIT="held-out"))

    def test_a_seed_is_any_unsigned_integer_of_64_bits(self):
        most = 2**64 - 1
        self.assertEqual(ingot(*self.train("--steps", 1, "--seed", most)).returncode, 0)
        self.assertEqual(json.loads((self.run_directory / "config.json").read_text())["train"]["seed"], most)
        self.assertEqual(ingot(*self.train("--steps", 1, "--seeds", f"1,{most}", out=self.directory / "seeds")).returncode, 0)
        self.assertTrue((self.directory / f"seeds/seed-{most}/config.json").exists())
        generate = ["generate", self.run_directory, "--prompt", "The ", "--tokens", 20]
        texts = [ingot(*generate, "--seed", seed).text for seed in (2**53, 2**53 + 1, most - 1, most)]  # fp64 would round the odd numbers
        self.assertEqual(len(set(texts)), 4, texts)
        for run in (ingot(*generate, "--set", f"seed={most}"), ingot(*generate, env=dict(INGOT_SEED=str(most)))):
            self.assertEqual(run.text, texts[3], run.error)
        pack = ["data", "pack", "--data", self.text, "--tokenizer", self.run_directory / "tokenizer.json", "--out", self.directory / "shards"]
        export = ["export", self.run_directory, self.directory / "x.gpt", "--data", self.text]
        for command in (self.train("--steps", 1), generate, ["chat", "--model", self.run_directory], pack, export, ["bench", "serve", self.run_directory]):
            for bad in ("-1", "1.5", "x", str(most + 1)):
                self.refuses(2, rf"--seed: found '{bad}', expected an integer from 0 to {most}\n", *command, f"--seed={bad}")
        self.refuses(2, f"INGOT_SEED: found '-1', expected an integer from 0 to {most}", *self.train("--steps", 1), env=dict(INGOT_SEED="-1"))
        self.refuses(2, f"seed: found number -1, expected an integer from 0 to {most}", *generate, "--set", "seed=-1")
        for bad in ("-1", "+1", "1.5", str(most + 1), ""):
            self.refuses(2, rf"--seeds: found '{re.escape(bad)}', expected numbers joined by commas", *self.train("--seeds", f"{bad},2"))

    def test_an_interrupted_run_says_how_to_resume_and_ends_with_the_same_parameters(self):
        whole = self.directory / "whole"
        self.assertEqual(ingot(*self.train("--steps", 400, out=whole)).returncode, 0)
        command = self.train("--steps", 400)
        process = start(*command)
        log = self.run_directory / "log.jsonl"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (log.exists() and '"step":10' in log.read_text()):
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=60)[1].decode()
        self.assertEqual(process.returncode, 130, error)
        self.assertIn("train: stopping and saving after the current step; a second signal stops without saving\n", error)
        self.assertRegex(error, r"stopped at step \d+ of 400, saved in \S+; to resume: ingot train ")
        resumed = ingot(*command)
        self.assertEqual(resumed.returncode, 0, resumed.error)
        hashes = [json.loads(ingot("info", d, "--json").text)["parameter_hash"] for d in (whole, self.run_directory)]
        self.assertEqual(*hashes)

    def test_a_damaged_checkpoint_is_skipped_on_request(self):
        command = self.train("--steps", 30, "--checkpoint-every", 10, "--set", "keep_checkpoints=9")
        self.assertEqual(ingot(*command).returncode, 0)
        newest = self.run_directory / "step-00000030/model.safetensors"
        newest.write_bytes(newest.read_bytes()[:-1])
        offer = r"model.safetensors: found \d+ bytes, expected \d+; \S+/step-00000020 before it is whole: --resume last-good takes it, --from step-N any other"
        self.refuses(3, offer, *command)
        for reader in (["eval", self.run_directory, "--data", self.text], ["generate", self.run_directory, "--prompt", "The"], ["info", self.run_directory]):
            self.refuses(3, "step-00000020 before it is whole\n", *reader)
        run = ingot(*command, "--resume", "last-good")
        self.assertEqual(run.returncode, 0, run.error)
        self.assertRegex(run.error, r"passing over a damaged checkpoint: .*\nresuming at step 20 .*\nset aside as \S+aside-step-00000030\n")
        self.assertEqual(ingot(*command, "--from", "step-10").returncode, 0)
        self.refuses(4, "found no checkpoint 'step-15', expected one of step-00000010, step-00000020, step-00000030", *command, "--from", "step-15")
        self.refuses(2, "found --from with --resume last-good", *command, "--from", "10", "--resume", "last-good")
        more = ingot(*self.train("--steps", 40, "--eval-every", 35))
        self.assertEqual(more.returncode, 0, more.error)
        self.refuses(2, "found 40 steps done, expected a run of at least as many, not 30", *command)

    def test_a_run_without_an_undamaged_checkpoint_says_that_it_begins_again(self):
        command = self.train("--steps", 2)
        self.assertNotIn("begins again", ingot(*command, "--resume", "last-good").error)  # a new run
        weights = self.run_directory / "step-00000002/model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
        run = ingot(*command, "--resume", "last-good")
        self.assertEqual(run.returncode, 0, run.error)
        self.assertIn("found no undamaged checkpoint; the run begins again at step 1\n", run.error)

    def test_a_run_does_not_continue_with_other_data(self):
        text = self.directory / "own.txt"
        command = ["train", *TINY, "--data", text, "--tokenizer", self.directory / "own.json", "--out", self.directory / "own", "--seed", "3"]
        text.write_text(TEXT, encoding="utf-8")
        self.assertEqual(ingot("tokenizer", "train", "--data", text, "--vocab", "300", "--out", self.directory / "own.json").returncode, 0)
        self.assertEqual(ingot(*command, "--steps", "4").returncode, 0)
        text.write_text(TEXT.replace("line", "row"), encoding="utf-8")
        self.refuses(3, r"step-00000004/state.json: found a run on other data \([0-9a-f]+\), expected [0-9a-f]+ of \S*own.txt", *command, "--steps", "6")
        text.write_text(TEXT, encoding="utf-8")
        run = ingot(*command, "--steps", "6")
        self.assertEqual((run.returncode, "resuming at step 4" in run.error), (0, True), run.error)

    def test_a_run_that_went_back_is_resumed_without_going_back_again(self):
        self.assertEqual(ingot(*self.train("--steps", 20, "--checkpoint-every", 10)).returncode, 0)
        process = start(*self.train("--steps", 1000000, "--from", "step-10"))
        said = b""
        while b"\nstep " not in said:  # training has begun
            more = os.read(process.stderr.fileno(), 4096)
            self.assertTrue(more, said)
            said += more
        self.assertTrue((self.run_directory / "aside-step-00000020").exists())
        process.send_signal(signal.SIGTERM)
        error = process.communicate(timeout=60)[1].decode()
        self.assertEqual(process.returncode, 130, error)
        self.assertRegex(error, "to resume: ingot train .* --steps 1000000\n")

    def test_a_run_is_fine_tuned_from_another_and_its_best_kept(self):
        first = self.directory / "first"
        run = ingot(*self.train("--steps", 40, "--eval-every", 10, out=first))
        self.assertEqual(run.returncode, 0, run.error)
        best = json.loads((first / "best.json").read_text())
        self.assertEqual(json.loads(ingot("eval", first / "best", "--data", self.text, "--json").text)["step"], best["step"])
        self.assertEqual(json.loads(ingot("info", first, "--json").text)["best"], best)
        tune = ["train", "--data", self.text, "--out", self.run_directory, "--init-from", first / "best", "--steps", 3, "--set", "warmup_steps=1000"]
        run = ingot(*tune)
        self.assertEqual(run.returncode, 0, run.error)
        self.assertIn("starting with the weights of ", run.error)
        loss = json.loads(ingot("eval", self.run_directory, "--data", self.text, "--json").text)["loss"]
        self.assertAlmostEqual(loss, best["loss"], delta=0.1)  # of 3.3 at the beginning
        self.assertIn('"init_parameter_hash":"', (self.run_directory / "log.jsonl").read_text())
        self.assertIn("resuming at step 3", ingot(*tune).error)
        other = self.directory / "other"
        tune[4] = other
        self.refuses(2, "found --preset and --init-from", *tune, "--preset", "nano")
        self.refuses(2, "--init-from: .*: found the tensor .*expected", *tune, "--set", "mlp_hidden=64")
        self.refuses(4, "nothing: found no such", *tune[:6], self.directory / "nothing")

    def test_steps_replace_the_seconds_of_the_run_that_is_fine_tuned(self):
        base = self.directory / "base"
        timed = ["--set", "train.seconds=0.3", "--set", "reserve_seconds=0.1"]
        self.assertEqual(ingot(*self.train(*timed, out=base)).returncode, 0)
        for name, length in (("flag", ["--steps", 3]), ("key", ["--set", "steps=3"])):
            out = self.directory / name
            run = ingot("train", "--data", self.text, "--out", out, "--init-from", base, *length)
            self.assertEqual(run.returncode, 0, run.error)
            self.assertIn("step 3/3", run.error)
            self.assertEqual(json.loads((out / "config.json").read_text())["train"]["seconds"], 0)

    def test_a_fine_tuned_run_goes_on_when_its_base_moved_or_is_spelled_otherwise(self):
        base, tokenizer = self.directory / "base", self.directory / "tok.json"
        self.assertEqual(ingot(*self.train("--steps", 2, out=base)).returncode, 0)
        tune = lambda origin, steps: ["train", "--data", self.text, "--out", self.run_directory, "--init-from", origin, "--steps", steps]
        self.assertEqual(ingot(*tune("base", 2), cwd=self.directory).returncode, 0)
        for steps, origin in enumerate(("./base", "base/", base), start=3):
            run = ingot(*tune(origin, steps), cwd=self.directory)
            self.assertEqual(run.returncode, 0, run.error)
            self.assertIn(f"resuming at step {steps - 1}", run.error)
        base.rename(self.directory / "elsewhere")
        run = ingot(*tune(base, 6))
        self.assertEqual(run.returncode, 0, run.error)
        self.refuses(2, "found model.mlp_hidden = 32, expected 64, which the preset and the options give", *tune(base, 7), "--set", "mlp_hidden=64")
        # The file of a tokenizer likewise.
        self.assertEqual(ingot("tokenizer", "train", "--data", self.text, "--vocab", 300, "--out", tokenizer).returncode, 0)
        own = self.directory / "own"
        train = lambda file, steps: self.train("--set", f"train.tokenizer={file}", "--steps", steps, out=own)
        self.assertEqual(ingot(*train("tok.json", 1), cwd=self.directory).returncode, 0)
        self.assertEqual(ingot(*train("./tok.json", 2), cwd=self.directory).returncode, 0)
        tokenizer.unlink()
        self.assertEqual(ingot(*train("tok.json", 3), cwd=self.directory).returncode, 0)

    def test_outputs_of_a_command_among_its_texts_are_no_texts_of_the_next_command(self):
        notes = self.directory / "notes"
        notes.mkdir()
        for i in range(4):
            (notes / f"{i}.txt").write_text(TEXT[i * 4000:(i + 1) * 4000])
        train = lambda steps: ["train", *TINY, "--data", notes, "--out", notes / "run", "--steps", steps]
        first = ingot(*train(2))
        self.assertEqual(first.returncode, 0, first.error)
        again = ingot(*train(3))
        self.assertEqual(again.returncode, 0, again.error)
        self.assertIn("left out of the texts: " + str(notes / "run") + " (a run)\n", again.error)
        for name in ("tok.json", "again.json"):
            run = ingot("tokenizer", "train", "--data", notes, "--vocab", 300, "--out", notes / name)
            self.assertIn("read 4 documents", run.error)
        self.refuses(2, r"scores\.jsonl: found a name below \S+notes, whose files are read as texts", "eval", notes / "run", "--data", notes,
                     "--ttt", "--ttt-log", notes / "scores.jsonl")

    def test_json_lines_and_standard_input_are_documents(self):
        texts = [TEXT[i * 3000:(i + 1) * 3000] for i in range(3)]
        lines = "".join(json.dumps({"text": t, "id": i}) + "\n" for i, t in enumerate(texts)).encode()
        named = json.loads(ingot("data", "info", self.file("a.jsonl", lines), "--json").text)
        self.assertEqual(named["documents"], 3)
        for given, documents in ((lines, 3), ("".join(texts).encode(), 1)):
            self.assertEqual(json.loads(ingot("data", "info", "-", "--json", stdin=given).text)["documents"], documents)
        run = ingot("train", *TINY, "--data", "-", "--out", self.run_directory, "--steps", 2, stdin=TEXT.encode())
        self.assertEqual(run.returncode, 0, run.error)
        score = lambda data, stdin=b"": json.loads(ingot("eval", self.run_directory, "--data", data, "--json", stdin=stdin).text)
        self.assertEqual(score("-", TEXT.encode())["loss"], score(self.text)["loss"])
        self.assertIn("standard input is not the data of the run", ingot("eval", self.run_directory, "--data", "-", stdin=TEXT[100:300].encode()).error)
        self.refuses(2, "--data: found standard input with --seeds", "train", *TINY, "--data", "-", "--out", self.directory / "s", "--seeds", "1,2")
        self.refuses(2, "--data: found standard input with several ranks", "train", *TINY, "--data", "-", "--out", self.directory / "s", "--ranks", 2)
        self.refuses(3, "standard input: found no text", "data", "info", "-")

    def test_all_of_a_text_is_scored_unless_the_run_was_trained_on_it(self):
        self.assertEqual(ingot(*self.train("--steps", 2)).returncode, 0)
        other = self.file("other.txt", TEXT[2000:7000])
        score = lambda data, *more: json.loads(ingot("eval", self.run_directory, "--data", data, "--json", *more).text)
        own, whole = score(self.text), score(other)
        self.assertEqual((own["split"], whole["split"]), ("held-out", "all"))
        self.assertEqual(score(other, "--split", "all")["loss"], whole["loss"])
        self.assertLess(score(other, "--split", "held-out")["bytes"], whole["bytes"] / 5)
        said = ingot("eval", self.run_directory, "--data", other)
        self.assertIn("is not the data of the run: the whole text is scored", said.error)
        self.assertIn("other.txt (all, 1 document): ", said.text)

    def test_text_that_cannot_be_scored_is_refused_before_training(self):
        two = self.directory / "two"
        two.mkdir()
        (two / "a.txt").write_text(TEXT)
        (two / "b.txt").write_text("\n")
        for seed in range(1, 9):
            run = ingot("train", *TINY, "--data", two, "--out", self.directory / f"r{seed}", "--steps", 3, "--set", f"split_seed={seed}",
                        "--set", "train.tokenizer=char")
            if run.returncode != 0:
                break
        self.assertEqual(run.returncode, 3, run.error)
        self.assertIn("number of tokens to score: found 1, expected at least 2", run.error)
        self.assertNotIn("step 1/", run.error)

    def test_a_score_that_is_no_number_ends_with_status_8_and_the_run_is_saved(self):
        rates = [word for key in ("matrix_lr", "embed_lr", "scalar_lr") for word in ("--set", f"{key}=1e10")]
        run = ingot("train", "--data", self.text, "--out", self.run_directory, "--batch-tokens", 512, "--steps", 1, *rates)
        self.assertEqual(run.returncode, 8, run.error)
        self.assertIn("step 1 has no score: scoring ", run.error)
        self.assertTrue((self.run_directory / "step-00000001/manifest.json").exists())
        for more in ([], ["--json"]):
            self.refuses(8, "expected a finite number", "eval", self.run_directory, "--data", self.text, *more)

    def test_losses_are_means_over_the_targets_that_count(self):
        pairs = self.directory / "pairs"
        pairs.mkdir()
        for i in range(300):
            (pairs / f"{i}.txt").write_text("ab")
        still = [word for key in ("matrix_lr", "embed_lr", "scalar_lr", "softcap") for word in ("--set", f"{key}=0")]
        run = ingot("train", *TINY, "--set", "order=segments", "--set", "train.tokenizer=char", *still, "--set", "log_every=1", "--data", pairs,
                    "--out", self.run_directory, "--steps", 2)
        self.assertEqual(run.returncode, 0, run.error)
        losses = [json.loads(line)["loss"] for line in (self.run_directory / "log.jsonl").read_text().splitlines() if '"event":"step"' in line]
        score = json.loads(ingot("eval", self.run_directory, "--data", pairs, "--split", "all", "--json").text)
        self.assertEqual((score["targets"], score["bytes"]), (300, 300))
        for loss in losses:
            self.assertAlmostEqual(loss, score["loss"], places=4)

    def test_two_runs_of_one_name_stay_apart_in_tensorboard(self):
        board = self.directory / "board"
        for above in ("a", "b", "a"):
            steps = 2 if above == "b" else 3
            run = ingot(*self.train("--steps", steps, "--tensorboard", board, out=self.directory / above / "run"))
            self.assertEqual(run.returncode, 0, run.error)
        self.assertEqual(sorted(p.name for p in board.iterdir()), ["run", "run-2"])

    def test_a_directory_may_have_any_name(self):
        name = self.directory / os.fsdecode("Läufe \"1\" \\ \n ".encode() + b"\xff")
        run = ingot(*self.train("--steps", 30, out=name))
        self.assertEqual(run.returncode, 0, run.error)
        report = json.loads(ingot("eval", name, "--data", self.text, "--json").text)
        self.assertTrue(report["run"].endswith("Läufe \"1\" \\ \n \ufffd"), report["run"])
        self.assertEqual(ingot("plot", name, "--out", name / "x.svg").returncode, 0)

    def test_several_seeds_give_mean_and_deviation(self):
        run = ingot(*self.train("--steps", 5, "--seeds", "1,2"))
        self.assertEqual(run.returncode, 0, run.error)
        self.assertRegex(run.error, r"2 seeds: held-out loss \d+\.\d{4} \+- \d+\.\d{4}")

    def test_a_finished_run_is_scored_again_and_no_step_reported(self):
        command = self.train("--steps", 5)
        self.assertIn("step 5/5", ingot(*command).error)
        again = ingot(*command)
        self.assertEqual(again.returncode, 0, again.error)
        self.assertNotIn("step 0", again.error)
        self.assertEqual(again.error.count("resum"), 1, again.error)

    def test_a_model_that_could_not_be_saved_is_an_error(self):
        # A limit of the file size takes every checkpoint and leaves the small files of a run.
        limited = subprocess.run(["bash", "-c", 'ulimit -f 8; exec "$0" "$@"', BINARY, *map(str, self.train("--steps", 5))],
                                 capture_output=True, text=True)
        self.assertEqual((limited.returncode, limited.stdout), (5, ""), limited.stderr)
        self.assertRegex(limited.stderr, r"run: the model of step 5 was not saved, as the warnings above say\n\Z")
        self.assertNotIn("\nsaved ", limited.stderr)
        self.assertNotIn("goes on", limited.stderr)

    def test_a_cut_log_is_completed_when_the_run_continues(self):
        self.assertEqual(ingot(*self.train("--steps", 5)).returncode, 0)
        log = self.run_directory / "log.jsonl"
        lines = log.read_text()
        log.write_text(lines + '{"event": "st')
        self.assertEqual(ingot(*self.train("--steps", 5)).returncode, 0)
        self.assertTrue(log.read_text().startswith(lines + '{"event":"resume"'))
        self.assertEqual(ingot("plot", self.run_directory, "--out", self.directory / "x.svg").returncode, 0)

    def test_a_prompt_is_repeated_once_the_tokenizer_has_taken_it(self):
        self.assertEqual(ingot(*self.train("--steps", 5)).returncode, 0)
        self.refuses(3, "--prompt: text to encode: byte 0: found the character", "generate", self.run_directory, "--prompt", "日本")
        self.refuses(3, "kanji.txt: text to encode: byte 4: found the character", "generate", self.run_directory, "--file", self.file("kanji.txt", "The 日"))
        self.refuses(3, "standard input: text to encode: byte 0: found", "generate", self.run_directory, stdin="日".encode())
        (self.run_directory / "tokenizer.json").unlink()
        self.refuses(4, "tokenizer.json: cannot open", "generate", self.run_directory, "--prompt", "The")

    def test_the_demo_s_report_serves_wide_and_narrow_pages_and_shows_no_screen_of_nothing(self):
        import html.parser
        tiny = [word for word in TINY if word != "--batch-tokens"]
        tiny[tiny.index("128"):tiny.index("128") + 1] = ["--set", "train.batch_tokens=128"]
        text = self.file("gaps.txt", ("ab" + "\n" * 40 + "cd" + " " * 60) * 200)
        out = self.directory / "demo"
        run = ingot("demo", *tiny, "--set", "steps=40", "--data", text, "--out", out, "--seconds", 1, "--prompt", "ab\n\n\n")
        self.assertEqual(run.returncode, 0, run.error)
        report, opened, unclosed = (out / "report.html").read_text(), [], []
        tags = []

        class Reader(html.parser.HTMLParser):
            def handle_starttag(self, tag, attributes):
                tags.append((tag, dict(attributes)))
                if tag not in ("meta", "br"):
                    opened.append(tag)

            def handle_startendtag(self, tag, attributes):
                tags.append((tag, dict(attributes)))

            def handle_endtag(self, tag):
                unclosed.extend([] if opened and opened.pop() == tag else [tag])

        Reader().feed(report)
        self.assertEqual((opened, unclosed), ([], []))
        self.assertIn(("meta", dict(name="viewport", content="width=device-width, initial-scale=1")), tags)
        self.assertIn("@media (prefers-color-scheme: dark)", report)
        self.assertEqual([a.get("viewbox", "").split()[2] for t, a in tags if t == "svg"], ["820", "400"])
        self.assertFalse([a for _, a in tags if "src" in a or "href" in a])  # nothing from elsewhere
        for samples in re.findall(r"<pre><b>ab\n\n\n</b>(.*?)</pre>", report, re.S), re.findall(r"^--- .*?\nab\n\n\n(.*?)(?=^---|^Held-out)", run.error, re.M | re.S):
            self.assertEqual(len(samples), 5)
            self.assertTrue(any(re.search(r"\[\d+ empty lines?\]|\[\d+ blanks\]", s) for s in samples), samples)
            self.assertFalse([s for s in samples if "\n" * 6 in s or " " * 25 in s])
        self.assertGreater((out / "run/log.jsonl").read_text().count('"step"'), 15)

    def test_a_demo_leaves_the_directory_of_one_that_runs_alone(self):
        tiny = [word for word in TINY if word != "--batch-tokens"]
        tiny[tiny.index("128"):tiny.index("128") + 1] = ["--set", "train.batch_tokens=128"]
        demo = ["demo", *tiny, "--data", self.text, "--out", self.directory / "demo", "--seconds"]
        first = start(*demo, 60)
        log = self.directory / "demo/run/log.jsonl"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not log.exists():
            time.sleep(0.005)
        self.refuses(6, f"in use by process {first.pid}", *demo, "1")
        self.assertTrue(log.exists())
        first.kill()
        first.communicate(timeout=60)

    def test_a_demo_that_cannot_begin_leaves_the_earlier_demo(self):
        run = self.directory / "demo/run"
        run.mkdir(parents=True)
        (run / "log.jsonl").write_text("{}\n")
        told = ingot("demo", "--data", self.directory / "nothing.txt", "--out", self.directory / "demo", "--seconds", "1")
        self.assertEqual((told.returncode, (run / "log.jsonl").read_text()), (4, "{}\n"), told.error)

    def test_bad_requests_are_refused(self):
        self.refuses(2, "--preset: found 'nanoo', expected one of demo, golf, golf-small, nano", "train", "--preset", "nanoo", "--data", self.text, "--out", self.run_directory)
        self.refuses(2, "layerss", *self.train("--set", "model.layerss=3"))
        self.refuses(2, "layers", *self.train("--set", 'model.layers="three"'))
        self.refuses(2, "model.activation: found 'geluu', expected one of identity, relu", *self.train("--set", "activation=geluu"))
        without = r"model.loop_extra: found 2 without a loop \(loop_first is {} and loop_last is {}\), expected 0, or a loop_last of at least loop_first"
        self.refuses(2, without.format(0, -1), *self.train("--steps", 1, "--set", "loop_extra=2"))
        self.refuses(2, without.format(1, 0), *self.train("--steps", 1, "--set", "loop_extra=2", "--set", "loop_first=1", "--set", "loop_last=0"))
        self.refuses(2, without.format(0, -1), "info", "--preset", "nano", "--set", "loop_extra=2")
        looping = ["info", "--preset", "nano", "--set", "loop_first=1", "--set", "loop_last=1"]
        self.assertEqual([ingot(*looping, "--set", f"loop_extra={extra}").returncode for extra in (0, 2)], [0, 0])
        learn = "expected the file of a tokenizer; to learn a tokenizer from the data: --set train.tokenizer=bpe, or --set train.tokenizer=char"
        for source, arguments, environment in (("--tokenizer", ["--tokenizer", "bpe"], {}), ("tokenizer", ["--set", "tokenizer=bpe"], {}),
                                               ("INGOT_TOKENIZER", [], dict(INGOT_TOKENIZER="bpe"))):
            self.refuses(4, f"train: {source}: found 'bpe', which is no file, {learn}", *self.train("--steps", 1, *arguments), env=environment)
        wrong = "train.tokenizer: found 'bpr', expected bpe, char or the file of a tokenizer"
        self.refuses(4, wrong, *self.train("--steps", 1, "--set", "train.tokenizer=bpr"))
        demo = ingot("demo", "--data", self.text, "--out", self.directory / "demo", "--set", "tokenizer=bpr")
        self.assertEqual((demo.returncode, wrong in demo.error), (4, True), demo.error)
        self.refuses(2, "seeds: found 'x'", *self.train("--seeds", "1,x"))
        self.refuses(2, "seeds: found 1 twice", *self.train("--seeds", "1,2,1"))
        self.refuses(4, "missing.txt", "train", "--data", self.directory / "missing.txt", "--out", self.run_directory)
        self.assertEqual(ingot("train", "--data", self.file("empty.txt", ""), "--out", self.run_directory).returncode, 3)
        self.assertEqual(ingot("train", "--data", self.file("latin.txt", b"caf\xe9 " * 100), "--out", self.run_directory).returncode, 3)
        self.refuses(4, "nothing", "eval", self.directory / "nothing", "--data", self.text)
        self.refuses(4, "nothing", "generate", self.directory / "nothing", "--prompt", "x")
        self.refuses(2, "--temperature: found '-1', expected a number from 0 to 100", "generate", self.run_directory, "--temperature", "-1")
        self.refuses(2, "--temperature: found 'nan', expected a finite number", "generate", self.run_directory, "--temperature", "nan")


class Messages(InDirectory):
    """Each kind of bad input has its own message."""

    def setUp(self):
        super().setUp()
        self.text = self.file("text.txt", TEXT)

    def test_a_path_that_is_no_model_is_described(self):
        mamba, run, other = (self.directory / n for n in ("mamba", "run", "other"))
        for directory, config in ((mamba, '{"model_type": "mamba", "architectures": ["MambaForCausalLM"]}'), (run, '{"model": {}, "train": {}}'), (other, "{}")):
            directory.mkdir()
            (directory / "config.json").write_text(config)
        unknown = 'mamba/config.json: model_type: found "mamba", expected one of gpt_oss, llama, mistral, qwen2, qwen3, qwen3_moe, gemma3_text'
        empty, junk = self.file("empty.ingot", b""), self.file("junk.ingot", "x\n")
        for reader in (["info"], ["generate", "--prompt", "x"], ["eval", "--data", self.text]):
            with self.subTest(reader=reader):
                self.refuses(7, unknown, *reader, mamba)
                self.refuses(4, "run: found a run without a checkpoint, expected directories like step-00001000", *reader, run)
                self.refuses(4, "other: found no checkpoint, expected", *reader, other)
                self.refuses(3, r"empty.ingot: found an empty file, expected a run, a checkpoint or a published model \(a directory, an archive,", *reader, empty)
                self.refuses(3, "junk.ingot: found a file of 2 bytes of an unknown format", *reader, junk)
        for reader in (["chat", "--model", mamba], ["convert", mamba, "x.ingot"]):  # commands that take no run
            self.refuses(7, unknown, *reader)

    def test_a_path_that_is_no_tokenizer_is_described(self):
        encode = ["tokenizer", "encode", "--file", self.text, "--tokenizer"]
        for content in ("IQ==\nIg== 1\n", "hello 0\n", "\x01\x02 0\n"):
            self.refuses(3, 'bad.tiktoken: line 1: found .*, expected "base64 rank"', *encode, self.file("bad.tiktoken", content))
        self.refuses(3, "text.txt: found text, expected a tokenizer", *encode, self.text)
        self.refuses(3, "a.ingot: found a file of another format, expected a tokenizer", *encode, self.file("a.ingot", b"INGOTGPT\3\0\0\0"))

    def test_a_character_without_a_token_is_an_error_that_names_the_file(self):
        run = self.directory / "run"
        self.assertEqual(ingot("train", *TINY, "--steps", 2, "--data", self.text, "--out", run).returncode, 0)
        texts = self.directory / "texts"
        texts.mkdir()
        (texts / "a.txt").write_text(TEXT)
        (texts / "b.txt").write_text("The \u65e5\n")
        self.refuses(3, 'texts/b.txt: text to encode: byte 4: found the character', "eval", run, "--data", texts, "--split", "all")

    def test_a_list_of_ids_longer_than_the_context_is_named(self):
        run = self.directory / "run"  # of a context of 32
        self.assertEqual(ingot("train", *TINY, "--steps", 2, "--data", self.text, "--out", run).returncode, 0)
        ids = lambda *lengths: self.file("ids.jsonl", "".join(f"{[1] * n}\n" for n in lengths))
        report = json.loads(ingot("eval", run, "--ids", ids(2, 33), "--json").text)
        self.assertEqual(len(report["sequences"][1]["losses"]), 32)
        self.refuses(2, r"ids\.jsonl: found 200 ids in list 2, expected at most 33, one more than the context", "eval", run, "--ids", ids(33, 200))

    def test_options_that_change_nothing_are_refused(self):
        run, ids = self.directory / "run", self.file("ids.jsonl", "[1, 2]")
        self.assertEqual(ingot("train", *TINY, "--steps", 2, "--data", self.text, "--out", run).returncode, 0)
        generate = ["generate", run, "--prompt", "The"]
        for option in (["--reasoning", "high"], ["--system", "x"], ["--developer", "x"], ["--date", "none"], ["--tokenizer", "x"], ["--raw"]):
            self.refuses(2, f"found {option[0]}, which changes nothing with a run of `ingot train`", *generate, *option)
            self.refuses(2, f"found {option[0]}, which changes nothing with --ids", "generate", run, "--ids", ids, *option)
        self.refuses(2, "found --reasoning, which changes nothing with --raw", "generate", "--model", self.directory, "--prompt", "x", "--raw", "--reasoning", "low")
        self.assertEqual(ingot(*generate, "--tokens", 2, env=dict(INGOT_REASONING="high")).returncode, 0)  # said for all commands
        for option in (["--split", "all"], ["--stride", 3], ["--context", 8], ["--flat"], ["--batch-tokens", 64]):
            self.refuses(2, f"found {option[0]}, which changes nothing with --ids", "eval", run, "--ids", ids, *option)
        for option in (["--reasoning", "high"], ["--date", "none"], ["--one-by-one"]):
            self.refuses(2, f"found {option[0]}, which changes nothing with a run of `ingot train`", "serve", run, "--port", 0, *option)
        for command in (generate, ["serve", run, "--port", 0], ["chat", "--model", run]):
            self.refuses(2, "found --split, which changes nothing with one GPU", *command, "--split", "tensor")
        self.refuses(2, "found --preset, which changes nothing with RUN", "info", run, "--preset", "golf")
        char = ["tokenizer", "train", "--data", self.text, "--out", self.directory / "c.json", "--kind", "char"]
        for option in (["--vocab", 300], ["--special", "x"], ["--pattern", "gpt2"], ["--min-count", 3]):
            self.refuses(2, f"found {option[0]}, which changes nothing with --kind char", *char, *option)
        self.refuses(2, "found --rank-timeout, which changes nothing with a run of one process", "train", *TINY, "--steps", 2, "--data", self.text,
                     "--out", run, "--rank-timeout", 3)
        self.refuses(2, "found --seed, which changes nothing with --seeds", "train", *TINY, "--steps", 2, "--data", self.text,
                     "--out", self.directory / "seeds", "--seeds", "1,2", "--seed", 3)
        self.refuses(2, "found --seed, which changes nothing with --held-out-every 0", "data", "pack", "--data", self.text, "--tokenizer",
                     run / "tokenizer.json", "--out", self.directory / "sh", "--held-out-every", 0, "--seed", 3)
        self.refuses(2, "found RUN and keys of a model", "info", run, "--set", "model.layers=3")

    def test_an_empty_word_is_no_name(self):
        run = self.directory / "run"
        self.assertEqual(ingot("train", *TINY, "--steps", 2, "--data", self.text, "--out", run).returncode, 0)
        for command in (["train", *TINY, "--data", self.text, "--out", ""], ["train", "--data", self.text, "--out", "x", "--init-from", ""],
                        ["export", run, "", "--data", self.text], ["tokenizer", "train", "--data", self.text, "--out", ""],
                        ["tokenizer", "train", "--data", "", "--out", "x"], ["eval", run, "--data", self.text, "--ttt", "--ttt-log", ""],
                        ["plot", run, "--out", ""], ["ttt", run, "--file", self.text, "--out", ""], ["eval", "", "--data", self.text]):
            with self.subTest(command=command):
                self.refuses(2, "found an empty word, expected ", *command, cwd=self.directory)
        self.assertEqual(sorted(p.name for p in self.directory.iterdir()), ["run", "text.txt"])
        for option in ("--system", "--developer"):  # an empty text is a text, which is refused for another reason here
            self.refuses(2, f"found {option}, which changes nothing with a run of `ingot train`", "generate", run, "--prompt", "x", option, "")
        self.refuses(2, "--prompt: found an empty prompt, and the tokenizer of .* has no start token", "generate", run, "--prompt", "")
        self.assertEqual(ingot("plot", run, "--title", "", "--out", self.directory / "untitled.svg").returncode, 0)
        config = self.file("c.json", json.dumps({"out": "", "data": str(self.text)}))
        self.refuses(2, "out: found an empty word", "train", *TINY, "--config", config)

    def test_a_result_does_not_replace_an_input_file(self):
        run, log = self.directory / "run", self.directory / "run/log.jsonl"
        self.assertEqual(ingot("train", *TINY, "--steps", 2, "--data", self.text, "--out", run).returncode, 0)
        before, other = log.read_bytes(), self.directory / "link.txt"
        other.symlink_to(self.text)
        for command in (["tokenizer", "train", "--vocab", 300, "--data", self.text, "--out", self.text],
                        ["tokenizer", "train", "--vocab", 300, "--data", other, "--out", self.text],
                        ["ttt", run, "--file", self.text, "--out", self.text],
                        ["eval", run, "--data", self.text, "--ttt", "--ttt-log", self.text],
                        ["eval", run, "--data", self.text, "--ttt", "--ttt-log", run / "config.json"],
                        ["ttt", run, "--file", self.text, "--out", run / "tokenizer.json"],
                        ["plot", run, "--out", log],
                        ["plot", log, "--out", log]):
            with self.subTest(command=command):
                self.refuses(2, ": found a file that is read here, expected another name for the result", *command)
        self.assertEqual((self.text.read_text(), log.read_bytes()), (TEXT, before))

    def test_a_directory_with_other_files_does_not_become_a_run(self):
        for name in ("tokenizer.json", "log.jsonl"):
            out = self.directory / name.split(".")[0]
            out.mkdir()
            (out / name).write_text("mine\n")
            self.refuses(2, f"found {name} in a directory that is no run", "train", *TINY, "--steps", 1, "--data", self.text, "--out", out)
            self.assertEqual([(p.name, p.read_text()) for p in out.iterdir()], [(name, "mine\n")])
        tokenizer = self.directory / "kept/tokenizer.json"
        tokenizer.parent.mkdir()
        self.assertEqual(ingot("tokenizer", "train", "--data", self.text, "--vocab", 300, "--out", tokenizer).returncode, 0)
        run = ingot("train", *TINY, "--steps", 1, "--data", self.text, "--tokenizer", tokenizer, "--out", tokenizer.parent)
        self.assertEqual(run.returncode, 0, run.error)  # its own vocabulary

    def test_the_commands_that_a_run_advises_can_be_typed(self):
        run = self.directory / "a run"
        trained = ingot("train", *TINY, "--steps", 2, "--data", self.text, "--out", run)
        self.assertIn(f"generate '{run}' --prompt \"...\"   or   ", trained.error)
        self.assertIn(f" plot '{run}'\n", trained.error)

    def test_an_empty_prompt_is_a_prompt_and_standard_input_is_not_read(self):
        run = self.directory / "run"
        self.assertEqual(ingot("train", *TINY, "--steps", 2, "--data", self.text, "--out", run).returncode, 0)
        self.refuses(2, "generate: --prompt: found an empty prompt, and the tokenizer of .* has no start token", "generate", run, "--prompt", "", stdin=b"The")
        self.refuses(2, "found --prompt and --file, expected one of them", "generate", run, "--prompt", "", "--file", self.text)
        self.assertRegex(ingot("generate", run, "--tokens", 2, stdin=b"The").text, r"\AThe")

    def test_a_batch_size_that_windows_do_not_fill_is_refused_by_the_options_name(self):
        words = [w if w != "128" else "1" for w in TINY]
        self.refuses(2, "--batch-tokens: found 1, expected a multiple of model.context, 32", "train", *words, "--data", self.text, "--out", self.directory / "r")
        tiny = [w for w in TINY if w not in ("--batch-tokens", "128")]
        for name, given, more in (("INGOT_BATCH_TOKENS", dict(INGOT_BATCH_TOKENS="1"), []), ("train.batch_tokens", {}, ["--set", "batch_tokens=1"]),
                                  ("train.batch_tokens", dict(INGOT_BATCH_TOKENS="128"), ["--set", "batch_tokens=1"])):
            self.refuses(2, f"ingot train: {name}: found 1, expected a multiple of model.context, 32", "train", *tiny, *more, "--data", self.text, "--out", self.directory / "r", env=given)

    def test_the_place_of_a_vocabulary_is_checked_before_the_work(self):
        for status, out in ((4, "missing/tok.json"), (5, ".")):
            run = ingot("tokenizer", "train", "--data", self.text, "--vocab", 300, "--out", self.directory / out)
            self.assertEqual(run.returncode, status)
            self.assertEqual(run.error.count("\n"), 1, run.error)  # nothing was read
        self.refuses(2, "--vocab: found 257, expected at least 258 for the 256 bytes and 2 special tokens", "tokenizer", "train", "--data", self.text, "--vocab", 257,
                     "--special", "<a>", "--special", "<b>", "--out", self.directory / "tok.json")
        self.assertNotEqual(ingot("tokenizer", "train", "--data", self.file("empty", ""), "--out", self.directory / "tok.json").returncode, 0)
        self.assertEqual(list(self.directory.glob("tok*")), [])


class Configuration(InDirectory):
    """Keys of the sections may stand alone, as options do."""
    BASE = ["train", "--preset", "nano", "--threads", 1]

    def setUp(self):
        super().setUp()
        self.out = self.directory / "run"
        self.base = [*self.BASE, "--data", self.file("text.txt", TEXT), "--out", self.out]
        self.small = dict(dim=16, heads=2, kv_heads=2, head_dim=8, mlp_hidden=32, layers=2, context=32, batch_tokens=128)

    def trained_with(self, *arguments, env=None, **keys):
        shutil.rmtree(self.out, ignore_errors=True)
        run = ingot(*self.base, *arguments, "--config", self.file("c.json", json.dumps(self.small | keys)), env=env)
        self.assertEqual(run.returncode, 0, run.error)
        return json.loads((self.out / "config.json").read_text())

    def test_a_vocabulary_that_the_tokenizer_overrides_is_a_warning(self):
        train = lambda *words: ingot("train", *TINY, "--steps", 0, "--data", self.file("text.txt", TEXT), "--out", self.directory / "run", *words)
        vocab = json.loads(ingot("info", self.directory / "run", "--json").text)["config"]["vocab"] if train().returncode == 0 else None
        self.assertNotIn("model.vocab", train("--set", f"vocab={vocab}").error)
        self.assertRegex(train("--set", "vocab=7").error, f"warning: model.vocab: found 7, which changes nothing here: the vocabulary is that of the [a-z]+ tokenizer, {vocab} tokens\n")

    def test_keys_without_a_section_are_the_keys_of_their_section(self):
        config = self.trained_with(steps=3, matrix_lr=0.02, decay="linear", optimizer=dict(clip=2.0), train=dict(schedule=dict(min_lr=0.2)), model=dict(z_loss=0.5))
        self.assertEqual((config["model"]["layers"], config["model"]["z_loss"], config["train"]["steps"], config["train"]["batch_tokens"]), (2, 0.5, 3, 128))
        self.assertEqual([config["train"]["optimizer"][k] for k in ("matrix_lr", "clip", "embed_lr")], [0.02, 2.0, 0.001])
        self.assertEqual([config["train"]["schedule"][k] for k in ("decay", "min_lr", "warmup_steps")], ["linear", 0.2, 100])
        self.assertEqual(self.trained_with("--set", "steps=4", steps=3)["train"]["steps"], 4)
        self.assertEqual(self.trained_with("--steps", 5, "--set", "steps=4", steps=3, env=dict(INGOT_STEPS="2"))["train"]["steps"], 5)
        self.assertEqual(self.trained_with(steps=3, env=dict(INGOT_STEPS="2"))["train"]["steps"], 2)
        shutil.rmtree(self.out)
        file = self.file("c.json", json.dumps(self.small | dict(preset="nano", steps=2, data=str(self.directory / "text.txt"), out=str(self.out), threads=1)))
        self.assertEqual(ingot("train", "--config", file).returncode, 0)

    def test_a_run_s_configuration_is_a_valid_configuration_file(self):
        before = self.trained_with(steps=2)
        other = self.directory / "other"
        self.assertEqual(ingot(*self.base[:-1], other, "--config", self.out / "config.json").returncode, 0)
        self.assertEqual(json.loads((other / "config.json").read_text()), before)

    def test_unknown_and_doubled_keys_are_refused_with_the_nearest(self):
        for message, keys in ((r"found the unknown key 'stpes' \(did you mean 'steps'\?\), expected one of model, train, .*data", dict(stpes=3)),
                              (r"found the unknown key 'max_iters' \(did you mean 'steps'\?\)", dict(max_iters=3)),
                              (r"found the unknown key 'optimiser' \(did you mean 'optimizer'\?\)", dict(optimiser={})),
                              (r"unknown key \"matrix_rl\" \(did you mean \"matrix_lr\"\?\)", dict(optimizer=dict(matrix_rl=1))),
                              (r"found the unknown key 'xyzzy', expected", dict(xyzzy=3)),
                              ("found train.steps twice", dict(steps=3, train=dict(steps=3))),
                              ("found train.optimizer.matrix_lr twice", dict(matrix_lr=3, optimizer=dict(matrix_lr=3))),
                              ("steps", dict(steps="many"))):
            with self.subTest(keys=keys):
                self.refuses(2, message, *self.base, "--config", self.file("c.json", json.dumps(keys)))
        self.refuses(2, r"--set: found the unknown key 'layer' \(did you mean 'layers'\?\)", *self.base, "--set", "layer=3")
        self.refuses(2, r"unknown option '--stpes' \(did you mean --steps\?\)", *self.base, "--stpes", 3)
        self.refuses(2, r"unknown option '--layers=3' \(did you mean --set model.layers=...\?\)", *self.base, "--layers=3")
        self.refuses(2, r"unknown option '--jsn' \(did you mean --json\?\)", "doctor", "--jsn")

    def test_a_run_has_one_length(self):
        self.refuses(2, "--seconds: found 0, expected more than 0", *self.base, "--seconds", 0)
        self.refuses(2, "--seconds: found -1, expected more than 0", *self.base, "--seconds", -1)
        self.refuses(2, "INGOT_SECONDS: found 0, expected more than 0", *self.base, env=dict(INGOT_SECONDS="0"))
        self.refuses(2, "--seconds: found 0.5, expected more than train.reserve_seconds, 1", *self.base, "--seconds", 0.5)
        self.refuses(2, "found --steps and --seconds, expected one of them", *self.base, "--seconds", 5, "--steps", 5)
        self.assertEqual(self.trained_with("--steps", 3, seconds=600)["train"]["seconds"], 0)


if __name__ == "__main__":
    unittest.main(argv=sys.argv)
