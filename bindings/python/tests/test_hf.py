"""hf.patch on models made by hand, and on small random Hugging Face models where transformers is installed."""
import copy
import functools
import inspect
import pickle
import types

import pytest
import torch
from torch import nn

import ingot
from conftest import DEVICE, has_loss
from ingot import functional, hf


with_loss = pytest.mark.skipif(not has_loss(DEVICE), reason="this build has no cross entropy on a GPU")


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


class CenteredNorm(GemmaNorm):  # looks like a norm of Gemma and is not
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


class NearlyNorm(GemmaNorm):  # indistinguishable from 1 in 16 bits
    def forward(self, x):
        return super().forward(x) * 1.0001


def model(device):
    m = nn.ModuleDict({"llama": LlamaNorm(48), "gemma": GemmaNorm(48), "torch": nn.RMSNorm(48, eps=1e-5), "centered": CenteredNorm(48),
                       "outside": EpsilonOutside(48, 1e-2), "nearly": NearlyNorm(48), "gated": GatedNorm(48), "optional": OptionalResidual(48), "layer": nn.LayerNorm(48), "linear": nn.Linear(48, 48)})
    with torch.no_grad():
        for p in m.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return m.to(device)


def is_replaced(module):
    return hf._is_patched(module) or "forward" in module.__dict__


def test_patch_replaces_only_verified_modules(device):
    m = model(device)
    with torch.device("meta"):  # where tensors are made by default does not matter
        report = hf.patch(m)
    assert {name: form for name, form, _, _ in report.replaced} == {"llama": "weight", "gemma": "1 + weight", "torch": "weight"}
    assert {name for name, _ in report.skipped} == {"centered", "outside", "nearly", "gated", "optional"}
    assert "3 RMSNorms replaced, 5 similar modules left alone" in str(report)
    assert all(is_replaced(m[k]) for k in ("llama", "gemma", "torch")) and not is_replaced(m["linear"])


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
    assert not any(is_replaced(module) for module in m.modules())
    assert all(torch.equal(a, b) for a, b in zip(outcome(), expected))
    report.undo()  # a second time does nothing


def test_a_half_precision_model_is_served_in_its_dtype(device):
    m = model(device).to(torch.bfloat16)
    report = hf.patch(m)
    assert {name for name, *_ in report.replaced} == {"llama", "gemma", "torch"}
    assert all(torch.bfloat16 in dtypes for _, _, dtypes, _ in report.replaced)


def test_a_copy_of_a_patched_model_computes_with_its_own_weights(device):
    m = model(device)
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


def test_a_forward_that_was_set_on_the_instance_is_left_alone(device):
    m = model(device)
    m["gemma"].forward = own = types.MethodType(lambda self, x: GemmaNorm.forward(self, x), m["gemma"])
    m["llama"].forward = m["llama"].forward  # the class's own, as accelerate leaves it after its hooks are removed
    with hf.patch(m) as report:
        assert {name for name, *_ in report.replaced} == {"llama", "torch"} and m["gemma"].forward is own
        assert "found a forward that was set on the instance" in dict(report.skipped)["gemma"]
    assert m["llama"].__dict__["forward"] == types.MethodType(LlamaNorm.forward, m["llama"])


def test_a_meta_model_is_left_alone():
    report = hf.patch(model(torch.device("meta")))
    assert not report.replaced and {why for _, why in report.skipped} >= {"its weight is on the meta device"}


class NoisyNorm(LlamaNorm):  # differs in training alone
    def forward(self, hidden_states):
        y = super().forward(hidden_states)
        return y + 0.01 * torch.randn_like(y) if self.training else y


class BufferedNorm(LlamaNorm):  # is an RMSNorm as long as its buffer is 1
    def __init__(self, n):
        super().__init__(n)
        self.register_buffer("gain", torch.ones(n))

    def forward(self, hidden_states):
        return super().forward(hidden_states) * self.gain


