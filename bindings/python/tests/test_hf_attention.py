"""attn_implementation="ingot" beside eager attention, on small random models of transformers."""
import logging
import types

import pytest
import torch

from conftest import DEVICE, on_cpu, on_gpu
from ingot import functional, hf

transformers = pytest.importorskip("transformers", minversion="5.0")

SMALL = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
             max_position_embeddings=128, pad_token_id=0)
MIXED = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"])
NAMES = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss")


def small_model(name, implementation="eager", **options):
    """Models with grouped heads; windows in mistral and in a layer of gemma and gpt_oss, a softcap in gemma2, sinks in gpt_oss."""
    torch.manual_seed(0)
    config = {"llama": lambda: transformers.LlamaConfig(**SMALL, **options),
              "qwen3": lambda: transformers.Qwen3Config(**SMALL, **options),
              "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=6, **options),
              "gemma2": lambda: transformers.Gemma2Config(**SMALL, **MIXED, attn_logit_softcapping=5.0, query_pre_attn_scalar=16, **options),
              "gemma3": lambda: transformers.Gemma3TextConfig(**SMALL, **MIXED, query_pre_attn_scalar=16, **options),
              "gpt_oss": lambda: transformers.GptOssConfig(**SMALL, **MIXED, num_local_experts=4, num_experts_per_tok=2, **options)}[name]()
    m = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).to(DEVICE).eval()
    for parameter_name, p in m.named_parameters():
        if parameter_name.endswith("sinks"):
            p.data.normal_()
    return m


@pytest.fixture(autouse=True)
def registered():
    hf.register_attention()
    hf.attention_fallbacks.clear()


def tokens(rows=3, length=20):
    return torch.randint(1, 64, (rows, length), device=DEVICE)


def padding(ids, side):
    mask = torch.ones_like(ids)
    for row, n in enumerate((5, 0, 1)):
        if n:
            mask[row, :n] = 0 if side == "left" else 1
            mask[row, -n:] = 0 if side == "right" else 1
    return None if side == "none" else mask


def logits_and_gradients(m, implementation, ids, real, **inputs):
    m.set_attn_implementation(implementation)
    m.zero_grad()
    logits = m(ids, **inputs).logits[real]
    logits.float().sin().sum().backward()
    return [logits.detach()] + [p.grad for p in m.parameters() if p.grad is not None]


def assert_close(found, expected, tolerance):
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert (a.float() - b.float()).abs().max() <= tolerance * b.float().abs().max() + 1e-6


@on_cpu
@pytest.mark.parametrize("side", ("none", "left", "right"))
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_of_real_tokens_are_those_of_eager_attention(name, side):
    m, ids = small_model(name), tokens()
    mask = padding(ids, side)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    expected = logits_and_gradients(m, "eager", ids, real, attention_mask=mask)
    found = logits_and_gradients(m, "ingot", ids, real, attention_mask=mask)
    assert_close(found, expected, 1e-5)  # sums of fp32 in another order
    assert not hf.attention_fallbacks


@on_cpu
@pytest.mark.parametrize("name", NAMES)
def test_generation_gives_the_tokens_of_eager_attention(name):
    m, ids = small_model(name), tokens(length=9)
    mask = padding(ids, "left")
    cases = (dict(), dict(attention_mask=mask), dict(attention_mask=mask, num_beams=2), dict(attention_mask=mask, cache_implementation="static"))
    for case in cases:
        found = []
        for implementation in ("eager", "ingot"):
            m.set_attn_implementation(implementation)
            found.append(m.generate(ids, max_new_tokens=12, do_sample=False, **case))
        assert torch.equal(*found), case
        if "cache_implementation" not in case:
            assert not hf.attention_fallbacks


