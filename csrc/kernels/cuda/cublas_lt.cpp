// What is declared here follows the documentation of cuBLASLt's API, versions 12 and 13: functions by name,
// the numbers of the enumerations, and one structure. Matrices are column-major there: out^T [m, n] is the
// product of weight [k, m], transposed, and x [k, n].
#include "kernels/cuda/cublas_lt.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string_view>

#include "core/error.h"

namespace slimrt::cuda {

namespace {

using Status = int;
enum { kRealF32 = 0, kRealF16 = 2, kRealBF16 = 14 };           // cudaDataType_t
enum { kComputeF32 = 68 };                                     // cublasComputeType_t
enum { kTransposeA = 3 };                                      // cublasLtMatmulDescAttributes_t
enum { kBatchCount = 5, kBatchOffset = 6 };                    // cublasLtMatrixLayoutAttribute_t
enum { kMaxWorkspace = 1, kAlignmentA = 5, kAlignmentD = 8 };  // cublasLtMatmulPreferenceAttributes_t
enum { kTransposed = 1 };                                      // cublasOperation_t

struct HeuristicResult {  // cublasLtMatmulHeuristicResult_t
    uint64_t algorithm[8];
    size_t workspace;
    Status state;
    float waves;
    int reserved[4];
};

void must(Status status, const char* what) {
    if (status != 0)
        fail(ErrorCode::device, "cuBLASLt failed at ", what, " (status ", status,
             "); SLIMRT_CUBLASLT=0 does without it");
}

uint32_t alignment_of(const void* p) {
    constexpr uintptr_t most = 256;
    const uintptr_t address = reinterpret_cast<uintptr_t>(p);
    return static_cast<uint32_t>(std::min(most, address & (~address + 1)));
}

}  // namespace

struct CublasLt::Calls {
    Status (*create)(void** handle);
    Status (*destroy)(void* handle);
    Status (*create_product)(void** description, int compute_type, int scale_type);
    Status (*destroy_product)(void* description);
    Status (*set_product)(void* description, int attribute, const void* value, size_t bytes);
    Status (*create_layout)(void** layout, int type, uint64_t rows, uint64_t columns, int64_t stride);
    Status (*destroy_layout)(void* layout);
    Status (*set_layout)(void* layout, int attribute, const void* value, size_t bytes);
    Status (*create_preference)(void** preference);
    Status (*destroy_preference)(void* preference);
    Status (*set_preference)(void* preference, int attribute, const void* value, size_t bytes);
    Status (*ask)(void* handle, void* product, void* a, void* b, void* c, void* d, void* preference,
                  int wanted, HeuristicResult* results, int* found);
    Status (*multiply)(void* handle, void* product, const void* alpha, const void* a, void* a_layout,
                       const void* b, void* b_layout, const void* beta, const void* c, void* c_layout,
                       void* d, void* d_layout, const void* algorithm, void* workspace,
                       size_t workspace_bytes, void* stream);

    explicit Calls(void* library) {
        const auto find = [library](auto& call, const char* name) {
            call = reinterpret_cast<std::remove_reference_t<decltype(call)>>(dlsym(library, name));
            if (!call)
                fail(ErrorCode::device, "the cuBLASLt library has no ", name,
                     "; SLIMRT_CUBLASLT=0 does without it");
        };
        find(create, "cublasLtCreate");
        find(destroy, "cublasLtDestroy");
        find(create_product, "cublasLtMatmulDescCreate");
        find(destroy_product, "cublasLtMatmulDescDestroy");
        find(set_product, "cublasLtMatmulDescSetAttribute");
        find(create_layout, "cublasLtMatrixLayoutCreate");
        find(destroy_layout, "cublasLtMatrixLayoutDestroy");
        find(set_layout, "cublasLtMatrixLayoutSetAttribute");
        find(create_preference, "cublasLtMatmulPreferenceCreate");
        find(destroy_preference, "cublasLtMatmulPreferenceDestroy");
        find(set_preference, "cublasLtMatmulPreferenceSetAttribute");
        find(ask, "cublasLtMatmulAlgoGetHeuristic");
        find(multiply, "cublasLtMatmul");
    }
};

/// The library's objects that describe a product, as long as a call needs them.
struct CublasLt::Descriptions {
    using Object = std::unique_ptr<void, Status (*)(void*)>;
    Object product, weight, x, out;

