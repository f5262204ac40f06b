#pragma once
// Samples a token from each row of logits:
//
//   token = argmax of logit / T + noise(seed, step, lane, id)  over the ids that the filters keep
//
// with Gumbel noise (noise.h): an exact sample of softmax(logit / T) over these ids, in one pass, without a sum. It is
// computed as argmax of fma(T, noise, logit) in fp32 (of f64 logits in fp64). At T = 0 it is the argmax of the logits.
// Equal sums go to the lowest id. Every device gives the same token, bit for bit, and a row's token does not depend on
// the other rows. Logits of -inf are never sampled. NaN logits are an error of code numeric; rows of -inf too.
//
// What is done to a row, in this order:
//   1. only the ids below `ids` take part
//   2. + biases of an id, one after the other in fp32;  -inf where the mask of allowed ids lacks the id
//   3. top_k: of the ids, ordered by falling logit and equal logits by rising id, the first k are kept
//   4. top_p: of the ids kept so far, in that order, the shortest prefix is kept whose weights sum to at least top_p
//             times the sum of all of them
//   5. min_p: of these, ids at least min_p times as likely as the most likely id of the row are kept
//   6. the argmax above
// With octaves(id) = (largest logit - logit) * (log2(e) / T), the weight of an id is 2^-octaves, rounded to 16
// significant bits, and 0 from 48 octaves on (filters.h). Weights are summed as integers, so that no order of summation
// changes the ids that are kept. min_p keeps octaves(id) <= -log2(min_p). T is taken as fp32, below 1e-30 as 0 and
// above 1e30 as that; top_p is rounded to a multiple of 2^-32.
#include "ingot/core/rng.h"
#include "ingot/core/tensor.h"

namespace ingot {

struct SamplingOptions {
  double temperature = 1;  // >= 0
  int64_t top_k = 0;       // 0: all
  double top_p = 1;        // (0, 1]
  double min_p = 0;        // [0, 1): keep tokens at least min_p times as likely as the most likely
};
void check(const SamplingOptions& o);  // throws, naming the option, what was found and what is allowed

// What one row asks for, in the memory of the logits' device, where a captured graph finds it. row_of() makes one.
struct SampleRow {
  uint64_t seed = 0;
  uint32_t step = 0, lane = 0;  // of the noise; lane < 2^30
  int32_t row = 0;              // of logits, tokens, biases and masks
  int32_t ids = 0;              // ids from here on are never sampled
  int32_t biases = 0;           // how many of the row of bias_ids count
  int32_t masked = 0;           // 1: the row of `allowed` says which ids may be sampled
  float temperature = 1;        // 0: the largest logit
  float octaves_per_logit = 0;  // log2(e) / temperature
  float most_octaves = 0;       // of min_p; HUGE_VALF: all
  uint32_t top_p = 0;           // in 2^-32; 0: all
  int32_t top_k = 0;            // 0: all
  int32_t unused = 0;
};
SampleRow row_of(const SamplingOptions& options, int64_t ids);
bool filters(const SampleRow& row);  // whether it keeps fewer ids than there are, perhaps

struct Sample {
  Tensor logits;  // (R, V) of a floating type, on a GPU not f64; not modified
  Tensor tokens;  // (R) i32
  // One row of noise, options and adjustments for each row of logits: row b has lane b of the noise.
  SamplingOptions options;
  uint64_t seed = 0;
  uint32_t step = 0;
  Tensor step_there;  // (1) i32 on the logits' device: added to every row's step when the stream comes to it, or none
  Tensor bias_ids, biases;  // (R, n) i32, rising in each row, and (R, n) f32; ids beyond are left out. Or neither
  Tensor allowed;           // (R, (V + 31) / 32) u32: bit v % 32 of word v / 32, id v may be sampled. Or none: all may
  // Or several rows with options of their own: (B, sizeof(SampleRow)) u8 on the logits' device, 8-byte aligned. Each
  // names its row of the tensors above; other rows are left alone. `options`, seed and step then do not count.
  Tensor rows;
  // Of `rows`, which the host may not be able to read: some have filters; some have none.
  bool some_filter = true, some_do_not = true;
  // u8, of sample_workspace_bytes(), 16-byte aligned, zero before the first call; calls leave it ready for the next one
  // of the same stream. On the CPU none.
  Tensor workspace;
};
int64_t sample_workspace_bytes(int64_t rows, Device device);
void sample(const Sample& s, Stream stream);

}  // namespace ingot
