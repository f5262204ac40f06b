"""The formulas of the operations in PyTorch's own operations, differentiable any number of times.

They run in the cases in which the kernels have no derivative: in forward mode (jvp, jacfwd, hessian), for a rotation whose table needs a gradient, and
where torch.compile traces transforms of torch.func, in which PyTorch cannot follow the kernels. Sums are in fp32 (fp64 for fp64), as in the kernels.
"""
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

_ACTIVATIONS = {
    "identity": lambda x: x,
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "leaky_relu_squared": lambda x: F.leaky_relu(x, 0.5).square(),
    "relu_squared": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": lambda x: -F.logsigmoid(-x),  # accurate in both tails, and so are its derivatives
}


def needed():
    """Whether a call must use a formula: in forward mode, whose level torch.func's transforms set too, and in compiled transforms."""
    return forward_ad._current_level >= 0 or (is_dynamo_compiling() and torch._C._are_functorch_transforms_active())


def _wide(t):
    return t if t is None or t.dtype is torch.float64 else t.float()


def rms_norm(x, weight, eps, unit_offset):
    s = _wide(x)
    y = s * torch.rsqrt(s.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (1 + _wide(weight) if unit_offset else _wide(weight))
    return y.to(x.dtype)


def add_rms_norm(x, residual, weight, eps, unit_offset):
    total = (_wide(x) + _wide(residual)).to(x.dtype)
    return rms_norm(total, weight, eps, unit_offset), total


def mlp(x, parameters, bias, weight_norm, name, activate_last):
    each = 1 + bias + weight_norm
    for i in range(0, len(parameters), each):
        w = parameters[i]
        if weight_norm:
            v = _wide(w)
            w = (_wide(parameters[i + each - 1]).unsqueeze(1) * v * torch.rsqrt(v.square().sum(1, keepdim=True) + 1e-12)).to(w.dtype)
        x = F.linear(x, w, parameters[i + 1] if bias else None)
        if activate_last or i + each < len(parameters):
            x = activation(x, name)
    return x


_COMPILED_PRODUCTS = ("cuda",)  # devices where torch.compile is faster for some sizes


def compiled_mlp_is_faster(x, parameters, weight_norm, recompute):
    """Whether PyTorch's products are faster in a training step that torch.compile traces: below 512 rows, for layers 264 to 512 wide
    (docs/mlp-kernels.md)."""
    if x.device.type not in _COMPILED_PRODUCTS or x.dtype not in (torch.bfloat16, torch.float16) or weight_norm or recompute or x.dim() == 0:
        return False
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in (x, *parameters)):
        return False
    widths = [x.shape[-1], *(p.shape[0] for p in parameters)]
    return 256 < max(widths) <= 512 and all(n % 8 == 0 for n in widths) and x.numel() < 512 * x.shape[-1]


def wide_mlp(x, w1, b1, w2, b2, name):
    return F.linear(activation(F.linear(x, w1, b1), name), w2, b2)


def grouped_linear(x, weight, bias, offsets):
    """Does not read `offsets` on the host. Makes a copy of the expert's matrix for each row."""
    rows = torch.arange(x.shape[0], device=x.device, dtype=offsets.dtype)
    expert = torch.bucketize(rows, offsets[1:], right=True)
    inside, expert = (rows < offsets[-1])[:, None], expert.clamp(max=max(weight.shape[0] - 1, 0))
    if weight.shape[0] == 0:
        return x.new_zeros(x.shape[0], weight.shape[1])
    y = torch.einsum("rk,rnk->rn", _wide(x), _wide(weight)[expert])
    if bias is not None:
        y = y + _wide(bias)[expert]
    return torch.where(inside, y, 0.0).to(x.dtype)


def activation(x, name):
    return _ACTIVATIONS[name](_wide(x)).to(x.dtype)


def swiglu(packed, up, order, limit, alpha, up_offset, cubic):
    if up is not None:
        gate = packed
    elif order == 2:
        gate, up = packed[..., 0::2], packed[..., 1::2]
    else:
        first, second = packed.chunk(2, -1)
        gate, up = (first, second) if order == 0 else (second, first)
    gate, up = _wide(gate), _wide(up)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    z = alpha * gate + cubic * gate.pow(3) if cubic else alpha * gate
    return (gate * torch.sigmoid(z) * (up + up_offset)).to(packed.dtype)


