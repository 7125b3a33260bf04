// The tensor part of a GGUF file: descriptions, then the data they point into.
#include <algorithm>
#include <iterator>
#include <set>
#include <utility>
#include <vector>

#include "core/gguf_reader.h"

namespace slimrt {
namespace {

/// Names of ggml_type by number, for messages about types that slimrt does not read, including those removed
/// from GGUF.
constexpr const char* kGgmlTypes[] = {
    "F32",   "F16",        "Q4_0",       "Q4_1",       "Q4_2",     "Q4_3",     "Q5_0",
    "Q5_1",  "Q8_0",       "Q8_1",       "Q2_K",       "Q3_K",     "Q4_K",     "Q5_K",
    "Q6_K",  "Q8_K",       "IQ2_XXS",    "IQ2_XS",     "IQ3_XXS",  "IQ1_S",    "IQ4_NL",
    "IQ3_S", "IQ2_S",      "IQ4_XS",     "I8",         "I16",      "I32",      "I64",
    "F64",   "IQ1_M",      "BF16",       "Q4_0_4_4",   "Q4_0_4_8", "Q4_0_8_8", "TQ1_0",
    "TQ2_0", "IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8", "MXFP4",    "NVFP4",    "Q1_0",
};
constexpr size_t kMaxDims = 4;
constexpr uint64_t kMaxElements = uint64_t{1} << 60;   // no size in bytes overflows
constexpr uint64_t kMinBytes = 8 + 1 + 4 + 8 + 4 + 8;  // name, n_dims, one dimension, type, offset

/// A description as read, before its data is located.
struct Description {
    GgufTensorInfo info;
    size_t position = 0;             // of the description
    uint64_t offset = 0, bytes = 0;  // in the data section
};

/// The number of a type, and its entry: nullptr where any type is allowed and slimrt does not read this one.
std::pair<DType, const DTypeInfo*> read_type(GgufReader& reader, bool any_type) {
    const auto number = reader.read<uint32_t>();
    if (const DTypeInfo* info = find_dtype(number)) return {info->dtype, info};
    if (number >= std::size(kGgmlTypes)) {
        reader.fail(ErrorCode::format, "has type ", number,
                    ", which is not known: the file is damaged, or newer than this slimrt");
    }
    if (any_type) return {static_cast<DType>(number), nullptr};
    std::string readable;
    for (uint32_t i = 0; i < std::size(kGgmlTypes); ++i) {
        if (find_dtype(i)) readable += concat(" ", kGgmlTypes[i]);
    }
    reader.fail(ErrorCode::unsupported, "has type ", kGgmlTypes[number], " (", number,
                "), which slimrt does not read; it reads", readable, ": get the model in one of these");
}

/// Reads the sizes and returns their product.
int64_t read_sizes(GgufReader& reader, std::vector<int64_t>& sizes) {
    const auto n_dims = reader.read<uint32_t>();
    if (n_dims == 0 || n_dims > kMaxDims)
        reader.fail_damaged("has ", n_dims, " dimensions, not 1 to ", kMaxDims);
    uint64_t elements = 1;
    for (uint32_t i = 0; i < n_dims; ++i) {
        const auto size = reader.read<uint64_t>();
        if (size == 0) reader.fail_damaged("has dimension ", i, " of size 0");
        if (size > kMaxElements / elements) reader.fail_damaged("has more than 2^60 elements");
        elements *= size;
        sizes.push_back(static_cast<int64_t>(size));
    }
    return static_cast<int64_t>(elements);
}

Description read_description(GgufReader& reader, uint64_t index, uint64_t alignment, bool any_type) {
    reader.begin(concat("tensor ", index));
    Description tensor;
    tensor.position = reader.position();
    tensor.info.name = reader.name();
    reader.rename(concat("tensor '", tensor.info.name, "'"));
    const int64_t elements = read_sizes(reader, tensor.info.sizes);
    const auto [dtype, type] = read_type(reader, any_type);
    if (type && tensor.info.sizes[0] % type->block != 0) {
        reader.fail_damaged("has rows of ", tensor.info.sizes[0], " elements, not a multiple of the ",
                            type->block, " in a block of ", type->name);
    }
    tensor.info.type = dtype;
    tensor.bytes = type ? row_bytes(dtype, elements) : 0;
    tensor.offset = reader.read<uint64_t>();
    if (tensor.offset % alignment != 0) {
        reader.fail_damaged("has data at offset ", tensor.offset, ", which is not aligned to ", alignment);
    }
    return tensor;
}

/// Throws when a tensor's data reaches past the end of the file or into the next tensor's data.
void check_extents(GgufReader& reader, std::vector<Description> tensors, size_t data_start) {
    const uint64_t available = data_start <= reader.size() ? reader.size() - data_start : 0;
    std::sort(tensors.begin(), tensors.end(),
              [](const Description& a, const Description& b) { return a.offset < b.offset; });
    for (size_t i = 0; i < tensors.size(); ++i) {
        const Description& tensor = tensors[i];
        reader.begin(concat("tensor '", tensor.info.name, "'"), tensor.position);
        if (tensor.offset > available || tensor.bytes > available - tensor.offset) {
            reader.fail_damaged("has ", tensor.bytes, " bytes of data at offset ", tensor.offset,
                                ", but only ", available, " bytes follow the header");
        }
        if (i + 1 < tensors.size() && tensors[i + 1].offset < tensor.offset + tensor.bytes) {
            reader.fail_damaged("shares bytes with tensor '", tensors[i + 1].info.name, "' at offset ",
                                tensors[i + 1].offset);
        }
    }
}

}  // namespace

std::vector<GgufTensorInfo> read_gguf_tensors(GgufReader& reader, uint64_t count, uint64_t alignment,
                                              bool any_type) {
    reader.begin("the tensor list");
    reader.check_count(count, kMinBytes, "tensors");
    std::set<std::string> names;
    std::vector<Description> descriptions;
    for (uint64_t i = 0; i < count; ++i) {
        descriptions.push_back(read_description(reader, i, alignment, any_type));
        if (!names.insert(descriptions.back().info.name).second) {
            reader.fail(ErrorCode::format, "appears twice: the file is damaged; convert the model again");
        }
    }
    const size_t data_start = (reader.position() + alignment - 1) / alignment * alignment;
    check_extents(reader, descriptions, data_start);
    std::vector<GgufTensorInfo> tensors;
    for (Description& it : descriptions) {
        it.info.position = data_start + static_cast<size_t>(it.offset);
        tensors.push_back(std::move(it.info));
    }
    return tensors;
}

}  // namespace slimrt
