// Weighted sums of absorbed rows in q4 by integer products: a value is its group's midpoint (minimum + 8
// scales) plus the scale times a code in -8 ... 7. Codes are multiplied as those of q8; the midpoints need
// one sum of floats for each group. For the units compiled once per ISA.
#pragma once

#include "kernels/cpu/attention_strips.h"
#include "kernels/cpu/blocks.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

/// Where a group of columns is: whole rows are heads of groups.
struct Q4Place {
    int64_t head, group;  // of a stored head

    Q4Place(const AbsorbedValues& x, int64_t of_row)
        : head(of_row / (x.dim / kQ4Columns)), group(of_row % (x.dim / kQ4Columns)) {}
};
inline int64_t q4_groups(const AbsorbedValues& x) { return x.heads * (x.dim / kQ4Columns); }

/// Scales and midpoints of `lanes` consecutive groups of columns for all rows: 0 where there is no row.
struct Q4Scales {
    alignas(64) float scales[lanes][kAbsorbedRows], middles[lanes][kAbsorbedRows];

    /// Reads groups [group, group + n) of whole rows.
    void read(const AbsorbedValues& x, int64_t group, int64_t n) {
        memset(this, 0, sizeof *this);
        const int64_t codes = kBlockTokens * (x.dim / 2), row_bytes = x.dim / kQ4Columns * kPair;
        each_block(x, [&](int64_t row, int64_t end) {
            const char* from[lanes];
            for (int64_t g = 0; g < n; ++g) {
                const Q4Place at(x, group + g);
                from[g] = head_of(x, row / kBlockTokens, at.head) + codes + at.group * kPair;
            }
            for (int64_t next; row < end; row = next) {
                next = row / lanes * lanes + lanes < end ? row / lanes * lanes + lanes : end;
                read_rows(from, row % kBlockTokens * row_bytes, row_bytes, n, row, next - row);
            }
        });
    }

  private:
    static constexpr int64_t kPair = 2 * sizeof(Half);  // a scale and a minimum

    /// Reads up to `lanes` rows and transposes them. offset: of the first.
    void read_rows(const char* const* from, int64_t offset, int64_t row_bytes, int64_t n, int64_t row,
                   int64_t n_rows) {
        Half pairs[lanes][2 * lanes];
        for (int64_t i = 0; i < n_rows; ++i, offset += row_bytes)
            for (int64_t g = 0; g < n; ++g) memcpy(pairs[i] + 2 * g, from[g] + offset, kPair);
        Vec scale[lanes] = {}, middle[lanes] = {};
        for (int64_t i = 0; i < n_rows; ++i) {
            Vec min;
            const int64_t at = (row + i) % lanes;
            deinterleave(load(pairs[i]), load(pairs[i] + lanes), scale + at, &min);
            middle[at] = fma(scale[at], splat(8), min);
        }
        transpose(scale);
        transpose(middle);
        const int64_t to = row / lanes * lanes;
        for (int64_t g = 0; g < n; ++g) {
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

template <class Rows>
void absorb_q4(const AbsorbedValues& x) {
    constexpr int64_t columns = kStripColumns < kQ4Columns ? kStripColumns : kQ4Columns;
    Weights weights(x);
    Q4Scales some;
    for (int64_t group = 0, at = 0, groups = q4_groups(x); group < groups; group += lanes) {
        const int64_t n = groups - group < lanes ? groups - group : lanes;
        some.read(x, group, n);
        weights.find_offsets(some.middles[0]);
        for (int64_t i = 0; i < n; ++i) {
            weights.take_offsets(i);
            weights.quantise(some.scales[i]);
            for (int64_t c = 0; c < kQ4Columns; c += columns) {
                Strip strip;
                place_strip(x, at++, columns, strip);
                gather_q4<Rows>(x, Q4Place(x, group + i).head, strip);
                add_strip<columns / lanes, true>(x, strip, weights);
            }
        }
    }
}

}  // namespace
}  // namespace slimrt::cpu::SLIMRT_ISA
