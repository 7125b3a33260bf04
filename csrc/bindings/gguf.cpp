// Model files: metadata and tensors of a GGUF file, for Python.
#include "core/gguf.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "core/error.h"
#include "kernels/cpu/isa.h"

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

/// An array's numbers as NumPy has them, in the file's type; a copy, since they may be unaligned there.
nb::object numbers(const GgufArray& array) {
    static const nb::dlpack::dtype kTypes[] = {
        nb::dtype<uint8_t>(),
        nb::dtype<int8_t>(),
        nb::dtype<uint16_t>(),
        nb::dtype<int16_t>(),
        nb::dtype<uint32_t>(),
        nb::dtype<int32_t>(),
        nb::dtype<float>(),
        nb::dtype<bool>(),
        {},
        {},
        nb::dtype<uint64_t>(),
        nb::dtype<int64_t>(),
        nb::dtype<double>(),
    };  // by GGUF type
    auto* copy = new std::vector<std::byte>(array.data, array.data + array.bytes);
    nb::capsule free(copy, [](void* p) noexcept { delete static_cast<std::vector<std::byte>*>(p); });
    return nb::cast(
        nb::ndarray<nb::numpy>(copy->data(), {size_t(array.count)}, free, {}, kTypes[array.type]));
}

nb::object to_bytes(std::string_view text) { return nb::bytes(text.data(), text.size()); }

/// Lossless: strings become bytes, since they need not be UTF-8.
nb::object exactly(const GgufValue& value) {
    if (const auto* text = std::get_if<std::string_view>(&value)) return to_bytes(*text);
    const auto* array = std::get_if<GgufArray>(&value);
    if (!array) return to_python(value);
    if (array->type != kGgufString) return numbers(*array);
    nb::list list;
    for (const GgufValue& element : elements(*array))
        list.append(to_bytes(std::get<std::string_view>(element)));
    return list;
}

nb::dict fields(const GgufFile& file, const std::string& prefix) {
    nb::dict out;
    for (const GgufKey& key : file.keys()) {
        if (!key.name.starts_with(prefix)) continue;
        const GgufValue& value = file.metadata().find(key.name)->second;
        const auto* array = std::get_if<GgufArray>(&value);
        nb::object item = array ? nb::cast(array->type) : nb::none();
        out[key.name.c_str()] = nb::make_tuple(key.type, item, exactly(value));
    }
    return out;
}

nb::list tensor_list(const GgufFile& file) {
    nb::list out;
    for (const GgufTensorInfo& t : file.tensor_list())
        out.append(nb::make_tuple(t.name, uint32_t(t.type), nb::tuple(nb::cast(t.sizes)), t.position));
    return out;
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

}  // namespace

void bind_gguf(nb::module_& m) {
    nb::class_<GgufFile>(m, "GgufFile")
        .def(
            "__init__",
            [](GgufFile* self, const std::string& path, bool tensors, bool any_type) {
                const GgufPart part = any_type ? GgufPart::described : GgufPart::all;
                new (self) GgufFile(GgufFile::open(path, tensors ? part : GgufPart::metadata));
            },
            nb::arg("path"), nb::kw_only(), nb::arg("tensors") = true, nb::arg("any_type") = false)
        .def_prop_ro("path", &GgufFile::path)
        .def_prop_ro("paths", &GgufFile::paths)
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
        .def("fields", &fields, nb::arg("prefix") = "")
        .def("tensors",
             [](const GgufFile& f) {
                 nb::dict out;
                 for (const auto& [name, t] : f.tensors())
                     out[name.c_str()] =
                         nb::make_tuple(dtype_info(t.dtype).name, nb::make_tuple(t.rows, t.cols));
                 return out;
             })
        .def("tensor_list", &tensor_list)
        .def("tensor_bytes",
             [](const GgufFile& f, const std::string& name) { return find_tensor(f, name).bytes(); })
        .def("read", &read_tensor)
        .def("move_to_huge_pages", &GgufFile::move_to_huge_pages, nb::arg("first"), nb::arg("bytes"),
             nb::call_guard<nb::gil_scoped_release>())
        .def("require_unchanged", &GgufFile::require_unchanged)
        .def("bytes", [](const nb::handle& self) {
            const auto bytes = nb::cast<const GgufFile&>(self).bytes();
            return nb::ndarray<nb::numpy, const uint8_t>(bytes.data(), {bytes.size()}, self);
        });
}

}  // namespace slimrt
