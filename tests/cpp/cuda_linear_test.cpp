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
#include <random>
#include <vector>

#include "kernels/cuda/cublas_lt.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/numbers.cuh"

using namespace slimrt;
using namespace slimrt::cuda;

void slimrt::cuda::check(cudaError_t result, const char* what) {
    if (result == cudaSuccess) return;
    std::fprintf(stderr, "cuda_linear_test: %s: %s\n", what, cudaGetErrorString(result));
    std::exit(1);
}

namespace {

std::mt19937 rng(7);
int failures = 0;

float normal() {
    static std::normal_distribution<float> distribution;
    return distribution(rng);
}

/// Exactly as many bytes, so that AddressSanitizer sees the first beyond them.
struct Bytes {
    explicit Bytes(size_t n) {
        if (posix_memalign(&data, 256, n ? n : 1)) std::abort();
        std::memset(data, 0xff, n);
    }
    ~Bytes() { std::free(data); }
    Bytes(const Bytes&) = delete;
    void* data = nullptr;
};

uint16_t u16_at(const unsigned char* p) { return uint16_t(p[0] | p[1] << 8); }

constexpr DType kTypes[] = {DType::F32,    DType::F16,   DType::BF16,  DType::Q4_0,      DType::Q4_1,
                            DType::Q5_0,   DType::Q5_1,  DType::Q8_0,  DType::Q2_K,      DType::Q3_K,
                            DType::Q4_K,   DType::Q5_K,  DType::Q6_K,  DType::TQ2_0,     DType::IQ4_NL,
                            DType::IQ4_XS, DType::MXFP4, DType::IQ2_N, DType::IQ3_XXS_N, DType::IQ3_S_N};

double f16_at(const unsigned char* p) { return from_f16(u16_at(p)); }
int nibble(const unsigned char* bytes, int i) { return bytes[i % 16] >> (i < 16 ? 0 : 4) & 15; }
int two_bits(const unsigned char* codes, int i) { return codes[i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3; }
int bit(const unsigned char* bytes, int i) { return bytes[i / 8] >> i % 8 & 1; }

/// Numbers that codes of four bits stand for.
int looked_up(DType dtype, int code) {
    static constexpr int kIq4[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    static constexpr int kFp4[] = {0, 1, 2, 3, 4, 6, 8, 12}, kIq2[] = {8, 25, 43, 43, 43, 43, 43, 43};
    static constexpr int kXxs[] = {4, 12, 20, 28, 36, 44, 52, 62}, kS[] = {1, 3, 5, 7, 9, 11, 13, 15};
    if (dtype == DType::IQ4_NL || dtype == DType::IQ4_XS) return kIq4[code];
    const int* const magnitudes = dtype == DType::MXFP4       ? kFp4
                                  : dtype == DType::IQ2_N     ? kIq2
                                  : dtype == DType::IQ3_XXS_N ? kXxs
                                                              : kS;
    return magnitudes[code % 8] * (code < 8 ? 1 : -1);
}

/// Element i of a block of 32.
double element_of_32(DType dtype, const unsigned char* block, int i) {
    switch (dtype) {
        case DType::Q4_0:
            return f16_at(block) * (nibble(block + 2, i) - 8);
        case DType::Q4_1:
            return f16_at(block) * nibble(block + 4, i) + f16_at(block + 2);
        case DType::Q5_0:
            return f16_at(block) * (nibble(block + 6, i) + 16 * bit(block + 2, i) - 16);
        case DType::Q5_1:
            return f16_at(block) * (nibble(block + 8, i) + 16 * bit(block + 4, i)) + f16_at(block + 2);
        case DType::Q8_0:
            return f16_at(block) * int8_t(block[2 + i]);
        case DType::IQ4_NL:
            return f16_at(block) * looked_up(dtype, nibble(block + 2, i));
        default:
            return std::ldexp(looked_up(dtype, nibble(block + 1, i)), block[0] - 128);
    }
}

/// Element i of a block of 256.
double element_of_256(DType dtype, const unsigned char* block, int i) {
    const int g = i / 32;
    switch (dtype) {
        case DType::Q2_K:
            return f16_at(block + 80) * (block[i / 16] & 15) * two_bits(block + 16, i) -
                   f16_at(block + 82) * (block[i / 16] >> 4);
        case DType::Q3_K: {
            const unsigned char* const scales = block + 96;
            const int scale =
                (scales[i / 16 % 8] >> i / 128 * 4 & 15) | (scales[8 + i / 16 % 4] >> i / 64 * 2 & 3) << 4;
            const int third = block[i % 32] >> g & 1;
            return f16_at(block + 108) * (scale - 32) * (two_bits(block + 32, i) + 4 * third - 4);
        }
        case DType::Q4_K:
        case DType::Q5_K: {
            const unsigned char* const packed = block + 4;
            const bool five = dtype == DType::Q5_K;
            const int scale = g < 4 ? packed[g] & 63 : (packed[g + 4] & 15) | packed[g - 4] >> 6 << 4;
            const int minimum = g < 4 ? packed[g + 4] & 63 : packed[g + 4] >> 4 | packed[g] >> 6 << 4;
            const int code = block[(five ? 48 : 16) + g / 2 * 32 + i % 32] >> g % 2 * 4 & 15;
            const int fifth = five ? block[16 + i % 32] >> g & 1 : 0;
            return f16_at(block) * scale * (code + 16 * fifth) - f16_at(block + 2) * minimum;
        }
        case DType::Q6_K: {
            const int half = i / 128, part = g % 4;
            const int low = block[half * 64 + part % 2 * 32 + i % 32] >> part / 2 * 4 & 15;
            const int high = block[128 + half * 32 + i % 32] >> part * 2 & 3;
            return f16_at(block + 208) * int8_t(block[192 + i / 16]) * (low + 16 * high - 32);
        }
        case DType::TQ2_0:
            return f16_at(block + 64) * (two_bits(block, i) - 1);
        case DType::IQ4_XS: {
            const int scale = (block[4 + g / 2] >> g % 2 * 4 & 15) | (block[2 + g / 4] >> g % 4 * 2 & 3) << 4;
            return f16_at(block) * (scale - 32) * looked_up(dtype, nibble(block + 8 + 16 * g, i % 32));
        }
        default: {
            const double unit = dtype == DType::IQ2_N ? 0.125 : dtype == DType::IQ3_XXS_N ? 0.25 : 1;
            return f16_at(block) * unit * int8_t(block[2 + i / 16]) *
                   looked_up(dtype, nibble(block + 18 + 16 * g, i % 32));
        }
    }
}

/// Element i of a stored row, by the definition of its type (GGUF, kernels/cpu/blocks_grid.h).
double element(DType dtype, const unsigned char* row, int64_t i) {
    const DTypeInfo& type = dtype_info(dtype);
    const unsigned char* const block = row + i / type.block * type.block_bytes;
    if (type.block == 256) return element_of_256(dtype, block, int(i % 256));
    if (type.block == 32) return element_of_32(dtype, block, int(i % 32));
    if (dtype == DType::F16) return f16_at(block);
    if (dtype == DType::BF16) return from_bf16(u16_at(block));
    float x;
    std::memcpy(&x, block, sizeof x);
    return x;
}

/// Where a block has its f16 numbers.
std::vector<int> halves(DType dtype) {
    switch (dtype) {
        case DType::Q4_1:
        case DType::Q5_1:
        case DType::Q4_K:
        case DType::Q5_K:
            return {0, 2};
        case DType::Q2_K:
            return {80, 82};
        case DType::Q3_K:
            return {108};
        case DType::Q6_K:
            return {208};
        case DType::TQ2_0:
            return {64};
        default:
            return {0};
    }
}

/// Random bytes, with numbers and scales of about `size`.
void fill(DType dtype, unsigned char* row, int64_t k, float size) {
    const DTypeInfo& type = dtype_info(dtype);
    const auto put = [](unsigned char* p, uint16_t bits) { std::memcpy(p, &bits, sizeof bits); };
    for (int64_t b = 0; b < k / type.block; ++b) {
        unsigned char* const block = row + b * type.block_bytes;
        for (int i = 0; i < type.block_bytes; ++i) block[i] = uint8_t(rng());
        const float x = normal() * size;
        if (dtype == DType::F32)
            std::memcpy(block, &x, sizeof x);
        else if (dtype == DType::BF16)
            put(block, to_bf16(x));
        else if (dtype == DType::MXFP4)
            block[0] = uint8_t(128 + std::ilogb(size) - int(rng() % 8));
        else
            for (const int at : halves(dtype)) put(block + at, to_f16(normal() * size));
    }
}

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
    int tokens, m, k, heads = 1;
    bool uneven = false;  // addresses and strides; a bias too
    bool wild = false;    // magnitudes of x
    float size = 0.05f;   // of weights or their scales
};

/// x with a row of 1e30, one of 1e-30, one with NaN, one of zeros.
void fill_x(const Matrix& x, bool wild) {
    constexpr float factor[] = {1, 1e30f, 1e-30f, 1e-3f, 1, 3e4f, 0};
    for (int t = 0; t < x.view.rows; ++t) {
        for (int64_t i = 0; i < x.view.cols; ++i) {
            x.view.f32(t)[i] = normal() * (wild && t < 7 ? factor[t] : 1);
            if (wild && t == 4 && i % 100 == 50) x.view.f32(t)[i] = NAN;
        }
    }
}

/// What the kernels may be off, relative to the sum of magnitudes: F32 by the rounding of sums; few tokens by
/// what two 16-bit parts of x leave (2^-22 of f16, 2^-16 of bf16) and of sums; many by the rounding of x, and
/// of quantised weights, to 16 bits (2^-11 each, 2^-8 of bf16), of whose sum over k random signs leave
/// little.
double allowed(const Case& c) {
    if (c.dtype == DType::F32) return 0x1p-21;
    const bool brain = c.dtype == DType::BF16;
    if (c.tokens <= 8) return brain ? 0x1p-16 : 0x1p-21;
    return brain ? 0x1p-9 : 0x1p-11;
}

void compare(const Case& c, const Matrix& x, const Matrix& w, const Tensor& bias, const Matrix& out) {
    std::vector<double> row(c.k);
    for (int64_t r = 0; r < int64_t(c.m) * c.heads; ++r) {
        for (int i = 0; i < c.k; ++i) row[i] = element(c.dtype, w.row(r), i);
        for (int t = 0; t < c.tokens; ++t) {
            const float* const own = x.view.f32(t) + r / c.m * c.k;
            double sum = bias ? bias.f32()[r] : 0, magnitude = std::fabs(sum);
            for (int i = 0; i < c.k; ++i) {
                const double product = double(own[i]) * row[i];
                sum += product;
                magnitude += std::fabs(product);
            }
            const double got = out.view.f32(t)[r], error = std::fabs(got - sum);
            const bool ok = std::isnan(sum) ? std::isnan(got) : error <= allowed(c) * magnitude + 1e-37;
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
    const Matrix w(c.dtype, int64_t(c.m) * c.heads, c.k, even, c.uneven ? block : 0);
    const Matrix out(DType::F32, c.tokens, int64_t(c.m) * c.heads, word, 5 * word);
    const Matrix bias(DType::F32, 1, int64_t(c.m) * c.heads, word, 0);
    fill_x(x, c.wild);
    for (int64_t r = 0; r < w.view.rows; ++r) fill(c.dtype, w.row(r), c.k, c.size);
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

/// A library that fails is done without: the own kernels multiply, also what it has begun.
void compare_without_library(Device device) {
    void* const library = dlopen(SLIMRT_NO_CUBLASLT, RTLD_NOW | RTLD_LOCAL);
    int* const fails_at = library ? static_cast<int*>(dlsym(library, "fails_at")) : nullptr;
    int* const n_products = library ? static_cast<int*>(dlsym(library, "n_products")) : nullptr;
    if (!fails_at || !n_products || cublas_lt_library() != SLIMRT_NO_CUBLASLT) {
        std::fprintf(stderr, "the library is not found: '%s'\n", cublas_lt_library().c_str());
        ++failures;
        return;
    }
    for (*fails_at = 1; *fails_at <= 4; ++*fails_at) {  // of each device it is started once
        device.id = *fails_at;
        *n_products = 0;
        for (int again = 0; again < 2; ++again)
            run(device, {.dtype = DType::F16, .tokens = 64, .m = 24, .k = 64});
        if (*n_products == (*fails_at == 3)) continue;
        std::fprintf(stderr, "failing at %d, the library multiplies %d times\n", *fails_at, *n_products);
        ++failures;
    }
}

}  // namespace

int main() {
    look_for_cublas_lt({SLIMRT_NO_CUBLASLT});
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
            run(device, {.dtype = dtype, .tokens = tokens, .m = 24, .k = k, .heads = 3, .wild = true});
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
        compare_bits(device, dtype);
        compare_launches(device, dtype);
    }
    compare_without_library(device);
    check(cudaStreamDestroy(device.stream), "cudaStreamDestroy");
    if (failures) return 1;
    std::puts("cuda_linear_test: ok");
}
