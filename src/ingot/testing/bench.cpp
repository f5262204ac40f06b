#include "ingot/testing/bench.h"

#include <algorithm>
#include <chrono>

#include "ingot/core/cpu/cpu.h"
#include "ingot/core/cpu/thread_pool.h"

INGOT_SIMD_DECLARE(double fma_loop_f32(int64_t rounds); double fma_loop_bf16(int64_t rounds);)
INGOT_SIMD_TILES_DECLARE(double tile_loop_bf16(int64_t rounds);)

namespace ingot::testing {
namespace {

std::vector<BenchMaker>& makers() {
  static std::vector<BenchMaker> all;
  return all;
}

std::string full_name(const BenchCase& c) { return c.suite + "/" + c.name + "/" + c.shape + "/" + c.dtype; }

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

BenchResult measure(const BenchCase& c, double seconds) {
  const auto run = c.make ? c.make() : c.run;
  BenchResult r{.suite = c.suite, .name = c.name, .shape = c.shape, .dtype = c.dtype};
  const int before = thread_count();
  if (c.threads > 0) set_thread_count(c.threads);
  r.threads = thread_count();
  run();
  std::vector<double> times;
  const double start = now();
  do {
    const double t = now();
    run();
    times.push_back(now() - t);
  } while (now() - start < seconds || times.size() < 5);
  set_thread_count(before);
  std::sort(times.begin(), times.end());
  const double median = times[times.size() / 2];
  r.repeats = int(times.size());
  r.median_us = median * 1e6;
  r.min_us = times.front() * 1e6;
  r.gflops = c.flops / median * 1e-9;
  r.gbytes = c.bytes / median * 1e-9;
  if (c.limit_flops > 0) r.percent_of_limit = 100 * c.flops / median / (c.limit_flops * r.threads);
  return r;
}

// The fastest of many short loops: an upper bound must not be lowered by whatever else the machine does.
template <class Loop> double fastest(Loop&& loop) {
  double best = 0;
  for (int i = 0; i < 100; ++i) {
    const double t = now(), operations = loop();
    best = std::max(best, operations / (now() - t));
  }
  return best;
}

}  // namespace

void register_bench(BenchMaker maker) { makers().push_back(maker); }

std::vector<std::string> bench_names(const std::string& filter) {
  std::vector<std::string> names;
  for (BenchMaker maker : makers())
    for (const BenchCase& c : maker())
      if (full_name(c).find(filter) != std::string::npos) names.push_back(full_name(c));
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<BenchResult> run_benches(const std::string& filter, const std::function<void(const BenchResult&)>& done,
                                     double seconds) {
  std::vector<BenchResult> results;
  for (BenchMaker maker : makers())
    for (const BenchCase& c : maker()) {
      if (full_name(c).find(filter) == std::string::npos) continue;
      results.push_back(measure(c, seconds));
      if (done) done(results.back());
    }
  return results;
}

double fma_bound_f32() {
  static const double bound = fastest([] { return INGOT_SIMD_CALL(fma_loop_f32, 20000); });
  return bound;
}
double fma_bound_bf16() {
  if (cpu_level() < CpuLevel::avx512_bf16) return 0;
  static const double bound = [] {
    if (cpu_level() >= CpuLevel::avx512_amx) return fastest([] { return INGOT_SIMD_TILES_CALL(tile_loop_bf16, 2000); });
    return fastest([] { return INGOT_SIMD_CALL(fma_loop_bf16, 20000); });
  }();
  return bound;
}

}  // namespace ingot::testing
