"""The report tools: a good report passes, each kind of damage is named, a changed source makes a report stale, tables are generated."""
import argparse
import concurrent.futures
import contextlib
import copy
import importlib.util
import io
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "bench")]
import check_reports  # noqa: E402
import curves  # noqa: E402
import gpu  # noqa: E402
import report_tables  # noqa: E402
import reports  # noqa: E402
import same_kernels  # noqa: E402
import gpu_tests  # noqa: E402
import ptx_build  # noqa: E402
import sanitize  # noqa: E402

GOOD = {
    "suite": "rmsnorm", "tree": "0" * 16, "gpu": "GPU", "driver": "1", "cuda": "13.0", "date": "2026-01-01", "command": "./run gpu",
    "ceilings": {"copy_TBps": 4.0, "read_TBps": 4.5, "bf16_TFLOPs": 700.0},
    "results": [{"name": "RMSNorm", "shape": [4096, 4096], "dtype": "bf16", "ours_us": 16.0, "limit_us": 15.0, "error": 1e-3,
                 "tolerance": 2e-3, "peers": {"torch_eager": 24.0, "torch_compile": 20.0, "origin": 44.0}}],
}


def damaged(change):
    report = copy.deepcopy(GOOD)
    change(report)
    return " / ".join(reports.problems_of(report))


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


