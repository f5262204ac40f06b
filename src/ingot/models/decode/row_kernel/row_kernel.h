#pragma once
// A step of up to 8 rows by one persistent kernel (row_kernel.cuh): the next tokens of several sequences, consecutive
// tokens of one sequence, or the rows of draft steps. The numbers of a row depend neither on the other rows nor on
// their count, bit for bit.
#include "ingot/megakernel/grid_barrier.h"
#include "ingot/megakernel/weight_stream.h"
#include "ingot/models/decode/megakernel/megakernel.h"
#include "ingot/models/decode/phased/decode.h"
#include "ingot/models/decode/small_batch/batched_sequences.h"

namespace ingot::decode {

constexpr uint32_t kKernelRows = 8;  // the number of columns of a matrix instruction
static_assert(kMostDraftRows <= kKernelRows, "the row kernel computes every draft step");
// A choice of the steps that the row kernel computes in place of other kernels.
enum class RowKernelUse {
  // No step.
  none,
  // Steps of 2 to kKernelRows sequences, and draft steps. The row kernel was measured to be faster in these steps
  // (docs/lab/gpt-oss-decode.md#rows-of-one-persistent-kernel).
  where_faster,
  // The same steps, and steps of 2 to kKernelRows tokens of one sequence, for tests and measurements.
  all,
};
constexpr uint32_t kMostRowSlots = 64;  // the most expert slots, which are the distinct experts of all rows

// The words through which the blocks of the kernel exchange results, in device memory filled with zeros. A sum is a
// fixed-point number together with the count of its terms (megakernel/sums.cuh). The residual stream is a sum to which
// output and down of all layers add. Activation vectors have the order of the matrix instructions and all bits
// inverted, so that a word of zero is not complete.
struct RowWords {
  uint32_t *grid_barrier, *last_epoch;
  uint64_t* x;        // (8, x_stride)
  uint64_t* squares;  // (2, 8, weight tiles of a row): sums of squares of x with an epoch; of qkv, of gate and up
  // (2, 8, turn_bytes), the results of a row in a layer, for which two layers take turns: the sums of qkv, the logits
  // of the router, and the activation vectors of qkv or of the head, of the output, of gate and up, and of the k
  // experts of down
  char* turns;
  token_attention::Published rows;  // parts of attention of the first row, followed by those of the other rows
  int64_t x_stride, turn_bytes;
  uint32_t logits, normed, attended, routed, pairs, pair_bytes;  // offsets in the results of a row; a vector of down
  int64_t bytes;  // size of all words, to be filled with zeros after a launch that gave up
};
// Places the words of a model in memory; returns their bytes.
int64_t lay_out(const DecoderSpec& config, uint32_t capacity, char* memory, RowWords& words);

// How a block and its teams share a product. A unit of work is a part of a row tile: `tiles` weight tiles, which a team
// of warps multiplies in chunks. A unit's sum depends neither on the block nor on the team that computes the unit.
struct RowSplit {
  uint32_t parts = 1, tiles = 1, chunk_tiles = 1, chunks = 1;  // parts of a row tile; chunks of a part
  uint32_t row_tile_step = 0, part_step = 0;                   // from a team's unit to the next
  void set_steps() { row_tile_step = megakernel::kTeams / parts, part_step = megakernel::kTeams % parts; }
};
// The split of `row_tiles` row tiles over `blocks` blocks, with at most `most_parts` parts per row tile; a chunk has at
// most `most_tiles` weight tiles.
RowSplit row_split_of(uint32_t row_tiles, uint32_t weight_tiles, uint32_t most_tiles, uint32_t most_parts,
                      uint32_t blocks);

struct RowStep {
  Embedding embedding;
  NormProduct head;            // y: the logits of row T - head_rows
  const LayerStages* layers;   // device memory
  BatchedSequences sequences;  // without `input` the rows are tokens of one sequence
  bool draft;                  // the rows of a slot are consecutive tokens, with positions of their own
  RowWords words;
  routing::Lists lists;  // of the first layer; the lists of each later layer follow after `expert_slots` entries
  int64_t expert_slots;
  uint32_t T, count, head_rows, experts, k;  // `count` is the number of layers
  uint32_t part_keys;                        // as in RowLaunch
  uint32_t choice, vectors, ring, bytes;     // offsets in dynamic shared memory; the bytes of all of it
  uint32_t room, padding;                    // the number of activation vectors of down that a block can hold
  megakernel::WeightRing stream;
  RowSplit split[kStageCount];
  megakernel::Grid grid;
};

struct RowLaunch {
  const LayerStages* layers;  // in device memory; stages_of(...) of the model that the step computes
  RowWords words;
  gpu::Watch watch;
  int64_t blocks = 0;      // size of the grid; 0: as many blocks as can be resident at once
  uint32_t missing = ~0u;  // for tests: see megakernel::Grid
  // About the number of keys in a part of attention. Several rows occupy all blocks with fewer parts than a single
  // token needs. Tests use smaller parts.
  uint32_t part_keys = 512;
};
// The row kernel needs a model of GPT-OSS that the megakernel takes, experts in MXFP4, at most 128 experts and 8
// experts per token, a hidden size of at most 4,096, one GPU, and enough shared memory in an SM.
bool supports_row_kernel(const Model& model);
// Computes 1 to 8 tokens. With step.sequences the logits of all rows are left in buffers.logits and no token is
// appended.
void run_row_kernel(const Model& model, const Buffers& buffers, const Step& step, const RowLaunch& how, Stream stream);

// An instance for each format of the dense matrices (room.cmake).
template <WeightFormat kDense> struct RowKernel {
  static void launch(const RowStep& step, const LayerStages& layer, int64_t blocks, Stream stream);
};

}  // namespace ingot::decode
