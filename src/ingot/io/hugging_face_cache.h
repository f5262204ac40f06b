#pragma once
// The cache of Hugging Face's tools keeps a repository as a folder models--ORG--NAME with refs/REVISION, a file that
// names a commit, and snapshots/COMMIT, the files of it.
#include <string>

namespace ingot {

// The snapshot of a repository's folder: that of refs/main, else the only one. Any other path is itself.
// Error{not_found} where the folder has no snapshot or none that is meant.
std::string snapshot_of(const std::string& path);

}  // namespace ingot
