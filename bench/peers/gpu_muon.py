"""Muon on a GPU: the five steps of Newton-Schulz on banks of matrices, alone, and the whole update, beside the same in PyTorch
(batched products), eager and compiled. Writes bench/results/<gpu>/muon.json.

    python3 bench/peers/gpu_muon.py --native build/cuda/libingot_bench.so [--only TEXT] [--quick]

The whole update is of f32 parameters, gradients and momentum with products in 16 bits (Ingot iterates in f16, PyTorch in bf16): momentum,
Nesterov, rows normalised, Newton-Schulz, decay and step. Ingot's banks run on a stream each, as its trainer has them. The limit counts half of
each symmetric product, in the form with fewer operations: all steps on the matrix, or steps on its square in two parts.
"""
import ctypes
import dataclasses

import torch
from torch._inductor import select_algorithm

from gpu_common import captured, interleaved, pointer, relative_error, run_products, stream

STEPS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)
LR, MU = 0.02, 0.95
GOLF = ((22, 512, 512), (22, 256, 512), (11, 2048, 512), (11, 512, 2048))  # queries and outputs, keys and values, up, down


@dataclasses.dataclass
class Case:
    label: str
    banks: tuple
    whole: bool

    @property
    def name(self):
        return f"{self.label}, {'the whole update' if self.whole else 'Newton-Schulz alone'}"

    @property
    def flops(self):
        def of(count, rows, cols):
            small, large = sorted((rows, cols))
            on_matrix = STEPS * (3 * small * small * large + small**3)
            on_square = 2 * 3 * small * small * large + 14 * small**3  # parts of two and three steps
            return count * min(on_matrix, on_square)
        return sum(of(*bank) for bank in self.banks)

    @property
    def shape(self):
        return [sum(bank[0] for bank in self.banks), *self.banks[-1][1:]]


def cases():
    out = [Case("all banks of golf", GOLF, whole) for whole in (False, True)]
    return out + [Case("a bank", ((count, rows, cols),), False) for count, rows, cols in ((8, 1024, 1024), (8, 1024, 4096), (2, 4096, 4096))]


