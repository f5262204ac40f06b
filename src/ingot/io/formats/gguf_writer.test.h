#pragma once
// Writes GGUF files for tests, whole or damaged: every number of the format can be changed.
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace ingot::testing {

class GgufWriter {
 public:
  uint32_t version = 3;
  int64_t align = 32;
  int64_t more_tensors = 0, more_keys = 0;  // added to the counts in the header

  GgufWriter& key(const std::string& name, uint32_t value) { return add(name, 4, number(value)); }
  GgufWriter& key(const std::string& name, float value) { return add(name, 6, number(value)); }
  GgufWriter& key(const std::string& name, bool value) { return add(name, 7, number(uint8_t(value))); }
  GgufWriter& key(const std::string& name, const char* value) { return add(name, 8, text(value)); }
  GgufWriter& key(const std::string& name, const std::vector<std::string>& values) {
    std::string bytes = number(uint32_t(8)) + number(uint64_t(values.size()));
    for (const std::string& v : values) bytes += text(v);
    return add(name, 9, bytes);
  }
  GgufWriter& key(const std::string& name, const std::vector<int32_t>& values) {
    std::string bytes = number(uint32_t(5)) + number(uint64_t(values.size()));
    for (const int32_t v : values) bytes += number(v);
    return add(name, 9, bytes);
  }
  // Adds a tensor of any type with these bytes.
  GgufWriter& add(const std::string& name, uint32_t type, const std::string& bytes) {
    keys_ += text(name) + number(type) + bytes;
    ++key_count_;
    return *this;
  }

  // `shape` has the outermost size first. `shift` is added to the correct offset.
  GgufWriter& tensor(const std::string& name, uint32_t type, const std::vector<int64_t>& shape,
                     const std::string& bytes, int64_t shift = 0) {
    infos_ += text(name) + number(uint32_t(shape.size()));
    for (size_t i = shape.size(); i-- > 0;) infos_ += number(uint64_t(shape[i]));
    infos_ += number(type) + number(uint64_t(int64_t(data_.size()) + shift));
    data_ += bytes;
    data_.resize(size_t((int64_t(data_.size()) + align - 1) / align * align));
    ++tensor_count_;
    return *this;
  }

  std::string bytes() const {
    std::string out = "GGUF" + number(version) + number(uint64_t(tensor_count_ + more_tensors)) +
                      number(uint64_t(key_count_ + more_keys)) + keys_ + infos_;
    if (tensor_count_ > 0) out.resize(size_t((int64_t(out.size()) + align - 1) / align * align));
    return out + data_;
  }

  template <class T> static std::string number(T n) { return std::string(reinterpret_cast<const char*>(&n), sizeof n); }
  static std::string text(const std::string& s) { return number(uint64_t(s.size())) + s; }

 private:
  int64_t key_count_ = 0, tensor_count_ = 0;
  std::string keys_, infos_, data_;
};

}  // namespace ingot::testing