def gated_linear(x, w, w_up, bias, up_bias, order, columns, *options):
    return swiglu(_projection(x, w, bias, columns), None if w_up is None else _projection(x, w_up, up_bias, columns), order, *options)


def gate_and_up(x, w, w_up, bias, up_bias, order, columns):
    """Gate and up in the form that is kept for the backward pass: the halves of one tensor."""
    both = _projection(x, w, bias, columns)
    if w_up is not None:
        return torch.cat((both, _projection(x, w_up, up_bias, columns)), -1)
    return torch.cat((both[..., 0::2], both[..., 1::2]), -1) if order == 2 else both


def _projection(x, w, bias, columns):
    y = x @ w if columns else F.linear(x, w)
    return y if bias is None else y + bias


def rope(x, positions, cos, sin, interleaved, sign):
    """`positions` has one entry per token, as _positions() returns them."""
    return _turn(_wide(x), positions, cos, sin, interleaved, sign).to(x.dtype)


def _turn(x, positions, cos, sin, interleaved, sign):
    half = cos.shape[-1]
    at = positions.long().view(x.shape[:-2])
    c, s = cos[at].unsqueeze(-2), sign * sin[at].unsqueeze(-2)
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    first, second = a * c - b * s, b * c + a * s
    turned = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    return torch.cat((turned, rest), -1)


def qk_norm_rope(x, positions, cos, sin, gain, eps, interleaved, sign):
    y = rms_norm(_wide(x), None, eps, False)
    if cos is not None:
        y = _turn(y, positions, cos, sin, interleaved, sign)
    return (y if gain is None else y * gain.unsqueeze(-1)).to(x.dtype)


def attention(q, k, v, cu_q, cu_k, sinks, scale, softcap, window, causal):
    """Attention over packed segments, as kernels/attention/attention.h defines it: out (Tq, H, D) and lse (H, Tq). All scores at once."""
    group = q.shape[1] // max(1, k.shape[1])
    wide_q, wide_k, wide_v = (_wide(t).transpose(0, 1) for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    scores = scale * (wide_q @ wide_k.mT)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    rows, columns = (torch.arange(n, device=q.device) for n in (q.shape[0], k.shape[0]))
    of_row, of_column = (torch.searchsorted(cu[1:].contiguous(), i, right=True) for cu, i in ((cu_q, rows), (cu_k, columns)))
    covered = of_row < cu_q.shape[0] - 1
    last = of_row.clamp(max=cu_q.shape[0] - 2)
    # The last key that a row sees, where masks are aligned at the segment's end.
    end = cu_k[last + 1] - cu_q[last + 1] + rows
    seen = (of_row[:, None] == of_column) & covered[:, None]
    if causal:
        seen = seen & (columns <= end[:, None])
    if window > 0:
        seen = seen & (columns > end[:, None] - window)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, _wide(sinks)[:, None, None].to(scores.dtype).expand(-1, scores.shape[1], 1)], -1)
    none = (~seen).all(-1) if sinks is None else ~covered
    safe = torch.where(none[:, None], torch.zeros((), dtype=scores.dtype, device=q.device), scores)  # a row of -inf only has no softmax
    lse = torch.where(none, -torch.inf, torch.logsumexp(safe, -1))
    weights = torch.where(none[:, None], 0.0, torch.softmax(safe, -1))[..., : k.shape[0]]
    return (weights @ wide_v).transpose(0, 1).to(q.dtype), lse


def linear_cross_entropy(x, weight, bias, target, softcap, z_loss, ignore_index, label_smoothing, reduce):
    """Losses of the rows of x (T, C), or their sum. All logits at once."""
    logits = F.linear(_wide(x), _wide(weight), _wide(bias))
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    lse = torch.logsumexp(logits, -1)
    counts = target != ignore_index
    expected = logits.gather(-1, torch.where(counts, target, 0).long().unsqueeze(-1)).squeeze(-1)
    if label_smoothing > 0:
        expected = (1 - label_smoothing) * expected + label_smoothing * logits.mean(-1)
    loss = torch.where(counts, lse - expected + z_loss * lse.square(), 0.0)
    return loss.sum() if reduce else loss
