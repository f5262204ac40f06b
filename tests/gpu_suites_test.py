"""Tests of the benchmark suites of bench: their rows and limits, the peers that the suites find or start, and the ends of suites that take too long."""
import argparse
import concurrent.futures
import contextlib
import importlib.util
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock
import zipfile

from good_report import GOOD, ROOT
import gpu
import report_tables
import reports

WITH_TORCH = unittest.skipUnless(importlib.util.find_spec("torch"), "no PyTorch")


class GpuSuites(unittest.TestCase):
    @WITH_TORCH
    def test_a_runs_operations_are_those_of_a_step_whatever_the_log_has_smoothed(self):
        import train_runs
        rate, logged = 0.0, []
        for seconds in (2.0, 0.5, 0.11, 0.10, 0.12):  # of the same 6e9 operations each
            rate = 0.9 * rate + 0.1 * 6e9 / seconds if rate else 6e9 / seconds
            logged.append({"step_seconds": seconds, "flops_per_second": rate, "memory_bytes": 1000})
        self.assertEqual(train_runs.measured_of(logged, 2), {"ms": 110.0, "flops": 6e9, "memory_bytes": 1000})

    @WITH_TORCH
    def test_functions_take_turns_in_another_random_order_in_each_round_and_in_the_same_orders_in_each_run(self):
        import gpu_common
        clock, called = [0.0], []

        class Event:  # of a clock that only the functions advance
            def __init__(self, enable_timing):
                self.at = None

            def record(self):
                self.at = clock[0]

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return end.at - self.at

        def taking(name, ms):
            def replay():
                called.append(name)
                clock[0] += ms
            return replay
        functions = {name: taking(name, ms) for name, ms in (("a", 2.0), ("b", 3.0), ("c", 5.0), ("d", 7.0))}
        runs = []
        for _ in range(2):
            called.clear()
            with unittest.mock.patch.object(gpu_common.torch.cuda, "Event", Event):
                us, spread = gpu_common.interleaved(functions, calls=10, rounds=9)
            self.assertEqual(us, {"a": 200.0, "b": 300.0, "c": 500.0, "d": 700.0})
            self.assertEqual(spread["d"], [700.0, 700.0])
            turns = called[2 * len(functions):]  # behind the two calls that find out how often a function must be called
            runs.append([tuple(turns[i:i + len(functions)]) for i in range(0, len(turns), len(functions))])
        self.assertTrue(all(sorted(turn) == sorted(functions) for turn in runs[0]) and len(runs[0]) == 9, runs[0])
        self.assertGreater(len(set(runs[0])), 4)
        self.assertEqual({turn[0] for turn in runs[0]}, set(functions), "each function has begun a round")
        self.assertEqual(runs[0], runs[1])

    @WITH_TORCH
    def test_a_process_that_warms_waits_for_each_peer_of_its_share(self):
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

    @WITH_TORCH
    def test_one_process_measures_one_gpu_and_then_all_numbers_of_several(self):
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

    @WITH_TORCH
    def test_drafts_have_a_row_for_each_case_and_a_limit_of_one_reading_a_step(self):
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

    @WITH_TORCH
    def test_portable_variants_have_a_row_for_each_gpu_and_the_bound_of_the_instruction(self):
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

    @WITH_TORCH
    def test_clients_of_a_server_have_rows_a_limit_and_a_table_of_their_own(self):
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

    @WITH_TORCH
    def test_a_rival_s_server_that_refuses_to_sample_on_the_gpu_is_started_without_that_option(self):
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

    @WITH_TORCH
    def test_training_over_several_gpus_makes_one_gpus_passes(self):
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

    @WITH_TORCH
    def test_a_run_that_takes_too_long_reports_its_last_step(self):
        import train_runs

        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)

        def program_of(name, script):
            program = pathlib.Path(folder.name) / name / "ingot"
            program.parent.mkdir()
            program.write_text("#!/bin/sh\n" + script)
            program.chmod(0o755)
            return program

        def error_of(program, limit=4.0):  # a busy machine may take a second to start the program
            options = argparse.Namespace(ingot=program, device="cpu", tokens=8, shrink=(), limit=limit)
            with self.assertRaises(RuntimeError) as raised:
                train_runs.measure_ours(options, program.parent, 11, 1, 12)
            return str(raised.exception)
        find_out = 'while [ "$1" != --out ]; do shift; done; mkdir -p "$2"\n'
        begun = """printf '{"event":"start","config":"%s"}\\n{"event":"step","step":1}\\n{"event":"step","step":2}\\n' "$(printf %0500d 1)" > "$2/log.jsonl"\n"""
        of_start = begun.replace('\\n{"event":"step","step":1}\\n{"event":"step","step":2}', "")
        # All are written before the first one starts: a program that another process holds open for writing, even for a moment, cannot be started.
        programs = [program_of("two-steps", find_out + begun + "echo 'step 2/16  loss 9.0' >&2\nexec sleep 30"), program_of("start", find_out + of_start + "exec sleep 30"),
                    program_of("silent", "exec sleep 30")]
        refused = program_of("refused", "echo 'no GPU' >&2; exit 1")
        with concurrent.futures.ThreadPoolExecutor() as pool:
            found, started, silent = pool.map(error_of, programs)
        self.assertEqual(found, 'ingot train: not done after 4 s. It logged {"event":"step","step":1} {"event":"step","step":2}; it said step 2/16  loss 9.0')
        self.assertRegex(started, r'It logged \{"event":"start","config":"0+; it said nothing$')
        self.assertLess(len(started), 400)
        self.assertEqual(silent, "ingot train: not done after 4 s. It logged nothing, not even its start; it said nothing")
        self.assertEqual(error_of(refused, limit=30), "ingot train: no GPU")

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

    @WITH_TORCH
    def test_peers_that_are_not_installed_come_from_wheels(self):
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

    @WITH_TORCH
    def test_committed_rows_of_cross_entropy_are_the_first_cases(self):
        import gpu_cross_entropy

        cases = [(case.name, [case.rows, case.features, case.vocab]) for case in gpu_cross_entropy.cases()]
        committed = json.loads((reports.RESULTS / "h200" / "cross_entropy.json").read_text())["results"]
        self.assertEqual([(r["name"], r["shape"]) for r in committed], cases[:len(committed)])
        self.assertEqual(cases[-2:], [(f"linear + cross entropy, with gradients{beside}", [4096, 4096, 128256]) for beside in ("", ", beside Liger")])

    @WITH_TORCH
    def test_the_fastest_form_of_a_peer_that_runs_counts(self):
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


if __name__ == "__main__":
    unittest.main()