@on_cpu
def test_a_prompt_in_two_pieces_gives_the_logits_of_one():
    m = small_model("gemma3", "ingot")
    ids = tokens(rows=2)
    cache = transformers.DynamicCache(config=m.config)
    first, second = (m(part, past_key_values=cache).logits for part in (ids[:, :13], ids[:, 13:]))
    torch.testing.assert_close(torch.cat([first, second], 1), m(ids).logits, rtol=1e-5, atol=1e-5)
    assert not hf.attention_fallbacks


@on_cpu
def test_packed_sequences_do_not_see_each_other():
    m, ids = small_model("mistral", "ingot"), tokens(rows=1)
    lengths = 8, 1, 11
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    alone = torch.cat([m(part).logits for part in ids.split(lengths, 1)], 1)
    torch.testing.assert_close(m(ids, position_ids=positions, use_cache=False).logits, alone, rtol=1e-5, atol=1e-6)
    ends = torch.tensor([0, 8, 9, 20], dtype=torch.int32)  # of a collator, which makes no padding
    found = m(ids, position_ids=positions, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=11, max_length_k=11, use_cache=False).logits
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)
    assert not hf.attention_fallbacks


def test_a_gpu_below_8_0_leaves_attention_to_pytorch(monkeypatch):
    from ingot import _hf_attention, _hf_parts

    monkeypatch.setattr(_hf_attention, "_C", types.SimpleNamespace(cuda=True))
    heads = types.SimpleNamespace(is_cuda=True, device=torch.device("cuda"), dtype=torch.bfloat16, shape=(2, 4, 8, 64))
    for limit, reason in (((7, 5), "a GPU of compute capability 7.5, and the kernels need 8.0"), ((8, 0), None)):
        monkeypatch.setattr(_hf_parts, "LIMIT", limit)
        assert _hf_attention._reason(heads, heads, heads, 0.0, None) == reason


@on_cpu
@pytest.mark.parametrize("name", ("llama", "gemma2", "gpt_oss"))
@pytest.mark.parametrize("case, reason", (("own mask", "a mask of its own"), ("holes", "holes"), ("dropout", "dropout")))
def test_cases_without_a_kernel_are_computed_by_pytorch_and_counted_by_reason(name, case, reason, caplog):
    m, ids = small_model(name, attention_dropout=1e-30 if case == "dropout" else 0.0), tokens()
    if case == "dropout":
        m.train()
    mask = None
    if case == "own mask":
        allowed = torch.rand(3, 1, 20, 20) < 0.7
        mask = torch.where(allowed | torch.eye(20, dtype=torch.bool), 0.0, torch.finfo(torch.float32).min)
    elif case == "holes":
        mask = torch.ones_like(ids)
        mask[1, 4:7] = 0
    real = mask.bool() if case == "holes" else torch.ones_like(ids, dtype=torch.bool)
    expected = logits_and_gradients(m, "eager", ids, real, attention_mask=mask)
    with caplog.at_level(logging.WARNING, logger="ingot"):
        found = logits_and_gradients(m, "ingot", ids, real, attention_mask=mask)
    assert_close(found, expected, 1e-5)
    assert [n for n in hf.attention_fallbacks.values()] == [2] and reason in next(iter(hf.attention_fallbacks))
    said = [record.getMessage() for record in caplog.records if record.name == "ingot"]  # transformers may warn of the configuration, too
    assert len(said) == 1 and reason in said[0]


@on_cpu
def test_weights_of_attention_are_refused_by_name():
    from ingot import _hf_attention

    x = torch.randn(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match="output_attentions"):
        _hf_attention.attention(torch.nn.Module(), x, x, x, None, output_attentions=True)


def model_of_images(implementation):
    """(Gemma 3 with images, inputs in which the tokens of an image see each other)."""
    vision = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    config = transformers.Gemma3Config(text_config={**SMALL, **MIXED, "vocab_size": 80}, vision_config=vision, mm_tokens_per_image=4, image_token_index=70,
                                       boi_token_index=71, eoi_token_index=72)
    torch.manual_seed(0)
    m = transformers.Gemma3ForConditionalGeneration(config).eval()
    m.set_attn_implementation(implementation)
    ids = torch.cat([tokens(1, 5), torch.tensor([[71, 70, 70, 70, 70, 72]]), tokens(1, 6)], 1)
    return m, dict(ids=ids, pixel_values=torch.randn(1, 3, 28, 28), token_type_ids=(ids == 70).long())


