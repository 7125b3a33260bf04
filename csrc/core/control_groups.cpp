#include "core/control_groups.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "core/text_file.h"

namespace slimrt {
namespace {

/// The folders of this process's groups that may limit what a controller manages, the innermost first.
std::vector<std::string> folders_of(const std::string& controller, const std::string& root) {
    std::vector<std::string> folders;
    const std::string groups = text_of(root + "/proc/self/cgroup");
    for (size_t at = 0, end = 0; (end = groups.find('\n', at)) != std::string::npos; at = end + 1) {
        const std::string line = groups.substr(at, end - at);  // "0::/outer/inner", or "4:cpu,cpuacct:/outer"
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string names = line.substr(first + 1, second - first - 1);
        if (!names.empty() && (',' + names + ',').find(',' + controller + ',') == std::string::npos) continue;
        // By its own name even where it is mounted with others, which are listed in any order.
        const std::string mounted = root + "/sys/fs/cgroup/" + (names.empty() ? "" : controller);
        // The last is where they are mounted: of a container it may be the group of another path on the host.
        for (std::string group = line.substr(second + 1);; group.resize(group.rfind('/'))) {
            folders.push_back(mounted + group + '/');
            if (group.find('/') == std::string::npos) break;
        }
    }
    return folders;
}

/// The number behind a key at the start of a line of a text, or without a key at its start; 0: none, or
/// "max".
uint64_t number_in(const std::string& text, const std::string& key = "") {
    const std::string lines = '\n' + text;
    const size_t at = lines.find("\n" + key);
    return at == std::string::npos ? 0 : std::strtoull(lines.c_str() + at + 1 + key.size(), nullptr, 10);
}

struct MemoryFiles {
    const char *limit, *used;
    std::string with_children;  // in front of a key of memory.stat
};

}  // namespace

uint64_t memory_left_by_groups(const std::string& root) {
    // A process over memory.high is not killed, but stopped again and again.
    static const MemoryFiles kinds[] = {{"memory.max", "memory.current", ""},
                                        {"memory.high", "memory.current", ""},
                                        {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_"}};
    uint64_t least = UINT64_MAX;
    for (const std::string& group : folders_of("memory", root)) {
        for (const MemoryFiles& files : kinds) {
            const uint64_t limit = number_in(text_of(group + files.limit));
            if (limit == 0 || limit > UINT64_MAX / 4) continue;  // version 1 writes no limit as such a number
            const uint64_t current = number_in(text_of(group + files.used));
            const std::string stat = text_of(group + "memory.stat");
            const uint64_t pages = number_in(stat, files.with_children + "inactive_file ") +
                                   number_in(stat, files.with_children + "active_file ");
            const uint64_t used = current - std::min(current, pages);
            least = std::min(least, limit - std::min(limit, used));
        }
    }
    return least;
}

double cpus_granted_by_groups(const std::string& root) {
    double least = 0;
    for (const std::string& group : folders_of("cpu", root)) {
        std::string said = first_line(group + "cpu.max");  // "max 100000" where there is no limit
        if (said.empty())
            said = first_line(group + "cpu.cfs_quota_us") + ' ' + first_line(group + "cpu.cfs_period_us");
        char* rest = nullptr;
        const double granted = std::strtod(said.c_str(), &rest), period = std::strtod(rest, nullptr);
        const bool limited = granted > 0 && period > 0;  // version 1 writes no limit as -1
        if (limited) least = least == 0 ? granted / period : std::min(least, granted / period);
    }
    return least;
}

}  // namespace slimrt
