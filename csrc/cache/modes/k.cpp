// Mode k (slim attention, Graef and Wasielewski): K alone, before RoPE and without bias.
//   V = K W_KV, W_KV = W_K^-1 W_V (square) or W_K^T (W_K W_K^T)^-1 W_V (wide), folded offline.
//   head_i = p_i (K W_KV,i) materialised = (p_i K) W_KV,i absorbed.
// Mode k+r (conditioned slim attention, our own): a row also holds the residual of V, in few columns. It is
// computed from k^, the row as it reads back, so that it corrects the rounding of k, too.
//   k^ = round(x W_K / s), r = x P + k^ R;   V = k^ W_KV + r^ B, K = k^ s
// With QK-norm, k is stored before the norm, with 1 / rms(k) of the row or of each head beside it, for
// scores. Heads that attend to many rows may keep V (AttnConfig::v_heads, the last ones): they have planes
// k_v, keys as kv stores them, and v, and are read as in kv. In the row that V of the other heads is computed
// from, v takes the place of their k, so that it is as wide as without them:
//   V_slim = [k_slim | v] W_KV, W_KV = [W_K,slim | W_V,v]^-1 W_V,slim
#include "cache/attend.h"
#include "cache/modes/modes.h"
#include "cache/prepare.h"
#include "core/error.h"

namespace slimrt {
namespace {

struct PreparedK : Prepared {
    using Prepared::Prepared;
    Tensor w_kv;                    // [v width, row width], V = linear(row, .) * v_scale + residual
    Tensor v_scale, out_scale;      // k+r: [1, v width] or none; the same for query heads
    Tensor residual_x, residual_k;  // k+r: residual row = linear(x, .) + linear(k row, .)
    Tensor residual_v;              // k+r: [v width, rank], residual = linear(residual row, .)
    /// [1, k width], static scales of channels: K = row * row_scale, row = K * row_shrink.
    Tensor row_scale, row_shrink;
    Tensor bias;  // of K, where it changes the softmax

    uint64_t fingerprint(Backend& backend) const override {
        return fingerprint_of(backend, {row_shrink, residual_x});
    }
};

const PreparedK& prepared(const AttnInput& in) { return static_cast<const PreparedK&>(in.prepared); }

/// Planes of a row: k of slim heads, whose V is computed; v and k_v of the others; residual, norm.
enum { kPlaneK = 0, kPlaneV = 1, kPlaneKv = 2 };
size_t plane_r(const AttnConfig& c) { return c.v_heads ? 3 : 1; }

Format with_v_heads(Format planes, const AttnConfig& c) {
    const int width = c.v_heads * c.head_dim;
    if (c.v_heads) planes.push_back({"v", width, c.v_heads, c.type_k});
    if (c.v_heads) planes.push_back({"k_v", width, c.v_heads, c.type_k});
    return planes;
}

/// The attention of the slim heads, which come first.
AttnConfig slim_heads(const AttnConfig& c) {
    AttnConfig slim = c;
    slim.n_heads -= c.n_heads / c.n_kv_heads * c.v_heads;
    slim.n_kv_heads -= c.v_heads;
    slim.v_heads = 0;
    return slim;
}

Format with_norm(Format planes, const AttnConfig& c) {
    const int norms = c.norms_heads ? slim_heads(c).n_kv_heads : 1;
    if (c.qk_norm_eps) planes.push_back({"n", norms, norms, DType::F32});
    return planes;
}

/// Attention of the query heads [first, first + n) only.
AttentionArgs args_of_heads(const ReadInput& in, int first, int n, std::span<const ScoreTerm> scores,
                            std::span<const ValueTerm> values) {
    AttentionArgs args = attention_args(in, scores, values);
    args.n_heads = n;
    if (args.relative_bias) args.relative_bias = args.relative_bias.rows_of(first, n);
    return args;
}

/// Rows of 8 bits and fewer lose thirty times what W_KV loses in f16, which K's fold enlarges alike: it is
/// held in f16, each column of V divided by its largest magnitude, since entries of an inverse reach 1e5.
constexpr const char* kScale = "attn_kv.scale";

constexpr const char* kNormedAroundMean =
    "keys are normed by LayerNorm (QK-norm), whose mean no factor beside a row of K stands for";
bool normed_around_mean(const AttnConfig& c) { return c.qk_norm_eps && c.qk_norm_kind == NormKind::layer; }

class K : public AbsorbingMode {
  public:
    const char* name() const override { return "k"; }
    bool serves(bool) const override { return true; }
    bool has_v_heads() const override { return true; }

