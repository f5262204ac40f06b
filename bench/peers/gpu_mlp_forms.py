"""The backward variants of MLPs beside each other, by shape: microseconds of each in a CUDA graph, and the fastest. The basis of the choice in mlp.cu.

    python3 bench/peers/gpu_mlp_forms.py --native build/cuda/libingot_bench.so [--seconds N] [--json FILE]

--check adds each variant's worst relative error against fp64, as a share of 1.5 times the error of the plain chain in the same type.
"""
import argparse
import ctypes
import json
import time

import torch
import torch.nn.functional as F

from gpu_common import DTYPES, Native, captured, interleaved, pointer, relative_error, stream

FORMS = {"portable": 0, "to_128_few_rows": 1, "to_128": 2, "to_256": 3, "to_512": 4, "to_512_few_rows": 5}  # MlpForm
ACTIVATIONS = {"softplus": F.softplus, "relu": F.relu, "tanh": torch.tanh, "silu": F.silu, "gelu": F.gelu}
ROWS = (1, 64, 300, 512, 1024, 2048, 3072, 4096)
CALLS = 20


def cases():
    """(rows, widths, dtype, activation, the stored values of the forward pass)."""
    for width in (512, 384, 264, 256, 192, 136):
        for act in ("softplus", "gelu"):
            yield from ((rows, [width] * 4, "bf16", act, "own") for rows in ROWS)
    for depth in (1, 2, 5, 8):
        for width in (512, 256, 136):
            yield from ((rows, [width] * (depth + 1), "f16", "relu", "own") for rows in ROWS)
    for widths in ([64, 512, 64], [512, 64, 512], [32, 256, 256, 8], [512, 512, 512, 16], [128, 512]):
        yield from ((rows, widths, "f16", "silu", "own") for rows in ROWS)
    for kept in ("f32", "none"):
        for width in (512, 256):
            for act in ("softplus", "gelu"):
                yield from ((rows, [width] * 4, "bf16", act, kept) for rows in ROWS)


class Problem:
    def __init__(self, rows, widths, dtype, act, kept):
        self.rows, self.depth, self.dtype, self.act = rows, len(widths) - 1, dtype, act
        kind = DTYPES[dtype]
        new = lambda *s: torch.randn(*s, device="cuda", dtype=kind)  # noqa: E731
        self.ws = [new(n, k) * k**-0.5 * 1.5 for k, n in zip(widths, widths[1:])]
        self.x, self.dy, self.dx, self.y = new(rows, widths[0]), new(rows, widths[-1]), new(rows, widths[0]), new(rows, widths[-1])
        self.dws = [torch.zeros(w.shape, device="cuda") for w in self.ws]
        self.saved = torch.empty(max(1, rows * sum(widths[1:-1])), device="cuda", dtype=torch.float32 if kept == "f32" else kind)
        self.kept = {"own": dtype, "f32": "f32", "none": "none"}[kept].encode()
        self.widths = (ctypes.c_int64 * len(widths))(*widths)
        self.workspace = torch.empty(256 << 20, device="cuda", dtype=torch.uint8)
        self.w, self.dw = ((ctypes.c_void_p * self.depth)(*[t.data_ptr() for t in ts]) for ts in (self.ws, self.dws))

    def forward(self, native):
        native.mlp(self.dtype.encode(), self.rows, self.depth, self.widths, self.act.encode(), self.w, None, pointer(self.x), pointer(self.y),
                   pointer(self.saved), self.kept, pointer(self.workspace), self.workspace.numel(), stream())

    def backward(self, native, form):
        return lambda _: native.mlp_backward_with(form, self.dtype.encode(), self.rows, self.depth, self.widths, self.act.encode(), self.w,
                                                  pointer(self.x), pointer(self.dy), pointer(self.dx), self.dw, pointer(self.saved), self.kept,
                                                  pointer(self.workspace), self.workspace.numel(), stream())

    def gradients(self, kind):
        leaves = [t.to(kind).requires_grad_() for t in (self.x, *self.ws)]
        h = leaves[0]
        for i, w in enumerate(leaves[1:]):
            h = h @ w.t()
            h = ACTIVATIONS[self.act](h) if i + 1 < self.depth else h
        return torch.autograd.grad(h, leaves, self.dy.to(kind))


def measure(native, case, check):
    problem = Problem(*case)
    problem.forward(native)
    graphs, errors = {}, {}
    want, chain = (problem.gradients(torch.float64), problem.gradients(DTYPES[case[2]])) if check else (None, None)
    for name, form in FORMS.items():
        call = problem.backward(native, form)
        for t in problem.dws:
            t.zero_()
        problem.dx.fill_(float("nan"))
        try:
            call(0)
        except RuntimeError as e:
            if "does not take" in str(e):
                continue
            raise
        if check:
            errors[name] = max(relative_error([g], [w]) / (1.5 * relative_error([c], [w])) for g, w, c in zip((problem.dx, *problem.dws), want, chain))
        graphs[name] = captured(call, CALLS)
    us, _ = interleaved({name: g[0] for name, g in graphs.items()}, CALLS, rounds=5, least_ms=0.4)
    return {"rows": case[0], "widths": case[1], "dtype": case[2], "act": case[3], "kept": case[4], "us": us, "errors": errors}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--native", required=True)
    parser.add_argument("--seconds", type=float, default=120, help="no case begins later")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", help="write all of it here")
    options = parser.parse_args()
    start, found = time.monotonic(), []
    torch.manual_seed(0)
    native = Native(options.native)
    for case in cases():
        if time.monotonic() - start > options.seconds:
            break
        r = measure(native, case, options.check)
        found.append(r)
        print(f"{r['rows']:5} {'x'.join(map(str, r['widths'])):24} {r['dtype']} {r['act']} {r['kept']}: "
              + "  ".join(f"{n} {us:.1f}" + (f" (error {r['errors'][n]:.2f})" if r["errors"] else "") for n, us in sorted(r["us"].items(), key=lambda p: p[1])), flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as out:
            json.dump(found, out)


if __name__ == "__main__":
    main()
