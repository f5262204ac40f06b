#include "ingot/text/sentencepiece_model.h"

#include <cstring>

#include "ingot/core/check.h"
#include "ingot/io/utf8.h"

namespace ingot::detail {
namespace {

constexpr size_t kMaxPieces = 1 << 24, kMaxPieceBytes = 1 << 16;

// Reads one protobuf message, field by field: next() moves to a field; the accessors check its wire type.
class Message {
 public:
  Message(std::string_view bytes, int64_t offset, const std::string& origin)
      : bytes_(bytes), offset_(offset), origin_(origin) {}

  bool next() {
    if (at_ == bytes_.size()) return false;
    field_at_ = at_;
    const uint64_t tag = varint();
    field = tag >> 3;
    wire_ = int(tag & 7);
    if (field == 0 || field > (1u << 29)) refuse("found field number ", field);
    content_ = {};
    switch (wire_) {
      case 0: number_ = varint(); break;
      case 1: take(8); break;
      case 2: take(varint()); break;
      case 5: take(4); break;
      default: refuse("found wire type ", wire_, ", expected 0, 1, 2 or 5");
    }
    return true;
  }
  std::string_view bytes() const {
    want(2);
    return content_;
  }
  std::string text() const {
    const int64_t bad = find_invalid_utf8(bytes());
    if (bad >= 0) refuse("field ", field, ": byte ", bad, " is not valid UTF-8");
    return std::string(content_);
  }
  int64_t number() const {
    want(0);
    return int64_t(number_);
  }
  float real() const {
    want(5);
    float value;
    std::memcpy(&value, content_.data(), 4);
    return value;
  }
  Message message() const { return Message(bytes(), offset_ + (content_.data() - bytes_.data()), origin_); }
  template <class... Note> [[noreturn]] void refuse(const Note&... note) const {
    fail(ErrorCode::bad_data, origin_, ": byte ", offset_ + int64_t(field_at_), ": ", note...,
         " (a SentencePiece model)");
  }

  uint64_t field = 0;

 private:
  void want(int wire) const {
    if (wire_ != wire) refuse("field ", field, ": found wire type ", wire_, ", expected ", wire);
  }
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (at_ == bytes_.size()) refuse("found the end of the message inside a number");
      const uint8_t b = uint8_t(bytes_[at_++]);
      value |= uint64_t(b & 0x7f) << shift;
      if (b < 0x80) return value;
    }
    refuse("found a number longer than 10 bytes");
  }
  void take(uint64_t n) {
    if (n > bytes_.size() - at_)
      refuse("field ", field, ": found a length of ", n, ", expected at most the ", bytes_.size() - at_, " bytes left");
    content_ = bytes_.substr(at_, size_t(n));
    at_ += size_t(n);
  }

  std::string_view bytes_, content_;
  int64_t offset_;  // offset of this message in the file
  const std::string& origin_;
  size_t at_ = 0, field_at_ = 0;
  int wire_ = 0;
  uint64_t number_ = 0;
};

Piece parse_piece(Message m) {
  Piece piece;
  while (m.next()) {
    if (m.field == 1) piece.text = m.text();
    if (m.field == 2) piece.score = m.real();
    if (m.field == 3) {
      if (m.number() < 1 || m.number() > 6) m.refuse("found piece type ", m.number(), ", expected 1 to 6");
      piece.type = PieceType(m.number());
    }
  }
  if (piece.text.empty() || piece.text.size() > kMaxPieceBytes)
    m.refuse("found a piece of ", piece.text.size(), " bytes, expected 1 to ", kMaxPieceBytes);
  if (piece.score != piece.score) m.refuse("piece \"", piece.text, "\": found the score NaN");
  return piece;
}

void parse_trainer(Message m, SentencePieceModel& model) {
  while (m.next()) {
    if (m.field == 3) model.model_type = int(m.number());
    if (m.field == 24) model.whitespace_as_suffix = m.number() != 0;
    if (m.field == 35) model.byte_fallback = m.number() != 0;
    if (m.field == 44) model.unk_surface = m.text();
    if (m.field == 46) model.bos_piece = m.text();
  }
}

void parse_normalizer(Message m, SentencePieceModel& model) {
  while (m.next()) {
    if (m.field == 2) model.charsmap = std::string(m.bytes());
    if (m.field == 3) model.add_dummy_prefix = m.number() != 0;
    if (m.field == 4) model.remove_extra_whitespaces = m.number() != 0;
    if (m.field == 5) model.escape_whitespaces = m.number() != 0;
  }
}

}  // namespace

