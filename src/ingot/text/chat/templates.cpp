#include "ingot/text/chat/templates.h"

#include "ingot/core/check.h"
#include "ingot/io/codecs/sha256.h"
#include "ingot/text/chat/chatml_format.h"
#include "ingot/text/chat/gemma_format.h"
#include "ingot/text/chat/harmony_format.h"
#include "ingot/text/chat/llama3_format.h"
#include "ingot/text/chat/mistral_format.h"

namespace ingot {
namespace {

const char kSmolLm[] = "You are a helpful AI assistant named SmolLM, trained by Hugging Face";
const char kQwen[] = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.";

// The SHA-256 of published templates, without the white space at their end.
struct KnownTemplate {
  const char *sha256, *format;
};
constexpr KnownTemplate kKnown[] = {
    {"872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788", "smollm2"},
    {"55b2f4a26ac9ee719330a61a0c39d9e538b0e9322212f048326318cff4f8674a", "qwen2.5"},
    {"a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8", "qwen3"},
    {"87a2728cb8dc9fe424d624542f6060ec05a1d285ebbec578bb078900e33396b5", "qwen3"},  // of the first weeks
    {"64f85b198065d0fba2a81f37e10ed68161ce2c19a754c7100e67e0ca2ee9c326", "qwen3-instruct"},
    {"ba03a121d097859c7b5b9cd03af99aafe95275210d2876f642ad9929a150f122", "llama3"},
    {"93c0e9aa3629bbd77e68dbc0f5621f6e6b23aa8d74b932595cdb8d64684526d7", "llama3.1"},
    {"d82792f95932f1c9cef5c4bd992f171225e3bf8c7b609b4557c9e1ec96be819f", "llama3.1"},  // the template of Llama 3.2
    {"cafb64e0e9e5fd2503054b3479593fae39cbdfd52338ce8af9bb4664a8eb05bd", "mistral-v3"},
    {"e7deee034838db2bfc7487788a3013d8a307ab69f72f3c54a85f06fd76007d4e", "mistral-v3-tekken"},
    // Written by mistral-common, some for models that also see images.
    {"8dc40aaef94e9eda3306bcaca3fe3aed23f30c61200281412b5dff25e963cdb3", "mistral-v3-tekken"},
    {"d88e0d889568b04345c414e84d7f4a7f2e53e218118217e2f3f704608d55f4e5", "mistral-v3-tekken"},
    {"3c4ad5fa60dd8c7ccdf82fa4225864c903e107728fcaf859fa6052cb80c92ee9", "mistral-v7"},
    {"caf2b2fe872df4229e158f56e2ad1abdd13e60acba9c480c0c93466481660242", "mistral-v7"},
    {"165382433e4b79ea9fb6b75f1789089ee8582107ec09af5763ec58adf324f991", "mistral-v7-tekken"},
    {"3542f4eec9b3a5a9e375e0171d99d3c5c51e981b3f0335bf2cb8e3bd100e7609", "mistral-v7-tekken"},
    {"8d9e3a3c114fb2053ec500184677af4f7e5f8ec2582443cd535834e68b3ade29", "gemma3"},
};

const ChatMlStyle kChatMl[] = {
    {.name = "chatml"},
    {.name = "smollm2", .default_system = kSmolLm},
    {.name = "qwen2.5", .default_system = kQwen, .calls = true},
    {.name = "qwen3", .calls = true, .thoughts = true},
    {.name = "qwen3-instruct", .calls = true},
};
constexpr MistralStyle kMistral[] = {{.name = "mistral-v3", .version = 3, .spaces = true},
                                     {.name = "mistral-v3-tekken", .version = 3},
                                     {.name = "mistral-v7", .version = 7, .spaces = true},
                                     {.name = "mistral-v7-tekken", .version = 7}};
constexpr Llama3Style kLlama3[] = {{.name = "llama3"}, {.name = "llama3.1", .dates_and_calls = true}};

}  // namespace

std::optional<DefaultSystem> default_system_of_template(const std::string& text) {
  const std::string begin = "{%- set default_system_message = '", end = "' %}";
  const size_t at = text.find(begin);
  if (at == text.npos) return {};
  DefaultSystem found;
  size_t i = at + begin.size();
  for (; i < text.size() && text[i] != '\''; ++i) {
    if (text[i] == '\\' && (++i == text.size() || (text[i] != '\\' && text[i] != '\''))) return {};
    found.text += text[i];
  }
  if (found.text.empty() || text.compare(i, end.size(), end) != 0) return {};
  found.rest_of_template = text.substr(0, at + begin.size()) + text.substr(i);
  return found;
}

std::string chat_format_of_template(const std::string& given) {
  const std::optional<DefaultSystem> system = default_system_of_template(given);
  const std::string& text = system ? system->rest_of_template : given;
  const std::string hash = sha256(std::string_view(text).substr(0, text.find_last_not_of(" \t\r\n") + 1));
  for (const KnownTemplate& t : kKnown)
    if (hash == t.sha256) return t.format;
  return "";
}

std::vector<std::string> chat_format_names() {
  std::vector<std::string> names = {"harmony"};
  for (const ChatMlStyle& s : kChatMl) names.push_back(s.name);
  for (const Llama3Style& s : kLlama3) names.push_back(s.name);
  for (const MistralStyle& s : kMistral) names.push_back(s.name);
  names.push_back(GemmaFormat::kName);
  return names;
}

std::shared_ptr<const ChatFormat> make_chat_format(const std::string& name, std::shared_ptr<const Tokenizer> tokenizer,
                                                   const std::string& where, const std::string& default_system) {
  if (name == "harmony") {
    auto bpe = std::dynamic_pointer_cast<const ByteBpe>(tokenizer);
    if (bpe == nullptr)
      fail(ErrorCode::unsupported, where, ": found a tokenizer of the kind ", tokenizer->kind(),
           ", expected byte-level BPE for the chat format harmony");
    return std::make_shared<HarmonyFormat>(std::move(bpe), where);
  }
  for (const ChatMlStyle& s : kChatMl)
    if (name == s.name) return std::make_shared<ChatMlFormat>(std::move(tokenizer), s, where);
  for (const Llama3Style& s : kLlama3)
    if (name == s.name) return std::make_shared<Llama3Format>(std::move(tokenizer), s, where);
  for (const MistralStyle& s : kMistral)
    if (name == s.name) return std::make_shared<MistralFormat>(std::move(tokenizer), s, where, default_system);
  if (name == GemmaFormat::kName) return std::make_shared<GemmaFormat>(std::move(tokenizer), where);
  std::string known;
  for (const std::string& n : chat_format_names()) known += (known.empty() ? "" : ", ") + n;
  fail(ErrorCode::usage, "chat format: found \"", name.substr(0, 40), "\", expected one of ", known);
}

}  // namespace ingot
