#include "kernels/cuda/tensor_map.h"

#include <algorithm>

#include "core/error.h"
#include "kernels/cuda/device.h"

namespace slimrt::cuda {
namespace {

/// A function of the driver: linked by name, it would keep the library from being loaded where there is no
/// driver. Toolkits before 12.5 and after 12 each have one of the two ways to ask.
template <class Found>
void* driver_function(const char* name, Found found) {
    constexpr unsigned kFirstVersion = 12000;
    void* function = nullptr;
    if constexpr (requires {
                      cudaGetDriverEntryPointByVersion(name, &function, kFirstVersion, cudaEnableDefault,
                                                       &found);
                  })
        check(cudaGetDriverEntryPointByVersion(name, &function, kFirstVersion, cudaEnableDefault, &found),
              name);
    else
        check(cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found), name);
    if (found != cudaDriverEntryPointSuccess) fail(ErrorCode::device, "the driver does not know ", name);
    return function;
}

decltype(&cuTensorMapEncodeTiled) encoder() {
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(
        driver_function("cuTensorMapEncodeTiled", cudaDriverEntryPointQueryResult{}));
}

}  // namespace

CUtensorMap tensor_map(const TensorBoxes& boxes) {
    static const auto encode = encoder();
    constexpr std::array<cuuint32_t, 5> kEach = {1, 1, 1, 1, 1};
    std::array<cuuint64_t, 5> sizes;
    std::array<cuuint64_t, 4> strides;
    std::ranges::copy(boxes.sizes, sizes.begin());
    std::ranges::copy(boxes.strides, strides.begin());
    CUtensorMap map;
    const CUresult result = encode(
        &map, CU_TENSOR_MAP_DATA_TYPE_UINT8, sizes.size(), const_cast<void*>(boxes.base), sizes.data(),
        strides.data(), boxes.box.data(), kEach.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        fail(ErrorCode::device, "describing rows to the copy engine: error ", int(result));
    return map;
}

}  // namespace slimrt::cuda
