#include "ingot/apps/cli/shared/report.h"

#include <algorithm>

#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/shared/chart.h"

namespace ingot::cli {
namespace {

constexpr int64_t kMostLines = 3, kMostBlanks = 24;  // the most consecutive line breaks, and blanks, that are shown

const char* const kPageStyle = R"(
:root { color-scheme: light dark; --ink: #1f2937; --soft: #6b7280; --page: #ffffff; --box: #f3f4f6; --ours: #2563eb; --theirs: #9ca3af; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e5e7eb; --soft: #9ca3af; --page: #111827; --box: #1f2937; --ours: #60a5fa; --theirs: #6b7280; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 860px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; }
td { padding: .15rem 1.2rem .15rem 0; vertical-align: top; overflow-wrap: anywhere; }
td:first-child { color: var(--soft); white-space: nowrap; width: 1%; }
.bars td { white-space: nowrap; width: 1%; } .bars td.bar { width: 98%; padding-right: 0; vertical-align: middle; }
.bar div { background: var(--theirs); height: 1rem; border-radius: 3px; } tr:first-child .bar div { background: var(--ours); }
pre { background: var(--box); padding: .8rem 1rem; border-radius: 6px; overflow: auto; font-size: .85rem; white-space: pre-wrap;
  overflow-wrap: anywhere; tab-size: 4; max-height: 20rem; }
pre b { color: var(--ours); font-weight: 600; } svg { width: 100%; height: auto; } .moment { color: var(--soft); margin-bottom: .2rem; }
.narrow { display: none; }
@media (max-width: 600px) {
  body { margin: 1rem auto; } .wide { display: none; } .narrow { display: block; }
  .facts td { display: block; width: auto; padding: 0; } .facts td:first-child { padding-top: .5rem; font-size: .85rem; }
})";

std::string rows(const std::vector<std::pair<std::string, std::string>>& facts) {
  std::string out = "<table class=\"facts\">\n";
  for (const auto& [name, value] : facts)
    out += "<tr><td>" + escape_xml(name) + "</td><td>" + escape_xml(value) + "</td></tr>\n";
  return out + "</table>\n";
}
std::string bars(const std::vector<std::pair<std::string, double>>& values) {
  double most = 0;
  for (const auto& [name, value] : values) most = std::max(most, value);
  std::string out = "<table class=\"bars\">\n";
  for (const auto& [name, value] : values)
    out += "<tr><td>" + escape_xml(name) + "</td><td>" + fixed(value, 3) +
           "</td><td class=\"bar\"><div style=\"width:" + fixed(100 * value / most, 1) + "%\"></div></td></tr>\n";
  return out + "</table>\n";
}

}  // namespace

std::string without_gaps(const std::string& text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find_first_not_of(" \t\r\n\v\f", at), text.size());
    const std::string gap = text.substr(at, end - at);
    const int64_t lines = std::count(gap.begin(), gap.end(), '\n');
    const size_t indent = gap.rfind('\n') + 1;  // 0 without a line break
    if (lines > kMostLines)
      out += "\n[" + counted(lines - 1, "empty line") + "]\n";
    else
      out += gap.substr(0, indent);
    if (const int64_t blanks = int64_t(gap.size() - indent); blanks > kMostBlanks)
      out += "[" + counted(blanks, "blank") + "]";
    else
      out += gap.substr(indent);
    const size_t next = std::min(text.find_first_of(" \t\r\n\v\f", end), text.size());
    out += text.substr(end, next - end);
    at = next;
  }
  return out;
}

std::string render_html(const Report& r) {
  std::string out =
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>" +
      escape_xml(r.title) + "</title>\n<style>" + kPageStyle + "\n</style>\n</head>\n<body>\n<h1>" +
      escape_xml(r.title) + "</h1>\n";
  out += rows(r.facts);
  out += "<h2>Bits per byte of held-out documents, lower is better</h2>\n" + bars(r.compression);
  out += "<h2>Loss</h2>\n<div class=\"wide\">" + r.wide_chart + "</div>\n<div class=\"narrow\">" + r.narrow_chart +
         "</div>\n";
  out += "<h2>The same prompt while it learnt</h2>\n";
  for (const ReportSample& s : r.samples)
    out += "<p class=\"moment\">" + escape_xml(s.moment) + "</p>\n<pre><b>" + escape_xml(s.prompt) + "</b>" +
           escape_xml(without_gaps(s.text)) + "</pre>\n";
  out += "<h2>Settings</h2>\n<pre>" + escape_xml(r.config_json) + "</pre>\n</body>\n</html>\n";
  return out;
}

}  // namespace ingot::cli
