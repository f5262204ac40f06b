"""Tests of the reports of measurements: a good report passes, each kind of damage is named, and changed sources make a report stale unless all kernels are the same; also tests of the check of release files."""
import contextlib
import io
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

from good_report import GOOD, ROOT, damaged
import check_reports
import report_tables
import reports
import same_kernels


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

    def test_the_report_of_the_hosts_time_depends_on_modules_and_not_on_models(self):
        of = {suite: {p.relative_to(ROOT).as_posix() for p in reports.files_of(suite)} for suite in ("host_cost", "models")}
        package = "bindings/python/ingot/"
        for used in ("nn.py", "_op.py", "_rms_norm.py", "_mlp.py", "__init__.py"):
            self.assertIn(package + used, of["host_cost"])
        for unused in ("hf.py", "_hf_attention.py", "engine.py"):
            self.assertNotIn(package + unused, of["host_cost"])
            self.assertIn(package + unused, of["models"])

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
                (new / names[2]).write_text(f"{names[2]}  // the same code with a comment")
                self.assertIn("2 kernels are the same", said(same_kernels.keep_reports, old, build / "old", build / "new"))
            (new / names[2]).write_text("host code")
            path.write_text(json.dumps(report))
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

    def test_a_training_step_stands_beside_the_compiled_model_and_is_stale_with_the_trainer(self):
        result = {k: v for k, v in GOOD["results"][0].items() if k not in ("error", "tolerance")}
        report = {**GOOD, "suite": "train", "results": [{**result, "peers": {"compile_rows": 24.0, "compile_packed": 20.0}}]}
        self.assertEqual(reports.problems_of(report), [])
        rows = list(report_tables.table(report))
        self.assertIn("torch.compile, dense attention | torch.compile, FlexAttention", rows[2])
        self.assertTrue(rows[-1].endswith("| 24.0 | 20.0 | 1.25x |"), rows[-1])
        files = {path.relative_to(ROOT).as_posix() for path in reports.files_of("train")}
        self.assertLessEqual({"src/ingot/engines/train/optimizer/optimizer.cpp", "src/ingot/models/gpt/block/block.cpp", "src/ingot/kernels/muon/muon.cu"}, files)

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

    def test_the_check_of_release_files_has_a_help_and_names_missing_files(self):
        check = [sys.executable, ROOT / "packaging/check.py"]
        run = subprocess.run([*check, "--help"], capture_output=True, text=True)
        self.assertEqual((run.returncode, run.stderr), (0, ""))
        self.assertIn("Installs release files in a clean environment", run.stdout)
        run = subprocess.run([*check, "nothing.whl"], capture_output=True, text=True)
        self.assertEqual((run.returncode, run.stderr), (1, "check: found no file nothing.whl, expected wheels or tarballs of packaging/release.py\n"))
        self.assertEqual(subprocess.run(check, capture_output=True, text=True).returncode, 2)


if __name__ == "__main__":
    unittest.main()
