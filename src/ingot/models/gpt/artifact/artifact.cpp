#include "ingot/models/gpt/artifact/artifact.h"

#include <cmath>
#include <cstring>

#include "ingot/core/check.h"
#include "ingot/core/cpu/thread_pool.h"
#include "ingot/io/codecs/byte_coder.h"
#include "ingot/io/codecs/crc32c.h"
#include "ingot/io/codecs/integer_coder.h"
#include "ingot/io/file.h"
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

// Reads values from the front of the bytes.
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
  uint8_t u8(const char* what) { return uint8_t(take(1, what)[0]); }
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

// Whether tensors are coded by the range coder, and whether this version codes fp16 numbers too.
struct Coding {
  bool by_range, codes_numbers;
};
Coding coding_of(const ArtifactForm& form) {
  const bool by_range = form.coder == ArtifactCoder::range;
  return {by_range, by_range && form.version >= 3};
}

// Reads `count` fp16 numbers from the front of the bytes.
std::vector<f16> take_f16(std::string_view& bytes, int64_t count, Coding coding, const std::string& name) {
  std::vector<f16> numbers(static_cast<size_t>(count));
  const size_t n = numbers.size();
  const std::string_view raw = bytes.substr(0, coding.codes_numbers ? n : 2 * n);
  bytes.remove_prefix(raw.size());
  if (coding.codes_numbers) {
    const std::vector<uint8_t> upper = decode_symbols(bytes, count, 8, name);
    for (size_t i = 0; i < n; ++i) numbers[i].bits = uint16_t(uint8_t(raw[i]) | upper[i] << 8);
  } else {
    for (size_t i = 0; i < n; ++i) numbers[i].bits = uint16_t(uint8_t(raw[2 * i]) | uint8_t(raw[2 * i + 1]) << 8);
  }
  for (size_t i = 0; i < n; ++i)
    if (!std::isfinite(float(numbers[i]))) fail(ErrorCode::bad_data, name, ": number ", i, " is not finite");
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

std::string payload(const ArtifactTensor& t, ArtifactCoder coder) {
  std::string out;
  if (coder != ArtifactCoder::range) {
    put_f16(out, t.numbers);
    return out.append(reinterpret_cast<const char*>(t.values.data()), t.values.size());
  }
  std::vector<uint8_t> upper;
  for (const f16 x : t.numbers) out.push_back(char(x.bits & 255)), upper.push_back(uint8_t(x.bits >> 8));
  out += encode_symbols(upper, 8);
  return t.bits == 16 ? out : out + encode_integers(t.values, t.bits);
}
std::vector<int8_t> integers(std::string_view bytes, const Parameter& p, int bits, Coding coding,
                             const std::string& name) {
  if (coding.by_range) return decode_integers(bytes, p.shape.numel(), bits, name);
  const int qmax = (1 << (bits - 1)) - 1;
  std::vector<int8_t> values(bytes.begin(), bytes.end());
  for (const int8_t v : values)
    if (v < -qmax || v > qmax)
      fail(ErrorCode::bad_data, name, ": found ", int(v), ", expected an integer of ", bits, " bits");
  return values;
}
ByteCoder byte_coder(ArtifactCoder c) { return c == ArtifactCoder::brotli ? ByteCoder::brotli : ByteCoder::lzma; }

// A stream may expand to at most this many bytes per coded byte, so that a small file takes little memory.
constexpr int64_t kMostBytesOfAByte = 1000;
bool too_dense(int64_t coded, int64_t bytes) { return bytes > coded * kMostBytesOfAByte + 4096; }

// The coder spends at least 1/710 of a bit on each bit of an integer, so the number of integers in the given bytes is
// bounded.
void check_size(const Parameter& p, int bits, int64_t bytes, Coding coding, const std::string& name) {
  const int64_t count = p.shape.numel(), rows = count / std::max<int64_t>(1, p.shape[-1]);
  if (bits != 16 && (bits < 4 || bits > 8 || p.shape.rank != 2))
    fail(ErrorCode::bad_data, name, ": ", p.name, ": found ", bits, " bits, expected 4 to 8 of a matrix, or 16");
  const int64_t fixed = (coding.codes_numbers ? 1 : 2) * (bits == 16 ? count : rows), coded = bytes - fixed;
  const int64_t least = (coding.codes_numbers ? 4 : 0) + (bits != 16 ? 4 : 0);
  const bool variable = coding.codes_numbers || (coding.by_range && bits != 16);
  const bool too_few = coded < least || (bits != 16 && count > (coded * 710 * 8 + 4096) / bits);
  if (variable ? too_few : coded != (bits == 16 ? 0 : count))
    fail(ErrorCode::bad_data, name, ": ", p.name, ": found ", bytes, " bytes for ", count, " numbers of ", bits,
         " bits");
}

struct Entry {
  int bits;
  uint32_t bytes, sum;
};
struct Table {
  std::vector<Entry> entries;
  int64_t bytes = 0;       // sum over all tensors
  uint32_t coded_sum = 0;  // with brotli and lzma: the sum of the single stream of all tensors
};
Table read_table(Reader& in, const ParameterLayout& layout, Coding coding, const std::string& name) {
  Table table;
  for (const Parameter& p : layout.all()) {
    const int bits = in.u8("table");
    const uint32_t bytes = in.u32("table"), sum = in.u32("table");
    check_size(p, bits, bytes, coding, name);
    table.entries.push_back({bits, bytes, sum});
    table.bytes += bytes;
  }
  int64_t coded = table.bytes;
  if (!coding.by_range) coded = in.u32("table"), table.coded_sum = in.u32("table");
  const uint32_t here = crc32c(in.so_far()), said = in.u32("sum");
  if (here != said) fail(ErrorCode::bad_data, name, ": its table was altered: the sum does not match");
  if (int64_t(in.left()) != coded)
    fail(ErrorCode::bad_data, name, ": found ", in.left(), " bytes of tensors, expected ", coded);
  if (too_dense(coded, table.bytes))
    fail(ErrorCode::bad_data, name, ": found ", coded, " bytes that stand for ", table.bytes, ", expected at most ",
         kMostBytesOfAByte, " times as many");
  return table;
}

// Everything before the table.
struct Beginning {
  ArtifactForm form;
  std::string_view description;
};
Beginning read_beginning(Reader& in, const std::string& name) {
  if (in.take(kMagic.size(), "first words") != kMagic)
    fail(ErrorCode::bad_data, name, ": found another beginning, expected \"", kMagic, "\"");
  Beginning b{{.version = in.u32("version")}, {}};
  if (b.form.version < 1 || b.form.version > kArtifactVersion)
    fail(ErrorCode::unsupported, name, ": found version ", b.form.version, ", expected 1 to ", kArtifactVersion);
  const uint32_t length = in.u32("description"), sum = in.u32("description");
  b.description = in.take(length, "description");
  if (crc32c(b.description) != sum)
    fail(ErrorCode::bad_data, name, ": its description was altered: the sum does not match");
  if (b.form.version == 1) return b;
  const uint8_t coder = in.u8("coder");
  if (coder > uint8_t(ArtifactCoder::lzma))
    fail(ErrorCode::unsupported, name, ": found coder ", int(coder), ", expected 0 to 2 (range, brotli, lzma)");
  b.form.coder = ArtifactCoder(coder);
  return b;
}

}  // namespace

