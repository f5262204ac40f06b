"""Whole MLPs on a GPU: Ingot's shipped entry points beside PyTorch eager, torch.compile and, if given, the original project
(mlp-megakernel, Triton) and tiny-cuda-nn's fully fused MLP. Writes bench/results/<gpu>/mlp.json.

    python3 bench/peers/gpu_mlp.py --native build/cuda/libingot_bench.so [--origin mlp-megakernel] [--tiny libtiny_cuda_nn.so]
        [--only TEXT] [--no-compile]

tiny_cuda_nn.cu beside this file describes the library.

Forward is inference: nothing is stored. A training step is the forward pass with stored values, then the backward pass with
dx and every dW, both in one graph. The limit of a pass is the larger of its products at the measured matrix rate and its traffic
at the measured copy bandwidth, each input read once and each output written once.
"""
import argparse
import ctypes
import dataclasses
import pathlib
import sys

import torch
import torch.nn.functional as F
from torch._inductor import select_algorithm

from gpu_common import DTYPES, Native, begin, captured, ceilings, interleaved, measure_each, pointer, stream


@dataclasses.dataclass
class Case:
    rows: int
    depth: int
    training: bool = False
    weight_norm: bool = False
    dtype: str = "f16"
    width: int = 128
    act: str = "softplus"
    store: str = "values"  # stored in a training step: "values" (16 bit), "f32" like the original project, or "nothing" (recompute)

    @property
    def name(self):
        parts = [f"MLP, {self.depth} layers", "forward + backward" if self.training else "forward"]
        parts += ["weight norm"] * self.weight_norm + [f"stores {self.store}"] * (self.training and self.store != "values")
        return ", ".join(parts + [self.act] * (self.act != "softplus"))

    @property
    def stored_bytes(self):
        size = {"values": DTYPES[self.dtype].itemsize, "f32": 4, "nothing": 0}[self.store]
        return self.rows * self.width * (self.depth - 1) * size if self.training else 0

    @property
    def matrix(self):
        return self.rows * self.width * DTYPES[self.dtype].itemsize

    def limit_us(self, ceiling):
        layer = 2 * self.rows * self.width**2 / ceiling["bf16_TFLOPs"] * 1e-6
        copy = ceiling["copy_TBps"] * 1e6
        forward = max(self.depth * layer, (2 * self.matrix + self.stored_bytes) / copy)
        if not self.training:
            return forward
        again = self.depth - 1 if self.store == "nothing" else 0
        return forward + max((2 * self.depth + again) * layer, (3 * self.matrix + self.stored_bytes) / copy)


def cases():
    for depth in (3, 5):
        for rows in (1024, 65536, 1048576):
            yield Case(rows, depth)
            yield Case(rows, depth, training=True)
        for rows in (1024, 65536):  # the weight-norm comparison of the original project's benchmark
            yield Case(rows, depth, weight_norm=True)
            yield Case(rows, depth, training=True, weight_norm=True)
    for store in ("f32", "nothing"):
        yield Case(65536, 3, training=True, store=store)
    yield Case(8192, 3)
    yield Case(8192, 3, training=True)
    yield Case(65536, 3, training=True, dtype="bf16")
    yield Case(65536, 3, act="relu")
    yield Case(65536, 3, width=64)
    yield Case(65536, 3, training=True, width=64)
    for width in (256, 512):
        yield Case(65536, 3, width=width)
        yield Case(65536, 3, training=True, width=width)


def effective(w, g):
    if g is None:
        return w
    return g[:, None] * w / (w.square().sum(1, keepdim=True) + 1e-12).sqrt()


def mlp(x, ws, gs, act):
    """The plain chain for PyTorch eager and torch.compile; in fp64 the reference."""
    f = {"softplus": F.softplus, "relu": F.relu}[act]
    for i, w in enumerate(ws):
        x = x @ effective(w, gs[i] if gs else None).t()
        if i + 1 < len(ws):
            x = f(x)
    return x


