// What is declared here follows the documentation of cuBLASLt's API, versions 12 and 13: functions by name,
// the numbers of the enumerations, and one structure. Matrices are column-major there: out^T [m, n] is the
// product of weight [k, m], transposed, and x [k, n].
#include "kernels/cuda/cublas_lt.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

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

uint32_t alignment_of(const void* p) {
    constexpr uintptr_t most = 256;
    const uintptr_t address = reinterpret_cast<uintptr_t>(p);
    return static_cast<uint32_t>(std::min(most, address & (~address + 1)));
}

uint32_t least_alignment(const LtProduct& p) {
    return std::min({alignment_of(p.weight), alignment_of(p.x), alignment_of(p.out)});
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

    /// Whether the library has all of these functions.
    bool find_in(void* library) {
        const auto find = [library](auto& call, const char* name) {
            call = reinterpret_cast<std::remove_reference_t<decltype(call)>>(dlsym(library, name));
            return call != nullptr;
        };
        return find(create, "cublasLtCreate") && find(destroy, "cublasLtDestroy") &&
               find(create_product, "cublasLtMatmulDescCreate") &&
               find(destroy_product, "cublasLtMatmulDescDestroy") &&
               find(set_product, "cublasLtMatmulDescSetAttribute") &&
               find(create_layout, "cublasLtMatrixLayoutCreate") &&
               find(destroy_layout, "cublasLtMatrixLayoutDestroy") &&
               find(set_layout, "cublasLtMatrixLayoutSetAttribute") &&
               find(create_preference, "cublasLtMatmulPreferenceCreate") &&
               find(destroy_preference, "cublasLtMatmulPreferenceDestroy") &&
               find(set_preference, "cublasLtMatmulPreferenceSetAttribute") &&
               find(ask, "cublasLtMatmulAlgoGetHeuristic") && find(multiply, "cublasLtMatmul");
    }
};

/// The library's descriptors of a product; `good`: all were created.
struct CublasLt::Descriptions {
    using Object = std::unique_ptr<void, Status (*)(void*)>;
    Object product, weight, x, out;
    bool good;

    Descriptions(const Calls& calls, const LtProduct& p)
        : product(nullptr, calls.destroy_product),
          weight(nullptr, calls.destroy_layout),
          x(nullptr, calls.destroy_layout),
          out(nullptr, calls.destroy_layout) {
        void* made = nullptr;
        const int32_t transposed = kTransposed;
        good = calls.create_product(&made, kComputeF32, kRealF32) == 0;
        product.reset(made);
        good = good && calls.set_product(made, kTransposeA, &transposed, sizeof transposed) == 0;
        const int type = p.bf16 ? kRealBF16 : kRealF16;
        good = good &&
               lay_out(calls, weight, type, p.k, p.m, p.weight_stride, p.heads, p.m * p.weight_stride) &&
               lay_out(calls, x, type, p.k, p.n, p.x_stride, p.heads, p.x_step) &&
               lay_out(calls, out, kRealF32, p.m, p.n, p.out_stride, p.heads, p.out_step);
    }

    static bool lay_out(const Calls& calls, Object& to, int type, int rows, int columns, int64_t stride,
                        int32_t heads, int64_t step) {
        void* made = nullptr;
        if (calls.create_layout(&made, type, uint64_t(rows), uint64_t(columns), stride) != 0) return false;
        to.reset(made);
        return calls.set_layout(made, kBatchCount, &heads, sizeof heads) == 0 &&
               calls.set_layout(made, kBatchOffset, &step, sizeof step) == 0;
    }
};

std::unique_ptr<CublasLt> CublasLt::open(void* library) {
    static Calls calls;
    static const bool found = calls.find_in(library);
    void* handle = nullptr;
    if (!found || calls.create(&handle) != 0) return nullptr;
    return std::unique_ptr<CublasLt>(new CublasLt(calls, handle));
}

CublasLt::~CublasLt() { calls_->destroy(handle_); }

