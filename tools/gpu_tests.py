"""Runs the tests labelled gpu and writes bench/results/<gpu>/gpu_tests.json: per test of ctest its seconds, the cases that passed, were skipped
and failed, and its slowest case; and the seconds of the whole run.

    python3 tools/gpu_tests.py --build build/cuda [--jobs 12] [--continue] [--seconds N] [--as CAPABILITY] [--out DIR]

The report is written after each test; as long as tests are missing, to the folder `unfinished` (suite_report.py). --continue takes over the tests of an
unfinished report of the same sources and GPU that passed, and runs the others. --seconds N ends after N seconds: a test that took longer last time than the time that is left is
passed over, and a test that did not end is not counted.
With --as 8.0 the GPU has the limits of one of compute capability 8.0 (INGOT_GPU_AS), and the report is gpu_tests_as_8_0.json. Of a build without
Hopper's code (tools/ptx_build.py) the driver compiles the PTX, and the tests that force this anyway (ctest -L ptx) are left out. Ends with 1 where a test failed.
"""
import argparse
import collections
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import ptx_build
import reports
import suite_report

COUNTS = {"passed": re.compile(r"\[  PASSED  \] (\d+) tests?"), "skipped": re.compile(r"\[  SKIPPED \] (\d+) tests?, listed"),
          "failed": re.compile(r"\[  FAILED  \] (\d+) tests?, listed")}
SKIPPED = re.compile(r": Skipped\n(.+)\n")
CASE = re.compile(r"\[       OK \] (\S+) \((\d+) ms\)")
# Lines of `ctest -V`: a line of a test's output, and a test's end with its number, name, state (with asterisks where the test did not pass) and seconds.
OUTPUT = re.compile(r"(\d+): (.*)")
END = re.compile(r"\s*\d+/\d+ Test +#(\d+): (\S+) [ .]*(\*\*\*)?\s*(.+?)\s+([\d.]+) sec")


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


def results_of(lines):
    """(result, output) of each test at its end, from the lines of `ctest -V`, in which tests that run side by side alternate."""
    outputs = collections.defaultdict(list)
    for line in lines:
        if ended := END.match(line):
            number, name, bad, state, seconds = ended.groups()
            output = "\n".join(outputs.pop(number, [])) + "\n"
            if state != "Skipped":
                yield result_of(name, float(seconds), not bad, output), output
        elif said := OUTPUT.match(line):
            outputs[said[1]].append(said[2])


def run_tests(report, ctest, arguments, environment, run=subprocess.Popen):
    """Runs the missing tests of the report that fit into the time, with ctest's command line `ctest`; whether none failed."""
    names = [name for name in report.missing if report.fits(name)]
    if not names:
        return True
    left, good = report.left(), True
    line = [*ctest, "-R", f"^({'|'.join(map(re.escape, names))})$", "-V", f"-j{arguments.jobs}", "--timeout", str(arguments.limit), "--no-tests=error"]
    with run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment, start_new_session=True) as process:
        timer = threading.Timer(left, os.killpg, (process.pid, signal.SIGKILL)) if left is not None else None  # a test that runs then is not counted
        if timer:
            timer.start()
        try:
            for result, output in results_of(process.stdout):
                report.add([result], name=result["test"], seconds=result["seconds"])
                print(f"{result['test']}: {result['passed']} passed, {result['skipped']} skipped, {result['failed']} failed  [{result['seconds']:.1f} s]", flush=True)
                if result["failed"]:
                    good = False
                    print(output, flush=True)
        finally:
            if timer:
                timer.cancel()
            suite_report.end_group(process)
    for name in (name for name in names if name not in report.rows):
        report.leave(name)
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--jobs", type=int, default=12, help="tests side by side (default 12)")
    parser.add_argument("--limit", type=int, default=300, help="seconds that a test may take (default 300)")
    parser.add_argument("--seconds", type=float, metavar="N", help="end after N seconds")
    parser.add_argument("--continue", dest="again", action="store_true", help="run only what the report of these sources lacks")
    parser.add_argument("--as", dest="capability", help="the compute capability of the GPU whose limits this GPU takes: 8.0, 8.6, 8.9, 10.0 or 12.0")
    parser.add_argument("--out", type=pathlib.Path, help="where the report goes (default: bench/results/<gpu>)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `timeout` also ends the tests
    until = None if arguments.seconds is None else time.monotonic() + arguments.seconds
    query = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "-i", "0"], capture_output=True,
                           text=True, check=True).stdout.strip()
    gpu, driver = [part.strip() for part in query.split(",")]
    nvcc = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=False).stdout
    suite, environment, more, ctest = reports.GPU_TESTS, dict(os.environ), {}, ["ctest", "--test-dir", str(arguments.build), "-L", "gpu"]
    if arguments.capability:
        variables, what = ptx_build.imitation_of(arguments.build, arguments.capability)
        suite, more = reports.imitating(suite, arguments.capability), {"as": what}
        environment |= variables
        ctest += ["-LE", "ptx"] if what["grade"] == "imitated" else []
    tests = [test["name"] for test in json.loads(subprocess.run([*ctest, "--show-only=json-v1"], capture_output=True, text=True, check=True).stdout)["tests"]]
    report = suite_report.SuiteReport(suite, dict.fromkeys(tests), gpu, again=arguments.again, until=until, folder=arguments.out, fits=lambda old: old.get("as") == more.get("as"),
                                      good=lambda result: result["failed"] == 0)
    report.entries = lambda: {**more, "driver": driver, "cuda": (re.findall(r"release ([\d.]+)", nvcc) or ["?"])[0],
                              "command": os.environ.get("INGOT_COMMAND", "tools/gpu_tests.py"), "jobs": arguments.jobs}
    good = run_tests(report, ctest, arguments, environment)
    print("\n".join(report.end()))
    results = sorted((row for rows in report.rows.values() for row in rows), key=lambda result: -result["seconds"])
    total = {word: sum(result[word] for result in results) for word in COUNTS}
    print(f"{suite}: cases: {', '.join(f'{n} {word}' for word, n in total.items())}")
    reasons = sum((collections.Counter(result.get("reasons", {})) for result in results), collections.Counter())
    print("".join(f"  skipped {n}: {reason}\n" for reason, n in reasons.most_common()), end="")
    for result in results[:12]:
        print(f"  {result['seconds']:7.1f} s  {result['test']}, of it {result['slowest_seconds']:.1f} s {result['slowest']}")
    sys.exit(0 if good and not any(result["failed"] for result in results) else 1)


if __name__ == "__main__":
    main()
