#include "core/mapped_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string_view>
#include <system_error>

#include "core/error.h"
#include "core/huge_pages.h"

namespace slimrt {
namespace {

[[noreturn]] void fail_io(const std::string& path, int reason) {
    fail(ErrorCode::io, "cannot read '", path, "': ", std::generic_category().message(reason));
}

timespec time_of_change(const struct stat& status) {
#ifdef __APPLE__
    return status.st_mtimespec;
#else
    return status.st_mtim;
#endif
}

// Files that the handler of SIGBUS knows by address; beyond that many it is silent. A signal handler may take
// no lock, hence atomic pointers.
std::array<std::atomic<const MappedFile*>, 64> mapped_files;
struct sigaction sigbus_before;

void say(std::string_view text) {
    // Nothing is left to do where stderr takes no more.
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
}

/// Says which file was cut, then has the system do what it would have done: the access is repeated.
void on_sigbus(int, siginfo_t* info, void*) {
    const auto at = reinterpret_cast<uintptr_t>(info->si_addr);
    for (const auto& slot : mapped_files) {
        const MappedFile* file = slot.load();
        if (!file || at - reinterpret_cast<uintptr_t>(file->data()) >= file->size()) continue;
        say("slimrt: '");
        say(file->path());
        say("' was cut while it was in use, or its disk failed: load it again\n");
    }
    ::sigaction(SIGBUS, &sigbus_before, nullptr);
}

/// mmap() to where huge pages begin, if that many bytes have some.
void* map_aligned(size_t bytes, int protection, int flags, int descriptor) {
    constexpr size_t kHugePage = size_t(2) << 20;
    void* wanted = nullptr;
    if (bytes >= 2 * kHugePage) {
        void* const space =
            ::mmap(nullptr, bytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (space != MAP_FAILED) {
            const auto at = reinterpret_cast<uintptr_t>(space);
            wanted = reinterpret_cast<void*>((at + kHugePage - 1) / kHugePage * kHugePage);
            ::munmap(space, bytes + kHugePage);
        }
    }
    return ::mmap(wanted, bytes, protection, flags, descriptor, 0);  // elsewhere, if that is taken by now
}

void watch(const MappedFile* file) {
    static std::once_flag once;
    std::call_once(once, [] {
        struct sigaction action{};
        action.sa_sigaction = on_sigbus;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        ::sigaction(SIGBUS, &action, &sigbus_before);
    });
    for (auto& slot : mapped_files)
        if (const MappedFile* none = nullptr; slot.compare_exchange_strong(none, file)) return;
}

void forget(const MappedFile* file) {
    for (auto& slot : mapped_files)
        if (const MappedFile* same = file; slot.compare_exchange_strong(same, nullptr)) return;
}

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
    // O_NONBLOCK: opening a named pipe must not wait for its writer.
    descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor_ < 0) fail_io(path, errno);

    struct stat status{};
    int reason = ::fstat(descriptor_, &status) == 0 ? 0 : errno;
    if (reason == 0 && S_ISDIR(status.st_mode)) reason = EISDIR;
    const bool regular = S_ISREG(status.st_mode);
    const auto bytes = static_cast<uint64_t>(status.st_size);
    if (reason == 0 && bytes > SIZE_MAX) reason = EFBIG;
    void* mapped = nullptr;
    if (reason == 0 && regular && bytes > 0) {
        mapped = map_aligned(static_cast<size_t>(bytes), PROT_READ, MAP_SHARED, descriptor_);
        if (mapped == MAP_FAILED)
            reason = errno;
        else  // what is not in memory yet is read into such pages: two threads read it 5 to 20 % faster then
            wish_for_huge_pages(mapped, static_cast<size_t>(bytes));
    }
    if (reason != 0 || !regular) ::close(descriptor_);
    if (reason != 0) fail_io(path, reason);
    if (!regular) fail(ErrorCode::io, "cannot read '", path, "': it is not a regular file");
    data_ = static_cast<const std::byte*>(mapped);
    size_ = static_cast<size_t>(bytes);
    changed_ = time_of_change(status);
    watch(this);
}

MappedFile::~MappedFile() {
    forget(this);
    if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
    ::close(descriptor_);
}

#ifdef __linux__
bool MappedFile::move_to_huge_pages() {
    if (!data_) return false;
    void* const copy = map_aligned(size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    if (copy == MAP_FAILED) return false;
    wish_for_huge_pages(copy, size_);
    std::memcpy(copy, data_, size_);
    void* const place = const_cast<std::byte*>(data_);
    const bool moved = ::mprotect(copy, size_, PROT_READ) == 0 &&
                       ::mremap(copy, size_, size_, MREMAP_MAYMOVE | MREMAP_FIXED, place) == place;
    if (!moved) ::munmap(copy, size_);
    return moved;
}
#else
bool MappedFile::move_to_huge_pages() { return false; }
#endif

void MappedFile::require_unchanged() const {
    struct stat now{};
    const bool known = ::fstat(descriptor_, &now) == 0;
    const timespec changed = time_of_change(now);
    if (known && static_cast<uint64_t>(now.st_size) == size_ && changed.tv_sec == changed_.tv_sec &&
        changed.tv_nsec == changed_.tv_nsec)
        return;
    fail(ErrorCode::io, "'", path_,
         "' was changed while it was in use: load it again (a file that replaces it by its name does no "
         "harm)");
}

}  // namespace slimrt
