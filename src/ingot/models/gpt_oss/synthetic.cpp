#include "ingot/models/gpt_oss/synthetic.h"

#include "ingot/core/check.h"

namespace ingot {
namespace {

constexpr std::string_view kPrefix = "synthetic:";
constexpr int64_t kPublishedVocab = 201088, kPublishedSpecials = 1090, kFewestSpecials = 16;

// A different word for each number: a space and the digits of the number in base 26.
std::string word(int64_t n) {
  std::string letters;
  for (; n > 0 || letters.empty(); n /= 26) letters.insert(letters.begin(), char('a' + n % 26));
  return " " + letters;
}

}  // namespace

std::optional<SyntheticModel> synthetic_model(const std::string& name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const std::string rest = name.substr(kPrefix.size());
  const size_t colon = std::min(rest.find(':'), rest.size());
  SyntheticModel model{.size = rest.substr(0, colon)};
  if (model.size != "20b" && model.size != "120b" && model.size != "small")
    fail(ErrorCode::usage, name, ": found the size '", model.size, "', expected 20b, 120b or small");
  if (colon == rest.size()) return model;
  const std::string format = rest.substr(colon + 1);
  for (const WeightFormat f : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4})
    if (format == name_of(f)) return model.dense = f, model;
  fail(ErrorCode::usage, name, ": found the format '", format, "', expected bf16, fp8 or mxfp4");
}

ByteBpe synthetic_tokenizer(const GptOssConfig& config) {
  const int64_t specials = config.vocab >= kPublishedVocab ? kPublishedSpecials : kFewestSpecials;
  const int64_t ordinary = config.vocab - specials;
  INGOT_CHECK(ordinary >= 256, "synthetic tokenizer: found a vocabulary of ", config.vocab, ", expected at least ",
              256 + specials);
  ByteBpeRules rules{.pattern = WordPattern::o200k};
  for (int64_t id = 0; id < ordinary; ++id)
    rules.tokens.push_back(id < 256 ? std::string(1, char(id)) : word(id - 256));
  for (int64_t i = 0; i < specials; ++i)
    rules.specials.push_back({int32_t(ordinary + i), harmony_special_name(int(i), int(ordinary + i))});
  return ByteBpe(std::move(rules), std::string(kPrefix));
}

}  // namespace ingot
