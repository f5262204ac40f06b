#include "ingot/apps/cli/models.h"

#include <algorithm>
#include <chrono>

#include "ingot/apps/cli/cli.h"
#include "ingot/apps/cli/runs.h"
#include "ingot/core/log.h"
#include "ingot/core/progress.h"
#include "ingot/io/json.h"

namespace ingot::cli {
namespace {

constexpr int64_t kBatch = 512;  // tokens of a prompt at a time

OpenedModel open_gpt_oss(const std::string& path, int64_t tokens, int64_t layers) {
  const GptOssConfig config = read_gpt_oss_config(path);
  if (layers > config.layers)
    fail(ErrorCode::usage, "--layers: found ", layers, ", expected at most ", config.layers, ", the model's");
  if (tokens > config.context)
    fail(ErrorCode::usage, "found ", tokens, " tokens, expected at most ", config.context, ", the model's context");
  // A prompt shorter than a batch needs no room for more.
  const GptOssDecoderOptions options{.context = tokens, .batch = std::min(kBatch, std::max<int64_t>(1, tokens))};
  OpenedModel m;
  m.weights = std::make_unique<GptOssWeights>(load_gpt_oss(
      path, config,
      {.layers = layers, .other_bytes = decoder_bytes(config, layers > 0 ? layers : config.layers, options)}));
  m.decoder = make_decoder(config, *m.weights, options);
  m.end_ids.assign(config.end_tokens.begin(), config.end_tokens.end());
  return m;
}

OpenedModel open_trained(const std::string& path, int64_t layers) {
  if (layers > 0) fail(ErrorCode::usage, "--layers: found ", layers, ", expected none with a model of `ingot train`");
  OpenedModel m;
  m.trained = load_trained(path);
  m.decoder = make_decoder(m.trained->config.model, m.trained->weights, m.trained->looping,
                           products_of(m.trained->config.train));
  if (m.trained->tokenizer->bos() >= 0) m.end_ids.push_back(m.trained->tokenizer->bos());
  return m;
}

}  // namespace

OpenedModel open_model(const std::string& path, int64_t tokens, int64_t layers) {
  const auto start = std::chrono::steady_clock::now();
  OpenedModel m = is_gpt_oss(path) ? open_gpt_oss(path, tokens, layers) : open_trained(path, layers);
  m.load_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (m.weights && m.load_seconds > 1)
    log_info(path, ": ", format_bytes(double(m.weights->bytes())), " of weights in ", fixed(m.load_seconds, 1), " s");
  return m;
}

void require_gpt_oss(const std::string& path) {
  if (!is_gpt_oss(path))
    fail(exists(path) ? ErrorCode::unsupported : ErrorCode::not_found, path, ": found no ",
         exists(path) ? "GPT-OSS checkpoint" : "such file or directory",
         ", expected a GPT-OSS checkpoint: a directory with its config.json, an archive or an .iris file");
}

std::string chosen_model(const std::string& run, const std::string& model) {
  if (run.empty() == model.empty())
    fail(ErrorCode::usage, "found ", run.empty() ? "neither RUN nor" : "RUN and", " --model, expected one of them");
  return run.empty() ? model : run;
}

std::vector<std::vector<int32_t>> read_ids(const std::string& path) {
  const std::string text = read_input(path);
  std::vector<std::vector<int32_t>> lists;
  int64_t line = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view row = std::string_view(text).substr(at, end - at);
    at = end + 1;
    ++line;
    if (row.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string where = detail::concat(path, ": line ", line);
    const Json json = parse_json(row, where);
    const auto wrong = [&](const std::string& found) {
      fail(ErrorCode::bad_data, where, ": found ", found, ", expected a list of token ids");
    };
    if (!json.is_array()) wrong(describe_json(json));
    if (json.empty()) wrong("an empty list");
    std::vector<int32_t>& ids = lists.emplace_back();
    for (const Json& id : json) {
      if (!id.is_number_integer() || id < 0 || id > INT32_MAX) wrong(describe_json(id) + " in it");
      ids.push_back(id.get<int32_t>());
    }
  }
  if (lists.empty()) fail(ErrorCode::bad_data, path, ": found no line, expected one list of token ids a line");
  return lists;
}

void check_ids(const std::vector<std::vector<int32_t>>& lists, int64_t vocab, const std::string& path) {
  for (size_t i = 0; i < lists.size(); ++i)
    for (const int32_t id : lists[i])
      if (id >= vocab)
        fail(ErrorCode::bad_data, path, ": found id ", id, " in list ", i + 1, ", expected 0 to ", vocab - 1,
             ", the model's vocabulary");
}

}  // namespace ingot::cli
