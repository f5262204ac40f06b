#include <algorithm>
#include <cmath>
#include <numeric>

#include "ingot/core/memory/memory.h"
#include "ingot/gpu/allocator.h"
#include "ingot/gpu/device.h"
#include "ingot/gpu/limits.h"
#include "ingot/kernels/copy/copy.h"
#include "ingot/kernels/quant/weight_tiles.h"
#include "ingot/kernels/rope/rope.h"
#include "ingot/models/decode/draft_head/device_head.h"
#include "ingot/models/decode/phased/decode.h"
#include "ingot/models/decode/phased/phases.h"
#include "ingot/models/decode/phased/stages.cuh"
#include "ingot/models/decode/weights/builder.h"
#include "ingot/models/draft/head/head_rows.h"

namespace ingot::decode {

namespace {

// The number of rows that a product computes at once. The result of a row does not depend on this number.
int64_t rows_of_product(const draft::HeadConfig& c) {
  return std::min<int64_t>(kHeadRows, max_product_rows(std::max(c.features(), 2 * c.hidden)));
}

// What a head has in the memory of a GPU.
struct HeadMemory {
  Matrix fc, qkv, o, gate_up, down, head;
  const bf16* embed = nullptr;  // of the head; null: of the target
  const float *fc_norm = nullptr, *embed_norm, *hidden_norm, *mlp_norm, *norm;
  const float *sinks, *no_bias;  // -infinity of each head; zeros of gate and up
  float *cos, *sin;              // (context, head_dim / 2)
  int32_t *positions, *ids;      // (context): 0, 1, 2, ...; the target's id of each id of the head
  char* states;                  // of KeptStates
  float* squares;
  HeadSlots slots;
  routing::Lists mlp;             // the MLP as the only expert of a single token
  float *projected, *qkv_rows;    // (8, x_stride), (8, Q + 2 KV)
  float *x, *logits;              // (C), (ids of the head)
  char *inputs, *mixed, *hidden;  // activation vectors of 8 rows, of one row, of one row
  float *part_max, *part_sum, *part_out;
  uint32_t *arrived, *head_arrived;
  uint64_t* best;
  State* guesses;           // (kMostGuesses): tokens[0] is a guess, as an id of the head
  int64_t x_stride, group;  // rows_of_product()
  uint32_t parts, cache_dim;

  void build(DeviceBuilder& b, const draft::DraftHead& h, const DeviceHead::Sizes& sizes) {
    const draft::HeadConfig& c = h.config;
    const draft::HeadWeights& w = h.weights;
    b.matrix(fc, w.fc, 0), b.matrix(qkv, w.qkv, 0), b.matrix(o, w.o, 0);
    b.matrix(gate_up, w.gate_up, 0), b.matrix(down, w.down, 0);
    if (w.fc_norm) b.vector(fc_norm, w.fc_norm, 0);
    b.vector(embed_norm, w.embed_norm, 0), b.vector(hidden_norm, w.hidden_norm, 0);
    b.vector(mlp_norm, w.mlp_norm, 0), b.vector(norm, w.norm, 0);
    if (w.embed) b.embedding(embed, w.embed);
    if (w.head) b.matrix(head, w.head, 0);
    b.constant(sinks, c.heads, -INFINITY), b.constant(no_bias, 2 * c.intermediate, 0);
    group = rows_of_product(c);
    const int64_t context = sizes.context, groups = (sizes.rows + group - 1) / group;
    b.take(cos, context * c.head_dim / 2), b.take(sin, context * c.head_dim / 2);
    b.take(positions, context), b.take(ids, int64_t(w.ids.size()));
    b.take(states, groups * group * weight_tiles::vector_bytes(uint32_t(c.features())));
    b.take(squares, groups * int64_t(c.boundaries.size()) * kMostTokens);
    cache_dim = padded_dim(uint32_t(c.head_dim));
    parts = decode_attention::parts_of(1, uint32_t(c.window), uint32_t(context));
    slots.of_features = context * c.hidden, slots.of_keys = context * c.kv_heads * cache_dim;
    b.take(slots.features, sizes.slots * slots.of_features);
    b.take(slots.keys, sizes.slots * slots.of_keys), b.take(slots.values, sizes.slots * slots.of_keys);
    b.take(mlp.count, 1), b.take(mlp.expert, 1);
    b.take(mlp.weight, routing::kTokens), b.take(mlp.row, routing::kTokens);
    x_stride = weight_tile_padded_cols(c.hidden);
    b.take(projected, kHeadRows * x_stride), b.take(qkv_rows, kHeadRows * (c.q_width() + 2 * c.kv_width()));
    b.take(x, x_stride), b.take(logits, c.draft_vocab);
    b.take(inputs, kHeadRows * weight_tiles::vector_bytes(uint32_t(2 * c.hidden)));
    b.take(mixed, weight_tiles::vector_bytes(uint32_t(c.q_width())));
    b.take(hidden, weight_tiles::vector_bytes(uint32_t(c.intermediate)));
    b.take(part_max, c.heads * parts), b.take(part_sum, c.heads * parts);
    b.take(part_out, c.heads * parts * cache_dim);
    b.take(arrived, c.kv_heads * decode_attention::tiles_of(1, uint32_t(c.heads / c.kv_heads)));
    b.take(head_arrived, 1), b.take(best, kMostBlocks);
    b.take(guesses, DeviceHead::kMostGuesses);
  }
};

}  // namespace

struct DeviceHead::Impl {
  draft::HeadConfig c;
  std::vector<int32_t> ids;
  Sizes sizes;
  Stream stream;
  int device;
  Arena arena, host;
  HeadMemory m;
  KeptStates states;
  std::vector<draft::HeadRows> rows;

