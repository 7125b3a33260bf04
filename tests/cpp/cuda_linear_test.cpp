// CUDA's linear() against float64 where the operations' tests cannot look: every type of weights, at any
// address and stride that it may have, a weight beyond f16, rows of x of any magnitude and with NaN, the bits
// of a token alone and among others, the workspace that a plan reserves. Runs on the emulator or a device
// whose memory the host may touch.
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "kernels/cuda/cublas_lt.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/numbers.cuh"
#include "stored_weights.h"

using namespace slimrt;
using namespace slimrt::cuda;

void slimrt::cuda::check(cudaError_t result, const char* what) {
    if (result == cudaSuccess) return;
    std::fprintf(stderr, "cuda_linear_test: %s: %s\n", what, cudaGetErrorString(result));
    std::exit(1);
}

namespace {

int failures = 0;

/// Exactly as many bytes, so that AddressSanitizer sees the first beyond them.
struct Bytes {
    static constexpr std::align_val_t kAlign{256};
    explicit Bytes(size_t n) : data(::operator new(n ? n : 1, kAlign)) { std::memset(data, 0xff, n); }
    ~Bytes() { ::operator delete(data, kAlign); }
    Bytes(const Bytes&) = delete;
    void* const data;
};

constexpr DType kTypes[] = {DType::F32,    DType::F16,   DType::BF16,  DType::Q4_0,      DType::Q4_1,
                            DType::Q5_0,   DType::Q5_1,  DType::Q8_0,  DType::Q2_K,      DType::Q3_K,
                            DType::Q4_K,   DType::Q5_K,  DType::Q6_K,  DType::TQ2_0,     DType::IQ4_NL,
                            DType::IQ4_XS, DType::MXFP4, DType::IQ2_N, DType::IQ3_XXS_N, DType::IQ3_S_N};

/// A tensor whose first byte is `before` bytes into its memory and whose rows are `between` bytes apart.
struct Matrix {
    Matrix(DType dtype, int64_t rows, int64_t columns, size_t before, size_t between)
        : memory(before + (rows - 1) * (row_bytes(dtype, columns) + between) + row_bytes(dtype, columns)),
          view(static_cast<unsigned char*>(memory.data) + before, dtype, rows, columns) {
        view.stride += between;
    }
    unsigned char* row(int64_t i) const { return reinterpret_cast<unsigned char*>(view.row(i)); }
    Bytes memory;
    Tensor view;
};

struct Case {
    DType dtype;
    int tokens, m, k, heads = 1, group = 1;  // group: heads with the same rows of the weight
    bool uneven = false;                     // addresses and strides; a bias too
    bool wild = false;                       // magnitudes of x
    float size = 0.05f;                      // of weights or their scales
    float (*number)() = normal;              // each of x, and of F32 weights before they have their size
};

/// x with a row of 1e30, one of 1e-30, one with NaN, one of zeros.
void fill_x(const Matrix& x, bool wild, float (*number)() = normal) {
    constexpr float factor[] = {1, 1e30f, 1e-30f, 1e-3f, 1, 3e4f, 0};
    for (int t = 0; t < x.view.rows; ++t) {
        for (int64_t i = 0; i < x.view.cols; ++i) {
            x.view.f32(t)[i] = number() * (wild && t < 7 ? factor[t] : 1);
            if (wild && t == 4 && i % 100 == 50) x.view.f32(t)[i] = NAN;
        }
    }
}

/// F32 weights, the last row of zeros if `wild`.
void fill_floats(const Case& c, const Matrix& w) {
    for (int64_t r = 0; r < w.view.rows; ++r)
        for (int64_t i = 0; i < c.k; ++i)
            w.view.f32(r)[i] = c.wild && r + 1 == w.view.rows ? 0.0f : c.number() * c.size;
}

/// Magnitudes of 24 powers of ten in a row.
float mixed() {
    static std::uniform_real_distribution<float> exponent(-12, 12);
    return normal() * std::pow(10.0f, exponent(rng));
}
float positive() { return std::fabs(normal()); }

/// From here on F32 weights are split into two f16 parts.
constexpr int kSplitTokens = 25;

/// What the kernels may be off, relative to the sum of magnitudes: F32 by the rounding of sums, and with many
/// tokens by what two f16 parts leave (2^-23 of x and of a weight; 2^-22 the low parts' product, left out),
/// which is most where a single product is most of the sum; few tokens by what two 16-bit parts of x leave
/// (2^-22 of f16, 2^-16 of bf16) and of sums; many by the rounding of x, and of quantised weights, to 16 bits
/// (2^-11 each, 2^-8 of bf16), of whose sum over k random signs leave little.
double allowed(const Case& c) {
    if (c.dtype == DType::F32) return c.number == normal || c.tokens < kSplitTokens ? 0x1p-21 : 0x1p-20;
    const bool brain = c.dtype == DType::BF16;
    if (c.tokens <= 8) return brain ? 0x1p-16 : 0x1p-21;
    return brain ? 0x1p-9 : 0x1p-11;
}

/// A sum of products and of their magnitudes, in lanes: in one chain each addition would wait for the last.
struct Sum {
    double value = 0, magnitude = 0;

