#!/usr/bin/env python3
"""The native model and optimizer against spec/: losses, logits, every gradient and the losses of five training steps, over
configs that together use every feature, with every parameter, gate and lambda randomised, recurrence off and on, and packed
documents.

    parity.py BUILD/parity [--only NAME] [--keep DIR] [--skip-without-peers]

fp64: relative error (norm-wise, per parameter) at most 1e-9, of a training loss 1e-7. fp32: at most 1e-4 against the fp64
definition.
"""
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import parity_peers

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "spec"))
with parity_peers.required():
    import numpy as np
    import torch

import gpt  # noqa: E402
from optimizer import Optimizer, Recipe  # noqa: E402

LIMIT = {"f64": 1e-9, "f32": 1e-4}
TRAINING_LIMIT = {"f64": 1e-7, "f32": 1e-4}
STEPS, EXECUTED = 8, 5  # of a run of STEPS steps the first EXECUTED are taken: warm-up, constant and decay all occur

# --- cases -------------------------------------------------------------------------------------------------------------
GOLF = dict(vocab=61, dim=32, layers=6, heads=4, kv_heads=2, head_dim=8, mlp_hidden=48, context=40,
            activation="leaky_relu_squared", embed_norm=True, norm_weight=False, norm_eps=2**-23, layer_scale=True,
            rotary_dim=4, rope_sign=-1, qk_norm=True, qk_gain=True, qk_gain_init=2, xsa_layers=6, resid_mix=True,
            branch_scale=True, unet_skips=True, skip_gates=True, lane_start=4, loop_first=2, loop_last=3, loop_extra=2,
            softcap=30)
NANO = dict(vocab=65, dim=32, layers=3, heads=4, kv_heads=4, head_dim=8, mlp_hidden=64, context=40, activation="gelu",
            learned_positions=True)
LLAMA = dict(vocab=53, dim=24, layers=3, heads=6, kv_heads=2, head_dim=6, mlp_hidden=40, context=40, activation="silu",
             tied_embeddings=False, rotary_dim=6)


def cases():
    """name -> (config, looping)."""
    yarn = dict(kind="yarn", factor=4.0, original_context=10.0, beta_fast=4.0, beta_slow=1.0)
    out = {
        "golf": (GOLF, False),
        "golf looping": (GOLF, True),
        "golf at its own ratios": (dict(GOLF, layers=11, lane_start=8, loop_first=3, loop_last=5, dim=16, heads=8, kv_heads=4,
                                        head_dim=2, rotary_dim=2, xsa_layers=11), True),
        "golf without gates, lane 0 leaves": (dict(GOLF, skip_gates=False, lane_output="attn"), True),
        "golf, lane 1 leaves, self excluded in 2 layers": (dict(GOLF, lane_output="mlp", xsa_layers=2), False),
        "golf with weighted norms, factorised": (dict(GOLF, norm_weight=True, embed_dim=12), True),
        "golf without lanes": (dict(GOLF, lane_start=-1), True),
        "lanes from layer 0 without skips": (dict(GOLF, unet_skips=False, skip_gates=False, lane_start=0, loop_extra=0), False),
        "skips into an odd number of layers": (dict(NANO, layers=5, unet_skips=True, skip_gates=True), False),
        "one layer": (dict(NANO, layers=1), False),
        "loop of the whole depth": (dict(LLAMA, loop_first=0, loop_last=2, loop_extra=1), True),
        "nano": (NANO, False),
        "nano, odd sizes": (dict(NANO, vocab=67, dim=27, heads=3, kv_heads=1, head_dim=5, mlp_hidden=37), False),
        "llama": (LLAMA, False),
        "window": (dict(LLAMA, window=5), False),
        "window of one": (dict(LLAMA, window=1, xsa_layers=0), False),
        "ntk, interleaved": (dict(LLAMA, rope_scaling=dict(kind="ntk", factor=3.0), rope_interleaved=True), False),
        "yarn, untied, factorised": (dict(LLAMA, rope_scaling=yarn, embed_dim=10, rope_sign=-1), False),
        "yarn with its own factor, not truncated": (
            dict(LLAMA, rope_scaling=dict(yarn, truncate=False, attention_factor=1.25), rope_interleaved=True, rope_sign=-1), False),
        "z-loss and softcap": (dict(LLAMA, softcap=15, z_loss=0.01), False),
        "qk norm without gain": (dict(LLAMA, qk_norm=True, norm_eps=0.01), False),
        "gain without norm or rotation": (dict(NANO, qk_gain=True), False),
        "embedding norm, factorised, learned positions": (dict(NANO, embed_norm=True, embed_dim=20), False),
        "residual mix and branch scales alone": (dict(NANO, resid_mix=True, branch_scale=True), False),
    }
    for activation in gpt.ACTIVATIONS:
        out[f"activation {activation}"] = (dict(NANO, layers=1, activation=activation), False)
    return {name: (gpt.GptConfig.from_dict(config), looping) for name, (config, looping) in out.items()}


