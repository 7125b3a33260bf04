// Sparse attention: values of the rows that a budget of softmax weight does not skip. Compiled once per ISA.
#include "kernels/cpu/attention_heads.h"
#include "kernels/cpu/softmax_budget.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

/// Rows at arbitrary addresses.
template <class Stored>
struct RowPointers {
    const void* const* list;

    const Stored* row(int64_t i) const { return static_cast<const Stored*>(list[i]); }
};

template <class Fn>
void with_listed(const KeptRows& rows, const Fn& fn) {
    with_stored(rows.type, [&]<class Stored>(Stored) {
        using Code = typename Stored::Code;
        if constexpr (__is_same(Code, void)) {
            for (int64_t i = 0; i < rows.n; ++i)
                load_head(rows.type, rows.data[i], 0, rows.scales[i], 1, rows.dim, 0, rows.dim,
                          rows.rows + i * rows.rows_stride, 0);
            fn(RowsOf<float>{rows.rows, rows.rows_stride * sizeof(float)});
        } else {
            fn(RowPointers<Code>{rows.data});
        }
    });
}

}  // namespace

void keep_rows(const float* p, int64_t n, float share, uint8_t* keep) {
    const float cut = skip_threshold(p, n, share * total_of(p, n, ByWeight()), ByWeight());
    for (int64_t i = 0; i < n; ++i) keep[i] |= p[i] < cut ? 0 : 1;
}

void add_kept_values(const KeptRows& kept) {
    constexpr int64_t kQueries = 16;
    const bool scaled = with_stored(kept.type, []<class Stored>(Stored) { return Stored::scaled; });
    float scales[kBlockTokens], weights[kQueries * kBlockTokens];
    for (int64_t i = 0; i < kept.n; ++i)
        scales[i] = scaled ? *static_cast<const float*>(kept.scales[i]) : 1.0f;
    const float one = 1;
    with_listed(kept, [&]<class Rows>(const Rows& rows) {
        for (int64_t first = 0; first < kept.n_q; first += kQueries) {
            const int64_t n_q = kept.n_q - first < kQueries ? kept.n_q - first : kQueries;
            for (int64_t m = 0; m < n_q; ++m) {
                const float* const p = kept.p + (first + m) * kept.ld;
                for (int64_t i = 0; i < kept.n; ++i)
                    weights[m * kBlockTokens + i] = p[kept.index[i]] * scales[i];
            }
            const Product<Rows> x = {weights,
                                     kBlockTokens,
                                     n_q,
                                     &one,
                                     0,
                                     rows,
                                     kept.n,
                                     kept.values + first * kept.values_stride,
                                     kept.values_stride};
            n_q == 1 ? product<8>(x, 0, kept.dim) : product<tile / 4>(x, 0, kept.dim);
        }
    });
}

}  // namespace slimrt::cpu::SLIMRT_ISA
