// Quantises f32 weights to Q4_K, Q5_K and Q6_K with the scales that quantize_search.h finds. Compiled once,
// for the baseline ISA without fused multiply-add: a model converts to the same bytes on every machine.
#include "kernels/cpu/quantize.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "core/error.h"
#include "kernels/cpu/quantize_search.h"

namespace slimrt::cpu {
namespace SLIMRT_ISA {
namespace {

constexpr int block_size = 256;
constexpr int64_t blocks_per_item = 64;

void put(Scale* at, float x) {
    const uint16_t bits = float_to_half(x);
    memcpy(at->bytes, &bits, sizeof bits);
}

/// Packs 8 scales k and 8 minima l of six bits: those of groups 0 to 3 in whole bytes, whose upper two bits
/// and 4 more bytes hold the others.
void put_six_bits(const AffineBlock& from, uint8_t to[12]) {
    for (int j = 0; j < 4; ++j) {
        const int k = int(from.k[j]), l = int(from.l[j]), k4 = int(from.k[j + 4]), l4 = int(from.l[j + 4]);
        to[j] = uint8_t(k | k4 >> 4 << 6);
        to[j + 4] = uint8_t(l | l4 >> 4 << 6);
        to[j + 8] = uint8_t((k4 & 15) | (l4 & 15) << 4);
    }
}

/// Fills the fields that Q4_K and Q5_K share, and returns the codes, group by group.
template <class Block>
bool quantize_affine(const float* x, int top, Block* to, uint8_t codes[block_size]) {
    AffineBlock found;
    if (!search(x, float(top), &found)) return false;
    put(&to->d, found.d);
    put(&to->dmin, found.dmin);
    put_six_bits(found, to->scales);
    for (int j = 0; j < 8; ++j) {
        const Vec inv = inverse(splat(found.d * found.k[j])), min = splat(found.dmin * found.l[j]);
        for (int i = 0; i < 32; i += lanes) {
            const Vec q = affine_codes(load(x + 32 * j + i) + min, inv, float(top));
            for (int n = 0; n < lanes; ++n) codes[32 * j + i + n] = uint8_t(q.v[n]);
        }
    }
    for (int j = 0; j < 8; ++j)
        for (int i = 0; i < 32; ++i) {
            const int low = codes[32 * j + i] & 15;
            uint8_t& byte = to->codes[j / 2 * 32 + i];
            byte = uint8_t(j % 2 ? byte | low << 4 : low);
        }
    return true;
}

bool quantize_block(const float* x, BlockQ4_K* to) {
    uint8_t codes[block_size];
    return quantize_affine(x, 15, to, codes);
}

bool quantize_block(const float* x, BlockQ5_K* to) {
    uint8_t codes[block_size];
    if (!quantize_affine(x, 31, to, codes)) return false;
    memset(to->high, 0, sizeof to->high);
    for (int j = 0; j < 8; ++j)
        for (int i = 0; i < 32; ++i) to->high[i] |= uint8_t(codes[32 * j + i] >> 4 << j);
    return true;
}

bool quantize_block(const float* x, BlockQ6_K* to) {
    SymmetricBlock found;
    if (!search(x, &found)) return false;
    put(&to->d, found.d);
    uint8_t codes[block_size];
    for (int j = 0; j < 16; ++j) {
        const Vec inv = inverse(splat(found.d * found.k[j]));
        to->scales[j] = int8_t(found.k[j]);
        for (int i = 0; i < 16; i += lanes) {
            const Vec q = symmetric_codes(load(x + 16 * j + i), inv);
            for (int n = 0; n < lanes; ++n) codes[16 * j + i + n] = uint8_t(q.v[n] + 32);
        }
    }
    for (int half = 0; half < 2; ++half) {
        const uint8_t* c = codes + 128 * half;
        for (int i = 0; i < 64; ++i) to->codes[64 * half + i] = uint8_t((c[i] & 15) | (c[i + 64] & 15) << 4);
        for (int i = 0; i < 32; ++i)
            to->high[32 * half + i] =
                uint8_t(c[i] >> 4 | c[i + 32] >> 4 << 2 | c[i + 64] >> 4 << 4 | c[i + 96] >> 4 << 6);
    }
    return true;
}

/// Whether the search may run: no NaN, and no sum of squares overflows.
bool moderate(const float* x) {
    return std::all_of(x, x + block_size, [](float v) { return std::fabs(v) <= 0x1p30f; });
}

template <class Block>
bool quantize_blocks(const float* x, int64_t n_blocks, void* out, ThreadPool& pool) {
    Block* const blocks = static_cast<Block*>(out);
    std::atomic<bool> fits{true};
    pool.run((n_blocks + blocks_per_item - 1) / blocks_per_item, [&](int64_t item, int) {
        const int64_t end = std::min(n_blocks, (item + 1) * blocks_per_item);
        for (int64_t b = item * blocks_per_item; b < end; ++b) {
            const float* from = x + b * block_size;
            if (!moderate(from) || !quantize_block(from, blocks + b)) fits = false;
        }
    });
    return fits;
}

bool quantize(DType type, const float* x, int64_t n_blocks, void* out, ThreadPool& pool) {
    switch (type) {
        case DType::Q4_K:
            return quantize_blocks<BlockQ4_K>(x, n_blocks, out, pool);
        case DType::Q5_K:
            return quantize_blocks<BlockQ5_K>(x, n_blocks, out, pool);
        case DType::Q6_K:
            return quantize_blocks<BlockQ6_K>(x, n_blocks, out, pool);
        default:
            fail(ErrorCode::argument, "slimrt quantises to q4_k, q5_k and q6_k, not to ",
                 dtype_info(type).name);
    }
}

}  // namespace
}  // namespace SLIMRT_ISA

void quantize(DType type, const float* x, int64_t n, void* out, ThreadPool& pool) {
    using namespace SLIMRT_ISA;
    if (n % block_size) fail(ErrorCode::argument, n, " elements are no multiple of ", block_size);
    if (SLIMRT_ISA::quantize(type, x, n / block_size, out, pool)) return;
    float largest = 0;
    for (int64_t i = 0; i < n; ++i) {
        if (!std::isfinite(x[i])) fail(ErrorCode::unsupported, "values are not finite");
        largest = std::max(largest, std::fabs(x[i]));
    }
    fail(ErrorCode::unsupported, "values reach ", largest, ", more than the f16 scales of ",
         dtype_info(type).name, " can hold; use bf16 or f32");
}

}  // namespace slimrt::cpu
