// ingot bench: times the shipped operations on this machine.
#include "ingot/testing/bench.h"

#include "ingot/apps/cli/framework/cli.h"
#include "ingot/core/check.h"
#include "ingot/core/cpu/cpu.h"
#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/version.h"
#include "ingot/io/json.h"

namespace ingot::cli {
namespace {

using testing::BenchResult;

std::string padded(std::string text, size_t width, bool right = false) {
  if (text.size() < width) text.insert(right ? 0 : text.size(), width - text.size(), ' ');
  return text + "  ";
}
void print_head() {
  write_out(padded("operation", 36) + padded("shape", 18) + padded("dtype", 14) + padded("threads", 7, true) +
            padded("median us", 11, true) + padded("GFLOP/s", 8, true) + padded("GB/s", 8, true) +
            padded("of limit", 8, true) + "\n");
}
void print_row(const BenchResult& r) {
  write_out(padded(r.suite + " " + r.name, 36) + padded(r.shape, 18) + padded(r.dtype, 14) +
            padded(std::to_string(r.threads), 7, true) + padded(fixed(r.median_us, 1), 11, true) +
            padded(r.gflops > 0 ? fixed(r.gflops, 1) : "", 8, true) +
            padded(r.gbytes > 0 ? fixed(r.gbytes, 1) : "", 8, true) +
            padded(r.percent_of_limit > 0 ? fixed(r.percent_of_limit, 0) + " %" : "", 8, true) + "\n");
}
OrderedJson as_json(const BenchResult& r) {
  return {{"suite", r.suite},
          {"name", r.name},
          {"shape", r.shape},
          {"dtype", r.dtype},
          {"threads", r.threads},
          {"repeats", r.repeats},
          {"median_us", r.median_us},
          {"min_us", r.min_us},
          {"gflops", r.gflops},
          {"gbytes", r.gbytes},
          {"percent_of_limit", r.percent_of_limit}};
}

}  // namespace

void add_bench(Command& root) {
  struct BenchCommand {
    std::string filter;
    double seconds = 0.2;
    bool json = false, list = false;
  };
  Command& c =
      root.add("bench", "Times operations on this machine: medians, and their share of the machine's peak rate");
  auto o = std::make_shared<BenchCommand>();
  c.text("FILTER", o->filter, "only cases whose suite/name/shape/dtype contains this (default: all)");
  c.number("--seconds X", o->seconds, 0.001, 3600, "seconds for which each case is repeated (default: 0.2)");
  c.flag("--list", o->list, "print the names of the cases and measure nothing");
  c.flag("--json", o->json, "print one JSON object");
  c.examples(R"(  ingot bench
  ingot bench --list
  ingot bench linear --seconds 1
  ingot bench linear --threads 1 --json)");
  add_bench_decode(c);
  add_bench_draft(c);
  add_bench_prompt(c);
  add_bench_serve(c);
  c.run([o] {
    const auto none = [&] {
      fail(ErrorCode::usage, "found no benchmark that contains '", o->filter, "', expected one of --list");
    };
    if (o->list) {
      const std::vector<std::string> names = testing::bench_names(o->filter);
      if (names.empty()) none();
      if (o->json) return write_out(show_json(OrderedJson(names)) + "\n");
      for (const std::string& name : names) write_out(name + "\n");
      return;
    }
    OrderedJson list = OrderedJson::array();
    bool first = true;
    const auto results = testing::run_benches(
        o->filter,
        [&](const BenchResult& r) {
          if (o->json) return list.push_back(as_json(r));
          if (first) print_head();
          first = false;
          print_row(r);
        },
        o->seconds);
    if (results.empty()) none();
    if (!o->json) return;
    const OrderedJson report = {{"version", version()},          {"commit", commit()},        {"cpu", cpu_model()},
                                {"level", name_of(cpu_level())}, {"threads", thread_count()}, {"results", list}};
    write_out(show_json(report) + "\n");
  });
}

}  // namespace ingot::cli