@on_cpu
def test_images_whose_tokens_see_each_other_get_a_dense_mask():
    found = []
    for implementation in ("eager", "ingot"):
        m, inputs = model_of_images(implementation)
        found.append(m(inputs.pop("ids"), **inputs).logits)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    assert any("pattern" in reason for reason in hf.attention_fallbacks)


@on_cpu
def test_vision_models_attend_in_both_directions():
    config = transformers.SiglipVisionConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=7)
    m = transformers.SiglipVisionModel(config).eval()
    x = torch.randn(2, 3, 28, 28)
    found = []
    for implementation in ("eager", "ingot"):
        m.set_attn_implementation(implementation)
        found.append(m(x).last_hidden_state)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    assert not hf.attention_fallbacks


@on_cpu
@pytest.mark.parametrize("side", ("left", "right"))
def test_decoders_see_the_real_tokens_of_padded_encoders(side):
    sizes = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}
    config = transformers.BartConfig(vocab_size=64, d_model=32, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                                     decoder_start_token_id=1, forced_eos_token_id=None, dropout=0.0, **sizes)
    torch.manual_seed(0)
    m, ids = transformers.BartForConditionalGeneration(config).eval(), tokens()
    mask = padding(ids, side)
    for queries in (1, 7, 20, 31):  # fewer than keys, as many, more
        decoded = tokens(length=queries)
        real = torch.ones_like(decoded, dtype=torch.bool)
        expected = logits_and_gradients(m, "eager", ids, real, attention_mask=mask, decoder_input_ids=decoded)
        found = logits_and_gradients(m, "ingot", ids, real, attention_mask=mask, decoder_input_ids=decoded)
        assert_close(found, expected, 1e-5)  # sums of fp32 in another order
    found = []
    for implementation in ("eager", "ingot"):
        m.set_attn_implementation(implementation)
        found.append(m.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False))
    assert torch.equal(*found) and not hf.attention_fallbacks


@on_cpu
@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("window", (None, 5))
@pytest.mark.parametrize("holes", (True, False))
def test_a_layer_takes_padding_from_a_model_that_makes_no_mask(causal, window, holes):
    if window and not causal:
        pytest.skip("a window needs an order")
    q, k, v = (torch.randn(3, heads, 12, 8) for heads in (4, 2, 2))
    real = torch.ones(3, 12, dtype=torch.long)
    real[0, :3] = real[2, 10:] = 0
    if holes:
        real[1, 4:7] = 0
    distance = torch.arange(12)[:, None] - torch.arange(12)
    seen = real.bool()[:, None, None].expand(-1, -1, 12, -1).clone()
    if causal:
        seen &= (distance >= 0) & (distance < (window or 12))
    seen |= torch.eye(12, dtype=torch.bool)  # padding, whose rows count nowhere, sees itself
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)
    found, _ = hf._hf_attention.attention(types.SimpleNamespace(is_causal=causal), q, k, v, real, sliding_window=window)
    torch.testing.assert_close(found[real.bool()], expected[real.bool()], rtol=1e-5, atol=1e-5)
    assert bool(hf.attention_fallbacks) == holes


def compiled(m):
    torch.compiler.reset()  # the graphs of other models count towards a limit
    return torch.compile(lambda ids, **named: m(ids, use_cache=False, **named).logits, backend="aot_eager", fullgraph=True)


