#include "ingot/io/formats/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>

#include "ingot/io/file.h"
#include "ingot/io/json.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot {
namespace {

using testing::error_of;
using testing::TemporaryDirectory;

std::string file_bytes(const std::string& header, size_t buffer_bytes) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + std::string(buffer_bytes, '\1');
}

std::string refusal(const std::string& header, int64_t buffer_bytes) {
  return error_of([&] { parse_safetensors_header(header, buffer_bytes, "f"); });
}

// A small file with mixed types, an empty tensor and a scalar.
struct Sample {
  double d[3] = {1, -2, 3e300};
  float f[4] = {1, 2, 3, 4};
  bf16 b[2] = {bf16(1.5f), bf16(-2.f)};
  uint8_t u[5] = {1, 2, 3, 4, 5};
  float scalar[1] = {42};
  Tensor scalar_tensor() {
    Tensor t(scalar, {1});
    t.shape.rank = 0;
    return t;
  }
  std::vector<NamedTensor> tensors() {
    return {{"u", Tensor(u, {5})},       {"b", Tensor(b, {1, 2})}, {"f\u00e9\"q", Tensor(f, {2, 2})},
            {"none", Tensor(f, {0, 7})}, {"d", Tensor(d, {3})},    {"s", scalar_tensor()}};
  }
};

TEST(safetensors, written_data_are_read_back) {
  const TemporaryDirectory dir;
  Sample sample, back;
  for (const NamedTensor& t : back.tensors()) std::memset(t.tensor.data, 0, size_t(t.tensor.bytes()));
  save_safetensors(dir / "f", sample.tensors(), {{"format", "pt"}, {"k", "v\n"}});
  const SafetensorsFile file(dir / "f");
  file.read_all(back.tensors());
  const std::vector<NamedTensor> want = sample.tensors(), got = back.tensors();
  for (size_t i = 0; i < want.size(); ++i)
    EXPECT_EQ(std::memcmp(got[i].tensor.data, want[i].tensor.data, size_t(want[i].tensor.bytes())), 0) << want[i].name;
  EXPECT_EQ(file.header().metadata.at("k"), "v\n");
  EXPECT_EQ(file.find("b")->core_dtype(), DType::bf16);
  EXPECT_EQ(file.find("b")->core_shape(), (Shape{1, 2}));
  EXPECT_EQ(file.find("absent"), nullptr);
  for (const SafetensorsEntry& e : file.entries())
    EXPECT_EQ((file.header().data_begin + e.begin) % size_of(e.core_dtype()), 0) << e.name << " is not aligned";
  File again = File::create(dir / "g");
  const std::string hash = write_safetensors(again, sample.tensors(), {{"format", "pt"}, {"k", "v\n"}});
  EXPECT_EQ(hash, sha256_of_file(dir / "f"));
}

TEST(safetensors, a_tensor_of_another_shape_type_or_name_is_refused) {
  const TemporaryDirectory dir;
  Sample s;
  save_safetensors(dir / "f", {{"w", Tensor(s.f, {2, 2})}});
  const SafetensorsFile file(dir / "f");
  EXPECT_NE(error_of([&] { file.read("w", Tensor(s.f, {4})); }).find("found shape (2, 2), expected (4)"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              file.read("w", Tensor(s.d, {2, 1}));
            }).find("found dtype F32, expected F64"),
            std::string::npos);
  EXPECT_NE(error_of([&] { file.read("v", Tensor(s.f, {4})); }).find("tensor \"v\" is missing"), std::string::npos);
  EXPECT_NE(error_of([&] { file.read_all({}); }).find("tensor \"w\", which nothing here expects"), std::string::npos);
  EXPECT_NE(error_of([&] { save_safetensors(dir / "g", {{"w", Tensor(s.f, {4})}, {"w", Tensor(s.f, {4})}}); }), "");
}

