#pragma once
// The addresses of the server, and the checks of a request for an address that takes a body.
#include <microhttpd.h>

#include <optional>
#include <string>
#include <string_view>

#include "ingot/apps/server/exchange.h"
#include "ingot/engines/serve/api_error.h"
#include "ingot/engines/serve/api_request.h"

namespace ingot::server {

constexpr std::string_view kOneModel = "/v1/models/";  // followed by the name of a model

// The kind of request that an address takes in a body; nothing for any other address.
std::optional<Exchange::Kind> body_kind(const std::string& url);
// The end of an error for an unknown address: the meant address where a client's base URL lacks /v1 or has it twice,
// otherwise all addresses. The base URL of OpenAI's clients ends in /v1, and Anthropic's clients add /v1 themselves.
std::string nearby(const std::string& url);
// Throws ApiError 405.
void check_method(const std::string& method, bool right, const char* allowed);
// Throws ApiError 415 for a body that is not plain JSON, and 413 for a body that is longer than the limit.
void check_body_headers(MHD_Connection* c, const ApiLimits& limits);
ApiError too_large(const ApiLimits& limits);

}  // namespace ingot::server
