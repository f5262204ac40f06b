"""The gate of a gated MLP and the pointwise activations on a GPU: Ingot's shipped entry points beside PyTorch eager, torch.compile and
Liger-Kernel and the original project's gate (both Triton), forward and backward. Writes bench/results/<gpu>/gate.json.

    python3 bench/peers/gpu_gate.py --native build/cuda/libingot_bench.so [--liger WHEEL] [--origin MGRrmsnorm/megagemm] [--sweep FILE]
        [--only TEXT] [--quick]

Backward passes are timed alone. Liger's kernel writes its gradients over gate and up, which therefore change from replay to replay.
"""
import ctypes
import dataclasses
import importlib.util
import pathlib

import torch
import torch.nn.functional as F

from gpu_common import DTYPES, backward_of, captured, compared, pointer, relative_error, rotation, run_suite, stream, sweep

LAYOUTS = ["two tensors", "packed", "packed, up first", "interleaved"]
PLAIN, GPT_OSS = (0.0, 1.0, 0.0), (7.0, 1.702, 1.0)  # limit, alpha, offset of up
ACTIVATIONS = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "softplus": F.softplus,
    "relu_squared": lambda x: F.relu(x).square(), "leaky_relu_squared": lambda x: F.leaky_relu(x, 0.5).square(), "tanh": torch.tanh,
}


@dataclasses.dataclass
class Case:
    rows: int
    cols: int
    dtype: str = "bf16"
    layout: int = 0
    options: tuple = PLAIN
    backward: bool = False
    act: str = ""  # a pointwise activation instead of the gate

    @property
    def name(self):
        parts = [self.act or "SwiGLU gate" + ("" if self.options == PLAIN else " (GPT-OSS)"), *["backward"] * self.backward]
        return ", ".join(parts + [LAYOUTS[self.layout]] * (self.layout > 0))

    @property
    def shape(self):
        return [self.rows, self.cols]

    @property
    def bytes(self):
        tensors = (3 if self.backward else 2) if self.act else (5 if self.backward else 3)
        return tensors * self.rows * self.cols * DTYPES[self.dtype].itemsize


def cases():
    out = [Case(8192, 11008), Case(8192, 11008, backward=True), Case(8192, 11008, layout=1),
           Case(8192, 11008, layout=3, options=GPT_OSS), Case(8192, 11008, layout=3, options=GPT_OSS, backward=True),
           Case(1024, 4096), Case(16384, 8192, act="silu"), Case(16384, 8192, act="gelu", backward=True),
           Case(8192, 11008, layout=1, backward=True)]
    return out


class Buffers:
    """Enough inputs that a replay never finds an input in L2, and separate outputs for each call."""

    def __init__(self, case, l2_bytes):
        self.case = case
        self.sets, self.calls, self.cached = rotation(case.bytes, l2_bytes)
        dtype = DTYPES[case.dtype]
        two = not case.act and case.layout == 0
        width = case.cols * (2 if case.layout else 1)
        new = lambda w: torch.randn(case.rows, w, device="cuda", dtype=dtype) * 2  # noqa: E731
        self.inputs = [(new(width), new(width)) if two else (new(width),) for _ in range(self.sets)]
        self.upstream = [new(case.cols) for _ in range(self.sets)] if case.backward else None
        empty = lambda w: torch.full((case.rows, w), float("nan"), device="cuda", dtype=dtype)  # noqa: E731
        self.out = [(empty(width), empty(width)) if case.backward and two else (empty(width if case.backward else case.cols),)
                    for _ in range(self.calls)]

    def ours(self, native, config=None):
        case, name = self.case, self.case.dtype.encode()

        def call(i):
            given, out = self.inputs[i % self.sets], self.out[i]
            upstream = self.upstream[i % self.sets] if case.backward else None
            if case.act:
                return native.activate(name, case.act.encode(), pointer(given[0]), pointer(None if case.backward else out[0]), pointer(upstream),
                                       pointer(out[0] if case.backward else None), case.rows, case.cols, stream())
            second = lambda t: pointer(t[1] if len(t) > 1 else None)  # noqa: E731
            gradients = (pointer(out[0]), second(out)) if case.backward else (pointer(None), pointer(None))
            native.gate(name, pointer(given[0]), second(given), pointer(None if case.backward else out[0]), pointer(upstream), *gradients,
                        case.rows, case.cols, case.layout, *[ctypes.c_double(o) for o in case.options], config, stream())
        return call

    def forward(self):
        case = self.case
        limit, alpha, offset = case.options

        def gate(*given):
            if case.layout == 0:
                g, u = given
            elif case.layout == 3:
                g, u = given[0][:, ::2], given[0][:, 1::2]
            else:
                g, u = given[0].chunk(2, -1)[::1 if case.layout == 1 else -1]
            if limit:
                g, u = g.clamp(max=limit), u.clamp(-limit, limit)
            if (alpha, offset) == (1.0, 0.0):
                return F.silu(g) * u
            return g * torch.sigmoid(alpha * g) * (u + offset)
        return ACTIVATIONS[case.act] if case.act else gate

    def peer(self, function):
        if self.case.backward:
            leaves = [tuple(t.detach().requires_grad_() for t in given) for given in self.inputs]
            return backward_of(function, leaves, self.upstream, self.calls)
        with torch.no_grad():
            return captured(lambda i: function(*self.inputs[i % self.sets]), self.calls)

    def liger(self, ops):
        if self.case.backward:
            given = [tuple(t.clone() for t in pair) for pair in self.inputs]
            return captured(lambda i: ops.swiglu_backward(*given[i % self.sets], self.upstream[i % self.sets]), self.calls)
        return captured(lambda i: ops.swiglu_forward(*self.inputs[i % self.sets])[2], self.calls)


