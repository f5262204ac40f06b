#include <algorithm>

#include "ingot/kernels/quant/weight_tiles.h"
#include "ingot/models/decode/row_kernel/row_kernel.h"
#include "ingot/models/decode/row_kernel/row_router.cuh"

namespace ingot::decode {

RowSplit row_split_of(uint32_t row_tiles, uint32_t weight_tiles, uint32_t most_tiles, uint32_t most_parts,
                      uint32_t blocks) {
  constexpr uint32_t kEnd = 2;  // cost of ending a unit, in weight tiles
  const auto of = [&](uint32_t parts) {
    RowSplit s;
    s.tiles = (weight_tiles + parts - 1) / parts;
    s.parts = (weight_tiles + s.tiles - 1) / s.tiles;
    s.chunk_tiles = even_chunk_tiles(s.tiles, most_tiles);
    s.chunks = (s.tiles + s.chunk_tiles - 1) / s.chunk_tiles;
    return s;
  };
  const auto cost = [&](const RowSplit& s) {
    const uint64_t units = (uint64_t(row_tiles) * s.parts + blocks - 1) / blocks;
    return (units + megakernel::kTeams - 1) / megakernel::kTeams * (s.tiles + kEnd);
  };
  RowSplit best = of(1);
  for (uint32_t parts = 2; parts <= std::min(most_parts, weight_tiles); ++parts)
    if (const RowSplit s = of(parts); cost(s) < cost(best)) best = s;
  best.set_steps();
  return best;
}

int64_t lay_out(const DecoderSpec& c, uint32_t capacity, char* memory, RowWords& w) {
  int64_t at = 0;
  const auto take = [&](auto*& p, int64_t bytes) {
    p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(memory + at);
    at += (bytes + 255) / 256 * 256;
  };
  const auto vector = [](int64_t numbers) { return uint32_t(weight_tiles::vector_bytes(uint32_t(numbers))); };
  const int64_t rows = kKernelRows, parts = decode_attention::parts_of(1, 0, capacity),
                width = weight_tile_padded_cols(c.hidden);
  w.x_stride = width;
  const auto place = [&](uint32_t& offset, int64_t bytes) {
    offset = uint32_t(w.turn_bytes);
    w.turn_bytes += (bytes + 15) / 16 * 16;
  };
  w.turn_bytes = (c.qkv_width() * 8 + 15) / 16 * 16;
  place(w.logits, c.experts * 8);
  place(w.normed, vector(c.hidden));
  place(w.attended, vector(c.q_width()));
  place(w.routed, vector(c.hidden));
  w.pair_bytes = vector(c.intermediate);
  place(w.pairs, c.experts_per_token * w.pair_bytes);
  take(w.grid_barrier, 4);
  take(w.last_epoch, 4);
  take(w.x, rows * w.x_stride * 8);
  take(w.squares, 2 * rows * (width / kWeightTileCols) * 8);
  take(w.turns, 2 * rows * w.turn_bytes);
  take(w.rows.parts, rows * token_attention::Published::parts_bytes(c.heads, parts, cache_dim(c)));
  w.rows.mixed = nullptr;
  w.bytes = at;
  return at;
}

namespace {
template <class Call> void with_dense(WeightFormat f, Call&& call) {
  if (f == WeightFormat::bf16) return call(RowKernel<WeightFormat::bf16>{});
  if (f == WeightFormat::fp8) return call(RowKernel<WeightFormat::fp8>{});
  call(RowKernel<WeightFormat::mxfp4>{});
}
}  // namespace

bool supports_row_kernel(const Model& m) {
  const DecoderSpec& c = m.config;
  if (megakernel_path(c) != DecodePath::megakernel || !supports_megakernel(m) || m.kv_heads >= 0 ||
      m.layers[0].down.format != WeightFormat::mxfp4)
    return false;
  if (c.experts_per_token * kKernelRows > kMostRowSlots || c.experts > 32 * kLogitsOfLane ||
      weight_tile_padded_cols(c.hidden) > 32 * rows::kSquaresOfLane * kWeightTileCols)
    return false;
  RowWords words;
  lay_out(c, 1, nullptr, words);
  if (kKernelRows * words.turn_bytes > int64_t(16) << 16) return false;  // ExpertSlots::offset
  // The same strides as in place_memory().
  const auto stride = [](int64_t n) { return int64_t(weight_tiles::vector_stride(uint32_t(n))); };
  const int64_t vectors = std::max({stride(c.hidden), stride(c.q_width()), stride(c.intermediate)}) * kKernelRows,
                fixed = int64_t(sizeof(rows::Memory)) +
                        ChoiceMemory::bytes(kKernelRows, uint32_t(c.experts), uint32_t(c.experts_per_token)) + 512;
  return fixed + std::max<int64_t>(vectors, int64_t(sizeof(rows::AttentionMemory))) +
             int64_t(megakernel::kTeams + 3) * megakernel::kSlotBytes <=
         kMostShared;
}

void run_row_kernel(const Model& m, const Buffers& b, const Step& step, const RowLaunch& how, Stream stream) {
  INGOT_CHECK(1 <= step.T && step.T <= kKernelRows, "decode rows: found ", step.T, " rows, expected 1 to ",
              kKernelRows);
  INGOT_CHECK(supports_row_kernel(m), "decode rows: found a model that supports_row_kernel() refuses");
  const Plan plan = plan_of(m, b, step);
  RowStep p{.embedding = embedding_of(plan),
            .head = head_of(plan),
            .layers = how.layers,
            .sequences = step.sequences != nullptr ? *step.sequences : BatchedSequences{},
            .draft = step.draft,
            .words = how.words,
            .lists = b.lists,
            .expert_slots = b.expert_slots,
            .T = step.T,
            .count = plan.layers,
            .head_rows = step.head_rows,
            .experts = plan.experts,
            .k = plan.k,
            .part_keys = how.part_keys,
            .grid = {.counter = how.words.grid_barrier, .watch = how.watch, .trace = {}, .missing = how.missing}};
  const LayerStages layer = stages_of(plan, m.layers[0], 0);
  with_dense(m.head.format, [&](auto kernel) { kernel.launch(p, layer, how.blocks, stream); });
}

}  // namespace ingot::decode
