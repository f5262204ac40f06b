#pragma once
// A line chart as an SVG document: axes with round numbers, a grid, one colour per series, a legend with last values
// above the data. The colours follow the reader's choice of a light or a dark page.
#include <cstdint>
#include <string>
#include <vector>

namespace ingot::cli {

struct Series {
  std::string name;
  std::vector<double> x, y;  // equally long; x ascending; points with a non-finite y are left out
  bool points = false;       // marks instead of a line, for few, scattered measurements
};
struct Chart {
  std::string title, x_label, y_label;
  std::vector<Series> series;
  int smooth = 1;  // lines show a centred mean over this many points, above the faint raw line
};
struct ChartSize {
  int width = 820, height = 460;  // in units of which a letter is about 7 wide
};
std::string render_svg(const Chart& chart, const ChartSize& size = {});

// The numbers to plot from the logs of runs (run directories or JSONL files).
struct ChartChoice {
  std::vector<std::string> keys;  // empty: loss, and held-out loss as points
  std::string x = "step", title;  // an empty title: the run's name
  int64_t smooth = 0;             // 0: by the length of the run
};
Chart chart_of_runs(const std::vector<std::string>& runs, const ChartChoice& choice);

std::string escape_xml(const std::string& text);

}  // namespace ingot::cli
