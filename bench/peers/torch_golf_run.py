"""The timed golf run in PyTorch, beside `ingot train --preset golf --data SHARDS --set train.seconds=S` on the same GPU:

    python3 bench/peers/torch_golf_run.py SHARDS --bytes-per-token B [--seconds 480] [--saved FILE]

The model of torch_gpt.py by torch.compile, rows of 2,048 tokens cut from the shards as they lie (scaled_dot_product_attention does not keep
documents apart), bf16 activations, the preset's recipe over as many steps as the time allows by the first steps' pace. Prints a line
of JSON: steps, tokens per second, held-out loss and bits per byte. `--saved FILE` goes on where a run was cut: run it with 240 seconds twice.
B is what `ingot train` counted of held-out text: bytes / targets of its score in log.jsonl.
"""
import argparse
import json
import math
import pathlib
import sys
import time

import numpy as np
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from gpu_train import PRESET, TOKENS, TorchGpt, TorchOptimizer, compiled, recipe, spec  # noqa: E402

CONTEXT, HEADER = 2048, 1024
PASSES = 8  # of a step, as the preset accumulates


def tokens_of(folder, held_out):
    """All tokens of the shards, in the order of their names."""
    paths = [p for p in sorted(folder.glob("*.bin")) if ("val_" in p.name) == held_out]
    if not paths:
        sys.exit(f"{folder}: found no {'held-out' if held_out else 'training'} shards")
    return np.concatenate([np.fromfile(p, np.uint16, offset=HEADER) for p in paths])


def rows_from(tokens, at, rows):
    """`rows` rows of inputs and targets from token `at` on, around the end of the data."""
    index = (at + np.arange(rows * CONTEXT + 1)) % len(tokens)
    flat = torch.from_numpy(tokens[index].astype(np.int64)).cuda(non_blocking=True)
    return flat[:-1].view(rows, CONTEXT), flat[1:].view(rows, CONTEXT)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=pathlib.Path)
    parser.add_argument("--bytes-per-token", type=float, required=True)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--whole-seconds", type=float, default=480, help="of all parts of the run (default: 480)")
    parser.add_argument("--saved", type=pathlib.Path)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    train, held_out = tokens_of(options.shards, False), tokens_of(options.shards, True)
    config = spec.GptConfig.from_dict(PRESET["model"])
    model = TorchGpt(config, spec.initialise(config, 1, torch.float32), CONTEXT, torch.bfloat16).cuda()
    forward = compiled(model, lambda: None)  # as `gpu.py train --warm` leaves it in PyTorch's cache
    rows, at, spent, steps = TOKENS // CONTEXT, 0, 0.0, None
    for looping in (False, True):  # compiled before the clock starts
        forward(*rows_from(train, 0, rows), looping).backward()
    model.zero_grad()
    begin = time.perf_counter()
    for _ in range(2 * PASSES):
        forward(*rows_from(train, 0, rows), False).backward()
    torch.cuda.synchronize()
    pace = (time.perf_counter() - begin) / 2
    model.zero_grad()
    # Recurrence is on for the rest of the run, and costs half as much again.
    steps = max(1, int(options.whole_seconds / (pace * (config.loop_from + 1.5 * (1 - config.loop_from)))))
    optimizer = TorchOptimizer(model, recipe(), steps, torch.bfloat16)
    if options.saved and options.saved.exists():
        state = torch.load(options.saved, weights_only=False)
        steps, at, spent = state["steps"], state["at"], state["spent"]
        optimizer = TorchOptimizer(model, recipe(), steps, torch.bfloat16)
        with torch.no_grad():
            for to, value in zip([*optimizer.parameters, *optimizer.momentum, *(optimizer.average or [])], state["tensors"]):
                to.copy_(value)
        optimizer.adamw.load_state_dict(state["adamw"])
        optimizer.done = state["done"]
    torch.cuda.synchronize()
    begin, loss = time.perf_counter(), torch.zeros((), device="cuda")
    while optimizer.done < steps and time.perf_counter() - begin < options.seconds:
        looping, loss = optimizer.done >= config.loop_from * steps, torch.zeros((), device="cuda")
        for _ in range(PASSES):
            part = forward(*rows_from(train, at, rows), looping) / PASSES
            part.backward()
            loss += part.detach()
            at += rows * CONTEXT
        optimizer.step()
        torch.cuda.synchronize()
        if optimizer.done % 50 == 0:
            print(f"step {optimizer.done} of {steps}: loss {loss.item():.4f}", file=sys.stderr, flush=True)
    spent += time.perf_counter() - begin
    if options.saved:
        torch.save({"steps": steps, "at": at, "spent": spent, "done": optimizer.done, "adamw": optimizer.adamw.state_dict(),
                    "tensors": [t.detach().cpu() for t in (*optimizer.parameters, *optimizer.momentum, *(optimizer.average or []))]}, options.saved)
    with torch.no_grad():
        for to, value in zip(optimizer.parameters, optimizer.average or []):
            to.copy_(value)
        parts = [forward(*rows_from(held_out, i, rows), optimizer.done >= config.loop_from * steps).item()
                 for i in range(0, len(held_out) - rows * CONTEXT, rows * CONTEXT)]
    score = sum(parts) / len(parts)
    print(json.dumps({"steps": optimizer.done, "of": steps, "seconds": spent, "tokens_per_second": optimizer.done * PASSES * TOKENS / spent,
                      "held_out_loss": score, "bits_per_byte": score / math.log(2) / options.bytes_per_token}))


if __name__ == "__main__":
    main()