TEST(safetensors, headers_that_do_not_tile_the_buffer_are_refused) {
  const auto entry = [](const char* name, const char* dtype, const char* shape, const char* offsets) {
    return detail::concat("\"", name, "\":{\"dtype\":\"", dtype, "\",\"shape\":", shape, ",\"data_offsets\":", offsets,
                          "}");
  };
  EXPECT_EQ(
      refusal(std::string("{") + entry("a", "F32", "[2]", "[0,8]") + "," + entry("b", "U8", "[3]", "[8,11]") + "}  ",
              11),
      "");
  EXPECT_EQ(refusal("{}", 0), "");
  EXPECT_EQ(refusal(std::string("{") + entry("a", "F4", "[4]", "[0,2]") + "}", 2), "");
  EXPECT_EQ(refusal(std::string("{") + entry("a", "F32", "[0,99999999999]", "[0,0]") + "}", 0), "");
  struct Case {
    std::string header, says;
    int64_t buffer;
  };
  const Case cases[] = {
      {std::string("{") + entry("a", "F32", "[2]", "[0,8]") + "," + entry("b", "U8", "[3]", "[9,12]") + "}", "(a hole)",
       12},
      {std::string("{") + entry("a", "F32", "[2]", "[0,8]") + "," + entry("b", "U8", "[3]", "[7,10]") + "}",
       "(an overlap)", 10},
      {std::string("{") + entry("a", "F32", "[2]", "[0,8]") + "}",
       "the tensors end at byte 8, but the buffer has 9 bytes", 9},
      {std::string("{") + entry("a", "F32", "[2]", "[0,8]") + "}", "lie outside the buffer of 7 bytes", 7},
      {std::string("{") + entry("a", "F32", "[2]", "[8,0]") + "}", "outside", 8},
      {std::string("{") + entry("a", "F32", "[2]", "[-8,0]") + "}", "outside", 8},
      {std::string("{") + entry("a", "F32", "[2]", "[0.0,8]") + "}", "expected an array", 8},
      {std::string("{") + entry("a", "F32", "[2]", "[0,1e30]") + "}", "expected an array", 8},
      {std::string("{") + entry("a", "F32", "[2]", "\"0\"") + "}", "expected an array", 8},
      {std::string("{") + entry("a", "F32", "[2]", "[0,8,8]") + "}", "found 3 numbers", 8},
      {std::string("{") + entry("a", "F32", "[3]", "[0,8]") + "}", "found 8 bytes, expected 12 for F32 (3)", 8},
      {std::string("{") + entry("a", "F32", "[-2]", "[0,8]") + "}", "at least 0", 8},
      {std::string("{") + entry("a", "F32", "[4294967296,4294967296]", "[0,8]") + "}", "64 bits", 8},
      {std::string("{") + entry("a", "F32", "[2305843009213693952,16]", "[0,0]") + "}", "64 bits", 0},
      {std::string("{") + entry("a", "F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]") + "}", "found 9 dimensions", 4},
      {std::string("{") + entry("a", "F4", "[3]", "[0,2]") + "}", "whole number of bytes", 2},
      {std::string("{") + entry("a", "F31", "[2]", "[0,8]") + "}", "unknown dtype \"F31\"", 8},
      {std::string("{") + entry("a", "F32", "[2]", "[0,8]") + "," + entry("a", "F32", "[2]", "[8,16]") + "}",
       "duplicate key", 16},
      {"{\"__metadata__\":{\"a\":1}}", "expected a string", 0},
      {"{\"__metadata__\":{},\"__metadata__\":{}}", "duplicate key", 0},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"x\":1}}", "unknown key", 4},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", "\"data_offsets\" is missing", 4},
      {"\xEF\xBB\xBF{}", "begin with '{'", 0},
      {"[]", "begin with '{'", 0},
      {"{}\n", "end with '}'", 0},
      {" {}", "begin with '{'", 0}};
  for (const Case& c : cases)
    EXPECT_NE(refusal(c.header, c.buffer).find(c.says), std::string::npos)
        << c.header << " -> " << refusal(c.header, c.buffer);
}

TEST(safetensors, wrong_lengths_are_refused_before_anything_is_allocated) {
  const TemporaryDirectory dir;
  for (const uint64_t length :
       {uint64_t(0), uint64_t(3), uint64_t(100'000'001), uint64_t(1) << 40, ~uint64_t(0), ~uint64_t(7)}) {
    std::string bytes = file_bytes("{}", 0);
    std::memcpy(bytes.data(), &length, 8);
    write_file(dir / "f", bytes);
    EXPECT_NE(error_of([&] { SafetensorsFile f(dir / "f"); }), "") << length;
  }
}

TEST(safetensors, a_file_cut_anywhere_or_made_longer_is_refused) {
  const TemporaryDirectory dir;
  Sample s;
  save_safetensors(dir / "whole", s.tensors());
  const std::string whole = read_file(dir / "whole");
  for (size_t n = 0; n < whole.size(); ++n) {
    File::create(dir / "cut").write(std::string_view(whole).substr(0, n));
    EXPECT_NE(error_of([&] { SafetensorsFile f(dir / "cut"); }), "") << n;
  }
  File::create(dir / "long").write(whole + "x");
  EXPECT_NE(error_of([&] { SafetensorsFile f(dir / "long"); }), "");
}

TEST(safetensors, a_header_with_any_bit_flipped_is_refused_or_still_tiles) {
  Sample s;
  const TemporaryDirectory dir;
  save_safetensors(dir / "f", s.tensors());
  const std::string whole = read_file(dir / "f");
  uint64_t length;
  std::memcpy(&length, whole.data(), 8);
  const int64_t buffer = int64_t(whole.size() - 8 - length);
  for (size_t bit = 0; bit < length * 8; ++bit) {
    std::string header = whole.substr(8, length);
    header[bit / 8] = char(header[bit / 8] ^ (1 << bit % 8));
    try {
      const SafetensorsHeader h = parse_safetensors_header(header, buffer, "f");
      int64_t at = 0;
      for (const SafetensorsEntry& e : h.entries) {
        ASSERT_EQ(e.begin, at);
        at = e.end;
      }
      ASSERT_EQ(at, buffer);
    } catch (const Error&) {}
  }
}

}  // namespace
}  // namespace ingot
