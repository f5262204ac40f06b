"""Test-time training of the preset golf on a GPU: `ingot eval --ttt` beside parameter-golf's algorithm in PyTorch, 17 layer calls, 64
documents side by side, rank 96, chunks of 32, windows of 2,048, random tokens. Writes bench/results/<gpu>/ttt.json.

    python3 bench/peers/gpu_ttt.py --native build/cuda/libingot_bench.so [--ingot build/cuda/ingot] [--only origin|chunk_head]

Ingot: the program with its own clock. `step` is a chunk of 64 documents with whole windows, the mean of 12 in a row. `run` is the whole of these
documents, including the windows that grow from 32 tokens and the allocations. `any_order_us` is a step with --ttt-any-order.
PyTorch: torch.compile of a layer call (with or without a skip, in lanes or not; the first call's input has no gradient: five graphs for 17 calls) and of the
head with its losses, without a CUDA graph; frozen bf16 weights, fp32 adapters and bf16 products, scaled_dot_product_attention, fused AdamW. `origin` has the
head over the whole window as in parameter-golf, `chunk_head` over the chunk's rows only, as in Ingot. With --whole a step is a single graph, which took
longer than 85 s to compile on an H200's machine. Compilation is not counted. Peers start together with Ingot and take their turns between Ingot's two rounds,
one at a time; Ingot's second round runs alone. If no peer compiles within --limit, `origin` runs uncompiled (`eager_origin`), and the report says why the
other peers are absent. Tests check the computed values (engines/ttt); these are times only.
"""
import argparse
import contextlib
import json
import math
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from gpu_common import IN_MEMORY, LATE, ROOT, SHARE, Child, Native, begin, cached_graphs, ceilings, gpu_state, median, print_end, describe, share, turn, use_one_thread  # noqa: E402
from torch_gpt import TorchGpt, compiled, spec  # noqa: E402

PRESET = json.loads((ROOT / "presets" / "golf.json").read_text(encoding="utf-8"))
DOCUMENTS, CHUNK, WINDOW, RANK, WHOLE = 64, 32, 2048, 96, 12
NAME = "golf, 17 applications, a step of 64 whole windows"
PEERS = ("origin", "chunk_head")
EAGER_SECONDS = 40


# --- Ingot ---
def write_documents(folder, length, vocab):
    """Shards to score: documents with the given number of targets each, random tokens after the token 0, which starts a document."""
    folder.mkdir()
    ids = torch.randint(1, vocab, (DOCUMENTS, length), generator=torch.Generator().manual_seed(length)).to(torch.int16)
    ids[:, 0] = 0
    ids = torch.cat([ids.flatten(), torch.zeros(1, dtype=torch.int16)])  # the start of the next document is the last target of the previous document
    (folder / "random_val_000000.bin").write_bytes(struct.pack("<256i", 20240520, 1, ids.numel(), *[0] * 253) + bytes(ids.untyped_storage()))


def make_run(options, folder):
    """A run of one step of golf, whose tokenizer starts documents with the token 0."""
    vocab, draw = PRESET["model"]["vocab"], random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(3, 9))) for _ in range(2 * vocab)]
    (folder / "words.txt").write_text(" ".join(draw.choices(words, k=25 * vocab)), encoding="utf-8")
    shards = folder / "shards"
    write_documents(shards, 512, vocab)
    (shards / "random_val_000000.bin").replace(shards / "random_train_000000.bin")
    (shards / "random_val_000000.bin").write_bytes((shards / "random_train_000000.bin").read_bytes())
    for line in (["tokenizer", "train", "--data", folder / "words.txt", "--vocab", str(vocab), "--out", folder / "tokenizer.json"],
                 ["train", "--preset", "golf", "--data", shards, "--tokenizer", folder / "tokenizer.json", "--out", folder / "run", "--steps", "1",
                  "--accumulation", "1", "--batch-tokens", "8192", "--device", options.device, "--set", "model.loop_from=0", *options.shrink]):
        run_ingot(options, line)
    return folder / "run"


