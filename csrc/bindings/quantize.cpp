// slimrt._core.quantize: what the converter stores weights with.
#include "kernels/cpu/quantize.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>

#include "bindings/bindings.h"
#include "core/error.h"
#include "core/processors.h"

namespace slimrt {
namespace {

using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

/// The importance of each of `cols` columns; null: none is given.
const float* checked_importance(const std::optional<Vector>& importance, int64_t cols) {
    if (!importance) return nullptr;
    if (int64_t(importance->shape(0)) != cols)
        fail(ErrorCode::argument, "importance has ", importance->shape(0), " numbers for ", cols, " columns");
    const auto in_range = [](float w) { return w >= cpu::kLeastImportance && w <= cpu::kMostImportance; };
    if (!std::all_of(importance->data(), importance->data() + cols, in_range))
        fail(ErrorCode::argument, "importance must be from ", cpu::kLeastImportance, " to ",
             cpu::kMostImportance);
    return importance->data();
}

auto quantize(const std::string& type, const Matrix& x, int n_threads,
              const std::optional<Vector>& importance) {
    const DTypeInfo* info = find_dtype(type.c_str());
    if (!info) fail(ErrorCode::argument, "unknown element type '", type, "'");
    if (n_threads < 0) fail(ErrorCode::argument, "n_threads must not be negative");
    const int64_t rows = int64_t(x.shape(0)), cols = int64_t(x.shape(1));
    if (cols % info->block)
        fail(ErrorCode::argument, "rows of ", cols, " do not divide into blocks of ", info->block);
    const float* const of_columns = checked_importance(importance, cols);
    const size_t row = row_bytes(info->dtype, cols);
    std::vector<uint8_t> out(size_t(rows) * row);
    {
        nb::gil_scoped_release release;
        ThreadPool pool(n_threads ? n_threads : default_threads());
        cpu::quantize(info->dtype, x.data(), rows, cols, of_columns, out.data(), pool);
    }
    return numpy_array(std::move(out), {size_t(rows), row});
}

}  // namespace

void bind_quantize(nb::module_& m) {
    m.def("quantize", &quantize, nb::arg("type"), nb::arg("x"), nb::arg("n_threads") = 0,
          nb::arg("importance") = nb::none());
}

}  // namespace slimrt
