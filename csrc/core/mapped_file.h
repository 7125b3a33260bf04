// A file mapped read-only into memory, or several, one behind the other.
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <string>
#include <vector>

namespace slimrt {

class MappedFile {
  public:
    /// One of the files, and where it stands in what is mapped.
    struct Part {
        std::string path;
        int descriptor = -1;
        timespec changed{};
        size_t offset = 0, size = 0;

        explicit Part(std::string path);
        Part(Part&& other) noexcept;
        ~Part();
    };

    /// Maps the whole of each. Throws Error{io} with the path and the system's reason; an empty file is
    /// legal. Whoever reads pages that were cut off a file since dies of SIGBUS; a line on stderr says so
    /// first.
    explicit MappedFile(const std::vector<std::string>& paths);
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    /// Of all files; between two there may be zeros.
    const std::byte* data() const { return data_; }
    size_t size() const { return size_; }
    const std::vector<Part>& parts() const { return parts_; }

    /// Puts a copy in huge pages of this process's own memory in place of the mapping, at the same addresses.
    /// False, and nothing has changed: the system has no such thing, or not as much memory.
    bool move_to_huge_pages();

    /// Pages that lie wholly in these bytes need not be this process's any more: who looks at one again gets
    /// it from the system's cache, or from the file. Of a copy nothing is let go.
    void let_go(const void* first, size_t bytes) const;

    /// Throws Error{io} when one of these very files (not another that took its name) was written to or cut
    /// since it was opened, as its size and its time of change tell.
    void require_unchanged() const;

  private:
    std::vector<Part> parts_;
    const std::byte* data_ = nullptr;
    size_t size_ = 0;
    bool is_copy_ = false;
};

}  // namespace slimrt