    std::string refusal(const AttnConfig& c) const override {
        if (c.cross) return narrow_encoder_k(c, "V");
        if (normed_around_mean(c)) return kNormedAroundMean;
        if (c.kv_width() >= c.d_model) return "";
        return concat("K is ", c.kv_width(), " wide (", c.n_kv_heads, " KV heads, ", c.n_heads,
                      " query heads) and the layer's input ", c.d_model,
                      ", so V cannot be computed from K; K-only needs multi-head attention");
    }

    Format format(const AttnConfig& c) const override {
        const AttnConfig slim = slim_heads(c);
        return with_norm(with_v_heads({{"k", slim.kv_width(), slim.n_kv_heads, c.type_k}}, c), c);
    }

    Format dense_format(const AttnConfig& c) const override {
        return {{"v", c.computed_width(), 1, dense_type(c.type_k)}};
    }

    std::vector<Fold> folds(const AttnConfig& c) const override {
        return {
            {folded(c), c.computed_width(), c.kv_width(), true, true, is_float(c.type_k) ? nullptr : kScale}};
    }
    std::vector<Unread> unread(const AttnConfig& c) const override {
        if (c.v_heads) return {};
        if (!c.cross) return {{"attn_v.weight", true}};
        return {{"cross_attn_k.weight", false}, {"cross_attn_v.weight", true}};
    }
    bool has_values_of_all() const override { return true; }
    const char* inverts() const override { return "W_K"; }

    std::unique_ptr<Prepared> prepare(Backend& backend, const PrepareInput& in) const override {
        auto p = std::make_unique<PreparedK>(in.weights);
        set_w_kv(backend, in, folded(in.config), kScale, *p);
        p->row_scale = norm_of_slim_heads(backend, in, p->owned);
        p->bias = bias_that_matters(in);
        return p;
    }

    std::vector<Projection> projections(const Prepared& prepared) const override {
        const PreparedK& p = static_cast<const PreparedK&>(prepared);
        const int64_t computed = p.w_kv.rows, kept = p.model.v.rows - computed;
        std::vector<Projection> all = {{p.model.k, {}}};
        if (kept) all.push_back({p.model.v.rows_of(computed, kept), {}});
        if (p.residual_x) all.push_back({p.residual_x, {}});
        return all;
    }

  protected:
    static void set_w_kv(Backend& backend, const PrepareInput& in, const char* weight, const char* scale,
                         PreparedK& p) {
        p.w_kv = in.folded.at(weight);
        const auto found = in.folded.find(scale);
        if (found == in.folded.end() || !found->second) return;
        p.v_scale = found->second;
        p.out_scale =
            derived_vector(backend, for_query_heads(slim_heads(in.config), values_of(backend, p.v_scale)),
                           "scales of W_KV", p.owned);
    }

    /// Without RoPE K's bias shifts all scores of a query alike, unless these are capped.
    static Tensor bias_that_matters(const PrepareInput& in) {
        return in.config.rope || in.config.score_cap > 0 ? in.weights.k_bias : Tensor{};
    }

    /// QK-norm's weight for each column of the slim heads' K; none without QK-norm.
    static Tensor norm_of_slim_heads(Backend& backend, const PrepareInput& in, std::vector<Buffer>& owned) {
        const Tensor norm = in.weights.k_norm;
        if (!norm || !in.config.norms_heads) return norm;
        return norm_of_heads(backend, norm, slim_heads(in.config).n_kv_heads, owned);
    }

    /// The step's own tokens are read exactly.
    Written write_rows(Backend& backend, const WriteInput& in) const override {
        return written_planes(backend, in);
    }

