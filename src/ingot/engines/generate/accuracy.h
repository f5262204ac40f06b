#pragma once
// How far one model is from another, token by token, both told the same text. p are the reference's probabilities, q
// the other's; ranks are by logits, the lower id first among equals.
#include <functional>
#include <vector>

#include "ingot/models/decoder.h"

namespace ingot {

struct Accuracy {
  int64_t tokens = 0;                   // positions compared
  double loss = 0, reference_loss = 0;  // of the text's next token, natural logarithm
  double top1 = 0;                      // share of positions where both have the same likeliest token
  double confident_top1 = 0;            // the same where the reference gives its own at least kConfident
  int64_t confident = 0;                // how many those are
  double top5 = 0, top10 = 0;           // share of the reference's 5 or 10 likeliest that are among the other's
  double kl = 0;                        // mean of sum p log(p / q)
  double cosine = 0;                    // mean of the logits' cosine
  double mean_rank = 0;                 // of the reference's likeliest token in the other's logits; 1 is best
};
constexpr double kConfident = 0.9;

class AccuracyMeter {
 public:
  // Logits of one position under both models, and the token that follows there.
  void add(const float* reference, const float* other, int64_t vocab, int32_t next);
  Accuracy result() const;

 private:
  Accuracy sum_;
  int64_t confident_same_ = 0;
};

// Over every token after the first of each list. Takes a slot of each for the time of a list.
Accuracy compare_models(Decoder& reference, Decoder& other, const std::vector<std::vector<int32_t>>& lists,
                        const std::function<bool()>& cancelled = {});

}  // namespace ingot
