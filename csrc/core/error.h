// The one exception type of the core. Thrown at the edges only (files, configuration, planner, allocation,
// API); kernels assert. bindings/errors.cpp maps each code to a Python exception.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace slimrt {

enum class ErrorCode {
    argument,           // ValueError
    format,             // ModelFormatError: the file is broken or not what it says
    io,                 // OSError
    unsupported,        // UnsupportedError: fine, but not by us (the message names what is)
    cache_unsupported,  // CacheUnsupportedError: this cache mode is not legal for this model
    wont_fit,           // WontFitError: `needed` and `available` are bytes
    context_overflow,   // ContextOverflowError
    device,             // DeviceError: the device failed at something it should be able to do
};

class Error : public std::runtime_error {
  public:
    Error(ErrorCode code, const std::string& message, uint64_t needed = 0, uint64_t available = 0)
        : std::runtime_error(message), code(code), needed(needed), available(available) {}

    ErrorCode code;
    uint64_t needed, available;  // bytes, for wont_fit
};

/// Joins its arguments with operator<<.
template <class... Args>
std::string concat(const Args&... args) {
    std::ostringstream out;
    (out << ... << args);
    return out.str();
}

/// Throws Error{code, concat(args...)}. A message says what, where, and what to do.
template <class... Args>
[[noreturn]] void fail(ErrorCode code, const Args&... args) {
    throw Error(code, concat(args...));
}

}  // namespace slimrt
