#pragma once
// Files and directories that Ingot itself writes. Among texts, these are not texts to learn from.
#include <string>

namespace ingot {

// What Ingot wrote there: "a run", "a checkpoint", "token shards", "a tokenizer" and so on; an empty string for any
// other file. The content decides, except for TensorBoard's files and adapters, which have fixed names.
std::string own_output(const std::string& path);

}  // namespace ingot