    /// All planes, exact.
    static Written written_planes(Backend& backend, const WriteInput& in) {
        const AttnConfig& c = in.config;
        Written written{.planes = in.projected};
        if (c.v_heads) {
            const Tensor k = in.projected[0];
            written.planes[0] = k.cols_of(0, c.computed_width());
            written.planes.insert(written.planes.begin() + kPlaneKv, keys_of_v_heads(backend, in, k));
        }
        if (!c.qk_norm_eps) return written;
        const Tensor k = in.projected[0];
        const int64_t norms = k.cols / c.norm_width();
        const Tensor inverse = in.scratch.f32(k.rows, norms);  // 1 / rms of each row, or of each head
        backend.inverse_rms(k.split(norms), *c.qk_norm_eps, inverse.split(norms));
        written.planes.push_back(inverse.cols_of(0, c.norms_heads ? slim_heads(c).n_kv_heads : 1));
        return written;
    }

    /// Keys as kv stores them, of the heads that keep V; k [n, kv_width] without bias may be overwritten
    /// there.
    static Tensor keys_of_v_heads(Backend& backend, const WriteInput& in, Tensor k) {
        const AttnConfig& c = in.config;
        const int64_t first = c.computed_width(), width = c.kv_width() - first;
        const Tensor norm = in.prepared.model.k_norm, bias = prepared(in).bias;
        if (norm) {
            const Tensor normed = in.scratch.f32(k.rows, k.cols);
            norm_heads(backend, c, norm, k, normed);
            k = normed;
        }
        const Tensor keys = k.cols_of(first, width);
        if (bias) backend.add(keys, bias.cols_of(first, width));
        if (in.rope) backend.rope(keys, c.v_heads, in.rope, in.positions);
        return keys;
    }

    void absorbed(Backend& backend, const ReadInput& in, const Written& own, Tensor out) const override {
        const AttnConfig c = slim_heads(in.config);
        const PreparedK& p = prepared(in);
        const int64_t n = in.q.rows, wide = in.config.kv_width(), kept = wide - c.kv_width();
        const Tensor u = in.scratch.f32(n, c.n_heads * wide);  // p_i K, which W_KV multiplies in float32
        const ScoreTerm scores[] = {score_term(in, own)};
        std::vector<ValueTerm> values = {{in.rows[kPlaneK], own.value(kPlaneK), 1, c.kv_width(), u}};
        if (kept) {
            Tensor rest_of_heads = u;  // the columns of every head past those of k
            rest_of_heads.data += c.kv_width() * sizeof(float);
            values.push_back({in.rows[kPlaneV], own.value(kPlaneV), 1, int(kept), rest_of_heads});
        }
        if (p.residual_v) {
            const size_t r = plane_r(in.config);
            values.push_back({in.rows[r], own.value(r), 1, c.rank, in.scratch.f32(n, c.n_heads * c.rank)});
        }
        AttentionArgs args = args_of_heads(in, 0, c.n_heads, scores, values);
        args.corrected = bool(p.residual_v);
        backend.attention(args);
        const Tensor slim = out.cols_of(0, c.q_width());
        backend.linear_per_head(u, p.w_kv, c.n_heads, slim);
        if (p.out_scale) backend.multiply(slim, p.out_scale);
        if (p.residual_v) {
            const Tensor rest = in.scratch.f32(n, c.q_width());
            backend.linear_per_head(values.back().out, p.residual_v, c.n_heads, rest);
            backend.add(slim, rest);
        }
        attend_v_heads(backend, in, own, out);
    }

    /// Attention of the heads that keep V, as in kv.
    static void attend_v_heads(Backend& backend, const ReadInput& in, const Written& own, Tensor out) {
        const AttnConfig &c = in.config, slim = slim_heads(c);
        if (!c.v_heads) return;
        const int first = slim.n_heads, n = c.n_heads - first;
        const auto columns = [&](Tensor t) { return t.cols_of(slim.q_width(), n * c.head_dim); };
        const ScoreTerm scores[] = {
            {in.rows[kPlaneKv], own.plane(kPlaneKv), c.v_heads, c.head_dim, columns(in.q)}};
        const ValueTerm values[] = {
            {in.rows[kPlaneV], own.plane(kPlaneV), c.v_heads, c.head_dim, columns(out)}};
        backend.attention(args_of_heads(in, first, n, scores, values));
    }