@on_cpu
@pytest.mark.parametrize("name, kind", (("gemma3", "none"), ("gemma3", "packed"), ("gemma3", "padded"), ("gpt_oss", "packed")))
def test_a_compiled_model_gives_the_kernels_its_segments(name, kind, monkeypatch):
    from ingot import _hf_attention

    m, ids = small_model(name), tokens()
    packed = [torch.cat([torch.arange(n) for n in lengths]).expand(3, -1) for lengths in ((8, 1, 11), (5, 15))]
    cases = {"none": [{}], "packed": [dict(position_ids=p) for p in packed],
             "padded": [dict(attention_mask=padding(ids, side)) for side in ("left", "right")]}[kind]  # the second case runs the graph of the first
    masks = [case.get("attention_mask", torch.ones_like(ids)).bool() for case in cases]
    expected = [logits_and_gradients(m, "eager", ids, real, use_cache=False, **case) for case, real in zip(cases, masks)]
    m.set_attn_implementation("ingot")
    monkeypatch.setattr(_hf_attention, "_dense_attention", None)  # a compiled call of PyTorch's formula is an error here
    run = compiled(m)
    trains = name != "gpt_oss"  # torch.compile does not trace the backward pass of transformers' experts in every version
    for case, real, numbers in zip(cases, masks, expected):
        m.zero_grad()
        with torch.set_grad_enabled(trains):
            logits = run(ids, **case)[real]
        if trains:
            logits.float().sin().sum().backward()
        assert_close([logits.detach()] + [p.grad for p in m.parameters() if p.grad is not None], numbers if trains else numbers[:1], 1e-5)


@on_cpu
def test_a_compiled_model_refuses_masks_that_are_no_segments_when_it_runs():
    m, ids = small_model("llama", "ingot"), tokens()
    mask = torch.ones_like(ids)
    run = compiled(m)
    run(ids, attention_mask=mask)
    mask[1, 4:7] = 0
    with pytest.raises(ValueError, match="more than causal"):
        run(ids, attention_mask=mask)


@on_cpu
def test_a_compiled_model_refuses_images_whose_tokens_see_each_other():
    m, inputs = model_of_images("eager")
    try:
        compiled(m)(**inputs)
    except torch._dynamo.exc.TorchDynamoException as e:
        pytest.skip(f"PyTorch {torch.__version__} does not compile the model with eager attention either: {type(e).__name__}")
    m, inputs = model_of_images("ingot")
    with pytest.raises(ValueError, match="more than causal"):
        compiled(m)(**inputs)


@on_cpu
def test_checkpointed_layers_give_the_same():
    m, ids = small_model("llama", "ingot").train(), tokens()
    mask = padding(ids, "left")
    plain = logits_and_gradients(m, "ingot", ids, mask.bool(), attention_mask=mask, use_cache=False)
    m.gradient_checkpointing_enable()
    assert_close(logits_and_gradients(m, "ingot", ids, mask.bool(), attention_mask=mask, use_cache=False), plain, 1e-6)


@on_cpu
def test_autocast_runs_in_its_dtype():
    m, ids = small_model("llama", "ingot"), tokens()
    expected = m(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        found = m(ids).logits
    assert found.dtype is torch.bfloat16 and (found.float() - expected).abs().max() < 0.05 * expected.abs().max()


@on_gpu
@pytest.mark.parametrize("side", ("none", "left", "right"))
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_on_a_gpu_stays_near_eager_attention(name, side):
    q = torch.ones(1, 8, 1, 16, device=DEVICE, dtype=torch.bfloat16)
    try:
        functional.flash_attn_func(q, q, q)
    except NotImplementedError as e:
        pytest.skip(str(e))
    m, ids = small_model(name).bfloat16(), tokens()
    mask = padding(ids, side)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    expected = logits_and_gradients(m, "eager", ids, real, attention_mask=mask)
    found = logits_and_gradients(m, "ingot", ids, real, attention_mask=mask)
    assert_close(found, expected, 0.06)  # both round every layer's results to 8 bits
    assert not hf.attention_fallbacks
