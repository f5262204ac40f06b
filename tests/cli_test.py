"""Runs the ingot binary as a user would: output, one-line errors, exit statuses, the precedence of option sources.

    python3 tests/cli_test.py BINARY [unittest options]
"""
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

BINARY = os.path.abspath(sys.argv.pop(1))
ROOT = pathlib.Path(__file__).resolve().parent.parent


def ingot(*arguments, stdin=b"", env=None, cwd=None):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("INGOT_")} | (env or {})
    run = subprocess.run([BINARY, *map(str, arguments)], input=stdin, capture_output=True, env=environment, cwd=cwd, timeout=120)
    run.text, run.error = run.stdout.decode(), run.stderr.decode(errors="surrogateescape")  # an error may name any file
    return run


def start(*arguments, **more):
    """A process that a signal will reach, also where these tests run as a job in the background."""
    default = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen([BINARY, *map(str, arguments)], stderr=subprocess.PIPE, preexec_fn=default, **more)


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
        """One line on stderr that begins with the command, nothing on stdout, the documented status."""
        run = ingot(*arguments, **more)
        self.assertEqual((run.returncode, run.text), (status, ""), run.error)
        self.assertRegex(run.error, r"\Aingot( [a-z]+)*: [^\n]+\n\Z")
        self.assertRegex(run.error, message)


class Frame(InDirectory):
    def test_version_names_the_commit(self):
        self.assertRegex(ingot("--version").text, r"\Aingot \d+\.\d+\.\d+ \((unknown|[0-9a-f]{12})\)\n\Z")

    def test_the_log_level_debug_says_what_runs_on_what(self):
        self.assertIn(" CPUs", ingot("doctor", env={"INGOT_LOG": "debug"}).error.splitlines()[0])
        self.assertNotIn(" CPUs", ingot("doctor").error)
        self.refuses(2, "INGOT_LOG: found 'all'", "doctor", env={"INGOT_LOG": "all"})

    def test_every_subcommand_has_help_with_examples(self):
        seen = []

        def visit(path):
            run = ingot(*path, "--help")
            self.assertEqual((run.returncode, run.error), (0, ""), path)
            self.assertIn("Examples:\n  ", run.text, path)
            seen.append(" ".join(path))
            block = re.search(r"^Subcommands:\n((?:  .*\n)+)", run.text, re.M)
            for name in re.findall(r"^  (\S+)", block[1], re.M) if block else []:
                visit([*path, name])

        visit([])
        self.assertIn("doctor", seen)

    def test_bad_command_lines_are_refused_with_status_2(self):
        for message, *arguments in (
            ["found no subcommand, expected one of .*doctor"],
            ["found the unknown subcommand 'doctro', expected one of", "doctro"],
            ["ingot doctor: found the unknown option '--j', expected those of ingot doctor --help", "doctor", "--j"],
            ["ingot doctor: found the unknown argument 'all', expected those of", "doctor", "all"],
            [r"ingot doctor: --threads: found no value, expected one N \(threads to use", "doctor", "--threads"],
            [r"--steps: found no value, expected one N \(length of the run", "train", "--preset", "nano", "--steps"],
            ["--steps: found no value, expected one N", "train", "--steps="],
            ["--data: found no value, expected one PATH", "train", "--data"],
            ["--config: found no value, expected one FILE", "train", "--config"],
            ["--set: found no value, expected one A.B=C", "train", "--set", "model.dim=16", "--set"],
            ["--steps: found the option '--data', expected one N", "train", "--steps", "--data", "x"],
            ["--out: found the option '--config', expected one FILE", "plot", "--out", "--config"],
            ["found the unknown option '--steps'", "train", "--", "--steps"],
            ["--json: found '3', expected true or false", "doctor", "--json=3"],
            ["--threads: found 'many', expected an integer", "doctor", "--threads", "many"],
            ["found number 0, expected an integer from 1 to 1024", "doctor", "--threads", "0"],
            ["found number -1, expected an integer from 1 to 1024", "doctor", "--threads", "-1"],
            ["found number 1000000000, expected", "doctor", "--threads", "1000000000"],
            ["--threads: found 2 values, expected one N", "doctor", "--threads", "1", "--threads", "2"],
            ["--set: found the unknown key 'a', expected one of json, threads", "doctor", "--set", "a=1"],
            ["--set: found 'threads', expected KEY=VALUE", "doctor", "--set", "threads"],
            ["expected names joined by dots", "doctor", "--set", "a..b=1"],
            ["--set: found an argument that is not UTF-8 at byte 8, expected text", "doctor", "--set", os.fsdecode(b"threads=\xff")],
            ["'threads' is a number 1, expected an object", "doctor", "--set", "threads=1", "--set", "threads.x=1"],
            ['threads: found string "one"', "doctor", "--set", "threads=one"],
            ["RUN is missing", "plot"],
        ):
            with self.subTest(arguments=arguments):
                self.refuses(2, message, *arguments)

    def test_a_flag_can_be_turned_off(self):
        is_json = lambda *a, **e: ingot("doctor", *a, env=e).text.startswith("{")
        self.assertTrue(is_json("--json") and is_json(INGOT_JSON="1"))
        self.assertFalse(is_json("--json=false") or is_json("--json=false", INGOT_JSON="1"))

    def test_flag_beats_set_beats_environment_beats_file(self):
        config = self.file("c.json", '{"threads": 3}')
        threads = lambda *a, **e: json.loads(ingot("doctor", "--json", *a, env=e).text)["cpu"]["threads"]
        self.assertEqual(threads("--config", config), 3)
        self.assertEqual(threads("--config", config, INGOT_THREADS="4"), 4)
        self.assertEqual(threads("--config", config, "--set", "threads=5", INGOT_THREADS="4"), 5)
        self.assertEqual(threads("--config", config, "--set", "threads=5", "--threads", "6", INGOT_THREADS="4"), 6)
        self.assertEqual(threads(INGOT_CONFIG=str(config)), 3)

    def test_bad_configurations_are_refused(self):
        for status, message, content in (
            (2, r"c\.json: found the unknown key 'thread' .did you mean 'threads'.., expected one of json, threads", '{"thread": 3}'),
            (2, r"c\.json: found array, expected an object", "[1]"),
            (2, r'threads: found string "3", expected an integer', '{"threads": "3"}'),
            (3, r"c\.json: byte 12", '{"threads": '),
            (3, r"c\.json: byte .*duplicate key", '{"threads": 3, "threads": 4}'),
        ):
            with self.subTest(content=content):
                self.refuses(status, message, "doctor", "--config", self.file("c.json", content))
        self.refuses(4, "missing.json", "doctor", "--config", self.directory / "missing.json")
        self.refuses(2, "INGOT_THREADS: found 'x', expected an integer", "doctor", env={"INGOT_THREADS": "x"})

    def test_a_name_cannot_write_control_codes_to_the_terminal(self):
        self.refuses(4, r"a \[31mb c: cannot open", "plot", "a\x1b[31mb\nc")

    def test_commands_for_gpt_oss_say_whether_the_path_or_the_model_is_missing(self):
        nothing, text = self.directory / "nothing", self.file("text", "x")
        for before, after in (["chat", "--model"], []), (["eval", "accuracy", "--ids", text, "--model"], []), (["convert"], ["x.ingot"]):
            with self.subTest(command=before):
                self.refuses(4, "nothing: found no such file", *before, nothing, *after)
                self.refuses(7, "text: found no GPT-OSS checkpoint", *before, text, *after)

    def test_a_prompt_of_no_length_is_refused_before_a_gpu_is_sought(self):
        for bad in ("0", "-1", "many", "1k"):
            self.refuses(2, f"LENGTH: found '{bad}', expected a number of tokens from 1 on", "bench", "prompt", "--", bad)

    def test_a_filter_that_finds_no_benchmark_is_one_line(self):
        self.refuses(2, "found no benchmark that contains 'nothing'", "bench", "nothing")

    def test_a_reader_that_leaves_ends_the_program_quietly(self):
        read, write = os.pipe()
        os.close(read)
        run = subprocess.run([BINARY, "doctor"], stdout=write, stderr=subprocess.PIPE)
        os.close(write)
        self.assertEqual((run.returncode, run.stderr), (0, b""))

    def test_a_full_disk_under_stdout_is_an_error(self):
        with open("/dev/full", "wb") as full:
            run = subprocess.run([BINARY, "doctor"], stdout=full, stderr=subprocess.PIPE)
        self.assertEqual(run.returncode, 5)
        self.assertEqual(run.stderr, b"ingot doctor: standard output: No space left on device\n")

    def test_the_documented_statuses_are_those_of_the_source(self):
        source = (ROOT / "src/ingot/core/check.cpp").read_text()
        name = dict(re.findall(r'case ErrorCode::(\w+): return "([^"]+)"', source))
        in_source = {name[code]: int(status) for code, status in re.findall(r"case ErrorCode::(\w+): return (\d+)", source)}
        documented = {what: int(s) for s, what in re.findall(r"^\| (\d+) \| ([a-z/ ]+):", (ROOT / "docs/cli.md").read_text(), re.M)}
        self.assertEqual(documented, in_source)


