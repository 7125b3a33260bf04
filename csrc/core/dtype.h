// Element types, numbered as in GGUF (ggml_type), and sizes of their rows.
// Types of cache rows only (Q8 ...) have numbers that no file may use, and scales per token and head:
//   Q8        int8 and an f32 scale max |x| / 127: a code errs by at most half a scale
//   FP8_E4M3  OCP e4m3 of x / 2^e, max |x| below 2^(e + 8), and an f32 scale 2^(e + 8) (see E4M3 in simd.h)
//   FP8_E5M2  OCP e5m2 without scale; values beyond 57344 are rounded to nearest, so from 61440 on infinite
//   Q4 Q3 Q2  so many bits, an f16 scale and an f16 minimum for each 32 elements: x = minimum + scale * code
// Types of weights in memory only: IQ2_N, IQ3_XXS_N, IQ3_S_N, which hold what IQ2_* and IQ3_* do
// (kernels/cpu/blocks_grid.h); and *_R16: 16 rows of a type interleaved (kernels/cpu/interleave.h).
// All round to nearest even. A head with NaN or infinity reads back as NaN (E5M2: element by element).
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
    IQ2_XXS = 16,
    IQ2_XS = 17,
    IQ3_XXS = 18,
    IQ4_NL = 20,
    IQ3_S = 21,
    IQ2_S = 22,
    IQ4_XS = 23,
    I32 = 26,
    BF16 = 30,
    TQ1_0 = 34,
    TQ2_0 = 35,
    MXFP4 = 39,
    Q8 = 240,
    FP8_E4M3 = 241,
    FP8_E5M2 = 242,
    Q4 = 243,
    Q3 = 244,
    Q2 = 245,
    IQ2_N = 246,
    IQ3_XXS_N = 247,
    IQ3_S_N = 248,
    Q4_1_R16 = 249,
    Q5_0_R16 = 250,
    Q5_1_R16 = 251,
    Q2_K_R16 = 252,
    Q3_K_R16 = 253,
    Q4_K_R16 = 254,
    Q5_K_R16 = 255,
    Q4_0_R16 = 256,
    IQ4_NL_R16 = 257,
    IQ4_XS_R16 = 258,
    MXFP4_R16 = 259,
};
inline constexpr size_t kTypeNumbers = 260;  // one more than the last

struct DTypeInfo {
    DType dtype;
    const char* name;  // lower case, as on the command line: "f16", "q4_k"
    int block;         // elements in one block (1 for plain types)
    int block_bytes;   // 0: types of cache rows only, see head_bytes()
};

/// The entry of a type number from a file; nullptr if slimrt does not read that type.
const DTypeInfo* find_dtype(uint32_t ggml_type);

/// The entry of a type by its name ("f16"); nullptr if there is none, or it is for cache rows only.
const DTypeInfo* find_dtype(const char* name);

inline constexpr int kBlockTokens = 32;  // rows in a block of a paged cache
/// Rows of a stretch, the unit in which sparse attention skips rows and keeps their means; it starts at a
/// multiple of its size.
inline constexpr int64_t kStretchBlocks = 32, kStretchRows = kStretchBlocks * kBlockTokens;

/// A type of cache rows: bits of an element (the codes of a head start at a byte); elements of a head that
/// share a scale (0: all of them, if there are scales); bytes of such a scale.
struct CacheType {
    DType dtype = DType::F32;
    int bits = 0, group = 0, scale_bytes = 0;
};
/// All n types, in the order they are listed.
const CacheType* cache_types(int* n);

/// The cache type of this name. Throws Error{unsupported}, which lists all names.
DType require_cache_type(const char* name);

/// The names of all cache types, separated by commas.
const char* cache_type_names();

const DTypeInfo& dtype_info(DType dtype);

/// Whether groups of elements of a head have scales: Q4, Q3 and Q2.
bool has_groups(DType dtype);

/// F32, F16 and BF16.
bool is_float(DType dtype);

/// Bytes of `n` consecutive elements; `n` must be a multiple of the type's block.
size_t row_bytes(DType dtype, int64_t n);

/// Bytes of one head of one cache row: elements and scales.
struct HeadBytes {
    size_t elements = 0, scales = 0;
    size_t total() const { return elements + scales; }
};
HeadBytes head_bytes(DType dtype, int64_t dim);
/// The same for `tokens` rows of a block: all elements, then all scales. scale_tokens: see Rows.
HeadBytes head_bytes(DType dtype, int64_t dim, int64_t tokens, int scale_tokens);

}  // namespace slimrt
