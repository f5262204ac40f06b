#pragma once
// Loss and bits per byte of held-out tokens.
#include <memory>
#include <vector>

#include "ingot/core/comm/communicator.h"
#include "ingot/data/evaluation.h"
#include "ingot/models/gpt/gpt.h"
#include "ingot/text/tokenizer.h"

namespace ingot {

struct Score {
  double loss = 0;           // mean over targets, natural logarithm
  double bits_per_byte = 0;  // 0 when the targets stand for no bytes
  int64_t targets = 0, bytes = 0;
  double seconds = 0;
};
// The sums of a document; documents are in the order of the source.
struct DocumentScore {
  double loss_sum = 0;
  int64_t targets = 0, bytes = 0;
};
// The score of one or several documents from their sums, without its seconds.
Score mean_score(const DocumentScore& sums);

struct ScoreOptions {
  int64_t batch_tokens = 4096;
  int64_t context = 0;  // longest segment; 0: the model's context
  int64_t stride = 0;   // 0: segments do not overlap; else the sliding evaluation (2048 / 64 in parameter-golf)
  bool flat = false;    // cut every batch_tokens tokens, also inside documents
  bool looping = false;
  Products products = Products::fp32;
  Stream stream;  // of the weights' device
  Communicator* ranks =
      nullptr;  // each rank scores a part, and all ranks get the same result; not together with `documents`
};

// A sum of losses other than a finite number is an Error of code numeric. `documents`, when given, receives one entry
// per document of the source.
Score score(const GptConfig& config, const GptWeights& weights, const Tokenizer& tokenizer,
            std::shared_ptr<const TokenSource> source, const ScoreOptions& options,
            std::vector<DocumentScore>* documents = nullptr);

}  // namespace ingot
