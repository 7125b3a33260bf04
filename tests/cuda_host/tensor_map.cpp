// Tensors whose boxes are copied in the background: of five dimensions of bytes, rows of 128, swizzled.
#include <array>
#include <bit>
#include <cstring>

#include "cuda.h"
#include "cuda_host_cluster.h"
#include "cuda_host_runtime.h"

namespace {

constexpr unsigned kRank = 5, kRow = 128, kMostOfBox = 256, kUnit = 16;

struct Map {
    const unsigned char* base;
    std::array<uint64_t, kRank> sizes;
    std::array<uint64_t, kRank - 1> strides;
    std::array<uint16_t, kRank> box;
    uint16_t of_map;  // that this is one
};
constexpr uint16_t kIsMap = 0x7e50;
static_assert(sizeof(Map) <= sizeof(CUtensorMap));

bool is_possible(const void* base, const cuuint64_t* sizes, const cuuint64_t* strides,
                 const cuuint32_t* box) {
    constexpr uint64_t kMostSize = uint64_t{1} << 32, kMostStride = uint64_t{1} << 40;
    bool possible = reinterpret_cast<uintptr_t>(base) % kUnit == 0 && box[0] == kRow;
    for (unsigned i = 0; i < kRank; ++i)
        possible &= sizes[i] > 0 && sizes[i] <= kMostSize && box[i] > 0 && box[i] <= kMostOfBox;
    for (unsigned i = 0; i < kRank - 1; ++i) possible &= strides[i] % kUnit == 0 && strides[i] < kMostStride;
    return possible;
}

}  // namespace

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* base,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    if (rank != kRank || !is_possible(base, sizes, strides, box)) return CUDA_ERROR_INVALID_VALUE;
    Map own{.base = static_cast<const unsigned char*>(base), .of_map = kIsMap};
    for (unsigned i = 0; i < kRank; ++i) {
        own.sizes[i] = sizes[i];
        own.box[i] = static_cast<uint16_t>(box[i]);
        if (i > 0) own.strides[i - 1] = strides[i - 1];
    }
    std::memcpy(map, &own, sizeof own);
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
    const bool known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
    *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    *function = known ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
    return cudaSuccess;
}

namespace cuda_host {

/// 16 bytes at a time, wherever they go.
void copy_box(void* to, const void* tensor, const int (&at)[kRank], uint64_t* barrier) {
    constexpr size_t kAlign = 8 * kRow;
    if (reinterpret_cast<uintptr_t>(to) % kAlign != 0) die("copy_box: %p is no multiple of %zu", to, kAlign);
    Map map;
    std::memcpy(&map, tensor, sizeof map);
    if (map.of_map != kIsMap) die("copy_box: %p is no tensor", tensor);
    for (unsigned i = 0; i < kRank; ++i)
        if (at[i] < 0 || at[i] + uint64_t{map.box[i]} > map.sizes[i])
            die("copy_box: a box from %d on reaches beyond dimension %u", at[i], i);
    auto* const target = static_cast<unsigned char*>(to);
    unsigned rows = 1;
    for (unsigned i = 1; i < kRank; ++i) rows *= map.box[i];
    for (unsigned row = 0; row < rows; ++row) {
        const unsigned char* from = map.base + at[0];
        for (unsigned i = 1, rest = row; i < kRank; rest /= map.box[i++])
            from += (at[i] + rest % map.box[i]) * map.strides[i - 1];
        for (unsigned unit = 0; unit < kRow / kUnit; ++unit)
            copy_bulk(target + row * kRow + (unit ^ row % 8) * kUnit, from + unit * kUnit, kUnit, barrier);
    }
}

}  // namespace cuda_host
