#include "ingot/core/check.h"

namespace ingot {

const char* error_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument: return "invalid argument";
    case ErrorCode::usage: return "usage";
    case ErrorCode::bad_data: return "bad data";
    case ErrorCode::not_found: return "not found";
    case ErrorCode::io: return "input/output";
    case ErrorCode::busy: return "busy";
    case ErrorCode::unsupported: return "unsupported";
    case ErrorCode::numeric: return "numeric";
    case ErrorCode::interrupted: return "interrupted";
  }
  return "unknown";
}

int exit_status(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument: return 1;
    case ErrorCode::usage: return 2;
    case ErrorCode::bad_data: return 3;
    case ErrorCode::not_found: return 4;
    case ErrorCode::io: return 5;
    case ErrorCode::busy: return 6;
    case ErrorCode::unsupported: return 7;
    case ErrorCode::numeric: return 8;
    case ErrorCode::interrupted: return 130;
  }
  return 1;
}

}  // namespace ingot
