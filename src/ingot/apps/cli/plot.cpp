// ingot plot: the curves of one or several runs as an SVG.
#include <cmath>

#include "ingot/apps/cli/chart.h"
#include "ingot/apps/cli/cli.h"
#include "ingot/core/log.h"
#include "ingot/io/file.h"
#include "ingot/io/json.h"

namespace ingot::cli {
namespace {

struct PlotOptions {
  std::vector<std::string> runs, keys;
  std::string out = "loss.svg", x = "step", title;
  int64_t smooth = 0;
};

// The records of a JSONL log that have both numbers. A last line without its end is what a killed run left: ignored.
Series read_series(const std::string& log, const std::string& path, const std::string& x_key,
                   const std::string& y_key) {
  Series series;
  int64_t number = 0;
  for (size_t begin = 0; begin < log.size();) {
    const size_t end = log.find('\n', begin);
    if (end == std::string::npos) break;
    const Json record =
        parse_json(std::string_view(log).substr(begin, end - begin), path + ":" + std::to_string(++number));
    begin = end + 1;
    if (!record.is_object()) continue;
    const auto x = record.find(x_key), y = record.find(y_key);
    if (x == record.end() || y == record.end() || !x->is_number() || !y->is_number()) continue;
    // A run that was resumed from an earlier checkpoint wrote some steps twice: the later line counts.
    while (!series.x.empty() && series.x.back() >= x->get<double>()) series.x.pop_back(), series.y.pop_back();
    series.x.push_back(x->get<double>());
    series.y.push_back(y->get<double>());
  }
  return series;
}

void plot(const PlotOptions& options) {
  Chart chart{.title = options.title, .x_label = options.x};
  const bool own_keys = !options.keys.empty();
  const std::vector<std::string> keys = own_keys ? options.keys : std::vector<std::string>{"loss", "valid_loss"};
  size_t longest = 0;
  for (const std::string& run : options.runs) {
    const std::string path = is_directory(run) ? join_path(run, "log.jsonl") : run;
    const std::string log = read_file(path, int64_t(1) << 30);
    size_t found = 0;
    for (const std::string& key : keys) {
      Series series = read_series(log, path, options.x, key);
      if (series.x.empty()) continue;
      series.name = options.runs.size() == 1 ? key : run + " " + key;
      series.points = key.starts_with("valid");
      found += series.x.size();
      if (!series.points) longest = std::max(longest, series.x.size());
      chart.series.push_back(std::move(series));
    }
    if (found == 0)
      fail(ErrorCode::bad_data, path, ": found no record with the numbers '", options.x, "' and '", keys[0],
           "', expected at least one");
  }
  chart.y_label = keys[0];
  if (chart.title.empty()) chart.title = options.runs.size() == 1 ? options.runs[0] : keys[0];
  chart.smooth = options.smooth > 0 ? int(options.smooth) : longest >= 200 ? int(longest / 50) : 1;
  write_file(options.out, render_svg(chart));
  log_info("wrote ", options.out);
}

}  // namespace

void add_plot(Command& root) {
  Command& c = root.add("plot", "Draws the curves of runs as an SVG");
  auto o = std::make_shared<PlotOptions>();
  c.list("RUN", o->runs, "run directories or JSONL logs").require();
  c.text("--out FILE", o->out, "where to write (default: loss.svg)");
  c.list("--y KEY", o->keys, "the number to draw; may be repeated (default: loss and valid_loss)");
  c.text("--x KEY", o->x, "the number along the axis: step, tokens or seconds (default: step)");
  c.integer("--smooth N", o->smooth, 0, 1000000,
            "mean over N points, the raw line behind it (default: by length; 1: none)");
  c.text("--title TEXT", o->title, "the heading (default: the run's name)");
  c.examples(R"(  ingot plot runs/a
  ingot plot runs/a runs/b --x seconds --out compare.svg
  ingot plot runs/a --y tokens_per_second)");
  c.run([o] { plot(*o); });
}

}  // namespace ingot::cli
