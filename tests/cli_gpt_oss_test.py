"""GPT-OSS from the command line: convert, info, eval, generate and chat with a tiny model; signals to any command.

    python3 tests/cli_gpt_oss_test.py BINARY [unittest options]
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
import time
import unittest

from program import BINARY, SANITIZED, TEXT, TINY, InDirectory, ingot, start
from tiny_checkpoints import bf16_numbers, save_safetensors, write_draft_head

ROOT = pathlib.Path(__file__).resolve().parent.parent


class TinyGptOss(InDirectory):
    """A random checkpoint of two small layers, in the published form: MXFP4 experts, everything else bf16, two shards."""
    VOCAB, HIDDEN, HEADS, KV, DIM, EXPERTS, INNER = 37, 32, 4, 2, 8, 3, 64
    DEFINITION_IDS = [(11 * t * t + 5 * t + 3) % 37 for t in range(200)]  # more than the window

    def setUp(self):
        super().setUp()
        self.began = {}  # by process: its ticks when it was ready (busy)
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
            tensors[name] = ("BF16", shape, bf16_numbers(noise, math.prod(shape)))

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
            save_safetensors(self.model / file, shard)
            index |= dict.fromkeys(shard, file)
        self.index = dict(metadata=dict(total_size=sum(len(d) for _, _, d in tensors.values())), weight_map=index)
        (self.model / "model.safetensors.index.json").write_text(json.dumps(self.index))

    def stops_scoring(self, number, bits, *arguments):
        """`eval` says after a signal how many tokens it has scored, and their loss."""
        process = start(*arguments, stdout=subprocess.PIPE)
        deadline = time.monotonic() + 60
        while not self.busy(process, ticks=500 if SANITIZED else 70):  # reading takes a part of this time, and the score many seconds
            self.assertLess(time.monotonic(), deadline)
            self.assertIsNone(process.poll(), "it ended before the signal")
            time.sleep(0.01)
        process.send_signal(number)
        out, error = process.communicate(timeout=60)
        self.assertEqual((process.returncode, out), (130, b""), error)
        self.assertRegex(error.decode(), r"(\A|\n)eval: stopping after the current batch; a second signal stops at once\n(scoring [^\n]+\n)*ingot eval: stopped by a signal "
                         rf"after [0-9,]+ of [0-9,]+ tokens: loss [0-9]\.[0-9]{{4}}{bits}\n\Z")
        done, every = (int(n.replace(",", "")) for n in re.search(r"after ([0-9,]+) of ([0-9,]+) tokens", error.decode()).groups())
        self.assertTrue(0 < done < every, error)
        return every

    @staticmethod
    def ticks(process):
        return sum(map(int, pathlib.Path(f"/proc/{process.pid}/stat").read_text().rsplit(")")[1].split()[11:13]))

    def busy(self, process, ready=lambda: True, ticks=5):
        """The program has computed for a while since it was ready, that is, since it installed its signal handlers (a sanitizer starts slowly)."""
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", pathlib.Path(f"/proc/{process.pid}/status").read_text(), re.M)
        if process.pid not in self.began and caught and int(caught[1], 16) >> (signal.SIGINT - 1) & 1 and ready():
            self.began[process.pid] = self.ticks(process)
        return process.pid in self.began and self.ticks(process) >= self.began[process.pid] + ticks


class Signals(TinyGptOss):
    """Every command ends in the same way: status 130, one line, no temporary file."""

    def stops(self, signals, until, *arguments, said="", **more):
        process = start(*arguments, stdout=subprocess.DEVNULL, **more)
        deadline = time.monotonic() + 60
        while not until(process):
            self.assertLess(time.monotonic(), deadline)
            self.assertIsNone(process.poll(), "it ended before the signal")
            time.sleep(0.002)
        for number in signals:
            process.send_signal(number)
            time.sleep(0.02)  # two pending signals count as one
        error = process.communicate(timeout=60)[1]
        self.assertEqual(process.returncode, 130, error)
        self.assertRegex(error.decode(), rf"\A{said}ingot {arguments[0]}[a-z ]*: stopped by a signal\n\Z")

    def large_model(self):
        """A checkpoint of 820 MB of holes, whose conversion takes a while."""
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
        with open(model / "model.safetensors", "wb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
            f.truncate(8 + len(text) + at)
        return model

    def test_a_conversion_at_loading_leaves_no_file(self):
        model, ids, temporary = self.large_model(), self.file("ids.jsonl", "[1]"), self.directory / "temporary"
        temporary.mkdir()
        tokenizer = self.directory / "tokenizer.json"
        self.assertEqual(ingot("tokenizer", "train", "--data", self.file("text.txt", TEXT), "--vocab", 300, "--out", tokenizer).returncode, 0)
        writes = lambda process: any(f.stat().st_size > 1 << 20 for f in temporary.iterdir())
        for number, command in ((signal.SIGINT, ["generate", "--ids", ids]), (signal.SIGTERM, ["serve", "--port", 0, "--tokenizer", tokenizer])):
            self.stops([number], writes, *command, "--model", model, "--dense", "mxfp4", "--device", "cpu", said="([^\n]+\n)?", env=os.environ | dict(TMPDIR=str(temporary)))
            self.assertEqual(list(temporary.iterdir()), [])
        self.refuses(4, "TMPDIR: found /no/where, expected a directory for temporary files", "generate", "--synthetic", "small", "--device", "cpu", "--ids", ids, env=dict(TMPDIR="/no/where"))

    def test_convert_leaves_no_file(self):
        model = self.large_model()
        out, partial = self.directory / "x.ingot", self.directory / "x.ingot.partial"
        terminal, end = os.openpty()
        process = subprocess.Popen([BINARY, "convert", model, out, "--dense", "mxfp4", "--threads", "1"], stdout=subprocess.DEVNULL, stderr=end)
        os.close(end)
        shown = b""
        while b"ETA" not in shown:  # the progress line on a terminal
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
        ids = self.file("ids.jsonl", "[1]")
        for command in (["bench", "draft", "--context", 10], ["generate", "--ids", ids], ["generate", "--ids", ids, "--draft", "lookup"]):
            self.stops([signal.SIGTERM], self.busy, *command, "--synthetic", "small", "--device", "cpu", "--tokens", 100000, said="(synthetic:small: [^\n]+\n)*")
        noise = random.Random(1)
        text = self.file("long.txt", "".join(f"{noise.getrandbits(64):x} line\n" for _ in range(200000)))
        self.stops([signal.SIGTERM], self.busy, "tokenizer", "train", "--data", text, "--vocab", 60000, "--out", self.directory / "t.json",
                   said="(read [^\n]+\n)?")
        self.assertEqual(list(self.directory.glob("t.*")), [])

    def test_a_stopped_score_says_what_was_scored_so_far(self):
        run, log = self.directory / "run", self.directory / "scores.jsonl"
        trained = ingot("train", *TINY, "--steps", 2, "--data", self.file("text.txt", TEXT), "--out", run)
        self.assertEqual(trained.returncode, 0, trained.error)
        much, ids = self.file("much.txt", TEXT * 60), self.file("ids.jsonl", (str([i % 20 for i in range(30)]) + "\n") * 60000)
        scores = ["--data", much, "--split", "all", "--device", "cpu", "--threads", 1]
        every = json.loads(ingot("eval", run, *scores, "--json").text)["targets"]
        for number, more in ((signal.SIGINT, []), (signal.SIGTERM, ["--json"])):
            found = self.stops_scoring(number, r", [0-9]\.[0-9]{4} bits per byte", "eval", run, *scores, "--stride", 1, "--batch-tokens", 32, *more)
            self.assertEqual(found, every)
        self.assertEqual(self.stops_scoring(signal.SIGINT, "", "eval", run, *scores, "--ttt", "--ttt-log", log), every)
        self.assertEqual(list(self.directory.glob("scores.jsonl*")), [])
        self.stops_scoring(signal.SIGTERM, "", "eval", "--model", self.model, "--ids", ids, "--device", "cpu", "--threads", 1)

    def test_a_second_signal_does_not_wait(self):
        run = self.directory / "run"
        trains = lambda process: self.busy(process, lambda: (run / "log.jsonl").exists())
        self.stops([signal.SIGINT] * 10, trains, "train", *TINY, "--accumulation", 100000, "--data", self.file("text.txt", TEXT), "--out", run,
                   "--steps", 5, said=rf"(on [^\n]+\n)?(warning: [^\n]+\n)?({run}: [^\n]+\n)?(train: stopping and saving [^\n]+\n)?")  # the line about the model may not be printed yet

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
        # Every greedy token was the most likely token, so its loss is at most the loss of a uniform guess.
        self.assertTrue(all(x <= math.log(self.VOCAB) for x in losses[0][2:] + losses[1][4:]))

        described = json.loads(ingot("info", self.model, "--json").text)
        self.assertEqual((described["tensors"], described["files"], described["bytes"]), (41, 2, self.index["metadata"]["total_size"]))
        self.assertEqual(described["config"]["num_local_experts"], 3)
        shown = ingot("info", self.model).text
        self.assertIn("parameters", shown)
        self.assertEqual(len({re.match(r"  \S+ +", line).end() for line in shown[shown.index("config\n"):].splitlines()[1:]}), 1, shown)  # one column

    def test_drafts_change_no_answer_and_are_counted(self):
        ids = self.file("ids.jsonl", json.dumps([1, 2, 3, 4, 5, 6, 1, 2, 3]) + "\n")
        accepted = 0
        for seed, temperature in ((1, 0), (2, 0.4), (3, 1)):
            ask = ["generate", "--model", self.model, "--device", "cpu", "--ids", ids, "--json", "--past-end", "--tokens", 80, "--seed", seed, "--temperature", temperature]
            plain, drafted = json.loads(ingot(*ask).text), json.loads(ingot(*ask, "--draft", "lookup", "--draft-max", 5, "--draft-costs", "100,105,110,115,120,125").text)
            self.assertEqual((drafted["ids"], drafted["finish"]), (plain["ids"], plain["finish"]))
            self.assertNotIn("drafts", plain)
            accepted += drafted["drafts"]["accepted"]
        self.assertGreater(accepted, 0)
        # With these costs a draft never pays, and the answer is shorter than the interval after which the program tries a draft again, so no draft is made:
        # the report must say so, because drafts were asked for.
        none = ingot(*ask[:8], "--tokens", 30, "--draft", "lookup", "--draft-costs", "100,10000")
        self.assertEqual(json.loads(none.text)["drafts"], dict(steps=0, tokens=0, accepted=0))
        for tokens, costs, said in ((30, "100,10000", ", no drafts;"), (200, "100,101,102,103,104", r", \d+ of \d+ draft tokens accepted;")):
            turn = ingot("generate", "--synthetic", "small", "--device", "cpu", "--prompt", "hello", "--date", "none", "--tokens", tokens, "--temperature", 0, "--draft", "lookup", "--draft-costs", costs)
            self.assertRegex(turn.error, said)
        self.refuses(2, "found --draft-max, which changes nothing with an answer without --draft", *ask, "--draft-max", 5)
        self.refuses(2, "found --draft-costs, which changes nothing with an answer without --draft", *ask, "--draft-costs", "1,2")
        self.refuses(2, "found --draft-exact, which changes nothing with an answer without --draft", *ask, "--draft-exact")
        for most in (0, 8):  # test_tokens_with_drafts_are_timed_by_the_share_of_right_guesses has drafts of 7, the engine's most
            self.refuses(2, "--draft-max: found '?%d'?, expected an integer from 1 to 7" % most, *ask, "--draft", "lookup", "--draft-max", most)
        for costs, message in (("1;2", "found '1;2', expected numbers like 1,2,4,8"), ("100", "found 100 alone, expected the times of steps of 1, 2 and more tokens")):
            for command in (["generate", "--ids", ids], ["serve", "--port", 0]):  # before the model is opened, which would write a line
                self.refuses(2, "--draft-costs: " + message, *command, "--synthetic", "small", "--device", "cpu", "--draft", "lookup", "--draft-costs", costs)

    def test_a_draft_head_changes_no_answer_of_a_checkpoint_or_an_archive(self):
        head = write_draft_head(self.directory / "head", self.VOCAB, self.HIDDEN, [1, 2])
        archive = self.directory / "tiny.ingot"
        self.assertEqual(ingot("convert", self.model, archive).returncode, 0)
        for model in (self.model, archive):
            for more in (("--temperature", 0), ("--seed", 2), ("--temperature", 0, "--draft-window", 3, "--draft-layers", "2,1"),
                         ("--seed", 2, "--draft-dense", "fp8", "--draft-exact"), ("--seed", 3, "--draft-layers", "0,2")):
                ask = ["generate", "--model", model, "--device", "cpu", "--ids", self.ids, "--json", "--past-end", "--tokens", 70]
                plain, drafted = ingot(*ask, *more[:2]), ingot(*ask, *more, "--draft", head, "--draft-costs", "100,105,110,115,120,125")
                self.assertEqual((plain.returncode, drafted.returncode), (0, 0), drafted.error)
                answers = [[json.loads(line) for line in run.text.splitlines()] for run in (plain, drafted)]
                self.assertEqual(*[[(a["ids"], a["finish"]) for a in of_run] for of_run in answers])
                self.assertGreater(sum(a.get("drafts", {}).get("tokens", 0) for a in answers[1]), 0)
                layers, form = more[-1].replace(",", ", ") if "--draft-layers" in more else "1, 2", "fp8" if "fp8" in more else "bf16"
                self.assertIn(f"a draft head over the hidden states behind layers {layers}, in {form}", drafted.error)

    def test_a_draft_head_that_does_not_fit_is_refused(self):
        ask = ["generate", "--model", self.model, "--device", "cpu", "--ids", self.ids]
        head = write_draft_head(self.directory / "head", self.VOCAB, self.HIDDEN, [0, 1, 9], some_norm=True, vocab_size=99)
        error = ingot(*ask, "--draft", head).error
        for part in ("eagle_aux_hidden_state_layer_ids: found 9, expected different numbers from 0 to 2", "some_norm: a property of heads",
                     "vocab_size: found 99, expected 37, the model's"):
            self.assertIn(part, error)
        self.assertEqual(error.count("\n"), 1)
        self.refuses(2, "--draft: found 'tree', expected none, lookup, or the directory of a draft head", *ask, "--draft", "tree")
        for option, value in (("--draft-layers", 2), ("--draft-window", 2), ("--draft-dense", "fp8")):
            self.refuses(2, f"found {option}, which changes nothing with an answer without a draft head", *ask, "--draft", "lookup", option, value)
        fits = write_draft_head(self.directory / "fits", self.VOCAB, self.HIDDEN, [0, 1])
        self.refuses(7, "fits: down: found rows of 48 numbers, expected a multiple of 32 for mxfp4", *ask, "--draft", fits, "--draft-dense", "mxfp4")
        self.refuses(2, "--draft-dense: found 'fp6', expected one of bf16, fp8, mxfp4", *ask, "--draft", fits, "--draft-dense", "fp6")
        run = self.directory / "run"
        self.assertEqual(ingot("train", *TINY, "--steps", 1, "--data", self.file("text.txt", TEXT), "--out", run).returncode, 0)
        self.assertIn("found --draft, which changes nothing", ingot("generate", run, "--draft", head).error)

    def test_the_folder_of_a_repository_in_hugging_face_s_cache_is_its_snapshot(self):
        repository = self.directory / "hub/models--openai--tiny"
        snapshot, ids = repository / "snapshots/abc", self.file("few.jsonl", "[1, 2, 3]")
        shutil.copytree(self.model, snapshot)
        (repository / "refs").mkdir()
        (repository / "refs/main").write_text("abc")
        score = lambda path: ingot("eval", "--model", path, "--ids", ids, "--json").text
        self.assertEqual(json.loads(score(repository))["loss"], json.loads(score(self.model))["loss"])
        self.assertEqual(json.loads(ingot("info", repository, "--json").text)["tensors"], 41)
        (repository / "refs/main").write_text("gone")
        self.assertIn("names the snapshot 'gone', which is missing", ingot("eval", "--model", repository, "--ids", ids).error)

    def test_losses_equal_the_definition(self):
        """The losses of spec/gpt_oss.py in fp64, computed by tools/make_model_goldens.py. Where PyTorch is installed, the parity test compares much more."""
        ids = self.file("long.jsonl", json.dumps(self.DEFINITION_IDS))
        found = json.loads(ingot("eval", "--model", self.model, "--ids", ids, "--json", "--device", "cpu").text)["sequences"][0]["losses"]
        # The CPU computes in fp32, a GPU with activations in bf16. fp32 is off by some 1e-5 of the logits, where logits are up to 5
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
        self.assertIn("dense fp8, experts bf16, in", ingot("convert", other, again).text)  # unchanged
        self.assertEqual(again.read_bytes(), other.read_bytes())
        run = ingot("convert", other, again, "--dense", "mxfp4")
        self.assertRegex(run.error, r"\Athe dense weights are rounded a second time, from fp8 to mxfp4; [^\n]*\n\Z")
        self.refuses(2, "tiny.ingot: found the checkpoint itself, expected another name", "convert", archive, archive)
        self.refuses(2, "config.json: found a file that is no archive", "convert", archive, self.model / "config.json")
        self.refuses(2, "found --dense, which changes nothing with an archive that is only verified", "convert", archive, "--verify", "--dense", "fp8")
        self.assertEqual(json.loads(ingot("info", other, "--json").text)["experts"], "bf16")
        self.assertNotEqual(ingot("eval", "--model", other, "--ids", self.ids, "--json").text.split('"loss"')[1].split(",")[0],
                            ingot("eval", "--model", archive, "--ids", self.ids, "--json").text.split('"loss"')[1].split(",")[0])

    def test_tokens_with_drafts_are_timed_by_the_share_of_right_guesses(self):
        bench = ["bench", "draft", "--synthetic", "small", "--device", "cpu", "--context", 20, "--tokens", 30, "--draft-costs", "100,101,102,103,104,105,106,107"]
        run = ingot(*bench, "--accepted", "100", "--json")
        found = json.loads(run.text)
        self.assertEqual((found["device"], found["context"], found["tokens"], found["step_costs"]), ("CPU", 20, 30, list(range(100, 108))), run.error)
        # The first token comes from the prompt. Then a step of 4 rows yields 4 tokens if its draft of 3 is right, and a step of 8 rows yields 8 tokens.
        cases = {c["name"]: c for c in found["cases"]}
        self.assertEqual({name: (c["accepted_tokens"], c["draft_tokens"]) for name, c in cases.items() if not name.startswith("no draft token accepted")},
                         {"no drafts": (0, 0), "draft steps without a draft": (0, 0), "drafts of 3, all accepted": (21, 21), "drafts of 7, all accepted": (25, 25),
                          "each draft token accepted with 100 %": (25, 25)})
        self.assertEqual([round(c["tokens_per_step"], 3) for c in found["cases"]], [1, 1, round(30 / 9, 3), 6, 6, 1, 1])
        for name in ("no draft token accepted", "no draft token accepted, --draft-exact"):
            self.assertEqual(cases[name]["accepted_tokens"], 0)
            self.assertGreater(cases[name]["draft_tokens"], 0)
        self.assertTrue(all(0 < c["token_ms"] < 1e4 for c in found["cases"]), found)
        text = ingot(*bench, "--lengths", "2").text
        self.assertRegex(text, r"given costs of steps: 100\.000 .*\n(?s:.*)drafts of 2, all accepted: [0-9.]+ ms a token, [0-9.]+ tokens a step, 19 of 19 draft tokens accepted\n")
        self.refuses(2, "found neither --model nor --synthetic", "bench", "draft")
        self.refuses(2, "found --draft-dense, which changes nothing with a model without a draft head", *bench, "--draft-dense", "fp8")
        self.refuses(2, "--lengths: found '0', expected numbers like", *bench, "--lengths", "0")
        too_long = ingot(*bench, "--lengths", "9")  # known once the model is open, whose line about its weights comes first
        self.assertEqual((too_long.returncode, too_long.text), (2, ""), too_long.error)
        self.assertRegex(too_long.error, r"\ningot bench draft: --lengths: found 9, expected at most 7, the longest draft that a step of this engine checks [^\n]+\n\Z")
        self.assertRegex(ingot(*bench, "--accepted", "0").text, r"\Asynthetic(?s:.*)\nno drafts: [0-9.]+ ms a token\n(?s:.*)each draft token accepted with 0 %: .*, 0 of \d+ draft tokens accepted\n")
        self.refuses(2, "--accepted: found 101, expected at most 100 %", *bench, "--accepted", "80,101")
        head = write_draft_head(self.directory / "head", 1000, 192, [1, 2])
        timed = json.loads(ingot(*bench[:8], "--tokens", 12, "--lengths", "3", "--draft", head, "--draft-dense", "fp8", "--json").text)
        self.assertGreater(timed["guess_cost"], 0)
        self.assertEqual(timed["cases"][-1]["name"], "guesses of the draft head")

    def test_a_models_tokens_are_timed(self):
        archive = self.directory / "tiny.ingot"
        self.assertEqual(ingot("convert", self.model, archive).returncode, 0)
        bench, read = ["bench", "decode", "--device", "cpu", "--context", 20, "--tokens", 6], []
        for model in (self.model, archive):
            run = ingot(*bench, "--model", model, "--contexts", "150,3", "--answers", "4:3,7:1", "--json")
            found = json.loads(run.text)
            self.assertEqual((found["model"], found["device"], found["context"], found["tokens"]), (str(model), "CPU", 20, 6), run.error)
            of_contexts = [found, *found["contexts"]]
            self.assertEqual([c["context"] for c in of_contexts], [20, 150, 3])
            for token in (c["token"]["cpu"] for c in of_contexts):
                self.assertTrue(0 < token["best_ms"] <= token["p50_ms"] <= token["p99_ms"] and token["best_ms"] <= token["mean_ms"] <= 1e4, token)
            self.assertGreater(found["first_token_ms"], 0)
            (sampled,) = found["sampled"]
            self.assertEqual((sampled["gpus"], list(sampled["token"])), (1, ["greedy", "temperature 1", "top-p 0.9", "top-k 40, min-p 0.05"]))
            self.assertTrue(all(0 < t["best_ms"] <= t["p50_ms"] <= t["p99_ms"] for t in sampled["token"].values()), sampled)
            self.assertEqual([(a["prompt"], a["tokens"]) for a in found["answers"]], [(4, 3), (7, 1)])
            self.assertTrue(all(0 < a["first_token_ms"] <= a["whole_ms"] for a in found["answers"]))
            # Keys and values of 2 heads of 8 numbers in fp32; the first layer's window is 128.
            read.append([c["token_bytes"] for c in of_contexts])
            self.assertEqual([read[-1][1] - b for b in read[-1]], [2 * 4 * 16 * (128 + 150 - 20 - 20), 0, 2 * 4 * 16 * (128 + 150 - 3 - 3)])
        # 64 + 32 rows of attention, a router of 3, 2 experts of 3 in blocks of 17 bytes, a head of 37: the contents of an archive, too.
        dense, experts = 2 * 32 * (64 + 32 + 3), 2 * 17 * (128 + 32 * 2)
        self.assertEqual(read, [[2 * (dense + experts) + 2 * 32 * 37 + 2 * 4 * 16 * (a + b) for a, b in ((20, 20), (128, 150), (3, 3))]] * 2)
        text = ingot(*bench, "--model", archive).text
        self.assertRegex(text, rf"\A{re.escape(str(archive))}, CPU, 20 tokens of context, 0.0 GB of weights\na token reads 0.000 GB\n"
                         r"cpu: mean [\d.]+ ms a token, p50 [\d.]+, p99 [\d.]+, best [\d.]+; \d+ tokens/s, [\d.]+ GB/s\ntokens through the decoder, as `generate` gets them:\n"
                         r"(  [a-z01].+: mean [\d.]+ ms a token, .*\n){4}time to first token: [\d.]+ ms\n\Z")
        self.assertNotIn("sampled", json.loads(ingot(*bench, "--model", archive, "--kernels-alone", "--json").text))
        self.refuses(2, "--device: found cpu without --model, expected one: random weights are made on a GPU", *bench)
        self.refuses(2, "found --phases, which changes nothing with --model", *bench, "--model", archive, "--phases")
        for name in ("--sequences", "--streams"):  # --streams is the earlier name, for one version
            self.refuses(2, "found --sequences, which changes nothing with --model", *bench, "--model", archive, name, "1,2")
        self.refuses(2, "--gpus: found 2 with device cpu", *bench, "--model", archive, "--gpus", 2)
        for several in ("2,4", "1,2"):
            self.refuses(2, f"--gpus: found {several} with --model, expected one number: a model is opened once", *bench, "--model", archive, "--gpus", several)
        self.assertEqual(json.loads(ingot(*bench, "--model", archive, "--gpus", 1, "--json").text)["gpus"], 1)
        for program in ("decode", "prompt"):
            self.refuses(2, "--gpus: found 9, expected numbers from 1 to 8", "bench", program, "--gpus", "2,9")
            self.refuses(2, "--gpus: found '2;4', expected numbers like 1,2,4,8", "bench", program, "--gpus", "2;4")
            self.refuses(2, "found --split, which changes nothing with one GPU", "bench", program, "--gpus", "1", "--split", "tensor")
        self.refuses(2, r"--context, --tokens, --contexts and --answers \(--kernels-alone needs fewer tokens\): found 131127 tokens, expected at most 131072, the model's context", *bench, "--model", archive, "--contexts", 131072)
        self.refuses(2, "--answers: found 131083 tokens", *bench, "--model", archive, "--contexts", 131072, "--kernels-alone")
        for option, found in (("--answers", "4:9223372036854775807"), ("--answers", "4"), ("--contexts", "3,0"), ("--contexts", "3,"), ("--contexts", 1 << 62)):
            self.refuses(2, f"{option}: found '{found}', expected numbers like", *bench, "--model", archive, option, found)
        self.refuses(4, "none: found no such file or directory, expected GPT-OSS", *bench, "--model", self.directory / "none")

    def test_random_weights_take_the_place_of_a_model(self):
        whole = ["generate", "--synthetic", "small", "--device", "cpu", "--tokens", 6]
        run = ingot(*whole, "--ids", self.ids, "--only-new")
        self.assertEqual(run.returncode, 0, run.error)
        self.assertIn("synthetic:small: random weights: every answer is random text", run.error)
        for line in run.text.splitlines():
            self.assertEqual(len(json.loads(line)), 6)
        self.assertEqual(ingot("generate", "--model", "synthetic:small", *whole[3:], "--ids", self.ids, "--only-new").text, run.text)
        self.assertNotEqual(ingot(*whole, "--dense", "mxfp4", "--ids", self.ids, "--only-new").text, run.text)
        for more in (["--raw"], []):
            answer = ingot(*whole, "--prompt", "Hi", "--json", *more)
            self.assertEqual((answer.returncode, len(json.loads(answer.text)["ids"])), (0, 6), answer.error)
        self.refuses(2, "found --synthetic and --model, expected one of them", *whole, "--model", self.model, "--ids", self.ids)
        self.refuses(2, "found --synthetic and RUN, expected one of them", *whole, self.model, "--ids", self.ids)
        # Of equally likely tokens, min-p 1 keeps all; logits of random weights are different.
        likeliest = ingot(*whole, "--ids", self.ids, "--only-new", "--temperature", 0).text
        self.assertEqual(ingot(*whole, "--ids", self.ids, "--only-new", "--min-p", 1).text, likeliest)
        self.refuses(2, "--min-p: found .1.5., expected a number from 0 to 1", *whole, "--ids", self.ids, "--min-p", 1.5)

    def test_random_weights_are_described_by_their_name_or_the_error_says_how_to_ask_for_them(self):
        described = json.loads(ingot("info", "synthetic:20b", "--json").text)
        self.assertEqual((described["parameters"], described["parameters_per_token"]), (20914757184, 4187440704))
        self.assertEqual((described["dense"], described["experts"], described["config"]["num_hidden_layers"]), ("bf16", "mxfp4", 24))
        self.assertTrue(13e9 < described["memory_bytes"]["weights"] < 15e9, described["memory_bytes"])
        made = os.path.join(self.directory, "small.ingot")
        self.assertEqual(ingot("convert", "--synthetic", "small", "--dense", "fp8", made).returncode, 0)
        of_file, of_name = (json.loads(ingot("info", model, "--json").text) for model in (made, "synthetic:small:fp8"))
        for key in ("parameters", "parameters_per_token", "dense", "experts", "memory_bytes", "config"):
            self.assertEqual(of_name[key], of_file[key], key)
        self.assertIn("random, dense fp8, experts mxfp4", ingot("info", "synthetic:small:fp8").text)
        self.refuses(2, "synthetic:7b: found the size '7b', expected 20b, 120b or small", "info", "synthetic:7b")
        expected = "found the name of random weights, expected a path, or --synthetic 20b --dense fp8 in its place"
        self.refuses(2, "synthetic:20b:fp8: " + expected, "convert", "synthetic:20b:fp8", made)
        self.refuses(2, "synthetic:20b:fp8: " + expected, "bench", "decode", "--model", "synthetic:20b:fp8", "--device", "cpu")
        self.refuses(7, "synthetic:20b: found no GPU for these weights", "generate", "--synthetic", "20b", "--device", "cpu", "--ids", self.ids)

    def test_dense_matrices_of_a_checkpoint_become_an_archives_at_loading(self):
        archive = self.directory / "fp8.ingot"
        self.assertEqual(ingot("convert", self.model, archive, "--dense", "fp8").returncode, 0)
        whole = ["--ids", self.ids, "--tokens", 6, "--only-new"]
        run = ingot("generate", "--model", self.model, "--dense", "fp8", *whole)
        self.assertEqual(run.text, ingot("generate", "--model", archive, *whole).text)
        self.assertRegex(run.error, "dense matrices became fp8 at loading, .* of weights")
        self.refuses(2, "--dense: found an archive", "generate", "--model", archive, "--dense", "mxfp4", *whole)

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
        for model, read in ((made, made), (made, ids), (self.model, next(self.model.glob("*.safetensors")))):
            self.refuses(2, "found a file that is read here, expected another name", "generate", "--model", model, "--ids", ids, "--trace", read, "--device", "cpu")
        self.refuses(7, "--trace: found a model on cpu whose tokens keep no times", "generate", "--model", made, "--ids", ids, "--trace", "t.json", "--device", "cpu")
        self.assertFalse(os.path.exists("t.json"))
        os.remove(made)
        self.refuses(2, "found no OUT", "convert", self.model)
        self.refuses(2, "found no OUT, expected the archive's name", "convert", "--synthetic", "small")
        self.refuses(2, "found no FROM", "convert")
        self.refuses(2, "ids.jsonl: found a file that is no archive", "convert", "--synthetic", "small", self.ids)
        self.refuses(2, "gpt-oss-tiny: found no archive to verify", "convert", "--verify", self.model)
        self.refuses(7, "found no checkpoint, expected GPT-OSS", "convert", self.directory, archive)
        self.refuses(4, "missing: found no such file", "convert", self.directory / "missing", archive)
        self.refuses(2, "expected one of bf16, fp8, mxfp4", "convert", self.model, archive, "--dense", "int8")
        self.refuses(4, "missing/x.ingot: found no directory .*missing, expected one to write to", "convert", self.model, self.directory / "missing" / "x.ingot")
        (self.model / "model-00001-of-00001.safetensors").unlink()
        self.refuses(4, "names the shard", "convert", self.model, archive)
        self.assertEqual(list(self.directory.glob("*.ingot*")), [])

    def test_commands_for_runs_refuse_a_published_model(self):
        archive, text = self.directory / "tiny.ingot", self.file("text.txt", TEXT)
        self.assertEqual(ingot("convert", self.model, archive).returncode, 0)
        for model in (self.model, archive):
            for command in (["export", model, self.directory / "x.ingot", "--data", text], ["ttt", model, "--file", text, "--out", self.directory / "x"],
                            ["train", *TINY[2:], "--data", text, "--init-from", model, "--out", self.directory / "x"]):
                self.refuses(7, "found a published model, expected a run of `ingot train`", *command)
        self.assertEqual(list(self.directory.glob("x*")), [])

    def test_a_loss_beyond_any_perplexity_is_an_error(self):
        file = self.model / self.index["weight_map"]["model.norm.weight"]
        content = bytearray(file.read_bytes())
        begin = 8 + struct.unpack("<Q", content[:8])[0]
        first, last = json.loads(content[8:begin])["model.norm.weight"]["data_offsets"]
        content[begin + first:begin + last] = b"\x49\x71" * ((last - first) // 2)  # 1e30
        file.write_bytes(content)
        run = ingot("eval", "--model", self.model, "--ids", self.ids, "--json")
        self.assertEqual(run.returncode, 0, run.error)
        self.assertGreater(json.loads(run.text)["loss"], 1e6)
        self.assertIsNone(json.loads(run.text)["perplexity"])

    def test_quant_changes_the_losses_a_little_and_is_of_gpt_oss_alone(self):
        plain, rounded = (json.loads(ingot("eval", "--model", self.model, "--ids", self.ids, "--json", *more).text) for more in ([], ["--quant"]))
        self.assertNotEqual(plain["loss"], rounded["loss"])
        self.assertAlmostEqual(plain["loss"], rounded["loss"], delta=0.05)
        ids = [ingot("generate", "--model", self.model, "--ids", self.ids, "--tokens", 3, "--temperature", 0, *more).text for more in (["--quant"], ["--quant"])]
        self.assertEqual(*ids)
        run = self.directory / "no-model"
        run.mkdir()
        self.refuses(2, "--quant: found", "generate", run, "--ids", self.ids, "--quant")

    def test_accuracy_names_every_form_and_component(self):
        report = json.loads(ingot("eval", "accuracy", "--model", self.model, "--ids", self.ids, "--json").text)
        self.assertEqual([(r["form"], r["component"]) for r in report["results"]],
                         [(f"dense {f}", c) for f in ("fp8", "mxfp4") for c in ("qkv", "o", "head", "qkv, o, head")] + [("inputs e4m3 (--quant)", "experts")])
        self.assertEqual(report["tokens"], 6)
        plain = json.loads(ingot("eval", "--model", self.model, "--ids", self.ids, "--json", "--device", "cpu").text)
        self.assertAlmostEqual(report["loss"], plain["loss"], places=6)
        for r in report["results"]:
            self.assertTrue(0 <= r["top1"] <= 1 and 0 <= r["top5_overlap"] <= 1 and r["kl"] >= 0 and r["cosine"] <= 1 and r["mean_rank"] >= 1, r)
        archive = self.directory / "x.ingot"
        self.assertEqual(ingot("convert", self.model, archive).returncode, 0)
        text = ingot("eval", "accuracy", "--model", self.model, "--ids", self.ids, "--archive", archive).text
        self.assertRegex(text, r"x\.ingot +archive .* 100\.00 %")
        self.refuses(7, "found no checkpoint, expected GPT-OSS", "eval", "accuracy", "--model", self.directory, "--ids", self.ids)
        self.refuses(2, "--ids", "eval", "accuracy", "--model", self.model)

    def test_bad_requests_and_checkpoints_are_refused_in_one_line(self):
        generate = ["generate", "--model", self.model, "--ids", self.ids]
        self.refuses(2, "found neither RUN nor --model", "generate", "--ids", self.ids)
        self.refuses(2, "--layers: found 3, expected at most 2", *generate, "--layers", 3)
        self.refuses(2, r"the prompt and --tokens: found 1310\d\d tokens, expected at most 131072, the model's context", *generate, "--tokens", 131072)
        for command in (["generate", "--prompt", "x"], ["generate", "--prompt", "x", "--raw"], ["chat"]):
            self.refuses(4, "gpt-oss-tiny: found a model without a tokenizer, expected a tokenizer.json or o200k_base.tiktoken beside the weights, or --tok",
                         *command, "--model", self.model)
        self.refuses(4, "gpt-oss-tiny: found no tokenizer in this directory, expected a tokenizer.json, a tokenizer.model of SentencePiece, a .tiktoken or a GGUF",
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


class OddRows(TinyGptOss):
    HEADS, KV = 5, 5  # 40 numbers in a row of attention's output

    def test_accuracy_leaves_out_matrices_that_blocks_do_not_divide(self):
        run = ingot("eval", "accuracy", "--model", self.model, "--ids", self.file("ids.jsonl", "[1, 2, 3]"), "--json")
        self.assertEqual(run.returncode, 0, run.error)
        self.assertEqual([r["component"] for r in json.loads(run.text)["results"] if r["form"] == "dense mxfp4"], ["qkv", "head"])
        self.assertIn("dense mxfp4, o: left out: found rows of 40 numbers, expected a multiple of 32 for mxfp4\n", run.error)


class Chat(TinyGptOss):
    """The same checkpoint with a vocabulary of the Harmony format. The answers of a random model have every fault that a header can have."""
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
        self.env = dict(INGOT_DATE="none", INGOT_TOKENS="30")  # flags override these

    def test_the_tokenizer_of_an_archive_is_that_of_its_checkpoint(self):
        archive = self.directory / "with_tokenizer.ingot"
        self.assertEqual(ingot("convert", self.model, archive).returncode, 0)
        text = "assistant: \u65e5\u672c system"
        ids = [ingot("tokenizer", "encode", "--tokenizer", path, stdin=text.encode()).text for path in (archive, self.model / "tokenizer.json")]
        self.assertRegex(ids[0], r"\A\d+( \d+)+\n\Z")
        self.assertEqual(ids[0], ids[1])
        self.assertEqual(ingot("tokenizer", "decode", "--tokenizer", archive, stdin=ids[0].encode()).text, text)
        (self.model / "tokenizer.json").unlink()
        bare = self.directory / "bare.ingot"
        self.assertEqual(ingot("convert", self.model, bare).returncode, 0)
        self.refuses(4, "bare.ingot: found a model without a tokenizer, expected one in the file", "tokenizer", "encode", "--tokenizer", bare)

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
        for chat in (self.chat, ["chat", self.model]):
            self.assertEqual(json.loads(ingot(*chat, "--json", "--temperature", 0, stdin=b"Hi.\n", env=self.env).text)["ids"], answers[0]["ids"])

    def test_settings_change_the_answer(self):
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
        first, second = ids("--temperature", 0, turns=b"Hi.\n/new \nHi.\n/quit \t\nHi.\n")
        self.assertEqual(first, second)
        stop = first[1][0]
        self.assertEqual(ids("--temperature", 0, "--stop-id", stop)[0][1], [])

    def test_a_stop_id_ends_whatever_generate_writes(self):
        ids = self.file("ids.jsonl", "[1, 2, 3]\n")
        run = self.directory / "run"
        self.assertEqual(ingot("train", *TINY, "--steps", 2, "--data", self.file("text.txt", TEXT), "--out", run).returncode, 0)
        for words in (["--model", self.model, "--prompt", "Hi."], ["--model", self.model, "--raw", "--prompt", "system"], ["--model", self.model, "--ids", ids],
                      [run, "--prompt", "The"], [run, "--ids", ids]):
            with self.subTest(words=words):
                def answer(*more):
                    done = ingot("generate", *words, "--json", "--tokens", 8, "--seed", 3, *more, env=dict(INGOT_DATE="none"))
                    self.assertEqual(done.returncode, 0, done.error)
                    return json.loads(done.text)
                whole = answer()["ids"]
                self.assertGreater(len(whole), 2)
                stop = whole[2]
                cut = answer("--stop-id", stop, "--stop-id", 7)
                self.assertEqual(cut["ids"], whole[:min(whole.index(i) for i in (stop, 7) if i in whole)])
                self.assertEqual(cut["finish"], "stop")
                for key in (f"stop_id=[{stop}, 7]", f'stop_id=["{stop}", 7]'):
                    self.assertEqual(answer("--set", key)["ids"], cut["ids"])
                self.assertEqual(answer("--set", f"stop_id={stop}")["ids"], whole[:whole.index(stop)])
                self.refuses(2, "--stop-id: found '-1', expected an id from 0 to ", "generate", *words, "--stop-id", -1)

    def test_a_stop_string_ends_the_text_before_it(self):
        run = self.directory / "run"
        self.assertEqual(ingot("train", *TINY, "--steps", 2, "--data", self.file("text.txt", TEXT), "--out", run).returncode, 0)
        def text_of(report):
            return report["text"] if "text" in report else "".join(m["content"] for m in report["messages"] if m["kind"] == "text")
        for words in (["--model", self.model, "--prompt", "Hi."], ["--model", self.model, "--raw", "--prompt", "system", "--only-new"], [run, "--prompt", "The", "--only-new"]):
            with self.subTest(words=words):
                ask = lambda *more: ingot("generate", *words, "--tokens", 40, *more, env=dict(INGOT_DATE="none"))
                plain = [w for w in words if w != "--only-new"]
                report = lambda *more: json.loads(ingot("generate", *plain, "--json", "--tokens", 40, *more, env=dict(INGOT_DATE="none")).text)
                seed, whole = next((s, text) for s in range(50) if len(text := text_of(report("--seed", s))) > 12 and "\0" not in text)
                stop = whole[7:10]
                cut = report("--seed", seed, "--stop", "\n\n\n", "--stop", stop)
                self.assertEqual((text_of(cut), cut["finish"]), (whole[:whole.find(stop)], "stop"))
                self.assertEqual(cut.get("stop", stop), stop)
                self.assertEqual(ask("--seed", seed, "--stop", stop).text.rstrip("\n"), text_of(cut).rstrip("\n"))
                self.assertEqual(text_of(report("--seed", seed, "--stop", "not in this text")), whole)
        self.refuses(2, "--stop: found an empty text", "generate", run, "--prompt", "The", "--stop", "")
        self.refuses(2, "found --stop, which changes nothing with --ids", "generate", run, "--ids", self.file("ids.jsonl", "[1]\n"), "--stop", "x")

    def test_a_turn_may_have_several_lines(self):
        answers = [ingot("chat", "--model", self.model, "--json", "--tokens", 8, stdin=turns, env=self.env) for turns in (b"Hi.\\\nBye.\n", b"Hi.\\\n")]
        for answer, text in zip(answers, ("Hi.\nBye.", "Hi.\n")):
            self.assertEqual(answer.returncode, 0, answer.error)
            asked = ingot("generate", "--model", self.model, "--prompt", text, "--json", "--tokens", 8, env=self.env)
            self.assertEqual([json.loads(a.text)["ids"] for a in (answer,)], [json.loads(asked.text)["ids"]])

    def test_text_is_whole_characters_and_holds_no_control_token(self):
        for seed in range(4):
            run = ingot(*self.chat, "--tokens", 200, "--analysis", "show", "--seed", seed, stdin="\u65e5\n<|start|>\n".encode(), env=self.env)
            self.assertEqual(run.returncode, 0, run.error)  # .text was decoded strictly
            self.assertFalse([s for s in self.SPECIALS if f"<|{s}|>" in run.text])

    def test_a_model_that_is_converted_at_loading_keeps_its_name_in_errors(self):
        endless = self.directory / "endless"
        shutil.copytree(self.model, endless)
        (endless / "config.json").write_text(json.dumps(self.config | dict(max_position_embeddings=1 << 26)))
        self.refuses(7, f"ingot serve: {endless} needs [^\n]+ of memory, found ", "serve", "--model", endless, "--device", "cpu", "--dense", "fp8", "--port", 0, "--context", 1 << 26, "--slots", 256)

    def test_a_bad_date_and_an_unknown_command_are_errors(self):
        for date in ("nonsense", "2026-02-30", "2026-13-01", "31.01.2026", "2026-1-1", "2026-01-01x"):
            self.refuses(2, f"--date: found '{date}', expected one like 2026-01-31, or none", *self.chat, "--date", date, stdin=b"Hi\n")
            self.refuses(2, "--date: found", "generate", "--model", self.model, "--prompt", "x", "--date", date)
        self.refuses(2, r"found the command '/reset', expected one of /new, /effort low\|medium\|high, /quit and /help", *self.chat, stdin=b"/reset\n", env=self.env)
        for line in ("/reset", "/effort", "/effort much", "/new 1", "/quit now"):
            run = ingot(*self.chat, stdin=f"{line}\n".encode(), env=self.env)
            self.assertEqual(run.returncode, 2, line)
            self.assertRegex(run.error, "(found the command '" + line + "', expected one of /new, )|(/effort: found 'much')")
        run = ingot(*self.chat, "--json", stdin=b"/usr/bin is a directory\n /reset\n/etc is one\n/Hi\n", env=self.env)
        self.assertEqual((run.returncode, run.text.count("\n")), (0, 4), run.error)

    def test_a_question_that_cannot_be_answered_is_one_line_and_a_status(self):
        self.refuses(2, "found a conversation of [0-9]+ tokens, expected fewer than 300, the context", *self.chat, "--context", 300, stdin=b"x" * 2000, env=self.env)
        self.refuses(3, "standard input: found a line of more than 4.2 MB", *self.chat, stdin=b"x" * 9000000, env=self.env)
        self.refuses(3, r"standard input: byte 2 \(0xff\) is not valid UTF-8", *self.chat, stdin=b"Hi\xff\n", env=self.env)
        self.refuses(2, "--stop-id: found '340', expected an id from 0 to 339", *self.chat, "--stop-id", 340, stdin=b"Hi\n", env=self.env)
        self.refuses(2, "reasoning: found", *self.chat, "--reasoning", "some", stdin=b"Hi\n", env=self.env)
        self.refuses(2, "found neither PATH nor --model, expected one of them", "chat")
        self.refuses(2, "found PATH and --model, expected one of them", *self.chat, self.model)
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
        self.refuses(7, r"found no checkpoint, expected GPT-OSS, Llama, Mistral, Qwen or Gemma \(docs/models.md\): a directory with config.json and", "chat", "--model", self.directory, stdin=b"Hi\n")

    def test_interrupting_stops_the_answer_and_not_the_chat(self):
        shard = next(p for p in self.model.glob("*.safetensors") if b"lm_head" in p.read_bytes())
        data = bytearray(shard.read_bytes())
        begin = 8 + struct.unpack_from("<Q", data)[0]
        begin += json.loads(data[8:begin])["lm_head.weight"]["data_offsets"][0]
        data[begin : begin + 2 * self.HIDDEN * len(self.SPECIALS)] = bytes(2 * self.HIDDEN * len(self.SPECIALS))  # the model never ends an answer
        shard.write_bytes(data)
        command = [BINARY, *map(str, self.chat), "--context", "60000", "--tokens", "50000", "--json", "--temperature", "0", "--device", "cpu"]
        run = start(*command[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        answers = []
        for turn in (b"/help\nHi.\n", b"/help\nMore.\n"):  # the help stands on standard error just before the answer begins
            run.stdin.write(turn)
            run.stdin.flush()
            run.stderr.readline()  # before the first answer SIGINT ends the server
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
            windows = [(0, min(n, context + 1), 1)]  # begin, end and the first scored token
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
        self.stops_scoring(signal.SIGINT, r", [0-9]\.[0-9]{4} bits per byte", "eval", "--model", self.model, "--data", self.file("much.txt", TEXT * 4), "--context", 32,
                           "--stride", 1, "--device", "cpu", "--threads", 1)
        self.assertRegex(ingot(*evaluate[:-1]).text, r"texts \(2 documents, 2 windows\): perplexity \d+\.\d{3}, loss .* bits per byte over [\d,]+ tokens")
        for option in (["--split", "all"], ["--batch-tokens", 64], ["--flat"]):
            self.refuses(2, f"found {option[0]}, which changes nothing with a published model", *evaluate, *option)
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
        self.refuses(3, "other.json: found a tokenizer without the control tokens of a chat format .*, or --raw to continue", *generate, "--prompt", "Hi", "--tokenizer", other)
        run = ingot(*generate, "--prompt", "Hi", "--tokenizer", other, "--raw")
        self.assertEqual(run.returncode, 0, run.error)
        for option in ("--only-new", "--past-end"):
            self.refuses(2, f"found {option}, which changes nothing with a question", *generate, "--prompt", "Hi", option)
        self.refuses(2, "found --only-new, which changes nothing with --json", *generate, "--prompt", "Hi", "--raw", "--only-new", "--json")
        bad = self.file("bad.txt", b"a\xff")
        for more in ([], ["--raw"]):
            self.refuses(3, "bad.txt: byte 1 .* is not valid UTF-8", *generate, "--file", bad, *more)
            self.refuses(3, "standard input: byte 1 .* is not valid UTF-8", *generate, *more, stdin=b"a\xff")

    def test_generate_asks_in_harmony_or_continues_raw_text(self):
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


if __name__ == "__main__":
    unittest.main(argv=sys.argv)
