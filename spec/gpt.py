"""The small GPT of src/ingot/models/gpt, in plain PyTorch: the executable definition of the model.

This file defines the whole computation of the native model, in the order of the computation, for one flat buffer of packed documents. Nothing is
fast. Any floating dtype works; float64 is the oracle. A model is a config (the JSON that the native model reads) and a dictionary of named tensors:

    config = GptConfig.from_json(open("config.json").read())
    weights = initialise(config, seed=1)
    loss = losses(config, weights, tokens, targets, cu_seqlens, looping=False)     # (T), natural logarithm

Letters: T tokens, C model width, E embedding width, H query heads, K key heads, D head width, F hidden width of the MLP,
V vocabulary, S skip slots, L physical layers. Matrices are (out, in): y = x W^T. There are no biases.
"""
import json
import math
from dataclasses import asdict, dataclass, field, fields

import torch
import torch.nn.functional as F

IGNORE = -1  # a target without a loss


# --- config ------------------------------------------------------------------------------------------------------------
@dataclass
class RopeScaling:
    kind: str = "none"             # none, ntk, yarn
    factor: float = 1.0            # how many times longer the context is
    original_context: float = 0.0  # yarn: the context the model was trained with
    beta_fast: float = 32.0        # yarn: rotations over that context from which on a pair is left alone
    beta_slow: float = 1.0         # yarn: rotations up to which a pair is fully interpolated
    truncate: bool = True          # yarn: round the ramp's ends outwards to whole pairs
    attention_factor: float = 0.0  # yarn: factor on cos and sin; 0 means 0.1 ln(factor) + 1


@dataclass
class GptConfig:
    """Field by field the native GptConfig, whose header explains each field."""
    vocab: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 32
    mlp_hidden: int = 512
    embed_dim: int = 0
    context: int = 256
    activation: str = "gelu"
    tied_embeddings: bool = True
    learned_positions: bool = False
    embed_norm: bool = False
    norm_weight: bool = True
    norm_eps: float = 1e-5
    layer_scale: bool = False
    rotary_dim: int = 0
    rope_base: float = 10000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    rope_interleaved: bool = False
    rope_sign: int = 1
    qk_norm: bool = False
    qk_gain: bool = False
    qk_gain_init: float = 1.0
    xsa_layers: int = 0
    window: int = 0
    resid_mix: bool = False
    branch_scale: bool = False
    unet_skips: bool = False
    skip_gates: bool = False
    lane_start: int = -1
    lane_output: str = "mean"
    loop_first: int = 0
    loop_last: int = -1
    loop_extra: int = 0
    loop_from: float = 0.0
    softcap: float = 0.0
    z_loss: float = 0.0
    init: str = "normal"
    init_std: float = 0.02
    embed_std: float = 0.02

    @staticmethod
    def from_dict(given):
        unknown = set(given) - {f.name for f in fields(GptConfig)}
        if unknown:
            raise ValueError(f"config: unknown keys {sorted(unknown)}")
        given = dict(given)
        if isinstance(given.get("rope_scaling"), dict):
            given["rope_scaling"] = RopeScaling(**given["rope_scaling"])
        return GptConfig(**given)

    @staticmethod
    def from_json(text):
        return GptConfig.from_dict(json.loads(text))

    def to_json(self):
        return json.dumps(asdict(self), indent=2)

    @property
    def factorised(self):
        return self.embed_dim not in (0, self.dim)

    @property
    def has_loop(self):
        return self.loop_extra > 0 and self.loop_last >= self.loop_first


# --- the order in which blocks run -------------------------------------------------------------------------------------
@dataclass
class Application:
    layer: int              # physical
    skip_slot: int = -1     # decoder position whose skip weights merge before this application
    skip_from: int = -1     # the application whose output is merged
    pushes: bool = False    # an encoder application: its output is kept for a skip
    lanes: bool = False     # a two-lane block


def layer_program(c, looping):
    """The physical layers in order; with U-Net skips the first half (rounded down) encodes and the rest decodes. Decoder
    position p merges the most recent encoder output not yet merged, as long as there is one."""
    order = list(range(c.layers))
    if looping and c.has_loop:
        segment = order[c.loop_first:c.loop_last + 1]
        order = order[:c.loop_first] + segment * (1 + c.loop_extra) + order[c.loop_last + 1:]
    encoders = len(order) // 2 if c.unet_skips else 0
    program, stack = [], []
    for index, layer in enumerate(order):
        a = Application(layer)
        if index < encoders:
            a.pushes = True
            stack.append(index)
        else:
            if stack:
                a.skip_slot, a.skip_from = index - encoders, stack.pop()
        a.lanes = 0 <= c.lane_start <= layer
        if a.lanes and a.pushes:
            raise ValueError(f"lane_start: layer {layer} encodes; two-lane layers must decode, because a skip is one tensor")
        if program and program[-1].lanes and not a.lanes:
            raise ValueError(f"lane_start: layer {layer} runs after two-lane layer {program[-1].layer}; lanes never merge again")
        program.append(a)
    return program


