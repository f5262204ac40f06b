#pragma once
// The description of a decoder-only transformer. Every path of the decode engine reads this struct; a kind of model
// fills it from its own configuration (models/gpt_oss/spec.cpp is an example).
//   x = embed[token] * embedding_scale
//   each layer:  x += post(Wo attention(rope(qk_norm(Wqkv norm(x) + b))) + bo)
//                x += post(mlp(norm(x)))
//   logits = softcap(head norm(x))
// A path that cannot compute a field's value refuses the model and names the field: unsupported_reason().
#include <cstdint>
#include <string>
#include <vector>

#include "ingot/kernels/rope/rope.h"
#include "ingot/kernels/swiglu/swiglu.h"

namespace ingot {

// Rotary angles, shared by layers with the same table.
struct RopeTable {
  double theta = 10000;
  RopeScaling scaling;
  bool interleaved = false;  // pairs (2j, 2j + 1); else (j, j + dim / 2)
  int64_t dim = 0;           // the number of a head's dimensions, from the first on, that are rotated; 0: all
  // The angle of each pair is divided by its number here, as GGUF files state the scaling of Llama 3. Empty: by none.
  std::vector<double> divisors;
};

struct LayerSpec {
  int64_t window = 0;   // visible keys of a query, its own included; 0: all earlier keys
  int rope = 0;         // index into DecoderSpec::rope; -1: no rotation of queries and keys
  bool experts = true;  // a mixture of experts; else a dense MLP
};

struct NormSpec {
  double eps = 1e-5;
  bool unit_offset = false;  // multiplies by 1 + w
  // States when the reference with 16-bit activations rounds the normalised row: before the product with w, or after
  // it. Ingot does not follow this field: the CPU path does not round, and the GPU paths round the product of row and w
  // once.
  bool rounds_before_weight = false;
  bool post = false;  // the outputs of attention and MLP have norms before their addition
};

struct DecoderSpec {
  int64_t vocab = 0, hidden = 0, layers = 0;
  int64_t heads = 0, kv_heads = 0, head_dim = 0;  // hidden need not be heads * head_dim
  int64_t intermediate = 0;                       // hidden width of the dense MLP, or of an expert
  int64_t experts = 0, experts_per_token = 0;
  // The weights of a token's experts are the softmax of their logits alone; else of all experts' logits.
  bool renormalise = true;
  std::vector<LayerSpec> layer;  // `layers` of them
  std::vector<RopeTable> rope;
  NormSpec norm;
  bool qk_norm = false;  // heads of queries and keys are normalised with a weight (head_dim), before the rotation
  bool qkv_bias = false, output_bias = false, mlp_bias = false;  // mlp_bias: of router, gate, up and down
  bool sinks = false;                                            // a logit per head in the softmax
  double attention_scale = 0;                                    // 0: 1 / sqrt(head_dim)
  double attention_softcap = 0, logit_softcap = 0;               // 0: none
  GateOptions gate;                                              // SwiGLU; gelu_gate(); clamped_gate()
  double embedding_scale = 1;
  bool tied_embeddings = false;  // the head is the embedding
  int64_t context = 0;           // the longest sequence
  int64_t start_token = -1;      // begins every sequence; -1: none does
  std::vector<int64_t> end_tokens;
  // Not a property of a model: DecoderOptions::e4m3_experts.
  bool e4m3_inputs = false;

  int64_t q_width() const { return heads * head_dim; }
  int64_t kv_width() const { return kv_heads * head_dim; }
  int64_t qkv_width() const { return q_width() + 2 * kv_width(); }
  int64_t longest_window() const;  // of all layers; 0: no layer has a window
  // The visible keys before a query's own in a layer with a window.
  int64_t window_reach() const { return longest_window() > 0 ? longest_window() - 1 : 0; }
  double scale_of_attention() const;
};
// The angles per position of a table in heads of this spec.
RopeFrequencies frequencies_of(const DecoderSpec& spec, const RopeTable& table);
// GPT-OSS's gate: gate' sigmoid(alpha gate') (up' + 1), gate' and up' clamped at `limit`.
inline GateOptions clamped_gate(double limit, double alpha) { return {.limit = limit, .alpha = alpha, .up_offset = 1}; }
// All fields as JSON with two spaces of indent, and back. Error{bad_data} for an unknown key.
std::string to_json(const DecoderSpec& spec);
DecoderSpec spec_from_json(const std::string& text, const std::string& where);
// Checks the ranges of all sizes, and that sizes divide where required; `where` begins the messages.
void check(const DecoderSpec& spec, const std::string& where);

// Ways to compute a model.
enum class DecodePath {
  cpu,                // all in fp32
  phased,             // a launch for each phase of a layer
  small_batch,        // a pass over the weights for up to 16 tokens
  prompt,             // many tokens of a prompt by matrix kernels
  megakernel,         // a persistent kernel per token, for GPT-OSS
  prefilter,          // the head of the megakernel, after a first pass over its rows in 8 bits
  family_megakernel,  // a persistent kernel per token, for the families: SwiGLU in dense MLPs or in experts
};
const char* name_of(DecodePath path);
// The first property of the model unsupported by a path, in a line; empty where the path computes all. Each path checks
// its own limits on sizes.
std::string unsupported_reason(const DecoderSpec& spec, DecodePath path);
// The megakernel that could compute the model's tokens: `megakernel` where the first layer has experts with GPT-OSS's
// gate, else family_megakernel.
DecodePath megakernel_path(const DecoderSpec& spec);

}  // namespace ingot
