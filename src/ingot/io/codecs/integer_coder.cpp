#include "ingot/io/codecs/integer_coder.h"

#include <algorithm>
#include <array>

#include "ingot/core/check.h"

namespace ingot {
namespace {

constexpr int kProbabilityBits = 15;
// The probability of a zero. Its first steps compute a mean over all bits so far. Later steps keep a minimum size, so
// that the probability follows a matrix with changing rows.
struct Probability {
  uint16_t value = 1 << 14;
  uint16_t seen = 0;
  uint32_t fine = 1u << 30;  // of 2^31

  void update(int bit) {
    constexpr uint32_t lowest = 1u << 21;  // of 2^31: no bit costs more than 10 bits, or less than 1/710 of a bit
    const int64_t target = bit ? lowest : (1u << 31) - lowest;
    fine = uint32_t(int64_t(fine) + (target - int64_t(fine)) * int64_t(rates()[seen]) / 65536);
    value = uint16_t(fine >> 16);
    if (seen < kLastRate) ++seen;
  }

  static constexpr int kLastRate = 1022;
  static const std::array<uint16_t, kLastRate + 1>& rates() {
    static constexpr auto table = [] {
      std::array<uint16_t, kLastRate + 1> r{};
      for (int n = 0; n <= kLastRate; ++n) r[size_t(n)] = uint16_t(65536 * 2 / (2 * n + 3));
      return r;
    }();
    return table;
  }
};

// Martin's range coder (1979) in the form of binary coders: 32 bits of range, bytes out, a carry that may run through
// bytes of 255.
class Encoder {
 public:
  void put(int bit, Probability& p) {
    const uint32_t bound = (range_ >> kProbabilityBits) * p.value;
    if (bit) {
      low_ += bound;
      range_ -= bound;
    } else {
      range_ = bound;
    }
    p.update(bit);
    while (range_ < (1u << 24)) {
      range_ <<= 8;
      shift();
    }
  }
  std::string finish() {
    for (int i = 0; i < 4; ++i) shift();
    return std::move(out_);
  }

 private:
  void shift() {
    if (low_ >> 32) carry();
    out_.push_back(char(low_ >> 24));
    low_ = (low_ & 0x00ffffffu) << 8;
  }
  void carry() {
    size_t i = out_.size();
    while (uint8_t(out_[--i]) == 255) out_[i] = 0;
    out_[i] = char(uint8_t(out_[i]) + 1);
    low_ &= 0xffffffffu;
  }
  uint64_t low_ = 0;
  uint32_t range_ = 0xffffffffu;
  std::string out_;
};

class Decoder {
 public:
  Decoder(std::string_view bytes, const std::string& name) : bytes_(bytes), name_(name) {
    for (int i = 0; i < 4; ++i) code_ = code_ << 8 | next();
  }
  int get(Probability& p) {
    const uint32_t bound = (range_ >> kProbabilityBits) * p.value;
    const int bit = code_ >= bound;
    if (bit) {
      code_ -= bound;
      range_ -= bound;
    } else {
      range_ = bound;
    }
    p.update(bit);
    while (range_ < (1u << 24)) {
      range_ <<= 8;
      code_ = code_ << 8 | next();
    }
    return bit;
  }
  size_t taken() const { return at_; }

 private:
  uint8_t next() {
    if (at_ == bytes_.size())
      fail(ErrorCode::bad_data, name_, ": its coded integers end after ", bytes_.size(), " bytes, expected more");
    return uint8_t(bytes_[at_++]);
  }
  std::string_view bytes_;
  const std::string& name_;
  size_t at_ = 0;
  uint32_t code_ = 0, range_ = 0xffffffffu;
};

void check_bits(int bits, int least) {
  INGOT_CHECK_GE(bits, least, "integer coder: bits");
  INGOT_CHECK_LE(bits, 8, "integer coder: bits");
}

}  // namespace

std::string encode_symbols(std::span<const uint8_t> symbols, int bits) {
  check_bits(bits, 1);
  std::vector<Probability> tree(size_t(1) << bits);
  Encoder encoder;
  for (const uint8_t symbol : symbols) {
    INGOT_CHECK(symbol >> bits == 0, "integer coder: found ", int(symbol), ", expected ", bits, " bits");
    size_t node = 1;
    for (int shift = bits - 1; shift >= 0; --shift) {
      const int bit = symbol >> shift & 1;
      encoder.put(bit, tree[node]);
      node = node << 1 | size_t(bit);
    }
  }
  return encoder.finish();
}

std::vector<uint8_t> decode_symbols(std::string_view& bytes, int64_t count, int bits, const std::string& name) {
  check_bits(bits, 1);
  std::vector<Probability> tree(size_t(1) << bits);
  Decoder decoder(bytes, name);
  std::vector<uint8_t> symbols;
  symbols.reserve(size_t(std::clamp<int64_t>(count, 0, 4 * int64_t(bytes.size()))));
  for (int64_t i = 0; i < count; ++i) {
    size_t node = 1;
    for (int depth = 0; depth < bits; ++depth) node = node << 1 | size_t(decoder.get(tree[node]));
    symbols.push_back(uint8_t(node - (size_t(1) << bits)));
  }
  bytes.remove_prefix(decoder.taken());
  return symbols;
}

std::string encode_integers(std::span<const int8_t> values, int bits) {
  check_bits(bits, 2);
  const int qmax = (1 << (bits - 1)) - 1;
  std::vector<uint8_t> symbols;
  symbols.reserve(values.size());
  for (const int8_t value : values) {
    INGOT_CHECK(value >= -qmax && value <= qmax, "integer coder: found ", int(value), ", expected -", qmax, " to ",
                qmax);
    symbols.push_back(uint8_t(value + qmax));
  }
  return encode_symbols(symbols, bits);
}

std::vector<int8_t> decode_integers(std::string_view bytes, int64_t count, int bits, const std::string& name) {
  check_bits(bits, 2);
  const int qmax = (1 << (bits - 1)) - 1;
  const size_t all = bytes.size();
  const std::vector<uint8_t> symbols = decode_symbols(bytes, count, bits, name);
  std::vector<int8_t> values;
  values.reserve(symbols.size());
  for (const uint8_t symbol : symbols) {
    const int value = int(symbol) - qmax;
    if (value > qmax)
      fail(ErrorCode::bad_data, name, ": coded integer ", values.size(), " is ", value, ", expected -", qmax, " to ",
           qmax);
    values.push_back(int8_t(value));
  }
  if (!bytes.empty())
    fail(ErrorCode::bad_data, name, ": found ", all, " bytes of coded integers, expected ", all - bytes.size());
  return values;
}

}  // namespace ingot
