#pragma once
// A token by one persistent kernel.
#include "ingot/megakernel/grid_barrier.h"
#include "ingot/megakernel/weight_stream.h"
#include "ingot/models/decode/megakernel/stage_table.h"
#include "ingot/models/decode/phased/stages.h"

namespace ingot::decode {

// What the stages of a layer are told.
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
  uint32_t router_blocks;              // blocks that have rows of the output's, and so a part of the router's logits
};
// What blocks hand to all others in words that are zero until they are there, and zeros again between their uses: sums
// (megakernel/sums.cuh), and the columns of `down`, two numbers of 16 bits a word, all of whose bits are turned round.
// Layers of all tokens take turns with what is still read when the next layer begins:
//   down of odd turns, qkv of even ones | output, router's logits, columns | qkv of odd turns, down of even ones
struct TokenSums {
  uint64_t* words;
  int64_t x_stride, qkv_width, middle;  // words of down and output, qkv, of all between the bars
  int64_t logits, columns;              // where they begin behind the output's

  static TokenSums at(uint64_t* words, int64_t qkv_width, int64_t x_stride, int64_t experts, int64_t column_bytes) {
    const auto even = [](int64_t n) { return (n + 1) / 2 * 2; };
    return {words,           x_stride,
            even(qkv_width), x_stride + even(experts) + column_bytes / 8,
            x_stride,        x_stride + even(experts)};
  }
  INGOT_HD int64_t all() const { return 2 * (x_stride + qkv_width) + middle; }
  INGOT_HD uint64_t* output() const { return words + x_stride + qkv_width; }
  INGOT_HD uint64_t* qkv(uint32_t turn) const { return turn % 2 == 0 ? words + x_stride : output() + middle; }
  INGOT_HD uint64_t* down(uint32_t turn) const { return turn % 2 == 0 ? output() + middle + qkv_width : words; }
  // What becomes zeros in a turn's attention, a side and the middle: the qkv of the turn before, the down of the one
  // before that, and what lies between the bars of the turn before, which by then all blocks have read.
  INGOT_HD uint64_t* used(uint32_t turn) const { return turn % 2 == 0 ? output() : words; }
  INGOT_HD int64_t used_words() const { return x_stride + qkv_width + middle; }
};
// Of a model; `words`: of Buffers.
TokenSums token_sums_of(const GptOssConfig& config, uint64_t* words);
struct Token {
  Embedding embedding;
  NormProduct head;
  const LayerStages* layers;  // on the device
  const Ranks* ranks;         // on the device, where several GPUs make the token; else null
  token_attention::Published attention;
  uint32_t* stamps;  // that earlier launches have used; one a layer
  TokenSums sums;
  uint32_t count, head_rows;
  uint32_t experts, k;
  uint32_t choice, x, stage, ring, bytes;  // places in dynamic shared memory, and all of it
  megakernel::WeightRing stream;
  BlockWork work;
  megakernel::Grid grid;
};

// A head's rows in 8 bits, which the kernel reads in place of Token::head's matrix (screen.h), and that matrix, of
// whose rows it reads those that may be the largest.
struct ScreenedHead {
  Matrix head;
  const ScreenRow* rows;
  uint64_t* lower_bounds;  // of Buffers
};

constexpr uint32_t kTokenHeadDim = 64;  // wider heads would leave a thread too few registers

// Grid barriers of a token, in order: of each layer one after each stage.
constexpr uint32_t kGridBarriersPerLayer = 5;
// And after the layers, of a screened head, what each block knows of the largest logit.
// After the output's, or down's.
INGOT_HD constexpr uint32_t grid_barrier_of(uint32_t layer, bool down) {
  return kGridBarriersPerLayer * layer + (down ? 4 : 2);
}
// Behind a block's times: the bytes of weights it reads in each stage of a layer, and for the head.
constexpr uint32_t kTracedBytes = kGridBarriersPerLayer + 1;
// Behind those, of a layer's two exchanges over several GPUs: when this block had sent its part, when it had all.
constexpr uint32_t kExchangeStamps = 4;

// One variant of the token kernel. Each is an instance of its own (room.cmake), because code that is not run costs the
// other variants room in the instruction cache.
struct TokenVariant {
  WeightFormat dense, experts;  // the formats of attention and head, and of the experts
  bool traced = false;          // the kernel keeps Grid::trace; experts in MXFP4
  bool ranks = false;           // one GPU of several (Token::ranks); experts in MXFP4
  // The head's logits that may be the largest are those of the whole head bit for bit, and so is the likeliest id; in
  // place of each other logit the kernel leaves its upper bound. `token.head.w` is the codes, and over several GPUs
  // `token.head.y` is this GPU's own memory. Dense matrices in bf16, experts in MXFP4.
  bool screened = false;

  bool operator==(const TokenVariant&) const = default;
};
template <TokenVariant V> struct Megakernel {
  // `layer`: any of the layers, for its sizes and formats. `head`: of a screened variant.
  static void launch(const Token& token, const ScreenedHead& head, const LayerStages& layer, int64_t blocks,
                     Stream stream);
};

}  // namespace ingot::decode
