#pragma once

#include <cstdint>

namespace slimrt {

/// Bytes this process may still take without swapping: what the system has available, within the cgroup's
/// limit. 0 when the system does not tell.
uint64_t available_memory();

}  // namespace slimrt
