#include "kernels/cpu/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "core/bytes_behind.h"
#include "core/error.h"
#include "core/huge_pages.h"
#include "core/memory_info.h"
#include "core/sizes.h"

namespace slimrt::cpu {
namespace {

constexpr size_t kTouchChunk = size_t(8) << 20;  // bytes touched by one work item
// Smaller allocations are not checked against free memory: reading that takes longer.
constexpr size_t kUnchecked = size_t(1) << 20;
// What is planned lies where no process has memory: to use it would be a fault. It takes no addresses, of
// which there are few under a limit such as ulimit -v.
constexpr uint64_t kPlanned = uint64_t(1) << 55, kMostPlanned = uint64_t(1) << 54;

[[noreturn]] void fail_alloc(size_t bytes, uint64_t available, const char* what) {
    const auto [needed, there] = format_both(bytes, available);
    const std::string why = bytes > available
                                ? concat(there, " are free")
                                : "which the system does not give this process (a limit such as ulimit -v)";
    throw Error(ErrorCode::wont_fit, concat(what, " needs ", needed, " of memory, ", why), bytes, available);
}

}  // namespace

Buffer Memory::alloc(MemoryKind kind, size_t bytes, const char* what) {
    if (!pool_) return planned(kind, bytes, what);
    // An overcommitting system grants anything and kills the process when the pages are touched.
    if (bytes > kUnchecked) {
        const uint64_t available = available_memory();  // 0: unknown
        if (available && bytes > available) fail_alloc(bytes, available, what);
    }
    const size_t mapped = std::max<size_t>(bytes, 1) + kBytesBehind;
    void* data = map_zeros(mapped, PROT_READ | PROT_WRITE, 0);
    if (data == MAP_FAILED) fail_alloc(bytes, available_memory(), what);
    forbid(static_cast<std::byte*>(data) + bytes, mapped - bytes);

    Buffer buffer;
    buffer.bytes = bytes;
    std::atomic<uint64_t>& count = used_->bytes[static_cast<int>(kind)];
    count += bytes;
    buffer.data = std::shared_ptr<std::byte>(static_cast<std::byte*>(data),
                                             [used = used_, &count, bytes, mapped](std::byte* p) {
                                                 allow(p, mapped);
                                                 munmap(p, mapped);
                                                 count -= bytes;
                                             });
    touch(buffer.data.get(), bytes);
    return buffer;
}

Buffer Memory::planned(MemoryKind kind, size_t bytes, const char* what) {
    const uint64_t before = used_->planned;
    if (bytes > kMostPlanned || before > kMostPlanned) fail_alloc(bytes, available_memory(), what);
    used_->planned = before + (bytes / kHugePage + 1) * kHugePage;
    std::atomic<uint64_t>& count = used_->bytes[static_cast<int>(kind)];
    count += bytes;
    const auto release = [used = used_, &count, bytes](std::byte*) { count -= bytes; };
    return {{reinterpret_cast<std::byte*>(kPlanned + before), release}, bytes};
}

void Memory::touch(std::byte* data, size_t bytes) {
    if (bytes >= kHugePage) wish_for_huge_pages(data, bytes);
    const size_t page = sysconf(_SC_PAGESIZE);
    pool_->run((bytes + kTouchChunk - 1) / kTouchChunk, [=](int64_t item, int) {
        const size_t first = item * kTouchChunk, end = std::min(bytes, first + kTouchChunk);
        for (size_t i = first; i < end; i += page) {
            static_cast<volatile std::byte*>(data)[i] = std::byte(0);
        }
    });
}

MemoryUse Memory::used() const {
    const auto bytes = [this](MemoryKind kind) { return used_->bytes[static_cast<int>(kind)].load(); };
    return {bytes(MemoryKind::weights), bytes(MemoryKind::derived), bytes(MemoryKind::cache),
            bytes(MemoryKind::scratch)};
}

}  // namespace slimrt::cpu
