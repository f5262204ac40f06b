#include "ingot/models/gpt_oss/archive.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <map>

#include "ingot/io/file.h"
#include "ingot/io/formats/archive.h"
#include "ingot/kernels/quant/weight_tiles.h"
#include "ingot/models/gpt_oss/gpt_oss.h"
#include "ingot/models/gpt_oss/random_checkpoint.test.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::error_of;
using testing::GptOssCheckpoint;
using testing::TemporaryDirectory;

bool holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::vector<float> numbers(const WeightMatrix& w) {
  const int64_t experts = w.is_bank() ? w.data.size(0) : 1, rows = w.rows(), cols = w.cols();
  std::vector<float> out(size_t(experts * rows * cols));
  for (int64_t e = 0; e < experts; ++e)
    dequantise(w.is_bank() ? w.at(e) : w, Tensor(out.data() + e * rows * cols, {rows, cols}), {});
  return out;
}
// The numbers of a matrix after conversion to a format.
std::vector<float> narrowed(const WeightMatrix& w, WeightFormat f) {
  std::vector<float> out = numbers(w);
  const int64_t cols = w.cols(), rows = int64_t(out.size()) / cols;
  std::vector<uint8_t> data(out.size() * 2), scales(out.size() + size_t(rows) * 4);
  const WeightMatrix to =
      f == WeightFormat::bf16 ? WeightMatrix(Tensor(data.data(), DType::bf16, {rows, cols}))
      : f == WeightFormat::fp8
          ? WeightMatrix(f, Tensor(data.data(), {rows, cols}), Tensor(scales.data(), DType::f32, {rows}))
          : WeightMatrix(f, Tensor(data.data(), {rows, cols / 32, 16}), Tensor(scales.data(), {rows, cols / 32}));
  quantise(Tensor(out.data(), {rows, cols}), to, {});
  dequantise(to, Tensor(out.data(), {rows, cols}), {});
  return out;
}
std::vector<double> vector_of(const Tensor& t) { return testing::values(t); }

void expect_same_vectors(const GptOssWeights& a, const GptOssWeights& b) {
  EXPECT_EQ(vector_of(a.norm), vector_of(b.norm));
  ASSERT_EQ(a.layers.size(), b.layers.size());
  for (size_t l = 0; l < a.layers.size(); ++l) {
    const GptOssLayer &x = a.layers[l], &y = b.layers[l];
    for (Tensor GptOssLayer::*part :
         {&GptOssLayer::attn_norm, &GptOssLayer::mlp_norm, &GptOssLayer::b_qkv, &GptOssLayer::b_o,
          &GptOssLayer::b_router, &GptOssLayer::sinks, &GptOssLayer::b_gate_up, &GptOssLayer::b_down})
      EXPECT_EQ(vector_of(x.*part), vector_of(y.*part));
  }
}

// The logits of the last of the given tokens.
std::vector<double> logits(const GptOssConfig& c, const GptOssWeights& w, int64_t batch) {
  GptOss model(c, w, {.batch = batch, .positions = 64});
  GptOssCache cache(c, model.layers(), 64, batch);
  std::vector<int32_t> ids(30);
  testing::fill_ids(Tensor(ids.data(), {30}), 3, c.vocab);
  std::vector<float> out(static_cast<size_t>(c.vocab));
  for (size_t at = 0; at < ids.size(); at += size_t(batch)) {
    const int64_t n = std::min<int64_t>(batch, int64_t(ids.size() - at));
    const Tensor normed = model.extend(std::span(ids).subspan(at, size_t(n)), cache);
    model.logits(normed.slice(0, n - 1, n), Tensor(out.data(), {1, c.vocab}));
  }
  return {out.begin(), out.end()};
}

