#include "ingot/models/gpt/artifact.h"

#include <cmath>
#include <cstring>

#include "ingot/core/check.h"
#include "ingot/io/crc32c.h"
#include "ingot/io/file.h"
#include "ingot/io/integer_coder.h"
#include "ingot/io/json.h"

namespace ingot {
namespace {

constexpr std::string_view kMagic = "INGOTGPT";

void put_u32(std::string& out, uint32_t n) {
  for (int i = 0; i < 4; ++i) out.push_back(char(n >> (8 * i) & 255));
}
void put_f16(std::string& out, const std::vector<f16>& numbers) {
  for (const f16 x : numbers) out.push_back(char(x.bits & 255)), out.push_back(char(x.bits >> 8));
}

// Takes what it is asked for from the front.
class Reader {
 public:
  Reader(std::string_view bytes, const std::string& name) : bytes_(bytes), name_(name) {}
  std::string_view take(size_t n, const char* what) {
    if (n > bytes_.size() - at_)
      fail(ErrorCode::bad_data, name_, ": found ", bytes_.size(), " bytes, expected at least ", at_ + n, " for its ",
           what);
    at_ += n;
    return bytes_.substr(at_ - n, n);
  }
  uint32_t u32(const char* what) {
    uint32_t n = 0;
    const std::string_view four = take(4, what);
    for (int i = 3; i >= 0; --i) n = n << 8 | uint8_t(four[size_t(i)]);
    return n;
  }
  std::string_view so_far() const { return bytes_.substr(0, at_); }
  size_t left() const { return bytes_.size() - at_; }