const char* name_of(ArtifactCoder c) { return c == ArtifactCoder::range ? "range" : name_of(byte_coder(c)); }
ArtifactCoder artifact_coder_named(const std::string& name) {
  for (const ArtifactCoder c : {ArtifactCoder::range, ArtifactCoder::brotli, ArtifactCoder::lzma})
    if (name == name_of(c)) {
      if (c != ArtifactCoder::range && !has_byte_coder(byte_coder(c)))
        fail(ErrorCode::unsupported, "coder ", name,
             ": this build lacks the library of the coder, expected another coder");
      return c;
    }
  fail(ErrorCode::usage, "found coder ", name, ", expected range, brotli or lzma");
}

std::string artifact_bytes(const Artifact& a) {
  const ParameterLayout layout(a.config);
  INGOT_CHECK_EQ(a.tensors.size(), layout.all().size(), "artifact: tensors");
  const std::string text = description(a);
  std::string out(kMagic), tensors;
  put_u32(out, kArtifactVersion);
  put_u32(out, uint32_t(text.size()));
  put_u32(out, crc32c(text));
  out += text;
  out.push_back(char(a.coder));
  std::vector<std::string> payloads(a.tensors.size());
  parallel_tasks(int64_t(payloads.size()),
                 [&](int64_t i) { payloads[size_t(i)] = payload(a.tensors[size_t(i)], a.coder); });
  for (size_t i = 0; i < payloads.size(); ++i) {
    const std::string& bytes = payloads[i];
    out.push_back(char(a.tensors[i].bits));
    put_u32(out, uint32_t(bytes.size()));
    put_u32(out, crc32c(bytes));
    tensors += bytes;
  }
  if (a.coder != ArtifactCoder::range) {
    const int64_t before = int64_t(tensors.size());
    tensors = encode_bytes(byte_coder(a.coder), tensors);
    if (too_dense(int64_t(tensors.size()), before))
      fail(ErrorCode::unsupported, "artifact: found weights that are all alike, expected coder range for them");
    put_u32(out, uint32_t(tensors.size()));
    put_u32(out, crc32c(tensors));
  }
  put_u32(out, crc32c(out));
  return out + tensors;
}

