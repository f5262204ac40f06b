"""Plain matrix products on a GPU: Ingot's matmul, which dispatches between its own kernel and cuBLASLt, beside PyTorch's (cuBLAS) and
torch.compile (max-autotune, which also tries Triton's). Writes bench/results/<gpu>/linear.json.

    python3 bench/peers/gpu_linear.py --native build/cuda/libingot_bench.so [--only TEXT] [--quick]

Forward is X W^T, dX is dY W, dW is dY^T X; "f32 +=" adds to gradients in fp32, which PyTorch does in two steps.
"""
import dataclasses

import torch
from torch._inductor import select_algorithm

from gpu_common import captured, interleaved, l2_bytes, pointer, relative_error, rotation, run_products, stream


@dataclasses.dataclass
class Case:
    kind: str  # forward, dX, dW or dW f32 +=
    rows: int  # of X
    hidden: int  # columns of X
    out: int  # rows of W

    @property
    def name(self):
        return f"linear {self.kind}"

    @property
    def sizes(self):  # m, n, k
        return {"f": (self.rows, self.out, self.hidden), "X": (self.rows, self.hidden, self.out),
                "W": (self.out, self.hidden, self.rows)}[self.kind[0] if self.kind[0] == "f" else self.kind[1]]

    @property
    def transposed(self):  # a, b
        return {"f": (False, True), "X": (False, False), "W": (True, False)}[self.kind[0] if self.kind[0] == "f" else self.kind[1]]

    @property
    def adds(self):
        return self.kind.endswith("+=")

    @property
    def flops(self):
        m, n, k = self.sizes
        return 2 * m * n * k

    @property
    def bytes(self):
        m, n, k = self.sizes
        return 2 * (m * k + n * k) + m * n * (8 if self.adds else 2)


def cases():
    out = []
    for rows, hidden, wide in ((8192, 4096, 22016), (4096, 4096, 4096), (98304, 512, 2048), (98304, 512, 512), (1024, 4096, 4096), (64, 4096, 4096)):
        out += [Case(kind, rows, hidden, wide) for kind in ("forward", "dX", "dW", "dW f32 +=")]
    return out


class Buffers:
    def __init__(self, case, l2_bytes):
        self.case = case
        m, n, k = case.sizes
        self.sets, self.calls, self.cached = rotation(case.bytes, l2_bytes, most=12)
        ta, tb = case.transposed
        new = lambda r, c, t: torch.randn(*((c, r) if t else (r, c)), device="cuda", dtype=torch.bfloat16)  # noqa: E731
        self.a, self.b = [new(m, k, ta) for _ in range(self.sets)], [new(k, n, tb) for _ in range(self.sets)]
        dtype = torch.float32 if case.adds else torch.bfloat16
        self.c = [torch.zeros(m, n, device="cuda", dtype=dtype) for _ in range(self.sets)]
        self.workspace = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")

    def ours(self, native):
        m, n, k = self.case.sizes
        ta, tb = self.case.transposed

        def call(i):
            i %= self.sets
            native.matmul(pointer(self.a[i]), pointer(self.b[i]), pointer(self.c[i]), m, n, k, int(ta), int(tb), int(self.case.adds),
                          pointer(self.workspace), self.workspace.numel(), stream())
        return call

    def product(self):
        ta, tb = self.case.transposed

        def plain(a, b, c):
            a, b = a.t() if ta else a, b.t() if tb else b
            return c.add_(a @ b) if self.case.adds else a @ b
        return plain

    def peer(self, function):
        with torch.no_grad():
            return captured(lambda i: function(self.a[i % self.sets], self.b[i % self.sets], self.c[i % self.sets]), self.calls)


def check(buffers, native):
    """The error of some rows, and 1.5 times the error of PyTorch's product in the same types."""
    case, worst = buffers.case, (0.0, 1.0)
    c = buffers.c[0]
    c.zero_() if case.adds else c.fill_(float("nan"))
    buffers.ours(native)(0)
    a = buffers.a[0].t() if case.transposed[0] else buffers.a[0]
    b = buffers.b[0].t() if case.transposed[1] else buffers.b[0]
    for rows in (slice(0, 64), slice(a.shape[0] - 64, a.shape[0])):
        want = a[rows].double() @ b.double()
        chain = torch.mm(a[rows], b, out_dtype=torch.float32) if case.adds else a[rows] @ b
        error, allowed = relative_error([c[rows]], [want]), 1.5 * relative_error([chain], [want])
        # Tensor cores truncate their additions: 16 products at a time, half an ulp on average, of a sum that grows as a square root. PyTorch may
        # divide long sums of few rows into parts, which lose less.
        truncation = 2 / 3 * a.shape[1] / 16 * 2.0**-24 if case.adds else 0
        worst = max(worst, (error, max(allowed, truncation)), key=lambda r: r[0] / r[1])
    c.zero_()
    return worst


def measure(case, native, l2_bytes, ceiling):
    buffers = Buffers(case, l2_bytes)
    error, tolerance = check(buffers, native)
    torch._dynamo.reset()
    compiled = torch.compile(buffers.product(), fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs")
    graphs = {"ours": captured(buffers.ours(native), buffers.calls), "torch_eager": buffers.peer(buffers.product()),
              "torch_compile": buffers.peer(compiled)}
    us, spread = interleaved({name: g[0] for name, g in graphs.items()}, buffers.calls, rounds=9)
    limit = max(case.flops / ceiling["bf16_TFLOPs"], case.bytes / ceiling["copy_TBps"]) * 1e-6
    return {"name": case.name, "shape": list(case.sizes), "dtype": "bf16", "ours_us": us.pop("ours"), "peers": us, "limit_us": limit,
            "error": error, "tolerance": tolerance, "in_L2": buffers.cached, "p20_p80_us": spread}


if __name__ == "__main__":
    select_algorithm.PRINT_AUTOTUNE = False
    run_products("linear", cases(), 4, lambda case, native, ceiling: measure(case, native, l2_bytes(), ceiling),
                 lambda c: f"{c.name} {' x '.join(map(str, c.sizes))}")
