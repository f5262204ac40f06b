#include <algorithm>

#include "ingot/io/json.h"
#include "ingot/text/chat/harmony.h"

namespace ingot {
namespace {

const std::string kConstrain = "<|constrain|>";

std::string join(const std::vector<std::string>& parts, const std::string& between) {
  std::string out;
  for (size_t i = 0; i < parts.size(); ++i) out += (i ? between : "") + parts[i];
  return out;
}
// Puts "// " before every line of a text.
std::string commented(const std::string& text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    out += "// " + text.substr(at, end - at) + "\n";
    at = end + 1;
  }
  return out;
}

// --- JSON schemas as types
// The result equals the text of the model's training byte for byte, including oddities: a nested object shows its
// description twice, and only the first line of a longer description is a comment.
std::string text_of(const OrderedJson& schema, const char* key) {
  return schema.is_object() && schema.contains(key) && schema[key].is_string() ? schema[key].get<std::string>() : "";
}
const OrderedJson* list_of(const OrderedJson& schema, const char* key) {
  return schema.is_object() && schema.contains(key) && schema[key].is_array() ? &schema[key] : nullptr;
}
std::string quoted(const std::string& text) { return "\"" + text + "\""; }
std::string default_of(const OrderedJson& schema) {
  if (!schema.is_object() || !schema.contains("default")) return "";
  const OrderedJson& value = schema["default"];
  if (!value.is_string()) return value.dump();
  const OrderedJson* values = list_of(schema, "enum");
  const std::string text = value.get<std::string>();
  return values != nullptr && !values->empty() ? text : quoted(text);
}

std::string type_of(const OrderedJson& schema, const std::string& indent);

// A type, with " | null" if the schema is nullable.
std::string nullable_type(const OrderedJson& schema, const std::string& indent) {
  const std::string type = type_of(schema, indent);
  const bool nullable = schema.is_object() && schema.contains("nullable") && schema["nullable"] == true;
  return nullable && type.find("null") == std::string::npos ? type + " | null" : type;
}
// One of several alternative types, followed by its description and default.
std::string variant(const OrderedJson& schema, const std::string& indent, const std::string& description) {
  std::vector<std::string> words;
  if (!description.empty()) words.push_back(description);
  if (const std::string d = default_of(schema); !d.empty()) words.push_back("default: " + d);
  return indent + " | " + nullable_type(schema, indent + "   ") + (words.empty() ? "" : " // " + join(words, " "));
}

// The lines of a property with alternative types.
std::string property_of_variants(const std::string& name, const OrderedJson& schema, const OrderedJson& variants,
                                 const std::string& indent) {
  const std::string about = text_of(schema, "description");
  const bool said_by_first = !variants.empty() && text_of(variants[0], "description") == about;
  const bool above = !about.empty() && !said_by_first;
  std::string out = above ? indent + "// " + about + "\n" : "";
  if (const std::string d = default_of(schema); !d.empty()) out += indent + "// default: " + d + "\n";
  out += indent + name + ":\n";
  for (size_t i = 0; i < variants.size(); ++i) {
    const std::string own = text_of(variants[i], "description");
    out += variant(variants[i], indent, (i == 0 && above) || own == about ? "" : own) + "\n";
  }
  return out + indent + ",\n";
}

std::string property(const std::string& name, const OrderedJson& schema, const std::string& indent) {
  std::string out;
  const OrderedJson* variants = list_of(schema, "oneOf");
  if (const std::string title = text_of(schema, "title"); !title.empty())
    out += indent + "// " + title + "\n" + indent + "//\n";
  if (const std::string about = text_of(schema, "description"); variants == nullptr && !about.empty())
    out += indent + "// " + about + "\n";
  if (const OrderedJson* examples = list_of(schema, "examples"); examples != nullptr && !examples->empty()) {
    out += indent + "// Examples:\n";
    for (const OrderedJson& example : *examples)
      if (example.is_string()) out += indent + "// - " + quoted(example.get<std::string>()) + "\n";
  }
  if (variants != nullptr) return out + property_of_variants(name, schema, *variants, indent);
  out += indent + name + ": " + nullable_type(schema, indent + "    ") + ",";
  if (const std::string d = default_of(schema); !d.empty()) out += " // default: " + d;
  return out + "\n";
}

std::string object_type(const OrderedJson& schema, const std::string& indent) {
  std::string out;
  if (const std::string about = text_of(schema, "description"); !about.empty()) out += indent + "// " + about + "\n";
  out += "{\n";
  if (schema.contains("properties") && schema["properties"].is_object()) {
    const OrderedJson* required = list_of(schema, "required");
    for (const auto& [name, value] : schema["properties"].items()) {
      const bool needed = required != nullptr && std::find(required->begin(), required->end(), name) != required->end();
      out += property(needed ? name : name + "?", value, indent);
    }
  }
  return out + indent + "}";
}

std::string type_of(const OrderedJson& schema, const std::string& indent) {
  if (!schema.is_object()) return "any";
  std::vector<std::string> several;
  if (const OrderedJson* variants = list_of(schema, "oneOf")) {
    std::string out;
    for (const OrderedJson& v : *variants) out += "\n" + variant(v, indent, text_of(v, "description"));
    return out;
  }
  if (const OrderedJson* types = list_of(schema, "type"))
    for (const OrderedJson& t : *types)
      if (t.is_string()) several.push_back(t == "integer" ? "number" : t.get<std::string>());
  if (!several.empty()) return join(several, " | ");
  const std::string type = text_of(schema, "type");
  if (type == "object") return object_type(schema, indent);
  if (type == "array") return schema.contains("items") ? type_of(schema["items"], indent) + "[]" : "Array<any>";
  if (type == "integer" || type == "number") return "number";
  if (type == "boolean") return type;
  if (type != "string") return "any";
  if (const OrderedJson* values = list_of(schema, "enum"))
    for (const OrderedJson& v : *values)
      if (v.is_string()) several.push_back(quoted(v.get<std::string>()));
  return several.empty() ? type : join(several, " | ");
}

OrderedJson schema_of(const std::string& text) {
  parse_json(text, "parameters",
             {.bytes = 1 << 20});  // refuses invalid JSON; the second parser keeps the order of the keys
  return OrderedJson::parse(text);
}

std::string namespace_text(const HarmonyNamespace& n) {
  std::string out = "## " + n.name + "\n\n";
  if (n.functions.empty()) return out + n.description;
  out += commented(n.description) + "namespace " + n.name + " {\n\n";
  for (const HarmonyFunction& f : n.functions) {
    const std::string taken = f.parameters.empty() ? "()" : "(_: " + harmony_type(f.parameters) + ")";
    out += commented(f.description) + "type " + f.name + " = " + taken + " => any;\n\n";
  }
  return out + "} // namespace " + n.name;
}
std::string tools_text(std::vector<HarmonyNamespace> tools) {
  std::sort(tools.begin(), tools.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  std::vector<std::string> parts{"# Tools"};
  for (const HarmonyNamespace& n : tools) parts.push_back(namespace_text(n));
  return join(parts, "\n\n");
}

}  // namespace

const char* name_of(HarmonyRole r) {
  switch (r) {
    case HarmonyRole::system: return "system";
    case HarmonyRole::developer: return "developer";
    case HarmonyRole::user: return "user";
    case HarmonyRole::assistant: return "assistant";
    case HarmonyRole::tool: return "tool";
  }
  return "?";
}

std::string harmony_type(const std::string& schema) { return type_of(schema_of(schema), ""); }

std::string harmony_system_text(const HarmonySystem& s) {
  std::vector<std::string> parts, lines;
  if (!s.identity.empty()) lines.push_back(s.identity);
  if (!s.knowledge_cutoff.empty()) lines.push_back("Knowledge cutoff: " + s.knowledge_cutoff);
  if (!s.current_date.empty()) lines.push_back("Current date: " + s.current_date);
  if (!lines.empty()) parts.push_back(join(lines, "\n"));
  if (!s.reasoning.empty()) parts.push_back("Reasoning: " + s.reasoning);
  if (!s.tools.empty()) parts.push_back(tools_text(s.tools));
  if (!s.channels.empty()) {
    std::string text = "# Valid channels: " + join(s.channels, ", ") + ". Channel must be included for every message.";
    if (s.calls_functions) text += "\nCalls to these tools must go to the commentary channel: 'functions'.";
    parts.push_back(text);
  }
  return join(parts, "\n\n");
}

std::string harmony_developer_text(const std::string& instructions, const std::vector<HarmonyFunction>& functions) {
  std::vector<std::string> parts;
  if (!instructions.empty()) parts.push_back("# Instructions\n\n" + instructions);
  if (!functions.empty()) parts.push_back(tools_text({{.name = "functions", .functions = functions}}));
  return join(parts, "\n\n");
}

// --- messages ----------------------------------------------------------------------------------------------------
std::vector<HarmonyPiece> render_harmony(const HarmonyMessage& m) {
  std::vector<HarmonyPiece> out;
  const auto control = [&](const char* name) { out.push_back({true, name}); };
  const auto text = [&](const std::string& t) {
    if (!t.empty()) out.push_back({false, t});
  };
  control("<|start|>");
  if (m.role == HarmonyRole::tool)
    text(m.name);
  else
    text(m.name.empty() ? std::string(name_of(m.role)) : name_of(m.role) + (":" + m.name));
  if (!m.recipient.empty() && m.recipient != "all") text(" to=" + m.recipient);
  if (!m.channel.empty()) {
    control("<|channel|>");
    text(m.channel);
  }
  if (m.content_type.rfind(kConstrain, 0) == 0) {
    text(" ");
    control(kConstrain.c_str());
    text(m.content_type.substr(kConstrain.size()));
  } else if (!m.content_type.empty()) {
    text(" " + m.content_type);
  }
  control("<|message|>");
  text(m.content);
  control(m.role == HarmonyRole::assistant && !m.recipient.empty() ? "<|call|>" : "<|end|>");
  return out;
}

namespace {
bool is_by_assistant(const HarmonyMessage& m) { return m.role == HarmonyRole::assistant; }
bool is_final(const HarmonyMessage& m) { return is_by_assistant(m) && m.channel == "final"; }

// The messages, without the analysis among the first `ended`.
std::vector<HarmonyPiece> render_messages(std::span<const HarmonyMessage> conversation, size_t ended) {
  std::vector<HarmonyPiece> out;
  for (size_t i = 0; i < conversation.size(); ++i) {
    if (i < ended && conversation[i].channel == "analysis") continue;
    const std::vector<HarmonyPiece> pieces = render_harmony(conversation[i]);
    out.insert(out.end(), pieces.begin(), pieces.end());
  }
  return out;
}
}  // namespace

std::vector<HarmonyPiece> render_harmony(std::span<const HarmonyMessage> conversation, bool drop_analysis) {
  const auto last = std::find_if(conversation.rbegin(), conversation.rend(), is_by_assistant);
  const auto first = std::find_if(conversation.begin(), conversation.end(), is_final);
  const bool drop = drop_analysis && last != conversation.rend() && is_final(*last);
  return render_messages(conversation, drop ? size_t(first - conversation.begin()) : 0);
}

std::vector<HarmonyPiece> render_harmony_prompt(std::span<const HarmonyMessage> conversation, bool drop_analysis) {
  const auto last = std::find_if(conversation.rbegin(), conversation.rend(), is_final);
  std::vector<HarmonyPiece> out = render_messages(conversation, drop_analysis ? size_t(conversation.rend() - last) : 0);
  out.push_back({true, "<|start|>"});
  out.push_back({false, "assistant"});
  return out;
}

std::string harmony_text(std::span<const HarmonyPiece> pieces) {
  std::string out;
  for (const HarmonyPiece& p : pieces) out += p.text;
  return out;
}

}  // namespace ingot
