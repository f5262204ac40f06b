// Compares GGUF files with the safetensors checkpoint of the same numbers.
#include "ingot/io/formats/gguf.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ingot/io/formats/gguf_writer.test.h"
#include "ingot/models/checkpoint/stored_tensors.h"
#include "ingot/models/gpt_oss/archive.h"
#include "ingot/models/gpt_oss/random_checkpoint.test.h"
#include "ingot/models/gpt_oss/weights.h"
#include "ingot/models/registry.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/testing/testing.h"
#include "ingot/text/byte_bpe.h"

namespace ingot {
namespace {

using testing::error_of;
using testing::GgufWriter;
using testing::GptOssCheckpoint;
using testing::TemporaryDirectory;
using Tensors = std::map<std::string, NamedTensor>;

bool holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }
enum Type : uint32_t { kF32 = 0, kF16 = 1, kQ4_0 = 2, kQ8_0 = 8, kQ8_1 = 9, kBf16 = 30, kMxfp4 = 39 };

// --- numbers as ggml stores them
std::string encode(const std::vector<float>& x, uint32_t type) {
  std::string out;
  const auto put = [&](auto n) { out += GgufWriter::number(n); };
  if (type == kQ8_0) {
    for (size_t k = 0; k < x.size(); k += 32) {
      float most = 0;
      for (size_t i = 0; i < 32; ++i) most = std::max(most, std::abs(x[k + i]));
      const f16 d(most / 127);
      put(d.bits);
      for (size_t i = 0; i < 32; ++i) put(int8_t(most > 0 ? std::lround(x[k + i] / float(d)) : 0));
    }
    return out;
  }
  if (type == kQ4_0) {  // the number furthest from 0 becomes -8 steps
    for (size_t k = 0; k < x.size(); k += 32) {
      const auto first = x.begin() + ptrdiff_t(k);
      const float most =
          *std::max_element(first, first + 32, [](float a, float b) { return std::abs(a) < std::abs(b); });
      const f16 d(most / -8);
      put(d.bits);
      const auto code = [&](size_t i) {
        return most != 0 ? uint8_t(std::clamp<long>(std::lround(x[k + i] / float(d)) + 8, 0, 15)) : uint8_t(8);
      };
      for (size_t i = 0; i < 16; ++i) put(uint8_t(code(i) | code(i + 16) << 4));
    }
    return out;
  }
  for (const float v : x) {
    if (type == kF32) put(v);
    if (type == kF16) put(f16(v).bits);
    if (type == kBf16) put(bf16(v).bits);
  }
  return out;
}
// The shape of a tensor and its numbers in row-major order.
struct Numbers {
  std::vector<int64_t> shape;
  std::vector<float> values;
};
Numbers numbers_of(const Tensor& t) {
  Numbers out;
  out.shape.assign(t.shape.dim, t.shape.dim + t.shape.rank);
  for (const double v : testing::values(t)) out.values.push_back(float(v));
  return out;
}
// Every `step`-th index of the second dimension, beginning at `begin`.
Numbers turns_of(const Numbers& all, int64_t begin, int64_t step) {
  Numbers out;
  out.shape = all.shape;
  out.shape[1] /= step;
  const int64_t inner = all.shape.size() > 2 ? all.shape[2] : 1;
  for (int64_t e = 0; e < all.shape[0]; ++e)
    for (int64_t n = begin; n < all.shape[1]; n += step)
      for (int64_t k = 0; k < inner; ++k) out.values.push_back(all.values[size_t((e * all.shape[1] + n) * inner + k)]);
  return out;
}
// Converts rows begin, begin + step, ... of each expert, given as blocks and scales of a checkpoint, to ggml's order:
// of each block a scale, then numbers 0 and 16, 1 and 17, ...
std::string mx_of(const Tensor& blocks, const Tensor& scales, int64_t begin, int64_t step) {
  const auto *codes = blocks.ptr<uint8_t>(), *s = scales.ptr<uint8_t>();
  std::string out;
  const int64_t E = scales.size(0), N = scales.size(1), G = scales.size(2);
  for (int64_t e = 0; e < E; ++e)
    for (int64_t n = begin; n < N; n += step)
      for (int64_t g = 0; g < G; ++g) {
        const int64_t at = (e * N + n) * G + g;
        const auto code = [&](int i) { return codes[at * 16 + i / 2] >> (i % 2 * 4) & 15; };
        out += char(s[at]);
        for (int i = 0; i < 16; ++i) out += char(code(i) | code(i + 16) << 4);
      }
  return out;
}

struct Forms {
  uint32_t dense = kBf16, experts = kMxfp4, vectors = kF32;
};
using Change = std::function<void(std::string& name, uint32_t& type, std::vector<int64_t>& shape, std::string& bytes)>;

void add_keys(GgufWriter& w) {
  using C = GptOssCheckpoint;
  w.key("general.architecture", "gpt-oss").key("gpt-oss.block_count", uint32_t(C::kLayers));
  w.key("gpt-oss.context_length", uint32_t(131072)).key("gpt-oss.embedding_length", uint32_t(C::kHidden));
  w.key("gpt-oss.feed_forward_length", uint32_t(C::kIntermediate));
  w.key("gpt-oss.expert_feed_forward_length", uint32_t(C::kIntermediate));
  w.key("gpt-oss.attention.head_count", uint32_t(C::kHeads))
      .key("gpt-oss.attention.head_count_kv", uint32_t(C::kKvHeads));
  w.key("gpt-oss.attention.key_length", uint32_t(C::kHeadDim))
      .key("gpt-oss.attention.value_length", uint32_t(C::kHeadDim));
  w.key("gpt-oss.attention.layer_norm_rms_epsilon", 1e-5f).key("gpt-oss.attention.sliding_window", uint32_t(128));
  w.key("gpt-oss.expert_count", uint32_t(C::kExperts)).key("gpt-oss.expert_used_count", uint32_t(C::kPerToken));
  w.key("gpt-oss.rope.freq_base", 150000.f).key("gpt-oss.rope.scaling.type", "yarn");
  w.key("gpt-oss.rope.scaling.factor", 32.f).key("gpt-oss.rope.scaling.original_context_length", uint32_t(4096));
  w.key("tokenizer.ggml.eos_token_id", uint32_t(2));
}
// Adds the tensors under llama.cpp's names, in the order of the checkpoint.
void add_tensors(GgufWriter& w, const Tensors& tensors, const Forms& forms, const Change& change) {
  const auto add = [&](std::string name, uint32_t type, std::vector<int64_t> shape, std::string bytes) {
    if (change) change(name, type, shape, bytes);
    if (!name.empty()) w.tensor(name, type, shape, bytes);
  };
  const auto plain = [&](const std::string& name, const Numbers& n, uint32_t type) {
    add(name, type, n.shape, encode(n.values, type));
  };
  const auto get = [&](const std::string& name) { return tensors.at(name).tensor; };
  plain("token_embd.weight", numbers_of(get("model.embed_tokens.weight")), forms.dense);
  plain("output_norm.weight", numbers_of(get("model.norm.weight")), forms.vectors);
  plain("output.weight", numbers_of(get("lm_head.weight")), forms.dense);
  for (int64_t l = 0; l < GptOssCheckpoint::kLayers; ++l) {
    const std::string from = "model.layers." + std::to_string(l) + ".", to = "blk." + std::to_string(l) + ".";
    const std::pair<const char*, const char*> matrices[] = {{"self_attn.q_proj", "attn_q"},
                                                            {"self_attn.k_proj", "attn_k"},
                                                            {"self_attn.v_proj", "attn_v"},
                                                            {"self_attn.o_proj", "attn_output"},
                                                            {"mlp.router", "ffn_gate_inp"}};
    for (const auto& [hf, ours] : matrices) {
      plain(to + ours + ".weight", numbers_of(get(from + hf + ".weight")), forms.dense);
      plain(to + ours + ".bias", numbers_of(get(from + hf + ".bias")), forms.vectors);
    }
    plain(to + "attn_norm.weight", numbers_of(get(from + "input_layernorm.weight")), forms.vectors);
    plain(to + "post_attention_norm.weight", numbers_of(get(from + "post_attention_layernorm.weight")), forms.vectors);
    plain(to + "attn_sinks.weight", numbers_of(get(from + "self_attn.sinks")), forms.vectors);
    for (const auto& [hf, ours, begin, step] : {std::tuple{"gate_up_proj", "ffn_gate_exps", 0, 2},
                                                {"gate_up_proj", "ffn_up_exps", 1, 2},
                                                {"down_proj", "ffn_down_exps", 0, 1}}) {
      const std::string name = from + "mlp.experts." + hf;
      plain(to + ours + ".bias", turns_of(numbers_of(get(name + "_bias")), begin, step), forms.vectors);
      const Tensor blocks = get(name + "_blocks"), scales = get(name + "_scales");
      const std::vector<int64_t> shape = {scales.size(0), scales.size(1) / step, scales.size(2) * 32};
      if (forms.experts == kMxfp4) {
        add(to + ours + ".weight", kMxfp4, shape, mx_of(blocks, scales, begin, step));
        continue;
      }
      std::vector<float> wide(size_t(scales.numel() * 32));
      for (int64_t e = 0; e < scales.size(0); ++e)
        dequantise(
            WeightMatrix(WeightFormat::mxfp4, blocks.select(0, e), scales.select(0, e)),
            Tensor(wide.data() + e * scales.size(1) * scales.size(2) * 32, {scales.size(1), scales.size(2) * 32}), {});
      plain(to + ours + ".weight", turns_of({{scales.size(0), scales.size(1), scales.size(2) * 32}, wide}, begin, step),
            forms.experts);
    }
  }
}

// The checkpoint as a directory, and its tensors, from which other files are written.
struct Source {
  TemporaryDirectory dir;
  GptOssCheckpoint checkpoint;
  Tensors tensors;
  GptOssConfig config;
  Source() {
    checkpoint.write(dir / "m", {.damage = [&](Tensors& t, std::string&) { tensors = t; }});
    config = read_gpt_oss_config(dir / "m");
  }
  std::string gguf(const Forms& forms = {}, const Change& change = {},
                   const std::function<void(GgufWriter&)>& keys = add_keys) {
    GgufWriter w;
    keys(w);
    add_tensors(w, tensors, forms, change);
    write_file(dir / "m.gguf", w.bytes());
    return dir / "m.gguf";
  }
};

std::vector<float> wide(const WeightMatrix& w) {
  const int64_t experts = w.is_bank() ? w.data.size(0) : 1, rows = w.rows(), cols = w.cols();
  std::vector<float> out(size_t(experts * rows * cols));
  for (int64_t e = 0; e < experts; ++e)
    dequantise(w.is_bank() ? w.at(e) : w, Tensor(out.data() + e * rows * cols, {rows, cols}), {});
  return out;
}
void expect_near(const std::vector<float>& found, const std::vector<float>& expected, double relative,
                 double of_block) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t k = 0; k < found.size(); k += 32) {
    double most = 0;
    for (size_t i = k; i < std::min(k + 32, found.size()); ++i) most = std::max(most, double(std::abs(expected[i])));
    for (size_t i = k; i < std::min(k + 32, found.size()); ++i)
      ASSERT_LE(std::abs(double(found[i]) - expected[i]), relative * std::abs(expected[i]) + of_block * most) << i;
  }
}
void expect_weights_near(const GptOssWeights& a, const GptOssWeights& b, double relative, double of_block) {
  expect_near(wide(a.embed), wide(b.embed), relative, of_block);
  expect_near(wide(a.head), wide(b.head), relative, of_block);
  EXPECT_EQ(testing::values(a.norm), testing::values(b.norm));
  for (size_t l = 0; l < b.layers.size(); ++l) {
    const GptOssLayer &x = a.layers[l], &y = b.layers[l];
    for (WeightMatrix GptOssLayer::*part :
         {&GptOssLayer::qkv, &GptOssLayer::o, &GptOssLayer::router, &GptOssLayer::gate_up, &GptOssLayer::down})
      expect_near(wide(x.*part), wide(y.*part), relative, of_block);
    for (Tensor GptOssLayer::*part :
         {&GptOssLayer::attn_norm, &GptOssLayer::mlp_norm, &GptOssLayer::b_qkv, &GptOssLayer::b_o,
          &GptOssLayer::b_router, &GptOssLayer::sinks, &GptOssLayer::b_gate_up, &GptOssLayer::b_down})
      EXPECT_EQ(testing::values(x.*part), testing::values(y.*part));
  }
}

