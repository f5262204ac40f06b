#pragma once

namespace ingot::cli {

void set_command_line(int argc, char** argv);  // for command_line() and command_line_without()

}  // namespace ingot::cli
