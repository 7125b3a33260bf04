// What the parts of the Python module share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>

#include <exception>
#include <string_view>
#include <variant>
#include <vector>

#include "core/gguf.h"

namespace slimrt {

namespace nb = nanobind;

template <class T>
using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu>;

/// A new NumPy array of these dimensions that owns `data`.
template <class T>
nb::ndarray<nb::numpy, T> numpy_array(std::vector<T>&& data, std::initializer_list<size_t> shape) {
    auto* owner = new std::vector<T>(std::move(data));
    nb::capsule free(owner, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nb::ndarray<nb::numpy, T>(owner->data(), shape, free);
}

/// Text that may come from a file: bytes that are not UTF-8 become U+FFFD.
inline nb::object to_text(std::string_view text) {
    return nb::steal(PyUnicode_DecodeUTF8(text.data(), Py_ssize_t(text.size()), "replace"));
}

/// The Python exception of an error of the engine. Others, such as std::bad_alloc, are thrown.
nb::object exception_of(const std::exception_ptr& error);

/// A model file: an open one, or a path to open.
using FileOrPath = std::variant<GgufFile, std::string>;
inline GgufFile open_file(const FileOrPath& from) {
    const auto* file = std::get_if<GgufFile>(&from);
    return file ? *file : GgufFile::open(std::get<std::string>(from));
}

void bind_errors(nb::module_& m);
void bind_describe(nb::module_& m);
void bind_engine(nb::module_& m);
void bind_gguf(nb::module_& m);
void bind_ops(nb::module_& m);
void bind_quantize(nb::module_& m);
void bind_sampler(nb::module_& m, nb::module_& ops);
void bind_timing(nb::module_& m, nb::module_& ops);

}  // namespace slimrt
