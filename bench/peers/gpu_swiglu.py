"""Both projections of a gated MLP and the gate on a GPU: Ingot's shipped entry points beside PyTorch (two linears; one packed linear),
torch.compile, Liger-Kernel's gate between two linears and the bare cuBLAS product of the same size; and the whole MLP with its down
projection, as in ingot.nn.SwiGLU, with the memory of a training step. Writes bench/results/<gpu>/swiglu.json.

    python3 bench/peers/gpu_swiglu.py --native build/cuda/libingot_bench.so [--liger WHEEL] [--only TEXT] [--quick]

Forward is inference. Forward + backward keeps gate and up, and computes dx, dWg and dWu for a given dh, in one graph. Operations are
those of the products: 4 M d H forward, 12 M d H with the backward pass, 6 and 18 for the whole MLP; the bare product of a training step is three
products of the forward's size. Liger has separate rows beside PyTorch, because torch.compile tunes each row for most of a minute.
"""
import ctypes
import dataclasses

import torch
import torch.nn.functional as F
from torch._inductor import select_algorithm

from gpu_common import DTYPES, add_peers, captured, interleaved, l2_bytes, peak_beside, pointer, relative_error, rotation, run_products, stream


@dataclasses.dataclass
class Case:
    rows: int
    channels: int
    hidden: int
    training: bool = False
    layout: str = "two weights"  # or "[in, 2H]", as fused-swiglu stores them
    dtype: str = "bf16"
    beside_liger: bool = False
    whole: bool = False  # with the down projection

    @property
    def name(self):
        return (f"SwiGLU {'MLP ' if self.whole else ''}{'forward + backward' if self.training else 'forward'}"
                + (f", {self.layout}" if self.layout != "two weights" else "") + (" beside Liger" if self.beside_liger else ""))

    @property
    def flops(self):
        products = (3 if self.whole else 2) * (3 if self.training else 1)
        return 2 * products * self.rows * self.channels * self.hidden

    @property
    def bytes(self):
        x, w, h = self.rows * self.channels, 2 * self.channels * self.hidden, self.rows * self.hidden
        both = (3 * x + 3 * w + 6 * h) if self.training else (x + w + h)
        down = ((3 * x + 3 * w // 2 + 3 * h) if self.training else (x + w // 2 + h)) if self.whole else 0
        return DTYPES[self.dtype].itemsize * (both + down)


def cases():
    shapes = ((8192, 4096, 11008), (4096, 4096, 6912), (1024, 4096, 14336), (8192, 4096, 14336), (1024, 4096, 4096), (64, 4096, 4096))
    out = [Case(*s, training=t) for s in shapes for t in (False, True)]
    out += [Case(8192, 4096, 11008, training=t, layout="[in, 2H]") for t in (False, True)]
    out += [Case(1024, 4096, 4096, dtype="f32"), *(Case(*shapes[i], training=t, beside_liger=True) for i in (0, 2) for t in (False, True))]
    out += [Case(*shapes[0], training=t, whole=True) for t in (False, True)]
    return out + [Case(1024, 4096, 4096, training=True, dtype="f32")]  # last, because torch.compile takes longest for this case


def without_results(call):
    """The calls of a training step: a graph that kept all gradients would take many times their memory."""
    def step(i):
        call(i)
    return step


def gate_backward(native, case, kept, dh):
    """Writes dgate and dup over gate and up."""
    none = pointer(None)
    native.gate(case.dtype.encode(), pointer(kept), none, none, pointer(dh), pointer(kept), none, case.rows, case.hidden, 1,
                ctypes.c_double(0), ctypes.c_double(1), ctypes.c_double(0), none, stream())


class Buffers:
    def __init__(self, case, l2_bytes):
        self.case = case
        self.sets, self.calls, self.cached = rotation(case.bytes, l2_bytes, most=4)
        self.calls = max(4, self.sets) if case.flops > 1e11 else self.calls
        dtype, m, c, h = DTYPES[case.dtype], case.rows, case.channels, case.hidden
        new = lambda *s: torch.randn(*s, device="cuda", dtype=dtype)  # noqa: E731
        self.columns = case.layout != "two weights"
        self.x, self.dh = [new(m, c) for _ in range(self.sets)], [new(m, c if case.whole else h) for _ in range(self.sets)]
        self.down = [new(c, h) * h**-0.5 for _ in range(self.sets)] if case.whole else None
        self.w = [new(*((c, 2 * h) if self.columns else (2 * h, c))) * c**-0.5 for _ in range(self.sets)]
        nan = lambda *s: torch.full(s, float("nan"), device="cuda", dtype=dtype)  # noqa: E731
        self.h, self.kept, self.dx = nan(m, h), nan(m, 2 * h), nan(m, c)
        self.dw = torch.full_like(self.w[0], float("nan"))
        self.workspace = torch.empty(2 * m * h * dtype.itemsize + (33 << 20), dtype=torch.uint8, device="cuda")  # the largest workspace: forward with few rows

    def halves(self, w):
        return w.chunk(2, 1 if self.columns else 0)

    def ours(self, native):
        case, name = self.case, self.case.dtype.encode()

        def call(i):
            i %= self.sets
            wg, wu = self.halves(self.w[i])
            kept = self.kept.chunk(2, 1) if case.training else (None, None)
            sizes = (case.rows, case.channels, case.hidden, self.w[i].stride(0), 2 * case.hidden, int(self.columns))
            native.gated_linear(name, pointer(self.x[i]), pointer(wg), pointer(wu), pointer(self.h), *map(pointer, kept), *sizes,
                                pointer(self.workspace), self.workspace.numel(), stream())
            if case.training:
                dwg, dwu = self.halves(self.dw)
                gate_backward(native, case, self.kept, self.dh[i])
                native.gated_linear_backward(name, pointer(None), pointer(self.x[i]), pointer(wg), pointer(wu), *map(pointer, kept),
                                             pointer(self.dx), pointer(dwg), pointer(dwu), *sizes,
                                             pointer(self.workspace), self.workspace.numel(), stream())
        return call

    def two(self):
        if self.case.whole:
            return lambda x, wg, wu, wd: F.linear(F.silu(F.linear(x, wg)) * F.linear(x, wu), wd)
        if self.columns:
            return lambda x, wg, wu: F.silu(x @ wg) * (x @ wu)
        return lambda x, wg, wu: F.silu(F.linear(x, wg)) * F.linear(x, wu)

    def packed(self):
        def one(x, w):
            g, u = (x @ w if self.columns else F.linear(x, w)).chunk(2, -1)
            return F.silu(g) * u
        return one

    def liger(self, ops):
        """Liger's gate between PyTorch's linears, as in LigerSwiGLUMLP."""
        both = lambda x, wg, wu: ops.LigerSiLUMulFunction.apply(F.linear(x, wg), F.linear(x, wu))  # noqa: E731
        return (lambda x, wg, wu, wd: F.linear(both(x, wg, wu), wd)) if self.case.whole else both

    def call(self, function, packed=False):
        operands = [(x, w) if packed else (x, *self.halves(w), *(self.down[i : i + 1] if self.case.whole else []))
                    for i, (x, w) in enumerate(zip(self.x, self.w))]
        if not self.case.training:
            return lambda i: function(*operands[i % self.sets])
        leaves = [tuple(t.detach().requires_grad_() for t in o) for o in operands]
        return lambda i: torch.autograd.grad(function(*leaves[i % self.sets]), leaves[i % self.sets], self.dh[i % self.sets])

    def peer(self, function, packed=False):
        call = self.call(function, packed)
        if self.case.training:
            return captured(without_results(call), self.calls, on=torch.cuda.Stream())
        with torch.no_grad():
            return captured(call, self.calls)

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


class Whole(Buffers):
    """The MLP with its down projection. Ingot takes and returns memory of PyTorch's allocator at the same points as ingot.nn.SwiGLU; the down
    projection is PyTorch's linear in both."""

    def __init__(self, case, l2_bytes):
        super().__init__(case, l2_bytes)
        self.workspace = None
        self.room = 33 << 20  # for cuBLASLt, and for gate and up if these are not kept
        if not case.training:
            self.room += 2 * case.rows * case.hidden * DTYPES[case.dtype].itemsize

    def results(self, native, i):
        """(y,), or (y, dx, [dWg | dWu], dWd)."""
        case, name = self.case, self.case.dtype.encode()
        x, w, down, dy = self.x[i], self.w[i], self.down[i], self.dh[i]
        wg, wu = self.halves(w)
        h = x.new_empty(case.rows, case.hidden)
        kept = h.new_empty(case.rows, 2 * case.hidden) if case.training else None
        halves = kept.chunk(2, 1) if case.training else (None, None)
        sizes = (case.rows, case.channels, case.hidden, w.stride(0), 2 * case.hidden, 0)
        workspace = x.new_empty(self.room, dtype=torch.uint8)  # unused where a single kernel computes everything
        native.gated_linear(name, pointer(x), pointer(wg), pointer(wu), pointer(h), *map(pointer, halves), *sizes, pointer(workspace),
                            workspace.numel(), stream())
        del workspace
        y = torch.mm(h, down.t())
        if not case.training:
            return (y,)
        dh, ddown = torch.mm(dy, down), torch.mm(dy.t(), h)
        del h
        gate_backward(native, case, kept, dh)
        del dh
        dx, dw = torch.empty_like(x), torch.empty_like(w)
        dwg, dwu = self.halves(dw)
        workspace = x.new_empty(self.room, dtype=torch.uint8)
        native.gated_linear_backward(name, pointer(None), pointer(x), pointer(wg), pointer(wu), *map(pointer, halves), pointer(dx), pointer(dwg),
                                     pointer(dwu), *sizes, pointer(workspace), workspace.numel(), stream())
        return y, dx, dw, ddown

    def ours(self, native):
        return lambda i: self.results(native, i % self.sets)

    def bare(self):
        """The products alone, by cuBLAS, both projections packed."""
        case = self.case
        both, h = (torch.empty(case.rows, n * case.hidden, device="cuda", dtype=self.x[0].dtype) for n in (2, 1))
        h.normal_()
        ddown = torch.empty_like(self.down[0])

        def call(i):
            x, w, down, dy = (t[i % self.sets] for t in (self.x, self.w, self.down, self.dh))
            torch.mm(x, w.t(), out=both)
            torch.mm(h, down.t(), out=self.dx)
            if case.training:
                torch.mm(dy, down, out=h)
                torch.mm(dy.t(), h, out=ddown)
                torch.mm(both, w, out=self.dx)
                torch.mm(both.t(), x, out=self.dw)
        with torch.no_grad():
            return captured(call, self.calls)


def check_whole(buffers, native):
    """The worst relative error of a fresh call's results against PyTorch in fp32, and 1.5 times the error of PyTorch's chain in the same type."""
    def results(dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (buffers.x[0], *buffers.halves(buffers.w[0]), buffers.down[0])]
        y = buffers.two()(*leaves)
        if not buffers.case.training:
            return (y.detach(),)
        dx, dwg, dwu, ddown = torch.autograd.grad(y, leaves, buffers.dh[0].to(dtype))
        return y.detach(), dx, torch.cat((dwg, dwu)), ddown
    worst = (0.0, 1.0)
    for got, same, exact in zip(buffers.results(native, 0), results(buffers.x[0].dtype), results(torch.float32)):
        worst = max(worst, (relative_error([got], [exact]), 1.5 * relative_error([same], [exact])), key=lambda r: r[0] / r[1])
    return worst


def check(buffers, native):
    """The worst relative error of the first and last rows of the results (of dW: of all rows, by a product in fp32), and 1.5 times the error of
    PyTorch's chain in the same type."""
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


def peak_memory(buffers, native, functions):
    """Bytes of a training step of Ingot and of each of `functions`, besides operands and gradients."""
    gradients = sum(t[0].numel() * t[0].element_size() for t in (buffers.x, buffers.w, buffers.down))
    calls = {"ours": buffers.ours(native), **{name: buffers.call(function) for name, function in functions.items()}}
    for call in calls.values():
        call(0)  # allocated once
    return {name: peak_beside(call, gradients) for name, call in calls.items()}


def measure(case, native, l2_bytes, ceiling, liger):
    buffers = (Whole if case.whole else Buffers)(case, l2_bytes)
    error, tolerance = (check_whole if case.whole else check)(buffers, native)
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    functions, absent = {"torch_eager": buffers.two()}, {}
    if case.beside_liger:
        absent["torch_compile"] = "it is in the row without Liger"
    else:
        functions["torch_compile"] = torch.compile(buffers.two(), fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs")
    ours = buffers.ours(native)
    graphs = {"ours": captured(without_results(ours) if case.training else ours, buffers.calls),
              **{name: buffers.peer(function) for name, function in functions.items()}}
    if not (case.beside_liger or case.whole):
        graphs["torch_packed"] = buffers.peer(buffers.packed(), packed=True)
    if case.beside_liger or case.whole:
        add_peers(graphs, absent, {"liger": (liger, lambda: buffers.peer(buffers.liger(liger)))})
        if "liger" in graphs:
            functions["liger"] = buffers.liger(liger)
    graphs["bare_products"] = buffers.bare()
    us, spread = interleaved({name: g[0] for name, g in graphs.items()}, buffers.calls, rounds=9)
    limit = max(case.flops / ceiling["bf16_TFLOPs"], case.bytes / ceiling["copy_TBps"]) * 1e-6
    memory = {"memory_bytes": peak_memory(buffers, native, functions)} if case.whole and case.training else {}
    return {"name": case.name, "shape": [case.rows, case.channels, case.hidden], "dtype": case.dtype, "ours_us": us.pop("ours"), "peers": us,
            "limit_us": limit, "error": error, "tolerance": tolerance, "in_L2": buffers.cached, **memory, **({"absent": absent} if absent else {}),
            "p20_p80_us": spread}


if __name__ == "__main__":
    select_algorithm.PRINT_AUTOTUNE = False
    run_products("swiglu", cases(), 2, lambda case, native, ceiling, liger: measure(case, native, l2_bytes(), ceiling, liger),
                 lambda c: f"{c.name} {c.rows} x {c.channels} x {c.hidden} {c.dtype}", liger=True)
