// Attention of few queries over a block of stored rows, head after head: where decoding spends its time.
// Compiled once per ISA.
#include "kernels/cpu/attention_int4.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

constexpr int64_t kPairs = 64;  // (head, query) pairs whose scores are computed before values are read

/// s[m][i] = scale * q[m] . rows[i] of Q queries. next: nullptr if these rows were read before.
template <int Q, class Rows>
void score(Queries q, const Rows& rows, int64_t n, float scale, Prefetch* next, float* s) {
    constexpr int R = tile / Q;
    const int64_t stride = static_cast<int64_t>(rows.stride);
    // Rows of f32 arrive sooner if several are prefetched at once (Zen 4).
    constexpr bool is_f32 = __is_same(Rows, RowsOf<float>);
    const bool integers = has_integer_scores<Rows> && q.packed;
    int64_t of_step = 0;
    if (integers && integers_in_steps && q.dim >= kCodes)
        of_step = kStepRows * stride / (q.dim / kCodes);
    else if (!integers && prefetches_in_steps<Q> && !is_f32 && q.dim >= lanes)
        of_step = kStreams<Q> * stride / (q.dim / lanes);
    const auto some_rows = [&](const auto& some, int64_t count, float* out, PrefetchSteps ahead) {
        if constexpr (has_integer_scores<Rows>) {
            if (always_packed<Rows> || q.packed)
                return integer_dots_tile<Q>(q, some, count, scale, out, ahead);
        }
        if constexpr (!always_packed<Rows>)
            dots_tile<Q>(q.floats, q.dim, some, count, q.dim, scale, false, out, kBlockTokens, ahead);
    };
    int64_t i = 0;
    for (; i + R <= n; i += R) {
        const PrefetchSteps ahead = next ? next->in_steps(R * stride, of_step) : PrefetchSteps();
        some_rows(rows.at(i, 0), R, s + i, ahead);
    }
    if (i < n) some_rows(rows_from(rows.row(i), rows.stride), n - i, s + i, {});
}

template <class Rows>
void score_head(Queries q, int64_t n_q, const Head<Rows>& head, int64_t n, float scale, Prefetch& next,
                float* s) {
    int64_t m = 0;
    if constexpr (integer_scores && transposes_scores && Rows::is_int8) {
        if (q.packed && worth_transposing(n_q, q.dim)) {
            alignas(64) Int8 copy[kBlockTokens * kMaxTransposedDim];
            integer_scores_of(q, n_q, whole_block(head.rows, n, q.dim, copy), scale, next, s);
            m = n_q;
        }
    }
    const auto with = [&](auto kernel, int64_t step) {
        kernel(q.from(m), head.rows, n, scale, m == 0 ? &next : nullptr, s + m * kBlockTokens);
        m += step;
    };
    if constexpr (!(transposes_scores && always_packed<Rows>)) {  // there several queries were transposed
        while (m + 4 <= n_q) with(score<4, Rows>, 4);
        while (m + 2 <= n_q) with(score<2, Rows>, 2);
    }
    if (m < n_q) with(score<1, Rows>, 1);
    if (!head.scales) return;
    next.advance(kBlockTokens * sizeof(float));
    for (m = 0; m < n_q; ++m) scale_rows(s + m * kBlockTokens, head.scales, n);
}

/// The same for rows with a scale for each channel: the scales are folded into the queries, four at a time.
template <class Rows>
void score_channels(const BlockAttention& b, const float* q, int64_t n_q, const Head<Rows>& head,
                    Prefetch& next, float* s) {
    constexpr int64_t kQueries = 4;
    const int64_t dim = b.k.dim;
    char* packed = nullptr;
    if constexpr (integer_channels && has_integer_scores<Rows>)
        packed = reinterpret_cast<char*>(b.rows + kQueries * dim);
    for (int64_t m = 0; m < n_q; m += kQueries) {
        const int64_t some = n_q - m < kQueries ? n_q - m : kQueries;
        float offset[kQueries], *const to = s + m * kBlockTokens;
        for (int64_t i = 0; i < some; ++i) {
            float* const folded = b.rows + i * dim;
            offset[i] = b.scale * fold_channels<Rows>(q + (m + i) * dim, head.group_scales, dim, folded);
            if (packed) pack_query(folded, dim, packed + i * packed_query_bytes(dim));
        }
        score_head(Queries{b.rows, packed, dim}, some, Head<Rows>{head.rows, nullptr}, b.n, b.scale, next,
                   to);
        for (int64_t i = 0; i < some; ++i)
            for (int64_t t = 0; t < b.n; ++t) to[i * kBlockTokens + t] += offset[i];
    }
}

