// The key-value part of a GGUF file.
#include "core/gguf_reader.h"

namespace slimrt {
namespace {

enum ValueType : uint32_t {
    UINT8,
    INT8,
    UINT16,
    INT16,
    UINT32,
    INT32,
    FLOAT32,
    BOOL,
    STRING = kGgufString,
    ARRAY,
    UINT64,
    INT64,
    FLOAT64,
    VALUE_TYPES,
};

struct ValueTypeInfo {
    const char* name;
    uint64_t least_bytes;  // of one value; strings and arrays: of the length in front
};
constexpr ValueTypeInfo kValueTypes[VALUE_TYPES] = {
    {"uint8", 1}, {"int8", 1},   {"uint16", 2}, {"int16", 2},  {"uint32", 4}, {"int32", 4},   {"float32", 4},
    {"bool", 1},  {"string", 8}, {"array", 12}, {"uint64", 8}, {"int64", 8},  {"float64", 8},
};

constexpr uint64_t kMinBytes = 8 + 1 + 4 + 1;  // key, type, value

uint32_t read_value_type(GgufReader& reader) {
    const auto type = reader.read<uint32_t>();
    if (type >= VALUE_TYPES) reader.fail_damaged("has value type ", type, ", which GGUF does not define");
    return type;
}

bool read_bool(GgufReader& reader) {
    const auto value = reader.read<uint8_t>();
    if (value > 1) reader.fail_damaged("holds the boolean ", int{value}, ", neither 0 nor 1");
    return value == 1;
}

GgufArray read_array(GgufReader& reader) {
    GgufArray array;
    array.type = read_value_type(reader);
    if (array.type == ARRAY)
        reader.fail(ErrorCode::unsupported, "is an array of arrays, which slimrt does not read");
    array.count = reader.read<uint64_t>();
    const ValueTypeInfo& info = kValueTypes[array.type];
    reader.check_count(array.count, info.least_bytes, "array elements");

    const size_t start = reader.position();
    array.data = reader.at(start);
    if (array.type == STRING) {
        for (uint64_t i = 0; i < array.count; ++i) reader.string();
    } else if (array.type == BOOL) {
        for (uint64_t i = 0; i < array.count; ++i) read_bool(reader);
    } else {
        reader.take(array.count * info.least_bytes);
    }
    array.bytes = reader.position() - start;
    return array;
}

GgufValue read_value(GgufReader& reader, uint32_t type) {
    switch (type) {
        case UINT8:
            return uint64_t{reader.read<uint8_t>()};
        case UINT16:
            return uint64_t{reader.read<uint16_t>()};
        case UINT32:
            return uint64_t{reader.read<uint32_t>()};
        case UINT64:
            return reader.read<uint64_t>();
        case INT8:
            return int64_t{reader.read<int8_t>()};
        case INT16:
            return int64_t{reader.read<int16_t>()};
        case INT32:
            return int64_t{reader.read<int32_t>()};
        case INT64:
            return reader.read<int64_t>();
        case FLOAT32:
            return double{reader.read<float>()};
        case FLOAT64:
            return reader.read<double>();
        case BOOL:
            return read_bool(reader);
        case STRING:
            return reader.string();
        default:
            return read_array(reader);
    }
}

}  // namespace

GgufMetadata read_gguf_metadata(GgufReader& reader, uint64_t count, std::vector<GgufKey>& keys) {
    reader.begin("the metadata");
    reader.check_count(count, kMinBytes, "entries");
    GgufMetadata metadata;
    for (uint64_t i = 0; i < count; ++i) {
        reader.begin(concat("metadata entry ", i));
        std::string key = reader.name();
        reader.rename(concat("key '", key, "'"));
        const uint32_t type = read_value_type(reader);
        GgufValue value = read_value(reader, type);
        if (!metadata.emplace(key, value).second) {
            reader.fail(ErrorCode::format, "appears twice: the file is damaged; convert the model again");
        }
        keys.push_back({std::move(key), type});
    }
    return metadata;
}

std::vector<GgufValue> elements(const GgufArray& array) {
    const std::string path = "array";
    GgufReader reader(array.data, array.bytes, path);
    std::vector<GgufValue> values;
    values.reserve(static_cast<size_t>(array.count));
    for (uint64_t i = 0; i < array.count; ++i) values.push_back(read_value(reader, array.type));
    return values;
}

std::string describe_gguf_value(const GgufValue& value) {
    static constexpr const char* kNames[] = {"an unsigned integer", "an integer", "a float", "a boolean",
                                             "a string"};
    const auto* array = std::get_if<GgufArray>(&value);
    if (array) return concat("an array of ", kValueTypes[array->type].name);
    return kNames[value.index()];
}

}  // namespace slimrt