TEST(gpt_oss_archive,
     what_needs_no_rounding_is_kept_bit_for_bit_and_the_logits_are_the_same_but_for_the_order_of_sums) {
  const TemporaryDirectory dir;
  GptOssCheckpoint().write(dir / "m");
  write_file(dir / "m/tokenizer.json", "{}");
  const int64_t bytes = convert_gpt_oss(dir / "m", dir / "m.ingot");
  EXPECT_EQ(file_size(dir / "m.ingot"), bytes);
  EXPECT_EQ(list_directory(dir.path()), (std::vector<std::string>{"m", "m.ingot"}));
  ArchiveFile(dir / "m.ingot").verify();
  EXPECT_TRUE(is_gpt_oss(dir / "m.ingot"));
  const GptOssConfig config = read_gpt_oss_config(dir / "m.ingot");
  EXPECT_EQ(to_json(config), to_json(read_gpt_oss_config(dir / "m")));
  EXPECT_EQ(archived_file(dir / "m.ingot", "tokenizer.json"), "{}");
  EXPECT_EQ(archived_file(dir / "m.ingot", "other"), std::nullopt);
  const GptOssWeights from = load_gpt_oss(dir / "m", config), to = load_gpt_oss(dir / "m.ingot", config);
  EXPECT_EQ(to.bytes(), gpt_oss_weight_bytes(dir / "m.ingot", config));
  expect_same_vectors(from, to);
  EXPECT_EQ(numbers(from.embed), numbers(to.embed));
  EXPECT_EQ(numbers(from.head), numbers(to.head));
  for (size_t l = 0; l < 2; ++l)
    for (WeightMatrix GptOssLayer::*part :
         {&GptOssLayer::qkv, &GptOssLayer::o, &GptOssLayer::router, &GptOssLayer::gate_up, &GptOssLayer::down}) {
      EXPECT_TRUE((to.layers[l].*part).in_weight_tiles());
      EXPECT_EQ(numbers(from.layers[l].*part), numbers(to.layers[l].*part)) << l;
    }
  for (int64_t batch : {1, 30}) {
    const auto want = logits(config, from, batch), got = logits(config, to, batch);
    for (size_t i = 0; i < want.size(); ++i)
      EXPECT_NEAR(got[i], want[i], 2e-5) << i;  // the same tolerance as for batches of different sizes
  }
}

TEST(gpt_oss_archive, every_form_holds_the_numbers_nearest_to_the_checkpoint_s) {
  for (WeightFormat source : {WeightFormat::mxfp4, WeightFormat::bf16})
    for (WeightFormat dense : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4})
      for (WeightFormat experts : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4}) {
        const TemporaryDirectory dir;
        GptOssCheckpoint().write(dir / "m", {.experts = source});
        convert_gpt_oss(dir / "m", dir / "x", {.forms = {dense, experts}});
        const GptOssConfig config = read_gpt_oss_config(dir / "x");
        const GptOssWeights from = load_gpt_oss(dir / "m", config), to = load_gpt_oss(dir / "x", config);
        expect_same_vectors(from, to);
        EXPECT_EQ(to.layers[1].qkv.format, dense);
        EXPECT_EQ(numbers(to.layers[1].qkv), narrowed(from.layers[1].qkv, dense));
        EXPECT_EQ(numbers(to.layers[0].o), narrowed(from.layers[0].o, dense));
        EXPECT_EQ(numbers(to.head), narrowed(from.head, dense));
        EXPECT_EQ(numbers(to.layers[0].router), numbers(from.layers[0].router));
        EXPECT_EQ(numbers(to.embed), numbers(from.embed));
        EXPECT_EQ(numbers(to.layers[0].gate_up), narrowed(from.layers[0].gate_up, experts));
        EXPECT_EQ(numbers(to.layers[1].down), narrowed(from.layers[1].down, experts));
      }
}

TEST(gpt_oss_archive, namings_and_shards_make_the_same_archive) {
  const TemporaryDirectory dir;
  GptOssCheckpoint checkpoint;
  checkpoint.write(dir / "hf");
  checkpoint.write(dir / "shards", {.shards = 3});
  checkpoint.write(dir / "own", {.own_names = true});
  for (const char* name : {"hf", "shards", "own"}) convert_gpt_oss(dir / name, dir / (std::string(name) + ".ingot"));
  const std::string want = read_file(dir / "hf.ingot");
  EXPECT_EQ(read_file(dir / "shards.ingot"), want);
  const ArchiveFile a(dir / "hf.ingot"), b(dir / "own.ingot");  // its config differs in the end tokens
  ASSERT_EQ(a.entries().size(), b.entries().size());
  for (size_t i = 0; i < a.entries().size(); ++i) EXPECT_EQ(a.entries()[i].sha256, b.entries()[i].sha256);
}

