"""The formulas of the operations in plain differentiable PyTorch; in fp64 they are the oracle."""
import torch
import torch.nn.functional as F
from ingot import _plain

# PyTorch's own formulas, of which the package has one for each name; softplus is written otherwise there.
ACTIVATIONS = _plain._ACTIVATIONS | {"softplus": lambda x: F.softplus(x, threshold=1000)}


def rms_norm(x, weight, eps, unit_offset=False):
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return y
    return y * (1 + weight if unit_offset else weight)


def mlp(x, weights, biases, gains, activation, activate_last=False):
    for i, w in enumerate(weights):
        if gains is not None:
            w = gains[i].unsqueeze(1) * w * torch.rsqrt(w.square().sum(1, keepdim=True) + 1e-12)
        x = F.linear(x, w, None if biases is None else biases[i])
        if activate_last or i + 1 < len(weights):
            x = ACTIVATIONS[activation](x)
    return x


def swiglu(gate, up, limit=0.0, alpha=1.0, up_offset=0.0, activation="silu"):
    if activation == "gelu_tanh":
        return ACTIVATIONS[activation](gate) * up
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + up_offset)


def split(packed, order):
    if order == "interleaved":
        return packed[..., 0::2], packed[..., 1::2]
    first, second = packed.chunk(2, -1)
    return (first, second) if order == "gate_first" else (second, first)


def rope(x, cos, sin, positions, interleaved=False, sign=1):
    half = cos.shape[1]
    c, s = cos[positions.long()].unsqueeze(-2), sign * sin[positions.long()].unsqueeze(-2)
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        y = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        y = torch.cat((a * c - b * s, b * c + a * s), -1)
    return torch.cat((y, rest), -1)


def wide(tensors):
    """fp64 leaves with the same values, for the oracle."""
    return [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


# Half a unit in the last place, relative.
ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def assert_near(found, oracle, roundings, note="", absolute=0.0):
    """`found` is within `roundings` roundings of its dtype from the fp64 oracle, relative to the size of the oracle's row, and `absolute`."""
    assert found.shape == oracle.shape, f"{note}: found shape {tuple(found.shape)}, expected {tuple(oracle.shape)}"
    assert torch.isfinite(found).all(), f"{note}: found values that are not finite"
    if found.numel() == 0:
        return
    f, o = found.detach().double(), oracle.detach().double()
    size = o.abs().reshape(-1, o.shape[-1] if o.dim() else 1).amax(-1).reshape(o.shape[:-1] + (1,) * (o.dim() > 0))
    allowed = roundings * ROUNDING[found.dtype] * size + absolute + 1e-30
    worst = ((f - o).abs() / allowed).max().item()
    assert worst <= 1, f"{note}: found {worst * roundings:.1f} roundings of {found.dtype} from fp64, expected at most {roundings}"
