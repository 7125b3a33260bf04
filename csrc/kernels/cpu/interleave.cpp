#include "kernels/cpu/interleave.h"

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstring>

#include "core/error.h"

namespace slimrt::cpu {
namespace {

constexpr size_t kMaxBytes = 256;  // of a block

/// Reorders the bits of a block so that linear_unpack.h can unpack rows side by side, or undoes that.
using Rearrange = void (*)(uint8_t* block);

/// Moves bit i of 32 to bit i / 4 of byte i % 4: the fifth bits of a quad of codes are then at the same
/// position of its four bytes.
template <size_t at>
void spread_fifth_bits(uint8_t* block) {
    uint32_t bits, spread = 0;
    std::memcpy(&bits, block + at, sizeof bits);
    for (int i = 0; i < 32; ++i) spread |= (bits >> i & 1) << (i % 4 * 8 + i / 4);
    std::memcpy(block + at, &spread, sizeof spread);
}
template <size_t at>
void gather_fifth_bits(uint8_t* block) {
    uint32_t spread, bits = 0;
    std::memcpy(&spread, block + at, sizeof spread);
    for (int i = 0; i < 32; ++i) bits |= (spread >> (i % 4 * 8 + i / 4) & 1) << i;
    std::memcpy(block + at, &bits, sizeof bits);
}

// Q3_K: GGUF stores the third bits apart (blocks.h). Here each byte has two whole codes of 3 bits for six of
// eight sets of 32 elements; the codes of the last two sets are in the upper bits (linear_unpack.h).

void join_high_bits(uint8_t* block) {
    uint8_t *const high = block, *const low = block + 32, joined[96];
    for (int i = 0; i < 32; ++i) {
        const auto code = [&](int j) {
            return (low[j / 4 * 32 + i] >> j % 4 * 2 & 3) | (high[i] >> j & 1) << 2;
        };
        for (int plane = 0; plane < 2; ++plane)
            joined[32 * plane + i] =
                static_cast<uint8_t>(code(2 * plane) | code(2 * plane + 1) << 3 | (code(6 + plane) & 3) << 6);
        joined[64 + i] =
            static_cast<uint8_t>(code(4) | code(5) << 3 | (code(6) >> 2) << 6 | (code(7) >> 2) << 7);
    }
    std::memcpy(block, joined, sizeof joined);
}
void split_high_bits(uint8_t* block) {
    uint8_t parted[96] = {};
    for (int i = 0; i < 32; ++i) {
        const int a = block[i], b = block[32 + i], c = block[64 + i];
        const int codes[] = {a & 7,
                             a >> 3 & 7,
                             b & 7,
                             b >> 3 & 7,
                             c & 7,
                             c >> 3 & 7,
                             a >> 6 | (c >> 6 & 1) << 2,
                             b >> 6 | (c >> 7) << 2};
        for (int j = 0; j < 8; ++j) {
            parted[i] |= static_cast<uint8_t>((codes[j] >> 2) << j);
            parted[32 + j / 4 * 32 + i] |= static_cast<uint8_t>((codes[j] & 3) << j % 4 * 2);
        }
    }
    std::memcpy(block, parted, sizeof parted);
}

struct Layout {
    DType rows, interleaved;
    bool tail_first;  // the bytes that fill no word are first in a block, else last
    Rearrange to = nullptr, from = nullptr;

    size_t bytes() const { return static_cast<size_t>(dtype_info(rows).block_bytes); }
    size_t words() const { return bytes() / 4; }
    size_t tail_bytes() const { return bytes() % 4; }
    /// Offsets of word w and of the tail.
    size_t word(size_t w) const { return 4 * w + (tail_first ? tail_bytes() : 0); }
    size_t tail() const { return tail_first ? 0 : 4 * words(); }
};

constexpr Layout kLayouts[] = {
    {DType::Q4_0, DType::Q4_0_R16, true},
    {DType::Q4_1, DType::Q4_1_R16, false},
    {DType::Q5_0, DType::Q5_0_R16, true, spread_fifth_bits<2>, gather_fifth_bits<2>},
    {DType::Q5_1, DType::Q5_1_R16, false, spread_fifth_bits<4>, gather_fifth_bits<4>},
    {DType::Q2_K, DType::Q2_K_R16, false},
    {DType::Q3_K, DType::Q3_K_R16, false, join_high_bits, split_high_bits},
    {DType::Q4_K, DType::Q4_K_R16, false},
    {DType::Q5_K, DType::Q5_K_R16, false},
    {DType::IQ4_NL, DType::IQ4_NL_R16, true},
    {DType::IQ4_XS, DType::IQ4_XS_R16, false},
    {DType::MXFP4, DType::MXFP4_R16, true},
};

const Layout* find_layout(DType type, DType Layout::* which) {
    const auto* const found =
        std::ranges::find_if(kLayouts, [&](const Layout& layout) { return layout.*which == type; });
    return found == std::end(kLayouts) ? nullptr : found;
}

}  // namespace

DType interleaved_type(DType type) {
    const Layout* const layout = find_layout(type, &Layout::rows);
    return layout ? layout->interleaved : type;
}

DType rows_type(DType type) {
    const Layout* const layout = find_layout(type, &Layout::interleaved);
    return layout ? layout->rows : type;
}

void interleave(DType type, const void* rows, size_t stride, int64_t n, void* to) {
    const Layout* const layout = find_layout(type, &Layout::rows);
    if (!layout) fail(ErrorCode::argument, dtype_info(type).name, " weights are not interleaved");
    const size_t bytes = layout->bytes();
    auto* out = static_cast<uint8_t*>(to);
    for (int64_t b = 0; b < n / dtype_info(type).block; ++b, out += kInterleavedRows * bytes) {
        for (int64_t row = 0; row < kInterleavedRows; ++row) {
            uint8_t block[kMaxBytes];
            std::memcpy(block, static_cast<const uint8_t*>(rows) + row * stride + b * bytes, bytes);
            if (layout->to) layout->to(block);
            for (size_t w = 0; w < layout->words(); ++w)
                std::memcpy(out + (w * kInterleavedRows + row) * 4, block + layout->word(w), 4);
            const size_t tail = layout->tail_bytes();
            std::memcpy(out + layout->words() * 4 * kInterleavedRows + row * tail, block + layout->tail(),
                        tail);
        }
    }
}

void take_row(DType type, const void* rows, int64_t row, int64_t n, void* to) {
    const Layout* const layout = find_layout(type, &Layout::interleaved);
    assert(layout && row < kInterleavedRows);
    const size_t bytes = layout->bytes();
    const auto* from = static_cast<const uint8_t*>(rows);
    auto* block = static_cast<uint8_t*>(to);
    for (int64_t b = 0; b < n / dtype_info(type).block;
         ++b, block += bytes, from += kInterleavedRows * bytes) {
        for (size_t w = 0; w < layout->words(); ++w)
            std::memcpy(block + layout->word(w), from + (w * kInterleavedRows + row) * 4, 4);
        const size_t tail = layout->tail_bytes();
        std::memcpy(block + layout->tail(), from + layout->words() * 4 * kInterleavedRows + row * tail, tail);
        if (layout->from) layout->from(block);
    }
}

}  // namespace slimrt::cpu
