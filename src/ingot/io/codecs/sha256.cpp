#include "ingot/io/codecs/sha256.h"

#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "ingot/core/check.h"
#include "ingot/io/file.h"

namespace ingot {
namespace {

// --- libcrypto, loaded at run time: its headers are not needed to build, and these functions are the same in 1.1, 3
// and 4 ---
struct Libcrypto {
  const char* name = nullptr;
  int (*init)(uint64_t options, const void* settings);
  void* (*new_context)();
  void (*free_context)(void*);
  const void* (*sha256)();
  int (*start)(void* context, const void* digest, void* engine);
  int (*update)(void* context, const void* data, size_t bytes);
  int (*finish)(void* context, unsigned char* digest, unsigned* bytes);
};

template <class F> bool find(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  return function != nullptr;
}

Libcrypto load_libcrypto() {
  for (const char* name : {"libcrypto.so.3", "libcrypto.so.4", "libcrypto.so.1.1", "libcrypto.so"}) {
    void* const from = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (from == nullptr) continue;
    Libcrypto c;
    if (find(from, "OPENSSL_init_crypto", c.init) && find(from, "EVP_MD_CTX_new", c.new_context) &&
        find(from, "EVP_MD_CTX_free", c.free_context) && find(from, "EVP_sha256", c.sha256) &&
        find(from, "EVP_DigestInit_ex", c.start) && find(from, "EVP_DigestUpdate", c.update) &&
        find(from, "EVP_DigestFinal_ex", c.finish)) {
      // No handler at exit, because threads may still hash then, and no openssl.cnf, because nothing here depends on
      // its settings.
      constexpr uint64_t kNoLoadConfig = 0x80, kNoAtExit = 0x80000;
      c.init(kNoLoadConfig | kNoAtExit, nullptr);
      c.name = name;
      return c;
    }
    dlclose(from);
  }
  return {};
}

const Libcrypto& libcrypto() {
  static const Libcrypto loaded = load_libcrypto();
  return loaded;
}

class LibcryptoHasher : public detail::Hasher {
 public:
  LibcryptoHasher() : context_(crypto_.new_context()) {
    if (context_ == nullptr) fail(ErrorCode::io, crypto_.name, ": no memory for a SHA-256");
    check(crypto_.start(context_, crypto_.sha256(), nullptr));
  }
  ~LibcryptoHasher() override { crypto_.free_context(context_); }
  LibcryptoHasher(const LibcryptoHasher&) = delete;
  LibcryptoHasher& operator=(const LibcryptoHasher&) = delete;
  void update(const void* data, int64_t bytes) override { check(crypto_.update(context_, data, size_t(bytes))); }
  void finish(uint8_t (&digest)[32]) override { check(crypto_.finish(context_, digest, nullptr)); }

 private:
  void check(int success) const {
    if (success != 1) fail(ErrorCode::io, crypto_.name, ": SHA-256 failed");
  }
  const Libcrypto& crypto_ = libcrypto();
  void* context_;
};

// --- the plain loop
// ----------------------------------------------------------------------------------------------------

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

class PortableHasher : public detail::Hasher {
 public:
  void update(const void* data, int64_t bytes) override {
    const auto* p = static_cast<const uint8_t*>(data);
    while (bytes > 0) {
      const int64_t begin = length_ % 64, n = std::min(64 - begin, bytes);
      std::memcpy(block_ + begin, p, size_t(n));
      p += n, bytes -= n, length_ += n;
      if (length_ % 64 == 0) add_block();
    }
  }
  void finish(uint8_t (&digest)[32]) override {
    const uint64_t bits = uint64_t(length_) * 8;
    const uint8_t padding[64] = {0x80};
    update(padding, 1 + (119 - length_ % 64) % 64);  // up to 8 bytes before a block's end
    uint8_t size[8];
    for (int i = 0; i < 8; ++i) size[i] = uint8_t(bits >> (56 - 8 * i));
    update(size, 8);
    for (int i = 0; i < 32; ++i) digest[i] = uint8_t(state_[i / 4] >> (24 - 8 * (i % 4)));
  }

 private:
  void add_block() {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) {
      const uint8_t* p = block_ + 4 * i;
      w[i] = uint32_t(p[0]) << 24 | uint32_t(p[1]) << 16 | uint32_t(p[2]) << 8 | uint32_t(p[3]);
    }
    for (int i = 16; i < 64; ++i) {
      const uint32_t x = w[i - 15], y = w[i - 2];
      w[i] = w[i - 16] + w[i - 7] + (std::rotr(x, 7) ^ std::rotr(x, 18) ^ (x >> 3)) +
             (std::rotr(y, 17) ^ std::rotr(y, 19) ^ (y >> 10));
    }
    uint32_t s[8];
    std::memcpy(s, state_, sizeof s);
    for (int i = 0; i < 64; ++i) {
      const uint32_t e = s[4], a = s[0];
      const uint32_t t1 = s[7] + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & s[5]) ^ (~e & s[6])) +
                          kRound[i] + w[i];
      const uint32_t t2 =
          (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
      s[7] = s[6], s[6] = s[5], s[5] = s[4], s[4] = s[3] + t1;
      s[3] = s[2], s[2] = s[1], s[1] = s[0], s[0] = t1 + t2;
    }
    for (int i = 0; i < 8; ++i) state_[i] += s[i];
  }

  uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint8_t block_[64];
  int64_t length_ = 0;
};

}  // namespace

std::unique_ptr<detail::Hasher> detail::libcrypto_hasher() {
  if (libcrypto().name == nullptr) return nullptr;
  return std::make_unique<LibcryptoHasher>();
}
std::unique_ptr<detail::Hasher> detail::portable_hasher() { return std::make_unique<PortableHasher>(); }

Sha256::Sha256() : hasher_(detail::libcrypto_hasher()) {
  if (hasher_ == nullptr) hasher_ = detail::portable_hasher();
}

std::string Sha256::hex() {
  uint8_t digest[32];
  hasher_->finish(digest);
  std::string text;
  for (const uint8_t byte : digest)
    for (const int nibble : {byte >> 4, byte & 15}) text += "0123456789abcdef"[nibble];
  return text;
}

std::string sha256(std::string_view bytes) {
  Sha256 hash;
  hash.update(bytes);
  return hash.hex();
}

std::string sha256_of_file(const std::string& path) {
  const File file = File::open(path);
  const int64_t size = file.size(), piece = int64_t(1) << 20;
  std::vector<char> buffer(size_t(std::min(size, piece)));
  Sha256 hash;
  for (int64_t at = 0; at < size; at += piece) {
    const int64_t n = std::min(piece, size - at);
    file.read_at(at, buffer.data(), n);
    hash.update(buffer.data(), n);
  }
  return hash.hex();
}

const char* sha256_library() { return libcrypto().name; }

}  // namespace ingot
