#include "ingot/text/chat/answer_parser.h"

#include <algorithm>
#include <utility>

#include "ingot/io/json.h"
#include "ingot/text/chat/turns.h"
#include "ingot/text/utf8.h"

namespace ingot {
namespace {

class Parser final : public ChatParser {
 public:
  Parser(const Tokenizer& tokenizer, const AnswerTokens& tokens)
      : tokenizer_(tokenizer), tokens_(tokens), special_(specials_of(tokenizer)) {}

  std::vector<ChatDelta> push(int32_t id) override {
    last_.reset();
    deltas_.clear();
    if (ended_) return {};
    if (id >= 0 && id == tokens_.turn) {
      ended_ = true;
    } else if (id >= 0 && id == tokens_.think_begin) {
      enter(ChatKind::thought);
    } else if (id >= 0 && id == tokens_.call_begin) {
      enter(ChatKind::call);
    } else if (id >= 0 && (id == tokens_.think_end || id == tokens_.call_end)) {
      enter(ChatKind::text);
    } else if (!std::binary_search(special_.begin(), special_.end(), id)) {
      last_ = kind_;
      add(stream_.push(tokenizer_.token_bytes(id)));
    }
    return std::move(deltas_);
  }
  std::vector<ChatDelta> finish() override {
    last_.reset();
    deltas_.clear();
    if (!ended_) leave();
    return std::move(deltas_);
  }
  std::optional<ChatKind> kind_of_last() const override { return last_; }
  bool ended() const override { return ended_; }

 private:
  static std::vector<int32_t> specials_of(const Tokenizer& tokenizer) {
    std::vector<int32_t> ids;
    for (const SpecialToken& s : tokenizer.specials()) ids.push_back(s.id);
    std::sort(ids.begin(), ids.end());
    return ids;
  }
  // Newlines before further text are content; newlines at the end of a part are not.
  void add(std::string text) {
    if (std::exchange(may_drop_space_, may_drop_space_ && text.empty()) && text.starts_with(' ')) text.erase(0, 1);
    if (kind_ == ChatKind::call) {
      held_ += text;
      return;
    }
    std::string all = held_ + text;
    if (may_be_call(all)) {
      held_ = all;
      return;
    }
    if (!begun_ && trims_) all.erase(0, std::min(all.find_first_not_of('\n'), all.size()));
    const size_t end = has_tokens() ? all.find_last_not_of('\n') + 1 : all.size();  // npos + 1 is 0
    held_ = all.substr(end);
    if (end > 0) emit({.kind = kind_, .content = all.substr(0, end)});
  }
  // In a format without tokens around calls, an answer that may still become a call is withheld.
  bool may_be_call(const std::string& all) const {
    if (tokens_.json_functions.empty() || begun_ || parts_ > 0) return false;
    const size_t first = all.find_first_not_of(" \n");
    return first == all.npos || all[first] == '{';
  }
  bool is_known(const std::string& name) const {
    const auto& names = tokens_.json_functions;
    return names.empty() || std::find(names.begin(), names.end(), name) != names.end();
  }
  bool has_tokens() const { return tokens_.think_begin >= 0 || tokens_.call_begin >= 0; }
  void emit(ChatPart part) {
    if (!begun_) ++parts_;
    deltas_.push_back({.part = parts_ - 1, .begins = !begun_, .added = std::move(part)});
    begun_ = true;
  }
  void enter(ChatKind kind) {
    leave();
    kind_ = kind;
    trims_ = true;
    may_drop_space_ = tokens_.space_before_parts;
  }
  // Ends a part. Withheld text that is not a call becomes content.
  void leave() {
    add(stream_.finish());
    if (kind_ == ChatKind::call || may_be_call(held_)) {
      const OrderedJson json = OrderedJson::parse(held_, nullptr, false);
      const auto& calls = json.is_array() && !json.empty() ? json : OrderedJson::array({json});
      begun_ = false;
      if (std::all_of(calls.begin(), calls.end(), [&](const OrderedJson& call) { return is_call(call); }))
        for (const OrderedJson& call : calls) emit_call(call);
      else if (held_.find_first_not_of('\n') != held_.npos)
        emit({.kind = ChatKind::text, .content = held_});
    }
    held_.clear();
    begun_ = false;
  }
  bool is_call(const OrderedJson& json) const {
    return json.is_object() && json.contains("name") && json.at("name").is_string() && json.at("name") != "" &&
           is_known(json.at("name").get<std::string>());
  }
  void emit_call(const OrderedJson& call) {
    // The formats name one of the two words, and models write the other one now and then.
    const char* const arguments = call.contains("arguments") ? "arguments" : "parameters";
    const bool has_id = call.contains("id") && call.at("id").is_string();
    begun_ = false;
    emit({.kind = ChatKind::call,
          .name = function_name_of(call.at("name").get<std::string>()),
          .content = call.contains(arguments) ? python_json(call.at(arguments).dump()) : "{}",
          .id = has_id ? call.at("id").get<std::string>() : ""});
  }

  const Tokenizer& tokenizer_;
  const AnswerTokens tokens_;
  const std::vector<int32_t> special_;
  Utf8Stream stream_;
  ChatKind kind_ = ChatKind::text;
  bool begun_ = false, trims_ = false, ended_ = false;  // begun_: the part already has content
  bool may_drop_space_ = tokens_.space_before_parts;    // no text of the part was seen yet
  // withheld text: newlines that may end the part, or the text of a call
  std::string held_;
  size_t parts_ = 0;
  std::optional<ChatKind> last_;
  std::vector<ChatDelta> deltas_;
};

}  // namespace

std::unique_ptr<ChatParser> make_answer_parser(const Tokenizer& tokenizer, const AnswerTokens& tokens) {
  return std::make_unique<Parser>(tokenizer, tokens);
}

}  // namespace ingot
