"""Measures how long an .ingot archive of GPT-OSS-20B's shape takes to load from a cold disk, beside dd on the same file.

    python3 bench/archive_load.py --program build/cpu/ingot --dir /var/tmp/archive-load --out bench/cpu/MACHINE/archive_load.json
    python3 bench/archive_load.py --program build/cuda/ingot --dir /var/tmp/archive-load --synthetic --device cuda   # onto a GPU

Writes a checkpoint of random numbers in the published form (28 GB of disk with its archive; --layers N writes the first N of the 24
layers; --synthetic writes the archive alone, 14 GB), converts it, and then, in turn, reads the archive with dd and loads it with
`ingot generate --tokens 0` (one token of prompt is computed), each time after the file's pages were dropped from the cache, and once more
with dd and with `ingot` from there. Medians of --rounds.
"""
import argparse
import datetime
import json
import os
import pathlib
import re
import statistics
import struct
import subprocess
import time

V, C, I, E, HEADS, KV, D = 201088, 2880, 2880, 32, 64, 8, 64


def tensors(layers):
    """(name, dtype, shape, kind) of every tensor in the published form."""
    yield "model.embed_tokens.weight", "BF16", (V, C), "bf16"
    yield "lm_head.weight", "BF16", (V, C), "bf16"
    yield "model.norm.weight", "BF16", (C,), "bf16"
    for l in range(layers):
        n = f"model.layers.{l}."
        for name, shape in (("input_layernorm.weight", (C,)), ("post_attention_layernorm.weight", (C,)),
                            ("self_attn.q_proj.weight", (HEADS * D, C)), ("self_attn.q_proj.bias", (HEADS * D,)),
                            ("self_attn.k_proj.weight", (KV * D, C)), ("self_attn.k_proj.bias", (KV * D,)),
                            ("self_attn.v_proj.weight", (KV * D, C)), ("self_attn.v_proj.bias", (KV * D,)),
                            ("self_attn.o_proj.weight", (C, HEADS * D)), ("self_attn.o_proj.bias", (C,)), ("self_attn.sinks", (HEADS,)),
                            ("mlp.router.weight", (E, C)), ("mlp.router.bias", (E,)), ("mlp.experts.gate_up_proj_bias", (E, 2 * I)),
                            ("mlp.experts.down_proj_bias", (E, C))):
            yield n + name, "BF16", shape, "bf16"
        for name, rows, cols in (("gate_up_proj", 2 * I, C), ("down_proj", C, I)):
            yield f"{n}mlp.experts.{name}_blocks", "U8", (E, rows, cols // 32, 16), "bytes"
            yield f"{n}mlp.experts.{name}_scales", "U8", (E, rows, cols // 32), "scales"


def size(dtype, shape):
    n = 2 if dtype == "BF16" else 1
    for s in shape:
        n *= s
    return n


def pattern(kind):
    """16 MiB of random numbers of a kind: bf16 below 1/16 in magnitude, any codes, or scales around 2^-6."""
    noise = bytearray(os.urandom(16 << 20))
    if kind == "bf16":
        high = bytes(noise[1::2]).translate(bytes(60 + (b & 1) + (b & 128) for b in range(256)))
        noise[1::2] = high
    if kind == "scales":
        noise = bytearray(bytes(noise).translate(bytes(119 + b % 4 for b in range(256))))
    return bytes(noise)


def write_checkpoint(directory, layers):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(
        model_type="gpt_oss", vocab_size=V, hidden_size=C, intermediate_size=I, num_hidden_layers=layers, num_attention_heads=HEADS,
        num_key_value_heads=KV, head_dim=D, num_local_experts=E, num_experts_per_tok=4, sliding_window=128, rope_theta=150000,
        max_position_embeddings=131072, eos_token_id=200002,
        rope_scaling=dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                          original_max_position_embeddings=4096))))
    header, at = {}, 0
    for name, dtype, shape, _ in tensors(layers):
        header[name] = dict(dtype=dtype, shape=shape, data_offsets=[at, at + size(dtype, shape)])
        at += size(dtype, shape)
    text = json.dumps(header).encode()
    patterns = {kind: pattern(kind) for kind in ("bf16", "bytes", "scales")}
    with open(directory / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, dtype, shape, kind in tensors(layers):
            left = size(dtype, shape)
            while left > 0:
                file.write(patterns[kind][:left])
                left -= min(left, len(patterns[kind]))


def drop(path):
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds_of(command):
    start = time.monotonic()
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return time.monotonic() - start, run.stderr


def seconds_of_weights(log, whole):
    """The loading seconds of a run. The program reports these if they exceed one second; otherwise the result is at most one."""
    said = re.search(r"of weights in ([0-9.]+) s", log)
    return float(said[1]) if said else min(whole, 1.0)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--program", required=True)
    p.add_argument("--dir", required=True, type=pathlib.Path)
    p.add_argument("--layers", type=int, default=24)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--synthetic", action="store_true", help="the archive is `ingot convert --synthetic 20b`'s, without a checkpoint")
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cpu")
    p.add_argument("--out", type=pathlib.Path)
    p.add_argument("--keep", action="store_true", help="leave checkpoint and archive where they are, and use what is there")
    args = p.parse_args()
    if args.synthetic and args.layers != 24:
        p.error("found --synthetic with --layers, expected one of them")
    archive, checkpoint, ids = args.dir / "model.ingot", args.dir / "checkpoint", args.dir / "ids.jsonl"
    convert = 0.0
    args.dir.mkdir(parents=True, exist_ok=True)
    if args.keep and archive.exists():
        pass
    elif args.synthetic:
        convert, _ = seconds_of([args.program, "convert", "--synthetic", "20b", archive])
    else:
        write_checkpoint(checkpoint, args.layers)
        convert, _ = seconds_of([args.program, "convert", checkpoint, archive])
        if not args.keep:
            (checkpoint / "model.safetensors").unlink()
    ids.write_text("[1]\n")
    load = [args.program, "generate", "--model", archive, "--ids", ids, "--tokens", "0", "--device", args.device]
    rounds = []
    for i in range(args.rounds):
        drop(archive)
        dd, _ = seconds_of(["dd", f"if={archive}", "of=/dev/null", "bs=8M"])
        drop(archive)
        whole, log = seconds_of(load)
        warm, warm_log = seconds_of(load)
        warm_dd, _ = seconds_of(["dd", f"if={archive}", "of=/dev/null", "bs=8M"])
        rounds.append(dict(dd=dd, load=seconds_of_weights(log, whole), start_to_end=whole, warm=warm,
                           warm_load=seconds_of_weights(warm_log, warm), warm_dd=warm_dd))
        print(f"round {i + 1}: dd {dd:.1f} s, load {rounds[-1]['load']:.1f} s, whole run {whole:.1f} s; from the page cache: dd {warm_dd:.1f} s, "
              f"load {rounds[-1]['warm_load']:.1f} s, whole run {warm:.1f} s", flush=True)
    on = re.search(r": on (.*)", log)
    middle = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    model = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    report = dict(suite="archive_load", cpu=model[1] if model else "unknown", threads=os.cpu_count(), device=on[1] if on else "CPU", date=str(datetime.date.today()),
                  layers=args.layers, of_layers=24, archive_bytes=archive.stat().st_size, convert_seconds=round(convert, 1),
                  seconds={k: round(v, 2) for k, v in middle.items()},
                  load_over_dd=round(statistics.median(r["load"] / r["dd"] for r in rounds), 3),
                  whole_over_dd=round(statistics.median(r["start_to_end"] / r["dd"] for r in rounds), 3), rounds=rounds)
    print(json.dumps(report, indent=1))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    if not args.keep:
        archive.unlink()


if __name__ == "__main__":
    main()
