// A GGUF file (version 3, or 2 with the same layout), or its shards, validated: counts before they are
// multiplied, offsets and alignment before they are followed, types by name.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/mapped_file.h"
#include "core/tensor.h"

namespace slimrt {

/// GGUF's type number of strings; those of numbers are in bindings/gguf.cpp and gguf_metadata.cpp.
inline constexpr uint32_t kGgufString = 8;

/// An array of a metadata value: element type and a checked position in the file; read on demand.
struct GgufArray {
    uint32_t type = 0;  // GGUF value type of the elements
    uint64_t count = 0;
    const std::byte* data = nullptr;  // first element (strings: first length)
    size_t bytes = 0;
};

/// Integers and booleans are widened to int64 / uint64 / bool, floats to double.
using GgufValue = std::variant<uint64_t, int64_t, double, bool, std::string_view, GgufArray>;

/// The elements of an array. Strings view the file's bytes, which need not be UTF-8.
std::vector<GgufValue> elements(const GgufArray& array);

/// A key as the file lists it, with the GGUF type of its value, which GgufValue widens.
struct GgufKey {
    std::string name;
    uint32_t type = 0;
};

/// A tensor as the file lists it: sizes innermost first, position of its data in bytes().
struct GgufTensorInfo {
    std::string name;
    std::vector<int64_t> sizes;
    DType type = DType::F32;  // known to find_dtype(), unless only described
    size_t position = 0;
};

/// What to read of a file. Tokenizers need the metadata only, whatever types the tensors have; `described`
/// also lists tensors of types that slimrt does not read, without giving access to them.
enum class GgufPart { all, metadata, described };

class GgufFile {
  public:
    /// Opens and validates; of a model in shards the first, beside which the others are. Throws Error{io} or
    /// Error{format, unsupported} naming the file, and the tensor or key and the byte offset.
    static GgufFile open(const std::string& path, GgufPart part = GgufPart::all);
    /// The same on bytes in memory, which must outlive the result (tests, fuzzing). Tensors are aligned in
    /// memory as far as `data` is.
    static GgufFile parse(const std::byte* data, size_t size, std::string name,
                          GgufPart part = GgufPart::all);

    /// The first shard with the tensors of all shards, which are in one mapping, in order.
    static GgufFile join(std::vector<GgufFile> shards);

    /// The path as given; of the first shard.
    const std::string& path() const { return path_; }
    /// The paths of all shards.
    std::vector<std::string> paths() const;
    /// The bytes of all shards as they were opened, with zeros between two.
    std::span<const std::byte> bytes() const { return bytes_; }
    /// MappedFile::require_unchanged, of what was opened.
    void require_unchanged() const {
        if (file_) file_->require_unchanged();
    }
    /// MappedFile::move_to_huge_pages, of what was opened: tensors stay where they are.
    bool move_to_huge_pages(size_t first, size_t bytes) {
        return file_ && file_->move_to_huge_pages(first, bytes);
    }
    /// MappedFile::let_go, of a tensor that is no longer read in place.
    void let_go(const Tensor& t) const {
        if (file_) file_->let_go(t.data, t.bytes());
    }
    const std::map<std::string, GgufValue, std::less<>>& metadata() const { return metadata_; }
    /// By name; weights are [rows = ne1 * ne2 * ne3, cols = ne0].
    const std::map<std::string, Tensor, std::less<>>& tensors() const { return tensors_; }
    /// Keys and tensors in the order of the file, for writing one like it.
    const std::vector<GgufKey>& keys() const { return keys_; }
    const std::vector<GgufTensorInfo>& tensor_list() const { return tensor_list_; }

    bool has(std::string_view key) const { return metadata_.find(key) != metadata_.end(); }
    /// Typed look-ups. Without a default a missing key, and always a wrong type, a value outside [low, high]
    /// or a number that is not finite, throws Error{format} naming the key. Any integer type will do for
    /// integer(), any integer or float type for number().
    int64_t integer(std::string_view key, int64_t low, int64_t high,
                    std::optional<int64_t> missing = {}) const;
    double number(std::string_view key, std::optional<double> missing = {}) const;
    bool boolean(std::string_view key, std::optional<bool> missing = {}) const;
    std::string string(std::string_view key, std::optional<std::string> missing = {}) const;

  private:
    const GgufValue* find(std::string_view key, bool required) const;
    int64_t alignment() const { return integer("general.alignment", 8, 1 << 30, 32); }  // of tensors' data
    int64_t n_shards() const { return integer("split.count", 0, 65535, 1); }
    std::vector<std::string> shard_paths() const;
    void add_shard(const GgufFile& shard, int64_t number);
    [[noreturn]] void fail_type(std::string_view key, const GgufValue& value, const char* expected) const;

    std::string path_;
    std::shared_ptr<MappedFile> file_;  // none when parsed from memory
    std::span<const std::byte> bytes_;
    std::map<std::string, GgufValue, std::less<>> metadata_;
    std::map<std::string, Tensor, std::less<>> tensors_;
    std::vector<GgufKey> keys_;
    std::vector<GgufTensorInfo> tensor_list_;
};

}  // namespace slimrt
