"""Recognition and replacement of the losses of language models for hf.patch, also of models that take images: loss_function(lm_head(decoder(...))).

In training and with labels, the replacing forward gives the decoder's output to functional.linear_cross_entropy; its output has no logits. The model's forward
is run with a small Linear in place of lm_head and with given hidden states in place of the decoder's output, to find out what the model computes between
lm_head and its loss.
"""
import copy
import inspect

import torch
import torch.nn.functional as F

from . import functional
from ._hf_parts import DTYPES, Replacement, has_settings, is_plain_linear, own_forward, settings_of, small_linear, with_children

_FEATURES, _CLASSES = 24, 40
# Roundings of fp32 as in the tests of kernels/cross_entropy. In 16 bits the original rounds logits (below 60) and capped logits: relative to 1,
# the size of probabilities.
_TOLERANCE = {torch.float32: 130 * 2.0**-24, torch.bfloat16: 4 * 60 * 2.0**-9, torch.float16: 4 * 60 * 2.0**-12}


def replacement(module):
    """Returns a Replacement, the reason why the module cannot be replaced, or None if the module has no lm_head, or no labels among its inputs."""
    if "lm_head" not in module._modules or not hasattr(module, "loss_function"):
        return None
    original = own_forward(module)
    try:
        names = [p.name for p in inspect.signature(module.forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    except (TypeError, ValueError):
        return "found a forward without a signature"
    if "labels" not in names:
        return None
    if unsupported_reason := _unsupported_reason(module):
        return unsupported_reason
    for softcap in dict.fromkeys((_softcap(module), 0.0)):  # a model that sees images may not apply the softcap of its text model
        verdict = _verify(module, original, names, softcap)
        if not isinstance(verdict, str):
            break
    else:
        return verdict
    errors, fields, wants_labels = verdict
    form = f"loss of logits with softcap {softcap:g}" if softcap else "loss"
    key = tuple(names), frozenset(errors), softcap, fields, wants_labels, module.loss_function, _softcap(module), _settings(module)
    return Replacement("loss", form, errors, _fused(original, *key), key)


def _text_config(module):
    return getattr(module.config, "text_config", None) or module.config


def _softcap(module):
    return float(getattr(_text_config(module), "final_logit_softcapping", None) or 0)


def _settings(module):
    return tuple((name, value) for name, value in settings_of(module) if name != "vocab_size")  # which resize_token_embeddings sets


def _decoder_of(module):
    return module._modules.get(getattr(module, "base_model_prefix", ""))


def _unsupported_reason(module):
    if not is_plain_linear(module.lm_head):
        return f"found lm_head of type {type(module.lm_head).__name__}, or watched, expected Linear"
    if module.lm_head.weight.is_meta:
        return "lm_head is on the meta device"
    if _decoder_of(module) is None:
        return "found no decoder under the name of base_model_prefix"
    return None if hasattr(module, "config") else "found no config"


class _Given(torch.nn.Module):
    """A decoder that returns given hidden states, and records the names of its arguments."""

    def __init__(self, output):
        super().__init__()
        self.output, self.names = output, set()

    def forward(self, *arguments, **named):
        self.names.update(named)
        return _Output(self.output)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(f"the forward uses the decoder's {name}, expected calls of the decoder alone") from None


class _Output:
    """A ModelOutput with only the last hidden states."""

    def __init__(self, last_hidden_state):
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __getitem__(self, i):
        return (self.last_hidden_state,)[i]


def _probe(module, dtype):
    """The module with a small head, the hidden states that its decoder returns, and labels."""
    generator = torch.Generator().manual_seed(1)
    head = small_linear(_FEATURES, _CLASSES, module.lm_head, 1.0, generator).to(dtype).requires_grad_()
    with torch.device("cpu"):
        hidden = torch.randn(2, 9, _FEATURES, generator=generator) * 2
        labels = torch.randint(0, _CLASSES, (2, 9), generator=generator)
    labels[0, 3:5] = -100
    device = head.weight.device
    hidden = hidden.to(device, dtype).requires_grad_()
    probe = with_children(module, **{module.base_model_prefix: _Given(hidden), "lm_head": head})
    probe.config = copy.deepcopy(module.config)
    for config in (probe.config, _text_config(probe)):
        if hasattr(config, "vocab_size"):
            config.vocab_size = _CLASSES
    if "vocab_size" in probe.__dict__:
        probe.vocab_size = _CLASSES
    probe.training = True
    return probe, hidden, labels.to(device)


def _verify(module, original, names, softcap):
    """Returns ({dtype: error}, the output's type and the names of its other fields, whether the decoder receives the labels), or a reason."""
    errors, fields, wants_labels, why = {}, None, False, "no dtype could be tried"
    for dtype in DTYPES:
        try:
            probe, hidden, labels = _probe(module, dtype)
        except Exception as e:
            return f"no copy of it could be tried: {e}"
        parameters = [hidden, *probe.lm_head.parameters()]
        ids, differences = torch.zeros_like(labels), []
        for options in ({}, {"num_items_in_batch": 11}):
            try:
                with torch.enable_grad():
                    output = original(probe, input_ids=ids, labels=labels, **options)
                    expected = [output.loss, *torch.autograd.grad(output.loss, parameters)]
            except Exception as e:
                why = f"its own forward failed on {dtype}: {e}"
                break
            wants_labels = "labels" in getattr(probe, module.base_model_prefix).names
            fields = type(output), tuple(name for name in type(output).__dataclass_fields__ if name not in ("loss", "logits"))
            try:
                with torch.enable_grad():
                    ours = _loss_alone(probe, names, softcap, fields, wants_labels, {"input_ids": ids, **options}, labels)
                    found = [ours.loss, *torch.autograd.grad(ours.loss, parameters)]
            except Exception as e:
                return f"the kernel refused it: {e}"
            differences += [_error(a, b) for a, b in zip(found, expected)]
        else:
            if max(differences) <= _TOLERANCE[dtype]:
                errors[dtype] = max(differences)
            else:
                why = f"its loss or a gradient differs from the cross entropy of lm_head's output by {max(differences):.1e} in {dtype}"
                if dtype is torch.float32:
                    return why  # in 16 bits similar losses cannot be distinguished
    return (errors, fields, wants_labels) if errors else why


def _error(found, expected):
    return ((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30)).item()


def _loss(hidden, labels, head, softcap, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **_):
    """The loss of the models: the output of token n is compared with label n + 1."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.to(hidden.device).reshape(hidden.shape[:-1])
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = functional.linear_cross_entropy(hidden, head.weight, target, head.bias, reduction=reduction, ignore_index=ignore_index, softcap=softcap)
    if num_items_in_batch is None:
        return loss
    return loss / (num_items_in_batch.to(loss.device) if isinstance(num_items_in_batch, torch.Tensor) else num_items_in_batch)


def _wants_more(module, named):
    """Whether the call requests more than a loss: some logits, a tuple, or a loss of the router."""
    config = module.config
    some = named.get("logits_to_keep", 0)
    tuple_ = named.get("return_dict") is False or getattr(config, "return_dict", True) is False
    router = named.get("output_router_logits")
    return not isinstance(some, int) or some != 0 or tuple_ or (getattr(config, "output_router_logits", False) if router is None else router)


def _loss_alone(module, names, softcap, fields, wants_labels, given, labels):
    """The model's output without logits. `given` holds the call's arguments by name, except for the labels."""
    output, others = fields
    found = _decoder_of(module)(**given, **({"labels": labels} if wants_labels else {}))
    of_loss = {name: value for name, value in given.items() if name not in names}
    loss = _loss(found.last_hidden_state, labels, module.lm_head, softcap, **of_loss)
    return output(loss=loss, logits=None, **{name: getattr(found, name, None) for name in others})


def _same_function(a, b):
    return getattr(a, "__func__", a) is getattr(b, "__func__", b)


def _fused(original, names, served, softcap, fields, wants_labels, loss_function, softcap_of_config, settings):
    def is_as_verified(self):
        return (self.lm_head.weight.dtype in served and is_plain_linear(self.lm_head) and _same_function(self.loss_function, loss_function)
                and _softcap(self) == softcap_of_config and has_settings(self, settings))

    def forward(self, *arguments, **named):
        given = {**dict(zip(names, arguments)), **named}
        labels = given.pop("labels", None)
        if not self.training or labels is None or _wants_more(self, given) or not is_as_verified(self):
            return original(self, *arguments, **named)
        given.pop("logits_to_keep", None)
        given.pop("return_dict", None)
        return _loss_alone(self, names, softcap, fields, wants_labels, given, labels)

    return forward
