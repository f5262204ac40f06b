"""Reports that are measured in several calls: unfinished ones are kept apart and continued on the same sources and GPU, every suite ends in time, and each case's day is kept."""
import argparse
import contextlib
import functools
import importlib.util
import io
import json
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
import time
import types
import unittest
import unittest.mock

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "bench"), str(ROOT / "bench" / "peers")]
import check_reports  # noqa: E402
import gpu  # noqa: E402
import gpu_tests  # noqa: E402
import report_tables  # noqa: E402
import reports  # noqa: E402
import sanitize  # noqa: E402
import suite_report  # noqa: E402

H200 = "NVIDIA H200"
CEILINGS = {"copy_TBps": 4.0, "read_TBps": 4.5, "bf16_TFLOPs": 700.0, "mma_TFLOPs": 500.0}
CASES = {name: 10.0 for name in ("a", "b", "c", "d")}  # name: seconds
WITH_TORCH = unittest.skipUnless(importlib.util.find_spec("torch"), "no PyTorch")


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.seconds = 1000.0

    def __call__(self):
        return self.seconds


def row(name, **more):
    return {"name": name, "shape": [1], "dtype": "bf16", "ours_us": 2.0, "peers": {"torch_eager": 3.0, "torch_compile": 2.5}, "limit_us": 1.0, "error": 0.0, "tolerance": 1.0, **more}


