#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <thread>

#include "core/thread_pool.h"

#ifdef __linux__
#include <sched.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace slimrt {
namespace {

#ifdef __linux__
namespace fs = std::filesystem;

std::string first_line(const fs::path& path) {
    std::string line;
    std::ifstream file(path);
    std::getline(file, line);
    return line;
}

/// How fast a CPU is among its neighbours; 1 when the system does not say.
double relative_speed(const fs::path& cpu) {
    for (const char* name : {"cpu_capacity", "cpufreq/cpuinfo_max_freq"}) {
        double speed = 0;
        if (std::ifstream(cpu / name) >> speed) return speed;
    }
    return 1;
}

/// The physical cores this process may run on, without those much slower than the fastest.
int usable_cores() {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 0;
    std::map<std::string, double> speeds;  // by the core's list of hardware threads
    double fastest = 0;
    for (int i = 0; i < CPU_SETSIZE; ++i) {
        if (!CPU_ISSET(i, &allowed)) continue;
        const fs::path cpu = "/sys/devices/system/cpu/cpu" + std::to_string(i);
        std::string core = first_line(cpu / "topology/thread_siblings_list");
        if (core.empty()) core = std::to_string(i);
        speeds[core] = relative_speed(cpu);
        fastest = std::max(fastest, speeds[core]);
    }
    return static_cast<int>(std::count_if(speeds.begin(), speeds.end(),
                                          [&](const auto& core) { return core.second >= 0.6 * fastest; }));
}

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
#elif defined(__APPLE__)
/// The physical cores of the fastest kind (level 0); older systems have one kind.
int usable_cores() {
    for (const char* name : {"hw.perflevel0.physicalcpu", "hw.physicalcpu"}) {
        int cores = 0;
        size_t bytes = sizeof cores;
        if (::sysctlbyname(name, &cores, &bytes, nullptr, 0) == 0 && cores > 0) return cores;
    }
    return 0;
}
int quota() { return 0; }
#else
int usable_cores() { return 0; }
int quota() { return 0; }
#endif

}  // namespace

int default_threads() {
    int n = usable_cores();
    if (n == 0) n = static_cast<int>(std::thread::hardware_concurrency());
    if (const int granted = quota(); granted > 0) n = std::min(n, granted);
    return std::max(n, 1);
}

}  // namespace slimrt
