// slimrt._core.ops: rows of a cache, and attention over them.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cmath>
#include <deque>
#include <random>

#include "bindings/ops.h"
#include "core/error.h"

namespace slimrt {
namespace {

DType parse_cache_type(const std::string& name) {
    const DTypeInfo* info = find_cache_type(name.c_str());
    if (!info) fail(ErrorCode::argument, "unknown cache type '", name, "'; there are: ", cache_type_names());
    return info->dtype;
}

/// A plane of stored rows in blocks that lie shuffled in memory.
struct StoredRows {
    static constexpr int kBlock = 32;
    Buffer pool;
    std::vector<int32_t> table;
    Rows rows;

    StoredRows(Backend& backend, int64_t n, int width, int heads, DType dtype) {
        if (width % heads) fail(ErrorCode::argument, width, " columns are not ", heads, " heads");
        const int64_t n_blocks = (n + kBlock - 1) / kBlock;
        for (int32_t b = 0; b < n_blocks; ++b) table.push_back(b);
        std::shuffle(table.begin(), table.end(), std::mt19937(7));
        const size_t bytes = head_bytes(dtype, width / heads).total() * heads * kBlock;
        pool = backend.alloc(MemoryKind::cache, bytes * n_blocks, "rows");
        rows = {.base = pool.data.get(),
                .dtype = dtype,
                .width = width,
                .heads = heads,
                .block_stride = bytes,
                .block_tokens = kBlock};
    }
    StoredRows(Backend& backend, Tensor from, int heads, DType dtype)
        : StoredRows(backend, from.rows, int(from.cols), heads, dtype) {
        store(backend, from, 0);
    }

    /// Row i of `from` becomes the row of position first + i.
    void store(Backend& backend, Tensor from, int64_t first) {
        std::vector<int32_t> slots;
        for (int64_t i = first; i < first + from.rows; ++i)
            slots.push_back(table[i / kBlock] * kBlock + int32_t(i % kBlock));
        if (from.rows == 0) return;
        backend.store(from, {.base = pool.data.get(),
                             .dtype = rows.dtype,
                             .width = rows.width,
                             .heads = rows.heads,
                             .block_stride = rows.block_stride,
                             .block_tokens = kBlock,
                             .slots = Tensor(slots.data(), DType::I32, 1, from.rows)});
    }
};

/// Rows after a round trip through a plane of `heads` heads.
auto cache_round_trip(const F32& x, int heads, const std::string& type, const std::string& isa) {
    const auto backend = open_backend(isa);
    const Tensor from = view(x);
    const StoredRows stored(*backend, from, heads, parse_cache_type(type));
    Result out(from.rows, from.cols);
    backend->load(stored.rows, stored.table.data(), 0, from.rows, out.tensor);
    return out.array();
}

/// The same without a plane, by Backend::round.
auto round(const F32& x, int heads, const std::string& type, const std::string& isa, int n_threads) {
    Result out(view(x));
    if (out.tensor.cols % heads) fail(ErrorCode::argument, "these are not ", heads, " heads");
    open_backend(isa, n_threads)->round(view(x), parse_cache_type(type), heads, out.tensor);
    return out.array();
}

/// One sequence: the first rows are stored in `dtype`, the last n_fresh are the queries' own. stored_heads:
/// of the planes of both, where these are not the heads that are read.
auto attention(const F32& q, const F32& score_rows, const F32& value_rows, int n_heads, int score_heads,
               int value_heads, const std::string& dtype, int n_fresh, float scale, int64_t window,
               const std::string& isa, int n_threads, const std::optional<F32>& table, int n_rot,
               bool interleaved, const std::optional<F32>& bias, int stored_heads, float sparse_threshold) {
    const auto backend = open_backend(isa, n_threads);
    const Tensor queries = view(q), s = view(score_rows), v = view(value_rows);
    const int64_t stored = s.rows - n_fresh;
    if (stored < 0 || v.rows != s.rows || queries.rows != n_fresh)
        fail(ErrorCode::argument, "rows and queries do not match");
    const DType type = parse_cache_type(dtype);
    const StoredRows s_rows(*backend, s.rows_of(0, stored), stored_heads ? stored_heads : score_heads, type);
    const StoredRows v_rows(*backend, v.rows_of(0, stored), stored_heads ? stored_heads : value_heads, type);
    const int s_dim = int(s.cols) / score_heads, v_dim = int(v.cols) / value_heads;
    Result out(n_fresh, int64_t(n_heads) * v_dim), lse(n_fresh, n_heads);

    const AttentionSequence sequence{
        .n_queries = n_fresh, .position = stored, .end = stored, .table = s_rows.table.data()};
    const Rope rotation = table ? Rope{view(*table), n_rot, interleaved} : Rope{};
    const ScoreTerm score{.stored = s_rows.rows,
                          .fresh = s.rows_of(stored, n_fresh),
                          .n_heads = score_heads,
                          .dim = s_dim,
                          .q = queries,
                          .bias = view(bias),
                          .rope = rotation};
    const ValueTerm value{v_rows.rows, v.rows_of(stored, n_fresh), value_heads, v_dim, out.tensor};
    backend->attention({.sequences = {&sequence, 1},
                        .scores = {&score, 1},
                        .values = {&value, 1},
                        .n_heads = n_heads,
                        .scale = scale,
                        .window = window,
                        .lse = lse.tensor,
                        .sparse_threshold = sparse_threshold});
    const SparseCounts counts = backend->sparse_counts();
    return nb::make_tuple(out.array(), lse.array(), nb::make_tuple(counts.rows, counts.skipped));
}

/// Terms of attention() as dictionaries, of rows [T, width] whose last n_fresh are fresh: rows, type,
/// stored_heads, heads, dim; of scores also q, and where wanted row_scale, factors [T, 1], bias, table,
/// n_rot, interleaved.
class Terms {
  public:
    Terms(Backend& backend, int n_fresh) : backend_(backend), n_fresh_(n_fresh) {}