TEST(gpt_oss_archive, a_tied_head_is_written_out) {
  const TemporaryDirectory dir;
  GptOssCheckpoint().write(dir / "m", {.damage = [](auto& tensors, std::string& config) {
                             tensors.erase("lm_head.weight");
                             config.insert(1, "\"tie_word_embeddings\": true, ");
                           }});
  convert_gpt_oss(dir / "m", dir / "x", {.forms = {.dense = WeightFormat::mxfp4}});
  const GptOssConfig config = read_gpt_oss_config(dir / "x");
  const GptOssWeights from = load_gpt_oss(dir / "m", config), to = load_gpt_oss(dir / "x", config);
  EXPECT_EQ(numbers(to.embed), numbers(from.embed));
  EXPECT_EQ(numbers(to.head), narrowed(from.embed, WeightFormat::mxfp4));
}

TEST(gpt_oss_archive, the_first_layers_alone_can_be_loaded) {
  const TemporaryDirectory dir;
  GptOssCheckpoint().write(dir / "m");
  convert_gpt_oss(dir / "m", dir / "x");
  const GptOssConfig config = read_gpt_oss_config(dir / "x");
  const GptOssWeights one = load_gpt_oss(dir / "x", config, {.layers = 1});
  EXPECT_EQ(one.layers.size(), 1u);
  EXPECT_LT(one.bytes(), gpt_oss_weight_bytes(dir / "x", config));
  EXPECT_EQ(error_of([&] { load_gpt_oss(dir / "x", config, {.layers = 3}); }),
            "usage: layers: found 3, expected 1 to 2, or 0 for all");
  EXPECT_TRUE(holds(error_of([&] { load_gpt_oss(dir / "x", config, {.other_bytes = int64_t(1) << 50}); }),
                    "of memory, found "));
}

// The bytes of a mapped file that this process has read.
int64_t touched(const std::string& path) {
  std::ifstream maps("/proc/self/smaps");
  bool is_mine = false;
  int64_t bytes = 0;
  for (std::string line; std::getline(maps, line);) {
    if (!line.empty() && std::isupper(static_cast<unsigned char>(line[0])) == 0) is_mine = line.ends_with(path);
    if (is_mine && line.starts_with("Rss:")) bytes += std::stoll(line.substr(4)) * 1024;
  }
  return bytes;
}
// The shapes must be known from the headers: a device without room for a model is found without reading 65 GB, and
// without taking the host's memory.
TEST(gpt_oss_archive, shapes_are_known_without_reading_and_uploaded_weights_are_released) {
  const TemporaryDirectory dir;
  const std::string path = dir / "x.ingot";
  GptOssConfig config = synthetic_gpt_oss("small");
  config.vocab = 40'000;
  write_synthetic_gpt_oss(config, path);
  const int64_t all = gpt_oss_weight_bytes(path, config);
  ASSERT_GT(all, 8 << 20);
  {
    const GptOssWeights shapes = gpt_oss_shapes(path, config);
    EXPECT_EQ(shapes.bytes(), all);
    EXPECT_EQ(shapes.layers.size(), size_t(config.layers));
    EXPECT_LT(touched(path), all / 4);
    EXPECT_EQ(gpt_oss_shapes(path, config, {.layers = 1, .other_bytes = int64_t(1) << 50}).layers.size(), 1u);
  }
  for (const bool passed_on : {false, true}) {
    const GptOssWeights w = load_gpt_oss(path, config, {.passed_on = passed_on});
    EXPECT_GE(touched(path), all) << "it has room here";
    EXPECT_NE(error_of([&] {
                load_gpt_oss(path, config, {.other_bytes = int64_t(1) << 50, .passed_on = passed_on});
              }).find("of memory, found "),
              std::string::npos);
  }
}