 private:
  std::string_view bytes_;
  const std::string& name_;
  size_t at_ = 0;
};

std::vector<f16> f16_of(std::string_view bytes, const std::string& name) {
  std::vector<f16> numbers(bytes.size() / 2);
  for (size_t i = 0; i < numbers.size(); ++i) {
    numbers[i].bits = uint16_t(uint8_t(bytes[2 * i]) | uint8_t(bytes[2 * i + 1]) << 8);
    if (!std::isfinite(float(numbers[i]))) fail(ErrorCode::bad_data, name, ": number ", i, " is not finite");
  }
  return numbers;
}

std::string description(const Artifact& a) {
  return write_json(Json{{"run", parse_json(a.run_config, "run")},
                         {"looping", a.looping},
                         {"step", a.step},
                         {"tokenizer_hash", a.tokenizer_hash}});
}
void read_description(std::string_view text, const std::string& name, Artifact& into) {
  const Json json = parse_json(text, name + ": description", {.bytes = 1 << 20});
  Fields all(json, name + ": description");
  const Json* run = all.take("run");
  if (run == nullptr || !run->is_object() || !run->contains("model"))
    fail(ErrorCode::bad_data, name, ": description: found no run.model, expected the model's configuration");
  into.run_config = write_json(*run);
  into.config = gpt_config_from_json(run->at("model").dump(), name + ": run.model");
  all.require("looping", into.looping);
  all.require("step", into.step);
  all.require("tokenizer_hash", into.tokenizer_hash);
  all.finish();
}

std::string payload(const ArtifactTensor& t) {
  std::string out;
  put_f16(out, t.numbers);
  return t.bits == 16 ? out : out + encode_integers(t.values, t.bits);
}

// The coder spends at least 1/710 of a bit on each bit of an integer, so that what bytes can hold is bounded.
void check_size(const Parameter& p, int bits, int64_t bytes, const std::string& name) {
  const int64_t count = p.shape.numel(), rows = count / std::max<int64_t>(1, p.shape[-1]);
  if (bits != 16 && (bits < 4 || bits > 8 || p.shape.rank != 2))
    fail(ErrorCode::bad_data, name, ": ", p.name, ": found ", bits, " bits, expected 4 to 8 of a matrix, or 16");
  const int64_t fixed = 2 * (bits == 16 ? count : rows), coded = bytes - fixed;
  if (bits == 16 ? coded != 0 : coded < 4 || count > (coded * 710 * 8 + 4096) / bits)
    fail(ErrorCode::bad_data, name, ": ", p.name, ": found ", bytes, " bytes for ", count, " numbers of ", bits,
         " bits");
}

struct Entry {
  int bits;
  uint32_t bytes, sum;
};
std::vector<Entry> read_table(Reader& in, const ParameterLayout& layout, const std::string& name) {
  std::vector<Entry> table;
  size_t total = 0;
  for (const Parameter& p : layout.all()) {
    const int bits = uint8_t(in.take(1, "table")[0]);
    const uint32_t bytes = in.u32("table"), sum = in.u32("table");
    check_size(p, bits, bytes, name);
    table.push_back({bits, bytes, sum});
    total += bytes;
  }
  const uint32_t here = crc32c(in.so_far()), said = in.u32("sum");
  if (here != said) fail(ErrorCode::bad_data, name, ": its table was altered: the sum does not match");
  if (in.left() != total) fail(ErrorCode::bad_data, name, ": found ", in.left(), " bytes of tensors, expected ", total);
  return table;
}

}  // namespace

std::string artifact_bytes(const Artifact& a) {
  const ParameterLayout layout(a.config);
  INGOT_CHECK_EQ(a.tensors.size(), layout.all().size(), "artifact: tensors");
  const std::string text = description(a);
  std::string out(kMagic), tensors;
  put_u32(out, kArtifactVersion);
  put_u32(out, uint32_t(text.size()));
  put_u32(out, crc32c(text));
  out += text;
  for (const ArtifactTensor& t : a.tensors) {
    const std::string bytes = payload(t);
    out.push_back(char(t.bits));
    put_u32(out, uint32_t(bytes.size()));
    put_u32(out, crc32c(bytes));
    tensors += bytes;
  }
  put_u32(out, crc32c(out));
  return out + tensors;
}

Artifact parse_artifact(std::string_view bytes, const std::string& name) {
  Reader in(bytes, name);
  if (in.take(kMagic.size(), "first words") != kMagic)
    fail(ErrorCode::bad_data, name, ": found another beginning, expected \"", kMagic, "\"");
  const uint32_t version = in.u32("version");
  if (version != kArtifactVersion)
    fail(ErrorCode::unsupported, name, ": found version ", version, ", expected ", kArtifactVersion);
  Artifact a;
  const uint32_t length = in.u32("description"), sum = in.u32("description");
  const std::string_view text = in.take(length, "description");
  if (crc32c(text) != sum) fail(ErrorCode::bad_data, name, ": its description was altered: the sum does not match");
  read_description(text, name, a);
  // Every layer has tensors in the table, so a model of more than the file can list is refused before it is laid out.
  if (a.config.layers > int64_t(bytes.size()))
    fail(ErrorCode::bad_data, name, ": found ", a.config.layers, " layers in ", bytes.size(), " bytes");
  const ParameterLayout layout(a.config);
  const std::vector<Entry> table = read_table(in, layout, name);
  for (size_t i = 0; i < table.size(); ++i) {
    const Parameter& p = layout.all()[i];
    const Entry& e = table[i];
    const std::string where = name + ": " + p.name;
    const std::string_view coded = in.take(e.bytes, "tensors");
    if (crc32c(coded) != e.sum) fail(ErrorCode::bad_data, where, ": was altered: the sum does not match");
    const size_t numbers = size_t(2 * (e.bits == 16 ? p.shape.numel() : p.shape[0]));
    ArtifactTensor t{.bits = e.bits, .numbers = f16_of(coded.substr(0, numbers), where)};
    if (e.bits != 16) t.values = decode_integers(coded.substr(numbers), p.shape.numel(), e.bits, where);
    a.tensors.push_back(std::move(t));
  }
  return a;
}

bool is_artifact(const std::string& path) { return !is_directory(path) && begins_with(path, kMagic); }

void dequantize(const Artifact& a, const ParameterLayout& layout, const Tensor& flat) {
  fill_zero(flat);
  for (size_t i = 0; i < a.tensors.size(); ++i) {
    const Parameter& p = layout.all()[i];
    const ArtifactTensor& t = a.tensors[i];
    float* to = layout.view(flat, p).ptr<float>();
    const size_t cols = size_t(p.shape[-1]);
    for (size_t n = 0; n < size_t(p.shape.numel()); ++n)
      to[n] = t.bits == 16 ? float(t.numbers[n]) : float(t.values[n]) * float(t.numbers[n / cols]);
  }
}

}  // namespace ingot
