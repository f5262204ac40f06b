#pragma once
// Text to train on: documents, and which of them are held out.
#include <cstdint>
#include <string>
#include <vector>

namespace ingot {

struct Document {
  std::string name;  // the file's path
  std::string text;  // UTF-8, not empty
};

// A file is one document; a directory is one document per file below it, in sorted order. Empty files are left out.
// Text that is not UTF-8 is bad_data naming the file and the byte; so is a path without any text.
std::vector<Document> read_documents(const std::string& path);

struct SplitOptions {
  int64_t every = 20;  // hold out every 20th document of a shuffle
  double tail = 0.1;   // of a single document: its last tenth
  uint64_t seed = 1;
};
struct DocumentSplit {
  std::vector<Document> train, held_out;  // each in the original order
};
DocumentSplit split_documents(std::vector<Document> documents, const SplitOptions& options = {});

int64_t total_bytes(const std::vector<Document>& documents);

}  // namespace ingot