    ScoreTerm score(const nb::dict& term) {
        ScoreTerm out;
        read_rows(term, out);
        out.q = array(term, "q");
        out.row_scale = array(term, "row_scale");
        out.bias = array(term, "bias");
        if (const Tensor factors = array(term, "factors")) {
            out.factors = store(factors, 1, DType::F32);
            out.fresh_factors = factors.rows_of(factors.rows - n_fresh_, n_fresh_);
        }
        if (const Tensor table = array(term, "table"))
            out.rope = {table, nb::cast<int>(term["n_rot"]), nb::cast<bool>(term["interleaved"])};
        return out;
    }
    ValueTerm value(const nb::dict& term, int n_heads) {
        ValueTerm out;
        read_rows(term, out);
        outs.emplace_back(n_fresh_, int64_t(n_heads) * out.dim);
        out.out = outs.back().tensor;
        return out;
    }
    AttentionSequence sequence() const {
        return {.n_queries = n_fresh_,
                .position = n_stored_,
                .end = n_stored_,
                .table = stored_.front().table.data()};  // planes of as many rows have the same
    }

    std::deque<Result> outs;

  private:
    Tensor array(const nb::dict& term, const char* key) {
        if (!term.contains(key)) return {};
        keep_.push_back(nb::cast<F32>(term[key]));
        return view(keep_.back());
    }
    Rows store(Tensor rows, int heads, DType type) {
        n_stored_ = rows.rows - n_fresh_;
        stored_.emplace_back(backend_, rows.rows_of(0, n_stored_), heads, type);
        return stored_.back().rows;
    }
    template <class Term>
    void read_rows(const nb::dict& term, Term& out) {
        const Tensor rows = array(term, "rows");
        out.stored = store(rows, nb::cast<int>(term["stored_heads"]),
                           parse_cache_type(nb::cast<std::string>(term["type"])));
        out.fresh = rows.rows_of(n_stored_, n_fresh_);
        out.n_heads = nb::cast<int>(term["heads"]);
        out.dim = nb::cast<int>(term["dim"]);
    }

