#pragma once
// SHA-256 (FIPS 180-4): by OpenSSL's libcrypto where the loader finds it, else by a plain loop of our own.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace ingot {

namespace detail {
class Hasher {
 public:
  virtual ~Hasher() = default;
  virtual void update(const void* data, int64_t bytes) = 0;
  virtual void finish(uint8_t (&digest)[32]) = 0;
};
std::unique_ptr<Hasher> libcrypto_hasher();  // null where there is no libcrypto
std::unique_ptr<Hasher> portable_hasher();
}  // namespace detail

class Sha256 {
 public:
  Sha256();
  explicit Sha256(std::unique_ptr<detail::Hasher> hasher) : hasher_(std::move(hasher)) {}
  void update(const void* data, int64_t bytes) { hasher_->update(data, bytes); }
  void update(std::string_view bytes) { update(bytes.data(), int64_t(bytes.size())); }
  std::string hex();  // 64 lower-case digits; the object takes no further bytes

 private:
  std::unique_ptr<detail::Hasher> hasher_;
};

std::string sha256(std::string_view bytes);
std::string sha256_of_file(const std::string& path);  // in pieces, so a file of any size
const char* sha256_library();  // the name under which libcrypto was loaded, or null where the plain loop serves

}  // namespace ingot
