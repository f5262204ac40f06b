// Fuzzes the loaders of GPT-OSS models: every number of an accepted model can be widened. The input is an archive
// (.ingot as given, or with its checksum corrected, .iris, GGUF), or the first line of a config.json followed by a
// safetensors file.
#include <cmath>
#include <functional>
#include <vector>

#include "ingot/io/file.h"
#include "ingot/io/formats/archive_sum.test.h"
#include "ingot/models/gpt_oss/archive.h"
#include "ingot/testing/fuzz.h"
#include "ingot/testing/temporary_directory.h"

namespace {

using namespace ingot;

void read_through(const WeightMatrix& w) {
  std::vector<float> row(size_t(w.cols() * 16));
  for (int64_t e = 0; e < (w.is_bank() ? w.data.size(0) : 1); ++e) {
    const WeightMatrix one = w.is_bank() ? w.at(e) : w;
    for (int64_t n = 0; n < one.rows(); n += 16) {
      const int64_t rows = std::min<int64_t>(16, one.rows() - n);
      dequantise(one.row_range(n, n + rows), Tensor(row.data(), {rows, w.cols()}), {});
    }
  }
}

void load(const std::string& path) {
  testing::refuse_or_accept([&] {
    const GptOssConfig config = read_gpt_oss_config(path);
    const int64_t bytes = gpt_oss_weight_bytes(path, config);
    const GptOssWeights w = load_gpt_oss(path, config);
    FUZZ_REQUIRE(w.bytes() == bytes && w.layers.size() == size_t(config.layers));
    for (const WeightMatrix* m : {&w.embed, &w.head}) read_through(*m);
    for (const GptOssLayer& l : w.layers)
      for (const WeightMatrix* m : {&l.qkv, &l.o, &l.router, &l.gate_up, &l.down}) read_through(*m);
  });
}

void load_bytes(const std::string& bytes) {
  const testing::MemoryFile file(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  load(file.path());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  if (bytes[0] != '{') {
    load_bytes(bytes);
    load_bytes(testing::with_right_sum(bytes));
    return 0;
  }
  const size_t line = std::min(bytes.find('\n'), bytes.size());
  // lives as long as the process; its contents need no sync to disk
  static const testing::TemporaryDirectory directory;
  const auto put = [&](const char* name, const std::string& content) {
    File file = File::create(directory / name);
    file.write(content);
  };
  put("config.json", bytes.substr(0, line));
  put("model.safetensors", bytes.substr(std::min(bytes.size(), line + 1)));
  load(directory.path());
  return 0;
}
