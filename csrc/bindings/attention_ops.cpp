// slimrt._core.ops: rows of a cache, and attention over them.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <deque>

#include "bench/attention.h"
#include "bench/stored_rows.h"
#include "bindings/ops.h"
#include "core/error.h"

namespace slimrt {
namespace {

using bench::StoredRows;

/// x after it was stored in a plane of `heads` heads and loaded again.
auto cache_round_trip(const F32& x, int heads, const std::string& type, const std::string& isa) {
    Arrays arrays(isa);
    const Tensor from = arrays.of(x), out = arrays.zeros(from.rows, from.cols);
    const StoredRows stored(arrays.backend(), from, heads, require_cache_type(type.c_str()));
    arrays->load(stored.rows, stored.table.data(), 0, from.rows, out);
    return arrays.read(out);
}

/// Rows [begin, end) of a plane of one type after Backend::recode() to a plane of another type, with scales
/// for scale_tokens tokens each (0: for each row) and `width` columns, the first of each head.
auto recoded(const F32& x, int heads, const std::string& from_type, const std::string& to_type,
             int scale_tokens, int64_t width, int64_t begin, int64_t end, const std::string& isa,
             int n_threads) {
    Arrays arrays(isa, n_threads);
    const Tensor rows = arrays.of(x), out = arrays.zeros(end - begin, width);
    const int64_t group = std::max(scale_tokens, 1);
    if (begin < 0 || end > rows.rows || begin > end || begin % group || end % group)
        fail(ErrorCode::argument, "these are not rows, or no whole groups of them");
    const StoredRows from(arrays.backend(), rows, heads, require_cache_type(from_type.c_str()));
    StoredRows to(arrays.backend(), rows.rows, int(width), heads, require_cache_type(to_type.c_str()),
                  scale_tokens);
    to.recode(arrays.backend(), from, begin, end);
    arrays->load(to.rows, to.table.data(), begin, end, out);
    return arrays.read(out);
}

/// The same without a plane, by Backend::quantize_dequantize.
auto quantize_dequantize(const F32& x, int heads, const std::string& type, const std::string& isa,
                         int n_threads) {
    Arrays arrays(isa, n_threads);
    const Tensor from = arrays.of(x), out = arrays.zeros(from.rows, from.cols);
    if (from.cols % heads) fail(ErrorCode::argument, "these are not ", heads, " heads");
    arrays->quantize_dequantize(from, require_cache_type(type.c_str()), heads, out);
    return arrays.read(out);
}

/// One sequence: the first rows are stored in `dtype`, the last n_fresh are the queries' own. stored_heads:
/// heads of both planes, where they differ from the heads that are read.
auto attention(const F32& q, const F32& score_rows, const F32& value_rows, int n_heads, int score_heads,
               int value_heads, const std::string& dtype, int n_fresh, float scale, int64_t window,
               const std::string& isa, int n_threads, const std::optional<F32>& table, int n_rot,
               bool interleaved, const std::optional<F32>& bias, int stored_heads, float sparse_threshold) {
    Arrays arrays(isa, n_threads);
    const Tensor queries = arrays.of(q), s = arrays.of(score_rows), v = arrays.of(value_rows);
    const int64_t stored = s.rows - n_fresh;
    if (stored < 0 || v.rows != s.rows || queries.rows != n_fresh)
        fail(ErrorCode::argument, "rows and queries do not match");
    const DType type = require_cache_type(dtype.c_str());
    const StoredRows s_rows(arrays.backend(), s.rows_of(0, stored), stored_heads ? stored_heads : score_heads,
                            type);
    const StoredRows v_rows(arrays.backend(), v.rows_of(0, stored), stored_heads ? stored_heads : value_heads,
                            type);
    const int s_dim = int(s.cols) / score_heads, v_dim = int(v.cols) / value_heads;
    const Tensor out = arrays.zeros(n_fresh, int64_t(n_heads) * v_dim), lse = arrays.zeros(n_fresh, n_heads);

    const AttentionSequence sequence{
        .n_queries = n_fresh, .position = stored, .end = stored, .table = s_rows.table.data()};
    const Rope rotation = table ? Rope{arrays.of(*table), n_rot, interleaved} : Rope{};
    const ScoreTerm score{.stored = s_rows.rows,
                          .fresh = s.rows_of(stored, n_fresh),
                          .n_heads = score_heads,
                          .dim = s_dim,
                          .q = queries,
                          .bias = arrays.of(bias),
                          .rope = rotation};
    const ValueTerm value{v_rows.rows, v.rows_of(stored, n_fresh), value_heads, v_dim, out};
    arrays->attention({.sequences = {&sequence, 1},
                       .scores = {&score, 1},
                       .values = {&value, 1},
                       .n_heads = n_heads,
                       .scale = scale,
                       .window = window,
                       .lse = lse,
                       .sparse_threshold = sparse_threshold});
    const SparseCounts counts = arrays.sparse_counts();
    return nb::make_tuple(arrays.read(out), arrays.read(lse), nb::make_tuple(counts.rows, counts.skipped));
}

/// Terms of attention() as dictionaries, of rows [T, width] whose last n_fresh are fresh: rows, type,
/// stored_heads, heads, dim; optional scale_tokens (groups from the first row on; rows of a divided group
/// must be fresh). Score terms also: q; optional row_scale, factors [T, 1 or heads], bias, table, n_rot,
/// interleaved. Value terms: optional out, the result to merge with.
class Terms {
  public:
    Terms(Arrays& arrays, int n_fresh) : arrays_(arrays), n_fresh_(n_fresh) {}

