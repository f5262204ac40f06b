#!/usr/bin/env python3
"""Calls every op of the package `ingot` on tensors of more than 2^31 elements: the last rows must equal the result of the same rows alone.

    python3 tools/fuzz_large.py [OP,...]   on a GPU with 50 GB free

Operands repeat a block of rows, so the expected end is known from a call with a single block, up to a rounding or two of the type, because variants
for few rows sum in other orders. A number that does not fit into 32 bits shows as wrong rows or as an error.
"""
import sys
import time

import torch

from ingot import functional

BLOCK = 1031  # rows of a block: no power of two, so that an overflowing index reads different rows
MORE = 2**31 + 2**21
BF16 = torch.bfloat16


def rows_of(columns):
    return -(-MORE // (columns * BLOCK)) * BLOCK


def block(*shape, scale=1.0):
    return torch.randn(*shape, device="cuda").mul_(scale).to(BF16)


def near(name, found, expected, roundings=4):
    size = expected.float().abs().amax().clamp_min(1e-30)
    error = ((found.float() - expected.float()).abs().amax() / size).item()
    if not error <= roundings * 2.0**-8:
        raise AssertionError(f"{name}: the last rows are {error:.3g} of the largest value off")


def by_rows(call, *operands):
    """Checks a call with independent rows: forward and backward of the whole and of the last block. Columns are x's."""
    one = [t.clone().requires_grad_() for t in operands]
    y = call(*one)
    dy = torch.randn_like(y)
    wanted = [y.detach(), *torch.autograd.grad(y, one, dy)]
    times = rows_of(operands[0][0].numel()) // BLOCK
    many = [t.repeat(times, *[1] * (t.dim() - 1)).requires_grad_() for t in operands]
    y = call(*many)
    near("output", y[-BLOCK:], wanted[0])
    found = torch.autograd.grad(y, many, dy.repeat(times, *[1] * (dy.dim() - 1)))
    for i, g in enumerate(found):
        near(f"gradient of operand {i}", g[-BLOCK:], wanted[1 + i])


def activation():
    by_rows(lambda x: functional.activation(x, "gelu"), block(BLOCK, 2056))


def rms_norm():
    w = block(2056)
    by_rows(lambda x: functional.rms_norm(x, w), block(BLOCK, 2056))


def add_rms_norm():
    w = block(2056)
    by_rows(lambda x, r: sum(functional.rms_norm(x, w, residual=r)), block(BLOCK, 2056), block(BLOCK, 2056))


def swiglu():
    by_rows(lambda x: functional.swiglu(x, order="interleaved"), block(BLOCK, 2064))


def swiglu_of_halves():
    by_rows(functional.swiglu, block(BLOCK, 2064))


def rope():
    cos, sin = functional.rope_table(BLOCK, 128, device="cuda")

    def call(x):
        return functional.rope(x, cos, sin, torch.arange(x.shape[0], device="cuda") % BLOCK)

    by_rows(call, block(BLOCK, 16, 128))


def qk_norm_rope():
    cos, sin = functional.rope_table(BLOCK, 128, device="cuda")
    by_rows(lambda x: functional.qk_norm_rope(x, cos, sin, torch.arange(x.shape[0], device="cuda") % BLOCK), block(BLOCK, 16, 128))


def fused_mlp():
    w = [block(512, 512, scale=0.05), block(512, 512, scale=0.05)]
    by_rows(lambda x: functional.fused_mlp(x, w, activation="silu"), block(BLOCK, 512))


def gated_linear():
    w = block(1024, 512, scale=0.05)
    by_rows(lambda x: functional.gated_linear(x, w), block(BLOCK, 512))


def wide_mlp():
    w1, w2 = block(2048, 64, scale=0.1), block(64, 2048, scale=0.02)
    x = block(BLOCK, 64)
    times = rows_of(2048) // BLOCK
    one, many = x.clone().requires_grad_(), x.repeat(times, 1).requires_grad_()
    y, ys = (functional.wide_mlp(t, w1, w2, activation="gelu") for t in (one, many))
    dy = torch.randn_like(y)
    near("output", ys[-BLOCK:], y)
    near("gradient", torch.autograd.grad(ys, many, dy.repeat(times, 1))[0][-BLOCK:], torch.autograd.grad(y, one, dy)[0])


def attention():
    heads, width, segment = 16, 128, BLOCK
    for deterministic in (True, False):
        q, k, v = (block(segment, heads, width) for _ in range(3))
        times = rows_of(heads * width) // BLOCK

        def call(q, k, v, n):
            cu = torch.arange(0, n * segment + 1, segment, dtype=torch.int32, device="cuda")
            return functional.flash_attn_varlen_func(q, k, v, cu, cu, segment, segment, causal=True, window_size=(200, 0), deterministic=deterministic)

        one = [t.clone().requires_grad_() for t in (q, k, v)]
        y = call(*one, 1)
        dy = torch.randn_like(y)
        wanted = torch.autograd.grad(y, one, dy)
        many = [t.repeat(times, 1, 1).requires_grad_() for t in (q, k, v)]
        ys = call(*many, times)
        near("output", ys[-BLOCK:], y)
        for name, g, w in zip("qkv", torch.autograd.grad(ys, many, dy.repeat(times, 1, 1)), wanted):
            near(f"gradient of {name}", g[-BLOCK:], w, 8)
        del one, many, ys, g, w, wanted


def linear_cross_entropy():
    """Checks a weight with more than 2^31 elements."""
    columns, rows = 8192, 64
    classes = MORE // columns // 8 * 8
    w = torch.empty(classes, columns, dtype=BF16, device="cuda")
    part = block(classes // 8, columns, scale=3 / columns**0.5)
    for i in range(8):
        w[i * (classes // 8) : (i + 1) * (classes // 8)] = part
    x, target = block(rows, columns).requires_grad_(), torch.arange(classes - rows, classes, device="cuda")
    w.requires_grad_()
    loss = functional.linear_cross_entropy(x, w, target)
    dx, dw = torch.autograd.grad(loss, (x, w))
    with torch.no_grad():
        logits = (x @ part.mT).float()
        lse = torch.logsumexp(logits, -1) + torch.log(torch.tensor(8.0, device="cuda"))
        p = torch.exp(logits - lse[:, None])
        expected = (lse - logits[torch.arange(rows), target - 7 * (classes // 8)]).mean()
        near("loss", loss, expected)
        last = p[:, -2 * rows :].clone()
        last[torch.arange(rows), torch.arange(rows) + rows] -= 1
        near("gradient of the weight", dw[-2 * rows :], last.mT / rows @ x.float(), 8)
        at_target = w[-rows:].float()
        near("gradient of x", dx, (8 * (p.to(BF16) @ part).float() - at_target) / rows, 8)


CASES = [activation, rms_norm, add_rms_norm, swiglu, swiglu_of_halves, rope, qk_norm_rope, fused_mlp, gated_linear, wide_mlp, attention, linear_cross_entropy]


def main():
    chosen = [c for c in CASES if len(sys.argv) < 2 or c.__name__ in sys.argv[1].split(",")]
    if not chosen:
        sys.exit(f"fuzz_large: found {sys.argv[1]}, expected some of {','.join(c.__name__ for c in CASES)}")
    failed = 0
    for case in chosen:
        torch.manual_seed(1)
        began = time.monotonic()
        try:
            case()
            torch.cuda.synchronize()
            result = "ok"
        except Exception as e:
            failed += 1
            result = f"FAILED: {type(e).__name__}: {str(e)[:400]}"
        case = case.__name__
        print(f"{case}: {result}, {time.monotonic() - began:.1f} s, {torch.cuda.max_memory_allocated() / 2**30:.1f} GB", flush=True)
        try:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        except Exception:
            print("the GPU is unusable afterwards")
            return 1
    print(f"{len(chosen)} large cases, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
