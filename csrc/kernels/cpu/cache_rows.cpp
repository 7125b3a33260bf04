// Quantises and dequantises heads of cache rows (types: core/dtype.h). Compiled once per ISA.
#include "kernels/cpu/rows.h"
#include "kernels/cpu/stored.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

/// Dequantises one whole group of each of n_rows rows; the scales of a row are consecutive.
template <int bits>
void load_groups(const uint8_t* from, size_t from_stride, const ScaleAndMin* scales, int64_t groups,
                 int64_t n_rows, float* to, size_t to_stride) {
    for (int64_t r = 0; r < n_rows; ++r, from += from_stride, scales += groups, to += to_stride) {
        const Vec scale = splat(scales->scale), min = splat(scales->min);
        for (int j = 0; j < StoredFew<bits>::kGroup; j += lanes)
            store(to + j, fma(load_codes(FewBits<bits>(), from, j), scale, min));
    }
}

template <int bits>
void load_few(const uint8_t* from, size_t from_stride, const ScaleAndMin* scales, int64_t n_rows, int64_t dim,
              int64_t first, int64_t n, float* to, size_t to_stride) {
    using Stored = StoredFew<bits>;
    constexpr int64_t kGroup = Stored::kGroup;
    const int64_t groups = (dim + kGroup - 1) / kGroup, end = first + n;
    for (int64_t i = first / kGroup, column = i * kGroup; column < end; ++i, column += kGroup) {
        if (column >= first && column + kGroup <= end) {
            load_groups<bits>(from + i * Stored::kGroupBytes, from_stride, scales + i, groups, n_rows,
                              to + (column - first), to_stride);
            continue;
        }
        const int64_t begin = column < first ? first : column;
        const int64_t stop = end < column + kGroup ? end : column + kGroup;
        for (int64_t r = 0; r < n_rows; ++r) {
            const float scale = scales[r * groups + i].scale, min = scales[r * groups + i].min;
            for (int64_t c = begin; c < stop; ++c)
                to[r * to_stride + (c - first)] =
                    static_cast<float>(Stored::get(from + r * from_stride, c, dim)) * scale + min;
        }
    }
}

/// Rows of codes, times the scale of their row if `scaled`.
template <class Code, bool scaled>
void load_rows(const char* from, size_t from_stride, const float* scales, int64_t n_rows, int64_t n,
               float* to, size_t to_stride) {
    for (int64_t r = 0; r < n_rows; ++r, from += from_stride, to += to_stride) {
        const Code* const p = reinterpret_cast<const Code*>(from);
        const Vec scale = splat(scaled ? scales[r] : 1);
        const auto worth = [&](Vec codes) { return scaled ? codes * scale : codes; };
        int64_t i = 0;
        for (; i + 2 * lanes <= n; i += 2 * lanes) {
            store(to + i, worth(load(p + i)));
            store(to + i + lanes, worth(load(p + i + lanes)));
        }
        for (; i + lanes <= n; i += lanes) store(to + i, worth(load(p + i)));
        if (i < n) store_part(to + i, worth(load_part(p + i, n - i)), n - i);
    }
}

/// Quantises n_rows rows with a scale for each channel (column).
template <class Stored>
void store_by_channel(const float* x, size_t x_stride, int64_t n_rows, int64_t dim, uint8_t* to,
                      size_t to_stride, uint8_t* scales) {
    constexpr bool few_bits = __is_same(typename Stored::Code, void);
    float column[kBlockTokens];
    for (int64_t r = 0; few_bits && r < n_rows; ++r) memset(to + r * to_stride, 0, to_stride);
    for (int64_t c = 0; c < dim; ++c) {
        for (int64_t r = 0; r < n_rows; ++r) column[r] = x[r * x_stride + c];
        const typename Stored::Fit fit = Stored::fit(column, n_rows);
        const bool numbers = fit.scale == fit.scale;
        if constexpr (few_bits) {
            memcpy(scales + c * sizeof fit.stored, fit.stored, sizeof fit.stored);
            for (int64_t r = 0; numbers && r < n_rows; ++r)
                Stored::put(to + r * to_stride, c, dim, Stored::code(column[r], fit));
        } else {
            memcpy(scales + c * sizeof fit.scale, &fit.scale, sizeof fit.scale);
            for (int64_t r = 0; r < n_rows; ++r)
                to[r * to_stride + c] = numbers ? Stored::code(column[r], fit) : uint8_t(0);
        }
    }
}

