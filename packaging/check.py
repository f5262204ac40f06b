#!/usr/bin/env python3
"""Installs release files in a clean environment and uses them: packaging/check.py dist/*.whl dist/*.tar.gz

A wheel goes into a new virtual environment that has only PyTorch of the Python that runs this script, whose version must be the wheel's. The
programs run with an empty environment: no nvcc, no compiler, no source tree. Prints a line for each file, with its size.
"""
import argparse
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile

TREE = pathlib.Path(__file__).resolve().parent.parent
VERSION = re.search(r"project\(ingot VERSION ([0-9.]+)", (TREE / "CMakeLists.txt").read_text()).group(1)

USE = r"""
import pathlib, shutil, sys
import torch, ingot
from ingot import functional as F
assert shutil.which("nvcc") is None and shutil.which("c++") is None
assert pathlib.Path(ingot.__file__).is_relative_to(sys.prefix), ingot.__file__
assert ingot.__version__ == sys.argv[1], ingot.__version__
torch.manual_seed(0)
norm, plain = ingot.nn.RMSNorm(64), torch.nn.RMSNorm(64, eps=1e-6)
x = torch.randn(8, 64, requires_grad=True)
assert torch.allclose(F.rms_norm(x, norm.weight, eps=1e-6), plain(x), atol=1e-5)
layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.SiLU(), torch.nn.Linear(128, 8))
mlp = ingot.nn.FusedMLP.from_sequential(layers)
mlp(x).square().sum().backward()
found, x.grad = x.grad, None
layers(x).square().sum().backward()
assert torch.allclose(found, x.grad, atol=1e-4)
q, k, v = (torch.randn(1, 16, 4, 32) for _ in range(3))
expected = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)
assert torch.allclose(F.flash_attn_func(q, k, v, causal=True), expected, atol=1e-5)
step = ingot.optim.Muon([torch.nn.Parameter(torch.randn(16, 16))])
if "cuda" in sys.argv[2:]:
    assert ingot.built_with_cuda, "no CUDA kernels"
    # The kernels' runtime is inside: only a driver is loaded, and only by its first use, so that the package also works without a GPU.
    loaded = {line.split()[-1].rpartition("/")[2] for line in open("/proc/self/maps") if ".so" in line}
    ours = {name for name in loaded if name.startswith(("libcudart", "libcuda.", "libcublas", "libnccl"))}
    assert not ours or torch.version.cuda, ours
if torch.cuda.is_available() and ingot.built_with_cuda:
    mlp = mlp.cuda().half()
    mlp(torch.randn(64, 64, device="cuda", dtype=torch.float16)).sum().backward()
    print("also on", torch.cuda.get_device_name())
"""


def clean(directory: str) -> dict[str, str]:
    """An environment whose PATH has no program, whatever the caller's is."""
    return {"PATH": directory, "HOME": directory, "TMPDIR": directory, "OMP_NUM_THREADS": "2",
            **{name: value for name, value in os.environ.items() if name.startswith(("OPENBLAS_", "CUDA_VISIBLE"))}}


def has_kernels(binary: bytes) -> bool:
    """Whether a program or module has CUDA kernels: the section in which the CUDA runtime looks for them."""
    return b".nv_fatbin" in binary


