#pragma once
// The errors of requests that clients receive.
#include <cstdint>
#include <exception>
#include <string>

#include "ingot/engines/serve/api_error.h"

namespace ingot::detail {

// The error that a client receives. Of an error that the client did not cause, the client gets only the number under
// which the log has the details.
ApiError api_error_of(std::exception_ptr error);
// Throws ApiError 400 for an id that is not below `ids`; `param` names the request's field.
void check_id(int32_t id, int64_t ids, const std::string& param);

}  // namespace ingot::detail
