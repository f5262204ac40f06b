"""Training steps of whole models of transformers on a GPU: unchanged, under torch.compile, with Liger-Kernel, with ingot.hf.patch(loss=True), and
with both patch and compile. Writes bench/results/<gpu>/models.json, with the memory of each. Needs the packages ingot and transformers.

    python3 bench/peers/gpu_models.py --native build/cuda/libingot_bench.so [--liger WHEEL] [--only TEXT] [--quick]
    python3 bench/peers/gpu_models.py --device cpu --tiny        # small models, no report: a test of this program

A step is forward, backward and AdamW (PyTorch's fused one) with bf16 weights, gradients and moments, of random weights in the shapes of Llama-3.2-1B and Qwen3-4B, on 8,192
random tokens: 4 sequences of 2,048. Each variant runs in a process of its own, because Liger changes classes and a second model would not fit; the time is the
median of 20 steps after 5, the memory the peak of PyTorch's allocator. error: the largest relative difference of the losses of the first 5 steps from the model as
it is, in the same seed; the tolerance of 1 % allows for bf16 activations that are rounded in other places. The limit is the time of the products
alone (6 operations per weight and token, 12 per visible pair, head and width of attention) at the rate of a large product in the same run.

A case of the report is a model with all variants, because the rows of a model share their peers, and a row's peers are measured in the same call. Compilers take minutes
for a model of many layers: with gpu.py --warm 2 two processes compile the variants of both models first, and --continue measures the model that a call had no time for.
"""
import argparse
import json
import math
import sys
import time

import torch

from gpu_common import LATE, SHARE, Child, Native, begin, ceilings, import_liger, measure_each, median, package_places, print_end, share

SHAPES = {
    "Llama-3.2-1B": ("Llama", dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
                                   head_dim=64, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True)),
    "Qwen3-4B": ("Qwen3", dict(vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
                               head_dim=128, max_position_embeddings=8192, rms_norm_eps=1e-6, tie_word_embeddings=True)),
}
TINY = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64)
BATCH = {False: (4, 2048), True: (2, 16)}
# The variants of a model: the peers, and those of Ingot, each of which is a row of its own beside the peers.
PEERS = {"torch_eager": "as it is", "torch_compile": "torch.compile", "liger": "Liger"}
OURS = {"patch": "", "patch_attention": ", attention too", "patch_compile": ", with torch.compile",
        "patch_attention_compile": ", attention too, with torch.compile"}
ORDER = ("torch_eager", "liger", "patch", "patch_attention", "torch_compile", "patch_compile", "patch_attention_compile")
TOLERANCE = 1e-2


def case_name(model, variant):
    return f"{model}, training step{OURS[variant]}"


def build(model, variant, tiny, device):
    import transformers

    kind, sizes = SHAPES[model]
    sizes = {**sizes, **TINY} if tiny else sizes
    if variant == "liger":  # before the model is made
        import liger_kernel.transformers as liger
        {"Llama": liger.apply_liger_kernel_to_llama, "Qwen3": liger.apply_liger_kernel_to_qwen3}[kind]()
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    attention = "sdpa"
    if variant.startswith("patch"):
        import ingot
        if variant.startswith("patch_attention"):
            ingot.hf.register_attention()
            attention = "ingot"
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            m = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation=attention).train()
    finally:
        torch.set_default_dtype(torch.float32)
    patched = None
    if variant.startswith("patch"):
        patched = ingot.hf.patch(m, loss=True)
        layers = sizes["num_hidden_layers"]
        norms = (4 if kind == "Qwen3" else 2) * layers + 1
        expected = norms + 3 * layers + 1  # norms; layers, their gated MLPs and rotary embeddings; the loss
        if len(patched.replaced) < expected:
            raise RuntimeError(f"the patch replaced {len(patched.replaced)} modules, expected {expected}: {patched}")
    return m


