"""ingot eval --ttt from the command line, and the checker of its log.

    python3 tests/adaptation_test.py BINARY [unittest options]
"""
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import unittest

from program import SANITIZED, ingot, train_small

TOOLS = pathlib.Path(__file__).resolve().parent.parent / "tools"
sys.path.insert(0, str(TOOLS))
import check_adaptation  # noqa: E402

TTT = ("--ttt", "--ttt-chunk", 8, "--ttt-window", 48, "--ttt-rank", 4, "--ttt-lr", 3e-3)


class Adaptation(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        holder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(holder.cleanup)
        cls.directory = pathlib.Path(holder.name)
        rng = random.Random(1)
        words = ["river", "stone", "lantern", "orchard", "signal", "harbour", "winter", "copper"]
        cls.data = cls.directory / "text"
        cls.data.mkdir()
        for i in range(5 if SANITIZED else 12):  # each document has its own word, which its adapters can learn
            own = "".join(rng.choice("abcdefgh") for _ in range(9))
            (cls.data / f"{i}.txt").write_text(" ".join(f"the {rng.choice(words)} of {own}," for _ in range(12 + i)) + "\n")
        cls.run_directory = cls.directory / "run"
        train_small(cls.data, cls.run_directory, 80)

    def score(self, *options):
        run = ingot("eval", self.run_directory, "--data", self.data, "--split", "all", "--device", "cpu", "--json", *options)
        self.assertEqual(run.returncode, 0, run.error)
        return json.loads(run.text)

    def refuses(self, message, *options, run_directory=None):
        run = ingot("eval", run_directory or self.run_directory, "--data", self.data, "--device", "cpu", *options)
        self.assertNotEqual(run.returncode, 0)
        self.assertEqual(run.text, "")
        self.assertRegex(run.error, r"\Aingot( [a-z]+)*: [^\n]+\n\Z")
        self.assertRegex(run.error, message)

    def test_adaptation_learns_its_log_is_honest_and_batches_change_nothing(self):
        log = self.directory / "log.jsonl"
        plain, adapted = self.score("--context", 48, "--stride", 8), self.score(*TTT, "--ttt-log", log)
        self.assertEqual(adapted["targets"], plain["targets"])
        self.assertEqual(adapted["bytes"], plain["bytes"])
        self.assertLess(adapted["bits_per_byte"], 0.99 * plain["bits_per_byte"])
        events = [json.loads(line) for line in log.read_text().splitlines()]
        documents, chunks, targets, _ = check_adaptation.check(events, adapted)
        self.assertEqual((documents, targets), (adapted["documents"], adapted["targets"]))
        self.assertEqual(adapted["ttt"]["updates"], chunks - documents)
        again = self.directory / "again.jsonl"
        one = self.score(*TTT, "--ttt-documents", 1, "--ttt-log", again)
        self.assertEqual(one["loss"], adapted["loss"])
        whole = one["ttt"]["whole_windows"]
        self.assertEqual(whole["window_tokens"] % 48, 0)
        self.assertGreater(whole["window_tokens_per_second"], 0)
        self.assertEqual(self.score(*TTT, "--ttt-any-order")["loss"], adapted["loss"])  # a CPU has a fixed order
        self.assertEqual(sorted(again.read_text().splitlines()), sorted(log.read_text().splitlines()))
        run = subprocess.run([sys.executable, TOOLS / "check_adaptation.py", log], capture_output=True, text=True)
        self.assertEqual((run.returncode, run.stderr), (0, ""))
        self.assertIn(f"{documents} documents, {chunks} chunks", run.stdout)

    @unittest.skipIf(SANITIZED, "the same loops with other numbers")
    def test_the_constants_of_a_step_are_options(self):
        default = self.score(*TTT)
        self.assertEqual([default["ttt"][k] for k in ("beta2", "eps", "lr")], [0.999, 1e-10, 3e-3])
        self.assertEqual(self.score(*TTT, "--ttt-beta2", 0.999, "--ttt-eps", 1e-10)["loss"], default["loss"])
        other = self.score(*TTT, "--ttt-beta2", 0.5)
        self.assertEqual(other["ttt"]["beta2"], 0.5)
        self.assertNotEqual(other["loss"], default["loss"])
        self.assertGreater(self.score(*TTT, "--ttt-eps", 1)["loss"], 1.005 * default["loss"])  # the steps are almost zero
        losses = [self.learn(self.directory / f"step{i}.safetensors", *step)[1]["loss"] for i, step in enumerate(((), ("--ttt-beta2", 0.5), ("--ttt-eps", 1)))]
        self.assertEqual(len(set(losses)), 3)
        self.assertLess(losses[0], losses[2])
        self.refuses(r"found beta2 1, expected it in \[0, 1\)", *TTT, "--ttt-beta2", 1)
        self.refuses(r"--ttt-eps", *TTT, "--ttt-eps", 0)
        for option in ("--ttt-beta2", "--ttt-eps"):
            self.refuses(f"found {option}, which changes nothing with a score without --ttt", option, 0.5)
            run = ingot("generate", self.run_directory, "--prompt", "the", "--tokens", 1, option, 0.5)
            self.assertRegex(run.error, f"found {option}, which changes nothing with an answer without --ttt")

    def test_ranks_share_the_documents_and_change_nothing(self):
        alone, shared = self.directory / "alone.jsonl", self.directory / "shared.jsonl"
        one, three = self.score(*TTT, "--ttt-log", alone), self.score(*TTT, "--ranks", 3, "--ttt-log", shared)
        for key in ("loss", "bits_per_byte", "targets", "bytes", "documents"):
            self.assertEqual(three[key], one[key], key)
        for key in ("updates", "window_tokens"):
            self.assertEqual(three["ttt"][key], one["ttt"][key], key)
        self.assertEqual(sorted(shared.read_text().splitlines()), sorted(alone.read_text().splitlines()))
        check_adaptation.check([json.loads(line) for line in shared.read_text().splitlines()], three)
        self.refuses(r"--ranks", "--ranks", 2)
        self.refuses(r"no/such/log.jsonl", *TTT, "--ranks", 2, "--ttt-log", self.directory / "no/such/log.jsonl")

    def test_the_checker_finds_dishonest_logs(self):
        log = self.directory / "honest.jsonl"
        report = self.score(*TTT, "--ttt-log", log)
        honest = [json.loads(line) for line in log.read_text().splitlines()]
        check_adaptation.check(honest, report)

        def altered(change):
            events = [dict(e) for e in honest]
            change(events)
            with self.assertRaises(ValueError):
                check_adaptation.check(events, report)

        update = next(i for i, e in enumerate(honest) if e["event"] == "update")
        score = max(i for i, e in enumerate(honest[:update])
                    if e["event"] == "score" and e["document"] == honest[update]["document"])
        altered(lambda e: e.insert(score, e.pop(update)))                  # an update before the chunk's score
        altered(lambda e: e.pop(score))                                    # never scored
        altered(lambda e: e.append(dict(honest[score])))                   # scored twice
        altered(lambda e: e[-1].update(updates=e[-1]["updates"] + 1))      # with more updates than chunks before
        altered(lambda e: e[score].update(loss_sum=0))                     # another score than was reported
        altered(lambda e: e[score].update(end=e[score]["end"] + 1))        # a target of two chunks
        altered(lambda e: e.clear())                                       # nothing at all
        first, other = min((e["first"], e["document"]) for e in honest), max((e["first"], e["document"]) for e in honest)
        altered(lambda e: [x.update(first=x["first"] - other[0] + first[0], end=x["end"] - other[0] + first[0])
                           for x in e if x["document"] == other[1]])           # a document's targets twice, a second document's never
        empty, text = self.directory / "empty.jsonl", self.directory / "other.jsonl"
        empty.write_text("")
        text.write_text("[1]\n")
        for arguments in ([], [empty], [text], [self.directory / "absent"], [log, text]):
            run = subprocess.run([sys.executable, TOOLS / "check_adaptation.py", *arguments], capture_output=True, text=True)
            self.assertEqual((run.returncode, run.stdout), (1, ""), arguments)
            self.assertRegex(run.stderr, r"\A[^\n]+\n\Z", arguments)

    def learn(self, out, *options):
        text = self.directory / "learnt.txt"
        text.write_text("the copper of abcdefgh, " * 20)
        run = ingot("ttt", self.run_directory, "--file", text, "--out", out, *TTT[1:], "--device", "cpu", "--json", *options)
        self.assertEqual(run.returncode, 0, run.error)
        return text, json.loads(run.text)

    def test_adapters_are_learnt_saved_and_used(self):
        adapters = self.directory / "adapters.safetensors"
        text, report = self.learn(adapters)
        self.assertEqual(report["updates"], -(-report["targets"] // 8))
        self.assertEqual(report["device"], "cpu")
        prompt = ("--file", text, "--temperature", 0, "--tokens", 30, "--device", "cpu", "--json")

        def go_on(*options):
            run = ingot("generate", self.run_directory, *prompt, *options)
            self.assertEqual(run.returncode, 0, run.error)
            return json.loads(run.text)["ids"]

        learnt = go_on("--adapters", adapters)
        self.assertEqual(go_on(*TTT), learnt)
        self.assertNotEqual(go_on(), learnt)
        thrice = self.directory / "thrice.safetensors"
        self.assertEqual(self.learn(thrice, "--passes", 3)[1]["updates"], 3 * report["updates"])
        self.assertLess(self.learn(self.directory / "on.safetensors", "--ttt-adapters", thrice)[1]["loss"], 0.9 * report["loss"])
        again = self.directory / "again.safetensors"
        self.learn(again)
        self.assertEqual(again.read_bytes(), adapters.read_bytes())

    def test_a_gpu_trains_and_continues_or_names_the_missing_parts(self):
        here, there = self.directory / "here.safetensors", self.directory / "there.safetensors"
        text, on_cpu = self.learn(here)
        prompt = ("generate", self.run_directory, "--file", text, "--temperature", 0, "--tokens", 30, "--json", "--device", "cuda")
        run = ingot("ttt", self.run_directory, "--file", text, "--out", there, *TTT[1:], "--json", "--device", "cuda")
        if run.returncode != 0:
            for refused in (run, ingot(*prompt, *TTT), ingot(*prompt, "--adapters", here)):
                self.assertEqual((refused.returncode, refused.text), (7, ""), refused.error)
                self.assertRegex(refused.error, r"\Aingot (ttt|generate): device cuda: found [^\n]+\n\Z")
            self.assertFalse(there.exists())
            return
        on_gpu = json.loads(run.text)
        self.assertEqual([on_gpu[k] for k in ("device", "targets", "updates")], ["cuda", on_cpu["targets"], on_cpu["updates"]])
        self.assertAlmostEqual(on_gpu["loss"], on_cpu["loss"], delta=0.02 * on_cpu["loss"])
        answers = [ingot(*prompt, *options) for options in (TTT, ("--adapters", there), ())]
        self.assertEqual([run.returncode for run in answers], [0, 0, 0], answers[0].error)
        learnt, again, plain = (json.loads(run.text)["ids"] for run in answers)
        self.assertEqual(learnt, again)
        self.assertNotEqual(learnt, plain)

    def test_adapters_that_do_not_fit_are_refused(self):
        adapters = self.directory / "fit.safetensors"
        self.learn(adapters)
        self.refuses(r"\(4, 64\).*\(3, 64\)|\(3, 64\).*\(4, 64\)", *TTT[:5], "--ttt-rank", 3, "--ttt-adapters", adapters)
        weights = next(self.run_directory.glob("step-*/model.safetensors"))
        for wrong, message in ((weights, "no head.a"), (self.directory / "nowhere", "nowhere")):
            run = ingot("generate", self.run_directory, "--prompt", "the", "--adapters", wrong)
            self.assertRegex(run.error, message)
            self.assertEqual(run.text, "")
        other = self.directory / "other.safetensors"
        made_with = self.score()["parameter_hash"].encode()
        other.write_bytes(adapters.read_bytes().replace(made_with, b"0" * len(made_with)))
        run = ingot("generate", self.run_directory, "--prompt", "the", "--adapters", other)
        self.assertRegex(run.error, "found adapters of a model with parameter hash 000000000000, expected")
        self.refuses("found adapters of a model with parameter hash", *TTT, "--ttt-adapters", other)
        damaged = bytearray(adapters.read_bytes())
        damaged[-4:] = b"\x00\x00\xc0\x7f"
        nan = self.directory / "nan.safetensors"
        nan.write_bytes(damaged)
        run = ingot("generate", self.run_directory, "--prompt", "the", "--adapters", nan)
        self.assertRegex(run.error, "nan in an adapter, expected finite numbers")
        out = self.directory / "short.safetensors"
        empty = self.directory / "empty.txt"
        empty.write_text("t")
        run = ingot("ttt", self.run_directory, "--file", empty, "--out", out, *TTT[1:])
        self.assertNotEqual(run.returncode, 0)
        self.assertRegex(run.error, "number of tokens to learn from: found [01], expected at least 2")
        self.assertFalse(out.exists())

    def test_input_files_and_other_files_are_not_replaced(self):
        adapters, text = self.directory / "mine.safetensors", self.directory / "notes.txt"
        self.learn(adapters), self.learn(adapters)
        text.write_text("notes")
        checkpoint = next(self.run_directory.glob("step-*"))
        theirs = [*checkpoint.iterdir(), *(self.run_directory / name for name in ("config.json", "tokenizer.json", "log.jsonl", "best.json")), text]
        self.assertGreater(len(theirs), 7)
        before = {path: path.read_bytes() for path in theirs}
        read = "found a file that is read here, expected another name for the result"
        for path in theirs:
            message = "found a file that holds no adapters, expected a new name or adapters to replace" if path == text else read
            for run_directory in (self.run_directory, checkpoint, self.run_directory / "best"):
                run = ingot("ttt", run_directory, "--file", self.data / "1.txt", "--out", path, *TTT[1:], "--device", "cpu")
                self.assertEqual((run.returncode, run.text), (2, ""), path)
                self.assertIn(message, run.error)
                if path != text:
                    self.refuses(read, *TTT, "--ttt-log", path, run_directory=run_directory)
        run = ingot("ttt", self.run_directory, "--file", self.data / "1.txt", "--out", "/dev/full", *TTT[1:], "--device", "cpu")
        self.assertEqual((run.returncode, run.text), (5, ""))
        self.assertRegex(run.error, r"\Aingot ttt: /dev/full: found a special file, expected a regular file[^\n]*\n\Z")
        self.assertEqual({path: path.read_bytes() for path in theirs}, before)

    def test_the_default_window_is_one_that_the_model_supports(self):
        self.assertEqual(self.score("--ttt", "--ttt-rank", 2)["ttt"]["window"], 64)  # the context: positions are learned

    def test_impossible_requests_are_one_line(self):
        self.refuses("--ttt-rank.*without --ttt", "--ttt-rank", 4)
        self.refuses("--ttt-any-order.*without --ttt", "--ttt-any-order")
        self.refuses("--stride.*windows of its own", "--ttt", "--stride", 8)
        self.refuses("a window of 16, expected at least the chunk of 32", "--ttt", "--ttt-window", 16)
        run = ingot("ttt", self.run_directory, "--file", self.data / "1.txt", "--out", self.directory / "no" / "a.safetensors")
        self.assertRegex(run.error, "found no directory .*/no, expected one to write to")
        self.refuses("nowhere", *TTT, "--ttt-adapters", self.directory / "nowhere")
        log = self.directory / "none.jsonl"
        self.refuses("at most 64|context", "--ttt", "--ttt-window", 100, "--ttt-log", log)
        self.assertEqual([p for p in self.directory.iterdir() if p.name.startswith("none")], [])


if __name__ == "__main__":
    unittest.main()
