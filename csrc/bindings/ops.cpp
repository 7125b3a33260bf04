// slimrt._core.ops: single operations of the CPU backend over NumPy arrays, on a chosen ISA, so that tests
// and benchmarks reach every kernel.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>

#include "bindings/bindings.h"
#include "core/error.h"
#include "kernels/backend.h"
#include "kernels/cpu/isa.h"

namespace slimrt {
namespace {

using F32 = Array<const float>;
using U8 = Array<const uint8_t>;
using I32 = Array<const int32_t>;

DType parse_dtype(const std::string& name) {
    const DTypeInfo* info = find_dtype(name.c_str());
    if (!info) fail(ErrorCode::argument, "unknown element type '", name, "'");
    return info->dtype;
}

std::unique_ptr<Backend> open(const std::string& isa, int n_threads = 1) {
    return open_cpu_backend({.n_threads = n_threads, .isa = isa});
}

const cpu::Isa& find_isa(const std::string& name) {
    int n = 0;
    const cpu::Isa* const* all = cpu::supported_isas(&n);
    for (int i = 0; i < n; ++i)
        if (name == all[i]->name) return *all[i];
    fail(ErrorCode::argument, "this machine does not run ISA '", name, "'");
}

/// A float32 array as a matrix of its last dimension.
Tensor view(const F32& a) {
    const int64_t cols = int64_t(a.shape(a.ndim() - 1));
    return Tensor(const_cast<float*>(a.data()), DType::F32, int64_t(a.size()) / cols, cols);
}
Tensor view(const std::optional<F32>& a) {
    return a ? Tensor(const_cast<float*>(a->data()), DType::F32, 1, int64_t(a->size())) : Tensor{};
}
Tensor view(const I32& a) { return Tensor(const_cast<int32_t*>(a.data()), DType::I32, 1, int64_t(a.size())); }

struct Result {
    std::vector<float> data;
    Tensor tensor;
    Result(int64_t rows, int64_t cols) : data(rows * cols), tensor(data.data(), DType::F32, rows, cols) {}
    explicit Result(Tensor from) : Result(from.rows, from.cols) {
        std::copy_n(from.f32(), data.size(), data.data());
    }
    auto array() { return numpy_array(std::move(data), {size_t(tensor.rows), size_t(tensor.cols)}); }
};

std::vector<std::string> isas() {
    int n = 0;
    const cpu::Isa* const* all = cpu::supported_isas(&n);
    std::vector<std::string> names;
    for (int i = 0; i < n; ++i) names.emplace_back(all[i]->name);
    return names;
}

auto unpack(const std::string& type, const U8& bytes, int64_t n, const std::string& isa) {
    const DType dtype = parse_dtype(type);
    if (n % dtype_info(dtype).block || row_bytes(dtype, n) != bytes.size())
        fail(ErrorCode::argument, n, " elements of ", type, " do not take ", bytes.size(), " bytes");
    Result out(1, n);
    find_isa(isa).unpack(uint32_t(dtype), bytes.data(), n, out.data.data());
    return out.array();
}

auto narrow(const std::string& type, const F32& x, const std::string& isa) {
    const DType dtype = parse_dtype(type);
    if (dtype_info(dtype).block != 1) fail(ErrorCode::argument, "narrow is for f32, f16 and bf16");
    std::vector<uint8_t> out(row_bytes(dtype, int64_t(x.size())));
    find_isa(isa).narrow(uint32_t(dtype), x.data(), int64_t(x.size()), out.data());
    const size_t size = out.size();
    return numpy_array(std::move(out), {size});
}

auto linear(const F32& x, const U8& weight, const std::string& type, int64_t rows,
            const std::optional<F32>& bias, const std::string& isa, int n_threads) {
    const auto backend = open(isa, n_threads);
    const Tensor in = view(x);
    const Tensor w(const_cast<uint8_t*>(weight.data()), parse_dtype(type), rows, in.cols);
    if (w.bytes() != weight.size())
        fail(ErrorCode::argument, "the weight has ", weight.size(), " bytes, not ", w.bytes());
    if (!backend->native(w.dtype)) fail(ErrorCode::argument, "there is no native product for ", type);
    Result out(in.rows, rows);
    backend->linear(in, w, view(bias), out.tensor);
    return out.array();
}

/// Products of one x with several weights (bytes, type, rows) in one call.
nb::list linear_together(const F32& x, const std::vector<std::tuple<U8, std::string, int64_t>>& weights,
                         const std::string& isa, int n_threads) {
    const auto backend = open(isa, n_threads);
    const Tensor in = view(x);
    std::vector<Result> results;
    std::vector<Product> products;
    for (const auto& [bytes, type, rows] : weights) {
        const Tensor w(const_cast<uint8_t*>(bytes.data()), parse_dtype(type), rows, in.cols);
        if (w.bytes() != bytes.size() || !backend->native(w.dtype))
            fail(ErrorCode::argument, "these are not ", rows, " rows of ", type);
        results.emplace_back(in.rows, rows);
        products.push_back({w, {}, results.back().tensor});
    }
    backend->linear(in, products);
    nb::list out;
    for (Result& result : results) out.append(result.array());
    return out;
}

auto norm(const std::string& kind, const F32& x, const std::optional<F32>& weight,
          const std::optional<F32>& bias, float eps, const std::string& isa) {
    Result out(view(x).rows, view(x).cols);
    open(isa)->norm(kind == "rms" ? NormKind::rms : NormKind::layer, view(x), view(weight), view(bias), eps,
                    out.tensor);
    return out.array();
}

auto rope(const F32& x, int n_heads, const F32& table, int n_rot, bool interleaved, const I32& positions,
          const std::string& isa) {
    Result out(view(x));
    open(isa)->rope(out.tensor, n_heads, {view(table), n_rot, interleaved}, view(positions));
    return out.array();
}

Activation parse_activation(const std::string& name) {
    const char* names[] = {"silu", "gelu_tanh", "gelu_erf", "relu"};
    for (int i = 0; i < 4; ++i)
        if (name == names[i]) return Activation(i);
    fail(ErrorCode::argument, "unknown activation '", name, "'");
}

auto activate(const std::string& kind, const F32& x, const std::string& isa) {
    Result out(view(x));
    open(isa)->activate(parse_activation(kind), out.tensor);
    return out.array();
}

auto gate(const std::string& kind, const F32& g, const F32& up, const std::string& isa) {
    Result out(view(g));
    open(isa)->gate(parse_activation(kind), out.tensor, view(up));
    return out.array();
}

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
    const auto backend = open(isa);
    const Tensor from = view(x);
    const StoredRows stored(*backend, from, heads, parse_cache_type(type));
    Result out(from.rows, from.cols);
    backend->load(stored.rows, stored.table.data(), 0, from.rows, out.tensor);
    return out.array();
}

/// One sequence: the first rows are stored in `dtype`, the last n_fresh are the queries' own. stored_heads:
/// of the planes of both, where these are not the heads that are read.
auto attention(const F32& q, const F32& score_rows, const F32& value_rows, int n_heads, int score_heads,
               int value_heads, const std::string& dtype, int n_fresh, float scale, int64_t window,
               const std::string& isa, int n_threads, const std::optional<F32>& table, int n_rot,
               bool interleaved, const std::optional<F32>& bias, int stored_heads, float sparse_threshold) {
    const auto backend = open(isa, n_threads);
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
    const ScoreTerm score{s_rows.rows, s.rows_of(stored, n_fresh), score_heads, s_dim, queries, view(bias),
                          rotation};
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

/// Decoding attention over random rows of n_seqs sequences, a query each: seconds of every repetition, the
/// bytes of cache that one of them reads without a sparse_threshold, and the share of values that it skips
/// with one.
auto time_attention(int n_heads, int n_kv_heads, int head_dim, const std::string& type_k,
                    const std::string& type_v, int64_t n, int n_seqs, float loud, float sparse_threshold,
                    int repetitions, const std::string& isa, int n_threads) {
    if (n < 1 || n_seqs < 1 || n_kv_heads < 1 || n_heads % n_kv_heads)
        fail(ErrorCode::argument, "nothing to measure");
    const nb::gil_scoped_release release;
    const auto backend = open(isa, n_threads);
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
    const ScoreTerm score{k.rows, own.tensor, n_kv_heads, head_dim, q.tensor, {}, {}};
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

void bind_ops(nb::module_& m) {
    using nb::arg;
    m.def("backends", &isas);
    m.def("unpack", &unpack, arg("type"), arg("bytes"), arg("n"), arg("isa"));
    m.def("narrow", &narrow, arg("type"), arg("x"), arg("isa"));
    m.def("linear", &linear, arg("x"), arg("weight"), arg("type"), arg("rows"), arg("bias").none(),
          arg("isa"), arg("n_threads") = 1);
    m.def("linear_together", &linear_together, arg("x"), arg("weights"), arg("isa"), arg("n_threads") = 1);
    m.def("norm", &norm, arg("kind"), arg("x"), arg("weight").none(), arg("bias").none(), arg("eps"),
          arg("isa"));
    m.def("rope", &rope, arg("x"), arg("n_heads"), arg("table"), arg("n_rot"), arg("interleaved"),
          arg("positions"), arg("isa"));
    m.def("activate", &activate, arg("kind"), arg("x"), arg("isa"));
    m.def("gate", &gate, arg("kind"), arg("gate"), arg("up"), arg("isa"));
    m.def("attention", &attention, arg("q"), arg("score_rows"), arg("value_rows"), arg("n_heads"),
          arg("score_heads"), arg("value_heads"), arg("dtype"), arg("n_fresh"), arg("scale"), arg("window"),
          arg("isa"), arg("n_threads") = 1, arg("table") = nb::none(), arg("n_rot") = 0,
          arg("interleaved") = false, arg("bias") = nb::none(), arg("stored_heads") = 0,
          arg("sparse_threshold") = 0.0f);
    m.def("cache_round_trip", &cache_round_trip, arg("x"), arg("heads"), arg("type"), arg("isa"));
    m.def("time_attention", &time_attention, arg("n_heads"), arg("n_kv_heads"), arg("head_dim"),
          arg("type_k"), arg("type_v"), arg("n"), arg("n_seqs") = 1, arg("loud") = 1.0f,
          arg("sparse_threshold") = 0.0f, arg("repetitions") = 10, arg("isa") = "", arg("n_threads") = 0);
}

}  // namespace slimrt