def skip_slots(c):
    """Both programs share one table, indexed by decoder position, as long as the larger of them needs."""
    if not c.unet_skips:
        return 0
    return max(sum(a.pushes for a in layer_program(c, looping)) for looping in (False, True))


# --- parameters --------------------------------------------------------------------------------------------------------
def parameter_shapes(c):
    """Name -> (shape, kind). kind is matrix, embedding, head or scalar, and determines the optimizer group of the parameter."""
    e = c.embed_dim if c.factorised else c.dim
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    p = {"tok_emb.weight": ((c.vocab, e), "embedding")}
    if c.factorised:
        p["embed_proj.weight"] = ((c.dim, e), "matrix")
        p["head_proj.weight"] = ((e, c.dim), "matrix")
    if c.learned_positions:
        p["pos_emb.weight"] = ((c.context, c.dim), "embedding")
    for i in range(c.layers):
        b = f"blocks.{i}."
        if c.norm_weight:
            p[b + "attn_norm.weight"] = ((c.dim,), "scalar")
            p[b + "mlp_norm.weight"] = ((c.dim,), "scalar")
        p[b + "attn.q.weight"] = ((q, c.dim), "matrix")
        p[b + "attn.k.weight"] = ((kv, c.dim), "matrix")
        p[b + "attn.v.weight"] = ((kv, c.dim), "matrix")
        p[b + "attn.o.weight"] = ((c.dim, q), "matrix")
        p[b + "mlp.up.weight"] = ((c.mlp_hidden, c.dim), "matrix")
        p[b + "mlp.down.weight"] = ((c.dim, c.mlp_hidden), "matrix")
        if c.qk_gain:
            p[b + "attn.q_gain"] = ((c.heads,), "scalar")
        if c.branch_scale:
            p[b + "attn_scale"] = ((c.dim,), "scalar")
            p[b + "mlp_scale"] = ((c.dim,), "scalar")
        if c.resid_mix:
            p[b + "resid_mix"] = ((2, c.dim), "scalar")
    if c.unet_skips:
        p["skip_weights"] = ((skip_slots(c), c.dim), "scalar")
        if c.skip_gates:
            p["skip_gates"] = ((skip_slots(c), c.dim), "scalar")
    if c.lane_start >= 0:
        p["parallel_post_lambdas"] = ((c.layers, 2, 2), "scalar")
        p["parallel_resid_lambdas"] = ((c.layers, 2), "scalar")
    if c.norm_weight:
        p["final_norm.weight"] = ((c.dim,), "scalar")
    if not c.tied_embeddings:
        p["lm_head.weight"] = ((c.vocab, e), "head")
    return p


def initialise(c, seed=0, dtype=torch.float64):
    """The native model follows the same rule, with its own random numbers in place of PyTorch's."""
    g = torch.Generator().manual_seed(seed)
    normal = lambda shape, std: torch.randn(shape, generator=g, dtype=torch.float64) * std
    ones = lambda shape: torch.ones(shape, dtype=torch.float64)
    zeros = lambda shape: torch.zeros(shape, dtype=torch.float64)
    orthogonal = c.init == "orthogonal"
    weights = {}
    for name, (shape, kind) in parameter_shapes(c).items():
        leaf = name.split(".")[-1] if kind == "scalar" else name
        if kind == "embedding":
            w = normal(shape, c.embed_std)
        elif kind == "head":
            w = zeros(shape) if orthogonal else normal(shape, c.init_std)
        elif kind == "matrix":
            branch_output = name.endswith(("attn.o.weight", "mlp.down.weight"))
            if not orthogonal:
                w = normal(shape, c.init_std / math.sqrt(2 * c.layers) if branch_output else c.init_std)
            else:
                w = zeros(shape) if branch_output else torch.nn.init.orthogonal_(zeros(shape), generator=g)
        elif leaf == "q_gain":
            w = ones(shape) * c.qk_gain_init
        elif leaf == "resid_mix":
            w = torch.stack([ones(shape[1:]), zeros(shape[1:])])
        elif leaf == "skip_gates":
            w = zeros(shape)
        elif leaf == "parallel_resid_lambdas":
            w = ones(shape) * 1.1
        else:  # norm weights, branch scales, skip weights, post lambdas
            w = ones(shape)
        weights[name] = w.to(dtype)
    return weights