    Backend& backend_;
    const int n_fresh_;
    int64_t n_stored_ = 0;
    std::deque<StoredRows> stored_;
    std::vector<F32> keep_;
};

/// One sequence, see Terms: out of each value term. relative_bias: as AttentionArgs has it, its last column
/// for a query's own token; or, not causal, its middle one: then the fresh rows are queries only, and see all
/// stored ones.
nb::list attention_of_terms(const std::vector<nb::dict>& scores, const std::vector<nb::dict>& values,
                            int n_heads, int n_fresh, float scale, int64_t window, const std::string& isa,
                            int n_threads, const std::optional<F32>& relative_bias, bool causal) {
    const auto backend = open_backend(isa, n_threads);
    Terms terms(*backend, n_fresh);
    std::vector<ScoreTerm> score_terms;
    std::vector<ValueTerm> value_terms;
    for (const nb::dict& term : scores) score_terms.push_back(terms.score(term));
    for (const nb::dict& term : values) value_terms.push_back(terms.value(term, n_heads));
    AttentionSequence sequence = terms.sequence();
    sequence.causal = sequence.fresh = causal;
    if (!causal) sequence.position = 0;
    const Tensor bias = relative_bias ? view(*relative_bias) : Tensor{};
    backend->attention({.sequences = {&sequence, 1},
                        .scores = score_terms,
                        .values = value_terms,
                        .n_heads = n_heads,
                        .scale = scale,
                        .window = window,
                        .relative_bias = bias,
                        .relative_origin = causal ? bias.cols - 1 : bias.cols / 2});
    nb::list out;
    for (Result& result : terms.outs) out.append(result.array());
    return out;
}

/// Decoding attention over random rows of n_seqs sequences, a query each: seconds of every repetition, the
/// bytes of cache that one of them reads without a sparse_threshold, and the share of values that it skips
/// with one.
auto time_attention(int n_heads, int n_kv_heads, int head_dim, const std::string& type_k,
                    const std::string& type_v, int64_t n, int n_seqs, float loud, float sparse_threshold,
                    int repetitions, const std::string& isa, int n_threads) {
    if (n < 1 || n_seqs < 1 || n_kv_heads < 1 || n_heads % n_kv_heads)
        fail(ErrorCode::argument, "nothing to measure");
    const nb::gil_scoped_release release;
    const auto backend = open_backend(isa, n_threads);
    const int width = n_kv_heads * head_dim;
    StoredRows k(*backend, n * n_seqs, width, n_kv_heads, parse_cache_type(type_k));
    StoredRows v(*backend, n * n_seqs, width, n_kv_heads, parse_cache_type(type_v));
    std::minstd_rand random(1);
    std::normal_distribution<float> normal;
    const auto fill = [&](Tensor t, float factor) {
        for (int64_t i = 0; i < t.rows * t.cols; ++i) t.f32()[i] = factor * normal(random);
    };
    Result fresh(StoredRows::kBlock, width), q(n_seqs, int64_t(n_heads) * head_dim);
    for (int64_t first = 0; first < n * n_seqs; first += fresh.tensor.rows) {
        const Tensor some = fresh.tensor.rows_of(0, std::min(fresh.tensor.rows, n * n_seqs - first));
        if (first % (64 * StoredRows::kBlock) == 0)
            fill(fresh.tensor, 1);  // random numbers take long to make
        k.store(*backend, some, first);
        v.store(*backend, some, first);
    }
    fill(q.tensor, loud);
    Result own(n_seqs, width), out(n_seqs, q.tensor.cols);
    const int64_t blocks = (n + StoredRows::kBlock - 1) / StoredRows::kBlock;
    std::vector<AttentionSequence> sequences;
    for (int i = 0; i < n_seqs; ++i)
        sequences.push_back({.query = i,
                             .n_queries = 1,
                             .position = n,
                             .end = std::min(n, n * n_seqs - i * blocks * StoredRows::kBlock),
                             .table = k.table.data() + i * blocks});
    const ScoreTerm score{k.rows, own.tensor, n_kv_heads, head_dim, q.tensor};
    const ValueTerm value{v.rows, own.tensor, n_kv_heads, head_dim, out.tensor};
    std::vector<double> seconds;
    for (int i = 0; i < repetitions; ++i) {
        const auto start = std::chrono::steady_clock::now();
        backend->attention({.sequences = sequences,
                            .scores = {&score, 1},
                            .values = {&value, 1},
                            .n_heads = n_heads,
                            .scale = 1 / std::sqrt(float(head_dim)),
                            .sparse_threshold = sparse_threshold});
        seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    const size_t row =
        (head_bytes(k.rows.dtype, head_dim).total() + head_bytes(v.rows.dtype, head_dim).total()) *
        n_kv_heads;
    const SparseCounts counts = backend->sparse_counts();
    const double skipped = counts.rows ? double(counts.skipped) / double(counts.rows) : 0;
    return std::make_tuple(seconds, n * n_seqs * row, skipped);
}

}  // namespace

void bind_attention_ops(nb::module_& m) {
    using nb::arg;
    m.def("attention", &attention, arg("q"), arg("score_rows"), arg("value_rows"), arg("n_heads"),
          arg("score_heads"), arg("value_heads"), arg("dtype"), arg("n_fresh"), arg("scale"), arg("window"),
          arg("isa"), arg("n_threads") = 1, arg("table") = nb::none(), arg("n_rot") = 0,
          arg("interleaved") = false, arg("bias") = nb::none(), arg("stored_heads") = 0,
          arg("sparse_threshold") = 0.0f);
    m.def("attention_of_terms", &attention_of_terms, arg("scores"), arg("values"), arg("n_heads"),
          arg("n_fresh"), arg("scale"), arg("window"), arg("isa"), arg("n_threads") = 1,
          arg("relative_bias") = nb::none(), arg("causal") = true);
    m.def("round", &round, arg("x"), arg("heads"), arg("type"), arg("isa"), arg("n_threads") = 1);
    m.def("cache_round_trip", &cache_round_trip, arg("x"), arg("heads"), arg("type"), arg("isa"));
    m.def("time_attention", &time_attention, arg("n_heads"), arg("n_kv_heads"), arg("head_dim"),
          arg("type_k"), arg("type_v"), arg("n"), arg("n_seqs") = 1, arg("loud") = 1.0f,
          arg("sparse_threshold") = 0.0f, arg("repetitions") = 10, arg("isa") = "", arg("n_threads") = 0);
}

}  // namespace slimrt
