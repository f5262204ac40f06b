#!/usr/bin/env python3
"""Runs every GPU benchmark: Ingot beside its peers, in turn, with a report bench/results/<gpu>/<suite>.json for each suite.

    python3 bench/gpu.py --native build/cuda/libingot_bench.so [SUITE...] [--origins FOLDER] [--liger WHEEL] [--warm N] [--continue]

SUITE: rmsnorm, rope, gate, mlp, linear, swiglu, wide_mlp, cross_entropy, muon, attention, decode, decode_gpus, prompt, serve, train, train_gpus, train_memory, generate, ttt, sampling, host_cost, host_token; all by default (host_cost and host_token import ingot). FOLDER has the peers that cannot be installed:
MGRrmsnorm/src/rmsnorm_kernel.cu, MGRrmsnorm/megagemm/swiglu.py, mlp-megakernel/fused_mlp.py and libtiny_cuda_nn.so (peers/tiny_cuda_nn.cu).
A missing peer is listed in the report as absent; PyTorch eager and torch.compile always run. All other options
go to the suites' programs (peers/gpu_<suite>.py --help). torch.compile's peers take most of the time of linear, swiglu, wide_mlp,
cross_entropy, muon, attention, train and ttt: with --warm N, N processes compile a share each first, and the measuring process finds the kernels in PyTorch's cache.
A report is written after each case. --continue completes an interrupted report of the same sources and GPU: only the missing last cases are measured, and the report keeps
the ceilings of each run (not of mlp, decode, decode_gpus, prompt, serve, train, ttt, host_cost and host_token).
"""
import argparse
import os
import pathlib
import subprocess
import sys

SUITES = ("rmsnorm", "rope", "gate", "mlp", "linear", "swiglu", "wide_mlp", "cross_entropy", "muon", "attention", "decode", "decode_gpus", "prompt", "serve", "train", "train_gpus", "train_memory", "generate", "ttt", "sampling",
          "host_cost", "host_token")
WARMED = ("linear", "swiglu", "wide_mlp", "cross_entropy", "muon", "attention", "train", "ttt")
PEERS = pathlib.Path(__file__).resolve().parent / "peers"
# suite: (option, the file in FOLDER that must exist, the path that is passed)
ORIGINS = {
    "rmsnorm": [("--origin", "MGRrmsnorm/src/rmsnorm_kernel.cu", "MGRrmsnorm/src")],
    "gate": [("--origin", "MGRrmsnorm/megagemm/swiglu.py", "MGRrmsnorm/megagemm")],
    "mlp": [("--origin", "mlp-megakernel/fused_mlp.py", "mlp-megakernel"), ("--tiny", "libtiny_cuda_nn.so", "libtiny_cuda_nn.so")],
}


def command(suite, native, origins, liger, more):
    """The command line that measures `suite` with the peers found."""
    line = [sys.executable, str(PEERS / f"gpu_{suite}.py")]
    if suite != "host_cost":
        line += ["--native", native]
    if liger and suite in ("rmsnorm", "rope", "gate", "swiglu", "cross_entropy"):
        line += ["--liger", liger]
    for option, must_be, passed in ORIGINS.get(suite, []):
        if (origins / must_be).is_file():
            line += [option, str(origins / passed)]
    return line + more


def warm(line, processes):
    started = [subprocess.Popen(line, env={**os.environ, "INGOT_BENCH_SHARE": f"{i}/{processes}"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
               for i in range(processes)]
    for process in started:
        process.wait()


def measure(suite, line, processes):
    if processes > 0 and suite in WARMED:
        warm(line, processes)
    return subprocess.run(line).returncode


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE")
    parser.add_argument("--native", default="build/cuda/libingot_bench.so")
    parser.add_argument("--origins", type=pathlib.Path, default=pathlib.Path(".origins"))
    parser.add_argument("--liger", help="a wheel of Liger-Kernel, where it is not installed")
    parser.add_argument("--warm", type=int, default=0, metavar="N", help="processes that compile first, side by side (default: none)")
    parser.add_argument("--continue", dest="again", action="store_true", help="measure only what reports of these sources lack")
    options, more = parser.parse_known_args()
    if options.again:
        os.environ["INGOT_BENCH_CONTINUE"] = "1"
    os.environ.setdefault("INGOT_COMMAND", " ".join(["python3 bench/gpu.py", *options.suites, *(["--continue"] if options.again else [])]))  # the paths in the reports
    for suite in options.suites:
        if suite not in SUITES:
            parser.error(f"suite: found {suite}, expected of {', '.join(SUITES)}")
    failed = [suite for suite in options.suites or SUITES
              if measure(suite, command(suite, options.native, options.origins, options.liger, more), options.warm) != 0]
    if failed:
        sys.exit(f"bench: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