@pytest.mark.parametrize("training", (False, True))
def test_a_replacement_agrees_in_training_and_in_evaluation_mode(device, training):
    m = nn.ModuleDict({"good": LlamaNorm(48), "noisy": NoisyNorm(48), "buffered": BufferedNorm(48), "mlp": Gated(40, 72, nn.SiLU()),
                       "dropout": DropoutInside(40, 72, nn.SiLU()), "learns": Gated(40, 72, Swish()), "good_mlp": Gated(40, 72, nn.SiLU())}).to(device).train(training)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    report = hf.patch(m)
    assert torch.equal(torch.get_rng_state(), before), "patch() draws from the generator that training uses"
    assert {name for name, *_ in report.replaced} == {"good", "mlp", "good_mlp"}, str(report)
    reasons = dict(report.skipped)
    assert "in training mode" in reasons["noisy"] and "in training mode" in reasons["dropout"]
    assert "parameters" in reasons["learns"] and "differs from RMSNorm" in reasons["buffered"]
    assert all(module.training is training for module in m.modules())


def test_a_norm_that_changes_after_the_patch_is_computed_by_its_own_forward(device):
    x = torch.randn(5, 48, device=device, dtype=torch.bfloat16)
    for change in (lambda m: setattr(m, "variance_epsilon", 0.5), lambda m: setattr(m.weight, "data", m.weight.data.float())):
        m = LlamaNorm(48).to(device, torch.bfloat16)
        own = copy.deepcopy(m)
        hf.patch(m)
        for module in (m, own):
            change(module)
        assert torch.equal(m(x), own(x)) and m(x).dtype is own(x).dtype
    m = LlamaNorm(48).to(device)
    assert hf.patch(m).replaced
    m.to(torch.bfloat16)  # this dtype was verified too, and the kernel serves it
    assert m(x).dtype is torch.bfloat16


def test_an_activation_that_changes_after_the_patch_is_used(device):
    x = torch.randn(5, 40, device=device)
    changes = (lambda m: setattr(m, "act_fn", nn.ReLU()), lambda m: setattr(m.act_fn, "approximate", "none"))
    for change in changes:
        m = Gated(40, 72, nn.GELU("tanh")).to(device)
        own = copy.deepcopy(m)
        assert hf.patch(m).replaced
        for module in (m, own):
            change(module)
        assert torch.equal(m(x), own(x))


def cpu_replica(module, factor):
    """A replica as nn.DataParallel makes it, whose parameters are multiplied by `factor`."""
    copies = {m: m._replicate_for_data_parallel() for m in module.modules()}
    for m, replica in copies.items():
        for name, child in m._modules.items():
            replica._modules[name] = copies.get(child)
        for name, p in m._parameters.items():
            if p is None:
                replica._parameters[name] = None
            else:
                setattr(replica, name, p * factor)
    return copies[module]


def test_copies_and_replicas_of_patched_modules_compute_with_their_own_weights(device):
    m = nn.ModuleDict({"llama": LlamaNorm(40), "torch": nn.RMSNorm(40), "mlp": Gated(40, 72, nn.SiLU())}).to(device)
    own = copy.deepcopy(m)
    with torch.no_grad():
        for p in own.parameters():
            p.mul_(1.5)
    report = hf.patch(m)
    assert len(report.replaced) == 3
    x = torch.randn(3, 40, device=device)
    pickled = pickle.loads(pickle.dumps(m))
    for name in m:
        torch.testing.assert_close(cpu_replica(m[name], 1.5)(x), own[name](x), rtol=1e-5, atol=1e-5)
        shallow = copy.copy(m[name])
        shallow._parameters, shallow._modules = own[name]._parameters, own[name]._modules
        torch.testing.assert_close(shallow(x), own[name](x), rtol=1e-5, atol=1e-5)
        assert is_replaced(shallow) and type(shallow).__name__ == type(own[name]).__name__ and isinstance(shallow, type(own[name]))
        assert type(pickled[name]) is type(own[name])
        torch.testing.assert_close(pickled[name](x), m[name](x), rtol=1e-5, atol=1e-5)
    twin = copy.deepcopy(m)
    report.undo()
    for name in m:
        assert type(m[name]) is type(own[name])
        assert torch.equal(twin[name](x), m[name](x))  # copies compute with their own forward from then on


