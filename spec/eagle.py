"""An EAGLE-3 draft head in plain PyTorch: the executable definition of src/ingot/models/draft/head.

A head guesses the tokens that a target model will choose next. It is one decoder layer, whose input is the embedding of a token beside
features of the token before it: hidden states of the target at a few layers, joined by a linear map. A head is a config (the config.json
beside its checkpoint) and a dictionary of named tensors:

    head = read_config("head", target_layers=36)
    weights = read_weights("head", head, target_embed, target_lm_head)
    states = torch.cat([hidden_states[b] for b in head.boundaries], dim=-1)    # (n, boundaries * C) of the target, of tokens 0 to n - 1
    guesses = draft(head, weights, states, ids, count=3)                       # after ids, n + 1 tokens

Boundary b is the target's residual stream behind its first b layers, before any norm. One sequence at a time, nothing cached: every guess
computes the layer for all rows again. float64 is the oracle.

Letters: n tokens that the target has computed, C hidden width, H query heads, K key heads, D head width, I width of the MLP, V vocabulary
of the target. Matrices are (out, in): y = x W^T. Weights:

    fc (C, boundaries * C), fc_norm (boundaries * C) with norm_before_fc or fc_norm
    embed_norm, hidden_norm, mlp_norm, norm (C)
    q (H D, 2 C), k, v (K D, 2 C), o (C, H D), gate, up (I, C), down (C, I)
    embed (V, C), lm_head (ids of the head, C), ids: the target's id of each id of the head
"""
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

from spec import decoder


@dataclass
class Head:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    boundaries: list
    norm_eps: float = 1e-5
    rope: decoder.RopeTable = field(default_factory=decoder.RopeTable)
    norm_before_fc: bool = False        # one norm over all boundaries
    fc_norm: bool = False               # a norm for each boundary
    norm_before_residual: bool = False  # the residual stream starts with the normalised features
    norm_output: bool = False           # the next guess starts from the last norm's output
    window: int = 0                     # visible rows, the query's own included; 0: all


# --- files -------------------------------------------------------------------------------------------------------------
def parse_rope(c):
    keys = c.get("rope_scaling") or c.get("rope_parameters") or {}
    table = decoder.RopeTable(keys.get("rope_theta", c.get("rope_theta", 10000.0)))
    kind = keys.get("rope_type", keys.get("type", "default"))
    if kind == "default":
        return table
    table.kind, table.factor = kind, keys["factor"]
    table.original = keys.get("original_max_position_embeddings", c.get("max_position_embeddings", 0))
    if kind == "llama3":
        table.slow, table.fast = keys["low_freq_factor"], keys["high_freq_factor"]
    if kind == "yarn":
        table.fast, table.slow = keys.get("beta_fast", 32.0), keys.get("beta_slow", 1.0)
        table.truncate, table.attention_factor = keys.get("truncate", True), keys.get("attention_factor") or 0.0
    return table


