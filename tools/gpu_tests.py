"""Runs the tests labelled gpu and writes bench/results/<gpu>/gpu_tests.json: per test of ctest its seconds, the cases that passed, were skipped
and failed, and its slowest case; and the seconds of the whole run.

    python3 tools/gpu_tests.py --build build/cuda [--jobs 12] [--out DIR]

Ends with 1 where a test failed.
"""
import argparse
import datetime
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree

import reports

COUNTS = {"passed": re.compile(r"\[  PASSED  \] (\d+) tests?"), "skipped": re.compile(r"\[  SKIPPED \] (\d+) tests?, listed"),
          "failed": re.compile(r"\[  FAILED  \] (\d+) tests?, listed")}
CASE = re.compile(r"\[       OK \] (\S+) \((\d+) ms\)")


def result_of(name, seconds, good, output):
    """A test of ctest from its output. A test without gtest's counts passed or failed as one case."""
    counts = {word: int((pattern.findall(output) or [0])[-1]) for word, pattern in COUNTS.items()}
    if not good and counts["failed"] == 0:  # ended early: by a signal or at the time limit
        counts["failed"] = 1
    if good and sum(counts.values()) == 0:
        counts["passed"] = 1
    cases = [(int(ms) / 1e3, case) for case, ms in CASE.findall(output)]
    slowest = max(cases, default=(0.0, ""))
    return {"test": name, "seconds": round(seconds, 1), **counts, "slowest": slowest[1], "slowest_seconds": slowest[0]}


def results_of(junit):
    """The results in a JUnit file of ctest, the longest first."""
    found = []
    for case in xml.etree.ElementTree.fromstring(junit).iter("testcase"):
        output = "".join(text.text or "" for text in case.iter("system-out"))
        found.append(result_of(case.get("name"), float(case.get("time") or 0), case.get("status") == "run", output))
    return sorted(found, key=lambda result: -result["seconds"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--jobs", type=int, default=12, help="tests side by side (default 12)")
    parser.add_argument("--seconds", type=int, default=300, help="limit of a test (default 300)")
    parser.add_argument("--out", type=pathlib.Path, help="where the report goes (default: bench/results/<gpu>)")
    arguments = parser.parse_args()
    query = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "-i", "0"], capture_output=True,
                           text=True, check=True).stdout.strip()
    gpu, driver = [part.strip() for part in query.split(",")]
    nvcc = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=False).stdout
    with tempfile.TemporaryDirectory() as folder:
        junit = pathlib.Path(folder) / "junit.xml"
        begun = time.monotonic()
        status = subprocess.run(["ctest", "--test-dir", str(arguments.build), "-L", "gpu", f"-j{arguments.jobs}", "--timeout", str(arguments.seconds),
                                 "--output-on-failure", "--no-tests=error", "--test-output-size-passed", "1000000", "--test-output-size-failed",
                                 "1000000", "--output-junit", str(junit)], check=False).returncode
        seconds = time.monotonic() - begun
        results = results_of(junit.read_text(encoding="utf-8", errors="replace"))
    report = {"suite": reports.GPU_TESTS, "tree": reports.tree_hash(reports.GPU_TESTS), "gpu": gpu, "driver": driver,
              "cuda": (re.findall(r"release ([\d.]+)", nvcc) or ["?"])[0], "date": datetime.date.today().isoformat(),
              "command": os.environ.get("INGOT_COMMAND", "tools/gpu_tests.py"), "jobs": arguments.jobs, "seconds": round(seconds, 1), "results": results}
    out = arguments.out or reports.RESULTS / reports.folder_of(gpu)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{reports.GPU_TESTS}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    total = {word: sum(result[word] for result in results) for word in COUNTS}
    print(f"gpu tests: {len(results)} tests in {seconds:.0f} s; cases: {', '.join(f'{n} {word}' for word, n in total.items())}")
    for result in results[:12]:
        print(f"  {result['seconds']:7.1f} s  {result['test']}, of it {result['slowest_seconds']:.1f} s {result['slowest']}")
    sys.exit(1 if status != 0 else 0)


if __name__ == "__main__":
    main()