def test_accelerates_hooks_and_a_patch_come_and_go_in_any_order(device, monkeypatch):
    hooks = pytest.importorskip("accelerate.hooks")
    calls, kernel = [], functional.rms_norm
    monkeypatch.setattr(functional, "rms_norm", lambda *given, **options: (calls.append(1), kernel(*given, **options))[1])

    class Doubles(hooks.ModelHook):
        def post_forward(self, module, output):
            return 2 * output

    x = torch.randn(3, 48, device=device)
    for order in ("hook patch undo remove", "hook patch remove undo", "patch hook undo remove", "patch hook remove undo"):
        m = LlamaNorm(48).to(device)
        plain, hooked, report = m(x), False, None
        for action in order.split():
            if action == "patch":
                report = hf.patch(m)
                assert report.replaced, str(report)
            elif action == "undo":
                report.undo()
            else:
                hooked = action == "hook"
                hooks.add_hook_to_module(m, Doubles()) if hooked else hooks.remove_hook_from_module(m)
            calls.clear()
            torch.testing.assert_close(m(x), plain * (2 if hooked else 1), rtol=1e-5, atol=1e-5)
            patched = order.find("patch") <= order.find(action) < order.find("undo")
            assert len(calls) == patched, (order, action)
        assert type(m) is LlamaNorm and torch.equal(m(x), plain)


def test_a_second_patch_leaves_the_first_alone_and_hooks_are_not_called(device):
    m, seen = model(device), []
    m["llama"].register_forward_hook(lambda *a: seen.append(1))
    first, second = hf.patch(m), hf.patch(m)
    assert not seen and len(first.replaced) == 3 and not second.replaced
    assert sorted(second.already) == ["gemma", "llama", "torch"] and {name for name, _ in second.skipped} == {"centered", "outside", "nearly", "gated", "optional"}
    assert "nothing replaced, 5 similar modules left alone, 3 already patched" in str(second) and "  llama: already patched" in str(second)
    first.undo()
    second.undo()
    assert not any(is_replaced(module) for module in m.modules())


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


def test_a_module_named_rmsnorm_that_cannot_be_patched_is_reported_with_the_reason(device):
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
    assert str(hf.patch(nn.Linear(2, 2))) .startswith("nothing replaced: found no RMSNorm, gated MLP")


def test_an_object_that_is_no_module_is_refused():
    with pytest.raises(TypeError, match="hf.patch: model: found int, expected torch.nn.Module"):
        hf.patch(3)


class Gated(nn.Module):
    def __init__(self, n, hidden, activation, bias=False):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(n, hidden, bias=bias), nn.Linear(n, hidden, bias=bias)
        self.down_proj, self.act_fn = nn.Linear(hidden, n, bias=bias), activation

    def forward(self, hidden_state):
        return self.down_proj(self.act_fn(self.gate_proj(hidden_state)) * self.up_proj(hidden_state))


class GateOfUp(Gated):
    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


class Clamped(Gated):  # differs only where gates are large
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=3) * self.up_proj(x))


class TwoInputs(Gated):
    def forward(self, x, scale):
        return super().forward(x) * scale


class DropoutInside(Gated):  # functional dropout, which evaluation mode does not show
    def forward(self, x):
        return torch.nn.functional.dropout(super().forward(x), 0.1, self.training)


class Swish(nn.Module):  # silu until it has learned
    def __init__(self):
        super().__init__()
        self.beta = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


def gated_model(device):
    m = nn.ModuleDict({"silu": Gated(40, 72, nn.SiLU()), "bias": Gated(40, 72, torch.nn.functional.silu, True), "gelu": Gated(40, 72, nn.GELU("tanh")),
                       "exact": Gated(40, 72, nn.GELU()), "of_up": GateOfUp(40, 72, nn.SiLU()), "clamped": Clamped(40, 72, nn.SiLU()),
                       "two": TwoInputs(40, 72, nn.SiLU()), "dropout": Gated(40, 72, nn.SiLU()), "uneven": Gated(40, 72, nn.SiLU()),
                       "wrapped": Gated(40, 72, nn.SiLU()), "own": Gated(40, 72, nn.SiLU())})
    m["dropout"].add_module("drop", nn.Dropout())
    m["uneven"].up_proj = nn.Linear(40, 1)
    m["wrapped"].gate_proj = nn.Sequential(nn.Linear(40, 72))
    m["own"].scale = nn.Parameter(torch.ones(1))
    return m.to(device)


