#include "core/memory_info.h"

#ifdef __APPLE__
#include <mach/mach.h>
#else
#include <algorithm>
#include <cstdlib>

#include "core/text_file.h"
#endif

namespace slimrt {
#ifdef __APPLE__

/// Free pages, and inactive ones, which the system reclaims first.
uint64_t available_memory() {
    const mach_port_t host = ::mach_host_self();
    vm_statistics64_data_t pages{};
    mach_msg_type_number_t count = HOST_VM_INFO64_COUNT;
    vm_size_t page_bytes = 0;
    const bool known = ::host_page_size(host, &page_bytes) == KERN_SUCCESS &&
                       ::host_statistics64(host, HOST_VM_INFO64, reinterpret_cast<host_info64_t>(&pages),
                                           &count) == KERN_SUCCESS;
    ::mach_port_deallocate(::mach_task_self(), host);
    return known ? (uint64_t{pages.free_count} + pages.inactive_count) * page_bytes : 0;
}

#else
namespace {

/// The number behind a key at the start of a line of a file, or without a key at its start; 0 if there is
/// none ("max" included).
uint64_t read_number(const char* path, const std::string& key = "") {
    const std::string text = '\n' + text_of(path);
    const size_t at = text.find("\n" + key);
    return at == std::string::npos ? 0 : std::strtoull(text.c_str() + at + 1 + key.size(), nullptr, 10);
}

}  // namespace

uint64_t available_memory() {
    uint64_t available = read_number("/proc/meminfo", "MemAvailable:") * 1024;
    if (const uint64_t limit = read_number("/sys/fs/cgroup/memory.max")) {
        const uint64_t current = read_number("/sys/fs/cgroup/memory.current");
        const uint64_t files = read_number("/sys/fs/cgroup/memory.stat", "file ");  // reclaimed when needed
        const uint64_t used = std::min(limit, current - std::min(current, files));
        available = available ? std::min(available, limit - used) : limit - used;
    }
    return available;
}

#endif
}  // namespace slimrt
