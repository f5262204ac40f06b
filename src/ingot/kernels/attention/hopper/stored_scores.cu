// The kernels that prepare the memory of dS (score_panels.h).
#include "ingot/gpu/ptx/thread.cuh"
#include "ingot/kernels/attention/hopper/stored_scores.cuh"

namespace ingot::cuda::attention_hopper {

namespace {

// Writes StoredScores::first. Panels are numbered by the segment's queries (panel n has queries 8 n to 8 n + 7), and a
// tile of keys stores only the panels of panels_of(): first[place] + n is the index of panel n of the tile at `place`.
// first[places] is the number of panels of a head. `room` is the number of panels of a head that fit into the memory.
__global__ void __launch_bounds__(kPlaceThreads) attention_score_places(const Walk w, int32_t* first, int64_t room) {
  __shared__ int64_t sums[kPlaceThreads];
  const int64_t each = (w.places + kPlaceThreads - 1) / kPlaceThreads;
  const int64_t begin = min(w.places, each * threadIdx.x), end = min(w.places, begin + each);
  const auto panels_at = [&](int64_t place) {
    const detail::TilePlace at = detail::tile_place(w.cu_k, w.segments, kScoreKeys, place);
    return panels_of(at.first, w.cu_q[at.segment + 1] - w.cu_q[at.segment], w.cu_k[at.segment + 1] - w.cu_k[at.segment],
                     w.causal, w.window);
  };
  int64_t sum = 0;
  for (int64_t place = begin; place < end; ++place) {
    const PanelRange r = panels_at(place);
    sum += r.end - r.begin;
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  int64_t before = 0;
  for (int i = 0; i < int(threadIdx.x); ++i) before += sums[i];
  for (int64_t place = begin; place < end; ++place) {
    const PanelRange r = panels_at(place);
    first[place] = int32_t(before - r.begin);
    before += r.end - r.begin;
  }
  if (before > room) ptx::trap();  // the segments differ in length, contrary to AttentionBackward::regular
  if (threadIdx.x == kPlaceThreads - 1) first[w.places] = int32_t(before);
}

// Zeros where no step computes dS: steps invisible to 64 of the keys, and the margins up to multiples of 128 queries. A
// block for each place of a tile of keys and each query head.
__global__ void __launch_bounds__(kZeroThreads) attention_zero_scores(const Walk w, const StoredScores s) {
  const int heads = w.heads * w.group, head = int(blockIdx.x % uint32_t(heads));
  const int64_t place = blockIdx.x / uint32_t(heads);
  const detail::TilePlace at = detail::tile_place(w.cu_k, w.segments, kScoreKeys, place);
  const int queries = w.cu_q[at.segment + 1] - w.cu_q[at.segment], keys = w.cu_k[at.segment + 1] - w.cu_k[at.segment];
  const PanelRange all = panels_of(at.first, queries, keys, w.causal, w.window);
  char* const panels = s.panels + (int64_t(head) * s.first[w.places] + s.first[place]) * kPanelBytes;
  constexpr int kStepPanels = kScoreStep / 8;
  for (int half = 0; half < 2; ++half) {
    const detail::StepRange seeing =
        detail::steps_seeing(at.first + 64 * half, queries, keys, w.causal, w.window, kScoreStep,
                             all.begin / kStepPanels, (all.end + kStepPanels - 1) / kStepPanels);
    const auto zero = [&](int begin, int end) {
      for (int n = begin + int(threadIdx.x) / 64; n < end; n += 2)
        *reinterpret_cast<uint4*>(panels + n * kPanelBytes + half * 1024 + threadIdx.x % 64 * 16) =
            make_uint4(0, 0, 0, 0);
    };
    zero(all.begin, seeing.begin * kStepPanels);
    zero(seeing.end * kStepPanels, all.end);
  }
}

}  // namespace

ScoreKernels score_kernels() { return {attention_score_places, attention_zero_scores}; }

}  // namespace ingot::cuda::attention_hopper
