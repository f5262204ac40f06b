"""hf.patch on models made by hand, and on small random Hugging Face models where transformers is installed."""
import copy
import types

import pytest
import torch
from torch import nn

import ingot
from ingot import hf


class LlamaNorm(nn.Module):
    def __init__(self, n, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


class GemmaNorm(nn.Module):
    def __init__(self, n, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n))
        self.eps = eps

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


class CenteredNorm(GemmaNorm):  # looks alike, is none
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class EpsilonOutside(GemmaNorm):  # differs only where rows are tiny
    def forward(self, x):
        return (x.float() / (x.float().pow(2).mean(-1, keepdim=True).sqrt() + self.eps) * (1.0 + self.weight.float())).type_as(x)


class GatedNorm(LlamaNorm):
    def forward(self, hidden_states, gate):
        return super().forward(hidden_states) * gate


class OptionalResidual(LlamaNorm):  # a call with both must still be served
    def forward(self, hidden_states, residual=None):
        return super().forward(hidden_states if residual is None else hidden_states + residual)


def model(device):
    m = nn.ModuleDict({"llama": LlamaNorm(48), "gemma": GemmaNorm(48), "torch": nn.RMSNorm(48, eps=1e-5), "centered": CenteredNorm(48),
                       "outside": EpsilonOutside(48, 1e-2), "gated": GatedNorm(48), "optional": OptionalResidual(48), "layer": nn.LayerNorm(48), "linear": nn.Linear(48, 48)})
    with torch.no_grad():
        for p in m.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return m.to(device)


def test_replaces_what_it_has_verified_and_nothing_else(device):
    m = model(device)
    with torch.device("meta"):  # where tensors are made by default does not matter
        report = hf.patch(m)
    assert {name: form for name, form, _, _ in report.replaced} == {"llama": "weight", "gemma": "1 + weight", "torch": "weight"}
    assert {name for name, _ in report.skipped} == {"centered", "outside", "gated", "optional"}
    assert "3 RMSNorms replaced, 4 similar modules left alone" in str(report)
    assert all("forward" in m[k].__dict__ for k in ("llama", "gemma", "torch"))


def test_outputs_and_gradients_stay_and_undo_restores(device):
    m = model(device)
    state = {k: v.clone() for k, v in m.state_dict().items()}
    names = ("llama", "gemma", "torch")

    def outcome():
        m.zero_grad()
        torch.manual_seed(1)
        x = torch.randn(5, 48, device=device, requires_grad=True)
        y = sum(m[k](x).sin() for k in names)
        y.sum().backward()
        return [y, x.grad] + [m[k].weight.grad for k in names]

    expected = outcome()
    with hf.patch(m) as report:
        for a, b in zip(outcome(), expected):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert all(torch.equal(v, state[k]) for k, v in m.state_dict().items())
        y = m["llama"](torch.randn(2, 48, device=device, dtype=torch.bfloat16))
        assert y.dtype is torch.float32  # fp32 weight, bf16 input: Llama's own forward widens, and still serves
    assert all("forward" not in module.__dict__ for module in m.modules())
    assert all(torch.equal(a, b) for a, b in zip(outcome(), expected))
    report.undo()  # a second time does nothing


def test_a_half_precision_model_is_served_in_its_dtype(device):
    m = model(device).to(torch.bfloat16)
    report = hf.patch(m)
    assert {name for name, *_ in report.replaced} == {"llama", "gemma", "torch"}
    assert all(torch.bfloat16 in dtypes for _, _, dtypes, _ in report.replaced)


def test_a_copy_of_a_patched_model_computes_with_its_own_weights(device):
    m = model(device)
    m["gemma"].forward = lambda x, own=m["gemma"].forward: own(x)  # not a method: all that there is to call
    hf.patch(m)
    copied = copy.deepcopy(m)
    with torch.no_grad():
        for p in copied.parameters():
            p.mul_(2)
    for dtype in (torch.float32, torch.bfloat16):  # the kernel serves the first, Llama's own forward the second
        x = torch.randn(3, 48, device=device, dtype=dtype)
        torch.testing.assert_close(copied["llama"](x), 2 * m["llama"](x))
    copied["llama"](torch.randn(3, 48, device=device, dtype=torch.bfloat16)).sum().backward()
    assert copied["llama"].weight.grad is not None and m["llama"].weight.grad is None


