"""compute-sanitizer over the GPU tests named ...Small, each tool over each test executable, in shards. Writes
bench/results/<gpu>/sanitizers.json: the tests, errors and seconds per tool and executable.

    python3 tools/sanitize.py --build build/cuda [--tools memcheck,racecheck,synccheck,initcheck] [--limit 400] [--jobs 12] [--out DIR]
                              [--executables test_kernels_linear,...] [--continue] [--seconds N] [--as 8.0]

A case of the report is a tool over an executable. The report is written after each case; as long as cases are missing, to the folder `unfinished` (suite_report.py).
--continue takes over the clean cases of an unfinished report of the same sources, GPU and tests and runs the others; a choice of tools or executables
needs it to make a whole report in parts. --seconds N ends after N seconds: a case whose longest shard took longer last time than the time that is left is passed
over, and a case whose shards did not all end is not counted.

With --as 8.0 the GPU has the limits of one of compute capability 8.0 (INGOT_GPU_AS), and the report is sanitizers_as_8_0.json; of a build without
Hopper's code (tools/ptx_build.py) the driver compiles the PTX.
"""
import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import ptx_build
import reports
import suite_report

TOOLS = ["memcheck", "racecheck", "synccheck", "initcheck"]
TOOLS_IMITATED = TOOLS[:2]  # with the limits of another GPU
# By default synccheck follows few mbarriers of a block; a forgotten mbarrier looks uninitialised, and its warp is ended.
# By default racecheck shows a hundred hazards; hazards that are not shown cannot be compared with the explained ones.
OPTIONS = {"synccheck": ["--num-cuda-barriers", "1024"], "racecheck": ["--print-limit", "100000"]}
SHARD = 2  # tests per run
# Executables with persistent kernels, which end with an error where a block waits for seconds. Beside many other processes on the GPU blocks wait that
# long, so the runs of these executables come last, and FEW of them side by side.
PERSISTENT, FEW = {"test_models_decode"}, 3
# Reports of racecheck that are no races, by executable and by the two places. racecheck credits an arrival at an mbarrier to the arriving lane, not
# to the lanes that __syncwarp() ordered before (docs/lab/attention.md), misses block barriers that warps reach from different branches, and misses
# the order between a warp that arrives at a named barrier by bar.arrive and the warps that wait there (docs/lab/gpt-oss-decode.md). A report names
# a first access and one or several second accesses. The report counts as explained if the list has the pair of the first access with every one of
# the second accesses.
HAZARD = re.compile(r"Race reported between ((?:Read|Write) access at .*)((?:\n=+ +and (?:Read|Write) access at .*)+)")
PARTNER = re.compile(r"and ((?:Read|Write) access at .*?)(?: \[\d+ hazards?\])?$", re.M)
EXPLAINED = [(executable, [re.compile(place) for place in pair]) for executable, *pair in (
    ("", r"attention_hopper::Multiplier<.*::run\(\).* in forward\.cuh", r"attention_hopper::KeyFetcher<.*::publish\(.* in walk\.cuh"),
    ("", r"attention_hopper::QueryGradient<.*::run\(\).* in query_gradient\.cuh", r"attention_hopper::KeyFetcher<.*::publish\(.* in walk\.cuh"),
    ("", r"attention_hopper::(KeyGradient|QuerySums)<.* in (key_gradient|query_sums)\.cuh",
     r"attention_hopper::QueryFetcher<.*::(copy_keys|fetch_step)\(.* in query_fetcher\.cuh"),
    ("", r"attention_hopper::QueryProduct<.*::run\(\).* in query_product\.cuh", r"attention_hopper::ScoreFetcher<.*::publish\(.* in query_product\.cuh"),
    ("test_models_decode", *2 * (r"sampling::(block_best|best_key_of_grid)\(.* in best\.cuh",)),
    ("test_models_decode", r"ptx::bulk_load\(.* in tma\.cuh", r"decode::load_from_ring<.* in products\.cuh"),
    ("test_models_decode", r"ptx::bulk_load\(.* in tma\.cuh", r"split_kv_attention::Seen<.*::load<.* in split_kv_keys\.cuh"),
    ("test_models_decode", r"WeightWriter::put<.* in weight_stream\.cuh", r"decode::noted_chunk\(.* in token_context\.cuh"),
    ("test_models_decode", r"WeightWriter::put<.* in weight_stream\.cuh", r"Read access at .* in token_attention\.cuh"),
    ("test_models_decode", r"router::choose<.* in router\.cuh", r"router::route<.* in router\.cuh"),
    ("test_models_decode", r"decode::choose_held\(.* in choose\.cuh", r"epilogue::load_bias<.* in epilogue\.cuh"),
    ("test_models_decode", r"Write access at .*decode::choose_held\(.* in choose\.cuh", r"Read access at .*decode::weigh\(.* in choose\.cuh"),
    # Only without the copy engine (TokenVariant::warp_rings, the last field), where the multiplying warps state by bar.arrive that the sums are there.
    ("test_models_decode", r"Write access at .*decode::write_normed_vector<.*, \(bool\)1\}.* in activation_vectors\.cuh",
     r"Read access at .*decode::residual_rstd<.*, \(bool\)1\}.* in activation_vectors\.cuh"))]