class InFolder(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.clock = Clock()

    def report(self, again=True, seconds=None, cases=CASES, gpu_name=H200, suite="rope", **more):
        report = suite_report.SuiteReport(suite, cases, gpu_name, again=again, until=None if seconds is None else self.clock() + seconds, folder=self.folder, now=self.clock, **more)
        report.entries = lambda: {"driver": "1", "cuda": "13.0", "command": "x", "ceilings": CEILINGS}
        return report

    def measure(self, report, day="2026-01-01", stop_after=None):
        """The names of the cases that a call measures; a call that is stopped from outside ends within the case after `stop_after`."""
        measured = []
        with unittest.mock.patch.object(suite_report.datetime, "date", types.SimpleNamespace(today=lambda: types.SimpleNamespace(isoformat=lambda: day))):
            for seconds in report.each():
                if len(measured) == stop_after:
                    break
                self.clock.seconds += seconds
                name = report.missing[0]
                report.add([row(f"{name}{i}") for i in (1, 2)])
                measured.append(name)
        return measured

    def whole(self):
        return reports.read(self.folder / "rope.json")

    def unfinished(self):
        return reports.read(self.folder / "unfinished" / "rope.json")


class Calls(InFolder):
    def test_an_unfinished_report_lies_apart_until_the_last_case_is_measured(self):
        old = {"suite": "rope", "gpu": H200, "tree": "old", "results": [row("old")]}
        (self.folder / "rope.json").write_text(json.dumps(old))
        self.assertEqual(self.measure(self.report(), stop_after=3), ["a", "b", "c"])
        self.assertEqual(self.whole(), old)
        unfinished = self.unfinished()
        self.assertEqual((unfinished["incomplete"], unfinished["missing"]), ("1 of 4 cases were not measured", ["d"]))
        self.assertEqual(unfinished["case_seconds"], {"a": 10.0, "b": 10.0, "c": 10.0})
        self.assertEqual(self.measure(self.report(), "2026-01-02"), ["d"])
        self.assertEqual(list(self.folder.rglob("*.json*")), [self.folder / "rope.json"])
        whole = self.whole()
        self.assertNotIn("incomplete", whole)
        self.assertEqual([r["name"] for r in whole["results"]], ["a1", "a2", "b1", "b2", "c1", "c2", "d1", "d2"])
        self.assertEqual(reports.problems_of(whole), [])
        self.assertEqual(self.measure(self.report()), [])  # nothing is missing
        self.assertEqual(self.measure(self.report(again=False), stop_after=1), ["a"])  # measured anew
        self.assertEqual(self.whole(), whole)

    def test_a_report_says_which_call_measured_a_case_and_on_which_day(self):
        self.measure(self.report(), "2026-01-01", stop_after=1)
        report = self.report()
        report.missing = ["c"]  # an earlier case is left out
        self.measure(report, "2026-01-02")
        report = self.report()
        self.assertEqual(report.missing, ["b", "d"])
        self.measure(report, "2026-01-03")
        whole = self.whole()
        self.assertEqual([(call["date"], call["cases"]) for call in whole["earlier"]], [("2026-01-01", ["a"]), ("2026-01-02", ["c"])])
        self.assertEqual(whole["date"], "2026-01-03")
        for call in whole["earlier"]:
            self.assertEqual((call["tree"], call["driver"], call["ceilings"]), (reports.tree_hash("rope"), "1", CEILINGS))
        self.assertEqual([r["case"] for r in whole["results"]], ["a", "a", "b", "b", "c", "c", "d", "d"])
        self.assertEqual(reports.days_of(whole), ["2026-01-01", "2026-01-02", "2026-01-03"])
        self.assertIn("Measured on 2026-01-01 and 2026-01-02 and 2026-01-03 on NVIDIA H200", report_tables.measured_on(whole))

    def test_a_report_is_continued_on_the_same_sources_or_machine_code_and_the_same_kind_of_gpu_alone(self):
        self.measure(self.report(), stop_after=3)
        path = self.folder / "unfinished" / "rope.json"
        of_this_tree = self.unfinished()
        old = {**of_this_tree, "tree": "0" * 16}
        for change, continued in (({}, True), ({"gpu": "NVIDIA H200 NVL"}, False), ({"tree": "0" * 16}, False),
                                  ({"tree": "0" * 16, "same_kernels": {"tree": of_this_tree["tree"], "kernels": 3, "changed": ["a.h"]}}, True),
                                  ({"tree": "0" * 16, "same_kernels": {"tree": "1" * 16}}, False)):
            path.write_text(json.dumps({**of_this_tree, **change}))
            self.assertEqual(self.report().missing, ["d"] if continued else list(CASES), change)
        path.write_text(json.dumps({**old, "same_kernels": {"tree": of_this_tree["tree"], "kernels": 3, "changed": ["a.h"]}}))
        self.measure(self.report())
        self.assertEqual((self.whole()["tree"], self.whole()["earlier"][0]["tree"], self.whole()["earlier"][0]["same_kernels"]["changed"]), (of_this_tree["tree"], "0" * 16, ["a.h"]))
        without_cases = {k: v for k, v in of_this_tree.items() if k != "case_seconds"}  # a report of before
        path.write_text(json.dumps(without_cases))
        (self.folder / "rope.json").unlink()
        self.assertEqual(self.report().missing, list(CASES))

    def test_an_unfinished_report_is_continued_by_the_same_programs_of_its_suite_alone(self):
        for suite, own in (("rope", {"gpu_rope.py", "gpu_common.py"}), ("families", {"gpu_families.py", "gpu_common.py", "gpu_decode.py", "gpu_models.py", "compiled_decode.py", "synthetic_gguf.py"}),
                           ("train_memory", {"gpu_train_memory.py", "gpu_common.py", "train_runs.py"}), ("gpu_tests", set()), ("sanitizers_as_8_0", set())):
            self.assertEqual({path.name for path in reports.bench_files(suite)}, own)
        self.assertTrue(all(ROOT / "bench/peers/gpu_common.py" in reports.bench_files(suite) for suite in gpu.SUITES))
        self.measure(self.report(), stop_after=3)
        unfinished = self.unfinished()
        self.assertEqual(unfinished["bench"], reports.bench_hash("rope"))
        before = reports.bench_hash
        with unittest.mock.patch.object(reports, "bench_hash", lambda suite: "1" * 16):  # the program has another case or peer
            self.assertEqual(self.report().missing, list(CASES))
            self.assertFalse(reports.can_be_continued(unfinished, "rope"))
        self.assertTrue(reports.can_be_continued(unfinished, "rope"))
        self.measure(self.report())
        self.assertNotIn("bench", self.whole())
        self.assertNotIn("bench", self.whole()["earlier"][0])
        with unittest.mock.patch.object(reports, "bench_hash", lambda suite: "1" * 16):
            self.assertEqual(self.report().missing, [])  # a whole report does not become stale
        root = self.folder / "root"
        (root / "bench/peers").mkdir(parents=True)
        for name, text in (("gpu_x.py", "import torch\nfrom helper import f\nrun('other.py', \"peer.cu\")\n"), ("helper.py", "    import late\n"), ("late.py", ""), ("peer.cu", ""), ("other.py", "")):
            (root / "bench/peers" / name).write_text(text)
        self.assertEqual([path.name for path in reports.bench_files("x", root)], ["gpu_x.py", "helper.py", "late.py", "peer.cu"])
        hash_of = before("x", root)
        (root / "bench/peers/other.py").write_text("changed")
        self.assertEqual(before("x", root), hash_of)
        (root / "bench/peers/late.py").write_text("changed")
        self.assertNotEqual(before("x", root), hash_of)

    def test_a_new_case_is_added_to_a_whole_report_and_a_removed_one_leaves(self):
        self.measure(self.report())
        report = self.report(cases={"e": 1.0, "b": 1.0, "a": 1.0})
        self.assertEqual(report.missing, ["e"])
        self.measure(report)
        self.assertEqual([r["name"] for r in self.whole()["results"]], ["e1", "e2", "b1", "b2", "a1", "a2"])

    def test_cases_that_do_not_fit_into_the_time_are_passed_over_and_named(self):
        self.measure(self.report(cases={"a": 100.0, "b": 10.0, "c": 30.0}))
        cases = {"a": 100.0, "b": 10.0, "c": 30.0, "new": 5.0}
        report = self.report(again=False, seconds=50, cases=cases)
        names = [report.missing[0] for _ in ()]
        for seconds in report.each():
            name = report.case
            self.clock.seconds += seconds
            report.add([row(name)])
            names.append(name)
        # After b and c ten seconds are left, and a case of unknown length is taken to be as long as the longest of this call.
        self.assertEqual(names, ["b", "c"])
        said = "\n".join(report.end())
        self.assertIn("2 of 4 cases are measured", said)
        self.assertIn("no time was left for 2 of them, which --continue measures: a (100 s), new (30 s)", said)
        report = self.report(seconds=120, cases=cases)
        self.assertEqual(report.missing, ["a", "new"])
        self.assertEqual(report.fitting(), ["a", "new"])
        self.assertEqual(self.report(seconds=110, cases=cases).fitting(), ["new"])
        report = self.report(seconds=110, cases=cases, again=False)
        self.assertEqual((report.fitting(["b", "c"]), report.fitting(["a"])), (["b", "c"], []))
        self.assertIn("no time was left for 1 of them, which --continue measures: a (100 s)", "\n".join(report.end()))
        self.assertEqual((self.report(seconds=20).at_most(60), self.report(seconds=20).at_most(6), self.report().at_most(60)), (20, 6, 60))

    def test_a_case_of_unknown_length_is_begun_unless_the_time_has_ended(self):
        self.assertTrue(self.report(seconds=1).fits("a"))
        self.assertFalse(self.report(seconds=0).fits("a"))

    def test_before_the_first_case_its_length_is_the_mean_of_a_report_without_the_lengths_of_its_cases(self):
        (self.folder / "rope.json").write_text(json.dumps({"suite": "rope", "gpu": H200, "tree": "old", "seconds": 40, "results": []}))
        report = self.report(seconds=25)
        self.assertEqual((report.missing, report.fitting()), (list(CASES), ["a", "b"]))
        report.add([row("a")], name="a", seconds=3.0)
        self.assertEqual(report.expected("b"), 3.0)

    def test_the_length_of_a_case_is_that_of_the_last_report_of_any_sources(self):
        self.measure(self.report(cases={"a": 30.0, "b": 30.0}))
        self.measure(self.report(again=False, cases={"a": 10.0, "b": 10.0}), stop_after=1)
        for path in (self.folder / "rope.json", self.folder / "unfinished" / "rope.json"):
            path.write_text(json.dumps({**reports.read(path), "tree": "0" * 16}))
        report = self.report(seconds=20)
        self.assertEqual((report.missing, report.expected("a"), report.expected("b"), report.fits("a"), report.fits("b")), (list(CASES), 10.0, 30.0, True, False))

    def test_a_process_that_warms_caches_takes_its_share_of_the_missing_cases_and_writes_nothing(self):
        self.measure(self.report(), stop_after=1)
        before = self.unfinished()
        report = self.report(share=(1, 2), writes=False)
        self.assertEqual(report.missing, ["c"])
        self.measure(report)
        self.assertEqual(self.unfinished(), before)

    def test_checks_list_an_unfinished_report_and_do_not_take_it_for_a_whole_one(self):
        folder = self.folder / "h200"
        with unittest.mock.patch.object(reports, "RESULTS", self.folder), unittest.mock.patch.object(reports, "ROOT", ROOT):
            report = suite_report.SuiteReport("rope", CASES, H200)
            for name in ("a", "b"):
                report.add([row(name)], name=name, seconds=1.0)
            self.assertEqual(list(reports.all_reports(self.folder)), [])
            self.assertEqual([path for path, _ in reports.unfinished_reports(self.folder)], [folder / "unfinished" / "rope.json"])
            self.assertEqual([suite for suite, _ in reports.outdated(["rope"], H200, self.folder)], ["rope"])
            plan = list(gpu.planned(["rope"], self.folder))
            self.assertEqual(plan[:2], ["h200, rope: no whole report; 2 s in 2 cases", "  unfinished, of these sources: 2 of 4 cases were not measured: c; d"])
        found = [(ROOT / "bench/results/h200/unfinished/rope.json", {**reports.read(folder / "unfinished" / "rope.json"), "tree": tree}) for tree in (reports.tree_hash("rope"), "0" * 16)]
        with unittest.mock.patch.object(reports, "unfinished_reports", lambda: found), unittest.mock.patch.object(sys, "argv", ["check_reports.py"]), contextlib.redirect_stdout(io.StringIO()) as said:
            self.assertEqual(check_reports.main(), 0)
        self.assertIn("unfinished: bench/results/h200/unfinished/rope.json: 2 of 4 cases were not measured\n", said.getvalue())
        self.assertIn("2 of 4 cases were not measured of other sources or programs; delete the file", said.getvalue())


class Programs(InFolder):
    def test_gpu_py_continues_a_suite_that_failed_with_the_cases_that_are_missing(self):
        suite = self.folder / "gpu_muon.py"
        suite.write_text(f"""import os, pathlib, sys
sys.path[:0] = [{str(ROOT / 'tools')!r}]
import suite_report
folder = pathlib.Path({str(self.folder)!r})
place = folder / "h200"
report = suite_report.SuiteReport("muon", dict.fromkeys("abc"), "H200", again=bool(os.environ.get(suite_report.CONTINUE)), until=float(os.environ[suite_report.UNTIL]), folder=place)
assert 0 < report.left() <= 500
for _ in report.each():
    if not (folder / "mended").exists() and len(report.rows) == 2:
        sys.exit(3)
    print("measures", report.missing[0], flush=True)
    report.add([{{"name": report.missing[0]}}])
print(*report.end(), sep="\\n", flush=True)
""")
        begin = (f"import pathlib, sys; sys.path.insert(0, {str(ROOT / 'bench')!r}); import gpu; gpu.PEERS = pathlib.Path({str(self.folder)!r}); "
                 f"sys.argv = ['gpu.py', 'muon', '--native', {str(suite)!r}, '--seconds', '500', *sys.argv[1:]]; gpu.main()")

        def call(*more):
            done = subprocess.run([sys.executable, "-c", begin, *more], capture_output=True, text=True)
            return done.returncode, [line.split()[1] for line in done.stdout.splitlines() if line.startswith("measures")], done.stderr
        self.assertEqual(call(), (1, ["a", "b"], "bench: failed: muon\n"))
        with unittest.mock.patch.object(gpu, "gpu_name", lambda: H200):
            self.assertEqual(list(gpu.lacking(["muon", "rope"], self.folder)), ["muon: 1 of 3 cases were not measured (--continue measures them): c"])
        # The signal of `timeout`, which ends a stage of tools/gpu.sh, has the same line.
        (self.folder / "nvidia-smi").write_text(f"#!/bin/sh\necho {H200}\n")
        (self.folder / "nvidia-smi").chmod(0o755)
        program = suite.read_text()
        suite.write_text(program.replace("sys.exit(3)", "import time; (folder / 'waits').touch(); time.sleep(60)"))
        with subprocess.Popen([sys.executable, "-c", begin.replace("gpu.main()", f"gpu.reports.RESULTS = pathlib.Path({str(self.folder)!r}); gpu.main()")],
                              stdout=subprocess.PIPE, text=True, env={**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}"}) as process:
            while not (self.folder / "waits").exists():
                self.assertIsNone(process.poll())
                time.sleep(0.05)
            process.terminate()
            self.assertIn("muon: 1 of 3 cases were not measured (--continue measures them): c\n", process.communicate(timeout=20)[0])
            self.assertEqual(process.returncode, 143)
        suite.write_text(program)
        (self.folder / "mended").touch()
        self.assertEqual(call("--continue")[:2], (0, ["c"]))
        self.assertEqual([r["name"] for r in reports.read(self.folder / "h200" / "muon.json")["results"]], ["a", "b", "c"])
        self.assertEqual(call("--continue")[:2], (0, []))
        self.assertEqual(call()[:2], (0, ["a", "b", "c"]))

    def ended(self, path):
        """Whether the process whose number is in a file has ended, within a few seconds."""
        for _ in range(100):
            try:
                if "(zombie)" in pathlib.Path(f"/proc/{path.read_text()}/status").read_text():
                    return True
            except FileNotFoundError:
                return True
            time.sleep(0.05)
        return False

    def test_what_a_suite_has_started_ends_with_the_suite_even_if_the_suite_fails(self):
        child = self.folder / "child"
        for status in (0, 3):
            with contextlib.redirect_stdout(io.StringIO()):
                self.assertEqual(gpu.measure("rope", ["sh", "-c", f"sleep 60 & printf $! >{child}; exit {status}"], 0), status)
            self.assertTrue(self.ended(child), status)

    def test_a_llama_cpp_without_the_package_that_writes_its_files_is_refused_before_any_measurement(self):
        server = self.folder / "llama.cpp" / "llama-server"
        server.parent.mkdir()
        server.write_text("#!/bin/sh\n")
        (self.folder / "gguf.py").write_text("raise ImportError('no module of this name')\n")
        (self.folder / "numpy.py").write_text("")

        def call(suite):
            return subprocess.run([sys.executable, ROOT / "bench/gpu.py", suite, "--native", server, "--origins", self.folder], capture_output=True, text=True,
                                  env={**os.environ, "PYTHONPATH": str(self.folder)})
        refused = call("serve")
        self.assertEqual((refused.returncode, refused.stdout, refused.stderr), (1, "", f"bench: serve: --llama-server: found no program {server}\n"))
        server.chmod(0o755)
        refused = call("serve")
        self.assertEqual((refused.returncode, refused.stdout, refused.stderr.count("\n")), (1, "", 1), refused.stderr)
        self.assertIn("bench: serve: --llama-server: found no package gguf, which writes llama.cpp's files of random weights; expected it installed (pip install gguf) or on PYTHONPATH",
                      refused.stderr)
        (self.folder / "gguf.py").write_text("")
        with unittest.mock.patch.dict(sys.modules, gguf=types.ModuleType("gguf"), numpy=sys.modules.get("numpy") or types.ModuleType("numpy")):
            gpu.check_llama(["serve", "muon"], self.folder)
            gpu.check_llama(["decode"], self.folder)  # its program was not given

    def test_a_sanitizers_report_is_made_in_parts_and_an_executable_that_found_errors_is_run_again(self):
        fake = self.folder / "bin"
        fake.mkdir()
        for name, text in (("nvidia-smi", "echo 'NVIDIA H200, 1'"), ("nvcc", ""),
                           ("compute-sanitizer", f"echo $2 $3 $4 $5 | grep -q test_y && [ ! -e {self.folder}/mended ] && found=1\n"
                                                 "echo '[  PASSED  ] 2 tests.'; echo \"ERROR SUMMARY: ${found:-0} errors\"; echo run >> " + str(self.folder / "runs"))):
            (fake / name).write_text(f"#!/bin/sh\n{text}\n")
            (fake / name).chmod(0o755)
        for name in ("test_x", "test_y"):
            (self.folder / name).write_text("#!/bin/sh\necho A.; echo '  OneSmall'; echo '  TwoSmall'\n")
            (self.folder / name).chmod(0o755)
        executables = [self.folder / name for name in ("test_x", "test_y")]

        def call(*more):
            runs = self.folder / "runs"
            runs.write_text("")
            with unittest.mock.patch.object(sanitize, "gpu_executables", lambda _: list(executables)), contextlib.redirect_stdout(io.StringIO()) as said, \
                 unittest.mock.patch.dict(os.environ, PATH=f"{fake}:{os.environ['PATH']}"), \
                 unittest.mock.patch.object(sys, "argv", ["sanitize.py", "--build", str(self.folder), "--out", str(self.folder / "out"), *more]):
                status = sanitize.main()
            return status, len(runs.read_text().splitlines()), said.getvalue()
        whole, unfinished = reports.paths_of("sanitizers", self.folder / "out")
        self.assertEqual(call("--tools", "memcheck", "--executables", "test_x")[:2], (0, 1))
        self.assertEqual(reports.read(unfinished)["incomplete"], "7 of 8 cases were not measured")
        status, runs, said = call("--continue", "--seconds", "0")
        self.assertEqual((status, runs), (0, 0))
        self.assertIn("no time was left for 7 of them", said)
        self.assertEqual(call("--continue")[:2], (1, 7))  # test_y finds errors
        self.assertEqual(len(reports.problems_of(reports.read(whole))), 4)
        (self.folder / "mended").touch()
        self.assertEqual(call("--continue")[:2], (0, 4))
        found = reports.read(whole)
        self.assertEqual((reports.problems_of(found), unfinished.exists(), len(found["results"])), ([], False, 8))
        self.assertEqual(call("--continue", "--filter", "*OneSmall")[1], 8)  # of other tests
        self.assertEqual(call("--continue", "--as", "8.0")[1], 4)  # memcheck and racecheck, and a report of its own
        self.assertTrue((self.folder / "out" / "sanitizers_as_8_0.json").is_file())

    def test_a_shard_that_the_end_of_the_time_stops_has_no_result(self):
        (self.folder / "compute-sanitizer").write_text(f"#!/bin/sh\nsleep 60 & printf $! >{self.folder}/child; wait\n")
        (self.folder / "compute-sanitizer").chmod(0o755)
        with unittest.mock.patch.dict(os.environ, PATH=f"{self.folder}:{os.environ['PATH']}"):
            run = lambda limit, until: sanitize.sanitize("memcheck", pathlib.Path("test_x"), "*", 0, 1, limit, self.folder, until)  # noqa: E731
            now = sanitize.time.monotonic()
            self.assertIsNone(run(60, now))
            self.assertIsNone(run(60, now + 0.5))
            self.assertTrue(self.ended(self.folder / "child"))
            self.assertEqual(run(0.5, now + 60)["status"], 124)
            self.assertTrue(self.ended(self.folder / "child"))
            # The signal of `timeout` ends the tests too, and waits for none.
            (self.folder / "child").unlink()
            begin = (f"import pathlib, signal, sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); import sanitize; signal.signal(signal.SIGTERM, sanitize.end_now); "
                     f"sanitize.sanitize('memcheck', pathlib.Path('test_x'), '*', 0, 1, 60, pathlib.Path({str(self.folder)!r}))")
            with subprocess.Popen([sys.executable, "-c", begin]) as process:
                while not (self.folder / "child").is_file() or not (self.folder / "child").read_text():
                    time.sleep(0.05)
                process.terminate()
                self.assertEqual(process.wait(20), 143)
            self.assertTrue(self.ended(self.folder / "child"))

    def test_tests_of_a_gpu_are_reported_one_by_one_and_those_that_did_not_end_are_left(self):
        lines = ["test 1", "    Start 1: fast", "", "1: Test command: test_a", "2: [ RUN      ] B.One", "1: [       OK ] A.One (20 ms)", "1: a.cpp:3: Skipped", "1: no GPU", "1: ",
                 "1: [  SKIPPED ] 1 test, listed below:", "1: [  PASSED  ] 2 tests.", "1/4 Test  #1: fast .............................   Passed    0.51 sec",
                 "2/4 Test  #2: crashed ..........................***Exception: SegFault  0.20 sec", "3: [  FAILED  ] 1 test, listed below:",
                 "3/4 Test #3: kernels_linear_portable_0 ........***Failed    1.20 sec", "4: [ RUN      ] C.One"]
        report = self.report(cases=dict.fromkeys(("fast", "crashed", "kernels_linear_portable_0", "stopped")), suite="gpu_tests")
        ran = []

        def run(line, **_):
            ran.append(line)
            process = unittest.mock.MagicMock(stdout=iter(line + "\n" for line in lines), pid=2**30)
            process.__enter__.return_value = process
            return process
        with contextlib.redirect_stdout(io.StringIO()) as said, unittest.mock.patch.object(gpu_tests.os, "killpg", side_effect=ProcessLookupError):
            good = gpu_tests.run_tests(report, ["ctest"], argparse.Namespace(jobs=3, limit=300), {}, run)
        self.assertFalse(good)
        self.assertIn("^(fast|crashed|kernels_linear_portable_0|stopped)$", ran[0])
        found = {r["test"]: (r["passed"], r["skipped"], r["failed"], r["seconds"]) for rows in report.rows.values() for r in rows}
        self.assertEqual(found, {"fast": (2, 1, 0, 0.5), "crashed": (0, 0, 1, 0.2), "kernels_linear_portable_0": (0, 0, 1, 1.2)})
        self.assertEqual(report.rows["fast"][0]["reasons"], {"no GPU": 1})
        self.assertIn("no time was left for 1 of them, which --continue measures: stopped", "\n".join(report.end()))
        self.assertIn("[  FAILED  ] 1 test, listed below:", said.getvalue())
        again = self.report(cases=dict.fromkeys(("fast", "crashed", "kernels_linear_portable_0", "stopped")), suite="gpu_tests", good=lambda r: r["failed"] == 0)
        self.assertEqual(again.missing, ["crashed", "kernels_linear_portable_0", "stopped"])  # a failed test runs again


@WITH_TORCH
class Suites(InFolder):
    """Each suite as a program, with a clock and measurements of the test."""

    def setUp(self):
        super().setUp()
        import gpu_common
        import torch
        self.common, self.output = gpu_common, io.StringIO()
        patch = lambda *of: self.enterContext(unittest.mock.patch.object(*of))  # noqa: E731
        self.enterContext(unittest.mock.patch.dict(os.environ))
        self.enterContext(contextlib.redirect_stdout(self.output))
        for name, value in (("Native", type("Native", (), {"__init__": lambda self, path: None})), ("ceilings", lambda native: CEILINGS), ("gpu_state", lambda *_: "1"), ("import_liger", lambda wheel: None)):
            patch(gpu_common, name, value)
        patch(torch.version, "cuda", "13.0")
        patch(gpu_common.suite_report, "SuiteReport", functools.partial(suite_report.SuiteReport, now=self.clock, folder=self.folder))
        for name, value in (("get_device_name", lambda i=0: H200), ("device_count", lambda: 2), ("empty_cache", lambda: None), ("mem_get_info", lambda: (1, 2)),
                            ("get_device_properties", lambda i: types.SimpleNamespace(L2_cache_size=1 << 20, multi_processor_count=132))):
            patch(torch.cuda, name, value)
        os.environ.pop(suite_report.CONTINUE, None)
        os.environ.pop(suite_report.UNTIL, None)
        self.measured = []
        if importlib.util.find_spec("ingot") is None and "ingot" not in sys.modules:  # of the suite host_cost
            sys.modules["ingot"] = types.ModuleType("ingot")
            self.addCleanup(sys.modules.pop, "ingot")

    def call(self, suite, *more, seconds=None, again=True, change=lambda module: None):
        """Runs a suite's main program, in which `change` may patch names of the module, for so many seconds of the clock."""
        os.environ[suite_report.UNTIL] = str(self.clock() + seconds) if seconds else ""
        os.environ[suite_report.CONTINUE] = "1" if again else ""
        self.measured.clear()
        path = ROOT / "bench" / "peers" / f"gpu_{suite}.py"
        with unittest.mock.patch.object(sys, "argv", [str(path), *([] if suite == "host_cost" else ["--native", "x/lib.so"]), *more]):
            if "def main(" not in path.read_text(encoding="utf-8"):
                runpy.run_path(str(path), run_name="__main__")
                return list(self.measured)
            spec = importlib.util.spec_from_file_location(f"gpu_{suite}", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            with contextlib.ExitStack() as patches:
                for name, value in (change(module) or {}).items():
                    patches.enter_context(unittest.mock.patch.object(module, name, value))
                module.main()
        return list(self.measured)

    def files(self):
        return sorted(path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*.json"))

    def case(self, name, rows=None, seconds=10.0):
        """Stands for the measurement of a case."""
        self.measured.append(name)
        self.clock.seconds += seconds
        return rows or [row(name)]

    SIMPLE = ("rmsnorm", "rope", "gate", "mlp", "linear", "experts", "swiglu", "wide_mlp", "cross_entropy", "muon", "attention", "sampling", "decode", "decode_gpus", "draft", "prompt",
              "train_gpus", "train_memory", "generate", "host_cost", "portable")

    def test_every_suite_of_cases_one_after_the_other_is_measured_in_two_calls(self):
        def measure_each(report, ceilings_of, measure, said, **more):
            self.assertTrue(report.cases)
            self.common.describe(report, ceilings_of(), **more)
            for _ in report.each():
                report.add(self.case(report.case))
            self.common.print_end(report)
        fakes = {"train_gpus": {"name_nccl": lambda: None}, "generate": {"run": lambda *_: "{\"cpu\": \"x\"}"}, "portable": {"As": lambda *_: None, "mma_loop": lambda _: (lambda: None, 1),
                 "interleaved": lambda *_, **__: ({"loop": 1.0}, {})}, "host_cost": {"parts_of_a_call": lambda: {}, "ceilings": lambda: CEILINGS}}
        for suite in self.SIMPLE:
            with self.subTest(suite), unittest.mock.patch.object(self.common, "measure_each", measure_each):
                sys.modules.pop("train_runs", None)  # which took measure_each from gpu_common
                call = functools.partial(self.call, suite, change=lambda module, suite=suite: fakes.get(suite))
                first = call(seconds=11)
                self.assertEqual(len(first), 1)
                self.assertEqual(self.files(), [f"unfinished/{suite}.json"])
                rest = call()
                self.assertNotIn(first[0], rest)
                self.assertGreater(len(rest), 0)
                self.assertEqual(self.files(), [f"{suite}.json"])
                self.assertEqual(len(reports.read(self.folder / f"{suite}.json")["results"]), 1 + len(rest))
                (self.folder / f"{suite}.json").unlink()

    def test_a_report_is_written_after_each_case_whose_lines_end_with_its_seconds_and_a_failed_case_leaves_the_others(self):
        for error in (RuntimeError("b failed"), SystemExit("b failed")):
            report = self.common.begin("rope", argparse.Namespace(only=None, quick=False), ["a", "b", "c"], str)

            def measure(case, ceiling, error=error):
                if case == "b":
                    raise error
                yield from self.case(case, [row(f"{case}1"), row(f"{case}2")], 12.5)
            with self.assertRaises(SystemExit) as ended, contextlib.redirect_stderr(io.StringIO()) as errors:
                self.common.measure_each(report, lambda: CEILINGS, measure, lambda r: f"{r['case']}: {r['name']}")
            self.assertEqual(ended.exception.code, 1)
            self.assertIn(f"{type(error).__name__}: b failed", errors.getvalue())
            self.assertIn("a: a1\na: a2  [12.5 s]\n", self.output.getvalue())
            self.assertIn("rope: failed, with the errors above: b\n", self.output.getvalue())
            unfinished = reports.read(self.folder / "unfinished" / "rope.json")
            self.assertEqual((unfinished["missing"], list(unfinished["case_seconds"])), (["b"], ["a", "c"]))
        chosen = self.common.begin("rope", argparse.Namespace(only="b|c", quick=False), ["a", "b", "c"], str)
        self.assertEqual((chosen.missing, chosen.writes), (["b", "c"], False))
        with self.assertRaisesRegex(AssertionError, "found 2 cases with 1 names"):
            self.common.begin("rope", argparse.Namespace(only=None, quick=False), ["a", "a"], str)

    def test_a_model_of_transformers_is_measured_with_its_peers_in_one_call(self):
        def child(model, variant, options, seconds):
            took = 20.0 if variant.endswith("compile") else 5.0
            self.measured.append((model, variant))
            self.clock.seconds += min(took, seconds)
            if seconds < took:
                return None, self.common.LATE
            if variant == "liger":
                return None, "not installed, and not given by path"
            return {"us": 100.0, "losses": [2.0], "memory": 1, "flops": 1e9, "p20_p80": [1, 2]}, None

        def change(module):
            self.order, self.models = list(module.ORDER), list(module.SHAPES)
            return {"child": child, "measure": functools.partial(module.measure, now=self.clock)}
        # Llama takes 80 seconds. Of Qwen, which nobody has measured, as many are expected and 30 left.
        self.assertEqual(self.call("models", seconds=110, change=change), [("Llama-3.2-1B", variant) for variant in self.order])
        self.assertEqual([r["name"] for r in reports.read(self.folder / "unfinished/models.json")["results"]],
                         ["Llama-3.2-1B, training step", "Llama-3.2-1B, training step, attention too", "Llama-3.2-1B, training step, with torch.compile",
                          "Llama-3.2-1B, training step, attention too, with torch.compile"])
        # A call whose time ends within the model measures all of the model's variants again in the next one.
        self.clock.seconds += 1
        reports_of_before = self.files()
        self.assertEqual(self.call("models", seconds=45, change=change), [("Qwen3-4B", variant) for variant in self.order[:6]])
        self.assertIn("Qwen3-4B, patch_compile: the time of this call ended\nmodels: 1 of 2 cases are measured\nmodels: no time was left for 1 of them, which --continue measures: Qwen3-4B",
                      self.output.getvalue())
        self.assertEqual(self.files(), reports_of_before)
        self.assertEqual(self.call("models", seconds=500, change=change), [("Qwen3-4B", variant) for variant in self.order])
        whole = reports.read(self.folder / "models.json")
        self.assertEqual(([r["case"] for r in whole["results"]], reports.problems_of(whole)), (["Llama-3.2-1B"] * 4 + ["Qwen3-4B"] * 4, []))
        self.assertEqual(whole["results"][0]["absent"], {"liger": "not installed, and not given by path"})
        self.assertEqual(whole["results"][5]["peers"], {"torch_eager": 100.0, "torch_compile": 100.0})
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as errors:
            self.call("models", again=False,
                      change=lambda module: {"child": lambda m, variant, *of: (None, "crashed") if (m, variant) == ("Llama-3.2-1B", "patch") else child(m, variant, *of)})
        self.assertIn("RuntimeError: Llama-3.2-1B, patch: crashed", errors.getvalue())
        self.assertEqual(reports.read(self.folder / "unfinished/models.json")["missing"], ["Llama-3.2-1B"])  # Qwen was measured

    def test_the_families_peers_compile_together_and_a_peer_without_time_leaves_its_model_for_the_next_call(self):
        compile_seconds = 60.0

        def compiled(models, seconds):
            self.measured.append([m["size"] for m in models])
            self.clock.seconds += min(compile_seconds, seconds)
            return {m["size"]: ({"us": 5.0}, None) if seconds > compile_seconds else (None, self.common.LATE) for m in models}

        def change(module):
            self.enterContext(unittest.mock.patch.object(module.gpu_decode, "ask", lambda model, ingot: None))
            self.enterContext(unittest.mock.patch.object(module.gpu_decode, "rows", lambda model, found: self.case(model["size"], [row(model["size"] + ", greedy, through the decoder")])))
            self.enterContext(unittest.mock.patch.object(module.gpu_decode, "add_rival", lambda *_: None))
            self.sizes = [m["size"] for m in module.MODELS]
            return {"measure_compiled": compiled}
        self.assertEqual(self.call("families", seconds=40, change=change), [self.sizes])
        self.assertEqual(self.files(), [])
        self.assertEqual(self.call("families", seconds=1000, change=change), [self.sizes, *self.sizes])
        whole = reports.read(self.folder / "families.json")
        self.assertEqual(whole["results"][0]["peers"]["torch_compile"], 5.0)
        self.assertEqual(set(whole["case_seconds"].values()), {20.0})  # ten, and a sixth of the compilation
        self.assertEqual(self.call("families", seconds=70, again=False, change=change)[0], self.sizes[:3])

        def failing(module):
            found = change(module)
            rows = module.gpu_decode.rows
            self.enterContext(unittest.mock.patch.object(module.gpu_decode, "rows", lambda model, _: sys.exit("crashed") if model["size"] == self.sizes[1] else rows(model, _)))
            return found
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()):
            self.call("families", again=False, change=failing)
        self.assertEqual(len(reports.read(self.folder / "unfinished/families.json")["missing"]), 1)

    def test_a_training_steps_programs_are_measured_beside_their_peers(self):
        def change(module):
            def ours(options, folder, applications):
                self.measured.append(applications)
                self.clock.seconds += 10
                return {"step": 5.0, "pass": 4.0, "step_of_5_passes": 20.0, "flops": 1e12, "memory_bytes": 5}
            found = {"step": 6.0, "pass": 5.0, "memory_bytes": 7, "allocated_bytes": 6, "first_pass_s": 1.0, "graphs_from_cache": 1, "loss": 1.0}
            late = self.late
            child = lambda peer, applications, options: types.SimpleNamespace(end=lambda until: (None, self.common.LATE) if (peer, applications) in late else (found, None))  # noqa: E731
            return {"ours_round": ours, "start_child": child, "write_data": lambda *_: None}
        self.late = {("packed", 17)}
        with self.assertRaisesRegex(SystemExit, "train: not measured: compile_packed, 17 applications"):
            self.call("train", seconds=100, change=change)
        self.assertEqual(self.measured, [11, 17, 11, 17])
        self.assertEqual(reports.read(self.folder / "unfinished/train.json")["missing"], ["golf, 17 applications"])
        self.late = set()
        self.assertEqual(self.call("train", seconds=100, change=change), [17, 17])
        self.assertEqual(len(reports.read(self.folder / "train.json")["results"]), 4)

    def test_samplings_of_a_token_on_the_host_are_measured_in_turn(self):
        def change(module):
            samplings = list(module.SAMPLING)

            def python(options, names, seed):
                self.case(names)
                return {name: {"generate": 1e-3, "stream": 1e-3} for name in names}
            return {"python": python, "generate": lambda *_: 1.0, "client": lambda *_: 1.0, "running": lambda *_: contextlib.nullcontext(""),
                    "kernels_and_decoder": lambda options: (dict.fromkeys(samplings, 0.9), dict.fromkeys(samplings, 1.0))}
        self.assertEqual(len(self.call("host_token", seconds=100, change=change)), 3)
        whole = reports.read(self.folder / "host_token.json")
        self.assertEqual((len(whole["results"]), set(whole["case_seconds"].values())), (20, {7.5}))
        self.assertEqual(self.call("host_token", seconds=18, again=False, change=change)[0], ["greedy", "temperature 1"])

    def test_a_window_of_test_time_training_without_time_for_its_peers_is_left(self):
        found = {"step": 1.0, "run": 2.0, "run_tokens": 10, "compile_s": 1.0, "allocated_bytes": 3}
        result = lambda absent: ([found], found, {"compile_rows": found}, absent, CEILINGS, "1")  # noqa: E731
        self.call("ttt", seconds=20, change=lambda module: {"measure": lambda *_: result({"compile_x": self.common.LATE})})
        self.assertEqual(self.files(), [])
        self.call("ttt", change=lambda module: {"measure": lambda *_: result({"compile_x": self.common.LATE})})  # too slow a peer, of enough time
        self.assertEqual(self.files(), ["ttt.json"])

    def test_a_server_answers_all_missing_cases_of_its_model_and_the_rival_belongs_to_one(self):
        def change(module):
            def running(line, *_):
                self.measured.append(line[3])
                return contextlib.nullcontext(line[3])

            def ask(options, url, sampling, counts, requests=None):
                self.clock.seconds += 10
                return dict.fromkeys(counts, {"tokens_per_second": 1.0})

            def rival(rows, *_):
                self.measured.append("llama.cpp")
                self.clock.seconds += 50
                for r in rows:
                    r["peers"]["llama.cpp"] = 2.0
            return {"running": running, "ask": ask, "add_rival": rival, "said": lambda r: "x"}
        self.assertEqual(self.call("serve", change=change), ["20b", "llama.cpp", "120b"])
        whole = reports.read(self.folder / "serve.json")
        self.assertEqual((len(whole["results"]), len(whole["case_seconds"])), (26, 8))
        with_rival = "gpt-oss-20b, bf16 dense, temperature 1"
        self.assertEqual((whole["case_seconds"][with_rival], {r["case"] for r in whole["results"] if r["peers"]}), (60.0, {with_rival}))
        # A sampling that fails leaves the others, and the rival's time is not lost with it.
        def failing(module):
            found = change(module)

            def ask(options, url, sampling, counts, requests=None):
                if "--top-p" in sampling and url == "20b":
                    raise RuntimeError("crashed")
                return found["ask"](options, url, sampling, counts, requests)
            return {**found, "ask": ask}
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()):
            self.call("serve", again=False, change=failing)
        self.assertEqual(self.measured, ["20b", "llama.cpp", "120b"])
        self.assertEqual(reports.read(self.folder / "unfinished/serve.json")["missing"], ["gpt-oss-20b, bf16 dense, top-p 0.9"])
        # 60 seconds do not fit, the other cases of the model do; then its remaining case, with the rival.
        self.output.truncate(0)
        self.assertEqual(self.call("serve", seconds=40, again=False, change=change), ["20b"])
        self.assertIn("serve: 3 of 8 cases are measured\nserve: no time was left for 5 of them, which --continue measures: ", self.output.getvalue())
        self.assertEqual(self.call("serve", seconds=1000, change=change), ["20b", "llama.cpp", "120b"])
        self.assertEqual(len(reports.read(self.folder / "serve.json")["results"]), 26)
        # The missing cases of the first model, which is over, take no time from those of the second one: after ten seconds, three of ten seconds fit into 35.
        (self.folder / "serve.json").write_text(json.dumps({"suite": "serve", "gpu": H200, "tree": "old", "seconds": 240, "results": []}))
        self.output.truncate(0)
        self.assertEqual(self.call("serve", seconds=45, again=False, change=lambda module: {**change(module), "add_rival": lambda *_: None}), ["20b", "120b"])
        self.assertIn("serve: 4 of 8 cases are measured\nserve: no time was left for 4 of them, which --continue measures: ", self.output.getvalue())


if __name__ == "__main__":
    unittest.main()