    ScoreTerm score(const nb::dict& term) {
        ScoreTerm out;
        read_rows(term, out);
        out.q = array(term, "q");
        out.row_scale = array(term, "row_scale");
        out.bias = array(term, "bias");
        if (const Tensor factors = array(term, "factors")) {
            out.factors = store(factors, int(factors.cols), DType::F32);
            out.fresh_factors = factors.rows_of(factors.rows - n_fresh_, n_fresh_);
        }
        if (const Tensor table = array(term, "table"))
            out.rope = {table, nb::cast<int>(term["n_rot"]), nb::cast<bool>(term["interleaved"])};
        return out;
    }
    ValueTerm value(const nb::dict& term, int n_heads) {
        ValueTerm out;
        read_rows(term, out);
        out.out = array(term, "out");
        if (!out.out) out.out = arrays_.zeros(n_fresh_, int64_t(n_heads) * out.dim);
        if (out.out.rows != n_fresh_ || out.out.cols < int64_t(n_heads) * out.dim || out.out.cols % n_heads)
            fail(ErrorCode::argument, "out has no ", n_heads, " heads of ", out.dim, " columns a query");
        return out;
    }
    AttentionSequence sequence() const {
        return {.n_queries = n_fresh_,
                .position = n_stored_,
                .end = n_stored_,
                .table = stored_.front().table.data()};  // planes of as many rows have equal tables
    }

  private:
    Tensor array(const nb::dict& term, const char* key) {
        return term.contains(key) ? arrays_.of(nb::cast<F32>(term[key])) : Tensor{};
    }
    Rows store(Tensor rows, int heads, DType type, int scale_tokens = 0) {
        n_stored_ = rows.rows - n_fresh_;
        stored_.emplace_back(arrays_.backend(), rows.rows_of(0, n_stored_), heads,
                             scale_tokens ? DType::F32 : type);
        if (scale_tokens == 0) return stored_.back().rows;
        if (n_stored_ % scale_tokens) fail(ErrorCode::argument, "a group of tokens is not whole");
        const StoredRows& exact = stored_.back();
        stored_.emplace_back(arrays_.backend(), n_stored_, int(rows.cols), heads, type, scale_tokens);
        stored_.back().recode(arrays_.backend(), exact, 0, n_stored_);
        return stored_.back().rows;
    }
    template <class Term>
    void read_rows(const nb::dict& term, Term& out) {
        const Tensor rows = array(term, "rows");
        out.stored = store(rows, nb::cast<int>(term["stored_heads"]),
                           require_cache_type(nb::cast<std::string>(term["type"]).c_str()),
                           term.contains("scale_tokens") ? nb::cast<int>(term["scale_tokens"]) : 0);
        out.fresh = rows.rows_of(n_stored_, n_fresh_);
        out.n_heads = nb::cast<int>(term["heads"]);
        out.dim = nb::cast<int>(term["dim"]);
    }