# --- pieces ------------------------------------------------------------------------------------------------------------
ACTIVATIONS = {
    "identity": lambda x: x,
    "relu": F.relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.01),
    "leaky_relu_squared": lambda x: F.leaky_relu(x, 0.5).square(),
    "relu_squared": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),  # F.softplus turns linear at 20
}


def rms(x, eps, weight=None):
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def rope_frequencies(rotary_dim, base, s):
    """theta (rotary_dim / 2) in fp64, and the amplitude of cos and sin."""
    j = torch.arange(rotary_dim // 2, dtype=torch.float64)
    if s.kind == "ntk":
        base = base * s.factor ** (rotary_dim / (rotary_dim - 2))
    theta = base ** (-2 * j / rotary_dim)
    if s.kind != "yarn":
        return theta, 1.0
    # The pair that turns `rotations` times over the original context; pairs before it turn more often.
    pair = lambda rotations: rotary_dim * math.log(s.original_context / (rotations * 2 * math.pi)) / (2 * math.log(base))
    low, high = pair(s.beta_fast), pair(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    interpolated = ((j - low) / (high - low)).clamp(0, 1)
    theta = theta / s.factor * interpolated + theta * (1 - interpolated)
    default = 0.1 * math.log(s.factor) + 1 if s.factor > 1 else 1.0
    return theta, s.attention_factor or default


def rope(x, positions, c):
    """x (T, H, D); dimensions from rotary_dim on pass through."""
    theta, amplitude = rope_frequencies(c.rotary_dim, c.rope_base, c.rope_scaling)
    angle = positions.to(torch.float64)[:, None] * theta[None, :]
    cos, sin = ((amplitude * f(angle)).to(x.dtype)[:, None, :] for f in (torch.cos, torch.sin))
    r, rest = x[..., :c.rotary_dim], x[..., c.rotary_dim:]
    if c.rope_interleaved:
        x1, x2 = r[..., 0::2], r[..., 1::2]
    else:
        x1, x2 = r.chunk(2, -1)
    y1, y2 = x1 * cos - c.rope_sign * x2 * sin, x2 * cos + c.rope_sign * x1 * sin
    r = torch.stack([y1, y2], -1).flatten(-2) if c.rope_interleaved else torch.cat([y1, y2], -1)
    return torch.cat([r, rest], -1)


def segment_attention(q, k, v, scale, window):
    """One document: q (n, H, D), k and v (n, K, D). Query head h reads key head h // (H / K).
    Token i sees the tokens j <= i, with a window only the last `window` of these, including itself."""
    n, group = q.shape[0], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("ihd,jhd->hij", q, k) * scale
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    visible = (j <= i) & ((i - j < window) if window > 0 else True)
    return torch.einsum("hij,jhd->ihd", s.masked_fill(~visible, -math.inf).softmax(-1), v)


def exclude_self(y, v):
    """y (T, H, D) minus its projection on the token's own value v (T, K, D)."""
    u = F.normalize(v, dim=-1, eps=1e-12).repeat_interleave(y.shape[1] // v.shape[1], 1)
    return y - (y * u).sum(-1, keepdim=True) * u


# --- the model ---------------------------------------------------------------------------------------------------------
class Gpt:
    """One forward pass: config, weights and the batch's layout."""

    def __init__(self, config, weights, cu_seqlens, positions=None, looping=False):
        self.c, self.w = config, weights
        self.cu = [int(b) for b in cu_seqlens]
        if positions is None:  # positions count from 0 inside each segment
            positions = torch.cat([torch.arange(b - a) for a, b in zip(self.cu, self.cu[1:])])
        self.positions = positions
        self.program = layer_program(config, looping)

    def norm(self, x, name):
        return rms(x, self.c.norm_eps, self.w.get(name))

    def branch_norm(self, x, layer, which):
        y = self.norm(x, f"blocks.{layer}.{which}_norm.weight")
        return y / math.sqrt(layer + 1) if self.c.layer_scale else y

    def attention(self, n, layer):
        """n (T, C) is already normalised. Q and K are normalised, then rotated; then Q alone is multiplied by the gain."""
        c, b = self.c, f"blocks.{layer}.attn."
        q, k, v = ((n @ self.w[b + m + ".weight"].T).unflatten(-1, (-1, c.head_dim)) for m in "qkv")
        if c.qk_norm:
            q, k = rms(q, c.norm_eps), rms(k, c.norm_eps)
        if c.rotary_dim > 0:
            q, k = rope(q, self.positions, c), rope(k, self.positions, c)
        if c.qk_gain:
            q = q * self.w[b + "q_gain"][:, None]
        scale = 1 / math.sqrt(c.head_dim)
        y = torch.cat([segment_attention(q[a:z], k[a:z], v[a:z], scale, c.window) for a, z in zip(self.cu, self.cu[1:])])
        if layer >= c.layers - c.xsa_layers:
            y = exclude_self(y, v)
        return y.flatten(1) @ self.w[b + "o.weight"].T

    def mlp(self, n, layer):
        hidden = ACTIVATIONS[self.c.activation](n @ self.w[f"blocks.{layer}.mlp.up.weight"].T)
        return hidden @ self.w[f"blocks.{layer}.mlp.down.weight"].T

    def branch_scale(self, y, layer, which):
        return self.w[f"blocks.{layer}.{which}_scale"] * y if self.c.branch_scale else y

    def mix(self, x, x0, layer):
        if not self.c.resid_mix:
            return x
        m = self.w[f"blocks.{layer}.resid_mix"]
        return m[0] * x + m[1] * x0

    def block(self, x, x0, i):
        x = self.mix(x, x0, i)
        x = x + self.branch_scale(self.attention(self.branch_norm(x, i, "attn"), i), i, "attn")
        return x + self.branch_scale(self.mlp(self.branch_norm(x, i, "mlp"), i), i, "mlp")

    def lane_block(self, lane0, lane1, x0, i):
        """Attention reads lane 0 (mixed), the MLP reads lane 1 (unchanged); each branch is added to both lanes."""
        a = self.attention(self.branch_norm(self.mix(lane0, x0, i), i, "attn"), i)
        b = self.mlp(self.branch_norm(lane1, i, "mlp"), i)
        a, b = self.branch_scale(a, i, "attn"), self.branch_scale(b, i, "mlp")
        r, p = self.w["parallel_resid_lambdas"][i], self.w["parallel_post_lambdas"][i]
        return r[0] * lane0 + p[0, 0] * a + p[1, 0] * b, r[1] * lane1 + p[0, 1] * a + p[1, 1] * b

    def skip_merge(self, x, skip, slot):
        a = self.w["skip_weights"][slot] * skip
        if not self.c.skip_gates:
            return x + a
        return a + torch.sigmoid(self.w["skip_gates"][slot]) * (x - a)

    def embed(self, tokens):
        x = self.w["tok_emb.weight"][tokens]
        if self.c.embed_norm:  # the normalised vector is E wide, before the projection, and the norm has no weight
            x = rms(x, self.c.norm_eps)
        if self.c.factorised:
            x = x @ self.w["embed_proj.weight"].T
        if self.c.learned_positions:
            x = x + self.w["pos_emb.weight"][self.positions]
        return x

    def hidden(self, tokens):
        """The hidden states that the head multiplies: (T, E)."""
        x = x0 = self.embed(tokens)
        outputs, lanes = [], None
        for a in self.program:
            if a.lanes and lanes is None:
                lanes = (x, x)  # before the skip is merged, which changes lane 0 only
            if lanes is None:
                if a.skip_slot >= 0:
                    x = self.skip_merge(x, outputs[a.skip_from], a.skip_slot)
                x = self.block(x, x0, a.layer)
            else:
                if a.skip_slot >= 0:
                    lanes = (self.skip_merge(lanes[0], outputs[a.skip_from], a.skip_slot), lanes[1])
                lanes = self.lane_block(*lanes, x0, a.layer)
            outputs.append(x)
        if lanes is not None:
            x = {"mean": 0.5 * (lanes[0] + lanes[1]), "attn": lanes[0], "mlp": lanes[1]}[self.c.lane_output]
        x = self.norm(x, "final_norm.weight")
        return x @ self.w["head_proj.weight"].T if self.c.factorised else x

    def logits(self, tokens):
        l = self.hidden(tokens) @ self.w["tok_emb.weight" if self.c.tied_embeddings else "lm_head.weight"].T
        return self.c.softcap * torch.tanh(l / self.c.softcap) if self.c.softcap > 0 else l


def logits(config, weights, tokens, cu_seqlens, positions=None, looping=False):
    """(T, V), after the softcap."""
    return Gpt(config, weights, cu_seqlens, positions, looping).logits(tokens)


def losses(config, weights, tokens, targets, cu_seqlens, positions=None, looping=False):
    """(T): lse - logit of the target + z_loss lse^2; 0 where the target is IGNORE. Training minimises the sum divided by the
    number of targets that are not ignored."""
    l = logits(config, weights, tokens, cu_seqlens, positions, looping)
    lse = l.logsumexp(-1)
    wanted = targets != IGNORE
    at_target = l.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    loss = lse - at_target + config.z_loss * lse.square()
    return torch.where(wanted, loss, torch.zeros_like(loss))


def mean_loss(config, weights, tokens, targets, cu_seqlens, positions=None, looping=False):
    return losses(config, weights, tokens, targets, cu_seqlens, positions, looping).sum() / (targets != IGNORE).sum()
