#include "ingot/engines/generate/accuracy.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ingot/engines/generate/sequence_losses.h"
#include "ingot/models/decode/cpu/decoder.h"
#include "ingot/models/gpt_oss/archive.h"
#include "ingot/models/gpt_oss/forms.h"
#include "ingot/models/gpt_oss/random_checkpoint.test.h"
#include "ingot/models/gpt_oss/weights.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::GptOssCheckpoint;
using testing::TemporaryDirectory;

TEST(accuracy, every_figure_of_two_small_distributions_equals_the_one_computed_by_hand) {
  // p = (1/2, 1/4, 1/8, 1/8), q = (1/4, 1/2, 1/8, 1/8): logits log(8 p) and log(8 q).
  const float ln2 = std::log(2.f);
  const float p[4] = {2 * ln2, ln2, 0, 0}, q[4] = {ln2, 2 * ln2, 0, 0};
  AccuracyMeter meter;
  meter.add(p, q, 4, 1);
  const Accuracy a = meter.result();
  EXPECT_EQ(a.tokens, 1);
  EXPECT_NEAR(a.reference_loss, std::log(4.), 1e-6);
  EXPECT_NEAR(a.loss, std::log(2.), 1e-6);
  EXPECT_EQ(a.top1, 0);
  EXPECT_EQ(a.confident, 0);
  EXPECT_EQ(a.confident_top1, 1);  // no position was confident, so no confident position is lost
  EXPECT_EQ(a.top5, 1);            // the model has only four ids
  EXPECT_NEAR(a.kl, 0.5 * std::log(2.) + 0.25 * std::log(0.5), 1e-6);
  EXPECT_NEAR(a.cosine, 4. / 5, 1e-6);
  EXPECT_EQ(a.mean_rank, 2);
}

TEST(accuracy, ranks_and_overlaps_count_ids_and_ties_go_to_the_lower_one) {
  std::vector<float> p(20), q(20);
  for (int i = 0; i < 20; ++i) p[size_t(i)] = float(20 - i), q[size_t(i)] = float(20 - i);
  p[0] = 60;  // a confident position
  std::swap(q[0], q[7]);
  AccuracyMeter meter;
  meter.add(p.data(), q.data(), 20, 0);
  Accuracy a = meter.result();
  EXPECT_EQ(a.confident, 1);
  EXPECT_EQ(a.confident_top1, 0);
  EXPECT_DOUBLE_EQ(a.top5, 0.8);
  EXPECT_DOUBLE_EQ(a.top10, 1);
  EXPECT_EQ(a.mean_rank, 8);
  const std::vector<float> flat(20, 1.f);
  meter.add(flat.data(), flat.data(), 20, 3);
  a = meter.result();
  EXPECT_DOUBLE_EQ(a.top1, 0.5);
  EXPECT_DOUBLE_EQ(a.mean_rank, 4.5);
  EXPECT_NEAR(a.reference_loss, std::log(20.) / 2, 1e-6);
}

struct Models {
  TemporaryDirectory dir;
  GptOssConfig config;
  GptOssWeights weights;
  std::vector<std::vector<int32_t>> lists;
  Models() {
    GptOssCheckpoint().write(dir / "m", {.experts = WeightFormat::bf16});
    config = read_gpt_oss_config(dir / "m");
    weights = load_gpt_oss(dir / "m", config);
    for (const int64_t n : {40, 2, 17}) {
      lists.emplace_back(size_t(n));
      testing::fill_ids(Tensor(lists.back().data(), {n}), uint64_t(n), config.vocab);
    }
  }
  std::unique_ptr<Decoder> decoder(const GptOssWeights& w, int64_t batch = 8) const {
    return make_decoder(config, w, {.context = 40, .batch = batch});
  }
};

