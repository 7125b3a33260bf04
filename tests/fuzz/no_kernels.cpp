// The CPU backend's table of an instruction set without its kernels, which a dry backend never calls: a plan
// then needs none of their sources. What says how much memory a call takes is as real.
#include "core/error.h"
#include "core/memory_info.h"
#include "kernels/backend.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/repack.h"

namespace slimrt {
namespace cpu {
namespace {

size_t packed_bytes(int64_t k) { return size_t(k) * 2 + 64; }
void pack(const float*, int64_t, void*) { __builtin_trap(); }
void product(const void*, size_t, int64_t, const void*, size_t, int64_t, int64_t, float*, size_t, Access) {
    __builtin_trap();
}

constexpr LinearKernel with(DType type, int64_t min_tokens, bool packs) {
    return {uint32_t(type), min_tokens, packs ? packed_bytes : nullptr, packs ? pack : nullptr, product};
}

const LinearKernel linear_kernels[] = {
    with(DType::F16, 32, true), with(DType::F32, 0, false),  with(DType::F16, 0, false),
    with(DType::Q8_0, 0, true), with(DType::TQ2_0, 0, true), {0, 0, nullptr, nullptr, nullptr},
};

}  // namespace

const Isa* const* supported_isas(int* n) {
    static const Isa none = {.name = "none", .linear = linear_kernels};
    static const Isa* const isas[] = {&none};
    *n = 1;
    return isas;
}

Access usual_access_of_codes() { return {Hint::t0, false, 8 << 10}; }

Access usual_access_of_rows() { return {Hint::t0, false, 10 << 10}; }

void repack(DType, const void*, int64_t, void*) { __builtin_trap(); }

}  // namespace cpu

std::unique_ptr<Backend> open_cuda_backend(int, bool) { fail(ErrorCode::unsupported, "no CUDA"); }

/// Not the machine's, which is read from files of the system, thousands of times a second.
uint64_t available_memory() { return 0; }

}  // namespace slimrt
