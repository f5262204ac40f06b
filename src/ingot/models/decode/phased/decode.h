#pragma once
// One step of a model on a GPU. The phased path launches a kernel for each phase, so that each phase can be tested and
// timed alone, and a graph can capture all of them. The megakernel computes one token in a single persistent kernel.
//    embed | qkv = norm(x) Wqkv + b | attention | x += mixed Wo + b | router | gate and up | x += down | head
// The residual stream is fp32; the inputs of products are bf16 and their sums fp32.
#include <string>
#include <vector>

#include "ingot/gpu/limits.h"
#include "ingot/megakernel/grid_barrier.h"
#include "ingot/models/decode/model/state.h"

namespace ingot::decode {

// Throws Error(unsupported), with both values, for sizes that the kernels do not take.
void check_supported(const DecoderSpec& config);
// The width of a row of the cache: head_dim, padded to a width for which the kernels are compiled. With a softcap of
// scores, the width of the kernel for wide heads.
uint32_t cache_dim(const DecoderSpec& config);
bool has_dense_mlp(const DecoderSpec& config);
// The number of experts of a layer, and of choices of a token; a dense MLP counts as a single expert.
int64_t bank_experts(const DecoderSpec& config);
int64_t bank_choices(const DecoderSpec& config);
// The most tokens of a step that fit into the shared memory of this thread's GPU: 16, or 1 to 8.
uint32_t max_step_tokens(const DecoderSpec& config);

// Rows of a product of several rows with `cols` columns that fit into that shared memory: 0 to 8.
uint32_t max_product_rows(int64_t cols);

// Places the arrays of `Buffers` one after the other in memory of zeros, for as many GPUs as its `ranks` say; returns
// their bytes.
int64_t lay_out(const DecoderSpec& config, uint32_t capacity, char* memory, Buffers& buffers);

// To time a phase alone: a step runs only the phases whose bits are set.
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

struct BatchedSequences;  // batched_sequences.h
struct RowLaunch;         // row_kernel.h
struct KeptStates;        // head_launches.h
struct Step {
  uint32_t T = 1;                               // tokens; at most max_step_tokens
  uint32_t head_rows = 1;                       // the number of last tokens whose logits are computed: 0, 1 or T
  uint32_t vocab = 0;                           // only ids below may be sampled; 0: all
  uint32_t capacity = 0;                        // of the cache
  uint32_t phases = ~0u;                        // PhaseBit
  const BatchedSequences* sequences = nullptr;  // the T tokens belong to as many sequences
  // The rows of `sequences` are those of a draft step, at most kMostDraftRows. They take the kernels of several tokens
  // even where T is 1. The step leaves their logits in buffers.logits and appends nothing. With several ranks the
  // logits are complete once all ranks have ended the step.
  bool draft = false;
  // the row kernel, which computes steps of at most 8 tokens in place of the launches
  const RowLaunch* row_kernel = nullptr;
  // Where a draft head's hidden states of all T tokens are kept. The row kernel keeps none.
  const KeptStates* states = nullptr;
};
// Appends state.tokens[0 .. T), leaves the logits in buffers.logits and the id of the largest logit in state.tokens[0].
void run(const Model& model, const Buffers& buffers, const Step& step, Stream stream);

// After a draft step and the sampling of its rows (`sampled`, in device memory): appends to each slot its rows up to
// the first whose sampled token differs from the next row's token.
void keep_accepted(const BatchedSequences& sequences, const int32_t* sampled, const uint32_t* stop, Stream stream);

struct LayerStages;  // megakernel.h
// The arguments of run_megakernel() beside the model, its buffers and the step.
struct Persistent {
  const LayerStages* layers;  // on the device; stages_of(...) of the same model, buffers and capacity
  gpu::Watch watch;
  const Ranks* ranks = nullptr;  // buffers.ranks on the device, with several ranks
  int64_t blocks = 0;            // of the grid; 0: as many as can run at once
  megakernel::Trace trace;       // of trace_of(...), where supports_trace(); without words nothing is recorded
  uint32_t missing = ~0u;        // for tests: megakernel::Grid
  bool prefiltered = false;      // the head by Model::prefilter; needs supports_prefilter()
  // In place of `layers`, of a model of the families: family_stages_of(...), on the device.
  const void* family_layers = nullptr;
  const gpu::Limits* limits = nullptr;  // null: of this thread's GPU
};
std::vector<LayerStages> stages_of(const Model& model, const Buffers& buffers, uint32_t capacity);
// The same for a model of the families: the bytes of a DenseLayerStages for each layer, or of a MixtureLayerStages
// where the layers have experts. Empty for GPT-OSS.
std::vector<char> family_stages_of(const Model& model, const Buffers& buffers, uint32_t capacity);
int64_t family_stages_bytes(const DecoderSpec& config);  // the size of family_stages_of()
uint32_t grid_barriers_of(const Model& model);
// A trace of the first `blocks` blocks; `words` is device memory.
megakernel::Trace trace_of(const Model& model, uint32_t blocks, uint64_t* words);
// Which models the megakernel takes. GPT-OSS: no rounded inputs of experts (DecoderSpec::e4m3_inputs); heads of at most
// 64 numbers; one format for attention and head, and one for the experts, over several GPUs MXFP4. The families: one
// GPU; heads of at most 128 numbers, and with experts of more than 64; one format for all matrices. Both: a multiple of
// 4 numbers in a head; room in an SM's memory for a token's activations and a ring of weights. Without the copy engine:
// GPT-OSS on one GPU.
bool supports_megakernel(const Model& model, const gpu::Limits& limits = gpu::current_limits());
// Whether a token of the model can be traced: MXFP4 experts, or a family in bf16, on Hopper.
bool supports_trace(const Model& model, const gpu::Limits& limits = gpu::current_limits());
// The int8 prefilter needs a model (or a slice with rows of its head) that supports_megakernel(), on Hopper: GPT-OSS
// with a bf16 head and MXFP4 experts, or a family in bf16.
bool supports_prefilter(const Model& model, const gpu::Limits& limits = gpu::current_limits());
// Computes what run() computes for one token (step.T is 1), by the megakernel. If a wait gave up, nothing has been
// appended; the words that blocks hand over (Buffers::handover_bytes) and the watch must then be reset before the next
// launch.
void run_megakernel(const Model& model, const Buffers& buffers, const Step& step, const Persistent& how, Stream stream);
// Which wait gave up, and for which value ("... for the output of layer 3: found 131, ..."). Empty if no wait gave up.
std::string grid_barrier_report(const gpu::WaitControl& waits, uint32_t layers = 0);

}  // namespace ingot::decode
