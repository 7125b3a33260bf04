#include "core/error.h"

#include <clocale>
#include <cstdio>

namespace slimrt {

/// A file's metadata is written by this, too: always with a point, whatever the host program's
/// locale has.
static std::string text_of(double number) {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%g", number);
    std::string text = digits;
    const std::string_view point = std::localeconv()->decimal_point;
    if (const size_t at = text.find(point); at != std::string::npos) text.replace(at, point.size(), ".");
    return text;
}

// Not by streams, which would add half a megabyte to a static executable.
void MessagePart::append_to(std::string& message) const {
    switch (kind_) {
        case Kind::terminated:
            message += text_;
            break;
        case Kind::text:
            message.append(text_, size_);
            break;
        case Kind::character:
            message += character_;
            break;
        case Kind::integer:
            message += std::to_string(integer_);
            break;
        case Kind::natural:
            message += std::to_string(natural_);
            break;
        case Kind::real:
            message += text_of(real_);
            break;
    }
}

std::string concat(std::initializer_list<MessagePart> parts) {
    std::string message;
    for (const MessagePart& part : parts) part.append_to(message);
    return message;
}

void fail(ErrorCode code, std::initializer_list<MessagePart> parts) { throw Error(code, concat(parts)); }

}  // namespace slimrt
