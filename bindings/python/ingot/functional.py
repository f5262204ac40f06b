"""Ingot's operations as functions of tensors. Differentiable any number of times; usable under torch.compile, autocast, CUDA graphs and torch.func.

Sizes: T rows (all leading dimensions), C columns. Errors: ValueError (wrong shape, dtype or option), TypeError (an operand that is no tensor) or
NotImplementedError (this build or this machine lacks the kernel). Each error names the operation, the argument, the value found and the value
expected. An option whose default is True or False takes a bool only: numbers, texts and arrays of one element are refused.
The formulas stand at the head of the headers in src/ingot/kernels.
"""
from collections.abc import Iterable

import torch
from torch.compiler import is_dynamo_compiling

from . import _C, _gates, _grouped, _loss, _mlp, _op, _plain, _rms_norm, _rope, _wide_mlp, ops
from ._C import route
from ._attention import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "fused_mlp", "gated_linear", "grouped_linear", "linear_cross_entropy", "qk_norm_rope", "rms_norm", "rope", "rope_",
           "rope_table", "swiglu", "wide_mlp"]

_PLAIN, _DIFFERENTIATE, _DISPATCH = _C.PLAIN, _C.DIFFERENTIATE, _C.DISPATCH

# Given to the two ops whose calls are also written in C++ (native/calls.cpp).
_C.attach_calls(_rms_norm.rms_norm_eager, _rms_norm.run_rms_norm_plain, _rms_norm.run_rms_norm, _mlp.mlp_eager, _mlp.mlp_edge_eager, _mlp.run_mlp)


def _untensored(op, name, function, x, *arguments, **options):
    """The result of `function` for an x that is no tensor: a node of the graph if x belongs to a symbolic trace (torch.fx), otherwise a TypeError."""
    if isinstance(x, torch.fx.Proxy):
        return x.tracer.create_proxy("call_function", function, (x, *arguments), options)
    raise TypeError(f"{op}: {name}: found {type(x).__name__}, expected torch.Tensor")


def rms_norm(x, weight=None, eps=None, *, residual=None, unit_offset=False):
    """y = s / sqrt(mean(s^2) + eps) * weight over the last dimension of s = x + residual.

    x: (..., C) float64, float32, bfloat16 or float16. weight: (C), of any of these dtypes (float64 only together with float64), or None. unit_offset multiplies
    by 1 + weight. eps=None: the default of torch.nn.RMSNorm, the machine epsilon of the dtype of sums. Returns y in x's dtype, or (y, s) where a residual is
    given. Sums are kept in fp32 (fp64 for fp64).
    """
    _op.expect_bools("rms_norm", unit_offset=unit_offset)
    if residual is None and not is_dynamo_compiling():
        y = _C.rms_norm_call(x, weight, eps, unit_offset)
        if y is not None:
            return y
    if not isinstance(x, torch.Tensor):
        return _untensored("rms_norm", "x", rms_norm, x, weight, eps, residual=residual, unit_offset=unit_offset)
    _op.expect_tensors_or_none("rms_norm", x=x, weight=weight, residual=residual)
    _rms_norm.expect_vector(x, weight)
    _op.expect_eps("rms_norm", eps)
    if residual is not None:
        return _add_rms_norm(x, residual, weight, eps, unit_offset)
    if _plain.needed():
        return _plain.rms_norm(x, weight, _op.default_eps(eps, x.dtype), unit_offset)
    return _rms_norm.rms_norm_op(x, weight, eps, unit_offset)[0]


def _add_rms_norm(x, residual, weight, eps, unit_offset):
    if residual.dtype is not x.dtype:
        raise ValueError(f"rms_norm: residual: found dtype {residual.dtype}, expected x's {x.dtype}")
    if residual.shape != x.shape:
        raise ValueError(f"rms_norm: residual: found shape {tuple(residual.shape)}, expected x's {tuple(x.shape)}")
    way = _DISPATCH if is_dynamo_compiling() else route(x, residual, weight)
    if way == _DIFFERENTIATE:
        return _rms_norm.add_rms_norm_eager(x, residual, weight, eps, unit_offset)
    if way == _DISPATCH and _plain.needed():
        return _plain.add_rms_norm(x, residual, weight, _op.default_eps(eps, x.dtype), unit_offset)
    run = _rms_norm.run_add_rms_norm if way == _PLAIN else _rms_norm.add_rms_norm_op
    y, total, _ = run(x, residual, weight, eps, unit_offset)
    return y, total


