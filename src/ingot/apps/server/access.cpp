#include "ingot/apps/server/access.h"

#include <algorithm>
#include <cstring>

#include "ingot/apps/server/request_header.h"
#include "ingot/engines/serve/api_error.h"
#include "ingot/io/codecs/sha256.h"

namespace ingot::server {
namespace {

// Compares in a time that does not depend on the contents.
bool same_in_constant_time(const std::string& a, const std::string& b) {
  unsigned differ = a.size() != b.size();
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) differ |= unsigned(a[i] ^ b[i]);
  return differ == 0;
}
bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

Access::Access(const ServerOptions& options) : hosts_(options.hosts), origins_(options.origins) {
  for (const std::string& key : options.keys) key_hashes_.push_back(sha256(key));
}

void Access::check_host(MHD_Connection* c) const {
  const std::string host = lower(without_port(header(c, "Host")));
  if (!hosts_.empty() && !contains(hosts_, host))
    throw ApiError(403, "found a host that this server is not known by; --allow-host adds one", "", "host_not_allowed");
}

std::string Access::check_origin(MHD_Connection* c) const {
  const char* origin = header(c, "Origin");
  if (origin == nullptr) return "";
  const std::string host = header(c, "Host");
  if (origin == "http://" + host || origin == "https://" + host) return "";
  if (!contains(origins_, origin))
    throw ApiError(403, "found an origin that may not ask here; --cors-origin adds one", "", "origin_not_allowed");
  return origin;
}

std::string Access::check_key(MHD_Connection* c) const {
  if (key_hashes_.empty()) return "";
  // Anthropic's clients send x-api-key, and some of them send both headers.
  const auto given = headers(c, "Authorization"), plain = headers(c, "X-Api-Key");
  std::string key;
  if (given.empty() && plain.size() == 1) key = plain[0];
  if (given.size() == 1 && lower(given[0].substr(0, 7)) == "bearer ") key = given[0].substr(7);
  const std::string hash = sha256(key);
  bool known = false;
  for (const std::string& h : key_hashes_) known |= same_in_constant_time(h, hash);
  if (!known || given.size() + plain.size() == 0 || given.size() > 1)
    throw ApiError(401, "found no API key that is known here", "", "invalid_api_key");
  return hash;
}

// An allowed origin may send any headers: client libraries add headers of their own, which pages cannot remove.
Reply preflight(MHD_Connection* c) {
  const char* asked = header(c, "Access-Control-Request-Headers");
  const bool names = asked != nullptr && *asked != 0 && std::all_of(asked, asked + std::strlen(asked), [](char at) {
                       return is_token_character(at) || at == ',' || at == ' ';
                     });
  Reply r{.status = 204,
          .headers = {{"Access-Control-Allow-Methods", "GET, POST"},
                      {"Access-Control-Allow-Headers", names ? asked : "Authorization, Content-Type"},
                      {"Access-Control-Max-Age", "600"}}};
  // Browsers ask for permission before a page from the internet sends requests to a private network.
  if (header(c, "Access-Control-Request-Private-Network") != nullptr)
    r.headers.emplace_back("Access-Control-Allow-Private-Network", "true");
  return r;
}

}  // namespace ingot::server
