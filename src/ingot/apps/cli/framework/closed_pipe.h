#pragma once

namespace ingot::cli {

// Thrown where the reader of standard output went away, which ends the program quietly.
struct ClosedPipe {};

}  // namespace ingot::cli
