"""Fails when a file under src/ingot includes a header of a layer above its own, or breaks another rule of ARCHITECTURE.md's layers. Also fails when
a kernel that may overlap the previous kernel does not wait for that kernel (docs/gpu-layer.md), when the result of a CUDA or NCCL call is ignored,
or when a test has cases for a GPU that `ctest -L gpu` would not run.

    python3 tools/check_layers.py src/ingot
"""
import pathlib
import re
import sys

ORDER = ["core", "io", "text", "data", "gpu", "kernels", "megakernel", "models", "engines", "apps"]
RANK = {name: i for i, name in enumerate(ORDER)}
MODEL_NAMES = re.compile(r"\b(gpt_oss|gpt2|GptOss|golf|nano)\b")


WAIT, LETS = "wait_for_earlier_kernels", "let_next_kernel_start"
NO_FUNCTION = {"if", "for", "while", "switch", "catch", "return", "sizeof", "alignas", "decltype", "__launch_bounds__", "__maxnreg__"}
# A call as a whole statement, or as the body of a branch. (void) marks an intended one.
DROPPED = re.compile(r"^\s*(?:if \(.*\) |else )?((?:cuda|nccl)[A-Z]\w+)\(.*\);")


def closed(text, at):
    """The index after the bracket that closes the bracket at `at`."""
    pairs, depth = {"(": 1, "{": 1, ")": -1, "}": -1}, 0
    for i in range(at, len(text)):
        depth += pairs.get(text[i], 0)
        if depth == 0:
            return i + 1
    return len(text)


def functions_of(text):
    """(name, whether a kernel, body, line) of each definition in a device file."""
    for found in re.finditer(r"\b(\w+)\s*\(", text):
        begin = closed(text, found.end() - 1)
        brace = re.match(r"\s*(?:const\s*)?\{", text[begin:begin + 40])
        if found[1] in NO_FUNCTION or not brace:
            continue
        before = text[max(text.rfind(c, 0, found.start()) for c in ";}") + 1:found.start()]
        yield found[1], "__global__" in before, text[begin + brace.end():closed(text, begin + brace.end() - 1) - 1], \
            text.count("\n", 0, found.start()) + 1


def problems_of_launches(texts, root):
    """The problems of launches in device files, given as {path: text}."""
    texts = {path: re.sub(r"//[^\n]*", "", text) for path, text in texts.items()}
    defined = {}
    for path, text in texts.items():
        for function in functions_of(text):
            defined.setdefault(function[0], []).append((path, *function[1:]))

    def home(path):
        parts = path.relative_to(root).parts
        return parts[:2] if parts[0] in ("kernels", "models") else parts[:-1]

    def known(name, by):
        """The definitions of a name in the file's room or folder."""
        return [p for p in defined.get(name, []) if home(p[0]) == home(by)]

    def waits(path, body, depth=5):
        calls = sorted(set(re.findall(r"\b(\w+)(?:<[^;(){}]*>)?\(", body)) & defined.keys()) if depth else ()
        return WAIT in body or any(waits(place, inner, depth - 1) for call in calls for place, _, inner, _ in known(call, path))

    def kernels(name, by):
        places = known(name, by)
        return [p for p in places if p[0] == by] or [p for p in places if p[0].parent == by.parent] or places

    for name, places in sorted(defined.items()):
        for path, is_kernel, body, line in places:
            wait = body.find(WAIT)
            if is_kernel and wait >= 0 and re.search(r"\breturn\b", body[:wait]):
                yield f"{path}:{line}: {name}() may return before ptx::{WAIT}(), which every block must call"
            if is_kernel and LETS in body and not waits(path, body):
                yield f"{path}:{line}: {name}() lets the next kernel start and waits for none before it"
    for path, text in texts.items():
        for launch in re.finditer(r"gpu::launch\(", text):
            whole = text[launch.start():closed(text, launch.end() - 1)]
            kernel = re.match(r"gpu::launch\(\s*[^,]+,\s*(\w+)(?:<[^;{}]*?>)?,\s*(?:(\w+)\b)?", whole)
            if kernel and kernel[2]:  # the launch parameters, through a variable
                whole = "".join(re.findall(rf"\b{kernel[2]}\s*(?:=\s*)?\{{[^;]*;", text))
                whole = "" if re.search(rf"\b{kernel[2]}\.overlap = false", text[:launch.start()]) else whole
            if ".overlap = true" not in whole or not kernel:
                continue
            for place, is_kernel, body, _ in kernels(kernel[1], path):
                if is_kernel and not waits(place, body):
                    yield f"{path}:{text.count(chr(10), 0, launch.start()) + 1}: {kernel[1]}() may overlap the kernel before and does not wait for it"