def step_of(model, variant, tiny, device):
    """(a step that returns its loss, the number of weights in products)."""
    m = build(model, variant, tiny, device)
    optimizer = torch.optim.AdamW(m.parameters(), lr=1e-5, fused=device == "cuda")
    run = torch.compile(m) if "compile" in variant else m
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(m.config.vocab_size, BATCH[tiny], generator=generator).to(device) for _ in range(4)]
    calls = 0

    def step():
        nonlocal calls
        x = ids[calls % len(ids)]
        calls += 1
        loss = run(input_ids=x, labels=x, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, sum(p.numel() for name, p in m.named_parameters() if p.dim() == 2)


def flops(model, weights, tiny):
    sizes = {**SHAPES[model][1], **(TINY if tiny else {})}
    sequences, length = BATCH[tiny]
    pairs = sequences * length * (length + 1) // 2
    return 6 * weights * sequences * length + 12 * pairs * sizes["num_attention_heads"] * sizes["head_dim"] * sizes["num_hidden_layers"]


def measure_variant(model, variant, tiny, device, warm, timed):
    step, weights = step_of(model, variant, tiny, device)
    losses = [step().item() for _ in range(warm)]
    times = []
    on_gpu = device == "cuda"
    for _ in range(timed):
        if on_gpu:
            torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e6)
    return {"us": median(times), "losses": losses, "memory": torch.cuda.max_memory_allocated() if on_gpu else 0, "flops": flops(model, weights, tiny),
            "p20_p80": [sorted(times)[len(times) // 5], sorted(times)[4 * len(times) // 5]]}


def child(model, variant, options, seconds):
    """The measurement in a process of its own, within so many seconds: a result, or the reason for none."""
    line = [sys.executable, __file__, "--device", options.device, "--model", model, "--variant", variant, *(["--tiny"] if options.tiny else []),
            *(["--liger", options.liger] if options.liger else [])]
    return Child(line).end(time.monotonic() + seconds)


def error_of(found, reference):
    return max(abs(a - b) / abs(b) for a, b in zip(found["losses"], reference["losses"]))


def results_of(model, variants, found, rate):
    """A result for each of Ingot's variants that ran, from {variant: measurement or reason}."""
    peers = {name: found[name] for name in PEERS if isinstance(found[name], dict)}
    absent = {name: found[name] for name in PEERS if not isinstance(found[name], dict)}
    for variant in variants:
        r = found[variant]
        if not isinstance(r, dict) or "torch_eager" not in peers:
            continue
        yield {"name": case_name(model, variant), "shape": list(BATCH[False]), "dtype": "bf16", "ours_us": r["us"], "peers": {name: p["us"] for name, p in peers.items()},
               "limit_us": r["flops"] / rate * 1e-6, "error": error_of(r, peers["torch_eager"]), "tolerance": TOLERANCE, "absent": absent,
               "memory_bytes": {"ours": r["memory"], **{name: p["memory"] for name, p in peers.items()}},
               "p20_p80_us": {"ours": r["p20_p80"], **{name: p["p20_p80"] for name, p in peers.items()}}}


def measure(model, options, ceiling, until, now=time.monotonic):
    """The rows of a model; a peer may be absent. Raises TimeoutError where a variant found too little time before `until`."""
    found = {}
    for variant in ORDER:
        begun, left = now(), math.inf if until is None else until - now()
        r, reason = child(model, variant, options, min(options.limit, left))
        if reason == LATE and left < options.limit:
            raise TimeoutError(f"{model}, {variant}: the time of this call ended")
        if r is None and variant in (*OURS, "torch_eager"):
            raise RuntimeError(f"{model}, {variant}: {reason}")
        found[variant] = r or reason
        print(f"{model}, {PEERS.get(variant, 'ingot' + OURS.get(variant, '')):28} "
              + (f"{r['us'] / 1e3:9.2f} ms  {r['memory'] / 1e9:6.2f} GB  loss {r['losses'][-1]:.4f}" if r else reason) + f"  [{now() - begun:.1f} s]", flush=True)
    return list(results_of(model, OURS, found, ceiling["bf16_TFLOPs"]))


def said(r):
    return f"{r['name']}: {r['ours_us'] / 1e3:.2f} ms, " + ", ".join(f"{p} {us / 1e3:.2f} ({us / r['ours_us']:.3f}x)" for p, us in r["peers"].items())


def compile_share(options):
    """In a process of gpu.py --warm: makes the first steps of the compiled variants of its share, which leaves their kernels in PyTorch's cache."""
    for variant, model in share([(variant, model) for model in options.models for variant in ORDER if "compile" in variant]):
        _, reason = child(model, variant, options, options.limit)
        print(f"{model}, {variant}: compiled{f', then {reason}' if reason else ''}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--native", help="libingot_bench.so, for the ceilings")
    parser.add_argument("--liger", help="a wheel of Liger-Kernel, where it is not installed")
    parser.add_argument("--only", help="only models whose name holds this, and no report")
    parser.add_argument("--quick", action="store_true", help="the first model, and no report")
    parser.add_argument("--tiny", action="store_true", help="small models, and no report")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--limit", type=int, default=900, help="seconds for a variant (default 900)")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:  # a process of one variant
        if options.variant == "liger" and import_liger(options.liger) is None:
            sys.exit("not installed, and not given by path")
        steps = (1, 1) if SHARE else (5, 4 if options.tiny else 20)
        print(json.dumps(measure_variant(options.model, options.variant, options.tiny, options.device, *steps)))
        return
    if options.tiny or options.device == "cpu":  # a test of this program
        options.models = [model for model in SHAPES if not options.only or options.only in model][:1 if options.quick else None]
        for model in options.models:
            print("\n".join(map(said, measure(model, options, {"bf16_TFLOPs": 1.0}, None))), flush=True)
        return
    package_places.extend([options.liger] if options.liger else [])  # Liger is imported by the processes of its variant alone
    report = begin("models", options, list(SHAPES), str)
    options.models = [report.cases[name] for name in (report.cases if SHARE else report.missing)]
    if SHARE:
        return compile_share(options)
    try:
        measure_each(report, lambda: ceilings(Native(options.native)), lambda model, ceiling: measure(model, options, ceiling, report.until), said)
    except TimeoutError as e:
        print(e, flush=True)
        report.leave(report.case)
        print_end(report)


if __name__ == "__main__":
    main()
