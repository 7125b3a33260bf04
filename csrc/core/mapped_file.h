// One or several files mapped read-only into memory, one behind another.
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <string>
#include <vector>

namespace slimrt {

class MappedFile {
  public:
    /// One of the files, and its offset in the mapping.
    struct Part {
        std::string path;
        int descriptor = -1;
        timespec changed{};
        size_t offset = 0, size = 0;

        explicit Part(std::string path);
        Part(Part&& other) noexcept;
        ~Part();
    };

    /// Maps all of each file. Throws Error{io} with the path and the reason; an empty file is legal. Reading
    /// pages of a file that was truncated meanwhile ends the process with SIGBUS, after a line on stderr.
    explicit MappedFile(const std::vector<std::string>& paths);
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    /// The bytes of all files, perhaps with zeros between two.
    const std::byte* data() const { return data_; }
    size_t size() const { return size_; }
    const std::vector<Part>& parts() const { return parts_; }

    /// Replaces the mapping of bytes [first, first + bytes) by a copy in anonymous huge pages, at the same
    /// addresses; others may read them meanwhile. first: a multiple of kHugePage; so is bytes, unless it ends
    /// with the mapping. Returns false, without effect, if the system does not support it or has too little
    /// memory. Throws Error{argument}: no such bytes.
    bool move_to_huge_pages(size_t first, size_t bytes);

    /// Releases the pages that are wholly in these bytes: reading one again takes it from the page cache or
    /// the file. No effect once some were copied.
    void let_go(const void* first, size_t bytes) const;

    /// Throws Error{io} if one of the opened files (not another that replaced it) was written to or truncated
    /// since, by its size and change time.
    void require_unchanged() const;

  private:
    std::vector<Part> parts_;
    const std::byte* data_ = nullptr;
    size_t size_ = 0;
    bool has_copies_ = false;
};

}  // namespace slimrt
