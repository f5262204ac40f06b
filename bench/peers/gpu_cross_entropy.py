"""Linear + softcap + cross entropy on a GPU: losses and both gradients, beside PyTorch, torch.compile, Liger-Kernel, QuACK (of cases without softcap) and the three bare
products of the same sizes. Writes bench/results/<gpu>/cross_entropy.json, with the memory of each besides operands and gradients.

    python3 bench/peers/gpu_cross_entropy.py --native build/cuda/libingot_bench.so [--liger WHEEL] [--wheels FOLDER] [--only TEXT] [--quick]

One case is the mean loss of all rows, dx and dw, in one graph. Ingot adds to dw, like a training step with several passes; the peers write dw. All have dw in bf16,
as ingot.functional of few enough rows. Liger computes its gradients in the forward pass and accumulates dw in bf16. Liger waits for the GPU and cannot be captured,
so its calls, and QuACK's, are timed directly. Liger has separate rows beside PyTorch, because torch.compile tunes each row for most of a minute.
"""
import argparse
import ctypes
import dataclasses

import torch
import torch.nn.functional as F
from torch._inductor import select_algorithm

from gpu_common import (Native, add_peers, add_wheels, begin, captured, ceilings, import_liger, import_peer, in_a_line, interleaved, measure_each, peak_beside, pointer,
                        relative_error, stream)

SOFTCAP = 30.0


@dataclasses.dataclass
class Case:
    rows: int
    features: int
    vocab: int
    beside_liger: bool = False
    softcap: float = SOFTCAP  # 0: none

    @property
    def name(self):
        return f"linear{' + softcap' if self.softcap else ''} + cross entropy, with gradients" + (", beside Liger" if self.beside_liger else "")

    @property
    def flops(self):
        return 6 * self.rows * self.features * self.vocab


def cases():
    shapes = ((8192, 4096, 128256), (98304, 512, 8192), (8192, 2880, 201088), (16384, 768, 50304))
    plain = (4096, 4096, 128256)  # without softcap, as Liger and QuACK publish it
    return [Case(*shape, beside_liger=liger) for liger in (False, True) for shape in shapes] + [Case(*plain, liger, 0.0) for liger in (False, True)]


def loss_of(softcap):
    def function(x, w, targets):
        logits = F.linear(x, w).float()
        return F.cross_entropy(softcap * torch.tanh(logits / softcap) if softcap else logits, targets)
    return function


class Buffers:
    def __init__(self, case):
        self.case = case
        new = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        self.x, self.w = new(case.rows, case.features), new(case.vocab, case.features) * (2 * case.features**-0.5)
        self.targets = torch.randint(0, case.vocab, (case.rows,), device="cuda")
        self.targets32 = self.targets.int()
        self.loss = torch.full((case.rows,), float("nan"), device="cuda")
        self.dloss = torch.full((case.rows,), 1 / case.rows, device="cuda")
        self.dx, self.dw = torch.full_like(self.x, float("nan")), torch.zeros_like(self.w)

    def ours(self, native):
        case, bytes_ = self.case, ctypes.c_int64()
        native.linear_cross_entropy_workspace(case.rows, case.features, case.vocab, ctypes.byref(bytes_))
        self.workspace = torch.empty(bytes_.value, dtype=torch.uint8, device="cuda")

        def call(_):
            native.linear_cross_entropy(pointer(self.x), pointer(self.w), pointer(self.targets32), pointer(self.loss), pointer(self.dloss),
                                        pointer(self.dx), pointer(self.dw), case.rows, case.features, case.vocab, ctypes.c_double(case.softcap),
                                        pointer(self.workspace), self.workspace.numel(), stream())
        return call

    def peer(self, function):
        leaves = self.x.detach().requires_grad_(), self.w.detach().requires_grad_()
        return lambda _: torch.autograd.grad(function(*leaves, self.targets), leaves)

    def bare(self):
        logits = torch.empty(self.case.rows, self.case.vocab, device="cuda", dtype=torch.bfloat16)
        dw = torch.empty_like(self.w)

        def call(_):
            torch.mm(self.x, self.w.t(), out=logits)
            torch.mm(logits, self.w, out=self.dx)
            torch.mm(logits.t(), self.x, out=dw)
        return call


def check(buffers, native):
    """The worst relative error of dx and dw against PyTorch in fp32 by chunks of rows, and the tolerance of bf16. Rounding to 8 significant bits changes a number by
    at most 2^-8 of itself, and by 2^-8 / sqrt(3) in the mean of squares. dw is a product of two rounded operands, the gradients of the logits and x times each row's
    factor; its sum is rounded after each of n chunks, and the sum after k chunks has k / n of the final sum's squares. Independent errors add their squares:
    2 + (1 + ... + n) / n = 2 + (n + 1) / 2 roundings. dx has fewer."""
    case, chunk = buffers.case, 1024
    buffers.dw.zero_()
    buffers.ours(native)(0)
    torch.cuda.synchronize()
    w = buffers.w.float()
    dw, dx, losses = torch.zeros_like(w), torch.empty_like(buffers.x, dtype=torch.float32), torch.empty_like(buffers.loss)
    for at in range(0, case.rows, chunk):
        rows = slice(at, min(at + chunk, case.rows))
        x = buffers.x[rows].float()
        logits, slope = F.linear(x, w), 1.0
        if case.softcap:
            t = torch.tanh(logits / case.softcap)
            logits, slope = case.softcap * t, 1 - t * t
        losses[rows] = F.cross_entropy(logits, buffers.targets[rows], reduction="none")
        d = torch.softmax(logits, -1)
        d[torch.arange(d.size(0), device="cuda"), buffers.targets[rows]] -= 1
        d *= slope / case.rows
        dx[rows] = d @ w
        dw += d.t() @ x
    worst = max(relative_error([buffers.dx], [dx]), relative_error([buffers.dw], [dw]))
    assert relative_error([buffers.loss], [losses]) < 1e-4, "losses are wrong"
    return worst, tolerance_of(case)