TEST(gpt_oss_gguf, the_same_numbers_give_the_same_model_bit_for_bit) {
  Source s;
  const GptOssWeights want = load_gpt_oss(s.dir / "m", s.config);
  const std::string path = s.gguf();
  ASSERT_TRUE(is_gpt_oss(path));
  const GptOssConfig config = read_gpt_oss_config(path);
  EXPECT_EQ(to_json(config), to_json(s.config));
  EXPECT_EQ(gpt_oss_weight_bytes(path, config), want.bytes());
  const GptOssWeights found = load_gpt_oss(path, config);
  ASSERT_EQ(found.bytes(), want.bytes());
  EXPECT_EQ(found.layers[0].gate_up.format, WeightFormat::mxfp4);
  EXPECT_EQ(std::memcmp(found.embed.data.data, want.embed.data.data, size_t(want.bytes())), 0);
  EXPECT_EQ(load_gpt_oss(path, config, {.layers = 1}).layers.size(), 1u);
}

TEST(gpt_oss_gguf, a_directory_without_safetensors_stands_for_its_gguf_file) {
  Source s;
  create_directories(s.dir / "only");
  rename_path(s.gguf(), s.dir / "only/m.gguf");
  const auto same_as_file = [&](const std::string& directory) {
    ASSERT_TRUE(is_gpt_oss(directory));
    EXPECT_STREQ(model_kind_of(directory).name, "gpt-oss");
    EXPECT_EQ(to_json(read_gpt_oss_config(directory)), to_json(s.config));
    EXPECT_EQ(gpt_oss_weight_bytes(directory, s.config), gpt_oss_weight_bytes(s.dir / "m", s.config));
    const GptOssWeights want = load_gpt_oss(s.dir / "m", s.config), found = load_gpt_oss(directory, s.config);
    ASSERT_EQ(found.bytes(), want.bytes());
    EXPECT_EQ(std::memcmp(found.embed.data.data, want.embed.data.data, size_t(want.bytes())), 0);
    convert_gpt_oss(s.dir / "m", s.dir / "a");
    convert_gpt_oss(directory, s.dir / "b");
    EXPECT_EQ(read_file(s.dir / "a"), read_file(s.dir / "b"));
  };
  same_as_file(s.dir / "only");
  write_file(s.dir / "only/config.json", read_file(s.dir / "m/config.json"));
  same_as_file(s.dir / "only");  // as in repositories of GGUF files
  write_file(s.dir / "only/other.gguf", "");
  EXPECT_TRUE(holds(error_of([&] { open_model(s.dir / "only"); }), "found 2 GGUF models, expected one of them by its"));
  EXPECT_EQ(checkpoint_source(s.dir / "m"), s.dir / "m");
  write_file(s.dir / "m/other.gguf", "");
  EXPECT_EQ(checkpoint_source(s.dir / "m"), s.dir / "m");  // safetensors take precedence
}

