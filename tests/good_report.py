"""A report without problems, for tests of the report tools and of the benchmarks; a test that imports this file first can then import the modules of tools and bench by name."""
import copy
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "bench"), str(ROOT / "bench" / "peers")]
import reports  # noqa: E402

GOOD = {
    "suite": "rmsnorm", "tree": "0" * 16, "gpu": "GPU", "driver": "1", "cuda": "13.0", "date": "2026-01-01", "command": "./run gpu",
    "ceilings": {"copy_TBps": 4.0, "read_TBps": 4.5, "bf16_TFLOPs": 700.0},
    "results": [{"name": "RMSNorm", "shape": [4096, 4096], "dtype": "bf16", "ours_us": 16.0, "limit_us": 15.0, "error": 1e-3,
                 "tolerance": 2e-3, "peers": {"torch_eager": 24.0, "torch_compile": 20.0, "origin": 44.0}}],
}


def damaged(change):
    """The problems of a copy of the good report after a change."""
    report = copy.deepcopy(GOOD)
    change(report)
    return " / ".join(reports.problems_of(report))