class Reports(unittest.TestCase):
    def test_a_good_report_has_no_problems(self):
        self.assertEqual(reports.problems_of(GOOD), [])

    def test_damage_is_named(self):
        self.assertIn("driver is missing", damaged(lambda r: r.pop("driver")))
        self.assertIn("copy_TBps", damaged(lambda r: r["ceilings"].pop("copy_TBps")))
        self.assertIn("no results", damaged(lambda r: r.update(results=[])))
        self.assertIn("no times of the origin's kernels", damaged(lambda r: r["results"][0]["peers"].pop("origin")))
        self.assertIn("torch_compile is missing", damaged(lambda r: r["results"][0]["peers"].pop("torch_compile")))
        self.assertEqual(damaged(lambda r: r["results"][0].update(peers={"torch_eager": 24.0, "origin": 44.0}, absent={"torch_compile": "OutOfMemoryError"})), "")
        self.assertIn("torch_eager is missing", damaged(lambda r: r["results"][0].update(peers={"torch_compile": 20.0, "origin": 44.0}, absent={"torch_eager": "why"})))
        self.assertIn("expected at most 0.002", damaged(lambda r: r["results"][0].update(error=0.003)))
        self.assertIn("expected at most", damaged(lambda r: r["results"][0].update(error=float("nan"))))
        self.assertIn("not above 0", damaged(lambda r: r["results"][0].update(ours_us=0.0)))
        self.assertIn("expected a float", damaged(lambda r: r["results"][0].update(limit_us="fast")))

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

    def test_the_tree_hash_follows_sources_but_not_tests(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name in ["src/ingot/kernels/rmsnorm/rmsnorm.cu", "src/ingot/kernels/rmsnorm/rmsnorm.test.cpp", "src/ingot/kernels/mlp/mlp.cu",
                         "src/ingot/gpu/launch.h", "src/ingot/core/tensor.h", "CMakeLists.txt", "cmake/IngotCuda.cmake",
                         "cmake/IngotFlags.cmake"]:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(name)
            before = reports.tree_hash("rmsnorm", root)
            for same in ("src/ingot/kernels/rmsnorm/rmsnorm.test.cpp", "src/ingot/kernels/mlp/mlp.cu", "CMakeLists.txt"):
                (root / same).write_text("changed")
            self.assertEqual(reports.tree_hash("rmsnorm", root), before)
            for other in ("src/ingot/kernels/rmsnorm/rmsnorm.cu", "src/ingot/gpu/launch.h", "cmake/IngotFlags.cmake"):
                (root / other).write_text("changed")
                after = reports.tree_hash("rmsnorm", root)
                self.assertNotEqual(after, before)
                before = after

    def test_a_report_stays_valid_after_a_change_that_leaves_all_kernels_unchanged(self):
        names = ["src/ingot/kernels/rmsnorm/rmsnorm.cu", "src/ingot/gpu/launch.h", "src/ingot/core/tensor.h", "cmake/IngotCuda.cmake",
                 "cmake/IngotFlags.cmake"]
        built = 0
        sass = {"kernels/rmsnorm": "MOV R1, R2", "gpu": "EXIT"}

        def dump(command, **_):  # cuobjdump of an "object" prints the object's text
            if command[0] == "ninja":
                return unittest.mock.Mock(returncode=built)
            return unittest.mock.Mock(stdout=pathlib.Path(command[2]).read_text())
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as patches:
            old, new, build = (pathlib.Path(folder) / name for name in ("old", "new", "build"))
            for root in (old, new):
                for name in names:
                    (root / name).parent.mkdir(parents=True, exist_ok=True)
                    (root / name).write_text(name)
            (new / names[2]).write_text("host code")
            for root in (old, new):
                for place, code in sass.items():
                    path = build / root.name / "CMakeFiles" / "ingot.dir" / "src" / "ingot" / place / "a.cu.o"
                    path.parent.mkdir(parents=True)
                    path.write_text(f"Function : k\n  /*0000*/  {code} ;  /* 0x0000000000000001 */\n")
            path = new / "bench" / "results" / "gpu" / "rmsnorm.json"
            path.parent.mkdir(parents=True)
            patches.enter_context(unittest.mock.patch.object(reports, "ROOT", new))
            patches.enter_context(unittest.mock.patch.object(reports, "all_reports", lambda: [(path, json.loads(path.read_text()))]))
            part = path.parent / reports.UNFINISHED / "rmsnorm.json"
            patches.enter_context(unittest.mock.patch.object(reports, "unfinished_reports", lambda: [(part, json.loads(part.read_text()))] if part.exists() else []))
            patches.enter_context(unittest.mock.patch.object(reports, "tree_hash", lambda suite, root=new, hash_of=reports.tree_hash: hash_of(suite, root)))
            patches.enter_context(unittest.mock.patch.object(reports, "files_of", lambda suite, root=new, of=reports.files_of: of(suite, root)))
            patches.enter_context(unittest.mock.patch.object(same_kernels.subprocess, "run", dump))

            def said(function, *arguments):
                with contextlib.redirect_stdout(io.StringIO()) as text:
                    function(*arguments)
                return text.getvalue()
            report = {**GOOD, "tree": reports.tree_hash("rmsnorm", old)}
            path.write_text(json.dumps(report))
            self.assertIn("1 stale", said(check_reports.main))
            other = build / "new" / "CMakeFiles" / "ingot.dir" / "src" / "ingot" / "gpu" / "a.cu.o"
            kept = other.read_text()
            other.write_text(kept.replace("EXIT", "NOP"))  # a kernel differs
            self.assertIn("stays stale, 1 of 2 kernels are gone or others", said(same_kernels.keep_reports, old, build / "old", build / "new"))
            self.assertEqual(json.loads(path.read_text()), report)
            other.write_text(kept)
            same_kernels.kernels_of_object.cache_clear()
            self.assertIn("2 kernels are the same, 0 new ones, 1 files changed", said(same_kernels.keep_reports, old, build / "old", build / "new"))
            path.write_text(json.dumps(report))
            other.write_text(kept + kept.replace("EXIT", "NOP").replace(": k", ": further"))
            same_kernels.kernels_of_object.cache_clear()
            self.assertIn("2 kernels are the same, 1 new ones", said(same_kernels.keep_reports, old, build / "old", build / "new"))
            self.assertEqual(json.loads(path.read_text())["same_kernels"]["new"], ["further"])
            other.write_text(kept)
            same_kernels.kernels_of_object.cache_clear()
            built = 1
            with self.assertRaisesRegex(SystemExit, "could not build"):
                same_kernels.keep_reports(old, build / "old", build / "new")
            built = 0
            path.write_text(json.dumps(report))  # different kernels of a library, in a suite with some of its kernels
            with unittest.mock.patch.object(same_kernels, "CHOICE", {names[2]}), unittest.mock.patch.object(reports, "WITH_LIBRARY", {"rmsnorm"}):
                self.assertIn("stays stale, cuBLASLt's", said(same_kernels.keep_reports, old, build / "old", build / "new"))
            said(same_kernels.keep_reports, old, build / "old", build / "new")
            found = json.loads(path.read_text())
            self.assertEqual(found.pop("same_kernels"), {"tree": reports.tree_hash("rmsnorm"), "kernels": 2, "changed": [names[2]]})
            self.assertEqual(found, report)
            self.assertIn("0 stale", said(check_reports.main))
            # An unfinished report, too, which can then be continued.
            part.parent.mkdir()
            part.write_text(json.dumps({**report, "incomplete": "1 of 2 cases were not measured", "case_seconds": {}}))
            of_part = ("rmsnorm", report["gpu"], (part,))
            self.assertIsNone(reports.continued(*of_part))
            said(same_kernels.keep_reports, old, build / "old", build / "new")
            self.assertEqual(reports.continued(*of_part)["same_kernels"]["kernels"], 2)
            part.unlink()
            # A portable kernel differs, which a Hopper GPU does not launch.
            core = "_ZN5ingot4gemm8portable20portable_gemm_kernelIvEEvT_"
            for root, code in (("old", "EXIT"), ("new", "NOP")):
                (build / root / "CMakeFiles" / "ingot.dir" / "src" / "ingot" / "gpu" / "b.cu.o").write_text(kept.replace("EXIT", code).replace(": k", f": {core}"))
            for of_gpu, line, entry in (("NVIDIA H200", "2 kernels are the same, 0 new ones, 1 files changed, 1 portable kernels not compared", {"ingot::gemm::portable": 1}),
                                     ("NVIDIA A100", "stays stale, 1 of 3 kernels are gone or others: " + core, None)):
                path.write_text(json.dumps({**report, "gpu": of_gpu}))
                same_kernels.kernels_of_object.cache_clear()
                self.assertIn(line, said(same_kernels.keep_reports, old, build / "old", build / "new"))
                self.assertEqual(json.loads(path.read_text()).get("same_kernels", {}).get("not_launched"), entry)
                self.assertEqual("1 portable ones, which that GPU does not launch" in said(check_reports.main), entry is not None)
            path.write_text(json.dumps({**report, "gpu": "NVIDIA H200"}))
            with unittest.mock.patch.object(same_kernels, "RUNS_PORTABLE", {"rmsnorm"}):  # a suite that does launch portable kernels
                self.assertIn("stays stale, 1 of 3 kernels", said(same_kernels.keep_reports, old, build / "old", build / "new"))
            path.write_text(json.dumps(report))
            (new / names[0]).write_text("changed again")
            self.assertIn("1 stale", said(check_reports.main))
        same_kernels.kernels_of_object.cache_clear()

    def test_a_table_shows_the_best_peer_and_the_share_of_the_limit(self):
        rows = list(report_tables.table(GOOD))
        self.assertEqual(rows[-1], "| RMSNorm | 4,096 x 4,096 | bf16 | 16.0 | 94 % | 24.0 | 20.0 | 44.0 | 1.25x |")

    def test_a_table_says_on_which_day_and_of_which_sources_it_was_measured(self):
        said = "Measured on 2026-01-01 on GPU, driver 1, CUDA 13.0, sources 0000000000000000"
        self.assertTrue(next(report_tables.table(GOOD)).startswith(said + "; copy bandwidth 4.00 TB/s"))
        later = {**GOOD, "same_kernels": {"tree": "1" * 16, "kernels": 3, "changed": []}}
        self.assertEqual(report_tables.measured_on(later), said + " (kernels of the same machine code: 1111111111111111)")
        self.assertEqual(report_tables.measured_on({**GOOD, "same_kernels": {"tree": "0" * 16}}), said)

    def test_a_page_has_rows_of_another_gpu_only_where_its_own_lacks_them_and_says_the_memory(self):
        row, other_row = GOOD["results"][0], {**GOOD["results"][0], "shape": [1, 2]}
        own, other = {**GOOD, "gpu": "NVIDIA H200"}, {**GOOD, "gpu": "NVIDIA H100", "results": [row, other_row]}
        self.assertEqual(report_tables.tabled([other, own]), [own, {**other, "results": [other_row]}])
        self.assertEqual(report_tables.tabled([{**other, "results": [row]}, own]), [own])
        self.assertEqual(report_tables.tabled([other]), [other])
        beside = [{**row, "memory_bytes": {"ours": 1.5e9, "torch_eager": 3e9}}, {**row, "name": "beside Liger", "memory_bytes": {"ours": 1.5e9, "liger": 2e9}}]
        rows = list(report_tables.table({**GOOD, "suite": "swiglu", "results": [other_row, *beside]}))
        self.assertEqual(rows[-2:], ["", "Peak memory of a training step in GB, without operands and gradients: 4,096 x 4,096: Ingot 1.50, PyTorch 3.00, Liger 2.00."])

    def test_a_training_step_stands_beside_the_compiled_model_and_is_stale_with_the_trainer(self):
        result = {k: v for k, v in GOOD["results"][0].items() if k not in ("error", "tolerance")}
        report = {**GOOD, "suite": "train", "results": [{**result, "peers": {"compile_rows": 24.0, "compile_packed": 20.0}}]}
        self.assertEqual(reports.problems_of(report), [])
        rows = list(report_tables.table(report))
        self.assertIn("torch.compile, dense attention | torch.compile, FlexAttention", rows[2])
        self.assertTrue(rows[-1].endswith("| 24.0 | 20.0 | 1.25x |"), rows[-1])
        files = {path.relative_to(ROOT).as_posix() for path in reports.files_of("train")}
        self.assertLessEqual({"src/ingot/engines/train/optimizer/optimizer.cpp", "src/ingot/models/gpt/block/block.cpp", "src/ingot/kernels/muon/muon.cu"}, files)

    @unittest.skipUnless(importlib.util.find_spec("torch"), "no PyTorch")
    def test_a_runs_operations_are_those_of_a_step_whatever_the_log_has_smoothed(self):
        sys.path.insert(0, str(ROOT / "bench" / "peers"))
        import train_runs
        rate, logged = 0.0, []
        for seconds in (2.0, 0.5, 0.11, 0.10, 0.12):  # of the same 6e9 operations each
            rate = 0.9 * rate + 0.1 * 6e9 / seconds if rate else 6e9 / seconds
            logged.append({"step_seconds": seconds, "flops_per_second": rate, "memory_bytes": 1000})
        self.assertEqual(train_runs.measured_of(logged, 2), {"ms": 110.0, "flops": 6e9, "memory_bytes": 1000})

    @unittest.skipUnless(importlib.util.find_spec("torch"), "no PyTorch")
    def test_a_process_that_warms_waits_for_each_peer_of_its_share(self):
        sys.path.insert(0, str(ROOT / "bench" / "peers"))
        import gpu_common
        import gpu_train
        started = []

        def start(peer, applications, _):
            started.append((peer, applications))
            return gpu_common.Child([sys.executable, "-c", "import sys, time; time.sleep(0.2); print('compiled', file=sys.stderr)"])
        said = io.StringIO()
        with unittest.mock.patch.object(gpu_common, "SHARE", "1/2"), unittest.mock.patch.object(gpu_train, "start_child", start), contextlib.redirect_stdout(said):
            gpu_train.compile_share(None, [("rows", 11), ("rows", 17), ("packed", 11), ("packed", 17)])
        self.assertEqual(started, [("rows", 17), ("packed", 17)])
        self.assertEqual(said.getvalue().count("then compiled"), 2, said.getvalue())

    @unittest.skipUnless(importlib.util.find_spec("torch"), "no PyTorch")
    def test_one_process_measures_one_gpu_and_then_all_numbers_of_several(self):
        sys.path.insert(0, str(ROOT / "bench" / "peers"))
        import gpu_common
        import gpu_decode_gpus

        def counts(there, given=None, kinds=("H200",)):
            with unittest.mock.patch.object(gpu_common.torch.cuda, "device_count", lambda: there), \
                 unittest.mock.patch.object(gpu_common.torch.cuda, "get_device_name", lambda i: kinds[i % len(kinds)]), contextlib.redirect_stdout(io.StringIO()) as text:
                return gpu_common.gpu_counts("suite", argparse.Namespace(gpus=given and gpu_common.several_gpus(given))) or text.getvalue()
        self.assertEqual([counts(*asked) for asked in ((2,), (3,), (4,), (8,), (8, "2,4"), (4, "3"))], [[2], [2], [2, 4], [2, 4, 8], [2, 4], [3]])
        self.assertEqual(counts(1), "suite: found 1 GPU, expected 2: nothing measured\n")
        self.assertEqual(counts(2, "2,4"), "suite: found 2 GPUs, expected 4: nothing measured\n")
        with self.assertRaisesRegex(SystemExit, "found H100, H200, expected GPUs of one kind"):
            counts(2, None, ("H200", "H100"))
        for wrong in ("1", "1,2", "2,2", "2,", "two", "-2"):
            with self.assertRaisesRegex(argparse.ArgumentTypeError, f"found {wrong}, expected different numbers from 2, like 2,4"):
                counts(8, wrong)

        def token(ms):
            return {"phased": {"mean_ms": 2 * ms}, "megakernel": {"mean_ms": ms}, "prefiltered": {"mean_ms": ms - 0.25}}
        said = {"decode": {"token": token(1.75), "stages": {}, "read_TBps": 4.0,
                           "shared": [{"gpus": n, "token": token(ms), "token_bytes": 4e9 / n, "prefiltered_bytes": 3e9 / n} for n, ms in ((2, 1.25), (4, 1.0))]},
                "prompt": {"prompts": [{"gpus": n, "tokens": 100, "p50_ms": 30 / n, "best_ms": 29 / n, "one_gpu_ms": 30.0, "flops": 0, "weight_bytes": 4e9 / n} for n in (2, 4)]}}
        case, lines = gpu_decode_gpus.CASES[0], []

        def run(line, **_):
            lines.append(line)
            return argparse.Namespace(returncode=0, stdout=json.dumps(said[line[2]]))
        with unittest.mock.patch.object(gpu_decode_gpus.subprocess, "run", run):
            tokens, prompts = list(gpu_decode_gpus.measure(case, [2, 4], "ingot")), list(gpu_decode_gpus.measure_prompts(case, [2, 4], "ingot", {"read_TBps": 4.0, "bf16_TFLOPs": 700.0}))
        self.assertEqual([line[line.index("--gpus") + 1] for line in lines], ["2,4", "2,4"])
        self.assertEqual([(r["name"].split(", ", 2)[2], r["ours_us"], r["peers"], r["limit_us"]) for r in tokens],
                         [("2 GPUs, tensor", 1250, {"one GPU": 1750, "phased": 2500}, 500),
                          ("2 GPUs, tensor, int8 prefilter of the head", 1000, {"one GPU": 1500, "whole_head": 1250}, 375),
                          ("4 GPUs, tensor", 1000, {"one GPU": 1750, "phased": 2000}, 250),
                          ("4 GPUs, tensor, int8 prefilter of the head", 750, {"one GPU": 1500, "whole_head": 1000}, 187.5)])
        self.assertEqual([(r["name"].split(", ")[2], r["ours_us"], r["peers"]["one GPU"], r["limit_us"]) for r in prompts],
                         [("2 GPUs", 15000, 30000, 500), ("4 GPUs", 7500, 30000, 250)])
        self.assertEqual(reports.problems_of({**GOOD, "suite": "decode_gpus", "results": tokens + prompts}), [])

    @unittest.skipUnless(importlib.util.find_spec("torch"), "no PyTorch")
    def test_drafts_have_a_row_for_each_case_and_a_limit_of_one_reading_a_step(self):
        sys.path.insert(0, str(ROOT / "bench" / "peers"))
        import gpu_draft

        def case(name, token_ms, tokens_per_step, drafted, accepted):
            return {"name": name, "token_ms": token_ms, "tokens_per_step": tokens_per_step, "draft_tokens": drafted, "accepted_tokens": accepted}
        found = gpu_draft.rows(gpu_draft.MODELS[0], {"step_costs": [1.5, 2.0], "cases": [case("no drafts", 1.5, 1.0, 0, 0), case("drafts of 3, all accepted", 0.75, 4.0, 384, 384)]}, 4e9, 4.0)
        self.assertEqual([(r["name"], r["ours_us"], r["peers"], r["limit_us"]) for r in found],
                         [("gpt-oss-120b, bf16 dense, no drafts", 1500, {}, 1000), ("gpt-oss-120b, bf16 dense, drafts of 3, all accepted", 750, {"no_drafts": 1500}, 250)])
        found.append(gpu_draft.head_row(gpu_draft.MODELS[1], "fp8", 0.125, 4e8, 4.0))
        self.assertEqual((found[2]["name"], found[2]["ours_us"], found[2]["limit_us"]), ("gpt-oss-20b, bf16 dense, a guess of a draft head in fp8", 125, 100))
        self.assertIn("0.1250 ms,  80 % of the limit", gpu_draft.said_of_head(found[2]))
        self.assertEqual(reports.problems_of({**GOOD, "suite": "draft", "results": found}), [])
        self.assertIn("0.7500 ms a token, 4.00 tokens a step,  33 % of the limit, no_drafts 1.5000", gpu_draft.said(found[1]))

    @unittest.skipUnless(importlib.util.find_spec("torch"), "no PyTorch")
    def test_portable_variants_have_a_row_for_each_gpu_and_the_bound_of_the_instruction(self):
        sys.path.insert(0, str(ROOT / "bench" / "peers"))
        with unittest.mock.patch.dict(os.environ):  # the suite keeps Triton from wgmma
            import gpu_portable
        ceiling, asked = {**GOOD["ceilings"], "mma_TFLOPs": 500.0}, []
        cases = {case.label: case for case in gpu_portable.cases()}
        self.assertEqual(len(cases), len(gpu_portable.cases()))
        self.assertAlmostEqual(cases["linear forward 4096 x 4096 x 4096"].limit_us(500.0, 4.0), 2 * 4096**3 / 500e6)  # operations
        self.assertAlmostEqual(cases["RMSNorm 32768 x 4096"].limit_us(500.0, 4.0), (2 * 32768 + 1) * 4096 * 2 / 4e6)  # bytes

        def run(line, **_):
            asked.append((line[2], os.environ.get("INGOT_GPU_AS"), os.environ.get("INGOT_CUBLASLT")))
            token = {"phased": {"mean_ms": 2.0}, "megakernel": {"mean_ms": 1.5 if asked[-1][1] else 1.0}}
            found = {"token": token, "token_bytes": 4e9, "read_TBps": 4.0} if line[2] == "decode" else {"prompts": [{"p50_ms": 60.0 if asked[-1][1] is None else 90.0, "weight_bytes": 4e9, "flops": 1e13}]}
            return argparse.Namespace(returncode=0, stdout=json.dumps(found))
        with unittest.mock.patch.object(gpu_portable.subprocess, "run", run):
            rows = [row for case in gpu_portable.programs() for row in gpu_portable.measure_program(case, "ingot", ceiling)]
        runs = [("decode", ("8.0", "8.6", "10.0"), 2000, 1000, 1000), ("decode", ("10.0", "8.0", "8.6", "12.0"), 1500, 1000, 1000), ("prompt", ("8.0", "8.6", "10.0"), 90000, 60000, 20000)]
        self.assertEqual(asked, [(program, gpu_, gpu_ and "none") for program, gpus, *_ in runs for gpu_ in (None, *gpus)])
        self.assertEqual([(r["name"].rsplit(", ", 1)[1], r["ours_us"], r["peers"], r["limit_us"]) for r in rows],
                         [(f"as {gpu_}", ours, {"hopper": hopper}, limit) for _, gpus, ours, hopper, limit in runs for gpu_ in gpus])
        self.assertEqual(reports.problems_of({**GOOD, "suite": "portable", "results": rows}), [])
        self.assertIn("50 % of the limit  hopper 1000.0 (0.50x)", gpu_portable.said(rows[0]))
        unnamed = [{k: v for k, v in rows[0].items() if k != "tests"}]  # a row whose values neither the suite nor tests check
        self.assertIn("error is missing", " ".join(reports.problems_of({**GOOD, "suite": "portable", "results": unnamed})))

    @unittest.skipUnless(importlib.util.find_spec("torch"), "no PyTorch")
    def test_clients_of_a_server_have_rows_a_limit_and_a_table_of_their_own(self):
        sys.path.insert(0, str(ROOT / "bench" / "peers"))
        import gpu_serve
        ceiling = {"copy_TBps": 4.0, "read_TBps": 4.0, "bf16_TFLOPs": 700.0}

        def run(line, **_):
            found = [{"concurrency": int(n), "tokens_per_second": 1000.0 * int(n), "token_ms": 1.0, "errors": 0, "reused_tokens": 0, "prompt_tokens": 500, "first_token_ms": {"p50": 20.4, "p99": 30.6}, "between_tokens_ms": {"p50": 0.91, "p99": 1.5}}
                     for n in line[line.index("--concurrency") + 1].split(",")]
            return argparse.Namespace(returncode=0, stdout=json.dumps({"results": found}))
        options = argparse.Namespace(ingot="ingot", requests=1)
        with unittest.mock.patch.object(gpu_serve.subprocess, "run", run):
            rows = [row for case in (("20b", "temperature 1"), ("120b", "greedy")) for row in gpu_serve.rows_of(case, gpu_serve.ask(options, "http://a", *gpu_serve.SAMPLING[case[1]]), ceiling)]
        self.assertEqual([r["shape"][0] for r in rows], [1, 2, 4, 8, 16, 32, 64, 1, 16])
        self.assertEqual([r["ours_us"] for r in rows[:2]], [1000.0, 500.0])
        # One sequence reads 1.16 GB of the head, 1.28 GB of attention and 1.27 GB of experts; a token of the prompt multiplies by 126 million weights in each of 24 layers.
        self.assertAlmostEqual(rows[0]["limit_us"], 3.71e9 / 4e12 * 1e6 + 2 * 24 * 126e6 * 2.5 / 700e12 * 1e6, delta=2)
        self.assertLess(rows[6]["limit_us"], rows[4]["limit_us"])
        self.assertEqual(reports.problems_of({**GOOD, "suite": "serve", "slots": 64, "results": rows}), [])
        rows[4]["llama.cpp"] = rows[4]["clients"]
        rows[6]["llama.cpp"] = {**rows[6]["clients"], "errors": 3, "requests": 128}
        lines = list(report_tables.serve_table({**GOOD, "suite": "serve", "slots": 64, "results": rows}))
        self.assertIn("| gpt-oss-20b | temperature 1 | 16 | 16,000 |", lines[8])
        self.assertTrue(lines[8].endswith("| 1.00 | 20 / 31 | 0.91 / 1.50 | 16,000 | 20 / 31 | 0.91 / 1.50 |"), lines[8])
        self.assertTrue(lines[4].endswith("| 0.91 / 1.50 |  |  |  |"), lines[4])
        self.assertIn("| 64,000 (3 of 128 requests failed) |", lines[10])

    @unittest.skipUnless(importlib.util.find_spec("torch"), "no PyTorch")
    def test_a_rival_s_server_that_refuses_to_sample_on_the_gpu_is_started_without_that_option(self):
        sys.path.insert(0, str(ROOT / "bench" / "peers"))
        import gpu_serve
        # A server of llama.cpp's options; the word in the file beside it says how it takes --backend-sampling.
        server = """#!/usr/bin/env python3
import http.server, pathlib, sys
how = pathlib.Path(__file__).with_name("how").read_text()
if "--backend-sampling" in sys.argv and how != "takes" or how == "fails":
    sys.exit("error: invalid argument")
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answer).serve_forever()
"""
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder) / "llama-server"
            program.write_text(server, encoding="utf-8")
            program.chmod(0o755)
            options = argparse.Namespace(llama_server=program)

            def rows(how, speed=1000.0):
                (pathlib.Path(folder) / "how").write_text(how, encoding="utf-8")
                ask = lambda options, url, sampling, counts, requests: {n: {"tokens_per_second": speed * n, "errors": 0} for n in counts}
                results = [{"model": "gpt-oss-20b", "sampling": "temperature 1", "shape": [n, 500, 200], "peers": {}} for n in (1, 2, 16, 64)]
                with unittest.mock.patch.object(gpu_serve, "ask", ask), unittest.mock.patch.object(gpu_serve.synthetic_gguf, "write", lambda *_: None):
                    gpu_serve.add_rival(results, options, folder)
                return results
            for how, sampled in (("takes", "on the GPU"), ("refuses", "on one CPU thread for all slots")):
                found = rows(how)
                self.assertEqual([r["peers"] for r in found], [{"llama.cpp": 1000.0}, {}, {"llama.cpp": 62.5}, {"llama.cpp": 15.625}])
                self.assertEqual({r["llama.cpp"]["sampled"] for r in found if r["peers"]}, {sampled})
            for how, speed, reason in (("fails", 1000.0, "error: invalid argument"), ("takes", 0.0, "no tokens, 0 failed requests")):
                found = rows(how, speed)
                self.assertEqual([r["peers"] for r in found], [{}] * 4)
                self.assertIn(reason, found[0]["absent"]["llama.cpp"])

    @unittest.skipUnless(importlib.util.find_spec("torch"), "no PyTorch")
    def test_training_over_several_gpus_makes_one_gpus_passes(self):
        sys.path.insert(0, str(ROOT / "bench" / "peers"))
        import gpu_train_gpus
        runs = []

        def ran(options, folder, applications, passes, steps, warm, more):
            gpus = int(more[1]) if more else 1
            runs.append((gpus, passes))
            return {"ms": 100.0 * passes / gpus, "flops": 1e12, "memory_bytes": 1}
        options = argparse.Namespace(counts=[2, 4], steps=12, tokens=1000, ranks=lambda gpus: ["--gpus", str(gpus)] if gpus > 1 else [], only=None, quick=False,
                                     native=None, ingot=None)
        used = argparse.Namespace(taken_by=lambda rounds: 1)
        with unittest.mock.patch.object(gpu_train_gpus, "measure_ours", ran):
            rows = list(gpu_train_gpus.measure((11, 1), options, None, {"bf16_TFLOPs": 500.0}, used))
        self.assertEqual(runs, [(1, 4), (2, 4), (4, 4), (4, 4), (2, 4), (1, 4)])
        self.assertEqual([(r["name"], r["shape"], r["ours_us"], r["peers"]["one GPU"], r["limit_us"]) for r in rows],
                         [("golf, 11 applications, 2 GPUs, a step of 2 passes on each", [4000], 200000, 400000, 1000),
                          ("golf, 11 applications, 4 GPUs, a step of 1 pass on each", [4000], 100000, 400000, 500)])

    @unittest.skipUnless(importlib.util.find_spec("torch"), "no PyTorch")
    def test_a_run_that_takes_too_long_reports_its_last_step(self):
        sys.path.insert(0, str(ROOT / "bench" / "peers"))
        import train_runs

        def error_of(script, limit=4.0):  # a busy machine may take a second to start the script
            with tempfile.TemporaryDirectory() as folder:
                program = pathlib.Path(folder) / "ingot"
                program.write_text("#!/bin/sh\n" + script)
                program.chmod(0o755)
                options = argparse.Namespace(ingot=program, device="cpu", tokens=8, shrink=(), limit=limit)
                with self.assertRaises(RuntimeError) as raised:
                    train_runs.measure_ours(options, pathlib.Path(folder), 11, 1, 12)
                return str(raised.exception)
        find_out = 'while [ "$1" != --out ]; do shift; done; mkdir -p "$2"\n'
        begun = """printf '{"event":"start","config":"%s"}\\n{"event":"step","step":1}\\n{"event":"step","step":2}\\n' "$(printf %0500d 1)" > "$2/log.jsonl"\n"""
        of_start = begun.replace('\\n{"event":"step","step":1}\\n{"event":"step","step":2}', "")
        with concurrent.futures.ThreadPoolExecutor() as pool:
            found, started, silent = pool.map(error_of, [find_out + begun + "echo 'step 2/16  loss 9.0' >&2\nexec sleep 30", find_out + of_start + "exec sleep 30", "exec sleep 30"])
        self.assertEqual(found, 'ingot train: not done after 4 s. It logged {"event":"step","step":1} {"event":"step","step":2}; it said step 2/16  loss 9.0')
        self.assertRegex(started, r'It logged \{"event":"start","config":"0+; it said nothing$')
        self.assertLess(len(started), 400)
        self.assertEqual(silent, "ingot train: not done after 4 s. It logged nothing, not even its start; it said nothing")
        self.assertEqual(error_of("echo 'no GPU' >&2; exit 1", limit=30), "ingot train: no GPU")

    def test_several_gpus_kept_activations_and_generation_have_reports_of_their_own(self):
        row = {k: v for k, v in GOOD["results"][0].items() if k not in ("error", "tolerance")}

        def table(suite, **changed):
            report = {**GOOD, "suite": suite, "results": [{**row, **changed}]}
            self.assertEqual(reports.problems_of(report), [])
            return list(report_tables.table(report))
        self.assertTrue(table("train_gpus", peers={"one GPU": 31.2})[-1].endswith("| 31.2 | 1.95x |"))
        self.assertTrue(table("generate", peers={"cpu": 12.0, "cpu_one_thread": 8.0})[-1].endswith("| 12.0 | 8.0 | 0.50x |"))
        beside = table("train_memory", name="golf, 11 applications, whole step", peers={"formed_again": 18.0},
                       memory_bytes={"ours": 21.8e9, "formed_again": 13.9e9})
        self.assertEqual(beside[-1], "GPU memory of a run in GB: golf, 11 layer calls: Ingot 21.80, activations recomputed 13.90.")
        trained = reports.tree_hash("train")  # the same sources as the step's own report
        self.assertEqual([reports.tree_hash(suite) for suite in ("train_gpus", "train_memory")], [trained] * 2)
        files = {path.relative_to(ROOT).as_posix() for path in reports.files_of("generate")}
        self.assertLessEqual({"src/ingot/models/gpt/generate/device_decoder.cpp", "src/ingot/engines/generate/session.cpp", "src/ingot/kernels/sampling/sampling.cu"}, files)
        self.assertNotIn("src/ingot/engines/train/trainer.cpp", files)

    def test_the_headline_names_the_best_peer_of_its_case_and_nothing_else(self):
        rows = {(suite, peer): row for alternatives in report_tables.HEADLINES for suite, row, _, peer in alternatives}
        token = {**rows["decode", "llama.cpp"], "ours_us": 1000.0, "peers": {"phased": 1500.0, "llama.cpp": 3000.0}}
        answer = {**rows["decode", None], "ours_us": 1600.0, "peers": {}, "answer": {"first_token_ms": 40.04, "whole_ms": 1700.0}}
        case = {**rows["mlp", None], "ours_us": 50.04, "peers": {"torch_eager": 170.0, "torch_compile": 150.0}}
        step = {**rows["train", None], "ours_us": 75040.0, "peers": {"compile_rows": 120000.0, "compile_packed": 130000.0}}
        steps = {"date": "2026-01-03", "cpu": "CPU", "level": "AVX2", "threads": 2, "results": [
            {**report_tables.HEADLINE_STEP, "mode": mode, "ms": ms} for mode, ms in (("native", 300.4), ("eager", 700.0), ("compile", 600.4))]}
        by_suite = {"mlp": [{"gpu": "GPU", "date": "2026-01-02", "results": [GOOD["results"][0], case]}], "train": [{"gpu": "GPU", "date": "2026-01-02", "results": [step, {**step, "peers": {}}]}],
                    "decode": [{"gpu": "GPU", "date": "2026-01-02", "results": [token, {**token, "peers": {"phased": 1500.0}}, answer]}]}
        of_answer, of_token, *lines = report_tables.headline(by_suite, [steps, {**steps, "results": []}])
        self.assertEqual(len(lines), 3)
        self.assertIn("the first token after **40.0 ms**, the whole answer after **1.70 s**", of_answer)
        self.assertIn("**1.00 ms**; a token of llama.cpp's benchmark takes 3.00 ms", of_token)
        self.assertIn("**75.0 ms**; torch.compile, dense attention with its optimizer takes 120.0 ms", lines[0])
        self.assertIn("**50.0 µs**; torch.compile takes 150.0 µs", lines[1])
        self.assertTrue(lines[1].startswith("- GPU, 2026-01-02: ") and lines[2].startswith("- CPU (AVX2), 2 threads, 2026-01-03: "), lines)
        self.assertIn("**300 ms**; the faster of PyTorch eager and torch.compile takes 600 ms", lines[2])

    def test_the_headline_has_the_times_of_users_if_measured_and_kernel_times_otherwise(self):
        sampled = {**report_tables.HEADLINES[0][0][1], "ours_us": 1540.0, "peers": {"kernels": 1500.0}}
        kernel = {**report_tables.HEADLINES[0][1][1], "ours_us": 1490.0, "peers": {"whole_head": 1610.0}}
        answer = {**report_tables.HEADLINES[1][1][1], "ours_us": 1600.0, "peers": {}, "answer": {"first_token_ms": 40.04, "whole_ms": 1700.0}}
        clients = lambda n: {"model": "gpt-oss-120b", "sampling": "temperature 1", "shape": [n, 500, 200], "clients": {"token_ms": 1.5, "tokens_per_second": 100.0 * n}}
        served = {"gpu": "GPU", "date": "2026-01-02", "results": [clients(n) for n in (1, 2, 16, 64)]}
        before = list(report_tables.headline({"decode": [{"gpu": "GPU", "date": "2026-01-02", "results": [kernel, answer]}]}, []))
        self.assertEqual(len(before), 2)
        self.assertTrue("kernel time of one greedy token" in before[0] and "a greedy answer" in before[1], before)
        after = list(report_tables.headline({"decode": [{"gpu": "GPU", "date": "2026-01-02", "results": [kernel, answer, sampled]}], "serve": [served]}, []))
        self.assertEqual(after, ["- GPU, 2026-01-02: a token of GPT-OSS-120B's shapes, sampled at temperature 1 through the decoder as `generate` gets it, 1,024 tokens of context: **1.54 ms**; the kernels alone take 1.50 ms.",
                                 "- GPU, 2026-01-02: clients of `serve`, GPT-OSS-120B's shapes, prompts of 500 and answers of 200 tokens sampled at temperature 1: **1.50 ms** a token for one client, "
                                 "**1,600 tokens/s** for 16 and **6,400 tokens/s** for 64."])
        for row in served["results"]:
            if row["shape"][0] != 2:  # llama.cpp is asked by some numbers of clients alone
                row["llama.cpp"] = {"token_ms": 3.0, "tokens_per_second": 50.0 * row["shape"][0], "errors": 0}
        self.assertTrue(report_tables.serve_line(served, "gpt-oss-120b").endswith("; of llama.cpp's server 3.00 ms a token for one client, 800 tokens/s for 16 and 3,200 tokens/s for 64."))
        served["results"][3]["llama.cpp"]["errors"] = 3  # of 64 clients: some requests had no answer
        self.assertTrue(report_tables.serve_line(served, "gpt-oss-120b").endswith("; of llama.cpp's server 3.00 ms a token for one client, 800 tokens/s for 16."))
        served["results"][0]["llama.cpp"]["errors"] = 1
        self.assertNotIn("llama.cpp", report_tables.serve_line(served, "gpt-oss-120b"))
        self.assertIsNone(report_tables.serve_line({"results": served["results"][:3]}, "gpt-oss-120b"))

    def test_tables_of_single_pages_are_made_of_the_reports_of_the_benchmarks_page(self):
        def row(name, us, limit, tokens=1024, **peers):
            return {"name": name, "shape": [tokens], "dtype": "bf16", "ours_us": us, "peers": peers, "limit_us": limit}

        report = {**GOOD, "ceilings": {"copy_TBps": 4.0, "read_TBps": 4.5, "bf16_TFLOPs": 800.0}}
        decode = [row("gpt-oss-120b, bf16 dense", 1600.0, 1100.0, phased=2400.0), row("gpt-oss-120b, bf16 dense", 9.0, 9.0, 128, phased=9.0),
                  row("gpt-oss-120b, bf16 dense, head screened in 8 bits", 1500.0, 980.0, whole_head=1600.0), row("gpt-oss-120b, fp8 dense", 1400.0, 700.0, phased=2100.0)]
        self.assertEqual(list(report_tables.token_bound_table({**report, "results": decode}))[4:],
                         ["| 120B, bf16 | 4.95 | 1.10 | 2.40 | 1.60 | 69 % | 1.50 |", "| 120B, fp8 | 3.15 | 0.70 | 2.10 | 1.40 | 50 % | |"])
        one = {"one GPU": 2000.0}
        several = [row("gpt-oss-120b, bf16 dense, 2 GPUs, tensor", 1000.0, 500.0, **one), row("gpt-oss-120b, bf16 dense, 4 GPUs, tensor", 800.0, 250.0, **one),
                   row("gpt-oss-120b, bf16 dense, 2 GPUs, attention-experts", 1.0, 1.0, **one), row("gpt-oss-120b, bf16 dense, 2 GPUs, tensor, int8 prefilter of the head", 900.0, 450.0, **one),
                   row("gpt-oss-120b, bf16 dense, 2 GPUs, tensor, to the first token", 1500.0, 1.0, 100, **one)]
        lines = list(report_tables.several_gpus_table({**report, "results": several}))
        self.assertEqual(lines[4:6], ["| 120B, bf16 | 2.00 | **1.00** | **0.80** | 0.50 | 0.40 | 0.50 | 0.25 |", "| 120B, bf16, int8 prefilter | 2.00 | **0.90** |  | 0.45 |  | 0.45 |  |"])
        self.assertEqual(lines[-1], "| 100 | 2.0 | **1.5** |  | 0.75 |  |")
        attention = [{**row("Attention of 64-wide heads", 500.0, 250.0, torch_eager=1000.0), "shape": [2, 8192]}]
        self.assertEqual(list(report_tables.attention_rates_table({**report, "results": attention}))[-1], "| 64-wide heads | 2 x 8,192 | 400 | 200 |")
        for suite, _ in report_tables.PAGE_TABLES.values():
            self.assertIn(suite, gpu.SUITES)

    def test_every_table_of_a_report_names_its_day(self):
        for page in report_tables.PAGES:
            for marked in report_tables.MARKED.finditer((ROOT / page).read_text(encoding="utf-8")):
                if "No report yet" not in marked[0]:
                    self.assertRegex(marked[0], r"\b20\d\d-\d\d-\d\d\b", f"{page}: {marked[2]}")

    def test_figures_in_sentences_are_those_of_the_reports(self):
        pages = {page: (ROOT / page).read_text(encoding="utf-8") for page in report_tables.SENTENCES}
        for page, text in pages.items():
            self.assertIn(page, report_tables.PAGES)
            self.assertEqual(report_tables.with_figures(page, text), text)
            for sentence, values in report_tables.SENTENCES[page]:
                self.assertEqual(len(values()), sentence.count("{}"), sentence)
        with unittest.mock.patch.object(report_tables, "SENTENCES", {"a.md": [("takes {} µs of {} GB.", lambda: ["1,234.5", "2"])]}):
            self.assertEqual(report_tables.with_figures("a.md", "It takes 9.75 µs of 1 GB. It takes 3 s.\n"), "It takes 1,234.5 µs of 2 GB. It takes 3 s.\n")
            for text in ("It takes µs of 1 GB.", "It takes 1 µs of 1 GB. It takes 2 µs of 1 GB."):
                with self.assertRaisesRegex(ValueError, "a.md: found [02] places"):
                    report_tables.with_figures("a.md", text)

    def test_a_table_names_the_versions_of_its_peers(self):
        def said(**change):
            return report_tables.measured_on({**GOOD, "torch": "2.11.0+cu130", **change}).split(", CUDA 13.0, ")[1]
        self.assertEqual(said(), "PyTorch 2.11.0, sources " + "0" * 16)
        peers = {**GOOD["results"][0], "peers": {"liger": 1.0, "torch_eager": 2.0}}
        self.assertEqual(said(results=[peers], versions={"liger-kernel": "0.8.5", "transformers": "5"}), "PyTorch 2.11.0, liger-kernel 0.8.5, sources " + "0" * 16)
        self.assertEqual(said(results=[peers], versions={"liger-kernel": "0.8.5", "transformers": "5"}, suite="models"),
                         "PyTorch 2.11.0, liger-kernel 0.8.5, transformers 5, sources " + "0" * 16)
        self.assertEqual(said(results=[{**peers, "peers": {"llama.cpp": 1.0, "phased": 2.0}}]), "sources " + "0" * 16)

    def test_tables_use_the_words_of_the_glossary_for_rows_of_older_reports(self):
        self.assertEqual(report_tables.row_name({"name": "golf, 11 applications, drawn"}), "golf, 11 layer calls, sampled")
        self.assertEqual(report_tables.row_name({"name": "answers of 100", "note": ": first token 17.0 ms, all 0.17 s"}),
                         "answers of 100: first token 17.0 ms, whole answer 0.17 s")

    def test_the_summary_takes_its_gpu_where_that_has_the_row_and_names_any_other(self):
        (name, shape, dtype), = report_tables.SUMMARY["swiglu"]
        row = {"name": name, "shape": shape, "dtype": dtype, "peers": {"torch_eager": 8.0, "torch_compile": 6.0, "bare_products": 1.0}}
        other, own = ({"gpu": gpu, "date": date, "results": [{**row, "ours_us": us}]}
                      for gpu, date, us in (("NVIDIA H100 80GB HBM3", "2026-01-01", 4.0), ("NVIDIA H200", "2026-01-02", 3.0)))
        lines = list(report_tables.gpu_summary({"swiglu": [other, own]}))
        self.assertTrue(lines[0].startswith("Measured on 2026-01-02; "), lines)
        self.assertEqual(lines[4:], [f"| {name} | 8,192 x 4,096 x 11,008 | bf16 | 3.0 µs | 8.0 | 6.0 | 2.00x |"])
        cut_off = {**own, "results": [], "incomplete": "1 of 1 cases were not measured"}
        eager = {**other, "results": [{**other["results"][0], "peers": {"torch_eager": 8.0}}]}
        self.assertEqual(list(report_tables.gpu_summary({"swiglu": [eager, cut_off]}))[4:],
                         [f"| {name} (H100) | 8,192 x 4,096 x 11,008 | bf16 | 4.0 µs | 8.0 |  | 2.00x |"])
        with self.assertRaises(KeyError):  # a whole report without the row
            list(report_tables.gpu_summary({"swiglu": [{**own, "results": []}]}))

    def test_one_command_measures_each_suite_beside_the_installed_peers(self):
        for suite in gpu.SUITES:
            self.assertTrue((gpu.PEERS / f"gpu_{suite}.py").is_file())
        for suite in {report["suite"] for _, report in reports.all_reports()}:  # and a stale report is named with the command that renews the report
            program, *named = reports.how_to_measure(suite).split(" ")
            self.assertTrue((ROOT / program).is_file(), (suite, program))
            if suite in reports.NO_BENCHMARKS:
                self.assertIn(named, [[], ["--as", suite[-3:].replace("_", ".")]], suite)  # sanitizers_as_8_0
            else:
                self.assertLessEqual(set(named), set(gpu.SUITES), suite)
        with tempfile.TemporaryDirectory() as folder:
            origins = pathlib.Path(folder)
            self.assertEqual(gpu.command("mlp", "lib.so", origins, "liger.whl", ["--only", "x"])[2:], ["--native", "lib.so", "--only", "x"])
            for name in ("MGRrmsnorm/megagemm/swiglu.py", "libtiny_cuda_nn.so", "llama.cpp/llama-bench"):
                (origins / name).parent.mkdir(parents=True, exist_ok=True)
                (origins / name).touch()
            self.assertEqual(gpu.command("gate", "lib.so", origins, "liger.whl", [])[2:],
                             ["--native", "lib.so", "--liger", "liger.whl", "--origin", str(origins / "MGRrmsnorm/megagemm")])
            self.assertEqual(gpu.command("mlp", "lib.so", origins, None, [])[4:], ["--tiny", str(origins / "libtiny_cuda_nn.so")])
            self.assertEqual(gpu.command("families", "lib.so", origins, None, [])[4:], ["--llama-bench", str(origins / "llama.cpp/llama-bench")])
            self.assertEqual(gpu.command("attention", "lib.so", origins, "liger.whl", [], "wheels")[2:], ["--native", "lib.so", "--wheels", "wheels"])
            self.assertEqual(gpu.command("models", "lib.so", origins, "liger.whl", [], "wheels")[2:], ["--native", "lib.so", "--liger", "liger.whl"])
            self.assertEqual(gpu.command("host_cost", "lib.so", origins, "liger.whl", [])[2:], [])

    def test_stale_suites_are_those_without_a_complete_report_of_the_sources_and_gpu_the_oldest_first(self):
        with tempfile.TemporaryDirectory() as folder:
            results = pathlib.Path(folder)
            (results / "h200").mkdir()
            now = reports.tree_hash("rope")
            made = {"rope": {"tree": now}, "rmsnorm": {"date": "2026-03-01"}, "muon": {"date": "2026-02-01"},
                    "gate": {"tree": reports.tree_hash("gate"), "incomplete": "1 of 2", "date": "2026-04-01"},
                    "linear": {"same_kernels": {"tree": reports.tree_hash("linear")}}, "mlp": {"tree": reports.tree_hash("mlp"), "gpu": "NVIDIA H200 NVL", "date": "2026-05-01"}}
            for suite, change in made.items():
                (results / "h200" / f"{suite}.json").write_text(json.dumps({**GOOD, "gpu": "NVIDIA H200", "suite": suite, **change}))
            found = reports.outdated([*made, "attention"], "NVIDIA H200", results)
            self.assertEqual([suite for suite, _ in found], ["attention", "muon", "rmsnorm", "gate", "mlp"])
            self.assertEqual(found[0][1], None)
            self.assertEqual(found[1][1]["date"], "2026-02-01")

    def test_suites_end_with_the_time(self):
        clock, ran = [0.0], []

        def run(suite, left):
            ran.append((suite, left))
            clock[0] += {"muon": 100, "attention": 700, "rope": 0, "linear": 200, "gate": 1}[suite]
            return {"attention": None, "rope": 3}.get(suite, 0)

        suites = ["muon", "rope", "linear", "attention", "gate", "serve"]
        outcome = gpu.within(1000, suites, run, lambda: clock[0])
        self.assertEqual(outcome, {"muon": 0, "rope": 3, "linear": 0, "attention": "stopped", "gate": "passed over", "serve": "passed over"})
        self.assertEqual(ran, [("muon", 1000), ("rope", 900), ("linear", 900), ("attention", 700)])
        clock[0] = 0.0
        self.assertEqual(gpu.within(None, suites[:1], run, lambda: clock[0]), {"muon": 0})

    def test_a_missing_library_is_one_line(self):
        run = subprocess.run([sys.executable, ROOT / "bench/gpu.py", "muon", "rope", "--native", "nowhere/libingot_bench.so"], capture_output=True, text=True)
        self.assertEqual((run.returncode, run.stdout, run.stderr.count("\n")), (1, "", 1), run.stderr)
        self.assertIn("bench: --native: found no nowhere/libingot_bench.so, expected the library", run.stderr)

    def test_the_check_of_release_files_has_a_help_and_names_missing_files(self):
        check = [sys.executable, ROOT / "packaging/check.py"]
        run = subprocess.run([*check, "--help"], capture_output=True, text=True)
        self.assertEqual((run.returncode, run.stderr), (0, ""))
        self.assertIn("Installs release files in a clean environment", run.stdout)
        run = subprocess.run([*check, "nothing.whl"], capture_output=True, text=True)
        self.assertEqual((run.returncode, run.stderr), (1, "check: found no file nothing.whl, expected wheels or tarballs of packaging/release.py\n"))
        self.assertEqual(subprocess.run(check, capture_output=True, text=True).returncode, 2)

    def test_a_stop_of_the_benchmarks_ends_the_suites_process(self):
        with tempfile.TemporaryDirectory() as folder:
            suite, started = pathlib.Path(folder) / "gpu_muon.py", pathlib.Path(folder) / "pid"
            suite.write_text(f"import os, pathlib, time\npathlib.Path({str(started)!r}).write_text(str(os.getpid()))\ntime.sleep(60)\n", encoding="utf-8")
            begin = (f"import pathlib, sys; sys.path.insert(0, {str(ROOT / 'bench')!r}); import gpu; gpu.PEERS = pathlib.Path({folder!r}); "
                     f"sys.argv = ['gpu.py', 'muon', '--native', {str(suite)!r}]; gpu.main()")
            process = subprocess.Popen([sys.executable, "-c", begin])
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline and not (started.exists() and started.read_text()):
                time.sleep(0.05)
            pid = int(started.read_text())
            process.terminate()
            self.assertEqual(process.wait(30), 143)
            while time.monotonic() < deadline and pathlib.Path(f"/proc/{pid}").exists():
                time.sleep(0.05)
            self.assertFalse(pathlib.Path(f"/proc/{pid}").exists())

    def test_a_suite_that_runs_past_its_time_is_stopped_with_its_children(self):
        with tempfile.TemporaryDirectory() as folder:
            started = pathlib.Path(folder, "child")
            program = f"import pathlib, subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); pathlib.Path({str(started)!r}).write_text(str(p.pid)); time.sleep(600)"
            before = gpu.time.monotonic()
            self.assertIsNone(gpu.measure("rope", [sys.executable, "-c", program], 0, 3))
            self.assertLess(gpu.time.monotonic() - before, 60)
            child = int(started.read_text())
            state = pathlib.Path(f"/proc/{child}/stat")

            def ended():
                try:
                    return state.read_text().split()[2] == "Z"
                except (FileNotFoundError, ProcessLookupError):
                    return True

            for _ in range(600):  # a killed process ends when it next runs
                if ended():
                    break
                gpu.time.sleep(0.1)
            self.assertTrue(ended())
        self.assertEqual(gpu.measure("rope", [sys.executable, "-c", "raise SystemExit(4)"], 0, 60), 4)

    @unittest.skipUnless(importlib.util.find_spec("torch"), "no PyTorch")
    def test_peers_that_are_not_installed_come_from_wheels(self):
        sys.path.insert(0, str(ROOT / "bench" / "peers"))
        import gpu_common

        with tempfile.TemporaryDirectory() as folder:
            with zipfile.ZipFile(pathlib.Path(folder, "a_peer-1-py3-none-any.whl"), "w") as wheel:
                wheel.writestr("a_peer_of_tests/__init__.py", "from part_of_a_peer import value")
            with zipfile.ZipFile(pathlib.Path(folder, "its_part-1-py3-none-any.whl"), "w") as wheel:  # in a folder that a .pth file names
                wheel.writestr("hidden/part_of_a_peer.py", "value = 7")
                wheel.writestr("part.pth", "hidden")
            parser = argparse.ArgumentParser()
            gpu_common.add_wheels(parser)
            with contextlib.redirect_stdout(io.StringIO()) as said:
                self.assertEqual(gpu_common.import_peer("a_peer_of_tests"), ("a_peer_of_tests", None))
                self.assertIn("a_peer_of_tests: absent (ModuleNotFoundError", said.getvalue())
                gpu_common.import_peer.cache_clear()
                with unittest.mock.patch.dict(os.environ):
                    parser.parse_args(["--wheels", folder])
                    child = subprocess.run([sys.executable, "-c", "import a_peer_of_tests"], capture_output=True, text=True)
                name, module = gpu_common.import_peer("a_peer_that_is_nowhere", "a_peer_of_tests")
            self.assertEqual((name, module.value), ("a_peer_of_tests", 7))
            with zipfile.ZipFile(pathlib.Path(folder, "a_broken_peer-1-py3-none-any.whl"), "w") as wheel:
                wheel.writestr("a_broken_peer_of_tests.py", "raise TypeError('of another version')")
            with unittest.mock.patch.dict(os.environ), contextlib.redirect_stdout(io.StringIO()):
                parser.parse_args(["--wheels", folder])
                broken, missing = (gpu_common.import_peer(name)[1] for name in ("a_broken_peer_of_tests", "a_peer_that_is_nowhere"))
            with zipfile.ZipFile(pathlib.Path(folder, "liger_kernel-7-py3-none-any.whl"), "w") as wheel:
                wheel.writestr("liger_kernel-7.dist-info/METADATA", "Metadata-Version: 2.1\nName: liger_kernel\nVersion: 7\n")
            with unittest.mock.patch.object(gpu_common, "package_places", [wheel.filename]), unittest.mock.patch.object(sys, "path", []):
                self.assertEqual(gpu_common.versions_of_packages(), {"liger-kernel": "7"})
            absent = {}
            gpu_common.add_peers({}, absent, {"broken": (broken, None), "missing": (missing, None)})
            self.assertEqual(absent, {"broken": "TypeError: of another version", "missing": "not installed, and not given by path"})
            self.assertEqual((child.returncode, child.stderr), (0, ""))
            self.assertEqual(pathlib.Path(module.__file__).parents[1].name, "site-packages")  # QuACK refuses its own parts elsewhere

    @unittest.skipUnless(importlib.util.find_spec("torch"), "no PyTorch")
    def test_committed_rows_of_cross_entropy_are_the_first_cases(self):
        sys.path.insert(0, str(ROOT / "bench" / "peers"))
        import gpu_cross_entropy

        cases = [(case.name, [case.rows, case.features, case.vocab]) for case in gpu_cross_entropy.cases()]
        committed = json.loads((reports.RESULTS / "h200" / "cross_entropy.json").read_text())["results"]
        self.assertEqual([(r["name"], r["shape"]) for r in committed], cases[:len(committed)])
        self.assertEqual(cases[-2:], [(f"linear + cross entropy, with gradients{beside}", [4096, 4096, 128256]) for beside in ("", ", beside Liger")])

    @unittest.skipUnless(importlib.util.find_spec("torch"), "no PyTorch")
    def test_the_fastest_form_of_a_peer_that_runs_counts(self):
        sys.path.insert(0, str(ROOT / "bench" / "peers"))
        import gpu_cross_entropy

        def time_of(call):
            if call is None:
                raise ValueError("m == n")
            return call
        with contextlib.redirect_stdout(io.StringIO()) as said:
            self.assertEqual(gpu_cross_entropy.fastest({"a": 3.0, "b": None, "c": 2.0}, time_of), "c")
            self.assertEqual(said.getvalue(), "b: ValueError: m == n\n")
            with self.assertRaisesRegex(ValueError, "m == n"):
                gpu_cross_entropy.fastest({"b": None}, time_of)
        asked = []
        library = argparse.Namespace(chunked_linear_cross_entropy=lambda *given, **options: asked.append(options))
        for case in (gpu_cross_entropy.Case(4096, 4096, 128256, True, 0.0), gpu_cross_entropy.Case(8192, 2880, 201088, True, 0.0)):
            for loss in gpu_cross_entropy.quack_losses(library, case).values():
                loss(1, 2, 3)
        self.assertEqual(asked, [{"chunk_size": 2048, "use_scaled_exp": True}, {"use_scaled_exp": False}, {"chunk_size": 4096, "use_scaled_exp": True}, {"use_scaled_exp": False}])

    def test_only_the_text_between_the_markers_is_replaced(self):
        text = "before\n<!-- table:none -->\nold\n<!-- /table -->\nafter\n"
        new = report_tables.filled(text)
        self.assertTrue(new.startswith("before\n<!-- table:none -->\nNo report yet"))
        self.assertTrue(new.endswith("<!-- /table -->\nafter\n"))
        self.assertEqual(report_tables.filled(new), new)

    def test_curves_are_within_the_spread_of_seeds_or_outside(self):
        def runs(shift):
            return {str(s): {"loss": [4 + shift + s / 10, 3 + shift - s / 10], "held_out": 2 + shift + s / 10} for s in (1, 2, 3)}
        for shift, within, said in ((0.01, True, "within"), (0.5, False, "OUTSIDE")):
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                self.assertEqual(curves.compare("nano", runs(0), runs(shift)), within)
            self.assertIn(f"of one seed {shift:.4f} apart, of two seeds on the CPU 0.1333", out.getvalue())
            self.assertIn(said, out.getvalue())
        self.assertEqual(curves.made_text(50), curves.made_text(50))

    def test_nothing_to_compare_is_no_success(self):
        with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.object(sys, "argv", ["curves.py", folder + "/none.json"]):
            with self.assertRaisesRegex(SystemExit, "none.json: found no runs"):
                curves.main()


if __name__ == "__main__":
    unittest.main()