    void add(const float* a, const double* b, int n) {
        constexpr int kLanes = 8;
        double values[kLanes] = {}, magnitudes[kLanes] = {};
        int i = 0;
        for (; i + kLanes <= n; i += kLanes) {
            for (int lane = 0; lane < kLanes; ++lane) {
                const double product = double(a[i + lane]) * b[i + lane];
                values[lane] += product;
                magnitudes[lane] += std::fabs(product);
            }
        }
        for (; i < n; ++i) {
            values[0] += double(a[i]) * b[i];
            magnitudes[0] += std::fabs(double(a[i]) * b[i]);
        }
        for (int lane = 0; lane < kLanes; ++lane) {
            value += values[lane];
            magnitude += magnitudes[lane];
        }
    }
};

/// What two f16 parts leave of numbers that are small in their row: 2^-39 of its largest.
double of_small(const Case& c, const float* x, const std::vector<double>& w) {
    if (c.dtype != DType::F32 || c.tokens < kSplitTokens) return 0;
    double largest_x = 0, largest_w = 0, sum_x = 0, sum_w = 0;
    for (int i = 0; i < c.k; ++i) {
        largest_x = std::max<double>(largest_x, std::fabs(x[i]));
        largest_w = std::max(largest_w, std::fabs(w[i]));
        sum_x += std::fabs(x[i]);
        sum_w += std::fabs(w[i]);
    }
    return 0x1p-39 * (largest_x * sum_w + sum_x * largest_w);
}

void compare(const Case& c, const Matrix& x, const Matrix& w, const Tensor& bias, const Matrix& out) {
    std::vector<double> row(c.k);
    for (int64_t r = 0; r < int64_t(c.m) * c.heads; ++r) {
        const int64_t of_weight = r / c.m / c.group * c.m + r % c.m;
        for (int i = 0; i < c.k; ++i) row[i] = element(c.dtype, w.row(of_weight), i);
        for (int t = 0; t < c.tokens; ++t) {
            const float* const own = x.view.f32(t) + r / c.m * c.k;
            Sum exact;
            if (bias) exact = {bias.f32()[of_weight], std::fabs(bias.f32()[of_weight])};
            exact.add(own, row.data(), c.k);
            const double sum = exact.value, magnitude = exact.magnitude;
            const double got = out.view.f32(t)[r], error = std::fabs(got - sum);
            const bool ok = std::isnan(sum) ? std::isnan(got)
                                            : error <= allowed(c) * magnitude + of_small(c, own, row) + 1e-37;
            if (ok || failures++ > 10) continue;
            std::fprintf(stderr, "type %s, %d tokens, k %d: token %d row %d is %g, not %g (of %g)\n",
                         dtype_info(c.dtype).name, c.tokens, c.k, t, int(r), got, sum, magnitude);
        }
    }
}

void run(const Device& device, const Case& c) {
    const size_t block = size_t(dtype_info(c.dtype).block_bytes), word = c.uneven ? 4 : 0;
    const size_t even = c.uneven ? std::min<size_t>(block & -block, 4) : 0;
    const Matrix x(DType::F32, c.tokens, int64_t(c.k) * c.heads, word, 3 * word);
    const Matrix w(c.dtype, int64_t(c.m) * c.heads / c.group, c.k, even, c.uneven ? block : 0);
    const Matrix out(DType::F32, c.tokens, int64_t(c.m) * c.heads, word, 5 * word);
    const Matrix bias(DType::F32, 1, w.view.rows, word, 0);
    fill_x(x, c.wild, c.number);
    if (c.dtype == DType::F32) fill_floats(c, w);
    for (int64_t r = 0; r < w.view.rows && c.dtype != DType::F32; ++r) fill(c.dtype, w.row(r), c.k, c.size);
    for (int64_t i = 0; i < bias.view.cols; ++i) bias.view.f32()[i] = normal();
    const Product product{w.view, c.uneven ? bias.view : Tensor(), out.view};
    Device plan = device;
    plan.stream = nullptr;
    Tensor more = x.view;
    more.data = nullptr;
    more.rows += 21;
    const size_t bytes = linear_workspace(device, x.view, c.heads, {&product, 1});
    if (linear_workspace(plan, more, c.heads, {&product, 1}) < bytes) {
        std::fprintf(stderr, "%d tokens need more workspace than %d\n", c.tokens, int(more.rows));
        ++failures;
    }
    const Bytes workspace(bytes);
    linear(device, x.view, c.heads, {&product, 1}, static_cast<std::byte*>(workspace.data));
    check(cudaStreamSynchronize(device.stream), "cudaStreamSynchronize");
    compare(c, x, w, product.bias, out);
}

/// Few tokens: bits depend neither on the other tokens nor on the other products.
void compare_bits(const Device& device, DType dtype) {
    constexpr int kTokens = 8, kRows = 50, kColumns = 1024;
    const Matrix x(DType::F32, kTokens, kColumns, 0, 0), w(dtype, kRows, kColumns, 0, 0);
    const Matrix alone(DType::F32, kTokens, kRows, 0, 0), together(DType::F32, kTokens, kRows, 0, 0);
    const Matrix other(DType::F32, kTokens, kRows, 0, 0);
    fill_x(x, false);
    for (int r = 0; r < kRows; ++r) fill(dtype, w.row(r), kColumns, 0.05f);
    const Product both[] = {{w.view.rows_of(7, 20), {}, other.view.cols_of(0, 20)},
                            {w.view, {}, together.view}};
    linear(device, x.view, 1, both, nullptr);
    for (int t = 0; t < kTokens; ++t) {
        const Product one{w.view, {}, alone.view.rows_of(t, 1)};
        linear(device, x.view.rows_of(t, 1), 1, {&one, 1}, nullptr);
    }
    check(cudaStreamSynchronize(device.stream), "cudaStreamSynchronize");
    if (std::memcmp(alone.memory.data, together.memory.data, alone.view.bytes()) == 0) return;
    std::fprintf(stderr, "type %s: a token alone differs from the same among others\n",
                 dtype_info(dtype).name);
    ++failures;
}

/// Few tokens: a kernel reads the weights once, on devices with the least shared memory too. Rows for one or
/// two tiles a warp.
void compare_launches(const Device& device, DType dtype) {
    for (const int rows : {48, 800}) {
        for (int tokens = 1; tokens <= 8; ++tokens) {
            const Matrix x(DType::F32, tokens, 256, 0, 0), w(dtype, rows, 256, 0, 0);
            const Matrix out(DType::F32, tokens, rows, 0, 0);
            const Product product{w.view, {}, out.view};
            check(cudaStreamBeginCapture(device.stream, cudaStreamCaptureModeThreadLocal), "recording");
            linear(device, x.view, 1, {&product, 1}, nullptr);
            cudaGraph_t graph = nullptr;
            size_t launches = 0;
            check(cudaStreamEndCapture(device.stream, &graph), "recording");
            check(cudaGraphGetNodes(graph, nullptr, &launches), "counting");
            check(cudaGraphDestroy(graph), "forgetting");
            if (launches == 1) continue;
            std::fprintf(stderr, "type %s, %d rows, %d tokens: weights are read %zu times\n",
                         dtype_info(dtype).name, rows, tokens, launches);
            ++failures;
        }
    }
}

/// F32 weights split into two f16 parts: rows that end anywhere, magnitudes of all kinds, long sums of one
/// sign, and more rows than are split at a time.
void compare_floats(const Device& device) {
    for (const int k : {1, 2, 15, 17, 32, 33, 65, 130})
        run(device, {.dtype = DType::F32, .tokens = 33, .m = 70, .k = k, .uneven = k % 2 == 1});
    for (const int tokens : {kSplitTokens - 1, kSplitTokens, 130})
        run(device, {.dtype = DType::F32, .tokens = tokens, .m = 130, .k = 500, .number = mixed});
    for (const float size : {1e-38f, 1e-34f, 1e6f, 1e29f})
        run(device,
            {.dtype = DType::F32, .tokens = 40, .m = 33, .k = 96, .wild = size < 1e20f, .size = size});
    for (const int tokens : {32, 128})
        run(device, {.dtype = DType::F32, .tokens = tokens, .m = 70, .k = 4096, .number = positive});
    run(device, {.dtype = DType::F32, .tokens = kSplitTokens, .m = 130, .k = 1 << 16, .uneven = true});
}

#ifdef SLIMRT_NO_CUBLASLT  // on the emulator: a device has the library itself

/// The library of tests/cpp/no_cublas_lt.cpp.
struct Library {
    using Multiply = void(const void* weight, int64_t weight_stride, const void* x, int64_t x_stride,
                          float* out, int64_t out_stride, int m, int n, int k, void* stream);
    template <class T>
    T* find(const char* name) const {
        return opened ? static_cast<T*>(dlsym(opened, name)) : nullptr;
    }
    void* const opened = dlopen(SLIMRT_NO_CUBLASLT, RTLD_NOW | RTLD_LOCAL);
    int* const fails_at = find<int>("fails_at");
    int* const n_products = find<int>("n_products");
    Multiply** const multiplies = find<Multiply*>("multiplies");