TEST(gpt_oss_archive, a_failed_conversion_leaves_no_file) {
  const TemporaryDirectory dir;
  const auto refused = [&](const GptOssCheckpoint::Options& o, const GptOssForms& forms = {}) {
    remove_tree(dir / "m");
    GptOssCheckpoint().write(dir / "m", o);
    const std::string found = error_of([&] { convert_gpt_oss(dir / "m", dir / "x", {.forms = forms}); });
    EXPECT_EQ(list_directory(dir.path()), std::vector<std::string>{"m"}) << found;
    return found;
  };
  const auto infinite = [](auto& t, auto&) { t.at("lm_head.weight").tensor.template ptr<bf16>()[5] = bf16(INFINITY); };
  EXPECT_TRUE(holds(refused({.damage = infinite}, {.dense = WeightFormat::fp8}),
                    "tensor \"lm_head.weight\": found infinity at number 5, expected finite numbers"));
  const auto scale = [](auto& t, auto&) {
    t.at("model.layers.1.mlp.experts.down_proj_scales").tensor.template ptr<uint8_t>()[9] = 255;
  };
  EXPECT_TRUE(holds(refused({.damage = scale}), "found scale 255 at byte 9"));
  EXPECT_TRUE(holds(refused({}, {.dense = WeightFormat::f32}), "dense: found f32, expected bf16, fp8 or mxfp4"));
  EXPECT_TRUE(
      holds(refused({.damage = [](auto& t, auto&) { t.erase("model.norm.weight"); }}), "1 tensors are missing"));
}

void expect_same_numbers(const std::string& a, const std::string& b) {
  const GptOssConfig config = read_gpt_oss_config(a);
  EXPECT_EQ(to_json(config), to_json(read_gpt_oss_config(b)));
  const GptOssWeights x = load_gpt_oss(a, config), y = load_gpt_oss(b, config);
  expect_same_vectors(x, y);
  EXPECT_EQ(numbers(x.embed), numbers(y.embed));
  EXPECT_EQ(numbers(x.head), numbers(y.head));
  for (size_t l = 0; l < x.layers.size(); ++l)
    for (WeightMatrix GptOssLayer::*part :
         {&GptOssLayer::qkv, &GptOssLayer::o, &GptOssLayer::router, &GptOssLayer::gate_up, &GptOssLayer::down})
      EXPECT_EQ(numbers(x.layers[l].*part), numbers(y.layers[l].*part)) << l;
}

TEST(gpt_oss_archive, converting_an_archive_equals_converting_its_checkpoint) {
  const TemporaryDirectory dir;
  const WeightFormat formats[] = {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4};
  // both formats can represent all numbers of the source
  for (const WeightFormat source : {WeightFormat::bf16, WeightFormat::mxfp4}) {
    GptOssCheckpoint().write(dir / "m", {.experts = source});
    write_file(dir / "m/tokenizer.json", "{}");
    convert_gpt_oss(dir / "m", dir / "a", {.forms = {WeightFormat::bf16, source}});
    EXPECT_EQ(gpt_oss_archive_forms(dir / "a").experts, source);
    for (const WeightFormat dense : formats)
      for (const WeightFormat experts : formats) {
        int64_t last = 0, all = 0;
        convert_gpt_oss(dir / "m", dir / "want", {.forms = {dense, experts}});
        const int64_t bytes = convert_gpt_oss(dir / "a", dir / "b", {{dense, experts}, [&](int64_t done, int64_t n) {
                                                                       EXPECT_GT(done, last);
                                                                       last = done, all = n;
                                                                     }});
        if (source == WeightFormat::bf16 || experts == source)
          EXPECT_EQ(read_file(dir / "b"), read_file(dir / "want")) << dense << " " << experts;
        expect_same_numbers(dir / "b", dir / "want");  // zeros that were mxfp4 may have another sign
        EXPECT_TRUE(bytes == file_size(dir / "b") && all == bytes && last <= bytes);
        const GptOssForms found = gpt_oss_archive_forms(dir / "b");
        EXPECT_TRUE(found.dense == dense && found.experts == experts);
        // Converts back: each number is the nearest bf16 of the narrow format.
        convert_gpt_oss(dir / "b", dir / "c", {.forms = {WeightFormat::bf16, WeightFormat::bf16}});
        const GptOssConfig config = read_gpt_oss_config(dir / "c");
        const GptOssWeights narrow = load_gpt_oss(dir / "b", config), wide = load_gpt_oss(dir / "c", config);
        expect_same_vectors(narrow, wide);
        EXPECT_EQ(numbers(wide.layers[1].o), narrowed(narrow.layers[1].o, WeightFormat::bf16));
        EXPECT_EQ(numbers(wide.layers[0].down), narrowed(narrow.layers[0].down, WeightFormat::bf16));
      }
  }
}

