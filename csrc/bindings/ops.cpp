// slimrt._core.ops: single operations over NumPy arrays, on a chosen backend (an instruction set of the CPU,
// or "cuda"), so that tests and benchmarks reach every kernel.
#include "bindings/ops.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <tuple>

#include "core/error.h"
#include "engine/devices.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/interleave.h"
#include "kernels/cpu/repack.h"

namespace slimrt {
namespace {

DType parse_dtype(const std::string& name) {
    const DTypeInfo* info = find_dtype(name.c_str());
    if (!info) fail(ErrorCode::argument, "unknown element type '", name, "'");
    return info->dtype;
}

const cpu::Isa& find_isa(const std::string& name) {
    int n = 0;
    const cpu::Isa* const* all = cpu::supported_isas(&n);
    for (int i = 0; i < n; ++i)
        if (name == all[i]->name) return *all[i];
    fail(ErrorCode::argument, "this machine does not run ISA '", name, "'");
}

auto unpack(const std::string& type, const U8& bytes, int64_t n, const std::string& isa) {
    const DType dtype = parse_dtype(type);
    if (n % dtype_info(dtype).block || row_bytes(dtype, n) != bytes.size())
        fail(ErrorCode::argument, n, " elements of ", type, " do not take ", bytes.size(), " bytes");
    std::vector<float> out(n);
    find_isa(isa).unpack(uint32_t(dtype), bytes.data(), n, out.data());
    return numpy_array(std::move(out), {size_t(1), size_t(n)});
}

/// The type that holds the same numbers, and the bytes in it.
nb::tuple repack(const std::string& type, const U8& bytes) {
    const DType from = parse_dtype(type), to = cpu::repacked_type(from);
    const auto n = int64_t(bytes.size()) / dtype_info(from).block_bytes * dtype_info(from).block;
    std::vector<uint8_t> out(row_bytes(to, n));
    cpu::repack(from, bytes.data(), n, out.data());
    const size_t size = out.size();
    return nb::make_tuple(dtype_info(to).name, numpy_array(std::move(out), {size}));
}

/// The type with 16 rows of n elements interleaved, and the bytes in it.
nb::tuple interleave(const std::string& type, const U8& bytes, int64_t n) {
    const DType from = parse_dtype(type);
    const size_t row = row_bytes(from, n), sixteen = row * cpu::kInterleavedRows;
    if (bytes.size() == 0 || bytes.size() % sixteen)
        fail(ErrorCode::argument, bytes.size(), " bytes are no multiple of 16 rows of ", row);
    std::vector<uint8_t> out(bytes.size());
    for (size_t at = 0; at < out.size(); at += sixteen)
        cpu::interleave(from, bytes.data() + at, row, n, out.data() + at);
    const size_t size = out.size();
    return nb::make_tuple(dtype_info(cpu::interleaved_type(from)).name, numpy_array(std::move(out), {size}));
}

auto narrow(const std::string& type, const F32& x, const std::string& isa) {
    const DType dtype = parse_dtype(type);
    if (dtype_info(dtype).block != 1) fail(ErrorCode::argument, "narrow is for f32, f16 and bf16");
    std::vector<uint8_t> out(row_bytes(dtype, int64_t(x.size())));
    find_isa(isa).narrow(uint32_t(dtype), x.data(), int64_t(x.size()), out.data());
    const size_t size = out.size();
    return numpy_array(std::move(out), {size});
}

/// `rows` rows as wide as x, as the bytes of a weight.
Tensor weight_of(Arrays& arrays, const U8& bytes, const std::string& type, int64_t rows, int64_t cols) {
    const DType dtype = parse_dtype(type);
    if (size_t(rows) * row_bytes(dtype, cols) != bytes.size())
        fail(ErrorCode::argument, "the weight has ", bytes.size(), " bytes, not ", rows, " rows of ", type);
    if (!arrays->native(dtype)) fail(ErrorCode::argument, "there is no native product for ", type);
    return arrays.put(bytes.data(), dtype, rows, cols);
}

auto linear(const F32& x, const U8& weight, const std::string& type, int64_t rows,
            const std::optional<F32>& bias, const std::string& isa, int n_threads) {
    Arrays arrays(isa, n_threads);
    const Tensor in = arrays.of(x), out = arrays.zeros(in.rows, rows);
    arrays->linear(in, weight_of(arrays, weight, type, rows, in.cols), arrays.of(bias), out);
    return arrays.read(out);
}

/// Products of one x with several weights (bytes, type, rows) in one call.
nb::list linear_together(const F32& x, const std::vector<std::tuple<U8, std::string, int64_t>>& weights,
                         const std::string& isa, int n_threads) {
    Arrays arrays(isa, n_threads);
    const Tensor in = arrays.of(x);
    std::vector<Product> products;
    for (const auto& [bytes, type, rows] : weights)
        products.push_back({weight_of(arrays, bytes, type, rows, in.cols), {}, arrays.zeros(in.rows, rows)});
    arrays->linear(in, products);
    nb::list out;
    for (const Product& product : products) out.append(arrays.read(product.out));
    return out;
}

/// x [n, n_heads * cols] and a weight of `rows` rows for every `group` heads.
auto linear_per_head(const F32& x, const U8& weight, const std::string& type, int64_t rows, int n_heads,
                     const std::string& isa, int n_threads, int group) {
    Arrays arrays(isa, n_threads);
    const Tensor in = arrays.of(x), out = arrays.zeros(in.rows, n_heads * rows);
    const Tensor stacked = weight_of(arrays, weight, type, n_heads / group * rows, in.cols / n_heads);
    arrays->linear_per_head(in, stacked, n_heads, out);
    return arrays.read(out);
}

/// Rows of a weight as f32.
auto gather(const U8& table, const std::string& type, int64_t rows, int64_t cols, const I32& ids,
            const std::string& isa) {
    Arrays arrays(isa);
    const Tensor out = arrays.zeros(int64_t(ids.size()), cols);
    if (size_t(rows) * row_bytes(parse_dtype(type), cols) != table.size())
        fail(ErrorCode::argument, "these are not ", rows, " rows of ", type);
    arrays->gather(arrays.put(table.data(), parse_dtype(type), rows, cols), arrays.of(ids), out);
    return arrays.read(out);
}

auto norm(const std::string& kind, const F32& x, const std::optional<F32>& weight,
          const std::optional<F32>& bias, float eps, const std::string& isa) {
    Arrays arrays(isa);
    const Tensor in = arrays.of(x), out = arrays.zeros(in.rows, in.cols);
    arrays->norm(kind == "rms" ? NormKind::rms : NormKind::layer, in, arrays.of(weight), arrays.of(bias), eps,
                 out);
    return arrays.read(out);
}

auto inverse_rms(const F32& x, float eps, const std::string& isa) {
    Arrays arrays(isa);
    const Tensor in = arrays.of(x), out = arrays.zeros(in.rows, 1);
    arrays->inverse_rms(in, eps, out);
    return arrays.read(out);
}

auto multiply(const F32& x, const F32& y, const std::string& isa) {
    Arrays arrays(isa);
    const Tensor out = arrays.of(x), factors = arrays.of(y);
    if (factors.rows != 1 || factors.cols != out.cols) fail(ErrorCode::argument, "y is not a row of x");
    arrays->multiply(out, factors);
    return arrays.read(out);
}

/// x + y, where y has one row or as many as x.
auto add(const F32& x, const F32& y, const std::string& isa) {
    Arrays arrays(isa);
    const Tensor out = arrays.of(x);
    arrays->add(out, arrays.of(y));
    return arrays.read(out);
}

auto scale(const F32& x, float factor, const std::string& isa) {
    Arrays arrays(isa);
    const Tensor out = arrays.of(x);
    arrays->scale(out, factor);
    return arrays.read(out);
}

auto clamp(const F32& x, float limit, const std::string& isa) {
    Arrays arrays(isa);
    const Tensor out = arrays.of(x);
    arrays->clamp(out, limit);
    return arrays.read(out);
}

/// ids and shares [tokens, taken]. groups: how many there are, and of how many experts are taken.
auto route(const F32& scores, int taken, bool renormalised, float scale, const std::string& isa, bool sigmoid,
           const std::optional<F32>& bias, std::pair<int, int> groups, float near) {
    Arrays arrays(isa);
    const Tensor in = arrays.of(scores), added = bias ? arrays.of(*bias) : Tensor{};
    const auto [all, used] = groups;
    if (taken < 1 || taken > in.cols || in.cols > kMaxExperts)
        fail(ErrorCode::argument, "of ", in.cols, " experts ", taken, " cannot be taken");
    if (all < 1 || all > kMaxExpertGroups || used < 1 || used > all || in.cols % all ||
        taken > in.cols / all * used)
        fail(ErrorCode::argument, "of ", in.cols, " experts ", taken, " cannot be taken from ", used, " of ",
             all, " groups");
    if (bias && added.cols != in.cols) fail(ErrorCode::argument, "a bias for each expert is needed");
    const Tensor ids = arrays.zeros(in.rows, taken), shares = arrays.zeros(in.rows, taken);
    Tensor numbers = ids;
    numbers.dtype = DType::I32;
    arrays->route({sigmoid, renormalised, scale, all, used, near}, in, added, numbers, shares);
    std::vector<int32_t> chosen(in.rows * taken);
    arrays->download(chosen.data(), numbers, numbers.bytes());
    return nb::make_tuple(numpy_array(std::move(chosen), {size_t(in.rows), size_t(taken)}),
                          arrays.read(shares));
}

/// Weights (bytes, type): gate, up, down of `n` experts, `inner` wide, or gate and up together and down;
/// biases of the three, or none. ids, shares [tokens, taken]; scale [n].
auto experts(const std::string& kind, const F32& x, const std::vector<std::pair<U8, std::string>>& weights,
             int n, int64_t inner, const I32& ids, const F32& shares, const std::string& isa, int n_threads,
             const std::vector<F32>& biases, const std::optional<F32>& scale) {
    Arrays arrays(isa, n_threads);
    const Tensor in = arrays.of(x), out = arrays.zeros(in.rows, in.cols);
    const int64_t taken = int64_t(ids.size()) / std::max<int64_t>(in.rows, 1);
    const int last = int(weights.size()) - 1;
    if (last < 1 || last > 2 || int64_t(ids.size()) != in.rows * taken || shares.size() != ids.size())
        fail(ErrorCode::argument, "two or three weights, and ids and shares of every token are needed");
    for (size_t i = 0; i < ids.size(); ++i)
        if (ids.data()[i] < 0 || ids.data()[i] >= n) fail(ErrorCode::argument, "no expert ", ids.data()[i]);
    const auto weight = [&](int i, int64_t rows, int64_t cols) {
        return weight_of(arrays, weights[i].first, weights[i].second, rows, cols);
    };
    Experts all{.n = n,
                .gate = weight(0, (3 - last) * n * inner, in.cols),
                .up = last == 2 ? weight(1, n * inner, in.cols) : Tensor{},
                .down = weight(last, n * in.cols, inner)};
    if (scale) all.scale = arrays.of(*scale);
    if (biases.size() == 3) {
        all.gate_bias = arrays.of(biases[0]);
        all.up_bias = arrays.of(biases[1]);
        all.down_bias = arrays.of(biases[2]);
    }
    arrays->experts(require_activation(kind), all, in, arrays.put(ids.data(), DType::I32, in.rows, taken),
                    arrays.put(shares.data(), DType::F32, in.rows, taken), out);
    return arrays.read(out);
}

auto gate_heads(const F32& x, const F32& by, const std::string& isa) {
    Arrays arrays(isa);
    const Tensor out = arrays.of(x), gates = arrays.of(by);
    if (gates.rows != out.rows || out.cols % gates.cols) fail(ErrorCode::argument, "by has not heads of x");
    arrays->gate_heads(out, gates);
    return arrays.read(out);
}

auto unfold(const F32& x, int64_t width, int64_t stride, int64_t padding, int64_t rows,
            const std::string& isa) {
    Arrays arrays(isa);
    const Tensor in = arrays.of(x), out = arrays.zeros(rows, width * in.cols);
    arrays->unfold(in, stride, padding, out);
    return arrays.read(out);
}

auto rope(const F32& x, int n_heads, const F32& table, int n_rot, bool interleaved, const I32& positions,
          const std::string& isa) {
    Arrays arrays(isa);
    const Tensor out = arrays.of(x);
    arrays->rope(out, n_heads, {arrays.of(table), n_rot, interleaved}, arrays.of(positions));
    return arrays.read(out);
}

auto activate(const std::string& kind, const F32& x, const std::string& isa) {
    Arrays arrays(isa);
    const Tensor out = arrays.of(x);
    arrays->activate(require_activation(kind), out);
    return arrays.read(out);
}

auto gate(const std::string& kind, const F32& g, const F32& up, const std::string& isa) {
    Arrays arrays(isa);
    const Tensor out = arrays.of(g);
    arrays->gate(require_activation(kind), out, arrays.of(up));
    return arrays.read(out);
}

}  // namespace

std::shared_ptr<Backend> borrow_backend(const std::string& name, int n_threads) {
    static std::mutex mutex;
    // Never destroyed: a module's end is too late to join threads. Threads do not outlive a fork.
    using Key = std::tuple<pid_t, std::string, int, std::string>;
    static auto& idle = *new std::map<Key, std::vector<Backend*>>;
    const std::lock_guard lock(mutex);
    std::vector<Backend*>& same = idle[{getpid(), name, n_threads, to_text(cpu::chosen_access())}];
    std::unique_ptr<Backend> backend;
    if (same.empty()) {
        backend = open_backend(name, n_threads);
    } else {
        backend.reset(same.back());
        same.pop_back();
    }
    return {backend.release(), [&same](Backend* done) {
                const std::lock_guard lock(mutex);
                same.push_back(done);
            }};
}

void bind_ops(nb::module_& m) {
    using nb::arg;
    m.def("backends", &cpu::isa_names);
    m.def("unpack", &unpack, arg("type"), arg("bytes"), arg("n"), arg("isa"));
    m.def("repack", &repack, arg("type"), arg("bytes"));
    m.def("interleave", &interleave, arg("type"), arg("bytes"), arg("n"));
    m.def("narrow", &narrow, arg("type"), arg("x"), arg("isa"));
    m.def("linear", &linear, arg("x"), arg("weight"), arg("type"), arg("rows"), arg("bias").none(),
          arg("isa"), arg("n_threads") = 1);
    m.def("linear_together", &linear_together, arg("x"), arg("weights"), arg("isa"), arg("n_threads") = 1);
    m.def("linear_per_head", &linear_per_head, arg("x"), arg("weight"), arg("type"), arg("rows"),
          arg("n_heads"), arg("isa"), arg("n_threads") = 1, arg("group") = 1);
    m.def("gather", &gather, arg("table"), arg("type"), arg("rows"), arg("cols"), arg("ids"), arg("isa"));
    m.def("add", &add, arg("x"), arg("y"), arg("isa"));
    m.def("scale", &scale, arg("x"), arg("factor"), arg("isa"));
    m.def("clamp", &clamp, arg("x"), arg("limit"), arg("isa"));
    m.def("norm", &norm, arg("kind"), arg("x"), arg("weight").none(), arg("bias").none(), arg("eps"),
          arg("isa"));
    m.def("inverse_rms", &inverse_rms, arg("x"), arg("eps"), arg("isa"));
    m.def("multiply", &multiply, arg("x"), arg("y"), arg("isa"));
    m.def("route", &route, arg("scores"), arg("taken"), arg("renormalised"), arg("scale"), arg("isa"),
          arg("sigmoid") = false, arg("bias") = nb::none(), arg("groups") = std::pair(1, 1),
          arg("near") = 0.0f);
    m.def("experts", &experts, arg("kind"), arg("x"), arg("weights"), arg("n"), arg("inner"), arg("ids"),
          arg("shares"), arg("isa"), arg("n_threads") = 1, arg("biases") = std::vector<F32>{},
          arg("scale") = nb::none());
    m.def("gate_heads", &gate_heads, arg("x"), arg("by"), arg("isa"));
    m.def("unfold", &unfold, arg("x"), arg("width"), arg("stride"), arg("padding"), arg("rows"), arg("isa"));
    m.def("rope", &rope, arg("x"), arg("n_heads"), arg("table"), arg("n_rot"), arg("interleaved"),
          arg("positions"), arg("isa"));
    m.def("activate", &activate, arg("kind"), arg("x"), arg("isa"));
    m.def("gate", &gate, arg("kind"), arg("gate"), arg("up"), arg("isa"));
    bind_attention_ops(m);
}

}  // namespace slimrt
