#pragma once
// The cache of Hugging Face's tools keeps a repository as a folder models--ORG--NAME with refs/REVISION, a file with
// the name of a commit, and snapshots/COMMIT, the files of this commit.
#include <string>

namespace ingot {

// The snapshot of a repository's folder: the snapshot of refs/main, else the only snapshot. Any further path is
// returned unchanged. Error{not_found} where the folder has no snapshot, or several without refs/main.
std::string snapshot_of(const std::string& path);

}  // namespace ingot