  Impl(const draft::DraftHead& h, const Model& target, const Sizes& s, Stream on, int gpu)
      : c(h.config), ids(h.weights.ids), sizes(s), stream(on), device(gpu), rows(size_t(s.slots)) {
    const int64_t total = DeviceHead::bytes(h, s);
    require_memory(total, "a draft head with a context of " + std::to_string(s.context) + " tokens",
                   gpu::device_memory(device));
    arena = Arena(total, gpu::device_memory(device));
    host = Arena(kMostGuesses * int64_t(sizeof(State)), gpu::pinned_memory());
    char* const memory = static_cast<char*>(arena.at(0, DType::u8, {total}).data);
    gpu::fill_bytes(memory, 0, total, stream);
    gpu::synchronize({Device::cuda, device}, stream);
    DeviceBuilder builder(memory, nullptr, stream, device);
    m.build(builder, h, s);
    if (m.embed == nullptr) m.embed = target.embed;
    if (m.head.data == nullptr) m.head = target.head;
    fill_tables();
    states = {.count = uint32_t(c.boundaries.size()),
              .weight = m.fc_norm,
              .each = c.fc_norm,
              .eps = float(c.norm_eps),
              .format = m.fc.format,
              .vectors = m.states,
              .squares = m.squares,
              .group = uint32_t(m.group)};
    for (size_t i = 0; i < c.boundaries.size(); ++i) states.boundary[i] = uint32_t(c.boundaries[i]);
    gpu::synchronize({Device::cuda, device}, stream);
  }
  void fill_tables() {
    const Shape shape{sizes.context, c.head_dim / 2};
    std::vector<float> cos(size_t(shape.numel())), sin(cos.size());
    rope_table(rope_frequencies(c.head_dim, c.rope.theta, c.rope.scaling), Tensor(cos.data(), shape),
               Tensor(sin.data(), shape));
    const auto send = [](auto* to, const auto& from) {
      gpu::copy_to_device(to, from.data(), int64_t(from.size() * sizeof(from[0])));
    };
    send(m.cos, cos), send(m.sin, sin);
    std::vector<int32_t> positions(size_t(sizes.context));
    std::iota(positions.begin(), positions.end(), 0);
    send(m.positions, positions);
    if (!ids.empty()) send(m.ids, ids);
    std::vector<float> weight(routing::kTokens);
    std::vector<int32_t> row(routing::kTokens, -1);
    weight[0] = 1, row[0] = 0;
    send(m.mlp.weight, weight), send(m.mlp.row, row);
    send(m.mlp.count, std::vector<uint32_t>{1}), send(m.mlp.expert, std::vector<int32_t>{0});
  }

