#pragma once
// The header of an HTTP request: its lines, and the refusal of headers that are too large, or that two servers could
// read differently.
#include <microhttpd.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ingot::server {

// The value of the first line of this name, or null; the values of all lines of this name, in any case of letters.
const char* header(MHD_Connection* c, const char* name);
std::vector<std::string> headers(MHD_Connection* c, const char* name);

// Throws ApiError 414 or 431 for headers larger than any client's, even if they fit into the memory of a connection.
void check_size(MHD_Connection* c, const char* url);
// Throws ApiError 400 for headers that two servers could read differently; the connection closes then. The three texts
// must lie in the connection's memory, unchanged.
void check_framing(MHD_Connection* c, const char* url, const char* method, const char* version);

// Whether a character may stand in the name of a header.
bool is_token_character(char c);
// With small letters in place of A to Z.
std::string lower(std::string s);
// Decodes the escapes (%2F) in a part of an address; nothing if an escape is malformed.
std::optional<std::string> unescaped(std::string_view text);
// "[::1]:8080" is ::1.
std::string without_port(const std::string& host);

}  // namespace ingot::server
