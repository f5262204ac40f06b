"""Tests of what is made from the reports, which are tables, headlines, summaries and figures in sentences, and of the comparison of training curves with the spread of seeds."""
import contextlib
import io
import sys
import tempfile
import unittest
import unittest.mock

from good_report import GOOD, ROOT
import curves
import gpu
import report_tables


class ReportTables(unittest.TestCase):
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

    def test_only_the_text_between_the_markers_is_replaced(self):
        text = "before\n<!-- table:none -->\nold\n<!-- /table -->\nafter\n"
        new = report_tables.filled(text)
        self.assertTrue(new.startswith("before\n<!-- table:none -->\nNo report yet"))
        self.assertTrue(new.endswith("<!-- /table -->\nafter\n"))
        self.assertEqual(report_tables.filled(new), new)


class Curves(unittest.TestCase):
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
