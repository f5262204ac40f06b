"""The trainer's MLP, y = f(x W1^T) W2^T with f(x) = max(x, x / 2)^2, wide: forward, and forward + backward with all gradients, beside PyTorch,
eager and compiled, and the bare products of the same sizes. Writes bench/results/<gpu>/wide_mlp.json.

    python3 bench/peers/gpu_wide_mlp.py --native build/cuda/libingot_bench.so [--only TEXT] [--quick]

Ingot keeps one 16-bit tensor and one bit per element, and adds weight gradients in f32, like a training step with several passes; the peers
write weight gradients in bf16. The error is the largest relative error of the outputs against fp32, by chunks of rows. The tolerance of bf16 is three
roundings, of the hidden values, of their gradients and of the results, each at most 2^-9 of a number, squared and halved on the way: 6 x 2^-9.
"""
import ctypes
import dataclasses

import torch
import torch.nn.functional as F
from torch._inductor import select_algorithm

from gpu_common import captured, interleaved, pointer, relative_error, run_products, stream

ACT = ctypes.c_char_p(b"leaky_relu_squared")


@dataclasses.dataclass
class Case:
    rows: int
    width: int
    hidden: int
    backward: bool

    @property
    def name(self):
        return f"LeakyReLU^2 MLP {'forward + backward' if self.backward else 'forward'}"

    @property
    def flops(self):
        return (12 if self.backward else 4) * self.rows * self.width * self.hidden


def cases():
    return [Case(*size, backward) for size in ((98304, 512, 2048), (16384, 1024, 4096), (8192, 4096, 16384)) for backward in (False, True)]


def mlp(x, w1, w2):
    return F.linear(F.leaky_relu(F.linear(x, w1), 0.5).square(), w2)


class Buffers:
    def __init__(self, case, native):
        self.case = case
        new = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        self.x, self.dy = new(case.rows, case.width), new(case.rows, case.width)
        self.w1, self.w2 = new(case.hidden, case.width) * case.width**-0.5, new(case.width, case.hidden) * case.hidden**-0.5
        self.h, self.dh = (torch.full((case.rows, case.hidden), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.y, self.dx = torch.full_like(self.x, float("nan")), torch.full_like(self.x, float("nan"))
        self.dw1, self.dw2 = (torch.zeros_like(w, dtype=torch.float32) for w in (self.w1, self.w2))
        bytes_ = ctypes.c_int64()
        native.sign_bytes(case.rows, case.hidden, ctypes.byref(bytes_))
        self.signs = torch.empty(bytes_.value, dtype=torch.uint8, device="cuda")
        self.workspace = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")

    def ours(self, native):
        case, room = self.case, (pointer(self.workspace), self.workspace.numel())

        def call(_):
            native.wide_mlp(pointer(self.x), pointer(self.w1), pointer(self.w2), pointer(self.h), pointer(self.signs if case.backward else None),
                            pointer(self.y), case.rows, case.width, case.hidden, ACT, *room, stream())
            if case.backward:
                native.wide_mlp_backward(pointer(self.dy), pointer(self.x), pointer(self.w1), pointer(self.w2), pointer(self.h),
                                         pointer(self.signs), pointer(self.dh), pointer(self.dx), pointer(self.dw1), pointer(self.dw2),
                                         case.rows, case.width, case.hidden, ACT, *room, stream())
        return call

    def peer(self, function):
        if not self.case.backward:
            def forward(_):
                with torch.no_grad():
                    return function(self.x, self.w1, self.w2)
            return forward
        leaves = [t.detach().requires_grad_() for t in (self.x, self.w1, self.w2)]
        return lambda _: torch.autograd.grad(function(*leaves), leaves, self.dy)

    def bare(self):
        dw1, dw2 = torch.empty_like(self.w1), torch.empty_like(self.w2)

        def call(_):
            torch.mm(self.x, self.w1.t(), out=self.h)
            torch.mm(self.h, self.w2.t(), out=self.y)
            if self.case.backward:
                torch.mm(self.dy, self.w2, out=self.dh)
                torch.mm(self.dy.t(), self.h, out=dw2)
                torch.mm(self.dh, self.w1, out=self.dx)
                torch.mm(self.dh.t(), self.x, out=dw1)
        return call


def check(buffers, native):
    case, chunk = buffers.case, 8192
    buffers.ours(native)(0)
    torch.cuda.synchronize()
    w1, w2 = (w.float().requires_grad_(case.backward) for w in (buffers.w1, buffers.w2))
    worst = 0.0
    for at in range(0, case.rows, chunk):
        x = buffers.x[at:at + chunk].float().requires_grad_(case.backward)
        y = mlp(x, w1, w2)
        worst = max(worst, relative_error([buffers.y[at:at + chunk]], [y.detach()]))
        if case.backward:
            y.backward(buffers.dy[at:at + chunk].float())
            worst = max(worst, relative_error([buffers.dx[at:at + chunk]], [x.grad]))
    if case.backward:
        worst = max(worst, relative_error([buffers.dw1, buffers.dw2], [w1.grad, w2.grad]))
    return worst, 6 * 2.0**-9


def measure(case, native, ceiling):
    buffers = Buffers(case, native)
    error, tolerance = check(buffers, native)
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    compiled = torch.compile(mlp, fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs")
    calls = 4
    graphs = {"ours": captured(buffers.ours(native), calls)}
    for name, function in (("torch_eager", mlp), ("torch_compile", compiled)):
        graphs[name] = captured(buffers.peer(function), calls, on=torch.cuda.Stream())
    with torch.no_grad():
        graphs["bare_products"] = captured(buffers.bare(), calls)
    us, spread = interleaved({name: g[0] for name, g in graphs.items()}, calls, rounds=9)
    return {"name": case.name, "shape": [case.rows, case.width, case.hidden], "dtype": "bf16", "ours_us": us.pop("ours"), "peers": us,
            "limit_us": case.flops / ceiling["bf16_TFLOPs"] * 1e-6, "error": error, "tolerance": tolerance, "p20_p80_us": spread}


if __name__ == "__main__":
    select_algorithm.PRINT_AUTOTUNE = False
    run_products("wide_mlp", cases(), 1, measure, lambda c: f"{c.name} {c.rows} x {c.width} x {c.hidden}")
