#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <thread>

#include "core/processors.h"
#include "core/text_file.h"

namespace slimrt {
namespace {

#ifdef __linux__
/// The CPU quota of the control groups (version 2) of this process, in CPUs; 0: no limit.
int quota() {
    const std::string groups = '\n' + text_of("/proc/self/cgroup"), root = "\n0::";
    const size_t at = groups.find(root + "/");
    if (at == std::string::npos) return 0;
    double least = 0;
    std::string group = groups.substr(at + root.size(), groups.find('\n', at + 1) - at - root.size());
    for (; !group.empty(); group.resize(group.rfind('/'))) {
        const std::string said = first_line("/sys/fs/cgroup" + group + "/cpu.max");
        char* rest = nullptr;
        const double granted = std::strtod(said.c_str(), &rest), period = std::strtod(rest, nullptr);
        const bool limited = granted > 0 && period > 0;  // else "max 100000"
        if (limited) least = least == 0 ? granted / period : std::min(least, granted / period);
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
