"""GPT-OSS in plain PyTorch: the executable definition of src/ingot/models/gpt_oss.

One sequence at a time, nothing cached, nothing fast. Any floating dtype works; float64 is the oracle. A model is a config (the
config.json beside a checkpoint, in any of its spellings) and a dictionary of named tensors:

    config = read_config("checkpoint")
    weights = read_weights("checkpoint", config, dtype=torch.float64)
    out = logits(config, weights, ids)     # (T, V)

Letters: T tokens, C hidden width, H query heads, K key heads, D head width, E experts, I hidden width of one expert,
V vocabulary. Matrices are (out, in): y = x W^T + b.
"""
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

MX_BLOCK = 32  # numbers that share a scale


# --- config ------------------------------------------------------------------------------------------------------------
@dataclass
class Config:
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    experts_per_token: int
    intermediate: int
    window: int                    # keys a sliding layer sees, the query's own included
    sliding: list = field(default_factory=list)  # by layer; published: even layers
    norm_eps: float = 1e-5
    rope_base: float = 150000.0
    yarn: dict | None = None       # factor, original, fast, slow, truncate, attention_factor
    limit: float = 7.0
    alpha: float = 1.702
    attention_bias: bool = True
    tied: bool = False


def parse_config(c):
    """From config.json as published (rope_theta, rope_scaling), as transformers 5 writes it (rope_parameters), or OpenAI's own."""
    own = "num_local_experts" not in c
    rope = c.get("rope_scaling") or c.get("rope_parameters")
    if rope is None:  # the architecture's defaults; OpenAI's own spelling may change each of them
        given = c if own else {}
        rope = dict(rope_type="yarn", factor=given.get("rope_scaling_factor", 32.0), beta_fast=given.get("rope_ntk_beta", 32.0),
                    beta_slow=given.get("rope_ntk_alpha", 1.0), truncate=False,
                    original_max_position_embeddings=given.get("initial_context_length", 4096))
    yarn = None
    if rope.get("rope_type", rope.get("type", "default")) == "yarn":
        yarn = dict(factor=rope["factor"], fast=rope.get("beta_fast", 32.0), slow=rope.get("beta_slow", 1.0),
                    original=rope["original_max_position_embeddings"],
                    truncate=rope.get("truncate", True), attention_factor=rope.get("attention_factor"))
    layers = c["num_hidden_layers"]
    types = c.get("layer_types") or ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    return Config(
        vocab=c["vocab_size"], hidden=c["hidden_size"], layers=layers, heads=c["num_attention_heads"],
        kv_heads=c["num_key_value_heads"], head_dim=c.get("head_dim", 64) or c["hidden_size"] // c["num_attention_heads"],
        experts=c["num_experts" if own else "num_local_experts"],
        experts_per_token=c.get("num_experts_per_tok") or c["experts_per_token"], intermediate=c["intermediate_size"],
        window=c.get("sliding_window", 128), sliding=[t == "sliding_attention" for t in types],
        norm_eps=c.get("rms_norm_eps", 1e-5), rope_base=rope.get("rope_theta", c.get("rope_theta", 150000.0)), yarn=yarn,
        limit=c.get("swiglu_limit", 7.0), alpha=c.get("swiglu_alpha", 1.702), attention_bias=c.get("attention_bias", True),
        tied=c.get("tie_word_embeddings", False))


def read_config(directory):
    return parse_config(json.loads((Path(directory) / "config.json").read_text()))


# --- MXFP4 -------------------------------------------------------------------------------------------------------------
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def mxfp4_decode(blocks, scales, dtype):
    """(..., K / 32, 16) bytes and (..., K / 32) scales -> (..., K). The low half of a byte is the earlier number."""
    values = torch.tensor(E2M1 + [-v for v in E2M1], dtype=dtype)
    pairs = torch.stack([blocks & 15, blocks >> 4], dim=-1).long()
    numbers = values[pairs].flatten(-2)  # (..., K / 32, 32)
    return torch.ldexp(numbers, (scales.to(torch.int32) - 127).unsqueeze(-1)).flatten(-2)