    Descriptions(const Calls& calls, const LtProduct& p)
        : product(nullptr, calls.destroy_product),
          weight(nullptr, calls.destroy_layout),
          x(nullptr, calls.destroy_layout),
          out(nullptr, calls.destroy_layout) {
        void* made = nullptr;
        must(calls.create_product(&made, kComputeF32, kRealF32), "describing a product");
        product.reset(made);
        const int32_t transposed = kTransposed;
        must(calls.set_product(made, kTransposeA, &transposed, sizeof transposed), "describing a product");
        const int type = p.brain ? kRealBF16 : kRealF16;
        weight.reset(layout(calls, type, p.k, p.m, p.weight_stride, p.heads, p.m * p.weight_stride));
        x.reset(layout(calls, type, p.k, p.n, p.x_stride, p.heads, p.x_step));
        out.reset(layout(calls, kRealF32, p.m, p.n, p.out_stride, p.heads, p.out_step));
    }

    static void* layout(const Calls& calls, int type, int rows, int columns, int64_t stride, int32_t heads,
                        int64_t step) {
        Object made(nullptr, calls.destroy_layout);
        void* raw = nullptr;
        must(calls.create_layout(&raw, type, uint64_t(rows), uint64_t(columns), stride),
             "describing a matrix");
        made.reset(raw);
        must(calls.set_layout(raw, kBatchCount, &heads, sizeof heads), "describing a matrix");
        must(calls.set_layout(raw, kBatchOffset, &step, sizeof step), "describing a matrix");
        return made.release();
    }
};

CublasLt::CublasLt(void* library) {
    static const Calls calls(library);
    calls_ = &calls;
    must(calls_->create(&handle_), "starting");
}

CublasLt::~CublasLt() { calls_->destroy(handle_); }

bool CublasLt::fits(const LtProduct& p) {
    constexpr int kHalves = 8;
    return p.m > 0 && p.k > 0 && p.weight_stride % kHalves == 0 && p.x_stride % kHalves == 0 &&
           p.x_step % kHalves == 0 && alignment_of(p.weight) >= 16 && alignment_of(p.x) >= 16;
}

CublasLt::Algorithm CublasLt::algorithm_of(const LtProduct& p, const Descriptions& descriptions) const {
    const uint32_t alignment[4] = {alignment_of(p.weight), alignment_of(p.x), alignment_of(p.out),
                                   alignment_of(p.out)};
    const Key key(p.brain, p.m, p.n, p.k, p.heads, p.weight_stride, p.x_stride, p.out_stride,
                  static_cast<int>(std::min({alignment[0], alignment[1], alignment[2]})));
    const std::lock_guard lock(mutex_);
    if (const auto known = algorithms_.find(key); known != algorithms_.end()) return known->second;
    void* raw = nullptr;
    must(calls_->create_preference(&raw), "asking for an algorithm");
    const Descriptions::Object preference(raw, calls_->destroy_preference);
    const uint64_t workspace = kWorkspace;
    must(calls_->set_preference(raw, kMaxWorkspace, &workspace, sizeof workspace), "asking for an algorithm");
    const uint32_t least = std::min({alignment[0], alignment[1], alignment[2]});
    for (int matrix = kAlignmentA; matrix <= kAlignmentD; ++matrix)
        must(calls_->set_preference(raw, matrix, &least, sizeof least), "asking for an algorithm");
    HeuristicResult result{};
    int found = 0;
    must(calls_->ask(handle_, descriptions.product.get(), descriptions.weight.get(), descriptions.x.get(),
                     descriptions.out.get(), descriptions.out.get(), raw, 1, &result, &found),
         "asking for an algorithm");
    if (found < 1 || result.state != 0) must(result.state ? result.state : -1, "finding an algorithm");
    Algorithm algorithm;
    std::copy(std::begin(result.algorithm), std::end(result.algorithm), algorithm.data);
    return algorithms_.emplace(key, algorithm).first->second;
}

void CublasLt::multiply(const LtProduct& p, void* workspace, void* stream) const {
    const Descriptions descriptions(*calls_, p);
    const Algorithm algorithm = algorithm_of(p, descriptions);
    const float one = 1, zero = 0;
    must(calls_->multiply(handle_, descriptions.product.get(), &one, p.weight, descriptions.weight.get(), p.x,
                          descriptions.x.get(), &zero, p.out, descriptions.out.get(), p.out,
                          descriptions.out.get(), algorithm.data, workspace, kWorkspace, stream),
         "a product");
}

const CublasLt* cublas_lt(int device) {
    static void* const library = []() -> void* {
        const char* const wanted = std::getenv("SLIMRT_CUBLASLT");
        if (wanted && std::string_view(wanted) == "0") return nullptr;
        for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"})
            if (void* const found = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return found;
        return nullptr;
    }();
    if (!library) return nullptr;
    static std::mutex mutex;
    // Never destroyed: when the process ends, the driver may have gone before.
    static auto& of_devices = *new std::map<int, std::unique_ptr<CublasLt>>;
    const std::lock_guard lock(mutex);
    std::unique_ptr<CublasLt>& own = of_devices[device];
    if (!own) own = std::make_unique<CublasLt>(library);
    return own.get();
}

}  // namespace slimrt::cuda
