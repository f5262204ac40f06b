// The native half of tests/parity/parity_gpt_oss.py: runs a checkpoint over sequences of ids and writes logits and
// greedy continuations. Arguments: DIRECTORY, the cases as JSON, the output file (f32). Or --encode NUMBERS COLUMNS
// OUT: rows of f32 as MXFP4 blocks, then their scales.
#include <algorithm>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ingot/models/gpt_oss/gpt_oss.h"

namespace {

using namespace ingot;

// ids in batches; the last token's hidden row, and the rows asked for on the way.
struct Run {
  GptOss& model;
  GptOssCache& cache;
  std::vector<float>& out;
  std::vector<float> row;

  Run(GptOss& m, GptOssCache& c, std::vector<float>& o) : model(m), cache(c), out(o), row(size_t(m.spec().vocab)) {}
  const float* logits_of(const Tensor& normed, int64_t t) {
    model.logits(normed.slice(0, t, t + 1), Tensor(row.data(), {1, model.spec().vocab}));
    return row.data();
  }
  void prompt(const std::vector<int32_t>& ids, const std::vector<int64_t>& batches, const std::vector<int64_t>& rows) {
    size_t at = 0;
    for (size_t i = 0; at < ids.size(); ++i) {
      const int64_t n = std::min<int64_t>(batches[i % batches.size()], int64_t(ids.size() - at));
      const Tensor normed = model.extend(std::span(ids).subspan(at, size_t(n)), cache);
      for (const int64_t r : rows)
        if (r >= int64_t(at) && r < int64_t(at) + n) {
          const float* l = logits_of(normed, r - int64_t(at));
          out.insert(out.end(), l, l + row.size());
        }
      at += size_t(n);
      if (at == ids.size()) logits_of(normed, n - 1);
    }
  }
  void greedy(int64_t tokens) {
    for (int64_t i = 0; i < tokens; ++i) {
      const int32_t id = int32_t(std::max_element(row.begin(), row.end()) - row.begin());
      out.push_back(float(id));
      logits_of(model.extend(std::span(&id, 1), cache), 0);
    }
  }
};

void run(const std::string& directory, const nlohmann::json& cases, const std::string& path) {
  const GptOssConfig config = read_gpt_oss_config(directory);
  const GptOssWeights weights = load_gpt_oss(directory, config, {.layers = cases.value("layers", int64_t(0))});
  const int64_t batch = 512;
  GptOss model(config, weights, {.batch = batch, .positions = 4200});
  std::vector<float> out;
  for (const auto& c : cases.at("cases")) {
    const auto ids = c.at("ids").get<std::vector<int32_t>>();
    const int64_t more = c.at("greedy");
    GptOssCache cache(config, model.layers(), int64_t(ids.size()) + more, batch);
    Run r(model, cache, out);
    r.prompt(ids, c.at("batches").get<std::vector<int64_t>>(), c.at("rows").get<std::vector<int64_t>>());
    r.greedy(more);
  }
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(out.data()), std::streamsize(out.size() * sizeof(float)));
  INGOT_CHECK(file.good(), "cannot write ", path);
}

void encode(const std::string& from, int64_t cols, const std::string& to) {
  std::ifstream in(from, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(in), {}};
  std::vector<float> x(bytes.size() / 4);
  std::memcpy(x.data(), bytes.data(), x.size() * 4);
  const int64_t rows = int64_t(x.size()) / cols, blocks = cols / kMxBlock;
  std::vector<uint8_t> out(size_t(rows * blocks * 17));
  const WeightMatrix w(WeightFormat::mxfp4, Tensor(out.data(), {rows, blocks, 16}),
                       Tensor(out.data() + rows * blocks * 16, {rows, blocks}));
  quantise(Tensor(x.data(), {rows, cols}), w, {});
  std::ofstream file(to, std::ios::binary);
  file.write(reinterpret_cast<const char*>(out.data()), std::streamsize(out.size()));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc == 5 && std::string(argv[1]) == "--encode") {
      encode(argv[2], std::stoll(argv[3]), argv[4]);
      return 0;
    }
    INGOT_CHECK(argc == 4, "found ", argc - 1, " arguments, expected DIRECTORY CASES OUT");
    std::ifstream in(argv[2]);
    run(argv[1], nlohmann::json::parse(in), argv[3]);
  } catch (const std::exception& e) {
    std::cerr << argv[1] << ": " << e.what() << "\n";
    return 1;
  }
  return 0;
}
