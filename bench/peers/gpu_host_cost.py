#!/usr/bin/env python3
"""The cost of one call on the host, launch included: Ingot's modules beside PyTorch's, eager and compiled, on inputs so small that the GPU
waits. Writes bench/results/<gpu>/host_cost.json; times are microseconds of host time, and limit_us is Ingot's own budget.

    PYTHONPATH=build/cuda/python python3 bench/peers/gpu_host_cost.py
"""
import argparse
import time

import torch
from torch import nn

import gpu_common
import ingot

NO_GRAD_US, GRAD_US = 8.0, 15.0  # the whole budget of a call


def host_us(calls, repeats=40, each=300):
    """Median host microseconds of every function, measured in turn; the GPU is idle when a round starts."""
    seen = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(50):
            call()
    for _ in range(repeats):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(each):
                call()
            seen[name].append((time.perf_counter() - start) / each * 1e6)
    torch.cuda.synchronize()
    return {name: gpu_common.median(values) for name, values in seen.items()}


def ceilings():
    """The ceilings of PyTorch's own copies, sums and products, for the record; they are no bounds of the host's cost."""
    source = torch.empty(1 << 28, device="cuda").normal_()
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    us, _ = gpu_common.interleaved({"copy": lambda: target.copy_(source), "read": lambda: source.sum(), "matmul": lambda: a @ b}, 1,
                                   rounds=7, least_ms=5)
    bytes_ = source.numel() * 4
    return {"copy_TBps": 2 * bytes_ / us["copy"] * 1e-6, "read_TBps": bytes_ / us["read"] * 1e-6, "bf16_TFLOPs": 2 * 8192**3 / us["matmul"] * 1e-6}


def norm():
    theirs = nn.RMSNorm(256, eps=1e-5, device="cuda", dtype=torch.bfloat16)
    return ingot.nn.RMSNorm(256, eps=1e-5, device="cuda", dtype=torch.bfloat16), theirs, torch.randn(8, 256, device="cuda", dtype=torch.bfloat16)


def mlp(layers):
    linears = [m for _ in range(layers) for m in (nn.Linear(128, 128, bias=False), nn.Softplus())][:-1]
    theirs = nn.Sequential(*linears).cuda().half()
    return ingot.nn.FusedMLP.from_sequential(theirs), theirs, torch.randn(64, 128, device="cuda", dtype=torch.float16)


# (name, shape, dtype, function that makes Ingot's module, the peer and the input)
CASES = [("RMSNorm", [8, 256], "bf16", norm), *((f"MLP of {layers} layers", [64, 128, layers], "f16", lambda layers=layers: mlp(layers)) for layers in (3, 5))]


def measure(case, _):
    """The rows of a case: without and with recording for a backward pass."""
    name, shape, dtype, made = case
    ours, theirs, x = made()
    torch._dynamo.reset()
    compiled = torch.compile(theirs, fullgraph=True)  # the choice of kernels does not affect the host
    with torch.no_grad():
        oracle = theirs.double()(x.double())
        theirs.to(x.dtype)
        error = ((ours(x).double() - oracle).abs().max() / oracle.abs().max()).item()
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            us = host_us({"ours": lambda: ours(x), "torch_eager": lambda: theirs(x), "torch_compile": lambda: compiled(x)})
        yield {"name": name + (", recording for backward" if grad else ""), "shape": shape, "dtype": dtype, "ours_us": us.pop("ours"), "peers": us,
               "limit_us": GRAD_US if grad else NO_GRAD_US, "error": error, "tolerance": 12 * 2.0 ** (-8 if dtype == "bf16" else -11)}


def said(r):
    return f"{r['name']}: ours {r['ours_us']:.2f} us (limit {r['limit_us']}), " + ", ".join(f"{k} {v:.2f}" for k, v in r["peers"].items())


def parts_of_a_call():
    """The parts of Ingot's call, to locate the time."""
    x, w = torch.randn(8, 256, device="cuda", dtype=torch.bfloat16), torch.ones(256, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    with torch.no_grad():
        parts = host_us({
            "nothing": lambda: None,
            "empty_like": lambda: torch.empty_like(x),
            "kernel call": lambda: ingot._C.rms_norm(x, w, None, None, y, None, 1e-5, False),
            "function": lambda: ingot.functional.rms_norm(x, w, 1e-5),
            "operator": lambda: torch.ops.ingot.rms_norm(x, w, 1e-5, False),
        })
    print("parts: " + ", ".join(f"{k} {v:.2f}" for k, v in parts.items()), flush=True)
    return parts


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-report", action="store_true", help="print only")
    options = parser.parse_args()
    options.only, options.quick, options.of_quick = None, options.no_report, None
    report = gpu_common.begin("host_cost", options, CASES, lambda case: case[0])
    if report.fitting():
        parts = parts_of_a_call()
        gpu_common.measure_each(report, ceilings, measure, said, parts_us=parts)
    else:
        gpu_common.print_end(report)


if __name__ == "__main__":
    main()
