#pragma once
// Finds the chat format that a checkpoint's template describes. Templates are recognised by their exact text, because
// Ingot has no interpreter of templates.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ingot/text/chat/chat_format.h"
#include "ingot/text/tokenizer.h"

namespace ingot {

// The name of the format, or empty for an unknown template. White space at the end does not matter.
std::string chat_format_of_template(const std::string& text);
// A template of mistral-common may contain default instructions, for conversations that have no instructions of their
// own. Returns these instructions, and the template without them, which chat_format_of_template() knows. Returns
// nothing if the template has no default instructions, or if their text has an escape that mistral-common does not
// write.
struct DefaultSystem {
  std::string text, rest_of_template;
};
std::optional<DefaultSystem> default_system_of_template(const std::string& text);
std::vector<std::string> chat_format_names();
// Throws Error{usage} for an unknown name, Error{bad_data} with `where` for a vocabulary that lacks a control token,
// and Error{unsupported} for a kind of tokenizer that the format cannot use. `default_system`: the default instructions
// of the template, for Mistral's formats.
std::shared_ptr<const ChatFormat> make_chat_format(const std::string& name, std::shared_ptr<const Tokenizer> tokenizer,
                                                   const std::string& where, const std::string& default_system = "");

}  // namespace ingot
