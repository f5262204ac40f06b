// Converts an archive into another archive.
#include <algorithm>
#include <span>

#include "ingot/io/codecs/sha256.h"
#include "ingot/models/checkpoint/archive_finder.h"
#include "ingot/models/checkpoint/archive_parts.h"

namespace ingot::model_archive {

namespace {

// Writes the parts of an archive from another archive. Parts that keep their form are copied, all other parts are
// converted. The checksums of all parts are verified.
class Rewriter {
 public:
  Rewriter(const ArchiveFile& from, ArchiveWriter& writer, const ConvertOptions& options)
      : from_(from), writer_(writer, options) {}

  void write(const Part& part) {
    const ArchiveEntry& e = *from_.find(part.entry.name);
    if (e.format == part.entry.format) return copy(e);
    from_.prefetch({&e});
    sum_ = Sha256();
    if (!part.matrix.is_bank()) write_rows(part, part.matrix);
    for (int64_t i = 0; part.matrix.is_bank() && i < part.matrix.data.size(0); ++i) write_rows(part, part.matrix.at(i));
    from_.compare(e, sum_.hex());
  }
  void copy(const ArchiveEntry& e) {
    constexpr int64_t kPiece = 8 << 20;
    from_.prefetch({&e});
    sum_ = Sha256();
    for (int64_t at = 0; at < e.bytes; at += kPiece) {
      const int64_t n = std::min(kPiece, e.bytes - at);
      sum_.update(from_.data(e) + at, n);
      writer_.put(from_.data(e) + at, n);
    }
    from_.compare(e, sum_.hex());
  }

 private:
  void write_rows(const Part& part, const WeightMatrix& w) {
    for (int64_t begin = 0; begin < w.rows(); begin += kPieceRows) {
      const WeightMatrix piece = w.row_range(begin, std::min(w.rows(), begin + kPieceRows));
      sum_.update(piece.data.data, piece.data.bytes());
      writer_.put(pieces_.bytes_of(piece, part));
    }
  }

  const ArchiveFile& from_;
  ProgressWriter writer_;
  Sha256 sum_;
  Pieces pieces_;
};

}  // namespace

int64_t convert_archive(const std::string& from, const std::string& to, const ArchivedModel& model,
                        const ConvertOptions& options) {
  const ArchiveFile file(from);
  DecoderWeights views;
  find_parts(file, model, model.spec.layers, views);
  Plan plan{options.forms, {}};
  visit_parts(views, model.spec, model.spec.layers, plan);
  std::vector<ArchiveEntry> entries = plan.entries(), attached;
  for (const ArchiveEntry& e : file.entries())
    if (e.name.starts_with(kFiles)) attached.push_back(e);
  entries.insert(entries.end(), attached.begin(), attached.end());
  ArchiveWriter writer(to, model.kind, about(model, options.forms), std::move(entries));
  Rewriter rewriter(file, writer, options);
  for (const Part& p : plan.parts) rewriter.write(p);
  for (const ArchiveEntry& e : attached) rewriter.copy(e);
  writer.commit();
  return writer.file_bytes();
}

}  // namespace ingot::model_archive