def test_gated_mlps_are_known_by_running_them(device):
    m = gated_model(device)
    buffer = torch.ones(3, device=device)
    m["silu"].register_buffer("table", buffer)
    x = torch.randn(3, 40, device=device, requires_grad=True)

    def outcome(name):
        m.zero_grad()
        y = m[name](x)
        return [y.detach(), *torch.autograd.grad(y.sin().sum(), [x, *m[name].parameters()])]

    names = ("silu", "bias", "gelu")
    expected = [outcome(name) for name in names]
    with torch.device("meta"):
        report = hf.patch(m)
    assert {name: form for name, form, _, _ in report.replaced} == {"silu": "silu gate", "bias": "silu gate", "gelu": "gelu_tanh gate"}
    reasons = dict(report.skipped)
    assert set(reasons) == set(m) - set(names) and "3 gated MLPs replaced, 8 similar modules left alone" in str(report)
    for name, part in {"exact": "from silu and", "of_up": "it differs", "clamped": "it differs", "two": "takes more than one input",
                       "dropout": "modules inside it besides", "uneven": "differ in shape", "wrapped": "gate_proj of type Sequential",
                       "own": "parameters of its own"}.items():
        assert part in reasons[name], (name, reasons[name])
    for name, want in zip(names, expected):
        for found, w in zip(outcome(name), want):
            torch.testing.assert_close(found, w, rtol=1e-4, atol=1e-5)
    assert m["silu"].table is buffer and m["silu"](hidden_state=x).shape == x.shape
    assert all(dtype in dtypes for _, _, dtypes, _ in report.replaced for dtype in (torch.float32, torch.bfloat16))
    report.undo()
    for name, want in zip(names, expected):
        assert all(torch.equal(a, b) for a, b in zip(outcome(name), want))
    assert not hf.patch(m, mlps=False).replaced
    assert {why for _, why in hf.patch(gated_model(torch.device("meta"))).skipped} >= {"gate_proj is on the meta device"}


def test_watched_projections_are_still_called(device):
    m = gated_model(device)["silu"]
    seen = []
    m.up_proj.register_forward_hook(lambda *a: seen.append(1))
    hf.patch(m)
    assert not seen
    m(torch.randn(3, 40, device=device))
    assert seen == [1]
    twin = copy.deepcopy(m)
    with torch.no_grad():
        twin.down_proj.weight.zero_()
    assert not twin(torch.randn(3, 40, device=device)).any()


def configurations():
    """(config, norms, gated MLPs)"""
    transformers = pytest.importorskip("transformers")
    small = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                 max_position_embeddings=64, head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return {"llama": (transformers.LlamaConfig(**small), 5, 2),
            "qwen3": (transformers.Qwen3Config(**small), 9, 2),  # q and k are normalised per head
            "mistral": (transformers.MistralConfig(**small), 5, 2),
            "gemma": (transformers.GemmaConfig(**small), 5, 2),
            "gemma2": (transformers.Gemma2Config(**small, final_logit_softcapping=3.0), 9, 2),
            "gpt_oss": (transformers.GptOssConfig(**small, num_local_experts=4, num_experts_per_tok=2), 5, 0)}


def causal_model(name, device):
    transformers = pytest.importorskip("transformers")
    config, norms, mlps = configurations()[name]
    torch.manual_seed(4)
    m = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(device)
    with torch.no_grad():
        for p in m.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.2)
        m.lm_head.weight.mul_(20)  # logits of a size at which a softcap shows
    return m, norms, mlps


def step(m, ids, **options):
    m.zero_grad()
    out = m(input_ids=ids, **options)
    out.loss.backward()
    return out, [p.grad.clone() for p in m.parameters() if p.grad is not None]


NAMES = ("llama", "qwen3", "mistral", "gemma", "gemma2", "gpt_oss")


