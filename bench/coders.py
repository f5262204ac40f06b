#!/usr/bin/env python3
"""Compares the coders on an artifact's integers: bytes, seconds, and whether the integers read back are the same.

    python3 bench/coders.py build/cpu/ingot ARTIFACT [--out bench/results/coders.json]

Codes ARTIFACT anew by each coder (`ingot export ARTIFACT OUT --coder`), and prints one line each; --out writes the lines as JSON, with the description of the
model, because the weights depend on its training.
"""
import argparse
import datetime
import json
import pathlib
import subprocess
import sys
import tempfile

CODERS = ("range", "brotli", "lzma")


def ingot(o, *arguments):
    done = subprocess.run([str(a) for a in (o.ingot, *arguments)], stdout=subprocess.PIPE)
    if done.returncode != 0:  # the reason is on standard error
        sys.exit(done.returncode)
    return json.loads(done.stdout)


def processor():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("ingot", type=pathlib.Path, help="the binary")
    p.add_argument("artifact", type=pathlib.Path, help="what `ingot export` wrote")
    p.add_argument("--out", type=pathlib.Path)
    o = p.parse_args()
    info, results = ingot(o, "info", o.artifact, "--json"), {}
    with tempfile.TemporaryDirectory() as folder:
        for coder in CODERS:
            out = pathlib.Path(folder) / coder
            report = ingot(o, "export", o.artifact, out, "--json", "--limit", 1 << 40, "--coder", coder)
            results[coder] = {"bytes": report["total_bytes"], "code_seconds": report["seconds"]["code"]}
            again = ingot(o, "info", out, "--json")
            assert again["parameter_hash"] == info["parameter_hash"], f"{coder} gave other weights back"
            print(f"{coder:7} {report['total_bytes']:>12,} bytes  {report['seconds']['code']:7.2f} s  "
                  f"{report['total_bytes'] - results['range']['bytes']:+,} bytes beside ours", flush=True)
    if o.out:
        said = {"date": datetime.date.today().isoformat(), "cpu": processor(), "parameters": info["parameters"], "step": info["step"],
                "parameter_hash": info["parameter_hash"], "config": info["config"], "coders": results}
        o.out.parent.mkdir(parents=True, exist_ok=True)
        o.out.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