class Buffers:
    """Inputs larger than L2 and separate outputs for each call; weights are not rotated."""

    def __init__(self, case, l2_bytes):
        self.case, dtype = case, DTYPES[case.dtype]
        wanted = -(-3 * l2_bytes // (case.matrix * 2))
        self.sets = int(min(max(2, wanted), 128))
        self.cached = self.sets < wanted
        self.calls = max(20, self.sets)
        shape = (case.rows, case.width)
        self.x = [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(self.sets)]
        scale = case.width**-0.5 * 1.5  # values before the activation are about N(0, 2)
        self.ws = [torch.randn(case.width, case.width, device="cuda", dtype=dtype) * scale for _ in range(case.depth)]
        self.gs = None
        if case.weight_norm:
            self.gs = [torch.rand(case.width, device="cuda", dtype=dtype) + 1 for _ in range(case.depth)]
        self.y = [torch.full(shape, float("nan"), device="cuda", dtype=dtype) for _ in range(self.calls)]
        if case.training:
            self.dy = [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(self.sets)]
            self.dx = [torch.full(shape, float("nan"), device="cuda", dtype=dtype) for _ in range(self.calls)]
            stored = torch.float32 if case.store == "f32" else dtype
            self.saved = [torch.full((case.stored_bytes // stored.itemsize,), float("nan"), device="cuda", dtype=stored)
                          for _ in range(self.sets if case.store != "nothing" else 0)]
            self.dws = [torch.zeros(case.width, case.width, device="cuda") for _ in range(case.depth)]
            self.dgs = [torch.zeros(case.width, device="cuda") for _ in range(case.depth)] if case.weight_norm else None

    def pointers(self, tensors):
        if not tensors:
            return None
        return (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors])

    def ours(self, native):
        case = self.case
        widths = (ctypes.c_int64 * (case.depth + 1))(*[case.width] * (case.depth + 1))
        w, g = self.pointers(self.ws), self.pointers(self.gs)
        size = (ctypes.c_int64 * 2)()
        stored = b"none" if case.store == "nothing" or not case.training else b"f32" if case.store == "f32" else case.dtype.encode()
        head = (case.dtype.encode(), case.rows, case.depth, widths, case.act.encode(), w, g)
        native.mlp_workspace(case.dtype.encode(), case.rows, case.depth, widths, ctypes.c_int(bool(g)), stored, size)
        self.workspace = torch.full((max(size[0], size[1], 1),), 0xff, device="cuda", dtype=torch.uint8)
        space, spare = pointer(self.workspace), self.workspace.numel()
        dw = self.pointers(self.dws) if case.training else None
        dg = self.pointers(self.dgs) if case.training and self.gs else None

        def call(i):
            k = i % self.sets
            saved = pointer(self.saved[k]) if case.training and self.saved else None
            native.mlp(*head, pointer(self.x[k]), pointer(self.y[i]), saved, stored, space, spare, stream())
            if case.training:
                native.mlp_backward(*head, pointer(self.x[k]), pointer(self.dy[k]), pointer(self.dx[i]), dw, dg, saved, stored, space, spare,
                                    stream())
        return call

    def peer(self, forward, pack):
        """forward(x, parameters) of a peer, pack(ws, gs) its parameters; in training also all gradients."""
        parameters = [p.detach().clone() for p in pack(self.ws, self.gs)]
        if not self.case.training:
            @torch.no_grad()
            def call(i):
                return forward(self.x[i % self.sets], parameters)
            return call
        leaves = [x.detach().requires_grad_() for x in self.x]
        for p in parameters:
            p.requires_grad_()

        def step(i):
            x = leaves[i % self.sets]
            return torch.autograd.grad(forward(x, parameters), [x, *parameters], self.dy[i % self.sets])
        return step


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def check(buffers, native):
    """The largest relative error of y and every gradient of one fresh call, as a share of the tolerance: 1.5 times the error of the plain
    chain in the same dtype. The report has error and tolerance of the tensor that comes nearest to its tolerance."""
    case = buffers.case
    call = buffers.ours(native)
    if case.training:
        for d in buffers.dws + (buffers.dgs or []):
            d.zero_()
    call(0)
    torch.cuda.synchronize()
    got = {"y": buffers.y[0]}

    def gradients(x, ws, gs, dy):
        leaves = [t.detach().requires_grad_() for t in [x, *ws, *(gs or [])]]
        y = mlp(leaves[0], leaves[1:1 + len(ws)], leaves[1 + len(ws):] or None, case.act)
        out = {"y": y.detach()}
        if case.training:
            names = ["dx", *[f"dw{i}" for i in range(len(ws))], *[f"dg{i}" for i in range(len(gs or []))]]
            out |= dict(zip(names, torch.autograd.grad(y, leaves, dy)))
        return out
    if case.training:
        got["dx"] = buffers.dx[0]
        got |= {f"dw{i}": d for i, d in enumerate(buffers.dws)}
        got |= {f"dg{i}": d for i, d in enumerate(buffers.dgs or [])}
    dy = buffers.dy[0] if case.training else None
    double = [None if t is None else [v.double() for v in t] for t in (buffers.ws, buffers.gs)]
    want = gradients(buffers.x[0].double(), *double, None if dy is None else dy.double())
    chain = gradients(buffers.x[0], buffers.ws, buffers.gs, dy)
    rows = [(relative(got[n], want[n]), 1.5 * relative(chain[n], want[n]), n) for n in want]
    error, limit, name = max(rows, key=lambda r: r[0] / r[1] if r[0] == r[0] else float("inf"))
    return error, limit, name


class Origin:
    def __init__(self, folder):
        sys.path.insert(0, str(folder))
        import fused_mlp
        import fused_mlp5
        import kernel
        self.kernel, self.three, self.five = kernel, fused_mlp, fused_mlp5

    @staticmethod
    def takes(case):
        return case.act == "softplus" and case.dtype == "f16" and case.width == 128 and case.depth in (3, 5) and case.store != "nothing"

    def forward(self, case):
        """(forward, pack) of the original project for a supported case."""
        three = case.depth == 3
        module = self.three if three else self.five
        if case.weight_norm:  # all v in one tensor and all g in another
            model = (module.FusedMLPSoftplusWN if three else module.FusedMLP5SoftplusWN)(128, 128, 128).cuda().half()
            function = module.FusedMLPSoftplusWNFunction if three else module.FusedMLP5SoftplusWNFunction
            return (lambda x, p: function.apply(x, p[0], p[1], model._w_buf, model._invn_buf, model._splits, module._NoCast(model._dw_buf)),
                    lambda ws, gs: [torch.cat(ws), torch.cat(gs)[:, None]])
        if case.training:
            run = (module.FusedMLPSoftplusFunction if three else module.FusedMLP5SoftplusFunction).apply
        else:
            run = self.kernel._fused_mlp_fwd if three else self.five._fused_mlp5_fwd
        return lambda x, p: run(x, *p), lambda ws, gs: [w.t().contiguous() for w in ws]  # weights are [in, out] in that project


class TinyCudaNN:
    """tiny-cuda-nn: softplus is log(1 + e^10x) / 10, gradients of weights are f16; 64 or 128 wide, no weight norm."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(str(path))
        for name in ("create", "forward", "train"):
            getattr(self.lib, f"tiny_{name}").restype = ctypes.c_char_p

    def call(self, name, *arguments):
        failed = getattr(self.lib, f"tiny_{name}")(*arguments)
        if failed:
            raise RuntimeError(failed.decode())

    @staticmethod
    def takes(case):
        return case.dtype == "f16" and not case.weight_norm and case.store == "values" and case.rows % 256 == 0 and case.width in (64, 128)

    def steps(self, buffers):
        """call(i) for a supported case. The forward pass is checked on 256 rows of small numbers, because e^10x overflows; gradients are not checked."""
        case = buffers.case
        weights = torch.cat([w.flatten() for w in buffers.ws])
        gradients, network = torch.zeros_like(weights), ctypes.c_void_p()
        act = {"softplus": b"Softplus", "relu": b"ReLU"}[case.act]
        self.call("create", case.width, case.depth, act, pointer(weights), pointer(gradients), ctypes.byref(network))
        x, y = buffers.x[0][:256] * 0.25, torch.empty_like(buffers.x[0][:256])
        self.call("forward", network, pointer(x), pointer(y), 256, stream())
        want = x.double()
        for i, w in enumerate(buffers.ws):
            want = want @ w.double().t()
            if i + 1 < case.depth:
                want = F.relu(want) if case.act == "relu" else F.softplus(want, beta=10)
        if relative(y, want) > 1e-2:
            raise RuntimeError(f"found a relative error of {relative(y, want):.1e}, expected at most 1e-2")

        def call(i):
            k, keep = i % buffers.sets, (weights, gradients)
            if not case.training:
                self.call("forward", network, pointer(buffers.x[k]), pointer(buffers.y[i]), case.rows, stream())
            else:
                self.call("train", network, pointer(buffers.x[k]), pointer(buffers.y[i]), pointer(buffers.dy[k]), pointer(buffers.dx[i]),
                          case.rows, stream())
            return keep
        return call


def measure(case, native, l2_bytes, ceiling, origin, tiny, with_compile):
    buffers = Buffers(case, l2_bytes)
    error, tolerance, worst = check(buffers, native)
    graphs, absent = {"ours": captured(buffers.ours(native), buffers.calls)}, {}

    def plain(x, parameters):
        return mlp(x, parameters[:case.depth], parameters[case.depth:] or None, case.act)

    def pack(ws, gs):
        return [*ws, *(gs or [])]
    peers = {"torch_eager": (plain, pack)}
    if with_compile:
        torch._dynamo.reset()  # fresh per shape
        peers["torch_compile"] = (torch.compile(plain, fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs"), pack)
    if origin and origin.takes(case):
        peers["origin"] = origin.forward(case)
    for name, kind, given in (("origin", Origin, origin), ("tiny_cuda_nn", TinyCudaNN, tiny)):
        if not given and kind.takes(case):
            absent[name] = "not given by path"
    runs = {name: (buffers.peer, peer, {}) for name, peer in peers.items()}
    if tiny and tiny.takes(case):  # the workspaces belong to a stream and must exist before the capture
        runs["tiny_cuda_nn"] = (tiny.steps, (buffers,), {"on": torch.cuda.Stream()})
    for name, (make, arguments, where) in runs.items():
        try:
            graphs[name] = captured(make(*arguments), buffers.calls, **where)
        except Exception as e:  # a peer that cannot run is listed with the reason
            absent[name] = f"{type(e).__name__}: {str(e).splitlines()[0][:160]}"
            torch.cuda.synchronize()
    us, spread = interleaved({name: g[0] for name, g in graphs.items()}, buffers.calls, rounds=11)
    return {"name": case.name, "shape": [case.rows, case.width], "dtype": case.dtype, "ours_us": us.pop("ours"), "peers": us,
            "limit_us": case.limit_us(ceiling), "error": error, "tolerance": tolerance, "error_of": worst, "in_L2": buffers.cached,
            "p20_p80_us": spread, **({"absent": absent} if absent else {})}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--native", required=True)
    parser.add_argument("--origin", help="folder of mlp-megakernel with kernel.py, fused_mlp.py and fused_mlp5.py")
    parser.add_argument("--tiny", help="tiny-cuda-nn behind the functions of tiny_cuda_nn.cu")
    parser.add_argument("--only", help="cases whose name and shape contain this")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile, and writes no report")
    options = parser.parse_args()
    torch.manual_seed(0)
    select_algorithm.PRINT_AUTOTUNE = False  # prints long tables otherwise
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    native = Native(options.native)
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    origin = Origin(pathlib.Path(options.origin).resolve()) if options.origin else None
    tiny = TinyCudaNN(options.tiny) if options.tiny else None
    options.quick, options.of_quick = options.no_compile, None  # all cases, and no report

    def said(r):
        return (f"{r['case']:62} ours {r['ours_us']:8.2f} us  {100 * r['limit_us'] / r['ours_us']:3.0f} % of the limit  "
                + "  ".join(f"{p} {us:.2f} ({us / r['ours_us']:.2f}x)" for p, us in r["peers"].items())
                + f"  error {r['error']:.1e} <= {r['tolerance']:.1e} ({r['error_of']})"
                + "".join(f"  {p} absent: {why}" for p, why in r.get("absent", {}).items()))
    measure_each(begin("mlp", options, list(cases()), lambda case: f"{case.name} {case.rows} x {case.width} {case.dtype}"), lambda: ceilings(native),
                 lambda case, ceiling: measure(case, native, l2_bytes, ceiling, origin, tiny, not options.no_compile), said,
                 notes="limit: per pass the larger of products at bf16_TFLOPs and traffic at copy_TBps; absent peers carry their reason")


if __name__ == "__main__":
    main()
