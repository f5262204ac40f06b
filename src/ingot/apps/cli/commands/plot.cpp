// ingot plot: the curves of one or several runs as an SVG.
#include <algorithm>
#include <cmath>
#include <set>

#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/shared/chart.h"
#include "ingot/core/log.h"
#include "ingot/io/file.h"
#include "ingot/io/json.h"

namespace ingot::cli {
namespace {

// The records of a JSONL log that have both numbers. The key "score.loss" means `loss` in records whose event is
// "score"; without a dot the event is "step". An incomplete last line, left by a killed run, is ignored.
Series read_series(const std::string& log, const std::string& path, const std::string& x_key, const std::string& key) {
  const size_t dot = key.find('.');
  const std::string event = dot == std::string::npos ? "step" : key.substr(0, dot);
  const std::string y_key = dot == std::string::npos ? key : key.substr(dot + 1);
  Series series;
  int64_t number = 0;
  for (size_t begin = 0; begin < log.size();) {
    const size_t end = log.find('\n', begin);
    if (end == std::string::npos) break;
    const Json record =
        parse_json(std::string_view(log).substr(begin, end - begin), path + ":" + std::to_string(++number));
    begin = end + 1;
    if (!record.is_object()) continue;
    const auto named = record.find("event"), x = record.find(x_key), y = record.find(y_key);
    // The records after the checkpoint to which a run went back do not belong to the run any more.
    if (named != record.end() && *named == "resume" && x != record.end() && x->is_number())
      while (!series.x.empty() && series.x.back() > x->get<double>()) series.x.pop_back(), series.y.pop_back();
    if (named != record.end() && *named != event) continue;
    if (x == record.end() || y == record.end() || !x->is_number() || !y->is_number()) continue;
    // A run that was resumed from an earlier checkpoint has some steps twice; the later line counts.
    while (!series.x.empty() && series.x.back() >= x->get<double>()) series.x.pop_back(), series.y.pop_back();
    series.x.push_back(x->get<double>());
    series.y.push_back(y->get<double>());
  }
  return series;
}

// The numbers in a log by the names that --y takes.
std::string numbers_in(const std::string& log) {
  std::set<std::string> names;
  for (size_t begin = 0, end; (end = log.find('\n', begin)) != std::string::npos; begin = end + 1) {
    const Json record = Json::parse(log.begin() + int64_t(begin), log.begin() + int64_t(end), nullptr, false);
    if (!record.is_object()) continue;
    const auto event = record.find("event");
    const bool named = event != record.end() && event->is_string() && *event != "step";
    for (const auto& [key, value] : record.items())
      if (value.is_number()) names.insert(named ? event->get<std::string>() + "." + key : key);
  }
  std::string all;
  for (const std::string& name : names) all += (all.empty() ? "" : ", ") + name;
  return all.empty() ? "none" : all;
}

std::string log_of(const std::string& run) { return is_directory(run) ? join_path(run, "log.jsonl") : run; }

// The name of the axis: "loss" for loss and score.loss; for different numbers, all their names.
std::string label_of(const std::vector<std::string>& keys) {
  std::vector<std::string> names;
  for (const std::string& key : keys) {
    const std::string name = key.substr(key.find('.') + 1);  // the whole key if it has no dot
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  std::string label;
  for (const std::string& name : names) label += (label.empty() ? "" : ", ") + name;
  return label;
}

}  // namespace

Chart chart_of_runs(const std::vector<std::string>& runs, const ChartChoice& choice) {
  Chart chart{.title = choice.title, .x_label = choice.x};
  const std::vector<std::string> keys =
      choice.keys.empty() ? std::vector<std::string>{"loss", "score.loss"} : choice.keys;
  size_t longest = 0;
  for (const std::string& run : runs) {
    const std::string path = log_of(run);
    const std::string log = read_file(path, int64_t(1) << 30);
    size_t found = 0;
    for (const std::string& key : keys) {
      Series series = read_series(log, path, choice.x, key);
      if (series.x.empty()) continue;
      const std::string what = key == "score.loss" ? "held-out loss" : key;
      series.name = runs.size() == 1 ? what : run + " " + what;
      series.points = key.starts_with("score.");
      found += series.x.size();
      if (!series.points) longest = std::max(longest, series.x.size());
      chart.series.push_back(std::move(series));
    }
    if (found == 0)
      fail(ErrorCode::bad_data, path, ": found no record with the numbers '", choice.x, "' and '", keys[0],
           "', expected at least one; numbers in this log: ", numbers_in(log));
  }
  chart.y_label = label_of(keys);
  if (chart.title.empty()) chart.title = runs.size() == 1 ? runs[0] : chart.y_label;
  // A single batch is noisy: the mean is over a twelfth of the run, and over a larger part of a short run.
  chart.smooth = choice.smooth > 0 ? int(choice.smooth)
                                   : int(longest >= 40   ? longest / 12
                                         : longest >= 12 ? std::max<size_t>(3, longest / 6)
                                                         : 1);
  return chart;
}

void add_plot(Command& root) {
  Command& c = root.add("plot", "Draws the curves of runs as an SVG");
  struct PlotOptions {
    std::vector<std::string> runs;
    std::string out = "loss.svg";
    ChartChoice choice;
  };
  auto o = std::make_shared<PlotOptions>();
  c.list("RUN", o->runs, "run directories or JSONL logs").require();
  c.text("--out FILE", o->out, "file to write (default: loss.svg)");
  c.list("--y KEY", o->choice.keys,
         "the number to plot, as EVENT.KEY if the event is not step; may be repeated (default: loss, score.loss)");
  c.text("--x KEY", o->choice.x, "the number on the x axis: step or seconds (default: step)");
  c.integer(
      "--smooth N", o->choice.smooth, 0, 1000000,
      "plot means over N points in front of the raw line (default: by the number of points; 1: the raw line only)");
  c.text("--title TEXT", o->choice.title, "the heading (default: the run's name)").allow_empty();
  c.examples(R"(  ingot plot runs/a
  ingot plot runs/a runs/b --x seconds --out compare.svg
  ingot plot runs/a --y score.bits_per_byte --y grad_norm)");
  c.run([o] {
    std::vector<std::string> logs;
    for (const std::string& run : o->runs) logs.push_back(log_of(run));
    refuse_to_replace(o->out, logs);
    write_file(o->out, render_svg(chart_of_runs(o->runs, o->choice)));
    log_info("wrote ", o->out);
  });
}

}  // namespace ingot::cli
