#pragma once
// One step of GPT-OSS on a GPU: phase by phase, a launch each, so that every phase can be tested and timed alone, and
// all of them be captured in a graph; or, one token, as one persistent kernel.
//   embed | qkv = norm(x) Wqkv + b | attention | x += mixed Wo + b | router | gate and up | x += down | head
// The residual stream is fp32, what products take is bf16, their sums are fp32.
#include <string>
#include <vector>

#include "ingot/megakernel/grid_barrier.h"
#include "ingot/models/decode/model/state.h"

namespace ingot::decode {

// Which sizes the kernels take; throws Error(unsupported) with both values.
void check_supported(const GptOssConfig& config);
uint32_t cache_dim(const GptOssConfig& config);    // head_dim, filled up to what the kernels are made for
uint32_t max_columns(const GptOssConfig& config);  // tokens of a step that fit into an SM's memory: 16, 8 or 1

// Places all of `Buffers` one after the other, whose `ranks` say how many GPUs there are; returns their bytes. Memory
// begins as zeros.
int64_t lay_out(const GptOssConfig& config, uint32_t capacity, char* memory, Buffers& buffers);

// For timing a phase alone: the others are left out.
enum PhaseBit : uint32_t {
  kEmbed = 1,
  kQkv = 2,
  kAttention = 4,
  kOutput = 8,
  kRouter = 16,
  kGateUp = 32,
  kDown = 64,
  kHead = 128
};

struct Streams;  // streams.h
struct Step {
  uint32_t T = 1;                    // tokens; at most max_columns
  uint32_t head_rows = 1;            // logits of the last so many tokens: 0, 1 or T
  uint32_t vocab = 0;                // ids from here on are not drawn; 0: all are
  uint32_t capacity = 0;             // of the cache
  uint32_t phases = ~0u;             // PhaseBit
  const Streams* streams = nullptr;  // T tokens of as many sequences, where the logits of all are wanted
};
// Appends state.tokens[0 .. T), leaves the logits in buffers.logits and the likeliest next token in state.tokens[0].
void run(const Model& model, const Buffers& buffers, const Step& step, Stream stream);

// The same of one token (step.T is 1), the same bit for bit, by the megakernel. Where a wait gave up nothing was
// appended; what blocks hand over (Buffers::handover_bytes) and the watch must be reset before the next launch.
struct LayerStages;  // megakernel.h: what a layer's stages are told
struct Persistent {
  const LayerStages* layers;  // on the device; stages_of(...) of the same model, buffers and capacity
  gpu::Watch watch;
  const Ranks* ranks = nullptr;  // the buffers', on the device, where there are several
  int64_t blocks = 0;            // of the grid; 0: as many as run at once
  megakernel::Trace trace;       // of trace_of(...), where MXFP4 is the experts' format; no words: none is kept
  uint32_t missing = ~0u;        // for tests: megakernel::Grid
  bool screened = false;         // the likeliest id alone, by Model::screen: where screen_takes()
};
std::vector<LayerStages> stages_of(const Model& model, const Buffers& buffers, uint32_t capacity);
uint32_t grid_barriers_of(const Model& model);
// Of the first `blocks` blocks; `words` on the device.
megakernel::Trace trace_of(const Model& model, uint32_t blocks, uint64_t* words);
// No rounded inputs of experts (GptOssConfig::e4m3_inputs), heads of up to 64 numbers, attention and head of one
// format, the experts' matrices of one, and room in an SM's memory for a token's activations beside a ring of weights.
bool megakernel_takes(const Model& model);
// Whether the head can be screened of a model that megakernel_takes(), or of a slice that has rows of it: in bf16, and
// experts in MXFP4.
bool screen_takes(const Model& model);
void run_megakernel(const Model& model, const Buffers& buffers, const Step& step, const Persistent& how, Stream stream);
// Who waited for what ("... for the output of layer 3: found 131, ..."); empty where no wait gave up.
std::string grid_barrier_report(const gpu::WaitControl& waits, uint32_t layers = 0);

}  // namespace ingot::decode
