#pragma once
// Files and directories that Ingot itself writes. Where they lie among texts, they are not texts to learn from.
#include <string>

namespace ingot {

// What Ingot wrote there: "a run", "a checkpoint", "token shards", "a tokenizer" and so on; empty where it is none of
// these. It is recognised by its content, except for TensorBoard's files and adapters, which have fixed names.
std::string own_output(const std::string& path);

}  // namespace ingot
