"""RMSNorm on a GPU, forward and backward: Ingot's shipped entry points beside PyTorch eager, torch.compile, Liger-Kernel (Triton), QuACK and,
if its source is given, the original project (MGRrmsnorm). Writes bench/results/<gpu>/rmsnorm.json.

    python3 bench/peers/gpu_rmsnorm.py --native build/cuda/libingot_bench.so [--origin MGRrmsnorm/src] [--liger WHEEL] [--wheels FOLDER]
                                       [--sweep FILE] [--only TEXT] [--quick]

Backward passes are timed alone, with random upstream gradients: dx, and dw where there is a weight. Two peers
have side effects: Liger writes dx over dy, which therefore changes from replay to replay, and the original project accumulates dw in 16 bits.
"""
import ctypes
import dataclasses
import pathlib
import subprocess

import torch
import torch.nn.functional as F

from gpu_common import DTYPES, backward_of, captured, compared, import_peer, pointer, relative_error, rotation, run_suite, stream, sweep

EPS = 1e-5


@dataclasses.dataclass
class Case:
    rows: int
    cols: int
    dtype: str = "bf16"
    backward: bool = False
    weight: bool = True
    residual: bool = False  # forward: x + residual is normalised and kept; backward: another gradient reaches the sum

    @property
    def name(self):
        return "RMSNorm" + (" + residual" if self.residual else "") + ("" if self.weight else ", no weight") + (", backward" if self.backward else "")

    @property
    def shape(self):
        return [self.rows, self.cols]

    @property
    def bytes(self):
        tensors = (3 if self.backward else 2) + (1 if self.backward else 2) * self.residual
        return (tensors * self.rows + self.weight) * self.cols * DTYPES[self.dtype].itemsize + 4 * self.rows * self.backward  # rstd is read


FORWARD = [(64, 4096), (512, 4096), (4096, 4096), (32768, 4096), (16384, 4096, "f32"), (786432, 64), (786432, 128), (300000, 192), (131072, 256), (65536, 1024),
           (32768, 2880), (8192, 16384), (2048, 65536), (2048, 65536, "f32")]
# torch.compile takes 10 to 30 s to tune one backward pass.
BACKWARD = [(4096, 4096), (32768, 4096), (16384, 4096, "f32"), (65536, 1024), (8192, 16384), (2048, 65536)]
CASES = ([Case(*s) for s in FORWARD] + [Case(32768, 4096, residual=True), Case(98304, 512, weight=False)]
         + [Case(*s, backward=True) for s in BACKWARD] + [Case(32768, 4096, backward=True, residual=True)])