def random_weights(c, g):
    """Every parameter has a random value, not its initial value, at a scale that gives logits of ordinary size."""
    normal = lambda shape: torch.randn(shape, generator=g, dtype=torch.float64)
    start = gpt.initialise(c, seed=int(torch.randint(1 << 30, (), generator=g)))
    weights = {}
    for name, (shape, kind) in gpt.parameter_shapes(c).items():
        if kind == "matrix" or kind == "head":
            w = normal(shape) / shape[1] ** 0.5
        elif kind == "embedding":
            w = normal(shape) * 0.5
        else:
            w = start[name] + 0.3 * normal(shape)
        weights[name] = w.float().double()  # the same numbers in fp32
    return weights


def random_batch(c, g):
    """Documents of 1 to context tokens, an empty one in the middle and at the end, and some targets left out."""
    longest = min(c.context, 23)
    lengths = [7, 1, longest, 0, 2, 12, 0]
    cu = torch.tensor([0] + lengths).cumsum(0)
    ids = lambda: torch.randint(c.vocab, (int(cu[-1]),), generator=g)
    tokens, targets = ids(), ids()
    targets[torch.rand(targets.shape, generator=g) < 0.1] = gpt.IGNORE
    positions = torch.cat([torch.arange(n) for n in lengths])
    dloss = torch.randn(targets.shape, generator=g, dtype=torch.float64).float().double()
    return tokens, targets, positions, cu, dloss


def recipe_for(number):
    """Three recipes in turn: golf's, nano's, and Muon without row normalisation under a cosine."""
    golf = Recipe(matrix_optimizer="muon", matrix_lr=0.022, matrix_decay=0.095, embed_lr=0.03, embed_decay=0.085, head_lr=0.01,
                  head_decay=0.02, scalar_lr=0.02, scalar_decay=0.02, beta2=0.95, clip=0.3, warmdown=0.72, ema_horizon=0.4)
    nano = Recipe(warmup_steps=2, decay="cosine", min_lr=0.1)
    mixed = Recipe(matrix_optimizer="muon", matrix_lr=0.01, muon_row_normalise=False, muon_iterations=3, clip=0, warmup_steps=1,
                   warmdown=0.5, min_lr=0.6, momentum_warmup=0.0, ema_horizon=0.3)
    return (golf, nano, mixed)[number % 3]


