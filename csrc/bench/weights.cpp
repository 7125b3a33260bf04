#include "bench/weights.h"

#include <cstring>
#include <random>

namespace slimrt::bench {
namespace {

/// Where a block keeps its f16 numbers; the rest may be any bits.
std::vector<int> halves_of(DType type) {
    switch (type) {
        case DType::Q4_K:
        case DType::Q5_K:
            return {0, 2};
        case DType::Q6_K:
            return {208};
        case DType::TQ2_0:
            return {64};
        case DType::BF16:
        case DType::F32:
        case DType::MXFP4:
            return {};
        default:
            return {0};
    }
}

}  // namespace

std::vector<uint8_t> random_blocks(DType type, size_t bytes) {
    constexpr uint16_t kHalf = 0x211e;  // 0.01
    constexpr float kFloat = 0.01f;
    const size_t size = size_t(dtype_info(type).block_bytes);
    const std::vector<int> halves = halves_of(type);
    std::vector<uint8_t> blocks(bytes);
    std::minstd_rand random(1);
    for (size_t at = 0; at + size <= bytes; at += size) {
        uint8_t* const block = blocks.data() + at;
        for (size_t i = 0; i < size; ++i) block[i] = uint8_t(random() >> 8);
        for (const int half : halves) std::memcpy(block + half, &kHalf, sizeof kHalf);
        if (type == DType::F32) std::memcpy(block, &kFloat, sizeof kFloat);
        if (type == DType::BF16) block[1] = 0x3c;
        if (type == DType::MXFP4) block[0] = 120;
    }
    return blocks;
}

}  // namespace slimrt::bench
