#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "core/processors.h"

namespace slimrt {
namespace {

#ifdef __linux__
namespace fs = std::filesystem;

/// CPUs that the control groups (version 2) of this process grant it; 0: no limit.
int quota() {
    std::ifstream groups("/proc/self/cgroup");
    std::string line;
    while (std::getline(groups, line) && !line.starts_with("0::/")) {
    }
    if (!line.starts_with("0::/")) return 0;
    double least = 0;
    for (fs::path group = line.substr(4);; group = group.parent_path()) {
        double granted = 0, period = 0;
        std::ifstream file("/sys/fs/cgroup" / group / "cpu.max");
        const bool limited = static_cast<bool>(file >> granted >> period) && period > 0;  // else "max 100000"
        if (limited) least = least == 0 ? granted / period : std::min(least, granted / period);
        if (group.empty()) break;
    }
    return static_cast<int>(std::ceil(least));
}
#else
int quota() { return 0; }
#endif

}  // namespace

int default_threads() {
    int n = count_cores(fast_ones(processors()));
    if (n == 0) n = static_cast<int>(std::thread::hardware_concurrency());
    if (const int granted = quota(); granted > 0) n = std::min(n, granted);
    return std::max(n, 1);
}

}  // namespace slimrt
