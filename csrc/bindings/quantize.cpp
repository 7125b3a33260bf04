// slimrt._core.quantize: what the converter stores weights with.
#include "kernels/cpu/quantize.h"

#include <nanobind/stl/string.h>

#include "bindings/bindings.h"
#include "core/error.h"
#include "core/processors.h"

namespace slimrt {
namespace {

using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

auto quantize(const std::string& type, const Matrix& x, int n_threads) {
    const DTypeInfo* info = find_dtype(type.c_str());
    if (!info) fail(ErrorCode::argument, "unknown element type '", type, "'");
    if (n_threads < 0) fail(ErrorCode::argument, "n_threads must not be negative");
    const int64_t rows = int64_t(x.shape(0)), cols = int64_t(x.shape(1));
    if (cols % info->block)
        fail(ErrorCode::argument, "rows of ", cols, " do not divide into blocks of ", info->block);
    const size_t row = row_bytes(info->dtype, cols);
    std::vector<uint8_t> out(size_t(rows) * row);
    {
        nb::gil_scoped_release release;
        ThreadPool pool(n_threads ? n_threads : default_threads());
        cpu::quantize(info->dtype, x.data(), rows * cols, out.data(), pool);
    }
    return numpy_array(std::move(out), {size_t(rows), row});
}

}  // namespace

void bind_quantize(nb::module_& m) {
    m.def("quantize", &quantize, nb::arg("type"), nb::arg("x"), nb::arg("n_threads") = 0);
}

}  // namespace slimrt
