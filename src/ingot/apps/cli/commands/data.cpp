// ingot data pack|info: writes text as token shards, and describes shards or texts.
#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/shared/runs.h"
#include "ingot/core/check.h"
#include "ingot/core/log.h"
#include "ingot/core/progress.h"
#include "ingot/data/documents.h"
#include "ingot/data/token_source.h"
#include "ingot/io/file.h"
#include "ingot/io/json.h"
#include "ingot/text/tokenizer.h"

namespace ingot::cli {
namespace {

struct PackOptions {
  std::string data, tokenizer, out;
  int64_t shard_tokens = 100'000'000, held_out_every = 20;
  uint64_t seed = 1;
};

void pack(const PackOptions& o) {
  if (o.held_out_every == 1)
    fail(ErrorCode::usage, "--held-out-every: found 1, which leaves nothing to train on; expected 0, or at least 2");
  const auto tokenizer = load_tokenizer(o.tokenizer);
  DocumentSplit split;
  if (o.held_out_every == 0)
    split.train = documents_of(o.data);
  else
    split = split_documents(documents_of(o.data), {.every = o.held_out_every, .seed = o.seed});
  create_directories(o.out);
  if (holds_shards(o.out))
    fail(ErrorCode::usage, o.out, ": found shards in it, which training would read with the new ones; expected none");
  const auto write = [&](const std::vector<Document>& documents, const std::string& name) {
    if (documents.empty()) return;
    const auto tokens = tokenize_documents(*tokenizer, documents);
    const auto paths = write_shards(join_path(o.out, name), *tokens, tokenizer->hash(), o.shard_tokens);
    log_info(name, ": ", counted(int64_t(documents.size()), "document"), ", ",
             format_bytes(double(total_bytes(documents))), ", ", with_commas(tokens->size()), " tokens in ",
             counted(int64_t(paths.size()), "shard"));
  };
  try {
    write(split.train, "train");
    write(split.held_out, "val");
  } catch (...) {  // after a failure, shards of a part of the text must not be mistaken for the whole text
    try {
      for (const std::string& name : list_directory(o.out))
        if (name.ends_with(".bin")) remove_file(join_path(o.out, name));
    } catch (const Error& e) { log_warn(e.what()); }
    throw;
  }
  log_info("wrote ", o.out);
}

OrderedJson describe_shards(const std::vector<std::string>& paths) {
  OrderedJson list = OrderedJson::array();
  for (const std::string& path : paths) {
    const ShardHeader h = read_shard_header(path);
    list.push_back({{"path", path},
                    {"version", h.version},
                    {"tokens", h.tokens},
                    {"token_bytes", h.token_bytes()},
                    {"tokenizer_hash", h.tokenizer_hash}});
  }
  return list;
}

void describe(const std::string& data, bool json) {
  OrderedJson report;
  report["path"] = data;
  if (holds_shards(data)) {
    const ShardPaths shards = find_shards(data);
    report["train"] = describe_shards(shards.train);
    report["held_out"] = describe_shards(shards.held_out);
  } else {
    const auto documents = documents_of(data);
    size_t longest = 0;
    for (const Document& d : documents) longest = std::max(longest, d.text.size());
    report["documents"] = documents.size();
    report["bytes"] = total_bytes(documents);
    report["longest_bytes"] = longest;
  }
  if (json) return write_out(show_json(report) + "\n");
  if (report.contains("documents"))
    return write_out(data + ": text, " + counted(report["documents"].get<int64_t>(), "document") + ", " +
                     with_commas(report["bytes"].get<int64_t>()) + " bytes, the longest " +
                     with_commas(report["longest_bytes"].get<int64_t>()) + "\n");
  for (const char* part : {"train", "held_out"})
    for (const auto& s : report[part])
      write_out(s["path"].get<std::string>() + ": " + part + ", " + with_commas(s["tokens"].get<int64_t>()) +
                " tokens of " + std::to_string(s["token_bytes"].get<int64_t>()) + " bytes, tokenizer " +
                (s["tokenizer_hash"] == 0 ? "unknown" : std::to_string(s["tokenizer_hash"].get<uint32_t>())) + "\n");
}

}  // namespace

void add_data(Command& root) {
  Command& c = root.add("data", "Turns text into token shards; describes shards and texts");
  c.examples(R"(  ingot data pack --data corpus/ --tokenizer tok.json --out shards/
  ingot data info shards/)");
  {
    Command& p = c.add("pack", "Tokenizes text and writes shards: <out>/train_*.bin and, held out, <out>/val_*.bin");
    auto o = std::make_shared<PackOptions>();
    p.text("--data PATH", o->data, "a text file, a directory with one document per file, or JSON lines").require();
    p.text("--tokenizer FILE", o->tokenizer, "the tokenizer").require();
    p.text("--out DIR", o->out, "the directory to write to").require();
    p.integer("--shard-tokens N", o->shard_tokens, 1, INT32_MAX, "most tokens of a shard (default: 100000000)");
    p.integer("--held-out-every N", o->held_out_every, 0, int64_t(1) << 40,
              "hold out every N-th document of a shuffle, N at least 2; 0: none (default: 20)");
    p.unsigned_integer("--seed N", o->seed, "seed of the shuffle (default: 1)");
    p.examples(R"(  ingot data pack --data corpus/ --tokenizer tok.json --out shards/
  ingot train --preset demo --data shards/ --tokenizer tok.json --out runs/a)");
    p.run([o, &p] {
      if (o->held_out_every == 0) p.refuse_given({"seed"}, "--held-out-every 0");
      pack(*o);
    });
  }
  {
    Command& i = c.add("info", "Describes a directory of shards, a shard or a text");
    auto data = std::make_shared<std::string>();
    auto json = std::make_shared<bool>(false);
    i.text("PATH", *data, "shards or text; - is standard input").require();
    i.flag("--json", *json, "print one JSON object");
    i.examples(R"(  ingot data info shards/
  ingot data info corpus/ --json)");
    i.run([data, json] { describe(*data, *json); });
  }
}

}  // namespace ingot::cli