def _records():
    """Whether an operator keeps tensors for a backward pass. Under torch.jit.trace no operator does: PyTorch repeats the trace without gradients and
    compares, and the backward pass computes the tensors again."""
    return torch.is_grad_enabled() and not torch.jit.is_tracing()


def _autocast_to(x):
    """The dtype of products on x's device under autocast, or None without autocast."""
    kind = x.device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind) or x.dtype is torch.float64 or not x.is_floating_point():
        return None
    return torch.get_autocast_dtype(kind)


def _mlp_parameters(weights, biases, gains):
    for name, given in (("weights", weights), ("biases", biases), ("gains", gains)):
        if not isinstance(given, Iterable) and (given is not None or name == "weights"):
            raise TypeError(f"mlp: {name}: found {type(given).__name__}, expected a list of tensors")
    weights, biases, gains = (given if given is None else list(given) for given in (weights, biases, gains))
    if biases is None and gains is None:
        return weights
    for name, given in (("biases", biases), ("gains", gains)):
        if given is not None and len(given) != len(weights):
            raise ValueError(f"mlp: {name}: found {len(given)}, expected one for each of {len(weights)} weights")
    columns = [c for c in (weights, biases, gains) if c is not None]
    return [t for layer in zip(*columns) for t in layer]


def fused_mlp(x, weights, biases=None, gains=None, *, activation="softplus", activate_last=False, recompute=False):
    """h_0 = x, h_{l+1} = act(h_l W_l^T + b_l) in one kernel; the last layer is linear unless activate_last.

    x: (..., K0). weights: a list of (N_l, K_l), as nn.Linear holds them. biases: a list of (N_l) or None. gains: a list of (N_l): the
    weights are then directions, W[n] = g[n] w[n] / |w[n]|. activation: a name in `ingot.functional.ACTIVATIONS`. recompute keeps nothing for the backward pass
    and computes the layers again from x. Under autocast everything runs in autocast's dtype; otherwise all tensors have one dtype.
    """
    _op.expect_bools("mlp", activate_last=activate_last, recompute=recompute)
    return mlp_of_parameters(x, _mlp_parameters(weights, biases, gains), biases is not None, gains is not None, activation,
                             activate_last, recompute)


def mlp_of_parameters(x, parameters, bias, weight_norm, activation, activate_last, recompute):
    """fused_mlp with the parameters already in the order the kernel takes: weight, bias, gain, weight, ..."""
    if not isinstance(x, torch.Tensor):
        return _untensored("mlp", "x", mlp_of_parameters, x, parameters, bias, weight_norm, activation, activate_last, recompute)
    act = _op.activation_number("mlp", activation)
    narrow = _autocast_to(x)
    if narrow is not None:
        x, parameters = x.to(narrow), [p.to(narrow) for p in parameters]
    if not is_dynamo_compiling():
        y = _C.mlp_call(x, parameters, _mlp.mlp_options(bias, weight_norm, act, activate_last, recompute))
        if y is not None:
            return y
    _op.expect_tensors("mlp", **dict(_mlp.named(parameters, bias, weight_norm)))
    if _plain.needed() or (is_dynamo_compiling() and _plain.compiled_mlp_is_faster(x, parameters, weight_norm, recompute)):
        return _plain.mlp(x, parameters, bias, weight_norm, activation, activate_last)
    return _mlp.mlp_op(x, parameters, bias, weight_norm, activation, activate_last, _records() and not recompute)[0]


_GELU_ALPHA = 1.5957691216057307  # gelu_tanh(g) = g sigmoid(2 sqrt(2 / pi) (g + 0.044715 g^3))


def gate_numbers(op, activation, limit, alpha, up_offset):
    """(limit, alpha, up_offset, cubic) of a gate whose activation has a name."""
    limit, alpha, up_offset = (_op.number(op, name, n) for name, n in (("limit", limit), ("alpha", alpha), ("up_offset", up_offset)))
    if not limit >= 0:
        raise ValueError(f"{op}: limit: found {limit}, expected 0 (no clamp) or more")
    if activation == "silu":
        return limit, alpha, up_offset, 0.0
    if activation != "gelu_tanh":
        raise ValueError(f"{op}: activation: found {activation!r}, expected 'silu' or 'gelu_tanh'")
    if not alpha >= 0:
        raise ValueError(f"{op}: alpha: found {alpha}, expected 0 or more beside activation='gelu_tanh'")
    return limit, alpha * _GELU_ALPHA, up_offset, alpha**3 * _GELU_ALPHA * 0.044715


