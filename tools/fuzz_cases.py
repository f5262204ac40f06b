"""The cases of tools/fuzz_ops.py: every op and module of the package `ingot` with random shapes, types, layouts and options, and a reference of
each in fp64.

A reference is written once and runs in two ways: with exact numbers, and with numbers that are perturbed as a kernel's roundings may be
(fuzz_numbers.py). A kernel's result may be as far from the exact run as the perturbed runs are (Monte Carlo arithmetic), whatever the condition of the
operands.
"""
import inspect
import math
import random
from dataclasses import dataclass, field
from typing import Callable

import torch

import ingot
from ingot import _declare, functional
from fuzz_numbers import ACTIVATIONS, Activated, Attended

JUMPS = ("relu", "leaky_relu")  # activations whose slope jumps: a rounding of the argument may change a whole gradient


@dataclass
class Case:
    op: str
    text: list
    dtype: torch.dtype  # of stages
    inputs: dict = field(default_factory=dict)  # floating-point operands by name; operands in `frozen` have no gradient
    call: Callable = None  # (**inputs) -> a tensor or several
    reference: Callable = None  # (numbers, **inputs in fp64) -> as many tensors
    others: list = field(default_factory=list)  # further tensors, which must stay unchanged
    frozen: tuple = ()
    jumps: bool = False
    deterministic: bool = True
    planted: str = ""  # the planted value that is not finite
    masked: bool = False  # a NaN need not reach rows that do not depend on the NaN
    modes: tuple = ("eager", "eager", "eager", "no_grad", "inference", "compile", "checkpoint", "func", "stream", "graph")
    autocast: torch.dtype = None
    only_outputs: int = None  # how many outputs take a gradient


NEAR_TILES = (63, 64, 65, 127, 128, 129)


