#pragma once

namespace ingot::cli {

// Thrown when the reader of standard output has closed the pipe. The program then ends without a message.
struct ClosedPipe {};

}  // namespace ingot::cli
