"""compute-sanitizer over the GPU tests named ...Small, each tool over each test executable, in shards. Writes
bench/results/<gpu>/sanitizers.json: the tests and errors per tool and executable. Entries of the same tree
that this run does not repeat stay: a report may be made in parts, and an interrupted run keeps its results.

    python3 tools/sanitize.py --build build/cuda [--tools memcheck,racecheck,synccheck,initcheck] [--seconds 240] [--jobs 12] [--out DIR]
                              [--executables test_kernels_linear,...] [--as 8.0]

With --as 8.0 the GPU has the limits of one of compute capability 8.0 (INGOT_GPU_AS), and the report is sanitizers_as_8_0.json; of a build without
Hopper's code (tools/ptx_build.py) the driver compiles the PTX.
"""
import argparse
import concurrent.futures
import datetime
import json
import os
import pathlib
import re
import subprocess
import sys

import ptx_build
import reports

TOOLS = ["memcheck", "racecheck", "synccheck", "initcheck"]
# By default synccheck follows few mbarriers of a block; a forgotten mbarrier looks uninitialised, and its warp is ended.
# By default racecheck shows a hundred hazards; hazards that are not shown cannot be compared with the explained ones.
OPTIONS = {"synccheck": ["--num-cuda-barriers", "1024"], "racecheck": ["--print-limit", "100000"]}
SHARD = 2  # tests per run
# Reports of racecheck that are no races, by executable. racecheck credits an arrival at an mbarrier to the arriving lane, not to the lanes that
# __syncwarp() ordered before (docs/lab/attention.md), and misses block barriers that warps reach from different branches (docs/lab/gpt-oss-decode.md).
HAZARD = re.compile(r"Race reported between (?:Read|Write) access at (.*)\n=+ +and (?:Read|Write) access at (.*?)(?: \[\d+ hazards\])?\n")
EXPLAINED = [(executable, [re.compile(place) for place in pair]) for executable, *pair in (
    ("", r"attention_hopper::Multiplier<.*::run\(\).* in forward\.cuh", r"attention_hopper::KeyFetcher<.*::publish\(.* in walk\.cuh"),
    ("", r"attention_hopper::QueryGradient<.*::run\(\).* in query_gradient\.cuh", r"attention_hopper::KeyFetcher<.*::publish\(.* in walk\.cuh"),
    ("", r"attention_hopper::(KeyGradient|QuerySums)<.* in (key_gradient|query_sums)\.cuh",
     r"attention_hopper::QueryFetcher<.*::(copy_keys|fetch_step)\(.* in key_gradient\.cuh"),
    ("test_models_decode", *2 * (r"sampling::(block_best|best_key_of_grid)\(.* in best\.cuh",)),
    ("test_models_decode", r"ptx::bulk_load\(.* in tma\.cuh", r"decode::load_from_ring<.* in products\.cuh"),
    ("test_models_decode", r"ptx::bulk_load\(.* in tma\.cuh", r"split_kv_attention::Seen<.*::load<.* in split_kv_attention\.cuh"),
    ("test_models_decode", r"WeightWriter::put<.* in weight_stream\.cuh", r"decode::noted_chunk\(.* in token_context\.cuh"),
    ("test_models_decode", r"router::choose<.* in router\.cuh", r"router::route<.* in router\.cuh"),
    ("test_models_decode", r"decode::choose_held\(.* in choose\.cuh", r"epilogue::load_bias<.* in epilogue\.cuh"))]
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)")


def explained_in(text, executable):
    """The number of hazards in racecheck's log that are known to be no races."""
    pairs = [pair for name, pair in EXPLAINED if name in ("", executable)]
    return sum(any(all(pattern.search(place) for pattern, place in zip(pair, places)) for pair in pairs for places in (found, found[::-1]))
               for found in HAZARD.findall(text))


def gpu_executables(build):
    """Test executables labelled gpu."""
    listed = subprocess.run(["ctest", "--test-dir", str(build), "-L", "gpu", "--show-only=json-v1"], capture_output=True, text=True, check=True)
    return [pathlib.Path(name) for name in dict.fromkeys(test["command"][0] for test in json.loads(listed.stdout)["tests"])]


def tests_of(executable, pattern):
    listed = subprocess.run([str(executable), "--gtest_list_tests", f"--gtest_filter={pattern}"], capture_output=True, text=True, check=True)
    return sum(1 for line in listed.stdout.splitlines() if line.startswith("  "))


def sanitize(tool, executable, pattern, shard, shards, seconds, logs):
    """Runs one shard of an executable's tests under a tool: tests passed, errors (None if the tool reports no count), exit status, log."""
    command = ["compute-sanitizer", "--tool", tool, *OPTIONS.get(tool, []), str(executable), "--gtest_brief=1", f"--gtest_filter={pattern}"]
    log = logs / f"{tool}-{executable.name}-{shard}.log"
    with open(log, "w", encoding="utf-8") as out:
        try:
            status = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=seconds, check=False,
                                    env={**os.environ, "GTEST_TOTAL_SHARDS": str(shards), "GTEST_SHARD_INDEX": str(shard)}).returncode
        except subprocess.TimeoutExpired:
            status = 124
    text = log.read_text(encoding="utf-8", errors="replace")
    counts = [int(n) for groups in SUMMARY.findall(text) for n in groups if n]
    passed, skipped = (re.search(rf"\[  {word} \] (\d+) tests?", text) for word in ("PASSED ", "SKIPPED"))
    explained = explained_in(text, executable.name) if tool == "racecheck" else 0
    return {"tests": int(passed[1]) if passed else 0, "skipped": int(skipped[1]) if skipped else 0, "errors": sum(counts) - explained if counts else None, "explained": explained,
            "status": status, "log": log}


