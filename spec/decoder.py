"""The decoder of src/ingot/models/spec.h in plain PyTorch: the executable definition of the families in src/ingot/models/families.

One sequence at a time, nothing cached, nothing fast. float64 is the oracle. A model is a Spec, whose fields are those of DecoderSpec, and a
dictionary of named tensors:

    out = logits(spec, weights, ids)     # (T, V)

Letters: T tokens, C hidden width, H query heads, K key heads, D head width, E experts, I width of an MLP or of one expert, V vocabulary.
Matrices are (out, in): y = x W^T + b. Weights, `l.` being the number of a layer:

    embed (V, C), head (V, C) if not tied, norm (C)
    l.attention_norm, l.mlp_norm (C); l.post_attention_norm, l.post_mlp_norm (C) if the norm has a post norm
    l.q.weight (H D, C), l.k.weight, l.v.weight (K D, C), l.o.weight (C, H D); .bias where the spec has such
    l.q_norm, l.k_norm (D) if qk_norm; l.sinks (H) if sinks
    l.gate.weight, l.up.weight (I, C), l.down.weight (C, I) of a dense layer; (E, I, C), (E, C, I) and l.router.weight (E, C) with experts
"""
import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F


@dataclass
class RopeTable:
    theta: float = 10000.0
    kind: str = "none"             # none, linear, llama3, yarn
    factor: float = 1.0
    original: float = 0.0          # the context before it was scaled
    fast: float = 32.0             # yarn's beta_fast, llama3's high_freq_factor
    slow: float = 1.0              # yarn's beta_slow, llama3's low_freq_factor
    truncate: bool = True          # yarn's ends of the ramp are whole pairs
    attention_factor: float = 0.0  # yarn; 0: 0.1 ln(factor) + 1
    interleaved: bool = False      # pairs (2j, 2j + 1); else (j, j + dim / 2)
    dim: int = 0                   # the first so many dimensions of a head are rotated; 0: all
    divisors: list = field(default_factory=list)  # of each pair's angle


@dataclass
class Layer:
    window: int = 0        # visible keys of a query, its own included; 0: all earlier keys
    rope: int = 0          # index of a table; -1: queries and keys are not rotated
    experts: bool = False


@dataclass
class Spec:
    vocab: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    layer: list                          # of Layer
    rope: list = field(default_factory=lambda: [RopeTable()])
    experts: int = 0
    experts_per_token: int = 0
    renormalise: bool = True             # an expert's weight is the softmax over the chosen ones; else over all
    norm_eps: float = 1e-5
    unit_offset: bool = False            # norms multiply by 1 + w
    post_norm: bool = False              # outputs of attention and MLP have norms before they are added
    qk_norm: bool = False                # per head, before the rotation
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    sinks: bool = False
    attention_scale: float = 0.0         # 0: 1 / sqrt(head_dim)
    attention_softcap: float = 0.0       # 0: none
    logit_softcap: float = 0.0
    gate: str = "swiglu"                 # swiglu; geglu: GELU by its tanh formula; clamped: GPT-OSS's
    gate_limit: float = 7.0              # of the clamped gate
    gate_alpha: float = 1.702
    embedding_scale: float = 1.0
    tied: bool = False


# --- the parts ---------------------------------------------------------------------------------------------------------
def norm(s, x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + s.norm_eps) * (weight + 1 if s.unit_offset else weight)


def softcap(x, cap):
    return cap * torch.tanh(x / cap) if cap else x


