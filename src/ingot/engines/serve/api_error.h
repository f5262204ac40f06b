#pragma once
// The error of a failed request as OpenAI clients read errors: {"error": {"message", "type", "param", "code"}} and an
// HTTP status.
#include <stdexcept>
#include <string>

namespace ingot {

struct ApiError : std::runtime_error {
  ApiError(int status_, const std::string& message, std::string param_ = "", std::string code_ = "")
      : std::runtime_error(message), status(status_), param(std::move(param_)), code(std::move(code_)) {}
  int status;               // the HTTP status
  std::string param, code;  // the field that caused the error, and an identifier for programs; empty: null
  const char* type() const {
    return status == 401   ? "authentication_error"
           : status == 429 ? "rate_limit_error"
           : status >= 500 ? "server_error"
                           : "invalid_request_error";
  }
};
std::string to_json(const ApiError& e);

}  // namespace ingot
