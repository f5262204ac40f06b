#!/usr/bin/env python3
"""Runs every GPU benchmark: Ingot beside its peers, in turn, with a report bench/results/<gpu>/<suite>.json for each suite.

    python3 bench/gpu.py --native build/cuda/libingot_bench.so [SUITE...] [--origins FOLDER] [--liger WHEEL] [--wheels FOLDER] [--warm N] [--continue] [--stale] [--seconds N]
    python3 bench/gpu.py --plan [SUITE...]

SUITE: rmsnorm, rope, gate, mlp, linear, experts, swiglu, wide_mlp, cross_entropy, muon, attention, decode, families, decode_gpus, draft, prompt, serve, train, train_gpus, train_memory, generate, ttt, sampling, host_cost, host_token, models, portable; all by default (host_cost, host_token and models import ingot, models also transformers). FOLDER has the peers that cannot be installed:
MGRrmsnorm/src/rmsnorm_kernel.cu, MGRrmsnorm/megagemm/swiglu.py, mlp-megakernel/fused_mlp.py, libtiny_cuda_nn.so (peers/tiny_cuda_nn.cu), and llama.cpp's programs
llama.cpp/llama-bench and llama.cpp/llama-server, which also need the package gguf: without it nothing is measured.
A missing peer is listed in the report as absent; PyTorch eager and torch.compile always run. All other options
go to the suites' programs (peers/gpu_<suite>.py --help). torch.compile's peers take most of the time of mlp, linear, swiglu, wide_mlp,
cross_entropy, muon, attention, train, ttt, models and portable: with --warm N, N processes compile a share each first, and the measuring process finds the kernels in PyTorch's cache.

A suite can be measured in several calls. After each case the report is written; as long as cases are missing, to bench/results/<gpu>/unfinished/<suite>.json, which no table
reads. --continue takes over the cases of an unfinished report of the same sources, or of the same machine code (tools/same_kernels.py --reports), the same programs of
bench/peers and the same kind of GPU, and measures the missing ones; the report keeps the day, driver and ceilings of each call. --seconds N ends after N seconds: a case that took longer last time than the
time that is left is passed over, and whatever runs when the time ends is stopped. Each case prints its seconds; --plan prints the seconds of all cases and the missing ones, and
measures nothing.
--stale measures, of the suites named or all, those without a whole report of these sources on this GPU: first those without any report, then the oldest. The same
command called again continues with the remaining suites and cases.
"""
import argparse
import os
import pathlib
import signal
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tools"))
import reports  # noqa: E402
import suite_report  # noqa: E402

SUITES = ("rmsnorm", "rope", "gate", "mlp", "linear", "experts", "swiglu", "wide_mlp", "cross_entropy", "muon", "attention", "decode", "families", "decode_gpus", "draft", "prompt", "serve", "train", "train_gpus", "train_memory", "generate", "ttt", "sampling",
          "host_cost", "host_token", "models", "portable")
WARMED = ("mlp", "linear", "swiglu", "wide_mlp", "cross_entropy", "muon", "attention", "train", "ttt", "models", "portable")
MOST_WARM = {"models": 2}  # processes side by side, as many as have room in the GPU's memory
PEERS = pathlib.Path(__file__).resolve().parent / "peers"
# suite: (option, the file in FOLDER that must exist, the path that is passed)
ORIGINS = {
    "rmsnorm": [("--origin", "MGRrmsnorm/src/rmsnorm_kernel.cu", "MGRrmsnorm/src")],
    "gate": [("--origin", "MGRrmsnorm/megagemm/swiglu.py", "MGRrmsnorm/megagemm")],
    "mlp": [("--origin", "mlp-megakernel/fused_mlp.py", "mlp-megakernel"), ("--tiny", "libtiny_cuda_nn.so", "libtiny_cuda_nn.so")],
    "decode": [("--llama-bench", "llama.cpp/llama-bench", "llama.cpp/llama-bench")],
    "families": [("--llama-bench", "llama.cpp/llama-bench", "llama.cpp/llama-bench")],
    "serve": [("--llama-server", "llama.cpp/llama-server", "llama.cpp/llama-server")],
}


