"""Fused kernels for PyTorch: whole MLPs, RMSNorm, rotary embedding and gated units, on CUDA (sm_90a) and on CPUs.

    from ingot.nn import RMSNorm, FusedMLP, SwiGLU      modules; state dicts load from the modules they replace
    from ingot import functional                        the same as functions
    ingot.optim.Muon(parameters)                        Muon for matrices, AdamW for the rest
    ingot.hf.patch(model)                               replaces RMSNorms, gated MLPs and losses of a model, reversibly
    ingot.engine.Model(path).generate(prompt)           published models (GPT-OSS, Llama, Qwen, ...), answered by this process
    python -m ingot                                     the versions and kernels of this build
"""
try:
    import torch
except ImportError as e:
    raise ImportError("ingot needs PyTorch 2.6 or later: install torch (any build of it; ingot is compiled without it)") from e

from . import _C

_C.attach(torch)

from . import functional, hf, nn, optim  # noqa: E402  (these modules register the operators)

__version__ = _C.version
built_with_cuda = _C.cuda

__all__ = ["functional", "hf", "nn", "optim", "built_with_cuda", "__version__"]

if hasattr(_C, "Engine"):  # not in a build of some rooms
    from . import engine  # noqa: E402

    __all__ += ["engine"]
