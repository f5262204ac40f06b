#include "ingot/apps/server/request_header.h"

#include <strings.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "ingot/core/check.h"
#include "ingot/engines/serve/api_error.h"

namespace ingot::server {
namespace {

using Entry = std::pair<const char*, const char*>;  // name and value in the connection's memory; the value may be null
std::vector<Entry> entries(MHD_Connection* c, MHD_ValueKind kind) {
  std::vector<Entry> found;
  MHD_get_connection_values(
      c, kind,
      [](void* into, MHD_ValueKind, const char* name, const char* value) {
        static_cast<std::vector<Entry>*>(into)->emplace_back(name, value);
        return MHD_YES;
      },
      &found);
  return found;
}
size_t length_of(const char* text) { return text == nullptr ? 0 : std::strlen(text); }

// libmicrohttpd before version 1.0 accepts, and misreads, a header line that continues in the next line, a zero byte,
// and a bare line feed. These versions split the header in place and replace separators by zeros: the entries found, in
// order, must then cover the whole header, and each line must end in two zeros.
bool lies_whole(MHD_Connection* c, const char* url, const char* method, const char* version) {
  const auto* size = MHD_get_connection_info(c, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE);
  if (size == nullptr) return false;
  const char* const end = method + size->header_size;
  const char* at = version;
  const auto line_ends = [&] {
    at += std::strlen(at);
    if (end - at < 4 || at[0] != 0 || at[1] != 0) return false;
    at += 2;
    return true;
  };
  if (url != method + std::strlen(method) + 1 || at < url || at >= end || !line_ends()) return false;
  for (const auto& [name, value] : entries(c, MHD_HEADER_KIND)) {
    if (name != at || value == nullptr) return false;
    at += std::strlen(at) + 1;
    while (at < end && (*at == ' ' || *at == '\t')) ++at;
    if (value != at || !line_ends()) return false;
  }
  return end - at == 2 && at[0] == 0 && at[1] == 0;
}

// Names are tokens, values have no control codes, and nothing stands between the lines.
bool is_plain(MHD_Connection* c, const char* url, const char* method, const char* version) {
  for (const auto& [name, value] : entries(c, MHD_HEADER_KIND)) {
    if (!std::all_of(name, name + std::strlen(name), is_token_character) || *name == 0) return false;
    for (const char* p = value; p != nullptr && *p != 0; ++p)
      if ((uint8_t(*p) < 32 && *p != '\t') || *p == 127) return false;
  }
  static const bool old = std::strncmp(MHD_get_version(), "0.", 2) == 0;
  return (std::strcmp(version, "HTTP/1.1") == 0 || std::strcmp(version, "HTTP/1.0") == 0) &&
         (!old || lies_whole(c, url, method, version));
}

}  // namespace

const char* header(MHD_Connection* c, const char* name) {
  return MHD_lookup_connection_value(c, MHD_HEADER_KIND, name);
}

std::vector<std::string> headers(MHD_Connection* c, const char* name) {
  struct Found {
    const char* name;
    std::vector<std::string> values;
  } found{name, {}};
  MHD_get_connection_values(
      c, MHD_HEADER_KIND,
      [](void* into, MHD_ValueKind, const char* key, const char* value) {
        auto& f = *static_cast<Found*>(into);
        if (strcasecmp(key, f.name) == 0) f.values.emplace_back(value == nullptr ? "" : value);
        return MHD_YES;
      },
      &found);
  return found.values;
}

bool is_token_character(char c) {
  static const std::string kMarks = "!#$%&'*+-.^_`|~";
  return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') ||
         (c != 0 && kMarks.find(c) != std::string::npos);
}

std::string lower(std::string s) {
  std::transform(s.begin(), s.end(), s.begin(),
                 [](unsigned char c) { return char(c >= 'A' && c <= 'Z' ? c + 32 : c); });
  return s;
}
std::optional<std::string> unescaped(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out += text[i];
      continue;
    }
    const std::string digits(text.substr(i + 1, 2));
    if (digits.size() != 2 || digits.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos) return {};
    out += char(std::stoi(digits, nullptr, 16));
    i += 2;
  }
  return out;
}

std::string without_port(const std::string& host) {
  if (host.starts_with('[')) return host.substr(1, host.find(']') - 1);
  return host.substr(0, host.rfind(':'));
}

void check_size(MHD_Connection* c, const char* url) {
  constexpr size_t kAddress = 8192, kLine = 8192, kLines = 100;
  size_t address = std::strlen(url), line = 0;
  const auto found = entries(c, MHD_HEADER_KIND);
  for (const auto& [name, value] : entries(c, MHD_GET_ARGUMENT_KIND)) address += length_of(name) + length_of(value) + 2;
  for (const auto& [name, value] : found) line = std::max(line, length_of(name) + length_of(value) + 2);
  if (address > kAddress) throw ApiError(414, detail::concat("found an address of more than ", kAddress, " bytes"));
  if (line > kLine || found.size() > kLines)
    throw ApiError(431, detail::concat("found a header of more than ", kLines, " lines, or a line of more than ", kLine,
                                       " bytes"));
}
void check_framing(MHD_Connection* c, const char* url, const char* method, const char* version) {
  const auto lengths = headers(c, "Content-Length"), codings = headers(c, "Transfer-Encoding");
  const bool number = lengths.empty() ||
                      (!lengths[0].empty() && lengths[0].size() <= 18 &&
                       std::all_of(lengths[0].begin(), lengths[0].end(), [](char d) { return d >= '0' && d <= '9'; }));
  if (lengths.size() > 1 || codings.size() > 1 || (!lengths.empty() && !codings.empty()) || !number ||
      (!codings.empty() && (lower(codings[0]) != "chunked" || std::strcmp(version, "HTTP/1.1") != 0)) ||
      headers(c, "Host").size() != 1 || url[0] != '/' || !is_plain(c, url, method, version))
    throw ApiError(400, "found headers that leave the end of the request or its host ambiguous");
}

}  // namespace ingot::server
