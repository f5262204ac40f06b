#pragma once
// Measures the time of a token of GPT-OSS or of a family on a GPU, with synthetic weights of the published shapes.
// `ingot bench decode` prints the result.
#include <string>
#include <utility>
#include <vector>

#include "ingot/kernels/quant/quant.h"
#include "ingot/megakernel/exchange_times.h"
#include "ingot/megakernel/grid_barrier_times.h"
#include "ingot/models/options.h"
#include "ingot/models/spec.h"

namespace ingot {

struct DecodeMeasurement {
  std::string size = "120b";                // as in synthetic_gpt_oss() or synthetic_family()
  WeightFormat dense = WeightFormat::bf16;  // of all matrices; GPT-OSS's experts are mxfp4
  int64_t context = 1024;                   // tokens in the cache before the first timed token
  int64_t tokens = 200;
  bool phased = true,
       // phased: one launch per phase; megakernel: one kernel per token, also with a prefiltered head
      megakernel = true;
  bool phases = false;  // also time each phase alone
  // a file for the times of a token of the megakernel, for all stages and SMs (trace.h); empty: none
  std::string trace;
  bool prompt = false;  // feed all tokens of the context, to time the first token of an answer; else only some
  // the experts' inputs are rounded to e4m3 per 32 numbers (GptOssConfig::e4m3_inputs), which only the phased path
  // computes
  bool quant = false;
  // numbers above 1: time a token over each of these numbers of GPUs, after one GPU where the model fits
  std::vector<int> gpus;
  Split split = Split::tensor;
  bool grid_barriers = false;     // time grid barriers alone
  std::vector<int64_t> contexts;  // further contexts to time after `context`, with the same model
  // whole answers to time: tokens of the prompt, and tokens of the answer
  std::vector<std::pair<int64_t, int64_t>> answers;
  std::vector<int64_t> sequences;  // numbers of sequences of a step to time
  int64_t small_batch = -1;        // steps of more sequences take the matrix kernels; -1: the default
};
struct TokenTimes {
  double mean_ms = 0, p50_ms = 0, p99_ms = 0, best_ms = 0;
};
// The times of one stage of the megakernel in the kernel's first block.
struct StageTimes {
  std::string name;
  // until this block has finished; until all blocks have finished, including the grid barrier
  double work_us = 0, wait_us = 0;
  // Over several GPUs, the part of the work from sending this GPU's part until all parts have arrived: for this GPU,
  // and for the GPU that arrived last and therefore did not wait.
  double exchange_us = 0, last_exchange_us = 0;
};
// The times over several GPUs.
struct SharedTimes {
  int gpus = 0;
  std::vector<std::pair<std::string, TokenTimes>> token;  // by path
  double prompt_ms = 0;                                   // of 16 tokens of the prompt
  int64_t token_bytes = 0;                                // bytes of weights and keys that the busiest GPU reads
  int64_t prefiltered_bytes = 0;                          // as in ContextTimes
  double first_token_ms = 0;                              // as in DecodeTimes
  megakernel::ExchangeTimes idle, loaded, link;           // an exchange of the residual stream's width
  std::vector<std::vector<StageTimes>> stages;            // by GPU
};
struct ContextTimes {
  int64_t context = 0;
  std::vector<std::pair<std::string, TokenTimes>> token;  // by path
  int64_t token_bytes = 0;
  int64_t prefiltered_bytes = 0;  // where the head is prefiltered (decode/prefilter/int8_prefilter.h)
};
// The times of a prompt and its greedy answer, by the megakernel where the megakernel is timed.
struct AnswerTimes {
  int64_t prompt = 0, tokens = 0;
  // from the prompt's first token to the answer's first token, and to its last
  double first_token_ms = 0, whole_ms = 0;
  double token_ms() const { return tokens > 1 ? (whole_ms - first_token_ms) / double(tokens - 1) : 0; }
};
// The time of a step with a token of each of several sequences.
struct BatchedStepTimes {
  int64_t sequences = 1;
  bool row_kernel = false;  // by the row kernel, else by the small-batch launches or the matrix kernels
  bool in_use = true;       // whether a decoder computes a step of this number of sequences so
  TokenTimes step;
  double experts = 0;      // experts that a layer's tokens chose, as the mean over the layers and some steps
  int64_t step_bytes = 0;  // bytes of weights, with this number of experts, and of keys
  std::vector<std::pair<std::string, double>> phases;  // as in DecodeTimes
};
struct DecodeTimes {
  // By path: "phased"; "plain_launches", the same launches without a CUDA graph and without an early start;
  // "megakernel"; "prefiltered", the megakernel with the int8 prefilter; "sampled", the faster of the last two at
  // temperature 1. The first three are greedy.
  std::vector<std::pair<std::string, TokenTimes>> token;
  double prompt_ms = 0;       // of 16 tokens of the prompt
  double first_token_ms = 0;  // from the start of the whole prompt to the first token of the answer; 0: not measured
  int64_t token_bytes = 0;    // bytes of weights and keys that a token reads
  int64_t prefiltered_bytes = 0;  // as in ContextTimes
  int64_t weight_bytes = 0;
  double read_TBps = 0;                                // the memory rate of a kernel that only reads, in the same run
  std::vector<std::pair<std::string, double>> phases;  // microseconds per launch, with launches back to back
  std::vector<StageTimes> stages;
  std::vector<ContextTimes> contexts;
  std::vector<AnswerTimes> answers;
  std::vector<BatchedStepTimes> sequences;
  megakernel::GridBarrierTimes idle, loaded;  // a barrier with words of the residual stream's width
  std::vector<SharedTimes> shared;            // in the order of DecodeMeasurement::gpus
};
// Whether a size is a name of synthetic_family(); the spec and the full name of a size.
bool is_family_size(const std::string& size);
DecoderSpec measured_spec(const std::string& size);
std::string measured_name(const std::string& size);
// Throws Error{unsupported} without a GPU that runs the kernels, or with too little memory, before any memory is taken.
DecodeTimes measure_decode(const DecodeMeasurement& m);

}  // namespace ingot
