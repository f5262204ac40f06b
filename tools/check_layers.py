"""Fails when a file under src/ingot includes from a layer above its own, or breaks a rule of ARCHITECTURE.md's layers.

    python3 tools/check_layers.py src/ingot
"""
import pathlib
import re
import sys

ORDER = ["core", "io", "text", "data", "gpu", "kernels", "megakernel", "models", "engines", "apps"]
RANK = {name: i for i, name in enumerate(ORDER)}
MODEL_NAMES = re.compile(r"\b(gpt_oss|gpt2|GptOss|golf|nano)\b")


def problems_of(path, root):
    relative = path.relative_to(root)
    layer = relative.parts[0]
    if layer not in RANK and layer != "testing":
        yield f"{path}: found the folder {layer}/, expected one of {', '.join(ORDER)} or testing"
    is_test = path.name.split(".")[-2:-1] in (["test"], ["bench"], ["native"], ["fuzz"])
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        where = f"{path}:{number}"
        include = re.match(r'\s*#include "([^"]+)"', line)
        if include:
            parts = include[1].split("/")
            if parts[0] != "ingot" or len(parts) < 3:
                yield f'{where}: found "{include[1]}", expected a path from the include root: "ingot/..."'
                continue
            target = parts[1]
            if target == "testing" and layer != "testing" and not is_test and layer != "apps":
                yield f"{where}: only tests and benches may include testing/"
            if layer == "testing" and target not in ("core", "gpu", "testing"):
                yield f"{where}: testing/ may not include {target}/; what tests of {target}/ share stands there, in a .test.h"
            if target in RANK and layer in RANK and RANK[target] > RANK[layer]:
                yield f"{where}: {layer}/ may not include {target}/"
            place, goal = relative.parts[:-1], tuple(parts[1:-1])
            if layer == "kernels" and len(place) == len(goal) == 3 and place[:2] == goal[:2] and goal[2] not in ("parts", place[2]):
                yield f"{where}: one form of a room may not include another's; what they share belongs in parts/"
            if include[1].endswith((".cpp", ".cu")):
                yield f"{where}: a source file is included; include its header"
        if re.match(r"\s*#include <(torch|ATen|c10)/", line):
            yield f"{where}: torch belongs in bindings/python"
        if layer in ("kernels", "megakernel") and MODEL_NAMES.search(line):
            yield f"{where}: {layer}/ may not name a model"
        # On the host an empty template only keeps the compiler from removing what is timed.
        is_cuda = path.suffix in (".cu", ".cuh")
        if relative.parts[:2] != ("gpu", "ptx") and re.search(r"\basm\s*(volatile)?\s*\(" + ("" if is_cuda else r"(?!\"\")"), line):
            yield f"{where}: inline assembly belongs in gpu/ptx"
        if is_cuda and not is_test and re.search(r"::name\s*[!=]=", line):
            yield f"{where}: a kernel asks for a trait of an activation (activation.h), not for its name"


def main():
    root = pathlib.Path(sys.argv[1])
    bad = [p for path in sorted(root.rglob("*")) if path.suffix in (".h", ".cpp", ".cu", ".cuh") for p in problems_of(path, root)]
    print("\n".join(bad) if bad else "layers: ok")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
