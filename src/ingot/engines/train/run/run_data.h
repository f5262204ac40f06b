#pragma once
#include <memory>
#include <string>
#include <vector>

#include "ingot/data/token_source.h"
#include "ingot/engines/train/run/run_config.h"
#include "ingot/text/tokenizer.h"

namespace ingot {

// The tokenizer and the tokens of a run, made from a path and the run's options (tokenizer, split).
struct RunData {
  std::shared_ptr<const Tokenizer> tokenizer;
  std::shared_ptr<const TokenSource> train, held_out;
  std::vector<std::string> held_out_texts;  // if the data is text
  std::vector<std::string> left_out;        // the parts of the data left unread (data/documents.h)
  std::string tokenizer_file;               // the tokenizer as a file's content
  std::string tokenizer_name;               // tokenizer.json or tokenizer.model
  int64_t train_bytes = 0, held_out_bytes = 0;
};
// Reads text (tokenizing it) or shards. Sets config.model.vocab from the tokenizer. `tokenizer_path` wins over the
// config.
RunData load_run_data(const std::string& path, RunConfig& config, const std::string& tokenizer_path = {});

}  // namespace ingot
