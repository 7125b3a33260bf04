// Replaces the CUDA backend where there is no CUDA compiler.
#include "core/error.h"
#include "kernels/backend.h"
#include "kernels/cuda/cublas_lt.h"

namespace slimrt {

std::vector<std::string> cuda_devices(std::string* why_none) {
    if (why_none) *why_none = "built without CUDA";
    return {};
}

void look_for_cublas_lt(std::vector<std::string>) {}

std::string cublas_lt_library() { return ""; }

std::unique_ptr<Backend> open_cuda_backend(int device, bool) {
    fail(ErrorCode::unsupported, "there is no CUDA device ", device,
         ": this slimrt was built without CUDA (build it where nvcc is, with -DSLIMRT_CUDA=ON)");
}

}  // namespace slimrt
