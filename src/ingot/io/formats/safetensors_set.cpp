#include "ingot/io/formats/safetensors_set.h"

#include <algorithm>

#include "ingot/core/log.h"
#include "ingot/io/json.h"

namespace ingot {
namespace {

constexpr int64_t kMaxListBytes = 64 << 20;

// Whether a name is that of a file in the directory itself: without a path, and not hidden.
bool is_plain_name(const std::string& name) {
  const auto plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
           c == '-';
  };
  return name.size() <= 255 && name[0] != '.' && std::all_of(name.begin(), name.end(), plain) &&
         name.ends_with(".safetensors");
}

}  // namespace

void SafetensorsSet::open(const std::string& name) {
  auto file = std::make_unique<SafetensorsFile>(join_path(directory_, name));
  for (const SafetensorsEntry& e : file->entries())
    if (const auto [at, fresh] = tensors_.try_emplace(e.name, Place{file.get(), &e}); !fresh)
      fail(ErrorCode::bad_data, file->path(), ": found tensor \"", e.name, "\", which is also in ",
           at->second.file->path());
  files_[name] = std::move(file);
}

void SafetensorsSet::open_index(const std::string& path) {
  const Json json = read_json_file(path, {.depth = 8, .bytes = kMaxListBytes});
  Fields fields(json, path);
  const Json* map = fields.take("weight_map");
  if (map == nullptr || !map->is_object()) fields.wrong("weight_map", "an object of tensor names and file names");
  std::map<std::string, std::string> wanted;  // tensor -> file
  for (const auto& [tensor, file] : map->items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : "";
    if (name.empty() || !is_plain_name(name))
      fail(ErrorCode::bad_data, path, ": weight_map: tensor \"", tensor.substr(0, 200), "\": found ",
           describe_json(file), ", expected the plain name of a .safetensors file");
    wanted[tensor] = name;
    if (files_.count(name) != 0) continue;
    if (!exists(join_path(directory_, name)))
      fail(ErrorCode::not_found, path, ": names the shard ", name, ", which is missing");
    open(name);
  }
  for (const auto& [tensor, name] : wanted) {
    const Place place = find(tensor);
    if (!place || place.file != files_.at(name).get())
      fail(ErrorCode::bad_data, path, ": tensor \"", tensor.substr(0, 200), "\" is not in ", name,
           ", where the index puts it");
  }
  for (const auto& [tensor, place] : tensors_)
    if (wanted.count(tensor) == 0)
      fail(ErrorCode::bad_data, place.file->path(), ": found tensor \"", tensor, "\", which ", path, " does not name");
  const Json* metadata = fields.take("metadata");
  if (metadata == nullptr || !metadata->is_object() || !metadata->contains("total_size")) return;
  // Tools that quantise, merge or rename leave a wrong total_size behind, which no reader uses: the tensors themselves
  // are complete.
  if (const Json& total = (*metadata)["total_size"]; !total.is_null() && total != bytes())
    log_info(path, ": total_size is ", describe_json(total), ", and the tensors have ", bytes(), " bytes");
}

SafetensorsSet::SafetensorsSet(const std::string& directory) : directory_(directory) {
  if (!is_directory(directory)) fail(ErrorCode::not_found, directory, ": is not a directory");
  const std::string single = "model.safetensors", index = single + ".index.json";
  if (exists(join_path(directory, index))) {
    open_index(join_path(directory, index));
    if (exists(join_path(directory, single)) && files_.count(single) == 0)
      fail(ErrorCode::bad_data, directory, ": found both ", single, " and ", index,
           ", which does not name it; expected one");
  } else if (exists(join_path(directory, single))) {
    open(single);
  } else {
    for (const std::string& name : list_directory(directory))
      if (is_plain_name(name)) open(name);
    if (files_.empty()) {
      bool pickled = false;
      for (const std::string& name : list_directory(directory))
        pickled |= name.ends_with(".bin") || name.ends_with(".pth");
      fail(ErrorCode::not_found, directory, ": found no .safetensors file",
           pickled ? ", and weights of PyTorch (.bin or .pth), which are not read; expected safetensors, as "
                     "save_pretrained of transformers writes"
                   : "");
    }
  }
}

SafetensorsSet::Place SafetensorsSet::find(const std::string& name) const {
  const auto at = tensors_.find(name);
  return at == tensors_.end() ? Place{} : at->second;
}

int64_t SafetensorsSet::bytes() const {
  int64_t sum = 0;
  for (const auto& [name, place] : tensors_) sum += place.entry->bytes();
  return sum;
}

}  // namespace ingot
