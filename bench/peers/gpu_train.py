"""A training step of the preset golf on a GPU, 98,304 tokens of packed documents, 11 and 17 layer calls: `ingot train` beside PyTorch's
torch.compile of the same model (torch_gpt.py) as one graph. Writes bench/results/<gpu>/train.json, with the memory of each.

    python3 bench/peers/gpu_train.py --native build/cuda/libingot_bench.so [--ingot build/cuda/ingot] [--only rows|packed] [--applications 11]

Ingot: whole steps of the program, batches and log included, from its log. The time of a pass is the difference between a step of five passes and
a step of one pass, divided by four. PyTorch: bf16 activations and banks cast once per pass, fp32 weights, fused AdamW, Muon by batched
products, as `rows` (48 rows of 2,048 tokens, scaled_dot_product_attention, which does not keep documents apart) and `packed`
(FlexAttention, with the mask made before the clock starts). Each peer and number of layer calls has a separate process. All processes compile during
Ingot's first round, on one core each, backward passes too, in a minute or two unless `gpu.py --warm 4` ran before. Then the peers run one at a time, with
exclusive use of the GPU, and Ingot runs again. The memory of a peer is its allocator's reservation plus a context as large as this process's; Ingot's
memory is of the last round. Tests check the computed values (models/gpt, engines/train); these are times only, of random tokens.
"""
import argparse
import contextlib
import json
import math
import pathlib
import sys
import tempfile
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from gpu_common import LATE, SHARE, Child, Native, begin, cached_graphs, ceilings, gpu_state, median, print_end, describe, share, turn, use_one_thread  # noqa: E402
from torch_gpt import TorchGpt, TorchOptimizer, compiled, spec  # noqa: E402
from train_runs import PRESET, TOKENS, document_lengths, measure_ours, write_data  # noqa: E402
from optimizer import Recipe  # noqa: E402

PROGRAMS = (11, 17)
PASSES = 5  # passes of the longer step; the difference to one pass gives the time of a pass
BLOCK = 128  # rows and columns of FlexAttention's mask