/// Scores of the queries [pair, pair + n_q) for one head of k.
void score_pairs(const BlockAttention& b, int64_t head, int64_t pair, int64_t n_q, Prefetch& next, float* s) {
    const bool by_group = has_group_scores(b), codes = by_group || (b.k.by_channel && reads_codes(b.k));
    with_head(b, b.k, head, codes, [&]<class Rows>(const Head<Rows>& rows) {
        const Queries q = Queries{b.q, static_cast<const char*>(b.packed_q), b.k.dim}.from(pair);
        if constexpr (integer_scores && __is_same(Rows, CodeRows<4>))
            if (by_group)
                return score_four_bits<RowCodes>(q, n_q, rows.rows, rows.group_scales, b.n, b.scale,
                                                 static_cast<int64_t>(b.k.head_stride), next, b.rows, s);
        if constexpr (has_channels<Rows>) {
            if (b.rope.first) return score_unrotated_keys(b, q.floats, n_q, rows, next, s);
            if (rows.group_scales) return score_channels(b, q.floats, n_q, rows, next, s);
        }
        if constexpr (!is_codes<Rows>) {
            if (!__is_same(Rows, RowsOf<float>) || DType(b.k.type) == DType::F32)
                return score_head(q, n_q, rows, b.n, b.scale, next, s);
            next.advance(static_cast<int64_t>(b.k.head_stride));  // dequantised: smaller than they are now
            Prefetch none(b, b.k, 0, 0, nullptr);
            score_head(q, n_q, rows, b.n, b.scale, none, s);
        }
    });
}

/// The same for all heads of k that queries [query, query + n_q) of a head of v use.
void score_queries(const BlockAttention& b, int64_t head, int64_t query, int64_t n_q, Prefetch& next,
                   float* s) {
    const int64_t each = b.n_q / b.k_heads, end = query + n_q;
    for (int64_t m = query, some; m < end; m += some, s += some * kBlockTokens) {
        const int64_t k_head = m / each;
        some = ((k_head + 1) * each < end ? (k_head + 1) * each : end) - m;
        score_pairs(b, head * b.k_heads + k_head, head * b.n_q + m, some, next, s);
    }
}

/// Rows as value_head() takes them: where those of Int8 mostly are summed as integers, one kernel for all
/// widths.
template <class Rows>
auto of_any_width(const Rows& rows) {
    if constexpr (integer_scores && Rows::is_int8)
        return rows_from(rows.row(0), rows.stride);
    else
        return rows;
}

/// out = factor * out + weights * rows, a few rows at a time, with prefetches in between.
template <class Rows>
void value_head(Product<Rows> x, int64_t dim, Prefetch& next) {
    const int64_t kRows = x.n_q == 1 ? 16 : 8;
    const float one = 1;
    for (int64_t left = x.n; left > 0; left -= kRows) {
        x.n = left < kRows ? left : kRows;
        const int64_t of_row = static_cast<int64_t>(x.rows.stride);
        const bool in_steps = x.n_q == 1 ? prefetches_in_steps<1> : prefetches_in_steps<2>;
        x.ahead = next.in_steps(x.n * of_row, in_steps && dim >= kStepVectors * lanes ? of_row : 0);
        x.n_q == 1 ? product<8>(x, 0, dim) : product<tile / 4>(x, 0, dim);
        x.p += kRows;
        x.rows = x.rows.at(kRows, 0);
        x.factor = &one;
        x.factor_step = 0;
    }
}

/// The bias of the scores of pair number `pair`, or nullptr.
const float* bias_of(const BlockAttention& b, int64_t pair) {
    if (!b.bias) return nullptr;
    return b.bias + pair / b.n_queries * static_cast<int64_t>(b.bias_stride) - pair % b.n_queries;
}

/// Applies the soft cap and the bias to the scores of pair number `pair`.
void finish(const BlockAttention& b, int64_t pair, float* s) {
    if (b.score_cap > 0 || b.bias) finish_scores(s, b.n, b.score_cap, bias_of(b, pair));
}

