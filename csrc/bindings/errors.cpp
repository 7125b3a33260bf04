// Error{code} -> the Python exception of python/slimrt/errors.py.
#include "bindings/bindings.h"
#include "core/error.h"

namespace slimrt {
namespace {

const char* exception_name(ErrorCode code) {
    switch (code) {
        case ErrorCode::format:
            return "ModelFormatError";
        case ErrorCode::unsupported:
            return "UnsupportedError";
        case ErrorCode::cache_unsupported:
            return "CacheUnsupportedError";
        case ErrorCode::wont_fit:
            return "WontFitError";
        case ErrorCode::context_overflow:
            return "ContextOverflowError";
        case ErrorCode::device:
            return "DeviceError";
        default:
            return nullptr;
    }
}

void translate(const std::exception_ptr& p, void*) {
    try {
        std::rethrow_exception(p);
    } catch (const Error& e) {
        const nb::object message = to_text(e.what());
        if (e.code == ErrorCode::argument) return PyErr_SetObject(PyExc_ValueError, message.ptr());
        if (e.code == ErrorCode::io) return PyErr_SetObject(PyExc_OSError, message.ptr());
        const nb::object type = nb::module_::import_("slimrt.errors").attr(exception_name(e.code));
        if (e.code == ErrorCode::wont_fit)
            PyErr_SetObject(type.ptr(), type(message, e.needed, e.available).ptr());
        else
            PyErr_SetObject(type.ptr(), message.ptr());
    }
}

}  // namespace

nb::object exception_of(const std::exception_ptr& error) {
    translate(error, nullptr);
    return nb::borrow(nb::python_error().value());
}

void bind_errors(nb::module_&) { nb::register_exception_translator(translate); }

}  // namespace slimrt