@pytest.mark.parametrize("name", NAMES)
def test_hugging_face_models_keep_their_numbers(device, name):
    m, norms, mlps = causal_model(name, device)
    m.eval()
    ids = torch.randint(0, 64, (2, 11), device=device)
    out, grads = step(m, ids, labels=ids)
    with hf.patch(m, loss=has_loss(device)) as report:
        layers = 0 if name in ("gemma2", "gpt_oss") else 2  # two have other norms, or experts that return more than a tensor
        assert len(report.replaced) == norms + mlps + layers + 2 + has_loss(device), str(report)
        assert "2 rotary embeddings" in str(report) and ("2 decoder layers" in str(report)) == (layers > 0)
        assert [why for _, why in report.skipped] == ["found gate_up_proj, expected gate_proj and up_proj"] * 2 * (name == "gpt_oss"), str(report)
        patched, patched_grads = step(m, ids, labels=ids)  # with logits, because the model is not in training
    torch.testing.assert_close(patched.logits, out.logits, rtol=1e-4, atol=1e-4)
    for a, b in zip(patched_grads, grads):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert torch.equal(step(m, ids, labels=ids)[0].logits, out.logits)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_patched_models_train_under_gradient_checkpointing(device, name, whole, monkeypatch):
    """whole: gated MLPs are one node, as they are on a Hopper GPU in 16 bits."""
    if whole:
        monkeypatch.setattr(ingot._hf_gated, "_fuses", lambda *operands: True)
    m, _, _ = causal_model(name, device)
    m.train()
    ids = torch.randint(0, 64, (2, 11), device=device)
    with hf.patch(m, loss=has_loss(device)):
        expected = step(m, ids, labels=ids, use_cache=False)
        m.gradient_checkpointing_enable({"use_reentrant": False})
        found = step(m, ids, labels=ids, use_cache=False)
    assert torch.equal(found[0].loss, expected[0].loss)
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


class Attends(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.proj, self.seen = nn.Linear(n, n), None

    def forward(self, hidden_states, **named):
        self.seen = named
        return self.proj(hidden_states).tanh(), None


class Layer(nn.Module):
    def __init__(self, n, factor=1.0):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = LlamaNorm(n), LlamaNorm(n)
        self.self_attn, self.mlp, self.factor = Attends(n), nn.Sequential(nn.Linear(n, n), nn.Tanh()), factor

    def forward(self, hidden_states, attention_mask=None, use_cache=False, **more):
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), attention_mask=attention_mask, use_cache=use_cache, **more)
        h = hidden_states + attended * self.factor
        return h + self.mlp(self.post_attention_layernorm(h))


class AttentionBesideMlp(Layer):
    def forward(self, hidden_states, **named):
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **named)
        return hidden_states + attended + self.mlp(self.post_attention_layernorm(hidden_states))


def test_decoder_layers_keep_their_numbers(device, monkeypatch):
    m, sums = Layer(48).to(device), []
    with torch.no_grad():
        m.input_layernorm.weight.add_(torch.randn(48, device=device) * 0.3)
    x = torch.randn(2, 5, 48, device=device, requires_grad=True)

    def outcome(again=True):
        y = m(x, "mask", position_ids=3)
        given = (x, *m.parameters())
        first = torch.autograd.grad(y.sin().sum(), given, create_graph=again)
        return [y, *first, *(torch.autograd.grad(first[0].square().sum(), given, allow_unused=True) if again else ())], m.self_attn.seen

    expected, told = outcome()
    run = ingot._rms_norm.run_add_rms_norm
    monkeypatch.setattr(ingot._rms_norm, "run_add_rms_norm", lambda *a: sums.append(1) or run(*a))
    with hf.patch(m) as report:
        assert ("Layer", "sums with their norms") in [(name, form) for name, form, *_ in report.replaced]
        del sums[:]
        found, seen = outcome()
        assert sums == [1] and seen == told == {"attention_mask": "mask", "use_cache": False, "position_ids": 3}
        for a, b in zip(found, expected):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(m(x), expected[0], rtol=1e-5, atol=1e-5)
        assert sums == [1, 1]
        handle = m.post_attention_layernorm.register_forward_hook(lambda module, given, y: 2 * y)
        hooked = m(x)
        assert sums == [1, 1]
        handle.remove()
    with torch.no_grad():
        h = x + m.self_attn(m.input_layernorm(x))[0]
        torch.testing.assert_close(hooked, h + m.mlp(2 * m.post_attention_layernorm(h)), rtol=1e-5, atol=1e-5)
    for a, b in zip(outcome(False)[0], expected):
        torch.testing.assert_close(a, b)