TEST(gpt_oss_archive, a_damaged_archive_is_not_converted_and_nothing_but_an_archive_is_replaced) {
  const TemporaryDirectory dir;
  GptOssCheckpoint().write(dir / "m");
  write_file(dir / "m/tokenizer.json", "{}");
  convert_gpt_oss(dir / "m", dir / "x");
  const std::string whole = read_file(dir / "x");
  for (const WeightFormat dense : {WeightFormat::bf16, WeightFormat::fp8}) {
    const ArchiveFile file(dir / "x");
    for (const ArchiveEntry& e : file.entries()) {
      std::string bytes = whole;
      bytes[size_t(e.offset + e.bytes / 2)] ^= 1;
      write_file(dir / "bad", bytes);
      const std::string found = error_of([&] { convert_gpt_oss(dir / "bad", dir / "y", {.forms = {.dense = dense}}); });
      EXPECT_TRUE(holds(found, "blob \"" + e.name + "\": found the sum")) << found;
      EXPECT_FALSE(exists(dir / "y") || exists(dir / "y.partial"));
    }
  }
  const auto said = [&](const std::string& from, const std::string& to) {
    return error_of([&] { convert_gpt_oss(dir / from, dir / to); });
  };
  EXPECT_TRUE(holds(said("x", "x"), "x: found the checkpoint itself, expected another name"));
  EXPECT_TRUE(
      holds(said("m", "m/model.safetensors"), "found a file that is no archive, expected a new name or an arch"));
  EXPECT_TRUE(holds(said("m", "m"), "m: found "));
  EXPECT_NO_THROW(load_gpt_oss(dir / "m", read_gpt_oss_config(dir / "m")));
  write_file(dir / "empty", "");
  EXPECT_EQ(said("x", "empty") + said("m", "empty"), "");
}

TEST(gpt_oss_archive, no_tensor_may_hold_nan_or_infinity_in_any_form) {
  const TemporaryDirectory dir;
  GptOssCheckpoint().write(dir / "m", {.experts = WeightFormat::bf16});
  std::vector<std::string> names;
  {
    const SafetensorsFile file(dir / "m/model.safetensors");
    for (const SafetensorsEntry& e : file.entries()) names.push_back(e.name);
  }
  ASSERT_GT(names.size(), 30u);
  const float bad[] = {NAN, INFINITY, -INFINITY};
  std::vector<float> wide(1 << 14);
  for (size_t i = 0; i < names.size(); ++i) {
    const bool f32 = i % 2 != 0 && names[i].find("_proj.weight") == names[i].npos;  // q, k and v have one type
    int64_t at = 0;
    const auto damage = [&](auto& tensors, auto&) {
      Tensor& t = tensors.at(names[i]).tensor;
      at = t.numel() - 1 - int64_t(i % 3);
      if (!f32) {
        t.ptr<bf16>()[at] = bf16(bad[i % 3]);
        return;
      }
      for (int64_t k = 0; k < t.numel(); ++k) wide[size_t(k)] = float(t.ptr<bf16>()[k]);
      wide[size_t(at)] = bad[i % 3];
      t = Tensor(wide.data(), DType::f32, t.shape);
    };
    remove_tree(dir / "m");
    GptOssCheckpoint().write(dir / "m", {.experts = WeightFormat::bf16, .damage = damage});
    const std::string expected =
        detail::concat("tensor \"", names[i], "\": found ", i % 3 == 0 ? "NaN" : "infinity", " at number ");
    const std::string loaded = error_of([&] { load_gpt_oss(dir / "m", read_gpt_oss_config(dir / "m")); });
    EXPECT_TRUE(holds(loaded, expected) && loaded.rfind("numeric: ", 0) == 0) << expected << "\n" << loaded;
    EXPECT_TRUE(holds(loaded, detail::concat(" at number ", at, ","))) << at << "\n" << loaded;
    for (const GptOssForms& forms : {GptOssForms{}, {WeightFormat::fp8, WeightFormat::bf16}}) {
      const std::string converted = error_of([&] { convert_gpt_oss(dir / "m", dir / "x", {.forms = forms}); });
      EXPECT_TRUE(holds(converted, expected)) << expected << "\n" << converted;
    }
    EXPECT_EQ(list_directory(dir.path()), std::vector<std::string>{"m"});
  }
}