def command(suite, native, origins, liger, more, wheels=None):
    """The command line that measures `suite` with the peers found."""
    line = [sys.executable, str(PEERS / f"gpu_{suite}.py")]
    if suite != "host_cost":
        line += ["--native", native]
    if liger and suite in ("rmsnorm", "rope", "gate", "swiglu", "cross_entropy", "models"):
        line += ["--liger", liger]
    if wheels and suite in ("rmsnorm", "cross_entropy", "attention"):
        line += ["--wheels", wheels]
    for option, must_be, passed in ORIGINS.get(suite, []):
        if (origins / must_be).is_file():
            line += [option, str(origins / passed)]
    return line + more


def wait(process, until):
    """The status of a process at its end; None where the time ended first."""
    try:
        return process.wait(None if until is None else max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def warm(line, processes, until=None):
    started = [subprocess.Popen(line, env={**os.environ, "INGOT_BENCH_SHARE": f"{i}/{processes}"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
               for i in range(processes)]
    try:
        for process in started:
            wait(process, until)
    finally:
        for process in started:
            suite_report.end_group(process)


def measure(suite, line, processes, seconds=None):
    """The status of the suite's program; None where the program was stopped after `seconds`."""
    until, started = None if seconds is None else time.monotonic() + seconds, time.monotonic()
    if until is not None:
        os.environ[suite_report.UNTIL] = str(until)
    if processes > 0 and suite in WARMED:
        warm(line, min(processes, MOST_WARM.get(suite, processes)), until)
        print(f"{suite}: {time.monotonic() - started:.0f} s to compile", flush=True)
    process = subprocess.Popen(line, start_new_session=True)  # a group of its own, so that a stop also reaches its children
    try:
        return wait(process, until)
    finally:
        suite_report.end_group(process)


def gpu_name():
    try:
        return subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "-i", "0"], capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def within(seconds, suites, run, now=time.monotonic):
    """Calls run(suite, seconds left) for each of the suites until the time ends; returns {suite: "passed over", "stopped" or its status}."""
    begun, outcome = now(), {}
    for suite in suites:
        left = None if seconds is None else seconds - (now() - begun)
        if left is not None and left <= 0:
            outcome[suite] = "passed over"
            continue
        status = run(suite, left)
        outcome[suite] = "stopped" if status is None else status
    return outcome


def lacking(suites, results=None):
    """Lines of the cases that the unfinished reports of suites lack, on the GPU at hand."""
    for suite in suites:
        if unfinished := reports.read(reports.paths_of(suite, (results or reports.RESULTS) / reports.folder_of(gpu_name()))[1]):
            yield f"{suite}: {unfinished['incomplete']} (--continue measures them): {'; '.join(unfinished['missing'])}"


def planned(suites, results=reports.RESULTS):
    """Lines of the seconds that each suite and case took, on each GPU with a report, and of the cases that unfinished reports lack."""
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        for suite in suites:
            whole, unfinished = (reports.read(path) for path in reports.paths_of(suite, folder))
            if not (whole or unfinished):
                continue
            now, seconds = reports.tree_hash(suite), whole.get("case_seconds", {}) | unfinished.get("case_seconds", {})
            state = "no whole report" if not whole else "incomplete" if "incomplete" in whole else "fresh" if reports.holds(whole, now) else "stale"
            took = f"{sum(seconds.values()):.0f} s in {len(seconds)} cases" if seconds else f"{whole['seconds']:.0f} s" if "seconds" in whole else "time unknown"
            yield f"{folder.name}, {suite}: {state}; {took}"
            if unfinished:
                missing = unfinished["missing"]
                of_these = "these sources" if reports.can_be_continued(unfinished, suite, now) else "other sources or programs, so it cannot be continued"
                yield (f"  unfinished, of {of_these}: {unfinished['incomplete']}"
                       + (f", which took {sum(seconds[name] for name in missing):.0f} s" if all(name in seconds for name in missing) else "") + f": {'; '.join(missing)}")
            yield from (f"  {s:7.1f} s  {name}" for name, s in sorted(seconds.items(), key=lambda entry: -entry[1]))


def check_llama(suites, origins):
    """Ends the process with one line if llama.cpp's programs are there and the package that writes their files is not."""
    for suite in suites:
        for option, must_be, _ in ORIGINS.get(suite, []):
            if option.startswith("--llama") and (origins / must_be).is_file():
                sys.path.insert(0, str(PEERS))
                import synthetic_gguf
                synthetic_gguf.check_llama(f"bench: {suite}: {option}", origins / must_be)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE")
    parser.add_argument("--native", default="build/cuda/libingot_bench.so")
    parser.add_argument("--origins", type=pathlib.Path, default=pathlib.Path(".origins"))
    parser.add_argument("--liger", help="a wheel of Liger-Kernel, where it is not installed")
    parser.add_argument("--wheels", metavar="FOLDER", help="wheels of QuACK and flash-attention, and of the packages that they need, where they are not installed")
    parser.add_argument("--warm", type=int, default=0, metavar="N", help="processes that compile first, side by side (default: none)")
    parser.add_argument("--continue", dest="again", action="store_true", help="measure only what reports of these sources lack")
    parser.add_argument("--stale", action="store_true", help="only suites whose report is missing, incomplete or of other sources, the oldest first")
    parser.add_argument("--seconds", type=float, metavar="N", help="end after N seconds")
    parser.add_argument("--plan", action="store_true", help="print the seconds of the suites' cases and what unfinished reports lack, and measure nothing")
    options, more = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `timeout` also ends a suite's processes, which would disturb later measurements
    options.again = options.again or options.stale
    if options.again:
        os.environ[suite_report.CONTINUE] = "1"
    os.environ.setdefault("INGOT_COMMAND", " ".join(["python3 bench/gpu.py", *options.suites, *(["--stale"] if options.stale else ["--continue"] if options.again else [])]))  # the paths in the reports
    for suite in options.suites:
        if suite not in SUITES:
            parser.error(f"suite: found {suite}, expected of {', '.join(SUITES)}")
    suites = options.suites or SUITES
    if options.plan:
        print("\n".join(planned(suites)))
        return
    if not pathlib.Path(options.native).is_file() and any(suite != "host_cost" for suite in suites):
        sys.exit(f"bench: --native: found no {options.native}, expected the library of a build with CUDA kernels (cmake --build --preset cuda --target ingot_bench)")
    if options.stale:
        gpu = gpu_name()
        if not gpu:
            sys.exit("bench: --stale: found no GPU (nvidia-smi names none)")
        old = reports.outdated(suites, gpu)
        print("to measure: " + (", ".join(f"{suite} ({report['date'] if report else 'no report'})" for suite, report in old) or "nothing"), flush=True)
        suites = [suite for suite, _ in old]
    check_llama(suites, options.origins)
    try:
        outcome = within(options.seconds, suites, lambda suite, left: measure(
            suite, command(suite, options.native, options.origins, options.liger, more, options.wheels), options.warm, left))
    except SystemExit:  # by SIGTERM
        for line in lacking(suites):
            print(line, flush=True)
        raise
    for word in ("passed over", "stopped"):
        if found := [suite for suite, state in outcome.items() if state == word]:
            print(f"{word} for lack of time: {', '.join(found)}")
    for line in lacking(suite for suite, state in outcome.items() if state not in (0, "passed over")):
        print(line)
    if failed := [suite for suite, state in outcome.items() if isinstance(state, int) and state != 0]:
        sys.exit(f"bench: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
