"""A build of some rooms (INGOT_ROOMS): it contains these rooms and the rooms that they use, and its Python module works and refuses other
operations by name. A Python module without zlib: all rooms, no models. The machine code for GPUs other than Hopper
(INGOT_GPUS). And the matrix kernel of docs/gpu-layer.md, which becomes a room without any further edit.

    python3 tests/rooms_test.py SOURCE_DIR [--python]     --python: with the module, run where PyTorch is installed
"""
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

SOURCE = pathlib.Path(sys.argv[1]).resolve()
USE = """
import torch, ingot
x = torch.tensor([[3.0, 4.0]])
torch.testing.assert_close(ingot.functional.rms_norm(x), x / 12.5**0.5)
for room, call in (("mlp", lambda: ingot.nn.FusedMLP(8, 8, 8)(torch.ones(1, 8))), ("swiglu", lambda: ingot.functional.swiglu(x)),
                   ("activation", lambda: ingot.functional.activation(x, "relu")), ("muon", lambda: ingot._C.muon(x)),
                   ("attention", lambda: ingot.functional.flash_attn_func(*[torch.ones(1, 2, 1, 8)] * 3))):
    try:
        call()
    except NotImplementedError as e:
        assert room in str(e), str(e)
    else:
        raise AssertionError(f"{room}: found no error, expected NotImplementedError")
"""


def configure(build, rooms, *options):
    return subprocess.run(["cmake", "-G", "Ninja", "-S", SOURCE, "-B", build, "-DINGOT_CUDA=OFF", f"-DINGOT_ROOMS={rooms}", *options],
                          capture_output=True, text=True)


def built_rooms(build):
    files = [c["file"] for c in json.loads((build / "compile_commands.json").read_text())]
    return {m[1] for f in files if (m := re.search(r"/src/ingot/kernels/([^/]+)/", f))}, \
           {m[1] for f in files if (m := re.search(r"/src/ingot/([^/]+)/", f))}


# Files that docs/gpu-layer.md does not show: a room's header, and the entry that dispatches to its kernel.
ROOM = {"scaled_product.h": """#pragma once
#include "ingot/core/tensor.h"
namespace ingot {
struct ScaledProduct {
  Tensor x, w, scale, y;
};
void scaled_product(const ScaledProduct& a, Stream stream);
}  // namespace ingot
""", "scaled_product.cpp": """#include "ingot/kernels/scaled_product/scaled_product.h"
#include "ingot/core/dispatch.h"
namespace ingot {
namespace cpu {
void scaled_product(const ScaledProduct&, Stream) {}
}  // namespace cpu
namespace cuda {
void scaled_product(const ScaledProduct& a, Stream stream);
}  // namespace cuda
void scaled_product(const ScaledProduct& a, Stream stream) {
  INGOT_DISPATCH(SCALED_PRODUCT, a.x.device, scaled_product, a, stream);
}
}  // namespace ingot
"""}


