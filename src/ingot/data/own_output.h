#pragma once
// Files and directories written by Ingot itself. Training on texts leaves these out.
#include <string>

namespace ingot {

// The kind of Ingot's output at a path: "a run", "a checkpoint", "token shards", "a tokenizer" and so on; an empty
// string for all further files. The content decides, except for TensorBoard's files and adapters, which have fixed
// names.
std::string own_output(const std::string& path);

}  // namespace ingot
