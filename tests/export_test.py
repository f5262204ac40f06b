"""ingot export from the command line: a small trained model becomes an artifact, which is read back, scored and refused.

    python3 tests/export_test.py BINARY [unittest options]
"""
import hashlib
import json
import pathlib
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import types
import unittest

from program import BINARY, ingot, train_small

EXPERIMENT = pathlib.Path(__file__).resolve().parent.parent / "tools" / "experiment.py"
CALIBRATION = ("--batches", 8, "--batch-tokens", 512, "--fp16-below", 0)


def prose(seed, words=5000):
    rng = random.Random(seed)
    names = ["river", "stone", "lantern", "orchard", "signal", "harbour", "winter", "copper"]
    return " ".join(f"the {rng.choice(names)} of {rng.choice(names)}," for _ in range(words)) + "\n"


class Export(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        holder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(holder.cleanup)
        cls.directory = pathlib.Path(holder.name)
        cls.text = cls.directory / "text.txt"
        cls.text.write_text(prose(1))
        cls.run_directory = cls.directory / "run"
        train_small(cls.text, cls.run_directory, 60)

    def export(self, out, *options):
        run = ingot("export", self.run_directory, out, "--data", self.text, *CALIBRATION, "--json", *options)
        self.assertEqual(run.returncode, 0, run.error)
        return json.loads(run.text)

    def refuses(self, status, message, *arguments):
        run = ingot(*arguments)
        self.assertEqual((run.returncode, run.text), (status, ""), run.error)
        self.assertRegex(run.error, r"\Aingot( [a-z]+)*: [^\n]+\n\Z")
        self.assertRegex(run.error, message)

    def untouched(self, name):
        self.assertEqual([p.name for p in self.directory.iterdir() if p.name.startswith(name)], [])

    def test_an_artifact_is_scored_run_and_described(self):
        out = self.directory / "a.ingot"
        report = self.export(out)
        self.assertEqual(report["model_bytes"], out.stat().st_size)
        self.assertLess(report["model_bytes"], report["f32_bytes"] / 4)
        self.assertLess(abs(report["bits_per_byte_after"] - report["bits_per_byte_before"]), 0.02)
        scored = ingot("eval", out, "--data", self.text, "--json")
        self.assertEqual(scored.returncode, 0, scored.error)
        self.assertEqual(json.loads(scored.text)["bits_per_byte"], report["bits_per_byte_after"])
        of_run = json.loads(ingot("eval", self.run_directory, "--data", self.text, "--json").text)
        self.assertEqual(of_run["bits_per_byte"], report["bits_per_byte_before"])
        written = ingot("generate", out, "--prompt", "the river", "--tokens", 20)
        self.assertEqual((written.returncode, written.text[:9]), (0, "the river"), written.error)
        described = ingot("info", out, "--json")
        self.assertEqual(json.loads(described.text)["artifact"], {"version": 3, "coder": "range", "bytes": out.stat().st_size})
        self.assertIn("artifact", ingot("info", out).text)

    def test_coders_give_the_same_model(self):
        default = self.export(self.directory / "range.ingot")
        for coder in ("brotli", "lzma"):
            out = self.directory / f"{coder}.ingot"
            run = ingot("export", self.run_directory, out, "--data", self.text, *CALIBRATION, "--json", "--coder", coder)
            if "this build lacks the library" in run.error:
                self.assertEqual((run.returncode, run.text), (7, ""))
                self.untouched(out.name)
                continue
            self.assertEqual(run.returncode, 0, run.error)
            report = json.loads(run.text)
            self.assertEqual((report["coder"], report["total_bytes"]), (coder, out.stat().st_size))
            self.assertEqual(report["loss_after"], default["loss_after"])
            self.assertLess(abs(report["total_bytes"] - default["total_bytes"]), 0.2 * default["total_bytes"])
            self.assertEqual(json.loads(ingot("info", out, "--json").text)["artifact"]["coder"], coder)
            # The artifact coded anew equals the artifact of the run, and the reverse.
            again, back = self.directory / f"{coder}-again.ingot", self.directory / f"{coder}-back.ingot"
            for read, written, by in ((self.directory / "range.ingot", again, coder), (again, back, "range")):
                run = ingot("export", read, written, "--coder", by, "--json")
                self.assertEqual(run.returncode, 0, run.error)
                self.assertEqual(json.loads(run.text)["total_bytes"], written.stat().st_size)
            self.assertEqual(again.read_bytes(), out.read_bytes())
            self.assertEqual(back.read_bytes(), (self.directory / "range.ingot").read_bytes())
            self.assertEqual(json.loads(ingot("eval", again, "--data", self.text, "--json").text)["loss"], default["loss_after"])

    def test_the_same_run_gives_the_same_bytes(self):
        first, second = self.directory / "b1.ingot", self.directory / "b2.ingot"
        self.export(first), self.export(second)
        self.assertEqual(first.read_bytes(), second.read_bytes())

    def test_gptq_loses_less_than_plain_rounding_and_fewer_bits_take_fewer_bytes(self):
        forms = ("--matrices", "int4", "--embedding", "int4")
        sigmas = ("--matrix-sigmas", 5, "--embedding-sigmas", 5)
        gptq = self.export(self.directory / "c1.ingot", *forms, *sigmas)
        plain = ingot("export", self.run_directory, self.directory / "c2.ingot", "--data", self.text, "--rounding", "nearest",
                      "--fp16-below", 0, "--batch-tokens", 512, "--json", *forms, *sigmas)
        plain = json.loads(plain.text)
        self.assertGreater(plain["loss_after"], gptq["loss_after"])
        self.assertLess(gptq["model_bytes"], self.export(self.directory / "c3.ingot")["model_bytes"])

    def test_a_model_that_cannot_be_exported_is_one_line_and_no_file(self):
        out = self.directory / "bad.ingot"
        whole = ("export", self.run_directory, out, "--data", self.text)
        self.refuses(2, r"found a model of [\d,]+ bytes, expected at most 1,000 \(--limit\); nothing was written", *whole,
                     *CALIBRATION, "--limit", 1000)
        self.refuses(3, "tokens for calibration, expected 64 batches of 1000000", *whole, "--batch-tokens", 1000000)
        # Eight rows do not span the inputs of a matrix with 64 columns.
        self.refuses(8, r"[\w.]+: its Hessian is singular at column \d+ with damping 0, expected more calibration text or more damping", *whole,
                     "--batches", 1, "--batch-tokens", 8, "--damping", 0, "--fp16-below", 0)
        for place, kind in ((self.directory, "directory"), ("/dev/null", "special file")):  # before anything is read of the text
            self.refuses(5, f"found a {kind}, expected a regular file", "export", self.run_directory, place, "--data", self.text, "--batch-tokens", 1000000)
        self.refuses(2, "--rounding nearest", *whole, "--rounding", "nearest", "--batches", 3)
        self.refuses(2, "int3", *whole, "--matrices", "int3")
        self.refuses(4, "absent", "export", self.run_directory, out, "--data", self.directory / "absent")
        self.refuses(4, "nowhere/a.ingot: found no directory .*nowhere, expected one to write to", "export", self.run_directory,
                     self.directory / "nowhere" / "a.ingot", "--data", self.text)
        ids = ingot("tokenizer", "encode", "--tokenizer", self.run_directory / "tokenizer.json", "--file", self.text).text.split()
        shards = self.directory / "shards"
        shards.mkdir()
        for name, tokens in (("train_0.bin", ids), ("val_0.bin", ids[:1])):
            head = struct.pack("<256i", 20240520, 1, len(tokens), 0, *[0] * 252)
            (shards / name).write_bytes(head + struct.pack(f"<{len(tokens)}H", *map(int, tokens)))
        self.refuses(3, "val_0.bin: number of tokens to score: found 1, expected at least 2", "export", self.run_directory, out, "--data", shards, *CALIBRATION)
        self.untouched("bad.ingot")

    def test_only_an_artifact_or_an_empty_file_is_replaced(self):
        text = self.text.read_bytes()
        of_run = ("export", self.run_directory, self.text, "--data", self.text, "--rounding", "nearest")
        self.refuses(2, "text.txt: found a file that is no artifact, expected a new name or an artifact to replace", *of_run)
        out = self.directory / "f.ingot"
        out.write_bytes(b"")
        self.export(out), self.export(out)
        self.refuses(2, "text.txt: found a file that is no artifact", "export", out, self.text)
        self.assertEqual(self.text.read_bytes(), text)

    def test_a_full_disk_leaves_the_earlier_files(self):
        out = self.directory / "g.ingot"
        limited = ["bash", "-c", 'ulimit -f 8; exec "$0" "$@"', BINARY, "export", self.run_directory, out, "--data", self.text, "--rounding", "nearest"]

        def files():
            return {p.name: p.read_bytes() for p in self.directory.iterdir() if p.name.startswith("g.ingot")}
        for _ in range(2):
            before = files()
            run = subprocess.run(list(map(str, limited)), capture_output=True, text=True)
            self.assertEqual((run.returncode, run.stdout), (5, ""), run.stderr)
            self.assertRegex(run.stderr, r"\Aingot export: [^\n]*g.ingot.partial: cannot write [^\n]*\n\Z")
            self.assertEqual(files(), before)
            self.export(out)

    def test_weights_that_are_not_numbers_are_named(self):
        run = self.directory / "nan"
        shutil.copytree(self.run_directory, run)
        checkpoint = next(p for p in sorted(run.iterdir()) if p.name.startswith("step-"))
        file = checkpoint / "model.safetensors"
        bytes_ = bytearray(file.read_bytes())
        begin = 8 + struct.unpack("<Q", bytes_[:8])[0]
        header = json.loads(bytes_[8:begin])
        at = begin + header["blocks.1.mlp.up.weight"]["data_offsets"][0]
        bytes_[at:at + 4] = struct.pack("<f", float("nan"))
        file.write_bytes(bytes_)
        manifest = checkpoint / "manifest.json"
        said = json.loads(manifest.read_text())
        said["files"]["model.safetensors"]["sha256"] = hashlib.sha256(bytes_).hexdigest()
        del said["manifest_sha256"]
        said["manifest_sha256"] = hashlib.sha256(json.dumps(said, separators=(",", ":")).encode()).hexdigest()
        manifest.write_text(json.dumps(said, indent=2) + "\n")
        self.refuses(8, "blocks.1.mlp.up.weight: found nan at number 0, expected finite weights", "export", run,
                     self.directory / "nan.ingot", "--data", self.text)
        self.untouched("nan.ingot")

    def test_a_cut_altered_or_orphaned_artifact_is_refused(self):
        out = self.directory / "d.ingot"
        self.export(out)
        whole, tokenizer = out.read_bytes(), pathlib.Path(f"{out}.tokenizer")
        score = ("eval", out, "--data", self.text)
        out.write_bytes(whole[:-1])
        self.refuses(3, "d.ingot: found [0-9]+ bytes of tensors, expected", *score)
        out.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
        self.refuses(3, "was altered: the sum does not match", *score)
        out.write_bytes(whole[:8] + struct.pack("<I", 9) + whole[12:])
        self.refuses(7, "found version 9, expected 1", *score)
        out.write_bytes(whole)
        other = self.directory / "other.json"
        self.assertEqual(ingot("tokenizer", "train", "--data", self.text, "--vocab", 300, "--out", other).returncode, 0)
        self.refuses(3, "other.json: found a tokenizer of 300 tokens with hash [0-9]+, expected the model's, ", "serve", out, "--port", 0, "--tokenizer", other)
        kept = tokenizer.read_bytes()
        tokenizer.write_bytes(other.read_bytes())
        self.refuses(3, "d.ingot.tokenizer: found a tokenizer of 300 tokens with hash", *score)
        tokenizer.unlink()
        self.refuses(4, "d.ingot.tokenizer", *score)
        tokenizer.write_bytes(kept)
        self.refuses(2, "--data.*an artifact, whose integers stay as they are", "export", out, self.directory / "e.ingot", "--data", self.text)
        self.refuses(2, r"found a model of [\d,]+ bytes, expected at most 1,000", "export", out, self.directory / "e.ingot", "--limit", 1000)
        out.write_bytes(whole[:-1])
        self.refuses(3, "d.ingot: found [0-9]+ bytes of tensors, expected", "export", out, self.directory / "e.ingot")
        self.refuses(2, "found no --data", "export", self.run_directory, self.directory / "e.ingot")
        self.untouched("e.ingot")

    def test_the_chain_over_seeds_gives_a_table_and_one_json(self):
        out = self.directory / "chain"
        train = "--preset nano --steps 20 --set train.tokenizer=char --set train.batch_tokens=256 --set model.layers=1 " \
                "--set model.dim=32 --set model.heads=2 --set model.kv_heads=2 --set model.head_dim=16 --set model.mlp_hidden=64 " \
                "--set model.context=64"
        command = [sys.executable, EXPERIMENT, BINARY, self.text, out, "--seeds", "1", "2", "--train", train,
                   "--stride", "16", "--adapt", "--ttt-rank 2 --ttt-window 32 --ttt-chunk 16 --ttt-lr 1e-3",
                   "--export", "--batches 2 --batch-tokens 256 --fp16-below 0 --limit 20000"]
        first = subprocess.run(command, capture_output=True, timeout=120)
        self.assertEqual(first.returncode, 0, first.stderr.decode())
        said = json.loads((out / "experiment.json").read_text())
        one, two = said["seeds"]
        self.assertNotEqual(one["bits_per_byte_before"], two["bits_per_byte_before"])
        self.assertLess(one["bits_per_byte_adapted"], one["bits_per_byte_after"])
        self.assertAlmostEqual(said["summary"]["gain"]["mean"], sum(s["bits_per_byte_after"] - s["bits_per_byte_adapted"] for s in (one, two)) / 2)
        for key in ("bits_per_byte_before", "bits_per_byte_after", "bits_per_byte_sliding", "bits_per_byte_adapted", "total_bytes"):
            self.assertAlmostEqual(said["summary"][key]["mean"], (one[key] + two[key]) / 2)
            self.assertAlmostEqual(said["summary"][key]["deviation"], abs(one[key] - two[key]) / 2 ** 0.5)
        self.assertEqual(one["total_bytes"], (out / "seed-1.ingot").stat().st_size)
        self.assertEqual([line.split()[0] for line in first.stdout.decode().splitlines()], ["seed", "1", "2", "mean", "deviation"])
        trained = (out / "seed-1" / "log.jsonl").read_bytes()
        again = subprocess.run(command, capture_output=True, timeout=120)  # nothing is done twice
        self.assertEqual((again.stdout, (out / "seed-1" / "log.jsonl").read_bytes()), (first.stdout, trained))
        self.assertEqual(first.stdout.decode().splitlines()[0].split(),
                         ["seed", "as", "trained", "read", "back", "sliding", "adapted", "bytes"])
        reports = [str(out / f"seed-{n}.json") for n in (2, 1)]  # assembled from the reports of both seeds
        together = subprocess.run([sys.executable, EXPERIMENT, "--reports", *reports], capture_output=True, timeout=60)
        self.assertEqual((together.returncode, together.stdout), (0, first.stdout), together.stderr.decode())
        twice = subprocess.run([sys.executable, EXPERIMENT, "--reports", reports[0], reports[0]], capture_output=True, timeout=60)
        self.assertEqual((twice.returncode, twice.stdout), (1, b""))
        self.assertIn("found seeds [2, 2], expected each once", twice.stderr.decode())
        text = self.directory / "no-result.json"
        text.write_text("{}")
        for bad in ([EXPERIMENT, "--reports", text], [EXPERIMENT, "--reports", self.directory / "absent.json"],
                    [EXPERIMENT, self.directory / "absent", self.text, self.directory / "chain3"], [EXPERIMENT, BINARY, self.text, text]):
            run = subprocess.run([sys.executable, *map(str, bad)], capture_output=True, text=True, timeout=60)
            self.assertEqual((run.returncode, run.stdout), (1, ""), bad)
            self.assertRegex(run.stderr, r"\Aexperiment: [^\n]+\n\Z", bad)
        other = subprocess.run([*command[:-1], "--batches 3 --batch-tokens 256"], capture_output=True, timeout=120)
        self.assertEqual((other.returncode, other.stdout), (1, b""))
        self.assertRegex(other.stderr.decode(), r"\A[^\n]*seed-1.json: found a result of other options[^\n]*\n\Z")
        shorter = subprocess.run([*command[:4], self.directory / "chain2", "--seeds", "1", "--train", train, "--export",
                                  "--batches 2 --batch-tokens 256 --limit 10"],
                                 capture_output=True, timeout=120)
        self.assertEqual(shorter.returncode, 2, shorter.stderr.decode())

    def test_a_part_of_the_held_out_text_is_every_so_manieth_document_cut_short(self):
        experiment = types.ModuleType("experiment")
        exec(compile(EXPERIMENT.read_text(), EXPERIMENT, "exec"), experiment.__dict__)
        shards, part = self.directory / "whole", self.directory / "part"
        texts = self.directory / "texts"
        texts.mkdir()
        for n in range(1, 12):
            (texts / f"{n}.txt").write_text("word " * n)
        self.assertEqual(ingot("tokenizer", "train", "--data", self.text, "--vocab", 300, "--out", self.directory / "bpe.json").returncode, 0)
        packed = ingot("data", "pack", "--data", texts, "--tokenizer", self.directory / "bpe.json", "--held-out-every", 2, "--out", shards)
        self.assertEqual(packed.returncode, 0, packed.error)

        def tokens_of(file):
            content = file.read_bytes()
            self.assertEqual(int.from_bytes(content[8:12], "little") * 2, len(content) - 1024)
            return list(memoryview(content[1024:]).cast("H"))
        (whole,) = shards.glob("val_*.bin")
        tokens = tokens_of(whole)
        begins = [i for i, t in enumerate(tokens) if t == tokens[0]] + [len(tokens)]
        documents = [tokens[a:b] for a, b in zip(begins, begins[1:])]
        experiment.write_part(shards, part, 2, 5)
        self.assertEqual(tokens_of(part / whole.name), [t for d in documents[::2] for t in d[:5]] + [tokens[0]])
        for bad in ("0:4", "2:1", "3", "a:b"):
            run = subprocess.run([sys.executable, EXPERIMENT, BINARY, shards, self.directory / "chain4", "--part", bad], capture_output=True, text=True, timeout=60)
            self.assertEqual((run.returncode, run.stdout), (2, ""), bad)
            self.assertIn("argument --part: invalid", run.stderr)
        whole.write_bytes(whole.read_bytes()[:-1])
        for data in (shards, self.text):  # cut, and no shards
            run = subprocess.run([sys.executable, EXPERIMENT, BINARY, data, self.directory / "chain4", "--part", "2:5"], capture_output=True, text=True, timeout=60)
            self.assertEqual((run.returncode, run.stdout), (1, ""), data)
            self.assertRegex(run.stderr, r"\Aexperiment: [^\n]+expected (a shard|shards) of 16-bit tokens of `ingot data pack`\n\Z")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v", *sys.argv[1:]])
