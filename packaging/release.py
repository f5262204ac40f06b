#!/usr/bin/env python3
"""Makes the files of a release: wheels of the PyTorch package, one for each Python, its source distribution, and a tarball with the program `ingot`.

    python3 packaging/release.py                    # with the CUDA kernels where nvcc is found; into dist/
    python3 packaging/release.py --cuda OFF --only wheels --python python3.12

All files come from one build directory, so the kernels are compiled once for all of them; only the extension module is compiled for each Python.
Needs a C++20 compiler, CMake, ninja and, for wheels, this Python's scikit-build-core and nanobind, as well as each Python's headers; downloads nothing.
The files need neither a compiler nor the CUDA toolkit: the CUDA runtime is linked statically, and cuBLASLt and NCCL are loaded on first use.
`packaging/check.py FILE...` installs the files in a clean environment.

Why not one wheel for all versions of Python (abi3): the extension module reads the profiling function of the thread and the slots of types in every
call, which the stable interface of Python does not offer, and a call costs the host 5 to 15 us.
"""
import argparse
import base64
import hashlib
import importlib.metadata
import io
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile

TREE = pathlib.Path(__file__).resolve().parent.parent
VERSION = re.search(r"project\(ingot VERSION ([0-9.]+)", (TREE / "CMakeLists.txt").read_text()).group(1)
NAME = re.search(r'^name = "([^"]+)"', (TREE / "pyproject.toml").read_text(), re.M).group(1)
PYTHONS = [f"python3.{minor}" for minor in range(10, 15)]
# PEP 600: the libraries that every distribution has, and the newest libstdc++ beside each glibc (the policies of auditwheel).
COMMON = re.compile(r"(libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|libz|ld-linux-[a-z0-9-]+)\.so\.\d+$")
GLIBC_WITH_GLIBCXX = [(28, 24), (31, 28), (34, 29), (35, 30), (39, 33)]
EPOCH = int(os.environ.get("SOURCE_DATE_EPOCH", "315532800"))  # 1980, the first year of a zip file: equal contents make equal files


def run(*command: object, **options) -> str:
    done = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, text=True, **options)
    if done.returncode != 0:
        print(done.stdout[-4000:], file=sys.stderr)
        sys.exit(f"release: {command[0]} failed with status {done.returncode}")
    return done.stdout


def needed(binary: pathlib.Path) -> list[str]:
    """The shared libraries that the loader must find for `binary`."""
    return re.findall(r"\(NEEDED\).*\[(.+?)\]", run("readelf", "-dW", binary))


def platform_tag(binary: pathlib.Path) -> str:
    """manylinux_2_N: the oldest glibc (and its libstdc++) that has the versions of all symbols of `binary`."""
    foreign = [library for library in needed(binary) if not COMMON.match(library)]
    if foreign:
        sys.exit(f"release: {binary.name} needs {', '.join(foreign)}, which a wheel may not expect of the user's machine")
    versions = run("readelf", "-VW", binary)
    glibc = max(int(n) for n in re.findall(r"GLIBC_2\.(\d+)", versions))
    glibcxx = max([int(n) for n in re.findall(r"GLIBCXX_3\.4\.(\d+)", versions)], default=0)
    with_libstdcxx = next((g for g, cxx in GLIBC_WITH_GLIBCXX if cxx >= glibcxx), None)
    if with_libstdcxx is None:
        sys.exit(f"release: {binary.name} needs GLIBCXX_3.4.{glibcxx}, expected at most 3.4.{GLIBC_WITH_GLIBCXX[-1][1]}")
    return f"manylinux_2_{max(glibc, with_libstdcxx)}_{os.uname().machine}"


def write_wheel(path: pathlib.Path, files: dict[str, bytes]) -> None:
    """A wheel of `files` (name in the archive -> contents), with its RECORD as the last file."""
    info = next(name.split("/")[0] for name in files if ".dist-info/" in name)
    record = io.StringIO()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        def add(name: str, data: bytes) -> None:
            entry = zipfile.ZipInfo(name, time.gmtime(EPOCH)[:6])
            entry.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
        for name in sorted(files):
            digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
            record.write(f"{name},sha256={digest},{len(files[name])}\n")
            add(name, files[name])
        record.write(f"{info}/RECORD,,\n")
        add(f"{info}/RECORD", record.getvalue().encode())


def by_backend(function: str, folder: pathlib.Path) -> pathlib.Path:
    """The file or folder that scikit-build-core's `function` makes in `folder` from pyproject.toml."""
    import scikit_build_core.build as backend  # only wheels need the package
    folder.mkdir(parents=True, exist_ok=True)
    before = os.getcwd()
    os.chdir(TREE)
    try:
        return folder / getattr(backend, function)(str(folder))
    finally:
        os.chdir(before)


