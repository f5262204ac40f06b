"""Recognition and replacement of RMSNorms for hf.patch.

A module is a candidate by its structure: one parameter `weight` of one dimension, an epsilon, no children, one input. The module is run to find out whether it
multiplies by `weight` or by `1 + weight`.
"""
import copy

import torch

from . import functional
from ._hf_parts import DTYPES, LeftAlone, Replacement, error_of, fill_buffers, has_settings, own_forward, settings_of, takes_one_input, tries_in_each_mode

# Largest error allowed relative to the largest value of a row: the original may round twice more than the kernel (after the
# normalisation, after the product) and sums in another order.
_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def replacement(module):
    """Returns a Replacement, the reason why the module cannot be replaced, or None where the module does not look like an RMSNorm."""
    if unsupported_reason := _unsupported_reason(module):
        return unsupported_reason if "rmsnorm" in type(module).__name__.lower().replace("_", "") else None
    if not takes_one_input(module):
        return "its forward takes more than one input"
    if module.weight.is_meta:
        return "its weight is on the meta device"
    verdict = _verify(module)
    if isinstance(verdict, str):
        return verdict
    errors, served, unit_offset = verdict
    key = served, _epsilon(module), unit_offset, settings_of(module)
    return Replacement("RMSNorm", "1 + weight" if unit_offset else "weight", errors, _fused(own_forward(module), *key), key)


def _epsilon(module):
    for name in ("variance_epsilon", "eps", "epsilon"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def _unsupported_reason(module):
    """The reason why a module's structure is not an RMSNorm's, or None."""
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
    fill_buffers(probe)
    weight = probe.weight.data
    with torch.device("cpu"):  # the same numbers whatever PyTorch's default device is
        generator = torch.Generator().manual_seed(1)
        weight.copy_((torch.randn(weight.shape, generator=generator) * 0.5 + 0.5).to(weight.dtype))
        scale = torch.tensor([1e-4, 3e-3, 0.1, 1.0, 1.0, 30.0]).unsqueeze(1)
        rows = torch.randn(len(scale), weight.numel(), generator=generator) * scale
    return probe, rows.to(weight.device)


def _verify(module):
    """Returns ({dtype of the input: error} for the weight's present dtype, {(dtype of the input, dtype of the weight)} that are supported, unit_offset) for the
    formula that agrees with the module, or the reason why none does."""
    try:
        probe, rows = _probe(module)
    except Exception as e:
        return f"no copy of it could be tried: {e}"
    present = probe.weight.dtype
    errors, served, form, why = {}, set(), None, "no dtype could be tried"
    for dtype in DTYPES:
        for weight_dtype in dict.fromkeys((present, dtype)):  # as the module is now, and as it is once the whole model has this dtype
            probe.weight.data = probe.weight.data.to(weight_dtype)
            try:
                error, form = _compare(module, probe, rows.to(dtype), form)
            except LeftAlone as e:
                if weight_dtype is present:
                    why = str(e) or why
                    if dtype is torch.float32 and e.differs:
                        return why  # in 16 bits similar modules cannot be distinguished
                continue
            served.add((dtype, weight_dtype))
            if weight_dtype is present:
                errors[dtype] = error
    return (errors, frozenset(served), form) if errors else why


def _compare(module, probe, x, form):
    """Returns (largest error, unit_offset) for the formula that agrees in evaluation and in training mode."""
    original, eps = own_forward(module), _epsilon(probe)
    differences = []
    for unit_offset in (False, True) if form is None else (form,):
        errors = []
        for mode in tries_in_each_mode(probe):
            try:
                expected = original(probe, x)  # not a call of the module, because that would run the user's hooks
            except Exception as e:
                raise LeftAlone(f"its own forward failed on {x.dtype}: {e}") from e
            if not isinstance(expected, torch.Tensor) or expected.shape != x.shape or expected.dtype is not x.dtype:
                raise LeftAlone  # the output has a wider dtype than x: the module's own forward computes it
            try:
                found = functional.rms_norm(x, probe.weight, eps, unit_offset=unit_offset)
            except Exception as e:
                raise LeftAlone(f"the kernel refused it: {e}", differs=True) from e
            errors.append(error_of(found, expected))
            if not errors[-1] <= _TOLERANCE[x.dtype]:
                differences.append((mode, errors[-1]))
                break
        else:
            return max(errors), unit_offset
    mode, error = max(differences, key=lambda d: (d[0] == "training", -d[1]))
    raise LeftAlone(f"it differs from RMSNorm by {error:.1e} in {x.dtype} in {mode} mode", differs=True)


def _fused(original, served, eps, unit_offset, settings):
    def forward(self, hidden_states):
        weight = self.weight
        if (hidden_states.dtype, weight.dtype) in served and has_settings(self, settings):
            return functional.rms_norm(hidden_states, weight, eps, unit_offset=unit_offset)
        return original(self, hidden_states)

    return forward
