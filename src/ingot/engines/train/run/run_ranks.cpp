#include "ingot/engines/train/run/run_ranks.h"

#include <utility>

#include "ingot/core/check.h"
#include "ingot/core/cpu/cpu.h"
#include "ingot/core/version.h"
#include "ingot/engines/train/optimizer/shards.h"

namespace ingot {

void RunRanks::meet(const RunConfig& config, const RunData& data, Device device) const {
  if (ranks_ == nullptr) return;
  if (config.train.accumulation % world() != 0)
    fail(ErrorCode::usage, "train.accumulation: found ", config.train.accumulation,
         " passes per step, expected a multiple of ", world(), ", the number of ranks that share them");
  const std::pair<const char*, std::string> same[] = {{"configuration", to_json(config)},
                                                      {"training data", data.train->fingerprint()},
                                                      {"held-out data", data.held_out->fingerprint()},
                                                      {"tokenizer", std::to_string(data.tokenizer->hash())},
                                                      {"version", std::string(version()) + " " + commit()},
                                                      {"device", device.kind == Device::cuda ? "gpu" : "cpu"},
                                                      {"CPU level", name_of(cpu_level())}};
  ranks_->barrier(kLoadSeconds);
  for (const auto& [what, text] : same) {
    std::string bytes = text;
    check_same(hash_of_bits(Tensor(bytes.data(), DType::u8, {int64_t(bytes.size())})), [&](int64_t r) {
      fail(ErrorCode::usage, "rank ", r, ": found another ", what, " than rank 0's, expected the same on every rank");
    });
  }
}

void RunRanks::check_same(uint64_t mine, const std::function<void(int64_t)>& refuse) const {
  const std::vector<uint64_t> all = gather(mine);
  for (size_t r = 1; r < all.size(); ++r)
    if (all[r] != all[0]) refuse(int64_t(r));
}

bool RunRanks::anyone(bool mine) const {
  const std::vector<char> all = gather<char>(mine);
  return std::any_of(all.begin(), all.end(), [](char c) { return c != 0; });
}

}  // namespace ingot
