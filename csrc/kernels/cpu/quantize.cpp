// Quantises f32 weights with the scales that quantize_affine.h and quantize_symmetric.h find. Compiled once,
// for the baseline ISA without fused multiply-add: a model converts to the same bytes on every machine.
#include "kernels/cpu/quantize.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "core/error.h"
#include "kernels/cpu/quantize_affine.h"
#include "kernels/cpu/quantize_symmetric.h"

namespace slimrt::cpu {
namespace SLIMRT_ISA {
namespace {

constexpr int64_t blocks_per_item = 64;

void put(Scale* at, float x) {
    const uint16_t bits = float_to_half(x);
    memcpy(at->bytes, &bits, sizeof bits);
}

/// Packs 8 scales k and 8 minima l of six bits: those of groups 0 to 3 in whole bytes, whose upper two bits
/// and 4 more bytes hold the others.
template <class Type>
void put_six_bits(const AffineBlock<Type>& from, uint8_t to[12]) {
    for (int j = 0; j < 4; ++j) {
        const int k = int(from.k[j]), l = int(from.l[j]), k4 = int(from.k[j + 4]), l4 = int(from.l[j + 4]);
        to[j] = uint8_t(k | k4 >> 4 << 6);
        to[j + 4] = uint8_t(l | l4 >> 4 << 6);
        to[j + 8] = uint8_t((k4 & 15) | (l4 & 15) << 4);
    }
}

/// Packs 16 scales of six bits as scales_q3() reads them.
void put_scales_q3(const float k[16], uint8_t to[12]) {
    memset(to, 0, 12);
    for (int i = 0; i < 16; ++i) {
        const int scale = int(k[i]) + 32;
        to[i & 7] |= uint8_t((scale & 15) << (i & 8 ? 4 : 0));
        to[8 + (i & 3)] |= uint8_t(scale >> 4 << i / 4 * 2);
    }
}

/// Packs the low two bits of 256 codes: in a byte four elements, 32 apart.
void put_two_bits(const uint8_t* codes, uint8_t to[64]) {
    for (int half = 0; half < 2; ++half)
        for (int i = 0; i < 32; ++i) {
            const uint8_t* c = codes + 128 * half + i;
            to[32 * half + i] = uint8_t((c[0] & 3) | (c[32] & 3) << 2 | (c[64] & 3) << 4 | (c[96] & 3) << 6);
        }
}

template <class Type>
void put_affine_codes(const float* x, const AffineBlock<Type>& found, uint8_t* codes) {
    constexpr int size = block_size / Type::n_groups;
    for (int j = 0; j < Type::n_groups; ++j) {
        const Vec inv = inverse(splat(found.d * found.k[j])), min = splat(found.dmin * found.l[j]);
        for (int i = size * j; i < size * (j + 1); i += lanes) {
            const Vec q = affine_codes(load(x + i) + min, inv, Type::top);
            for (int n = 0; n < lanes; ++n) codes[i + n] = uint8_t(q.v[n]);
        }
    }
}

/// Codes from 0 on.
template <class Type>
void put_symmetric_codes(const float* x, Vec scale, int size, uint8_t* codes) {
    const Vec inv = inverse(scale);
    for (int i = 0; i < size; i += lanes) {
        const Vec q = symmetric_codes<Type>(load(x + i), inv);
        for (int n = 0; n < lanes; ++n) codes[i + n] = uint8_t(q.v[n] - Type::low);
    }
}

template <class Type>
void put_symmetric_codes(const float* x, const SymmetricBlock<Type>& found, uint8_t* codes) {
    constexpr int size = block_size / Type::n_groups;
    for (int j = 0; j < Type::n_groups; ++j)
        put_symmetric_codes<Type>(x + size * j, splat(found.d * found.k[j]), size, codes + size * j);
}

/// Fills the fields that Q4_K and Q5_K share, and returns the codes.
template <class Type, class Block>
bool quantize_affine(const float* x, const float* w, Block* to, uint8_t codes[block_size]) {
    AffineBlock<Type> found;
    if (!search(x, w, &found)) return false;
    put(&to->d, found.d);
    put(&to->dmin, found.dmin);
    put_six_bits(found, to->scales);
    put_affine_codes(x, found, codes);
    for (int j = 0; j < 8; ++j)
        for (int i = 0; i < 32; ++i) {
            const int low = codes[32 * j + i] & 15;
            uint8_t& byte = to->codes[j / 2 * 32 + i];
            byte = uint8_t(j % 2 ? byte | low << 4 : low);
        }
    return true;
}

// quantize_block(x, w, to): 256 weights x of importance w. False: f16 cannot represent their scales.

bool quantize_block(const float* x, const float* w, BlockQ2_K* to) {
    AffineBlock<AffineQ2> found;
    if (!search(x, w, &found)) return false;
    put(&to->d, found.d);
    put(&to->dmin, found.dmin);
    for (int j = 0; j < 16; ++j) to->scales[j] = uint8_t(int(found.k[j]) | int(found.l[j]) << 4);
    uint8_t codes[block_size];
    put_affine_codes(x, found, codes);
    put_two_bits(codes, to->codes);
    return true;
}

bool quantize_block(const float* x, const float* w, BlockQ3_K* to) {
    SymmetricBlock<SymmetricQ3> found;
    if (!search(x, w, &found)) return false;
    put(&to->d, found.d);
    put_scales_q3(found.k, to->scales);
    uint8_t codes[block_size];
    put_symmetric_codes(x, found, codes);
    put_two_bits(codes, to->codes);
    memset(to->high, 0, sizeof to->high);
    for (int j = 0; j < 8; ++j)
        for (int i = 0; i < 32; ++i) to->high[i] |= uint8_t(codes[32 * j + i] >> 2 << j);
    return true;
}

bool quantize_block(const float* x, const float* w, BlockQ4_K* to) {
    uint8_t codes[block_size];
    return quantize_affine<AffineQ4>(x, w, to, codes);
}

bool quantize_block(const float* x, const float* w, BlockQ5_K* to) {
    uint8_t codes[block_size];
    if (!quantize_affine<AffineQ5>(x, w, to, codes)) return false;
    memset(to->high, 0, sizeof to->high);
    for (int j = 0; j < 8; ++j)
        for (int i = 0; i < 32; ++i) to->high[i] |= uint8_t(codes[32 * j + i] >> 4 << j);
    return true;
}

bool quantize_block(const float* x, const float* w, BlockQ6_K* to) {
    SymmetricBlock<SymmetricQ6> found;
    if (!search(x, w, &found)) return false;
    put(&to->d, found.d);
    for (int j = 0; j < 16; ++j) to->scales[j] = int8_t(found.k[j]);
    uint8_t codes[block_size];
    put_symmetric_codes(x, found, codes);
    for (int half = 0; half < 2; ++half) {
        const uint8_t* c = codes + 128 * half;
        for (int i = 0; i < 64; ++i) to->codes[64 * half + i] = uint8_t((c[i] & 15) | (c[i + 64] & 15) << 4);
        for (int i = 0; i < 32; ++i)
            to->high[32 * half + i] =
                uint8_t(c[i] >> 4 | c[i + 32] >> 4 << 2 | c[i + 64] >> 4 << 4 | c[i + 96] >> 4 << 6);
    }
    return true;
}

/// Eight blocks.
bool quantize_block(const float* x, const float* w, BlockQ4_0* to) {
    using Type = SymmetricQ4;
    const GroupsOfBlock<Type::n_groups> g(x, w);
    for (int part = 0; part < g.count; ++part) {
        Moments unused;
        const Vec scales = symmetric_search<Type>(g.of[part], &unused);
        for (int i = 0; i < lanes; ++i, x += g.size, ++to) {
            const float d = as_half(scales.v[i]);
            if (!std::isfinite(d)) return false;
            put(&to->d, d);
            uint8_t codes[g.size];
            put_symmetric_codes<Type>(x, splat(d), g.size, codes);
            for (int n = 0; n < 16; ++n) to->codes[n] = uint8_t(codes[n] | codes[n + 16] << 4);
        }
    }
    return true;
}

/// Whether the search may run: no NaN, and no sum of squares overflows.
bool moderate(const float* x) {
    return std::all_of(x, x + block_size, [](float v) { return std::fabs(v) <= 0x1p30f; });
}

/// A matrix [rows, cols] in row order, with an importance for each column, or none.
struct Source {
    const float* x;
    int64_t rows, cols;
    const float* importance;

