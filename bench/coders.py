#!/usr/bin/env python3
"""What each coder makes of a run's quantised weights: bytes and seconds, and whether what is read back scores the same.

    python3 bench/coders.py build/cpu/ingot RUN DATA [--out bench/cpu/<cpu>/coders.json] [--export OPTIONS]

Exports RUN once a coder (`ingot export --coder`), all else alike, and prints one line each; --out keeps them as JSON, with what the run is:
how far it was trained says whose weights these are.
"""
import argparse
import datetime
import json
import pathlib
import shlex
import subprocess
import sys
import tempfile

CODERS = ("range", "brotli", "lzma")


def ingot(o, *arguments):
    done = subprocess.run([str(a) for a in (o.ingot, *arguments)], stdout=subprocess.PIPE)
    if done.returncode != 0:  # it said why on standard error
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
    p.add_argument("run", type=pathlib.Path)
    p.add_argument("data", type=pathlib.Path)
    p.add_argument("--out", type=pathlib.Path)
    p.add_argument("--export", default="", help="options of `ingot export`, as one word")
    o = p.parse_args()
    info, results = ingot(o, "info", o.run, "--json"), {}
    with tempfile.TemporaryDirectory() as folder:
        for coder in CODERS:
            report = ingot(o, "export", o.run, pathlib.Path(folder) / coder, "--data", o.data, "--json", "--limit", 1 << 40, "--coder", coder,
                           *shlex.split(o.export))
            results[coder] = {"bytes": report["total_bytes"], "code_seconds": report["seconds"]["code"], "seconds": report["seconds"],
                              "bits_per_byte_before": report["bits_per_byte_before"], "bits_per_byte_after": report["bits_per_byte_after"]}
            print(f"{coder:7} {report['total_bytes']:>12,} bytes  {report['seconds']['code']:7.2f} s  "
                  f"{report['total_bytes'] - results['range']['bytes']:+,} bytes beside ours", flush=True)
    assert len({r["bits_per_byte_after"] for r in results.values()}) == 1, "coders read back other weights"
    if o.out:
        said = {"date": datetime.date.today().isoformat(), "cpu": processor(), "export": o.export, "parameters": info["parameters"], "step": info["step"],
                "config": info["config"], "coders": results}
        o.out.parent.mkdir(parents=True, exist_ok=True)
        o.out.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