    bool good() const {
        if (fails_at && n_products && multiplies && cublas_lt_library() == SLIMRT_NO_CUBLASLT) return true;
        std::fprintf(stderr, "the library is not found: '%s'\n", cublas_lt_library().c_str());
        return ++failures, false;
    }
    void expect(int products, const char* of) const {
        if (*n_products == products) return;
        std::fprintf(stderr, "%s, failing at %d: the library multiplies %d times, not %d\n", of, *fails_at,
                     *n_products, products);
        ++failures;
    }
};

/// A library that fails is done without: the own kernels multiply, also what it has begun.
void compare_without_library(const Library& library, Device device) {
    for (int fails_at = 1; fails_at <= 4; ++fails_at) {
        for (const DType dtype : {DType::F16, DType::Q4_K}) {
            device.id += 1;  // of each device it is started once
            *library.fails_at = fails_at;
            *library.n_products = 0;
            const int tokens = dtype == DType::F16 ? 64 : 256;
            for (int again = 0; again < 2; ++again)
                run(device, {.dtype = dtype, .tokens = tokens, .m = 24, .k = 256});
            library.expect(fails_at == 3, dtype_info(dtype).name);
        }
    }
}

/// A block a token.
__global__ void multiply_halves(const uint16_t* weight, int64_t weight_stride, const uint16_t* x,
                                int64_t x_stride, float* out, int64_t out_stride, int m, int k) {
    for (int row = threadIdx.x; row < m; row += blockDim.x) {
        float sum = 0;
        for (int i = 0; i < k; ++i)
            sum += from_f16(weight[row * weight_stride + i]) * from_f16(x[blockIdx.x * x_stride + i]);
        out[blockIdx.x * out_stride + row] = sum;
    }
}

/// Quantised weights that the library is given as f16, in slices where not all have room in the L2; of sizes
/// for which own products take over, and too few tokens or tiles for it. Heads, each with its rows of an f16
/// weight or several with the same.
void compare_unpacked(const Library& library, Device device) {
    *library.fails_at = 0;
    *library.multiplies = [](const void* weight, int64_t weight_stride, const void* x, int64_t x_stride,
                             float* out, int64_t out_stride, int m, int n, int k, void* stream) {
        Device own;
        own.stream = static_cast<cudaStream_t>(stream);
        launch(own, multiply_halves, {.grid = dim3(unsigned(n)), .block = dim3(32)},
               static_cast<const uint16_t*>(weight), weight_stride, static_cast<const uint16_t*>(x), x_stride,
               out, out_stride, m, k);
    };
    const auto expect = [&](int products, const Device& of, const Case& c) {
        *library.n_products = 0;
        run(of, c);
        library.expect(products, dtype_info(c.dtype).name);
    };
    device.id = 10;  // where it has not been started yet
    for (const DType dtype : kTypes) {
        const int block = dtype_info(dtype).block, k = block == 32 ? 352 : 512;
        if (block == 1) continue;
        expect(1, device, {.dtype = dtype, .tokens = 256, .m = 37, .k = k, .uneven = true, .wild = true});
        expect(1, device, {.dtype = dtype, .tokens = 257, .m = 130, .k = k});
    }
    const Case large{.dtype = DType::Q6_K, .tokens = 256, .m = 300, .k = 512, .size = 3000};
    expect(1, device, large);
    expect(0, device, {.dtype = DType::Q4_K, .tokens = 255, .m = 300, .k = 512});
    expect(0, device, {.dtype = DType::Q4_K, .tokens = 256, .m = 24, .k = 512, .heads = 2});
    expect(1, device, {.dtype = DType::F16, .tokens = 64, .m = 24, .k = 256, .heads = 4});
    expect(2, device, {.dtype = DType::F16, .tokens = 64, .m = 24, .k = 256, .heads = 6, .group = 2});
    device.l2_bytes = 3 * 128 * 512;  // two thirds: 128 rows
    expect(3, device, {.dtype = DType::Q4_K, .tokens = 256, .m = 300, .k = 512});
    expect(3, device, large);
    device.processors = 9;
    expect(0, device, {.dtype = DType::Q4_K, .tokens = 256, .m = 300, .k = 512});
}

#endif

}  // namespace

