#pragma once
// A model as generation sees it: one sequence of tokens with its keys and values, which grows and can be cut back.
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "ingot/models/gpt/gpt.h"
#include "ingot/models/gpt_oss/gpt_oss.h"

namespace ingot {

class Decoder {
 public:
  enum class Rows { last, all };
  // The logits (n, V) f32 or f64 of n tokens, the first of them at `position` of the sequence; valid during the call.
  using Take = std::function<void(int64_t position, const Tensor& logits)>;

  virtual ~Decoder() = default;
  virtual int64_t vocab() const = 0;
  virtual int64_t context() const = 0;  // most tokens of the sequence
  virtual int64_t batch() const = 0;    // most tokens of one extend()
  virtual int64_t length() const = 0;
  // Appends 1 to batch() tokens. `take` gets the last one's logits, or those of all in order, in one or more calls.
  virtual void extend(std::span<const int32_t> ids, Rows rows, const Take& take) = 0;
  // Forgets the tokens after the first `length`, and more where it must. Returns how many are left.
  virtual int64_t rewind(int64_t length) = 0;
  // Says that the sequence may be cut back to its present length later.
  virtual void mark() {}
};

// The loss of every token after the first, natural logarithm. Starts an empty sequence.
std::vector<double> sequence_losses(Decoder& decoder, std::span<const int32_t> ids,
                                    const std::function<bool()>& cancelled = {});

// A model of `ingot train`. The weights must outlive the decoder.
std::unique_ptr<Decoder> make_decoder(const GptConfig& config, const Tensor& weights, bool looping, Products products);

struct GptOssDecoderOptions {
  int64_t context = 0;  // 0: the model's
  int64_t batch = 512;  // tokens of a prompt at a time
};
// Memory beside the weights.
int64_t decoder_bytes(const GptOssConfig& config, int64_t layers, const GptOssDecoderOptions& options);
std::unique_ptr<Decoder> make_decoder(const GptOssConfig& config, const GptOssWeights& weights,
                                      const GptOssDecoderOptions& options);

}  // namespace ingot
