#pragma once
// A whole token by one persistent kernel (megakernel.cuh), and the arguments that it takes.
#include "ingot/megakernel/grid_barrier.h"
#include "ingot/megakernel/weight_stream.h"
#include "ingot/models/decode/megakernel/stage_table.h"
#include "ingot/models/decode/phased/stages.h"

namespace ingot::decode {

// The arguments of a layer's stages.
struct LayerStages {
  NormProduct qkv;
  decode_attention::Params attention;
  ResidualProduct output;
  Router router;
  GateUp gate_up;
  Down down;
};
inline LayerStages stages_of(const Plan& s, const Layer& l, uint32_t index) {
  return {qkv_of(s, l),           attention_of(s, l),      output_of(s, l),
          router_of(s, l, index), gate_up_of(s, l, index), down_of(s, l, index)};
}

// How many weight tiles of each product a block multiplies.
struct BlockWork {
  uint32_t weight_tiles[kStageCount];  // 0: a stage without weights
  uint32_t router_blocks;              // blocks with rows of the output, which add a part of the router's logits
};
// The words that blocks hand to all other blocks. A word is zero until its value is complete, and becomes zero again
// between two uses: sums (megakernel/sums.cuh), and the activation vectors of `down`, two 16-bit numbers a word with
// all bits inverted. The layers of all tokens take turns, because some words are still read when the next layer begins:
//    down of odd turns, qkv of even ones | output, logits, vectors | qkv of odd turns, down of even ones
struct TokenSums {
  uint64_t* words;
  int64_t x_stride, qkv_width, middle;  // words of down and output, of qkv, and of all between the bars
  int64_t logits, vectors;              // where they begin, behind the output's sums

  static TokenSums at(uint64_t* words, int64_t qkv_width, int64_t x_stride, int64_t experts, int64_t vector_bytes) {
    const auto even = [](int64_t n) { return (n + 1) / 2 * 2; };
    return {words,           x_stride,
            even(qkv_width), x_stride + even(experts) + vector_bytes / 8,
            x_stride,        x_stride + even(experts)};
  }
  INGOT_HD int64_t all() const { return 2 * (x_stride + qkv_width) + middle; }
  INGOT_HD uint64_t* output() const { return words + x_stride + qkv_width; }
  INGOT_HD uint64_t* qkv(uint32_t turn) const { return turn % 2 == 0 ? words + x_stride : output() + middle; }
  INGOT_HD uint64_t* down(uint32_t turn) const { return turn % 2 == 0 ? output() + middle + qkv_width : words; }
  // The words that become zeros during a turn's attention: qkv of the turn before, down of the turn before that, and
  // the words between the bars of the turn before. All blocks have read them by then.
  INGOT_HD uint64_t* used(uint32_t turn) const { return turn % 2 == 0 ? output() : words; }
  INGOT_HD int64_t used_words() const { return x_stride + qkv_width + middle; }
};
// For a model; `words`: of Buffers.
TokenSums token_sums_of(const DecoderSpec& config, uint64_t* words);
struct Token {
  Embedding embedding;
  NormProduct head;
  const LayerStages* layers;  // device memory
  const Ranks* ranks;         // device memory, where several GPUs compute the token; else null
  token_attention::Published attention;
  uint32_t* last_epoch;  // of earlier launches; each layer takes one epoch
  TokenSums sums;
  uint32_t count, head_rows;
  uint32_t experts, k;
  uint32_t choice, x, stage, ring, bytes;  // offsets in dynamic shared memory, and its bytes
  megakernel::WeightRing stream;
  BlockWork work;
  megakernel::Grid grid;
};

// The head's rows in 8 bits, which the kernel reads in place of Token::head's matrix (int8_prefilter.h), and the bf16
// matrix. Of the bf16 matrix the kernel reads only the rows that the codes cannot rule out as the largest logit.
struct PrefilteredHead {
  Matrix head;
  const PrefilterRow* rows;
  float* noise;            // of each row, where the token is sampled with noise: this GPU's own memory
  uint64_t* lower_bounds;  // of Buffers
};

constexpr uint32_t kTokenHeadDim = 64;  // wider heads would leave a thread too few registers

// The grid barriers of a token, in order: one after each stage of each layer.
constexpr uint32_t kGridBarriersPerLayer = 5;
// The barrier after a layer's output or down. The number after the last layer's stands for the exchange of lower bounds
// in a prefiltered head.
INGOT_HD constexpr uint32_t grid_barrier_of(uint32_t layer, bool down) {
  return kGridBarriersPerLayer * layer + (down ? 4 : 2);
}
// The words behind a block's times: the bytes of weights that it reads in each stage of a layer, and for the head.
constexpr uint32_t kTracedBytes = kGridBarriersPerLayer + 1;
// And behind these, for the two exchanges of a layer over several GPUs: the times at which this block had sent its
// part, and had received all parts.
constexpr uint32_t kExchangeStamps = 4;

// One variant of the token kernel. Each variant is an instance of its own (room.cmake), because code that does not run
// still takes room in the instruction cache.
struct TokenVariant {
  WeightFormat dense, experts;  // the formats of attention and head, and of the experts
  bool traced = false;          // records Grid::trace; needs MXFP4 experts
  bool ranks = false;           // one GPU of several (Token::ranks); needs MXFP4 experts
  // The int8 prefilter of the head. The logits that may be the largest are those of the whole head bit for bit, and so
  // is the greedy token; in place of any other logit the kernel leaves its upper bound. `token.head.w` is the codes,
  // and over several GPUs `token.head.y` is this GPU's own memory. Needs dense matrices in bf16 and MXFP4 experts.
  bool prefiltered = false;

  bool operator==(const TokenVariant&) const = default;
};
template <TokenVariant V> struct Megakernel {
  // `layer`: any layer of the model, for its sizes and formats. `head`: for a prefiltered variant.
  static void launch(const Token& token, const PrefilteredHead& head, const LayerStages& layer, int64_t blocks,
                     Stream stream);
};

}  // namespace ingot::decode
