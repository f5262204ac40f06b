"""Tests of the tools that run the GPU tests, also under compute-sanitizer, as another GPU, or from PTX alone: the reports name what failed, and explained hazards are told from unexplained ones."""
import argparse
import collections
import contextlib
import io
import json
import os
import pathlib
import struct
import tempfile
import threading
import time
import unittest
import unittest.mock

from good_report import GOOD
import gpu_tests
import ptx_build
import report_tables
import reports
import sanitize


def program_with(*containers):
    """The bytes of a 64-bit ELF file with containers of device code; a container is a list of (kind, compute capability times 10, code)."""
    section = b""
    for entries in containers:
        body = b""
        for kind, target, code in entries:
            header = bytearray(32)
            ptx_build.ENTRY.pack_into(header, 0, kind, 0x101, len(header), len(code))
            ptx_build.TARGET.pack_into(header, ptx_build.AT_TARGET, target)
            body += bytes(header) + code
        section += ptx_build.CONTAINER.pack(ptx_build.MAGIC, 1, ptx_build.CONTAINER.size, len(body)) + body + bytes(8)
    names = b"\0.nv_fatbin\0.shstrtab\0"
    start = bytearray(64)
    start[:5] = b"\x7fELF\x02"
    struct.pack_into("<Q", start, 0x28, 64 + len(section) + len(names))
    struct.pack_into("<HH", start, 0x3C, 3, 2)
    table = b"".join(struct.pack("<IIQQQQ24x", *header) for header in ((0, 0, 0, 0, 0, 0), (1, 1, 0, 0, 64, len(section)), (12, 3, 0, 0, 64 + len(section), len(names))))
    return bytearray(bytes(start) + section + names + table)


class PtxBuild(unittest.TestCase):
    def test_machine_code_and_newer_ptx_are_removed_and_older_ptx_stays(self):
        ptx, machine = ptx_build.PTX, ptx_build.MACHINE_CODE
        program = program_with([(machine, 90, b"m" * 24), (ptx, 80, b"p" * 16)], [(machine, 90, b"n" * 8)], [(machine, 90, b"o" * 8), (ptx, 90, b"q" * 8), (ptx, 75, b"r" * 8)])
        before = bytes(program)
        self.assertEqual(ptx_build.remove_newer(program, 80), (2, 4))
        entries = [(kind, target, bytes(program[code:code + size])) for _, kind, target, code, size in ptx_build.entries_of(program)]
        gone = (ptx_build.REMOVED[0], ptx_build.REMOVED[1])
        self.assertEqual(entries, [(*gone, bytes(24)), (ptx, 80, b"p" * 16), (*gone, bytes(8)), (*gone, bytes(8)), (*gone, bytes(8)), (ptx, 75, b"r" * 8)])
        self.assertEqual(len(program), len(before))
        self.assertEqual(ptx_build.remove_newer(bytearray(b"#!/bin/sh\n"), 80), (0, 0))

    def test_bytes_that_are_no_device_code_are_refused(self):
        program = program_with([(3, 90, b"m" * 8)])
        with self.assertRaisesRegex(ValueError, "entry of kind 3"):
            ptx_build.remove_newer(program, 80)
        program = program_with([(ptx_build.PTX, 80, b"p" * 8)])
        program[64] ^= 1
        with self.assertRaisesRegex(ValueError, "expected the magic number"):
            ptx_build.remove_newer(program, 80)

    def test_the_copys_tests_are_run_where_the_copy_is(self):
        text = "# Source directory: /a/tree\n# Build directory: /a/tree/build/cuda\nadd_test(x \"/a/tree/build/cuda/test_x\" \"/a/tree/tests/x.py\")\n"
        self.assertIn('"/b/tree/build/ptx80/test_x" "/b/tree/tests/x.py"', ptx_build.moved(text, "/b/tree", "/b/tree/build/ptx80"))
        text = text.replace("/a/tree/build/cuda", "/elsewhere")
        self.assertIn('"/b/ptx80/test_x" "/b/tree/tests/x.py"', ptx_build.moved(text, "/b/tree", "/b/ptx80"))