int main() {
#ifdef SLIMRT_NO_CUBLASLT
    look_for_cublas_lt({SLIMRT_NO_CUBLASLT});
#endif
    Device device;
    device.capability = 90;
    device.processors = 3;
    device.shared_bytes = size_t(99) << 10;
    check(cudaStreamCreate(&device.stream), "cudaStreamCreate");
    for (const DType dtype : kTypes) {
        if (!native(dtype)) {
            std::fprintf(stderr, "type %s is not multiplied as it is stored\n", dtype_info(dtype).name);
            ++failures;
            continue;
        }
        const int block = dtype_info(dtype).block;
        const int k = block == 1 ? 333 : block == 32 ? 352 : 768;
        for (const int tokens : {1, 2, 3, 5, 8, 9, 17, 64, 130}) {
            run(device, {.dtype = dtype, .tokens = tokens, .m = 37, .k = k, .uneven = true, .wild = true});
            run(device, {.dtype = dtype, .tokens = tokens, .m = 129, .k = 1024});
            if (block > 1 && tokens <= 8)
                run(device, {.dtype = dtype, .tokens = tokens, .m = 200, .k = 2560});
        }
        for (const int tokens : {1, 5, 40, 70})
            for (const int group : {1, 3})
                run(device, {.dtype = dtype,
                             .tokens = tokens,
                             .m = 24,
                             .k = k,
                             .heads = 3 * group,
                             .group = group,
                             .uneven = group > 1,
                             .wild = true});
        if (block > 1) {  // Q6_K: 3000 * 128 * 32 is far beyond f16
            const float size = dtype == DType::MXFP4 ? 0x1p24f : 3000;
            for (const int tokens : {4, 12})
                run(device, {.dtype = dtype, .tokens = tokens, .m = 40, .k = 512, .size = size});
        }
        for (int odd = 1; block == 1 && odd < 140; odd += 31) {
            run(device, {.dtype = dtype, .tokens = 2, .m = 18, .k = odd, .uneven = true});
            run(device, {.dtype = dtype, .tokens = 11, .m = 18, .k = odd, .uneven = true});
        }
        Device many = device;  // whose tiles are small, or k dealt out
        many.processors = 80;
        for (const int m : {129, 5000})
            run(many, {.dtype = dtype, .tokens = 130, .m = m, .k = m > 129 ? 256 : 2560, .uneven = m == 129});
        run(many, {.dtype = dtype, .tokens = 9, .m = 24, .k = 1024, .heads = 4, .group = 2, .uneven = true});
        compare_bits(device, dtype);
        compare_launches(device, dtype);
    }
    compare_floats(device);
    device.l2_bytes = size_t(50) << 20;
#ifdef SLIMRT_NO_CUBLASLT
    if (const Library library; library.good()) {
        compare_without_library(library, device);
        compare_unpacked(library, device);
    }
#endif
    check(cudaStreamDestroy(device.stream), "cudaStreamDestroy");
    if (failures) return 1;
    std::puts("cuda_linear_test: ok");
}