/// Columns [first, first + n) of dim.
template <class Stored>
void load_by_channel(const uint8_t* from, size_t from_stride, const uint8_t* scales, int64_t n_rows,
                     int64_t dim, int64_t first, int64_t n, float* to, size_t to_stride) {
    for (int64_t r = 0; r < n_rows; ++r, from += from_stride, to += to_stride) {
        if constexpr (__is_same(typename Stored::Code, void)) {
            const auto* const of = reinterpret_cast<const ScaleAndMin*>(scales) + first;
            for (int64_t i = 0; i < n; ++i)
                to[i] = static_cast<float>(Stored::get(from, first + i, dim)) * of[i].scale + of[i].min;
        } else {
            const auto* const codes = reinterpret_cast<const typename Stored::Code*>(from) + first;
            const float* const scale = reinterpret_cast<const float*>(scales) + first;
            int64_t i = 0;
            for (; i + lanes <= n; i += lanes) store(to + i, load(codes + i) * load(scale + i));
            if (i < n) store_part(to + i, load_part(codes + i, n - i) * load_part(scale + i, n - i), n - i);
        }
    }
}

}  // namespace

void store_head(uint32_t type, const float* from, int64_t dim, void* to, void* scales) {
    with_stored(type, [&]<class Stored>(Stored) {
        Stored::write_row(from, dim, static_cast<uint8_t*>(to), static_cast<uint8_t*>(scales));
    });
}

void load_head(uint32_t type, const void* from, size_t from_stride, const void* scales, int64_t n_rows,
               int64_t dim, int64_t first, int64_t n, float* to, size_t to_stride) {
    with_stored(type, [&]<class Stored>(Stored) {
        using Code = typename Stored::Code;
        if constexpr (__is_same(Code, void)) {
            load_few<Stored::bits>(static_cast<const uint8_t*>(from), from_stride,
                                   static_cast<const ScaleAndMin*>(scales), n_rows, dim, first, n, to,
                                   to_stride);
        } else {
            load_rows<Code, Stored::scaled>(
                static_cast<const char*>(from) + first * static_cast<int64_t>(sizeof(Code)), from_stride,
                static_cast<const float*>(scales), n_rows, n, to, to_stride);
        }
    });
}

void store_channels(uint32_t type, const float* from, size_t from_stride, int64_t n_rows, int64_t dim,
                    void* to, void* scales) {
    const size_t stride = head_bytes(DType(type), dim).elements;
    with_stored(type, [&]<class Stored>(Stored) {
        uint8_t* const codes = static_cast<uint8_t*>(to);
        if constexpr (has_scales<Stored>) {
            store_by_channel<Stored>(from, from_stride, n_rows, dim, codes, stride,
                                     static_cast<uint8_t*>(scales));
        } else {
            for (int64_t r = 0; r < n_rows; ++r)
                Stored::write_row(from + r * from_stride, dim, codes + r * stride, nullptr);
        }
    });
}

void load_channels(uint32_t type, const void* from, size_t from_stride, const void* scales, int64_t n_rows,
                   int64_t dim, int64_t first, int64_t n, float* to, size_t to_stride) {
    with_stored(type, [&]<class Stored>(Stored) {
        if constexpr (has_scales<Stored>) {
            load_by_channel<Stored>(static_cast<const uint8_t*>(from), from_stride,
                                    static_cast<const uint8_t*>(scales), n_rows, dim, first, n, to,
                                    to_stride);
        } else {
            load_head(type, from, from_stride, scales, n_rows, dim, first, n, to, to_stride);
        }
    });
}

}  // namespace slimrt::cpu::SLIMRT_ISA