TEST(gpt_oss_archive, a_scale_that_makes_infinities_is_refused) {
  const TemporaryDirectory dir;
  for (const int scale : {252, 253, 254, 255}) {
    const auto damage = [&](auto& t, auto&) {
      t.at("model.layers.1.mlp.experts.down_proj_scales").tensor.template ptr<uint8_t>()[9] = uint8_t(scale);
    };
    remove_tree(dir / "m");
    GptOssCheckpoint().write(dir / "m", {.damage = damage});
    const auto load = [&] { load_gpt_oss(dir / "m", read_gpt_oss_config(dir / "m")); };
    if (scale == 252)
      EXPECT_NO_THROW(load());
    else
      EXPECT_TRUE(holds(error_of(load), detail::concat("found scale ", scale, " at byte 9"))) << error_of(load);
  }
}

// Writes an archive that equals another archive except for changes by `change` to the blobs and the description.
void rewrite(const std::string& from, const std::string& to,
             const std::function<void(std::vector<ArchiveEntry>&, std::string&)>& change) {
  const ArchiveFile file(from);
  std::vector<ArchiveEntry> entries = file.entries();
  std::string about = file.about();
  change(entries, about);
  ArchiveWriter writer(to, entries[0].name == "other kind" ? "other" : file.kind(), about, entries);
  for (const ArchiveEntry& e : entries) {
    const ArchiveEntry* old = file.find(e.name);
    std::string bytes = old != nullptr ? std::string(file.data(*old), size_t(old->bytes)) : "";
    bytes.resize(size_t(e.bytes));
    writer.write(bytes.data(), e.bytes);
  }
  writer.commit();
}

TEST(gpt_oss_archive, archives_that_are_no_model_are_refused_with_one_line_each) {
  const TemporaryDirectory dir;
  GptOssCheckpoint().write(dir / "m");
  convert_gpt_oss(dir / "m", dir / "x");
  using Entries = std::vector<ArchiveEntry>;
  const auto at = [](Entries& e, const std::string& name) -> ArchiveEntry& {
    for (ArchiveEntry& one : e)
      if (one.name == name) return one;
    throw std::runtime_error(name);
  };
  const std::vector<std::pair<std::string, std::function<void(Entries&, std::string&)>>> cases = {
      {"blob \"norm\" is missing", [&](Entries& e, auto&) { at(e, "norm").name = "nrom"; }},
      {"found blob \"extra\", which a model",
       [&](Entries& e, auto&) {
         e.push_back({"extra", "bytes", "plain", {1}, 1});
       }},
      {"found blob \"layers.2.x\", which a model",
       [&](Entries& e, auto&) {
         e.push_back({"layers.2.x", "bytes", "plain", {1}, 1});
       }},
      {"\"layers.0.qkv\": found shape (64, 33), expected (64, 32)",
       [&](Entries& e, auto&) {
         at(e, "layers.0.qkv").shape = {64, 33};
       }},
      {"\"layers.0.qkv\": found 1 bytes, expected", [&](Entries& e, auto&) { at(e, "layers.0.qkv").bytes = 1; }},
      {"\"layers.0.qkv\": found format \"q8\", expected bf16, fp8 or mxfp4",
       [&](Entries& e, auto&) { at(e, "layers.0.qkv").format = "q8"; }},
      {"\"layers.0.qkv\": found layout \"plain\", expected granules",
       [&](Entries& e, auto&) { at(e, "layers.0.qkv").layout = "plain"; }},
      {"\"layers.1.sinks\": found format \"bf16\", expected f32",
       [&](Entries& e, auto&) { at(e, "layers.1.sinks").format = "bf16"; }},
      {"\"embed\": found format \"f32\", expected bf16", [&](Entries& e, auto&) { at(e, "embed").format = "f32"; }},
      {"describes no model", [&](Entries&, std::string& about) { about = "{}"; }},
      {"num_hidden_layers: found 0",
       [&](Entries&, std::string& a) { a.replace(a.find("\"num_hidden_layers\":2"), 21, "\"num_hidden_layers\":0"); }},
      {"found shape (37, 32), expected (38, 32)",
       [&](Entries&, std::string& a) { a.replace(a.find("\"vocab_size\":37"), 15, "\"vocab_size\":38"); }},
      {"found an archive of \"other\"",
       [&](Entries& e, auto&) {
         e.insert(e.begin(), {"other kind", "bytes", "plain", {0}, 0});
       }},
  };
  for (const auto& [message, change] : cases) {
    rewrite(dir / "x", dir / "bad", change);
    const std::string found = error_of([&] { load_gpt_oss(dir / "bad", read_gpt_oss_config(dir / "bad")); });
    EXPECT_TRUE(holds(found, message)) << message << "\n" << found;
    EXPECT_EQ(found.find('\n'), std::string::npos);
  }
}

