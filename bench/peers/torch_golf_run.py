"""The timed golf run in PyTorch, beside `ingot train --preset golf --data SHARDS --seconds 480` on the same GPU:

    python3 bench/peers/torch_golf_run.py SHARDS --out RUN [--seconds 480] [--until 190] [--beside RUN/log.jsonl]

The model of torch_gpt.py by torch.compile, rows of 2,048 tokens cut from the shards as they lie (scaled_dot_product_attention does not keep
documents apart), bf16 activations, the preset's recipe. As in Ingot, rates, momentum, average and recurrence follow the clock, which counts only steps,
not compiling and scoring. --until and SIGINT end the run before its `--seconds`, to which the schedule still refers. Writes RUN/log.jsonl for `ingot plot`, with a
line for each step and each score (of the average, at the end and at the steps where the log of --beside has a score).
Bits per byte count the held-out bytes of that log; without it only losses are printed.
"""
import argparse
import json
import math
import pathlib
import signal
import sys
import time

import numpy as np
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from gpu_train import PRESET, TOKENS, TorchGpt, TorchOptimizer, compiled, recipe, spec  # noqa: E402
from optimizer import lr_factor  # noqa: E402

HEADER, RESERVE = 1024, 1.0  # bytes before a shard's tokens; seconds of the budget that Ingot reserves for its last save


def tokens_of(folder, held_out, device):
    """All tokens of the shards, in the order of their names, on the device."""
    paths = [p for p in sorted(folder.glob("*.bin")) if ("val_" in p.name) == held_out]
    if not paths:
        sys.exit(f"{folder}: found no {'held-out' if held_out else 'training'} shards")
    return torch.from_numpy(np.concatenate([np.fromfile(p, np.uint16, offset=HEADER) for p in paths]).astype(np.int32)).to(device)


class Run:
    def __init__(self, o):
        self.o, self.device = o, o.device
        config = spec.GptConfig.from_dict({**PRESET["model"], **o.model})
        self.context, self.rows, self.passes = config.context, o.tokens // config.context, PRESET["train"]["accumulation"]
        self.train, self.held_out = tokens_of(o.shards, False, o.device), tokens_of(o.shards, True, o.device)
        self.model = TorchGpt(config, spec.initialise(config, o.seed, torch.float32), config.context, torch.bfloat16).to(o.device)
        self.forward = compiled(self.model, lambda: None) if o.device == "cuda" else self.model  # the form that `gpu.py train --warm` leaves in PyTorch's cache
        self.optimizer = TorchOptimizer(self.model, recipe(), 1, torch.bfloat16)
        self.at, self.spent, self.looping = 0, 0.0, False
        o.out.mkdir(parents=True, exist_ok=True)
        self.log = (o.out / "log.jsonl").open("w", encoding="utf-8")
        self.beside = [json.loads(line) for line in o.beside.read_text(encoding="utf-8").splitlines()] if o.beside else []
        self.scores = [e for e in self.beside if e["event"] == "score"]

    def write(self, **entry):
        self.log.write(json.dumps(entry) + "\n")
        self.log.flush()

    def batch(self, tokens, at):
        """Inputs and targets from token `at` on, around the end of the data."""
        flat = tokens[(at + torch.arange(self.rows * self.context + 1, device=self.device)) % len(tokens)].long()
        return flat[:-1].view(self.rows, -1), flat[1:].clone().view(self.rows, -1)  # aligned as at compile time

    def compile(self):
        """Compiles both programs before the clock starts."""
        began = time.perf_counter()
        for looping in (False, True):
            for _ in range(2):  # the first call chooses among Inductor's kernels
                self.forward(*self.batch(self.train, 0), looping).backward()
        self.optimizer.clear()
        self.write(event="compiled", seconds=time.perf_counter() - began)

    def step(self):
        o, began = self.optimizer, time.perf_counter()
        progress = min(1.0, self.spent / (self.o.seconds - RESERVE))
        self.looping |= progress >= self.model.c.loop_from
        o.steps = o.done / progress if progress > 0.01 else max(o.done + 1, 100)
        loss = torch.zeros((), device=self.device)
        for _ in range(self.passes):
            part = self.forward(*self.batch(self.train, self.at), self.looping) / self.passes
            part.backward()
            loss += part.detach()
            self.at += self.rows * self.context
        rate = lr_factor(o.r, o.done, o.steps)
        o.step()
        value = loss.item()
        took = time.perf_counter() - began
        self.spent += took
        self.write(event="step", step=o.done, loss=value, lr_factor=rate, looping=self.looping, tokens_per_second=self.passes * self.rows * self.context / took, step_seconds=took, seconds=self.spent)
        if not math.isfinite(value):
            sys.exit(f"step {o.done}: found a loss of {value}")

    @torch.no_grad()
    def swapped(self):
        """Exchanges the weights and their average."""
        for p, a in zip(self.optimizer.parameters, self.optimizer.average):
            kept = p.clone()
            p.copy_(a)
            a.copy_(kept)

    def score(self):
        self.swapped()
        size = self.rows * self.context  # with gradients on: without, each program would compile anew
        parts = [self.forward(*self.batch(self.held_out, i), self.looping).detach() for i in range(0, len(self.held_out) - size, size)]
        self.swapped()
        loss = torch.stack(parts).mean().item()
        known = {"bits_per_byte": loss / math.log(2) * self.scores[-1]["targets"] / self.scores[-1]["bytes"]} if self.scores else {}
        self.write(event="score", step=self.optimizer.done, loss=loss, **known, targets=len(parts) * size, seconds=self.spent)
        return {"held_out_loss": loss, **known}

    def run(self):
        self.write(event="start", time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), torch=torch.__version__, seed=self.o.seed, seconds=0.0, step=0,
                   gpu=torch.cuda.get_device_name() if self.device == "cuda" else "", train_tokens=len(self.train), held_out_tokens=len(self.held_out))
        self.compile()
        until = min(self.o.until or self.o.seconds, self.o.seconds - RESERVE)
        wanted, cut = {e["step"] for e in self.scores}, []
        signal.signal(signal.SIGINT, lambda *_: cut.append(True))
        while self.spent < until and not cut:
            self.step()
            if self.optimizer.done in wanted:
                self.score()
        found = {"steps": self.optimizer.done, "seconds": self.spent, "tokens": self.at, "tokens_per_second": self.at / self.spent, **self.score()}
        print(json.dumps(found))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="RUN")
    parser.add_argument("--seconds", type=float, default=480, help="of the whole run, which the schedule is for (default: 480)")
    parser.add_argument("--until", type=float, help="stop after so many (default: all)")
    parser.add_argument("--beside", type=pathlib.Path, metavar="LOG", help="log.jsonl of our run")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    options.device, options.tokens, options.model = "cuda", TOKENS, {}
    Run(options).run()


if __name__ == "__main__":
    main()