def swiglu(gate, up=None, *, order="gate_first", limit=0.0, alpha=1.0, up_offset=0.0, activation="silu"):
    """silu(gate) * up, of two (..., H) tensors or of one packed (..., 2H) tensor; with activation="gelu_tanh", gelu_tanh(gate) * up. Returns (..., H).

    gate and up have one dtype: float32, bfloat16 or float16, on a CPU float64 too; the result has this dtype, and the formula is computed in fp32 (fp64 for fp64).

    order (packed): "gate_first" is [gate | up], "gate_second" is [up | gate], "interleaved" alternates gate and up.
    GPT-OSS: limit=7, alpha=1.702, up_offset=1, which is min(gate, limit) sigmoid(alpha gate) (clamp(up, -limit, limit) + 1).
    """
    if not isinstance(gate, torch.Tensor):
        return _untensored("swiglu", "gate", swiglu, gate, up, order=order, limit=limit, alpha=alpha, up_offset=up_offset, activation=activation)
    number = _gates.GATE_ORDERS.get(order) if isinstance(order, str) else None
    if number is None:
        raise ValueError(f"swiglu: order: found {order!r}, expected one of {', '.join(_gates.GATE_ORDERS)}")
    _op.expect_tensors_or_none("swiglu", gate=gate, up=up)
    _op.expect_float("swiglu", "gate", gate)
    _op.expect_like("swiglu", "gate", gate, up=up)
    if up is not None and up.shape != gate.shape:
        raise ValueError(f"swiglu: up: found shape {tuple(up.shape)}, expected gate's {tuple(gate.shape)}")
    if gate.dim() == 0:
        raise ValueError("swiglu: gate: found a tensor without dimensions, expected at least one")
    if up is None and gate.shape[-1] % 2:
        raise ValueError(f"swiglu: gate: found {gate.shape[-1]} columns, expected an even number, those of gate and up")
    options = gate_numbers("swiglu", activation, limit, alpha, up_offset)
    way = _DISPATCH if is_dynamo_compiling() else route(gate, up)
    if way == _PLAIN:
        return _gates.run_swiglu_gate(gate, up, number, *options)
    if way == _DIFFERENTIATE:
        return _gates.swiglu_gate_eager(gate, up, number, *options)
    if _plain.needed():
        return _plain.swiglu(gate, up, number, *options)
    return _gates.swiglu_gate_op(gate, up, number, *options)


