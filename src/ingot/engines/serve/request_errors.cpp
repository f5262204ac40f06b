#include "ingot/engines/serve/request_errors.h"

#include "ingot/core/check.h"
#include "ingot/core/log.h"
#include "ingot/engines/serve/random_word.h"

namespace ingot::detail {
namespace {

ApiError logged(const std::string& what) {
  const std::string id = random_word();
  log_error("request failed (", id, "): ", what);
  return ApiError(500, "the request failed; the server's log says why under " + id);
}

}  // namespace

ApiError api_error_of(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const ApiError& e) { return e; } catch (const Error& e) {
    if (e.code == ErrorCode::busy) return ApiError(429, e.what(), "", "server_busy");
    if (e.code == ErrorCode::usage) return ApiError(400, e.what());
    return logged(e.what());
  } catch (const std::exception& e) { return logged(e.what()); } catch (...) {
    return logged("something that is no exception");
  }
}

void check_id(int32_t id, int64_t ids, const std::string& param) {
  if (id < 0 || id >= ids)
    throw ApiError(400, detail::concat(param, ": found id ", id, ", expected 0 to ", ids - 1), param);
}

}  // namespace ingot::detail
