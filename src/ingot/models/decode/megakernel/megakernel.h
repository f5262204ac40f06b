#pragma once
// The arguments of the persistent kernel that computes a whole token (megakernel.cuh).
#include <type_traits>

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

// The same for a layer with a dense MLP, which has no router, and whose heads may have norms.
struct DenseLayerStages {
  NormProduct qkv;
  decode_attention::Params attention;
  ResidualProduct output;
  GateUp gate_up;  // without biases `bias` is null
  Down down;
  const float *q_norm, *k_norm;  // (head_dim); null: heads are not normalized
};

inline DenseLayerStages dense_stages_of(const Plan& s, const Layer& l) {
  return {qkv_of(s, l), attention_of(s, l), output_of(s, l), gate_up_of(s, l, 0), down_of(s, l, 0), l.q_norm, l.k_norm};
}

// The same for a layer with experts of a family. Without biases `bias` of gate and up is null.
struct MixtureLayerStages : LayerStages {
  const float *q_norm, *k_norm;  // as in DenseLayerStages
};

inline MixtureLayerStages mixture_stages_of(const Plan& s, const Layer& l, uint32_t index) {
  return {stages_of(s, l, index), l.q_norm, l.k_norm};
}

// The number of weight tiles that a block multiplies in each product.
struct BlockWork {
  uint32_t weight_tiles[kStageCount];  // 0 for a stage without weights
  uint32_t router_blocks;              // blocks with rows of the output, which add a part of the router's logits
};
// The words through which blocks exchange results. A word is zero until its value is complete, and is reset to zero
// between two uses. The words are sums (megakernel/sums.cuh), and activation vectors of `down`, two 16-bit numbers a
// word with all bits inverted. A turn is the number of a layer, counted over the layers of all tokens. Even and odd
// turns use different words, because some words are still being read when the next layer begins:
//    down of odd turns, qkv of even ones | output, logits, vectors | qkv of odd turns, down of even ones
struct TokenSums {
  uint64_t* words;
  int64_t x_stride, qkv_width, middle;  // words of down and output; words of qkv; words between the two bars above
  int64_t logits, vectors;              // offsets of the logits and vectors behind the output's sums

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
  // The words to reset during a turn's attention: qkv of the preceding turn, down of the turn before that, and the
  // words between the bars of the preceding turn. All blocks have read these words by then.
  INGOT_HD uint64_t* used(uint32_t turn) const { return turn % 2 == 0 ? output() : words; }
  INGOT_HD int64_t used_words() const { return x_stride + qkv_width + middle; }
};
// The words of a model; `words` is the field of Buffers.
TokenSums token_sums_of(const DecoderSpec& config, uint64_t* words);
struct Token {
  Embedding embedding;
  NormProduct head;
  const LayerStages* layers;  // device memory
  const Ranks* ranks;         // device memory, where several GPUs compute the token; else null
  token_attention::Published attention;
  uint32_t* last_epoch;  // the epoch of the last layer of earlier launches; each layer takes one epoch
  TokenSums sums;
  uint32_t count, head_rows;
  uint32_t experts, k;
  uint32_t choice, x, stage, ring, bytes;  // offsets in dynamic shared memory; the bytes of all of it
  megakernel::WeightRing stream;
  BlockWork work;
  megakernel::Grid grid;
};

// A token of a model whose MLPs are dense; `layers` is not used.
struct DenseToken : Token {
  const DenseLayerStages* dense_layers;  // device memory
};
// A token of a family's mixture of experts; `layers` is not used.
struct MixtureToken : Token {
  const MixtureLayerStages* mixture_layers;  // device memory
};
inline INGOT_HD const LayerStages* layers_of(const Token& t) { return t.layers; }
inline INGOT_HD const DenseLayerStages* layers_of(const DenseToken& t) { return t.dense_layers; }
inline INGOT_HD const MixtureLayerStages* layers_of(const MixtureToken& t) { return t.mixture_layers; }