def mxfp4_encode(x):
    """The converter's rule for (..., K): of the two scales that can be best for a block, the one with the smaller squared error."""
    blocks = x.double().unflatten(-1, (-1, MX_BLOCK))
    top = blocks.abs().amax(-1)
    low = torch.where(top > 0, torch.frexp(top)[1].double() - 1 - 2, 0.0).clamp(-127, 127)
    middles = torch.tensor([(a + b) / 2 for a, b in zip(E2M1, E2M1[1:])], dtype=torch.float64)

    def codes(exponent):
        scaled = (blocks * torch.exp2(-exponent).unsqueeze(-1)).abs().contiguous()
        up, at = torch.bucketize(scaled, middles), torch.bucketize(scaled, middles, right=True)
        code = torch.where(up % 2 == 0, up, at)  # exactly in the middle: the even code of the two neighbours
        value = torch.tensor(E2M1, dtype=torch.float64)[code] * torch.exp2(exponent).unsqueeze(-1)
        return code, (value - blocks.abs()).square().sum(-1)

    code, error = codes(low)
    higher = (low + 1).clamp(max=127)
    code2, error2 = codes(higher)
    better = error2 < error
    code = torch.where(better.unsqueeze(-1), code2, code) + 8 * torch.signbit(blocks)
    scales = torch.where(better, higher, low) + 127
    packed = code[..., 0::2] + 16 * code[..., 1::2]
    return packed.to(torch.uint8), scales.to(torch.uint8)


# --- checkpoints -------------------------------------------------------------------------------------------------------
def read_weights(directory, config, dtype=torch.float64):
    """Every safetensors file of a directory, in either published naming or as transformers writes it, as one dictionary."""
    from safetensors.torch import load_file
    found = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        found.update(load_file(path))
    return name_weights(config, found, dtype)


def name_weights(config, found, dtype):
    own = "embedding.weight" in found
    out = {}

    def put(name, tensor):
        out[name] = tensor.to(dtype)

    def experts(name):  # (E, out, in)
        dot = "." if own else "_"
        if name + dot + "blocks" in found:
            return mxfp4_decode(found[name + dot + "blocks"], found[name + dot + "scales"], dtype)
        return found[name] if own else found[name].transpose(1, 2)

    put("embed", found["embedding.weight" if own else "model.embed_tokens.weight"])
    put("norm", found["norm.scale" if own else "model.norm.weight"])
    put("head", out["embed"] if config.tied else found["unembedding.weight" if own else "lm_head.weight"])
    for l in range(config.layers):
        n, a = f"{l}.", f"block.{l}." if own else f"model.layers.{l}."
        pick = lambda hf, name: found[a + (name if own else hf)]
        put(n + "attn_norm", pick("input_layernorm.weight", "attn.norm.scale"))
        put(n + "mlp_norm", pick("post_attention_layernorm.weight", "mlp.norm.scale"))
        put(n + "sinks", pick("self_attn.sinks", "attn.sinks"))
        for what in ("weight", "bias") if config.attention_bias else ("weight",):
            if own:
                widths = [config.heads * config.head_dim] + [config.kv_heads * config.head_dim] * 2
                parts = found[a + f"attn.qkv.{what}"].split(widths)
            else:
                parts = [found[a + f"self_attn.{p}_proj.{what}"] for p in "qkv"]
            for p, tensor in zip("qkv", parts):
                put(f"{n}{p}.{what}", tensor)
            put(f"{n}o.{what}", pick(f"self_attn.o_proj.{what}", f"attn.out.{what}"))
        for what in ("weight", "bias"):
            put(f"{n}router.{what}", pick(f"mlp.router.{what}", f"mlp.gate.{what}"))
        put(n + "gate_up.weight", experts(a + ("mlp.mlp1_weight" if own else "mlp.experts.gate_up_proj")))
        put(n + "gate_up.bias", pick("mlp.experts.gate_up_proj_bias", "mlp.mlp1_bias"))
        put(n + "down.weight", experts(a + ("mlp.mlp2_weight" if own else "mlp.experts.down_proj")))
        put(n + "down.bias", pick("mlp.experts.down_proj_bias", "mlp.mlp2_bias"))
    return out