RUNNING = set()  # the running processes of compute-sanitizer; each is the leader of a process group that also has the test under it
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)")


def hazards_in(text):
    """The reports in racecheck's log: for each a list of pairs (access, access)."""
    return [[(first, second) for second in PARTNER.findall(seconds)] for first, seconds in HAZARD.findall(text)]


def is_explained(pair, executable):
    pairs = [known for name, known in EXPLAINED if name in ("", executable)]
    return any(all(pattern.search(place) for pattern, place in zip(known, places)) for known in pairs for places in (pair, pair[::-1]))


def explained_in(text, executable):
    """The number of reports in racecheck's log that are known to be no races."""
    return sum(all(is_explained(pair, executable) for pair in report) for report in hazards_in(text))


def shortened(access):
    """An access without the types of its function: "Write decode::choose_held in choose.cuh:25"."""
    kind, _, place = access.partition(" access at ")
    while (less := re.sub(r"<[^<>]*>|\([^()]*\)|\{[^{}]*\}|\+0x[0-9a-f]+", "", place)) != place:
        place = less
    name, _, line = place.partition(" in ")
    return f"{kind} {name.strip().split(' ')[-1].removeprefix('ingot::')} in {line or 'an unknown line'}"


def unexplained_in(text, executable):
    """The pairs of racecheck's log that are not explained, the most frequent first: "2 x Write ... / Read ..."."""
    pairs = collections.Counter(" / ".join(map(shortened, pair)) for report in hazards_in(text) for pair in report if not is_explained(pair, executable))
    return [f"{count} x {pair}" for pair, count in pairs.most_common()]


def gpu_executables(build):
    """Test executables labelled gpu."""
    listed = subprocess.run(["ctest", "--test-dir", str(build), "-L", "gpu", "--show-only=json-v1"], capture_output=True, text=True, check=True)
    return [pathlib.Path(name) for name in dict.fromkeys(test["command"][0] for test in json.loads(listed.stdout)["tests"])]


def tests_of(executable, pattern):
    listed = subprocess.run([str(executable), "--gtest_list_tests", f"--gtest_filter={pattern}"], capture_output=True, text=True, check=True)
    return sum(1 for line in listed.stdout.splitlines() if line.startswith("  "))


