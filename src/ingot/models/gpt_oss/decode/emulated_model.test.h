#pragma once
// A small model in memory that emulated kernels run on.
#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "ingot/models/gpt_oss/decode/decode.h"
#include "ingot/models/gpt_oss/decode/decode_cases.test.h"
#include "ingot/models/gpt_oss/decode/megakernel.h"
#include "ingot/models/gpt_oss/decode/screen.h"
#include "ingot/models/gpt_oss/decode/slices.h"

namespace ingot::testing {

// A model in ordinary memory, as its kernels see it: all of it, or one GPU's slice.
struct Emulated {
  const GptOssConfig& c;
  uint32_t capacity;
  int64_t blocks = 3;  // of the megakernel
  std::vector<char> memory, cache;
  std::vector<std::vector<char>> cut;  // matrices and vectors of a slice
  std::vector<float> cos, sin;
  gpt_oss_decode::Model model;
  gpt_oss_decode::Buffers buffers;
  std::vector<uint8_t> codes;  // of the head, where it is screened
  std::vector<gpt_oss_decode::ScreenRow> screen_rows;
  bool megakernel = false;  // for single tokens
  std::vector<gpt_oss_decode::LayerStages> stages;
  uint32_t stop = gpu::kRunning, host_stop = 0;
  gpu::WaitRecord record;
  uint64_t limit_ns = 50'000'000;

  Emulated(const DecodeModel& m, uint32_t room) : Emulated(m, room, gpt_oss_decode::whole(m.config), 1) {}
  Emulated(const DecodeModel& m, uint32_t room, const gpt_oss_decode::Slice& slice, uint32_t ranks)
      : c(m.config), capacity(room) {
    using namespace gpt_oss_decode;
    buffers.ranks.exchange.ranks = ranks;
    memory.resize(size_t(lay_out(c, capacity, nullptr, buffers)) + 256);
    lay_out(c, capacity, aligned(memory), buffers);
    cos.resize(size_t(capacity * c.head_dim / 2)), sin = cos;
    rope_table(rope_frequencies(c.head_dim, c.rope_base, c.rope_scaling),
               Tensor(cos.data(), {capacity, c.head_dim / 2}), Tensor(sin.data(), {capacity, c.head_dim / 2}));
    model.config = c;
    model.embed = m.weights.embed.data.ptr<bf16>();
    model.norm = m.weights.norm.ptr<float>(), model.cos = cos.data(), model.sin = sin.data();
    model.head = part(m.weights.head, head_cut(c, slice));
    if (ranks > 1) model.kv_heads = slice.kv_heads.size();
    const int64_t kv_heads = slice.kv_heads.size(), group = c.heads / c.kv_heads;
    const int64_t rows_of_all = capacity * c.kv_heads * cache_dim(c) * 2 * 2;
    cache.resize(size_t(rows_of_all * c.layers) + 256, char(0xff));  // NaN: nothing may be read before it is written
    char* at = aligned(cache);
    for (size_t l = 0; l < m.weights.layers.size(); ++l) {
      const GptOssLayer& w = m.weights.layers[l];
      const auto vector = [](const Tensor& t) { return t ? t.ptr<float>() : nullptr; };
      const Cut qkv = qkv_cut(c, slice), gate_up = gate_up_cut(c, slice);
      const Cut heads{.rows = {{slice.kv_heads.begin * group, slice.kv_heads.end * group}}, .cols = {0, 1}};
      Layer y{.attn_norm = vector(w.attn_norm),
              .mlp_norm = vector(w.mlp_norm),
              .b_qkv = w.b_qkv ? part(w.b_qkv, qkv) : nullptr,
              .b_o = slice.kv_heads.begin == 0 && kv_heads > 0 ? vector(w.b_o) : nullptr,
              .b_router = vector(w.b_router),
              .sinks = part(w.sinks, heads),
              .b_gate_up = part(w.b_gate_up, gate_up),
              .b_down = slice.channels.begin == 0 && slice.channels.size() > 0 ? vector(w.b_down) : nullptr};
      y.qkv = part(w.qkv, qkv), y.o = part(w.o, output_cut(c, slice)), y.router = matrix_of(w.router);
      y.gate_up = part(w.gate_up, gate_up), y.down = part(w.down, down_cut(c, slice));
      y.window = c.sliding[l] ? uint32_t(c.window) : 0;
      y.cache_rows = c.sliding[l] ? std::min<uint32_t>(capacity, uint32_t(c.window) - 1 + kColumns) : capacity;
      y.keys = reinterpret_cast<bf16*>(at), y.values = y.keys + kv_heads * y.cache_rows * cache_dim(c);
      at += rows_of_all;
      // Numbers beyond head_dim are zeros by agreement.
      std::fill(reinterpret_cast<char*>(y.keys), at, cache_dim(c) > c.head_dim ? char(0) : char(0xff));
      model.layers.push_back(y);
    }
    stages = stages_of(model, buffers, capacity);
  }
  // Copies of what the slice has; sizes of nothing are no allocation.
  const float* part(const Tensor& t, const gpt_oss_decode::Cut& at) {
    const std::vector<float> numbers = gpt_oss_decode::cut_vector(t, at);
    char* const to = keep(int64_t(numbers.size()) * 4);
    std::copy(numbers.begin(), numbers.end(), reinterpret_cast<float*>(to));  // of none, too
    return reinterpret_cast<const float*>(to);
  }
  gpt_oss_decode::Matrix part(const WeightMatrix& w, const gpt_oss_decode::Cut& at) {
    const int64_t experts = w.is_bank() ? w.data.size(0) : 0, one = gpt_oss_decode::cut_bytes(w.format, at);
    char* const to = keep(std::max<int64_t>(1, experts) * one);
    for (int64_t e = 0; e < std::max<int64_t>(1, experts); ++e)
      gpt_oss_decode::cut_granules(experts > 0 ? w.at(e) : w, at, reinterpret_cast<uint8_t*>(to + e * one));
    const WeightMatrix device = granules_at(to, w.format, experts, at.row_count(), at.cols.size());
    to_device_order(device);
    return gpt_oss_decode::matrix_of(device);
  }
  char* keep(int64_t bytes) { return aligned(cut.emplace_back(size_t(bytes + 256))); }
  static char* aligned(std::vector<char>& v) {
    return reinterpret_cast<char*>((uintptr_t(v.data()) + 255) / 256 * 256);
  }