    std::vector<Tensor> dense_of(Backend& backend, const AttnInput& in, const Written& own) const override {
        return project(backend, in.scratch, own.x,
                       {{in.prepared.model.v.rows_of(0, in.config.computed_width()), {}}});
    }

    void dense_of_stored(Backend& backend, const ReadInput& in, int64_t begin, int64_t end,
                         const std::vector<Tensor>& planes) const override {
        const PreparedK& p = prepared(in);
        const int32_t* const table = in.sequences[0].table;
        const int64_t wide = in.config.kv_width(), slim = in.config.computed_width();
        const Tensor v = planes[0], row = in.scratch.f32(end - begin, wide);
        backend.load(in.rows[kPlaneK], table, begin, end, row.cols_of(0, slim));
        if (slim < wide) backend.load(in.rows[kPlaneV], table, begin, end, row.cols_of(slim, wide - slim));
        backend.linear(row, p.w_kv, {}, v);
        if (p.v_scale) backend.multiply(v, p.v_scale);
        if (!p.residual_v) return;
        const Tensor residual = in.scratch.f32(end - begin, in.config.rank);
        backend.load(in.rows[plane_r(in.config)], table, begin, end, residual);
        backend.add(v, project(backend, in.scratch, residual, {{p.residual_v, {}}})[0]);
    }

    void materialised(Backend& backend, const ReadInput& in, const Written& own, Tensor out) const override {
        const AttnConfig c = slim_heads(in.config);
        const ScoreTerm scores[] = {score_term(in, own)};
        const ValueTerm values[] = {{dense_rows(in.dense.planes[0], 0), own.dense[0], c.n_kv_heads,
                                     c.head_dim, out.cols_of(0, c.q_width())}};
        backend.attention(args_of_heads(in, 0, c.n_heads, scores, values));
        attend_v_heads(backend, in, own, out);
    }

  private:
    static const char* folded(const AttnConfig& c) {
        return c.cross ? "cross_attn_kv.weight" : "attn_kv.weight";
    }

    /// Scores of q with k, to which scales, norm and RoPE are applied on read.
    static ScoreTerm score_term(const ReadInput& in, const Written& own) {
        const AttnConfig c = slim_heads(in.config);
        const PreparedK& p = prepared(in);
        const bool normed = c.qk_norm_eps.has_value();
        return {.stored = in.rows[kPlaneK],
                .fresh = own.plane(kPlaneK),
                .n_heads = c.n_kv_heads,
                .dim = c.head_dim,
                .q = in.q.cols_of(0, c.q_width()),
                .row_scale = p.row_scale,
                .factors = normed ? in.rows.back() : Rows{},
                .fresh_factors = normed ? own.planes.back() : Tensor{},
                .bias = p.bias,
                .rope = in.rope};
    }
};

constexpr const char *kWkv = "attn_kr_v.weight", *kWkvScale = "attn_kr_v.scale",
                     *kRowScale = "attn_kr_row.scale", *kResidualX = "attn_kr_x.weight",
                     *kResidualK = "attn_kr_k.weight", *kResidualV = "attn_kr_out.weight";

class KResidual final : public K {
  public:
    const char* name() const override { return "k+r"; }
    bool serves(bool cross) const override { return !cross; }
    bool has_residual() const override { return true; }
    std::string refusal(const AttnConfig& c) const override {
        return normed_around_mean(c) ? kNormedAroundMean : "";
    }

    /// Static scales make channels alike: one scale a row is enough for types with scales.
    Format format(const AttnConfig& c) const override {
        const AttnConfig slim = slim_heads(c);
        const bool one_scale = head_bytes(c.type_k, c.head_dim).scales && !has_groups(c.type_k);
        Format planes = with_v_heads({{"k", slim.kv_width(), one_scale ? 1 : slim.n_kv_heads, c.type_k}}, c);
        if (c.rank > 0) planes.push_back({"r", c.rank, 1, c.type_r});
        return with_norm(planes, c);
    }

