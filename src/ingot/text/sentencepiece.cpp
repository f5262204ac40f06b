#include "ingot/text/sentencepiece.h"

#include <algorithm>
#include <bit>
#include <queue>
#include <unordered_map>

#include "ingot/core/check.h"
#include "ingot/io/file.h"
#include "ingot/text/sentencepiece_model.h"
#include "ingot/text/stable_hash.h"
#include "ingot/text/utf8.h"

namespace ingot {
namespace {

using detail::PieceType;
constexpr std::string_view kSpace = "\xe2\x96\x81";  // U+2581 stands for a space

// A part of the text that is being merged; a merge extends the left part and empties the right part.
struct Symbol {
  int64_t begin = 0;
  int32_t length = 0;
  bool frozen = false;  // a user-defined piece never merges
  int64_t previous = -1, next = -1;
};

// Two neighbours that together form a piece. The candidate with the higher score is merged first, among equal scores
// the left one.
struct Candidate {
  float score;
  int64_t left, right;
  int32_t length;
  bool operator<(const Candidate& o) const { return score != o.score ? score < o.score : left > o.left; }
};

// The number of bytes of the character that starts `text`, from its first byte alone: a damaged normalisation table may
// produce text that is not UTF-8.
size_t character_length(std::string_view text) {
  const uint8_t first = uint8_t(text[0]);
  const size_t n = first < 0xc0 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  return std::min(n, text.size());
}

}  // namespace

struct SentencePiece::Impl {
  detail::SentencePieceModel model;
  detail::Charsmap charsmap;
  // normal, user-defined and unused pieces, which merges may produce
  std::unordered_map<std::string_view, int32_t> pieces;
  std::unordered_map<std::string_view, int32_t> reserved;  // control, unknown and byte pieces, by name
  std::vector<size_t> user_lengths;                        // lengths of user-defined pieces, longest first
  std::vector<SpecialToken> specials;                      // the control pieces
  int32_t byte_ids[256];
  int32_t unknown = -1, bos = -1;
  size_t longest_piece = 0;
  bool words_apart = true;  // no piece has a space after another character, so words can be merged one by one
  uint32_t hash = 0;