    Arrays& arrays_;
    const int n_fresh_;
    int64_t n_stored_ = 0;
    std::deque<StoredRows> stored_;
};

/// One sequence, see Terms; returns `out` of each value term. relative_bias: as in AttentionArgs; its last
/// column is a query's own token, or, not causal, its middle one: then fresh rows are queries only and attend
/// to all stored rows. sinks: one a head. lse [n_fresh, heads]: merges with the terms' `out`, and returns the
/// new LSE, too. With a budget, returns how many rows it met and skipped. keeps_means: means of the values'
/// full stretches are kept, as a cache does.
nb::list attention_of_terms(const std::vector<nb::dict>& scores, const std::vector<nb::dict>& values,
                            int n_heads, int n_fresh, float scale, int64_t window, const std::string& isa,
                            int n_threads, const std::optional<F32>& relative_bias, bool causal,
                            float score_cap, const std::optional<F32>& sinks, const std::optional<F32>& lse,
                            float sparse_threshold, float sparse_delta, bool keeps_means) {
    Arrays arrays(isa, n_threads);
    Terms terms(arrays, n_fresh);
    std::vector<ScoreTerm> score_terms;
    std::vector<ValueTerm> value_terms;
    for (const nb::dict& term : scores) score_terms.push_back(terms.score(term));
    for (const nb::dict& term : values) value_terms.push_back(terms.value(term, n_heads));
    AttentionSequence sequence = terms.sequence();
    sequence.causal = sequence.fresh = causal;
    if (!causal) sequence.position = 0;
    std::optional<bench::MeansOfValues> means;
    if (keeps_means) means.emplace(arrays.backend(), value_terms, std::span(&sequence, 1));
    const Tensor bias = relative_bias ? arrays.of(*relative_bias) : Tensor{};
    const Tensor sums = lse ? arrays.of(*lse) : Tensor{};
    if ((sinks && int64_t(sinks->size()) != n_heads) ||
        (sums && (sums.rows != n_fresh || sums.cols != n_heads)))
        fail(ErrorCode::argument, "sinks or lse are not those of ", n_heads, " heads");
    arrays->attention({.sequences = {&sequence, 1},
                       .scores = score_terms,
                       .values = value_terms,
                       .n_heads = n_heads,
                       .scale = scale,
                       .score_cap = score_cap,
                       .window = window,
                       .relative_bias = bias,
                       .relative_origin = causal ? bias.cols - 1 : bias.cols / 2,
                       .sinks = arrays.of(sinks),
                       .lse = sums,
                       .sparse_threshold = sparse_threshold,
                       .sparse_delta = sparse_delta,
                       .merge = bool(lse)});
    nb::list out;
    for (const ValueTerm& term : value_terms) out.append(arrays.read(term.out));
    if (sums) out.append(arrays.read(sums));
    if (sparse_threshold > 0 || sparse_delta > 0) {
        const SparseCounts counts = arrays.sparse_counts();
        out.append(nb::make_tuple(counts.rows, counts.skipped));
    }
    return out;
}

/// bench::time_attention: seconds, bytes, skipped. biased: with a bias of zeros.
auto time_attention(int n_heads, int n_kv_heads, int head_dim, const std::string& type_k,
                    const std::string& type_v, int64_t n, int n_seqs, float loud, float sparse_threshold,
                    int repetitions, int calls, bool absorbed, const std::string& isa, int n_threads,
                    bool biased, float score_cap, int rank, float sparse_delta,
                    const std::optional<F32>& bias, bool wide) {
    std::vector<float> biases(biased ? n_heads * (n + 1) : 0);
    if (bias) biases.assign(bias->data(), bias->data() + bias->size());
    const nb::gil_scoped_release release;
    Arrays arrays(isa, n_threads);
    const bench::AttentionTimes found = bench::time_attention(arrays,
                                                              {.n_heads = n_heads,
                                                               .n_kv_heads = n_kv_heads,
                                                               .head_dim = head_dim,
                                                               .type_k = require_cache_type(type_k.c_str()),
                                                               .type_v = require_cache_type(type_v.c_str()),
                                                               .n = n,
                                                               .n_seqs = n_seqs,
                                                               .loud = loud,
                                                               .sparse_threshold = sparse_threshold,
                                                               .sparse_delta = sparse_delta,
                                                               .absorbed = absorbed,
                                                               .wide = wide,
                                                               .rank = rank,
                                                               .bias = biases,
                                                               .score_cap = score_cap},
                                                              repetitions, calls);
    return std::make_tuple(found.seconds, found.bytes, found.skipped);
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
          arg("relative_bias") = nb::none(), arg("causal") = true, arg("score_cap") = 0.0f,
          arg("sinks") = nb::none(), arg("lse") = nb::none(), arg("sparse_threshold") = 0.0f,
          arg("sparse_delta") = 0.0f, arg("keeps_means") = false);
    m.def("recoded", &recoded, arg("x"), arg("heads"), arg("from_type"), arg("to_type"), arg("scale_tokens"),
          arg("width"), arg("begin"), arg("end"), arg("isa"), arg("n_threads") = 1);
    m.def("quantize_dequantize", &quantize_dequantize, arg("x"), arg("heads"), arg("type"), arg("isa"),
          arg("n_threads") = 1);
    m.def("cache_round_trip", &cache_round_trip, arg("x"), arg("heads"), arg("type"), arg("isa"));
    m.def("time_attention", &time_attention, arg("n_heads"), arg("n_kv_heads"), arg("head_dim"),
          arg("type_k"), arg("type_v"), arg("n"), arg("n_seqs") = 1, arg("loud") = 1.0f,
          arg("sparse_threshold") = 0.0f, arg("repetitions") = 10, arg("calls") = 1, arg("absorbed") = false,
          arg("isa") = "", arg("n_threads") = 0, arg("biased") = false, arg("score_cap") = 0.0f,
          arg("rank") = 0, arg("sparse_delta") = 0.0f, arg("bias") = nb::none(), arg("wide") = false);
}

}  // namespace slimrt
