// The one exception type of the core. Thrown at the edges only (files, configuration, planner, allocation,
// API); kernels assert. bindings/errors.cpp maps each code to a Python exception.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>

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

/// A part of a message: a number or a character, or a text, which must outlive it. One type for all, since a
/// template for each combination of types would be 100 KB of code.
class MessagePart {
  public:
    MessagePart(const char* text) : kind_(Kind::terminated), text_(text) {}
    MessagePart(std::string_view text) : kind_(Kind::text), text_(text.data()), size_(text.size()) {}
    MessagePart(const std::string& text) : MessagePart(std::string_view(text)) {}
    MessagePart(char c) : kind_(Kind::character), character_(c) {}
    MessagePart(double number) : kind_(Kind::real), real_(number) {}  // six digits
    template <std::signed_integral Number>
    MessagePart(Number number) : kind_(Kind::integer), integer_(number) {}
    template <std::unsigned_integral Number>
    MessagePart(Number number) : kind_(Kind::natural), natural_(number) {}

    void append_to(std::string& message) const;

  private:
    enum class Kind : uint8_t { terminated, text, character, integer, natural, real } kind_;
    union {
        const char* text_;
        char character_;
        int64_t integer_;
        uint64_t natural_;
        double real_;
    };
    size_t size_;  // of a text that need not be terminated by 0
};

std::string concat(std::initializer_list<MessagePart> parts);
[[noreturn, gnu::cold]] void fail(ErrorCode code, std::initializer_list<MessagePart> parts);

/// Its arguments as one string.
template <class... Args>
[[gnu::always_inline]] inline std::string concat(const Args&... args) {
    return concat({MessagePart(args)...});
}

/// Throws Error{code, concat(args...)}. A message says what, where, and what to do.
template <class... Args>
[[noreturn, gnu::always_inline]] inline void fail(ErrorCode code, const Args&... args) {
    fail(code, {MessagePart(args)...});
}

}  // namespace slimrt
