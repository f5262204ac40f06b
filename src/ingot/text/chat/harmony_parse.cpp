#include <algorithm>
#include <map>

#include "ingot/core/check.h"
#include "ingot/text/chat/harmony.h"

namespace ingot {
namespace {

const std::string kAssistant = "assistant";
// Control tokens inside a header, as bytes that no UTF-8 text contains, so that text cannot forge them.
constexpr char kChannelMark = '\xfe', kConstrainMark = '\xff';

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words;
  for (size_t at = 0; at < text.size();) {
    if (is_space(text[at])) {
      ++at;
      continue;
    }
    size_t end = at;
    while (end < text.size() && !is_space(text[end])) ++end;
    words.push_back(text.substr(at, end - at));
    at = end;
  }
  return words;
}
// A name up to the first control mark or the first text spelled like a control token.
std::string clean(std::string name) {
  name = name.substr(0, std::min({name.find(kConstrainMark), name.find(kChannelMark), name.find("<|")}));
  std::string out;
  Utf8Stream stream;
  out = stream.push(name);
  return out + stream.finish();
}

constexpr const char* kChannels[] = {"analysis", "commentary", "final"};
// The channel of the first word after the channel's mark. A longer word that contains a known channel counts as that
// channel.
std::string channel_of(const std::string& word) {
  const std::string name = clean(word);
  for (const char* known : kChannels)
    if (name.find(known) != std::string::npos) return known;
  return name;
}
bool is_channel(const std::string& name) {
  return std::find(std::begin(kChannels), std::end(kChannels), name) != std::end(kChannels);
}

// Reads a word of the header other than role and channel.
void take_word(const std::string& word, HarmonyMessage& m) {
  if (word.rfind("to=", 0) == 0) {
    m.recipient = clean(word.substr(3));
    if (m.recipient == "all") m.recipient.clear();
  } else if (word[0] == kConstrainMark) {
    const std::string type = clean(word.substr(1));
    if (!type.empty()) m.content_type = "<|constrain|>" + type;
  } else if (const std::string type = clean(word); m.channel.empty() && is_channel(type)) {
    m.channel = type;  // the <|channel|> before the word is missing
  } else if (!type.empty()) {
    m.content_type = type;
  }
}

// Reads the author. False: the word is not a known role.
bool take_role(const std::string& word, HarmonyMessage& m) {
  static const std::map<std::string, HarmonyRole> known = {{"system", HarmonyRole::system},
                                                           {"developer", HarmonyRole::developer},
                                                           {"user", HarmonyRole::user},
                                                           {"assistant", HarmonyRole::assistant}};
  const std::string name = clean(word);
  const size_t colon = name.find(':');
  const auto at = known.find(name.substr(0, colon));
  if (at != known.end()) {
    m.role = at->second;
    if (colon != std::string::npos) m.name = name.substr(colon + 1);
    return true;
  }
  if (name.starts_with(kAssistant)) {  // "assistantfinal": the mark between the role and the channel is missing
    const std::string rest = channel_of(name.substr(kAssistant.size()));
    if (is_channel(rest)) m.channel = rest;
    return true;
  }
  m.name = name;
  return false;
}

// `started`: the header follows <|start|>, so its first word is the author.
HarmonyMessage read_header(const std::string& header, bool started) {
  HarmonyMessage m{.role = HarmonyRole::assistant};
  // A constrain mark begins a word even where no space separates it from the word before.
  std::string spaced;
  for (const char c : header) {
    if (c == kConstrainMark || c == kChannelMark) spaced += ' ';
    spaced += c;
    if (c == kChannelMark) spaced += ' ';
  }
  bool channel_next = false, role_next = true, role_known = true, stray = false;
  for (const std::string& word : words_of(spaced)) {
    const bool plain = word.rfind("to=", 0) != 0 && word[0] != kConstrainMark;
    if (word[0] == kChannelMark) {
      channel_next = true;
      role_next = stray = false;
    } else if (channel_next && plain) {
      m.channel = channel_of(word);
      channel_next = false;
    } else if (role_next && plain) {
      role_known = take_role(word, m);
      role_next = false;
      stray = !role_known && !started;  // text between messages has no meaning before the channel's mark
    } else if (!stray || !plain) {
      take_word(word, m);
    }
  }
  if (!role_known && !m.name.empty() && (started || !m.recipient.empty()))
    m.role = HarmonyRole::tool;
  else if (!role_known)
    m.name.clear();
  return m;
}

}  // namespace

