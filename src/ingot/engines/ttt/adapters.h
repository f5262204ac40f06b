#pragma once
// Low-rank adapters of several documents, and their optimizer. All documents begin with the same adapters, and each
// document's adapters learn from this document.
#include <vector>

#include "ingot/core/memory/arena.h"
#include "ingot/models/gpt/adapters/adapters.h"

namespace ingot {

struct AdapterOptions {
  int64_t rank = 96;
  uint64_t seed = 1;                                                 // A is uniform in +-1 / sqrt(in), B zero
  double lr = 1e-4, beta2 = 0.999, eps = 1e-10, weight_decay = 0.5;  // AdamW with a beta1 of 0
};
void check(const AdapterOptions& o);

class DocumentAdapters {
 public:
  DocumentAdapters(const GptConfig& config, const LayerProgram& program, const AdapterOptions& options, GptTypes types,
                   int64_t documents, Device device, Stream stream);
  static int64_t bytes(const GptConfig& config, const LayerProgram& program, const AdapterOptions& options,
                       GptTypes types, int64_t documents);

  // Resets the adapters of the first documents, or of all documents, to their initial values.
  void reset(int64_t count = -1);
  // The adapters of documents [first, first + count) as a model's argument: segment s reads document first + s.
  GptAdapters values(int64_t first, int64_t count) const;
  // The gradients of the first documents, which a backward pass writes.
  GptAdapters gradients(int64_t count) const;
  // One optimizer step of the first documents, all of which have had the same number of steps.
  void step(int64_t count);
  int64_t updates() const { return updates_; }  // since reset()

  int64_t numbers() const { return layout_.numbers(); }  // numbers of one document
  // A document's adapters in host memory; the tensors live as long as the result.
  struct Saved {
    std::vector<float> memory;
    std::vector<NamedTensor> tensors;
  };
  Saved saved(int64_t document) const;
  // Sets the initial adapters of every document from a file of saved().
  void begin_from(const SafetensorsFile& file);

 private:
  AdapterOptions options_;
  GptTypes types_;
  Stream stream_;
  AdapterLayout layout_;
  int64_t documents_, updates_ = 0;
  void bring_beginning();
  Arena host_memory_, memory_;
  Tensor begin_, device_begin_;  // (numbers), in host memory and, on a GPU, also on the device
  // (documents, numbers); compute_ where products read a different type
  Tensor values_, compute_, gradients_, squares_;
};

}  // namespace ingot