class Case:
    """One config with its random weights and batches, and the results of the definition for them in fp64."""

    def __init__(self, name, config, looping, seed):
        self.name, self.config, self.looping = name, config, looping
        g = torch.Generator().manual_seed(seed)
        self.weights = random_weights(config, g)
        self.batches = [random_batch(config, g) for _ in range(EXECUTED)]
        self.tokens, self.targets, self.positions, self.cu, self.dloss = self.batches[0]
        self.recipe, self.loop_from = recipe_for(seed), 2 if looping else EXECUTED + 1

    def write(self, directory, dtype):
        directory.mkdir(parents=True)
        parameters = [dict(name=n, shape=list(w.shape)) for n, w in self.weights.items()]
        training = dict(recipe=asdict(self.recipe), steps=STEPS, executed=EXECUTED, loop_from=self.loop_from)
        meta = dict(config=asdict(self.config), dtype=dtype, looping=self.looping, parameters=parameters, training=training)
        (directory / "case.json").write_text(json.dumps(meta, indent=1))
        for name, column in (("tokens", 0), ("targets", 1)):
            torch.cat([b[column] for b in self.batches]).numpy().astype("<i4").tofile(directory / f"{name}.i32")
        self.positions.numpy().astype("<i4").tofile(directory / "positions.i32")
        self.cu.numpy().astype("<i4").tofile(directory / "cu_seqlens.i32")
        torch.cat([w.flatten() for w in self.weights.values()]).numpy().astype("<f8").tofile(directory / "weights.f64")
        self.dloss.numpy().astype("<f8").tofile(directory / "dloss.f64")

    def expect(self):
        """The losses, logits, gradients and losses of training by the definition."""
        self.loss, self.logits, self.grads = self.one_pass()
        self.losses = self.training()

    def one_pass(self):
        weights = {n: w.clone().requires_grad_() for n, w in self.weights.items()}
        layout = (self.cu, self.positions, self.looping)
        loss = gpt.losses(self.config, weights, self.tokens, self.targets, *layout)
        (loss * self.dloss).sum().backward()
        with torch.no_grad():
            logits = gpt.logits(self.config, weights, self.tokens, *layout)
        return loss.detach(), logits, {n: w.grad for n, w in weights.items()}

    def training(self):
        """The loss before each step, and at the end that of the averaged weights."""
        weights = {n: w.clone() for n, w in self.weights.items()}
        optimizer = Optimizer(self.config, weights, self.recipe, STEPS)
        losses = []
        for step, (tokens, targets, _, cu, _) in enumerate(self.batches):
            leaves = {n: w.clone().requires_grad_() for n, w in weights.items()}
            loss = gpt.mean_loss(self.config, leaves, tokens, targets, cu, looping=step >= self.loop_from)
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step({n: w.grad for n, w in leaves.items()})
        with torch.no_grad():
            losses.append(float(gpt.mean_loss(self.config, optimizer.average, self.tokens, self.targets, self.cu, looping=True)))
        return losses

    def training_errors(self, directory):
        found = read(directory, "out_training.f64").tolist()
        return {f"loss at step {i}" if i < EXECUTED else "loss of the average": abs(a - b) / abs(b) if a == a else float("inf")
                for i, (a, b) in enumerate(zip(found, self.losses, strict=True))}

    def errors(self, directory):
        """The relative error of each compared quantity."""
        errors = {"loss": relative(read(directory, "out_loss.f64"), self.loss),
                  "loss without gradients": relative(read(directory, "out_plain_loss.f64"), self.loss),
                  "logits": relative(read(directory, "out_logits.f64"), self.logits.flatten())}
        sizes = [w.numel() for w in self.weights.values()]
        for (name, g), native in zip(self.grads.items(), read(directory, "out_grads.f64").split(sizes)):
            errors["d " + name] = relative(native, g.flatten())
        return errors


def read(directory, name):
    return torch.from_numpy(np.fromfile(directory / name, "<f8"))


def relative(found, expected):
    if not torch.isfinite(found).all():
        return float("inf")
    norm = expected.norm()
    return float((found - expected).norm() / norm) if norm > 0 else float(found.norm())


def report(case, dtype, directory):
    """Prints a line for the case in one type, and one line for each quantity outside its tolerance. Returns whether every quantity is within its tolerance."""
    errors, training = case.errors(directory), case.training_errors(directory)
    limits = [(errors, LIMIT[dtype]), (training, TRAINING_LIMIT[dtype])]
    bad = [(what, e, limit) for found, limit in limits for what, e in found.items() if not e <= limit]
    worst = max(errors, key=errors.get)
    print(f"{'FAILED' if bad else 'ok':6} {dtype} {case.name}: worst of {len(errors)} {errors[worst]:.1e} ({worst}); "
          f"training {max(training.values()):.1e}")
    for what, e, limit in bad[:8]:
        print(f"         {what}: {e:.1e}, expected at most {limit:.0e}")
    return not bad


def main():
    parser = parity_peers.parser(__doc__)
    parser.add_argument("program", help="the native half, target `parity`")
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--keep", help="write the cases here and keep them")
    args = parser.parse_args()
    torch.set_num_threads(1)

    with tempfile.TemporaryDirectory() as temporary:
        root = Path(args.keep or temporary)
        todo = []  # case, type, directory
        for number, (name, (config, looping)) in enumerate(cases().items()):
            if args.only and args.only not in name:
                continue
            case = Case(name, config, looping, seed=number)
            for dtype in LIMIT:
                directory = root / f"{number:02d}-{dtype}"
                case.write(directory, dtype)
                todo.append((case, dtype, directory))
        with subprocess.Popen([args.program] + [str(directory) for _, _, directory in todo]) as native:
            for case in dict.fromkeys(case for case, _, _ in todo):
                case.expect()
        if native.returncode != 0:
            raise RuntimeError(f"{args.program}: found exit status {native.returncode}, expected 0")
        failed = 0
        for case in todo:
            failed += not report(*case)
    print(f"{len(todo) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
