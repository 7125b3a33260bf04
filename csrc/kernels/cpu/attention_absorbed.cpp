// Attention over absorbed rows (whole rows that serve all heads), with integer products where they are fast.
// What serves all heads is done once: rows are transposed by four (or two) for a strip of columns at a time,
// which then stays in L1. Compiled once per ISA.
#include "kernels/cpu/attention_absorbed.h"

#include "kernels/cpu/attention_pairs.h"
#include "kernels/cpu/attention_q4.h"
#include "kernels/cpu/attention_tiled.h"
#include "kernels/cpu/attention_tiled_q4.h"
#include "kernels/cpu/stored.h"

namespace slimrt::cpu::SLIMRT_ISA {

namespace {

/// Scales and stores the scores of a vector of rows, from row i on; scales of these rows or nullptr.
void finish_rotated(const RotatedScores& x, int64_t pair, int64_t i, float unit, Vec dots,
                    const float* scales) {
    float* const out = x.out + pair * x.ld + i;
    const int64_t left = x.n - i;
    const auto read = [&](const float* p) { return left < lanes ? load_part(p, left) : load(p); };
    dots = dots * splat(unit);
    if (scales) dots = dots * read(scales);
    if (x.factors) dots = dots * read(x.factors + pair / x.n_q * x.factors_of_head + i);
    if (x.accumulate) dots = dots + read(out);
    left < lanes ? store_part(out, dots, left) : store(out, dots);
}

const RotatedQuery* query_at(const RotatedScores& x, int64_t pair) {
    return reinterpret_cast<const RotatedQuery*>(reinterpret_cast<const float*>(x.q) +
                                                 pair * rotated_query_floats(x.dim));
}

void score_q8(const RotatedScores& x) {
    // Products in Q15 divide by 2^15, cosines and sines are times 32767.
    constexpr float kQ15Correction = 0x1p15f / 32767;
    const int64_t dim = rotated_dim(x.dim);
    for (int64_t pair = 0; pair < x.n_heads * x.n_q; ++pair) {
        const int64_t head = pair / x.n_q;
        const auto* const q = query_at(x, pair);
        int16_t rotated[2 * kMaxRotatedDim];
        rotate_query(q, x.first, dim, rotated);
        const auto bytes = static_cast<int64_t>(x.head_stride);
        const RotatedRows rows = {static_cast<const char*>(x.data) + head * (bytes ? bytes : x.dim),
                                  static_cast<int64_t>(x.stride), static_cast<const int16_t*>(x.rotations),
                                  dim};
        const auto* const scales =
            reinterpret_cast<const float*>(static_cast<const char*>(x.scales) + head * bytes);
        const bool prefetches = pair % x.n_q == 0;
        if (prefetches && x.next) prefetch_next_block(x, head);
        for (int64_t i = 0; i < x.n; i += lanes) {
            if (prefetches && x.head_stride) prefetch_next_rows(rows.data + i * rows.stride, rows.stride);
            const Vec dots = x.n - i < lanes ? dots_of_rows<false>(rotated, rows, i, x.n)
                                             : dots_of_rows<true>(rotated, rows, i, x.n);
            finish_rotated(x, pair, i, q->unit * kQ15Correction, dots, scales + i);
        }
    }
}

/// Stands for codes of 2 to 4 bits, which have no type of their own: they are always dequantised first.
struct FewBitCodes {
    uint8_t codes;
};

/// Addresses of the rows of a head from row i on.
struct HeadAt {
    const char *data, *scales;
    int64_t column;  // within the stored head
};
HeadAt head_at(const RotatedScores& x, int64_t head, int64_t i) {
    const HeadBytes bytes = head_bytes(DType(x.type), x.stored_dim);
    const auto of_head = static_cast<int64_t>(x.head_stride), row = static_cast<int64_t>(bytes.scales);
    return {static_cast<const char*>(x.data) + head * of_head + i * static_cast<int64_t>(x.stride),
            static_cast<const char*>(x.scales) + head * of_head + i * row, of_head ? 0 : head * x.dim};
}

/// Dequantises a vector of rows of a head; zeros from dim to rotated_dim(dim), and past the last row.
void read_rows(const RotatedScores& x, const HeadAt& head, int64_t n, float* to) {
    const int64_t dim = rotated_dim(x.dim);
    memset(to, 0, static_cast<size_t>(lanes * dim) * sizeof(float));
    load_head(x.type, head.data, x.stride, head.scales, n, x.stored_dim, head.column, x.dim, to, dim);
}

/// Scores of rows of other types than Q8, as floats: loaded from where they are stored if they are whole
/// vectors of numbers, else dequantised first.
template <class Code>
void score_floats(const RotatedScores& x, bool scaled) {
    const int64_t dim = rotated_dim(x.dim), stride = static_cast<int64_t>(x.stride);
    const auto* const rotations = static_cast<const float*>(x.rotations);
    alignas(64) float rows[lanes * kMaxRotatedDim], rotated[2 * kMaxRotatedDim];
    for (int64_t head = 0; head < x.n_heads; ++head) {
        if (x.next) prefetch_next_block(x, head);
        for (int64_t i = 0; i < x.n; i += lanes) {
            const HeadAt at = head_at(x, head, i);
            const auto* const from = reinterpret_cast<const Code*>(at.data) + at.column;
            const int64_t n = x.n - i < lanes ? x.n - i : lanes;
            const bool copied = n < lanes || dim != x.dim || __is_same(Code, FewBitCodes);
            if (x.head_stride) prefetch_next_rows(at.data, stride);
            if (copied) read_rows(x, at, n, rows);
            const float* const rotation = rotation_at(rotations, dim, i, 0);
            for (int64_t pair = head * x.n_q; pair < (head + 1) * x.n_q; ++pair) {
                const auto* const q = query_at(x, pair);
                if (x.n_q > 1 || i == 0) rotate_query(q, x.first, dim, rotated);
                if (copied) {
                    const auto row = static_cast<int64_t>(sizeof(float)) * dim;
                    finish_rotated(x, pair, i, q->unit, dots_of_floats(rotated, rows, row, rotation, dim),
                                   nullptr);
                } else if constexpr (!__is_same(Code, FewBitCodes)) {
                    finish_rotated(x, pair, i, q->unit, dots_of_floats(rotated, from, stride, rotation, dim),
                                   scaled ? reinterpret_cast<const float*>(at.scales) : nullptr);
                }
            }
        }
    }
}

}  // namespace

void score_rotated(const RotatedScores& x) {
    if (DType(x.type) == DType::Q8) return score_q8(x);
    with_stored(x.type, [&]<class Stored>(Stored) {
        if constexpr (__is_same(typename Stored::Code, void))
            score_floats<FewBitCodes>(x, false);
        else if constexpr (!__is_same(typename Stored::Code, Int8))
            score_floats<typename Stored::Code>(x, Stored::scaled);
    });
}

int64_t extract_outliers(float* p, int64_t n, bool codes, int32_t pair, float factor, WeightStats* stats,
                         Outlier* to) {
    // Quantisation errs by a fraction of the largest weight. With 15 bits that is negligible unless its
    // square is more than 1 / kShare of the sum of squares. With 8 bits a weight is an outlier too if its
    // square is more than kTop times the mean square: the error is then comparable to that of q8 rows.
    constexpr float kShare = 12, kTop = 12.5f;
    const float squares = stats->squares * factor * factor;
    stats->largest *= factor * factor;
    float ratio = kShare;
    if (int8_weights && codes) {
        int nonzero = 0;
        for (int64_t i = 0; i < n; i += lanes) nonzero += __builtin_popcount(above(load(p + i), splat(0)));
        stats->rows += static_cast<float>(nonzero);
        if (stats->rows / kTop > kShare) ratio = stats->rows / kTop;
    }
    int64_t n_outliers = 0, before = -1;
    for (;;) {  // without one outlier others may stand out
        Vec all = splat(0);
        for (int64_t i = 0; i < n; i += lanes) all = fma(load(p + i), load(p + i), all);
        stats->squares = squares + sum(all);
        if (n_outliers == before || n_outliers == kMaxOutliers) break;
        before = n_outliers;
        for (int64_t i = 0; i < n; i += lanes) {
            const Vec some = load(p + i);
            uint32_t found = above(some * some * splat(ratio), splat(stats->squares));
            for (; found && n_outliers < kMaxOutliers; found &= found - 1) {
                const int64_t j = i + __builtin_ctz(found);
                to[n_outliers++] = {pair, static_cast<int32_t>(j), p[j]};
                p[j] = 0;
            }
        }
    }
    for (int64_t i = 0; i < n_outliers; ++i) {
        const float square = to[i].weight * to[i].weight, largest = stats->largest;
        stats->squares += square < largest ? square : largest;
        stats->largest = square < largest ? largest : square;
    }
    return n_outliers;
}

namespace {

void gather_q8(const AbsorbedValues& x, int64_t head, Strip& strip) {
    const int64_t stride = x.dim;
    // Reading past the last column of a head is safe: its scales follow in memory.
    each_lane(x, head, strip.column % stride, stride, strip, [&](const char* from, RowCodes* to) {
        transpose_rows(RowsOf<Int8>{from, static_cast<size_t>(stride)}, to);
    });
    find_start(strip);
}

template <class Codes>
void absorb_q8(const AbsorbedValues& x) {
    Weights weights(x);
    const bool tiles = by_tiles(x);
    if (tiles) x.tiles->begin();
    for (int64_t head = 0, at = 0; head < x.heads; ++head) {
        alignas(64) float scales[kAbsorbedRows] = {};
        each_block(x, [&](int64_t row, int64_t end) {
            const char* const all = head_of(x, row / kBlockTokens, head) + kBlockTokens * x.dim;
            const float* const from = reinterpret_cast<const float*>(all) + row % kBlockTokens;
            if (end - row == kBlockTokens)  // constant size: inlined
                memcpy(scales + row, from, kBlockTokens * sizeof(float));
            else
                memcpy(scales + row, from, static_cast<size_t>(end - row) * sizeof(float));
        });
        weights.quantise(scales);
        if constexpr (fits_tiles) {
            if (tiles) {
                add_tiled<Codes>(x, weights, head);
                continue;
            }
        }
        for (int64_t column = 0; column < x.dim; column += kStripColumns) {
            Strip strip;
            place_strip(x, at++, kStripColumns, strip);
            gather_q8(x, head, strip);
            add_strip<absorbed_vectors, false>(x, strip, weights);
        }
    }
    if (tiles) x.tiles->end();
}

/// Adds columns [column, column + n), a strip, by products of int16.
template <class Pairs>
void add_rounded(const AbsorbedValues& x, int64_t column, int64_t n, const PairWeights& weights,
                 float* strip) {
    PairStrip<Pairs> codes;
    bool filled = false;
    with_stored(x.type, [&]<class Stored>(Stored) {
        using Code = typename Stored::Code;
        if constexpr (Stored::is_float && !__is_same(Code, float))
            if ((filled = StoredStrip<Code>::fits(x, column, n))) codes.fill(x, StoredStrip<Code>(x, column));
    });
    if (!filled) {
        read_strip(x, column, n, strip);
        codes.fill(x, ReadStrip{strip});
    }
    add_pair_strip(x, column, weights, codes);
}

template <class Pairs>
void absorb_others(const AbsorbedValues& x) {
    const int64_t width = x.heads * x.dim;
    const bool exact = x.exact || !Pairs::fast || DType(x.type) == DType::F32;
    PairWeights weights(x);
    if (!exact) weights.quantise(x);
    alignas(64) float strip[kAbsorbedRows * kPairColumns];
    if (!exact) memset(strip, 0, static_cast<size_t>(x.rows * kPairColumns) * sizeof(float));
    for (int64_t column = 0; column < width; column += kPairColumns) {
        const int64_t n = width - column < kPairColumns ? width - column : kPairColumns;
        if constexpr (Pairs::fast)
            if (!exact) {
                add_rounded<Pairs>(x, column, n, weights, strip);
                continue;
            }
        read_strip(x, column, n, strip);
        add_exactly(x, column, n, strip);
    }
}

constexpr int64_t kOutlierColumns = 256;

/// Adds one row times an outlier weight, in float32.
void add_outlier(const AbsorbedValues& x, const Outlier& outlier) {
    const int64_t block = outlier.row / kBlockTokens, at = outlier.row % kBlockTokens;
    const HeadBytes bytes = head_bytes(DType(x.type), x.dim);
    const auto stride = static_cast<int64_t>(bytes.elements), scales = static_cast<int64_t>(bytes.scales);
    float* out = x.out + outlier.pair * x.out_stride;
    for (int64_t group = 0; group < x.heads; ++group, out += x.dim) {
        const char* const head = head_of(x, block, group);
        const char *const from = head + at * stride, *const scale =
                                                         head + kBlockTokens * stride + at * scales;
        for (int64_t c = 0, n; c < x.dim; c += n) {
            float row[kOutlierColumns];
            n = x.dim - c < kOutlierColumns ? x.dim - c : kOutlierColumns;
            load_head(x.type, from, bytes.elements, scale, 1, x.dim, c, n, row, kOutlierColumns);
            const float one = 1;
            values(&outlier.weight, 1, 1, &one, static_cast<uint32_t>(DType::F32), row, sizeof row, 1, n,
                   out + c, 0);
        }
    }
}

}  // namespace

void absorb_values(const AbsorbedValues& x) {
    if (DType(x.type) == DType::Q8 && !x.exact) return absorb_q8<RowCodes>(x);
    if constexpr (int8_weights) {
        if (DType(x.type) == DType::Q4 && !x.exact && x.dim % kQ4Columns == 0) {
            if constexpr (fits_tiles)
                if (by_tiles(x)) return absorb_q4_by_tiles(x);
            return absorb_q4<FourBitRows>(x);
        }
    }
    absorb_others<RowPairs>(x);
    for (int64_t i = 0; i < x.n_outliers; ++i) add_outlier(x, x.outliers[i]);
}

}  // namespace slimrt::cpu::SLIMRT_ISA
