"""Sampling on a GPU: a token for each of 1, 4, 16 and 64 rows of 201,088 logits, with each filter, beside PyTorch eager and compiled.
Writes bench/results/<gpu>/sampling.json.

    python3 bench/peers/gpu_sampling.py --native build/cuda/libingot_bench.so [--only TEXT] [--quick] [--no-peers]

PyTorch samples as vLLM and gpt-fast do: the argmax of probabilities over exponential noise, after topk, or a sort and a running sum.
The logits are in L2, as in a decode step after the head has written them: sets of inputs are not rotated. --quick and --no-peers take
under a minute.
"""
import ctypes
import dataclasses

import torch

from gpu_common import Native, add_peers, begin, captured, ceilings, interleaved, measure_each, pointer, program_options, stream

VOCAB = 201088
CALLS = 50
FILTERS = {
    "greedy": dict(temperature=0.0),
    "temperature": dict(),
    "mask": dict(mask=True),
    "top-k 40": dict(top_k=40),
    "top-p 0.9": dict(top_p=0.9),
    "min-p 0.05": dict(min_p=0.05),
    "top-k 40, top-p 0.9, min-p 0.05": dict(top_k=40, top_p=0.9, min_p=0.05),
}


@dataclasses.dataclass
class Case:
    rows: int
    name: str
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    mask: bool = False


def cases():
    return [Case(rows, name, **options) for rows in (1, 16, 4, 64) for name, options in FILTERS.items()]


def sampled(case, logits, allowed):
    """One token a row, in PyTorch."""
    if case.mask:
        logits = logits.masked_fill(~allowed, float("-inf"))
    if case.temperature == 0:
        return logits.argmax(-1)
    logits = logits / case.temperature
    if case.top_k:
        logits = logits.masked_fill(logits < logits.topk(case.top_k).values[:, -1:], float("-inf"))
    if case.top_p < 1:
        ordered, ids = logits.sort(descending=True)
        p = ordered.softmax(-1)
        ordered = ordered.masked_fill(p.cumsum(-1) - p > case.top_p, float("-inf"))
        logits = torch.empty_like(logits).scatter_(-1, ids, ordered)
    p = logits.softmax(-1)
    if case.min_p:
        p = p.masked_fill(p < case.min_p * p.amax(-1, keepdim=True), 0)
    return (p / torch.empty_like(p).exponential_(1)).argmax(-1)


def measure(case, native, read_tbps, peers):
    logits = torch.randn(case.rows, VOCAB, device="cuda") * 2.5
    tokens = torch.full((case.rows,), -1, device="cuda", dtype=torch.int32)
    allowed = torch.rand(case.rows, VOCAB, device="cuda") < 0.5
    shifts = torch.arange(32, device="cuda")
    words = (allowed.view(case.rows, -1, 32).long() << shifts).sum(-1).to(torch.uint32) if case.mask else None
    size = ctypes.c_int64()
    native.sample_workspace(case.rows, ctypes.byref(size))
    workspace = torch.zeros(size.value, device="cuda", dtype=torch.uint8)
    double = ctypes.c_double

    def ours(i):
        native.sample(pointer(logits), pointer(tokens), case.rows, VOCAB, double(case.temperature), case.top_k, double(case.top_p),
                      double(case.min_p), pointer(words), i, pointer(workspace), workspace.numel(), stream())
    graphs, absent = {"ours": captured(ours, CALLS)}, {}
    if peers:
        torch._dynamo.reset()
        compiled = torch.compile(sampled, fullgraph=True, dynamic=False)
        add_peers(graphs, absent, {"torch_eager": (True, lambda: captured(lambda i: sampled(case, logits, allowed), CALLS)),
                                   "torch_compile": (True, lambda: captured(lambda i: compiled(case, logits, allowed), CALLS))})
    us, spread = interleaved({name: g[0] for name, g in graphs.items()}, CALLS)
    assert 0 <= int(tokens.min()) and int(tokens.max()) < VOCAB, f"{case.name}: found tokens {tokens.tolist()}"
    return {"name": case.name, "shape": [case.rows, VOCAB], "dtype": "f32", "ours_us": us.pop("ours"), "peers": us,
            "limit_us": 4 * case.rows * VOCAB / read_tbps * 1e-6, "absent": absent, "p20_p80_us": spread}


def main():
    parser = program_options()
    parser.add_argument("--no-peers", action="store_true", help="ours alone, and no report")
    options = parser.parse_args()
    torch.manual_seed(0)
    native = Native(options.native)
    options.of_quick = len(FILTERS)  # those of one row, which are the first
    options.quick, alone = options.quick or options.no_peers, options.no_peers or options.quick
    if options.no_peers:
        options.of_quick = None

    def said(r):
        return (f"{r['shape'][0]:3} rows, {r['name']:32} ours {r['ours_us']:8.2f} us  "
                + "  ".join(f"{p} {us:.2f} ({us / r['ours_us']:.1f}x)" for p, us in r["peers"].items()) + f"  {r['absent'] or ''}")
    measure_each(begin("sampling", options, cases(), lambda c: f"{c.name}, {c.rows} rows"), lambda: ceilings(native),
                 lambda case, ceiling: measure(case, native, ceiling["read_TBps"], not alone), said, notes="limit: the logits read once; they are in L2")


if __name__ == "__main__":
    main()