def newton_schulz(x):
    a, b, c = COEFFICIENTS
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    for _ in range(STEPS):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def update(p, g, momentum):
    """The formula of kernels/muon/muon.h. Returns parameters and momentum."""
    momentum = MU * momentum + g
    u = g + MU * momentum
    u = u / u.norm(dim=-1, keepdim=True).clamp_min(1e-7)
    x = newton_schulz((u / (u.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(torch.bfloat16 if p.dtype == torch.float32 else p.dtype))
    return p - LR * max(1, p.size(-2) / p.size(-1)) ** 0.5 * x.to(p.dtype), momentum


class Banks:
    def __init__(self, case):
        self.case = case
        self.start = [torch.randn(bank, device="cuda") for bank in case.banks]
        if case.whole:
            self.p, self.momentum = ([torch.randn_like(t) * 0.02 for t in self.start] for _ in range(2))
        else:
            self.start = [(t / t.norm(dim=(-2, -1), keepdim=True)).bfloat16() for t in self.start]
            self.x, self.other = ([torch.full_like(t, float("nan"), dtype=torch.float16) for t in self.start] for _ in range(2))
            self.squares = [torch.full((5, bank[0], min(bank[1:]), min(bank[1:])), float("nan"), device="cuda", dtype=torch.float16)
                            for bank in case.banks]
        self.workspace = []
        self.sides = [torch.cuda.Stream() for _ in case.banks[1:]]

    def side_by_side(self, call):
        """call(i) for each bank, on a stream each."""
        main = torch.cuda.current_stream()
        for side in self.sides:
            side.wait_stream(main)
        for i, on in enumerate((main, *self.sides)):
            with torch.cuda.stream(on):
                call(i)
        for side in self.sides:
            main.wait_stream(side)

    def ours(self, native):
        if not self.case.whole:
            scale, in_other = ctypes.c_double(), ctypes.c_int64()
            native.newton_schulz_scale(STEPS, ctypes.byref(scale))
            for x, start in zip(self.x, self.start):
                x.copy_(start.float() * scale.value)

            def one(i):
                native.newton_schulz(pointer(self.x[i]), pointer(self.other[i]), pointer(self.squares[i]), *self.start[i].shape, STEPS,
                                     ctypes.byref(in_other), stream())
                return (self.other if in_other.value else self.x)[i], scale.value
            self.results = [None] * len(self.x)

            def iterate(_):
                def call(i):
                    self.results[i] = one(i)
                self.side_by_side(call)
            return iterate
        for bank in self.case.banks:
            bytes_ = ctypes.c_int64()
            native.muon_workspace(*bank, ctypes.byref(bytes_))
            self.workspace.append(torch.empty(bytes_.value, dtype=torch.uint8, device="cuda"))

        def one(i):
            native.muon(pointer(self.p[i]), pointer(self.start[i]), pointer(self.momentum[i]), *self.start[i].shape, ctypes.c_double(LR),
                        ctypes.c_double(MU), STEPS, pointer(self.workspace[i]), self.workspace[i].numel(), stream())
        return lambda _: self.side_by_side(one)

    def peer(self, function):
        """Without gradients. PyTorch returns the update in new tensors, because its foreach functions would write in place."""
        def call(_):
            with torch.no_grad():
                if self.case.whole:
                    return function(self.p, self.start, self.momentum)
                return function(self.start)
        return call


def of_all(whole):
    if whole:
        return lambda p, g, momentum: [update(*bank) for bank in zip(p, g, momentum)]
    return lambda starts: [newton_schulz(x) for x in starts]


def check(banks, native):
    """The worst bank's relative error against fp64, and 1.5 times the error of PyTorch's chain in the same types. The momentum, two roundings
    of f32, is checked separately: an error in the momentum shows only in the parameters of the next step."""
    worst = (0.0, 1.0)
    if banks.case.whole:
        before = [(p.clone(), m.clone()) for p, m in zip(banks.p, banks.momentum)]
        banks.ours(native)(0)
        torch.cuda.synchronize()
        for p, m, g, (old, momentum) in zip(banks.p, banks.momentum, banks.start, before):
            want, moved = update(old.double(), g.double(), momentum.double())
            want -= old.double()
            momentum_error = relative_error([m], [moved])
            assert momentum_error <= 2 * 2.0**-24, f"momentum: found an error of {momentum_error:.1e}, expected at most 2^-23"
            chain = update(old, g, momentum)[0].double() - old.double()
            error = relative_error([p.double() - old.double()], [want])
            worst = max(worst, (error, 1.5 * relative_error([chain], [want])), key=lambda r: r[0] / r[1])
        return worst
    banks.ours(native)(0)
    torch.cuda.synchronize()
    for (got, scale), start in zip(banks.results, banks.start):
        want = newton_schulz(start.double())
        worst = max(worst, (relative_error([got.double() / scale], [want]), 1.5 * relative_error([newton_schulz(start)], [want])),
                    key=lambda r: r[0] / r[1])
    return worst


def measure(case, native, ceiling):
    banks = Banks(case)
    error, tolerance = check(banks, native)
    torch._dynamo.reset()
    function = of_all(case.whole)
    compiled = torch.compile(function, fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs")
    calls = 2
    with torch.no_grad():
        graphs = {"ours": captured(banks.ours(native), calls), "torch_eager": captured(banks.peer(function), calls),
                  "torch_compile": captured(banks.peer(compiled), calls)}
    us, spread = interleaved({name: g[0] for name, g in graphs.items()}, calls)
    return {"name": case.name, "shape": case.shape, "dtype": "f32" if case.whole else "bf16", "ours_us": us.pop("ours"), "peers": us,
            "limit_us": case.flops / ceiling["bf16_TFLOPs"] * 1e-6, "error": error, "tolerance": tolerance, "p20_p80_us": spread}


if __name__ == "__main__":
    select_algorithm.PRINT_AUTOTUNE = False
    run_products("muon", cases(), 1, measure, lambda c: f"{c.name} {c.shape}")
