// slimrt._core: the native core as Python sees it. Its contract is python/slimrt/_core.pyi.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "core/notes.h"
#include "core/processors.h"
#include "engine/engine.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/cublas_lt.h"

namespace slimrt {
namespace {

nb::dict cpu_info() {
    nb::dict out;
    out["isas"] = cpu::isa_names();
    out["isa"] = cpu::choose_isa("").name;
    out["default_threads"] = default_threads();
    out["cache_bytes"] = cache_bytes();
    out["access_kinds"] = cpu::access_kinds();
    return out;
}

nb::tuple devices_of_cuda() {
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

std::string access_text(const std::string& text) {
    return to_text(text.empty() ? cpu::chosen_access() : cpu::parse_access(text));
}

void set_access(const std::string& text) { cpu::set_access(cpu::parse_access(text)); }

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
    bind_sampler(m, ops);
    m.def("cpu_info", &cpu_info);
    m.def("access", &access_text, nb::arg("text") = "");
    m.def("set_access", &set_access, nb::arg("text"));
    m.def("cuda_devices", &devices_of_cuda);
    m.def("take_notes", &take_notes);
    m.def("look_for_cublas_lt", &look_for_cublas_lt, nb::arg("files"));
    m.def("cublas_lt_library", &cublas_lt_library);
    m.def("available_memory", &available_on, nb::arg("device") = "cpu");
    m.def("cache_types", &cache_type_list);
}