def test_decoder_layers_of_other_formulas_are_left_alone(device):
    m = nn.ModuleDict({"scaled": Layer(48, 0.5), "beside": AttentionBesideMlp(48)}).to(device)
    report = hf.patch(m)
    assert {name for name, *_ in report.replaced} == {f"{a}.{b}_layernorm" for a in m for b in ("input", "post_attention")}
    assert set(dict(report.skipped)) == set(m) and all("differ from those of a decoder layer" in why for why in dict(report.skipped).values())
    assert not hf.patch(Layer(48).to("meta")).replaced


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    def turned(x):
        first, second = x.chunk(2, -1)
        return x * cos.unsqueeze(unsqueeze_dim) + torch.cat((-second, first), -1) * sin.unsqueeze(unsqueeze_dim)
    return turned(q), turned(k)


half_split = apply_rotary_pos_emb


def interleaved(q, k, cos, sin, unsqueeze_dim=1):
    def turned(x):
        pairs = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * cos.unsqueeze(unsqueeze_dim) + pairs * sin.unsqueeze(unsqueeze_dim)
    return turned(q), turned(k)


class Rotates(nn.Module):
    """The rotary embedding of an attention layer: x (B, S, H, D)."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(scale))

    def forward(self, x, cos, sin, *, more=2):
        q, k = apply_rotary_pos_emb((x * self.weight).transpose(1, 2), (x[:, :, :1] * more).transpose(1, 2), cos, sin)
        return q, k


def rotary_case(device, batch=2, dtype=torch.float32):
    x = torch.randn(2, 7, 3, 16, device=device, dtype=dtype, requires_grad=True)
    angles = torch.randn(batch, 7, 8, device=device).repeat(1, 1, 2)
    return x, angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("batch", (1, 2))
def test_rotary_embeddings_keep_their_numbers(device, batch, monkeypatch):
    m, kernel_calls = Rotates(1.5).to(device), []
    x, cos, sin = rotary_case(device, batch)

    def outcome():
        y = m(x, cos, sin, more=3)
        dx, dw = torch.autograd.grad(sum(t.sin().sum() for t in y), (x, m.weight), create_graph=True)
        return *y, dx, dw, *torch.autograd.grad(dx.square().sum(), (x, m.weight))

    expected = outcome()
    run = ingot._rope.run_rope
    monkeypatch.setattr(ingot._rope, "run_rope", lambda *a: kernel_calls.append(1) or run(*a))
    with hf.patch(m) as report:
        assert [(name, form) for name, form, *_ in report.replaced] == [("Rotates", "half-split pairs")]
        for found, want in zip(outcome(), expected):
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
        cos.add_(1)  # the table follows a change in place
        del kernel_calls[:]
        changed = m(x, cos, sin)
        assert len(kernel_calls) == 2
        wide = m(x.double(), cos.double(), sin.double())  # a type that the patch does not serve
        assert wide[0].dtype is torch.float64 and len(kernel_calls) == 2
    for found, want in zip(changed, m(x, cos, sin)):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def renamed(earlier, name):
    """A decorator that accepts an earlier name of an argument, like transformers' deprecate_kwarg."""
    def decorate(function):
        @functools.wraps(function)
        def accepting(*arguments, **named):
            if earlier in named:
                named[name] = named.pop(earlier)
            return function(*arguments, **named)
        return accepting
    return decorate


def by_default_argument(function):
    @functools.wraps(function)
    def calling(*arguments, _function=function, **named):
        return _function(*arguments, **named)
    return calling


def test_a_decorated_forward_keeps_its_decorators(device, monkeypatch):
    m, kernel_calls = Rotates(1.5).to(device), []
    x, cos, sin = rotary_case(device)
    run = ingot._rope.run_rope
    monkeypatch.setattr(ingot._rope, "run_rope", lambda *a: kernel_calls.append(1) or run(*a))
    plain = Rotates.forward
    monkeypatch.setattr(Rotates, "forward", renamed("twice", "more")(renamed("times", "more")(plain)))
    expected = m(x, cos, sin, twice=3)
    with hf.patch(m) as report:
        assert [(name, form) for name, form, *_ in report.replaced] == [("Rotates", "half-split pairs")]
        for named in (dict(twice=3), dict(times=3), dict(more=3)):
            del kernel_calls[:]
            for found, want in zip(m(x, cos, sin, **named), expected):
                torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
            assert len(kernel_calls) == 2, named
    monkeypatch.setattr(Rotates, "forward", by_default_argument(plain))
    report = hf.patch(m)
    assert not report.replaced and "decorated by a function" in dict(report.skipped)["Rotates"]