def run_ingot(options, line):
    done = subprocess.run([options.ingot, *line], capture_output=True, text=True, timeout=options.limit)
    if done.returncode != 0:
        raise RuntimeError(f"ingot {line[0]}: {done.stderr.strip()[-400:]}")
    return done.stdout


def score(options, run, data, *more):
    line = ["eval", run, "--data", data, "--ttt", "--ttt-documents", str(DOCUMENTS), "--ttt-chunk", str(CHUNK), "--ttt-window",
            str(options.window), "--ttt-rank", str(options.rank), "--device", options.device, "--json", *more]
    return json.loads(run_ingot(options, line))


def ours_round(options, run, folder, *more):
    """Seconds of a step with whole windows and of the whole run, and the number of tokens processed."""
    found = score(options, run, folder / "documents", *more)
    whole = found["ttt"]["whole_windows"]
    assert whole["window_tokens"] == WHOLE * DOCUMENTS * options.window, whole
    return {"step": whole["seconds"] / WHOLE, "run": found["seconds"], "run_tokens": found["ttt"]["window_tokens"], "loss": found["loss"]}


# --- PyTorch ---
class AdaptedGpt(TorchGpt):
    """Documents as rows of the batch, each with separate adapters in every layer call: x (B, T, C), a (B, R, C), b (B, N, R)."""

    def adapters(self, documents, rank, looping, device):
        c, kv = self.c, self.kv
        widths = {"q": self.q, "k": kv, "v": kv, "o": c.dim, "mlp": c.dim}
        draw = torch.Generator(device=device).manual_seed(1)

        def pair(out):
            a = (2 * torch.rand(rank, c.dim, generator=draw, device=device) - 1) / math.sqrt(c.dim)
            return [torch.nn.Parameter(a.expand(documents, -1, -1).clone()), torch.nn.Parameter(torch.zeros(documents, out, rank, device=device))]
        program = self.looping_program if looping else self.program
        return [{name: pair(out) for name, out in widths.items()} for _ in program], pair(c.vocab)

    def norm(self, x, p, which, layer):
        return F.rms_norm(x, (x.shape[-1],), None, self.c.norm_eps) * p["layer_scale"][layer].to(x.dtype)

    def layer_scale_of(self, i):
        return getattr(self, f"layer_scale_{i}") if i else torch.ones_like(self.layer_scale_1)

    @staticmethod
    def low(x, pair):
        a, b = (t.to(x.dtype) for t in pair)
        return torch.bmm(torch.bmm(x, a.mT), b.mT)

    def adapted_attention(self, n, p, layer, slot):
        c, (b, t, _) = self.c, n.shape
        q, k, v = F.linear(n, p["qkv"][layer]).split([self.q, self.kv, self.kv], -1)
        q, k, v = q + self.low(n, slot["q"]), k + self.low(n, slot["k"]), v + self.low(n, slot["v"])
        q, k, v = q.view(b, t, c.heads, -1), k.view(b, t, c.kv_heads, -1), v.view(b, t, c.kv_heads, -1)
        q, k = F.rms_norm(q, (c.head_dim,), eps=c.norm_eps), F.rms_norm(k, (c.head_dim,), eps=c.norm_eps)
        q, k = self.rope(q, None), self.rope(k, None)
        q = q * p["attn_q_gain"][layer][:, None].to(q.dtype)
        y = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None).transpose(1, 2)
        g = y.reshape(b, t, c.kv_heads, -1, c.head_dim)
        u = F.normalize(v, dim=-1).unsqueeze(-2)
        y = g - (g * u).sum(-1, keepdim=True) * u
        return F.linear(y.reshape(b, t, -1), p["attn_o"][layer]) + self.low(n, slot["o"])

    def branches(self, p, layer, slots):
        slot = slots.pop(0)

        def attn(x):
            return p["attn_scale"][layer] * self.adapted_attention(self.norm(x, p, "attn_norm", layer), p, layer, slot)

        def mlp(x):
            n = self.norm(x, p, "mlp_norm", layer)
            return p["mlp_scale"][layer] * (F.linear(self.activation(F.linear(n, p["mlp_up"][layer])), p["mlp_down"][layer]) + self.low(n, slot["mlp"]))
        return attn, mlp

    def application(self, lanes, x0, skip, p, slot):
        """One layer call on the stream (x,) or on two lanes. The function depends only on a layer's tensors, so that all layers share a graph."""
        attn, mlp = self.branches(p, 0, [slot])
        x = lanes[0]
        if skip is not None:
            out, w, gate = skip
            x = torch.lerp(w * out, x, torch.sigmoid(gate).expand_as(x))
        mixed = p["resid_mix"][0][0] * x + p["resid_mix"][0][1] * x0
        if len(lanes) == 1:
            x = mixed + attn(mixed)
            return (x + mlp(x),)
        ya, yb, r, l = attn(mixed), mlp(lanes[1]), p["resid_lambdas"][0], p["post_lambdas"][0]
        return r[0] * x + l[0, 0] * ya + l[1, 0] * yb, r[1] * lanes[1] + l[0, 1] * ya + l[1, 1] * yb

    def forward(self, tokens, targets, chunk, slots, head, chunk_head):
        """The losses of the last `chunk` tokens of each row (B, chunk)."""
        c = self.c
        assert c.resid_mix and c.skip_gates and c.embed_norm and c.layer_scale and not c.norm_weight and not c.learned_positions and c.lane_output == "mean"
        per_layer = {a for a, i, _ in self.places.values() if i is not None}
        banks = {a: self.layers_of(a) for a in per_layer}
        x = F.rms_norm(self.tok_emb[tokens], (c.dim,), eps=c.norm_eps)
        x0, lanes, outputs = x, (x,), []
        for a, slot in zip(self.looping_program, slots):
            if a.lanes and len(lanes) == 1:
                lanes = (lanes[0], lanes[0].view_as(lanes[0]))  # a separate tensor: the same tensor twice would make another graph
            p = {name: [bank[a.layer]] for name, bank in banks.items()}
            p |= {"layer_scale": [self.layer_scale_of(a.layer)]}
            if a.lanes:
                p |= {"resid_lambdas": [self.parallel_resid_lambdas[a.layer]], "post_lambdas": [self.parallel_post_lambdas[a.layer]]}
            skip = (outputs[a.skip_from], self.skip_weights[a.skip_slot], self.skip_gates[a.skip_slot]) if a.skip_slot >= 0 else None
            lanes = self.application(lanes, x0, skip, p, slot)
            outputs.append(lanes[0])
        return self.losses(lanes, targets, chunk, head, chunk_head)

    def losses(self, lanes, targets, chunk, head, chunk_head):
        x = lanes[0] if len(lanes) == 1 else 0.5 * (lanes[0] + lanes[1])
        f = F.rms_norm(x, (self.c.dim,), eps=self.c.norm_eps)
        if chunk_head:
            f, targets = f[:, -chunk:], targets[:, -chunk:]
        l = F.linear(f, self.tok_emb) + self.low(f, head)
        l = self.c.softcap * torch.tanh(l / self.c.softcap)
        return F.cross_entropy(l.flatten(0, 1).float(), targets.flatten(), reduction="none").view(targets.shape)[:, -chunk:]


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def measure_torch(options, held):
    """Seconds of a step, forward, backward and AdamW, at whole windows. `held` receives the turn."""
    device = options.device
    use_one_thread()
    torch.manual_seed(0)
    config = spec.GptConfig.from_dict({**PRESET["model"], **dict(options.model)})
    model = AdaptedGpt(config, spec.initialise(config, 1, torch.float32), options.window).to(device=device, dtype=torch.bfloat16).requires_grad_(False)
    slots, head = model.adapters(DOCUMENTS, options.rank, True, device)
    parameters = [t for slot in slots for pair in slot.values() for t in pair] + head
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.0, 0.999), eps=1e-10, weight_decay=0.5, fused=device == "cuda")
    tokens, targets = (torch.randint(config.vocab, (DOCUMENTS, options.window), device=device) for _ in range(2))
    compiling = []

    def run_when():
        if SHARE:  # the graph is in PyTorch's cache now
            raise SystemExit(0)
        compiling.append(time.perf_counter() - started)
        held.enter_context(turn(options.gate))
    forward = model
    if options.whole and not options.eager:
        forward = compiled(model, run_when)
    else:  # the last graph to compile needs the results of the first graph
        held.enter_context(turn(options.gate))
    started = time.perf_counter()
    if not options.whole and not options.eager:
        model.application, model.losses = (compiled(f, lambda: None) for f in (model.application, model.losses))

    def step():
        losses = forward(tokens, targets, CHUNK, slots, head, options.child == "chunk_head")
        scored = losses.detach().sum().item()
        losses.mean(1).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return scored
    first = step()
    if SHARE:
        raise SystemExit(0)
    found = {"compile_s": sum(compiling) or time.perf_counter() - started, "loss": first / (DOCUMENTS * CHUNK), "graphs_from_cache": cached_graphs()}
    seen = []
    for _ in range(options.steps + 2):
        begin = time.perf_counter()
        assert math.isfinite(step())
        synchronize(device)
        seen.append(time.perf_counter() - begin)
    found["step"] = median(seen[2:])
    if device == "cuda":
        found["allocated_bytes"] = torch.cuda.max_memory_allocated()
    return found


