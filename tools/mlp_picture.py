"""docs/mlp.svg from bench/results/h200/mlp.json: time over rows for Ingot and its peers, with the bound, one panel per pass. tools/report_tables.py
draws the picture together with the tables.
"""
import html
import json
import math

import reports

PICTURE = reports.ROOT / "docs" / "mlp.svg"
PANELS = [("MLP, 3 layers, forward", "3 layers, forward"), ("MLP, 3 layers, forward + backward", "3 layers, forward + backward"),
          ("MLP, 5 layers, forward", "5 layers, forward"), ("MLP, 5 layers, forward + backward", "5 layers, forward + backward")]
# The curves in order: name in the report, label, colour, dashes.
LINES = [("limit", "bound", "#777777", "5 4"), ("ours", "Ingot", "#0b6e4f", ""), ("origin", "origin (Triton)", "#c8553d", ""),
         ("torch_compile", "torch.compile", "#3d5a98", ""), ("torch_eager", "PyTorch", "#9a7aa0", "")]
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 400, 250, 64, 34, 36, 40


def series(report, name):
    """label -> [(rows, microseconds)] of the 128-wide f16 cases of one name."""
    chosen = sorted((r for r in report["results"] if r["name"] == name and r["dtype"] == "f16" and r["shape"][1] == 128),
                    key=lambda r: r["shape"][0])
    lines = {}
    for r in chosen:
        values = {"limit": r["limit_us"], "ours": r["ours_us"], **r["peers"]}
        for key, *_ in LINES:
            if key in values:
                lines.setdefault(key, []).append((r["shape"][0], values[key]))
    return lines


def ticks(low, high):
    return [10.0**e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]


class Panel:
    """Maps a data point to pixels; both axes are logarithmic."""

    def __init__(self, lines, x, y):
        points = [p for line in lines.values() for p in line]
        self.rows = sorted({p[0] for p in points})
        self.times = ticks(min(p[1] for p in points), max(p[1] for p in points))
        self.left, self.top = x + LEFT, y + TOP
        self.right, self.bottom = x + WIDTH - RIGHT, y + HEIGHT - BOTTOM

    def place(self, rows, time):
        def share(v, low, high):
            return (math.log(v) - math.log(low)) / (math.log(high) - math.log(low)) if high > low else 0.5
        return (self.left + share(rows, self.rows[0], self.rows[-1]) * (self.right - self.left),
                self.bottom - share(time, self.times[0], self.times[-1]) * (self.bottom - self.top))


def text(x, y, words, anchor="middle", size=11, colour="#444444"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{html.escape(words)}</text>'


def panel(lines, title, x, y):
    p = Panel(lines, x, y)
    yield text((p.left + p.right) / 2, p.top - 12, title, size=13, colour="#111111")
    for time in p.times:
        _, at = p.place(p.rows[0], time)
        yield f'<path d="M{p.left} {at:.1f}H{p.right}" stroke="#e4e4e4"/>'
        yield text(p.left - 6, at + 4, f"{time:g} µs", "end")
    for rows in p.rows:
        at, _ = p.place(rows, p.times[0])
        yield f'<path d="M{at:.1f} {p.top}V{p.bottom}" stroke="#f0f0f0"/>'
        yield text(at, p.bottom + 16, f"{rows:,}")
    yield text((p.left + p.right) / 2, p.bottom + 32, "rows")
    for key, _, colour, dashes in LINES:
        points = [p.place(*point) for point in lines.get(key, [])]
        if not points:
            continue
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
        yield (f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{2.4 if key == "ours" else 1.6}"'
               + (f' stroke-dasharray="{dashes}"' if dashes else "") + "/>")
        if not dashes:
            yield from (f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.6" fill="{colour}"/>' for a, b in points)


def picture(report):
    drawn = [(series(report, name), title) for name, title in PANELS]
    drawn = [(lines, title) for lines, title in drawn if lines]
    if not drawn:
        raise ValueError("mlp.json: found no 128-wide f16 cases of " + ", ".join(name for name, _ in PANELS))
    down = -(-len(drawn) // 2)
    width, height = 2 * WIDTH, down * HEIGHT + 54
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
           f'<rect width="{width}" height="{height}" fill="#ffffff"/>']
    for i, (lines, title) in enumerate(drawn):
        out += panel(lines, title, i % 2 * WIDTH, i // 2 * HEIGHT)
    used = [line for line in LINES if any(line[0] in lines for lines, _ in drawn)]
    for i, (_, label, colour, dashes) in enumerate(used):
        x, y = 70 + i * 132, down * HEIGHT + 16
        out.append(f'<path d="M{x} {y}h22" stroke="{colour}" stroke-width="2.4"' + (f' stroke-dasharray="{dashes}"' if dashes else "") + "/>")
        out.append(text(x + 28, y + 4, label, "start"))
    out.append(text(width / 2, height - 10, f"Whole MLPs, 128 wide, fp16, softplus; {report['gpu']}, CUDA-graph replay, {report['date']}"))
    return "\n".join(out + ["</svg>", ""])


def drawn():
    """The picture of the present report, or None without a report."""
    source = reports.RESULTS / "h200" / "mlp.json"
    return picture(json.loads(source.read_text(encoding="utf-8"))) if source.exists() else None