TEST(gpt_oss_gguf, archives_from_gguf_equal_archives_from_the_checkpoint) {
  Source s;
  const std::string path = s.gguf();
  for (const GptOssForms& forms : {GptOssForms{}, {WeightFormat::fp8, WeightFormat::bf16}}) {
    convert_gpt_oss(s.dir / "m", s.dir / "a", {.forms = forms});
    convert_gpt_oss(path, s.dir / "b", {.forms = forms});
    EXPECT_EQ(read_file(s.dir / "a"), read_file(s.dir / "b"));
  }
}

TEST(gpt_oss_gguf, every_type_gives_the_numbers_it_can_hold) {
  Source s;
  const GptOssWeights want = load_gpt_oss(s.dir / "m", s.config);
  const auto load = [&](const Forms& forms) { return load_gpt_oss(s.gguf(forms), s.config); };
  // bf16 and mxfp4 fit into all of these formats; f16 loses numbers below its smallest normal number, 2^-14 in steps of
  // 2^-24.
  expect_weights_near(load({kF32, kF32, kF32}), want, 0, 0);
  EXPECT_EQ(load({kF32, kF32, kF32}).layers[0].qkv.format, WeightFormat::f32);
  expect_weights_near(load({kBf16, kBf16, kBf16}), want, 0, 0);
  EXPECT_EQ(load({kBf16, kBf16, kBf16}).layers[0].down.format, WeightFormat::bf16);
  expect_weights_near(load({kF16, kF16, kF32}), want, 0, std::exp2(-16));
  // The error of Q8_0: half a step of the block's largest number / 127, the rounding of the step to f16, and the
  // rounding of the result to bf16.
  const double step = 0.5 / 127 + std::exp2(-11);
  expect_weights_near(load({kQ8_0, kQ8_0, kF32}), want, std::exp2(-8), step * (1 + std::exp2(-8)));
  // The error of Q4_0: a step is an eighth of the largest number, and a number of the opposite sign may be off by a
  // whole step.
  const double coarse = 0.125 + std::exp2(-11);
  expect_weights_near(load({kQ4_0, kQ4_0, kF32}), want, std::exp2(-8), coarse * (1 + std::exp2(-8)));
  EXPECT_EQ(load({kQ4_0, kMxfp4, kF32}).layers[0].qkv.format, WeightFormat::bf16);
  EXPECT_EQ(load({kQ4_0, kMxfp4, kF32}).layers[0].down.format, WeightFormat::mxfp4);
  expect_weights_near(load({kBf16, kMxfp4, kBf16}), want, 0, 0);
}

