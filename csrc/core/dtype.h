// Element types, numbered as in GGUF (ggml_type), and the size of a row of them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace slimrt {

enum class DType : uint32_t {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    I32 = 26,
    BF16 = 30,
};

struct DTypeInfo {
    DType dtype;
    const char* name;  // lower case, as on the command line: "f16", "q4_k"
    int block;         // elements in one block (1 for plain types)
    int block_bytes;
};

/// The entry of a type number read from a file; nullptr when slimrt does not read that type.
const DTypeInfo* find_dtype(uint32_t ggml_type);

/// The entry of a type by its name ("f16"); nullptr when there is none.
const DTypeInfo* find_dtype(const char* name);

const DTypeInfo& dtype_info(DType dtype);

/// Bytes of `n` consecutive elements; `n` must be a multiple of the type's block.
size_t row_bytes(DType dtype, int64_t n);

}  // namespace slimrt