class Doctor(InDirectory):
    def test_json_is_one_object_and_the_text_says_the_same(self):
        report = json.loads(ingot("doctor", "--json").text)
        self.assertGreater(report["memory"]["total_bytes"], 0)
        self.assertEqual(set(report["found"]) & set(report["missing"]), set())
        text = ingot("doctor").text
        self.assertIn(report["cpu"]["model"], text)
        for name in report["missing"]:
            self.assertIn(name, text)


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

    def test_what_came_after_the_checkpoint_that_a_run_went_back_to_is_not_drawn(self):
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
        self.refuses(3, "found no record with the numbers 'step' and 'loss'", "plot", self.file("y.jsonl", '{"a": 1}\n'))


TEXT = "".join(f"The {i}th line says that {i * i % 97} times {i % 13} is äöü {i * i % 97 * (i % 13)}.\n" for i in range(900))


class Tokenizer(InDirectory):
    def setUp(self):
        super().setUp()
        self.text = self.file("text.txt", TEXT)
        self.tokenizer = self.directory / "tok.json"
        run = ingot("tokenizer", "train", "--data", self.text, "--vocab", 400, "--out", self.tokenizer)
        self.assertEqual((run.returncode, run.text), (0, ""), run.error)

    def test_text_to_ids_and_back_is_the_same_text(self):
        ids = ingot("tokenizer", "encode", "--tokenizer", self.tokenizer, stdin=TEXT.encode())
        self.assertRegex(ids.text, r"\A(\d+ )*\d+\n\Z")
        self.assertLess(len(ids.text.split()), len(TEXT) / 2)
        back = ingot("tokenizer", "decode", "--tokenizer", self.tokenizer, stdin=ids.stdout)
        self.assertEqual(back.text, TEXT)
        as_json = "[" + ", ".join(ids.text.split()) + "]"
        self.assertEqual(ingot("tokenizer", "decode", "--tokenizer", self.tokenizer, stdin=as_json.encode()).text, TEXT)
        from_file = ingot("tokenizer", "encode", "--tokenizer", self.tokenizer, "--file", self.text, "--bos")
        self.assertEqual(from_file.text.split()[1:], ids.text.split())

    def test_empty_input_gives_no_ids(self):
        self.assertEqual(ingot("tokenizer", "encode", "--tokenizer", self.tokenizer).text, "\n")

    def test_bad_input_is_refused(self):
        encode, decode = ["tokenizer", "encode", "--tokenizer", self.tokenizer], ["tokenizer", "decode", "--tokenizer", self.tokenizer]
        self.refuses(3, "standard input: text to encode: byte 2 ", *encode, stdin=b"ab\xff")
        self.refuses(3, "bad.txt: text to encode: byte 1 ", *encode, "--file", self.file("bad.txt", b"a\xff"))
        self.refuses(3, "standard input: byte 2: found 'x7', expected a token id", *decode, stdin=b"1 x7 3")
        self.refuses(3, "found '99999999999'", *decode, stdin=b"99999999999")
        self.assertNotEqual(ingot(*decode, stdin=b"400").returncode, 0)
        self.refuses(4, "none.json", "tokenizer", "encode", "--tokenizer", self.directory / "none.json")
        self.refuses(3, "text.txt", "tokenizer", "encode", "--tokenizer", self.text)
        self.refuses(2, "--tokenizer is missing", "tokenizer", "encode")
        self.refuses(2, "pattern: found string .*expected one of gpt2", "tokenizer", "train", "--data", self.text, "--pattern", "x")
        self.refuses(2, "vocab: found number 100, expected an integer from 257", "tokenizer", "train", "--data", self.text, "--vocab", "100")
        self.refuses(4, "no/where", "tokenizer", "train", "--data", self.directory / "no/where")


class Data(InDirectory):
    def test_packed_shards_say_what_they_hold(self):
        texts = self.directory / "texts"
        texts.mkdir()
        for i in range(40):
            (texts / f"{i}.txt").write_text(TEXT[i * 100:i * 100 + 700])
        tokenizer = self.directory / "tok.json"
        self.assertEqual(ingot("tokenizer", "train", "--data", texts, "--vocab", 300, "--out", tokenizer).returncode, 0)
        run = ingot("data", "pack", "--data", texts, "--tokenizer", tokenizer, "--out", self.directory / "shards", "--shard-tokens", 5000)
        self.assertEqual(run.returncode, 0, run.error)
        report = json.loads(ingot("data", "info", self.directory / "shards", "--json").text)
        self.assertGreater(len(report["train"]), 1)
        self.assertEqual(len(report["held_out"]), 1)
        self.refuses(2, "found shards in it", "data", "pack", "--data", texts, "--tokenizer", tokenizer, "--out", self.directory / "shards")
        self.assertEqual(json.loads(ingot("data", "info", texts, "--json").text)["documents"], 40)
        shard = pathlib.Path(report["train"][0]["path"])
        shard.write_bytes(shard.read_bytes()[:-1])
        self.refuses(3, re.escape(str(shard)), "data", "info", shard)


