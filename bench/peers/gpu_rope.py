"""Rotary embeddings on a GPU: Ingot's shipped entry points beside PyTorch eager, torch.compile and Liger-Kernel (Triton), forward
and backward, alone and fused with the norm of queries and keys and a gain. Writes bench/results/<gpu>/rope.json.

    python3 bench/peers/gpu_rope.py --native build/cuda/libingot_bench.so [--liger WHEEL] [--sweep FILE] [--only TEXT] [--quick]

One tensor (T, H, D) holds the heads of queries and keys. PyTorch runs the function of Hugging Face's models, with cos and sin of
every token and dimension looked up in advance in x's type; Ingot reads positions and a table in fp32. Liger rotates in place, queries
and keys in two tensors of the same heads together; where only part of a head is rotated, Liger's peer is Ingot's rotation in place, because neither
moves the rest. Backward passes are timed alone.
"""
import ctypes
import dataclasses

import torch
import torch.nn.functional as F

from gpu_common import DTYPES, backward_of, captured, compared, pointer, relative_error, rotation, run_suite, stream, sweep

EPS = 2.0**-23
THETA = 10000.0


@dataclasses.dataclass
class Case:
    tokens: int
    q_heads: int
    kv_heads: int
    d: int = 128
    rotary: int = 0  # 0: all of d
    dtype: str = "bf16"
    norm: bool = False
    backward: bool = False
    interleaved: bool = False
    in_place: bool = False  # only the rotated part is read and written

    def __post_init__(self):
        self.rotary = self.rotary or self.d
        self.heads = self.q_heads + self.kv_heads

    @property
    def name(self):
        parts = ["QK norm + RoPE + gain" if self.norm else "RoPE", *["backward"] * self.backward, *["interleaved"] * self.interleaved,
                 *["in place"] * self.in_place]
        return ", ".join(parts + [f"{self.rotary} of {self.d}"] * (self.rotary != self.d))

    @property
    def shape(self):
        return [self.tokens, self.heads, self.d]

    @property
    def size(self):
        return self.tokens * self.heads * self.d * DTYPES[self.dtype].itemsize

    @property
    def bytes(self):  # x and y, or x, dy and dx; every token's row of both tables and its position
        moved = self.size * self.rotary // self.d if self.in_place else self.size
        return moved * (3 if self.norm and self.backward else 2) + self.tokens * (4 * self.rotary + 4)


def cases():
    big = dict(tokens=16384, q_heads=32, kv_heads=8)
    out = [Case(**big), Case(**big, backward=True), Case(**big, interleaved=True), Case(**big, norm=True), Case(**big, norm=True, backward=True)]
    out += [Case(**big, rotary=64), Case(**big, rotary=64, in_place=True)]
    out += [Case(65536, 8, 4, d=64, rotary=16, norm=True, backward=True), Case(64, 32, 8, norm=True)]
    return out


def turn_in_place(x, cos, sin, interleaved):
    head = x[..., :cos.shape[-1]]
    head.copy_(turned(head, cos, sin, interleaved))
    return x