def a_room_of_the_page_compiles(folder):
    tree, name = folder / "tree", "src/ingot/kernels/scaled_product/scaled_product"
    shutil.copytree(SOURCE, tree, ignore=shutil.ignore_patterns(".*", "build*", "demo", "results", "lab"), symlinks=True)
    kernel, = re.findall(r"```cpp\n(.*?)```", (tree / "docs/gpu-layer.md").read_text(encoding="utf-8"), re.S)
    (tree / name).parent.mkdir()
    for file, text in {**ROOM, "scaled_product.cu": kernel}.items():
        ((tree / name).parent / file).write_text(text, encoding="utf-8")
    done = subprocess.run(["cmake", "-G", "Ninja", "-S", tree, "-B", folder / "build", "-DINGOT_CUDA=ON", "-DINGOT_TESTS=OFF", "-DINGOT_APPS=OFF",
                           "-DINGOT_ROOMS=scaled_product"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    objects = [f"CMakeFiles/ingot.dir/{name}{ending}.o" for ending in (".cpp", ".cu")]
    done = subprocess.run(["cmake", "--build", folder / "build", "--target", *objects], capture_output=True, text=True)
    assert done.returncode == 0 and " 0 bytes spill stores" in done.stdout, done.stdout + done.stderr


def machine_code_for_other_gpus_is_made_from_the_ptx(build):
    wrong = configure(build, "softcap", "-DINGOT_GPUS=8.6;sm_120")
    assert wrong.returncode != 0 and 'INGOT_GPUS: found "sm_120", expected compute capabilities' in wrong.stderr, wrong.stderr
    if not shutil.which("nvcc"):
        return
    # Not compute_120: gpu::limits() would take a kernel made from it for Hopper's machine code.
    done = configure(build, "rmsnorm;softcap;cross_entropy", "-DINGOT_CUDA=ON", "-DINGOT_TESTS=OFF", "-DINGOT_APPS=OFF", "-DINGOT_GPUS=7.5;8.6;12.0")
    assert done.returncode == 0, done.stdout + done.stderr
    commands = {pathlib.Path(c["file"]).name: c["command"] for c in json.loads((build / "compile_commands.json").read_text())}
    targets = {name: sorted(re.findall(r"arch=(\S+?),code=(\w+)", command)) for name, command in commands.items()}
    hopper = ("compute_90a", "sm_90a")
    turing, ampere = [("compute_75", "compute_75"), ("compute_75", "sm_75")], [("compute_80", code) for code in ("compute_80", "sm_120", "sm_86")]
    for name in ("softcap.cu", "rmsnorm_bf16.cu", "cross_entropy.cu"):  # PTX of both, and the newest for each GPU
        assert targets[name] == [*turing, *ampere, hopper], targets[name]
    for name in ("linear.cu", "portable_capped.cu"):  # products
        assert targets[name] == [*ampere, hopper], targets[name]
    assert targets["limits.cu"] == [("compute_75", "compute_75"), *(("compute_75", f"sm_{n}") for n in (120, 75, 86)), hopper], targets["limits.cu"]
    assert targets["capped_bf16.cu"] == [hopper], targets["capped_bf16.cu"]


def main():
    with tempfile.TemporaryDirectory() as folder:
        machine_code_for_other_gpus_is_made_from_the_ptx(pathlib.Path(folder))
    if shutil.which("nvcc"):
        with tempfile.TemporaryDirectory() as folder:
            a_room_of_the_page_compiles(pathlib.Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        build = pathlib.Path(folder)
        wrong = configure(build, "rmsnorm;ropes")
        assert wrong.returncode != 0 and "found ropes, expected some of" in wrong.stderr and "rope," in wrong.stderr, wrong.stderr
        done = configure(build, "mlp", "-DINGOT_TESTS=OFF")
        assert done.returncode == 0, done.stdout + done.stderr
        rooms, _ = built_rooms(build)
        assert rooms == {"activation", "linear", "mlp"}, rooms  # mlp multiplies by linear's loops on a CPU

        done = configure(build, "rmsnorm;rope", "-DINGOT_TESTS=ON", f"-DINGOT_PYTHON={'ON' if '--python' in sys.argv else 'OFF'}")
        assert done.returncode == 0, done.stdout + done.stderr
        rooms, layers = built_rooms(build)
        assert rooms == {"rmsnorm", "rope"} and layers <= {"core", "gpu", "kernels", "testing"}, (rooms, layers)
        target = "ingot_python" if "--python" in sys.argv else "ingot"
        done = subprocess.run(["cmake", "--build", build, "--target", target], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        if "--python" in sys.argv and importlib.util.find_spec("torch"):
            subprocess.run([sys.executable, "-c", USE], check=True, env={**os.environ, "PYTHONPATH": str(build / "python")})
    if "--python" in sys.argv:
        with tempfile.TemporaryDirectory() as folder:
            module = ("-DINGOT_TESTS=OFF", "-DINGOT_APPS=OFF", "-DINGOT_PYTHON=ON")
            for missing, expected in (("ON", {"core", "gpu", "kernels"}), ("OFF", {"models", "engines", "text"})):
                done = configure(pathlib.Path(folder) / missing, "", *module, f"-DCMAKE_DISABLE_FIND_PACKAGE_ZLIB={missing}")
                assert done.returncode == 0, done.stdout + done.stderr
                _, layers = built_rooms(pathlib.Path(folder) / missing)
                assert expected <= layers and (missing == "OFF" or layers == expected), layers
    print("rooms: ok")


if __name__ == "__main__":
    main()