  // Only where screen_takes(model).
  void make_screen() {
    codes.resize(size_t(gpt_oss_decode::screen_matrix(model.head, nullptr).matrix_bytes) + 16, 0xaa);
    screen_rows.resize(16 * model.head.bands);
    uint8_t* const memory = codes.data() + 16 - uintptr_t(codes.data()) % 16;
    model.screen = {gpt_oss_decode::screen_matrix(model.head, memory), screen_rows.data()};
    gpt_oss_decode::make_screen(model.head, model.screen, {});
  }
  bool has_screen() const { return model.screen.rows != nullptr; }
  void run_one_kernel(const gpt_oss_decode::Step& step, uint32_t missing = ~0u, const megakernel::Trace& trace = {},
                      bool screened = false) {
    const gpu::Watch watch{.stop = &stop, .host_stop = &host_stop, .record = &record, .limit_ns = limit_ns};
    run_megakernel(model, buffers, step,
                   {.layers = stages.data(),
                    .watch = watch,
                    .ranks = &buffers.ranks,
                    .blocks = blocks,
                    .trace = trace,
                    .missing = missing,
                    .screened = screened},
                   {});
  }

  // The logits of the last `rows` tokens.
  std::vector<std::vector<double>> extend(std::span<const int32_t> ids, uint32_t rows) {
    std::fill_n(buffers.logits, rows * c.vocab, NAN);
    step(ids, rows);
    return rows_of_logits(rows);
  }
  void step(std::span<const int32_t> ids, uint32_t rows) {
    std::copy(ids.begin(), ids.end(), buffers.state->tokens);
    const gpt_oss_decode::Step step{.T = uint32_t(ids.size()), .head_rows = rows, .capacity = capacity};
    if (megakernel && ids.size() == 1 && megakernel_takes(model))  // not heads of more than 64
      run_one_kernel(step);
    else
      gpt_oss_decode::run(model, buffers, step, {});
  }
  std::vector<std::vector<double>> rows_of_logits(uint32_t rows) const {
    std::vector<std::vector<double>> all;
    for (uint32_t j = 0; j < rows; ++j)
      all.emplace_back(buffers.logits + j * c.vocab, buffers.logits + (j + 1) * c.vocab);
    return all;
  }
};

}  // namespace ingot::testing