TEST(gpt_oss_gguf, matrices_may_have_types_of_their_own) {
  Source s;
  const GptOssWeights want = load_gpt_oss(s.dir / "m", s.config);
  const std::string path = s.gguf({}, [&](std::string& name, uint32_t& type, auto&, std::string& bytes) {
    if (name != "blk.0.attn_k.weight" && name != "blk.1.ffn_up_exps.weight") return;
    std::vector<float> x;
    if (type == kBf16) {
      x = numbers_of(s.tensors.at("model.layers.0.self_attn.k_proj.weight").tensor).values;
    } else {
      const std::vector<float> all = wide(want.layers[1].gate_up);
      const int64_t E = GptOssCheckpoint::kExperts, N = 2 * GptOssCheckpoint::kIntermediate,
                    K = GptOssCheckpoint::kHidden;
      x = turns_of({{E, N, K}, all}, 1, 2).values;
    }
    type = kF32;
    bytes = encode(x, kF32);
  });
  const GptOssWeights found = load_gpt_oss(path, s.config);
  EXPECT_EQ(found.layers[0].qkv.format, WeightFormat::f32);
  EXPECT_EQ(found.layers[1].gate_up.format, WeightFormat::f32);
  EXPECT_EQ(found.layers[0].gate_up.format, WeightFormat::mxfp4);
  expect_weights_near(found, want, 0, 0);
}

