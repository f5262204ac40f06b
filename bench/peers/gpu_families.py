"""A token of Llama-3, Qwen3 and SmolLM2 on a GPU, with random bf16 weights of the published shapes: `ingot bench decode`, by one kernel, beside a launch for each
phase, and transformers under torch.compile as one CUDA graph with a static cache (compiled_decode.py). Writes bench/results/<gpu>/families.json.

    python3 bench/peers/gpu_families.py --native build/cuda/libingot_bench.so [--ingot build/cuda/ingot] [--llama-bench PATH] [--only TEXT] [--quick] [--limit SECONDS]

The rows are those of gpu_decode.py: kernel times for each context, tokens as `generate` gets them through the decoder, and for Llama-3.2-1B the workload of
published figures: a prompt of 32 tokens and 128 tokens of the answer. The limit is the time of the weights and keys that a token reads, at the speed of a
kernel that only reads, in the same process. Peers compile side by side before anything is measured, and are timed one after the other. Tests check
the computed values (models/decode/phased/families.cuda.test.cpp).

llama.cpp is a peer of the dense models with tied embeddings if the path of its `llama-bench`, built with CUDA, is given: on a GGUF with random weights of the same
shapes (synthetic_gguf.py), written before and deleted after its run.
"""
import pathlib
import sys
import tempfile
import time

import torch

import gpu_decode
import synthetic_gguf
from gpu_common import IN_MEMORY, LATE, Child, Native, attempt, begin, ceilings, parsed, print_end, program_options, say_case, describe, turn

CONTEXT = 1024  # of the peers, the first context of each model
MODELS = [dict(size="llama-3.2-1b", dense="bf16", dtype="bf16", contexts=(CONTEXT, 8192), sampled=True, answers=((32, 128),)),
          dict(size="llama-3.1-8b", dense="bf16", dtype="bf16", contexts=(CONTEXT, 8192), sampled=True),
          dict(size="qwen3-4b", dense="bf16", dtype="bf16", contexts=(CONTEXT, 8192), sampled=True),
          dict(size="qwen3-30b-a3b", dense="bf16", dtype="bf16", contexts=(CONTEXT, 8192), sampled=True),
          dict(size="qwen3-0.6b", dense="bf16", dtype="bf16", contexts=(CONTEXT, 8192), sampled=True),
          dict(size="smollm2-135m", dense="bf16", dtype="bf16", contexts=(CONTEXT,), sampled=True)]
COMPILED = "torch_compile"
PEERS = pathlib.Path(__file__).resolve().parent


def measure_compiled(models, seconds):
    """{size: (a peer's measurement or None, the reason for None)}. The peers compile side by side while this process holds the lock of their timed parts, and
    are timed one after the other when the last one has compiled."""
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        gate = f"{folder}/gate"
        with turn(gate):
            peers = {m["size"]: Child([sys.executable, str(PEERS / "compiled_decode.py"), m["size"], str(CONTEXT), str(gpu_decode.TOKENS), "--gate", gate]) for m in models}
            while time.monotonic() < until - 10 and any(p.process.poll() is None and not pathlib.Path(f"{gate}.{size}").exists() for size, p in peers.items()):
                time.sleep(0.2)
        return {size: peer.end(until) for size, peer in peers.items()}


def add_compiled(row, found, reason):
    """Adds a peer's measurement, or the reason for having none, to a model's row of tokens through the decoder, which is what both users get."""
    if found is None:
        row.setdefault("absent", {})[COMPILED] = reason
    else:
        row["peers"][COMPILED] = found["us"]


def measure(report, options):
    """Measures the missing models that fit into the time together. The seconds of a model include its share of the time in which all peers compile."""
    names = report.fitting()
    begun, limit = report.now(), report.at_most(options.limit)
    compiled = measure_compiled([report.cases[name] for name in names], limit)
    of_peers = (report.now() - begun) / len(names)
    for name in names:
        model, begun = report.cases[name], report.now()
        if compiled[model["size"]][1] == LATE and limit < options.limit:
            continue  # the time of this call was too short for the peer, not the peer too slow
        with attempt(report, name):
            rows = gpu_decode.rows(model, gpu_decode.ask(model, options.ingot))
            for r in rows:
                if r["name"].endswith("greedy, through the decoder"):
                    add_compiled(r, *compiled[model["size"]])
                    if model["size"] in synthetic_gguf.FAMILIES:
                        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                            gpu_decode.add_rival(r, {**model, "context": CONTEXT}, options.llama_bench, folder)
            say_case(report, rows, gpu_decode.said, name=name, seconds=of_peers + report.now() - begun)


def main():
    parser = program_options("model")
    parser.add_argument("--limit", type=float, default=240, help="seconds that all peers together may take (default 240)")
    parser.add_argument("--llama-bench", type=pathlib.Path, help="llama.cpp's program, built with CUDA: a peer of the dense models")
    parser.add_argument("--folder", default=IN_MEMORY, help="where its GGUFs of up to 8 GB are written (default: memory)")
    options = parsed(parser)
    synthetic_gguf.check_llama("families: --llama-bench", options.llama_bench)
    report = begin("families", options, MODELS, gpu_decode.label)
    if report.fitting():
        describe(report, ceilings(Native(options.native)))
        torch.cuda.empty_cache()
        measure(report, options)
    print_end(report)


if __name__ == "__main__":
    main()