/// Adds weighted sums of k's rows too: they are still in the caches from the scores.
void sum_keys(const BlockAttention& b, int64_t head, int64_t query, int64_t n_q, const float* p,
              const float* factors) {
    Prefetch none(b, b.k, 0, 0, nullptr);
    for (int64_t i = 0; i < b.k_heads; ++i) {
        float* const out = b.keys + (head * b.n_q + query) * b.keys_stride + i * b.k.dim;
        with_head(b, b.k, head * b.k_heads + i, b.k.by_channel && reads_codes(b.k),
                  [&]<class Rows>(const Head<Rows>& rows) {
                      const auto any = of_any_width(rows.rows);
                      const Product<decltype(of_any_width(rows.rows))> x = {
                          p, kBlockTokens, n_q, factors, 1, any, b.n, out, b.keys_stride};
                      if constexpr (has_channels<Rows>)
                          if (rows.group_scales)
                              return sum_channels<Rows>(x, rows.group_scales, b.k.dim, b.rows);
                      if constexpr (!is_codes<Rows>) value_head(x, b.k.dim, none);
                  });
    }
}

/// Heads [first, end), queries [query, query + n_q) of each: first all scores, then all softmax, then all
/// values, so that memory is read in order and no head waits for its softmax.
void attend_heads(const BlockAttention& b, int64_t first, int64_t end, int64_t query, int64_t n_q) {
    float scores[kPairs * kBlockTokens], factors[kPairs];
    const auto pair = [&](int64_t head) { return head * b.n_q + query; };
    float *s = scores, *factor = factors;
    Prefetch next(b, b.k, b.n_heads * b.k_heads, first * b.k_heads, b.v.data);
    for (int64_t head = first; head < end; ++head, s += n_q * kBlockTokens) {
        score_queries(b, head, query, n_q, next, s);
    }
    s = scores;
    for (int64_t head = first; head < end; ++head) {
        for (int64_t m = 0; m < n_q; ++m, s += kBlockTokens) {
            finish(b, pair(head) + m, s);
            *factor++ = softmax(s, b.n, b.max + pair(head) + m, b.sum + pair(head) + m);
        }
    }
    s = scores, factor = factors;
    for (int64_t head = first; b.keys && head < end; ++head, s += n_q * kBlockTokens, factor += n_q)
        sum_keys(b, head, query, n_q, s, factor);
    s = scores, factor = factors;
    next = Prefetch(b, b.v, b.n_heads, first, b.k.next);
    for (int64_t head = first; head < end; ++head, s += n_q * kBlockTokens, factor += n_q) {
        with_head(b, b.v, head, reads_codes(b.v), [&]<class Rows>(const Head<Rows>& rows) {
            if (rows.scales) {
                next.advance(kBlockTokens * sizeof(float));
                for (int64_t m = 0; m < n_q; ++m) scale_rows(s + m * kBlockTokens, rows.scales, b.n);
            }
            float* const out = b.values + pair(head) * b.values_stride;
            if constexpr (integer_scores && Rows::is_int8) {
                alignas(64) Int8 copy[kBlockTokens * kMaxTransposedDim];
                if (transposes_values(b.v.dim)) {
                    const auto whole = whole_block(rows.rows, b.n, b.v.dim, copy);
                    const Product<RowsOf<Int8>> x = {s,     kBlockTokens, n_q, factor,         1,
                                                     whole, b.n,          out, b.values_stride};
                    if (integer_values(x, b.v.dim, next)) return;
                }
            }
            if constexpr (is_codes<Rows>) {
                const Product<Rows> x = {s,         kBlockTokens, n_q, factor,         1,
                                         rows.rows, b.n,          out, b.values_stride};
                const auto bytes = static_cast<int64_t>(b.v.head_stride);
                if constexpr (integer_scores && __is_same(Rows, CodeRows<4>)) {
                    const bool whole = b.n == kBlockTokens;
                    if (whole &&
                        four_bit_values<RowCodes>(x, rows.group_scales, b.v.dim, bytes, next, b.rows))
                        return;
                }
                value_codes<Rows>(x, rows.group_scales, b.v.dim, bytes, next, b.rows);
            } else {
                const Product<decltype(of_any_width(rows.rows))> x = {
                    s, kBlockTokens, n_q, factor, 1, of_any_width(rows.rows), b.n, out, b.values_stride};
                value_head(x, b.v.dim, next);
            }
        });
    }
}

