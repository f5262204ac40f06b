#pragma once
// The demo's report: one HTML file that needs nothing from a network.
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
  std::vector<std::pair<std::string, std::string>> facts;   // what was trained on what
  std::vector<std::pair<std::string, double>> compression;  // name, bits per byte; the first is ours
  std::string chart_svg;
  std::vector<ReportSample> samples;
  std::string config_json;
};
std::string render_html(const Report& report);

}  // namespace ingot::cli
