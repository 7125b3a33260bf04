// slimrt._core.ops: what benchmarks time inside C++.
#include "bench/timing.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bench/tune.h"
#include "bindings/ops.h"
#include "core/error.h"
#include "core/gguf.h"
#include "core/processors.h"

namespace slimrt {
namespace {

DType type_of(const std::string& name) {
    const DTypeInfo* const info = find_dtype(name.c_str());
    if (!info) fail(ErrorCode::argument, "unknown element type '", name, "'");
    return info->dtype;
}

double read_bandwidth(int n_threads, int megabytes) {
    const nb::gil_scoped_release release;
    return bench::read_bandwidth(n_threads, megabytes);
}

std::vector<double> time_linear(const Array<const uint8_t>& weights, const std::string& type, int64_t rows,
                                int64_t cols, int64_t tokens, const std::string& isa, int n_threads,
                                int passes) {
    const bench::Matrices matrices{{weights.data(), weights.size()}, type_of(type), rows, cols};
    const nb::gil_scoped_release release;
    Arrays arrays(isa, n_threads);
    return bench::time_linear(arrays, matrices, tokens, n_threads, passes);
}

std::vector<double> time_copy(size_t bytes, int repetitions, int calls, const std::string& name) {
    const nb::gil_scoped_release release;
    Arrays arrays(name);
    return bench::time_copy(arrays, bytes, repetitions, calls);
}

double dot_peak(const std::string& type, const std::string& isa) {
    const nb::gil_scoped_release release;
    return bench::dot_peak(type_of(type), isa);
}

/// With a string for `best`, which parse_access() takes.
nb::dict tune(const std::string& kind, const std::string& isa, int n_threads, double seconds) {
    bench::Tuned found;
    {
        const nb::gil_scoped_release release;
        found = bench::tune(kind, isa, n_threads ? n_threads : default_threads(), seconds);
    }
    nb::dict out;
    out["best"] = to_text(found.best);
    out["gain"] = found.gain;
    out["read_share"] = found.read_share;
    return out;
}

double huge_page_gain(const GgufFile& file, int n_threads) {
    const nb::gil_scoped_release release;
    return bench::huge_page_gain(file.bytes(), n_threads ? n_threads : default_threads());
}

}  // namespace

void bind_timing(nb::module_& m, nb::module_& ops) {
    using nb::arg;
    m.def("read_bandwidth", &read_bandwidth, arg("n_threads") = 0, arg("megabytes") = 512);
    m.def("huge_page_gain", &huge_page_gain, arg("file"), arg("n_threads") = 0);
    m.def("tune", &tune, arg("kind"), arg("isa") = "", arg("n_threads") = 0, arg("seconds") = 0.2);
    ops.def("dot_peak", &dot_peak, arg("type"), arg("isa"));
    ops.def("time_copy", &time_copy, arg("bytes"), arg("repetitions"), arg("calls"), arg("isa"));
    ops.def("time_linear", &time_linear, arg("weights"), arg("type"), arg("rows"), arg("cols"), arg("tokens"),
            arg("isa"), arg("n_threads"), arg("passes"));
}

}  // namespace slimrt