def test_a_forward_of_the_instance_comes_back_and_a_meta_model_is_left_alone(device):
    m = model(device)
    m["gemma"].forward = own = types.MethodType(lambda self, x: GemmaNorm.forward(self, x), m["gemma"])
    with hf.patch(m) as report:
        assert "gemma" in {name for name, *_ in report.replaced} and m["gemma"].forward is not own
    assert m["gemma"].__dict__["forward"] is own
    report = hf.patch(model(torch.device("meta")))
    assert not report.replaced and {why for _, why in report.skipped} >= {"its weight is on the meta device"}


def test_a_second_patch_leaves_the_first_alone_and_hooks_are_not_called(device):
    m, seen = model(device), []
    m["llama"].register_forward_hook(lambda *a: seen.append(1))
    first, second = hf.patch(m), hf.patch(m)
    assert not seen and len(first.replaced) == 3 and not second.replaced
    assert sorted(second.already) == ["gemma", "llama", "torch"] and {name for name, _ in second.skipped} == {"centered", "outside", "gated", "optional"}
    assert "0 RMSNorms replaced, 4 similar modules left alone, 3 already patched" in str(second) and "  llama: already patched" in str(second)
    first.undo()
    second.undo()
    assert all("forward" not in module.__dict__ for module in m.modules())


class BiasedRMSNorm(LlamaNorm):
    def __init__(self, n):
        super().__init__(n)
        self.bias = nn.Parameter(torch.zeros(n))


class BareRMSNorm(nn.Module):  # epsilon is a constant of its code
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))


class StubbornRMSNorm(LlamaNorm):
    def __deepcopy__(self, memo):
        raise RuntimeError("one of a kind")


def test_what_is_called_an_rmsnorm_and_cannot_be_patched_is_named_with_the_reason(device):
    parametrised = nn.utils.parametrizations.weight_norm(nn.RMSNorm(8), dim=None)
    m = nn.ModuleDict({"biased": BiasedRMSNorm(8), "bare": BareRMSNorm(8), "plain": nn.RMSNorm(8, elementwise_affine=False), "two": nn.RMSNorm((2, 4)),
                       "parametrised": parametrised, "stubborn": StubbornRMSNorm(8), "layer": nn.LayerNorm(8), "good": LlamaNorm(8)}).to(device)
    report = hf.patch(m)
    assert [name for name, *_ in report.replaced] == ["good"]
    assert dict(report.skipped) == {
        "biased": "found parameters weight, bias, expected one, weight",
        "bare": "found no epsilon (variance_epsilon, eps or epsilon)",
        "plain": "found no parameter, expected one, weight",
        "two": "found a weight of 2 dimensions, expected 1",
        "parametrised": "found modules inside it (parametrizations), expected none",
        "stubborn": "no copy of it could be tried: one of a kind",
    }
    assert all(f"  {name}: left alone: {why}" in str(report) for name, why in report.skipped)
    assert str(hf.patch(nn.Linear(2, 2))) == "found no RMSNorm, nor a module like one"


def test_refuses_what_is_no_module():
    with pytest.raises(TypeError, match="hf.patch: model: found int, expected torch.nn.Module"):
        hf.patch(3)


def configurations():
    transformers = pytest.importorskip("transformers")
    small = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                 max_position_embeddings=64, head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    yield "llama", transformers.LlamaConfig(**small), 5
    yield "qwen3", transformers.Qwen3Config(**small), 9  # q and k are normalised per head
    yield "gemma", transformers.GemmaConfig(**small), 5


@pytest.mark.parametrize("which", [0, 1, 2])
def test_hugging_face_models_keep_their_numbers(device, which):
    name, config, count = list(configurations())[which]
    from transformers import AutoModelForCausalLM

    m = AutoModelForCausalLM.from_config(config).to(device).eval()
    with torch.no_grad():
        for p in m.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.2)
    ids = torch.randint(0, 64, (2, 11), device=device)

    def outcome():
        m.zero_grad()
        out = m(input_ids=ids, labels=ids)
        out.loss.backward()
        return out.logits.detach(), [p.grad.clone() for p in m.parameters() if p.grad is not None]

    logits, grads = outcome()
    with hf.patch(m) as report:
        assert len(report.replaced) == count and not report.skipped, str(report)
        patched, patched_grads = outcome()
    torch.testing.assert_close(patched, logits, rtol=1e-4, atol=1e-4)
    for a, b in zip(patched_grads, grads):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert torch.equal(outcome()[0], logits)
