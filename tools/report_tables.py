"""Writes the tables between `<!-- table:SUITE -->` and `<!-- /table -->` of a page from bench/results/<gpu>/SUITE.json.

    python3 tools/report_tables.py [--check] [README.md ...]     --check changes nothing and fails where a table is not current
"""
import pathlib
import re
import sys

import reports

MARKED = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)
PEERS = {"torch_eager": "PyTorch", "torch_compile": "torch.compile", "origin": "origin", "cublas": "cuBLAS"}


def table(report):
    peers = [p for p in PEERS if any(p in r["peers"] for r in report["results"])]
    ceilings = report["ceilings"]
    yield (f"{report['gpu']}, driver {report['driver']}, CUDA {report['cuda']}, {report['date']}; copy bandwidth "
           f"{ceilings['copy_TBps']:.2f} TB/s in the same run. Times in µs.")
    yield ""
    yield "| | shape | dtype | Ingot | of the limit | " + " | ".join(PEERS[p] for p in peers) + " | faster than the best |"
    yield "|---|---|---|---:|---:|" + "---:|" * (len(peers) + 1)
    for r in report["results"]:
        best = min(r["peers"].values())
        cells = [r["name"], " x ".join(f"{n:,}" for n in r["shape"]), r["dtype"], f"{r['ours_us']:.1f}",
                 f"{100 * r['limit_us'] / r['ours_us']:.0f} %"]
        cells += [f"{r['peers'][p]:.1f}" if p in r["peers"] else "" for p in peers]
        yield "| " + " | ".join(cells + [f"{best / r['ours_us']:.2f}x"]) + " |"


def filled(text):
    by_suite = {}
    for _, report in reports.all_reports():
        by_suite.setdefault(report["suite"], []).append(report)

    def fill(match):
        lines = []
        for report in by_suite.get(match[2], []):
            lines += [*table(report), ""]
        return match[1] + "\n".join(lines or ["No report yet: `./run gpu` on a machine with a GPU writes it.", ""]) + match[3]

    return MARKED.sub(fill, text)


def main():
    check = "--check" in sys.argv[1:]
    pages = [a for a in sys.argv[1:] if a != "--check"] or ["README.md"]
    old = []
    for page in map(pathlib.Path, pages):
        text = page.read_text(encoding="utf-8")
        new = filled(text)
        if new != text and check:
            old.append(str(page))
        elif new != text:
            page.write_text(new, encoding="utf-8")
    if old:
        print(f"tables not current: {', '.join(old)}; run python3 tools/report_tables.py {' '.join(old)}")
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