class GpuTools(unittest.TestCase):
    def test_a_sanitizer_report_is_clean_or_names_the_failed_tools(self):
        run = {"tool": "memcheck", "executable": "test_gpu_ptx", "tests": 9, "errors": 0, "status": 0}
        report = {**{k: v for k, v in GOOD.items() if k != "ceilings"}, "suite": "sanitizers", "results": [run]}
        self.assertEqual(reports.problems_of(report), [])
        self.assertIn("found 2 errors", " / ".join(reports.problems_of({**report, "results": [{**run, "errors": 2}]})))
        self.assertIn("tool is missing", " / ".join(reports.problems_of({**report, "results": [{"tests": 1}]})))
        self.assertIn("no results", " / ".join(reports.problems_of({**report, "results": []})))

    def test_a_report_of_gpu_tests_names_the_failed_ones(self):
        log = "[       OK ] A.One (20 ms)\n[       OK ] A.Two (1300 ms)\na.cpp:3: Skipped\nno GPU\n\n[  SKIPPED ] A.Three (0 ms)\n[  PASSED  ] 2 tests.\n[  SKIPPED ] 1 test, listed below:\n"
        lines = [*(f"1: {line}" for line in log.splitlines()), "2: [ RUN      ] B.One", "1/2 Test #1: fast ......   Passed    0.50 sec", "2/2 Test #2: slow ......***Timeout 300.00 sec"]
        results = [result for result, _ in gpu_tests.results_of(lines)][::-1]
        self.assertEqual(results[1], {"test": "fast", "seconds": 0.5, "passed": 2, "skipped": 1, "failed": 0, "slowest": "A.Two", "slowest_seconds": 1.3,
                                      "reasons": {"no GPU": 1}})
        self.assertEqual((results[0]["test"], results[0]["failed"]), ("slow", 1))
        report = {**{k: v for k, v in GOOD.items() if k != "ceilings"}, "suite": "gpu_tests", "results": results[1:]}
        lines = list(report_tables.gpu_tests_table({**report, "results": [{**results[1], "skipped": 3}]}))
        self.assertTrue(lines[0].endswith("`./run gpu`: 1 tests of ctest with 2 passed, 3 skipped and 0 failed cases."), lines)
        self.assertEqual(lines[4:], ["| no reason in the log | 2 |", "| no GPU | 1 |"])
        self.assertEqual(reports.problems_of(report), [])
        self.assertIn("slow: found 1 failed cases", " / ".join(reports.problems_of({**report, "results": results})))
        self.assertIn("no results", " / ".join(reports.problems_of({**report, "results": []})))
        self.assertIn("seconds is missing", " / ".join(reports.problems_of({**report, "results": [{"test": "x"}]})))

    def test_a_report_of_an_imitated_gpu_says_what_ran(self):
        result = {"test": "fast", "seconds": 0.5, "passed": 2, "skipped": 1, "failed": 0, "slowest": "A.Two", "slowest_seconds": 1.3}
        report = {**{k: v for k, v in GOOD.items() if k != "ceilings"}, "suite": "gpu_tests_as_8_0", "results": [result]}
        self.assertIn("as: grade is missing", " / ".join(reports.problems_of(report)))
        with tempfile.TemporaryDirectory() as folder:
            build = pathlib.Path(folder)
            variables, shown = ptx_build.imitation_of(build, "8.0")
            self.assertEqual((variables, shown["grade"]), ({"INGOT_GPU_AS": "8.0"}, "limited"))
            (build / ptx_build.NOTE).write_text(json.dumps({"newest_ptx": 80}))
            variables, shown = ptx_build.imitation_of(build, "8.0")
            self.assertIn("CUDA_CACHE_PATH", variables)
            self.assertEqual((shown["code"], shown["grade"]), ("compiled by the driver from PTX up to compute_80", "imitated"))
        self.assertEqual(reports.problems_of({**report, "as": shown}), [])
        self.assertIn("fast: found 1 failed", " / ".join(reports.problems_of({**report, "as": shown, "results": [{**result, "failed": 1}]})))
        self.assertEqual(reports.how_to_measure("gpu_tests_as_8_6"), "tools/gpu_tests.py --as 8.6")
        self.assertEqual(reports.tree_hash("gpu_tests_as_8_0"), reports.tree_hash(reports.GPU_TESTS))

    def test_a_sanitizer_run_in_shards_adds_them_up(self):
        with tempfile.TemporaryDirectory() as folder:
            tool = pathlib.Path(folder) / "compute-sanitizer"
            shards = ['echo "[  PASSED  ] 6 tests."; echo "ERROR SUMMARY: 0 errors"',
                      'echo "[  PASSED  ] 4 tests."; echo "ERROR SUMMARY: 3 errors"; exit 1',
                      'echo "[  PASSED  ] 6 tests."']  # the output does not mention errors
            tool.write_text("#!/bin/sh\ncase $GTEST_SHARD_INDEX/$GTEST_TOTAL_SHARDS in\n"
                            + "".join(f"{i}/3) {does};;\n" for i, does in enumerate(shards)) + "*) exit 9;;\nesac\n")
            tool.chmod(0o755)
            with unittest.mock.patch.dict(os.environ, PATH=f"{folder}:{os.environ['PATH']}"):
                runs = [sanitize.sanitize("racecheck", pathlib.Path("test_x"), "*Small", i, 3, 60, pathlib.Path(folder)) for i in range(3)]
        self.assertEqual([run["errors"] for run in runs], [0, 3, None])
        # Three errors found, one for the run without a count, two for the tests that did not pass.
        self.assertEqual(sanitize.result_of("racecheck", pathlib.Path("test_x"), 18, runs),
                         {"tool": "racecheck", "executable": "test_x", "tests": 16, "errors": 6, "status": 1})
        self.assertEqual(sanitize.result_of("racecheck", pathlib.Path("test_x"), 6, runs[:1])["errors"], 0)

    def test_executables_with_persistent_kernels_run_last_and_a_few_at_a_time(self):
        others, persistent = pathlib.Path("test_x"), pathlib.Path("test_models_decode")
        lock, running, most, order = threading.Lock(), collections.Counter(), collections.Counter(), []

        def run(tool, executable, *_):
            with lock:
                order.append(executable.name)
                running[executable.name] += 1
                most[executable.name] = max(most[executable.name], running[executable.name])
            time.sleep(0.02)
            with lock:
                running[executable.name] -= 1
            return {"tests": 2, "skipped": 0, "errors": 0, "explained": 0, "status": 0, "seconds": 0.02}

        cases = {"decode": ("racecheck", persistent), "x": ("racecheck", others)}
        report = unittest.mock.Mock(missing=list(cases), cases=cases, until=None)
        arguments = argparse.Namespace(tools=["racecheck"], executables=[persistent, others], jobs=8, limit=60, filter="*Small", capability=None)
        with unittest.mock.patch.object(sanitize, "sanitize", run), contextlib.redirect_stdout(io.StringIO()):
            sanitize.run_cases(report, {persistent: 24, others: 24}, arguments, pathlib.Path("."), {})
        self.assertEqual(order, ["test_x"] * 12 + ["test_models_decode"] * 12)
        self.assertLessEqual(most["test_models_decode"], sanitize.FEW)
        self.assertEqual([call.kwargs["name"] for call in report.add.call_args_list], ["x", "decode"])

    def test_hazards_that_are_explained_are_known_by_both_places(self):
        ours = "ingot::cuda::attention_hopper::"
        read, write = f"{ours}Multiplier<F<(int)64>>::run()+0x5e0 in forward.cuh:58", f"{ours}KeyFetcher<F>::publish(const {ours}Tile &)+0xb0 in walk.cuh:94"

        def log(first, second):
            return f"========= Error: Race reported between Read access at {first}\n=========     and Write access at {second} [64 hazards]\n========= \n"
        self.assertEqual(sanitize.explained_in(log(read, write) + log(write, read), "test_x"), 2)
        self.assertEqual(sanitize.explained_in(log(read, read) + log(read, write.replace("publish", "fetch")), "test_x"), 0)
        best = "ingot::sampling::block_best(unsigned long, ingot::sampling::BestMemory &)+0x19 in best.cuh:44"
        self.assertEqual(sanitize.explained_in(log(best, best), "test_kernels_sampling"), 0)
        self.assertEqual(sanitize.explained_in(log(best, best), "test_models_decode"), 1)
        fill = "ingot::ptx::bulk_load(void *, const void *, unsigned int, unsigned long *)+0x4f50 in tma.cuh:34"
        read = "void ingot::decode::load_from_ring<(ingot::WeightFormat)2>(const char *, T2 &)+0x30 in products.cuh:30"
        self.assertEqual(sanitize.explained_in(log(fill, read), "test_models_decode"), 1)
        self.assertEqual(sanitize.explained_in(log(fill, fill) + log(fill, read.replace("load_from_ring", "store")), "test_models_decode"), 0)
        self.assertEqual(sanitize.explained_in(log(fill, read), "test_models_gpt_oss"), 0)

    def test_a_hazard_is_explained_where_all_its_accesses_are(self):
        def variant(warp_rings):
            return ("ingot::decode::TokenVariant{(ingot::WeightFormat)2, (ingot::WeightFormat)4, (bool)0, (bool)0, (bool)0, (bool)0, (bool)0, "
                    f"(unsigned int)64, (bool){warp_rings}}}")

        def squares(access, warp_rings):
            if access == "Write":
                return (f"Write access at void ingot::decode::write_normed_vector<(ingot::WeightFormat)4, {variant(warp_rings)}>"
                        f"(const ingot::decode::TokenContext<{variant(warp_rings)}> &, const float *)+0x8c0 in activation_vectors.cuh:68")
            return (f"Read access at float ingot::decode::residual_rstd<{variant(warp_rings)}>"
                    f"(const ingot::decode::TokenContext<{variant(warp_rings)}> &, float)+0x30 in activation_vectors.cuh:76")

        def log(first, *seconds):
            return f"========= Error: Race reported between {first}\n" + "".join(f"=========     and {second} [8 hazards]\n" for second in seconds) + "========= \n"
        rings = log(squares("Write", 1), squares("Read", 1), squares("Read", 1))
        self.assertEqual(sanitize.explained_in(rings, "test_models_decode"), 1)
        self.assertEqual(sanitize.unexplained_in(rings, "test_models_decode"), [])
        # The form with the copy engine hands the sums over by an mbarrier.
        self.assertEqual(sanitize.explained_in(log(squares("Write", 0), squares("Read", 0)), "test_models_decode"), 0)
        # Two writes are another kind of hazard.
        self.assertEqual(sanitize.explained_in(log(squares("Write", 1), squares("Write", 1)), "test_models_decode"), 0)
        other = "Read access at void ingot::decode::weigh(const float *, unsigned int)+0x60 in choose.cuh:58"
        mixed = log(squares("Write", 1), squares("Read", 1), other) + rings
        self.assertEqual(sanitize.explained_in(mixed, "test_models_decode"), 1)
        self.assertEqual(sanitize.unexplained_in(2 * mixed, "test_models_decode"),
                         ["2 x Write decode::write_normed_vector in activation_vectors.cuh:68 / Read decode::weigh in choose.cuh:58"])

    def test_a_sanitizer_run_that_was_ended_says_so_and_shows_its_hazards(self):
        with tempfile.TemporaryDirectory() as folder:
            log = pathlib.Path(folder) / "log"
            log.write_text("========= Error: Race reported between Write access at ingot::f<T>(int)+0x1 in a.cuh:7\n"
                           "=========     and Read access at ingot::g(int)+0x2 in a.cuh:9 [4 hazards]\n========= \n")
            shards = [{"errors": None, "status": 124, "log": log, "seconds": 240.2}]
            with contextlib.redirect_stdout(io.StringIO()) as shown:
                sanitize.show({"tool": "racecheck", "executable": "test_x", "tests": 4, "errors": 3, "status": 124}, 6, shards, 240.2)
        self.assertIn("run 0 of 1 was ended after 240 s, without a count", shown.getvalue())
        self.assertIn("1 x Write f in a.cuh:7 / Read g in a.cuh:9", shown.getvalue())


if __name__ == "__main__":
    unittest.main()