def gated_linear(x, w, bias=None, *, up=None, up_bias=None, down=None, down_bias=None, order="gate_first", columns=False, limit=0.0, alpha=1.0, up_offset=0.0,
                 activation="silu"):
    """silu(gate) * up, [gate | up] = x w^T + bias: both products and the gate; on Hopper in one kernel, for 16-bit types.

    x: (..., C). w: (2H, C), the rows of gate and up in the `order` of functional.swiglu; columns=True: (C, 2H). bias: (2H), not allowed with interleaved rows.
    Where `up` (H, C) is given, w (H, C) and bias (H) belong to the gate alone, and up_bias (H) to up. For activation, limit, alpha and up_offset see
    functional.swiglu. Returns (..., H).

    down (N, H), down_bias (N): the MLP's last product, too; returns h down^T + down_bias, (..., N). The backward pass then computes h again from gate and up,
    in the kernel of their gradients, so that training keeps (..., 2H) of an MLP and not (..., 3H). All tensors have one dtype: float32, bfloat16 or float16 (on a CPU computed in float32 and rounded), or float64 on a
    CPU.
    """
    op = "gated_linear"
    if not isinstance(x, torch.Tensor):
        return _untensored(op, "x", gated_linear, x, w, bias, up=up, up_bias=up_bias, down=down, down_bias=down_bias, order=order, columns=columns, limit=limit,
                           alpha=alpha, up_offset=up_offset, activation=activation)
    number = _gates.GATE_ORDERS.get(order) if isinstance(order, str) else None
    if number is None:
        raise ValueError(f"{op}: order: found {order!r}, expected one of {', '.join(_gates.GATE_ORDERS)}")
    _op.expect_bools(op, columns=columns)
    _op.expect_tensors(op, x=x, w=w)
    _op.expect_tensors_or_none(op, bias=bias, up=up, up_bias=up_bias, down=down, down_bias=down_bias)
    if x.dim() == 0 or w.dim() != 2 or (up is None and w.shape[1 if columns else 0] % 2):
        raise ValueError(f"{op}: found x of {tuple(x.shape)} and w of {tuple(w.shape)}, expected (..., C) and "
                         f"{'(C, 2H)' if columns else '(2H, C)'}")
    if up is not None and (up.shape != w.shape or (bias is None) != (up_bias is None) or number != 0):
        raise ValueError(f"{op}: up: found {tuple(up.shape)} beside w of {tuple(w.shape)}, order {order!r} and "
                         f"{sum(b is not None for b in (bias, up_bias))} biases, expected equal shapes, 'gate_first' and two or none")
    if up is None and up_bias is not None:
        raise ValueError(f"{op}: up_bias: found one without up, expected both")
    if down is None and down_bias is not None:
        raise ValueError(f"{op}: down_bias: found one without down, expected both")
    hidden = w.shape[1 if columns else 0] // (2 if up is None else 1)
    if down is not None and (down.dim() != 2 or down.shape[1] != hidden):
        raise ValueError(f"{op}: down: found shape {tuple(down.shape)}, expected (N, {hidden})")
    _op.expect_float(op, "x", x)
    _op.expect_like(op, "x", x, w=w, up=up, bias=bias, up_bias=up_bias, down=down, down_bias=down_bias)
    if w.shape[0 if columns else 1] != x.shape[-1]:
        raise ValueError(f"{op}: w: found shape {tuple(w.shape)}, expected {x.shape[-1]} {'rows' if columns else 'columns'}, as many as columns of x")
    wanted = {"bias": (bias, w.shape[1 if columns else 0]), "up_bias": (up_bias, hidden), "down_bias": (down_bias, None if down is None else down.shape[0])}
    for name, (b, length) in wanted.items():
        if b is not None and (b.numel() != length or b.dim() != 1):
            raise ValueError(f"{op}: {name}: found shape {tuple(b.shape)}, expected ({length},)")
    options = number, columns, *gate_numbers(op, activation, limit, alpha, up_offset)
    operands = x, w, up, bias, up_bias
    way = _DISPATCH if is_dynamo_compiling() else route(*operands, down, down_bias)
    if way == _DIFFERENTIATE:
        return _gates.gated_linear_eager(*operands, *options, down=down, down_bias=down_bias)
    if way == _PLAIN:
        h = _gates.run_gated_linear(*operands, *options, False)[0]
    elif _plain.needed():
        h = _plain.gated_linear(*operands, *options)
    else:
        h = _gates.gated_linear_op(*operands, *options, _records())[0]
    return h if down is None else torch.nn.functional.linear(h, down, down_bias)


def linear_cross_entropy(x, weight, target, bias=None, *, reduction="mean", ignore_index=-100, label_smoothing=0.0, softcap=0.0, z_loss=0.0):
    """cross_entropy(softcap tanh(l / softcap), target), l = x weight^T + bias, whose logits l are never in memory as a whole.

    x: (..., C). weight: (V, C), as in nn.Linear. bias: (V) or None. target: integers of x's leading shape, from 0 to V - 1, or ignore_index (no loss, no
    gradient). Any other target is an error, on a GPU a loss of NaN for its row. softcap 0: none. z_loss adds z_loss log(sum exp)^2 to each row's loss.
    label_smoothing s: the target distribution is 1 - s for its class plus s / V for every class. reduction: "mean" (over rows that are not ignored), "sum", or
    "none", which returns losses of target's shape. Losses are float32 (float64 for float64). torch.nn.functional.linear_cross_entropy computes the same,
    without softcap and z_loss.

    For "mean" and "sum" the gradients are computed together with the loss: three products in all. For "none" the backward pass computes the logits once more.
    """
    op = "linear_cross_entropy"
    if not isinstance(x, torch.Tensor):
        return _untensored(op, "x", linear_cross_entropy, x, weight, target, bias, reduction=reduction, ignore_index=ignore_index,
                           label_smoothing=label_smoothing, softcap=softcap, z_loss=z_loss)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{op}: reduction: found {reduction!r}, expected 'mean', 'sum' or 'none'")
    if not isinstance(ignore_index, _op.INTEGERS) or not -(2**31) <= ignore_index < 2**31:
        raise ValueError(f"{op}: ignore_index: found {ignore_index!r}, expected an integer of 32 bits")
    softcap, z_loss, label_smoothing = (_op.number(op, name, n) for name, n in
                                        (("softcap", softcap), ("z_loss", z_loss), ("label_smoothing", label_smoothing)))
    _op.expect_tensors(op, x=x, weight=weight)
    _op.expect_tensors_or_none(op, bias=bias)
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(f"{op}: found x of {tuple(x.shape)}, weight of {tuple(weight.shape)}" + (f" and bias of {tuple(bias.shape)}" if bias is not None else "")
                         + ", expected (..., C), (V, C)" + (" and (V)" if bias is not None else ""))
    if not isinstance(target, torch.Tensor) or target.is_floating_point() or target.is_complex() or target.dtype is torch.bool or target.shape != x.shape[:-1]:
        found = f"{target.dtype} of {tuple(target.shape)}" if isinstance(target, torch.Tensor) else type(target).__name__
        raise ValueError(f"{op}: target: found {found}, expected integers of shape {tuple(x.shape[:-1])}")
    _op.expect_tensors(op, target=target)
    narrow = _autocast_to(x)
    if narrow is not None:
        x, weight, bias = (t if t is None else t.to(narrow) for t in (x, weight, bias))
    rows, classes = x.reshape(target.numel(), x.shape[-1]), target.reshape(-1)
    options = softcap, z_loss, int(ignore_index), label_smoothing
    loss = _linear_cross_entropy(rows, weight, bias, classes, options, reduction != "none")
    if reduction == "none":
        return loss.view(target.shape)
    if reduction == "sum":
        return loss
    count = (classes != ignore_index).sum()
    return torch.where(count > 0, loss / count.clamp(min=1), torch.nan)  # without rows the gradient is 0


