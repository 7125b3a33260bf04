// NVIDIA's cuBLASLt, where its library is found at run time: for products of many tokens with F16 and BF16
// weights, and with quantised ones that were unpacked. It makes more of newer tensor cores than kernels that
// run on all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace slimrt::cuda {

/// out [n, m] f32 = x [n, k] weight [m, k]^T, x and weight f16 or bf16. heads: how many such products; from
/// one to the next x_step and out_step elements, and m rows of the weight. Strides are in elements.
struct LtProduct {
    bool bf16 = false;
    int m = 0, n = 0, k = 0, heads = 1;
    const void *weight = nullptr, *x = nullptr;
    float* out = nullptr;
    int64_t weight_stride = 0, x_stride = 0, out_stride = 0, x_step = 0, out_step = 0;
};

class CublasLt {
  public:
    /// Bytes of workspace, at a multiple of 256; what NVIDIA advises for Hopper.
    static constexpr size_t kWorkspace = size_t(32) << 20;

    /// For the current device; nullptr where the library does not start there.
    static std::unique_ptr<CublasLt> open(void* library);
    ~CublasLt();
    CublasLt(const CublasLt&) = delete;

    /// Whether its fast kernels can multiply: rows must be at multiples of 16 bytes.
    static bool fits(const LtProduct& product);
    /// Whether it multiplied. A product that it refused is not tried again.
    bool multiply(const LtProduct& product, void* workspace, void* stream) const;

  private:
    struct Calls;
    struct Descriptions;
    using Key = std::tuple<bool, int, int, int, int, int64_t, int64_t, int64_t, int>;
    struct Algorithm {
        uint64_t data[8];
    };
    CublasLt(const Calls& calls, void* handle) : calls_(&calls), handle_(handle) {}
    static Key key_of(const LtProduct& product);
    std::optional<Algorithm> ask(const LtProduct& product, const Descriptions& descriptions) const;

    const Calls* calls_;
    void* handle_ = nullptr;
    mutable std::mutex mutex_;
    mutable std::map<Key, std::optional<Algorithm>> algorithms_;
};

/// The library for the current device, whose number is `device`; nullptr without a library, or with
/// SLIMRT_CUBLASLT=0.
const CublasLt* cublas_lt(int device);

}  // namespace slimrt::cuda

namespace slimrt {

/// Files to look for besides the loader's search path; to be called before a device first multiplies.
void look_for_cublas_lt(std::vector<std::string> files);
/// The library's file, with which CUDA devices multiply prompts; "" where slimrt's own kernels do, slower.
std::string cublas_lt_library();

}  // namespace slimrt
