// Mode kivi: K (normed and rotated) and V as kv keeps them while they are recent; older rows in few bits, K
// with scales for each channel of kBlockTokens tokens, since the outliers of K lie in some channels, V with
// scales for each token (Liu et al., "KIVI", 2024, section 3). Decoding reads them as they are stored; a
// prompt is computed before anything ages, over exact rows.
#include "cache/attend.h"
#include "cache/modes/modes.h"

namespace slimrt {
namespace {

constexpr int64_t kRecent = 128;  // KIVI's residual length

class Kivi final : public AbsorbingMode {
  public:
    const char* name() const override { return "kivi"; }
    bool keeps_v_bias() const override { return true; }
    std::string refusal(const AttnConfig& c) const override {
        return c.window ? "rows behind a window are given back, so none grow old" : "";
    }

    Format format(const AttnConfig& c) const override {
        return {{"k", c.kv_width(), c.n_kv_heads, dense_type(c.type_k)},
                {"v", c.kv_width(), c.n_kv_heads, dense_type(c.type_v)}};
    }
    std::vector<Format> older_formats(const AttnConfig& c) const override {
        const int by_channel = head_bytes(c.type_k, c.head_dim).scales ? kBlockTokens : 0;
        return {{{"k", c.kv_width(), c.n_kv_heads, c.type_k, by_channel},
                 {"v", c.kv_width(), c.n_kv_heads, c.type_v}}};
    }
    Regions regions(const AttnConfig&) const override { return {.n_classes = 2, .recent = kRecent}; }
    Format dense_format(const AttnConfig& c) const override {
        return {{"k", c.kv_width(), 1, dense_type(c.type_k)}, {"v", c.kv_width(), 1, dense_type(c.type_v)}};
    }

    std::vector<Projection> projections(const Prepared& p) const override {
        return {{p.model.k, p.model.k_bias}, {p.model.v, p.model.v_bias}};
    }

  protected:
    Written write_rows(Backend& backend, const WriteInput& in) const override {
        return {.planes = rotated(backend, in, in.projected), .dense = in.projected};
    }

    std::vector<Tensor> dense_of(Backend& backend, const AttnInput& in, Tensor x) const override {
        return rotated(backend, in, project(backend, in.scratch, x, projections(in.prepared)));
    }

    void dense_of_stored(Backend& backend, const ReadInput& in, int64_t begin, int64_t end,
                         const std::vector<Tensor>& planes) const override {
        const auto load = [&](const std::vector<Rows>& rows, const AttentionSequence& s, int64_t origin) {
            const int64_t first = std::max(begin, s.begin + origin), last = std::min(end, s.end + origin);
            for (size_t p = 0; p < planes.size() && first < last; ++p)
                backend.load(rows[p], s.table, first - origin, last - origin,
                             planes[p].rows_of(first - begin, last - first));
        };
        for (const StoredRegion& region : in.older) load(region.rows, region.sequences[0], region.origin);
        load(in.rows, in.sequences[0], 0);
    }

    /// Over the rows of each region as they are stored.
    void absorbed(Backend& backend, const ReadInput& in, const Written& own, Tensor out) const override {
        const Tensor lse = in.scratch.f32(out.rows, in.config.n_heads);
        for (const StoredRegion& region : in.older)
            attend(backend, in, region.sequences, region.rows, {}, out, lse, &region != in.older.data());
        attend(backend, in, in.sequences, in.rows, own, out, lse, true);
    }

  private:
    static std::vector<Tensor> rotated(Backend& backend, const AttnInput& in, std::vector<Tensor> rows) {
        const Tensor k_norm = in.prepared.model.k_norm;
        if (k_norm) backend.norm(NormKind::rms, rows[0], k_norm, {}, *in.config.qk_norm_eps, rows[0]);
        if (in.rope) backend.rope(rows[0], in.config.n_kv_heads, in.rope, in.positions);
        return rows;
    }

    static void attend(Backend& backend, const ReadInput& in, std::span<const AttentionSequence> sequences,
                       const std::vector<Rows>& rows, const Written& own, Tensor out, Tensor lse,
                       bool merge) {
        const AttnConfig& c = in.config;
        const ScoreTerm scores[] = {{rows[0], own.plane(0), c.n_kv_heads, c.head_dim, in.q}};
        const ValueTerm values[] = {{rows[1], own.plane(1), c.n_kv_heads, c.head_dim, out}};
        AttentionArgs args = attention_args(in, scores, values);
        args.sequences = sequences;
        args.lse = lse;
        args.merge = merge;
        backend.attention(args);
    }
};

}  // namespace

const CacheMode* kivi_mode() {
    static const Kivi mode;
    return &mode;
}

}  // namespace slimrt
