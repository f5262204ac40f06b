"""One optimizer step of the trainer, in plain PyTorch: clipping, Muon for matrices, AdamW for the rest, and the average of
the weights. The executable definition, like gpt.py; float64 is the oracle.

    recipe = Recipe(matrix_optimizer="muon", matrix_lr=0.022, ...)
    optimizer = Optimizer(config, weights, recipe, steps=2000)
    optimizer.step(gradients)          # updates `weights` in place, and optimizer.average
"""
import math
from dataclasses import dataclass

import torch

import gpt


@dataclass
class Recipe:
    matrix_optimizer: str = "adamw"  # muon or adamw
    # Learning rate and decoupled weight decay of each kind of parameter (gpt.parameter_shapes).
    matrix_lr: float = 1e-3
    matrix_wd: float = 0.1
    embedding_lr: float = 1e-3
    embedding_wd: float = 0.1
    head_lr: float = 1e-3
    head_wd: float = 0.1
    scalar_lr: float = 1e-3
    scalar_wd: float = 0.0
    # AdamW.
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    # Muon: momentum rises linearly from momentum_start to momentum over the first momentum_warmup of the run.
    momentum: float = 0.97
    momentum_start: float = 0.92
    momentum_warmup: float = 0.31
    newton_schulz_steps: int = 5
    row_normalise: bool = True
    # Gradients are scaled to this norm when theirs is larger; 0: never.
    clip: float = 1.0
    # The average of the weights forgets over this fraction of the run (its decay is 1 - 1 / (ema_horizon * steps)); 0: none.
    ema_horizon: float = 0.0
    # Learning rate: linear warm-up, constant, then decay to min_lr times the peak.
    warmup_steps: int = 0
    decay_from: float = 0.0          # fraction of the run at which the decay begins
    decay: str = "linear"            # linear or cosine
    min_lr: float = 0.0


def lr_multiplier(r, step, steps):
    """step counts from 0. Warm-up ends at step warmup_steps with 1; a decay from 0 begins where the warm-up ends."""
    if step < r.warmup_steps:
        return (step + 1) / (r.warmup_steps + 1)
    begin = max(r.decay_from * steps, r.warmup_steps)
    if step < begin:
        return 1.0
    done = (step - begin) / (steps - begin)
    left = 1 - done if r.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return r.min_lr + (1 - r.min_lr) * left


def muon_momentum(r, step, steps):
    warmup = r.momentum_warmup * steps
    done = min(1.0, step / warmup) if warmup > 0 else 1.0
    return r.momentum_start + (r.momentum - r.momentum_start) * done


def newton_schulz(x, steps):
    """The approximate orthogonal factor of x (R, C); zero stays zero."""
    x = x / (x.norm() + 1e-7)
    if x.shape[0] > x.shape[1]:
        return newton_schulz_iterations(x.T, steps).T
    return newton_schulz_iterations(x, steps)


def newton_schulz_iterations(x, steps):
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


class Optimizer:
    def __init__(self, config, weights, recipe, steps):
        self.kinds = {name: kind for name, (_, kind) in gpt.parameter_shapes(config).items()}
        self.weights, self.r, self.steps, self.done = weights, recipe, steps, 0
        zeros = lambda: {n: torch.zeros_like(w) for n, w in weights.items()}
        self.m, self.v = zeros(), zeros()  # Muon keeps its momentum in m
        self.average = {n: w.clone() for n, w in weights.items()}

    def muon(self, w, g, name, lr, wd):
        mu = muon_momentum(self.r, self.done, self.steps)
        m = self.m[name].mul_(mu).add_(g)
        u = g + mu * m
        if self.r.row_normalise:
            u = u / u.norm(dim=-1, keepdim=True).clamp(min=1e-7)
        x = newton_schulz(u, self.r.newton_schulz_steps)
        w.mul_(1 - lr * wd).sub_(lr * math.sqrt(max(1, w.shape[0] / w.shape[1])) * x)

    def adamw(self, w, g, name, lr, wd):
        b1, b2, t = self.r.beta1, self.r.beta2, self.done + 1
        m = self.m[name].mul_(b1).add_((1 - b1) * g)
        v = self.v[name].mul_(b2).add_((1 - b2) * g * g)
        w.mul_(1 - lr * wd).sub_(lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + self.r.eps))

    @torch.no_grad()
    def step(self, gradients):
        r = self.r
        norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
        scale = min(1.0, r.clip / (float(norm) + 1e-6)) if r.clip > 0 else 1.0
        multiplier = lr_multiplier(r, self.done, self.steps)
        decay = 1 - 1 / max(1.0, r.ema_horizon * self.steps)
        for name, w in self.weights.items():
            kind = self.kinds[name]
            update = self.muon if kind == "matrix" and r.matrix_optimizer == "muon" else self.adamw
            update(w, gradients[name] * scale, name, getattr(r, kind + "_lr") * multiplier, getattr(r, kind + "_wd"))
            if r.ema_horizon > 0:
                self.average[name].mul_(decay).add_((1 - decay) * w)
            else:
                self.average[name].copy_(w)
        self.done += 1
        return float(norm)