TEST(gpt_oss_gguf, files_of_another_architecture_are_refused_by_name) {
  Source s;
  const auto refused = [&](const Change& change) {
    const std::string path = s.gguf({}, change);
    return error_of([&] { load_gpt_oss(path, read_gpt_oss_config(path)); });
  };
  const auto rename = [](const char* from, const char* to) -> Change {
    return [=](std::string& name, auto&, auto&, auto&) {
      if (name == from) name = to;
    };
  };
  EXPECT_TRUE(
      holds(refused(rename("blk.1.attn_sinks.weight", "")), "1 tensors are missing, such as blk.1.attn_sinks.weight"));
  EXPECT_TRUE(holds(refused(rename("blk.1.attn_sinks.weight", "blk.1.sinks")), "are missing"));
  EXPECT_TRUE(
      holds(refused([](std::string& name, uint32_t& type, auto&, std::string& bytes) {
              if (name == "blk.0.ffn_down_exps.weight") type = kQ8_1, bytes.assign(bytes.size() / 17 * 40, 0);
            }),
            "\"blk.0.ffn_down_exps.weight\": found dtype Q8_1, expected F32 or F16 or BF16 or Q4_0 or Q4_1 or"));
  EXPECT_TRUE(holds(refused([](std::string& name, auto&, std::vector<int64_t>& shape, auto&) {
                      if (name == "blk.0.attn_k.weight") std::swap(shape[0], shape[1]);
                    }),
                    "\"blk.0.attn_k.weight\": found shape (32, 16), expected (16, 32)"));
}

