"""Prints the versions of this build, of Python and of PyTorch, and whether the CUDA kernels are present and can run."""
import argparse
import platform

import torch

import ingot
from ingot import _C, _declare
from ingot._hf_parts import LIMIT, capability_of


def verdict(capability) -> str:
    """What runs on a GPU of this compute capability, (major, minor); docs/python.md, Limits, has the details."""
    if capability[0] == 9:
        return "everything runs, by the kernels for Hopper"
    if capability[0] >= 8:
        return "everything runs, by portable kernels that the driver compiles, or cuBLASLt; grouped_linear by a plain kernel, many times slower than on Hopper"
    if capability >= (7, 5):
        return ("operations over rows run (rms_norm, activations, swiglu, rope, qk_norm_rope), and grouped_linear by a plain kernel; "
                "fused_mlp, gated_linear, wide_mlp, linear_cross_entropy, attention and Muon need compute capability 8.0")
    return "nothing runs: the kernels need compute capability 7.5, and most need 8.0"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ingot", description=__doc__)
    parser.add_argument("--declared", action="store_true", help="print instead the table of declared operators for docs/python.md")
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}; --help lists the options\n")  # one line, without the usage
    if parser.parse_args().declared:
        print(_declare.table())
        return
    print(f"ingot {ingot.__version__} ({_C.commit}), Python {platform.python_version()}, PyTorch {torch.__version__}")
    ways = "functions of its libraries" if _C.has_symbols() else "DLPack's C interface" if _C.has_exchange() else "Python calls (slower)"
    print(f"PyTorch's tensors are read through {ways}")
    if not _C.cuda:
        print("CUDA kernels: not in this build (no nvcc was found at build time, or INGOT_CUDA=OFF); CUDA tensors are refused")
        return
    if not torch.cuda.is_available():
        print("CUDA kernels: in this build, for sm_90a; PyTorch finds no GPU here")
        return
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        limited = ", limited to {}.{} by INGOT_GPU_AS".format(*LIMIT) if LIMIT else ""
        print(f"cuda:{i}: {torch.cuda.get_device_name(i)}, compute capability {major}.{minor}{limited}: {verdict(capability_of(i))}")


if __name__ == "__main__":
    main()
