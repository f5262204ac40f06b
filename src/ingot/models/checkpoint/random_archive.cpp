// Archives of random weights.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/rng.h"
#include "ingot/models/checkpoint/archive.h"
#include "ingot/models/checkpoint/archive_parts.h"

namespace ingot {
namespace {

using namespace model_archive;

// The standard deviation of a part's numbers, chosen so that logits have a standard deviation of about 2 and every
// branch matters.
struct Spread {
  double mean = 0, std = 1;
};
Spread spread_of(const std::string& name, int64_t cols) {
  const auto is = [&](const char* end) { return name.ends_with(end); };
  const double unit = 1 / std::sqrt(double(cols));
  if (is("norm")) return {1, 0.1};
  if (is("sinks")) return {0, 1};
  if (is("embed")) return {0, 1};
  if (is("head") || is("router")) return {0, 2 * unit};
  if (name.find(".b_") != std::string::npos) return {0, 0.05};
  return {0, is(".o") || is(".down") ? 0.5 * unit : unit};
}

// Writes the parts of an archive, with random numbers.
class RandomParts {
 public:
  RandomParts(ArchiveWriter& writer, uint64_t seed, const ConvertOptions& options)
      : writer_(writer, options), seed_(seed) {}

  void write(const Part& part) {
    const std::vector<int64_t>& shape = part.entry.shape;
    const int64_t cols = shape.back();
    int64_t rows = 1;
    for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
    const bool is_vector = part.entry.format == "f32";
    // The experts follow each other, and each expert begins at the first row of a row tile.
    const int64_t one = shape.size() == 3 ? shape[1] : rows;
    for (int64_t row = 0; row < rows;) {
      const int64_t n = std::min({kPieceRows, rows - row, one - row % one});
      if (is_vector) {
        normals(part.entry.name, n, cols);
        writer_.put(wide_.data(), n * cols * 4);
      } else {
        const std::string& name = part.entry.name;
        writer_.put(
            pieces_.bytes_of(part.to == WeightFormat::mxfp4 ? codes(name, n, cols) : normals(name, n, cols), part));
      }
      row += n;
    }
    ++part_;
  }

 private:
  Rng rng() const { return Rng(seed_, Purpose::init, part_); }

  // The sum of four uniform numbers, scaled to a variance of 1, takes a sixth of the time of an exact normal number.
  static double nearly_normal(uint32_t a, uint32_t b) {
    const uint32_t sum = (a & 0xffff) + (a >> 16) + (b & 0xffff) + (b >> 16);
    return (double(sum) * 0x1p-16 - 2) * 1.7320508075688772;
  }
  WeightMatrix normals(const std::string& name, int64_t rows, int64_t cols) {
    const Spread s = spread_of(name, cols);
    const int64_t numbers = rows * cols, pairs = (numbers + 1) / 2;
    wide_.resize(size_t(2 * pairs));
    parallel_for(pairs, 1 << 15, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const auto words = rng().block(uint64_t(at_ + i));
        wide_[size_t(2 * i)] = float(s.mean + s.std * nearly_normal(words[0], words[1]));
        wide_[size_t(2 * i + 1)] = float(s.mean + s.std * nearly_normal(words[2], words[3]));
      }
    });
    at_ += pairs;
    return WeightMatrix(Tensor(wide_.data(), {rows, cols}));
  }
  // All codes equally likely, at one of two scales: rounding normals for billions of weights would take minutes.
  WeightMatrix codes(const std::string& name, int64_t rows, int64_t cols) {
    constexpr double kCodes = 2.926;  // root of the mean square of e2m1's numbers
    const int exponent = int(std::lround(std::log2(spread_of(name, cols).std / kCodes)));
    const int64_t blocks = rows * cols / kMxBlock;
    codes_.resize(size_t(blocks * 16));
    scales_.resize(size_t(blocks));
    parallel_for(blocks, 1 << 12, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        const auto words = rng().block(uint64_t(at_ + 2 * b));
        std::memcpy(&codes_[size_t(b * 16)], words.data(), 16);
        scales_[size_t(b)] = uint8_t(127 + exponent - int(rng().block(uint64_t(at_ + 2 * b + 1))[0] & 1));
      }
    });
    at_ += 2 * blocks;
    return WeightMatrix(WeightFormat::mxfp4, Tensor(codes_.data(), {rows, cols / kMxBlock, kMxBlock / 2}),
                        Tensor(scales_.data(), {rows, cols / kMxBlock}));
  }

  ProgressWriter writer_;
  uint64_t seed_;
  uint32_t part_ = 0;
  int64_t at_ = 0;  // the next number of the random sequence
  std::vector<float> wide_;
  std::vector<uint8_t> codes_, scales_;
  Pieces pieces_;
};

}  // namespace

int64_t write_random_archive(const ArchivedModel& model, const std::string& to, uint64_t seed,
                             const ConvertOptions& options) {
  check(model.spec, "synthetic");
  check(options.forms, model.spec, "synthetic");
  require_replaceable("", to);
  DecoderWeights none;
  Plan plan{options.forms, {}};
  visit_parts(none, model.spec, model.spec.layers, plan);
  ArchiveWriter writer(to, model.kind, about(model, options.forms), plan.entries());
  RandomParts random(writer, seed, options);
  for (const Part& p : plan.parts) random.write(p);
  writer.commit();
  return writer.file_bytes();
}

}  // namespace ingot