class Buffers:
    """Enough inputs that a replay never finds an input in L2, and separate outputs for each call; weights are not rotated."""

    def __init__(self, case, native, l2_bytes):
        self.case = case
        self.sets, self.calls, self.cached = rotation(case.bytes, l2_bytes, most=200)
        dtype = DTYPES[case.dtype]
        new = lambda: torch.randn(case.rows, case.cols, device="cuda", dtype=dtype)  # noqa: E731
        empty = lambda: torch.full((case.rows, case.cols), float("nan"), device="cuda", dtype=dtype)  # noqa: E731
        self.x = [new() for _ in range(self.sets)]
        self.w = torch.randn(case.cols, device="cuda", dtype=dtype) * 0.5 + 1 if case.weight else None
        self.r = [new() for _ in range(self.sets)] if case.residual else None  # or the gradient that reaches the sum
        self.y = [empty() for _ in range(self.calls)]                          # or dx
        self.s = [empty() for _ in range(self.calls)] if case.residual and not case.backward else None
        if case.backward:
            self.dy = [new() for _ in range(self.sets)]
            self.rstd = [rstd_of(x) for x in self.x]
            self.dw = torch.zeros(case.cols, device="cuda") if case.weight else None
            size = (ctypes.c_int64 * 1)()
            native.rmsnorm_workspace(case.dtype.encode(), case.rows, case.cols, size)
            self.workspace = torch.empty(size[0], device="cuda", dtype=torch.uint8)

    def ours(self, native, config=None):
        case, name = self.case, self.case.dtype.encode()
        end = (case.rows, case.cols, ctypes.c_double(EPS), config)

        def forward(i):
            k = i % self.sets
            native.rmsnorm(name, pointer(self.x[k]), name, pointer(self.w), pointer(self.r[k] if self.r else None),
                           pointer(self.s[i] if self.s else None), pointer(self.y[i]), pointer(None), *end, stream())

        def backward(i):
            k = i % self.sets
            native.rmsnorm_backward(name, pointer(self.x[k]), name, pointer(self.w), pointer(self.r[k] if self.r else None), pointer(self.dy[k]),
                                    pointer(self.rstd[k]), pointer(self.y[i]), pointer(self.dw), pointer(self.workspace), self.workspace.numel(),
                                    *end, stream())
        return backward if case.backward else forward

    def leaves(self, k, dtype=None):
        return tuple(t.to(dtype or t.dtype).detach().requires_grad_() for t in self.given(k))

    def given(self, k):
        second = [self.r[k]] if self.r and not self.case.backward else []
        return [self.x[k], *second, *([self.w] if self.case.weight else [])]

    def upstream(self, k):
        return (self.dy[k], self.r[k]) if self.r else self.dy[k]

    def peer(self, function):
        if self.case.backward:
            return backward_of(function, [self.leaves(k) for k in range(self.sets)], [self.upstream(k) for k in range(self.sets)], self.calls)
        return captured(lambda i: function(*self.given(i % self.sets)), self.calls)

    def liger(self):
        from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward
        if not self.case.backward:
            return captured(lambda i: rms_norm_forward(self.x[i % self.sets], self.w, EPS, 0.0, "llama", None)[0], self.calls)
        _, _, _, block, warps, mode = rms_norm_forward(self.x[0], self.w, EPS, 0.0, "llama", None)
        dy = [t.clone() for t in self.dy]
        return captured(lambda i: rms_norm_backward(dy[i % self.sets], self.x[i % self.sets], self.w, self.rstd[i % self.sets], 0.0, mode, block, warps,
                                                    True, None), self.calls)

    def origin(self, library):
        """Like `captured`, for launches that cannot be captured: a function that makes all calls."""
        case, pick = self.case, [i % self.sets for i in range(self.calls)]
        if case.backward and case.cols > 16384 * (2 if case.dtype != "f32" else 1):
            raise RuntimeError("takes at most 16,384 columns of fp32 or 32,768 of 16 bits")
        several = lambda tensors: (ctypes.c_void_p * self.calls)(*[t.data_ptr() for t in tensors])  # noqa: E731
        kind = (DTYPES[case.dtype].itemsize, ctypes.c_bool(case.dtype == "bf16"), self.calls)
        out, x = several(self.y), several([self.x[k] for k in pick])
        if not case.backward:
            inv = torch.empty(case.rows, device="cuda")
            return (lambda: succeed(library.mgrrmsnorm(*kind, out, x, pointer(inv), pointer(self.w), case.rows, case.cols, ctypes.c_float(EPS))),)
        dw = torch.zeros_like(self.w)
        dy, inv = several([self.dy[k] for k in pick]), several([self.rstd[k] for k in pick])
        return (lambda: succeed(library.mgrrmsnorm_backward(*kind, out, pointer(dw), dy, x, pointer(self.w), inv, case.rows, case.cols)),)


def succeed(status):
    if status != 0:
        raise RuntimeError("refuses this call")


