"""Recognition and replacement of decoder layers for hf.patch: h = x + self_attn(input_layernorm(x)), then h + mlp(post_attention_layernorm(h)).

The replacing forward computes the first sum together with the norm behind it, and in the backward pass the gradients of both uses of x and of h in the kernels of the norms.
Attention and MLP, of any kind, are called as before. If a norm is not replaced, or has hooks, the layer's own forward runs.
"""
import inspect

import torch
from torch.compiler import is_dynamo_compiling

from . import _C, _rms_norm, functional
from ._hf_parts import DTYPES, Replacement, error_of, has_settings, own_forward, settings_of, tries_in_each_mode, with_children

_NORMS = ("input_layernorm", "post_attention_layernorm")
_CHILDREN = {*_NORMS, "self_attn", "mlp"}
_WIDTH, _EPS = 24, 1e-6
# The original rounds h before the norm, and both round the norm, the MLP and the last sum: four roundings, each of at most half an ulp.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


def replacement(module):
    """Returns a Replacement, the reason why the module cannot be replaced, or None where the module does not look like such a layer."""
    if set(module._modules) != _CHILDREN or list(module.named_parameters(recurse=False)):
        return None
    names = _inputs_of(module)
    if names is None or any(p.is_meta for p in module.parameters()):
        return None
    errors = _verify(module, names)
    if not isinstance(errors, dict):
        return errors
    key = frozenset(errors), tuple(names.items()), settings_of(module)
    return Replacement("decoder layer", "sums with their norms", errors, _fused(own_forward(module), *key), key)


def _inputs_of(module):
    """{name: default} of the inputs besides hidden_states, or None where the layer has inputs of other kinds."""
    try:
        parameters = list(inspect.signature(own_forward(module)).parameters.values())[1:]
    except (TypeError, ValueError):
        return None
    named = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if not named or named[0].name != "hidden_states" or any(p.kind is not p.VAR_KEYWORD for p in parameters if p not in named):
        return None
    return {p.name: p.default for p in named[1:]}


class _Norm(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x):
        return functional.rms_norm(x, self.weight, _EPS)


class _Attention(torch.nn.Module):
    """A function of the rows that is not linear. Keeps the arguments of its last call."""

    def forward(self, hidden_states, **named):
        self.named = named
        return torch.tanh(hidden_states.flip(-1)) * 2, None


class _Mlp(torch.nn.Module):
    def forward(self, x):
        return torch.sin(x.roll(1, -1)) * 1.5


def _verify(module, names):
    """Returns {dtype: error}, a reason, or None where the layer calls its modules in another way."""
    generator = torch.Generator().manual_seed(1)
    with torch.device("cpu"):  # the same numbers whatever PyTorch's default device is
        weights = [torch.randn(_WIDTH, generator=generator) * 0.5 + 1 for _ in _NORMS]
        rows = torch.randn(5, 3, _WIDTH, generator=generator) * 2  # 5 rows: a layer that unpacks the MLP's result into two parts then fails
    device = next(module.parameters()).device
    given = {name: object() for name in names}
    errors = {}
    for dtype in DTYPES:
        try:
            norms = {name: _Norm(w.to(device, dtype)) for name, w in zip(_NORMS, weights)}
            probe = with_children(module, self_attn=_Attention(), mlp=_Mlp(), **norms)
            x = rows.to(device, dtype).requires_grad_()
            with torch.enable_grad():
                passes = [own_forward(module)(probe, x, **given, other=1) for _ in tries_in_each_mode(probe)]
                expected = [passes[0], *torch.autograd.grad(passes[0].square().sum(), x)]
        except Exception:
            return None
        told = probe.self_attn.named
        with torch.enable_grad():
            y = _layer(probe, x, *((norms[name].weight, _EPS, False) for name in _NORMS), {**given, "other": 1})
            found = [y, *torch.autograd.grad(y.square().sum(), x)]
        if told != probe.self_attn.named or any(not isinstance(p, torch.Tensor) or p.shape != x.shape or p.dtype is not dtype for p in passes):
            return None
        error = max(*(error_of(y, p) for p in passes), error_of(found[1], expected[1]))
        if error <= _TOLERANCE[dtype]:
            errors[dtype] = error
        elif dtype is torch.float32:
            return f"its sums differ from those of a decoder layer by {error:.1e} in {dtype}"
    return errors


def _layer(layer, x, first, second, named):
    """first, second: (weight, epsilon, unit_offset) of the norms."""
    if torch.is_grad_enabled():
        normed, x = _rms_norm.rms_norm_beside(x, *first)
    else:
        normed = functional.rms_norm(x, *first[:2], unit_offset=first[2])
    attended = layer.self_attn(hidden_states=normed, **named)[0]
    if attended.dtype is x.dtype and attended.shape == x.shape:
        weight, eps, unit_offset = second
        normed, h = functional.rms_norm(attended, weight, eps, residual=x, unit_offset=unit_offset)
    else:  # under autocast
        h = x + attended
        normed = layer.post_attention_layernorm(h)
    return h + layer.mlp(normed)


def _options_of(norm, dtype):
    """(weight, epsilon, unit_offset) of a replaced norm that nothing watches, or None."""
    cls = type(norm)
    found = cls.__dict__.get("_replacement")
    if found is None or not cls._is_in_force or found.kind != "RMSNorm" or "forward" in norm.__dict__:
        return None
    served, eps, unit_offset, settings = found.key
    watched = norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks
    if watched or (dtype, norm.weight.dtype) not in served or not has_settings(norm, settings):
        return None
    return norm.weight, eps, unit_offset


def _fused(original, served, names, settings):
    defaults = {name: default for name, default in names if default is not inspect.Parameter.empty}

    def forward(self, hidden_states, *arguments, **named):
        if not is_dynamo_compiling() and hidden_states.dtype in served and has_settings(self, settings):  # torch.compile fuses the sums itself
            first, second = (_options_of(self._modules[name], hidden_states.dtype) for name in _NORMS)
            if first is not None and second is not None and _C.route(hidden_states, first[0], second[0]) != _C.DISPATCH:
                given = {**defaults, **dict(zip((name for name, _ in names), arguments)), **named}
                return _layer(self, hidden_states, first, second, given)
        return original(self, hidden_states, *arguments, **named)

    return forward
