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


# Kind of a parameter (gpt.parameter_shapes) -> its group in the recipe.
GROUP = {"matrix": "matrix", "embedding": "embed", "head": "head", "scalar": "scalar"}


@dataclass
class Recipe:
    """The fields of the native OptimizerOptions and ScheduleOptions, with the defaults of nanoGPT."""
    matrix_optimizer: str = "adamw"  # muon or adamw
    # Peak learning rate and decoupled weight decay of each group.
    matrix_lr: float = 1e-3
    matrix_decay: float = 0.1
    embed_lr: float = 1e-3
    embed_decay: float = 0.1
    head_lr: float = 1e-3
    head_decay: float = 0.1
    scalar_lr: float = 1e-3
    scalar_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    clip: float = 1.0  # gradients are scaled to this norm when theirs is larger; 0: never
    muon_iterations: int = 5
    muon_row_normalise: bool = True
    # Learning rate: linear warm-up, then the decay. linear: constant, then down to min_lr over the last `warmdown` of the
    # run; cosine: over all of it.
    warmup_steps: int = 0
    decay: str = "linear"
    warmdown: float = 1.0
    min_lr: float = 0.0              # as a share of the peak
    # Muon's momentum rises linearly over the first momentum_warmup of the run.
    momentum_start: float = 0.92
    momentum_end: float = 0.97
    momentum_warmup: float = 0.3
    ema_horizon: float = 0.0         # the average's memory as a share of the run; 0 means no average


def lr_factor(r, step, steps):
    """step counts from 0."""
    if step < r.warmup_steps:
        return (step + 1) / (r.warmup_steps + 1)
    if r.decay == "cosine":
        done = (step - r.warmup_steps) / (steps - r.warmup_steps)
        return r.min_lr + (1 - r.min_lr) * 0.5 * (1 + math.cos(math.pi * done))
    left = 1 - step / steps
    return max(r.min_lr, left / r.warmdown) if left <= r.warmdown and r.warmdown > 0 else 1.0


def muon_momentum(r, step, steps):
    done = min(1.0, step / steps / r.momentum_warmup) if r.momentum_warmup > 0 else 1.0
    return r.momentum_start + (r.momentum_end - r.momentum_start) * done


def ema_decay(r, steps):
    return 1 - 1 / max(1.0, r.ema_horizon * steps)


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
        if self.r.muon_row_normalise:
            u = u / u.norm(dim=-1, keepdim=True).clamp(min=1e-7)
        x = newton_schulz(u, self.r.muon_iterations)
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
        scale = r.clip / (float(norm) + 1e-6) if 0 < r.clip < float(norm) else 1.0
        factor = lr_factor(r, self.done, self.steps)
        keep = ema_decay(r, self.steps)
        for name, w in self.weights.items():
            group = GROUP[self.kinds[name]]
            update = self.muon if group == "matrix" and r.matrix_optimizer == "muon" else self.adamw
            update(w, gradients[name] * scale, name, getattr(r, group + "_lr") * factor, getattr(r, group + "_decay"))
            if r.ema_horizon > 0:
                self.average[name].mul_(keep).add_((1 - keep) * w)
            else:
                self.average[name].copy_(w)
        self.done += 1
        return float(norm)
