#pragma once
// How a model is opened and run: one struct goes from the command line, the server and the bindings to the engine.
#include <cstdint>
#include <functional>
#include <string>

namespace ingot {

enum class DeviceChoice { automatic, cpu, cuda };    // automatic: a GPU where there is one that the model runs on
DeviceChoice device_named(const std::string& name);  // auto, cpu or cuda

// How several GPUs share a model (models/decode/weights/slices.h).
enum class Split {
  tensor,             // every GPU has a part of each layer
  attention_experts,  // the first GPU has attention and head, the others share the experts
};
const char* name_of(Split split);  // tensor, attention-experts

struct DecoderOptions {
  int64_t context = 0;     // the longest sequence that a slot holds; 0: the model's context
  int64_t layers = 0;      // run only the first layers; 0: all. Not every kind of model can
  int64_t batch = 512;     // the most tokens of a prompt that a CPU computes at a time
  int64_t slots = 1;       // sequences at a time, each with its own keys and values
  bool fit_slots = false;  // slots and context that are 0 are chosen: of a GPU by its memory, see choose_slots()
  DeviceChoice device = DeviceChoice::automatic;
  bool megakernel = true;      // on a GPU, single tokens by the megakernel where it supports the model
  bool prompt_kernels = true;  // on a GPU, prompts by matrix kernels where these support the model
  bool int8_prefilter = true;  // on a GPU with room for the 8-bit head, ids without logits by it: the same ids
  double wait_limit = 2;       // seconds that a block of a kernel waits for other blocks or GPUs before it gives up
  int64_t gpus = 1;            // cuda:0 to cuda:(gpus - 1) share the model; more than one are insisted on
  Split split = Split::tensor;
  bool batched_sequences = false;  // on a GPU, slots that are sampled together share a pass over the weights
  // The inputs of the experts' products are rounded to e4m3 times a power of two per 32 numbers
  // (kernels/quant/e4m3_blocks.h), to see what that costs. Not every kind of model can.
  bool e4m3_experts = false;
  std::string adapters;  // a file of `ingot ttt`, for models of `ingot train`
};
// The tokens that a slot holds, of a model whose context is `model_context`. Error{usage} for more than that.
int64_t context_of(const DecoderOptions& options, int64_t model_context);

constexpr int64_t kUsualSlots = 4, kUsualContext = 8192;  // on a CPU
constexpr int64_t kMostSlots = 128, kManySlots = 64;      // that are chosen; that are worth a shorter context
// The options of a model on a CPU: slots and context that are to be chosen are the usual ones.
DecoderOptions with_usual_slots(DecoderOptions options, int64_t model_context);
// The options of a model on GPUs, where `fits` says whether the GPUs have room for so many slots of so many tokens. Of
// the model's context, its half and so on down to kUsualContext the first that leaves room for kManySlots slots, or for
// the given number, is taken; then as many slots as there is room for, at most kMostSlots. Where not even one slot of
// kUsualContext tokens fits, contexts go on down to 1,024.
DecoderOptions choose_slots(DecoderOptions options, int64_t model_context,
                            const std::function<bool(int64_t slots, int64_t context)>& fits);

}  // namespace ingot
