"""The model of spec/gpt.py as an experienced PyTorch user would write it: batches (B, T) of equally long rows, one product for Q, K
and V, scaled_dot_product_attention, one parameter per bank of matrices, fused AdamW and batched Newton-Schulz products.
"""
import math
import sys
from pathlib import Path

import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "spec"))
import gpt as spec  # noqa: E402
import optimizer as spec_optimizer  # noqa: E402


MATRICES = {"attn.o.weight", "mlp.up.weight", "mlp.down.weight"}  # matrices of a block, besides q, k and v
BY_ROW = {"skip_weights", "skip_gates", "parallel_post_lambdas", "parallel_resid_lambdas"}  # one row per slot or per layer


class TorchGpt(nn.Module):
    """Matrices of all layers stand in banks (L, ...). Vectors and scalars of a layer, and the rows of skip weights by slot or layer, are
    separate parameters: as rows of a bank their offsets would be constants in Inductor's code, and each layer would need kernels of its own.
    `named` gives the tensors of spec/gpt.py.

    activations: the type of activations and of the copies of weights multiplied with them, each bank cast once per pass; None: the type of the
    weights, or autocast's. packing, where forward() is given one: positions (T) inside documents, and the mask that attend() takes."""

    def __init__(self, config, weights, length, activations=None):
        super().__init__()
        self.activations = activations
        c = self.c = config
        assert not c.window and not c.factorised and c.rope_scaling.kind == "none" and not c.rope_interleaved
        self.q, self.kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.places = {}
        groups = {}
        for name, w in weights.items():
            key = name.split(".", 2)[2] if name.startswith("blocks.") else name
            groups.setdefault(key, []).append((name, w))
        qkv = [torch.cat([weights[f"blocks.{i}.attn.{m}.weight"] for m in "qkv"]) for i in range(c.layers)]
        self.add("qkv", torch.stack(qkv))
        row = 0
        for m, rows in (("q", self.q), ("k", self.kv), ("v", self.kv)):
            for i in range(c.layers):
                self.places[f"blocks.{i}.attn.{m}.weight"] = ("qkv", i, slice(row, row + rows))
            row += rows
        for key, members in groups.items():
            if key in ("attn.q.weight", "attn.k.weight", "attn.v.weight"):
                continue
            attribute = key.replace(".weight", "").replace(".", "_")
            if members[0][0].startswith("blocks."):
                self.add(attribute, torch.stack([w for _, w in members]), by_row=key not in MATRICES)
                for i, (name, _) in enumerate(members):
                    self.places[name] = (attribute, i, slice(None))
            else:
                self.add(attribute, members[0][1], by_row=key in BY_ROW)
                self.places[key] = (attribute, None, slice(None))
        if c.rotary_dim:
            theta, _ = spec.rope_frequencies(c.rotary_dim, c.rope_base, c.rope_scaling)
            angle = torch.arange(length, dtype=torch.float64)[:, None] * theta
            self.register_buffer("cos", angle.cos().float()[:, None, :], persistent=False)
            self.register_buffer("sin", c.rope_sign * angle.sin().float()[:, None, :], persistent=False)
        for layer in range(1, c.layers if c.layer_scale else 0):  # on the device, for the same reason
            self.register_buffer(f"layer_scale_{layer}", torch.tensor(1 / math.sqrt(layer + 1)), persistent=False)
        self.program, self.looping_program = (spec.layer_program(c, looping) for looping in (False, True))
        self.activation = spec.ACTIVATIONS[c.activation]

    def add(self, attribute, w, by_row=False):
        made = [nn.Parameter(row.detach().float().clone()) for row in (w if by_row else [w])]
        setattr(self, attribute, nn.ParameterList(made) if by_row else made[0])

    def parameters_of(self, attribute):
        held = getattr(self, attribute)
        return list(held) if isinstance(held, nn.ParameterList) else [held]

    def named(self, of=lambda p: p):
        """The tensors of spec/gpt.py by name, or the results of `of` for their banks (for example gradients)."""
        out = {}
        for name, (attribute, i, rows) in self.places.items():
            held = [of(p) for p in self.parameters_of(attribute)]
            t = torch.stack(held) if isinstance(getattr(self, attribute), nn.ParameterList) else held[0]
            out[name] = t if i is None else t[i][rows]
        return out

    def cast(self, w):
        return w if self.activations is None else w.to(self.activations)

    def layers_of(self, attribute):
        held = getattr(self, attribute)
        return [self.cast(w) for w in held] if isinstance(held, nn.ParameterList) else self.cast(held).unbind(0)  # its backward pass stacks each bank

    def rope(self, x, positions):  # (B, T, H, D)
        h = self.c.rotary_dim // 2
        x1, x2, rest = x.split([h, h, x.shape[-1] - 2 * h], -1)
        cos, sin = ((t[:x.shape[1]] if positions is None else t[positions]).to(x.dtype) for t in (self.cos, self.sin))
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], -1)

    def attend(self, q, k, v, mask):  # (B, H, T, D)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    def attention(self, n, p, layer, packing):
        c, (b, t, _) = self.c, n.shape
        positions, mask = packing or (None, None)
        q, k, v = F.linear(n, p["qkv"][layer]).split([self.q, self.kv, self.kv], -1)
        q, k, v = q.view(b, t, c.heads, -1), k.view(b, t, c.kv_heads, -1), v.view(b, t, c.kv_heads, -1)
        if c.qk_norm:
            q, k = F.rms_norm(q, (c.head_dim,), eps=c.norm_eps), F.rms_norm(k, (c.head_dim,), eps=c.norm_eps)
        if c.rotary_dim:
            q, k = self.rope(q, positions), self.rope(k, positions)
        if c.qk_gain:
            q = q * p["attn_q_gain"][layer][:, None].to(q.dtype)
        y = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask).transpose(1, 2)
        if layer >= c.layers - c.xsa_layers:
            g = y.reshape(b, t, c.kv_heads, -1, c.head_dim)
            u = F.normalize(v, dim=-1).unsqueeze(-2)
            y = g - (g * u).sum(-1, keepdim=True) * u
        return F.linear(y.reshape(b, t, -1), p["attn_o"][layer])

    def norm(self, x, p, which, layer):
        w = p[which][layer] if self.c.norm_weight else None
        y = F.rms_norm(x, (x.shape[-1],), w, self.c.norm_eps)
        return y * getattr(self, f"layer_scale_{layer}").to(y.dtype) if self.c.layer_scale and layer else y

    def branches(self, p, layer, packing):
        c = self.c
        attn = lambda x: self.attention(self.norm(x, p, "attn_norm", layer), p, layer, packing)
        mlp = lambda x: F.linear(self.activation(F.linear(self.norm(x, p, "mlp_norm", layer), p["mlp_up"][layer])), p["mlp_down"][layer])
        if not c.branch_scale:
            return attn, mlp
        return (lambda x: p["attn_scale"][layer] * attn(x)), (lambda x: p["mlp_scale"][layer] * mlp(x))

    def merge(self, x, skip, slot):
        a = self.cast(self.skip_weights[slot]) * skip
        return torch.lerp(a, x, torch.sigmoid(self.cast(self.skip_gates[slot])).expand_as(x)) if self.c.skip_gates else x + a

    def hidden(self, tokens, looping, packing):
        c = self.c
        per_layer = {a for a, i, _ in self.places.values() if i is not None}
        p = {a: self.layers_of(a) for a in per_layer}
        x = self.cast(self.tok_emb[tokens])
        if c.embed_norm:
            x = F.rms_norm(x, (x.shape[-1],), eps=c.norm_eps)
        if c.learned_positions:
            x = x + self.cast(self.pos_emb[:x.shape[1]])
        x0, outputs, lanes = x, [], None
        for a in self.looping_program if looping else self.program:  # a list indexed by a bool would break a compiled graph
            i = a.layer
            attn, mlp = self.branches(p, i, packing)
            read = (lambda x: p["resid_mix"][i][0] * x + p["resid_mix"][i][1] * x0) if c.resid_mix else (lambda x: x)
            if a.lanes and lanes is None:
                lanes = (x, x)
            if lanes is None:
                if a.skip_slot >= 0:
                    x = self.merge(x, outputs[a.skip_from], a.skip_slot)
                x = read(x)
                x = x + attn(x)
                x = x + mlp(x)
            else:
                lane0, lane1 = lanes
                if a.skip_slot >= 0:
                    lane0 = self.merge(lane0, outputs[a.skip_from], a.skip_slot)
                ya, yb = attn(read(lane0)), mlp(lane1)
                r, l = self.cast(self.parallel_resid_lambdas[i]), self.cast(self.parallel_post_lambdas[i])
                lanes = (r[0] * lane0 + l[0, 0] * ya + l[1, 0] * yb, r[1] * lane1 + l[0, 1] * ya + l[1, 1] * yb)
            outputs.append(x)
        if lanes is not None:
            x = {"mean": 0.5 * (lanes[0] + lanes[1]), "attn": lanes[0], "mlp": lanes[1]}[c.lane_output]
        return F.rms_norm(x, (c.dim,), self.cast(self.final_norm) if c.norm_weight else None, c.norm_eps)

    def forward(self, tokens, targets, looping=False, packing=None):
        l = F.linear(self.hidden(tokens, looping, packing), self.cast(self.tok_emb if self.c.tied_embeddings else self.lm_head))
        if self.c.softcap:
            l = self.c.softcap * torch.tanh(l / self.c.softcap)
        return F.cross_entropy(l.flatten(0, 1).float(), targets.flatten())


