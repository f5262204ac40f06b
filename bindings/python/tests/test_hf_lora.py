"""LoRA on the Linears of modules that hf.patch replaced: by hand, and by peft where it is installed."""
import copy

import pytest
import torch
from torch import nn

from conftest import DEVICE
from ingot import hf

RANK = 4


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(32, 48, bias=False), nn.Linear(32, 48, bias=False), nn.Linear(48, 32, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.q_proj, self.mlp = nn.RMSNorm(32, eps=1e-6), nn.Linear(32, 32, bias=False), Gated()

    def forward(self, x):
        return x + self.mlp(self.norm(x + self.q_proj(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Lora(nn.Module):
    """y = W x + B A x, in place of a Linear."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(RANK, base.in_features, device=base.weight.device) * 0.1)
        self.b = nn.Parameter(torch.randn(base.out_features, RANK, device=base.weight.device) * 0.1)

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


def adapt(model):
    torch.manual_seed(1)
    for p in model.parameters():
        p.requires_grad_(False)
    for parent, name in [(m, name) for m in model.modules() for name, child in m.named_children() if isinstance(child, nn.Linear)]:
        setattr(parent, name, Lora(getattr(parent, name)))


def hook(model):
    """A LoRA that a tool adds to a Linear by hooks, without replacing the module."""
    torch.manual_seed(1)
    for p in model.parameters():
        p.requires_grad_(False)
    for linear in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        linear.register_parameter("a", nn.Parameter(torch.randn(RANK, linear.in_features, device=linear.weight.device) * 0.1))
        linear.register_parameter("b", nn.Parameter(torch.randn(linear.out_features, RANK, device=linear.weight.device) * 0.1))
        linear.register_forward_hook(lambda m, inputs, y: y + inputs[0] @ m.a.T @ m.b.T)


def outcome(model):
    torch.manual_seed(2)
    x = torch.randn(6, 32, device=DEVICE, requires_grad=True)
    y = model(x)
    y.sin().sum().backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(g is not None and g.abs().max() > 0 for g in trained.values())
    return {"output": y.detach(), "x": x.grad, **trained}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=2e-5, atol=2e-5, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("add", (adapt, hook))
@pytest.mark.parametrize("order", ("patch first", "adapters first"))
def test_adapters_of_patched_modules_give_the_output_and_gradients_of_unpatched_ones(add, order):
    model = Model().to(DEVICE)
    plain = copy.deepcopy(model)
    add(plain)
    if order == "adapters first":
        add(model)
        report = hf.patch(model)
    else:
        report = hf.patch(model)
        add(model)
    assert len([form for _, form, *_ in report.replaced if form == "weight"]) == 2  # the norms
    if order == "patch first" or add is hook:
        assert len(report.replaced) == 4
    assert_same(outcome(model), outcome(plain))
    report.undo()
    model.zero_grad()
    assert_same(outcome(model), outcome_again(plain))


def outcome_again(model):
    model.zero_grad()
    return outcome(model)


@pytest.mark.parametrize("order", ("patch first", "adapters first"))
def test_peft_trains_merges_and_disables_adapters_of_a_patched_model(order):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, max_position_embeddings=64)
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(config).to(DEVICE).eval()
    other = copy.deepcopy(base)
    lora = peft.LoraConfig(r=RANK, lora_alpha=8, target_modules=["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"], init_lora_weights=False)
    ids = torch.randint(64, (2, 16), device=DEVICE)

    def adapted(model, patched):
        if patched and order == "patch first":
            assert len(hf.patch(model).replaced) == 11  # five norms, two gated MLPs, two attentions with their rotary embeddings, two layers with their sums
        torch.manual_seed(1)
        model = peft.get_peft_model(model, lora).eval()
        if patched and order == "adapters first":
            assert len(hf.patch(model).replaced) >= 5
        return model

    def results(model):
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        found = {"logits": out.logits.detach(), **{name: p.grad for name, p in model.named_parameters() if p.requires_grad}}
        with model.disable_adapter():
            found["without"] = model(input_ids=ids).logits.detach()
        found["merged"] = model.merge_and_unload()(input_ids=ids).logits.detach()
        return found

    found, expected = results(adapted(base, True)), results(adapted(other, False))
    assert len(found) > 20 and not torch.allclose(found["without"], found["logits"])
    assert_same(found, expected)
