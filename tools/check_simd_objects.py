"""Fails when an object compiled for one CPU level defines a weak symbol (core/cpu/cpu.h explains why such symbols crash on older CPUs).

    python3 tools/check_simd_objects.py OBJECT...
"""
import subprocess
import sys

WEAK = "WwVvu"


def weak_symbols(path):
    lines = subprocess.run(["nm", "--defined-only", "--demangle", path], check=True, capture_output=True, text=True).stdout
    for line in lines.splitlines():
        fields = line.split(maxsplit=2)
        # DW.ref.*, a pointer to the unwinder's routine, is data and equal at every level.
        if len(fields) == 3 and fields[1] in WEAK and not fields[2].startswith("DW.ref."):
            yield f"{path}: found the weak symbol '{fields[2]}', expected only symbols of the level's own namespace"


def main():
    objects = sys.argv[1:]
    if not objects:
        print("check_simd_objects: found no objects, expected those of ingot_simd_avx512")
        return 1
    bad = [problem for path in objects for problem in weak_symbols(path)]
    print("\n".join(bad) if bad else f"simd objects: ok ({len(objects)})")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
