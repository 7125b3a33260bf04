#include "core/memory_info.h"

#ifdef __APPLE__
#include <mach/mach.h>
#else
#include <algorithm>
#include <cstdlib>

#include "core/control_groups.h"
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

uint64_t available_memory() {
    const std::string key = "MemAvailable:", system = text_of("/proc/meminfo");
    const size_t at = system.find(key);
    uint64_t available = UINT64_MAX;
    if (at != std::string::npos)
        available = std::strtoull(system.c_str() + at + key.size(), nullptr, 10) * 1024;
    available = std::min(available, memory_left_by_groups());
    return available == UINT64_MAX ? 0 : std::max<uint64_t>(available, 1);
}

#endif
}  // namespace slimrt