@contextlib.contextmanager
def started_children(wanted, options, eager=False):
    """A process for each peer; all are ended."""
    children = {peer: start_child(peer, options, eager) for peer in wanted}
    try:
        yield children
    finally:
        for child in children.values():
            child.kill()


def start_child(peer, options, eager=False):
    line = [sys.executable, __file__, "--native", options.native, "--child", peer, "--steps", str(options.steps), "--gate", options.gate or "", *["--whole"] * options.whole,
            *["--eager"] * eager]
    return Child(line)


def flops_of_a_token(config):
    """Operations of a window's token, forward and backward without base gradients, in a whole window: base products, half of attention's square,
    adapters with their gradients. Only unavoidable operations count, so the head is left out, of which a 64th remains."""
    c = config
    q, kv = c["heads"] * c["head_dim"], c["kv_heads"] * c["head_dim"]
    base = c["dim"] * (q + 2 * kv) + q * c["dim"] + 2 * c["dim"] * c["mlp_hidden"]
    adapters = RANK * (5 * c["dim"] + q + 2 * kv + 2 * c["dim"])
    return 17 * (4 * base + 6 * adapters + 3.5 * 4 * q * WINDOW / 2)


def parsed():
    parser = argparse.ArgumentParser()
    parser.add_argument("--native", required=True)
    parser.add_argument("--ingot", type=pathlib.Path, help="the program (default: beside the library)")
    parser.add_argument("--only", choices=PEERS, help="one peer alone, and no report")
    parser.add_argument("--ours-alone", action="store_true", help="no peer, and no report")
    parser.add_argument("--limit", type=float, default=150, help="seconds from its start after which a peer is given up; a run of ours may take as many (default: 150)")
    parser.add_argument("--wait-for", type=pathlib.Path, metavar="FILE", help="measure when FILE is there: the peers compile meanwhile, which takes minutes and "
                        "needs no GPU to itself")
    parser.add_argument("--whole", action="store_true", help="a step of the peers as one graph, which takes minutes to compile")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each peer (default: 8)")
    parser.add_argument("--child", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--eager", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--gate", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.ingot = (options.ingot or pathlib.Path(options.native).parent / "ingot").resolve()
    options.device, options.model, options.shrink, options.window, options.rank = "cuda", (), (), WINDOW, RANK
    return options


def measure(options, wanted):
    """Ingot's rounds, one of them with attention in any order; the result of each peer or its reason for having none; the ceilings; the GPU's earlier state."""
    started, tokens, ours, peers, absent = time.monotonic(), DOCUMENTS * WINDOW, [], {}, {}

    def say(text):
        print(f"[{time.monotonic() - started:.0f} s] {text}", flush=True)

    def go_round(folder, *more):
        found = ours_round(options, folder / "run", folder, *more)
        say(f"ours{' '.join(['', *more])}: a step {1e3 * found['step']:.1f} ms, {tokens / found['step'] * 1e-6:.3f} M window tokens/s; all of it "
            f"{found['run']:.2f} s, {found['run_tokens'] / found['run'] * 1e-6:.3f} M/s, loss {found['loss']:.4f}")
        return found

    def take(name, process, until):
        found, reason = process.end(until)
        if reason:
            absent[name] = reason
            return say(f"{name}: {reason}")
        peers[name] = found
        say(f"PyTorch, {name}: a step {1e3 * found['step']:.1f} ms, {tokens / found['step'] * 1e-6:.3f} M window tokens/s, after {found['compile_s']:.0f} s, "
            f"{found['graphs_from_cache']} graphs from PyTorch's cache, {found['allocated_bytes'] / 2**30:.1f} GiB, loss {found['loss']:.4f}")
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as temporary, contextlib.ExitStack() as held:
        folder = pathlib.Path(temporary)
        options.gate = str(folder / "gate")
        with turn(options.gate):
            children = held.enter_context(started_children(wanted, options))
            ceiling = {} if options.ours_alone else ceilings(Native(options.native))
            torch.cuda.empty_cache()
            before = gpu_state()
            make_run(options, folder)
            write_documents(folder / "documents", WINDOW + CHUNK * (1 + WHOLE), PRESET["model"]["vocab"])
            ours.append(go_round(folder))
            any_order = go_round(folder, "--ttt-any-order")
            while options.wait_for and not options.wait_for.exists():
                time.sleep(0.1)
        for peer, process in children.items():
            take(f"compile_{peer}", process, started + options.limit)
        if wanted and not peers:  # a result without compilation is better than none
            with started_children(wanted[:1], options, eager=True) as uncompiled:
                take(f"eager_{wanted[0]}", uncompiled[wanted[0]], time.monotonic() + EAGER_SECONDS)
        if options.ours_alone or peers:
            ours.append(go_round(folder))
    return ours, any_order, peers, absent, ceiling, before


def row_of(ours, any_order, peers, ceiling):
    tokens, us = DOCUMENTS * WINDOW, 1e6 * sum(r["step"] for r in ours) / len(ours)
    run = sorted(ours, key=lambda r: r["run"])[len(ours) // 2]
    return {"name": NAME, "shape": [DOCUMENTS, WINDOW], "dtype": "bf16", "ours_us": us, "peers": {p: 1e6 * f["step"] for p, f in peers.items()},
            "limit_us": tokens * flops_of_a_token(PRESET["model"]) / ceiling["bf16_TFLOPs"] * 1e-6,
            "window_tokens_per_second": {"ours": tokens / us * 1e6, **{p: tokens / f["step"] for p, f in peers.items()}},
            "run": {"window_tokens": run["run_tokens"], "seconds": run["run"], "window_tokens_per_second": run["run_tokens"] / run["run"]},
            "compile_seconds": {p: f["compile_s"] for p, f in peers.items()}, "allocated_bytes": {p: f["allocated_bytes"] for p, f in peers.items()},
            "rounds_ms": [1e3 * r["step"] for r in ours], "any_order_us": 1e6 * any_order["step"]}


def main():
    options = parsed()
    if options.child:
        with contextlib.ExitStack() as held:
            print(json.dumps(measure_torch(options, held)), flush=True)
            os._exit(0)  # the next peer's turn begins when this peer's memory is free
    wanted = () if options.ours_alone else [options.only] if options.only else PEERS
    if SHARE:
        for peer in share(wanted):
            print(peer, "compiled", start_child(peer, options).end(time.monotonic() + 1500), flush=True)
        return
    options.quick, options.of_quick, options.only = options.ours_alone or options.only is not None, None, None  # a choice of peers makes no report
    report = begin("ttt", options, (NAME,), str)
    for name in report.fitting():
        begun, limit = report.now(), options.limit
        options.limit = report.at_most(limit)
        ours, any_order, peers, absent, ceiling, before = measure(options, wanted)
        if not report.writes or (LATE in absent.values() and options.limit < limit):  # the time of this call was too short for a peer, not the peer too slow
            continue
        describe(report, ceiling, before, absent=absent)
        report.add([row_of(ours, any_order, peers, ceiling)], name=name, seconds=report.now() - begun)
    print_end(report)


if __name__ == "__main__":
    main()
