#!/usr/bin/env python3
"""Fits an image with a small MLP, colour = f(position), by ingot.nn.FusedMLP; on a GPU also by torch.compile of the same layers.

    python examples/neural_image.py                    # an image made here; on the GPU where there is one
    python examples/neural_image.py --image photo.png --steps 4000
    python examples/neural_image.py --device cpu --size 96 --steps 200

Writes neural_image.png (the image, Ingot's fit) and neural_image.svg (loss over time). Needs PyTorch and ingot only.
"""
import argparse
import math
import pathlib
import struct
import time
import zlib

import torch
from torch import nn

from ingot.nn import FusedMLP


# --- images -----------------------------------------------------------------------------------------------------------


def made_image(size):
    """(size, size, 3) in [0, 1]: smooth colours, rings that become finer outwards, and hard edges."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    radius, angle = torch.hypot(x, y), torch.atan2(y, x)
    rings = 0.5 + 0.5 * torch.cos(18 * radius**2 + 3 * angle)
    colours = torch.stack([0.5 + 0.5 * torch.sin(2.5 * x + 1), 0.5 + 0.5 * torch.sin(3 * y - x), 0.5 + 0.5 * torch.cos(2 * x * y + 2)], -1)
    image = colours * (0.35 + 0.65 * rings.unsqueeze(-1))
    image[(torch.hypot(x - 0.35, y + 0.3) < 0.25)] = torch.tensor([0.95, 0.35, 0.2])
    image[(x.abs() + (y - 0.5).abs() < 0.22)] = torch.tensor([0.1, 0.2, 0.45])
    return image.clamp(0, 1)


def write_png(path, image):
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).cpu()
    rows = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in pixels)

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def unfilter(kind, row, above, step):
    """Undoes one of PNG's five row filters, in place."""
    for i in range(len(row)):
        left = row[i - step] if i >= step else 0
        up, corner = above[i], above[i - step] if i >= step else 0
        if kind == 1:
            guess = left
        elif kind == 2:
            guess = up
        elif kind == 3:
            guess = (left + up) // 2
        else:  # Paeth: the neighbour nearest to left + up - corner
            target = left + up - corner
            guess = min((left, up, corner), key=lambda n: abs(target - n))
        row[i] = (row[i] + guess) & 255


def read_png(path):
    """8-bit grey or RGB, with or without alpha; alpha is dropped. An image that cannot be read ends the program with one line."""
    try:
        return decode_png(path, path.read_bytes())
    except OSError as e:
        raise SystemExit(f"{path}: {e.strerror}, expected a PNG file") from None
    except (struct.error, zlib.error):
        raise SystemExit(f"{path}: found a PNG that is damaged or ends early") from None


def decode_png(path, data):
    if data[:8] != b"\x89PNG\r\n\x1a\n":
        raise SystemExit(f"{path}: found no PNG signature, expected a PNG file")
    at, compressed = 8, b""
    width = height = depth = colour = interlaced = 0
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", body)
        elif kind == b"IDAT":
            compressed += body
        at += 12 + length
    channels = {0: 1, 2: 3, 4: 2, 6: 4}.get(colour)
    if depth != 8 or channels is None or interlaced:
        raise SystemExit(f"{path}: found {depth} bits, colour type {colour}, interlacing {interlaced}; expected 8 bits, grey or RGB, none")
    raw, stride = zlib.decompress(compressed), width * channels
    if not width * height or len(raw) != height * (stride + 1):
        raise SystemExit(f"{path}: found {len(raw)} bytes of {width} x {height} pixels, expected {height * (stride + 1)}")
    above, rows = bytearray(stride), []
    for r in range(height):
        start = r * (stride + 1)
        row = bytearray(raw[start + 1 : start + 1 + stride])
        if raw[start]:
            unfilter(raw[start], row, above, channels)
        rows.append(row)
        above = row
    image = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(height, width, channels).float() / 255
    return image[..., :1].expand(-1, -1, 3) if channels < 3 else image[..., :3]


# --- the model --------------------------------------------------------------------------------------------------------

FREQUENCIES = 10  # 2 coordinates, sine and cosine: 40 features, a multiple of 8
COLOURS = 8  # three are used; widths on a GPU are multiples of 8


def features(position):
    """(N, 2) in [-1, 1] -> (N, 40): sines and cosines of doubling frequencies."""
    scale = math.pi * 2.0 ** torch.arange(FREQUENCIES, device=position.device)
    angle = position.unsqueeze(-1) * scale / 2
    return torch.cat((angle.sin(), angle.cos()), -1).flatten(1)


def layers(width, depth):
    sizes = [4 * FREQUENCIES] + [width] * (depth - 1) + [COLOURS]
    stack = [m for k, n in zip(sizes, sizes[1:]) for m in (nn.Linear(k, n), nn.SiLU())]
    return nn.Sequential(*stack[:-1])


