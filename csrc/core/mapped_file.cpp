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
#include <utility>

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

// The mappings that the SIGBUS handler knows; further ones are not reported. A signal handler must not lock,
// hence atomic pointers.
std::array<std::atomic<const MappedFile*>, 64> mapped_files;
struct sigaction sigbus_before;

void say(std::string_view text) {
    // If stderr fails there is nothing left to do.
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
}

/// Reports which file was truncated, then restores the default action: the access is repeated and ends the
/// process.
void on_sigbus(int, siginfo_t* info, void*) {
    const auto at = reinterpret_cast<uintptr_t>(info->si_addr);
    for (const auto& slot : mapped_files) {
        const MappedFile* file = slot.load();
        if (!file) continue;
        const uintptr_t offset = at - reinterpret_cast<uintptr_t>(file->data());
        for (const MappedFile::Part& part : file->parts()) {
            if (offset - part.offset >= part.size) continue;
            say("slimrt: '");
            say(part.path);
            say("' was cut while it was in use, or its disk failed: load it again\n");
        }
    }
    ::sigaction(SIGBUS, &sigbus_before, nullptr);
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

MappedFile::Part::Part(std::string named) : path(std::move(named)) {
    // O_NONBLOCK: opening a named pipe must not wait for its writer.
    descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0) fail_io(path, errno);

    struct stat status{};
    int reason = ::fstat(descriptor, &status) == 0 ? 0 : errno;
    if (reason == 0 && S_ISDIR(status.st_mode)) reason = EISDIR;
    const bool regular = S_ISREG(status.st_mode);
    const auto bytes = static_cast<uint64_t>(status.st_size);
    if (reason == 0 && bytes > SIZE_MAX) reason = EFBIG;
    if (reason != 0 || !regular) ::close(descriptor);
    if (reason != 0) fail_io(path, reason);
    if (!regular) fail(ErrorCode::io, "cannot read '", path, "': it is not a regular file");
    changed = time_of_change(status);
    size = static_cast<size_t>(bytes);
}

MappedFile::Part::Part(Part&& other) noexcept
    : path(std::move(other.path)),
      descriptor(std::exchange(other.descriptor, -1)),
      changed(other.changed),
      offset(other.offset),
      size(other.size) {}

MappedFile::Part::~Part() {
    if (descriptor >= 0) ::close(descriptor);
}

MappedFile::MappedFile(const std::vector<std::string>& paths) {
    for (const std::string& path : paths) {
        Part part(path);
        part.offset = (size_ + kHugePage - 1) / kHugePage * kHugePage;
        if (part.size > SIZE_MAX / 2 - part.offset) fail_io(path, EFBIG);
        size_ = part.offset + part.size;
        parts_.push_back(std::move(part));
    }
    if (size_ == 0) return;
    void* const place = map_zeros(size_, PROT_READ, MAP_NORESERVE);
    if (place == MAP_FAILED) fail_io(parts_.front().path, errno);
    for (const Part& part : parts_) {
        if (part.size == 0) continue;
        void* const at = static_cast<std::byte*>(place) + part.offset;
        if (::mmap(at, part.size, PROT_READ, MAP_SHARED | MAP_FIXED, part.descriptor, 0) == MAP_FAILED) {
            const int reason = errno;
            ::munmap(place, size_);
            fail_io(part.path, reason);
        }
        // Data that is not in memory yet is read into such pages: two threads then read it 5 to 20 % faster.
        wish_for_huge_pages(at, part.size);
    }
    data_ = static_cast<const std::byte*>(place);
    watch(this);
}

MappedFile::~MappedFile() {
    forget(this);
    if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
}

bool MappedFile::move_to_huge_pages(size_t first, size_t bytes) {
    const bool whole = bytes % kHugePage == 0 || bytes == size_ - first;
    if (first % kHugePage != 0 || first >= size_ || bytes == 0 || bytes > size_ - first || !whole)
        fail(ErrorCode::argument, "bytes ", first, " to ", first + bytes, " are not whole huge pages of ",
             size_);
#ifdef __linux__
    void *const place = const_cast<std::byte*>(data_ + first), *const copy = map_zeros(
                                                                   bytes, PROT_READ | PROT_WRITE, 0);
    if (copy == MAP_FAILED) return false;
    wish_for_huge_pages(copy, bytes);
    std::memcpy(copy, place, bytes);
    const bool moved = ::mprotect(copy, bytes, PROT_READ) == 0 &&
                       ::mremap(copy, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, place) == place;
    if (!moved) ::munmap(copy, bytes);
    has_copies_ = has_copies_ || moved;
    return moved;
#else
    return false;
#endif
}

void MappedFile::let_go(const void* first, size_t bytes) const {
    const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
    const uintptr_t at = reinterpret_cast<uintptr_t>(first), begin = (at + page - 1) / page * page;
    const uintptr_t end = (at + bytes) / page * page;
    if (!has_copies_ && begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

void MappedFile::require_unchanged() const {
    for (const Part& part : parts_) {
        struct stat now{};
        const bool known = ::fstat(part.descriptor, &now) == 0;
        const timespec changed = time_of_change(now);
        if (known && static_cast<uint64_t>(now.st_size) == part.size &&
            changed.tv_sec == part.changed.tv_sec && changed.tv_nsec == part.changed.tv_nsec)
            continue;
        fail(ErrorCode::io, "'", part.path,
             "' was changed while it was in use: load it again (a file that replaces it by its name does no "
             "harm)");
    }
}

}  // namespace slimrt
