#!/usr/bin/env python3
"""Trains a small Llama-shaped model twice from the same start: by PyTorch's own operations and by Ingot's RMSNorm, rotary embedding, SwiGLU,
linear + cross entropy and Muon. Compares loss curves, tokens/s and peak memory; on a GPU also with torch.compile.

    python examples/llama.py                              # on a GPU: about a minute
    python examples/llama.py --device cpu --steps 20      # a tiny model
    python examples/llama.py --text book.txt --steps 500

Writes llama.svg (losses over steps) and llama.json (the numbers). Text: the Python library's own sources where none is named, cut into words and
marks, of which the most frequent have ids. Needs PyTorch 2.9 (for its Muon) and ingot.
"""
import argparse
import collections
import json
import pathlib
import re
import sysconfig
import time

import torch
import torch.nn.functional as F
from torch import nn

import ingot
from ingot import functional as fused

# --- text -------------------------------------------------------------------------------------------------------------


def library_text(most):
    """The sources of Python's library in the order of their names, up to `most` characters."""
    parts, size = [], 0
    for path in sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if size >= most:
            break
        if "site-packages" not in path.parts:
            parts.append(path.read_text(encoding="utf-8", errors="replace"))
            size += len(parts[-1])
    return "\n".join(parts)[:most]


def ids_of(text, vocab):
    """Words, runs of blanks and single marks as ids; 0 stands for the rare ones."""
    pieces = re.findall(r"\w+|\s+|[^\w\s]", text)
    known = {piece: i + 1 for i, (piece, _) in enumerate(collections.Counter(pieces).most_common(vocab - 1))}
    return torch.tensor([known.get(piece, 0) for piece in pieces])


# --- the model, of PyTorch's parts or of Ingot's ----------------------------------------------------------------------


class PlainSwiGLU(nn.Module):
    """ingot.nn.SwiGLU's parameters, PyTorch's operations."""

    def __init__(self, width, hidden):
        super().__init__()
        self.w12, self.w3 = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        gate, up = self.w12(x).chunk(2, -1)
        return self.w3(F.silu(gate) * up)


class PlainLoss(nn.Linear):
    """ingot.nn.LinearCrossEntropy's parameters, PyTorch's operations."""

    def __init__(self, width, vocab):
        super().__init__(width, vocab, bias=False)

    def forward(self, x, target):
        return F.cross_entropy(super().forward(x).float().flatten(0, -2), target.flatten())


