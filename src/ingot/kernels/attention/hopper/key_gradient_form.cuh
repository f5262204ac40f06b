#pragma once
// The forms of the kernel that walks over keys (key_gradient.cuh), and the shared memory of a block.
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/kernels/attention/hopper/backward.h"
#include "ingot/kernels/attention/hopper/query_sums.cuh"
#include "ingot/kernels/attention/hopper/stored_scores.cuh"
#include "ingot/kernels/attention/hopper/walk.cuh"

namespace ingot::cuda::attention_hopper {

// The kernel that computes dQ: a kernel that computes the scores again (query_gradient.cuh), this kernel by adding to
// sums (query_sums.cuh), or a kernel that reads the stored dS (query_product.cuh).
enum class QueryGradientBy { scores, sums, stored_scores };

// kQueries: queries of a step. kStages: steps in shared memory. kApart: one warpgroup computes dV, the other dK.
template <class T_, int kWidth_, int kQueries_, int kStages_, bool kApart_, bool kCapped_,
          QueryGradientBy kBy = QueryGradientBy::scores>
struct KeyGradientForm {
  using T = T_;
  static constexpr int kGroups = 2;  // multiplying warpgroups
  static constexpr int kWidth = kWidth_, kQueries = kQueries_, kStages = kStages_;
  static constexpr int kPanels = kWidth / 64;
  static_assert(kQueries % 16 == 0, "products sum over 16 queries at a time");
  static constexpr bool kApart = kApart_, kCapped = kCapped_;
  static constexpr bool kAddsQueries = kBy == QueryGradientBy::sums;
  static constexpr bool kStoresScores = kBy == QueryGradientBy::stored_scores;
  // dQ sums over keys, so dS of keys behind the segment's end must be zero.
  static constexpr bool kMasksKeys = kAddsQueries || kStoresScores;
  static constexpr int kKeys = kApart ? 64 : 64 * kGroups, kThreads = 128 * (kGroups + 1);
  static constexpr int kFetcherRegisters = 24, kMultiplierRegisters = 240;
  static_assert(kFetcherRegisters + kGroups * kMultiplierRegisters <= 3 * 168,
                "the three warpgroups start with 168 registers a thread; setmaxnreg would wait forever for more");
  static constexpr uint32_t kPanelK = kKeys * 128, kPanelQ = kQueries * 128;
  static_assert(!kStoresScores || (kKeys == kScoreKeys && kQueries == kScoreStep), "score_panels.h has these sizes");
};

template <class F> struct KeyMemory {
  char k[F::kPanels][F::kPanelK], v[F::kPanels][F::kPanelK];
  char q[F::kStages][F::kPanels][F::kPanelQ], dout[F::kStages][F::kPanels][F::kPanelQ];
  [[no_unique_address]] SharedScores<F> scores;  // empty where dQ is computed by a kernel of its own
  alignas(16) float lse[F::kStages][F::kQueries], delta[F::kStages][F::kQueries];  // lse in powers of two
  uint64_t kv_full, kv_empty, q_full[F::kStages], q_empty[F::kStages];
  uint64_t raw[2];  // counts copies whose last rows must be zeroed
  [[no_unique_address]] SharedScoresBarriers<F> scores_barriers;
  [[no_unique_address]] ScorePlaces<F> score_places;
  KeyTile tile;
};

}  // namespace ingot::cuda::attention_hopper