bool CublasLt::fits(const LtProduct& p) {
    constexpr int kHalves = 8;
    return p.m > 0 && p.k > 0 && p.weight_stride % kHalves == 0 && p.x_stride % kHalves == 0 &&
           p.x_step % kHalves == 0 && alignment_of(p.weight) >= 16 && alignment_of(p.x) >= 16;
}

CublasLt::Key CublasLt::key_of(const LtProduct& p) {
    return {
        p.bf16, p.m, p.n, p.k, p.heads, p.weight_stride, p.x_stride, p.out_stride, int(least_alignment(p))};
}

std::optional<CublasLt::Algorithm> CublasLt::ask(const LtProduct& p, const Descriptions& descriptions) const {
    void* raw = nullptr;
    if (calls_->create_preference(&raw) != 0) return std::nullopt;
    const Descriptions::Object preference(raw, calls_->destroy_preference);
    const uint64_t workspace = kWorkspace;
    bool good = calls_->set_preference(raw, kMaxWorkspace, &workspace, sizeof workspace) == 0;
    const uint32_t least = least_alignment(p);
    for (int matrix = kAlignmentA; matrix <= kAlignmentD; ++matrix)
        good = good && calls_->set_preference(raw, matrix, &least, sizeof least) == 0;
    HeuristicResult result{};
    int found = 0;
    good = good &&
           calls_->ask(handle_, descriptions.product.get(), descriptions.weight.get(), descriptions.x.get(),
                       descriptions.out.get(), descriptions.out.get(), raw, 1, &result, &found) == 0;
    if (!good || found < 1 || result.state != 0) return std::nullopt;
    Algorithm algorithm;
    std::copy(std::begin(result.algorithm), std::end(result.algorithm), algorithm.data);
    return algorithm;
}

bool CublasLt::multiply(const LtProduct& p, void* workspace, void* stream) const {
    const std::lock_guard lock(mutex_);
    const auto [known, is_new] = algorithms_.try_emplace(key_of(p));
    std::optional<Algorithm>& algorithm = known->second;
    if (!is_new && !algorithm) return false;
    const Descriptions descriptions(*calls_, p);
    if (is_new && descriptions.good) algorithm = ask(p, descriptions);
    const float one = 1, zero = 0;
    if (algorithm &&
        calls_->multiply(handle_, descriptions.product.get(), &one, p.weight, descriptions.weight.get(), p.x,
                         descriptions.x.get(), &zero, p.out, descriptions.out.get(), p.out,
                         descriptions.out.get(), algorithm->data, workspace, kWorkspace, stream) != 0)
        algorithm.reset();
    return algorithm.has_value();
}

namespace {

std::vector<std::string>& places() {
    static std::vector<std::string> of_libraries = {"libcublasLt.so.13", "libcublasLt.so.12"};
    return of_libraries;
}

struct Library {
    void* opened = nullptr;
    std::string name;
};

const Library& library() {
    static const Library found = []() -> Library {
        const char* const wanted = std::getenv("SLIMRT_CUBLASLT");
        if (wanted && std::string_view(wanted) == "0") return {};
        for (const std::string& name : places())
            if (void* const opened = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) return {opened, name};
        return {};
    }();
    return found;
}

}  // namespace

const CublasLt* cublas_lt(int device) {
    if (!library().opened) return nullptr;
    static std::mutex mutex;
    // Never destroyed: when the process ends, the driver may be gone.
    static auto& of_devices = *new std::map<int, std::unique_ptr<CublasLt>>;
    const std::lock_guard lock(mutex);
    const auto [own, is_new] = of_devices.try_emplace(device);
    if (is_new) own->second = CublasLt::open(library().opened);
    return own->second.get();
}

}  // namespace slimrt::cuda

namespace slimrt {

void look_for_cublas_lt(std::vector<std::string> files) {
    std::vector<std::string>& all = cuda::places();
    all.insert(all.end(), files.begin(), files.end());
}

std::string cublas_lt_library() { return cuda::library().name; }

}  // namespace slimrt
