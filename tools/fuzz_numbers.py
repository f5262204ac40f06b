"""The arithmetic of the references of tools/fuzz_cases.py: exact in fp64, or perturbed as a kernel's roundings may be.

`Numbers()` computes exactly. `Numbers(dtype, ...)` computes as a kernel may: every stage is rounded to the kernel's type of this stage and perturbed
by as much again, up or down at random; sums are perturbed by 2^-22 of the sum of the magnitudes of their terms (fp32; 2^-50 in fp64).
"""
import math

import torch
import torch.nn.functional as F

UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
WIDE = {torch.float64: torch.float64}  # the type of sums; fp32 for every other type


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, numbers, unit, dtype, back):
        ctx.numbers, ctx.unit, ctx.dtype, ctx.back = numbers, unit, dtype, back
        return numbers.move(t, unit, dtype)

    @staticmethod
    def backward(ctx, g):
        return ctx.numbers.move(g, ctx.unit, ctx.dtype) if ctx.back else g, None, None, None, None


class _Rounded(torch.autograd.Function):
    """An operand that autocast rounds, in the exact reference too; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx, t, dtype):
        return t.to(dtype).double()

    @staticmethod
    def backward(ctx, g):
        return g, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, numbers):
        ctx.save_for_backward(a, b)
        ctx.numbers = numbers
        return numbers.product(a, b)

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return ctx.numbers.product(g, b.mT), ctx.numbers.product(a.mT, g), None


class Activated(torch.autograd.Function):
    """f(x), whose slope may be computed from a rounded value: an error of one rounding of 1 or of the slope itself."""

    @staticmethod
    def forward(ctx, x, f, numbers, of_slope=None):
        of_slope = max(numbers.unit, numbers.of_sums) if of_slope is None else of_slope
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = f(leaf)
            (slope,) = torch.autograd.grad(y.sum(), leaf) if y.requires_grad else (torch.zeros_like(x),)
        ctx.save_for_backward(numbers.add(slope, of_slope * (1 + slope.abs())))
        return numbers.add(y.detach(), numbers.of_sums * (y.detach().abs() + (slope * x).abs()))

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None, None, None


class _BackwardMoved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, numbers, unit, dtype):
        ctx.how = numbers, unit, dtype
        return t.clone()

    @staticmethod
    def backward(ctx, g):
        numbers, unit, dtype = ctx.how
        return numbers.move(g, unit, dtype), None, None, None


class Attended(torch.autograd.Function):
    """softmax(s) v, where the last of s is a sink. The backward pass is that of kernels: from sums of dout * out, which may use the rounded out."""

    @staticmethod
    def forward(ctx, s, lse, none, v, n):
        p = torch.where(none, 0.0, torch.exp(s - (lse if n.exact else n.move(lse, n.of_sums, WIDE.get(n.dtype, torch.float32)))))
        out = n.product(n.move(p[..., :-1], n.unit, n.dtype), v)
        ctx.save_for_backward(p, v, out)
        ctx.numbers = n
        return out

    @staticmethod
    def backward(ctx, g):
        p, v, out = ctx.saved_tensors
        n = ctx.numbers
        dv = n.product(n.move(p[..., :-1], n.unit, n.dtype).mT, g)
        terms = g * out
        delta = n.add(terms.sum(-1, keepdim=True), (n.unit + n.of_sums) * terms.abs().sum(-1, keepdim=True))
        dp = torch.nn.functional.pad(n.product(g, v.mT), (0, 1))
        ds = torch.where(p == 0, 0.0, p * (dp - delta))
        return n.add(ds, n.of_sums * ds.abs()), None, None, dv, None


def equal_terms(t):
    """Whether most terms along the last dimension equal their predecessors in all rows, as in a product with an expanded tensor."""
    return t.shape[-1] > 1 and t.numel() > 0 and (t[..., 1:] == t[..., :-1]).flatten(0, -2).all(0).double().mean().item() > 0.5


class Numbers:
    """The arithmetic of one run of a reference. dtype None: exact."""

    def __init__(self, dtype=None, seed=0, autocast=None):
        self.dtype, self.seed, self.autocast, self.stage = dtype, seed, autocast, 0
        self.exact = dtype is None
        self.unit = 0.0 if self.exact else UNIT[dtype]
        self.of_sums = 0.0 if self.exact else 2.0**-50 if dtype is torch.float64 else 2.0**-22

    def _chances(self, t):
        """Perturbs up or down by half a unit to a whole unit at random. Equal numbers of a stage are perturbed alike, as by rounding, because the errors of equal terms add up."""
        self.stage += 1
        mixed = (t.float().view(torch.int32).long() + self.seed * 1000003 + self.stage * 104729) * 0x9E3779B97F4A7C1
        mixed = (mixed ^ (mixed >> 31)) * 0x5851F42D4C957F2D
        sign = ((mixed >> 62) & 1).double() * 2 - 1
        return sign * (0.5 + ((mixed >> 33) & 0xFFFF).double() / 131072)

    def add(self, t, size):
        return t if self.exact else t + size * self._chances(t)

    def move(self, t, unit, dtype):
        if self.exact:
            return t
        return self.add(t, unit * t.abs()).to(dtype).double()

    def product(self, a, b):
        y = a @ b
        terms = a.shape[-1]
        # fp32 adds the terms of a long sum to a much larger partial sum. The roundings of equal terms have the same sign for long: adding the k-th of n
        # equal terms is off by 2^-24 of the k terms before it, together n/2 * 2^-24 = n/8 * 2^-22 of the sum.
        of_sums = self.of_sums * max(1, terms / 8 if equal_terms(a) or equal_terms(b.mT) else terms / 1024)
        return y if self.exact else (y + of_sums * (a.abs() @ b.abs()) * self._chances(y)).to(WIDE.get(self.dtype, torch.float32)).double()

    def enter(self, t):
        return t if t is None or self.autocast is None else _Rounded.apply(t, self.autocast)

    def out(self, t):
        """A value that a kernel may hold in the op's type, like its gradient."""
        return t if self.exact else _Moved.apply(t, self, self.unit, self.dtype, True)

    def sum(self, t):
        """A value in the type of sums with an error of some roundings."""
        return t if self.exact else _Moved.apply(t, self, self.of_sums, WIDE.get(self.dtype, torch.float32), True)

    def mm(self, a, b):
        return _Product.apply(a, b, self)

    def linear(self, x, w, b=None):
        y = self.mm(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), w.mT).view(*x.shape[:-1], w.shape[0])
        return y if b is None else self.sum(y + b)

    def act(self, x, name):
        return Activated.apply(x, ACTIVATIONS[name], self)

    def cap(self, x, cap):
        """cap tanh(x / cap). The slope is 1 minus a square, with an error of one rounding of 1 however small the difference is. A GPU's kernel computes
        the value as 1 minus a quotient too, with an error of 2^-21 of the cap (kernels/cross_entropy/softcap.cuh)."""
        if not cap:
            return x
        y = Activated.apply(x, lambda x: cap * torch.tanh(x / cap), self)
        return self.add(y, 2.0**-21 * cap) if x.is_cuda and self.dtype is not torch.float64 else y

    def sum_backward(self, t, size=1):
        """A value whose gradient has an error of some roundings, `size` times as many, before other gradients are added."""
        return t if self.exact else _BackwardMoved.apply(t, self, self.of_sums * size, WIDE.get(self.dtype, torch.float32))

    def out_backward(self, t):
        """A value in the type of sums whose gradient a kernel may hold in the op's type."""
        return t if self.exact else _BackwardMoved.apply(t, self, self.unit, self.dtype)


ACTIVATIONS = {
    "identity": lambda x: x * 1, "relu": F.relu, "leaky_relu": F.leaky_relu, "leaky_relu_squared": lambda x: F.leaky_relu(x, 0.5).square(),
    "relu_squared": lambda x: F.relu(x).square(), "silu": F.silu, "gelu": lambda x: x * 0.5 * torch.special.erfc(-x * 0.5**0.5), "gelu_tanh": lambda x: x * torch.sigmoid(2 * (2 / math.pi) ** 0.5 * (x + 0.044715 * x.pow(3))),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x), "tanh": torch.tanh, "sigmoid": torch.sigmoid,
    "softplus": lambda x: F.softplus(x, threshold=500),
}
