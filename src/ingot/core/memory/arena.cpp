#include "ingot/core/memory/arena.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace ingot {

int ArenaPlan::add(int64_t bytes, int first, int last) {
  INGOT_CHECK_LE(first, last, "arena plan: first step of a buffer");
  buffers_.push_back({Arena::aligned(bytes), -1, first, last});
  return int(buffers_.size()) - 1;
}

void ArenaPlan::solve() {
  std::vector<size_t> order(buffers_.size());
  std::iota(order.begin(), order.end(), size_t(0));
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return buffers_[a].bytes > buffers_[b].bytes; });
  std::vector<const Buffer*> placed, rivals;
  for (size_t i : order) {
    Buffer& buffer = buffers_[i];
    rivals.clear();
    for (const Buffer* p : placed)
      if (p->first <= buffer.last && buffer.first <= p->last) rivals.push_back(p);
    std::sort(rivals.begin(), rivals.end(), [](const Buffer* a, const Buffer* b) { return a->offset < b->offset; });
    int64_t at = 0;
    for (const Buffer* r : rivals) {
      if (r->offset - at >= buffer.bytes) break;
      at = std::max(at, r->offset + r->bytes);
    }
    buffer.offset = at;
    total_ = std::max(total_, at + buffer.bytes);
    placed.push_back(&buffer);
  }
}

int64_t ArenaPlan::sum_of_sizes() const {
  int64_t sum = 0;
  for (const Buffer& b : buffers_) sum += b.bytes;
  return sum;
}

Arena::Arena(int64_t bytes, Allocator& allocator)
    : allocator_(&allocator), device_(allocator.device()), capacity_(aligned(std::max<int64_t>(bytes, 1))) {
  memory_ = allocator.take(capacity_);
}
Arena::Arena(Arena&& other) noexcept
    : allocator_(other.allocator_),
      device_(other.device_),
      memory_(std::exchange(other.memory_, nullptr)),
      capacity_(std::exchange(other.capacity_, 0)),
      used_(std::exchange(other.used_, 0)) {}
Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(allocator_, other.allocator_);
  std::swap(device_, other.device_);
  std::swap(memory_, other.memory_);
  std::swap(capacity_, other.capacity_);
  std::swap(used_, other.used_);
  return *this;
}
Arena::~Arena() {
  if (memory_ != nullptr) allocator_->give_back(memory_, capacity_);
}

Tensor Arena::at(int64_t offset, DType dtype, Shape shape) const {
  const int64_t bytes = shape.numel() * size_of(dtype);
  INGOT_CHECK(offset >= 0 && offset + bytes <= capacity_, "arena: found a request for bytes [", offset, ", ",
              offset + bytes, "), expected it within its ", capacity_);
  return Tensor(static_cast<char*>(memory_) + offset, dtype, shape, device_);
}
Tensor Arena::take(DType dtype, Shape shape) {
  const Tensor t = at(used_, dtype, shape);
  used_ += aligned(t.bytes());
  return t;
}

}  // namespace ingot
