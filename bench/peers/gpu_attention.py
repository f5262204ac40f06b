"""Causal attention on a GPU, forward and backward: Ingot's shipped entry points beside PyTorch's flash attention (eager; of packed documents
varlen_attn), cuDNN's through scaled_dot_product_attention, and FlexAttention compiled as one graph. Writes bench/results/<gpu>/attention.json.

    python3 bench/peers/gpu_attention.py --native build/cuda/libingot_bench.so [--wheels FOLDER] [--only TEXT] [--quick]

With the wheels of flash-attention 3 (flash_attn_interface) or 4 (flash_attn.cute) in FOLDER, or installed, flash-attention is a peer, too: it adds the
gradient of q in any order, and beside Ingot's backward pass in a fixed order also with deterministic=True (the peers named _fixed). Operations are counted of visible pairs only: 4 per pair, head and width forward, 10 backward. Backward passes are timed alone. The limit is these operations at
the rate of a large matrix product measured in the same run.
"""
import ctypes
import dataclasses
import inspect
import math
import random

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

from gpu_common import add_peers, backward_of, captured, import_peer, interleaved, pointer, relative_error, run_products, stream

FORMS = ["", " in any order"]
SETS = 2  # sets of inputs; each is larger than L2


@dataclasses.dataclass
class Case:
    heads: int
    kv_heads: int
    width: int
    lengths: list  # lengths of the segments
    backward: bool = False
    form: int = 0  # of a backward pass, of FORMS

    @property
    def regular(self):
        return len(set(self.lengths)) == 1

    @property
    def name(self):
        where = "" if self.regular else f", {len(self.lengths)} documents"
        return f"Attention of {self.width}-wide heads, {self.heads}/{self.kv_heads}{where}" + ", backward" * self.backward + FORMS[self.form]

    @property
    def shape(self):
        return [len(self.lengths), self.lengths[0]] if self.regular else [sum(self.lengths)]

    @property
    def native_form(self):  # as flash_attn_func calls the kernels, where all lengths are equal
        return self.form + 2 * self.regular

    @property
    def flops(self):
        return sum(n * (n + 1) // 2 for n in self.lengths) * self.heads * self.width * (10 if self.backward else 4)


def documents(tokens=98304, count=195, median=390, cap=2048):
    """Lengths like those of a small GPT's training documents: log-normal, cut at the context."""
    draw = random.Random(7)
    lengths = [min(cap, max(1, int(draw.lognormvariate(math.log(median), 0.75)))) for _ in range(count)]
    short = tokens - sum(lengths)
    for i in range(count):  # distributes the difference to the wanted sum
        step = max(-lengths[i] + 1, min(cap - lengths[i], math.ceil(short / (count - i)) if short > 0 else math.floor(short / (count - i))))
        lengths[i] += step
        short -= step
    assert sum(lengths) == tokens
    return lengths


def cases():
    shapes = [(16, 16, 128, [8192] * 2), (64, 8, 64, [4096] * 4), (8, 4, 64, [2048] * 48), (8, 4, 64, documents()), (8, 4, 128, documents())]
    forms = [Case(*shapes[i], True, 1) for i in (0, 1, 3)]
    return [*(Case(*s, backward=b) for s in shapes for b in (False, True)), *forms]


class Buffers:
    def __init__(self, case):
        self.case = case
        tokens = self.tokens = sum(case.lengths)
        new = lambda h: torch.randn(tokens, h, case.width, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        self.inputs = [(new(case.heads), new(case.kv_heads), new(case.kv_heads)) for _ in range(SETS)]
        self.upstream = [new(case.heads) for _ in range(SETS)]
        self.cu = torch.tensor([0, *torch.tensor(case.lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
        self.out = [torch.full_like(u, float("nan")) for u in self.upstream]
        self.lse = [torch.full((case.heads, tokens), float("nan"), device="cuda") for _ in range(SETS)]
        self.gradients = [tuple(torch.full_like(t, float("nan")) for t in given) for given in self.inputs]
        self.calls = 20 if case.flops < 2e12 else 4

    def ours(self, native):
        case, size = self.case, ctypes.c_int64(0)
        native.attention_workspace(len(case.lengths), self.tokens, case.heads, case.kv_heads, case.width, case.native_form, ctypes.byref(size))
        workspace = torch.empty(size.value, dtype=torch.uint8, device="cuda")

        def run(i, backward):
            i %= SETS
            more = [self.upstream[i], *self.gradients[i], workspace] if backward else [None] * 5
            native.attention(*map(pointer, self.inputs[i]), pointer(self.cu), len(case.lengths), pointer(self.out[i]), pointer(self.lse[i]),
                             *map(pointer, more), self.tokens, case.heads, case.kv_heads, case.width, case.native_form, stream())
        if case.backward:
            for i in range(SETS):
                run(i, False)
        return lambda i: run(i, case.backward)

    def batched(self, t):  # (B, H, S, D)
        return t.unflatten(0, (len(self.case.lengths), -1)).transpose(1, 2)

    def sdpa(self, backend):
        def function(q, k, v):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*(self.batched(t) for t in (q, k, v)), is_causal=True, enable_gqa=True)
        return function

    def varlen(self):
        from torch.nn.attention.varlen import varlen_attn
        longest = max(self.case.lengths)
        group = self.case.heads // self.case.kv_heads
        known = inspect.signature(varlen_attn).parameters
        options = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
        if group > 1 and "enable_gqa" in known:
            options["enable_gqa"], group = True, 1

        def function(q, k, v):
            k, v = (t.repeat_interleave(group, 1) for t in (k, v)) if group > 1 else (k, v)
            return varlen_attn(q, k, v, self.cu, self.cu, longest, longest, **options)
        return function

    def flash(self, library, deterministic=False):
        """flash-attention 3, or 4 (in CuTe), whose functions have the same names."""
        longest, options = max(self.case.lengths), dict(causal=True, deterministic=deterministic)

        def function(q, k, v):
            if self.case.regular:
                out = library.flash_attn_func(*(t.unflatten(0, (len(self.case.lengths), -1)) for t in (q, k, v)), **options)
            else:
                out = library.flash_attn_varlen_func(q, k, v, cu_seqlens_q=self.cu, cu_seqlens_k=self.cu, max_seqlen_q=longest, max_seqlen_k=longest, **options)
            out = out[0] if isinstance(out, tuple) else out
            return out.flatten(0, 1) if self.case.regular else out
        return function

    def flex(self):
        if self.case.regular:
            visible, length = (lambda b, h, i, j: i >= j), self.case.lengths[0]
        else:
            of = torch.repeat_interleave(torch.arange(len(self.case.lengths), device="cuda"), self.cu.diff())
            visible, length = (lambda b, h, i, j: (i >= j) & (of[i] == of[j])), self.tokens
        try:
            mask = flex_attention.create_block_mask(visible, None, None, length, length, device="cuda")
        except torch.OutOfMemoryError:  # without compilation the mask of all pairs of tokens takes 72 GiB; compiling takes a minute
            mask = torch.compile(flex_attention.create_block_mask)(visible, None, None, length, length, device="cuda")
        # max-autotune takes minutes: of 2 x 8,192 it took 1.68 times our time forward for 1.95, 1.35 backward for 1.35.
        compiled = torch.compile(flex_attention.flex_attention, fullgraph=True, dynamic=False)

        def function(q, k, v):
            q, k, v = (self.batched(t) for t in (q, k, v)) if self.case.regular else (t.transpose(0, 1)[None] for t in (q, k, v))
            return compiled(q, k, v, block_mask=mask, enable_gqa=self.case.heads != self.case.kv_heads)
        return function

    def peer(self, function, packed=False):
        if self.case.backward:
            like = (lambda u: u) if packed else self.batched if self.case.regular else (lambda u: u.transpose(0, 1)[None])
            leaves = [tuple(t.detach().requires_grad_() for t in given) for given in self.inputs]
            return backward_of(function, leaves, [like(u) for u in self.upstream], self.calls)
        with torch.no_grad():
            return captured(lambda i: function(*self.inputs[i % SETS]), self.calls)


def check(buffers, native):
    """For one segment and key head: the relative error of the results against fp64, and 1.5 times the error of the same chain in bf16."""
    case = buffers.case
    buffers.ours(native)(0)
    torch.cuda.synchronize()
    at = min(range(len(case.lengths)), key=lambda s: abs(case.lengths[s] - 2000))
    begin, end = (int(buffers.cu[i]) for i in (at, at + 1))
    group = case.heads // case.kv_heads
    hidden = torch.ones(end - begin, end - begin, dtype=torch.bool, device="cuda").triu(1)

    def chain(dtype):
        q, k, v = (t[begin:end, :n].to(dtype).requires_grad_() for t, n in zip(buffers.inputs[0], (group, 1, 1)))
        total = []
        for h in range(group):
            s = (q[:, h] @ k[:, 0].T * case.width**-0.5).masked_fill(hidden, -torch.inf)
            total.append(torch.softmax(s, -1) @ v[:, 0])
        out = torch.stack(total, 1)
        if not case.backward:
            return (out.detach(),)
        return torch.autograd.grad(out, (q, k, v), buffers.upstream[0][begin:end, :group].to(dtype))
    got = buffers.gradients[0] if case.backward else (buffers.out[0],)
    got = [t[begin:end, :n] for t, n in zip(got, (group, 1, 1))]
    worst = (0.0, 1.0)
    for g, same, want in zip(got, chain(torch.bfloat16), chain(torch.float64)):
        worst = max(worst, (relative_error([g], [want]), 1.5 * relative_error([same], [want])), key=lambda r: r[0] / r[1])
    return worst


def measure(case, native, ceiling):
    buffers = Buffers(case)
    error, tolerance = check(buffers, native)
    torch._dynamo.reset()
    graphs = {"ours": captured(buffers.ours(native), buffers.calls)}
    absent = {} if case.regular else {"cudnn": "not tried on packed documents"}
    add_peers(graphs, absent, {
        "torch_eager": (True, lambda: buffers.peer(buffers.sdpa(SDPBackend.FLASH_ATTENTION)) if case.regular else buffers.peer(buffers.varlen(), packed=True)),
        **({"cudnn": (True, lambda: buffers.peer(buffers.sdpa(SDPBackend.CUDNN_ATTENTION)))} if case.regular else {}),
        "torch_compile": (True, lambda: buffers.peer(buffers.flex()))})
    name, flash = import_peer("flash_attn_interface", "flash_attn.cute")
    name = "flash_attn_3" if name == "flash_attn_interface" else "flash_attn_4"
    add_peers(graphs, absent, {name: (flash, lambda: buffers.peer(buffers.flash(flash), packed=True))})
    if case.backward and FORMS[case.form] == "" and flash:
        add_peers(graphs, absent, {f"{name}_fixed": (flash, lambda: buffers.peer(buffers.flash(flash, deterministic=True), packed=True))})
    us, spread = interleaved({name: g[0] for name, g in graphs.items()}, buffers.calls, rounds=9)
    return {"name": case.name, "shape": case.shape, "dtype": "bf16", "ours_us": us.pop("ours"), "peers": us,
            "limit_us": case.flops / ceiling["bf16_TFLOPs"] * 1e-6, "tflops": None, "error": error, "tolerance": tolerance, "in_L2": False,
            "absent": absent, "p20_p80_us": spread}


def timed(case, native, ceiling):
    r = measure(case, native, ceiling)
    return r | {"tflops": case.flops / r["ours_us"] * 1e-6}


if __name__ == "__main__":
    run_products("attention", cases(), 2, timed, lambda c: f"{c.name} {' x '.join(map(str, c.shape))}")