def result_of(tool, executable, wanted, shards):
    # A shard without a count of errors is an error too, and so is a test that does not pass.
    tests = sum(shard["tests"] for shard in shards)
    errors = sum(1 if shard["errors"] is None else shard["errors"] for shard in shards) + wanted - tests
    explained = sum(shard["explained"] for shard in shards)
    return {"tool": tool, "executable": executable.name, "tests": tests, "errors": errors, **({"explained": explained} if explained else {}),
            "status": max((shard["status"] for shard in shards), key=abs)}


def earlier_results(folder, pattern, results, suite=reports.SANITIZERS, imitated=None):
    """The entries of the folder's report that are not among `results`, if the report is of this tree, these tests and this imitation."""
    path = folder / f"{suite}.json"
    if not path.exists():
        return []
    report = json.loads(path.read_text(encoding="utf-8"))
    if not reports.holds(report, reports.tree_hash(suite)) or report["filter"] != pattern or report.get("as") != imitated:
        return []
    again = {(result["tool"], result["executable"]) for result in results}
    return [result for result in report["results"] if (result["tool"], result["executable"]) not in again]


def show(result, wanted, shards):
    good = result["errors"] == 0 and result["status"] == 0
    print(f"{result['tool']:10} {result['executable']:24} {result['tests']}/{wanted} tests, {result['errors']} errors, "
          f"{str(result['explained']) + ' explained, ' if 'explained' in result else ''}status {result['status']}{'' if good else '  FAILED'}", flush=True)
    for shard in shards:
        if shard["errors"] != 0 or shard["status"] != 0:
            lines = shard["log"].read_text(encoding="utf-8", errors="replace").splitlines()
            print("\n".join("    " + line[:200] for line in lines if "=========" in line or "FAILED" in line or "Failure" in line)[:2500])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--executables", help="these of the build folder alone (default: all that ctest labels gpu)")
    parser.add_argument("--filter", default="*Small:*Small/*:MlpCuda.ANan*")
    parser.add_argument("--seconds", type=int, default=240, help="limit of a run")
    parser.add_argument("--jobs", type=int, default=12, help="runs side by side")
    parser.add_argument("--as", dest="capability", help="the compute capability of the GPU whose limits this GPU takes: 8.0, 8.6, 8.9, 10.0 or 12.0")
    parser.add_argument("--out", type=pathlib.Path, help="where the report goes (default: bench/results/<gpu>)")
    arguments = parser.parse_args()
    logs = arguments.build / "sanitizer-logs"
    logs.mkdir(parents=True, exist_ok=True)
    query = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "-i", "0"], capture_output=True,
                           text=True, check=True).stdout.strip()
    gpu, driver = [part.strip() for part in query.split(",")]
    chosen = [arguments.build / name for name in arguments.executables.split(",")] if arguments.executables else gpu_executables(arguments.build)
    wanted = {executable: tests_of(executable, arguments.filter) for executable in chosen}
    nvcc = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=False).stdout
    folder = arguments.out or reports.RESULTS / (re.findall(r"[A-Z]+\d+\w*", gpu) or [gpu.replace(" ", "-")])[0].lower()
    folder.mkdir(parents=True, exist_ok=True)
    suite, imitated = reports.SANITIZERS, {}
    if arguments.capability:
        variables, what = ptx_build.imitation_of(arguments.build, arguments.capability)
        suite, imitated = reports.imitating(suite, arguments.capability), {"as": what}
        os.environ.update(variables)
    report = {"suite": suite, "tree": reports.tree_hash(suite), "gpu": gpu, **imitated, "driver": driver,
              "cuda": (re.findall(r"release ([\d.]+)", nvcc) or ["?"])[0], "date": datetime.date.today().isoformat(),
              "command": os.environ.get("INGOT_COMMAND", "tools/sanitize.py"), "filter": arguments.filter}
    results = []
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        def start(tool, executable):
            shards = -(-wanted[executable] // SHARD)
            return [pool.submit(sanitize, tool, executable, arguments.filter, i, shards, arguments.seconds, logs) for i in range(shards)]

        # The slowest tool first.
        running = {(tool, executable): start(tool, executable) for tool in sorted(arguments.tools.split(","), key="racecheck".__ne__)
                   for executable in wanted if wanted[executable]}
        for executable in (e for e, tests in wanted.items() if tests == 0):
            print(f"{executable.name}: no tests match {arguments.filter}")
        for (tool, executable), runs in running.items():
            shards = [run.result() for run in runs]
            # A test that skips is an error, except for a test of Hopper's own units where another GPU is imitated.
            skipped = sum(shard["skipped"] for shard in shards) if imitated else 0
            if skipped == wanted[executable]:
                print(f"{tool:10} {executable.name:24} all {skipped} tests skip with the limits of {arguments.capability}", flush=True)
                continue
            results.append({**result_of(tool, executable, wanted[executable] - skipped, shards), **({"skipped": skipped} if skipped else {})})
            show(results[-1], wanted[executable] - skipped, shards)
            report["results"] = earlier_results(folder, arguments.filter, results, suite, imitated.get("as")) + results
            (folder / f"{suite}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    problems = reports.problems_of(report)
    print("\n".join(problems) if problems else f"{suite}: clean, {len(report['results'])} runs")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
