#pragma once
// The demo's report: one HTML file that loads nothing from a network.
#include <string>
#include <utility>
#include <vector>

namespace ingot::cli {

struct ReportSample {
  std::string moment;  // "step 400 of 2000"
  std::string prompt, text;
};
struct Report {
  std::string title;
  std::vector<std::pair<std::string, std::string>> facts;   // names and values shown at the top
  std::vector<std::pair<std::string, double>> compression;  // name, bits per byte; the first is ours
  std::string wide_chart, narrow_chart;                     // SVG, for wide and narrow pages
  std::vector<ReportSample> samples;
  std::string config_json;
};
std::string render_html(const Report& report);

// The text with long stretches of white space replaced by a note, because an untrained model may write nothing else.
std::string without_gaps(const std::string& text);

}  // namespace ingot::cli
