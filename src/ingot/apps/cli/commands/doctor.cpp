// ingot doctor: reports the features of this machine and this build, and missing parts.
#include <dlfcn.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/shared/libraries.h"
#include "ingot/core/cpu/cpu.h"
#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/progress.h"
#include "ingot/core/version.h"
#include "ingot/gpu/nccl.h"
#include "ingot/io/codecs/sha256.h"
#include "ingot/io/json.h"

namespace ingot::cli {
namespace {

std::string find_program(const std::string& name) {
  const char* path = std::getenv("PATH");
  std::istringstream directories(path != nullptr ? path : "");
  for (std::string directory; std::getline(directories, directory, ':');)
    if (!directory.empty() && access((directory + "/" + name).c_str(), X_OK) == 0) return directory + "/" + name;
  return "";
}

// The first of the names that the loader finds; empty if the loader finds none of them.
std::string find_library(std::initializer_list<const char*> names) {
  for (const char* name : names)
    if (void* handle = dlopen(name, RTLD_LAZY | RTLD_LOCAL); handle != nullptr) {
      dlclose(handle);
      return name;
    }
  return "";
}

int64_t meminfo(const std::string& key) {
  std::ifstream info("/proc/meminfo");
  for (std::string name, unit; info >> name;) {
    int64_t kilobytes = 0;
    info >> kilobytes;
    std::getline(info, unit);
    if (name == key + ":") return kilobytes * 1024;
  }
  return 0;
}
// The memory limit of the control group, or 0 without a limit.
int64_t memory_limit() {
  for (const char* path : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    int64_t bytes = 0;
    if (std::ifstream file(path); file >> bytes && bytes < (int64_t(1) << 60)) return bytes;
  }
  return 0;
}
int64_t disk_free(const char* path) {
  struct statvfs s {};
  return statvfs(path, &s) == 0 ? int64_t(s.f_bavail) * int64_t(s.f_frsize) : 0;
}

// The kernels that a GPU of this compute capability runs (docs/gpu-layer.md): "none", "rows", "portable" or "hopper".
const char* kernels_of_gpu(int major, int minor) {
  if (major >= 8) return major == 9 && minor == 0 ? "hopper" : "portable";
  return major == 7 && minor >= 5 ? "rows" : "none";
}
std::string described_kernels(const std::string& kernels) {
  if (kernels == "hopper") return "all operations by Hopper's variants";
  if (kernels == "portable")
    return "operations and models by the portable variants, which were measured on no such GPU (docs/gpu-layer.md)";
  return std::string(kernels == "rows" ? "RMSNorm, activations, gates, RoPE and further operations over rows "
                                         "(docs/gpu-layer.md)"
                                       : "no kernels") +
         "; products, attention and models need 8.0, and models run on the CPU";
}

// The compute capability to whose limits INGOT_GPU_AS reduces those of a GPU, or empty.
std::string limited_to() {
  const char* const capability = std::getenv("INGOT_GPU_AS");
  return capability == nullptr ? "" : capability;
}

// The driver's own list of GPUs, through the few entry points needed (their signatures belong to the driver API and
// have been stable since CUDA 2).
OrderedJson gpus() {
  OrderedJson found = OrderedJson::array();
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (driver == nullptr) return found;
  const auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(driver, "cuInit"));
  const auto get_count = reinterpret_cast<int (*)(int*)>(dlsym(driver, "cuDeviceGetCount"));
  const auto get_name = reinterpret_cast<int (*)(char*, int, int)>(dlsym(driver, "cuDeviceGetName"));
  const auto get_memory = reinterpret_cast<int (*)(size_t*, int)>(dlsym(driver, "cuDeviceTotalMem_v2"));
  const auto get_attribute = reinterpret_cast<int (*)(int*, int, int)>(dlsym(driver, "cuDeviceGetAttribute"));
  constexpr int kMajor = 75, kMinor = 76, kMultiprocessors = 16;  // CU_DEVICE_ATTRIBUTE_*
  int count = 0;
  if (!init || !get_count || !get_name || !get_memory || !get_attribute || init(0) != 0 || get_count(&count) != 0)
    return found;
  for (int device = 0; device < count; ++device) {
    char name[256] = "";
    size_t memory = 0;
    int major = 0, minor = 0, multiprocessors = 0;
    get_name(name, sizeof name - 1, device);
    get_memory(&memory, device);
    get_attribute(&major, kMajor, device);
    get_attribute(&minor, kMinor, device);
    get_attribute(&multiprocessors, kMultiprocessors, device);
    std::string kernels = kernels_of_gpu(major, minor);
    const std::string limits = limited_to();
    if (limits == "7.5" && kernels != "none") kernels = "rows";
    if (kernels == "hopper" && !limits.empty() && limits != "9.0") kernels = "portable";
    found.push_back({{"name", name},
                     {"memory_bytes", memory},
                     {"compute_capability", std::to_string(major) + "." + std::to_string(minor)},
                     {"multiprocessors", multiprocessors},
                     {"kernels", kernels},
                     {"runs_models", kernels == "portable" || kernels == "hopper"}});
    if (!limits.empty()) found.back()["limited_to"] = limits;
  }
  return found;
}

struct Need {
  const char* name;
  std::string found;
  const char* without;
};

std::vector<Need> needs() {
  return {
      {"nvcc", find_program("nvcc"), "CUDA kernels cannot be built here"},
      {"NVIDIA driver", find_library({"libcuda.so.1"}), "no GPU can be used"},
      {"cuBLASLt", use_installed_cublaslt(), kWithoutCublaslt},
      {"NCCL", gpu::nccl_available() ? gpu::nccl_version() : "",
       "no training on several GPUs: pip install nvidia-nccl-cu13"},
      {"libcrypto", sha256_library() != nullptr ? sha256_library() : "",
       "checksums of checkpoints and archives take longer"},
      {"gzip", find_program("gzip"), "the demo cannot compare with gzip -9"},
      {"xz", find_program("xz"), "the demo cannot compare with xz -9e"},
  };
}

OrderedJson examine() {
  OrderedJson report;
  report["version"] = version();
  report["commit"] = commit();
#ifdef INGOT_CUDA_BUILD
  report["cuda_build"] = true;
#else
  report["cuda_build"] = false;
#endif
  report["cpu"] = {{"model", cpu_model()},
                   {"cpus", cpu_count()},
                   {"threads", thread_count()},
                   {"level", name_of(cpu_level())},
                   {"level_available", name_of(cpu_level_available())}};
  report["memory"] = {{"total_bytes", meminfo("MemTotal")},
                      {"available_bytes", meminfo("MemAvailable")},
                      {"limit_bytes", memory_limit()}};
  report["disk"] = {{"free_bytes_here", disk_free(".")}, {"free_bytes_tmp", disk_free("/tmp")}};
  report["gpus"] = gpus();
  report["found"] = OrderedJson::object();
  report["missing"] = OrderedJson::object();
  for (const Need& need : needs())
    if (need.found.empty())
      report["missing"][need.name] = need.without;
    else
      report["found"][need.name] = need.found;
  return report;
}

void print_machine(const OrderedJson& r) {
  const auto row = [](const std::string& name, const std::string& value) {
    write_out("  " + name + std::string(name.size() < 16 ? 16 - name.size() : 1, ' ') + value + "\n");
  };
  const auto text = [](const OrderedJson& v) { return v.get<std::string>(); };
  const auto size = [](const OrderedJson& v) { return format_bytes(double(v.get<int64_t>())); };
  write_out("ingot " + text(r["version"]) + " (" + text(r["commit"]) + "), " +
            (r["cuda_build"].get<bool>() ? "with" : "without") + " CUDA kernels\n\nThis machine\n");
  const auto& cpu = r["cpu"];
  row("CPU", text(cpu["model"]));
  row("vector code",
      text(cpu["level"]) +
          (cpu["level"] == cpu["level_available"] ? "" : " (the CPU can do " + text(cpu["level_available"]) + ")"));
  row("threads", std::to_string(cpu["threads"].get<int>()) + " of " + std::to_string(cpu["cpus"].get<int>()) + " CPUs");
  row("memory",
      size(r["memory"]["available_bytes"]) + " free of " + size(r["memory"]["total_bytes"]) +
          (r["memory"]["limit_bytes"] != 0 ? ", this process may use " + size(r["memory"]["limit_bytes"]) : ""));
  row("disk", size(r["disk"]["free_bytes_here"]) + " free here, " + size(r["disk"]["free_bytes_tmp"]) + " in /tmp");
  if (r["gpus"].empty()) row("GPU", "none: everything runs on the CPU");
  for (const auto& gpu : r["gpus"])
    row("GPU", text(gpu["name"]) + ", " + size(gpu["memory_bytes"]) + ", compute capability " +
                   text(gpu["compute_capability"]) +
                   (gpu.contains("limited_to") ? ", limited to " + text(gpu["limited_to"]) + " by INGOT_GPU_AS" : "") +
                   ": " + described_kernels(text(gpu["kernels"])));
  write_out("\nFound\n");
  for (const auto& [name, where] : r["found"].items()) row(name, text(where));
  if (!r["missing"].empty()) write_out("\nMissing (each optional)\n");
  for (const auto& [name, without] : r["missing"].items()) row(name, text(without));
}

}  // namespace

void add_doctor(Command& root) {
  Command& c = root.add("doctor", "Prints the features of this machine and this build, and the missing ones");
  auto json = std::make_shared<bool>(false);
  c.flag("--json", *json, "print one JSON object");
  c.examples(R"(  ingot doctor
  ingot doctor --json | python3 -m json.tool)");
  c.run([json] {
    const OrderedJson report = examine();
    if (*json)
      write_out(show_json(report) + "\n");
    else
      print_machine(report);
  });
}

}  // namespace ingot::cli
