"""experts_implementation="ingot" beside eager experts, on small random models of transformers."""
import types

import pytest
import torch

from conftest import on_cpu
from ingot import hf

transformers = pytest.importorskip("transformers", minversion="5.0")

SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
             num_experts_per_tok=2)


def small_model(name):
    torch.manual_seed(0)
    config = {"mixtral": lambda: transformers.MixtralConfig(**SMALL, intermediate_size=24, num_local_experts=6),
              "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SMALL, intermediate_size=48, moe_intermediate_size=24, num_experts=6),
              "gpt_oss": lambda: transformers.GptOssConfig(**SMALL, intermediate_size=24, num_local_experts=6)}[name]()
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@on_cpu
@pytest.mark.parametrize("name", ("mixtral", "qwen3_moe", "gpt_oss"))
def test_logits_and_gradients_are_those_of_eager_experts(name):
    hf.register_experts()
    hf.experts_fallbacks.clear()
    m, ids = small_model(name), torch.randint(64, (2, 11))
    found = {}
    for implementation in ("eager", "ingot"):
        m.set_experts_implementation(implementation)
        assert m.config._experts_implementation == implementation
        m.zero_grad()
        logits = m(ids).logits
        logits.sin().sum().backward()
        found[implementation] = [logits.detach(), *(p.grad for p in m.parameters() if p.grad is not None)]
    assert len(found["ingot"]) == len(found["eager"]) and not hf.experts_fallbacks
    for a, b in zip(found["ingot"], found["eager"]):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max() + 1e-7


@on_cpu
def test_rows_of_experts_elsewhere_are_zero_and_other_types_fall_back():
    from ingot import _hf_experts

    hf.register_experts()
    hf.experts_fallbacks.clear()
    experts = small_model("qwen3_moe").model.layers[0].mlp.experts
    x, weights = torch.randn(3, 32), torch.rand(3, 2)
    there = _hf_experts.experts(experts, x, torch.tensor([[0, 6], [6, 6], [5, 2]]), weights)
    alone = _hf_experts.experts(experts, x, torch.tensor([[0, 1], [1, 1], [5, 2]]), weights * torch.tensor([[1.0, 0], [0, 0], [1, 1]]))
    torch.testing.assert_close(there, alone)
    assert not hf.experts_fallbacks
    experts.bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        _hf_experts.experts(experts, x, torch.tensor([[0, 1], [1, 1], [5, 2]]), weights)
    assert list(hf.experts_fallbacks.values()) == [1]


def test_a_gpu_computes_16_bits_on_hopper_and_falls_back_elsewhere(monkeypatch):
    from ingot import _hf_experts

    def reason(kind, dtype, major):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
        rows = types.SimpleNamespace(device=torch.device(kind), dtype=dtype, is_floating_point=lambda: True)
        return _hf_experts._reason(types.SimpleNamespace(down_proj=rows), rows)

    assert reason("cuda", torch.bfloat16, 9) is None and reason("cpu", torch.float32, 0) is None
    assert "compute capability 9.0" in reason("cuda", torch.bfloat16, 8) and "bfloat16" in reason("cuda", torch.float32, 9)
    assert "xpu" in reason("xpu", torch.bfloat16, 9)
