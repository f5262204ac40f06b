"""Runs the ingot binary as a user would: output, one-line errors, exit statuses, the precedence of option sources.

    python3 tests/cli_test.py BINARY [unittest options]
"""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

BINARY = os.path.abspath(sys.argv.pop(1))
ROOT = pathlib.Path(__file__).resolve().parent.parent


def ingot(*arguments, stdin=b"", env=None, cwd=None):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("INGOT_")} | (env or {})
    run = subprocess.run([BINARY, *map(str, arguments)], input=stdin, capture_output=True, env=environment, cwd=cwd, timeout=120)
    run.text, run.error = run.stdout.decode(), run.stderr.decode()
    return run


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
            ["ingot doctor: .*--jsn", "doctor", "--jsn"],
            ["--threads", "doctor", "--threads"],
            ["--threads: found 'many', expected an integer", "doctor", "--threads", "many"],
            ["found number 0, expected an integer from 1 to 1024", "doctor", "--threads", "0"],
            ["found number -1, expected an integer from 1 to 1024", "doctor", "--threads", "-1"],
            ["found number 1000000000, expected", "doctor", "--threads", "1000000000"],
            ["--threads", "doctor", "--threads", "1", "--threads", "2"],
            ["--set: found the unknown key 'a', expected one of json, threads", "doctor", "--set", "a=1"],
            ["--set: found 'threads', expected KEY=VALUE", "doctor", "--set", "threads"],
            ["expected names joined by dots", "doctor", "--set", "a..b=1"],
            ["'threads' is a number 1, expected an object", "doctor", "--set", "threads=1", "--set", "threads.x=1"],
            ['threads: found string "one"', "doctor", "--set", "threads=one"],
            ["RUN is missing", "plot"],
        ):
            with self.subTest(arguments=arguments):
                self.refuses(2, message, *arguments)

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
            (2, r"c\.json: found the unknown key 'thread', expected one of json, threads", '{"thread": 3}'),
            (2, r"c\.json: found array, expected an object", "[1]"),
            (2, r'threads: found string "3", expected an integer', '{"threads": "3"}'),
            (3, r"c\.json: byte 12", '{"threads": '),
            (3, r"c\.json: byte .*duplicate key", '{"threads": 3, "threads": 4}'),
        ):
            with self.subTest(content=content):
                self.refuses(status, message, "doctor", "--config", self.file("c.json", content))
        self.refuses(4, "missing.json", "doctor", "--config", self.directory / "missing.json")
        self.refuses(2, "INGOT_THREADS: found 'x', expected an integer", "doctor", env={"INGOT_THREADS": "x"})

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

    def test_bad_logs_are_refused(self):
        self.refuses(4, "nothing", "plot", self.directory / "nothing")
        self.refuses(3, r"x\.jsonl:2: byte 0", "plot", self.file("x.jsonl", '{"step": 1, "loss": 2}\nbroken\n'))
        self.refuses(3, "found no record with the numbers 'step' and 'loss'", "plot", self.file("y.jsonl", '{"a": 1}\n'))


if __name__ == "__main__":
    unittest.main(argv=sys.argv)