class Draw:
    """The random choices of one case."""

    def __init__(self, seed, index, device):
        self.r = random.Random(f"{seed}/{index}")
        self.device = torch.device(device)
        self.g = torch.Generator().manual_seed(self.r.randrange(2**60))
        self.gpu = self.device.type == "cuda"
        self.most = 3_000_000 if self.gpu else 60_000  # elements of a tensor
        self.scale = self.r.choice([1.0] * 8 + [1e-3, 30.0, 1e3, 1e-6])

    def rows(self, columns, most=5000):
        """A number of rows for the given number of columns."""
        r = self.r
        n = r.choice([r.choice([0, 1, 1, 2, 3]), r.randint(1, 20), r.choice(NEAR_TILES), r.choice((15, 16, 17, 31, 33, 48, 255, 257)), r.randint(1, 600),
                      r.choice([1000, 1024, 1025, 4096, 4097])])
        if self.gpu and r.random() < 0.06:
            n, most = r.choice([65535, 65536, 65537, 100_003, 262_145]), math.inf  # more than the limit of a grid's second dimension
        return min(n, most, max(1, self.most // max(1, columns)))

    def columns(self, most=20000, step=1):
        r = self.r
        n = r.choice([r.choice([1, 2, 3, 4, 5, 7]), r.randint(1, 40), r.choice(NEAR_TILES), 8 * r.randint(1, 70), r.randint(1, 1100),
                      r.choice([1023, 1024, 1025, 2048, 2880, 4096, 5120, 8192, 8200, 12288, 16384, 20000])])
        if r.random() < 0.02:
            n = 0
        n = min(n, most)
        return n if step == 1 else max(step, n // step * step)

    def leading(self, rows):
        """Leading dimensions with the given number of rows."""
        r = self.r
        if rows and r.random() < 0.4:
            divisors = [k for k in (1, 2, 3, 4, 5, 7, 8) if rows % k == 0]
            k = r.choice(divisors)
            return r.choice([(k, rows // k), (rows // k, k), (1, k, rows // k), (k, 1, rows // k)])
        if rows == 0 and r.random() < 0.5:
            return r.choice([(0, 3), (2, 0), (0, 0)])
        return () if rows == 1 and r.random() < 0.5 else (rows,)

    def dtype(self, of_gpu=(torch.bfloat16, torch.float16, torch.float32), of_cpu=(torch.float32, torch.bfloat16, torch.float16, torch.float64)):
        return self.r.choice(of_gpu if self.gpu else of_cpu)

    def flag(self, p=0.5):
        return self.r.random() < p

    def numbers(self, shape, scale=1.0):
        return torch.randn(shape, generator=self.g, dtype=torch.float64) * scale

    def tensor(self, shape, dtype, scale=1.0, layout=True, values=None):
        t = (self.numbers(shape, scale) if values is None else values).to(self.device, dtype)
        return self.lay_out(t) if layout else t

    def lay_out(self, t):
        """The same values inside poisoned memory, with other strides."""
        r = self.r
        kind = r.choice(["dense"] * 6 + ["offset", "padded", "padded8", "transposed", "stepped", "columns", "permuted", "expanded"])
        if kind == "dense" or t.dim() == 0:
            return t.clone()
        shape, order = list(t.shape), list(range(t.dim()))
        room, at, steps = shape[:], [0] * t.dim(), [1] * t.dim()
        if kind == "padded":
            room[-1] += r.choice([1, 2, 3, 5])
            at[-1] = r.randint(0, room[-1] - shape[-1])
        elif kind == "padded8":
            room[-1] += 16
            at[-1] = 8
        elif kind == "transposed" and t.dim() > 1:
            order[-1], order[-2] = order[-2], order[-1]
        elif kind == "stepped":
            d = r.randrange(max(1, t.dim() - 1))
            room[d], steps[d], at[d] = shape[d] * 2 + 1, 2, 1
        elif kind == "columns":
            room[-1], steps[-1] = shape[-1] * 2 + 1, 2
        elif kind == "permuted":
            r.shuffle(order)
        elif kind == "expanded":
            d = r.randrange(t.dim())
            if shape[d] > 1:
                return t.narrow(d, 0, 1).clone().expand(shape)
        memory = torch.full((math.prod(room) + 19,), math.nan, dtype=t.dtype, device=t.device)
        shift = r.choice([1, 3, 7]) if kind == "offset" else r.choice([0, 0, 1, 8])
        held = memory[shift : shift + math.prod(room)].view([room[i] for i in order])
        view = held.permute([order.index(i) for i in range(t.dim())])
        for d in range(t.dim()):
            view = view.narrow(d, at[d], room[d] - at[d])[(slice(None),) * d + (slice(None, None, steps[d]),)].narrow(d, 0, shape[d])
        view.copy_(t)
        return view

    def plant(self, case, names):
        """Sometimes a value that is not finite."""
        if self.r.random() < 0.1:
            name = self.r.choice(names)
            t = case.inputs[name]
            if t.numel() and 0 not in t.stride():
                value = self.r.choice([math.nan, math.inf, -math.inf])
                at = tuple(self.r.randrange(n) for n in t.shape)
                t[at] = value
                case.planted = f"{name}{list(at)}={value}"


def text_of(t):
    if t is None:
        return "None"
    dense = "" if t.is_contiguous() else f" strides {tuple(t.stride())}"
    offset = f" offset {t.storage_offset()}" if t.storage_offset() else ""
    return f"{str(t.dtype)[6:]}{list(t.shape)}{dense}{offset}"


# --- the ops ----------------------------------------------------------------------------------------------------------


def rms_norm(d):
    dtype, columns = d.dtype(), d.columns()
    shape = (*d.leading(d.rows(columns)), columns)
    x = d.tensor(shape, dtype, d.scale)
    types = [dtype, dtype, torch.float32, torch.bfloat16, torch.float16] if dtype is not torch.float64 else [dtype]
    w = d.tensor((columns,), d.r.choice(types)) if d.flag(0.8) else None
    residual = d.tensor(shape, dtype, d.scale) if d.flag(0.4) else None
    eps, offset = d.r.choice([None, 1e-5, 1e-6, 1e-3]), d.flag(0.3)
    module = w is not None and residual is None and d.flag(0.3)
    case = Case("rms_norm", [f"eps={eps}", f"unit_offset={offset}", f"module={module}"], dtype)
    case.inputs = {k: t for k, t in (("x", x), ("weight", w), ("residual", residual)) if t is not None}
    e = eps if eps is not None else torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps

    def call(x, weight=None, residual=None):
        if module:
            layer = ingot.nn.RMSNorm(columns, eps=eps, unit_offset=offset, device=d.device, dtype=w.dtype)
            return torch.func.functional_call(layer, {"weight": weight}, (x,))
        return functional.rms_norm(x, weight, eps, residual=residual, unit_offset=offset)

    def reference(n, x, weight=None, residual=None):
        s = x if residual is None else n.out(x + residual)
        y = n.sum(s * n.sum(torch.rsqrt(n.sum(s.square().mean(-1, keepdim=True)) + e)))
        if weight is not None:
            y = y * (1 + weight if offset else weight)
        return n.out(y) if residual is None else (n.out(y), s)

    case.call, case.reference = call, reference
    d.plant(case, list(case.inputs))
    return case


def _mlp_options(d):
    return d.r.choice(list(functional.ACTIVATIONS)), d.flag(0.5), d.flag(0.3), d.flag(0.3), d.flag(0.3)


def fused_mlp(d):
    dtype = d.dtype()
    step, most = (8, 512) if d.gpu and d.flag(0.95) else (1, 300)
    if not d.gpu:
        most = 130
    width = lambda: d.columns(most if d.flag() else 128, step)
    activation, bias, weight_norm, last, recompute = _mlp_options(d)
    layers = d.r.choice([1, 2, 2, 3, 3, 3, 4, 5, 8])
    hidden = width()
    widths = [width(), *([hidden] * (layers - 1)), width()] if d.flag(0.7) else [width() for _ in range(layers + 1)]
    shape = (*d.leading(d.rows(max(widths), 4097)), widths[0])
    autocast = d.r.choice([torch.bfloat16, torch.float16]) if d.flag(0.15) else None
    own = torch.float32 if autocast else dtype
    case = Case("fused_mlp", [activation, f"widths={widths}", f"weight_norm={weight_norm}", f"activate_last={last}", f"recompute={recompute}"], autocast or dtype,
                jumps=activation in JUMPS, autocast=autocast)
    case.inputs["x"] = d.tensor(shape, own, min(d.scale, 30.0))
    for i, (k, n) in enumerate(zip(widths, widths[1:])):
        case.inputs[f"w{i}"] = d.tensor((n, k), own, 1 / math.sqrt(max(1, k)))
        if bias:
            case.inputs[f"b{i}"] = d.tensor((n,), own, 0.3)
        if weight_norm:
            case.inputs[f"g{i}"] = d.tensor((n,), own)

    module = len(set(widths[1:-1])) < 2 and min(widths) > 0 and d.flag(0.4)

    def call(x, **p):
        of = lambda name: [p[f"{name}{i}"] for i in range(layers)]
        if module:
            net = ingot.nn.FusedMLP(widths[0], hidden, widths[-1], layers, activation, bias, weight_norm, activate_last=last, recompute=recompute, device=d.device, dtype=own)
            names = {"w": "weight", "b": "bias", "g": "gain"}
            return torch.func.functional_call(net, {f"layers.{k[1:]}.{names[k[0]]}": t for k, t in p.items()}, (x,))
        return functional.fused_mlp(x, of("w"), of("b") if bias else None, of("g") if weight_norm else None, activation=activation, activate_last=last, recompute=recompute)

    def reference(n, x, **p):
        p = {k: n.enter(t) for k, t in p.items()}
        h = n.enter(x)
        for i in range(layers):
            w = p[f"w{i}"]
            if weight_norm:
                w = n.out(p[f"g{i}"][:, None] * w * n.sum(torch.rsqrt(n.sum(w.square().sum(1, keepdim=True)) + 1e-12)))
            h = n.out_backward(n.linear(h, w, p[f"b{i}"] if bias else None))
            if last or i + 1 < layers:
                h = n.act(h, activation)
            h = n.out(h)
        return h

    case.call, case.reference = call, reference
    d.plant(case, list(case.inputs))
    return case


def _gate_options(d):
    if d.flag(0.3):
        return {"activation": "gelu_tanh"}
    return d.r.choice([{}, {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0}, {"limit": 0.5}, {"alpha": 0.7}, {"up_offset": -2.0}])


def _gated(n, gate, up, activation="silu", limit=0.0, alpha=1.0, up_offset=0.0):
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    f = ACTIVATIONS["gelu_tanh"] if activation == "gelu_tanh" else lambda gate: gate * torch.sigmoid(alpha * gate)
    return n.sum(Activated.apply(gate, f, n, n.of_sums) * n.sum(up + up_offset))


def _halves(packed, order, dim=-1):
    packed = packed.transpose(dim, -1)
    gate, up = (packed[..., 0::2], packed[..., 1::2]) if order == "interleaved" else packed.chunk(2, -1)
    gate, up = (up, gate) if order == "gate_second" else (gate, up)
    return gate.transpose(dim, -1), up.transpose(dim, -1)


def swiglu(d):
    dtype, hidden, order, options = d.dtype(), d.columns(), d.r.choice(["gate_first", "gate_second", "interleaved"]), _gate_options(d)
    lead = d.leading(d.rows(2 * hidden))
    two = d.flag(0.4)
    case = Case("swiglu", [order, str(options)], dtype, jumps="limit" in options)
    if two:
        case.inputs = {"gate": d.tensor((*lead, hidden), dtype, d.scale), "up": d.tensor((*lead, hidden), dtype, d.scale)}
        case.call = lambda gate, up: functional.swiglu(gate, up, **options)
        case.reference = lambda n, gate, up: n.out(_gated(n, gate, up, **options))
    else:
        case.inputs = {"packed": d.tensor((*lead, 2 * hidden), dtype, d.scale)}
        case.call = lambda packed: functional.swiglu(packed, order=order, **options)
        case.reference = lambda n, packed: n.out(_gated(n, *_halves(packed, order), **options))
    d.plant(case, list(case.inputs))
    return case


def gated_linear(d):
    dtype = d.dtype()
    most = 1100 if d.gpu else 140
    features, hidden = (d.columns(most, 8 if d.flag(0.7) else 1) for _ in range(2))
    order, options, columns = d.r.choice(["gate_first", "gate_second", "interleaved"]), _gate_options(d), d.flag(0.3)
    two, bias, module = d.flag(0.3), d.flag(0.4), d.flag(0.25)
    if two:
        order = "gate_first"
    if order == "interleaved" and d.flag(0.9):
        bias, columns = False, False
    shape = (*d.leading(d.rows(max(features, hidden), 4097)), features)
    case = Case("gated_linear", [order, str(options), f"columns={columns}", f"two={two}", f"module={module}"], dtype, jumps="limit" in options)
    scale = 1 / math.sqrt(max(1, features))
    weight = lambda n: d.tensor((features, n) if columns else (n, features), dtype, scale)
    case.inputs = {"x": d.tensor(shape, dtype, min(30.0, d.scale)), "w": weight(hidden if two else 2 * hidden)}
    if bias:
        case.inputs["bias"] = d.tensor((hidden if two else 2 * hidden,), dtype)
    if two:
        case.inputs["up"] = weight(hidden)
        if bias:
            case.inputs["up_bias"] = d.tensor((hidden,), dtype)

    def call(x, w, bias=None, up=None, up_bias=None):
        return functional.gated_linear(x, w, bias, up=up, up_bias=up_bias, order=order, columns=columns, **options)

    def reference(n, x, w, bias=None, up=None, up_bias=None):
        turn = (lambda w: w.mT) if columns else (lambda w: w)
        if two:
            gate, up = n.linear(x, turn(w), bias), n.linear(x, turn(up), up_bias)
        else:
            gate, up = _halves(n.linear(x, turn(w), bias), order)
        return n.out(_gated(n, n.out(gate), n.out(up), **options))

    case.call, case.reference = call, reference
    if module and not two and not columns:
        if not d.gpu:  # PyTorch's own product of unaligned 16-bit rows with gaps reads the gaps
            case.inputs["x"] = case.inputs["x"].contiguous().clone()
        w3 = case.inputs["w3"] = d.tensor((d.columns(130), hidden), dtype, 1 / math.sqrt(max(1, hidden)))
        whole = d.flag()
        case.text.append(f"whole={whole}")
        if bias:
            case.inputs["b3"] = d.tensor((w3.shape[0],), dtype)

        def mlp(x, w, w3, bias=None, b3=None):
            if whole:  # in one call on every device, as the module does on a Hopper GPU in 16 bits
                return functional.gated_linear(x, w, bias, down=w3, down_bias=b3, order=order, **options)
            net = ingot.nn.SwiGLU(features, hidden, w3.shape[0], bias is not None, order=order, device=d.device, dtype=dtype, **options)
            given = {"w12.weight": w, "w3.weight": w3, "w12.bias": bias, "w3.bias": b3}
            return torch.func.functional_call(net, {k: t for k, t in given.items() if t is not None}, (x,))

        case.call, case.reference = mlp, lambda n, x, w, w3, bias=None, b3=None: n.out(n.linear(reference(n, x, w, bias), w3, b3))
    if d.gpu or not module:  # on a CPU PyTorch's own product of 16 bits lets a NaN into the row before
        d.plant(case, list(case.inputs))
    return case


def linear_cross_entropy(d):
    dtype = d.dtype()
    features = d.columns(600 if d.gpu else 130, 8 if d.flag(0.7) else 1)
    classes = max(1, d.r.choice([d.columns(20000 if d.gpu else 1100), d.r.randint(1, 300), d.r.choice([1, 2, 50257 if d.gpu else 513])]))
    lead = d.leading(d.rows(max(features, classes), 4097))
    autocast = d.r.choice([torch.bfloat16, torch.float16]) if d.flag(0.1) else None
    own = torch.float32 if autocast else dtype
    ignore = d.r.choice([-100, -100, -1, 0, 2**31 - 1])
    options = dict(reduction=d.r.choice(["mean", "sum", "none"]), ignore_index=ignore, label_smoothing=d.r.choice([0.0, 0.0, 0.1, 1.0]),
                   softcap=d.r.choice([0.0, 0.0, 30.0, 2.0]), z_loss=d.r.choice([0.0, 0.0, 1e-3, 0.5]))
    case = Case("linear_cross_entropy", [f"{k}={v}" for k, v in options.items()], autocast or dtype, autocast=autocast)
    case.inputs = {"x": d.tensor((*lead, features), own, min(d.scale, 30.0)), "weight": d.tensor((classes, features), own, d.r.choice([0.3, 3]) / math.sqrt(max(1, features)))}
    if d.flag(0.4):
        case.inputs["bias"] = d.tensor((classes,), own)
    target = torch.randint(0, classes, lead, generator=d.g)
    if d.flag(0.5):
        target[torch.rand(lead, generator=d.g) < d.r.choice([0.1, 0.9, 1.1])] = ignore
    kinds = [torch.int64] * 4 + [torch.int32] * 2 + ([torch.int16] if classes < 32768 and ignore < 32768 else [])
    target = d.lay_out(target.double()).to(d.r.choice(kinds)).to(d.device) if target.dim() and not target.numel() else target.to(d.device, d.r.choice(kinds))
    case.others = [target]
    case.text.append(f"target={text_of(target)}")

    def reference(n, x, weight, bias=None):
        x, weight, bias = n.enter(x), n.enter(weight), n.enter(bias)
        rows, t = x.reshape(target.numel(), features), target.reshape(-1).long()
        logits = n.out_backward(n.linear(rows, weight, bias))
        capped = lambda: n.cap(logits, options["softcap"])  # the slopes of the cap are separate for the probabilities and for the value at the target
        size = 1 + torch.logsumexp(capped().detach(), -1, keepdim=True).abs()  # p = exp(l - lse) has an error of as many units as the lse
        lse = n.sum(torch.logsumexp(n.sum_backward(capped(), size), -1)) if rows.shape[0] else logits.sum(-1)
        counts = t != ignore
        at = n.sum_backward(capped()).gather(-1, torch.where(counts, t, 0)[:, None])[:, 0]
        s = options["label_smoothing"]
        if s:
            at = (1 - s) * at + s * n.sum_backward(capped()).mean(-1)
        loss = torch.where(counts, n.sum(n.sum(lse - at) + options["z_loss"] * lse.square()), 0.0)
        if options["reduction"] == "none":
            return loss.view(target.shape)
        total = n.sum(loss.sum())
        return total if options["reduction"] == "sum" else total / counts.sum()

    module = d.flag(0.2)

    def call(x, weight, bias=None):
        if module:
            net = ingot.nn.LinearCrossEntropy(features, classes, bias is not None, device=d.device, dtype=own, **options)
            return torch.func.functional_call(net, {k: t for k, t in (("weight", weight), ("bias", bias)) if t is not None}, (x, target))
        return functional.linear_cross_entropy(x, weight, target, bias, **options)

    case.call, case.reference = call, reference
    d.plant(case, list(case.inputs))
    return case


def grouped_linear(d):
    dtype, experts = d.dtype(), d.r.choice([0, 1, 2, 3, 8, 33])
    features, outputs = d.columns(130), d.columns(130)
    rows = d.rows(max(features, outputs), 513)
    ends = sorted(d.r.randint(0, rows) for _ in range(experts))
    if ends and d.flag(0.7):
        ends[-1] = rows
    offsets = torch.tensor([0, *ends], dtype=d.r.choice([torch.int32, torch.int64]), device=d.device)
    case = Case("grouped_linear", [f"offsets={offsets.tolist()}"], dtype)
    scale = d.r.choice([0.3, 3]) / math.sqrt(max(1, features))
    case.inputs = {"x": d.tensor((rows, features), dtype, min(d.scale, 30.0)), "weight": d.tensor((experts, outputs, features), dtype, scale)}
    if d.flag(0.4):
        case.inputs["bias"] = d.tensor((experts, outputs), dtype)
    case.call = lambda x, weight, bias=None: functional.grouped_linear(x, weight, offsets, bias)

    def reference(n, x, weight, bias=None):
        x, weight, bias = map(n.enter, (x, weight, bias))
        parts = [n.linear(x[begin:end], weight[e], None if bias is None else bias[e]) for e, (begin, end) in enumerate(zip([0, *ends], ends))]
        return n.out(torch.cat([*parts, x.new_zeros(rows - (ends[-1] if ends else 0), outputs)]))

    case.reference = reference
    return case


def wide_mlp(d):
    dtype = d.dtype()
    most = 1100 if d.gpu else 140
    c, h, n_out = (d.columns(most, 8 if d.flag(0.7) else 1) for _ in range(3))
    activation, recompute = d.r.choice([*functional.ACTIVATIONS, "leaky_relu_squared", "relu_squared", "gelu"]), d.flag(0.3)
    autocast = d.r.choice([torch.bfloat16, torch.float16]) if d.flag(0.1) else None
    own = torch.float32 if autocast else dtype
    case = Case("wide_mlp", [activation, f"recompute={recompute}"], autocast or dtype, jumps=activation in JUMPS, autocast=autocast)
    case.inputs = {"x": d.tensor((*d.leading(d.rows(max(c, h), 4097)), c), own, min(30.0, d.scale)), "w1": d.tensor((h, c), own, 1 / math.sqrt(max(1, c))),
                   "w2": d.tensor((n_out, h), own, 1 / math.sqrt(max(1, h)))}
    for name, n in (("b1", h), ("b2", n_out)):
        if d.flag(0.4):
            case.inputs[name] = d.tensor((n,), own)
    module = d.flag(0.2) and ("b1" in case.inputs) == ("b2" in case.inputs)

    def call(x, w1, w2, b1=None, b2=None):
        if module:
            net = ingot.nn.WideMLP(c, h, n_out, activation, b1 is not None, recompute=recompute, device=d.device, dtype=own)
            given = {"w1.weight": w1, "w2.weight": w2, "w1.bias": b1, "w2.bias": b2}
            return torch.func.functional_call(net, {k: t for k, t in given.items() if t is not None}, (x,))
        return functional.wide_mlp(x, w1, w2, b1, b2, activation=activation, recompute=recompute)

    def reference(n, x, w1, w2, b1=None, b2=None):
        x, w1, w2, b1, b2 = map(n.enter, (x, w1, w2, b1, b2))
        return n.out(n.linear(n.out(n.act(n.out(n.linear(x, w1, b1)), activation)), w2, b2))

    case.call, case.reference = call, reference
    d.plant(case, list(case.inputs))
    return case


def _table(d, dtype, positions, dim):
    cos, sin = functional.rope_table(positions, dim, base=d.r.choice([10000.0, 100.0, 500000.0]), dtype=torch.float64 if dtype is torch.float64 else torch.float32, device=d.device)
    return (d.lay_out(cos), d.lay_out(sin)) if d.flag(0.3) else (cos, sin)


def _turn(n, x, cos, sin, positions, interleaved, sign):
    half = cos.shape[-1]
    at = (torch.arange(x.shape[-3], device=x.device) if positions is None else positions.long()).expand(x.shape[:-2])
    c, s = cos.double()[at].unsqueeze(-2), sign * sin.double()[at].unsqueeze(-2)
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    first, second = n.sum(a * c) - n.sum(b * s), n.sum(b * c) + n.sum(a * s)
    turned = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    return torch.cat((turned, rest), -1)


def rope(d):
    dtype = d.dtype()
    width = d.r.choice([2, 4, 6, 8, 10, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256, 258, 512] + [2 * d.r.randint(1, 150)])
    heads = d.r.choice([1, 2, 3, 4, 5, 8, 16, 33, 64])
    lead = d.leading(d.rows(heads * width, 1200)) or (1,)
    with_norm, in_place = d.flag(0.5), False
    rotated = width if d.flag(0.6) else 2 * d.r.randint(1, width // 2)
    interleaved, sign = d.flag(0.4), d.r.choice([1, 1, -1])
    table = not with_norm or d.flag(0.8)
    most = max(1, lead[-1], d.r.choice([lead[-1], lead[-1] + 7, 4096]))
    cos, sin = _table(d, dtype, most, rotated) if table else (None, None)
    positions = None
    if table and d.flag(0.6):
        shape = d.r.choice([lead, lead[-1:]])
        positions = torch.randint(0, most, shape, generator=d.g).to(d.r.choice([torch.int64, torch.int32, torch.int16 if most < 32000 else torch.int32]))
        positions = (positions.mT.contiguous().mT if positions.dim() > 1 and d.flag(0.3) else positions).to(d.device)
    eps = d.r.choice([2.0**-23, 1e-6, 1e-5])
    case = Case("qk_norm_rope" if with_norm else "rope", [f"rotated={rotated}", f"interleaved={interleaved}", f"sign={sign}", f"positions={text_of(positions)}",
                                                        f"table={text_of(cos)}"], dtype)
    case.inputs = {"x": d.tensor((*lead, heads, width), dtype, d.scale)}
    case.others = [t for t in (cos, sin, positions) if t is not None]
    if with_norm and d.flag(0.6):
        case.inputs["gain"] = d.tensor((heads,), d.r.choice([torch.float32 if dtype is not torch.float64 else dtype]))
    if not with_norm:
        in_place = d.flag(0.2)
        case.text.append(f"in_place={in_place}")

    def call(x, gain=None):
        if with_norm:
            return functional.qk_norm_rope(x, cos, sin, positions, gain=gain, eps=eps, interleaved=interleaved, sign=sign)
        if in_place and isinstance(x, torch.Tensor) and x.layout is torch.strided and not (torch.is_grad_enabled() and x.requires_grad):
            y = x.contiguous().clone() if not x.is_contiguous() else x.clone()
            return functional.rope_(y.detach(), cos, sin, positions, interleaved=interleaved, sign=sign)
        return functional.rope(x, cos, sin, positions, interleaved=interleaved, sign=sign)

    def reference(n, x, gain=None):
        if with_norm:
            x = n.sum(x * n.sum(torch.rsqrt(n.sum(x.square().mean(-1, keepdim=True)) + eps)))
        if table:
            x = _turn(n, x, cos, sin, positions, interleaved, sign)
        return n.out(x if gain is None else x * gain[:, None])

    case.call, case.reference = call, reference
    if in_place:
        case.modes = ("no_grad", "inference", "stream")
        case.frozen = ("x",)
    d.plant(case, ["x"])
    return case


def activation(d):
    dtype, columns, name = d.dtype(), d.columns(), d.r.choice(list(functional.ACTIVATIONS))
    case = Case("activation", [name], dtype, jumps=name in JUMPS)
    case.inputs = {"x": d.tensor((*d.leading(d.rows(columns)), columns), dtype, d.r.choice([1.0, 5.0, 30.0, d.scale]))}
    case.call = lambda x: functional.activation(x, name)
    case.reference = lambda n, x: n.out(n.act(x, name))
    d.plant(case, ["x"])
    return case


def attention(d):
    dtype = d.dtype((torch.bfloat16, torch.float16), (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16))
    width = d.r.choice([64, 64, 128, 128, 8, 16, 24, 32, 40, 72, 80, 96, 104, 112, 136, 192, 200, 248, 256] if d.gpu else [1, 2, 3, 7, 8, 16, 20, 32, 33, 64, 65, 128])
    width_v = width if d.flag(0.85) else d.r.choice([8, 64, 128, 256] if d.gpu else [1, 5, 8, 64])
    kv_heads = d.r.choice([1, 1, 2, 3, 4])
    heads = kv_heads * d.r.choice([1, 1, 2, 3, 4, 5, 7, 8])
    length = lambda: d.r.choice([0, 1, 2, d.r.randint(1, 40), d.r.choice(NEAR_TILES), d.r.randint(1, 300), d.r.choice([191, 192, 193, 255, 256, 257, 500, 700]) if d.gpu else 1])
    varlen = d.flag(0.5)
    same = d.flag(0.6)
    if varlen:
        of_q = [length() for _ in range(d.r.choice([1, 1, 2, 3, 5, 9]))]
        if d.gpu and d.flag(0.04):
            of_q, kv_heads, heads = [d.r.randint(0, 2) for _ in range(2000)], 1, 2
        of_k = list(of_q) if same else [length() for _ in of_q]
    else:
        of_q = [length()] * d.r.choice([1, 1, 2, 3])
        of_k = of_q if same else [length()] * len(of_q)
    if not d.gpu and sum(of_q) * max(1, sum(of_k)) * heads > 100_000:
        heads = kv_heads = 1
    causal = d.flag(0.6)
    left = d.r.choice([-1, -1, 0, 1, 5, 63, 64, 127, 128, 129, 1000])
    window = d.r.choice([(-1, -1), (-1, -1), (left, 0) if d.flag() or not causal else (left, -1)])
    softcap, scale, sinks = d.r.choice([0.0, 0.0, 0.0, 20.0, 2.0]), d.r.choice([None, None, 0.3, 1.0]), d.flag(0.3)
    deterministic = d.flag(0.7)
    autocast = d.r.choice([torch.bfloat16, torch.float16]) if d.flag(0.08) else None
    own = torch.float32 if autocast else dtype
    case = Case("flash_attn_varlen_func" if varlen else "flash_attn_func",
                [f"causal={causal}", f"window={window}", f"softcap={softcap}", f"scale={scale}", f"deterministic={deterministic}", f"q={of_q}", f"k={of_k}"], autocast or dtype,
                deterministic=deterministic, masked=True, autocast=autocast)
    total_q, total_k = sum(of_q), sum(of_k)
    shape = lambda total, h, w: (total, h, w) if varlen else (len(of_q), total // len(of_q), h, w)
    size = min(d.scale, 3.0)
    case.inputs = {"q": d.tensor(shape(total_q, heads, width), own, size), "k": d.tensor(shape(total_k, kv_heads, width), own, size),
                   "v": d.tensor(shape(total_k, kv_heads, width_v), own)}
    if sinks:
        case.inputs["sinks"] = d.tensor((heads,), d.r.choice([torch.float32, own]) if own is not torch.float64 else own)
    offsets = lambda lengths: torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=d.device)
    cu_q, cu_k = offsets(of_q), offsets(of_k)
    case.others = [cu_q, cu_k] if varlen else []
    with_lse = d.flag(0.3)

    def call(q, k, v, sinks=None):
        options = dict(softmax_scale=scale, causal=causal, window_size=window, softcap=softcap, deterministic=deterministic, sinks=sinks, return_attn_probs=with_lse)
        found = flash_varlen(q, k, v, options) if varlen else functional.flash_attn_func(q, k, v, **options)
        return found[:2] if with_lse else found

    def flash_varlen(q, k, v, options):
        most = [max(lengths, default=0) for lengths in (of_q, of_k)]
        return functional.flash_attn_varlen_func(q, k, v, cu_q, cu_k, *most, **options)

    def reference(n, q, k, v, sinks=None):
        q, k, v = map(n.enter, (q, k, v))
        if not varlen:
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        outs, lses, at_q, at_k = [], [], 0, 0
        a = scale if scale is not None else width**-0.5
        last = causal or window[1] == 0
        for m, c in zip(of_q, of_k):
            qs, ks, vs = (t.transpose(0, 1) for t in (q[at_q : at_q + m], k[at_k : at_k + c].repeat_interleave(heads // kv_heads, 1), v[at_k : at_k + c].repeat_interleave(heads // kv_heads, 1)))
            at_q, at_k = at_q + m, at_k + c
            s = n.out_backward(n.sum(a * n.mm(qs, ks.mT)))
            s = n.cap(s, softcap)
            i, j = torch.arange(m, device=q.device)[:, None] + c - m, torch.arange(c, device=q.device)
            unseen = torch.zeros((m, c), dtype=torch.bool, device=q.device)
            if last:
                unseen = unseen | (j > i)
            if last and window[0] >= 0:
                unseen = unseen | (j < i - window[0])
            s = s.masked_fill(unseen, -math.inf)
            sink = torch.full((heads, m, 1), -math.inf, dtype=torch.float64, device=q.device) if sinks is None else sinks[:, None, None].expand(-1, m, 1)
            s = torch.cat([s, sink], -1)
            none = torch.isneginf(s).all(-1, keepdim=True)
            lse = torch.logsumexp(torch.where(none, 0.0, s), -1, keepdim=True)
            outs.append(n.out(Attended.apply(s, lse.detach(), none, vs, n)).transpose(0, 1))
            lses.append(n.sum(torch.where(none, -math.inf, lse)[..., 0]))
        out, lse = (torch.cat(outs) if outs else q.new_zeros(0, heads, width_v)), torch.cat(lses, 1)
        if not varlen:
            out, lse = out.view(len(of_q), -1, heads, width_v) if total_q else out.new_zeros(len(of_q), 0, heads, width_v), lse.view(heads, len(of_q), -1).transpose(0, 1) if total_q else lse.new_zeros(len(of_q), heads, 0)
        return (out, lse) if with_lse else out

    case.call, case.reference = call, reference
    d.plant(case, ["q", "k", "v"])
    return case


def muon(d):
    """Some steps of the optimizer on matrices of several shapes; the results are the parameters afterwards."""
    dtype = d.r.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16] + ([] if d.gpu else [torch.float64]))
    side = lambda: d.r.choice([1, 2, 3, 7, 8, 16, 24, 31, *(NEAR_TILES if d.gpu else (33,)), d.r.randint(1, 300 if d.gpu else 40)])
    shapes = [(side(), side()) for _ in range(d.r.choice([1, 2, 3]))]
    shapes += [shapes[0]] * d.r.choice([0, 0, 1, 3]) + ([(d.r.randint(1, 4), *shapes[0])] if d.flag(0.3) else [])
    options = dict(lr=d.r.choice([0.02, 0.5]), weight_decay=d.r.choice([0.0, 0.1]), momentum=d.r.choice([0.0, 0.5, 0.95]), nesterov=d.flag(),
                   ns_steps=d.r.choice([0, 1, 3, 5]), adjust_lr_fn=d.r.choice([None, "original", "match_rms_adamw"]), row_normalise=d.flag(0.3),
                   products=d.r.choice([None, "fp32", "bf16", *(["tf32"] if d.gpu else [])]))
    steps, size = d.r.choice([1, 2]), d.r.choice([1.0, 1e-3, 100.0])
    case = Case("muon", [str(options), f"steps={steps}", f"shapes={shapes}"], dtype, modes=("no_grad",))
    case.inputs = {f"p{i}": d.tensor(s, dtype) for i, s in enumerate(shapes)}
    gradients = [[d.tensor(s, dtype, size) for s in shapes] for _ in range(steps)]
    case.others = [g for one in gradients for g in one]
    case.frozen = tuple(case.inputs)

    def call(**inputs):
        parameters = [torch.nn.Parameter(t.clone(memory_format=torch.preserve_format) if 0 not in t.stride() else t.contiguous().clone()) for t in inputs.values()]
        optimizer = ingot.optim.Muon(parameters, **options)
        for one in gradients:
            for p, g in zip(parameters, one):
                p.grad = g
            optimizer.step()
        return tuple(p.detach() for p in parameters)

    narrow = options["products"] or ("bf16" if d.gpu else "fp32")
    unit = {"fp32": 2.0**-22, "bf16": 2.0**-8, "tf32": 2.0**-10}[narrow]
    if not d.gpu and (narrow == "tf32" or dtype is torch.float64):
        unit = 2.0**-22

    def on_square(n, x):
        """The CPU's steps for long matrices (kernels/muon/muon.cpp): on the square, and X is multiplied once in five steps. Roundings of the factor, which
        is 3.4445 ** 5 in the directions of singular values near zero, reach X's large singular values."""
        for first in range(0, options["ns_steps"], 5):
            square, factor = n.product(x, x.mT), None
            for _ in range(min(5, options["ns_steps"] - first)):
                q = n.sum(-4.7750 * square + n.product(2.0315 * square, square)) + 3.4445 * torch.eye(square.shape[-1], dtype=square.dtype)
                square = n.product(n.product(q, square), q)
                factor = q if factor is None else n.product(q, factor)
            x = n.product(factor, x)
        return x

    def reference(n, **inputs):
        results = []
        for i, p in enumerate(inputs.values()):
            buffer = torch.zeros_like(p)
            for one in gradients:
                g = one[i].double()
                buffer = n.out(options["momentum"] * buffer + (1 - options["momentum"]) * g)
                u = (1 - options["momentum"]) * g + options["momentum"] * buffer if options["nesterov"] else buffer
                if options["row_normalise"]:
                    u = u / u.norm(dim=-1, keepdim=True).clamp(min=1e-7)
                x = u / (u.flatten(-2).norm(dim=-1)[..., None, None] + 1e-7)
                wide = u.shape[-2] > u.shape[-1]
                x = x.mT if wide else x
                move = lambda t: n.add(t, unit * t.abs()) if not n.exact else t
                long = not d.gpu and narrow == "fp32" and options["ns_steps"] > 1 and x.shape[-1] >= 2 * x.shape[-2]
                if long and not n.exact:
                    x = on_square(n, move(x))
                for _ in range(0 if long and not n.exact else options["ns_steps"]):
                    x = move(x)
                    square = move(x @ x.mT)
                    x = 3.4445 * x + move(-4.7750 * square + 2.0315 * move(square @ square)) @ x
                x = move(x.mT if wide else x)
                rows, columns = p.shape[-2:]
                factor = 0.2 * math.sqrt(max(rows, columns)) if options["adjust_lr_fn"] == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
                p = n.out(p * (1 - options["lr"] * options["weight_decay"]) - options["lr"] * factor * x)
            results.append(p)
        return tuple(results)

    case.call, case.reference, case.jumps = call, reference, True
    return case


class _Norm(torch.nn.Module):
    """The module in the form of transformers."""

    def __init__(self, columns, eps, unit_offset):
        super().__init__()
        self.weight, self.variance_epsilon, self.unit_offset = torch.nn.Parameter(torch.empty(columns)), eps, unit_offset

    def forward(self, hidden_states):
        x = hidden_states.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        if self.unit_offset:
            return (x * (1 + self.weight.float())).to(hidden_states.dtype)
        return self.weight * x.to(hidden_states.dtype)


class _Gated(torch.nn.Module):
    def __init__(self, columns, hidden, bias, act):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(columns, hidden, bias=bias) for _ in range(2))
        self.down_proj, self.act_fn = torch.nn.Linear(hidden, columns, bias=bias), act

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def hf_patch(d):
    """A norm and a gated MLP that hf.patch finds in a model."""
    dtype = d.dtype(of_cpu=(torch.float32, torch.bfloat16, torch.float16))
    most = 1100 if d.gpu else 140
    columns, hidden = (max(1, d.columns(most, 8 if d.flag(0.7) else 1)) for _ in range(2))
    eps, offset, bias, tanh = d.r.choice([1e-5, 1e-6]), d.flag(0.4), d.flag(0.3), d.flag(0.4)
    model = torch.nn.Sequential(_Norm(columns, eps, offset), _Gated(columns, hidden, bias, torch.nn.GELU("tanh") if tanh else torch.nn.SiLU())).to(d.device, dtype)
    report = ingot.hf.patch(model)
    if len(report.replaced) != 2:
        raise AssertionError(f"hf.patch: {report}")
    case = Case("hf_patch", [f"eps={eps}", f"unit_offset={offset}", f"tanh={tanh}", "module=True"], dtype)
    x = d.tensor((*d.leading(d.rows(max(columns, hidden), 4097)), columns), dtype, d.scale)
    case.inputs["x"] = x if d.gpu else x.contiguous().clone()
    names = {}
    for name, p in model.named_parameters():
        key = name.replace(".", "_")[2:]
        names[key] = name
        case.inputs[key] = d.tensor(p.shape, dtype, 1.0 if p.dim() == 1 else 1 / math.sqrt(p.shape[1]), layout=d.gpu)

    def call(x, **p):
        return torch.func.functional_call(model, {names[k]: t for k, t in p.items()}, (x,))

    def reference(n, x, **p):
        y = n.sum(x * n.sum(torch.rsqrt(n.sum(x.square().mean(-1, keepdim=True)) + eps)))
        y = n.out(n.out(y) * (1 + p["weight"] if offset else p["weight"]))
        gate, up = (n.out(n.linear(y, p[f"{name}_proj_weight"], p.get(f"{name}_proj_bias"))) for name in ("gate", "up"))
        f = ACTIVATIONS["gelu_tanh" if tanh else "silu"]
        h = n.out(n.out(Activated.apply(gate, f, n, n.of_sums)) * up)
        return n.out(n.linear(h, p["down_proj_weight"], p.get("down_proj_bias")))

    case.call, case.reference = call, reference
    if d.gpu:  # on a CPU PyTorch's own product of 16 bits lets a NaN into the row before
        d.plant(case, list(case.inputs))
    return case


def _declared(op):
    """Cases of a declared operator (ingot/_declare.py): its formula in fp64, some roundings of the type of sums off."""

    def case_of(d):
        dtype, columns, which = d.dtype(), d.columns(), d.r.randrange(len(op.options))
        options = op.options[which]
        case = Case(op.name, [f"{k}={v}" for k, v in options.items()], dtype, jumps=which in op.jumps)
        shape = (*d.leading(d.rows(columns)), columns)
        case.inputs = {name: d.tensor(shape[-1:] if name in op.columns else shape, dtype, d.r.choice([1.0, 5.0, d.scale])) for name in op.tensors}
        given = inspect.signature(op.function).bind_partial(**options)
        given.apply_defaults()
        case.call = lambda **t: op.function(**t, **options)
        case.reference = lambda n, **t: n.out(n.sum(op.formula(*(n.sum(t[name]) for name in op.tensors), *(given.arguments[name] for name in op.others))))
        d.plant(case, ["x"])
        return case

    return case_of


OPS = {f.__name__: f for f in (rms_norm, fused_mlp, swiglu, gated_linear, linear_cross_entropy, grouped_linear, wide_mlp, rope, activation, attention, muon, hf_patch)}
OPS |= {name: _declared(op) for name, op in _declare.OPS.items() if name not in OPS}
