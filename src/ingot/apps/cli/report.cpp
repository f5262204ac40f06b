#include "ingot/apps/cli/report.h"

#include <algorithm>

#include "ingot/apps/cli/chart.h"
#include "ingot/apps/cli/cli.h"

namespace ingot::cli {
namespace {

const char* const kStyle = R"(
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2937; max-width: 860px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; } td { padding: .15rem 1.2rem .15rem 0; vertical-align: top; }
td:first-child { color: #6b7280; white-space: nowrap; } td.bar { width: 60%; }
.bar div { background: #9ca3af; height: 1rem; border-radius: 3px; } tr:first-child .bar div { background: #2563eb; }
pre { background: #f3f4f6; padding: .8rem 1rem; border-radius: 6px; overflow-x: auto; font-size: .85rem; white-space: pre-wrap; }
pre b { color: #2563eb; font-weight: 600; } svg { width: 100%; height: auto; } .moment { color: #6b7280; margin-bottom: .2rem; })";

std::string rows(const std::vector<std::pair<std::string, std::string>>& facts) {
  std::string out = "<table>\n";
  for (const auto& [name, value] : facts)
    out += "<tr><td>" + escape_xml(name) + "</td><td>" + escape_xml(value) + "</td></tr>\n";
  return out + "</table>\n";
}
std::string bars(const std::vector<std::pair<std::string, double>>& values) {
  double most = 0;
  for (const auto& [name, value] : values) most = std::max(most, value);
  std::string out = "<table>\n";
  for (const auto& [name, value] : values)
    out += "<tr><td>" + escape_xml(name) + "</td><td>" + fixed(value, 3) +
           "</td><td class=\"bar\"><div style=\"width:" + fixed(100 * value / most, 1) + "%\"></div></td></tr>\n";
  return out + "</table>\n";
}

}  // namespace

std::string render_html(const Report& r) {
  std::string out = "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>" +
                    escape_xml(r.title) + "</title>\n<style>" + kStyle + "\n</style>\n</head>\n<body>\n<h1>" +
                    escape_xml(r.title) + "</h1>\n";
  out += rows(r.facts);
  out += "<h2>Bits per byte of held-out documents, lower is better</h2>\n" + bars(r.compression);
  out += "<h2>Loss</h2>\n" + r.chart_svg;
  out += "<h2>The same prompt while it learnt</h2>\n";
  for (const ReportSample& s : r.samples)
    out += "<p class=\"moment\">" + escape_xml(s.moment) + "</p>\n<pre><b>" + escape_xml(s.prompt) + "</b>" +
           escape_xml(s.text) + "</pre>\n";
  out += "<h2>Settings</h2>\n<pre>" + escape_xml(r.config_json) + "</pre>\n</body>\n</html>\n";
  return out;
}

}  // namespace ingot::cli