// --- .iris ---------------------------------------------------------------------------------------------------------
void write_iris(const std::string& path, const std::map<std::string, NamedTensor>& tensors) {
  const auto put = [](std::string& s, const auto& n) { s.append(reinterpret_cast<const char*>(&n), sizeof n); };
  const size_t header = (16 + tensors.size() * 216 + 4095) / 4096 * 4096;
  std::string head = "IRISMDL1", blobs;
  put(head, uint32_t(1));
  put(head, uint32_t(tensors.size()));
  for (const auto& [name, t] : tensors) {
    blobs.resize((blobs.size() + 255) / 256 * 256, '\0');
    head += name + std::string(128 - name.size(), '\0');
    put(head, uint64_t(header + blobs.size()));
    put(head, uint64_t(t.tensor.bytes()));
    put(head, uint32_t(t.tensor.dtype == DType::bf16 ? 0 : t.tensor.dtype == DType::f32 ? 1 : 2));
    put(head, uint32_t(t.tensor.rank()));
    for (int i = 0; i < 8; ++i) put(head, i < t.tensor.rank() ? uint64_t(t.tensor.size(i)) : uint64_t(0));
    blobs.append(static_cast<const char*>(t.tensor.data), size_t(t.tensor.bytes()));
  }
  head.resize(header, '\0');
  write_file(path, head + blobs);
}

TEST(gpt_oss_archive, an_iris_file_is_the_model_of_its_checkpoint) {
  const TemporaryDirectory dir;
  std::map<std::string, NamedTensor> tensors;
  std::vector<std::vector<float>> wide;  // the converter of the .iris project stores these tensors as f32
  GptOssCheckpoint checkpoint;
  checkpoint.write(dir / "m", {.damage = [&](auto& from, auto&) {
                     static const std::pair<const char*, const char*> kWords[] = {
                         {"model.embed_tokens.weight", "embed"},
                         {"model.norm.weight", "final_norm"},
                         {"lm_head.weight", "lm_head"},
                         {"model.layers.", "L"},
                         {"input_layernorm.weight", "norm_attn"},
                         {"post_attention_layernorm.weight", "norm_moe"},
                         {"self_attn.q_proj.weight", "w_q"},
                         {"self_attn.k_proj.weight", "w_k"},
                         {"self_attn.v_proj.weight", "w_v"},
                         {"self_attn.o_proj.weight", "w_o"},
                         {"self_attn.q_proj.bias", "b_q"},
                         {"self_attn.k_proj.bias", "b_k"},
                         {"self_attn.v_proj.bias", "b_v"},
                         {"self_attn.o_proj.bias", "b_o"},
                         {"self_attn.sinks", "sinks"},
                         {"mlp.router.weight", "router_w"},
                         {"mlp.router.bias", "router_b"},
                         {"mlp.experts.gate_up_proj_bias", "gate_up_b"},
                         {"mlp.experts.down_proj_bias", "down_b"},
                         {"mlp.experts.", ""},
                         {"_proj_", "_"}};
                     for (const auto& [name, t] : from) {
                       std::string to = name;
                       for (const auto& [find, replace] : kWords)
                         if (const size_t at = to.find(find); at != std::string::npos)
                           to.replace(at, std::strlen(find), replace);
                       tensors[to] = t;
                       if (to.find("norm_") != std::string::npos || to.find("sinks") != std::string::npos) {
                         const auto v = testing::values(t.tensor);
                         wide.emplace_back(v.begin(), v.end());
                         tensors[to].tensor = Tensor(wide.back().data(), t.tensor.shape);
                       }
                     }
                   }});
  write_iris(dir / "m.iris", tensors);
  EXPECT_TRUE(is_gpt_oss(dir / "m.iris"));
  GptOssConfig config = read_gpt_oss_config(dir / "m.iris");
  // 4, or all experts if there are fewer; everything else is read from the file, or published
  EXPECT_EQ(config.experts_per_token, 3);
  config.experts_per_token = 2;
  config.end_tokens = {2};
  EXPECT_EQ(to_json(config), to_json(read_gpt_oss_config(dir / "m")));
  const GptOssWeights a = load_gpt_oss(dir / "m", config), b = load_gpt_oss(dir / "m.iris", config);
  ASSERT_EQ(a.bytes(), b.bytes());
  EXPECT_EQ(std::memcmp(a.embed.data.data, b.embed.data.data, size_t(a.bytes())), 0);
  convert_gpt_oss(dir / "m", dir / "a.ingot");
  convert_gpt_oss(dir / "m.iris", dir / "b.ingot");
  const ArchiveFile x(dir / "a.ingot"), y(dir / "b.ingot");
  for (const ArchiveEntry& e : x.entries()) EXPECT_EQ(e.sha256, y.find(e.name)->sha256);
  tensors.erase("L1.sinks");
  write_iris(dir / "bad.iris", tensors);
  EXPECT_TRUE(
      holds(error_of([&] { load_gpt_oss(dir / "bad.iris", config); }), "1 tensors are missing, such as L1.sinks"));
  tensors.erase("embed");
  write_iris(dir / "bad.iris", tensors);
  EXPECT_TRUE(
      holds(error_of([&] { read_gpt_oss_config(dir / "bad.iris"); }), "found no tensor \"embed\" of 2 dimensions"));
}

