#include "kernels/cpu/repack.h"

#include "kernels/cpu/blocks.h"

namespace slimrt::cpu {
namespace SLIMRT_ISA {
namespace {

void repack_block(const BlockTQ1_0& from, BlockTQ2_0* to) {
    uint8_t digit[256];
    digits_tq1(from, digit);
    for (int i = 0; i < 64; ++i) {
        const uint8_t* const first = digit + i / 32 * 128 + i % 32;
        to->codes[i] = static_cast<uint8_t>(first[0] | first[32] << 2 | first[64] << 4 | first[96] << 6);
    }
    to->d = from.d;
}

template <class From, class To>
void repack_blocks(const void* from, int64_t n_blocks, void* to) {
    for (int64_t b = 0; b < n_blocks; ++b)
        repack_block(static_cast<const From*>(from)[b], static_cast<To*>(to) + b);
}

}  // namespace
}  // namespace SLIMRT_ISA

void repack(DType type, const void* from, int64_t n, void* to) {
    using namespace SLIMRT_ISA;
    if (type == DType::TQ1_0) repack_blocks<BlockTQ1_0, BlockTQ2_0>(from, n / 256, to);
}

}  // namespace slimrt::cpu
