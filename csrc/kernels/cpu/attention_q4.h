// Weighted sums of absorbed rows in q4 by integer products: a value is its group's midpoint (minimum + 8
// scales) plus the scale times a code in -8 ... 7. Codes are multiplied as those of q8; the midpoints need
// one sum of floats for each group. For the units compiled once per ISA.
#pragma once

#include "kernels/cpu/attention_strips.h"
#include "kernels/cpu/blocks.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

/// Scales and midpoints of `lanes` consecutive groups of columns for all rows: 0 where there is no row.
struct Q4Scales {
    alignas(64) float scales[lanes][kAbsorbedRows], middles[lanes][kAbsorbedRows];

    /// Reads groups [group, group + n) of a stored head.
    void read(const AbsorbedValues& x, int64_t head, int64_t group, int64_t n) {
        memset(this, 0, sizeof *this);
        const int64_t codes = kBlockTokens * (x.dim / 2), row_bytes = x.dim / kQ4Columns * kPair;
        each_block(x, [&](int64_t row, int64_t end) {
            const char* from = head_of(x, row / kBlockTokens, head) + codes + group * kPair;
            for (int64_t next; row < end; row = next) {
                next = row / lanes * lanes + lanes < end ? row / lanes * lanes + lanes : end;
                read_rows(from + row % kBlockTokens * row_bytes, row_bytes, n, row, next - row);
            }
        });
    }

  private:
    static constexpr int64_t kPair = 2 * sizeof(Half);  // a scale and a minimum

    /// Reads up to `lanes` rows and transposes them.
    void read_rows(const char* from, int64_t row_bytes, int64_t n, int64_t row, int64_t n_rows) {
        Vec scale[lanes] = {}, middle[lanes] = {};
        for (int64_t i = 0; i < n_rows; ++i, from += row_bytes) {
            Half copy[2 * lanes] = {};
            const Half* both = reinterpret_cast<const Half*>(from);
            if (n < lanes) both = static_cast<Half*>(memcpy(copy, from, static_cast<size_t>(n * kPair)));
            Vec min;
            const int64_t at = (row + i) % lanes;
            deinterleave(load(both), load(both + lanes), scale + at, &min);
            middle[at] = fma(scale[at], splat(8), min);
        }
        transpose(scale);
        transpose(middle);
        const int64_t to = row / lanes * lanes;
        for (int64_t g = 0; g < lanes; ++g) {
            store(scales[g] + to, scale[g]);
            store(middles[g] + to, middle[g]);
        }
    }
};

/// Gathers a strip of columns of one group.
template <class Rows>
void gather_q4(const AbsorbedValues& x, int64_t head, Strip& strip) {
    const int64_t stride = x.dim / 2, column = strip.column % x.dim;
    constexpr int64_t kHalf = kQ4Columns / 2;  // the two halves of a group share bytes
    const int64_t first = column / kQ4Columns * kHalf;
    const int shift = column % kQ4Columns ? 4 : 0;
    each_lane(x, head, first, stride, strip, [&](const char* from, RowCodes* to) {
        transpose_rows(Rows{reinterpret_cast<const uint8_t*>(from), stride, shift}, to);
    });
    find_start(strip);
}

/// Returns false, without effect, for other rows or where weights are not 8-bit.
template <class Rows>
bool absorb_q4(const AbsorbedValues& x) {
    if (DType(x.type) != DType::Q4 || x.exact || x.dim % kQ4Columns != 0) return false;
    if constexpr (!int8_weights) {
        return false;
    } else {
        constexpr int64_t columns = kStripColumns < kQ4Columns ? kStripColumns : kQ4Columns;
        Weights weights(x);
        Q4Scales some;
        for (int64_t head = 0, at = 0; head < x.heads; ++head)
            for (int64_t group = 0, groups = x.dim / kQ4Columns; group < groups; group += lanes) {
                const int64_t n = groups - group < lanes ? groups - group : lanes;
                some.read(x, head, group, n);
                weights.find_offsets(some.middles[0]);
                for (int64_t i = 0; i < n; ++i) {
                    weights.take_offsets(i);
                    weights.quantise(some.scales[i]);
                    for (int64_t c = 0; c < kQ4Columns; c += columns) {
                        Strip strip;
                        place_strip(x, at++, columns, strip);
                        gather_q4<Rows>(x, head, strip);
                        add_strip<columns / lanes, true>(x, strip, weights);
                    }
                }
            }
        return true;
    }
}

}  // namespace
}  // namespace slimrt::cpu::SLIMRT_ISA