    /// The weights from `first` on, and their importance, padded to a block of 256.
    void copy(int64_t first, float to[block_size], float w[block_size]) const {
        const int64_t n = std::min<int64_t>(block_size, rows * cols - first);
        std::fill(std::copy_n(x + first, n, to), to + block_size, 0.0f);
        std::fill_n(w, block_size, 1.0f);
        for (int64_t i = 0; importance && i < n; ++i) w[i] = importance[(first + i) % cols];
    }
};

template <class Block>
bool quantize_blocks(const Source& from, int64_t size, void* out, ThreadPool& pool) {
    const int64_t n = from.rows * from.cols, n_blocks = (n + block_size - 1) / block_size;
    const int64_t together = block_size / size;  // blocks of this type in 256 weights
    std::atomic<bool> fits{true};
    pool.run((n_blocks + blocks_per_item - 1) / blocks_per_item, [&](int64_t item, int) {
        float x[block_size], w[block_size];
        std::vector<Block> made(together);
        const int64_t end = std::min(n_blocks, (item + 1) * blocks_per_item);
        for (int64_t b = item * blocks_per_item; b < end; ++b) {
            from.copy(b * block_size, x, w);
            if (!moderate(x) || !quantize_block(x, w, made.data())) fits = false;
            const int64_t left = n / size - b * together;
            std::copy_n(made.data(), std::min(together, left), static_cast<Block*>(out) + b * together);
        }
    });
    return fits;
}

bool quantize(DType type, const Source& from, void* out, ThreadPool& pool) {
    const auto as = [&]<class Block>(Block) {
        return quantize_blocks<Block>(from, dtype_info(type).block, out, pool);
    };
    switch (type) {
        case DType::Q4_0:
            return as(BlockQ4_0{});
        case DType::Q2_K:
            return as(BlockQ2_K{});
        case DType::Q3_K:
            return as(BlockQ3_K{});
        case DType::Q4_K:
            return as(BlockQ4_K{});
        case DType::Q5_K:
            return as(BlockQ5_K{});
        case DType::Q6_K:
            return as(BlockQ6_K{});
        default:
            fail(ErrorCode::argument, "slimrt quantises to q4_0, q2_k, q3_k, q4_k, q5_k and q6_k, not to ",
                 dtype_info(type).name);
    }
}

}  // namespace
}  // namespace SLIMRT_ISA

void quantize(DType type, const float* x, int64_t rows, int64_t cols, const float* importance, void* out,
              ThreadPool& pool) {
    using namespace SLIMRT_ISA;
    const int64_t block = dtype_info(type).block, n = rows * cols;
    if (cols % block) fail(ErrorCode::argument, "rows of ", cols, " do not divide into blocks of ", block);
    if (SLIMRT_ISA::quantize(type, {x, rows, cols, importance}, out, pool)) return;
    float largest = 0;
    for (int64_t i = 0; i < n; ++i) {
        if (!std::isfinite(x[i])) fail(ErrorCode::unsupported, "values are not finite");
        largest = std::max(largest, std::fabs(x[i]));
    }
    fail(ErrorCode::unsupported, "values reach ", largest, ", more than the f16 scales of ",
         dtype_info(type).name, " can hold; use bf16 or f32");
}

}  // namespace slimrt::cpu
