#pragma once
// The parts of a model in an archive, as views of the mapped file.
#include <cstdint>
#include <string>
#include <vector>

#include "ingot/io/formats/archive.h"
#include "ingot/models/checkpoint/archive_parts.h"

namespace ingot::model_archive {

// A visitor of visit_parts() that finds each part and checks its shape, layout, format and bytes.
struct Finder {
  const ArchiveFile& file;
  std::vector<const ArchiveEntry*> used = {};
  int64_t bytes = 0;  // of the used entries

  void vector(const std::string& name, Tensor& t, const Shape& shape);
  void matrix(const std::string& name, WeightMatrix& w, int64_t experts, int64_t rows, int64_t cols, Role role);
  // Throws if the archive has a part that was not found, is not an attached file, and does not belong to a layer after
  // the first `layers`.
  void refuse_others(int64_t layers, int64_t all_layers) const;

 private:
  const ArchiveEntry& find(const std::string& name, const std::vector<int64_t>& shape, const char* layout);
  void require_bytes(const ArchiveEntry& e, int64_t expected);
  [[noreturn]] void wrong_format(const ArchiveEntry& e, const char* expected);
  void* memory(const ArchiveEntry& e);
};

// Fills `w` with the first `layers` layers of the archive, and everything outside of layers.
Finder find_parts(const ArchiveFile& file, const ArchivedModel& model, int64_t layers, DecoderWeights& w);

}  // namespace ingot::model_archive