def compiled(model, run_when):
    """torch.compile of the whole model by Inductor; run_when() is called when the forward and backward pass are compiled and before they run.
    Kernels compile in this process: a graph has some 100, and several graphs at once, each with a pool of processes, would wait for cores."""
    torch._inductor.config.compile_threads = 1
    functorch = torch._functorch.config
    if hasattr(functorch, "force_non_lazy_backward_lowering"):
        functorch.force_non_lazy_backward_lowering = True

    def backend(graph, inputs):
        from torch._inductor.compile_fx import compile_fx
        made = compile_fx(graph, inputs)
        run_when()
        return made
    return torch.compile(model, fullgraph=True, dynamic=False, backend=backend)


class TorchOptimizer:
    """spec/optimizer.py with the same results (up to rounding), in few, large operations."""

    def __init__(self, model, recipe, steps, dtype=torch.float32):
        self.r, self.steps, self.done, self.dtype = recipe, steps, 0, dtype
        self.model = model
        kinds = {name: kind for name, (_, kind) in spec.parameter_shapes(model.c).items()}
        attribute_kind = {attribute: kinds[name] for name, (attribute, _, _) in model.places.items()}
        self.muon = recipe.matrix_optimizer == "muon"
        self.matrices = [w for a, k in attribute_kind.items() if k == "matrix" and self.muon for w in model.parameters_of(a)]
        self.momentum = [torch.zeros_like(p) for p in self.matrices]
        groups = []
        for kind in ("matrix", "embedding", "head", "scalar"):
            members = [w for a, k in attribute_kind.items() if k == kind for w in model.parameters_of(a)]
            if members and not (kind == "matrix" and self.muon):
                lr = getattr(recipe, spec_optimizer.GROUP[kind] + "_lr")
                groups.append(dict(params=members, lr=lr, peak=lr, weight_decay=getattr(recipe, spec_optimizer.GROUP[kind] + "_decay")))
        self.adamw = torch.optim.AdamW(groups, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps, fused=True)
        self.parameters = list(model.parameters())
        self.average = [p.detach().clone() for p in self.parameters] if recipe.ema_horizon > 0 else None

    def banks(self, i, t):
        """Splits a (L, R, C) bank into the banks of matrices that Muon orthogonalises: the rows of qkv are three matrices."""
        if self.matrices[i] is not self.model.qkv:
            return [t]
        q, kv = self.model.q, self.model.kv
        return list(t.split([q, kv, kv], 1))

    def newton_schulz(self, x):
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        tall = x.shape[1] > x.shape[2]
        x = (x.mT if tall else x).to(self.dtype)
        for _ in range(self.r.muon_iterations):
            a = torch.bmm(x, x.mT)
            b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
            x = torch.baddbmm(x, b, x, beta=3.4445)
        return x.mT if tall else x

    @torch.no_grad()
    def step(self):
        r = self.r
        if r.clip > 0:
            torch.nn.utils.clip_grad_norm_(self.parameters, r.clip)
        m = spec_optimizer.lr_factor(r, self.done, self.steps)
        for g in self.adamw.param_groups:
            g["lr"] = g["peak"] * m
        self.adamw.step()
        mu = spec_optimizer.muon_momentum(r, self.done, self.steps)
        if self.matrices:
            gradients = [p.grad for p in self.matrices]
            torch._foreach_mul_(self.momentum, mu)
            torch._foreach_add_(self.momentum, gradients)
            updates = torch._foreach_add(gradients, self.momentum, alpha=mu)
            for i, p in enumerate(self.matrices):
                for w, u in zip(self.banks(i, p), self.banks(i, updates[i])):
                    if r.muon_row_normalise:
                        u = u / u.norm(dim=-1, keepdim=True).clamp(min=1e-7)
                    scale = math.sqrt(max(1, w.shape[1] / w.shape[2]))
                    w.mul_(1 - r.matrix_lr * m * r.matrix_decay).add_(self.newton_schulz(u), alpha=-r.matrix_lr * m * scale)
        if self.average:
            torch._foreach_lerp_(self.average, self.parameters, 1 - spec_optimizer.ema_decay(r, self.steps))
        self.done += 1
        self.clear()

    def clear(self):
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def use_average(self):
        for p, a in zip(self.parameters, self.average or []):
            p.copy_(a)
