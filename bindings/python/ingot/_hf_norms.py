"""What hf.patch knows of RMSNorms.

One counts by its structure: one parameter `weight` of one dimension, an epsilon, no children, one input. Whether it multiplies by `weight` or
by `1 + weight` is found out by running it.
"""
import copy

import torch

from . import functional
from ._hf_parts import DTYPES, Replacement, error_of, own_forward, takes_one_input

# Largest error allowed relative to the largest value of a row: the original may round twice more than the kernel (after the
# normalisation, after the product) and sums in another order.
_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def replacement(module):
    """A Replacement, or the reason why there is none, or None where the module is nothing like an RMSNorm."""
    if unsupported_reason := _unsupported_reason(module):
        return unsupported_reason if "rmsnorm" in type(module).__name__.lower().replace("_", "") else None
    if not takes_one_input(module):
        return "its forward takes more than one input"
    if module.weight.is_meta:
        return "its weight is on the meta device"
    verdict = _verify(module)
    if isinstance(verdict, str):
        return verdict
    errors, unit_offset = verdict
    return Replacement("RMSNorm", "1 + weight" if unit_offset else "weight", errors,
                       _fused(own_forward(module), frozenset(errors), _epsilon(module), unit_offset))


def _epsilon(module):
    for name in ("variance_epsilon", "eps", "epsilon"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def _unsupported_reason(module):
    """What keeps a module from being an RMSNorm by its structure, or None."""
    own = dict(module.named_parameters(recurse=False))
    children = [name for name, _ in module.named_children()]
    if children:
        return f"found modules inside it ({', '.join(children[:3])}), expected none"
    if list(own) != ["weight"]:
        return f"found {'parameters ' + ', '.join(own) if own else 'no parameter'}, expected one, weight"
    if own["weight"].dim() != 1:
        return f"found a weight of {own['weight'].dim()} dimensions, expected 1"
    if not own["weight"].is_floating_point():
        return f"found a weight of {own['weight'].dtype}, expected floating-point numbers"
    if _epsilon(module) is None and not isinstance(module, torch.nn.RMSNorm):
        return "found no epsilon (variance_epsilon, eps or epsilon)"
    return None


def _probe(module):
    """A copy of the module with random weights, and rows from tiny (where epsilon matters) to large."""
    probe = copy.deepcopy(module)
    weight = probe.weight.data
    with torch.device("cpu"):  # the same numbers wherever tensors are made by default
        generator = torch.Generator().manual_seed(1)
        weight.copy_((torch.randn(weight.shape, generator=generator) * 0.5 + 0.5).to(weight.dtype))
        scale = torch.tensor([1e-4, 3e-3, 0.1, 1.0, 1.0, 30.0]).unsqueeze(1)
        rows = torch.randn(len(scale), weight.numel(), generator=generator) * scale
    return probe, rows.to(weight.device)


def _verify(module):
    """({dtype: error}, unit_offset) of the form that agrees, or a reason why none does."""
    try:
        probe, rows = _probe(module)
    except Exception as e:
        return f"no copy of it could be tried: {e}"
    eps = _epsilon(probe)
    errors, form, why = {}, None, "no dtype could be tried"
    for dtype in DTYPES:
        x = rows.to(dtype)
        try:
            expected = probe.forward(x)  # hooks are not ours to call
        except Exception as e:
            why = f"its own forward failed on {dtype}: {e}"
            continue
        if not isinstance(expected, torch.Tensor) or expected.shape != x.shape or expected.dtype is not dtype:
            continue  # its output widens: left to the original for this dtype
        for unit_offset in (False, True) if form is None else (form,):
            try:
                found = functional.rms_norm(x, probe.weight, eps, unit_offset=unit_offset)
            except Exception as e:
                return f"the kernel refused it: {e}"
            error = error_of(found, expected)
            if error <= _TOLERANCE[dtype]:
                errors[dtype], form = error, unit_offset
                break
            why = f"it differs from RMSNorm by {error:.1e} in {dtype}"
        else:
            if dtype is torch.float32:
                return why  # 16 bits would not tell it from one that is near
    return (errors, form) if errors else why


def _fused(original, served, eps, unit_offset):
    def forward(self, hidden_states):
        if hidden_states.dtype in served:
            return functional.rms_norm(hidden_states, self.weight, eps, unit_offset=unit_offset)
        return original(self, hidden_states)

    return forward