def turned(x, cos, sin, interleaved):
    """Rotation of the first cos.shape[-1] dimensions, in the form of Hugging Face's models."""
    rotary = cos.shape[-1]
    head, rest = x[..., :rotary], x[..., rotary:]
    if interleaved:
        other = torch.stack((-head[..., 1::2], head[..., ::2]), -1).flatten(-2)
    else:
        other = torch.cat((-head[..., rotary // 2:], head[..., :rotary // 2]), -1)
    y = head * cos + other * sin
    return torch.cat((y, rest), -1) if rest.shape[-1] else y


class Buffers:
    """Enough inputs that a replay never finds an input in L2, and an output for each call; tables and gains are not rotated."""

    def __init__(self, case, l2_bytes):
        self.case = case
        self.sets, self.calls, self.cached = rotation(case.bytes, l2_bytes)
        dtype = DTYPES[case.dtype]
        new = lambda: torch.randn(case.shape, device="cuda", dtype=dtype)  # noqa: E731
        self.x = [new() for _ in range(self.sets)]
        self.dy = [new() for _ in range(self.sets)] if case.backward else None
        self.out = None if case.in_place else [torch.full_like(self.x[0], float("nan")) for _ in range(self.calls)]
        self.gain = torch.randn(case.heads, device="cuda") * 0.5 + 1
        self.dgain = torch.zeros(case.heads, device="cuda")
        self.positions = torch.arange(case.tokens, device="cuda", dtype=torch.int32)
        theta = THETA ** (-torch.arange(0, case.rotary, 2, device="cuda", dtype=torch.float64) / case.rotary)
        angle = torch.arange(case.tokens, device="cuda", dtype=torch.float64)[:, None] * theta
        self.cos, self.sin = angle.cos().float(), angle.sin().float()

    def ours(self, native, config=None):
        case = self.case
        table = (pointer(self.positions), pointer(self.cos), pointer(self.sin))
        sizes = (case.tokens, case.heads, case.d, case.rotary // 2, case.tokens)
        name = case.dtype.encode()
        if not case.norm:
            inputs = self.dy if case.backward else self.x
            out = self.out or [inputs[i % self.sets] for i in range(self.calls)]
            return lambda i: native.rope(name, pointer(inputs[i % self.sets]), pointer(out[i]), *table, *sizes, int(case.interleaved),
                                         int(case.backward), config, stream())
        eps, gain = ctypes.c_double(EPS), pointer(self.gain)
        if not case.backward:
            return lambda i: native.qk_norm_rope(name, pointer(self.x[i % self.sets]), pointer(self.out[i]), *table, gain, *sizes, eps, config,
                                                 stream())
        size = ctypes.c_int64()
        native.qk_norm_rope_workspace(case.tokens, case.heads, ctypes.byref(size))
        self.workspace = torch.full((max(1, size.value),), 0xff, device="cuda", dtype=torch.uint8)
        return lambda i: native.qk_norm_rope_backward(
            name, pointer(self.x[i % self.sets]), pointer(self.dy[i % self.sets]), pointer(self.out[i]), *table, gain, pointer(self.dgain),
            pointer(self.workspace), self.workspace.numel(), *sizes, eps, config, stream())

    def table(self, dtype):
        """cos and sin of every rotated dimension, broadcast over heads."""
        spread = (lambda t: t.repeat_interleave(2, -1)) if self.case.interleaved else (lambda t: torch.cat((t, t), -1))
        return tuple(spread(t).to(dtype)[:, None] for t in (self.cos, self.sin))

    def forward(self, dtype):
        """The plain PyTorch function of (x) or (x, gain)."""
        case, (cos, sin) = self.case, self.table(dtype)
        if not case.norm:
            turn = turn_in_place if case.in_place else turned
            return lambda x: turn(x, cos, sin, case.interleaved)
        return lambda x, gain: turned(F.rms_norm(x, (case.d,), None, EPS), cos, sin, case.interleaved) * gain[:, None].to(x.dtype)

    def leaves(self, k, grad=False):
        out = (self.x[k], self.gain) if self.case.norm else (self.x[k],)
        return tuple(t.detach().requires_grad_() for t in out) if grad else out

    def peer(self, function):
        if self.case.backward:
            return backward_of(function, [self.leaves(k, True) for k in range(self.sets)], self.dy, self.calls)
        with torch.no_grad():
            return captured(lambda i: function(*self.leaves(i % self.sets)), self.calls)

    def liger(self, ops):
        case = self.case
        split = lambda t: [h.contiguous()[None].transpose(1, 2) for h in t.split([case.q_heads, case.kv_heads], 1)]  # noqa: E731
        pairs = [split(t) for t in (self.dy if case.backward else self.x)]
        cos, sin = (t[:, 0][None].contiguous() for t in self.table(DTYPES[case.dtype]))
        run = ops.rope_backward if case.backward else ops.rope_forward
        run(*[t.clone() for t in pairs[0]], cos, sin)
        return captured(lambda i: run(*pairs[i % self.sets], cos, sin), self.calls)


def check(buffers, native):
    """The relative error of a fresh call, and its tolerance: 1.5 times the error of the plain chain in the same dtype."""
    case = buffers.case
    buffers.x[0].normal_(std=2)
    before = [t.clone() for t in buffers.leaves(0)]
    if not case.in_place:
        buffers.out[0].fill_(float("nan"))
    buffers.dgain.zero_()
    buffers.ours(native)(0)
    torch.cuda.synchronize()

    def results(dtype):
        function, leaves = buffers.forward(dtype), [t.to(dtype, copy=True) for t in before]
        if dtype != torch.float64 and case.norm:
            leaves[1] = buffers.gain  # stays in fp32, as in Ingot
        if not case.backward:
            return (function(*leaves),)
        leaves = [t.detach().requires_grad_() for t in leaves]
        return torch.autograd.grad(function(*leaves), leaves, buffers.dy[0].to(dtype))
    got = (buffers.x[0] if case.in_place else buffers.out[0],) + ((buffers.dgain,) if case.norm and case.backward else ())
    want, chain = results(torch.float64), results(DTYPES[case.dtype])
    return max(((relative_error([g], [w]), 1.5 * relative_error([c], [w])) for g, w, c in zip(got, want, chain)), key=lambda r: r[0] / r[1])


def measure(case, native, l2_bytes, copy_tbps, liger, _):
    buffers = Buffers(case, l2_bytes)
    has_liger = not case.norm and not case.interleaved and (case.in_place or case.rotary == case.d)
    return compared(case, buffers, buffers.forward(DTYPES[case.dtype]), buffers.ours(native), check(buffers, native), copy_tbps,
                    {"liger": (liger, lambda: buffers.liger(liger))} if has_liger else {})


def configurations(case):
    """Every valid configuration, as libingot_bench's eight integers."""
    vectors = -(-case.d * DTYPES[case.dtype].itemsize // 16)
    lanes = -(-vectors // 2)
    for threads in (64, 128, 256):
        for iterations in (1, 2, 4, 8, 16) if case.norm else (1,):
            for overlap, evict_first in ((1, 1),) if case.norm else ((1, 0), (1, 1)):
                yield [1, lanes, threads, iterations, overlap, evict_first, 2, -1]
                if vectors & (vectors - 1) == 0 and not case.norm:
                    yield [1, vectors, threads, 1, overlap, evict_first, 1, -1]


def sweep_case(case, native, l2_bytes):
    buffers = Buffers(case, l2_bytes)
    error, tolerance = check(buffers, native)
    return sweep(buffers, native, configurations(case)), error, tolerance


if __name__ == "__main__":
    run_suite("rope", cases(), cases()[:5], measure, sweep_case, "liger: in place, queries and keys apart; in_L2: too small to rotate beyond L2")
