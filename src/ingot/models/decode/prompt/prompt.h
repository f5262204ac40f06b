#pragma once
// Prompts on a GPU: up to kPromptTokens tokens of one sequence at a time through matrix kernels (kernels/grouped,
// kernels/attention), in place of steps of 16 columns. Over several GPUs each has its slice of the work (slices.h);
// what output and down add to the residual stream lies in parts in their memories, and the norm after it reads them all
// and adds in the order of GPUs.
#include "ingot/models/decode/phased/decode.h"

namespace ingot::decode {

constexpr int64_t kPromptTokens = 4096, kPromptRows = 256;  // at a time; of them with logits of each

// Shared by a model's slots. T: most tokens, S = T k.
struct PromptBuffers {
  int32_t* ids;                     // (T)
  int32_t *whole, *keys, *sliding;  // {0, T}, {0, keys of a full layer}, {0, those of a sliding one}
  float* x;                         // (T, x_stride)
  bf16* normed;                     // (T, x_stride)
  float* qkv;                       // (T, qkv_width)
  bf16 *q, *mixed;                  // (T, q_width)
  bf16 *ring_keys, *ring_values;    // (window - 1 + T, kv_width): a sliding layer's, in order
  float* router;                    // (T, E)
  uint32_t* chosen;                 // (layers, S), of each token best first
  float* weights;                   // (S)
  int32_t *place, *offsets;         // (S): where a choice's row lies; (E + 1): where an expert's begin
  uint32_t* claims;                 // of the experts' products: a zero between launches
  bf16 *gathered, *hidden;          // (S, x_stride), (S, intermediate filled up)
  float* down;                      // (S, C)
  float* logits;                    // (min(T, kPromptRows), V); of several GPUs the first one's, from this one's ids on
  float* part[2];                   // (T, x_stride): of several GPUs, this one's of what output and down add to x
  const float* parts[2][megakernel::kMostRanks];  // of all of them
};
int64_t lay_out(const GptOssConfig& config, int64_t tokens, bool several, char* memory, PromptBuffers& buffers);

// The build has the kernels, and attention takes the heads: multiples of 8 numbers.
bool prompts_take(const GptOssConfig& config);

// Appends p.ids[0 .. T) after `position`, then goes on as run(): the logits of the last token where head_rows is 1, the
// likeliest next one; nothing where it is 0. Where it is T, at most kPromptRows, p.logits are those of all, too.
struct Prompt {
  int64_t T, position;
  uint32_t head_rows, vocab, capacity;
  int device;
};
void run_prompt(const Model& model, const Buffers& buffers, const PromptBuffers& p, const Prompt& prompt,
                Stream stream);
// The kernels that it launches, as far as they depend on `prompt`: of equal lists they are the same.
std::vector<int> prompt_kernels(const Model& model, const Prompt& prompt);

}  // namespace ingot::decode
