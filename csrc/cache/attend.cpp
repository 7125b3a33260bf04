#include "cache/attend.h"

#include "core/error.h"

namespace slimrt {

Plane whole_plane(const char* name, int width, int heads, DType type) {
    return {name, width, head_bytes(type, width / heads).scales ? heads : 1, type};
}

std::vector<Tensor> project(Backend& backend, Scratch& scratch, Tensor x,
                            std::span<const Projection> projections) {
    std::vector<Product> products;
    std::vector<Tensor> out;
    for (const auto& [weight, bias] : projections) {
        out.push_back(scratch.f32(x.rows, weight.rows));
        products.push_back({weight, bias, out.back()});
    }
    if (!products.empty()) backend.linear(x, products);
    return out;
}

void clamp(Backend& backend, const AttnConfig& c, std::span<const Tensor> rows) {
    if (c.clamp > 0)
        for (const Tensor& t : rows) backend.clamp(t, c.clamp);
}

void norm_heads(Backend& backend, const AttnConfig& c, Tensor weight, Tensor x, Tensor out) {
    if (!weight) return;
    const int64_t n = c.norms_heads ? x.cols / c.head_dim : 1;
    backend.norm(c.qk_norm_kind, x.split(n), weight, {}, *c.qk_norm_eps, out.split(n));
}

void norm_values(Backend& backend, const AttnConfig& c, Tensor v) {
    if (!c.norms_v) return;
    const Tensor heads = v.split(v.cols / c.head_dim);
    backend.norm(NormKind::rms, heads, {}, {}, *c.qk_norm_eps, heads);
}

AttentionArgs attention_args(const ReadInput& in, std::span<const ScoreTerm> scores,
                             std::span<const ValueTerm> values) {
    const AttnConfig& c = in.config;
    return {.sequences = in.sequences,
            .scores = scores,
            .values = values,
            .n_heads = c.n_heads,
            .scale = c.scale,
            .score_cap = c.score_cap,
            .window = c.window,
            .relative_bias = in.relative_bias,
            .relative_origin = in.relative_bias.cols - 1,
            .sinks = in.sinks,
            .sparse_threshold = c.sparse_threshold,
            .sparse_delta = c.sparse_delta};
}

Tensor as_stored(Backend& backend, Scratch& scratch, Tensor x, const Plane& plane) {
    if (plane.type == DType::F32) return x;
    const Tensor out = scratch.f32(x.rows, x.cols);
    backend.quantize_dequantize(x, plane.type, plane.heads, out);
    return out;
}

std::string narrow_encoder_k(const AttnConfig& c, const char* what) {
    if (c.kv_width() >= c.d_model) return "";
    return concat("K is ", c.kv_width(), " wide and the encoder's output ", c.d_model, ", so ", what,
                  " cannot be computed from it");
}

/// Unfolding with windows of one row copies rows.
void copy_rows(Backend& backend, Tensor from, Tensor to) { backend.unfold(from, 1, 0, to); }

std::string capped_without_bias(const AttnConfig& c) {
    if (c.score_cap == 0) return "";
    return concat("scores are capped at ", c.score_cap,
                  " (attn_logit_softcapping), so K's bias, which these rows do not know, would not shift all "
                  "of a query alike");
}

DType dense_type(DType stored) { return stored == DType::F32 || stored == DType::BF16 ? stored : DType::F16; }

Tensor positions_from(Backend& backend, Scratch& scratch, int64_t first, int64_t n) {
    std::vector<int32_t> host(n);
    for (int64_t i = 0; i < n; ++i) host[i] = int32_t(first + i);
    const Tensor positions = scratch.i32(n);
    backend.upload(positions, host.data(), n * sizeof(int32_t));
    return positions;
}

Rows dense_rows(Tensor t, int64_t first) {
    return {.base = t.data, .dtype = t.dtype, .width = int(t.cols), .row_bytes = t.stride, .first = first};
}

}  // namespace slimrt