def _linear_cross_entropy(x, weight, bias, target, options, reduce):
    """Losses of rows, or their sum."""
    way = _DISPATCH if is_dynamo_compiling() else route(x, weight, bias)
    if way == _PLAIN:
        return _loss.run_linear_cross_entropy(x, weight, bias, target, *options, reduce, False, False, False)[0]
    if way == _DIFFERENTIATE:
        return _loss.linear_cross_entropy_eager(x, weight, bias, target, reduce, *options)
    if _plain.needed():
        return _plain.linear_cross_entropy(x, weight, bias, target, *options, reduce)
    needs = (t is not None and _records() and t.requires_grad for t in (x, weight, bias))
    return _loss.linear_cross_entropy_op(x, weight, bias, target, *options, reduce, *needs)[0]


def wide_mlp(x, w1, w2, b1=None, b2=None, *, activation="leaky_relu_squared", recompute=False):
    """f(x w1^T + b1) w2^T + b2, of any width; on Hopper the activation and its slope are part of the products.

    x: (..., C). w1: (H, C), b1: (H), w2: (N, H), b2: (N). activation: a name of `ingot.functional.ACTIVATIONS`. Returns (..., N). For the backward
    pass of the squared ReLUs, f's values and one bit per value are kept (a byte on a CPU; not in float16, whose squares underflow). For other activations
    the arguments of f are kept. recompute keeps nothing. Under autocast everything runs in autocast's dtype; otherwise all tensors have one dtype.
    """
    if not isinstance(x, torch.Tensor):
        return _untensored("wide_mlp", "x", wide_mlp, x, w1, w2, b1, b2, activation=activation, recompute=recompute)
    _op.activation_number("wide_mlp", activation)
    _op.expect_bools("wide_mlp", recompute=recompute)
    _op.expect_tensors("wide_mlp", x=x, w1=w1, w2=w2)
    _op.expect_tensors_or_none("wide_mlp", b1=b1, b2=b2)
    narrow = _autocast_to(x)
    if narrow is not None:
        x, w1, b1, w2, b2 = (t if t is None else t.to(narrow) for t in (x, w1, b1, w2, b2))
    fits = x.dim() > 0 and w1.dim() == w2.dim() == 2 and x.shape[-1] == w1.shape[1] and w2.shape[1] == w1.shape[0]
    if not fits or any(b is not None and b.shape != w.shape[:1] for b, w in ((b1, w1), (b2, w2))):
        found = ", ".join(f"{name} of {tuple(t.shape)}" for name, t in (("x", x), ("w1", w1), ("b1", b1), ("w2", w2), ("b2", b2)) if t is not None)
        raise ValueError(f"wide_mlp: found {found}, expected (..., C), (H, C), (H), (N, H), (N)")
    if _plain.needed():
        return _plain.wide_mlp(x, w1, b1, w2, b2, activation)
    return _wide_mlp.wide_mlp_op(x, w1, b1, w2, b2, activation, _records() and not recompute)[0]