def frequencies(table, dim):
    """The angle of each pair per position, and the factor on cos and sin."""
    pair = torch.arange(dim // 2, dtype=torch.float64)
    omega = table.theta ** (-2 * pair / dim)
    if table.divisors:
        omega = omega / torch.tensor(table.divisors, dtype=torch.float64)
    if table.kind == "linear":
        return omega / table.factor, 1.0
    if table.kind == "llama3":  # how often a pair turns within the original context decides what is kept
        turns = table.original * omega / (2 * math.pi)
        kept = ((turns - table.slow) / (table.fast - table.slow)).clamp(0, 1)
        return omega * (kept + (1 - kept) / table.factor), 1.0
    if table.kind == "yarn":
        where = lambda turns: dim * math.log(table.original / (turns * 2 * math.pi)) / (2 * math.log(table.theta))
        low, high = where(table.fast), where(table.slow)
        if table.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        slowed = ((pair - low) / (high - low if high > low else 0.001)).clamp(0, 1)
        return omega * (slowed / table.factor + 1 - slowed), table.attention_factor or 0.1 * math.log(table.factor) + 1
    assert table.kind == "none", table.kind
    return omega, 1.0


def rotate(table, x):
    """x (T, heads, D): pair j turns by position * omega_j; dimensions behind `dim` stay."""
    dim = table.dim or x.shape[-1]
    omega, factor = frequencies(table, dim)
    angle = torch.arange(x.shape[0], dtype=torch.float64)[:, None] * omega
    cos, sin = (factor * angle.cos()).to(x)[:, None], (factor * angle.sin()).to(x)[:, None]
    first, second = (slice(0, dim, 2), slice(1, dim, 2)) if table.interleaved else (slice(0, dim // 2), slice(dim // 2, dim))
    out = x.clone()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def linear(w, name, x):
    return F.linear(x, w[name + ".weight"], w.get(name + ".bias"))


# --- the model ---------------------------------------------------------------------------------------------------------
def attention(s, w, l, x):
    T, layer = x.shape[0], s.layer[l]
    q, k, v = (linear(w, f"{l}.{p}", x).view(T, -1, s.head_dim) for p in "qkv")
    if s.qk_norm:
        q, k = norm(s, q, w[f"{l}.q_norm"]), norm(s, k, w[f"{l}.k_norm"])
    if layer.rope >= 0:
        q, k = rotate(s.rope[layer.rope], q), rotate(s.rope[layer.rope], k)
    group = s.heads // s.kv_heads
    distance = torch.arange(T)[:, None] - torch.arange(T)
    visible = (distance >= 0) & (distance < layer.window) if layer.window else distance >= 0
    scale = s.attention_scale or s.head_dim ** -0.5
    out = torch.empty_like(q)
    for h in range(s.heads):
        scores = softcap(scale * q[:, h] @ k[:, h // group].T, s.attention_softcap).masked_fill(~visible, -torch.inf)
        if s.sinks:  # a logit that takes weight and gives no value
            scores = torch.cat([scores, w[f"{l}.sinks"][h].expand(T, 1)], dim=-1)
        out[:, h] = scores.softmax(-1)[:, :T] @ v[:, h // group]
    return linear(w, f"{l}.o", out.flatten(1))


def gated(s, gate, up):
    if s.gate == "clamped":
        gate, up = gate.clamp(max=s.gate_limit), up.clamp(-s.gate_limit, s.gate_limit)  # the gate from above only
        return gate * torch.sigmoid(s.gate_alpha * gate) * (up + 1)
    return (F.gelu(gate, approximate="tanh") if s.gate == "geglu" else F.silu(gate)) * up


def mlp(s, w, l, x):
    if not s.layer[l].experts:
        return linear(w, f"{l}.down", gated(s, linear(w, f"{l}.gate", x), linear(w, f"{l}.up", x)))
    scores = linear(w, f"{l}.router", x)
    top, chosen = scores.topk(s.experts_per_token, dim=-1)
    weight = top.softmax(-1) if s.renormalise else scores.softmax(-1).gather(-1, chosen)
    out = torch.zeros_like(x)
    for e in range(s.experts):
        token, place = torch.where(chosen == e)
        part = lambda p, y: F.linear(y, w[f"{l}.{p}.weight"][e], w[f"{l}.{p}.bias"][e] if s.mlp_bias else None)
        out[token] += weight[token, place, None] * part("down", gated(s, part("gate", x[token]), part("up", x[token])))
    return out


def logits(s, w, ids):
    """(T, V)"""
    post = lambda name, x: norm(s, x, w[name]) if s.post_norm else x
    x = w["embed"][torch.as_tensor(ids)] * s.embedding_scale
    for l in range(len(s.layer)):
        x = x + post(f"{l}.post_attention_norm", attention(s, w, l, norm(s, x, w[f"{l}.attention_norm"])))
        x = x + post(f"{l}.post_mlp_norm", mlp(s, w, l, norm(s, x, w[f"{l}.mlp_norm"])))
    return softcap(norm(s, x, w["norm"]) @ (w["embed"] if s.tied else w["head"]).T, s.logit_softcap)


def losses(s, w, ids):
    """The loss of each token after the first, natural logarithm: (T - 1)."""
    ids = torch.as_tensor(ids)
    return F.cross_entropy(logits(s, w, ids)[:-1], ids[1:], reduction="none")


# --- random weights ----------------------------------------------------------------------------------------------------
def shapes(s):
    """The shape of every weight, by name."""
    C, Q, K, I = s.hidden, s.heads * s.head_dim, s.kv_heads * s.head_dim, s.intermediate
    out = {"embed": (s.vocab, C), "norm": (C,)}
    if not s.tied:
        out["head"] = (s.vocab, C)
    for l, layer in enumerate(s.layer):
        E = (s.experts,) if layer.experts else ()
        norms = ["attention_norm", "mlp_norm"] + (["post_attention_norm", "post_mlp_norm"] if s.post_norm else [])
        out.update({f"{l}.{n}": (C,) for n in norms})
        if s.qk_norm:
            out[f"{l}.q_norm"] = out[f"{l}.k_norm"] = (s.head_dim,)
        if s.sinks:
            out[f"{l}.sinks"] = (s.heads,)
        matrices = {"q": ((Q, C), s.qkv_bias), "k": ((K, C), s.qkv_bias), "v": ((K, C), s.qkv_bias), "o": ((C, Q), s.output_bias),
                    "gate": (E + (I, C), s.mlp_bias), "up": (E + (I, C), s.mlp_bias), "down": (E + (C, I), s.mlp_bias)}
        if layer.experts:
            matrices["router"] = ((s.experts, C), s.mlp_bias)
        for name, (shape, bias) in matrices.items():
            out[f"{l}.{name}.weight"] = shape
            if bias:
                out[f"{l}.{name}.bias"] = shape[:-1]
    return out


def random_weights(s, generator):
    """Numbers that bf16 holds, at a scale that gives logits of standard deviation 2 and more; norms and biases are random as well."""
    out = {}
    for name, shape in shapes(s).items():
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name.endswith("norm"):
            x = 0.3 * x + (0 if s.unit_offset else 1)
        elif len(shape) == 1 or name.endswith(".bias"):
            x = 0.3 * x
        elif name != "embed":
            x = 1.5 * x / shape[-1] ** 0.5
        out[name] = x.bfloat16().double()
    return out
