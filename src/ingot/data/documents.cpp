#include "ingot/data/documents.h"

#include <sys/stat.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>

#include "ingot/core/rng.h"
#include "ingot/data/own_output.h"
#include "ingot/io/file.h"
#include "ingot/io/json.h"
#include "ingot/io/utf8.h"

namespace ingot {

namespace {

void require_utf8_text(const std::string& text, const std::string& name) {
  const int64_t at = find_invalid_utf8(text);
  if (at < 0) return;
  char found[8];
  std::snprintf(found, sizeof found, "0x%02x", unsigned(static_cast<unsigned char>(text[size_t(at)])));
  fail(ErrorCode::bad_data, name, ": byte ", at, ": found ", found, ", expected UTF-8 text");
}

// --- the files below a directory
// Whether a file is a picture, a program or the like: no text has a zero byte.
bool is_binary(const std::string& path) {
  const File file = File::open(path);
  std::string head(size_t(std::min<int64_t>(file.size(), 8192)), ' ');
  file.read_at(0, head.data(), int64_t(head.size()));
  return head.find('\0') != std::string::npos;
}

struct FileId {
  dev_t device;
  ino_t inode;
  explicit FileId(const struct stat& s) : device(s.st_dev), inode(s.st_ino) {}
  bool operator<(const FileId& o) const { return std::tie(device, inode) < std::tie(o.device, o.inode); }
};

class TextFiles {
 public:
  TextFiles(const std::string& root, std::vector<std::string>* left_out) : left_out_(left_out) {
    struct stat s;
    for (std::string up = root; ::stat(up.c_str(), &s) == 0 && above_.insert(FileId(s)).second;) up += "/..";
    if (::stat(root.c_str(), &s) == 0) seen_.insert(FileId(s));
    collect(root);
    // Links are followed after the walk, so that a file reachable twice is read under its own name.
    while (!links_.empty()) {
      const std::set<std::string> links = std::move(links_);
      links_.clear();
      for (const std::string& link : links) follow(link);
    }
    std::sort(found.begin(), found.end());
  }
  std::vector<std::string> found;

 private:
  void collect(const std::string& directory) {
    for (const std::string& name : list_directory(directory)) {
      if (name[0] == '.') continue;
      const std::string path = join_path(directory, name);
      struct stat self, target;
      if (::lstat(path.c_str(), &self) != 0 || ::stat(path.c_str(), &target) != 0)
        continue;  // removed meanwhile, or a broken link
      if (S_ISDIR(self.st_mode)) {
        if (seen_.insert(FileId(self)).second && !is_own_output(path)) collect(path);
      } else if (S_ISDIR(target.st_mode)) {
        links_.insert(path);
      } else if (S_ISREG(target.st_mode) && !is_own_output(path)) {
        if (is_binary(path))
          leave_out(path, "a binary file");
        else
          found.push_back(path);
      }
    }
  }
  void follow(const std::string& link) {
    struct stat target;
    if (::stat(link.c_str(), &target) != 0 || seen_.contains(FileId(target))) return;
    if (above_.contains(FileId(target))) return leave_out(link, "a link to a directory above");
    seen_.insert(FileId(target));
    if (!is_own_output(link)) collect(link);
  }
  bool is_own_output(const std::string& path) {
    const std::string kind = own_output(path);
    if (!kind.empty()) leave_out(path, kind);
    return !kind.empty();
  }
  void leave_out(const std::string& path, const std::string& kind) {
    if (left_out_ != nullptr) left_out_->push_back(path + " (" + kind + ")");
  }

  std::vector<std::string>* left_out_;
  std::set<FileId> above_, seen_;  // directories: the root and its parents; the directories read so far
  std::set<std::string> links_;
};

// --- lines of JSON
std::string_view take_line(std::string_view& rest) {
  const size_t end = std::min(rest.find('\n'), rest.size());
  const std::string_view line = rest.substr(0, end);
  rest.remove_prefix(std::min(end + 1, rest.size()));
  return line;
}
bool is_blank(std::string_view line) { return line.find_first_not_of(" \t\r") == std::string_view::npos; }

void add_json_lines(std::string_view rest, const std::string& name, std::vector<Document>& documents) {
  for (int64_t number = 1; !rest.empty(); ++number) {
    const std::string_view line = take_line(rest);
    if (is_blank(line)) continue;
    const std::string where = detail::concat(name, ":", number);
    const Json json = parse_json(line, where);
    const auto text = json.is_object() ? json.find("text") : json.end();
    if (!json.is_object() || text == json.end() || !text->is_string())
      fail(ErrorCode::bad_data, where, ": found ", describe_json(json),
           json.is_object() ? " without a string \"text\"" : "", ", expected an object with the document as \"text\"");
    if (!text->get_ref<const std::string&>().empty()) documents.push_back({where, text->get<std::string>()});
  }
}

bool begins_with_json_line(std::string_view text) {
  while (!text.empty()) {
    const std::string_view line = take_line(text);
    if (is_blank(line)) continue;
    const Json json = Json::parse(line, nullptr, false);
    return json.is_object() && json.contains("text") && json["text"].is_string();
  }
  return false;
}

void add_documents(std::string text, const std::string& name, bool json_lines, std::vector<Document>& documents) {
  require_utf8_text(text, name);
  if (json_lines)
    add_json_lines(text, name, documents);
  else if (!text.empty())
    documents.push_back({name, std::move(text)});
}

}  // namespace

std::vector<Document> read_documents(const std::string& path, std::vector<std::string>* left_out) {
  std::vector<Document> documents;
  if (path == kStandardInput) {
    std::string text = read_standard_input(int64_t(1) << 40);
    const bool json_lines = begins_with_json_line(text);
    add_documents(std::move(text), "standard input", json_lines, documents);
    if (documents.empty()) fail(ErrorCode::bad_data, "standard input: found no text, expected some");
    return documents;
  }
  const bool directory = is_directory(path);
  if (directory && !own_output(path).empty())
    fail(ErrorCode::bad_data, path, ": found ", own_output(path), ", expected text");
  const std::vector<std::string> files = directory ? TextFiles(path, left_out).found : std::vector<std::string>{path};
  for (const std::string& file : files)
    add_documents(read_file(file), file, file.ends_with(".jsonl") || file.ends_with(".ndjson"), documents);
  if (documents.empty())
    fail(ErrorCode::bad_data, path, ": found ",
         files.empty() ? "no file of text in it"
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
      fail(ErrorCode::bad_data, documents[0].name, ": size in bytes: found ", text.size(),
           ", expected more, because a part is held out");
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