def grouped_linear(x, weight, offsets, bias=None):
    """y[r] = weight[e] x[r] + bias[e] for the rows r of expert e, offsets[e] <= r < offsets[e + 1]: the products of a mixture of experts.

    x: (R, K), rows sorted by expert. weight: (E, N, K). bias: (E, N) or None. offsets: (E + 1) int32 or int64 on x's device, ascending from 0 to at most R;
    the host does not read them on a GPU. Rows behind the last expert's have y = 0 and no gradient. Returns (R, N). The gradients of weight and bias are
    summed in fp32 (fp64 of fp64) and rounded once. All of one dtype: float32, bfloat16 or float16, which a CPU computes in float32, or float64 on a CPU.
    On a Hopper GPU the products of 16-bit operands run on the tensor cores where K and N are multiples of 8; a plain kernel, many times slower, computes
    everything else. A GPU does not check the offsets: wrong ones give wrong numbers. Under autocast everything runs in autocast's dtype.
    """
    op = "grouped_linear"
    if not isinstance(x, torch.Tensor):
        return _untensored(op, "x", grouped_linear, x, weight, offsets, bias)
    _op.expect_tensors(op, x=x, weight=weight, offsets=offsets)
    _op.expect_tensors_or_none(op, bias=bias)
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2] or (bias is not None and bias.shape != weight.shape[:2]):
        raise ValueError(f"{op}: found x of {tuple(x.shape)}, weight of {tuple(weight.shape)}" + (f" and bias of {tuple(bias.shape)}" if bias is not None else "")
                         + ", expected (R, K), (E, N, K)" + (" and (E, N)" if bias is not None else ""))
    if offsets.dtype not in (torch.int32, torch.int64) or offsets.shape != (weight.shape[0] + 1,):
        raise ValueError(f"{op}: offsets: found {offsets.dtype} of {tuple(offsets.shape)}, expected int32 or int64 of ({weight.shape[0] + 1},)")
    narrow = _autocast_to(x)
    if narrow is not None:
        x, weight, bias = (t if t is None else t.to(narrow) for t in (x, weight, bias))
    if offsets.dtype is torch.int64 and not offsets.is_cuda:
        offsets = offsets.clamp(-1, 2**31 - 1)  # an offset beyond 32 bits must be refused, and not become a different offset
    offsets = offsets.to(torch.int32).contiguous()
    if _plain.needed():
        return _plain.grouped_linear(x, weight, bias, offsets)
    return _grouped.grouped_linear_op(x, weight, bias, offsets)


def rope_table(positions, dim, base=10000.0, *, scaling="none", factor=1.0, original_context=0.0, beta_fast=32.0, beta_slow=1.0,
               truncate=True, attention_factor=0.0, dtype=torch.float32, device=None):
    """(cos, sin), each (positions, dim / 2), for `rope`: row p has the cosines and sines of the angles p base^(-2 j / dim), in radians.

    positions: the number of positions, from 0. dim: an even number. scaling: "none"; "ntk"; or "yarn", which needs original_context, the length in tokens
    of the context with which the model was trained. factor: how many times longer the context is. attention_factor multiplies the tables of yarn, 0: 0.1
    ln(factor) + 1. dtype: float32, or float64 for x of float64. device=None: PyTorch's default device. The tables are made on the host. A compiled function
    that contains this call makes them at every run, so a table made once, before the compiled function, is faster. Errors: ValueError for an argument,
    TypeError for a tensor of positions.
    """
    if isinstance(positions, torch.Tensor) and positions.dim() > 0:
        raise TypeError("rope_table: positions: found a tensor, expected the number of positions; rope takes the positions of tokens")
    positions, dim = (n.item() if isinstance(n, torch.Tensor) and n.dim() == 0 else n for n in (positions, dim))
    _op.expect_integers("rope_table", 0, positions=positions)
    _op.expect_bools("rope_table", truncate=truncate)
    base, factor, original_context, beta_fast, beta_slow, attention_factor = (_op.number("rope_table", name, n) for name, n in (
        ("base", base), ("factor", factor), ("original_context", original_context), ("beta_fast", beta_fast), ("beta_slow", beta_slow),
        ("attention_factor", attention_factor)))
    if not isinstance(dim, _op.INTEGERS) or dim < 2 or dim % 2:
        raise ValueError(f"rope_table: dim: found {dim!r}, expected an even number from 2")
    if scaling not in ("none", "ntk", "yarn"):
        raise ValueError(f"rope_table: scaling: found {scaling!r}, expected 'none', 'ntk' or 'yarn'")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"rope_table: dtype: found {dtype}, expected torch.float32, or torch.float64 for x of float64")
    device = torch.empty(0).device if device is None else device
    positions, dim = (n if isinstance(n, torch.SymInt) else int(n) for n in (positions, dim))
    options = base, scaling, factor, original_context, beta_fast, beta_slow, truncate, attention_factor, dtype
    if is_dynamo_compiling():
        cos, sin = _rope.rope_table_op(positions, dim, *options)
    else:
        trace = torch._C._get_tracing_state()
        torch._C._set_tracing_state(None)  # the tables are constants of a trace of torch.jit
        try:
            cos, sin = _rope.rope_table_op(positions, dim, *options)
        finally:
            torch._C._set_tracing_state(trace)
    return cos.to(device), sin.to(device)


