// Reads the bytes of a GGUF file in order and never past their end. Private to gguf*.cpp.
#pragma once

#include <cstring>
#include <string>
#include <string_view>

#include "core/error.h"
#include "core/gguf.h"

namespace slimrt {

constexpr const char* kJoin =
    "this is a piece of a file: join all pieces in their order (cat PIECES > x.gguf)";

class GgufReader {
  public:
    GgufReader(const std::byte* data, size_t size, const std::string& path)
        : data_(data), size_(size), path_(path) {}

    size_t size() const { return size_; }
    size_t position() const { return position_; }
    size_t remaining() const { return size_ - position_; }
    const std::byte* at(size_t position) const { return data_ + position; }

    /// Names what is read from here on ("tensor 'output.weight'"), for messages.
    void begin(std::string item) { begin(std::move(item), position_); }
    void begin(std::string item, size_t position) {
        item_ = std::move(item);
        item_position_ = position;
    }
    /// A better name for the item already begun.
    void rename(std::string item) { item_ = std::move(item); }

    /// Throws "<path>: <item> at byte <position> <message>".
    template <class... Args>
    [[noreturn]] void fail(ErrorCode code, const Args&... message) const {
        slimrt::fail(code, path_, ": ", item_, " at byte ", item_position_, " ", concat(message...));
    }
    /// The same for errors that only a damaged file has, or a piece of one.
    template <class... Args>
    [[noreturn]] void fail_damaged(const Args&... message) const {
        fail(ErrorCode::format, message..., ": ",
             is_piece() ? kJoin : "the file is truncated or damaged; download it again");
    }

    /// Whether the file is named as one that was cut for upload: x.gguf-split-a, x.gguf.part1of2.
    bool is_piece() const {
        const std::string_view part = ".gguf.part",
                               name = std::string_view(path_).substr(path_.rfind('/') + 1);
        const size_t at = name.find(part), behind = at + part.size();
        // .part alone, or .partial: a download that was broken off
        const bool numbered = at != name.npos && behind < name.size() && name.substr(behind) != "ial";
        return numbered || name.find(".gguf-split-") != name.npos;
    }

    const std::byte* take(uint64_t bytes) {
        if (bytes > remaining()) {
            fail_damaged("needs ", bytes, " bytes from byte ", position_, ", but the file ends at byte ",
                         size_);
        }
        const std::byte* start = data_ + position_;
        position_ += static_cast<size_t>(bytes);
        return start;
    }

    template <class T>
    T read() {
        T value;
        std::memcpy(&value, take(sizeof value), sizeof value);  // nothing in a GGUF header is aligned
        return value;
    }

    std::string_view string() {
        const auto length = read<uint64_t>();
        return {reinterpret_cast<const char*>(take(length)), static_cast<size_t>(length)};
    }

    /// A key or a tensor name: messages and Python show it, so it must be printable ASCII, as GGUF demands.
    std::string name() {
        const auto length = read<uint64_t>();
        if (length == 0 || length > kMaxName) fail_damaged("has a name of ", length, " bytes");
        const auto* text = reinterpret_cast<const char*>(take(length));
        for (size_t i = 0; i < length; ++i) {
            if (text[i] < ' ' || text[i] > '~') fail_damaged("has a name that is not printable ASCII");
        }
        return {text, static_cast<size_t>(length)};
    }

    /// Throws unless `count` things of at least `least` bytes each can follow.
    void check_count(uint64_t count, uint64_t least, const char* things) const {
        if (count <= remaining() / least) return;
        fail_damaged("announces ", count, " ", things, ", but only ", remaining(), " bytes follow");
    }

  private:
    static constexpr uint64_t kMaxName = 65535;

    const std::byte* data_;
    size_t size_, position_ = 0;
    const std::string& path_;
    std::string item_;
    size_t item_position_ = 0;
};

using GgufMetadata = std::map<std::string, GgufValue, std::less<>>;

GgufMetadata read_gguf_metadata(GgufReader& reader, uint64_t count, std::vector<GgufKey>& keys);
/// any_type: also those that slimrt does not read, but GGUF knows.
std::vector<GgufTensorInfo> read_gguf_tensors(GgufReader& reader, uint64_t count, uint64_t alignment,
                                              bool any_type);

/// "an unsigned integer", "an array of string".
std::string describe_gguf_value(const GgufValue& value);

}  // namespace slimrt