# --- the model ---------------------------------------------------------------------------------------------------------
def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope_frequencies(c):
    """The angle of each pair per position, and the factor on cos and sin. The ramp's ends are rounded only if `truncate` is set."""
    pair = torch.arange(c.head_dim // 2, dtype=torch.float64)
    theta = c.rope_base ** (-2 * pair / c.head_dim)
    if c.yarn is None:
        return theta, 1.0
    y = c.yarn
    where = lambda turns: c.head_dim * math.log(y["original"] / (turns * 2 * math.pi)) / (2 * math.log(c.rope_base))
    low, high = where(y["fast"]), where(y["slow"])
    if y["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, c.head_dim - 1)
    if low == high:
        high += 0.001
    slowed = ((pair - low) / (high - low)).clamp(0, 1)
    factor = y["attention_factor"] or (0.1 * math.log(y["factor"]) + 1 if y["factor"] > 1 else 1.0)
    return theta * (slowed / y["factor"] + 1 - slowed), factor


def rope(c, x):
    """x (T, heads, D): pairs (i, i + D / 2) turn by position * theta_i."""
    theta, factor = rope_frequencies(c)
    angle = torch.arange(x.shape[0], dtype=torch.float64)[:, None] * theta
    cos, sin = (factor * angle.cos()).to(x)[:, None], (factor * angle.sin()).to(x)[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attention(c, w, l, x):
    T, n = x.shape[0], f"{l}."
    project = lambda p, heads: F.linear(x, w[f"{n}{p}.weight"], w.get(f"{n}{p}.bias")).view(T, heads, c.head_dim)
    q, k, v = rope(c, project("q", c.heads)), rope(c, project("k", c.kv_heads)), project("v", c.kv_heads)
    group = c.heads // c.kv_heads
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    visible = (distance >= 0) & (distance < c.window) if c.sliding[l] else distance >= 0
    out = torch.empty_like(q)
    for h in range(c.heads):
        scores = (q[:, h] @ k[:, h].T / math.sqrt(c.head_dim)).masked_fill(~visible, -torch.inf)
        sink = w[n + "sinks"][h].expand(T, 1)  # a logit of its own, not scaled, that takes weight and adds no value
        out[:, h] = torch.cat([scores, sink], dim=-1).softmax(-1)[:, :-1] @ v[:, h]
    return F.linear(out.flatten(1), w[n + "o.weight"], w.get(n + "o.bias"))


def expert(c, w, l, e, x):
    n = f"{l}."
    both = F.linear(x, w[n + "gate_up.weight"][e], w[n + "gate_up.bias"][e])
    gate, up = both[:, 0::2], both[:, 1::2]  # interleaved
    gate, up = gate.clamp(max=c.limit), up.clamp(-c.limit, c.limit)  # the gate is clamped from above only
    hidden = gate * torch.sigmoid(c.alpha * gate) * (up + 1)
    return F.linear(hidden, w[n + "down.weight"][e], w[n + "down.bias"][e])


def mixture(c, w, l, x):
    scores = F.linear(x, w[f"{l}.router.weight"], w[f"{l}.router.bias"])
    top, chosen = scores.topk(c.experts_per_token, dim=-1)
    weight = top.softmax(-1)  # over the chosen experts only
    out = torch.zeros_like(x)
    for e in range(c.experts):
        token, slot = torch.where(chosen == e)
        out[token] += weight[token, slot, None] * expert(c, w, l, e, x[token])
    return out


def residual_streams(c, w, ids, layers=None):
    """(T, C) behind 0, 1, ... layers, before any norm."""
    streams = [w["embed"][ids]]
    for l in range(c.layers if layers is None else layers):
        x = streams[-1]
        x = x + attention(c, w, l, rms_norm(x, w[f"{l}.attn_norm"], c.norm_eps))
        streams.append(x + mixture(c, w, l, rms_norm(x, w[f"{l}.mlp_norm"], c.norm_eps)))
    return streams


def hidden_states(c, w, ids, layers=None):
    return rms_norm(residual_streams(c, w, ids, layers)[-1], w["norm"], c.norm_eps)


def logits(c, w, ids, layers=None):
    """(T, V). `layers`: only the first so many layers."""
    return hidden_states(c, w, torch.as_tensor(ids), layers) @ w["head"].T


def losses(c, w, ids, layers=None):
    """The loss of each token after the first, natural logarithm: (T - 1)."""
    ids = torch.as_tensor(ids)
    return F.cross_entropy(logits(c, w, ids, layers)[:-1], ids[1:], reduction="none")
