#pragma once
// How long a token of GPT-OSS takes on a GPU, with synthetic weights of the published shapes: what `ingot bench decode`
// prints.
#include <string>
#include <utility>
#include <vector>

#include "ingot/kernels/quant/quant.h"
#include "ingot/megakernel/exchange_times.h"
#include "ingot/megakernel/grid_barrier_times.h"
#include "ingot/models/gpt_oss/config.h"
#include "ingot/models/options.h"

namespace ingot {

struct DecodeMeasurement {
  std::string size = "120b";                // of synthetic_gpt_oss()
  WeightFormat dense = WeightFormat::bf16;  // qkv, o and head; experts are mxfp4
  int64_t context = 1024;                   // tokens there are before the first one is timed
  int64_t tokens = 200;
  bool phased = true,
       megakernel = true;  // a launch a phase; one kernel for the whole token, and with a prefiltered head
  bool phases = false;     // each phase alone, too
  std::string trace;  // a file for the times of a token of the megakernel, all stages on all SMs (trace.h); empty: none
  bool prompt = false;    // tell all of the context's tokens, for the time to the first token; else some
  bool quant = false;     // experts take e4m3 per 32 numbers (GptOssConfig::e4m3_inputs): the phased path alone
  std::vector<int> gpus;  // more than 1: a token over each of these numbers, after one over one GPU where it has room
  Split split = Split::tensor;
  bool grid_barriers = false;                        // what grid barriers between blocks cost, by themselves
  std::vector<int64_t> contexts;                     // with the same model, after `context`
  std::vector<std::pair<int64_t, int64_t>> answers;  // tokens of a prompt and of what follows, from end to end
  std::vector<int64_t> streams;                      // sequences of a step, each of these numbers
  int64_t small_batch = -1;  // steps of more sequences take the matrix kernels; -1: the usual number
};
struct TokenTimes {
  double mean_ms = 0, p50_ms = 0, p99_ms = 0, best_ms = 0;
};
// Of a stage of the megakernel, as its first block sees it.
struct StageTimes {
  std::string name;
  double work_us = 0, wait_us = 0;  // until it is done itself; until all others are, with the grid barrier
  // Over several GPUs, of the work: from its having sent its part until all have come, of this GPU and of whichever GPU
  // came last, who waits for nobody.
  double exchange_us = 0, last_exchange_us = 0;
};
// Over several GPUs.
struct SharedTimes {
  int gpus = 0;
  std::vector<std::pair<std::string, TokenTimes>> token;  // by path
  double prompt_ms = 0;                                   // of 16 tokens of the prompt
  int64_t token_bytes = 0;                                // of weights and keys that the busiest GPU reads
  int64_t screened_bytes = 0;                             // as ContextTimes'
  double first_token_ms = 0;                              // as DecodeTimes's
  megakernel::ExchangeTimes idle, loaded, link;           // of an exchange of the residual stream's width
  std::vector<std::vector<StageTimes>> stages;            // by GPU
};
struct ContextTimes {
  int64_t context = 0;
  std::vector<std::pair<std::string, TokenTimes>> token;  // by path
  int64_t token_bytes = 0;
  int64_t screened_bytes = 0;  // where the head is prefiltered (decode/prefilter/int8_prefilter.h)
};
// A prompt and its answer, greedy, by the megakernel where it is timed.
struct AnswerTimes {
  int64_t prompt = 0, tokens = 0;
  double first_token_ms = 0, whole_ms = 0;  // from the prompt's first token to the answer's first, and last
  double token_ms() const { return tokens > 1 ? (whole_ms - first_token_ms) / double(tokens - 1) : 0; }
};
// A token of each of several sequences.
struct StreamTimes {
  int64_t streams = 1;
  bool row_kernel = false;  // by one kernel, else by launches
  TokenTimes step;
  double experts = 0;      // that a layer's tokens chose, mean of the layers and of some steps
  int64_t step_bytes = 0;  // of weights, of so many experts, and keys
  std::vector<std::pair<std::string, double>> phases;  // as DecodeTimes'
};
struct DecodeTimes {
  // By path: "phased"; "megakernel"; "screened", with the prefilter; "sampled", the fastest of these two at temperature
  // 1. All others are greedy.
  std::vector<std::pair<std::string, TokenTimes>> token;
  double prompt_ms = 0;        // of 16 tokens of the prompt
  double first_token_ms = 0;   // from the start of the whole prompt to the first token of the answer; 0: not measured
  int64_t token_bytes = 0;     // of weights and keys that a token reads
  int64_t screened_bytes = 0;  // as ContextTimes'
  int64_t weight_bytes = 0;
  double read_TBps = 0;                                // what memory gives a kernel that only reads, in the same run
  std::vector<std::pair<std::string, double>> phases;  // microseconds of a launch, launches back to back
  std::vector<StageTimes> stages;
  std::vector<ContextTimes> contexts;
  std::vector<AnswerTimes> answers;
  std::vector<StreamTimes> streams;
  megakernel::GridBarrierTimes idle, loaded;  // of the residual stream's width
  std::vector<SharedTimes> shared;            // by number of GPUs, as asked for
};
// Error{unsupported} without a GPU that runs the kernels, or with too little memory, before any is taken.
DecodeTimes measure_decode(const DecodeMeasurement& m);

}  // namespace ingot