def rstd_of(x):
    rstd = torch.empty(x.shape[0], device="cuda")
    step = max(1, (1 << 27) // x.shape[1])
    for a in range(0, x.shape[0], step):
        rstd[a:a + step] = torch.rsqrt(x[a:a + step].float().square().mean(-1) + EPS)
    return rstd


def norm(x, *w):
    return F.rms_norm(x, (x.shape[-1],), *w, eps=EPS)


def add_norm(x, r, *w):
    s = x + r
    return norm(s, *w), s


def keep_and_norm(x, *w):  # x is the sum, which other operations use too
    return norm(x, *w), x.view_as(x)


def quack_norm(quack):
    return lambda x, w=None: quack.rmsnorm(x, w, eps=EPS)


def quack_add_norm(quack):
    return lambda x, r, w=None: quack.rmsnorm(x, w, residual=r, eps=EPS, prenorm=True)


def plain(s, w, dtype):
    """The chain with a single rounding to `dtype` at the end; in fp64 the reference."""
    y = s * torch.rsqrt((s * s).mean(-1, keepdim=True) + EPS)
    return (y if w is None else y * w).to(dtype)


def plain_gradient(s, w, dy, dsum, dtype):
    rstd = torch.rsqrt((s * s).mean(-1, keepdim=True) + EPS)
    n = s * rstd
    g = dy if w is None else dy * w
    dx = rstd * (g - n * (g * n).mean(-1, keepdim=True))
    return (dx if dsum is None else dx + dsum).to(dtype), (dy * n).sum(0)


def check(buffers, native):
    """The relative error of a fresh call, and its tolerance: 1.5 times the error of fp32 sums with one rounding at the end. The largest
    single error may be a few roundoffs of the result (backward: of the row's largest value), dw the error of fp32 sums."""
    case, dtype = buffers.case, DTYPES[buffers.case.dtype]
    for t in [buffers.y[0]] + ([buffers.s[0]] if buffers.s else []) + ([buffers.x[0]] if not case.backward else []):
        t.fill_(float("nan")) if t is not buffers.x[0] else t.normal_(std=2)
    if case.backward and case.weight:
        buffers.dw.zero_()
    buffers.ours(native)(0)
    torch.cuda.synchronize()
    s = buffers.s[0] if buffers.s else buffers.x[0]
    if buffers.s:
        assert torch.equal(s, buffers.x[0] + buffers.r[0]), "sum differs from x + residual"
    ours = chain = total = worst = 0.0
    dw = torch.zeros(case.cols, device="cuda", dtype=torch.float64)
    step = max(1, (1 << 25) // case.cols)
    for a in range(0, case.rows, step):
        rows = slice(a, a + step)

        def results(of):
            w = buffers.w.to(of) if case.weight else None
            if not case.backward:
                return plain(s[rows].to(of), w, of if of == torch.float64 else dtype), None
            return plain_gradient(s[rows].to(of), w, buffers.dy[0][rows].to(of), buffers.r[0][rows].to(of) if buffers.r else None,
                                  of if of == torch.float64 else dtype)
        want, more_dw = results(torch.float64)
        off = buffers.y[0][rows].double() - want
        ours += off.square().sum().item()
        chain += (results(torch.float32)[0].double() - want).square().sum().item()
        total += want.square().sum().item()
        scale = want.abs().amax(-1, keepdim=True) if case.backward else want.abs().clamp_min(torch.finfo(dtype).tiny)
        worst = max(worst, (off.abs() / scale).max().item())
        if case.backward:
            dw += more_dw
    worst /= torch.finfo(dtype).eps / 2
    limit = 2.0 if case.dtype != "f32" else 16.0  # half an ulp of the result is 1 to 2 units; f32 also carries its sum's rounding
    assert worst <= limit, f"{case}: one element is off by {worst:.2f} roundoffs, expected at most {limit}"
    if case.backward and case.weight:
        off = relative_error([buffers.dw], [dw])
        assert off <= 2e-6, f"{case}: dw is off by {off:.1e} of its norm, expected at most 2e-6"
    return (ours / total) ** 0.5, 1.5 * (chain / total) ** 0.5


def build_origin(source, folder):
    target = pathlib.Path(folder) / "libmgrrmsnorm.so"
    subprocess.run(["nvcc", "-O3", "-gencode", "arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler", "-fPIC", "-Xlinker", "--exclude-libs=ALL", "-I", source,
                    str(pathlib.Path(__file__).with_name("mgrrmsnorm_peer.cu")), f"{source}/rmsnorm_kernel.cu", "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def measure(case, native, l2_bytes, copy_tbps, liger, origin):
    buffers = Buffers(case, native, l2_bytes)
    function = (keep_and_norm if case.backward else add_norm) if case.residual else norm
    others = {"liger": (liger, buffers.liger), "origin": (origin, lambda: buffers.origin(origin))} if case.weight and not case.residual else {}
    if not (case.residual and case.backward):
        _, quack = import_peer("quack")
        others["quack"] = quack, lambda: buffers.peer(quack_add_norm(quack) if case.residual else quack_norm(quack))
    return compared(case, buffers, function, buffers.ours(native), check(buffers, native), copy_tbps, others)


def configurations(case):
    """Every valid forward configuration, as libingot_bench's seven integers; the backward pass has no choice."""
    if case.backward:
        return
    vecs = case.cols * DTYPES[case.dtype].itemsize // 16
    for per_thread in (1, 2, 4, 8):
        if case.residual and per_thread == 8:
            continue
        rows = 4 // per_thread if per_thread < 4 else 1
        for group in (8, 16, 32, 64, 128, 256, 512, 1024):
            for cluster in (1, 2, 4, 8):
                room = per_thread * group * cluster
                if room < vecs or room >= 4 * max(vecs, 32) or (cluster > 1 and (rows > 1 or group < 128)):
                    continue
                for threads in sorted({group} if cluster > 1 else {max(group, 64), max(group, 128), max(group, 256)}):
                    for overlap, streaming in ((1, 0), (1, 1), (0, 1)):
                        yield [per_thread, rows, group, cluster, threads, overlap, streaming]


def sweep_case(case, native, l2_bytes):
    buffers = Buffers(case, native, l2_bytes)
    error, tolerance = check(buffers, native)
    return sweep(buffers, native, configurations(case)), error, tolerance


if __name__ == "__main__":
    run_suite("rmsnorm", CASES, CASES[2:5], measure, sweep_case,
              "origin: CUDA events over back-to-back calls (its launches cannot be captured); liger's backward works in place; "
              "in_L2: too small to rotate beyond L2", origin=("MGRrmsnorm's src folder", build_origin))
