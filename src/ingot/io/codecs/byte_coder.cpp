#include "ingot/io/codecs/byte_coder.h"

#include "ingot/core/check.h"
#ifdef INGOT_HAS_BROTLI
#include <brotli/decode.h>
#include <brotli/encode.h>
#endif
#ifdef INGOT_HAS_LZMA
#include <lzma.h>
#endif

namespace ingot {
namespace {

std::string shuffled(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size());
  for (const size_t first : {0, 1})
    for (size_t i = first; i < bytes.size(); i += 2) out.push_back(bytes[i]);
  return out;
}
std::string unshuffled(std::string_view bytes) {
  std::string out(bytes.size(), 0);
  size_t from = 0;
  for (const size_t first : {0, 1})
    for (size_t i = first; i < out.size(); i += 2) out[i] = bytes[from++];
  return out;
}

[[noreturn, maybe_unused]] void refuse(const std::string& name, ByteCoder c, int64_t size) {
  fail(ErrorCode::bad_data, name, ": found bytes that are no whole stream of ", name_of(c), " for ", size, " bytes");
}
void require(ByteCoder c) {
  if (!has_byte_coder(c))
    fail(ErrorCode::unsupported, "coder ", name_of(c),
         ": this build lacks the library of the coder, expected another coder");
}

#ifdef INGOT_HAS_BROTLI
std::string brotli_of(std::string_view bytes) {
  size_t size = BrotliEncoderMaxCompressedSize(bytes.size());
  std::string out(size, 0);
  if (!BrotliEncoderCompress(BROTLI_MAX_QUALITY, BROTLI_MAX_WINDOW_BITS, BROTLI_MODE_GENERIC, bytes.size(),
                             reinterpret_cast<const uint8_t*>(bytes.data()), &size,
                             reinterpret_cast<uint8_t*>(out.data())))
    fail(ErrorCode::io, "brotli: ", bytes.size(), " bytes were not compressed");
  out.resize(size);
  return out;
}
bool from_brotli(std::string_view coded, std::string& out) {
  BrotliDecoderState* const state = BrotliDecoderCreateInstance(nullptr, nullptr, nullptr);
  if (state == nullptr) fail(ErrorCode::io, "brotli: no memory");
  size_t left = coded.size(), room = out.size();
  const uint8_t* from = reinterpret_cast<const uint8_t*>(coded.data());
  uint8_t* to = reinterpret_cast<uint8_t*>(out.data());
  const BrotliDecoderResult end = BrotliDecoderDecompressStream(state, &left, &from, &room, &to, nullptr);
  BrotliDecoderDestroyInstance(state);
  return end == BROTLI_DECODER_RESULT_SUCCESS && left == 0 && room == 0;
}
#endif

#ifdef INGOT_HAS_LZMA
constexpr uint32_t kPreset = 6;
std::string lzma_of(std::string_view bytes) {
  std::string out(lzma_stream_buffer_bound(bytes.size()), 0);
  size_t size = 0;
  if (lzma_easy_buffer_encode(kPreset, LZMA_CHECK_CRC32, nullptr, reinterpret_cast<const uint8_t*>(bytes.data()),
                              bytes.size(), reinterpret_cast<uint8_t*>(out.data()), &size, out.size()) != LZMA_OK)
    fail(ErrorCode::io, "lzma: ", bytes.size(), " bytes were not compressed");
  out.resize(size);
  return out;
}
bool from_lzma(std::string_view coded, std::string& out) {
  constexpr uint64_t kMemory = uint64_t(64) << 20;  // a stream of preset 6 needs 9 MiB
  uint64_t limit = kMemory;
  size_t in_at = 0, out_at = 0;
  const lzma_ret end =
      lzma_stream_buffer_decode(&limit, 0, nullptr, reinterpret_cast<const uint8_t*>(coded.data()), &in_at,
                                coded.size(), reinterpret_cast<uint8_t*>(out.data()), &out_at, out.size());
  return end == LZMA_OK && in_at == coded.size() && out_at == out.size();
}
#endif

}  // namespace

const char* name_of(ByteCoder c) { return c == ByteCoder::brotli ? "brotli" : "lzma"; }

bool has_byte_coder([[maybe_unused]] ByteCoder c) {
#ifdef INGOT_HAS_BROTLI
  if (c == ByteCoder::brotli) return true;
#endif
#ifdef INGOT_HAS_LZMA
  if (c == ByteCoder::lzma) return true;
#endif
  return false;
}

std::string encode_bytes(ByteCoder c, std::string_view bytes) {
  require(c);
  [[maybe_unused]] const std::string from = shuffled(bytes);
#ifdef INGOT_HAS_BROTLI
  if (c == ByteCoder::brotli) return brotli_of(from);
#endif
#ifdef INGOT_HAS_LZMA
  if (c == ByteCoder::lzma) return lzma_of(from);
#endif
  return {};
}

std::string decode_bytes(ByteCoder c, std::string_view coded, int64_t size, const std::string& name) {
  require(c);
  std::string out(size_t(size), 0);
  bool whole = false;
#ifdef INGOT_HAS_BROTLI
  if (c == ByteCoder::brotli) whole = from_brotli(coded, out);
#endif
#ifdef INGOT_HAS_LZMA
  if (c == ByteCoder::lzma) whole = from_lzma(coded, out);
#endif
  if (!whole) refuse(name, c, size);
  return unshuffled(out);
}

}  // namespace ingot
