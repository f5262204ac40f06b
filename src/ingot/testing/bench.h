#pragma once
// Benchmarks beside the measured code: a file <op>.bench.cpp registers cases, `ingot bench` runs them.
//   INGOT_BENCH(linear) { return {{.suite = "linear", .name = "forward", .shape = "768x128x128", .dtype = "f32",
//                                  .run = [...] { linear(op, {}); }, .flops = 2.0 * 768 * 128 * 128}}; }
#include <functional>
#include <string>
#include <vector>

namespace ingot::testing {

struct BenchCase {
  std::string suite, name, shape, dtype;
  std::function<void()> run;    // the shipped entry point; owns its operands
  double flops = 0, bytes = 0;  // of a run
  double limit_flops = 0;       // per second and thread: the bound `flops` is compared with, or 0
  int threads = 0;              // 0: as many as the process uses
  // Instead of `run`: makes the function with its operands before the measurement; both are freed afterwards.
  std::function<std::function<void()>()> make;
};
struct BenchResult {
  std::string suite, name, shape, dtype;
  int threads = 1, repeats = 0;
  double median_us = 0, min_us = 0;
  double gflops = 0, gbytes = 0;  // per second, from the median
  double percent_of_limit = 0;    // of limit_flops on all threads; 0 where no limit is given
};

using BenchMaker = std::vector<BenchCase> (*)();
void register_bench(BenchMaker maker);

// Runs every case whose "suite/name/shape/dtype" contains `filter`, each for at least `seconds` after a warm-up, and
// calls `done` after each.
std::vector<BenchResult> run_benches(const std::string& filter,
                                     const std::function<void(const BenchResult&)>& done = {}, double seconds = 0.2);

// "suite/name/shape/dtype" of every case whose name contains `filter`.
std::vector<std::string> bench_names(const std::string& filter);

// Operations per second (a multiply-add is two) of independent register-to-register multiply-adds on a single thread,
// at the CPU level in use: an upper bound for products. Measured once.
double fma_bound_f32();
// The same for bf16 dot products with fp32 sums, by tiles where in use; 0 where the CPU has no such instruction.
double fma_bound_bf16();

}  // namespace ingot::testing

#define INGOT_BENCH(name)                                         \
  static std::vector<::ingot::testing::BenchCase> bench_##name(); \
  [[maybe_unused]] static const bool bench_##name##_registered =  \
      (::ingot::testing::register_bench(&bench_##name), true);    \
  static std::vector<::ingot::testing::BenchCase> bench_##name()