class Runs(InDirectory):
    TINY = ["--preset", "nano", "--set", "model.dim=16", "--set", "model.heads=2", "--set", "model.kv_heads=2", "--set", "model.head_dim=8",
            "--set", "model.mlp_hidden=32", "--set", "model.layers=2", "--set", "model.context=32", "--batch-tokens", "128", "--threads", "1"]

    def setUp(self):
        super().setUp()
        self.text, self.run_directory = self.file("text.txt", TEXT), self.directory / "run"

    def train(self, *arguments, out=None):
        return ["train", *self.TINY, "--data", self.text, "--out", out or self.run_directory, *arguments]

    def test_a_run_is_trained_scored_sampled_described_and_drawn(self):
        run = ingot(*self.train("--steps", 30))
        self.assertEqual((run.returncode, run.text), (0, ""), run.error)
        score = json.loads(ingot("eval", self.run_directory, "--data", self.text, "--json").text)
        self.assertEqual(score["step"], 30)
        self.assertIn(f"loss {score['loss']:.4f}", run.error)  # what training printed of the same held-out part
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
        self.refuses(7, "run: found a run of `ingot train`, expected a GPT-OSS checkpoint; `ingot generate`", "chat", "--model", self.run_directory)
        self.refuses(7, "--gpus: found 2 for a model of the kind gpt, ", *generate, "--gpus", "2")
        self.assertEqual(ingot(*generate[:2], "--tokens", 20, "--temperature", "0.8", stdin=b"The ").text, first.text)
        described = json.loads(ingot("info", self.run_directory, "--json").text)
        self.assertEqual((described["step"], described["parameter_hash"]), (30, score["parameter_hash"]))
        svg = self.directory / "x.svg"
        self.assertEqual(ingot("plot", self.run_directory, "--out", svg).returncode, 0)
        self.assertIn("held-out loss", svg.read_text())

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
        self.assertRegex(error, r"stopped at step \d+ of 400, saved in \S+; to resume: ingot train ")
        resumed = ingot(*command)
        self.assertEqual(resumed.returncode, 0, resumed.error)
        hashes = [json.loads(ingot("info", d, "--json").text)["parameter_hash"] for d in (whole, self.run_directory)]
        self.assertEqual(*hashes)

    def test_a_damaged_checkpoint_is_passed_over_or_gone_behind_when_asked(self):
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

    def test_a_run_that_went_back_is_resumed_without_going_back_again(self):
        self.assertEqual(ingot(*self.train("--steps", 20, "--checkpoint-every", 10)).returncode, 0)
        process = start(*self.train("--steps", 1000000, "--from", "step-10"))
        while not (self.run_directory / "aside-step-00000020").exists():
            self.assertIsNone(process.poll())
            time.sleep(0.002)
        time.sleep(0.3)
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
        self.refuses(2, "init_from: .*: found the tensor .*expected", *tune, "--set", "mlp_hidden=64")
        self.refuses(4, "nothing: found no such", *tune[:6], self.directory / "nothing")

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

    def test_a_log_that_was_cut_is_whole_again_when_the_run_goes_on(self):
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
        tiny = [word for word in self.TINY if word != "--batch-tokens"]
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
        tiny = [word for word in self.TINY if word != "--batch-tokens"]
        tiny[tiny.index("128"):tiny.index("128") + 1] = ["--set", "train.batch_tokens=128"]
        demo = ["demo", *tiny, "--data", self.text, "--out", self.directory / "demo", "--seconds"]
        first = subprocess.Popen([BINARY, *map(str, demo), "60"], stderr=subprocess.PIPE, text=True)
        log = self.directory / "demo/run/log.jsonl"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not log.exists():
            time.sleep(0.005)
        self.refuses(6, f"in use by process {first.pid}", *demo, "1")
        self.assertTrue(log.exists())
        first.kill()
        first.communicate(timeout=60)

    def test_bad_requests_are_refused(self):
        self.refuses(2, "preset: found 'nanoo', expected one of", "train", "--preset", "nanoo", "--data", self.text, "--out", self.run_directory)
        self.refuses(2, "layerss", *self.train("--set", "model.layerss=3"))
        self.refuses(2, "layers", *self.train("--set", 'model.layers="three"'))
        self.refuses(2, "seeds: found 'x'", *self.train("--seeds", "1,x"))
        self.refuses(2, "seeds: found 1 twice", *self.train("--seeds", "1,2,1"))
        self.refuses(4, "missing.txt", "train", "--data", self.directory / "missing.txt", "--out", self.run_directory)
        self.assertEqual(ingot("train", "--data", self.file("empty.txt", ""), "--out", self.run_directory).returncode, 3)
        self.assertEqual(ingot("train", "--data", self.file("latin.txt", b"caf\xe9 " * 100), "--out", self.run_directory).returncode, 3)
        self.refuses(4, "nothing", "eval", self.directory / "nothing", "--data", self.text)
        self.refuses(4, "nothing", "generate", self.directory / "nothing", "--prompt", "x")
        self.refuses(2, "temperature: found number -1", "generate", self.run_directory, "--temperature", "-1")
        self.refuses(2, "--temperature: found 'nan', expected a finite number", "generate", self.run_directory, "--temperature", "nan")


class Messages(InDirectory):
    """Bad input is called what it is."""

    def setUp(self):
        super().setUp()
        self.text = self.file("text.txt", TEXT)

    def test_what_stands_where_a_model_is_expected(self):
        llama, run, other = (self.directory / n for n in ("llama", "run", "other"))
        for directory, config in ((llama, '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'), (run, '{"model": {}, "train": {}}'), (other, "{}")):
            directory.mkdir()
            (directory / "config.json").write_text(config)
        empty, junk = self.file("empty.ingot", b""), self.file("junk.ingot", "x\n")
        for reader in (["info"], ["generate", "--prompt", "x"], ["eval", "--data", self.text]):
            with self.subTest(reader=reader):
                self.refuses(7, "llama: found a model of the architecture 'llama', expected one of GPT-OSS or a run of", *reader, llama)
                self.refuses(4, "run: found a run without a checkpoint, expected directories like step-00001000", *reader, run)
                self.refuses(4, "other: found no checkpoint, expected", *reader, other)
                self.refuses(3, "empty.ingot: found an empty file, expected a run or a checkpoint, an archive, a GGUF or", *reader, empty)
                self.refuses(3, "junk.ingot: found a file of 2 bytes that begins as none of ours", *reader, junk)

    def test_what_stands_where_a_tokenizer_is_expected(self):
        encode = ["tokenizer", "encode", "--file", self.text, "--tokenizer"]
        for content in ("IQ==\nIg== 1\n", "hello 0\n", "\x01\x02 0\n"):
            self.refuses(3, 'bad.tiktoken: line 1: found .*, expected "base64 rank"', *encode, self.file("bad.tiktoken", content))
        self.refuses(3, "text.txt: found text, expected a tokenizer", *encode, self.text)

    def test_a_character_without_a_token_is_told_with_its_file(self):
        run = self.directory / "run"
        self.assertEqual(ingot("train", *Runs.TINY, "--steps", 2, "--data", self.text, "--out", run).returncode, 0)
        texts = self.directory / "texts"
        texts.mkdir()
        (texts / "a.txt").write_text(TEXT)
        (texts / "b.txt").write_text("The \u65e5\n")
        self.refuses(3, 'texts/b.txt: text to encode: byte 4: found the character', "eval", run, "--data", texts, "--split", "all")

    def test_options_that_change_nothing_are_refused(self):
        run, ids = self.directory / "run", self.file("ids.jsonl", "[1, 2]")
        self.assertEqual(ingot("train", *Runs.TINY, "--steps", 2, "--data", self.text, "--out", run).returncode, 0)
        generate = ["generate", run, "--prompt", "The"]
        for option in (["--reasoning", "high"], ["--system", "x"], ["--developer", "x"], ["--date", "none"], ["--tokenizer", "x"], ["--raw"]):
            self.refuses(2, f"found {option[0]}, which changes nothing with a run of `ingot train`", *generate, *option)
            self.refuses(2, f"found {option[0]}, which changes nothing with --ids", "generate", run, "--ids", ids, *option)
        self.refuses(2, "found --reasoning, which changes nothing with --raw", "generate", "--model", self.directory, "--prompt", "x", "--raw", "--reasoning", "low")
        self.assertEqual(ingot(*generate, "--tokens", 2, env=dict(INGOT_REASONING="high")).returncode, 0)  # said for all commands
        for option in (["--split", "all"], ["--stride", 3], ["--context", 8], ["--flat"], ["--batch-tokens", 64]):
            self.refuses(2, f"found {option[0]}, which changes nothing with --ids", "eval", run, "--ids", ids, *option)
        self.refuses(2, "found --preset, which changes nothing with RUN", "info", run, "--preset", "golf")
        self.refuses(2, "found RUN and keys of a model", "info", run, "--set", "model.layers=3")

    def test_a_batch_that_windows_do_not_fill_is_told_by_the_option(self):
        words = [w if w != "128" else "1" for w in Runs.TINY]
        self.refuses(2, "train.batch_tokens: found 1, expected a multiple of model.context, 32", "train", *words, "--data", self.text, "--out", self.directory / "r")

    def test_where_a_vocabulary_goes_is_checked_before_the_work(self):
        for status, out in ((4, "missing/tok.json"), (5, ".")):
            run = ingot("tokenizer", "train", "--data", self.text, "--vocab", 300, "--out", self.directory / out)
            self.assertEqual(run.returncode, status)
            self.assertEqual(run.error.count("\n"), 1, run.error)  # nothing was read
        self.assertNotEqual(ingot("tokenizer", "train", "--data", self.file("empty", ""), "--out", self.directory / "tok.json").returncode, 0)
        self.assertEqual(list(self.directory.glob("tok*")), [])


