// What Linux's control groups leave this process: containers, systemd's units and batch systems limit it so.
#pragma once

#include <cstdint>
#include <string>

namespace slimrt {

// Of every group that the process is in, to the outermost one it sees, of version 2 and of version 1.
// root: in front of /proc and /sys, for tests.

/// Bytes that the process can still use, file pages that are given back when needed among them; UINT64_MAX:
/// no limit.
uint64_t memory_left_by_groups(const std::string& root = "");

/// CPUs that the process may keep busy; 0: no limit.
double cpus_granted_by_groups(const std::string& root = "");

}  // namespace slimrt
