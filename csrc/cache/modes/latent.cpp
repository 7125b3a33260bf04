// Mode latent: the latent of MLA (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1), of which K and V of all
// heads are made.
//   row = [c | k_pe], c = the normed latent of x, k_pe = K's rotated columns
// Few queries read whole rows, with W_UK absorbed in q and W_UV applied after the softmax:
//   scores_i = [q_i,nope W_UK,i^T | q_i,pe] row^T,   head_i = (p_i c) W_UV,i
// Many queries read k_i = [c W_UK,i | k_pe] and v_i = c W_UV,i.
#include "cache/attend.h"
#include "cache/modes/modes.h"
#include "cache/prepare.h"

namespace slimrt {
namespace {

struct PreparedLatent : Prepared {
    using Prepared::Prepared;
    Tensor up_k;       // W_UK,i^T of each head, [columns that do not rotate, latent]
    int64_t step = 0;  // rows from one head of up_k to the next
};

const PreparedLatent& prepared(const AttnInput& in) {
    return static_cast<const PreparedLatent&>(in.prepared);
}

/// Columns [first, first + n) of each head.
Tensor columns_of_heads(const AttnConfig& c, Tensor heads, int64_t first, int64_t n) {
    return heads.split(c.n_heads).cols_of(first, n);
}

/// Rows [first, first + n) of each head of a weight, contiguous: [n_heads * n, ..] in its type.
Tensor gather_heads(Backend& backend, const AttnConfig& c, Tensor weight, int64_t step, int64_t first, int n,
                    std::vector<Buffer>& owned) {
    std::vector<std::byte> rows(n * weight.stride);
    owned.push_back(backend.alloc(MemoryKind::derived, c.n_heads * rows.size(), "weight of V of a latent"));
    const Tensor out(owned.back().data.get(), weight.dtype, c.n_heads * n, weight.cols);
    for (int64_t head = 0; head < c.n_heads; ++head) {
        backend.download(rows.data(), weight.rows_of(head * step + first, n), rows.size());
        backend.upload(out.rows_of(head * n, n), rows.data(), rows.size());
    }
    return out;
}

class Latent final : public AbsorbingMode {
  public:
    const char* name() const override { return "latent"; }
    std::string refusal(const AttnConfig&) const override { return ""; }
    bool for_latent_attention() const override { return true; }
    bool has_values_of_all() const override { return true; }

    Format format(const AttnConfig& c) const override { return {{"latent", c.row_width(), 1, c.type_k}}; }

    Format dense_format(const AttnConfig& c) const override {
        return {{"k", c.q_width(), 1, dense_type(c.type_k)}, {"v", c.value_width(), 1, dense_type(c.type_k)}};
    }

    std::unique_ptr<Prepared> prepare(Backend& backend, const PrepareInput& in) const override {
        const AttnConfig& c = in.config;
        const int64_t plain = c.head_dim - c.n_rot;
        auto p = std::make_unique<PreparedLatent>(in.weights);
        AttnWeights& w = p->model;
        const Tensor stacked = w.kv_b ? w.kv_b : w.k_b;
        p->step = w.kv_b ? plain + c.value_dim : c.latent;
        const auto first_row = [&](int head) { return head * p->step; };
        const Tensor transposed =
            transpose_heads(backend, stacked, c.n_heads, first_row, w.kv_b ? plain : c.latent, DType::F32,
                            "weight of K of a latent", p->owned);
        if (w.kv_b) {
            p->up_k = w.kv_b;
            w.v_b = gather_heads(backend, c, w.kv_b, p->step, plain, c.value_dim, p->owned);
            w.k_b = transposed;
        } else {
            p->up_k = transposed;
            p->step = plain;
        }
        return p;
    }

    std::vector<Projection> projections(const Prepared& p) const override { return {{p.model.k, {}}}; }

  protected:
    Written write_rows(Backend& backend, const WriteInput& in) const override {
        const AttnConfig& c = in.config;
        const Tensor row = in.projected[0], latent = row.cols_of(0, c.latent);
        backend.norm(NormKind::rms, latent, in.prepared.model.k_norm, {}, c.latent_eps, latent);
        Rope rope = in.rope;
        rope.first = c.latent;
        backend.rope(row, 1, rope, in.positions);
        return {.planes = {row}};
    }

    void absorbed(Backend& backend, const ReadInput& in, const Written& own, Tensor out) const override {
        const AttnConfig& c = in.config;
        const AttnWeights& w = in.prepared.model;
        const int64_t n = in.q.rows, plain = c.head_dim - c.n_rot, width = c.row_width();
        const Tensor q = in.scratch.f32(n, c.n_heads * plain),
                     latent = in.scratch.f32(n, c.n_heads * c.latent);
        const Tensor wide_q = in.scratch.f32(n, c.n_heads * width), u = in.scratch.f32(n, c.n_heads * width);
        copy_rows(backend, columns_of_heads(c, in.q, 0, plain), q.split(c.n_heads));
        backend.linear_per_head(q, w.k_b, c.n_heads, latent);
        copy_rows(backend, latent.split(c.n_heads), columns_of_heads(c, wide_q, 0, c.latent));
        copy_rows(backend, columns_of_heads(c, in.q, plain, c.n_rot),
                  columns_of_heads(c, wide_q, c.latent, c.n_rot));
        const ScoreTerm scores[] = {{in.rows[0], own.plane(0), 1, int(width), wide_q}};
        // The rotated columns of u are not used.
        const ValueTerm values[] = {{in.rows[0], own.plane(0), 1, int(width), u}};
        backend.attention(attention_args(in, scores, values));
        copy_rows(backend, columns_of_heads(c, u, 0, c.latent), latent.split(c.n_heads));
        backend.linear_per_head(latent, w.v_b, c.n_heads, out);
    }

    std::vector<Tensor> dense_of(Backend& backend, const AttnInput& in, const Written& own) const override {
        const int64_t n = own.plane(0).rows;
        const std::vector<Tensor> planes = {in.scratch.f32(n, in.config.q_width()),
                                            in.scratch.f32(n, in.config.value_width())};
        expand(backend, in, own.plane(0), planes);
        return planes;
    }

    void dense_of_stored(Backend& backend, const ReadInput& in, int64_t begin, int64_t end,
                         const std::vector<Tensor>& planes) const override {
        const Tensor rows = in.scratch.f32(end - begin, in.config.row_width());
        backend.load(in.rows[0], in.sequences[0].table, begin, end, rows);
        expand(backend, in, rows, planes);
    }

  private:
    /// K and V of all heads, made of rows.
    static void expand(Backend& backend, const AttnInput& in, Tensor rows, const std::vector<Tensor>& kv) {
        const AttnConfig& c = in.config;
        const PreparedLatent& p = prepared(in);
        const int64_t plain = c.head_dim - c.n_rot;
        std::vector<Product> products = {{p.model.v_b, {}, kv[1]}};
        for (int64_t head = 0; head < c.n_heads; ++head)
            products.push_back(
                {p.up_k.rows_of(head * p.step, plain), {}, kv[0].cols_of(head * c.head_dim, plain)});
        backend.linear(rows.cols_of(0, c.latent), products);
        for (int64_t head = 0; head < c.n_heads; ++head)
            copy_rows(backend, rows.cols_of(c.latent, c.n_rot),
                      kv[0].cols_of(head * c.head_dim + plain, c.n_rot));
    }
};

}  // namespace

const CacheMode* latent_mode() {
    static const Latent mode;
    return &mode;
}

}  // namespace slimrt