def parse_config(c, target_layers, boundaries=None, window=0):
    """From config.json as ModelOpt, SpecForge or speculators write it."""
    sizes = c.get("transformer_layer_config", c)
    setting = lambda key, otherwise: c.get(key, (c.get("eagle_config") or {}).get(key, otherwise))
    ids = boundaries or setting("eagle_aux_hidden_state_layer_ids", None) or [2, target_layers // 2, target_layers - 3]
    return Head(
        hidden=sizes["hidden_size"], heads=sizes["num_attention_heads"], kv_heads=sizes["num_key_value_heads"],
        head_dim=sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"], boundaries=ids,
        norm_eps=sizes.get("rms_norm_eps", 1e-5), rope=parse_rope(sizes), norm_before_fc=setting("norm_before_fc", False),
        fc_norm=setting("fc_norm", False), norm_before_residual=setting("norm_before_residual", sizes is not c),
        norm_output=setting("norm_output", False), window=window)


def read_config(directory, target_layers, boundaries=None, window=0):
    return parse_config(json.loads((Path(directory) / "config.json").read_text()), target_layers, boundaries, window)


def read_weights(directory, head, target_embed, target_lm_head, dtype=torch.float64):
    from safetensors.torch import load_file
    found = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        found.update(load_file(path))
    return name_weights(head, found, target_embed, target_lm_head, dtype)


def name_weights(head, found, target_embed, target_lm_head, dtype=torch.float64):
    """The tensors of a file by the names above. Embedding and lm_head are the target's where the file has none."""
    layer = next(name[:-len("hidden_norm.weight")] for name in found if name.endswith("hidden_norm.weight"))
    top = lambda name: found.get(name, found.get("model." + name))
    names = dict(embed_norm="input_layernorm", hidden_norm="hidden_norm", mlp_norm="post_attention_layernorm", q="self_attn.q_proj",
                 k="self_attn.k_proj", v="self_attn.v_proj", o="self_attn.o_proj", gate="mlp.gate_proj", up="mlp.up_proj",
                 down="mlp.down_proj")
    w = {name: found[f"{layer}{stored}.weight"] for name, stored in names.items()}
    w |= {name: top(f"{name}.weight") for name in ("fc", "norm")}
    if head.norm_before_fc:
        w["fc_norm"] = top("input_norm.weight")
    if head.fc_norm:
        w["fc_norm"] = torch.cat([top(f"fc_norm.{i}.weight") for i in range(len(head.boundaries))])
    for name, stored, target in (("embed", "embed_tokens.weight", target_embed), ("lm_head", "lm_head.weight", target_lm_head)):
        w[name] = target if top(stored) is None else top(stored)
    w = {name: tensor.to(dtype) for name, tensor in w.items()}
    offsets = top("d2t")
    w["ids"] = torch.arange(len(w["lm_head"])) + (0 if offsets is None else offsets)
    return w


# --- the head ----------------------------------------------------------------------------------------------------------
def norm(h, x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + h.norm_eps) * weight


def features(h, w, states):
    """(n, boundaries * C) hidden states of the target -> (n, C)."""
    if h.norm_before_fc:
        states = norm(h, states, w["fc_norm"])
    if h.fc_norm:
        parts = zip(states.split(h.hidden, dim=-1), w["fc_norm"].split(h.hidden))
        states = torch.cat([norm(h, x, weight) for x, weight in parts], dim=-1)
    return states @ w["fc"].T


def attention(h, w, x):
    """x (rows, 2 C): the row's number is its position."""
    rows = len(x)
    q, k, v = ((x @ w[p].T).view(rows, -1, h.head_dim) for p in "qkv")
    q, k = decoder.rotate(h.rope, q), decoder.rotate(h.rope, k)
    group = h.heads // h.kv_heads
    distance = torch.arange(rows)[:, None] - torch.arange(rows)
    visible = (distance >= 0) & ((distance < h.window) if h.window else True)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, dim=1)) / math.sqrt(h.head_dim)
    mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v.repeat_interleave(group, dim=1))
    return mixed.flatten(1) @ w["o"].T


def layer(h, w, tokens, g):
    """The layer's output (rows, C) for tokens and the features before them, row by row."""
    n = norm(h, g, w["hidden_norm"])
    x = torch.cat([norm(h, w["embed"][tokens], w["embed_norm"]), n], dim=-1)
    r = (n if h.norm_before_residual else g) + attention(h, w, x)
    m = norm(h, r, w["mlp_norm"])
    return r + (F.silu(m @ w["gate"].T) * (m @ w["up"].T)) @ w["down"].T


def draft(h, w, states, ids, count):
    """`count` guesses after ids, of which the last is not yet computed by the target. Also the logits of each guess: (count, ids of the head)."""
    g, tokens = features(h, w, states), torch.as_tensor(ids)[1:]  # row p joins token p + 1 and the features of token p
    assert len(g) == len(tokens)
    guesses, logits = [], []
    for _ in range(count):
        y = layer(h, w, tokens, g)[-1]
        u = norm(h, y, w["norm"])
        logits.append(w["lm_head"] @ u)
        guesses.append(int(w["ids"][logits[-1].argmax()]))
        tokens = torch.cat([tokens, torch.tensor(guesses[-1:])])
        g = torch.cat([g, (u if h.norm_output else y)[None]])  # the next row has no features of the target yet
    return guesses, torch.stack(logits)
