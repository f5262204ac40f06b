"""Replaces parts of a model that exists, Hugging Face's or any other, and puts them back.

    with ingot.hf.patch(model) as report:      # or: report = patch(model); ...; report.undo()
        print(report)

Modules are known by their structure, RMSNorms (_hf_norms.py), gated MLPs (_hf_gated.py) and losses (_hf_loss.py). Each is run beside its
replacement on random numbers, in every dtype that is served, with small weights in place of large ones; nothing is replaced that does not
agree. What only looks alike is named in the report, with what does not fit. Modules keep their class, parameters, hooks and state dict:
only `forward` is set on the instance.
"""
import functools
import types
from collections import Counter
from dataclasses import dataclass, field

import torch

from . import _hf_gated, _hf_loss, _hf_norms

__all__ = ["patch", "Report"]


@dataclass
class Report:
    """What `patch` did: (name, form, dtypes, largest relative error) of each replacement, (name, reason) of what only looked alike, and the
    names of those that were patched already, which the report of that call restores."""

    replaced: list = field(default_factory=list)
    skipped: list = field(default_factory=list)
    already: list = field(default_factory=list)
    _modules: list = field(default_factory=list, repr=False)
    _errors: list = field(default_factory=list, repr=False)
    _kinds: Counter = field(default_factory=Counter, repr=False)

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

    def _counted(self):
        kinds = [f"{n} {kind}{'es' if kind.endswith('s') else 's'}" if n != 1 else f"1 {kind}" for kind, n in self._kinds.items()]
        return " and ".join([", ".join(kinds[:-1])] * (len(kinds) > 1) + kinds[-1:]) or "nothing"

    def __str__(self):
        if not (self.replaced or self.skipped or self.already):
            return "found nothing to replace, nor a module like it"
        lines = [f"{self._counted()} replaced, {len(self.skipped)} similar module{'' if len(self.skipped) == 1 else 's'} left alone"
                 + (f", {len(self.already)} already patched" if self.already else "")]
        lines += [f"  {name}: {form}, error {', '.join(f'{error:.1e} in {str(dtype)[6:]}' for dtype, error in errors.items())}"
                  for (name, form, *_), errors in zip(self.replaced, self._errors)]
        lines += [f"  {name}: left alone: {reason}" for name, reason in self.skipped]
        lines += [f"  {name}: already patched" for name in self.already]
        return "\n".join(lines)


def _is_patched(module):
    return hasattr(getattr(module.__dict__.get("forward"), "__func__", None), "is_ingots")


def _install(report, name, module, found):
    # Whoever asks for the signature gets the module's own.
    forward = functools.update_wrapper(found.forward, getattr(module.forward, "__func__", module.forward))
    forward.is_ingots = True
    report._modules.append((module, module.__dict__.get("forward")))
    module.forward = types.MethodType(forward, module)
    report.replaced.append((name, found.form, tuple(found.errors), max(found.errors.values())))
    report._errors.append(found.errors)
    report._kinds[found.kind] += 1


def patch(model, *, norms=True, mlps=True, loss=False):
    """Replaces `model`'s RMSNorms and gated MLPs, in place; returns a Report whose undo() restores them.

    loss=True: in training and with labels a causal language model's loss comes from functional.linear_cross_entropy, and its output has no
    logits (None). Without labels, in eval mode, or where a call asks for some logits or a tuple, everything is as it was.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"hf.patch: model: found {type(model).__name__}, expected torch.nn.Module")
    kinds = [kind for kind, wanted in ((_hf_norms, norms), (_hf_gated, mlps), (_hf_loss, loss)) if wanted]
    report = Report()
    with torch.no_grad():
        for name, module in model.named_modules():
            name = name or type(module).__name__
            if _is_patched(module):
                report.already.append(name)
                continue
            for kind in kinds:
                found = kind.replacement(module)
                if isinstance(found, str):
                    report.skipped.append((name, found))
                elif found is not None:
                    _install(report, name, module, found)
    return report
