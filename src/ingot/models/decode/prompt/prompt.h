#pragma once
// The prompt path: up to kPromptTokens tokens of one sequence at a time through matrix kernels (kernels/grouped,
// kernels/attention), where a step of the other paths takes at most 16. Over several GPUs each GPU has a slice of the
// work (slices.h). The parts of output and down then lie in the memories of the GPUs; the norm that follows reads all
// parts and adds them in the order of the GPUs.
#include <span>

#include "ingot/models/decode/phased/decode.h"

namespace ingot::decode {

// Up to this number of tokens the router's kernel is faster than the few tiles of a product
// (docs/lab/gpt-oss-prompts.md).
constexpr int64_t kMostRouted = 1024;
// the most tokens at a time; the most tokens whose logits are all kept
constexpr int64_t kPromptTokens = 4096, kPromptRows = 256;

struct BatchedSequences;
struct BatchInput;

// Buffers shared by the slots of a model. T is the largest number of tokens, and S = T k.
struct PromptBuffers {
  int32_t* ids;           // (T)
  int32_t *whole, *ends;  // {0, T}; {0, number of rows whose logits are computed}
  // Of steps: {0, T, 2 T}; (T, 2): the rows of the two halves of a sum, {r, T + r} of row r; (T, 2): ones.
  int32_t *halves, *half_rows;
  float* half_weights;
  int32_t *rows, *keys, *sliding;  // for each part: {0, T}, {0, keys of a full layer}, {0, keys of a sliding layer}
  BatchInput* single_tokens;       // the number and the slots of the leading parts of one token
  float* x;                        // (T, x_stride)
  bf16* normed;                    // (T, x_stride)
  float* qkv;                      // (T, qkv_width)
  bf16 *q, *mixed;                 // (T, q_width)
  bf16 *ring_keys, *ring_values;   // (window - 1 + T, kv_width): keys and values of a sliding layer, in order
  float* router;                   // (T, E)
  uint32_t* chosen;                // (layers, S), the best expert of a token first
  float* weights;                  // (S)
  int32_t *place, *offsets;        // (S): row of each choice; (E + 1): first row of each expert
  uint32_t* arrived;               // counters of the router's blocks, zero between launches
  uint32_t* claims;                // counters of the experts' products, zero between launches
  bf16 *gathered, *hidden;         // (S, x_stride), (S, padded intermediate)
  float* down;                     // (S, C)
  // (S, 2 intermediate), of a dense MLP (T, 2 intermediate): gate and up. GPT-OSS's experts need none, as their
  // products apply the gate.
  float* gate_up;
  float* logits;  // (min(T, kPromptRows), V); over several GPUs in the first GPU's memory, from this GPU's first id on
  // (T, x_stride): over several GPUs, this GPU's parts of output and down; with NormSpec::post, their results.
  float* part[2];
  const float* parts[2][megakernel::kMostRanks];  // the parts of all GPUs
};
int64_t lay_out(const DecoderSpec& config, int64_t tokens, bool several, char* memory, PromptBuffers& buffers);
// Tokens of a prompt at a time at most: fewer for gates that need PromptBuffers::gate_up.
int64_t most_prompt_tokens(const DecoderSpec& config);

// Whether the build has the kernels, the sizes of the heads are multiples of 8, which attention needs, and the numbers
// of experts and of experts per token are small enough.
bool prompts_take(const DecoderSpec& config);

// Appends p.ids[0 .. T) after `position` and ends as run() does: with head_rows 1 the logits of the last token and the
// greedy token, with 0 neither. With head_rows T, at most kPromptRows, p.logits also receives the logits of all tokens.
//
// With `sequences` the T rows are one token of each of at most T sequences (batch/batch.h), `position` has no meaning,
// and the step ends as run() of a Step with sequences does: each slot has its logits, its greedy token and its new
// position. `model` is then the first slot's. T is one of kBatchRows, or any number of rows not below the number of
// sequences.
//
// With `parts` the T rows are parts of the prompts of several sequences, one part after the other, and share all
// products; each part attends to its own slot. Parts of one token at the beginning, such as the pending tokens of
// running answers, attend by one kernel, as in a step; the caller names them in PromptBuffers::single_tokens.
// `sequences` gives the last row of each part, whose logits go to the slots, as in a step.
constexpr int64_t kMostParts = 128;
struct PromptPart {
  const Model* model;  // of the part's slot
  int64_t T, position;
};
struct Prompt {
  int64_t T, position;
  uint32_t head_rows, vocab, capacity;
  int device;
  const BatchedSequences* sequences = nullptr;
  std::span<const PromptPart> parts = {};
  const KeptStates* states = nullptr;  // as in Step, of all T rows
};
void run_prompt(const Model& model, const Buffers& buffers, const PromptBuffers& p, const Prompt& prompt,
                Stream stream);
// Identifies the kernels that run_prompt() launches, as far as the kernels depend on `prompt`: equal lists mean
// equal kernels.
std::vector<int> prompt_kernels(const Model& model, const Prompt& prompt);

}  // namespace ingot::decode
