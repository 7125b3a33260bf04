// The header of a GGUF file, and typed look-ups. The rest is in gguf_metadata.cpp, gguf_shards.cpp and
// gguf_tensors.cpp.
#include "core/gguf.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <limits>

#include "core/gguf_reader.h"

namespace slimrt {
namespace {

static_assert(std::endian::native == std::endian::little, "GGUF files are read in place");

constexpr uint32_t kMagic = 0x46554747;  // "GGUF"
constexpr std::string_view kPointer = "version https://git-lfs.";

/// What a file without weights, or without the first ones, is more likely than one of another kind.
[[noreturn]] void fail_other(const GgufReader& reader) {
    const size_t size = std::min(reader.size(), kPointer.size());
    if (std::string_view(reinterpret_cast<const char*>(reader.at(0)), size) == kPointer)
        reader.fail(ErrorCode::format,
                    "is a pointer of Git LFS, not the file itself: git lfs pull fetches it");
    reader.fail(ErrorCode::format,
                "does not start with GGUF: ", reader.is_piece() ? kJoin : "this is not a GGUF file");
}

void read_version(GgufReader& reader) {
    if (reader.read<uint32_t>() != kMagic) fail_other(reader);
    const auto version = reader.read<uint32_t>();
    if (version == 2 || version == 3) return;
    if (version != 0 && (version & 0xffffff) == 0) {
        reader.fail(
            ErrorCode::unsupported,
            "is big-endian, and slimrt reads little-endian files: convert it with gguf-convert-endian");
    }
    const char* advice = version == 1 ? "convert the model again with current tools"
                                      : "the file is damaged, or newer than this slimrt";
    reader.fail(ErrorCode::unsupported, "has GGUF version ", version,
                ", and slimrt reads versions 2 and 3: ", advice);
}

bool is_power_of_two(int64_t n) { return std::has_single_bit(static_cast<uint64_t>(n)); }

/// Integers as int64; nothing when the value is no integer or does not fit.
std::optional<int64_t> as_integer(const GgufValue& value) {
    if (const auto* i = std::get_if<int64_t>(&value)) return *i;
    const auto* u = std::get_if<uint64_t>(&value);
    if (u && *u <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
        return static_cast<int64_t>(*u);
    return {};
}

/// Integers and floats as double; nothing when the value is neither.
std::optional<double> as_number(const GgufValue& value) {
    if (const auto* d = std::get_if<double>(&value)) return *d;
    if (const auto* i = std::get_if<int64_t>(&value)) return static_cast<double>(*i);
    if (const auto* u = std::get_if<uint64_t>(&value)) return static_cast<double>(*u);
    return {};
}

/// Refuses a model without all of its shards; a shard that exists but cannot be read fails when it is mapped.
void require_all(const std::vector<std::string>& paths) {
    for (const std::string& path : paths) {
        if (access(path.c_str(), F_OK) == 0 || errno != ENOENT) continue;
        fail(ErrorCode::format, path, ": is missing: the model is in ", paths.size(),
             " shards, which lie in one folder; get this one too");
    }
}

}  // namespace

GgufFile GgufFile::open(const std::string& path, GgufPart part) {
    auto mapped = std::make_shared<MappedFile>(std::vector{path});
    GgufFile file = parse(mapped->data(), mapped->size(), path, part);
    const std::vector<std::string> paths = file.shard_paths();
    if (part != GgufPart::metadata && paths.size() > 1) {
        require_all(paths);
        mapped = std::make_shared<MappedFile>(paths);
        std::vector<GgufFile> shards;
        for (const MappedFile::Part& it : mapped->parts())
            shards.push_back(parse(mapped->data() + it.offset, it.size, it.path, part));
        file = join(std::move(shards));
    }
    file.file_ = std::move(mapped);
    return file;
}

GgufFile GgufFile::parse(const std::byte* data, size_t size, std::string name, GgufPart part) {
    GgufFile file;
    file.path_ = std::move(name);
    file.bytes_ = {data, size};
    GgufReader reader(data, size, file.path_);
    reader.begin("the header");
    read_version(reader);
    const auto n_tensors = reader.read<uint64_t>();
    const auto n_entries = reader.read<uint64_t>();
    file.metadata_ = read_gguf_metadata(reader, n_entries, file.keys_);
    if (part == GgufPart::metadata) return file;

    const int64_t alignment = file.alignment();
    if (!is_power_of_two(alignment)) {
        fail(ErrorCode::format, file.path_, ": key 'general.alignment' is ", alignment,
             ", not a power of two");
    }
    const bool any_type = part == GgufPart::described;
    file.tensor_list_ = read_gguf_tensors(reader, n_tensors, static_cast<uint64_t>(alignment), any_type);
    for (const GgufTensorInfo& it : file.tensor_list_) {
        if (!find_dtype(static_cast<uint32_t>(it.type))) continue;
        int64_t rows = 1;
        for (size_t i = 1; i < it.sizes.size(); ++i) rows *= it.sizes[i];
        auto* start = const_cast<std::byte*>(reader.at(it.position));
        file.tensors_[it.name] = Tensor(start, it.type, rows, it.sizes[0]);
    }
    return file;
}

const GgufValue* GgufFile::find(std::string_view key, bool required) const {
    const auto it = metadata_.find(key);
    if (it != metadata_.end()) return &it->second;
    if (!required) return nullptr;
    fail(ErrorCode::format, path_, ": key '", key,
         "' is missing: convert the model again with current tools");
}

void GgufFile::fail_type(std::string_view key, const GgufValue& value, const char* expected) const {
    fail(ErrorCode::format, path_, ": key '", key, "' is ", describe_gguf_value(value), ", expected ",
         expected, ": convert the model again with current tools");
}

int64_t GgufFile::integer(std::string_view key, int64_t low, int64_t high,
                          std::optional<int64_t> missing) const {
    const GgufValue* value = find(key, !missing);
    if (!value) return *missing;
    const bool huge = std::holds_alternative<uint64_t>(*value) && !as_integer(*value);
    const std::optional<int64_t> result = as_integer(*value);
    if (!result && !huge) fail_type(key, *value, "an integer");
    if (huge || *result < low || *result > high) {
        const std::string shown = huge ? concat(std::get<uint64_t>(*value)) : concat(*result);
        fail(ErrorCode::format, path_, ": key '", key, "' is ", shown, ", expected ", low, " to ", high,
             ": the file is damaged, or too large for slimrt");
    }
    return *result;
}

double GgufFile::number(std::string_view key, std::optional<double> missing) const {
    const GgufValue* value = find(key, !missing);
    if (!value) return *missing;
    const std::optional<double> result = as_number(*value);
    if (!result) fail_type(key, *value, "a number");
    if (!std::isfinite(*result)) fail_type(key, *value, "a finite number");
    return *result;
}

bool GgufFile::boolean(std::string_view key, std::optional<bool> missing) const {
    const GgufValue* value = find(key, !missing);
    if (!value) return *missing;
    if (const auto* result = std::get_if<bool>(value)) return *result;
    fail_type(key, *value, "a boolean");
}

std::string GgufFile::string(std::string_view key, std::optional<std::string> missing) const {
    const GgufValue* value = find(key, !missing);
    if (!value) return *missing;
    if (const auto* result = std::get_if<std::string_view>(value)) return std::string(*result);
    fail_type(key, *value, "a string");
}

}  // namespace slimrt
