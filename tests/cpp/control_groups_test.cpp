// Limits of control groups, of made-up ones of both versions.
#include "core/control_groups.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

namespace fs = std::filesystem;
namespace {

struct Left {
    uint64_t memory;
    double cpus;
};

/// What groups leave a process on a system with these files.
Left left(const std::map<std::string, std::string>& files) {
    const fs::path root = fs::temp_directory_path() / ("slimrt-groups-" + std::to_string(::getpid()));
    for (const auto& [name, text] : files) {
        fs::create_directories((root / name).parent_path());
        std::ofstream(root / name) << text << '\n';
    }
    const Left found{slimrt::memory_left_by_groups(root), slimrt::cpus_granted_by_groups(root)};
    fs::remove_all(root);
    return found;
}

void require(Left found, uint64_t memory, double cpus, const char* of) {
    if (found.memory == memory && found.cpus == cpus) return;
    std::printf("%s: %llu bytes, %g CPUs\n", of, static_cast<unsigned long long>(found.memory), found.cpus);
    std::exit(1);
}

}  // namespace

int main() {
    const std::string said = "proc/self/cgroup", v2 = "sys/fs/cgroup/";
    require(left({}), UINT64_MAX, 0, "no groups");
    require(left({{said, "0::/"},
                  {v2 + "memory.max", "1000"},
                  {v2 + "memory.current", "700"},
                  {v2 + "memory.stat", "anon 300\nfile 400\nshmem 100\ninactive_file 50\nactive_file 250"},
                  {v2 + "cpu.max", "150000 100000"}}),
            600, 1.5, "a container");
    require(left({{said, "0::/user.slice/it.scope"},
                  {v2 + "user.slice/it.scope/memory.max", "max"},
                  {v2 + "user.slice/it.scope/cpu.max", "max 100000"},
                  {v2 + "user.slice/it.scope/memory.high", "900"},
                  {v2 + "user.slice/it.scope/memory.current", "100"},
                  {v2 + "user.slice/memory.max", "1000"},
                  {v2 + "user.slice/memory.current", "500"},
                  {v2 + "user.slice/cpu.max", "200000 100000"}}),
            500, 2, "a unit of systemd, limited by the group around it");
    require(left({{said, "0::/it"}, {v2 + "it/memory.high", "900"}, {v2 + "it/memory.current", "100"}}), 800,
            0, "memory.high");
    require(left({{said, "0::/it"}, {v2 + "it/memory.max", "900"}, {v2 + "it/memory.current", "950"}}), 0, 0,
            "more than is allowed");
    // Of a container of version 1 the group that the host names is the folder where groups are mounted.
    require(
        left({{said, "9:name=systemd:/x\n4:memory:/docker/1\n1:cpuacct,cpu:/docker/1\n0::/"},
              {v2 + "memory/memory.limit_in_bytes", "1000"},
              {v2 + "memory/memory.usage_in_bytes", "700"},
              {v2 + "memory/memory.stat", "inactive_file 1\ntotal_inactive_file 50\ntotal_active_file 250"},
              {v2 + "cpu/cpu.cfs_quota_us", "50000"},
              {v2 + "cpu/cpu.cfs_period_us", "100000"}}),
        600, 0.5, "a container, version 1");
    require(left({{said, "4:memory:/batch/job\n1:cpu,cpuacct:/batch/job"},
                  {v2 + "memory/batch/memory.limit_in_bytes", "1000"},
                  {v2 + "memory/batch/job/memory.limit_in_bytes", "9223372036854771712"},
                  {v2 + "memory/memory.limit_in_bytes", "9223372036854771712"},
                  {v2 + "cpu/batch/job/cpu.cfs_quota_us", "-1"},
                  {v2 + "cpu/batch/job/cpu.cfs_period_us", "100000"}}),
            1000, 0, "a job of version 1, limited by the group around it");
    std::printf("ok\n");
}
