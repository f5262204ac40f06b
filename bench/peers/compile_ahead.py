"""Compiles the PyTorch peers of gpu_train.py and gpu_ttt.py for an H200 on a machine that has no GPU, into PyTorch's own cache:

    python3 bench/peers/compile_ahead.py rows|packed 11|17 --cache FOLDER        (gpu_train.py)
    python3 bench/peers/compile_ahead.py origin|chunk_head 17 --cache FOLDER     (gpu_ttt.py)

With torch and Triton of the GPU's machine (its wheels for CUDA, the same versions) and g++ with CUDA's headers. There, TORCHINDUCTOR_CACHE_DIR=FOLDER.
Dynamo traces the peer on the CPU; what AOTAutograd and Inductor then see are fake tensors on cuda:0. Nothing of the GPU runs: PyTorch's questions to it are
answered here (PROPERTIES, and a library loaded first that answers those asked from C++), and kernels are compiled and not loaded. Keys of the cache
hold the graph, the versions and the device's name; where one differs the peer compiles there as ever. Made for torch 2.11.
"""
import argparse
import ctypes
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import types

PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
    regs_per_multiprocessor=65536, total_memory=150_000_000_000, shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472, L2_cache_size=62914560, gcnArchName="")
PRELOADED = r"""
#include <cuda_runtime_api.h>
#include <cstring>
static signed char count = 0;
extern "C" void set_count(int n) { count = n; }
static cudaDeviceProp* properties() {
  static cudaDeviceProp p;
  std::strcpy(p.name, "NVIDIA H200");
  p.major = 9, p.minor = 0, p.multiProcessorCount = 132, p.warpSize = 32, p.sharedMemPerBlock = 49152, p.sharedMemPerBlockOptin = 232448;
  p.sharedMemPerMultiprocessor = 233472, p.regsPerBlock = 65536, p.regsPerMultiprocessor = 65536, p.maxThreadsPerBlock = 1024;
  p.maxThreadsPerMultiProcessor = 2048, p.totalGlobalMem = 150000000000ull, p.l2CacheSize = 62914560;
  return &p;
}
namespace c10::cuda {
bool hasPrimaryContext(signed char) { return false; }
signed char device_count() noexcept { return count; }
signed char device_count_ensure_non_zero() { return count; }
signed char current_device() { return 0; }
}
namespace at::cuda {
cudaDeviceProp* getCurrentDeviceProperties() { return properties(); }
cudaDeviceProp* getDeviceProperties(signed char) { return properties(); }
}
"""
# The driver, as far as libcaffe2_nvrtc.so asks for it: no device, and no context on any.
DRIVER = """int cuInit(unsigned f) { return 100; }
int cuDriverGetVersion(int* v) { *v = 13000; return 0; }
int cuDevicePrimaryCtxGetState(int d, unsigned* f, int* active) { *f = 0; *active = 0; return 0; }
"""


def start_again(cache, cuda):
    """This program with both libraries before all others."""
    import torch
    folder = pathlib.Path(tempfile.mkdtemp())
    (folder / "preloaded.cpp").write_text(PRELOADED)
    subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", f"-I{cuda}/include", folder / "preloaded.cpp", "-o", folder / "preloaded.so"], check=True)
    asked = subprocess.run(["nm", "-D", pathlib.Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"], check=True, capture_output=True, text=True).stdout
    missing = {word for word in asked.split() if word.startswith("cu") and word[2].isupper() and f"{word}(" not in DRIVER}
    (folder / "driver.c").write_text(DRIVER + "".join(f"int {name}(void) {{ return 100; }}\n" for name in sorted(missing)))
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", folder / "driver.c", "-o", folder / "libcuda.so.1"], check=True)
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "INGOT_AHEAD": str(folder), "LD_PRELOAD": str(folder / "preloaded.so"), "INGOT_BENCH_SHARE": "0/1",
                                                            "LD_LIBRARY_PATH": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "1"})