def test_tables_of_different_halves_are_left_to_the_formula(device):
    m = Rotates().to(device)
    x, cos, sin = rotary_case(device)
    cos = torch.randn_like(cos)
    expected = m(x, cos, sin)
    with hf.patch(m) as report:
        assert report.replaced
        assert all(torch.equal(a, b) for a, b in zip(m(x, cos, sin), expected))


def test_a_rotary_embedding_of_other_pairs_is_left_alone(device, monkeypatch):
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", interleaved)
    report = hf.patch(Rotates().to(device))
    assert not report.replaced and "differs from half-split pairs" in dict(report.skipped)["Rotates"]
    assert "meta device" in dict(hf.patch(Rotates().to("meta")).skipped)["Rotates"]


def test_a_rotary_embedding_that_changes_after_the_patch_is_used(device, monkeypatch):
    m = Rotates().to(device)
    x, cos, sin = rotary_case(device)
    with hf.patch(m):
        monkeypatch.setitem(globals(), "apply_rotary_pos_emb", interleaved)
        found = m(x, cos, sin)
    assert all(torch.equal(a, b) for a, b in zip(found, m(x, cos, sin)))
    assert not torch.equal(found[0], half_split(x.transpose(1, 2), x.transpose(1, 2), cos, sin)[0])


@with_loss
@pytest.mark.parametrize("name", NAMES)
def test_losses_of_hugging_face_models(device, name):
    m, _, _ = causal_model(name, device)
    m.train()
    ids = torch.randint(0, 64, (2, 11), device=device)
    labels = ids.clone()
    labels[:, 3:6] = -100
    calls = [{}, {"num_items_in_batch": torch.tensor(13, device=device)}, {"num_items_in_batch": 13}, {"shift_labels": labels.roll(-1, 1)}]
    expected = [step(m, ids, labels=labels, **options) for options in calls]
    signature = inspect.signature(m.forward)
    with hf.patch(m, norms=False, mlps=False, rope=False, loss=True) as report:
        assert [form.split()[0] for _, form, _, _ in report.replaced] == ["loss"] and "1 loss replaced" in str(report), str(report)
        assert inspect.signature(m.forward) == signature
        for options, (want, grads) in zip(calls, expected):
            found, found_grads = step(m, ids, labels=labels, **options)
            assert found.logits is None and type(found) is type(want) and (found.past_key_values is None) == (want.past_key_values is None)
            torch.testing.assert_close(found.loss, want.loss, rtol=1e-5, atol=1e-5)
            assert len(grads) == len(found_grads)
            for a, b in zip(found_grads, grads):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
        by_position = m(ids, None, None, None, None, labels)
        assert by_position.logits is None and torch.equal(by_position.loss, m(ids, labels=labels).loss)
        for options in ({"logits_to_keep": 11}, {"return_dict": False}):  # more than a loss is asked for
            assert m(ids, labels=labels, **options)[1].shape == (2, 11, 64)
        assert m(ids).logits.shape == (2, 11, 64)
        if name == "gpt_oss":
            assert m(ids, labels=labels, output_router_logits=True).aux_loss is not None
        m.lm_head.register_forward_hook(lambda *a: None)  # hooks of the head are still called
        assert m(ids, labels=labels).logits is not None
    assert m(ids, labels=labels).logits is not None


@with_loss
def test_a_different_loss_function_is_left_alone(device):
    transformers = pytest.importorskip("transformers")
    small = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    m = transformers.GraniteForCausalLM(transformers.GraniteConfig(**small, logits_scaling=8.0)).to(device)
    report = hf.patch(m, loss=True)
    assert ("GraniteForCausalLM" in dict(report.skipped)) and "differs from the cross entropy" in dict(report.skipped)["GraniteForCausalLM"]
    m = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)).to(device)
    m.loss_function = lambda logits, labels, vocab_size, **_: logits.square().mean()
    assert "differs from the cross entropy" in dict(hf.patch(m, loss=True).skipped)["LlamaForCausalLM"]
    m.lm_head = nn.Sequential(m.lm_head)
    assert "lm_head of type Sequential" in dict(hf.patch(m, loss=True).skipped)["LlamaForCausalLM"]
    assert not hf.patch(m, norms=False, mlps=False, rope=False).replaced


