"""Runs the tests labelled gpu and writes bench/results/<gpu>/gpu_tests.json: per test of ctest its seconds, the cases that passed, were skipped
and failed, and its slowest case; and the seconds of the whole run.

    python3 tools/gpu_tests.py --build build/cuda [--jobs 12] [--minutes N] [--as CAPABILITY] [--out DIR]

With --as 8.0 the GPU has the limits of one of compute capability 8.0 (INGOT_GPU_AS), and the report is gpu_tests_as_8_0.json. Of a build without
Hopper's code (tools/ptx_build.py) the driver compiles the PTX, and the tests that force this anyway (ctest -L ptx) are left out. --minutes N ends the run after N minutes; the report then lacks the tests that did not end, and says how many. Ends with
1 where a test failed.
"""
import argparse
import collections
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

import ptx_build
import reports

COUNTS = {"passed": re.compile(r"\[  PASSED  \] (\d+) tests?"), "skipped": re.compile(r"\[  SKIPPED \] (\d+) tests?, listed"),
          "failed": re.compile(r"\[  FAILED  \] (\d+) tests?, listed")}
SKIPPED = re.compile(r": Skipped\n(.+)\n")
CASE = re.compile(r"\[       OK \] (\S+) \((\d+) ms\)")


def result_of(name, seconds, good, output):
    """A test of ctest from its output. A test without gtest's counts passed or failed as one case."""
    counts = {word: int((pattern.findall(output) or [0])[-1]) for word, pattern in COUNTS.items()}
    cut_off = not good and counts["failed"] == 0  # by a signal or at the time limit
    if cut_off:
        counts["failed"] = 1
    if good and sum(counts.values()) == 0:
        counts["passed"] = 1
    cases = [(int(ms) / 1e3, case) for case, ms in CASE.findall(output)]
    slowest = max(cases, default=(0.0, ""))
    reasons = dict(collections.Counter(SKIPPED.findall(output)))
    return {"test": name, "seconds": round(seconds, 1), **counts, "slowest": slowest[1], "slowest_seconds": slowest[0], **({"cut off": True} if cut_off else {}),
            **({"reasons": reasons} if reasons else {})}


def results_of(junit):
    """The results in a JUnit file of ctest, the longest first."""
    found = []
    for case in xml.etree.ElementTree.fromstring(junit).iter("testcase"):
        output = "".join(text.text or "" for text in case.iter("system-out"))
        found.append(result_of(case.get("name"), float(case.get("time") or 0), case.get("status") == "run", output))
    return sorted(found, key=lambda result: -result["seconds"])


def run_tests(chosen, arguments, environment):
    """Runs the tests of ctest's command line `chosen`: (their results, the longest first; the number of tests; the seconds; whether none failed)."""
    count = len(json.loads(subprocess.run([*chosen, "--show-only=json-v1"], capture_output=True, text=True, check=True).stdout)["tests"])
    stop = []
    if arguments.minutes:
        stop = ["--stop-time", (datetime.datetime.now() + datetime.timedelta(minutes=arguments.minutes)).strftime("%H:%M:%S")]
    with tempfile.TemporaryDirectory() as folder:
        junit = pathlib.Path(folder) / "junit.xml"
        begun = time.monotonic()
        status = subprocess.run([*chosen, f"-j{arguments.jobs}", *stop, "--timeout", str(arguments.seconds), "--output-on-failure", "--no-tests=error",
                                 "--test-output-size-passed", "1000000", "--test-output-size-failed", "1000000", "--output-junit", str(junit)],
                                check=False, env=environment).returncode
        seconds = time.monotonic() - begun
        results = results_of(junit.read_text(encoding="utf-8", errors="replace"))
    if arguments.minutes and seconds > 60 * arguments.minutes - 3:  # ctest ended the tests that were running
        results = [result for result in results if not result.get("cut off")]
        return results, count, seconds, not any(result["failed"] for result in results)
    return results, count, seconds, status == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--jobs", type=int, default=12, help="tests side by side (default 12)")
    parser.add_argument("--seconds", type=int, default=300, help="limit of a test (default 300)")
    parser.add_argument("--minutes", type=float, help="end after this time")
    parser.add_argument("--as", dest="capability", help="the compute capability of the GPU whose limits this GPU takes: 8.0, 8.6, 8.9, 10.0 or 12.0")
    parser.add_argument("--out", type=pathlib.Path, help="where the report goes (default: bench/results/<gpu>)")
    arguments = parser.parse_args()
    query = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "-i", "0"], capture_output=True,
                           text=True, check=True).stdout.strip()
    gpu, driver = [part.strip() for part in query.split(",")]
    nvcc = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=False).stdout
    suite, environment, more, chosen = reports.GPU_TESTS, dict(os.environ), {}, ["ctest", "--test-dir", str(arguments.build), "-L", "gpu"]
    if arguments.capability:
        variables, what = ptx_build.imitation_of(arguments.build, arguments.capability)
        suite, more = reports.imitating(suite, arguments.capability), {"as": what}
        environment |= variables
        chosen += ["-LE", "ptx"] if what["grade"] == "imitated" else []
    results, count, seconds, good = run_tests(chosen, arguments, environment)
    if len(results) < count:
        more["incomplete"] = f"{count - len(results)} of {count} tests did not end in the time"
    report = {"suite": suite, "tree": reports.tree_hash(suite), "gpu": gpu, **more, "driver": driver,
              "cuda": (re.findall(r"release ([\d.]+)", nvcc) or ["?"])[0], "date": datetime.date.today().isoformat(),
              "command": os.environ.get("INGOT_COMMAND", "tools/gpu_tests.py"), "jobs": arguments.jobs, "seconds": round(seconds, 1), "results": results}
    out = arguments.out or reports.RESULTS / reports.folder_of(gpu)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{suite}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    total = {word: sum(result[word] for result in results) for word in COUNTS}
    print(f"{suite}: {len(results)} of {count} tests in {seconds:.0f} s; cases: {', '.join(f'{n} {word}' for word, n in total.items())}")
    reasons = sum((collections.Counter(result.get("reasons", {})) for result in results), collections.Counter())
    print("".join(f"  skipped {n}: {reason}\n" for reason, n in reasons.most_common()), end="")
    for result in results[:12]:
        print(f"  {result['seconds']:7.1f} s  {result['test']}, of it {result['slowest_seconds']:.1f} s {result['slowest']}")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
