#pragma once
// What an OpenAI client is told of a request that fails: {"error": {"message", "type", "param", "code"}} and a status.
#include <stdexcept>
#include <string>

namespace ingot {

struct ApiError : std::runtime_error {
  ApiError(int status_, const std::string& message, std::string param_ = "", std::string code_ = "")
      : std::runtime_error(message), status(status_), param(std::move(param_)), code(std::move(code_)) {}
  int status;               // of HTTP
  std::string param, code;  // the field it is about and a word for programs; empty: null
  const char* type() const {
    return status == 401   ? "authentication_error"
           : status == 429 ? "rate_limit_error"
           : status >= 500 ? "server_error"
                           : "invalid_request_error";
  }
};
std::string to_json(const ApiError& e);

}  // namespace ingot
