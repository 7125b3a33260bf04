// Attention over absorbed rows of Q8, with integer products where there are fast ones. What serves all heads
// is done once: four rows (or two) side by side, for some columns of all rows at a time, which then stay in
// the first-level cache. Compiled once per ISA.
#include "kernels/cpu/attention_absorbed.h"

#include "kernels/cpu/attention_fours.h"
#include "kernels/cpu/attention_pairs.h"
#include "kernels/cpu/stored.h"

namespace slimrt::cpu::SLIMRT_ISA {

namespace {

/// Scores of n rows from row i on, a vector's at most, which have the scales.
void finish_turned(const TurnedScores& x, int64_t pair, int64_t i, int64_t n, float unit, Vec dots,
                   const float* scales) {
    float* const out = x.out + pair * x.ld + i;
    const auto read = [&](const float* p) { return n < lanes ? load_part(p, n) : load(p); };
    dots = dots * splat(unit);
    if (scales) dots = dots * read(scales);
    if (x.factors) dots = dots * read(x.factors + pair / x.n_q * x.factors_of_head + i);
    if (x.accumulate) dots = dots + read(out);
    n < lanes ? store_part(out, dots, n) : store(out, dots);
}

/// The tiles of a block's first n rows.
template <class Fn>
void each_tile(int64_t n, const Fn& fn) {
    for (int64_t tile = 0; tile < kBlockTokens / lanes; ++tile)
        if (const Twos twos(tile); twos.first() < n) fn(twos);
}

const TurnedQuery* query_at(const TurnedScores& x, int64_t pair) {
    return reinterpret_cast<const TurnedQuery*>(reinterpret_cast<const float*>(x.q) +
                                                pair * turned_query_floats(x.dim));
}

void score_codes(const TurnedScores& x) {
    constexpr float kTurned = 0x1p15f / 32767;  // what products with turns lose
    const int64_t dim = turned_dim(x.dim), stride = static_cast<int64_t>(x.stride);
    for (int64_t pair = 0; pair < x.n_heads * x.n_q; ++pair) {
        const int64_t head = pair / x.n_q;
        const auto* const q = query_at(x, pair);
        int16_t turned[2 * kMaxTurnedDim];
        turn_query(q, x.middle, dim, turned);
        const auto bytes = static_cast<int64_t>(x.head_stride);
        const char* const rows = static_cast<const char*>(x.data) + head * (bytes ? bytes : x.dim);
        const auto* const scales =
            reinterpret_cast<const float*>(static_cast<const char*>(x.scales) + head * bytes);
        const bool calls = pair % x.n_q == 0;
        if (calls && x.ahead) call_share(x, head);
        alignas(64) float dots[kBlockTokens];
        each_tile(x.n, [&](const Twos& twos) {
            if (calls && x.head_stride) call_ahead(rows + 2 * twos.turn() * stride, stride);
            const char *before = rows + twos.before * stride, *behind = rows + twos.behind * stride;
            int64_t apart = stride;
            char copy[lanes * kMaxTurnedDim];
            if (twos.end() > x.n) {  // else rows past the last would be read
                twos.each_half(x.n, [&](int64_t first, int64_t n, int64_t at) {
                    for (int64_t i = 0; i < n; ++i)
                        memcpy(copy + (at + i) * dim, rows + (first + i) * stride,
                               static_cast<size_t>(x.dim));
                });
                behind = copy + Twos::half * dim;
                before = behind - dim;
                apart = dim;
            }
            float both[lanes];
            store(both, dots_of_codes(turned, before, behind, apart, static_cast<const int16_t*>(x.turns),
                                      twos, dim));
            memcpy(dots + twos.first(), both, sizeof both / 2);
            memcpy(dots + twos.behind, both + Twos::half, sizeof both / 2);
        });
        for (int64_t i = 0; i < x.n; i += lanes)
            finish_turned(x, pair, i, x.n - i < lanes ? x.n - i : lanes, q->unit * kTurned, load(dots + i),
                          scales + i);
    }
}

/// Codes of few bits.
struct Packed {
    uint8_t codes;
};

/// Where rows of a head are, from row i on.
struct HeadAt {
    const char *data, *scales;
    int64_t column;  // of the stored head
};
HeadAt head_at(const TurnedScores& x, int64_t head, int64_t i) {
    const HeadBytes bytes = head_bytes(DType(x.type), x.stored_dim);
    const auto of_head = static_cast<int64_t>(x.head_stride), row = static_cast<int64_t>(bytes.scales);
    return {static_cast<const char*>(x.data) + head * of_head + i * static_cast<int64_t>(x.stride),
            static_cast<const char*>(x.scales) + head * of_head + i * row, of_head ? 0 : head * x.dim};
}

/// Rows of a head that are stored otherwise as floats, a tile of them; zeros from dim to turned_dim(dim), and
/// past the last row.
void read_tile(const TurnedScores& x, int64_t head, const Twos& twos, float* to) {
    const int64_t dim = turned_dim(x.dim);
    memset(to, 0, static_cast<size_t>(lanes * dim) * sizeof(float));
    twos.each_half(x.n, [&](int64_t first, int64_t n, int64_t at) {
        const HeadAt rows = head_at(x, head, first);
        load_head(x.type, rows.data, x.stride, rows.scales, n, x.stored_dim, rows.column, x.dim,
                  to + at * dim, dim);
    });
}

/// Rows of other types, as floats: where and as they are stored, if these are whole vectors of numbers.
template <class Code>
void score_floats(const TurnedScores& x, bool scaled) {
    const int64_t dim = turned_dim(x.dim), stride = static_cast<int64_t>(x.stride);
    const auto* const turns = static_cast<const float*>(x.turns);
    alignas(64) float rows[lanes * kMaxTurnedDim], turned[2 * kMaxTurnedDim];
    for (int64_t head = 0; head < x.n_heads; ++head) {
        if (x.ahead) call_share(x, head);
        if (x.n_q == 1) turn_query(query_at(x, head), x.middle, dim, turned);
        each_tile(x.n, [&](const Twos& twos) {
            const bool copied = twos.end() > x.n || dim != x.dim || __is_same(Code, Packed);
            if (x.head_stride) call_ahead(head_at(x, head, 2 * twos.turn()).data, stride);
            if (copied) read_tile(x, head, twos, rows);
            for (int64_t pair = head * x.n_q; pair < (head + 1) * x.n_q; ++pair) {
                const auto* const q = query_at(x, pair);
                if (x.n_q > 1) turn_query(q, x.middle, dim, turned);
                float both[lanes + Twos::half];
                if (copied) {
                    const float* const behind = rows + Twos::half * dim;
                    store(both, dots_of_floats(turned, behind - dim, behind,
                                               static_cast<int64_t>(sizeof(float)) * dim, turns, twos, dim));
                } else if constexpr (!__is_same(Code, Packed)) {
                    const auto row = [&](int64_t i) {
                        const HeadAt at = head_at(x, head, i);
                        return reinterpret_cast<const Code*>(at.data) + at.column;
                    };
                    store(both, dots_of_floats(turned, row(twos.before), row(twos.behind), stride, turns,
                                               twos, dim));
                }
                twos.each_half(x.n, [&](int64_t first, int64_t n, int64_t at) {
                    const char* const scales = head_at(x, head, first).scales;
                    finish_turned(x, pair, first, n, q->unit, load_part(both + at, n),
                                  scaled && !copied ? reinterpret_cast<const float*>(scales) : nullptr);
                });
            }
        });
    }
}

}  // namespace

void score_turned(const TurnedScores& x) {
    if (DType(x.type) == DType::Q8) return score_codes(x);
    with_stored(x.type, [&]<class Stored>(Stored) {
        if constexpr (__is_same(typename Stored::Code, void))
            score_floats<Packed>(x, false);
        else if constexpr (!__is_same(typename Stored::Code, Int8))
            score_floats<typename Stored::Code>(x, Stored::scaled);
    });
}

int64_t set_aside(float* p, int64_t n, int32_t pair, float factor, WeightsBefore* before, SetAside* to) {
    // Beside others whose squares add up to this many times its own, a weight's rounding does not matter.
    constexpr float kShare = 12;
    const float squares = before->squares * factor * factor;
    before->largest *= factor * factor;
    int64_t n_aside = 0;
    for (;;) {
        Vec all = splat(0), high = splat(0);
        for (int64_t i = 0; i < n; i += lanes) {
            const Vec some = load(p + i);
            all = fma(some, some, all);
            high = max(some, high);
        }
        before->squares = squares + sum(all);
        const float top = max_of(high);
        if (!(top * top * kShare > before->squares) || n_aside == kMaxSetAside) break;
        for (int64_t i = 0; i < n && n_aside < kMaxSetAside; ++i) {
            if (!(p[i] * p[i] * kShare > before->squares)) continue;
            to[n_aside++] = {pair, static_cast<int32_t>(i), p[i]};
            p[i] = 0;
        }
    }
    for (int64_t i = 0; i < n_aside; ++i) {
        const float square = to[i].weight * to[i].weight, largest = before->largest;
        before->squares += square < largest ? square : largest;
        before->largest = square < largest ? largest : square;
    }
    return n_aside;
}

namespace {

void gather_codes(const AbsorbedValues& x, int64_t head, Strip& strip) {
    const int64_t stride = x.dim;
    // Columns past the head's own are whatever follows in memory: at least the scales do.
    each_lane(x, head, strip.column % stride, stride, strip, [&](const char* from, RowCodes* to) {
        transpose_rows(RowsOf<Int8>{from, static_cast<size_t>(stride)}, to);
    });
    find_start(strip);
}

void absorb_codes(const AbsorbedValues& x) {
    Weights weights(x);
    for (int64_t head = 0, at = 0; head < x.heads; ++head) {
        alignas(64) float scales[kAbsorbedRows] = {};
        each_block(x, [&](int64_t row, int64_t end) {
            const char* const all = head_of(x, row / kBlockTokens, head) + kBlockTokens * x.dim;
            const float* const from = reinterpret_cast<const float*>(all) + row % kBlockTokens;
            if (end - row == kBlockTokens)  // without a call
                memcpy(scales + row, from, kBlockTokens * sizeof(float));
            else
                memcpy(scales + row, from, static_cast<size_t>(end - row) * sizeof(float));
        });
        weights.round(scales);
        for (int64_t column = 0; column < x.dim; column += kStripColumns) {
            Strip strip;
            place_strip(x, at++, kStripColumns, strip);
            gather_codes(x, head, strip);
            add_strip<absorbed_vectors, false>(x, strip, weights);
        }
    }
}

/// Columns [column, column + n), a strip, by integers.
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
void absorb_rows(const AbsorbedValues& x) {
    const int64_t width = x.heads * x.dim;
    const bool exact = x.exact || !Pairs::fast || DType(x.type) == DType::F32;
    PairWeights weights(x);
    if (!exact) weights.round(x);
    alignas(64) float strip[kAbsorbedRows * kPairColumns];
    if (!exact) memset(strip, 0, sizeof strip);
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

constexpr int64_t kAsideColumns = 256;

/// out += weight times a row of codes.
inline void add_codes(float weight, const char* row, int64_t dim, float* out) {
    const auto* const codes = reinterpret_cast<const Int8*>(row);
    const Vec by = splat(weight);
    int64_t c = 0;
    for (; c + lanes <= dim; c += lanes) store(out + c, fma(by, load(codes + c), load(out + c)));
    for (; c < dim; ++c) out[c] += weight * static_cast<float>(static_cast<signed char>(row[c]));
}

/// One row for one pair, as floats.
void add_aside(const AbsorbedValues& x, const SetAside& aside) {
    const int64_t block = aside.row / kBlockTokens, at = aside.row % kBlockTokens;
    const HeadBytes bytes = head_bytes(DType(x.type), x.dim);
    const auto stride = static_cast<int64_t>(bytes.elements), scales = static_cast<int64_t>(bytes.scales);
    float* out = x.out + aside.pair * x.out_stride;
    for (int64_t group = 0; group < x.heads; ++group, out += x.dim) {
        const char* const head = head_of(x, block, group);
        const char *const from = head + at * stride, *const scale =
                                                         head + kBlockTokens * stride + at * scales;
        if (DType(x.type) == DType::Q8) {
            add_codes(aside.weight * *reinterpret_cast<const float*>(scale), from, x.dim, out);
            continue;
        }
        for (int64_t c = 0, n; c < x.dim; c += n) {
            float row[kAsideColumns];
            n = x.dim - c < kAsideColumns ? x.dim - c : kAsideColumns;
            load_head(x.type, from, bytes.elements, scale, 1, x.dim, c, n, row, kAsideColumns);
            const float one = 1;
            values(&aside.weight, 1, 1, &one, static_cast<uint32_t>(DType::F32), row, sizeof row, 1, n,
                   out + c, 0);
        }
    }
}

}  // namespace

void absorb_values(const AbsorbedValues& x) {
    if (DType(x.type) == DType::Q8 && !x.exact)
        absorb_codes(x);
    else if (!absorb_fours<FourBitRows>(x))
        absorb_rows<RowPairs>(x);
    for (int64_t i = 0; i < x.n_aside; ++i) add_aside(x, x.aside[i]);
}

}  // namespace slimrt::cpu::SLIMRT_ISA
