// Sizes in bytes as messages tell them.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace slimrt {

/// A size with a binary unit: "5.2 MiB", "5.20 GiB".
std::string format_bytes(uint64_t bytes);

/// Two sizes to be compared, as format_bytes; in bytes where they differ, but would read the same.
std::pair<std::string, std::string> format_both(uint64_t needed, uint64_t available);

}  // namespace slimrt
