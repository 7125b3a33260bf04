#include "kernels/cpu/repack.h"

#include "core/error.h"
#include "kernels/cpu/blocks_grid.h"

namespace slimrt::cpu {
namespace SLIMRT_ISA {
namespace {

BlockTQ2_0 laid_out(const BlockTQ1_0& from) {
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

template <class From>
void repack_blocks(const void* from, int64_t n, void* to) {
    using To = decltype(laid_out(From()));
    for (int64_t b = 0; b < n / 256; ++b)
        static_cast<To*>(to)[b] = laid_out(static_cast<const From*>(from)[b]);
}

}  // namespace
}  // namespace SLIMRT_ISA

void repack(DType type, const void* from, int64_t n, void* to) {
    using namespace SLIMRT_ISA;
    switch (type) {
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