def sanitize(tool, executable, pattern, shard, shards, limit, logs, until=None, now=time.monotonic):
    """Runs one shard of an executable's tests under a tool: tests passed, errors (None if the tool reports no count), exit status, log, seconds. None where
    the time `until` ended first."""
    left = float("inf") if until is None else until - now()
    if left <= 0:
        return None
    command = ["compute-sanitizer", "--tool", tool, *OPTIONS.get(tool, []), str(executable), "--gtest_brief=1", f"--gtest_filter={pattern}"]
    log, begun = logs / f"{tool}-{executable.name}-{shard}.log", now()
    with open(log, "w", encoding="utf-8") as out, \
         subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                          env={**os.environ, "GTEST_TOTAL_SHARDS": str(shards), "GTEST_SHARD_INDEX": str(shard)}) as process:
        RUNNING.add(process)
        try:
            status = process.wait(min(limit, left))
        except subprocess.TimeoutExpired:
            if left < limit:
                return None
            status = 124
        finally:
            suite_report.end_group(process)
            RUNNING.discard(process)
    text = log.read_text(encoding="utf-8", errors="replace")
    counts = [int(n) for groups in SUMMARY.findall(text) for n in groups if n]
    passed, skipped = (re.search(rf"\[  {word} \] (\d+) tests?", text) for word in ("PASSED ", "SKIPPED"))
    explained = explained_in(text, executable.name) if tool == "racecheck" else 0
    return {"tests": int(passed[1]) if passed else 0, "skipped": int(skipped[1]) if skipped else 0, "errors": sum(counts) - explained if counts else None, "explained": explained,
            "status": status, "log": log, "seconds": now() - begun}


def result_of(tool, executable, wanted, shards):
    # A shard without a count of errors is an error too, and so is a test that does not pass.
    tests = sum(shard["tests"] for shard in shards)
    errors = sum(1 if shard["errors"] is None else shard["errors"] for shard in shards) + wanted - tests
    explained = sum(shard["explained"] for shard in shards)
    return {"tool": tool, "executable": executable.name, "tests": tests, "errors": errors, **({"explained": explained} if explained else {}),
            "status": max((shard["status"] for shard in shards), key=abs)}


def show(result, wanted, shards, seconds):
    good = result["errors"] == 0 and result["status"] == 0
    print(f"{result['tool']:10} {result['executable']:24} {result['tests']}/{wanted} tests, {result['errors']} errors, "
          f"{str(result['explained']) + ' explained, ' if 'explained' in result else ''}status {result['status']}, longest shard {seconds:.1f} s of {sum(shard['seconds'] for shard in shards):.1f}{'' if good else '  FAILED'}", flush=True)
    for i, shard in enumerate(shards):
        if shard["errors"] == 0 and shard["status"] == 0:
            continue
        if shard["status"] == 124:
            print(f"    run {i} of {len(shards)} was ended after {shard['seconds']:.0f} s, without a count: one error, and one for each test that did not pass")
        text = shard["log"].read_text(encoding="utf-8", errors="replace")
        hazards = unexplained_in(text, result["executable"])
        lines = [line for line in text.splitlines() if ("=========" in line and not hazards) or "FAILED" in line or "Failure" in line]
        print("\n".join("    " + line[:300] for line in hazards + lines)[:8000])


def end_now(*_):
    """At a signal: the report has every case that is done, so nothing is waited for."""
    for process in list(RUNNING):
        suite_report.end_group(process)
    os._exit(143)


def run_cases(report, wanted, arguments, logs, imitated):
    """Runs the missing cases of the report, the slowest tool first, in parallel shards; cases with persistent kernels at the end."""
    chosen = [name for name in report.missing if report.cases[name][0] in arguments.tools and report.cases[name][1] in arguments.executables and report.fits(name)]
    persistent = [name for name in chosen if report.cases[name][1].name in PERSISTENT]
    run_side_by_side(report, [name for name in chosen if name not in persistent], arguments.jobs, wanted, arguments, logs, imitated)
    run_side_by_side(report, persistent, min(arguments.jobs, FEW), wanted, arguments, logs, imitated)