def _expect_heads(op, x):
    if x.dim() < 3:
        raise ValueError(f"{op}: x: found shape {tuple(x.shape)}, expected (..., S, H, D)")
    _op.expect_float(op, "x", x)


def _positions(op, x, positions, cos):
    """Returns (T) int32 for x of (..., S, H, D), from positions per sequence or per token. If positions are left out, they count from 0, up to the length of
    the table."""
    leading = x.shape[:-2]
    if positions is None:
        if cos.dim() == 2 and leading[-1] > cos.shape[0]:
            raise ValueError(f"{op}: positions: found none for x of shape {tuple(x.shape)} beside a table of {cos.shape[0]} rows, expected a row for each of "
                             f"{leading[-1]} positions")
        positions = torch.arange(leading[-1], dtype=torch.int32, device=x.device)
    _op.expect_tensors(op, positions=positions)
    if positions.device != x.device:
        raise ValueError(f"{op}: positions: found a tensor on {positions.device}, expected x's {x.device}")
    if positions.shape != leading:
        try:
            positions = positions.expand(leading)
        except RuntimeError:
            raise ValueError(f"{op}: positions: found shape {tuple(positions.shape)}, expected {tuple(leading)} or what "
                             "broadcasts to it") from None
    if positions.is_floating_point() or positions.is_complex() or positions.dtype is torch.bool:
        raise ValueError(f"{op}: positions: found {positions.dtype}, expected integers")
    positions = positions.reshape(-1)
    if positions.dtype is torch.int64 and not positions.is_cuda:
        positions = positions.clamp(-1, 2**31 - 1)  # a position beyond 32 bits must be refused, and not become a different position
    return positions.to(torch.int32)


def _expect_rotation(op, x, cos, sin, interleaved, sign):
    """Refuses options that are no order of pairs and no direction, and an x and a table of `rope_table` that do not go together."""
    _op.expect_bools(op, interleaved=interleaved)
    if not isinstance(sign, _op.INTEGERS) or sign not in (1, -1):
        raise ValueError(f"{op}: sign: found {sign!r}, expected 1 or -1")
    for name, t in (("cos", cos), ("sin", sin)):
        if t.dtype is not _op.sum_dtype(x.dtype):
            raise ValueError(f"{op}: {name}: found dtype {t.dtype}, expected {_op.sum_dtype(x.dtype)} for x of {x.dtype}")
        if t.device != x.device:
            raise ValueError(f"{op}: {name}: found a tensor on {t.device}, expected x's {x.device}")
    if cos.dim() != 2 or 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(f"{op}: cos: found shape {tuple(cos.shape)}, expected (positions, R / 2) with R at most {x.shape[-1]}, the columns of x")
    if sin.shape != cos.shape:
        raise ValueError(f"{op}: sin: found shape {tuple(sin.shape)}, expected cos's {tuple(cos.shape)}")


