#pragma once
// A counter of several processes of one host: each number is given out once.
#include <cstdint>

namespace ingot {

class SharedCounter {
 public:
  SharedCounter();                         // a new one, from 0
  explicit SharedCounter(int descriptor);  // one that a process inherited; it takes the descriptor over
  ~SharedCounter();
  SharedCounter(const SharedCounter&) = delete;
  SharedCounter& operator=(const SharedCounter&) = delete;

  int64_t next();
  // By which another process finds it. It is closed on exec until told otherwise.
  int descriptor() const { return descriptor_; }

 private:
  void map();
  int descriptor_ = -1;
  int64_t* value_ = nullptr;
};

}  // namespace ingot
