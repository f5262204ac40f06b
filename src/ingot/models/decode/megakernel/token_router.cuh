#pragma once
// The router within a token. Each block multiplies the part of the residual stream whose sums it has by the router's
// columns and adds that to the logits of all; then each makes the same choice of experts for itself, by its copying
// warp, which so knows first whose weights to ask for.
#include "ingot/models/decode/megakernel/token_columns.cuh"
#include "ingot/models/decode/phased/choose.cuh"

namespace ingot::decode {

constexpr uint32_t kChosenBarrier = 1;      // between the copying warp, who chooses, and those that multiply
using LogitSum = megakernel::FixedSum<20>;  // of all blocks

class TokenRouter : public TokenBlock {
 public:
  // What the router takes of a row of the residual stream, times its norm's weight; a band a slot.
  __device__ __forceinline__ void put_normed(uint32_t slot, uint32_t row, float value) const {
    const bf16 high(value), low(value - float(high));
    m_.normed[0][slot][row] = high.bits, m_.normed[1][slot][row] = low.bits;
  }
  // Brings the router's columns of `bands` bands of the residual stream, until add_logits().
  __device__ __forceinline__ void ask_router(const LayerStages& l, uint32_t band, uint32_t bands) const {
    char* const to = asked_steps(l, bands);
    if (to == nullptr) return;
    const Matrix& w = l.router.w;
#pragma unroll 1
    for (uint32_t r = kTokenWarps - 1 - threadIdx.x / 32; r < w.bands; r += kTokenWarps)
#pragma unroll 1
      for (uint32_t i = 0; i < bands; ++i)
        ptx::cp_async<16>(ptx::shared_address(to + (i * w.bands + r) * kStepBytes), router_step(w, r, band + i));
    ptx::cp_async_commit_group();
  }
  // Of m_.normed, to all logits. Each lane reads what it has asked for itself.
  __device__ __forceinline__ void add_logits(const LayerStages& l, uint32_t band, uint32_t bands,
                                             uint32_t count) const {
    const Matrix& w = l.router.w;
    const char* const asked = asked_steps(l, bands);
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    ptx::cp_async_wait_group<0>();
#pragma unroll 1
    for (uint32_t r = kTokenWarps - 1 - threadIdx.x / 32; r < w.bands; r += kTokenWarps) {
      float sum[4] = {};
#pragma unroll 1
      for (uint32_t i = 0; i < bands; ++i) {
        const uint4 step = asked != nullptr ? *reinterpret_cast<const uint4*>(asked + (i * w.bands + r) * kStepBytes)
                                            : *reinterpret_cast<const uint4*>(router_step(w, r, band + i));
        const uint32_t a[4] = {step.x, step.y, step.z, step.w};
        uint32_t b[2] = {};  // two of the eight columns: a number's first eight bits, and what they leave
        if (g < 2) {
          b[0] = *reinterpret_cast<const uint32_t*>(&m_.normed[g][i][2 * t]);
          b[1] = *reinterpret_cast<const uint32_t*>(&m_.normed[g][i][2 * t + 8]);
        }
        ptx::mma_m16n8k16(bf16{}, sum, a, b);
      }
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        const uint32_t e = 16 * r + g + 8 * h;
        if (t == 0 && e < w.rows) LogitSum::add(logit_sums() + e, sum[2 * h] + sum[2 * h + 1], count);
      }
    }
  }
  // After the output's grid barrier: its sums become the column of gate and up, the logits are laid before the copying
  // warp, who chooses. The last warps, which have least of the column to make, read the logits.
  template <WeightFormat E> __device__ __forceinline__ void route(const LayerStages& l, uint32_t i) const {
    const Router& p = l.router;
    const ChoiceMemory m = choice();
    uint64_t word = 0;
    uint32_t e = kTokenThreads - 1 - threadIdx.x;
    const auto load = [&] {
      if (e < p.w.rows) word = ptx::load_relaxed(logit_sums() + e);
    };
    load();
    columns_.stage_normed<E>(l.gate_up.weight, l.gate_up.w, m_.token.sums.output());
#pragma unroll 1
    while (e < p.w.rows) {
      read_again(load, [&] { return LogitSum::count(word) == m_.token.shares.routers; });
      m.logits[e] = LogitSum::value(word);
      e += kTokenThreads;
      load();
    }
    // By all warps: what each wrote, the next layer's stages too, is the copying warp's to read.
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&m_.routed);
    ptx::barrier_sync_unaligned(kChosenBarrier, kTokenThreads + 32);
    if (threadIdx.x / 32 == kTokenWarps - 1) weigh(m.logits, p.k, m.chosen, m.weights);  // down asks for it
  }
  // By the copying warp, as soon as there is what it needs.
  __device__ __forceinline__ void choose(const Router& p, uint32_t parity) const {
    const ChoiceMemory m = choice();
    float* const logits = m.logits;
    const uint32_t lane = threadIdx.x % 32, rows = p.w.rows, k = p.k;
    constexpr uint32_t kHeld = kLogitsOfLane;
    float bias[kHeld], logit[kHeld] = {};  // biases that are there before
#pragma unroll
    for (uint32_t u = 0; u < kHeld; ++u) bias[u] = lane + 32 * u < rows ? p.bias[lane + 32 * u] : 0;
    megakernel::wait_for_slot(&m_.routed, parity);
#pragma unroll
    for (uint32_t u = 0; u < kHeld; ++u)
      if (lane + 32 * u < rows) logit[u] = logits[lane + 32 * u];
    const float scale = columns_.rstd(p.eps);
#pragma unroll
    for (uint32_t u = 0; u < kHeld; ++u) {
      logit[u] = logit[u] * scale + bias[u];
      if (lane + 32 * u < rows) logits[lane + 32 * u] = logit[u];
    }
#pragma unroll 1
    for (uint32_t e = lane + 32 * kHeld; e < rows; e += 32) logits[e] = logits[e] * scale + p.bias[e];
    __syncwarp();
    choose_held(logits, logit, rows, k, m.chosen);
    ptx::barrier_arrive(kChosenBarrier, kTokenThreads + 32);
  }

 private:
  // A band's 16 rows are the columns of one step of the router's weight tiles.
  static constexpr uint32_t kStepBytes = 512;
  __device__ __forceinline__ static const uint8_t* router_step(const Matrix& w, uint32_t router_band, uint32_t band) {
    return w.data + router_band * w.band_bytes + band / 4 * weight_tiles::Form<WeightFormat::bf16>::kBytes +
           band % 4 * kStepBytes + threadIdx.x % 32 * 16;
  }
  // This lane's part of the steps that were asked for, behind the output's column; null where they have no room there.
  __device__ __forceinline__ char* asked_steps(const LayerStages& l, uint32_t held) const {
    const uint32_t column = (weight_tiles::column_stride(l.output.w.cols) + 127) / 128 * 128;
    if (m_.token.stage + column + held * l.router.w.bands * kStepBytes > m_.token.ring) return nullptr;
    return stage() + column + threadIdx.x % 32 * 16;
  }

  const TokenColumns columns_;
};

}  // namespace ingot::decode