/// Quantises 64 elements of a query times a factor as 128 high + low.
template <class Digit>
void pack_some(const float* x, float factor, Digit* high, Digit* low, PackedQuery* packed) {
    if constexpr (integer_channels) {
        split_digits(x, factor, high, low);  // there rows have no bias
    } else {
        constexpr float magic = 0x1.8p23f;  // adding it rounds to integers
        float codes[64];
        for (int i = 0; i < 64; ++i) {
            const float code = x[i] * factor + magic - magic;
            const float upper = code * 0x1p-7f + magic - magic;
            high[i] = static_cast<Digit>(static_cast<int32_t>(upper));
            low[i] = static_cast<Digit>(static_cast<int32_t>(code - 128 * upper));
            codes[i] = code;
        }
        for (int i = 0; i < 16; ++i) {
            const float four = codes[4 * i] + codes[4 * i + 1] + codes[4 * i + 2] + codes[4 * i + 3];
            const auto bias =
                128 * static_cast<uint32_t>(static_cast<int32_t>(four));  // modulo 2^32, like the sums
            packed->start[i] = static_cast<int32_t>(static_cast<uint32_t>(packed->start[i]) - bias);
            packed->total = static_cast<int32_t>(static_cast<uint32_t>(packed->total) - bias);
        }
    }
}

}  // namespace

void pack_query(const float* q, int64_t dim, void* to) {
    // The largest code for which no lane of the int32 sums can overflow, whatever the rows are.
    const int64_t of_lane = dim <= kMaxTransposedDim ? dim : (dim + kCodes - 1) / kCodes * 4;
    const int64_t room = 0x7fffffff / (127 * of_lane);
    const auto max_code = static_cast<float>(room < 127 * 128 ? room : 127 * 128);
    PackedQuery* const packed = static_cast<PackedQuery*>(to);
    int8_t* high = reinterpret_cast<int8_t*>(packed + 1);
    int8_t* low = high + packed_digits(dim);
    const float top = largest(q, dim);
    // Outside this range the scale itself would overflow or underflow.
    const bool usable = top >= 0x1p-100f && top <= 0x1p100f;
    const float shrink = usable ? max_code / top : 0;
    packed->scale = usable || top == 0 ? top / max_code : top < 1 ? 0 : __builtin_nanf("");
    memset(packed->start, 0, sizeof packed->start);
    packed->total = 0;
    for (int64_t d = 0; d < dim; d += 64, high += 64, low += 64) {
        float some[64] = {};
        const bool whole = usable && dim - d >= 64;
        if (usable && !whole) memcpy(some, q + d, static_cast<size_t>(dim - d) * sizeof(float));
        pack_some(whole ? q + d : some, shrink, high, low, packed);
    }
}

void score_block(const BlockAttention& b, float* s, size_t ld) {
    float scores[kPairs * kBlockTokens];
    Prefetch next(b, b.k, b.n_heads * b.k_heads, 0, b.k.next);
    for (int64_t pair = 0; pair < b.n_heads * b.n_q;) {
        const int64_t head = pair / b.n_q, left = (head + 1) * b.n_q - pair;
        const int64_t n_q = left < kPairs ? left : kPairs;
        score_queries(b, head, pair - head * b.n_q, n_q, next, scores);
        for (int64_t m = 0; m < n_q; ++m, ++pair) {
            finish(b, pair, scores + m * kBlockTokens);
            float *const to = s + pair * ld, *const from = scores + m * kBlockTokens;
            if (b.accumulate) add(from, to, b.n);
            memcpy(to, from, static_cast<size_t>(b.n) * sizeof(float));
        }
    }
}

void attend_block(const BlockAttention& block) {
    const int64_t queries = block.n_q < kPairs ? block.n_q : kPairs, heads = kPairs / queries;
    for (int64_t first = 0; first < block.n_heads; first += heads) {
        const int64_t end = first + heads < block.n_heads ? first + heads : block.n_heads;
        for (int64_t m = 0; m < block.n_q; m += queries) {
            attend_heads(block, first, end, m, block.n_q - m < queries ? block.n_q - m : queries);
        }
    }
}

}  // namespace slimrt::cpu::SLIMRT_ISA
