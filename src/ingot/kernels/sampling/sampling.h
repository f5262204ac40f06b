#pragma once
// Samples a token from each row of logits:
//
//   token = argmax of logit / T + noise(seed, step, lane, id)  over the ids that the filters keep
//
// with Gumbel noise (noise.h): an exact sample of softmax(logit / T) over these ids, in one pass, without a sum. The
// argmax is computed over fma(T, noise, logit) in fp32 (in fp64 for f64 logits). At T = 0 the token is the argmax of
// the logits. Equal sums go to the lowest id. Every device gives the same token, bit for bit, and a row's token does
// not depend on the other rows. Logits of -inf are never sampled. NaN logits are an error of code numeric, and so are
// rows of -inf only.
//
// A row is processed in this order:
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
  double min_p = 0;        // [0, 1]: keep tokens at least min_p times as likely as the most likely
};
void check(const SamplingOptions& o);  // throws an Error with the option, its value and the allowed values

// The options of one row, in the memory of the logits' device, where a captured graph reads them. row_of() makes a
// SampleRow.
struct SampleRow {
  uint64_t seed = 0;
  uint32_t step = 0, lane = 0;  // counters of the noise; lane < 2^30
  int32_t row = 0;              // the row of logits, tokens, biases and masks
  int32_t ids = 0;              // only ids below this number are sampled
  int32_t biases = 0;           // number of used entries in the row of bias_ids
  int32_t masked = 0;           // 1: the row of `allowed` says which ids may be sampled
  float temperature = 1;        // 0: the largest logit wins
  float octaves_per_logit = 0;  // log2(e) / temperature
  float most_octaves = 0;       // for min_p; HUGE_VALF: no limit
  uint32_t top_p = 0;           // in units of 2^-32; 0: no limit
  int32_t top_k = 0;            // 0: all
  int32_t unused = 0;
};
SampleRow row_of(const SamplingOptions& options, int64_t ids);
bool filters(const SampleRow& row);  // whether the row may keep fewer ids than there are

struct Sample {
  Tensor logits;  // (R, V) of a floating type, on a GPU not f64; not modified
  Tensor tokens;  // (R) i32
  // For one row of noise, options and adjustments for each row of logits: row b has lane b of the noise.
  SamplingOptions options;
  uint64_t seed = 0;
  uint32_t step = 0;
  Tensor device_step;       // (1) i32 on the logits' device: added to every row's step when the kernel runs; or none
  Tensor bias_ids, biases;  // (R, n) i32, rising in each row, and (R, n) f32; ids from V on are ignored. Or neither
  // (R, (V + 31) / 32) u32: bit v % 32 of word v / 32 says that id v may be sampled. Or none: all ids may
  Tensor allowed;
  // Alternatively, for rows with options of their own: (B, sizeof(SampleRow)) u8 on the logits' device, 8-byte aligned.
  // Each entry names its row of the tensors above; rows without an entry are left alone. `options`, seed and step then
  // have no effect.
  Tensor rows;
  // Hints about `rows`, which the host may not be able to read: whether some rows have filters, and whether some rows
  // have none.
  bool some_filtered = true, some_unfiltered = true;
  // u8, of sample_workspace_bytes(), 16-byte aligned, zero before the first call. Every call leaves the workspace ready
  // for the next call on the same stream. None on the CPU.
  Tensor workspace;
};
int64_t sample_workspace_bytes(int64_t rows, Device device);
void sample(const Sample& s, Stream stream);

}  // namespace ingot