def fit(name, model, run, x, target, steps, batch):
    """Trains `run` (model, perhaps compiled) for `steps`; returns [(seconds, loss)], the first steps before the clock starts."""
    device = x.device
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=device.type == "cuda")
    generator = torch.Generator(device).manual_seed(1)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    initial = {k: v.clone() for k, v in model.state_dict().items()}

    def step():
        chosen = torch.randint(0, x.shape[0], (batch,), device=device, generator=generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            colour = run(x[chosen])[:, :3]
        loss = (colour.float() - target[chosen]).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(5):  # compilation and the allocator's first blocks; not part of the curve
        step()
    model.load_state_dict(initial)
    optimizer.state.clear()
    generator.manual_seed(1)
    synchronize()
    history, start, every = [], time.perf_counter(), max(1, steps // 60)
    for i in range(steps):
        loss = step()
        if i % every == every - 1 or i == steps - 1:
            synchronize()
            history.append((time.perf_counter() - start, loss.item()))
    print(f"{name}: {steps} steps of {batch} pixels in {history[-1][0]:.2f} s, {history[-1][0] / steps * 1e6:.0f} us a step, "
          f"loss {history[-1][1]:.2e}")
    return history


# --- the plot ---------------------------------------------------------------------------------------------------------


def write_svg(path, curves, title):
    """Loss (logarithmic) over seconds, one line per (name, colour, history)."""
    width, height, left, bottom, top = 720, 420, 70, 50, 40
    seconds = max(h[-1][0] for _, _, h in curves)
    losses = [loss for _, _, h in curves for _, loss in h]
    low, high = math.log10(min(losses)) - 0.05, math.log10(max(losses)) + 0.05

    def px(t):
        return left + t / seconds * (width - left - 20)

    def py(loss):
        return top + (high - math.log10(loss)) / (high - low) * (height - top - bottom)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">',
           f'<rect width="{width}" height="{height}" fill="#fff"/><text x="{left}" y="22" font-size="15">{title}</text>',
           f'<path d="M{left} {top}V{height - bottom}H{width - 20}" fill="none" stroke="#444"/>']
    ticks = [a * 10.0**b for b in range(math.floor(low), math.ceil(high) + 1) for a in (1, 2, 5) if low <= math.log10(a * 10.0**b) <= high]
    for tick in ticks:
        out.append(f'<path d="M{left} {py(tick):.1f}H{width - 20}" stroke="#ddd"/><text x="{left - 8}" y="{py(tick) + 4:.1f}" '
                   f'text-anchor="end">{tick:.0e}</text>')
    for i in range(6):
        t = seconds * i / 5
        out.append(f'<text x="{px(t):.1f}" y="{height - bottom + 18}" text-anchor="middle">{t:.2g}</text>')
    out.append(f'<text x="{(left + width) / 2}" y="{height - 10}" text-anchor="middle">seconds</text>')
    for i, (name, colour, history) in enumerate(curves):
        points = " ".join(f"{px(t):.1f},{py(loss):.1f}" for t, loss in history)
        out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
                   f'<text x="{width - 30}" y="{top + 18 + 18 * i}" fill="{colour}" text-anchor="end">{name}</text>')
    path.write_text("\n".join(out) + "\n</svg>\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", type=pathlib.Path, help="a PNG; one is made where this is left out")
    parser.add_argument("--size", type=int, default=256, help="edge of the made image (default 256)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="default 2000 on a GPU, 300 on a CPU")
    parser.add_argument("--batch", type=int, help="pixels a step; default 65536 on a GPU, 4096 on a CPU")
    parser.add_argument("--width", type=int, help="hidden width; default 128 on a GPU, 64 on a CPU")
    parser.add_argument("--depth", type=int, default=4, help="layers (default 4)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."), help="folder of the results")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="fit with torch.compile too (default: on a GPU)")
    options = parser.parse_args()
    try:
        device = torch.zeros(0, device=options.device).device
    except (RuntimeError, AssertionError) as e:
        parser.error(f"--device: found {options.device}, expected one that PyTorch has here ({str(e).splitlines()[0]})")
    for name, found in (("size", options.size), ("steps", options.steps), ("batch", options.batch), ("width", options.width)):
        if found is not None and found < 1:
            parser.error(f"--{name}: found {found}, expected at least 1")
    if not 1 <= options.depth <= 8:
        parser.error(f"--depth: found {options.depth}, expected 1 to 8")
    options.out.mkdir(parents=True, exist_ok=True)
    on_gpu = device.type == "cuda"
    steps = options.steps or (2000 if on_gpu else 300)
    batch = options.batch or (65536 if on_gpu else 4096)

    image = (read_png(options.image) if options.image else made_image(options.size)).to(device)
    height, width = image.shape[:2]
    y, x = torch.meshgrid(torch.linspace(-1, 1, height, device=device), torch.linspace(-1, 1, width, device=device), indexing="ij")
    inputs, target = features(torch.stack((x, y), -1).view(-1, 2)), image.reshape(-1, 3)

    torch.manual_seed(0)
    plain = layers(options.width or (128 if on_gpu else 64), options.depth).to(device)
    fused = FusedMLP.from_sequential(plain)  # the same weights
    print(f"{width} x {height} pixels on {device}, {fused}")
    curves = [("Ingot", "#c2410c", fit("ingot", fused, fused, inputs, target, steps, batch))]
    if on_gpu if options.compile is None else options.compile:
        curves.append(("torch.compile", "#1d4ed8", fit("torch.compile", plain, torch.compile(plain), inputs, target, steps, batch)))

    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
        fitted = torch.cat([fused(part)[:, :3].float() for part in inputs.split(1 << 18)]).view(height, width, 3)
    error = (fitted - image).square().mean().item()
    write_png(options.out / "neural_image.png", torch.cat((image, fitted), 1))
    write_svg(options.out / "neural_image.svg", curves, f"Fitting {width} x {height} pixels, batches of {batch}")
    print(f"PSNR {-10 * math.log10(error):.1f} dB; wrote {options.out / 'neural_image.png'} and {options.out / 'neural_image.svg'}")


if __name__ == "__main__":
    main()
