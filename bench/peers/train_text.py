#!/usr/bin/env python3
"""Trains a character-level preset in PyTorch, as `ingot train` does natively, and scores the whole held-out text.

    train_text.py presets/nano.json --data FILE [--seeds 1,2,3] [--threads N] [--compile] [--json FILE]

Reads the preset's model, optimizer and schedule. Batches are windows at random places of the first 90 % of the characters; the
last 10 % are scored in windows that do not overlap, with the averaged weights where the preset keeps an average. No
checkpoint is selected: the score is that of the last step.
"""
import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from torch_gpt import TorchGpt, TorchOptimizer, spec, spec_optimizer


@torch.no_grad()
def held_out_loss(model, ids, length, looping):
    whole = (len(ids) - 1) // length
    x, y = ids[:whole * length].view(whole, length), ids[1:whole * length + 1].view(whole, length)
    total = sum(model(a, b, looping).item() * b.numel() for a, b in zip(x.split(256), y.split(256)))
    if whole * length < len(ids) - 1:
        rest = ids[whole * length:]
        total += model(rest[None, :-1], rest[None, 1:], looping).item() * (len(rest) - 1)
    return total / (len(ids) - 1)


def train(preset, ids, seed, compiled):
    config, settings = spec.GptConfig.from_dict(preset["model"]), preset["train"]
    recipe, steps = spec_optimizer.Recipe(**settings["optimizer"], **settings["schedule"]), settings["steps"]
    length, rows = config.context, settings["batch_tokens"] // config.context
    tail = int(len(ids) * (1 - settings["held_out_tail"]))
    text, held_out = ids[:tail], ids[tail:]
    model = TorchGpt(config, spec.initialise(config, seed), length)
    optimizer = TorchOptimizer(model, recipe, steps)
    forward = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
    places = torch.Generator().manual_seed(1000 + seed)
    started, looping = time.perf_counter(), False
    for step in range(steps):
        looping = config.has_loop and step >= config.loop_from * steps
        at = torch.randint(len(text) - length, (rows, 1), generator=places) + torch.arange(length)
        forward(text[at], text[at + 1], looping).backward()
        optimizer.step()
    seconds = time.perf_counter() - started
    optimizer.use_average()
    return dict(seed=seed, held_out=held_out_loss(model, held_out, length, looping), seconds=seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    text = args.data.read_text()
    known = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = torch.tensor([known[c] for c in text])
    results = []
    for seed in map(int, args.seeds.split(",")):
        results.append(train(json.loads(args.preset.read_text()), ids, seed, args.compile))
        print(f"seed {seed}: {results[-1]['held_out']:.4f} nats per character, {results[-1]['seconds']:.0f} s", flush=True)
    scores = [r["held_out"] for r in results]
    spread = f", deviation {statistics.stdev(scores):.4f}" if len(scores) > 1 else ""
    print(f"mean {statistics.mean(scores):.4f}{spread}")
    if args.json:
        args.json.write_text(json.dumps(dict(preset=args.preset.name, torch=torch.__version__, results=results), indent=2) + "\n")


if __name__ == "__main__":
    main()
