"""Runs the ingot binary as a user would: output, one-line errors, exit statuses.

    python3 tests/cli_test.py BINARY [unittest options]
"""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import unittest

from program import BINARY, SANITIZED, TEXT, InDirectory, ingot

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Frame(InDirectory):
    def test_version_names_the_commit(self):
        self.assertRegex(ingot("--version").text, r"\Aingot \d+\.\d+\.\d+ \((unknown|[0-9a-f]{12})\)\n\Z")

    def test_the_log_level_debug_names_the_cpus_and_threads(self):
        self.assertIn(" CPUs", ingot("doctor", env={"INGOT_LOG": "debug"}).error.splitlines()[0])
        self.assertNotIn(" CPUs", ingot("doctor").error)
        self.refuses(2, "INGOT_LOG: found 'all'", "doctor", env={"INGOT_LOG": "all"})

    def test_doctor_says_which_kernels_the_gpu_at_hand_runs(self):
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            self.skipTest("no C compiler for a stand-in of the driver")
        source = self.directory / "driver.c"
        source.write_text("""#include <stdlib.h>
            #include <string.h>
            static int digit(int i) { return getenv("GPU")[i] - '0'; }
            int cuInit(unsigned flags) { return 0; }
            int cuDeviceGetCount(int* n) { *n = 1; return 0; }
            int cuDeviceGetName(char* name, int size, int device) { strcpy(name, "A GPU"); return 0; }
            int cuDeviceTotalMem_v2(size_t* bytes, int device) { *bytes = (size_t)24 << 30; return 0; }
            int cuDeviceGetAttribute(int* value, int which, int device) {
              *value = which == 75 ? (digit(0) ? 10 : 0) + digit(1) : which == 76 ? digit(2) : 82;
              return 0;
            }""")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", self.directory / "libcuda.so.1", source], check=True)
        for gpu, kernels, words in (("070", "none", "no kernels; products, attention and models need 8.0, and models run on the CPU"),
                                    ("075", "rows", "RMSNorm, activations, gates, RoPE and further operations over rows (docs/gpu-layer.md); products, attention and models need 8.0, and models run on the CPU"),
                                    ("086", "portable", "by the portable variants, which were measured on no such GPU"),
                                    ("090", "hopper", "all operations by Hopper's variants"), ("120", "portable", "by the portable variants")):
            driver = {"LD_LIBRARY_PATH": str(self.directory), "GPU": gpu}
            report = json.loads(ingot("doctor", "--json", env=driver).text)["gpus"][0]
            self.assertEqual((report["kernels"], report["runs_models"]), (kernels, kernels in ("portable", "hopper")), gpu)
            self.assertIn(f"compute capability {report['compute_capability']}: ", ingot("doctor", env=driver).text)
            self.assertIn(words, ingot("doctor", env=driver).text)
        limited = {"LD_LIBRARY_PATH": str(self.directory), "GPU": "090", "INGOT_GPU_AS": "8.6"}
        report = json.loads(ingot("doctor", "--json", env=limited).text)["gpus"][0]
        self.assertEqual((report["compute_capability"], report["limited_to"], report["kernels"]), ("9.0", "8.6", "portable"))
        self.assertIn("compute capability 9.0, limited to 8.6 by INGOT_GPU_AS: operations and models by the portable variants", ingot("doctor", env=limited).text)
        for gpu, kernels in (("090", "rows"), ("086", "rows"), ("070", "none")):
            turing = json.loads(ingot("doctor", "--json", env={**limited, "GPU": gpu, "INGOT_GPU_AS": "7.5"}).text)["gpus"][0]
            self.assertEqual((turing["limited_to"], turing["kernels"], turing["runs_models"]), ("7.5", kernels, False), gpu)

    def test_a_compute_capability_without_limits_is_refused_by_the_name_of_the_variable(self):
        for command in (["doctor"], ["info", "--preset", "nano"]):
            self.refuses(2, "INGOT_GPU_AS: compute capability: found '7.0', expected one of 7.5, 8.0, 8.6, 8.9, 9.0", *command, env={"INGOT_GPU_AS": "7.0"})
            self.assertEqual(ingot(*command, env={"INGOT_GPU_AS": "8.0"}).returncode, 0)

    def test_doctor_finds_cublaslt_where_pythons_packages_have_it(self):
        any_library = next((path for path in pathlib.Path("/proc/self/maps").read_text().split() if "/libm.so" in path or "/libm-" in path), None)
        if any_library is None:
            self.skipTest("this Python has no libm of its own process to copy")
        packages = self.directory / "env/lib/python3.12/site-packages/nvidia/cu13/lib"
        packages.mkdir(parents=True)
        library = packages / "libcublasLt.so.12"
        shutil.copyfile(any_library, library)
        (packages / "libcublasLt.so.13").write_bytes(b"not a library")  # the file is skipped
        report = json.loads(ingot("doctor", "--json", env={"VIRTUAL_ENV": str(self.directory / "env"), "CUDA_HOME": "", "CUDA_PATH": ""}).text)
        if report["found"]["cuBLASLt"].startswith("libcublasLt"):
            self.skipTest("the loader finds one here")
        self.assertEqual(report["found"]["cuBLASLt"], str(library))
        named = {"INGOT_CUBLASLT": str(library)}
        self.assertEqual(json.loads(ingot("doctor", "--json", env=named).text)["found"]["cuBLASLt"], str(library))
        missing = json.loads(ingot("doctor", "--json", env={"INGOT_CUBLASLT": "/nowhere", "VIRTUAL_ENV": str(self.directory / "env")}).text)["missing"]
        self.assertIn("gradients of weights", missing["cuBLASLt"])

    def test_every_subcommand_has_help_with_examples(self):
        seen = []

        def visit(path):
            run = ingot(*path, "--help")
            self.assertEqual((run.returncode, run.error), (0, ""), path)
            self.assertIn("Examples:\n  ", run.text, path)
            for line in re.findall(r"^  --(?:device|split|synthetic) .*", run.text, re.M):  # options whose descriptions leave choices out
                self.assertRegex(line, "auto, cpu, cuda:|tensor, attention-experts:|held-out|20b", path)
            seen.append(" ".join(path))
            block = re.search(r"^Subcommands:\n((?:  .*\n)+)", run.text, re.M)
            for name in re.findall(r"^  (\S+)", block[1], re.M) if block else []:
                visit([*path, name])

        visit([])
        self.assertIn("doctor", seen)

    def test_every_option_that_a_page_names_exists(self):
        known = {"--logdir", "--workflow"}  # of TensorBoard and of CMake
        commands = [[]]
        for command in commands:
            text = ingot(*command, "--help").text
            known |= set(re.findall(r"--[a-z][a-z0-9-]*", text))
            if "\nSubcommands:\n" in text:
                commands += [[*command, name] for name in re.findall(r"^  (\S+)", text.split("\nSubcommands:\n")[1].split("\n\n")[0], re.MULTILINE)]
        self.assertGreater(len(commands), 20)
        for path in [ROOT / "run", *(p for folder in ("tools", "tests", "bench", "packaging", "examples", "bindings/python") for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".sh"))]:
            known |= set(re.findall(r"--[a-z][a-z0-9-]*", path.read_text(encoding="utf-8")))
        pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "packaging").glob("*.md")]
        for page in pages:
            named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", page.read_text(encoding="utf-8")))
            self.assertEqual(sorted(named - known), [], page.name)

    def test_bad_command_lines_are_refused_with_status_2(self):
        for message, *arguments in (
            ["found no subcommand, expected one of .*doctor"],
            ["found the unknown subcommand 'doctro', expected one of", "doctro"],
            ["ingot doctor: found the unknown option '--j', expected those of ingot doctor --help", "doctor", "--j"],
            ["ingot doctor: found the unknown argument 'all', expected those of", "doctor", "all"],
            [r"ingot doctor: --threads: found no value, expected one N \(number of threads", "doctor", "--threads"],
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
            ["--threads: found '0', expected an integer from 1 to 1024", "doctor", "--threads", "0"],
            ["--threads: found '-1', expected an integer from 1 to 1024", "doctor", "--threads", "-1"],
            ["--threads: found '1000000000', expected", "doctor", "--threads", "1000000000"],
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

    def test_an_error_names_the_source_of_the_value(self):
        wrong = "found '0', expected an integer from 1 to 1024"
        config = self.file("c.json", '{"threads": 0}')
        self.refuses(2, "--threads: " + wrong, "doctor", "--threads", "0", env={"INGOT_THREADS": "4"})
        self.refuses(2, "INGOT_THREADS: " + wrong, "doctor", env={"INGOT_THREADS": "0"})
        self.refuses(2, "doctor: threads: found number 0, expected", "doctor", "--set", "threads=0", env={"INGOT_THREADS": "4"})
        self.refuses(2, "doctor: threads: found number 0, expected", "doctor", "--config", config)

    def test_the_explanation_of_an_option_in_an_error_is_short(self):
        self.refuses(2, r"--draft: found an empty word, expected HOW \([^:;()]+\)\n", "generate", "--draft", "")
        self.refuses(2, r"--seed: found 2 values, expected one N \(the same seed gives the same text\)\n", "generate", "--seed", "1", "--seed", "2")

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
                self.refuses(7, "text: found a file of 1 bytes of an unknown format, expected GPT-OSS", *before, text, *after)
        for command in ("serve", "generate"):  # a directory that holds neither a model nor a tokenizer
            self.refuses(4, "found no checkpoint, expected directories like step-00001000 of a run, or config.json and safetensors", command, self.directory)

    def test_a_prompt_of_no_length_is_refused_before_a_gpu_is_sought(self):
        for bad in ("0", "-1", "many", "1k"):
            self.refuses(2, f"LENGTH: found '{bad}', expected a number of tokens from 1 on", "bench", "prompt", "--", bad)
        for lengths in ("0", "[0]", '["0"]'):  # integers and strings of a configuration
            self.refuses(2, "LENGTH: found '0', expected a number of tokens from 1 on", "bench", "prompt", "--set", f"length={lengths}")
        self.refuses(2, "length: found number 1.5, expected an integer", "bench", "prompt", "--set", "length=[1.5]")

    def test_a_build_without_cuda_names_the_model_to_time_on_a_cpu(self):
        if json.loads(ingot("doctor", "--json").text)["cuda_build"]:
            self.skipTest("a build with CUDA")
        self.refuses(7, "expected one made with INGOT_CUDA=ON, .*; --model PATH times a model on a CPU too", "bench", "decode")

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

    def test_the_documented_statuses_equal_the_source(self):
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
        self.refuses(2, "--pattern: found 'x', expected one of gpt2", "tokenizer", "train", "--data", self.text, "--pattern", "x")
        self.refuses(2, "--vocab: found '100', expected an integer from 257", "tokenizer", "train", "--data", self.text, "--vocab", "100")
        self.refuses(4, "no/where", "tokenizer", "train", "--data", self.directory / "no/where")


class Data(InDirectory):
    def test_packed_shards_are_described(self):
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
        held_out = json.loads(ingot("data", "info", report["held_out"][0]["path"], "--json").text)  # the name decides whether a file is a shard
        self.assertEqual((held_out["train"], held_out["held_out"]), ([], report["held_out"]))
        shard = pathlib.Path(report["train"][0]["path"])
        shard.write_bytes(shard.read_bytes()[:-1])
        self.refuses(3, re.escape(str(shard)), "data", "info", shard)


    def test_a_failed_packing_leaves_no_shards(self):
        tokenizer, texts = self.directory / "chars.json", self.directory / "texts"
        self.assertEqual(ingot("tokenizer", "train", "--kind", "char", "--data", self.file("t.txt", TEXT), "--out", tokenizer).returncode, 0)
        texts.mkdir()
        self.refuses(2, "--held-out-every: found 1, ", "data", "pack", "--data", texts, "--tokenizer", tokenizer, "--out", self.directory / "all", "--held-out-every", 1)
        self.assertFalse((self.directory / "all").exists())
        for bad in (0, 1):  # one document is held out, and its shard comes last
            for i in (0, 1):
                (texts / f"{i}.txt").write_text(TEXT + "\u65e5" * (i == bad))
            run = ingot("data", "pack", "--data", texts, "--tokenizer", tokenizer, "--out", self.directory / "shards", "--held-out-every", 2)
            self.assertEqual(run.returncode, 3, run.error)
            self.assertRegex(run.error, "found the character")
            self.assertEqual(list((self.directory / "shards").iterdir()), [])


class Info(InDirectory):
    def test_the_golf_preset_has_exactly_its_parameters(self):
        report = json.loads(ingot("info", "--preset", "golf", "--json").text)
        self.assertEqual((report["parameters"], report["applications"]), (35944602, 17))

    def test_a_configuration_lies_over_the_preset(self):
        config = self.file("c.json", '{"preset": "nano", "model": {"layers": 3}}')
        layers = lambda *a: json.loads(ingot("info", "--config", config, "--json", *a).text)["config"]["layers"]
        self.assertEqual((layers(), layers("--set", "model.layers=5")), (3, 5))


class Bench(InDirectory):
    def test_the_json_has_the_measured_values(self):
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
        parts = ["/256x1024/", "moe", "sum/", "sampling/greedy", "product of one row"]
        if not SANITIZED:  # the rooms test the remaining loops in small shapes
            parts += ["/4096x1024/", "x64/f32", "adamw", "muon", "mlp/", "narrow"]
        for part in parts:
            report = json.loads(ingot("bench", part, "--seconds", "0.001", "--json").text)
            self.assertEqual(len(report["results"]), len([n for n in names if part in n]), part)
            ran |= {r["suite"] for r in report["results"]}
        if not SANITIZED:
            self.assertEqual(rooms - ran, set())


if __name__ == "__main__":
    unittest.main(argv=sys.argv)
