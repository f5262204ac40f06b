#include "ingot/data/documents.h"

#include <numeric>

#include "ingot/core/rng.h"
#include "ingot/io/file.h"
#include "ingot/io/utf8.h"

namespace ingot {

std::vector<Document> read_documents(const std::string& path) {
  const bool directory = is_directory(path);
  std::vector<Document> documents;
  const std::vector<std::string> files = directory ? list_files(path) : std::vector<std::string>{path};
  for (const std::string& file : files) {
    Document d{file, read_file(file)};
    if (d.text.empty()) continue;
    if (const int64_t at = find_invalid_utf8(d.text); at >= 0) {
      char found[8];
      std::snprintf(found, sizeof found, "0x%02x", unsigned(static_cast<unsigned char>(d.text[size_t(at)])));
      fail(ErrorCode::bad_data, file, ": byte ", at, ": found ", found, ", expected UTF-8 text");
    }
    documents.push_back(std::move(d));
  }
  if (documents.empty())
    fail(ErrorCode::bad_data, path, ": found ",
         files.empty() ? "no file in it"
         : directory   ? detail::concat("no text in its ", files.size(), " files")
                       : "an empty file",
         ", expected text");
  return documents;
}

DocumentSplit split_documents(std::vector<Document> documents, const SplitOptions& options) {
  INGOT_CHECK_GE(options.every, 2, "split: every");
  INGOT_CHECK(options.tail > 0 && options.tail < 1, "split: found tail = ", options.tail,
              ", expected a fraction between 0 and 1");
  DocumentSplit split;
  if (documents.size() == 1) {
    std::string& text = documents[0].text;
    size_t cut = size_t(double(text.size()) * (1 - options.tail));
    while (cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xC0) == 0x80) --cut;  // not inside a character
    if (cut == 0 || cut == text.size())
      fail(ErrorCode::bad_data, documents[0].name, ": found ", text.size(), " bytes, too few to hold some of them out");
    split.held_out.push_back({documents[0].name, text.substr(cut)});
    text.resize(cut);
    split.train = std::move(documents);
    return split;
  }
  const size_t n = documents.size();
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t(0));
  const Rng rng(options.seed, Purpose::split);
  for (size_t i = n; i > 1; --i) std::swap(order[i - 1], order[rng.below(i, i)]);
  std::vector<bool> held(n, false);
  for (size_t i = 0; i < n; i += size_t(options.every)) held[order[i]] = true;
  for (size_t i = 0; i < n; ++i) (held[i] ? split.held_out : split.train).push_back(std::move(documents[i]));
  return split;
}

int64_t total_bytes(const std::vector<Document>& documents) {
  int64_t sum = 0;
  for (const Document& d : documents) sum += int64_t(d.text.size());
  return sum;
}

}  // namespace ingot
