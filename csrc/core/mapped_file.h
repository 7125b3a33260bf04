// A file mapped read-only into memory.
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <string>

namespace slimrt {

class MappedFile {
  public:
    /// Maps the whole file. Throws Error{io} with the path and the system's reason; an empty file is legal.
    /// Whoever reads pages that were cut off the file since dies of SIGBUS; a line on stderr says so first.
    explicit MappedFile(const std::string& path);
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    const std::byte* data() const { return data_; }
    size_t size() const { return size_; }
    const std::string& path() const { return path_; }

    /// Puts a copy in huge pages of this process's own memory in place of the mapping, at the same addresses.
    /// False, and nothing has changed: the system has no such thing, or not as much memory.
    bool move_to_huge_pages();

    /// Throws Error{io} when this very file (not another that took its name) was written to or cut since it
    /// was opened, as its size and its time of change tell.
    void require_unchanged() const;

  private:
    std::string path_;
    int descriptor_ = -1;
    timespec changed_{};
    const std::byte* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace slimrt