def metadata(scratch: pathlib.Path) -> dict[str, bytes]:
    """METADATA and the licences."""
    shutil.rmtree(scratch, ignore_errors=True)
    info = by_backend("prepare_metadata_for_build_wheel", scratch)
    return {f"{info.name}/{f.relative_to(info)}": f.read_bytes() for f in info.rglob("*") if f.is_file() and f.name not in ("WHEEL", "RECORD")}


def licence_texts(wheel: bool) -> dict[str, bytes]:
    """The licence texts of the code of others that is compiled in, by file name: these licences want their text in every copy of the program. The texts
    come from the packages of this machine that the build used."""
    def of_package(name: str) -> bytes | None:
        path = pathlib.Path(f"/usr/share/doc/{name}/copyright")
        return path.read_bytes() if path.exists() else None

    texts = {"Unicode": (TREE / "packaging/Unicode-3.0.txt").read_bytes(), "nlohmann-json": of_package("nlohmann-json3-dev")}
    texts |= {name: text for name, text in (("brotli", of_package("libbrotli-dev")), ("liblzma", of_package("liblzma-dev"))) if text}  # optional parts
    if wheel:
        nanobind = importlib.metadata.distribution("nanobind")
        texts["nanobind"] = next((f.locate().read_bytes() for f in nanobind.files or [] if f.name == "LICENSE"), None)
        robin_map = next((f.locate().read_text() for f in nanobind.files or [] if f.name == "robin_map.h"), "*/")
        texts["robin_map"] = robin_map[:robin_map.index("*/") + 2].encode() + b"\n"
    else:
        texts["CLI11"] = of_package("libcli11-dev")
    missing = [name for name, text in texts.items() if not text]
    if missing:
        print(f"release: found no licence text of {', '.join(missing)}, which the file must have before anybody publishes the file", file=sys.stderr)
    return {f"{name}.txt": text for name, text in sorted(texts.items()) if text}


def make_wheel(python: str, build: pathlib.Path, out: pathlib.Path, info_files: dict[str, bytes]) -> pathlib.Path:
    # The prefix is empty first: an earlier Python's module must not come along.
    stage = build / "stage"
    shutil.rmtree(stage, ignore_errors=True)
    run("cmake", "--install", build, "--component", "python", "--prefix", stage, stderr=subprocess.STDOUT)
    module = next((stage / "ingot").glob("_C.*"))
    tag = run(python, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])").strip()
    tag = f"{tag}-{tag}-{platform_tag(module)}"
    package = TREE / "bindings/python"
    files = {str(f.relative_to(package)): f.read_bytes() for f in (package / "ingot").rglob("*") if f.suffix in (".py", ".pyi", ".typed")}
    files[f"ingot/{module.name}"] = module.read_bytes()
    files |= info_files
    info = next(iter(info_files)).split("/")[0]
    texts = {f"third_party/{name}": text for name, text in licence_texts(wheel=True).items()}
    files |= {f"{info}/licenses/{name}": text for name, text in texts.items()}
    last = b"License-File: packaging/LICENSES.md\n"
    files[f"{info}/METADATA"] = files[f"{info}/METADATA"].replace(last, last + "".join(f"License-File: {name}\n" for name in texts).encode())
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: ingot {VERSION}\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    wheel = out / f"{NAME.replace('-', '_')}-{VERSION}-{tag}.whl"
    write_wheel(wheel, files)
    return wheel


