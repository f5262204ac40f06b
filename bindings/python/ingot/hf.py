"""Replaces parts of an existing model, from Hugging Face or any other source, and restores them.

    with ingot.hf.patch(model) as report:      # or: report = patch(model); ...; report.undo()
        print(report)

Modules are recognised by their structure: RMSNorms (_hf_norms.py), gated MLPs (_hf_gated.py), rotary embeddings (_hf_rope.py),
decoder layers (_hf_layers.py) and losses (_hf_loss.py). Each module is run beside its
replacement on random numbers, in every supported dtype, in training and in evaluation mode, with small weights in place of large ones. A module that does not
agree is left unchanged, and the report names it with the reason. Modules keep their parameters, hooks and state dict.

A replaced module has a subclass of its class, of the same name, whose `forward` is the replacement. Copies of the module (copy.copy, deepcopy,
replicas of nn.DataParallel) have that class too and compute with their own weights; a pickled module is read back with its own class.
The replacement is used as long as the attributes that were verified have not changed (epsilon, activation, dtype of the weight, loss function); otherwise the
module's own forward runs.

`register_attention` and `register_experts` give transformers the attention kernels and the products of experts under the name "ingot" (_hf_attention.py,
_hf_experts.py).
"""
import copyreg
import functools
import operator
import types
from collections import Counter
from dataclasses import dataclass, field

import torch

from . import _hf_attention, _hf_experts, _hf_gated, _hf_layers, _hf_loss, _hf_norms, _hf_rope, _op

__all__ = ["patch", "Report", "register_attention", "register_experts", "attention_fallbacks", "experts_fallbacks"]

# The number of calls in which PyTorch computed the attention, or the experts, of a layer, by reason: {reason: calls}.
attention_fallbacks = _hf_attention.fallbacks
experts_fallbacks = _hf_experts.fallbacks


def register_attention():
    """Makes attn_implementation="ingot" known to transformers (5 or later, else an ImportError); calling it again does nothing.

        ingot.hf.register_attention()
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="ingot")   # or model.set_attn_implementation("ingot")

    The kernels compute causal and bidirectional attention with grouped heads, sliding windows, sinks, softcaps, padding on either side, packed
    sequences and caches that grow. PyTorch computes a layer in the cases that the kernels do not support: dropout, masks of another pattern or made by the
    caller, padding with holes, static caches, and on a GPU types other than bfloat16 and float16. `attention_fallbacks` counts such calls by their reason,
    and the logger "ingot" has a warning for the first of each. output_attentions=True is a NotImplementedError.

    Under torch.compile a causal model without a cache, as in training, refuses padding with holes. Where the call has no padding, the model also refuses
    masks of another pattern, such as images whose tokens see each other. The refusal is a ValueError of the run, because the compiled graph has no other
    way to compute the layer.
    """
    _hf_attention.register()


def register_experts():
    """Makes experts_implementation="ingot" known to transformers (5 or later, else an ImportError); calling it again does nothing.

        ingot.hf.register_experts()
        model.set_experts_implementation("ingot")            # Mixtral, Qwen3-MoE, GPT-OSS and other models with ExpertsInterface

    The products of the experts are functional.grouped_linear, on a CPU and in 16 bits on a Hopper GPU; elsewhere transformers' "grouped_mm" computes
    them, counted in `experts_fallbacks` by the reason.
    """
    _hf_experts.register()


@dataclass
class Report:
    """The result of `patch`.

    replaced: (name, form, dtypes, largest relative error) of each replacement. skipped: (name, reason) of each module that resembles a replaceable one.
    already: names of modules that an earlier call has patched; the report of that call restores them.
    """

    replaced: list = field(default_factory=list)
    skipped: list = field(default_factory=list)
    already: list = field(default_factory=list)
    _modules: list = field(default_factory=list, repr=False)
    _classes: dict = field(default_factory=dict, repr=False)
    _errors: list = field(default_factory=list, repr=False)
    _kinds: Counter = field(default_factory=Counter, repr=False)

    def undo(self):
        """Restores every module; calling undo() again has no effect. Copies that were made of patched modules then compute with their own forward, too."""
        for module, cls, instance_attributes in self._modules:
            cls._is_in_force = False
            if type(module) is cls:
                module.__class__ = cls._own_class
            module.__dict__.update(instance_attributes)
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
            return "nothing replaced: found no RMSNorm, gated MLP, rotary embedding or decoder layer of a known structure"
        lines = [f"{self._counted()} replaced, {len(self.skipped)} similar module{'' if len(self.skipped) == 1 else 's'} left alone"
                 + (f", {len(self.already)} already patched" if self.already else "")]
        lines += [f"  {name}: {form}, error {', '.join(f'{error:.1e} in {str(dtype)[6:]}' for dtype, error in errors.items())}"
                  for (name, form, *_), errors in zip(self.replaced, self._errors)]
        lines += [f"  {name}: left alone: {reason}" for name, reason in self.skipped]
        lines += [f"  {name}: already patched" for name in self.already]
        return "\n".join(lines)


