// Prompts on one GPU and on several. Each GPU is a thread whose kernels run on the CPU, with the CPU's products and
// attention.
#include "ingot/models/decode/prompt/prompt.h"

#include <gtest/gtest.h>

#include "ingot/kernels/attention/attention.h"
#include "ingot/kernels/grouped/grouped.h"
#include "ingot/models/decode/fixtures/emulated_ranks.test.h"
#include "ingot/models/decode/fixtures/family_cases.test.h"

namespace ingot {

// Replace the matrix kernels, which the emulator cannot run.
bool grouped_takes_parts(Device) { return true; }
// Part i of a product sums every parts-th column from column i on.
static void grouped_linear_of_parts(const GroupedLinear& a) {
  const int64_t R = a.x.rows(), K = a.x.cols(), N = a.n;
  std::vector<uint8_t> data(a.w, a.w + row_tile_count(N) * row_tile_bytes(a.format, K));
  const WeightMatrix matrix = weight_tiles_at(data.data(), a.format, 0, N, K);
  std::vector<double> w(size_t(N * K));
  from_device_order(matrix);
  dequantise(matrix, Tensor(w.data(), {N, K}), {});
  for (int64_t part = 0; part < a.parts; ++part)
    for (int64_t r = 0; r < R; ++r)
      for (int64_t n = 0; n < N; ++n) {
        ASSERT_EQ(a.offsets[part], part * R);
        double sum = part == 0 && a.bias != nullptr ? double(a.bias[n]) : 0;
        for (int64_t k = part; k < K; k += a.parts)
          sum += double(float(a.x.ptr<bf16>()[r * a.x.row_stride() + k])) * w[size_t(n * K + k)];
        a.y.ptr<float>()[(part * R + r) * a.y.row_stride() + n] = float(sum);
      }
}
void grouped_linear(const GroupedLinear& a, Stream) {
  if (a.parts > 1) return grouped_linear_of_parts(a);
  const int64_t K = a.x.cols(), N = a.n, bytes = row_tile_count(N) * row_tile_bytes(a.format, K);
  const bool gated = a.y.dtype == DType::bf16;
  std::vector<double> w(size_t(N * K)), y(static_cast<size_t>(N));
  for (int64_t g = 0; g < a.groups; ++g) {
    if (a.offsets[g] == a.offsets[g + 1]) continue;
    std::vector<uint8_t> data(a.w + g * bytes, a.w + (g + 1) * bytes);
    const WeightMatrix matrix = weight_tiles_at(data.data(), a.format, 0, N, K);
    from_device_order(matrix);
    dequantise(matrix, Tensor(w.data(), {N, K}), {});
    for (int64_t r = a.offsets[g]; r < a.offsets[g + 1]; ++r) {
      const bf16* const x = a.x.ptr<bf16>() + r * a.x.row_stride();
      for (int64_t n = 0; n < N; ++n) {
        y[size_t(n)] = a.bias != nullptr ? double(a.bias[g * N + n]) : 0;
        for (int64_t k = 0; k < K; ++k) y[size_t(n)] += double(float(x[k])) * w[size_t(n * K + k)];
      }
      for (int64_t n = 0; n < (gated ? N / 2 : N); ++n) {
        if (!gated) {
          float& to = a.y.ptr<float>()[r * a.y.row_stride() + n];
          to = (a.add ? to : 0) + float(y[size_t(n)]);
          continue;
        }
        const double gate = std::min(y[size_t(2 * n)], double(a.limit)),
                     up = std::clamp(y[size_t(2 * n + 1)], -double(a.limit), double(a.limit));
        a.y.ptr<bf16>()[r * a.y.row_stride() + n] = bf16(float(gate / (1 + std::exp(-a.alpha * gate)) * (up + 1)));
      }
    }
  }
}

namespace decode {
// Computes in fp32, the type that the CPU's attention takes.
void attention_on_host(const Attention& a) {
  const auto wide = [](const Tensor& t, std::vector<float>& memory) {
    for (int64_t r = 0; r < t.size(0); ++r)
      for (int64_t h = 0; h < t.size(1); ++h)
        for (int64_t d = 0; d < t.size(2); ++d)
          memory.push_back(float(t.ptr<bf16>()[r * t.stride[0] + h * t.stride[1] + d]));
    return Tensor(memory.data(), {t.size(0), t.size(1), t.size(2)});
  };
  std::vector<float> q, k, v, out(size_t(a.out.numel()));
  Attention b = a;
  b.q = wide(a.q, q), b.k = wide(a.k, k), b.v = wide(a.v, v);
  b.out = Tensor(out.data(), {a.out.size(0), a.out.size(1), a.out.size(2)});
  attention(b, {});
  std::transform(out.begin(), out.end(), a.out.ptr<bf16>(), [](float v) { return bf16(v); });
}
}  // namespace decode

namespace {

using decode::PromptBuffers;
using decode::Split;
using testing::DecodeCase;
using testing::DecodeModel;
using testing::EmulatedRanks;
using testing::on_threads;

// The prompt buffers of all ranks, connected as RankedModel connects them.
struct Prompts {
  EmulatedRanks gpus;
  std::vector<std::vector<char>> memory;
  std::vector<PromptBuffers> buffers;

