#include "ingot/apps/cli/chart.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "ingot/apps/cli/cli.h"
#include "ingot/core/check.h"

namespace ingot::cli {
namespace {

constexpr int kWidth = 820, kHeight = 460;
constexpr int kLeft = 64, kRight = 20, kTop = 48, kBottom = 52;
constexpr double kMaxPoints = 2000;  // per line: more than the pixels there are
const char* const kColors[] = {"#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f"};

// A round step that cuts [low, high] into about `pieces`.
double round_step(double low, double high, int pieces) {
  const double rough = (high - low) / pieces, power = std::pow(10, std::floor(std::log10(rough)));
  for (double factor : {1.0, 2.0, 5.0})
    if (factor * power >= rough) return factor * power;
  return 10 * power;
}

struct Axis {
  double low, high, step;
  // A range of round numbers around the data.
  Axis(double least, double most, int pieces, bool rounded) {
    if (!(most > least)) least -= 0.5, most += 0.5;
    step = round_step(least, most, pieces);
    low = rounded ? std::floor(least / step) * step : least;
    high = rounded ? std::ceil(most / step) * step : most;
  }
  double place(double v, double from, double to) const { return from + (v - low) / (high - low) * (to - from); }
  std::vector<double> ticks() const {
    std::vector<double> at;
    for (double k = std::ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; ++k) at.push_back(k * step);
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
    const int64_t reach = std::min({half, i, n - 1 - i});  // narrower at the ends, so that they stay unbiased
    double sum = 0;
    for (int64_t j = i - reach; j <= i + reach; ++j) sum += y[size_t(j)];
    out[size_t(i)] = sum / double(2 * reach + 1);
  }
  return out;
}

class Drawing {
 public:
  Drawing(const Chart& chart, const Axis& x, const Axis& y) : chart_(chart), x_(x), y_(y) {}

  std::string render() {
    out_ = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + std::to_string(kWidth) + " " +
           std::to_string(kHeight) +
           "\" font-family=\"system-ui, sans-serif\" font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" "
           "fill=\"#ffffff\"/>\n";
    text(kLeft, 26, chart_.title, "font-size=\"16\" font-weight=\"600\" fill=\"#111827\"");
    grid();
    for (size_t i = 0; i < chart_.series.size(); ++i) draw(chart_.series[i], kColors[i % std::size(kColors)]);
    legend();
    return out_ + "</svg>\n";
  }

 private:
  double px(double v) const { return x_.place(v, kLeft, kWidth - kRight); }
  double py(double v) const { return y_.place(v, kHeight - kBottom, kTop); }

  void text(double x, double y, const std::string& words, const std::string& style) {
    out_ +=
        "<text x=\"" + fixed(x, 1) + "\" y=\"" + fixed(y, 1) + "\" " + style + ">" + escape_xml(words) + "</text>\n";
  }
  void line(double x0, double y0, double x1, double y1, const char* color) {
    out_ += "<line x1=\"" + fixed(x0, 1) + "\" y1=\"" + fixed(y0, 1) + "\" x2=\"" + fixed(x1, 1) + "\" y2=\"" +
            fixed(y1, 1) + "\" stroke=\"" + color + "\"/>\n";
  }
  void grid() {
    for (double v : y_.ticks()) {
      line(kLeft, py(v), kWidth - kRight, py(v), "#e5e7eb");
      text(kLeft - 8, py(v) + 4, label(v, y_.step), "text-anchor=\"end\" fill=\"#4b5563\"");
    }
    for (double v : x_.ticks()) {
      line(px(v), kHeight - kBottom, px(v), kHeight - kBottom + 5, "#9ca3af");
      text(px(v), kHeight - kBottom + 20, label(v, x_.step), "text-anchor=\"middle\" fill=\"#4b5563\"");
    }
    line(kLeft, kHeight - kBottom, kWidth - kRight, kHeight - kBottom, "#9ca3af");
    text((kLeft + kWidth - kRight) / 2.0, kHeight - 12, chart_.x_label, "text-anchor=\"middle\" fill=\"#374151\"");
    const double middle = (kTop + kHeight - kBottom) / 2.0;
    text(16, middle, chart_.y_label,
         "text-anchor=\"middle\" fill=\"#374151\" transform=\"rotate(-90 16 " + fixed(middle, 1) + ")\"");
  }
  void polyline(const Series& s, const std::vector<double>& y, const std::string& style) {
    const double stride = std::max(1.0, double(s.x.size()) / kMaxPoints);
    out_ += "<polyline fill=\"none\" stroke-linejoin=\"round\" " + style + " points=\"";
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
          out_ += "<circle cx=\"" + fixed(px(s.x[i]), 1) + "\" cy=\"" + fixed(py(s.y[i]), 1) + "\" r=\"3.5\" fill=\"" +
                  color + "\"/>\n";
    } else if (chart_.smooth > 1) {
      polyline(s, s.y, "stroke=\"" + color + "\" stroke-width=\"1\" opacity=\"0.25\"");
      polyline(s, smoothed(s.y, chart_.smooth), "stroke=\"" + color + "\" stroke-width=\"2\"");
    } else {
      polyline(s, s.y, "stroke=\"" + color + "\" stroke-width=\"1.8\"");
    }
  }
  void legend() {
    double y = kTop + 16;
    for (size_t i = 0; i < chart_.series.size(); ++i, y += 20) {
      const Series& s = chart_.series[i];
      const std::string last = s.y.empty() ? "" : "  " + fixed(s.y.back(), 3);
      text(kWidth - kRight - 26, y, s.name + last, "text-anchor=\"end\" fill=\"#111827\"");
      out_ += "<rect x=\"" + std::to_string(kWidth - kRight - 18) + "\" y=\"" + fixed(y - 10, 1) +
              "\" width=\"12\" height=\"12\" rx=\"3\" fill=\"" + kColors[i % std::size(kColors)] + "\"/>\n";
    }
  }

  const Chart& chart_;
  const Axis &x_, &y_;
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
      out += "\xEF\xBF\xBD";  // XML has no such character
    else
      out += c;
  }
  return out;
}

std::string render_svg(const Chart& chart) {
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
  const Axis x(x_least, x_most, 8, false), y(*least, *most, 6, true);
  return Drawing(chart, x, y).render();
}

}  // namespace ingot::cli