    const char* inverts() const override { return ""; }  // its fold weighs rounding against the inverse
    std::vector<Fold> folds(const AttnConfig& c) const override {
        const int wide = c.kv_width(), slim = c.computed_width();
        const bool residual = c.rank > 0;
        const DType weight = is_float(c.type_k) ? DType::F32 : DType::F16;  // as conversions choose
        const DType known = is_float(c.type_r) ? DType::F32 : weight,
                    x = has_groups(c.type_r) ? known : DType::F32;
        const auto matrix = [](const char* suffix, int64_t rows, int64_t cols, bool needed, DType type) {
            return Fold{suffix, rows, cols, needed, needed, nullptr, type};
        };
        return {matrix(kWkv, slim, wide, true, weight),
                {kWkvScale, 1, slim, false, weight == DType::F16},
                row_scale_fold(c, kRowScale, slim),
                matrix(kResidualX, c.rank, c.d_model, residual, x),
                {kResidualK, c.rank, wide, residual, residual, nullptr, known, true},  // whose terms cancel
                matrix(kResidualV, slim, c.rank, residual, known)};
    }

    std::unique_ptr<Prepared> prepare(Backend& backend, const PrepareInput& in) const override {
        const AttnConfig& c = in.config;
        auto p = std::make_unique<PreparedK>(in.weights);
        set_w_kv(backend, in, kWkv, kWkvScale, *p);
        p->row_scale = in.folded.at(kRowScale);
        p->row_shrink = row_shrink(backend, c, kRowScale, p->row_scale, p->owned);
        if (const Tensor norm = norm_of_slim_heads(backend, in, p->owned))
            p->row_scale = scaled_norm(backend, norm, p->row_scale, p->owned);
        p->residual_x = in.folded.at(kResidualX);
        p->residual_k = in.folded.at(kResidualK);
        p->residual_v = in.folded.at(kResidualV);
        p->bias = bias_that_matters(in);
        return p;
    }

  protected:
    /// The step's own tokens are read as later steps will read them.
    Written write_rows(Backend& backend, const WriteInput& in) const override {
        const AttnConfig& c = in.config;
        const PreparedK& p = prepared(in);
        const Format planes = format(c);
        Written written = written_planes(backend, in);
        const Tensor k = written.planes[kPlaneK];
        if (p.row_shrink) backend.multiply(k, p.row_shrink);
        const Tensor known = known_row(backend, in, written, planes);
        written.read_back = {known.cols_of(0, k.cols)};
        if (c.v_heads)
            written.read_back = {known.cols_of(0, k.cols), known.cols_of(k.cols, known.cols - k.cols),
                                 written.planes[kPlaneKv]};
        if (!p.residual_x) return written;
        const size_t r = plane_r(c);
        const Tensor residual = written.planes[r];
        {
            const Scratch::Scope scope(in.scratch);
            backend.add(residual, project(backend, in.scratch, known, {{p.residual_k, {}}})[0]);
        }
        written.read_back.push_back(as_stored(backend, in.scratch, residual, planes[r]));
        return written;
    }

  private:
    /// The row that V is computed from, [n, row width], as it reads back.
    static Tensor known_row(Backend& backend, const WriteInput& in, const Written& written,
                            const Format& planes) {
        const Tensor k = written.planes[kPlaneK];
        if (!in.config.v_heads) return as_stored(backend, in.scratch, k, planes[kPlaneK]);
        const Tensor row = in.scratch.f32(k.rows, in.config.kv_width());
        for (const int i : {kPlaneK, kPlaneV}) {
            const int64_t first = i == kPlaneK ? 0 : k.cols;
            backend.quantize_dequantize(written.planes[i], planes[i].type, planes[i].heads,
                                        row.cols_of(first, planes[i].width));
        }
        return row;
    }

    /// The norm's weight times the static scales, where there are any.
    static Tensor scaled_norm(Backend& backend, Tensor norm, Tensor scale, std::vector<Buffer>& owned) {
        if (!scale) return norm;
        std::vector<float> values = values_of(backend, scale);
        const std::vector<float> others = values_of(backend, norm);
        for (size_t i = 0; i < values.size(); ++i) values[i] *= others[i];
        return derived_vector(backend, values, "scales of a normed row", owned);
    }
};

}  // namespace

const CacheMode* k_mode() {
    static const K mode;
    return &mode;
}

const CacheMode* kr_mode() {
    static const KResidual mode;
    return &mode;
}

}  // namespace slimrt
