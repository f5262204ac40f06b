#include "ingot/apps/cli/shared/chart.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "ingot/apps/cli/framework/cli.h"
#include "ingot/core/check.h"

namespace ingot::cli {
namespace {

constexpr int kLeft = 64, kRight = 20, kTop = 44, kBottom = 52;
constexpr int kLegendRow = 20, kMark = 18;
constexpr double kLetter = 7.2, kTitleLetter = 9.2;  // widths of letters in units, on the large side
constexpr double kMaxPoints = 2000;                  // per line: more than the width in pixels
const char* const kColors[] = {"#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f"};
const char* const kStyle = R"(<style>
.chart-page { fill: #ffffff } .chart-ink { fill: #111827 } .chart-soft { fill: #4b5563 }
.chart-grid { stroke: #e5e7eb } .chart-axis { stroke: #9ca3af }
@media (prefers-color-scheme: dark) {
.chart-page { fill: #111827 } .chart-ink { fill: #f3f4f6 } .chart-soft { fill: #9ca3af }
.chart-grid { stroke: #374151 } .chart-axis { stroke: #6b7280 } .chart-data { filter: brightness(1.45) }
}
</style>
)";

int64_t letters(const std::string& text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}
// Paths differ mostly at their ends, so the beginning is cut off.
std::string fitting(const std::string& text, double width, double letter) {
  int64_t drop = letters(text) - std::max<int64_t>(4, int64_t(width / letter));
  if (drop <= 0) return text;
  size_t at = 0;
  for (++drop; drop > 0 || (at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80); ++at)
    drop -= (static_cast<unsigned char>(text[at]) & 0xC0) != 0x80;
  return "\u2026" + text.substr(at);
}

// A round step size that divides [low, high] into about `pieces` parts.
double round_step(double low, double high, int pieces) {
  const double rough = (high - low) / pieces, power = std::pow(10, std::floor(std::log10(rough)));
  for (double factor : {1.0, 2.0, 5.0})
    if (factor * power >= rough) return factor * power;
  return 10 * power;
}

struct Axis {
  double low, high, step;
  // A range of round numbers that contains the data.
  Axis(double least, double most, int pieces, bool rounded) {
    if (!(most > least)) least -= 0.5, most += 0.5;
    step = round_step(least, most, pieces);
    low = rounded ? std::floor(least / step) * step : least;
    high = rounded ? std::ceil(most / step) * step : most;
  }
  double place(double v, double from, double to) const { return from + (v - low) / (high - low) * (to - from); }
  std::vector<double> ticks() const {
    std::vector<double> at;
    for (double k = std::ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; ++k)
      at.push_back(k * step + 0.0);  // never -0
    return at;
  }
};

std::string label(double v, double step) {
  if (step >= 1e6) return fixed(v / 1e6, step >= 1e7 ? 0 : 1) + "M";
  if (step >= 1e3) return fixed(v / 1e3, 0) + "k";
  return fixed(v, step >= 1 ? 0 : int(std::ceil(-std::log10(step) - 1e-9)));
}

std::vector<double> smoothed(const std::vector<double>& y, int width) {
  std::vector<double> out(y.size());
  const int64_t n = int64_t(y.size()), half = width / 2;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t reach = std::min({half, i, n - 1 - i});  // the mean is narrower at the ends, so that it stays centred
    double sum = 0;
    for (int64_t j = i - reach; j <= i + reach; ++j) sum += y[size_t(j)];
    out[size_t(i)] = sum / double(2 * reach + 1);
  }
  return out;
}

class Drawing {
 public:
  Drawing(const Chart& chart, const Axis& x, const Axis& y, const ChartSize& size)
      : chart_(chart), x_(x), y_(y), width_(size.width), height_(size.height) {
    place_legend();
    top_ = kTop + kLegendRow * (entries_.empty() ? 0 : entries_.back().row + 1);
  }

  std::string render() {
    out_ = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + std::to_string(width_) + " " +
           std::to_string(height_) + "\" font-family=\"system-ui, sans-serif\" font-size=\"13\">\n" + kStyle +
           "<rect class=\"chart-page\" width=\"100%\" height=\"100%\"/>\n";
    text(kLeft, 26, fitting(chart_.title, width_ - kLeft - kRight, kTitleLetter),
         "class=\"chart-ink\" font-size=\"16\" font-weight=\"600\"");
    grid();
    for (size_t i = 0; i < chart_.series.size(); ++i) draw(chart_.series[i], kColors[i % std::size(kColors)]);
    legend();
    return out_ + "</svg>\n";
  }

 private:
  double px(double v) const { return x_.place(v, kLeft, width_ - kRight); }
  double py(double v) const { return y_.place(v, height_ - kBottom, top_); }

  void text(double x, double y, const std::string& words, const std::string& style) {
    out_ +=
        "<text x=\"" + fixed(x, 1) + "\" y=\"" + fixed(y, 1) + "\" " + style + ">" + escape_xml(words) + "</text>\n";
  }
  void line(double x0, double y0, double x1, double y1, const char* kind) {
    out_ += std::string("<line class=\"") + kind + "\" x1=\"" + fixed(x0, 1) + "\" y1=\"" + fixed(y0, 1) + "\" x2=\"" +
            fixed(x1, 1) + "\" y2=\"" + fixed(y1, 1) + "\"/>\n";
  }
  void grid() {
    for (double v : y_.ticks()) {
      line(kLeft, py(v), width_ - kRight, py(v), "chart-grid");
      text(kLeft - 8, py(v) + 4, label(v, y_.step), "class=\"chart-soft\" text-anchor=\"end\"");
    }
    for (double v : x_.ticks()) {
      line(px(v), height_ - kBottom, px(v), height_ - kBottom + 5, "chart-axis");
      text(px(v), height_ - kBottom + 20, label(v, x_.step), "class=\"chart-soft\" text-anchor=\"middle\"");
    }
    line(kLeft, height_ - kBottom, width_ - kRight, height_ - kBottom, "chart-axis");
    text((kLeft + width_ - kRight) / 2.0, height_ - 12, chart_.x_label, "class=\"chart-soft\" text-anchor=\"middle\"");
    const double middle = (top_ + height_ - kBottom) / 2.0;
    text(16, middle, chart_.y_label,
         "class=\"chart-soft\" text-anchor=\"middle\" transform=\"rotate(-90 16 " + fixed(middle, 1) + ")\"");
  }
  void polyline(const Series& s, const std::vector<double>& y, const std::string& style) {
    const double stride = std::max(1.0, double(s.x.size()) / kMaxPoints);
    out_ += "<polyline fill=\"none\" stroke-linejoin=\"round\" class=\"chart-data\" " + style + " points=\"";
    for (double at = 0; at < double(s.x.size()); at += stride) {
      const size_t i = size_t(at);
      if (std::isfinite(y[i])) out_ += fixed(px(s.x[i]), 1) + "," + fixed(py(y[i]), 1) + " ";
    }
    if (!s.x.empty() && std::isfinite(y.back())) out_ += fixed(px(s.x.back()), 1) + "," + fixed(py(y.back()), 1);
    out_ += "\"/>\n";
  }
  void draw(const Series& s, const std::string& color) {
    if (s.points) {
      for (size_t i = 0; i < s.x.size(); ++i)
        if (std::isfinite(s.y[i]))
          out_ += "<circle class=\"chart-data\" cx=\"" + fixed(px(s.x[i]), 1) + "\" cy=\"" + fixed(py(s.y[i]), 1) +
                  "\" r=\"3.5\" fill=\"" + color + "\"/>\n";
    } else if (chart_.smooth > 1) {
      polyline(s, s.y, "stroke=\"" + color + "\" stroke-width=\"1\" opacity=\"0.25\"");
      polyline(s, smoothed(s.y, chart_.smooth), "stroke=\"" + color + "\" stroke-width=\"2\"");
    } else {
      polyline(s, s.y, "stroke=\"" + color + "\" stroke-width=\"1.8\"");
    }
  }
  // The legend stands in rows between the title and the data and hides no data.
  void place_legend() {
    double x = kLeft;
    int row = 0;
    for (const Series& s : chart_.series) {
      const std::string last = s.y.empty() ? "" : "  " + fixed(s.y.back(), 3);
      const double room = width_ - kLeft - kRight - kMark;
      const std::string words = fitting(s.name, room - kLetter * double(last.size()), kLetter) + last;
      const double wide = kMark + kLetter * double(letters(words)) + kMark;
      if (x > kLeft && x + wide - kMark > width_ - kRight) x = kLeft, ++row;
      entries_.push_back({words, x, row});
      x += wide;
    }
  }
  void legend() {
    for (size_t i = 0; i < entries_.size(); ++i) {
      const Entry& e = entries_[i];
      const double y = kTop + kLegendRow * e.row + 6;
      out_ += "<rect class=\"chart-data\" x=\"" + fixed(e.x, 1) + "\" y=\"" + fixed(y - 10, 1) +
              "\" width=\"12\" height=\"12\" rx=\"" + (chart_.series[i].points ? "6" : "3") + "\" fill=\"" +
              kColors[i % std::size(kColors)] + "\"/>\n";
      text(e.x + kMark, y, e.words, "class=\"chart-ink\"");
    }
  }

  struct Entry {
    std::string words;
    double x;
    int row;
  };
  const Chart& chart_;
  const Axis &x_, &y_;
  const int width_, height_;
  int top_ = 0;
  std::vector<Entry> entries_;
  std::string out_;
};

}  // namespace

std::string escape_xml(const std::string& text) {
  std::string out;
  for (char c : text) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else if (static_cast<unsigned char>(c) < ' ' && c != '\n' && c != '\t')
      out += "\xEF\xBF\xBD";  // XML does not allow this character
    else
      out += c;
  }
  return out;
}

std::string render_svg(const Chart& chart, const ChartSize& size) {
  double x_least = INFINITY, x_most = -INFINITY;
  std::vector<double> heights;
  for (const Series& s : chart.series) {
    INGOT_CHECK_EQ(s.x.size(), s.y.size(), "chart: series ", s.name);
    for (size_t i = 0; i < s.x.size(); ++i) {
      if (!std::isfinite(s.y[i])) continue;
      x_least = std::min(x_least, s.x[i]), x_most = std::max(x_most, s.x[i]);
      heights.push_back(s.y[i]);
    }
  }
  INGOT_CHECK(!heights.empty(), "chart: found no finite points, expected at least one");
  const auto [least, most] = std::minmax_element(heights.begin(), heights.end());
  const Axis x(x_least, x_most, std::clamp(size.width / 100, 3, 8), false), y(*least, *most, 6, true);
  return Drawing(chart, x, y, size).render();
}

}  // namespace ingot::cli
