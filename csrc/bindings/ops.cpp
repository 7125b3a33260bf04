// slimrt._core.ops: single operations of the CPU backend over NumPy arrays, on a chosen ISA, so that tests
// and benchmarks reach every kernel.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
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

/// A plane of stored rows in blocks that lie shuffled in memory.
struct StoredRows {
    static constexpr int kBlock = 32;
    std::vector<std::byte> pool;
    std::vector<int32_t> table;
    Rows rows;

    StoredRows(Backend& backend, Tensor from, DType dtype) {
        const int64_t n_blocks = (from.rows + kBlock - 1) / kBlock;
        for (int32_t b = 0; b < n_blocks; ++b) table.push_back(b);
        std::shuffle(table.begin(), table.end(), std::mt19937(7));
        const size_t bytes = row_bytes(dtype, from.cols);
        pool.resize(n_blocks * kBlock * bytes);
        rows = {pool.data(), dtype, int(from.cols), bytes, bytes * kBlock, kBlock, 0};
        std::vector<int32_t> slots;
        for (int64_t i = 0; i < from.rows; ++i)
            slots.push_back(table[i / kBlock] * kBlock + int32_t(i % kBlock));
        if (from.rows)
            backend.store(from, {pool.data(), dtype, int(from.cols), bytes, bytes * kBlock, kBlock,
                                 Tensor(slots.data(), DType::I32, 1, from.rows)});
    }
};

/// One sequence: the first rows are stored in `dtype`, the last n_fresh are the queries' own.
auto attention(const F32& q, const F32& score_rows, const F32& value_rows, int n_heads, int score_heads,
               int value_heads, const std::string& dtype, int n_fresh, float scale, int64_t window,
               const std::string& isa, int n_threads, const std::optional<F32>& table, int n_rot,
               bool interleaved, const std::optional<F32>& bias) {
    const auto backend = open(isa, n_threads);
    const Tensor queries = view(q), s = view(score_rows), v = view(value_rows);
    const int64_t stored = s.rows - n_fresh;
    if (stored < 0 || v.rows != s.rows || queries.rows != n_fresh)
        fail(ErrorCode::argument, "rows and queries do not match");
    const StoredRows s_rows(*backend, s.rows_of(0, stored), parse_dtype(dtype));
    const StoredRows v_rows(*backend, v.rows_of(0, stored), parse_dtype(dtype));
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
                        .lse = lse.tensor});
    return nb::make_tuple(out.array(), lse.array());
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
          arg("interleaved") = false, arg("bias") = nb::none());
}

}  // namespace slimrt
