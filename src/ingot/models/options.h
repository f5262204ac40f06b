#pragma once
// How a model is opened and run: a single struct goes from the command line, the server and the bindings to the engine.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace ingot {

enum class DeviceChoice { automatic, cpu, cuda };    // automatic: a GPU, if any can run the model
DeviceChoice device_named(const std::string& name);  // auto, cpu or cuda

// How several GPUs share a model (models/decode/weights/slices.h).
enum class Split {
  tensor,             // every GPU has a part of each layer
  attention_experts,  // the first GPU has attention and head, the remaining GPUs share the experts
};
const char* name_of(Split split);  // tensor, attention-experts

struct DecoderOptions {
  int64_t context = 0;     // the longest sequence of a slot; 0: the model's context
  int64_t layers = 0;      // run only the first layers; 0: all. Not every kind of model can
  int64_t batch = 512;     // the most tokens of a prompt per CPU pass
  int64_t slots = 1;       // sequences at a time, each with its own keys and values
  bool fit_slots = false;  // a number of slots or a context of 0 is chosen, on a GPU by its memory: choose_slots()
  DeviceChoice device = DeviceChoice::automatic;
  bool megakernel = true;      // on a GPU, single tokens by the megakernel if it supports the model
  bool prompt_kernels = true;  // on a GPU, prompts by matrix kernels if these support the model
  // On a GPU with room for the 8-bit head, tokens whose logits are not read are sampled by the int8 prefilter.
  bool int8_prefilter = true;
  double wait_limit = 2;  // seconds after which a wait for blocks or GPUs inside a kernel gives up
  int64_t gpus = 1;       // cuda:0 to cuda:(gpus - 1) share the model; more than one: all are required
  Split split = Split::tensor;
  bool batched_sequences = false;  // on a GPU, slots sampled together share a pass over the weights
  // The inputs of the experts' products are rounded to e4m3 times a power of two per 32 numbers
  // (kernels/quant/e4m3_blocks.h), to measure the loss of accuracy. Not every kind of model supports this option.
  bool e4m3_experts = false;
  std::string draft_head;             // the directory of a draft head (models/draft/head); often none
  std::vector<int64_t> draft_layers;  // the layers that the head reads, in place of those of its files; often empty
  int64_t draft_window = 0;           // visible keys of the head's attention; 0: all
  std::string draft_dense;            // the format of the head's matrices: bf16, fp8 or mxfp4; empty: as stored
  std::string adapters;               // a file of `ingot ttt`, for models of `ingot train`
  // The format (bf16, fp8 or mxfp4) to which loading converts the matrices of attention, dense MLPs and the head of a
  // checkpoint or a GGUF file. Empty: the stored formats remain, and blocks of GGUF become bf16.
  std::string dense;
};
// The tokens of a slot, for a model with the context `model_context`. Error{usage} for more tokens than this context.
int64_t context_of(const DecoderOptions& options, int64_t model_context);

constexpr int64_t kDefaultSlots = 4, kDefaultContext = 8192;  // on a CPU
constexpr int64_t kMostSlots = 128, kManySlots = 64;          // the most slots chosen; slots worth a shorter context
// The options of a model on a CPU: zero slots become kDefaultSlots, and a zero context kDefaultContext.
DecoderOptions with_default_slots(DecoderOptions options, int64_t model_context);
// The options of a model on GPUs. `fits` returns whether the GPUs have room for a number of slots of a number of
// tokens. The context is the first of the model's context, its half and so on down to kDefaultContext with room for
// kManySlots slots, or for the given number; the slots are then as many as fit, at most kMostSlots. Contexts continue
// down to 1,024 as long as fewer slots than the given number fit or, without a number, not even one.
DecoderOptions choose_slots(DecoderOptions options, int64_t model_context,
                            const std::function<bool(int64_t slots, int64_t context)>& fits);

}  // namespace ingot
