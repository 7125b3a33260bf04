// slimrt._core: the native core as Python sees it. Its contract is python/slimrt/_core.pyi.
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "core/error.h"
#include "core/gguf.h"
#include "core/thread_pool.h"
#include "engine/engine.h"
#include "kernels/cpu/cpu_backend.h"

namespace slimrt {
namespace {

nb::object to_python(const GgufValue& value) {
    if (const auto* array = std::get_if<GgufArray>(&value)) {
        nb::list list;
        for (const GgufValue& element : elements(*array)) list.append(to_python(element));
        return list;
    }
    if (const auto* text = std::get_if<std::string_view>(&value)) return to_text(*text);
    return std::visit(
        [](const auto& v) -> nb::object {
            using T = std::decay_t<decltype(v)>;
            if constexpr (std::is_arithmetic_v<T>) return nb::cast(v);
            return nb::none();
        },
        value);
}

const Tensor& find_tensor(const GgufFile& file, const std::string& name) {
    const auto it = file.tensors().find(name);
    if (it == file.tensors().end()) throw nb::key_error(name.c_str());
    return it->second;
}

auto read_tensor(const GgufFile& file, const std::string& name) {
    const Tensor& t = find_tensor(file, name);
    int n = 0;
    const cpu::Isa* isa = cpu::supported_isas(&n)[0];
    std::vector<float> out(t.rows * t.cols);
    {
        nb::gil_scoped_release release;
        for (int64_t r = 0; r < t.rows; ++r)
            isa->unpack(uint32_t(t.dtype), t.row(r), t.cols, out.data() + r * t.cols);
    }
    return numpy_array(std::move(out), {size_t(t.rows), size_t(t.cols)});
}

void bind_gguf(nb::module_& m) {
    nb::class_<GgufFile>(m, "GgufFile")
        .def(
            "__init__",
            [](GgufFile* self, const std::string& path) { new (self) GgufFile(GgufFile::open(path)); },
            nb::arg("path"))
        .def("keys",
             [](const GgufFile& f) {
                 std::vector<std::string> keys;
                 for (const auto& [key, value] : f.metadata()) keys.push_back(key);
                 return keys;
             })
        .def("value",
             [](const GgufFile& f, const std::string& key) {
                 const auto it = f.metadata().find(key);
                 if (it == f.metadata().end()) throw nb::key_error(key.c_str());
                 return to_python(it->second);
             })
        .def("tensors",
             [](const GgufFile& f) {
                 nb::dict out;
                 for (const auto& [name, t] : f.tensors())
                     out[name.c_str()] =
                         nb::make_tuple(dtype_info(t.dtype).name, nb::make_tuple(t.rows, t.cols));
                 return out;
             })
        .def("tensor_bytes",
             [](const GgufFile& f, const std::string& name) { return find_tensor(f, name).bytes(); })
        .def("read", &read_tensor)
        .def("require_unchanged", &GgufFile::require_unchanged)
        .def("bytes", [](const nb::handle& self) {
            const auto bytes = nb::cast<const GgufFile&>(self).bytes();
            return nb::ndarray<nb::numpy, const uint8_t>(bytes.data(), {bytes.size()}, self);
        });
}

nb::dict cpu_info() {
    int n = 0;
    const cpu::Isa* const* isas = cpu::supported_isas(&n);
    nb::list names;
    for (int i = 0; i < n; ++i) names.append(isas[i]->name);
    nb::dict out;
    out["isas"] = names;
    out["isa"] = cpu::choose_isa("").name;
    out["default_threads"] = default_threads();
    return out;
}

nb::tuple cuda() {
    std::string why_none;
    const std::vector<std::string> names = cuda_devices(&why_none);
    return nb::make_tuple(names, why_none);
}

nb::list cache_type_list() {
    int n = 0;
    const CacheType* const types = cache_types(&n);
    nb::list out;
    for (int i = 0; i < n; ++i) {
        nb::dict entry;
        entry["name"] = dtype_info(types[i].dtype).name;
        entry["bits"] = types[i].bits;
        entry["group"] = types[i].group;
        entry["scale_bytes"] = types[i].scale_bytes;
        out.append(entry);
    }
    return out;
}

}  // namespace
}  // namespace slimrt

NB_MODULE(_core, m) {
    using namespace slimrt;
    m.attr("__version__") = SLIMRT_VERSION;
    bind_errors(m);
    bind_gguf(m);
    bind_describe(m);
    bind_engine(m);
    bind_quantize(m);
    nb::module_ ops = m.def_submodule("ops", "Kernels over NumPy arrays, for tests and benchmarks.");
    bind_ops(ops);
    bind_timing(m, ops);
    m.def("cpu_info", &cpu_info);
    m.def("cuda_devices", &cuda);
    m.def("available_memory", &available_on, nb::arg("device") = "cpu");
    m.def("cache_types", &cache_type_list);
}