class TinyGptOss(InDirectory):
    """A random checkpoint of two small layers, in the published form: MXFP4 experts, everything else bf16, two shards."""
    VOCAB, HIDDEN, HEADS, KV, DIM, EXPERTS, INNER = 37, 32, 4, 2, 8, 3, 64
    DEFINITION_IDS = [(11 * t * t + 5 * t + 3) % 37 for t in range(200)]  # more than the window

    def setUp(self):
        super().setUp()
        self.model = self.directory / "gpt-oss-tiny"
        self.model.mkdir()
        self.config = dict(
            model_type="gpt_oss", vocab_size=self.VOCAB, hidden_size=self.HIDDEN, intermediate_size=self.INNER, num_hidden_layers=2,
            num_attention_heads=self.HEADS, num_key_value_heads=self.KV, head_dim=self.DIM, num_local_experts=self.EXPERTS,
            num_experts_per_tok=2, sliding_window=128, max_position_embeddings=131072, rope_theta=150000, eos_token_id=2,
            rope_scaling=dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                              original_max_position_embeddings=4096))
        (self.model / "config.json").write_text(json.dumps(self.config))
        tensors, noise = {}, random.Random(1)
        C, E, I, q, kv = self.HIDDEN, self.EXPERTS, self.INNER, self.HEADS * self.DIM, self.KV * self.DIM

        def add(name, *shape):
            words = [struct.unpack("<I", struct.pack("<f", noise.gauss(0, 0.3)))[0] >> 16 for _ in range(math.prod(shape))]
            tensors[name] = ("BF16", shape, struct.pack(f"<{len(words)}H", *words))

        def add_experts(name, rows, cols):
            tensors[name + "_blocks"] = ("U8", (E, rows, cols // 32, 16), noise.randbytes(E * rows * cols // 2))
            tensors[name + "_scales"] = ("U8", (E, rows, cols // 32), bytes(noise.choice(range(121, 125)) for _ in range(E * rows * cols // 32)))

        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            add(name, self.VOCAB, C)
        add("model.norm.weight", C)
        for layer in range(2):
            n = f"model.layers.{layer}."
            for name in ("input_layernorm", "post_attention_layernorm"):
                add(n + name + ".weight", C)
            for name, rows, cols in (("q", q, C), ("k", kv, C), ("v", kv, C), ("o", C, q)):
                add(f"{n}self_attn.{name}_proj.weight", rows, cols)
                add(f"{n}self_attn.{name}_proj.bias", rows)
            add(n + "self_attn.sinks", self.HEADS)
            add(n + "mlp.router.weight", E, C)
            add(n + "mlp.router.bias", E)
            add_experts(n + "mlp.experts.gate_up_proj", 2 * I, C)
            add_experts(n + "mlp.experts.down_proj", C, I)
            add(n + "mlp.experts.gate_up_proj_bias", E, 2 * I)
            add(n + "mlp.experts.down_proj_bias", E, C)
        shards = [dict(list(tensors.items())[0::2]), dict(list(tensors.items())[1::2])]
        index = {}
        for i, shard in enumerate(shards):
            file = f"model-0000{i}-of-00001.safetensors"
            header, at = {}, 0
            for name, (dtype, shape, data) in shard.items():
                header[name] = dict(dtype=dtype, shape=shape, data_offsets=[at, at + len(data)])
                at += len(data)
            text = json.dumps(header).encode()
            (self.model / file).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(d for _, _, d in shard.values()))
            index |= dict.fromkeys(shard, file)
        self.index = dict(metadata=dict(total_size=sum(len(d) for _, _, d in tensors.values())), weight_map=index)
        (self.model / "model.safetensors.index.json").write_text(json.dumps(self.index))


class Signals(TinyGptOss):
    """One way to end for every command: status 130, one line, nothing left over."""

    def stops(self, signals, until, *arguments, said=""):
        process = start(*arguments, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not until(process):
            self.assertLess(time.monotonic(), deadline)
            self.assertIsNone(process.poll(), "it ended before the signal")
            time.sleep(0.002)
        for number in signals:
            process.send_signal(number)
            time.sleep(0.02)  # two of them that wait are one
        error = process.communicate(timeout=60)[1]
        self.assertEqual(process.returncode, 130, error)
        self.assertRegex(error.decode(), rf"\A{said}ingot {arguments[0]}[a-z ]*: stopped by a signal\n\Z")

    @staticmethod
    def ticks(process):
        return sum(map(int, pathlib.Path(f"/proc/{process.pid}/stat").read_text().rsplit(")")[1].split()[11:13]))

    def busy(self, process, ready=lambda: True):
        """It has computed for a while since it was ready, which is not before it catches signals (a sanitizer starts slowly)."""
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", pathlib.Path(f"/proc/{process.pid}/status").read_text(), re.M)
        if process.pid not in self.began and caught and int(caught[1], 16) >> (signal.SIGINT - 1) & 1 and ready():
            self.began[process.pid] = self.ticks(process)
        return process.pid in self.began and self.ticks(process) >= self.began[process.pid] + 5

    def setUp(self):
        super().setUp()
        self.began = {}

    def test_convert_leaves_no_file(self):
        config = self.config | dict(vocab_size=200000, hidden_size=1024)
        model = self.directory / "large"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config))
        shapes, at, header = {}, 0, {}
        C, E, I, q, kv = 1024, self.EXPERTS, self.INNER, self.HEADS * self.DIM, self.KV * self.DIM
        shapes["model.embed_tokens.weight"] = shapes["lm_head.weight"] = (200000, C)
        shapes["model.norm.weight"] = (C,)
        for layer in range(2):
            n = f"model.layers.{layer}."
            for name in ("input_layernorm", "post_attention_layernorm"):
                shapes[n + name + ".weight"] = (C,)
            for name, rows, cols in (("q", q, C), ("k", kv, C), ("v", kv, C), ("o", C, q)):
                shapes[f"{n}self_attn.{name}_proj.weight"], shapes[f"{n}self_attn.{name}_proj.bias"] = (rows, cols), (rows,)
            shapes[n + "self_attn.sinks"] = (self.HEADS,)
            shapes[n + "mlp.router.weight"], shapes[n + "mlp.router.bias"] = (E, C), (E,)
            shapes[n + "mlp.experts.gate_up_proj"], shapes[n + "mlp.experts.gate_up_proj_bias"] = (E, C, 2 * I), (E, 2 * I)
            shapes[n + "mlp.experts.down_proj"], shapes[n + "mlp.experts.down_proj_bias"] = (E, I, C), (E, C)
        for name, shape in shapes.items():
            header[name] = dict(dtype="BF16", shape=shape, data_offsets=[at, at + 2 * math.prod(shape)])
            at += 2 * math.prod(shape)
        text = json.dumps(header).encode()
        with open(model / "model.safetensors", "wb") as f:  # 820 MB of holes
            f.write(struct.pack("<Q", len(text)) + text)
            f.truncate(8 + len(text) + at)
        out, partial = self.directory / "x.ingot", self.directory / "x.ingot.partial"
        terminal, end = os.openpty()
        process = subprocess.Popen([BINARY, "convert", model, out, "--dense", "mxfp4", "--threads", "1"], stdout=subprocess.DEVNULL, stderr=end)
        os.close(end)
        shown = b""
        while b"ETA" not in shown:  # the line that stands on a terminal
            shown += os.read(terminal, 4096)
        process.terminate()
        self.assertEqual(process.wait(60), 130)
        os.close(terminal)
        self.assertRegex(shown.decode(), r"\r\x1b\[Kconverting [\d.]+ [MG]B of [\d.]+ [MG]B, ETA [\d.]+m?s?")
        for number in (signal.SIGINT, signal.SIGTERM):
            self.stops([number], lambda p: partial.exists() and partial.stat().st_size > 1 << 20, "convert", model, out)
            self.assertEqual(list(self.directory.glob("x.*")), [])

    def test_commands_without_anything_to_save_end_at_once(self):
        self.stops([signal.SIGINT], self.busy, "bench", "--seconds", 100)
        noise = random.Random(1)
        text = self.file("long.txt", "".join(f"{noise.getrandbits(64):x} line\n" for _ in range(200000)))
        self.stops([signal.SIGTERM], self.busy, "tokenizer", "train", "--data", text, "--vocab", 60000, "--out", self.directory / "t.json",
                   said="(read [^\n]+\n)?")
        self.assertEqual(list(self.directory.glob("t.*")), [])
        run = self.directory / "run"
        trained = ingot("train", *Runs.TINY, "--steps", 2, "--data", self.file("text.txt", TEXT), "--out", run)
        self.assertEqual(trained.returncode, 0, trained.error)
        self.stops([signal.SIGINT], self.busy, "eval", run, "--data", self.file("much.txt", TEXT * 400), "--split", "all", "--stride", 1)

    def test_a_second_signal_does_not_wait(self):
        run = self.directory / "run"
        trains = lambda process: self.busy(process, lambda: (run / "log.jsonl").exists())
        self.stops([signal.SIGINT] * 10, trains, "train", *Runs.TINY, "--accumulation", 100000, "--data", self.file("text.txt", TEXT), "--out", run,
                   "--steps", 5, said=f"({run}: [^\n]+\n)?")  # what it trains may not be said yet

    def test_a_signal_that_was_ignored_stays_ignored(self):
        ignore = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
        process = subprocess.Popen([BINARY, "tokenizer", "decode", "--tokenizer", "none"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=ignore)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        self.assertIn(b"none", process.communicate(b"1", timeout=60)[1])
        self.assertEqual(process.returncode, 4)


class GptOss(TinyGptOss):
    def setUp(self):
        super().setUp()
        self.ids = self.file("ids.jsonl", "[1, 2, 3]\n\n[4, 5, 6, 7, 36]\n")

    def test_ids_are_continued_and_scored_and_the_checkpoint_is_described(self):
        generate = ["generate", "--model", self.model, "--ids", self.ids, "--tokens", 6, "--temperature", 0]
        run = ingot(*generate, "--past-end")
        lists = [json.loads(line) for line in run.text.splitlines()]
        self.assertEqual([(x[:n], len(x)) for x, n in zip(lists, (3, 5), strict=True)], [([1, 2, 3], 9), ([4, 5, 6, 7, 36], 11)], run.error)
        self.assertEqual(ingot(*generate, "--past-end", "--threads", 1).text, run.text)
        answers = [json.loads(line) for line in ingot(*generate, "--past-end", "--json").text.splitlines()]
        self.assertEqual([(a["ids"], a["finish"]) for a in answers], [(lists[0][3:], "length"), (lists[1][5:], "length")])
        self.assertNotEqual(ingot(*generate, "--layers", 1).text, run.text)

        report = json.loads(ingot("eval", "--model", self.model, "--ids", self.file("all.jsonl", run.text), "--json").text)
        losses = [s["losses"] for s in report["sequences"]]
        self.assertEqual([len(x) for x in losses], [8, 10])
        self.assertAlmostEqual(report["loss"], sum(map(sum, losses)) / 18, places=12)
        # Every greedy token was the likeliest, so its loss is at most that of a uniform guess.
        self.assertTrue(all(x <= math.log(self.VOCAB) for x in losses[0][2:] + losses[1][4:]))

        described = json.loads(ingot("info", self.model, "--json").text)
        self.assertEqual((described["tensors"], described["files"], described["bytes"]), (41, 2, self.index["metadata"]["total_size"]))
        self.assertEqual(described["config"]["num_local_experts"], 3)
        self.assertIn("parameters", ingot("info", self.model).text)

    def test_losses_are_those_of_the_definition(self):
        """Of spec/gpt_oss.py in fp64, by tools/make_model_goldens.py: wherever PyTorch is, parity compares much more."""
        ids = self.file("long.jsonl", json.dumps(self.DEFINITION_IDS))
        found = json.loads(ingot("eval", "--model", self.model, "--ids", ids, "--json").text)["sequences"][0]["losses"]
        # fp32 is off by some 1e-5 of the logits, which are numbers up to 5
        self.assertAlmostEqual(sum(found), 746.990087, delta=1e-3)
        for t, loss in {0: 3.374043, 1: 4.463516, 7: 4.287657, 126: 3.801101, 127: 3.824987, 128: 3.608284, 129: 3.513763,
                        198: 4.086431}.items():
            self.assertAlmostEqual(found[t], loss, delta=1e-4, msg=t)

    def test_a_checkpoint_becomes_an_archive_that_runs_in_its_place(self):
        archive = self.directory / "tiny.ingot"
        run = ingot("convert", self.model, archive, "--verify")
        self.assertEqual(run.returncode, 0, run.error)
        self.assertRegex(run.text, r"dense bf16, experts mxfp4, in .*\n.*version 1, 29 blobs, .*: every sum matches\n\Z")
        self.assertIn("every sum matches", ingot("convert", archive, "--verify").text)
        self.assertEqual(sorted(p.name for p in self.directory.glob("*.ingot*")), ["tiny.ingot"])
        generate = ["generate", "--ids", self.ids, "--tokens", 6, "--temperature", 0, "--past-end", "--model"]
        self.assertEqual(ingot(*generate, archive).text, ingot(*generate, self.model).text)
        self.assertEqual(ingot(*generate, archive, "--layers", 1).text, ingot(*generate, self.model, "--layers", 1).text)
        losses = [json.loads(ingot("eval", "--model", m, "--ids", self.ids, "--json").text)["loss"] for m in (archive, self.model)]
        self.assertAlmostEqual(*losses, places=5)
        described = json.loads(ingot("info", archive, "--json").text)
        self.assertEqual((described["archive_version"], described["dense"], described["experts"], described["bytes"]),
                         (1, "bf16", "mxfp4", archive.stat().st_size))
        self.assertEqual(described["config"], json.loads(ingot("info", self.model, "--json").text)["config"])
        self.assertIn("version 1, dense bf16, experts mxfp4", ingot("info", archive).text)

        other = self.directory / "other.ingot"
        self.assertEqual(ingot("convert", self.model, other, "--dense", "fp8", "--experts", "bf16").returncode, 0)
        again = self.directory / "again.ingot"
        self.assertIn("dense fp8, experts bf16, in", ingot("convert", archive, again, "--dense", "fp8", "--experts", "bf16", "--verify").text)
        losses = [json.loads(ingot("eval", "--model", m, "--ids", self.ids, "--json").text)["loss"] for m in (again, other)]
        self.assertEqual(*losses)
        self.assertIn("dense fp8, experts bf16, in", ingot("convert", other, again).text)  # as it is
        self.assertEqual(again.read_bytes(), other.read_bytes())
        run = ingot("convert", other, again, "--dense", "mxfp4")
        self.assertRegex(run.error, r"\Athe dense weights are rounded a second time, from fp8 to mxfp4; [^\n]*\n\Z")
        self.refuses(2, "tiny.ingot: found the checkpoint itself, expected another name", "convert", archive, archive)
        self.refuses(2, "config.json: found a file that is no archive", "convert", archive, self.model / "config.json")
        self.refuses(2, "found --dense, which changes nothing with an archive that is only verified", "convert", archive, "--verify", "--dense", "fp8")
        self.assertEqual(json.loads(ingot("info", other, "--json").text)["experts"], "bf16")
        self.assertNotEqual(ingot("eval", "--model", other, "--ids", self.ids, "--json").text.split('"loss"')[1].split(",")[0],
                            ingot("eval", "--model", archive, "--ids", self.ids, "--json").text.split('"loss"')[1].split(",")[0])

    def test_bad_archives_and_conversions_are_refused_in_one_line(self):
        archive = self.directory / "tiny.ingot"
        self.assertEqual(ingot("convert", self.model, archive).returncode, 0)
        generate = ["generate", "--ids", self.ids, "--model", archive]
        whole = archive.read_bytes()
        for status, message, content in (
            (3, "cut short, or changed", whole[:-1]), (3, "cut short, or changed", whole[:5000]), (7, "found version 2", whole[:8] + b"\2" + whole[9:]),
            (3, "the file is damaged", whole[:-2] + bytes([whole[-2] ^ 1, whole[-1]])), (4, "tiny.ingot", None),
        ):
            with self.subTest(message=message):
                archive.write_bytes(content) if content else archive.unlink()
                self.refuses(status, message, *generate)
        damaged = bytearray(whole)
        damaged[5000] ^= 1
        archive.write_bytes(damaged)
        self.refuses(3, 'blob "embed": found the sum', "convert", archive, "--verify")
        archive.unlink()
        made = os.path.join(self.directory, "made.ingot")
        self.assertIn("experts mxfp4", ingot("convert", "--synthetic", "small", made, "--verify").text)
        ids = os.path.join(self.directory, "made.jsonl")
        with open(ids, "w", encoding="utf-8") as file:
            file.write("[1, 2, 3]\n")
        run = ingot("generate", "--model", made, "--ids", ids, "--tokens", "5", "--only-new", "--device", "cpu")
        self.assertEqual((run.returncode, len(json.loads(run.text))), (0, 5), run.error)
        self.refuses(2, "expected --synthetic and OUT", "convert", "--synthetic", "small", self.model, made)
        if not os.path.exists("/dev/nvidia0"):
            for command in (["generate", "--model", made, "--ids", ids], ["eval", "--model", made, "--ids", ids]):
                self.refuses(7, "device cuda: found ", *command, "--device", "cuda")
            self.refuses(7, "--gpus 2: found ", "generate", "--model", made, "--ids", ids, "--gpus", "2")
        self.refuses(2, "--gpus: found 2 with device cpu", "generate", "--model", made, "--ids", ids, "--gpus", "2", "--device", "cpu")
        os.remove(made)
        self.refuses(2, "found no OUT", "convert", self.model)
        self.refuses(2, "found no OUT, expected the archive's name", "convert", "--synthetic", "small")
        self.refuses(2, "found no FROM", "convert")
        self.refuses(2, "ids.jsonl: found a file that is no archive", "convert", "--synthetic", "small", self.ids)
        self.refuses(2, "gpt-oss-tiny: found no archive to verify", "convert", "--verify", self.model)
        self.refuses(7, "found no GPT-OSS checkpoint", "convert", self.directory, archive)
        self.refuses(4, "missing: found no such file", "convert", self.directory / "missing", archive)
        self.refuses(2, "expected one of bf16, fp8, mxfp4", "convert", self.model, archive, "--dense", "int8")
        self.refuses(4, "cannot create", "convert", self.model, self.directory / "missing" / "x.ingot")
        (self.model / "model-00001-of-00001.safetensors").unlink()
        self.refuses(4, "names the shard", "convert", self.model, archive)
        self.assertEqual(list(self.directory.glob("*.ingot*")), [])

    def test_accuracy_names_every_form_and_component(self):
        report = json.loads(ingot("eval", "accuracy", "--model", self.model, "--ids", self.ids, "--json").text)
        self.assertEqual([(r["form"], r["component"]) for r in report["results"]],
                         [(f"dense {f}", c) for f in ("fp8", "mxfp4") for c in ("qkv", "o", "head", "qkv, o, head")])
        self.assertEqual(report["tokens"], 6)
        plain = json.loads(ingot("eval", "--model", self.model, "--ids", self.ids, "--json").text)
        self.assertAlmostEqual(report["loss"], plain["loss"], places=6)
        for r in report["results"]:
            self.assertTrue(0 <= r["top1"] <= 1 and 0 <= r["top5_overlap"] <= 1 and r["kl"] >= 0 and r["cosine"] <= 1 and r["mean_rank"] >= 1, r)
        archive = self.directory / "x.ingot"
        self.assertEqual(ingot("convert", self.model, archive).returncode, 0)
        text = ingot("eval", "accuracy", "--model", self.model, "--ids", self.ids, "--archive", archive).text
        self.assertRegex(text, r"x\.ingot +archive .* 100\.00 %")
        self.refuses(7, "found no GPT-OSS checkpoint", "eval", "accuracy", "--model", self.directory, "--ids", self.ids)
        self.refuses(2, "--ids", "eval", "accuracy", "--model", self.model)

    def test_bad_requests_and_checkpoints_are_refused_in_one_line(self):
        generate = ["generate", "--model", self.model, "--ids", self.ids]
        self.refuses(2, "found neither RUN nor --model", "generate", "--ids", self.ids)
        self.refuses(2, "--layers: found 3, expected at most 2", *generate, "--layers", 3)
        self.refuses(2, "expected at most 131072, the model's context", *generate, "--tokens", 131072)
        for command in (["generate", "--prompt", "x"], ["generate", "--prompt", "x", "--raw"], ["chat"]):
            self.refuses(4, "gpt-oss-tiny: found a model without a tokenizer, expected a tokenizer.json or o200k_base.tiktoken beside the weights, or --tok",
                         *command, "--model", self.model)
        self.refuses(4, "gpt-oss-tiny: found no tokenizer in this directory, expected a tokenizer.json, a .tiktoken or a GGUF",
                     "tokenizer", "encode", "--tokenizer", self.model, stdin=b"x")
        for status, message, content in (
            (3, "found no line", ""), (3, "line 1: found an empty list", "[]"), (3, "line 2: found number 1, expected a list", "[1]\n1"),
            (3, r"found number -1 in it", "[-1]"), (3, r"found number 1\.5 in it", "[1.5]"), (3, "line 1: byte", "[1"),
            (3, "found id 37 in list 2, expected 0 to 36, the model's vocabulary", "[1]\n[1, 37]"),
        ):
            with self.subTest(content=content):
                self.refuses(status, message, *generate[:3], "--ids", self.file("bad.jsonl", content))
        self.refuses(3, "found lists of one id", "eval", "--model", self.model, "--ids", self.file("one.jsonl", "[1]"))
        shard = self.model / "model-00001-of-00001.safetensors"
        whole = shard.read_bytes()
        for status, message, content in ((3, "outside the buffer", whole[:-1]), (3, "cut short, or not a safetensors file", whole[:100]),
                                         (3, "but the buffer has", whole + b"x"), (4, "names the shard", None)):
            with self.subTest(message=message):
                shard.write_bytes(content) if content else shard.unlink()
                self.refuses(status, message, *generate)
                self.refuses(status, message, "info", self.model)
        shard.write_bytes(whole)
        (self.model / "config.json").write_text(json.dumps(self.config | dict(vocab_size=38)))
        self.refuses(3, r"embed_tokens.weight\": found shape \(37, 32\), expected \(38, 32\)", *generate)


class Chat(TinyGptOss):
    """The same with a vocabulary of the Harmony format: what a random model says has every fault that a header can have."""
    SPECIALS = ["startoftext", "endoftext", "return", "constrain", "channel", "start", "end", "message", "call"]
    VOCAB = 340

    def setUp(self):
        super().setUp()
        specials = [word for name in self.SPECIALS for word in ("--special", f"<|{name}|>")]
        text = self.file("words.txt", "assistant analysis final commentary user system\n" * 3)
        run = ingot("tokenizer", "train", "--data", text, "--vocab", self.VOCAB, "--pattern", "o200k", "--out", self.model / "tokenizer.json", *specials)
        self.assertEqual(run.returncode, 0, run.error)
        (self.model / "config.json").write_text(json.dumps(self.config | dict(eos_token_id=[2, 1, 8])))
        self.chat = ["chat", "--model", self.model]
        self.env = dict(INGOT_DATE="none", INGOT_TOKENS="30")  # flags go over them

    def test_piped_turns_are_answered_and_known_tokens_are_used_again(self):
        turns = "Hi.\n\nAnd \u65e5\u672c? <|end|>\r\nBye.\n".encode()
        run = ingot(*self.chat, "--json", "--temperature", 0, stdin=turns, env=self.env)
        self.assertEqual(run.returncode, 0, run.error)
        answers = [json.loads(line) for line in run.text.splitlines()]
        self.assertEqual(len(answers), 3)
        self.assertEqual(answers[0]["known_tokens"], 0)
        for answer in answers[1:]:
            self.assertGreater(answer["known_tokens"], 0)
        self.assertTrue(all(a["finish"] in ("stop", "length", "call") and len(a["ids"]) <= 30 for a in answers))
        self.assertEqual(len(re.findall(r"^\[\d+ tokens.*; prompt [\d,]+ tokens.*\]$", run.error, re.M)), 3, run.error)
        self.assertEqual(json.loads(ingot(*self.chat, "--json", "--temperature", 0, stdin=b"Hi.\n", env=self.env).text)["ids"], answers[0]["ids"])

    def test_settings_change_what_is_said(self):
        def ids(*more, turns=b"Hi.\n"):
            run = ingot(*self.chat, "--json", *more, stdin=turns, env=self.env)
            self.assertEqual(run.returncode, 0, run.error)
            return [(a["prompt_tokens"], a["ids"]) for a in map(json.loads, run.text.splitlines())]
        plain = ids()
        self.assertEqual(plain, ids("--seed", 1))
        self.assertNotEqual(plain[0][1], ids("--seed", 2)[0][1])
        self.assertNotEqual(plain[0][0], ids("--developer", "Be brief.")[0][0])
        self.assertNotEqual(plain[0][0], ids("--system", "You are a teapot.")[0][0])
        self.assertNotEqual(plain[0][0], ids("--date", "2026-01-02")[0][0])
        self.assertEqual(ids("--reasoning", "high"), ids(turns=b"/effort high\nHi.\n"))
        first, second = ids("--temperature", 0, turns=b"Hi.\n/new\nHi.\n")
        self.assertEqual(first, second)
        stop = first[1][0]
        self.assertEqual(ids("--temperature", 0, "--stop-id", stop)[0][1], [])

    def test_text_is_whole_characters_and_holds_no_control_token(self):
        for seed in range(4):
            run = ingot(*self.chat, "--tokens", 200, "--analysis", "show", "--seed", seed, stdin="\u65e5\n<|start|>\n".encode(), env=self.env)
            self.assertEqual(run.returncode, 0, run.error)  # .text was decoded strictly
            self.assertFalse([s for s in self.SPECIALS if f"<|{s}|>" in run.text])

    def test_a_date_is_one_and_an_unknown_command_is_told(self):
        for date in ("nonsense", "2026-02-30", "2026-13-01", "31.01.2026", "2026-1-1", "2026-01-01x"):
            self.refuses(2, f"--date: found '{date}', expected one like 2026-01-31, or none", *self.chat, "--date", date, stdin=b"Hi\n")
            self.refuses(2, "--date: found", "generate", "--model", self.model, "--prompt", "x", "--date", date)
        for line in ("/reset", "/effort", "/effort much", "/new 1", "/quit now"):
            run = ingot(*self.chat, stdin=f"{line}\n".encode(), env=self.env)
            self.assertEqual(run.returncode, 2, line)
            self.assertRegex(run.error, "(found the command '" + line + "', expected one of /new, )|(/effort: found 'much')")
        run = ingot(*self.chat, "--json", stdin=b"/usr/bin is a directory\n /reset\n/etc is one\n/Hi\n", env=self.env)
        self.assertEqual((run.returncode, run.text.count("\n")), (0, 4), run.error)

    def test_what_cannot_be_answered_is_one_line_and_a_status(self):
        self.refuses(2, "found a conversation of [0-9]+ tokens, expected fewer than 300, the context", *self.chat, "--context", 300, stdin=b"x" * 2000, env=self.env)
        self.refuses(3, "standard input: found a line of more than 4.2 MB", *self.chat, stdin=b"x" * 9000000, env=self.env)
        self.refuses(3, "is not valid UTF-8", *self.chat, stdin=b"\xff\n", env=self.env)
        self.refuses(2, "--stop-id: found '340', expected an id from 0 to 339", *self.chat, "--stop-id", 340, stdin=b"Hi\n", env=self.env)
        self.refuses(2, "reasoning: found", *self.chat, "--reasoning", "some", stdin=b"Hi\n", env=self.env)
        self.refuses(2, "--model is missing", "chat")
        run = ingot(*self.chat, "--context", 300, "--tokens", 0, "--temperature", 0, stdin=b"Hi.\n", env=self.env)
        self.assertEqual(run.returncode, 0, run.error)
        # Another model's vocabulary, of each kind.
        other = self.directory / "other.json"
        for message, vocab, specials in ((r"found no control token <\|start\|>", 300, ["<|message|>"]),
                                         ("found no control token <|start|>".replace("|", r"\|"), 300, ["<|bos|>"]),
                                         (r"found <\|return\|> with id 0, expected 2", 300, ["<|return|>", *(f"<|{s}|>" for s in self.SPECIALS if s != "return")])):
            words = [w for s in specials for w in ("--special", s)]
            ingot("tokenizer", "train", "--data", self.file("t.txt", "aa bb " * 9), "--vocab", vocab, "--out", other, "--pattern", "o200k", *words)
            self.refuses(3, message, *self.chat, "--tokenizer", other, stdin=b"Hi\n", env=self.env)
        ingot("tokenizer", "train", "--data", ROOT / "LICENSE", "--vocab", 600, "--out", other)
        self.refuses(3, "found a tokenizer of [0-9]+ tokens, expected at most 340, the model's vocabulary", *self.chat, "--tokenizer", other, stdin=b"Hi\n", env=self.env)
        self.refuses(7, "found no GPT-OSS checkpoint, expected a directory with config.json and", "chat", "--model", self.directory, stdin=b"Hi\n")

    def test_interrupting_stops_the_answer_and_not_the_chat(self):
        shard = next(p for p in self.model.glob("*.safetensors") if b"lm_head" in p.read_bytes())
        data = bytearray(shard.read_bytes())
        begin = 8 + struct.unpack_from("<Q", data)[0]
        begin += json.loads(data[8:begin])["lm_head.weight"]["data_offsets"][0]
        data[begin : begin + 2 * self.HIDDEN * len(self.SPECIALS)] = bytes(2 * self.HIDDEN * len(self.SPECIALS))  # it never ends
        shard.write_bytes(data)
        command = [BINARY, *map(str, self.chat), "--context", "60000", "--tokens", "50000", "--json", "--temperature", "0"]
        run = start(*command[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        answers = []
        for turn in (b"/help\nHi.\n", b"/help\nMore.\n"):  # the help stands on standard error just before the answer begins
            run.stdin.write(turn)
            run.stdin.flush()
            run.stderr.readline()  # until it answers, SIGINT ends it
            time.sleep(0.3)
            run.send_signal(signal.SIGINT)
            answers.append(json.loads(run.stdout.readline()))
            run.stderr.readline()  # its times
        run.stdin.close()
        self.assertEqual((run.wait(60), [a["finish"] for a in answers]), (0, ["cancelled"] * 2), run.stderr.read())
        self.assertTrue(answers[0]["ids"])
        run.stdout.close()
        run.stderr.close()

    def test_text_is_scored_in_windows_that_slide(self):
        text = "Assistant and user: \u65e5\u672c, " + TEXT[:900]
        texts = self.directory / "texts"
        texts.mkdir()
        (texts / "a.txt").write_text(text)
        (texts / "b.txt").write_text("Hi")
        ids = [[int(i) for i in ingot("tokenizer", "encode", "--tokenizer", self.model, stdin=t.encode()).text.split()] for t in (text, "Hi")]
        n = len(ids[0])
        self.assertGreater(n, 300)
        evaluate = ["eval", "--model", self.model, "--data", texts, "--json"]
        for context, stride in ((2048, 0), (100, 0), (100, 30)):
            step = stride or context
            windows = [(0, min(n, context + 1), 1)]  # begin, end and the first that is scored
            while windows[-1][1] < n:
                scored = windows[-1][1]
                end = min(n, scored + step)
                windows.append((end - 1 - context if stride else scored - 1, end, scored))
            lists = self.file("lists.jsonl", "".join(json.dumps(ids[0][b:e]) + "\n" for b, e, _ in windows) + json.dumps(ids[1]) + "\n")
            losses = [s["losses"] for s in json.loads(ingot("eval", "--model", self.model, "--ids", lists, "--json").text)["sequences"]]
            wanted = sum((l[f - b - 1:] for l, (b, _, f) in zip(losses, windows)), []) + losses[-1]
            self.assertEqual(len(wanted), n - 1 + len(ids[1]) - 1)
            more = [] if context == 2048 else ["--context", context, "--stride", stride]
            run = ingot(*evaluate, *more)
            self.assertEqual(run.returncode, 0, run.error)
            report = json.loads(run.text)
            self.assertEqual([report[k] for k in ("documents", "windows", "targets", "context", "stride")], [2, len(windows) + 1, len(wanted), context, stride])
            self.assertAlmostEqual(report["loss"], sum(wanted) / len(wanted), delta=1e-5)  # batches are cut elsewhere
            self.assertAlmostEqual(report["perplexity"], math.exp(report["loss"]), places=9)
            self.assertTrue(0 <= len((text + "Hi").encode()) - report["bytes"] <= 8, report)  # but for each first token's
            self.assertAlmostEqual(report["bits_per_byte"], sum(wanted) / math.log(2) / report["bytes"], delta=1e-4)
        self.assertRegex(ingot(*evaluate[:-1]).text, r"texts \(2 documents, 2 windows\): perplexity \d+\.\d{3}, loss .* bits per byte over [\d,]+ tokens")
        for option in (["--split", "all"], ["--batch-tokens", 64], ["--flat"]):
            self.refuses(2, f"found {option[0]}, which changes nothing with a GPT-OSS model", *evaluate, *option)
        self.refuses(2, "--stride: found 200, expected at most the context of 100", *evaluate, "--context", 100, "--stride", 200)
        self.refuses(2, "--context: found 131073, expected at most 131072, the model's", *evaluate, "--context", 131073)
        (texts / "b.txt").write_bytes(b"a\xff")
        self.refuses(3, "b.txt: byte 1: found 0xff, expected UTF-8", *evaluate)
        for name, content in (("a.txt", "H"), ("b.txt", "i")):
            (texts / name).write_text(content)
        self.refuses(3, "texts: found no document of two tokens", *evaluate)
        (self.model / "tokenizer.json").unlink()
        self.refuses(4, "found a model without a tokenizer", *evaluate)

    def test_a_question_needs_the_control_tokens_and_options_that_change_it(self):
        other = self.directory / "other.json"
        self.assertEqual(ingot("tokenizer", "train", "--data", ROOT / "LICENSE", "--vocab", 300, "--pattern", "o200k", "--out", other).returncode, 0)
        generate = ["generate", "--model", self.model, "--tokens", 3]
        self.refuses(3, "other.json: found a tokenizer without the control tokens of Harmony .*, or --raw to go on", *generate, "--prompt", "Hi", "--tokenizer", other)
        run = ingot(*generate, "--prompt", "Hi", "--tokenizer", other, "--raw")
        self.assertEqual(run.returncode, 0, run.error)
        for option in ("--only-new", "--past-end"):
            self.refuses(2, f"found {option}, which changes nothing with a question", *generate, "--prompt", "Hi", option)
        self.refuses(2, "found --only-new, which changes nothing with --json", *generate, "--prompt", "Hi", "--raw", "--only-new", "--json")
        bad = self.file("bad.txt", b"a\xff")
        for more in ([], ["--raw"]):
            self.refuses(3, "bad.txt: text to encode: byte 1 .* is not valid UTF-8", *generate, "--file", bad, *more)
            self.refuses(3, "standard input: text to encode: byte 1 .* is not valid UTF-8", *generate, *more, stdin=b"a\xff")

    def test_generate_asks_in_harmony_or_as_it_is(self):
        generate = ["generate", "--model", self.model, "--prompt", "Hi.", "--temperature", 0, "--tokens", 20, "--date", "none"]
        asked = json.loads(ingot(*generate, "--json").text)
        self.assertEqual(asked["ids"], json.loads(ingot(*self.chat, "--json", "--temperature", 0, "--tokens", 20, stdin=b"Hi.\n", env=self.env).text)["ids"])
        raw = json.loads(ingot(*generate[:-2], "--raw", "--json").text)
        self.assertLess(raw["prompt_tokens"], asked["prompt_tokens"])
        self.assertIn(raw["text"], ingot(*generate[:-2], "--raw", "--only-new").text)
        ids = self.file("ids.jsonl", json.dumps([int(i) for i in ingot("tokenizer", "encode", "--tokenizer", self.model, stdin=b"Hi.").text.split()]))
        self.assertEqual(raw["ids"], json.loads(ingot(*generate[:3], "--ids", ids, "--temperature", 0, "--tokens", 20, "--json").text)["ids"])
        archive = self.directory / "m.ingot"
        self.assertEqual(ingot("convert", self.model, archive).returncode, 0)
        inside = ingot("generate", "--model", archive, *generate[3:], "--json")
        self.assertEqual(json.loads(inside.text)["ids"], asked["ids"], inside.error)
        shown = ingot(*generate[:-2], "--raw")
        self.assertTrue(shown.text.startswith("Hi.") and shown.text.endswith("\n"), shown)


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

    def test_keys_that_stand_alone_are_those_of_their_section(self):
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

    def test_a_run_s_own_configuration_serves_as_one(self):
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
        self.refuses(2, "train.seconds: found 0.5, expected more than train.reserve_seconds, 1", *self.base, "--seconds", 0.5)
        self.refuses(2, "found --steps and --seconds, expected one of them", *self.base, "--seconds", 5, "--steps", 5)
        self.assertEqual(self.trained_with("--steps", 3, seconds=600)["train"]["seconds"], 0)


class Info(InDirectory):
    def test_the_golf_preset_has_exactly_its_parameters(self):
        report = json.loads(ingot("info", "--preset", "golf", "--json").text)
        self.assertEqual((report["parameters"], report["applications"]), (35944602, 17))

    def test_a_configuration_lies_over_the_preset(self):
        config = self.file("c.json", '{"preset": "nano", "model": {"layers": 3}}')
        layers = lambda *a: json.loads(ingot("info", "--config", config, "--json", *a).text)["config"]["layers"]
        self.assertEqual((layers(), layers("--set", "model.layers=5")), (3, 5))


class Bench(InDirectory):
    def test_json_holds_what_was_measured(self):
        report = json.loads(ingot("bench", "linear/narrow", "--seconds", "0.001", "--threads", 1, "--json").text)
        self.assertTrue(report["results"])
        self.assertGreater(min(r["median_us"] for r in report["results"]), 0)
        self.refuses(2, "no benchmark that contains 'nothing of the kind', expected one of --list", "bench", "nothing of the kind", "--json")

    def test_every_operation_has_a_case_that_runs(self):
        names = ingot("bench", "--list").text.splitlines()
        self.assertEqual(names, json.loads(ingot("bench", "--list", "--json").text))
        self.assertEqual(ingot("bench", "--list", "rmsnorm/backward").text.splitlines(), [n for n in names if "rmsnorm/backward" in n])
        rooms = {r.name for r in (ROOT / "src/ingot/kernels").iterdir() if (r / f"{r.name}.cpp").exists()}
        self.assertEqual(rooms - {n.split("/")[0] for n in names}, set())
        ran = {"linear", "cross_entropy"}  # have large cases
        for part in ("/4096x1024/", "/256x1024/", "x64/f32", "adamw", "moe", "muon", "sum/", "sampling/greedy", "product of one row", "mlp/", "narrow"):
            report = json.loads(ingot("bench", part, "--seconds", "0.001", "--json").text)
            self.assertEqual(len(report["results"]), len([n for n in names if part in n]), part)
            ran |= {r["suite"] for r in report["results"]}
        self.assertEqual(rooms - ran, set())


if __name__ == "__main__":
    unittest.main(argv=sys.argv)