def make_tarball(build: pathlib.Path, out: pathlib.Path, cuda: bool) -> pathlib.Path:
    root = f"ingot-{VERSION}-linux-{os.uname().machine}{'-cuda' if cuda else ''}"
    binary = build / "ingot.stripped"
    run("strip", "-o", binary, build / "ingot")
    others = [library for library in needed(binary) if not COMMON.match(library)]
    versions = run("readelf", "-VW", binary)
    glibc, glibcxx = (max(int(n) for n in re.findall(name, versions)) for name in (r"GLIBC_2\.(\d+)", r"GLIBCXX_3\.4\.(\d+)"))
    install = (f"ingot {VERSION}, with{'' if cuda else 'out'} CUDA kernels.\n\n"
               f"bin/ingot runs on Linux with glibc 2.{glibc} and a libstdc++ that has GLIBCXX_3.4.{glibcxx}, or later ones, and needs no compiler and no\n"
               f"CUDA toolkit. The program loads {', '.join(sorted(needed(binary)))}" + (f"; {', '.join(others)} may need a package "
               "(Debian 12: libmicrohttpd12, Ubuntu 24.04: libmicrohttpd12t64)" if others else "") + ".\n"
               "libcrypto.so.3 makes hashing fast where the loader finds it.\n"
               + ("\nThe CUDA kernels run on Hopper GPUs (H100, H200), and most of them from compute capability 8.0 on, with a driver for CUDA 13. For some\n"
                  "products the program loads libcublasLt.so.13 or .12 (pip install nvidia-cublas) and, for several GPUs, libnccl.so.2 (pip install\n"
                  "nvidia-nccl-cu13). Without a GPU everything runs on the CPU. `bin/ingot doctor` says what is found.\n" if cuda else "")
               + "\nREADME.md begins with what the program does, docs/cli.md describes every command. packaging/LICENSES.md and licenses/ have the licences\nof the parts. Links of these pages to other files lead into the source tree.\n")
    tarball = out / f"{root}.tar.gz"
    with tarfile.open(tarball, "w:gz", compresslevel=9) as archive:
        def add(name: str, data: bytes, mode: int = 0o644) -> None:
            entry = tarfile.TarInfo(f"{root}/{name}")
            entry.size, entry.mode, entry.mtime = len(data), mode, EPOCH
            archive.addfile(entry, io.BytesIO(data))
        add("bin/ingot", binary.read_bytes(), 0o755)
        add("INSTALL", install.encode())
        for file in ["LICENSE", "README.md", "CHANGELOG.md", "packaging/LICENSES.md", "packaging/ingot.service", "packaging/nginx.conf"]:
            add(file, (TREE / file).read_bytes())
        for name, text in licence_texts(wheel=False).items():
            add(f"licenses/{name}", text)
        for file in sorted([*(TREE / "docs").glob("*.md"), *(TREE / "docs").glob("*.svg"), *(TREE / "presets").rglob("*.json")]):
            add(str(file.relative_to(TREE)), file.read_bytes())
    return tarball


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--cuda", choices=["AUTO", "ON", "OFF"], default="AUTO", help="the CUDA kernels (default: where nvcc is found)")
    arguments.add_argument("--only", choices=["wheels", "program"], help="make only these files")
    arguments.add_argument("--python", action="append", metavar="PROGRAM", help="a Python that gets a wheel, may be repeated "
                           f"(default: this Python and those of {PYTHONS[0]} to {PYTHONS[-1]} that are found)")
    arguments.add_argument("--build", type=pathlib.Path, default=TREE / "build/release", help="the build directory")
    arguments.add_argument("--out", type=pathlib.Path, default=TREE / "dist", help="where the files go")
    arguments.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at a time")
    a = arguments.parse_args()
    a.build, a.out = a.build.resolve(), a.out.resolve()
    wheels, program = a.only != "program", a.only != "wheels"
    pythons = {}
    for python in a.python or [sys.executable, *filter(shutil.which, PYTHONS)]:
        found = subprocess.run([python, "-c", "import sys, sysconfig; print(sys.version_info[:2], sysconfig.get_path('include'))"],
                               capture_output=True, text=True).stdout.strip()
        include = pathlib.Path(found[found.find(")") + 1:].strip())
        if found and (include / "Python.h").exists():
            pythons.setdefault(found[:found.find(")") + 1], python)
        elif a.python:
            sys.exit(f"release: {python}: found no Python with headers")
    if wheels and not pythons:
        sys.exit("release: found no Python with headers, expected one for a wheel (or --only program)")
    a.out.mkdir(parents=True, exist_ok=True)
    made = []
    info_files = metadata(a.build.parent / f"{a.build.name}-metadata") if wheels else {}
    options = ["-DCMAKE_BUILD_TYPE=Release", f"-DINGOT_CUDA={a.cuda}", "-DINGOT_TESTS=OFF", f"-DINGOT_APPS={'ON' if program else 'OFF'}",
               f"-DINGOT_PYTHON={'ON' if wheels else 'OFF'}"]
    nanobind = f"-Dnanobind_DIR={run(sys.executable, '-m', 'nanobind', '--cmake_dir').strip()}" if wheels else ""
    for python in pythons.values() if wheels else [None]:
        # CMake forgets the previous Python; the library's objects do not depend on Python and stay.
        of_python = ["-UPython*", "-U_Python*", "-UNB_*", f"-DPython_EXECUTABLE={shutil.which(python)}", nanobind] if wheels else []
        log = run("cmake", "-G", "Ninja", "-S", TREE, "-B", a.build, *of_python, *options, stderr=subprocess.STDOUT)
        print("\n".join(line for line in log.splitlines() if "Ingot:" in line), flush=True)
        run("ninja", "-C", a.build, "-j", a.jobs, *(["ingot_python"] if wheels else []), *(["ingot_cli"] if program else []), stderr=subprocess.STDOUT)
        if wheels:
            made.append(make_wheel(python, a.build, a.out, info_files))
    if wheels:
        made.append(by_backend("build_sdist", a.out))
    if program:
        made.append(make_tarball(a.build, a.out, "CUDA kernels ON" in log))
    for file in made:
        print(f"{file}  {file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