# A case that runs where there is no GPU ("device_count() > 0) GTEST_SKIP") is none for a GPU.
LABELLED = re.compile(r'ingot/testing/(gpu|hopper)_test\.h"')
FOR_GPU = re.compile(r"\bdevice_count\(\)(?! > 0\) GTEST_SKIP)|\b(Gpu|Hopper)Test\b")


def problem_of_label(path, text):
    """By its name or by an include CMake finds a test that needs a GPU (cmake/IngotTests.cmake)."""
    if path.name.endswith(".test.cpp") and not path.name.endswith(".cuda.test.cpp") and FOR_GPU.search(text) and not LABELLED.search(text):
        yield f"{path}: found cases for a GPU, expected a *.cuda.test.cpp or an include of ingot/testing/gpu_test.h: `ctest -L gpu` would not run them"


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
        # On the host an empty template only keeps the compiler from removing the timed code; the emulator's fibers change stacks.
        is_cuda = path.suffix in (".cu", ".cuh")
        if dropped := DROPPED.match(line):
            yield f"{where}: nobody looks at what {dropped[1]} returns, expected gpu::check_cuda(...) or (void)"
        # A test of host code may put the CPU into the tested state.
        if (is_cuda or not is_test) and relative.parts[:2] not in (("gpu", "ptx"), ("gpu", "emulation"), ("megakernel", "ptx")) and re.search(r"\basm\s*(volatile)?\s*\(" + ("" if is_cuda else r"(?!\"\")"), line):
            yield f"{where}: inline assembly belongs in gpu/ptx (of persistent kernels alone: megakernel/ptx)"
        if is_cuda and not is_test and re.search(r"::name\s*[!=]=", line):
            yield f"{where}: a kernel asks for a trait of an activation (activation.h), not for its name"


def problems_of_switches(files, root):
    """An #ifdef INGOT_HAS_CUDA_X without the .cu for which CMake defines the name (cmake/IngotCuda.cmake) leaves GPU code out of every build without an error."""
    defined = {path.stem for path in files if path.suffix == ".cu" and path.stem == path.parent.name}
    defined |= {"decode"} if root / "models/decode/phased/decode.cu" in files else set()
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            switch = re.match(r"\s*#\s*(?:if|ifdef|ifndef|elif)\b.*\bINGOT_HAS_CUDA_(\w+)", line)
            if switch and switch[1].lower() not in defined:
                yield f"{path}:{number}: found INGOT_HAS_CUDA_{switch[1]}, expected a {switch[1].lower()}.cu in a folder of that name"


def main():
    root = pathlib.Path(sys.argv[1])
    files = [path for path in sorted(root.rglob("*")) if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    bad = [p for path in files for p in problems_of(path, root)]
    bad += [p for path in files for p in problem_of_label(path, path.read_text(encoding="utf-8"))]
    bad += problems_of_launches({path: path.read_text(encoding="utf-8") for path in files if path.suffix in (".cu", ".cuh") and ".test." not in path.name}, root)
    bad += problems_of_switches(files, root)
    print("\n".join(bad) if bad else "layers: ok")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
