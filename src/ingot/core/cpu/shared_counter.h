#pragma once
// A counter of several processes of one host: each number is given out once.
#include <cstdint>

namespace ingot {

class SharedCounter {
 public:
  SharedCounter();                         // a new counter, from 0
  explicit SharedCounter(int descriptor);  // an inherited counter; takes over the descriptor
  ~SharedCounter();
  SharedCounter(const SharedCounter&) = delete;
  SharedCounter& operator=(const SharedCounter&) = delete;

  int64_t next();
  // The descriptor for a second process, closed on exec by default.
  int descriptor() const { return descriptor_; }

 private:
  void map();
  int descriptor_ = -1;
  int64_t* value_ = nullptr;
};

}  // namespace ingot