SentencePieceModel parse_sentencepiece_model(std::string_view bytes, const std::string& origin) {
  SentencePieceModel model;
  Message m(bytes, 0, origin);
  while (m.next()) {
    if (m.field == 1) {
      if (model.pieces.size() == kMaxPieces) m.refuse("found more than ", kMaxPieces, " pieces");
      model.pieces.push_back(parse_piece(m.message()));
    }
    if (m.field == 2) parse_trainer(m.message(), model);
    if (m.field == 3) parse_normalizer(m.message(), model);
    if (m.field == 5)
      for (Message d = m.message(); d.next();)
        if (d.field == 2 && !d.bytes().empty()) model.has_denormalizer = true;
  }
  if (model.pieces.empty()) fail(ErrorCode::bad_data, origin, ": found no pieces, expected a SentencePiece model");
  return model;
}

namespace {

void put_varint(uint64_t value, std::string& out) {
  for (; value >= 0x80; value >>= 7) out += char(value | 0x80);
  out += char(value);
}
void put_number(int field, uint64_t value, std::string& out) {
  put_varint(uint64_t(field) << 3, out);
  put_varint(value, out);
}
void put_bytes(int field, std::string_view bytes, std::string& out) {
  put_varint(uint64_t(field) << 3 | 2, out);
  put_varint(bytes.size(), out);
  out += bytes;
}
void put_real(int field, float value, std::string& out) {
  put_varint(uint64_t(field) << 3 | 5, out);
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

}  // namespace

std::string sentencepiece_model_bytes(const SentencePieceModel& m) {
  std::string out, trainer, normalizer;
  for (const Piece& p : m.pieces) {
    std::string piece;
    put_bytes(1, p.text, piece);
    put_real(2, p.score, piece);
    put_number(3, uint64_t(p.type), piece);
    put_bytes(1, piece, out);
  }
  put_number(3, uint64_t(m.model_type), trainer);
  put_number(24, m.whitespace_as_suffix, trainer);
  put_number(35, m.byte_fallback, trainer);
  put_bytes(44, m.unk_surface, trainer);
  put_bytes(46, m.bos_piece, trainer);
  put_bytes(2, m.charsmap, normalizer);
  put_number(3, m.add_dummy_prefix, normalizer);
  put_number(4, m.remove_extra_whitespaces, normalizer);
  put_number(5, m.escape_whitespaces, normalizer);
  put_bytes(2, trainer, out);
  put_bytes(3, normalizer, out);
  return out;
}

Charsmap::Charsmap(std::string_view blob, const std::string& origin) {
  if (blob.empty()) return;
  uint32_t size = 0;
  if (blob.size() >= 4) std::memcpy(&size, blob.data(), 4);
  if (size == 0 || size % 4 != 0 || size > blob.size() - 4)
    fail(ErrorCode::bad_data, origin, ": normalisation table: found a trie of ", size, " bytes in ", blob.size(),
         ", expected a multiple of 4 that fits");
  units_.resize(size / 4);
  std::memcpy(units_.data(), blob.data() + 4, size);
  replacements_ = std::string(blob.substr(4 + size));
  if (replacements_.empty() || replacements_.back() != '\0')
    fail(ErrorCode::bad_data, origin, ": normalisation table: found no NUL at its end");
}

Charsmap::Match Charsmap::longest(std::string_view text) const {
  Match match;
  if (units_.empty()) return match;
  const auto offset = [](uint32_t unit) { return size_t(unit >> 10) << ((unit & 512) >> 6); };
  size_t node = offset(units_[0]);
  for (size_t i = 0; i < text.size(); ++i) {
    const uint8_t c = uint8_t(text[i]);
    node ^= c;
    // An entry of a damaged table may point outside the table; then no longer rule applies.
    if (node >= units_.size() || (units_[node] & 0x800000ffu) != c) break;
    const uint32_t unit = units_[node];
    node ^= offset(unit);
    if (!(unit >> 8 & 1)) continue;
    if (node >= units_.size()) break;
    const size_t value = units_[node] & 0x7fffffffu;
    if (value >= replacements_.size()) break;
    match = {std::string_view(replacements_.c_str() + value), int64_t(i + 1)};
  }
  return match;
}

}  // namespace ingot::detail