TEST(gpt_oss_gguf, nan_infinity_and_scales_that_make_them_are_refused) {
  for (const uint32_t type : {kF32, kF16, kBf16, kQ8_0}) {
    Source s;
    const std::string path = s.gguf({type, kMxfp4, kF32}, [&](std::string& name, auto&, auto&, std::string& bytes) {
      const std::string infinity = type == kF32    ? GgufWriter::number(INFINITY)
                                   : type == kBf16 ? GgufWriter::number(bf16(-INFINITY).bits)
                                                   : GgufWriter::number(f16(NAN).bits);
      if (name == "blk.1.attn_output.weight") bytes.replace(0, infinity.size(), infinity);
    });
    const std::string found = error_of([&] { load_gpt_oss(path, s.config); });
    EXPECT_TRUE(holds(found, "\"blk.1.attn_output.weight\": found ") && holds(found, " at number 0, expected finite"))
        << found;
    EXPECT_TRUE(holds(error_of([&] { convert_gpt_oss(path, s.dir / "x"); }), "expected finite numbers"));
  }
  for (const int scale : {252, 253, 255}) {
    Source s;
    const std::string path = s.gguf({}, [&](std::string& name, auto&, auto&, std::string& bytes) {
      if (name == "blk.0.ffn_up_exps.weight") bytes[17] = char(scale);
    });
    const std::string found = error_of([&] { load_gpt_oss(path, s.config); });
    EXPECT_EQ(found.empty(), scale == 252) << found;
    EXPECT_TRUE(scale == 252 || holds(found, detail::concat("found scale ", scale, " at number 32"))) << found;
  }
}