  int64_t group_bytes() const { return m.group * weight_tiles::vector_bytes(uint32_t(c.features())); }
  const bf16* features(int slot, int64_t row) const {
    return m.slots.features + slot * m.slots.of_features + row * c.hidden;
  }
  HeadInputs inputs(std::span<const int32_t> tokens) const {
    HeadInputs p{.embed = m.embed,
                 .embed_norm = m.embed_norm,
                 .hidden_norm = m.hidden_norm,
                 .format = m.qkv.format,
                 .vectors = m.inputs,
                 .T = uint32_t(std::max<size_t>(1, tokens.size())),
                 .C = uint32_t(c.hidden),
                 .draft_vocab = uint32_t(c.draft_vocab),
                 .eps = float(c.norm_eps)};
    std::copy(tokens.begin(), tokens.end(), p.token);
    return p;
  }
  decode_attention::Params attention(int slot, int64_t row, uint32_t T) const {
    const uint32_t group = uint32_t(c.heads / c.kv_heads);
    return {.position = m.positions + row,
            .qkv = m.qkv_rows,
            .cos = m.cos,
            .sin = m.sin,
            .sinks = m.sinks,
            .keys = m.slots.keys + slot * m.slots.of_keys,
            .values = m.slots.values + slot * m.slots.of_keys,
            .mixed = m.mixed,
            .part_max = m.part_max,
            .part_sum = m.part_sum,
            .part_out = m.part_out,
            .arrived = m.arrived,
            .T = T,
            .heads = uint32_t(c.heads),
            .kv_heads = uint32_t(c.kv_heads),
            .dim = uint32_t(c.head_dim),
            .rows = uint32_t(sizes.context),
            .window = uint32_t(c.window),
            .parts = m.parts,
            .tiles = decode_attention::tiles_of(1, group),
            .group = group,
            .scale = float(1 / std::sqrt(double(c.head_dim))),
            .columns = m.o.format};
  }

  // Computes the features of the rows of one group of kept hidden states (KeptStates) and stores each row's features at
  // the slot and position that `places` names.
  void project(int64_t group, PlacedRows places) {
    SmallBatchProduct p{.x = {.vectors = m.states + group * group_bytes()},
                        .w = m.fc,
                        .bias = nullptr,
                        .y = m.projected,
                        .y_stride = m.x_stride,
                        .T = places.T,
                        .eps = float(c.norm_eps),
                        .adds = false};
    if (c.norm_before_fc) p.x.squares = m.squares + group * states.count * kMostTokens, p.x.parts = states.count;
    with_phases(m.fc.format, [&](auto phases) { phases.small_batch(p, stream); });
    places.x = m.projected, places.x_stride = m.x_stride, places.slots = m.slots, places.C = uint32_t(c.hidden);
    place_features(places, stream);
  }

  // Computes and stores the keys and values of the rows from `begin` on, one for each of `tokens`, of which there are
  // at most `group`.
  void store_rows(int slot, int64_t begin, std::span<const int32_t> tokens) {
    HeadInputs in = inputs(tokens);
    in.features = features(slot, begin);
    head_inputs(in, stream);
    // The queries are not needed, so the product begins at the matrix rows of the keys if these begin a row tile.
    Matrix w = m.qkv;
    float* y = m.qkv_rows;
    if (const int64_t q = c.q_width(); q % kWeightTileRows == 0) {
      w.data += q / kWeightTileRows * w.row_tile_bytes;
      w.rows -= uint32_t(q), w.row_tiles -= uint32_t(q / kWeightTileRows);
      y += q;
    }
    const SmallBatchProduct p{.x = {.vectors = m.inputs},
                              .w = w,
                              .bias = nullptr,
                              .y = y,
                              .y_stride = c.q_width() + 2 * c.kv_width(),
                              .T = in.T,
                              .eps = 0,
                              .adds = false};
    with_phases(w.format, [&](auto phases) { phases.small_batch(p, stream); });
    store_head_keys(attention(slot, begin, in.T), m.cache_dim, stream);
  }

