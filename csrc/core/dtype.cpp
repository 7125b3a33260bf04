#include "core/dtype.h"

#include <array>
#include <cassert>
#include <cstring>
#include <string>

#include "core/error.h"

namespace slimrt {
namespace {

constexpr DTypeInfo kTypes[] = {
    {DType::F32, "f32", 1, 4},
    {DType::F16, "f16", 1, 2},
    {DType::BF16, "bf16", 1, 2},
    {DType::Q4_0, "q4_0", 32, 18},
    {DType::Q4_1, "q4_1", 32, 20},
    {DType::Q5_0, "q5_0", 32, 22},
    {DType::Q5_1, "q5_1", 32, 24},
    {DType::Q8_0, "q8_0", 32, 34},
    {DType::Q2_K, "q2_k", 256, 84},
    {DType::Q3_K, "q3_k", 256, 110},
    {DType::Q4_K, "q4_k", 256, 144},
    {DType::Q5_K, "q5_k", 256, 176},
    {DType::Q6_K, "q6_k", 256, 210},
    {DType::IQ2_XXS, "iq2_xxs", 256, 66},
    {DType::IQ2_XS, "iq2_xs", 256, 74},
    {DType::IQ2_S, "iq2_s", 256, 82},
    {DType::IQ3_XXS, "iq3_xxs", 256, 98},
    {DType::IQ3_S, "iq3_s", 256, 110},
    {DType::IQ4_NL, "iq4_nl", 32, 18},
    {DType::IQ4_XS, "iq4_xs", 256, 136},
    {DType::TQ1_0, "tq1_0", 256, 54},
    {DType::TQ2_0, "tq2_0", 256, 66},
    {DType::MXFP4, "mxfp4", 32, 17},
    {DType::I32, "i32", 1, 4},
    {DType::Q8, "q8", 1, 0},
    {DType::FP8_E4M3, "fp8_e4m3", 1, 0},
    {DType::FP8_E5M2, "fp8_e5m2", 1, 0},
    {DType::Q4, "q4", 1, 0},
    {DType::Q3, "q3", 1, 0},
    {DType::Q2, "q2", 1, 0},
    {DType::IQ2_N, "iq2_n", 256, 146},
    {DType::IQ3_XXS_N, "iq3_xxs_n", 256, 146},
    {DType::IQ3_S_N, "iq3_s_n", 256, 146},
    {DType::Q4_1_R16, "q4_1_r16", 32, 20},
    {DType::Q5_0_R16, "q5_0_r16", 32, 22},
    {DType::Q5_1_R16, "q5_1_r16", 32, 24},
    {DType::Q2_K_R16, "q2_k_r16", 256, 84},
    {DType::Q3_K_R16, "q3_k_r16", 256, 110},
    {DType::Q4_K_R16, "q4_k_r16", 256, 144},
    {DType::Q5_K_R16, "q5_k_r16", 256, 176},
    {DType::Q4_0_R16, "q4_0_r16", 32, 18},
    {DType::IQ4_NL_R16, "iq4_nl_r16", 32, 18},
    {DType::IQ4_XS_R16, "iq4_xs_r16", 256, 136},
    {DType::MXFP4_R16, "mxfp4_r16", 32, 17},
};
constexpr CacheType kCacheTypes[] = {
    {DType::F32, 32, 0, 0},
    {DType::F16, 16, 0, 0},
    {DType::BF16, 16, 0, 0},
    {DType::Q8, 8, 0, sizeof(float)},
    {DType::FP8_E4M3, 8, 0, sizeof(float)},
    {DType::FP8_E5M2, 8, 0, 0},
    {DType::Q4, 4, 32, 2 * sizeof(uint16_t)},
    {DType::Q3, 3, 32, 2 * sizeof(uint16_t)},
    {DType::Q2, 2, 32, 2 * sizeof(uint16_t)},
};

/// By type number, since tensors look up their type all the time; unused numbers have block 0.
constexpr std::array<DTypeInfo, kTypeNumbers> kByNumber = [] {
    std::array<DTypeInfo, kTypeNumbers> table{};
    for (const DTypeInfo& info : kTypes) table[static_cast<size_t>(info.dtype)] = info;
    return table;
}();

constexpr std::array<CacheType, kTypeNumbers> kCacheTypeByNumber = [] {
    std::array<CacheType, kTypeNumbers> table{};
    for (const CacheType& type : kCacheTypes) table[static_cast<size_t>(type.dtype)] = type;
    return table;
}();

}  // namespace

const DTypeInfo* find_dtype(uint32_t ggml_type) {
    constexpr auto kOurs = static_cast<uint32_t>(DType::Q8);
    if (ggml_type >= kOurs || ggml_type == static_cast<uint32_t>(DType::I32)) return nullptr;
    const DTypeInfo& info = kByNumber[ggml_type];
    return info.block == 0 ? nullptr : &info;
}

const DTypeInfo* find_dtype(const char* name) {
    for (const DTypeInfo& info : kTypes) {
        if (info.block_bytes && std::strcmp(info.name, name) == 0) return &dtype_info(info.dtype);
    }
    return nullptr;
}

DType require_cache_type(const char* name) {
    for (const CacheType& type : kCacheTypes) {
        if (std::strcmp(dtype_info(type.dtype).name, name) == 0) return type.dtype;
    }
    fail(ErrorCode::unsupported, "cache type '", name,
         "' is not supported; supported are: ", cache_type_names());
}

const char* cache_type_names() {
    static const std::string names = [] {
        std::string all;
        for (const CacheType& type : kCacheTypes)
            all += (all.empty() ? "" : ", ") + std::string(dtype_info(type.dtype).name);
        return all;
    }();
    return names.c_str();
}

const DTypeInfo& dtype_info(DType dtype) {
    const auto number = static_cast<size_t>(dtype);
    assert(number < kTypeNumbers && kByNumber[number].block != 0);
    return kByNumber[number];
}

bool has_groups(DType dtype) { return kCacheTypeByNumber[static_cast<size_t>(dtype)].group != 0; }

bool is_float(DType dtype) { return dtype == DType::F32 || dtype == DType::F16 || dtype == DType::BF16; }

size_t row_bytes(DType dtype, int64_t n) {
    const DTypeInfo& info = dtype_info(dtype);
    assert(n >= 0 && n % info.block == 0 && info.block_bytes != 0);
    return static_cast<size_t>(n / info.block) * static_cast<size_t>(info.block_bytes);
}

const CacheType* cache_types(int* n) {
    *n = std::size(kCacheTypes);
    return kCacheTypes;
}

HeadBytes head_bytes(DType dtype, int64_t dim) {
    const CacheType& type = kCacheTypeByNumber[static_cast<size_t>(dtype)];
    assert(type.bits != 0);
    const int64_t groups = type.group ? (dim + type.group - 1) / type.group : 1;
    return {static_cast<size_t>(dim * type.bits + 7) / 8, static_cast<size_t>(groups * type.scale_bytes)};
}

HeadBytes head_bytes(DType dtype, int64_t dim, int64_t tokens, int scale_tokens) {
    const HeadBytes row = head_bytes(dtype, dim);
    if (scale_tokens == 0) return {row.elements * tokens, row.scales * tokens};
    assert(tokens % scale_tokens == 0);
    const CacheType& type = kCacheTypeByNumber[static_cast<size_t>(dtype)];
    return {row.elements * tokens, static_cast<size_t>(tokens / scale_tokens * dim * type.scale_bytes)};
}

}  // namespace slimrt
