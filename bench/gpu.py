#!/usr/bin/env python3
"""Runs every GPU benchmark: Ingot beside its peers, in turn, with a report bench/results/<gpu>/<suite>.json for each suite.

    python3 bench/gpu.py --native build/cuda/libingot_bench.so [SUITE...] [--origins FOLDER] [--liger WHEEL] [--wheels FOLDER] [--warm N] [--continue] [--stale] [--minutes N]

SUITE: rmsnorm, rope, gate, mlp, linear, experts, swiglu, wide_mlp, cross_entropy, muon, attention, decode, families, decode_gpus, draft, prompt, serve, train, train_gpus, train_memory, generate, ttt, sampling, host_cost, host_token, models, portable; all by default (host_cost, host_token and models import ingot, models also transformers). FOLDER has the peers that cannot be installed:
MGRrmsnorm/src/rmsnorm_kernel.cu, MGRrmsnorm/megagemm/swiglu.py, mlp-megakernel/fused_mlp.py, libtiny_cuda_nn.so (peers/tiny_cuda_nn.cu), and llama.cpp's programs
llama.cpp/llama-bench and llama.cpp/llama-server.
A missing peer is listed in the report as absent; PyTorch eager and torch.compile always run. All other options
go to the suites' programs (peers/gpu_<suite>.py --help). torch.compile's peers take most of the time of mlp, linear, swiglu, wide_mlp,
cross_entropy, muon, attention, train, ttt and portable: with --warm N, N processes compile a share each first, and the measuring process finds the kernels in PyTorch's cache.
A report is written after each case. --continue completes an interrupted report of the same sources and GPU: only the missing last cases are measured, and the report keeps
the ceilings of each run (not of decode, families, decode_gpus, prompt, train, ttt, host_cost and host_token).
--stale measures, of the suites named or all, those without a complete report of these sources on this GPU: first those without any report, then the oldest. --minutes N
ends after N minutes: a suite that took longer last time than the time that is left is passed over, unless its report can be continued, and a suite that runs when
the time ends is stopped. The same command called again continues with the remaining suites.
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

SUITES = ("rmsnorm", "rope", "gate", "mlp", "linear", "experts", "swiglu", "wide_mlp", "cross_entropy", "muon", "attention", "decode", "families", "decode_gpus", "draft", "prompt", "serve", "train", "train_gpus", "train_memory", "generate", "ttt", "sampling",
          "host_cost", "host_token", "models", "portable")
WARMED = ("mlp", "linear", "swiglu", "wide_mlp", "cross_entropy", "muon", "attention", "train", "ttt", "portable")
NOT_CONTINUED = ("decode", "families", "decode_gpus", "prompt", "train", "ttt", "host_cost", "host_token")  # measured as a whole
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


def warm(line, processes):
    started = [subprocess.Popen(line, env={**os.environ, "INGOT_BENCH_SHARE": f"{i}/{processes}"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
               for i in range(processes)]
    for process in started:
        process.wait()


def measure(suite, line, processes, seconds=None):
    """The status of the suite's program; None where the program was stopped after `seconds`."""
    until = None if seconds is None else time.monotonic() + seconds
    if processes > 0 and suite in WARMED:
        warm(line, processes)
    process = subprocess.Popen(line, start_new_session=True)  # a group of its own, so that a stop also reaches its children
    try:
        return process.wait(None if until is None else max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def gpu_name():
    try:
        return subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "-i", "0"], capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def within(seconds, suites, run, now=time.monotonic):
    """Calls run(suite, seconds left) for each of [(suite, its last report or None)] that fits; returns {suite: "passed over", "stopped" or its status}."""
    begun, outcome = now(), {}
    for suite, report in suites:
        left = None if seconds is None else seconds - (now() - begun)
        # An incomplete report tells how long its cases took, not how long all take.
        known = report.get("seconds", 0) if report and "incomplete" not in report else 0
        if left is not None and (left <= 0 or (known > left and suite in NOT_CONTINUED)):
            outcome[suite] = "passed over"
            continue
        status = run(suite, left)
        outcome[suite] = "stopped" if status is None else status
    return outcome


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
    parser.add_argument("--minutes", type=float, metavar="N", help="end after N minutes")
    options, more = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `timeout` also ends a suite's processes, which would disturb later measurements
    options.again = options.again or options.stale
    if options.again:
        os.environ["INGOT_BENCH_CONTINUE"] = "1"
    os.environ.setdefault("INGOT_COMMAND", " ".join(["python3 bench/gpu.py", *options.suites, *(["--stale"] if options.stale else ["--continue"] if options.again else [])]))  # the paths in the reports
    for suite in options.suites:
        if suite not in SUITES:
            parser.error(f"suite: found {suite}, expected of {', '.join(SUITES)}")
    suites = [(suite, None) for suite in options.suites or SUITES]
    if not pathlib.Path(options.native).is_file() and any(suite != "host_cost" for suite, _ in suites):
        sys.exit(f"bench: --native: found no {options.native}, expected the library of a build with CUDA kernels (cmake --build --preset cuda --target ingot_bench)")
    if options.stale:
        gpu = gpu_name()
        if not gpu:
            sys.exit("bench: --stale: found no GPU (nvidia-smi names none)")
        suites = reports.outdated([suite for suite, _ in suites], gpu)
        print("to measure: " + (", ".join(f"{suite} ({report['date'] if report else 'no report'})" for suite, report in suites) or "nothing"), flush=True)
    outcome = within(None if options.minutes is None else 60 * options.minutes, suites, lambda suite, left: measure(
        suite, command(suite, options.native, options.origins, options.liger, more, options.wheels), options.warm, left))
    for word in ("passed over", "stopped"):
        if found := [suite for suite, state in outcome.items() if state == word]:
            print(f"{word} for lack of time: {', '.join(found)}")
    if failed := [suite for suite, state in outcome.items() if isinstance(state, int) and state != 0]:
        sys.exit(f"bench: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
