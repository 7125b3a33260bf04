#pragma once

#include <cstdint>

namespace slimrt {

/// Bytes this process can still use without swapping: what the system has available, within its cgroups;
/// 0: unknown.
uint64_t available_memory();

}  // namespace slimrt
