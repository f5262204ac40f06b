"""Products of a mixture of experts on a GPU, forward and both gradients: Ingot's expert_linear beside PyTorch's grouped_mm and one product of cuBLAS for each
expert, whose offsets the host must know. Writes bench/results/<gpu>/experts.json.

    python3 bench/peers/gpu_experts.py --native build/cuda/libingot_bench.so [--only TEXT] [--quick]

Rows are sorted by expert. Their numbers are those of random routing: each row's expert is uniformly random, or drawn from a distribution in which the largest
expert has about four times the mean ("skewed"). The tolerance is 1.5 times the error of PyTorch's products in the same types: both sum in fp32 and round once.
"""
import dataclasses

import torch

from gpu_common import captured, interleaved, l2_bytes, pointer, relative_error, rotation, run_products, stream


@dataclasses.dataclass
class Case:
    kind: str  # forward, dX or dW
    experts: int
    rows: int
    hidden: int  # columns of X
    out: int  # rows of an expert's matrix
    skewed: bool = False

    @property
    def name(self):
        return f"experts {self.kind}" + (", skewed" if self.skewed else "")

    @property
    def shape(self):
        return [self.experts, self.rows, self.out, self.hidden]

    @property
    def flops(self):
        return 2 * self.rows * self.hidden * self.out

    @property
    def bytes(self):
        return 2 * (self.rows * (self.hidden + self.out) + self.experts * self.hidden * self.out)


def cases():
    out = []
    for experts, rows, hidden, wide in ((32, 32768, 2880, 5760), (128, 65536, 2048, 1536), (8, 16384, 4096, 14336)):
        out += [Case(kind, experts, rows, hidden, wide, skewed) for skewed in (False, True) for kind in ("forward", "dX", "dW")]
    return out


def offsets_of(case):
    """(E + 1) int32: where the rows of each expert begin."""
    chances = torch.linspace(1, 8, case.experts) if case.skewed else torch.ones(case.experts)
    counts = torch.bincount(torch.multinomial(chances, case.rows, replacement=True), minlength=case.experts)
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(torch.int32)


class Buffers:
    def __init__(self, case):
        self.case = case
        self.sets, self.calls, self.cached = rotation(case.bytes, l2_bytes(), most=4)
        new = lambda *shape: [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(self.sets)]  # noqa: E731
        self.x, self.dy = new(case.rows, case.hidden), new(case.rows, case.out)
        self.w = new(case.experts, case.out, case.hidden)
        self.at = offsets_of(case)
        self.on_gpu, self.ends = self.at.cuda(), self.at[1:].cuda()
        self.result = [torch.empty_like(t) for t in {"forward": self.dy, "dX": self.x, "dW": self.w}[case.kind]]

    def ours(self, native):
        case = self.case
        sizes = case.rows, case.experts, case.out, case.hidden

        def call(i):
            i %= self.sets
            x, w, dy, result, at = pointer(self.x[i]), pointer(self.w[i]), pointer(self.dy[i]), pointer(self.result[i]), pointer(self.on_gpu)
            nothing = pointer(None)
            if case.kind == "forward":
                native.experts(x, w, at, result, *sizes, stream())
            elif case.kind == "dX":
                native.experts_backward(dy, nothing, w, at, result, nothing, *sizes, stream())
            else:
                native.experts_backward(dy, x, nothing, at, nothing, result, *sizes, stream())
        return call

    def grouped_mm(self, i):
        i %= self.sets
        product = torch.nn.functional.grouped_mm
        if self.case.kind == "forward":
            return product(self.x[i], self.w[i].transpose(1, 2), offs=self.ends)
        if self.case.kind == "dX":
            return product(self.dy[i], self.w[i], offs=self.ends)
        return product(self.dy[i].t(), self.x[i], offs=self.ends)

    def expert(self, e, i, dtype=torch.bfloat16):
        rows = slice(int(self.at[e]), int(self.at[e + 1]))
        x, dy, w = self.x[i][rows].to(dtype), self.dy[i][rows].to(dtype), self.w[i][e].to(dtype)
        return {"forward": lambda: x @ w.t(), "dX": lambda: dy @ w, "dW": lambda: dy.t() @ x}[self.case.kind]()

    def one_by_one(self, i):
        return [self.expert(e, i % self.sets) for e in range(self.case.experts)]


def check(buffers, native):
    """The error of the first and the last expert, and 1.5 times the error of PyTorch's products."""
    case, result = buffers.case, buffers.result[0]
    result.fill_(float("nan"))
    buffers.ours(native)(0)
    worst = (0.0, 1.0)
    for e in (0, case.experts - 1):
        got = result[e] if case.kind == "dW" else result[int(buffers.at[e]) : int(buffers.at[e + 1])]
        want = buffers.expert(e, 0, torch.float64)
        worst = max(worst, (relative_error([got], [want]), 1.5 * relative_error([buffers.expert(e, 0)], [want])), key=lambda r: r[0] / r[1])
    return worst


def measure(case, native, ceiling):
    buffers = Buffers(case)
    error, tolerance = check(buffers, native)
    graphs = {"ours": captured(buffers.ours(native), buffers.calls), "grouped_mm": captured(buffers.grouped_mm, buffers.calls),
              "cublas_each": captured(buffers.one_by_one, buffers.calls)}
    us, spread = interleaved({name: g[0] for name, g in graphs.items()}, buffers.calls, rounds=9)
    limit = max(case.flops / ceiling["bf16_TFLOPs"], case.bytes / ceiling["copy_TBps"]) * 1e-6
    return {"name": case.name, "shape": case.shape, "dtype": "bf16", "ours_us": us.pop("ours"), "peers": us, "limit_us": limit,
            "error": error, "tolerance": tolerance, "in_L2": buffers.cached, "p20_p80_us": spread}


if __name__ == "__main__":
    run_products("experts", cases(), 3, measure, lambda c: f"{c.name} {' x '.join(map(str, c.shape))}")
