// Slots of a DeviceModel: their lengths, the positions to which their caches can be rewound, and their state after a
// step whose waits gave up.
#include <algorithm>

#include "ingot/kernels/copy/copy.h"
#include "ingot/models/decode/model/device_model.h"
#include "ingot/models/decode/phased/ranks.h"

namespace ingot::decode {

#ifdef INGOT_HAS_CUDA_DECODE

int DeviceModel::reset() {
  const gpu::DeviceGuard guard(device_);
  int first = 0;
  for (int i = int(slots_.size()) - 1; i >= 0; --i) {
    Slot& slot = slots_[size_t(i)];
    State s;
    gpu::copy_to_host(&s, slot.buffers.state, sizeof s);
    if (slot.ahead && s.position > slot.length) {  // a step ahead was computed whose token the host has not counted
      s.position = int32_t(slot.length);
      gpu::copy_to_device(&slot.buffers.state->position, &s.position, sizeof s.position);
    }
    slot.ahead.reset();
    if (slot.length != s.position) first = i;
    slot.length = s.position;
    if (has_head()) head_->truncate(i, slot.length);
    slot.noise_there.reset();  // the failed step may have incremented the noise's step or not
    gpu::fill_bytes(slot.buffers.grid_barrier, 0, slot.buffers.handover_bytes, *stream_);
  }
  if (sequences_input_ != nullptr)
    gpu::fill_bytes(sequences_buffers_.grid_barrier, 0, sequences_buffers_.handover_bytes, *stream_);
  if (row_words_.bytes > 0) gpu::fill_bytes(row_words_.grid_barrier, 0, row_words_.bytes, *stream_);
  if (inbox_ != nullptr) {
    gpu::fill_bytes(inbox_, 0, inbox_bytes(config(), slots_[0].buffers.ranks.exchange.ranks), *stream_);
    gpu::fill_bytes(epoch_, 0, 4, *stream_);
  }
  waits_->reset(*stream_);
  stream_->synchronize();
  return first;
}

std::string DeviceModel::place_in(int slot) const {
  return ingot::detail::concat("position ", length(slot),
                               slots_.size() > 1 ? ingot::detail::concat(" of slot ", slot) : std::string());
}

void DeviceModel::check_room(int slot, int64_t tokens) const {
  if (length(slot) + tokens > context_)
    fail(ErrorCode::usage, "found ", length(slot) + tokens, " tokens, expected at most ", context_, ", the context");
}
void DeviceModel::grow(Slot& slot, int64_t tokens) {
  if (slot.length + tokens > context_)
    fail(ErrorCode::usage, "found ", slot.length + tokens, " tokens, expected at most ", context_, ", the context");
  slot.length += tokens;
  slot.valid_from = std::max(slot.valid_from, slot.length - ring_);
}

bool DeviceModel::can_rewind(int64_t length, int index) const {
  const Slot& slot = slots_[size_t(index)];
  return 0 <= length && length <= slot.length &&
         (length == 0 || std::max<int64_t>(0, length - config().window_reach()) >= slot.valid_from);
}
void DeviceModel::rewind(int64_t length, int index) {
  Slot& slot = slots_[size_t(index)];
  INGOT_CHECK(can_rewind(length, index), "decode: found a cache of ", slot.length, " tokens that cannot go back to ",
              length);
  const gpu::DeviceGuard guard(device_);
  synchronize();
  slot.ahead.reset();
  slot.length = length;
  if (has_head()) head_->truncate(index, length);
  if (length == 0) slot.valid_from = 0;
  const int32_t at[2] = {int32_t(length), 0};  // position, flaw
  gpu::copy_to_device(&slot.buffers.state->position, at, sizeof at);
}

bool DeviceModel::copy_tokens(int from, int to, int64_t length) {
  if (!can_rewind(length, from)) return false;
  const gpu::DeviceGuard guard(device_);
  const Slot& source = slots_[size_t(from)];
  Slot& target = slots_[size_t(to)];
  const DecoderSpec& c = config();
  const int64_t kv_heads = slice_.kv_heads.size(), begin = std::max<int64_t>(0, length - c.window_reach());
  for (size_t l = 0; kv_heads > 0 && l < source.model.layers.size(); ++l) {
    const Layer &x = source.model.layers[l], &y = target.model.layers[l];
    const int64_t rows = x.cache_rows;
    // a circular cache has one or two contiguous ranges of rows
    for (int64_t p = x.window > 0 ? begin : 0; p < length;) {
      const int64_t n = std::min(length - p, rows - p % rows);
      const auto part = [&](bf16* data) {
        const Tensor all(data, DType::bf16, {kv_heads, rows, cache_dim(c)}, {Device::cuda, device_});
        return all.slice(1, p % rows, p % rows + n);
      };
      copy({.from = part(x.keys), .to = part(y.keys)}, *stream_);
      copy({.from = part(x.values), .to = part(y.values)}, *stream_);
      p += n;
    }
  }
  if (has_head() && head_->length(from) >= length) head_->copy(from, to, length);
  synchronize();
  target.ahead.reset();
  target.length = length, target.valid_from = begin;
  const int32_t at[2] = {int32_t(length), 0};  // position, flaw
  gpu::copy_to_device(&target.buffers.state->position, at, sizeof at);
  return true;
}

void DeviceModel::fill_cache_with_random(int64_t length, int index) {
  Slot& slot = slots_[size_t(index)];
  const gpu::DeviceGuard guard(device_);
  rewind(0, index);
  grow(slot, length);
  const DecoderSpec& c = config();
  uint64_t seed = 1;
  const int64_t kv_heads = slice_.kv_heads.size();
  for (const Layer& l : slot.model.layers)
    for (bf16* rows : {l.keys, l.values})
      if (!slot.has_random_cache && kv_heads > 0)
        fill_normal(rows, DType::bf16, kv_heads * int64_t(l.cache_rows) * cache_dim(c), 1, 0, ++seed, *stream_);
  slot.has_random_cache = true;
  const State state{.tokens = {}, .position = int32_t(length), .flaw = 0};
  gpu::copy_to_device(slot.buffers.state, &state, sizeof state);
}

#endif

}  // namespace ingot::decode