  Prompts(const DecodeModel& m, uint32_t room, int count, Split split)
      : Prompts(m.config, m.weights, room, count, split) {}
  Prompts(const DecoderSpec& spec, const DecoderWeights& weights, uint32_t room, int count, Split split)
      : gpus(spec, weights, room, count, split), memory(size_t(count)), buffers(size_t(count)) {
    for (size_t r = 0; r < buffers.size(); ++r) {
      const int64_t bytes = decode::lay_out(spec, room, count > 1, nullptr, buffers[r]);
      memory[r].assign(size_t(bytes) + 256, char(0xff));  // NaN
      decode::lay_out(spec, room, count > 1, testing::Emulated::aligned(memory[r]), buffers[r]);
      std::fill_n(buffers[r].arrived, decode::kMostRouted / 16, 0u);
    }
    for (size_t r = 0; r < buffers.size() && count > 1; ++r) {
      buffers[r].logits = buffers[0].logits + gpus.ranks[r]->buffers.ranks.first_id;
      for (size_t q = 0; q < buffers.size(); ++q)
        for (int sums = 0; sums < 2; ++sums) buffers[r].parts[sums][q] = buffers[q].part[sums];
    }
  }
  void feed(size_t r, std::span<const int32_t> ids, uint32_t head_rows) {
    testing::Emulated& e = *gpus.ranks[r];
    std::copy(ids.begin(), ids.end(), buffers[r].ids);
    run_prompt(e.model, e.buffers, buffers[r],
               {.T = int64_t(ids.size()),
                .position = e.buffers.state->position,
                .head_rows = head_rows,
                .vocab = 0,
                .capacity = e.capacity,
                .device = 0},
               {});
  }
  // Returns the logits of all tokens.
  std::vector<std::vector<double>> extend(std::span<const int32_t> ids) {
    const size_t V = size_t(gpus.c.vocab), T = ids.size();
    if (T == 1) return gpus.extend(ids, 1);
    std::fill_n(buffers[0].logits, T * V, NAN);
    on_threads(gpus.ranks.size(), [&](size_t r) { feed(r, ids, uint32_t(T)); });
    std::vector<std::vector<double>> rows;
    for (size_t t = 0; t < T; ++t) rows.emplace_back(buffers[0].logits + t * V, buffers[0].logits + (t + 1) * V);
    return rows;
  }
  testing::DecodeReference::Choices choices(size_t r, size_t T, size_t t) const {
    if (T == 1) return testing::choices_of(gpus.ranks[r]->buffers, gpus.c.layers, 0);
    const size_t k = size_t(gpus.c.experts_per_token);
    testing::DecodeReference::Choices all(size_t(gpus.c.layers));
    for (size_t l = 0; l < all.size(); ++l)
      for (size_t j = 0; j < k; ++j) all[l].push_back(buffers[r].chosen[(l * T + t) * k + j]);
    return all;
  }
};

void check_case(const DecodeCase& t, int count, Split split) {
  SCOPED_TRACE(::testing::Message() << count << " ranks");
  std::unique_ptr<Prompts> gpus;
  size_t T = 0;
  testing::check_decode(t, [&](const DecodeModel& m, int64_t room) {
    gpus = std::make_unique<Prompts>(m, uint32_t(room), count, split);
    gpus->gpus.use_megakernel(true);
    return testing::DecodeUnderTest{
        .extend =
            [&](std::span<const int32_t> ids) {
              T = ids.size();
              const auto rows = gpus->extend(ids);
              for (size_t r = 1; r < gpus->buffers.size(); ++r) {
                const auto &e = *gpus->gpus.ranks[r], &first = *gpus->gpus.ranks[0];
                EXPECT_EQ(std::memcmp(e.buffers.state, first.buffers.state, sizeof(decode::State)), 0);
                EXPECT_EQ(gpus->gpus.epochs[r], gpus->gpus.epochs[0]);
                if (T == 1) continue;
                for (size_t i = 0; i < T; ++i)  // the residual stream is the same bit for bit
                  EXPECT_EQ(
                      std::memcmp(gpus->buffers[r].x + i * size_t(e.buffers.x_stride),
                                  gpus->buffers[0].x + i * size_t(first.buffers.x_stride), size_t(e.c.hidden) * 4),
                      0);
              }
              return rows;
            },
        .choices =
            [&](size_t i) {
              const auto chosen = gpus->choices(0, T, i);
              for (size_t r = 1; r < gpus->buffers.size(); ++r) EXPECT_EQ(gpus->choices(r, T, i), chosen);
              return chosen;
            },
        .state = [&] { return *gpus->gpus.ranks[0]->buffers.state; },
        .logits_of_token = [&] { return gpus->gpus.ranks[0]->rows_of_logits(1)[0]; }};
  });
}

// A prompt longer than the window that wraps around the end of a circular cache, with single tokens between and after
// prompts; the cache has room for 16 tokens at a time.
DecodeCase prompt_case(const GptOssConfig& c, WeightFormat dense) {
  if (testing::kSanitized) return {name_of(dense), c, dense, WeightFormat::mxfp4, 24, {16, 1, 6}};
  return {name_of(dense), c, dense, WeightFormat::mxfp4, 38, {16, 1, 15, 3}};
}
GptOssConfig two_heads() { return testing::decode_config(96, 8, 2, 16, 96, 6, 2, 5, 2); }
GptOssConfig four_heads() { return testing::decode_config(64, 16, 4, 16, 288, 4, 2, 5, 2); }

std::vector<int32_t> prompt_ids(const GptOssConfig& c, int64_t n) {
  std::vector<int32_t> ids(size_t(n), 0);
  testing::fill_ids(Tensor(ids.data(), {n}), 3, c.vocab);
  return ids;
}

TEST(GptOssPromptsEmulated, OneGpuIsTheModel) {
  check_case(prompt_case(two_heads(), WeightFormat::bf16), 1, Split::tensor);
}
TEST(GptOssPromptsEmulated, OneGpuIsTheModelOfRoundedInputs) {
  DecodeCase t = prompt_case(two_heads(), WeightFormat::bf16);
  t.config.e4m3_inputs = true;
  check_case(t, 1, Split::tensor);
  // The inputs of the last layer's products are rounded already: rounding them again changes nothing.
  const DecodeModel m(t.config, t.dense, t.experts, 7);
  Prompts gpu(m, 16, 1, Split::tensor);
  gpu.extend(prompt_ids(t.config, 16));
  for (const auto& [rows, width, stride] :
       {std::tuple{gpu.buffers[0].gathered, t.config.hidden, weight_tile_padded_cols(t.config.hidden)},
        {gpu.buffers[0].hidden, t.config.intermediate, weight_tile_padded_cols(t.config.intermediate)}})
    for (int64_t s = 0; s < 16 * t.config.experts_per_token; ++s) {
      std::vector<float> row(rows + s * stride, rows + s * stride + width), again = row;
      round_to_e4m3_blocks(again.data(), width);
      EXPECT_EQ(again, row) << s;
    }
}
TEST(GptOssPromptsEmulated, TwoGpusAreTheModel) {
  for (const WeightFormat dense : {WeightFormat::bf16, WeightFormat::fp8})
    // the sanitized build covers fp8 with more than two GPUs, and the other format with two
    if (!testing::kSanitized || dense == WeightFormat::fp8)
      check_case(prompt_case(two_heads(), dense), 2, Split::tensor);
}
TEST(GptOssPromptsEmulated, FourGpusAreTheModel) {
  check_case(prompt_case(four_heads(), WeightFormat::bf16), 4, Split::tensor);
}
TEST(GptOssPromptsEmulated, AttentionOnOneGpuAndExpertsOnTheRemainingGpusComputeTheModel) {
  if (!testing::kSanitized) check_case(prompt_case(four_heads(), WeightFormat::bf16), 2, Split::attention_experts);
  check_case(prompt_case(four_heads(), WeightFormat::bf16), 5, Split::attention_experts);
}

// Parts without logits, and parts with the logits of the last token alone.
TEST(GptOssPromptsEmulated, APromptInPartsGivesTheLogitsOfTheWholePrompt) {
  const DecodeCase t = prompt_case(two_heads(), WeightFormat::bf16);
  const DecodeModel m(t.config, t.dense, t.experts, 7);
  const std::vector<int32_t> ids = prompt_ids(t.config, 16);
  std::vector<std::vector<double>> rows;
  for (const size_t cut : {size_t(0), size_t(7)}) {
    Prompts gpus(m, 16, 2, Split::tensor);
    for (const auto& part : {std::span(ids).first(cut), std::span(ids).subspan(cut)}) {
      if (part.empty()) continue;
      const bool last = part.data() + part.size() == ids.data() + ids.size();
      on_threads(2, [&](size_t r) { gpus.feed(r, part, last ? 1 : 0); });
    }
    for (const auto& e : gpus.gpus.ranks) EXPECT_EQ(e->buffers.state->position, 16);
    rows.push_back(gpus.gpus.ranks[0]->rows_of_logits(1)[0]);
    EXPECT_EQ(gpus.gpus.ranks[1]->buffers.state->tokens[0],
              std::max_element(rows.back().begin(), rows.back().end()) - rows.back().begin());
  }
  for (size_t v = 0; v < rows[0].size(); ++v)
    EXPECT_NEAR(rows[0][v], rows[1][v], 0.1);  // logits with a standard deviation of 4, in 8 bits
}

// Two GPUs that a test disturbs, and the result of a prompt of 16 tokens on two undisturbed GPUs.
struct TwoGpus {
  DecodeModel m{two_heads(), WeightFormat::bf16, WeightFormat::mxfp4, 7};
  std::vector<int32_t> ids = prompt_ids(two_heads(), 16);
  Prompts gpus{m, 16, 2, Split::tensor};
  std::vector<std::vector<double>> want = Prompts(m, 16, 2, Split::tensor).extend(ids);
};

TEST(GptOssPromptsEmulated, AGpuThatNeverBeginsIsNamedAndTheNextPromptIsRight) {
  TwoGpus two;
  auto& gpus = two.gpus;
  const auto& ids = two.ids;
  gpus.gpus.set_limit(1'000'000);
  on_threads(2, [&](size_t r) {
    if (r == 0) gpus.feed(r, ids, 1);
  });
  EXPECT_EQ(gpus.gpus.ranks[0]->record.state, gpu::kTimedOut);
  EXPECT_EQ(gpus.gpus.ranks[0]->record.what, megakernel::wait_for_rank(2, 1));
  EXPECT_EQ(gpus.gpus.ranks[0]->buffers.state->position, 0);
  EXPECT_EQ(gpus.gpus.ranks[1]->stop, gpu::kStoppedByPeer);
  gpus.gpus.reset();
  gpus.gpus.set_limit(1'000'000'000'000);
  EXPECT_EQ(gpus.extend(ids), two.want);
}

// As in DeviceModel::warm_up_prompt().
TEST(GptOssPromptsEmulated, AWarmUpThatWaitsForNoRankLeavesNoState) {
  TwoGpus two;
  auto& gpus = two.gpus;
  const auto& ids = two.ids;
  for (const auto& e : gpus.gpus.ranks) e->stop = ~0u;
  for (const uint32_t head_rows : {0u, 1u, 16u}) on_threads(2, [&](size_t r) { gpus.feed(r, ids, head_rows); });
  for (const auto& e : gpus.gpus.ranks) {
    EXPECT_EQ(e->buffers.state->position, 0);
    EXPECT_EQ(e->record.state, gpu::kRunning);
  }
  gpus.gpus.reset();
  EXPECT_EQ(gpus.extend(ids), two.want);
}

// A model of a family other than GPT-OSS on one GPU.
struct FamilyPrompts {
  testing::Emulated gpu;
  std::vector<char> memory;
  PromptBuffers buffers;
  size_t T = 0;  // tokens of the last step

