// The step's own rows, which all blocks of queries read: converted once, to the format of tiles, in the
// workspace.
#pragma once

#include "kernels/cuda/attention_tile.cuh"

namespace slimrt::cuda {

/// Fresh rows of a term in the format of tiles, head after head; then the rests of exact ones (see F16Tile).
struct PackedRows {
    unsigned char* data = nullptr;
    int rows = 0, stride = 0;

    template <bool exact>
    __device__ F16Tile head(int head) const {
        const size_t bytes = size_t(rows) * stride * (exact ? 2 : 1);
        return {data + head * bytes, stride, rows};
    }
    /// As rows of a sequence whose first one is row `row` here.
    template <bool exact>
    __device__ HeadSource source(int head, int dim, int64_t row, int64_t position) const {
        HeadSource from{};
        from.rows.base = this->head<exact>(head).data;
        from.rows.dtype = DType::F16;
        from.rows.row_bytes = size_t(stride);
        from.rows.first = position - row;
        from.dim = dim;
        from.packed = true;
        from.rest = size_t(rows) * stride;
        return from;
    }
};
struct Packed {
    PackedRows k, v;
};

__device__ inline HeadSource fresh_keys(const ScoreView& term, const PlacedSequence& s, int row, int head) {
    RowsView factors = fresh_view(term.fresh_factors, row, s.position);
    factors.dense_head = sizeof(float);
    return keys_of(term, fresh_view(term.fresh, row, s.position), factors, s.table, head);
}
__device__ inline HeadSource fresh_values(const ValueView& term, const PlacedSequence& s, int row, int head) {
    return source_of(term, fresh_view(term.fresh, row, s.position), s.table, head);
}

/// Packs one head's rows of a sequence, from row `row` of `to` on.
template <bool exact>
__device__ inline void pack_head(const HeadSource& from, int64_t position, int n, int row,
                                 const F16Tile& to) {
    const TileThread own(from.dim);
    for (int first = int(blockIdx.x) * own.step; first < n; first += int(gridDim.x) * own.step) {
        const int i = first + own.row;
        float x[8] = {};
        if (i < n && own.column < from.dim) read_rotated<RowF32>(from, position + i, own.column, x);
        write8<exact>(to, row + i, own.column, i < n && own.column < padded(from.dim), own.lanes, x);
    }
}

/// Blocks: rows of a sequence, heads of K and then of V, sequences.
template <bool exact>
__global__ void pack_kernel(AttentionView a, Packed to) {
    const PlacedSequence& s = a.sequences[blockIdx.z];
    if (!s.fresh) return;
    const int row = s.query + a.query_shift, head = int(blockIdx.y), v_head = head - a.scores[0].n_heads;
    if (v_head < 0)
        pack_head<exact>(fresh_keys(a.scores[0], s, row, head), s.position, s.n_queries, row,
                         to.k.head<exact>(head));
    else
        pack_head<exact>(fresh_values(a.values[0], s, row, v_head), s.position, s.n_queries, row,
                         to.v.head<exact>(v_head));
}

}  // namespace slimrt::cuda