TEST(accuracy, a_model_agrees_with_itself_and_its_loss_equals_eval_s) {
  const Models m;
  const auto a = m.decoder(m.weights), b = m.decoder(m.weights);
  const Accuracy r = compare_models(*a, *b, m.lists);
  EXPECT_EQ(r.tokens, 39 + 1 + 16);
  EXPECT_EQ(r.top1, 1);
  EXPECT_EQ(r.top10, 1);
  EXPECT_EQ(r.mean_rank, 1);
  EXPECT_EQ(r.kl, 0);
  EXPECT_NEAR(r.cosine, 1, 1e-12);
  double sum = 0;
  for (const auto& ids : m.lists)
    for (const double loss : sequence_losses(*a, ids)) sum += loss;
  EXPECT_NEAR(r.loss, sum / 56, 1e-12);
  EXPECT_EQ(r.loss, r.reference_loss);
}

// The effect of 4-bit numbers and a scale of 32 numbers: more than the rounding of fp32, far less than a different
// model.
TEST(accuracy, experts_inputs_in_e4m3_cost_little_but_more_than_zero) {
  const Models m;
  GptOssConfig rounded = m.config;
  rounded.e4m3_inputs = true;
  const auto a = m.decoder(m.weights), b = make_decoder(rounded, m.weights, {.context = 40, .batch = 8}),
             one = make_decoder(rounded, m.weights, {.context = 40, .batch = 1});
  const Accuracy r = compare_models(*a, *b, m.lists);
  EXPECT_GT(r.kl, 1e-7);
  EXPECT_LT(r.kl, 3e-2);
  EXPECT_LT(r.cosine, 1 - 1e-7);
  EXPECT_GT(r.cosine, 0.99);
  RecordProperty("kl", std::to_string(r.kl)), RecordProperty("cosine", std::to_string(r.cosine));
  // Batches make no difference, except where a sum rounds differently.
  EXPECT_LT(compare_models(*b, *one, m.lists).kl, r.kl);
}

TEST(accuracy, an_id_outside_the_vocabulary_is_refused_before_its_logit_is_read) {
  const Models m;
  const auto a = m.decoder(m.weights), b = m.decoder(m.weights);
  for (const int32_t id : {-1, int32_t(m.config.vocab), INT32_MAX}) {
    std::vector<std::vector<int32_t>> lists = m.lists;
    lists[0][8] = id;  // the next token after a batch's last token
    const std::string error = testing::error_of([&] { compare_models(*a, *b, lists); });
    EXPECT_NE(error.find("bad data: found id " + std::to_string(id) + " at position 8, expected 0 to "),
              std::string::npos)
        << error;
  }
}

TEST(accuracy, fewer_bits_cost_more_and_each_component_is_changed_alone) {
  const Models m;
  const auto reference = m.decoder(m.weights);
  const auto kl = [&](const GptOssComponents& f) {
    const GptOssWeights w = with_components(m.weights, f);
    return compare_models(*reference, *m.decoder(w), m.lists).kl;
  };
  const auto fp8 = WeightFormat::fp8, fp4 = WeightFormat::mxfp4;
  EXPECT_EQ(kl({}), 0);
  EXPECT_EQ(kl({.qkv = WeightFormat::bf16}), 0);
  for (std::optional<WeightFormat> GptOssComponents::*part :
       {&GptOssComponents::qkv, &GptOssComponents::head, &GptOssComponents::o, &GptOssComponents::gate_up,
        &GptOssComponents::down}) {
    GptOssComponents narrow, narrower;
    narrow.*part = fp8, narrower.*part = fp4;
    const double a = kl(narrow), b = kl(narrower);
    EXPECT_GT(a, 0);
    EXPECT_GT(b, a);
  }
}

TEST(accuracy, an_archive_of_a_form_is_the_model_with_the_components_of_the_form) {
  const Models m;
  const auto fp8 = WeightFormat::fp8, fp4 = WeightFormat::mxfp4;
  convert_gpt_oss(m.dir / "m", m.dir / "x", {.forms = {fp8, fp4}});
  const GptOssWeights archive = load_gpt_oss(m.dir / "x", m.config);
  const GptOssWeights narrow =
      with_components(m.weights, {.qkv = fp8, .o = fp8, .head = fp8, .gate_up = fp4, .down = fp4});
  const Accuracy r = compare_models(*m.decoder(narrow), *m.decoder(archive), m.lists);
  EXPECT_LT(r.kl, 1e-9);  // the order of sums differs
  EXPECT_NEAR(r.loss, r.reference_loss, 1e-5);
}

}  // namespace
}  // namespace ingot