def run_side_by_side(report, chosen, jobs, wanted, arguments, logs, imitated):
    """Runs these cases with at most `jobs` shards at a time and adds their results to the report."""
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        def start(tool, executable):
            shards = -(-wanted[executable] // SHARD)
            return [pool.submit(sanitize, tool, executable, arguments.filter, i, shards, arguments.limit, logs, report.until) for i in range(shards)]

        running = {name: start(*report.cases[name]) for name in chosen}
        for name, runs in running.items():
            tool, executable = report.cases[name]
            shards = [run.result() for run in runs]
            if None in shards:
                report.leave(name)
                continue
            # A test that skips is an error, except for a test of Hopper's own units where another GPU is imitated.
            skipped = sum(shard["skipped"] for shard in shards) if imitated else 0
            longest = max(shard["seconds"] for shard in shards)
            if skipped == wanted[executable]:
                print(f"{tool:10} {executable.name:24} all {skipped} tests skip with the limits of {arguments.capability}", flush=True)
                report.add([], name=name, seconds=longest)
                continue
            result = {**result_of(tool, executable, wanted[executable] - skipped, shards), **({"skipped": skipped} if skipped else {}),
                      "seconds": round(sum(shard["seconds"] for shard in shards), 1)}
            report.add([result], name=name, seconds=longest)
            show(result, wanted[executable] - skipped, shards, longest)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--tools", type=lambda text: text.split(","), help=f"these alone (default: {', '.join(TOOLS)}; with --as {', '.join(TOOLS_IMITATED)})")
    parser.add_argument("--executables", help="these of the build folder alone (default: all that ctest labels gpu)")
    parser.add_argument("--filter", default="*Small:*Small/*:MlpCuda.ANan*")
    parser.add_argument("--limit", type=float, default=400, help="seconds that a run of two tests may take")
    parser.add_argument("--seconds", type=float, metavar="N", help="end after N seconds")
    parser.add_argument("--continue", dest="again", action="store_true", help="run only what the report of these sources lacks")
    parser.add_argument("--jobs", type=int, default=12, help="runs side by side")
    parser.add_argument("--as", dest="capability", help="the compute capability of the GPU whose limits this GPU takes: 8.0, 8.6, 8.9, 10.0 or 12.0")
    parser.add_argument("--out", type=pathlib.Path, help="where the report goes (default: bench/results/<gpu>)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, end_now)  # so that `timeout` also ends the tests
    until = None if arguments.seconds is None else time.monotonic() + arguments.seconds
    logs = arguments.build / "sanitizer-logs"
    logs.mkdir(parents=True, exist_ok=True)
    query = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "-i", "0"], capture_output=True,
                           text=True, check=True).stdout.strip()
    gpu, driver = [part.strip() for part in query.split(",")]
    every = gpu_executables(arguments.build)
    arguments.executables = [arguments.build / name for name in arguments.executables.split(",")] if arguments.executables else every
    every += [executable for executable in arguments.executables if executable.name not in {e.name for e in every}]
    arguments.executables = [e for e in every if e.name in {executable.name for executable in arguments.executables}]
    wanted = {executable: tests_of(executable, arguments.filter) for executable in every}
    for executable in (e for e in arguments.executables if wanted[e] == 0):
        print(f"{executable.name}: no tests match {arguments.filter}")
    nvcc = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=False).stdout
    suite, imitated = reports.SANITIZERS, {}
    if arguments.capability:
        variables, what = ptx_build.imitation_of(arguments.build, arguments.capability)
        suite, imitated = reports.imitating(suite, arguments.capability), {"as": what}
        os.environ.update(variables)
    every_tool = TOOLS_IMITATED if arguments.capability else TOOLS
    arguments.tools = arguments.tools or every_tool
    every_tool = sorted({*every_tool, *arguments.tools}, key=lambda tool: (tool != "racecheck", tool))
    cases = {f"{tool} {executable.name}": (tool, executable) for tool in every_tool for executable in every if wanted[executable]}
    report = suite_report.SuiteReport(suite, cases, gpu, again=arguments.again, until=until, folder=arguments.out,
                                      fits=lambda old: old["filter"] == arguments.filter and old.get("as") == imitated.get("as"),
                                      good=lambda result: result["errors"] == 0 and result["status"] == 0)
    report.entries = lambda: {**imitated, "driver": driver, "cuda": (re.findall(r"release ([\d.]+)", nvcc) or ["?"])[0],
                              "command": os.environ.get("INGOT_COMMAND", "tools/sanitize.py"), "filter": arguments.filter}
    run_cases(report, wanted, arguments, logs, imitated)
    print("\n".join(report.end()))
    problems = reports.problems_of(report.report())
    if report.missing and problems:  # end() prints those of a whole report
        print("\n".join(problems))
    elif not problems:
        print(f"{suite}: clean, {len(report.rows)} runs")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
