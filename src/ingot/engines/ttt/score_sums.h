#pragma once
// The scores of adapted documents: sums of the losses of all chunks, over all ranks, and the reports to listeners.
#include <cstdint>
#include <span>
#include <vector>

#include "ingot/core/clock.h"
#include "ingot/engines/ttt/adaptation.h"

namespace ingot::adaptation {

// A completed chunk and its optimizer step; both are reported while the next chunk runs.
struct SubmittedChunk {
  int64_t chunk, updates;  // updates: optimizer steps before this chunk
  std::span<const DocumentSpan> spans;
  bool learnt;
  size_t losses;
};

// The sums of the losses of all chunks, and the reports to listeners.
class ScoreSums {
 public:
  ScoreSums(Adaptation& adaptation, const Tokenizer& tokenizer, const TokenSource& source, const AdaptationOptions& o);

  // Counts the targets before a batch as done, although other ranks may still adapt to some of them.
  void count_as_done(std::span<const DocumentSpan> before);
  void updated(int64_t documents) { total_.updates += documents; }
  void report(const std::vector<SubmittedChunk>& runs);
  // The result over all ranks. Call after the last report.
  AdaptedScore total();
  const std::vector<DocumentScore>& scores() const { return scores_; }

 private:
  // Adds the losses of a chunk's targets.
  void add(const SubmittedChunk& run);
  // Computes AdaptedScore::whole_seconds.
  void time(const std::vector<SubmittedChunk>& runs);
  void log_updates(const SubmittedChunk& run) const;

  Adaptation& adaptation_;
  const Tokenizer& tokenizer_;
  const TokenSource& source_;
  const AdaptationOptions& options_;
  std::vector<DocumentScore> scores_;
  AdaptedScore total_;          // without the sums in scores_
  int64_t done_ = 0, all_ = 0;  // targets
  Clock::time_point last_;
  size_t whole_before_ = 0;  // documents of the previous step if all its windows were whole, else 0
};

}  // namespace ingot::adaptation
