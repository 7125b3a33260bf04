// Attention of few queries over a block of stored rows, head after head: what decoding spends its time on.
// Compiled once per ISA.
#include "core/dtype.h"
#include "kernels/cpu/attention_tiles.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

constexpr int64_t kQueries = 8;  // worked on at once

/// One head's rows; scales: one a row, or none.
template <class Stored>
struct Head {
    RowsOf<Stored> rows;
    const float* scales;
};

/// A head's rows of a block, and what will be read when they have been.
struct HeadView {
    const char *data, *scales, *next;
    size_t next_bytes;
};

HeadView head_of(const BlockRows& rows, int64_t head, int64_t n_heads) {
    const char* const data = static_cast<const char*>(rows.data) + head * rows.head_stride;
    const char* const next = head + 1 < n_heads ? data + rows.head_stride : static_cast<const char*>(rows.next);
    return {data, static_cast<const char*>(rows.scales) + head * rows.head_stride, next,
            next ? rows.head_stride : 0};
}

/// Calls for memory, a share at a time. To the second level: the first is small and a page ahead soon enough.
struct Prefetch {
    const char* at;
    const char* end;

    explicit Prefetch(const HeadView& view) : at(view.next), end(view.next + view.next_bytes) {}
    void some(int64_t bytes) {
        for (const char* stop = at + bytes; at < stop && at < end; at += 64) __builtin_prefetch(at, 0, 2);
    }
};

/// Calls fn with a head's rows as what they are; Q4 is made f32 in scratch first.
template <class Fn>
void with_head(const BlockAttention& block, const BlockRows& rows, const HeadView& view, const Fn& fn) {
    const float* const scales = reinterpret_cast<const float*>(view.scales);
    switch (DType(rows.type)) {
        case DType::F16:
            return fn(Head<Half>{{view.data, rows.stride}, nullptr});
        case DType::BF16:
            return fn(Head<Brain>{{view.data, rows.stride}, nullptr});
        case DType::Q8:
            return fn(Head<Int8>{{view.data, rows.stride}, scales});
        case DType::FP8_E4M3:
            return fn(Head<E4M3>{{view.data, rows.stride}, scales});
        case DType::FP8_E5M2:
            return fn(Head<E5M2>{{view.data, rows.stride}, nullptr});
        case DType::Q4:
            load_head(rows.type, view.data, rows.stride, view.scales, block.n, rows.dim, block.rows,
                      block.rows_stride);
            return fn(Head<float>{{block.rows, block.rows_stride * sizeof(float)}, nullptr});
        default:
            return fn(Head<float>{{view.data, rows.stride}, nullptr});
    }
}

/// s[i] *= scales[i], which lie anywhere.
void scale_rows(float* s, const float* scales, int64_t n) {
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) store(s + i, load(s + i) * load(scales + i));
    if (i < n) store_part(s + i, load_part(s + i, n - i) * load_part(scales + i, n - i), n - i);
}

/// s[m][i] = scale * q[m] . rows[i]
template <int Q, class Stored>
void score(const float* q, const Head<Stored>& head, int64_t n, int64_t dim, float scale, Prefetch& prefetch,
           float* s) {
    constexpr int R = tile / Q;
    for (int64_t i = 0; i < n; i += R) {
        prefetch.some(R * static_cast<int64_t>(head.rows.stride));
        dots_tile<Q>(q, dim, head.rows.at(i, 0), n - i, dim, scale, false, s + i, block_rows);
    }
    if (!head.scales) return;
    for (int m = 0; m < Q; ++m) scale_rows(s + m * block_rows, head.scales, n);
}

template <class Stored>
void score_all(const float* q, int64_t n_q, const Head<Stored>& head, int64_t n, int64_t dim, float scale,
               Prefetch& prefetch, float* s) {
    int64_t m = 0;
    for (; m + 4 <= n_q; m += 4)
        score<4>(q + m * dim, head, n, dim, scale, prefetch, s + m * block_rows);
    for (; m + 2 <= n_q; m += 2)
        score<2>(q + m * dim, head, n, dim, scale, prefetch, s + m * block_rows);
    if (m < n_q) score<1>(q + m * dim, head, n, dim, scale, prefetch, s + m * block_rows);
}

void attend_head(const BlockAttention& b, int64_t head, int64_t first, int64_t n_q) {
    float s[kQueries * block_rows], factor[kQueries];
    const int64_t pair = head * b.n_q + first;
    const HeadView k = head_of(b.k, head, b.n_heads), v = head_of(b.v, head, b.n_heads);
    Prefetch next_k(k), next_v(v);
    with_head(b, b.k, k, [&](auto rows) {
        score_all(b.q + pair * b.k.dim, n_q, rows, b.n, b.k.dim, b.scale, next_k, s);
    });
    for (int64_t m = 0; m < n_q; ++m)
        factor[m] = softmax(s + m * block_rows, b.n, b.max + pair + m, b.sum + pair + m);
    with_head(b, b.v, v, [&]<class Stored>(const Head<Stored>& rows) {
        if (rows.scales)
            for (int64_t m = 0; m < n_q; ++m) scale_rows(s + m * block_rows, rows.scales, b.n);
        next_v.some(static_cast<int64_t>(b.v.head_stride));
        const Product<Stored> product_of = {s,         block_rows, n_q, factor, 1, rows.rows, b.n,
                                            b.values + pair * b.values_stride, b.values_stride};
        n_q == 1 ? product<8>(product_of, 0, b.v.dim) : product<tile / 4>(product_of, 0, b.v.dim);
    });
}

}  // namespace

void attend_block(const BlockAttention& block) {
    for (int64_t head = 0; head < block.n_heads; ++head) {
        for (int64_t m = 0; m < block.n_q; m += kQueries) {
            const int64_t left = block.n_q - m;
            attend_head(block, head, m, left < kQueries ? left : kQueries);
        }
    }
}

}  // namespace slimrt::cpu::SLIMRT_ISA