def plain_rope(x, cos, sin):
    a, b = x.float().chunk(2, -1)
    cos, sin = cos[: x.shape[1], None], sin[: x.shape[1], None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


PARTS = {
    "PyTorch": dict(norm=nn.RMSNorm, gated=PlainSwiGLU, loss=PlainLoss, rope=plain_rope),
    "Ingot": dict(norm=ingot.nn.RMSNorm, gated=ingot.nn.SwiGLU, loss=ingot.nn.LinearCrossEntropy, rope=fused.rope),
}


class Block(nn.Module):
    def __init__(self, parts, width, heads, hidden):
        super().__init__()
        self.heads, self.rope = heads, parts["rope"]
        self.attention_norm, self.mlp_norm = parts["norm"](width, eps=1e-5), parts["norm"](width, eps=1e-5)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = parts["gated"](width, hidden)

    def forward(self, x, cos, sin):
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k = self.rope(q, cos, sin), self.rope(k, cos, sin)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, parts, vocab, width, layers, heads, hidden, context):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(parts, width, heads, hidden) for _ in range(layers))
        self.norm, self.head = parts["norm"](width, eps=1e-5), parts["loss"](width, vocab)
        cos, sin = fused.rope_table(context, width // heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids, target):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x), target)


# --- training ---------------------------------------------------------------------------------------------------------


class Trained:
    """The model in its working type and fp32 masters of all parameters, which the optimizers step: Muon for the blocks' matrices, AdamW for
    the rest."""

    def __init__(self, model, by, lr):
        self.parameters = list(model.parameters())
        self.masters = [p.detach().float().clone() for p in self.parameters]
        inner = {id(p) for block in model.blocks for p in block.parameters() if p.dim() == 2}
        matrices = [m for m, p in zip(self.masters, self.parameters) if id(p) in inner]
        others = [m for m, p in zip(self.masters, self.parameters) if id(p) not in inner]
        same = dict(weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        if by == "Ingot":
            self.optimizers = [ingot.optim.Muon([{"params": matrices, "lr": lr}, {"params": others, "lr": lr, "use_muon": False}], **same)]
        else:
            self.optimizers = [torch.optim.Muon(matrices, lr=lr, **same), torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)]

    @torch.no_grad()
    def step(self):
        for master, p in zip(self.masters, self.parameters):
            master.grad, p.grad = p.grad.float(), None
        for optimizer in self.optimizers:
            optimizer.step()
        torch._foreach_copy_(self.parameters, self.masters)


def train(name, by, compiled, start, batches, options, device):
    """Losses by step, tokens/s without the first steps, and the largest memory of a step."""
    on_gpu = device.type == "cuda"
    torch._dynamo.reset()
    model = Llama(PARTS[by], options.vocab, options.width, options.layers, options.heads, options.hidden, options.context)
    model.load_state_dict(start)
    model = model.to(device, torch.bfloat16 if on_gpu else torch.float32)
    model.cos, model.sin = model.cos.float(), model.sin.float()
    trained, run = Trained(model, by, options.lr), torch.compile(model) if compiled else model
    losses, warm, begin = [], min(10, len(batches) // 4), 0.0
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    for i, (ids, target) in enumerate(batches):
        if i == warm:
            synchronize()
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
        loss = run(ids, target)
        loss.backward()
        trained.step()
        losses.append(loss.detach())
    synchronize()
    rate = (len(batches) - warm) * batches[0][0].numel() / (time.perf_counter() - begin)
    memory = torch.cuda.max_memory_allocated() if on_gpu else 0
    losses = torch.stack(losses).float().cpu().tolist()
    print(f"{name:24} {rate:10,.0f} tokens/s" + (f"  {memory / 1e9:5.2f} GB at most" if on_gpu else "")
          + f"  loss {losses[0]:.4f} to {sum(losses[-5:]) / len(losses[-5:]):.4f}", flush=True)
    return {"name": name, "tokens_per_s": rate, "peak_bytes": memory, "losses": losses}


# --- the plot ---------------------------------------------------------------------------------------------------------

COLOURS = {"PyTorch": "#1d4ed8", "PyTorch, torch.compile": "#0e7490", "Ingot": "#c2410c", "Ingot, torch.compile": "#a16207"}


def write_svg(path, runs, title):
    """Losses over steps, one line per run: each line has its own dash pattern, because the lines coincide."""
    width, height, left, bottom, top = 760, 420, 60, 50, 40
    steps = len(runs[0]["losses"])
    low, high = 0.98 * min(min(r["losses"]) for r in runs), 1.02 * max(max(r["losses"]) for r in runs)

    def px(i):
        return left + i / max(1, steps - 1) * (width - left - 20)

    def py(loss):
        return top + (high - loss) / (high - low) * (height - top - bottom)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">',
           f'<rect width="{width}" height="{height}" fill="#fff"/><text x="{left}" y="22" font-size="15">{title}</text>',
           f'<path d="M{left} {top}V{height - bottom}H{width - 20}" fill="none" stroke="#444"/>']
    for tick in range(int(low) + 1, int(high) + 1):
        out.append(f'<path d="M{left} {py(tick):.1f}H{width - 20}" stroke="#ddd"/><text x="{left - 8}" y="{py(tick) + 4:.1f}" '
                   f'text-anchor="end">{tick}</text>')
    for i in range(6):
        step = round((steps - 1) * i / 5)
        out.append(f'<text x="{px(step):.1f}" y="{height - bottom + 18}" text-anchor="middle">{step + 1}</text>')
    out.append(f'<text x="{(left + width) / 2}" y="{height - 10}" text-anchor="middle">step</text>')
    for i, run in enumerate(runs):
        colour = COLOURS[run["name"]]
        points = " ".join(f"{px(s):.1f},{py(loss):.1f}" for s, loss in enumerate(run["losses"]))
        memory = f", {run['peak_bytes'] / 1e9:.1f} GB" if run["peak_bytes"] else ""
        out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="6 {6 * (len(runs) - 1)}" '
                   f'stroke-dashoffset="{-6 * i}"/><text x="{width - 30}" y="{top + 18 + 18 * i}" fill="{colour}" text-anchor="end">'
                   f'{run["name"]}: {run["tokens_per_s"]:,.0f} tokens/s{memory}</text>')
    path.write_text("\n".join(out) + "\n</svg>\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--text", type=pathlib.Path, help="a file of text (default: the sources of Python's library)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, help="sequences a step; default 8 on a GPU, 2 on a CPU")
    parser.add_argument("--context", type=int, help="tokens of a sequence; default 2048 on a GPU, 64 on a CPU")
    parser.add_argument("--width", type=int, help="default 1024 on a GPU, 64 on a CPU")
    parser.add_argument("--layers", type=int, help="default 8 on a GPU, 2 on a CPU")
    parser.add_argument("--heads", type=int, help="default: of 64 numbers on a GPU, of 16 on a CPU")
    parser.add_argument("--hidden", type=int, help="of SwiGLU; default: 8/3 of the width, in whole 128s (on a CPU 8s)")
    parser.add_argument("--vocab", type=int, help="default 32768 on a GPU, 512 on a CPU")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."), help="folder of the results")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="with torch.compile too (default: on a GPU)")
    o = parser.parse_args()
    try:
        device = torch.zeros(0, device=o.device).device
    except (RuntimeError, AssertionError) as e:
        parser.error(f"--device: found {o.device}, expected one that PyTorch has here ({str(e).splitlines()[0]})")
    if not hasattr(torch.optim, "Muon"):
        parser.error(f"found PyTorch {torch.__version__}, expected 2.9 or later, which has Muon")
    on_gpu = device.type == "cuda"
    for name, gpu, cpu in (("batch", 8, 2), ("context", 2048, 64), ("width", 1024, 64), ("layers", 8, 2), ("vocab", 32768, 512)):
        setattr(o, name, getattr(o, name) if getattr(o, name) is not None else gpu if on_gpu else cpu)
    o.heads = o.heads or max(1, o.width // (64 if on_gpu else 16))
    multiple = 128 if on_gpu else 8
    o.hidden = o.hidden or (8 * o.width // 3 + multiple - 1) // multiple * multiple
    for name in ("steps", "batch", "context", "width", "layers", "heads", "hidden", "vocab"):
        if getattr(o, name) < 1:
            parser.error(f"--{name}: found {getattr(o, name)}, expected at least 1")
    if o.width % (2 * o.heads):
        parser.error(f"--heads: found {o.heads} of a width of {o.width}, expected heads of an even number of numbers")
    o.out.mkdir(parents=True, exist_ok=True)

    tokens = o.steps * o.batch * o.context
    try:
        text = o.text.read_text(encoding="utf-8", errors="replace") if o.text else library_text(min(12_000_000, 8 * tokens))
    except OSError as e:
        raise SystemExit(f"{o.text}: {e.strerror}, expected a file of text") from None
    ids = ids_of(text, o.vocab)
    if len(ids) <= o.context:
        raise SystemExit(f"{o.text}: found {len(ids)} words and marks, expected more than --context {o.context}")
    generator = torch.Generator().manual_seed(1)
    begins = torch.randint(0, len(ids) - o.context, (o.steps, o.batch), generator=generator)
    windows = ids[begins.unsqueeze(-1) + torch.arange(o.context + 1)].to(device)
    batches = [(w[:, :-1].contiguous(), w[:, 1:].contiguous()) for w in windows]

    torch.manual_seed(0)
    model = Llama(PARTS["PyTorch"], o.vocab, o.width, o.layers, o.heads, o.hidden, o.context)
    for p in model.parameters():
        if p.dim() == 2:
            nn.init.normal_(p, std=0.02)
    start = model.state_dict()
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {o.batch} x {o.context} tokens a step on "
          f"{torch.cuda.get_device_name(device) if on_gpu else device}")
    kinds = [("PyTorch", False), ("Ingot", False)]
    if on_gpu if o.compile is None else o.compile:
        kinds += [("PyTorch", True), ("Ingot", True)]
    shape = {name: getattr(o, name) for name in ("steps", "batch", "context", "width", "layers", "heads", "hidden", "vocab", "lr")}
    result = {"device": torch.cuda.get_device_name(device) if on_gpu else "cpu", "torch": torch.__version__, "ingot": ingot.__version__, **shape,
              "most_apart": 0.0, "runs": []}
    runs = result["runs"]
    for by, compiled in kinds:  # the results so far are kept, whether or not the next run succeeds
        runs.append(train(by + (", torch.compile" if compiled else ""), by, compiled, start, batches, o, device))
        result["most_apart"] = max((abs(a - b) for r in runs[1:] for a, b in zip(r["losses"], runs[0]["losses"])), default=0.0)
        (o.out / "llama.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        write_svg(o.out / "llama.svg", runs, f"Llama shape, {o.layers} layers of {o.width}, {result['device']}")
        if on_gpu:
            torch.cuda.empty_cache()
    print(f"losses of all runs are at most {result['most_apart']:.4f} apart at any step")
    print(f"wrote {o.out / 'llama.svg'} and {o.out / 'llama.json'}")


if __name__ == "__main__":
    main()