def check_wheel(wheel: pathlib.Path) -> str:
    import torch
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(n for n in names if n.endswith(".dist-info/METADATA"))).decode()
        cuda = has_kernels(archive.read(next(n for n in names if n.startswith("ingot/_C."))))
    assert f"\nVersion: {VERSION}\n" in metadata and "\nLicense-Expression: Apache-2.0\n" in metadata, metadata[:1000]
    assert {"ingot/py.typed", "ingot/functional.pyi"} <= set(names), f"{wheel.name}: no types"
    # The description of a package must not have paths of the machine that made the package.
    assert not re.search(r"/(home|root|work|tmp)/", metadata), metadata
    for part in ("LICENSE", "packaging/LICENSES.md", *(f"third_party/{name}.txt" for name in ("nanobind", "robin_map", "nlohmann-json", "Unicode"))):
        assert any(n.endswith(f".dist-info/licenses/{part}") for n in names), f"{wheel.name}: no {part}"
        assert f"\nLicense-File: {part}\n" in metadata, f"{wheel.name}: METADATA does not name {part}"
    with tempfile.TemporaryDirectory() as scratch:
        venv.create(scratch, with_pip=False, symlinks=True)
        python = pathlib.Path(scratch, "bin/python")
        site = next(pathlib.Path(scratch, "lib").glob("python3.*/site-packages"))
        subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps",
                        wheel.resolve()], check=True)
        # PyTorch and its dependencies are those of this Python; PyTorch's packages come after the environment's own packages.
        (site / "torch.pth").write_text(str(pathlib.Path(torch.__file__).parent.parent) + "\n")
        for command in (["-c", USE, VERSION, *(["cuda"] if cuda else [])], ["-m", "ingot"]):
            done = subprocess.run([python, *command], env=clean(scratch), cwd="/", capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
        print(done.stdout.splitlines()[0])
    return "installed and used in a clean environment, " + ("with CUDA kernels" if cuda else "without CUDA kernels")


def check_sdist(sdist: pathlib.Path) -> str:
    """The sources of the package and nothing that a build made."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for file in ("PKG-INFO", "CMakeLists.txt", "pyproject.toml", "LICENSE", "packaging/PACKAGE.md", "cmake/IngotPython.cmake", "bindings/python/ingot/__init__.py",
                 "bindings/python/native/ops.cpp", "src/ingot/kernels/rmsnorm/rmsnorm.cu"):
        assert file in names, f"{sdist.name}: no {file}"
    made = sorted(name for name in names if name.startswith(("build", "dist", ".git/")) or name.endswith((".o", ".so", ".pyc")))
    assert not made, f"{sdist.name}: found {', '.join(made[:5])}, expected sources"
    return "has the sources alone"


def check_tarball(tarball: pathlib.Path) -> str:
    cuda = tarball.name.endswith("-cuda.tar.gz")
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(tarball) as archive:
            archive.extractall(scratch, filter="data")
        (root,) = pathlib.Path(scratch).iterdir()
        for file in ("INSTALL", "LICENSE", "README.md", "CHANGELOG.md", "packaging/LICENSES.md", "docs/cli.md", "licenses/CLI11.txt", "licenses/nlohmann-json.txt",
                     "licenses/Unicode.txt"):
            assert (root / file).stat().st_size > 0, file
        text = pathlib.Path(scratch, "text.txt")
        text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(2000)))

        def ingot(*words: str, status: int = 0) -> str:
            done = subprocess.run([root / "bin/ingot", *words], env=clean(scratch), cwd=scratch, capture_output=True, text=True)
            assert done.returncode == status, done.stdout + done.stderr
            return done.stdout + done.stderr
        version = ingot("--version")
        assert VERSION in version, version
        doctor = ingot("doctor")
        assert f"with{'' if cuda else 'out'} CUDA kernels" in doctor, doctor
        assert has_kernels((root / "bin/ingot").read_bytes()) == cuda
        if cuda and "GPU             none" in doctor:
            refused = ingot("bench", "decode", "--synthetic", "20b", status=7)
            assert "GPU" in refused, refused
        ingot("train", "--preset", "nano", "--data", str(text), "--out", "run", "--steps", "2", "--device", "cpu")
        assert ingot("generate", "run", "--prompt", "7 times", "--tokens", "4", "--device", "cpu")
        if cuda and "GPU             none" not in doctor:
            ingot("train", "--preset", "nano", "--data", str(text), "--out", "run-gpu", "--steps", "2", "--device", "cuda")
            assert ingot("generate", "run-gpu", "--prompt", "7 times", "--tokens", "4", "--device", "cuda")
    return "installed and used in a clean environment, " + ("with CUDA kernels" if cuda else "without CUDA kernels")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=pathlib.Path, metavar="FILE", help="a wheel or tarball of packaging/release.py")
    files = parser.parse_args().files
    if missing := [str(file) for file in files if not file.is_file()]:
        sys.exit(f"check: found no file {', '.join(missing)}, expected wheels or tarballs of packaging/release.py")
    for file in files:
        sources = file.name.startswith("ingot_kernels") and file.suffix == ".gz"
        found = (check_wheel if file.suffix == ".whl" else check_sdist if sources else check_tarball)(file)
        print(f"{file.name}: {found}, {file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
