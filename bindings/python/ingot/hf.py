"""Replaces the RMSNorms of a model that exists, Hugging Face's or any other, and puts them back.

    with ingot.hf.patch(model) as report:      # or: report = patch(model); ...; report.undo()
        print(report)

A module counts by its structure: one parameter `weight` of one dimension, an epsilon, no children, one input. Whether it multiplies by
`weight` or by `1 + weight` is found out by running it; nothing is replaced that does not agree with the kernel on random rows in each
dtype that is served. What only goes by the name (RMSNorm in its class) is named in the report, with what does not fit. Modules keep their class, parameters, hooks and state dict: only `forward` is set on the instance.
"""
import copy
import inspect
import types
from dataclasses import dataclass, field

import torch

from . import functional

__all__ = ["patch", "Report"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Largest error allowed relative to the largest value of a row: the original may round twice more than the kernel (after the
# normalisation, after the product) and sums in another order.
_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@dataclass
class Report:
    """What `patch` did: (name, form, dtypes, largest relative error) of each replacement, (name, reason) of what only looked alike, and the
    names of those that were patched already, which the report of that call restores."""

    replaced: list = field(default_factory=list)
    skipped: list = field(default_factory=list)
    already: list = field(default_factory=list)
    _modules: list = field(default_factory=list, repr=False)

    def undo(self):
        """Restores every module; calling it again does nothing."""
        for module, previous in self._modules:
            if previous is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = previous
        self._modules.clear()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.undo()

    def __str__(self):
        if not (self.replaced or self.skipped or self.already):
            return "found no RMSNorm, nor a module like one"
        lines = [f"{len(self.replaced)} RMSNorms replaced, {len(self.skipped)} similar modules left alone"
                 + (f", {len(self.already)} already patched" if self.already else "")]
        lines += [f"  {name}: {form}, {', '.join(str(d)[6:] for d in dtypes)}, error {error:.1e}"
                  for name, form, dtypes, error in self.replaced]
        lines += [f"  {name}: left alone: {reason}" for name, reason in self.skipped]
        lines += [f"  {name}: already patched" for name in self.already]
        return "\n".join(lines)


def _epsilon(module):
    for name in ("variance_epsilon", "eps", "epsilon"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def _misfit(module):
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


def _is_called_one(module):
    return "rmsnorm" in type(module).__name__.lower().replace("_", "")


def _takes_one_input(module):
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):
        return False
    free = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(free) == 1 and all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_KEYWORD) for p in signature.parameters.values())


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


def _error(found, expected):
    size = expected.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return ((found.double() - expected.double()).abs() / size.double()).max().item()


def _verify(module):
    """({dtype}, unit_offset, largest error) of the form that agrees, or a reason why none does."""
    try:
        probe, rows = _probe(module)
    except Exception as e:
        return f"no copy of it could be tried: {e}"
    eps = _epsilon(probe)
    served, form, worst, why = set(), None, 0.0, "no dtype could be tried"
    for dtype in _DTYPES:
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
            error = _error(found, expected)
            if error <= _TOLERANCE[dtype]:
                served.add(dtype)
                form, worst = unit_offset, max(worst, error)
                break
            why = f"it differs from RMSNorm by {error:.1e} in {dtype}"
    return (served, form, worst) if served else why


def _own_forward(module):
    """What computes `module` so far, as a function of the module too: a copy of it has weights of its own."""
    forward = module.forward
    if isinstance(forward, types.MethodType) and forward.__self__ is module:
        return forward.__func__
    return lambda _, hidden_states: forward(hidden_states)


def _fused(original, served, eps, unit_offset):
    def forward(self, hidden_states):
        if hidden_states.dtype in served:
            return functional.rms_norm(hidden_states, self.weight, eps, unit_offset=unit_offset)
        return original(self, hidden_states)

    forward.is_ingots = True
    return forward


def _is_patched(module):
    return hasattr(getattr(module.__dict__.get("forward"), "__func__", None), "is_ingots")


def patch(model):
    """Replaces `model`'s RMSNorms by the fused kernel, in place; returns a Report whose undo() restores them."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"hf.patch: model: found {type(model).__name__}, expected torch.nn.Module")
    report = Report()
    with torch.no_grad():
        for name, module in model.named_modules():
            if _is_patched(module):
                report.already.append(name)
                continue
            if misfit := _misfit(module):
                if _is_called_one(module):
                    report.skipped.append((name, misfit))
                continue
            if not _takes_one_input(module):
                report.skipped.append((name, "its forward takes more than one input"))
                continue
            if module.weight.is_meta:
                report.skipped.append((name, "its weight is on the meta device"))
                continue
            verdict = _verify(module)
            if isinstance(verdict, str):
                report.skipped.append((name, verdict))
                continue
            served, unit_offset, worst = verdict
            report._modules.append((module, module.__dict__.get("forward")))
            module.forward = types.MethodType(_fused(_own_forward(module), frozenset(served), _epsilon(module), unit_offset), module)
            form = "1 + weight" if unit_offset else "weight"
            report.replaced.append((name, form, tuple(d for d in _DTYPES if d in served), worst))
    return report