def rope(x, cos, sin, positions=None, *, interleaved=False, sign=1):
    """Rotates pairs of the last dimension of x (..., S, H, D) by the angle of each token's position.

    cos, sin: (positions, R / 2) from `rope_table`, R at most D (less: a partial rotation), float32 (float64 for float64).
    Where the table needs a gradient, PyTorch's own operations compute the result.
    positions: integers that index rows of the table, (S) or one per token; 0, 1, ... by default. On a GPU, which reads 32 bits of a position, a position
    outside the table uses the last row. Returns a tensor of x's shape and dtype. Pairs are (j, j + R/2) of the first R dimensions, or (2j, 2j + 1) where
    interleaved. sign=-1 rotates in the opposite direction.
    """
    if not isinstance(x, torch.Tensor):
        return _untensored("rope", "x", rope, x, cos, sin, positions, interleaved=interleaved, sign=sign)
    _op.expect_tensors("rope", x=x, cos=cos, sin=sin)
    _expect_heads("rope", x)
    positions = _positions("rope", x, positions, cos)
    _expect_rotation("rope", x, cos, sin, interleaved, sign)
    way = _DISPATCH if is_dynamo_compiling() else route(x, cos, sin)
    if way == _PLAIN:
        return _rope.run_rope(x, positions, cos, sin, interleaved, sign)
    if _by_formula(cos, sin):
        return _plain.rope(x, _op.expect_positions("rope", positions, cos), cos, sin, interleaved, sign)
    return _rope.rope_op(x, positions, cos, sin, interleaved, sign)


def _by_formula(cos, sin):
    """Whether the call needs a derivative that the kernels do not have: in forward mode, or with respect to the table."""
    return _plain.needed() or (cos is not None and sin is not None and torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad))


def rope_(x, cos, sin, positions=None, *, interleaved=False, sign=1):
    """`rope` in place: rotates x and returns x. A partial rotation does not read the columns that it leaves unchanged.

    For inference: refused where gradients are recorded and under torch.compile.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"rope_: x: found {type(x).__name__}, expected torch.Tensor")
    _op.expect_tensors("rope_", x=x, cos=cos, sin=sin)
    _expect_heads("rope_", x)
    positions = _positions("rope_", x, positions, cos)
    _expect_rotation("rope_", x, cos, sin, interleaved, sign)
    if is_dynamo_compiling() or route(x, cos, sin) != _PLAIN:
        raise NotImplementedError("rope_: found a call that autograd, torch.compile or torch.func follows, expected none (rope can be followed)")
    return _rope.run_rope_(x, positions, cos, sin, interleaved, sign)


def qk_norm_rope(x, cos=None, sin=None, positions=None, *, gain=None, eps=2.0**-23, interleaved=False, sign=1):
    """RMSNorm over D without a weight, then `rope` (omitted without cos and sin), then a factor per head.

    x: (..., S, H, D) float64, float32, bfloat16 or float16. cos, sin, positions, interleaved, sign: see `rope`. gain: (H) float32 (float64 for float64), or
    None. Returns a tensor of x's shape and dtype; the formula is computed in fp32 (fp64 for fp64).
    """
    if not isinstance(x, torch.Tensor):
        return _untensored("qk_norm_rope", "x", qk_norm_rope, x, cos, sin, positions, gain=gain, eps=eps, interleaved=interleaved, sign=sign)
    _op.expect_tensors_or_none("qk_norm_rope", x=x, cos=cos, sin=sin, gain=gain)
    _expect_heads("qk_norm_rope", x)
    eps = _op.number("qk_norm_rope", "eps", eps)
    if (cos is None) != (sin is None):
        raise ValueError(f"qk_norm_rope: {'cos' if cos is None else 'sin'}: found None beside {'sin' if cos is None else 'cos'}, expected both or none")
    positions = None if cos is None else _positions("qk_norm_rope", x, positions, cos)
    if cos is not None:
        _expect_rotation("qk_norm_rope", x, cos, sin, interleaved, sign)
    if gain is not None and (gain.shape != x.shape[-2:-1] or gain.dtype is not _op.sum_dtype(x.dtype) or gain.device != x.device):
        raise ValueError(f"qk_norm_rope: gain: found {gain.dtype} of {tuple(gain.shape)} on {gain.device}, expected {_op.sum_dtype(x.dtype)} of ({x.shape[-2]},) on {x.device}")
    way = _DISPATCH if is_dynamo_compiling() else route(x, cos, sin, gain)
    if way == _PLAIN:
        return _rope.run_qk_norm_rope(x, positions, cos, sin, gain, eps, interleaved, sign)
    if _by_formula(cos, sin):
        return _plain.qk_norm_rope(x, _op.expect_positions("qk_norm_rope", positions, cos), cos, sin, gain, eps, interleaved, sign)
    return _rope.qk_norm_rope_op(x, positions, cos, sin, gain, eps, interleaved, sign)


ACTIVATIONS = tuple(_op.ACTIVATIONS)

for _name, _declared in ops.OPS.items():
    globals()[_name] = _declared.function
    __all__.append(_name)
