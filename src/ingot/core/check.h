#pragma once
// INGOT_CHECK(condition, note...) and friends throw ingot::Error. A message states the value found and the value
// expected.
#include <sstream>
#include <stdexcept>
#include <string>

namespace ingot {

// One process exit status per code; the CLI returns `exit_status(code)`.
enum class ErrorCode {
  invalid_argument,  // a caller broke an entry point's contract
  usage,             // command line or configuration
  bad_data,          // a file's content violates its format
  not_found,         // a file or directory is missing
  io,                // the operating system refused to read or write
  busy,              // another process holds the resource
  unsupported,       // valid, but unsupported by this build or machine
  numeric,           // NaN or infinity where finite numbers are required
  interrupted,       // a signal asked to stop
};
const char* error_name(ErrorCode code);
int exit_status(ErrorCode code);

struct Error : std::runtime_error {
  Error(ErrorCode c, const std::string& message) : std::runtime_error(message), code(c) {}
  ErrorCode code;
};

namespace detail {
template <class... Note> std::string concat(const Note&... note) {
  std::ostringstream out;
  ((out << note), ...);
  return out.str();
}
}  // namespace detail

// fail(code, "found ", x, ", expected ", y)
template <class... Note> [[noreturn]] void fail(ErrorCode code, const Note&... note) {
  throw Error(code, detail::concat(note...));
}

}  // namespace ingot

#define INGOT_CHECK(condition, ...)                                     \
  do {                                                                  \
    if (!(condition)) [[unlikely]]                                      \
      ::ingot::fail(::ingot::ErrorCode::invalid_argument, __VA_ARGS__); \
  } while (0)

// INGOT_CHECK_EQ(w.cols(), x.cols(), "rmsnorm: weight length") reports "rmsnorm: weight length: found 3, expected 4",
// and its relatives "expected at most 4". The note names the thing in the words of the caller, so that the message
// needs no expressions of C++.
#define INGOT_CHECK_BINARY(a, op, bound, b, ...)                                                                     \
  do {                                                                                                               \
    const auto& ingot_a = (a);                                                                                       \
    const auto& ingot_b = (b);                                                                                       \
    if (!(ingot_a op ingot_b)) [[unlikely]]                                                                          \
      ::ingot::fail(::ingot::ErrorCode::invalid_argument, ::ingot::detail::concat(__VA_ARGS__), ": found ", ingot_a, \
                    ", expected " bound, ingot_b);                                                                   \
  } while (0)
#define INGOT_CHECK_EQ(a, b, ...) INGOT_CHECK_BINARY(a, ==, "", b, __VA_ARGS__)
#define INGOT_CHECK_LE(a, b, ...) INGOT_CHECK_BINARY(a, <=, "at most ", b, __VA_ARGS__)
#define INGOT_CHECK_LT(a, b, ...) INGOT_CHECK_BINARY(a, <, "less than ", b, __VA_ARGS__)
#define INGOT_CHECK_GE(a, b, ...) INGOT_CHECK_BINARY(a, >=, "at least ", b, __VA_ARGS__)
#define INGOT_CHECK_GT(a, b, ...) INGOT_CHECK_BINARY(a, >, "more than ", b, __VA_ARGS__)