// The head's rows in 8 bits, which the kernel reads in place of Token::head's matrix (int8_prefilter.h), and the bf16
// matrix. The kernel reads only those rows of the bf16 matrix that may have the largest logit according to the 8-bit
// codes.
struct PrefilteredHead {
  Matrix head;
  const PrefilterRow* rows;
  float* noise;            // the noise of each row of a token sampled with noise, in this GPU's own memory
  uint64_t* lower_bounds;  // the field of Buffers
};

constexpr uint32_t kTokenHeadDim = 64;  // of GPT-OSS

// The grid barriers of a token, in order: one after each stage of each layer.
constexpr uint32_t kGridBarriersPerLayer = 5;
// The number of the grid barrier after a layer's output or down. The number that follows the last layer's barriers
// stands for the exchange of lower bounds in a prefiltered head.
INGOT_HD constexpr uint32_t grid_barrier_of(uint32_t layer, bool down) {
  return kGridBarriersPerLayer * layer + (down ? 4 : 2);
}
// Words after a block's times: the bytes of weights that the block reads in each stage of a layer, and for the head.
constexpr uint32_t kTracedBytes = kGridBarriersPerLayer + 1;
// Words after the words of the grid barriers, for the two exchanges of a layer over several GPUs: the times at which
// this block had sent its part, and at which all parts had arrived.
constexpr uint32_t kExchangeStamps = 4;

// One variant of the token kernel. Each variant is a separate instance (room.cmake), because even code that is never
// executed takes space in the instruction cache.
struct TokenVariant {
  WeightFormat dense, experts;  // the formats of attention and head, and of the experts
  bool traced = false;          // records Grid::trace; needs MXFP4 experts, or bf16 with `family`
  bool ranks = false;           // one GPU of several (Token::ranks); needs MXFP4 experts
  // The int8 prefilter of the head. The logits that may be the largest, and the sampled token, equal the whole head's
  // bit for bit; for every other row the kernel writes the upper bound instead of the logit. `token.head.w` holds the
  // codes, and over several GPUs `token.head.y` is this GPU's own memory. Needs dense matrices in bf16, and GPT-OSS's
  // experts in MXFP4.
  bool prefiltered = false;
  // A model of the families (models/families): MLPs or experts with SwiGLU in the format `dense`, equal to `experts`;
  // norms of heads, and rotations that differ by layer. `ranks` is not possible, nor is `traced` with `prefiltered`.
  bool family = false;
  bool dense_mlp = false;             // no layer has experts; only with `family`
  uint32_t head_dim = kTokenHeadDim;  // of the cache's rows; 128 only with `family`, and always with its experts
  // Without the copy engine and without any instruction newer than compute capability 8.0: each multiplying warp copies
  // its own weights (megakernel/warp_ring.cuh).
  // Not with `traced`, `ranks`, `prefiltered` or `family`.
  bool warp_rings = false;

  bool operator==(const TokenVariant&) const = default;
};
template <TokenVariant V>
using LayerOf =
    std::conditional_t<V.dense_mlp, DenseLayerStages, std::conditional_t<V.family, MixtureLayerStages, LayerStages>>;
template <TokenVariant V>
using TokenOf = std::conditional_t<V.dense_mlp, DenseToken, std::conditional_t<V.family, MixtureToken, Token>>;
// The most blocks of a token kernel, and of a block the most dynamic shared memory in bytes. With `exact` the grid has
// exactly these blocks.
struct TokenLimits {
  int64_t blocks, shared_bytes;
  bool exact = false;
};
template <TokenVariant V> struct Megakernel {
  // `layer` is any layer of the model and gives sizes and formats. `head` is read by prefiltered variants only.
  static void launch(const TokenOf<V>& token, const PrefilteredHead& head, const LayerOf<V>& layer,
                     const TokenLimits& limits, Stream stream);
};

}  // namespace ingot::decode