@with_loss
def test_a_loss_function_that_changes_after_the_patch_is_used(device):
    m, _, _ = causal_model("gemma2", device)
    m.train()
    ids = torch.randint(0, 64, (2, 11), device=device)
    with hf.patch(m, loss=True):
        assert m(ids, labels=ids).logits is None
        m.config.final_logit_softcapping = 1.0
        with_other_cap = m(ids, labels=ids)
        m.loss_function = lambda logits, labels, vocab_size, **_: logits.square().mean()
        other = m(ids, labels=ids)
    assert with_other_cap.logits is not None and with_other_cap.logits.abs().max() <= 1
    torch.testing.assert_close(other.loss, other.logits.square().mean())


def model_with_images(name, device):
    transformers = pytest.importorskip("transformers")
    text = dict(vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    vision = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, image_size=16, patch_size=4)
    torch.manual_seed(4)
    if name == "gemma3":
        config = transformers.Gemma3Config(text_config=dict(text, sliding_window=8), vision_config=vision, mm_tokens_per_image=4, image_token_index=70,
                                           boi_token_index=71, eoi_token_index=72)
        return transformers.Gemma3ForConditionalGeneration(config).to(device).train()
    vision = dict(depth=1, hidden_size=32, intermediate_size=48, num_heads=4, out_hidden_size=32, patch_size=4, fullatt_block_indexes=[0])
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    config = transformers.Qwen2_5_VLConfig(text_config=dict(text, rope_parameters=rope), vision_config=vision, image_token_id=70, video_token_id=71,
                                           vision_start_token_id=72, vision_end_token_id=73)
    return transformers.Qwen2_5_VLForConditionalGeneration(config).to(device).train()


@with_loss
@pytest.mark.parametrize("name", ("gemma3", "qwen2_5_vl"))
def test_losses_of_models_that_see_images(device, name):
    m = model_with_images(name, device)
    ids = torch.randint(3, 60, (2, 14), device=device)
    labels, given = ids.clone(), {}
    labels[:, 2:6] = -100
    if name == "gemma3":
        ids[:, 2:6] = 70
        given = dict(pixel_values=torch.randn(2, 3, 16, 16, device=device), token_type_ids=(ids == 70).long(), attention_mask=torch.ones_like(ids))
    expected, grads = step(m, ids, labels=labels, **given)
    with hf.patch(m, norms=False, mlps=False, rope=False, loss=True) as report:
        assert [form for _, form, _, _ in report.replaced] == ["loss"], str(report)
        found, found_grads = step(m, ids, labels=labels, **given)
    assert found.logits is None and type(found) is type(expected) and len(grads) == len(found_grads)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-5)
    for a, b in zip(found_grads, grads):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@with_loss
def test_a_patched_model_compiles_and_runs_under_autocast(device):
    pytest.importorskip("transformers")
    m, _, _ = causal_model("llama", device)
    ids = torch.randint(0, 64, (2, 11), device=device)
    m.train()
    with torch.autocast(device.type, torch.bfloat16):
        narrow = step(m, ids, labels=ids)[0].loss
    want, grads = step(m, ids, labels=ids)
    hf.patch(m, loss=True)
    with torch.autocast(device.type, torch.bfloat16):
        assert abs(step(m, ids, labels=ids)[0].loss - narrow) < 0.05 * narrow  # both are bf16's roundings away from fp32
    torch._dynamo.reset()
    compiled = torch.compile(lambda ids: m(input_ids=ids, labels=ids, use_cache=False).loss, backend="aot_eager", fullgraph=True)
    m.zero_grad()
    loss = compiled(ids)
    loss.backward()
    torch.testing.assert_close(loss, want.loss, rtol=1e-5, atol=1e-5)
    for p, g in zip((p for p in m.parameters() if p.grad is not None), grads):
        torch.testing.assert_close(p.grad, g, rtol=1e-3, atol=1e-5)
