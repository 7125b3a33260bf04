// Sparse attention over absorbed rows: each (head, query) pair has a list of the rows whose weights exceed a
// budget. Compiled once per ISA.
#include "kernels/cpu/attention_heads.h"
#include "kernels/cpu/softmax_budget.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

template <class Counts>
SkippedWeights skip_weights_by(float* p, int64_t n, float budget, const Counts& counts) {
    const Vec cut = splat(skip_threshold(p, n, budget, counts));
    Vec mass = splat(0), used = splat(0);
    for (int64_t i = 0; i < n; i += lanes) {
        const int64_t left = n - i;
        const Vec weights = left < lanes ? load_part(p + i, left) : load(p + i), out = below(weights, cut);
        left < lanes ? store_part(p + i, weights - out, left) : store(p + i, weights - out);
        mass = mass + out;
        used = used + counts(out);
    }
    return {sum(mass), sum(used)};
}

/// Rows at byte offsets from a first one.
template <class Stored>
struct RowsAtOffsets {
    const char* first;
    const int64_t* data;

    const Stored* row(int64_t i) const { return reinterpret_cast<const Stored*>(first + data[i]); }
};

constexpr bool two_digits = sizeof(WeightCode) == 1;
/// Rows at a time: sums of products fit 32 bits, and rows that are pages apart fit the ways of one cache set.
constexpr int64_t kListed = 2 * lanes > 16 ? 2 * lanes : 16;
constexpr int64_t kStrip = absorbed_vectors * lanes;

/// Softmax weights times the scales of their rows, quantised. They are not negative, so two digits of 7 bits
/// each where products take 8 bits.
class ListedWeights {
  public:
    ListedWeights(const ListedRows& list, int64_t first, int64_t n, const char* base, size_t head_stride) {
        alignas(64) float weights[kListed];
        for (int64_t i = 0; i < n; ++i) {
            const char* const scale = base + list.scales[first + i];
            weights[i] = list.p[first + i] * *reinterpret_cast<const float*>(scale);
            __builtin_prefetch(scale + head_stride, 0, 3);
        }
        const int64_t end = (n + kStep - 1) / kStep * kStep;
        for (int64_t i = n; i < end; ++i) weights[i] = 0;
        Vec high = splat(0), all = splat(0);
        for (int64_t i = 0; i < end; i += lanes) {
            high = max(load(weights + i), high);
            all = all + load(weights + i);
        }
        constexpr float kMaxCode = two_digits ? 127 * 128 + 127 : max_weight;
        const float top = max_of(high);
        const bool usable = top >= 0x1p-100f && top <= 0x1p100f;
        unit_ = (usable ? top / kMaxCode : top < 1 ? 0 : __builtin_nanf("")) + 0 * sum(all);
        const Vec grow = splat(usable ? kMaxCode / top : 0);
        for (int64_t i = 0; i < end; i += kStep)
            set(i, load(weights + i) * grow, load(weights + i + lanes) * grow);
    }

    float unit() const { return unit_; }
    const WeightCode* high(int64_t i) const { return high_ + i; }
    const WeightCode* low(int64_t i) const { return low_ + i; }

  private:
    static constexpr int64_t kStep = 2 * lanes;

    void set(int64_t at, Vec a, Vec b) {
        if constexpr (__is_same(WeightCode, float)) {
            memcpy(low_ + at, &a, sizeof a);
            memcpy(low_ + at + lanes, &b, sizeof b);
            return;
        }
        int16_t codes[kStep];
        store_int16(codes, a, b);
        for (int64_t i = 0; i < kStep; ++i) {
            low_[at + i] = static_cast<WeightCode>(two_digits ? codes[i] & 127 : codes[i]);
            if constexpr (two_digits) high_[at + i] = static_cast<WeightCode>(codes[i] >> 7);
        }
    }

    alignas(64) WeightCode low_[kListed], high_[two_digits ? kListed : 1];
    float unit_;
};

/// Rows of the list from `at` on; past the end the last one again.
template <class Rows>
struct ClampedRows {
    const Rows& rows;
    int64_t at, last;

    auto row(int64_t i) const { return rows.row(at + i < last ? at + i : last); }
};

/// Adds a strip of columns, of which `left` belong to the head.
template <class Rows>
inline void add_columns(const Rows& rows, int64_t n, const ListedWeights& weights, float* out, int64_t left) {
    RowSums highs[absorbed_vectors], lows[absorbed_vectors];
#pragma GCC unroll 4
    for (int j = 0; j < absorbed_vectors; ++j) highs[j] = lows[j] = zero_sums(RowCodes{});
    const auto add = [&](const auto& some, int64_t i) {
        RowCodes codes[absorbed_vectors];
        transpose_rows(some, codes);
        const RowCodes low = splat_quad(RowCodes{}, weights.low(i));
#pragma GCC unroll 4
        for (int j = 0; j < absorbed_vectors; ++j) lows[j] = add_products(lows[j], low, codes[j]);
        if constexpr (two_digits) {
            const RowCodes high = splat_quad(RowCodes{}, weights.high(i));
#pragma GCC unroll 4
            for (int j = 0; j < absorbed_vectors; ++j) highs[j] = add_products(highs[j], high, codes[j]);
        }
    };
    int64_t i = 0;
    for (; i + rows_per_lane <= n; i += rows_per_lane) add(Rows{rows.first, rows.data + i}, i);
    if (i < n) add(ClampedRows<Rows>{rows, i, n - 1}, i);
    const Vec unit = splat(weights.unit());
#pragma GCC unroll 4
    for (int j = 0; j < absorbed_vectors; ++j) {
        Vec sums = to_floats(lows[j]);
        if constexpr (two_digits) sums = fma(splat(128), to_floats(highs[j]), sums);
        float* const to = out + j * lanes;
        const int64_t some = left - j * lanes;
        if (some >= lanes)
            store(to, fma(unit, sums, load(to)));
        else if (some > 0)
            store_part(to, fma(unit, sums, load_part(to, some)), some);
    }
}