Artifact parse_artifact(std::string_view bytes, const std::string& name) {
  Reader in(bytes, name);
  const Beginning begins = read_beginning(in, name);
  Artifact a{.coder = begins.form.coder};
  read_description(begins.description, name, a);
  // Every layer has tensors in the table, so a model with more layers than the file can list is refused before its
  // layout is computed.
  if (a.config.layers > int64_t(bytes.size()))
    fail(ErrorCode::bad_data, name, ": found ", a.config.layers, " layers in ", bytes.size(), " bytes");
  const ParameterLayout layout(a.config);
  const Coding coding = coding_of(begins.form);
  const Table table = read_table(in, layout, coding, name);
  std::string decoded;
  if (a.coder != ArtifactCoder::range) {
    const std::string_view coded = in.take(in.left(), "tensors");
    if (crc32c(coded) != table.coded_sum) fail(ErrorCode::bad_data, name, ": was altered: the sum does not match");
    decoded = decode_bytes(byte_coder(a.coder), coded, table.bytes, name);
  }
  Reader tensors(decoded, name);
  Reader& from = a.coder == ArtifactCoder::range ? in : tensors;
  std::vector<std::string_view> payloads;
  for (const Entry& e : table.entries) payloads.push_back(from.take(e.bytes, "tensors"));
  a.tensors.resize(payloads.size());
  parallel_tasks(int64_t(payloads.size()), [&](int64_t n) {
    const size_t i = size_t(n);
    const Parameter& p = layout.all()[i];
    const Entry& e = table.entries[i];
    const std::string where = name + ": " + p.name;
    std::string_view coded = payloads[i];
    if (crc32c(coded) != e.sum) fail(ErrorCode::bad_data, where, ": was altered: the sum does not match");
    ArtifactTensor t{.bits = e.bits};
    t.numbers = take_f16(coded, e.bits == 16 ? p.shape.numel() : p.shape[0], coding, where);
    if (e.bits != 16)
      t.values = integers(coded, p, e.bits, coding, where);
    else if (!coded.empty())
      fail(ErrorCode::bad_data, where, ": found ", coded.size(), " bytes after its numbers, expected none");
    a.tensors[i] = std::move(t);
  });
  return a;
}

ArtifactForm artifact_form(std::string_view bytes, const std::string& name) {
  Reader in(bytes, name);
  return read_beginning(in, name).form;
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
