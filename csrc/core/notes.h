#pragma once

#include <string>
#include <vector>

namespace slimrt {

/// Keeps what a user should know of a call that succeeds, until take_notes(). From any thread.
void add_note(std::string message);
std::vector<std::string> take_notes();

}  // namespace slimrt
