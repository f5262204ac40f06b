#pragma once
// GPUs that make tokens together, each a thread whose kernels run on the CPU.
#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include "ingot/gpu/emulation/grid.h"
#include "ingot/models/gpt_oss/decode/emulated_model.test.h"
#include "ingot/models/gpt_oss/decode/ranks.h"

namespace ingot::testing {

// What `work` throws, in the first rank that throws.
inline void on_threads(size_t ranks, const std::function<void(size_t)>& work) {
  std::vector<std::exception_ptr> failed(ranks);
  std::vector<std::thread> threads;
  for (size_t r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      emulation::settings().seed = r + 1;  // each GPU has its own pace
      try {
        work(r);
      } catch (...) { failed[r] = std::current_exception(); }
    });
  for (std::thread& t : threads) t.join();
  for (const std::exception_ptr& e : failed)
    if (e) std::rethrow_exception(e);
}

struct EmulatedRanks {
  const GptOssConfig& c;
  std::vector<std::unique_ptr<Emulated>> ranks;
  std::vector<std::vector<char>> inboxes;

  EmulatedRanks(const DecodeModel& m, uint32_t room, int count, gpt_oss_decode::Split split) : c(m.config) {
    using namespace gpt_oss_decode;
    const std::vector<Slice> slices = slices_of(c, count, split);
    const uint32_t n = uint32_t(count);
    for (const Slice& s : slices) ranks.push_back(std::make_unique<Emulated>(m, room, s, n));
    for (uint32_t r = 0; r < n; ++r) inboxes.emplace_back(size_t(inbox_bytes(c, n)) + 256);
    epochs.resize(n);
    for (uint32_t r = 0; r < n; ++r) {
      Emulated& e = *ranks[r];
      Ranks& all = e.buffers.ranks;
      all.exchange.rank = r, all.exchange.words = inbox_words(c), all.exchange.epoch = &epochs[r];
      all.heads = all.channels = all.ids = 0;
      for (uint32_t q = 0; q < n; ++q) {
        all.exchange.inbox[q] = reinterpret_cast<uint64_t*>(Emulated::aligned(inboxes[q]));
        all.exchange.stop[q] = &ranks[q]->stop;
        if (slices[q].kv_heads.size() > 0) all.heads |= 1u << q;
        if (slices[q].channels.size() > 0) all.channels |= 1u << q;
        if (slices[q].ids.size() > 0) all.ids |= 1u << q;
      }
      all.first_id = uint32_t(slices[r].ids.begin);
      e.limit_ns = 1'000'000'000'000;  // threads may have to wait for a core
      all.watch = {.stop = &e.stop, .host_stop = &e.host_stop, .record = &e.record, .limit_ns = e.limit_ns};
      e.buffers.logits = ranks[0]->buffers.logits + slices[r].ids.begin;
      e.buffers.stop = &e.stop;
      e.stages = stages_of(e.model, e.buffers, e.capacity);
      e.blocks = 3 - r % 2;
    }
  }
  void set_limit(uint64_t ns) {
    for (auto& e : ranks) e->limit_ns = ns, e->buffers.ranks.watch.limit_ns = ns / 4 * 3;
  }
  // As after a launch that gave up.
  void reset() {
    for (size_t r = 0; r < ranks.size(); ++r) {
      Emulated& e = *ranks[r];
      e.stop = gpu::kRunning, e.host_stop = 0, e.record = {}, epochs[r] = 0;
      std::memset(e.buffers.handoff, 0, size_t(e.buffers.handover_bytes));
      std::fill(inboxes[r].begin(), inboxes[r].end(), char(0));
    }
  }
  void make_screens() {
    for (auto& e : ranks)
      if (screen_takes(e->model)) e->make_screen();
  }
  // A token by the megakernel, of the head the likeliest id alone where `screened`. `missing`: the last block of the
  // last rank stays away from the hand-off of this number.
  void token(const gpt_oss_decode::Step& step, bool screened, uint32_t missing = ~0u) {
    on_threads(ranks.size(), [&](size_t r) {
      ranks[r]->run_one_kernel(step, r + 1 == ranks.size() ? missing : ~0u, {}, screened && ranks[r]->has_screen());
    });
  }
  void use_megakernel(bool wanted) {
    for (auto& e : ranks) e->megakernel = wanted;
  }
  std::vector<std::vector<double>> extend(std::span<const int32_t> ids, uint32_t rows) {
    std::fill_n(ranks[0]->buffers.logits, rows * c.vocab, NAN);
    on_threads(ranks.size(), [&](size_t r) { ranks[r]->step(ids, rows); });
    return ranks[0]->rows_of_logits(rows);
  }
  std::vector<uint32_t> epochs;
};

}  // namespace ingot::testing
