#include "ingot/io/hugging_face_cache.h"

#include <algorithm>

#include "ingot/io/file.h"

namespace ingot {
namespace {

constexpr int64_t kMostBytes = 200;  // of a commit's name

std::vector<std::string> visible_names(const std::string& directory) {
  std::vector<std::string> names = list_directory(directory);
  std::erase_if(names, [](const std::string& name) { return name.starts_with('.'); });
  return names;
}

}  // namespace

std::string snapshot_of(const std::string& path) {
  const std::string snapshots = join_path(path, "snapshots"), main = join_path(join_path(path, "refs"), "main");
  if (!is_directory(path) || !is_directory(snapshots) || exists(join_path(path, "config.json"))) return path;
  const std::vector<std::string> names = visible_names(snapshots);
  std::string wanted;
  if (exists(main)) {
    wanted = read_file(main, kMostBytes);
    wanted.erase(wanted.find_last_not_of(" \r\n\t") + 1);
    if (std::find(names.begin(), names.end(), wanted) == names.end())
      fail(ErrorCode::not_found, main, ": names the snapshot '", wanted,
           "', which is missing: the download is not whole");
  } else if (names.size() == 1) {
    wanted = names[0];
  } else {
    fail(ErrorCode::not_found, snapshots, ": found ", names.size(),
         " snapshots and no refs/main, expected the path of one of them");
  }
  return join_path(snapshots, wanted);
}

}  // namespace ingot
