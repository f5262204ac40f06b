#pragma once
// Text to train on: the documents, and the choice of held-out documents.
#include <cstdint>
#include <string>
#include <vector>

namespace ingot {

constexpr const char* kStandardInput = "-";  // as a path

struct Document {
  std::string name;  // the path of its file; followed by ":<line>" for a line of a JSON file
  std::string text;  // UTF-8, not empty
};

// The documents of `path`:
//   a directory         one document per file below the directory, in sorted order
//   *.jsonl, *.ndjson   one document per line: the field "text" of the line's object; blank lines are skipped
//   "-"                 standard input: one document per line where the first line is an object with a "text",
//                       else one document
//   any other file      one document
//
// In a directory, names with a leading "." are left out, and so are Ingot's own outputs (own_output.h) and files with a
// zero byte among the first 8,192 bytes. Linked files and directories are read, each directory once; a linked directory
// that contains `path` is skipped. `left_out`, where not null, receives a line of text for each output of Ingot, each
// binary file and each linked directory that was not read.
std::vector<Document> read_documents(const std::string& path, std::vector<std::string>* left_out = nullptr);

struct SplitOptions {
  int64_t every = 20;  // one of this many documents is held out, in a shuffled order
  double tail = 0.1;   // the share of a single document, at its end, that is held out
  uint64_t seed = 1;
};
struct DocumentSplit {
  std::vector<Document> train, held_out;  // each in the original order
};
DocumentSplit split_documents(std::vector<Document> documents, const SplitOptions& options = {});

int64_t total_bytes(const std::vector<Document>& documents);

}  // namespace ingot
