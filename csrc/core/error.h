// The one exception type of the core. Thrown at the edges only (files, configuration, planner, allocation,
// API); kernels assert. bindings/errors.cpp maps each code to a Python exception.
#pragma once

#include <concepts>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace slimrt {

enum class ErrorCode {
    argument,           // ValueError
    format,             // ModelFormatError: the file is broken or not what it says
    io,                 // OSError
    unsupported,        // valid, but not supported (the message names what is)
    cache_unsupported,  // CacheUnsupportedError: this cache mode is not legal for this model
    wont_fit,           // WontFitError: `needed` and `available` are bytes
    context_overflow,   // ContextOverflowError
    device,             // the device failed at something it supports
};

class Error : public std::runtime_error {
  public:
    Error(ErrorCode code, const std::string& message, uint64_t needed = 0, uint64_t available = 0)
        : std::runtime_error(message), code(code), needed(needed), available(available) {}

    ErrorCode code;
    uint64_t needed, available;  // bytes, for wont_fit
};

// Appends a value to a message. Not by streams, which would add half a megabyte to a static executable.
inline void append(std::string& to, std::string_view text) { to += text; }
inline void append(std::string& to, char c) { to += c; }
void append(std::string& to, long long number);
void append(std::string& to, unsigned long long number);
void append(std::string& to, double number);  // six digits
template <std::integral Number>
void append(std::string& to, Number number) {
    append(to,
           static_cast<std::conditional_t<std::is_signed_v<Number>, long long, unsigned long long>>(number));
}

/// Its arguments as one string.
template <class... Args>
std::string concat(const Args&... args) {
    std::string out;
    (append(out, args), ...);
    return out;
}

/// Throws Error{code, concat(args...)}. A message says what, where, and what to do.
template <class... Args>
[[noreturn, gnu::cold]] void fail(ErrorCode code, const Args&... args) {
    throw Error(code, concat(args...));
}

}  // namespace slimrt