  Impl(detail::SentencePieceModel m, const std::string& origin);
  void take_pieces(const std::string& origin);
  void take_byte(int32_t id, const std::string& origin);
  void make_hash();
  PieceType type(int32_t id) const { return model.pieces[size_t(id)].type; }
  bool is_boundary(int32_t id) const {
    if (id < 0 || id >= int32_t(model.pieces.size())) return true;
    return type(id) == PieceType::control || type(id) == PieceType::unknown || type(id) == PieceType::unused;
  }
  // Whether the space after `previous` is the dummy prefix, the space that encoding adds before a text.
  bool begins_with_dummy_prefix(int32_t previous) const {
    return model.add_dummy_prefix &&
           (previous < 0 || previous >= int32_t(model.pieces.size()) || type(previous) == PieceType::control);
  }
  int32_t id_of(std::string_view piece) const;
  size_t user_defined_at(std::string_view text) const;
  std::pair<std::string_view, size_t> normalize_prefix(std::string_view text) const;
  std::string normalize(std::string_view text) const;
  void merge_word(std::string_view word, std::vector<int32_t>& out) const;
  void emit(std::string_view piece, std::vector<int32_t>& out) const;
  void check(const char* what, int32_t id) const {
    INGOT_CHECK(id >= 0 && size_t(id) < model.pieces.size(), what, ": found id ", id, ", expected 0 to ",
                model.pieces.size() - 1);
  }
};

SentencePiece::Impl::Impl(detail::SentencePieceModel m, const std::string& origin)
    : model(std::move(m)), charsmap(model.charsmap, origin) {
  static constexpr const char* kTypes[] = {"unknown", "unigram", "BPE", "word", "char"};
  if (model.model_type != 2)
    fail(ErrorCode::unsupported, origin, ": found a SentencePiece model of type ",
         kTypes[model.model_type >= 1 && model.model_type <= 4 ? model.model_type : 0], ", expected BPE");
  if (model.has_denormalizer) fail(ErrorCode::unsupported, origin, ": found a denormalisation table, expected none");
  if (model.whitespace_as_suffix)
    fail(ErrorCode::unsupported, origin, ": found treat_whitespace_as_suffix, expected it off");
  if (!model.escape_whitespaces) fail(ErrorCode::unsupported, origin, ": found escape_whitespaces off, expected it on");
  take_pieces(origin);
  make_hash();
}

void SentencePiece::Impl::take_pieces(const std::string& origin) {
  std::fill(std::begin(byte_ids), std::end(byte_ids), -1);
  for (size_t i = 0; i < model.pieces.size(); ++i) {
    const detail::Piece& p = model.pieces[i];
    const int32_t id = int32_t(i);
    const bool ordinary =
        p.type == PieceType::normal || p.type == PieceType::user_defined || p.type == PieceType::unused;
    if (pieces.count(p.text) || reserved.count(p.text))
      fail(ErrorCode::bad_data, origin, ": piece \"", p.text, "\" found twice, the second time with id ", id);
    (ordinary ? pieces : reserved).emplace(p.text, id);
    if (p.type == PieceType::unknown) {
      if (unknown >= 0)
        fail(ErrorCode::bad_data, origin, ": found unknown pieces ", unknown, " and ", id, ", expected one");
      unknown = id;
    }
    if (p.type == PieceType::byte) take_byte(id, origin);
    if (p.type == PieceType::control) specials.push_back({id, p.text});
    if (p.type == PieceType::control && p.text == model.bos_piece) bos = id;
    if (p.type == PieceType::user_defined) user_lengths.push_back(p.text.size());
    if (!ordinary) continue;
    longest_piece = std::max(longest_piece, p.text.size());
    if (p.type == PieceType::unused)
      words_apart = false;  // splitting an unused piece needs the merges of the whole text
    for (size_t at = p.text.find(kSpace); at != p.text.npos; at = p.text.find(kSpace, at + 1))
      if (at > 0 && (at < 3 || p.text.compare(at - 3, 3, kSpace) != 0)) words_apart = false;
  }
  std::sort(user_lengths.rbegin(), user_lengths.rend());
  user_lengths.erase(std::unique(user_lengths.begin(), user_lengths.end()), user_lengths.end());
  if (unknown < 0) fail(ErrorCode::bad_data, origin, ": found no unknown piece, expected one");
  // A character with a piece of its own needs no piece for its byte: Gemma's tokenizer.json has the tabulator in place
  // of <0x09>.
  for (int b = 0; b < 256 && model.byte_fallback; ++b)
    if (byte_ids[b] < 0 && (b >= 0x80 || pieces.count(std::string(1, char(b))) == 0))
      fail(ErrorCode::bad_data, origin, ": found byte_fallback but no piece for byte ", b);
}

void SentencePiece::Impl::take_byte(int32_t id, const std::string& origin) {
  static constexpr std::string_view kHex = "0123456789ABCDEF";
  const std::string& t = model.pieces[size_t(id)].text;
  const bool shaped = t.size() == 6 && t.compare(0, 3, "<0x") == 0 && t[5] == '>';
  const size_t high = shaped ? kHex.find(t[3]) : kHex.npos, low = shaped ? kHex.find(t[4]) : kHex.npos;
  if (high == kHex.npos || low == kHex.npos)
    fail(ErrorCode::bad_data, origin, ": byte piece ", id, ": found \"", t, "\", expected <0x00> to <0xFF>");
  byte_ids[high * 16 + low] = id;
}

void SentencePiece::Impl::make_hash() {
  detail::StableHash h;
  h.bytes("sentencepiece");
  for (const detail::Piece& p : model.pieces) {
    h.bytes(p.text);
    h.number(std::bit_cast<uint32_t>(p.score));
    h.number(int(p.type));
  }
  h.bytes(model.charsmap);
  h.number(model.byte_fallback | model.add_dummy_prefix << 1 | model.remove_extra_whitespaces << 2 |
           model.space_is_prefix << 3 | model.splits_at_spaces << 4);
  h.bytes(model.bos_piece);
  h.bytes(model.unk_surface);
  hash = h.value();
}

int32_t SentencePiece::Impl::id_of(std::string_view piece) const {
  const auto r = reserved.find(piece);
  if (r != reserved.end()) return r->second;
  const auto p = pieces.find(piece);
  return p == pieces.end() ? unknown : p->second;
}

// The length in bytes of the longest user-defined piece that starts `text`, or 0.
size_t SentencePiece::Impl::user_defined_at(std::string_view text) const {
  for (size_t n : user_lengths) {
    if (n > text.size()) continue;
    const auto p = pieces.find(text.substr(0, n));
    if (p != pieces.end() && type(p->second) == PieceType::user_defined) return n;
  }
  return 0;
}

// The normalized form of the beginning of `text`, and the number of bytes that it replaces.
std::pair<std::string_view, size_t> SentencePiece::Impl::normalize_prefix(std::string_view text) const {
  if (const size_t n = user_defined_at(text)) return {text.substr(0, n), n};
  const detail::Charsmap::Match match = charsmap.longest(text);
  if (match.length > 0) return {match.replacement, size_t(match.length)};
  const size_t n = character_length(text);
  return {text.substr(0, n), n};
}

std::string SentencePiece::Impl::normalize(std::string_view text) const {
  std::string out;
  while (model.remove_extra_whitespaces && !text.empty()) {
    const auto [part, used] = normalize_prefix(text);
    if (part != " ") break;
    text.remove_prefix(used);
  }
  if (text.empty()) return out;
  out.reserve(text.size() + text.size() / 2);
  const bool has_prefix = model.space_is_prefix && (text.starts_with(' ') || text.starts_with(kSpace));
  if (model.add_dummy_prefix && !has_prefix) out += kSpace;
  bool after_space = model.remove_extra_whitespaces;
  while (!text.empty()) {
    auto [part, used] = normalize_prefix(text);
    while (after_space && part.starts_with(' ')) part.remove_prefix(1);
    if (!part.empty()) {
      for (char c : part)
        if (c == ' ')
          out += kSpace;
        else
          out += c;
      after_space = part.ends_with(' ');
    }
    text.remove_prefix(used);
    if (!model.remove_extra_whitespaces) after_space = false;
  }
  while (model.remove_extra_whitespaces && out.ends_with(kSpace)) out.resize(out.size() - kSpace.size());
  return out;
}

void SentencePiece::Impl::emit(std::string_view piece, std::vector<int32_t>& out) const {
  const int32_t id = id_of(piece);
  if (id != unknown || !model.byte_fallback) return out.push_back(id);
  for (char c : piece) out.push_back(byte_ids[uint8_t(c)]);
}

void SentencePiece::Impl::merge_word(std::string_view word, std::vector<int32_t>& out) const {
  std::vector<Symbol> symbols;
  for (size_t at = 0; at < word.size();) {
    const size_t user = user_defined_at(word.substr(at));
    const size_t length = user ? user : character_length(word.substr(at));
    const int64_t index = int64_t(symbols.size());
    symbols.push_back({int64_t(at), int32_t(length), user > 0, index - 1, index + 1});
    at += length;
  }
  symbols.back().next = -1;
  std::priority_queue<Candidate> candidates;
  // The two parts of each unused piece; the piece is split into them at the end.
  std::unordered_map<std::string_view, std::pair<std::string_view, std::string_view>> parts;
  const auto view = [&](const Symbol& s) { return word.substr(size_t(s.begin), size_t(s.length)); };
  const auto consider = [&](int64_t left, int64_t right) {
    if (left < 0 || right < 0) return;
    const Symbol &a = symbols[size_t(left)], &b = symbols[size_t(right)];
    if (a.frozen || b.frozen || size_t(a.length) + size_t(b.length) > longest_piece) return;
    const std::string_view both = word.substr(size_t(a.begin), size_t(a.length + b.length));
    const auto piece = pieces.find(both);
    if (piece == pieces.end()) return;
    candidates.push({model.pieces[size_t(piece->second)].score, left, right, a.length + b.length});
    if (type(piece->second) == PieceType::unused) parts[both] = {view(a), view(b)};
  };
  for (size_t i = 1; i < symbols.size(); ++i) consider(int64_t(i - 1), int64_t(i));
  while (!candidates.empty()) {
    const Candidate c = candidates.top();
    candidates.pop();
    Symbol &a = symbols[size_t(c.left)], &b = symbols[size_t(c.right)];
    if (a.length == 0 || b.length == 0 || a.length + b.length != c.length) continue;  // a neighbour has merged since
    a.length = c.length;
    a.next = b.next;
    if (b.next >= 0) symbols[size_t(b.next)].previous = c.left;
    b.length = 0;
    consider(a.previous, c.left);
    consider(c.left, a.next);
  }
  std::vector<std::string_view> pending;
  for (int64_t i = 0; i >= 0; i = symbols[size_t(i)].next) {
    pending.assign(1, view(symbols[size_t(i)]));
    while (!pending.empty()) {
      const std::string_view piece = pending.back();
      pending.pop_back();
      const auto split = parts.find(piece);
      if (split == parts.end()) {
        emit(piece, out);
      } else {
        pending.push_back(split->second.second);
        pending.push_back(split->second.first);
      }
    }
  }
}

SentencePiece::SentencePiece(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SentencePiece::~SentencePiece() = default;
SentencePiece::SentencePiece(SentencePiece&&) noexcept = default;
SentencePiece& SentencePiece::operator=(SentencePiece&&) noexcept = default;

SentencePiece SentencePiece::parse(std::string_view model, const std::string& origin) {
  return SentencePiece(std::make_unique<Impl>(detail::parse_sentencepiece_model(model, origin), origin));
}
SentencePiece SentencePiece::of_model(detail::SentencePieceModel model, const std::string& origin) {
  return SentencePiece(std::make_unique<Impl>(std::move(model), origin));
}
SentencePiece SentencePiece::load(const std::string& path) { return parse(read_file(path, int64_t(256) << 20), path); }

std::string SentencePiece::to_model() const { return detail::sentencepiece_model_bytes(impl_->model); }

std::string SentencePiece::normalize(std::string_view text) const {
  require_utf8(text, "text to normalize");
  return impl_->normalize(text);
}

std::vector<int32_t> SentencePiece::encode(std::string_view text) const {
  const std::string normal = normalize(text);
  std::vector<int32_t> out;
  // A word that occurred earlier in this text already has its ids in `out`.
  std::unordered_map<std::string_view, std::pair<size_t, size_t>> seen;
  for (size_t begin = 0; begin < normal.size();) {
    size_t end = normal.size();
    if (impl_->model.splits_at_spaces) {
      end = std::min(normal.find(kSpace, begin + 1), normal.size());
    } else if (impl_->words_apart) {
      end = begin;
      while (normal.compare(end, 3, kSpace) == 0) end += 3;
      end = std::min(normal.find(kSpace, end), normal.size());
    }
    const std::string_view word = std::string_view(normal).substr(begin, end - begin);
    const auto [at, is_new] = seen.try_emplace(word, out.size(), 0);
    if (is_new) {
      impl_->merge_word(word, out);
      at->second.second = out.size() - at->second.first;
    } else {
      for (size_t i = 0; i < at->second.second; ++i) out.push_back(out[at->second.first + i]);
    }
    begin = end;
  }
  // A run of unknown characters becomes one token.
  if (!impl_->model.byte_fallback)
    out.erase(std::unique(out.begin(), out.end(), [&](int32_t a, int32_t b) { return a == impl_->unknown && b == a; }),
              out.end());
  return out;
}

std::string SentencePiece::decode(std::span<const int32_t> ids) const {
  const detail::SentencePieceModel& m = impl_->model;
  std::string out;
  bool at_start = true, dropped_space = false;
  for (int32_t id : ids) {
    impl_->check("decode", id);
    const PieceType type = impl_->type(id);
    if (type == PieceType::byte) {
      out += token_bytes(id);
      continue;
    }
    if (dropped_space || !out.empty()) at_start = false;
    dropped_space = false;
    if (type == PieceType::control) continue;
    if (type == PieceType::unknown) {
      out += m.unk_surface;
      continue;
    }
    std::string_view piece = m.pieces[size_t(id)].text;
    // The space that add_dummy_prefix added before the text, or spaces that encoding would remove.
    if (at_start && (m.add_dummy_prefix || m.remove_extra_whitespaces) && piece.starts_with(kSpace)) {
      piece.remove_prefix(kSpace.size());
      dropped_space = !m.remove_extra_whitespaces;
    }
    for (size_t i = 0; i < piece.size();) {
      const bool space = piece.compare(i, 3, kSpace) == 0;
      out += space ? ' ' : piece[i];
      i += space ? 3 : 1;
    }
  }
  return out;
}

std::string SentencePiece::added_bytes(int32_t id) const {
  impl_->check("added_bytes", id);
  return impl_->type(id) == PieceType::control ? "" : token_bytes(id);
}

int64_t SentencePiece::bytes(int32_t previous, int32_t id) const {
  impl_->check("bytes", id);
  if (impl_->is_boundary(id)) return 0;
  if (impl_->type(id) == PieceType::byte) return 1;
  const std::string& piece = impl_->model.pieces[size_t(id)].text;
  int64_t size = int64_t(piece.size());
  for (size_t at = piece.find(kSpace); at != piece.npos; at = piece.find(kSpace, at + kSpace.size()))
    size -= int64_t(kSpace.size()) - 1;
  return size - (piece.starts_with(kSpace) && impl_->begins_with_dummy_prefix(previous) ? 1 : 0);
}

int64_t SentencePiece::bytes_after(std::span<const int32_t> before, int32_t id) const {
  const size_t n = before.size();
  const auto is_byte = [&](int32_t i, int byte) { return i >= 0 && i == impl_->byte_ids[byte]; };
  if (n < 2 || !is_byte(id, 0x81) || !is_byte(before[n - 1], 0x96) || !is_byte(before[n - 2], 0xE2))
    return bytes(n == 0 ? -1 : before[n - 1], id);
  // The two byte pieces before counted 1 each, but the space is one byte.
  return impl_->begins_with_dummy_prefix(n > 2 ? before[n - 3] : -1) ? -2 : -1;
}

int32_t SentencePiece::bos() const { return impl_->bos; }
std::span<const SpecialToken> SentencePiece::specials() const { return impl_->specials; }
int32_t SentencePiece::token_id(std::string_view text) const {
  if (const auto user = impl_->pieces.find(text);
      user != impl_->pieces.end() && impl_->type(user->second) == PieceType::user_defined)
    return user->second;
  return Tokenizer::token_id(text);
}
int SentencePiece::vocab_size() const { return int(impl_->model.pieces.size()); }
uint32_t SentencePiece::hash() const { return impl_->hash; }

std::string SentencePiece::token_bytes(int32_t id) const {
  impl_->check("token_bytes", id);
  const detail::Piece& p = impl_->model.pieces[size_t(id)];
  if (p.type == PieceType::control) return p.text;
  if (p.type == PieceType::unknown) return impl_->model.unk_surface;
  if (p.type == PieceType::byte)
    return std::string(1, char(std::find(impl_->byte_ids, impl_->byte_ids + 256, id) - impl_->byte_ids));
  std::string out;
  for (size_t i = 0; i < p.text.size();) {
    const bool space = p.text.compare(i, 3, kSpace) == 0;
    out += space ? ' ' : p.text[i];
    i += space ? 3 : 1;
  }
  return out;
}

}  // namespace ingot
