#include "ingot/apps/server/routes.h"

#include <map>

#include "ingot/apps/server/request_header.h"
#include "ingot/core/check.h"

namespace ingot::server {
namespace {

const std::map<std::string, Exchange::Kind>& body_kinds() {
  using Kind = Exchange::Kind;
  static const std::map<std::string, Kind> kinds = {{"/v1/completions", Kind::completion},
                                                    {"/v1/chat/completions", Kind::chat},
                                                    {"/v1/responses", Kind::responses},
                                                    {"/v1/messages", Kind::messages},
                                                    {"/v1/messages/count_tokens", Kind::count_tokens},
                                                    {"/tokenize", Kind::tokenize},
                                                    {"/detokenize", Kind::detokenize}};
  return kinds;
}

}  // namespace

std::optional<Exchange::Kind> body_kind(const std::string& url) {
  const auto found = body_kinds().find(url);
  if (found == body_kinds().end()) return {};
  return found->second;
}

std::string nearby(const std::string& url) {
  const auto known = [](const std::string& u) { return u == "/v1/models" || body_kind(u).has_value(); };
  if (known("/v1" + url)) return "/v1" + url + ": the base URL of OpenAI's clients ends in /v1";
  if (url.starts_with("/v1/v1/") && known(url.substr(3)))
    return url.substr(3) + ": the base URL of Anthropic's clients ends before /v1";
  if (url.starts_with("/v1/responses/")) return "POST /v1/responses: responses are not stored";
  std::string all = "one of /health, /metrics, /v1/models";
  for (const auto& [address, kind] : body_kinds()) all += ", " + address;
  return all;
}

void check_method(const std::string& method, bool right, const char* allowed) {
  if (!right) throw ApiError(405, "found " + method.substr(0, 20) + ", expected " + allowed);
}

void check_body_headers(MHD_Connection* c, const ApiLimits& limits) {
  const char* type = header(c, "Content-Type");
  const std::string kind = type == nullptr ? "" : lower(std::string(type).substr(0, std::string(type).find(';')));
  if (kind.substr(0, kind.find_last_not_of(' ') + 1) != "application/json")
    throw ApiError(415, (type == nullptr ? "found no Content-Type" : "found the Content-Type " + kind.substr(0, 100)) +
                            ", expected the header Content-Type: application/json");
  if (const char* coding = header(c, "Content-Encoding"); coding != nullptr && lower(coding) != "identity")
    throw ApiError(415, "found a Content-Encoding, expected none");
  const char* length = header(c, "Content-Length");
  if (length != nullptr && std::stoull(length) > uint64_t(limits.body)) throw too_large(limits);
}

ApiError too_large(const ApiLimits& limits) {
  return ApiError(413, detail::concat("found a body of more than ", limits.body, " bytes, expected at most that"));
}

}  // namespace ingot::server
