"""Writes tests/data/gpt.json and optimizer.json: the results of spec/gpt.py for two small models and of spec/optimizer.py for one model, in fp64.
The parity test compares far more (docs/parity.md) but needs PyTorch; these files are for tests without PyTorch. Prints the results that tests/cli_test.py
expects of its small GPT-OSS checkpoint.

    python3 tools/make_model_goldens.py      # needs torch

Weights, ids and the optimizer's gradients follow from names and indices by `number`, which src/ingot/models/gpt/golden.test.h has too.
"""
import json
import math
import pathlib
import re
import sys
from dataclasses import asdict

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "spec"))
import gpt  # noqa: E402
import gpt_oss  # noqa: E402
from optimizer import Optimizer, Recipe  # noqa: E402

MASK = 2**64 - 1
LENGTHS = [7, 1, 13, 0, 3]
CASES = {
    "golf": (dict(vocab=37, dim=24, layers=6, heads=4, kv_heads=2, head_dim=8, mlp_hidden=40, context=32, activation="leaky_relu_squared",
                  embed_norm=True, norm_weight=False, norm_eps=2**-23, layer_scale=True, rotary_dim=4, rope_sign=-1, qk_norm=True,
                  qk_gain=True, qk_gain_init=2, xsa_layers=4, resid_mix=True, branch_scale=True, unet_skips=True, skip_gates=True,
                  lane_start=4, loop_first=1, loop_last=2, loop_extra=1, softcap=30), True),
    "llama": (dict(vocab=29, dim=20, layers=3, heads=4, kv_heads=2, head_dim=6, mlp_hidden=28, context=32, activation="silu",
                   tied_embeddings=False, embed_dim=12, rotary_dim=6, rope_interleaved=True, window=5, z_loss=0.01,
                   rope_scaling=dict(kind="yarn", factor=4.0, original_context=16.0, beta_fast=4.0, beta_slow=1.0)), False),
}


def bits(name, i):
    """64 random bits: FNV-1a of the name, then splitmix64's steps."""
    h = 0xcbf29ce484222325
    for byte in name.encode():
        h = (h ^ byte) * 0x100000001b3 & MASK
    h = h + (i + 1) * 0x9e3779b97f4a7c15 & MASK
    h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9 & MASK
    h = (h ^ h >> 27) * 0x94d049bb133111eb & MASK
    return h ^ h >> 31


def number(name, i):
    """A number from -1 to 1, exact in fp32."""
    return (bits(name, i) >> 40) / 2**23 - 1


def numbers(name, count):
    return torch.tensor([number(name, i) for i in range(count)], dtype=torch.float64)


def weights_of(config):
    out = {}
    for name, (shape, kind) in gpt.parameter_shapes(config).items():
        u = numbers(name, math.prod(shape)).reshape(shape)
        out[name] = u * math.sqrt(3 / shape[1]) if kind in ("matrix", "head") else u if kind == "embedding" else 0.5 + 0.5 * u
    return out


def golden(config, looping):
    config = gpt.GptConfig.from_dict(config)
    T = sum(LENGTHS)
    tokens = torch.tensor([bits("tokens", t) % config.vocab for t in range(T)])
    targets = torch.tensor([bits("targets", t) % config.vocab if t % 6 != 4 else gpt.IGNORE for t in range(T)])
    weights = {n: w.requires_grad_() for n, w in weights_of(config).items()}
    loss = gpt.losses(config, weights, tokens, targets, torch.tensor([0] + LENGTHS).cumsum(0), looping=looping)
    (loss * numbers("dloss", T)).sum().backward()
    # For every gradient the norm, and the product with random numbers.
    gradients = {n: [w.grad.norm().item(), (w.grad.flatten() * numbers("probe " + n, w.numel())).sum().item()] for n, w in weights.items()}
    return dict(config=asdict(config), looping=looping, lengths=LENGTHS, losses=loss.tolist(), gradients=gradients)


# Grouped in sections like a run's configuration.
RECIPES = {
    "muon": dict(optimizer=dict(matrix_optimizer="muon", matrix_lr=0.022, matrix_decay=0.095, embed_lr=0.03, embed_decay=0.085, head_lr=0.01,
                                head_decay=0.02, scalar_lr=0.02, scalar_decay=0.03, beta1=0.9, beta2=0.95, clip=1.0),
                 schedule=dict(decay="linear", warmdown=0.72, min_lr=0.0, momentum_start=0.9, momentum_end=0.97, momentum_warmup=0.5,
                               ema_horizon=0.4)),
    "adamw": dict(optimizer=dict(matrix_optimizer="adamw", matrix_lr=0.01, matrix_decay=0.1, embed_lr=0.02, embed_decay=0.05, head_lr=0.03,
                                 head_decay=0.2, scalar_lr=0.04, scalar_decay=0.01, beta1=0.8, beta2=0.99, clip=0.0),
                  schedule=dict(warmup_steps=2, decay="cosine", min_lr=0.1, ema_horizon=0.3)),
}
STEPS, TAKEN = 8, 5


def optimized(recipe):
    """For every parameter after TAKEN steps, and for its average: norm, and product with random numbers. Every second gradient is small and
    therefore not clipped."""
    config = gpt.GptConfig.from_dict(CASES["llama"][0])
    weights = weights_of(config)
    optimizer = Optimizer(config, weights, Recipe(**recipe["optimizer"], **recipe["schedule"]), STEPS)
    for k in range(TAKEN):
        optimizer.step({n: numbers(f"gradient {k} {n}", w.numel()).reshape(w.shape) * (0.01 if k % 2 else 1) for n, w in weights.items()})

    def summary(tensors):
        return {n: [t.norm().item(), (t.flatten() * numbers("probe " + n, t.numel())).sum().item()] for n, t in tensors.items()}
    return dict(config=asdict(config), train=recipe, steps=STEPS, taken=TAKEN, weights=summary(weights), average=summary(optimizer.average))


def write(name, value):
    text = json.dumps(value, indent=1)
    text = re.sub(r"\[\s+([^][]*?)\s+\]", lambda m: "[" + re.sub(r"\s+", " ", m[1]) + "]", text)  # lists of numbers on one line
    (ROOT / "tests" / "data" / name).write_text(text + "\n")


def cli_checkpoint_losses():
    """The losses of the checkpoint and the ids in tests/cli_test.py's class TinyGptOss."""
    sys.argv = ["cli_test.py", "no program"]
    sys.path.insert(0, str(ROOT / "tests"))
    import cli_test
    losses = {}

    class Reads(cli_test.TinyGptOss):
        def runTest(self):
            config = gpt_oss.read_config(self.model)
            weights = gpt_oss.read_weights(self.model, config)
            losses["all"] = gpt_oss.losses(config, weights, torch.tensor(self.DEFINITION_IDS)).tolist()
    Reads().debug()
    return losses["all"]


if __name__ == "__main__":
    write("gpt.json", {name: golden(*case) for name, case in CASES.items()})
    write("optimizer.json", {name: optimized(recipe) for name, recipe in RECIPES.items()})
    found = cli_checkpoint_losses()
    print(f"sum {sum(found):.6f}, " + ", ".join(f"{t}: {found[t]:.6f}" for t in (0, 1, 7, 126, 127, 128, 129, 198)))
