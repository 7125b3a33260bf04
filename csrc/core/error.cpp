#include "core/error.h"

#include <clocale>
#include <cstdio>

namespace slimrt {

void append(std::string& to, long long number) { to += std::to_string(number); }
void append(std::string& to, unsigned long long number) { to += std::to_string(number); }

void append(std::string& to, double number) {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%g", number);
    std::string text = digits;
    // A file's metadata is written by this, too: always with a point, whatever the host program's locale has.
    const std::string_view point = std::localeconv()->decimal_point;
    if (const size_t at = text.find(point); at != std::string::npos) text.replace(at, point.size(), ".");
    to += text;
}

}  // namespace slimrt
