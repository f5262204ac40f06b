#pragma once
// The difference between a model and a reference on the same text, token by token. p are the probabilities of the
// reference, q the probabilities of the model; ranks are by logits, the lower id first among equal logits.
#include <functional>
#include <vector>

#include "ingot/models/decoder.h"

namespace ingot {

struct Accuracy {
  int64_t tokens = 0;                   // positions compared
  double loss = 0, reference_loss = 0;  // mean of -log(probability) of the text's next token
  double top1 = 0;                      // share of positions where both have the same likeliest token
  double confident_top1 = 0;   // the same over positions where the reference's likeliest token has at least kConfident
  int64_t confident = 0;       // number of confident positions
  double top5 = 0, top10 = 0;  // share of the reference's 5 or 10 likeliest tokens among the model's likeliest 5 or 10
  double kl = 0;               // mean of sum p log(p / q)
  double cosine = 0;           // mean of the logits' cosine
  double mean_rank = 0;        // rank of the reference's likeliest token in the model's logits; 1 is best
};
constexpr double kConfident = 0.9;

class AccuracyMeter {
 public:
  // The logits of a position under both models, and the next token.
  void add(const float* reference, const float* other, int64_t vocab, int32_t next);
  Accuracy result() const;

 private:
  Accuracy sum_;
  int64_t confident_same_ = 0;
};

// Compares over every token after the first of each list. Uses a slot of each decoder while a list is compared.
Accuracy compare_models(Decoder& reference, Decoder& other, const std::vector<std::vector<int32_t>>& lists,
                        const std::function<bool()>& cancelled = {});

}  // namespace ingot
