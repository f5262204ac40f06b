// Reads tiktoken's files: one token per line, "base64 rank".
#include <charconv>

#include "ingot/core/check.h"
#include "ingot/text/byte_bpe.h"

namespace ingot {
namespace {

// find_merges() looks up every cut of every token, so its work grows with the sum of the squares of the tokens'
// lengths.
constexpr uint64_t kMaxCutBytes = uint64_t(1) << 33;
constexpr int kHarmonySpecials = 1090;  // ids 199998 to 201087, which follow the published ranks

int sextet(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  return c == '+' ? 62 : c == '/' ? 63 : -1;
}
// Returns false unless the text is base64 in its canonical spelling.
bool decode_base64(std::string_view text, std::string& bytes) {
  bytes.clear();
  if (text.empty() || text.size() % 4 != 0) return false;
  const size_t padding = text.ends_with("==") ? 2 : text.ends_with("=") ? 1 : 0;
  uint32_t bits = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const int value = i >= text.size() - padding ? 0 : sextet(text[i]);
    if (value < 0) return false;
    bits = bits << 6 | uint32_t(value);
    if (i % 4 != 3) continue;
    for (int shift = 16; shift >= 0; shift -= 8) bytes += char(bits >> shift & 255);
    bits = 0;
  }
  for (size_t i = 0; i < padding; ++i) {
    if (bytes.back() != 0) return false;  // bits left over behind the last byte
    bytes.pop_back();
  }
  return true;
}

}  // namespace

std::string harmony_special_name(int offset, int id) {
  switch (offset) {
    case 0: return "<|startoftext|>";
    case 1: return "<|endoftext|>";
    case 4: return "<|return|>";
    case 5: return "<|constrain|>";
    case 7: return "<|channel|>";
    case 8: return "<|start|>";
    case 9: return "<|end|>";
    case 10: return "<|message|>";
    case 14: return "<|call|>";
    case 20: return "<|endofprompt|>";
    default: return "<|reserved_" + std::to_string(id) + "|>";
  }
}

ByteBpe ByteBpe::parse_tiktoken(std::string_view text, const std::string& origin) {
  ByteBpeRules rules{.pattern = WordPattern::o200k, .ignore_merges = true, .merge_by_token = true};
  std::string bytes;
  int64_t number = 0;
  uint64_t cut_bytes = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    std::string_view line = text.substr(at, end - at);
    at = end + 1;
    ++number;
    const auto refuse = [&](const auto&... note) {
      fail(ErrorCode::bad_data, origin, ": line ", number, ": ", note..., ", expected \"base64 rank\"");
    };
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty()) continue;
    const size_t space = line.find(' ');
    if (space == line.npos) refuse("found one word");
    int32_t rank = -1;
    const char *digits = line.data() + space + 1, *stop = line.data() + line.size();
    const auto [read, error] = std::from_chars(digits, stop, rank);
    if (error != std::errc() || read != stop || digits == stop || *digits == '-') refuse("found no rank");
    if (!decode_base64(line.substr(0, space), bytes)) refuse("found a token that is not base64");
    cut_bytes += uint64_t(bytes.size()) * bytes.size();
    if (cut_bytes > kMaxCutBytes)
      fail(ErrorCode::bad_data, origin, ": line ", number, ": found a token of ", bytes.size(),
           " bytes, expected tokens the length of words");
    // Every published file has its ranks in order. Ranks without gaps cannot request much memory.
    if (rank != int64_t(rules.tokens.size()))
      fail(ErrorCode::bad_data, origin, ": line ", number, ": found rank ", rank, ", expected ", rules.tokens.size());
    rules.tokens.push_back(bytes);
  }
  const int first = int(rules.tokens.size());
  for (int i = 0; i < kHarmonySpecials; ++i) rules.specials.push_back({first + i, harmony_special_name(i, first + i)});
  return ByteBpe(std::move(rules), origin);
}

}  // namespace ingot