TEST(gpt_oss_gguf, metadata_that_is_missing_or_of_another_model_is_refused_by_key) {
  Source s;
  const auto refused = [&](const std::string& without, const std::function<void(GgufWriter&)>& more) {
    std::string bytes;
    {
      GgufWriter w;
      add_keys(w);
      more(w);
      add_tensors(w, s.tensors, {}, {});
      bytes = w.bytes();
    }
    if (!without.empty()) bytes.replace(bytes.find(without), without.size(), std::string(without.size(), 'x'));
    write_file(s.dir / "m.gguf", bytes);
    return error_of([&] { read_gpt_oss_config(s.dir / "m.gguf"); });
  };
  const auto nothing = [](GgufWriter&) {};
  for (const char* key :
       {"embedding_length", "block_count", "attention.head_count_kv", "expert_count", "expert_used_count",
        "context_length", "attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.freq_base",
        "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"}) {
    const std::string name = std::string("gpt-oss.") + key, found = refused(name, nothing);
    EXPECT_TRUE(holds(found, name + " is missing")) << found;
  }
  const std::vector<std::pair<std::string, std::string>> cases = {
      {refused("gpt-oss", nothing), "general.architecture: found \"xxxxxxx\", expected \"gpt-oss\""},
      {refused("yarn", nothing), "rope.scaling.type: found \"xxxx\", expected yarn or none"},
      {refused("", [](GgufWriter& w) { w.key("gpt-oss.rope.dimension_count", uint32_t(4)); }),
       "dimension_count: found 4, expected 8"},
      {refused("", [](GgufWriter& w) { w.key("gpt-oss.rope.scaling.yarn_attn_factor", 2.f); }),
       "yarn_attn_factor: found 2"},
      {refused("", [](GgufWriter& w) { w.key("gpt-oss.attention.sliding_window_pattern", uint32_t(4)); }),
       "sliding_window_pattern: found 4, expected 2"},
  };
  for (const auto& [found, expected] : cases) EXPECT_TRUE(holds(found, expected)) << expected << "\n" << found;
}

// --- the tokenizer inside
struct Vocabulary {
  std::vector<std::string> tokens, merges = {"a b", "ab c"};
  std::vector<int32_t> types;
  std::string model = "gpt2", pre = "gpt-4o";
  Vocabulary() {
    const ByteBpe bytes({.pattern = WordPattern::o200k, .tokens = [] {
                           std::vector<std::string> all;
                           for (int b = 0; b < 256; ++b) all.emplace_back(1, char(b));
                           return all;
                         }()});
    const std::string json = bytes.to_json();  // spells the bytes as the files do
    for (int b = 0; b < 256; ++b) {
      const std::string at = ": " + std::to_string(b) + (b < 255 ? "," : "}");
      const size_t end = json.find(at) - 1, begin = json.rfind("\n      \"", end) + 8;
      std::string spelling = json.substr(begin, end - begin);
      if (spelling[0] == '\\') spelling = spelling.substr(1);
      tokens.push_back(spelling), types.push_back(1);
    }
    for (const char* t : {"ab", "abc"}) tokens.push_back(t), types.push_back(1);
    tokens.push_back("<|return|>"), types.push_back(3);
    tokens.push_back("[PAD259]"), types.push_back(5);
  }
  std::string write(const std::string& path) const {
    GgufWriter w;
    w.key("tokenizer.ggml.model", model.c_str()).key("tokenizer.ggml.pre", pre.c_str());
    w.key("tokenizer.ggml.tokens", tokens).key("tokenizer.ggml.token_type", types).key("tokenizer.ggml.merges", merges);
    write_file(path, w.bytes());
    return path;
  }
};

TEST(gpt_oss_gguf, a_model_without_a_tokenizer_is_an_error) {
  Source s;
  const std::string path = s.gguf();
  const auto said = [&](const std::string& model) { return error_of([&] { ingot::load_vocabulary(model); }); };
  EXPECT_EQ(said(path), "not found: " + path +
                            ": found a model without a tokenizer, expected one in the file, or "
                            "--tokenizer FILE");
  EXPECT_TRUE(holds(said(s.dir / "m"),
                    "/m: found a model without a tokenizer, expected a tokenizer.json or o200k_base.tiktoken beside"));
  convert_gpt_oss(path, s.dir / "x.ingot");
  EXPECT_TRUE(holds(said(s.dir / "x.ingot"), "x.ingot: found a model without a tokenizer, expected one in the file"));
}