# --- Ingot ---
def ours_round(options, folder, applications):
    one = measure_ours(options, folder, applications, 1, options.steps)
    several = measure_ours(options, folder, applications, PASSES, max(1, options.steps // 2), warm=2)
    return {"step": one["ms"], "pass": (several["ms"] - one["ms"]) / (PASSES - 1), f"step_of_{PASSES}_passes": several["ms"],
            "flops": one["flops"], "memory_bytes": one["memory_bytes"]}


# --- PyTorch ---
class PackedGpt(TorchGpt):
    """Attention inside documents, by FlexAttention."""

    def attend(self, q, k, v, mask):
        from torch.nn.attention.flex_attention import flex_attention
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def packing_of(lengths, device):
    """Positions inside documents, and FlexAttention's mask from blocks only: a mask of all pairs of tokens does not fit."""
    from torch.nn.attention.flex_attention import BlockMask
    lengths = torch.tensor(lengths, device=device)
    document = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
    begins = (lengths.cumsum(0) - lengths)[document]
    first, last = document[::BLOCK], document[BLOCK - 1::BLOCK]
    at = torch.arange(len(first), device=device)
    some = (at[:, None] >= at) & (first[:, None] <= last) & (last[:, None] >= first)
    whole = (at[:, None] > at) & (first[:, None] == last) & (last[:, None] == first)

    def listed(blocks):
        counts = blocks.sum(-1, dtype=torch.int32)
        return counts[None, None].contiguous(), blocks.int().argsort(dim=-1, descending=True, stable=True).int()[None, None].contiguous()

    def inside(b, h, q, k):
        return (q >= k) & (document[q] == document[k])
    mask = BlockMask.from_kv_blocks(*listed(some & ~whole), *listed(whole), BLOCK_SIZE=BLOCK, mask_mod=inside)
    return torch.arange(document.numel(), device=device) - begins, mask


def recipe():
    known = Recipe.__dataclass_fields__
    train = PRESET["train"]
    return Recipe(**{k: v for k, v in {**train["schedule"], **train["optimizer"]}.items() if k in known})


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def measure_torch(options, applications):
    """Milliseconds of a pass, forward and backward, and of a whole step with its optimizer; medians."""
    with contextlib.ExitStack() as held:
        return measure_torch_in_turn(options, applications, held)


def measure_torch_in_turn(options, applications, held):
    device, packed = options.device, options.child == "packed"
    use_one_thread()
    torch.set_float32_matmul_precision("high")
    config = spec.GptConfig.from_dict({**PRESET["model"], **dict(options.model)})
    with torch.device("cpu"):
        weights = spec.initialise(config, 1, torch.float32)
    model = (PackedGpt if packed else TorchGpt)(config, weights, config.context, torch.bfloat16).to(device)
    optimizer = TorchOptimizer(model, recipe(), 2000, torch.bfloat16)
    shape = (1, options.tokens) if packed else (options.tokens // config.context, config.context)
    tokens, targets = (torch.randint(config.vocab, shape, device=device) for _ in range(2))
    more = (packing_of(document_lengths(options.tokens, config.context, 1), device),) if packed else ()
    looping, started, waited = applications == 17, time.perf_counter(), []

    def run_when():
        if SHARE:  # the graph is in PyTorch's cache now
            raise SystemExit(0)
        begin = time.perf_counter()
        held.enter_context(turn(options.gate))
        waited.append(time.perf_counter() - begin)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
    forward = model if options.eager else compiled(model, run_when)

    def one_pass():
        loss = forward(tokens, targets, looping, *more)
        loss.backward()
        return loss

    def timed(call, times):
        seen = []
        for _ in range(times):
            synchronize(device)
            begin = time.perf_counter()
            call()
            synchronize(device)
            seen.append(1e3 * (time.perf_counter() - begin))
        return median(seen)
    loss = one_pass().item()
    optimizer.clear()
    first = time.perf_counter() - started - sum(waited)
    assert math.isfinite(loss), loss
    if not options.eager:
        from torch._dynamo.utils import counters
        assert not counters["graph_break"], dict(counters["graph_break"])
        assert counters["stats"]["unique_graphs"] == 1, dict(counters["stats"])
    found = {"loss": loss, "first_pass_s": first, "graphs_from_cache": cached_graphs()}
    timed(lambda: (one_pass(), optimizer.clear()), 3)
    found["pass"] = timed(lambda: (one_pass(), optimizer.clear()), options.steps)
    timed(lambda: (one_pass(), optimizer.step()), 3)
    found["step"] = timed(lambda: (one_pass(), optimizer.step()), options.steps)
    if device == "cuda":
        found |= {"memory_bytes": torch.cuda.max_memory_reserved(), "allocated_bytes": torch.cuda.max_memory_allocated()}
    return found


def start_child(peer, applications, options):
    line = [sys.executable, __file__, "--native", options.native, "--child", peer, "--steps", str(options.steps), "--applications", str(applications),
            "--gate", options.gate or ""]
    return Child(line)


def compile_share(options, cases):
    """In a process of gpu.py --warm: compiles a share and measures nothing."""
    for peer, applications in share(cases):
        started = time.monotonic()
        _, reason = start_child(peer, applications, options).end(started + 1500)
        print(f"{peer}, {applications} applications: {time.monotonic() - started:.0f} s to compile, then {reason}", flush=True)


def results_of(ours, peers, ceiling, baseline):
    """The report's rows: the whole step and the pass of each program that has a measured peer."""
    for applications in ours:
        rounds = ours[applications]
        beside = {f"compile_{peer}": found[applications] for peer, found in peers.items() if applications in found}
        if not beside:
            continue
        memory = {"ours": rounds[-1]["memory_bytes"] - baseline, **{p: f["memory_bytes"] + baseline for p, f in beside.items()}}
        for what, name in (("step", "whole step"), ("pass", "forward and backward")):
            us = 1e3 * median([r[what] for r in rounds])
            yield {"name": f"golf, {applications} applications, {name}", "shape": [TOKENS], "dtype": "bf16", "ours_us": us,
                   "peers": {p: 1e3 * f[what] for p, f in beside.items()}, "limit_us": rounds[0]["flops"] / ceiling["bf16_TFLOPs"] * 1e-6,
                   "tokens_per_second": {"ours": TOKENS / us * 1e6, **{p: TOKENS / f[what] * 1e3 for p, f in beside.items()}},
                   "memory_bytes": memory, "allocated_bytes": {p: f["allocated_bytes"] for p, f in beside.items()},
                   "rounds_ms": [r[what] for r in rounds], f"step_of_{PASSES}_passes_ms": [r[f"step_of_{PASSES}_passes"] for r in rounds]}


def parsed():
    parser = argparse.ArgumentParser()
    parser.add_argument("--native", required=True)
    parser.add_argument("--ingot", type=pathlib.Path, help="the program (default: beside the library)")
    parser.add_argument("--only", choices=["rows", "packed"], help="one peer alone, and no report")
    parser.add_argument("--ours-alone", action="store_true", help="no peer, and no report")
    parser.add_argument("--applications", type=int, nargs="+", choices=PROGRAMS, default=PROGRAMS, help="which programs (default: both)")
    parser.add_argument("--limit", type=float, default=130, help="seconds that ours may take, and all peers together (default: 130)")
    parser.add_argument("--wait-for", type=pathlib.Path, metavar="FILE", help="measure when FILE is there: the peers compile meanwhile, which takes minutes and "
                        "needs no GPU to itself")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each (default: 12)")
    parser.add_argument("--child", choices=["rows", "packed"], help=argparse.SUPPRESS)
    parser.add_argument("--gate", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.ingot = (options.ingot or pathlib.Path(options.native).parent / "ingot").resolve()
    options.device, options.tokens, options.eager, options.model, options.shrink = "cuda", TOKENS, False, (), ()
    return options


def measure(report, chosen, names, options):
    """Measures the cases of the names `chosen` beside the peers `names`, and returns the reasons for missing peers. The seconds of a case are an
    equal share of the whole time."""
    begun, before, programs = report.now(), gpu_state(), [report.cases[name] for name in chosen]
    free, whole = torch.cuda.mem_get_info()
    baseline = whole - free  # with the context of this process
    ours, peers, absent, late = {}, {}, {}, set()

    def go_round(folder):
        for applications in programs:
            found = ours_round(options, folder, applications)
            ours.setdefault(applications, []).append(found)
            print(f"ours, {applications} applications: " + ", ".join(f"{k} {v:.2f} ms" for k, v in found.items() if "step" in k or k == "pass")
                  + f", {TOKENS / found['step'] * 1e-3:.3f} M tokens/s, {(found['memory_bytes'] - baseline) / 2**30:.1f} GiB", flush=True)

    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        options.gate = str(folder / "gate")
        write_data(options.ingot, folder, PRESET["model"]["vocab"], TOKENS)
        with turn(options.gate):
            children = {(peer, a): start_child(peer, a, options) for peer in names for a in programs}
            go_round(folder)
            while options.wait_for and not options.wait_for.exists():
                time.sleep(0.1)
        limit = report.at_most(options.limit)
        until = time.monotonic() + limit
        for (peer, applications), process in children.items():
            found, reason = process.end(until)
            if reason:
                if reason == LATE and limit < options.limit:  # the time of this call was too short for the peer, not the peer too slow
                    late.add(applications)
                absent[f"compile_{peer}, {applications} applications"] = reason
                print(f"{peer}, {applications} applications: {reason}", flush=True)
                continue
            peers.setdefault(peer, {})[applications] = found
            print(f"torch.compile, {peer}, {applications} applications: pass {found['pass']:.2f} ms, step {found['step']:.2f} ms, "
                  f"{TOKENS / found['step'] * 1e-3:.3f} M tokens/s, {(found['memory_bytes'] + baseline) / 2**30:.1f} GiB "
                  f"({found['allocated_bytes'] / 2**30:.1f} allocated), first pass {found['first_pass_s']:.0f} s, {found['graphs_from_cache']} graphs from PyTorch's cache, loss {found['loss']:.3f}", flush=True)
        if names:
            go_round(folder)
        ceiling = ceilings(Native(options.native))
    describe(report, ceiling, before, absent=absent)
    for name, applications in zip(chosen, programs):
        rows = list(results_of({applications: ours[applications]}, peers, ceiling, baseline))
        if rows and applications not in late:
            print(f"{name}: [{report.add(rows, name=name, seconds=(report.now() - begun) / len(chosen)):.1f} s]", flush=True)
    return absent


def main():
    options = parsed()
    if options.child:
        print(json.dumps(measure_torch(options, options.applications[0])), flush=True)
        return
    names = [] if options.ours_alone else [options.only] if options.only else ["rows", "packed"]
    if SHARE:
        return compile_share(options, [(peer, a) for peer in names for a in options.applications])
    options.quick, options.of_quick, options.only = options.ours_alone or options.only is not None, None, None  # a choice of peers makes no report
    report = begin("train", options, PROGRAMS, lambda applications: f"golf, {applications} applications")
    report.missing = [name for name in report.missing if report.cases[name] in options.applications]
    chosen = report.fitting()
    absent = measure(report, chosen, names, options) if chosen else {}
    print_end(report)
    if absent:
        sys.exit(f"train: not measured: {'; '.join(absent)}")


if __name__ == "__main__":
    main()