/// Consecutive entries of a list.
struct Chunk {
    const int64_t* data;
    int64_t n;
};

/// The chunk at `first`, or the first chunk of the next list.
inline Chunk chunk_at(const ListedRows& list, int64_t first, const ListedRows& next) {
    const ListedRows& of = first < list.n ? list : next;
    if (first >= list.n) first = 0;
    return {of.data + first, of.n - first < kListed ? of.n - first : kListed};
}

/// Adds the listed rows of one stored head, whose first row is at `base`, a chunk of rows at a time over all
/// columns. They come from memory, or have left L2 since their scores were computed: each chunk is prefetched
/// while the one before is read.
void add_listed(const ListedValues& x, const ListedRows& list, const ListedRows& next, Int8, const char* base,
                float* out) {
    for (int64_t first = 0; first < list.n; first += kListed) {
        const Chunk chunk = chunk_at(list, first, next), after = chunk_at(list, first + kListed, next);
        const ListedWeights weights(list, first, chunk.n, base, x.head_stride);
        for (int64_t column = 0; column < x.dim; column += kStrip) {
            for (int64_t i = 0; i < after.n; ++i) __builtin_prefetch(base + column + after.data[i], 0, 2);
            add_columns(RowsAtOffsets<Int8>{base + column, chunk.data}, chunk.n, weights, out + column,
                        x.dim - column);
        }
    }
}

template <class Rows>
void add_floats(const Rows& rows, const float* p, int64_t n, int64_t dim, float* out) {
    const float one = 1;
    product<8>(Product<Rows>{p, 0, 1, &one, 0, rows, n, out, 0}, 0, dim);
}

/// The same for other types, as floats.
template <class Code>
void add_listed(const ListedValues& x, const ListedRows& list, const ListedRows&, Code, const char* base,
                float* out) {
    const bool scaled = with_stored(x.type, []<class Stored>(Stored) { return Stored::scaled; });
    float weights[kListed];
    for (int64_t first = 0; first < list.n; first += kListed) {
        const int64_t n = list.n - first < kListed ? list.n - first : kListed;
        for (int64_t i = 0; i < n; ++i)
            weights[i] = list.p[first + i] *
                         (scaled ? *reinterpret_cast<const float*>(base + list.scales[first + i]) : 1.0f);
        add_floats(RowsAtOffsets<Code>{base, list.data + first}, weights, n, x.dim, out);
    }
}

/// The same for codes of few bits, which are dequantised first.
void add_unpacked(const ListedValues& x, const ListedRows& list, const char* base, float* out) {
    for (int64_t first = 0; first < list.n; first += kBlockTokens) {
        const int64_t n = list.n - first < kBlockTokens ? list.n - first : kBlockTokens;
        for (int64_t i = 0; i < n; ++i)
            load_head(x.type, base + list.data[first + i], 0, base + list.scales[first + i], 1, x.dim, 0,
                      x.dim, x.rows + i * x.rows_stride, 0);
        add_floats(RowsOf<float>{x.rows, x.rows_stride * sizeof(float)}, list.p + first, n, x.dim, out);
    }
}

}  // namespace

SkippedWeights skip_weights(float* p, int64_t n, float budget, bool squared) {
    if (!(budget > 0)) return {0, 0};
    return squared ? skip_weights_by(p, n, budget, BySquare()) : skip_weights_by(p, n, budget, ByWeight());
}

void add_listed_values(const ListedValues& x) {
    with_stored(x.type, [&]<class Stored>(Stored) {
        using Code = typename Stored::Code;
        // Head after head: rows that are on several lists stay in the caches.
        const char* base = static_cast<const char*>(x.base);
        for (int64_t head = 0; head < x.heads; ++head, base += x.head_stride) {
            for (int64_t i = 0; i < x.n_lists; ++i) {
                const ListedRows& list = x.lists[i];
                float* const out = list.out + head * x.dim;
                if constexpr (__is_same(Code, void))
                    add_unpacked(x, list, base, out);
                else
                    add_listed(x, list, x.lists[i + 1 < x.n_lists ? i + 1 : i], Code{}, base, out);
            }
        }
    });
}

}  // namespace slimrt::cpu::SLIMRT_ISA