def check(buffers, native):
    """The relative error of a fresh call, and its tolerance: 1.5 times the error of the plain chain in the same dtype."""
    case = buffers.case
    for t in buffers.inputs[0]:
        t.normal_(std=2)
    for t in buffers.out[0]:
        t.fill_(float("nan"))
    buffers.ours(native)(0)
    torch.cuda.synchronize()

    def results(dtype, rows):
        leaves = [t[rows].to(dtype).requires_grad_() for t in buffers.inputs[0]]
        y = buffers.forward()(*leaves)
        return torch.autograd.grad(y, leaves, buffers.upstream[0][rows].to(dtype)) if case.backward else (y.detach(),)
    worst = (0.0, 1.0)
    for rows in (slice(0, 1024), slice(case.rows - 1024, case.rows)):  # all data in fp64 would not fit beside the buffers
        got, want, chain = [t[rows] for t in buffers.out[0]], results(torch.float64, rows), results(DTYPES[case.dtype], rows)
        for g, w, c in zip(got, want, chain):
            worst = max(worst, (relative_error([g], [w]), 1.5 * relative_error([c], [w])), key=lambda r: r[0] / r[1])
    return worst


def import_origin(folder, _):
    """MGRrmsnorm's gate, which takes packed tensors."""
    spec = importlib.util.spec_from_file_location("megagemm_swiglu", pathlib.Path(folder) / "swiglu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MegaGemmFunction


def measure(case, native, l2_bytes, copy_tbps, liger, origin):
    buffers = Buffers(case, l2_bytes)
    others = {}
    if not case.act and case.options == PLAIN and case.layout == 0:
        others = {"liger": (liger, lambda: buffers.liger(liger))}
    if not case.act and case.options == PLAIN and case.layout == 1:
        others = {"origin": (origin, lambda: buffers.peer(lambda packed: origin.apply(packed, case.cols)))}
    return compared(case, buffers, buffers.forward(), buffers.ours(native), check(buffers, native), copy_tbps, others)


def sweep_case(case, native, l2_bytes):
    buffers = Buffers(case, l2_bytes)
    error, tolerance = check(buffers, native)
    configs = [[1, units, threads, 1, 1, early] for units in (1, 2, 4) for threads in (128, 256, 512) for early in (0, 1)] if not case.act else []
    return sweep(buffers, native, configs), error, tolerance


if __name__ == "__main__":
    run_suite("gate", cases(), cases()[:6], measure, sweep_case, "liger's backward works in place; in_L2: too small to rotate beyond L2",
              origin=("MGRrmsnorm's folder megagemm", import_origin))
