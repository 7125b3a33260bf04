#include "kernels/cpu/repack.h"

#include "core/error.h"
#include "kernels/cpu/blocks_grid.h"

namespace slimrt::cpu {
namespace SLIMRT_ISA {
namespace {

BlockQ8_0 repacked(const BlockQ5_0& from) {
    BlockQ8_0 to;
    const uint32_t high = u32_at(from.high);
    for (int i = 0; i < 32; ++i)
        to.codes[i] =
            static_cast<int8_t>((nibble(from.codes, i) | static_cast<int>(high >> i & 1) << 4) - 16);
    to.d = from.d;
    return to;
}

BlockQ6_K repacked(const BlockQ3_K& from) {
    constexpr int zero = 32 - 4;  // the difference of the offsets of Q6_K and Q3_K codes
    BlockQ6_K to = {};
    uint8_t scales[16];
    scales_q3(from.scales, scales);
    for (int i = 0; i < 16; ++i) to.scales[i] = static_cast<int8_t>(scales[i] - 32);
    for (int j = 0; j < 8; ++j) {  // of 32 elements
        const int nibble_at = j / 4 * 64 + j % 2 * 32;
        for (int i = 0; i < 32; ++i) {
            const int low = from.codes[j / 4 * 32 + i] >> j % 4 * 2 & 3, third = from.high[i] >> j & 1;
            const int code = low + 4 * third + zero;
            to.codes[nibble_at + i] |= static_cast<uint8_t>((code & 15) << j % 4 / 2 * 4);
            to.high[j / 4 * 32 + i] |= static_cast<uint8_t>(code >> 4 << j % 4 * 2);
        }
    }
    to.d = from.d;
    return to;
}

BlockTQ2_0 repacked(const BlockTQ1_0& from) {
    BlockTQ2_0 to;
    uint8_t digit[256];
    digits_tq1(from, digit);
    for (int i = 0; i < 64; ++i) {
        const uint8_t* const first = digit + i / 32 * 128 + i % 32;
        to.codes[i] = static_cast<uint8_t>(first[0] | first[32] << 2 | first[64] << 4 | first[96] << 6);
    }
    to.d = from.d;
    return to;
}

template <class From, int64_t block = 256>
void repack_blocks(const void* from, int64_t n, void* to) {
    using To = decltype(repacked(From()));
    for (int64_t b = 0; b < n / block; ++b)
        static_cast<To*>(to)[b] = repacked(static_cast<const From*>(from)[b]);
}

}  // namespace
}  // namespace SLIMRT_ISA

void repack(DType type, const void* from, int64_t n, void* to) {
    using namespace SLIMRT_ISA;
    switch (type) {
        case DType::Q5_0:
            return repack_blocks<BlockQ5_0, 32>(from, n, to);
        case DType::Q3_K:
            return repack_blocks<BlockQ3_K>(from, n, to);
        case DType::TQ1_0:
            return repack_blocks<BlockTQ1_0>(from, n, to);
        case DType::IQ2_XXS:
            return repack_blocks<BlockIQ2_XXS>(from, n, to);
        case DType::IQ2_XS:
            return repack_blocks<BlockIQ2_XS>(from, n, to);
        case DType::IQ2_S:
            return repack_blocks<BlockIQ2_S>(from, n, to);
        case DType::IQ3_XXS:
            return repack_blocks<BlockIQ3_XXS>(from, n, to);
        case DType::IQ3_S:
            return repack_blocks<BlockIQ3_S>(from, n, to);
        default:
            fail(ErrorCode::argument, dtype_info(type).name, " weights are held as they are");
    }
}

}  // namespace slimrt::cpu
