"""Both projections of a gated MLP and the gate on a GPU: Ingot's shipped entry points beside PyTorch (two linears; one packed linear),
torch.compile and the bare cuBLAS product of the same size. Writes bench/results/<gpu>/swiglu.json.

    python3 bench/peers/gpu_swiglu.py --native build/cuda/libingot_bench.so [--only TEXT] [--quick]

Forward is inference. Forward + backward keeps gate and up, and gives dx, dWg and dWu for a given dh, in one graph. Counted are the
products: 4 M d H operations forward, 12 M d H with backward; the bare product of a training step is three of the forward's size.
"""
import dataclasses

import torch
import torch.nn.functional as F
from torch._inductor import select_algorithm

from gpu_common import DTYPES, captured, interleaved, l2_bytes, pointer, relative_error, rotation, run_products, stream


@dataclasses.dataclass
class Case:
    rows: int
    channels: int
    hidden: int
    training: bool = False
    layout: str = "two weights"  # or "[in, 2H]", as fused-swiglu stores them
    dtype: str = "bf16"

    @property
    def name(self):
        return f"SwiGLU {'forward + backward' if self.training else 'forward'}" + (f", {self.layout}" if self.layout != "two weights" else "")

    @property
    def flops(self):
        return (12 if self.training else 4) * self.rows * self.channels * self.hidden

    @property
    def bytes(self):
        x, w, h = self.rows * self.channels, 2 * self.channels * self.hidden, self.rows * self.hidden
        return DTYPES[self.dtype].itemsize * ((3 * x + 3 * w + 6 * h) if self.training else (x + w + h))


def cases():
    shapes = ((8192, 4096, 11008), (4096, 4096, 6912), (1024, 4096, 14336), (8192, 4096, 14336), (1024, 4096, 4096), (64, 4096, 4096))
    out = [Case(*s, training=t) for s in shapes for t in (False, True)]
    return out + [Case(8192, 4096, 11008, training=t, layout="[in, 2H]") for t in (False, True)] + \
        [Case(1024, 4096, 4096, training=t, dtype="f32") for t in (False, True)]


class Buffers:
    def __init__(self, case, l2_bytes):
        self.case = case
        self.sets, self.calls, self.cached = rotation(case.bytes, l2_bytes, most=4)
        self.calls = max(4, self.sets) if case.flops > 1e11 else self.calls
        dtype, m, c, h = DTYPES[case.dtype], case.rows, case.channels, case.hidden
        new = lambda *s: torch.randn(*s, device="cuda", dtype=dtype)  # noqa: E731
        self.columns = case.layout != "two weights"
        self.x, self.dh = [new(m, c) for _ in range(self.sets)], [new(m, h) for _ in range(self.sets)]
        self.w = [new(*((c, 2 * h) if self.columns else (2 * h, c))) * c**-0.5 for _ in range(self.sets)]
        nan = lambda *s: torch.full(s, float("nan"), device="cuda", dtype=dtype)  # noqa: E731
        self.h, self.gate, self.up, self.dx = nan(m, h), nan(m, h), nan(m, h), nan(m, c)
        self.dw = torch.full_like(self.w[0], float("nan"))
        self.workspace = torch.empty(2 * m * h * dtype.itemsize + (33 << 20), dtype=torch.uint8, device="cuda")

    def halves(self, w):
        return w.chunk(2, 1 if self.columns else 0)

    def ours(self, native):
        case, name = self.case, self.case.dtype.encode()

        def call(i):
            i %= self.sets
            wg, wu = self.halves(self.w[i])
            kept = (self.gate, self.up) if case.training else (None, None)
            sizes = (case.rows, case.channels, case.hidden, self.w[i].stride(0), int(self.columns))
            native.gated_linear(name, pointer(self.x[i]), pointer(wg), pointer(wu), pointer(self.h), *map(pointer, kept), *sizes,
                                pointer(self.workspace), self.workspace.numel(), stream())
            if case.training:
                dwg, dwu = self.halves(self.dw)
                native.gated_linear_backward(name, pointer(self.dh[i]), pointer(self.x[i]), pointer(wg), pointer(wu), *map(pointer, kept),
                                             pointer(self.dx), pointer(dwg), pointer(dwu), *sizes,
                                             pointer(self.workspace), self.workspace.numel(), stream())
        return call

    def two(self):
        if self.columns:
            return lambda x, wg, wu: F.silu(x @ wg) * (x @ wu)
        return lambda x, wg, wu: F.silu(F.linear(x, wg)) * F.linear(x, wu)

    def packed(self):
        def one(x, w):
            g, u = (x @ w if self.columns else F.linear(x, w)).chunk(2, -1)
            return F.silu(g) * u
        return one

    def peer(self, function, packed=False):
        case = self.case
        operands = [(x, w) if packed else (x, *self.halves(w)) for x, w in zip(self.x, self.w)]
        if not case.training:
            with torch.no_grad():
                return captured(lambda i: function(*operands[i % self.sets]), self.calls)
        leaves = [tuple(t.detach().requires_grad_() for t in o) for o in operands]

        def step(i):
            i %= self.sets
            torch.autograd.grad(function(*leaves[i]), leaves[i], self.dh[i])
        return captured(step, self.calls, on=torch.cuda.Stream())

    def bare(self):
        """The products alone, by cuBLAS, packed."""
        outs = [torch.empty(self.case.rows, 2 * self.case.hidden, device="cuda", dtype=self.x[0].dtype) for _ in range(1)]

        def call(i):
            i %= self.sets
            w = self.w[i] if self.columns else self.w[i].t()
            torch.mm(self.x[i], w, out=outs[0])
            if self.case.training:
                torch.mm(outs[0], w.t(), out=self.dx)
                torch.mm(self.x[i].t(), outs[0], out=self.dw if self.columns else self.dw.t())
        with torch.no_grad():
            return captured(call, self.calls)