  // y (+)= W vectors, of a single row.
  void product(const Matrix& w, const char* vectors, float* y, bool adds) {
    const ResidualProduct p{
        .vectors = vectors, .bias = nullptr, .w = w, .x = y, .x_stride = m.x_stride, .T = 1, .first_part = !adds};
    with_phases(w.format, [&](auto phases) { phases.residual_product(p, stream); });
  }
  // Computes guess number `number` as the token that follows row `row` of the slot. The row's token is `token` for the
  // first guess, and the preceding guess for every later one.
  void guess(int slot, int64_t row, int32_t token, int64_t number) {
    HeadInputs in = inputs({&token, 1});
    if (number == 0)
      in.features = features(slot, row);
    else
      in.before = m.guesses + number - 1, in.ids = ids.empty() ? nullptr : m.ids,
      in.output_norm = c.norm_output ? m.norm : nullptr;
    in.x = m.x, in.normed_residual = c.norm_before_residual;
    head_inputs(in, stream);
    product(m.qkv, m.inputs, m.qkv_rows, false);
    attend_head(attention(slot, row, 1), m.cache_dim, stream);
    product(m.o, m.mixed, m.x, true);
    const float eps = float(c.norm_eps);
    const GateUp channels{.x = m.x,
                          .x_stride = m.x_stride,
                          .weight = m.mlp_norm,
                          .bias = m.no_bias,
                          .w = m.gate_up,
                          .hidden = m.hidden,
                          .down = m.down.format,
                          .lists = m.mlp,
                          .T = 1,
                          .most = 1,
                          .eps = eps,
                          .limit = 0,
                          .alpha = 1};
    const GeneralGateUp gate_up{channels, Gate{.limit = 0, .alpha = 1, .up_offset = 0, .cubic = 0}};
    with_phases(m.gate_up.format, [&](auto phases) { phases.gate_up(gate_up, {}, {}, stream); });
    const Down down{.hidden = m.hidden,
                    .bias = nullptr,
                    .w = m.down,
                    .x = m.x,
                    .x_stride = m.x_stride,
                    .lists = m.mlp,
                    .T = 1,
                    .k = 1,
                    .most = 1};
    with_phases(m.down.format, [&](auto phases) { phases.down(down, {}, stream); });
    const NormProduct logits{.x = m.x,
                             .x_stride = m.x_stride,
                             .weight = m.norm,
                             .bias = nullptr,
                             .w = m.head,
                             .y = m.logits,
                             .y_stride = c.draft_vocab,
                             .T = 1,
                             .eps = eps,
                             .best = m.best,
                             .arrived = m.head_arrived,
                             .state = m.guesses + number,
                             .vocab = uint32_t(c.draft_vocab)};
    with_phases(m.head.format, [&](auto phases) { phases.norm_product(logits, 1, stream); });
  }
};

std::string DeviceHead::unsupported_reason(const draft::HeadConfig& c) {
  const auto at_most = [](const char* what, int64_t found, int64_t most) {
    if (found <= most) return std::string();
    return ingot::detail::concat("found a draft head with ", what, " ", found, ", expected at most ", most,
                                 " on a GPU");
  };
  // Numbers of an activation vector in shared memory, beside the memory that a kernel declares and the lists of
  // experts.
  const int64_t widest = std::min<int64_t>(90 * 1024, (gpu::current_limits().smem_per_block - 2048) / 2);
  for (const std::string& reason :
       {at_most("head_dim", c.head_dim, 128),
        at_most("a number of layers", int64_t(c.boundaries.size()), kMostBoundaries),
        at_most("an attention width of", c.q_width(), widest), at_most("intermediate_size", c.intermediate, widest)})
    if (!reason.empty()) return reason;
  if (rows_of_product(c) < 1)
    return ingot::detail::concat("found a draft head with hidden states of together ", c.features(),
                                 " numbers, expected as many as fit into a block's shared memory");
  if (c.head_dim % 4 != 0)
    return ingot::detail::concat("found a draft head with head_dim ", c.head_dim,
                                 ", expected a multiple of 4 on a GPU");
  return {};
}

int64_t DeviceHead::bytes(const draft::DraftHead& head, const Sizes& sizes) {
  DeviceBuilder counter(nullptr, nullptr, {}, 0);
  HeadMemory counted;
  counted.build(counter, head, sizes);
  return counter.bytes;
}

DeviceHead::DeviceHead(const draft::DraftHead& head, const Model& target, const Sizes& sizes, Stream stream,
                       int device) {
  if (const std::string reason = unsupported_reason(head.config); !reason.empty())
    fail(ErrorCode::unsupported, "--draft: ", reason);
  const gpu::DeviceGuard guard(device);
  impl_ = std::make_unique<Impl>(head, target, sizes, stream, device);
}
DeviceHead::~DeviceHead() = default;

const KeptStates& DeviceHead::states() const { return impl_->states; }
int64_t DeviceHead::length(int slot) const { return impl_->rows[size_t(slot)].length(); }

void DeviceHead::place(std::span<const Part> parts) {
  PlacedRows places{};
  int64_t group = 0;
  for (size_t i = 0; i < parts.size(); ++i)
    for (int64_t row = 0; row < parts[i].rows; ++row) {
      places.slot[places.T] = uint32_t(parts[i].slot), places.position[places.T] = uint32_t(parts[i].position + row);
      ++places.T;
      const bool last = i + 1 == parts.size() && row + 1 == parts[i].rows;
      if (places.T < impl_->m.group && !last) continue;
      impl_->project(group++, places);
      places.T = 0;
    }
}
void DeviceHead::append(int slot, std::span<const int32_t> ids) { impl_->rows[size_t(slot)].append(ids); }
void DeviceHead::compute_rows(int slot) {
  draft::HeadRows& rows = impl_->rows[size_t(slot)];
  while (rows.computed < rows.length() - 1) {
    const int64_t T = std::min(impl_->m.group, rows.length() - 1 - rows.computed);
    impl_->store_rows(slot, rows.computed, std::span(rows.ids).subspan(size_t(rows.computed + 1), size_t(T)));
    rows.computed += T;
  }
}
void DeviceHead::truncate(int slot, int64_t length) {
  draft::HeadRows& rows = impl_->rows[size_t(slot)];
  rows.truncate(std::min(length, rows.length()));
}
void DeviceHead::copy(int from, int to, int64_t length) {
  Impl& h = *impl_;
  draft::HeadRows& rows = h.rows[size_t(to)];
  rows.copy_from(h.rows[size_t(from)], length);
  const Device device{Device::cuda, h.device};
  const auto copy_part = [&](bf16* data, int64_t of_slot, int64_t planes, int64_t width, int64_t n) {
    if (n == 0) return;
    const auto part = [&](int slot) {
      return Tensor(data + slot * of_slot, DType::bf16, {planes, h.sizes.context, width}, device).slice(1, 0, n);
    };
    ingot::copy({.from = part(from), .to = part(to)}, h.stream);
  };
  copy_part(h.m.slots.features, h.m.slots.of_features, 1, h.c.hidden, length);
  for (bf16* data : {h.m.slots.keys, h.m.slots.values})
    copy_part(data, h.m.slots.of_keys, h.c.kv_heads, h.m.cache_dim, rows.computed);
}

std::vector<int32_t> DeviceHead::draft(int slot, int32_t next, int64_t count) {
  Impl& h = *impl_;
  const gpu::DeviceGuard guard(h.device);
  draft::HeadRows& rows = h.rows[size_t(slot)];
  const int64_t n = rows.length();
  INGOT_CHECK(n >= 1 && 1 <= count && count <= kMostGuesses && n + count <= h.sizes.context,
              "draft head: found a draft of ", count, " tokens behind ", n, ", expected at least 1 of each, at most ",
              kMostGuesses, " guesses, and room for them");
  compute_rows(slot);
  for (int64_t i = 0; i < count; ++i) h.guess(slot, n - 1 + i, next, i);
  // The row of the last token is computed again together with the next tokens, because the kernels used here round
  // differently. Guesses then depend on the tokens alone, not on earlier guesses.
  auto* const guesses = static_cast<State*>(h.host.at(0, DType::u8, {kMostGuesses * int64_t(sizeof(State))}).data);
  gpu::copy_rows({.to = guesses, .from = h.m.guesses, .row_bytes = count * int64_t(sizeof(State)), .device = h.device},
                 h.stream);
  gpu::synchronize({Device::cuda, h.device}, h.stream);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t id = std::clamp(guesses[i].tokens[0], 0, int32_t(h.c.draft_vocab) - 1);
    ids.push_back(h.ids.empty() ? id : h.ids[size_t(id)]);
  }
  return ids;
}
std::vector<float> DeviceHead::last_logits() const {
  std::vector<float> logits(size_t(impl_->c.draft_vocab));
  gpu::synchronize({Device::cuda, impl_->device}, impl_->stream);
  gpu::copy_to_host(logits.data(), impl_->m.logits, int64_t(logits.size()) * 4);
  return logits;
}

}  // namespace ingot::decode
