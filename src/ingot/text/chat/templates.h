#pragma once
// Which chat format a checkpoint's template stands for. Templates are recognised by their exact text; Ingot has no
// interpreter of templates.
#include <memory>
#include <string>
#include <vector>

#include "ingot/text/byte_bpe.h"
#include "ingot/text/chat/chat_format.h"

namespace ingot {

// The name of the format, or empty where the template is not known. White space at the end does not count.
std::string chat_format_of_template(const std::string& text);
std::vector<std::string> chat_format_names();
// Error{usage} for an unknown name; Error{bad_data} names `where` for a vocabulary that lacks a control token.
std::shared_ptr<const ChatFormat> make_chat_format(const std::string& name, std::shared_ptr<const ByteBpe> tokenizer,
                                                   const std::string& where);

}  // namespace ingot