TEST(gpt_oss_gguf, the_tokenizer_of_the_file_equals_the_tokenizer_of_the_same_rules) {
  const TemporaryDirectory dir;
  EXPECT_NE(error_of([&] { load_tokenizer(dir.path()); }).find("found no tokenizer in this directory, expected a"),
            std::string::npos);
  create_directories(dir / "only");
  EXPECT_EQ(load_tokenizer(parent_path(Vocabulary().write(dir / "only/t.gguf")))->vocab_size(), 260);
  const auto tokenizer = load_tokenizer(Vocabulary().write(dir / "t.gguf"));
  EXPECT_EQ(tokenizer->vocab_size(), 260);
  EXPECT_EQ(tokenizer->encode("abcab <|return|>").size(), 2 + 1 + std::string("<|return|>").size());
  EXPECT_EQ(tokenizer->encode("abc"), std::vector<int32_t>{257});
  EXPECT_EQ(tokenizer->token_bytes(258), "<|return|>");
  const std::string text = "Hello,  w\u00f6rld!\n\tx_1 = 42; \u4f60\u597d abcabc";
  EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
  const auto* bpe = dynamic_cast<const ByteBpe*>(tokenizer.get());
  ASSERT_NE(bpe, nullptr);
  EXPECT_EQ(ByteBpe::parse(bpe->to_json(), "again").hash(), tokenizer->hash());
}

TEST(gpt_oss_gguf, added_tokens_split_ordinary_text) {
  const TemporaryDirectory dir;
  Vocabulary v;
  v.pre = "qwen2";
  v.tokens.push_back("<think> \u00e9"), v.types.push_back(4);
  const auto tokenizer = load_tokenizer(v.write(dir / "t.gguf"));
  EXPECT_EQ(tokenizer->encode("abc<think> \u00e9abc"), (std::vector<int32_t>{257, 260, 257}));
  EXPECT_EQ(tokenizer->decode(std::vector<int32_t>{260}), "<think> \u00e9");
  EXPECT_EQ(tokenizer->encode("e\u0301"), tokenizer->encode("\u00e9"));  // qwen2 applies normalization form C
  const auto digits = [&](const std::string& pre) {
    v.pre = pre;
    v.tokens[256] = "12", v.merges = {"1 2", "12 3"}, v.tokens[257] = "123";
    return load_tokenizer(v.write(dir / "t.gguf"))->encode("123").size();
  };
  EXPECT_EQ(digits("gpt-2"), 1u);
  EXPECT_EQ(digits("tekken"), 3u);
  EXPECT_EQ(digits("smollm"), 3u);
}

TEST(gpt_oss_gguf, a_tokenizer_that_would_give_other_ids_is_refused) {
  const TemporaryDirectory dir;
  const auto refused = [&](const std::function<void(Vocabulary&)>& change) {
    Vocabulary v;
    change(v);
    return error_of([&] { load_tokenizer(v.write(dir / "t.gguf")); });
  };
  const std::vector<std::pair<std::string, std::string>> cases = {
      {refused([](auto& v) { v.model = "bert"; }), "tokenizer.ggml.model: found \"bert\", expected \"gpt2\""},
      {refused([](auto& v) { v.pre = "deepseek"; }), "tokenizer.ggml.pre: found \"deepseek\", expected gpt-4o"},
      {refused([](auto& v) { v.types.pop_back(); }), "found 259 types, expected 260, one per token"},
      {refused([](auto& v) { v.types[258] = 9; }), "token 258: found type 9"},
      {refused([](auto& v) { v.tokens[256] = "a b"; }), "found token \"a b\", expected only the 256 characters"},
      {refused([](auto& v) { v.tokens[256] = "\xff"; }), "found a token that is not UTF-8"},
      {refused([](auto& v) { v.merges.push_back("ab"); }), "merge 2: found \"ab\", expected two tokens"},
      {refused([](auto& v) { v.merges.push_back("ab abcd"); }), "merge 2: found the unknown token \"abcd\""},
      {refused([](auto& v) { v.tokens[65] = "B"; }), "found twice"},
  };
  for (const auto& [found, expected] : cases) EXPECT_TRUE(holds(found, expected)) << expected << "\n" << found;
}

}  // namespace
}  // namespace ingot