class _ReplacedType(type):
    """The type of the classes of replaced modules. Unlike copy, pickle puts a module's own class in their place."""


def _reduce_class(cls):
    own = cls.__dict__.get("_own_class")
    return cls.__qualname__ if own is None else (operator.getitem, ((own,), 0))


copyreg.pickle(_ReplacedType, _reduce_class)


class _Replaced:
    _is_in_force = False

    def __init_subclass__(cls):
        """Does not notify the module's own class, which may keep a list of its subclasses."""


def _replaced_class(own, replacement):
    """A subclass of `own` with the replacement's forward."""
    original, replaced = own.forward, replacement.forward

    def forward(self, *arguments, **named):
        return (replaced if cls._is_in_force else original)(self, *arguments, **named)

    cls = _ReplacedType(own.__name__, (_Replaced, own), {
        "forward": functools.update_wrapper(forward, original),  # inspect.signature() returns the signature of the module's own forward
        "__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__, "_own_class": own, "_is_in_force": True,
        "_replacement": replacement})
    return cls


def _is_patched(module):
    return any(cls.__dict__.get("_is_in_force", False) for cls in type(module).__mro__ if isinstance(cls, _ReplacedType))


def _forward_of_instance(module):
    """({attribute: value} of the bound methods of the module's own forward that stand in its __dict__, a reason why it cannot be patched)."""
    attributes = {}
    hooked = "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__  # accelerate's hooks call _old_forward
    for name in ("_old_forward",) if hooked else ("forward",):
        forward = module.__dict__.get(name)
        if forward is None:
            continue
        if getattr(forward, "__func__", None) is not type(module).forward or forward.__self__ is not module:
            return {}, "found a forward that was set on the instance, expected its class's (patch the model before other tools set it)"
        attributes[name] = forward
    return attributes, None


def _install(report, name, module, found):
    """Gives the module a class with the replacement; returns a reason if that is not possible."""
    attributes, reason = _forward_of_instance(module)
    if reason is not None:
        return reason
    own = type(module)
    key = own, found.kind, found.key
    try:
        cls = report._classes.get(key) or report._classes.setdefault(key, _replaced_class(own, found))
        module.__class__ = cls
    except TypeError as e:
        return f"its class cannot be replaced: {e}"
    module.__dict__.pop("forward", None) if "forward" in attributes else None
    if "_old_forward" in attributes:
        module._old_forward = types.MethodType(cls.forward, module)
    report._modules.append((module, cls, attributes))
    report.replaced.append((name, found.form, tuple(found.errors), max(found.errors.values())))
    report._errors.append(found.errors)
    report._kinds[found.kind] += 1
    return None


def patch(model, *, norms=True, mlps=True, rope=True, loss=False):
    """Replaces the RMSNorms, with the sums before them, the gated MLPs and the rotary embeddings of `model`, in place; returns a Report whose undo() restores them.

    loss=True: in training and with labels a language model's loss comes from functional.linear_cross_entropy, and the output has no logits (None). Without
    labels, in evaluation mode, or where a call requests some logits or a tuple, the model behaves as before.
    PyTorch's random number generators have the same state after the call as before. TypeError: `model` is no torch.nn.Module. ValueError: an option is no
    bool. A module that cannot be replaced is no error: Report.skipped has the reason.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"hf.patch: model: found {type(model).__name__}, expected torch.nn.Module")
    _op.expect_bools("hf.patch", norms=norms, mlps=mlps, rope=rope, loss=loss)
    kinds = [kind for kind, wanted in ((_hf_norms, norms), (_hf_layers, norms), (_hf_gated, mlps), (_hf_rope, rope), (_hf_loss, loss)) if wanted]
    report = Report()
    devices = {p.device for p in model.parameters() if p.is_cuda}
    with torch.no_grad(), torch.random.fork_rng([d.index for d in devices]):
        for name, module in model.named_modules():
            name = name or type(module).__name__
            if _is_patched(module):
                report.already.append(name)
                continue
            for kind in kinds:
                found = kind.replacement(module)
                if found is not None and not isinstance(found, str):
                    found = _install(report, name, module, found)
                if found is not None:
                    report.skipped.append((name, found))
    return report
