#include "cache/prepare.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"

namespace slimrt {
namespace {

/// Rows [first, first + n) of a weight of any type, unpacked.
void unpack_rows(Backend& backend, Tensor weight, int64_t first, int64_t n, Tensor ids, Tensor out) {
    std::vector<int32_t> host(n);
    for (int64_t i = 0; i < n; ++i) host[i] = int32_t(first + i);
    ids.cols = n;
    backend.upload(ids, host.data(), n * sizeof(int32_t));
    backend.gather(weight, ids, out);
}

}  // namespace

std::vector<float> values_of(Backend& backend, Tensor vector) {
    std::vector<float> values(vector.cols);
    // Not vector.bytes(): it may be part of a row.
    backend.download(values.data(), vector, values.size() * sizeof(float));
    return values;
}

Tensor derived_vector(Backend& backend, const std::vector<float>& values, const char* what,
                      std::vector<Buffer>& owned) {
    const size_t bytes = values.size() * sizeof(float);
    owned.push_back(backend.alloc(MemoryKind::derived, bytes, what));
    const Tensor out(owned.back().data.get(), DType::F32, 1, int64_t(values.size()));
    backend.upload(out, values.data(), bytes);
    return out;
}

Tensor norm_of_heads(Backend& backend, Tensor norm, int n_heads, std::vector<Buffer>& owned) {
    const std::vector<float> head = values_of(backend, norm);
    std::vector<float> all(head.size() * n_heads);
    for (size_t i = 0; i < all.size(); ++i) all[i] = head[i % head.size()];
    return derived_vector(backend, all, "the norm of every head", owned);
}

std::vector<float> for_query_heads(const AttnConfig& c, const std::vector<float>& v) {
    const int group = c.n_heads / c.n_kv_heads, dim = c.head_dim;
    std::vector<float> out(c.q_width());
    for (int i = 0; i < c.q_width(); ++i) out[i] = v[i / dim / group * dim + i % dim];
    return out;
}

Fold row_scale_fold(const AttnConfig& c, const char* suffix, int64_t width) {
    return {suffix, 1, width, false, head_bytes(c.type_k, 1).scales > 0};
}

Tensor row_shrink(Backend& backend, const AttnConfig& c, const char* suffix, Tensor row_scale,
                  std::vector<Buffer>& owned) {
    if (!row_scale) return {};
    std::vector<float> shrink = values_of(backend, row_scale);
    for (float& s : shrink) {
        if (!backend.dry() && !(s > 0 && std::isfinite(s)))
            fail(ErrorCode::format, "tensor 'blk.", c.layer, ".", suffix, "' holds ", s,
                 ": the scales of a row must be positive numbers");
        s = 1 / s;
    }
    return derived_vector(backend, shrink, "scales of a row", owned);
}

Tensor fold_v_bias(Backend& backend, const AttnConfig& c, const AttnWeights& w, Tensor v_bias,
                   std::vector<Buffer>& owned) {
    if (!v_bias) return w.o_bias;
    const std::vector<float> expanded = for_query_heads(c, values_of(backend, v_bias));

    constexpr int64_t kRows = 64;
    const Buffer temporary = backend.alloc(
        MemoryKind::scratch, (c.q_width() * (kRows + 1) + kRows) * sizeof(float), "folding of the V bias");
    const Tensor bias(temporary.data.get(), DType::F32, 1, c.q_width());
    const Tensor rows(bias.row(1), DType::F32, kRows, c.q_width());
    const Tensor ids(rows.row(kRows), DType::I32, 1, kRows);
    backend.upload(bias, expanded.data(), bias.bytes());

    owned.push_back(backend.alloc(MemoryKind::derived, c.d_model * sizeof(float), "output bias"));
    const Tensor out(owned.back().data.get(), DType::F32, 1, c.d_model);
    for (int64_t first = 0; first < c.d_model; first += kRows) {
        const int64_t n = std::min<int64_t>(kRows, c.d_model - first);
        unpack_rows(backend, w.o, first, n, ids, rows.rows_of(0, n));
        backend.linear(bias, rows.rows_of(0, n), {}, out.cols_of(first, n));
    }
    if (w.o_bias) backend.add(out, w.o_bias);
    return out;
}

Tensor transpose_heads(Backend& backend, Tensor weight, int n_heads,
                       const std::function<int64_t(int)>& first_row, int64_t n, DType type, const char* what,
                       std::vector<Buffer>& owned, int left_out) {
    const int64_t width = weight.cols;
    const Buffer temporary = backend.alloc(
        MemoryKind::scratch, (n + width) * sizeof(int32_t) + 2 * n * width * sizeof(float), "transposition");
    const Tensor head(temporary.data.get(), DType::F32, n, width), turned(head.row(n), DType::F32, width, n);
    const Tensor ids(turned.row(width), DType::I32, 1, n), slots(ids.row(1), DType::I32, 1, width);

    owned.push_back(backend.alloc(MemoryKind::derived, n_heads * width * row_bytes(type, n), what));
    const Tensor out(owned.back().data.get(), type, n_heads * width, n);
    if (backend.dry()) return out;
    std::vector<int32_t> rows(width);
    std::iota(rows.begin(), rows.end(), 0);
    backend.upload(slots, rows.data(), slots.bytes());
    std::vector<float> from(n * width), to(n * width);
    for (int h = 0; h < n_heads; ++h) {
        unpack_rows(backend, weight, first_row(h), n, ids, head);
        backend.download(from.data(), head, head.bytes());
        if (type == DType::F16 && !std::ranges::all_of(from, [](float x) { return std::fabs(x) <= 65504; }))
            fail(ErrorCode::unsupported, what, ": a number is beyond the range of f16; choose rows of f32");
        for (int64_t i = left_out; i < n; ++i)
            for (int64_t j = 0; j < width; ++j) to[j * n + i] = from[i * width + j];
        backend.upload(turned, to.data(), turned.bytes());
        backend.store(turned, {.base = out.row(h * width),
                               .dtype = type,
                               .width = int(n),
                               .row_bytes = out.stride,
                               .slots = slots});
    }
    return out;
}

Tensor absorb_q(Backend& backend, const AttnConfig& c, Tensor weight, std::vector<Buffer>& owned,
                int left_out) {
    const int64_t dim = c.head_dim, group = c.n_heads / c.n_kv_heads;
    const auto first_row = [&](int head) { return head / group * dim; };
    const bool blocks = dtype_info(weight.dtype).block > 1;
    const DType type = !blocks ? weight.dtype : c.type_k == DType::F32 ? DType::F32 : DType::F16;
    return transpose_heads(backend, weight, c.n_heads, first_row, dim, type, "absorbed query weight", owned,
                           left_out);
}

uint64_t fingerprint_of(Backend& backend, std::initializer_list<Tensor> tensors) {
    uint64_t hash = 0;
    for (const Tensor& t : tensors) {
        if (!t) continue;
        std::vector<unsigned char> row(t.stride);  // the first row tells folds apart
        backend.download(row.data(), t, row.size());
        for (const unsigned char byte : row) hash = (hash ^ byte) * 0x100000001b3 + 1;  // as FNV-1a
    }
    return hash;
}

}  // namespace slimrt
