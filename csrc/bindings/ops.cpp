// slimrt._core.ops: single operations of the CPU backend over NumPy arrays, on a chosen ISA, so that tests
// and benchmarks reach every kernel.
#include "bindings/ops.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "core/error.h"
#include "kernels/cpu/isa.h"

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
    const auto backend = open_backend(isa, n_threads);
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
    const auto backend = open_backend(isa, n_threads);
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
    open_backend(isa)->norm(kind == "rms" ? NormKind::rms : NormKind::layer, view(x), view(weight),
                            view(bias), eps, out.tensor);
    return out.array();
}

auto inverse_rms(const F32& x, float eps, const std::string& isa) {
    Result out(view(x).rows, 1);
    open_backend(isa)->inverse_rms(view(x), eps, out.tensor);
    return out.array();
}

auto multiply(const F32& x, const F32& y, const std::string& isa) {
    Result out(view(x));
    if (view(y).rows != 1 || view(y).cols != out.tensor.cols)
        fail(ErrorCode::argument, "y is not a row of x");
    open_backend(isa)->multiply(out.tensor, view(y));
    return out.array();
}

auto unfold(const F32& x, int64_t width, int64_t stride, int64_t padding, int64_t rows,
            const std::string& isa) {
    Result out(rows, width * view(x).cols);
    open_backend(isa)->unfold(view(x), stride, padding, out.tensor);
    return out.array();
}

auto rope(const F32& x, int n_heads, const F32& table, int n_rot, bool interleaved, const I32& positions,
          const std::string& isa) {
    Result out(view(x));
    open_backend(isa)->rope(out.tensor, n_heads, {view(table), n_rot, interleaved}, view(positions));
    return out.array();
}

Activation parse_activation(const std::string& name) {
    const char* names[] = {"silu", "gelu_tanh", "gelu_erf", "relu", "tanh"};
    for (int i = 0; i < 5; ++i)
        if (name == names[i]) return Activation(i);
    fail(ErrorCode::argument, "unknown activation '", name, "'");
}

auto activate(const std::string& kind, const F32& x, const std::string& isa) {
    Result out(view(x));
    open_backend(isa)->activate(parse_activation(kind), out.tensor);
    return out.array();
}

auto gate(const std::string& kind, const F32& g, const F32& up, const std::string& isa) {
    Result out(view(g));
    open_backend(isa)->gate(parse_activation(kind), out.tensor, view(up));
    return out.array();
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
    m.def("inverse_rms", &inverse_rms, arg("x"), arg("eps"), arg("isa"));
    m.def("multiply", &multiply, arg("x"), arg("y"), arg("isa"));
    m.def("unfold", &unfold, arg("x"), arg("width"), arg("stride"), arg("padding"), arg("rows"), arg("isa"));
    m.def("rope", &rope, arg("x"), arg("n_heads"), arg("table"), arg("n_rot"), arg("interleaved"),
          arg("positions"), arg("isa"));
    m.def("activate", &activate, arg("kind"), arg("x"), arg("isa"));
    m.def("gate", &gate, arg("kind"), arg("gate"), arg("up"), arg("isa"));
    bind_attention_ops(m);
}

}  // namespace slimrt