def check(buffers, native):
    """The worst relative error of the results, and 1.5 times what PyTorch's chain in the same type loses, of the first and last rows (of
    dW: of all rows, as a product in fp32)."""
    case = buffers.case
    buffers.ours(native)(0)
    torch.cuda.synchronize()
    worst = (0.0, 1.0)

    def beside(got, chain, want):
        nonlocal worst
        allowed = max(1.5 * relative_error([chain], [want]), (2 * max(case.hidden, case.channels)) ** 0.5 * 2.0**-24)  # of sums in fp32
        worst = max(worst, (relative_error([got], [want]), allowed), key=lambda r: r[0] / r[1])
    x, dh, w = buffers.x[0], buffers.dh[0], buffers.halves(buffers.w[0])
    for rows in (slice(0, 64), slice(case.rows - 64, case.rows)):
        def chain(dtype):
            leaves = [t.detach().to(dtype).requires_grad_() for t in (x[rows], *w)]
            y = buffers.two()(*leaves)
            return y.detach(), torch.autograd.grad(y, leaves, dh[rows].to(dtype))[0]
        same, exact = chain(x.dtype), chain(torch.float64)
        beside(buffers.h[rows], same[0], exact[0])
        if case.training:
            beside(buffers.dx[rows], same[1], exact[1])
    if case.training:
        def gradients(dtype):
            leaves = [t.detach().to(dtype).requires_grad_() for t in w]
            return torch.autograd.grad(buffers.two()(x.to(dtype), *leaves), leaves, dh.to(dtype))
        exact, same = gradients(torch.float32), gradients(x.dtype)
        if case.dtype != "f32":
            for got, s, e in zip(buffers.halves(buffers.dw), same, exact):
                beside(got, s, e)
    return worst


def measure(case, native, l2_bytes, ceiling):
    buffers = Buffers(case, l2_bytes)
    error, tolerance = check(buffers, native)
    torch._dynamo.reset()
    compiled = torch.compile(buffers.two(), fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs")
    graphs = {"ours": captured(buffers.ours(native), buffers.calls), "torch_eager": buffers.peer(buffers.two()),
              "torch_packed": buffers.peer(buffers.packed(), packed=True), "torch_compile": buffers.peer(compiled), "bare_products": buffers.bare()}
    us, spread = interleaved({name: g[0] for name, g in graphs.items()}, buffers.calls, rounds=9)
    limit = max(case.flops / ceiling["bf16_TFLOPs"], case.bytes / ceiling["copy_TBps"]) * 1e-6
    return {"name": case.name, "shape": [case.rows, case.channels, case.hidden], "dtype": case.dtype, "ours_us": us.pop("ours"), "peers": us,
            "limit_us": limit, "error": error, "tolerance": tolerance, "in_L2": buffers.cached, "p20_p80_us": spread}


if __name__ == "__main__":
    select_algorithm.PRINT_AUTOTUNE = False
    run_products("swiglu", cases(), 2, lambda case, native, ceiling: measure(case, native, l2_bytes(), ceiling),
                 lambda c: f"{c.name} {c.rows} x {c.channels} x {c.hidden} {c.dtype}")