def chunks_of(case):
    """The number of chunks into which the kernels divide the rows: at most 16,384 rows and 1.3 GB of workspace each (linear_cross_entropy.cu)."""
    row_bytes = 2 * case.vocab + 4 * -(-case.vocab // 128) + 8 + 6 * case.features
    return -(-case.rows // min(16384, int(1.3e9) // row_bytes // 128 * 128))


def tolerance_of(case):
    return 2.0**-8 / 3**0.5 * (2 + (chunks_of(case) + 1) / 2)**0.5


def liger_loss(ops, softcap):
    # no bias and no weights of classes, ignored index, no z-loss, no smoothing, mean
    return lambda x, w, targets: ops.LigerFusedLinearCrossEntropyFunction.apply(x, w, targets, None, None, -100, 0.0, 0.0, "mean", softcap or None)[0]


def quack_losses(library, case):
    """The forms of QuACK's loss, of which the faster counts. The fused one of 0.6.5 refuses a chunk of as many rows as there are features ("m == n")."""
    chunk = 2048 if case.features == 4096 else 4096
    return {"fused": lambda x, w, targets: library.chunked_linear_cross_entropy(x, w, targets, chunk_size=chunk, use_scaled_exp=True),
            "products and loss apart": lambda x, w, targets: library.chunked_linear_cross_entropy(x, w, targets, use_scaled_exp=False)}


def fastest(calls, time_of):
    """The name of the fastest of `calls`, by name, of which one must run; time_of(call) may raise."""
    times, failed = {}, None
    for name, call in calls.items():
        try:
            times[name] = time_of(call)
        except Exception as e:
            print(f"{name}: {in_a_line(e)}", flush=True)
            failed = failed or e
    if not times:
        raise failed
    return min(times, key=times.get)


def measure(case, native, ceiling, liger):
    buffers = Buffers(case)
    error, tolerance = check(buffers, native)
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    functions, absent = {"torch_eager": loss_of(case.softcap)}, {}
    if case.beside_liger:
        absent["torch_compile"] = "it is in the row without Liger"
    else:
        functions["torch_compile"] = torch.compile(loss_of(case.softcap), fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs")
    form, gradients = {}, 2 * (buffers.x.numel() + buffers.w.numel())
    memory, graphs, calls = {"ours": buffers.workspace.numel()}, {"ours": captured(buffers.ours(native), 2)}, 2
    for name, function in functions.items():
        call = buffers.peer(function)
        call(0)
        memory[name] = peak_beside(call, gradients)
        graphs[name] = captured(call, 1, on=torch.cuda.Stream())
    if case.beside_liger:
        def ready(name, function):
            call = buffers.peer(function)
            call(0)
            memory[name] = peak_beside(call, gradients)
            return (lambda: call(0),)
        add_peers(graphs, absent, {"liger": (liger, lambda: ready("liger", liger_loss(liger, case.softcap)))})
        if not case.softcap:  # QuACK has none
            _, quack = import_peer("quack.linear_cross_entropy")

            def quack_ready():
                losses = quack_losses(quack, case)
                calls = {name: buffers.peer(loss) for name, loss in losses.items()}
                form["quack_form"] = fastest(calls, lambda call: call(0) and interleaved({"quack": lambda: call(0)}, 1, rounds=3)[0]["quack"])
                return ready("quack", losses[form["quack_form"]])
            add_peers(graphs, absent, {"quack": (quack, quack_ready)})
    with torch.no_grad():
        graphs["bare_products"] = captured(buffers.bare(), 1)
    us, spread = interleaved({name: g[0] for name, g in graphs.items()}, 1, rounds=9)
    us["ours"] /= calls
    return {"name": case.name, "shape": [case.rows, case.features, case.vocab], "dtype": "bf16",
            "ours_us": us.pop("ours"), "peers": us, "limit_us": case.flops / ceiling["bf16_TFLOPs"] * 1e-6, "error": error,
            "tolerance": tolerance, "memory_bytes": memory, **form, **({"absent": absent} if absent else {}), "p20_p80_us": spread}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--native", required=True)
    parser.add_argument("--liger", help="a wheel of Liger-Kernel, where it is not installed")
    add_wheels(parser)
    parser.add_argument("--only", help="only cases whose shape or name holds this, and no report")
    parser.add_argument("--quick", action="store_true", help="the first case, and no report")
    options = parser.parse_args()
    torch.manual_seed(0)
    select_algorithm.PRINT_AUTOTUNE = False
    native = Native(options.native)
    liger = import_liger(options.liger)

    def said(r):
        rows, features, vocab = r["shape"]
        return (f"{r['case']}: ours {r['ours_us']:8.1f} us {6 * rows * features * vocab / r['ours_us'] * 1e-6:4.0f} TFLOP/s  "
                + "  ".join(f"{p} {us:.1f} ({us / r['ours_us']:.3f}x)" for p, us in r["peers"].items())
                + "  memory " + ", ".join(f"{p} {b / 1e9:.2f} GB" for p, b in r["memory_bytes"].items())
                + f"  error {r['error']:.1e} <= {r['tolerance']:.1e}  {r.get('absent') or ''}")
    measure_each(begin("cross_entropy", options, cases(), lambda c: f"{c.rows} x {c.features} x {c.vocab}, {c.name}"), lambda: ceilings(native),
                 lambda case, ceiling: measure(case, native, ceiling, liger), said)


if __name__ == "__main__":
    main()
