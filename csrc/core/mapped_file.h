// A file mapped read-only into memory.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace slimrt {

class MappedFile {
  public:
    /// Maps the whole file. Throws Error{io} with the path and the system's reason; an empty file is legal.
    explicit MappedFile(const std::string& path);
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    const std::byte* data() const { return data_; }
    size_t size() const { return size_; }

  private:
    const std::byte* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace slimrt