HarmonyTokens::HarmonyTokens(const ByteBpe& tokenizer, const std::string& where) {
  std::map<std::string, int32_t> ids;
  special.assign(size_t(tokenizer.vocab_size()), 0);
  for (const SpecialToken& s : tokenizer.rules().specials) {
    ids[s.text] = s.id;
    special[size_t(s.id)] = 1;
  }
  const auto find = [&](const char* name) {
    const auto at = ids.find(name);
    if (at == ids.end())
      fail(ErrorCode::bad_data, where, ": found no control token ", name,
           ", expected a vocabulary of the Harmony format");
    return at->second;
  };
  start = find("<|start|>"), end = find("<|end|>"), message = find("<|message|>"), channel = find("<|channel|>");
  end_of_text = ids.count("<|endoftext|>") != 0 ? ids["<|endoftext|>"] : end;
  constrain = find("<|constrain|>"), answer_end = find("<|return|>"), call = find("<|call|>");
}

std::vector<int32_t> encode_harmony(std::span<const HarmonyPiece> pieces, const ByteBpe& tokenizer,
                                    const HarmonyTokens& t) {
  const std::map<std::string, int32_t> controls = {{"<|start|>", t.start},
                                                   {"<|end|>", t.end},
                                                   {"<|message|>", t.message},
                                                   {"<|channel|>", t.channel},
                                                   {"<|constrain|>", t.constrain},
                                                   {"<|return|>", t.answer_end},
                                                   {"<|call|>", t.call}};
  std::vector<int32_t> ids;
  for (const HarmonyPiece& p : pieces) {
    if (p.control) {
      ids.push_back(controls.at(p.text));
      continue;
    }
    const std::vector<int32_t> text = tokenizer.encode(p.text);
    ids.insert(ids.end(), text.begin(), text.end());
  }
  return ids;
}

HarmonyParser::HarmonyParser(const ByteBpe& tokenizer, const HarmonyTokens& tokens, bool answering)
    : tokenizer_(tokenizer), tokens_(tokens) {
  if (answering) {
    state_ = State::header;
    started_ = true;
    header_ = kAssistant;
  }
}

void HarmonyParser::begin_content() {
  messages_.push_back(read_header(header_, started_));
  header_.clear();
  state_ = State::content;
}

// Ends the open header or message.
void HarmonyParser::close() {
  if (state_ == State::content) {
    messages_.back().content += stream_.finish();
  } else if (state_ == State::header) {
    const HarmonyMessage m = read_header(header_, started_);
    const std::string rest = header_.starts_with(kAssistant) ? header_.substr(kAssistant.size()) : "";
    const bool marked = header_.find_first_of(std::string{kChannelMark, kConstrainMark}) != std::string::npos;
    if (!marked && m.channel.empty() && m.recipient.empty() && words_of(rest).size() > 0) {
      // The model wrote no header: all text is content.
      messages_.push_back({.role = HarmonyRole::assistant, .content = stream_.push(rest) + stream_.finish()});
    } else if (!m.channel.empty() || !m.recipient.empty() || !m.content_type.empty()) {
      messages_.push_back(m);  // cut inside the header: a message with the fields read so far and no content
    }
  } else if (const auto words = words_of(header_);
             state_ == State::between && words.size() > 0 && words != std::vector<std::string>{kAssistant}) {
    // Text outside any message is still part of the answer.
    std::erase(header_, kConstrainMark);
    messages_.push_back({.role = HarmonyRole::assistant, .content = stream_.push(header_) + stream_.finish()});
  }
  stream_ = {};
  header_.clear();
  started_ = false;
  state_ = State::between;
}

void HarmonyParser::control(int32_t id) {
  if (id == tokens_.start) {
    close();
    state_ = State::header;
    started_ = true;
  } else if (id == tokens_.message) {
    if (state_ != State::content) begin_content();
  } else if (id == tokens_.channel) {
    if (state_ == State::content) close();  // a message that begins without its <|start|>
    state_ = State::header;
    header_ += kChannelMark;
  } else if (id == tokens_.constrain) {
    if (state_ != State::content) header_ += kConstrainMark;
  } else {
    close();  // <|end|>, <|call|>, <|return|>, <|endoftext|>
  }
}

std::string HarmonyParser::push(int32_t id) {
  if (tokens_.is_special(id)) {
    const bool known = id == tokens_.start || id == tokens_.end || id == tokens_.message || id == tokens_.channel ||
                       id == tokens_.constrain || id == tokens_.answer_end || id == tokens_.call ||
                       id == tokens_.end_of_text;
    const size_t before = messages_.size(), length = before > 0 ? messages_.back().content.size() : 0;
    const bool writing = state_ == State::content;
    if (known) control(id);
    // An incomplete character at the end of a message is replaced by U+FFFD.
    return writing ? messages_[before - 1].content.substr(length) : "";
  }
  const std::string bytes = tokenizer_.token_bytes(id);
  if (state_ != State::content) {
    // Bytes equal to the marks are not valid text and would be replaced anyway.
    for (const char c : bytes) header_ += c == kChannelMark || c == kConstrainMark ? '?' : c;
    return "";
  }
  const std::string text = stream_.push(bytes);
  messages_.back().content += text;
  return text;
}

void HarmonyParser::finish() { close(); }

}  // namespace ingot