TEST(gpt_oss_archive, a_synthetic_model_has_realistic_scales_and_is_reproducible) {
  const TemporaryDirectory dir;
  const GptOssConfig config = synthetic_gpt_oss("small");
  const WeightFormat fp8 = WeightFormat::fp8, mx = WeightFormat::mxfp4, bf16 = WeightFormat::bf16;
  std::vector<std::string> texts;
  for (const GptOssForms& forms : {GptOssForms{bf16, mx}, {fp8, bf16}, {mx, mx}}) {
    const std::string path = dir / "x.ingot";
    const int64_t bytes = write_synthetic_gpt_oss(config, path, 1, {.forms = forms});
    EXPECT_EQ(bytes, file_size(path));
    texts.push_back(read_file(path));
    ArchiveFile(path).verify();
    EXPECT_EQ(to_json(read_gpt_oss_config(path)), to_json(config));
    const GptOssWeights w = load_gpt_oss(path, config);
    GptOss model(config, w, {.batch = 64, .positions = 64});
    GptOssCache cache(config, config.layers, 64, 64);
    std::vector<int32_t> ids(64);
    testing::fill_ids(Tensor(ids.data(), {64}), 1, config.vocab);
    std::vector<float> logits(size_t(64 * config.vocab));
    model.logits(model.extend(ids, cache), Tensor(logits.data(), {64, config.vocab}));
    double sum = 0, squares = 0;
    for (const float x : logits) sum += x, squares += double(x) * x;
    const double mean = sum / double(logits.size()), std = std::sqrt(squares / double(logits.size()) - mean * mean);
    EXPECT_GT(std, 1);
    EXPECT_LT(std, 4);
  }
  write_synthetic_gpt_oss(config, dir / "again", 1);
  EXPECT_EQ(read_file(dir / "again") == texts[0], true);
  write_synthetic_gpt_oss(config, dir / "other", 2);
  EXPECT_EQ(read_file(dir / "other") == texts[0], false);
}

TEST(gpt_oss_archive, the_published_shapes_have_the_published_numbers_of_parameters) {
  for (const auto& [name, billions] : {std::pair{"20b", 20.91}, {"120b", 116.83}}) {
    const GptOssConfig c = synthetic_gpt_oss(name);
    const double expert = double(3 * c.hidden * c.intermediate + 2 * c.intermediate + c.hidden);
    const double attention =
        double(c.hidden * (2 * c.q_width() + 2 * c.kv_width()) + c.qkv_width() + c.hidden + c.heads);
    const double layer = attention + double(c.experts) * (expert + double(c.hidden) + 1) + double(2 * c.hidden);
    EXPECT_NEAR((double(c.layers) * layer + double(2 * c.vocab * c.hidden + c.hidden)) / 1e9, billions, 0.01) << name;
  }
  EXPECT_EQ(error_of([] { synthetic_gpt_oss("7b"); }), "usage: synthetic: found '7b', expected 20b, 120b or small");
}

}  // namespace
}  // namespace ingot