class Driver:
    """Triton's, which knows its target."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        import torch
        return torch.device("cuda", 0)

    def get_current_device(self):
        return 0


def pretend(folder):
    """From here on there is a GPU."""
    import torch
    import torch._inductor.fx_passes.fuse_attention as fuse_attention
    import torch._inductor.fx_passes.misc_patterns as misc_patterns
    import torch._inductor.fx_passes.pad_mm as pad_mm
    import torch._inductor.runtime.triton_helpers as triton_helpers
    import torch._subclasses.fake_tensor as fake_tensor
    import torch.utils._triton as has
    cuda = torch.cuda
    for name, answer in {"is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": PROPERTIES, "_get_device_properties": PROPERTIES,
                         "get_device_capability": (9, 0), "get_device_name": PROPERTIES.name, "_lazy_init": None, "is_initialized": True, "synchronize": None,
                         "is_bf16_supported": True, "mem_get_info": (140 << 30, 141 << 30), "_exchange_device": 0, "_maybe_exchange_device": 0, "set_device": None,
                         "current_stream": None, "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None}.items():
        setattr(cuda, name, lambda *_, answer=answer, **__: answer)
    for name, answer in {"_cuda_getDevice": 0, "_cuda_getDeviceCount": 1, "_cuda_setDevice": None, "_cuda_exchangeDevice": 0, "_cuda_maybeExchangeDevice": 0}.items():
        setattr(torch._C, name, lambda *_, answer=answer: answer)
    ctypes.CDLL(f"{folder}/preloaded.so").set_count(64)
    fake_tensor.init_gpu_context = lambda device: None
    triton_helpers.set_driver_to_gpu = lambda: None
    # Patterns that are traced on the device; none of them is in these graphs.
    fuse_attention._sfdp_init = pad_mm._pad_mm_init = misc_patterns._misc_patterns_init = lambda *_: None
    has.has_triton.cache_clear()


def changed(module, owner, function, *edits):
    """A function of PyTorch's with other words in its source."""
    import inspect
    import textwrap
    source = textwrap.dedent(inspect.getsource(getattr(owner, function)))
    for old, new in edits:
        assert old in source, f"{module.__name__}.{function}: found no {old!r}: another PyTorch than this was made for"
        source = source.replace(old, new)
    exec(source, module.__dict__)
    if owner is not module:
        setattr(owner, function, module.__dict__.pop(function))


def compile_peer(peer, applications, folder):
    import torch
    torch._C._ensureCUDADeviceGuardSet()  # while no device is counted: guards that do nothing
    import torch._inductor.compile_fx as inductor
    import torch._inductor.fx_passes.joint_graph as joint_graph
    import torch._inductor.runtime.triton_heuristics as heuristics
    import torch.nn.attention.flex_attention as flex
    import triton
    from torch._guards import TracingContext
    from torch._subclasses import FakeTensor
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    triton.runtime.driver.set_active(Driver())
    changed(joint_graph, joint_graph.UniformValueConstantFolder, "_deduce_value",  # which computes on the device
            ("aten.full.default(*new_args, **node.kwargs)", "aten.full.default(*new_args, **{k: v for k, v in node.kwargs.items() if k not in ('device', 'pin_memory')})"),
            ("return node.target(*args, **kwargs)", "return node.target(*args, **({**kwargs, 'device': 'cpu'} if 'device' in kwargs else kwargs))"))
    changed(flex, flex, "_validate_device", ('query.device.type == "cpu" and (', "False and ("))
    changed(flex, flex, "_apply_kernel_options", ('.device.type == "cpu"', '.device.type == "none"'))
    kernels = []

    def precompile(self, warm_cache_only=False, reload_kernel=None, static_triton_bundle_key=None):
        kernels.append(len(self.configs or ()))
        if reload_kernel is not None:
            self._reload_kernel = reload_kernel
        self._precompile_worker()
        if static_triton_bundle_key is not None and self.is_statically_launchable():
            heuristics.TritonBundler.put_static_autotuner(static_triton_bundle_key, self)
    heuristics.CachingAutotuner.precompile = precompile
    compile_fx = inductor.compile_fx

    def on_the_device(graph, inputs):
        pretend(folder)
        mode = TracingContext.get().fake_mode

        def moved(t):
            if not isinstance(t, torch.Tensor):
                return t
            with unset_fake_temporarily():
                meta = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta")
            return FakeTensor(mode, meta, torch.device("cuda", 0)).requires_grad_(t.requires_grad)
        return compile_fx(graph, [moved(t) for t in inputs])
    inductor.compile_fx = on_the_device
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
    began, sys.argv[1:] = time.time(), ["--native", ""]
    if peer in ("rows", "packed"):
        import gpu_train as suite
    else:
        import gpu_ttt as suite
    options = suite.parsed()
    options.child, options.device = peer, "cpu"
    try:
        suite.measure_torch(options, applications) if suite.__name__ == "gpu_train" else suite.measure_torch(options)
    except SystemExit:  # compiled, and nothing is to run
        print(f"{peer}, {applications} applications: {len(kernels)} kernels, {sum(kernels)} configurations, {time.time() - began:.0f} s", flush=True)
        os._exit(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=["rows", "packed", "origin", "chunk_head"])
    parser.add_argument("applications", type=int, choices=[11, 17])
    parser.add_argument("--cache", type=pathlib.Path, required=True)
    parser.add_argument("--cuda", default="/usr/local/cuda", help="where CUDA's headers are (default: /usr/local/cuda)")
    options = parser.parse_args()
    folder = os.environ.get("INGOT_AHEAD")
    if not folder:
        start_again(options.cache.resolve(), options.cuda)
    compile_peer(options.peer, options.applications, folder)


if __name__ == "__main__":
    main()