  FamilyPrompts(const testing::RandomModel& m, uint32_t room) : gpu(m.spec, m.weights, room) {
    memory.assign(size_t(decode::lay_out(m.spec, room, false, nullptr, buffers)) + 256, char(0xff));  // NaN
    decode::lay_out(m.spec, room, false, testing::Emulated::aligned(memory), buffers);
    std::fill_n(buffers.arrived, decode::kMostRouted / 16, 0u);
  }
  std::vector<std::vector<double>> extend(std::span<const int32_t> ids) {
    T = ids.size();
    if (T == 1) return gpu.extend(ids, 1);
    const size_t V = size_t(gpu.c.vocab);
    std::fill_n(buffers.logits, T * V, NAN);
    std::copy(ids.begin(), ids.end(), buffers.ids);
    run_prompt(gpu.model, gpu.buffers, buffers,
               {.T = int64_t(T),
                .position = gpu.buffers.state->position,
                .head_rows = uint32_t(T),
                .vocab = 0,
                .capacity = gpu.capacity,
                .device = 0},
               {});
    std::vector<std::vector<double>> rows;
    for (size_t t = 0; t < T; ++t) rows.emplace_back(buffers.logits + t * V, buffers.logits + (t + 1) * V);
    return rows;
  }
  testing::Definition::Choices choices(size_t t) const {
    if (T == 1) return testing::choices_of(gpu.buffers, gpu.c.layers, 0);
    const size_t k = size_t(gpu.c.experts_per_token);
    testing::Definition::Choices all(size_t(gpu.c.layers));
    for (size_t l = 0; l < all.size(); ++l)
      for (size_t j = 0; j < k && gpu.c.layer[l].experts; ++j) all[l].push_back(buffers.chosen[(l * T + t) * k + j]);
    return all;
  }
};

TEST(FamiliesPromptsEmulated, EveryFamilyIsTheModel) {
  int count = 0;
  for (const testing::FamilyCase& t : testing::family_cases()) {
    if (t.batches.empty() || !unsupported_reason(t.spec, DecodePath::prompt).empty() || !decode::prompts_take(t.spec))
      continue;
    ++count;
    testing::check_family(t, [](const testing::RandomModel& m, int64_t room) {
      const auto gpu = std::make_shared<FamilyPrompts>(m, uint32_t(room));
      return testing::DecodeUnderTest{.extend = [gpu](std::span<const int32_t> ids) { return gpu->extend(ids); },
                                      .choices = [gpu](size_t i) { return gpu->choices(i); },
                                      .state = [gpu] { return *gpu->gpu.buffers.state; },
                                      .logits_of_token = [gpu] { return gpu->gpu.rows_of_logits(1)[0]; }};
    });
  }
  EXPECT_GE(count, 12);
}

TEST(FamiliesPromptsEmulated, TwoGpusAreTheModel) {
  DecoderSpec dense = testing::family_spec({96, 8, 2, 32, 130}), mixed = testing::family_spec({64, 8, 2, 32, 130});
  dense.qk_norm = dense.qkv_bias = true, dense.layer[0].window = 5, dense.embedding_scale = 3;
  mixed.layer[1].experts = true, mixed.experts = 5, mixed.experts_per_token = 2;
  for (const testing::FamilyCase& t :
       {testing::FamilyCase{"dense", dense, 16, {9, 1, 5}}, {"mixed", mixed, 16, {9, 1, 5}}})
    for (const Split split : {Split::tensor, Split::attention_experts}) {
      SCOPED_TRACE(split == Split::tensor ? "tensor" : "attention and experts");
      testing::check_family(t, [&](const testing::RandomModel& m, int64_t room) {
        const auto gpus = std::make_shared<Prompts>(m.spec, m.weights, uint32_t(room), 2, split);
        const auto T = std::make_shared<size_t>(0);  // tokens of the last step
        return testing::DecodeUnderTest{
            .extend =
                [gpus, T](std::span<const int32_t> ids) {
                  *T = ids.size();
                  return gpus->extend(ids);
                },
            .choices = [gpus, T](size_t i) { return gpus->choices(1, *T, i); },
            .state = [gpus] { return *gpus->gpus.ranks[1]->buffers.state; },
            .logits_of_token = [gpus] { return gpus->gpus.ranks[0]->rows_of_logits(1)[0]; }};
      });
    }
}

}  // namespace
}  // namespace ingot
