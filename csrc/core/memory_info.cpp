#include "core/memory_info.h"

#ifdef __APPLE__
#include <mach/mach.h>
#else
#include <algorithm>
#include <fstream>
#include <string>
#endif

namespace slimrt {
#ifdef __APPLE__

/// Free pages, and those that were not used of late: the system takes them first.
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

/// A file holding one number; 0 when there is none ("max" included).
uint64_t read_number(const char* path) {
    std::ifstream file(path);
    uint64_t value = 0;
    return file >> value ? value : 0;
}

/// Bytes of file pages in this cgroup: the system takes them back when it needs to.
uint64_t cached_files() {
    std::ifstream file("/sys/fs/cgroup/memory.stat");
    uint64_t bytes = 0;
    for (std::string key; file >> key >> bytes;)
        if (key == "file") return bytes;
    return 0;
}

}  // namespace

uint64_t available_memory() {
    std::ifstream file("/proc/meminfo");
    uint64_t available = 0, kib = 0;
    for (std::string key; file >> key;)
        if (key == "MemAvailable:" && file >> kib) available = kib * 1024;
    if (const uint64_t limit = read_number("/sys/fs/cgroup/memory.max")) {
        const uint64_t current = read_number("/sys/fs/cgroup/memory.current"), cached = cached_files();
        const uint64_t used = std::min(limit, current - std::min(current, cached));
        available = available ? std::min(available, limit - used) : limit - used;
    }
    return available;
}

#endif
}  // namespace slimrt
